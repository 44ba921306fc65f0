"""Whole networks: what a certificate promises, what it refuses, and holding the constrained weights."""

from __future__ import annotations

import math

import pytest
import torch
from attack import shaken
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import cached

from privet.errors import ConfigError, Refused
from privet.hooks import only_looks
from privet.nn.lipschitz import (
    LIPSCHITZ_MODELS,
    Bias,
    BoundedInput,
    Colour,
    Conv2d,
    GroupSort,
    Householder,
    L2NormPool2d,
    Linear,
    Residual,
    certify,
    constrained_tensors,
    held,
)  # fmt: skip

SHAPE = (1, 12, 12)


def small() -> nn.Sequential:
    return nn.Sequential(
        BoundedInput((2, 6, 6), 2.0),
        nn.Sequential(Conv2d(2, 4, 3, padding=1), Bias(4), Householder(4)),
        Residual(Conv2d(4, 4, 3, padding=1, constraint="spectral"), nn.ReLU()),
        L2NormPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(16, 6),
        GroupSort(),
        Linear(6, 3, constraint="orthogonal"),
    )


def worst_gradients(model: nn.Sequential, shape: tuple[int, ...], steps: int = 10) -> tuple[dict[str, float], float]:
    """The largest gradients over records and unit gradients at the logits, and the largest logits, divided by what is
    certified."""
    generator = torch.Generator().manual_seed(0)
    with held(model) as weights:
        certificate = certify(model)
        found = dict.fromkeys(weights.tensors, 0.0)
        largest = 0.0
        x = 10 * torch.randn(1, *shape, generator=generator)
        up = torch.randn(1, certificate.output.shape[0], generator=generator)
        for _ in range(steps):
            x = x.detach().requires_grad_()
            up = (up / up.norm()).detach().requires_grad_()
            logits = model(x)
            largest = max(largest, logits.norm().item())
            gradients = torch.autograd.grad((logits * up).sum(), list(weights.tensors.values()), create_graph=True)
            total = torch.zeros(())
            for name, gradient in zip(found, gradients, strict=True):
                norm = gradient.norm()
                found[name] = max(found[name], norm.item())
                total = total + norm / certificate.gradient[name]
            toward_x, up = torch.autograd.grad(total, (x, up))
            x = x + x.norm() * toward_x / toward_x.norm().clamp(min=1e-12)
        assert set(found) == set(certificate.gradient)
        return {name: found[name] / certificate.gradient[name] for name in found}, largest / certificate.output.norm


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", ["small", *LIPSCHITZ_MODELS])
def test_no_record_has_a_larger_gradient_than_certified(name: str, scale: float) -> None:
    torch.manual_seed(0)
    options = {"widths": (4, 8)} if name in ("lipschitz-vgg", "lipschitz-resnet") else {}
    model = small() if name == "small" else LIPSCHITZ_MODELS[name](input_shape=SHAPE, classes=4, **options)
    found, output = worst_gradients(shaken(model, scale), (2, 6, 6) if name == "small" else SHAPE)
    assert max(found.values()) <= 1
    assert output <= 1
    assert max(found.values()) > 0.1  # or the search says nothing


@pytest.mark.parametrize("name", LIPSCHITZ_MODELS)
def test_ready_networks_have_the_shape_and_options_that_were_asked_for(name: str) -> None:
    options = {} if name == "lipschitz-mixer" else {"bias": True}
    model = LIPSCHITZ_MODELS[name](input_shape=(3, 17, 16), classes=5, radius=2.0, kind="sphere", **options)
    assert model(torch.randn(2, 3, 17, 16)).shape == (2, 5)
    certificate = certify(model)
    assert certificate.output.shape == (5,)
    assert certificate.input.radius == 2.0
    assert certificate.input_lipschitz == math.inf
    assert certificate.lipschitz < 1.1
    with pytest.raises(ConfigError):
        LIPSCHITZ_MODELS[name](input_shape=(0,) if name == "lipschitz-mlp" else (3,), classes=5)


def test_the_lipschitz_constant_counts_what_stands_before_the_bounded_input() -> None:
    tail = [BoundedInput((3, 2, 2)), nn.Flatten(), Linear(12, 2)]
    plain, yiq, hsv = (certify(nn.Sequential(*first, *tail)) for first in ([], [Colour("yiq")], [Colour("hsv")]))
    assert plain.input_lipschitz == pytest.approx(plain.lipschitz)
    assert 0.85 < yiq.input_lipschitz / yiq.lipschitz < 0.86
    assert hsv.input_lipschitz == math.inf
    assert hsv.lipschitz == yiq.lipschitz == plain.lipschitz


