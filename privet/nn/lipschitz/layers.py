"""Layers for clipless training. Each states its constants beside its code; see `bounds`."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from ...errors import ConfigError, Refused
from .bounds import Bound, Constants, LipschitzLayer, chain, constants_for, constants_of, prefixed, refuse
from .constraints import Ball, Constraint, constrain
from .norms import INFLATION, frobenius_norm, rounding
from .plain import added, convolution, linear, pooled
from .windows import Axis


class BoundedInput(LipschitzLayer):
    """Declares the shape of a record and bounds its norm; both are chosen by the user, never read off the data.

    `ball`: x·min(1, R/‖x‖). `sphere`: R·x/‖x‖, which uses the whole bound, but has no Lipschitz constant. Records that
    are not finite or beyond 1e38, and on the sphere those that are nearly zero, become zero. Other shapes are refused.
    """

    def __init__(self, shape: tuple[int, ...], radius: float = 1.0, kind: Literal["ball", "sphere"] = "ball") -> None:
        super().__init__()
        if not shape or min(shape) < 1:
            raise ConfigError(f"shape={shape!r} must name at least one size, all of them positive.")
        if not (0 < radius < 1e18):
            raise ConfigError(f"radius must be a positive number below 1e18, and is {radius!r}.")
        if kind not in ("ball", "sphere"):
            raise ConfigError(f"kind={kind!r} must be ball or sphere.")
        self.shape, self.radius, self.kind = tuple(shape), float(radius), kind

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise Refused(
                f"The model is bounded for records of shape {self.shape}, and was given {tuple(x.shape[1:])}: the "
                "bounds on its gradients would not hold."
            )
        if x.dtype not in (torch.float32, torch.float64):
            x = x.float()
        dims = list(range(1, x.dim()))
        norms = torch.linalg.vector_norm(x, 2, dims, keepdim=True, dtype=torch.float64)
        with torch.no_grad():
            usable = torch.isfinite(norms) & (norms < 1e38)
            usable &= (norms > 1e-30) if self.kind == "sphere" else True
        # The division and the product below round by 2^-23 at most, which the 1e-5 of `constants` covers.
        onto_sphere = x / torch.where(usable, norms, 1).to(x.dtype) * self.radius
        bounded = onto_sphere if self.kind == "sphere" else torch.where(norms <= self.radius, x, onto_sphere)
        return torch.where(usable, bounded, 0)

    def constants(self, x: Bound) -> Constants:
        return Constants(Bound(self.radius * INFLATION, self.shape), 1.0 if self.kind == "ball" else math.inf)

    def extra_repr(self) -> str:
        return f"{self.shape}, radius={self.radius:g}, kind={self.kind}"


class Linear(nn.Linear):
    """Without a bias (put `Bias` behind it), with ‖W̄‖₂ about `lipschitz`, which the certificate does not rely on."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        constraint: Constraint | None = "bjorck",
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias=False)
        constrain(self, constraint, lipschitz)


