"""One step: what is released, when, with which noise, and divided by what."""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privet
from privet import Budget, FixedSize, Partition, PerExample, Poisson, Refused, Release, Run
from privet.ledger import Payment, _Commit
from privet.noise import Source

UNLIKELY = 1e-7


def quiet(steps: int = 3, noise: float = 0.0) -> Budget:
    return Budget(noise=noise, steps=steps, delta=1e-5)


def ones(count: int) -> TensorDataset:
    return TensorDataset(torch.ones(count, 1))


class Weight(nn.Module):
    """One number, whose gradient is the record."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(1, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def take(run: Run, losses: Callable[[Any], Tensor], at_end: Callable[[int], None] = lambda _: None) -> None:
    """All steps of the plan; `at_end` gets how many records each one had (made-up ones included)."""
    while not run.finished:
        for step in run.loader:
            count = 0
            for batch in step:
                count += len(batch[0])
                step.backward(losses(batch))
            at_end(count)


def test_the_divisor_is_the_public_batch_and_not_the_realised_one() -> None:
    model = Weight()
    seen: list[tuple[int, float]] = []

    def at_end(count: int) -> None:
        assert model.layer.weight.grad is not None
        seen.append((count, model.layer.weight.grad.item()))

    options: dict[str, Any] = {"noise_level": "seeded", "seed": 1, "check": False, "physical_batch": 3}
    with Run(model, ones(40), method=PerExample(clip=1), sampling=Poisson(batch=8), budget=quiet(20), **options) as run:
        take(run, lambda batch: model(batch[0]).sum(1), at_end)
    assert len({count for count, _ in seen}) > 3
    assert any(count > 8 for count, _ in seen)
    for count, gradient in seen:
        assert gradient == pytest.approx(count / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("sampling", "relation", "deviation"),
    [
        (Poisson(batch=50), "add_remove", 1.5 * 2.0),
        (Poisson(batch=50), "replace_one", 1.5 * 2.0),  # the accountant counts the removal and the addition apart
        (Partition(batch=50), "add_remove", 1.5 * 2.0),
        (Partition(batch=50), "replace_one", 1.5 * 4.0),
        (FixedSize(batch=50), "replace_one", 1.5 * 4.0),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, str | float) else str(v),
)
@pytest.mark.parametrize("level", ["system", "exact"])
def test_the_noise_has_its_stated_distribution(sampling: Any, relation: Any, deviation: float, level: Any) -> None:
    if level == "exact" and relation == "replace_one" and not isinstance(sampling, Partition):
        pytest.skip("no accountant for this noise")
    model, drawn = Weight(5000), []

    def at_end(_: int) -> None:
        assert model.layer.weight.grad is not None
        drawn.append(model.layer.weight.grad.flatten().double() * 50)

    with Run(
        model, ones(200), method=PerExample(clip=2.0), sampling=sampling, budget=quiet(3, noise=1.5),
        relation=relation, noise_level=level, physical_batch=64, check=False,
    ) as run:  # fmt: skip
        take(run, lambda batch: 0 * model(batch[0]).sum(1), at_end)
        stated = run.statement()["groups"][0]
    noise = torch.cat(drawn).numpy()
    assert len(noise) == 15_000
    low, high = stats.chi2.ppf([UNLIKELY, 1 - UNLIKELY], len(noise))
    assert low < (noise**2).sum() / deviation**2 < high
    assert stats.kstest(noise / deviation, "norm").pvalue > UNLIKELY
    assert stated["noise_std"] == pytest.approx(deviation, rel=1e-3)
    assert stated["sensitivity"] == (2.0 if relation == "add_remove" else 4.0)
    correlation = (drawn[0] @ drawn[1]) / (drawn[0].norm() * drawn[1].norm())
    assert abs(correlation) < 6 / math.sqrt(5000)


def test_empty_samples_release_noise_and_are_paid() -> None:
    model, counts, gradients = Weight(), [], []

    def at_end(count: int) -> None:
        counts.append(count)
        assert model.layer.weight.grad is not None
        gradients.append(model.layer.weight.grad.item())

    options: dict[str, Any] = {"budget": quiet(40, noise=1.0), "check": False}
    with Run(model, ones(3), method=PerExample(), sampling=Poisson(batch=1), **options) as run:
        take(run, lambda batch: model(batch[0]).sum(1), at_end)
        assert run.statement()["compositions"] == run.steps_done == 40
    empty = [g for g, count in zip(gradients, counts, strict=True) if count == 0]
    assert 1 <= len(empty) < 40
    assert all(empty) and len(set(empty)) == len(empty)


def test_nothing_is_in_grad_before_the_release() -> None:
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Run(
        model, ones(20), method=PerExample(), sampling=Poisson(batch=10), budget=quiet(2, noise=1.0), physical_batch=2
    ) as run:
        for step in run.loader:
            before = model.layer.weight.item()
            for (x,) in step:
                assert model.layer.weight.grad is None
                step.backward(model(x).sum(1))
                assert model.layer.weight.grad is None
                assert not step.released
            assert step.released and model.layer.weight.grad is not None
            assert model.layer.weight.item() == before
            optimizer.step()
            assert model.layer.weight.item() != before


def test_post_processors_get_and_change_the_release() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    seen: list[Release] = []

    def look(release: Release) -> None:
        assert release.batch == 10
        assert set(release.gradients) == set(release.stds) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert list(release.stds.values()) == pytest.approx([2.0] * 4)
        seen.append(release)

    def change(release: Release) -> None:
        release.gradients["0.bias"].fill_(20.0)
        release.gradients["1.weight"] = torch.full((1, 2), 30.0)

    with Run(
        model, ones(20), method=PerExample(clip=2.0), sampling=Poisson(batch=10), budget=quiet(2, noise=1.0),
        post=[look, change],
    ) as run:  # fmt: skip
        take(run, lambda batch: model(batch[0]).sum(1))
    assert len(seen) == 2
    assert model[0].bias.grad is not None and model[1].weight.grad is not None and model[0].weight.grad is not None
    assert (model[0].bias.grad == 2.0).all() and (model[1].weight.grad == 3.0).all()
    assert not (model[0].weight.grad == 2.0).any()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda losses: losses.mean(), "vector with one entry per record"),
        (lambda losses: losses.mean().item(), "vector with one entry per record"),
        (lambda losses: losses.unsqueeze(1), "vector with one entry per record"),
        (lambda losses: losses[:-1], "hand in one for each"),
        (lambda losses: torch.cat([losses, losses]), "hand in one for each"),
        (lambda losses: losses.detach(), "do not depend on any trainable parameter"),
        (lambda losses: losses.round().long(), "losses"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_losses_that_are_not_one_per_record_are_refused(
    wrong: Callable[[Tensor], Any], sentence: str, check: bool
) -> None:
    model = Weight()
    with (
        Run(model, ones(20), method=PerExample(), sampling=Poisson(batch=20), budget=quiet(), check=check) as run,
        pytest.raises(Refused, match=sentence),
    ):
        take(run, lambda batch: wrong(model(batch[0]).sum(1)))
    assert run.steps_done == 0


def test_losses_must_be_handed_in_once_per_chunk() -> None:
    model = Weight()
    options: dict[str, Any] = {"method": PerExample(), "sampling": Poisson(batch=20), "budget": quiet(), "check": False}
    with Run(model, ones(20), **options) as run, pytest.raises(Refused, match="were not handed in"):
        for step in run.loader:
            for (x,) in step:
                model(x)
    with Run(model, ones(20), **options) as run, pytest.raises(Refused, match="once for each chunk"):
        for step in run.loader:
            for (x,) in step:
                step.backward(model(x).sum(1))
                step.backward(model(x).sum(1))
    with Run(model, ones(20), **options) as run, pytest.raises(Refused, match="belongs inside"):
        for step in run.loader:
            step.backward(model(torch.ones(20, 1)).sum(1))


def left_early(**options: Any) -> tuple[Run, nn.Module]:
    model = Weight()
    run = Run(
        model, ones(20), method=PerExample(), sampling=Poisson(batch=20), budget=quiet(8), physical_batch=4,
        check=False, **options,
    )  # fmt: skip
    for step in run.loader:
        for (x,) in step:
            step.backward(model(x).sum(1))
            break
        break
    return run, model


def test_a_step_that_was_left_early_is_refused_at_the_next() -> None:
    run, model = left_early()
    assert model.layer.weight.grad is None and run.steps_done == 0
    with pytest.raises(Refused, match="left before its sample ended"):
        next(iter(run.loader))
    run.close()


def test_a_step_cannot_be_gone_through_again() -> None:
    """What is left after the first chunk depends on how many records came before: more than C moves."""
    model = Weight()
    with Run(
        model, ones(20), method=PerExample(), sampling=Poisson(batch=20), budget=quiet(8), physical_batch=4, check=False
    ) as run:
        step = next(iter(run.loader))
        for (x,) in step:
            step.backward(model(x).sum(1))
            break
        with pytest.raises(Refused):
            for (x,) in step:
                step.backward(model(x).sum(1))


@pytest.fixture(params=[":memory:", "data.ledger"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[privet.Ledger]:
    with privet.Ledger(request.param if request.param == ":memory:" else tmp_path / request.param) as ledger:
        yield ledger


def one_step(ledger: privet.Ledger, model: nn.Module) -> Run:
    budget = quiet(1, noise=1.0)
    return Run(model, ones(20), method=PerExample(), sampling=Poisson(batch=20), budget=budget, ledger=ledger)


def test_nothing_is_released_before_its_charge_is_written(
    monkeypatch: pytest.MonkeyPatch, ledger: privet.Ledger
) -> None:
    model, events = Weight(), []
    write, draw, hand_over = _Commit.run, Source.add_noise, privet.step.hand_over

    def write_slowly(self: _Commit) -> None:
        time.sleep(0.2)
        write(self)
        events.append("written")

    def noise(self: Source, *args: Any, **options: Any) -> Tensor:
        events.append("noise")
        return draw(self, *args, **options)

    def release(*args: Any) -> None:
        events.append("released")
        hand_over(*args)

    with one_step(ledger, model) as run:
        monkeypatch.setattr(_Commit, "run", write_slowly)
        monkeypatch.setattr(Source, "add_noise", noise)
        monkeypatch.setattr(privet.step, "hand_over", release)
        take(run, lambda batch: model(batch[0]).sum(1))
        monkeypatch.undo()
    assert events == (["written", "noise", "released"] if ledger.in_memory else ["noise", "written", "released"])


def test_a_step_that_someone_saw_is_never_taken_again(ledger: privet.Ledger) -> None:
    """Within an epoch of disjoint batches that would cost nothing, and show the same records with fresh noise."""
    model, seen = Weight(), []

    def look_and_fail(release: Release) -> None:
        seen.append(release.gradients["layer.weight"].clone())
        raise OSError("no room for plots")

    run = Run(
        model, ones(20), method=PerExample(), sampling=Partition(batch=10), budget=quiet(4, noise=1.0), ledger=ledger,
        post=[look_and_fail], check=False,
    )  # fmt: skip
    with run:
        for _ in range(2):
            with pytest.raises(OSError, match="no room"):
                take(run, lambda batch: model(batch[0]).sum(1))
            run._pending = None  # as if someone went on nevertheless
        assert len(seen) == run.steps_done == 2 and run.units_spent == 1


def test_a_step_whose_noise_fails_is_paid_for(monkeypatch: pytest.MonkeyPatch, ledger: privet.Ledger) -> None:
    model = Weight()

    def fail(*_: Any, **__: Any) -> Tensor:
        raise OSError("no randomness")

    monkeypatch.setattr(Source, "add_noise", fail)
    with one_step(ledger, model) as run:
        with pytest.raises(OSError, match="no randomness"):
            take(run, lambda batch: model(batch[0]).sum(1))
        assert sum(units for _, units in ledger.spent(run=run.id)) == 1 == run.units_spent
        assert model.layer.weight.grad is None


def test_a_charge_that_is_not_written_releases_nothing(monkeypatch: pytest.MonkeyPatch, ledger: privet.Ledger) -> None:
    model = Weight()

    def fail(self: _Commit) -> None:
        self.failure = sqlite3.OperationalError("the disk is full")
        self.done.set()

    with one_step(ledger, model) as run:
        monkeypatch.setattr(_Commit, "run", fail)
        with pytest.raises(privet.LedgerError, match="the disk is full"):
            take(run, lambda batch: model(batch[0]).sum(1))
        assert model.layer.weight.grad is None and run.steps_done == run.units_spent == 0
        monkeypatch.undo()
        assert ledger.spent(run=run.id) == []  # and no transaction is left open
    with one_step(ledger, model) as run:
        take(run, lambda batch: model(batch[0]).sum(1))
        assert model.layer.weight.grad is not None and run.steps_done == 1


class Interrupted(threading.Event):
    """Ctrl-C comes when it is first waited for."""

    def wait(self, timeout: float | None = None) -> bool:
        self.__class__ = threading.Event  # type: ignore[assignment]
        raise KeyboardInterrupt


def test_stopping_while_the_disk_writes_releases_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The charge is written to its end, and stands."""
    model, begin, write = Weight(), privet.Ledger.begin_charge, _Commit.run

    def write_slowly(self: _Commit) -> None:
        time.sleep(0.3)
        write(self)

    def interrupted(self: privet.Ledger, *args: Any, **options: Any) -> Payment:
        payment = begin(self, *args, **options)
        payment._commit.done.__class__ = Interrupted
        return payment

    with privet.Ledger(tmp_path / "data.ledger") as ledger, one_step(ledger, model) as run:
        monkeypatch.setattr(_Commit, "run", write_slowly)
        monkeypatch.setattr(privet.Ledger, "begin_charge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(run, lambda batch: model(batch[0]).sum(1))
        monkeypatch.undo()
        assert sum(units for _, units in ledger.spent(run=run.id)) == 1
        assert model.layer.weight.grad is None and run.steps_done == 0


def test_a_charge_that_fails_releases_nothing(monkeypatch: pytest.MonkeyPatch, ledger: privet.Ledger) -> None:
    model, drawn = Weight(), []
    monkeypatch.setattr(Source, "add_noise", lambda *a, **k: drawn.append(1))

    def fail(*_: Any, **__: Any) -> None:
        raise privet.LedgerError("the disk is full")

    monkeypatch.setattr(privet.Ledger, "begin_charge", fail)
    with one_step(ledger, model) as run, pytest.raises(privet.LedgerError):
        take(run, lambda batch: model(batch[0]).sum(1))
    assert not drawn and model.layer.weight.grad is None and run.steps_done == 0
