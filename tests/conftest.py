"""What several test files share: naive per-record gradients to hold others against, and one step by hand."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from privet.methods import Query, Session
from privet.training import TrainConfig, train

settings.register_profile("privet", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("privet")

_BF16 = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def _bf16_is_fatal() -> bool:
    """Some virtual machines announce AMX and do not let it run: there every larger product in bf16 ends PyTorch."""
    info = Path("/proc/cpuinfo")
    if not info.exists() or "amx_tile" not in info.read_text():
        return False
    return subprocess.run([sys.executable, "-c", _BF16], capture_output=True, check=False).returncode != 0


if "ONEDNN_MAX_CPU_ISA" not in os.environ and _bf16_is_fatal():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # read at the first product, here and in child processes


@pytest.fixture(autouse=True)
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of these tests leave an empty report.html: drawing one takes a second, and test_report.py does it."""
    monkeypatch.setattr("privet.training.loop.write_report", lambda folder: (folder / "report.html").touch())


Losses = Callable[..., Tensor]
"""(model, *batch) to a vector of losses."""
Unit = list[tuple[Any, ...]]
"""The chunks of a group of records."""


def bumpy(output: Tensor) -> Tensor:
    """A loss per record with a gradient that differs at every entry of the output."""
    rows = output.flatten(1)
    slope = torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype)
    return (rows.sin() * slope + 0.1 * rows.square()).sum(1)


def bumpy_losses(model: nn.Module, *batch: Any) -> Tensor:
    return bumpy(model(*batch))


def naive_gradients(model: nn.Module, losses: Losses, batch: tuple[Any, ...]) -> dict[str, Tensor]:
    """(records, *shape) for each parameter: a loop over single records, by ordinary autograd."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    records = pytree.tree_leaves(batch)[0].shape[0]
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    model.zero_grad()
    for i in range(records):
        single = pytree.tree_map(lambda x, i=i: x[i : i + 1], batch)
        (loss,) = losses(model, *single)
        loss.backward()
        for name, p in parameters.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
    return {name: torch.stack(found) for name, found in rows.items()}


def naive_clipped_sum(gradients: dict[str, Tensor], clip: float, gamma: float | None = None) -> dict[str, Tensor]:
    """Σ_i g_i·min(1, C/‖g_i‖), or Σ_i g_i·C/(‖g_i‖ + γ), in float64 over all the parameters given."""
    flat = torch.cat([g.double().flatten(1) for g in gradients.values()], 1)
    norms = flat.norm(dim=1)
    factors = (clip / norms).clamp(max=1) if gamma is None else clip / (norms + gamma)
    return {name: torch.einsum("n,n...->...", factors, g.double()) for name, g in gradients.items()}


def queries_of(session: Session, model: nn.Module, units: Iterable[Unit], losses: Losses = bumpy_losses) -> list[Query]:
    """What a step over these groups asks for noise for."""
    session.begin()
    for unit in units:
        for chunk in unit:
            with session.listening():
                session.add(losses(model, *chunk))
        if unit:
            session.end_unit()
    return session.finish()


def train_without_luck(config: TrainConfig) -> Path:
    """The folder of a training whose noise is that of every call, and still counts as unpredictable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.urandom", random.Random(3).randbytes)
        return train(config).out
