"""The losses: their values and gradients, that records stand alone, and that methods meet the penalty's gradient."""

from __future__ import annotations

import argparse
import copy
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import naive_clipped_sum, naive_gradients
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from privet import Backprop, Budget, ConfigError, Method, PerExample, Poisson, Refused, Run, losses
from privet.cli import _options
from privet.losses import LOSSES, LosingLess, Loss, PreActivations, loss
from privet.methods import Setting
from privet.nn import build
from privet.training import TrainConfig, train
from privet.training import loop as training_loop

SETTING = Setting(batch=10, noise_multiplier=1.0, relation="add_remove")
OPTIONS: dict[str, dict[str, Any]] = {
    "focal": {"gamma": 1.5}, "sse+ce": {"threshold_epoch": 1.0}, "sse+focal": {"gamma": 0.7, "threshold_epoch": -0.5},
    "losing-less": {"gamma": 2.0, "penalty": 0.3, "threshold_epoch": 0.4}, "huber": {"beta": 0.8},
}  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, 4, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def made(name: str, model: nn.Module) -> Loss:
    return loss(name, model, **OPTIONS.get(name, {}))


# Values


def by_hand(name: str, h: list[float], t: int, epoch: float) -> float:
    """The formulas of the paper on plain numbers, for the options above; without the penalty."""
    options = OPTIONS.get(name, {})
    p = math.exp(h[t]) / sum(map(math.exp, h))
    errors = [value - (d == t) for d, value in enumerate(h)]
    squared = sum(e * e for e in errors) / 2
    if name in ("sse", "sae"):
        return squared if name == "sse" else sum(map(abs, errors))
    if name == "huber":
        return sum(e * e / 1.6 if abs(e) < 0.8 else abs(e) - 0.4 for e in errors)
    late = (1 - p) ** options.get("gamma", 0.0) * -math.log(p)
    if name in ("ce", "focal"):
        return late
    alpha = 1 / (1 + math.exp(-(epoch - options["threshold_epoch"])))
    return alpha * late + (1 - alpha) * squared


OF_THE_PAPER = sorted(name for name, known in LOSSES.items() if known.__module__ == "privet.losses")
"""Those of Lipschitz networks are tried in tests/lipschitz."""


