"""Groups of parameters and their thresholds: what is clipped apart, at which norm, and when that is decided."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from conftest import bumpy_losses, naive_gradients
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Budget, ConfigError, PerExample, Poisson, Refused, Run, method
from privet.methods.base import Setting
from privet.methods.batch import Batch
from privet.methods.layerwise import Layerwise

SETTING = Setting(batch=10, noise_multiplier=1.0, relation="add_remove", public=True)
C = 0.7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).tanh())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(3, 4), nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def nested() -> nn.Module:
    torch.manual_seed(0)
    return Nested()


def chain(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2))))


def rows(count: int, seed: int = 0, width: int = 3) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def learn(session: Any, model: nn.Module, x: Tensor, size: int) -> None:
    for chunk in x.split(size):
        with session.learning():
            session.learn(bumpy_losses(model, chunk))
    session.learned()


def mean_norms(model: nn.Module, x: Tensor, groups: Mapping[str, list[str]]) -> dict[str, float]:
    """e_h: the mean over single records of the norm of the group's gradient."""
    gradients = naive_gradients(model, bumpy_losses, (x,))
    flat = {g: torch.cat([gradients[n].double().flatten(1) for n in names], 1) for g, names in groups.items()}
    return {g: float(rows.norm(dim=1).mean()) for g, rows in flat.items()}


def members(session: Any) -> dict[str, list[str]]:
    return {group.name: list(group.parameters) for group in session.groups}


LAYERS = ["stem", "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "norm"]
CHAIN = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"], "3": ["3.weight", "3.bias"]}


# Groups


@pytest.mark.parametrize("kind", [PerExample, Layerwise, Batch])
@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ("layer", LAYERS),
        ("block", ["stem", "blocks.0", "blocks.1", "norm"]),
        ("parameter", [f"{layer}.{p}" for layer in LAYERS for p in ("weight", "bias")]),
        ({"norms": ["norm.*"], "second": ["*.second.*"], "rest": ["*"]}, ["norms", "second", "rest"]),
        ({"norms": "norm.*", "rest": "*"}, ["norms", "rest"]),
        (3, ["group 1 of 3", "group 2 of 3", "group 3 of 3"]),
        (1, ["group 1 of 1"]),
        (None, ["all"]),
    ],
)
def test_groups_are_a_partition_of_the_parameters(kind: Any, groups: Any, names: list[str]) -> None:
    model = nested()
    session = kind(groups=groups).open(model, SETTING)
    found = members(session)
    assert sorted(found) == sorted(names)
    assert all(found.values())
    assert sorted(n for names in found.values() for n in names) == sorted(dict(model.named_parameters()))
    if groups == "layer":
        assert all(found[layer] == [f"{layer}.weight", f"{layer}.bias"] for layer in LAYERS)
    if groups == "block":
        assert found["blocks.1"] == [f"blocks.1.{n}" for n in dict(Block().named_parameters())]
    if isinstance(groups, Mapping):
        assert found["norms"] == ["norm.weight", "norm.bias"]


def test_parameters_of_the_model_itself_have_a_group_too() -> None:
    assert members(Batch(groups="layer").open(nn.Linear(3, 2), SETTING)) == {"the model": ["weight", "bias"]}
    assert members(Batch(groups="block").open(nn.Linear(3, 2), SETTING)) == {"the model": ["weight", "bias"]}


