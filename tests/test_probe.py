"""Losses that couple records are refused before the first private record, by what they do and not by layer names."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
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


def attempt(
    model: nn.Module,
    losses: Callable[[nn.Module, Tensor, Tensor], Tensor],
    dataset: TensorDataset | None = None,
    **options: Any,
) -> Run:
    run = Run(
        model, dataset or data(), method=PerExample(), sampling=Poisson(batch=BATCH),
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


def limited(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """No value shows it, and no gradient of one record alone: a hook looks at the gradients of all."""
    first, *rest = model
    h = first(x)
    h.register_hook(lambda g: g / g.norm().clamp(min=1))
    return F.cross_entropy(nn.Sequential(*rest)(h), y, reduction="none")


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
    "centred as a whole": lambda m, x, y: entropy(m, x - x.mean(), y),
    "divided by the largest": lambda m, x, y: entropy(m, x / x.max(), y),
    "divided by the largest if it is large": lambda m, x, y: entropy(m, x / x.abs().max().clamp(min=1), y),
    "a branch over the batch": lambda m, x, y: entropy(m, x / 255 if bool(x.max() > 1) else x, y),
    "the records so far": lambda m, x, y: entropy(m, x.cumsum(0), y),
    "minus the first": lambda m, x, y: entropy(m, x - x[:1], y),
    "mixed by a coin of PyTorch": lambda m, x, y: entropy(m, x + x.flip(0) if bool(torch.rand(()) < 0.2) else x, y),
    "mixed by a coin of numpy": lambda m, x, y: entropy(m, x + x.flip(0) if np.random.rand() < 0.2 else x, y),
    "mixed by a coin of Python": lambda m, x, y: entropy(m, x + x.flip(0) if random.random() > 0.8 else x, y),
    "gradients limited over the batch": limited,
}  # fmt: skip


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_records_are_refused(name: str) -> None:
    model = net()
    with pytest.raises(Refused, match=r"(another record|The loss of)") as refusal:
        attempt(model, COUPLED[name])
    assert "check=False" in str(refusal.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", COUPLED)
def test_dropout_does_not_hide_the_coupling(name: str) -> None:
    with pytest.raises(Refused):
        attempt(net(nn.Dropout(0.3)), COUPLED[name])


class Noisy(nn.Module):
    """Random in training, in a way that no mode switches off."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn_like(x)


@pytest.mark.parametrize("name", COUPLED)
def test_randomness_does_not_hide_the_coupling(name: str) -> None:
    with pytest.raises(Refused):
        attempt(net(Noisy()), COUPLED[name])


def test_randomness_of_each_record_is_allowed() -> None:
    assert attempt(net(Noisy()), entropy).steps_done == 2
    assert attempt(net(nn.Dropout(0.5)), lambda m, x, y: entropy(m, F.dropout(x, 0.3), y)).steps_done == 2


def test_data_in_the_order_of_its_classes_is_looked_at_all_over() -> None:
    """Weights by the classes of the batch change nothing where all records have one class."""
    x, y = data(60).tensors
    for sorted_y in (y.sort().values, torch.arange(60) % 2):
        with pytest.raises(Refused, match="The loss of a record changes"):
            attempt(net(), class_weights, dataset=TensorDataset(x, sorted_y))


