"""Membership inference on a finished run: can the released model tell who was trained on, and may it?

    report = infer_membership("runs/first", shadows=8)
    plot_roc(report, "membership.svg")
    assert stays_below(report)

The members are the records that the run was trained on, the non-members those it held out; both are rebuilt from the
run's own configuration. An attack is a score for each record, high where it looks like a member:

    loss    minus the loss under the released model (Yeom, Giacomelli, Fredrikson, Jha 2018)
    lira    how far the model is more confident than models that never saw the record (Carlini et al. 2022, offline)

What this shows: an attack that crosses the promised line, beyond its confidence, contradicts the claim. What it does
not: an attack that stays below it proves nothing, as another attack may do better. Nor is the lower bound on epsilon
that of the one-run audit: there each record's membership is decided by a coin of its own, here a fixed part of the
data is held out once, so that records share a model and the intervals take them for independent. It is an empirical
check.

The scores and every figure here are computed from the records themselves, without noise: they are for who audits, and
to publish them is not covered by the run's guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..accounting import Mechanism, Spent, trade_off
from ..errors import ConfigError
from .finished import FinishedRun
from .statistics import Auroc, TprAt, auroc, epsilon_lower_from_rates, roc, tpr_at, upper

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

RATES = (0.001, 0.01)
"""The false positive rates at which the true positive rate is reported: an attack is judged by whom it is sure of."""
_GRID = np.concatenate([np.geomspace(1e-3, 0.5, 12), 1 - np.geomspace(0.4, 1e-3, 8)])
"""The false positive rates at which an attack is held against the promise; chosen before any score was seen."""
_OWN_VARIANCE = 32
"""With so many shadow models that did not see it, a record has a variance of its own; with fewer all share one."""
_MOST_THRESHOLDS = 200
_EVALUATION_BATCH = 1024
_SHADOW_BATCH, _SHADOW_LR = 128, 0.005
_LEFT = 1e-4
_TITLES = {"loss": "loss threshold", "lira": "LiRA"}
NOT_COVERED = (
    "These figures were computed from the records themselves, without noise: to publish them is not covered by the "
    "guarantee of the run."
)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """The scores of one attack, and what they show.

    `epsilon_lower` is the ε at δ of the claim that the attack refutes at the report's `error`, taking the records for
    independent.
    """

    name: str
    member_scores: Floats = field(repr=False)
    non_member_scores: Floats = field(repr=False)
    auroc: Auroc
    tpr_at: Mapping[float, TprAt]
    epsilon_lower: float

    @property
    def title(self) -> str:
        return _TITLES[self.name]

    @property
    def described(self) -> str:
        """In one line, with 95% intervals."""
        found = [f"AUROC {self.auroc.value:.3f} [{self.auroc.low:.3f}, {self.auroc.high:.3f}]"]
        found += [f"TPR {r.tpr:.2%} [{r.low:.2%}, {r.high:.2%}] at FPR {rate:g}" for rate, r in self.tpr_at.items()]
        return f"{self.title}: {', '.join(found)}"

    def to_json(self) -> dict[str, Any]:
        rates = {
            f"{rate:g}": asdict(found) | {"only_a_bound": found.only_a_bound} for rate, found in self.tpr_at.items()
        }
        return {
            "attack": self.name,
            "auroc": asdict(self.auroc),
            "tpr_at": rates,
            "epsilon_lower": self.epsilon_lower,
        }


@dataclass(frozen=True, kw_only=True)
class MembershipReport:
    """What the attacks found on one run, beside what the run claims. Every interval has confidence 1 - `error`."""

    data: str
    attacks: tuple[Attack, ...]
    members: int
    non_members: int
    shadows: int
    epsilon: float
    delta: float
    epsilon_is: str
    mechanism: Mechanism
    compositions: int
    error: float
    queries: Spent = ()
    """What else the run has paid for: sums over all records."""

    def promised_tpr(self, fpr: npt.ArrayLike) -> Floats:
        """1 - f(FPR): no attack on a single record that the trade-off curve f covers has a larger TPR."""
        return np.asarray(1 - trade_off([*self.queries, (self.mechanism, self.compositions)], fpr))

    def to_json(self) -> dict[str, Any]:
        below = stays_below(self)
        return {
            "data": self.data,
            "members": self.members,
            "non_members": self.non_members,
            "shadows": self.shadows,
            "error": self.error,
            "claimed": {"epsilon": self.epsilon, "delta": self.delta, "epsilon_is": self.epsilon_is},
            "attacks": [attack.to_json() for attack in self.attacks],
            "stays_below": bool(below),
            "crossings": [asdict(point) for point in below.crossings],
            "not_covered": NOT_COVERED,
        }


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of an attack's ROC curve, with limits that hold for all points of a report together.

    `promised` is the largest TPR that the guarantee allows at `fpr_high`.
    """

    attack: str
    fpr: float
    fpr_high: float
    tpr: float
    tpr_low: float
    tpr_high: float
    promised: float

    @property
    def crosses(self) -> bool:
        return self.tpr_low > self.promised