def test_a_layer_that_is_used_twice_counts_twice() -> None:
    layer = Linear(4, 4, constraint=None)
    model = nn.Sequential(BoundedInput((4,)), layer, layer)
    certificate = certify(model)
    once = certify(nn.Sequential(BoundedInput((4,)), layer)).gradient["1.weight"]
    assert certificate.gradient == {"1.weight": pytest.approx(2 * once, rel=1e-3)}
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
    x = torch.eye(4)[:1]
    (gradient,) = torch.autograd.grad((model(x) * x).sum(), layer.weight)
    assert gradient.norm().item() > 1.9
    assert gradient.norm().item() <= certify(model).gradient["1.weight"]


def test_tied_weights_count_twice() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    certificate = certify(nn.Sequential(BoundedInput((4,)), first, second))
    norm = torch.linalg.matrix_norm(first.weight, 2).item()
    assert certificate.gradient == {"1.weight": pytest.approx(2 * norm, rel=1e-3)}


class Forgetful(Bias):
    def __init__(self) -> None:
        super().__init__(4)
        self.extra = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([nn.Linear(4, 4)], "no BoundedInput"),
        ([nn.Linear(4, 4), BoundedInput((4,))], "'0'.*takes 4 features"),
        ([BoundedInput((4,)), nn.Sequential(nn.ReLU(), nn.LSTM(4, 4))], r"Layer '1.1' \(LSTM\) states no Lipschitz"),
        ([BoundedInput((4,)), Residual(nn.Linear(4, 4), nn.Dropout())], r"Layer '1.block.1' \(Dropout\)"),
        ([BoundedInput((4,)), Linear(5, 4)], r"Layer '1' \(Linear\) takes 5 features"),
        ([BoundedInput((4,)), Linear(4, 4), BoundedInput((4,), 1.0, "sphere")], "'1.weight' has no finite bound"),
        ([BoundedInput((4,)), Forgetful()], "'1.extra' has no bound"),
        ([BoundedInput((4,)), torch.nn.utils.spectral_norm(nn.Linear(4, 4))], "'1' .Linear. has a hook"),
        ([BoundedInput((4,)), nn.Linear(4, 4).half()], "float32 and float64 only"),
    ],
)
def test_what_cannot_be_certified_is_refused_by_name(layers: list[nn.Module], why: str) -> None:
    with pytest.raises(Refused, match=why):
        certify(nn.Sequential(*layers))


def test_weights_that_are_not_numbers_are_refused() -> None:
    model = nn.Sequential(BoundedInput((4,)), nn.Linear(4, 4))
    model[1].weight.data[0, 0] = math.nan
    with pytest.raises(Refused, match="no longer finite"):
        certify(model)


# Holding


def test_gradients_at_the_constrained_weights_pull_back_to_those_of_autograd() -> None:
    torch.manual_seed(0)
    model = shaken(small(), 0.1)
    x = torch.randn(5, 2, 6, 6)
    model(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with held(model) as weights:
        model(x).square().sum().backward()
        assert all(p.grad is None for name, p in model.named_parameters() if "original" in name)
        found = weights.pull_back({name: tensor.grad for name, tensor in weights.tensors.items()})
        again = weights.pull_back({"1.0.weight": weights.tensors["1.0.weight"].grad})
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5), name
    assert torch.equal(again["1.0.parametrizations.weight.original"], found["1.0.parametrizations.weight.original"])


def test_a_parameter_that_shares_in_several_weights_gets_the_sum() -> None:
    model = nn.Sequential(Linear(3, 3), Linear(3, 3))
    model[1].parametrizations.weight.original = model[0].parametrizations.weight.original
    with held(model) as weights:
        assert set(weights.tensors) == {"0.weight", "1.weight"}
        ones = {name: torch.randn(3, 3) for name in weights.tensors}
        (both,) = weights.pull_back(ones).values()
        parts = [weights.pull_back({name: gradient}) for name, gradient in ones.items()]
    assert torch.allclose(both, sum(next(iter(part.values())) for part in parts), atol=1e-5)


