"""Per-example clipping (Abadi et al. 2016): each record's gradient is scaled to norm at most C, then summed.

Clip functions of the norm n: ``abadi`` min(1, C/n); ``automatic`` C/(n + γ) (Bu et al. 2023), which leaves no C to
tune, as the learning rate absorbs it. The threshold may follow a quantile of the norms privately (Andrew et al. 2021):
the count of records below it is a side query with noise of its own, in the same sample, so it is paid for by rule 2.
Which parameters are clipped together, and thresholds by public records, are `thresholds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..gradients import PerRecord, Recorder
from ..options import option
from .base import ParameterGroup, Query, Sensitivity, Session, Setting, positive, register
from .thresholds import Clipping, Thresholds, part_norms

_MARGIN = 1 - 2.0**-14
"""Norms are computed in float32; aiming this much below C keeps what comes out at C or less."""
_SMALLEST_FACTOR = 2.0**-120
"""A smaller factor would be rounded coarsely in float32, upwards too: the record is left out instead."""


@register
@dataclass(frozen=True, kw_only=True)
class PerExample(Clipping):
    """Per-example clipping.

    Formal guarantee: every record adds a vector of norm at most `clip` to the sum of its group, so one record moves
    that sum by at most C (add or remove) or 2C (replace).
    """

    name = "per-example"
    summary = "clip each record's gradient to norm C (the baseline: DP-SGD)"

    clip_function: Literal["abadi", "automatic"] = option("abadi", "min(1, C/norm), or C/(norm + stability)")
    stability: float = option(0.01, "γ of the automatic clip function", needs=("clip_function", "automatic"))
    adaptive: bool = option(False, "let C follow a quantile of the gradient norms, privately")
    quantile: float = option(0.5, "the share of records that an adaptive C leaves unclipped", needs=("adaptive", True))
    adaptive_rate: float = option(0.2, "learning rate of the adaptive C (geometric)", needs=("adaptive", True))

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("stability", self.stability)
        positive("adaptive_rate", self.adaptive_rate)
        if self.clip_function not in ("abadi", "automatic"):
            raise ConfigError(f"clip_function must be 'abadi' or 'automatic', and is {self.clip_function!r}.")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"quantile must lie between 0 and 1, and is {self.quantile!r}.")
        if self.adaptive and self.clip_function == "automatic":
            raise ConfigError("The automatic clip function has no threshold to adapt: drop one of the two options.")
        if self.adaptive and (self.learns or self.clip_decay != 1):
            raise ConfigError(
                "adaptive follows the private records' own norms, and thresholds, factors, numbered groups and "
                "clip_decay set the clip otherwise: choose one of them."
            )

    @property
    def record_clip(self) -> float | None:
        fixed = self.clip_function == "abadi" and not (self.adaptive or self.learns) and self.clip_decay == 1
        return self.clip if fixed and self.groups is None and not isinstance(self.clip, Mapping) else None

    def open(self, model: nn.Module, setting: Setting) -> Session:
        return _PerExampleSession(self, model, setting)

    def weights(self, squared_norms: Tensor, clip: float) -> Tensor:
        """By what each record's gradient is multiplied, given the squares of their norms."""
        norms = squared_norms.sqrt()
        if self.clip_function == "automatic":
            factors = clip * _MARGIN / (norms + self.stability)
        else:
            factors = (clip * _MARGIN / norms).clamp_(max=1)
        return factors.masked_fill(factors < _SMALLEST_FACTOR, 0)


class _PerExampleSession(Session):
    def __init__(self, method: PerExample, model: nn.Module, setting: Setting) -> None:
        self.method, self.setting = method, setting
        self.thresholds = Thresholds(method, model, setting)
        self.recorder = Recorder(model)
        self.begin()

    @property
    def groups(self) -> list[ParameterGroup]:
        return self.thresholds.groups

    def listening(self) -> AbstractContextManager[None]:
        return self.recorder.recording()

    def begin(self) -> None:
        self.recorder.refuse_changes()
        self.thresholds.begin()
        self._below = {group.name: torch.zeros((), dtype=torch.float64) for group in self.groups}

    def add(self, losses: Tensor) -> None:
        gradients = self.recorder.backward(losses)
        with self.recorder.at_work(losses):
            self._sum(losses, gradients)

    def _sum(self, losses: Tensor, gradients: Mapping[str, PerRecord]) -> None:
        scales = self.thresholds.scales
        found = {g.name: {n: gradients[n] for n in g.parameters if n in gradients} for g in self.groups}
        squares = {
            group: torch.stack(
                [g.squared_norms * (1 if scales is None else scales[name] ** 2) for name, g in members.items()]
            ).sum(0)
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
            clip = self.thresholds.clips[group.name]
            weights = self.method.weights(squares[group.name], clip).masked_fill(lost, 0)
            for name, gradient in found[group.name].items():
                gradient.accumulate(weights if scales is None else weights * scales[name], group.views[name])
            if self.method.adaptive:
                halves = torch.where(squares[group.name] <= clip**2, 0.5, -0.5).masked_fill(lost, 0)
                self._below[group.name] += halves.sum()

    def finish(self) -> list[Query]:
        clips, scales = self.thresholds.clips, self.thresholds.scales
        queries = [
            Query(g.name, g.total, Sensitivity.of_contribution(clips[g.name]), group=g, scales=scales)
            for g in self.groups
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
                self.thresholds.clips[group.name] *= math.exp(
                    -self.method.adaptive_rate * (share - self.method.quantile)
                )

    def reaches_others(self, losses: Tensor, record: int) -> str | None:
        return self.recorder.reaches_others(losses, record)

    def bytes_per_record(self, records: int) -> int:
        seen, self.recorder.bytes_seen = self.recorder.bytes_seen, 0
        return math.ceil(seen / max(records, 1))

    def begin_epoch(self, number: int) -> None:
        if not self.method.adaptive:
            self.thresholds.begin_epoch(number)

    def wants_public(self) -> bool:
        return self.thresholds.wants_public()

    def learning(self) -> AbstractContextManager[None]:
        return self.recorder.recording()

    def learn(self, losses: Tensor) -> None:
        gradients = self.recorder.backward(losses)
        squares = {name: gradient.squared_norms for name, gradient in gradients.items()}
        self.thresholds.learn(part_norms(self.thresholds.parts, squares))

    def learned(self) -> None:
        self.thresholds.learned()

    def state(self) -> dict[str, Any]:
        return self.thresholds.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.thresholds.load_state(state)

    def close(self) -> None:
        self.recorder.close()
