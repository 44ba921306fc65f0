"""The audit of a method: every check, on a model and records of the user's or on embedded ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..accounting import Relation
from ..errors import ConfigError, Refused
from ..methods import Method
from ..sampling import SamplingRule
from .draws import check_sampling
from .one_run import OneRun, audit_in_one_run
from .randomness import check_noise, check_two_worlds
from .replay import check_replay
from .report import Check, Report
from .sensitivity import check_sensitivity
from .subject import Loss, MethodSubject, Subject, cross_entropy
from .zoo import digits_example, examples


def audit(
    method: Method,
    model: nn.Module | None = None,
    records: tuple[Tensor, Tensor] | None = None,
    *,
    loss: Loss = cross_entropy,
    public: tuple[Tensor, Tensor] | None = None,
    sampling: SamplingRule | None = None,
    relation: Relation = "add_remove",
    noise_multiplier: float = 1,
    delta: float = 1e-5,
    canaries: int = 1000,
    inputs_too: bool = False,
    seed: int = 0,
) -> Report:
    """Every check of a method: on a model and records of the user's, or on embedded digits and a zoo of layers.

    Args:
        model: is copied, never changed. Without one, a small network on digits, and every supported layer by turns.
        records: inputs and targets of ordinary records, one row each; a hundred are plenty.
        loss: (model, inputs, targets) to one loss per record.
        public: inputs and targets of public records, for a method that learns from such.
        noise_multiplier: at which noise to try it; the checks are sharpest near 1.
        canaries: in the one-run audit; more of them can show more, and take longer.
        inputs_too: also a training with canaries that are records (black box).
    """
    if not noise_multiplier > 0:
        raise ConfigError(f"An audit needs noise to look at: noise must be positive, and is {noise_multiplier!r}.")
    if canaries < 2:
        raise ConfigError(f"canaries must be at least 2, and is {canaries!r}.")
    if (model is None) != (records is None):
        raise ConfigError("Give a model and records for it, or neither: then both are embedded ones.")
    checks: list[Check] = []
    if model is None or records is None:
        model, (x, y) = digits_example()
        model = method.example(tuple(x.shape[1:]), 10) or model
        records, public = (x[:96], y[:96]), (x[96:], y[96:])
        checks += check_layers(method, seed=seed)
    subject = MethodSubject(
        method,
        model,
        records,
        loss=loss,
        public=public,
        sampling=sampling,
        relation=relation,
        noise_multiplier=noise_multiplier,
        delta=delta,
    )
    with subject:
        checks += audit_subject(subject, seed=seed)
        checks += guarded("sampling", lambda: check_sampling(subject.sampling, subject.relation))
        trainings: list[OneRun] = []
        kinds = ("gradient", "input") if inputs_too else ("gradient",)
        for kind in kinds:

            def training(kind: Any = kind) -> list[Check]:
                trainings.append(audit_in_one_run(subject, kind, canaries, seed, confidence=1 - 0.05 / len(kinds)))
                return trainings[-1].checks

            checks += guarded(f"one training with {kind} canaries", training)
    return Report(
        subject=method.name,
        claimed=trainings[0].claimed if trainings else math.nan,
        lower_bound=max((found.lower_bound for found in trainings), default=0.0),
        delta=delta,
        checks=checks,
        notes=[_ceiling(found) for found in trainings],
    )


def audit_subject(subject: Subject, seed: int = 0) -> list[Check]:
    """The checks of a step, for any subject: sensitivity, noise, two worlds, record and replay."""
    worst = subject.base[0]

    def sensitivity() -> list[Check]:
        nonlocal worst
        found, record = check_sensitivity(subject, seed)
        worst = record or worst
        return found

    return [
        *guarded("sensitivity", sensitivity),
        *guarded("noise", lambda: check_noise(subject)),
        *guarded("two worlds", lambda: [check_two_worlds(subject, worst)[0]]),
        *guarded("replay", lambda: check_replay(subject, worst)),
    ]


def check_layers(method: Method, seed: int = 0) -> list[Check]:
    """The sensitivity check on every supported kind of layer; a layer that the method refuses is not a fault."""
    checks = []
    for name, (model, records) in examples(seed).items():
        try:
            x, y = records
            others = x.flip(0).contiguous(), y.flip(0).contiguous()
            subject = MethodSubject(method, model, records, public=others, chunk=2 * len(x))
        except Refused as refusal:
            checks.append(Check(name=f"layer {name}", holds=True, measured="refused", detail=str(refusal)))
            continue
        with subject:
            found = guarded(f"layer {name}", lambda: check_sensitivity(subject, seed, crowds=False)[0])  # noqa: B023 - called here
        worst = max(found[:2], key=lambda check: (not check.holds, check.measured or 0.0))
        checks.append(
            Check(name=f"layer {name}", holds=worst.holds, measured=worst.measured, bound=1.0, detail=worst.detail)
        )
    return checks


def assert_private(method: Method, model: nn.Module, records: tuple[Tensor, Tensor], **options: Any) -> Report:
    """For a test suite: fails with the list of what broke.

    def test_private(): assert_private(privet.PerExample(clip=1.0), MyModel(), (inputs, targets))
    """
    report = audit(method, model, records, **options)
    if not report.holds:
        raise AssertionError(str(report))
    return report


def guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """A check that cannot be finished has not been passed."""
    try:
        return check()
    except Exception as error:
        return [Check(name=name, holds=False, measured="stopped", detail=f"{type(error).__name__}: {error}")]


def _ceiling(found: OneRun) -> str:
    return (
        f"The training with {found.kind} canaries cannot show more than epsilon {found.ceiling:.3g}: "
        f"so much would follow if all {found.canaries} canaries were guessed right. Of {found.guesses} guesses "
        f"{found.correct} were, which refutes Gaussian trade-off curves up to mu {found.mu:.3g}."
    )
