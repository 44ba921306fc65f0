"""Per-record gradients: norms and weighted sums, one small function per type of layer.

A new file in this folder that registers a rule is found by itself.
"""

import pkgutil
from importlib import import_module

from .per_record import Dense, PerRecord, rule_for
from .recorder import Recorder

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Dense", "PerRecord", "Recorder", "rule_for"]
