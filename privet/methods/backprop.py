"""Backpropagation clipping (Stevens et al. 2022): clip each layer's input and the gradient at its output.

A layer's gradient is a product of the two, so it is bounded without ever being computed for one record: the batch goes
through one ordinary backward pass. The clipped gradient is also what goes on to the layers before. What the paper could
not use, padding and bias, is bounded too, and its bound for convolutions is tightened: see `privet.gradients.bounded`,
which has the bound of each layer with its proof.

The paper samples disjoint batches (`Partition`), where E epochs are E Gaussian mechanisms: its zCDP cost
E·N·C1²·C2²/2σ² is E/(2σ_eff²) in Privet's terms, and the exact cost is lower. Poisson sampling works as well.

Errors of the paper: its results were withdrawn by its authors (docs/results/backprop-clipping.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError, Refused
from ..gradients.bounded import BOUNDS, Bounded
from ..gradients.per_record import wide
from ..gradients.taps import Taps, Unit, Use
from ..nn.input_clip import NORMS, InputClip, Norm, Window, clip_of
from ..noise import Allocation
from ..options import option
from .base import Method, ParameterGroup, Query, Sensitivity, Session, Setting, positive, register

_SMALL = 2.0**-20
"""Input factors below this are not put on gradients, which might become too small for float32."""

_Clips = float | Mapping[str, float]


@register
@dataclass(frozen=True, kw_only=True)
class Backprop(Method):
    """Backpropagation clipping.

    Formal guarantee: with input norm C1 and gradient norm C2 of a layer, one record adds at most C1·C2 to the sum for
    its weight and C2 to the sum for its bias (`privet.gradients.bounded`), and twice that when it is replaced. All sums
    together are one mechanism (rule 2). Clips that follow quantiles privately are paid for by the same rule. Inputs are
    measured going forward and used going back: in between, autograd refuses changes in place, but not those that go
    around it (`.data`, or NumPy on the same memory), which would break the bound.
    """

    name = "backprop"
    summary = "clip each layer's input and the gradient at its output: one ordinary backward pass for the whole batch"

    input_clip: _Clips = option(
        1.0, "norm C1 of each layer's input; in TOML and Python also by patterns of layer names"
    )
    gradient_clip: _Clips = option(0.1, "norm C2 of the gradient at each layer's output; by layer like input_clip")
    norm: Literal["auto", "patch", "frobenius", "input"] = option(
        "auto",
        "norms over positions: largest patch and l1-l2, all patches and Frobenius, or whole input and l1-l2 (the "
        "paper's); auto: what needs less noise on public records, else patch",
    )
    clips: Literal["fixed", "public", "private"] = option(
        "fixed", "whether clips stay, or follow a quantile of the norms: of public records, or privately of the others"
    )
    quantile: float = option(0.5, "the share of records that clips leave as they are, where clips follow norms")
    adaptive_rate: float = option(0.2, "learning rate of clips that follow norms privately (geometric)")
    allocation: Allocation = option("optimal", "how noise is shared between layers")

    def __post_init__(self) -> None:
        for name in ("input_clip", "gradient_clip"):
            value = getattr(self, name)
            for number in value.values() if isinstance(value, Mapping) else [value]:
                positive(name, number)
                if number < 1e-10:
                    raise ConfigError(f"{name} is {number!r}: below 1e-10 float32 cannot tell norms apart.")
        if self.norm not in ("auto", *NORMS):
            raise ConfigError(f"norm must be one of auto, {', '.join(NORMS)}, and is {self.norm!r}.")
        if self.clips not in ("fixed", "public", "private"):
            raise ConfigError(f"clips must be 'fixed', 'public' or 'private', and is {self.clips!r}.")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"quantile must lie between 0 and 1, and is {self.quantile!r}.")
        positive("adaptive_rate", self.adaptive_rate)

    def prepare(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            bounded = BOUNDS.get(type(layer))
            if bounded is None or not bounded.clips_input or not any(p.requires_grad for p in layer.parameters(False)):
                continue
            clip = clip_of(layer)
            norm = self.norm if self.norm in bounded.norms else bounded.norms[0]
            if clip is None:
                start = math.inf if self.clips == "public" else _of(self.input_clip, name, "input_clip")
                InputClip.before(layer, start, norm)
                continue
            bound = _of(self.input_clip, name, "input_clip") if self.clips == "fixed" else float(clip.bound)
            clip.set(bound, clip.norm if self.norm == "auto" and clip.norm in bounded.norms else norm)

    def open(self, model: nn.Module, setting: Setting) -> Session:
        if self.clips == "public" and not setting.public:
            raise Refused(
                "Clips are to be learned from public records, and there are none: give the run public=… (privet train "
                "--public), or use clips='private' or 'fixed'."
            )
        return _BackpropSession(self, model, setting)


@dataclass(eq=False)
class _Layer:
    """A layer at work: its clips as they are now, and the sums that it adds to."""

    unit: Unit
    rule: Bounded
    clip: InputClip | None
    gradient_clip: float
    norm: Norm
    sums: dict[tuple[str, ...], ParameterGroup] = field(default_factory=dict)
    """By the names of parameters in the layer, as in `Bounded.bounds`: those of them that are trained now."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """The parts of these sums, by the name of the parameter in the layer."""
    input_clip: float = 1.0
    """C1 of this step; of no use where there is no input clip."""

    def look_up(self) -> None:
        """Takes the model's own input clip and norm as they are now."""
        if self.clip is not None:
            self.input_clip, self.norm = float(self.clip.bound), self.clip.norm

    def group(self, names: Mapping[int, str]) -> None:
        """Sums for the parameters that are trained now."""
        self.sums, self.totals = {}, {}
        for part in self.rule.bounds(self.unit.layer, 1.0, 1.0):
            mine = {local: p for local, p in self.unit.parameters.items() if local in part and p.requires_grad}
            if mine:
                named = {names[id(p)]: p for p in mine.values()}
                self.sums[part] = group = ParameterGroup(next(iter(named)), named)
                self.totals |= {local: group.views[names[id(p)]] for local, p in mine.items()}

    def queries(self) -> list[Query]:
        bounds = self.rule.bounds(self.unit.layer, self.input_clip, self.gradient_clip)
        return [
            Query(group.name, group.total, Sensitivity.of_contribution(bounds[part]), group=group)
            for part, group in self.sums.items()
        ]


