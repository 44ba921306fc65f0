"""Clipless training: the bound is that of the weights in use, the scores' gradients are clipped, noise comes at W̄."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privet
from privet.audit.sensitivity import check_sensitivity
from privet.audit.subject import MethodSubject
from privet.errors import CheckpointError, ConfigError, Refused
from privet.hooks import only_looks
from privet.losses import loss as make_loss
from privet.methods import Query, Setting, method
from privet.methods.clipless import Clipless, _CliplessSession
from privet.nn.lipschitz import (
    LIPSCHITZ_MODELS,
    Bias,
    BoundedInput,
    Conv2d,
    GroupSort,
    Linear,
    certify,
    held,
)  # fmt: skip
from privet.nn.lipschitz.losses import TemperedCrossEntropy

SETTING = Setting(batch=8, noise_multiplier=1.0, relation="add_remove")


def network(constraint: Any = "bjorck", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        BoundedInput((1, 4, 4), radius=2.0),
        Conv2d(1, 4, 3, padding=1, constraint=constraint),
        Bias(4),
        GroupSort(),
        nn.Flatten(),
        Linear(64, 3, constraint=constraint),
    )


def records(count: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 3


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def step(
    session: Any, model: nn.Module, chunks: list[tuple[Tensor, Tensor]], losses: Callable[..., Tensor] = cross_entropy
) -> list[Query]:
    session.begin()
    for x, y in chunks:
        with session.listening():
            session.add(losses(model, x, y))
    queries: list[Query] = session.finish()
    return queries


def naive(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> dict[str, Tensor]:
    """Record by record, at W̄, with the gradient at the scores clipped by hand."""
    total: dict[str, Tensor] = {}
    with held(model) as weights:
        for i in range(len(x)):
            scores = model(x[i : i + 1])
            (row,) = torch.autograd.grad(F.cross_entropy(scores, y[i : i + 1]), scores, retain_graph=True)
            row = row * min(1.0, clip / float(row.norm()))
            parts = torch.autograd.grad(scores, list(weights.tensors.values()), row)
            for name, part in zip(weights.tensors, parts, strict=True):
                total[name] = total.get(name, torch.zeros_like(part)) + part
    return total


@pytest.mark.parametrize("clip", [0.3, 5.0])
@pytest.mark.parametrize("constraint", ["bjorck", "orthogonal", "spectral", None])
def test_the_sum_is_the_naive_one_whatever_the_chunks(clip: float, constraint: Any) -> None:
    model, (x, y) = network(constraint), records()
    expected = naive(model, x, y, clip)
    session = Clipless(gradient_clip=clip).open(model, SETTING)
    for chunks in ([(x, y)], [(x[:2], y[:2]), (x[2:3], y[2:3]), (x[3:], y[3:])]):
        found = {q.name: q.total.clone() for q in step(session, model, chunks)}
        assert found.keys() == expected.keys() == {"1.weight", "2.bias", "5.weight"}
        for name, total in expected.items():
            torch.testing.assert_close(found[name], total.flatten(), rtol=1e-3, atol=1e-5)
    assert not any(q.total.any() for q in step(session, model, []))
    session.close()


def moved(model: nn.Module, scale: float) -> nn.Module:
    """After a large noisy update."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("constraint", ["spectral", None])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_no_hostile_record_moves_a_sum_by_more_than_is_declared(constraint: Any, relation: Any) -> None:
    model = moved(network(constraint), 0.5)
    with MethodSubject(
        Clipless(gradient_clip=0.5), model, records(12), relation=relation, noise_multiplier=1.0, delta=1e-5
    ) as subject:
        checks, _ = check_sensitivity(subject)
    assert all(check.holds for check in checks), checks
    assert max(float(check.measured) for check in checks[:2] if not isinstance(check.measured, str)) > 0.3


@pytest.mark.parametrize("clip", [0.1, 1.0])
def test_sensitivities_are_those_of_the_weights_of_the_step(clip: float) -> None:
    model = network(None)
    session = Clipless(gradient_clip=clip).open(model, SETTING)
    before = {q.name: q.sensitivity for q in step(session, model, [records()])}
    session.handed_over()
    moved(model, 1.0)
    after = {q.name: q.sensitivity for q in step(session, model, [records()])}
    with_certificate = certify(model).gradient
    for name, sensitivity in after.items():
        assert sensitivity.add_remove == pytest.approx(clip * with_certificate[name])
        assert sensitivity.replace_one == 2 * sensitivity.add_remove
        assert name == "5.weight" or sensitivity.add_remove > before[name].add_remove
    session.close()


