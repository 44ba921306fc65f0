"""What a whole network's weights prove about its outputs, its gradients and its robustness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ...errors import Refused
from ...hooks import has_foreign_hooks, has_tensor_hooks
from .bounds import Bound, Unbounded, chain
from .holding import constrained_tensors, every_tensor, identity_of
from .layers import BoundedInput


@dataclass(frozen=True)
class Certificate:
    """What holds for every record, proved from the weights alone.

    Formal guarantee: with the weights that were certified, for every input and every loss L of its logits,
    ‖∂L/∂θ̄‖ ≤ gradient[name]·‖∂L/∂logits‖ for each constrained tensor θ̄, in floating point as the layers compute it.
    """

    gradient: Mapping[str, float]
    """By the names of `constrained_tensors`."""
    output: Bound
    """Of the logits."""
    lipschitz: float
    """Of the logits, with respect to the bounded record: what comes out of `BoundedInput`."""
    input_lipschitz: float
    """With respect to what the model is fed. Infinite behind a colour space or a sphere that has no constant: then
    certificates hold in the space behind it."""
    input: BoundedInput
    """Which bounds the records."""


def certify(model: nn.Module) -> Certificate:
    """Carries bounds through a network that begins with a `BoundedInput`, and refuses by name what has none.

    The cost depends on the weights only, never on a batch. Call it inside `held`, so that what is certified is what
    the forward passes use. The network is an nn.Sequential, which may contain others, and any blocks with constants;
    colour spaces and the like may stand before the `BoundedInput`, trained layers may not.
    """
    _check_precision(model)
    _refuse_changed(model)
    layers = _in_sequence(model)
    places = [i for i, (_, layer) in enumerate(layers) if isinstance(layer, BoundedInput)]
    if not places:
        raise Refused(
            "The model has no BoundedInput, so nothing bounds its records. Take a ready network (--model "
            "lipschitz-mlp, lipschitz-lenet, …), or put privet.nn.lipschitz.BoundedInput(shape, radius) before your "
            "first layer, in an nn.Sequential."
        )
    try:
        before = chain(layers[: places[0] + 1], Bound(math.inf, ()))
        behind = chain(layers[places[0] + 1 :], before.output)
    except Unbounded as error:
        name = next((n for n, m in model.named_modules(remove_duplicate=False) if m is error.layer), "")
        kind = type_before_parametrizations(error.layer).__name__
        raise Refused(f"Layer '{name}' ({kind}) {error.why}") from None
    if not math.isfinite(behind.output.norm):
        raise Refused(
            "The scores have no finite bound: the weights are no longer finite numbers. Lower the learning rate."
        )
    first = layers[places[0]][1]
    assert isinstance(first, BoundedInput)
    return Certificate(
        gradient=_by_tensor(model, behind.gradient),
        output=behind.output,
        lipschitz=behind.lipschitz,
        input_lipschitz=before.lipschitz * behind.lipschitz if behind.lipschitz else 0.0,
        input=first,
    )


def _in_sequence(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    if type(model) is not nn.Sequential:
        return [(prefix, model)]
    return [
        found
        for name, child in model._modules.items()
        if child is not None
        for found in _in_sequence(child, f"{prefix}.{name}" if prefix else name)
    ]


def _by_tensor(model: nn.Module, gradient: Mapping[str, float]) -> dict[str, float]:
    """One number for each tensor, the sum over its names; every tensor of the model must have one."""
    names = {identity_of(module, attribute): name for name, module, attribute in constrained_tensors(model)}
    factors: dict[str, float] = {}
    for path, module, attribute in every_tensor(model):
        if path in gradient:
            name = names[identity_of(module, attribute)]
            factors[name] = factors.get(name, 0.0) + gradient[path]
    for name in names.values():
        if name not in factors:
            raise Refused(
                f"Parameter '{name}' has no bound on its gradient: its layer does not name it in its constants, or "
                "stands before the BoundedInput."
            )
        if not math.isfinite(factors[name]):
            raise Refused(
                f"The gradient of '{name}' has no finite bound: a layer behind it has no Lipschitz constant, or the "
                "weights are no longer finite numbers."
            )
    return factors


def _refuse_changed(model: nn.Module) -> None:
    """Layers are bounded by what their classes compute: nothing on these objects may make it something else."""
    if has_foreign_hooks(None):
        raise Refused("torch has global hooks on all modules, which may change what they compute. Remove them.")
    for name, module in model.named_modules():
        if "parametrizations" in name.split("."):  # what a parametrisation makes of a weight is bounded as it is
            continue
        if has_foreign_hooks(module) or "forward" in vars(module):
            raise Refused(
                f"Layer '{name or 'the model'}' ({type_before_parametrizations(module).__name__}) has a hook, or a "
                "forward of its own, so that its bounds may not hold. Remove it; a hook that changes nothing may be "
                "marked by privet.hooks.only_looks."
            )
    for name, module, attribute in constrained_tensors(model):
        if has_tensor_hooks(getattr(module, attribute)):
            raise Refused(f"Parameter '{name}' has a hook, which may change its gradient. Remove it.")


def _check_precision(model: nn.Module) -> None:
    for name, module, attribute in constrained_tensors(model):
        tensor = getattr(module, attribute)
        if tensor.dtype not in (torch.float32, torch.float64):
            raise Refused(f"Parameter '{name}' is {tensor.dtype}, and bounds are proved for float32 and float64 only.")
        if torch.is_autocast_enabled(tensor.device.type):
            raise Refused("Bounds are proved for float32 and float64: leave autocast out.")
