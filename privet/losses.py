"""Losses for private training, one number per record: those of the losing-less paper and of its ablation.

Each is a module that is called as ``loss(scores, targets)``, with scores (records, classes) and the number of each
record's class, and gives a vector. Record i's loss is a function of record i alone, so all of them go with every
method, and in ordinary training with ``.mean()``. Losses that change over a training read `epoch`, which whoever
trains sets, counting from 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import native
from .errors import ConfigError, Refused
from .hooks import only_looks
from .options import option

_HALF = (torch.float16, torch.bfloat16)
_NOTICED = 2.0**-24
"""Single precision does not notice less than this beside 1."""
_WHAT_GAMMA_IS = "γ of the focal loss: how much less records count that are right; 0 is cross-entropy"
_AFFINE = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass(kw_only=True, eq=False, repr=False)
class Loss(nn.Module):
    """A loss per record. Use as a context manager, or `close` it, to take from the model what it put there."""

    summary: ClassVar[str]
    epoch = 0.0
    """Which epoch it is, from 0; need not be whole."""

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, model: nn.Module, **options: Any) -> Self:
        """The loss for training this model; most do not look at it."""
        return cls(**options)

    @abstractmethod
    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The losses; shapes are right, and scores at least single precision."""

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        if scores.dim() != 2 or targets.shape != scores.shape[:1] or targets.is_floating_point():
            raise Refused(
                "A loss takes scores of shape (records, classes) and the number of each record's class, and was given "
                f"{tuple(scores.shape)} and {targets.dtype} of shape {tuple(targets.shape)}."
            )
        return self.per_record(scores.float() if scores.dtype in _HALF else scores, targets)

    def close(self) -> None:
        """Removes every hook."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def extra_repr(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))


# The parts


def sse(scores: Tensor, targets: Tensor) -> Tensor:
    """½‖h − y‖² of the scores h and the one-hot target y (equation 5)."""
    return _errors(scores, targets).square().sum(1) / 2


def focal(scores: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """−(1 − p)^γ·log p for the probability p of the target (equation 6); with γ = 0 cross-entropy, bit for bit.

    From log p, which stays finite as p nears 0, and 1 − p = −expm1(log p), which has as many digits as log p has. Where
    p rounds to 1, 1 − p is held at the smallest normal number, as the slope of (1 − p)^γ is infinite at 0 if γ < 1.
    """
    if gamma == 0:
        return F.cross_entropy(scores, targets, reduction="none")
    log_p = F.log_softmax(scores, 1).gather(1, targets.long().unsqueeze(1)).squeeze(1)
    return -_missed(log_p).pow(gamma) * log_p


def curriculum(scores: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    """α·Focal_γ + (1 − α)·SSE."""
    return alpha * focal(scores, targets, gamma) + (1 - alpha) * sse(scores, targets)


class _Curriculum(torch.autograd.Function):
    """`curriculum` plus weight·Σ `sizes`, with its slope, which autograd would put together from many small operations.

    With q the probabilities and p that of the target, the focal loss has the slope c·(y − q) at the scores, with
    c = p·∂/∂p(−(1 − p)^γ·log p) = γ·p·(1 − p)^(γ−1)·log p − (1 − p)^γ; SSE has h − y.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, targets: Tensor, alpha: float, gamma: float, weight: float, *sizes: Tensor
    ) -> Tensor:
        ctx.alpha, ctx.gamma, ctx.weight, ctx.sizes = alpha, gamma, weight, len(sizes)
        if native.serves(scores) and targets.is_cpu:
            losses, slopes = native.curriculum(scores, targets, alpha, gamma)
        else:
            losses, slopes = _Curriculum.with_slopes(scores, targets, alpha, gamma)
        ctx.save_for_backward(scores, targets, slopes)
        for size in sizes:
            losses.add_(size, alpha=weight)
        return losses

    @staticmethod
    def with_slopes(scores: Tensor, targets: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
        at = targets.long().unsqueeze(1)
        y = _one_hot(scores, targets)
        log_q, errors = F.log_softmax(scores, 1), scores - y
        log_p = log_q.gather(1, at).squeeze(1)
        if gamma == 0:
            late, steepness = -log_p, torch.full_like(log_p, -alpha)
        else:
            missed = _missed(log_p)
            power = missed.pow(gamma)
            late = -power * log_p
            steepness = (missed.pow(gamma - 1).mul_(log_p).mul_(log_p.exp()).mul_(gamma) - power).mul_(alpha)
        slopes = log_q.exp_().neg_().add_(y).mul_(steepness.unsqueeze(1)).add_(errors, alpha=1 - alpha)
        return late.mul_(alpha).add_(errors.square_().sum(1), alpha=(1 - alpha) / 2), slopes

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scores, targets, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # someone wants the slope of the slope
            value = curriculum(scores, targets, ctx.alpha, ctx.gamma)
            (gradient,) = torch.autograd.grad(value, scores, upstream, create_graph=True)
        else:
            gradient = upstream.unsqueeze(1) * slopes
        return gradient, None, None, None, None, *[ctx.weight * upstream] * ctx.sizes


def _missed(log_p: Tensor) -> Tensor:
    """1 − p, never quite 0."""
    return (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)


def _one_hot(scores: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter(1, targets.long().unsqueeze(1), 1)


def _errors(scores: Tensor, targets: Tensor) -> Tensor:
    return scores - _one_hot(scores, targets)


def _not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be zero or a positive number, and is {value!r}.")


# The losses


class CrossEntropy(Loss):
    """−log p of the target's probability p."""

    summary = "cross-entropy"

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets, reduction="none")


class SSE(Loss):
    """½‖h − y‖²: half the summed squared error of the scores h against the one-hot target y."""

    summary = "summed squared error of the scores"

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        return sse(scores, targets)


class SAE(Loss):
    """Σ_d |h_d − y_d| (equation 10)."""

    summary = "summed absolute error of the scores"

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        return _errors(scores, targets).abs().sum(1)


@dataclass(kw_only=True, eq=False, repr=False)
class Huber(Loss):
    """Σ_d of ½e²/β where |e| < β, and |e| − ½β elsewhere, for the errors e = h_d − y_d (equation 11).

    Near 0 it is SSE divided by β, far from it SAE.
    """

    summary = "squared error where it is small, absolute error elsewhere"

    beta: float = option(1.0, "below which error β the Huber loss is quadratic")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ConfigError(f"beta must be a positive number, and is {self.beta!r}.")

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        errors = _errors(scores, targets)
        return F.smooth_l1_loss(errors, torch.zeros_like(errors), beta=self.beta, reduction="none").sum(1)


@dataclass(kw_only=True, eq=False, repr=False)
class Focal(Loss):
    """−(1 − p)^γ·log p (Lin et al. 2017): records that are already right count less; see `focal`."""

    summary = "cross-entropy that counts records less once they are right"

    gamma: float = option(5.0, _WHAT_GAMMA_IS)

    def __post_init__(self) -> None:
        super().__post_init__()
        _not_negative("gamma", self.gamma)

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        return focal(scores, targets, self.gamma)


@dataclass(kw_only=True, eq=False, repr=False)
class SSECrossEntropy(Loss):
    """α·CE + (1 − α)·SSE with α = sigmoid(epoch − e_t): from one to the other around the epoch e_t."""

    summary = "from sse to ce"

    threshold_epoch: float = option(
        0.0, "epoch e_t, counted from 0, at which sse and what follows it weigh the same", otherwise="0"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.threshold_epoch):
            raise ConfigError(f"threshold_epoch must be a finite number, and is {self.threshold_epoch!r}.")

    @property
    def alpha(self) -> float:
        """sigmoid(epoch − e_t), in a form that never overflows."""
        return 0.5 * (1 + math.tanh((self.epoch - self.threshold_epoch) / 2))

    @property
    def late_gamma(self) -> float:
        """γ of the focal loss that it ends with: 0 for cross-entropy."""
        return 0.0

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.with_penalty(scores, targets, 0.0, [])

    def with_penalty(self, scores: Tensor, targets: Tensor, weight: float, sizes: Sequence[Tensor]) -> Tensor:
        """The loss, and weight·Σ sizes."""
        if torch.is_grad_enabled() and not in_transform():
            return _Curriculum.apply(scores, targets, self.alpha, self.late_gamma, weight, *sizes)  # type: ignore[no-untyped-call, no-any-return]
        losses = curriculum(scores, targets, self.alpha, self.late_gamma)
        return losses + weight * torch.stack(list(sizes)).sum(0) if sizes else losses


@dataclass(kw_only=True, eq=False, repr=False)
class SSEFocal(SSECrossEntropy):
    """α·Focal_γ + (1 − α)·SSE with α = sigmoid(epoch − e_t)."""

    summary = "from sse to focal"

    gamma: float = option(5.0, _WHAT_GAMMA_IS)

    def __post_init__(self) -> None:
        super().__post_init__()
        _not_negative("gamma", self.gamma)

    @property
    def late_gamma(self) -> float:
        return self.gamma


@dataclass(kw_only=True, eq=False, repr=False)
class LosingLess(SSEFocal):
    """The losing-less loss (ICLR 2022 submission): L = α·Focal_γ + (1 − α)·(SSE + λ·Reg), α = sigmoid(epoch − e_t).

    Reg = Σ_m ‖h_m‖² / d_m over the hidden pre-activations h_m, each of d_m numbers for one record. SSE learns fast at
    first while Reg keeps weights, and so gradients, from growing; the focal loss turns to the hard records later.

    The text of the paper that was at hand is damaged in equations (7) and (8). How it is read here:

    - (8): before Reg stands (1 − α)/β, for the β of the paper's Table 6: the penalty fades together with SSE. Of that
      fraction the text has debris alone. A public benchmark of private learning (github.com/DmsKinson/DPMLBench,
      loss/loss_func.py) has this loss with such a factor, and it is the reading that comes near to the paper's figures:
      a penalty that stays harms from e_t on, as the focal loss leaves a learned record no other slope
      (docs/results/losing-less.md; `penalty_fades=False` has it).
    - (7): the norm is squared. It is left just like that of (5), which (5) itself defines as a sum of squares. The
      benchmark has half of it, as (5) has, so λ = 1/(2β).
    - The epoch counts from 0, as there: e_t = 0 begins with α = ½.

    The default of `penalty`, ½, is what Table 6 has for both MNISTs (e_t = 0, β = 1, γ = 5); CIFAR-10 there is e_t = 7,
    β = 11, γ = 5.

    Call the model, then the loss, once each: the pre-activations are those of the forward pass just before.
    """

    summary = "from sse to focal, at first with a penalty on hidden pre-activations"

    model: InitVar[nn.Module] = field(kw_only=False)
    penalty: float = option(0.5, "λ, by which the mean squares of hidden pre-activations are multiplied")
    penalty_fades: bool = option(True, "whether the penalty fades as sse does; it stays as it is otherwise")
    squared_norms: bool = option(True, "whether the penalty is ‖h‖²/d of each layer; ‖h‖/d otherwise")
    penalty_layers: str | Sequence[str] | None = option(
        None,
        "whose outputs are penalised: patterns of layer names, separated by commas",
        otherwise="every Linear and Conv but the last to run",
    )

    def __post_init__(self, model: nn.Module) -> None:
        super().__post_init__()
        _not_negative("penalty", self.penalty)
        self.pre_activations = PreActivations(
            model, self.penalty_layers, squared=self.squared_norms, wanted=lambda: self.weight > 0
        )

    @classmethod
    def of(cls, model: nn.Module, **options: Any) -> Self:
        return cls(model, **options)

    @property
    def weight(self) -> float:
        """Of the penalty now: λ·(1 − α), or λ if it stays. Once it has faded away, it is 0 and costs no time."""
        left = 1 - self.alpha if self.penalty_fades else 1
        return self.penalty * left if left > _NOTICED else 0.0

    def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
        weight = self.weight
        sizes = self.pre_activations.sizes(len(scores)) if weight else []
        return self.with_penalty(scores, targets, weight, sizes)

    def close(self) -> None:
        self.pre_activations.close()


class PreActivations:
    """Watches layers of a model and knows the ‖h_m‖² / d_m (or ‖h_m‖ / d_m) of its last pass, for each record.

    Without `layers`, every Linear and Conv is watched, and the one that runs last counts as the output, not as hidden.
    With patterns of layer names (a list, or a text with commas), all layers that match one count, of whatever type.

    `wanted` is asked at the start of each pass whether it is to be watched.

    The hooks come after those of a method, which replace a layer's output by one that shows it the gradient there. So
    the method meets the penalty's gradient as it meets any other.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Sequence[str] | None = None,
        *,
        squared: bool = True,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._squared = squared
        self._wanted = wanted
        self._watching = True
        self._all_hidden = layers is not None
        self._watched = _matching(model, layers)
        self._seen: list[Tensor] | None = None
        """Sizes, a vector for each use of a layer; None unless a forward pass waits for its loss."""
        self._trained: set[str] = set()
        self._copies = any(getattr(module, "inplace", False) for module in model.modules())
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._begin(model), prepend=True)]
        self._handles += [layer.register_forward_hook(self._look(name, layer)) for name, layer in self._watched.items()]

    def sizes(self, records: int) -> list[Tensor]:
        """A vector for each use of a hidden layer in the forward pass just before, which is forgotten then."""
        seen, self._seen = self._seen, None
        if not seen:
            raise Refused(
                "The pre-activations that the loss penalises were not seen. Call the model itself, then the loss, once "
                "each, and close the loss only after that."
            )
        if wrong := [len(sizes) for sizes in seen if len(sizes) != records]:
            raise Refused(
                f"A layer with a penalty worked on {wrong[0]} records while there are {records} scores: the first axis "
                "must be the records in each of them. Name other layers in penalty_layers."
            )
        return seen if self._all_hidden else seen[:-1]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, model: nn.Module) -> Any:
        @only_looks
        def begin(called: nn.Module, _args: Any) -> None:
            if called is model:  # a copy of the model has these hooks too
                self._watching, self._seen = self._wanted(), []
                self._trained = {name for name, layer in self._watched.items() if _trains(layer)}

        return begin

    def _look(self, name: str, layer: nn.Module) -> Any:
        @only_looks
        def look(called: nn.Module, _args: Any, output: Any) -> Tensor | None:
            if called is not layer or not self._watching:
                return None
            if not isinstance(output, Tensor) or output.dim() < 2:
                got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
                raise Refused(f"Layer '{name}' gives {got}: a penalty is for tensors whose first axis is the records.")
            # Done even if nobody asks: gradient checkpointing runs a layer again and must find the same operations.
            passed, sizes = _measured(output.clone() if self._copies else output, self._squared)
            # Who gets `passed` may not overwrite it, as activations do, and whoever divides the scores in place. So it
            # goes on only where it saves something: over positions.
            result = None if self._copies or output.dim() == 2 else passed
            if self._seen is None:
                return result
            if torch.is_grad_enabled() and name in self._trained and not _trains(layer):
                raise Refused(
                    f"Layer '{name}' lies in a module with parameters of its own, which is differentiated as a whole: "
                    "a penalty inside of it would not reach its weights. Give those parameters a module of their own, "
                    "or name other layers in penalty_layers."
                )
            self._seen.append(sizes)
            return result

        return look


def _measured(h: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
    """h as it is, with the size of each record's: ‖h‖²/d, or ‖h‖/d if not `squared`."""
    kind = _MeasuredInTransform if in_transform() else _Measured
    return kind.apply(h, squared)  # type: ignore[no-untyped-call, no-any-return]


class _Measured(torch.autograd.Function):
    """As h goes on from here, the gradients of what follows and of the size meet in one place: one pass over h forward
    and one backward, where h.square().mean() takes seven times as long."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
        _Measured.setup_context_of(ctx, h, squared)
        return _Measured.sizes(h, squared)

    @staticmethod
    def setup_context_of(ctx: Any, h: Tensor, squared: bool) -> None:
        ctx.squared = squared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h)

    @staticmethod
    def sizes(h: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
        if squared and native.serves(h) and native.in_rows(h) and not in_transform():
            return h.view_as(h), native.mean_squares(h)
        norms = _lengths(h)
        return h.view_as(h), (norms.square() if squared else norms) / math.prod(h.shape[1:])

    @staticmethod
    def backward(ctx: Any, passing: Tensor | None, of_size: Tensor | None) -> tuple[Tensor | None, None]:
        if of_size is None:
            return passing, None
        (h,) = ctx.saved_tensors
        if (
            ctx.squared
            and passing is not None
            and native.serves(h, passing, of_size)
            and native.in_rows(h)
            and h.stride() == passing.stride()
            and not torch.is_grad_enabled()
        ):
            return native.add_multiples(passing, h, of_size, 2 / math.prod(h.shape[1:])), None
        steepness = 2.0 if ctx.squared else _lengths(h).reciprocal().nan_to_num(posinf=0)
        scales = (of_size * steepness / math.prod(h.shape[1:])).view(-1, *[1] * (h.dim() - 1))
        if passing is None:
            return (scales * h).to(h.dtype), None
        if h.dtype in _HALF:
            return (passing + scales * h).to(h.dtype), None
        return torch.addcmul(passing, scales, h), None


class _MeasuredInTransform(_Measured):
    """For layers without a rule, which are run by torch.func: the form that it asks for takes twice as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, squared: bool) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _Measured.sizes(h, squared)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Measured.setup_context_of(ctx, *inputs)


