"""Holding the constrained weights W̄ = Π(W) still: gradients are taken, and noised, at W̄, and then pulled back to W.

    with held(model) as weights:
        certificate = certify(model)                # bounds exactly the W̄ that the forward passes use
        losses(model(x), y).sum().backward()        # gradients arrive at weights.tensors[name].grad
        …                                           # noise
        weights.pull_back(noisy)                    # by parameter name, as in model.named_parameters()

What follows the noise is post-processing, so the pull-back costs no privacy, whatever Π is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ...errors import Refused


def constrained_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, attribute) of each tensor that the model computes with: W̄ for W, parametrised or not.

    Names are those of `model.named_parameters()` before any parametrisation: "0.weight". Tied parameters come once.
    """
    seen: set[Any] = set()
    for name, module, attribute in every_tensor(model):
        identity = identity_of(module, attribute)
        if identity not in seen:
            seen.add(identity)
            yield name, module, attribute


def every_tensor(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, str]]:
    """The same under all of their names."""
    constrained = _parametrised(model)
    for attribute in [*constrained, *model._parameters]:
        if attribute in constrained or model._parameters[attribute] is not None:
            yield prefix + attribute, model, attribute
    for name, child in model._modules.items():
        if child is not None and not (name == "parametrizations" and constrained):
            yield from every_tensor(child, f"{prefix}{name}.")


def identity_of(module: nn.Module, attribute: str) -> Any:
    """Equal for two places just if they hold the same tensor."""
    return (id(module), attribute) if attribute in _parametrised(module) else id(getattr(module, attribute))


def _parametrised(module: nn.Module) -> dict[str, nn.Module]:
    """The parametrisations of this module's own tensors that depend on any parameter."""
    if not is_parametrized(module):
        return {}
    lists: Any = module.parametrizations
    return {name: chain for name, chain in lists.items() if next(chain.parameters(), None) is not None}


class Held:
    """The constrained weights of a model, each computed once."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        """By name, each W̄ that is trained: a leaf, to which backward passes bring gradients."""
        self._images: dict[str, Tensor] = {}
        """W̄ with the graph that leads from W to it."""
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._originals: dict[str, list[nn.Parameter]] = {}
        self._replaced: list[nn.Module] = []
        self._model = model

    def _take(self) -> None:
        for name, module, attribute in constrained_tensors(self._model):
            chain = _parametrised(module).get(attribute)
            if chain is None:
                self._keep(name, getattr(module, attribute))
            else:
                self._hold(name, module, attribute, chain)

    def _keep(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            self.tensors[name] = parameter
            self._originals[name] = [parameter]

    def _hold(self, name: str, module: nn.Module, attribute: str, chain: nn.Module) -> None:
        if "forward" in vars(chain):
            raise Refused(
                f"The weights of '{name}' are held already: leave the first `with held(model)` before another."
            )
        with torch.enable_grad():
            image: Tensor = getattr(module, attribute)
        leaf = image.detach().clone()
        if image.requires_grad:
            self.tensors[name] = leaf.requires_grad_()
            self._images[name] = image
            self._originals[name] = [p for p in chain.parameters() if p.requires_grad]
        chain.forward = lambda: leaf
        self._replaced.append(chain)
        if getattr(module, attribute) is not leaf:
            raise Refused(
                "Weights cannot be held inside torch's parametrize.cached(): leave it out, they are cached here."
            )

    def pull_back(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients at the W̄ that are named, as gradients at the model's parameters, by the names of those.

        It is the product with the Jacobian of Π, transposed; parameters that share in several W̄ get the sum.
        """
        names = [name for name in gradients if name in self._images]
        result = {
            self._names[id(self._originals[name][0])]: gradient
            for name, gradient in gradients.items()
            if name not in self._images
        }
        originals = list({id(p): p for name in names for p in self._originals[name]}.values())
        if originals:
            pulled = torch.autograd.grad(
                [self._images[name] for name in names],
                originals,
                [gradients[name].to(self._images[name].dtype) for name in names],
                retain_graph=True,
                allow_unused=True,
            )
            for original, gradient in zip(originals, pulled, strict=True):
                found = torch.zeros_like(original) if gradient is None else gradient
                name = self._names[id(original)]
                result[name] = result[name] + found if name in result else found
        return result

    def _let_go(self) -> None:
        for chain in self._replaced:
            vars(chain).pop("forward", None)
        self._replaced.clear()


@contextmanager
def held(model: nn.Module) -> Iterator[Held]:
    """Computes each W̄ once and makes every forward pass inside use it, as a leaf; all is as before on leaving.

    The model's `state_dict` is never touched. Parameters must not be changed inside.
    """
    weights = Held(model)
    try:
        weights._take()
        yield weights
    finally:
        weights._let_go()
