"""Studies: many trainings that make one table, each row of it several seeds of one configuration.

    run_study(study, "reproduce/batch-clipping", data_dir="~/data", seeds=range(5))

The folder holds `results.jsonl`, a line for each training as it ends, and the runs themselves under `runs/`. What has a
line there is not trained again, so an interrupted study goes on. A line counts only for the settings that it was made
with: when a row is changed, its runs are done anew. Processes that share a folder need different rows.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from ..accounting import Mechanism, count_for
from ..data import load
from ..errors import CheckpointError, ConfigError
from ..training import Progress, Result, TrainConfig, to_json, train
from ..training.folder import drop_half_line

_KEPT = ("accuracy", "auroc", "epsilon", "delta", "noise_multiplier", "steps", "seconds")
_OPTIONS = {"method_options": "method", "model_options": "model", "loss_options": "loss"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration: fields of `TrainConfig`, and what the paper measured with it, if it says so."""

    key: str
    settings: Mapping[str, Any]
    theirs: float | None = None
    note: str = ""
    measure: Literal["accuracy", "auroc"] = "accuracy"
    """What is told of it, on held-out records; auroc is for two classes."""

    @property
    def data(self) -> str:
        return str(self.settings.get("data", TrainConfig.data))

    def config(self, **more: Any) -> TrainConfig:
        try:
            return TrainConfig(**self.settings, **more)
        except TypeError as error:
            raise ConfigError(f"Row '{self.key}' has settings that a training does not take: {error}.") from error

    def plain(self) -> dict[str, Any]:
        """The settings as they come back from JSON."""
        settings: dict[str, Any] = json.loads(to_json(self.settings))
        return settings


@dataclass(frozen=True, kw_only=True)
class Study:
    """The rows of a paper's tables. `about` says how they were read out of it."""

    name: str
    title: str
    about: str
    rows: Sequence[Row]
    epsilons: Sequence[float] = ()
    """The measure is also told as it was when a training had cost so much, at the end of an epoch."""

    def __post_init__(self) -> None:
        keys = [row.key for row in self.rows]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ConfigError(f"Study '{self.name}' has the row '{min(twice)}' twice: give each a key of its own.")

    @property
    def data(self) -> list[str]:
        """The data sets that it needs."""
        return sorted({row.data for row in self.rows})

    def choose(self, patterns: Sequence[str] | None) -> Study:
        """The study with the rows that match a pattern (all without patterns), in their order."""
        if not patterns:
            return self
        for pattern in patterns:
            if not any(fnmatchcase(row.key, pattern) for row in self.rows):
                keys = ", ".join(row.key for row in self.rows)
                raise ConfigError(f"No row matches '{pattern}'. There are: {keys}.")
        rows = [row for row in self.rows if any(fnmatchcase(row.key, pattern) for pattern in patterns)]
        return replace(self, rows=rows)


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """Where a study stands: inside of a training (`training`) or right after one (`result`, its line)."""

    row: Row
    seed: int
    done: int
    total: int
    training: Progress | None = None
    result: Mapping[str, Any] | None = None
    seconds_left: float | None = None


def read_results(out: str | Path) -> list[dict[str, Any]]:
    """The lines of a study's folder, oldest first; none if it has not begun."""
    path = Path(out, "results.jsonl")
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # a crash may have left half a line
    return [json.loads(line) for line in whole.splitlines()]


