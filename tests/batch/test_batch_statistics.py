"""Batch clipping and what a model keeps of its batches: statistics of public records, and nothing of private ones."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import bumpy_losses
from grouped import SETTING, bounded, images, naive, normalised, problem, release, running, step
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Budget, Poisson, Refused, Run
from privet.methods.batch import Batch

# Batch statistics and buffers


def test_batchnorm_with_running_statistics_is_refused_with_the_ways_out() -> None:
    model = normalised()
    with pytest.raises(Refused, match=r"'2' \(BatchNorm1d\).*batchnorm_to_groupnorm.*track_running_stats=False"):
        Batch().open(model, SETTING)
    model[2].eval()  # type: ignore[index]
    session = Batch().open(model, SETTING)
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert step(session, model, [[(images(5),)]]).total.any()
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    model.train()
    with pytest.raises(Refused, match="running statistics"):
        session.begin()


def test_a_record_by_itself_passes_batchnorm() -> None:
    """x − mean is zero, so the layer gives its bias, as it does for two equal records."""
    model, x = normalised(track_running_stats=False), images(1)
    found = bounded(Batch(clip=1e6), model, [[(x,)]])
    expected = naive(Batch(clip=1e6), model, [(torch.cat([x, x]),)])
    assert expected[-3:].abs().min() > 1  # the last layer's bias
    torch.testing.assert_close(found.total.double(), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="more than 1 value"):
        model(x)  # the model is as it was


class Keeps(nn.Module):
    """Keeps something of its last batch in a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.tensor([math.nan, -0.0, 1.5]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "in place":
                self.mean.copy_(x.mean(0)[:3])
            elif self.how == "behind autograd's back":
                self.mean.data[1] = 0.0
            elif self.how == "exchanged":
                self.count = self.count + 1
            elif self.how == "added":
                self.register_buffer("last", x.clone())
        return x


@pytest.mark.parametrize(
    ("how", "name"),
    [("in place", "mean"), ("behind autograd's back", "mean"), ("exchanged", "count"), ("added", "last")],
)
def test_a_buffer_that_a_private_pass_changes_is_put_back_and_refused(how: str, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Keeps(how))
    dataset = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
    before = {n: (b, b.numpy().tobytes()) for n, b in model.named_buffers()}
    run = Run(model, dataset, method=Batch(), sampling=Poisson(batch=10), budget=Budget(noise=1.0, steps=2, delta=1e-5))
    with pytest.raises(Refused, match=f"Buffer '1.{name}' was changed"):
        for private in run.loader:
            for (x,) in private:
                private.backward(bumpy_losses(model, x))
    now = dict(model.named_buffers())
    assert now.keys() == before.keys()
    assert all(now[n] is b and b.numpy().tobytes() == bits for n, (b, bits) in before.items())
    assert run.steps_done == 0
    run.close()


def test_a_buffer_that_stays_is_no_matter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Keeps("not"))
    assert bounded(Batch(), model, [[(torch.ones(2, 4),)]]).total.any()


# BatchNorm and public records


def with_statistics() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def public_statistics(model: nn.Module, public: Tensor, size: int) -> dict[str, Tensor]:
    """Those of a fresh copy of the model, by torch's own cumulative mean over public batches."""
    twin = copy.deepcopy(model).train()
    for layer in twin.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.momentum = None
    with torch.no_grad():
        for batch in public.split(size):
            if len(batch) == size:
                twin(batch)
    return dict(twin.named_buffers())


def test_statistics_are_those_of_public_records_with_the_weights_of_the_epochs_start() -> None:
    model, public = with_statistics(), TensorDataset(torch.randn(25, 6) + 3, torch.zeros(25, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    momentum = model[1].momentum
    with running(model, Batch(clip=0.5, record_groups=2), public=public, physical_batch=7) as run:
        for number in range(9):
            if number % 4 == 0:  # four steps are an epoch
                expected = public_statistics(model, public.tensors[0], 7)
            release(run, range(number, number + 12))
            for name, buffer in model.named_buffers():
                torch.testing.assert_close(buffer, expected[name], msg=f"{name} in step {number}")
            assert model[1].num_batches_tracked == 3
            optimizer.step()
        model.eval()
        for x, _ in run.refresh():
            assert model[1].training
            model(x)
        expected = public_statistics(model, public.tensors[0], 7)
        assert all(torch.allclose(b, expected[n], rtol=1e-4) for n, b in model.named_buffers())
        for x, _ in run.refresh():  # left in the middle: the next pass begins from nothing all the same
            model(x * 100)
            break
        for x, _ in run.refresh():
            model(x)
        assert all(torch.allclose(b, expected[n], rtol=1e-4) for n, b in model.named_buffers())
    assert not any(layer.training for layer in model.modules()) and model[1].momentum == momentum


def test_private_records_leave_no_trace_in_the_statistics() -> None:
    seen = []
    for private in (problem(40), TensorDataset(problem(40).tensors[0] * 50 - 9, problem(40).tensors[1])):
        model = with_statistics()
        public = TensorDataset(torch.linspace(-1, 1, 120).view(20, 6), torch.zeros(20, dtype=torch.int64))
        with running(model, Batch(clip=0.5), private, public=public) as run:
            for number in range(5):
                release(run, range(number, number + 10))
        seen.append({name: buffer.numpy().tobytes() for name, buffer in model.named_buffers()})
    assert seen[0] == seen[1] and len(seen[0]) == 3


class Marked(nn.InstanceNorm1d):
    """Statistics that torch does not average over batches as BatchNorm's."""


@pytest.mark.parametrize("layer", [nn.InstanceNorm1d(3, track_running_stats=True), Marked(3, track_running_stats=True)])
def test_running_statistics_that_cannot_be_estimated_are_refused_even_with_public_records(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Unflatten(1, (3, 2)), layer, nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(Refused, match="running statistics"):
        running(model, Batch(), public=problem(20))
