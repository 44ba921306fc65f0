"""Per-example clipping: the clipped sum is the naive one, and no record moves it by more than it may."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from conftest import Losses, bumpy_losses, naive_clipped_sum, naive_gradients
from torch import Tensor, nn

from privet import CheckpointError, ConfigError, PerExample, Refused, method
from privet.methods import Query, Session, Setting
from privet.noise import Source
from privet.step import Rules, noise_stds

SETTING = Setting(batch=10, noise_multiplier=1.0, relation="add_remove")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def images(count: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed)) * scale


def bounded(
    chosen: PerExample, model: nn.Module, *chunks: tuple[Any, ...], losses: Losses = bumpy_losses
) -> list[Query]:
    """The queries of one step over these chunks."""
    session = chosen.open(model, SETTING)
    try:
        session.begin()
        for chunk in chunks:
            with session.listening():
                session.add(losses(model, *chunk))
        return session.finish()
    finally:
        session.close()


def sums(queries: list[Query]) -> dict[str, Tensor]:
    return {n: v.double().clone() for q in queries if q.group is not None for n, v in q.group.split(q.total).items()}


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("clip", [1e-3, 0.7, 5.0, 1e6])
def test_the_clipped_sum_is_the_naive_one(clip: float) -> None:
    model, x = network(), images(12)
    expected = naive_clipped_sum(naive_gradients(model, bumpy_losses, (x,)), clip)
    close(sums(bounded(PerExample(clip=clip), model, (x,))), expected)
    close(sums(bounded(PerExample(clip=clip), model, (x[:5],), (x[5:6],), (x[6:],))), expected)


@pytest.mark.parametrize("gamma", [1e-3, 0.5])
def test_automatic_clipping_is_the_naive_one(gamma: float) -> None:
    model, x = network(), images(12)
    expected = naive_clipped_sum(naive_gradients(model, bumpy_losses, (x,)), 0.3, gamma)
    close(sums(bounded(PerExample(clip=0.3, clip_function="automatic", stability=gamma), model, (x,))), expected)


GROUPS = {"convolution": ["0.*"], "norms": ["1.*", "5.*"], "rest": ["*"]}
CLIPS = {"convolution": 0.1, "norms": 0.5, "rest": 2.0}


def test_groups_are_clipped_apart_each_at_its_threshold() -> None:
    model, x = network(), images(12)
    gradients = naive_gradients(model, bumpy_losses, (x,))
    members = {
        "convolution": ["0.weight", "0.bias"], "norms": ["1.weight", "1.bias", "5.weight", "5.bias"],
        "rest": ["4.weight", "4.bias", "7.weight", "7.bias"],
    }  # fmt: skip
    expected: dict[str, Tensor] = {}
    for group, names in members.items():
        expected |= naive_clipped_sum({n: gradients[n] for n in names}, CLIPS[group])
    queries = bounded(PerExample(clip=CLIPS, groups=GROUPS), model, (x,))
    close(sums(queries), expected)
    assert {q.name: q.sensitivity.add_remove for q in queries} == CLIPS
    assert {q.name: q.sensitivity.replace_one for q in queries} == {name: 2 * c for name, c in CLIPS.items()}


# Sensitivity, exactly: noise off, f(D ∪ {x}) − f(D) for hostile x


def hostile(kind: str) -> Tensor:
    x = images(1, seed=9)
    special: dict[str, Callable[[], Tensor]] = {
        "ordinary": lambda: x, "huge": lambda: x * 1e6, "enormous": lambda: x * 1e30, "tiny": lambda: x * 1e-6,
        "vanishing": lambda: x * 1e-30, "zero": lambda: x * 0, "nan": lambda: x * math.nan,
        "one nan": lambda: x.flatten().index_fill(0, torch.tensor([3]), math.nan).view_as(x),
        "infinite": lambda: x + math.inf, "constant": lambda: torch.ones_like(x) * 1e3,
        "alternating": lambda: torch.tensor([1e4, -1e4]).repeat(16).view_as(x),
        "fresh axis": lambda: torch.zeros_like(x).index_fill(3, torch.tensor([0]), 1e5),
        "like the others": lambda: images(8).mean(0, keepdim=True), "against them": lambda: -images(8)[:1],
    }  # fmt: skip
    return special[kind]()


KINDS = [
    "ordinary", "huge", "enormous", "tiny", "vanishing", "zero", "nan", "one nan", "infinite", "constant",
    "alternating", "fresh axis", "like the others", "against them",
]  # fmt: skip


def squared(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return (model(x) - targets).square().sum(1)


def flat(total: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([total[name].flatten() for name in names])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [0.0, 1e3, 1e18, math.nan])
@pytest.mark.parametrize(
    "chosen",
    [
        PerExample(clip=0.5),
        PerExample(clip=0.5, clip_function="automatic"),
        PerExample(clip=CLIPS, groups=GROUPS),
        PerExample(clip=0.5, adaptive=True),
    ],
    ids=["abadi", "automatic", "groups", "adaptive"],
)
def test_one_record_moves_each_sum_by_no_more_than_its_sensitivity(
    chosen: PerExample, kind: str, target: float
) -> None:
    model, others, x = network(), images(8), hostile(kind)
    x2 = images(1, seed=11, scale=50)
    y = torch.zeros(9, 3)
    added, instead = y.clone(), y.clone()
    added[8], instead[8] = target, -1e3
    without = bounded(chosen, model, (others, y[:8]), losses=squared)
    before = {q.name: q.total.double().clone() for q in without}
    with_x = bounded(chosen, model, (torch.cat([others, x]), added), losses=squared)
    with_other = bounded(chosen, model, (torch.cat([others, x2]), instead), losses=squared)
    slack = 1 + 1e-6  # of the float32 sum over the other records
    for old, new, other in zip(without, with_x, with_other, strict=True):
        assert torch.isfinite(new.total).all()
        moved = (new.total.double() - before[old.name]).norm()
        assert moved <= new.sensitivity.add_remove * slack + 2e-6
        replaced = (new.total.double() - other.total.double()).norm()
        assert replaced <= new.sensitivity.replace_one * slack + 2e-6
        if kind == "nan" or math.isnan(target):
            assert moved < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_by_itself_adds_at_most_the_threshold(kind: str) -> None:
    """Without a sum around it, so without its rounding."""
    for chosen in (PerExample(clip=0.5), PerExample(clip=0.5, clip_function="automatic", stability=1e-6)):
        (query,) = bounded(chosen, network(), (hostile(kind), torch.full((1, 3), 7.0)), losses=squared)
        assert query.total.double().norm() <= 0.5
        if kind in ("nan", "one nan", "infinite"):
            assert not query.total.any()
        if kind in ("ordinary", "huge", "tiny", "zero"):
            assert query.total.double().norm() > 0.49


def test_a_norm_that_underflows_is_not_taken_for_zero() -> None:
    """‖δ‖·‖z‖ with an input whose square is nothing in float32, and a huge output gradient."""
    width, clip = 10_000, 1e-4
    model = nn.Linear(width, 1, bias=False)
    x = torch.full((1, width), 1e-23)
    (query,) = bounded(PerExample(clip=clip), model, (x, torch.full((1, 1), 1e18)), losses=squared)
    assert query.total.double().norm() <= clip


@pytest.mark.parametrize("seed", range(5))
def test_cancelling_positions_add_at_most_the_threshold(seed: int) -> None:
    """Ghost norms: a constant input under output gradients that alternate in sign and nearly cancel."""
    torch.manual_seed(seed)
    model = nn.Linear(128, 128, bias=False)
    x = torch.randn(1, 1, 128).expand(-1, 8, -1).contiguous() * 100
    slopes = torch.tensor([1.0, -1.0]).repeat(4).view(1, 8, 1) * torch.randn(1, 1, 128) * 1e4
    slopes = slopes + torch.randn(1, 8, 128) * 10.0 ** -(seed % 4)
    (query,) = bounded(
        PerExample(clip=0.5), model, (x, slopes), losses=lambda m, x, s: (m(x) * s).flatten(1).sum(1)
    )  # fmt: skip
    assert query.total.double().norm() <= 0.5 * (1 + 1e-4)


def test_nobody_is_told_how_many_records_were_not_finite() -> None:
    """A lost record counts neither as below the threshold nor as above."""
    model, x = network(), images(3)
    x[1] = math.nan
    query = bounded(PerExample(clip=1e9, adaptive=True), model, (x,))[1]
    assert query.total.item() == pytest.approx(2 * 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_with_a_finite_gradient_of_a_loss_that_is_not_finite_adds_nothing(bad: float) -> None:
    model, x = network(), images(2)
    queries = bounded(PerExample(), model, (x,), losses=lambda m, x: bumpy_losses(m, x) + torch.tensor([0.0, bad]))
    close(sums(queries), sums(bounded(PerExample(), model, (x[:1],))))


# The adaptive threshold


def test_the_threshold_moves_to_the_quantile() -> None:
    model, x = network(), images(200)
    norms = torch.cat([g.flatten(1) for g in naive_gradients(model, bumpy_losses, (x,)).values()], 1).norm(dim=1)
    for quantile, start in ((0.5, 100.0), (0.8, 0.01)):
        chosen = PerExample(clip=start, adaptive=True, quantile=quantile, adaptive_rate=0.5)
        session = chosen.open(model, Setting(batch=200, noise_multiplier=1.0, relation="add_remove"))
        for _ in range(80):
            session.begin()
            with session.listening():
                session.add(bumpy_losses(model, x))
            queries = session.finish()
            session.observe({q.name: q.total for q in queries if q.group is None})
        share = (norms <= session.state()["clips"]["all"]).double().mean().item()
        assert abs(share - quantile) < 0.03
        assert session.finish()[0].sensitivity.add_remove == session.state()["clips"]["all"]
        session.close()


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("allocation", ["isotropic", "proportional", "optimal"])
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["flat", "groups"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_all_sums_of_a_step_cost_what_the_noise_multiplier_says(
    relation: Any, sigma: float, allocation: Any, groups: Any, adaptive: bool
) -> None:
    """Rule 2: Σ (Δ/std)² = 1/σ², the side queries and all groups included (no √G is missing)."""
    chosen = PerExample(clip=CLIPS if groups else 0.7, groups=groups, adaptive=adaptive, allocation=allocation)
    session = chosen.open(network(), Setting(batch=32, noise_multiplier=sigma, relation=relation))
    session.begin()
    queries = session.finish()
    session.close()
    rules = Rules(batch=32, noise_multiplier=sigma, basis=relation, allocation=allocation)
    stds = noise_stds(queries, rules, Source("seeded", seed=0))
    assert len(queries) == (3 if groups else 1) * (2 if adaptive else 1)
    cost = sum((q.sensitivity.under(relation) / std) ** 2 for q, std in zip(queries, stds, strict=True))
    assert cost == pytest.approx(sigma**-2, rel=1e-9)
    if adaptive:
        side = sum(
            (q.sensitivity.under(relation) / std) ** 2 for q, std in zip(queries, stds, strict=True) if q.group is None
        )
        assert 0 < side < 0.3 * sigma**-2
        assert all(q.sensitivity.add_remove == 0.5 for q in queries if q.group is None)


def test_thresholds_are_kept_in_checkpoints() -> None:
    first: Session = PerExample(adaptive=True).open(network(), SETTING)
    first.begin()
    first.observe({"below C of all": torch.tensor([5.0])})
    second = PerExample(adaptive=True).open(network(), SETTING)
    second.load_state(first.state())
    assert second.state() == first.state() != {"clips": {"all": 1.0}}
    with pytest.raises(CheckpointError, match=r"groups \['other'\]"):
        second.load_state({"clips": {"other": 1.0}})


# What is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip": 0}, "clip must be a positive number, and is 0"),
        ({"clip": -1.0}, "clip must be"),
        ({"clip": math.nan}, "clip must be"),
        ({"clip": math.inf}, "clip must be"),
        ({"clip": {"all": 0.0}}, "clip must be"),
        ({"stability": 0}, "stability must be"),
        ({"adaptive_rate": 0}, "adaptive_rate must be"),
        ({"quantile": 1.0}, "quantile must lie between 0 and 1, and is 1.0"),
        ({"quantile": 0}, "quantile must lie"),
        ({"clip_function": "soft"}, "clip_function must be 'abadi' or 'automatic', and is 'soft'"),
        ({"clip_function": "automatic", "adaptive": True}, "no threshold to adapt"),
        ({"clipp": 1}, "does not take these options"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method("per-example", **options)


def test_groups_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"matches parameter '1\.weight'"):
        PerExample(groups={"first": ["0.*"]}).open(network(), SETTING)
    with pytest.raises(ConfigError, match="group 'none'"):
        PerExample(groups={"all": ["*"], "none": ["99.*"]}).open(network(), SETTING)
    with pytest.raises(ConfigError, match="no threshold for group 'all'"):
        PerExample(clip={"other": 1.0}).open(network(), SETTING)
    frozen = network().requires_grad_(False)
    with pytest.raises(Refused, match="nothing to train"):
        PerExample().open(frozen, SETTING)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no method 'magic'.*per-example"):
        method("magic")
