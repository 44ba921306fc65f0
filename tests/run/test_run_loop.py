"""An ordinary loop becomes private, and stays the user's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import naive_clipped_sum, naive_gradients
from small import budget, data, entropy, net, same, seeded, train
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import privet.noise
import privet.run
from privet import (
    ConfigError,
    PerExample,
    Poisson,
    Refused,
    Run,
)


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


def test_physical_batches_leave_room_however_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is free, and never more than 2 GiB: beyond that a process only grows, sample by sample."""

    def chosen(available: int) -> int:
        monkeypatch.setattr(privet.run.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
        model = net()
        with seeded(model, budget=budget(1)) as run:
            train(run, model)
            return run._physical

    assert chosen(2**50) == chosen(2**33) > chosen(2**32) > 1
    assert chosen(2**10) == 1


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


class Reading(nn.Module):
    """A sequence model of a layer that has no rule of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.squeeze(1)
        read = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return self.last((read[0] if isinstance(read, tuple) else read).mean(1))


@pytest.mark.parametrize(
    "layer",
    [nn.MultiheadAttention(6, 2, batch_first=True), nn.GRU(6, 6, batch_first=True), nn.PReLU()],
    ids=["attention", "gru", "prelu"],
)
def test_bf16_autocast_with_layers_that_have_no_rule(layer: nn.Module) -> None:
    """What came in as bfloat16 is run again in the precision of the weights."""
    torch.manual_seed(0)
    model = Reading(nn.Sequential(nn.Linear(6, 6), layer) if isinstance(layer, nn.PReLU) else layer)

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(x + 0)
        return F.cross_entropy(scores.float(), y, reduction="none")

    def released(losses: Callable[..., Tensor]) -> Tensor:
        with seeded(model, budget=budget(1)) as run:
            return torch.cat([g.flatten() for g in train(run, model, losses)[0].values()])

    exact = released(entropy)
    assert float((released(losses) - exact).norm()) < 0.1 * float(exact.norm())


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
