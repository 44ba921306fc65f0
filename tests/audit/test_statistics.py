"""Bounds against closed forms, against the exact worst case of small mechanisms, and against simulated truth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.metrics import roc_auc_score, roc_curve

from privet import ConfigError
from privet.audit import statistics as s


def approximate(epsilon: float, delta: float) -> s.TradeOff:
    """The trade-off curve of (ε, δ)-DP."""

    def curve(rate: s.Array) -> s.Array:
        steep, flat = 1 - delta - math.exp(epsilon) * rate, math.exp(-epsilon) * (1 - delta - rate)
        return np.maximum(0.0, np.maximum(steep, flat))

    return curve


def gaussian(mu: float) -> s.TradeOff:
    return lambda rate: stats.norm.cdf(-stats.norm.ppf(rate) - mu)


def smallest_rejected(rejects: Callable[[float], bool]) -> float:
    """The error at which a test begins to reject: its bound on the tail."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high


# Rates of success


@pytest.mark.parametrize("trials", [1, 7, 20])
def test_clopper_pearson_solves_the_binomial_tails(trials: int) -> None:
    for successes in range(trials + 1):
        low, high = s.clopper_pearson(successes, trials, 0.9)
        expected = stats.binomtest(successes, trials).proportion_ci(0.9, method="exact")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert s.upper(0, trials, 0.01) == pytest.approx(1 - 0.01 ** (1 / trials))
    assert s.lower(trials, trials, 0.01) == pytest.approx(0.01 ** (1 / trials))
    assert s.upper(trials, trials, 0.01) == 1 and s.lower(0, trials, 0.01) == 0


def test_one_sided_limits_err_as_often_as_they_say_and_hardly_less() -> None:
    """Exact coverage at n = 40, over all p: never more than the error, and close to it somewhere."""
    trials, error = 40, 0.05
    lows = np.array([s.lower(k, trials, error) for k in range(trials + 1)])
    highs = np.array([s.upper(k, trials, error) for k in range(trials + 1)])
    wrong = []
    for p in np.linspace(0.001, 0.999, 999):
        mass = stats.binom.pmf(np.arange(trials + 1), trials, p)
        wrong.append([mass[lows > p].sum(), mass[highs < p].sum()])
    worst = np.max(wrong, axis=0)
    assert (worst <= error + 1e-12).all() and (worst > 0.95 * error).all()


# From error rates to privacy


def test_gaussian_mu_lower_is_the_formula_and_holds() -> None:
    alpha, beta = s.upper(3, 500, 0.025), s.upper(40, 600, 0.025)
    assert s.gaussian_mu_lower(3, 40, 500, 600, 0.05) == pytest.approx(stats.norm.isf(alpha) - stats.norm.ppf(beta))
    assert s.gaussian_mu_lower(500, 600, 500, 600, 0.05) == 0
    assert s.gaussian_mu_lower(400, 500, 500, 600, 0.05) == 0
    rng, mu, runs, trials = np.random.default_rng(1), 1.5, 2000, 300
    positives = rng.binomial(trials, stats.norm.sf(0.8), runs)
    negatives = rng.binomial(trials, stats.norm.cdf(0.8 - mu), runs)
    bounds = np.array(
        [s.gaussian_mu_lower(int(a), int(b), trials, trials, 0.2) for a, b in zip(positives, negatives, strict=True)]
    )
    assert 0.005 < (bounds > mu).mean() < 0.2  # two limits at once: the truth is exceeded less often than allowed
    assert np.median(bounds) > 1.2


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_gdp_epsilon_inverts_the_hockey_stick_of_two_gaussians(mu: float, delta: float) -> None:
    epsilon = s.gdp_epsilon(mu, delta)
    grid = np.linspace(-12, 12 + mu, 400_001)
    gap = stats.norm.pdf(grid - mu) - math.exp(epsilon) * stats.norm.pdf(grid)
    assert np.trapezoid(np.maximum(gap, 0), grid) == pytest.approx(delta, rel=1e-4)


