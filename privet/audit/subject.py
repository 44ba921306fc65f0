"""What an audit looks at: a private step that releases something for a sample of the auditor's choice.

The checks see a `Subject` and nothing else, so that they work alike on Privet's methods, on a method of a user's own
and, through an adapter, on another library. `MethodSubject` is the subject for everything that runs under `privet.Run`:
it drives the real loader, session, step and hand-over, and replaces only the source of randomness by a `Desk` that can
switch the noise off, write down what was released, or play it back.
"""

from __future__ import annotations

import copy
import io
import logging
import random
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ..accounting import Relation
from ..errors import ConfigError, PrivetError
from ..methods import Method, Query
from ..noise import Level, Source
from ..planning import Budget
from ..run import Run
from ..sampling import Poisson, SamplingRule

log = logging.getLogger("privet")

_BASE = 12
"""So many ordinary records make up the sample that hostile ones join."""

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs, targets) to one loss per record."""


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@dataclass(frozen=True, eq=False)
class Record:
    """One record. The number is who it is: coins that a method tosses for a record are tied to it."""

    number: int
    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step released, by the name of the sum, as a sum (multiplied by the public divisor again)."""

    sums: dict[str, Tensor]
    sensitivities: dict[str, dict[Relation, float]]
    """What one record can move each sum by, as declared."""
    stds: dict[str, float]
    """The noise in each sum, as declared."""
    rounding: float = 0.0
    """Relative, of what was handed over: gradients are rounded to the parameters' precision after the noise."""


@dataclass(eq=False)
class Tape:
    """The noisy outputs of a training, in order: played back, a second training releases the same."""

    outputs: list[Tensor] = field(default_factory=list)


class Subject(ABC):
    """A private step seen from outside."""

    name: str
    base: list[Record]
    """Ordinary records: the sample that hostile ones are added to."""
    relation: Relation
    basis: Relation
    """Under which relation the sensitivity in the noise multiplier is taken (the accountant knows)."""
    noise_multiplier: float
    """The claim for one step: noise over sensitivity, all sums taken together."""
    delta: float

    @abstractmethod
    def step(self, sample: Sequence[Record], *, noise: bool) -> Outcome:
        """What a step from the same weights as always releases for this sample."""

    def gradient(self, record: Record) -> Callable[[Tensor], Tensor] | None:
        """The record's own gradient as a differentiable function of its input, if there is such a thing."""
        return None

    def restarts(self) -> Iterator[tuple[str, Outcome]]:
        """Noisy steps on the ordinary records in places where noise could be met again, with where that is."""
        yield from ()

    def train(
        self, samples: Sequence[Sequence[Record]], tape: Tape | None = None
    ) -> tuple[Tape, dict[str, Any]] | None:
        """Steps on these samples from fresh; with a tape, its noisy outputs take the place of the step's own.

        Returns the tape and everything that was released beside it. None where a library cannot be driven so.
        """
        return None


class Desk(Source):
    """Stands in for a run's source of randomness and writes down all noise that passes over it."""

    def __init__(self, real: Source) -> None:
        self.real = real
        self.level = real.level
        self.mode: Literal["noise", "off", "replay"] = "noise"
        self.numbers: list[int] = []
        self.stds: list[float] = []
        self.tape = Tape()

    def begin(self, mode: Literal["noise", "off", "replay"], tape: Tape | None = None) -> None:
        self.mode, self.stds, self.tape = mode, [], tape or Tape()
        self._played = 0

    def add_noise(self, total: Tensor, std: float, *, out: Tensor | None = None) -> Tensor:
        self.stds.append(std)
        noisy = self.real.add_noise(total, 0.0 if self.mode == "off" else std, out=out)
        if self.mode != "replay":
            self.tape.outputs.append(noisy.clone())
        else:
            if self._played == len(self.tape.outputs):
                raise _OutOfTape("more noisy sums than in the first training")
            recorded = self.tape.outputs[self._played]
            self._played += 1
            if recorded.shape != noisy.shape:
                raise _OutOfTape(f"a sum of shape {tuple(noisy.shape)} in place of {tuple(recorded.shape)}")
            noisy.copy_(recorded)
        return noisy

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        return self.real.words(count)

    def integers(self, count: int, bound: int) -> npt.NDArray[np.int64]:
        """Coins of the records in the sample: each record has its own, whoever else is there."""
        if count != len(self.numbers):
            return self.real.integers(count, bound)
        return np.array([np.random.default_rng([bound, n]).integers(bound) for n in self.numbers], dtype=np.int64)


class _OutOfTape(Exception):
    """A replayed training asked for other noise than the recorded one."""


