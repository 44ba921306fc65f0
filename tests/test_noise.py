"""The noise has its stated distribution, is never repeated, and is shared out as the accountant assumes."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privet import noise
from privet.errors import ConfigError, PrivetError
from privet.noise import Level, Source, allocate, effective_multiplier, exact_sensitivity, exact_std

LEVELS: list[Level] = ["seeded", "system", "exact"]
UNLIKELY = 1e-7  # what a p-value must stay above


def make(level: Level = "seeded", seed: int = 1) -> Source:
    return Source(level, seed=seed if level == "seeded" else None)


def check_normal(sample: npt.NDArray[np.float64]) -> None:
    """Scale by chi-square, shape by Kolmogorov-Smirnov, mean, and the tails by their counts."""
    n = len(sample)
    scale = stats.chi2(n).cdf(float(np.sum(sample**2)))
    assert UNLIKELY < scale < 1 - UNLIKELY
    assert stats.kstest(sample, "norm").pvalue > UNLIKELY
    assert abs(sample.mean()) * math.sqrt(n) < 5.3
    for cut in (2.0, 3.0, 4.0):
        for tail in (sample > cut, sample < -cut):
            assert stats.binomtest(int(tail.sum()), n, stats.norm.sf(cut)).pvalue > UNLIKELY


# --- The stream ---------------------------------------------------------------------------------------------


def test_seeded_is_reproducible_and_needs_a_seed() -> None:
    assert np.array_equal(make(seed=3).words(1000), make(seed=3).words(1000))
    assert not np.array_equal(make(seed=3).words(1000), make(seed=4).words(1000))
    assert torch.equal(make(seed=3).gaussian(999), make(seed=3).gaussian(999))
    with pytest.raises(ConfigError, match="needs a whole number"):
        Source("seeded")


@pytest.mark.parametrize("level", ["system", "exact"])
def test_secure_levels_take_no_seed(level: Level) -> None:
    with pytest.raises(ConfigError, match="takes no seed"):
        Source(level, seed=1)


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mersenne'"):
        Source("mersenne")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["system", "exact"])
def test_no_word_comes_twice(level: Level) -> None:
    """Neither within a source, across its internal buffers, nor between sources."""
    one, two = Source(level), Source(level)
    drawn = np.concatenate([one.words(30_001), one.words(3), two.words(30_000), one.words(30_000)])
    assert len(np.unique(drawn)) == len(drawn)


def test_words_are_one_stream_whatever_the_pieces() -> None:
    pieces = make()
    joined = np.concatenate([pieces.words(n) for n in (1, 0, 7, 20_000, 3)])
    assert np.array_equal(joined, make().words(20_011))


def _words(source: Source) -> bytes:
    return source.words(4).tobytes()


def _noise(source: Source) -> bytes:
    return source.add_noise(torch.zeros(4), 1.0).numpy().tobytes()


@pytest.mark.parametrize(("level", "draw"), [("system", _words), ("exact", _words), ("system", _noise)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_another_stream(level: Level, draw: Callable[[Source], bytes]) -> None:
    source = Source(level)
    draw(source)
    drawn = []
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, draw(source))
            os._exit(0)
        os.waitpid(child, 0)
        drawn.append(np.frombuffer(os.read(reader, 32), dtype=np.uint64))
        os.close(reader)
        os.close(writer)
    drawn.append(np.frombuffer(draw(source), dtype=np.uint64))
    assert len(np.unique(np.concatenate(drawn))) == 12


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_source_cannot_be_copied(level: Level, duplicate: object) -> None:
    with pytest.raises(ConfigError, match="same noise twice"):
        duplicate(make(level))  # type: ignore[operator]


DRAWS: dict[str, Callable[[Source], object]] = {
    "words": lambda source: source.words(3),
    "noise": lambda source: source.add_noise(torch.zeros(3), 1.0),
    "noise in C": lambda source: source.add_noise(torch.zeros(3), 1.0, out=torch.empty(3)),
    "normals": lambda source: source.gaussian(3),
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_two_threads_at_once_are_refused(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would find the same words in the memory that they share."""
    source, said = Source(), []
    fill = Source._fill

    def other() -> None:
        with pytest.raises(PrivetError, match="Two threads draw from one source"):
            DRAWS[second](source)
        said.append("no")

    def while_filling(self: Source, *args: Any) -> None:
        monkeypatch.setattr(Source, "_fill", fill)
        fill(self, *args)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    monkeypatch.setattr(Source, "_fill", while_filling)
    DRAWS[first](source)
    assert said == ["no"]
    DRAWS[second](source)


