"""The statistics of privacy audits: what may be concluded from counts, sums and scores, and with which error.

Every `error` is a probability of being wrong: a lower bound from here exceeds the truth with at most that
probability, whatever the truth is. Thresholds, and the number of guesses, must be fixed before the outcome is seen;
who tries k of them must give each error / k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from ..errors import ConfigError

Array = npt.NDArray[np.float64]
TradeOff = Callable[[Array], Array]
"""False positive rates to the smallest false negative rates that a test can have."""

# P[Binomial(n, q) ≥ v] and its complement are these at (v, n − v + 1, q).
_TAILS = (special.betainc, special.betaincc)


# Rates of success


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of a success probability: `lower` and `upper`, each with half of the error.

    Formal guarantee: with independent trials of equal probability p, P[low ≤ p ≤ high] ≥ confidence for every p.

    >>> low, high = clopper_pearson(0, 10)
    >>> low, round(high, 4)
    (0.0, 0.3085)
    """
    half = (1 - _probability("confidence", confidence)) / 2
    return lower(successes, trials, half), upper(successes, trials, half)


def lower(successes: int, trials: int, error: float) -> float:
    """The p with P[Binomial(trials, p) ≥ successes] = error; 0 without any success.

    Formal guarantee: it exceeds the true probability in at most a fraction `error` of all experiments.
    """
    _counts(successes=successes, trials=trials)
    _probability("error", error)
    return 0.0 if successes == 0 else float(special.betaincinv(successes, trials - successes + 1, error))


def upper(successes: int, trials: int, error: float) -> float:
    """The p with P[Binomial(trials, p) ≤ successes] = error; 1 without any failure.

    Formal guarantee: it falls below the true probability in at most a fraction `error` of all experiments.
    """
    _counts(successes=successes, trials=trials)
    _probability("error", error)
    return 1.0 if successes == trials else float(special.betainccinv(successes + 1, trials - successes, error))


# From error rates to privacy


def gaussian_mu_lower(
    false_positives: int, false_negatives: int, trials_null: int, trials_alternative: int, error: float
) -> float:
    """Lower bound on μ from a threshold test between two neighbouring data sets, many runs of each.

    A μ-GDP mechanism allows no test with Φ⁻¹(1−α) − Φ⁻¹(β) > μ. Both rates are replaced by their upper limits at
    error / 2.

    Formal guarantee: if the mechanism is μ-GDP, the result exceeds μ with probability at most `error`.
    """
    _probability("error", error)
    alpha = upper(false_positives, trials_null, error / 2)
    beta = upper(false_negatives, trials_alternative, error / 2)
    return max(0.0, float(-special.ndtri(alpha) - special.ndtri(beta)))


def gdp_epsilon(mu: float, delta: float) -> float:
    """The smallest ε at which a μ-GDP mechanism is (ε, δ)-DP, from above and to 1e-12 (relative above 1).

    δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) exactly (Balle and Wang 2018), here in logarithms, so that neither e^ε
    overflows nor a small δ drowns. With delta = 0 it is infinite, as no Gaussian mechanism is ε-DP.

    >>> round(gdp_epsilon(1.0, 1e-5), 3)
    4.377
    """
    if not (math.isfinite(mu) and mu >= 0):
        raise ConfigError(f"mu is {mu!r}: give a finite number that is not negative.")
    _delta(delta)
    if mu == 0:
        return 0.0
    if delta == 0:
        return math.inf

    def log_delta(epsilon: float) -> float:
        first = float(special.log_ndtr(-epsilon / mu + mu / 2))
        second = epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2))
        return first + math.log(-math.expm1(second - first)) if second < first else -math.inf

    goal = math.log(delta)
    return 0.0 if log_delta(0.0) <= goal else _boundary(lambda epsilon: log_delta(epsilon) > goal, 1e-12)[1]


def epsilon_lower_from_rates(fpr_upper: float, fnr_upper: float, delta: float) -> float:
    """Lower bound on ε at δ from upper bounds on the two error rates of one test; at least 0.

    (ε, δ)-DP is fpr·e^ε ≥ 1 − δ − fnr and fnr·e^ε ≥ 1 − δ − fpr (Kairouz, Oh, Viswanath 2015).

    Formal guarantee: wrong only if one of the two upper bounds is.
    """
    for name, rate in (("fpr_upper", fpr_upper), ("fnr_upper", fnr_upper)):
        if not 0 <= rate <= 1:
            raise ConfigError(f"{name} is {rate!r}: give a rate from 0 to 1.")
    _delta(delta)

    def bound(power: float, rate: float) -> float:
        if power <= 0:
            return 0.0
        return math.log(power) - math.log(rate) if rate > 0 else math.inf

    return max(0.0, bound(1 - delta - fnr_upper, fpr_upper), bound(1 - delta - fpr_upper, fnr_upper))


