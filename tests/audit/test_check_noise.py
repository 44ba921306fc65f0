"""The checks of noise and of two worlds pass Gaussian noise of the stated size and fail any other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from subjects import Stub, failed, gaussian, keys_from_a_seed, mine, network, records
from torch import Tensor

from privet import PerExample, Run
from privet.audit import MethodSubject, Record, randomness
from privet.audit.randomness import check_noise, check_two_worlds
from privet.audit.sensitivity import check_sensitivity
from privet.audit.statistics import gaussian_mu_lower, gdp_epsilon
from privet.noise import Source

same_luck = pytest.fixture(autouse=True)(keys_from_a_seed)


def test_gaussian_noise_passes() -> None:
    for seed in range(6):
        assert not failed(check_noise(Stub(gaussian(seed))))


def test_a_deviation_of_a_twentieth_is_surely_found_and_one_of_a_hundredth_is_not() -> None:
    """With n draws the measured deviation is off by 1/√(2n) of itself, 0.5% here, and 4.9 of these are allowed."""
    draws, error = randomness._DRAWS, randomness.ERROR
    low, high = stats.chi2.ppf([error / 2, 1 - error / 2], draws)

    def power(factor: float) -> float:
        return float(stats.chi2.cdf(low / factor**2, draws) + stats.chi2.sf(high / factor**2, draws))

    assert min(power(0.95), power(1.05)) > 1 - 1e-6 and max(power(0.99), power(1.01)) < 0.01
    for seed in range(5):
        for factor in (0.95, 1.05):
            found = failed(check_noise(Stub(gaussian(seed, factor), sizes=[100], stds=[3.0])))
            assert "spread of the noise in 'sum 0'" in found
        assert not failed(check_noise(Stub(gaussian(seed, 0.99), sizes=[100], stds=[3.0])))


def noise_of(kind: str) -> Stub:
    generator = np.random.default_rng(3)

    def draw(step: int) -> np.ndarray:
        z = generator.normal(size=100)
        if kind == "laplace":
            return generator.laplace(scale=math.sqrt(0.5), size=100)
        if kind == "sums share half of their noise":
            z[60:] = math.sqrt(0.5) * (z[:40] + z[60:])
        if kind == "the last two of three sums are the same":
            z[70:] = z[40:70]
        if kind == "each second step repeats":
            return np.random.default_rng(step // 2).normal(size=100)
        if kind == "halves repeat":
            z[30:60], z[80:] = z[:30], z[60:80]
        if kind == "neighbours share":
            z[1::2] = z[::2]
        if kind == "the last step's, shifted":
            return np.roll(np.random.default_rng(step // 2).normal(size=100), 5 * (step % 2))
        if kind == "comes back after thirty steps":
            return np.random.default_rng(step % 30).normal(size=100)
        if kind == "cut off":
            z = np.where(np.abs(z) > 2.5, generator.uniform(-2.5, 2.5, size=100), z)
            return z / 0.9567  # its own deviation
        return z

    return Stub(draw, *([(40, 30, 30), (2.0, 0.5, 1.0)] if "three" in kind else []))


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("laplace", "shape of the noise"),
        ("sums share half of their noise", "independence: noise of different sums"),
        ("the last two of three sums are the same", "independence: noise of different sums"),
        ("each second step repeats", "independence: noise of different steps"),
        ("halves repeat", "independence: noise within a sum"),
        ("neighbours share", "independence: noise within a sum"),
        ("the last step's, shifted", "independence: noise of different steps"),
        ("comes back after thirty steps", "independence: noise of 200 steps"),
        ("cut off", "noise beyond 3 deviations"),
    ],
)
def test_noise_of_the_right_spread_that_is_wrong_otherwise(kind: str, check: str) -> None:
    assert check in failed(check_noise(noise_of(kind)))


def test_noise_that_is_met_again_after_a_restart() -> None:
    """In a run that went before, or only in another one that goes on from the same checkpoint."""
    stub = Stub(lambda step: np.random.default_rng(step).normal(size=100))
    stub.again = [10**6, 10**6 + 1]
    assert not failed(check_noise(stub))
    stub.again, stub.taken = [10**6, 10**6], 0
    assert failed(check_noise(stub)) == ["independence: noise of restart 1"]
    stub.again, stub.taken = [3], 0
    assert failed(check_noise(stub)) == ["independence: noise of restart 0"]


def test_a_checkpoint_that_brings_its_key_along_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Run.load

    def with_its_key(self: Run, path: Any, **stateful: Any) -> None:
        load(self, path, **stateful)
        self.source.real._rekey(bytes(32))  # type: ignore[attr-defined]

    monkeypatch.setattr(randomness, "_DRAWS", 1000)
    monkeypatch.setattr(Run, "load", with_its_key)
    assert failed(check_noise(mine())) == ["independence: noise after resuming from it again"]


def test_a_sum_that_no_record_moves_needs_no_noise_but_must_not_have_any() -> None:
    def draw(step: int) -> np.ndarray:
        return np.random.default_rng(step).normal(size=100)

    assert not failed(check_noise(Stub(draw, stds=(2.0, 0.0))))
    silent = Stub(draw, stds=(0.0, 0.0))
    assert "shape of the noise" in failed(check_noise(silent))


def test_noise_from_the_generator_that_everybody_seeds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(self: Source, total: Tensor, std: float, *, out: Tensor | None = None) -> Tensor:
        return (out if out is not None else total.clone()).copy_(total + std * torch.randn(total.shape))

    monkeypatch.setattr(Source, "add_noise", seeded)
    checks = check_noise(MethodSubject(PerExample(clip=1.0), network(), records()))
    assert "independence: noise of different steps" in failed(checks)


def test_noise_that_is_left_out_where_a_sum_is_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise = Source.add_noise

    def sparse(self: Source, total: Tensor, std: float, *, out: Tensor | None = None) -> Tensor:
        mask = total != 0
        noisy = add_noise(self, total, std, out=out)
        return noisy.mul_(mask)

    monkeypatch.setattr(Source, "add_noise", sparse)
    checks = check_noise(MethodSubject(PerExample(clip=1.0), network(), records()))
    assert "spread of the noise in 'all, of nobody, over the stated'" in failed(checks)


def test_a_threshold_that_decays_is_no_fault() -> None:
    subject = MethodSubject(PerExample(clip=1.0, clip_decay=0.9), network(), records())
    assert not failed(check_sensitivity(subject)[0]) and not failed(check_noise(subject))


def test_two_worlds_further_apart_than_claimed_are_told_apart() -> None:
    for seed in range(5):
        check, claimed, found = check_two_worlds(Stub(gaussian(seed)), Record(9, torch.zeros(2), torch.tensor(0)))
        assert check.holds and 0 < check.measured < check.bound == 1.0
        assert (claimed, found) == (gdp_epsilon(1.0, 1e-5), gdp_epsilon(check.measured, 1e-5))
    # Twice the claim is found in 94% of all trials, by the binomials below; 2.5 times it in all but one in 10^5.
    generator = np.random.default_rng(0)
    errors = generator.binomial(300, stats.norm.cdf(-1), (500, 2))
    twice = [gaussian_mu_lower(int(a), int(b), 300, 300, randomness.ERROR) > 1 for a, b in errors]
    assert np.mean(twice) > 0.9
    for seed in range(3):
        for mu, factor in ((2.5, 1.0), (1.0, 0.4)):  # the record does more, or the noise is less
            far = Stub(gaussian(seed, factor), mu=mu)
            assert not check_two_worlds(far, Record(9, torch.zeros(2), torch.tensor(0)))[0].holds
    assert sum(not check_two_worlds(Stub(gaussian(s), mu=2), far.base[0])[0].holds for s in range(5)) >= 4
