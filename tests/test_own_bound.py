"""The bound for a layer of one's own in CONTRIBUTING, run as it stands there. It holds; an audit finds a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privet import Backprop, Refused
from privet.audit.sensitivity import check_sensitivity
from privet.audit.subject import MethodSubject
from privet.gradients.bounded import BOUNDS
from privet.nn.input_clip import NORMS, Norm

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
(EXAMPLE,) = (code for code in TEXT.split("```python\n")[1:] if "@bound_for(Scale)" in code)
EXAMPLE = EXAMPLE.split("```")[0]


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(BOUNDS)
    torch.manual_seed(0)
    yield
    BOUNDS.clear()
    BOUNDS.update(before)


def example(code: str = EXAMPLE) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "own"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names


def largest_ratio(names: dict[str, Any], norm: Norm, positions: tuple[int, ...] = (4,)) -> float:
    """How much of the declared sensitivity the worst record found uses up."""
    model = nn.Sequential(names["Scale"](3), nn.Flatten(), nn.Linear(3 * torch.Size(positions).numel(), 2))
    model[2].requires_grad_(False)  # so that it is the example that is measured
    records = torch.randn(12, *positions, 3), torch.arange(12) % 2
    method = Backprop(input_clip=1.0, gradient_clip=0.01, norm=norm)
    with MethodSubject(method, model, records) as subject:
        checks, _ = check_sensitivity(subject, crowds=False)
    return max(float(check.measured) for check in checks[:2])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("positions", [(), (4,), (2, 2)])
def test_the_example_holds(norm: Norm, positions: tuple[int, ...]) -> None:
    assert 0 < largest_ratio(example(), norm, positions) <= 1


def test_a_record_that_reaches_the_bound() -> None:
    """Each position is (C1, 0, 0) with the same δ: ‖∇w‖ is C1·C2. So the declared bound is no more than is needed."""
    names = example()
    layer, bound = names["Scale"](3), names["ScaleBound"]()
    z = torch.zeros(1, 4, 3)
    z[..., 0] = 1.0
    delta = torch.zeros(1, 4, 3)
    delta[..., 0] = 0.1 / 4
    total = torch.zeros(3)
    bound.add(layer, z, delta, {"weight": total})
    assert float(bound.upstream_norms(layer, z, delta, "patch")) == pytest.approx(0.1)
    assert float(total.norm()) == pytest.approx(bound.bounds(layer, 1.0, 0.1)[("weight",)])


def test_what_is_added_is_the_gradient() -> None:
    names = example()
    layer, bound = names["Scale"](3), names["ScaleBound"]()
    z, delta = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    layer(z).backward(delta)
    total = torch.zeros(3)
    bound.add(layer, z, delta, {"weight": total})
    torch.testing.assert_close(total, layer.weight.grad)


def test_an_audit_finds_a_bound_that_is_wrong() -> None:
    """The largest position in place of the sum over positions."""
    right, wrong = ".flatten(1).sum(1)", ".flatten(1).amax(1)"
    assert EXAMPLE.count(right) == 1
    assert largest_ratio(example(EXAMPLE.replace(right, wrong)), "patch") > 1.2


def test_without_a_bound_the_layer_is_refused() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight

    model = nn.Sequential(Shift(), nn.Linear(3, 2))
    with pytest.raises(Refused, match=r"'0' \(Shift\).*no bound.*CONTRIBUTING"):
        MethodSubject(Backprop(), model, (torch.randn(12, 3), torch.arange(12) % 2))
