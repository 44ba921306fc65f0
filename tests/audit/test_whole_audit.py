"""Whole audits: what is broken is named, what stops has not passed, and what cannot be audited is said."""

from __future__ import annotations

import pytest
from subjects import Mine, failed, keys_from_a_seed, mine, network, records, to_length_one
from torch import nn

from privet import ConfigError, Partition, PerExample, Refused
from privet.audit import assert_private, audit, audit_subject, randomness, sensitivity

same_luck = pytest.fixture(autouse=True)(keys_from_a_seed)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws, where only the way from a fault to the report is tried."""
    monkeypatch.setattr(randomness, "_DRAWS", 1000)
    monkeypatch.setattr(randomness, "_TRIALS", 40)
    monkeypatch.setattr(sensitivity, "_CLIMBS", 4)


@pytest.mark.usefixtures("quick")
def test_a_sound_method_is_asserted_private_in_one_line() -> None:
    report = assert_private(PerExample(clip=1.0), network(), records(), sampling=Partition(batch=6), canaries=40)
    assert report.holds and report.lower_bound <= report.claimed
    assert len(report.notes) == 1 and "cannot show more" in report.notes[0]


@pytest.mark.usefixtures("quick")
def test_a_broken_method_is_named_by_what_is_broken() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_private(
            Mine(bound=lambda g: 1.1 * to_length_one(g)), network(), records(), sampling=Partition(batch=6), canaries=40
        )
    said = str(caught.value)
    assert "mine: BROKEN" in said and "NO  sensitivity, a record added or removed: 1.1 against 1" in said
    assert said.count("NO ") == 1


@pytest.mark.parametrize("error", [RuntimeError, IndexError, TypeError, AssertionError])
def test_a_method_that_stops_has_not_passed(error: type[Exception]) -> None:
    def stops(count: int) -> None:
        raise error("nothing works")

    checks = audit_subject(mine(said=stops))
    assert failed(checks) == ["sensitivity", "noise", "two worlds", "replay"]
    assert {check.detail for check in checks if not check.holds} == {f"{error.__name__}: nothing works"}


def test_an_audit_without_records_is_refused() -> None:
    x, y = records()
    for none in ((x[:0], y[:0]), (x, y[:3])):
        with pytest.raises(ConfigError, match="needs records"):
            audit(PerExample(clip=1.0), network(), none)


def test_what_cannot_be_audited_is_said() -> None:
    x, y = records()
    with pytest.raises(ConfigError, match="two tensors"):
        audit(PerExample(), network(), [(x[0], y[0])])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"TypeError.*loss\(model, inputs, targets\)"):  # and no broken promise
        audit(PerExample(), network(), (x, y), loss=lambda scores, targets: (scores - targets).square())  # type: ignore[arg-type, misc]
    with pytest.raises(ConfigError, match="noise must be positive"):
        audit(PerExample(), network(), (x, y), noise_multiplier=0)
    with pytest.raises(ConfigError, match="at least 2"):
        audit(PerExample(), network(), (x, y), canaries=1)
    with pytest.raises(Refused, match="BatchNorm"):
        audit(PerExample(), nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), (x, y))


def test_a_model_without_records_is_not_left_out_silently() -> None:
    with pytest.raises(ConfigError, match="or neither"):
        audit(PerExample(), network())
