"""Certified norms are upper bounds, and not loose ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from privet.nn.lipschitz import norms, windows
from privet.nn.lipschitz.norms import convolution_norm, frobenius_norm, spectral_norm


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000), st.floats(-6, 6))
def test_spectral_norm_is_at_least_the_largest_singular_value(rows: int, columns: int, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    matrix = 10**scale * torch.randn(rows, columns)
    true = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert true <= spectral_norm(matrix) <= true * (1 + 1e-4)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1, 3.0])
def test_the_bounds_for_large_matrices_hold(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_EXACT", 2)
    torch.manual_seed(0)
    matrix = nn.init.orthogonal_(torch.empty(20, 30)) + noise * torch.randn(20, 30) / 30**0.5
    true = torch.linalg.matrix_norm(matrix.double(), 2).item()
    slack = 20 ** (1 / 16) if noise > 0.01 else 1 + 5 * noise + 1e-4
    assert true <= spectral_norm(matrix) <= slack * true * (1 + 1e-4)
    assert math.isnan(spectral_norm(matrix * math.nan))


def _operator(weight: torch.Tensor, size: int, **options: object) -> float:
    """The norm of the convolution on images of this size, from its matrix."""
    inputs = torch.eye(weight.shape[1] * size * size, dtype=torch.float64).view(-1, weight.shape[1], size, size)
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2], bias=False, **options).double()
    layer.weight.data = weight.double()
    matrix = layer(inputs).detach().flatten(1)
    return torch.linalg.eigvalsh(matrix @ matrix.T)[-1].clamp(min=0).sqrt().item()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_convolution_norm_holds_whatever_the_size(out: int, before: int, kernel: int, seed: int, ring: bool) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(out, before, kernel, kernel)
    stated = convolution_norm(weight, groups=1, multiplicity=kernel**2, wrap=1)
    mode = {"padding_mode": "circular", "padding": (kernel - 1) // 2} if ring else {"padding": kernel - 1}
    true = max(_operator(weight, size, **mode) for size in (kernel, 5, 6))
    assert true <= stated


def test_frequencies_between_the_grid_points_are_covered() -> None:
    torch.manual_seed(0)
    for size in (2, 3, 4, 5) * 5:
        kernel = torch.randn(1, 2, 1, size, size, dtype=torch.float64)
        everywhere = torch.fft.fft2(kernel, s=(512, 512)).abs().square().sum(1).max().sqrt().item()
        assert everywhere <= norms._frequency_norm(kernel) <= 1.35 * everywhere


def test_frequencies_are_much_sharper_than_patches() -> None:
    torch.manual_seed(0)
    weight = nn.init.orthogonal_(torch.empty(16, 150)).view(16, 6, 5, 5)
    stated = convolution_norm(weight, groups=1, multiplicity=25, wrap=1)
    true = _operator(weight, 7, padding=4)
    assert true <= stated <= 1.3 * true
    assert stated < 0.6 * 5


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_multiplicity_is_what_counting_gives(
    length: int, kernel: int, stride: int, dilation: int, padding: int, circular: bool
) -> None:
    if length + 2 * padding < dilation * (kernel - 1) + 1 or (circular and padding > length):
        return
    axis = windows.Axis(length, kernel, stride, dilation, padding, padding, circular=circular)
    ones = torch.eye(length).view(length, 1, length)
    layer = nn.Conv1d(
        1, 1, kernel, stride, padding, dilation, bias=False, padding_mode="circular" if circular else "zeros"
    )
    layer.weight.data.fill_(1)
    counts = layer(ones).detach()[:, 0]
    assert axis.positions == counts.shape[1]
    assert axis.multiplicity() == counts.sum(1).max().item()


def test_means_along_an_axis_have_the_norm_of_their_matrix() -> None:
    for ceil in (False, True):
        for counted in (False, True):
            axis = windows.Axis(7, 3, 2, before=1, after=1, ceil=ceil)
            pool = nn.AvgPool1d(3, 2, 1, ceil_mode=ceil, count_include_pad=counted)
            matrix = pool(torch.eye(7).view(7, 1, 7))[:, 0].numpy()
            assert axis.mean_norm(count_padding=counted) == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-6)


def test_a_coarser_arithmetic_gets_a_larger_margin() -> None:
    weight = torch.zeros(2, 2)
    fine = norms.rounding(weight, 1000)
    assert fine == 1000 * 2**-24
    assert norms.rounding(weight.double(), 1000) < 1e-12
    torch.set_float32_matmul_precision("medium")
    try:
        assert norms.rounding(weight, 1000) > 2**-8
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("size", [1e-160, 1e160])
def test_norms_of_numbers_whose_squares_float64_cannot_hold(size: float) -> None:
    weight = torch.full((2, 2), size, dtype=torch.float64)
    assert spectral_norm(weight) == pytest.approx(2 * size, rel=1e-4) and spectral_norm(weight) >= 2 * size
    assert frobenius_norm(weight) == pytest.approx(2 * size, rel=1e-4)
