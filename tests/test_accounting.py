"""The accountant against closed forms, brute-force integration and dp-accounting's own traps."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import time
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from privet import accounting
from privet.accounting import (
    MAX_COUNT,
    Mechanism,
    count_for,
    delta,
    epsilon,
    gdp_clt_estimate,
    gdp_clt_mu,
    gdp_mu,
    noise_for,
    trade_off,
    zcdp_epsilon,
    zcdp_rho,
)
from privet.errors import BudgetExceeded, ConfigError

RATE, STEPS, DELTA = 256 / 60000, 14062, 1e-5
Neighbours = dp.NeighboringRelation


def poisson(sigma, rate=RATE, **more):
    return Mechanism(kind="poisson", noise_multiplier=sigma, rate=rate, **more)


def gaussian(sigma, **more):
    return Mechanism(kind="gaussian", noise_multiplier=sigma, **more)


def fixed_size(sigma, records=60000, batch=256):
    return Mechanism(kind="fixed_size", noise_multiplier=sigma, relation="replace_one", records=records, batch=batch)


def eps(*spent, at=DELTA):
    return epsilon(spent, at).epsilon


def grid_density(x, mean, sigma):
    return np.exp(-((x - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))


def hockey_stick(p, q, e, dx=1.0):
    return float(np.sum(np.maximum(0, p - math.exp(e) * q)) * dx)


# --- reference figures ---


def test_reference_setting():
    found = epsilon([(poisson(1.1), STEPS)], DELTA)
    assert found.epsilon == pytest.approx(2.3817, abs=5e-4)
    assert (found.accountant, found.tight) == ("pld", True)
    assert delta([(poisson(1.1), STEPS)], found.epsilon).delta == pytest.approx(DELTA, rel=1e-3)


def test_reference_setting_by_renyi_divergences():
    assert accounting._rdp([(poisson(1.1), STEPS)], "add_remove").epsilon(DELTA) == pytest.approx(2.5966, abs=1e-3)


def test_gaussian_closed_form():
    assert eps((gaussian(1), 1)) == pytest.approx(4.377, abs=1e-3)
    # The standard deviation equals one record's contribution, so an exchange moves twice that: multiplier 0.5.
    assert eps((gaussian(0.5, relation="replace_one"), 1)) == pytest.approx(9.997, abs=1e-3)
    assert eps((poisson(1, rate=1, relation="replace_one"), 1)) == pytest.approx(9.997, abs=1e-3)
    assert epsilon([(gaussian(1), 1)], DELTA).accountant == "gdp (exact)"
    assert eps((gaussian(10), 100)) == pytest.approx(eps((gaussian(1), 1)))
    assert gdp_mu([(gaussian(2), 3), (gaussian(1), 1)]) == pytest.approx(math.sqrt(1.75))
    assert zcdp_rho([(gaussian(2), 3), (gaussian(1), 1)]) == pytest.approx(0.875)


def test_zcdp_of_the_backpropagation_clipping_paper():
    """25 epochs, 4 layers, C1 = 1, C2 = 0.01, noise of 2 on each layer's sum, delta 1e-5: both formulas by hand."""
    epochs, layers, sensitivity, s = 25, 4, 0.01, 2.0
    rho = epochs * layers * sensitivity**2 / (2 * s**2)  # 0.00125
    unit = gaussian(s / (math.sqrt(layers) * sensitivity))
    assert zcdp_rho([(unit, epochs)]) == pytest.approx(rho) == 0.00125
    assert zcdp_epsilon(rho, DELTA) == pytest.approx(0.00125 + 2 * math.sqrt(0.00125 * 11.512925465))
    found = eps((unit, epochs))
    mu = math.sqrt(2 * rho)
    assert ndtr(mu / 2 - found / mu) - math.exp(found) * ndtr(-mu / 2 - found / mu) == pytest.approx(DELTA)
    assert found < zcdp_epsilon(rho, DELTA)
    assert (zcdp_epsilon(0, DELTA), zcdp_epsilon(math.inf, DELTA)) == (0, math.inf)


