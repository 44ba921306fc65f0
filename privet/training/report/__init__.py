"""report.html: one page about a finished run that can be read, printed and signed, and needs nothing beside it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from ...checkpoint import write_whole
from ...errors import ConfigError
from .page import page

__all__ = ["write_report"]


def write_report(folder: Path) -> Path:
    """Writes report.html from privacy.json, metrics.jsonl and config.toml, and from nothing else.

    Formal guarantee: it costs nothing, as all three are released already. The epsilon that it shows was computed again
    from the mechanism and the number of its uses; if privacy.json states less, there is no report.
    """
    statement = _object(_text(folder, "privacy.json"), folder / "privacy.json")
    metrics = _lines(_text(folder, "metrics.jsonl"), folder / "metrics.jsonl")
    config = _text(folder, "config.toml")
    try:
        tomllib.loads(config)
    except tomllib.TOMLDecodeError as error:
        raise _damaged(folder / "config.toml", error) from error
    try:
        content = page(statement, metrics, config)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{folder} does not hold what this version of Privet writes at the end of a run "
            f"({type(error).__name__}: {error}): write the report with the version that trained it."
        ) from error
    target = folder / "report.html"
    write_whole(target, lambda file: file.write(content.encode()))
    return target


def _text(folder: Path, name: str) -> str:
    if not (folder / name).is_file():
        raise ConfigError(
            f"There is no {name} in {folder}. A report is about a finished run: name the folder of one, or finish it "
            f"first (privet train --resume {folder})."
        )
    try:
        return (folder / name).read_text(encoding="utf-8")
    except ValueError as error:
        raise _damaged(folder / name, error) from error


def _object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(value, dict):
        raise _damaged(path, f"a {type(value).__name__} where an object should be")
    return value


def _lines(text: str, path: Path) -> list[dict[str, Any]]:
    if text and not text.endswith("\n"):
        raise _damaged(path, "its last line is not whole")
    return [_object(line, path) for line in text.splitlines()]


def _damaged(path: Path, why: object) -> ConfigError:
    return ConfigError(f"{path} is damaged or was not written to its end ({why}): restore it from a copy.")
