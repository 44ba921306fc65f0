"""The methods, one file each. A new file in this folder that registers a `Method` is found by itself."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from ..errors import ConfigError
from ..options import option
from .base import METHODS, Method, ParameterGroup, Query, Sensitivity, Session, Setting, register

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def method(name: str, **options: Any) -> Method:
    """A method by its name on the command line: ``method("per-example", clip=0.1)``."""
    if name not in METHODS:
        raise ConfigError(f"There is no method '{name}'. There are: {', '.join(sorted(METHODS))}.")
    try:
        return METHODS[name](**options)
    except TypeError as error:
        raise ConfigError(f"Method '{name}' does not take these options: {error}.") from None


__all__ = [
    "METHODS", "Method", "ParameterGroup", "Query", "Sensitivity", "Session", "Setting", "method", "option", "register",
]  # fmt: skip