@given(st.floats(1e-4, 30), st.floats(1e-12, 0.5))
def test_zcdp_is_never_below_the_exact_epsilon(mu, at):
    assert eps((gaussian(1 / mu), 1), at=at) <= zcdp_epsilon(mu**2 / 2, at)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1, 10, 100])
@pytest.mark.parametrize("at", [1e-3, 1e-10, 1e-30])
def test_gaussian_inverse_never_falls_short(mu, at):
    found = eps((gaussian(1 / mu), 1), at=at)
    assert 0.999999 * at <= delta([(gaussian(1 / mu), 1)], found).delta <= at or found == 0


def test_pld_agrees_with_the_closed_form():
    units = [(gaussian(2), 3), (gaussian(1), 1)]
    exact = eps(*units)
    assert exact <= accounting._pld(units, "add_remove", 1e-4).epsilon(DELTA) <= exact * 1.0001


# --- brute force ---


@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.05), (1.5, 0.3)])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_one_poisson_step_by_integration(sigma, rate, relation):
    x = np.arange(-20, 20, 1e-3)
    absent = grid_density(x, 0, sigma)
    here, other = ((1 - rate) * absent + rate * grid_density(x, mean, sigma) for mean in (1, -1))
    for e in (0.0, 0.3, 1.0, 2.0):
        if relation == "add_remove":
            truth = max(hockey_stick(here, absent, e, 1e-3), hockey_stick(absent, here, e, 1e-3))
        else:
            truth = hockey_stick(here, other, e, 1e-3)
        found = delta([(poisson(sigma, rate, relation=relation), 1)], e).delta
        assert truth * (1 - 1e-5) - 1e-12 <= found <= truth * 1.001 + 1e-7


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_one_discrete_step_is_covered(rate):
    """Discrete Gaussian, shift 4, multiplier 1: the Renyi bound lies above the truth, in both directions."""
    k, shift = np.arange(-60, 61), 4
    absent, there, other = (grid_density(k, mean, shift) for mean in (0, shift, -shift))
    absent, there, other = (p / p.sum() for p in (absent, there, other))
    here, swapped = (1 - rate) * absent + rate * there, (1 - rate) * absent + rate * other
    unit, under_swap = poisson(1, rate, discrete=True), (gaussian(math.inf, relation="replace_one"), 1)
    for e in (0.2, 1.0):
        found = delta([(unit, 1)], e)
        assert (found.accountant, found.tight) == ("rdp", False)
        assert found.delta >= max(hockey_stick(here, absent, e), hockey_stick(absent, here, e))
        # Beside a unit under replace_one an exchange must be covered: here by the triangle inequality.
        assert delta([(unit, 1), under_swap], e).delta >= hockey_stick(here, swapped, e)
    # The divergences themselves, order by order: this is what the docstring of _rdp argues.
    curves = [accounting._rdp([(unit, 1)], relation) for relation in ("add_remove", "replace_one")]
    alone, swap = (dict(zip(curve._orders, curve._rdp, strict=True)) for curve in curves)
    assert all(order.is_integer() for order in (*alone, *swap))
    pairs = ((here, absent, alone), (absent, here, alone), (here, swapped, swap), (swapped, here, swap))
    for order in (2, 3, 8):
        for p, q, bound in pairs:
            assert math.log(np.sum(p * (p / q) ** (order - 1))) / (order - 1) <= bound[order] + 1e-9


def test_fixed_size_step_is_covered():
    """Two records, one drawn: swapping record 1 from +1/2 to -1/2 moves the sum by 1 with probability 1/2."""
    x, sigma = np.arange(-20, 20, 1e-3), 1.0
    stays = grid_density(x, 0, sigma)
    here, swapped = (0.5 * stays + 0.5 * grid_density(x, mean, sigma) for mean in (0.5, -0.5))
    for e in (0.1, 0.5, 1.0):
        assert delta([(fixed_size(sigma, 2, 1), 1)], e).delta >= hockey_stick(here, swapped, e, 1e-3)


# --- traps of dp-accounting ---


