"""Layers whose gradient is bounded by the norm of their input and the norm of the gradient at their output.

With z a record's input, δ the gradient at its output and P_t the patch of z under output position t (for a linear layer
the position itself), the record's gradient is ∇W = Σ_t δ_t P_tᵀ and ∇b = Σ_t δ_t. Two pairs of norms bound it:

- `patch`: ‖∇W‖ ≤ max_t ‖P_t‖ · √Σ_c (Σ_t |δ_ct|)². Row c of ∇W is Σ_t δ_ct P_t, of norm at most Σ_t |δ_ct|·‖P_t‖.
  `input` is the same with ‖z‖, which is at least as large, in place of the largest patch (the paper's Theorem 3).
- `frobenius`: ‖∇W‖ ≤ ‖P‖_F · ‖δ‖_F, as ∇W is the product of the matrices δ and P.

Both hold for every stride, dilation and padding: nothing is used but that ∇W is a sum over positions. With groups, row
c sees the patch of its group alone, so the largest over groups is enough. For the bias, ‖∇b‖ ≤ √Σ_c (Σ_t |δ_ct|)² is
the second factor of `patch`; for `frobenius`, the norm of δ is taken to be max(‖δ‖_F, ‖Σ_t δ_t‖).

Both are linear in z as in δ. So where z is an input x times a factor f of its record, f may be put on δ instead: the
gradient of the weight is Σ_t (f·δ_t) P_t(x)ᵀ, and what goes on to x is the layer's own backward pass of f·δ. Then z is
not kept, and the backward pass of the input clip costs nothing. Only the bias takes δ without f. Where the output is
no larger than the input, z need not even be made: the layer gets x, and its output y becomes b + f·(y − b). What one
record adds hangs on f and δ alone, not on how the output came about.

Embedding and normalisation layers have few numbers per record: their gradient is measured itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from .. import native
from ..nn.input_clip import LONG, NORMS, Norm, Window, by_blocks
from .conv import Conv, explicit_padding, weight_gradient
from .per_record import RULES

BOUNDS: dict[type[nn.Module], Bounded] = {}
"""The layers that backpropagation clipping can train."""

MARGIN = 1 - 2.0**-13
"""Norms and products are computed in float32; aiming this much below C2 keeps what comes out at the bound or less."""

_LONGEST = math.sqrt(torch.finfo(torch.float32).max)

_B = TypeVar("_B", bound="type[Bounded]")


def bound_for(*layers: type[nn.Module]) -> Callable[[_B], _B]:
    """Registers how layers of exactly these types are bounded (a subclass may compute something else)."""

    def register(bounded: _B) -> _B:
        BOUNDS.update(dict.fromkeys(layers, bounded()))
        return bounded

    return register


@dataclass(frozen=True, eq=False)
class Clipped:
    """Gradients at a layer's output after their clip."""

    delta: Tensor
    """δ, each record times its factor and, where that is folded in, its input's factor."""
    factors: Tensor
    """What the clip multiplied each record with: 0 where its norm is not finite, or its square is not in float32."""
    input_factors: Tensor | None = None
    """The input clip's, if they are in `delta`; positive."""
    sums: Tensor | None = None
    """Σ_t δ_t times `factors` alone, where they came for free: (records, channels), or one row for all records."""


