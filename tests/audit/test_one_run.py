"""Canaries in one training: they show no more than a sound one claims, and that an unsound one claims too little."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from subjects import failed, keys_from_a_seed, network, records
from torch import Tensor, nn

from privet import Partition, PerExample
from privet.accounting import Mechanism, trade_off
from privet.audit import MethodSubject, audit_in_one_run
from privet.audit.one_run import _best_number_of_guesses, _from_below, _right_guesses, _strange
from privet.audit.statistics import gdp_epsilon, one_run_f_dp_rejects
from privet.audit.subject import cross_entropy
from privet.audit.zoo import examples
from privet.noise import Source

same_luck = pytest.fixture(autouse=True)(keys_from_a_seed)


def test_a_curve_in_steps_lies_below_and_refutes_as_much() -> None:
    """What must be read off it to refute anything lies within 1e-4 of its end."""
    for mu in (0.3, 0.6):
        spent = [(Mechanism(kind="gaussian", noise_multiplier=1 / mu), 1)]

        def curve(alphas: Any, spent: Any = spent) -> Any:
            return np.asarray(trade_off(spent, alphas))

        steps, alphas = _from_below(curve), np.linspace(0, 1, 10_001)
        assert bool((steps(alphas) <= curve(alphas)).all())
        least = [
            next(right for right in range(101) if one_run_f_dp_rejects(400, 100, right, f, 1e-4))
            for f in (curve, steps)
        ]
        assert least[0] <= least[1] <= least[0] + 1


def subject_of_a_training(noise_multiplier: float = 4.0, **options: Any) -> MethodSubject:
    """Unsampled steps are accounted by a closed form, which is fast."""
    given: dict[str, Any] = {"sampling": Partition(batch=6), "noise_multiplier": noise_multiplier} | options
    return MethodSubject(PerExample(clip=1.0), network(width=20), records(8), **given)


def add_no_noise(self: Source, total: Tensor, std: float, *, out: Tensor | None = None) -> Tensor:
    return total.double() if out is None else out.copy_(total)


def test_a_sound_training_shows_less_than_it_claims() -> None:
    for seed in range(5):
        found = audit_in_one_run(subject_of_a_training(), "gradient", canaries=200, seed=seed)
        assert not failed(found.checks)
        assert found.lower_bound <= found.claimed < found.ceiling  # so that more could have been shown
        assert found.claimed == pytest.approx(gdp_epsilon(math.sqrt(6) / 4, 1e-5))
        assert f"{found.correct} of {found.guesses} guesses right" in found.checks[0].detail
        assert f"the most that so many can show is epsilon {found.ceiling:.3g}" in found.checks[0].detail


def test_a_training_without_the_noise_that_it_claims_is_found_by_its_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "add_noise", add_no_noise)
    found = audit_in_one_run(subject_of_a_training(8.0), "gradient", canaries=200)
    assert found.correct == found.guesses and found.lower_bound > found.claimed
    assert failed(found.checks) == [check.name for check in found.checks[:2]]


def test_canaries_that_are_records_go_through_the_model() -> None:
    found = audit_in_one_run(subject_of_a_training(), "input", canaries=40)
    assert found.kind == "input" and len(found.checks) == 2 and not failed(found.checks)


def test_a_training_that_learns_by_heart_gives_its_canaries_away() -> None:
    data = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    torch.manual_seed(0)
    subject = MethodSubject(
        PerExample(clip=100.0),
        nn.Linear(40, 3),
        data,
        loss=lambda model, x, y: 20 * cross_entropy(model, x, y),
        sampling=Partition(batch=6),
        noise_multiplier=1e-6,
    )
    found = [audit_in_one_run(subject, "input", canaries=40, seed=seed) for seed in range(4)]
    assert [one.guesses for one in found] == [40] * 4
    assert sum(one.correct for one in found) >= 80 + 4 * math.sqrt(40)  # four deviations above chance


def test_where_no_number_of_guesses_would_show_anything_all_are_made() -> None:
    assert _best_number_of_guesses(50, 0.5, 1e-5) == 50
    assert _best_number_of_guesses(1000, 3.0, 1e-5) < 500


def test_canaries_of_tokens_are_tokens() -> None:
    model, (x, y) = examples()["Embedding"]
    subject = MethodSubject(PerExample(clip=1.0), model, (x, y), sampling=Partition(batch=4), noise_multiplier=4.0)
    assert not failed(audit_in_one_run(subject, "input", canaries=20).checks)
    made = _strange(subject, 20, np.random.default_rng(0))
    assert all(one.x.dtype == x.dtype and bool(torch.isin(one.x, x).all()) for one in made)
    known = {tuple(row.tolist()) for row in x}
    assert sum(tuple(one.x.tolist()) not in known for one in made) == 10  # every second one is new


def test_scores_that_say_nothing_are_right_half_of_the_time() -> None:
    generator = np.random.default_rng(0)
    right = [_right_guesses(np.zeros(200), generator.random(200) < 0.5, 100) for _ in range(200)]
    assert abs(np.mean(right) - 50) < 4 * 5 / math.sqrt(200)
    present = generator.random(200) < 0.5
    assert _right_guesses(present + 0.0, present, 100) == 100
    assert _right_guesses(-1.0 * present, present, 100) == 0
