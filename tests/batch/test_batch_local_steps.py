"""Batch clipping with local_steps: a group's vector is what an ordinary optimizer does; the model is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from grouped import clipped, entropy, flat, linear, problem, release, running
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet.methods.batch import Batch


@pytest.mark.parametrize("physical", [3, 100])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.3), {"local_lr": 0.3}),
        (lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8), {"local_lr": 0.3, "local_momentum": 0.8}),
        (lambda p: torch.optim.Adam(p, lr=0.02), {"local_lr": 0.02, "local_optimizer": "Adam"}),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_local_steps_are_those_of_an_ordinary_optimizer(
    clip: float, optimizer: Any, options: dict[str, Any], physical: int
) -> None:
    """v = (w₀ − w_K)/η for each group, clipped; the model is left as it was."""
    model, expected = linear(), torch.zeros(38, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    for start in (0, 1):
        local = linear()
        steps = optimizer(local.parameters())
        x, y = (t[start:10:2] for t in problem(40).tensors)
        for _ in range(4):
            steps.zero_grad()
            entropy(local, x, y).mean().backward()
            steps.step()
        change = torch.cat([(before[n] - p.detach()).double().flatten() for n, p in local.named_parameters()])
        expected += clipped(change / options["local_lr"], clip)
    with running(model, Batch(clip=clip, record_groups=2, local_steps=4, **options), physical_batch=physical) as run:
        run.source.integers = lambda count, bound: np.arange(count) % bound  # type: ignore[method-assign]
        found = flat(release(run, range(10)))
        torch.testing.assert_close(found, expected * 10 / 2, rtol=1e-3, atol=1e-4 * min(1, clip))
        assert not release(run, [])["0.weight"].any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["error", "break"])
def test_a_step_left_in_the_middle_of_a_group_leaves_no_private_weights(how: str) -> None:
    """Neither in the model right after, nor in what the next step starts from."""
    model = linear()
    before = copy.deepcopy(model.state_dict())
    with running(model, Batch(clip=0.1, local_steps=3, local_lr=0.5), physical_batch=4) as run:
        expected = release(run, range(10))
        moved = False

        def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            nonlocal moved
            moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
            if moved:
                raise RuntimeError("stop")
            return entropy(model, x, y)

        if how == "error":
            with pytest.raises(RuntimeError, match="stop"):
                release(run, range(10), losses)
        else:
            private = run.step_on(np.arange(10))
            for x, y in private:
                if not torch.equal(model[0].weight, before["0.weight"]):
                    moved = True
                    break
                private.backward(entropy(model, x, y))
        assert moved
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        again = release(run, range(10))
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_a_record_that_ruins_the_local_steps_of_its_group_adds_nothing() -> None:
    model, (x, y) = linear(), problem(40).tensors
    before = copy.deepcopy(model.state_dict())
    x[0] = 1e38
    for chosen in (Batch(local_steps=3, local_lr=1e30), Batch(local_steps=2, local_lr=1e30, local_optimizer="Adam")):
        with running(model, chosen, TensorDataset(x, y)) as run:
            assert torch.isfinite(flat(release(run, range(10)))).all()
            assert flat(release(run, range(10))).norm() <= 10
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
