"""The audit of a finished run: its statement, its method on its own model and records, and attacks on the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..accounting import Mechanism
from ..noise import effective_multiplier
from .accountant import check_accounting
from .draws import check_sampling
from .finished import FinishedRun
from .membership import NOT_COVERED, MembershipReport, epsilon_lower, infer_membership, plot_roc, stays_below
from .method import audit_subject, guarded
from .randomness import ERROR
from .report import Check, Report
from .subject import MethodSubject

_RECORDS = 256
_ERROR = 0.05
"""Of the lower bounds that are reported, all together; a run is called broken at `randomness.ERROR` only."""


def audit_run(folder: str | Path, *, shadows: int = 0, plot: str | Path | None = None, seed: int = 0) -> Report:
    """Every check of a finished run.

    Args:
        shadows: shadow models for LiRA, 4 at least; each is a training without privacy.
        plot: where to draw the attacks' ROC curves beside what the guarantee allows (SVG or PNG).
    """
    run = FinishedRun.open(folder)
    told, relation, sampling = run.statement, run.config.relation, run.sampling()
    claimed, delta = float(told["epsilon"]), float(told["delta"])
    mechanism = Mechanism.from_json(told["mechanism"])
    x, y = run.data.train.tensors
    subject = MethodSubject(
        run.method(),
        run.released(),
        (x[:_RECORDS], y[:_RECORDS]),
        public=None if run.data.public is None else (run.data.public.tensors[0], run.data.public.tensors[1]),
        sampling=sampling,
        relation=relation,
        noise_multiplier=mechanism.noise_multiplier,
        delta=delta,
        noise_level=run.config.noise_level if run.config.noise_level != "seeded" else "system",
        name=str(folder),
    )
    with subject:
        checks = [
            *_statement(run, mechanism, subject),
            check_accounting(mechanism, int(told["compositions"]), claimed, delta),
            *audit_subject(subject, seed=seed),
            *guarded("sampling", lambda: check_sampling(sampling, relation)),
        ]
    attacks = infer_membership(run, shadows=shadows, seed=seed, error=_ERROR / (2 if shadows else 1))
    checks += _attacks(attacks, claimed)
    if plot is not None:
        plot_roc(attacks, plot)
    return Report(
        subject=str(folder),
        claimed=claimed,
        lower_bound=max(attack.epsilon_lower for attack in attacks.attacks),
        delta=delta,
        checks=checks,
        notes=[*(f"Attack by {attack.described}." for attack in attacks.attacks), NOT_COVERED],
    )


def _statement(run: FinishedRun, mechanism: Mechanism, subject: MethodSubject) -> list[Check]:
    """The statement agrees with itself and with the run's configuration."""
    told, rule = run.statement, run.sampling()
    due = rule.units(int(told["steps"]), int(told["records"]))
    sampled = rule.mechanism(
        records=int(told["records"]),
        noise_multiplier=mechanism.noise_multiplier,
        relation=run.config.relation,
        discrete=run.config.noise_level == "exact",
    )
    paid = int(told["compositions"])
    stated, real = _multiplier(told["groups"]), _multiplier(subject.run.groups())
    same = math.isclose(stated, real, rel_tol=1e-4)
    return [
        Check(name="compositions paid for the steps taken", holds=paid >= due, measured=paid, bound=due),
        Check(
            name="the accounted mechanism is that of the run's sampling and noise",
            holds=mechanism == sampled and math.isclose(told["noise_multiplier"], mechanism.noise_multiplier),
            measured="the same" if mechanism == sampled else "another",
            detail=f"accounted {mechanism.to_json()}, run {sampled.to_json()}",
        ),
        Check(
            name="stated sums have the noise that the method adds to them",
            holds=same,
            measured="the same" if same else "another",
            detail=f"noise multiplier of all sums: stated {stated:.6g}, method {real:.6g}",
        ),
    ]


def _multiplier(groups: Sequence[Mapping[str, Any]]) -> float:
    """Of all sums together: a threshold that adapts may share it out otherwise at the end than at the start."""
    return effective_multiplier([float(g["sensitivity"]) for g in groups], [float(g["noise_std"]) for g in groups])


def _attacks(attacks: MembershipReport, claimed: float) -> list[Check]:
    crossings = stays_below(replace(attacks, error=ERROR)).crossings
    return [
        *(
            Check(
                name=f"membership inference by {attack.title}",
                holds=surely <= claimed,
                measured=surely,
                bound=claimed,
                detail=attack.described,
            )
            for attack in attacks.attacks
            for surely in [
                epsilon_lower(attack.member_scores, attack.non_member_scores, delta=attacks.delta, error=ERROR)
            ]
        ),
        Check(
            name="attacks stay on the private side of the promised curve",
            holds=not crossings,
            measured=len(crossings),
            bound=0,
            detail="; ".join(map(str, crossings[:3])),
        ),
    ]