def test_trap_multipliers_become_floats():
    def raw(sigma):
        event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(sigma), 20)
        return RdpAccountant().compose(dp.PoissonSampledDpEvent(0.1, event)).get_epsilon(DELTA)

    assert raw(2) < raw(2.0) / 2, "dp-accounting no longer has the trap"
    assert raw(np.float32(2)) < raw(2.0) / 2
    for sigma in (2, np.float32(2), np.int64(2), np.float64(2)):
        unit = poisson(sigma, np.float32(0.125))
        assert type(unit.noise_multiplier) is float
        assert type(unit.rate) is float
        assert eps((unit, 20)) == eps((poisson(2.0, 0.125), 20))
    assert type(fixed_size(1, np.int64(10), np.int64(2)).records) is int


def test_trap_renyi_replace_one_ignores_the_factor_two():
    raw = RdpAccountant(neighboring_relation=Neighbours.REPLACE_ONE).compose(dp.GaussianDpEvent(1.0))
    assert raw.get_epsilon(DELTA) == pytest.approx(4.73, abs=0.02), "dp-accounting changed"
    for unit in (gaussian(0.5, relation="replace_one", discrete=True), fixed_size(0.5, 10, 10)):
        assert eps((unit, 1)) >= 9.997
    # PLD doubles by itself: a multiplier that holds the factor 2 must not meet that doubling again.
    both = [(gaussian(0.5, relation="replace_one"), 1), (poisson(50, 1e-4, relation="replace_one"), 1)]
    assert eps(*both) == pytest.approx(9.997, abs=0.01)


def test_trap_fixed_size_only_under_replace_one():
    with pytest.raises(ConfigError, match="replace_one"):
        dataclasses.replace(fixed_size(1), relation="add_remove")
    found = epsilon([(fixed_size(1.1), STEPS)], DELTA)
    event = dp.SampledWithoutReplacementDpEvent(60000, 256, dp.GaussianDpEvent(1.1))
    raw = RdpAccountant(neighboring_relation=Neighbours.REPLACE_ONE).compose(event, STEPS).get_epsilon(DELTA)
    assert (found.accountant, found.tight) == ("rdp", False)
    assert found.epsilon == pytest.approx(raw, rel=1e-3)


def test_trap_central_limit_estimate_is_too_low():
    unit = poisson(0.6)
    assert gdp_clt_estimate(unit, 2347, DELTA) == pytest.approx(3.40, abs=0.005)
    assert eps((unit, 2347)) == pytest.approx(4.95, abs=0.005)


def test_central_limit_mu():
    """By integrals over one unit, and the figures G_0.52 and G_1.99 of the batch-clipping paper, section B.1."""
    sigma, rate, steps = 2.5 / math.sqrt(8), 64 / 54000, 50 * 54000 / 64
    x, dx = np.linspace(-9, 10, 40001, retstep=True)
    shifted, centred = grid_density(x, 1, sigma), grid_density(x, 0, sigma)
    chi = np.sum((shifted - centred) ** 2 / centred) * dx
    assert gdp_clt_mu(poisson(sigma, rate), steps) == pytest.approx(rate * math.sqrt(steps * chi), rel=1e-6)
    # The symmetric trade-off has the losses of the likelier half, x > 1/2, and their reflections.
    half = np.sum(((shifted - centred) ** 2 / centred)[x > 0.5]) * dx
    found = gdp_clt_mu(fixed_size(sigma, 54000, 64), steps)
    assert found == pytest.approx(rate * math.sqrt(2 * steps * half), rel=1e-3)
    assert found == pytest.approx(0.52, abs=0.005)
    assert gdp_clt_mu(fixed_size(1.5 / math.sqrt(8), 54000, 64), steps) == pytest.approx(1.99, abs=0.005)


@pytest.mark.parametrize("unit", [poisson(1.0), fixed_size(1.0)])
def test_central_limit_mu_at_its_ends(unit):
    def mu(sigma):
        return gdp_clt_mu(dataclasses.replace(unit, noise_multiplier=sigma), 400)

    assert mu(1e8) == pytest.approx(RATE * 20 / 1e8, rel=1e-6)
    assert mu(math.inf) == 0
    assert mu(0.0) == mu(0.01) == math.inf
    assert gdp_clt_mu(fixed_size(2.0, 64, 64), 400) == gdp_clt_mu(poisson(2.0, 1.0), 400) == 10


