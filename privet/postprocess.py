"""Denoising: a better guess of the sum from the noisy sum alone, which is free (rule 11). It works after any method.

Of each entry it is known that y = x + noise of deviation s, both divided by the public batch size as p.grad is, and
that |x| ≤ b: no entry of a mean of vectors clipped to norm C is above C, and of ternary ones none is above min(1, C).
(After a Poisson sample the divisor is the expected size, so x may be above b now and then; that costs accuracy only.)
Nasr, Shokri and Houmansadr (2020) tell three hypotheses apart:

    D: −b ≤ x < −ν        S: |x| ≤ ν        U: ν < x ≤ b

**Units.** The paper's algorithm 1 works on the sum and steps by it, while p.grad holds the sum divided by the batch
size B. Its ν (0.01, about what one record adds to an entry) is ν/B here, and its learning rate η is η·B.

Each is a range of x, so Bayes' rule needs a prior within it, which the paper does not name. Here x is uniform in its
range. With Φ the normal distribution function and (l, u) the ends of the range of h, the likelihood is

    p(y | h) = (Φ((u − y)/s) − Φ((l − y)/s)) / (u − l),

in which the known bound is used; p(h | y) is p(y | h)·p(h) over the sum of the three. (In the paper's (8) to (10), ν
stands where y must.) Two answers:

- `hard`, the paper's algorithm 3: ν if U is more likely than each of the others, −ν if D is, else 0.
- `posterior`: E[x | y] = Σ_h p(h | y)·E[x | y, h], with the mean of a normal cut off at (l, u) for each h. No function
  of y has a smaller mean squared error under this prior.

The p(h) are equal, given, or

- `flat`: in proportion to the ranges, so that x is uniform within its bound as a whole. For a ν far below the noise,
  as the paper's is, that differs much from equal ones. Those hold all sums above ν for no more likely than a sliver
  around 0, so that all but the largest y become 0; under flat ones nearly every y becomes ν or −ν, by its sign.
- `public`: those under which a clean gradient over public records is most likely (`public_priors`).
- `tracked`: they move towards the mean of p(h | y) over the entries of a parameter after each step, which is a step of
  expectation maximisation on the noisy history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .errors import CheckpointError, ConfigError
from .step import Release

Priors = tuple[float, float, float]
"""p(D), p(S) and p(U)."""
Named = Literal["equal", "flat", "public", "tracked"]

EQUAL: Priors = (1 / 3, 1 / 3, 1 / 3)
_ROUNDS = 200
"""Of expectation maximisation on public values."""
_LEAST = 1e-12
"""Of a prior: a hypothesis that is ruled out for good leaves nothing to choose from where only it explains y."""


class Denoise:
    """A post-processor: ``privet.Run(…, post=[privet.Denoise("posterior")])``.

    Args:
        rule: `hard` (the paper's −ν, 0 or ν) or `posterior` (the posterior mean).
        threshold: ν, in the units of p.grad; by default one deviation of the noise in it.
        bound: b, in the same units.
        priors: `equal`, `flat`, `tracked`, `public` (equal until `learn` was called), or p(D), p(S), p(U), the same for
            all parameters or by parameter name. By default `flat` for `hard`, which learns nothing with equal ones
            unless the bound is about as small as the noise, and `equal` for `posterior`, which flat ones leave idle.
        rate: how far tracked priors move in each step.

    Formal guarantee: what it does is a function of releases and public records alone, so it costs nothing. Priors that
    it tracked or learned belong into a checkpoint: `run.save(path, denoise=denoise)`.
    """

    def __init__(
        self,
        rule: Literal["hard", "posterior"] = "posterior",
        *,
        threshold: float | None = None,
        bound: float = 1.0,
        priors: Named | Sequence[float] | Mapping[str, Sequence[float]] | None = None,
        rate: float = 0.1,
    ) -> None:
        if rule not in ("hard", "posterior"):
            raise ConfigError(f"The rule of denoising must be 'hard' or 'posterior', and is {rule!r}.")
        if not 0 < bound < math.inf:
            raise ConfigError(f"The bound of denoising must be a positive number, and is {bound!r}.")
        if threshold is not None and not 0 < threshold < bound:
            raise ConfigError(
                f"The threshold of denoising must lie between 0 and its bound, {bound!r}, and is {threshold!r}."
            )
        if not 0 < rate <= 1:
            raise ConfigError(f"The rate of tracked priors must be above 0 and at most 1, and is {rate!r}.")
        if priors is None:
            priors = "flat" if rule == "hard" else "equal"
        self.rule, self.threshold, self.bound, self.rate = rule, threshold, bound, rate
        self.tracked = priors == "tracked"
        self._flat = priors == "flat"
        self._of_all = EQUAL
        self._by_name: dict[str, Priors] = {}
        self._public: dict[str, Tensor] = {}
        """What is still to be learned from: which threshold it is counted by, the next release says."""
        if isinstance(priors, Mapping):
            self._by_name = {name: _checked(given) for name, given in priors.items()}
        elif not isinstance(priors, str):
            self._of_all = _checked(priors)
        elif priors not in get_args(Named):
            raise ConfigError(
                f"priors must be one of {', '.join(get_args(Named))} or three numbers, and are {priors!r}."
            )

    def priors(self, name: str) -> Priors:
        """What is held of this parameter's entries before they are seen, unless that is flat."""
        return self._by_name.get(name, self._of_all)

    def learn(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes priors from a gradient over public records, as `Run.public_gradient` gives it: in each epoch, say."""
        self._public = dict(gradients)

    def __call__(self, release: Release) -> None:
        for name, total in release.gradients.items():
            std = release.stds[name]
            if std == 0:
                continue
            of_mean = self._hypotheses(std / release.batch)
            if (clean := self._public.pop(name, None)) is not None:
                self._by_name |= public_priors({name: clean}, threshold=of_mean.threshold, bound=of_mean.bound)
            three, priors = of_mean.scaled(release.batch), of_mean.shares if self._flat else self.priors(name)
            y = three.in_reach(total.double(), std)
            joint = three.joint(y, std, priors)
            total.copy_(three.hardest(joint) if self.rule == "hard" else three.mean(y, std, priors, joint))
            if self.tracked:
                now = _shares(joint)
                self._by_name[name] = _checked([p + self.rate * (q - p) for p, q in zip(priors, now, strict=True)])

    def _hypotheses(self, std: float) -> Hypotheses:
        return Hypotheses(min(std, self.bound / 2) if self.threshold is None else self.threshold, self.bound)

    def state_dict(self) -> dict[str, Any]:
        return {"priors": {name: list(held) for name, held in self._by_name.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state.get("priors"), Mapping):
            raise CheckpointError("The checkpoint holds no priors of denoising.")
        self._by_name = {name: _checked(held) for name, held in state["priors"].items()}


@dataclass(frozen=True)
class Hypotheses:
    """The three ranges of x, and what a noisy value says about them."""

    threshold: float
    bound: float

    def scaled(self, factor: float) -> Hypotheses:
        return Hypotheses(self.threshold * factor, self.bound * factor)

    @property
    def shares(self) -> Priors:
        """How much of [−b, b] each range is."""
        outer = (self.bound - self.threshold) / (2 * self.bound)
        return outer, self.threshold / self.bound, outer

    def in_reach(self, y: Tensor, std: float) -> Tensor:
        """What noise explains, to one in 10^15: farther out, the probabilities below would vanish all together."""
        reach = self.bound + 8 * std
        return y.clamp(-reach, reach)

    @property
    def _edges(self) -> tuple[float, float, float, float]:
        return -self.bound, -self.threshold, self.threshold, self.bound

    def _densities(self, priors: Priors) -> Priors:
        """Of x in each of the ranges."""
        outer = self.bound - self.threshold
        return priors[0] / outer, priors[1] / (2 * self.threshold), priors[2] / outer

    def joint(self, y: Tensor, std: float, priors: Priors) -> Tensor:
        """p(y | h)·p(h) for D, S and U, on a new first axis.

        Of |y|, and turned around for a negative y: the distribution function keeps its digits in its left tail only.
        """
        size, positive = y.abs(), y >= 0
        below = [torch.erfc((size - edge) / (std * math.sqrt(2))).div_(2) for edge in self._edges]
        against, within, along = (high - low for low, high in pairwise(below))
        down, up = torch.where(positive, against, along), torch.where(positive, along, against)
        densities = self._densities(priors)
        return torch.stack([mass.mul_(p) for mass, p in zip((down, within, up), densities, strict=True)])

    def hardest(self, joint: Tensor) -> Tensor:
        """ν, −ν or 0 by the most likely hypothesis."""
        down, stay, up = joint
        rises, falls = (up > down) & (up > stay), (down > up) & (down > stay)
        signs: Tensor = rises.to(up.dtype) - falls.to(up.dtype)
        return signs * self.threshold

    def mean(self, y: Tensor, std: float, priors: Priors, joint: Tensor) -> Tensor:
        """E[x | y] = y + s·Σ_h density_h·(φ(l_h) − φ(u_h)) / Σ_h joint_h, with φ the normal density at (edge − y)/s."""
        d, s, u = self._densities(priors)
        tilt = torch.zeros_like(y)
        for edge, step in zip(self._edges, (d, s - d, u - s, -u), strict=True):
            tilt += step * torch.exp(-((edge - y) / std).square_() / 2)
        found = y + tilt.mul_(std / math.sqrt(2 * math.pi)).div_(joint.sum(0))
        return found.clamp_(-self.bound, self.bound)


def public_priors(
    gradients: Mapping[str, Tensor], *, threshold: float, bound: float = 1.0, std: float = 0.0
) -> dict[str, Priors]:
    """The p(h) of each parameter by maximum likelihood, from mean gradients (as in p.grad) over public records.

    Clean ones (`std` 0) are counted. Of noisy ones the range is not seen, and the likelihood of all of them, which is
    concave in p(h), is climbed by expectation maximisation.
    """
    if not 0 < threshold < bound:
        raise ConfigError(f"threshold must lie between 0 and the bound, {bound!r}, and is {threshold!r}.")
    if not 0 <= std < math.inf:
        raise ConfigError(f"std must be a number of at least 0, and is {std!r}.")
    three = Hypotheses(threshold, bound)
    found: dict[str, Priors] = {}
    for name, gradient in gradients.items():
        y = gradient.detach().double().flatten()
        if not len(y) or not bool(torch.isfinite(y).all()):
            raise ConfigError(f"The public gradient of '{name}' is empty or not finite: leave it out.")
        if std == 0:
            down, up = float((y < -threshold).double().mean()), float((y > threshold).double().mean())
            found[name] = _checked([down, 1 - down - up, up])
            continue
        found[name] = EQUAL
        for _ in range(_ROUNDS):
            found[name] = _checked(_shares(three.joint(three.in_reach(y, std), std, found[name])))
    return found


def _shares(joint: Tensor) -> list[float]:
    """The mean of p(h | y) over all entries."""
    shares: list[float] = (joint / joint.sum(0)).flatten(1).mean(1).tolist()
    return shares


def _checked(priors: Sequence[float]) -> Priors:
    """Three probabilities, none below the least."""
    given = [float(p) for p in priors]
    if len(given) != 3 or not all(0 <= p <= 1 + 1e-6 for p in given) or not math.isclose(sum(given), 1, rel_tol=1e-6):
        raise ConfigError(f"Priors are three probabilities, of D, S and U, that add up to 1, and are {priors!r}.")
    d, s, u = (max(p, _LEAST) for p in given)
    return d, s, u