@pytest.mark.parametrize("name", OF_THE_PAPER)
@given(st.lists(st.lists(st.floats(-6, 6), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(-3, 12))
def test_losses_are_those_of_the_paper(name: str, scores: list[list[float]], epoch: float) -> None:
    criterion = made(name, model := nn.Linear(3, 3))  # its one layer is the output: nothing is hidden
    criterion.epoch = epoch
    model(torch.zeros(len(scores), 3))
    targets = torch.arange(len(scores)) % 3
    found = criterion(torch.tensor(scores, dtype=torch.float64), targets)
    expected = [by_hand(name, h, t, epoch) for h, t in zip(scores, targets.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_gradients_are_right(name: str) -> None:
    model, (x, y) = chain().double(), rows(3)
    criterion = made(name, model)

    def of(x: Tensor, *weights: Tensor) -> Tensor:
        return criterion(model(x), y)

    assert torch.autograd.gradcheck(of, (x.double().requires_grad_(), *model.parameters()))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_record_has_its_own_loss(name: str) -> None:
    model, (x, y) = network(), images(5)
    criterion = made(name, model)
    x.requires_grad_()
    whole = criterion(model(x), y)
    assert whole.shape == (5,)
    (reached,) = torch.autograd.grad(whole[2], x)
    assert reached[2].abs().max() > 0 and reached[[0, 1, 3, 4]].abs().max() == 0
    others, labels = x.detach().clone(), y.clone()
    others[[0, 1, 3, 4]] = 100 * torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(2))
    labels[[0, 1, 3, 4]] = (labels[[0, 1, 3, 4]] + 1) % 3
    torch.testing.assert_close(criterion(model(others), labels)[2], whole[2], rtol=1e-5, atol=0)
    torch.testing.assert_close(criterion(model(x[2:3]), y[2:3])[0], whole[2], rtol=1e-5, atol=0)
    assert criterion(model(x[:0]), y[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6))
def test_focal_at_gamma_0_is_cross_entropy_bit_for_bit(dtype: torch.dtype, values: list[float]) -> None:
    found, expected = (torch.tensor([values], dtype=dtype).requires_grad_() for _ in range(2))
    ours = losses.Focal(gamma=0)(found, torch.tensor([0]))
    theirs = F.cross_entropy(expected, torch.tensor([0]), reduction="none")
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(ours, theirs) and torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [1e-3, 0.5, 1.0, 2.0, 5.0, 50.0])
def test_focal_is_finite_at_the_ends(gamma: float, dtype: torch.dtype) -> None:
    gaps = [0.0, 1e-8, 1.0, 15.0, 17.0, 36.0, 37.0, 90.0, 120.0, 800.0, 1e4, 1e30]
    gaps += [-gap for gap in gaps]
    scores = torch.tensor([[gap, 0.0] for gap in gaps], dtype=dtype, requires_grad=True)  # p from 0 to 1
    found = losses.Focal(gamma=gamma)(scores, torch.zeros(len(gaps), dtype=torch.long))
    assert bool(torch.isfinite(found).all()) and bool((found >= 0).all())
    assert float(found[-1].detach()) == pytest.approx(1e30) and found[gaps.index(1e30)] < 1e-6
    (slopes,) = torch.autograd.grad(found.sum(), scores, create_graph=True)
    assert bool(torch.isfinite(slopes).all())
    assert slopes[-1].tolist() == [-1, 1]  # far off it is cross-entropy
    order = sorted(range(len(gaps)), key=lambda i: gaps[i])
    assert bool((found[order].diff() <= 1e-6).all())  # the better a record, the smaller its loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 1.0, 2.0, 5.0, 50.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_curriculum_and_its_slopes_are_those_of_its_parts(alpha: float, gamma: float, dtype: torch.dtype) -> None:
    gaps = [0.0, 1e-8, 0.1, 1.0, 15.0, 17.0, 36.0, 37.0, 90.0, 120.0, 800.0, 1e4]
    scores = torch.tensor([[gap, 0.0, -0.5] for gap in [*gaps, *(-gap for gap in gaps)]], dtype=dtype)
    targets = torch.zeros(len(scores), dtype=torch.long)
    upstream = torch.linspace(0.5, 2, len(scores), dtype=dtype)

    def value_and_slopes(of: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        at = scores.clone().requires_grad_()
        found = of(at, targets, alpha, gamma)
        return found.detach(), torch.autograd.grad(found, at, upstream)[0]

    found, slopes = value_and_slopes(lambda *given: losses._Curriculum.apply(*given, 0.0))
    expected, steepness = value_and_slopes(losses.curriculum)
    assert found.isfinite().all() and slopes.isfinite().all()
    precision = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **precision)
    torch.testing.assert_close(slopes, steepness, **precision)


@pytest.mark.parametrize("name", ["sse+ce", "sse+focal"])
def test_slopes_of_slopes(name: str) -> None:
    scores = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    criterion, targets = made(name, nn.Linear(1, 1)), torch.tensor([0, 2, 1, 1])
    assert torch.autograd.gradgradcheck(lambda at: criterion(at, targets), (scores,))
    sizes = torch.rand(2, 4, dtype=torch.float64).requires_grad_()
    with_sizes = (lambda at, first, second: criterion.with_penalty(at, targets, 0.7, [first, second]), (scores, *sizes))
    torch.testing.assert_close(with_sizes[0](*with_sizes[1]), criterion(scores, targets) + 0.7 * sizes.sum(0))
    assert torch.autograd.gradcheck(*with_sizes) and torch.autograd.gradgradcheck(*with_sizes)


@pytest.mark.parametrize("name", ["sse+ce", "sse+focal"])
def test_the_curriculum_under_torch_func(name: str) -> None:
    scores = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    criterion, targets = made(name, nn.Linear(1, 1)), torch.tensor([0, 2, 1, 1])

    def one(score: Tensor, target: Tensor) -> Tensor:
        return criterion(score.unsqueeze(0), target.unsqueeze(0))[0]

    at = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(criterion(at, targets).sum(), at)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(one))(scores, targets), expected)


