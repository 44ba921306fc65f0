"""Ready networks by name, as plain modules, and a user's own as `module:factory`."""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from privet.errors import ConfigError
from privet.nn.activations import activation as activation_of
from privet.nn.lipschitz.models import LIPSCHITZ_MODELS

Factory = Callable[..., nn.Module]


def build(
    name: str, *, input_shape: tuple[int, ...], classes: int, seed: int | None = None, **options: Any
) -> nn.Module:
    """Make the network `name` for records of `input_shape` with `classes` outputs.

    `name` is one of MODELS, or `module:factory` of the user's own, imported with the current directory on the
    path and called with `input_shape` and `classes` where its signature names them; `options` go to it too.
    With a `seed` the initial weights are reproducible and torch's global generator is left as it was.
    """
    if classes < 1:
        raise ConfigError(f"classes={classes!r} must be at least 1.")
    if not input_shape or min(input_shape) < 1:
        raise ConfigError(f"input_shape={input_shape!r} must name at least one size, all of them positive.")
    own = ":" in name
    if not own and name not in MODELS:
        raise ConfigError(
            f"Unknown model {name!r}. Choose one of {', '.join(MODELS)}, or name your own as module:factory."
        )
    with _current_directory_importable() if own else nullcontext():
        factory = _imported(name) if own else MODELS[name]
        arguments = _arguments(name, factory, input_shape=input_shape, classes=classes, options=options)
        try:
            with _seeded(seed):
                model = factory(**arguments)
        except ConfigError:
            raise
        except Exception as error:  # a user's factory can fail in any way
            raise ConfigError(
                f"Model {name!r} cannot be made with the options {options}: {type(error).__name__}: {error}."
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Model {name!r} returned a {type(model).__name__}; it must return a torch.nn.Module.")
    return model


def _imported(name: str) -> Factory:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module can fail in any way; which way is in the message and the cause
        raise ConfigError(
            f"Model {name!r}: importing {module_name!r} failed with {type(error).__name__}: {error}. "
            f"It is looked for in {Path.cwd()} and on the Python path."
        ) from error
    try:
        factory = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise ConfigError(f"Model {name!r}: module {module_name!r} has no {attribute!r}.") from error
    if not callable(factory):
        raise ConfigError(f"Model {name!r} is a {type(factory).__name__}; name a class or function that makes a model.")
    return factory  # type: ignore[no-any-return]


def _arguments(name: str, factory: Factory, *, options: dict[str, Any], **offered: Any) -> dict[str, Any]:
    """What to call the factory with: the offered arguments that it names, and all the options."""
    signature = inspect.signature(factory)
    by_name = {p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    arguments = {key: value for key, value in offered.items() if key in by_name} | options
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"Model {name!r} cannot be made with the options {sorted(options)}: {error}.") from error
    return arguments


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs, which fork_rng left
        yield


def mnist_cnn(*, input_shape: tuple[int, ...], classes: int, activation: str = "tanh") -> nn.Module:
    """The tanh CNN for (Fashion-)MNIST of the losing-less paper, Table 1: 26,010 parameters on 28 x 28."""
    return _small_cnn("mnist-cnn", input_shape, classes, padding=2, bias=True, activation=activation)


def _small_cnn(
    name: str, input_shape: tuple[int, ...], classes: int, *, padding: int, bias: bool, activation: str
) -> nn.Module:
    """The CNN of Papernot et al., as several papers have it."""
    act = activation_of(activation)
    features = nn.Sequential(
        nn.Conv2d(_channels(name, input_shape), 16, 8, stride=2, padding=padding, bias=bias),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2, bias=bias),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    width = _output_width(name, features, input_shape)
    return nn.Sequential(*features, nn.Linear(width, 32, bias=bias), act(), nn.Linear(32, classes, bias=bias))


def cifar_cnn(*, input_shape: tuple[int, ...], classes: int, activation: str = "tanh") -> nn.Module:
    """The tanh CNN for CIFAR-10 of the losing-less paper, Table 2: 550,570 parameters on 3 x 32 x 32."""
    act = activation_of(activation)
    layers: list[nn.Module] = []
    before = _channels("cifar-cnn", input_shape)
    for width in (32, 64, 128):
        layers += [nn.Conv2d(before, width, 3, padding=1), act()]
        layers += [nn.Conv2d(width, width, 3, padding=1), act(), nn.MaxPool2d(2)]
        before = width
    features = nn.Sequential(*layers, nn.Flatten())
    width = _output_width("cifar-cnn", features, input_shape)
    return nn.Sequential(*features, nn.Linear(width, 128), act(), nn.Linear(128, classes))


def scatter_mnist_cnn(
    *, input_shape: tuple[int, ...], classes: int, activation: str = "tanh", original: bool = False
) -> nn.Module:
    """The CNN on scattering features of (Fashion-)MNIST of the losing-less paper, Table 3: 20,778 parameters.

    The paper has it from Tramèr and Boneh (2021), whose code has no pools: `original`, 33,066 parameters.
    """
    act = activation_of(activation)
    pool: list[nn.Module] = [] if original else [nn.MaxPool2d(2, stride=1)]
    features = nn.Sequential(
        nn.Conv2d(_channels("scatter-mnist-cnn", input_shape), 16, 3, stride=2, padding=1),
        act(),
        *pool,
        nn.Conv2d(16, 32, 3, padding=1),
        act(),
        *pool,
        nn.Flatten(),
    )
    width = _output_width("scatter-mnist-cnn", features, input_shape)
    return nn.Sequential(*features, nn.Linear(width, 32), act(), nn.Linear(32, classes))


def scatter_cifar_cnn(
    *, input_shape: tuple[int, ...], classes: int, activation: str = "tanh", original: bool = False
) -> nn.Module:
    """The CNN on scattering features of CIFAR-10 of the losing-less paper, Table 4: 253,386 parameters.

    The paper has it from Tramèr and Boneh (2021), whose code has two convolutions in place of four, and one pool
    between them: `original`, 187,210 parameters.
    """
    act = activation_of(activation)
    layers: list[nn.Module] = []
    before = _channels("scatter-cifar-cnn", input_shape)
    for width in (64, "pool", 64) if original else (64, 64, "pool", 64, 64, "pool"):
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(before, width, 3, padding=1), act()]
            before = width
    features = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(*features, nn.Linear(_output_width("scatter-cifar-cnn", features, input_shape), classes))