def test_a_smaller_clip_at_the_scores_lowers_the_noise_in_proportion() -> None:
    stds = []
    for clip in (0.4, 0.1):
        run = new_run(network(), Clipless(gradient_clip=clip))
        stds.append([group["noise_std"] for group in run.groups()])
        run.close()
    assert stds[1] == pytest.approx([std / 4 for std in stds[0]])


def test_auto_is_what_cross_entropy_can_reach() -> None:
    model = network()
    session = Clipless().open(model, SETTING)
    assert isinstance(session, _CliplessSession)
    bound = certify(model).output
    assert session.gradient_clip == TemperedCrossEntropy().lipschitz_within(bound) < math.sqrt(2)
    session.close()


@pytest.mark.parametrize("how", ["in place", "hidden", "scaled"])
def test_no_loss_gets_around_the_clip(how: str) -> None:
    """Scores that are scaled in place, and losses that look at hidden layers, as hostile as can be."""
    model, (x, y) = network(), records()
    seen: list[Tensor] = []
    model[1].register_forward_hook(only_looks(lambda *a: seen.append(a[2])))  # type: ignore[index]

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        if how == "in place":
            scores.mul_(1e4)
        elif how == "scaled":
            scores = 1e4 * scores
        found = F.cross_entropy(scores, y, reduction="none")
        return found + 1e4 * seen.pop().square().flatten(1).sum(1) if how == "hidden" else found

    session = Clipless(gradient_clip=0.5).open(model, SETTING)
    for i in range(len(x)):
        for query in step(session, model, [(x[i : i + 1], y[i : i + 1])], losses):
            assert query.total.norm() <= query.sensitivity.add_remove
    session.close()


def test_a_record_that_is_not_finite_harms_nobody() -> None:
    model, (x, y) = network(), records()
    session = Clipless().open(model, SETTING)
    expected = {q.name: q.total.clone() for q in step(session, model, [(x, y)])}

    def infinite_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) + torch.where(torch.arange(len(x)) == 0, math.inf, 0.0)

    def no_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        root = torch.cat([(0 * scores[:1].sum(1)).sqrt(), torch.zeros(len(x) - 1)])
        return F.cross_entropy(scores, y, reduction="none") + root

    for losses in (infinite_loss, no_gradient):
        for row in (x[:1], torch.full_like(x[:1], math.nan)):
            for query in step(session, model, [(torch.cat([row, x]), torch.cat([y[:1], y]))], losses):
                torch.testing.assert_close(query.total, expected[query.name])
    session.close()


def new_run(model: nn.Module, chosen: Clipless, noise: float = 1.0, **options: Any) -> privet.Run:
    return privet.Run(
        model,
        TensorDataset(*records(16)),
        method=chosen,
        sampling=privet.Poisson(batch=8),
        budget=privet.Budget(noise=noise, delta=1e-5, steps=6),
        **options,
    )


def test_the_gradient_at_the_constrained_weight_is_pulled_back() -> None:
    model, (x, y) = network(), records(16)
    run = new_run(model, Clipless(gradient_clip=9.0), noise=0.0)
    everybody = run.step_on(range(16))  # type: ignore[arg-type]
    for a, b in everybody:
        everybody.backward(cross_entropy(model, a, b))
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    run.close()
    model.zero_grad()
    cross_entropy(model, x, y).sum().div(8).backward()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-6)


def test_noise_is_added_at_the_constrained_weight() -> None:
    """With W̄ = W/‖W‖_F a gradient along W vanishes when it is pulled back; noise that came later would not."""
    model = nn.Sequential(BoundedInput((6,)), Linear(6, 3, constraint="frobenius"))
    x = torch.randn(16, 6)
    run = privet.Run(
        model, TensorDataset(x, torch.arange(16) % 3), method=Clipless(), sampling=privet.Poisson(batch=8),
        budget=privet.Budget(noise=50.0, delta=1e-5, steps=3),
    )  # fmt: skip
    for private in run.loader:
        for a, b in private:
            private.backward(cross_entropy(model, a, b))
        ((_, p),) = model.named_parameters()
        assert p.grad is not None and p.grad.norm() > 1
        along = (p.grad * p.detach()).sum()
        assert along.abs() < 1e-3 * p.grad.norm() * p.detach().norm()
    run.close()


def test_weights_are_held_within_steps_only_and_the_model_stays_what_it_is() -> None:
    model = network()
    keys = list(model.state_dict())
    run = new_run(model, Clipless())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    free = moved(network(), 0.1)
    model.load_state_dict(free.state_dict())  # after the run was made, before its first step
    x, _ = records()
    torch.testing.assert_close(model(x), free(x))
    for private in run.loader:
        for a, b in private:
            private.backward(cross_entropy(model, a, b))
        before = model(x)
        optimizer.step()
        assert not torch.equal(model(x), before)
    assert list(model.state_dict()) == keys
    run.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model._forward_hooks