@pytest.mark.parametrize("name", ["sse+ce", "sse+focal", "losing-less"])
def test_the_curriculum_goes_from_sse_to_the_other(name: str) -> None:
    model, (x, y) = chain(), rows(4)
    options = {**OPTIONS[name], "threshold_epoch": 7.0, **({"penalty": 0.0} if name == "losing-less" else {})}
    criterion = loss(name, model, **options)
    late = losses.Focal(gamma=options.get("gamma", 0.0))
    scores = model(x)
    criterion.epoch = -1e9
    torch.testing.assert_close(criterion(scores, y), losses.SSE()(scores, y))
    criterion.epoch = 1e9
    torch.testing.assert_close(criterion(model(x), y), late(scores, y))
    criterion.epoch = 7
    torch.testing.assert_close(criterion(model(x), y), (late(scores, y) + losses.SSE()(scores, y)) / 2)


def test_half_precision_scores_are_widened() -> None:
    scores = torch.tensor([[1.0, 0.0, 200.0]], dtype=torch.float16, requires_grad=True)
    found = losses.SSE()(scores, torch.tensor([0]))
    assert found.dtype == torch.float32 and found.tolist() == [20000.0]
    assert losses.SSE()(torch.full((1, 2), 300.0, dtype=torch.float16), torch.tensor([0])).isfinite().all()


# The penalty


def penalty_by_hand(model: nn.Sequential, x: Tensor, hidden: list[str], power: int = 2) -> Tensor:
    total = torch.zeros(len(x))
    for name, layer in model.named_children():
        x = layer(x)
        if name in hidden:
            total = total + x.flatten(1).square().sum(1) ** (power / 2) / x[0].numel()
    return total


@pytest.mark.parametrize(
    ("layers", "hidden"),
    [(None, ["0", "4"]), ("0", ["0"]), ("0, 6", ["0", "6"]), (["1", "[45]"], ["1", "4", "5"]), (["4", "4*"], ["4"])],
)
def test_the_penalty_is_the_mean_square_of_hidden_pre_activations(layers: Any, hidden: list[str]) -> None:
    model, (x, y) = network(), images(5)
    expected = penalty_by_hand(model, x, hidden)
    with PreActivations(model, layers) as watched:
        model(x)
        torch.testing.assert_close(sum(watched.sizes(5)), expected)
    without = losses.SSEFocal(gamma=2)(model(x), y)
    with LosingLess(model, gamma=2, penalty=0.25, penalty_layers=layers) as criterion:
        torch.testing.assert_close(criterion(model(x), y), without + 0.125 * expected)  # α is ½


@pytest.mark.parametrize("fades", [True, False])
def test_the_penalty_fades_as_sse_does_unless_told_to_stay(fades: bool) -> None:
    model, (x, y) = network(), images(5)
    by_hand = penalty_by_hand(model, x, ["0", "4"])
    without = losses.SSEFocal(gamma=2, threshold_epoch=3)
    options = {} if fades else {"penalty_fades": False}
    with LosingLess(model, gamma=2, threshold_epoch=3, penalty=0.25, **options) as criterion:
        for epoch, left in [(0.0, 1 / (1 + math.exp(-3))), (3.0, 0.5), (5.0, 1 / (1 + math.exp(2))), (1e9, 0.0)]:
            criterion.epoch = without.epoch = epoch
            expected = without(model(x), y) + 0.25 * (left if fades else 1) * by_hand
            torch.testing.assert_close(criterion(model(x), y), expected)


def test_a_penalty_that_has_faded_away_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = network(), images(5)
    measured: list[int] = []
    whole = losses._measured
    monkeypatch.setattr(losses, "_measured", lambda h, squared: measured.append(len(h)) or whole(h, squared))
    with LosingLess(model, gamma=2, penalty=0.25) as criterion:
        for epoch, layers in [(0.0, 3), (16.0, 3), (17.0, 0), (40.0, 0), (16.0, 3)]:  # e^-17 is below 2^-24
            criterion.epoch = epoch
            measured.clear()
            criterion(model(x), y).sum().backward()
            assert len(measured) == layers
        criterion.epoch, criterion.penalty_fades = 40.0, False
        measured.clear()
        criterion(model(x), y)
        assert len(measured) == 3


def test_the_penalty_without_squares_is_finite_where_nothing_is_active() -> None:
    model, (x, y) = network(), images(5)
    with LosingLess(model, gamma=2, penalty=0.25, squared_norms=False) as criterion:
        expected = losses.SSEFocal(gamma=2)(model(x), y) + 0.125 * penalty_by_hand(model, x, ["0", "4"], power=1)
        torch.testing.assert_close(criterion(model(x), y), expected)
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].bias.zero_()
        criterion(model(x), y).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("positions", [(), (2,)])