@pytest.mark.parametrize("mu", [1.0, 2.0])
def test_trap_pld_loses_small_deltas(mu):
    """Composed 4000 times, dp-accounting's delta is too small by about 1e-13: without a margin this fails."""
    almost_all = (poisson(math.sqrt(4000) / mu, 1 - 1e-12), 4000)
    for at in (1e-9, 1e-10, 2e-11):
        found = epsilon([almost_all], at)
        assert found.accountant == "pld"
        assert found.epsilon >= eps((gaussian(1 / mu), 1), at=at)


def test_tiny_delta_has_an_answer():
    raw = PLDAccountant().compose(dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(1.1)), 1000)
    assert raw.get_epsilon(1e-30) == math.inf, "dp-accounting changed"
    for relation in ("add_remove", "replace_one"):
        found = epsilon([(poisson(1.1, relation=relation), 1000)], 1e-30)
        assert found.accountant == "rdp"
        assert eps((poisson(1.1, relation=relation), 1000), at=1e-9) < found.epsilon < 30
    assert delta([(poisson(1.1), 100)], 20.0).delta < 1e-30
    sigma = noise_for(poisson(1), 1000, 2.0, 1e-30)
    assert 1.99 <= eps((poisson(sigma), 1000), at=1e-30) <= 2


def test_trap_sparse_self_composition_ends():
    start = time.monotonic()
    found = eps((poisson(1000, 0.1), 10**8), at=1e-3)
    assert time.monotonic() - start < 10
    assert found == pytest.approx(eps((gaussian(1), 1), at=1e-3), rel=0.01)  # mu = 0.1·sqrt(1e8)/1000


def test_trap_negative_divergences_are_no_proof_of_nothing():
    unit = poisson(1e5, 1e-6)
    raw = RdpAccountant().compose(dp.PoissonSampledDpEvent(1e-6, dp.GaussianDpEvent(1e5))).rdp
    assert raw.min() < 0, "dp-accounting no longer has the trap"
    assert min(accounting._rdp([(unit, 1)], "add_remove")._rdp) > 0


# --- edges, mixtures, monotonicity ---


def test_nothing_zero_and_infinite_noise():
    assert eps() == eps((poisson(1), 0)) == eps((poisson(math.inf), 9)) == eps((poisson(0, rate=0), 9)) == 0
    assert delta([], 0.0).delta == 0
    for unit in (poisson(0), gaussian(0), fixed_size(0), poisson(1e-200)):
        assert eps((unit, 1), (poisson(1), 5)) == math.inf
        assert delta([(unit, 1)], 5.0).delta == 1
    assert eps((poisson(1e200), 5)) < 1e-6
    assert np.all(trade_off([(gaussian(0), 1)], [0.0, 0.5]) == 0)


def test_costs_are_monotone():
    base = eps((poisson(3.0, 0.05), 100))
    assert eps((poisson(3.3, 0.05), 100)) < base < eps((poisson(3.0, 0.05), 120))
    assert base < eps((poisson(3.0, 0.06), 100))
    assert base < eps((poisson(3.0, 0.05), 100), (gaussian(20), 1))
    assert base < eps((poisson(3.0, 0.05, relation="replace_one"), 100))
    assert base < eps((poisson(3.0, 0.05), 100), at=1e-6)
    assert base == eps((poisson(3.0, 0.05), 60), (poisson(3.0, 0.05), 40))


def test_mixed_relations_cost_what_replace_one_costs():
    swap = eps((poisson(1, 0.01, relation="replace_one"), 100), (gaussian(2, relation="replace_one"), 1))
    assert eps((poisson(1, 0.01), 100), (gaussian(2, relation="replace_one"), 1)) == swap
    assert eps((poisson(1, 0.01, relation="replace_one"), 100), (gaussian(4), 1)) == swap
    assert eps((gaussian(2), 1), (gaussian(math.inf, relation="replace_one"), 1)) == eps((gaussian(1), 1))


