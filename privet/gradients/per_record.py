"""The gradient of one parameter for each record of a chunk, kept in whatever form is cheapest.

A layer's rule (``linear.py``, ``conv.py``, …) turns the layer's input and the gradient at its output into one
`PerRecord` per parameter. Methods ask it three things only: the squared norm of each record's gradient, a weighted
sum over records, and, where there is no way around it, all gradients in full.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Rule = Callable[[Any, Tensor, Tensor], Mapping[str, "PerRecord"]]
"""(layer, input, gradient at the output) to a `PerRecord` for each parameter of the layer, by its name in the layer."""

RULES: dict[type[nn.Module], Rule] = {}
"""The layers with a rule of their own; every other layer is handled by `fallback`."""

_R = TypeVar("_R", bound=Rule)

UNIT_ROUNDING = 2.0**-24
"""Of float32: the relative error of one addition or multiplication."""


def rule_for(*layers: type[nn.Module]) -> Callable[[_R], _R]:
    """Registers a rule for layers of exactly these types (a subclass may compute something else)."""

    def register(rule: _R) -> _R:
        RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


class PerRecord(ABC):
    """Formal guarantee: `squared_norms` is at least ‖g_i‖², to rounding, for the g_i that `weighted_sum` adds.

    They are float64: squares and products of float32 numbers neither overflow nor vanish there.
    """

    squared_norms: Tensor

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights[i]·g_i, in the shape of the parameter."""

    def accumulate(self, weights: Tensor, total: Tensor) -> None:
        """Adds the weighted sum to `total`."""
        total.add_(self.weighted_sum(weights))

    @abstractmethod
    def dense(self) -> Tensor:
        """All g_i as one tensor (records, *parameter's shape), which the caller may change."""

    @abstractmethod
    def drop(self, records: Tensor) -> None:
        """Makes the gradients of these records (a boolean mask) exactly zero, whatever they were."""


class Dense(PerRecord):
    """Gradients in full: `rows` is (parts, records, size); `shaped` makes (parts, …, size) into the parameter's shape.

    Most parameters have one part; a rule may compute a gradient in several that lie apart in memory.
    """

    def __init__(self, rows: Tensor, shaped: Callable[[Tensor], Tensor], squared_norms: Tensor | None = None) -> None:
        self.rows = rows
        self.shaped = shaped
        self.squared_norms = (
            sum(row_squares(part) for part in rows[1:]) + row_squares(rows[0])
            if squared_norms is None
            else squared_norms
        )

    @classmethod
    def of(cls, gradients: Tensor, squared_norms: Tensor | None = None) -> Dense:
        shape = gradients.shape[1:]
        rows = (gradients.flatten(1) if shape else gradients.unsqueeze(1)).unsqueeze(0)
        return cls(rows, lambda rows: rows[0].view((*rows.shape[1:-1], *shape)), squared_norms)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weights = weights.to(self.rows)
        return self.shaped(torch.stack([weights @ part for part in self.rows]))  # one by one: a product of all copies

    def dense(self) -> Tensor:
        return self.shaped(self.rows)

    def drop(self, records: Tensor) -> None:
        self.rows[:, records] = 0


SLICE = 2**14
"""Norms are taken over at most so many entries at a time: float32 loses up to an 8000th of a longer one's square."""


def row_squares(rows: Tensor) -> Tensor:
    """The squared length of each record's entries, in float64, read once and without a temporary of that size.

    At least as large as the true one, but for a relative error of 2^-14: callers leave room for that. The square of a
    float32 number below 2^-63 may vanish; so that a record of many such numbers does not seem to be zero, each norm is
    raised by what may have been lost.
    """
    rows = rows.flatten(1)
    size = rows.shape[1]
    if size <= SLICE:
        return squares_of(torch.linalg.vector_norm(rows, dim=1), size)
    whole = size - size % SLICE
    slices = rows[:, :whole].unflatten(1, (-1, SLICE))  # type: ignore[no-untyped-call]
    squares = squares_of(torch.linalg.vector_norm(slices, dim=2), SLICE).sum(1)
    return squares + row_squares(rows[:, whole:]) if whole < size else squares


def squares_of(norms: Tensor, size: int) -> Tensor:
    """The squares of norms that were taken in float32 over `size` entries (at most `SLICE`); see `row_squares`."""
    return (norms.double() + math.sqrt(size) * 2.0**-62).square()


def wide(tensor: Tensor) -> Tensor:
    """Norms and sums are never computed below float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
