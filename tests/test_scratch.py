"""Scratch memory: used again from pass to pass, and never by two at once."""

from __future__ import annotations

import torch
from torch import Tensor

from privet.gradients.scratch import Scratch

LIKE = torch.zeros(())


def places(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def test_what_is_taken_is_apart_until_it_is_reclaimed() -> None:
    pool = Scratch()
    first, second = pool.take((2, 3), LIKE), pool.take((6,), LIKE)
    with pool.lent((6,), LIKE) as third:
        assert len({*places(first, second, third)}) == 3
    before = places(first, second, third)
    pool.reclaim()
    again = pool.take((6,), LIKE), pool.take((6,), LIKE), pool.take((3, 2), LIKE)
    assert sorted(places(*again)) == sorted(before)
    assert pool.take((6,), LIKE).data_ptr() not in before


def test_what_was_lent_serves_whoever_comes_next_and_the_next_pass() -> None:
    pool = Scratch()
    kept = pool.take((6,), LIKE)
    with pool.lent((6,), LIKE) as first, pool.lent((4,), LIKE) as nested:
        assert len({*places(kept, first, nested)}) == 3
    with pool.lent((5,), LIKE) as second:
        assert second.data_ptr() == first.data_ptr()
    taken = pool.take((6,), LIKE)
    assert taken.data_ptr() == first.data_ptr()
    with pool.lent((6,), LIKE) as third:
        assert third.data_ptr() not in places(kept, first)
    pool.reclaim()
    after = [pool.take((n,), LIKE) for n in (6, 6, 4)]
    assert len({*places(*after)}) == 3


def test_what_a_pass_did_not_need_is_let_go() -> None:
    pool = Scratch()
    pool.take((1000,), LIKE)
    pool.reclaim()
    with pool.lent((1000,), LIKE):
        pass
    pool.reclaim()
    assert [b.numel() for b in pool._free] == [1000]
    pool.reclaim()
    assert not pool._free


def test_types_are_kept_apart() -> None:
    pool = Scratch()
    pool.take((4,), LIKE)
    pool.reclaim()
    assert pool.take((4,), LIKE.double()).dtype == torch.float64
