"""Known faults of private training, put into Privet one at a time: the audit must find each, and nothing without them.

`privet.audit.audit` runs whole, with the same settings for the sound method and its mutants. docs/results/audit.md is
made from these cases: `python tests/audit/faults.py`.
"""

from __future__ import annotations

import re

import pytest
from faults import FAULTS, SETTINGS, audited


@pytest.fixture(autouse=True)
def fewer_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of what `privet audit` does in its two worlds: enough for these faults, and half the time."""
    monkeypatch.setattr("privet.audit.randomness._TRIALS", 100)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sound_method_passes(setting: str) -> None:
    report = audited(setting)
    assert report.holds, str(report)
    assert report.lower_bound <= report.claimed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.inject(monkeypatch)
    report = audited(fault.setting)
    assert not report.holds, f"{fault.name} was not found:\n{report}"
    assert not re.search(r"stopped \((Type|Attribute|Name|Key|Index|Value)Error", str(report)), (
        f"it fell over:\n{report}"
    )
    caught = [check.name for check in report.failed]
    assert any(fault.caught_by in name for name in caught), (
        f"{fault.name} was found by {caught}, not {fault.caught_by!r}"
    )
