"""The one-run audit of a whole training (Steinke, Nasr, Jagielski 2023; Mahloujifar, Melis, Chaudhuri 2024).

Each of many canaries is in or out of the training by its own fair coin. From what the training released the auditor
ranks them and guesses the coins of those he is surest of; how many guesses are right bounds the privacy from below.

- *Gradient canaries* (white box): a canary adds to each sum a vector of its own, as long as a record is allowed to
  move that sum, and the auditor sees every step's gradient. This is the strongest canary there is for the accountant,
  the noise and the sampling, and it does not depend on the model.
- *Input canaries* (black box): mislabelled records and records of pure noise go through the model like all others,
  and the auditor sees the losses of the last model only. This is what an outsider could do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..accounting import trade_off
from ..errors import ConfigError
from ..methods import Query
from ..run import Run
from .accountant import check_accounting
from .report import Check
from .statistics import gdp_epsilon, one_run_ceiling, one_run_epsilon, one_run_f_dp_rejects, one_run_mu
from .subject import MethodSubject, Record, gradient_sum

ERROR = 1e-4
"""The probability that a sound training is called broken."""
_RECORDS = 64
_EPOCHS = 6
_RATE = 0.5
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 1.0)

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """What one training gave away about its canaries."""

    kind: Literal["gradient", "input"]
    canaries: int
    guesses: int
    correct: int
    claimed: float
    lower_bound: float
    """Epsilon at the claim's delta, by the binomial bound."""
    mu: float
    """The largest μ at which a Gaussian trade-off curve is refuted: the tighter f-DP form."""
    ceiling: float
    """The epsilon that the test would show if every guess of every canary were right."""
    checks: list[Check]


def audit_in_one_run(
    subject: MethodSubject,
    kind: Literal["gradient", "input"] = "gradient",
    canaries: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> OneRun:
    """Trains once with canaries, and compares what can be guessed with what the run claims.

    `confidence` is that of the reported lower bound; the training is called broken at `ERROR` only.
    """
    if canaries < 2:
        raise ConfigError(f"canaries must be at least 2, and is {canaries}: from fewer nothing can be told.")
    random = np.random.default_rng(seed)
    ordinary = subject.records[:_RECORDS]
    if kind == "gradient":
        widest = max(total.numel() for total in subject.step([], noise=False).sums.values())
        canaries = max(2, min(canaries, widest))  # one coordinate for each, where there are so many
        made: list[Record] = [Record(len(ordinary) + i, ordinary[0].x, ordinary[0].y) for i in range(canaries)]
    else:
        made = _strange(subject, canaries, random)
    present = random.random(canaries) < 0.5
    data = _Slots([*ordinary, *made], inert=[False] * len(ordinary) + [kind == "gradient" or not p for p in present])
    sampling = replace(subject.sampling, batch=max(1, round(_RATE * len(data))))
    steps = _EPOCHS * sampling.steps_per_epoch(len(data))
    with subject.new_run(data, sampling=sampling, steps=steps) as run:
        watch = _GradientCanaries(run, data, len(ordinary), present) if kind == "gradient" else None
        before = _losses(subject, run.model, made)
        _train(subject, run, data, watch)
        scores = watch.scores if watch else before - _losses(subject, run.model, made)
        claim = run.guarantee()
        spent = [(run.plan.mechanism, run.units_spent)]
    claimed_curve = _from_below(lambda alphas: np.asarray(trade_off(spent, alphas)))
    guesses = _best_number_of_guesses(canaries, claim.epsilon, claim.delta)
    correct = _right_guesses(scores, present, guesses)
    surely = one_run_epsilon(canaries, guesses, correct, claim.delta, ERROR)
    refuted = one_run_f_dp_rejects(canaries, guesses, correct, claimed_curve, ERROR)
    ceiling = one_run_ceiling(canaries, claim.delta, 1 - confidence)
    where = f"{kind} canaries: {correct} of {guesses} guesses right, {canaries} canaries"
    checks = [
        Check(
            name=f"one training with {kind} canaries",
            holds=surely <= claim.epsilon,
            measured=surely,
            bound=claim.epsilon,
            detail=f"{where}; the most that so many can show is epsilon {ceiling:.3g}",
        ),
        Check(
            name=f"one training with {kind} canaries, against the claimed trade-off curve",
            holds=not refuted,
            measured="refuted" if refuted else "not refuted",
            bound=None,
            detail=where,
        ),
    ]
    if kind == "gradient":
        checks.append(check_accounting(spent[0][0], run.sampling.units(steps, len(data)), claim.epsilon, claim.delta))
    return OneRun(
        kind=kind,
        canaries=canaries,
        guesses=guesses,
        correct=correct,
        claimed=claim.epsilon,
        lower_bound=one_run_epsilon(canaries, guesses, correct, claim.delta, 1 - confidence),
        mu=one_run_mu(canaries, guesses, correct, 1 - confidence),
        ceiling=ceiling,
        checks=checks,
    )


class _Slots(Dataset[tuple[Tensor, Tensor, bool]]):
    """Ordinary records and canaries; an inert one has a loss that is not a number, and so contributes nothing."""

    def __init__(self, records: list[Record], inert: list[bool]) -> None:
        self.records, self.inert = records, inert
        self.taken: list[int] = []

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor, bool]:
        self.taken.append(position)
        record = self.records[position]
        return record.x, record.y, self.inert[position]


