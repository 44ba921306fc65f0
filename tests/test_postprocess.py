"""Denoising: the rules are Bayes' under the stated prior, and they read what was released and nothing else."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Budget, CheckpointError, ConfigError, Denoise, PerExample, Poisson, Release, Run, Ternary
from privet.postprocess import EQUAL, Priors, public_priors
from privet.training import TrainConfig, train

Floats = npt.NDArray[np.float64]
BATCH = 50


def release(y: Any, std: float, batch: int = BATCH) -> Release:
    """Of values as they stand in p.grad, with noise of this deviation there."""
    return Release({"w": torch.as_tensor(y, dtype=torch.float64) * batch}, {"w": std * batch}, batch)


def denoised(rule: Denoise, y: Any, std: float, batch: int = BATCH) -> Floats:
    given = release(y, std, batch)
    rule(given)
    return (given.gradients["w"] / batch).numpy()


def density(x: Floats, nu: float, b: float, priors: Priors) -> Floats:
    """Of x beforehand: each hypothesis at its probability, evenly within its range."""
    outer, inner = b - nu, 2 * nu
    return np.where(x < -nu, priors[0] / outer, np.where(x <= nu, priors[1] / inner, priors[2] / outer))


def brute_force(y: Floats, std: float, nu: float, b: float, priors: Priors) -> tuple[Floats, Floats]:
    """p(h | y) for D, S and U, and E[x | y], by adding up over a fine grid of x."""
    ends = np.linspace(-b, b, 40001)
    x = (ends[1:] + ends[:-1]) / 2
    exponents = -0.5 * ((y[:, None] - x) / std) ** 2
    weights = np.exp(exponents - exponents.max(1, keepdims=True)) * density(x, nu, b, priors)
    weights /= weights.sum(1, keepdims=True)
    ranges = (x < -nu, np.abs(x) <= nu, x > nu)
    return np.stack([weights[:, where].sum(1) for where in ranges]), weights @ x


CASES = [
    (0.1, 0.2, 1.0, EQUAL),
    (0.02, 0.3, 1.0, (0.1, 0.7, 0.2)),
    (0.5, 0.05, 1.0, (0.3, 0.1, 0.6)),
    (2.0, 0.25, 0.5, EQUAL),
    (0.3, 0.2, 4.0, (0.001, 0.599, 0.4)),
]  # fmt: skip


@pytest.mark.parametrize(("std", "nu", "b", "priors"), CASES)
def test_the_rules_are_those_of_bayes(std: float, nu: float, b: float, priors: Priors) -> None:
    y = np.linspace(-b - 4 * std, b + 4 * std, 83)
    posterior, mean = brute_force(y, std, nu, b, priors)
    hard = denoised(Denoise("hard", threshold=nu, bound=b, priors=priors), y, std)
    down, stay, up = posterior
    expected = np.where((up > down) & (up > stay), nu, np.where((down > up) & (down > stay), -nu, 0.0))
    clear = np.sort(posterior, 0)
    clear = clear[2] - clear[1] > 1e-3  # where the grid decides too
    assert clear.sum() > 60 and len(set(expected)) > 1
    np.testing.assert_allclose(hard[clear], expected[clear], rtol=1e-12)
    soft = denoised(Denoise("posterior", threshold=nu, bound=b, priors=priors), y, std)
    np.testing.assert_allclose(soft, mean, atol=1e-4 * b)
    assert np.abs(soft).max() <= b


@pytest.mark.parametrize(("std", "nu", "b"), [(0.1, 0.2, 1.0), (0.5, 0.001, 1.0)])
def test_flat_priors_make_the_value_uniform_within_its_bound(std: float, nu: float, b: float) -> None:
    y, shares = np.linspace(-b - std, b + std, 41), ((b - nu) / (2 * b), nu / b, (b - nu) / (2 * b))
    for rule in ("hard", "posterior"):
        flat = denoised(Denoise(rule, threshold=nu, bound=b, priors="flat"), y, std)  # type: ignore[arg-type]
        given = denoised(Denoise(rule, threshold=nu, bound=b, priors=shares), y, std)  # type: ignore[arg-type]
        np.testing.assert_allclose(flat, given, rtol=1e-9)
    _, mean = brute_force(y, std, nu, b, shares)
    np.testing.assert_allclose(flat, mean, atol=1e-4 * b)


def test_without_a_word_on_priors_a_rule_learns() -> None:
    """A gradient of the size of its noise must not become 0 everywhere."""
    for rule, flat in (("hard", True), ("posterior", False)):
        y = [0.002, -0.002]
        found = denoised(Denoise(rule), y, 0.001)  # type: ignore[arg-type]
        assert found[0] > 0 > found[1]
        given = Denoise(rule, priors="flat" if flat else "equal")  # type: ignore[arg-type]
        assert found.tolist() == denoised(given, y, 0.001).tolist()
    assert not denoised(Denoise("hard", priors="equal"), y, 0.001).any()


def test_far_below_the_noise_equal_priors_keep_little_and_flat_ones_the_sign() -> None:
    """The paper's ν = 0.01 of a sum of 256 records with noise of deviation 1 is ν/256 of the mean."""
    y, batch = np.array([-6.0, -1.0, -0.1, 0.1, 1.0, 6.0]) / 256, 256
    equal, flat = (
        denoised(Denoise("hard", threshold=0.01 / 256, priors=priors), y, 1 / 256, batch)  # type: ignore[arg-type]
        for priors in ("equal", "flat")
    )
    assert np.sign(equal).tolist() == [-1, 0, 0, 0, 0, 1]
    np.testing.assert_allclose(flat, np.sign(y) * 0.01 / 256)


