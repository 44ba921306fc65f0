"""Faults that private training has been known to have, each as a change to Privet's own code, and where it shows.

`python tests/audit/faults.py` puts them in one at a time and prints the table of docs/results/audit.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import privet.run
import privet.step
from privet import native
from privet.accounting import Guarantee
from privet.audit import Report, audit
from privet.gradients.bounded import Bounded, Clipped, ConvBound, LinearBound, _Affine
from privet.gradients.per_record import Dense, PerRecord
from privet.methods import Method
from privet.methods.backprop import Backprop, _BackpropSession
from privet.methods.batch import Batch, _BatchSession
from privet.methods.clipless import Clipless, _CliplessSession
from privet.methods.per_example import PerExample, _PerExampleSession
from privet.methods.ternary import Ternary, _Signs
from privet.nn.input_clip import InputClip, Window
from privet.nn.lipschitz import Bias, BoundedInput, Conv2d, Linear
from privet.noise import Source
from privet.sampling import Poisson

BATCH = 6
"""The expected sample of the audited steps."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10, track_running_stats=False), nn.Tanh(), nn.Linear(10, 3))


def convolution() -> nn.Module:
    """The largest response alone has a gradient, so that a hostile record can put all of it on one patch."""
    torch.manual_seed(0)
    conv = nn.Conv1d(1, 4, 3, padding=2, padding_mode="replicate")
    return nn.Sequential(nn.Unflatten(1, (1, 6)), conv, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(4, 3))


def averaged_convolution() -> nn.Module:
    """The gradient is the same at all positions."""
    torch.manual_seed(0)
    conv = nn.Conv1d(1, 4, 3, padding=1, padding_mode="circular", bias=False)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), conv, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3))


