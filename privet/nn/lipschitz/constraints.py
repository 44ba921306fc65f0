"""Parametrisations Π that keep weights near a wanted Lipschitz constant: the layer computes with W̄ = Π(W).

Nothing here is trusted: certificates bound W̄ as it is, so that an estimate or an iteration that stopped early costs
accuracy, not privacy. And as noise is added to the gradient at W̄ and then pulled back, any Π is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from ...errors import ConfigError

Constraint = Literal["bjorck", "orthogonal", "spectral", "frobenius"]


class _Parametrisation(nn.Module):
    """Starts from the weight as it is, which is orthogonal at first and so already its own image."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class Bjorck(_Parametrisation):
    """The nearest matrix with orthogonal rows (or columns), by W ← W·(3I − WᵀW)/2 repeated (Björck & Bowie 1971).

    It stops when the Gram matrix, which is iterated along, is the identity to 1e-5: going on would fill the matrices
    with denormal numbers, which are very slow.
    """

    def __init__(self, iterations: int = 12) -> None:
        super().__init__()
        self.iterations = iterations

    def forward(self, weight: Tensor) -> Tensor:
        wide = weight if weight.shape[0] <= weight.shape[1] else weight.mT
        gram = wide @ wide.mT
        scale = 1.02 * _largest(gram)[0].sqrt()  # it converges if no singular value is above √3
        wide, gram = wide / scale, gram / scale.square()
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        for _ in range(self.iterations):
            if float((gram.detach() - identity).abs().max()) < 1e-5:
                break
            factor = 1.5 * identity - 0.5 * gram
            wide = factor @ wide
            gram = factor @ gram @ factor
        return wide if weight.shape[0] <= weight.shape[1] else wide.mT


class Spectral(_Parametrisation):
    """Divided by an estimate of the largest singular value."""

    def forward(self, weight: Tensor) -> Tensor:
        tall = weight.shape[0] > weight.shape[1]
        with torch.no_grad():
            _, short = _largest(weight.mT @ weight if tall else weight @ weight.mT)
            long = weight @ short if tall else short @ weight
            long = long / torch.linalg.vector_norm(long).clamp(min=torch.finfo(weight.dtype).tiny)
        estimate: Tensor = long @ weight @ short if tall else short @ weight @ long
        return weight / estimate.clamp(min=torch.finfo(weight.dtype).tiny)


class Frobenius(_Parametrisation):
    """Divided by the Frobenius norm, which is at least the spectral norm."""

    def forward(self, weight: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(weight)
        return weight / norm.clamp(min=torch.finfo(weight.dtype).tiny)


class Ball(_Parametrisation):
    """Scaled down to a norm of at most `radius`."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, weight: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(weight)
        return weight * (self.radius / norm.clamp(min=self.radius))


class Scaled(nn.Module):
    """A matrix as a tensor of this shape, times a factor."""

    def __init__(self, shape: tuple[int, ...], factor: float) -> None:
        super().__init__()
        self.shape, self.factor = shape, factor

    def forward(self, matrix: Tensor) -> Tensor:
        return (self.factor * matrix).view(self.shape)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.flatten(1) / self.factor


_MAKERS: dict[str, Callable[[], nn.Module]] = {"bjorck": Bjorck, "spectral": Spectral, "frobenius": Frobenius}


def constrain(layer: nn.Module, constraint: Constraint | None, factor: float = 1.0) -> None:
    """Makes `layer.weight` an orthogonal matrix times `factor`, and keeps it so by the constraint, if there is one."""
    if constraint is not None and constraint not in get_args(Constraint):
        names = ", ".join(get_args(Constraint))
        raise ConfigError(f"constraint={constraint!r} must be one of {names}, or None for weights that are left free.")
    if not (factor > 0 and math.isfinite(factor)):
        raise ConfigError(f"The Lipschitz constant of a layer must be a positive number, and is {factor!r}.")
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    matrix = nn.init.orthogonal_(torch.empty_like(weight).flatten(1))
    if constraint is None:
        with torch.no_grad():
            weight.copy_((factor * matrix).view(weight.shape))
        return
    layer.weight = nn.Parameter(matrix)
    if constraint == "orthogonal":
        parametrizations.orthogonal(layer, "weight", "cayley")  # its other maps are slower, or break under large noise
    else:
        register_parametrization(layer, "weight", _MAKERS[constraint]())
    if weight.dim() != 2 or factor != 1:
        register_parametrization(layer, "weight", Scaled(tuple(weight.shape), factor), unsafe=True)


@torch.no_grad()
def _largest(gram: Tensor, iterations: int = 30) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue from below, and its vector, by power iteration from the longest row.

    It keeps nothing from call to call, so W̄ is a function of W alone.
    """
    tiny = torch.finfo(gram.dtype).tiny
    vector = gram[gram.diagonal().argmax()]
    for _ in range(iterations):
        vector = vector / torch.linalg.vector_norm(vector).clamp(min=tiny)
        vector = gram @ vector
    norm = torch.linalg.vector_norm(vector).clamp(min=tiny)
    return norm, vector / norm
