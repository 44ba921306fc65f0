"""Train a model with differential privacy and write a folder that can be handed on.

Without options it trains on the digits inside scikit-learn. What is not given comes from the TOML file, then from a
preset for the data set and the method. The run's folder holds the config.toml that repeats it.

examples:
  privet train
  privet train --data mnist --data-dir ~/data --epsilon 3
  privet train --data patients.csv --target outcome --epsilon 1 --out runs/patients
  privet train experiment.toml --lr 0.25
  privet train --resume runs/patients                    goes on where Ctrl-C, or a power cut, stopped it
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..training import Progress, Result, TrainConfig

NAME = "train"
HELP = "train a model privately; without options, on the embedded digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ._options import add_train_options  # noqa: PLC0415

    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="options, each as NAME = VALUE")
    parser.add_argument("--resume", metavar="DIR", help="go on with the interrupted run in this folder")
    add_train_options(parser)


def main(args: argparse.Namespace) -> int:
    from ..training import to_json, train  # noqa: PLC0415

    config = _resumed(args) if args.resume else _configured(args)
    with ExitStack() as stack:
        stop = stack.enter_context(_stopping())
        show = None if config.quiet or (config.json and not sys.stderr.isatty()) else stack.enter_context(_bar())
        result = train(config, resume=args.resume, on_progress=show, stop=stop)
    if config.json:
        print(to_json(result.to_json()))
    elif result.ended != "interrupted":
        print(_summary(result))
    if result.ended == "interrupted":
        print(
            f"privet: Interrupted after {result.statement['steps']} steps. Go on with: "
            f"privet train --resume {result.out}",
            file=sys.stderr,
        )
        return 130
    return 0


def _configured(args: argparse.Namespace) -> TrainConfig:
    from ._options import from_command_line, from_toml, refuse_idle, resolve  # noqa: PLC0415

    given = from_command_line(args)
    config = resolve(given, from_toml(Path(args.config)) if args.config else {})
    refuse_idle(given, config)
    return config


def _resumed(args: argparse.Namespace) -> TrainConfig:
    """The run's own configuration; only what does not change the run may be given anew."""
    from ..errors import CheckpointError, ConfigError  # noqa: PLC0415
    from ..training import TrainConfig  # noqa: PLC0415
    from ._options import flag, from_command_line, from_toml, resolve  # noqa: PLC0415

    folder, given = Path(args.resume), from_command_line(args)
    free = {f.name for f in fields(TrainConfig) if f.metadata.get("resume")}
    tables = {f"{kind}_options" for kind in ("method", "model", "loss")}
    options = [*given, *(name for table in sorted(tables) for name in given.get(table, ()))]
    fixed = [flag(name) for name in options if name not in free | tables]
    fixed += [args.config] if args.config else []
    if fixed:
        raise ConfigError(f"A resumed run keeps its own configuration: leave out {', '.join(fixed)}.")
    if not (folder / "config.toml").is_file():
        raise CheckpointError(f"There is no run in {folder}: it has no config.toml.")
    return replace(resolve(from_toml(folder / "config.toml")), **given)


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C (or SIGTERM) into a wish to stop; the second one quits at once."""
    asked = False
    process = os.getpid()

    def ask(number: int, _: Any) -> None:
        nonlocal asked
        if os.getpid() != process:  # a data-loading worker: it goes when its parent tells it to
            if number == signal.SIGTERM:
                os._exit(1)
            return
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A progress bar on standard error."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[facts]}"),
    )
    bar = Bar(*columns, console=Console(stderr=True))
    task = bar.add_task("training", epoch="", facts="")

    def show(now: Progress) -> None:
        facts = [
            "" if now.accuracy is None else f"held-out accuracy {now.accuracy:.1%}",
            "" if now.epsilon is None else f"epsilon {now.epsilon:.2f}",
        ]
        epoch = f"{now.epoch}/{now.epochs}"
        bar.update(task, completed=now.step, total=now.steps, epoch=epoch, facts="  ".join(filter(None, facts)))
        bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _summary(result: Result) -> str:
    """What a person wants to know at the end."""
    from ..accounting import rounded_up  # noqa: PLC0415

    told, config = result.statement, result.config
    hidden = {"add_remove": "whether it is in the data", "replace_one": "what it is (replaced by any other)"}
    clipping = ", ".join(f"{group['sensitivity']:.4g}" for group in told["groups"])
    area = "" if result.auroc is None else f", AUROC {result.auroc:.4f}"
    runs = "the one run there costs" if result.ledger_runs == 1 else f"all {result.ledger_runs} runs there cost"
    lines = {
        "accuracy": f"{result.accuracy:.2%} on held-out records (loss {result.loss:.3f}{area})",
        "privacy": f"epsilon {rounded_up(told['epsilon'])} at delta {told['delta']:g} "
        f"({told['accountant']} accountant)",
        "protected": f"each {told['unit']}: {hidden[told['relation']]}",
        "method": f"{config.method}, one {told['unit']} moves the sums by at most {clipping}",
        "noise": f"{told['noise_multiplier']:.4g} times that, level {told['noise_level']}",
        "sampling": f"{config.sampling}, batches of {config.batch} out of {told['records']} records "
        f"(number {told['records_are_public']}, public), {told['steps']} steps",
        "trained": f"{config.model} on {config.data} in {result.seconds:.0f} s",
        "folder": str(result.out),
        "ledger": f"{result.ledger}: {runs} epsilon {rounded_up(result.ledger_total.epsilon)}",
    }
    if told["delta"] * told["records"] >= 1:
        lines["warning"] = f"delta {told['delta']:g} is not below 1/records: it would allow to publish a whole record"
    if config.noise_level == "seeded":
        del lines["protected"]
        lines["privacy"] = "none: seeded noise can be subtracted by whoever knows the seed (for tests only)"
    if result.ended == "budget":
        lines["ended"] = f"early, as no further step fits into the budget ({told['planned']['steps']} were planned)"
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())
