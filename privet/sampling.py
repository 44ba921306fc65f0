"""Sample: who is in this step, by a rule that the accountant knows.

A `SamplingRule` is a public fact about a run. The records themselves, how many there really are, and the
randomness come in as arguments of `draw`. `ChunkSampler` hands the samples to torch's DataLoader in pieces
that fit in memory, and `steps` puts the pieces together again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from .errors import ConfigError, PrivetError
from .noise import Source

if TYPE_CHECKING:
    from .accounting import Mechanism, Relation

Sample = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SamplingRule(ABC):
    """How the records of each step are chosen; `batch` is the expected number, and the public divisor.

    `records` is always the public number of records, `size` the true number in the data set.
    """

    batch: int

    def __post_init__(self) -> None:
        if not isinstance(self.batch, int) or isinstance(self.batch, bool) or self.batch < 1:
            raise ConfigError(f"batch is {self.batch!r}: it must be a whole number of at least 1.")

    def check(self, records: int, relation: Relation) -> None:
        """Refuse what cannot be sampled or accounted."""
        if relation not in ("add_remove", "replace_one"):
            raise ConfigError(f"relation is {relation!r}: choose 'add_remove' or 'replace_one'.")
        if self.batch > records:
            raise ConfigError(f"batch is {self.batch}, more than the {records} records: choose at most {records}.")

    def steps_per_epoch(self, records: int) -> int:
        """How many steps are called an epoch: records / batch, rounded."""
        return max(1, round(records / self.batch))

    def units(self, steps: int, records: int) -> int:
        """How many compositions of `mechanism` the first `steps` steps cost."""
        return steps

    @abstractmethod
    def sensitivity_basis(self, relation: Relation) -> Relation:
        """The relation whose sensitivity the noise multiplier of `mechanism` is measured in."""

    def mechanism(
        self, *, records: int, noise_multiplier: float, relation: Relation, discrete: bool = False
    ) -> Mechanism:
        """What one unit costs, for the accountant."""
        from .accounting import Mechanism  # noqa: PLC0415 - a heavy import, which drawing does not need

        self.check(records, relation)
        return Mechanism(
            noise_multiplier=noise_multiplier,
            relation=relation,
            discrete=discrete,
            **self._cost(records),
        )

    @abstractmethod
    def _cost(self, records: int) -> dict[str, Any]:
        """The fields of `mechanism` that tell this rule from the others."""

    def epoch_key(self, source: Source) -> bytes | None:
        """What a checkpoint keeps to go on in the middle of an epoch: None if each step is drawn afresh."""
        return None

    def draw(
        self,
        size: int,
        records: int,
        source: Source,
        *,
        epoch_key: bytes | None = None,
        start: int = 0,
        steps: int | None = None,
    ) -> Iterator[Sample]:
        """The samples of `steps` steps, from step `start` of an epoch on (to its end if not given), lazily.

        Each is a sorted array of positions in the data set, and may be empty.
        """
        if steps is None:
            steps = self.steps_per_epoch(records) - start
        return self._samples(size=size, records=records, source=source, epoch_key=epoch_key, start=start, steps=steps)

    @abstractmethod
    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]: ...


@dataclass(frozen=True, kw_only=True)
class Poisson(SamplingRule):
    """Each record is in each step by its own coin, with probability batch / records.

    Formal guarantee: the coins are independent, and their probability depends on public numbers only, so
    that adding or removing a record changes nothing about the others.

    >>> Poisson(batch=256).steps_per_epoch(60000)
    234
    """

    def sensitivity_basis(self, relation: Relation) -> Relation:
        """Presence against absence: the accountant doubles it itself under replace_one."""
        return "add_remove"

    def _cost(self, records: int) -> dict[str, Any]:
        return {"kind": "poisson", "rate": self.batch / records}

    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]:
        for _ in range(steps):
            yield np.flatnonzero(source.coins(size, self.batch / records))


@dataclass(frozen=True, kw_only=True)
class FixedSize(SamplingRule):
    """Exactly `batch` records in each step, a uniform subset, drawn afresh each time.

    Formal guarantee: every subset of that size is equally likely. For replace_one only: with a record
    more or less, the sampling rate would change. The number of records is public under that relation, and
    must be the true one, as the accountant's rate is batch / records.
    """

    def check(self, records: int, relation: Relation) -> None:
        super().check(records, relation)
        if relation != "replace_one":
            raise ConfigError(
                f"relation is {relation!r}: FixedSize samples are accounted under 'replace_one' only. "
                "Set relation='replace_one', or sample by Poisson."
            )

    def sensitivity_basis(self, relation: Relation) -> Relation:
        return "replace_one"

    def _cost(self, records: int) -> dict[str, Any]:
        return {"kind": "fixed_size", "records": records, "batch": self.batch}

    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]:
        if size != records:
            raise ConfigError(
                f"records is {records}, but the data has {size}: FixedSize needs the true number, which "
                "replace_one does not protect. Leave records out, or sample by Poisson."
            )
        for _ in range(steps):
            yield source.subset(size, self.batch)


@dataclass(frozen=True, kw_only=True)
class Partition(SamplingRule):
    """Each record draws its batch number for the epoch, so that each is in exactly one step of an epoch.

    Formal guarantee: a record's batch number depends on the epoch's key and the record's own position
    alone, so that one record more or less changes one step per epoch and moves no other record. An epoch
    is therefore one Gaussian mechanism, and no amplification by sampling is claimed.

    The epoch's key lies in the checkpoint, so that an epoch can be finished after a crash. Whoever holds the
    key knows the batch of each position, and against them the guarantee is for records that keep their
    positions (a removed one leaves a hole): do not publish the keys.
    """

    def units(self, steps: int, records: int) -> int:
        """The epochs that the steps touch: a begun epoch counts in full."""
        return -(-steps // self.steps_per_epoch(records))

    def sensitivity_basis(self, relation: Relation) -> Relation:
        return relation

    def _cost(self, records: int) -> dict[str, Any]:
        return {"kind": "gaussian"}

    def epoch_key(self, source: Source) -> bytes:
        """A fresh key of 32 bytes for one epoch's batch numbers."""
        return source.words(4).tobytes()

    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]:
        batches = self.steps_per_epoch(records)
        if not 0 <= start <= start + steps <= batches:
            raise ConfigError(
                f"start is {start} and steps is {steps}: an epoch of this partition has {batches} steps. "
                "Draw a new epoch with a new key."
            )
        key = self.epoch_key(source) if epoch_key is None else epoch_key
        if len(key) != 32:
            raise ConfigError(f"epoch_key has {len(key)} bytes: it must have 32, as epoch_key() gives.")
        # Word i belongs to record i. The remainder is uniform to batches / 2^64, and privacy does not rest on
        # it; drawing again, as an exact one would need, makes later records depend on earlier ones.
        numbers = Source("seeded", seed=int.from_bytes(key, "big")).words(size) % np.uint64(batches)
        order = np.argsort(numbers, kind="stable")
        ends = np.searchsorted(numbers[order], np.arange(batches + 1, dtype=np.uint64))
        for step in range(start, start + steps):
            yield order[ends[step] : ends[step + 1]]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One physical piece of a sample: how many records, and whether a unit of the method ends with it."""

    size: int
    last_of_unit: bool


class ChunkSampler(Sampler[list[int]]):
    """A batch sampler for torch's DataLoader: each step's sample, cut into pieces of at most `chunk` records.

    `boundaries` holds the chunks of each step that was drawn and not yet taken by `steps`; they are there
    before the first chunk of the step is handed out, and empty for an empty sample. A method that works on
    parts of a sample (groups by coin) gives `cut`, which splits a sample into units; no chunk spans two.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        chunk: int | None = None,
        *,
        cut: Callable[[Sample], Sequence[Sample]] | None = None,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise ConfigError(f"chunk is {chunk}: it must be at least 1, or None for whole samples.")
        self.boundaries: deque[list[Chunk]] = deque()
        self._samples = samples
        self._chunk = chunk
        self._cut = cut

    def __iter__(self) -> Iterator[list[int]]:
        for sample in self._samples:
            units = [sample] if self._cut is None else self._cut(sample)
            pieces = [(piece, last) for unit in units for piece, last in self._pieces(unit)]
            self.boundaries.append([Chunk(size=len(piece), last_of_unit=last) for piece, last in pieces])
            for piece, _ in pieces:
                yield piece.tolist()

    def _pieces(self, unit: Sample) -> Iterator[tuple[Sample, bool]]:
        length = self._chunk or max(1, len(unit))
        for start in range(0, len(unit), length):
            yield unit[start : start + length], start + length >= len(unit)


_END = object()


def steps(batches: Iterator[Any], sampler: ChunkSampler) -> Iterator[Iterator[tuple[Any, Chunk]]]:
    """The logical steps of an epoch, each an iterator over its collated chunks (none for an empty sample).

    `batches` iterates a DataLoader that has `sampler` as its `batch_sampler`; with workers, the sampler runs
    ahead. Nothing is fetched before it is asked for. Chunks of a step that the caller leaves are skipped.
    """
    held: deque[Any] = deque()

    def fetch() -> Any:
        return held.popleft() if held else next(batches, _END)

    def chunks_of(step: list[Chunk]) -> Iterator[tuple[Any, Chunk]]:
        for chunk in step:
            batch = fetch()
            if batch is _END:
                raise PrivetError("The loader ended within a step: it must yield every chunk of its batch sampler.")
            yield batch, chunk

    while True:
        if not sampler.boundaries:
            # Only the loader can make the sampler draw on; what it fetches belongs to a later step, and empty
            # samples before that one (or before the end) are in `boundaries` by then.
            batch = fetch()
            if batch is not _END:
                held.append(batch)
            elif not sampler.boundaries:
                return
        chunks = chunks_of(sampler.boundaries.popleft())
        yield chunks
        deque(chunks, maxlen=0)
