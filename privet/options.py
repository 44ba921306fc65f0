"""Fields of methods and losses that the command line shows as options."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field of a dataclass with the sentence that `--help` shows for it.

    `needs=("name", value, …)`: it says something only where that other option has one of these values.
    """
    return dataclasses.field(default=default, metadata={"help": help, **metadata})
