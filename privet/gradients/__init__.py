"""Per-record gradients: norms and weighted sums, one small function per type of layer."""

from .per_record import Dense, PerRecord, rule_for
from .recorder import Recorder

__all__ = ["Dense", "PerRecord", "Recorder", "rule_for"]