# Is the noise what it claims to be?


def variance_interval(sum_of_squares: float, count: int, error: float) -> tuple[float, float]:
    """Two-sided interval of σ² from `count` independent N(0, σ²): sum / σ² is χ² with `count` degrees of freedom.

    Formal guarantee: P[low ≤ σ² ≤ high] = 1 − error exactly, with error / 2 on each side.
    """
    _sum_of_squares(sum_of_squares, count)
    _probability("error", error)
    half, quantile = error / 2, count / 2
    low = sum_of_squares / (2 * float(special.gammainccinv(quantile, half)))
    return low, sum_of_squares / (2 * float(special.gammaincinv(quantile, half)))


def variance_p_value(sum_of_squares: float, count: int, variance: float) -> float:
    """Two-sided p-value, twice the smaller tail of χ², of the claim that `count` independent normals have `variance`.

    Formal guarantee: if they are N(0, variance), it is uniform on [0, 1].
    """
    _sum_of_squares(sum_of_squares, count)
    if not (math.isfinite(variance) and variance > 0):
        raise ConfigError(f"variance is {variance!r}: give a positive number.")
    half = sum_of_squares / variance / 2
    return 2 * min(float(special.gammainc(count / 2, half)), float(special.gammaincc(count / 2, half)))


def correlation_p_value(inner_product: float, norm_a: float, norm_b: float, count: int) -> float:
    """Two-sided p-value of the claim that two vectors of `count` standard normals are independent.

    With ρ = ⟨a, b⟩ / (‖a‖ ‖b‖), turn b onto the first axis: a stays standard normal, so t = ρ √((n−1) / (1−ρ²)) =
    a₁ / √((a₂² + … + a_n²) / (n−1)) is Student with n−1 degrees of freedom. No mean is subtracted, and the scale of
    either vector does not matter.

    Formal guarantee: under independence it is exactly uniform, if one of the two is N(0, σ²I) for any σ; b may be
    anything.
    """
    if not (norm_a > 0 and norm_b > 0 and count >= 2):
        raise ConfigError("A correlation needs two vectors that are not zero, with two entries or more.")
    rho = inner_product / norm_a / norm_b
    if not abs(rho) <= 1 + 1e-6:
        raise ConfigError(f"The inner product gives a cosine of {rho!r}: it does not belong to vectors of these norms.")
    rest = (1 - rho) * (1 + rho)
    if rest <= 0:
        return 0.0
    return 2 * float(special.stdtr(count - 1, -abs(rho) * math.sqrt((count - 1) / rest)))


