"""What is audited: the zoo of models, and a method's steps that can be taken again, without noise or from a tape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import naive_clipped_sum, naive_gradients
from subjects import keys_from_a_seed, mine, network, records
from torch import nn

from privet import Batch, PerExample
from privet.audit import Desk, MethodSubject, Tape
from privet.audit.subject import _OutOfTape, cross_entropy
from privet.audit.zoo import examples
from privet.gradients.per_record import RULES
from privet.noise import Source

same_luck = pytest.fixture(autouse=True)(keys_from_a_seed)


# The zoo


def without_example() -> set[type]:
    return set(RULES) - {type(module) for model, _ in examples().values() for module in model.modules()}


def test_every_layer_with_a_rule_of_its_own_is_in_the_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_example() == set()
    monkeypatch.setitem(RULES, nn.Bilinear, lambda layer, x, g: {})
    assert without_example() == {nn.Bilinear}


def test_examples_are_the_same_each_time_and_leave_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = examples()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = examples(), examples(seed=1)
    for name, (model, (x, y)) in first.items():
        same, (same_x, same_y) = again[name]
        assert torch.equal(x, same_x) and torch.equal(y, same_y)
        for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(x, other[name][1][0])
        assert cross_entropy(model, x, y).shape == y.shape


# Subjects


def hooks(model: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


def test_an_audit_leaves_the_users_model_as_it_was() -> None:
    model = network()
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with MethodSubject(PerExample(clip=1.0), model, records()) as subject:
        subject.step(subject.base, noise=True)
        subject.train([subject.base, subject.base[:3]])
        assert hooks(subject.run.model) and not hooks(model)
    assert not hooks(subject.run.model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert all(p.grad is None for p in model.parameters())


def test_without_noise_a_step_gives_the_sum_and_gives_it_again() -> None:
    model, (x, y) = network(), records()
    subject = MethodSubject(PerExample(clip=0.5), model, (x, y))
    found = subject.step(subject.base, noise=False)
    subject.step(subject.base[:2], noise=True)
    again = subject.step(subject.base, noise=False)
    assert torch.equal(found.sums["all"], again.sums["all"])
    wanted = naive_clipped_sum(naive_gradients(model, cross_entropy, (x, y)), clip=0.5)
    flat = torch.cat([wanted[name].flatten() for name, _ in model.named_parameters()])
    torch.testing.assert_close(found.sums["all"], flat, rtol=1e-3, atol=1e-4)
    assert found.sensitivities["all"] == {"add_remove": 0.5, "replace_one": 1.0} and found.stds == {"all": 0.5}
    assert float(subject.step([], noise=False).sums["all"].abs().max()) == 0


def test_steps_start_from_the_same_state_of_the_method() -> None:
    """An adaptive threshold moves with every step, and must not from one trial to the next."""
    subject = MethodSubject(PerExample(clip=0.5, adaptive=True), network(), records())
    for _ in range(3):
        assert subject.step(subject.base, noise=True).sensitivities["all"]["add_remove"] == 0.5


def test_a_replayed_training_releases_what_was_recorded() -> None:
    subject = mine()
    tape, facts = subject.train([subject.base, subject.base[:4]])
    assert len(tape.outputs) == 2
    again, others = subject.train([subject.base[:1], []], tape)
    assert again is tape and facts.keys() == others.keys()
    for step, output in enumerate(tape.outputs):
        for played in (facts, others):
            parts = [played[f"gradient of {name} in step {step}"] for name, _ in network().named_parameters()]
            flat = torch.cat([part.flatten() for part in parts])
            torch.testing.assert_close(flat * subject.sampling.batch, output.float())
    fresh, _ = subject.train([subject.base, subject.base[:4]])
    assert not torch.equal(fresh.outputs[0], tape.outputs[0])


def test_a_desk_plays_back_no_more_than_its_tape_and_in_its_shape() -> None:
    desk = Desk(Source("seeded", seed=0))
    desk.begin("noise")
    noisy = desk.add_noise(torch.ones(3), 2.0)
    assert not torch.equal(noisy, torch.ones(3).double()) and desk.stds == [2.0]
    desk.begin("off")
    assert torch.equal(desk.add_noise(torch.ones(3), 2.0), torch.ones(3).double()) and desk.stds == [2.0]
    desk.begin("replay", Tape([noisy.clone()]))
    assert torch.equal(desk.add_noise(torch.zeros(3), 2.0), noisy)
    with pytest.raises(_OutOfTape, match="more noisy sums"):
        desk.add_noise(torch.zeros(3), 2.0)
    desk.begin("replay", Tape([noisy]))
    with pytest.raises(_OutOfTape, match="shape"):
        desk.add_noise(torch.zeros(4), 2.0)


def test_coins_belong_to_records_wherever_they_stand_in_the_sample() -> None:
    desk = Desk(Source("seeded", seed=0))
    desk.numbers = list(range(20))
    coins = desk.integers(20, 3)
    desk.numbers = [10**6, *range(19, -1, -1)]
    assert desk.integers(21, 3)[1:].tolist() == coins[::-1].tolist()
    assert set(coins.tolist()) == {0, 1, 2}
    subject = MethodSubject(Batch(clip=0.02, record_groups=3), network(), records())
    first, last = (subject.step(s, noise=False).sums["all"] for s in (subject.base, subject.base[::-1]))
    torch.testing.assert_close(first, last, rtol=1e-5, atol=1e-7)
    assert float(first.norm()) > 0.02
