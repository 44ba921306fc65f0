"""Loops in C (kernels.c) for what PyTorch does in several passes over memory: float32 on the processor.

They are built when Privet is installed, if there is a compiler that can, and are optional: each has a twin in PyTorch,
used wherever `serves` says no, which gives the same numbers but for the order in which they are added.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch  # first: the library must find PyTorch's OpenMP loaded, and use its threads
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PrivetError, Refused

_VERSION = 10
"""Of what the functions take, in kernels.c as well: raised whenever that changes."""
_WIDE = 16
"""Of kernels.c: so many channels at a time."""
_SIGNATURES: dict[str, tuple[type | None, str]] = {
    "privet_ternary_counts": (None, "ppiiifp"),
    "privet_ternary_sum": (None, "pppiiifp"),
    "privet_convolution_gradients": (ctypes.c_int, "pppppp"),
    "privet_convolution_inputs": (ctypes.c_int, "pppp"),
    "privet_clip_rows": (ctypes.c_int, "piidpppp"),
    "privet_scale_outputs": (None, "piiiipp"),
    "privet_weight_rows": (ctypes.c_int, "piippp"),
    "privet_clip_patches": (ctypes.c_int, "ppdppp"),
    "privet_clip_gradients": (ctypes.c_int, "piiiidipppp"),
    "privet_add_noise": (ctypes.c_int, "piddpp"),
    "privet_mean_squares": (None, "piip"),
    "privet_add_multiples": (None, "pppifiip"),
    "privet_curriculum": (ctypes.c_int, "ppiiddpp"),
}
"""What each function returns, and what it takes: pointers, int64, float and double."""
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


def _load() -> ctypes.CDLL | None:
    found = find_spec(f"{__name__}._kernels")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        if ctypes.c_int64.in_dll(library, "privet_version").value != _VERSION:
            return None
        for name, (result, takes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, [_TYPES[kind] for kind in takes]
    except (OSError, AttributeError, ValueError):  # built for another machine, or from another version of the file
        return None
    return library


library = _load()
"""The functions; None where they were not built."""


def serves(*tensors: Tensor) -> bool:
    """Whether the functions here can take these tensors: what lies in their memory must be what they are."""
    return library is not None and all(map(_is_plain, tensors))


def _is_plain(t: Tensor) -> bool:
    return t.dtype == torch.float32 and t.is_cpu and not (t.is_neg() or t._is_zerotensor())


def _c() -> Any:
    assert library is not None, "ask `serves` first"
    return library


def ternary_counts(delta: Tensor, z: Tensor, tau: float) -> Tensor:
    """How many entries of δ_n z_nᵀ are larger than τ in size, for each record n; not a number if one is not finite."""
    delta, z = delta.contiguous(), z.contiguous()
    counts = z.new_zeros(len(z), dtype=torch.float64)
    _c().privet_ternary_counts(
        delta.data_ptr(), z.data_ptr(), len(z), delta.shape[1], z.shape[1], tau, counts.data_ptr()
    )
    return counts


def ternary_sum(delta: Tensor, z: Tensor, weights: Tensor, tau: float) -> Tensor:
    """Σ_n weights[n]·t(δ_n z_nᵀ): t is the sign of the entries that `ternary_counts` counts, and 0 of the others."""
    delta, z, weights = delta.contiguous(), z.contiguous(), weights.float().contiguous()
    total = z.new_zeros(delta.shape[1], z.shape[1])
    _c().privet_ternary_sum(
        delta.data_ptr(), z.data_ptr(), weights.data_ptr(), len(z), delta.shape[1], z.shape[1], tau, total.data_ptr()
    )
    return total


def convolution_gradients(
    layer: nn.Conv2d, z: Tensor, padding: Sequence[tuple[int, int]], delta: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes each record's ∇W to `rows` (records, kernel height·width·channels·out channels).

    Gives their squared norms, which are added up in float64, and each record's ∇b. For any layout, stride, dilation and
    zero padding; one group.
    """
    if not rows.is_contiguous() or rows.numel() != len(z) * layer.weight.numel():
        raise ValueError(f"rows of shape {tuple(rows.shape)} do not hold {len(z)} gradients of {layer.kernel_size}.")
    described = _convolution(layer, z, padding, delta)
    squares, sums = z.new_empty(len(z), dtype=torch.float64), z.new_empty(delta.shape[:2])
    failed = _c().privet_convolution_gradients(
        ctypes.addressof(described), z.data_ptr(), delta.data_ptr(), rows.data_ptr(), squares.data_ptr(),
        sums.data_ptr(),
    )  # fmt: skip
    _check(failed)
    return squares, sums


