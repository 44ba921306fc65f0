"""A private training run: a model, a data set, a method, a sampling rule and a budget, put together once."""

from __future__ import annotations

import logging
import os
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from . import checkpoint
from .accounting import Guarantee, Mechanism, Relation, Spent, count_for, epsilon
from .errors import BudgetExceeded, ConfigError, Refused
from .guard import OptimizerGuard
from .ledger import Entry, Ledger
from .memory import keep_freed_memory
from .methods import Method, Setting
from .noise import Level, Source
from .planning import Budget, Plan, plan, steps_within
from .probe import Probe
from .query import PlannedQueries, Vectors, bounded_sums, check_bounds, record_shares, refuse_mixed, release_sums
from .records import length, options_for_loader, records_by_user, refuse_overlap
from .sampling import Chunk, ChunkSampler, Sample, SamplingRule, steps
from .state import Buffers, Parameters, layers_of, parameters_of
from .statement import statement
from .step import PostProcess, Rules, Step, check_losses, noise_stds, unscale

log = logging.getLogger("privet")

_MEMORY_SHARE = 0.25
"""The part of the free memory that a physical batch may be planned to fill."""
_MEMORY_MOST = 2**31
"""Bytes that it is planned to fill at the most. Samples vary in size, and what is freed after one seldom fits the next:
a process of large physical batches grows to several times what a step needs, and is no faster for it."""
_UNMEASURED = 256
"""Records in a physical batch where nobody said how many and no made-up record was measured."""
_COPIES = 4
"""What a forward pass keeps is met again as gradients and temporaries: this many times over, all in all."""


