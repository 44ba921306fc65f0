"""A paper's tables, ours beside theirs. Each module of this folder that has a `STUDY` is one paper, found by itself."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..errors import ConfigError
from .study import Row, Study, StudyProgress, read_results, run_study, summary, table

_modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in _modules if hasattr(module, "STUDY")}


def find_study(name: str) -> Study:
    """A study by its name on the command line: ``find_study("batch-clipping")``."""
    if name not in STUDIES:
        raise ConfigError(f"There is no study '{name}'. There are: {', '.join(sorted(STUDIES))}.")
    return STUDIES[name]


__all__ = [
    "STUDIES", "Row", "Study", "StudyProgress", "find_study", "read_results", "run_study", "summary", "table",
]  # fmt: skip
