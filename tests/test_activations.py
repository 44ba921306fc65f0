"""Tempered sigmoids and activations by name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from privet import ConfigError
from privet.nn import TemperedSigmoid, activation, build

X = torch.linspace(-30, 30, 601, dtype=torch.float64)


def test_tanh_is_one_of_the_tempered_sigmoids() -> None:
    for tempered in (TemperedSigmoid(), TemperedSigmoid(2, 2, 1), activation("tempered:2,2,1")()):
        torch.testing.assert_close(tempered(X), torch.tanh(X), rtol=0, atol=1e-15)
    torch.testing.assert_close(TemperedSigmoid(1, 1, 0)(X), torch.sigmoid(X), rtol=0, atol=0)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-5, 5))
def test_a_tempered_sigmoid_is_what_its_formula_says(scale: float, inverse_temperature: float, offset: float) -> None:
    tempered = TemperedSigmoid(scale, inverse_temperature, offset)
    x = X.clone().requires_grad_()
    values = tempered(x)
    expected = [scale / (1 + math.exp(-inverse_temperature * v)) - offset for v in X.tolist()]
    torch.testing.assert_close(values.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(values.sum(), x)
    assert float(slope[300]) == pytest.approx(scale * inverse_temperature / 4)  # at 0, where it is steepest
    assert float(slope.max()) <= scale * inverse_temperature / 4 * (1 + 1e-12)


def test_its_gradient_is_right() -> None:
    x = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(TemperedSigmoid(1.5, 3, 0.25), (x,))


def test_activations_have_names() -> None:
    made = [activation(name)() for name in ("tanh", "relu", "sigmoid", "tempered:1.5, 3, -0.25")]
    assert [type(m) for m in made] == [nn.Tanh, nn.ReLU, nn.Sigmoid, TemperedSigmoid]
    assert repr(made[3]) == "TemperedSigmoid(scale=1.5, inverse_temperature=3, offset=-0.25)"
    assert activation("tempered:2,2,1")() is not activation("tempered:2,2,1")()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gelu", "activation='gelu' must be one of tanh, relu, sigmoid, or tempered:S,T,O"),
        ("tempered", "three numbers.*tempered:2,2,1 is tanh"),
        ("tempered:1,2", "three numbers"),
        ("tempered:1,x,2", "three numbers"),
        ("tempered:0,2,1", "scale of a tempered sigmoid must be a positive number, and is 0.0"),
        ("tempered:1,-2,1", "inverse_temperature"),
        ("tempered:1,nan,1", "inverse_temperature"),
        ("tempered:1,1,inf", "offset of a tempered sigmoid must be a finite number, and is inf"),
    ],
)
def test_other_activations_are_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        activation(name)


@pytest.mark.parametrize("name", ["mnist-cnn", "cifar-cnn", "backprop-mnist", "mlp"])
def test_networks_take_every_activation(name: str) -> None:
    shape = (3, 32, 32) if name == "cifar-cnn" else (1, 28, 28)
    options = {"hidden": [5]} if name == "mlp" else {}
    for spec, kind in (("relu", nn.ReLU), ("sigmoid", nn.Sigmoid), ("tempered:1,3,0.5", TemperedSigmoid)):
        model = build(name, input_shape=shape, classes=4, activation=spec, **options)
        found = [m for m in model if isinstance(m, nn.Tanh | nn.ReLU | nn.Sigmoid | TemperedSigmoid)]
        assert found and {type(m) for m in found} == {kind}
    if name.endswith("-cnn"):
        plain = build(name, input_shape=shape, classes=4)
        assert {type(m) for m in plain} & {nn.Tanh, nn.ReLU} == {nn.Tanh}