def test_the_key_is_not_kept() -> None:
    for value in vars(Source()).values():
        assert not isinstance(value, bytes | bytearray)


def test_uniforms_lie_in_the_half_open_interval() -> None:
    class Extremes(Source):
        def words(self, count: int) -> npt.NDArray[np.uint64]:
            return np.array([0, 2**64 - 1], dtype=np.uint64)

    assert Extremes().uniforms(2).tolist() == [2.0**-53, 1.0]
    assert stats.kstest(make().uniforms(100_000), "uniform").pvalue > UNLIKELY


@pytest.mark.parametrize("probability", [1e-4, 0.004, 0.5, 0.97])
def test_coins_fall_at_their_rate(probability: float) -> None:
    coins = make().coins(400_000, probability)
    assert stats.binomtest(int(coins.sum()), coins.size, probability).pvalue > UNLIKELY


def test_certain_coins_are_certain() -> None:
    assert not make().coins(10_000, 0.0).any()
    assert make().coins(10_000, 1.0).all()
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="probability"):
            make().coins(1, wrong)


def test_integers_are_uniform_and_unbiased() -> None:
    # With the largest bound and no rejection, two thirds of the range would come half again as often.
    assert not make().integers(100, 1).any()
    for bound in (2, 7, 64, 3 << 61):
        drawn = make().integers(60_000, bound)
        assert drawn.min() >= 0
        assert int(drawn.max()) < bound
        cells = min(bound, 12)
        counts = np.bincount(drawn // -(-bound // cells), minlength=cells)[:cells]
        widths = np.diff([min(i * -(-bound // cells), bound) / bound for i in range(cells + 1)])
        used = widths > 0
        assert stats.chisquare(counts[used], 60_000 * widths[used]).pvalue > UNLIKELY
    with pytest.raises(ConfigError, match="bound"):
        make().integers(1, 0)


@pytest.mark.parametrize(("n", "k"), [(5, 2), (5, 4), (5, 0), (5, 5)])
def test_every_subset_is_equally_likely(n: int, k: int) -> None:
    source, rounds = make(), 4000
    codes = []
    for _ in range(rounds):
        chosen = source.subset(n, k)
        assert len(chosen) == k
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        codes.append(int((1 << chosen).sum()))
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == math.comb(n, k)
    if len(counts) > 1:
        assert stats.chisquare(counts).pvalue > UNLIKELY


# --- The Gaussian -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["seeded", "system"])
def test_gaussian_is_standard_normal(level: Level) -> None:
    check_normal(make(level).gaussian(400_000).numpy())


@pytest.mark.parametrize("factor", [0.9, 0.99, 1.02])
def test_the_check_of_normals_sees_a_wrong_scale(factor: float) -> None:
    with pytest.raises(AssertionError):
        check_normal(factor * make().gaussian(400_000).numpy())


def test_the_two_halves_of_box_muller_are_independent() -> None:
    normals = make().gaussian(400_000).numpy()
    block = 2 * noise._PAIRS
    blocks = np.reshape(normals[: len(normals) // block * block], (-1, 2, noise._PAIRS))
    a, b = blocks[:, 0].ravel(), blocks[:, 1].ravel()
    for f in (lambda x: x, np.square, np.abs):  # the squares betray a shared radius
        assert stats.pearsonr(f(a), f(b)).pvalue > UNLIKELY
    octants = np.histogram(np.arctan2(b, a), bins=16, range=(-np.pi, np.pi))[0]
    assert stats.chisquare(octants).pvalue > UNLIKELY


def test_neighbours_in_a_block_are_independent() -> None:
    normals = make().gaussian(300_001).numpy()
    for lag in (1, 2, 3):
        assert stats.pearsonr(normals[:-lag], normals[lag:]).pvalue > UNLIKELY


@pytest.mark.parametrize("count", [0, 1, 2, 3, 2 * noise._PAIRS - 1, 2 * noise._PAIRS + 1])
def test_any_count(count: int) -> None:
    normals = make().gaussian(count)
    assert normals.shape == (count,)
    assert normals.dtype == torch.float64
    assert torch.isfinite(normals).all()
    assert len(set(normals.tolist())) == count
    assert make().add_noise(torch.zeros(count), 1.0).shape == (count,)


def test_extreme_words_give_finite_normals() -> None:
    class Zeros(Source):
        value = 0

        def _fill(self, buffer: memoryview, count: int) -> None:
            np.frombuffer(buffer, dtype=np.uint64)[:count] = self.value

    for value in (0, 2**63 - 1, 2**63, 2**64 - 1):
        source = Zeros()
        source.value = value
        normals = source.gaussian(4)
        assert torch.isfinite(normals).all()
        assert normals.abs().max() < 9.4


# --- Noise on a sum -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("std", [0.037, 1.0, 24.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_added_has_the_deviation_asked_for(level: Level, std: float, dtype: torch.dtype) -> None:
    total = torch.linspace(-3, 3, 150_000, dtype=dtype)
    noised = make(level).add_noise(total, std)
    assert noised.dtype == torch.float64
    check_normal(((noised - total.double()) / std).numpy())


@pytest.mark.parametrize("level", ["seeded", "system"])
@pytest.mark.parametrize("std", [1e-6, 0.3, 1.0, 1.9999, 1e9])
def test_the_result_lies_on_a_coarse_grid_of_powers_of_two(level: Level, std: float) -> None:
    grid = 2.0 ** math.floor(math.log2(std * 2.0**-20))
    assert std * 2.0**-21 < grid <= std * 2.0**-20
    total = torch.from_numpy(make(seed=5).uniforms(5000)) * std
    cells = make(level).add_noise(total, std) / grid
    assert torch.equal(cells, cells.round())
    assert (cells % 2 == 1).any()  # and on no coarser one


@pytest.mark.parametrize("std", [0.3, 1.0, 7.7])
def test_exact_results_are_integers_on_the_grid(std: float) -> None:
    total = torch.from_numpy(make(seed=5).uniforms(5000))
    grid = std * 2.0**-20
    noised = Source("exact").add_noise(total, std)
    assert torch.equal(noised, torch.round(noised / grid) * grid)


def test_float32_sums_are_noised_in_float64() -> None:
    """In float32, 2^24 plus noise of 2^-3 would swallow the noise."""
    total = torch.full((10_000,), 2.0**24)
    check_normal(((make().add_noise(total, 0.125) - 2.0**24) / 0.125).numpy())


@pytest.mark.parametrize("level", LEVELS)
def test_no_noise_changes_nothing(level: Level) -> None:
    total = torch.tensor([1 / 3, 1e-30, -7.0])
    assert torch.equal(make(level).add_noise(total, 0.0), total.double())


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf, 1e-300])
def test_impossible_deviations_are_refused(std: float) -> None:
    with pytest.raises(ConfigError, match="std is"):
        make().add_noise(torch.zeros(3), std)


@pytest.mark.parametrize("total", [torch.zeros(2, 2), torch.zeros(2, dtype=torch.bfloat16)])
def test_only_flat_sums_of_enough_precision(total: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="give a flat"):
        make().add_noise(total, 1.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sum_that_is_not_finite_is_not_released(level: Level, bad: float) -> None:
    with pytest.raises(PrivetError, match="not finite"):
        make(level).add_noise(torch.tensor([0.0, bad, 1.0]), 1.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 2, 3, 1001, 20_000, 300_001])
def test_whichever_entry_is_not_finite(level: Level, bad: float, size: int) -> None:
    """In the sum's own precision, which is where the loop in C looks at the entries; nothing is left in `out`."""
    if level == "exact" and size > 20_000:
        pytest.skip("the same code as for fewer entries, and slow")
    for place in {0, 1, size // 2, size - 1} & set(range(size)):
        total, out = torch.zeros(size), torch.ones(size)
        total[place] = bad
        with pytest.raises(PrivetError, match="not finite"):
            make(level).add_noise(total, 1.0, out=out)
        assert not out.any()


def test_the_largest_finite_numbers_are_finite() -> None:
    most = torch.finfo(torch.float32).max
    assert torch.isfinite(make().add_noise(torch.tensor([most, -most, 0.0]), 1e30, out=torch.empty(3))).all()


def test_sums_of_any_size_get_noise_of_their_own() -> None:
    source = make()
    sizes = [1, 4096, 7, 20_000, 4089, 3, *[101] * 300]
    drawn = torch.cat([source.add_noise(torch.zeros(size), 1.0) for size in sizes]).numpy()
    assert len(np.unique(np.stack([drawn[:-1], drawn[1:]]), axis=1).T) == len(drawn) - 1  # no two neighbours again
    check_normal(drawn)


def test_out_may_be_the_total_itself_or_overlap_with_it() -> None:
    total = torch.ones(200_000)
    fresh = make().add_noise(total, 2.0)
    assert make().add_noise(total, 2.0, out=total) is total
    assert torch.equal(total, fresh.float())
    both = torch.arange(8.0) * 1e4
    expected = make().add_noise(both[:7].clone(), 2.0).float()
    assert torch.equal(make().add_noise(both[:7], 2.0, out=both[1:]), expected)


# --- The discrete Gaussian ----------------------------------------------------------------------------------


def check_discrete(sample: npt.NDArray[np.int64], sigma: float) -> None:
    support = np.arange(-12 * int(max(1, sigma)), 12 * int(max(1, sigma)) + 1)
    mass = np.exp(-(support**2) / (2 * sigma**2))
    expected = len(sample) * mass / mass.sum()
    kept = expected > 5
    counts = np.array([np.sum(sample == y) for y in support[kept]])
    rest = len(sample) - counts.sum()
    assert stats.chisquare([*counts, rest], [*expected[kept], expected[~kept].sum()]).pvalue > UNLIKELY


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_discrete_gaussian_has_its_exact_probabilities(bits: int) -> None:
    check_discrete(noise._discrete_gaussian(make(), 200_000, bits), 2.0**bits)


def test_the_check_of_the_discrete_gaussian_sees_a_wrong_scale() -> None:
    with pytest.raises(AssertionError):
        check_discrete(noise._discrete_gaussian(make(), 200_000, 3), 0.97 * 2**3)


def test_discrete_gaussian_at_the_scale_in_use() -> None:
    sample = noise._discrete_gaussian(make(), 200_000, noise._GRID_BITS)
    assert sample.dtype == np.int64
    check_normal(sample / 2.0**noise._GRID_BITS)


@pytest.mark.parametrize(("numerator", "bits"), [(0, 3), (1, 0), (1, 3), (5, 3), (2**40, 41), (2**41, 41)])
def test_exponential_coins(numerator: int, bits: int) -> None:
    coins = noise._bernoulli_exp(make(), np.full(100_000, numerator), bits)
    assert stats.binomtest(int(coins.sum()), coins.size, math.exp(-numerator / 2**bits)).pvalue > UNLIKELY


def test_exact_has_no_continuous_normals() -> None:
    with pytest.raises(ConfigError, match="use add_noise"):
        Source("exact").gaussian(3)


@given(
    rows=st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(-2, 2)), min_size=1, max_size=20),
    std=st.floats(1e-3, 1e3),
)
@settings(max_examples=100, deadline=None)
def test_rounding_moves_neighbours_no_further_than_said(rows: list[tuple[float, float]], std: float) -> None:
    """The same keystream on two neighbours: only the rounding is left, which `exact_sensitivity` covers."""

    class Same(Source):
        def __init__(self) -> None:
            super().__init__("seeded", seed=1)
            self.level = "exact"

    base = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    other = base + torch.tensor([row[1] for row in rows], dtype=torch.float64)
    sensitivity = torch.linalg.vector_norm(other - base).item()
    moved = torch.linalg.vector_norm(Same().add_noise(other, std) - Same().add_noise(base, std)).item()
    assert moved <= exact_sensitivity(sensitivity, len(rows), std) + 1e-11


def test_exact_sensitivity_is_needed() -> None:
    """Two sums that differ by almost nothing may be rounded a whole cell apart in every entry."""
    grid = 2.0**-20
    below, above = np.rint(np.full(100, 0.4999)), np.rint(np.full(100, 0.5001))
    apart = float(np.linalg.norm(above - below)) * grid
    assert apart > 100**0.5 * 0.0002 * grid
    assert apart <= exact_sensitivity(10 * 0.0002 * grid, 100, 1.0)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 10**8))
def test_exact_std_keeps_the_multiplier(multiplier: float, sensitivity: float, size: int) -> None:
    std = multiplier * sensitivity
    if exact_sensitivity(0.0, size, 1.0) * multiplier >= 0.99:
        return
    larger = exact_std(std, sensitivity, size)
    assert larger >= std
    assert larger / exact_sensitivity(sensitivity, size, larger) == pytest.approx(multiplier, rel=1e-9)


def test_exact_std_refuses_what_rounding_alone_would_cost() -> None:
    with pytest.raises(ConfigError, match="noise level 'system'"):
        exact_std(1e6, 1.0, 10**6)
    assert exact_std(0.0, 1.0, 10) == 0.0
    assert exact_std(2.0, 0.0, 10) == 2.0


def test_sums_far_out_of_range_stay_put() -> None:
    noised = Source("exact").add_noise(torch.tensor([1e300, -1e300, 0.0], dtype=torch.float64), 1.0)
    assert noised[:2].abs() == pytest.approx([2.0**26, 2.0**26], abs=10)


# --- Allocation ---------------------------------------------------------------------------------------------

groups = st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 10**7)), min_size=1, max_size=8)
multipliers = st.floats(1e-2, 1e2)