class _GradientCanaries:
    """Adds the canaries of a step's sample to its sums, and reads them off the gradients that come out."""

    def __init__(self, run: Run, data: _Slots, first: int, present: npt.NDArray[np.bool_]) -> None:
        self.run, self.data, self.first, self.present = run, data, first, present
        self.scores: _Array = np.zeros(len(present))
        self._queries: list[Query] = []
        finish = run.session.finish

        def with_canaries() -> list[Query]:
            self._queries = finish()
            for query in self._queries:
                for canary in self._sampled(query):
                    query.total[canary] += query.sensitivity.add_remove
            return self._queries

        run.session.finish = with_canaries  # type: ignore[method-assign]

    def _sampled(self, query: Query) -> list[int]:
        numbers = [position - self.first for position in self.data.taken]
        return [i for i in numbers if 0 <= i < min(len(self.present), query.total.numel()) and self.present[i]]

    def read(self) -> None:
        """Weighs each canary's own coordinate of what was released, as a matched filter does."""
        for query in self._queries:
            if query.group is None:
                continue
            released = gradient_sum(query, self.run.sampling.batch)
            seen = released[: len(self.present)].numpy() * query.sensitivity.add_remove
            self.scores[: len(seen)] += seen


def _train(subject: MethodSubject, run: Run, data: _Slots, watch: _GradientCanaries | None) -> None:
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.2)
    for _ in range(_EPOCHS):
        data.taken = []
        for step in run.loader:
            for x, y, *inert in step:  # public records, where there are such, come without a mark
                losses = subject.loss(run.model, x, y)
                step.backward(torch.where(inert[0], torch.nan, losses) if inert else losses)
            if watch is not None:
                watch.read()
            data.taken = []
            optimizer.step()


def _strange(subject: MethodSubject, count: int, random: np.random.Generator) -> list[Record]:
    """Half mislabelled records, half pure noise with a label (tokens at random where inputs are tokens)."""
    base = subject.records
    seen = torch.stack([record.x for record in base]).flatten()
    made = []
    for i in range(count):
        one, other = base[int(random.integers(len(base)))], base[int(random.integers(len(base)))]
        x = one.x
        if i % 2 and x.is_floating_point():
            x = torch.from_numpy(random.normal(size=tuple(x.shape))).to(x) * 2
        elif i % 2:
            x = seen[torch.from_numpy(random.integers(len(seen), size=tuple(x.shape)))]
        made.append(Record(len(base) + i, x, other.y))
    return made


def _losses(subject: MethodSubject, model: nn.Module, records: list[Record]) -> _Array:
    was = model.training
    with torch.no_grad():
        model.eval()
        found = subject.loss(model, torch.stack([r.x for r in records]), torch.stack([r.y for r in records]))
        model.train(was)
    return np.asarray(np.nan_to_num(found.double().numpy()))


def _right_guesses(scores: _Array, present: npt.NDArray[np.bool_], guesses: int) -> int:
    """The highest half of the guesses says in, the lowest says out."""
    order = np.argsort(scores, kind="stable")
    out, inside = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    return int((~present[out]).sum() + present[inside].sum())


def _best_number_of_guesses(canaries: int, epsilon: float, delta: float) -> int:
    """Fixed before the training: what would show most of a mechanism that is exactly as private as claimed.

    Scores are taken for those of a Gaussian mechanism of that epsilon; a wrong choice costs power, not validity.
    """
    mu = next((m / 8 for m in range(1, 80) if gdp_epsilon(m / 8, delta) >= epsilon), 10.0)
    random = np.random.default_rng(1)
    present = random.random(4000) < 0.5
    scores = random.normal(size=4000) + mu * present

    def shown(share: float) -> float:
        right = _right_guesses(scores, present, round(share * 4000)) / round(share * 4000)
        guesses = min(canaries, max(2, round(share * canaries)))
        return one_run_epsilon(canaries, guesses, math.floor(right * guesses), delta, 0.05)

    return min(canaries, max(2, round(max(_SHARES, key=lambda share: (shown(share), share)) * canaries)))


def _from_below(curve: Callable[[_Array], _Array]) -> Callable[[_Array], _Array]:
    """A trade-off curve as a step function that is never above it, as it falls."""
    ends = np.geomspace(1e-9, 0.1, 400)  # fine at both: a rare outcome is one near 1
    grid = np.concatenate([ends, np.linspace(0.1, 0.9, 400)[1:-1], 1 - ends[::-1], [1.0]])
    values = curve(grid)

    def below(alphas: _Array) -> _Array:
        position = np.searchsorted(grid, alphas, side="left")
        return np.where(position < len(grid), values[np.minimum(position, len(grid) - 1)], 0.0)

    return below