def test_gdp_epsilon_at_the_ends() -> None:
    assert s.gdp_epsilon(0.0, 1e-5) == s.gdp_epsilon(0.0, 0.0) == 0
    assert s.gdp_epsilon(1.0, 0.0) == math.inf
    # Total variation 2Φ(μ/2) − 1: from there on no ε is needed.
    assert s.gdp_epsilon(1.0, 2 * stats.norm.cdf(0.5) - 1 + 1e-12) == 0
    assert s.gdp_epsilon(1.0, 2 * stats.norm.cdf(0.5) - 1 - 1e-6) > 0
    # For large μ, δ = Φ(−ε/μ + μ/2) up to a factor near 1, where e^ε has long overflowed.
    assert s.gdp_epsilon(60.0, 1e-5) == pytest.approx(60 * 30 - 60 * stats.norm.ppf(1e-5), rel=1e-2)
    assert s.gdp_epsilon(1.0, 1e-300) > s.gdp_epsilon(1.0, 1e-200) > s.gdp_epsilon(1.0, 1e-100)
    assert s.gdp_epsilon(1e200, 1e-5) == math.inf


def test_epsilon_from_rates_is_tight_for_randomised_response() -> None:
    epsilon = 1.3
    rate = 1 / (1 + math.exp(epsilon))
    assert s.epsilon_lower_from_rates(rate, rate, 0.0) == pytest.approx(epsilon)
    assert s.epsilon_lower_from_rates(0.01, 0.5, 0.1) == pytest.approx(math.log(0.4 / 0.01))
    assert s.epsilon_lower_from_rates(0.5, 0.01, 0.1) == pytest.approx(math.log(0.4 / 0.01))
    assert s.epsilon_lower_from_rates(0.6, 0.6, 0.0) == s.epsilon_lower_from_rates(1.0, 1.0, 0.5) == 0
    assert s.epsilon_lower_from_rates(0.0, 0.5, 0.0) == math.inf


# Is the noise what it claims to be?


def test_variance_interval_and_p_value_are_chi_square() -> None:
    low, high = s.variance_interval(30.0, 20, 0.1)
    assert low == pytest.approx(30 / stats.chi2.ppf(0.95, 20)) and high == pytest.approx(30 / stats.chi2.ppf(0.05, 20))
    assert s.variance_p_value(30.0, 20, low) == pytest.approx(0.1) == s.variance_p_value(30.0, 20, high)
    assert s.variance_p_value(31.4, 20, 1.0) == pytest.approx(2 * stats.chi2.sf(31.4, 20))
    assert s.variance_p_value(1e7 * 1.01, 10**7, 1.0) < 1e-40  # a percent too much is seen at this size
    assert s.variance_p_value(1e7 * 1.0001, 10**7, 1.0) > 0.5


