"""Whole runs on small models: an ordinary loop becomes private, and stays the user's."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import naive_clipped_sum, naive_gradients
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, Subset, TensorDataset

import privet
import privet.noise
from privet import (
    Batch,
    Budget,
    BudgetExceeded,
    ConfigError,
    FixedSize,
    Partition,
    PerExample,
    Poisson,
    PrivetError,
    Refused,
    Run,
)
from privet.accounting import epsilon
from privet.methods.layerwise import Layerwise


def budget(steps: int = 4, noise: float = 0.0) -> Budget:
    return Budget(noise=noise, steps=steps, delta=1e-5)


def data(count: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=generator), torch.arange(count) % 3)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def train(
    run: Run,
    model: nn.Module,
    losses: Callable[..., Tensor] = entropy,
    optimizer: torch.optim.Optimizer | None = None,
    each: Callable[[], None] = lambda: None,
) -> list[dict[str, Tensor]]:
    """To the end of the plan; the private gradient of each step."""
    released: list[dict[str, Tensor]] = []
    while not run.finished:
        for step in run.loader:
            for batch in step:
                step.backward(losses(model, *batch) if isinstance(batch, list | tuple) else losses(model, batch))
            released.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            if optimizer is not None:
                optimizer.step()
            each()
    return released


def seeded(model: nn.Module, dataset: Dataset[Any] | None = None, **options: Any) -> Run:
    settings: dict[str, Any] = {
        "method": PerExample(clip=0.5), "sampling": Poisson(batch=24), "budget": budget(), "noise_level": "seeded",
        "seed": 3,
    }  # fmt: skip
    return Run(model, data() if dataset is None else dataset, **settings | options)


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> None:
    assert len(a) == len(b) > 0
    for one, other in zip(a, b, strict=True):
        assert set(one) == set(other)
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


def test_a_run_is_the_naive_private_gradient() -> None:
    """Everything together: same sample, same clipping, public divisor, no noise."""
    model, dataset = net(), data()
    with seeded(model, physical_batch=5) as run:
        released = train(run, model)
    source = privet.noise.Source("seeded", seed=3)
    for gradient, sample in zip(released, Poisson(batch=24).draw(64, 64, source, steps=4), strict=True):
        x, y = (t[sample] for t in dataset.tensors)
        expected = naive_clipped_sum(naive_gradients(model, entropy, (x, y)), 0.5)
        for name, value in expected.items():
            torch.testing.assert_close(gradient[name].double(), value / 24, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"loader_options": {"num_workers": 2}}], ids=["", "workers"])
@pytest.mark.parametrize("method", [PerExample(clip=0.5), PerExample(clip=0.5, adaptive=True)], ids=["", "adaptive"])
def test_chunked_equals_unchunked(method: PerExample, options: dict[str, Any]) -> None:
    runs = []
    for physical in (1, 7, 64, "auto") if not options else (7, 64):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with seeded(model, physical_batch=physical, method=method, **options) as run:
            runs.append(train(run, model, optimizer=optimizer))
    for other in runs[1:]:
        same(runs[0], other)


def test_equal_sampling_with_noise_too() -> None:
    runs = []
    for physical in (7, 64):
        model = net()
        with seeded(model, physical_batch=physical, budget=budget(noise=1.0)) as run:
            runs.append(train(run, model))
    same(*runs)


class Items(Dataset[Any]):
    """The same records in whatever form `shape` gives them."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        self.tensors, self.shape = data().tensors, shape

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, i: int) -> Any:
        return self.shape(self.tensors[0][i], self.tensors[1][i])


def triple(items: list[Any]) -> dict[str, Tensor]:
    return {"image": torch.stack([x for x, _ in items]), "label": torch.stack([y for _, y in items])}