def test_pld_and_renyi_units_split_delta():
    spent = [(poisson(1, 0.01), 100), (fixed_size(1), 50)]
    found = epsilon(spent, DELTA)
    assert found.accountant == "pld + rdp (basic composition)"
    assert not found.tight
    parts = eps((poisson(1, 0.01, relation="replace_one"), 100), at=DELTA / 2) + eps(spent[1], at=DELTA / 2)
    assert found.epsilon == pytest.approx(parts)
    back = delta(spent, found.epsilon).delta
    assert DELTA / 1.01 <= back <= DELTA * 1.01
    assert eps(*spent, at=back) <= found.epsilon
    assert np.all(trade_off(spent, [0.1, 0.5]) <= trade_off(spent[:1], [0.1, 0.5]))
    # Renyi alone where it can do both.
    assert epsilon([(gaussian(2, relation="replace_one"), 1), (fixed_size(1), 50)], DELTA).accountant == "rdp"


# --- the trade-off curve ---


def test_trade_off_matches_the_gaussian_closed_form(monkeypatch):
    alphas, units = np.linspace(0, 1, 101), [(gaussian(1), 1)]
    exact = ndtr(ndtri(1 - alphas) - 1)
    assert trade_off(units, alphas) == pytest.approx(exact, abs=1e-12)
    for curve in (accounting._pld(units, "add_remove", 1e-4), accounting._rdp(units, "add_remove")):
        monkeypatch.setattr(accounting, "_curve", lambda spent, curve=curve: curve)
        drawn = trade_off(units, alphas)
        assert np.all(drawn <= exact + 1e-9), "a bound on every test's errors must not promise more than is true"
        assert np.max(exact - drawn) < (1e-3 if curve.tight else 0.3)


def test_trade_off_of_samples_is_a_trade_off():
    alphas = np.linspace(0, 1, 201)
    beta = trade_off([(poisson(1.1, 0.01), 200)], alphas)
    assert np.all(np.diff(beta, 2) >= -1e-9)
    assert np.all(np.diff(beta) <= 0)
    assert np.all(beta <= 1 - alphas + 1e-12)
    assert np.interp(beta[::-1], alphas, beta)[::-1] == pytest.approx(alphas, abs=5e-3)  # its own inverse
    assert np.all(trade_off([(poisson(1.1, 0.01), 100)], alphas) >= beta - 1e-9)


# --- searches ---


def test_noise_for_the_reference_setting():
    sigma = noise_for(poisson(0), STEPS, 2.3817, DELTA)
    assert sigma == pytest.approx(1.1, rel=3e-3)
    assert 2.3817 * 0.995 <= eps((poisson(sigma), STEPS)) <= 2.3817


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    relation=st.sampled_from(["add_remove", "replace_one"]),
    rate=st.sampled_from([0.002, 0.03, 0.3]),
    count=st.integers(1, 1000),
    target=st.floats(0.2, 4),
    at=st.sampled_from([1e-5, 1e-7]),
)
def test_noise_for_meets_the_budget(relation, rate, count, target, at):
    unit = poisson(1, rate, relation=relation)
    sigma = noise_for(unit, count, target, at)
    assert 0.995 * target <= eps((dataclasses.replace(unit, noise_multiplier=sigma), count), at=at) <= target


@pytest.mark.parametrize(
    "unit", [gaussian(1), gaussian(1, relation="replace_one"), fixed_size(1, 1000, 50), poisson(1, 0.05, discrete=True)]
)
@pytest.mark.parametrize("target", [0.3, 5.0])
def test_noise_for_other_kinds(unit, target):
    sigma = noise_for(unit, 30, target, DELTA)
    assert 0.995 * target <= eps((dataclasses.replace(unit, noise_multiplier=sigma), 30)) <= target


def test_noise_for_what_is_left():
    before = [(gaussian(4), 1), (poisson(3.0, 0.05), 100)]
    sigma = noise_for(poisson(1, 0.05), 100, 2.0, DELTA, before=before)
    paid, total = eps(*before), eps(*before, (poisson(sigma, 0.05), 100))
    assert paid + 0.995 * (2 - paid) <= total <= 2
    with pytest.raises(BudgetExceeded, match="spent already"):
        noise_for(poisson(1, 0.05), 100, paid * 0.99, DELTA, before=before)


