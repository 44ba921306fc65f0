"""Losses with a Lipschitz constant with respect to the scores: the G that the backward pass of bounds begins with.

Each is a loss per record, as in `privet.losses`, and a function of that record alone: class weights are given and
public, never counted in the batch. C is the number of classes; with C = 1 the classes are 0 and 1 by the score's sign.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ConfigError
from ...losses import LOSSES, Loss
from ...options import option
from .bounds import Bound


class LipschitzLoss(Loss):
    """A loss whose gradient with respect to one record's scores has a norm of at most `lipschitz`."""

    @property
    @abstractmethod
    def lipschitz(self) -> float:
        """For any scores and any number of classes."""

    def lipschitz_within(self, scores: Bound) -> float:
        """For scores within a bound, whose shape is (classes,): at most `lipschitz`."""
        return self.lipschitz


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be a positive number, and is {value!r}.")


def _classes(scores: Bound) -> int:
    return scores.shape[-1]


# Cross-entropies


@dataclass(kw_only=True, eq=False, repr=False)
class TemperedCrossEntropy(LipschitzLoss):
    """CE(T·z)/T, with the inverse temperature T (the paper's τ·CE(z/τ)): its gradient is softmax(T·z) − e_y.

    For p = softmax: ‖p − e_y‖² = (1 − p_y)² + Σ_{j≠y} p_j² ≤ 2·(1 − p_y)² ≤ 2, so √2 whatever T is.

    Where ‖z‖ ≤ B it is smaller. Put u = T·z, β = T·B, n = C − 1, s = Σ_{j≠y} e^{u_j − u_y} and t = 1 − p_y = s/(1 + s).
    Then ‖p − e_y‖² ≤ t² + t·min(t, max_j p_j), as the p_j but p_y add up to t, and
    - 1/p_j = 1 + Σ_{k≠j} e^{u_k − u_j} ≥ 1 + n·e^{m − u_j} with the mean m of the u_k, by Jensen, and
      u_j − m ≤ β·√(1 + 1/n);
    - with r² = Σ_{j≠y} u_j², the power series gives Σ_{j≠y} e^{u_j} ≤ n + √n·r + (e^r − 1 − r), as Σ|u_j|^k ≤ r^k for
      k ≥ 2, and −u_y ≤ √(β² − r²). So s ≤ max over r = β·cos φ of e^{β·sin φ}·(n − 1 + (√n − 1)·r + e^r). One factor
      rises and one falls in φ: over each of many small intervals the product of their largest values is a bound.
    """

    summary = "cross-entropy with a temperature and a Lipschitz constant"

    inverse_temperature: float = option(1.0, "T, by which scores are multiplied, and the loss divided")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("inverse_temperature", self.inverse_temperature)

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.inverse_temperature * scores, targets, reduction="none") / self.inverse_temperature

    @property
    def lipschitz(self) -> float:
        return math.sqrt(2)

    def lipschitz_within(self, scores: Bound) -> float:
        others = _classes(scores) - 1
        reach = self.inverse_temperature * scores.norm
        if others < 1:
            return 0.0
        if not reach < 50:
            return self.lipschitz
        angles = np.linspace(0, np.pi / 2, 513)
        radius = reach * np.cos(angles[:-1])
        sums = others - 1 + (math.sqrt(others) - 1) * radius + np.exp(radius)
        s = float((np.exp(reach * np.sin(angles[1:])) * sums).max())
        missed = s / (1 + s)
        likeliest = 1 / (1 + others * math.exp(-reach * math.sqrt(1 + 1 / others)))
        return min(self.lipschitz, math.sqrt(missed**2 + missed * min(missed, likeliest)))


@dataclass(kw_only=True, eq=False, repr=False)
class BinaryCrossEntropy(LipschitzLoss):
    """The mean over classes of −log sigmoid(±T·z_j)/T, with + for the record's class: one against all.

    Each derivative is at most sigmoid(T·|z_j|)/C, so the norm is at most 1/√C, and sigmoid(T·B)/√C where ‖z‖ ≤ B.
    """

    summary = "binary cross-entropy, one class against all"

    inverse_temperature: float = option(1.0, "T, by which scores are multiplied, and the loss divided")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("inverse_temperature", self.inverse_temperature)

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.softplus(-self.inverse_temperature * _signed(scores, targets)).mean(1) / self.inverse_temperature

    @property
    def lipschitz(self) -> float:
        return 1.0

    def lipschitz_within(self, scores: Bound) -> float:
        reach = min(self.inverse_temperature * scores.norm, 700.0)
        return 1 / (1 + math.exp(-reach)) / math.sqrt(_classes(scores))


# Hinges and optimal transport


