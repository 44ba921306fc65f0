"""Batch clipping (Nguyen et al. 2023): the mean gradient of a group of records is clipped, not each record's own.

A step's sample is split into k groups, each record by a coin of its own. With v_g the mean gradient of group g, scaled
to norm at most C, the paper's update is (1/k)·Σ_g v_g plus noise. k = 1 is its BC, a larger k its GBC with one
gradient per group. Records of a group may depend on each other, so BatchNorm may normalise by the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError, Refused
from ..noise import Allocation, Source
from ..sampling import Sample
from .base import (
    Method,
    ParameterGroup,
    Query,
    Sensitivity,
    Session,
    Setting,
    option,
    positive,
    register,
    trainable,
)

_MARGIN = 1 - 2.0**-20
"""Vectors are scaled in float32; aiming this much below C keeps what comes out at C or less."""
_SMALLEST_FACTOR = 2.0**-120
"""A smaller factor would be rounded coarsely in float32, upwards too: the group is left out instead."""


@register
@dataclass(frozen=True, kw_only=True)
class Batch(Method):
    """Batch clipping.

    The run divides every sum by the public batch size B. So that p.grad is the paper's (1/k)·Σ_g v_g, the sum here is
    s·Σ_g v_g with s = B/k, and its sensitivity has the factor s too: in p.grad, the noise has deviation σ·2C/k.

    Formal guarantee: one record moves the sum by at most 2·C·s, under either relation.
    Proof. Coins do not depend on the data, so two neighbouring samples may be compared with the same coins for the
    records that they share, and the same coin for a record and the one in its place. (The noisy sums are mixtures over
    the coins, and two mixtures are no easier to tell apart than their parts are, pair by pair.) Then they differ in one
    group only, by a record more, less or exchanged. Its vector is v before and v' after, whatever the record does
    to the others in its group, and ‖v − v'‖ ≤ ‖v‖ + ‖v'‖ ≤ 2C. This bound is met: a record can turn its group's mean
    around. An empty group, or one whose gradient is not finite, has the vector zero, which is within C as well.

    Rule 7: a loss that is not finite is left out. Where that does not help, because the record has made the whole
    group's gradient not finite, its group adds nothing.

    Groups of one record each need half the noise under add_remove: that is `PerExample`, not a large `record_groups`.
    """

    name = "batch"
    summary = "clip the mean gradient of a group of records to norm C (BatchNorm may use batch statistics)"
    records_must_be_independent = False

    clip: float = option(1.0, "norm C that a group's mean gradient is clipped to")
    record_groups: int = option(1, "into how many groups a sample is split, by coin; 1 clips the whole batch at once")
    allocation: Allocation = option("isotropic", "how noise is shared between groups")

    def __post_init__(self) -> None:
        positive("clip", self.clip)
        if not isinstance(self.record_groups, int) or isinstance(self.record_groups, bool) or self.record_groups < 1:
            raise ConfigError(f"record_groups must be a whole number of at least 1, and is {self.record_groups!r}.")

    def open(self, model: nn.Module, setting: Setting) -> Session:
        return _BatchSession(self, model, setting)


class _BatchSession(Session):
    def __init__(self, method: Batch, model: nn.Module, setting: Setting) -> None:
        self.method, self.model = method, model
        self.scale = setting.batch / method.record_groups
        self._all = dict(model.named_parameters())
        _refuse_unsafe_layers(model)
        self._group(trainable(model))
        self._listening = False
        self._handles: list[RemovableHandle] = []
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                self._handles += self._allow_single_records(layer)

    def _group(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.group = ParameterGroup("all", parameters)
        self._sum = torch.zeros_like(self.group.total)
        """Of the gradients in the unit so far."""
        self._parts = self.group.split(self._sum)
        self._count = 0

    def cut(self, sample: Sample, source: Source) -> list[Sample]:
        coins = source.integers(len(sample), self.method.record_groups)
        return [sample[coins == g] for g in range(self.method.record_groups)]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Rule 8: what a private pass did to the buffers is undone, and refused."""
        buffers = _Buffers(self.model)
        before, self._listening = self._listening, True
        try:
            yield
        finally:
            self._listening = before
            changed = buffers.restore()
            strays = self._drop_strays()
        if changed:
            raise Refused(
                f"Buffer '{changed[0]}' was changed by a forward pass over private records, so it carries statistics "
                "of them. It was put back, and nothing was released. Freeze that layer: .eval()."
            )
        if strays:
            raise Refused(
                f"Parameter '{strays[0]}' received a gradient in a backward pass inside of a private step. It was "
                "dropped. Hand one loss per record to step.backward(losses) in place of loss.backward()."
            )

    def begin(self) -> None:
        self._refuse_changes()
        _refuse_unsafe_layers(self.model)  # layers may have been switched to training mode
        if self.group.parameters.keys() != {name for name, p in self._all.items() if p.requires_grad}:
            self._group(trainable(self.model))  # layers were frozen or thawed
        self.group.total.zero_()
        self._begin_unit()

    def _begin_unit(self) -> None:
        self._sum.zero_()
        self._count = 0

    def add(self, losses: Tensor) -> None:
        finite = torch.isfinite(losses.detach())
        parameters = {name: p for name, p in self.group.parameters.items() if p.requires_grad}
        gradients = torch.autograd.grad(
            losses, list(parameters.values()), grad_outputs=finite.to(losses.dtype), allow_unused=True
        )
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._parts[name].add_(gradient)
        self._count += int(finite.sum())

    def end_unit(self) -> None:
        """Adds s·v with v = mean·min(1, C/‖mean‖); the mean is over as many records as had a finite loss."""
        norm = torch.linalg.vector_norm(self._sum, dtype=torch.float64).item()
        if self._count and math.isfinite(norm):
            factor = self.scale * _MARGIN / max(self._count, norm / self.method.clip)
            if factor >= _SMALLEST_FACTOR:
                self.group.total.add_(self._sum, alpha=factor)
        self._begin_unit()

    def finish(self) -> list[Query]:
        bound = 2 * self.method.clip * self.scale
        return [Query("all", self.group.total, Sensitivity(add_remove=bound, replace_one=bound), group=self.group)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuse_changes(self) -> None:
        now = dict(self.model.named_parameters())
        for name in now.keys() | self._all.keys():
            if now.get(name) is not self._all.get(name):
                raise Refused(
                    f"Parameter '{name}' was added to the model, taken away or replaced after the Run was made, so it "
                    "is not protected. Change the model first, then make the Run."
                )

    def _drop_strays(self) -> list[str]:
        strays = [name for name, p in self._all.items() if p.grad is not None]
        for name in strays:
            self._all[name].grad = None
        return strays

    def _allow_single_records(self, layer: _BatchNorm) -> list[RemovableHandle]:
        """torch refuses to normalise one value per channel by itself, and a chunk may happen to have one record.

        The answer is the layer's bias, which two copies of the record give.
        """
        doubled = False

        def before(layer: nn.Module, args: tuple[Any, ...]) -> Any:
            nonlocal doubled
            by_batch = layer.training or layer.running_mean is None
            doubled = self._listening and by_batch and bool(args) and args[0].numel() == args[0].shape[1]
            return (args[0].expand(2, *args[0].shape[1:]), *args[1:]) if doubled else None

        def after(_layer: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
            return output[:1] if doubled else None

        return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]


class _Buffers:
    """What the buffers of a model are now, bit by bit, to be restored later."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: (layer, dict(layer._buffers)) for name, layer in model.named_modules()}
        buffers = [b for _, held in self._layers.values() for b in held.values() if b is not None]
        self._values = {id(b): b.detach().clone() for b in buffers}

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Puts back what was changed, exchanged, added or taken away, and gives the names."""
        changed: list[str] = []
        for path, (layer, held) in self._layers.items():
            for name in {**held, **layer._buffers}:
                buffer = held.get(name)
                same = layer._buffers.get(name) is buffer
                if buffer is not None and not torch.equal(_bits(buffer), _bits(self._values[id(buffer)])):
                    buffer.copy_(self._values[id(buffer)])
                    same = False
                if not same:
                    changed.append(f"{path}.{name}" if path else name)
            layer._buffers.clear()
            layer._buffers.update(held)
        return changed


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _refuse_unsafe_layers(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        described = f"Layer '{name or 'the model'}' ({type(layer).__name__})"
        if layer.training and getattr(layer, "running_mean", None) is not None:
            raise Refused(
                f"{described} keeps running statistics, which would carry private records into the released model. "
                "Turn it into GroupNorm by privet.nn.batchnorm_to_groupnorm(model), or build it with "
                "track_running_stats=False, so that it normalises by the batch at evaluation too, or call .eval() on "
                "it to keep statistics that are public."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise Refused(
                f"{described} has max_norm set, which changes the weights of those tokens that are in the batch, "
                "without noise. Build it without max_norm."
            )
