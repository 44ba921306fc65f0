"""Train what a paper's tables show and print them, ours beside theirs.

Every row is trained with several seeds. What was trained already is not trained again: give the same command to go on
after an interruption.

examples:
  privet reproduce batch-clipping --list
  privet reproduce batch-clipping --data-dir ~/data --rows 'eps3/*' --seeds 3
  privet reproduce batch-clipping --table
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..reproduce import Study, StudyProgress

NAME = "reproduce"
HELP = "a paper's tables, ours beside theirs"

_BETWEEN_LINES = 30.0
"""Seconds between lines of progress within one training."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..reproduce import STUDIES  # noqa: PLC0415

    parser.add_argument("paper", metavar="PAPER", help=f"one of: {', '.join(sorted(STUDIES))}")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with the files of the data sets")
    parser.add_argument("--out", metavar="DIR", help="folder of the results and runs (default: reproduce/PAPER)")
    parser.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="trainings of each row (default: %(default)s)"
    )
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="only rows that match, for example 'eps3/*'")
    parser.add_argument("--threads", type=int, metavar="N", help="threads for torch (default: its own choice)")
    parser.add_argument("--list", action="store_true", help="print the rows with their settings, and train nothing")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and train nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from ..reproduce import find_study, read_results, run_study  # noqa: PLC0415
    from .train import _stopping  # noqa: PLC0415

    study = find_study(args.paper).choose(args.rows)
    out = args.out or f"reproduce/{study.name}"
    if args.seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, and is {args.seeds}.")
    if args.list or args.table:
        _print(study, read_results(out), out, args)
        return 0
    failed: list[str] = []
    with _stopping() as stop:
        results = run_study(
            study,
            out,
            data_dir=args.data_dir,
            seeds=range(args.seeds),
            threads=args.threads,
            on_progress=_telling(failed),
            stop=stop,
        )
        interrupted = stop()
    _print(study, results, out, args)
    if interrupted:
        print("privet: Interrupted. The same command goes on with it.", file=sys.stderr)
        return 130
    if failed:
        print(f"privet: Failed: {', '.join(failed)}. The same command tries them again.", file=sys.stderr)
    return 1 if failed else 0


def _print(study: Study, results: Sequence[Mapping[str, Any]], out: str, args: argparse.Namespace) -> None:
    from ..reproduce import summary, table  # noqa: PLC0415
    from ..training import to_json  # noqa: PLC0415

    if args.json:
        told = {"study": study.name, "title": study.title, "data": study.data, "out": out}
        print(to_json(told | {"rows": summary(study, results)}))
    elif args.list:
        print(f"{study.title}\n{study.about}\nData: {', '.join(study.data)}\n")
        for row in study.rows:
            theirs = "" if row.theirs is None else f"  (theirs: {row.theirs:.2%})"
            print("\n    ".join([f"{row.key}{theirs}", *filter(None, [row.note]), to_json(row.plain())]))
    else:
        print(table(study, results))


def _telling(failed: list[str]) -> Callable[[StudyProgress], None]:
    """Lines on standard error: one for each training that ended, and now and then one from within."""
    told = time.monotonic()

    def tell(now: StudyProgress) -> None:
        nonlocal told
        name = f"{now.row.key} seed {now.seed}"
        if now.result is not None and "error" in now.result:
            failed.append(name)
            fact = f"failed: {now.result['error']}"
        elif now.result is not None:
            found, epsilon = float(now.result[now.row.measure]), float(now.result["epsilon"])
            fact = f"{now.row.measure} {found:.2%} at epsilon {epsilon:.4g} in {now.result['seconds']:.0f} s"
        elif now.training is not None and time.monotonic() - told > _BETWEEN_LINES:
            fact = f"epoch {now.training.epoch}/{now.training.epochs}"
        else:
            return
        told = time.monotonic()
        left = "" if now.seconds_left is None else f"  {_duration(now.seconds_left)} left"
        print(f"[{now.done}/{now.total}] {name}: {fact}{left}", file=sys.stderr, flush=True)

    return tell


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