class _Pool(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        record = self.records[position]
        return record.x, record.y


class _Singles(list[npt.NDArray[np.int64]]):
    """Users of one record each, as many as are asked for: samples of an audit have no fixed size."""

    def __getitem__(self, user: Any) -> Any:
        return np.array([user], dtype=np.int64)


class MethodSubject(Subject):
    """A method on a model, under a real `Run`.

    Args:
        model: is copied; the audit never changes the user's.
        records: inputs and targets of ordinary records, one row each; a dozen are enough for all but whole trainings.
        loss: (model, inputs, targets) to one loss per record; cross-entropy by default.
        public: inputs and targets of public records, for methods that learn from such.
        chunk: samples are gone through in chunks of so many records, as a bound must hold across them.

    Where the method bounds users, each record is a user of its own.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        records: tuple[Tensor, Tensor],
        *,
        loss: Loss = cross_entropy,
        public: tuple[Tensor, Tensor] | None = None,
        sampling: SamplingRule | None = None,
        relation: Relation = "add_remove",
        noise_multiplier: float = 1,
        delta: float = 1e-5,
        noise_level: Level = "system",
        chunk: int = 5,
        name: str | None = None,
    ) -> None:
        if not (isinstance(records, tuple) and len(records) == 2 and all(isinstance(r, Tensor) for r in records)):
            raise ConfigError(
                "Give the records as two tensors, (inputs, targets), with one row for each record. A model that takes "
                "something else can be wrapped, or unpack its input in the loss."
            )
        inputs, targets = records
        if len(inputs) == 0 or len(inputs) != len(targets):
            raise ConfigError(f"An audit needs records: there are {len(inputs)} inputs and {len(targets)} targets.")
        self.name = name or method.name
        self.method, self.loss, self.relation = method, loss, relation
        self.records = [Record(i, x, y) for i, (x, y) in enumerate(zip(inputs, targets, strict=True))]
        self.base = self.records[:_BASE]
        self.sampling = sampling or Poisson(batch=max(1, len(self.base) // 2))
        self.basis = self.sampling.sensitivity_basis(relation)
        self.noise_multiplier, self.delta, self.noise_level = noise_multiplier, delta, noise_level
        self._users, self._chunk = method.unit == "user", chunk
        self._public = None if public is None else TensorDataset(*public)
        self._model = copy.deepcopy(model)
        for layer in self._model.modules():  # what dropout draws has nothing to do with the records
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()
        self._try_loss(inputs[:2], targets[:2])
        self._try_out()
        self._pool, self.run, self._desk = self._fresh()
        if public is not None:  # thresholds are learned in the first step of an epoch
            self._desk.begin("off")
            with _quiet():
                self._take(self._pool, self.run, self._desk, self.base)
        self._steps_done = self.run.steps_done
        self._start = copy.deepcopy(self.run.model.state_dict())
        self._state = self.run.session.state()

    def new_run(
        self, dataset: Dataset[Any], *, sampling: SamplingRule | None = None, steps: int = 10**6, check: bool = False
    ) -> Run:
        """A run of the method on a fresh copy of the model."""
        sampling = sampling or self.sampling
        size = len(dataset)  # type: ignore[arg-type]
        return Run(
            copy.deepcopy(self._model),
            dataset,
            method=self.method,
            sampling=sampling,
            records=max(size, sampling.batch),
            users=range(size) if self._users else None,
            budget=Budget(noise=self.noise_multiplier, steps=steps, delta=self.delta),
            relation=self.relation,
            noise_level=self.noise_level,
            public=self._public,
            physical_batch=self._chunk if isinstance(dataset, _Pool) else "auto",
            check=check,
        )

    def _try_loss(self, inputs: Tensor, targets: Tensor) -> None:
        """A loss that cannot be computed would look like a broken promise."""
        try:
            with torch.no_grad():
                self.loss(copy.deepcopy(self._model), inputs, targets)
        except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"The loss cannot be computed on these records ({type(error).__name__}: {error}). It is called as "
                "loss(model, inputs, targets) and gives one loss for each record."
            ) from error

    def _try_out(self) -> None:
        """An ordinary step, with the checks that a run makes before its first: what a run refuses needs no audit."""
        with self.new_run(_Pool(self.base), check=True) as run, _quiet():
            try:
                step = run.step_on(np.arange(len(self.base)))
                for x, y in step:
                    step.backward(self.loss(run.model, x, y))
            except PrivetError:
                raise
            except Exception:
                log.debug("An ordinary step fails; the checks will say how.", exc_info=True)

    def _fresh(self) -> tuple[_Pool, Run, Desk]:
        run = self.new_run(_Pool(self.base))
        if self._users:
            run._users = _Singles()
        run.source = Desk(run.source)
        assert isinstance(run.dataset, _Pool)
        return run.dataset, run, run.source

    def close(self) -> None:
        self.run.close()

    def __enter__(self) -> MethodSubject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, sample: Sequence[Record], *, noise: bool) -> Outcome:
        self._desk.begin("noise" if noise else "off")
        self.run.model.load_state_dict(self._start)
        self.run.session.load_state(self._state)
        self.run.steps_done = self._steps_done  # always the same step: what depends on the epoch stays as it is
        return self._release(self._pool, self.run, self._desk, sample)

    def _release(self, pool: _Pool, run: Run, desk: Desk, sample: Sequence[Record]) -> Outcome:
        with _quiet():
            queries = self._take(pool, run, desk, sample)
        sums = {
            q.name: gradient_sum(q, run.sampling.batch) if q.group else noisy
            for q, noisy in zip(queries, desk.tape.outputs, strict=True)
        }
        return Outcome(
            sums=sums,
            sensitivities={
                q.name: {"add_remove": q.sensitivity.add_remove, "replace_one": q.sensitivity.replace_one}
                for q in queries
            },
            stds=dict(zip(sums, desk.stds, strict=True)),
            rounding=max(torch.finfo(p.dtype).eps / 2 for p in run.model.parameters()),
        )

    def restarts(self) -> Iterator[tuple[str, Outcome]]:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            pool, run, desk = self._fresh()
            with run:
                run.save(checkpoint)
                desk.begin("noise")
                yield "of two runs", self._release(pool, run, desk, self.base)
            for where in ("after resuming from a checkpoint", "after resuming from it again"):
                pool, run, desk = self._fresh()
                with run:
                    run.load(checkpoint)
                    desk.begin("noise")
                    yield where, self._release(pool, run, desk, self.base)

    def _take(self, pool: _Pool, run: Run, desk: Desk, sample: Sequence[Record]) -> list[Query]:
        """One real step of the run on this sample; gives the sums that it released, as the method declared them."""
        pool.records = list(sample)
        desk.numbers = [record.number for record in sample]
        declared: list[Query] = []
        finish = run.session.finish
        run.session.finish = lambda: declared.extend(finish()) or declared  # type: ignore[method-assign, func-returns-value]
        try:
            step = run.step_on(np.arange(len(sample)))
            with nullcontext() if desk.mode == "off" else _same_chance():
                for x, y in step:
                    step.backward(self.loss(run.model, x, y))
        finally:
            del run.session.finish
        return declared

    def gradient(self, record: Record) -> Callable[[Tensor], Tensor] | None:
        if not record.x.is_floating_point():
            return None
        model = self.run.model

        def gradient(x: Tensor) -> Tensor:
            loss = self.loss(model, x.unsqueeze(0), record.y.unsqueeze(0)).sum()
            trained = [p for p in model.parameters() if p.requires_grad]
            parts = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
            return torch.cat([part.flatten() for part in parts if part is not None])

        return gradient

    def train(self, samples: Sequence[Sequence[Record]], tape: Tape | None = None) -> tuple[Tape, dict[str, Any]]:
        pool, run, desk = self._fresh()
        desk.begin("noise" if tape is None else "replay", tape)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
        facts: dict[str, Any] = {}
        with run, _listening() as heard:
            for number, sample in enumerate(samples):
                try:
                    self._take(pool, run, desk, sample)
                    for name, p in run.model.named_parameters():
                        facts[f"gradient of {name} in step {number}"] = None if p.grad is None else p.grad.clone()
                    optimizer.step()
                except Exception as error:
                    facts[f"error in step {number}"] = f"{type(error).__name__}: {error}"
                for name, tensor in [*run.model.state_dict().items(), *run.model.named_buffers()]:
                    facts[f"{name} after step {number}"] = tensor.clone()
                facts[f"state of the method after step {number}"] = copy.deepcopy(run.session.state())
                facts[f"noise in step {number}"] = list(desk.stds)
                facts[f"steps and compositions paid after step {number}"] = (run.steps_done, run.units_spent)
            facts["what is declared"] = run.groups()
        facts["what was printed and logged"] = heard
        return desk.tape, facts


def gradient_sum(query: Query, batch: int) -> Tensor:
    """What was released of a sum: the gradients that were handed over, with divisor and factors put back."""
    assert query.group is not None
    scales = query.scales or dict.fromkeys(query.group.parameters, 1.0)
    parts = [(scales[name], p.grad) for name, p in query.group.parameters.items()]
    return torch.cat([part.double().flatten() * scale for scale, part in parts if part is not None]) * batch


@contextmanager
def _same_chance() -> Iterator[None]:
    """Everybody's generators start at the same place: noise that came from one of them would come again."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(0)
    np.random.seed(0)  # the one that others may draw from
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


@contextmanager
def _quiet() -> Iterator[None]:
    """Hostile records make other code complain, which is nobody's business in an audit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Everything that is printed, warned of or logged, in order."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(f"log: {record.getMessage()}")

    ear, root, printed = Ear(), logging.getLogger(), io.StringIO()
    level = root.level
    root.addHandler(ear)
    root.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings(record=True) as warned, redirect_stdout(printed), redirect_stderr(printed):
            warnings.simplefilter("always")
            yield heard
    finally:
        root.setLevel(level)
        root.removeHandler(ear)
        heard += [f"warning: {w.message}" for w in warned] + printed.getvalue().splitlines()
