"""A subject whose user checks the data first: records outside a range never reach the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from privet.audit.subject import Outcome, Record, Subject, Tape

LIMIT = 1e4


class Screened(Subject):
    """So that what is found is not only that infinite numbers stay infinite."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.name = subject, f"{subject.name}, inputs screened to ±{LIMIT:g}"
        self.base, self.relation, self.basis = subject.base, subject.relation, subject.basis
        self.noise_multiplier, self.delta = subject.noise_multiplier, subject.delta

    def step(self, sample: Sequence[Record], *, noise: bool) -> Outcome:
        return self.subject.step(_kept(sample), noise=noise)

    def gradient(self, record: Record) -> Callable[[Tensor], Tensor] | None:
        return self.subject.gradient(record)

    def train(
        self, samples: Sequence[Sequence[Record]], tape: Tape | None = None
    ) -> tuple[Tape, dict[str, Any]] | None:
        return self.subject.train([_kept(sample) for sample in samples], tape)


def _kept(sample: Sequence[Record]) -> list[Record]:
    return [record for record in sample if bool(torch.isfinite(record.x).all() and record.x.abs().max() <= LIMIT)]
