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

import itertools
import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import native
from ..errors import Refused
from ..nn.padding import padding_in_use
from .linear import gram_product
from .per_record import SLICE, Dense, PerRecord, row_squares, rule_for, squares_of, wide
from .scratch import scratch

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

_BLOCK = 2**18
"""How many numbers of patches each thread copies out at a time: few enough to stay in a core's own cache."""

_SMALL_PATCH = 64
"""Up to how many numbers of a patch it is faster to copy a kernel row of all patches at a time (measured)."""

_MOST_TAPS = 256
"""Up to how many numbers of a patch the loop in C is faster than copying patches and a matrix product (measured)."""

_FEW_WEIGHTS = 2**14
"""Up to how many weights of a convolution with a stride the loop in C is faster than PyTorch at the gradient of its
input (measured): they stay in a core's own cache."""

_WORTH_STRIPS = 64
"""From how many output positions on fewer copies are worth more matrix products (measured)."""


@rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(layer: Conv, z: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    z, delta = wide(z), wide(delta)
    if layer.weight.shape[2:] != layer.kernel_size:
        raise Refused(
            f"The weight of a convolution was replaced by one of shape {tuple(layer.weight.shape)}, and the layer "
            f"still says that its kernel is {tuple(layer.kernel_size)}: make a new layer."
        )
    found: dict[str, PerRecord] = {}
    padded, padding = explicit_padding(layer, z)
    if layer.groups == 1 and _ghost_is_cheaper(layer, z, delta):
        found["weight"] = _Ghost(layer, padded, padding, delta)
    elif isinstance(layer, nn.Conv2d) and layer.groups == 1 and _loop_is_faster(layer, z, delta):
        found |= _in_one_loop(layer, padded, padding, delta)
    else:
        found["weight"] = _instantiate(layer, padded, padding, delta)
    if layer.bias is not None and "bias" not in found:
        found["bias"] = Dense.of(delta.flatten(2).sum(2))
    return found


def _ghost_is_cheaper(layer: Conv, z: Tensor, delta: Tensor) -> bool:
    positions_in, positions_out = math.prod(z.shape[2:]), math.prod(delta.shape[2:])
    ghost = positions_in**2 * layer.in_channels + positions_out**2 * layer.out_channels
    return 2 * ghost < positions_out * layer.weight.numel()


def explicit_padding(layer: Conv, z: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The input with circular, reflect or replicate padding applied, and the zero padding that is left per axis."""
    both = padding_in_use(layer)
    if layer.padding_mode != "zeros":
        return F.pad(z, both, mode=layer.padding_mode), [(0, 0)] * (z.dim() - 2)
    pairs = list(zip(both[0::2], both[1::2], strict=True))
    return z, pairs[::-1]


def _loop_is_faster(layer: nn.Conv2d, z: Tensor, delta: Tensor) -> bool:
    return layer.weight[0].numel() <= _MOST_TAPS and native.serves(z, delta)


def _in_one_loop(layer: nn.Conv2d, z: Tensor, padding: list[tuple[int, int]], delta: Tensor) -> dict[str, PerRecord]:
    """∇W and ∇b of each record, without copying patches."""
    rows = scratch().take((len(z), layer.weight.numel()), z)
    squares, sums = native.convolution_gradients(layer, z, padding, delta, rows)
    shape = (*layer.kernel_size, layer.in_channels, layer.out_channels)

    def shaped(rows: Tensor) -> Tensor:
        rows = rows[0].view(*rows.shape[1:-1], *shape)
        return rows.movedim((-1, -2), (-4, -3))

    return {"weight": Dense(rows.unsqueeze(0), shaped, squares), "bias": Dense.of(sums)}


def _instantiate(layer: Conv, z: Tensor, padding: list[tuple[int, int]], delta: Tensor) -> Dense:
    """∇W of each record, by blocks of records whose patches fit in the cache."""
    records, channels_out = delta.shape[:2]
    groups = layer.groups
    plan = _Unrolling(layer, list(delta.shape[2:]))
    each = max(1, _BLOCK // (groups * math.prod(plan.grid) * plan.width))
    block = max(1, min(records, each * torch.get_num_threads()))

    frame, inside = _frame(z, padding, block)
    views = plan.patches(z.movedim(1, -1) if frame is None else frame)
    patches = scratch().take((block * groups, math.prod(plan.grid), plan.width), z)
    rows = scratch().take((plan.parts, records * groups, channels_out // groups, plan.width), z)
    size = rows[0, :groups].numel()
    norms = z.new_empty(plan.parts, records)
    squares = z.new_zeros(records, dtype=torch.float64)
    delta = _by_group(delta, groups)
    for start in range(0, records, block):
        count = min(block, records - start)
        if inside is None:
            view = views[start : start + count]
        else:
            inside[:count].copy_(z[start : start + count].movedim(1, -1))
            view = views[:count]
        patch = patches[: count * groups]
        plan.copy(view, patch.view(view.shape))
        which = slice(start * groups, (start + count) * groups)
        for part, first in enumerate(plan.starts):
            torch.bmm(delta[which], patch[:, first : first + plan.positions], out=rows[part, which])
        found = rows[:, which].view(plan.parts, count, -1)  # its norms are taken while it lies in the cache
        if size <= SLICE:
            torch.linalg.vector_norm(found, dim=2, out=norms[:, start : start + count])
        else:
            squares[start : start + count] = torch.stack([row_squares(part) for part in found]).sum(0)
    if size <= SLICE:
        squares = squares_of(norms, size).sum(0)

    def shaped(rows: Tensor) -> Tensor:
        """(parts, …, size) to (…, channels out, channels in of a group, *kernel)."""
        axes = len(plan.unrolled)
        rows = rows.view(*rows.shape[:-1], channels_out, *plan.unrolled, plan.channels_in).movedim(-1, -1 - axes)
        # a row of the kernel is the part that it lies in and its place there
        return rows.movedim(0, -1 - axes).flatten(-1 - axes, -axes)

    return Dense(rows.view(plan.parts, records, -1), shaped, squares)


class _Unrolling:
    """How patches are copied out of the input.

    In general each patch is copied whole. A two-dimensional kernel moves down by `stride` rows at a time, and patches
    share their other rows: then only strips of `stride` rows are copied out, every strip of the input once, and each
    strip of the kernel is a matrix product of its own (a part of the result), against the strips from its own first.
    """

    def __init__(self, layer: Conv, space_out: list[int]) -> None:
        kernel, self.stride, self.dilation = tuple(layer.kernel_size), tuple(layer.stride), tuple(layer.dilation)
        self.groups, self.channels_in = layer.groups, layer.in_channels // layer.groups
        step, rows_apart = self.stride[0], self.dilation[0]
        strips = len(kernel) == 2 and (step == 1 or (rows_apart == 1 and kernel[0] % step == 0))
        height = step if strips and math.prod(space_out) >= _WORTH_STRIPS else kernel[0]
        self.parts = kernel[0] // height
        self.unrolled = (height, *kernel[1:])
        self.grid = [space_out[0] + (self.parts - 1) * rows_apart, *space_out[1:]]
        self.positions = math.prod(space_out)
        self.width = math.prod(self.unrolled) * self.channels_in
        small = math.prod(self.unrolled[-2:]) * self.channels_in <= _SMALL_PATCH
        self.row_by_row = len(kernel) > 1 and small and self.unrolled[-2] < self.grid[-1]
        self.starts = [part * rows_apart * math.prod(space_out[1:]) for part in range(self.parts)]

    def patches(self, image: Tensor) -> Tensor:
        """A view of (records, *space, channels) as (records, groups, *grid, *unrolled, channels of a group)."""
        outer, *along, _ = image.stride()
        taps = [step * n for step, n in zip(self.dilation, along, strict=True)]
        return image.as_strided(
            (len(image), self.groups, *self.grid, *self.unrolled, self.channels_in),
            (outer, self.channels_in, *[s * n for s, n in zip(self.stride, along, strict=True)], *taps, 1),
        )

    def copy(self, view: Tensor, into: Tensor) -> None:
        """Copies such a view.

        PyTorch copies along the two innermost axes and starts anew for every other index, which costs more than a few
        short runs do. In a patch these axes are a run and the rows of the kernel; with one kernel row of all patches
        at a time, they are a run and a line of output positions.
        """
        if not self.row_by_row:
            into.copy_(view)
            return
        everything = (slice(None),) * (2 + len(self.grid))
        for row in itertools.product(*map(range, self.unrolled[:-1])):
            into[everything + row].copy_(view[everything + row])


def _frame(z: Tensor, padding: list[tuple[int, int]], block: int) -> tuple[Tensor | None, Tensor | None]:
    """Room for a block of records with channels last and zeros around, and the part of it that is theirs.

    Nothing where the records have that form already.
    """
    if z.movedim(1, -1).is_contiguous() and not any(before or after for before, after in padding):
        return None, None
    padded = [n + before + after for n, (before, after) in zip(z.shape[2:], padding, strict=True)]
    frame = scratch().take((block, *padded, z.shape[1]), z).zero_()
    return frame, frame[(slice(None), *[slice(b, b + n) for n, (b, _) in zip(z.shape[2:], padding, strict=True)])]


def _by_group(delta: Tensor, groups: int) -> Tensor:
    """(records, channels, *space) as (records·groups, channels of a group, positions), copied only if it must be."""
    if groups > 1:
        return delta.flatten(2).reshape(delta.shape[0] * groups, delta.shape[1] // groups, -1)
    if delta.stride(1) == 1:  # channels last
        return delta.movedim(1, -1).reshape(delta.shape[0], -1, delta.shape[1]).mT
    return delta.flatten(2)


def weight_gradient(layer: Conv, z: Tensor, padding: list[tuple[int, int]], delta: Tensor) -> Tensor:
    """∇W of all records together, in one ordinary backward pass of the convolution."""
    space = [before for before, _ in padding]
    if any(before != after for before, after in padding):
        z = F.pad(z, [n for pair in reversed(padding) for n in pair])
        space = [0] * len(space)
    _, gradient, _ = torch.ops.aten.convolution_backward.default(
        delta, z, layer.weight, None, layer.stride, space, layer.dilation, False,
        [0] * len(space), layer.groups, [False, True, False],
    )  # fmt: skip
    return cast(Tensor, gradient)


def is_faster_backwards(layer: nn.Module) -> bool:
    """Whether `input_gradient` may be faster than PyTorch for this layer: one with a stride and few weights."""
    return (
        type(layer) is nn.Conv2d
        and max(layer.stride) > 1
        and max(layer.dilation) == layer.groups == 1
        and layer.padding_mode == "zeros"
        and layer.weight.numel() <= _FEW_WEIGHTS
    )


def input_gradient(layer: nn.Module, x: Tensor, delta: Tensor) -> Tensor | None:
    """What a layer that `is_faster_backwards` passes on to an input like x; None if it is not, here."""
    conv, last = cast(nn.Conv2d, layer), torch.channels_last
    if not (x.is_contiguous(memory_format=last) and native.serves(x, delta, conv.weight)):
        return None
    padding = explicit_padding(conv, x)[1]
    return native.convolution_inputs(conv, x, padding, delta.contiguous(memory_format=last))


class _Ghost(PerRecord):
    def __init__(self, layer: Conv, z: Tensor, padding: list[tuple[int, int]], delta: Tensor) -> None:
        self.layer, self.z, self.padding, self.delta = layer, z, padding, delta
        rows = delta.flatten(2)
        taps = math.prod(layer.kernel_size)  # no input is in more patches than that
        summed = layer.in_channels + taps + layer.out_channels
        self.squared_norms = gram_product(
            self._patch_gram(), rows.mT @ rows, summed, lambda: taps * row_squares(z) * row_squares(delta)
        )

    def _patch_gram(self) -> Tensor:
        """P_t·P_u for all pairs of output positions: Σ over the kernel's taps k of z_{t+k}·z_{u+k}, axis by axis."""
        space_out, axes = self.delta.shape[2:], self.z.dim() - 2
        rows = self.z.flatten(2)
        gram = (rows.mT @ rows).view(-1, *self.z.shape[2:], *self.z.shape[2:])
        kernel = zip(self.layer.kernel_size, self.layer.stride, self.layer.dilation, self.padding, strict=True)
        for axis, (taps, stride, dilation, (before, _)) in enumerate(kernel):
            size, length = gram.shape[1 + axis], space_out[axis]
            total = gram.new_zeros(
                [length if i in (1 + axis, 1 + axes + axis) else n for i, n in enumerate(gram.shape)]
            )
            for tap in range(taps):
                shift = tap * dilation - before  # output position o meets input position o·stride + shift
                first = max(0, -(shift // stride))
                last = min(length - 1, (size - 1 - shift) // stride)
                if first <= last:
                    met = slice(first * stride + shift, last * stride + shift + 1, stride)
                    _pair(total, slice(first, last + 1), axis, axes).add_(_pair(gram, met, axis, axes))
            gram = total
        size = math.prod(space_out)
        return gram.view(-1, size, size)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        scaled = self.delta * weights.to(self.delta).view(-1, *[1] * (self.delta.dim() - 1))
        return weight_gradient(self.layer, self.z, self.padding, scaled)

    def dense(self) -> Tensor:
        return _instantiate(self.layer, self.z, self.padding, self.delta).dense()

    def drop(self, records: Tensor) -> None:
        mask = records.view(-1, *[1] * (self.z.dim() - 1))
        self.z, self.delta = self.z.masked_fill(mask, 0), self.delta.masked_fill(mask, 0)


def _pair(gram: Tensor, where: slice, axis: int, axes: int) -> Tensor:
    """The part of (records, *space, *space) in which this axis lies in `where`, in both."""
    everything = [slice(None)]
    return gram[(slice(None), *everything * axis, where, *everything * (axes - 1), where)]
