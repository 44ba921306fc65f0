"""Ready networks for clipless training: they begin with a bounded input, and every layer has its constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from ...errors import ConfigError
from .constraints import Constraint
from .layers import Bias, BoundedInput, Conv2d, GroupSort, L2NormPool2d, Linear, MixerBlock, Residual, Tokens

Kind = Literal["ball", "sphere"]


def lipschitz_mlp(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    radius: float = 1.0,
    kind: Kind = "ball",
    hidden: Sequence[int] = (128, 128),
    bias: bool = False,
    constraint: Constraint | None = "bjorck",
) -> nn.Module:
    """Linear layers of the `hidden` widths (even), with GroupSort between them."""
    layers: list[nn.Module] = [BoundedInput(input_shape, radius, kind), nn.Flatten()]
    before = math.prod(input_shape)
    for width in hidden:
        layers += _dense(before, width, bias, constraint)
        before = width
    return nn.Sequential(*layers, Linear(before, classes, constraint=constraint))


def lipschitz_lenet(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    radius: float = 1.0,
    kind: Kind = "ball",
    bias: bool = False,
    constraint: Constraint | None = "bjorck",
) -> nn.Module:
    """LeNet-5 with GroupSort and L2-norm pools: 61,470 weights on 28 x 28."""
    channels, height, width = _image("lipschitz-lenet", input_shape, 12)
    flat = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        BoundedInput(input_shape, radius, kind),
        *_convolution(channels, 6, 5, 2, bias, constraint),
        L2NormPool2d(2),
        *_convolution(6, 16, 5, 0, bias, constraint),
        L2NormPool2d(2),
        nn.Flatten(),
        *_dense(flat, 120, bias, constraint),
        *_dense(120, 84, bias, constraint),
        Linear(84, classes, constraint=constraint),
    )


def lipschitz_vgg(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    radius: float = 1.0,
    kind: Kind = "ball",
    widths: Sequence[int] = (32, 64, 128),
    convolutions: int = 1,
    hidden: int = 128,
    bias: bool = False,
    constraint: Constraint | None = "bjorck",
) -> nn.Module:
    """Blocks of so many 3 x 3 convolutions of the same width, each block with a pool, and two linear layers."""
    before, height, width = _image("lipschitz-vgg", input_shape, 2 ** len(widths))
    layers: list[nn.Module] = [BoundedInput(input_shape, radius, kind)]
    for channels in widths:
        for _ in range(convolutions):
            layers += _convolution(before, channels, 3, 1, bias, constraint)
            before = channels
        layers.append(L2NormPool2d(2))
        height, width = height // 2, width // 2
    layers += [nn.Flatten(), *_dense(before * height * width, hidden, bias, constraint)]
    return nn.Sequential(*layers, Linear(hidden, classes, constraint=constraint))


def lipschitz_resnet(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    radius: float = 1.0,
    kind: Kind = "ball",
    widths: Sequence[int] = (32, 64),
    blocks: int = 1,
    bias: bool = False,
    constraint: Constraint | None = "bjorck",
) -> nn.Module:
    """For each width a convolution, so many halved residual blocks of two convolutions each, and a pool."""
    before, height, width = _image("lipschitz-resnet", input_shape, 2 ** len(widths))
    layers: list[nn.Module] = [BoundedInput(input_shape, radius, kind)]
    for channels in widths:
        layers += _convolution(before, channels, 3, 1, bias, constraint)
        for _ in range(blocks):
            pair = [_convolution(channels, channels, 3, 1, bias, constraint) for _ in range(2)]
            layers.append(Residual(*pair[0], *pair[1]))
        layers.append(L2NormPool2d(2))
        before, height, width = channels, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), Linear(before * height * width, classes, constraint=constraint))


def lipschitz_mixer(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    radius: float = 1.0,
    kind: Kind = "ball",
    patch: int = 4,
    channels: int = 64,
    blocks: int = 1,
    residual: bool = True,
    constraint: Constraint | None = "bjorck",
) -> nn.Module:
    """An MLP-Mixer: patches of the image become tokens, which blocks mix with each other and within themselves."""
    before, height, width = _image("lipschitz-mixer", input_shape, patch)
    tokens = (height // patch) * (width // patch)
    return nn.Sequential(
        BoundedInput(input_shape, radius, kind),
        Conv2d(before, channels, patch, stride=patch, constraint=constraint),
        Tokens(),
        *(MixerBlock(tokens, channels, residual=residual, constraint=constraint) for _ in range(blocks)),
        nn.Flatten(),
        Linear(tokens * channels, classes, constraint=constraint),
    )


def _dense(before: int, width: int, bias: bool, constraint: Constraint | None) -> list[nn.Module]:
    if width % 2:
        raise ConfigError(f"Widths must be even, as neurons are sorted in pairs: {width} is not.")
    return [Linear(before, width, constraint=constraint), *([Bias(width)] if bias else []), GroupSort()]


def _convolution(
    before: int, width: int, kernel: int, padding: int, bias: bool, constraint: Constraint | None
) -> list[nn.Module]:
    if width % 2:
        raise ConfigError(f"Widths must be even, as channels are sorted in pairs: {width} is not.")
    convolution = Conv2d(before, width, kernel, padding=padding, constraint=constraint)
    return [convolution, *([Bias(width)] if bias else []), GroupSort()]


def _image(name: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ConfigError(
            f"Model {name!r} takes images, (channels, height, width), not input_shape={input_shape}; "
            "lipschitz-mlp takes any shape."
        )
    if min(input_shape[1:]) < smallest:
        raise ConfigError(
            f"Images of {input_shape} are too small for {name!r}, which needs {smallest} pixels at least; "
            "lipschitz-mlp takes any size."
        )
    channels, height, width = input_shape
    return channels, height, width


LIPSCHITZ_MODELS: dict[str, Callable[..., nn.Module]] = {
    "lipschitz-mlp": lipschitz_mlp,
    "lipschitz-lenet": lipschitz_lenet,
    "lipschitz-vgg": lipschitz_vgg,
    "lipschitz-resnet": lipschitz_resnet,
    "lipschitz-mixer": lipschitz_mixer,
}
"""By the name that the command line knows them under."""
