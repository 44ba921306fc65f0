"""Epsilon, delta, the trade-off curve, and the search for the noise or the steps that meet a budget.

A `Mechanism` is a fact (what was run); the functions of this module interpret a list of such facts. Which
accountant does so is decided in one place, `_curve`:

    only unsampled Gaussians                      the closed form of Gaussian differential privacy: exact
    Poisson samples, with or without Gaussians    privacy loss distribution (PLD): an upper bound, tight
    samples of fixed size, or discrete noise      Renyi divergences (RDP): an upper bound, loose
    PLD and RDP units together                    each at half of delta, the epsilons added

Formal guarantee: every epsilon (delta) handed out is an upper bound on the least epsilon (delta) at which the
adaptive composition of the units is (epsilon, delta)-differentially private under the relation in force. Floating
point is covered by margins far above the errors measured (`_pld_margin`, `_RDP_MARGIN`), not by interval
arithmetic.

Two relations in one list are both brought to `replace_one`: exchanging a record removes one and adds another, so
that what one record can move by c when it is added moves by at most 2c when it is exchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from privet.errors import BudgetExceeded, ConfigError

Relation = Literal["add_remove", "replace_one"]
_Array = npt.NDArray[np.float64]
MAX_COUNT = 10**9
"""`count_for` looks no further: a mechanism that is cheaper than this is as good as free."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One unit of composition: a noised sum, as an immutable fact that can be written as JSON.

    `noise_multiplier` is the standard deviation of the noise over the sensitivity of the sum, and which
    sensitivity that is depends on `kind`:

    - `poisson`: each record is in the sample with probability `rate`, by its own coin. The sensitivity is the
      largest change when ONE record is present against absent, under both relations; accounting for `replace_one`
      doubles it itself.
    - `gaussian`: no sampling; each record is in exactly one such unit. The sensitivity is the one under `relation`,
      so under `replace_one` it holds the factor 2 already.
    - `fixed_size`: `batch` of `records` records, without replacement; the number of records is public. Only
      `replace_one`, and the sensitivity is the one under an exchange, factor 2 included.

    `discrete`: the noise is discrete Gaussian on an integer grid and the sums are integers of that grid.
    """

    kind: Literal["gaussian", "poisson", "fixed_size"]
    noise_multiplier: float
    relation: Relation = "add_remove"
    rate: float = 1.0
    records: int | None = None
    batch: int | None = None
    discrete: bool = False

    def __post_init__(self) -> None:
        # Plain Python numbers only: inside dp-accounting's nested events an int or a np.float32 multiplier fails an
        # isinstance(float) test, and the composition around it is silently dropped.
        for name, cast in (("noise_multiplier", float), ("rate", float), ("records", int), ("batch", int)):
            value = getattr(self, name)
            if value is None and cast is int:
                continue
            try:
                number = cast(value)
                same = cast is float or number == value
            except (TypeError, ValueError, OverflowError):
                same = False
            _require(same, f"{name}={value!r} is not {'a number' if cast is float else 'a whole number'}.")
            object.__setattr__(self, name, number)
        _require(self.kind in ("gaussian", "poisson", "fixed_size"), f"kind={self.kind!r} is unknown.")
        _require(self.relation in ("add_remove", "replace_one"), f"relation={self.relation!r} is unknown.")
        _require(isinstance(self.discrete, bool), f"discrete={self.discrete!r} must be true or false.")
        _require(self.noise_multiplier >= 0, f"noise_multiplier={self.noise_multiplier} must be zero or positive.")
        _require(0 <= self.rate <= 1, f"rate={self.rate} must be a probability between 0 and 1.")
        _require(self.kind == "poisson" or self.rate == 1, f"rate={self.rate} belongs to kind 'poisson' only.")
        sized = self.kind == "fixed_size"
        if not sized:
            _require(
                self.records is None and self.batch is None,
                "records and batch belong to kind 'fixed_size' only; leave them out.",
            )
        _require(
            not sized or 1 <= (self.batch or 0) <= (self.records or 0),
            f"batch={self.batch} of records={self.records}: a sample of fixed size needs 1 <= batch <= records.",
        )
        _require(
            not sized or self.relation == "replace_one",
            "Sampling a fixed number of records has a proven amplification under replace_one only: state "
            "relation='replace_one', or sample by Poisson.",
        )
        _require(
            not (self.discrete and sized),
            "Discrete noise on samples of fixed size has no accountant: sample by Poisson, or use continuous noise.",
        )
        _require(
            not (self.discrete and self.kind == "poisson" and self.relation == "replace_one"),
            "Discrete noise on Poisson samples is accounted under add_remove only: state relation='add_remove', or "
            "use continuous noise.",
        )

    def to_json(self) -> dict[str, Any]:
        """The fact as JSON values; an infinite multiplier, which JSON cannot hold, becomes the string "inf"."""
        d = dataclasses.asdict(self)
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
    """(epsilon, delta)-differential privacy, an upper bound always; `tight` says that it is close to the truth."""

    epsilon: float
    delta: float
    accountant: str
    tight: bool


def epsilon(spent: Spent, delta: float) -> Guarantee:
    """The epsilon that the composition of `spent` costs at `delta`.

    >>> round(epsilon([(Mechanism(kind="gaussian", noise_multiplier=1), 1)], 1e-5).epsilon, 3)
    4.377
    """
    _require(0 < delta < 1, f"delta={delta} must lie strictly between 0 and 1.")
    curve = _curve(spent, delta=delta)
    return Guarantee(epsilon=curve.epsilon(delta), delta=delta, accountant=curve.name, tight=curve.tight)


def delta(spent: Spent, epsilon: float) -> Guarantee:
    """The delta that the composition of `spent` costs at `epsilon`."""
    _require(epsilon >= 0, f"epsilon={epsilon} must be zero or positive.")
    curve = _curve(spent)
    found = curve.delta(epsilon)
    if isinstance(curve, _Pld) and found <= 4 * curve.margin:  # the floor of the grid: Renyi has none
        curve = _curve(spent, delta=found)
        found = min(found, curve.delta(epsilon))
    return Guarantee(epsilon=epsilon, delta=found, accountant=curve.name, tight=curve.tight)


def trade_off(spent: Spent, alphas: npt.ArrayLike) -> _Array:
    """Least false negative rate of any test that tells two neighbours apart at false positive rates `alphas`.

    A lower bound: each (eps, delta(eps)) rules out the tests below two lines, and the largest over any set of eps is
    ruled out as well. Exact for unsampled Gaussians.
    """
    alpha = np.atleast_1d(np.asarray(alphas, dtype=np.float64))
    _require(bool(np.all((alpha >= 0) & (alpha <= 1))), "alphas must be probabilities between 0 and 1.")
    curve = _curve(spent)
    if isinstance(curve, _Gdp):
        from scipy.special import ndtr, ndtri  # noqa: PLC0415

        return np.asarray(ndtr(-ndtri(alpha) - curve.mu)) if curve.mu < math.inf else np.zeros_like(alpha)
    epsilons, deltas = curve.points()
    beta = np.zeros_like(alpha)
    for e, d in zip(np.minimum(epsilons, 700), deltas, strict=True):
        beta = np.maximum(beta, np.maximum(1 - d - np.exp(e) * alpha, np.exp(-e) * (1 - d - alpha)))
    return beta


def zcdp_rho(spent: Spent) -> float:
    """The exact rho of zero-concentrated differential privacy; unsampled Gaussians only."""
    return _mu([(m, c) for m, c in _normal(spent)[0]], discrete=True) ** 2 / 2


def gdp_mu(spent: Spent) -> float:
    """The exact mu of Gaussian differential privacy; unsampled continuous Gaussians only."""
    return _mu(_normal(spent)[0], discrete=False)


def gdp_clt_estimate(mechanism: Mechanism, count: int, delta: float) -> float:
    """An ESTIMATE of epsilon by the central limit theorem for Poisson samples, and it is too low. Never a guarantee.

    mu = rate·sqrt(count·(e^(1/σ²) - 1)) (Bu, Dong, Long, Su 2020). At σ = 0.5, rate 0.002 and 5000 steps, with
    delta 1e-5, it claims less than the truth by far; see the tests. Offered only to compare with papers that use it.
    """
    _require(
        mechanism.kind == "poisson" and mechanism.relation == "add_remove",
        "The central-limit estimate is for Poisson samples under add_remove.",
    )
    return _Gdp(_clt_mu(mechanism) * math.sqrt(count)).epsilon(delta)


def combined_multiplier(ratios: Iterable[float]) -> float:
    """The one multiplier of several groups noised from one sample, given Δ_g/s_g for each: (Σ r²)^(-1/2).

    >>> combined_multiplier([0.5, 0.5, 0.5, 0.5])
    1.0
    """
    rs = [float(r) for r in ratios]
    _require(all(r >= 0 for r in rs), f"ratios={rs} must be zero or positive.")
    norm = math.hypot(*rs)
    return 1 / norm if norm > 0 else math.inf


def noise_for(mechanism: Mechanism, count: int, epsilon: float, delta: float, *, before: Spent = ()) -> float:
    """The least noise multiplier with which `count` units after `before` stay within (epsilon, delta).

    The multiplier in `mechanism` is ignored. Verified by the accountant that will judge the run: never above
    `epsilon`, and at most 0.5% of what `before` left of it is unused (unless the accountant itself jumps there).
    """
    _check_budget(epsilon, delta)
    _require(count >= 1, f"count={count}: noise is chosen for at least one unit.")
    if mechanism.kind == "poisson" and mechanism.rate == 0:
        return 0.0
    paid = _curve(before, delta=delta).epsilon(delta)
    if paid >= epsilon:
        raise BudgetExceeded(
            f"epsilon={epsilon} at delta={delta} is spent already (epsilon {paid:.4g}): no noise can meet it."
        )

    def search(start: float, coarse: int, slack: float) -> float:
        base = _curve(before, delta=delta, coarse=coarse).epsilon(delta) if coarse > 1 else paid
        left = epsilon - base

        def excess(strength: float) -> float:
            unit = dataclasses.replace(mechanism, noise_multiplier=1 / strength)
            return _curve([*before, (unit, count)], delta=delta, coarse=coarse).epsilon(delta) - base

        def done(low: float, used: float, high: float) -> bool:
            return used >= (1 - slack) * left or high < low * (1 + 1e-7)

        return _largest(excess, start, left, done, aim=1 - slack / 2, power=1.0) if left > 0 else start

    mu = _Gdp.mu_for(epsilon - paid, delta) / math.sqrt(count)
    rate = _rate(mechanism)
    start = math.sqrt(math.log1p((mu / rate) ** 2)) if rate < 1 else mu
    strength = search(search(start, coarse=4, slack=0.003) or start, coarse=1, slack=0.0045)
    if strength == 0:
        raise BudgetExceeded(
            f"epsilon={epsilon} at delta={delta} is more than any noise can keep to: raise epsilon or delta."
        )
    return 1 / strength


def count_for(mechanism: Mechanism, epsilon: float, delta: float, *, before: Spent = ()) -> int:
    """The largest number of units after `before` that stays within (epsilon, delta); 0 if none, at most MAX_COUNT.

    Above a million it may be short by one in a million.
    """
    _check_budget(epsilon, delta)

    def cost(count: float) -> float:
        return _curve([*before, (mechanism, int(count))], delta=delta).epsilon(delta)

    if cost(MAX_COUNT if _is_free(mechanism) else 0) > epsilon:
        return 0
    if _is_free(mechanism):
        return MAX_COUNT
    per_step = min(_clt_mu(mechanism), 1e6)
    start = min(max(1, (_Gdp.mu_for(epsilon, delta) / per_step) ** 2), MAX_COUNT)

    def done(low: float, used: float, high: float) -> bool:
        return high - low <= max(1, 1e-6 * low) or low >= MAX_COUNT

    return int(_largest(cost, start, epsilon, done, aim=1.0, power=0.5, whole=True))


# --- accountants: each is a curve that can be read both ways -----------------------------------------------------


class _Curve:
    """delta as a function of epsilon, and back; both are upper bounds."""

    name: str
    tight: bool

    def epsilon(self, delta: float) -> float:
        raise NotImplementedError

    def delta(self, epsilon: float) -> float:
        raise NotImplementedError

    def points(self) -> tuple[_Array, _Array]:
        """Enough (epsilon, delta) of the curve to draw it."""
        deltas = np.concatenate([np.geomspace(1e-8, 0.005, 40), np.linspace(0.01, 0.99, 99)])
        return np.array([self.epsilon(float(d)) for d in deltas]), deltas


class _Gdp(_Curve):
    """mu-Gaussian differential privacy: delta = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2), exact (Balle and Wang 2018)."""

    name, tight = "gdp (exact)", True

    def __init__(self, mu: float):
        self.mu = mu

    def delta(self, epsilon: float) -> float:
        if not 0 < self.mu < math.inf:
            return float(self.mu > 0)
        from scipy.special import log_ndtr  # noqa: PLC0415

        mu = self.mu
        a = float(log_ndtr(mu / 2 - epsilon / mu))
        b = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        return math.exp(a) * -math.expm1(min(0.0, b - a))

    def epsilon(self, delta: float) -> float:
        return math.inf if self.mu == math.inf else _smallest(lambda e: self.delta(e) <= delta * (1 - 1e-12))

    @classmethod
    def mu_for(cls, epsilon: float, delta: float) -> float:
        return 1 / _smallest(lambda s: s > 0 and cls(1 / s).delta(epsilon) <= delta)


class _Pld(_Curve):
    """A privacy loss distribution on a grid, rounded pessimistically; `margin` covers its floating-point error."""

    name, tight = "pld", True

    def __init__(self, pld: Any, margin: float):
        self._pld, self.margin = pld, margin

    def epsilon(self, delta: float) -> float:
        return float(self._pld.get_epsilon_for_delta(delta - self.margin))

    def delta(self, epsilon: float) -> float:
        return float(self._deltas([epsilon])[0])

    def _deltas(self, epsilons: Sequence[float]) -> _Array:
        deltas = np.asarray(self._pld.get_delta_for_epsilon(epsilons))
        return np.minimum(np.maximum(deltas, 0) + self.margin, 1)

    def points(self) -> tuple[_Array, _Array]:
        grid = np.linspace(0, self.epsilon(max(1e-8, 4 * self.margin)), 400)
        return grid, self._deltas(list(grid))


class _Rdp(_Curve):
    name, tight = "rdp", False

    def __init__(self, orders: Sequence[float], rdp: Sequence[float]):
        self._orders, self._rdp = orders, rdp

    def epsilon(self, delta: float) -> float:
        from dp_accounting.rdp import compute_epsilon  # noqa: PLC0415

        return float(compute_epsilon(self._orders, self._rdp, delta)[0])

    def delta(self, epsilon: float) -> float:
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta  # noqa: PLC0415

        return float(compute_delta(self._orders, self._rdp, epsilon)[0])


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
        # -log(delta) is searched from above; 80 nepers are beyond any delta that anyone asks for.
        found = 1.0
        for step in np.geomspace(1, 1e-3, 11):
            while found > 1e-35 and self.epsilon(found * math.exp(-8 * step)) <= epsilon:
                found *= math.exp(-8 * step)
        return found

    def points(self) -> tuple[_Array, _Array]:
        (e1, d1), (e2, d2) = (part.points() for part in self._parts)
        return np.add.outer(e1[::4], e2[::4]).ravel(), np.add.outer(d1[::4], d2[::4]).ravel()


Units = list[tuple[Mechanism, int]]


def _curve(spent: Spent, *, delta: float | None = None, coarse: int = 1) -> _Curve:
    """The accountant for these units (the table at the head of the module).

    `coarse` widens the grid of a PLD: cheaper and never lower, for the first part of a search.
    A PLD has no resolution below its margin; for such a `delta` the Renyi bound is used, which has no such floor.
    """
    units, relation = _normal(spent)
    if any(m.noise_multiplier == 0 for m, _ in units):
        return _Gdp(math.inf)
    renyi = [u for u in units if u[0].discrete or u[0].kind == "fixed_size"]
    plain = [u for u in units if u not in renyi]
    if not renyi and all(m.kind == "gaussian" for m, _ in plain):
        return _Gdp(_mu(plain, discrete=False))
    margin = _pld_margin(plain)
    pld_works = _grid(plain, relation, coarse) < 0.05 and (delta is None or delta > 4 * margin)
    if not renyi:
        return _pld(plain, relation, coarse) if pld_works else _rdp(units, relation)
    if pld_works and relation == "replace_one" and any(m.kind == "poisson" for m, _ in plain):
        return _Both(_pld(plain, relation, coarse), _rdp(renyi, relation))
    return _rdp(units, relation)


def _normal(spent: Spent) -> tuple[Units, Relation]:
    """Units that cost something, under one relation, with equal ones merged and sampling of everyone undone."""
    relations = {m.relation for m, c in spent if c > 0}
    relation: Relation = "replace_one" if "replace_one" in relations else "add_remove"
    merged: dict[Mechanism, int] = {}
    for m, count in spent:
        _require(count >= 0 and int(count) == count, f"count={count} of {m} must be a whole number, zero or more.")
        if count == 0 or _is_free(m):
            continue
        sigma, everyone = m.noise_multiplier, _rate(m) == 1
        counts_present = m.relation == "add_remove" or m.kind == "poisson"
        if everyone:
            sigma = sigma / 2 if relation == "replace_one" and counts_present else sigma
            m = Mechanism(kind="gaussian", noise_multiplier=sigma, relation=relation, discrete=m.discrete)
        elif not m.discrete:
            m = dataclasses.replace(m, relation=relation)
        merged[m] = merged.get(m, 0) + int(count)
    return list(merged.items()), relation


def _is_free(m: Mechanism) -> bool:
    return m.noise_multiplier == math.inf or m.rate == 0


def _rate(m: Mechanism) -> float:
    return m.rate if m.batch is None or m.records is None else m.batch / m.records


def _mu(units: Units, *, discrete: bool) -> float:
    """sqrt(Σ count/σ²), the composition of unsampled Gaussians."""
    for m, _ in units:
        _require(
            m.kind == "gaussian" and (discrete or not m.discrete),
            f"{m} is not an unsampled Gaussian, for which alone the closed form is exact: use epsilon().",
        )
    if any(m.noise_multiplier == 0 for m, _ in units):
        return math.inf
    return math.sqrt(sum(c / m.noise_multiplier**2 for m, c in units))


# --- PLD ---------------------------------------------------------------------------------------------------------


def _pld_margin(units: Units) -> float:
    """What floating point may have taken from delta.

    A T-fold composition is the T-th power of a Fourier transform, so its relative error grows with T. Against the
    closed form for Gaussians (10^4 to 10^6-fold) delta was off by up to 4e-17·T; the margin is 25 times that.
    """
    return 1e-15 * (10 + sum(c for _, c in units))


def _grid(units: Units, relation: Relation, coarse: int) -> float:
    """The grid interval of the privacy loss: 1e-4 wherever that is fine enough and not too fine.

    An interval h adds about h²/6 to the variance of each step's loss, hence h²/(12 v) to epsilon, relatively, if v is
    that variance: kept below 2e-4 for steps of tiny loss. At the other end the number of points is bounded. Powers
    of two, so that searches meet the same grid again.
    """
    swap = 2.0 if relation == "replace_one" else 1.0
    shifts = [(c, _rate(m), (swap if m.kind == "poisson" else 1) / m.noise_multiplier) for m, c in units]
    variance = sum(c * _loss_variance(rate, x) for c, rate, x in shifts)
    steps = sum(c for c, _, _ in shifts)
    widest = max((2 * _largest_loss(rate, x) for _, rate, x in shifts), default=0.0)
    h = min(1e-4, 0.05 * math.sqrt(variance / max(1, steps)))
    h = max(h, widest / 2e5, 26 * math.sqrt(variance) / 2e6)
    return 1e-4 * 2.0 ** math.floor(math.log2(max(h, 1e-12) / 1e-4)) * coarse


def _loss_variance(rate: float, shift: float) -> float:
    """A rough variance of one step's privacy loss: the central-limit one, or that of the rare large losses."""
    return min(rate**2 * math.expm1(min(shift**2, 500)), rate * (shift**2 + shift**4 / 4))


