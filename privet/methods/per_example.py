"""Per-example clipping (Abadi et al. 2016): each record's gradient is scaled to norm at most C, then summed.

Clip functions of the norm n: ``abadi`` min(1, C/n); ``automatic`` C/(n + γ) (Bu et al. 2023), which leaves no C to
tune, as the learning rate absorbs it. The threshold may follow a quantile of the norms privately (Andrew et al. 2021):
the count of records below it is a side query with noise of its own, in the same sample, so it is paid for by rule 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError
from ..gradients import PerRecord, Recorder
from ..noise import Allocation
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

_MARGIN = 1 - 2.0**-14
"""Norms are computed in float32; aiming this much below C keeps what comes out at C or less."""
_SMALLEST_FACTOR = 2.0**-120
"""A smaller factor would be rounded coarsely in float32, upwards too: the record is left out instead."""


@register
@dataclass(frozen=True, kw_only=True)
class PerExample(Method):
    """Per-example clipping.

    Formal guarantee: every record adds a vector of norm at most `clip` to the sum of its group, so one record moves
    that sum by at most C (add or remove) or 2C (replace).
    """

    name = "per-example"
    summary = "clip each record's gradient to norm C (the baseline: DP-SGD)"

    clip: float | Mapping[str, float] = option(1.0, "norm C that a record's gradient is clipped to")
    clip_function: Literal["abadi", "automatic"] = option("abadi", "min(1, C/norm), or C/(norm + stability)")
    stability: float = option(0.01, "γ of the automatic clip function")
    groups: Mapping[str, Sequence[str]] | None = option(
        None,
        "parameter groups, each with patterns of parameter names, that are clipped apart (TOML and Python only)",
    )
    adaptive: bool = option(False, "let C follow a quantile of the gradient norms, privately")
    quantile: float = option(0.5, "the share of records that an adaptive C leaves unclipped")
    adaptive_rate: float = option(0.2, "learning rate of the adaptive C (geometric)")
    allocation: Allocation = option("isotropic", "how noise is shared between groups")

    def __post_init__(self) -> None:
        for value in self.clip.values() if isinstance(self.clip, Mapping) else [self.clip]:
            positive("clip", value)
        positive("stability", self.stability)
        positive("adaptive_rate", self.adaptive_rate)
        if self.clip_function not in ("abadi", "automatic"):
            raise ConfigError(f"clip_function must be 'abadi' or 'automatic', and is {self.clip_function!r}.")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"quantile must lie between 0 and 1, and is {self.quantile!r}.")
        if self.adaptive and self.clip_function == "automatic":
            raise ConfigError("The automatic clip function has no threshold to adapt: drop one of the two options.")

    def open(self, model: nn.Module, setting: Setting) -> Session:
        return _PerExampleSession(self, model, setting)

    def clip_of(self, group: str) -> float:
        if not isinstance(self.clip, Mapping):
            return float(self.clip)
        if group not in self.clip:
            raise ConfigError(f"clip names no threshold for group '{group}'; it has {sorted(self.clip)}.")
        return float(self.clip[group])

    def factors(self, squared_norms: Tensor, clip: float) -> Tensor:
        """By what each record's gradient is multiplied, given the squares of their norms."""
        norms = squared_norms.sqrt()
        if self.clip_function == "automatic":
            factors = clip * _MARGIN / (norms + self.stability)
        else:
            factors = (clip * _MARGIN / norms).clamp_(max=1)
        return factors.masked_fill(factors < _SMALLEST_FACTOR, 0)


def group_parameters(
    parameters: Mapping[str, nn.Parameter], patterns: Mapping[str, Sequence[str]] | None
) -> list[ParameterGroup]:
    """Sorts parameters into groups by the first group that has a pattern for the name; every one must find a place."""
    if patterns is None:
        return [ParameterGroup("all", parameters)]
    members: dict[str, dict[str, nn.Parameter]] = {group: {} for group in patterns}
    for name, p in parameters.items():
        home = next((g for g, wanted in patterns.items() if any(fnmatchcase(name, w) for w in wanted)), None)
        if home is None:
            raise ConfigError(f"No group has a pattern that matches parameter '{name}'. Add one, for example '*'.")
        members[home][name] = p
    return [ParameterGroup(group, found) for group, found in members.items() if found]


