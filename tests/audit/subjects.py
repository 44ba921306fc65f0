"""Subjects whose truth is known, for the tests of the checks: a method of a user's own, and one that is only noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privet.audit import Check, MethodSubject, Outcome, Record, Subject
from privet.gradients import Recorder
from privet.methods import Method, ParameterGroup, Query, Sensitivity, Session, Setting, option
from privet.methods.base import trainable
from privet.noise import Allocation


def keys_from_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture for files that draw noise: no test fails by chance, however small it is."""
    monkeypatch.setattr("os.urandom", random.Random(7).randbytes)


def network(*, bias: bool = True, width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width, bias=bias), nn.Tanh(), nn.Linear(width, 3, bias=bias))


def records(count: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def failed(checks: Sequence[Check]) -> list[str]:
    return [check.name for check in checks if not check.holds]


# A method of a user's own, known to nobody


Bound = Callable[[Tensor], Tensor]


def to_length_one(gradient: Tensor) -> Tensor:
    length = float(gradient.double().norm())
    return gradient * min(1.0, 0.9999 / max(length, 1e-30)) if math.isfinite(length) else torch.zeros_like(gradient)


@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    """Each record adds bound(its gradient), of which Mine says that its length is at most 1."""

    name = "mine"
    summary = "a user's own"

    bound: Bound = option(to_length_one, "what a record adds")
    replaced: float = option(2.0, "what it says of a replaced record")
    said: Callable[[int], Any] = option(lambda records: None, "called with the number of records of a step")
    kept: bool = option(False, "whether the number of records is a part of its state")
    twice: int = option(10**9, "from so many records on, there are two sums")
    allocation: Allocation = option("isotropic", "how noise is shared")

    def open(self, model: nn.Module, setting: Setting) -> Session:
        return MySession(self, model)


class MySession(Session):
    def __init__(self, method: Mine, model: nn.Module) -> None:
        self.method, self.group, self.recorder = method, ParameterGroup("all", trainable(model)), Recorder(model)
        self.seen = 0

    def listening(self) -> AbstractContextManager[None]:
        return self.recorder.recording()

    def begin(self) -> None:
        self.group.total.zero_()
        self.seen = 0

    def add(self, losses: Tensor) -> None:
        self.seen += len(losses)
        gradients = self.recorder.backward(losses)
        with torch.no_grad():
            rows = torch.cat([gradients[name].dense().flatten(1) for name in self.group.parameters], 1)
            self.group.total += torch.stack([self.method.bound(row) for row in rows]).sum(0)

    def finish(self) -> list[Query]:
        self.method.said(self.seen)
        bound = Sensitivity(add_remove=1.0, replace_one=self.method.replaced)
        more = [Query("more", torch.zeros(1), bound)] if self.seen >= self.method.twice else []
        return [Query("all", self.group.total, bound, group=self.group), *more]

    def state(self) -> dict[str, Any]:
        return {"records": self.seen} if self.method.kept else {}

    def close(self) -> None:
        self.recorder.close()


def mine(model: nn.Module | None = None, data: tuple[Tensor, Tensor] | None = None, **options: Any) -> MethodSubject:
    return MethodSubject(Mine(**options), model or network(), data or records())


# A subject that only exists here


class Stub(Subject):
    """Sums of these sizes with these deviations; `draw(step)` gives the standardised noise of all."""

    name, relation, basis, delta = "stub", "add_remove", "add_remove", 1e-5
    noise_multiplier = 1.0

    def __init__(
        self,
        draw: Callable[[int], np.ndarray],
        sizes: Sequence[int] = (60, 40),
        stds: Sequence[float] = (2.0, 0.5),
        mu: float = 1.0,
    ) -> None:
        self.base = [Record(i, torch.zeros(2), torch.tensor(0)) for i in range(3)]
        self.draw, self.sizes, self.declared, self.mu = draw, sizes, stds, mu
        self.taken = 0
        self.again: list[int] = []

    def restarts(self) -> Iterator[tuple[str, Outcome]]:
        for number, step in enumerate(self.again):
            self.taken = step
            yield f"of restart {number}", self.step(self.base, noise=True)

    def step(self, sample: Sequence[Record], *, noise: bool) -> Outcome:
        ends = np.cumsum(self.sizes)
        parts = np.split(self.draw(self.taken), ends[:-1]) if noise else [np.zeros(n) for n in self.sizes]
        self.taken += noise
        shift = self.mu * len(sample) / math.sqrt(len(self.sizes))
        sums = {}
        for i, (part, std) in enumerate(zip(parts, self.declared, strict=True)):
            sums[f"sum {i}"] = torch.from_numpy(std * part).clone()
            sums[f"sum {i}"][i] += std * shift
        return Outcome(
            sums=sums,
            sensitivities={name: {"add_remove": 1.0, "replace_one": 2.0} for name in sums},
            stds=dict(zip(sums, self.declared, strict=True)),
        )


def gaussian(seed: int, factor: float = 1.0, size: int = 100) -> Callable[[int], np.ndarray]:
    generator = np.random.default_rng(seed)
    return lambda step: factor * generator.normal(size=size)
