"""What every method gives and gets. A method is one file in this folder that defines one `Method` and its `Session`.

A `Method` is the configuration: frozen, and public in the sense of privacy too. `open` attaches it to a model and
gives a `Session`, which turns the losses of one step into sums that one record can move by a known amount. Nothing
outside of this folder asks which method is running.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..accounting import Relation
from ..errors import ConfigError, Refused
from ..noise import Allocation, Source
from ..sampling import Sample

METHODS: dict[str, type[Method]] = {}
"""All methods by the name that the command line knows them under."""

_M = TypeVar("_M", bound="type[Method]")


def register(method: _M) -> _M:
    """Makes a method known by its `name`; its fields become options of the command line."""
    METHODS[method.name] = method
    return method


@dataclass(frozen=True)
class Sensitivity:
    """How far one record can move a sum, in L2 norm, under each relation (DESIGN, rule 1)."""

    add_remove: float
    replace_one: float

    @classmethod
    def of_contribution(cls, bound: float) -> Sensitivity:
        """A sum to which each record adds a vector of at most this norm: replacing one removes and adds."""
        return cls(add_remove=bound, replace_one=2 * bound)

    def under(self, relation: Relation) -> float:
        return self.add_remove if relation == "add_remove" else self.replace_one


@dataclass(frozen=True, eq=False)
class Query:
    """One sum over the sample that is about to be noised. All queries of a step are ONE mechanism (rule 2)."""

    name: str
    total: Tensor
    """Flat, float32 or better."""
    sensitivity: Sensitivity
    std: float | None = None
    """Its noise, where the method fixes it; otherwise the step allocates it."""
    group: ParameterGroup | None = None
    """The parameters whose gradient this is; None for a side query, whose noisy value goes to `Session.observe`."""
    scales: Mapping[str, float] | None = None
    """By what each parameter's gradient was multiplied in the sum: it is divided by it again after the noise."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run tells its method: public facts only."""

    batch: int
    noise_multiplier: float
    relation: Relation
    public: bool = False
    """Whether there are public records to learn from (`Session.learn`)."""


class ParameterGroup:
    """Named parameters whose summed gradient is one flat vector; `views` are its parts in the parameters' shapes.

    The layout is that of the parameters when the group was made, whatever becomes of theirs.
    """

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self.name = name
        self.parameters = dict(parameters)
        self.size = sum(p.numel() for p in self.parameters.values())
        self._layouts = {name: (p.shape, _dense_stride(p)) for name, p in self.parameters.items()}
        first = next(iter(self.parameters.values()))
        exact = any(p.dtype == torch.float64 for p in self.parameters.values())
        dtype = torch.float64 if exact else torch.float32
        self.total = torch.zeros(self.size, dtype=dtype, device=first.device)
        self.views = self.split(self.total)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat vector, each laid out in memory as its parameter is (channels last, for one)."""
        if flat.shape != (self.size,) or not flat.is_contiguous():
            raise ValueError(f"A vector of shape {tuple(flat.shape)} does not have {self.size} numbers in a row.")
        start = flat.storage_offset()
        parts: dict[str, Tensor] = {}
        for name, (shape, stride) in self._layouts.items():
            parts[name] = flat.as_strided(shape, stride, start)
            start += shape.numel()
        return parts


def _dense_stride(p: Tensor) -> tuple[int, ...]:
    """The parameter's own stride if it fills its memory (channels last does), else that of a contiguous one."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    dense = p.is_contiguous() or p.is_contiguous(memory_format=formats.get(p.dim(), torch.contiguous_format))
    return p.stride() if dense else torch.empty(p.shape, device="meta").stride()