def lipschitz() -> nn.Module:
    """Weights beyond their constraint, and a bias whose gradient is the same at all positions."""
    torch.manual_seed(0)
    return nn.Sequential(
        BoundedInput((6,), radius=2.0),
        nn.Unflatten(1, (1, 2, 3)),
        Conv2d(1, 4, 2, padding=1, constraint=None, lipschitz=2.0),
        Bias(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Linear(4, 3, constraint="spectral"),
    )


GROUPS = {"weight": ["0.weight"], "bias": ["0.bias"], "last weight": ["2.weight"], "last bias": ["2.bias"]}

CLIPS = {"1": 0.01, "*": 0.3}
"""So low that gradients at the convolution are clipped: where none is, faults in their norms do no harm."""

SETTINGS: dict[str, Callable[[], tuple[Method, nn.Module]]] = {
    "per-example": lambda: (PerExample(clip=1.0), network()),
    "per-example in four groups": lambda: (PerExample(groups=GROUPS, allocation="proportional"), network()),
    "batch": lambda: (Batch(clip=0.02), network()),
    "batch in six groups": lambda: (Batch(clip=0.02, record_groups=6), network()),
    "batch with BatchNorm": lambda: (Batch(clip=0.02), with_batch_norm()),
    "backprop": lambda: (Backprop(input_clip=0.8, gradient_clip=CLIPS), convolution()),
    "backprop, averaged": lambda: (Backprop(input_clip=0.8, gradient_clip=CLIPS), averaged_convolution()),
    "clipless": lambda: (Clipless(gradient_clip=0.5, allocation="proportional"), lipschitz()),
    "ternary": lambda: (Ternary(clip=1.0, tau=0.01), network()),
    "ternary in three micro-batches": lambda: (Ternary(clip=1.0, tau=0.01, record_groups=3), network()),
}


def audited(setting: str) -> Report:
    method, model = SETTINGS[setting]()
    generator = torch.Generator().manual_seed(1)
    records = torch.randn(64, 6, generator=generator), torch.arange(64) % 3
    return audit(method, model, records, sampling=Poisson(batch=BATCH), canaries=90)


Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A fault, the method that it is put into, and a part of the name of the check that must find it."""

    name: str
    setting: str
    caught_by: str
    inject: Callable[[Patch], None]


# Noise


def noise_times(factor: float, patch: Patch) -> None:
    add_noise = Source.add_noise

    def changed(self: Source, total: Tensor, std: float, *, out: Tensor | None = None) -> Tensor:
        return add_noise(self, total, factor * std, out=out)

    patch.setattr(Source, "add_noise", changed)


def same_key(patch: Patch) -> None:
    rekey = Source._rekey
    patch.setattr(Source, "_rekey", lambda self, key: rekey(self, bytes(32)))


def no_root_of_groups(patch: Patch) -> None:
    def without_root(queries, rules, source):  # type: ignore[no-untyped-def]
        return [rules.noise_multiplier * q.sensitivity.under(rules.basis) for q in queries]

    patch.setattr(privet.step, "noise_stds", without_root)


# Bounds


def no_clip(patch: Patch) -> None:
    patch.setattr(PerExample, "weights", lambda self, squares, clip: torch.ones_like(squares))


def clip_after_the_sum(patch: Patch) -> None:
    no_clip(patch)
    finish = _PerExampleSession.finish

    def clipped(self: _PerExampleSession):  # type: ignore[no-untyped-def]
        queries = finish(self)
        for query in queries:
            query.total.mul_(min(1.0, 5 / max(float(query.total.norm()), 1e-12)))
        return queries

    patch.setattr(_PerExampleSession, "finish", clipped)


def clip_at_twice(patch: Patch) -> None:
    weights = PerExample.weights
    patch.setattr(PerExample, "weights", lambda self, squares, clip: weights(self, squares, 2 * clip))


def half_the_sensitivity(patch: Patch) -> None:
    finish = _BatchSession.finish

    def halved(self: _BatchSession):  # type: ignore[no-untyped-def]
        def half(query):  # type: ignore[no-untyped-def]
            declared = query.sensitivity
            return dataclasses.replace(declared, add_remove=declared.add_remove / 2)

        return [dataclasses.replace(q, sensitivity=half(q)) for q in finish(self)]

    patch.setattr(_BatchSession, "finish", halved)


def consecutive_chunks(patch: Patch) -> None:
    def cut(self: _BatchSession, sample, source):  # type: ignore[no-untyped-def]
        size = 12 // self.method.record_groups
        return [sample[start : start + size] for start in range(0, len(sample), size)]

    patch.setattr(_BatchSession, "cut", cut)


def nan_passes(patch: Patch) -> None:
    patch.setattr("privet.methods.per_example.torch.isfinite", lambda values: torch.ones_like(values, dtype=torch.bool))


# Backpropagation clipping


def no_input_clip(patch: Patch) -> None:
    patch.setattr(InputClip, "clip", lambda self, x: (x, torch.ones(len(x))))


def no_gradient_clip(patch: Patch) -> None:
    def unclipped(self, layer, z, delta, norm, clip, input_factors):  # type: ignore[no-untyped-def]
        return Clipped(_times(delta, input_factors), torch.ones(len(delta)), input_factors)

    for bounded in (Bounded, LinearBound, ConvBound):
        patch.setattr(bounded, "clip", unclipped)


def _times(delta: Tensor, factors: Tensor | None) -> Tensor:
    return delta if factors is None else delta * factors.to(delta).view(-1, *[1] * (delta.dim() - 1))


def clipped_gradient_not_used(patch: Patch) -> None:
    """The clipped gradient goes on to the layers before, and the layer's own sum is made from the one as it came."""
    take = _BackpropSession.take

    def changed(self: _BackpropSession, name: str, z: Tensor, factors: Tensor | None, delta: Tensor) -> Tensor:
        layer = self._layers[name]
        before = {local: total.clone() for local, total in layer.totals.items()}
        passed = take(self, name, z, factors, delta)
        for local, total in layer.totals.items():
            total.copy_(before[local])
        layer.rule.add(layer.unit.layer, z, _times(delta, factors), layer.totals)
        return passed

    patch.setattr(_BackpropSession, "take", changed)


def mixed_norms(patch: Patch) -> None:
    """The largest patch of the input with the Frobenius norm of the gradient: no bound holds for this pair."""
    patch.setattr(native, "library", None)  # its loop has these norms of its own
    norms = _Affine.upstream_norms
    patch.setattr(_Affine, "upstream_norms", lambda self, layer, z, d, norm: norms(self, layer, z, d, "frobenius"))


def norm_of_the_batch(patch: Patch) -> None:
    patch.setattr(native, "library", None)
    norms = _Affine.upstream_norms

    def changed(self, layer, z, delta, norm):  # type: ignore[no-untyped-def]
        found = norms(self, layer, z, delta, norm)
        return found.square().mean().sqrt().expand_as(found)

    patch.setattr(_Affine, "upstream_norms", changed)


def padding_ignored(patch: Patch) -> None:
    of = Window.of

    def unpadded(layer: nn.Module) -> Window | None:
        window = of(layer)
        return window and dataclasses.replace(window, padding=(0,) * len(window.padding), mode="zeros")

    patch.setattr(Window, "of", unpadded)


def bias_not_counted(patch: Patch) -> None:
    patch.setattr(_Affine, "bounds", lambda self, layer, c1, c2: {("weight", "bias"): c1 * c2})


# Ternary gradients


def clip_before_discretising(patch: Patch) -> None:
    """The gradient is clipped, and its entries become −1, 0 and 1 afterwards."""
    no_clip(patch)
    of = _Signs.of

    def clipped(gradient: PerRecord, tau: float) -> _Signs:
        full = gradient.dense()
        return of(Dense.of(full / full.flatten(1).norm(dim=1).clamp(min=1).view(-1, *[1] * (full.dim() - 1))), tau)

    patch.setattr(_Signs, "of", clipped)


def counted_before_discretising(patch: Patch) -> None:
    """The factor is that of the gradient's norm, and is put on the ternary vector."""
    of = _Signs.of

    def counted(gradient: PerRecord, tau: float) -> _Signs:
        found = of(gradient, tau)
        found.counts = gradient.squared_norms
        return found

    patch.setattr(_Signs, "of", counted)


# Clipless


def scores_not_clipped(patch: Patch) -> None:
    patch.setattr("privet.methods.clipless._MARGIN", math.inf)


def bias_counted_once(patch: Patch) -> None:
    """At one position, wherever it is added."""
    constants = Bias.constants

    def once(self: Bias, x):  # type: ignore[no-untyped-def]
        found = constants(self, x)
        positions = x.size // len(self.bias)
        return dataclasses.replace(found, gradient={"bias": found.gradient["bias"] / math.sqrt(positions)})

    patch.setattr(Bias, "constants", once)


def unbounded_input(patch: Patch) -> None:
    patch.setattr(BoundedInput, "forward", lambda self, x: torch.nan_to_num(x))


def trusted_constraint(patch: Patch) -> None:
    """Each layer is taken to have the norm that its constraint was meant to give it."""
    patch.setattr("privet.nn.lipschitz.plain.convolution_norm", lambda weight, **_: 1.0)


def clip_without_noise(patch: Patch) -> None:
    """The clip at the scores is half of what the noise is computed for; the other way round it costs accuracy only."""
    add = _CliplessSession.add

    def longer(self: _CliplessSession, losses: Tensor) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(_CliplessSession, "gradient_clip", 2 * self.gradient_clip)
            add(self, losses)

    patch.setattr(_CliplessSession, "add", longer)


# What is not noised


def realised_divisor(patch: Patch) -> None:
    add, begin, hand_over = _PerExampleSession.add, _PerExampleSession.begin, privet.step.hand_over
    seen = [0]

    def counting_begin(self: _PerExampleSession) -> None:
        seen[0] = 0
        begin(self)

    def counting_add(self: _PerExampleSession, losses: Tensor) -> None:
        seen[0] += len(losses)
        add(self, losses)

    patch.setattr(_PerExampleSession, "begin", counting_begin)
    patch.setattr(_PerExampleSession, "add", counting_add)
    patch.setattr(privet.step, "hand_over", lambda query, noisy, batch: hand_over(query, noisy, max(1, seen[0])))


def leaking_batch_norm(patch: Patch) -> None:
    """BatchNorm keeps running statistics of private records, and nobody refuses it or puts them back."""
    patch.setattr("privet.methods.batch._refuse_unsafe_layers", lambda model, public: None)
    patch.setattr("privet.state.Buffers.restore", lambda self: [])
    tracking = partial(nn.BatchNorm1d, track_running_stats=True)
    patch.setitem(
        SETTINGS,
        "batch with BatchNorm",
        lambda: (Batch(clip=0.02), nn.Sequential(nn.Linear(6, 10), tracking(10), nn.Tanh(), nn.Linear(10, 3))),
    )


# Sampling and accounting


def shuffled(patch: Patch) -> None:
    def epochs(self: Poisson, *, size, records, source, epoch_key, start, steps) -> Iterator[np.ndarray]:  # type: ignore[no-untyped-def]
        order = np.argsort(source.words(size))
        for step in range(start, start + steps):
            yield np.sort(order[step * self.batch : (step + 1) * self.batch])

    patch.setattr(Poisson, "_samples", epochs)


def layers_apart(patch: Patch) -> None:
    """G groups of one sample, accounted as G samplings of their own with √G of the noise each."""
    epsilon = privet.run.epsilon

    def apart(spent, delta):  # type: ignore[no-untyped-def]
        groups = len(GROUPS)
        return epsilon(
            [
                (dataclasses.replace(m, noise_multiplier=m.noise_multiplier * math.sqrt(groups)), groups * n)
                for m, n in spent
            ],
            delta,
        )

    patch.setattr(privet.run, "epsilon", apart)


def whole_numbered_noise(patch: Patch) -> None:
    """Four groups of one sample as a nested event of Google's library, with the noise 2 in place of 2.0."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent  # noqa: PLC0415
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    def naive(spent, delta):  # type: ignore[no-untyped-def]
        accountant = RdpAccountant()
        for m, count in spent:
            of_a_group = GaussianDpEvent(round(m.noise_multiplier * math.sqrt(len(GROUPS))))
            of_a_step = PoissonSampledDpEvent(m.rate, SelfComposedDpEvent(of_a_group, len(GROUPS)))
            accountant.compose(of_a_step, count)
        return Guarantee(epsilon=accountant.get_epsilon(delta), delta=delta, accountant="naive", tight=False)

    patch.setattr(privet.run, "epsilon", naive)


FAULTS = [
    Fault("no noise", "per-example", "spread of the noise", partial(noise_times, 0.0)),
    Fault("no noise, by the two worlds", "per-example", "two worlds", partial(noise_times, 0.0)),
    Fault("half noise", "per-example", "spread of the noise", partial(noise_times, 0.5)),
    Fault("noise × 0.9", "per-example", "spread of the noise", partial(noise_times, 0.9)),
    Fault("noise divided by the batch size", "per-example", "spread of the noise", partial(noise_times, 1 / BATCH)),
    Fault("noise divided by the batch size", "batch", "spread of the noise", partial(noise_times, 1 / BATCH)),
    Fault("no clip", "per-example", "sensitivity", no_clip),
    Fault("clip after the sum", "per-example", "sensitivity", clip_after_the_sum),
    Fault("clip at 2C", "per-example", "sensitivity", clip_at_twice),
    Fault("per-group C without √G", "per-example in four groups", "noise multiplier", no_root_of_groups),
    Fault("factor 2 missing for batch clipping", "batch", "sensitivity", half_the_sensitivity),
    Fault("BatchNorm statistics leaked", "batch with BatchNorm", "replay", leaking_batch_norm),
    Fault("division by the realised batch size", "per-example", "replay", realised_divisor),
    Fault("micro-batches cut as chunks", "batch in six groups", "sensitivity", consecutive_chunks),
    Fault("NaN let through", "per-example", "sensitivity", nan_passes),
    Fault("the same noise reused after resume", "per-example", "after resuming", same_key),
    Fault("Poisson accounted, shuffled batches used", "per-example", "sizes of samples", shuffled),
    Fault("layers accounted as separate samplings", "per-example in four groups", "second accountant", layers_apart),
    Fault(
        "an integer noise multiplier in a nested event",
        "per-example in four groups",
        "second accountant",
        whole_numbered_noise,
    ),
    Fault("no input clip", "backprop", "sensitivity", no_input_clip),
    Fault("no clip of the gradient at outputs", "backprop", "sensitivity", no_gradient_clip),
    Fault("clipped gradient passed on, not used", "backprop", "sensitivity", clipped_gradient_not_used),
    Fault("largest patch with the Frobenius norm of δ", "backprop, averaged", "sensitivity", mixed_norms),
    Fault("norm of the batch in place of the record's", "backprop", "sensitivity", norm_of_the_batch),
    Fault("padding left out of the patches' norms", "backprop", "sensitivity", padding_ignored),
    Fault("bias not counted", "backprop", "sensitivity", bias_not_counted),
    Fault("gradient at the scores not clipped", "clipless", "sensitivity", scores_not_clipped),
    Fault("noise for half of the clip at the scores", "clipless", "sensitivity", clip_without_noise),
    Fault("bias at many positions counted once", "clipless", "sensitivity", bias_counted_once),
    Fault("input not bounded", "clipless", "sensitivity", unbounded_input),
    Fault("a constraint that was not proved", "clipless", "sensitivity", trusted_constraint),
    Fault("factor 2 missing for ternary", "ternary in three micro-batches", "sensitivity", half_the_sensitivity),
    Fault("ternary in chunks", "ternary in three micro-batches", "sensitivity", consecutive_chunks),
    Fault("clip before discretising", "ternary", "sensitivity", clip_before_discretising),
    Fault("norm of the gradient, not of its signs", "ternary", "sensitivity", counted_before_discretising),
]


def main() -> None:
    print("| fault | method | found by | measured | bound |\n| --- | --- | --- | --- | --- |")
    for fault in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            fault.inject(patch)
            report = audited(fault.setting)
        check = next((c for c in report.failed if fault.caught_by in c.name), None)
        found = [fault.name, fault.setting] + (
            ["**nothing**", "", ""] if check is None else [check.name, *map(_shown, (check.measured, check.bound))]
        )
        print(f"| {' | '.join(found)} |", flush=True)


def _shown(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


if __name__ == "__main__":
    main()
