"""Checkpoints: a run goes on where it was, with fresh noise, and what was spent never goes down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import privet
from privet import Budget, CheckpointError, Ledger, Partition, PerExample, Poisson, PrivetError, Refused, Run

DELTA = 1e-5
OPEN: list[Run] = []


@pytest.fixture(autouse=True)
def closed_afterwards() -> Iterator[None]:
    yield
    for run in OPEN:
        run.session.close()
        run._optimizers.close()
    OPEN.clear()


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(5, generator=torch.Generator().manual_seed(i)), i


def net(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


class Training:
    """A model, its optimizer and schedule, and a run, as a user would have them in a script."""

    def __init__(self, **options: Any) -> None:
        settings: dict[str, Any] = {
            "method": PerExample(adaptive=True), "sampling": Poisson(batch=8), "check": False,
            "budget": Budget(noise=2.0, steps=20, delta=DELTA),
        }  # fmt: skip
        self.model = net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6], gamma=0.5)
        self.run = Run(self.model, Numbered(), **settings | options)
        OPEN.append(self.run)
        self.met: list[int] = []
        self.released: list[Tensor] = []

    def go(self, steps: int) -> list[int]:
        """Takes this many steps; gives the records that were in them."""
        self.met = []
        stop = self.run.steps_done + steps
        while self.run.steps_done < stop:
            for step in self.run.loader:
                for x, i in step:
                    self.met += i.tolist()
                    step.backward(F.cross_entropy(self.model(x), i % 3, reduction="none"))
                gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
                self.released.append(torch.cat(gradients))
                self.optimizer.step()
                self.schedule.step()
                if self.run.steps_done == stop:
                    break
        return self.met

    def save(self, path: Path) -> None:
        self.run.save(path, optimizer=self.optimizer, schedule=self.schedule)

    def load(self, path: Path) -> None:
        self.run.load(path, optimizer=self.optimizer, schedule=self.schedule)


def test_everything_comes_back(tmp_path: Path) -> None:
    first = Training()
    first.go(4)
    first.save(tmp_path / "c")
    second = Training()
    second.load(tmp_path / "c")
    for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    mine, theirs = first.optimizer.state_dict(), second.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for key, state in mine["state"].items():
        assert all(torch.equal(value, theirs["state"][key][name]) for name, value in state.items())
    assert first.schedule.state_dict() == second.schedule.state_dict()
    assert first.run.session.state() == second.run.session.state() != {"clips": {"all": 1.0}}
    assert second.run.steps_done == 4 and second.run.id == first.run.id
    assert second.run.units_spent == 4 and second.run.epsilon == first.run.epsilon
    second.go(16)
    assert second.run.finished and second.run.units_spent == 20


def test_a_checkpoint_is_read_without_pickle(tmp_path: Path) -> None:
    training = Training()
    training.go(2)
    training.save(tmp_path / "c")
    content = torch.load(tmp_path / "c", weights_only=True)
    assert content["steps_done"] == 2
    training.run.close()


def test_a_partition_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampling": Partition(batch=8), "budget": Budget(noise=2.0, epochs=3, delta=DELTA)}
    first = Training(**options)
    first.go(5)
    met = list(first.go(2))
    first.save(tmp_path / "c")
    second = Training(**options)
    second.load(tmp_path / "c")
    rest = list(second.go(3))
    assert sorted(met + rest) == list(range(40))
    assert second.run.units_spent == 2
    assert sorted(second.go(5)) == list(range(40))
    assert second.run.units_spent == 3 and second.run.finished


def test_noise_is_fresh_after_resuming(tmp_path: Path) -> None:
    first = Training()
    first.go(2)
    first.save(tmp_path / "c")
    outcomes = []
    for _ in range(3):
        again = Training()
        again.load(tmp_path / "c")
        again.go(1)
        outcomes.append(again.released[0])
    first.go(1)
    outcomes.append(first.released[-1])
    for i, a in enumerate(outcomes):  # noise of 2C/8 on 35 entries
        assert all((a - b).norm() > 0.05 for b in outcomes[i + 1 :])


@pytest.mark.parametrize("where", ["file", "memory"])
@pytest.mark.parametrize("sampling", [Poisson(batch=8), Partition(batch=8)], ids=["poisson", "partition"])
def test_restoring_never_lowers_what_was_spent(tmp_path: Path, where: str, sampling: Any) -> None:
    options: dict[str, Any] = {"sampling": sampling}
    if where == "file":
        options["ledger"] = tmp_path / "data.ledger"
    first = Training(**options)
    first.go(2)
    first.save(tmp_path / "old")
    first.go(6)  # to step 8: 8 units by Poisson; 2 epochs of 5 steps by Partition
    spent, cost = first.run.units_spent, first.run.epsilon
    assert spent == (8 if isinstance(sampling, Poisson) else 2)
    for times in range(1, 3):
        if where == "file":
            first.run.close()
            first = Training(**options)
        first.load(tmp_path / "old")
        assert first.run.steps_done == 2
        assert first.run.units_spent >= spent and first.run.epsilon >= cost
        first.go(6)  # the same steps again
        # Poisson: six more each time. Partition: the rest of epoch 1 was met twice, and so was epoch 2.
        assert first.run.units_spent == (8 + 6 * times if isinstance(sampling, Poisson) else 2 + 2 * times)
        assert first.run.epsilon > cost
        spent, cost = first.run.units_spent, first.run.epsilon
    first.run.close()


def test_a_checkpoint_of_another_run_does_not_hide_steps_already_taken(tmp_path: Path) -> None:
    first = Training()
    first.go(1)
    first.save(tmp_path / "c")
    second = Training()
    second.go(6)
    cost = second.run.epsilon
    try:
        second.load(tmp_path / "c")
    except CheckpointError:
        return
    assert second.run.epsilon >= cost


def test_a_ledger_that_knows_less_than_the_checkpoint_is_told(tmp_path: Path) -> None:
    first = Training(ledger=tmp_path / "one")
    first.go(5)
    first.save(tmp_path / "c")
    first.run.close()
    other = Training(ledger=tmp_path / "two")
    other.load(tmp_path / "c")
    assert other.run.units_spent == 5
    other.run.close()
    with privet.Ledger(tmp_path / "two", create=False) as ledger:
        assert sum(units for _, units in ledger.spent()) == 5


def test_the_budget_counts_steps_that_were_done_again(tmp_path: Path) -> None:
    first = Training(budget=Budget(noise=2.0, epsilon=2.0, delta=DELTA))
    limit = first.run.plan.limit
    assert limit is not None and limit > 6
    first.go(2)
    first.save(tmp_path / "c")
    first.go(3)
    first.load(tmp_path / "c")
    taken = 0
    while not first.run.finished:
        first.go(1)
        taken += 1
    assert 5 + taken == limit and first.run.epsilon <= 2.0
    assert not list(first.run.loader)


@pytest.mark.parametrize(
    "other",
    [
        {"budget": Budget(noise=3.0, steps=20, delta=DELTA)},
        {"sampling": Partition(batch=4)},
        {"sampling": Poisson(batch=8)},
        {"records": 80},
    ],
    ids=["noise", "batch", "rule", "records"],
)
def test_a_checkpoint_is_continued_under_its_own_terms_only(tmp_path: Path, other: dict[str, Any]) -> None:
    """What an unfinished epoch has paid for says nothing about another noise, partition or number of records."""
    first = Training(sampling=Partition(batch=8))
    first.go(3)
    first.save(tmp_path / "c")
    second = Training(**{"sampling": Partition(batch=8)} | other)
    with pytest.raises(CheckpointError, match="was made under another"):
        second.load(tmp_path / "c")


def test_two_processes_that_continue_one_epoch_pay_for_it_each(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampling": Partition(batch=8), "ledger": tmp_path / "data.ledger"}
    first = Training(**options)
    first.go(1)
    first.save(tmp_path / "c")
    first.run.close()
    twins = [Training(**options), Training(**options)]
    for twin in twins:
        twin.load(tmp_path / "c")  # both before either takes a step
    for twin in twins:
        twin.go(4)
    with Ledger(tmp_path / "data.ledger") as ledger:
        assert sum(count for _, count in ledger.spent()) == 2


def test_a_step_that_was_left_can_be_followed_by_a_restore(tmp_path: Path) -> None:
    """Ctrl-C within a step, caught by the user: the last checkpoint is the way back."""
    training = Training()
    training.go(1)
    training.save(tmp_path / "c")
    for step in training.run.loader:
        for _ in step:
            break
        break
    training.load(tmp_path / "c")
    training.go(1)
    assert training.run.steps_done == 2


# What cannot be restored


def test_nothing_is_saved_or_loaded_inside_of_a_step(tmp_path: Path) -> None:
    """There the model may hold local steps, or statistics of private records."""
    training, path = Training(), tmp_path / "run.pt"
    training.go(1)
    training.save(path)
    step = next(iter(training.run.loader))
    for x, i in step:
        with pytest.raises(Refused, match="cannot be saved inside"):
            training.save(tmp_path / "inside.pt")
        with pytest.raises(Refused, match="cannot be loaded inside"):
            training.load(path)
        step.backward(F.cross_entropy(training.model(x), i % 3, reduction="none"))
    assert not (tmp_path / "inside.pt").exists() and training.run.steps_done == 2


def test_a_loop_that_was_going_on_ends_with_a_load(tmp_path: Path) -> None:
    """Its samples were drawn for another place in another epoch: some would be met again, unpaid."""
    options: dict[str, Any] = {"sampling": Partition(batch=8), "budget": Budget(noise=2.0, epochs=3, delta=DELTA)}
    first, second = Training(**options), Training(**options)
    first.go(2)
    first.save(tmp_path / "run.pt")
    with pytest.raises(Refused, match=r"overtaken.*run\.load"):
        for step in second.run.loader:
            for x, i in step:
                step.backward(F.cross_entropy(second.model(x), i % 3, reduction="none"))
            if second.run.steps_done == 1:
                second.run.steps_done = 0  # as if nothing had been taken, which a load asks for
                second.load(tmp_path / "run.pt")


def test_a_forked_copy_of_a_run_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(sampling=Partition(batch=8), budget=Budget(noise=2.0, epochs=3, delta=DELTA))
    training.go(2)
    with monkeypatch.context() as forked, pytest.raises(Refused, match="made in another process"):
        forked.setattr(os, "getpid", lambda: -1)
        training.go(1)
    assert training.run.steps_done == len(training.released) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"not a checkpoint", {"weight": torch.ones(2)}, {"format": "privet checkpoint 0"}, [1, 2]],
    ids=["empty", "text", "foreign", "other version", "list"],
)
def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path, content: Any) -> None:
    if isinstance(content, bytes):
        (tmp_path / "c").write_bytes(content)
    else:
        torch.save(content, tmp_path / "c")
    training = Training()
    before = training.model[0].weight.clone()
    with pytest.raises(CheckpointError, match="c "):
        training.load(tmp_path / "c")
    assert torch.equal(training.model[0].weight, before)


def test_missing_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        training.load(tmp_path / "none")
    training.save(tmp_path / "c")
    whole = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        training.load(tmp_path / "c")


def test_a_checkpoint_with_parts_missing_is_refused(tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path / "c")
    content = torch.load(tmp_path / "c", weights_only=True)
    for part in content:
        torch.save({k: v for k, v in content.items() if k != part}, tmp_path / "d")
        with pytest.raises(CheckpointError):
            training.load(tmp_path / "d")


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    training = Training()
    training.go(1)
    training.run.save(tmp_path / "c", optimizer=training.optimizer)
    other = net(width=6)
    with Run(
        other, Numbered(), method=PerExample(), sampling=Poisson(batch=8), budget=Budget(noise=2, steps=2, delta=DELTA)
    ) as run:
        with pytest.raises(CheckpointError, match="does not fit"):
            run.load(tmp_path / "c", optimizer=torch.optim.Adam(other.parameters(), lr=0.1))
        assert run.steps_done == 0
    with pytest.raises(CheckpointError, match=r"no state for \['schedule'\]"):
        training.load(tmp_path / "c")
    few = torch.optim.Adam([training.model[0].weight])
    with pytest.raises(CheckpointError, match="does not fit"):
        training.run.load(tmp_path / "c", optimizer=few)


def test_state_that_nobody_takes_over_is_refused(tmp_path: Path) -> None:
    """A schedule that begins anew without a word would train at the first learning rate again."""
    training = Training()
    training.go(4)
    training.save(tmp_path / "c")
    weight = training.model[0].weight.clone()
    training.go(1)
    with pytest.raises(
        CheckpointError, match=r"of schedule, .*run\.load\(path, optimizer=optimizer, schedule=schedule"
    ):
        training.run.load(tmp_path / "c", optimizer=training.optimizer)
    assert training.run.steps_done == 5 and not torch.equal(training.model[0].weight, weight)


def test_a_refused_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """The model fits and the optimizer does not: half a checkpoint would be a model that no ledger knows."""
    first = Training()
    first.go(3)
    first.run.save(tmp_path / "c", optimizer=first.optimizer)
    second = Training()
    before = second.model[0].weight.clone()
    with pytest.raises(CheckpointError):
        second.run.load(tmp_path / "c", optimizer=torch.optim.Adam([second.model[0].weight]))
    assert torch.equal(second.model[0].weight, before)


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.go(1)
    training.save(tmp_path / "c")
    old = (tmp_path / "c").read_bytes()
    training.go(1)

    def full(_: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises((OSError, PrivetError), match="No space"):
            training.save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    training.save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() != old


def test_a_folder_that_does_not_exist_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PrivetError, match="nowhere"):
        Training().save(tmp_path / "nowhere" / "c")
