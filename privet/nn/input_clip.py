"""The input clip of backpropagation clipping: a module of the model, so it acts at inference and in exports too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["patch", "frobenius", "input"]
NORMS: tuple[Norm, ...] = ("patch", "frobenius", "input")

_MARGIN = 1 - 2.0**-14
"""Norms are computed in float32; aiming this much below the bound keeps what comes out at the bound or less."""
_HALF_MARGIN = 1 - 2.0**-7
"""For what leaves in 16 bits, where every entry may be rounded up by an 2^-8th."""
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
        return cls(
            kernel=tuple(layer.kernel_size),
            stride=tuple(layer.stride),
            dilation=tuple(layer.dilation),
            groups=layer.groups,
            padding=tuple(layer._reversed_padding_repeated_twice),
            mode=layer.padding_mode,
        )

    def pad(self, z: Tensor) -> Tensor:
        if not any(self.padding):
            return z
        return F.pad(z, self.padding, mode="constant" if self.mode == "zeros" else self.mode)

    def squares(self, z: Tensor) -> Tensor:
        """‖P_t‖² of every patch, group by group: (records, groups, *positions)."""
        squares = self.pad(z.square().sum(1, keepdim=True) if self.groups == 1 else self._by_group(z))
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        ones = squares.new_ones(self.groups, 1, *self.kernel)
        return conv(squares, ones, None, self.stride, 0, self.dilation, self.groups)

    def _by_group(self, z: Tensor) -> Tensor:
        return z.reshape(len(z), self.groups, -1, *z.shape[2:]).square().sum(2)


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
        self.register_buffer("bound", torch.tensor(float(bound)))
        self.register_buffer("kind", torch.tensor(NORMS.index(norm), dtype=torch.uint8))
        self.norm: Norm = norm

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
        norm = norm or self.norm
        z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        if norm == "input" or z.dim() == 2 or (self.window is None and norm == "frobenius"):
            repeats = self.window is not None and self.window.mode != "zeros"
            return _squares(self.window.pad(z) if repeats and self.window is not None else z, range(1, z.dim()))
        if self.window is None:
            return _squares(z, [z.dim() - 1]).flatten(1).amax(1)
        patches = self.window.squares(z).flatten(2)
        if norm == "patch":
            return patches.flatten(1).amax(1)
        return patches.sum(2, dtype=torch.float64 if patches.shape[2] > LONG else None).amax(1)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._clipped(x.float())  # the layer lowers the precision itself; bounds see what it was given
        return self._clipped(x)

    def _clipped(self, x: Tensor) -> Tensor:
        squares = self.squared_norms(x)
        margin = _HALF_MARGIN if x.dtype in (torch.float16, torch.bfloat16) else _MARGIN
        factors = (squares * (margin * self.bound) ** -2).clamp(min=1).rsqrt()
        factors = factors.to(torch.promote_types(x.dtype, torch.float32)).view(-1, *[1] * (x.dim() - 1))
        finite = torch.isfinite(squares).view_as(factors)
        clipped = (x * factors).to(x.dtype)
        if not torch.compiler.is_compiling() and bool(finite.all()):
            return clipped
        return torch.where(finite, clipped, 0)

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


def _squares(z: Tensor, axes: Any) -> Tensor:
    axes = list(axes)
    long = math.prod(z.shape[axis] for axis in axes) > LONG
    return z.square().sum(axes, dtype=torch.float64 if long else None)
