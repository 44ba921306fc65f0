"""Ternary gradients (Nasr, Shokri and Houmansadr 2020): only the direction of each large entry is kept, then clipped.

A step's sample is split into micro-batches. With g the mean gradient of one, v = 1 where g > τ, −1 where g < −τ and 0
elsewhere; v is scaled to norm at most C and the sum is noised. The norm of v is the root of the number of its nonzero
entries, so clipping needs counts only, and a micro-batch adds −c, 0 or c to each entry, with c = min(1, C/√count). The
paper's correction of the noise afterwards is `privet.postprocess`, for any method.

Where this differs from the paper:

- Its noise is σ·C for micro-batches of any size. Of one record each, that is right for a record added or removed. In a
  larger one, a record can turn the mean gradient around, and with it v from norm C to −C: 2C. So the epsilons of its
  table 2 (CIFAR-10, micro-batches of 4 and 8) are understated: 16.20, 7.65 and 3.80 there, and 153, 44.5 and 13.8 by
  exact accounting of the noise that was added (Poisson samples of 50,000 records).
- Its theorem 1 is misprinted. In (11) the signs are reversed and T multiplies log δ too: the moments accountant gives
  ε = min_λ (T·α(λ) − log δ)/λ. In (12) the logarithm of the expectations is missing. In its section 2.1 the variance
  must be (Δ₂f)²σ² (2), and the exponent in the condition on δ −(σε)²/2. Nothing here rests on these formulas.
- Micro-batches are drawn by a coin for each record. In pieces of a fixed size, a record more would shift the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import native
from ..errors import CheckpointError, ConfigError
from ..gradients import Recorder
from ..gradients.linear import Outer
from ..gradients.per_record import Dense, PerRecord, row_squares
from ..gradients.recorder import _added
from ..gradients.scratch import scratch
from ..gradients.taps import Use
from ..options import option
from .base import Method, ParameterGroup, Query, Sensitivity, Session, Setting, positive, register
from .batch import Batch, _BatchSession
from .per_example import PerExample
from .thresholds import Thresholds

_BLOCK = 2**22
"""So many entries of records' gradients are looked at at a time."""
_BLOCK_IN_PASSING = 2**24
"""The same for the loops in C, which hold none of a linear layer's."""
_TAUS = (1e-30, 1e30)
"""Where an adaptive τ stays, whatever the noise says."""


@register
@dataclass(frozen=True, kw_only=True)
class Ternary(Method):
    """Ternary gradients.

    Formal guarantee: with micro-batches of one record, each record adds a vector of norm at most C: one record moves
    the sum by C, and 2C when replaced. With k micro-batches by coin, one record moves the sum by at most 2·C·s under
    either relation, s = B/k being the scale that makes p.grad the mean over micro-batches: it changes one of them only
    (the proof is that of `Batch`), from a vector of norm C or less to another.

    An adaptive τ follows a quantile privately. A micro-batch adds +1/2 to a side query if at most a `density` of its
    entries are above τ in size, −1/2 if more are, and 0 if it is empty or not finite; τ moves until half of them are
    that sparse. One record each: the query moves by 1/2, and by 1 when one is replaced. Larger ones: the record's own
    moves between two of −1/2, 0 and 1/2, so by at most 1 under either relation. It is a query of the same sample with
    noise of its own, and is paid for by rule 2; what τ becomes reads its noisy value only.

    Rule 7: a record with a loss or gradient that is not finite adds exactly zero. In a larger micro-batch such a loss
    is left out; where the gradient is not finite all the same, the micro-batch adds nothing.
    """

    name = "ternary"
    summary = "keep -1, 0 or 1 of each entry of a gradient, and clip that to norm C"
    allocation = "isotropic"

    clip: float = option(1.0, "norm C of the clip")
    tau: float | Mapping[str, float] = option(
        0.001, "τ: smaller entries become 0; in TOML and Python also a table, by patterns of parameter names"
    )
    record_groups: int | Literal["each"] = option(
        "each", "micro-batches that a sample is split into by coin: a number, or each record by itself"
    )
    adaptive: bool = option(False, "let τ follow the density, privately, from what tau says")
    density: float = option(
        0.05,
        "the share of entries that an adaptive τ lets through in half of the micro-batches",
        needs=("adaptive", True),
    )
    adaptive_rate: float = option(0.2, "learning rate of the adaptive τ (geometric)", needs=("adaptive", True))

    def __post_init__(self) -> None:
        positive("clip", self.clip)
        positive("adaptive_rate", self.adaptive_rate)
        taus = list(self.tau.values()) if isinstance(self.tau, Mapping) else [self.tau]
        if not taus:
            raise ConfigError("tau is an empty table: give at least one pattern, for example '*'.")
        for tau in taus:
            if not 0 < tau < math.inf:
                raise ConfigError(
                    f"tau must be a positive number, and is {tau!r}. (At 0, rounding would decide about entries that "
                    "are zero, and one record's presence can change how others are rounded.)"
                )
        if not 0 < self.density < 1:
            raise ConfigError(f"density must lie between 0 and 1, and is {self.density!r}.")
        groups = self.record_groups
        if isinstance(groups, bool) or not (groups == "each" or (isinstance(groups, int) and groups >= 1)):
            raise ConfigError(f"record_groups must be a whole number of at least 1 or 'each', and is {groups!r}.")

    @property
    def records_must_be_independent(self) -> bool:  # type: ignore[override]
        return self.record_groups == "each"

    def open(self, model: nn.Module, setting: Setting) -> Session:
        if self.record_groups == "each":
            return _RecordSession(self, model, setting)
        if self.record_groups > setting.batch:
            raise ConfigError(
                f"record_groups is {self.record_groups}, more than the {setting.batch} records of an expected sample."
            )
        return _GroupSession(self, model, setting)