def test_a_tie_is_no_decision() -> None:
    """With p(S) tiny and D and U alike, y = 0 is as likely to come from one as from the other."""
    rule = Denoise("hard", threshold=0.01, priors=(0.5, 0.0, 0.5))
    assert denoised(rule, [0.0], 1.0).tolist() == [0.0]
    assert denoised(rule, [0.5, -0.5], 1.0).tolist() == pytest.approx([0.01, -0.01])


@pytest.mark.parametrize("rule", ["hard", "posterior"])
@pytest.mark.parametrize("priors", [EQUAL, (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.5, 0.0, 0.5)])
@pytest.mark.parametrize("std", [1e-6, 0.1, 1e6])
def test_values_far_out_stay_finite_and_bounded(rule: Any, priors: Priors, std: float) -> None:
    y = [0.0, 0.5, 1.0, -1.0, 1 + 8 * std, 1e30, -1e30]
    found = denoised(Denoise(rule, threshold=0.4, priors=priors), y, std)
    assert np.isfinite(found).all() and np.abs(found).max() <= 1
    if priors == EQUAL and std < 1:
        assert found[5] > 0 > found[6] and found[5] == -found[6]


def simulated(std: float, nu: float, b: float, priors: Priors, count: int, seed: int) -> tuple[Floats, Floats]:
    """Clean and noisy values under the prior."""
    random = np.random.default_rng(seed)
    which = random.choice(3, size=count, p=priors)
    low, high = np.array([-b, -nu, nu])[which], np.array([-nu, nu, b])[which]
    x = random.uniform(low, high)
    return x, x + std * random.standard_normal(count)


@pytest.mark.parametrize(("std", "nu", "b", "priors"), [(0.1, 0.1, 1.0, (0.1, 0.8, 0.1)), (0.4, 0.2, 1.0, EQUAL)])
def test_the_posterior_mean_has_the_least_squared_error(std: float, nu: float, b: float, priors: Priors) -> None:
    x, y = simulated(std, nu, b, priors, 200_000, seed=0)

    def error(guess: Floats) -> float:
        return float(np.mean((guess - x) ** 2))

    options: dict[str, Any] = {"threshold": nu, "bound": b}
    best = denoised(Denoise("posterior", priors=priors, **options), y, std)
    others = {
        "the noisy value": y,
        "clamped": y.clip(-b, b),
        "hard": denoised(Denoise("hard", priors=priors, **options), y, std),
        "another prior": denoised(Denoise("posterior", priors=(0.6, 0.2, 0.2), **options), y, std),
        "another threshold": denoised(Denoise("posterior", priors=priors, threshold=2 * nu, bound=b), y, std),
        **{f"times {f}": f * best for f in (0.95, 1.05)},
        **{f"linear {f}": f * y for f in np.linspace(0.1, 0.9, 9)},
        "moved": best + 0.02,
    }
    for name, guess in others.items():
        assert error(best) < error(guess), name
    assert abs(float(np.mean((x - best) * best))) < 0.002  # what is left is orthogonal to the guess