def test_the_gradient_of_the_penalty_joins_that_of_what_follows(
    dtype: torch.dtype, squared: bool, inplace: bool, positions: tuple[int, ...]
) -> None:
    model = rectified(inplace).to(dtype)
    x = torch.randn(7, *positions, 4, generator=torch.Generator().manual_seed(0)).to(dtype)

    def by_hand(x: Tensor) -> Tensor:
        first = model[0](x)
        second = model[2](first.relu())
        hidden = [h.double().flatten(1) for h in (first, second)]
        sizes = [(h.norm(dim=1) ** (2 if squared else 1)) / h.shape[1] for h in hidden]
        return model[4](second.relu()).double().sum() + 20 * torch.stack(sizes).sum()  # type: ignore[no-any-return]

    expected = torch.autograd.grad(by_hand(x), list(model.parameters()))
    with PreActivations(model, squared=squared) as watched:
        scores = model(x)
        found = torch.autograd.grad(scores.double().sum() + 20 * sum(watched.sizes(7)).sum(), list(model.parameters()))
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-9
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).double().norm()) <= tolerance * float(other.double().norm())


def test_scores_may_be_changed_in_place() -> None:
    model, (x, y) = network(), images(5)
    with LosingLess(model) as criterion:
        expected = torch.autograd.grad(criterion(model(x) / 3, y).sum(), list(model.parameters()))
        found = torch.autograd.grad(criterion(model(x).div_(3), y).sum(), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class HeadFirst(nn.Module):
    """The output layer is the first that was made; another layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


def test_the_output_is_the_layer_that_runs_last() -> None:
    torch.manual_seed(0)
    model, (x, _) = HeadFirst(), rows(3)
    first = model.body(x)
    second = model.body(torch.tanh(first))
    with PreActivations(model) as watched:
        model(x)
        torch.testing.assert_close(sum(watched.sizes(3)), first.square().mean(1) + second.square().mean(1))


class Inside(nn.Module):
    """A parameter of its own beside layers, so that it is differentiated as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift)


class Unknown(nn.Linear):
    """A type that methods have no rule for."""


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self[2](self[1](self[0](x))), x, use_reentrant=False)
        return super().forward.__func__(self[3:], x)  # type: ignore[attr-defined, no-any-return]


def rectified(inplace: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=inplace), nn.Linear(6, 5), nn.ReLU(inplace), nn.Linear(5, 3))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "convolutions": (network, images),
    "overwritten pre-activations": (lambda: rectified(True), rows),
    "gradient checkpointing": (lambda: Checkpointed(*chain()), rows),
    "no rule of its own": (lambda: nn.Sequential(Unknown(4, 5), nn.Tanh(), nn.Linear(5, 3)), rows),
}  # fmt: skip


def clipped_sums(
    method: Method, model: nn.Module, criterion: Loss, *chunks: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    session = method.open(model, SETTING)
    try:
        session.begin()
        for x, y in chunks:
            with session.listening():
                session.add(criterion(model(x), y))
        queries = session.finish()
        return {n: v.double() for q in queries if q.group is not None for n, v in q.group.split(q.total).items()}
    finally:
        session.close()


def close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-3) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= rtol * float(value.norm()) + 1e-7, name


@pytest.mark.parametrize("loss_first", [True, False])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_per_example_clipping_meets_the_penalty(kind: str, clip: float, loss_first: bool) -> None:
    factory, data = MODELS[kind]
    torch.manual_seed(0)
    model, (x, y) = factory(), data(7)
    options: dict[str, Any] = {"gamma": 2.0, "penalty": 3.0, "threshold_epoch": 1.0}
    plain = copy.deepcopy(model)
    with LosingLess(plain, **options) as criterion:
        gradients = naive_gradients(plain, lambda model, x, y: criterion(model(x), y), (x, y))
        expected = naive_clipped_sum(gradients, clip)
        criterion.penalty = 0.0
        without = naive_clipped_sum(naive_gradients(plain, lambda model, x, y: criterion(model(x), y), (x, y)), clip)
    first = next(iter(expected))
    assert float((expected[first] - without[first]).norm()) > 0.05 * float(expected[first].norm())
    if loss_first:
        criterion = LosingLess(model, **options)
        close(clipped_sums(PerExample(clip=clip), model, criterion, (x[:3], y[:3]), (x[3:], y[3:])), expected)
        return
    session = PerExample(clip=clip).open(model, SETTING)
    criterion = LosingLess(model, **options)
    session.begin()
    with session.listening():
        session.add(criterion(model(x), y))
    (query,) = session.finish()
    assert query.group is not None
    close({n: v.double() for n, v in query.group.split(query.total).items()}, expected)


