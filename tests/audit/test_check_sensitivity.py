"""The check of sensitivities passes bounds that hold and fails those with a hole, of methods whose truth is known."""

from __future__ import annotations

import pytest
import torch
from subjects import Bound, Mine, failed, keys_from_a_seed, mine, network, records, to_length_one
from torch import Tensor, nn

from privet import FixedSize, PerExample, Poisson
from privet.audit import MethodSubject, sensitivity
from privet.audit.sensitivity import check_sensitivity
from privet.audit.zoo import examples

same_luck = pytest.fixture(autouse=True)(keys_from_a_seed)


def by_its_largest_entry(gradient: Tensor) -> Tensor:
    return torch.nan_to_num(gradient / gradient.abs().max().clamp(min=1), 0, 0, 0)


def only_if_some_entry_is_large(gradient: Tensor) -> Tensor:
    return gradient if float(gradient.abs().max()) < 0.7 else to_length_one(gradient)


def complains_of_large_ones(gradient: Tensor) -> Tensor:
    if not float(gradient.abs().max()) < 1e6:
        raise ValueError("this record is too large")
    return to_length_one(gradient)


def divides_by_the_length(gradient: Tensor) -> Tensor:
    """The squares of tiny numbers are zero in float32."""
    return torch.nan_to_num(gradient / gradient.square().sum().sqrt(), nan=0.0)


def not_a_number_passes(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm().clamp(min=1)


def test_a_sound_method_of_a_users_own_passes_under_both_relations() -> None:
    checks, worst = check_sensitivity(mine())
    assert not failed(checks)
    added, replaced, multiplier = (check.measured for check in checks)
    assert (
        added == pytest.approx(1, abs=1e-3) and replaced > 0.8 and multiplier == pytest.approx(1)
    )  # bounds are reached
    assert worst is not None


@pytest.mark.parametrize(
    ("bound", "bias", "how"),
    [
        (by_its_largest_entry, True, "in the sum 'all'"),
        (only_if_some_entry_is_large, True, "in the sum 'all'"),
        (complains_of_large_ones, True, "it stops the step (ValueError: this record is too large)"),
        (divides_by_the_length, False, "size 1e-30, target 0: it stops the step"),
        (not_a_number_passes, True, "not a number"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bound_with_a_hole_fails_and_says_where(bound: Bound, bias: bool, how: str) -> None:
    checks, _ = check_sensitivity(mine(network(bias=bias), bound=bound))
    added = checks[0]
    assert "sensitivity, a record added or removed" in failed(checks)
    assert added.measured > 1.05 and added.bound == 1 and how in added.detail, added.detail


def test_only_the_replaced_record_breaks_a_bound_that_forgets_to_count_it_twice() -> None:
    checks, _ = check_sensitivity(mine(replaced=1.0))
    assert failed(checks) == ["sensitivity, a record replaced"]
    assert 1.6 < checks[1].measured < 2


def test_the_multiplier_is_that_of_the_relation_in_the_accountants_basis() -> None:
    for rule, relation, factor in ((Poisson(batch=6), "replace_one", 1), (FixedSize(batch=6), "replace_one", 2)):
        subject = MethodSubject(Mine(), network(), records(), sampling=rule, relation=relation)  # type: ignore[arg-type]
        assert subject.step(subject.base, noise=False).stds == {"all": pytest.approx(factor)}
        assert sensitivity.check_multiplier(subject).holds
        subject.noise_multiplier = 1.01
        assert not sensitivity.check_multiplier(subject).holds


def test_records_of_tokens_are_tried_too() -> None:
    model, (x, y) = examples()["Embedding"]
    assert not failed(check_sensitivity(MethodSubject(PerExample(clip=0.1), model, (x, y)))[0])
    broken = check_sensitivity(mine(model, (x, y), bound=lambda gradient: gradient))[0]
    assert "sensitivity, a record added or removed" in failed(broken)


def test_a_method_that_cannot_do_without_records_fails() -> None:
    """An empty sample is a sample, and every rule that tosses coins draws one now and then."""
    checks, _ = check_sensitivity(mine(said=lambda count: [1] * 12 if count else {}[count]))
    assert failed(checks) == ["sensitivity, a record added or removed"]
    assert "a sample of nobody stops the step (KeyError: 0)" in checks[0].detail


def test_a_factor_that_depends_on_the_others_norms_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = PerExample.weights

    def by_second_largest(self: PerExample, squares: Tensor, clip: float) -> Tensor:
        top = squares.sort().values[-2:].min().clamp(min=clip**2).sqrt()
        return torch.full_like(squares, float(clip / top))

    monkeypatch.setattr(PerExample, "weights", by_second_largest)
    checks, _ = check_sensitivity(MethodSubject(PerExample(clip=1.0), network(), records()))
    assert failed(checks)
    monkeypatch.setattr(PerExample, "weights", weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_and_other_precisions_are_no_fault(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)).to(dtype)
    x, y = records()
    checks, _ = check_sensitivity(MethodSubject(PerExample(clip=1.0), model, (x.to(dtype), y)))
    assert not failed(checks), [check.detail for check in checks]
