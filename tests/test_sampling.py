"""Each rule draws what the accountant assumes, and no step is lost between the sampler and the loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, Dataset

from privet.accounting import Mechanism
from privet.errors import ConfigError, PrivetError
from privet.noise import Source
from privet.sampling import Chunk, ChunkSampler, FixedSize, Partition, Poisson, Sample, SamplingRule, steps

UNLIKELY = 1e-7
RULES = [Poisson(batch=10), FixedSize(batch=10), Partition(batch=10)]
KEY = bytes(range(32))


def source(seed: int = 1) -> Source:
    return Source("seeded", seed=seed)


def membership(
    rule: SamplingRule, size: int, records: int, count: int, stream: Source | None = None
) -> np.ndarray[Any, Any]:
    """One row per step, one column per record."""
    rows = np.zeros((count, size), dtype=bool)
    for row, sample in zip(rows, rule.draw(size, records, stream or source(), steps=count), strict=True):
        row[sample] = True
    return rows


# --- Poisson ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [150, 200, 260])
def test_poisson_rate_comes_from_the_public_number_alone(size: int) -> None:
    """The true number of records differs from the public one, and the rate must not follow it."""
    rows = membership(Poisson(batch=20), size, 200, 3000)
    assert stats.binomtest(int(rows.sum()), rows.size, 20 / 200).pvalue > UNLIKELY
    for record in range(0, size, 10):
        assert stats.binomtest(int(rows[:, record].sum()), len(rows), 0.1).pvalue > UNLIKELY


def check_independent(rows: np.ndarray[Any, Any], rate: float) -> None:
    """Pairs of records, the sizes of samples, and steps after one another."""
    count, size = rows.shape
    for i, j in [(0, 1), (3, size - 1), (size // 2, size // 2 + 1)]:
        both = int((rows[:, i] & rows[:, j]).sum())
        assert stats.binomtest(both, count, rate**2).pvalue > UNLIKELY
    spread = rows.sum(axis=1).var(ddof=1) / (size * rate * (1 - rate))
    assert abs(spread - 1) < 5.5 * math.sqrt(2 / count)
    again = int((rows[1:] & rows[:-1]).sum())
    assert abs(again - size * (count - 1) * rate**2) < 6 * math.sqrt(size * (count - 1)) * rate


def test_poisson_coins_are_independent() -> None:
    check_independent(membership(Poisson(batch=20), 100, 100, 4000), 0.2)


def test_the_check_of_independence_sees_fixed_sizes_and_shuffles() -> None:
    stream = source()
    for wrong in (FixedSize(batch=20), Partition(batch=20)):
        rows = np.concatenate([membership(wrong, 100, 100, 5, stream) for _ in range(800)])
        with pytest.raises(AssertionError):
            check_independent(rows, 0.2)


# --- Fixed size ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [7, 33])
def test_fixed_size_is_exact_and_uniform(batch: int) -> None:
    rows = membership(FixedSize(batch=batch), 40, 40, 4000)
    assert (rows.sum(axis=1) == batch).all()
    for record in range(40):
        assert stats.binomtest(int(rows[:, record].sum()), 4000, batch / 40).pvalue > UNLIKELY
    pair = batch * (batch - 1) / (40 * 39)
    assert stats.binomtest(int((rows[:, 0] & rows[:, 39]).sum()), 4000, pair).pvalue > UNLIKELY


def test_fixed_size_needs_replace_one_and_the_true_number() -> None:
    with pytest.raises(ConfigError, match="replace_one"):
        FixedSize(batch=5).check(100, "add_remove")
    FixedSize(batch=5).check(100, "replace_one")
    with pytest.raises(ConfigError, match="the true number"):
        next(FixedSize(batch=5).draw(90, 100, source()))


# --- Partition ----------------------------------------------------------------------------------------------


def batch_numbers(samples: list[Sample], size: int) -> np.ndarray[Any, Any]:
    numbers = np.full(size, -1)
    for number, sample in enumerate(samples):
        numbers[sample] = number
    return numbers


@pytest.mark.parametrize("size", [0, 1, 95, 100, 130])
def test_partition_has_each_record_once(size: int) -> None:
    rule = Partition(batch=10)
    samples = list(rule.draw(size, 100, source(), epoch_key=KEY))
    assert len(samples) == rule.steps_per_epoch(100) == 10
    assert sorted(np.concatenate(samples).tolist()) == list(range(size))


def check_nobody_moves(draw: Any, size: int) -> None:
    """Without its last record, the data set keeps every other record in its batch."""
    full, less = batch_numbers(draw(size), size), batch_numbers(draw(size - 1), size - 1)
    assert np.array_equal(full[:-1], less)


@pytest.mark.parametrize("records", [100, 1000, 999])
def test_one_record_less_moves_no_other(records: int) -> None:
    rule = Partition(batch=7)
    for size in (records, records + 13, 50):
        check_nobody_moves(lambda n: list(rule.draw(n, records, source(), epoch_key=KEY)), size)


def test_the_check_of_movement_sees_shuffled_chunks() -> None:
    """A shuffle cut into consecutive chunks shifts the others, and so does division by the true size."""

    def shuffled(size: int) -> list[Sample]:
        return np.array_split(np.argsort(source().words(size)), 10)

    def by_true_size(size: int) -> list[Sample]:
        return list(Partition(batch=7).draw(size, size, source(), epoch_key=KEY))

    for wrong in (shuffled, by_true_size):
        with pytest.raises(AssertionError):
            check_nobody_moves(wrong, 102)


def test_partition_numbers_are_uniform_and_fresh_each_epoch() -> None:
    rule, stream = Partition(batch=100), source()
    first = list(rule.draw(10_000, 10_000, stream))
    second = list(rule.draw(10_000, 10_000, stream))
    assert stats.chisquare([len(sample) for sample in first]).pvalue > UNLIKELY
    same = int((batch_numbers(first, 10_000) == batch_numbers(second, 10_000)).sum())
    assert stats.binomtest(same, 10_000, 1 / 100).pvalue > UNLIKELY


def test_partition_resumes_in_the_middle_of_an_epoch() -> None:
    rule = Partition(batch=10)
    key = rule.epoch_key(source())
    assert len(key) == 32
    whole = list(rule.draw(100, 100, source(2), epoch_key=key))
    rest = list(rule.draw(100, 100, source(3), epoch_key=key, start=4))
    assert [s.tolist() for s in rest] == [s.tolist() for s in whole[4:]]
    two = list(rule.draw(100, 100, source(3), epoch_key=key, start=4, steps=2))
    assert [s.tolist() for s in two] == [s.tolist() for s in whole[4:6]]


def test_partition_refuses_what_is_not_an_epoch() -> None:
    with pytest.raises(ConfigError, match="10 steps"):
        next(Partition(batch=10).draw(100, 100, source(), steps=11))
    with pytest.raises(ConfigError, match="32"):
        next(Partition(batch=10).draw(100, 100, source(), epoch_key=b"short"))


# --- All rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_public_facts(rule: SamplingRule) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.batch = 3  # type: ignore[misc]
    assert rule.steps_per_epoch(104) == 10
    assert len(list(rule.draw(104, 104, source()))) == 10
    assert len(list(rule.draw(104, 104, source(), start=4, steps=3))) == 3


@pytest.mark.parametrize("rule", [Poisson, FixedSize, Partition])
def test_impossible_batches_are_refused(rule: type[SamplingRule]) -> None:
    for batch in (0, -3, 2.5, True):
        with pytest.raises(ConfigError, match="batch is"):
            rule(batch=batch)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch is 11, more than the 10 records"):
        rule(batch=11).check(10, "replace_one")
    with pytest.raises(ConfigError, match="'swap'"):
        rule(batch=1).check(10, "swap")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [Poisson(batch=5), FixedSize(batch=5)])
def test_samples_are_fresh_on_resume(rule: SamplingRule) -> None:
    """Nothing to store, and a new source at the same position draws other records."""
    assert rule.epoch_key(Source()) is None
    one, two = ([s.tolist() for s in rule.draw(50, 50, Source(), start=2)] for _ in range(2))
    assert one != two


def test_units_that_steps_cost() -> None:
    assert Poisson(batch=10).units(25, 100) == 25
    assert FixedSize(batch=10).units(25, 100) == 25
    assert [Partition(batch=10).units(n, 100) for n in (0, 1, 10, 11, 20)] == [0, 1, 1, 2, 2]


def test_what_the_noise_multiplier_is_measured_in() -> None:
    assert [r.sensitivity_basis("add_remove") for r in RULES] == ["add_remove", "replace_one", "add_remove"]
    assert [r.sensitivity_basis("replace_one") for r in RULES] == ["add_remove", "replace_one", "replace_one"]


def test_what_the_accountant_is_told() -> None:
    common: dict[str, Any] = {"noise_multiplier": 1.5, "relation": "replace_one"}
    given = common | {"noise_multiplier": np.float32(1.5)}  # must arrive as a float
    told = [rule.mechanism(records=1000, **given) for rule in RULES]
    assert told == [
        Mechanism(kind="poisson", rate=0.01, **common),
        Mechanism(kind="fixed_size", records=1000, batch=10, **common),
        Mechanism(kind="gaussian", **common),
    ]
    assert all(type(mechanism.noise_multiplier) is float for mechanism in told)
    for rule in (Poisson(batch=10), Partition(batch=10)):
        assert rule.mechanism(records=1000, noise_multiplier=1.0, relation="add_remove", discrete=True).discrete
    with pytest.raises(ConfigError, match="replace_one"):
        FixedSize(batch=10).mechanism(records=100, noise_multiplier=1.0, relation="add_remove")


# --- From samples to physical chunks and back ---------------------------------------------------------------


class Squares(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index, "square": index**2}


def collate(items: list[dict[str, int]]) -> tuple[list[int], torch.Tensor]:
    return [item["index"] for item in items], torch.tensor([item["square"] for item in items])


def arrays(*sizes: int) -> list[Sample]:
    """Samples of these sizes, no record twice."""
    ends = np.cumsum([0, *sizes])
    return [np.arange(a, b) for a, b in pairwise(ends)]


EMPTIES = [
    [5, 3, 8],
    [0, 5, 3],
    [0, 0, 5, 0, 0, 3, 8],
    [5, 0],
    [5, 9, 0, 0],
    [0, 0, 0],
    [0],
    [],
    [4, 0, 4, 0, 4],
    [20, 0, 1],
]


@pytest.mark.parametrize("sizes", EMPTIES)
@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
def test_every_step_gets_its_own_records(sizes: list[int], chunk: int | None) -> None:
    samples = arrays(*sizes)
    sampler = ChunkSampler(iter(samples), chunk)
    loader: DataLoader[Any] = DataLoader(Squares(), batch_sampler=sampler, collate_fn=collate)
    seen = []
    for step in steps(iter(loader), sampler):
        records: list[int] = []
        for (indices, squares), piece in step:
            assert len(indices) == piece.size == len(squares)
            assert chunk is None or 1 <= piece.size <= chunk
            records += indices
        seen.append(records)
    assert seen == [sample.tolist() for sample in samples]
    assert not sampler.boundaries


@pytest.mark.parametrize("sizes", [[0, 7, 0, 0, 3, 30, 0], [0, 0], [1] * 12])
def test_workers_that_run_ahead(sizes: list[int]) -> None:
    sampler = ChunkSampler(arrays(*sizes), 3)
    loader: DataLoader[Any] = DataLoader(Squares(), batch_sampler=sampler, collate_fn=collate, num_workers=2)
    seen = [[i for (indices, _), _ in step for i in indices] for step in steps(iter(loader), sampler)]
    assert seen == [sample.tolist() for sample in arrays(*sizes)]


def test_nothing_is_drawn_before_it_is_asked_for() -> None:
    drawn = []

    def lazily() -> Iterator[Sample]:
        for number, sample in enumerate(arrays(5, 0, 5, 5)):
            drawn.append(number)
            yield sample

    sampler = ChunkSampler(lazily(), 2)
    loader: DataLoader[Any] = DataLoader(Squares(), batch_sampler=sampler)
    iterator = steps(iter(loader), sampler)
    assert drawn == []
    assert len(list(next(iterator))) == 3
    assert drawn == [0]
    assert list(next(iterator)) == []
    assert drawn == [0, 1, 2]  # past an empty sample, only the next chunk can be waited for


def test_chunks_that_are_left_do_not_reach_the_next_step() -> None:
    sampler = ChunkSampler(arrays(6, 6), 2)
    loader: DataLoader[Any] = DataLoader(Squares(), batch_sampler=sampler, collate_fn=collate)
    iterator = steps(iter(loader), sampler)
    next(next(iterator))
    assert next(next(iterator))[0][0] == [6, 7]


def test_a_loader_that_loses_chunks_is_found() -> None:
    sampler = ChunkSampler(arrays(6), 2)
    lossy = (batch for number, batch in enumerate(sampler) if number != 1)
    with pytest.raises(PrivetError, match="every chunk"):
        [list(step) for step in steps(lossy, sampler)]


def test_chunk_sizes_and_units() -> None:
    """No chunk spans two units of a method, and an empty unit has none."""

    def odd_and_even(sample: Sample) -> list[Sample]:
        return [sample[sample % 2 == 1], sample[sample % 2 == 0]]

    sampler = ChunkSampler(arrays(9, 0, 1), 2, cut=odd_and_even)
    chunks = list(sampler)
    assert chunks == [[1, 3], [5, 7], [0, 2], [4, 6], [8], [9]]

    def end(size: int, last: bool) -> Chunk:
        return Chunk(size=size, last_of_unit=last)

    assert list(sampler.boundaries) == [
        [end(2, False), end(2, True), end(2, False), end(2, False), end(1, True)],
        [],
        [end(1, True)],
    ]


def test_boundaries_come_before_the_chunks() -> None:
    sampler = ChunkSampler(arrays(0, 5, 2), 2)
    chunks = iter(sampler)
    next(chunks)
    assert [[c.size for c in step] for step in sampler.boundaries] == [[], [2, 2, 1]]


def test_impossible_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk is 0"):
        ChunkSampler(arrays(3), 0)