def test_variance_p_value_is_uniform() -> None:
    sums = np.square(np.random.default_rng(2).normal(0, 3, (4000, 7))).sum(1)
    values = [s.variance_p_value(total, 7, 9.0) for total in sums]
    assert stats.kstest(values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("count", [2, 5, 300])
def test_correlation_p_value_is_uniform_under_independence(count: int) -> None:
    rng = np.random.default_rng(count)
    a = 5 * rng.standard_normal((4000, count))
    b = rng.exponential(size=count)
    values = [s.correlation_p_value(float(row @ b), *map(np.linalg.norm, (row, b)), count) for row in a]
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_correlation_p_value_is_the_beta_law_and_sees_dependence() -> None:
    rho, count = 0.3, 40
    assert s.correlation_p_value(rho, 1, 1, count) == pytest.approx(stats.beta.sf(rho**2, 0.5, (count - 1) / 2))
    assert s.correlation_p_value(-6 * rho, 2, 3, count) == pytest.approx(s.correlation_p_value(rho, 1, 1, count))
    assert s.correlation_p_value(0.0, 1, 1, count) == 1 and s.correlation_p_value(1.0, 1, 1, count) == 0
    assert s.correlation_p_value(4e-5, 1, 1, 10**10) == pytest.approx(2 * stats.norm.sf(4), rel=1e-3)


# Audits in one run


@cache
def worst_case(coins: int, guesses: int, epsilon: float, delta: float) -> tuple[float, ...]:
    """max P[W ≥ v] for v = 0, …, over *all* (ε, δ)-DP ways to guess `guesses` of a few coins: a linear program."""
    worlds = list(itertools.product([0, 1], repeat=coins))
    outputs = [o for o in itertools.product([0, 1, None], repeat=coins) if coins - o.count(None) == guesses]
    pairs = [(u, w) for u in range(len(worlds)) for w in range(len(worlds)) if np.bitwise_count(u ^ w) == 1]
    main, width = len(worlds) * len(outputs), len(outputs)
    size = main + len(pairs) * width
    limits, budgets = [], []
    for p, (u, w) in enumerate(pairs):
        excess = range(main + p * width, main + (p + 1) * width)
        for o, slack in enumerate(excess):  # M(u, o) − e^ε M(w, o) ≤ excess(p, o)
            row = np.zeros(size)
            row[[u * width + o, w * width + o, slack]] = 1, -math.exp(epsilon), -1
            limits.append(row)
        budget = np.zeros(size)
        budget[list(excess)] = 1
        budgets.append(budget)
    normal = np.zeros((len(worlds), size))
    for u in range(len(worlds)):
        normal[u, u * width : (u + 1) * width] = 1
    found = []
    for v in range(guesses + 1):
        gain = np.zeros(size)
        gain[:main] = [sum(a == b for a, b in zip(u, o, strict=True)) >= v for u in worlds for o in outputs]
        answer = optimize.linprog(
            -gain / len(worlds),
            A_ub=np.array(limits + budgets),
            b_ub=[0.0] * len(limits) + [delta] * len(budgets),
            A_eq=normal,
            b_eq=np.ones(len(worlds)),
        )
        found.append(-answer.fun)
    return tuple(found)


CASES = [(3, 3, 0.0), (3, 3, 0.02), (3, 2, 0.02), (3, 3, 0.1), (3, 1, 0.1)]


@pytest.mark.parametrize(("coins", "guesses", "delta"), CASES)
@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_one_run_bounds_hold_for_the_worst_of_all_mechanisms(
    coins: int, guesses: int, delta: float, epsilon: float
) -> None:
    curve = approximate(epsilon, delta)
    for v, exact in enumerate(worst_case(coins, guesses, epsilon, delta)):
        bound = s.one_run_p_value(coins, guesses, v, epsilon, delta)
        assert bound >= exact - 1e-7
        begins = smallest_rejected(lambda e, v=v: s.one_run_f_dp_rejects(coins, guesses, v, curve, e))
        assert begins >= exact - 1e-7
        if delta == 0:
            assert bound == pytest.approx(exact) and begins >= bound - 1e-7


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_one_run_p_value_without_delta_is_randomised_response(epsilon: float) -> None:
    right = 1 / (1 + math.exp(-epsilon))
    for v in range(7):
        outcomes = itertools.product([0, 1], repeat=6)
        tail = sum(right ** sum(o) * (1 - right) ** (6 - sum(o)) for o in outcomes if sum(o) >= v)
        assert s.one_run_p_value(10, 6, v, epsilon, 0.0) == pytest.approx(tail)


def published(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2 of Steinke, Nasr, Jagielski (2023)."""
    law = stats.binom(r, 1 / (1 + math.exp(-epsilon)))
    windows = np.cumsum(law.pmf(np.arange(v - 1, -1, -1))) / np.arange(1, v + 1)
    return float(law.sf(v - 1) + 2 * m * delta * windows.max())


@pytest.mark.parametrize(
    ("m", "r", "v", "delta", "epsilon"), [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.6755)]
)
def test_one_run_epsilon_is_a_little_above_the_published_values(
    m: int, r: int, v: int, delta: float, epsilon: float
) -> None:
    """The examples of their appendix D and section 7, at an error of 0.05."""
    assert published(m, r, v, epsilon, delta) == pytest.approx(0.05, rel=5e-3)
    assert 0.005 < s.one_run_epsilon(m, r, v, delta, 0.05) - epsilon < 0.2


def test_one_run_p_value_is_what_the_worst_mechanism_attains_and_below_the_published_one() -> None:
    """As the law of W alone matters, the program over all mechanisms has one unknown per count, at any size."""
    rng, compared = np.random.default_rng(6), 0
    for _ in range(60):
        m = int(rng.integers(2, 40))
        r = int(rng.integers(1, m + 1))
        v = int(rng.integers((r + 1) // 2, r + 1))
        epsilon, delta = rng.uniform(0, 2), 10 ** rng.uniform(-5, -1.3)
        bound, size = s.one_run_p_value(m, r, v, epsilon, delta), 3 * r + 1
        limits, grow = np.zeros((2 * r + 1, size)), math.exp(epsilon)
        for i in range(1, r + 1):  # p_0 … p_r, then the excess of right over wrong, then of wrong over right
            limits[i - 1, [i - 1, i, r + i]] = -grow * (r - i + 1), i, -1
            limits[r + i - 1, [i - 1, i, 2 * r + i]] = r - i + 1, -grow * i, -1
        limits[-1, r + 1 :] = 1
        levels = np.arange(size)
        answer = optimize.linprog(
            -((levels >= v) & (levels <= r)).astype(float),
            A_ub=limits,
            b_ub=[0.0] * (2 * r) + [m * delta],
            A_eq=(levels <= r).astype(float)[None],
            b_eq=[1.0],
        )
        assert bound >= -answer.fun - 1e-7
        if bound < 0.5:
            compared += 1
            assert bound == pytest.approx(-answer.fun, rel=1e-6)
            assert bound <= published(m, r, v, epsilon, delta)
    assert compared > 10


def test_one_run_p_value_far_out_and_at_the_start() -> None:
    assert s.one_run_p_value(50, 30, 0, 0.7, 1e-3) == 1
    # Far out, where both binomial probabilities underflow, their ratio is that of a geometric law.
    ratio = 10_000 / 90_001
    assert s.one_run_p_value(10**5, 10**5, 90_000, 0.0, 1e-5) == pytest.approx(
        1e5 * 1e-5 / (1 - ratio) / 90_000, rel=1e-3
    )
    assert s.one_run_p_value(10**5, 10**5, 1000, 3.0, 1e-5) == 1


def test_one_run_epsilon_is_the_boundary_of_rejection() -> None:
    for delta in (0.0, 1e-5, 1e-3):
        found = s.one_run_epsilon(200, 100, 85, delta, 0.05)
        assert s.one_run_p_value(200, 100, 85, found, delta) <= 0.05
        assert s.one_run_p_value(200, 100, 85, found + 1e-6, delta) > 0.05
    assert s.one_run_epsilon(200, 100, 55, 0.0, 0.05) == s.one_run_epsilon(200, 100, 0, 0.0, 0.05) == 0
    assert s.one_run_epsilon(200, 0, 0, 0.0, 0.05) == 0


def test_one_run_ceiling_is_what_the_best_outcome_shows() -> None:
    power = 0.05 ** (1 / 40)
    assert s.one_run_ceiling(40, 0.0, 0.05) == pytest.approx(math.log(power / (1 - power)))
    for delta in (0.0, 1e-4):
        best = max(s.one_run_epsilon(40, r, v, delta, 0.05) for r in range(41) for v in range(r + 1))
        assert s.one_run_ceiling(40, delta, 0.05) == pytest.approx(best, abs=1e-8)


def test_one_run_bounds_grow_with_what_is_right_and_fall_with_what_is_asked() -> None:
    counts = range(60, 101, 8)
    for bounds in (
        [s.one_run_epsilon(300, 100, v, 1e-5, 0.05) for v in counts],
        [s.one_run_mu(300, 100, v, 0.05) for v in counts],
    ):
        assert bounds[0] > 0 and (np.diff(bounds) > 0).all()
    for error in (0.05, 0.01):
        assert s.one_run_mu(300, 100, 90, error / 2) < s.one_run_mu(300, 100, 90, error)
        assert s.one_run_epsilon(300, 100, 90, 1e-5, error / 2) < s.one_run_epsilon(300, 100, 90, 1e-5, error)
    assert s.one_run_epsilon(300, 100, 90, 1e-3, 0.05) < s.one_run_epsilon(300, 100, 90, 1e-5, 0.05)


@pytest.mark.parametrize(("m", "r", "c"), [(6, 6, 6), (6, 6, 4), (9, 5, 4), (12, 12, 7)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.01), (0.1, 0.05)])
def test_f_dp_recursion_solves_its_linear_program(m: int, r: int, c: int, epsilon: float, delta: float) -> None:
    """The largest P[W ≥ c] under H_{i−1} ≥ f(1 − R_i), every i, for an f of three straight pieces."""
    levels = np.arange(r + 1)
    rows, limits = [], []
    for i in range(1, r + 1):
        right, wrong = np.where(levels >= i, levels, 0) / m, np.where(levels >= i - 1, r - levels, 0) / m
        rows += [math.exp(-epsilon) * right - wrong, math.exp(epsilon) * right - wrong]
        limits += [math.exp(-epsilon) * delta, math.exp(epsilon) - 1 + delta]
    answer = optimize.linprog(
        -(levels >= c).astype(float), A_ub=np.array(rows), b_ub=limits, A_eq=np.ones((1, r + 1)), b_eq=[1.0]
    )
    curve = approximate(epsilon, delta)
    begins = smallest_rejected(lambda error: s.one_run_f_dp_rejects(m, r, c, curve, error))
    assert begins == pytest.approx(-answer.fun, abs=1e-6)


@pytest.mark.parametrize("share", [0.02, 0.1, 1.0])
def test_f_dp_test_spares_a_mechanism_that_seldom_tells_much(share: float) -> None:
    """With probability `share` randomised response at ε = 1.5 on 20 coins, else nothing: its curve is known exactly."""
    epsilon, coins = 1.5, 20
    right = 1 / (1 + math.exp(-epsilon))

    def curve(rate: s.Array) -> s.Array:
        return np.maximum(approximate(epsilon, 0.0)(rate), 1 - share * (2 * right - 1) - rate)

    tails = share * stats.binom.sf(np.arange(-1, coins), coins, right)
    tails += (1 - share) * stats.binom.sf(np.arange(-1, coins), coins, 0.5)
    begins = [
        smallest_rejected(lambda error, v=v: s.one_run_f_dp_rejects(coins, coins, v, curve, error))
        for v in range(coins + 1)
    ]
    assert (np.array(begins) >= tails - 1e-9).all()
    assert begins[18] < 8 * tails[18] and begins == sorted(begins, reverse=True)


def test_one_run_mu_is_the_boundary_of_f_dp() -> None:
    for m, r, v in ((1000, 100, 85), (400, 400, 290), (60, 60, 60)):
        found = s.one_run_mu(m, r, v, 0.05)
        assert s.one_run_f_dp_rejects(m, r, v, gaussian(found - 1e-5), 0.05)
        assert not s.one_run_f_dp_rejects(m, r, v, gaussian(found + 1e-5), 0.05)
    assert s.one_run_mu(100, 100, 50, 0.05) == s.one_run_mu(100, 100, 0, 0.05) == s.one_run_mu(100, 0, 0, 0.05) == 0


@pytest.mark.parametrize(("m", "k", "mu", "error"), [(1000, 30, 1.0, 0.05), (40, 20, 1.0, 0.3), (200, 15, 0.5, 0.2)])
def test_one_run_bounds_hold_for_a_gaussian_mechanism(m: int, k: int, mu: float, error: float) -> None:
    """Scores N(0, 1) out and N(μ, 1) in; the k largest are guessed in, the k smallest out."""
    rng, delta, runs = np.random.default_rng(m), 1e-5, 1000
    coins = rng.integers(0, 2, (runs, m))
    order = np.argsort(coins * mu + rng.standard_normal((runs, m)), axis=1)
    right = np.take_along_axis(coins, order[:, -k:], 1).sum(1) + k - np.take_along_axis(coins, order[:, :k], 1).sum(1)
    mus = {v: s.one_run_mu(m, 2 * k, int(v), error) for v in np.unique(right)}
    epsilons = {v: s.one_run_epsilon(m, 2 * k, int(v), delta, error) for v in np.unique(right)}
    truth = s.gdp_epsilon(mu, delta)
    found = np.array([mus[v] for v in right])
    assert (found > mu).mean() <= error
    assert np.mean([epsilons[v] > truth for v in right]) <= error
    # Worth having: it finds a good part of μ, and more than the test that knows (ε, δ) only.
    assert np.median(found) > 0.3 * mu
    assert s.gdp_epsilon(float(np.median(found)), delta) > np.median([epsilons[v] for v in right])


# Membership scores


def test_roc_and_auroc_agree_with_scikit_learn_and_with_counting() -> None:
    rng = np.random.default_rng(3)
    members, others = rng.normal(0.7, 1, 60).round(1), rng.normal(0, 1, 90).round(1)  # with ties
    labels, scores = np.repeat([1, 0], [60, 90]), np.concatenate([members, others])
    fpr, tpr = s.roc(members, others)
    expected = roc_curve(labels, scores, drop_intermediate=False)
    assert fpr == pytest.approx(expected[0]) and tpr == pytest.approx(expected[1])
    wins = (members[:, None] > others) + 0.5 * (members[:, None] == others)
    found = s.auroc(members, others)
    assert found.value == pytest.approx(wins.mean()) == pytest.approx(roc_auc_score(labels, scores))
    spread = math.sqrt(wins.mean(1).var(ddof=1) / 60 + wins.mean(0).var(ddof=1) / 90)
    assert found.high - found.value == pytest.approx(1.959964 * spread) == pytest.approx(found.value - found.low)


def test_auroc_interval_covers_and_is_never_a_point() -> None:
    rng, truth = np.random.default_rng(4), stats.norm.cdf(1 / math.sqrt(2))
    intervals = [s.auroc(rng.normal(1, 1, 80), rng.normal(0, 1, 120), 0.9) for _ in range(1000)]
    assert 0.88 < np.mean([i.low <= truth <= i.high for i in intervals]) < 0.92
    perfect = s.auroc([3.0, 4.0], [1.0, 2.0])
    assert perfect.value == perfect.high == 1 and perfect.low == pytest.approx(1 - math.sqrt(math.log(40) / 4))
    assert s.auroc([1.0], [2.0, 3.0]).value == 0


def test_tpr_at_takes_its_threshold_from_non_members() -> None:
    others = np.arange(1000.0)
    members = np.array([989.0, 989.5, 990.0, 999.0, 2000.0])
    found = s.tpr_at(members, others, 0.01)
    assert (found.allowed, found.threshold, found.fpr, found.only_a_bound) == (10, 989.0, 0.01, False)
    assert found.tpr == 0.8 and (found.low, found.high) == s.clopper_pearson(4, 5)
    assert s.tpr_at(members, np.arange(100.0), 0.29).allowed == 29
    tied = s.tpr_at(members, np.repeat([0.0, 5.0], [900, 100]), 0.05)
    assert tied.fpr == 0 and tied.allowed == 50 and tied.threshold == 5


def test_tpr_at_says_when_the_rate_is_out_of_reach() -> None:
    found = s.tpr_at([4.0, 9.0, 10.0], np.arange(10.0), 0.01)
    assert (found.allowed, found.threshold, found.fpr, found.only_a_bound) == (0, 9.0, 0.0, True)
    assert found.tpr == pytest.approx(1 / 3) and found.fpr_high == pytest.approx(1 - 0.05**0.1)


def test_tpr_at_bounds_the_false_positives_in_general() -> None:
    """Uniform scores: the false positive rate at a threshold is 1 − threshold, and must lie below its limit."""
    rng = np.random.default_rng(5)
    found = [s.tpr_at([0.5], rng.random(200), 0.02, 0.9) for _ in range(2000)]
    assert 0.88 < np.mean([1 - one.threshold <= one.fpr_high for one in found]) < 0.92


@pytest.mark.parametrize(
    "call",
    [
        lambda: s.upper(3, 2, 0.1),
        lambda: s.lower(-1, 2, 0.1),
        lambda: s.lower(1.5, 2, 0.1),  # type: ignore[arg-type]
        lambda: s.upper(1, 2, 0.0),
        lambda: s.clopper_pearson(1, 2, 1.0),
        lambda: s.gaussian_mu_lower(1, 1, 9, 9, 1.5),
        lambda: s.gdp_epsilon(-1.0, 0.1),
        lambda: s.gdp_epsilon(1.0, 1.0),
        lambda: s.epsilon_lower_from_rates(1.1, 0.1, 0.0),
        lambda: s.variance_interval(-1.0, 3, 0.1),
        lambda: s.variance_p_value(1.0, 0, 1.0),
        lambda: s.variance_p_value(1.0, 3, 0.0),
        lambda: s.correlation_p_value(2.0, 1.0, 1.0, 9),
        lambda: s.correlation_p_value(0.0, 0.0, 1.0, 9),
        lambda: s.one_run_epsilon(10, 11, 5, 0.0, 0.05),
        lambda: s.one_run_mu(0, 0, 0, 0.05),
        lambda: s.one_run_f_dp_rejects(5, 5, 5, gaussian(1.0), 0.0),
        lambda: s.one_run_p_value(5, 5, 5, -1.0, 0.0),
        lambda: s.auroc([], [1.0]),
        lambda: s.roc([math.nan], [1.0]),
        lambda: s.tpr_at([1.0], [1.0], 0.0),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()
