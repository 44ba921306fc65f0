"""Epsilon, delta, the trade-off curve, and the search for the noise or the steps that meet a budget.

A `Mechanism` is a fact (what was run); the functions here interpret a list of such facts. Which accountant does so
is decided in one place, `_curve`:

    only unsampled Gaussians                      the closed form of Gaussian differential privacy: exact
    Poisson samples, with or without Gaussians    privacy loss distribution (PLD): an upper bound, tight
    samples of fixed size, or discrete noise      Renyi divergences (RDP): an upper bound, loose
    PLD and RDP units under replace_one           each at half of delta, the epsilons added

Formal guarantee: every epsilon (delta) handed out is an upper bound on the least epsilon (delta) at which the
adaptive composition of the units is (epsilon, delta)-differentially private under the relation in force. Floating
point is covered by margins far above the errors measured (`_margin`, `_RDP_MARGIN`), not by interval arithmetic.

Two relations in one list are brought to `replace_one`: to exchange a record is to remove one and add another, so
what moves by c when a record is added moves by at most 2c when one is exchanged.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from privet.errors import BudgetExceeded, ConfigError

Relation = Literal["add_remove", "replace_one"]
MAX_COUNT = 10**9  # count_for looks no further: what is cheaper than this is as good as free
_NO_NOISE = 1e-9  # a multiplier below this counts as 0: its epsilon, above 1e17, is called infinite
_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One unit of composition: a noised sum, as an immutable fact that can be written as JSON.

    `noise_multiplier` is the standard deviation of the noise over the sensitivity of the sum, and which
    sensitivity that is depends on `kind`:

    - `poisson`: each record is in the sample with probability `rate`, by its own coin. The sensitivity is the
      largest change when ONE record is present against absent, under both relations; accounting for
      `replace_one` doubles it.
    - `gaussian`: no sampling; each record is in exactly one such unit. The sensitivity is the one under
      `relation`, so under `replace_one` it holds the factor 2 already.
    - `fixed_size`: `batch` of `records` records, without replacement; the number of records is public. Only
      `replace_one`, and the sensitivity is the one under an exchange, factor 2 included.

    `discrete`: the noise is discrete Gaussian on an integer grid, and the sums are integers of that grid.
    `seeded`: the noise can be made again from a seed, so that for the accountant there is none.
    """

    kind: Literal["gaussian", "poisson", "fixed_size"]
    noise_multiplier: float
    relation: Relation = "add_remove"
    rate: float = 1.0
    records: int | None = None
    batch: int | None = None
    discrete: bool = False
    seeded: bool = False

    def __post_init__(self) -> None:
        # Plain Python numbers only: inside dp-accounting's nested events an int or a np.float32 multiplier fails
        # an isinstance(float) test, and the composition around it is silently dropped.
        for name, cast in (("noise_multiplier", float), ("rate", float), ("records", int), ("batch", int)):
            value = getattr(self, name)
            if value is not None or cast is float:
                try:
                    number = cast(value)
                except (TypeError, ValueError, OverflowError):
                    raise ConfigError(f"{name}={value!r} must be a number.") from None
                _require(cast is float or number == value, f"{name}={value!r} must be a whole number.")
                object.__setattr__(self, name, number)
        sized, poisson = self.kind == "fixed_size", self.kind == "poisson"
        swap = self.relation == "replace_one"
        _require(self.kind in ("gaussian", "poisson", "fixed_size"), f"kind={self.kind!r} is unknown.")
        _require(swap or self.relation == "add_remove", f"relation={self.relation!r} is unknown.")
        for name in ("discrete", "seeded"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name}={value!r} must be true or false.")
        _require(self.noise_multiplier >= 0, f"noise_multiplier={self.noise_multiplier} must not be negative.")
        _require(0 <= self.rate <= 1, f"rate={self.rate} must be a probability, between 0 and 1.")
        _require(poisson or self.rate == 1, f"rate={self.rate} belongs to kind 'poisson' only: leave it out.")
        if not sized:
            stray = self.records is not None or self.batch is not None
            _require(not stray, "records and batch belong to kind 'fixed_size' only: leave them out.")
            _require(
                not (self.discrete and poisson and swap),
                "Discrete noise on Poisson samples is accounted under add_remove only: use relation='add_remove', "
                "or continuous noise.",
            )
            return
        _require(
            1 <= (self.batch or 0) <= (self.records or 0),
            f"batch={self.batch} of records={self.records}: a fixed size needs 1 <= batch <= records.",
        )
        _require(
            swap,
            "A sample of fixed size is accounted under replace_one only: use relation='replace_one', or Poisson "
            "sampling.",
        )
        _require(
            not self.discrete,
            "Discrete noise on samples of fixed size has no accountant: use Poisson sampling, or continuous noise.",
        )

    def to_json(self) -> dict[str, Any]:
        """The fact as JSON values; an infinite multiplier, which JSON cannot hold, becomes the string 'inf'."""
        d = dataclasses.asdict(self)
        if not self.seeded:
            del d["seeded"]
        return d if math.isfinite(self.noise_multiplier) else d | {"noise_multiplier": "inf"}

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> Mechanism:
        """The inverse of `to_json`, with every check of the constructor."""
        try:
            return cls(**d)
        except TypeError as error:
            raise ConfigError(f"{d!r} does not describe a mechanism: {error}.") from error


