"""Batch clipping: the sum is the naive one, and a record can move one group's vector by 2C and nothing else."""

from __future__ import annotations

import copy
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
from privet.methods import Query, Sensitivity, Session, Setting
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


# Users, public records, local steps and frozen weights


def linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def with_statistics() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def running(model: nn.Module, chosen: Batch, dataset: TensorDataset | None = None, **options: Any) -> Run:
    """Without noise, on 40 records in expected samples of 10."""
    settings: dict[str, Any] = {"sampling": Poisson(batch=10), "noise_level": "seeded", "seed": 0}
    settings["budget"] = Budget(noise=0.0, steps=100, delta=1e-5)
    return Run(model, problem(40) if dataset is None else dataset, method=chosen, **settings | options)


def release(run: Run, sample: Iterable[int], losses: Losses = entropy) -> dict[str, Tensor]:
    """The sums of a step on this sample, by parameter."""
    private = run.step_on(np.array(list(sample), dtype=np.int64))
    for batch in private:
        private.backward(losses(run.model, *batch))
    return {n: p.grad.double() * run.sampling.batch for n, p in run.model.named_parameters() if p.grad is not None}


def flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.double().flatten() for part in parts.values()])


def clipped(vector: Tensor, clip: float) -> Tensor:
    return vector * min(1.0, clip / float(vector.norm()))


def mean_gradient(model: nn.Module, records: Any, dataset: TensorDataset | None = None) -> Tensor:
    x, y = (problem(40) if dataset is None else dataset).tensors
    found = torch.autograd.grad(entropy(model, x[records], y[records]).mean(), list(model.parameters()))
    return torch.cat([g.double().flatten() for g in found])


def test_each_layer_of_a_groups_vector_is_clipped_by_itself() -> None:
    model, clips = linear(), {"0": 0.02, "2": 0.05}
    with running(model, Batch(clip=clips, groups="layer", record_groups=2)) as run:
        run.source.integers = lambda count, bound: np.arange(count) % bound  # type: ignore[method-assign]
        found = release(run, range(10))
        assert {q.name: q.sensitivity for q in run.session.finish()} == {
            g: Sensitivity(add_remove=2 * c * 10 / 2, replace_one=2 * c * 10 / 2) for g, c in clips.items()
        }
    first, second = (mean_gradient(model, range(start, 10, 2)) for start in (0, 1))
    parts = [(slice(0, 28), 0.02), (slice(28, 38), 0.05)]
    expected = torch.cat([clipped(first[part], c) + clipped(second[part], c) for part, c in parts]) * 10 / 2
    close(flat(found), expected)


# Users


USERS = [(7 * i) % 11 for i in range(40)]
"""Eleven users with interleaved records, in order of their first: 0, 7, 3, 10, 6, …"""


def of_user(user: int) -> list[int]:
    return [i for i, u in enumerate(USERS) if u == user]


@pytest.mark.parametrize("physical", [2, 100])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_users_are_clipped_each_as_one(clip: float, physical: int) -> None:
    model, chosen = linear(), Batch(clip=clip, record_groups="user")
    for users in (USERS, [f"user {u}" for u in USERS], torch.tensor(USERS), np.array(USERS)):
        with running(model, chosen, users=users, physical_batch=physical, sampling=Poisson(batch=4)) as run:
            found = flat(release(run, [0, 2, 3]))  # users by the order of their first records: 0, 3 and 10
            assert run.size == run.records == 11
            (query,) = run.session.finish()
            assert query.sensitivity == Sensitivity(add_remove=clip, replace_one=2 * clip)
        close(found, sum(clipped(mean_gradient(model, of_user(u)), clip) for u in (0, 3, 10)))


def test_the_order_of_records_does_not_matter_to_users() -> None:
    model, order = linear(), np.random.default_rng(0).permutation(40)
    x, y = problem(40).tensors
    sums = []
    for records in (np.arange(40), order, np.argsort(USERS, kind="stable")):
        users = [USERS[i] for i in records]
        numbers = {user: number for number, user in enumerate(dict.fromkeys(users))}
        dataset = TensorDataset(x[records], y[records])
        with running(model, Batch(clip=0.05, record_groups="user"), dataset, users=users) as run:
            sums.append(flat(release(run, [numbers[u] for u in (1, 4, 5)])))
    close(sums[0], sums[1])
    close(sums[0], sums[2])


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e20, math.nan])
def test_a_hostile_user_moves_the_sum_by_the_clip_at_most(scale: float) -> None:
    model, (x, y) = linear(), problem(40).tensors
    x[of_user(6)] *= scale
    with running(model, Batch(clip=0.05, record_groups="user"), TensorDataset(x, y), users=USERS) as run:
        numbers = list(dict.fromkeys(USERS))
        others = [numbers.index(u) for u in (1, 2, 3)]
        moved = flat(release(run, [*others, numbers.index(6)])) - flat(release(run, others))
    assert moved.norm() <= 0.05 * (1 + 1e-5)
    assert scale != 1e3 or moved.norm() > 0.05 * (1 - 1e-4)