@pytest.mark.parametrize(
    ("unit", "target"),
    [
        (poisson(1.1, 0.01), 1.0),
        (poisson(2, 0.1, relation="replace_one"), 3.0),
        (gaussian(20), 2.0),
        (fixed_size(2, 1000, 20), 2.0),
        (poisson(1.1, 0.01, discrete=True), 1.0),
    ],
)
def test_count_for_is_maximal(unit, target):
    count = count_for(unit, target, DELTA)
    assert count >= 1
    assert eps((unit, count)) <= target < eps((unit, count + 1))


def test_count_for_edges():
    unit = poisson(4, 0.02)
    before = [(unit, 700)]
    assert 700 + count_for(unit, 1.0, DELTA, before=before) == count_for(unit, 1.0, DELTA)
    assert count_for(unit, 0.4, DELTA, before=before) == 0
    assert count_for(gaussian(1), 0.1, DELTA) == count_for(poisson(0), 1.0, DELTA) == 0
    assert count_for(gaussian(1e9), 1.0, DELTA) == count_for(gaussian(math.inf), 1.0, DELTA) == MAX_COUNT


@pytest.mark.parametrize(("target", "at"), [(0, 1e-5), (-1, 1e-5), (math.nan, 1e-5), (1, 0), (1, 1), (1, math.nan)])
def test_budgets_that_nothing_meets(target, at):
    for call in (lambda: noise_for(gaussian(1), 1, target, at), lambda: count_for(gaussian(1), target, at)):
        with pytest.raises(ConfigError, match=r"(epsilon|delta)=.*no noise can meet it"):
            call()
    with pytest.raises(ConfigError):
        noise_for(gaussian(1), 0, 1.0, 1e-5)


# --- facts ---


@pytest.mark.parametrize("unit", [poisson(1.1), gaussian(math.inf), fixed_size(2), poisson(3, discrete=True)])
def test_json_round_trip(unit):
    text = json.dumps(unit.to_json(), allow_nan=False)
    assert Mechanism.from_json(json.loads(text)) == unit


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "laplace"},
        {"relation": "zero_out"},
        {"noise_multiplier": -1},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": None},
        {"noise_multiplier": "much"},
        {"rate": 1.5},
        {"kind": "gaussian", "rate": 0.5},
        {"records": 10},
        {"discrete": 1},
        {"discrete": True, "relation": "replace_one"},
        {"kind": "fixed_size", "relation": "replace_one", "rate": 1, "records": 10},
        {"kind": "fixed_size", "relation": "replace_one", "rate": 1, "records": 10, "batch": 11},
        {"kind": "fixed_size", "relation": "replace_one", "rate": 1, "records": 10, "batch": 2.5},
        {"kind": "fixed_size", "relation": "replace_one", "rate": 1, "records": 10, "batch": 2, "discrete": True},
        {"colour": "red"},
    ],
)
def test_bad_facts_are_refused(change):
    with pytest.raises(ConfigError):
        Mechanism.from_json({"kind": "poisson", "noise_multiplier": 1.0, "rate": 0.1} | change)


def test_bad_questions_are_refused():
    for call in (
        lambda: epsilon([], 0.0),
        lambda: delta([], -1.0),
        lambda: epsilon([(gaussian(1), -1)], 0.1),
        lambda: trade_off([], [2.0]),
        lambda: zcdp_epsilon(-1.0, 0.1),
        lambda: zcdp_epsilon(1.0, 0.0),
        lambda: zcdp_epsilon(1.0, 1.0),
        lambda: gdp_mu([(poisson(1), 1)]),
        lambda: gdp_mu([(gaussian(1, discrete=True), 1)]),
        lambda: gdp_clt_estimate(gaussian(1), 1, 0.1),
        lambda: gdp_clt_mu(poisson(1, relation="replace_one"), 1),
    ):
        with pytest.raises(ConfigError):
            call()


def test_import_is_cheap():
    """dp-accounting and scipy are imported on first use only."""
    tree = ast.parse(Path(accounting.__file__).read_text(encoding="utf-8"))
    top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [line for line in top if "dp_accounting" in line or "scipy" in line or "torch" in line]


def test_a_trade_off_curve_of_a_huge_epsilon_is_a_number():
    curve = trade_off([(poisson(0.177, 64 / 54000), 42200)], [0.0, 0.01, 0.5, 1.0])
    assert np.all((curve >= 0) & (curve <= 1))