def test_batches_of_any_form_give_the_same() -> None:
    forms: list[tuple[Dataset[Any], Callable[..., Tensor], dict[str, Any]]] = [
        (data(), entropy, {}),
        (Items(lambda x, y: {"x": x, "y": y}), lambda m, b: entropy(m, b["x"], b["y"]), {}),
        (Items(lambda x, y: ({"x": [x]}, (y,))), lambda m, a, b: entropy(m, a["x"][0], b[0]), {}),
        (Items(lambda x, y: (x, y)), lambda m, b: entropy(m, b["image"], b["label"]), {"collate_fn": triple}),
    ]
    runs = []
    for dataset, losses, options in forms:
        model = net()
        with seeded(model, dataset, physical_batch=7, loader_options=options) as run:
            runs.append(train(run, model, losses))
    for other in runs[1:]:
        same(runs[0], other)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_records_that_cannot_be_stacked_need_a_collate_function(check: bool, workers: int) -> None:
    ragged = Items(lambda x, y: (x.flatten()[: 1 + int(y)], y))
    told = pytest.raises(ConfigError, match=r'(?s)equal size.*padding.*loader_options=\{"collate_fn"')
    with seeded(net(), ragged, check=check, loader_options={"num_workers": workers}) as run, told:
        next(iter(next(iter(run.loader))))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_optimizer_and_the_scheduler_are_the_users(make: Any) -> None:
    """Handing the released gradients to a second optimizer by hand gives the same weights."""
    model, twin = net(), net()
    groups = lambda m: [{"params": m[0].parameters(), "lr": 0.3}, {"params": [*m[1].parameters(), *m[4].parameters()]}]  # noqa: E731
    optimizer, other = make(groups(model), lr=0.01), make(groups(twin), lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.1) for o in (optimizer, other)]
    with seeded(model, budget=budget(6, noise=1.0)) as run:
        released = train(run, model, optimizer=optimizer, each=schedules[0].step)
    assert type(optimizer) is make
    for gradient in released:
        for name, p in twin.named_parameters():
            p.grad = gradient[name]
        other.step()
        schedules[1].step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_frozen_parameters_stay_and_can_be_frozen_and_thawed_later() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kept = model[0].weight.clone()
    seen: list[set[str]] = []

    def each() -> None:
        seen.append({n for n, p in model.named_parameters() if p.grad is not None})
        if len(seen) == 2:
            model[1].requires_grad_(False)
        if len(seen) == 3:
            model[0].requires_grad_(True)

    with seeded(model, budget=budget(4, noise=1.0)) as run:
        train(run, model, optimizer=optimizer, each=each)
        assert [g["parameters"] for g in run.statement()["groups"]] == [
            sum(p.numel() for p in [*model[0].parameters(), *model[4].parameters()])
        ]
    first, head = {"0.weight", "0.bias"}, {"4.weight", "4.bias"}
    norms = {"1.weight", "1.bias"}
    assert seen == [norms | head, norms | head, head, first | head]
    assert not torch.equal(model[0].weight, kept)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "check",
    [False, True],
)
def test_gradient_checkpointing(reentrant: bool, check: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net[2:], self.net[:2](x), use_reentrant=reentrant)

    plain, folded = net(), Checkpointed()
    with seeded(plain) as run:
        expected = train(run, plain)
    with seeded(folded, check=check) as run:
        found = train(run, folded)
    same(expected, [{n.removeprefix("net."): g for n, g in step.items()} for step in found])


def test_bf16_autocast() -> None:
    plain, mixed = net(), net()
    with seeded(plain) as run:
        expected = train(run, plain)

    def autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y, reduction="none")

    with seeded(mixed) as run:
        found = train(run, mixed, autocast)
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            assert other[name].dtype == torch.float32
            assert (other[name] - value).norm() < 0.05 * value.norm() + 1e-3


def test_a_gan_with_a_private_discriminator() -> None:
    torch.manual_seed(0)
    generator, judge = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(inplace=True), nn.Linear(8, 1))
    real = TensorDataset(torch.randn(40, 4) + 3)
    g_step, d_step = torch.optim.Adam(generator.parameters(), 0.05), torch.optim.Adam(judge.parameters(), 0.05)
    start = generator.bias.clone()
    with Run(judge, real, method=PerExample(), sampling=Poisson(batch=16), budget=budget(6, noise=1.0)) as run:
        for _ in range(3):
            for step in run.loader:
                for (x,) in step:
                    fake = generator(torch.randn(len(x), 2)).detach()
                    step.backward((F.softplus(-judge(x)) + F.softplus(judge(fake))).squeeze(1))
                d_step.step()
                g_step.zero_grad()
                F.softplus(-judge(generator(torch.randn(16, 2)))).mean().backward()
                assert all(p.grad is not None for p in generator.parameters())
                g_step.step()
        assert run.steps_done == 6
    assert not torch.equal(generator.bias, start)


