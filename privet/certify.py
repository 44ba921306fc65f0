"""How far a record may be moved without changing its prediction, proved from the weights of a Lipschitz network.

Two certificates, in the L2 norm. P is the model's bounded input, R its radius, and the scores are a function of P(x).

**By the margin.** If P(x) moves by d, the scores move by at most L·d, and the difference of two of them by at most
√2·L·d, as |a_i − a_j| ≤ √2·‖a‖. So the largest score stays the largest while d is below its margin radius
m = (z_top − z_second) / (√2·L). The projection onto a ball is 1-Lipschitz: the same holds for x itself, with r = m. A
single score, whose sign is the prediction, has m = |z| / L.

**Beyond the ball.** Let n = ‖x‖, x' within r < n of x, and û the direction of a vector u. Both points lie outside the
ball of radius n − r, and the projection onto that one is 1-Lipschitz too: (n − r)·‖x̂' − x̂‖ ≤ r. If both also lie
outside of the ball of radius R, which r ≤ n − R ensures, P(x) moves by R·‖x̂' − x̂‖ ≤ R·r/(n − r), and this is at most m
for r = m·n/(R + m). That r exceeds m just if n > R + m, which is just when it is below n − R. So the better of the two
certificates is max(m, m·n/(R + m)), and it never needs a look at the condition. On a sphere, where P(x) = R·x̂ for all
x, r = m·n/(R + m) and there is no condition.

**Sharper**, both of them. The last layer being linear, z_i − z_j moves by at most ‖w_i − w_j‖ times what its input
moves, which is never more than √2·L·d and often half of it. And d is known exactly: see `_sharp_radius`.

**In floating point.** A layer with n terms in a sum is off by at most n·2^-24·‖W‖_F·‖its input‖ (`lipschitz.norms`),
and the layers behind it enlarge that by the product of their constants. K of the certificate, which bounds gradients,
is the bound on the layer's input times that product, so E = Σ n·2^-24·‖W‖_F·K bounds the error of the scores. All other
operations (activations, pools, biases, the bounded input) are off by a few 2^-24 of what they are given or of what they
give, which a weight before or behind them bounds as well: 64 terms more for each weight are for those. As the scores of
x and of x' may both be off, 2·√2·E is taken from each margin before it counts. That is the worst case, far more than
what happens; in float64 it is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from .audit.finished import FinishedRun
from .data import images
from .errors import ConfigError, Refused
from .nn.lipschitz import Bound, BoundedInput, Certificate, Linear, chain, constrained_tensors, held
from .nn.lipschitz import certify as constants_of_network
from .nn.lipschitz.norms import INFLATION, frobenius_norm, rounding

RADII = tuple(k / 255 for k in (0, 1, 2, 4, 8, 16, 36, 72, 108))
WRONG = -1.0
"""The radius of a record that is predicted wrongly."""
_FEW = 64
"""Terms for the rounding of all that is not a sum of products."""
_BATCH = 1024
_LARGEST = 1e37
"""A bounded input takes records beyond 1e38 for zero."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the weights prove, whatever the records are."""

    certificate: Certificate
    before: float
    """The Lipschitz constant of what stands before the bounded input; infinite if it has none."""
    changed_before: bool
    """Whether anything stands there."""
    pairs: Tensor
    """(C, C): by how much z_i − z_j can move at most when the bounded record moves by 1; (1, 1) for a single score."""
    rounding: float
    """2·√2·E."""

    @property
    def behind(self) -> bool:
        """Whether radii are in the space behind a layer without a constant and not in that of the inputs."""
        return not math.isfinite(self.before)


def prove(model: nn.Module, *, sharper: bool = False) -> Proof:
    """The constants that certificates need. Call it inside `held`; refuses by name what has no constants."""
    certificate = constants_of_network(model)
    layers = [(str(i), layer) for i, layer in enumerate(_in_sequence(model))]
    place = next(i for i, (_, layer) in enumerate(layers) if layer is certificate.input)
    before = chain(layers[:place], Bound(math.inf, ())).lipschitz
    if len(certificate.output.shape) != 1:
        raise Refused(f"The model must put out one row of scores for a record, and gives {certificate.output.shape}.")
    (classes,) = certificate.output.shape
    factor = math.sqrt(2) if classes > 1 else 1.0
    pairs = torch.full((classes, classes), factor * certificate.lipschitz, dtype=torch.float64)
    last = layers[-1][1]
    if sharper and classes > 1 and type_before_parametrizations(last) in (Linear, nn.Linear):
        bounded = certificate.input.constants(Bound(math.inf, ())).output
        rest = chain(layers[place + 1 : -1], bounded).lipschitz * INFLATION
        weight = torch.as_tensor(last.weight).detach().double().cpu()
        own = torch.stack([torch.linalg.vector_norm(weight - row, dim=1) for row in weight]) * rest
        pairs = torch.minimum(pairs, own)
    return Proof(
        certificate=certificate,
        before=before,
        changed_before=place > 0,
        pairs=pairs,
        rounding=2 * factor * _error_of_scores(model, certificate),
    )