def _largest_loss(rate: float, shift: float) -> float:
    """log(1 - rate + rate·e^L) for the Gaussian's loss L at ten standard deviations, where dp-accounting stops."""
    loss = 10 * shift + shift**2 / 2
    return math.log1p(rate * math.expm1(loss)) if loss < 700 else loss


def _pld(units: Units, relation: Relation, coarse: int) -> _Pld:
    from dp_accounting.pld import privacy_loss_distribution as pld  # noqa: PLC0415

    h = _grid(units, relation, coarse)
    total = pld.identity(value_discretization_interval=h)
    mu = _mu([u for u in units if u[0].kind == "gaussian"], discrete=False)
    if mu > 0:
        # The multiplier of an unsampled Gaussian holds the relation already: never REPLACE_ONE, which doubles.
        total = total.compose(pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=h))
    for m, count in units:
        if m.kind == "poisson":
            total = total.compose(_poisson_pld(m.noise_multiplier, m.rate, relation == "replace_one", h, count))
    return _Pld(total, _pld_margin(units))


@lru_cache(maxsize=4)
def _poisson_pld(sigma: float, rate: float, replace: bool, h: float, count: int) -> Any:
    return _self_compose(_step_pld(sigma, rate, replace, h), count)


def _self_compose(pld: Any, count: int) -> Any:
    """pld.self_compose, in stages of 4096: its tail bound is made for results not much longer than their input."""
    if count < 2**16:
        return pld.self_compose(count)
    whole, rest = divmod(count, 2**12)
    total = _self_compose(pld.self_compose(2**12), whole)
    return total.compose(pld.self_compose(rest)) if rest else total