def test_two_private_models_at_once() -> None:
    alone = net(1)
    with seeded(alone, seed=5) as run:
        expected = train(run, alone)
    first, second = net(0), net(1)
    with seeded(first, check=False) as one, seeded(second, seed=5) as two:
        assert one.id != two.id
        released: list[dict[str, Tensor]] = []
        for step_one, step_two in zip(_forever(one), _forever(two), strict=False):
            for x, y in step_one:
                step_one.backward(entropy(first, x, y))
            for x, y in step_two:
                step_two.backward(entropy(second, x, y))
            released.append({n: p.grad.clone() for n, p in second.named_parameters() if p.grad is not None})
            torch.optim.SGD(first.parameters(), 0.1).step()
        assert one.steps_done == two.steps_done == 4
    same(expected, released)


def _forever(run: Run) -> Any:
    while not run.finished:
        yield from run.loader


def test_an_optimizer_over_parameters_that_are_not_protected_is_refused() -> None:
    model, stranger, public = net(), nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), *stranger.parameters()], lr=0.1)
    with seeded(model) as run:
        stranger(torch.ones(1, 2)).sum().backward()
        with pytest.raises(Refused, match=r"shape \(2, 2\).*not part of the private model"):
            train(run, model, optimizer=both)
        public(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(public.parameters(), lr=0.1).step()  # of its own: none of this run's business
    both.step()  # and the guard is gone


def test_a_run_that_was_dropped_without_closing_does_not_stop_later_ones() -> None:
    left: list[Any] = []
    try:
        for round_ in range(60):
            model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + round_ % 5)])
            run = Run(
                model, TensorDataset(torch.ones(4, 2)), method=PerExample(), sampling=Poisson(batch=2),
                budget=budget(1, noise=1.0), check=False,
            )  # fmt: skip
            left.append(run._optimizers)
            train(run, model, lambda m, x: m(x).sum(1), torch.optim.SGD(model.parameters(), lr=0.1))
            run.session.close()
    finally:
        for guard in left:
            guard.close()