# Audits in one run: m canaries, each in or out by its own fair coin; the auditor guesses `guesses` of the coins from
# the output and abstains on the rest.


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Upper bound on P[at least `correct` right guesses] under (ε, δ)-DP, after Steinke, Nasr, Jagielski (2023).

    With m canaries, at most r guesses, W of them right, W̌ ~ Binomial(r, e^ε / (1 + e^ε)) and B_v = P[W̌ ≥ v]:

        P[W ≥ v] ≤ B_v + m δ B_v (1 − B_v) / (v P[W̌ = v]).

    Their Theorem 5.2 has 2 m δ max_{1 ≤ i ≤ m} P[v > W̌ ≥ v − i] / i as its second term. That is larger wherever B_v is
    small, and too small where B_v is near 1 (randomised response that never gets all wrong breaks it at v = 1), so the
    form above is used. It is proved as follows.

    Let there be exactly r guesses (more guesses make no fewer right), p_l = P[W = l] and b_l = P[W̌ = l]. For any set T
    and coin j, with all others fixed, the event that j is guessed as b and a number in T − 1 of the other guesses is
    right has (ε, δ)-close probabilities under the two sides of coin j. The mean over coins, then the sum over j, give
    Σ_{l ∈ T} (l p_l − e^ε (r − l + 1) p_{l−1}) ≤ m δ. With T where the terms are positive: l p_l ≤ e^ε (r − l + 1)
    p_{l−1} + s_l with s_l ≥ 0 and Σ s_l ≤ m δ. As l b_l = e^ε (r − l + 1) b_{l−1}, the ratio g_l = p_l / b_l rises by
    d_l = g_l − g_{l−1} ≤ s_l / (l b_l). From Σ b_l g_l = 1 follows g_0 = 1 − Σ d_k B_k, so that

        P[W ≥ v] = Σ_{l ≥ v} b_l g_l = B_v + Σ_k d_k (B_{max(k, v)} − B_k B_v) ≤ B_v + Σ_k s_k c_k

    with c_k = B_v (1 − B_k) / (k b_k) up to v and B_k (1 − B_v) / (k b_k) from v on. The binomial is log-concave: c
    rises up to v and falls from there, so c_v is the largest, and Σ s_k c_k ≤ m δ c_v. ∎ With δ = 0 randomised response
    attains it; below one half, linear programs over all (ε, δ)-DP mechanisms gave the same value in every case tried.

    Formal guarantee: r and the canaries are fixed in advance and their coins are fair and independent, but nothing is
    assumed about how well the guesses are made.
    """
    _one_run(canaries, guesses, correct)
    _delta(delta)
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon!r}: give a finite number that is not negative.")
    if correct == 0:
        return 1.0
    tail, rest = (float(f(correct, guesses - correct + 1, special.expit(epsilon))) for f in _TAILS)
    if delta == 0:
        return tail
    # B_v / P[W̌ = v] = 1 + P[v + 1] / P[v] + …, by the ratio of neighbours: exact where both underflow.
    above = np.arange(correct, guesses)
    with np.errstate(over="ignore"):
        odds = 1 + float(np.cumprod(np.exp(epsilon) * (guesses - above) / (above + 1)).sum())
    return min(1.0, tail + canaries * delta * rest * odds / correct) if math.isfinite(odds) else 1.0


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """Lower bound on ε at δ: the largest ε at which `one_run_p_value` is at most `error`, to 1e-9 from below; or 0.

    Formal guarantee: if the mechanism is (ε, δ)-DP, the result exceeds ε with probability at most `error`. For let v
    be the smallest count with a result above ε. There an ε' > ε has a p-value of at most `error`; the mechanism is
    also (ε', δ)-DP, so P[W ≥ v] ≤ error. (No monotony of the p-value is needed, only that what is returned is
    rejected.)

    >>> round(one_run_epsilon(1000, 100, 75, 1e-4, 0.05), 3)
    0.695
    """
    _probability("error", error)
    return _boundary(lambda epsilon: one_run_p_value(canaries, guesses, correct, epsilon, delta) <= error, 1e-9)[0]


def one_run_ceiling(canaries: int, delta: float, error: float) -> float:
    """What `one_run_epsilon` gives to an attack that guesses every one of the canaries and is always right.

    No outcome of this audit can show more, so that a claim above it stays untested. With δ = 0 it is the logit of
    error^(1/canaries).

    >>> round(one_run_ceiling(100, 0.0, 0.05), 3)
    3.493
    """
    return one_run_epsilon(canaries, canaries, canaries, delta, error)


def one_run_f_dp_rejects(canaries: int, guesses: int, correct: int, trade_off: TradeOff, error: float) -> bool:
    """Whether that many right guesses refute that the mechanism is f-DP (Mahloujifar, Melis, Chaudhuri 2024).

    `trade_off` is f: convex, not increasing, f(α) ≤ 1 − α, and true of in against out as well as out against in.
    r = `guesses` of m = `canaries` coins are guessed (fewer may be), W of them rightly. Write p_l = P[W = l],

        R_i = Σ_{l ≥ i} p_l · l / m,    H_i = Σ_{l ≥ i} p_l · (r − l) / m,    so R_i + H_i = P[W ≥ i] · r / m.

    *One coin.* Fix all coins but the j-th, and let E be that coin j is guessed as b and at least i − 1 of the other
    guesses are right. Take E for a test of the coin: P[E | coin ≠ b] ≥ f(1 − P[E | coin = b]). The mean over b and
    the other coins, through the convex f, is P[j wrong, W ≥ i − 1] ≥ f(1 − P[j right, W ≥ i]). The mean over j is

        H_{i−1} ≥ f(1 − R_i).                                                                                   (1)

    By definition R_{i−1} = R_i + a_{i−1} (H_{i−1} − H_i) with a_l = l / (r − l), and H_{i−1} ≥ H_i.             (2)

    *Recursion.* Let P[W ≥ c] ≥ τ. From ρ_c = τ c / m and η_c = τ (r − c) / m go down with η_{i−1} = max(η_i,
    f(1 − ρ_i)) and ρ_{i−1} = ρ_i + a_{i−1} (η_{i−1} − η_i). Then at every i ≤ c

        R_i ≥ ρ_i,    R_i − a_i H_i ≥ ρ_i − a_i η_i,    R_i + H_i ≥ ρ_i + η_i.                                  (3)

    At c this is since R_c ≥ a_c H_c and R_c + H_c ≥ τ r / m. From i to i − 1: a falls with i, so the mean of the first
    two of (3) with weights 1 − a_{i−1}/a_i and a_{i−1}/a_i is R_i − a_{i−1} H_i ≥ ρ_i − a_{i−1} η_i, which by (2) is
    the second for i − 1. If η_{i−1} = η_i, then ρ_{i−1} = ρ_i, and the others hold as R and H only grow. Otherwise
    η_{i−1} = f(1 − ρ_i) ≤ f(1 − R_i) ≤ H_{i−1}, and with the second R_{i−1} ≥ ρ_{i−1}. ∎

    As R_0 + H_0 = r / m, from ρ_i + η_i > r / m for any i follows P[W ≥ c] < τ.

    Formal guarantee: an f-DP mechanism is rejected with probability at most τ = `error`: W must reach the smallest
    c that is rejected, and P[W ≥ c] < τ. By (3), more right guesses, a larger error or a larger f reject more.
    """
    _one_run(canaries, guesses, correct)
    _probability("error", error)

    def wrong_at_least(right: float) -> float:
        # One float up, since f falls: rounding 1 − right must not make f larger.
        rate = min(1.0, float(np.nextafter(1 - right, 2.0)))
        return float(np.asarray(trade_off(np.array([rate]))).item())

    return _contradicts(canaries, guesses, correct, wrong_at_least, error)


def one_run_mu(canaries: int, guesses: int, correct: int, error: float) -> float:
    """Lower bound on μ: the largest μ at which `one_run_f_dp_rejects` rejects μ-GDP, to 1e-6 from below; or 0.

    Formal guarantee: if the mechanism is μ-GDP, the result exceeds μ with probability at most `error`, and so does
    `gdp_epsilon(result, delta)` its ε, for all δ at once. If it is not Gaussian, "μ-GDP" is a hypothesis about its
    whole trade-off curve: the result then says which Gaussian curves lie too high, and is no bound on ε.
    """
    _one_run(canaries, guesses, correct)
    _probability("error", error)

    def rejects(mu: float) -> bool:
        # f(1 − y) = Φ(Φ⁻¹(y) − μ), without the rounding of 1 − y.
        return _contradicts(
            canaries, guesses, correct, lambda right: float(special.ndtr(special.ndtri(right) - mu)), error
        )

    return _boundary(rejects, 1e-6)[0]


def _contradicts(
    canaries: int, guesses: int, correct: int, wrong_at_least: Callable[[float], float], error: float
) -> bool:
    """The recursion of `one_run_f_dp_rejects`: does P[W ≥ correct] ≥ error ask for more than all probability?"""
    # A billionth more than all, as the sums below are rounded.
    everything = guesses / canaries * (1 + 1e-9)
    right, wrong = error * correct / canaries, error * (guesses - correct) / canaries
    for level in range(correct - 1, -1, -1):
        needed = wrong_at_least(right)
        if needed <= wrong:
            return False  # and it stays so, as `right` does not change any more
        right += level / (guesses - level) * (needed - wrong)
        wrong = needed
        if right + wrong > everything:
            return True
    return False


# Membership scores: the higher, the more likely a member


@dataclass(frozen=True)
class Auroc:
    """An area under the ROC curve and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TprAt:
    """A true positive rate at a false positive rate; a record counts as a member if its score is above `threshold`."""

    tpr: float
    low: float
    high: float
    threshold: float
    allowed: int
    """How many non-members the wanted rate allows above the threshold: the floor of rate · non-members."""
    fpr: float
    """The rate at which the non-members at hand are above the threshold, at most the wanted one."""
    fpr_high: float
    """Upper limit of the rate at which non-members in general are."""

    @property
    def only_a_bound(self) -> bool:
        """Fewer than 1 / rate non-members: the threshold is the largest of them, and the wanted rate is not resolved.

        Then `fpr_high`, not the wanted rate, says what is known of the false positives.
        """
        return self.allowed == 0