def _in_sequence(model: nn.Module) -> Iterator[nn.Module]:
    """The layers as `certify` sees them, one after the other."""
    if type(model) is nn.Sequential:
        for child in model._modules.values():
            if child is not None:
                yield from _in_sequence(child)
    else:
        yield model


def _error_of_scores(model: nn.Module, certificate: Certificate) -> float:
    """E, by how much rounding can move the scores. The per cent covers what a first-order bound leaves out."""
    error = few = 0.0
    for name, module, attribute in constrained_tensors(model):
        weight: Tensor = getattr(module, attribute)
        terms = weight[0].numel() if weight.dim() > 1 else 1
        error += rounding(weight, terms + _FEW) * frobenius_norm(weight) * certificate.gradient[name]
        few = max(few, rounding(weight, _FEW))
    return 1.01 * (error + few * certificate.output.norm)


def certified_radii(model: nn.Module, x: Tensor, y: Tensor, *, sharper: bool = False) -> Tensor:
    """For each record the L2 radius, in the units of x, within which its prediction is certified to stay; −1 if wrong.

    A prediction is the first of the largest scores, or the sign of a single one; a tie is certified for radius 0. Where
    a layer before the bounded input has no Lipschitz constant (HSV), radii are in the space behind it.

    Formal guarantee: no x' with ‖x' − x‖ at most this radius is predicted otherwise, in the model's own arithmetic.
    """
    with held(model), torch.no_grad():
        proof = prove(model, sharper=sharper)
        batches = zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True)
        return torch.cat([_radii(model, proof, *batch, sharper=sharper) for batch in batches])


def _radii(model: nn.Module, proof: Proof, x: Tensor, y: Tensor, *, sharper: bool) -> Tensor:
    place, reached = proof.certificate.input, list[Tensor]()
    hook = place.register_forward_pre_hook(lambda _layer, given: reached.append(given[0]))
    try:
        scores = model(x).double()
    finally:
        hook.remove()
    norms = _norms(reached[0])
    margin = _margin_radii(scores, proof).clamp(min=0, max=2 * place.radius)  # P(x) cannot move further
    radii = (_sharp_radius if sharper else _radius)(margin, norms, place) / INFLATION
    if proof.changed_before and not proof.behind:
        # What is computed there is off by a few 2^-24 of what comes in and of what goes out.
        lost = rounding(x, _FEW) * (_norms(x) + norms / proof.before)
        radii = radii / (proof.before * INFLATION) - lost
    usable = (norms < _LARGEST) & ((norms > 1e-20) | (place.kind == "ball"))
    radii = torch.where(usable, radii, 0).clamp(min=0)
    return torch.where(predicted(scores) == y, radii, WRONG)


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    return norms


def predicted(scores: Tensor) -> Tensor:
    """The class: the first of the largest scores, and by its sign if there is only one."""
    return scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()


def _margin_radii(scores: Tensor, proof: Proof) -> Tensor:
    """m: how far P(x) can move before another score could reach the largest, or a single one zero."""
    pairs = proof.pairs.clamp(min=1e-300).to(scores.device)
    if scores.shape[1] == 1:
        return (scores[:, 0].abs() - proof.rounding) / pairs[0, 0]
    top = scores.argmax(1, keepdim=True)
    gaps = scores.gather(1, top) - scores - proof.rounding
    return (gaps / pairs[top[:, 0]]).scatter(1, top, math.inf).amin(1)


def _radius(m: Tensor, n: Tensor, place: BoundedInput) -> Tensor:
    """By how much x of norm n may move while P(x) moves by at most m: the two certificates above, the better one."""
    beyond = m * n / (place.radius + m)
    return beyond if place.kind == "sphere" else torch.maximum(m, beyond)


