"""The privacy statement of a run, which is its privacy.json: what is protected, how, at what cost, and what is not."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from .methods import Method
from .records import length

if TYPE_CHECKING:
    from .run import Run

_STATUS = {
    "seeded": "no guarantee: the noise can be reproduced from a seed",
    "system": "a proven upper bound for ideal Gaussian noise; precision attacks are mitigated, not proven away",
    "exact": "a proven upper bound for the discrete Gaussian noise that was added",
}


def statement(run: Run) -> dict[str, Any]:
    """Public facts only."""
    spent = run.guarantee()
    return {
        "unit": run.unit,
        "relation": run.relation,
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "accountant": spent.accountant,
        "epsilon_is": _STATUS[run.source.level],
        "tight": spent.tight,
        "method": {"name": run.method.name, **_options_of(run.method)},
        "sampling": {"rule": type(run.sampling).__name__, **asdict(run.sampling)},
        "records": run.records,
        "records_are_public": "stated by the user" if run.records_stated else "taken from the data",
        "public_records": None if run.public is None else length(run.public),
        "groups": run.groups(),
        "noise_multiplier": run.noise_multiplier,
        "noise_level": run.source.level,
        "steps": run.steps_done,
        "compositions": sum(count for _, count in run.ledger.spent(run=run.id)) - run.queries_paid,
        "mechanism": run.plan.mechanism.to_json(),
        "spent": [{"mechanism": m.to_json(), "count": count} for m, count in run.ledger.spent(run=run.id)],
        "queries": [{"noise_multiplier": m.noise_multiplier, "planned": n} for m, n in run.plan.before],
        "planned": {"steps": run.plan.steps, "epsilon": run.plan.epsilon},
        "ledger": None if run.ledger.in_memory else run.ledger.path.name,
        "independence_checked": run.checks_independence if run.method.records_must_be_independent else "not needed",
        "not_covered": _not_covered(run),
    }


def _options_of(method: Method) -> dict[str, Any]:
    return {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]


def _not_covered(run: Run) -> list[str]:
    """What the number does not speak of, in sentences."""
    gaps = [
        "Hyper-parameters chosen by looking at other private runs on this data: each of those runs costs too (the "
        "ledger adds them up).",
        "Anything else that was computed from the private records: metrics on them, early stopping by them, statistics "
        "used to prepare the inputs.",
        "Side channels: time, memory, and access to the machine while it trains.",
        "Rounding in the floating-point sum before noise is added.",
    ]
    if not run.records_stated:
        gaps.append("The number of records: it was taken from the data and counts as public.")
    if run.public is not None:
        gaps.append("The public records that the method learned from: they are not protected at all.")
    if run.plan.delta * run.records >= 1:
        gaps.append(
            f"Much: delta {run.plan.delta:g} is not below 1/records ({1 / run.records:.2g}), so the guarantee would "
            "allow to publish a whole record."
        )
    if run.source.level == "system":
        gaps.append(
            "Precision of floating-point noise: mitigated by rounding to a grid, not proven away (noise level 'exact')."
        )
    if run.source.level == "seeded":
        gaps.append("Everything: the noise is reproducible from a seed, so whoever knows the seed can subtract it.")
    if run.method.records_must_be_independent and not run.checks_independence:
        gaps.append("That records do not depend on each other: the check on made-up records was switched off.")
    return gaps