def test_backpropagation_clipping_meets_the_penalty() -> None:
    model, (x, y) = chain(), rows(7)
    c1, c2, penalty = 1.2, 0.05, 3.0
    expected = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    clipped = 0
    plain = copy.deepcopy(model)
    for i in range(7):
        h, squares = x[i : i + 1], torch.zeros(1)
        plain.zero_grad()
        for name, layer in plain.named_children():
            if not isinstance(layer, nn.Linear):
                h = layer(h)
                continue
            h = layer(h * (c1 / h.detach().norm()).clamp(max=1))
            if name != "4":
                squares = squares + h.square().mean(1)

            def clip(g: Tensor) -> Tensor:
                nonlocal clipped
                clipped += float(g.norm()) > c2
                return g * (c2 / g.norm()).clamp(max=1)

            h.register_hook(clip)
        (losses.SSEFocal(gamma=2)(h, y[i : i + 1]) + penalty / 2 * squares).sum().backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            expected[name] += p.grad.double()
    assert clipped > 0
    method = Backprop(input_clip=c1, gradient_clip=c2, norm="input")
    method.prepare(model)
    with LosingLess(model, gamma=2, penalty=penalty) as criterion:
        close(clipped_sums(method, model, criterion, (x[:3], y[:3]), (x[3:], y[3:])), expected, rtol=2e-3)


def test_backpropagation_clipping_that_clips_nothing_gives_the_gradient_of_the_whole_loss() -> None:
    model, (x, y) = network(), images(7)
    plain = copy.deepcopy(model)
    with LosingLess(plain, gamma=2, penalty=3.0) as criterion:
        criterion(plain(x), y).sum().backward()
    expected = {name: p.grad.double() for name, p in plain.named_parameters() if p.grad is not None}
    method = Backprop(input_clip=1e3, gradient_clip=1e3)
    method.prepare(model)
    with LosingLess(model, gamma=2, penalty=3.0) as criterion:
        close(clipped_sums(method, model, criterion, (x, y)), expected)


def test_a_penalty_that_would_miss_the_weights_is_refused() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(Inside(), nn.Tanh(), nn.Linear(4, 3)), rows(4)
    criterion = LosingLess(model)
    criterion(model(x), y).sum().backward()  # ordinary training can do it
    assert float(model[0].inner.weight.grad.norm()) > 0
    model.zero_grad()
    with pytest.raises(Refused, match=r"Layer '0\.inner' lies in a module with parameters of its own"):
        clipped_sums(PerExample(clip=1.0), model, criterion, (x, y))
    criterion.close()
    whole = LosingLess(model, penalty_layers="0")  # the module's own output can be penalised
    expected = naive_clipped_sum(naive_gradients(model, lambda m, x, y: whole(m(x), y), (x, y)), 0.5)
    close(clipped_sums(PerExample(clip=0.5), model, whole, (x, y)), expected)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_go_when_they_are_told_to() -> None:
    model, (x, y) = chain(), rows(3)
    with LosingLess(model) as criterion:
        assert hooks(model) == 4 and not list(criterion.parameters())
        criterion(model(x), y)
    assert hooks(model) == 0
    criterion = LosingLess(model)
    criterion.close()
    criterion.close()
    assert hooks(model) == 0
    model(x)
    with pytest.raises(Refused, match="not seen"):
        criterion(model(x), y)