class Method(ABC):
    """Configuration of a method; a frozen dataclass with keyword-only fields made by `option`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    records_must_be_independent: ClassVar[bool] = True
    """Whether one record's loss may not depend on another's (rule 6); false for batch clipping only."""
    allocation: Allocation

    @property
    def unit(self) -> Literal["record", "user"]:
        """What the method bounds, and so what a run with it protects."""
        return "record"

    @property
    def record_clip(self) -> float | None:
        """The norm that a record's whole gradient is clipped to, where there is one such number: for diagnostics."""
        return None

    def example(self, input_shape: tuple[int, ...], classes: int) -> nn.Module | None:
        """A small network for those who name none, where ordinary layers would not do."""
        return None

    def prepare(self, model: nn.Module) -> None:  # noqa: B027
        """Puts into the model what the method needs there and what stays there; done again it changes nothing."""

    @abstractmethod
    def open(self, model: nn.Module, setting: Setting) -> Session:
        """Attaches the method to the model; `Session.close` takes everything away again."""


class Session(ABC):
    """A method at work on one model.

    Formal guarantee: for two samples that differ by one record, the totals of `finish` differ by at most the
    sensitivity that stands in the query, in L2 norm, whatever the records, the weights and the loss are.
    """

    passes = 1
    """How often each unit is gone through."""

    def cut(self, sample: Sample, source: Source) -> list[Sample]:
        """The sample's record numbers in units that are never mixed in one forward pass; coins come from `source`."""
        return [sample]

    @abstractmethod
    def listening(self) -> AbstractContextManager[None]:
        """Active while the user's forward passes of a step run."""

    @abstractmethod
    def begin(self) -> None:
        """A new step starts from sums of zero."""

    @abstractmethod
    def add(self, losses: Tensor) -> None:
        """Adds the bounded contribution of one chunk of records."""

    def end_unit(self) -> None:  # noqa: B027
        """The chunk that was just added was the last one of its unit (see `cut`)."""

    @abstractmethod
    def finish(self) -> list[Query]:
        """The sums of the step, with what one record can move them by."""

    @property
    def post_processes(self) -> bool:
        """Whether `post_process` does anything."""
        return type(self).post_process is not Session.post_process

    def post_process(self, gradients: Mapping[str, Tensor], stds: Mapping[str, float]) -> None:  # noqa: B027
        """May change the noisy sums (by parameter, with the noise in each) in place before they are handed over."""

    def observe(self, noisy: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Noisy values of this step's side queries, free to use."""

    def handed_over(self) -> None:  # noqa: B027
        """The private gradient lies in the `grad` of the groups' parameters, where a method may move it on from."""

    def begin_epoch(self, number: int) -> None:  # noqa: B027
        """The first step of this epoch is next."""

    def wants_public(self) -> bool:
        """Whether public records should be gone through before the next epoch."""
        return False

    def learning(self) -> AbstractContextManager[None]:
        """Active while the user's forward passes over public records run."""
        return nullcontext()

    def learn(self, losses: Tensor) -> None:  # noqa: B027
        """Takes the losses of a batch of public records."""

    def learned(self) -> None:  # noqa: B027
        """All public records were gone through."""

    def reaches_others(self, losses: Tensor, record: int) -> str | None:
        """Where the loss of this (made-up) record depends on another record, if it does."""
        return None

    def bytes_per_record(self, records: int) -> int:
        """An estimate of the memory that one record takes, after one chunk of `records` was listened to."""
        return 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of this session: noisy or public values only."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restores `state`."""

    @abstractmethod
    def close(self) -> None:
        """Removes every hook."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise Refused("The model has no parameter that requires a gradient, so there is nothing to train.")
    for name, p in found.items():
        if isinstance(p, UninitializedParameter):
            raise Refused(
                f"Parameter '{name}' does not know its size yet (nn.Lazy…). Run a batch of the right shape through the "
                "model first, of zeros for example, then make the Run."
            )
        if not p.is_floating_point():
            raise Refused(f"Parameter '{name}' has {p.dtype} numbers; only real ones can be trained privately.")
    return found


def positive(name: str, value: float) -> None:
    """Refuses a number that is not positive and finite, by the name that the user gave it under."""
    if not (value > 0 and np.isfinite(value)):
        raise ConfigError(f"{name} must be a positive number, and is {value!r}.")