def _sharp_radius(m: Tensor, n: Tensor, place: BoundedInput) -> Tensor:
    """The same, and no larger number would do (where m < R + n: nothing in the ball is further away).

    On the sphere P moves by the chord 2R·sin(θ/2) if x turns by θ. A move by r < n turns x by arcsin(r/n) at most, at
    the tangent. Solved for r: with sin(θ/2) = m/2R, r = n·sin θ = n·(m/R)·√(1 − m²/4R²) for θ up to a right angle,
    which is m = √2·R; above, every r < n will do.

    For the ball, the tangent point has the norm √(n² − r²). While that is at least R it is as on the sphere, which for
    the resulting r means m² ≤ 2R²·(n − R)/n. With a larger r, of all x' outside of the ball those on its surface are
    turned furthest: cos θ = (n² + ‖x'‖² − r²)/(2n‖x'‖) grows with ‖x'‖ there. That leaves x' in the ball, where with φ
    the angle of x' − x to x, ‖x' − Rx̂‖² = (n − R)² + r² + 2r(n − R)·cos φ and ‖x'‖² = n² + r² + 2nr·cos φ ≤ R². So
    ‖x' − Rx̂‖² ≤ (R/n)·(r² − (n − R)²), with equality on the surface, and r = √((n − R)² + m²·n/R), for m ≤ 2R.
    Inside of the ball r = m.
    """
    R = place.radius
    chord = n * (m / R) * (1 - (m / (2 * R)).square()).clamp(min=0).sqrt()
    if place.kind == "sphere":
        return torch.where(m < math.sqrt(2) * R, chord, n)
    through = ((n - R).square() + m.square() * n / R).sqrt()
    outside = torch.where(m.square() <= 2 * R * R * (n - R) / n, chord, through)
    return torch.where(n > R, outside, m)


def certified_accuracy(radii: Tensor, at: Sequence[float]) -> list[float]:
    """The share of records that are predicted rightly and certified at each of these radii; at 0, the accuracy."""
    if len(radii) == 0:
        raise ConfigError("There are no records to measure a certified accuracy on.")
    return [float((radii >= radius).double().mean()) for radius in at]


def attacked(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    radius: float | Tensor,
    *,
    restarts: int = 1,
    steps: int = 20,
    seed: int = 0,
) -> Tensor:
    """Which records an attack within this radius (one, or one for each) gets predicted as another class than y.

    Projected gradient steps on the margin, from x itself at first and then from random places. Only what is really
    within the radius, measured in float64, counts. No range of pixels is kept to, as certificates know of none.
    """
    allowed = torch.as_tensor(radius, dtype=torch.float64).expand(len(x)).clamp(min=0).to(x.device)
    generator = torch.Generator().manual_seed(seed)
    shape = (-1, *[1] * (x.dim() - 1))
    with held(model):
        fallen = predicted(model(x).detach()) != y
        for restart in range(restarts):
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            moved = _within(noise * (restart > 0), allowed)
            for step in range(steps + 1):
                at = (x + moved).to(x.dtype)
                there = _norms(at.double() - x.double()) <= allowed
                at.requires_grad_()
                scores = model(at)
                fallen |= there & (predicted(scores.detach()) != y)
                (slope,) = torch.autograd.grad(_lead_of_others(scores, y).sum(), at)
                length = _norms(slope).clamp(min=1e-300)
                stride = allowed * (1.5 * (1 - step / (steps + 1)) + 0.02)
                moved = _within(moved + slope.double() * (stride / length).view(shape), allowed)
    return fallen


def _within(moved: Tensor, allowed: Tensor) -> Tensor:
    """Scaled down to the allowed norm where it is longer, and a little below it, as x + moved will be rounded."""
    factor = (allowed * (1 - 1e-6) / _norms(moved).clamp(min=1e-300)).clamp(max=1)
    return moved * factor.view(-1, *[1] * (moved.dim() - 1))


def _lead_of_others(scores: Tensor, y: Tensor) -> Tensor:
    """By how much the best of the other classes is above the right one: what an attack makes large."""
    if scores.shape[1] == 1:
        return scores[:, 0] * (1 - 2 * y)
    right = scores.gather(1, y[:, None])
    return (scores - right).scatter(1, y[:, None], -math.inf).amax(1)


# A finished run


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What radii are told in: so many times a radius in the model's inputs."""

    name: str
    least: float = 1.0
    """If channels have different scales, the smallest, for what is certified, …"""
    most: float = 1.0
    """… and the largest, for what is attacked."""


def unit_of(run: FinishedRun) -> Unit:
    """Pixels from 0 to 1 wherever the data set's scaling can be undone."""
    if run.config.features != "none":
        return Unit(name=f"L2 norm of the {run.config.features} features, not of pixels")
    if run.data.name == "digits":
        return Unit(name="L2 norm of pixels from 0 to 1 (the digits' values over 16)")
    if run.data.name in ("mnist", "fashion-mnist"):
        return Unit(name="L2 norm of pixels from 0 to 1")
    if run.data.name == "cifar10":  # inputs are (pixel − mean) / deviation, channel by channel
        scales = images.IMAGENET_STD
        return Unit(name="L2 norm of pixels from 0 to 1", least=min(scales), most=max(scales))
    return Unit(name="L2 norm of the rows as they are encoded for the model")


