"""The method of one's own in CONTRIBUTING, run as it stands there: its guarantee holds, and an audit finds it wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privet.audit.report import Check
from privet.audit.sensitivity import check_sensitivity
from privet.audit.subject import MethodSubject
from privet.gradients import Recorder
from privet.methods import METHODS, Method, ParameterGroup, Query, Sensitivity, Session, Setting, register
from privet.methods.base import trainable
from privet.noise import Allocation
from privet.options import option

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
METHOD, SESSION = (code.split("```")[0] for code in TEXT.split("```python\n")[1:] if "UnitSum" in code)
NAMES = {
    thing.__name__: thing
    for thing in (
        AbstractContextManager, dataclass, torch, Tensor, Recorder, Method, ParameterGroup, Query, Sensitivity,
        Session, Setting, register, trainable, option,
    )
} | {"nn": nn, "Allocation": Allocation, "__name__": "own"}  # fmt: skip


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(METHODS)
    torch.manual_seed(0)
    yield
    METHODS.clear()
    METHODS.update(before)


def unit_sum(session: str = SESSION) -> Method:
    names: dict[str, Any] = dict(NAMES)
    exec(compile(METHOD + session, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    made: Method = names["UnitSum"]()
    return made


def attention() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(-1, 2, 4)
            return self.last(self.mix(x, x, x)[0].mean(1))

    return Net()


RECORDS = torch.randn(12, 8), torch.arange(12) % 3


def sensitivities(method: Method, model: nn.Module) -> list[Check]:
    with MethodSubject(method, model, RECORDS) as subject:
        return check_sensitivity(subject, crowds=False)[0]


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), attention()])
def test_the_example_holds(model: nn.Module) -> None:
    checks = sensitivities(unit_sum(), model)
    assert checks and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("clip / (norms + 1e-3)", "clip / norms.clamp(max=0.1)"),  # longer ones are not shortened enough
        ("gradient.drop(lost)", "pass"),  # a record that is not finite reaches the sum
    ],
)
def test_a_fault_in_it_is_found(right: str, wrong: str) -> None:
    assert right in SESSION
    assert not all(check.holds for check in sensitivities(unit_sum(SESSION.replace(right, wrong)), attention()))