def test_what_is_refused() -> None:
    model, (x, y) = network(), records()
    session = Clipless().open(model, SETTING)
    twice = lambda model, x, y: cross_entropy(model, x, y) + cross_entropy(model, x.flip(0), y)  # noqa: E731
    for losses, said in (
        (twice, "called 2 times"),
        (lambda model, x, y: model[5](torch.zeros(len(x), 64)).sum(1), "called 0 times"),
        (lambda model, x, y: cross_entropy(model, x, y)[:3], "one row of scores for each of 3 records"),
    ):
        with pytest.raises(Refused, match=said):
            step(session, model, [(x, y)], losses)
    model[1].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(Refused, match=r"'1\.weight' was frozen"):
        session.begin()
    session.close()
    with pytest.raises(Refused, match="no BoundedInput"):
        Clipless().open(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), SETTING)
    with pytest.raises(Refused, match=r"'1' \(LSTM\)"):
        Clipless().open(nn.Sequential(BoundedInput((4, 4)), nn.LSTM(4, 3)), SETTING)
    for options, said in (({"gradient_clip": 0.0}, "gradient_clip"), ({"quantile": 1.0}, "quantile")):
        with pytest.raises(ConfigError, match=said):
            method("clipless", **options)


def test_losses_that_mix_records_are_refused_before_training() -> None:
    model = network()
    run = new_run(model, Clipless())
    with pytest.raises(Refused, match="another record"):
        for private in run.loader:
            for a, b in private:
                scores = model(a)
                private.backward(F.cross_entropy(scores - scores.mean(0), b, reduction="none"))
    run.close()


def test_an_adaptive_clip_is_a_query_that_is_paid_for_and_follows_the_norms(tmp_path: Path) -> None:
    model = network()
    run = new_run(model, Clipless(adaptive=True, gradient_clip=50.0, quantile=0.5, adaptive_rate=1.0))
    groups = run.groups()
    assert groups[-1]["group"] == "below G" and groups[-1]["sensitivity"] == 0.5
    paid = sum((g["sensitivity"] / g["noise_std"]) ** 2 for g in groups)
    assert paid == pytest.approx(1.0)  # one mechanism of multiplier 1, the query of G included
    session = run.session
    assert isinstance(session, _CliplessSession)
    step(session, model, [records()])
    assert float(session._below) == 3.5  # all seven are below
    session.observe({"below G": torch.tensor([4.0])})
    assert session.clip == pytest.approx(50 * math.exp(-0.5))
    run.save(tmp_path / "c.pt")
    other = new_run(network(), Clipless(adaptive=True, gradient_clip=50.0, quantile=0.5), run_id=run.id)
    other.load(tmp_path / "c.pt")
    assert isinstance(other.session, _CliplessSession) and other.session.clip == session.clip
    with pytest.raises(CheckpointError, match="adaptive clip"):
        other.session.load_state({"gradient_clip": -1.0})
    run.close()
    other.close()


@pytest.mark.parametrize("name", LIPSCHITZ_MODELS)
def test_ready_networks_train_with_every_loss(name: str) -> None:
    shape = (6,) if name == "lipschitz-mlp" else (1, 16, 16)
    model = privet.nn.build(name, input_shape=shape, classes=3, seed=0)
    session = Clipless(gradient_clip=0.5).open(model, SETTING)
    x, y = torch.randn(4, *shape), torch.arange(4) % 3
    for chosen in ("ce", "tempered-ce", "bce", "hinge", "kr", "hkr", "k-cosine"):
        criterion = make_loss(chosen, model)
        queries = step(session, model, [(x, y)], lambda model, x, y, c=criterion: c(model(x), y))
        assert all(0 < q.total.norm() <= 4 * q.sensitivity.add_remove for q in queries)
    session.close()


# What a hostile review found


def gets_around(model: nn.Module, losses: Callable[..., Tensor], chosen: Clipless | None = None) -> bool:
    """Whether one record alone moves a sum by more than is declared; false if it is refused."""
    session = (chosen or Clipless(gradient_clip=0.5)).open(model, SETTING)
    x, y = records(1)
    try:
        return any(q.total.norm() > q.sensitivity.add_remove for q in step(session, model, [(3 * x, y)], losses))
    finally:
        session.close()


