"""Faults that a hostile record, model or habit could use, each once found and now closed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privet import Budget, ConfigError, Layerwise, PerExample, Poisson, Refused, Run, Ternary
from privet.gradients import Dense, Recorder, rule_for
from privet.gradients.linear import Outer, _OuterBias
from privet.gradients.per_record import RULES, row_squares
from privet.methods import Method, Setting
from privet.methods.ternary import _SignsInPassing
from privet.precision import coarseness

SETTING = Setting(batch=4, noise_multiplier=1.0, relation="add_remove")


def clipped_sum(model: nn.Module, losses: Any, clip: float = 1.0, **options: Any) -> Tensor:
    """The bounded sum of one chunk, as float64; `losses` computes them."""
    session = PerExample(clip=clip, **options).open(model, SETTING)
    session.begin()
    with session.listening():
        handed = losses()
    session.add(handed)
    (query,) = session.finish()
    session.close()
    return query.total.double().clone()


def run_of(model: nn.Module, data: Any = None, **options: Any) -> Run:
    torch.manual_seed(0)
    data = data or TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
    settings: dict[str, Any] = {
        "method": PerExample(),
        "sampling": Poisson(batch=8),
        "budget": Budget(noise=1.0, steps=6, delta=1e-5),
    }
    return Run(model, data, **settings | options)


def one_step(run: Run, model: nn.Module) -> None:
    for step in run.loader:
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="none"))
        return


def test_uses_of_a_layer_that_cancel_do_not_erase_the_others() -> None:
    """A siamese pair with huge equal inputs: its gradient is zero, its two halves are not."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False)
    a, b = torch.randn(50, 4), torch.randn(50, 4)
    huge = torch.full((1, 4), 1e12)

    def losses(a: Tensor, b: Tensor) -> Tensor:
        return (layer(a) - layer(b)).sum(1)

    without = clipped_sum(layer, lambda: losses(a, b))
    having = clipped_sum(layer, lambda: losses(torch.cat([a, huge]), torch.cat([b, huge])))
    assert (having - without).norm() <= 1


@pytest.mark.parametrize("width", [2048, 8192])
def test_wide_layers_with_two_cancelling_positions_stay_within_the_bound(width: int) -> None:
    """The rounding error of a Gram matrix grows with what it sums over, and so must its margin."""
    torch.manual_seed(0)
    layer = nn.Linear(width, 64, bias=False)
    worst = 0.0
    for _ in range(100):
        first = 1 + torch.rand(())
        second = first * (1 + (torch.rand(()) - 0.5) * 1e-2)
        x = 100 * torch.stack([first.expand(width), second.expand(width)]).unsqueeze(0)

        def losses(x: Tensor = x) -> Tensor:
            out = layer(x)
            return (out[:, 0] - out[:, 1]).sum(1)

        worst = max(worst, float(clipped_sum(layer, losses).norm()))
    assert worst <= 1


@pytest.mark.parametrize("entries", [10**5, 10**7])
def test_the_norm_of_many_equal_entries_is_not_lost(entries: int) -> None:
    rows = torch.full((1, entries), 0.1)
    true = rows.double().square().sum()
    assert float(row_squares(rows)) >= float(true) * (1 - 2.0**-14)


