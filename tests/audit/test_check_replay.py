"""The check by replay passes what depends on noisy values alone and names what does not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from subjects import Stub, failed, gaussian, keys_from_a_seed, mine, network, records

from privet import PerExample
from privet.audit import MethodSubject, Record
from privet.audit.replay import check_replay

same_luck = pytest.fixture(autouse=True)(keys_from_a_seed)


def test_what_depends_on_noisy_values_alone_passes_the_replay() -> None:
    subject = MethodSubject(PerExample(clip=0.5, adaptive=True), network(), records())
    _, facts = subject.train([subject.base])
    assert facts["state of the method after step 0"]["clips"]["all"] != 0.5  # it moved, by the noisy count
    checks = check_replay(subject, subject.base[0])
    assert len(checks) == 3 and not failed(checks)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"said": lambda count: logging.getLogger("mine").warning("%d records", count)}, "printed and logged"),
        ({"said": lambda count: logging.getLogger("mine").info("%d records", count)}, "printed and logged"),
        ({"said": print}, "printed and logged"),
        ({"kept": True}, "state of the method after step 0"),
        ({"twice": 13}, "gradient of 0.weight in step 0"),
    ],
    ids=["warns", "informs", "prints", "keeps", "asks for more noise"],
)
def test_what_tells_the_number_of_records_is_named(options: dict[str, Any], fact: str) -> None:
    checks = check_replay(mine(**options), Record(99, *(part[0] for part in records())))
    assert len(failed(checks)) == 3
    assert all(fact in check.detail and check.measured >= 1 for check in checks), checks[0].detail


def test_a_log_is_as_loud_after_a_replay_as_before() -> None:
    level = logging.getLogger().level
    mine().train([])
    assert logging.getLogger().level == level


def test_a_subject_that_cannot_be_trained_has_no_replay() -> None:
    stub = Stub(gaussian(0))
    assert check_replay(stub, stub.base[0]) == []
