"""Colour spaces and normalisation before the bounded input: fixed maps that look at no data but the record.

They need no constants for privacy, as `BoundedInput` bounds whatever comes. For robustness in terms of raw pixels the
linear ones have exact constants, and HSV has none: certificates then hold in HSV space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, Refused
from .bounds import Bound, Constants, LipschitzLayer
from .norms import INFLATION

_LINEAR: dict[str, list[list[float]]] = {
    "rgb": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "yiq": [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]],
    "yuv": [[0.299, 0.587, 0.114], [-0.14713, -0.28886, 0.436], [0.615, -0.51499, -0.10001]],
    "grayscale": [[0.299, 0.587, 0.114]],
}
COLOURS = (*_LINEAR, "hsv")


class Colour(LipschitzLayer):
    """RGB images with numbers from 0 to 1, in another colour space: rgb, yiq, yuv, grayscale or hsv."""

    matrix: Tensor

    def __init__(self, space: str) -> None:
        super().__init__()
        if space not in COLOURS:
            raise ConfigError(f"Colour space {space!r} must be one of {', '.join(COLOURS)}.")
        self.space = space
        self.channels = len(_LINEAR.get(space, range(3)))
        self.register_buffer("matrix", torch.tensor(_LINEAR.get(space, _LINEAR["rgb"])), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 3:
            raise Refused(f"Colour spaces are for RGB images, (records, 3, height, width), not {tuple(x.shape)}.")
        if self.space == "hsv":
            return _hsv(x)
        return x if self.space == "rgb" else torch.einsum("oc,nchw->nohw", self.matrix.to(x.dtype), x)

    def constants(self, x: Bound) -> Constants:
        norm = math.inf if self.space == "hsv" else float(np.linalg.norm(_LINEAR[self.space], 2)) * INFLATION
        return Constants(Bound(norm * x.norm, (self.channels, *x.shape[1:]) if x.shape else ()), norm)

    def extra_repr(self) -> str:
        return self.space


class Normalize(LipschitzLayer):
    """(x − mean) / std, channel by channel. Both must be public: computed from the private records, they leak."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise ConfigError("Normalize takes a mean and a positive std for each channel.")
        self.register_buffer("mean", torch.tensor([float(m) for m in mean]), persistent=False)
        self.register_buffer("std", torch.tensor([float(s) for s in std]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (x - self.mean.view(shape)) / self.std.view(shape)

    def constants(self, x: Bound) -> Constants:
        slope = 1 / float(self.std.min()) * INFLATION
        if not x.shape:
            return Constants(Bound(math.inf, ()), slope)
        offset = float((self.mean / self.std).norm()) * math.sqrt(x.size // x.shape[0]) * INFLATION
        return Constants(Bound(slope * x.norm + offset, x.shape), slope)


def _hsv(rgb: Tensor) -> Tensor:
    """Hue as a part of the circle, saturation and value, from 0 to 1; gray has hue 0, black saturation 0."""
    value, most = rgb.max(1)
    spread = value - rgb.min(1).values
    divisor = torch.where(spread > 0, spread, 1)
    red, green, blue = rgb.unbind(1)
    sixths = torch.stack(((green - blue) / divisor, 2 + (blue - red) / divisor, 4 + (red - green) / divisor), 1)
    hue = sixths.gather(1, most.unsqueeze(1)).squeeze(1) / 6 % 1
    saturation = torch.where(value > 0, spread / torch.where(value > 0, value, 1), 0)
    return torch.stack((torch.where(spread > 0, hue, 0), saturation, value), 1)