class Bounded(ABC):
    """One kind of layer.

    Formal guarantee: for a record whose clipped input is z with norm at most C1 (if `clips_input`), and whose
    gradient δ has `upstream_norms` at most C2, what `add` adds to each part has norm at most `bounds` says.
    Everything is linear in δ.
    """

    clips_input: ClassVar[bool] = True
    norms: ClassVar[tuple[Norm, ...]] = NORMS
    """Pairs of norms to choose from."""
    folds: ClassVar[bool] = False
    """Whether an input's factor may be put on δ instead (this file's head): `add_clipped` then gets the input as it was
    before its clip."""

    def does_not_grow(self, layer: Any, x: Tensor) -> bool:
        """Whether the output is no larger than this input, so that an input's factors are better put on it."""
        return False

    def scale_output(self, layer: Any, output: Tensor, factors: Tensor) -> None:
        """Makes the output, in place, what it would be for inputs times these factors; if the layer `does_not_grow`."""
        raise NotImplementedError

    @abstractmethod
    def upstream_norms(self, layer: Any, z: Tensor, delta: Tensor, norm: Norm) -> Tensor:
        """The norm of each record's δ."""

    @abstractmethod
    def bounds(self, layer: Any, input_clip: float, gradient_clip: float) -> Mapping[tuple[str, ...], float]:
        """By the names of parameters in the layer: how long a record's gradient of these together can be."""

    @abstractmethod
    def add(self, layer: Any, z: Tensor, delta: Tensor, totals: Mapping[str, Tensor]) -> None:
        """Adds the gradients of all records to the totals of the layer's parameters (those that are trained)."""

    def clip(
        self, layer: Any, z: Tensor, delta: Tensor, norm: Norm, clip: float, input_factors: Tensor | None
    ) -> Clipped:
        """δ with each record's norm at most `clip`, and `input_factors` on it."""
        norms = self.upstream_norms(layer, z, delta, norm)
        factors = (clip * MARGIN / norms).clamp(max=1).masked_fill(~(norms <= _LONGEST), 0)
        both = (factors if input_factors is None else factors * input_factors).to(delta.dtype)
        shaped = both.view(-1, *[1] * (delta.dim() - 1))
        scaled = delta if bool((both == 1).all()) else delta * shaped
        if bool((factors == 0).any()):
            scaled = scaled.masked_fill_(shaped == 0, 0)
        return Clipped(scaled, factors, input_factors)

    def add_clipped(self, layer: Any, z: Tensor, delta: Tensor, clipped: Clipped, totals: Mapping[str, Tensor]) -> None:
        """`add` for clipped.delta, of which a layer may rather take the parts."""
        self.add(layer, z, clipped.delta, totals)


class _Affine(Bounded):
    """Linear layers and convolutions.

    Formal guarantee: C1·C2 for the weight and C2 for the bias, by either pair of norms (see this file's head). Together
    they are √(C1² + 1)·C2.
    """

    folds = True

    def upstream_norms(self, layer: Any, z: Tensor, delta: Tensor, norm: Norm) -> Tensor:
        channels, positions = self._axes(delta)
        if not positions:
            return _norm(delta, [channels])
        if norm != "frobenius":
            return _norm(_magnitudes(delta, positions), [1])
        whole = _norm(delta, [channels, *positions])
        if layer.bias is None or not layer.bias.requires_grad:
            return whole
        return torch.maximum(whole, _norm(delta.sum(positions), [1]))

    def _axes(self, delta: Tensor) -> tuple[int, list[int]]:
        raise NotImplementedError

    @torch.no_grad()
    def scale_output(self, layer: Any, output: Tensor, factors: Tensor) -> None:
        bias = layer.bias
        if native.serves(output) and (native.dense(output) or (output.dim() == 2 and output.is_contiguous())):
            native.scale_outputs(output, factors, bias)
            return
        ones = [1] * (output.dim() - 2)
        shaped = factors.view(-1, 1, *ones)
        output.copy_(output * shaped + (0 if bias is None else (1 - shaped) * bias.view(-1, *ones)))

    def bounds(self, layer: Any, input_clip: float, gradient_clip: float) -> Mapping[tuple[str, ...], float]:
        return {("weight",): input_clip * gradient_clip, ("bias",): gradient_clip}

    def add_clipped(self, layer: Any, z: Tensor, delta: Tensor, clipped: Clipped, totals: Mapping[str, Tensor]) -> None:
        if clipped.input_factors is None:
            self.add(layer, z, clipped.delta, totals)
            return
        self.add(layer, z, clipped.delta, {name: total for name, total in totals.items() if name == "weight"})
        if "bias" not in totals:
            return
        if clipped.sums is not None:
            totals["bias"].add_(clipped.sums[0] if len(clipped.sums) == 1 else clipped.sums.sum(0))
            return
        _, positions = self._axes(delta)
        sums = clipped.delta.sum(positions) if positions else clipped.delta
        totals["bias"].add_(sums.mT @ clipped.input_factors.reciprocal().to(sums.dtype))


@bound_for(nn.Linear)
class LinearBound(_Affine):
    """Formal guarantee: ‖z‖ ≤ C1 and ‖δ‖ ≤ C2 give ‖δzᵀ‖ = ‖δ‖·‖z‖ ≤ C1·C2; over positions, see this file's head."""

    def _axes(self, delta: Tensor) -> tuple[int, list[int]]:
        return delta.dim() - 1, list(range(1, delta.dim() - 1))

    def does_not_grow(self, layer: nn.Linear, x: Tensor) -> bool:
        return x.dim() == 2 and layer.out_features <= layer.in_features

    def clip(
        self, layer: Any, z: Tensor, delta: Tensor, norm: Norm, clip: float, input_factors: Tensor | None
    ) -> Clipped:
        if delta.dim() != 2 or not native.serves(delta):
            return super().clip(layer, z, delta, norm, clip, input_factors)
        scaled, sums = delta.new_empty(delta.shape), None
        if layer.bias is not None:
            sums = delta.new_zeros(1, delta.shape[1], dtype=torch.float64)
        factors = native.clip_rows(delta, clip * MARGIN, also=input_factors, out=scaled, total=sums)
        return Clipped(scaled, factors, input_factors, sums)

    def add(self, layer: nn.Linear, z: Tensor, delta: Tensor, totals: Mapping[str, Tensor]) -> None:
        rows = delta.flatten(0, -2)
        if "weight" in totals:
            total = totals["weight"]
            if total.dtype == rows.dtype:
                total.addmm_(rows.mT, z.flatten(0, -2))
            else:
                total.add_(rows.mT @ z.flatten(0, -2))
        if "bias" in totals:
            totals["bias"].add_(rows.sum(0))


