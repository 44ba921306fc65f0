"""The noise check: the noise in what a step released has its stated distribution, and none of it is used twice.

All is measured from outside: the release for a sample less what the same step gives with the noise off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations

import numpy as np
from torch import Tensor

from .report import Check
from .statistics import correlation_p_value, gaussian_mu_lower, gdp_epsilon, variance_p_value
from .subject import Record, Subject

ERROR = 1e-6
"""The probability that a check of a sound mechanism fails by chance."""
_DRAWS = 20_000
_STEPS = range(24, 200)
_TRIALS = 300


def check_noise(subject: Subject) -> list[Check]:
    exact = subject.step(subject.base, noise=False)
    size = sum(total.numel() for total in exact.sums.values())
    steps = min(max(_DRAWS // max(size, 1), _STEPS.start), _STEPS.stop)
    raw = [_less(subject.step(subject.base, noise=True).sums, exact.sums) for _ in range(steps)]
    checks = [_spread(name, [noise[name] for noise in raw], exact.stds[name]) for name in exact.sums]
    standard = [_standard(noise, exact.stds) for noise in raw]
    checks.append(_shape(np.concatenate(standard)))
    checks.append(_independence("noise of different steps", _pairs(standard[:24])))
    checks.append(_independence("noise within a sum", [_halves(noise[name]) for noise in raw for name in noise]))
    if len(exact.sums) > 1:
        pairs = [_joined([_cut(noise[a], noise[b]) for noise in raw]) for a, b in combinations(exact.sums, 2)]
        checks.append(_independence("noise of different sums", pairs))
    met = standard[:24]
    for what, outcome in subject.restarts():
        again = _less(outcome.sums, exact.sums)
        fresh = _standard(again, exact.stds)
        checks.append(_independence(f"noise {what}", [(noise, fresh) for noise in met]))
        met.append(fresh)
    return checks


def check_two_worlds(subject: Subject, record: Record) -> tuple[Check, float, float]:
    """The matched filter: steps with and without the worst record, told apart by the best test there is for Gaussians.

    The release is projected on the difference that the record makes, and the threshold lies half-way. From the errors
    of that test follows a lower bound on μ of the mechanism, with Clopper and Pearson's exact intervals; the claim for
    one step is μ ≤ 1/σ. Gives the check, and the claim and the lower bound as an epsilon of one step.
    """
    without, with_it = subject.base, [record, *subject.base]
    exact = subject.step(without, noise=False)
    moved = _less(subject.step(with_it, noise=False).sums, exact.sums)
    weights = {n: moved[n] / exact.stds[n] ** 2 if exact.stds[n] else moved[n] * 1e12 for n in moved}
    half = sum(float(weights[n] @ moved[n]) for n in moved) / 2

    def seems_present(sample: list[Record]) -> bool:
        noisy = _less(subject.step(sample, noise=True).sums, exact.sums)
        return sum(float(weights[n] @ noisy[n]) for n in noisy) > half

    false_positives = sum(seems_present(without) for _ in range(_TRIALS))
    false_negatives = sum(not seems_present(with_it) for _ in range(_TRIALS))
    found = gaussian_mu_lower(false_positives, false_negatives, _TRIALS, _TRIALS, ERROR)
    claim = 1 / subject.noise_multiplier
    check = Check(
        name="two worlds, told apart by a matched filter",
        holds=found <= claim,
        measured=found,
        bound=claim,
        detail=f"lower bound on μ of one step; {false_positives} and {false_negatives} errors in {_TRIALS} trials each",
    )
    return check, gdp_epsilon(claim, subject.delta), gdp_epsilon(found, subject.delta)


def _spread(name: str, draws: list[np.ndarray], std: float) -> Check:
    values = np.concatenate(draws)
    squares = float(values @ values)
    measured = math.sqrt(squares / len(values))
    right = measured == 0 if std == 0 else variance_p_value(squares, len(values), std**2) > ERROR
    return Check(
        name=f"spread of the noise in '{name}'",
        holds=bool(right),
        measured=measured,
        bound=std,
        detail=f"chi-square over {len(values)} draws",
    )


def _shape(values: np.ndarray) -> Check:
    """Kolmogorov and Smirnov's distance from the normal distribution of the same spread."""
    from scipy import stats  # noqa: PLC0415 - slow to import

    spread = math.sqrt(float(values @ values) / len(values))
    found = stats.kstest(values / spread, "norm") if spread else None
    return Check(
        name="shape of the noise",
        holds=found is not None and bool(found.pvalue > ERROR),
        measured=1.0 if found is None else float(found.statistic),
        bound=float(stats.kstwo.isf(ERROR, len(values))),
        detail="largest distance from the normal distribution function" if found else "there is no noise",
    )


def _independence(name: str, pairs: list[tuple[np.ndarray, np.ndarray]]) -> Check:
    """The most correlated pair; each is tested at its share of the error."""
    worst, p_value = 0.0, 1.0
    for a, b in pairs:
        norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        if len(a) < 3 or not all(norms):
            continue
        p = correlation_p_value(float(a @ b), *norms, len(a)) * len(pairs)
        if p < p_value:
            worst, p_value = abs(float(a @ b)) / (norms[0] * norms[1]), p
    return Check(
        name=f"independence: {name}",
        holds=p_value > ERROR,
        measured=worst,
        bound=None,
        detail=f"largest correlation of {len(pairs)} pairs; p = {min(1.0, p_value):.2g}",
    )


def _less(noisy: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: (noisy[name].double() - exact[name].double()).numpy() for name in exact}


def _standard(noise: Mapping[str, np.ndarray], stds: Mapping[str, float]) -> np.ndarray:
    """Of all sums that are to have noise; where none is, of all."""
    return np.concatenate([noise[n] / stds[n] for n in noise if stds[n]] or list(noise.values()))


def _pairs(vectors: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(a, b) for i, a in enumerate(vectors) for b in vectors[:i]]


def _cut(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    size = min(len(a), len(b))
    return a[:size], b[:size]


def _halves(noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    half = len(noise) // 2
    return noise[:half], noise[half : 2 * half]


def _joined(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])