def in_transform() -> bool:
    """Whether torch.func is at work, which not every autograd.Function goes with."""
    return bool(torch._C._are_functorch_transforms_active())


def _lengths(h: Tensor) -> Tensor:
    dims = tuple(range(1, h.dim()))
    wide = torch.float32 if h.dtype in _HALF else None
    norms: Tensor = torch.linalg.vector_norm(h, dim=dims, dtype=wide) if len(h) else h.sum(dims, dtype=wide)
    return norms


def _trains(layer: nn.Module) -> bool:
    own = layer._parameters.values() if not layer._modules else layer.parameters()  # asked in every pass
    return any(p is not None and p.requires_grad for p in own)


def _matching(model: nn.Module, layers: str | Sequence[str] | None) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    if layers is None:
        found: dict[str, nn.Module] = {name: layer for name, layer in named.items() if isinstance(layer, _AFFINE)}
        if not found:
            raise ConfigError("The model has no Linear or Conv layer to penalise: name layers in penalty_layers.")
        return found
    patterns = [p.strip() for p in layers.split(",")] if isinstance(layers, str) else list(layers)
    names = [name for name in named if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"No layer of the model matches '{pattern}'. There are: {', '.join(names)}.")
    return {name: named[name] for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


# By name

LOSSES: dict[str, type[Loss]] = {
    "ce": CrossEntropy,
    "sse": SSE,
    "focal": Focal,
    "sse+ce": SSECrossEntropy,
    "sse+focal": SSEFocal,
    "losing-less": LosingLess,
    "sae": SAE,
    "huber": Huber,
}
"""All losses by the name that the command line knows them under."""


def loss(name: str, model: nn.Module, /, **options: Any) -> Loss:
    """A loss by its name, for training `model`: ``loss("losing-less", model, gamma=2)``."""
    if name not in LOSSES:
        raise ConfigError(f"There is no loss '{name}'. There are: {', '.join(LOSSES)}.")
    known = [f.name for f in fields(LOSSES[name])]
    if unknown := next((key for key in options if key not in known), None):
        raise ConfigError(f"Loss '{name}' has no option '{unknown}'. It has: {', '.join(known) or 'none'}.")
    return LOSSES[name].of(model, **options)