@pytest.mark.parametrize("name", ["per-example", "layerwise", "batch"])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip": 0}, "clip must be a positive number, and is 0"),
        ({"clip": -1.0}, "clip must be a positive number"),
        ({"clip": {"all": 0.0}}, "clip must be a positive number"),
        ({"clip_decay": 0}, "clip_decay must be above 0 and at most 1"),
        ({"clip_decay": 1.1}, "clip_decay must be above 0 and at most 1"),
        ({"thresholds": "median"}, "thresholds must be 'fixed', 'alc' or 'zhang', and is 'median'"),
        ({"groups": 0}, "groups must be at least 1, and is 0"),
        ({"groups": True}, "groups must be at least 1, and is True"),
        ({"groups": "layers"}, "groups must be 'layer', 'block', 'parameter' or a number, and is 'layers'"),
        ({"groups": 2.5}, "groups must be 'layer', 'block', 'parameter' or a number, and is 2.5"),
        ({"groups": None, "thresholds": "alc"}, "say which with groups, for example groups='layer'"),
        ({"groups": None, "factors": True}, "say which with groups, for example groups='layer'"),
        ({"groups": "layer", "factors": True, "thresholds": "alc"}, "leave thresholds at 'fixed'"),
        ({"groups": "layer", "thresholds": "zhang", "clip": {"0": 1.0}}, "give one clip for all of them"),
        ({"groups": 2, "clip": {"0": 1.0}}, "give one clip for all of them"),
    ],
)
def test_settings_without_a_meaning_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method(name, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": "layer", "thresholds": "alc"},
        {"groups": "layer", "factors": True},
        {"groups": 2},
        {"clip_decay": 0.9},
    ],
)
def test_adaptive_thresholds_are_not_set_otherwise_too(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="choose one of them"):
        PerExample(adaptive=True, **options)


