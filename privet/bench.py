"""How much longer a private step takes than an ordinary one, and how much more memory it needs.

Time: both kinds of step in one process, taking turns, so that whatever else the machine does meets both; the median
of many, with the quartiles of the turns' own ratios beside it. Memory: the peak of a fresh process for each, the median
of three (the accountant, which no step needs, is not loaded there: it takes about 95 MiB once, whatever the model).
The ordinary step is an eager PyTorch step in whichever memory layout is faster for the model; the private one may
choose its layout too. Both keep freed memory (`privet.memory`), as every run does unless it is told not to, which makes
both faster. A private step is a whole one: forward and backward pass, bound, a durable entry in a ledger file, noise,
and the optimizer's step. `against` another method, that method's step (with cross-entropy) takes the place of the
ordinary one.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from . import native
from .errors import ConfigError, PrivetError
from .losses import loss as make_loss
from .memory import keep_freed_memory
from .methods import Method
from .nn.models import EXAMPLE_SHAPES, build
from .planning import Budget
from .run import Run
from .sampling import Chunk, Poisson

_WARM_UP = 3
_MEMORY_STEPS = 4
_MEMORY_PROCESSES = 3  # where freed memory is used again is a matter of luck, up to a tenth of all of it


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch size to measure; inputs are made up."""

    model: str
    batch: int
    seed: int = 0
    loss: str = "ce"
    """What is minimised, in the step that is measured."""

    def __post_init__(self) -> None:
        if self.model not in EXAMPLE_SHAPES:
            raise ConfigError(f"No benchmark for model '{self.model}'. There are: {', '.join(EXAMPLE_SHAPES)}.")
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, and is {self.batch}.")
        if self.loss != "ce" and self.classes == 1:
            raise ConfigError(
                f"Model '{self.model}' is measured with one score, which the loss '{self.loss}' has no use for."
            )

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

    def losses(self, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        """(scores, targets) to a vector."""
        if self.classes > 1:
            return make_loss(self.loss, model)
        return lambda scores, y: F.binary_cross_entropy_with_logits(scores.squeeze(1), y.float(), reduction="none")


def ordinary(case: Case, layout: str) -> Callable[[], None]:
    """An ordinary training step with momentum SGD."""
    model, (x, y) = case.network(layout), case.records(layout)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), case.losses(model)

    def step() -> None:
        optimizer.zero_grad()
        losses(model(x), y).mean().backward()  # type: ignore[no-untyped-call]
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
        public=TensorDataset(x[:2].clone(), y[:2].clone()),  # what BatchNorm asks for; only the first step reads it
        ledger=ledger / f"{layout}.ledger",
        keep_memory=keep_memory,
    )
    losses = case.losses(model)  # its hooks come after the method's
    chunk = Chunk(size=case.batch, last_of_unit=True)

    def step() -> None:
        optimizer.zero_grad()
        private_step = run._step(iter([iter([((x, y), chunk)])]))
        for inputs, labels in private_step:
            private_step.backward(losses(model(inputs), labels))
        optimizer.step()

    return step


