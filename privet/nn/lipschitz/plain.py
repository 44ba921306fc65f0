"""The constants of torch's own layers. Those without any are refused by `certify`, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..activations import TemperedSigmoid
from ..padding import padding_in_use
from .bounds import Bound, Constants, constants_for, refuse
from .norms import INFLATION, convolution_norm, frobenius_norm, rounding, spectral_norm
from .windows import Axis, adaptive, multiplicity

# Layers with weights


def added(x: Bound, norm: float, positions: int) -> float:
    """‖x + b‖ at most, for a bias of this norm that is added at each of so many positions: ‖x‖ + √positions·‖b‖."""
    return x.norm + math.sqrt(positions) * norm


def linear(layer: nn.Linear, x: Bound) -> Constants:
    """Over the last axis, at T positions: y_t = W·x_t, so ‖y‖ ≤ ‖W‖₂·‖x‖ and ‖∂L/∂W‖ = ‖Σ_t δ_t·x_tᵀ‖ ≤ ‖δ‖·‖x‖."""
    if not x.shape or x.shape[-1] != layer.in_features:
        refuse(layer, f"takes {layer.in_features} features, and records reach it with the shape {x.shape}.")
    weight = layer.weight
    positions = x.size // layer.in_features
    norm = spectral_norm(weight) + rounding(weight, max(weight.shape)) * frobenius_norm(weight)
    y = Bound(norm * x.norm, (*x.shape[:-1], layer.out_features))
    slack = INFLATION + rounding(weight, positions)
    return _with_bias(layer, y, norm, slack * x.norm, positions)


def convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Bound) -> Constants:
    """∂L/∂W = Σ_t δ_t·P_tᵀ, so ‖∂L/∂W‖ ≤ ‖δ‖·√(Σ_t ‖P_t‖²) ≤ ‖δ‖·√multiplicity·‖x‖; for ‖y‖ see `convolution_norm`."""
    sizes = x.shape[1:]
    if len(x.shape) != len(layer.kernel_size) + 1 or x.shape[0] != layer.in_channels:
        refuse(layer, f"takes {layer.in_channels} channels, and records reach it with the shape {x.shape}.")
    if layer.padding_mode not in ("zeros", "circular"):
        refuse(layer, f"has padding_mode={layer.padding_mode!r}, and is bounded for 'zeros' and 'circular' only.")
    padding = padding_in_use(layer)
    axes = [
        Axis(
            size,
            layer.weight.shape[2 + i],
            layer.stride[i],
            layer.dilation[i],
            before=padding[-2 * i - 2],
            after=padding[-2 * i - 1],
            circular=layer.padding_mode == "circular",
        )
        for i, size in enumerate(sizes)
    ]
    shape = (layer.out_channels, *(axis.positions for axis in axes))
    if min(shape) < 1:
        refuse(layer, f"has a kernel larger than its input of shape {x.shape}.")
    weight = layer.weight
    often = multiplicity(axes)
    norm = convolution_norm(
        weight, groups=layer.groups, multiplicity=often, wrap=math.prod(axis.wrap() for axis in axes)
    )
    terms = max(weight[0].numel(), layer.out_channels * weight[0, 0].numel())
    norm += math.sqrt(often) * rounding(weight, terms) * frobenius_norm(weight)
    positions = math.prod(shape[1:])
    slack = INFLATION + rounding(weight, positions)
    return _with_bias(layer, Bound(norm * x.norm, shape), norm, slack * math.sqrt(often) * x.norm, positions)


def _with_bias(layer: Any, y: Bound, lipschitz: float, weight: float, positions: int) -> Constants:
    if layer.bias is None:
        return Constants(y, lipschitz, {"weight": weight})
    norm = added(y, frobenius_norm(layer.bias), positions) * INFLATION
    bias = math.sqrt(positions) * (INFLATION + rounding(layer.bias, positions))
    return Constants(Bound(norm, y.shape), lipschitz, {"weight": weight, "bias": bias})


constants_for(nn.Linear)(linear)
constants_for(nn.Conv1d, nn.Conv2d, nn.Conv3d)(convolution)

# Functions of single numbers


def elementwise(x: Bound, slope: float, at_zero: float = 0.0, largest: float = math.inf) -> Constants:
    """Of f on each number: ‖f(x)‖ ≤ ‖f(0)‖ + slope·‖x‖, and at most √n times the largest |f|."""
    root = math.sqrt(x.size)
    return Constants(Bound(min(slope * x.norm + root * abs(at_zero), root * largest), x.shape), slope)


@constants_for(nn.Identity, nn.ReLU, nn.Softsign)
def _through_zero(layer: nn.Module, x: Bound) -> Constants:
    return elementwise(x, 1.0)


@constants_for(nn.Tanh)
def _tanh(layer: nn.Tanh, x: Bound) -> Constants:
    return elementwise(x, 1.0, largest=1.0)


@constants_for(nn.Sigmoid)
def _sigmoid(layer: nn.Sigmoid, x: Bound) -> Constants:
    return elementwise(x, 0.25, at_zero=0.5, largest=1.0)


@constants_for(TemperedSigmoid)
def _tempered_sigmoid(layer: TemperedSigmoid, x: Bound) -> Constants:
    largest = max(abs(layer.offset), abs(layer.scale - layer.offset)) * INFLATION
    slope = layer.scale * layer.inverse_temperature / 4 * INFLATION
    return elementwise(x, slope, at_zero=(layer.scale / 2 - layer.offset) * INFLATION, largest=largest)


@constants_for(nn.Softplus)
def _softplus(layer: nn.Softplus, x: Bound) -> Constants:
    """log(1 + e^βx)/β; torch goes over to x itself where βx > threshold, which differs by e^-threshold/β at most."""
    if layer.beta <= 0 or layer.threshold < 15:
        refuse(layer, "is bounded for beta above 0 and a threshold of at least 15.")
    return elementwise(x, 1.0, at_zero=math.log(2) / layer.beta * INFLATION)


@constants_for(nn.LeakyReLU)
def _leaky_relu(layer: nn.LeakyReLU, x: Bound) -> Constants:
    return elementwise(x, max(1.0, abs(layer.negative_slope)))


@constants_for(nn.ELU)
def _elu(layer: nn.ELU, x: Bound) -> Constants:
    return elementwise(x, max(1.0, abs(layer.alpha)))


@constants_for(nn.GELU)
def _gelu(layer: nn.GELU, x: Bound) -> Constants:
    """The slope is largest at √2: Φ(√2) + √2·φ(√2) = 1.12890…, a little more in the form with tanh."""
    return elementwise(x, 1.13)


@constants_for(nn.SiLU)
def _silu(layer: nn.SiLU, x: Bound) -> Constants:
    """x·sigmoid(x) has a slope of at most 1.09984…."""
    return elementwise(x, 1.1)


# Shapes


@constants_for(nn.Flatten)
def _flatten(layer: nn.Flatten, x: Bound) -> Constants:
    start, end = (dim if dim >= 0 else dim + len(x.shape) + 1 for dim in (layer.start_dim, layer.end_dim))
    if start < 1:
        refuse(layer, "with start_dim=0 mixes the records. Use start_dim=1.")
    flat = math.prod(x.shape[start - 1 : end])
    return Constants(Bound(x.norm, (*x.shape[: start - 1], flat, *x.shape[end:])), 1.0)


@constants_for(nn.Unflatten)
def _unflatten(layer: nn.Unflatten, x: Bound) -> Constants:
    if not isinstance(layer.dim, int) or layer.dim in (0, -len(x.shape) - 1):
        refuse(layer, "must name the axis by its number, and that of the records, 0, must stay as it is.")
    record = torch.empty(0, *x.shape, device="meta")
    return Constants(Bound(x.norm, tuple(record.unflatten(layer.dim, layer.unflattened_size).shape[1:])), 1.0)  # type: ignore[no-untyped-call]


@constants_for(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
def _dropout(layer: nn.Module, x: Bound) -> Constants:
    refuse(layer, "scales what it keeps up by 1/(1 − p), and the noise of the training regularises already. Remove it.")


# Pools


@constants_for(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def _max_pool(layer: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d, x: Bound) -> Constants:
    """|max P_t − max P'_t| ≤ ‖P_t − P'_t‖, and an entry lies in at most m windows: √m, which is 1 if none overlap."""
    if layer.return_indices:
        refuse(layer, "with return_indices gives two tensors, and only one is bounded.")
    axes = _axes(layer, x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
    if not all(axis.meets_entries() for axis in axes):
        refuse(layer, f"has windows that hold nothing but padding, for records of the shape {x.shape}.")
    return pooled(x, axes)


@constants_for(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def _average_pool(layer: nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d, x: Bound) -> Constants:
    """A fixed linear map, the product of those along the axes: its norm is the product of theirs."""
    if getattr(layer, "divisor_override", None):
        refuse(layer, "with divisor_override does not take means. Leave it out.")
    axes = _axes(layer, x, layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode)
    if not all(axis.meets_entries() for axis in axes):
        refuse(layer, f"has windows that hold nothing but padding, for records of the shape {x.shape}.")
    norm = math.prod(axis.mean_norm(count_padding=layer.count_include_pad) for axis in axes) * INFLATION
    return Constants(Bound(norm * x.norm, (x.shape[0], *(axis.positions for axis in axes))), norm)


@constants_for(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
def _adaptive_pool(layer: Any, x: Bound) -> Constants:
    means = isinstance(layer, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d)
    if not means and layer.return_indices:
        refuse(layer, "with return_indices gives two tensors, and only one is bounded.")
    dimensions = 1 if isinstance(layer, nn.AdaptiveAvgPool1d | nn.AdaptiveMaxPool1d) else 2
    sizes = _spatial(layer, x, dimensions)
    wanted = layer.output_size if isinstance(layer.output_size, Sequence) else [layer.output_size] * dimensions
    outputs = [size if out is None else out for size, out in zip(sizes, wanted, strict=True)]
    found = [adaptive(size, out) for size, out in zip(sizes, outputs, strict=True)]
    norm = math.prod(norm if means else math.sqrt(often) for norm, often in found) * INFLATION
    return Constants(Bound(norm * x.norm, (x.shape[0], *outputs)), norm)


def pooled(x: Bound, axes: Sequence[Axis]) -> Constants:
    """Of one number per window that is 1-Lipschitz in the window and no larger than its norm."""
    norm = math.sqrt(multiplicity(axes)) * INFLATION
    return Constants(Bound(norm * x.norm, (x.shape[0], *(axis.positions for axis in axes))), norm)


def _axes(layer: nn.Module, x: Bound, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> list[Axis]:
    dimensions = int(type(layer).__name__[-2])  # MaxPool2d
    sizes = _spatial(layer, x, dimensions)
    each = [value if isinstance(value, Sequence) else [value] * dimensions for value in (kernel, stride, dilation)]
    pads = padding if isinstance(padding, Sequence) else [padding] * dimensions
    axes = [Axis(size, k, s, d, pad, pad, ceil) for size, k, s, d, pad in zip(sizes, *each, pads, strict=True)]
    if min(axis.positions for axis in axes) < 1:
        refuse(layer, f"has windows larger than its input of shape {x.shape}.")
    return axes


def _spatial(layer: nn.Module, x: Bound, dimensions: int) -> tuple[int, ...]:
    if len(x.shape) != dimensions + 1:
        refuse(layer, f"takes channels and {dimensions} axes, and records reach it with the shape {x.shape}.")
    return x.shape[1:]
