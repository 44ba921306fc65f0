"""Groups of parameters and the norm C_h that each is clipped to (layerwise clipping; Nguyen et al. 2023, section 3).

Per-example and batch clipping share this: what is clipped differs, by what norm does not. With several groups each has
a sum, a sensitivity and noise of its own, and all are one mechanism (rule 2), which is where the paper's √L comes from.

- `fixed`: C_h = C for every group, or the numbers given by name.
- `alc`: C_h = C·e_h/M, with e_h the mean norm of group h on public records, M the largest (the paper's own).
- `zhang`: C_h = C·e_h (Zhang et al.; the paper has C = 1).
- Multiplication factors (appendix B.2): group h is scaled by m_h = M/e_h, everything is clipped as one to C, noised and
  scaled back. One sum, so no √L: an elliptical clip.

Estimates are made anew at the start of each epoch. They read public records and noised weights only, so they are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError, Refused
from ..noise import Allocation
from ..options import option
from .base import Method, ParameterGroup, Setting, positive, trainable

Groups = Literal["layer", "block", "parameter"] | int | Mapping[str, Sequence[str]]
WHAT_GROUPS_ARE = (
    "what is clipped apart: every layer, block or parameter, or a number of groups of similar norm (by public "
    "records); in TOML and Python also named groups, each with patterns of parameter names"
)


@dataclass(frozen=True, kw_only=True)
class Clipping(Method):
    """The options that all methods with thresholds have in common."""

    clip: float | Mapping[str, float] = option(1.0, "norm C of the clip")
    groups: Groups | None = option(None, WHAT_GROUPS_ARE)
    thresholds: Literal["fixed", "alc", "zhang"] = option(
        "fixed", "C of each group: the same, C·e/max e, or C·e, with e its mean norm on public records"
    )
    factors: bool = option(False, "scale groups to equal norms on public records, and clip them as one")
    clip_decay: float = option(1.0, "C is multiplied by this after each epoch")
    allocation: Allocation = option("isotropic", "how noise is shared between groups")

    def __post_init__(self) -> None:
        for value in self.clip.values() if isinstance(self.clip, Mapping) else [self.clip]:
            positive("clip", value)
        if not 0 < self.clip_decay <= 1:
            raise ConfigError(f"clip_decay must be above 0 and at most 1, and is {self.clip_decay!r}.")
        if self.thresholds not in ("fixed", "alc", "zhang"):
            raise ConfigError(f"thresholds must be 'fixed', 'alc' or 'zhang', and is {self.thresholds!r}.")
        if isinstance(self.groups, bool) or (isinstance(self.groups, int) and self.groups < 1):
            raise ConfigError(f"groups must be at least 1, and is {self.groups!r}.")
        if self.groups not in (None, "layer", "block", "parameter") and not isinstance(self.groups, int | Mapping):
            raise ConfigError(f"groups must be 'layer', 'block', 'parameter' or a number, and is {self.groups!r}.")
        if self.learns and self.groups is None:
            raise ConfigError(
                "thresholds and factors are per group: say which with groups, for example groups='layer'."
            )
        if self.learns and isinstance(self.clip, Mapping):
            raise ConfigError("The thresholds of the groups are learned: give one clip for all of them.")
        if self.factors and self.thresholds != "fixed":
            raise ConfigError("factors clip all groups as one: leave thresholds at 'fixed'.")

    @property
    def learns(self) -> bool:
        """Whether public records decide about thresholds."""
        return self.thresholds != "fixed" or self.factors or isinstance(self.groups, int)


class Thresholds:
    """The groups of a session, with their thresholds as they are now."""

    def __init__(self, method: Clipping, model: nn.Module, setting: Setting) -> None:
        self.method, self.model = method, model
        self._all = dict(model.named_parameters())
        if method.learns and not setting.public:
            raise Refused(
                "Thresholds are to be learned from public records, and there are none: give the run public=… "
                "(privet train --public), or use thresholds='fixed'."
            )
        self._norms: dict[str, float] | None = None
        self._first: dict[str, float] = {}
        """The norms that numbered groups were made by: the first ones, so that groups stay what they are."""
        self._seen: dict[str, list[float]] = {}
        self._epoch = 0
        self._group()
        if empty := set(method.groups if isinstance(method.groups, Mapping) else ()) - set(self.parts):
            raise ConfigError(f"No trainable parameter matches the patterns of group '{min(empty)}'.")
        if isinstance(method.groups, int) and method.groups > len(self.parts):
            raise ConfigError(
                f"groups is {method.groups}, and the model has {len(self.parts)} layers with parameters: choose fewer."
            )

    # What is where

    def _group(self) -> None:
        parameters = trainable(self.model)
        self.parts = _parts(self.model, parameters, self.method.groups)
        """Parameter names by the group that their norm is estimated in."""
        homes = {part: part for part in self.parts}
        if self.method.factors:
            homes = dict.fromkeys(self.parts, "all")
        elif isinstance(self.method.groups, int):
            homes = _similar({part: self._first.get(part, 0.0) for part in self.parts}, self.method.groups)
        members: dict[str, dict[str, nn.Parameter]] = {}
        for part, names in self.parts.items():
            members.setdefault(homes[part], {}).update({name: parameters[name] for name in names})
        self.homes = homes
        self.groups = [ParameterGroup(name, found) for name, found in members.items()]
        self._set()

    def begin(self) -> None:
        """Sums of zero; groups anew if layers were frozen or thawed since."""
        grouped = {name for group in self.groups for name in group.parameters}
        if grouped != {name for name, p in self._all.items() if p.requires_grad}:
            before = self.clips
            self._group()
            self.clips |= {group: clip for group, clip in before.items() if group in self.clips}
        for group in self.groups:
            group.total.zero_()

    # Thresholds

    def begin_epoch(self, number: int) -> None:
        self._epoch, self._seen = number, {}
        self._set()

    def _set(self) -> None:
        """Thresholds and factors from the master constant and what was learned."""
        method, decay = self.method, self.method.clip_decay**self._epoch
        self.factors = dict.fromkeys(self.parts, 1.0)
        self.clips = {group.name: decay * _clip_of(method, group.name) for group in self.groups}
        if self._norms is None:
            return
        norms = {part: self._norms.get(part, 0.0) for part in self.parts}
        largest = max(norms.values())
        if not 0 < largest < math.inf:
            raise Refused("The public records have no gradient, or none that is finite: thresholds cannot be learned.")
        floor = largest * 1e-6  # a group that public records do not reach must not get a threshold of zero
        if method.factors:
            self.factors = {part: largest / max(norm, floor) for part, norm in norms.items()}
        elif method.thresholds != "fixed":
            sizes = {
                g.name: math.hypot(*(norms[p] for p in self.parts if self.homes[p] == g.name)) for g in self.groups
            }
            over = max(sizes.values()) if method.thresholds == "alc" else 1.0
            for group, size in sizes.items():
                self.clips[group] *= max(size, floor) / over

    @property
    def scales(self) -> dict[str, float] | None:
        """By what each parameter's gradient is multiplied before the clip; None without factors."""
        if not self.method.factors:
            return None
        return {name: self.factors[part] for part, names in self.parts.items() for name in names}

    # Learning from public records

    def wants_public(self) -> bool:
        return self.method.learns

    def learn(self, norms: Mapping[str, Iterable[float]]) -> None:
        """Norms of the parts of public gradients; those that are not finite tell nothing."""
        for part, found in norms.items():
            self._seen.setdefault(part, []).extend(norm for norm in found if math.isfinite(norm))

    def learned(self) -> None:
        first, seen = self._norms is None, self._seen
        self._seen = {}
        if not self.method.learns or not seen:
            return
        self._norms = {part: sum(found) / len(found) for part, found in seen.items() if found}
        if first and isinstance(self.method.groups, int):
            self._first = self._norms
            self._group()
        else:
            self._set()

    # Checkpoints

    def state(self) -> dict[str, Any]:
        return {"clips": dict(self.clips), "norms": self._norms, "first": self._first, "epoch": self._epoch}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._norms, self._first = state.get("norms"), state.get("first", {})
        self._epoch = int(state.get("epoch", 0))
        self._group()
        clips = state.get("clips", {})
        if set(clips) != set(self.clips):
            raise CheckpointError(
                f"The checkpoint has thresholds for the groups {sorted(clips)} and this run has {sorted(self.clips)}."
            )
        self.clips = {group: float(clip) for group, clip in clips.items()}