def hooked(how: str) -> nn.Module:
    model = network(None)
    layer: Any = model[1]
    if how == "forward hook":
        layer.register_forward_hook(lambda m, a, o: 100 * o)
    elif how == "forward pre-hook":
        layer.register_forward_pre_hook(lambda m, a: (100 * a[0],))
    elif how == "backward hook":
        model[4].register_full_backward_hook(lambda m, i, o: (100 * i[0],))  # type: ignore[index]
    elif how == "hook on the model":
        model.register_forward_hook(lambda m, a, o: 100 * o)
    elif how == "forward of its own":
        inner = layer.forward
        layer.forward = lambda x: 100 * inner(x)
    else:
        layer.weight.register_hook(lambda g: 100 * g)
    return model


@pytest.mark.parametrize(
    "how",
    ["forward hook", "forward pre-hook", "backward hook", "hook on the model", "forward of its own", "tensor's hook"],
)
def test_models_that_do_not_compute_what_their_layers_say_are_refused(how: str) -> None:
    with pytest.raises(Refused, match="a hook"):
        gets_around(hooked(how), cross_entropy)


def test_global_hooks_are_refused() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: o)
    try:
        with pytest.raises(Refused, match="global hooks"):
            Clipless().open(network(), SETTING)
    finally:
        handle.remove()


def swapped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(50)
    scores = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.div_(50)
    return F.cross_entropy(scores, y, reduction="none")


def called_with_others(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    others = {name: 50 * p for name, p in model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(model, others, (x,)), y, reduction="none")


def wider(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model[0].radius = 100.0  # type: ignore[index, assignment]
    scores = model(x)
    model[0].radius = 2.0  # type: ignore[index, assignment]
    return F.cross_entropy(scores, y, reduction="none")


@pytest.mark.parametrize("losses", [swapped, called_with_others, wider])
def test_weights_that_change_within_a_step_are_refused(losses: Callable[..., Tensor]) -> None:
    with pytest.raises(Refused, match="not those that the step began with"):
        gets_around(network(None), losses)


def test_nothing_comes_in_through_the_input() -> None:
    def through_the_input(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, 1e-3 * x + torch.sin(50 * model[1](x)).mean(1, keepdim=True), y)  # type: ignore[index]

    assert not gets_around(network(None), through_the_input)


def test_lower_precision_is_refused() -> None:
    def half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(model, x, y)

    with pytest.raises(Refused, match="leave autocast"):
        gets_around(network(), half)


@pytest.mark.parametrize("clip", [1e-12, 1e-6])
def test_huge_gradients_at_the_scores_are_clipped_to_a_small_one(clip: float) -> None:
    """Factors that small have few digits in float32. The network is as sharp as its bound, so that it shows."""
    model = nn.Sequential(BoundedInput((1, 4, 4)), nn.Flatten(), nn.Linear(16, 1, bias=False))
    for size in torch.linspace(1e37, 1e38, 20).tolist():
        steep = lambda model, x, y, size=size: size * model(x).sum(1)  # noqa: E731
        assert not gets_around(model, steep, Clipless(gradient_clip=clip))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-160])
def test_weights_of_almost_nothing_still_get_noise(size: float, dtype: torch.dtype) -> None:
    model = network(None).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(size)
    run = privet.Run(
        model, TensorDataset(records(16)[0].to(dtype), records(16)[1]), method=Clipless(),
        sampling=privet.Poisson(batch=8), budget=privet.Budget(noise=1.0, delta=1e-5, steps=1),
    )  # fmt: skip
    assert all(group["noise_std"] > 0 for group in run.groups())
    for private in run.loader:
        for a, b in private:
            private.backward(cross_entropy(model, a, b))
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    run.close()


@pytest.mark.parametrize(("radius", "weights"), [(1.0, (1e-17, 1e10, 1e10)), (1e17, (1e3, 1e-3)), (1.0, (1e25,))])
def test_numbers_that_float32_cannot_hold_are_refused(radius: float, weights: tuple[float, ...]) -> None:
    """Gradients on their way back, activations on their way forward, or both."""
    layers = [nn.Linear(4, 4, bias=False) for _ in weights]
    for layer, size in zip(layers, weights, strict=True):
        layer.weight.data.copy_(size * torch.eye(4))
    with pytest.raises(Refused, match="grow beyond"):
        Clipless().open(nn.Sequential(BoundedInput((4,), radius), *layers), SETTING)


def test_one_score_has_a_clip_of_its_own() -> None:
    model = nn.Sequential(BoundedInput((4,)), Linear(4, 1))
    session = Clipless().open(model, SETTING)
    assert isinstance(session, _CliplessSession) and session.gradient_clip == 1.0
    session.close()
    for bad in (math.inf, 1e300):
        with pytest.raises(CheckpointError):
            session.load_state({"gradient_clip": bad})
