"""Per-record gradients of linear layers: ∇W = Σ_t δ_t z_tᵀ over the positions t of the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .. import native
from .per_record import UNIT_ROUNDING, Dense, PerRecord, row_squares, rule_for, wide
from .scratch import scratch

_SMALLEST_TRACE = 2.0**-100
"""Above this, what a float32 Gram matrix has lost is far below the margin."""


class Outer(PerRecord):
    """One position per record: ∇W = δ zᵀ has norm ‖δ‖·‖z‖, so nothing is built."""

    def __init__(self, z: Tensor, delta: Tensor, delta_squares: Tensor) -> None:
        self.z, self.delta = z, delta
        self.squared_norms = row_squares(z) * delta_squares
        self._columns: tuple[Tensor, Tensor] | None = None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        with scratch().lent(self.delta.shape, self.delta) as scaled:
            if native.serves(self.delta, scaled):
                columns = native.weight_rows(self.delta, weights, scaled)
            else:
                columns = torch.mul(self.delta, weights.to(self.delta).unsqueeze(1), out=scaled).sum(0)
            self._columns = (weights, columns)
            return scaled.T @ self.z

    def weighted_columns(self, weights: Tensor) -> Tensor:
        """Σ_i weights[i]·δ_i, which the last weighted sum has found on its way if it was for the same weights."""
        if self._columns is not None and self._columns[0] is weights:
            return self._columns[1]
        return weights.to(self.delta) @ self.delta

    def dense(self) -> Tensor:
        rows = scratch().take((*self.delta.shape, self.z.shape[1]), self.delta)
        return torch.mul(self.delta.unsqueeze(2), self.z.unsqueeze(1), out=rows)

    def drop(self, records: Tensor) -> None:
        self.z, self.delta, self._columns = _without(self.z, records), _without(self.delta, records), None


class _OuterBias(PerRecord):
    """The bias beside an `Outer` weight: its gradient is δ itself."""

    def __init__(self, weight: Outer, delta_squares: Tensor) -> None:
        self.weight, self.squared_norms = weight, delta_squares

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.weight.weighted_columns(weights)

    def dense(self) -> Tensor:
        return self.weight.delta.clone()

    def drop(self, records: Tensor) -> None:
        self.weight.drop(records)


class _Ghost(PerRecord):
    """Several positions: ‖∇W‖² = Σ_{t,u} (z_t·z_u)(δ_t·δ_u), for when that is cheaper than ∇W itself."""

    def __init__(self, z: Tensor, delta: Tensor) -> None:
        self.z, self.delta = z, delta
        z_gram, delta_gram = z @ z.mT, delta @ delta.mT
        summed = z.shape[2] + delta.shape[2]
        self.squared_norms = gram_product(z_gram, delta_gram, summed, lambda: row_squares(z) * row_squares(delta))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        scaled = self.delta * weights.to(self.delta)[:, None, None]
        return scaled.flatten(0, 1).T @ self.z.flatten(0, 1)

    def dense(self) -> Tensor:
        return self.delta.mT @ self.z

    def drop(self, records: Tensor) -> None:
        self.z, self.delta = _without(self.z, records), _without(self.delta, records)


def gram_product(first: Tensor, second: Tensor, summed: int, bound: Callable[[], Tensor]) -> Tensor:
    """Σ_{t,u} first·second for each record, for Gram matrices that took sums of `summed` products, both together.

    Formal guarantee: never below the true value. Its terms may cancel, and rounding errors are relative to the terms
    and not to the result: a hostile record could have a norm that is computed as nearly zero and is not. A sum of n
    products errs by at most n·2^-24 of the sum of their sizes, which by Cauchy and Schwarz is at most the product of
    the traces, so that share of it is added. (The outer sum is in float64.)

    A Gram matrix of very small numbers has lost them (their products vanish): there, `bound` stands in.
    """
    squared = (first * second).flatten(1).sum(1, dtype=torch.float64).clamp_(min=0)
    traces = [gram.diagonal(dim1=1, dim2=2).sum(1).double() for gram in (first, second)]
    squared = squared + (summed + 8) * UNIT_ROUNDING * traces[0] * traces[1]
    small = torch.minimum(*traces) < _SMALLEST_TRACE
    return torch.where(small, bound(), squared) if bool(small.any()) else squared


def _without(tensor: Tensor, records: Tensor) -> Tensor:
    return tensor.masked_fill(records.view(-1, *[1] * (tensor.dim() - 1)), 0)


@rule_for(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
def linear(layer: nn.Linear, z: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    z, delta = wide(z), wide(delta)
    if z.dim() == 2:
        squares = row_squares(delta)
        weight = Outer(z, delta, squares)
        return {"weight": weight, "bias": _OuterBias(weight, squares)}
    found: dict[str, PerRecord] = {}
    z, delta = z.flatten(1, -2), delta.flatten(1, -2)
    positions, wide_in, wide_out = z.shape[1], z.shape[2], delta.shape[2]
    if positions * (wide_in + wide_out) < wide_in * wide_out:
        found["weight"] = _Ghost(z, delta)
    else:
        rows = scratch().take((len(z), wide_out, wide_in), z)
        found["weight"] = Dense.of(torch.bmm(delta.mT, z, out=rows))
    found["bias"] = Dense.of(delta.sum(1))
    return found
