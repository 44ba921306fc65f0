"""Batch clipping: the sum is the naive one, and a record can move one group's vector by 2C and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Losses, bumpy_losses
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Budget, ConfigError, FixedSize, PerExample, Poisson, Refused, Run, method
from privet.methods import Query, Session, Setting
from privet.methods.batch import Batch
from privet.noise import Source
from privet.sampling import Sample

B = 12
SETTING = Setting(batch=B, noise_multiplier=1.0, relation="add_remove")
Unit = list[tuple[Any, ...]]
"""The chunks of a group."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))


def normalised(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.BatchNorm1d(8, **options), nn.Tanh(), nn.Linear(8, 3))


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def step(session: Session, model: nn.Module, units: Iterable[Unit], losses: Losses = bumpy_losses) -> Query:
    """What a step does with these groups."""
    session.begin()
    for unit in units:
        for chunk in unit:
            with session.listening():
                session.add(losses(model, *chunk))
        if unit:
            session.end_unit()
    (query,) = session.finish()
    return query


def bounded(chosen: Batch, model: nn.Module, units: Iterable[Unit], losses: Losses = bumpy_losses) -> Query:
    session = chosen.open(model, SETTING)
    try:
        return step(session, model, units, losses)
    finally:
        session.close()


def naive(chosen: Batch, model: nn.Module, units: Iterable[tuple[Any, ...]], losses: Losses = bumpy_losses) -> Tensor:
    """The paper's (1/k)·Σ clip(mean) in float64, times the batch size."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for unit in units:
        gradients = torch.autograd.grad(losses(model, *unit).mean(), parameters)
        mean = torch.cat([g.double().flatten() for g in gradients])
        total += mean * min(1.0, chosen.clip / float(mean.norm()))
    return total * B / chosen.record_groups


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


# The sum


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("build", [network, lambda: normalised(track_running_stats=False)], ids=["plain", "batchnorm"])
def test_the_sum_is_the_naive_one(build: Callable[[], nn.Module], clip: float) -> None:
    model, x = build(), images(12)
    parts = [(x[:3],), (x[3:4],), (x[4:],)] if isinstance(model[0], nn.Conv2d) else [(x[:3],), (x[3:6],), (x[6:],)]  # type: ignore[index]
    for units in (parts, [(x,)]):
        chosen = Batch(clip=clip, record_groups=len(units))
        close(bounded(chosen, model, [[u] for u in units]).total, naive(chosen, model, units))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_a_group_in_chunks_is_clipped_once(clip: float) -> None:
    model, x = network(), images(12)
    chosen = Batch(clip=clip, record_groups=2)
    chunked = bounded(chosen, model, [[(x[:4],), (x[4:5],), (x[5:7],)], [(x[7:11],), (x[11:],)]])
    close(chunked.total, naive(chosen, model, [(x[:7],), (x[7:],)]))


def test_empty_groups_and_empty_samples_add_zero() -> None:
    model, x = network(), images(3)
    chosen = Batch(record_groups=3)
    close(bounded(chosen, model, [[], [(x,)], []]).total, naive(chosen, model, [(x,)]))
    assert not bounded(chosen, model, []).total.any()


def test_a_step_starts_from_zero() -> None:
    model, x = network(), images(8)
    session = Batch().open(model, SETTING)
    first = step(session, model, [[(x,)]]).total.clone()
    with session.listening():
        session.add(bumpy_losses(model, x[:2]))  # of a step that is left
    assert torch.equal(step(session, model, [[(x,)]]).total, first)


# Groups


class CoinOfRecord:
    """Gives each record of a known sample a coin that depends on its number only."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def integers(self, count: int, bound: int) -> Sample:
        assert count == len(self.sample)
        return self.sample * 7919 // 13 % bound


def test_one_record_more_changes_one_group_only() -> None:
    session = Batch(record_groups=4).open(network(), SETTING)
    fewer, more = np.arange(1, 40), np.arange(40)
    before, after = (session.cut(s, CoinOfRecord(s)) for s in (fewer, more))  # type: ignore[arg-type]
    assert len(before) == len(after) == 4
    changed = [g for g in range(4) if before[g].tolist() != after[g].tolist()]
    assert len(changed) == 1
    assert after[changed[0]].tolist() == [0, *before[changed[0]].tolist()]


