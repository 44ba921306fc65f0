"""The gradient of one parameter for each record of a chunk, kept in whatever form is cheapest.

A layer's rule (``linear.py``, ``conv.py``, …) turns the layer's input and the gradient at its output into one
`PerRecord` per parameter. Methods ask it three things only: the squared norm of each record's gradient, a weighted
sum over records, and, where there is no way around it, all gradients in full.
"""

from __future__ import annotations

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

ROUNDING = 2.0**-20
"""What a ghost norm adds, as a share of the largest value that its sums could have had.

A ghost norm is a sum of products that may cancel: the rounding error is relative to the terms and not to the result,
so that a hostile record could have a norm that is computed as nearly zero and is not. Adding this share makes the
computed norm an upper bound on the true one.
"""


def rule_for(*layers: type[nn.Module]) -> Callable[[_R], _R]:
    """Registers a rule for layers of exactly these types (a subclass may compute something else)."""

    def register(rule: _R) -> _R:
        RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


class PerRecord(ABC):
    """Formal guarantee: `squared_norms` is at least ‖g_i‖² up to float32 rounding, for the g_i that `weighted_sum` adds."""

    squared_norms: Tensor

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights[i]·g_i, in the shape of the parameter."""

    @abstractmethod
    def dense(self) -> Tensor:
        """All g_i as one tensor (records, *parameter's shape)."""

    @abstractmethod
    def drop(self, records: Tensor) -> None:
        """Makes the gradients of these records (a boolean mask) exactly zero, whatever they were."""


class Dense(PerRecord):
    """Gradients in full. `rows` is (records, size); `shaped` turns (…, size) into (…, *parameter's shape)."""

    def __init__(self, rows: Tensor, shaped: Callable[[Tensor], Tensor], squared_norms: Tensor | None = None) -> None:
        self.rows = rows
        self.shaped = shaped
        self.squared_norms = row_squares(rows) if squared_norms is None else squared_norms

    @classmethod
    def of(cls, gradients: Tensor) -> Dense:
        shape = gradients.shape[1:]
        return cls(gradients.reshape(gradients.shape[0], -1), lambda rows: rows.reshape(*rows.shape[:-1], *shape))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.shaped(weights.to(self.rows.dtype) @ self.rows)

    def dense(self) -> Tensor:
        return self.shaped(self.rows)

    def drop(self, records: Tensor) -> None:
        self.rows[records] = 0


def row_squares(rows: Tensor) -> Tensor:
    """The squared length of each record's entries, read once and without a temporary of that size."""
    return torch.linalg.vector_norm(rows.flatten(1), dim=1).square()


def wide(tensor: Tensor) -> Tensor:
    """Norms and sums are never computed below float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