@lru_cache(maxsize=16)
def _step_pld(sigma: float, rate: float, replace: bool, h: float) -> Any:
    from dp_accounting import NeighboringRelation as Neighbours  # noqa: PLC0415
    from dp_accounting.pld import privacy_loss_distribution as pld  # noqa: PLC0415

    step = pld.from_gaussian_mechanism(
        sigma,
        value_discretization_interval=h,
        sampling_prob=rate,
        # Mixtures (1-q)N(0) + qN(±1): both records may be sampled, at twice the distance.
        neighboring_relation=Neighbours.REPLACE_ONE if replace else Neighbours.ADD_OR_REMOVE_ONE,
    )
    # A short distribution is kept "sparse", and its self_compose(T) begins with the integer size**T: hours for a
    # large T. The dense form has the same numbers.
    remove, add = step._pmf_remove.to_dense_pmf(), step._pmf_add.to_dense_pmf()
    return pld.PrivacyLossDistribution(remove) if replace else pld.PrivacyLossDistribution(remove, add)


# --- RDP ---------------------------------------------------------------------------------------------------------

_ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *map(float, range(11, 64)),
    *(64.0, 80.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 1024.0),
)
_RDP_MARGIN = 1e-13
"""Per unit. Divergences near zero are differences of logarithms near one; dp-accounting takes one that rounding has
made negative for epsilon 0."""


