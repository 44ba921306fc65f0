"""Backpropagation clipping: the sums are the naive ones, and no record moves them by more than it may."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Losses, bumpy_losses
from test_input_clip import naive_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from privet import Backprop, Budget, ConfigError, Partition, Poisson, Refused, Run
from privet.methods import Query, Session, Setting
from privet.nn.input_clip import NORMS, InputClip, Norm, clip_of
from privet.noise import Source
from privet.step import Rules, noise_stds

SETTING = Setting(batch=10, noise_multiplier=1.0, relation="add_remove")
WITH_PUBLIC = Setting(batch=10, noise_multiplier=1.0, relation="add_remove", public=True)
MARGIN = 2e-3
"""Clips aim a little below their bounds."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.Linear(64, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def images(count: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed)) * scale


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def one_step(session: Session, model: nn.Module, *chunks: Tensor, losses: Losses = bumpy_losses) -> list[Query]:
    session.begin()
    for chunk in chunks:
        with session.listening():
            session.add(losses(model, chunk))
    return session.finish()


def stepped(
    chosen: Backprop, model: nn.Module, *chunks: Tensor, losses: Losses = bumpy_losses, setting: Setting = SETTING
) -> list[Query]:
    """The queries of one step over these chunks."""
    session = chosen.open(model, setting)
    try:
        return one_step(session, model, *chunks, losses=losses)
    finally:
        session.close()


def sums(queries: list[Query]) -> dict[str, Tensor]:
    return {n: v.clone() for q in queries if q.group is not None for n, v in q.group.split(q.total).items()}


def within(queries: list[Query], records: int = 1) -> None:
    for q in queries:
        length = float(q.total.double().norm())
        assert length <= records * q.sensitivity.add_remove * (1 + 1e-5), f"{q.name}: {length} of {q.sensitivity}"


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = MARGIN) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= rtol * float(value.norm()) + 1e-7, name


# The sums


