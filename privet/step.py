"""One private step: sample → bound → record → add noise → post-process → p.grad. Read this file first.

    for step in run.loader:                 # one private step at a time
        for x, y in step:                   # its sample, in chunks that fit in memory; none if the sample is empty
            step.backward(loss(model(x), y))    # one loss per record
        optimizer.step()                    # p.grad now holds the private gradient

The release happens when the inner loop ends. Until then every `p.grad` is None, so that an optimizer that is called
too early changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .accounting import Relation
from .errors import PrivetError, Refused
from .methods import Query, Session
from .noise import Allocation, Source, allocate, effective_multiplier, exact_std
from .probe import Probe
from .sampling import Chunk


@dataclass(frozen=True, eq=False)
class Release:
    """What leaves a step: noisy sums and public facts, free to compute with (rule 11).

    A post-processor takes one and changes `gradients` (by parameter name, noisy sums, not yet divided) as it likes.
    """

    gradients: dict[str, Tensor]
    stds: dict[str, float]
    """Standard deviation of the noise in each parameter's sum."""
    batch: int
    """The public divisor."""


PostProcess = Callable[[Release], None]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What holds for every step of a run: public facts only."""

    batch: int
    noise_multiplier: float
    basis: Relation
    """Under which relation the accountant measures sensitivity against noise."""
    allocation: Allocation
    post: Sequence[PostProcess] = ()


class Step:
    """One private step over one sample."""

    def __init__(
        self,
        chunks: Iterator[tuple[Any, Chunk]],
        session: Session,
        source: Source,
        rules: Rules,
        record: Callable[[], Callable[[], None]],
        probe: Callable[[], Probe | None] = lambda: None,
        public: Iterable[tuple[Any, int]] | None = None,
    ) -> None:
        self._chunks, self._session, self._source = chunks, session, source
        self._rules, self._record, self._probe, self._public = rules, record, probe, public
        self._waiting: tuple[int, Callable[[Tensor], None]] | None = None
        self._begun = False
        self.open = False
        """Whether the inner loop is going on."""
        self.released = False

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise Refused("A step is gone through once: what it released, or left undone, cannot be done again.")
        self._begun = True
        if (probe := self._probe()) is not None:  # as the model is now
            for batch, size in probe.batches():
                yield from self._ask(batch, size, probe.take, self._session.listening)
        if self._public is not None:
            for batch, size in self._public:
                yield from self._ask(batch, size, self._session.learn, self._session.learning)
            self._session.learned()
        self._session.begin()
        for batch, chunk in self._chunks:  # sample
            yield from self._ask(batch, chunk.size, self._session.add, self._session.listening)  # bound
            if chunk.last_of_unit:
                self._session.end_unit()
        self._release()

    def _ask(
        self,
        batch: Any,
        size: int,
        take: Callable[[Tensor], None],
        watching: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[Any]:
        self._waiting = (size, take)
        self.open = True
        try:
            with watching():
                yield batch
        finally:
            self.open = False
        if self._waiting is not None:
            raise Refused(
                "The losses of a chunk were not handed in. Call step.backward(losses) once for each chunk, with one "
                "loss per record."
            )

    def backward(self, losses: Tensor) -> None:
        """Takes the losses of the current chunk, one per record; their bounded gradients join the step's sums."""
        if self._waiting is None:
            raise Refused("step.backward(losses) belongs inside `for batch in step:`, once for each chunk.")
        size, take = self._waiting
        check_losses(losses, size)
        self._waiting = None  # also if it fails half-way: a chunk handed in again would count twice
        take(losses)

    def _release(self) -> None:
        queries = self._session.finish()
        stds = noise_stds(queries, self._rules, self._source)
        paid = self._record()  # the disk writes while noise is drawn
        try:
            noisy = {
                q.name: self._source.add_noise(q.total, std, out=torch.empty_like(q.total))
                for q, std in zip(queries, stds, strict=True)
            }
        finally:
            paid()  # durably, before anything leaves this method
        self._session.observe({q.name: noisy[q.name] for q in queries if q.group is None})
        for query in queries:
            unscale(query, noisy[query.name])
        self._post_process(queries, stds, noisy)
        hand_over(queries, noisy, self._rules.batch)
        self._session.handed_over()
        self.released = True

    def _post_process(self, queries: list[Query], stds: list[float], noisy: dict[str, Tensor]) -> None:
        if not (self._rules.post or self._session.post_processes):
            return
        gradients: dict[str, Tensor] = {}
        of_parameter: dict[str, float] = {}
        for query, std in zip(queries, stds, strict=True):
            if query.group is not None:
                gradients |= query.group.split(noisy[query.name])
                of_parameter |= {n: std / (query.scales[n] if query.scales else 1) for n in query.group.parameters}
        self._session.post_process(gradients, of_parameter)
        release = Release(dict(gradients), of_parameter, self._rules.batch)
        for process in self._rules.post:
            process(release)
        for name, part in gradients.items():
            if release.gradients[name] is not part:
                part.copy_(release.gradients[name])