def measure(
    case: Case, method: Method, *, against: Method | None = None, repetitions: int = 15, keep_memory: bool = True
) -> dict[str, Any]:
    """Times and peak memory of both steps, with their ratios; `keep_memory` holds for both."""
    if repetitions < 1:
        raise ConfigError(f"repetitions must be at least 1, and is {repetitions}.")
    if keep_memory:
        keep_freed_memory()
    plain = replace(case, loss="ce")
    compared = {"base": (plain, against), "private": (case, method)}
    taken = _times(compared, repetitions, keep_memory)
    medians = {key: statistics.median(values) for key, values in taken.items()}
    best = {kind: min((medians[kind, layout], layout) for layout in case.layouts)[1] for kind in compared}
    seconds = {kind: medians[kind, layout] for kind, layout in best.items()}
    turns = [p / b for p, b in zip(*(taken[kind, best[kind]] for kind in ("private", "base")), strict=True)]
    peaks = {
        kind: statistics.median_low(_peak(*compared[kind], layout, keep_memory) for _ in range(_MEMORY_PROCESSES))
        for kind, layout in best.items()
    }
    base = "ordinary" if against is None else against.name
    return {
        "model": case.model,
        "batch": case.batch,
        "method": method.name,
        "loss": case.loss,
        "against": base,
        "ratio": seconds["private"] / seconds["base"],
        "ratio_quartiles": statistics.quantiles(turns, method="inclusive")[::2] if len(turns) > 1 else 2 * turns,
        "memory_ratio": peaks["private"].most / peaks["base"].most,
        "memory_ratio_above_import": peaks["private"].above_import / peaks["base"].above_import,
        "base_ms": 1e3 * seconds["base"],
        "private_ms": 1e3 * seconds["private"],
        "base_mib": peaks["base"].most / 1024,
        "private_mib": peaks["private"].most / 1024,
        "layouts": best,
        "keep_memory": keep_memory,
        "repetitions": repetitions,
        "threads": torch.get_num_threads(),
        "loops_in_c": native.library is not None,
        "torch": torch.__version__,
        "processor": _processor(),
    }


_Compared = Mapping[str, tuple[Case, Method | None]]
"""What is measured, by kind; no method stands for an ordinary step."""


def _times(compared: _Compared, repetitions: int, keep_memory: bool) -> dict[tuple[str, str], list[float]]:
    """The seconds of each turn, by kind and layout."""
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[tuple[str, str], Callable[[], None]] = {}
        for kind, (case, method) in compared.items():
            for layout in case.layouts:
                place = Path(folder, kind)
                place.mkdir(exist_ok=True)
                steps[kind, layout] = _step(case, method, layout, place, keep_memory)
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
        for turn in range(_WARM_UP + repetitions):
            for key, step in steps.items():
                start = time.perf_counter()
                step()
                if turn >= _WARM_UP:
                    taken[key].append(time.perf_counter() - start)
        del steps, step
    return taken


def _processor() -> str:
    """Its name: what privacy costs differs between them by a tenth and more."""
    known = Path("/proc/cpuinfo")
    names = [line for line in known.read_text().splitlines() if line.startswith("model name")] if known.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()


def _step(case: Case, method: Method | None, layout: str, folder: Path, keep_memory: bool) -> Callable[[], None]:
    return ordinary(case, layout) if method is None else private(case, layout, method, folder, keep_memory)


@dataclass(frozen=True, order=True)
class _Peak:
    """Resident memory of a process, in KiB: the most, and what it had before the first step."""

    most: int
    imported: int

    @property
    def above_import(self) -> int:
        return self.most - self.imported


def _peak(case: Case, method: Method | None, layout: str, keep_memory: bool) -> _Peak:
    """Of a fresh process that does a few steps."""
    task: dict[str, Any] = {"case": asdict(case), "layout": layout, "keep_memory": keep_memory, "method": None}
    if method is not None:
        options = {name: getattr(method, name) for name in method.__dataclass_fields__}  # type: ignore[attr-defined]
        task |= {"method": method.name, "options": options}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "privet.bench",
            json.dumps(task | {"threads": torch.get_num_threads()}),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise PrivetError(f"The memory of a step could not be measured: {process.stderr.strip()[-500:]}")
    return _Peak(**json.loads(process.stdout))


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
    case = Case(**task["case"])
    method = None if task["method"] is None else method_named(task["method"], **task["options"])
    imported = _peak_of_this_process()
    with tempfile.TemporaryDirectory() as folder:
        step = _step(case, method, task["layout"], Path(folder), task["keep_memory"])
        for _ in range(_MEMORY_STEPS):
            step()
        peak = _peak_of_this_process()
    print(json.dumps({"most": peak, "imported": imported}))


if __name__ == "__main__":
    _memory_worker(json.loads(sys.argv[1]))
