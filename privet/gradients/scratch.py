"""Memory for what lives no longer than a step."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class Scratch:
    """Large blocks that are used again from step to step: mapping fresh pages costs more than much of the arithmetic.

    What `take` gives is the caller's until the next `reclaim`, which `Taps` call before each backward pass.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._used: list[Tensor] = []

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Uninitialised memory of this shape, with the type and device of `like`."""
        size = math.prod(shape)
        return self._block(size, like)[:size].view(*shape)

    @contextmanager
    def lent(self, shape: Sequence[int], like: Tensor) -> Iterator[Tensor]:
        """Like `take`, for the time of a `with` block only: whoever comes next may get the same memory."""
        size = math.prod(shape)
        block = self._block(size, like)
        try:
            yield block[:size].view(*shape)
        finally:
            self._free.append(block)

    def reclaim(self) -> None:
        # blocks that a whole pass did not need were for other batch sizes: let them go
        self._free, self._used = self._used, []

    def _block(self, size: int, like: Tensor) -> Tensor:
        fits = [b for b in self._free if b.dtype == like.dtype and b.device == like.device and b.numel() >= size]
        block = min(fits, key=Tensor.numel, default=None)
        if block is None:
            block = like.new_empty(size)
        else:
            self._free = [b for b in self._free if b is not block]
        self._used.append(block)
        return block


_current = threading.local()


def scratch() -> Scratch:
    """That of the taps at work in this thread."""
    found: Scratch | None = getattr(_current, "scratch", None)
    return found if found is not None else Scratch()


class using:  # noqa: N801 - called like a function
    """Makes `pool` the one of `scratch()` in this thread, inside of a `with` block."""

    def __init__(self, pool: Scratch) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._before = getattr(_current, "scratch", None)
        _current.scratch = self._pool

    def __exit__(self, *_: object) -> None:
        _current.scratch = self._before
