"""From a budget to a plan: how much noise and how many steps, before the first record is touched."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property

from .accounting import Guarantee, Mechanism, Relation, Spent, count_for, epsilon, noise_for
from .errors import ConfigError
from .sampling import SamplingRule

log = logging.getLogger("privet")

_LARGEST_NOISE = 1e6
_SMALLEST_EPSILON = 1e-6
_LONGEST = 1e9


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run may cost. Any two of: `epsilon`, `noise`, and a length (`epochs` or `steps`); the third is found.

    With all three given, the run ends at the length or before epsilon is exceeded, whichever comes first.
    """

    delta: float
    epsilon: float | None = None
    noise: float | None = None
    """Noise multiplier: standard deviation over sensitivity, all groups taken together."""
    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must lie between 0 and 1 (a common choice is 1/records), and is {self.delta!r}.")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ConfigError(f"epsilon must be positive, and is {self.epsilon!r}.")
        if self.noise is not None and not 0 <= self.noise <= _LARGEST_NOISE:
            raise ConfigError(f"noise must lie between 0 and {_LARGEST_NOISE:g}, and is {self.noise!r}.")
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("Give the length of the run as epochs or as steps, not both.")
        if self.epochs is not None and not 0 < self.epochs <= _LONGEST:
            raise ConfigError(f"epochs must be a positive number of at most {_LONGEST:g}, and is {self.epochs!r}.")
        if self.steps is not None and not (isinstance(self.steps, int) and 0 < self.steps <= _LONGEST):
            raise ConfigError(f"steps must be a positive whole number of at most {_LONGEST:g}, and is {self.steps!r}.")
        length = self.epochs if self.steps is None else self.steps
        if sum(value is not None for value in (self.epsilon, self.noise, length)) < 2:
            raise ConfigError(
                "A budget needs two of three: epsilon, a noise multiplier, and a length (epochs or steps); the third "
                "is then found."
            )

    def length(self, sampling: SamplingRule, records: int) -> int | None:
        """The wanted number of steps, if the budget names one."""
        if self.epochs is not None:
            return max(1, round(self.epochs * sampling.steps_per_epoch(records)))
        return self.steps


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do, all of it public."""

    mechanism: Mechanism
    steps: int
    units: int
    """Compositions of the mechanism that the steps cost."""
    limit: int | None
    """Compositions that the budget allows; None when no epsilon was set."""
    delta: float
    before: Spent = ()
    """What the run pays for beside its steps."""

    @cached_property
    def guarantee(self) -> Guarantee:
        """What all of it costs. Found when it is first asked for: the accountant is slow to load."""
        return epsilon([*self.before, (self.mechanism, self.units)], self.delta)

    @property
    def epsilon(self) -> float:
        return self.guarantee.epsilon

    @property
    def accountant(self) -> str:
        return self.guarantee.accountant


def steps_within(units: int, sampling: SamplingRule, records: int) -> int:
    """How many steps from the first one on so many compositions pay for."""
    return units * (sampling.steps_per_epoch(records) if sampling.units(2, records) == 1 else 1)


def plan(
    budget: Budget,
    sampling: SamplingRule,
    *,
    records: int,
    relation: Relation = "add_remove",
    discrete: bool = False,
    before: Spent = (),
) -> Plan:
    """Formal guarantee: `before` and `steps` steps together cost at most `epsilon`, which is at most the budget's."""
    sampling.check(records, relation)
    if before and budget.epsilon is not None:
        paid = epsilon(before, budget.delta).epsilon
        if paid >= budget.epsilon:
            raise ConfigError(
                f"What is asked of all records before training costs epsilon {paid:.4g} at delta {budget.delta:g}, and "
                f"the whole run may cost {budget.epsilon:g}. Give it more noise, or raise epsilon."
            )
    steps = budget.length(sampling, records)

    def mechanism(noise: float) -> Mechanism:
        return sampling.mechanism(records=records, noise_multiplier=noise, relation=relation, discrete=discrete)

    limit: int | None = None
    if budget.noise is None:
        assert steps is not None and budget.epsilon is not None
        limit = sampling.units(steps, records)
        hopeless = budget.epsilon < _SMALLEST_EPSILON
        noise = math.inf if hopeless else noise_for(mechanism(1.0), limit, budget.epsilon, budget.delta, before=before)
        if not noise <= _LARGEST_NOISE:
            raise ConfigError(
                f"No usable noise meets epsilon {budget.epsilon:g} at delta {budget.delta:g} over {steps} steps: its "
                f"multiplier would be above {_LARGEST_NOISE:g}. Raise epsilon or shorten the run."
            )
        chosen = mechanism(noise)
    else:
        chosen = mechanism(budget.noise)
        if budget.epsilon is not None:
            limit = count_for(chosen, budget.epsilon, budget.delta, before=before)
            if limit == 0:
                raise ConfigError(
                    f"With noise {budget.noise:g} not a single step fits into epsilon {budget.epsilon:g} at delta "
                    f"{budget.delta:g}. Raise the noise or the budget, or lower the batch size."
                )
            most = steps_within(limit, sampling, records)
            if steps is not None and steps > most:
                log.warning(
                    "Epsilon %g at noise %g allows %d of the %d steps asked for: the run will end there. More noise "
                    "makes it longer.",
                    budget.epsilon,
                    budget.noise,
                    most,
                    steps,
                )
            steps = most if steps is None else min(steps, most)
    assert steps is not None
    units = sampling.units(steps, records)
    return Plan(mechanism=chosen, steps=steps, units=units, limit=limit, delta=budget.delta, before=tuple(before))