class Run:
    """Makes an ordinary training loop private.

        run = privet.Run(model, dataset, method=privet.PerExample(clip=1.0), sampling=privet.Poisson(batch=256),
                         budget=privet.Budget(epsilon=3, delta=1e-5, epochs=10), ledger="mnist.ledger")
        for epoch in range(10):
            for step in run.loader:
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()

    Args:
        model: stays what it is: same class, same `state_dict` but for parts that the method needs in it (input clips of
            backpropagation clipping). Hooks are removed by `close`.
        dataset: map-style, one item per record.
        relation: `add_remove` (default) or `replace_one`.
        records: the public number of records; by default the length of the data set, which then counts as public.
        ledger: the data set's account (a path or a `Ledger`); without one, only this process knows what was spent.
        noise_level: `system` (default), `exact`, or `seeded` (with `seed`), which claims nothing.
        physical_batch: how many records go through the model at once; by default what fits in memory, within 2 GiB.
        loader_options: for torch's `DataLoader`: collate_fn, num_workers, pin_memory, …
        post: post-processors of the noisy sum, in order.
        users: whose record each one is, one id for each: then whole users are sampled and protected, `records` and
            the batch count users, and the method must take users for groups (`Batch(record_groups="user")`).
        queries: noise multipliers of sums over all records (`query`) that belong to this run: its budget pays for
            them and for the steps.
        public: records that need no protection, in the form of the data set's. Methods that learn from such
            (thresholds, statistics of BatchNorm) go through them at the start of each epoch, through the same loop.
        keep_memory: whether freed memory stays with this process (`privet.memory`), which makes every step faster.
        check: whether the user's losses are tried on made-up records before the first step (`privet.probe`).

    Formal guarantee: all that this run releases through `p.grad` and `query`, in all its steps together, is
    (`epsilon`, δ)-differentially private for the stated relation, if the user trains on nothing else of the data,
    looks at nothing else of it, and the source of randomness is unpredictable.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        *,
        method: Method,
        sampling: SamplingRule,
        budget: Budget,
        relation: Relation = "add_remove",
        unit: str = "record",
        records: int | None = None,
        ledger: Ledger | str | Path | None = None,
        noise_level: Level = "system",
        seed: int | None = None,
        physical_batch: int | Literal["auto"] = "auto",
        loader_options: Mapping[str, Any] | None = None,
        post: Sequence[PostProcess] = (),
        users: Sequence[Hashable] | None = None,
        queries: Sequence[float] = (),
        public: Dataset[Any] | None = None,
        check: bool = True,
        keep_memory: bool = True,
        run_id: str | None = None,
    ) -> None:
        if keep_memory:
            keep_freed_memory()
        self._users = None if users is None else records_by_user(users, length(dataset))
        self.size = length(dataset) if self._users is None else len(self._users)
        if (method.unit == "user") != (users is not None):
            raise ConfigError(
                "A run over users needs a method that bounds users, and the other way round: give the run users=… (one "
                "id for each record) and take Batch(record_groups='user'); as options, --users COLUMN --method batch "
                "--record-groups user."
            )
        unit = "user" if users is not None and unit == "record" else unit
        if records is not None and records < 1:
            raise ConfigError(f"records must be at least 1, and is {records!r}.")
        self.records, self.records_stated = records or self.size, records is not None
        if physical_batch != "auto" and physical_batch < 1:
            raise ConfigError(f"physical_batch must be at least 1 or 'auto', and is {physical_batch!r}.")
        self.model, self.dataset, self.method, self.sampling = model, dataset, method, sampling
        self.relation, self.unit, self.budget = relation, unit, budget
        self.source = Source(noise_level, seed=seed)
        self._queries = PlannedQueries(queries, relation, self.source)
        self.plan = self._plan()
        self.id = run_id or uuid.uuid4().hex
        self.steps_done = 0
        self._pending: Step | None = None
        self._repeats = self._resumed = False
        self._epoch_key = sampling.epoch_key(self.source)
        self._physical = None if physical_batch == "auto" else physical_batch
        self._options = options_for_loader(loader_options or {}, dataset)
        self._rules = Rules(
            batch=sampling.batch,
            noise_multiplier=self.plan.mechanism.noise_multiplier,
            basis=sampling.sensitivity_basis(relation),
            allocation=method.allocation,
            post=tuple(post),
        )
        self._items = _spread(dataset) if check else []
        self.public = public
        if public is not None:
            refuse_overlap(dataset, public)
        setting = Setting(
            batch=sampling.batch,
            noise_multiplier=self._rules.noise_multiplier,
            relation=relation,
            public=public is not None,
        )
        self.ledger, self._own_ledger = _open(ledger)
        with ExitStack() as undo:  # a run that cannot begin leaves the model and the ledger as they were
            undo.callback(self._close_ledger)
            self.session = method.open(model, setting)
            undo.callback(self.session.close)
            self._entries = self._open_entries()
            self._read_ledger()
            undo.pop_all()
        self.checks_independence = check and method.records_must_be_independent
        self._probe: Probe | None = None
        self._modes: list[bool] = []
        self._iterations = 0
        self._held: tuple[Buffers, Parameters] | None = None
        self._process = os.getpid()
        self._optimizers = OptimizerGuard(model, weakref.ref(self))
        weakref.finalize(self, self._optimizers.close)
        self._closed = False

    @property
    def loader(self) -> Loader:
        """Iterate over it for one epoch of private steps."""
        return Loader(self)

    @property
    def noise_multiplier(self) -> float:
        return self.plan.mechanism.noise_multiplier

    @property
    def finished(self) -> bool:
        """Whether the planned steps are done or the budget allows no further one."""
        return self.steps_done >= self.plan.steps or not self._affordable()

    @property
    def in_step(self) -> bool:
        """Whether a step's sample is still coming in, so that its private gradient is not there yet."""
        return self._pending is not None and self._pending.open

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """What this run has spent so far."""
        return epsilon(self.ledger.spent(run=self.id), self.plan.delta if delta is None else delta)

    @property
    def epsilon(self) -> float:
        return self.guarantee().epsilon

    def save(self, path: str | Path, **stateful: Any) -> None:
        """Writes a checkpoint of the model, the run and everything given that has a `state_dict` (no pickle)."""
        self._refuse_in_step("saved")
        checkpoint.save(self, Path(path), stateful)

    def load(self, path: str | Path, **stateful: Any) -> None:
        """Continues from a checkpoint: with fresh noise, paying for steps that are done again."""
        self._refuse_in_step("loaded")
        checkpoint.load(self, Path(path), stateful)

    def _refuse_in_step(self, done: str) -> None:
        if self.in_step:
            raise Refused(
                f"A checkpoint cannot be {done} inside of `for batch in step:`, where the model may be in the middle "
                "of something private. Move it out of that loop, one level to the left."
            )

    def terms(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued: all that its payments rest on."""
        return {
            "sampling": f"{type(self.sampling).__name__} {asdict(self.sampling)}",
            "number of records": self.records,
            "mechanism": self.plan.mechanism.to_json(),
            "unit": self.unit,
            **({"queries": [(m.to_json(), n) for m, n in self.plan.before]} if self.plan.before else {}),
        }

    def _continue(self, run: str, steps_done: int, epoch_key: bytes | None, spent: Spent) -> None:
        """Goes on as an earlier run. The ledger is the truth; where it knows less than the checkpoint, it is told."""
        self._pending = None
        self._iterations += 1  # a loop that is going on has drawn its samples for where it was
        self.id = run
        self.steps_done = steps_done
        self._epoch_key = epoch_key or self.sampling.epoch_key(self.source)
        known = dict(self.ledger.spent(run=run))
        for mechanism, count in spent:
            if (missing := count - known.get(mechanism, 0)) > 0:
                entry = self.ledger.open_run(run, mechanism, unit=self.unit, note=self.method.name)
                self.ledger.charge(entry, step=steps_done, units=missing)
        self._entries = self._open_entries()
        self._read_ledger()
        self._repeats = self.ledger.last_step(run) > steps_done
        self._resumed = True

    def _read_ledger(self) -> None:
        """What this run has paid, and how many compositions of its steps fit beside its queries.

        A query that is asked again after a crash is paid again, so that fewer steps fit than were planned.
        """
        spent = self._spent_as_planned()
        self.units_spent = spent.pop(self.plan.mechanism, 0)
        self.queries_paid = sum(spent.values())
        self._limit, planned = self.plan.limit, dict(self.plan.before)
        if self._limit is not None and any(count > planned.get(m, 0) for m, count in spent.items()):
            assert self.budget.epsilon is not None
            beside = [(m, max(spent.get(m, 0), planned.get(m, 0))) for m in planned | spent]
            fit = count_for(self.plan.mechanism, self.budget.epsilon, self.budget.delta, before=beside)
            self._limit = min(self._limit, fit)

    def _open_entries(self) -> dict[Mechanism, Entry]:
        """Registers the run's mechanisms, that of its steps last, as the one that the ledger names the run by."""
        limit = None if self.budget.epsilon is None else (self.budget.epsilon, self.budget.delta)
        return {
            mechanism: self.ledger.open_run(
                self.id,
                replace(mechanism, seeded=self.source.level == "seeded"),
                unit=self.unit,
                budget=limit,
                planned=self.plan.units,
                note=self.method.name,
            )
            for mechanism in (*self._queries.cost, self.plan.mechanism)
        }

    def _spent_as_planned(self) -> dict[Mechanism, int]:
        """What this run has paid; noise that is seeded, which is worth nothing, as if it were not."""
        return {replace(mechanism, seeded=False): count for mechanism, count in self.ledger.spent(run=self.id)}

    def close(self) -> None:
        """Removes the hooks and closes the ledger; the model is as it was."""
        self._close(note_end=True)

    def _close(self, *, note_end: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self.session.close()
        self._optimizers.close()
        if note_end and self.finished:
            self.ledger.finish_run(self.id)
        self._close_ledger()

    def _close_ledger(self) -> None:
        if self._own_ledger:
            self.ledger.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self._close(note_end=failure is None)  # what failed after the last step may not have been handed on

    # What is asked of all records at once

    def query(self, vectors: Vectors, *, bounds: Sequence[float], noise: float) -> list[tuple[Tensor, float]]:
        """Noisy sums over all records, for statistics that the model needs before it is trained.

        Args:
            vectors: for a batch, one or more tensors (records, size), each row computed from its record alone.
            bounds: longer rows are clipped to this norm, one for each tensor; a record with a value that is not finite
                adds nothing. They must not come from the records.
            noise: one of the run's `queries`: the noise multiplier of all sums together.

        Returns each sum in float64 with the standard deviation of its noise. Divide by `records`, the public number.
        Where users are protected, a user adds the mean over their records. Whoever asks again after loading a
        checkpoint pays again.

        Formal guarantee: ONE Gaussian mechanism without sampling (rule 2), paid for before its noise is drawn.
        """
        check_bounds(bounds)
        self._queries.refuse_more(noise)
        refuse_mixed(vectors, self._items, self._options["collate_fn"])
        loader = DataLoader(self.dataset, batch_size=self._physical or _UNMEASURED, **self._options)
        sums = bounded_sums(vectors, bounds, loader, record_shares(length(self.dataset), self._users))
        rules = replace(self._rules, noise_multiplier=noise, basis=self.relation, allocation="proportional")
        return release_sums(sums, rules, self.source, lambda: self._record_query(noise))

    def _record_query(self, noise: float) -> None:
        """Pays for a query. Called after its sums are bounded and before their noise is drawn."""
        mechanism, limit = self._queries.mechanisms[noise], self.budget.epsilon
        spent = [*self._spent_as_planned().items(), (mechanism, 1)]
        if limit is not None and epsilon(spent, self.budget.delta).epsilon > limit:
            raise BudgetExceeded("Asking all records again would exceed the budget of the run, so it was not done.")
        self.ledger.charge(self._entries[mechanism], step=self.steps_done)
        self._queries.take(noise)
        self._read_ledger()

    def _plan(self) -> Plan:
        made = plan(
            self.budget,
            self.sampling,
            records=self.records,
            relation=self.relation,
            discrete=self.source.level == "exact",
            before=tuple(self._queries.cost.items()),
        )
        if made.mechanism in self._queries.cost:
            raise ConfigError(
                "A query over all records and the steps have the same noise multiplier without sampling, so the ledger "
                f"could not tell them apart: change one of them a little from {made.mechanism.noise_multiplier:g}."
            )
        return made

    # One step after the other

    def _epoch(self) -> Iterator[Step]:
        """The steps from here to the end of the epoch, or of the plan."""
        length = self.sampling.steps_per_epoch(self.records)
        start = self.steps_done % length
        count = min(length - start, max(0, self.plan.steps - self.steps_done))
        samples = self.sampling.draw(
            self.size, self.records, self.source, epoch_key=self._epoch_key, start=start, steps=count
        )
        drawn = self._load(samples)
        if self._iterations == 0:
            self._warn_of_the_ledger()
        self._iterations += 1
        this = self._iterations
        for _ in range(count):
            if this != self._iterations:
                raise Refused(
                    "This loop over run.loader was overtaken by a newer one, or by run.load: begin a new one, and use "
                    "one at a time."
                )
            if not self._affordable():
                log.warning("The budget is spent after %d steps: training ends here.", self.steps_done)
                return
            if self._pending is not None and not self._pending.released:
                raise Refused(
                    "The last step was left before its sample ended, so nothing was released. Let the inner loop "
                    "`for batch in step:` run to its end."
                )
            yield self._step(drawn)

    def _warn_of_the_ledger(self) -> None:
        """Says at the start how many of the steps to come fit into what the data set's budget has left."""
        budget, spent, mechanism = self.ledger.budget, self.ledger.spent(), self.plan.mechanism
        paid = self.sampling.units(self.steps_done, self.records)
        if budget is None or epsilon([*spent, (mechanism, self.plan.units - paid)], budget[1]).epsilon <= budget[0]:
            return
        units = paid + count_for(mechanism, *budget, before=spent)
        fit, wanted = (n - self.steps_done for n in (steps_within(units, self.sampling, self.records), self.plan.steps))
        if 0 < fit < wanted:  # where none fits, the first step says so
            log.warning(
                "%d of the %d steps to come fit into what is left of the data set's budget (epsilon %g at delta %g, "
                "ledger %s): training will end there.",
                fit,
                wanted,
                *budget,
                self.ledger.path,
            )

    def step_on(self, sample: Sample) -> Step:
        """A private step on these positions of the data set, in place of a sample drawn by the rule.

        For audits, which must choose both of two neighbouring samples. It is paid for, but what it costs is what the
        rule's samples cost: do not train on private records with it.
        """
        return self._step(self._load([np.asarray(sample, dtype=np.int64)]))

    def _step(self, drawn: Iterator[Iterator[tuple[Any, Chunk]]]) -> Step:
        self._drop_gradients()
        epoch, place = divmod(self.steps_done, self.sampling.steps_per_epoch(self.records))
        if place == 0:
            self.session.begin_epoch(epoch)
        public = (
            self._public_batches() if place == 0 and self.public is not None and self.session.wants_public() else None
        )
        self._pending = Step(
            self._chunks(drawn), self.session, self.source, self._rules, self._record, self._new_probe, public
        )
        return self._pending

    def _drop_gradients(self) -> None:
        for parameter in parameters_of(self.model).values():
            parameter.grad = None

    def _public_batches(self) -> Iterator[tuple[Any, int]]:
        """All public records, in batches like those of the private ones; a last one of other size is left out."""
        assert self.public is not None
        size = min(self.sampling.batch, self._physical or _UNMEASURED, length(self.public))
        loader = DataLoader(self.public, batch_size=size, drop_last=True, **self._options)
        return ((batch, size) for batch in loader)

    def refresh(self) -> Iterator[Any]:
        """Batches of public records to run the model on before it is released, for statistics of its last weights.

        for x, y in run.refresh():
            model(x)
        """
        if self.public is None:
            raise ConfigError("There are no public records to go through: make the Run with public=….")
        try:
            with self.session.learning():
                for batch, _ in self._public_batches():
                    yield batch
        finally:
            self.session.learned()

    def public_gradient(self, losses: Callable[[Any], Tensor]) -> dict[str, Tensor]:
        """What p.grad would be, by parameter name, after a step without noise on a batch of public records.

        They are drawn anew each time, and bounded as private ones are. `losses` takes a batch and gives one loss per
        record. It reads nothing private, so it costs nothing; `Denoise(priors="public")` learns from it. What lies in
        p.grad is dropped, as when a step begins.
        """
        size = self.sampling.batch
        if self.public is None or length(self.public) < size or self._users is not None:
            there = 0 if self.public is None else length(self.public)
            raise ConfigError(
                f"A public gradient takes {size} public records, as many as a batch has, and there are {there}: name "
                "more of them (public=…, --public), or take a smaller batch. A run over users has none."
            )
        if self.in_step:
            raise Refused("A public gradient cannot be computed inside of a step: move it out of `for batch in step:`.")
        self._drop_gradients()
        if self.session.wants_public():
            with self.session.learning():
                for batch, _ in self._public_batches():
                    self.session.learn(losses(batch))
            self.session.learned()
        sampler = ChunkSampler(
            [self.source.subset(length(self.public), size)],
            self._physical or _UNMEASURED,
            cut=lambda sample: self.session.cut(sample, self.source),
        )
        self.session.begin()
        for chunks in steps(iter(DataLoader(self.public, batch_sampler=sampler, **self._options)), sampler):
            for batch, chunk in chunks:
                with self.session.listening():
                    given = losses(batch)
                    check_losses(given, chunk.size)
                    self.session.add(given)
                if chunk.last_of_unit:
                    self.session.end_unit()
        found: dict[str, Tensor] = {}
        for query in self.session.finish():
            if query.group is not None:
                total = query.total / size
                unscale(query, total)
                found |= query.group.split(total)
        return found

    def _chunks(self, drawn: Iterator[Iterator[tuple[Any, Chunk]]]) -> Iterator[tuple[Any, Chunk]]:
        """The chunks of the next sample, with a note of what the model was before it."""
        if self.method.records_must_be_independent:  # others see to it themselves
            self._held = Buffers(self.model), Parameters(self.model)
        for sample in islice(drawn, 1):
            yield from sample

    def _refuse_changes(self) -> None:
        """Refuses to release what comes of a forward pass that left something of private records in the model."""
        if self._held is not None:
            (buffers, parameters), self._held = self._held, None
            if changed := buffers.restore():
                raise Refused(
                    f"Buffer '{changed[0]}' was changed by a forward pass over private records, so it carries "
                    "statistics of them. It was put back, and nothing was released. Freeze that layer: .eval()."
                )
            if changed := parameters.changed():
                raise Refused(
                    f"Parameter '{changed[0]}' was changed in the middle of a private step, by other means than its "
                    "gradient. Nothing was released, but that parameter may carry private records now: take the "
                    "model from before."
                )
        if self.checks_independence and self._modes != self._modes_now():
            raise Refused(
                "A layer was switched between training and evaluation in the middle of a step, after it was checked "
                "that records do not depend on each other. Nothing was released. Call .train() and .eval() between "
                "steps."
            )

    def _load(self, samples: Iterable[Sample]) -> Iterator[Iterator[tuple[Any, Chunk]]]:
        """The chunks of each sample, through the user's own collate function and workers. Starts when first asked."""
        self._end_probe()
        sampler = ChunkSampler(samples, self._physical, cut=self._cut)
        yield from steps(iter(DataLoader(self.dataset, batch_sampler=sampler, **self._options)), sampler)

    def _cut(self, sample: Sample) -> list[Sample]:
        """The sample in units that are never mixed in one forward pass: the method's, or one for each user."""
        if self._users is None:
            return self.session.cut(sample, self.source)
        return [self._users[user] for user in sample for _ in range(self.session.passes)]

    def _new_probe(self) -> Probe | None:
        """A check on made-up records is due before the first step, and whenever a layer's mode has changed since."""
        modes = self._modes_now()
        if not self.checks_independence or modes == self._modes:
            return None
        self._modes = modes
        self._probe = Probe(self.model, self.session, self._items, self._options["collate_fn"])
        return self._probe

    def _modes_now(self) -> list[bool]:
        return [layer.training for layer in layers_of(self.model).values()]

    def _end_probe(self) -> None:
        """After made-up records went through the model it is known how much memory one of them takes."""
        if self._probe is None and self._physical is None:
            self._physical = _UNMEASURED
        if self._probe is not None and self._physical is None:
            per_record = self.session.bytes_per_record(self._probe.records_seen) * _COPIES
            per_record += sum(p.numel() * p.element_size() for p in self.model.parameters())
            room = min(_MEMORY_MOST, psutil.virtual_memory().available * _MEMORY_SHARE)
            self._physical = max(1, int(room / per_record))
            log.info("Physical batches of at most %d records (%d bytes each).", self._physical, per_record)
        self._probe = None

    def _affordable(self) -> bool:
        return self._limit is None or self.units_spent + self._units_due() <= self._limit

    def _units_due(self) -> int:
        """Compositions that the next step costs: what the rule says, or one more where a step is done again."""
        done = self.steps_done
        due = self.sampling.units(done + 1, self.records) - self.sampling.units(done, self.records)
        return max(due, 1) if self._repeats else due

    def _record(self) -> Callable[[], None]:
        """Begins to pay for the next step, after its sums are bounded. What it gives waits until that is on the disk.

        Nothing may be released before.
        """
        self._refuse_changes()
        if os.getpid() != self._process:
            raise Refused(
                "This run was made in another process, and both would go on with the same samples while one of them "
                "is paid for. Make the Run in the process that trains, or save a checkpoint and load it there."
            )
        if not self._affordable():
            raise BudgetExceeded(f"Step {self.steps_done + 1} would exceed the budget, so it was not taken.")
        step, due = self.steps_done + 1, self._units_due()
        entry = self._entries[self.plan.mechanism]
        payment = self.ledger.begin_charge(entry, step=step, units=due, resumed=self._resumed, limit=self._limit)

        def paid() -> None:
            self.units_spent += payment.wait()
            self._resumed = self._repeats = False
            self.steps_done += 1
            if self.steps_done % self.sampling.steps_per_epoch(self.records) == 0:
                self._epoch_key = self.sampling.epoch_key(self.source)

        return paid

    def statement(self) -> dict[str, Any]:
        """The privacy statement: what is protected, how, at what cost, and what is not covered. Public facts only."""
        return statement(self)

    def groups(self) -> list[dict[str, Any]]:
        """What is released in a step: each sum with its size, sensitivity and noise."""
        queries = self.session.finish()
        stds = noise_stds(queries, self._rules, self.source)
        return [
            {
                "group": q.name,
                "parameters": q.total.numel(),
                "sensitivity": q.sensitivity.under(self.relation),
                "noise_std": std,
            }
            for q, std in zip(queries, stds, strict=True)
        ]


class Loader:
    """One epoch of private steps each time it is iterated over; ends early when the plan or the budget ends."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Step]:
        return self._run._epoch()

    def __len__(self) -> int:
        return self._run.sampling.steps_per_epoch(self._run.records)


def _spread(dataset: Dataset[Any]) -> list[Any]:
    """A few items from all over the data set, which may be sorted, or alternate."""
    last = length(dataset) - 1
    return [dataset[i] for i in dict.fromkeys((0, last // 2, last, min(1, last)))]


def _open(ledger: Ledger | str | Path | None) -> tuple[Ledger, bool]:
    if isinstance(ledger, Ledger):
        return ledger, False
    return Ledger(":memory:" if ledger is None else ledger), True
