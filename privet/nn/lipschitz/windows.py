"""How often windows that slide over an axis meet each of its entries: the geometry of convolutions and pools.

Windows are boxes, so what holds for an image is the product of what holds along its axes. All of it depends on shapes
alone and is computed once for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Axis:
    """Windows along one axis."""

    length: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil: bool = False
    circular: bool = False

    @property
    def positions(self) -> int:
        """How many windows there are; with `ceil` the last may reach over the end, but begins before it."""
        free = self.length + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        count = (math.ceil(free / self.stride) if self.ceil else free // self.stride) + 1
        if self.ceil and (count - 1) * self.stride >= self.length + self.before:
            count -= 1
        return count

    def multiplicity(self) -> int:
        """In how many windows the entry lies that lies in most: the maximum, not the average."""
        return int(_counts(self).sum(1).max())

    def meets_entries(self) -> bool:
        """Whether every window holds an entry, and none is all padding."""
        return bool((_counts(self).sum(0) > 0).all())

    def wrap(self) -> int:
        """How often the same window occurs, at stride 1, because circular padding goes round more than once."""
        if not self.circular:
            return 1
        return max(
            1, math.ceil((self.length + self.before + self.after - self.dilation * (self.kernel - 1)) / self.length)
        )

    def mean_norm(self, *, count_padding: bool) -> float:
        """The norm of taking the mean of each window."""
        return _mean_norm(self, count_padding)


def multiplicity(axes: Sequence[Axis]) -> int:
    return math.prod(axis.multiplicity() for axis in axes)


@lru_cache(maxsize=256)
def _counts(axis: Axis) -> npt.NDArray[np.int64]:
    """(length, positions): how often each window takes each entry."""
    taps = axis.stride * np.arange(axis.positions)[:, None] + axis.dilation * np.arange(axis.kernel) - axis.before
    if axis.circular:
        taps %= axis.length
    counts = np.zeros((axis.length, axis.positions), dtype=np.int64)
    window, tap = np.nonzero((taps >= 0) & (taps < axis.length))
    np.add.at(counts, (taps[window, tap], window), 1)
    return counts


@lru_cache(maxsize=256)
def _mean_norm(axis: Axis, count_padding: bool) -> float:
    counts = _counts(axis)
    divisors = counts.sum(0)
    if count_padding:
        starts = axis.stride * np.arange(axis.positions)
        divisors = np.minimum(starts + axis.kernel, axis.length + axis.before + axis.after) - starts
    return float(np.linalg.norm(counts / divisors, 2))


@lru_cache(maxsize=256)
def adaptive(length: int, outputs: int) -> tuple[float, int]:
    """Of adaptive pooling along an axis: the norm of taking means, and in how many windows an entry lies at most."""
    counts = np.zeros((length, outputs))
    for i in range(outputs):
        counts[i * length // outputs : -(-(i + 1) * length // outputs), i] = 1
    return float(np.linalg.norm(counts / counts.sum(0), 2)), int(counts.sum(1).max())
