"""What an audit found: one line for each check, and the claim beside what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was measured against what is claimed; it holds or it does not."""

    name: str
    holds: bool
    measured: float | str | None = None
    bound: float | str | None = None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "holds": self.holds,
            "measured": _plain(self.measured),
            "bound": _plain(self.bound),
            "detail": self.detail,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of one subject. `claimed` and `lower_bound` are both an epsilon at the same `delta`.

    A lower bound below the claim proves nothing by itself: an audit can break a claim, and never prove it.
    """

    subject: str
    claimed: float
    lower_bound: float
    delta: float
    checks: list[Check]
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "holds": self.holds,
            "claimed": _plain(self.claimed),
            "lower_bound": _plain(self.lower_bound),
            "delta": self.delta,
            "checks": [check.to_json() for check in self.checks],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [f"{self.subject}: {'holds' if self.holds else 'BROKEN'}"]
        for check in self.checks:
            against = "" if check.bound is None else f" against {shown(check.bound)}"
            lines.append(
                f"  {'ok ' if check.holds else 'NO '} {check.name}: {shown(check.measured)}{against}"
                + (f" ({check.detail})" if check.detail and not check.holds else "")
            )
        return "\n".join(lines)


def _plain(value: float | str | None) -> float | str | None:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def shown(value: float | str | None) -> str:
    """A number as a person reads it."""
    return "–" if value is None else value if isinstance(value, str) else f"{value:.4g}"
