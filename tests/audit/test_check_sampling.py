"""The check of samples passes rules that draw as they are accounted and fails those that draw otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from subjects import failed

from privet import FixedSize, Partition, Poisson
from privet.audit.draws import check_sampling
from privet.noise import Source
from privet.sampling import Sample


@dataclass(frozen=True, kw_only=True)
class Shuffled(Poisson):
    """Accounted as a Poisson sample."""

    def _samples(self, *, size: int, source: Source, start: int, steps: int, **_: Any) -> Iterator[Sample]:
        order = np.argsort(source.words(size)).astype(np.int64)
        for step in range(start, start + steps):
            yield np.sort(order[step * self.batch : (step + 1) * self.batch])


@dataclass(frozen=True, kw_only=True)
class TooMany(Poisson):
    def _samples(self, *, size: int, records: int, source: Source, steps: int, **_: Any) -> Iterator[Sample]:
        for _step in range(steps):
            yield np.flatnonzero(source.coins(size, 1.1 * self.batch / records))


@dataclass(frozen=True, kw_only=True)
class Twice(Poisson):
    """Those who are in are in twice."""

    def _samples(self, **options: Any) -> Iterator[Sample]:
        for sample in super()._samples(**options):
            yield np.repeat(sample, 2)


@dataclass(frozen=True, kw_only=True)
class Lucky(Poisson):
    """The first record is in every step, and the last in none."""

    def _samples(self, *, size: int, **options: Any) -> Iterator[Sample]:
        for sample in super()._samples(size=size, **options):
            yield np.union1d(sample[sample < size - 1], [0])


@dataclass(frozen=True, kw_only=True)
class WithReplacement(FixedSize):
    def _samples(self, *, size: int, source: Source, steps: int, **_: Any) -> Iterator[Sample]:
        for _step in range(steps):
            yield np.sort(source.integers(self.batch, size))


@dataclass(frozen=True, kw_only=True)
class Sorted(Partition):
    """Each record once in an epoch, but who stands where depends on how many there are."""

    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]:
        words = Source("seeded", seed=int.from_bytes(epoch_key or b"", "big")).words(size)
        order, count = np.argsort(words), self.steps_per_epoch(records)
        for step in range(start, start + steps):
            yield order[step * size // count : (step + 1) * size // count]


@dataclass(frozen=True, kw_only=True)
class HalfRate(Poisson):
    """Drawn with rate q, accounted with q/2."""

    def _cost(self, records: int) -> dict[str, Any]:
        return {"kind": "poisson", "rate": self.batch / records / 2}


@dataclass(frozen=True, kw_only=True)
class TrueRate(Poisson):
    """The rate is that of the true number of records, which is not public."""

    def _samples(self, *, size: int, records: int, **options: Any) -> Iterator[Sample]:
        return super()._samples(size=size, records=size, **options)


@dataclass(frozen=True, kw_only=True)
class EverySecond(Poisson):
    """Each sample comes twice, with one between."""

    def _samples(self, *, steps: int, **options: Any) -> Iterator[Sample]:
        first, second, *_ = super()._samples(steps=max(2, steps), **options)
        for step in range(steps):
            yield (first, second)[step % 2]


@pytest.mark.parametrize("rule", [HalfRate(batch=6), TrueRate(batch=6), EverySecond(batch=6)], ids=repr)
def test_a_rate_or_an_order_that_is_not_the_accounted_one_fails(rule: Poisson) -> None:
    assert failed(check_sampling(rule, "add_remove", Source("seeded", seed=0)))


@pytest.mark.parametrize("batch", [1, 6, 64])
@pytest.mark.parametrize(
    ("rule", "relation"),
    [(Poisson, "add_remove"), (Poisson, "replace_one"), (FixedSize, "replace_one"), (Partition, "add_remove")],
)
def test_samples_that_are_drawn_as_accounted_pass(rule: Any, relation: Any, batch: int) -> None:
    for seed in range(2):
        checks = check_sampling(rule(batch=batch), relation, Source("seeded", seed=seed))
        assert not failed(checks), [check for check in checks if not check.holds]


@pytest.mark.parametrize(
    ("rule", "relation", "check"),
    [
        (Shuffled(batch=6), "add_remove", "sizes of samples vary as those of independent coins"),
        (Shuffled(batch=6), "add_remove", "records meet in steps 1 apart as often as accounted"),
        (TooMany(batch=6), "add_remove", "every record has the same rate"),
        (Twice(batch=6), "add_remove", "no record is twice in a sample"),
        (Lucky(batch=6), "add_remove", "every record has the same rate"),
        (WithReplacement(batch=6), "replace_one", "samples have the accounted size"),
        (Sorted(batch=6), "add_remove", "one record more moves no other"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_samples_that_are_drawn_otherwise_fail(rule: Any, relation: Any, check: str) -> None:
    for seed in range(3):
        assert check in failed(check_sampling(rule, relation, Source("seeded", seed=seed)))