class Conv2d(nn.Conv2d):
    """Without a bias; the kernel as a matrix has a norm of about `lipschitz` / √(⌈kh/sh⌉·⌈kw/sw⌉), the map `lipschitz`.

    Each input lies in at most ⌈kh/sh⌉·⌈kw/sw⌉ patches; with a dilation d, s counts as s/gcd(s, d).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        padding_mode: Literal["zeros", "circular"] = "zeros",
        *,
        constraint: Constraint | None = "bjorck",
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, bias=False, padding_mode=padding_mode
        )
        patches = math.prod(
            math.ceil(k / (s // math.gcd(s, d)))
            for k, s, d in zip(self.kernel_size, self.stride, self.dilation, strict=True)
        )
        constrain(self, constraint, lipschitz / math.sqrt(patches))


constants_for(Linear)(linear)
constants_for(Conv2d)(convolution)


class Bias(LipschitzLayer):
    """Adds b_c to every number of channel c, with ‖b̄‖ ≤ `radius` (None: free).

    At T positions ‖y‖ ≤ ‖x‖ + √T·‖b‖, and ∂L/∂b_c = Σ_t δ_ct, so ‖∂L/∂b‖ ≤ √T·‖δ‖.
    """

    def __init__(self, channels: int, *, axis: int = 1, radius: float | None = 1.0) -> None:
        super().__init__()
        self.axis = axis
        self.bias = nn.Parameter(torch.zeros(channels))
        if radius is not None:
            if not (radius > 0 and math.isfinite(radius)):
                raise ConfigError(f"radius of a bias must be a positive number or None, and is {radius!r}.")
            register_parametrization(self, "bias", Ball(radius))

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return x + self.bias.view(shape)

    def constants(self, x: Bound) -> Constants:
        channels = len(self.bias)
        if _length(self, x, self.axis) != channels:
            refuse(self, f"is for {channels} channels, and records reach it with the shape {x.shape}.")
        positions = x.size // channels
        norm = added(x, frobenius_norm(self.bias), positions) * INFLATION
        factor = math.sqrt(positions) * (INFLATION + rounding(self.bias, positions))
        return Constants(Bound(norm, x.shape), 1.0, {"bias": factor})


class GroupSort(LipschitzLayer):
    """Sorts the channels in groups of `size` (Anil et al. 2019): a permutation, so every norm stays as it is.

    Of C channels, those that are C/size apart form a group: they need not be interleaved, which would be slow.
    """

    def __init__(self, size: int = 2, *, axis: int = 1) -> None:
        super().__init__()
        if size < 1:
            raise ConfigError(f"size={size!r} of a GroupSort must be at least 1.")
        self.size, self.axis = size, axis

    def forward(self, x: Tensor) -> Tensor:
        if self.size == 2:
            first, second = x.chunk(2, self.axis)
            return torch.cat((torch.minimum(first, second), torch.maximum(first, second)), self.axis)
        axis = self.axis % x.dim()
        groups = x.reshape(*x.shape[:axis], self.size, -1, *x.shape[axis + 1 :])
        return groups.sort(axis).values.reshape(x.shape)

    def constants(self, x: Bound) -> Constants:
        if _length(self, x, self.axis) % self.size:
            refuse(self, f"sorts groups of {self.size}, into which {x.shape} cannot be cut.")
        return Constants(x, 1.0)

    def extra_repr(self) -> str:
        return f"{self.size}, axis={self.axis}"


class Householder(LipschitzLayer):
    """Channels in pairs z: z if v·z > 0, else its reflection z − 2(v·z)·v; v = (sin θ/2, −cos θ/2) is learned per pair.

    Of C channels, those that are C/2 apart form a pair.
    Singla et al. (2022). Norms are kept and the two cases meet at v·z = 0, so it is 1-Lipschitz. As v ⟂ v' = dv/dθ and
    ‖v'‖ = ½, ‖∂y/∂θ‖ = 2·‖(v'·z)·v + (v·z)·v'‖ = ‖z‖; summed over positions and pairs, ‖∂L/∂θ‖ ≤ ‖δ‖·‖x‖.
    It begins as a sort of each pair, θ = π/2.
    """

    def __init__(self, channels: int, *, axis: int = 1) -> None:
        super().__init__()
        if channels < 2 or channels % 2:
            raise ConfigError(f"channels={channels!r} of a Householder activation must be an even number.")
        self.axis = axis
        self.angle = nn.Parameter(torch.full((channels // 2,), math.pi / 2))

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[self.axis] = -1
        half = (self.angle / 2).view(shape)
        sine, cosine = half.sin(), half.cos()
        first, second = x.chunk(2, self.axis)
        twice = 2 * (sine * first - cosine * second).clamp(max=0)
        return torch.cat((first - twice * sine, second + twice * cosine), self.axis)

    def constants(self, x: Bound) -> Constants:
        if _length(self, x, self.axis) != 2 * len(self.angle):
            refuse(self, f"is for {2 * len(self.angle)} channels, and records reach it with the shape {x.shape}.")
        finite = bool(torch.isfinite(self.angle).all())
        factor = x.norm * (INFLATION + rounding(self.angle, x.size // len(self.angle))) if finite else math.inf
        return Constants(Bound(x.norm * INFLATION, x.shape), INFLATION, {"angle": factor})


class L2NormPool2d(LipschitzLayer):
    """The norm of each window: 1-Lipschitz in the window, so √m if an entry lies in up to m of them.

    Computed as max(‖P‖, ε) − ε with ε = 1e-10, which has a gradient everywhere and squares that float32 can hold.
    """

    def __init__(self, kernel_size: int, stride: int | None = None) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride

    def forward(self, x: Tensor) -> Tensor:
        squares = F.avg_pool2d(x.square(), self.kernel_size, self.stride, divisor_override=1)
        return squares.clamp(min=1e-20).sqrt() - 1e-10

    def constants(self, x: Bound) -> Constants:
        if len(x.shape) != 3 or min(x.shape[1:]) < self.kernel_size:
            refuse(self, f"pools windows of {self.kernel_size}, and records reach it with the shape {x.shape}.")
        return pooled(x, [Axis(size, self.kernel_size, self.stride) for size in x.shape[1:]])

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}"


class Centering(LipschitzLayer):
    """Takes its mean from each record, over the record's own `axes` (all of them by default), never over the batch.

    An orthogonal projection, so neither norms nor differences grow.
    """

    def __init__(self, axes: tuple[int, ...] | None = None) -> None:
        super().__init__()
        if axes is not None and (0 in axes or not axes):
            raise ConfigError(f"axes={axes!r} of a centering must be axes of the record: the first, 0, is the batch's.")
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(self._of(x.dim()), keepdim=True)

    def _of(self, dimensions: int) -> tuple[int, ...]:
        return tuple(range(1, dimensions)) if self.axes is None else self.axes

    def constants(self, x: Bound) -> Constants:
        for axis in self._of(len(x.shape) + 1):
            _length(self, x, axis)
        return Constants(Bound(x.norm * INFLATION, x.shape), INFLATION)


class Residual(LipschitzLayer):
    """(x + f(x)) / 2, which is 1-Lipschitz if f is."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.block = layers[0] if len(layers) == 1 else nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.block(x)
        return (x + changed) / 2

    def constants(self, x: Bound) -> Constants:
        own = constants_of(self.block, x)
        if own.output.shape != x.shape:
            refuse(self, f"adds what it is given, {x.shape}, to what its block makes of it, {own.output.shape}.")
        return Constants(
            Bound((x.norm + own.output.norm) / 2 * INFLATION, x.shape),
            (1 + own.lipschitz) / 2 * INFLATION,
            prefixed("block", own.gradient, 0.5),
            own.inner,
        )


