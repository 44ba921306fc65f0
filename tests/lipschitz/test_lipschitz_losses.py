"""The Lipschitz constants of losses, against gradient ascent on the scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from privet.errors import ConfigError
from privet.nn.lipschitz import LIPSCHITZ_LOSSES, Bound, LipschitzLoss
from privet.nn.lipschitz.losses import (
    BinaryCrossEntropy,
    HingeKR,
    KantorovichRubinstein,
    KCosine,
    MulticlassHinge,
    TemperedCrossEntropy,
)  # fmt: skip

LOSSES = {
    "ce": TemperedCrossEntropy(),
    "ce sharp": TemperedCrossEntropy(inverse_temperature=7.0),
    "bce": BinaryCrossEntropy(inverse_temperature=3.0),
    "hinge": MulticlassHinge(margin=0.5),
    "kr": KantorovichRubinstein(),
    "kr weighted": KantorovichRubinstein(class_weights="1,3,0.5"),
    "hkr": HingeKR(alpha=4.0, margin=2.0),
    "hkr weighted": HingeKR(alpha=4.0, class_weights=(2.0, 0.1, 1.0)),
    "cosine": KCosine(floor=0.7),
}


def worst(loss: LipschitzLoss, classes: int, norm: float, steps: int = 40) -> float:
    """The largest gradient found over scores in the ball, from many starts at once."""
    torch.manual_seed(0)
    targets = torch.arange(60) % max(classes, 2)
    scores = torch.randn(60, classes, dtype=torch.float64)
    scores[::3] *= 0.01
    best = 0.0
    for _ in range(steps):
        lengths = scores.norm(dim=1, keepdim=True)
        scores = (scores * (norm / lengths).clamp(max=1)).detach().requires_grad_()
        (slopes,) = torch.autograd.grad(loss(scores, targets).sum(), scores, create_graph=True)
        lengths = slopes.norm(dim=1)
        best = max(best, lengths.max().item())
        if not lengths.requires_grad:
            break
        (up,) = torch.autograd.grad(lengths.sum(), scores)
        scores = scores + norm * torch.nan_to_num(up / up.norm(dim=1, keepdim=True).clamp(min=1e-12)) / 4
    return best


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("norm", [0.01, 0.5, 2.0, 20.0])
def test_no_scores_have_a_larger_gradient(name: str, norm: float) -> None:
    loss = LOSSES[name]
    for classes in (3,) if "weighted" in name else (1, 2, 3, 10):
        if classes == 1 and "ce" in name and name != "bce":
            continue
        within = loss.lipschitz_within(Bound(norm, (classes,)))
        assert worst(loss, classes, norm) <= within * (1 + 1e-9)
        assert within <= loss.lipschitz * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "norm", "least"), [("ce", 0.01, 0.99), ("ce", 3.0, 0.9), ("bce", 0.01, 0.98), ("kr", 1.0, 0.999),
                                ("hkr", 1.0, 0.999), ("hinge", 0.1, 0.999), ("cosine", 0.5, 0.999)]
)  # fmt: skip
def test_the_constants_are_nearly_reached(name: str, norm: float, least: float) -> None:
    loss = LOSSES[name]
    assert worst(loss, 10, norm) >= least * loss.lipschitz_within(Bound(norm, (10,)))


def test_bounded_scores_make_cross_entropy_smoother() -> None:
    loss = TemperedCrossEntropy()
    found = [loss.lipschitz_within(Bound(norm, (10,))) for norm in (0.0, 0.5, 1.0, 2.0, 5.0, 1e9)]
    assert found[0] == pytest.approx(math.sqrt(0.9))  # ‖uniform − e_y‖
    assert found == sorted(found)
    assert found[2] < 1.1
    assert found[-1] == math.sqrt(2)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_function_of_its_own_record(name: str) -> None:
    """Weights by the class counts of the batch, as in the reference implementation, would fail here."""
    torch.manual_seed(0)
    scores, targets = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 0, 0])
    together = LOSSES[name](scores, targets)
    alone = torch.cat([LOSSES[name](scores[i : i + 1], targets[i : i + 1]) for i in range(6)])
    assert torch.allclose(together, alone, atol=1e-12)


def _kr(z: Tensor, y: int) -> float:
    return (sum(z[j].item() for j in range(len(z)) if j != y) / (len(z) - 1)) - z[y].item()


def test_losses_are_what_they_say() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    (row,) = z
    hinge = max(0, 0.25 - row[1].item()) + (max(0, 0.25 + row[0].item()) + max(0, 0.25 + row[2].item())) / 2
    assert LOSSES["hinge"](z, y).item() == pytest.approx(hinge)
    assert LOSSES["kr"](z, y).item() == pytest.approx(_kr(row, 1))
    assert LOSSES["kr weighted"](z, y).item() == pytest.approx(3 * _kr(row, 1))
    assert HingeKR(alpha=4.0, margin=0.5)(z, y).item() == pytest.approx(_kr(row, 1) + 4 * hinge)
    assert LOSSES["cosine"](2 * z, y).item() == pytest.approx(1 - (row[1] / row.norm()).item())
    assert LOSSES["ce sharp"](z, y).item() == pytest.approx(-torch.log_softmax(7 * row, 0)[1].item() / 7)
    one = torch.tensor([[0.3], [0.3]], dtype=torch.float64)
    assert KantorovichRubinstein()(one, torch.tensor([1, 0])).tolist() == pytest.approx([-0.3, 0.3])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(one[:, 0], one.new_tensor([1, 0]), reduction="none")
    assert BinaryCrossEntropy()(one, torch.tensor([1, 0])).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tempered-ce", {"inverse_temperature": 0.0}),
        ("bce", {"inverse_temperature": math.inf}),
        ("hinge", {"margin": -1.0}),
        ("hkr", {"alpha": 0.0}),
        ("kr", {"class_weights": "1,x"}),
        ("kr", {"class_weights": (1.0, -1.0)}),
        ("k-cosine", {"floor": 0.0}),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LIPSCHITZ_LOSSES[name](**options)


def test_class_weights_must_fit_the_classes() -> None:
    with pytest.raises(ConfigError, match="one for each class"):
        LOSSES["kr weighted"](torch.zeros(1, 4), torch.tensor([0]))