def test_a_run_may_be_collected_while_an_optimizer_looks() -> None:
    dropped, model = seeded(net()), net()
    dropped.circle = dropped  # type: ignore[attr-defined]  # goes by garbage collection alone
    gone = weakref.ref(dropped)

    def collect(*_: Any) -> None:
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    gc.disable()
    try:
        with seeded(model, budget=budget(2, noise=1.0)) as run:
            del dropped
            train(run, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            assert gone() is None and run.steps_done == 2
    finally:
        gc.enable()
        hook.remove()


def test_the_model_is_not_wrapped_and_close_takes_everything_away() -> None:
    model = net()
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    run = seeded(model)
    train(run, model)
    assert [type(m) for m in model.modules()] == kinds and list(model.state_dict()) == keys
    run.close()
    assert not [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    model.zero_grad()
    entropy(model, *data()[:4]).mean().backward()
    assert all(p.grad is not None and p.requires_grad for p in model.parameters())


def test_closing_twice_does_no_harm() -> None:
    model = net()
    with seeded(model) as run:
        train(run, model)
        run.close()


# Budgets


def test_the_budget_ends_training() -> None:
    model = net()
    wanted = Budget(epsilon=1.0, noise=6.0, delta=1e-5)
    with seeded(model, budget=wanted, noise_level="system", seed=None, check=False) as run:
        planned = run.plan.steps
        assert 2 < planned < 1000
        while not run.finished:
            for step in run.loader:
                for x, y in step:
                    step.backward(entropy(model, x, y))
        assert run.steps_done == planned and run.epsilon <= 1.0
        assert epsilon([(run.plan.mechanism, planned + 1)], 1e-5).epsilon > 1.0
        assert list(run.loader) == []


def test_epsilon_and_epochs_meet_the_target() -> None:
    model = net()
    with seeded(model, budget=Budget(epsilon=3.0, epochs=2, delta=1e-5), noise_level="system", seed=None) as run:
        assert run.epsilon == 0
        train(run, model)
        assert run.steps_done == len(run.loader) * 2 == 6
        assert 3 * 0.995 <= run.epsilon <= 3
        assert run.guarantee(1e-3).epsilon < run.epsilon


def test_a_budget_of_the_ledger_stops_the_step_before_it_is_released() -> None:
    model, ledger = net(), privet.Ledger(":memory:")
    ledger.set_budget(1.0, 1e-5)
    with seeded(model, ledger=ledger, budget=budget(500, noise=6.0), noise_level="system", seed=None) as run:
        with pytest.raises(BudgetExceeded):
            train(run, model)
        assert 0 < run.steps_done < 500
        assert all(p.grad is None for p in model.parameters())
        assert epsilon(ledger.spent(), 1e-5).epsilon <= 1.0
        assert sum(units for _, units in ledger.spent()) == run.steps_done


@pytest.mark.parametrize("rule", [Poisson(batch=32), Partition(batch=32)], ids=["poisson", "partition"])
def test_a_run_says_at_its_start_how_many_steps_fit_into_the_ledger(
    rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = privet.Ledger(":memory:")
    ledger.set_budget(4.0, 1e-5)
    options: dict[str, Any] = {"sampling": rule, "ledger": ledger, "noise_level": "system", "seed": None}
    model = net()
    with seeded(model, budget=budget(3, noise=4.0), **options) as run:
        train(run, model)
    assert not caplog.records
    with seeded(model, budget=budget(100, noise=4.0), **options) as run:
        said: list[list[str]] = []
        with pytest.raises(BudgetExceeded):
            train(run, model, each=lambda: said.append([record.getMessage() for record in caplog.records]))
        assert said[0] == said[-1] and len(said[0]) == 1
        assert said[0][0].startswith(f"{len(said)} of the 100 steps to come fit into what is left")


def test_two_runs_on_one_ledger_add_up(tmp_path: Any) -> None:
    for _ in range(2):
        model = net()
        with seeded(model, ledger=tmp_path / "data.ledger", budget=budget(3, noise=1.0)) as run:
            train(run, model)
    with privet.Ledger(tmp_path / "data.ledger", create=False) as ledger:
        assert sum(units for _, units in ledger.spent()) == 6
        assert [record.steps for record in ledger.runs()] == [3, 3]
        assert all(record.finished for record in ledger.runs())


# Sampling rules


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(i)), i


@pytest.mark.parametrize("workers", [0, 2])
def test_a_partition_meets_each_record_once_per_epoch_and_pays_once(workers: int) -> None:
    model = net()
    met: list[int] = []

    def losses(model: nn.Module, x: Tensor, i: Tensor) -> Tensor:
        met.extend(i.tolist())
        return entropy(model, x, i % 3)

    with seeded(
        model, Numbered(), sampling=Partition(batch=8), budget=Budget(noise=1.0, epochs=3, delta=1e-5), check=False,
        loader_options={"num_workers": workers}, physical_batch=3,
    ) as run:  # fmt: skip
        orders = []
        for epoch in range(1, 4):
            met.clear()
            for step in run.loader:
                for batch in step:
                    step.backward(losses(model, *batch))
                assert run.units_spent == epoch
            assert sorted(met) == list(range(40))
            orders.append(list(met))
        assert run.steps_done == 15 and run.finished
        assert orders[0] != orders[1] != orders[2]
        assert run.guarantee().epsilon == pytest.approx(epsilon([(run.plan.mechanism, 3)], 1e-5).epsilon)


def test_a_fixed_size_sample_needs_replace_one() -> None:
    model = net()
    with pytest.raises(ConfigError, match="replace_one"):
        seeded(model, sampling=FixedSize(batch=8))
    assert not any(m._forward_hooks for m in model.modules())
    with seeded(model, sampling=FixedSize(batch=8), relation="replace_one", budget=budget(3, noise=1.0)) as run:
        train(run, model)
        assert run.statement()["groups"][0]["noise_std"] == pytest.approx(2 * 0.5)


def test_the_public_number_of_records_sets_the_rate() -> None:
    model, counts = net(), []
    with seeded(model, records=640, sampling=Poisson(batch=64), budget=budget(20), check=False) as run:
        assert run.plan.mechanism.rate == pytest.approx(0.1)

        def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            counts.append(len(x))
            return entropy(model, x, y)

        train(run, model, losses)
        statement = run.statement()
        assert statement["records"] == 640 and "stated" in statement["records_are_public"]
    assert sum(counts) / 20 == pytest.approx(6.4, abs=3)  # a tenth of the true 64


# What a run says, and what it refuses


@pytest.mark.parametrize("level", ["system", "seeded"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "method",
    [
        PerExample(clip=0.5),
        PerExample(clip={"a": 0.5, "b": 1.0}, groups={"a": ["0.*"], "b": ["*"]}),
        pytest.param(PerExample(clip=0.5, adaptive=True), id="adaptive"),
    ],
)
def test_the_statement(method: PerExample, steps: int, level: Any) -> None:
    model = net()
    with seeded(
        model, method=method, budget=budget(4, noise=1.0), noise_level=level, seed=3 if level == "seeded" else None
    ) as run:
        for step, _ in zip(run.loader, range(steps), strict=False):
            for x, y in step:
                step.backward(entropy(model, x, y))
            if run.steps_done == steps:
                break
        said = run.statement()
        json.dumps(said)
        assert said["unit"] == "record" and said["relation"] == "add_remove"
        assert said["steps"] == said["compositions"] == steps
        assert said["epsilon"] == run.epsilon and said["delta"] == 1e-5
        assert ("no guarantee" in said["epsilon_is"]) is (level == "seeded") and said["noise_level"] == level
        assert said["method"]["name"] == "per-example" and said["sampling"] == {"rule": "Poisson", "batch": 24}
        assert said["records"] == 64 and said["records_are_public"] == "taken from the data"
        assert said["noise_multiplier"] == 1.0 and said["independence_checked"] is True
        assert sum((g["sensitivity"] / g["noise_std"]) ** 2 for g in said["groups"]) == pytest.approx(1.0)
        assert any("number of records" in gap for gap in said["not_covered"])
        assert any("Everything" in gap for gap in said["not_covered"]) is (level == "seeded")


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("method", "needed"), [(PerExample(), True), (privet.Batch(), False)], ids=["", "batch"])
def test_the_statement_tells_of_the_check_where_it_is_needed(method: Any, needed: bool, check: bool) -> None:
    with seeded(net(), method=method, check=check) as run:
        said = run.statement()
    assert said["independence_checked"] == (check if needed else "not needed")
    assert any("switched off" in gap for gap in said["not_covered"]) is (needed and not check)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"physical_batch": 0}, "physical_batch must be at least 1"),
        ({"sampling": Poisson(batch=65)}, "batch is 65, more than the 64 records"),
        ({"relation": "swap"}, "relation is 'swap'"),
        ({"noise_level": "loud", "seed": None}, "level is 'loud'"),
        ({"noise_level": "system"}, "takes no seed"),
        ({"seed": None}, "needs a whole number"),
        ({"records": -5}, "records"),
        pytest.param({"records": 0}, "records"),
        ({"loader_options": {"batch_size": 1}}, "loader_options has batch_size, but the sampling rule"),
        ({"loader_options": {"shuffle": True, "num_workers": 0}}, "loader_options has shuffle, but"),
        ({"loader_options": {"sampler": None}}, "has sampler"),
        ({"loader_options": {"batch_sampler": None, "drop_last": False}}, "has batch_sampler, drop_last"),
        ({"loader_options": {"workers": 2}}, "does not take these loader_options: .*workers"),
        ({"loader_options": {"persistent_workers": True}}, "does not take these loader_options: .*persistent_workers"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], sentence: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=sentence):
        seeded(model, **options)
    assert not any(m._forward_hooks for m in model.modules())