def _rdp(units: Units, relation: Relation) -> _Rdp:
    """Renyi accounting of units that `_normal` brought to one relation.

    Formal guarantee for discrete noise, at integer orders a: for shifts by integer vectors the discrete Gaussian's
    Renyi divergences are at most the continuous one's (Canonne, Kamath, Steinke 2020, Proposition 5). For a sampled
    one, E_A[((1-q) + q·B/A)^a] expands by the binomial theorem into moments of B/A with positive weights, hence is
    monotone in those divergences; and the add direction is dominated by the remove direction because the reflection
    x -> shift - x exchanges A and B (Mironov, Talwar, Zhang 2019, Theorem 5). Fractional orders have no such
    expansion and are left out.
    """
    orders = tuple(a for a in _ORDERS if a.is_integer()) if any(m.discrete for m, _ in units) else _ORDERS
    total = np.zeros(len(orders))
    for m, count in units:
        if m.kind == "poisson" and relation == "replace_one":
            # Exchange = remove, then add: the triangle inequality of Renyi divergences with p = q = 2 (Mironov 2017,
            # Proposition 11). Loose, but sound; reached only where no PLD can be used.
            a = np.array(orders)
            one = _step_rdp(dataclasses.replace(m, relation="add_remove"), tuple(2 * a))
            two = _step_rdp(dataclasses.replace(m, relation="add_remove"), tuple(2 * a - 1))
            total += count * ((a - 0.5) / (a - 1) * one + two)
        else:
            total += count * _step_rdp(m, orders)
    return _Rdp(orders, [float(r) for r in total])