@dataclass(frozen=True)
class Comparison:
    """The points at which a report was held against the promise; true if none of them surely crosses it."""

    points: tuple[Point, ...]

    @property
    def crossings(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.crosses)

    def __bool__(self) -> bool:
        return not self.crossings


# The attacks: scores from confidences


def loss_scores(confidence: Floats) -> Floats:
    """-loss of each record: with the confidence c = log(p/(1-p)) in the true class, the loss is log(1 + e^-c)."""
    return -np.logaddexp(0, -confidence)


def lira_scores(confidence: Floats, shadow_confidences: Floats, trained_on: Flags) -> Floats:
    """Offline LiRA: how many standard deviations a record's confidence lies above that of models without it.

    Args:
        confidence: of each record, under the released model.
        shadow_confidences: (shadows, records), under each shadow model.
        trained_on: (shadows, records), whether the shadow model was trained on the record. Those that were are left
            out of that record's Gaussian.

    With m and s the mean and the deviation over the shadow models without the record, the score is the z of the
    one-sided test Φ(z), z = (c - m)/s; z orders records as Φ(z) does, and does not round to 1. Few shadow models share
    one s. Shadow models are trained without privacy and are surer of all records than a private one, so c is compared
    with the line in m that fits it best over all records, not with m itself.
    """
    out = ~trained_on
    count = out.sum(axis=0)
    if count.min() < 2:
        raise ConfigError(
            "Each record needs two shadow models at least that were not trained on it: train more of them."
        )
    mean = np.where(out, shadow_confidences, 0).sum(axis=0) / count
    squares = np.where(out, shadow_confidences - mean, 0) ** 2
    own = squares.sum(axis=0) / (count - 1)
    shared = squares.sum() / (count - 1).sum()
    variance = np.where(count >= _OWN_VARIANCE, own, shared)
    line = np.stack([np.ones_like(mean), mean], axis=1)
    expected = line @ np.linalg.lstsq(line, confidence, rcond=None)[0]
    return np.asarray((confidence - expected) / np.sqrt(np.maximum(variance, 1e-12)))


def assess(name: str, scores: Floats, member: Flags, *, delta: float, error: float = 0.05, seed: int = 0) -> Attack:
    """What an attack's scores show, each figure at confidence 1 - `error`."""
    members, non_members = scores[member], scores[~member]
    return Attack(
        name=name,
        member_scores=members,
        non_member_scores=non_members,
        auroc=auroc(members, non_members, 1 - error),
        tpr_at={rate: tpr_at(members, non_members, rate, 1 - error) for rate in RATES},
        epsilon_lower=epsilon_lower(members, non_members, delta=delta, error=error, seed=seed),
    )


def epsilon_lower(
    member_scores: Floats, non_member_scores: Floats, *, delta: float, error: float = 0.05, seed: int = 0
) -> float:
    """Lower bound on ε at δ from the best threshold on these scores.

    The threshold is chosen on one half of the records, drawn by `seed`, and its error rates are measured on the other
    half: chosen and measured on the same records, the best of many would look better than it is.
    """
    if min(member_scores.size, non_member_scores.size) < 2:
        return 0.0
    generator = np.random.default_rng(seed)
    members, non_members = (np.array_split(generator.permutation(s), 2) for s in (member_scores, non_member_scores))

    def bound(half: int, threshold: float) -> float:
        false_positives, trials = int((non_members[half] > threshold).sum()), non_members[half].size
        false_negatives, others = int((members[half] <= threshold).sum()), members[half].size
        fpr, fnr = upper(false_positives, trials, error / 2), upper(false_negatives, others, error / 2)
        return epsilon_lower_from_rates(fpr, fnr, delta)

    levels = np.linspace(0, 1, _MOST_THRESHOLDS)
    choices = np.unique(np.concatenate([np.quantile(half[0], levels) for half in (members, non_members)]))
    best = max(choices, key=lambda threshold: bound(0, float(threshold)))
    return bound(1, float(best))


# The run


