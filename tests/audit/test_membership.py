"""Membership inference: attacks find what is there to be found, bounds hold, and the right records are asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import train_without_luck
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from privet import ConfigError
from privet.accounting import Mechanism, epsilon
from privet.audit import finished as module
from privet.audit.membership import (
    MembershipReport,
    assess,
    confidences,
    epsilon_lower,
    infer_membership,
    lira_scores,
    loss_scores,
    plot_roc,
    shadow_confidences,
    stays_below,
)
from privet.training import TrainConfig, to_json


def report(scores: Any, member: Any, mu: float) -> MembershipReport:
    """As of a run whose trade-off curve is that of N(0, 1) against N(mu, 1)."""
    return MembershipReport(
        data="made up",
        attacks=(assess("loss", scores, member, delta=1e-5),),
        members=int(member.sum()),
        non_members=int((~member).sum()),
        shadows=0,
        epsilon=1.0,
        delta=1e-5,
        epsilon_is="claimed",
        mechanism=Mechanism(kind="gaussian", noise_multiplier=1 / mu),
        compositions=1,
        error=0.05,
    )


def halves(records: int) -> Any:
    return np.arange(2 * records) < records


# Scores


def test_the_loss_score_is_minus_the_loss_even_where_the_probability_rounds_to_one() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 4), torch.randn(3000, 6), torch.randint(4, (3000,))
    scores = loss_scores(confidences(model, x, y))
    with torch.no_grad():
        expected = -cross_entropy(model(x).double(), y, reduction="none").numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-9)
    assert len(set(loss_scores(np.array([50.0, 60.0, 70.0])))) == 3


def test_a_diverged_model_is_named() -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(ConfigError, match="diverged"):
        confidences(model, torch.ones(3, 2), torch.zeros(3, dtype=torch.long))


def made_up(shadows: int, scale: float, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Records of very different hardness; a model is surer by 2 of the records that it was trained on."""
    generator = np.random.default_rng(seed)
    member = halves(400)
    hardness = generator.normal(0, 5, member.size)
    trained_on = generator.random((shadows, member.size)).argsort(0).argsort(0) < shadows // 2
    noise = generator.normal(0, 1, (shadows + 1, member.size))
    shadow = hardness + 2 * trained_on + noise[1:]
    return (hardness + 2 * member + noise[0]) * scale + 3 * (scale != 1), shadow, trained_on, member


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_lira_sees_through_hardness_where_the_loss_does_not(scale: float) -> None:
    confidence, shadow, trained_on, member = made_up(16, scale)
    by_loss = assess("loss", loss_scores(confidence), member, delta=1e-5).auroc
    by_lira = assess("lira", lira_scores(confidence, shadow, trained_on), member, delta=1e-5).auroc
    assert 0.5 < by_loss.value < 0.65
    assert by_lira.low > 0.85  # 0.92 if the mean of each record were known


def test_shadow_models_that_saw_a_record_say_nothing_about_it() -> None:
    confidence, shadow, trained_on, _ = made_up(8, 1.0)
    scores = lira_scores(confidence, shadow, trained_on)
    assert np.array_equal(scores, lira_scores(confidence, np.where(trained_on, 1e6, shadow), trained_on))
    assert not np.allclose(scores, lira_scores(confidence, np.where(trained_on, shadow, 0), trained_on))


def test_many_shadow_models_give_each_record_a_deviation_of_its_own() -> None:
    generator = np.random.default_rng(1)
    deviation = np.where(halves(500), 0.1, 10.0)
    draws = generator.normal(0, deviation, (65, 1000))
    trained_on = np.arange(64)[:, None] % 2 == np.zeros(1000)
    many, few = (lira_scores(draws[0], draws[1 : k + 1], trained_on[:k]) for k in (64, 16))
    assert many[:500].std() == pytest.approx(many[500:].std(), rel=0.2)
    assert few[:500].std() < 0.05 * few[500:].std()


def test_lira_without_two_models_that_did_not_see_a_record_is_refused() -> None:
    with pytest.raises(ConfigError, match="two shadow models"):
        lira_scores(np.zeros(2), np.zeros((2, 2)), np.array([[True, False], [False, False]]))