Spent = Sequence[tuple[Mechanism, int]]
"""Mechanisms, each with how many times it was run."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-differential privacy: always an upper bound, and `tight` if it is close to the truth."""

    epsilon: float
    delta: float
    accountant: str
    tight: bool


def rounded_up(value: float, digits: int = 3) -> str:
    """For people: what is printed is never less than what holds.

    >>> rounded_up(2.9951), rounded_up(3.0), rounded_up(math.inf)
    ('2.996', '3.000', '∞')
    """
    return f"{math.ceil(value * 10**digits - 1e-9) / 10**digits:.{digits}f}" if math.isfinite(value) else "∞"


def epsilon(spent: Spent, delta: float) -> Guarantee:
    """The epsilon that the composition of `spent` costs at `delta`.

    >>> round(epsilon([(Mechanism(kind="gaussian", noise_multiplier=1), 1)], 1e-5).epsilon, 3)
    4.377
    """
    _require(0 < delta < 1, f"delta={delta} must lie strictly between 0 and 1.")
    curve = _curve(spent, delta)
    return Guarantee(epsilon=curve.epsilon(delta), delta=delta, accountant=curve.name, tight=curve.tight)


def delta(spent: Spent, epsilon: float) -> Guarantee:
    """The delta that the composition of `spent` costs at `epsilon`."""
    _require(epsilon >= 0, f"epsilon={epsilon} must be zero or positive.")
    curve = _curve(spent)
    found = curve.delta(epsilon)
    if isinstance(curve, _Pld) and found <= 4 * curve.margin:  # below what a PLD resolves
        curve = _curve(spent, found)
        found = min(found, curve.delta(epsilon))
    return Guarantee(epsilon=epsilon, delta=found, accountant=curve.name, tight=curve.tight)


def trade_off(spent: Spent, alphas: npt.ArrayLike) -> _Array:
    """Least false negative rate of any test that tells neighbours apart at false positive rates `alphas`.

    A lower bound: each (eps, delta(eps)) forbids the tests below two lines, so the largest over any set of eps is
    a bound as well. Exact for unsampled Gaussians.
    """
    alpha = np.atleast_1d(np.asarray(alphas, dtype=np.float64))
    _require(bool(np.all((alpha >= 0) & (alpha <= 1))), "alphas must be probabilities, between 0 and 1.")
    curve = _curve(spent)
    beta = np.zeros_like(alpha)
    if isinstance(curve, _Gdp):
        special = _special()
        return beta if curve.mu == math.inf else np.asarray(special.ndtr(-special.ndtri(alpha) - curve.mu))
    epsilons, deltas = curve.points()
    for e, d in zip(np.minimum(epsilons, 700), deltas, strict=True):
        beta = np.maximum(beta, np.maximum(1 - d - np.exp(e) * alpha, np.exp(-e) * (1 - d - alpha)))
    return beta


