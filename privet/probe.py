"""Checks on made-up records, before the first private one: does each record's loss stand on its own (rule 6)?

What counts is what the user's own forward pass and loss do, not which layers there are. So the first step of a run
begins with some small batches of made-up records, which go through the user's loop like any other and of which
nothing is kept: floating-point inputs are random, the rest (labels, tokens) comes from a few items of the data set,
so that it is valid. Random state and buffers are put back afterwards.

For each of the records: its loss must have no gradient at another record, in whatever order they come, and nobody
else's loss may change when it is replaced or left out. Made-up records differ in range, and one that is wild takes the
place of another, since a private record may be anything: a mean, a maximum or a branch over the batch must show.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import Refused
from .methods import Session
from .state import Buffers, Parameters

log = logging.getLogger(__name__)

_SLOTS = range(3)
"""The records of a made-up batch, by the number of the item that they are made of."""
_SEEDS = (1944, 300, 56)
"""A coin may decide whether records are mixed. From these, the first number of PyTorch, of numpy and of Python is
close to 0, in the middle, and close to 1."""
_MORE_SEEDS = (1, 2, 3, 4, 5)
"""Where losses turn out to be random."""
_RANGES = ((0.0, 1.0), (0.0, 0.1), (0.5, 0.5), (0.9, 0.1))
"""Smallest number and width, by slot."""
_WILD = 1000.0
_CODES = 1000
"""A float tensor of at most as many entries may hold codes (a label, a category): whole numbers stay as they are."""
_STRAY = 8.0
"""By how many standard errors the mean loss of a record may move with the size of the batch, where it is random."""
_NOT_CHECKED = "Pass check=False to Run only if you can prove what this check asks for."


class Probe:
    """The made-up batches of one run and what is concluded from their losses."""

    def __init__(
        self, model: nn.Module, session: Session, items: Sequence[Any], collate: Callable[[list[Any]], Any]
    ) -> None:
        self._model, self._session, self._items, self._collate = model, session, items, collate
        self._losses: Tensor | None = None
        self.records_seen = 0

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Made-up batches; the caller hands the losses of each to `take` before asking for the next."""
        buffers, parameters = Buffers(self._model), Parameters(self._model, sums=True)
        try:
            with _random_states_kept():
                losses = yield from self._ask(self._made_up(_SLOTS), _SEEDS[0])
                self._refuse_foreign(losses)
                where = self._reaches_others(losses, 0)
                self._refuse_changes(buffers, parameters)
                self._refuse_reach(where)
                with _without_dropout(self._model):
                    yield from self._turn_round()
                    together = yield from self._replace(_SEEDS)
                    if all(_same(together[0], losses) for losses in together):
                        yield from self._leave_out(together[0])
                    else:  # what is random hides small changes
                        together += yield from self._replace(_MORE_SEEDS)
                        yield from self._leave_out_at_random(torch.stack(together))
            self._refuse_changes(buffers, parameters)
        finally:
            buffers.restore()

    def _replace(self, seeds: Sequence[int]) -> Generator[tuple[Any, int], None, list[Tensor]]:
        """Under each seed another record is replaced, by a tame one and by a wild one; gives the losses before."""
        found: list[Tensor] = []
        for number, seed in enumerate(seeds):
            slot = number % len(_SLOTS)
            others = [i for i in _SLOTS if i != slot]
            before = yield from self._ask(batch := self._made_up(_SLOTS), seed)
            self._refuse_reach(self._reaches_others(before, slot))
            found.append(before.detach())
            for wild in (False, True):
                changed = self._made_up([len(_SLOTS) if i == slot else i for i in _SLOTS], wild)
                after = yield from self._ask(changed, seed, finite=others, wild=wild)
                exact = _shapes(batch) == _shapes(changed)
                if not _same(found[-1][others], after[others], exact=exact):
                    raise Refused(f"The loss of a record changes when another record is replaced.{self._way_out()}")
        return found

    def _turn_round(self) -> Iterator[tuple[Any, int]]:
        """The records in reverse order: what sorts them may have met them sorted."""
        losses = yield from self._ask(self._made_up(_SLOTS[::-1]), _SEEDS[0])
        self._refuse_reach(self._reaches_others(losses, 0))

    def _leave_out(self, together: Tensor) -> Iterator[tuple[Any, int]]:
        for slot in _SLOTS:
            others = [i for i in _SLOTS if i != slot]
            fewer = yield from self._ask(self._made_up(others), _SEEDS[0])
            self._refuse_by_size(_same(together[others], fewer))

    def _leave_out_at_random(self, together: Tensor) -> Iterator[tuple[Any, int]]:
        """By the mean over seeds: an equal seed does not give equal numbers to a batch of another size."""
        found: dict[int, list[Tensor]] = {slot: [] for slot in _SLOTS}
        for number, seed in enumerate((*_SEEDS, *_MORE_SEEDS)):
            others = [i for i in _SLOTS if i != number % len(_SLOTS)]
            fewer = yield from self._ask(self._made_up(others), seed)
            for slot, loss in zip(others, fewer.detach(), strict=True):
                found[slot].append(loss)
        for slot, losses in found.items():
            a, b = together[:, slot].double(), torch.stack(losses).double()
            error = float((a.var() / len(a) + b.var() / len(b)).sqrt())
            moved = abs(float(a.mean() - b.mean()))
            self._refuse_by_size(moved <= _STRAY * error + 1e-3 * abs(float(a.mean())) + 1e-6)

    def _ask(
        self, batch: Any, seed: int, *, finite: Sequence[int] | None = None, wild: bool = False
    ) -> Generator[tuple[Any, int], None, Tensor]:
        """The losses of a batch; those of the records `finite` (by default all) must be."""
        for generator in (torch.manual_seed, np.random.seed, random.seed):
            generator(seed)
        try:
            yield batch, len(self._asked)
        except GeneratorExit:
            if wild:
                log.warning(
                    "The loop was left on a batch of made-up records, one of them with numbers between %g and %g: a "
                    "private record may have such too. If your code cannot take them, let it limit its inputs, or pass "
                    "check=False to Run if you can prove that no record's loss depends on another record.",
                    -_WILD,
                    _WILD,
                )
            raise
        assert self._losses is not None, "Step hands losses in before it asks for the next batch"
        losses = self._losses
        self.records_seen += len(losses)
        if not bool(torch.isfinite(losses if finite is None else losses[list(finite)]).all()):
            raise Refused(
                "The losses of made-up records (uniform numbers between 0 and 1) are not finite, so it cannot be "
                f"checked that records do not depend on each other. {_NOT_CHECKED}"
            )
        return losses

    def take(self, losses: Tensor) -> None:
        self._losses = losses

    def _made_up(self, slots: Sequence[int], wild: bool = False) -> Any:
        """Items are made up before they are collated: a collate function may mix records, and must be seen to."""
        self._asked = slots
        return self._collate([made_up(self._items, slot, wild and slot not in _SLOTS) for slot in slots])

    def _reaches_others(self, losses: Tensor, record: int) -> str | None:
        with self._session.listening():  # gradient checkpointing runs the model again
            return self._session.reaches_others(losses, record)

    def _refuse_reach(self, where: str | None) -> None:
        if where is not None:
            raise Refused(
                f"The loss of one record has a gradient at another record, at layer {where}.{self._way_out()}"
            )

    def _refuse_by_size(self, same: bool) -> None:
        if not same:
            raise Refused(f"The loss of a record changes when another record is left out.{self._way_out()}")

    def _refuse_foreign(self, losses: Tensor) -> None:
        """A backward pass leaves gradients at all parameters that the losses depend on."""
        own = {id(p) for p in self._model.parameters()}
        waiting: list[Any] = [losses.grad_fn]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                raise Refused(
                    f"The losses also depend on a parameter of shape {tuple(leaf.shape)} that is not part of the "
                    "private model, so a gradient without clipping and noise would be left there. Put it into the "
                    "model of the Run, freeze it by requires_grad_(False), or detach what comes from it."
                )

    def _refuse_changes(self, buffers: Buffers, parameters: Parameters) -> None:
        if changed := buffers.restore():
            raise Refused(
                f"Buffer '{changed[0]}' changes during a forward pass in training mode, so it would carry statistics "
                f"of private records into the released model.{self._way_out()}"
            )
        if changed := parameters.changed():
            raise Refused(
                f"Parameter '{changed[0]}' is changed by a forward pass, so it would carry private records into the "
                "released model without noise. Leave its training to the optimizer, and statistics to public records."
            )

    def _way_out(self) -> str:
        names = [
            f"'{name}' ({type(m).__name__})"
            for name, m in self._model.named_modules()
            if isinstance(m, nn.modules.batchnorm._NormBase) and m.training
        ]
        if names:
            return (
                f" The model has {names[0]} in training mode: turn it into GroupNorm with "
                "privet.nn.batchnorm_to_groupnorm(model), or call .eval() on it to freeze public statistics."
            )
        return (
            " Each loss must depend on its own record alone: no weights, centring, sorting or averaging over the "
            f"batch. {_NOT_CHECKED}"
        )