def naive_sums(
    model: nn.Sequential, x: Tensor, norm: Norm, c1: Callable[[str], float], c2: Callable[[str], float]
) -> dict[str, Tensor]:
    """One record at a time by ordinary autograd: inputs are clipped on the way there, gradients on the way back."""
    model = copy.deepcopy(model)
    for i in range(len(x)):
        h = x[i : i + 1]
        for name, layer in model.named_children():
            affine = isinstance(layer, nn.Linear | nn.Conv2d)
            if affine:
                factor = (c1(name) / naive_norm(layer, h.detach(), norm).float()).clamp(max=1)
                h = h * factor.view(-1, *[1] * (h.dim() - 1))
            z, h = h.detach(), layer.forward(h)
            if list(layer.parameters()):
                h.register_hook(lambda g, z=z, layer=layer, name=name: g * min(1, c2(name) / length(layer, z, g, norm)))
        bumpy_of = bumpy_losses(nn.Identity(), h)
        bumpy_of.sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def length(layer: nn.Module, z: Tensor, g: Tensor, norm: Norm) -> float:
    """The norm of one record's gradient at the layer's output."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        with torch.enable_grad():
            own = torch.autograd.grad(layer.forward(z), list(layer.parameters()), g)
        return float(torch.cat([p.flatten() for p in own]).norm())
    if g.dim() == 2:
        return float(g.norm())
    g = g[0].flatten(1)
    return float(g.abs().sum(1).norm() if norm != "frobenius" else max(g.norm(), g.sum(1).norm()))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("c1", "c2"), [(0.3, 0.01), (2.0, 0.3), (1e3, 1e3)])
def test_the_sums_are_the_naive_ones(norm: Norm, c1: float, c2: float) -> None:
    model, x = network(), images(9)
    expected = naive_sums(model, x, norm, lambda _: c1, lambda _: c2)
    chosen = Backprop(norm=norm, input_clip=c1, gradient_clip=c2)
    close(sums(stepped(chosen, model, x)), expected)
    close(sums(stepped(chosen, model, x[:4], x[4:5], x[5:])), expected)


def test_each_layer_has_the_clips_of_the_first_pattern_that_matches() -> None:
    model, x = network(), images(9)
    inputs, gradients = {"0": 0.3, "4": 2.0, "*": 0.7}, {"[0145]": 0.02, "7": 0.1}
    chosen = Backprop(input_clip=inputs, gradient_clip=gradients)
    queries = stepped(chosen, model, x)
    c1, c2 = {"0": 0.3, "4": 2.0, "7": 0.7}, {"0": 0.02, "1": 0.02, "4": 0.02, "5": 0.02, "7": 0.1}
    close(sums(queries), naive_sums(model, x, "patch", c1.__getitem__, c2.__getitem__))
    bounds = {q.name: q.sensitivity.add_remove for q in queries}
    expected = {f"{n}.bias": c2[n] for n in c1} | {f"{n}.weight": c1[n] * c2[n] for n in c1}
    assert bounds == pytest.approx(expected | {"1.weight": 0.02, "5.weight": 0.02})
    assert all(q.sensitivity.replace_one == 2 * q.sensitivity.add_remove for q in queries)


def test_settings_that_cannot_be() -> None:
    for bad in (0.0, -1.0, math.nan, math.inf, 1e-12):
        for option in ("input_clip", "gradient_clip"):
            with pytest.raises(ConfigError, match=option):
                Backprop(**{option: bad})
            with pytest.raises(ConfigError, match=option):
                Backprop(**{option: {"*": bad}})
    for wrong in ({"norm": "l1"}, {"clips": "no"}, {"quantile": 1.0}, {"adaptive_rate": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Backprop(**wrong)
    for option in ("input_clip", "gradient_clip"):
        with pytest.raises(ConfigError, match=f"{option} has no pattern that matches layer '2'"):
            Backprop(**{option: {"0": 1.0}}).open(chain(), SETTING)


# Sensitivity


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e12, 1e30])
def test_no_record_adds_more_than_the_bound(norm: Norm, scale: float) -> None:
    chosen = Backprop(norm=norm, input_clip=0.5, gradient_clip=0.1)
    for direction in (1.0, -1.0):
        steep = lambda m, x: m(x).sum(1) * direction * scale  # noqa: E731, B023
        for x in (images(1, scale=scale), torch.ones(1, 2, 4, 4) * scale, torch.eye(4).expand(1, 2, 4, 4) * scale):
            within(stepped(chosen, network(), x, losses=steep))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["input", "loss"])
@pytest.mark.parametrize("first", ["convolution", "norm"])
def test_a_record_that_is_not_finite_adds_exactly_zero(first: str, where: str, bad: float) -> None:
    model = network() if first == "convolution" else nn.Sequential(nn.GroupNorm(1, 2), *network())
    x = images(5)
    spoiled = x.clone()

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        factors = torch.ones(len(x))
        if where == "loss":
            factors[2] = bad
        return bumpy_losses(model, x) * factors

    if where == "input":
        spoiled[2] *= bad
    expected = sums(stepped(Backprop(), model, x[[0, 1, 3, 4]]))
    found = sums(stepped(Backprop(), model, spoiled, losses=losses))
    if where == "input":  # what lies behind a clip that gives zero still learns from zero
        assert all(bool(torch.isfinite(v).all()) for v in found.values())
        within(stepped(Backprop(), model, spoiled[2:3], losses=losses))
        names = [n for n in found if n.startswith("0.")]
        close({n: found[n] for n in names if first == "norm"}, {n: expected[n] for n in names if first == "norm"}, 1e-4)
    else:
        close(found, expected, 1e-4)


@pytest.mark.parametrize("kind", ["scale", "table"])
def test_gradients_that_cancel_over_positions_stay_within_the_bound(kind: str) -> None:
    """Their sum is short and their terms are long: scaled, they are rounded anew, and must not add up to more."""
    for seed in range(5):
        torch.manual_seed(seed)
        order = torch.randperm(2000)
        slopes = torch.randn(1, 4, 1000) * 1e6
        slopes = torch.cat([slopes, -slopes], 2)[..., order]
        slopes[0, 0, 0] += 0.5
        if kind == "scale":
            layer: nn.Module = nn.GroupNorm(1, 4)
            z = torch.randn(1, 4, 1000).repeat(1, 1, 2)[..., order]
        else:
            layer, z, slopes = nn.Embedding(2, 4), torch.ones(1, 2000, dtype=torch.long), slopes.mT
        for clip in (0.01, 0.1, 0.3):
            cancelling = lambda m, z, slopes=slopes: (m(z) * slopes).flatten(1).sum(1)  # noqa: E731
            within(stepped(Backprop(gradient_clip=clip), nn.Sequential(layer), z, losses=cancelling))


@pytest.mark.parametrize("norm", NORMS)
def test_the_bound_holds_under_autocast(norm: Norm) -> None:
    model = network()
    chosen = Backprop(norm=norm, input_clip=0.7, gradient_clip=0.1)

    def low(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return bumpy_losses(model, x).float() * 1e3

    for seed in range(3):
        within(stepped(chosen, model, images(1, seed, scale=30.0), losses=low))
    found, exact = sums(stepped(chosen, model, images(8), losses=low)), sums(stepped(chosen, model, images(8)))
    assert all(torch.cosine_similarity(found[n].flatten(), exact[n].flatten(), 0) > 0.7 for n in exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_bound_holds_in_other_precisions(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    for seed in range(3):
        within(stepped(Backprop(norm="frobenius"), model, images(1, seed, scale=30.0).to(dtype)))


# What a user can do to a model: each of these is refused, or the bound holds


def steep(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).sum(1) * 1e3


def hook_after_the_clip(model: nn.Sequential, _session: Any) -> None:
    model[0].register_forward_pre_hook(lambda _, args: (args[0] * 100,))


def replace_the_clip(model: nn.Sequential, _session: Any) -> None:
    model[0].input_clip = nn.Identity()


def another_stride(model: nn.Sequential, _session: Any) -> None:
    model[0].stride = (1,)


def another_norm(model: nn.Sequential, _session: Any) -> None:
    state = {**model.state_dict(), "0.input_clip.kind": torch.tensor(NORMS.index("patch"), dtype=torch.uint8)}
    model.load_state_dict(state)


def freeze_the_bias(model: nn.Sequential, _session: Any) -> None:
    model[0].bias.requires_grad_(False)


def larger_bound(model: nn.Sequential, _session: Any) -> None:
    model[0].input_clip.set(100.0)


@pytest.mark.parametrize("when", ["before the step", "in the step"])
@pytest.mark.parametrize(
    "change",
    [hook_after_the_clip, replace_the_clip, another_stride, another_norm, freeze_the_bias, larger_bound],
    ids=lambda change: change.__name__,
)
def test_a_model_that_is_changed_is_refused_or_stays_within_the_bound(
    change: Callable[[nn.Sequential, Any], None], when: str
) -> None:
    alternating = 1 - 2 * (torch.arange(64) % 2)
    one_entry = (torch.arange(64) == 7).float()
    for x, signs in ((torch.ones(64), 1.0), (one_entry, 1.0), (alternating.float(), alternating)):
        model = nn.Sequential(nn.Conv1d(1, 1, 1, stride=3), nn.Flatten())
        InputClip.before(model[0], 1.0, "frobenius")
        session = Backprop().open(model, SETTING)
        try:
            if when == "before the step":
                change(model, session)
            session.begin()
            if when == "in the step":
                change(model, session)
            with session.listening():
                output = model[0](100 * x.view(1, 1, -1)).flatten(1)
                session.add((output * (signs if isinstance(signs, float) else signs[: output.shape[1]])).sum(1) * 1e3)
            within(session.finish())
        except Refused:
            pass
        finally:
            session.close()


def test_layers_without_a_bound_are_refused_by_name() -> None:
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2, batch_first=True)})
    with pytest.raises(Refused, match=r"'attention' \(MultiheadAttention\)"):
        Backprop().open(attention, SETTING)
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2))
    with pytest.raises(Refused, match=r"'1' \(PReLU\)"):
        Backprop().open(model, SETTING)
    model[1].requires_grad_(False)
    stepped(Backprop(), model, rows(3))


def test_a_layer_that_is_used_twice_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    twice = lambda model, x: bumpy_losses(model, model(x))  # noqa: E731
    with pytest.raises(Refused, match="used more than once"):
        stepped(Backprop(), model, rows(3), losses=twice)


def test_tied_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(Refused, match=r"'0' .* and '1' .* share a parameter"):
        Backprop().open(model, SETTING)


# Frozen layers


def test_frozen_layers_take_no_part_until_they_are_thawed() -> None:
    model, x = chain(), rows(6)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    session = Backprop().open(model, SETTING)
    assert clip_of(model[0]) is None
    assert [q.name for q in one_step(session, model, x)] == ["2.weight"]
    model.requires_grad_(True)
    queries = one_step(session, model, x)
    assert clip_of(model[0]) is not None
    expected = naive_sums(chain(), x, "patch", lambda _: 1.0, lambda _: 0.1)
    close(sums(queries), expected)
    model[2].requires_grad_(False)
    assert sorted(q.name for q in one_step(session, model, x)) == ["0.bias", "0.weight"]
    session.close()


@pytest.mark.parametrize("trained_first", [True, False])
@pytest.mark.parametrize("parameter", ["0.weight", "2.bias"])
def test_freezing_or_thawing_within_a_step_is_refused(parameter: str, trained_first: bool) -> None:
    model, x = chain(), rows(6)
    changed = model.get_parameter(parameter).requires_grad_(trained_first)
    session = Backprop().open(model, SETTING)
    session.begin()
    with session.listening():
        session.add(bumpy_losses(model, x))
        changed.requires_grad_(not trained_first)
        losses = bumpy_losses(model, x)
        with pytest.raises(Refused, match=f"'{parameter}' was frozen or thawed within a step"):
            session.add(losses)
    session.close()


# Clips that follow norms


def multiplier(queries: list[Query], allocation: Any = "optimal", sigma: float = 1.0) -> float:
    rules = Rules(batch=10, noise_multiplier=sigma, basis="add_remove", allocation=allocation)
    stds = noise_stds(queries, rules, Source("seeded", seed=0))
    return sum((q.sensitivity.add_remove / std) ** 2 for q, std in zip(queries, stds, strict=True)) ** -0.5


@pytest.mark.parametrize("allocation", ["isotropic", "proportional", "optimal"])
@pytest.mark.parametrize("clips", ["fixed", "private"])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 8.0])
def test_all_sums_are_one_mechanism(allocation: Any, clips: Any, sigma: float) -> None:
    setting = Setting(batch=10, noise_multiplier=sigma, relation="add_remove")
    chosen = Backprop(clips=clips, allocation=allocation)
    queries = stepped(chosen, network(), images(4), setting=setting)
    side = [q for q in queries if q.group is None]
    assert len(side) == (8 if clips == "private" else 0)  # five gradients and three inputs
    assert multiplier(queries, allocation, sigma) == pytest.approx(sigma)
    assert sum((q.sensitivity.add_remove / q.std) ** 2 for q in side if q.std) <= sigma**-2 / 16 * (1 + 1e-9)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, math.nan])
def test_one_record_moves_each_side_query_by_at_most_a_half(scale: float, checkpointed: bool) -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        if not checkpointed:
            return bumpy_losses(model, x)
        return bumpy_losses(nn.Identity(), checkpoint(model, x.clone().requires_grad_(), use_reentrant=False))

    chosen, x = Backprop(clips="private"), images(6)
    before = stepped(chosen, network(), x, losses=losses)
    after = stepped(chosen, network(), x, images(1, seed=5, scale=scale), losses=losses)
    moved = [abs(float(a.total - b.total)) for a, b in zip(after, before, strict=True) if a.group is None]
    assert len(moved) == 8 and max(moved) <= 0.5
    if scale == 1e3:
        assert max(moved) == 0.5


def test_counts_are_what_they_say() -> None:
    chosen = Backprop(clips="private", input_clip=2.0, gradient_clip=1.0)
    model, x = nn.Sequential(nn.Linear(4, 1, bias=False)), rows(20)
    slopes = torch.linspace(0.1, 3, 20)
    queries = {q.name: q for q in stepped(chosen, model, x, losses=lambda m, x: m(x).squeeze(1) * slopes)}
    inputs = int((x.norm(dim=1) < 2).sum()) - 10
    assert float(queries["inputs of 0 below their clip"].total) == inputs
    assert float(queries["gradients of 0 below their clip"].total) == int((slopes <= 1).sum()) - 10
    for lost in (math.nan, math.inf):  # a record without a finite loss is on neither side
        side = stepped(chosen, model, x[:1], losses=lambda m, x, lost=lost: m(x).squeeze(1) * lost)[1:]
        assert [float(q.total) for q in side] == [0, 0]


def test_private_clips_move_to_the_quantile() -> None:
    """With counts as they are (no noise), both clips of a layer end at the wanted quantile of its norms."""
    model, x = nn.Sequential(nn.Linear(4, 1, bias=False)), rows(200)
    slopes = torch.linspace(0.5, 3, 200)
    setting = Setting(batch=200, noise_multiplier=1.0, relation="add_remove")
    session: Any = Backprop(clips="private", input_clip=50.0, gradient_clip=0.01, quantile=0.3, adaptive_rate=1.0).open(
        model, setting
    )
    for _ in range(60):
        queries = one_step(session, model, x, losses=lambda m, x: m(x).squeeze(1) * slopes)
        session.observe({q.name: q.total for q in queries if q.group is None})
    assert float(clip_of(model[0]).bound) == pytest.approx(float(x.norm(dim=1).quantile(0.3)), rel=0.05)
    assert session.state()["gradient_clips"]["0"] == pytest.approx(float(slopes.quantile(0.3)), rel=0.05)
    session.begin()
    (weight, *_) = session.finish()
    clips = float(clip_of(model[0]).bound), session.state()["gradient_clips"]["0"]
    assert weight.sensitivity.add_remove == pytest.approx(clips[0] * clips[1])
    session.close()


@pytest.mark.parametrize("clips", ["fixed", "private", "public"])
def test_a_statement_can_be_had_at_any_time(clips: Any) -> None:
    public = {"public": labelled(rows(20, seed=9))} if clips == "public" else {}
    with run_on(chain(), rows(40), Backprop(clips=clips), **public) as run:
        if clips != "public":
            run.statement()
        train(run)
        assert len(run.statement()["groups"]) == (8 if clips == "private" else 4)


def test_private_clips_stay_in_the_range_of_float32() -> None:
    """A layer that meets nothing but zeros is below its clips for ever: they must not sink to where zero is no zero."""
    model = nn.Sequential(nn.Linear(4, 1))
    session = Backprop(clips="private", adaptive_rate=5.0).open(model, SETTING)
    for _ in range(60):
        queries = one_step(session, model, torch.zeros(10, 4), losses=lambda m, x: m(x).squeeze(1) * 0)
        session.observe({q.name: q.total for q in queries if q.group is None})
    found = one_step(session, model, torch.zeros(10, 4))
    assert all(bool(torch.isfinite(q.total).all()) and q.sensitivity.add_remove > 0 for q in found)
    assert bool(torch.isfinite(model(torch.zeros(1, 4))).all())
    assert multiplier(found) == pytest.approx(1.0)
    session.close()


def test_public_records_set_clips_to_their_quantile_and_choose_the_norms() -> None:
    """Where δ agrees over positions its l1-l2 norm is √T times as long, and patches alike make the Frobenius one so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 1, bias=False), nn.Flatten(), nn.Linear(24, 2))
    x = torch.zeros(40, 2, 8)
    x[:, :, 0] = torch.linspace(0.5, 1.5, 40).view(-1, 1)  # one patch alone: ‖P‖_F is the largest patch
    session: Any = Backprop(clips="public", quantile=0.5).open(model, WITH_PUBLIC)
    assert session.wants_public()
    for chunk in x.split(10):
        with session.learning():
            session.learn(bumpy_losses(model, chunk))
    session.learned()
    clip = clip_of(model[0])
    assert clip.norm == "frobenius"
    assert float(clip.bound) == pytest.approx(float(x.flatten(1).norm(dim=1).quantile(0.5)), rel=1e-3)
    assert 0 < session.state()["gradient_clips"]["0"] < math.inf
    within(one_step(session, model, x[:1] * 100, losses=steep))
    session.close()


