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
_CLOSELY = 24
"""So many steps are compared each with each at every shift."""
_ENTRIES = 2**14
"""So many entries of a sum are looked at for repetitions."""


def check_noise(subject: Subject) -> list[Check]:
    exact = subject.step(subject.base, noise=False)
    size = sum(total.numel() for total in exact.sums.values())
    steps = min(max(_DRAWS // max(size, 1), _STEPS.start), _STEPS.stop)
    raw = [_less(subject.step(subject.base, noise=True).sums, exact.sums) for _ in range(steps)]
    checks = [_spread(name, [noise[name] for noise in raw], exact.stds[name]) for name in exact.sums]
    standard = [_standard(noise, exact.stds) for noise in raw]
    checks.append(_shape(np.concatenate(standard)))
    checks += _tails(np.concatenate(standard))
    checks += [_spread_with(subject, what, sample) for what, sample in (("nobody", []), ("one", subject.base[:1]))]
    checks.append(_independence("noise of different steps", _pairs(standard[:_CLOSELY])))
    checks.append(_all_steps(np.stack(standard)))
    within = [np.stack([noise[name] for noise in raw]) for name in exact.sums]
    checks.append(_independence("noise within a sum", [pair for noise in within for pair in _halves(noise)]))
    if len(exact.sums) > 1:
        pairs = [_joined([_cut(noise[a], noise[b]) for noise in raw]) for a, b in combinations(exact.sums, 2)]
        checks.append(_independence("noise of different sums", pairs))
    met = standard[:_CLOSELY]
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
    claim = 1 / subject.noise_multiplier if subject.noise_multiplier else math.inf
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


def _tails(values: np.ndarray) -> list[Check]:
    """Noise that is cut off looks normal in the middle."""
    from scipy import stats  # noqa: PLC0415 - slow to import

    checks = []
    for limit in (2.0, 3.0):
        rate, found = 2 * stats.norm.sf(limit), int((np.abs(values) > limit).sum())
        p_value = 2 * min(stats.binom.cdf(found, len(values), rate), stats.binom.sf(found - 1, len(values), rate))
        checks.append(
            Check(
                name=f"noise beyond {limit:g} deviations",
                holds=bool(p_value > ERROR) or not values.any(),  # that there is none is said elsewhere
                measured=found / len(values),
                bound=float(rate),
            )
        )
    return checks


def _spread_with(subject: Subject, whom: str, sample: list[Record]) -> Check:
    """Noise must not depend on what it is added to: sums of nobody are zero, and those of one record have zeros."""
    exact = subject.step(sample, noise=False)
    noise = [
        _standard(_less(subject.step(sample, noise=True).sums, exact.sums), exact.stds) for _ in range(_STEPS.start)
    ]
    return _spread(f"all, of {whom}, over the stated", noise, float(any(exact.stds.values())))


def _independence(name: str, pairs: list[tuple[np.ndarray, np.ndarray]]) -> Check:
    """The most correlated pair at any shift; each pair and shift is tested at its share of the error.

    The arrays may have rows, which are shifted alike. To turn b around is to choose another b, of which each p-value
    holds by itself.
    """
    worst, p_value = 0.0, 1.0
    for first, second in pairs:
        a, b = first[..., :_ENTRIES], second[..., :_ENTRIES]
        norms, length = (float(np.linalg.norm(a)), float(np.linalg.norm(b))), a.shape[-1]
        if a.size < 3 or not all(norms):
            continue
        spectrum = (np.fft.rfft(a) * np.fft.rfft(b).conj()).reshape(-1, length // 2 + 1).sum(0)
        inner = min(float(np.abs(np.fft.irfft(spectrum, length)).max()), norms[0] * norms[1])
        worst = max(worst, inner / (norms[0] * norms[1]))
        p_value = min(p_value, correlation_p_value(inner, *norms, a.size) * len(pairs) * length)
    return _independent(name, worst, p_value, f"{len(pairs)} pairs at every shift")


def _all_steps(steps: np.ndarray) -> Check:
    """Every step against every other, in place: noise may come back after many steps."""
    units = steps / np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), 1e-300)
    cosines = np.abs(np.triu(units @ units.T, 1))
    pairs, worst = len(steps) * (len(steps) - 1) // 2, min(1.0, float(cosines.max()))
    p_value = correlation_p_value(worst, 1.0, 1.0, steps.shape[1]) * pairs if steps.shape[1] > 2 else 1.0
    return _independent(f"noise of {len(steps)} steps", worst, p_value, f"{pairs} pairs in place")


def _independent(name: str, worst: float, p_value: float, tested: str) -> Check:
    return Check(
        name=f"independence: {name}",
        holds=p_value > ERROR,
        measured=worst,
        bound=None,
        detail=f"largest correlation of {tested}; p = {min(1.0, p_value):.2g}",
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


def _halves(noise: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """First half against second, and every other entry against its neighbour."""
    half = noise.shape[1] // 2
    return [(noise[:, :half], noise[:, half : 2 * half]), (noise[:, : 2 * half : 2], noise[:, 1 : 2 * half : 2])]


def _joined(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs])
