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
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import CheckpointError, ConfigError, Refused
from ..gradients.bounded import BOUNDS, Bounded
from ..gradients.per_record import Scratch, full_precision, using, wide
from ..gradients.taps import Taps, Unit, Use
from ..nn.input_clip import NORMS, InputClip, Norm, clip_of
from ..noise import Allocation
from .base import Method, ParameterGroup, Query, Sensitivity, Session, Setting, option, positive, register

_MARGIN = 1 - 2.0**-13
"""Norms and products are computed in float32; aiming this much below C2 keeps what comes out at the bound or less."""
_NEARLY = 1 - 2.0**-10
"""A clipped input that is longer than this part of C1 counts as one that was clipped."""

_Clips = float | Mapping[str, float]


@register
@dataclass(frozen=True, kw_only=True)
class Backprop(Method):
    """Backpropagation clipping.

    Formal guarantee: with input norm C1 and gradient norm C2 of a layer, one record adds at most C1·C2 to the sum for
    its weight and C2 to the sum for its bias (`privet.gradients.bounded`), and twice that when it is replaced. All sums
    together are one mechanism (rule 2). Clips that follow quantiles privately are paid for by the same rule.
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
            clip, norm = clip_of(layer), None if self.norm == "auto" else self.norm
            if clip is None:
                start = math.inf if self.clips == "public" else _of(self.input_clip, name, "input_clip")
                InputClip.before(layer, start, norm or "patch")
            elif self.clips == "fixed":
                clip.set(_of(self.input_clip, name, "input_clip"), norm)
            elif norm is not None:
                clip.set(float(clip.bound), norm)

    def open(self, model: nn.Module, setting: Setting) -> Session:
        if self.clips == "public" and not setting.public:
            raise Refused(
                "Clips are to be learned from public records, and there are none: give the run public=… (privet train "
                "--public), or use clips='private' or 'fixed'."
            )
        self.prepare(model)
        return _BackpropSession(self, model, setting)


@dataclass(eq=False)
class _Layer:
    """A layer at work: its clips as they are now, and the sums that it adds to."""

    unit: Unit
    rule: Bounded
    clip: InputClip | None
    gradient_clip: float
    norm: Norm
    groups: list[ParameterGroup] = field(default_factory=list)
    totals: dict[str, Tensor] = field(default_factory=dict)
    input_clip: float = 1.0
    """C1 of this step; of no use where there is no input clip."""

    def begin(self, names: Mapping[int, str]) -> None:
        """Sums of zero, by the parameters that are trained now."""
        self.input_clip = 1.0 if self.clip is None else float(self.clip.bound)
        parts = [
            {local: p for local, p in self.unit.parameters.items() if local in part and p.requires_grad}
            for part in self.rule.bounds(self.unit.layer, 1.0, 1.0)
        ]
        if [list(part.values()) for part in parts if part] != [list(g.parameters.values()) for g in self.groups]:
            self.groups = [
                ParameterGroup(names[id(next(iter(part.values())))], {names[id(p)]: p for p in part.values()})
                for part in parts
                if part
            ]
        self.totals = {}
        for part, group in zip([part for part in parts if part], self.groups, strict=True):
            group.total.zero_()
            self.totals |= {local: group.views[names[id(p)]] for local, p in part.items()}

    def queries(self) -> list[Query]:
        bounds = self.rule.bounds(self.unit.layer, self.input_clip, self.gradient_clip)
        found = []
        for group in self.groups:
            mine = {id(p) for p in group.parameters.values()}
            bound = next(
                b for part, b in bounds.items() if mine & {id(self.unit.parameters.get(local)) for local in part}
            )
            found.append(Query(group.name, group.total, Sensitivity.of_contribution(bound), group=group))
        return found


class _BackpropSession(Session):
    def __init__(self, method: Backprop, model: nn.Module, setting: Setting) -> None:
        self.method, self.setting, self.model = method, setting, model
        self.taps = _ClippingTaps(model, self)
        self._learning = False
        self._layers: dict[str, _Layer] = {}
        self._handles: list[RemovableHandle] = []
        self._seen: dict[tuple[str, str, Norm], list[float]] = {}
        """Norms of public records: by layer, input or gradient, and pair of norms."""
        self._lost: Tensor | None = None
        self._norm_chosen = method.norm != "auto"
        try:
            self._find_layers()
            self.begin()
        except BaseException:
            self.close()
            raise

    # The layers

    def _find_layers(self) -> None:
        owner: dict[int, Unit] = {}
        for unit in self.taps.units:
            if not any(p.requires_grad for p in unit.parameters.values()):
                continue
            rule = BOUNDS.get(type(unit.layer))
            if rule is None:
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
            if unit.name not in self._layers:
                self._add_layer(unit, rule)
        for name in [name for name in self._layers if not any(name == u.name for u in owner.values())]:
            del self._layers[name]  # frozen meanwhile

    def _add_layer(self, unit: Unit, rule: Bounded) -> None:
        clip = clip_of(unit.layer) if rule.clips_input else None
        if rule.clips_input and clip is None:
            raise Refused(f"Layer {unit.described} has lost its input clip. Make the Run after the model is complete.")
        start = (
            math.inf if self.method.clips == "public" else _of(self.method.gradient_clip, unit.name, "gradient_clip")
        )
        norm = rule.norms[0] if clip is None else clip.norm
        self._layers[unit.name] = _Layer(unit, rule, clip, start, norm)
        if clip is not None:
            self._handles.append(clip.register_forward_hook(self._watch_input(unit.name)))

    def _refuse_lost_clips(self) -> None:
        for layer in self._layers.values():
            if layer.rule.clips_input and clip_of(layer.unit.layer) is not layer.clip:
                raise Refused(f"The input clip of layer {layer.unit.described} was taken away after the Run was made.")

    # One step

    @contextmanager
    def listening(self) -> Iterator[None]:
        with self.taps.recording():
            yield

    def begin(self) -> None:
        self.taps.refuse_changes()
        self.method.prepare(self.model)  # layers may have been thawed
        self._find_layers()
        self._refuse_lost_clips()
        for layer in self._layers.values():
            layer.begin(self.taps.names)
        self._below = {key: torch.zeros((), dtype=torch.float64) for key in self._side_queries()}

    def add(self, losses: Tensor) -> None:
        finite = torch.isfinite(losses.detach())
        self._lost = None if bool(finite.all()) else ~finite
        self.taps.backward(losses, finite.to(losses.dtype))

    def take(self, name: str, z: Tensor, delta: Tensor) -> Tensor:
        """Clips the gradient at a layer's output, adds the layer's gradients up, and gives what goes on."""
        layer = self._layers[name]
        if self._learning:
            for norm in self._candidates(layer):
                found = layer.rule.upstream_norms(layer.unit.layer, z, delta, norm)
                self._see(name, "gradient", norm, found)
        norms = layer.rule.upstream_norms(layer.unit.layer, z, delta, layer.norm)
        clipped = _scaled(delta, norms, layer.gradient_clip)
        if not self._learning:
            layer.rule.add(layer.unit.layer, z, clipped, layer.totals)
            self._count((name, "gradient"), norms <= layer.gradient_clip, torch.isfinite(norms))
            if layer.clip is not None and (name, "input") in self._below:
                below = layer.clip.squared_norms(z) <= (layer.input_clip * _NEARLY) ** 2
                self._count((name, "input"), below, torch.isfinite(norms))
        return clipped

    def finish(self) -> list[Query]:
        queries = []
        for layer in self._layers.values():
            if layer.clip is not None and float(layer.clip.bound) != layer.input_clip:
                raise Refused(f"The input clip of layer {layer.unit.described} was changed in the middle of a step.")
            queries += layer.queries()
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

    def _count(self, key: tuple[str, str], below: Tensor, finite: Tensor) -> None:
        if key in self._below:
            counted = finite if self._lost is None else finite & ~self._lost
            self._below[key] += torch.where(below, 0.5, -0.5).masked_fill(~counted, 0).sum()

    def observe(self, noisy: Mapping[str, Tensor]) -> None:
        for name, what in self._side_queries():
            value = noisy.get(_side_name((name, what)))
            if value is None:
                continue
            share = min(1.0, max(0.0, float(value) / self.setting.batch + 0.5))
            factor = math.exp(-self.method.adaptive_rate * (share - self.method.quantile))
            layer = self._layers[name]
            if what == "gradient":
                layer.gradient_clip *= factor
            elif layer.clip is not None:
                layer.clip.set(float(layer.clip.bound) * factor)

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
        self._norm_chosen = True

    def _candidates(self, layer: _Layer) -> Sequence[Norm]:
        """The pairs of norms that are still to be chosen from; the paper's is never less than `patch`."""
        if self._norm_chosen or layer.clip is None:
            return [layer.norm]
        return [norm for norm in layer.rule.norms if norm != "input"]

    def _watch_input(self, name: str) -> Any:
        def watch(clip: InputClip, args: tuple[Any, ...], _output: Any) -> None:
            if self._learning and name in self._layers:
                for norm in self._candidates(self._layers[name]):
                    self._see(name, "input", norm, clip.squared_norms(args[0].detach(), norm).sqrt())

        return watch

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
            if layer.clip is not None:
                layer.norm, layer.input_clip = layer.clip.norm, float(layer.clip.bound)

    def close(self) -> None:
        self.taps.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _ClippingTaps(Taps):
    """Hands what arrives at a layer to the session, and sends the clipped gradient on."""

    def __init__(self, model: nn.Module, session: _BackpropSession) -> None:
        super().__init__(model, BOUNDS)
        self._session = session
        self._scratch = Scratch()
        self._arrived: set[str] = set()

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        self._arrived.clear()
        self._scratch.reclaim()
        self.run_backward(losses, weights)

    def take(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> Sequence[Tensor]:
        unit = use.unit
        if unit.name in self._arrived:
            raise Refused(
                f"Layer {unit.described} is used more than once in a forward pass, and backpropagation clipping bounds "
                "one use of each layer. Give each use a layer of its own, or take another method."
            )
        self._arrived.add(unit.name)
        delta = cast(Tensor, deltas[0])
        with torch.no_grad(), full_precision(inputs[0]), self.switched(False), using(self._scratch):
            passed = self._session.take(unit.name, wide(inputs[0]), wide(delta))
        return [passed.to(delta.dtype)]


def _scaled(delta: Tensor, norms: Tensor, clip: float) -> Tensor:
    """Each record's δ scaled to norm at most `clip`; zero where the norm is not finite."""
    finite = torch.isfinite(norms)
    factors = (clip * _MARGIN / norms).clamp(max=1).to(delta.dtype)
    shape = (-1, *[1] * (delta.dim() - 1))
    scaled = delta * factors.view(shape)
    return scaled if bool(finite.all()) else scaled.masked_fill_(~finite.view(shape), 0)


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
