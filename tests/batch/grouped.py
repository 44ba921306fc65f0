"""What the tests of batch clipping share: steps on chosen groups, the naive sum, and small runs without noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from conftest import Losses, Unit, bumpy_losses, queries_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Budget, Poisson, Run
from privet.methods import Query, Session, Setting
from privet.methods.batch import Batch

B = 12
SETTING = Setting(batch=B, noise_multiplier=1.0, relation="add_remove")


# One step of a session, and the naive sum


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))


def normalised(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.BatchNorm1d(8, **options), nn.Tanh(), nn.Linear(8, 3))


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def step(session: Session, model: nn.Module, units: Iterable[Unit], losses: Losses = bumpy_losses) -> Query:
    """What a step does with these groups."""
    (query,) = queries_of(session, model, units, losses)
    return query


def bounded(chosen: Batch, model: nn.Module, units: Iterable[Unit], losses: Losses = bumpy_losses) -> Query:
    session = chosen.open(model, SETTING)
    try:
        return step(session, model, units, losses)
    finally:
        session.close()


def naive(chosen: Batch, model: nn.Module, units: Iterable[tuple[Any, ...]], losses: Losses = bumpy_losses) -> Tensor:
    """The paper's (1/k)·Σ clip(mean) in float64, times the batch size."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for unit in units:
        gradients = torch.autograd.grad(losses(model, *unit).mean(), parameters)
        mean = torch.cat([g.double().flatten() for g in gradients])
        total += mean * min(1.0, chosen.clip / float(mean.norm()))
    return total * B / chosen.record_groups


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


# Whole runs on a small problem


def problem(count: int = 400) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def running(model: nn.Module, chosen: Batch, dataset: TensorDataset | None = None, **options: Any) -> Run:
    """Without noise, on 40 records in expected samples of 10."""
    settings: dict[str, Any] = {"sampling": Poisson(batch=10), "noise_level": "seeded", "seed": 0}
    settings["budget"] = Budget(noise=0.0, steps=100, delta=1e-5)
    return Run(model, problem(40) if dataset is None else dataset, method=chosen, **settings | options)


def release(run: Run, sample: Iterable[int], losses: Losses = entropy) -> dict[str, Tensor]:
    """The sums of a step on this sample, by parameter."""
    private = run.step_on(np.array(list(sample), dtype=np.int64))
    for batch in private:
        private.backward(losses(run.model, *batch))
    return {n: p.grad.double() * run.sampling.batch for n, p in run.model.named_parameters() if p.grad is not None}


def flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.double().flatten() for part in parts.values()])


def clipped(vector: Tensor, clip: float) -> Tensor:
    return vector * min(1.0, clip / float(vector.norm()))


def mean_gradient(model: nn.Module, records: Any, dataset: TensorDataset | None = None) -> Tensor:
    x, y = (problem(40) if dataset is None else dataset).tensors
    found = torch.autograd.grad(entropy(model, x[records], y[records]).mean(), list(model.parameters()))
    return torch.cat([g.double().flatten() for g in found])