def made_up(items: Sequence[Any], slot: int, wild: bool = False) -> Any:
    """A record of the form of one of these items, with random numbers for its own."""
    generator = torch.Generator().manual_seed(slot)
    least, width = (-_WILD, 2 * _WILD) if wild else _RANGES[slot % len(_RANGES)]

    def of(leaf: Tensor) -> Tensor:
        numbers = least + width * torch.rand(leaf.shape, generator=generator, dtype=torch.float64)
        if wild and leaf.numel() <= _CODES:
            numbers = torch.where(leaf == leaf.round(), leaf.double(), numbers)
        return numbers

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return of(leaf.cpu()).to(leaf)
        if isinstance(leaf, np.ndarray | np.floating) and np.issubdtype(leaf.dtype, np.floating):
            return of(torch.from_numpy(np.asarray(leaf, dtype=np.float64))).numpy().astype(leaf.dtype)[()]
        if isinstance(leaf, float):
            return float(of(torch.tensor(leaf, dtype=torch.float64)))
        return leaf

    return pytree.tree_map(replaced, items[slot % len(items)])


@contextmanager
def _random_states_kept() -> Iterator[None]:
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for layer in layers:
            layer.train()


def _shapes(batch: Any) -> list[Any]:
    return [getattr(leaf, "shape", None) for leaf in pytree.tree_leaves(batch)]


def _same(a: Tensor, b: Tensor, *, exact: bool = False) -> bool:
    """Whether losses are equal: up to rounding of other shapes, or nearly bit by bit where all shapes are equal."""
    rtol, atol = (1e-5, 1e-7) if exact else (1e-3, 1e-6)
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=rtol, atol=atol)