def convolution_inputs(layer: nn.Conv2d, x: Tensor, padding: Sequence[tuple[int, int]], delta: Tensor) -> Tensor:
    """The gradient at an input that looks like x, of the gradient at its output.

    Channels last for both, without gaps; zero padding, one group and no dilation.
    """
    last = torch.channels_last
    if not (x.is_contiguous(memory_format=last) and delta.is_contiguous(memory_format=last)) or max(layer.dilation) > 1:
        raise ValueError("A gradient at the input is made for channels last, and without dilation.")
    described, (_, channels, *_), out = _convolution(layer, x, padding, delta), x.shape, torch.empty_like(x)
    weight = F.pad(layer.weight.detach().permute(2, 3, 0, 1), (0, -channels % _WIDE)).contiguous()
    failed = _c().privet_convolution_inputs(
        ctypes.addressof(described), delta.data_ptr(), weight.data_ptr(), out.data_ptr()
    )
    _check(failed)
    return out


def _convolution(layer: nn.Conv2d, x: Tensor, padding: Sequence[tuple[int, int]], delta: Tensor) -> Any:
    """What C is told of a convolution, after it was seen that it leads from this input to that output."""
    records, channels, height, width = x.shape
    (top, bottom), (left, right) = padding
    kernel, framed = tuple(layer.weight.shape[2:]), (height + top + bottom, width + left + right)
    axes = zip(framed, kernel, layer.stride, layer.dilation, strict=True)
    expected = (records, len(layer.weight), *((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes))
    if delta.shape != expected or layer.weight.shape[1] != channels or min(kernel) < 1:
        raise Refused(
            f"A convolution with a weight of shape {tuple(layer.weight.shape)} cannot have led from {tuple(x.shape)} "
            f"to {tuple(delta.shape)}: its forward pass does something else."
        )
    sizes = (
        *x.shape, *x.stride(), *delta.shape[1:], *delta.stride(), *kernel, *layer.stride, *layer.dilation,
        top, left, *framed,
    )  # fmt: skip
    return (ctypes.c_int64 * len(sizes))(*sizes)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(failed: int) -> None:
    if failed:
        raise PrivetError("There is not enough memory for a layer's gradients: use smaller physical batches.")


def dense(x: Tensor) -> bool:
    """Whether the records of (records, channels, height, width) lie one after another, channels first or last."""
    return x.dim() == 4 and (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))


