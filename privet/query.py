"""Noisy sums over all records at once: bound → record → add noise, without a sample and without a model.

For statistics that a model needs before it is trained. `Run.query` puts these parts together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .accounting import Mechanism, Relation
from .errors import ConfigError, Refused
from .methods import Query, Sensitivity
from .noise import Source
from .probe import made_up
from .sampling import Sample
from .step import Rules, noise_stds

Vectors = Callable[[Any], Sequence[Tensor]]
"""For a batch, one or more tensors (records, size), each row computed from its record alone."""


class PlannedQueries:
    """The queries that a run was made with, by noise multiplier: what each costs, and how many are still to come."""

    def __init__(self, noises: Sequence[float], relation: Relation, source: Source) -> None:
        self.mechanisms = {noise: _mechanism(noise, relation, source) for noise in noises}
        self.cost = Counter(self.mechanisms[noise] for noise in noises)
        """How often each mechanism is paid for, all in all."""
        self._left = Counter(noises)

    def refuse_more(self, noise: float) -> None:
        if self._left[noise] <= 0:
            raise Refused(
                f"No further query with noise {noise!r} was planned, and the budget is shared out: name each one's "
                "noise when the run is made, Run(…, queries=[…])."
            )

    def take(self, noise: float) -> None:
        self._left[noise] -= 1


def _mechanism(noise: float, relation: Relation, source: Source) -> Mechanism:
    if not (isinstance(noise, int | float) and 0 < noise < math.inf):
        raise ConfigError(f"queries must name positive noise multipliers, and one is {noise!r}.")
    return Mechanism(kind="gaussian", noise_multiplier=noise, relation=relation, discrete=source.level == "exact")


def check_bounds(bounds: Sequence[float]) -> None:
    if not all(0 < bound < math.inf for bound in bounds):
        raise ConfigError(f"bounds must be positive numbers, and are {list(bounds)!r}.")


@torch.no_grad()
def refuse_mixed(vectors: Vectors, items: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
    """Rule 6, on records made up after these: a record's vectors are the same, whoever else is in its batch."""
    if not items:
        return
    records = [made_up(items, slot) for slot in range(3)]
    for batch in (records, [*records[:2], made_up(items, 3, wild=True)]):
        together = vectors(collate(batch))
        for i, record in enumerate(records[:2] if batch is not records else records):
            for part, own in zip(together, vectors(collate([record])), strict=True):
                if len(part) != len(batch) or len(own) != 1 or not _close(part[i], own[0]):
                    raise Refused(
                        "The vector of one record changes with the others in its batch: compute each from its record "
                        "alone."
                    )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6, equal_nan=True)


def record_shares(records: int, users: Sequence[Sample] | None) -> Tensor:
    """What each record's vector counts: 1, or 1/n where its user has n records."""
    counted = torch.ones(records, dtype=torch.float64)
    for positions in users or ():
        counted[torch.from_numpy(positions)] = 1 / len(positions)
    return counted


@torch.no_grad()
def bounded_sums(vectors: Vectors, bounds: Sequence[float], loader: DataLoader[Any], shares: Tensor) -> list[Query]:
    """Formal guarantee: one record (or user) adds at most its bound to each sum, in L2 norm and up to rounding."""
    assert loader.batch_size is not None
    totals: list[Tensor] = []
    for batch, share in zip(loader, torch.split(shares, loader.batch_size), strict=True):
        rows = [part.cpu().double() for part in vectors(batch)]
        if len(rows) != len(bounds) or any(part.dim() != 2 or len(part) != len(share) for part in rows):
            raise Refused(
                f"A query with {len(bounds)} bounds over {len(share)} records needs as many tensors (records, "
                f"size), and got {[tuple(part.shape) for part in rows]}."
            )
        if totals and [len(total) for total in totals] != [part.shape[1] for part in rows]:
            raise Refused(
                "The vectors of a query change their size from one batch of records to the next: they must have "
                "one size for all, whatever the records are."
            )
        finite = torch.stack([part.isfinite().all(1) for part in rows]).all(0).unsqueeze(1)
        parts = [share @ torch.where(finite, _clipped(p, bound), 0.0) for p, bound in zip(rows, bounds, strict=True)]
        totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else parts
    return [
        Query(f"query {i}", total, Sensitivity.of_contribution(bound))
        for i, (total, bound) in enumerate(zip(totals, bounds, strict=True))
    ]


def _clipped(rows: Tensor, bound: float) -> Tensor:
    """Each row shortened to norm `bound` where it is longer; zero where it is too long for a finite norm."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.where(norms.isfinite(), rows * (bound / norms).clamp(max=1.0), 0.0)


def release_sums(
    sums: Sequence[Query], rules: Rules, source: Source, record: Callable[[], None]
) -> list[tuple[Tensor, float]]:
    """Each sum with noise, and the standard deviation of it. `record` pays for all of them as ONE mechanism."""
    stds = noise_stds(sums, rules, source)
    record()  # durably, before anything is drawn
    return [(source.add_noise(query.total, std), std) for query, std in zip(sums, stds, strict=True)]