def test_shadow_models_memorise_their_own_half_and_no_other() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(120, 10), torch.randint(2, (120,))

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 2))

    found, trained_on = shadow_confidences(make, x, y, shadows=4, epochs=120)
    assert found.shape == trained_on.shape == (4, 120)
    assert (trained_on.sum(0) == 2).all() and len({row.tobytes() for row in trained_on}) == 4
    assert (found[trained_on] > 0).mean() > 0.99
    assert 0.35 < (found[~trained_on] > 0).mean() < 0.65  # labels are random
    again, _ = shadow_confidences(make, x, y, shadows=4, epochs=120)
    assert np.array_equal(found, again)


# Bounds


def test_the_lower_bound_on_epsilon_finds_nothing_in_scores_that_say_nothing() -> None:
    generator = np.random.default_rng(2)
    wrong = 0
    for seed in range(150):
        scores = generator.normal(size=(2, 200))
        wrong += epsilon_lower(scores[0], scores[1], delta=0.0, error=0.3, seed=seed) > 0
    assert wrong <= 45  # 0.3 of 150; a threshold measured where it was chosen is wrong in 60


def test_the_lower_bound_on_epsilon_comes_close_to_randomised_response() -> None:
    truth, records, generator = 2.0, 4000, np.random.default_rng(3)
    right = 1 / (1 + np.exp(-truth))
    bounds = []
    for seed in range(200):
        told = generator.random((2, records)) < np.array([[right], [1 - right]])
        bounds.append(epsilon_lower(told[0].astype(float), told[1].astype(float), delta=0.0, seed=seed))
    assert sum(bound > truth for bound in bounds) <= 10  # the error is 0.05
    assert np.median(bounds) > truth - 0.2
    assert epsilon_lower(np.zeros(1), np.ones(1), delta=0.0) == 0


def test_an_attack_on_the_line_stays_below_it_and_one_above_does_not() -> None:
    generator, member = np.random.default_rng(4), halves(2000)
    for _ in range(10):
        scores = generator.normal(member.astype(float), 1)
        assert stays_below(report(scores, member, mu=1.0))
        crossed = stays_below(report(scores, member, mu=0.5))
        assert not crossed
        assert all(point.tpr_low > point.promised for point in crossed.crossings)
    assert stays_below(report(-scores, member, mu=0.5))
    few = np.random.default_rng(5).permutation(member.size)[:40]
    assert stays_below(report(scores[few], member[few], mu=0.5))  # too few to tell


def test_the_check_uses_both_ends_of_the_curve() -> None:
    """A twentieth of the non-members surely are none, and no member is sure: it shows at large FPR only."""
    generator, member = np.random.default_rng(6), halves(4000)
    scores = generator.random(member.size)
    scores[~member & (generator.random(member.size) < 0.05)] -= 1
    crossings = stays_below(report(scores, member, mu=0.1)).crossings
    assert crossings and min(point.fpr for point in crossings) > 0.8