def clip_rows(
    x: Tensor, target: float, *, also: Tensor | None = None, out: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """(records, size): the factor of each row that makes it at most `target` long.

    Rows times their factors, and times `also`, are written to `out` (contiguous); the sum of the rows times their
    factors alone is added to `total` (contiguous, float64). A row whose length is not finite becomes zero, as its
    factor.
    """
    x, factors = x.contiguous(), x.new_empty(x.shape[0])
    also = None if also is None else also.float().contiguous()
    _check(
        _c().privet_clip_rows(
            x.data_ptr(), *x.shape, target, _address(also), _address(out), factors.data_ptr(), _address(total)
        )
    )
    return factors


def scale_outputs(y: Tensor, factors: Tensor, bias: Tensor | None) -> None:
    """y[n] ← bias + factors[n]·(y[n] − bias), in place; y is (records, channels), contiguous, or `dense`."""
    records, channels, *axes = y.shape
    if factors.shape != (records,) or (bias is not None and bias.shape != (channels,)):
        raise ValueError(f"{tuple(factors.shape)} factors and a bias do not go with outputs of {tuple(y.shape)}.")
    factors, bias = factors.contiguous(), None if bias is None else bias.contiguous()
    _c().privet_scale_outputs(
        y.data_ptr(), records, channels, math.prod(axes), not y.is_contiguous(), factors.data_ptr(), _address(bias)
    )


def weight_rows(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Writes weights[n]·x[n] to the rows of `out`; gives their sum, which was added up in float64."""
    x, weights = x.contiguous(), weights.float().contiguous()
    if x.dim() != 2 or out.shape != x.shape or not out.is_contiguous() or weights.shape != x.shape[:1]:
        raise ValueError(f"{tuple(weights.shape)} weights do not go with {tuple(x.shape)} and {tuple(out.shape)}.")
    total = x.new_zeros(x.shape[1], dtype=torch.float64)
    _check(_c().privet_weight_rows(x.data_ptr(), *x.shape, weights.data_ptr(), out.data_ptr(), total.data_ptr()))
    return total.float()


def clip_patches(
    x: Tensor,
    target: float,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
    *,
    counts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`dense` records: the factor of each that makes its longest patch at most `target` long.

    With `counts`, of how many patches have each position (contiguous), all patches together are. Zeros are around the
    records. What is not finite, and what is written to `out` (laid out as x), as in `clip_rows`.
    """
    if counts is not None and counts.shape != x.shape[2:]:
        raise ValueError(f"{tuple(counts.shape)} counts do not go with records of {tuple(x.shape)}.")
    axes = zip(x.shape[2:], kernel, stride, dilation, padding, strict=True)
    positions = [(n + before + after - d * (k - 1) - 1) // s + 1 for n, k, s, d, (before, after) in axes]
    last = not x.is_contiguous()
    sizes = (*x.shape, last, *kernel, *stride, *dilation, padding[0][0], padding[1][0], *positions)
    described = (ctypes.c_int64 * len(sizes))(*sizes)
    factors = x.new_empty(x.shape[0])
    failed = _c().privet_clip_patches(
        ctypes.addressof(described), x.data_ptr(), target, _address(counts), _address(out), factors.data_ptr()
    )
    _check(failed)
    return factors


KINDS = ("l1-l2", "frobenius", "with-bias")
"""Of norms of gradients: √Σ_c (Σ_t |δ_ct|)²; ‖δ‖; the larger of ‖δ‖ and ‖Σ_t δ_t‖. In kernels.c by their number."""


def clip_gradients(
    delta: Tensor, target: float, also: Tensor | None = None, *, kind: str = "l1-l2"
) -> tuple[Tensor, Tensor, Tensor]:
    """`dense` gradients, times factors so that their norm of this kind is at most `target`, and times `also`.

    Then the factors, and Σ_t δ_t times the factors alone. What is not finite, as in `clip_rows`.
    """
    records, channels, height, width = delta.shape
    out, factors, sums = torch.empty_like(delta), delta.new_empty(records), delta.new_empty(records, channels)
    also = None if also is None else also.float().contiguous()
    failed = _c().privet_clip_gradients(
        delta.data_ptr(), records, channels, height * width, not delta.is_contiguous(), target, KINDS.index(kind),
        _address(also), out.data_ptr(), factors.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    _check(failed)
    return out, factors, sums


def add_noise(words: Tensor, total: Tensor, std: float, grid: float, out: Tensor) -> bool:
    """Writes total + N(0, std²), rounded to multiples of `grid`, to `out`; all flat, the words int64 and random.

    Gives whether all totals are finite: if not, what was written is of no use. Takes as many words as there are
    numbers, made even. `grid` is a power of two, and `out` other memory than `total`.
    """
    count, places, drawn = total.numel(), out.numel(), words.numel()
    if places != count or drawn < count + count % 2 or not (total.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"{count} sums do not go with {drawn} words and {places} places.")
    return not _c().privet_add_noise(words.data_ptr(), count, std / grid, grid, total.data_ptr(), out.data_ptr())


def in_rows(x: Tensor) -> bool:
    """Whether there are numbers in x, and its records lie one after another without gaps."""
    return x.numel() > 0 and x.dim() > 1 and (x.is_contiguous() or dense(x))


def mean_squares(x: Tensor) -> Tensor:
    """Of each record of x, whose records lie one after another (`in_rows`)."""
    found = x.new_empty(len(x))
    _c().privet_mean_squares(x.data_ptr(), len(x), x.numel() // len(x), found.data_ptr())
    return found


def add_multiples(x: Tensor, y: Tensor, factors: Tensor, factor: float) -> Tensor:
    """x[n] + factor·factors[n]·y[n]; x and y are laid out alike, with records one after another (`in_rows`)."""
    if x.shape != y.shape or x.stride() != y.stride() or factors.shape != x.shape[:1]:
        raise ValueError(f"{tuple(factors.shape)} factors do not go with {tuple(x.shape)} and {tuple(y.shape)}.")
    out = torch.empty_like(x)
    _c().privet_add_multiples(
        x.data_ptr(), y.data_ptr(), factors.data_ptr(), factors.stride(0), factor, len(x), x.numel() // len(x),
        out.data_ptr(),
    )  # fmt: skip
    return out


def curriculum(scores: Tensor, targets: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """α·Focal_γ + (1 − α)·SSE of each record, and its slopes at the scores."""
    scores, targets = scores.contiguous(), targets.long().contiguous()
    if scores.dim() != 2 or targets.shape != scores.shape[:1] or not scores.shape[1]:
        raise ValueError(f"{tuple(targets.shape)} targets do not go with scores of shape {tuple(scores.shape)}.")
    losses, slopes = scores.new_empty(len(scores)), torch.empty_like(scores)
    outside = _c().privet_curriculum(
        scores.data_ptr(), targets.data_ptr(), *scores.shape, alpha, gamma, losses.data_ptr(), slopes.data_ptr()
    )
    if outside:
        raise IndexError(f"A target is not the number of a class, 0 to {scores.shape[1] - 1}.")
    return losses, slopes
