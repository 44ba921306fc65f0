"""Batch clipping with sparsify: weights that no longer move are frozen at their mean and leave the clip."""

from __future__ import annotations

import math
from typing import Any

import torch
from grouped import SETTING, close, linear, release, running
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet.methods.batch import Batch


def slopes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of a record is its x, in the columns that its y allows."""
    return (model(x * y)).squeeze(1)


def test_weights_that_no_longer_move_are_frozen_at_their_mean() -> None:
    """Columns 2 and 3 have no gradient in a window of three steps; before it, momentum was set going."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    x = torch.ones(12, 4)
    masks = torch.ones(12, 4)
    masks[:6, 2:] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones(1, 4)
    optimizer.step()
    weights = []
    with running(model, Batch(clip=1.0, sparsify=3), TensorDataset(x, masks)) as run:
        for _ in range(3):
            weights.append(model.weight.detach().clone())
            release(run, range(6), slopes)
            optimizer.step()
        mean = torch.stack(weights).mean(0)[0, 2:]
        assert not torch.allclose(model.weight[0, 2:], mean)
        for _ in range(3):
            gradient = release(run, range(6, 12), slopes)["weight"] / 10  # they would have a gradient again
            torch.testing.assert_close(model.weight[0, 2:].detach(), mean)
            assert not gradient[0, 2:].any()
            close(gradient[0, :2], torch.full((2,), 2**-0.5))  # the others have the clip to themselves
            optimizer.step()
        release(run, range(6), slopes)
        torch.testing.assert_close(model.weight[0, 2:].detach(), mean)


def test_nothing_is_frozen_without_a_window() -> None:
    model = nn.Linear(4, 1, bias=False)
    dataset = TensorDataset(torch.ones(12, 4), torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(12, 4))
    with running(model, Batch(clip=1.0), dataset) as run:
        for _ in range(5):
            release(run, range(6), slopes)
        state = run.session.state()["frozen"]
    assert not state["masks"] and not state["values"]


def test_a_weight_has_arrived_when_its_mean_is_within_a_deviation_of_its_noise() -> None:
    """The sum of a window against √(Σ std²), with noise that changes within it."""
    model = nn.Linear(3, 1, bias=False)
    session: Any = Batch(sparsify=4).open(model, SETTING)
    limit = math.sqrt(1 + 1 + 4 + 4)
    for std in (1.0, 1.0, 2.0, 2.0):
        noisy = torch.tensor([[0.99, 1.01, -0.99]]) * limit / 4
        session.post_process({"weight": noisy}, {"weight": std})
        assert noisy.all()  # nothing is frozen before the window ends
    assert session.state()["frozen"]["masks"]["weight"].tolist() == [[True, False, True]]
    noisy = torch.ones(1, 3)
    session.post_process({"weight": noisy}, {"weight": 1.0})
    assert noisy.tolist() == [[0.0, 1.0, 0.0]]


def test_a_window_begins_anew_when_layers_are_frozen_or_thawed() -> None:
    model = linear()
    with running(model, Batch(clip=1.0, sparsify=3)) as run:
        for number in range(7):
            model[0].requires_grad_(number >= 4)
            release(run, range(10))
        values = run.session.state()["frozen"]["values"]
    torch.testing.assert_close(values["0.weight"], model[0].weight.detach())
    with running(linear(), Batch(clip=1.0, sparsify=3)) as run:
        for number in range(4):
            run.model[0].requires_grad_(number < 2)  # type: ignore[index]
            release(run, range(10))
        assert not run.session.state()["frozen"]["values"]


def test_a_window_survives_a_checkpoint(tmp_path: Any) -> None:
    """Stopped in the middle of the second window, and compared with never having stopped."""
    dataset = TensorDataset(torch.ones(12, 4), torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(12, 1))
    dataset.tensors[1][6:] = torch.tensor([0.0, 1.0, 0.0, 1.0])
    outcomes = []
    for stop in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = running(model, Batch(clip=1.0, sparsify=3), dataset)
        gradients = []
        for number in range(8):
            if stop and number == 5:
                run.save(tmp_path / "checkpoint", optimizer=optimizer)
                run.close()
                model = nn.Linear(4, 1, bias=False)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                run = running(model, Batch(clip=1.0, sparsify=3), dataset)
                run.load(tmp_path / "checkpoint", optimizer=optimizer)
            gradients.append(release(run, range(6) if number < 3 else range(6, 12), slopes)["weight"])
            optimizer.step()
        outcomes.append(
            (torch.stack(gradients), model.weight.detach(), run.session.state()["frozen"]["masks"]["weight"])
        )
        run.close()
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert outcomes[0][2].tolist() == [[True, False, True, True]]
