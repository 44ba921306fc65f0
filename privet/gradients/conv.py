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
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import gram_product
from .per_record import Dense, PerRecord, rule_for, scratch, wide

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

_BLOCK = 2**19
"""How many numbers of patches are copied out at a time: few enough to stay in a core's own cache."""


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
    ghost = positions_in**2 * layer.in_channels + positions_out**2 * layer.out_channels
    return 2 * ghost < positions_out * layer.weight.numel()


def _explicit_padding(layer: Conv, z: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The input with circular, reflect or replicate padding applied, and the zero padding that is left per axis."""
    both = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros":
        return F.pad(z, both, mode=layer.padding_mode), [(0, 0)] * (z.dim() - 2)
    pairs = list(zip(both[0::2], both[1::2], strict=True))
    return z, pairs[::-1]


def _instantiate(layer: Conv, z: Tensor, padding: list[tuple[int, int]], delta: Tensor) -> Dense:
    """∇W of each record, by blocks of records whose patches fit in the cache.

    A two-dimensional kernel that moves by one row at a time shares its rows between patches: then only runs along the
    last axis are copied out, and each row of the kernel is a matrix product of its own (a part of the result).
    """
    records, channels_out, *space_out = delta.shape
    groups, kernel, dilation = layer.groups, tuple(layer.kernel_size), tuple(layer.dilation)
    channels_in = layer.in_channels // groups
    padded = [n + before + after for n, (before, after) in zip(z.shape[2:], padding, strict=True)]
    by_rows = len(kernel) == 2 and layer.stride[0] == 1
    parts, unrolled = (kernel[0], kernel[1:]) if by_rows else (1, kernel)
    grid = [padded[0], space_out[1]] if by_rows else space_out
    positions, width = math.prod(space_out), math.prod(unrolled) * channels_in

    block = max(1, min(records, _BLOCK // (groups * math.prod(grid) * width)))
    block = min(records, -(-block // torch.get_num_threads()) * torch.get_num_threads())
    framed = _Frame(z, padding, block)
    along = framed.strides[1:-1]
    patches = scratch().take((block * groups, math.prod(grid), width), z)
    rows = scratch().take((parts, records * groups, channels_out // groups, width), z)
    blocks = zip(
        torch.split(z, block),
        torch.split(_by_group(delta, groups), block * groups),
        *[torch.split(part, block * groups) for part in rows],
        strict=True,
    )
    for image, right, *outs in blocks:
        inside = framed.fill(image).as_strided(
            (len(image), groups, *grid, *unrolled, channels_in),
            (
                framed.strides[0],
                channels_in,
                *[step * n for step, n in zip(layer.stride, along, strict=True)],
                *[step * n for step, n in zip(dilation, along, strict=True)][-len(unrolled) :],
                1,
            ),
        )
        patch = patches[: len(right)]
        patch.view(inside.shape).copy_(inside)
        for part, out in enumerate(outs):
            first = part * dilation[0] * space_out[-1] if by_rows else 0
            torch.bmm(right, patch[:, first : first + positions], out=out)

    def shaped(rows: Tensor) -> Tensor:
        """(parts, …, size) to (…, channels out, channels in of a group, *kernel)."""
        rows = rows.view(*rows.shape[:-1], channels_out, *unrolled, channels_in).movedim(-1, -1 - len(unrolled))
        return rows.movedim(0, -1 - len(unrolled)) if by_rows else rows[0]

    return Dense(rows.view(parts, records, -1), shaped)


class _Frame:
    """A block of records at a time with channels last and zeros around; the records themselves where that is so."""

    def __init__(self, z: Tensor, padding: list[tuple[int, int]], block: int) -> None:
        last = z.movedim(1, -1)
        self._space: Tensor | None = None
        self.strides = last.stride()
        if last.is_contiguous() and not any(before or after for before, after in padding):
            return
        padded = [n + before + after for n, (before, after) in zip(z.shape[2:], padding, strict=True)]
        self._space = scratch().take((block, *padded, z.shape[1]), z).zero_()
        self._inside = tuple(slice(b, b + n) for n, (b, _) in zip(z.shape[2:], padding, strict=True))
        self.strides = self._space.stride()

    def fill(self, image: Tensor) -> Tensor:
        image = image.movedim(1, -1)
        if self._space is None:
            return image
        space = self._space[: len(image)]
        space[(slice(None), *self._inside)] = image
        return space


def _by_group(delta: Tensor, groups: int) -> Tensor:
    """(records, channels, *space) as (records·groups, channels of a group, positions), copied only if it must be."""
    if groups > 1:
        return delta.flatten(2).reshape(delta.shape[0] * groups, delta.shape[1] // groups, -1)
    if delta.stride(1) == 1:  # channels last
        return delta.movedim(1, -1).reshape(delta.shape[0], -1, delta.shape[1]).mT
    return delta.flatten(2)


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
        axes = zip(space_out, self.layer.kernel_size, self.layer.stride, self.layer.dilation, strict=True)
        for axis, (length, taps, stride, dilation) in enumerate(axes):  # the sum over taps, one axis at a time
            shifted = [
                gram[(slice(None), *[slice(None)] * axis, where, *[slice(None)] * (len(space_out) - 1), where)]
                for where in (
                    slice(tap * dilation, tap * dilation + (length - 1) * stride + 1, stride) for tap in range(taps)
                )
            ]
            gram = sum(shifted[1:], start=shifted[0])
        size = math.prod(space_out)
        return gram.reshape(-1, size, size)

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
