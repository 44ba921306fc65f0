"""The accounting check: the claimed epsilon against a lower bound from a second accountant that shares no code with it.

Two worst-case neighbours are written down whose outputs are known exactly: every other record adds nothing, and the one
that differs adds its bound. For them the hockey-stick divergence of the composition is found from below, by privacy
losses rounded down to a grid and composed by Fourier transform. No sound accountant can claim less.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..accounting import Mechanism
from .report import Check
from .statistics import gdp_epsilon

_CELLS = 2**19
_REACH = 9.0
"""Outputs further out than this many deviations are left out, which lowers the bound by less than 1e-17 a step."""
_SLACK = 2e-3
"""What the rounding of Fourier transforms and of the search may shift."""

_Array = npt.NDArray[np.float64]


def check_accounting(mechanism: Mechanism, count: int, claimed: float, delta: float) -> Check:
    found = epsilon_from_below(mechanism, count, delta)
    return Check(
        name="claimed epsilon against a second accountant",
        holds=claimed >= found * (1 - _SLACK),
        measured=found,
        bound=claimed,
        detail=f"epsilon at delta {delta:g} that {count} compositions cannot be below",
    )


def epsilon_from_below(mechanism: Mechanism, count: int, delta: float) -> float:
    """Formal guarantee: at most the true epsilon of the composition at this delta, up to rounding."""
    multiplier = mechanism.noise_multiplier
    if multiplier <= 0:
        return math.inf
    if mechanism.kind == "gaussian":
        return gdp_epsilon(math.sqrt(count) / multiplier, delta)
    rate = mechanism.rate if mechanism.kind == "poisson" else (mechanism.batch or 0) / (mechanism.records or 1)
    if mechanism.relation == "add_remove":
        pairs = [((rate, 1 / multiplier), (0.0, 0.0)), ((0.0, 0.0), (rate, 1 / multiplier))]
    else:  # with a sample of fixed size, the multiplier holds both halves of the exchange
        half = 1 / multiplier if mechanism.kind == "poisson" else 0.5 / multiplier
        pairs = [((rate, half), (rate, -half))]
    return max(_epsilon(*pair, count, delta) for pair in pairs)


_World = tuple[float, float]
"""Outputs are N(shift, 1) with probability rate, else N(0, 1): (rate, shift)."""


def _epsilon(first: _World, second: _World, count: int, delta: float) -> float:
    """The least ε ≥ 0 with Σ_ℓ P[ℓ]·(1 − e^(ε−ℓ))₊ ≤ δ, for the composed privacy losses ℓ rounded down."""
    reach = _REACH + max(abs(first[1]), abs(second[1]))
    edges = np.linspace(-reach, reach, 2**15 + 1)
    losses = _log_density(edges, first) - _log_density(edges, second)
    masses = np.diff(_cumulative(edges, first))
    lowest = np.minimum(losses[1:], losses[:-1])  # the loss is monotone in the output: the least within a cell
    mean = float(masses @ lowest)
    spread = math.sqrt(max(float(masses @ (lowest - mean) ** 2), 1e-12))
    width = 2 * (float(lowest.max() - lowest.min()) + 12 * spread * math.sqrt(count))
    step = width / _CELLS
    cells = np.floor(lowest / step).astype(np.int64)
    weights = np.bincount(cells - cells.min(), masses, minlength=_CELLS)
    composed = np.fft.irfft(np.fft.rfft(weights, _CELLS) ** count, _CELLS)
    # the transform is periodic: unroll it around where the composition lies
    start = round(count * float(masses @ cells)) - _CELLS // 2
    mass = np.maximum(np.roll(composed, (count * int(cells.min()) - start) % _CELLS), 0)
    # What the transform has rounded shows in the entries below zero; several times as much is allowed for above it.
    delta += 8 * float(-composed[composed < 0].sum()) + count * 2.0**-50
    loss: _Array = (start + np.arange(_CELLS)).astype(np.float64) * step
    high, low = float(loss[-1]), 0.0
    if _hockey_stick(loss, mass, 0.0) <= delta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _hockey_stick(loss, mass, middle) > delta else (low, middle)
    return low


def _hockey_stick(loss: _Array, mass: _Array, epsilon: float) -> float:
    above = slice(int(np.searchsorted(loss, epsilon, side="right")), None)
    return float(mass[above] @ -np.expm1(epsilon - loss[above]))


def _log_density(y: _Array, world: _World) -> _Array:
    """Up to what both worlds have in common."""
    rate, shift = world
    if rate == 0:
        return np.zeros_like(y)
    inside = shift * y - shift**2 / 2
    return np.asarray(np.logaddexp(math.log(rate) + inside, math.log1p(-rate) if rate < 1 else -math.inf))


def _cumulative(y: _Array, world: _World) -> _Array:
    from scipy import special  # noqa: PLC0415 - slow to import

    rate, shift = world
    return np.asarray((1 - rate) * special.ndtr(y) + rate * special.ndtr(y - shift))
