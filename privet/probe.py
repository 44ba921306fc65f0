"""Checks on made-up records, before the first private one: does each record's loss stand on its own (rule 6)?

What counts is what the user's own forward pass and loss do, not which layers there are. So the first step of a run
begins with a few small batches of made-up records, which go through the user's loop like any other and of which
nothing is kept: floating-point inputs are random, the rest (labels, tokens) comes from the first items of the data
set, so that it is valid. Random state and buffers are put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import Refused
from .methods import Session

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
        buffers = {name: b.detach().clone() for name, b in self._model.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            first = yield from self._ask([0, 1, 2], seed=1)
            with self._session.listening():  # gradient checkpointing runs the model again
                where = self._session.reaches_others(first, 0)
            self._refuse_changed_buffers(buffers)
            if where is not None:
                raise Refused(
                    f"The loss of one record has a gradient at another record, at layer {where}.{self._way_out()}"
                )
            with _without_dropout(self._model):
                calm = yield from self._ask([0, 1, 2], seed=1)
                again = yield from self._ask([0, 1, 2], seed=2)
                swapped = yield from self._ask([0, 1, 3], seed=1)
                fewer = yield from self._ask([0, 1], seed=1)
        kept = [(swapped, "when another record is replaced")]
        if _same(calm, again):  # where nothing is random, the size of the batch must not matter either
            kept.append((fewer, "when another record is left out"))
        for losses, when in kept:
            if not _same(calm[:2], losses[:2]):
                raise Refused(f"The loss of a record changes {when}.{self._way_out()}")

    def _ask(self, slots: list[int], seed: int) -> Generator[tuple[Any, int], None, Tensor]:
        torch.manual_seed(seed)
        yield self._made_up(slots), len(slots)
        assert self._losses is not None, "Step hands losses in before it asks for the next batch"
        losses: Tensor = self._losses
        self.records_seen += len(slots)
        if not bool(torch.isfinite(losses).all()):
            raise Refused(
                "The losses of made-up records (uniform numbers between 0 and 1) are not finite, so it cannot be "
                f"checked that records do not depend on each other. {_NOT_CHECKED}"
            )
        return self._losses

    def take(self, losses: Tensor) -> None:
        self._losses = losses

    def _made_up(self, slots: list[int]) -> Any:
        """Items are made up before they are collated: a collate function may mix records, and must be seen to."""
        return self._collate([with_random_numbers(self._items[slot % len(self._items)], slot) for slot in slots])

    def _refuse_changed_buffers(self, before: dict[str, Tensor]) -> None:
        now = dict(self._model.named_buffers())
        changed = [name for name, b in before.items() if not torch.equal(b, now[name])]
        with torch.no_grad():
            for name in changed:
                now[name].copy_(before[name])
        if changed:
            raise Refused(
                f"Buffer '{changed[0]}' changes during a forward pass in training mode, so it would carry statistics "
                f"of private records into the released model.{self._way_out()}"
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


def with_random_numbers(item: Any, slot: int) -> Any:
    generator = torch.Generator().manual_seed(slot)

    def random(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return torch.rand(leaf.shape, generator=generator).to(leaf)
        if isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating):
            return torch.rand(leaf.shape, generator=generator).numpy().astype(leaf.dtype)
        if isinstance(leaf, float):
            return float(torch.rand((), generator=generator))
        return leaf

    return pytree.tree_map(random, item)


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


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=1e-3, atol=1e-6)
