"""What the tests of whole runs share: a small model and data, a loop, and seeded runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from privet import (
    Budget,
    PerExample,
    Poisson,
    Run,
)


def budget(steps: int = 4, noise: float = 0.0) -> Budget:
    return Budget(noise=noise, steps=steps, delta=1e-5)


def data(count: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=generator), torch.arange(count) % 3)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def train(
    run: Run,
    model: nn.Module,
    losses: Callable[..., Tensor] = entropy,
    optimizer: torch.optim.Optimizer | None = None,
    each: Callable[[], None] = lambda: None,
) -> list[dict[str, Tensor]]:
    """To the end of the plan; the private gradient of each step."""
    released: list[dict[str, Tensor]] = []
    while not run.finished:
        for step in run.loader:
            for batch in step:
                step.backward(losses(model, *batch) if isinstance(batch, list | tuple) else losses(model, batch))
            released.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            if optimizer is not None:
                optimizer.step()
            each()
    return released


def seeded(model: nn.Module, dataset: Dataset[Any] | None = None, **options: Any) -> Run:
    settings: dict[str, Any] = {
        "method": PerExample(clip=0.5), "sampling": Poisson(batch=24), "budget": budget(), "noise_level": "seeded",
        "seed": 3,
    }  # fmt: skip
    return Run(model, data() if dataset is None else dataset, **settings | options)


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> None:
    assert len(a) == len(b) > 0
    for one, other in zip(a, b, strict=True):
        assert set(one) == set(other)
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)