def roc(member_scores: npt.ArrayLike, non_member_scores: npt.ArrayLike) -> tuple[Array, Array]:
    """(fpr, tpr) of "score ≥ threshold" at every distinct score, from (0, 0) to (1, 1)."""
    members, others = _scores(member_scores), _scores(non_member_scores)
    thresholds = np.unique(np.concatenate([members, others]))[::-1]

    def rate(scores: Array) -> Array:
        return np.concatenate([[0.0], 1 - np.searchsorted(scores, thresholds) / scores.size])

    return rate(others), rate(members)


def auroc(member_scores: npt.ArrayLike, non_member_scores: npt.ArrayLike, confidence: float = 0.95) -> Auroc:
    """P[a member scores higher than a non-member], ties counting one half, with the interval of DeLong et al. (1988).

    Formal guarantee: the interval has its confidence only asymptotically, in the number of members and of non-members.
    Where DeLong's variance is zero or undefined (perfect separation, a single score) it is Hoeffding's, ±√(log(2/error)
    / 2k) with k the smaller of the two numbers, which holds at every size.
    """
    error = 1 - _probability("confidence", confidence)
    members, others = _scores(member_scores), _scores(non_member_scores)
    of_members = (np.searchsorted(others, members, "left") + np.searchsorted(others, members, "right")) / 2
    of_others = (np.searchsorted(members, others, "left") + np.searchsorted(members, others, "right")) / 2
    value = float(of_members.mean() / others.size)
    smaller = min(members.size, others.size)
    variance = 0.0
    if smaller > 1:
        variance = float(
            np.var(of_members / others.size, ddof=1) / members.size
            + np.var(of_others / members.size, ddof=1) / others.size
        )
    if variance > 0:
        reach = -float(special.ndtri(error / 2)) * math.sqrt(variance)
    else:
        reach = math.sqrt(math.log(2 / error) / (2 * smaller))
    return Auroc(value, max(0.0, value - reach), min(1.0, value + reach))