def test_records_that_come_sorted_do_not_hide_that_they_are_sorted() -> None:
    x = torch.arange(32.0).view(-1, 1).expand(-1, 6) / 32

    class Ordered(nn.Module):
        """What the second layer meets is in the order of the labels, and is put back after it."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            order = y.argsort()
            return self.last(self.first(x)[order])[order.argsort()]

    with pytest.raises(Refused, match="at another record"):
        attempt(
            Ordered(),
            lambda m, x, y: F.cross_entropy(m(x, y), y % 3, reduction="none"),
            dataset=TensorDataset(x, torch.arange(32)),
        )


def test_codes_in_a_float_tensor_stay_valid_ones() -> None:
    """A wild record may not have a category that does not exist."""
    codes = torch.arange(32.0).view(-1, 1) % 5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(5, 4), nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.table(x[:, 0].long()), x[:, 1:]], 1))

    x, y = data().tensors
    dataset = TensorDataset(torch.cat([codes, x], 1), y.float())
    run = attempt(Net(), lambda m, x, y: entropy(m, x, y.long()), dataset=dataset)
    assert run.steps_done == 2


def test_code_that_cannot_take_a_wild_record_is_told_what_it_was(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="p_in"):
        attempt(net(), lambda m, x, y: entropy(m, torch.bernoulli(x), y))
    assert "between -1000 and 1000" in caplog.text and "check=False" in caplog.text


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["in place", "around autograd", "exchanged"])
def test_a_parameter_that_a_forward_pass_changes_is_refused(how: str, frozen: bool) -> None:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(8), requires_grad=not frozen)

        def forward(self, x: Tensor) -> Tensor:
            mean = x.detach().mean(0)
            with torch.no_grad():
                if how == "in place":
                    self.centre.lerp_(mean, 0.1)
                elif how == "around autograd":
                    self.centre.data.copy_(mean)
                else:
                    self.centre = nn.Parameter(mean, requires_grad=not frozen)
            return x

    with pytest.raises(Refused, match=r"1\.centre"):
        attempt(net(Centre()), entropy)


@pytest.mark.parametrize("how", ["in place", "around autograd", "exchanged"])
def test_a_buffer_that_only_private_records_change_is_put_back_and_nothing_is_released(how: str) -> None:
    class Top(nn.Module):
        """The largest number of any record, from more than made-up ones have."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("top", torch.tensor(1e6))

        def forward(self, x: Tensor) -> Tensor:
            top = torch.maximum(self.top, x.detach().max())
            if how == "in place":
                self.top.copy_(top)
            elif how == "around autograd":
                self.top.data.copy_(top)
            elif bool(top > self.top):
                self.top = top
            return x

    x, y = data().tensors
    model = nn.Sequential(Top(), net())
    with pytest.raises(Refused, match=r"'0\.top'.*put back"):
        attempt(model, entropy, dataset=TensorDataset(x * 1e7, y))
    assert float(model[0].top) == 1e6 and all(p.grad is None for p in model.parameters())


def test_a_parameter_that_only_private_records_change_stops_the_step() -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Parameter(torch.tensor(1e6), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if bool(x.max() > self.top):
                self.top.copy_(x.detach().max())
            return x

    x, y = data().tensors
    model = nn.Sequential(Top(), net())
    with pytest.raises(Refused, match=r"'0\.top' was changed in the middle"):
        attempt(model, entropy, dataset=TensorDataset(x * 1e7, y))
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_outside_of_the_model_is_refused_with_the_way_out() -> None:
    head = nn.Linear(3, 3)
    with pytest.raises(Refused, match=r"\(3, 3\).*not part of the private model.*requires_grad_\(False\)"):
        attempt(net(), lambda m, x, y: F.cross_entropy(head(m(x)), y, reduction="none"))
    assert head.weight.grad is None
    head.requires_grad_(False)
    assert attempt(net(), lambda m, x, y: F.cross_entropy(head(m(x)), y, reduction="none")).steps_done == 2


def test_a_sequence_model_that_takes_the_records_for_its_positions_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cell(x)[0])

    with pytest.raises(Refused, match=r"'cell' \(GRU\).*one record at a time"):
        attempt(Net(), entropy)


def test_a_list_with_an_entry_for_each_record_is_refused_and_a_tensor_is_not() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor, lengths: Any) -> Tensor:
            if isinstance(lengths, list):
                return torch.stack([self.scale * row / n for row, n in zip(x, lengths, strict=False)])
            return self.scale * x / lengths.view(-1, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.last = Pool(), nn.Linear(6, 3)

        def forward(self, x: Tensor, lengths: Any) -> Tensor:
            return self.last(self.pool(x, lengths))

    def losses(lengths: Callable[[Tensor], Any]) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        return lambda m, x, y: F.cross_entropy(m(x, lengths(y)), y, reduction="none")

    with pytest.raises(Refused, match=r"'pool' \(Pool\).*lists with an entry for each record"):
        attempt(Net(), losses(lambda y: [1.0 + n for n in y.tolist()]))
    assert attempt(Net(), losses(lambda y: 1.0 + y)).steps_done == 2


def test_a_mode_that_changes_in_the_middle_of_a_step_is_refused() -> None:
    model = net(nn.Dropout(0.5))
    run = Run(
        model, data(), method=PerExample(), sampling=Poisson(batch=BATCH), budget=Budget(noise=1, steps=2, delta=1e-5),
    )  # fmt: skip
    step = next(iter(run.loader))
    model.eval()  # before its first batch is early enough: it is what is checked
    with pytest.raises(Refused, match="in the middle of a step"):
        for number, (x, y) in enumerate(step):
            if number == 20:
                model.train()
            step.backward(entropy(model, x, y))
        assert number < 20
        model.train()
        run._refuse_changes()
    run.close()


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
