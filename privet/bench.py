"""How much longer a private step takes than an ordinary one, and how much more memory it needs.

Time: both kinds of step in one process, taking turns, so that whatever else the machine does meets both. Where their
memory happens to lie in a process makes the same operation up to twice as fast, so this is done in several processes,
and the median of their ratios told, with the lowest and the highest. Memory: the peak of a fresh process for each, the
median of three (the accountant, which no step needs, is not loaded there: it takes about 95 MiB once, whatever the
model).
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
from .methods import method as method_named
from .nn.models import EXAMPLE_SHAPES, build
from .planning import Budget
from .run import Run
from .sampling import Chunk, Poisson

_WARM_UP = 3
_MEMORY_STEPS = 4
_REFUSED = 2
"""How a process ends that says in a sentence why it cannot measure."""
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
    case: Case,
    method: Method,
    *,
    against: Method | None = None,
    repetitions: int = 15,
    processes: int = 5,
    keep_memory: bool = True,
) -> dict[str, Any]:
    """Times and peak memory of both steps, with their ratios; `keep_memory` holds for both."""
    for name, given in (("repetitions", repetitions), ("processes", processes)):
        if given < 1:
            raise ConfigError(f"{name} must be at least 1, and is {given}.")
    compared = {"base": (replace(case, loss="ce"), against), "private": (case, method)}
    times = [_times(compared, repetitions, keep_memory) for _ in range(processes)]
    layouts = {kind: statistics.mode(took[kind]["layout"] for took in times) for kind in compared}
    seconds = {kind: statistics.median(took[kind]["seconds"] for took in times) for kind in compared}
    ratios = [took["private"]["seconds"] / took["base"]["seconds"] for took in times]
    peaks = {
        kind: statistics.median_low(_peak(*compared[kind], layout, keep_memory) for _ in range(_MEMORY_PROCESSES))
        for kind, layout in layouts.items()
    }
    base = "ordinary" if against is None else against.name
    return {
        "model": case.model,
        "batch": case.batch,
        "method": method.name,
        "loss": case.loss,
        "against": base,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "memory_ratio": peaks["private"].most / peaks["base"].most,
        "memory_ratio_above_import": peaks["private"].above_import / peaks["base"].above_import,
        "base_ms": 1e3 * seconds["base"],
        "private_ms": 1e3 * seconds["private"],
        "base_mib": peaks["base"].most / 1024,
        "private_mib": peaks["private"].most / 1024,
        "layouts": layouts,
        "keep_memory": keep_memory,
        "repetitions": repetitions,
        "processes": processes,
        "threads": torch.get_num_threads(),
        "loops_in_c": native.library is not None,
        "torch": torch.__version__,
        "processor": _processor(),
    }


_Compared = Mapping[str, tuple[Case, Method | None]]
"""What is measured, by kind; no method stands for an ordinary step."""


def _times(compared: _Compared, repetitions: int, keep_memory: bool) -> dict[str, dict[str, Any]]:
    """Of a fresh process: by kind, the faster layout and the median of its steps' seconds."""
    kinds = {kind: _described(case, method) for kind, (case, method) in compared.items()}
    times: dict[str, dict[str, Any]] = _in_fresh_process(
        "time", {"kinds": kinds, "repetitions": repetitions, "keep_memory": keep_memory}
    )
    return times


def _time_steps(kinds: Mapping[str, Mapping[str, Any]], repetitions: int, keep_memory: bool) -> dict[str, Any]:
    """What `_times` gives, here. Of two steps of a kind in a row the second counts, as it is in a training."""
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, dict[str, Callable[[], None]]] = {}
        for kind, described in kinds.items():
            case, method = _of(described)
            place = Path(folder, kind)
            place.mkdir()
            steps[kind] = {layout: _step(case, method, layout, place, keep_memory) for layout in case.layouts}
        best: dict[str, str] = {}
        for kind, by_layout in steps.items():
            fastest = {layout: min(_seconds(step) for _ in range(_WARM_UP)) for layout, step in by_layout.items()}
            best[kind] = min(fastest, key=fastest.__getitem__)
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(repetitions):
            for kind, layout in best.items():
                step = steps[kind][layout]
                step()
                taken[kind].append(_seconds(step))
        del steps, step
    return {kind: {"layout": best[kind], "seconds": statistics.median(taken[kind])} for kind in kinds}


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


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
    task = {"kind": _described(case, method), "layout": layout, "keep_memory": keep_memory}
    return _Peak(**_in_fresh_process("peak", task))


def _described(case: Case, method: Method | None) -> dict[str, Any]:
    """A kind of step, for another process."""
    if method is None:
        return {"case": asdict(case), "method": None, "options": {}}
    options = {name: getattr(method, name) for name in method.__dataclass_fields__}  # type: ignore[attr-defined]
    return {"case": asdict(case), "method": method.name, "options": options}


def _of(described: Mapping[str, Any]) -> tuple[Case, Method | None]:
    name = described["method"]
    return Case(**described["case"]), None if name is None else method_named(name, **described["options"])


def _in_fresh_process(what: str, task: Mapping[str, Any]) -> Any:
    process = subprocess.run(
        [sys.executable, "-m", "privet.bench", what, json.dumps({**task, "threads": torch.get_num_threads()})],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        said = process.stderr.strip()
        refused = process.returncode == _REFUSED
        raise PrivetError(said if refused else f"The {what} of a step could not be measured: {said[-500:]}")
    return json.loads(process.stdout)


def _peak_of_this_process() -> int:
    """In KiB. Linux's own mark, where there is one: `ru_maxrss` would carry over the peak of the parent process."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def _steps_peak(kind: Mapping[str, Any], layout: str, keep_memory: bool) -> dict[str, int]:
    """What `_peak` gives, here."""
    case, method = _of(kind)
    imported = _peak_of_this_process()
    with tempfile.TemporaryDirectory() as folder:
        step = _step(case, method, layout, Path(folder), keep_memory)
        for _ in range(_MEMORY_STEPS):
            step()
        return {"most": _peak_of_this_process(), "imported": imported}


def _worker(what: str, *, threads: int, **task: Any) -> None:
    torch.set_num_threads(threads)
    if task["keep_memory"]:
        keep_freed_memory()
    try:
        print(json.dumps(_WORK[what](**task)))
    except PrivetError as error:
        print(error, file=sys.stderr)
        sys.exit(_REFUSED)


_WORK: Mapping[str, Callable[..., dict[str, Any]]] = {"time": _time_steps, "peak": _steps_peak}


if __name__ == "__main__":
    _worker(sys.argv[1], **json.loads(sys.argv[2]))