def test_names_are_those_without_parametrisation() -> None:
    named = {name: getattr(module, attribute) for name, module, attribute in constrained_tensors(small())}
    assert list(named) == ["1.0.weight", "1.1.bias", "1.2.angle", "2.block.0.weight", "5.weight", "5.bias", "7.weight"]
    assert named["1.0.weight"].shape == (4, 2, 3, 3)


def test_held_weights_are_computed_once_and_everything_is_restored() -> None:
    model = shaken(small(), 0.1)
    keys, before = list(model.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    free = model[1][0].weight.detach().clone()
    with pytest.raises(ZeroDivisionError), held(model) as weights:
        assert model[1][0].weight is weights.tensors["1.0.weight"]
        assert weights.tensors["1.0.weight"].is_leaf
        assert torch.equal(model[1][0].weight, free)
        assert list(model.state_dict()) == keys
        with pytest.raises(Refused, match="held already"), held(model):
            pass
        assert model[1][0].weight is weights.tensors["1.0.weight"]
        raise ZeroDivisionError
    assert model[1][0].weight is not model[1][0].weight
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_weights_cannot_be_held_while_torch_caches_them() -> None:
    model = small()
    with cached():
        model(torch.zeros(1, 2, 6, 6))
        with pytest.raises(Refused, match="cached"), held(model):
            pass
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_parametrisation_that_changes_at_every_call_is_held_still() -> None:
    model = nn.Sequential(BoundedInput((9,)), parametrizations.spectral_norm(nn.Linear(9, 9, bias=False)))
    with held(model) as weights:
        norm = certify(model).lipschitz
        for _ in range(3):
            model(torch.zeros(1, 9))
        assert torch.linalg.matrix_norm(model[1].weight, 2).item() <= norm
        assert model[1].weight is weights.tensors["1.weight"]


def test_frozen_weights_are_held_but_not_trained() -> None:
    model = small()
    for p in model[1].parameters():
        p.requires_grad_(False)
    with held(model) as weights:
        assert "1.0.weight" not in weights.tensors
        assert not model[1][0].weight.requires_grad
        assert "1.0.weight" in certify(model).gradient


@pytest.mark.parametrize("constraint", ["bjorck", "orthogonal", "spectral", "frobenius"])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_constraints_hold_after_noise(constraint: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = Linear(*shape, constraint=constraint)
    start = torch.linalg.matrix_norm(layer.weight, 2).item()
    after = torch.linalg.matrix_norm(shaken(layer, 0.3).weight, 2).item()
    assert start <= 1.001
    assert after <= 1.01
    assert after > (0.4 if constraint == "frobenius" else 0.98)


def test_the_cost_does_not_depend_on_a_batch() -> None:
    """It reads weights alone: no forward pass is made."""
    model = small()

    def fail(*_: object) -> None:
        raise AssertionError

    for module in model.modules():
        if "Parametri" not in type(module).__name__ and "parametrizations" not in type(module).__module__:
            module.register_forward_pre_hook(only_looks(fail)) if isinstance(
                module, nn.Conv2d | nn.Linear | Bias
            ) else None
    certify(model)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.MaxPool1d(2, 1, padding=1, dilation=3), "nothing but padding"),
        (Residual(nn.LeakyReLU(20.0, inplace=True)), "works in place"),
        (nn.ReLU(inplace=True), "works in place"),
    ],
)
def test_layers_that_would_not_keep_their_constants_are_refused(layer: nn.Module, said: str) -> None:
    with pytest.raises(Refused, match=said):
        certify(nn.Sequential(BoundedInput((1, 2)), layer))


def test_padding_that_was_changed_later_counts() -> None:
    """Torch goes by the attribute, and so must the bound: more padding puts an entry into more patches."""
    conv = nn.Conv2d(1, 2, 3, bias=False)
    model = nn.Sequential(BoundedInput((1, 3, 3)), conv, nn.Flatten())
    before = certify(model)
    conv.padding = (2, 2)
    after = certify(model)
    assert after.gradient["1.weight"] == pytest.approx(3 * before.gradient["1.weight"], rel=1e-3)
    assert after.output.shape == tuple(model(torch.zeros(1, 1, 3, 3)).shape[1:])


def test_angles_that_are_not_numbers_have_no_bound() -> None:
    turning = Householder(2)
    with torch.no_grad():
        turning.angle.fill_(math.nan)
    with pytest.raises(Refused, match="no finite bound"):
        certify(nn.Sequential(BoundedInput((2,)), turning))