class _BackpropSession(Session):
    def __init__(self, method: Backprop, model: nn.Module, setting: Setting) -> None:
        self.method, self.setting, self.model = method, setting, model
        self.taps = _ClippingTaps(model, self)
        self._learning = False
        self._layers: dict[str, _Layer] = {}
        self._seen: dict[tuple[str, str, Norm], list[float]] = {}
        """Norms of public records: by layer, input or gradient, and pair of norms."""
        self._lost: Tensor | None = None
        self._clipped: dict[str, _ClippedInput] = {}
        """What came out of a layer's input clip and has not reached the layer yet."""
        self._taken_over: list[InputClip] = []
        self._norm_chosen = method.norm != "auto"
        self._known_shape: list[object] = []
        self._known_flags: list[bool] = []
        try:
            self.begin()
        except BaseException:
            self.close()
            raise

    # The layers

    def _shape(self) -> list[object]:
        """What each clip is for, which the layers were found by."""
        return [(clip_of(unit.layer), Window.of(unit.layer)) for unit in self.taps.units]

    def _flags(self) -> list[bool]:
        """Which parameters are trained, which the layers were found by too."""
        return [p.requires_grad for p in self.taps.parameters.values()]

    def _trained(self) -> list[Unit]:
        return [unit for unit in self.taps.units if any(p.requires_grad for p in unit.parameters.values())]

    def _find_layers(self) -> None:
        """The layers that are trained now, each with its clips; the model is changed only when all can be trained."""
        owner: dict[int, Unit] = {}
        for unit in self._trained():
            if type(unit.layer) not in BOUNDS:
                raise Refused(
                    f"Layer {unit.described} has parameters that are trained, and backpropagation clipping has no "
                    f"bound for it. There are bounds for {', '.join(sorted(t.__name__ for t in BOUNDS))}. Build it "
                    "from these, freeze it, register a bound (privet.gradients.bounded.bound_for, see CONTRIBUTING), "
                    "or take another method."
                )
            for p in unit.parameters.values():
                if (other := owner.setdefault(id(p), unit)) is not unit:
                    raise Refused(
                        f"Layers {other.described} and {unit.described} share a parameter, and backpropagation "
                        "clipping bounds one use of each. Give them parameters of their own, or take another method."
                    )
        self.method.prepare(self.model)
        trained = {unit.name: unit for unit in self._trained()}
        self._layers = {name: layer for name, layer in self._layers.items() if name in trained}
        for name, unit in trained.items():
            if name not in self._layers:
                self._layers[name] = self._new_layer(unit)
        clips = [id(layer.clip) for layer in self._layers.values() if layer.clip is not None]
        for layer in self._layers.values():
            clip, of_layer = layer.clip, layer.unit.described
            if clip is not clip_of(layer.unit.layer) and layer.rule.clips_input:
                raise Refused(f"The input clip of layer {of_layer} was taken away after the Run was made.")
            if clip is not None and (clips.count(id(clip)) > 1 or clip.window != Window.of(layer.unit.layer)):
                raise Refused(
                    f"The input clip of layer {of_layer} was made for another layer, or the layer was changed since. "
                    "Take it away (del layer.input_clip) and make a new Run."
                )

    def _new_layer(self, unit: Unit) -> _Layer:
        rule = BOUNDS[type(unit.layer)]
        clip = clip_of(unit.layer) if rule.clips_input else None
        start = (
            math.inf if self.method.clips == "public" else _of(self.method.gradient_clip, unit.name, "gradient_clip")
        )
        if clip is not None and self._clip_input not in clip.instead:  # it may have been frozen meanwhile
            clip.instead.append(self._clip_input)
            self._taken_over.append(clip)
        return _Layer(unit, rule, clip, start, rule.norms[0] if clip is None else clip.norm)

    def _refuse_changes_within_a_step(self) -> None:
        if (flags := self._flags()) != self._known_flags:
            changed = next(
                n for n, *f in zip(self.taps.parameters, flags, self._known_flags, strict=True) if f[0] != f[1]
            )
            raise Refused(f"Parameter '{changed}' was frozen or thawed within a step: do it between steps.")
        for layer in self._layers.values():
            if not layer.gradient_clip * layer.input_clip < math.inf:
                raise Refused(
                    f"Layer {layer.unit.described} has no clips yet: they are learned at the start of an epoch, so "
                    "thaw layers between epochs."
                )

    # One step

    @contextmanager
    def listening(self) -> Iterator[None]:
        with self.taps.recording():
            yield

    def begin(self) -> None:
        self.taps.refuse_changes()
        if (self._shape(), self._flags()) != (self._known_shape, self._known_flags):
            self._find_layers()
            self._known_shape, self._known_flags = self._shape(), self._flags()
            for layer in self._layers.values():
                layer.group(self.taps.names)
        elif self.method.clips == "fixed":
            for name, layer in self._layers.items():  # another run on this model may have set its own
                if layer.clip is not None:
                    layer.clip.set(_of(self.method.input_clip, name, "input_clip"), layer.norm)
        for layer in self._layers.values():
            layer.look_up()
            for group in layer.sums.values():
                group.total.zero_()
        self._below = {key: torch.zeros((), dtype=torch.float64) for key in self._side_queries()}

    def add(self, losses: Tensor) -> None:
        self._refuse_changes_within_a_step()
        finite = torch.isfinite(losses.detach())
        self._lost = None if bool(finite.all()) else ~finite
        self.taps.backward(losses, finite.to(losses.dtype))

    def enter(self, unit: Unit, z: Tensor, output: Any) -> Sequence[Tensor]:
        """A layer is about to be tapped: what it was given must be what came out of its clip."""
        layer = self._layers.get(unit.name)
        if layer is None or layer.clip is None:
            return [z]
        clipped = self._clipped.pop(unit.name, None)
        if clipped is None or clipped.output is not z or clipped.changed():
            raise Refused(
                f"The input of layer {unit.described} is not what its input clip gave: a hook of the layer changes it, "
                "or the clip was replaced. Change the input before the layer is called."
            )
        if clipped.scales_output:
            layer.rule.scale_output(unit.layer, output, clipped.factors)
        elif layer.rule.folds:
            _keep(clipped.whole.detach(), z, getattr(output, "grad_fn", None))
        return [clipped.whole, clipped.factors]

    def take(self, name: str, z: Tensor, input_factors: Tensor | None, delta: Tensor) -> Tensor:
        """Clips the gradient at a layer's output, adds the layer's gradients up, and gives what goes on."""
        layer = self._layers[name]
        if self._learning:
            for norm in self._candidates(layer):
                self._see(name, "gradient", norm, layer.rule.upstream_norms(layer.unit.layer, z, delta, norm))
        folded = input_factors if layer.rule.folds else None
        clipped = layer.rule.clip(layer.unit.layer, z, delta, layer.norm, layer.gradient_clip, folded)
        if self._learning:
            return clipped.delta
        layer.rule.add_clipped(layer.unit.layer, z, delta, clipped, layer.totals)
        self._count((name, "gradient"), clipped.factors, clipped.factors)
        if input_factors is not None:
            self._count((name, "input"), input_factors, clipped.factors)
        return clipped.delta

    def finish(self) -> list[Query]:
        queries = [query for layer in self._layers.values() for query in layer.queries()]
        half = Sensitivity.of_contribution(0.5)  # a record adds +1/2 or −1/2: below the clip, or above
        return queries + [
            Query(_side_name(key), count.view(1), half, std=self._side_std()) for key, count in self._below.items()
        ]

    # Clips that follow norms

    def _side_queries(self) -> list[tuple[str, str]]:
        if self.method.clips != "private":
            return []
        clipped = [(name, "input") for name, layer in self._layers.items() if layer.clip is not None]
        return clipped + [(name, "gradient") for name in self._layers]

    def _side_std(self) -> float:
        """A twentieth of the batch (Andrew et al.), or more, so that all side queries cost at most 1/16 of 1/σ²."""
        return max(self.setting.batch / 20, 2 * self.setting.noise_multiplier * math.sqrt(len(self._below)))

    def _count(self, key: tuple[str, str], factors: Tensor, of_gradient: Tensor) -> None:
        """A record is below a clip that leaves it as it is; one whose gradient is not finite does not count."""
        if key in self._below:
            finite = of_gradient > 0
            counted = finite if self._lost is None else finite & ~self._lost
            self._below[key] += torch.where(factors == 1, 0.5, -0.5).masked_fill(~counted, 0).sum()

    def observe(self, noisy: Mapping[str, Tensor]) -> None:
        for name, what in self._side_queries():
            value = noisy.get(_side_name((name, what)))
            if value is None:
                continue
            share = min(1.0, max(0.0, float(value) / self.setting.batch + 0.5))
            factor = math.exp(-self.method.adaptive_rate * (share - self.method.quantile))
            layer = self._layers[name]
            if what == "gradient":
                layer.gradient_clip = _within_reason(layer.gradient_clip * factor)
            elif layer.clip is not None:
                layer.clip.set(_within_reason(float(layer.clip.bound) * factor))
                layer.look_up()

    def wants_public(self) -> bool:
        return self.setting.public and (self.method.clips == "public" or not self._norm_chosen)

    @contextmanager
    def learning(self) -> Iterator[None]:
        before, self._learning = self._learning, True
        try:
            with self.taps.recording():
                yield
        finally:
            self._learning = before

    def learn(self, losses: Tensor) -> None:
        self.taps.backward(losses, torch.ones_like(losses))

    def learned(self) -> None:
        seen, self._seen = self._seen, {}
        for name, layer in self._layers.items():
            found = {
                norm: tuple(
                    _quantile(seen.get((name, what, norm), []), self.method.quantile) for what in ("input", "gradient")
                )
                for norm in self._candidates(layer)
            }
            if layer.clip is None:
                _, gradient = found[layer.norm]
                if self.method.clips == "public":
                    layer.gradient_clip = _usable(gradient, layer.unit)
                continue
            if not self._norm_chosen:
                layer.norm = min(found, key=lambda norm: found[norm][1] * math.hypot(found[norm][0], 1.0))
                layer.clip.set(float(layer.clip.bound), layer.norm)
            if self.method.clips == "public":
                length, gradient = (_usable(value, layer.unit) for value in found[layer.norm])
                layer.clip.set(length)
                layer.gradient_clip = gradient
            layer.look_up()
        self._norm_chosen = True

    def _candidates(self, layer: _Layer) -> Sequence[Norm]:
        """The pairs of norms that are still to be chosen from; the paper's is never less than `patch`."""
        if self._norm_chosen or layer.clip is None:
            return [layer.norm]
        return [norm for norm in layer.rule.norms if norm != "input"] or layer.rule.norms

    def _clip_input(self, clip: InputClip, x: Tensor) -> Tensor | None:
        """Clips in the module's place while the layers are tapped; a copy of the module is not ours."""
        layer = next((layer for layer in self._layers.values() if layer.clip is clip), None)
        if layer is None or not self.taps.on:
            return None
        name = layer.unit.name
        if self._learning:
            for norm in self._candidates(layer):
                self._see(name, "input", norm, clip.squared_norms(x.detach(), norm).sqrt())
        elif (float(clip.bound), clip.norm, clip.window) != (
            layer.input_clip, layer.norm, Window.of(layer.unit.layer),
        ):  # fmt: skip
            raise Refused(f"The input clip of layer {layer.unit.described} was changed in the middle of a step.")
        self._clipped[name] = self._clip(layer, clip, x)
        return self._clipped[name].output

    def _clip(self, layer: _Layer, clip: InputClip, x: Tensor) -> _ClippedInput:
        rule, unit = layer.rule, layer.unit
        if (
            rule.folds
            and rule.does_not_grow(unit.layer, x)
            and self.taps.is_first_to_see(unit)
            and x.dtype == torch.float32
        ):
            factors = clip.measure(x.detach())
            if not _any_small(factors):
                return _ClippedInput(x, x, factors, scales_output=True)
        z, factors = clip.clip(x.detach())
        return (_ClippedInput.folded if rule.folds else _ClippedInput.multiplied)(x, z, factors)

    def _see(self, layer: str, what: str, norm: Norm, norms: Tensor) -> None:
        found = self._seen.setdefault((layer, what, norm), [])
        found += [value for value in norms.tolist() if math.isfinite(value)]

    # The rest

    def reaches_others(self, losses: Tensor, record: int) -> str | None:
        return self.taps.reaches_others(losses, record)

    def bytes_per_record(self, records: int) -> int:
        seen, self.taps.bytes_seen = self.taps.bytes_seen, 0
        return math.ceil(seen / max(records, 1))

    def state(self) -> dict[str, Any]:
        """The gradient clips; input clips and norms are the model's, and lie with it."""
        clips = {name: layer.gradient_clip for name, layer in self._layers.items()}
        return {"gradient_clips": clips, "norm_chosen": self._norm_chosen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        clips = state.get("gradient_clips", {})
        if set(clips) != set(self._layers):
            raise CheckpointError(
                f"The checkpoint has clips for the layers {sorted(clips)} and this run has {sorted(self._layers)}."
            )
        self._norm_chosen = bool(state.get("norm_chosen", True))
        for name, layer in self._layers.items():
            layer.gradient_clip = float(clips[name])
            layer.look_up()

    def close(self) -> None:
        self.taps.close()
        for clip in self._taken_over:
            clip.instead.remove(self._clip_input)
        self._taken_over.clear()


class _ClippingTaps(Taps):
    """Hands what arrives at a layer to the session, and sends the clipped gradient on."""

    def __init__(self, model: nn.Module, session: _BackpropSession) -> None:
        super().__init__(model, BOUNDS)
        self._session = session
        self._arrived: set[str] = set()

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        self._arrived.clear()
        self.run_backward(losses, weights)

    def enter(self, unit: Unit, inputs: Sequence[Tensor], output: Any) -> Sequence[Tensor]:
        return self._session.enter(unit, inputs[0], output)

    def take(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> Sequence[Tensor]:
        unit = use.unit
        if unit.name in self._arrived:
            raise Refused(
                f"Layer {unit.described} is used more than once in a forward pass, and backpropagation clipping bounds "
                "one use of each layer. Give each use a layer of its own, or take another method."
            )
        self._arrived.add(unit.name)
        delta, (z, *factors) = cast(Tensor, deltas[0]), inputs
        passed = self._session.take(unit.name, wide(z), factors[0] if factors else None, wide(delta))
        return [passed.to(delta.dtype)]


@dataclass(frozen=True, eq=False)
class _ClippedInput:
    """An input on its way from its clip to the layer."""

    output: Tensor
    """What the layer gets."""
    whole: Tensor
    """What the tap keeps: where the factors are folded, the input as it was, which is in memory anyway."""
    factors: Tensor
    scales_output: bool = False
    """Whether the layer gets the input as it was, and its output is to be made what a clipped one would have given."""
    versions: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self._versions())

    def _versions(self) -> tuple[int, int]:
        return self.output._version, self.whole._version

    def changed(self) -> bool:
        """Whether the input, or what became of it, was written to since it was measured."""
        return self._versions() != self.versions

    @classmethod
    def folded(cls, x: Tensor, z: Tensor, factors: Tensor) -> _ClippedInput:
        """With whole·factors = z, factors of at least `_SMALL`, and a backward pass that leaves them to the tap."""
        if not _any_small(factors):
            return cls(_Folded.apply(x, z, None), x, factors)  # type: ignore[no-untyped-call]
        whole, folded, small = x.detach().clone(), factors.clone(), factors < _SMALL
        whole[small] = 2 * z[small]  # also where x is not finite and z is zero
        folded[small] = 0.5
        return cls(_Folded.apply(x, z, factors / folded), whole, folded)  # type: ignore[no-untyped-call]

    @classmethod
    def multiplied(cls, x: Tensor, z: Tensor, factors: Tensor) -> _ClippedInput:
        shaped = factors.view(-1, *[1] * (x.dim() - 1))
        output = torch.where(shaped > 0, (x * shaped).to(x.dtype), 0)
        return cls(output, output, factors)


def _keep(x: Tensor, instead_of: Tensor, operation: Any) -> None:
    """Has autograd keep `x` for an operation where that would keep the other one.

    A convolution keeps its input whether or not the gradient of its weight is wanted, and that alone would read more
    than the shape of it. As `x` is in memory anyway, the clipped input need not be.
    """
    kept, address = getattr(operation, "_raw_saved_input", None), instead_of.data_ptr()
    if kept is None:
        return

    def exchange(saved: Tensor) -> Tensor:  # refers to no more than an address, as it is kept too
        return x if saved.data_ptr() == address and saved.shape == x.shape else saved

    with suppress(RuntimeError):  # where it is someone else's already, who recomputes it (gradient checkpointing)
        kept.register_hooks(exchange, lambda saved: saved)


class _Folded(torch.autograd.Function):
    """An input's clip whose backward pass is the tap's business: the gradient that comes has the factors on it.

    But for those in `left`, which are 1 where nothing is left to do; None if that is everywhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, left: Tensor | None) -> Tensor:
        ctx.left = left
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.left is not None:
            left = ctx.left.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1))
            gradient = torch.where(left > 0, gradient * left, 0)
        return gradient, None, None


def _any_small(factors: Tensor) -> bool:
    return factors.numel() > 0 and float(factors.min()) < _SMALL


def _within_reason(clip: float) -> float:
    return min(max(clip, 1e-10), 1e10)


def _of(clips: _Clips, layer: str, option: str) -> float:
    """The clip of a layer: the one for all, or that of the first pattern that matches."""
    if not isinstance(clips, Mapping):
        return float(clips)
    for pattern, value in clips.items():
        if fnmatchcase(layer, pattern):
            return float(value)
    raise ConfigError(f"{option} has no pattern that matches layer '{layer}'. Add one, for example '*'.")


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values).quantile(share)) if values else math.nan


def _usable(value: float, unit: Unit) -> float:
    if not 0 < value < math.inf:
        raise Refused(f"The public records give layer {unit.described} nothing to learn its clips from.")
    return max(value, 1e-10)


def _side_name(key: tuple[str, str]) -> str:
    return f"{key[1]}s of {key[0]} below their clip"