@lru_cache(maxsize=64)
def _step_rdp(m: Mechanism, orders: tuple[float, ...]) -> _Array:
    import dp_accounting as dp  # noqa: PLC0415
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    event = dp.GaussianDpEvent(m.noise_multiplier)
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if m.kind == "poisson":
        event = dp.PoissonSampledDpEvent(m.rate, event)
    elif m.kind == "fixed_size":
        # Wang, Balle, Kasiviswanathan 2019, Theorem 27: amplifies the replace-one divergences of the Gaussian, which
        # dp-accounting computes from the multiplier alone; so the multiplier must hold the factor 2, as ours does.
        relation = dp.NeighboringRelation.REPLACE_ONE
        event = dp.SampledWithoutReplacementDpEvent(m.records, m.batch, event)
    accountant = RdpAccountant(orders=orders, neighboring_relation=relation)
    accountant.compose(event)
    return np.asarray(np.maximum(accountant.rdp, 0) + _RDP_MARGIN)


# --- searches ----------------------------------------------------------------------------------------------------


def _clt_mu(m: Mechanism) -> float:
    """One step's mu in the central limit: the start of a search, and never an answer."""
    x = 1 / m.noise_multiplier**2 if m.noise_multiplier > 0 else math.inf
    return math.sqrt(x) if _rate(m) == 1 else _rate(m) * math.sqrt(math.expm1(min(x, 500)))


