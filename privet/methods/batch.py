"""Batch clipping (Nguyen et al. 2023): one update vector for a group of records is clipped, not each record's own.

A step's sample is split into k groups, each record by a coin of its own. With v_g the vector of group g, scaled to norm
at most C, the paper's update is (1/k)·Σ_g v_g plus noise. k = 1 is its BC, a larger k its GBC. The vector is the mean
gradient of the group's records, or what several local steps of an optimizer change, divided by its learning rate (GBC
allows any such rule). Records of a group may depend on each other, so BatchNorm may normalise by the batch.

Groups may also be users, with all their records: then whole users are sampled and protected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError, Refused
from ..gradients.taps import refuse_changes
from ..noise import Source
from ..options import option
from ..sampling import Sample
from ..state import Buffers, layers_of, parameters_of
from .base import ParameterGroup, Query, Sensitivity, Session, Setting, positive, register
from .per_example import PerExample
from .thresholds import Clipping, Thresholds, part_norms

_MARGIN = 1 - 2.0**-20
"""Vectors are scaled in float32; aiming this much below C keeps what comes out at C or less."""
_SMALLEST_FACTOR = 2.0**-120
"""A smaller factor would be rounded coarsely in float32, upwards too: the group is left out instead."""


@register
@dataclass(frozen=True, kw_only=True)
class Batch(Clipping):
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

    With users for groups (s = 1, B the expected number of users), a user added or removed brings a vector of norm C or
    takes it away, and moves no other user's: C, and 2C for a user replaced. Groups of one record each are per-example
    clipping, exactly, and run as such.

    Rule 7: a loss that is not finite is left out. Where that does not help, because the record has made the whole
    group's gradient not finite, its group adds nothing.

    Rule 8: buffers are put back after each private pass. Running statistics of BatchNorm come from public records, at
    the start of each epoch and by `Run.refresh`; without public records such a layer is refused.
    """

    name = "batch"
    summary = "clip the mean gradient of a group of records to norm C (BatchNorm may use batch statistics)"

    record_groups: int | Literal["each", "user"] = option(
        1, "groups that a sample is split into by coin: a number (1 clips the whole batch), each record, or each user"
    )
    local_steps: int = option(1, "steps of the local optimizer on each group, whose total change is clipped")
    local_optimizer: str = option("SGD", "optimizer of torch.optim for the local steps")
    local_lr: float = option(0.1, "learning rate of the local steps")
    local_momentum: float = option(0.0, "momentum of local SGD")
    sparsify: int = option(0, "freeze weights whose noisy gradient averages to nothing over so many steps (0: never)")

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = self.record_groups
        if isinstance(groups, bool) or not (groups in ("each", "user") or (isinstance(groups, int) and groups >= 1)):
            raise ConfigError(
                f"record_groups must be a whole number of at least 1, 'each' or 'user', and is {groups!r}."
            )
        for name, least in (("local_steps", 1), ("sparsify", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, and is {value!r}.")
        positive("local_lr", self.local_lr)
        kind = getattr(torch.optim, self.local_optimizer, None)
        if not isinstance(kind, type) or self.local_optimizer in ("Optimizer", "LBFGS", "SparseAdam"):
            raise ConfigError(f"local_optimizer is {self.local_optimizer!r}: name a first-order one of torch.optim.")
        if not 0 <= self.local_momentum < 1 or (self.local_momentum and self.local_optimizer != "SGD"):
            raise ConfigError("local_momentum must be at least 0 and below 1, and belongs to local_optimizer SGD.")
        if self.sparsify and self.factors:
            raise ConfigError("sparsify and factors cannot be had together: drop one of them.")

    @property
    def records_must_be_independent(self) -> bool:  # type: ignore[override]
        return self.record_groups == "each"

    @property
    def unit(self) -> Literal["record", "user"]:
        return "user" if self.record_groups == "user" else "record"

    def open(self, model: nn.Module, setting: Setting) -> Session:
        if isinstance(self.record_groups, int) and self.record_groups > setting.batch:
            raise ConfigError(
                f"record_groups is {self.record_groups}, more than the {setting.batch} records of an expected sample."
            )
        if self.record_groups == "each":
            return self._per_example().open(model, setting)
        return _BatchSession(self, model, setting)

    def _per_example(self) -> PerExample:
        if self.local_steps > 1 or self.sparsify:
            raise ConfigError("Groups of one record each are per-example clipping, without local steps or sparsify.")
        return PerExample(
            clip=self.clip,
            groups=self.groups,
            thresholds=self.thresholds,
            factors=self.factors,
            clip_decay=self.clip_decay,
            allocation=self.allocation,
        )


class _BatchSession(Session):
    def __init__(self, method: Batch, model: nn.Module, setting: Setting) -> None:
        self.method, self.model, self.public = method, model, setting.public
        self.passes = method.local_steps
        self.scale = 1.0 if method.record_groups == "user" else setting.batch / int(method.record_groups)
        self._all = parameters_of(model)
        self.thresholds = Thresholds(method, model, setting)
        self._statistics = [
            layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        _refuse_unsafe_layers(model, self.public)
        self._listening = False
        self._learning = False
        self._trained = [layer for layer in self._statistics if layer.training]
        self._handles: list[RemovableHandle] = []
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                self._handles += self._allow_single_records(layer)
        self._local: _LocalSteps | None = None
        self._frozen = _Frozen(method.sparsify)
        self._begin_unit()

    @property
    def groups(self) -> list[ParameterGroup]:
        return self.thresholds.groups

    def cut(self, sample: Sample, source: Source) -> list[Sample]:
        groups = int(self.method.record_groups)
        coins = source.integers(len(sample), groups)
        return [sample[coins == g] for g in range(groups) for _ in range(self.passes)]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Rule 8: what a private pass did to the buffers is undone; where it is not BatchNorm's, it is refused."""
        buffers = Buffers(self.model)
        before, self._listening = self._listening, True
        try:
            yield
        except BaseException:
            self._leave_local()  # the weights of the middle of a group are private
            raise
        finally:
            self._listening = before
            changed = buffers.restore()
            strays = self._drop_strays()
        expected = ("running_mean", "running_var", "num_batches_tracked") if self.public else ()
        if other := [name for name in changed if name.rpartition(".")[2] not in expected]:
            raise Refused(
                f"Buffer '{other[0]}' was changed by a forward pass over private records, so it carries statistics "
                "of them. It was put back, and nothing was released. Freeze that layer: .eval()."
            )
        if strays:
            raise Refused(
                f"Parameter '{strays[0]}' received a gradient in a backward pass inside of a private step. It was "
                "dropped. Hand one loss per record to step.backward(losses) in place of loss.backward()."
            )

    def begin(self) -> None:
        refuse_changes(self.model, self._all)
        self._leave_local()
        _refuse_unsafe_layers(self.model, self.public)  # layers may have been switched to training mode
        self.thresholds.begin()
        self._frozen.hold(self.groups)
        self._begin_unit()

    def _leave_local(self) -> None:
        """Takes back what the local steps of a group have done so far."""
        if self._local is not None:
            self._local.restore()
            self._local = None

    def _begin_unit(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, losses: Tensor) -> None:
        finite = torch.isfinite(losses.detach())
        for name, gradient in self._gradients(losses, finite.to(losses.dtype)).items():
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide
        self._count += int(finite.sum())

    def _gradients(self, losses: Tensor, weights: Tensor) -> dict[str, Tensor]:
        parameters = {name: p for name, p in self._all.items() if p.requires_grad}
        found = torch.autograd.grad(losses, list(parameters.values()), grad_outputs=weights, allow_unused=True)
        return {n: g.to_dense() if g.is_sparse else g for n, g in zip(parameters, found, strict=True) if g is not None}

    def end_unit(self) -> None:
        """One pass over a group is done: a local step, or the last one, after which the group's vector is clipped."""
        sums, count = (self._sums, self._count) if self._count else ({}, 1)
        self._begin_unit()
        if self.method.local_steps == 1:
            self._clip_and_add(sums, count)
            return
        means = {name: total / count for name, total in sums.items()}
        if self._local is None:
            self._local = _LocalSteps(self.method, {n: p for n, p in self._all.items() if p.requires_grad})
        if self._local.step(means):
            change = self._local.change()
            self._leave_local()
            self._clip_and_add(change, 1)

    def _clip_and_add(self, vector: Mapping[str, Tensor], divisor: int) -> None:
        """Adds s·v·min(1, C/‖v‖) with v = vector/divisor, group by group; scaled by the factors, if there are any."""
        scales = self.thresholds.scales
        for group in self.groups:
            mine = {name: self._frozen.without(name, vector[name]) for name in group.parameters if name in vector}
            if scales is not None:
                mine = {name: part * scales[name] for name, part in mine.items()}
            norms = (float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in mine.values())
            norm = math.hypot(*norms) / divisor
            if mine and math.isfinite(norm):
                factor = self.scale * _MARGIN / max(1.0, norm / self.thresholds.clips[group.name]) / divisor
                if factor >= _SMALLEST_FACTOR:
                    for name, part in mine.items():
                        group.views[name].add_(part, alpha=factor)

    def finish(self) -> list[Query]:
        clips, scales = self.thresholds.clips, self.thresholds.scales
        return [
            Query(group.name, group.total, self._sensitivity(clips[group.name]), group=group, scales=scales)
            for group in self.groups
        ]

    def _sensitivity(self, clip: float) -> Sensitivity:
        if self.method.record_groups == "user":
            return Sensitivity.of_contribution(clip)
        bound = 2 * clip * self.scale
        return Sensitivity(add_remove=bound, replace_one=bound)

    @property
    def post_processes(self) -> bool:
        return self._frozen.window > 0

    def post_process(self, gradients: Mapping[str, Tensor], stds: Mapping[str, float]) -> None:
        self._frozen.look(gradients, stds, self._all)

    # Public records

    def begin_epoch(self, number: int) -> None:
        self._learning = False  # a pass over public records that was left begins anew
        self.thresholds.begin_epoch(number)

    def wants_public(self) -> bool:
        return self.public and (bool(self._statistics) or self.thresholds.wants_public())

    @contextmanager
    def learning(self) -> Iterator[None]:
        """BatchNorm gathers the mean of its statistics over the public batches, from nothing.

        Of layers that are trained: one that was set to `eval` keeps the statistics that it came with.
        """
        if not self._learning:
            self._learning = True
            self._trained = [layer for layer in self._statistics if layer.training] or self._trained
            for layer in self._trained:
                layer.reset_running_stats()
        before = [(layer, layer.training, layer.momentum) for layer in self._trained]
        for layer in self._trained:
            layer.training, layer.momentum = True, None
        try:
            yield
        finally:
            for layer, training, momentum in before:
                layer.training, layer.momentum = training, momentum

    def learn(self, losses: Tensor) -> None:
        """The norms of the mean gradient of a public batch: what will be clipped is such a mean."""
        found = self._gradients(losses, torch.full_like(losses, 1 / len(losses)))
        squares = {n: torch.linalg.vector_norm(g, dtype=torch.float64).square().view(1) for n, g in found.items()}
        self.thresholds.learn(part_norms(self.thresholds.parts, squares))

    def learned(self) -> None:
        self._learning = False
        self.thresholds.learned()

    def state(self) -> dict[str, Any]:
        return {**self.thresholds.state(), "frozen": self._frozen.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.thresholds.load_state(state)
        self._frozen.load_state(state.get("frozen", {}), self._all)

    def close(self) -> None:
        self._leave_local()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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


class _LocalSteps:
    """Steps of an ordinary optimizer on the model itself, taken back when the group's change has been read off."""

    def __init__(self, method: Batch, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self._lr, self._left = dict(parameters), method.local_lr, method.local_steps
        self._start = {name: p.detach().clone() for name, p in parameters.items()}
        options = {"momentum": method.local_momentum} if method.local_optimizer == "SGD" else {}
        kind = getattr(torch.optim, method.local_optimizer)
        self._optimizer: torch.optim.Optimizer = kind(list(parameters.values()), lr=method.local_lr, **options)

    def step(self, means: Mapping[str, Tensor]) -> bool:
        """One step by these gradients; whether it was the last."""
        for name, mean in means.items():
            self._parameters[name].grad = mean.to(self._parameters[name].dtype)
        self._optimizer.step()
        for p in self._parameters.values():
            p.grad = None
        self._left -= 1
        return self._left == 0

    def change(self) -> dict[str, Tensor]:
        return {
            name: (self._start[name] - p.detach()).to(torch.promote_types(p.dtype, torch.float32)) / self._lr
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        for name, p in self._parameters.items():
            p.copy_(self._start[name])


class _Frozen:
    """Sparsification (the paper's 3.4): weights that no longer go anywhere are fixed at their mean.

    Over a window of R steps, a weight whose noisy gradients average to less than one deviation of that average's own
    noise is taken to have arrived. It stays at its mean over the window, and its entry is left out of the clip; what
    noise falls on it is thrown away. All of it reads noisy values only, so it is free (rule 11).
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._values: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}
        self._begin_window()

    def _begin_window(self) -> None:
        self._gradients: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._variances: dict[str, float] = {}
        self._steps = 0

    def without(self, name: str, part: Tensor) -> Tensor:
        return part.masked_fill(self._masks[name], 0) if name in self._masks else part

    @torch.no_grad()
    def hold(self, groups: list[ParameterGroup]) -> None:
        """Puts frozen weights back, whatever the optimizer's momentum has done to them since."""
        for group in groups:
            for name, p in group.parameters.items():
                if name in self._masks:
                    p.copy_(torch.where(self._masks[name], self._values[name].to(p.dtype), p))

    @torch.no_grad()
    def look(self, gradients: Mapping[str, Tensor], stds: Mapping[str, float], weights: Mapping[str, Tensor]) -> None:
        """Takes the noisy sums of a step; every R steps it is decided who has arrived."""
        if not self.window:
            return
        if gradients.keys() != self._gradients.keys():  # layers were frozen or thawed by the user
            self._begin_window()
        for name, noisy in gradients.items():
            self._gradients[name] = self._gradients.get(name, 0) + noisy
            self._weights[name] = self._weights.get(name, 0) + weights[name].detach()
            self._variances[name] = self._variances.get(name, 0.0) + stds[name] ** 2
            if name in self._masks:
                noisy.masked_fill_(self._masks[name], 0)
        self._steps += 1
        if self._steps < self.window:
            return
        for name, total in self._gradients.items():
            arrived = total.abs() <= math.sqrt(self._variances[name])
            before = self._masks.get(name, torch.zeros_like(arrived))
            mean = self._weights[name] / self._steps
            self._values[name] = torch.where(before, self._values.get(name, mean), mean)
            self._masks[name] = before | arrived
        self._begin_window()

    def state(self) -> dict[str, Any]:
        frozen = {"values": dict(self._values), "masks": dict(self._masks)}
        window = {"gradients": dict(self._gradients), "weights": dict(self._weights)}
        return {**frozen, **window, "variances": dict(self._variances), "steps": self._steps}

    def load_state(self, state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
        def placed(name: str) -> dict[str, Tensor]:
            return {n: held.to(parameters[n].device) for n, held in state.get(name, {}).items()}

        self._values, self._masks = placed("values"), placed("masks")
        self._gradients, self._weights = placed("gradients"), placed("weights")
        self._variances, self._steps = dict(state.get("variances", {})), int(state.get("steps", 0))


def _refuse_unsafe_layers(model: nn.Module, public: bool) -> None:
    for name, layer in layers_of(model).items():
        estimated = public and isinstance(layer, _BatchNorm)
        if not estimated and layer.training and getattr(layer, "running_mean", None) is not None:
            raise Refused(
                f"{_described(name, layer)} keeps running statistics, which would carry private records into the "
                "released model. Give the run public records to estimate them on (public=…; privet train --public "
                "0.1), turn it into GroupNorm by privet.nn.batchnorm_to_groupnorm(model), build it with "
                "track_running_stats=False, so that it normalises by the batch at evaluation too, or call .eval() on "
                "it to keep statistics that are public."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise Refused(
                f"{_described(name, layer)} has max_norm set, which changes the weights of those tokens that are in "
                "the batch, without noise. Build it without max_norm."
            )


def _described(name: str, layer: nn.Module) -> str:
    return f"Layer '{name or 'the model'}' ({type(layer).__name__})"