def test_a_forward_pass_has_one_loss() -> None:
    model, (x, y) = chain(), rows(3)
    criterion = LosingLess(model)
    with pytest.raises(Refused, match="Call the model itself, then the loss"):
        criterion(torch.zeros(3, 3), y)
    expected = criterion(model(x), y)
    model(x[:2])  # this one was for nothing
    torch.testing.assert_close(criterion(scores := model(x), y), expected)
    with pytest.raises(Refused, match="once each"):
        criterion(scores, y)
    copied = copy.deepcopy(model)
    model(x)
    copied(10 * x)  # a copy has the hooks and is not watched
    torch.testing.assert_close(criterion(scores, y), expected)
    model(x[:2])
    with pytest.raises(Refused, match="worked on 2 records while there are 3 scores"):
        criterion(scores, y)
    with torch.no_grad():
        torch.testing.assert_close(criterion(model(x), y), expected.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = criterion(model(x), y)
        model(x)
        sizes = criterion.pre_activations.sizes(3)
        assert [size.dtype for size in sizes] == [torch.float32] * 2  # squares are not rounded to 8 bits
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: losses.Focal(gamma=-1), "gamma must be zero or a positive number, and is -1"),
        (lambda: losses.SSEFocal(gamma=math.inf), "gamma"),
        (lambda: losses.SSECrossEntropy(threshold_epoch=math.nan), "threshold_epoch must be a finite number"),
        (lambda: losses.Huber(beta=0), "beta must be a positive number, and is 0"),
        (lambda: LosingLess(chain(), penalty=-0.1), "penalty must be zero or a positive number, and is -0.1"),
        (lambda: LosingLess(chain(), penalty_layers="0,nine"), "No layer of the model matches 'nine'. There are: 0, 1"),
        (lambda: LosingLess(nn.Tanh()), "no Linear or Conv"),
        (lambda: loss("mse", chain()), "There is no loss 'mse'. There are: ce, sse, focal, sse.ce, sse.focal, losing-"),
        (lambda: loss("ce", chain(), gamma=1.0), "Loss 'ce' has no option 'gamma'. It has: none"),
        (lambda: loss("losing-less", chain(), model=1), "has no option 'model'. It has: threshold_epoch, gamma, "),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Loss], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("scores", "targets"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long)),
        (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.long)),
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 2, 4), torch.zeros(3, dtype=torch.long)),
    ],
)
def test_other_shapes_are_refused(scores: Tensor, targets: Tensor) -> None:
    for criterion in (losses.CrossEntropy(), losses.SSE()):
        with pytest.raises(Refused, match=r"scores of shape \(records, classes\)"):
            criterion(scores, targets)


def test_layers_without_records_are_refused() -> None:
    layer = nn.Linear(4, 3)
    with PreActivations(layer), pytest.raises(Refused, match=r"gives shape \(3,\)"):
        layer(torch.zeros(4))


# Whole trainings


def config(tmp_path: Path, **options: Any) -> TrainConfig:
    fast: dict[str, Any] = {
        "sampling": "partition", "batch": 512, "epochs": 2, "lr": 0.1, "noise": 2.0, "delta": 1e-5, "threads": 1,
        "model_options": {"hidden": [16]}, "out": str(tmp_path / "run"), "ledger": str(tmp_path / "digits.ledger"),
    }  # fmt: skip
    return TrainConfig(**fast | options)


