"""Clipless training (Béthune et al. 2024): the weights of a Lipschitz network bound every record's gradient.

Nothing is done record by record in the network. Going forward, each layer bounds what it puts out from what it is
given; going backward, by how much it can grow a gradient; so that at each weight ‖∂L/∂θ‖ ≤ K·‖∂L/∂scores‖, with a K
that is proved anew in each step from the weights that the step uses (`privet.nn.lipschitz`).

Where this differs from the paper and its code:

- No constraint is trusted. K comes from certified norms of the constrained weights W̄, not from an estimate of them or
  from the number that a projection was meant to reach.
- Gradients are summed and noised at W̄ = Π(W) and pulled back to W afterwards, as post-processing. So any Π will do.
- ‖∂L/∂scores‖ ≤ G is made true and not assumed: a record's gradient at the scores, which is one short row, is scaled
  down where it is longer. So the bound holds for any loss, and a G below the loss's own Lipschitz constant lowers the
  noise in proportion. In the reference this clip never lowered it.
- Samples are drawn by the run's rule, with the public divisor, as for every method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CheckpointError, ConfigError, Refused
from ..hooks import only_looks
from ..nn.lipschitz.certificate import Certificate, certify
from ..nn.lipschitz.holding import Held, every_tensor, held
from ..nn.lipschitz.losses import TemperedCrossEntropy
from ..nn.lipschitz.models import lipschitz_mlp
from ..noise import Allocation
from ..options import option
from .base import Method, ParameterGroup, Query, Sensitivity, Session, Setting, positive, register

_MARGIN = 1 - 2.0**-14
"""Norms of rows are computed in float32; aiming this much below G keeps what comes out at G or less."""
_CLIPS = (1e-12, 1e12)
"""What G may be. An adaptive one stays there, whatever the noise says."""
_LEAST = 1e-20
"""Of a sensitivity: far above what float32 loses when numbers become too small for it."""


@register
@dataclass(frozen=True, kw_only=True)
class Clipless(Method):
    """Clipless training of a Lipschitz network.

    Formal guarantee: a record adds to the sum of each weight tensor W̄ a gradient of norm at most K·G, K being certified
    for exactly the W̄ that the step's forward passes use and G enforced row by row at the scores. So one record moves
    that sum by at most K·G, and 2·K·G when replaced. Only what reaches the weights through the scores is added: a loss
    that also looks at hidden layers has no other way in, nor has an input that was computed from the weights. Models
    with hooks, or with layers whose `forward` was replaced, are refused, and so are weights that change within a step.

    An adaptive G follows a quantile of the rows' norms: a record adds +1/2 or −1/2 to a side query in the same sample,
    with noise of its own, so it is paid for by rule 2.

    Rule 7: a record whose gradient at the scores is not finite adds exactly zero.
    """

    name = "clipless"
    summary = "no clipping in the network: the weights of a Lipschitz network bound each record's gradient"

    gradient_clip: float | Literal["auto"] = option(
        "auto", "G, the longest gradient of a record at the scores; auto: what cross-entropy can reach at most"
    )
    adaptive: bool = option(False, "let G follow a quantile of the norms at the scores, privately")
    quantile: float = option(0.9, "the share of records that an adaptive G leaves unclipped", needs=("adaptive", True))
    adaptive_rate: float = option(0.2, "learning rate of the adaptive G (geometric)", needs=("adaptive", True))
    allocation: Allocation = option(
        "optimal",
        "noise: proportional (to each layer's bound), isotropic (the same for all) or optimal (least in total)",
    )

    def __post_init__(self) -> None:
        if self.gradient_clip != "auto" and not _CLIPS[0] <= self.gradient_clip <= _CLIPS[1]:
            low, high = _CLIPS
            raise ConfigError(f"gradient_clip must lie between {low:g} and {high:g}, and is {self.gradient_clip!r}.")
        positive("adaptive_rate", self.adaptive_rate)
        if not 0 < self.quantile < 1:
            raise ConfigError(f"quantile must lie between 0 and 1, and is {self.quantile!r}.")

    def example(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return lipschitz_mlp(input_shape=input_shape, classes=classes, hidden=(16,), bias=True)

    def open(self, model: nn.Module, setting: Setting) -> Session:
        return _CliplessSession(self, model, setting)


class _CliplessSession(Session):
    """From `begin` to `handed_over` the model's weights are held: what is certified is what the forward passes use."""

    def __init__(self, method: Clipless, model: nn.Module, setting: Setting) -> None:
        self.method, self.model, self.setting = method, model, setting
        self._holding = ExitStack()
        self._weights: Held | None = None
        self._scores: list[Any] | None = None
        """What the model put out while it was listened to."""
        self._probed: list[Any] = []
        """The same, of the last time: made-up records are looked at afterwards."""
        with held(model) as weights:
            self.certificate = certify(model)
            if not weights.tensors:
                raise Refused("The model has no parameter that requires a gradient, so there is nothing to train.")
            stand_ins = {name: nn.Parameter(torch.zeros_like(w)) for name, w in weights.tensors.items()}
        self.groups = [ParameterGroup(name, {name: stand_in}) for name, stand_in in stand_ins.items()]
        self.clip: float | None = None
        """The adaptive G, once it has moved."""
        self._below = torch.zeros((), dtype=torch.float64)
        self._certified_for: list[Any] = []
        self._hooks = [
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._keep_scores),
        ]

    # G

    @property
    def gradient_clip(self) -> float:
        if self.clip is not None:
            return self.clip
        if self.method.gradient_clip != "auto":
            return self.method.gradient_clip
        scores = self.certificate.output
        return TemperedCrossEntropy().lipschitz_within(scores) if scores.shape[-1] > 1 else 1.0

    # The step

    def begin(self) -> None:
        self._let_go()
        self._weights = self._holding.enter_context(held(self.model))
        self.certificate = self._certified()
        self._certified_for = self._in_use()
        for group in self.groups:
            group.total.zero_()
            for stand_in in group.parameters.values():
                stand_in.grad = None
        self._below.zero_()

    def _certified(self) -> Certificate:
        assert self._weights is not None
        shapes = {name: tensor.shape for name, tensor in self._weights.tensors.items()}
        known = {name: p.shape for group in self.groups for name, p in group.parameters.items()}
        if shapes != known:
            changed = min(shapes.keys() ^ known.keys() or {n for n, s in shapes.items() if known[n] != s})
            raise Refused(
                f"Parameter '{changed}' was frozen, unfrozen or replaced after the run was made. Make a new Run for "
                "the model as it is now."
            )
        return certify(self.model)

    def _in_use(self) -> list[Any]:
        """What the certificate is about: every tensor as it is now, and how the input is bounded."""
        tensors = [getattr(module, attribute) for _, module, attribute in every_tensor(self.model)]
        first = self.certificate.input
        return [*((id(tensor), tensor._version) for tensor in tensors), (first.radius, first.kind, first.shape)]

    @only_looks
    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Nothing reaches the weights through the model's input, and they are those that were certified."""
        if self._scores is None or model is not self.model:
            return None
        if self._weights is not None and self._in_use() != self._certified_for:
            raise Refused(
                "The model's weights are not those that the step began with, and its bounds are for those. Change "
                "weights between steps only."
            )
        if any(torch.is_autocast_enabled(kind) for kind in {p.device.type for p in model.parameters()}):
            raise Refused("Bounds are proved for float32 and float64: leave autocast (--precision bf16) out.")
        return pytree.tree_map(_detached, (args, kwargs))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._weights is None:  # made-up records, before the step has begun
                stack.enter_context(held(self.model))
            self._scores = []
            try:
                yield
            finally:
                self._probed, self._scores = self._scores, None

    def listening(self) -> AbstractContextManager[None]:
        return self._watching()

    @only_looks
    def _keep_scores(self, model: nn.Module, _args: Any, output: Any) -> Any:
        """The user gets a copy: what is done to it in place comes behind the place where gradients are bounded."""
        if self._scores is None or model is not self.model:
            return None
        self._scores.append(output)
        return output.clone() if isinstance(output, Tensor) else None

    @staticmethod
    def _only(found: list[Any], losses: Tensor) -> Tensor:
        """What the model put out for these records; refused where one record could have been used twice."""
        if len(found) != 1:
            raise Refused(
                f"The model was called {len(found)} times for one chunk of records. The bounds are for one call: call "
                "the model itself once, and hand in the losses of what it put out."
            )
        (scores,) = found
        if not isinstance(scores, Tensor) or scores.dim() != 2 or len(scores) != len(losses):
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise Refused(
                f"The model must put out one row of scores for each of {len(losses)} records, and gave {got}."
            )
        return scores

    def add(self, losses: Tensor) -> None:
        assert self._weights is not None
        scores = self._only(self._scores or [], losses)
        clip = self.gradient_clip
        with torch.autocast(losses.device.type, enabled=False):
            rows = _gradient(losses.sum(), scores)
            if rows is None:
                raise Refused("The losses do not depend on what the model put out for these records.")
            norms = torch.linalg.vector_norm(rows.double(), dim=1)
            lost = ~(torch.isfinite(norms) & torch.isfinite(losses.detach()))
            factors = (clip * _MARGIN / norms).clamp(max=1).masked_fill(lost, 0)
            rows = (rows.double().masked_fill(lost.unsqueeze(1), 0) * factors.unsqueeze(1)).to(rows.dtype)
            found = torch.autograd.grad(scores, list(self._weights.tensors.values()), rows, allow_unused=True)
        for group, gradient in zip(self.groups, found, strict=True):
            if gradient is not None:
                group.views[group.name].add_(gradient)
        if self.method.adaptive:
            self._below += torch.where(norms <= clip, 0.5, -0.5).masked_fill(lost, 0).sum().cpu()

    def finish(self) -> list[Query]:
        factors, clip = self.certificate.gradient, self.gradient_clip
        queries = []
        for group in self.groups:
            if factors[group.name] == 0:
                group.total.zero_()  # it is, if the certificate is right
            bound = Sensitivity.of_contribution(max(factors[group.name] * clip, _LEAST))
            queries.append(Query(group.name, group.total, bound, group=group))
        if self.method.adaptive:
            # a twentieth of the batch, or more, so that it costs at most 1/16 of 1/σ²
            std = max(self.setting.batch / 20, 4 * self.setting.noise_multiplier)
            half = Sensitivity.of_contribution(0.5)
            queries.append(Query("below G", self._below.view(1), half, std=std))
        return queries

    def observe(self, noisy: Mapping[str, Tensor]) -> None:
        value = noisy.get("below G")
        if value is not None:
            share = min(1.0, max(0.0, float(value) / self.setting.batch + 0.5))
            moved = self.gradient_clip * math.exp(-self.method.adaptive_rate * (share - self.method.quantile))
            self.clip = min(max(moved, _CLIPS[0]), _CLIPS[1])

    def handed_over(self) -> None:
        """Pulls the private gradients at W̄ back to the parameters behind them."""
        assert self._weights is not None
        found = {n: p.grad for group in self.groups for n, p in group.parameters.items() if p.grad is not None}
        parameters = dict(self.model.named_parameters())
        for name, gradient in self._weights.pull_back(found).items():
            parameters[name].grad = gradient
        self._let_go()

    def _let_go(self) -> None:
        self._holding.close()
        self._weights = None

    # Around it

    def reaches_others(self, losses: Tensor, record: int) -> str | None:
        scores = self._only(self._probed, losses)
        rows = _gradient(losses[record], scores)
        if rows is None:
            return None
        others = [i for i in range(len(scores)) if i != record]
        return "the scores" if bool(rows[others].any()) else None

    def state(self) -> dict[str, Any]:
        return {"gradient_clip": self.clip}

    def load_state(self, state: Mapping[str, Any]) -> None:
        clip = state.get("gradient_clip")
        if clip is not None and not (isinstance(clip, float) and _CLIPS[0] <= clip <= _CLIPS[1]):
            raise CheckpointError(f"The checkpoint has {clip!r} for the adaptive clip of clipless training.")
        self.clip = clip

    def close(self) -> None:
        self._let_go()
        for hook in self._hooks:
            hook.remove()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _gradient(loss: Tensor, scores: Tensor) -> Tensor | None:
    found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, scores, retain_graph=True, allow_unused=True)
    return found[0]