def tpr_at(
    member_scores: npt.ArrayLike, non_member_scores: npt.ArrayLike, fpr: float, confidence: float = 0.95
) -> TprAt:
    """The true positive rate at a false positive rate of at most `fpr`, with the threshold from non-members alone.

    With a = ⌊fpr · n⌋ the threshold is the (a+1)-largest non-member, and only scores strictly above it count, so that
    at most a of the n non-members do.

    Formal guarantee: given the threshold, which no member has touched, (low, high) is `clopper_pearson` of independent
    members. `fpr_high` exceeds the false positive rate in general with probability at least `confidence`, as that rate
    is at most Beta(a+1, n−a), for independent non-members.
    """
    error = 1 - _probability("confidence", confidence)
    _probability("fpr", fpr)
    members, others = _scores(member_scores), _scores(non_member_scores)
    count = others.size
    allowed = math.floor(fpr * count)
    if (allowed + 1) / count <= fpr:  # 0.29 · 100 is less than 29
        allowed += 1
    threshold = float(others[count - 1 - allowed])
    found = int((members > threshold).sum())
    low, high = clopper_pearson(found, members.size, confidence)
    return TprAt(
        tpr=found / members.size,
        low=low,
        high=high,
        threshold=threshold,
        allowed=allowed,
        fpr=float((others > threshold).mean()),
        fpr_high=upper(allowed, count, error),
    )


# Common to all


def _boundary(holds: Callable[[float], bool], tolerance: float) -> tuple[float, float]:
    """(low, high) with `holds(low)` (or low = 0) and not `holds(high)`, close to `tolerance`, relative above 1."""
    low, high = 0.0, 1.0
    if not holds(low):
        return low, low
    while holds(high):
        low, high = high, 2 * high
    while high - low > tolerance * max(1.0, low) and low < (middle := (low + high) / 2) < high:
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def _probability(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ConfigError(f"{name} is {value!r}: give a probability between 0 and 1.")
    return value


def _delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ConfigError(f"delta is {delta!r}: give a probability below 1, or 0.")


def _counts(**counts: int) -> None:
    """Whole numbers, each at most as large as the next."""
    values = list(counts.values())
    if not all(isinstance(value, int | np.integer) for value in values) or sorted([0, *values]) != [0, *values]:
        given = ", ".join(f"{name}={value!r}" for name, value in counts.items())
        raise ConfigError(f"{given}: give whole numbers with 0 ≤ {' ≤ '.join(counts)}.")


def _one_run(canaries: int, guesses: int, correct: int) -> None:
    _counts(correct=correct, guesses=guesses, canaries=canaries)
    if canaries == 0:
        raise ConfigError("canaries is 0: an audit needs one at least.")


def _sum_of_squares(sum_of_squares: float, count: int) -> None:
    if not (math.isfinite(sum_of_squares) and sum_of_squares >= 0):
        raise ConfigError(f"sum_of_squares is {sum_of_squares!r}: give a finite number that is not negative.")
    if count < 1:
        raise ConfigError(f"count is {count!r}: give the number of normals, one at least.")


def _scores(scores: npt.ArrayLike) -> Array:
    """Sorted, one-dimensional, not empty, without NaN."""
    array = np.sort(np.asarray(scores, dtype=np.float64).ravel())
    if array.size == 0 or np.isnan(array).any():
        raise ConfigError("Scores must be numbers, one at least: leave out the records that have none.")
    return array
