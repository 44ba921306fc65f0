"""How much longer a private step takes than an ordinary one, and how much more memory it needs.

Time: both kinds of step in one process, taking turns, so that whatever else the machine does meets both; the median
of many. Memory: the peak of a fresh process for each (the accountant, which no step needs, is not loaded there: it
takes about 95 MiB once, whatever the model). The ordinary step is an eager PyTorch step in whichever memory
layout is faster for the model; the private one may choose its layout too. Both keep freed memory (`privet.memory`), as
every run does unless it is told not to, which makes both faster. A private step is a whole one: forward and
backward pass, bound, a durable entry in a ledger file, noise, and the optimizer's step.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .errors import ConfigError, PrivetError
from .memory import keep_freed_memory
from .methods import Method
from .nn.models import EXAMPLE_SHAPES, build
from .planning import Budget
from .run import Run
from .sampling import Chunk, Poisson
from .step import Step

_WARM_UP = 3
_MEMORY_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch size to measure; inputs are made up."""

    model: str
    batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in EXAMPLE_SHAPES:
            raise ConfigError(f"No benchmark for model '{self.model}'. There are: {', '.join(EXAMPLE_SHAPES)}.")
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, and is {self.batch}.")

    @property
    def shape(self) -> tuple[int, ...]:
        return EXAMPLE_SHAPES[self.model]

    @property
    def layouts(self) -> list[str]:
        return ["contiguous", "channels_last"] if len(self.shape) == 3 else ["contiguous"]

    @property
    def classes(self) -> int:
        return 1 if self.model == "mlp" else 10

    def records(self, layout: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        if self.model == "transformer":
            x = torch.randint(0, 8000, (self.batch, *self.shape), generator=generator)
        else:
            x = torch.randn(self.batch, *self.shape, generator=generator)
        y = torch.randint(0, max(2, self.classes), (self.batch,), generator=generator)
        return (x.to(memory_format=torch.channels_last) if layout == "channels_last" else x), y

    def network(self, layout: str) -> nn.Module:
        model = build(self.model, input_shape=self.shape, classes=self.classes, seed=self.seed)
        return model.to(memory_format=torch.channels_last) if layout == "channels_last" else model  # type: ignore[call-overload]

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.classes == 1:
            return F.binary_cross_entropy_with_logits(outputs.squeeze(1), y.float(), reduction="none")
        return F.cross_entropy(outputs, y, reduction="none")


def ordinary(case: Case, layout: str) -> Callable[[], None]:
    """An ordinary training step with momentum SGD."""
    model, (x, y) = case.network(layout), case.records(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        case.losses(model(x), y).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def private(case: Case, layout: str, method: Method, ledger: Path, keep_memory: bool) -> Callable[[], None]:
    """The same step made private, at the default noise level, with a ledger on disk."""
    model, (x, y) = case.network(layout), case.records(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = Run(
        model,
        TensorDataset(x, y),
        method=method,
        sampling=Poisson(batch=case.batch),
        budget=Budget(noise=1.0, delta=1e-5, steps=1000),
        records=100 * case.batch,
        public=TensorDataset(x[:2].clone(), y[:2].clone()),  # what BatchNorm asks for; no step here reads it
        ledger=ledger / f"{layout}.ledger",
        keep_memory=keep_memory,
    )
    chunk = Chunk(size=case.batch, last_of_unit=True)

    def step() -> None:
        optimizer.zero_grad()
        private_step = Step(iter([((x, y), chunk)]), run.session, run.source, run._rules, run._record)
        for inputs, labels in private_step:
            private_step.backward(case.losses(model(inputs), labels))
        optimizer.step()

    return step


def measure(case: Case, method: Method, *, repetitions: int = 15, keep_memory: bool = True) -> dict[str, Any]:
    """Times and peak memory of both steps, with their ratios; `keep_memory` holds for both."""
    if repetitions < 1:
        raise ConfigError(f"repetitions must be at least 1, and is {repetitions}.")
    if keep_memory:
        keep_freed_memory()
    times = _times(case, method, repetitions, keep_memory)
    best: dict[str, str] = {}
    for kind in ("ordinary", "private"):
        _, best[kind] = min((times[kind, layout], layout) for layout in case.layouts)
    seconds = {kind: times[kind, layout] for kind, layout in best.items()}
    peaks = {kind: _peak(case, kind, layout, method, keep_memory) for kind, layout in best.items()}
    return {
        "model": case.model,
        "batch": case.batch,
        "method": method.name,
        "ratio": seconds["private"] / seconds["ordinary"],
        "memory_ratio": peaks["private"]["peak"] / peaks["ordinary"]["peak"],
        "memory_ratio_above_import": _above_import(peaks["private"]) / _above_import(peaks["ordinary"]),
        "ordinary_ms": 1e3 * seconds["ordinary"],
        "private_ms": 1e3 * seconds["private"],
        "ordinary_mib": peaks["ordinary"]["peak"] / 1024,
        "private_mib": peaks["private"]["peak"] / 1024,
        "layouts": best,
        "keep_memory": keep_memory,
        "repetitions": repetitions,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _times(case: Case, method: Method, repetitions: int, keep_memory: bool) -> dict[tuple[str, str], float]:
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[tuple[str, str], Callable[[], None]] = {}
        for layout in case.layouts:
            steps["ordinary", layout] = ordinary(case, layout)
            steps["private", layout] = private(case, layout, method, Path(folder), keep_memory)
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
        for turn in range(_WARM_UP + repetitions):
            for key, step in steps.items():
                start = time.perf_counter()
                step()
                if turn >= _WARM_UP:
                    taken[key].append(time.perf_counter() - start)
        del steps, step
    return {key: statistics.median(values) for key, values in taken.items()}


def _above_import(peak: dict[str, int]) -> int:
    return peak["peak"] - peak["imported"]


def _peak(case: Case, kind: str, layout: str, method: Method, keep_memory: bool) -> dict[str, int]:
    """Peak resident memory (KiB) of a fresh process that does a few steps, and what it had before the first."""
    options = {name: getattr(method, name) for name in method.__dataclass_fields__}  # type: ignore[attr-defined]
    task: dict[str, Any] = {"model": case.model, "batch": case.batch, "kind": kind, "layout": layout}
    task |= {"method": method.name, "keep_memory": keep_memory}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "privet.bench",
            json.dumps(task | {"options": options, "threads": torch.get_num_threads()}),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise PrivetError(f"The memory of a {kind} step could not be measured: {process.stderr.strip()[-500:]}")
    result: dict[str, int] = json.loads(process.stdout)
    return result


def _peak_of_this_process() -> int:
    """In KiB. Linux's own mark, where there is one: `ru_maxrss` would carry over the peak of the parent process."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def _memory_worker(task: dict[str, Any]) -> None:
    from .methods import method as method_named  # noqa: PLC0415

    torch.set_num_threads(task["threads"])
    if task["keep_memory"]:
        keep_freed_memory()
    case = Case(model=task["model"], batch=task["batch"])
    imported = _peak_of_this_process()
    with tempfile.TemporaryDirectory() as folder:
        if task["kind"] == "ordinary":
            step = ordinary(case, task["layout"])
        else:
            method = method_named(task["method"], **task["options"])
            step = private(case, task["layout"], method, Path(folder), task["keep_memory"])
        for _ in range(_MEMORY_STEPS):
            step()
        peak = _peak_of_this_process()
    print(json.dumps({"peak": peak, "imported": imported}))


if __name__ == "__main__":
    _memory_worker(json.loads(sys.argv[1]))