@dataclass(frozen=True, kw_only=True)
class CertifiedRun:
    """What `privet certify` found out about a run; accuracies are shares of the held-out records."""

    run: str
    data: str
    unit: str
    lipschitz: float
    """L of the scores, with respect to the bounded record."""
    input: str
    """How records are bounded."""
    precision: str
    """Of the predictions: float32 as they are released, or float64."""
    rounding: float
    """By how much m is smaller than in exact arithmetic, for fear of rounding."""
    at: tuple[float, ...]
    certified: tuple[float, ...]
    """By the better of the two certificates, at each radius."""
    sharper: tuple[float, ...]
    attacked: tuple[float, ...] | None
    """What is left under the attack, if there was one: no certificate can be above it."""
    restarts: int
    broken: int
    """Records that an attack moved within their certified radius: any at all refutes the certificate."""
    radii: Tensor
    """One for each record and certificate, (2, records), in `unit`; -1 where the prediction is wrong."""

    def to_json(self) -> dict[str, Any]:
        columns = {"radius": self.at, "certified": self.certified, "sharper": self.sharper}
        columns |= {} if self.attacked is None else {"attacked": self.attacked}
        same = ("run", "data", "unit", "lipschitz", "input", "precision", "rounding", "restarts", "broken")
        return {
            **{name: getattr(self, name) for name in same},
            "records": self.radii.shape[1],
            "accuracy": certified_accuracy(self.radii[0], [0.0])[0],
            "radii": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            "cost": COST,
        }


COST = "Only the released model and held-out records were looked at, so this costs no privacy."


def certify_run(
    folder: str | Path,
    *,
    at: Sequence[float] = RADII,
    records: int | None = None,
    restarts: int = 0,
    float64: bool = False,
    seed: int = 0,
) -> CertifiedRun:
    """Certified accuracy of a finished run on its held-out records, or the first so many of them.

    Args:
        at: the radii, in the unit that the result names.
        restarts: of the attack at each radius; 0: none.
        float64: certify what the model predicts in float64, where rounding takes nothing from the radii.
    """
    for name, value, least in (("records", records, 1), ("attack", restarts, 0)):
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, and is {value}.")
    if not at or not all(radius >= 0 and math.isfinite(radius) for radius in at):
        raise ConfigError("Radii must be numbers of at least 0, say 0,8/255,0.25.")
    at = sorted(set(at))
    run = FinishedRun.open(folder)
    unit, precision = unit_of(run), torch.float64 if float64 else torch.float32
    model = run.released().eval().to(precision)
    x, y = (part[:records] for part in run.data.test.tensors)
    x = x.to(precision)
    with held(model):
        proof = prove(model)
    if proof.behind:
        unit = Unit(name="L2 norm in the space behind the layers before the bounded input, which have no constant")
        if restarts:
            raise ConfigError(
                "Radii are in the space behind a layer without a Lipschitz constant, where no attack on the inputs can "
                "be measured: leave --attack out."
            )
    radii = torch.stack([certified_radii(model, x, y, sharper=sharper) for sharper in (False, True)]) * unit.least
    left, broken = [], torch.zeros(len(x), dtype=torch.bool)
    standing = ~broken
    for radius in at if restarts else ():  # what falls at one radius falls at all larger ones
        batches = zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True)
        within = radius / unit.most
        fallen = torch.cat([attacked(model, *batch, within, restarts=restarts, seed=seed) for batch in batches])
        broken |= fallen & (radii.amax(0) >= radius)
        standing &= ~fallen
        left.append(float(standing.double().mean()))
    place = proof.certificate.input
    return CertifiedRun(
        run=str(folder),
        data=run.data.name,
        unit=unit.name,
        lipschitz=proof.certificate.lipschitz,
        input=f"{place.kind} of radius {place.radius:g}",
        precision="float64" if float64 else "float32",
        rounding=proof.rounding
        / max(float(proof.pairs.max()), 1e-300)
        / (1 if proof.behind else proof.before)
        * unit.least,
        at=tuple(at),
        certified=tuple(certified_accuracy(radii[0], at)),
        sharper=tuple(certified_accuracy(radii[1], at)),
        attacked=tuple(left) if restarts else None,
        restarts=restarts,
        broken=int(broken.sum()),
        radii=radii,
    )