def part_norms(parts: Mapping[str, Sequence[str]], squares: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The norm of each part for each gradient, from the squared norms of the parameters (vectors, one entry each)."""
    found = {}
    for part, names in parts.items():
        mine = [squares[name] for name in names if name in squares]
        if mine:
            found[part] = torch.stack(mine).sum(0).sqrt().tolist()
    return found


def _clip_of(method: Clipping, group: str) -> float:
    if not isinstance(method.clip, Mapping):
        return float(method.clip)
    if group not in method.clip:
        raise ConfigError(f"clip names no threshold for group '{group}'; it has {sorted(method.clip)}.")
    return float(method.clip[group])


def _parts(model: nn.Module, parameters: Mapping[str, nn.Parameter], groups: Groups | None) -> dict[str, list[str]]:
    """Parameter names by group; every parameter has exactly one."""
    if groups is None:
        return {"all": list(parameters)}
    found: dict[str, list[str]] = {}
    if isinstance(groups, Mapping):
        patterns = {group: [wanted] if isinstance(wanted, str) else wanted for group, wanted in groups.items()}
        found = {group: [] for group in groups}
        for name in parameters:
            home = next((g for g, wanted in patterns.items() if any(fnmatchcase(name, w) for w in wanted)), None)
            if home is None:
                raise ConfigError(f"No group has a pattern that matches parameter '{name}'. Add one, for example '*'.")
            found[home].append(name)
        return {group: names for group, names in found.items() if names}
    for name in parameters:
        layer, _, _ = name.rpartition(".")
        block, _, _ = layer.rpartition(".")
        home = {"parameter": name, "block": block or layer}.get(str(groups), layer)
        found.setdefault(home or "the model", []).append(name)
    return found


def _similar(norms: Mapping[str, float], count: int) -> dict[str, str]:
    """Parts of similar norm together: sorted by norm, and cut where the largest steps between neighbours are."""
    order = sorted(norms, key=lambda part: norms[part])
    sizes = [math.log(max(norms[part], 1e-30)) for part in order]
    cuts = sorted(sorted(range(1, len(order)), key=lambda i: sizes[i - 1] - sizes[i])[: count - 1])
    homes: dict[str, str] = {}
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(order)], strict=True)):
        for part in order[start:end]:
            homes[part] = f"group {number + 1} of {count}"
    return homes