@pytest.mark.parametrize("kind", [PerExample, Batch])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"groups": {"a": ["0.*"], "b": ["2.*"]}}, "No group has a pattern that matches parameter '3.weight'"),
        ({"groups": {"a": ["*"], "b": ["2.*"]}}, "No trainable parameter matches the patterns of group 'b'"),
        ({"groups": 4}, "groups is 4, and the model has 3 layers with parameters: choose fewer"),
        ({"clip": {"0": 1.0, "2": 1.0}, "groups": "layer"}, "clip names no threshold for group '3'"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(kind: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kind(**options).open(chain(), SETTING)


@pytest.mark.parametrize("options", [{"thresholds": "alc"}, {"factors": True}, {"groups": 2}])
@pytest.mark.parametrize("kind", [Layerwise, Batch])
def test_without_public_records_there_is_nothing_to_learn_from(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="there are none: give the run public="):
        kind(**{"groups": "layer"} | options).open(chain(), Setting(**{**vars(SETTING), "public": False}))


# Thresholds


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("groups", ["layer", "block", "parameter", {"ends": ["stem.*", "norm.*"], "rest": ["*"]}])
def test_thresholds_of_records_are_in_proportion_to_the_mean_norm(groups: Any, size: int) -> None:
    """C_h = C·e_h/M, C_h = C·e_h, and factors m_h = M/e_h, with e_h by a loop over records."""
    model, x = nested(), rows(7)
    chosen = Layerwise(clip=C, groups=groups, thresholds="alc")
    session: Any = chosen.open(model, SETTING)
    expected = mean_norms(model, x, members(session))
    largest = max(expected.values())
    learn(session, model, x, size)
    found = {q.name: q.sensitivity.add_remove for q in session.finish()}
    assert found == pytest.approx({g: C * e / largest for g, e in expected.items()}, rel=1e-5)
    assert max(found.values()) == pytest.approx(C) and min(found.values()) < 0.9 * C

    session = Layerwise(clip=C, groups=groups, thresholds="zhang").open(model, SETTING)
    learn(session, model, x, size)
    found = {q.name: q.sensitivity.add_remove for q in session.finish()}
    assert found == pytest.approx({g: C * e for g, e in expected.items()}, rel=1e-5)

    session = Layerwise(clip=C, groups=groups, factors=True).open(model, SETTING)
    learn(session, model, x, size)
    (query,) = session.finish()
    homes = {name: group for group, names in members(chosen.open(model, SETTING)).items() for name in names}
    assert query.sensitivity.add_remove == C
    assert query.scales == pytest.approx({n: largest / expected[g] for n, g in homes.items()}, rel=1e-5)


def test_thresholds_of_batches_are_in_proportion_to_the_norm_of_their_mean() -> None:
    model, x = chain(), rows(12)
    session: Any = Batch(clip=C, groups="layer", thresholds="alc").open(model, SETTING)
    learn(session, model, x, 4)
    expected = {}
    for group, names in CHAIN.items():
        means = [naive_gradients(model, bumpy_losses, (chunk,)) for chunk in x.split(4)]
        flat = [torch.cat([m[n].double().mean(0).flatten() for n in names]) for m in means]
        expected[group] = sum(float(v.norm()) for v in flat) / 3
    found = session.thresholds.clips
    assert found == pytest.approx({g: C * e / max(expected.values()) for g, e in expected.items()}, rel=1e-5)
    (one, *_) = session.finish()
    assert one.sensitivity.add_remove == 2 * found[one.name] * 10


def test_public_records_that_are_not_finite_tell_nothing() -> None:
    model, x = chain(), rows(6)
    expected = mean_norms(model, x[1:], CHAIN)
    x[0] = math.nan
    session: Any = Layerwise(clip=C, thresholds="alc").open(model, SETTING)
    learn(session, model, x, 6)
    assert session.thresholds.clips == pytest.approx(
        {g: C * e / max(expected.values()) for g, e in expected.items()}, rel=1e-5
    )
    for bad in (x * math.nan, torch.full_like(x, math.inf)):
        session = Layerwise(clip=C, thresholds="alc").open(model, SETTING)
        with pytest.raises(Refused, match="no gradient, or none that is finite"):
            learn(session, model, bad, 3)


def test_a_layer_that_public_records_do_not_reach_gets_a_small_threshold_and_not_zero() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    for options in ({"thresholds": "alc"}, {"thresholds": "alc", "groups": 2}):
        session: Any = Layerwise(clip=C, **options).open(model, SETTING)
        with session.learning():
            session.learn(model[0](rows(4)).square().sum(1))
        session.learned()
        assert sorted(session.thresholds.clips.values()) == pytest.approx([1e-6 * C, C])


class Watched:
    """Trains, and writes down the weights and the thresholds of each step."""

    def __init__(self, chosen: Any, steps: int, public: Tensor) -> None:
        model = chain()
        self.clips: list[dict[str, float]] = []
        self.models: list[nn.Module] = []
        with Run(
            model, TensorDataset(rows(24, seed=1)), method=chosen, sampling=Poisson(batch=8), noise_level="seeded",
            seed=0, budget=Budget(noise=0.5, steps=steps, delta=1e-5), public=TensorDataset(public),
        ) as run:  # fmt: skip
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            while not run.finished:
                for step in run.loader:
                    self.models.append(copy.deepcopy(model))
                    for (x,) in step:
                        step.backward(bumpy_losses(model, x))
                    self.clips.append(dict(run.session.thresholds.clips))  # type: ignore[attr-defined]
                    optimizer.step()


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_thresholds_are_learned_anew_at_the_start_of_each_epoch_and_only_there(decay: float) -> None:
    public = rows(16, seed=2)
    seen = Watched(Layerwise(clip=C, thresholds="alc", clip_decay=decay), 7, public)
    assert len(seen.clips) == 7
    for step, clips in enumerate(seen.clips):
        epoch = step // 3
        norms = mean_norms(seen.models[3 * epoch], public, CHAIN)
        expected = {g: C * decay**epoch * e / max(norms.values()) for g, e in norms.items()}
        assert clips == pytest.approx(expected, rel=1e-5)
    assert seen.clips[0] == seen.clips[2] and seen.clips[0]["0"] != pytest.approx(seen.clips[3]["0"] / decay, rel=0.01)


def test_a_fixed_clip_decays_too() -> None:
    seen = Watched(PerExample(clip=C, clip_decay=0.5), 7, rows(8))
    assert [clips["all"] for clips in seen.clips] == pytest.approx([C * 0.5**e for e in (0, 0, 0, 1, 1, 1, 2)])


# Groups of similar norm


NORMS = {"0": [1.0, 1.4], "2": [30.0], "3": [0.001], "4": [1.3], "5": [0.004]}


def five() -> nn.Sequential:
    return chain(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("count", "layers"),
    [
        (1, [["0", "2", "3", "4", "5"]]),
        (2, [["3", "5"], ["0", "2", "4"]]),
        (3, [["3", "5"], ["0", "4"], ["2"]]),
        (4, [["3"], ["5"], ["0", "4"], ["2"]]),
        (5, [["3"], ["5"], ["0"], ["4"], ["2"]]),
    ],
)
def test_layers_of_similar_norm_are_cut_apart_at_the_largest_steps(count: int, layers: list[list[str]]) -> None:
    session: Any = Layerwise(clip=C, groups=count, thresholds="alc").open(five(), SETTING)
    session.thresholds.learn(NORMS)
    session.learned()
    found = members(session)
    expected = {f"group {i + 1} of {count}": names for i, names in enumerate(layers)}
    assert {g: sorted({n.split(".")[0] for n in names}) for g, names in found.items()} == expected
    means = {layer: sum(values) / len(values) for layer, values in NORMS.items()}
    sizes = {group: math.hypot(*(means[layer] for layer in names)) for group, names in expected.items()}
    assert session.thresholds.clips == pytest.approx({g: C * s / max(sizes.values()) for g, s in sizes.items()})


def test_groups_of_similar_norm_stay_in_later_epochs_and_in_a_checkpoint() -> None:
    session: Any = Layerwise(clip=C, groups=3, thresholds="alc").open(five(), SETTING)
    session.thresholds.learn(NORMS)
    session.learned()
    first = members(session)
    session.begin_epoch(1)
    session.thresholds.learn({layer: [1 / norm for norm in norms] for layer, norms in NORMS.items()})
    session.learned()
    assert members(session) == first
    fresh: Any = Layerwise(clip=C, groups=3, thresholds="alc").open(five(), SETTING)
    fresh.load_state(session.state())
    assert members(fresh) == first and fresh.thresholds.clips == session.thresholds.clips
    fresh.begin_epoch(2)
    session.begin_epoch(2)
    assert fresh.thresholds.clips == session.thresholds.clips


# Layers that the user freezes


def test_freezing_layers_keeps_adapted_thresholds_and_drops_empty_groups() -> None:
    model = chain()
    groups = {"first": ["0.*"], "rest": ["*"]}
    session: Any = PerExample(clip=C, groups=groups, adaptive=True).open(model, SETTING)
    session.observe({"below C of first": torch.tensor([5.0]), "below C of rest": torch.tensor([-5.0])})
    before = dict(session.thresholds.clips)
    assert before["first"] < C < before["rest"]
    model[0].requires_grad_(False)
    session.begin()
    assert session.thresholds.clips == {"rest": before["rest"]} and list(members(session)) == ["rest"]
    model[0].requires_grad_(True)
    session.begin()
    assert session.thresholds.clips == {"first": C, "rest": before["rest"]}


def test_freezing_layers_leaves_numbered_groups_and_factors_at_work() -> None:
    for options in ({"groups": 3, "thresholds": "alc"}, {"factors": True}):
        model, x = chain(), rows(6)
        session: Any = Layerwise(clip=C, **options).open(model, SETTING)
        model[3].requires_grad_(False)
        session.begin()
        learn(session, model, x, 3)
        for frozen in (True, False):
            model[3].requires_grad_(not frozen)
            session.begin()
            with session.listening():
                session.add(bumpy_losses(model, x))
            grouped = [n for names in members(session).values() for n in names]
            assert sorted(grouped) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
            assert all(q.total.any() for q in session.finish())