def noise_stds(queries: Sequence[Query], rules: Rules, source: Source) -> list[float]:
    """The standard deviation for each query such that together they have exactly the run's noise multiplier.

    Formal guarantee (rule 2): Σ (Δ/std)² over all queries equals 1/σ², those with a std of their own included.
    """
    deltas = [q.sensitivity.under(rules.basis) for q in queries]
    if rules.noise_multiplier == 0:
        return [0.0] * len(queries)
    spent = sum((d / q.std) ** 2 for q, d in zip(queries, deltas, strict=True) if q.std is not None)
    left = rules.noise_multiplier**-2 - spent
    if left <= 0:
        raise PrivetError(
            "The side queries of this method cost more than the whole step may at noise multiplier "
            f"{rules.noise_multiplier:.4g}. Use a larger batch or a larger noise multiplier."
        )
    free = [i for i, q in enumerate(queries) if q.std is None]
    sizes = [queries[i].total.numel() for i in free]
    shared = allocate([deltas[i] for i in free], sizes, left**-0.5, rules.allocation)
    by_query = dict(zip(free, shared, strict=True))
    stds = [by_query[i] if q.std is None else q.std for i, q in enumerate(queries)]
    if source.level == "exact":
        stds = [exact_std(std, d, q.total.numel()) for std, d, q in zip(stds, deltas, queries, strict=True)]
    else:
        assert math.isclose(effective_multiplier(deltas, stds), rules.noise_multiplier, rel_tol=1e-9)
    return stds


def unscale(query: Query, noisy: Tensor) -> None:
    """Undoes the factors that a method put on the parts of its sum."""
    if query.group is not None and query.scales is not None:
        for name, part in query.group.split(noisy).items():
            part.div_(query.scales[name])


def hand_over(queries: Sequence[Query], noisy: Mapping[str, Tensor], batch: int) -> None:
    """Divides by the public batch size and puts the parts where optimizers look for them."""
    groups = [(query.group, noisy[query.name]) for query in queries if query.group is not None]
    if groups:
        torch._foreach_div_([total for _, total in groups], batch)
    for group, total in groups:
        for name, part in group.split(total).items():
            parameter = group.parameters[name]
            parameter.grad = part if part.dtype == parameter.dtype else part.to(parameter.dtype)


def check_losses(losses: Tensor, records: int) -> None:
    """Rule 5: one loss per record, and no reduction is guessed."""
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise Refused(
            f"The losses must be a vector with one entry per record, and are {shape}. A scalar has already mixed the "
            "records, so that none can be bounded: use reduction='none' and average over everything but the records."
        )
    if losses.shape[0] != records:
        raise Refused(f"There are {records} records in this chunk and {losses.shape[0]} losses: hand in one for each.")
    if not losses.requires_grad:
        raise Refused("The losses do not depend on any trainable parameter: were they computed under no_grad?")
    if not losses.is_floating_point():
        raise Refused(f"The losses must be floating-point numbers, and are {losses.dtype}.")