def test_a_tiny_clip_does_not_round_factors_up() -> None:
    layer = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.2e19, -1.2e19]])
    for clip in (1e-3, 1e-6):
        assert clipped_sum(layer, lambda: layer(x).sum(1) * 1e18, clip=clip).norm() <= clip


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_bounds_are_full_precision_whatever_the_model_may_use(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(3, 5, 64)
    exact = clipped_sum(layer, lambda: layer(x).square().sum((1, 2)))
    try:
        torch.set_float32_matmul_precision(precision)
        found = clipped_sum(layer, lambda: layer(x).square().sum((1, 2)))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(found, exact, rtol=5e-2, atol=1e-3)


@pytest.mark.parametrize("method", [PerExample(clip=1.0), Layerwise(clip=1.0), Ternary(clip=1.0)])
def test_sums_are_full_precision_too(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of lower precision may be longer than the norms that its factors were made from."""
    seen = set()

    def watched(sum_of: Any) -> Any:
        def watch(self: Any, *args: Any) -> Any:
            seen.add((coarseness("cpu"), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return sum_of(self, *args)

        return watch

    for kind, name in ((Outer, "weighted_sum"), (Dense, "weighted_sum"), (_SignsInPassing, "sum"), (Dense, "dense")):
        monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    model = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3))
    session = method.open(model, SETTING)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            with session.listening():
                losses = model(torch.randn(3, 4)).float().square().sum(1)
            session.add(losses)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
        session.close()
    assert seen == {(0.0, False, False)}


class Tied(nn.Module):
    """One weight for two layers over positions, whose gradients are added record by record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(8))
def test_shared_weights_are_bounded_under_autocast(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Tied(), torch.randn(1, 3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert clipped_sum(model, lambda: 100 * model(x).float().square().sum((1, 2))).norm() <= 1


def test_a_chunk_that_failed_half_way_cannot_be_handed_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    run = run_of(model, check=False)

    def fails(self: _OuterBias, weights: Tensor, total: Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr(_OuterBias, "accumulate", fails)  # of the bias, after the weight was added
    with run:
        step = next(iter(run.loader))
        chunks = iter(step)
        x, y = next(chunks)
        losses = F.cross_entropy(model(x), y, reduction="none")
        with pytest.raises(MemoryError):
            step.backward(losses)
        with pytest.raises(Refused, match="once for each chunk"):
            step.backward(losses)


# Models that change


def test_a_layer_put_in_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    with run_of(model) as run:
        one_step(run, model)
        model[1] = nn.Linear(8, 3)
        with pytest.raises(Refused, match="after the Run was made"):
            one_step(run, model)


def test_batchnorm_switched_on_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))
    model[1].eval()
    with run_of(model) as run:
        one_step(run, model)
        model.eval()
        model.train()  # as everybody does after evaluating, and BatchNorm with it
        before = model[1].running_mean.clone()
        with pytest.raises(Refused, match="BatchNorm1d"):
            one_step(run, model)
        assert torch.equal(model[1].running_mean, before)
        assert run.steps_done == 1


def test_a_buffer_that_a_private_pass_changes_is_refused_before_release() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros(4))
            self.quiet = True

        def forward(self, x: Tensor) -> Tensor:
            if not self.quiet:
                self.seen += x.detach().sum(0)
            return self.layer(x)

    model = Counting()
    with run_of(model) as run:
        one_step(run, model)
        model.quiet = False
        with pytest.raises(Refused, match="Buffer 'seen'"):
            one_step(run, model)
        assert run.steps_done == 1
        assert model.layer.weight.grad is None


def test_another_memory_format_later_does_not_mix_gradients_up() -> None:
    def gradient(change: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        data = TensorDataset(torch.randn(16, 3, 4, 4), torch.randint(0, 3, (16,)))
        options: dict[str, Any] = {"noise_level": "seeded", "seed": 1, "budget": Budget(noise=0.0, steps=2, delta=1e-5)}
        with run_of(model, data, **options) as run:
            if change:
                model.to(memory_format=torch.channels_last)
            one_step(run, model)
        assert model[0].weight.grad is not None
        return model[0].weight.grad.contiguous()

    torch.testing.assert_close(gradient(True), gradient(False))


def test_mixing_records_in_the_collate_function_is_refused() -> None:
    def mixing(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = torch.stack([item[0] for item in items]), torch.stack([item[1] for item in items])
        return 0.7 * x + 0.3 * x.roll(1, 0), y

    model = nn.Linear(4, 3)
    with run_of(model, loader_options={"collate_fn": mixing}) as run, pytest.raises(Refused, match="changes when"):
        one_step(run, model)


# Habits


def test_an_optimizer_inside_of_the_inner_loop_is_refused() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run_of(model) as run, pytest.raises(Refused, match="after the inner loop"):
        for step in run.loader:
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()


def test_a_loader_in_place_of_the_data_set_is_refused() -> None:
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
    with pytest.raises(ConfigError, match=r"give its data set \(loader\.dataset\)"):
        run_of(nn.Linear(4, 3), DataLoader(data))


def test_an_ordinary_backward_in_place_of_the_steps_own_is_explained() -> None:
    model = nn.Linear(4, 3)
    with run_of(model) as run, pytest.raises(Refused, match=r"step\.backward\(losses\)"):
        for step in run.loader:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()


def test_a_rule_that_forgets_a_parameter_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.shift

    @rule_for(Scale)
    def scale(layer: Scale, z: Tensor, delta: Tensor) -> dict[str, Dense]:
        return {"weight": Dense.of(z * delta)}

    try:
        model = nn.Sequential(Scale())
        recorder = Recorder(model)
        with recorder.recording(), pytest.raises(Refused, match="'shift'"):
            recorder.backward(model(torch.randn(3, 4)).sum(1))
        recorder.close()
    finally:
        del RULES[Scale]


def test_an_output_that_cannot_be_looked_into_is_refused() -> None:
    class Answer:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Answer:
            return Answer(x + self.shift)

    model = Own()
    recorder = Recorder(model)
    with recorder.recording(), pytest.raises(Refused, match="Answer"):
        model(torch.randn(2, 3))
    recorder.close()
