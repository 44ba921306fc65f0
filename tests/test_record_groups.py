"""Groups of records by coin, for the methods that have them: one record changes one group, and coins are fair."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from privet import Batch, Ternary
from privet.methods import Session, Setting
from privet.noise import Source
from privet.sampling import Sample

SETTING = Setting(batch=8, noise_multiplier=1.0, relation="add_remove")


@pytest.fixture(params=[Batch, Ternary])
def session(request: pytest.FixtureRequest) -> Session:
    return request.param(record_groups=3).open(nn.Linear(2, 2), SETTING)  # type: ignore[no-any-return]


class CoinOfRecord:
    """Gives each record of a known sample a coin that depends on its number only."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def integers(self, count: int, bound: int) -> Sample:
        assert count == len(self.sample)
        return self.sample * 7919 // 13 % bound


def test_one_record_more_changes_one_group_only(session: Session) -> None:
    fewer, more = np.arange(1, 40), np.arange(40)
    before, after = (session.cut(s, CoinOfRecord(s)) for s in (fewer, more))  # type: ignore[arg-type]
    assert len(before) == len(after) == 3
    (changed,) = (g for g in range(3) if before[g].tolist() != after[g].tolist())
    assert after[changed].tolist() == [0, *before[changed].tolist()]


def test_coins_are_fair_and_drawn_anew_and_each_record_is_in_one_group(session: Session) -> None:
    source, sample = Source("seeded", seed=0), np.arange(100, 3100)
    first, second = session.cut(sample, source), session.cut(sample, source)
    assert sorted(np.concatenate(first)) == sample.tolist()
    assert all(900 < len(unit) < 1100 for unit in first)  # a deviation is 26
    assert all(unit.max() - unit.min() > 2900 for unit in first)  # not consecutive
    assert 900 < len(np.intersect1d(first[0], second[0])) * 3 < 1100  # a deviation is 52
    assert [len(unit) for unit in session.cut(sample[:0], source)] == [0, 0, 0]


def test_one_group_is_the_whole_sample() -> None:
    sample = np.arange(5)
    units = Batch().open(nn.Linear(2, 2), SETTING).cut(sample, Source("seeded", seed=0))
    assert [unit.tolist() for unit in units] == [sample.tolist()]
