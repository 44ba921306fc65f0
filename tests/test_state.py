"""What a forward pass leaves in the model is seen, whatever it is, and put back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from privet.state import Buffers, Parameters, layers_of, parameters_of

VALUES = {
    "a number": torch.tensor(0.7),
    "zero": torch.tensor(0.0),
    "minus zero": torch.tensor(-0.0),
    "NaN": torch.tensor(math.nan),
    "infinity": torch.tensor(math.inf),
    "in float64": torch.tensor(0.7, dtype=torch.float64),
    "in float16": torch.tensor(0.7, dtype=torch.float16),
    "whole": torch.tensor(7),
    "a whole zero": torch.tensor(0, dtype=torch.uint8),
    "a large one": torch.tensor(2**62 + 1),
    "yes": torch.tensor(True),
    "several": torch.tensor([0.0, math.nan, 3.0]),
    "none": torch.zeros(0, 3),
}


def holding(value: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    model[1][0].register_buffer("held", value.clone())
    return model


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_stays_is_left_alone(value: Tensor) -> None:
    model = holding(value)
    held, buffers = model[1][0].held, Buffers(model)
    assert buffers.restore() == []
    assert model[1][0].held is held and bits(held) == bits(value)


@pytest.mark.parametrize("value", [v for v in VALUES.values() if v.numel()], ids=[n for n in VALUES if n != "none"])
def test_each_bit_is_seen_and_put_back(value: Tensor) -> None:
    for byte in range(value.numel() * value.element_size()):
        for bit in range(1 if value.dtype == torch.bool else 8):
            model = holding(value)
            held, buffers = model[1][0].held, Buffers(model)
            held.reshape(-1).view(torch.uint8)[byte] ^= 1 << bit
            assert buffers.restore() == ["1.0.held"]
            assert model[1][0].held is held and bits(held) == bits(value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_other_changes_of_buffers(value: Tensor) -> None:
    for change in ("exchange", "delete", "add", "retype"):
        model = holding(value)
        layer = model[1][0]
        held, buffers = layer.held, Buffers(model)
        if change == "exchange":
            layer.held = value.clone()
        elif change == "delete":
            del layer.held
        elif change == "add":
            layer.register_buffer("more", value.clone())
        else:
            held.data = held.data.to(torch.float64 if value.dtype == torch.float32 else torch.float32)
        assert buffers.restore() == ["1.0.more" if change == "add" else "1.0.held"]
        assert layer.held is held and "more" not in layer._buffers


def test_layers_and_parameters_are_those_of_torch() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU(), shared), "b": nn.ModuleList([nn.Conv1d(1, 1, 1)])})
    model["a"].register_module("nothing", None)
    model["tied"] = nn.Linear(2, 2)
    model["tied"].weight = shared.weight
    model.register_parameter("own", nn.Parameter(torch.ones(1)))
    model.register_parameter("absent", None)
    assert list(layers_of(model).items()) == list(model.named_modules())
    assert list(parameters_of(model)) == [name for name, _ in model.named_parameters()]
    assert all(p is dict(model.named_parameters())[name] for name, p in parameters_of(model).items())


def test_changes_of_parameters() -> None:
    model = nn.Linear(2, 2)
    before = Parameters(model)
    assert before.changed() == []
    with torch.no_grad():
        model.bias.add_(1)
    assert before.changed() == ["bias"]
    model.register_parameter("more", nn.Parameter(torch.ones(1)))
    assert before.changed() == ["bias", "more"]
