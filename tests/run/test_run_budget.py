"""A run ends before its budget is exceeded, its own or that of its ledger."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small import budget, entropy, net, seeded, train

import privet
from privet import (
    Budget,
    BudgetExceeded,
    Partition,
    Poisson,
)
from privet.accounting import epsilon


def test_the_budget_ends_training() -> None:
    model = net()
    wanted = Budget(epsilon=1.0, noise=6.0, delta=1e-5)
    with seeded(model, budget=wanted, noise_level="system", seed=None, check=False) as run:
        planned = run.plan.steps
        assert 2 < planned < 1000
        while not run.finished:
            for step in run.loader:
                for x, y in step:
                    step.backward(entropy(model, x, y))
        assert run.steps_done == planned and run.epsilon <= 1.0
        assert epsilon([(run.plan.mechanism, planned + 1)], 1e-5).epsilon > 1.0
        assert list(run.loader) == []


def test_epsilon_and_epochs_meet_the_target() -> None:
    model = net()
    with seeded(model, budget=Budget(epsilon=3.0, epochs=2, delta=1e-5), noise_level="system", seed=None) as run:
        assert run.epsilon == 0
        train(run, model)
        assert run.steps_done == len(run.loader) * 2 == 6
        assert 3 * 0.995 <= run.epsilon <= 3
        assert run.guarantee(1e-3).epsilon < run.epsilon


def test_a_budget_of_the_ledger_stops_the_step_before_it_is_released() -> None:
    model, ledger = net(), privet.Ledger(":memory:")
    ledger.set_budget(1.0, 1e-5)
    with seeded(model, ledger=ledger, budget=budget(500, noise=6.0), noise_level="system", seed=None) as run:
        with pytest.raises(BudgetExceeded):
            train(run, model)
        assert 0 < run.steps_done < 500
        assert all(p.grad is None for p in model.parameters())
        assert epsilon(ledger.spent(), 1e-5).epsilon <= 1.0
        assert sum(units for _, units in ledger.spent()) == run.steps_done


@pytest.mark.parametrize("rule", [Poisson(batch=32), Partition(batch=32)], ids=["poisson", "partition"])
def test_a_run_says_at_its_start_how_many_steps_fit_into_the_ledger(
    rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = privet.Ledger(":memory:")
    ledger.set_budget(4.0, 1e-5)
    options: dict[str, Any] = {"sampling": rule, "ledger": ledger, "noise_level": "system", "seed": None}
    model = net()
    with seeded(model, budget=budget(3, noise=4.0), **options) as run:
        train(run, model)
    assert not caplog.records
    with seeded(model, budget=budget(100, noise=4.0), **options) as run:
        said: list[list[str]] = []
        with pytest.raises(BudgetExceeded):
            train(run, model, each=lambda: said.append([record.getMessage() for record in caplog.records]))
        assert said[0] == said[-1] and len(said[0]) == 1
        assert said[0][0].startswith(f"{len(said)} of the 100 steps to come fit into what is left")


def test_two_runs_on_one_ledger_add_up(tmp_path: Any) -> None:
    for _ in range(2):
        model = net()
        with seeded(model, ledger=tmp_path / "data.ledger", budget=budget(3, noise=1.0)) as run:
            train(run, model)
    with privet.Ledger(tmp_path / "data.ledger", create=False) as ledger:
        assert sum(units for _, units in ledger.spent()) == 6
        assert [record.steps for record in ledger.runs()] == [3, 3]
        assert all(record.finished for record in ledger.runs())


def test_noise_from_a_seed_is_no_noise_to_the_accountant(tmp_path: Path) -> None:
    """Whoever knows the seed can subtract it: the ledger may not count it with what protects."""
    model, path = net(), tmp_path / "data.ledger"
    planned = Budget(epsilon=1.0, steps=3, delta=1e-5)
    with seeded(model, budget=planned, ledger=path) as run:
        train(run, model)
        assert run.steps_done == 3 and run.epsilon == math.inf and run.statement()["epsilon"] == math.inf
        assert run.statement()["planned"]["epsilon"] <= 1
    with privet.Ledger(path) as ledger:
        assert epsilon(ledger.spent(), 1e-5).epsilon == math.inf
        ledger.set_budget(5.0, 1e-5)
    with (
        seeded(model, budget=planned, ledger=path, noise_level="system", seed=None) as run,
        pytest.raises(BudgetExceeded),
    ):
        train(run, model)


def test_two_processes_that_go_on_with_one_run_share_its_budget(tmp_path: Path) -> None:
    """Neither knows of the other but by the ledger."""
    path, options = tmp_path / "data.ledger", {"noise_level": "system", "seed": None, "run_id": "one"}
    planned = Budget(epsilon=1.0, steps=4, delta=1e-5)
    models = [net(), net()]
    first, second = (seeded(model, budget=planned, ledger=path, **options) for model in models)
    train(first, models[0])
    assert first.steps_done == 4 and not second.finished
    with pytest.raises(BudgetExceeded, match="another process goes on with the same run"):
        train(second, models[1])
    assert second.steps_done == 0 and all(p.grad is None for p in models[1].parameters())
    assert first.epsilon == second.epsilon <= 1 and second.statement()["compositions"] == 4
    first.close()
    second.close()


def test_a_run_that_fails_after_its_last_step_is_not_noted_as_finished(tmp_path: Path) -> None:
    """What it learned may not have been saved: whoever reads the ledger should look for it."""
    for failing in (False, True):
        model, path = net(), tmp_path / f"{failing}.ledger"
        with suppress(OSError), seeded(model, budget=budget(2), ledger=path) as run:
            train(run, model)
            if failing:
                raise OSError("the disk is full")
        with privet.Ledger(path) as ledger:
            (record,) = ledger.runs()
            assert record.steps == 2 and bool(record.finished) is not failing