def test_data_sets_that_cannot_be_sampled_are_refused() -> None:
    with pytest.raises(ConfigError, match="no length"):
        seeded(net(), iter(()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="empty"):
        seeded(net(), TensorDataset(torch.ones(0, 2)))


def test_a_run_that_cannot_begin_leaves_no_hooks() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, i: int) -> Any:
            raise OSError("file gone")

    model = net()
    with pytest.raises(OSError, match="file gone"):
        seeded(model, Broken())
    assert not any(m._forward_hooks for m in model.modules())


def test_non_finite_records_change_nothing() -> None:
    clean, dirty = data(), data()
    dirty.tensors[0][:5] = math.nan
    clean.tensors[0][:5] = 0
    outcomes = []
    for dataset in (clean, dirty):
        model = net()

        def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return entropy(model, x, y) * x.flatten(1).norm(dim=1)  # zero for a record of zeros

        with seeded(model, dataset, check=False) as run:
            outcomes.append(train(run, model, losses))
    assert all(torch.isfinite(g).all() for step in outcomes[1] for g in step.values())
    same(*outcomes)


def test_a_run_that_cannot_begin_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.ledger"
    foreign.write_text("not a ledger")
    model = net()
    with pytest.raises(PrivetError):
        Run(
            model,
            data(),
            method=PerExample(),
            sampling=Poisson(batch=8),
            budget=Budget(noise=1.0, steps=1, delta=1e-5),
            ledger=foreign,
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert foreign.read_text() == "not a ledger"


def test_a_delta_that_protects_nobody_is_named_in_the_statement() -> None:
    for delta, named in ((1e-5, False), (0.1, True)):
        with Run(
            net(),
            data(),
            method=PerExample(),
            sampling=Poisson(batch=8),
            budget=Budget(noise=1.0, steps=1, delta=delta),
        ) as run:
            assert any("not below 1/records" in gap for gap in run.statement()["not_covered"]) is named


def test_public_names_can_be_listed_and_found() -> None:
    assert {"Run", "Poisson", "PerExample", "Batch"} <= set(dir(privet))
    assert all(getattr(privet, name) is not None for name in dir(privet))


def test_what_errors_and_the_readme_name_is_there_without_further_imports() -> None:
    code = "import privet; print(privet.nn.batchnorm_to_groupnorm)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# Public records and users


def test_public_records_that_are_private_ones_are_refused() -> None:
    dataset = data()
    x, y = dataset.tensors
    overlapping: list[tuple[Dataset[Any], Dataset[Any]]] = [
        (dataset, dataset),
        (dataset, Subset(dataset, [3])),
        (Subset(dataset, range(40)), dataset),
        (Subset(dataset, range(40)), Subset(dataset, range(39, 64))),
        (Subset(dataset, torch.arange(40)), Subset(dataset, torch.arange(39, 64))),  # type: ignore[arg-type]
        (Subset(Subset(dataset, range(30, 64)), [5]), Subset(dataset, [35])),
        (dataset, TensorDataset(x, y)),
        (Subset(dataset, range(40)), Subset(TensorDataset(x, y.clone()), range(39, 64))),
        (dataset, TensorDataset(x[:10], y[:10].clone())),
        (dataset, TensorDataset(x[50:], y[50:].clone())),
        (TensorDataset(x[:40], y[:40]), TensorDataset(x[39:], y[39:])),
    ]
    for private, public in overlapping:
        with pytest.raises(ConfigError, match="The public records overlap with the private ones"):
            seeded(net(), private, public=public, sampling=Poisson(batch=1))


def test_public_records_beside_the_private_ones_are_fine() -> None:
    dataset = data()
    x, y = dataset.tensors
    apart: list[tuple[Dataset[Any], Dataset[Any]]] = [
        (Subset(dataset, range(40)), Subset(dataset, range(40, 64))),
        (Subset(dataset, torch.arange(0, 64, 2)), Subset(dataset, torch.arange(1, 64, 2))),  # type: ignore[arg-type]
        (Subset(Subset(dataset, range(30, 64)), [5]), Subset(dataset, [5, 36])),
        (Subset(dataset, range(40)), Subset(TensorDataset(x, y), range(40, 64))),
        (TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])),
        (dataset, data()),
    ]
    for private, public in apart:
        with seeded(net(), private, public=public, sampling=Poisson(batch=1)) as run:
            statement = run.statement()
            assert statement["public_records"] == len(public)  # type: ignore[arg-type]
            assert any("public records" in gap for gap in statement["not_covered"])
    with seeded(net()) as run:
        assert run.statement()["public_records"] is None
        with pytest.raises(ConfigError, match="There are no public records to go through"):
            next(run.refresh())