# Priors


def test_priors_by_maximum_likelihood_from_public_gradients() -> None:
    priors, nu, std = (0.15, 0.6, 0.25), 0.2, 0.1
    x, y = simulated(std, nu, 1.0, priors, 40_000, seed=1)
    clean = public_priors({"w": torch.tensor(x).view(200, -1)}, threshold=nu)["w"]
    counts = [(x < -nu).mean(), (np.abs(x) <= nu).mean(), (x > nu).mean()]
    assert clean == pytest.approx(counts, abs=1e-12)
    noisy = public_priors({"w": torch.tensor(y)}, threshold=nu, std=std)["w"]
    assert noisy == pytest.approx(priors, abs=0.02)
    counted = public_priors({"w": torch.tensor(y)}, threshold=nu)["w"]
    assert abs(counted[1] - priors[1]) > 0.02  # noise moves values over the edges, and cannot be counted
    assert Denoise(priors={"w": noisy}).priors("w") == noisy
    assert Denoise(priors={"w": noisy}).priors("another") == EQUAL


def test_tracked_priors_find_the_true_ones_from_noisy_values() -> None:
    priors, nu, std = (0.05, 0.8, 0.15), 0.2, 0.2
    tracked = Denoise("posterior", threshold=nu, priors="tracked")
    fixed = Denoise("posterior", threshold=nu)
    for seed in range(60):
        _, y = simulated(std, nu, 1.0, priors, 4_000, seed)
        denoised(tracked, y, std)
        denoised(fixed, y, std)
    assert tracked.priors("w") == pytest.approx(priors, abs=0.03)
    assert sum(tracked.priors("w")) == pytest.approx(1)
    assert fixed.priors("w") == EQUAL and tracked.priors("unseen") == EQUAL
    again = Denoise("posterior", threshold=nu, priors="tracked")
    again.load_state_dict(copy.deepcopy(tracked.state_dict()))
    x, y = simulated(std, nu, 1.0, priors, 4_000, seed=99)
    np.testing.assert_array_equal(found := denoised(again, y, std), denoised(tracked, y, std))
    assert np.mean((found - x) ** 2) < np.mean((denoised(fixed, y, std) - x) ** 2)
    for state in ({}, {"priors": {"w": [0.5, 0.5]}}):
        with pytest.raises((CheckpointError, ConfigError)):
            again.load_state_dict(state)


# What it reads


@pytest.mark.parametrize("rule", ["hard", "posterior"])
def test_units_are_those_of_the_mean_gradient(rule: Any) -> None:
    y = np.linspace(-1.5, 1.5, 31)
    for options in ({"threshold": 0.3}, {}):
        first, second = (denoised(Denoise(rule, **options), y, 0.2, batch) for batch in (1, 1000))
        np.testing.assert_allclose(first, second, rtol=1e-9, atol=1e-12)
    by_noise = denoised(Denoise("hard"), [0.9, -0.9], 0.2)
    assert by_noise.tolist() == pytest.approx([0.2, -0.2])  # one deviation of the noise
    assert denoised(Denoise("hard", priors="equal"), [50.0], 10.0).tolist() == [0.5]  # and half of the bound at most


