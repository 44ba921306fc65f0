"""Noise for a budget, or budget for a noise, before any record is touched.

Give two of: --epsilon, --noise, and a length (--steps or --epochs); the third is found. The trade-off curve says what
an attacker can do at best who wants to know whether one given record was used.

Papers often report the central-limit estimate of Gaussian differential privacy. It stands beside epsilon to be
compared with theirs, and is no guarantee: it may be too low or too high. For partitions there is the zCDP formula of
the backpropagation-clipping paper instead, which is a guarantee, and looser than epsilon.

examples:
  privet plan --records 60000 --batch 256 --epochs 60 --epsilon 2 --delta 1e-5     how much noise?
  privet plan --records 60000 --batch 256 --steps 14062 --noise 1.1 --delta 1e-5   what does it cost?
  privet plan --records 60000 --batch 256 --epsilon 2 --noise 1.1 --delta 1e-5     for how long?
  privet plan --records 54000 --batch 64 --epochs 50 --noise 2.5 --layers 8        layers clipped apart?
  privet plan --records 60000 --batch 4096 --epochs 25 --noise 50 --layers 4 --sampling partition     disjoint batches?
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planning import Plan

NAME = "plan"
HELP = "noise for a budget, or budget for a noise, with the trade-off curve"

_TELLING = (0.001, 0.01, 0.05, 0.1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--records", type=int, required=True, metavar="N", help="public number of records")
    data.add_argument("--batch", type=int, required=True, metavar="N", help="expected number of records in a step")
    data.add_argument(
        "--sampling", choices=["poisson", "fixed-size", "partition"], default="poisson", help="default: %(default)s"
    )
    data.add_argument(
        "--relation",
        choices=["add_remove", "replace_one"],
        default="add_remove",
        help="what is hidden: that a record is there, or what it is (default: %(default)s)",
    )
    budget = parser.add_argument_group("budget (two of the first three)")
    budget.add_argument("--epsilon", type=float, metavar="E")
    budget.add_argument("--noise", type=float, metavar="S", help="noise multiplier")
    budget.add_argument(
        "--layers",
        type=int,
        default=1,
        metavar="L",
        help="layers that are clipped apart with noise S times the sensitivity of each, which is S/sqrt(L) in all",
    )
    budget.add_argument("--steps", type=int, metavar="N")
    budget.add_argument("--epochs", type=float, metavar="N", help="in place of steps")
    budget.add_argument("--delta", type=float, metavar="D", help="default: a power of ten at most 1/(10 records)")
    budget.add_argument(
        "--noise-level", choices=["system", "exact"], default="system", help="kind of noise (default: %(default)s)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--trade-off", type=int, default=11, metavar="N", help="points of the curve in the JSON object")
    output.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from ..errors import ConfigError  # noqa: PLC0415
    from ..planning import Budget, plan  # noqa: PLC0415
    from ..training import SAMPLING, default_delta, to_json  # noqa: PLC0415

    if args.records < 1:
        raise ConfigError(f"records must be at least 1, and is {args.records}.")
    if args.trade_off < 2:
        raise ConfigError(f"trade-off must be at least 2 points, and is {args.trade_off}.")
    if args.layers < 1:
        raise ConfigError(f"layers must be at least 1, and is {args.layers}.")
    layers = math.sqrt(args.layers)
    noise = None if args.noise is None else args.noise / layers
    delta = default_delta(args.records) if args.delta is None else args.delta
    budget = Budget(delta=delta, epsilon=args.epsilon, noise=noise, epochs=args.epochs, steps=args.steps)
    sampling = SAMPLING[args.sampling](batch=args.batch)
    found = plan(budget, sampling, records=args.records, relation=args.relation, discrete=args.noise_level == "exact")
    result = {
        "epsilon": found.epsilon,
        "delta": found.delta,
        "noise": found.mechanism.noise_multiplier,
        "layers": args.layers,
        "noise_per_layer": found.mechanism.noise_multiplier * layers,
        "steps": found.steps,
        "epochs": found.steps / sampling.steps_per_epoch(args.records),
        "compositions": found.units,
        "accountant": found.accountant,
        "estimate": _estimate(found),
        "zcdp_epsilon": _zcdp_epsilon(found),
        "records": args.records,
        "batch": args.batch,
        "sampling": args.sampling,
        "relation": args.relation,
        "noise_level": args.noise_level,
        "trade_off": _trade_off(found, args.trade_off),
    }
    if args.json:
        print(to_json(result))
    else:
        _show(result)
    return 0


def _estimate(found: Plan) -> dict[str, float | str] | None:
    """The central-limit estimate, and how far it is from the epsilon that was found; None where there is none."""
    from ..accounting import gdp_clt_estimate, gdp_clt_mu  # noqa: PLC0415

    unit = found.mechanism
    if unit.kind == "gaussian" or (unit.kind == "poisson" and unit.relation == "replace_one"):
        return None
    mu, epsilon = gdp_clt_mu(unit, found.units), gdp_clt_estimate(unit, found.units, found.delta)
    note = "central-limit estimate, no guarantee"
    if 0 < found.epsilon < math.inf:
        other = "the exact one" if found.guarantee.tight else f"the bound, which is loose ({found.accountant})"
        off = epsilon / found.epsilon
        note += f": {1 - off:.1%} below {other}" if off <= 1 else f": {off:.4g} times {other}"
    return {"mu": mu, "epsilon": epsilon, "note": note}


def _zcdp_epsilon(found: Plan) -> float | None:
    """What the backpropagation-clipping paper would report; None where its formula does not apply.

    Its rho = E·N·C1²·C2²/(2s²), for E epochs and noise of standard deviation s on each of N layers, is E/(2σ²) with the
    multiplier σ = s/(√N·C1·C2) of the whole.
    """
    from ..accounting import zcdp_epsilon, zcdp_rho  # noqa: PLC0415

    if found.mechanism.kind != "gaussian" or found.mechanism.discrete:
        return None
    return zcdp_epsilon(zcdp_rho([(found.mechanism, found.units)]), found.delta)


def _trade_off(found: Plan, points: int) -> list[dict[str, float]]:
    """Points of the curve: false alarms alpha, and the least share beta of members that is then missed."""
    from ..accounting import trade_off  # noqa: PLC0415

    alphas = sorted({*_TELLING, *(i / (points - 1) for i in range(points))})
    betas = trade_off([(found.mechanism, found.units)], alphas)
    return [{"alpha": alpha, "beta": float(beta)} for alpha, beta in zip(alphas, betas, strict=True)]


def _show(result: dict[str, Any]) -> None:
    from ..accounting import rounded_up  # noqa: PLC0415

    noise = f"{result['noise']:.4g} times the sensitivity ({result['noise_level']})"
    if result["layers"] > 1:
        noise += f": {result['noise_per_layer']:.4g} times that of each of {result['layers']} layers"
    rows = {"epsilon": f"{rounded_up(result['epsilon'])} at delta {result['delta']:g} ({result['accountant']})"}
    if estimate := result["estimate"]:
        rows["estimate"] = f"{estimate['epsilon']:.4g}, mu {estimate['mu']:.4g} ({estimate['note']})"
    if (looser := result["zcdp_epsilon"]) is not None:
        rows["zcdp"] = (
            f"{rounded_up(looser)} (the backpropagation-clipping paper's looser formula, rho + 2 sqrt(rho ln(1/delta)))"
        )
    rows |= {
        "noise": noise,
        "length": f"{result['steps']} steps, {result['epochs']:.4g} epochs",
        "sampling": f"{result['sampling']}, batches of {result['batch']} out of {result['records']} records",
        "relation": result["relation"],
    }
    for name, text in rows.items():
        print(f"{name:<10}{text}")
    print("\nAn attacker who wants to know whether a record was used, and accepts")
    for point in result["trade_off"]:
        if point["alpha"] in _TELLING:
            found = rounded_up(100 - 100 * point["beta"], 1)
            print(f"  {point['alpha']:>5.1%} false alarms, finds at most {found}% of those that were.")