class _PerExampleSession(Session):
    def __init__(self, method: PerExample, model: nn.Module, setting: Setting) -> None:
        self.method, self.model, self.setting = method, model, setting
        self.groups = group_parameters(trainable(model), method.groups)
        if empty := set(method.groups or ()) - {group.name for group in self.groups}:
            raise ConfigError(f"No trainable parameter matches the patterns of group '{min(empty)}'.")
        self.clips = {group.name: method.clip_of(group.name) for group in self.groups}
        self._all = dict(model.named_parameters())
        self.recorder = Recorder(model)
        self.begin()

    def listening(self) -> AbstractContextManager[None]:
        return self.recorder.recording()

    def begin(self) -> None:
        self.recorder.refuse_changes()
        grouped = {name for group in self.groups for name in group.parameters}
        if grouped != {name for name, p in self._all.items() if p.requires_grad}:
            self.groups = group_parameters(trainable(self.model), self.method.groups)  # layers were frozen or thawed
        for group in self.groups:
            group.total.zero_()
        self._below = {group.name: torch.zeros((), dtype=torch.float64) for group in self.groups}

    def add(self, losses: Tensor) -> None:
        gradients = self.recorder.backward(losses)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            self._sum(losses, gradients)

    def _sum(self, losses: Tensor, gradients: Mapping[str, PerRecord]) -> None:
        found = {g.name: {n: gradients[n] for n in g.parameters if n in gradients} for g in self.groups}
        squares = {
            group: torch.stack([g.squared_norms for g in members.values()]).sum(0)
            for group, members in found.items()
            if members
        }
        lost = ~torch.isfinite(losses.detach() + sum(squares.values()))
        if bool(lost.any()):
            for gradient in gradients.values():
                gradient.drop(lost)
        for group in self.groups:
            if group.name not in squares:
                continue
            clip = self.clips[group.name]
            factors = self.method.factors(squares[group.name], clip).masked_fill(lost, 0)
            for name, gradient in found[group.name].items():
                gradient.accumulate(factors, group.views[name])
            if self.method.adaptive:
                halves = torch.where(squares[group.name] <= clip**2, 0.5, -0.5).masked_fill(lost, 0)
                self._below[group.name] += halves.sum()

    def finish(self) -> list[Query]:
        queries = [
            Query(g.name, g.total, Sensitivity.of_contribution(self.clips[g.name]), group=g) for g in self.groups
        ]
        if self.method.adaptive:
            half = Sensitivity.of_contribution(0.5)  # a record adds +1/2 or −1/2: below the threshold, or above
            queries += [
                Query(f"below C of {g.name}", self._below[g.name].view(1), half, std=self._quantile_std())
                for g in self.groups
            ]
        return queries

    def _quantile_std(self) -> float:
        """A twentieth of the batch (Andrew et al.), or more, so that all side queries cost at most 1/16 of 1/σ²."""
        return max(self.setting.batch / 20, 2 * self.setting.noise_multiplier * math.sqrt(len(self.groups)))

    def observe(self, noisy: Mapping[str, Tensor]) -> None:
        for group in self.groups:
            value = noisy.get(f"below C of {group.name}")
            if value is not None:
                share = min(1.0, max(0.0, float(value) / self.setting.batch + 0.5))
                self.clips[group.name] *= math.exp(-self.method.adaptive_rate * (share - self.method.quantile))

    def reaches_others(self, losses: Tensor, record: int) -> str | None:
        return self.recorder.reaches_others(losses, record)

    def bytes_per_record(self, records: int) -> int:
        seen, self.recorder.bytes_seen = self.recorder.bytes_seen, 0
        return math.ceil(seen / max(records, 1))

    def state(self) -> dict[str, Any]:
        return {"clips": dict(self.clips)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        clips = state.get("clips", {})
        if set(clips) != set(self.clips):
            raise CheckpointError(
                f"The checkpoint has thresholds for the groups {sorted(clips)} and this run has {sorted(self.clips)}."
            )
        self.clips = {group: float(clip) for group, clip in clips.items()}

    def close(self) -> None:
        self.recorder.close()