def test_auto_without_public_records_is_patch() -> None:
    model = network()
    Backprop().open(model, SETTING).close()
    assert clip_of(model[0]).norm == "patch"


def test_public_clips_need_public_records() -> None:
    with pytest.raises(Refused, match="public"):
        Backprop(clips="public").open(chain(), SETTING)


# Whole runs


def labelled(x: Tensor) -> TensorDataset:
    return TensorDataset(x, (x.flatten(1)[:, 0] > 0).long())


def run_on(model: nn.Module, x: Tensor, chosen: Backprop, **options: Any) -> Run:
    settings: dict[str, Any] = {"sampling": Poisson(batch=10), "budget": Budget(noise=1.0, steps=6, delta=1e-5)}
    return Run(model, labelled(x), method=chosen, **settings | options)


def train(run: Run, losses: Losses = bumpy_losses, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(run.model.parameters(), rate)
    for step in run.loader:
        for x, _ in step:
            step.backward(losses(run.model, x))
        optimizer.step()


@pytest.mark.parametrize("physical", [3, 64])
def test_a_step_without_noise_hands_over_the_naive_sum(physical: int) -> None:
    model, x = network(), images(12)
    budget = Budget(noise=0.0, steps=1, delta=1e-5)
    with run_on(model, x, Backprop(), budget=budget, physical_batch=physical, noise_level="seeded", seed=0) as run:
        step = run.step_on(range(12))
        for batch, _ in step:
            step.backward(bumpy_losses(model, batch))
    expected = naive_sums(network(), x, "patch", lambda _: 1.0, lambda _: 0.1)
    close({name: p.grad * 10 for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize(
    ("sampling", "relation", "allocation"),
    [
        (Poisson(batch=10), "add_remove", "isotropic"),
        (Partition(batch=10), "add_remove", "proportional"),
        (Partition(batch=10), "replace_one", "optimal"),
    ],
)
def test_whole_runs_state_their_noise(sampling: Any, relation: Any, allocation: Any) -> None:
    chosen = Backprop(input_clip=0.1, gradient_clip=0.3, allocation=allocation)
    with run_on(chain(), rows(40), chosen, sampling=sampling, relation=relation) as run:
        train(run)
        groups = run.statement()["groups"]
        basis = sampling.sensitivity_basis(relation)
        assert run.steps_done == 4
    factor = 2 if relation == "replace_one" else 1
    found = {g["group"]: g["sensitivity"] for g in groups}
    expected = {"0.weight": 0.03, "0.bias": 0.3, "2.weight": 0.03, "2.bias": 0.3}
    assert found == pytest.approx({name: factor * c for name, c in expected.items()})
    scale = 1 if basis == relation else factor  # the accountant may count in the other relation
    assert sum((g["sensitivity"] / scale / g["noise_std"]) ** 2 for g in groups) == pytest.approx(1.0)


@pytest.mark.parametrize("clips", ["fixed", "private", "public"])
def test_learned_clips_are_in_the_checkpoint(tmp_path: Path, clips: Any) -> None:
    options = {"public": labelled(rows(20, seed=9))} if clips == "public" else {}
    chosen, path = Backprop(clips=clips), tmp_path / "checkpoint"
    with run_on(chain(), rows(40), chosen, **options) as run:
        train(run)
        run.save(path)
        state, clipped = run.session.state(), [repr(clip_of(m)) for m in run.model.modules()]
    assert (state["gradient_clips"] == {"0": 0.1, "2": 0.1}) == (clips == "fixed")
    with run_on(chain(), rows(40), chosen, **options) as again:
        again.load(path)
        assert again.session.state() == state
        assert [repr(clip_of(m)) for m in again.model.modules()] == clipped
        bounds = [q.sensitivity.add_remove for q in again.session.finish() if q.group is not None]
        c1 = {name: float(clip_of(again.model[int(name)]).bound) for name in ("0", "2")}
        c2 = state["gradient_clips"]
        assert bounds == pytest.approx([c1["0"] * c2["0"], c2["0"], c1["2"] * c2["2"], c2["2"]])


def test_two_runs_on_one_model_each_have_their_clips() -> None:
    model, x = chain(), rows(12)
    first = Backprop(input_clip=0.3, gradient_clip=0.2).open(model, SETTING)
    second = Backprop(input_clip=2.0, gradient_clip=0.5, norm="frobenius").open(model, SETTING)
    for session, c1, c2 in ((first, 0.3, 0.2), (second, 2.0, 0.5), (first, 0.3, 0.2)):
        close(sums(one_step(session, model, x)), naive_sums(chain(), x, "patch", lambda _: c1, lambda _: c2))  # noqa: B023
    first.begin()
    second.begin()
    with pytest.raises(Refused, match="changed in the middle"), first.listening():
        model(x)
    first.close()
    second.close()


def test_after_close_only_the_input_clips_are_left() -> None:
    model = network()
    with run_on(model, images(20), Backprop(clips="private")) as run:
        train(run)
    for module in model.modules():
        assert not module._forward_hooks
        assert len(module._forward_pre_hooks) == (clip_of(module) is not None)
    assert [clip_of(m) is not None for m in model] == [isinstance(m, nn.Linear | nn.Conv2d) for m in model]
    x = images(3, scale=100.0)
    bounds = [clip_of(model[i])(x if i == 0 else torch.ones(3, 64) * 9) for i in (0, 4)]
    assert all(float(b.flatten(1).norm(dim=1).max()) < 20 for b in bounds)


def test_gradient_checkpointing_gives_the_same_sums() -> None:
    model, x = network(), images(8)
    head, tail = model[:4], model[4:]

    def losses(_model: nn.Module, x: Tensor) -> Tensor:
        h = checkpoint(head, x, use_reentrant=False)
        return bumpy_losses(nn.Identity(), checkpoint(tail, h, use_reentrant=False))

    close(sums(stepped(Backprop(), model, x, losses=losses)), sums(stepped(Backprop(), model, x)), 1e-5)


class Attention(nn.Module):
    """Self-attention of one head from linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.query(x) @ self.key(x).mT / x.shape[-1] ** 0.5
        return self.out(weights.softmax(-1) @ self.value(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(6, width), nn.Embedding(5, width)
        self.before, self.attention, self.after = nn.LayerNorm(width), Attention(width), nn.RMSNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]).expand_as(tokens))
        x = x + self.attention(self.before(x))
        x = x + self.narrow(self.wide(self.after(x)).relu())
        return self.head(x.mean(1))


@pytest.mark.parametrize("norm", ["patch", "frobenius"])
def test_a_small_transformer_trains(norm: Norm) -> None:
    torch.manual_seed(0)
    model = Transformer()
    tokens = torch.randint(6, (120, 5), generator=torch.Generator().manual_seed(1))
    labels = (tokens == 3).any(1).long()
    loss = nn.CrossEntropyLoss(reduction="none")
    options: dict[str, Any] = {"noise_level": "seeded", "seed": 0, "sampling": Poisson(batch=60)}
    run = Run(
        model,
        TensorDataset(tokens, labels),
        method=Backprop(input_clip=3.0, gradient_clip=0.05, norm=norm),
        budget=Budget(noise=0.0, steps=30, delta=1e-5),
        **options,
    )
    with run:
        within(one_step(run.session, model, tokens[:1], losses=lambda m, x: m(x)[:, 0] * 1e4))
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        before = loss(model(tokens), labels).mean().item()
        while not run.finished:
            for step in run.loader:
                for x, y in step:
                    step.backward(loss(model(x), y))
                optimizer.step()
    assert loss(model(tokens), labels).mean().item() < 0.8 * before