class Reads:
    """Says what was asked of a release."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._release, name)


@pytest.mark.parametrize("method", [PerExample(clip=1.0), Ternary(tau=0.01), Ternary(tau=0.01, record_groups=4)])
def test_what_is_handed_over_is_a_function_of_the_release_alone(method: Any) -> None:
    seen: list[tuple[dict[str, Tensor], Release]] = []
    asked: set[str] = set()
    tracked, twin = Denoise(priors="tracked"), Denoise(priors="tracked")

    def spying(release: Release) -> None:
        seen.append(({name: g.clone() for name, g in release.gradients.items()}, release))
        watched = Reads(release)
        tracked(watched)  # type: ignore[arg-type]
        asked.update(watched.asked)

    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    records = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
    budget = Budget(noise=1.0, steps=3, delta=1e-5)
    with Run(model, records, method=method, sampling=Poisson(batch=20), budget=budget, post=[spying]) as run:
        for step in run.loader:
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            noisy, handed = seen[-1]
            alone = Release({n: g.clone() for n, g in noisy.items()}, dict(handed.stds), handed.batch)
            twin(alone)
            for name, p in model.named_parameters():
                assert p.grad is not None
                torch.testing.assert_close(p.grad, alone.gradients[name] / handed.batch, rtol=0, atol=0)
                assert not torch.equal(alone.gradients[name], noisy[name])
                assert p.grad.abs().max() <= 1
    assert len(seen) == 3 and asked == {"gradients", "stds", "batch"}


def test_without_noise_nothing_is_changed() -> None:
    assert denoised(Denoise("hard"), [0.3, -7.0], 0.0).tolist() == [0.3, -7.0]


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "soft"}, {"bound": 0}, {"bound": math.inf}, {"threshold": 0}, {"threshold": 1.0}, {"threshold": -1},
        {"rate": 0}, {"rate": 1.5}, {"priors": "even"}, {"priors": (0.5, 0.5)}, {"priors": (0.5, 0.6, -0.1)},
        {"priors": (0.5, 0.5, 0.5)}, {"priors": {"w": (1.0, 1.0, 0.0)}}, {"priors": (math.nan, 0.5, 0.5)},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Denoise(**options)


@pytest.mark.parametrize(
    ("gradient", "options"),
    [([], {}), ([math.nan], {}), ([0.1], {"threshold": 2.0}), ([0.1], {"std": -1.0}), ([0.1], {"std": math.inf})],
)
def test_public_gradients_that_tell_nothing_are_refused(gradient: list[float], options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        public_priors({"w": torch.tensor(gradient)}, **{"threshold": 0.1, **options})


# In a training


def test_public_priors_are_learned_by_the_threshold_that_is_in_force() -> None:
    clean = torch.tensor([0.5, 0.05, -0.05, 0.0])
    for options, expected in (({"threshold": 0.1}, (0, 0.75, 0.25)), ({}, (0.25, 0.25, 0.5))):  # noise of 0.01
        rule = Denoise("hard", priors="public", **options)  # type: ignore[arg-type]
        assert rule.priors("w") == EQUAL
        rule.learn({"w": clean})
        denoised(rule, [0.0], 0.01)
        assert rule.priors("w") == pytest.approx(expected, abs=1e-9)
        assert rule.state_dict()["priors"] == {"w": list(rule.priors("w"))}


def test_a_training_learns_priors_from_public_records_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "model_options": {"hidden": [8]}, "batch": 128, "noise": 1.0, "epochs": 2, "denoise": "posterior",
        "denoise_priors": "public", "threads": 1, "report": False,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--public"):
        train(TrainConfig(**options, out=str(tmp_path / "none"), ledger=str(tmp_path / "none.ledger")))
    assert not (tmp_path / "none").exists()
    learned, learn = [], Denoise.learn

    def learning(self: Denoise, gradients: Any) -> None:
        learned.append((self, sorted(gradients)))
        learn(self, gradients)

    monkeypatch.setattr(Denoise, "learn", learning)
    config = TrainConfig(**options, public=0.2, out=str(tmp_path / "run"), ledger=str(tmp_path / "a.ledger"))
    result = train(config)
    (denoise, names), _ = learned
    assert result.ended == "finished" and len(names) == 4
    assert all(denoise.priors(name) != EQUAL for name in names)


def test_a_training_denoises_and_its_checkpoint_holds_the_priors(tmp_path: Path) -> None:
    config = TrainConfig(
        model_options={"hidden": [8]}, method="ternary", method_options={"tau": 0.01}, steps=4, batch=512, noise=1.0,
        denoise="posterior", denoise_priors="tracked", denoise_threshold=0.01, out=str(tmp_path / "run"),
        ledger=str(tmp_path / "a.ledger"), sampling="partition", threads=1,
    )  # fmt: skip
    seen: list[Any] = []
    assert train(config, on_progress=seen.append, stop=lambda: len(seen) >= 2).ended == "interrupted"
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["stateful"]["denoise"]["priors"]
    assert saved and all(tuple(held) != EQUAL for held in saved.values())
    result = train(config, resume=tmp_path / "run")
    assert result.ended == "finished" and 'denoise = "posterior"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_training_refuses_a_threshold_that_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        train(TrainConfig(denoise="hard", denoise_threshold=2.0, steps=1, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