@pytest.mark.parametrize("workers", [0, 1])
def test_public_records_come_first_in_each_epoch_through_the_same_loop(workers: int) -> None:
    model, public = net(), TensorDataset(data(50).tensors[0] + 100, torch.zeros(50, dtype=torch.int64))
    private: list[bool] = []
    with seeded(
        model, method=PerExample(clip=0.5, groups="layer", thresholds="alc"), public=public, budget=budget(7),
        physical_batch=8, loader_options={"num_workers": workers}, check=False,
    ) as run:  # fmt: skip
        while not run.finished:
            for step in run.loader:
                chunks = []
                for x, y in step:
                    chunks.append(bool(x.mean() < 50))
                    step.backward(entropy(model, x, y))
                assert chunks == sorted(chunks)
                private.append(chunks[0])
                assert chunks.count(False) in (0, 6)  # 50 in eights: the last two are left out
    assert private == [False, True, True, False, True, True, False]  # 64 records in 24s: three steps an epoch


USERS = [i % 16 for i in range(64)]


def test_users_are_what_is_sampled_and_protected() -> None:
    model = net()
    noise = Budget(noise=1.0, steps=4, delta=1e-5)
    with seeded(
        model, method=Batch(clip=0.5, record_groups="user"), users=USERS, sampling=Poisson(batch=4), budget=noise
    ) as run:
        train(run, model)
        statement = run.statement()
    assert (statement["unit"], statement["records"]) == ("user", 16)
    assert statement["mechanism"]["rate"] == 4 / 16
    assert [(g["sensitivity"], g["noise_std"]) for g in statement["groups"]] == [(0.5, 0.5)]
    twin = net()
    with seeded(twin, data(16), method=PerExample(clip=0.5), sampling=Poisson(batch=4), budget=noise) as run:
        train(run, twin)
        assert run.epsilon == statement["epsilon"]