@bound_for(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvBound(_Affine):
    """Formal guarantee: any stride, dilation, groups, padding and bias; see this file's head."""

    def _axes(self, delta: Tensor) -> tuple[int, list[int]]:
        return 1, list(range(2, delta.dim()))

    def does_not_grow(self, layer: Conv, x: Tensor) -> bool:
        positions = cast(Window, Window.of(layer)).positions(tuple(x.shape[2:]))
        return len(x) * layer.out_channels * math.prod(positions) <= x.numel()

    def clip(
        self, layer: Any, z: Tensor, delta: Tensor, norm: Norm, clip: float, input_factors: Tensor | None
    ) -> Clipped:
        if not (native.serves(delta) and native.dense(delta) and delta.numel()):
            return super().clip(layer, z, delta, norm, clip, input_factors)
        kind = "l1-l2"
        if norm == "frobenius":
            kind = "with-bias" if layer.bias is not None and layer.bias.requires_grad else "frobenius"
        scaled, factors, sums = native.clip_gradients(delta, clip * MARGIN, input_factors, kind=kind)
        return Clipped(scaled, factors, input_factors, sums)

    def add(self, layer: Conv, z: Tensor, delta: Tensor, totals: Mapping[str, Tensor]) -> None:
        if "weight" in totals:
            padded, padding = explicit_padding(layer, z)
            totals["weight"].add_(weight_gradient(layer, padded, padding, delta))
        if "bias" in totals:
            totals["bias"].add_(delta.sum([0, *range(2, delta.dim())]))


@bound_for(
    nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
)
class MeasuredBound(Bounded):
    """Layers with few numbers per record: ∇ is computed for each record, and its own norm is what C2 bounds.

    Formal guarantee: ‖∇‖ is the norm of δ here, and ∇ is linear in δ, so all parameters together stay within C2. No
    input clip is needed: tokens have no norm, and a normalised input has one that is known.
    """

    clips_input = False
    norms = ("patch",)

    def upstream_norms(self, layer: Any, z: Tensor, delta: Tensor, norm: Norm) -> Tensor:
        own = dict(layer.named_parameters(recurse=False))
        found = RULES[type(layer)](layer, z, delta)
        squares = [g.squared_norms for name, g in found.items() if name in own and own[name].requires_grad]
        return torch.stack(squares).sum(0).sqrt()

    def bounds(self, layer: Any, input_clip: float, gradient_clip: float) -> Mapping[tuple[str, ...], float]:
        return {("weight", "bias"): gradient_clip}

    def add(self, layer: Any, z: Tensor, delta: Tensor, totals: Mapping[str, Tensor]) -> None:
        self.add_clipped(layer, z, delta, Clipped(delta, delta.new_ones(len(delta))), totals)

    def add_clipped(self, layer: Any, z: Tensor, delta: Tensor, clipped: Clipped, totals: Mapping[str, Tensor]) -> None:
        """Each record's ∇ as it was measured, times its factor: where positions cancel, the clipped ones may not."""
        found = RULES[type(layer)](layer, z, delta)
        factors = clipped.factors.to(delta.dtype)
        for name, total in totals.items():
            found[name].drop(factors == 0)
            found[name].accumulate(factors, total)


def _norm(x: Tensor, axes: list[int]) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, 2, axes, dtype=_sum_type(x, axes))
    return norms


def _magnitudes(x: Tensor, axes: list[int]) -> Tensor:
    """Σ |x| over these axes; torch's own norm of this kind takes five times as long."""
    wide = _sum_type(x, axes)
    return by_blocks(x, lambda part, room: torch.abs(part, out=room).sum(axes, dtype=wide))


def _sum_type(x: Tensor, axes: list[int]) -> torch.dtype | None:
    return torch.float64 if math.prod(x.shape[axis] for axis in axes) > LONG else None