# Local steps


@pytest.mark.parametrize("physical", [3, 100])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.3), {"local_lr": 0.3}),
        (lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8), {"local_lr": 0.3, "local_momentum": 0.8}),
        (lambda p: torch.optim.Adam(p, lr=0.02), {"local_lr": 0.02, "local_optimizer": "Adam"}),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_local_steps_are_those_of_an_ordinary_optimizer(
    clip: float, optimizer: Any, options: dict[str, Any], physical: int
) -> None:
    """v = (w₀ − w_K)/η for each group, clipped; the model is left as it was."""
    model, expected = linear(), torch.zeros(38, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    for start in (0, 1):
        local = linear()
        steps = optimizer(local.parameters())
        x, y = (t[start:10:2] for t in problem(40).tensors)
        for _ in range(4):
            steps.zero_grad()
            entropy(local, x, y).mean().backward()
            steps.step()
        change = torch.cat([(before[n] - p.detach()).double().flatten() for n, p in local.named_parameters()])
        expected += clipped(change / options["local_lr"], clip)
    with running(model, Batch(clip=clip, record_groups=2, local_steps=4, **options), physical_batch=physical) as run:
        run.source.integers = lambda count, bound: np.arange(count) % bound  # type: ignore[method-assign]
        found = flat(release(run, range(10)))
        torch.testing.assert_close(found, expected * 10 / 2, rtol=1e-3, atol=1e-4 * min(1, clip))
        assert not release(run, [])["0.weight"].any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_users_take_local_steps_too() -> None:
    model, expected = linear(), torch.zeros(38, dtype=torch.float64)
    for user in (0, 3):
        local = linear()
        x, y = (t[of_user(user)] for t in problem(40).tensors)
        steps = torch.optim.SGD(local.parameters(), lr=0.3)
        for _ in range(3):
            steps.zero_grad()
            entropy(local, x, y).mean().backward()
            steps.step()
        pairs = zip(model.parameters(), local.parameters(), strict=True)
        expected += clipped(torch.cat([(p - q).detach().double().flatten() for p, q in pairs]) / 0.3, 0.2)
    with running(model, Batch(clip=0.2, record_groups="user", local_steps=3, local_lr=0.3), users=USERS) as run:
        torch.testing.assert_close(flat(release(run, [0, 2])), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", ["error", "break"])
def test_a_step_left_in_the_middle_of_a_group_leaves_no_private_weights(how: str) -> None:
    """Neither in the model right after, nor in what the next step starts from."""
    model = linear()
    before = copy.deepcopy(model.state_dict())
    with running(model, Batch(clip=0.1, local_steps=3, local_lr=0.5), physical_batch=4) as run:
        expected = release(run, range(10))
        moved = False

        def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            nonlocal moved
            moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
            if moved:
                raise RuntimeError("stop")
            return entropy(model, x, y)

        if how == "error":
            with pytest.raises(RuntimeError, match="stop"):
                release(run, range(10), losses)
        else:
            private = run.step_on(np.arange(10))
            for x, y in private:
                if not torch.equal(model[0].weight, before["0.weight"]):
                    moved = True
                    break
                private.backward(entropy(model, x, y))
        assert moved
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        again = release(run, range(10))
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_a_record_that_ruins_the_local_steps_of_its_group_adds_nothing() -> None:
    model, (x, y) = linear(), problem(40).tensors
    before = copy.deepcopy(model.state_dict())
    x[0] = 1e38
    for chosen in (Batch(local_steps=3, local_lr=1e30), Batch(local_steps=2, local_lr=1e30, local_optimizer="Adam")):
        with running(model, chosen, TensorDataset(x, y)) as run:
            assert torch.isfinite(flat(release(run, range(10)))).all()
            assert flat(release(run, range(10))).norm() <= 10
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"local_steps": 0}, "local_steps must be a whole number of at least 1"),
        ({"local_lr": 0.0}, "local_lr must be a positive number"),
        ({"local_optimizer": "Magic"}, "name a first-order one of torch.optim"),
        ({"local_optimizer": "LBFGS"}, "name a first-order one of torch.optim"),
        ({"local_momentum": 1.0}, "local_momentum must be at least 0 and below 1"),
        ({"local_optimizer": "Adam", "local_momentum": 0.5}, "belongs to local_optimizer SGD"),
        ({"sparsify": -1}, "sparsify must be a whole number of at least 0"),
        ({"sparsify": 2, "factors": True, "groups": "layer"}, "cannot be had together"),
        ({"record_groups": "all"}, "'each' or 'user', and is 'all'"),
    ],
)
def test_options_of_groups_without_a_meaning_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method("batch", **options)


@pytest.mark.parametrize("options", [{"local_steps": 2}, {"sparsify": 2}])
def test_groups_of_one_record_have_no_steps_of_their_own(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="without local steps or sparsify"):
        Batch(record_groups="each", **options).open(linear(), SETTING)