def zcdp_rho(spent: Spent) -> float:
    """The exact rho of zero-concentrated differential privacy; unsampled Gaussians only."""
    return _mu(_normal(spent)[0], discrete=True) ** 2 / 2


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The epsilon that rho-zCDP implies at `delta`, rho + 2·sqrt(rho·ln(1/delta)) (Bun and Steinke 2016, Prop. 1.3).

    An upper bound, for comparison with papers that report it: for Gaussians `epsilon` is exact and never above it.

    >>> round(zcdp_epsilon(0.5, 1e-5), 3)
    5.299
    """
    _require(rho >= 0, f"rho={rho} must be zero or positive.")
    _require(0 < delta < 1, f"delta={delta} must lie strictly between 0 and 1.")
    return rho + 2 * math.sqrt(rho * -math.log(delta))


def gdp_mu(spent: Spent) -> float:
    """The exact mu of Gaussian differential privacy; unsampled continuous Gaussians only."""
    return _mu(_normal(spent)[0], discrete=False)


def gdp_clt_mu(mechanism: Mechanism, count: int) -> float:
    """The mu that the central limit theorem gives `count` sampled units: an ESTIMATE, no guarantee.

    Poisson samples under add_remove: rate·sqrt(count·(e^(1/σ²) - 1)) (Bu, Dong, Long, Su 2020). Samples of fixed size:
    rate·sqrt(2·count)·h(σ) with h² = e^(1/σ²)·Φ(1.5/σ) + 3Φ(-0.5/σ) - 2 (Dong, Roth, Su 2019, Corollary 5.4).
    """
    sized = mechanism.kind == "fixed_size"
    ok = sized or (mechanism.kind == "poisson" and mechanism.relation == "add_remove")
    _require(ok, "The central-limit estimate is for Poisson samples under add_remove and samples of fixed size.")
    rate, x = _rate(mechanism), 1 / max(mechanism.noise_multiplier, _NO_NOISE)
    if x * x > 500:
        return math.inf
    if not sized or rate == 1:
        return _clt_mu(mechanism) * math.sqrt(count)
    # Φ(1.5x) + 3Φ(-0.5x) - 2 by the error function, which keeps its digits where x is small.
    far, near = math.erf(1.5 * x / math.sqrt(2)), math.erf(0.5 * x / math.sqrt(2))
    h_squared = math.expm1(x * x) * (1 + far) / 2 + (far - 3 * near) / 2
    return rate * math.sqrt(2 * count * h_squared)


def gdp_clt_estimate(mechanism: Mechanism, count: int, delta: float) -> float:
    """An ESTIMATE of epsilon from `gdp_clt_mu`. As a rule it is too low, at little noise far too high: no guarantee.

    At σ = 0.6, rate 256/60000, 2347 steps and delta 1e-5 it claims 3.40 for 4.95; at σ = 0.3, 1656 for 58. Here only
    for comparison with papers that report it.
    """
    return _Gdp(gdp_clt_mu(mechanism, count)).epsilon(delta)


def noise_for(mechanism: Mechanism, count: int, epsilon: float, delta: float, *, before: Spent = ()) -> float:
    """The least noise multiplier with which `count` units after `before` stay within (epsilon, delta).

    The multiplier in `mechanism` is ignored. The answer is verified by the accountant that will judge the run:
    never above `epsilon`, and at most 0.5% of what `before` left of it unused, wherever that can be reached.
    """
    _check_budget(epsilon, delta)
    _require(count >= 1, f"count={count}: noise is chosen for at least one unit.")
    paid = _curve(before, delta).epsilon(delta)
    if paid >= epsilon:
        spent = f"epsilon={epsilon} at delta={delta} is spent already (epsilon {paid:.4g})"
        raise BudgetExceeded(f"{spent}: no noise can meet it. Raise the budget, or stop here.")
    if mechanism.rate == 0:
        return 0.0

    def search(start: float, coarse: int, slack: float) -> float:
        base = _curve(before, delta, coarse).epsilon(delta)
        left = epsilon - base

        def excess(strength: float) -> float:
            unit = dataclasses.replace(mechanism, noise_multiplier=1 / strength)
            return _curve([*before, (unit, count)], delta, coarse).epsilon(delta) - base

        def done(low: float, used: float, high: float) -> bool:
            return used >= (1 - slack) * left or high < low * (1 + 1e-6)

        return _largest(excess, start, left, done, aim=1 - slack / 2, power=1.0) if left > 0 else start

    mu, rate = _Gdp.mu_for(epsilon - paid, delta) / math.sqrt(count), _rate(mechanism)
    start = mu if rate == 1 else math.sqrt(math.log1p((mu / rate) ** 2))
    strength = search(search(start, coarse=4, slack=0.003) or start, coarse=1, slack=0.0045)
    if strength == 0:
        raise BudgetExceeded(f"No noise keeps to epsilon={epsilon} at delta={delta} here: raise one of them.")
    return 1 / strength


def count_for(mechanism: Mechanism, epsilon: float, delta: float, *, before: Spent = ()) -> int:
    """The largest number of units after `before` within (epsilon, delta); 0 if none, at most MAX_COUNT.

    Above a million it may be short by one in a million.
    """
    _check_budget(epsilon, delta)

    def cost(count: float) -> float:
        return _curve([*before, (mechanism, int(count))], delta).epsilon(delta)

    def done(low: float, used: float, high: float) -> bool:
        return high - low <= max(1, 1e-6 * low) or low >= MAX_COUNT

    if cost(0) > epsilon:
        return 0
    if _is_free(mechanism):
        return MAX_COUNT
    start = (_Gdp.mu_for(epsilon, delta) / min(_clt_mu(mechanism), 1e6)) ** 2
    start = min(max(1.0, start), MAX_COUNT)
    return int(_largest(cost, start, epsilon, done, aim=1.0, power=0.5, whole=True))


class _Curve(ABC):
    """delta as a function of epsilon, and back; both are upper bounds."""

    name: str
    tight: bool

    @abstractmethod
    def epsilon(self, delta: float) -> float: ...

    @abstractmethod
    def delta(self, epsilon: float) -> float: ...

    def points(self) -> tuple[_Array, _Array]:
        """Enough (epsilon, delta) of the curve to draw it."""
        deltas = np.concatenate([np.geomspace(1e-8, 0.005, 40), np.linspace(0.01, 0.99, 99)])
        return np.array([self.epsilon(float(d)) for d in deltas]), deltas


class _Gdp(_Curve):
    """mu-Gaussian: delta = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2) (Balle and Wang 2018)."""

    name, tight = "gdp (exact)", True

    def __init__(self, mu: float):
        self.mu = mu

    def delta(self, epsilon: float) -> float:
        if not 0 < self.mu < math.inf:
            return float(self.mu > 0)
        a, b = (float(_special().log_ndtr(x - epsilon / self.mu)) for x in (self.mu / 2, -self.mu / 2))
        return math.exp(a) * -math.expm1(min(0.0, epsilon + b - a))

    def epsilon(self, delta: float) -> float:
        # The part of 1e-12 covers the rounding of `delta`, so that the answer is never too small.
        return math.inf if self.mu == math.inf else _smallest(lambda e: self.delta(e) <= delta * (1 - 1e-12))

    @classmethod
    def mu_for(cls, epsilon: float, delta: float) -> float:
        return 1 / _smallest(lambda s: s > 0 and cls(1 / s).delta(epsilon) <= delta)


class _Pld(_Curve):
    """A privacy loss distribution on a grid, rounded pessimistically; `margin` covers its rounding errors."""

    name, tight = "pld", True

    def __init__(self, pld: Any, margin: float):
        self._pld, self.margin = pld, margin

    def epsilon(self, delta: float) -> float:
        return float(self._pld.get_epsilon_for_delta(delta - self.margin))

    def delta(self, epsilon: float) -> float:
        return float(min(1.0, max(0.0, self._pld.get_delta_for_epsilon(epsilon)) + self.margin))

    def points(self) -> tuple[_Array, _Array]:
        grid = np.linspace(0, self.epsilon(max(1e-8, 4 * self.margin)), 128)
        with np.errstate(over="ignore", invalid="ignore"):
            deltas = np.asarray(self._pld.get_delta_for_epsilon(grid), dtype=np.float64)
        return grid, np.clip(np.nan_to_num(deltas, nan=1.0), 0, 1) + self.margin  # 1 where e^epsilon overflowed


class _Rdp(_Curve):
    name, tight = "rdp", False

    def __init__(self, orders: Sequence[float], rdp: Sequence[float]):
        self._orders, self._rdp = orders, rdp

    def epsilon(self, delta: float) -> float:
        return float(_dp().rdp.compute_epsilon(self._orders, self._rdp, delta)[0])

    def delta(self, epsilon: float) -> float:
        return float(_dp().rdp.compute_delta(self._orders, self._rdp, epsilon)[0])


class _Both(_Curve):
    """Basic composition of two parts at half of delta each.

    The parts may be interleaved and adaptive: concurrent composition costs no more (Vadhan and Zhang 2023).
    """

    name, tight = "pld + rdp (basic composition)", False

    def __init__(self, first: _Curve, second: _Curve):
        self._parts = first, second

    def epsilon(self, delta: float) -> float:
        return sum(part.epsilon(delta / 2) for part in self._parts)

    def delta(self, epsilon: float) -> float:
        found = 1.0
        for factor in (1e-3, 0.1, 0.5, 0.9, 0.99, 0.999):
            while found > 1e-35 and self.epsilon(found * factor) <= epsilon:
                found *= factor
        return found

    def points(self) -> tuple[_Array, _Array]:
        (e1, d1), (e2, d2) = (part.points() for part in self._parts)
        return np.add.outer(e1[::4], e2[::4]).ravel(), np.add.outer(d1[::4], d2[::4]).ravel()


_Units = list[tuple[Mechanism, int]]


def _curve(spent: Spent, delta: float | None = None, coarse: int = 1) -> _Curve:
    """The accountant for these units (the table at the head of the module).

    A PLD resolves no delta near its margin, and its grid cannot span epsilons in the thousands; there the Renyi
    bound answers. `coarse` widens the grid: cheaper, never lower, for the first part of a search.
    """
    units, relation = _normal(spent)
    if any(m.noise_multiplier < _NO_NOISE for m, _ in units):
        return _Gdp(math.inf)
    renyi = [u for u in units if u[0].discrete or u[0].kind == "fixed_size"]
    plain = [u for u in units if u not in renyi]
    sampled = any(m.kind == "poisson" for m, _ in plain)
    if not renyi and not sampled:
        return _Gdp(_mu(plain, discrete=False))
    if (delta is None or delta > 4 * _margin(plain)) and (h := _grid(plain, relation)) < 0.05:
        if not renyi:
            return _pld(plain, relation, h * coarse)
        if sampled and relation == "replace_one":  # where Renyi has only a loose bound for Poisson samples
            return _Both(_pld(plain, relation, h * coarse), _rdp(renyi, relation))
    return _rdp(units, relation)


def _normal(spent: Spent) -> tuple[_Units, Relation]:
    """The units that cost something, under one relation, equal ones merged, and no sample that holds everyone."""
    swap = any(m.relation == "replace_one" for m, count in spent if count > 0)
    relation: Relation = "replace_one" if swap else "add_remove"
    merged: dict[Mechanism, int] = {}
    for m, count in spent:
        _require(count >= 0 and count == int(count), f"count={count} of {m} must be a whole number, 0 or more.")
        if count == 0 or _is_free(m):
            continue
        # dp-accounting overflows far above; less noise costs no less
        sigma = 0.0 if m.seeded else min(m.noise_multiplier, 1e9)
        unit = dataclasses.replace(m, noise_multiplier=sigma, seeded=False)
        if _rate(m) == 1:
            sigma = sigma / 2 if swap and (m.kind == "poisson" or m.relation == "add_remove") else sigma
            unit = Mechanism(kind="gaussian", noise_multiplier=sigma, relation=relation, discrete=m.discrete)
        elif not m.discrete:
            unit = dataclasses.replace(unit, relation=relation)
        merged[unit] = merged.get(unit, 0) + int(count)
    return list(merged.items()), relation


def _is_free(m: Mechanism) -> bool:
    return m.rate == 0 or (m.noise_multiplier == math.inf and not m.seeded)


def _rate(m: Mechanism) -> float:
    return m.rate if m.batch is None or m.records is None else m.batch / m.records


def _mu(units: _Units, *, discrete: bool) -> float:
    """sqrt(Σ count/σ²): the composition of unsampled Gaussians."""
    for m, _ in units:
        exact = m.kind == "gaussian" and (discrete or not m.discrete)
        _require(exact, f"{m} has no exact closed form, being no unsampled Gaussian: use epsilon().")
    if any(m.noise_multiplier < _NO_NOISE for m, _ in units):
        return math.inf
    return math.hypot(*(math.sqrt(count) / m.noise_multiplier for m, count in units))


def _margin(units: _Units) -> float:
    """What floating point may have taken from the delta of a PLD.

    A T-fold composition is the T-th power of a Fourier transform, so its relative error grows with T. Against
    the closed form for Gaussians, composed 10^4 and 10^6 times, delta was off by 4e-17·T; this is 25 times that.
    """
    return 1e-15 * (10 + sum(count for _, count in units))


def _grid(units: _Units, relation: Relation) -> float:
    """The grid interval of the privacy loss: 1e-4 wherever that is fine enough and not too fine.

    An interval h adds about h²/6 to the variance v of one step's loss, hence h²/(12 v) to epsilon, relatively:
    kept below 2e-4 where steps lose little. The other bounds limit the number of points of one step and of the
    whole. A power of two times 1e-4, so that a search meets the same grid again.
    """
    swap = 2.0 if relation == "replace_one" else 1.0
    shifts = [(c, _rate(m), (swap if m.kind == "poisson" else 1) / m.noise_multiplier) for m, c in units]
    # Roughly the variance of a step's loss: that of the central limit, or that of rare large losses.
    variance = sum(c * min(q * q * math.expm1(min(x * x, 500)), q * (x**2 + x**4 / 4)) for c, q, x in shifts)
    # log(1 - q + q e^L), with the Gaussian's loss L at ten standard deviations, where dp-accounting stops.
    losses = [(q, 10 * x + x * x / 2) for _, q, x in shifts]
    widest = max((math.log1p(q * math.expm1(loss)) if loss < 700 else loss for q, loss in losses), default=0)
    h = min(1e-4, 0.05 * math.sqrt(variance / max(1, sum(c for c, _, _ in shifts))))
    h = max(h, widest / 1e5, math.sqrt(variance) / 8e4, 1e-12)
    return 1e-4 * 2.0 ** math.floor(math.log2(h / 1e-4))


def _pld(units: _Units, relation: Relation, h: float) -> _Pld:
    pld = _dp().pld
    total = pld.identity(value_discretization_interval=h)
    mu = _mu([u for u in units if u[0].kind == "gaussian"], discrete=False)
    if mu > 0:
        # The multiplier of an unsampled Gaussian holds the relation already: not REPLACE_ONE, which doubles.
        total = total.compose(pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=h))
    for m, count in units:
        if m.kind == "poisson":
            total = total.compose(_poisson_pld(m.noise_multiplier, m.rate, relation, h, count))
    return _Pld(total, _margin(units))


@lru_cache(maxsize=4)
def _poisson_pld(sigma: float, rate: float, relation: Relation, h: float, count: int) -> Any:
    return _self_compose(_step_pld(sigma, rate, relation, h), count)


def _self_compose(pld: Any, count: int) -> Any:
    """pld.self_compose, in stages of 4096.

    In one, its bound on the tails is bad where the result is far longer than the input, and for a short ("sparse")
    input it first computes the integer size**count, which never ends for a large count.
    """
    if count < 2**16:
        return pld.self_compose(count)
    whole, rest = divmod(count, 2**12)
    total = _self_compose(pld.self_compose(2**12), whole)
    return total.compose(pld.self_compose(rest)) if rest else total


@lru_cache(maxsize=16)
def _step_pld(sigma: float, rate: float, relation: Relation, h: float) -> Any:
    pld, neighbours = _dp().pld, _dp().neighbours
    return pld.from_gaussian_mechanism(
        sigma,
        value_discretization_interval=h,
        sampling_prob=rate,
        # REPLACE_ONE sets (1-q)N(0) + qN(1) against (1-q)N(0) + qN(-1): the factor 2 is in there.
        neighboring_relation=neighbours[relation],
    )


_ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *map(float, range(11, 64)),
    *(64.0, 80.0, 96.0, 128.0, 192.0, 257.0, 384.0, 512.0, 1024.0),  # fixed_size takes order² time up to 256
)
# Per unit. A tiny divergence is what remains of logarithms near 0, and dp-accounting takes one that rounding made
# negative for epsilon 0.
_RDP_MARGIN = 1e-13


def _rdp(units: _Units, relation: Relation) -> _Rdp:
    """Renyi accounting.

    Formal guarantee for discrete noise, at integer orders a: for shifts by integer vectors the discrete
    Gaussian's Renyi divergences are at most the continuous one's (Canonne, Kamath, Steinke 2020, Proposition 5).
    For a sampled one, E_A[((1-q) + q·B/A)^a] expands by the binomial theorem into moments of B/A with positive
    weights, hence is monotone in those divergences; the add direction is dominated by the remove direction
    because the reflection x -> shift - x exchanges A and B (Mironov, Talwar, Zhang 2019, Theorem 5). Fractional
    orders have no such expansion and are left out.
    """
    orders = tuple(a for a in _ORDERS if a.is_integer()) if any(m.discrete for m, _ in units) else _ORDERS
    total, a = np.zeros(len(orders)), np.array(orders)
    for m, count in units:
        if m.kind == "poisson" and relation == "replace_one":
            # Remove, then add: the triangle inequality of Renyi divergences with p = q = 2 (Mironov 2017,
            # Proposition 11). Loose but sound; reached only where no PLD can be used.
            removed, added = _step_rdp(m, tuple(2 * a)), _step_rdp(m, tuple(2 * a - 1))
            total += count * ((a - 0.5) / (a - 1) * removed + added)
        else:
            total += count * _step_rdp(m, orders)
    return _Rdp(orders, [float(r) for r in total])


@lru_cache(maxsize=64)
def _step_rdp(m: Mechanism, orders: tuple[float, ...]) -> _Array:
    """Divergences of one unit: of a Poisson sample always under add_remove, of the others under their relation."""
    dp = _dp()
    event, relation = dp.events.GaussianDpEvent(m.noise_multiplier), "add_remove"
    if m.kind == "poisson":
        event = dp.events.PoissonSampledDpEvent(m.rate, event)
    elif m.kind == "fixed_size":
        # Wang, Balle, Kasiviswanathan 2019, Theorem 27, amplifies the Gaussian's divergences under replace_one.
        # dp-accounting takes those from the multiplier alone, which therefore must hold the factor 2: ours does.
        event, relation = dp.events.SampledWithoutReplacementDpEvent(m.records, m.batch, event), "replace_one"
    accountant = dp.rdp.RdpAccountant(orders=orders, neighboring_relation=dp.neighbours[relation])
    return np.asarray(np.maximum(accountant.compose(event).rdp, 0) + _RDP_MARGIN)


def _clt_mu(m: Mechanism) -> float:
    """One step's mu in the central limit: where a search starts, never an answer."""
    x = 1 / max(m.noise_multiplier, _NO_NOISE)
    return x if _rate(m) == 1 else _rate(m) * math.sqrt(math.expm1(min(x * x, 500)))


