"""Each layer's three numbers against gradient ascent, at the start and after large noise on the weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attack import RADIUS, attack, shaken
from torch import nn

from privet.errors import ConfigError, Refused
from privet.nn import TemperedSigmoid
from privet.nn.lipschitz import (
    Bias,
    Bound,
    BoundedInput,
    Centering,
    Colour,
    Constants,
    Conv2d,
    GroupSort,
    Householder,
    L2NormPool2d,
    Linear,
    LipschitzLayer,
    MixerBlock,
    Normalize,
    Residual,
    Tokens,
    Transposed,
    constants_for,
    constants_of,
)  # fmt: skip

IMAGE = (2, 7, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: Linear(7, 5), (7,)),
    "linear at positions": (lambda: Linear(7, 9), (4, 7)),
    "linear orthogonal": (lambda: Linear(6, 4, constraint="orthogonal"), (6,)),
    "linear spectral": (lambda: Linear(7, 5, constraint="spectral", lipschitz=2.0), (7,)),
    "linear frobenius": (lambda: Linear(7, 5, constraint="frobenius"), (7,)),
    "linear free": (lambda: Linear(7, 5, constraint=None), (7,)),
    "torch's linear": (lambda: nn.Linear(7, 5), (3, 7)),
    "conv": (lambda: Conv2d(2, 4, 3, padding=1), IMAGE),
    "conv valid": (lambda: Conv2d(2, 3, (2, 5)), IMAGE),
    "conv strided": (lambda: Conv2d(2, 4, 3, stride=2, padding=2, constraint="spectral"), IMAGE),
    "conv stride above kernel": (lambda: Conv2d(2, 4, 2, stride=3, constraint=None), IMAGE),
    "conv circular": (lambda: Conv2d(2, 4, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv circular, all round": (lambda: Conv2d(1, 2, 1, padding=3, padding_mode="circular"), (1, 4, 4)),
    "conv circular, large kernel": (lambda: Conv2d(1, 2, 5, padding=2, padding_mode="circular"), (1, 3, 4)),
    "conv dilated": (lambda: Conv2d(2, 4, 3, dilation=2, padding=2, constraint="frobenius"), IMAGE),
    "conv dilated and strided": (lambda: Conv2d(2, 3, 3, dilation=2, stride=2, padding=3), IMAGE),
    "conv orthogonal": (lambda: Conv2d(2, 4, 3, constraint="orthogonal"), IMAGE),
    "torch's conv": (lambda: nn.Conv2d(2, 4, 3, stride=(1, 2), padding=(2, 1)), IMAGE),
    "torch's conv, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), (4, 5, 5)),
    "torch's conv of even size": (lambda: nn.Conv2d(2, 3, 4, padding="same", bias=False), IMAGE),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 9)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 4, 3, 3)),
    "bias": (lambda: Bias(2, radius=2.0), IMAGE),
    "bias free": (lambda: Bias(6, axis=-1, radius=None), (4, 6)),
    "groupsort": (GroupSort, (4, 3, 3)),
    "groupsort 3": (lambda: GroupSort(3, axis=-1), (4, 6)),
    "householder": (lambda: Householder(4), (4, 3, 2)),
    "householder last": (lambda: Householder(4, axis=-1), (3, 4)),
    "l2 pool": (lambda: L2NormPool2d(2), IMAGE),
    "l2 pool overlapping": (lambda: L2NormPool2d(3, stride=1), IMAGE),
    "max pool": (lambda: nn.MaxPool2d(2), IMAGE),
    "max pool overlapping": (lambda: nn.MaxPool2d(3, stride=1, padding=1), IMAGE),
    "max pool ceil": (lambda: nn.MaxPool2d(3, stride=2, dilation=2, ceil_mode=True, padding=1), (1, 8, 7)),
    "max pool 1d": (lambda: nn.MaxPool1d(3, 2), (2, 9)),
    "average pool": (lambda: nn.AvgPool2d(2), IMAGE),
    "average pool overlapping": (lambda: nn.AvgPool2d(3, stride=1, padding=1), IMAGE),
    "average pool, padding not counted": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "average pool ceil": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 6, 8)),
    "adaptive average": (lambda: nn.AdaptiveAvgPool2d((3, None)), IMAGE),
    "adaptive maximum": (lambda: nn.AdaptiveMaxPool2d(4), IMAGE),
    "centering": (Centering, IMAGE),
    "centering channels": (lambda: Centering((2, 3)), IMAGE),
    "residual": (lambda: Residual(Linear(6, 8), GroupSort(), Linear(8, 6)), (6,)),
    "transposed": (lambda: Transposed(Linear(4, 3), nn.Tanh()), (4, 5)),
    "tokens": (Tokens, IMAGE),
    "mixer": (lambda: MixerBlock(4, 6), (4, 6)),
    "mixer, no residual": (lambda: MixerBlock(3, 5, residual=False), (3, 5)),
    "flatten": (nn.Flatten, IMAGE),
    "relu": (nn.ReLU, (5,)),
    "leaky": (lambda: nn.LeakyReLU(-2.0), (5,)),
    "elu": (lambda: nn.ELU(1.5), (5,)),
    "tanh": (nn.Tanh, (5,)),
    "sigmoid": (nn.Sigmoid, (5,)),
    "tempered": (lambda: TemperedSigmoid(2.0, 3.0, 0.5), (5,)),
    "softplus": (lambda: nn.Softplus(2.0), (5,)),
    "gelu": (nn.GELU, (1,)),
    "gelu tanh": (lambda: nn.GELU("tanh"), (1,)),
    "silu": (nn.SiLU, (1,)),
    "yiq": (lambda: Colour("yiq"), (3, 2, 2)),
    "normalize": (lambda: Normalize((0.5, 0.2), (0.3, 2.0)), (2, 2, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_input_and_no_upstream_gradient_exceeds_what_a_layer_states(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    trained = any(True for _ in make().parameters())
    for scale in (0.0, 1.0) if trained else (0.0,):
        found = attack(shaken(make(), scale), shape, starts=2, steps=6 if trained else 12)
        assert found.output <= 1
        assert found.lipschitz <= 1
        assert all(value <= 1 for value in found.gradient.values())


TIGHT = ["linear", "linear at positions", "linear spectral", "torch's linear", "bias", "groupsort",
         "l2 pool", "max pool", "average pool", "average pool overlapping", "centering", "relu", "tanh", "yiq",
         "conv circular, all round"]  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_the_numbers_of_these_layers_are_reached(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    found = attack(shaken(make(), 0.5), shape, steps=20)
    assert found.lipschitz > 0.98
    assert all(value > 0.98 for value in found.gradient.values())


@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "silu", "tempered", "softplus", "sigmoid", "elu"])
def test_slopes_of_activations_are_no_larger_anywhere(name: str) -> None:
    layer = LAYERS[name][0]()
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(layer(x).sum(), x)
    stated = constants_of(layer, Bound(8.0, (1,))).lipschitz
    assert 0.998 * stated < slopes.abs().max().item() <= stated


# The faults of the reference implementation that concern layers (DESIGN, "Clipless")


def test_a_bias_counts_once_for_each_position() -> None:
    layer = shaken(Bias(2, radius=2.0), 1.0)
    found = attack(layer, IMAGE, steps=20)
    once, norm = 1.0, layer.bias.norm().item()
    stated = constants_of(layer, Bound(RADIUS, IMAGE))
    assert found.gradient["bias"] * found.stated["bias"] > 6 * once  # √42
    assert found.output * stated.output.norm > RADIUS + 6 * norm


def test_a_convolution_reaches_what_the_papers_factor_denies() -> None:
    """Corollary 1 has 1/√((1 − (h−1)/2H)·(1 − (w−1)/2W)) where √(h·w) belongs."""
    layer = nn.Conv2d(1, 2, 5, padding=2, padding_mode="circular", bias=False)
    found = attack(layer, (1, 7, 7), starts=1, steps=2)
    reached = found.gradient["weight"] * found.stated["weight"]
    assert reached > 3.5 * RADIUS / (1 - 4 / 14)


def test_a_convolution_exceeds_the_average_multiplicity() -> None:
    """2 x 2 windows meet the entries of 3 x 3 images 16/9 times on average, and the middle one 4 times."""
    found = attack(nn.Conv2d(1, 2, 2, bias=False), (1, 3, 3), starts=3, steps=30)
    reached = found.gradient["weight"] * found.stated["weight"]
    assert found.stated["weight"] == pytest.approx(2 * RADIUS, rel=1e-4)
    assert reached > 1.45 * RADIUS > math.sqrt(16 / 9) * RADIUS


@pytest.mark.parametrize("axes", [(0,), (0, 1), ()])
def test_centering_over_the_batch_is_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="axes of the record"):
        Centering(axes)


def test_centering_over_the_batch_counted_from_the_end_is_refused_too() -> None:
    with pytest.raises(Refused, match="axis -4"):
        constants_of(Centering((-4,)), Bound(1.0, IMAGE))


@pytest.mark.parametrize("name", LAYERS)
def test_a_record_is_not_changed_by_others(name: str) -> None:
    make, shape = LAYERS[name]
    layer = shaken(make(), 0.1)
    torch.manual_seed(0)
    x = torch.randn(3, *shape)
    other = x.clone()
    other[1:] = 100 * torch.randn(2, *shape)
    assert torch.allclose(layer(x)[0], layer(other)[0], rtol=1e-4, atol=1e-5)


# The bounded input

HOSTILE = {
    "huge": torch.full((6,), 3e37),
    "too huge": torch.full((6,), 3e38),
    "infinite": torch.tensor([math.inf, 0, 0, 0, 0, 0]),
    "nan": torch.tensor([math.nan, 1, 1, 1, 1, 1]),
    "tiny": torch.full((6,), 1e-42),
    "small": torch.full((6,), 1e-25),
    "zero": torch.zeros(6),
    "at the bound": torch.full((6,), RADIUS / 6**0.5),
    "half": torch.full((6,), 60000.0, dtype=torch.float16),
    "double": torch.full((6,), 1e200, dtype=torch.float64),
    "whole": torch.full((6,), 255, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", ["ball", "sphere"])
@pytest.mark.parametrize("name", HOSTILE)
def test_bounded_input_bounds_anything(name: str, kind: str) -> None:
    layer = BoundedInput((6,), RADIUS, kind)
    y = layer(HOSTILE[name][None])
    bound = constants_of(layer, Bound(math.inf, ())).output
    assert y.double().norm().item() <= bound.norm
    if name in ("huge", "half", "whole", "at the bound") or (name == "small" and kind == "sphere"):
        assert y.double().norm().item() > 0.999 * RADIUS
    elif name != "small":
        assert y.norm() < 1e-30


def test_the_ball_leaves_what_lies_inside_as_it_is_and_has_the_slope_that_it_states() -> None:
    x = torch.randn(1, 6)
    assert torch.equal(BoundedInput((6,), 100.0)(x), x)
    assert attack(BoundedInput((6,), 1.0), (6,), steps=20).lipschitz <= 1 + 1e-5
    assert constants_of(BoundedInput((6,), 1.0, "sphere"), Bound(math.inf, ())).lipschitz == math.inf


def test_records_of_another_shape_are_refused() -> None:
    with pytest.raises(Refused, match=r"\(2, 3\).*\(3, 2\)"):
        BoundedInput((2, 3))(torch.zeros(5, 3, 2))


# What may call itself a layer


class Doubled(LipschitzLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def constants(self, x: Bound) -> Constants:
        return Constants(Bound(2 * x.norm, x.shape), 2.0)


class Tripled(Doubled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_users_layer_joins_by_inheriting_and_not_by_inheriting_constants_of_another_forward() -> None:
    x = Bound(1.0, (3,))
    assert constants_of(Doubled(), x).lipschitz == 2
    for layer in (Tripled(), OwnLinear(3, 3), nn.LSTM(3, 3), nn.BatchNorm1d(3)):
        with pytest.raises(Refused, match="states no Lipschitz constants"):
            constants_of(layer, x)


def test_a_users_layer_joins_by_registering() -> None:
    constants_for(OwnLinear)(lambda layer, x: Constants(x, 7.0))
    assert constants_of(OwnLinear(3, 3), Bound(1.0, (3,))).lipschitz == 7


@pytest.mark.parametrize(
    ("layer", "shape", "why"),
    [
        (nn.Dropout(), (3,), "Remove it"),
        (nn.Flatten(0), (3,), "mixes the records"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), IMAGE, "padding_mode"),
        (nn.Conv2d(3, 2, 3), IMAGE, "3 channels"),
        (nn.Conv2d(2, 2, 9), IMAGE, "larger than its input"),
        (nn.Linear(3, 2), IMAGE, "3 features"),
        (nn.MaxPool2d(2, return_indices=True), IMAGE, "return_indices"),
        (nn.MaxPool2d(9), IMAGE, "larger than its input"),
        (nn.AvgPool2d(2, divisor_override=1), IMAGE, "divisor_override"),
        (GroupSort(3), (4,), "groups of 3"),
        (GroupSort(axis=0), (4,), "axis 0"),
        (Bias(3), (4,), "3 channels"),
        (Residual(Linear(3, 2)), (3,), "adds"),
    ],
)
def test_what_has_no_bound_is_refused_with_the_reason(layer: nn.Module, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(Refused, match=why):
        constants_of(layer, Bound(1.0, shape))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BoundedInput((), 1.0),
        lambda: BoundedInput((3,), -1.0),
        lambda: BoundedInput((3,), 1.0, "cube"),
        lambda: Linear(3, 3, constraint="tight"),
        lambda: Linear(3, 3, lipschitz=0.0),
        lambda: Bias(3, radius=-1.0),
        lambda: Householder(3),
        lambda: Colour("cmyk"),
        lambda: Normalize((0.0,), (0.0,)),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_colours_are_those_of_the_standard_library() -> None:
    import colorsys  # noqa: PLC0415

    torch.manual_seed(0)
    rgb = torch.rand(1, 3, 4, 4)
    rgb[0, :, 0, 0], rgb[0, :, 0, 1] = 0, 0.5
    hsv = Colour("hsv")(rgb)
    yiq = Colour("yiq")(rgb)
    for i in range(16):
        pixel = rgb[0].flatten(1)[:, i].tolist()
        assert hsv[0].flatten(1)[:, i].tolist() == pytest.approx(colorsys.rgb_to_hsv(*pixel), abs=1e-5)
        assert yiq[0].flatten(1)[:, i].tolist() == pytest.approx(colorsys.rgb_to_yiq(*pixel), abs=1e-2)
    assert Colour("grayscale")(rgb).shape == (1, 1, 4, 4)
    assert constants_of(Colour("hsv"), Bound(1.0, (3, 4, 4))).lipschitz == math.inf
