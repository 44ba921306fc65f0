"""Losses that couple records are refused before the first private record, by what they do and not by layer names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Budget, PerExample, Poisson, Refused, Run

BATCH = 8


def data(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 3)


def attempt(model: nn.Module, losses: Callable[[nn.Module, Tensor, Tensor], Tensor], **options: Any) -> Run:
    run = Run(
        model, data(), method=PerExample(), sampling=Poisson(batch=BATCH),
        budget=Budget(noise=1.0, steps=2, delta=1e-5), **options,
    )  # fmt: skip
    try:
        for step in run.loader:
            for x, y in step:
                step.backward(losses(model, x, y))
    finally:
        run.close()
    return run


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def net(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def class_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=3).clamp(min=1)
    return entropy(model, x, y) / counts[y]


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none")


def ranked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = entropy(model, x, y)
    return losses * (losses >= losses.median())


def straight_through(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Only the gradients are mixed: no value changes with another record."""
    losses = entropy(model, x, y)
    return losses + losses.sum() - losses.sum().detach()


COUPLED: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "inputs centred over the batch": lambda m, x, y: entropy(m, x - x.mean(0), y),
    "outputs centred over the batch": lambda m, x, y: F.cross_entropy(m(x) - m(x).mean(0), y, reduction="none"),
    "mean taken without gradient": lambda m, x, y: F.cross_entropy(
        m(x) - m(x).mean(0).detach(), y, reduction="none"
    ),
    "weights from class counts": class_weights,
    "divided by the batch size": lambda m, x, y: entropy(m, x, y) / len(x),
    "all mixed": lambda m, x, y: entropy(m, x, y).mean().expand(len(x)),
    "contrastive": contrastive,
    "hard examples": ranked,
    "rolled": lambda m, x, y: entropy(m, x, y).roll(1),
    "flipped": lambda m, x, y: entropy(m, x.flip(0), y),
    "straight through": straight_through,
    "sorted": lambda m, x, y: entropy(m, x, y).sort().values,
}  # fmt: skip


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_records_are_refused(name: str) -> None:
    model = net()
    with pytest.raises(Refused, match=r"(another record|The loss of)") as refusal:
        attempt(model, COUPLED[name])
    assert "check=False" in str(refusal.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", [n for n in COUPLED if n != "divided by the batch size"])
def test_dropout_does_not_hide_the_coupling(name: str) -> None:
    with pytest.raises(Refused):
        attempt(net(nn.Dropout(0.3)), COUPLED[name])


def test_dropout_does_not_hide_a_division_by_the_batch_size() -> None:
    with pytest.raises(Refused):
        attempt(net(nn.Dropout(0.3)), COUPLED["divided by the batch size"])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)])
def test_batch_norm_in_training_mode_is_refused_with_the_way_out(norm: nn.Module) -> None:
    model = net(norm)
    before = {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(Refused, match=r"'1' \(BatchNorm1d\).*batchnorm_to_groupnorm.*eval\(\)"):
        attempt(model, entropy)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_batch_norm_without_running_statistics_is_refused() -> None:
    with pytest.raises(Refused, match=r"'1' \(BatchNorm1d\)"):
        attempt(net(nn.BatchNorm1d(8, track_running_stats=False)), entropy)


def test_frozen_batch_norm_is_allowed() -> None:
    model = net(nn.BatchNorm1d(8))
    model[1].eval()
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert attempt(model, entropy).steps_done == 2
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_instance_norm_with_running_statistics_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x.view(-1, 2, 3)).flatten(1))

    with pytest.raises(Refused, match=r"running_mean.*'norm' \(InstanceNorm1d\)"):
        attempt(Net(), entropy)


def test_a_buffer_of_the_users_own_is_refused() -> None:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
            return x

    with pytest.raises(Refused, match=r"'1\.centre'"):
        attempt(net(Centre()), entropy)


@pytest.mark.parametrize("between", [[nn.Dropout(0.5)], [nn.GroupNorm(2, 8)], [nn.LayerNorm(8)], []])
def test_what_is_independent_is_allowed(between: list[nn.Module]) -> None:
    assert attempt(net(*between), entropy).steps_done == 2


def test_a_layer_with_dropout_inside_and_no_rule_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None].expand(-1, 4, -1)
            return self.out(self.mix(x, x, x)[0].mean(1))

    with pytest.raises(Refused, match=r"'mix' \(MultiheadAttention\).*dropout"):
        attempt(Net(), entropy)


def test_losses_that_are_not_finite_on_made_up_records_are_refused() -> None:
    with pytest.raises(Refused, match="not finite"):
        attempt(net(), lambda m, x, y: entropy(m, x, y) / 0)


def test_a_parameter_used_functionally_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"'0\.weight'"):
        attempt(net(), lambda m, x, y: entropy(m, x, y) + m[0].weight.square().sum())  # type: ignore[index, union-attr]


def test_the_check_leaves_no_trace() -> None:
    """No step is taken, the random state is the user's, and nothing of the made-up records is released."""
    model, seen = net(nn.Dropout(0.5)), []
    run = Run(
        model, data(), method=PerExample(), sampling=Poisson(batch=BATCH), budget=Budget(noise=0, steps=1, delta=1e-5)
    )
    torch.manual_seed(5)
    state = torch.get_rng_state()
    true = {tuple(row.tolist()) for row in data().tensors[0]}
    for step in run.loader:
        for x, y in step:
            private = all(tuple(row.tolist()) in true for row in x)
            if private and not seen:
                assert torch.equal(torch.get_rng_state(), state)
            seen.append(private)
            assert private or run.steps_done == 0
            step.backward(entropy(model, x, y) * (1 if private else 1e3))
    assert seen.count(False) == 14 and seen[14:] and all(seen[14:])
    assert sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5 <= 4
    run.close()


def test_the_check_can_be_switched_off_and_the_statement_says_so() -> None:
    run = attempt(net(), COUPLED["divided by the batch size"], check=False)
    assert run.steps_done == 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_tiny_data_sets_can_be_checked(count: int) -> None:
    model = net()
    run = Run(
        model, data(count), method=PerExample(), sampling=Poisson(batch=1), budget=Budget(noise=1, steps=1, delta=1e-5)
    )
    for step in run.loader:
        for x, y in step:
            step.backward(entropy(model, x, y))
    assert run.steps_done == 1
    run.close()