@pytest.mark.parametrize("method", ["per-example", "layerwise", "batch", "backprop"])
def test_every_method_trains_with_it(tmp_path: Path, method: str) -> None:
    result = train(config(tmp_path, method=method, loss="losing-less", loss_options={"gamma": 2.0, "penalty": 0.1}))
    assert result.ended == "finished" and result.statement["steps"] == 6
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["loss"] == {"name": "losing-less", "gamma": 2.0, "penalty": 0.1}
    assert _options.resolve(_options.from_toml(tmp_path / "run" / "config.toml")).loss_options == {
        "gamma": 2.0, "penalty": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_loop_tells_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    seen: list[float] = []
    made: list[Loss] = []

    class Watched(LosingLess):
        def per_record(self, scores: Tensor, targets: Tensor) -> Tensor:
            seen.append(self.epoch)
            made.append(self)
            return super().per_record(scores, targets)

    monkeypatch.setitem(LOSSES, "losing-less", Watched)
    fast = config(tmp_path, loss="losing-less", ema=0.9, precision=precision, physical_batch=512)
    steps: list[Any] = []
    stopped = train(fast, on_progress=steps.append, stop=lambda: len(steps) >= 4)
    assert stopped.ended == "interrupted"
    done = [e for e in seen if e == 0], [e for e in seen if e == 1]
    assert seen == sorted(seen) and len(done[0]) >= 3 and 0 < len(done[1]) < 4
    assert made[0].pre_activations._handles == []  # closed with the training
    seen.clear()
    resumed = _options.resolve(_options.from_toml(tmp_path / "run" / "config.toml"))
    assert train(resumed, resume=tmp_path / "run").ended == "finished"
    assert set(seen) == {1}


def test_cross_entropy_is_the_default_and_the_loss_that_is_told(tmp_path: Path) -> None:
    assert TrainConfig().loss == "ce" and TrainConfig().loss_options == {}
    seeded: dict[str, Any] = {"noise_level": "seeded", "seed": 3, "physical_batch": 2000}
    results = [
        train(
            config(tmp_path / name, loss=name, **seeded, out=str(tmp_path / name), ledger=str(tmp_path / f"{name}.l"))
        )
        for name in ("ce", "sse")
    ]
    assert results[0].accuracy != results[1].accuracy
    for result, name in zip(results, ("ce", "sse"), strict=True):
        data = training_loop.load_data(result.config)
        model = build("mlp", input_shape=data.input_shape, classes=data.classes, hidden=[16])
        model.load_state_dict(load_file(tmp_path / name / "model.safetensors"))
        x, y = data.test.tensors
        assert result.loss == pytest.approx(float(F.cross_entropy(model(x).detach(), y)), rel=1e-4)


def parsed(*arguments: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    _options.add_train_options(parser)
    return _options.resolve(_options.from_command_line(parser.parse_args(arguments)))


def test_the_command_line_has_losses_and_activations() -> None:
    chosen = parsed("--loss", "losing-less", "--gamma", "2", "--penalty", "0.25", "--penalty-layers", "0,3",
                    "--threshold-epoch", "7", "--activation", "relu")  # fmt: skip
    assert chosen.loss == "losing-less" and chosen.model_options["activation"] == "relu"
    assert chosen.loss_options == {"gamma": 2.0, "penalty": 0.25, "penalty_layers": "0,3", "threshold_epoch": 7.0}
    assert chosen.model_options["hidden"] == [64]  # the preset's others stay
    assert parsed("--loss", "sse").loss_options == {} and parsed().loss == "ce"
    assert parsed("--clip", "0.5").method_options["clip"] == 0.5


def test_a_lower_layers_options_go_with_its_loss() -> None:
    file = {"loss": "focal", "loss_options": {"gamma": 2.0}}
    assert _options.resolve({}, file).loss_options == {"gamma": 2.0}
    assert _options.resolve({"loss": "sse+focal"}, file).loss_options == {}
    assert _options.resolve({"loss_options": {"gamma": "3"}}, file).loss_options == {"gamma": 3.0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--loss", "mse"], "There is no loss 'mse'. There are: bce, ce, focal, .*, losing-less, sae, sse, sse.ce, "),
        (["--gamma", "2"], r"Loss 'ce' has no option 'gamma' \(--gamma\). It has: none"),
        (["--loss", "focal", "--gamma", "x"], "gamma must be a number, and is 'x'"),
    ],
)
def test_bad_losses_on_the_command_line_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parsed(*arguments)


def test_a_bad_loss_in_toml_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[loss]\nname = 'focal'\nbeta = 1.0\n")
    with pytest.raises(ConfigError, match="Loss 'focal' has no option 'beta'"):
        _options.resolve(_options.from_toml(tmp_path / "bad.toml"))
    with pytest.raises(ConfigError, match="There is no loss"):
        train(config(tmp_path / "none", loss="mse"))
    assert not (tmp_path / "none").exists()


def test_the_made_up_records_of_a_run_pass(tmp_path: Path) -> None:
    model, (x, y) = network(), images(12)
    with LosingLess(model, gamma=1.0) as criterion, Run(
        model, TensorDataset(x, y), method=PerExample(clip=1.0), sampling=Poisson(batch=4),
        budget=Budget(noise=1.0, delta=1e-3, epochs=1), ledger=tmp_path / "run.ledger",
    ) as run:  # fmt: skip
        for step in run.loader:
            for inputs, targets in step:
                step.backward(criterion(model(inputs), targets))
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        assert run.finished
