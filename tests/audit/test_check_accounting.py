"""The second accountant bounds epsilon from below: never above the truth, and close to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from privet.accounting import Mechanism, epsilon
from privet.audit.accountant import check_accounting, epsilon_from_below
from privet.audit.statistics import gdp_epsilon


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("sigma", "rate", "count", "delta"),
    [(0.7, 0.3, 1, 1e-5), (1.0, 0.01, 10, 1e-5), (1.0, 0.3, 10, 1e-9), (2.0, 0.05, 300, 1e-8)],
)
def test_a_lower_bound_is_below_the_claim_and_close(
    relation: Any, sigma: float, rate: float, count: int, delta: float
) -> None:
    mechanism = Mechanism(kind="poisson", noise_multiplier=sigma, rate=rate, relation=relation)
    claimed = epsilon([(mechanism, count)], delta).epsilon
    check = check_accounting(mechanism, count, claimed, delta)
    assert check.holds and (0.99 if count <= 10 else 0.97) * claimed < check.measured < claimed
    if count == 10:
        assert not check_accounting(mechanism, count, 0.95 * claimed, delta).holds


def test_unsampled_steps_have_a_closed_form() -> None:
    for relation in ("add_remove", "replace_one"):
        mechanism = Mechanism(kind="gaussian", noise_multiplier=2.0, relation=relation)  # type: ignore[arg-type]
        claimed = epsilon([(mechanism, 9)], 1e-6).epsilon
        assert epsilon_from_below(mechanism, 9, 1e-6) == pytest.approx(claimed, rel=1e-9)
        assert not check_accounting(mechanism, 9, 0.95 * claimed, 1e-6).holds
    assert epsilon_from_below(Mechanism(kind="gaussian", noise_multiplier=0.0), 1, 1e-5) == math.inf


def divergence(rate: float, shift: float, count: int, epsilon: float) -> float:
    """∫ (p − e^ε q)₊ by summing over a grid of outputs in `count` dimensions, for one exchange of +shift by −shift."""
    y = np.linspace(-9, 9, 1201)

    def density(mean: float) -> np.ndarray:
        of_one = (1 - rate) * stats.norm.pdf(y) + rate * stats.norm.pdf(y, mean)
        return of_one if count == 1 else np.multiply.outer(of_one, of_one)

    return float(np.maximum(density(shift) - math.exp(epsilon) * density(-shift), 0).sum() * (y[1] - y[0]) ** count)


@pytest.mark.parametrize("count", [1, 2])
def test_samples_of_fixed_size_by_brute_force(count: int) -> None:
    mechanism = Mechanism(kind="fixed_size", noise_multiplier=0.8, records=20, batch=5, relation="replace_one")
    found = epsilon_from_below(mechanism, count, 1e-3)
    half = 0.5 / 0.8  # the multiplier is noise over 2C, and each record adds C
    assert divergence(0.25, half, count, 0.999 * found) > 1e-3 > divergence(0.25, half, count, 1.003 * found)
    assert found < epsilon([(mechanism, count)], 1e-3).epsilon


def test_a_second_accountant_stays_below_the_truth_over_very_many_steps() -> None:
    for sigma, count, delta in ((500.0, 500_000, 1e-5), (50.0, 100_000, 1e-12), (10.0, 10_000, 1e-13)):
        whole = Mechanism(kind="poisson", rate=1.0, noise_multiplier=sigma)
        assert epsilon_from_below(whole, count, delta) <= gdp_epsilon(math.sqrt(count) / sigma, delta)