def linear(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear layer, as Tramèr and Boneh (2021) train on scattering features: 39,700 parameters on 81 x 7 x 7."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(input_shape).numel()), classes))


def backprop_mnist(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    padding: bool = False,
    bias: bool = False,
    activation: str = "relu",
) -> nn.Module:
    """The CNN for (Fashion-)MNIST of the backpropagation-clipping paper, Figure 3: 18,752 parameters on 28 x 28.

    The figure gives no stride of the pools. It is 1: with 2 the sizes go 28, 11, 5, 1, and the second pool has nothing
    to take. So it is in Papernot et al., whose network this is, and in the authors' code (which at first padded the
    first convolution by 3, unlike the paper). `padding` is that of `mnist_cnn`; with it, `bias` and tanh, this is
    `mnist_cnn`.
    """
    return _small_cnn(
        "backprop-mnist", input_shape, classes, padding=2 if padding else 0, bias=bias, activation=activation
    )


def backprop_cifar(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    padding: bool = False,
    bias: bool = False,
    activation: str = "relu",
) -> nn.Module:
    """The CNN for CIFAR-10 of the backpropagation-clipping paper, Figure 4: 29,424,512 parameters on 3 x 32 x 32.

    The pools' stride is 1, as printed: with 2 the last convolution would have nothing to take. So 21 x 21 x 256 numbers
    reach the first linear layer, which has almost all of the parameters. With `padding`, the first convolution of each
    pair is padded by 1, so that a pair keeps the size, and pools have the stride 2 of Papernot et al.: 1,571,712
    parameters.
    """
    act = activation_of(activation)
    layers: list[nn.Module] = []
    before = _channels("backprop-cifar", input_shape)
    for width in (32, 64, 128, 256):
        if layers:
            layers.append(nn.AvgPool2d(2, stride=2 if padding else 1))
        layers += [nn.Conv2d(before, width, 2, padding=1 if padding else 0, bias=bias), act()]
        layers += [nn.Conv2d(width, width, 2, bias=bias), act()]
        before = width
    features = nn.Sequential(*layers, nn.Flatten())
    width = _output_width("backprop-cifar", features, input_shape)
    return nn.Sequential(*features, nn.Linear(width, 256, bias=bias), act(), nn.Linear(256, classes, bias=bias))


def bn_lenet5(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The LeNet-5 with BatchNorm of the batch-clipping paper, Table 2: 61,990 parameters on 28 x 28.

    Images smaller than its 32 x 32 are padded with zeros to that size, as the paper's crops are. The last convolution
    then leaves 1 x 1 x 120. (The 10 x 10 x 16 and 5 x 5 x 120 printed there do not follow from the kernels beside
    them.) Where BatchNorm stands: see `convnet5`.
    """
    before = _channels("bn-lenet5", input_shape)
    height, width = (max(0, 32 - size + 1) // 2 for size in input_shape[1:])
    features = nn.Sequential(
        *_normed_conv(before, 6, 5, nn.Tanh(), padding=(height, width)),
        nn.AvgPool2d(2),
        *_normed_conv(6, 16, 5, nn.Tanh()),
        nn.AvgPool2d(2),
        *_normed_conv(16, 120, 5, nn.Tanh()),
        nn.Flatten(),
    )
    flat = _output_width("bn-lenet5", features, input_shape)
    return nn.Sequential(*features, nn.Linear(flat, 84), nn.Tanh(), nn.Linear(84, classes))


def convnet5(*, input_shape: tuple[int, ...], classes: int, batch_norm: bool = True) -> nn.Module:
    """The convnet of the batch-clipping paper, Table 1: 132,042 parameters on 3 x 32 x 32, 131,466 without BatchNorm.

    A block is convolution, BatchNorm, ReLU, pooling. The table lists ReLU beside the convolution; the text says
    CONV-BN-POOLING, with BatchNorm right after the convolution, and so it is in the authors' code.
    """
    layers: list[nn.Module] = []
    before = _channels("convnet5", input_shape)
    pools: list[nn.Module] = [nn.AvgPool2d(2), nn.AvgPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)]
    for width, pool in zip((32, 64, 64, 128), pools, strict=True):
        layers += [*_normed_conv(before, width, 3, nn.ReLU(), padding=1, batch_norm=batch_norm), pool]
        before = width
    features = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(*features, nn.Linear(_output_width("convnet5", features, input_shape), classes))


def _normed_conv(
    before: int,
    width: int,
    kernel: int,
    activation: nn.Module,
    *,
    padding: int | tuple[int, int] = 0,
    batch_norm: bool = True,
) -> list[nn.Module]:
    norm: list[nn.Module] = [nn.BatchNorm2d(width)] if batch_norm else []
    return [nn.Conv2d(before, width, kernel, padding=padding), *norm, activation]


_Norm = Callable[[int], nn.Module]
"""Makes the normalisation for so many channels."""


class _ResidualBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int, norm: _Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride=stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet18_gn(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The resnet-18 for small images (3 x 3 stem, no max-pool) with GroupNorm(32): 11,173,962 parameters."""
    return _resnet18(_channels("resnet18-gn", input_shape), classes, partial(nn.GroupNorm, 32))


def resnet18_bn(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same with BatchNorm, as in the batch-clipping paper: 11,173,962 parameters in 62 tensors, the paper's L."""
    return _resnet18(_channels("resnet18-bn", input_shape), classes, nn.BatchNorm2d)


def _resnet18(channels: int, classes: int, norm: _Norm) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), norm(64), nn.ReLU()]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_ResidualBlock(before, width, stride, norm), _ResidualBlock(width, width, 1, norm)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def mlp(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    hidden: Sequence[int] = (256, 256),
    activation: str = "tanh",
) -> nn.Module:
    """Linear layers of the `hidden` widths; tanh by default, as bounded activations lose less to clipping."""
    act = activation_of(activation)
    layers: list[nn.Module] = [nn.Flatten()]
    before = int(torch.Size(input_shape).numel())
    for width in hidden:
        layers += [nn.Linear(before, width), act()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, classes))