def infer_membership(
    run: FinishedRun | str | Path, *, shadows: int = 0, seed: int = 0, error: float = 0.05
) -> MembershipReport:
    """Attacks a finished run (or its folder): by the loss, and with `shadows` (4 at least) by LiRA too.

    The attacker of LiRA is strong: it knows the distribution, as it trains its shadow models on the run's own records,
    members and non-members alike, each model on a random half of them, and it knows the network and the number of
    epochs. It trains without privacy, by Adam, which is cheap.
    """
    if shadows != 0 and shadows < 4:
        raise ConfigError(f"shadows={shadows}: LiRA needs 4 shadow models at least; or give 0 to leave it out.")
    if not 0 < error < 1:
        raise ConfigError(f"error={error!r} must be a probability between 0 and 1.")
    run = run if isinstance(run, FinishedRun) else FinishedRun.open(run)
    config, statement, data = run.config, run.statement, run.data
    x, y = (torch.cat(parts) for parts in zip(data.train.tensors, data.test.tensors, strict=True))
    member = np.arange(len(y)) < len(data.train)
    confidence, delta = confidences(run.released(), x, y), float(statement["delta"])
    scores = {"loss": loss_scores(confidence)}
    _same_data(run, scores["loss"], member)
    if shadows:
        epochs = max(1, round(int(statement["steps"]) * (config.batch or 1) / len(data.train)))
        fresh = run.network
        out = shadow_confidences(fresh, x, y, shadows=shadows, epochs=epochs, seed=seed)
        scores["lira"] = lira_scores(confidence, *out)
    mechanism = Mechanism.from_json(statement["mechanism"])
    paid = [(Mechanism.from_json(part["mechanism"]), int(part["count"])) for part in statement.get("spent", ())]
    return MembershipReport(
        data=data.name,
        attacks=tuple(assess(k, s, member, delta=delta, error=error, seed=seed) for k, s in scores.items()),
        members=len(data.train),
        non_members=len(data.test),
        shadows=shadows,
        epsilon=float(statement["epsilon"]),
        delta=delta,
        epsilon_is=str(statement["epsilon_is"]),
        mechanism=mechanism,
        compositions=int(statement["compositions"]),
        error=error,
        queries=[(other, count) for other, count in paid if other != mechanism],
    )


@torch.no_grad()
def confidences(model: nn.Module, x: Tensor, y: Tensor) -> Floats:
    """log(p/(1-p)) of the true class's probability p, from the scores, so that p may round to 1."""
    found = []
    for xs, ys in zip(torch.split(x, _EVALUATION_BATCH), torch.split(y, _EVALUATION_BATCH), strict=True):
        scores = model.eval()(xs).double()
        true = scores.gather(1, ys[:, None])[:, 0]
        found.append(true - scores.scatter(1, ys[:, None], -math.inf).logsumexp(1))
    result = torch.cat(found).numpy()
    if not np.isfinite(result).all():
        raise ConfigError(
            "The model's scores are not finite for every record: its training diverged, and there is "
            "nothing to attack. Train it with a smaller learning rate."
        )
    return np.asarray(result)


def shadow_confidences(
    make: Callable[[int], nn.Module], x: Tensor, y: Tensor, *, shadows: int, epochs: int, seed: int = 0
) -> tuple[Floats, Flags]:
    """(shadows, records): the records' confidences under models trained on random halves, and who was in which half.

    `make` gives a fresh model for a seed. Every record is in the halves of the same number of models, ⌊shadows/2⌋, so
    that none is left without.
    """
    ranks = np.random.default_rng(seed).random((shadows, len(y))).argsort(axis=0).argsort(axis=0)
    trained_on = ranks < shadows // 2
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for number, half in enumerate(trained_on):
            model = make(seed + 1 + number)
            _train_openly(model, x[torch.from_numpy(half)], y[torch.from_numpy(half)], epochs)
            found.append(confidences(model, x, y))
    return np.stack(found), trained_on


def _train_openly(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=_SHADOW_LR)
    model.train()
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(y)), _SHADOW_BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(x[batch]), y[batch]))
            optimizer.step()


def _same_data(run: FinishedRun, scores: Floats, member: Flags) -> None:
    """Refuses records that are not those of the run: the loss on those held out must be the one that it measured."""
    told = run.statement["held_out"]
    units = int(member.sum()) if run.data.users is None else len(set(run.data.users))
    counted = run.config.records is None and run.statement["records"] != units
    loss = math.nan if told["loss"] is None else float(told["loss"])
    if (
        counted
        or told["records"] != int((~member).sum())
        or not math.isclose(loss, -scores[~member].mean(), rel_tol=1e-3, abs_tol=1e-5)
    ):
        raise ConfigError(
            f"The data is not what the run in {run.folder} was trained on (its held-out records have another number or "
            "another loss): who was a member is not known. Put the data back as it was."
        )


# The promise


