"""Ternary gradients: the sum is the naive one, and a record moves it by C alone and by 2C in a larger micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Losses, Unit, bumpy_losses, naive_gradients, queries_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from privet import Budget, CheckpointError, ConfigError, Poisson, Refused, Run, Ternary, method, native
from privet.audit.sensitivity import check_sensitivity
from privet.audit.subject import MethodSubject
from privet.methods import Query, Sensitivity, Setting, ternary
from privet.noise import Source
from privet.step import Rules, noise_stds

B = 12
SETTING = Setting(batch=B, noise_multiplier=1.0, relation="add_remove")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(),
        nn.Linear(8, 3),
    ).double()  # fmt: skip


class Tied(nn.Module):
    """The same matrix twice, and a table of which a record touches few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.shared, self.last = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(self.table(tokens)).tanh()).mean(1))


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(count: int) -> Tensor:
    return torch.randint(20, (count, 5), generator=torch.Generator().manual_seed(0))


def slope(model: nn.Module, x: Tensor) -> Tensor:
    """For a linear layer with one output and no bias: the gradient is x itself."""
    return model(x).squeeze(1)


def line(size: int) -> nn.Module:
    return nn.Linear(size, 1, bias=False)


def bounded(chosen: Ternary, model: nn.Module, units: Iterable[Unit], losses: Losses = bumpy_losses) -> list[Query]:
    session = chosen.open(model, SETTING)
    try:
        return queries_of(session, model, units, losses)
    finally:
        session.close()


def total(chosen: Ternary, model: nn.Module, units: Iterable[Unit], losses: Losses = bumpy_losses) -> Tensor:
    return bounded(chosen, model, units, losses)[0].total.double().clone()


def naive(gradients: dict[str, Tensor], clip: float, tau: Callable[[str], float]) -> Tensor:
    """Σ over vectors, entry by entry as the paper has it, of (vectors, *shape) by parameter name."""
    result = 0.0
    for number in range(len(next(iter(gradients.values())))):
        entries = [
            1.0 if value > tau(name) else -1.0 if value < -tau(name) else 0.0
            for name, found in gradients.items()
            for value in found[number].flatten().tolist()
        ]
        vector = torch.tensor(entries, dtype=torch.float64)
        result = result + vector * min(1.0, clip / max(float(vector.norm()), 1e-9))
    assert isinstance(result, Tensor)
    return result


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=1e-5)


# The sum