class _EncoderLayer(nn.Module):
    """What nn.TransformerEncoderLayer computes (post-norm, ReLU, no dropout), from layers that hooks see."""

    def __init__(self, width: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)  # one matrix product, and one per-record gradient, in place of three
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, feedforward)
        self.down = nn.Linear(feedforward, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(attended))
        return self.norm2(x + self.down(torch.relu(self.up(x))))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    def __init__(self, *, classes: int, vocabulary: int, width: int, heads: int, feedforward: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(_EncoderLayer(width, heads, feedforward) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point():
            raise ConfigError(
                f"Model 'transformer' takes whole-numbered tokens, not {tokens.dtype}; the mlp takes numbers."
            )
        return self.head(self.layers(self.embedding(tokens)).mean(1))  # type: ignore[no-any-return]


def transformer(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    vocabulary: int = 8000,
    width: int = 128,
    heads: int = 4,
    feedforward: int = 512,
    layers: int = 2,
) -> nn.Module:
    """Embedding, encoder layers, mean over the sequence, linear; input (batch, length) below `vocabulary`.

    There are no positions: a sequence is a bag of tokens that attend to each other, and any length fits.
    """
    if len(input_shape) != 1:
        raise ConfigError(f"Model 'transformer' takes sequences of tokens, input_shape=(length,), not {input_shape}.")
    if width % heads:
        raise ConfigError(f"width={width} must be a multiple of heads={heads}.")
    return _Transformer(
        classes=classes,
        vocabulary=vocabulary,
        width=width,
        heads=heads,
        feedforward=feedforward,
        layers=layers,
    )


def _channels(name: str, input_shape: tuple[int, ...]) -> int:
    if len(input_shape) != 3:
        raise ConfigError(
            f"Model {name!r} takes images, (channels, height, width), not input_shape={input_shape}; "
            "the mlp takes any shape."
        )
    return input_shape[0]


def _output_width(name: str, features: nn.Module, input_shape: tuple[int, ...]) -> int:
    features.eval()  # BatchNorm must not learn from the zeros
    try:
        with torch.no_grad():
            return int(features(torch.zeros(1, *input_shape)).shape[1])
    except RuntimeError as error:
        raise ConfigError(f"Images of {input_shape} are too small for {name!r}; the mlp takes any size.") from error
    finally:
        features.train()


MODELS: dict[str, Factory] = {
    "mnist-cnn": mnist_cnn,
    "cifar-cnn": cifar_cnn,
    "scatter-mnist-cnn": scatter_mnist_cnn,
    "scatter-cifar-cnn": scatter_cifar_cnn,
    "linear": linear,
    "backprop-mnist": backprop_mnist,
    "backprop-cifar": backprop_cifar,
    "bn-lenet5": bn_lenet5,
    "convnet5": convnet5,
    "resnet18-gn": resnet18_gn,
    "resnet18-bn": resnet18_bn,
    "mlp": mlp,
    "transformer": transformer,
    **LIPSCHITZ_MODELS,
}

EXAMPLE_SHAPES: dict[str, tuple[int, ...]] = {
    "mnist-cnn": (1, 28, 28),
    "cifar-cnn": (3, 32, 32),
    "scatter-mnist-cnn": (81, 7, 7),
    "scatter-cifar-cnn": (243, 8, 8),
    "linear": (81, 7, 7),
    "backprop-mnist": (1, 28, 28),
    "backprop-cifar": (3, 32, 32),
    "bn-lenet5": (1, 28, 28),
    "convnet5": (3, 32, 32),
    "resnet18-gn": (3, 32, 32),
    "resnet18-bn": (3, 32, 32),
    "mlp": (500,),
    "transformer": (128,),
    "lipschitz-mlp": (500,),
    "lipschitz-lenet": (1, 28, 28),
    "lipschitz-vgg": (3, 32, 32),
    "lipschitz-resnet": (3, 32, 32),
    "lipschitz-mixer": (3, 32, 32),
}
"""The shape of one record for benchmarks, by model."""
