"""What a data set's ledger says: what each run on the data has cost, and all of them together.

With --epsilon and --delta it sets the data set's budget, which every later step of any run has to keep to.

examples:
  privet budget runs/digits.ledger
  privet budget runs/digits.ledger --epsilon 8 --delta 1e-5     all runs together may cost this much
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

NAME = "budget"
HELP = "what a data set's ledger says, and what may still be spent"

_LAST_RESORT = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ledger", metavar="LEDGER", help="the data set's ledger file")
    parser.add_argument("--epsilon", type=float, metavar="E", help="set the data set's budget to this, at --delta")
    parser.add_argument(
        "--delta",
        type=float,
        metavar="D",
        help="delta at which costs are told (default: the budget's, else the smallest of the runs', else 1e-5)",
    )
    parser.add_argument("--force", action="store_true", help="raise a budget that is set: only if the owners agree")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from ..accounting import epsilon  # noqa: PLC0415
    from ..ledger import Ledger  # noqa: PLC0415
    from ..training import to_json  # noqa: PLC0415

    if args.epsilon is not None:
        _set(args)
    with Ledger(args.ledger, create=False) as ledger:
        budget, runs, spent = ledger.budget, ledger.runs(), ledger.spent()
        delta, source = _delta(args.delta, budget, runs)
        total = epsilon(spent, delta)
        result: dict[str, Any] = {
            "ledger": str(ledger.path),
            "dataset": ledger.dataset,
            "epsilon": total.epsilon,
            "delta": delta,
            "delta_from": source,
            "accountant": total.accountant,
            "budget": None if budget is None else {"epsilon": budget[0], "delta": budget[1]},
            "remaining": None,
            "runs": [
                {
                    "run": run.run,
                    "note": run.note,
                    "started": run.started,
                    "finished": run.finished,
                    "steps": run.steps,
                    "unit": run.unit,
                    "relation": run.mechanism.relation,
                    "noise_multiplier": run.mechanism.noise_multiplier,
                    "epsilon": epsilon(run.spent, delta).epsilon,
                }
                for run in runs
            ],
        }
        if budget is not None:
            at_budget = total.epsilon if delta == budget[1] else epsilon(spent, budget[1]).epsilon
            result["remaining"] = budget[0] - at_budget  # below zero if the budget was lowered since
    print(to_json(result)) if args.json else _show(result)
    return 0


def _set(args: argparse.Namespace) -> None:
    """Sets the budget; the ledger may be new, as the data's owners may want to do this before the first run."""
    from ..errors import ConfigError  # noqa: PLC0415
    from ..ledger import Ledger  # noqa: PLC0415

    if args.delta is None:
        raise ConfigError("A budget is an epsilon at a delta: give --delta too.")
    if not (args.epsilon > 0 and 0 < args.delta < 1):  # before a file is made
        raise ConfigError(
            f"epsilon must be positive and delta between 0 and 1; they are {args.epsilon} and {args.delta}."
        )
    with Ledger(args.ledger) as ledger:
        old = ledger.budget
        if old is not None and not args.force and (args.epsilon > old[0] or args.delta > old[1]):
            raise ConfigError(
                f"The budget of {args.ledger} is epsilon = {old[0]:g} at delta = {old[1]:g}, and would be raised. "
                "Add --force if the data's owners agree."
            )
        ledger.set_budget(args.epsilon, args.delta, force=args.force)


def _delta(given: float | None, budget: tuple[float, float] | None, runs: Sequence[Any]) -> tuple[float, str]:
    """At which delta costs are told, and where it comes from. A sum needs one; runs may have been planned at many."""
    if given is not None:
        return given, "as given"
    if budget is not None:
        return budget[1], "the data set's budget"
    planned = [run.budget[1] for run in runs if run.budget is not None]
    return (min(planned), "the smallest among the runs") if planned else (_LAST_RESORT, "a common choice: none is set")


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from ..accounting import rounded_up  # noqa: PLC0415

    print(f"Data set {result['dataset']}, ledger {result['ledger']}")
    if result["runs"]:
        table = Table("started (UTC)", "run", "method", "steps", "noise", "epsilon", "", box=None, header_style="bold")
        for run in result["runs"]:
            state = "" if run["finished"] else "unfinished"
            steps, noise, cost = str(run["steps"]), f"{run['noise_multiplier']:.4g}", rounded_up(run["epsilon"])
            started = run["started"][:16].replace("T", " ")
            table.add_row(started, run["run"][:8], run["note"], steps, noise, cost, state)
        Console().print(table)
    print(
        f"All together: epsilon {rounded_up(result['epsilon'])} at delta {result['delta']:g} ({result['delta_from']}; "
        f"{result['accountant']})."
    )
    if result["budget"] is None:
        print("No budget is set: --epsilon and --delta set one.")
    else:
        limit, left = result["budget"], result["remaining"]
        state = f"{math.floor(1000 * left) / 1000:.3f} left" if left >= 0 else f"exceeded by {rounded_up(-left)}"
        print(f"Budget: epsilon {limit['epsilon']:g} at delta {limit['delta']:g}, {state}.")