def test_coins_are_fair_and_each_record_is_in_one_group() -> None:
    session, source = Batch(record_groups=3).open(network(), SETTING), Source("seeded", seed=0)
    sample = np.arange(100, 3100)
    first, second = session.cut(sample, source), session.cut(sample, source)
    assert sorted(np.concatenate(first)) == sample.tolist()
    assert all(900 < len(unit) < 1100 for unit in first)  # a deviation is 26
    assert 900 < len(np.intersect1d(first[0], second[0])) * 3 < 1100  # drawn anew: a deviation is 52
    assert [unit.tolist() for unit in Batch().open(network(), SETTING).cut(sample, source)] == [sample.tolist()]
    assert [len(unit) for unit in session.cut(sample[:0], source)] == [0, 0, 0]


# Sensitivity, exactly: noise off, f(D ∪ {x}) − f(D) for hostile x


def squared(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return (model(x) - targets).square().sum(1)


def hostile() -> list[tuple[Tensor, Tensor]]:
    x, y = images(1, seed=9), torch.zeros(1, 3)
    scales = [1.0, 1e-30, 1e-6, 0.0, 1e6, 1e18, 1e30, -1.0, math.nan, math.inf]
    return [(x * scale, y + target) for scale in scales for target in (0.0, 1e3, -1e3, 1e18, math.nan)]


@pytest.mark.parametrize("build", [network, lambda: normalised(track_running_stats=False)], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("groups", [1, 2])
def test_one_record_moves_the_sum_by_no_more_than_its_sensitivity(build: Callable[[], nn.Module], groups: int) -> None:
    model, chosen = build(), Batch(clip=0.5, record_groups=groups)
    others, y = images(8), torch.ones(8, 3)
    rest: list[Unit] = [[(others[4:], y[4:])]] if groups == 2 else []
    sums = [bounded(chosen, model, [[(others[:4], y[:4])], *rest], squared).total.double()]
    for x, target in hostile():
        unit = (torch.cat([others[:4], x]), torch.cat([y[:4], target]))
        query = bounded(chosen, model, [[unit], *rest], squared)
        assert torch.isfinite(query.total).all()
        assert query.sensitivity.add_remove == query.sensitivity.replace_one == 2 * 0.5 * B / groups
        sums.append(query.total.double())
    apart = torch.pdist(torch.stack(sums))  # added, and exchanged for one another
    assert apart.max() <= 2 * 0.5 * B / groups * (1 + 1e-6)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_record_can_turn_its_groups_vector_around(groups: int) -> None:
    """So the factor 2 is needed under add_remove: from +C to −C."""
    model, chosen = nn.Linear(1, 1, bias=False), Batch(clip=0.5, record_groups=groups)
    slope = lambda m, x: m(x).squeeze(1)  # noqa: E731 - the gradient is x itself
    ordinary = torch.ones(5, 1)
    before = bounded(chosen, model, [[(ordinary,)]], slope)
    after = bounded(chosen, model, [[(torch.cat([ordinary, torch.full((1, 1), -100.0)]),)]], slope)
    moved = (before.total - after.total).norm().item()
    assert 0.999 * before.sensitivity.add_remove < moved <= before.sensitivity.add_remove
    assert before.sensitivity.add_remove == 2 * 0.5 * B / groups


@pytest.mark.parametrize("scale", [1e-3, 1.0, 7.0, 1e12, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_vector_is_never_above_the_threshold(scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(997, 3, dtype=dtype)
    for seed in range(10):
        x = torch.randn(6, 997, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
        query = bounded(Batch(clip=0.7), model, [[(x[:4].to(dtype),), (x[4:].to(dtype),)]], lambda m, x: m(x).sum(1))
        assert query.total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert query.total.double().norm() <= 0.7 * B
        if scale >= 1:
            assert query.total.double().norm() > 0.7 * B * (1 - 1e-5)


def test_a_factor_too_small_for_float32_leaves_the_group_out() -> None:
    model = nn.Linear(3, 1, bias=False)
    query = bounded(Batch(clip=1e-7), model, [[(torch.full((1, 3), 3e38),)]], lambda m, x: m(x).squeeze(1) * 1e-30)
    assert query.total.norm() > 0
    query = bounded(Batch(clip=1e-7), model, [[(torch.full((1, 3), 1.1e38),)]], lambda m, x: m(x).squeeze(1))
    assert not query.total.any()


def test_the_sum_under_autocast_is_float32_and_bounded() -> None:
    model, x, chosen = network(), images(8), Batch(clip=0.5)

    def lower(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return bumpy_losses(m, x)

    total = bounded(chosen, model, [[(x,)]], lower).total
    assert total.dtype == torch.float32 and total.double().norm() <= 0.5 * B
    torch.testing.assert_close(total.double(), naive(chosen, model, [(x,)]), rtol=0.1, atol=0.05)


# Records that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_left_out(bad: float) -> None:
    model, x, chosen = network(), images(4), Batch(clip=1e6)
    found = bounded(chosen, model, [[(x,)]], lambda m, x: bumpy_losses(m, x) + torch.tensor([0.0, 0.0, bad, 0.0]))
    close(found.total, naive(chosen, model, [(x[[0, 1, 3]],)]))
    only = bounded(chosen, model, [[(x[:1],)]], lambda m, x: bumpy_losses(m, x) + bad)
    assert not only.total.any()


def test_a_group_that_a_record_made_not_finite_adds_nothing_and_the_others_stay() -> None:
    model, x, chosen = network(), images(6), Batch(record_groups=2)
    x[1] = math.nan
    close(bounded(chosen, model, [[(x[:2],), (x[2:3],)], [(x[3:],)]]).total, naive(chosen, model, [(x[3:],)]))


def test_a_finite_loss_with_a_gradient_that_is_not_adds_nothing() -> None:
    model = nn.Linear(2, 1, bias=False)
    root = lambda m, x: m(x).square().sum(1).sqrt()  # noqa: E731
    assert not bounded(Batch(), model, [[(torch.zeros(1, 2),)]], root).total.any()
    assert bounded(Batch(), model, [[(torch.ones(1, 2),)]], root).total.any()


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


# What is refused, and what the user may change


@pytest.mark.parametrize("layer", [nn.Embedding(5, 3, max_norm=1.0), nn.EmbeddingBag(5, 3, max_norm=1.0)])
def test_an_embedding_that_rewrites_its_weights_is_refused(layer: nn.Module) -> None:
    with pytest.raises(Refused, match="max_norm"):
        Batch().open(nn.Sequential(layer), SETTING)


def test_sparse_gradients_are_those_of_a_dense_layer() -> None:
    tokens = torch.tensor([[1, 2], [1, 1], [0, 4]])
    totals = []
    for sparse in (False, True):
        torch.manual_seed(0)
        totals.append(bounded(Batch(), nn.Sequential(nn.Embedding(5, 3, sparse=sparse)), [[(tokens,)]]).total)
    close(*totals)


def test_a_backward_pass_of_the_users_own_is_refused_and_dropped() -> None:
    model, x = network(), images(4)
    session = Batch().open(model, SETTING)
    session.begin()
    with pytest.raises(Refused, match=r"step.backward\(losses\)"), session.listening():
        session.add(bumpy_losses(model, x))
        bumpy_losses(model, x).mean().backward()
    assert all(p.grad is None for p in model.parameters())


def test_frozen_layers_leave_the_sum_and_new_parameters_are_refused() -> None:
    model, x = network(), images(6)
    session, chosen = Batch(clip=0.1).open(model, SETTING), Batch(clip=0.1)
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)  # type: ignore[index]
        query = step(session, model, [[(x,)]])
        assert query.group is not None and ("0.weight" in query.group.parameters) is not frozen
        close(query.total, naive(chosen, model, [(x,)]))
    model.extra = nn.Linear(3, 3)
    with pytest.raises(Refused, match=r"'extra\.(weight|bias)' was added"):
        session.begin()


def test_a_parameter_that_no_loss_reaches_gets_zero() -> None:
    model, x = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), torch.ones(3, 2)
    query = bounded(Batch(), model, [[(x,)]], lambda m, x: m[0](x).sum(1))
    assert query.group is not None
    parts = query.group.split(query.total)
    assert parts["0.weight"].any() and not parts["1.weight"].any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip": 0}, "clip must be a positive number, and is 0"),
        ({"clip": math.nan}, "clip must be"),
        ({"record_groups": 0}, "record_groups must be a whole number of at least 1"),
        ({"record_groups": 1.5}, "record_groups must be"),
        ({"record_groups": True}, "record_groups must be"),
    ],
)
def test_settings_without_a_meaning_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method("batch", **options)


# Whole runs


def problem(count: int = 400) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("physical", [7, 1000])
def test_p_grad_is_the_papers_update(physical: int) -> None:
    """(1/k)·Σ_g clip(mean_g), whatever the batch size, with noise of deviation σ·2C/k."""
    torch.manual_seed(0)
    model, dataset, chosen = nn.Linear(6, 2), problem(), Batch(clip=0.05, record_groups=3)
    options: dict[str, Any] = {"method": chosen, "sampling": Poisson(batch=40), "physical_batch": physical}
    run = Run(model, dataset, budget=Budget(noise=0.0, steps=3, delta=1e-5), noise_level="seeded", seed=0, **options)
    cut, drawn = run.session.cut, []

    def watched(sample: Sample, source: Source) -> list[Sample]:
        drawn.append(cut(sample, source))
        return drawn[-1]

    run.session.cut = watched  # type: ignore[method-assign]
    x, y = dataset.tensors
    for i, private in enumerate(run.loader):
        for batch in private:
            private.backward(entropy(model, *batch))
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        close(found, naive(chosen, model, [(x[u], y[u]) for u in drawn[i]], entropy) / B)
    assert len(drawn) == 3
    noisy = Run(model, dataset, budget=Budget(noise=1.5, steps=3, delta=1e-5), **options)
    (group,) = noisy.statement()["groups"]
    assert group["sensitivity"] == pytest.approx(2 * 0.05 * 40 / 3)
    assert group["noise_std"] / 40 == pytest.approx(1.5 * 2 * 0.05 / 3)


def test_a_small_model_with_batchnorm_learns() -> None:
    torch.manual_seed(0)
    dataset = problem()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    x, y = dataset.tensors
    assert float((model(x).argmax(1) == y).float().mean()) < 0.8
    run = Run(
        model, dataset, method=Batch(clip=0.5), sampling=Poisson(batch=64), noise_level="seeded", seed=0,
        budget=Budget(noise=0.1, steps=60, delta=1e-5), physical_batch=16,
    )  # fmt: skip
    while not run.finished:
        for private in run.loader:
            for batch in private:
                private.backward(entropy(model, *batch))
            optimizer.step()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.93


def test_empty_samples_release_too_and_replacing_is_accounted() -> None:
    model, dataset = nn.Linear(6, 2), problem(50)
    run = Run(
        model, dataset, method=Batch(record_groups=2), sampling=Poisson(batch=2), noise_level="seeded", seed=0,
        budget=Budget(noise=0.0, steps=20, delta=1e-5),
    )  # fmt: skip
    zero = 0
    for private in run.loader:
        for batch in private:
            private.backward(entropy(model, *batch))
        zero += not model.weight.grad.any()  # type: ignore[union-attr]
    assert 0 < zero < run.steps_done == 20
    fixed: dict[str, Any] = {"sampling": FixedSize(batch=10), "relation": "replace_one"}
    fixed["budget"] = Budget(noise=1.0, steps=3, delta=1e-5)
    stds = [Run(model, dataset, method=m, **fixed).statement()["groups"] for m in (Batch(), PerExample())]
    assert [g[0]["noise_std"] for g in stds] == pytest.approx([20.0, 2.0])
