"""From a budget to a plan: whichever two of the three are given, the third fits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from privet import Budget, ConfigError, FixedSize, Partition, Poisson, PrivetError, plan
from privet.accounting import epsilon

RECORDS = 6000
POISSON = Poisson(batch=60)
PARTITION = Partition(batch=60)


def test_noise_and_length_give_epsilon() -> None:
    made = plan(Budget(noise=1.1, steps=300, delta=1e-5), POISSON, records=RECORDS)
    assert (made.steps, made.units, made.limit) == (300, 300, None)
    assert made.mechanism.noise_multiplier == 1.1 and made.mechanism.rate == 0.01
    assert made.epsilon == pytest.approx(epsilon([(made.mechanism, 300)], 1e-5).epsilon)


def test_epsilon_and_length_give_noise() -> None:
    made = plan(Budget(epsilon=2.0, epochs=3, delta=1e-5), POISSON, records=RECORDS)
    assert made.steps == made.units == made.limit == 300
    assert 2.0 * 0.995 <= made.epsilon <= 2.0


def test_epsilon_and_noise_give_length() -> None:
    made = plan(Budget(epsilon=2.0, noise=1.1, delta=1e-5), POISSON, records=RECORDS)
    assert made.steps == made.limit == made.units
    assert made.epsilon <= 2.0 < epsilon([(made.mechanism, made.steps + 1)], 1e-5).epsilon


def test_of_all_three_the_tightest_counts(caplog: pytest.LogCaptureFixture) -> None:
    allowed = plan(Budget(epsilon=2.0, noise=1.1, delta=1e-5), POISSON, records=RECORDS).steps
    short = plan(Budget(epsilon=2.0, noise=1.1, steps=10, delta=1e-5), POISSON, records=RECORDS)
    assert (short.steps, short.limit) == (10, allowed) and short.epsilon < 2.0
    assert not caplog.records
    long = plan(Budget(epsilon=2.0, noise=1.1, steps=10**7, delta=1e-5), POISSON, records=RECORDS)
    assert long.steps == allowed and long.epsilon <= 2.0
    assert f"allows {allowed} of the 10000000 steps" in caplog.text


@pytest.mark.parametrize("epochs", [1, 2.5, 0.001])
def test_epochs_are_records_over_batch(epochs: float) -> None:
    made = plan(Budget(noise=1.0, epochs=epochs, delta=1e-5), POISSON, records=RECORDS)
    assert made.steps == max(1, round(epochs * 100))


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (100, 1), (101, 2), (250, 3)])
def test_a_partition_pays_per_epoch_that_is_begun(steps: int, epochs: int) -> None:
    made = plan(Budget(noise=2.0, steps=steps, delta=1e-5), PARTITION, records=RECORDS)
    assert (made.steps, made.units) == (steps, epochs)
    assert made.mechanism.kind == "gaussian"
    assert made.epsilon == pytest.approx(epsilon([(made.mechanism, epochs)], 1e-5).epsilon)


def test_a_partition_runs_for_whole_epochs_of_the_budget() -> None:
    made = plan(Budget(noise=5.0, epsilon=2.0, delta=1e-5), PARTITION, records=RECORDS)
    assert made.limit is not None and made.steps == made.limit * 100 and made.units == made.limit
    assert made.epsilon <= 2.0 < epsilon([(made.mechanism, made.limit + 1)], 1e-5).epsilon
    whole = plan(Budget(noise=5.0, epsilon=2.0, delta=1e-5), Partition(batch=RECORDS), records=RECORDS)
    assert whole.steps == whole.limit == made.limit  # one step is one epoch


def test_relations_and_rules() -> None:
    added = plan(Budget(epsilon=2.0, steps=100, delta=1e-5), POISSON, records=RECORDS)
    replaced = plan(Budget(epsilon=2.0, steps=100, delta=1e-5), POISSON, records=RECORDS, relation="replace_one")
    assert replaced.mechanism.noise_multiplier > added.mechanism.noise_multiplier
    fixed = plan(Budget(noise=1.0, steps=100, delta=1e-5), FixedSize(batch=60), records=RECORDS, relation="replace_one")
    assert fixed.mechanism.kind == "fixed_size" and fixed.epsilon > 0
    with pytest.raises(ConfigError, match="replace_one"):
        plan(Budget(noise=1.0, steps=100, delta=1e-5), FixedSize(batch=60), records=RECORDS)


def test_discrete_noise_is_accounted_as_such() -> None:
    exact = plan(Budget(epsilon=2.0, steps=100, delta=1e-5), POISSON, records=RECORDS, discrete=True)
    smooth = plan(Budget(epsilon=2.0, steps=100, delta=1e-5), POISSON, records=RECORDS)
    assert exact.mechanism.discrete and exact.accountant != smooth.accountant
    assert exact.mechanism.noise_multiplier > smooth.mechanism.noise_multiplier
    assert exact.epsilon <= 2.0


def test_no_noise_costs_everything() -> None:
    assert plan(Budget(noise=0, steps=1, delta=1e-5), POISSON, records=RECORDS).epsilon == math.inf


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epsilon": 1.0}, "two of three"),
        ({"noise": 1.0}, "two of three"),
        ({"steps": 5}, "two of three"),
        ({"epochs": 5.0}, "two of three"),
        ({}, "two of three"),
        ({"epsilon": 0, "steps": 5}, "epsilon must be positive, and is 0"),
        ({"epsilon": -1.0, "steps": 5}, "epsilon must be"),
        ({"epsilon": math.nan, "steps": 5}, "epsilon must be"),
        ({"noise": -1.0, "steps": 5}, r"noise must lie between 0 and 1e\+06, and is -1.0"),
        ({"noise": math.nan, "steps": 5}, "noise must"),
        ({"noise": 1.0, "steps": 0}, r"steps must be a positive whole number of at most 1e\+09, and is 0"),
        ({"noise": 1.0, "epochs": -1}, "epochs must be a positive number"),
        ({"noise": 1.0, "epochs": math.nan}, "epochs must be"),
        ({"noise": 1.0, "epochs": 1, "steps": 5}, "not both"),
        ({"noise": 1.0, "steps": 5, "delta": 0.0}, "delta must lie between 0 and 1"),
        ({"noise": 1.0, "steps": 5, "delta": 1.0}, "delta must lie"),
        ({"noise": 1.0, "steps": 5, "delta": math.nan}, "delta must lie"),
    ],
)
def test_budgets_that_say_too_little_or_nonsense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Budget(**{"delta": 1e-5} | options)


@pytest.mark.parametrize(
    "options",
    [
        {"noise": 1.0, "epochs": math.inf},
        {"noise": 1.0, "steps": 2.5},
        {"epsilon": math.inf, "steps": 5},
    ],
)
def test_lengths_and_budgets_that_are_no_numbers_to_plan_with_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PrivetError):
        plan(Budget(delta=1e-5, **options), POISSON, records=RECORDS)


def test_budgets_that_nothing_fits_into_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"not a single step fits into epsilon 0\.01"):
        plan(Budget(noise=0.3, epsilon=0.01, delta=1e-5), POISSON, records=RECORDS)
    with pytest.raises(ConfigError, match="not a single step"):
        plan(Budget(noise=0, epsilon=1, delta=1e-5), POISSON, records=RECORDS)
    with pytest.raises(ConfigError, match="batch is 60, more than the 59 records"):
        plan(Budget(noise=1, epsilon=1, delta=1e-5), POISSON, records=59)