# Runs


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unsampled steps are accounted by a closed form, which is fast."""
    folder = tmp_path_factory.mktemp("digits")
    options: dict[str, Any] = {"sampling": "partition", "batch": 512, "epochs": 8, "lr": 2.0, "noise": 3.0}
    options |= {"model_options": {"hidden": [16]}, "method_options": {"clip": 0.1}, "threads": 1, "delta": 1e-5}
    return train_without_luck(TrainConfig(**options, out=str(folder / "run"), ledger=str(folder / "a.ledger")))


@pytest.fixture(scope="module")
def memorised_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random labels learnt by heart, with hardly any noise."""
    folder = tmp_path_factory.mktemp("table")
    generator = np.random.default_rng(0)
    rows = [",".join(f"{v:.3f}" for v in generator.normal(size=8)) + f",{generator.integers(2)}" for _ in range(240)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,d,e,f,g,h,y", *rows]) + "\n")
    options: dict[str, Any] = {"data": str(folder / "table.csv"), "target": "y", "test_fraction": 0.4, "seed": 3}
    options |= {"sampling": "partition", "batch": 100, "epochs": 150, "noise": 1e-3, "delta": 1e-5, "threads": 1}
    options |= {"optimizer": "adam", "lr": 0.02, "model_options": {"hidden": [64]}, "method_options": {"clip": 1.0}}
    return train_without_luck(TrainConfig(**options, out=str(folder / "run"), ledger=str(folder / "a.ledger")))


@pytest.fixture
def memorised(memorised_run: Path) -> Iterator[Path]:
    table = memorised_run.parent / "table.csv"
    text = table.read_text()
    yield memorised_run
    table.write_text(text)


def test_a_private_run_gives_nobody_away(digits: Path) -> None:
    found = infer_membership(digits, shadows=4)
    told = json.loads((digits / "privacy.json").read_text())
    assert (found.members, found.non_members, found.shadows) == (1437, 360, 4)
    assert (found.epsilon, found.delta) == (told["epsilon"], told["delta"])
    assert epsilon([(found.mechanism, found.compositions)], found.delta).epsilon == pytest.approx(found.epsilon)
    assert [attack.name for attack in found.attacks] == ["loss", "lira"]
    for attack in found.attacks:
        assert attack.auroc.low < 0.55 and abs(attack.auroc.value - 0.5) < 0.06
        assert attack.epsilon_lower < found.epsilon
    assert stays_below(found)
    written = json.loads(to_json(found.to_json()))
    assert written["stays_below"] is True and written["crossings"] == []
    assert set(written["attacks"][0]["tpr_at"]) == {"0.001", "0.01"}
    assert written["attacks"][0]["tpr_at"]["0.001"]["only_a_bound"]  # 360 non-members resolve no 0.1%


def test_a_model_that_knows_its_records_by_heart_gives_them_away(memorised: Path, tmp_path: Path) -> None:
    found = infer_membership(memorised, shadows=8)
    assert found.members > found.non_members
    for attack in found.attacks:
        assert attack.auroc.low > 0.65
    assert found.attacks[0].epsilon_lower > 0.2
    assert stays_below(found)  # as it claims next to nothing
    bold = replace(found, mechanism=Mechanism(kind="gaussian", noise_multiplier=20.0), compositions=1, epsilon=0.2)
    assert not stays_below(bold) and bold.to_json()["stays_below"] is False
    for name, text in (("kept.svg", "No attack surely crosses"), ("broken.svg", "AN ATTACK CROSSES")):
        plot_roc(bold if name == "broken.svg" else found, tmp_path / name)
        assert text.replace(" ", "") in (tmp_path / name).read_text().replace(" ", "")
    plot_roc(found, tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_records_that_are_gone_or_others_are_refused(memorised: Path) -> None:
    table = memorised.parent / "table.csv"
    lines = table.read_text().splitlines()
    table.unlink()
    with pytest.raises(ConfigError, match="cannot be had again"):
        infer_membership(memorised)
    table.write_text("\n".join([lines[0], *reversed(lines[1:])]))  # the order decides nothing
    assert infer_membership(memorised).attacks[0].auroc.low > 0.65
    table.write_text("\n".join(lines[:-1]))
    with pytest.raises(ConfigError, match="not what the run"):
        infer_membership(memorised)
    flipped = [line[:-1] + str(1 - int(line[-1])) for line in lines[1:]]
    table.write_text("\n".join([lines[0], *flipped]))
    with pytest.raises(ConfigError, match="not what the run"):
        infer_membership(memorised)


def test_what_cannot_be_attacked_is_named(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        infer_membership(tmp_path)
    with pytest.raises(ConfigError, match="shadows=2"):
        infer_membership(digits, shadows=2)
    with pytest.raises(ConfigError, match="error"):
        infer_membership(digits, error=0.0)
    for name in ("config.toml", "privacy.json", "model.safetensors"):
        (tmp_path / name).write_bytes((digits / name).read_bytes())
    (tmp_path / "privacy.json").write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        infer_membership(tmp_path)
    real = module.load_data

    def numbers(*args: Any, **options: Any) -> Any:
        data = real(*args, **options)
        return replace(data, train=TensorDataset(data.train.tensors[0], data.train.tensors[1].float()))

    monkeypatch.setattr(module, "load_data", numbers)
    with pytest.raises(ConfigError, match="classes only"):
        infer_membership(digits)