def _smallest(enough: Callable[[float], bool]) -> float:
    """The least x >= 0 with enough(x), from above, to the last bits of a float."""
    if enough(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if enough(middle) else (middle, high)
        if low > 0 and high - low < 1e-14 * high:
            break
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
    """The largest x with cost(x) <= budget, as far as `done(low, cost(low), high)` asks; 0 if there is none.

    cost is increasing and, locally, close to a power of x, so that a line through logarithms finds the place in few
    calls. Keeps cost(low) <= budget < cost(high), so what is returned was verified whatever the shape of cost.
    """
    low, y_low, high, y_high = 0.0, 0.0, math.inf, math.inf
    x, calls = start, 0
    while not done(low, y_low, high) and high > 1e-12:
        x = math.floor(x) if whole else x
        y = cost(x)
        calls += 1
        if y <= budget:
            low, y_low = x, y
        else:
            high, y_high = x, y
        if 0 < y_low < y_high < math.inf and low > 0:
            power = max(math.log(y_high / y_low) / math.log(high / low), 1e-3)
        y = min(max(y, 1e-300), 1e300)
        x *= min(max((aim * budget / y) ** (1 / power), 1 / 16), 16)
        if low > 0 and high < math.inf:
            # Inside the bracket, and halving it when the power law does not converge by itself.
            inside = math.sqrt(low * high) if calls % 8 == 0 else x
            width = high / low
            x = min(max(inside, low * width**0.02), high / width**0.02)
        if whole:
            x = min(max(x, low + 1), high - 1, MAX_COUNT)
    return low


# --- checks ------------------------------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_budget(epsilon: float, delta: float) -> None:
    _require(0 < epsilon < math.inf, f"epsilon={epsilon} must be positive and finite: no noise can meet it.")
    _require(0 < delta < 1, f"delta={delta} must lie strictly between 0 and 1: no noise can meet it.")