class Transposed(LipschitzLayer):
    """Its layers with the last two axes exchanged: how an MLP-Mixer mixes tokens."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.block(x.mT)
        return mixed.mT

    def constants(self, x: Bound) -> Constants:
        if len(x.shape) < 2:
            refuse(self, f"exchanges two axes, and records reach it with the shape {x.shape}.")
        own = constants_of(self.block, Bound(x.norm, _exchanged(x.shape)))
        output = Bound(own.output.norm, _exchanged(own.output.shape))
        return Constants(output, own.lipschitz, prefixed("block", own.gradient), own.inner)


class Tokens(LipschitzLayer):
    """(channels, height, width) to (height·width, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT

    def constants(self, x: Bound) -> Constants:
        if len(x.shape) < 2:
            refuse(self, f"makes tokens of positions, and records reach it with the shape {x.shape}.")
        return Constants(Bound(x.norm, (math.prod(x.shape[1:]), x.shape[0])), 1.0)


class MixerBlock(LipschitzLayer):
    """A block of an MLP-Mixer (Tolstikhin et al. 2021) on (tokens, channels): mixes tokens, then channels.

    Residuals are halved; the paper found that it does as well without (`residual=False`).
    """

    def __init__(
        self,
        tokens: int,
        channels: int,
        *,
        token_width: int | None = None,
        channel_width: int | None = None,
        residual: bool = True,
        constraint: Constraint | None = "bjorck",
    ) -> None:
        super().__init__()

        def mixing(size: int, width: int) -> list[nn.Module]:
            return [
                Linear(size, width, constraint=constraint),
                GroupSort(axis=-1),
                Linear(width, size, constraint=constraint),
            ]

        across = Transposed(*mixing(tokens, token_width or tokens + tokens % 2))
        within = nn.Sequential(*mixing(channels, channel_width or channels + channels % 2))
        self.tokens: nn.Module = Residual(across) if residual else across
        self.channels: nn.Module = Residual(within) if residual else within

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.channels(self.tokens(x))
        return mixed

    def constants(self, x: Bound) -> Constants:
        return chain((("tokens", self.tokens), ("channels", self.channels)), x)


def _length(layer: nn.Module, x: Bound, axis: int) -> int:
    """How long this axis is, counted with the batch's as axis 0."""
    place = axis - 1 if axis > 0 else len(x.shape) + axis
    if not 0 <= place < len(x.shape):
        refuse(layer, f"works along axis {axis}, and records reach it with the shape {x.shape}.")
    return x.shape[place]


def _exchanged(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
