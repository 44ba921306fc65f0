"""Every error that Privet raises on purpose. Each message says what is wrong and what to do."""

from __future__ import annotations


class PrivetError(Exception):
    """Base of all errors raised on purpose; the command line shows the message and exits with code 2."""


class ConfigError(PrivetError):
    """An option, a file or a combination of them that cannot be used as given."""


class Refused(PrivetError):
    """A model, loss or optimizer that cannot be trained privately as it is."""


class BudgetExceeded(PrivetError):
    """The next step would cost more than the budget allows, so it was not taken."""


class LedgerError(PrivetError):
    """A ledger that is missing, damaged or not the one that belongs to this data."""


class CheckpointError(PrivetError):
    """A checkpoint that is missing, damaged or does not fit this run."""