class _Levels:
    """τ of each part of the model, and the side queries that an adaptive one follows."""

    def __init__(self, method: Ternary, model: nn.Module, setting: Setting) -> None:
        self.method, self.setting = method, setting
        patterns = method.tau if isinstance(method.tau, Mapping) else {"*": method.tau}
        self.taus = {pattern: float(tau) for pattern, tau in patterns.items()}
        self.home = {name: self._pattern(name) for name, _ in model.named_parameters()}
        if unused := set(self.taus) - set(self.home.values()):
            raise ConfigError(f"No parameter is left for the pattern '{min(unused)}' of tau.")
        each = method.record_groups == "each"
        self._vectors = setting.batch if each else int(method.record_groups)
        self._sensitivity = Sensitivity.of_contribution(0.5) if each else Sensitivity(add_remove=1, replace_one=1)

    def _pattern(self, name: str) -> str:
        for pattern in self.taus:
            if fnmatchcase(name, pattern):
                return pattern
        raise ConfigError(f"tau has no pattern that matches parameter '{name}'. Add one, for example '*'.")

    def begin(self, groups: Sequence[ParameterGroup]) -> None:
        self._sizes: dict[str, int] = {}
        for group in groups:
            for name, p in group.parameters.items():
                self._sizes[self.home[name]] = self._sizes.get(self.home[name], 0) + p.numel()
        self._sparse = {pattern: torch.zeros((), dtype=torch.float64) for pattern in self._sizes}

    def tau(self, name: str) -> float:
        return self.taus[self.home[name]]

    def count(self, nonzero: Mapping[str, Tensor], lost: Tensor) -> None:
        """Takes the number of nonzero entries of each vector, by parameter, and which vectors are left out."""
        if not self.method.adaptive:
            return
        for pattern, size in self._sizes.items():
            found = [count for name, count in nonzero.items() if self.home[name] == pattern]
            counts = torch.stack(found).sum(0) if found else torch.zeros_like(lost, dtype=torch.float64)
            halves = torch.where(counts <= self.method.density * size, 0.5, -0.5).masked_fill(lost, 0)
            self._sparse[pattern] += halves.sum(dtype=torch.float64).cpu()

    def queries(self) -> list[Query]:
        if not self.method.adaptive:
            return []
        # a twentieth of what is counted, or more, so that all of them cost at most 1/16 of 1/σ²
        cost = 4 * self._sensitivity.under(self.setting.relation) * math.sqrt(len(self._sparse))
        std = max(self._vectors / 20, self.setting.noise_multiplier * cost)
        return [
            Query(f"sparse at tau of {pattern}", total.view(1), self._sensitivity, std=std)
            for pattern, total in self._sparse.items()
        ]

    def observe(self, noisy: Mapping[str, Tensor]) -> None:
        for pattern in self._sparse:
            value = noisy.get(f"sparse at tau of {pattern}")
            if value is not None:
                share = min(1.0, max(0.0, float(value) / self._vectors + 0.5))
                tau = self.taus[pattern] * math.exp(-self.method.adaptive_rate * (share - 0.5))
                self.taus[pattern] = min(max(tau, _TAUS[0]), _TAUS[1])

    def state(self) -> dict[str, Any]:
        return {"taus": dict(self.taus)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        taus = state.get("taus", {})
        if set(taus) != set(self.taus):
            raise CheckpointError(f"The checkpoint has tau for {sorted(taus)} and this run for {sorted(self.taus)}.")
        self.taus = {pattern: float(taus[pattern]) for pattern in self.taus}


class _BlockRecorder(Recorder):
    """Per-record gradients in full, but of few records at a time: what a layer saw is kept, and asked block by block.

    Discretising needs every entry of every record's gradient, which for a whole batch may not fit in memory. What is
    kept of a batch is what passed through its layers, which a backward pass holds anyway.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._uses: list[tuple[Use, Sequence[Tensor], Sequence[Tensor | None]]] = []

    def take(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> None:
        self._uses.append((use, inputs, deltas))

    def listen(self, losses: Tensor) -> None:
        self._uses = []
        self.run_backward(losses, torch.ones_like(losses))

    def blocks(self, records: int) -> Iterator[tuple[slice, dict[str, PerRecord]]]:
        """Records by number and their gradients, which may be used until the next ones, `at_work` on them."""
        uses, self._uses = self._uses, []
        trained = [p for p in self.parameters.values() if p.requires_grad]
        block_size = _BLOCK_IN_PASSING if native.serves(*trained) else _BLOCK
        rows = max(1, block_size // max(sum(p.numel() for p in trained), 1))
        for start in range(0, records, rows):
            block = slice(start, min(start + rows, records))
            self._scratch.reclaim()
            self._found = {}
            for use, inputs, deltas in uses:
                super().take(use, [x[block] for x in inputs], [d if d is None else d[block] for d in deltas])
            found, self._found = self._found, {}
            yield block, {name: _added(parts) for name, parts in found.items()}


class _Signs(ABC):
    """The ternary vectors of one parameter, for a block of records: never kept for more than that."""

    counts: Tensor
    """How many entries of each are not 0; not a number where one of the gradient's entries is not finite."""

    @abstractmethod
    def sum(self, weights: Tensor) -> Tensor:
        """Σ weights[i]·v_i, in the shape of the parameter."""

    @staticmethod
    def of(gradient: PerRecord, tau: float) -> _Signs:
        if isinstance(gradient, Outer) and native.serves(gradient.delta, gradient.z):
            return _SignsInPassing([(gradient.delta, gradient.z)], lambda rows: rows[0], tau)
        full = gradient if isinstance(gradient, Dense) else Dense.of(gradient.dense(), gradient.squared_norms)
        if native.serves(full.rows):
            once = full.rows.new_ones(full.rows.shape[1], 1)
            return _SignsInPassing([(once, part) for part in full.rows], lambda rows: full.shaped(rows.squeeze(1)), tau)
        return _SignsInFull(full, tau)


class _SignsInPassing(_Signs):
    """No vector is ever kept: the signs of δ_n z_nᵀ are found twice, once to be counted and once to be added."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], shaped: Callable[[Tensor], Tensor], tau: float) -> None:
        self._parts, self._shaped, self._tau = parts, shaped, tau
        self.counts = torch.stack([native.ternary_counts(delta, z, tau) for delta, z in parts]).sum(0)

    def sum(self, weights: Tensor) -> Tensor:
        return self._shaped(torch.stack([native.ternary_sum(d, z, weights, self._tau) for d, z in self._parts]))


class _SignsInFull(_Signs):
    def __init__(self, gradient: Dense, tau: float) -> None:
        vectors = scratch().take(gradient.rows.shape, gradient.rows)
        torch.ops.aten.hardshrink.out(gradient.rows, tau, out=vectors)
        vectors.sign_()
        squares = [row_squares(part).round() for part in vectors]  # several times as fast as counting
        lost = _not_finite(gradient)
        self._signs = Dense(vectors, gradient.shaped, torch.stack(squares).sum(0))
        self._signs.drop(lost)
        self.counts = self._signs.squared_norms.masked_fill(lost, math.nan)

    def sum(self, weights: Tensor) -> Tensor:
        return self._signs.weighted_sum(weights)


def _not_finite(gradient: Dense) -> Tensor:
    """Records with an entry that is not finite. Their norms tell, but for those whose squares are too large."""
    lost = ~torch.isfinite(gradient.squared_norms)
    return ~torch.isfinite(gradient.rows).all(2).all(0) if bool(lost.any()) else lost


class _RecordSession(Session):
    """Micro-batches of one record.

    The factor of a record is known only after all its layers were counted, and its entries are needed again for the
    sum. Between the two they are kept, or found again, for one block of records; nothing outlives it but its sum.
    """

    def __init__(self, method: Ternary, model: nn.Module, setting: Setting) -> None:
        self.method = method
        self.levels = _Levels(method, model, setting)
        self.clipping = PerExample(clip=method.clip)
        self.thresholds = Thresholds(self.clipping, model, setting)
        self.recorder = _BlockRecorder(model)
        self.begin()

    def listening(self) -> AbstractContextManager[None]:
        return self.recorder.recording()

    def begin(self) -> None:
        self.recorder.refuse_changes()
        self.thresholds.begin()
        (self.group,) = self.thresholds.groups
        self.levels.begin([self.group])

    def add(self, losses: Tensor) -> None:
        self.recorder.listen(losses)
        finite = torch.isfinite(losses.detach())
        with self.recorder.at_work(losses):
            for block, gradients in self.recorder.blocks(len(losses)):
                signs = {
                    name: _Signs.of(gradient, self.levels.tau(name))
                    for name, gradient in gradients.items()
                    if name in self.group.views  # others were thawed in the middle of the step
                }
                if signs:
                    self._add(signs, ~finite[block])

    def _add(self, signs: Mapping[str, _Signs], lost: Tensor) -> None:
        """Clips the vectors of a block of records and adds them to the step's sum."""
        counts = torch.stack([vectors.counts for vectors in signs.values()]).sum(0)
        lost = lost | counts.isnan()
        self.levels.count({name: vectors.counts for name, vectors in signs.items()}, lost)
        weights = self.clipping.weights(counts, self.thresholds.clips[self.group.name]).masked_fill(lost, 0)
        for name, vectors in signs.items():
            self.group.views[name].add_(vectors.sum(weights))

    def finish(self) -> list[Query]:
        bound = Sensitivity.of_contribution(self.thresholds.clips[self.group.name])
        return [Query(self.group.name, self.group.total, bound, group=self.group), *self.levels.queries()]

    def observe(self, noisy: Mapping[str, Tensor]) -> None:
        self.levels.observe(noisy)

    def reaches_others(self, losses: Tensor, record: int) -> str | None:
        return self.recorder.reaches_others(losses, record)

    def bytes_per_record(self, records: int) -> int:
        seen, self.recorder.bytes_seen = self.recorder.bytes_seen, 0
        return math.ceil(seen / max(records, 1))

    def state(self) -> dict[str, Any]:
        return self.levels.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.levels.load_state(state)

    def close(self) -> None:
        self.recorder.close()


class _GroupSession(_BatchSession):
    """Larger micro-batches: batch clipping, of the ternary vector of a group in place of its mean gradient.

    There is one vector at a time, so its bytes do not matter.
    """

    def __init__(self, method: Ternary, model: nn.Module, setting: Setting) -> None:
        self.levels = _Levels(method, model, setting)
        super().__init__(Batch(clip=method.clip, record_groups=method.record_groups), model, setting)
        self.levels.begin(self.groups)

    def begin(self) -> None:
        super().begin()
        self.levels.begin(self.groups)

    def _clip_and_add(self, vector: Mapping[str, Tensor], divisor: int) -> None:
        if not vector or not all(bool(torch.isfinite(part).all()) for part in vector.values()):
            return
        ternary = {
            name: torch.hardshrink(part / divisor, self.levels.tau(name)).sign_() for name, part in vector.items()
        }
        nonzero = {name: row_squares(part.reshape(1, -1)).round() for name, part in ternary.items()}
        self.levels.count(nonzero, torch.zeros(1, dtype=torch.bool, device=self.groups[0].total.device))
        super()._clip_and_add(ternary, 1)

    def finish(self) -> list[Query]:
        return [*super().finish(), *self.levels.queries()]

    def observe(self, noisy: Mapping[str, Tensor]) -> None:
        self.levels.observe(noisy)

    def state(self) -> dict[str, Any]:
        return {**super().state(), **self.levels.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.levels.load_state(state)
        super().load_state(state)
