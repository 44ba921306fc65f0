"""Upper bounds on the norms of linear maps, each proved: power iteration approaches a norm from below, so it is none.

Everything is computed in float64 and inflated by 1e-5, far more than its rounding: an eigenvalue of an n×n Gram matrix
is wrong by at most a small multiple of n·2^-53 of the largest, below 1e-9 for n up to a million.

The network itself computes in float32. A sum of n products, in whatever order, is wrong by at most n·2^-24·Σ|w_i·x_i|
to first order (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3), so what a layer puts out is within
n·2^-24·‖|W||x|‖ ≤ n·2^-24·‖W‖_F·‖x‖ of W·x: `rounding` is that number, and layers add it to their norms. It costs well
below a per cent of the noise. Activations and losses are a few operations per number, each exact to about 2^-23, which
the 1e-5 on every parameter's gradient covers.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ...precision import coarseness

INFLATION = 1 + 1e-5

_EXACT = 512
"""Up to this many rows (or columns) the eigenvalues of the Gram matrix are cheap enough to compute."""
_FOURIER_BUDGET = 4e9
"""Multiplications above which a convolution is not looked at in frequency space."""
_FINE_BUDGET = 2e6
"""Below so many, frequencies are looked at twice as densely."""
_FIRST = 32
"""How many matrices of a stack are looked at before the others are ruled out."""


def spectral_norm(matrix: Tensor) -> float:
    """At least ‖W‖₂; for a stack of matrices, at least the largest of their norms.

    The root of the largest eigenvalue of the Gram matrix G. Where that would be dear, the best of
    √(1 + ‖G − I‖_F), sharp near orthogonality, and ‖G^4‖_F^(1/8), which is at most rank^(1/16) too large.
    """
    matrix, scale = _scaled(matrix)
    return scale * math.sqrt(_largest_eigenvalue(_gram(matrix))) * INFLATION


def frobenius_norm(weight: Tensor) -> float:
    weight, scale = _scaled(weight)
    return scale * float(torch.linalg.vector_norm(weight)) * INFLATION


def _scaled(weight: Tensor) -> tuple[Tensor, float]:
    """In float64, divided by a factor where its squares would vanish or be too large, and that factor."""
    weight = weight.detach().double()
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if 0 < largest < 1e-100 or 1e100 < largest < math.inf:
        return weight / largest, largest
    return weight, 1.0


def rounding(weight: Tensor, terms: int) -> float:
    """By how much a product of sums with this many terms may be off, relative to ‖W‖_F·‖x‖."""
    if weight.dtype == torch.float64:
        return terms * 2.0**-53
    return coarseness(weight.device.type) + terms * 2.0**-24


def convolution_norm(weight: Tensor, *, groups: int, multiplicity: int, wrap: int) -> float:
    """At least the norm of a convolution as a linear map, with any stride and dilation; the better of two bounds.

    - By patches: Σ_t ‖W·P_t‖² ≤ ‖W‖²·Σ_t ‖P_t‖² ≤ ‖W‖²·multiplicity·‖x‖² with the kernel reshaped to a matrix, where no
      input lies in more than `multiplicity` patches.
    - By frequencies: zero padding is the convolution on the infinite plane, with inputs that are zero outside and with
      some of its outputs left out (a stride leaves out more). That one has the norm sup_ω ‖Ŵ(ω)‖, which dilation does
      not change. A circular convolution meets only some of the frequencies, but may put the same output out up to
      `wrap` times if it is padded by more than it needs.
    """
    unit, scale = _scaled(weight)
    kernels = unit.reshape(groups, -1, *weight.shape[1:])
    by_patches = math.sqrt(multiplicity) * spectral_norm(kernels.flatten(2))
    return scale * min(by_patches, math.sqrt(wrap) * _frequency_norm(kernels))


def _frequency_norm(kernels: Tensor) -> float:
    """At least sup_ω ‖Ŵ(ω)‖₂ of (groups, out, in, *kernel), from n frequencies along each axis.

    For fixed unit vectors, u·Ŵ(ω)v is a trigonometric polynomial p with k coefficients along an axis, so up to a phase
    of degree d = ⌊k/2⌋. Let K be the product of Dirichlet kernels with n and n − 2d coefficients, over n − 2d: its own
    coefficients are 1 up to degree d and 0 from n − d on, so that p(ω) = (1/n)·Σ_j p(ω_j)·K(ω − ω_j) over n equidistant
    ω_j. By Cauchy-Schwarz and Parseval (1/n)·Σ_j |K| ≤ √(n·(n − 2d)) / (n − 2d), and hence
    sup|p| ≤ (1 − 2d/n)^(-1/2)·max_j |p(ω_j)|, once for each axis.
    """
    groups, rows, columns, *sizes = kernels.shape
    small, large = sorted((rows, columns))
    fineness = 8 if _work(groups, small, large, sizes, 8) < _FINE_BUDGET else 4
    if _work(groups, small, large, sizes, fineness) > _FOURIER_BUDGET:
        return math.inf
    points = [1 if size == 1 else fineness * size for size in sizes]
    factor: float = math.prod((1 - 2 * (size // 2) / n) ** -0.5 for size, n in zip(sizes, points, strict=True))
    waves = _waves(tuple(sizes), tuple(points)).to(kernels.device)
    flat = kernels.reshape(groups * rows * columns, -1).T.to(torch.complex128)
    spectrum = (waves @ flat).view(-1, rows, columns)
    return factor * math.sqrt(_largest_eigenvalue(_gram(spectrum))) * INFLATION


def _work(groups: int, small: int, large: int, sizes: list[int], fineness: int) -> float:
    return groups * small * small * large * math.prod(fineness * size for size in sizes if size > 1) / 2


@lru_cache(maxsize=64)
def _waves(sizes: tuple[int, ...], points: tuple[int, ...]) -> Tensor:
    """(frequencies, entries of the kernel): e^(−iω·j); of the last axis half, as a real kernel has Ŵ(−ω) = Ŵ(ω)*."""
    waves = torch.ones(1, 1, dtype=torch.complex128)
    for axis, (size, n) in enumerate(zip(sizes, points, strict=True)):
        kept = n // 2 + 1 if axis == len(sizes) - 1 else n
        turns = torch.arange(kept, dtype=torch.float64).outer(torch.arange(size, dtype=torch.float64)) / n
        waves = torch.kron(waves, torch.polar(torch.ones_like(turns), -2 * math.pi * turns))
    return waves


def _gram(matrix: Tensor) -> Tensor:
    other = matrix.mH.resolve_conj()
    return matrix @ other if matrix.shape[-2] <= matrix.shape[-1] else other @ matrix


def _largest_eigenvalue(gram: Tensor) -> float:
    """Of a positive semidefinite matrix, or the largest in a stack of them; not a number if an entry is none."""
    if not bool(torch.isfinite(gram).all()):
        return math.nan
    if gram.shape[-1] == 1:
        return float(gram.real.max())
    if gram.shape[-1] <= _EXACT:
        return _exactly(gram.reshape(-1, *gram.shape[-2:]))
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    off = torch.linalg.matrix_norm(gram - identity).real
    scale = torch.linalg.matrix_norm(gram).real.clamp(min=torch.finfo(torch.float64).tiny)
    square = (gram / scale[..., None, None]) @ (gram / scale[..., None, None])
    powers = scale * torch.linalg.matrix_norm(square @ square).real.pow(0.25)
    return float(torch.minimum(1 + off, powers).max())


def _exactly(grams: Tensor) -> float:
    """The largest eigenvalue in a stack; that of G is at most ‖G²‖_F^½, so most need no look."""
    if len(grams) > 2 * _FIRST:
        ceilings = torch.linalg.matrix_norm(grams @ grams).sqrt()
        reached = _exactly(grams[ceilings.topk(_FIRST).indices])
        left = grams[ceilings > reached]
        return max(reached, float(torch.linalg.eigvalsh(left)[:, -1].max())) if len(left) else reached
    return max(0.0, float(torch.linalg.eigvalsh(grams)[:, -1].max()))