@pytest.mark.parametrize("clip", [0.5, 4.0, 100.0])
@pytest.mark.parametrize("tau", [1e-6, 0.02, 0.3])
def test_the_sum_is_the_naive_one(clip: float, tau: float) -> None:
    for model, batch in ((network(), images(7)), (Tied(), tokens(7))):
        expected = naive(naive_gradients(model, bumpy_losses, (batch,)), clip, lambda _: tau)
        assert expected.any()
        chosen = Ternary(clip=clip, tau=tau)
        close(total(chosen, model, [[(batch,)]]), expected)
        close(total(chosen, model, [[(batch[:2],), (batch[2:3],), (batch[3:],)]]), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_records_add_up_to_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for model, batch in ((network(), images(7)), (Tied(), tokens(7))):
        whole = total(Ternary(tau=0.02), model, [[(batch,)]])
        size = sum(p.numel() for p in model.parameters())
        with monkeypatch.context() as patch:
            patch.setattr(ternary, "_BLOCK", rows * size + size // 2)
            torch.testing.assert_close(total(Ternary(tau=0.02), model, [[(batch,)]]), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_the_sum_over_larger_micro_batches_is_the_naive_one(clip: float) -> None:
    model, x = network(), images(9)
    units = [x[:4], x[4:5], x[5:]]
    means = [{n: g.mean(0) for n, g in naive_gradients(model, bumpy_losses, (unit,)).items()} for unit in units]
    stacked = {name: torch.stack([mean[name] for mean in means]) for name in means[0]}
    chosen = Ternary(clip=clip, tau=0.05, record_groups=3)
    expected = naive(stacked, clip, lambda _: 0.05) * B / 3
    close(total(chosen, model, [[(unit,)] for unit in units]), expected)
    close(total(chosen, model, [[(x[:1],), (x[1:4],)], [(x[4:5],)], [], [(x[5:6],), (x[6:],)]]), expected)


def test_tau_by_patterns_and_an_entry_equal_to_tau_becomes_zero() -> None:
    model, x = network(), images(5)
    taus = {"*.bias": 0.5, "4.*": 0.1, "*": 0.01}
    home = lambda name: taus["*.bias" if name.endswith("bias") else "4.*" if name[0] == "4" else "*"]  # noqa: E731
    expected = naive(naive_gradients(model, bumpy_losses, (x,)), 3.0, home)
    close(total(Ternary(clip=3.0, tau=taus), model, [[(x,)]]), expected)
    entries = torch.tensor([[0.25, -0.25, 0.26, -0.26, 0.0, 7.0]])
    assert total(Ternary(clip=9.0, tau=0.25), line(6), [[(entries,)]], slope).tolist() == [0, 0, 1, -1, 0, 1]


@pytest.mark.parametrize("groups", ["each", 2])
def test_the_layout_of_images_changes_nothing(groups: Any) -> None:
    model, x, chosen = network(), images(8), Ternary(tau=0.02, record_groups=groups, adaptive=True)
    expected = {q.name: q.total.clone() for q in bounded(chosen, model, [[(x[:4],)], [(x[4:],)]])}
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    last = x.contiguous(memory_format=torch.channels_last)
    for query in bounded(chosen, model, [[(last[:4],)], [(last[4:],)]]):
        parts = [query.total] if query.group is None else query.group.split(query.total).values()
        torch.testing.assert_close(torch.cat([part.reshape(-1) for part in parts]), expected[query.name])


@pytest.mark.parametrize("groups", ["each", 1])
def test_a_record_adds_minus_c_zero_or_c(groups: Any) -> None:
    x = torch.tensor([[3.0, -1e20, 0.001, 1e-20, -0.5]])
    for clip, c in ((9.0, 1.0), (0.6, 0.6 / math.sqrt(3))):
        scale = B if groups == 1 else 1
        found = total(Ternary(clip=clip, tau=0.01, record_groups=groups), line(5), [[(x,)]], slope) / scale
        torch.testing.assert_close(found, c * torch.tensor([1.0, -1, 0, 0, -1], dtype=torch.float64), rtol=1e-4, atol=0)
        assert found.norm() <= clip


@pytest.mark.parametrize("groups", ["each", 2])
def test_nobody_adds_zero_and_a_step_starts_from_zero(groups: Any) -> None:
    model, x = network(), images(4)
    session = Ternary(record_groups=groups).open(model, SETTING)
    assert not queries_of(session, model, [])[0].total.any()
    first = queries_of(session, model, [[(x,)]])[0].total.clone()
    with session.listening():
        session.add(bumpy_losses(model, x[:2]))  # of a step that is left
    assert torch.equal(queries_of(session, model, [[(x,)]])[0].total, first)
    model[0].requires_grad_(False)  # type: ignore[index]
    (query,) = queries_of(session, model, [[(x,)]])
    assert query.total.numel() == sum(p.numel() for p in model.parameters() if p.requires_grad)
    session.close()


# Memory


def test_no_more_than_a_block_of_gradients_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 records of a layer of 100,000 weights: 51 MB in float32, of which a block of four is 1.6 MB.

    (The loops in C hold none at all.)
    """
    monkeypatch.setattr(native, "library", None)
    monkeypatch.setattr(ternary, "_BLOCK", 400_000)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(500, 200), nn.Linear(200, 2)), torch.randn(128, 500)
    session = Ternary().open(model, SETTING)
    queries_of(session, model, [[(x[:2],)]])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        queries_of(session, model, [[(x,)]])
    session.close()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    assert 1.6e6 < held.max() < 8e6


# Sensitivity, exactly: noise off


def squared(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return (model(x) - targets).square().sum(1)


def hostile() -> list[tuple[Tensor, Tensor]]:
    x, y = images(1, seed=9), torch.zeros(1, 3, dtype=torch.float64)
    scales = [1.0, 1e-30, 1e-6, 0.0, 1e6, 1e150, 1e300, -1.0, math.nan, math.inf]
    return [(x * scale, y + target) for scale in scales for target in (0.0, 1e3, -1e3, math.nan)]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("groups", ["each", 1, 2])
def test_one_record_moves_each_sum_by_no_more_than_its_sensitivity(groups: Any, adaptive: bool) -> None:
    model, chosen = network(), Ternary(clip=3.0, tau=0.01, record_groups=groups, adaptive=adaptive)
    others, y = images(8), torch.ones(8, 3, dtype=torch.float64)
    rest: list[Unit] = [[(others[4:], y[4:])]] if groups != 1 else []
    without = bounded(chosen, model, [[(others[:4], y[:4])], *rest], squared)
    before = [query.total.double().clone() for query in without]
    found: list[list[Tensor]] = [[] for _ in before]
    for x, target in hostile():
        unit = (torch.cat([others[:4], x]), torch.cat([y[:4], target]))
        for place, query in zip(found, bounded(chosen, model, [[unit], *rest], squared), strict=True):
            assert torch.isfinite(query.total).all()
            place.append(query.total.double().clone())
    for query, old, new in zip(without, before, found, strict=True):
        moved = max((old - each).norm().item() for each in new)
        assert moved <= query.sensitivity.add_remove * (1 + 1e-9)
        assert torch.pdist(torch.stack(new)).max() <= query.sensitivity.replace_one * (1 + 1e-9)
    scale = 1 if groups == "each" else B / groups
    assert without[0].sensitivity == Sensitivity(3.0 if groups == "each" else 6.0 * scale, 6.0 * scale)
    if adaptive:
        assert without[1].sensitivity == Sensitivity(0.5 if groups == "each" else 1, 1)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_record_can_turn_its_micro_batch_around(groups: int) -> None:
    """So C is not enough for several records, under either relation: from +C to −C."""
    model, chosen = line(4), Ternary(clip=1.5, tau=0.1, record_groups=groups)
    ordinary = torch.ones(5, 4)
    before = bounded(chosen, model, [[(ordinary,)]], slope)[0]
    old = before.total.clone()
    after = bounded(chosen, model, [[(torch.cat([ordinary, torch.full((1, 4), -100.0)]),)]], slope)[0]
    replaced = bounded(chosen, model, [[(torch.cat([ordinary[:4], torch.full((1, 4), -100.0)]),)]], slope)[0]
    for new, bound in ((after, before.sensitivity.add_remove), (replaced, before.sensitivity.replace_one)):
        assert 0.999 * bound < (old - new.total).norm().item() <= bound
        assert bound == 2 * 1.5 * B / groups


@pytest.mark.parametrize("groups", ["each", 3])
def test_the_audit_holds(groups: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    records = torch.randn(24, 6), torch.arange(24) % 3
    chosen = Ternary(clip=2.0, tau=1e-3, record_groups=groups, adaptive=True)
    with MethodSubject(chosen, model, records) as subject:
        checks, _ = check_sensitivity(subject)
    assert all(check.holds for check in checks), [str(check) for check in checks]
    assert isinstance(checks[0].measured, float) and checks[0].measured > 0.4


# Micro-batches


def test_batchnorm_is_for_larger_micro_batches_only() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    data = TensorDataset(images(40))
    for groups, refused in (("each", True), (2, False)):
        chosen = Ternary(record_groups=groups)
        budget = Budget(noise=1.0, steps=1, delta=1e-5)
        with Run(model, data, method=chosen, sampling=Poisson(batch=B), budget=budget) as run:
            if refused:
                with pytest.raises(Refused):
                    one_step(run)
            else:
                one_step(run)
                assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def one_step(run: Run) -> None:
    for each in run.loader:
        for (x,) in each:
            each.backward(bumpy_losses(run.model, x))
        return


# Records that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_finite_adds_exactly_zero(bad: float) -> None:
    model, x, chosen = network(), images(6), Ternary(tau=0.01, adaptive=True)
    poisoned = x.clone()
    poisoned[2, 0, 1, 1] = bad
    expected = [q.total.clone() for q in bounded(chosen, model, [[(x[[0, 1, 3, 4, 5]],)]])]
    by_input = bounded(chosen, model, [[(poisoned,)]])
    marks = torch.tensor([0.0, 0, bad, 0, 0, 0])
    by_loss = bounded(chosen, model, [[(x,)]], lambda m, x: bumpy_losses(m, x) + marks)
    for found in (by_input, by_loss):
        for query, other in zip(found, expected, strict=True):
            torch.testing.assert_close(query.total, other, rtol=1e-12, atol=1e-12)
    alone = bounded(chosen, model, [[(poisoned[2:3],)]])
    assert not any(query.total.any() for query in alone)


def test_a_finite_loss_with_a_gradient_that_is_not_adds_nothing() -> None:
    root = lambda m, x: m(x).square().sum(1).sqrt()  # noqa: E731
    for groups in ("each", 1):
        chosen = Ternary(record_groups=groups, adaptive=True)  # type: ignore[arg-type]
        assert not any(q.total.any() for q in bounded(chosen, line(2), [[(torch.zeros(1, 2),)]], root))
        assert bounded(chosen, line(2), [[(torch.ones(1, 2),)]], root)[0].total.any()


# An adaptive τ


@pytest.mark.parametrize("groups", ["each", 2])
def test_the_side_query_counts_sparse_micro_batches(groups: Any) -> None:
    chosen = Ternary(tau={"weight": 0.5}, density=0.5, record_groups=groups, adaptive=True)
    sparse, dense = torch.tensor([[1.0, -1.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, -1.0, 0.0]])
    units = [[(sparse,)], [(dense,)], [(sparse,)], [(sparse,)]]
    _, query = bounded(chosen, line(4), units, slope)
    assert query.group is None and query.total.tolist() == [1.0]  # three halves up, one down


@pytest.mark.parametrize("groups", ["each", 4])
def test_the_side_queries_are_paid_for(groups: Any) -> None:
    chosen = Ternary(tau={"0.*": 0.1, "*": 0.01}, record_groups=groups, adaptive=True)
    for sigma in (0.3, 1.0, 20.0):
        setting = Setting(batch=B, noise_multiplier=sigma, relation="add_remove")
        session = chosen.open(network(), setting)
        queries = session.finish()
        session.close()
        rules = Rules(batch=B, noise_multiplier=sigma, basis="add_remove", allocation=chosen.allocation)
        stds = noise_stds(queries, rules, Source("seeded", seed=0))
        deltas = [q.sensitivity.add_remove for q in queries]
        assert len(queries) == 3
        assert sum((d / s) ** 2 for d, s in zip(deltas, stds, strict=True)) == pytest.approx(sigma**-2)
        assert sum((d / s) ** 2 for d, s in list(zip(deltas, stds, strict=True))[1:]) <= sigma**-2 / 16 * (1 + 1e-9)


@pytest.mark.parametrize("start", [0.1, 5.0])
@pytest.mark.parametrize("groups", ["each", 6])
def test_tau_follows_the_density(groups: Any, start: float) -> None:
    """Entries are uniform in (−1, 1), so a tenth of them are above 0.9 in size; of the mean of two, above 1 − √0.1."""
    model = line(1000)
    chosen = Ternary(tau=start, density=0.1, adaptive=True, adaptive_rate=0.05, record_groups=groups)
    session = chosen.open(model, SETTING)
    random = torch.Generator().manual_seed(0)
    for _ in range(120):
        x = torch.rand(12, 1000, generator=random) * 2 - 1
        queries = queries_of(session, model, [[(x[i : i + 2],)] for i in range(0, 12, 2)], slope)
        session.observe({q.name: q.total for q in queries if q.group is None})
    tau = session.state()["taus"]["*"]
    session.close()
    assert tau == pytest.approx(0.9 if groups == "each" else 1 - math.sqrt(0.1), rel=0.04)


def test_a_noisy_count_never_takes_tau_out_of_range() -> None:
    session = Ternary(adaptive=True, adaptive_rate=100.0).open(line(3), SETTING)
    for value, edge in ((1e9, 1e-30), (-1e9, 1e30)):
        for _ in range(10):
            session.observe({"sparse at tau of *": torch.tensor([value])})
        assert session.state()["taus"]["*"] == edge
    session.close()


@pytest.mark.parametrize("groups", ["each", 3])
def test_a_checkpoint_holds_the_adaptive_tau(groups: Any, tmp_path: Path) -> None:
    def made(tau: Any = 0.05) -> Run:
        return Run(
            line(8), TensorDataset(torch.randn(40, 8)), method=Ternary(tau=tau, adaptive=True, record_groups=groups),
            sampling=Poisson(batch=B), budget=Budget(noise=1.0, steps=9, delta=1e-5),
        )  # fmt: skip

    with made() as run:
        for _ in range(3):
            for each in run.loader:
                for (x,) in each:
                    each.backward(slope(run.model, x))
        run.save(tmp_path / "checkpoint.pt")
        taus = run.session.state()["taus"]
    assert taus["*"] != 0.05
    with made() as again:
        again.load(tmp_path / "checkpoint.pt")
        assert again.session.state()["taus"] == taus
    with made({"weight": 0.05}) as other, pytest.raises(CheckpointError, match="tau"):
        other.load(tmp_path / "checkpoint.pt")


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0}, {"clip": math.nan}, {"tau": 0.0}, {"tau": -1.0}, {"tau": math.nan}, {"tau": {"*": -1}},
        {"density": 0.0}, {"density": 1.0}, {"adaptive_rate": 0}, {"record_groups": 0}, {"record_groups": True},
        {"record_groups": "user"}, {"record_groups": 2.0}, {"tau": {}}, {"epsilon": 3},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        method("ternary", **options)


def test_what_does_not_fit_the_model_or_the_run_is_refused() -> None:
    for options, said in (
        ({"tau": {"0.*": 0.1}}, "no pattern"),
        ({"tau": {"*": 0.1, "9.*": 0.1}}, "No parameter"),
        ({"record_groups": B + 1}, "more than the 12"),
    ):
        with pytest.raises(ConfigError, match=said):
            method("ternary", **options).open(network(), SETTING)


def test_a_layer_that_is_thawed_in_the_middle_of_a_step_waits_for_the_next() -> None:
    model, dataset = line(4), TensorDataset(torch.rand(12, 4))
    model.add_module("more", nn.Linear(1, 1))
    more = model.more
    assert isinstance(more, nn.Linear)
    more.requires_grad_(False)
    with Run(
        model, dataset, method=Ternary(), sampling=Poisson(batch=6), budget=Budget(noise=1.0, steps=4, delta=1e-5),
        physical_batch=3, check=False,
    ) as run:  # fmt: skip
        for frozen in (True, False):
            step = run.step_on(list(range(12)))
            for (x,) in step:
                step.backward(model(x).flatten())
                more.requires_grad_(True)
            assert (more.weight.grad is None) == frozen