@pytest.mark.parametrize("rule", ["isotropic", "proportional", "optimal"])
@given(groups=groups, multiplier=multipliers, silent=st.integers(0, 2))
def test_allocation_has_the_multiplier_wanted(
    rule: noise.Allocation, groups: list[tuple[float, int]], multiplier: float, silent: int
) -> None:
    deltas, sizes = [d for d, _ in groups] + [0.0] * silent, [n for _, n in groups] + [3] * silent
    stds = allocate(deltas, sizes, multiplier, rule)
    loss = sum((d / s) ** 2 for d, s in zip(deltas, stds, strict=True) if d > 0)  # by hand
    assert loss**-0.5 == pytest.approx(multiplier, rel=1e-9)
    assert effective_multiplier(deltas, stds) == pytest.approx(multiplier, rel=1e-9)
    assert stds[len(groups) :] == [0.0] * silent
    if rule == "isotropic":
        assert len(set(stds[: len(groups)])) == 1
    if rule == "proportional":
        assert stds == pytest.approx([multiplier * math.sqrt(len(groups)) * d for d in deltas])


@given(groups=groups, multiplier=multipliers, factors=st.lists(st.floats(0.5, 2), min_size=8, max_size=8))
def test_no_allocation_has_less_noise_than_the_optimal_one(
    groups: list[tuple[float, int]], multiplier: float, factors: list[float]
) -> None:
    deltas, sizes = [d for d, _ in groups], [n for _, n in groups]

    def noise_of(stds: list[float]) -> float:
        return sum(n * s**2 for n, s in zip(sizes, stds, strict=True))

    best = allocate(deltas, sizes, multiplier, "optimal")
    tried = [s * f for s, f in zip(best, factors, strict=False)]
    rescale = multiplier / effective_multiplier(deltas, tried)
    for other in (
        [s * rescale for s in tried],
        allocate(deltas, sizes, multiplier, "isotropic"),
        allocate(deltas, sizes, multiplier, "proportional"),
    ):
        assert noise_of(best) <= noise_of(other) * (1 + 1e-9)


