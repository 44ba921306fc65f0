"""The input clip of backpropagation clipping: a module of the model, so it acts at inference and in exports too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import native
from ..errors import Refused
from ..precision import coarseness
from .padding import padding_in_use

Norm = Literal["patch", "frobenius", "input"]
NORMS: tuple[Norm, ...] = ("patch", "frobenius", "input")

_MARGIN = 1 - 2.0**-14
"""Norms are computed in float32; aiming this much below the bound keeps what comes out at the bound or less."""
_HALF_MARGIN = 1 - 2.0**-7
"""For what leaves in 16 bits, where every entry may be rounded up by an 2^-8th."""
_BLOCK = 2**17
"""Numbers that are worked on at a time, few enough to stay in the cache."""
_LONG_AXIS = 512
"""Up to this length sums over patches are a product with a matrix, which is faster and grows with the square."""
_SHORT = 2**10
"""Sums over a patch's channels and positions of at most this many terms are added up in float32 by the loops in C."""
LONG = 2**14
"""Sums of more terms than this are computed in float64, as float32 would lose more than the margin."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Where a convolution takes its patches from; without one, each position of the last axis is a patch (Linear)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]
    """As F.pad takes it."""
    mode: str

    @classmethod
    def of(cls, layer: nn.Module) -> Window | None:
        if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return None
        return cls._known(
            tuple(layer.weight.shape[2:]), tuple(layer.stride), tuple(layer.dilation), layer.groups,
            padding_in_use(layer), layer.padding_mode,
        )  # fmt: skip

    @classmethod
    @lru_cache  # asked for several times in every step
    def _known(
        cls,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        padding: tuple[int, ...],
        mode: str,
    ) -> Window:
        return cls(kernel=kernel, stride=stride, dilation=dilation, groups=groups, padding=padding, mode=mode)

    @lru_cache  # noqa: B019 (a window is a few numbers, and there are few)
    def positions(self, shape: tuple[int, ...]) -> list[int]:
        """How many patches there are along each axis of an input of this shape."""
        axes = len(self.kernel)
        framed = [n + sum(self.padding[2 * (axes - 1 - i) : 2 * (axes - i)]) for i, n in enumerate(shape)]
        along = zip(framed, self.kernel, self.stride, self.dilation, strict=True)
        return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in along]

    def patches(self, energy: Tensor) -> Tensor:
        """‖P_t‖² of every patch, group by group, from the squares added up over the channels of each group.

        Both are (records, groups, *positions). A patch is a box, so its sum is taken axis by axis.
        """
        return self._along_axes(energy, self.dilation, self.stride, self.kernel)

    @lru_cache  # noqa: B019 (a window is a few numbers, and there are few)
    def counts(self, shape: tuple[int, ...], *, all_once: bool) -> Tensor:
        """How many patches have each position of an input of this shape; or one for each."""
        counts = torch.ones(shape, dtype=torch.float32, device="cpu")
        if not all_once:
            for i, n in enumerate(shape):
                before, after = self.padding[2 * (len(shape) - 1 - i) : 2 * (len(shape) - i)]
                along = _box(n, before, after, self.mode, self.kernel[i], self.stride[i], self.dilation[i]).sum(1)
                counts = counts * along.view(-1, *[1] * (len(shape) - 1 - i))
        return counts

    def padded(self, energy: Tensor) -> Tensor:
        return self._along_axes(energy, [1] * len(self.kernel), [1] * len(self.kernel), [1] * len(self.kernel))

    def _along_axes(
        self, energy: Tensor, dilation: Sequence[int], stride: Sequence[int], kernel: Sequence[int]
    ) -> Tensor:
        axes = len(kernel)
        for i in range(axes):
            before, after = self.padding[2 * (axes - 1 - i) : 2 * (axes - i)]
            along = torch.movedim(energy, 2 + i, -1)
            if along.shape[-1] > _LONG_AXIS:
                rows = _pad(along.reshape(-1, 1, along.shape[-1]), before, after, self.mode)
                sums = F.conv1d(rows, rows.new_ones(1, 1, kernel[i]), None, stride[i], 0, dilation[i])
                along = sums.view(*along.shape[:-1], -1)
            else:
                box = _box(along.shape[-1], before, after, self.mode, kernel[i], stride[i], dilation[i])
                along = along @ box.to(along)
            energy = torch.movedim(along, -1, 2 + i)
        return energy


def _pad(rows: Tensor, before: int, after: int, mode: str) -> Tensor:
    return F.pad(rows, (before, after), mode="constant" if mode == "zeros" else mode)


def _box(length: int, before: int, after: int, mode: str, kernel: int, stride: int, dilation: int) -> Tensor:
    """(length, positions): how often the patch at a position takes each entry of the axis."""
    counts = _counts if not torch.compiler.is_compiling() else _counts.__wrapped__
    return counts(length, before, after, mode, kernel, stride, dilation)


@lru_cache(maxsize=256)
def _counts(length: int, before: int, after: int, mode: str, kernel: int, stride: int, dilation: int) -> Tensor:
    own = torch.arange(length)
    sources = _pad(own.double().view(1, 1, -1) + 1, before, after, mode).flatten() - 1  # −1 where it is zero
    positions = (len(sources) - dilation * (kernel - 1) - 1) // stride + 1
    taps = stride * torch.arange(positions)[:, None] + dilation * torch.arange(kernel)
    return (sources[taps].unsqueeze(-1) == own).sum(1).T.float().contiguous()


class InputClip(nn.Module):
    """Scales each record so that its norm is at most `bound`; a record that is not finite becomes zero.

    Norms of an input z whose patches under the layer's kernel are P_t (Linear: its positions):

    - `patch`: max_t ‖P_t‖, with a grouped convolution the largest over its groups too;
    - `frobenius`: √Σ_t ‖P_t‖², of the group where it is largest;
    - `input`: ‖z‖, of the padded input where the padding repeats entries (the paper's).

    Attach one to a layer with `before`: it becomes the layer's child `input_clip`, is called before the layer's own
    forward, and is saved, copied, moved and exported with it. A `state_dict` from before it was there still loads.
    """

    bound: Tensor
    kind: Tensor

    def __init__(self, bound: float, norm: Norm = "input", window: Window | None = None) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("bound", torch.tensor(float(bound), dtype=torch.float32))
        self.register_buffer("kind", torch.tensor(NORMS.index(norm), dtype=torch.uint8))
        self.norm: Norm = norm
        self.instead: list[Callable[[InputClip, Tensor], Tensor | None]] = []
        """Who clips in this module's place while the layer is trained, or leaves it to the next one with None."""

    @classmethod
    def before(cls, layer: nn.Module, bound: float, norm: Norm) -> InputClip:
        """The clip of a layer, attached to it; the one that it has already is set to this bound and norm."""
        clip = clip_of(layer)
        if clip is None:
            clip = cls(bound, norm, Window.of(layer))
            parameter = next(layer.parameters(), None)
            layer.add_module("input_clip", clip if parameter is None else clip.to(parameter.device))
            layer.register_forward_pre_hook(_clip_first, with_kwargs=True)
        clip.set(bound, norm)
        return clip

    @torch.no_grad()
    def set(self, bound: float, norm: Norm | None = None) -> None:
        if bound != float(self.bound):
            self.bound.fill_(bound)
        if norm is not None and norm != self.norm:
            self.norm = norm
            self.kind.fill_(NORMS.index(norm))

    def squared_norms(self, z: Tensor, norm: Norm | None = None) -> Tensor:
        """The square of each record's norm, in float32 or better."""
        return self._of_energy(self._energy(z, norm or self.norm), norm or self.norm)

    def _energy(self, z: Tensor, norm: Norm) -> Tensor:
        """Squares, added up as far as this norm treats entries alike: over everything, or over what shares a place."""
        z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        if self._takes_all(z, norm):
            return _sum_of_squares(z, list(range(1, z.dim())))
        if self.window is None:
            return _sum_of_squares(z, [z.dim() - 1])
        if self.window.groups == 1:
            return _sum_of_squares(z, [1]).unsqueeze(1)
        return _sum_of_squares(
            z.reshape(len(z), self.window.groups, z.shape[1] // self.window.groups, *z.shape[2:]), [2]
        )

    def _takes_all(self, z: Tensor, norm: Norm) -> bool:
        if self.window is None:
            return norm != "patch" or z.dim() == 2
        return norm == "input" and self.window.mode == "zeros"

    def _of_energy(self, energy: Tensor, norm: Norm) -> Tensor:
        if energy.dim() == 1 or len(energy) == 0:
            return energy.flatten(1).sum(1) if energy.dim() > 1 else energy
        if self.window is None:
            return energy.flatten(1).amax(1)
        if coarseness(energy.device.type) or energy.is_cuda:
            energy = energy.double()
        if norm == "input":
            return _total(self.window.padded(energy).flatten(1))
        patches = self.window.patches(energy).flatten(2)
        return patches.flatten(1).amax(1) if norm == "patch" else _total(patches).amax(1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The bound moves with the model and keeps its precision, whatever becomes of the weights'."""
        bound = self.bound
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bound = bound.to(self.bound.device)
        return moved

    def forward(self, x: Tensor) -> Tensor:
        if self.window is not None and x.dim() != len(self.window.kernel) + 2:
            raise Refused(
                f"A convolution was given a tensor of shape {tuple(x.shape)}, and its input clip needs records and "
                "channels before the positions: add an axis for the records."
            )
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._clipped(x.float())  # the layer lowers the precision itself; bounds see what it was given
        return self._clipped(x)

    def _clipped(self, x: Tensor) -> Tensor:
        """The factor counts as a constant in the backward pass, which then needs no norms: one product is enough."""
        for instead in self.instead:
            if (clipped := instead(self, x)) is not None:
                return clipped
        factors = self._factors(x)
        plain = not torch.compiler.is_compiling()
        return x if plain and bool((factors == 1).all()) else self._scaled(x, factors)

    @torch.no_grad()
    def clip(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes of the records, and the factor of each: 0 for one that is not finite."""
        if self._is_a_loop_in_c(x):
            z = torch.empty_like(x) if native.dense(x) else x.new_empty(x.shape)
            return z, self._by_loop(x, z)
        factors = self._factors(x)
        return self._scaled(x, factors), factors.flatten()

    @torch.no_grad()
    def measure(self, x: Tensor) -> Tensor:
        """The factors of `clip`."""
        return self._by_loop(x, None) if self._is_a_loop_in_c(x) else self._factors(x).flatten()

    def _is_a_loop_in_c(self, x: Tensor) -> bool:
        if not native.serves(x):
            return False
        if self.window is None:
            return x.dim() == 2
        return native.dense(x) and self._sums_are_short(x, self.window)

    def _by_loop(self, x: Tensor, out: Tensor | None) -> Tensor:
        target, window = _MARGIN * float(self.bound), self.window
        if window is None:
            return native.clip_rows(x, target, out=out)
        left, right, top, bottom = window.padding
        padding = [(top, bottom), (left, right)]
        counts = None if self.norm == "patch" else window.counts(tuple(x.shape[2:]), all_once=self.norm == "input")
        return native.clip_patches(
            x, target, window.kernel, window.stride, window.dilation, padding, counts=counts, out=out
        )

    def _sums_are_short(self, x: Tensor, window: Window) -> bool:
        return (
            (window.mode, window.groups) == ("zeros", 1)
            and x.shape[1] + sum(window.kernel) <= _SHORT
            and all(n > 0 for n in x.shape)
        )

    @torch.no_grad()
    def _factors(self, x: Tensor) -> Tensor:
        """min(1, C/n) with C a little below the bound, in a shape to multiply x with; 0 where n is not finite."""
        squares = self.squared_norms(x)
        margin = _HALF_MARGIN if x.dtype in (torch.float16, torch.bfloat16) else _MARGIN
        factors = (squares.double() * (margin * self.bound.double()) ** -2).clamp(min=1).rsqrt()
        factors = torch.where(torch.isfinite(squares), factors, 0)
        return factors.to(torch.promote_types(x.dtype, torch.float32)).view(-1, *[1] * (x.dim() - 1))

    @staticmethod
    def _scaled(x: Tensor, factors: Tensor) -> Tensor:
        scaled, kept = (x * factors).to(x.dtype), factors > 0
        if not torch.compiler.is_compiling() and bool(kept.all()):
            return scaled
        return torch.where(kept, scaled, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "instead": []}  # a copy is not the one that is trained

    def extra_repr(self) -> str:
        return f"bound={float(self.bound):.4g}, norm={self.norm}"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        missing = lists[0]
        missing[:] = [key for key in missing if key not in (f"{prefix}bound", f"{prefix}kind")]
        self.norm = NORMS[int(self.kind)]


def clip_of(layer: nn.Module) -> InputClip | None:
    """The clip that acts before this layer, if it has one."""
    clip = layer._modules.get("input_clip")
    attached = any(hook is _clip_first for hook in layer._forward_pre_hooks.values())
    return clip if attached and isinstance(clip, InputClip) else None


def clip_inputs(model: nn.Module, bound: float = math.inf, norm: Norm = "patch") -> nn.Module:
    """Attaches an input clip to each layer that backpropagation clipping clips the input of, and returns the model.

    A `Run` does so by itself. This is for loading what was trained: build the model, clip its inputs, load the weights,
    which bring the bounds and norms along.
    """
    from ..gradients.bounded import BOUNDS  # noqa: PLC0415 - layers know this file

    for layer in model.modules():
        bounded = BOUNDS.get(type(layer))
        if bounded is not None and bounded.clips_input:
            InputClip.before(layer, bound, norm)
    return model


def _clip_first(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    clip: Any = layer.input_clip
    if args:
        return (clip(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": clip(kwargs["input"])}


def _sum_of_squares(z: Tensor, axes: list[int]) -> Tensor:
    """Σ z² over these axes."""
    if math.prod(z.shape[axis] for axis in axes) > LONG:
        return z.square().sum(axes, dtype=torch.float64)
    if axes == [1] and z.shape[1] == 1:
        return z.squeeze(1).square()
    if torch.compiler.is_compiling() or (z.requires_grad and torch.is_grad_enabled()):
        return z.square().sum(axes)
    if len(axes) == z.dim() - 1 or z.stride(axes[-1]) == 1:  # read in the order of memory
        norms: Tensor = torch.linalg.vector_norm(z, 2, axes)
        return norms.square()
    return by_blocks(z, lambda part, room: torch.mul(part, part, out=room).sum(axes))


def by_blocks(x: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduces the records block by block, with room for a block of the same size that stays in the cache."""
    block = max(1, _BLOCK // max(1, math.prod(x.shape[1:])))
    room = torch.empty_like(x[:block])
    return torch.cat([reduce(part, room[: len(part)]) for part in torch.split(x, block)])


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, dtype=torch.float64 if x.shape[-1] > LONG else None)
