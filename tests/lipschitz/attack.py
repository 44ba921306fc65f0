"""Gradient ascent that tries to break what a layer states: it looks for the worst record and the worst gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from privet.nn.lipschitz import Bound, constants_of, held

RADIUS = 3.0
INSIDE = 1 - 1e-6
"""So that the attacked record is within its bound after rounding."""


@dataclass
class Found:
    """The largest values met, each divided by what was stated: above 1 the statement is wrong."""

    output: float
    lipschitz: float
    gradient: dict[str, float]
    stated: dict[str, float]


def attack(layer: nn.Module, shape: tuple[int, ...], *, starts: int = 3, steps: int = 8, seed: int = 0) -> Found:
    generator = torch.Generator().manual_seed(seed)
    with held(layer) as weights:
        stated = constants_of(layer, Bound(RADIUS, shape))
        y = layer(torch.zeros(1, *shape))
        assert tuple(y.shape[1:]) == stated.output.shape

        def search(objective: Callable[[Tensor, Tensor], Tensor]) -> float:
            best = 0.0
            for i in range(starts):
                x = torch.ones(1, *shape) if i == 0 else torch.randn(1, *shape, generator=generator)
                upstream = torch.ones_like(y) if i == 0 else torch.randn(y.shape, generator=generator)
                inside = i % 2 == 1  # every other search walks within the ball, the rest on the sphere
                x = x * (RADIUS / x.norm() * (0.4 if inside else 1.0))
                for step in range(steps):
                    onto_sphere = INSIDE * RADIUS / x.double().norm()
                    x = (
                        (x.double() * (onto_sphere.clamp(max=1) if inside else onto_sphere))
                        .float()
                        .detach()
                        .requires_grad_()
                    )
                    upstream = (upstream.double() * (INSIDE / upstream.double().norm())).float()
                    upstream = upstream.detach().requires_grad_()
                    value = objective(x, upstream)
                    best = max(best, value.item())
                    # Maximising the linearised objective over a sphere: for a linear layer, power iteration.
                    found = torch.autograd.grad(value, (x, upstream), allow_unused=True, retain_graph=True)
                    if _moves(found[0]):
                        x = x + found[0] * (RADIUS / found[0].norm() / (2 + step)) if inside else found[0]
                    if _moves(found[1]):
                        upstream = found[1]
            return best

        def slope(x: Tensor, upstream: Tensor) -> Tensor:
            (back,) = torch.autograd.grad((layer(x) * upstream).sum(), x, create_graph=True)
            return back.double().norm()

        def gradient(name: str) -> Callable[[Tensor, Tensor], Tensor]:
            def norm(x: Tensor, upstream: Tensor) -> Tensor:
                (back,) = torch.autograd.grad((layer(x) * upstream).sum(), weights.tensors[name], create_graph=True)
                return back.double().norm()

            return norm

        assert set(weights.tensors) == set(stated.gradient)
        return Found(
            search(lambda x, _: layer(x).double().norm()) / stated.output.norm,
            search(slope) / stated.lipschitz,
            {name: search(gradient(name)) / stated.gradient[name] for name in weights.tensors},
            dict(stated.gradient),
        )


def _moves(direction: Tensor | None) -> bool:
    return direction is not None and bool(direction.isfinite().all()) and direction.norm().item() > 1e-12


def shaken(model: nn.Module, scale: float, seed: int = 0) -> nn.Module:
    """The model after many noisy updates of its parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(10):
            for p in model.parameters():
                p.add_(scale * torch.randn(p.shape, generator=generator))
    return model