def _smallest(enough: Callable[[float], bool]) -> float:
    """The least x >= 0 with enough(x), from above, to the last bits of a float."""
    if enough(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1e-14 * high and high > 1e-300:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _largest(
    cost: Callable[[float], float],
    start: float,
    budget: float,
    done: Callable[[float, float, float], bool],
    *,
    aim: float,
    power: float,
    whole: bool = False,
) -> float:
    """The largest x with cost(x) <= budget, as exactly as `done(low, cost(low), high)` asks; 0 if there is none.

    cost is increasing and, locally, close to a power of x: a line through logarithms finds the place in few calls.
    cost(low) <= budget < cost(high) throughout, so what is returned was verified, whatever the shape of cost.
    """
    low, y_low, high, y_high = 0.0, 0.0, math.inf, math.inf
    x = start
    for call in range(1, 200):
        x = math.floor(x) if whole else x
        y = cost(x)
        if y <= budget:
            low, y_low = x, y
        else:
            high, y_high = x, y
        if done(low, y_low, high) or high < 1e-12:
            break
        bracketed = low > 0 and high < math.inf
        if bracketed and 0 < y_low < y_high < math.inf:
            power = max(math.log(y_high / y_low) / math.log(high / low), 1e-3)
        if bracketed and (call % 8 == 0 or not 0 < y < math.inf):  # no power law here: halve
            x = math.sqrt(low) * math.sqrt(high)
        else:
            x *= min(max((aim * budget / min(max(y, 1e-9), 1e9)) ** (1 / power), 1 / 16), 16)
        if bracketed:
            x = min(max(x, low * (high / low) ** 0.02), low * (high / low) ** 0.98)
        if whole:
            x = min(max(x, low + 1), high - 1, MAX_COUNT)
    return low


@cache
def _special() -> Any:
    from scipy import special  # noqa: PLC0415

    return special


@cache
def _dp() -> Any:
    """dp-accounting, imported on first use: it takes longer than all of Privet."""
    import dp_accounting  # noqa: PLC0415
    from dp_accounting.pld import privacy_loss_distribution  # noqa: PLC0415
    from dp_accounting.rdp import rdp_privacy_accountant  # noqa: PLC0415

    relations = dp_accounting.NeighboringRelation
    neighbours = {"add_remove": relations.ADD_OR_REMOVE_ONE, "replace_one": relations.REPLACE_ONE}
    return SimpleNamespace(
        events=dp_accounting, pld=privacy_loss_distribution, rdp=rdp_privacy_accountant, neighbours=neighbours
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_budget(epsilon: float, delta: float) -> None:
    _require(0 < epsilon < math.inf, f"epsilon={epsilon} must be positive and finite: no noise can meet it.")
    _require(0 < delta < 1, f"delta={delta} must lie strictly between 0 and 1: no noise can meet it.")
