"""Certified accuracy of a Lipschitz model by radius: no change of a record within it changes its prediction.

Two columns are proved: by the certificates of the design (the margin over √2 times the Lipschitz constant, and more for
records beyond the input's bound), and by sharper forms of both. With --attack, a third says what an attack leaves.
Ends with 1 if an attack moves a record within its certified radius.

examples:
  privet train --method clipless --model lipschitz-mlp --out runs/robust
  privet certify runs/robust
  privet certify runs/robust --attack 5 --radii 0,8/255,0.25 --plot certified.svg
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..certify import CertifiedRun

NAME = "certify"
HELP = "certified accuracy of a Lipschitz model by radius"

_COLUMNS = {
    "certified": ("#1f5fa8", "certified"),
    "sharper": ("#2d6a3e", "certified, sharper"),
    "attacked": ("#c0392b", "left by the attack"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_FOLDER", help="a finished run, as privet train left it")
    parser.add_argument(
        "--radii", metavar="LIST", help="radii to tell it at (default: 0, 1, 2, 4, 8, 16, 36, 72 and 108 over 255)"
    )
    parser.add_argument("--records", type=int, metavar="N", help="the first so many held-out records (default: all)")
    parser.add_argument(
        "--attack",
        type=int,
        default=0,
        metavar="RESTARTS",
        help="also attack each record, from so many places (default: %(default)s)",
    )
    parser.add_argument(
        "--float64",
        action="store_true",
        help="certify predictions in float64: in float32, as released, rounding at its worst counts against the radii",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw certified accuracy against radius (SVG, PNG)")
    parser.add_argument("--threads", type=int, help="threads for torch")
    parser.add_argument("--seed", type=int, default=0, help="of the attack (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    radii = None if args.radii is None else _radii(args.radii)
    if args.plot is not None and Path(args.plot).suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot writes SVG or PNG: end {args.plot} in .svg or .png.")
    import torch  # noqa: PLC0415

    from ..certify import RADII, certify_run  # noqa: PLC0415
    from ..training import check_compute, to_json  # noqa: PLC0415

    check_compute(args.threads, args.seed)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    found = certify_run(
        args.run,
        at=RADII if radii is None else radii,
        records=args.records,
        restarts=args.attack,
        float64=args.float64,
        seed=args.seed,
    )
    if args.plot is not None:
        _plot(found, args.plot)
    print(to_json(found.to_json())) if args.json else _show(found)
    return 1 if found.broken else 0


def _radii(text: str) -> list[float]:
    try:
        return [float(Fraction(part.strip())) for part in text.split(",")]
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f"--radii is a list of numbers such as 0,8/255,0.25, and is {text!r}.") from None


def _shown(radius: float) -> str:
    over = radius * 255
    return f"{round(over)}/255" if 0 < radius < 1 and abs(over - round(over)) < 1e-9 else f"{radius:g}"


def _show(found: CertifiedRun) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from ..certify import COST  # noqa: PLC0415

    console = Console()
    told = found.to_json()
    names = list(told["radii"][0])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right")
    for row in told["radii"]:
        table.add_row(_shown(row["radius"]), *(f"{row[name]:.2%}" for name in names[1:]))
    console.print(f"{found.run}: {told['records']} held-out records of {found.data}.", markup=False, highlight=False)
    console.print(table)
    lines = [f"Radius: {found.unit}. Input: {found.input}. Lipschitz constant behind it: {found.lipschitz:.6g}."]
    if found.precision == "float32":
        lines.append(
            f"{found.rounding:.2g} is taken off the margins' radii, as float32 rounds (with --float64, nothing)."
        )
    if found.attacked is not None:
        lines.append(
            "attacked: what projected gradient steps leave, which no certificate can exceed; they keep to no range of "
            "pixels."
        )
    console.print("\n".join([*lines, COST]), markup=False, highlight=False)
    if found.broken:
        console.print(
            f"[red]The certificate is broken:[/] an attack moved {found.broken} records within their certified radius.",
            highlight=False,
        )


def _plot(found: CertifiedRun, path: str) -> None:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (half a second; and no display, unlike pyplot)
    except ImportError as error:
        raise ConfigError("Drawing needs matplotlib: pip install matplotlib.") from error
    furthest = max(found.at[-1], float(found.radii.max())) or 1.0
    count = found.radii.shape[1]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot(xlim=(0, furthest * 1.02), ylim=(0, 1))
    axes.set_xlabel(f"radius ({found.unit})")
    axes.set_ylabel("share of held-out records")
    axes.grid(color="#dddddd", linewidth=0.6)
    for name, radii in zip(("certified", "sharper"), found.radii, strict=True):
        ends = sorted(radius for radius in radii.tolist() if radius >= 0)
        left = [(len(ends) - i) / count for i in range(len(ends) + 1)]  # up to the i-th radius, so many are certified
        color, label = _COLUMNS[name]
        axes.step([0.0, *ends], [left[0], *left[:-1]], where="pre", color=color, linewidth=1.8, label=label)
    if found.attacked is not None:
        color, label = _COLUMNS["attacked"]
        axes.plot(found.at, found.attacked, color=color, marker="o", markersize=4, linewidth=1, label=label)
    axes.legend(frameon=False)
    axes.set_title(f"Certified accuracy on {found.data}", fontsize=11)
    figure.savefig(path)
