"""Activations by name, the tempered sigmoids of Papernot et al. (2021) among them: bounded, so gradients are too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from privet.errors import ConfigError

_PLAIN: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


class TemperedSigmoid(nn.Module):
    """s·sigmoid(T·x) − o, with values in [−o, s − o] and a slope of at most s·T/4.

    The defaults are tanh: 2·sigmoid(2x) − 1 = (1 − e^(−2x)) / (1 + e^(−2x)).
    """

    def __init__(self, scale: float = 2.0, inverse_temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        for name, value in (("scale", scale), ("inverse_temperature", inverse_temperature)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} of a tempered sigmoid must be a positive number, and is {value!r}.")
        if not math.isfinite(offset):
            raise ConfigError(f"offset of a tempered sigmoid must be a finite number, and is {offset!r}.")
        self.scale, self.inverse_temperature, self.offset = scale, inverse_temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.inverse_temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, inverse_temperature={self.inverse_temperature:g}, offset={self.offset:g}"


def activation(name: str) -> Callable[[], nn.Module]:
    """What makes the activation `name`: tanh, relu, sigmoid, or tempered:S,T,O for S·sigmoid(T·x) − O.

    >>> activation("tempered:2,2,1")()
    TemperedSigmoid(scale=2, inverse_temperature=2, offset=1)
    """
    if name in _PLAIN:
        return _PLAIN[name]
    kind, _, numbers = str(name).partition(":")
    if kind == "tempered":
        try:
            scale, inverse_temperature, offset = map(float, numbers.split(","))
        except ValueError:
            raise ConfigError(
                f"activation={name!r} must give three numbers, scale, inverse temperature and offset: "
                "tempered:2,2,1 is tanh."
            ) from None
        TemperedSigmoid(scale, inverse_temperature, offset)  # refuses bad numbers before anything is built
        return partial(TemperedSigmoid, scale, inverse_temperature, offset)
    raise ConfigError(f"activation={name!r} must be one of {', '.join(_PLAIN)}, or tempered:S,T,O (three numbers).")
