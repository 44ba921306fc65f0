"""Privet: train PyTorch models on sensitive records with differential privacy that you can check."""

from .errors import (
    BudgetExceeded,
    CheckpointError,
    ConfigError,
    LedgerError,
    PrivetError,
    Refused,
)
from .ledger import Ledger
from .methods import Method, method
from .methods.per_example import PerExample
from .planning import Budget, Plan, plan
from .run import Run
from .sampling import FixedSize, Partition, Poisson
from .step import Release, Step

__version__ = "0.1.0"

__all__ = [
    "Budget", "BudgetExceeded", "CheckpointError", "ConfigError", "FixedSize", "Ledger", "LedgerError", "Method",
    "Partition", "PerExample", "Plan", "Poisson", "PrivetError", "Refused", "Release", "Run", "Step", "method", "plan",
]  # fmt: skip
