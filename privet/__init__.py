"""Privet: train PyTorch models on sensitive records with differential privacy that you can check."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import BudgetExceeded, CheckpointError, ConfigError, LedgerError, PrivetError, Refused

if TYPE_CHECKING:
    from . import audit as audit
    from . import losses as losses
    from . import nn as nn
    from .estimators import PrivateClassifier, PrivateRegressor
    from .ledger import Ledger
    from .methods import Method, method
    from .methods.backprop import Backprop
    from .methods.batch import Batch
    from .methods.clipless import Clipless
    from .methods.layerwise import Layerwise
    from .methods.per_example import PerExample
    from .methods.ternary import Ternary
    from .planning import Budget, Plan, plan
    from .postprocess import Denoise
    from .run import Run
    from .sampling import FixedSize, Partition, Poisson
    from .step import Release, Step

__version__ = "0.1.0"

# Where each public name lives. Modules are loaded when a name is first used, as torch takes seconds.
_HOMES = {
    "PrivateClassifier": ".estimators",
    "PrivateRegressor": ".estimators",
    "Ledger": ".ledger",
    "Method": ".methods",
    "method": ".methods",
    "Backprop": ".methods.backprop",
    "Batch": ".methods.batch",
    "Clipless": ".methods.clipless",
    "Layerwise": ".methods.layerwise",
    "PerExample": ".methods.per_example",
    "Ternary": ".methods.ternary",
    "Budget": ".planning",
    "Plan": ".planning",
    "plan": ".planning",
    "Denoise": ".postprocess",
    "Run": ".run",
    "FixedSize": ".sampling",
    "Partition": ".sampling",
    "Poisson": ".sampling",
    "Release": ".step",
    "Step": ".step",
}

_PARTS = ("audit", "losses", "nn")
"""Reached as privet.nn, but not in __all__: nn would hide torch's."""

__all__ = [
    "Backprop",
    "Batch",
    "Budget",
    "BudgetExceeded",
    "CheckpointError",
    "Clipless",
    "ConfigError",
    "Denoise",
    "FixedSize",
    "Layerwise",
    "Ledger",
    "LedgerError",
    "Method",
    "Partition",
    "PerExample",
    "Plan",
    "Poisson",
    "PrivateClassifier",
    "PrivateRegressor",
    "PrivetError",
    "Refused",
    "Release",
    "Run",
    "Step",
    "Ternary",
    "method",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'privet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", *_PARTS]
