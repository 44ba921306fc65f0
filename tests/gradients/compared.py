"""Per-record gradients as they are recorded, compared with a loop over single records."""

from __future__ import annotations

from typing import Any

import torch
from conftest import Losses, bumpy_losses, naive_gradients
from torch import Tensor, nn

from privet.gradients import PerRecord, Recorder


def recorded(model: nn.Module, losses: Losses, batch: tuple[Any, ...]) -> dict[str, PerRecord]:
    recorder = Recorder(model)
    try:
        with recorder.recording():
            return recorder.backward(losses(model, *batch))
    finally:
        recorder.close()


def agree(
    model: nn.Module, *batch: Any, losses: Losses = bumpy_losses, rtol: float = 1e-8, atol: float = 1e-9
) -> dict[str, PerRecord]:
    """The recorded norms, weighted sums and gradients are those of a loop over records."""
    expected = naive_gradients(model, losses, batch)
    found = recorded(model, losses, batch)
    for name, rows in expected.items():
        if name not in found:
            assert not rows.any(), f"{name} has a gradient that was not recorded"
            continue
        got, weights = found[name], torch.linspace(-1, 2, len(rows), dtype=rows.dtype)
        scale = float(rows.abs().max()) if rows.numel() else 0.0
        close = {"rtol": rtol, "atol": atol * (1 + scale)}
        torch.testing.assert_close(got.dense(), rows, **close)
        torch.testing.assert_close(
            got.weighted_sum(weights), torch.einsum("n,n...->...", weights, rows), rtol=rtol, atol=close["atol"] * 9
        )
        norms, true = got.squared_norms.sqrt(), rows.double().reshape(len(rows), -1).norm(dim=1)
        assert got.squared_norms.shape == (len(rows),)
        assert (norms >= true * (1 - 10 * rtol) - close["atol"]).all(), f"{name}: norm below the true one"
        torch.testing.assert_close(norms, true, rtol=2e-3, atol=1e-3 * (1e-6 + scale) + 10 * atol)
    assert set(found) <= set(expected)
    return found


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