@pytest.mark.parametrize("rule", ["isotropic", "proportional", "optimal"])
def test_edges_of_allocation(rule: noise.Allocation) -> None:
    assert allocate([1.0, 2.0], [3, 4], 0.0, rule) == [0.0, 0.0]
    assert allocate([0.0], [3], 1.0, rule) == [0.0]
    assert allocate([], [], 1.0, rule) == []
    assert allocate([0.0, 1.0], [0, 4], 1.0, rule)[0] == 0.0
    for deltas, sizes, multiplier in (
        ([1.0], [0], 1.0),
        ([1.0], [1, 2], 1.0),
        ([-1.0], [1], 1.0),
        ([math.nan], [1], 1.0),
        ([1.0], [1], math.inf),
    ):
        with pytest.raises(ConfigError, match="size"):
            allocate(deltas, sizes, multiplier, rule)


def test_unknown_allocation_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fair'"):
        allocate([1.0], [1], 1.0, "fair")  # type: ignore[arg-type]


def test_effective_multiplier_of_groups() -> None:
    assert effective_multiplier([1.0, 1.0, 1.0, 1.0], [2.0] * 4) == pytest.approx(1.0)
    assert effective_multiplier([1.0, 1.0], [1.0, 0.0]) == 0.0
    assert effective_multiplier([0.0], [0.0]) == math.inf