def test_groups_of_one_record_must_be_independent_of_each_other() -> None:
    """They are per-example clipping, so what holds there holds here: made-up records are tried first."""

    def centred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        return F.cross_entropy(output - output.mean(0), y, reduction="none")

    with running(linear(), Batch(record_groups="each")) as run, pytest.raises(Refused, match="another record"):
        release(run, range(10), centred)
    with running(linear(), Batch()) as run:
        assert run.statement()["independence_checked"] == "not needed"
        assert flat(release(run, range(10), centred)).any()


# BatchNorm and public records


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


# Frozen weights


def slopes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of a record is its x, in the columns that its y allows."""
    return (model(x * y)).squeeze(1)


def test_weights_that_no_longer_move_are_frozen_at_their_mean() -> None:
    """Columns 2 and 3 have no gradient in a window of three steps; before it, momentum was set going."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    x = torch.ones(12, 4)
    masks = torch.ones(12, 4)
    masks[:6, 2:] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones(1, 4)
    optimizer.step()
    weights = []
    with running(model, Batch(clip=1.0, sparsify=3), TensorDataset(x, masks)) as run:
        for _ in range(3):
            weights.append(model.weight.detach().clone())
            release(run, range(6), slopes)
            optimizer.step()
        mean = torch.stack(weights).mean(0)[0, 2:]
        assert not torch.allclose(model.weight[0, 2:], mean)
        for _ in range(3):
            gradient = release(run, range(6, 12), slopes)["weight"] / 10  # they would have a gradient again
            torch.testing.assert_close(model.weight[0, 2:].detach(), mean)
            assert not gradient[0, 2:].any()
            close(gradient[0, :2], torch.full((2,), 2**-0.5))  # the others have the clip to themselves
            optimizer.step()
        release(run, range(6), slopes)
        torch.testing.assert_close(model.weight[0, 2:].detach(), mean)


def test_nothing_is_frozen_without_a_window() -> None:
    model = nn.Linear(4, 1, bias=False)
    dataset = TensorDataset(torch.ones(12, 4), torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(12, 4))
    with running(model, Batch(clip=1.0), dataset) as run:
        for _ in range(5):
            release(run, range(6), slopes)
        state = run.session.state()["frozen"]
    assert not state["masks"] and not state["values"]


def test_a_weight_has_arrived_when_its_mean_is_within_a_deviation_of_its_noise() -> None:
    """The sum of a window against √(Σ std²), with noise that changes within it."""
    model = nn.Linear(3, 1, bias=False)
    session: Any = Batch(sparsify=4).open(model, SETTING)
    limit = math.sqrt(1 + 1 + 4 + 4)
    for std in (1.0, 1.0, 2.0, 2.0):
        noisy = torch.tensor([[0.99, 1.01, -0.99]]) * limit / 4
        session.post_process({"weight": noisy}, {"weight": std})
        assert noisy.all()  # nothing is frozen before the window ends
    assert session.state()["frozen"]["masks"]["weight"].tolist() == [[True, False, True]]
    noisy = torch.ones(1, 3)
    session.post_process({"weight": noisy}, {"weight": 1.0})
    assert noisy.tolist() == [[0.0, 1.0, 0.0]]


def test_a_window_begins_anew_when_layers_are_frozen_or_thawed() -> None:
    model = linear()
    with running(model, Batch(clip=1.0, sparsify=3)) as run:
        for number in range(7):
            model[0].requires_grad_(number >= 4)
            release(run, range(10))
        values = run.session.state()["frozen"]["values"]
    torch.testing.assert_close(values["0.weight"], model[0].weight.detach())
    with running(linear(), Batch(clip=1.0, sparsify=3)) as run:
        for number in range(4):
            run.model[0].requires_grad_(number < 2)  # type: ignore[index]
            release(run, range(10))
        assert not run.session.state()["frozen"]["values"]


def test_a_window_survives_a_checkpoint(tmp_path: Any) -> None:
    """Stopped in the middle of the second window, and compared with never having stopped."""
    dataset = TensorDataset(torch.ones(12, 4), torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(12, 1))
    dataset.tensors[1][6:] = torch.tensor([0.0, 1.0, 0.0, 1.0])
    outcomes = []
    for stop in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = running(model, Batch(clip=1.0, sparsify=3), dataset)
        gradients = []
        for number in range(8):
            if stop and number == 5:
                run.save(tmp_path / "checkpoint", optimizer=optimizer)
                run.close()
                model = nn.Linear(4, 1, bias=False)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                run = running(model, Batch(clip=1.0, sparsify=3), dataset)
                run.load(tmp_path / "checkpoint", optimizer=optimizer)
            gradients.append(release(run, range(6) if number < 3 else range(6, 12), slopes)["weight"])
            optimizer.step()
        outcomes.append(
            (torch.stack(gradients), model.weight.detach(), run.session.state()["frozen"]["masks"]["weight"])
        )
        run.close()
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert outcomes[0][2].tolist() == [[True, False, True, True]]