@dataclass(kw_only=True, eq=False, repr=False)
class _Balanced(LipschitzLoss):
    """Losses a·f(z_y) + a·mean_{j≠y} f(−z_j) with slopes of f up to l: a·l·√(1 + 1/(C − 1)), which is a·l if C = 1."""

    class_weights: str | Sequence[float] | None = option(
        None, "public weights, one for each class and with commas between", otherwise="the same for all"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = _numbers("class_weights", self.class_weights)

    @property
    @abstractmethod
    def slope(self) -> float:
        """The largest slope of `of_margin`."""

    @abstractmethod
    def of_margin(self, signed: Tensor) -> Tensor:
        """f of a score that should be large."""

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        classes = scores.shape[1]
        each = self.of_margin(_signed(scores, targets))
        if classes == 1:
            losses = each.squeeze(1)
        else:
            own = _own(each, targets)
            losses = own + (each.sum(1) - own) / (classes - 1)
        if self.weights is None:
            return losses
        if len(self.weights) != max(classes, 2):
            raise ConfigError(f"class_weights must be {max(classes, 2)} numbers, one for each class: {self.weights}.")
        return losses * torch.tensor(self.weights, dtype=scores.dtype, device=scores.device)[targets.long()]

    @property
    def lipschitz(self) -> float:
        return math.sqrt(2) * self._heaviest()

    def lipschitz_within(self, scores: Bound) -> float:
        classes = _classes(scores)
        return (math.sqrt(classes / (classes - 1)) if classes > 1 else 1.0) * self._heaviest()

    def _heaviest(self) -> float:
        return self.slope * max(self.weights or (1.0,))


@dataclass(kw_only=True, eq=False, repr=False)
class MulticlassHinge(_Balanced):
    """max(0, m/2 − z_y) + mean_{j≠y} max(0, m/2 + z_j)."""

    summary = "hinge, one class against all"

    margin: float = option(1.0, "m, how far the scores of right and wrong classes should be apart")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("margin", self.margin)

    @property
    def slope(self) -> float:
        return 1.0

    def of_margin(self, signed: Tensor) -> Tensor:
        return (self.margin / 2 - signed).clamp(min=0)


@dataclass(kw_only=True, eq=False, repr=False)
class KantorovichRubinstein(_Balanced):
    """mean_{j≠y} z_j − z_y: what a 1-Lipschitz network minimises in the dual of the Wasserstein distance."""

    summary = "Kantorovich-Rubinstein dual of the Wasserstein distance"

    @property
    def slope(self) -> float:
        return 1.0

    def of_margin(self, signed: Tensor) -> Tensor:
        return -signed


@dataclass(kw_only=True, eq=False, repr=False)
class HingeKR(MulticlassHinge):
    """Kantorovich-Rubinstein plus α times the hinge: slopes of up to 1 + α."""

    summary = "Kantorovich-Rubinstein with a hinge"

    alpha: float = option(10.0, "α, the weight of the hinge")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("alpha", self.alpha)

    @property
    def slope(self) -> float:
        return 1 + self.alpha

    def of_margin(self, signed: Tensor) -> Tensor:
        return self.alpha * super().of_margin(signed) - signed


@dataclass(kw_only=True, eq=False, repr=False)
class KCosine(LipschitzLoss):
    """1 − z_y / max(K, ‖z‖): the cosine between the scores and their class, made Lipschitz near zero.

    Below K the gradient is −e_y/K; above, −(e_y − (z_y/‖z‖)·z/‖z‖)/‖z‖, a projection of e_y: both at most 1/K.
    """

    summary = "cosine between the scores and their class"

    floor: float = option(1.0, "K, below which norm of the scores the loss is linear")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("floor", self.floor)

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(scores, dim=1)
        return 1 - _own(_signed(scores, targets), targets) / norms.clamp(min=self.floor)

    @property
    def lipschitz(self) -> float:
        return 1 / self.floor


def _signed(scores: Tensor, targets: Tensor) -> Tensor:
    """The scores, with −1 before those that should be small."""
    if scores.shape[1] == 1:
        return torch.where(targets.unsqueeze(1) > 0, scores, -scores)
    return scores * (2 * F.one_hot(targets.long(), scores.shape[1]) - 1).to(scores.dtype)


def _own(scores: Tensor, targets: Tensor) -> Tensor:
    """Of each record, the score of its class."""
    if scores.shape[1] == 1:
        return scores.squeeze(1)
    return scores.gather(1, targets.long().unsqueeze(1)).squeeze(1)


def _numbers(name: str, given: str | Sequence[float] | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        numbers = tuple(float(n) for n in (given.split(",") if isinstance(given, str) else given))
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(n > 0 and math.isfinite(n) for n in numbers):
        raise ConfigError(f"{name} must be positive numbers, one for each class, and is {given!r}.")
    return numbers


LIPSCHITZ_LOSSES: dict[str, type[LipschitzLoss]] = {
    "tempered-ce": TemperedCrossEntropy,
    "bce": BinaryCrossEntropy,
    "hinge": MulticlassHinge,
    "kr": KantorovichRubinstein,
    "hkr": HingeKR,
    "k-cosine": KCosine,
}
"""By the name that the command line knows them under."""

LOSSES.update(LIPSCHITZ_LOSSES)
