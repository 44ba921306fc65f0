"""Per-record gradients of convolutions in 1, 2 and 3 dimensions, for any stride, dilation, groups and padding.

With P_t the patch of the (padded) input under output position t, ∇W = Σ_t δ_t P_tᵀ. Two ways to the same numbers:

- *instantiated*: patches are copied out in runs of contiguous channels (channels last) into a scratch block that is
  used again, and one batched matrix product gives ∇W of each record, kept for the weighted sum. Costs what the
  ordinary weight gradient costs, plus memory for one weight gradient per record.
- *ghost*: ‖∇W‖² = Σ_{t,u} (P_t·P_u)(δ_t·δ_u). The Gram matrix of the patches is a sum of shifted copies of the Gram
  matrix of the input's positions, so patches are never copied; the weighted sum is then one ordinary weight gradient
  with the output gradient scaled by record. Cheap where the map is small and the weight is large.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from itertools import product
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import gram_product
from .per_record import Dense, PerRecord, row_squares, rule_for, wide

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

_SCRATCH_NUMBERS = 2**21
"""Size of the scratch block for patches: small enough to stay in a shared cache, large enough to keep cores busy."""

_scratch = threading.local()


@rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(layer: Conv, z: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    z, delta = wide(z), wide(delta)
    found: dict[str, PerRecord] = {}
    padded, padding = _explicit_padding(layer, z)
    if layer.groups == 1 and _ghost_is_cheaper(layer, z, delta):
        found["weight"] = _Ghost(layer, padded, padding, delta)
    else:
        found["weight"] = _instantiate(layer, padded, padding, delta)
    if layer.bias is not None:
        found["bias"] = Dense.of(delta.flatten(2).sum(2))
    return found


def _ghost_is_cheaper(layer: Conv, z: Tensor, delta: Tensor) -> bool:
    positions_in, positions_out = math.prod(z.shape[2:]), math.prod(delta.shape[2:])
    ghost = positions_in**2 * layer.in_channels + positions_out**2 * (layer.out_channels + len(_offsets(layer)))
    return 2 * ghost < positions_out * layer.weight.numel()


def _explicit_padding(layer: Conv, z: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The input with circular, reflect or replicate padding applied, and the zero padding that is left per axis."""
    both = cast(list[int], layer._reversed_padding_repeated_twice)
    if layer.padding_mode != "zeros":
        return F.pad(z, both, mode=layer.padding_mode), [(0, 0)] * (z.dim() - 2)
    pairs = list(zip(both[0::2], both[1::2], strict=True))
    return z, pairs[::-1]


def _offsets(layer: Conv) -> list[tuple[int, ...]]:
    """Where each entry of the kernel lies, relative to the corner of its patch."""
    axes = zip(layer.kernel_size, layer.dilation, strict=True)
    return list(product(*[range(0, size * step, step) for size, step in axes]))


def _channels_last(tensor: Tensor) -> Tensor:
    """(records, channels, *space) as (records, *space, channels), contiguous; free where it is laid out so already."""
    return tensor.movedim(1, -1).contiguous()


def _instantiate(layer: Conv, z: Tensor, padding: list[tuple[int, int]], delta: Tensor) -> Dense:
    records, channels_out, *space_out = delta.shape
    groups, kernel = layer.groups, layer.kernel_size
    channels_in = layer.in_channels // groups
    positions, taps = math.prod(space_out), math.prod(kernel)
    width = taps * channels_in

    z = _channels_last(z)
    if any(before or after for before, after in padding):
        z = F.pad(z, [0, 0, *[n for pair in reversed(padding) for n in pair]])
    outer, *along, last = z.stride()
    patches = z.as_strided(
        (records, groups, *space_out, *kernel, channels_in),
        (
            outer,
            channels_in * last,
            *[step * n for step, n in zip(layer.stride, along, strict=True)],
            *[step * n for step, n in zip(layer.dilation, along, strict=True)],
            last,
        ),
    )
    delta = delta.flatten(2).mT if delta.stride(1) == 1 else delta.flatten(2).mT.contiguous()
    delta = delta.unflatten(2, (groups, channels_out // groups)).movedim(2, 1)

    rows = z.new_empty(records * groups, channels_out // groups, width)
    squares = z.new_empty(records)
    block = max(1, min(records, _SCRATCH_NUMBERS // (groups * positions * width)))
    scratch = _scratch_of(block * groups * positions * width, z)
    for start in range(0, records, block):
        stop = min(start + block, records)
        count = (stop - start) * groups
        piece = scratch[: count * positions * width]
        piece.view(stop - start, *patches.shape[1:]).copy_(patches[start:stop])
        out = rows[start * groups : stop * groups]
        torch.bmm(delta[start:stop].flatten(0, 1).mT, piece.view(count, positions, width), out=out)
        squares[start:stop] = row_squares(out.view(stop - start, -1))

    def shaped(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (channels_out, *kernel, channels_in)).movedim(-1, -1 - len(kernel))

    return Dense(rows.view(records, -1), shaped, squares)


def _scratch_of(size: int, like: Tensor) -> Tensor:
    blocks: dict[tuple[torch.device, torch.dtype], Tensor] = _scratch.__dict__.setdefault("blocks", {})
    key = (like.device, like.dtype)
    if key not in blocks or blocks[key].numel() < size:
        blocks[key] = like.new_empty(size)
    return blocks[key]


class _Ghost(PerRecord):
    def __init__(self, layer: Conv, z: Tensor, padding: list[tuple[int, int]], delta: Tensor) -> None:
        self.layer, self.z, self.padding, self.delta = layer, z, padding, delta
        rows = delta.flatten(2)
        self.squared_norms = gram_product(self._patch_gram(), rows.mT @ rows)

    def _patch_gram(self) -> Tensor:
        """P_t·P_u for all pairs of output positions: Σ over the kernel's taps k of z_{t+k}·z_{u+k}."""
        space_in, space_out = self.z.shape[2:], self.delta.shape[2:]
        rows = self.z.flatten(2)
        gram = (rows.mT @ rows).view(-1, *space_in, *space_in)
        if any(before or after for before, after in self.padding):
            gram = F.pad(gram, [n for pair in reversed([*self.padding, *self.padding]) for n in pair])
        total: Tensor | None = None
        for offset in _offsets(self.layer):
            axes = zip(offset, space_out, self.layer.stride, strict=True)
            where = tuple(slice(o, o + (n - 1) * step + 1, step) for o, n, step in axes)
            shifted = gram[(slice(None), *where, *where)]
            total = shifted.clone() if total is None else total.add_(shifted)
        assert total is not None
        size = math.prod(space_out)
        return total.view(-1, size, size)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        scaled = self.delta * weights.view(-1, *[1] * (self.delta.dim() - 1))
        layer, z, space = self.layer, self.z, [before for before, _ in self.padding]
        if any(before != after for before, after in self.padding):
            z = F.pad(z, [n for pair in reversed(self.padding) for n in pair])
            space = [0] * len(space)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            scaled, z, layer.weight, None, layer.stride, space, layer.dilation, False,
            [0] * len(space), layer.groups, [False, True, False],
        )  # fmt: skip
        return cast(Tensor, gradient)

    def dense(self) -> Tensor:
        return _instantiate(self.layer, self.z, self.padding, self.delta).dense()

    def drop(self, records: Tensor) -> None:
        mask = records.view(-1, *[1] * (self.z.dim() - 1))
        self.z, self.delta = self.z.masked_fill(mask, 0), self.delta.masked_fill(mask, 0)
