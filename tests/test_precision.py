"""Bounds are computed in full precision whatever PyTorch is allowed to do, and the settings are left as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from privet.nn.input_clip import InputClip, Window
from privet.nn.lipschitz.norms import rounding
from privet.precision import coarseness, full_precision

LIKE = torch.zeros(1)
MATMUL, CONV = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv


def settings() -> list[str]:
    backends = torch.backends
    return [
        s.fp32_precision for s in (backends, backends.mkldnn, MATMUL, CONV, backends.cuda.matmul, backends.cudnn.conv)
    ]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = settings()
    yield
    torch.backends.fp32_precision, torch.backends.mkldnn.fp32_precision = before[:2]
    MATMUL.fp32_precision, CONV.fp32_precision = before[2:4]
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before[4:]
    assert settings() == before


def test_nothing_is_lost_unless_it_is_allowed() -> None:
    assert coarseness("cpu") == 0
    assert rounding(LIKE, 100) == 100 * 2.0**-24


@pytest.mark.parametrize(("precision", "lost"), [("high", 2.0**-10), ("medium", 2.0**-7)])
def test_the_setting_for_all_matrix_products(precision: str, lost: float) -> None:
    torch.set_float32_matmul_precision(precision)
    assert coarseness("cpu") == lost
    assert rounding(LIKE, 100) == lost + 100 * 2.0**-24
    with full_precision(LIKE):
        assert coarseness("cpu") == 0
        assert torch.get_float32_matmul_precision() == "highest"  # on CUDA, PyTorch asks both
        with full_precision(LIKE):
            pass
        assert coarseness("cpu") == 0
    assert torch.get_float32_matmul_precision() == precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("value", "lost"), [("tf32", 2.0**-10), ("bf16", 2.0**-7)])
@pytest.mark.parametrize("place", [MATMUL, CONV, torch.backends.mkldnn, torch.backends])
def test_settings_of_backends(place: Any, value: str, lost: float) -> None:
    place.fp32_precision = value
    before = settings()
    assert coarseness("cpu") == lost
    with pytest.raises(ZeroDivisionError), full_precision(LIKE):
        assert coarseness("cpu") == 0
        assert MATMUL.fp32_precision in ("none", "ieee")
        assert CONV.fp32_precision in ("none", "ieee")
        _ = 1 / 0
    assert settings() == before
    place.fp32_precision = "ieee"
    assert coarseness("cpu") == 0  # what followed a general setting follows it still


def test_convolutions_on_cuda_round_by_default() -> None:
    assert coarseness("cuda") == 2.0**-10
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert coarseness("cuda") == 0


@pytest.mark.parametrize("allowed", ["none", "bf16"])
def test_longest_patches_are_found_in_float64_where_convolutions_round(
    allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = InputClip.before(nn.Conv2d(2, 3, 3), 1.0, "patch")
    seen: list[torch.dtype] = []
    patches = Window.patches
    monkeypatch.setattr(Window, "patches", lambda self, energy: (seen.append(energy.dtype), patches(self, energy))[1])
    CONV.fp32_precision = allowed
    clip.squared_norms(torch.randn(2, 2, 5, 5))
    assert seen == [torch.float32 if allowed == "none" else torch.float64]


def test_autocast_is_left_out() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with full_precision(LIKE):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
