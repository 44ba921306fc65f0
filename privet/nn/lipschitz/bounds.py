"""What a layer must state to be trained without clipping: three numbers, beside the code that they bound.

For one record, whose activation x has a norm of at most `x.norm` when it reaches the layer y = f(θ, x):

- `output`: the bound on ‖y‖;
- `lipschitz`: l with ‖f(θ, x) − f(θ, x')‖ ≤ l·‖x − x'‖, so the backward pass grows a gradient's norm by l at most;
- `gradient`: for each parameter a K with ‖∂L/∂θ‖ ≤ K·‖∂L/∂y‖ (Frobenius), θ being what the layer computes with, after
  any parametrisation.

They are closed under composition (Algorithm 1 of the paper, with both of its passes in one): behind a layer with
constant l, every K becomes l·K. So a block states its three numbers just like a layer, and so does a whole network.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ...errors import Refused


@dataclass(frozen=True)
class Bound:
    """One record's activation: its L2 norm is at most `norm`, and it has this shape (without the axis of records)."""

    norm: float
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Constants:
    """The three numbers of a layer or block, for inputs within a bound."""

    output: Bound
    lipschitz: float
    gradient: Mapping[str, float] = field(default_factory=dict)
    """By the parameter's name within the layer: "weight", or "0.weight" in a block."""
    inner: float = 0.0
    """By how much a gradient may grow on its way from the output to anywhere inside of a block, if by more than it
    grows to the input."""


class LipschitzLayer(nn.Module):
    """A layer that states its constants itself. A subclass that changes `forward` must state them anew."""

    @abstractmethod
    def constants(self, x: Bound) -> Constants:
        """The three numbers for inputs within x. Reads the weights, and nothing else that changes."""


_F = TypeVar("_F", bound=Callable[..., Constants])
_REGISTRY: dict[type[nn.Module], Callable[..., Constants]] = {}


def constants_for(*layers: type[nn.Module]) -> Callable[[_F], _F]:
    """Registers a function (layer, x) → Constants for exactly these classes: a subclass may compute something else.

    >>> @constants_for(nn.Softsign)
    ... def _softsign(layer: nn.Softsign, x: Bound) -> Constants:  # |x / (1 + |x|)| ≤ |x|, slope at most 1
    ...     return Constants(x, 1.0)
    """

    def register(function: _F) -> _F:
        for layer in layers:
            _REGISTRY[layer] = function
        return function

    return register


class Unbounded(Refused):
    """A layer that cannot be bounded, and why; `certify` adds where it stands in the model."""

    def __init__(self, layer: nn.Module, why: str) -> None:
        super().__init__(f"A {type_before_parametrizations(layer).__name__} {why}")
        self.layer, self.why = layer, why


def refuse(layer: nn.Module, why: str) -> NoReturn:
    """Stops because of this layer; `why` continues a sentence whose subject is the layer."""
    raise Unbounded(layer, why)


_LARGEST = 1e18
"""Of a bound: far from what float32 cannot hold, where a sum would stop being finite for some records only."""


def constants_of(layer: nn.Module, x: Bound) -> Constants:
    """The three numbers of any layer that has them, from itself or from the registry."""
    kind = type_before_parametrizations(layer)
    if getattr(layer, "inplace", False):
        refuse(layer, "works in place, on what others may still need. Build it with inplace=False.")
    found = _stated(kind, layer, x)
    if any(_LARGEST < value < math.inf for value in (found.output.norm, found.lipschitz, *found.gradient.values())):
        refuse(layer, f"lets numbers grow beyond {_LARGEST:g}. Lower the learning rate, or constrain the weights.")
    return found


def _stated(kind: type[nn.Module], layer: nn.Module, x: Bound) -> Constants:
    if kind in _REGISTRY:
        return _REGISTRY[kind](layer, x)
    if isinstance(layer, LipschitzLayer) and _states_its_own(kind):
        return layer.constants(x)
    refuse(
        layer,
        "states no Lipschitz constants, so nothing bounds the gradients around it. Use a layer of privet.nn.lipschitz, "
        "inherit LipschitzLayer and give `constants`, or register them with @constants_for.",
    )


def _states_its_own(kind: type[nn.Module]) -> bool:
    """Whether the constants belong to the forward that runs: no subclass has replaced the one without the other."""
    for ancestor in kind.__mro__:
        if "constants" in vars(ancestor):
            return ancestor is not LipschitzLayer
        if "forward" in vars(ancestor):
            return False
    return False


def chain(layers: Iterable[tuple[str, nn.Module]], x: Bound) -> Constants:
    """The constants of named layers one after the other.

    ‖∂L/∂θ_i‖ ≤ K_i·‖∂L/∂y_i‖ ≤ K_i·l_{i+1}···l_n·‖∂L/∂y_n‖. The gradient of a parameter that is met
    twice is the sum of two, so its numbers add up.
    """
    lipschitz, inner = 1.0, 0.0
    gradient: dict[str, float] = {}
    for name, layer in layers:
        own = constants_of(layer, x)
        inner = max(inner * own.lipschitz, own.inner, own.lipschitz)
        if _LARGEST < inner < math.inf:
            refuse(layer, f"and those behind it let gradients grow beyond {_LARGEST:g}. Constrain the weights.")
        gradient = {key: factor * own.lipschitz for key, factor in gradient.items()}
        for key, factor in prefixed(name, own.gradient).items():
            gradient[key] = gradient.get(key, 0.0) + factor
        lipschitz *= own.lipschitz
        x = own.output
    return Constants(x, lipschitz, gradient, inner)


def prefixed(name: str, gradient: Mapping[str, float], factor: float = 1.0) -> dict[str, float]:
    """The numbers of a child under its parent's names, times a factor."""
    return {f"{name}.{key}": factor * value for key, value in gradient.items()}


@constants_for(nn.Sequential)
def _sequential(block: nn.Sequential, x: Bound) -> Constants:
    return chain(block._modules.items(), x)  # named_children() skips a second use