def stays_below(report: MembershipReport) -> Comparison:
    """Whether no attack surely does better than the guarantee allows: false if it is refuted.

    At each false positive rate of a fixed grid, the lower limit of the TPR is held against 1 - f(upper limit of the
    FPR). All limits of all attacks hold together with probability 1 - `error` (Bonferroni), for independent records.

    Under `add_remove` the curve f speaks of one record that is there or not, as if each had been held out by its own
    coin (as those of a table are). Where their number is fixed, a member and a non-member differ by an exchange, which
    may cost up to twice as much: the check then asks for more than was promised.
    """
    share = report.error / (2 * len(_GRID) * len(report.attacks))
    found = [
        (a, tpr_at(a.member_scores, a.non_member_scores, float(rate), 1 - share))
        for a in report.attacks
        for rate in _GRID
    ]
    promised = report.promised_tpr([point.fpr_high for _, point in found])
    return Comparison(
        tuple(
            Point(
                attack=attack.name,
                fpr=point.fpr,
                fpr_high=point.fpr_high,
                tpr=point.tpr,
                tpr_low=point.low,
                tpr_high=point.high,
                promised=float(limit),
            )
            for (attack, point), limit in zip(found, promised, strict=True)
        )
    )


def plot_roc(report: MembershipReport, path: str | Path) -> None:
    """Draws the attacks' ROC curves beside the region that the guarantee forbids, as SVG or PNG by the path's suffix.

    Both axes are logarithmic, as whoever is found with few false alarms is harmed most. The bands hold for all points
    together. A dotted line joins the points that `stays_below` checks: one in the forbidden region refutes the claim.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (half a second; and no display, unlike pyplot)
    except ImportError as error:
        raise ConfigError("Drawing needs matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(6.4, 7.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlim=(_LEFT, 1), ylim=(_LEFT, 1), aspect="equal")
    axes.set_xlabel("false positive rate: non-members taken for members")
    axes.set_ylabel("true positive rate: members found")
    axes.grid(which="major", color="#dddddd", linewidth=0.6)

    fpr = np.geomspace(_LEFT, 1, 400)
    promised = report.promised_tpr(fpr)
    axes.fill_between(fpr, promised, 1, color="#c0392b", alpha=0.14, linewidth=0)
    axes.plot(fpr, promised, color="#c0392b", linewidth=2.2, label="the most that the guarantee allows, 1 − f(FPR)")
    axes.plot(fpr, fpr, color="#555555", linewidth=1, linestyle=(0, (5, 4)), label="guessing")
    note: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 11, "style": "italic", "zorder": 5}
    if promised[len(fpr) // 8] < 0.5:
        axes.text(0.03, 0.95, "forbidden by the guarantee", color="#962d22", va="top", **note)
    axes.text(0.97, 0.03, "allowed by the guarantee", color="#2d6a3e", ha="right", **note)

    comparison = stays_below(report)
    for attack, color in zip(report.attacks, ("#1f5fa8", "#d98200"), strict=False):
        points = [point for point in comparison.points if point.attack == attack.name]
        measured = [(point.fpr, point.tpr_low, point.tpr_high) for point in points if point.fpr > 0]
        if measured:
            axes.fill_between(*np.maximum(measured, _LEFT / 9).T, color=color, alpha=0.18, linewidth=0)
        x, y = roc(attack.member_scores, attack.non_member_scores)
        best = (x > 0) & (np.append(np.diff(x), 1) > 0)  # to the left of one non-member nothing was measured
        area = f"AUROC {attack.auroc.value:.3f} [{attack.auroc.low:.3f}, {attack.auroc.high:.3f}]"
        axes.step(x[best], y[best], where="post", color=color, linewidth=1.8, label=f"{_TITLES[attack.name]}: {area}")
        sure = np.maximum([(point.fpr_high, point.tpr_low) for point in points], _LEFT / 9)
        known = "what is sure of it: TPR at its lower, FPR at its upper limit"
        axes.plot(*sure.T, color=color, linewidth=1, linestyle=":", marker=".", markersize=4, label=known)
    axes.axvline(1 / report.non_members, color="#999999", linewidth=0.8, linestyle=":")
    where = f"  1 of {report.non_members} non-members"
    axes.text(1 / report.non_members, _LEFT, where, color="#777777", fontsize=8, rotation=90, ha="right", va="bottom")

    verdict = "No attack surely crosses the promised line" if comparison else "AN ATTACK CROSSES THE PROMISED LINE"
    figure.suptitle(f"Membership inference on {report.data}: ε = {report.epsilon:.3g}, δ = {report.delta:g} claimed")
    axes.set_title(
        f"{verdict} (TPR bands: {1 - report.error:.0%} for all points together)", fontsize=9, color="#444444"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