def test_whole_users_are_drawn() -> None:
    """Each step's chunks are the records of users, all of each."""
    model, count = net(), 0
    images = data().tensors[0]
    with seeded(
        model, TensorDataset(images, torch.tensor(USERS)), method=Batch(record_groups="user"), users=USERS,
        sampling=Poisson(batch=4), physical_batch=3, budget=budget(8),
    ) as run:  # fmt: skip
        for step in run.loader:
            owners: list[int] = []
            for x, owner in step:
                assert len(set(owner.tolist())) == 1
                owners += owner.tolist()
                step.backward(entropy(model, x, owner % 3))
            assert all(owners.count(owner) == 4 for owner in owners)
            count += len(set(owners))
    assert 4 <= count <= 30  # 16 on average


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"users": USERS[:-1]}, "There are 64 records and 63 users: give one id for each record"),
        ({"users": [*USERS[:-1], math.nan]}, "The user of record 63 is nan: give a number or a name"),
        ({"users": [*USERS[:-1], ["Ada"]]}, r"The user of record 63 is \['Ada'\]"),
        ({"users": torch.zeros(64, 2)}, r"The user of record 0 is tensor\(\[0., 0.\]\)"),
        ({"users": USERS, "method": PerExample()}, r"a method that bounds users.*Batch\(record_groups='user'\)"),
        ({"users": USERS, "method": Layerwise()}, r"a method that bounds users.*Batch\(record_groups='user'\)"),
        ({"users": USERS, "method": Batch()}, r"a method that bounds users.*Batch\(record_groups='user'\)"),
        ({"users": None}, r"a method that bounds users.*give the run users="),
    ],
)
def test_users_that_cannot_be_protected_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        seeded(net(), **{"method": Batch(record_groups="user"), "sampling": Poisson(batch=4)} | options)
