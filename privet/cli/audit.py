"""`privet audit`: is the guarantee true? A finished run, or a method, by measuring.

    privet audit runs/digits-per-example-1     a run: its claim, its method on its own records, attacks on its model
    privet audit --method per-example          a method: every layer, its noise, its sampling, a training with canaries

Ends with 1 where a claim is broken. An audit can break a claim, and never prove it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..audit import Report

NAME = "audit"
HELP = "measure the guarantee of a run or of a method"
_FOR_METHODS = (
    "--option",
    "--model",
    "--data",
    "--data-dir",
    "--target",
    "--noise",
    "--relation",
    "--delta",
    "--canaries",
    "--inputs-too",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN_FOLDER", help="a finished run, as privet train left it")
    parser.add_argument("--method", help="the method to audit, with its default options or those of --option")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the method, say clip=0.5"
    )
    parser.add_argument("--model", help="the network to try it on (default: a small one, and every layer by turns)")
    parser.add_argument("--data", help="the data set to try it on (default: digits)")
    parser.add_argument("--data-dir", help="folder with the files of the data set")
    parser.add_argument("--target", help="column of a table that is to be predicted")
    parser.add_argument("--noise", type=float, help="noise multiplier to try it at (default: 1)")
    parser.add_argument("--relation", choices=["add_remove", "replace_one"], help="(default: add_remove)")
    parser.add_argument("--delta", type=float, help="of the claimed epsilon (default: 1e-5)")
    parser.add_argument("--canaries", type=int, help="in the audited training (default: 1000)")
    parser.add_argument(
        "--inputs-too", action="store_true", help="also a training with records as canaries (black box)"
    )
    parser.add_argument("--shadows", type=int, default=0, help="shadow models for the LiRA attack on a run (4 or more)")
    parser.add_argument("--plot", metavar="FILE", help="draw the attacks on a run beside the promised curve (SVG, PNG)")
    parser.add_argument("--threads", type=int, help="threads for torch (default: 1 for small networks, else its own)")
    parser.add_argument("--seed", type=int, default=0, help="of the audit's own choices (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    if (args.run is None) == (args.method is None):
        raise ConfigError("Name either the folder of a run or --method: privet audit RUN_FOLDER, or --method NAME.")
    if args.plot is not None and Path(args.plot).suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot writes SVG or PNG: end {args.plot} in .svg or .png.")
    import torch  # noqa: PLC0415

    from ..training import check_compute, to_json  # noqa: PLC0415

    check_compute(args.threads, args.seed)
    small = args.method is not None and args.model is None  # where threads cost more than they give
    if args.threads or small:
        torch.set_num_threads(args.threads or 1)
    report = _of_run(args) if args.run is not None else _of_method(args)
    if args.json:
        print(to_json(report.to_json()))
    else:
        _show(report)
    return 0 if report.holds else 1


def _of_run(args: argparse.Namespace) -> Report:
    values = {flag: getattr(args, flag.strip("-").replace("-", "_")) for flag in _FOR_METHODS}
    if given := [flag for flag, value in values.items() if not (value is None or value is False or value == [])]:
        raise ConfigError(f"{', '.join(given)}: only for --method, as a run is audited as it was made.")
    from ..audit import audit_run  # noqa: PLC0415

    return audit_run(args.run, shadows=args.shadows, plot=args.plot, seed=args.seed)


def _of_method(args: argparse.Namespace) -> Report:
    from ..audit import audit  # noqa: PLC0415
    from ..data import load  # noqa: PLC0415
    from ..nn import build  # noqa: PLC0415
    from ._options import method_from  # noqa: PLC0415

    if args.plot or args.shadows:
        raise ConfigError("--plot and --shadows are for attacks on a finished run: name its folder.")
    if args.data is None and (args.data_dir is not None or args.target is not None):
        raise ConfigError("--data-dir and --target tell where the records of --data are: name that too.")
    options: dict[str, Any] = {}
    if args.model or args.data:
        data = load(args.data or "digits", data_dir=Path(args.data_dir) if args.data_dir else None, target=args.target)
        options["model"] = build(
            args.model or "mlp", input_shape=data.input_shape, classes=data.classes, seed=args.seed
        )
        options["records"] = tuple(part[:256] for part in data.train.tensors)
        options["public"] = tuple(part[256:512].clone() for part in data.train.tensors)
    return audit(
        method_from(args.method, args.option),
        **options,
        relation=args.relation or "add_remove",
        noise_multiplier=1.0 if args.noise is None else args.noise,
        delta=1e-5 if args.delta is None else args.delta,
        canaries=1000 if args.canaries is None else args.canaries,
        inputs_too=args.inputs_too,
        seed=args.seed,
    )


def _show(report: Report) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from ..audit.report import shown  # noqa: PLC0415

    table = Table("", "check", "measured", "against", box=None, pad_edge=False)
    for check in report.checks:
        mark = "[green]ok[/]" if check.holds else "[red]NO[/]"
        table.add_row(mark, check.name, shown(check.measured), shown(check.bound))
    console = Console()
    console.print(table)
    for check in report.failed:
        console.print(f"\n[red]{check.name}[/]: {check.detail}", highlight=False)
    broken = [check for check in report.failed if check.measured != "stopped"]
    unfinished = "Some checks could not be finished, so the claim is not confirmed."
    verdict = "Nothing broke the claim." if report.holds else "[red]The claim is broken.[/]" if broken else unfinished
    console.print(
        f"\n{verdict} Claimed: epsilon {report.claimed:.4g} at delta {report.delta:g}; shown at least: "
        f"{report.lower_bound:.4g}.",
        highlight=False,
    )
    for note in report.notes:
        console.print(note, highlight=False)