def run_study(
    study: Study,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    seeds: Sequence[int] = range(5),
    only: Sequence[str] | None = None,
    threads: int | None = None,
    on_progress: Callable[[StudyProgress], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Trains what is missing and returns all the lines of `results.jsonl`.

    A training that fails is recorded with its error, and the study goes on; the next call tries it again. All rows are
    done with one seed before the next seed begins, so that the table soon has something in each row.

    Args:
        only: patterns of keys; by default all rows.
        stop: asked during trainings; once it says yes, the current one is left such that the next call goes on with it.
    """
    chosen, folder = study.choose(only), Path(out)
    finished = _finished(study, read_results(folder))
    missing = [(row, seed) for seed in seeds for row in chosen.rows if (row.key, seed) not in finished]
    for name in sorted({row.data for row, _ in missing}):
        load(name, data_dir=None if data_dir is None else Path(data_dir))  # missing files are told before hours pass
    folder.mkdir(parents=True, exist_ok=True)
    drop_half_line(folder / "results.jsonl")
    clock = _TimeLeft(finished)
    done = len(seeds) * len(chosen.rows) - len(missing)
    for number, (row, seed) in enumerate(missing):
        ahead = [later.key for later, _ in missing[number + 1 :]]
        now = StudyProgress(row=row, seed=seed, done=done + number, total=done + len(missing))
        tell = partial(_tell, on_progress, now, clock, ahead)
        clock.begin()
        more = {"seed": seed, "data_dir": None if data_dir is None else str(data_dir), "threads": threads}
        line: dict[str, Any] = {"key": row.key, "seed": seed}
        try:
            result = _train(row, folder / "runs" / row.key / f"seed-{seed}", more, tell, stop)
        except OSError:
            raise  # a full disk: the next training would fail as well
        except Exception as error:  # one row must not end a study of hours; the table says what happened
            line["error"] = " ".join((str(error) or type(error).__name__).split())
        else:
            if result.ended == "interrupted":
                break
            told = result.to_json()
            line.update({name: told[name] for name in _KEPT if name in told})
            if study.epsilons:
                line["on_the_way"] = on_the_way(result, study.epsilons, row.measure)
            if row.measure not in told:
                line["error"] = (
                    f"{row.measure} was not measured: it needs held-out records of two classes, and finite scores."
                )
        line.update({"version": version("privet"), "settings": row.plain()})
        with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        clock.end(line)
        gc.collect()  # a finished training and its records refer to each other
        on_progress(replace(now, done=now.done + 1, result=line, seconds_left=clock.left(row.key, None, ahead)))
        if stop():
            break
    return read_results(folder)


def _tell(
    on_progress: Callable[[StudyProgress], None],
    now: StudyProgress,
    clock: _TimeLeft,
    ahead: Sequence[str],
    training: Progress,
) -> None:
    on_progress(replace(now, training=training, seconds_left=clock.left(now.row.key, training, ahead)))


def _train(
    row: Row, folder: Path, more: Mapping[str, Any], tell: Callable[[Progress], None], stop: Callable[[], bool]
) -> Result:
    """One training, gone on with if its folder holds half of it.

    Each has a ledger of its own. The rows are compared at what each costs by itself, and the cost of all of them
    together, which a shared ledger states after each run, takes the accountant a second for each run in it.
    """
    config = row.config(**more, out=str(folder), ledger=str(folder / "study.ledger"), report=False)
    mark = folder / "settings.json"
    same = mark.exists() and json.loads(mark.read_text(encoding="utf-8")) == row.plain()
    if same and (folder / "checkpoint.pt").exists() and not (folder / "model.safetensors").exists():
        try:
            return train(config, resume=folder, on_progress=tell, stop=stop)
        except CheckpointError:
            pass  # it is damaged, or of another version: from the start
    if mark.exists():  # only what an earlier call made is removed
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(to_json(row.settings), encoding="utf-8")
    return train(config, on_progress=tell, stop=stop)


def on_the_way(result: Result, epsilons: Sequence[float], measure: str = "accuracy") -> dict[str, float | None]:
    """The measure at the end of the last epoch that was within each epsilon; None where there was none."""
    mechanism = Mechanism.from_json(result.statement["mechanism"])
    paid_by = "epoch" if result.statement["sampling"]["rule"] == "Partition" else "step"
    lines = [json.loads(line) for line in (result.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, float | None] = {}
    for limit in epsilons:
        most = count_for(mechanism, limit, result.statement["delta"])
        found[f"{limit:g}"] = next((line.get(measure) for line in reversed(lines) if line[paid_by] <= most), None)
    return found


class _TimeLeft:
    """How long the rest will take: a row by its own earlier runs, or by the mean of all runs."""

    def __init__(self, finished: Mapping[tuple[str, int], Mapping[str, Any]]) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._began = time.monotonic()
        for line in finished.values():
            self.end(line)

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self, line: Mapping[str, Any]) -> None:
        if "seconds" in line:
            self._seconds.setdefault(line["key"], []).append(line["seconds"])

    def left(self, key: str, training: Progress | None, ahead: Sequence[str]) -> float | None:
        known = {row: statistics.mean(seconds) for row, seconds in self._seconds.items()}
        rest = 0.0
        if training is not None:
            elapsed = time.monotonic() - self._began
            rest = elapsed * (training.steps / training.step - 1)
            known.setdefault(key, elapsed + rest)
        if ahead and not known:
            return None
        return rest + sum(known.get(row, statistics.mean(known.values())) for row in ahead)


def _finished(study: Study, results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """By row and seed, the last line of the row's present settings that is not a failure and has its measure."""
    rows = {row.key: (row.plain(), row.measure) for row in study.rows}
    found = {}
    for line in results:
        settings, measure = rows.get(line["key"], (None, ""))
        if "error" not in line and settings == line["settings"] and measure in line:
            found[line["key"], line["seed"]] = line
    return found


def summary(study: Study, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is known of each row: its measure over the seeds, the true epsilon (the largest), and what failed."""
    finished = _finished(study, results)
    rows = []
    for row in study.rows:
        mine = [line for (key, _), line in sorted(finished.items()) if key == row.key]
        seeds = {line["seed"] for line in mine}
        failed = {
            line["seed"]: line["error"]
            for line in results
            if line["key"] == row.key
            and "error" in line
            and line["seed"] not in seeds
            and line["settings"] == row.plain()
        }
        values = [float(line[row.measure]) for line in mine]
        rows.append(
            {
                "key": row.key,
                "settings": row.plain(),
                "theirs": row.theirs,
                "note": row.note,
                "seeds": sorted(seeds),
                "accuracies": [float(line["accuracy"]) for line in mine],
                "measure": row.measure,
                "values": values,
                "mean": statistics.mean(values) if values else None,
                "std": statistics.stdev(values) if len(values) > 1 else None,
                "epsilon": max((float(line["epsilon"]) for line in mine), default=None),
                "delta": max((float(line["delta"]) for line in mine), default=None),
                "seconds": statistics.mean(line["seconds"] for line in mine) if mine else None,
                "failed": failed,
                "on_the_way": {
                    f"{epsilon:g}": [line["on_the_way"][f"{epsilon:g}"] for line in mine if "on_the_way" in line]
                    for epsilon in study.epsilons
                },
            }
        )
    return rows


def table(study: Study, results: Sequence[Mapping[str, Any]]) -> str:
    """The study in Markdown, a table for each first part of the keys: mean and deviation of what is measured."""
    known = {row["key"]: row for row in summary(study, results)}
    blocks = [f"# {study.title}", study.about]
    for section, found in groupby(study.rows, key=lambda row: row.key.partition("/")[0]):
        rows = list(found)
        shared = _shared(rows)
        within = [f"within {epsilon:g}" for epsilon in study.epsilons]
        measures = " or ".join(sorted({row.measure for row in rows}))
        head = ["row", "settings that differ", *within, "true epsilon", f"{measures}, ours", "theirs", "note"]
        lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
        for row in rows:
            own = {name: value for name, value in _flat(row.settings).items() if name not in shared}
            theirs = "–" if row.theirs is None else f"{row.theirs:.2%}"
            mine = known[row.key]
            earlier = [_mean(found) for found in mine["on_the_way"].values()]
            cells = [row.key, _said(own), *earlier, _epsilon(mine["epsilon"]), _ours(mine), theirs, row.note]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if len(rows) > 1:
            blocks += [f"## {section}", f"All rows: {_said(shared)}."]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _ours(known: Mapping[str, Any]) -> str:
    parts = []
    if known["values"]:
        count = len(known["values"])
        spread = "" if known["std"] is None else f" ± {100 * known['std']:.2f}"
        parts.append(f"{100 * known['mean']:.2f}{spread}% ({count} seed{'s' if count > 1 else ''})")
    if known["failed"]:
        number, why = len(known["failed"]), next(iter(known["failed"].values()))
        parts.append(f"{number} failed: {why}" if parts else f"failed: {why}")
    return "; ".join(parts) or "not run"


def _mean(values: Sequence[float | None]) -> str:
    """Of those that are known, with their deviation."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "–"
    return f"{statistics.mean(known):.2f}" + (f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else "")


def _epsilon(value: float | None) -> str:
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, with those of the method and of the model each under a name of its own."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _OPTIONS:
            flat.update({f"{_OPTIONS[name]}.{option}": content for option, content in value.items()})
        else:
            flat[name] = value
    return flat


def _shared(rows: Sequence[Row]) -> dict[str, Any]:
    """What all rows have in common; nothing for a single one, which then says it all itself."""
    first, *others = [_flat(row.settings) for row in rows]
    return {n: v for n, v in first.items() if others and all(n in other and other[n] == v for other in others)}


def _said(settings: Mapping[str, Any]) -> str:
    def one(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name} {one(value)}" for name, value in settings.items())
