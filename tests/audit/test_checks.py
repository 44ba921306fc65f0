"""The checks one by one: each passes what is sound and fails what is not, on subjects whose truth is known."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import naive_clipped_sum, naive_gradients
from scipy import stats
from torch import Tensor, nn

from privet import Batch, ConfigError, FixedSize, Partition, PerExample, Poisson, Refused, Run
from privet.accounting import Mechanism, epsilon, trade_off
from privet.audit import (
    Check,
    Desk,
    MethodSubject,
    Outcome,
    Record,
    Subject,
    Tape,
    assert_private,
    audit,
    audit_in_one_run,
    audit_subject,
    randomness,
    sensitivity,
)
from privet.audit.accountant import check_accounting, epsilon_from_below
from privet.audit.draws import check_sampling
from privet.audit.one_run import _best_number_of_guesses, _from_below, _right_guesses, _strange
from privet.audit.randomness import check_noise, check_two_worlds
from privet.audit.replay import check_replay
from privet.audit.sensitivity import check_sensitivity
from privet.audit.statistics import gaussian_mu_lower, gdp_epsilon, one_run_f_dp_rejects
from privet.audit.subject import _OutOfTape, cross_entropy
from privet.audit.zoo import examples
from privet.gradients import Recorder
from privet.gradients.per_record import RULES
from privet.methods import Method, ParameterGroup, Query, Sensitivity, Session, Setting, option
from privet.methods.base import trainable
from privet.noise import Allocation, Source
from privet.sampling import Sample

Bound = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _same_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of noise come from a seed: no test fails by chance, however small it is."""
    monkeypatch.setattr("os.urandom", random.Random(7).randbytes)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws, where only the way from a fault to the report is tried."""
    monkeypatch.setattr(randomness, "_DRAWS", 1000)
    monkeypatch.setattr(randomness, "_TRIALS", 40)
    monkeypatch.setattr(sensitivity, "_CLIMBS", 4)


def network(*, bias: bool = True, width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width, bias=bias), nn.Tanh(), nn.Linear(width, 3, bias=bias))


def records(count: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def failed(checks: Sequence[Check]) -> list[str]:
    return [check.name for check in checks if not check.holds]


# A method of a user's own, known to nobody


def to_length_one(gradient: Tensor) -> Tensor:
    length = float(gradient.double().norm())
    return gradient * min(1.0, 0.9999 / max(length, 1e-30)) if math.isfinite(length) else torch.zeros_like(gradient)


@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    """Each record adds bound(its gradient), of which Mine says that its length is at most 1."""

    name = "mine"
    summary = "a user's own"

    bound: Bound = option(to_length_one, "what a record adds")
    replaced: float = option(2.0, "what it says of a replaced record")
    said: Callable[[int], Any] = option(lambda records: None, "called with the number of records of a step")
    kept: bool = option(False, "whether the number of records is a part of its state")
    twice: int = option(10**9, "from so many records on, there are two sums")
    allocation: Allocation = option("isotropic", "how noise is shared")

    def open(self, model: nn.Module, setting: Setting) -> Session:
        return MySession(self, model)


class MySession(Session):
    def __init__(self, method: Mine, model: nn.Module) -> None:
        self.method, self.group, self.recorder = method, ParameterGroup("all", trainable(model)), Recorder(model)
        self.seen = 0

    def listening(self) -> AbstractContextManager[None]:
        return self.recorder.recording()

    def begin(self) -> None:
        self.group.total.zero_()
        self.seen = 0

    def add(self, losses: Tensor) -> None:
        self.seen += len(losses)
        gradients = self.recorder.backward(losses)
        with torch.no_grad():
            rows = torch.cat([gradients[name].dense().flatten(1) for name in self.group.parameters], 1)
            self.group.total += torch.stack([self.method.bound(row) for row in rows]).sum(0)

    def finish(self) -> list[Query]:
        self.method.said(self.seen)
        bound = Sensitivity(add_remove=1.0, replace_one=self.method.replaced)
        more = [Query("more", torch.zeros(1), bound)] if self.seen >= self.method.twice else []
        return [Query("all", self.group.total, bound, group=self.group), *more]

    def state(self) -> dict[str, Any]:
        return {"records": self.seen} if self.method.kept else {}

    def close(self) -> None:
        self.recorder.close()


def mine(model: nn.Module | None = None, data: tuple[Tensor, Tensor] | None = None, **options: Any) -> MethodSubject:
    return MethodSubject(Mine(**options), model or network(), data or records())


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


# Sensitivity


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


# Noise, of a subject that only exists here


class Stub(Subject):
    """Sums of these sizes with these deviations; `draw(step)` gives the standardised noise of all."""

    name, relation, basis, delta = "stub", "add_remove", "add_remove", 1e-5
    noise_multiplier = 1.0

    def __init__(
        self,
        draw: Callable[[int], np.ndarray],
        sizes: Sequence[int] = (60, 40),
        stds: Sequence[float] = (2.0, 0.5),
        mu: float = 1.0,
    ) -> None:
        self.base = [Record(i, torch.zeros(2), torch.tensor(0)) for i in range(3)]
        self.draw, self.sizes, self.declared, self.mu = draw, sizes, stds, mu
        self.taken = 0
        self.again: list[int] = []

    def restarts(self) -> Iterator[tuple[str, Outcome]]:
        for number, step in enumerate(self.again):
            self.taken = step
            yield f"of restart {number}", self.step(self.base, noise=True)

    def step(self, sample: Sequence[Record], *, noise: bool) -> Outcome:
        ends = np.cumsum(self.sizes)
        parts = np.split(self.draw(self.taken), ends[:-1]) if noise else [np.zeros(n) for n in self.sizes]
        self.taken += noise
        shift = self.mu * len(sample) / math.sqrt(len(self.sizes))
        sums = {}
        for i, (part, std) in enumerate(zip(parts, self.declared, strict=True)):
            sums[f"sum {i}"] = torch.from_numpy(std * part).clone()
            sums[f"sum {i}"][i] += std * shift
        return Outcome(
            sums=sums,
            sensitivities={name: {"add_remove": 1.0, "replace_one": 2.0} for name in sums},
            stds=dict(zip(sums, self.declared, strict=True)),
        )


def gaussian(seed: int, factor: float = 1.0, size: int = 100) -> Callable[[int], np.ndarray]:
    generator = np.random.default_rng(seed)
    return lambda step: factor * generator.normal(size=size)


def test_gaussian_noise_passes() -> None:
    for seed in range(6):
        assert not failed(check_noise(Stub(gaussian(seed))))


def test_a_deviation_of_a_twentieth_is_surely_found_and_one_of_a_hundredth_is_not() -> None:
    """With n draws the measured deviation is off by 1/√(2n) of itself, 0.5% here, and 4.9 of these are allowed."""
    draws, error = randomness._DRAWS, randomness.ERROR
    low, high = stats.chi2.ppf([error / 2, 1 - error / 2], draws)

    def power(factor: float) -> float:
        return float(stats.chi2.cdf(low / factor**2, draws) + stats.chi2.sf(high / factor**2, draws))

    assert min(power(0.95), power(1.05)) > 1 - 1e-6 and max(power(0.99), power(1.01)) < 0.01
    for seed in range(5):
        for factor in (0.95, 1.05):
            found = failed(check_noise(Stub(gaussian(seed, factor), sizes=[100], stds=[3.0])))
            assert "spread of the noise in 'sum 0'" in found
        assert not failed(check_noise(Stub(gaussian(seed, 0.99), sizes=[100], stds=[3.0])))


def noise_of(kind: str) -> Stub:
    generator = np.random.default_rng(3)

    def draw(step: int) -> np.ndarray:
        z = generator.normal(size=100)
        if kind == "laplace":
            return generator.laplace(scale=math.sqrt(0.5), size=100)
        if kind == "sums share half of their noise":
            z[60:] = math.sqrt(0.5) * (z[:40] + z[60:])
        if kind == "the last two of three sums are the same":
            z[70:] = z[40:70]
        if kind == "each second step repeats":
            return np.random.default_rng(step // 2).normal(size=100)
        if kind == "halves repeat":
            z[30:60], z[80:] = z[:30], z[60:80]
        if kind == "neighbours share":
            z[1::2] = z[::2]
        if kind == "the last step's, shifted":
            return np.roll(np.random.default_rng(step // 2).normal(size=100), 5 * (step % 2))
        if kind == "comes back after thirty steps":
            return np.random.default_rng(step % 30).normal(size=100)
        if kind == "cut off":
            z = np.where(np.abs(z) > 2.5, generator.uniform(-2.5, 2.5, size=100), z)
            return z / 0.9567  # its own deviation
        return z

    return Stub(draw, *([(40, 30, 30), (2.0, 0.5, 1.0)] if "three" in kind else []))


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("laplace", "shape of the noise"),
        ("sums share half of their noise", "independence: noise of different sums"),
        ("the last two of three sums are the same", "independence: noise of different sums"),
        ("each second step repeats", "independence: noise of different steps"),
        ("halves repeat", "independence: noise within a sum"),
        ("neighbours share", "independence: noise within a sum"),
        ("the last step's, shifted", "independence: noise of different steps"),
        ("comes back after thirty steps", "independence: noise of 200 steps"),
        ("cut off", "noise beyond 3 deviations"),
    ],
)
def test_noise_of_the_right_spread_that_is_wrong_otherwise(kind: str, check: str) -> None:
    assert check in failed(check_noise(noise_of(kind)))


def test_noise_that_is_met_again_after_a_restart() -> None:
    """In a run that went before, or only in another one that goes on from the same checkpoint."""
    stub = Stub(lambda step: np.random.default_rng(step).normal(size=100))
    stub.again = [10**6, 10**6 + 1]
    assert not failed(check_noise(stub))
    stub.again, stub.taken = [10**6, 10**6], 0
    assert failed(check_noise(stub)) == ["independence: noise of restart 1"]
    stub.again, stub.taken = [3], 0
    assert failed(check_noise(stub)) == ["independence: noise of restart 0"]


def test_a_checkpoint_that_brings_its_key_along_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Run.load

    def with_its_key(self: Run, path: Any, **stateful: Any) -> None:
        load(self, path, **stateful)
        self.source.real._rekey(bytes(32))  # type: ignore[attr-defined]

    monkeypatch.setattr(randomness, "_DRAWS", 1000)
    monkeypatch.setattr(Run, "load", with_its_key)
    assert failed(check_noise(mine())) == ["independence: noise after resuming from it again"]


def test_a_sum_that_no_record_moves_needs_no_noise_but_must_not_have_any() -> None:
    def draw(step: int) -> np.ndarray:
        return np.random.default_rng(step).normal(size=100)

    assert not failed(check_noise(Stub(draw, stds=(2.0, 0.0))))
    silent = Stub(draw, stds=(0.0, 0.0))
    assert "shape of the noise" in failed(check_noise(silent))


def test_two_worlds_further_apart_than_claimed_are_told_apart() -> None:
    for seed in range(5):
        check, claimed, found = check_two_worlds(Stub(gaussian(seed)), Record(9, torch.zeros(2), torch.tensor(0)))
        assert check.holds and 0 < check.measured < check.bound == 1.0
        assert (claimed, found) == (gdp_epsilon(1.0, 1e-5), gdp_epsilon(check.measured, 1e-5))
    # Twice the claim is found in 94% of all trials, by the binomials below; 2.5 times it in all but one in 10^5.
    generator = np.random.default_rng(0)
    errors = generator.binomial(300, stats.norm.cdf(-1), (500, 2))
    twice = [gaussian_mu_lower(int(a), int(b), 300, 300, randomness.ERROR) > 1 for a, b in errors]
    assert np.mean(twice) > 0.9
    for seed in range(3):
        for mu, factor in ((2.5, 1.0), (1.0, 0.4)):  # the record does more, or the noise is less
            far = Stub(gaussian(seed, factor), mu=mu)
            assert not check_two_worlds(far, Record(9, torch.zeros(2), torch.tensor(0)))[0].holds
    assert sum(not check_two_worlds(Stub(gaussian(s), mu=2), far.base[0])[0].holds for s in range(5)) >= 4


# Replay


def test_what_depends_on_noisy_values_alone_passes_the_replay() -> None:
    subject = MethodSubject(PerExample(clip=0.5, adaptive=True), network(), records())
    _, facts = subject.train([subject.base])
    assert facts["state of the method after step 0"]["clips"]["all"] != 0.5  # it moved, by the noisy count
    checks = check_replay(subject, subject.base[0])
    assert len(checks) == 3 and not failed(checks)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"said": lambda count: logging.getLogger("mine").warning("%d records", count)}, "printed and logged"),
        ({"said": lambda count: logging.getLogger("mine").info("%d records", count)}, "printed and logged"),
        ({"said": print}, "printed and logged"),
        ({"kept": True}, "state of the method after step 0"),
        ({"twice": 13}, "gradient of 0.weight in step 0"),
    ],
    ids=["warns", "informs", "prints", "keeps", "asks for more noise"],
)
def test_what_tells_the_number_of_records_is_named(options: dict[str, Any], fact: str) -> None:
    checks = check_replay(mine(**options), Record(99, *(part[0] for part in records())))
    assert len(failed(checks)) == 3
    assert all(fact in check.detail and check.measured >= 1 for check in checks), checks[0].detail


def test_a_log_is_as_loud_after_a_replay_as_before() -> None:
    level = logging.getLogger().level
    mine().train([])
    assert logging.getLogger().level == level


def test_a_subject_that_cannot_be_trained_has_no_replay() -> None:
    stub = Stub(gaussian(0))
    assert check_replay(stub, stub.base[0]) == []


# Sampling


@dataclass(frozen=True, kw_only=True)
class Shuffled(Poisson):
    """Accounted as a Poisson sample."""

    def _samples(self, *, size: int, source: Source, start: int, steps: int, **_: Any) -> Iterator[Sample]:
        order = np.argsort(source.words(size)).astype(np.int64)
        for step in range(start, start + steps):
            yield np.sort(order[step * self.batch : (step + 1) * self.batch])


@dataclass(frozen=True, kw_only=True)
class TooMany(Poisson):
    def _samples(self, *, size: int, records: int, source: Source, steps: int, **_: Any) -> Iterator[Sample]:
        for _step in range(steps):
            yield np.flatnonzero(source.coins(size, 1.1 * self.batch / records))


@dataclass(frozen=True, kw_only=True)
class Twice(Poisson):
    """Those who are in are in twice."""

    def _samples(self, **options: Any) -> Iterator[Sample]:
        for sample in super()._samples(**options):
            yield np.repeat(sample, 2)


@dataclass(frozen=True, kw_only=True)
class Lucky(Poisson):
    """The first record is in every step, and the last in none."""

    def _samples(self, *, size: int, **options: Any) -> Iterator[Sample]:
        for sample in super()._samples(size=size, **options):
            yield np.union1d(sample[sample < size - 1], [0])


@dataclass(frozen=True, kw_only=True)
class WithReplacement(FixedSize):
    def _samples(self, *, size: int, source: Source, steps: int, **_: Any) -> Iterator[Sample]:
        for _step in range(steps):
            yield np.sort(source.integers(self.batch, size))


@dataclass(frozen=True, kw_only=True)
class Sorted(Partition):
    """Each record once in an epoch, but who stands where depends on how many there are."""

    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]:
        words = Source("seeded", seed=int.from_bytes(epoch_key or b"", "big")).words(size)
        order, count = np.argsort(words), self.steps_per_epoch(records)
        for step in range(start, start + steps):
            yield order[step * size // count : (step + 1) * size // count]


@dataclass(frozen=True, kw_only=True)
class HalfRate(Poisson):
    """Drawn with rate q, accounted with q/2."""

    def _cost(self, records: int) -> dict[str, Any]:
        return {"kind": "poisson", "rate": self.batch / records / 2}


@dataclass(frozen=True, kw_only=True)
class TrueRate(Poisson):
    """The rate is that of the true number of records, which is not public."""

    def _samples(self, *, size: int, records: int, **options: Any) -> Iterator[Sample]:
        return super()._samples(size=size, records=size, **options)


@dataclass(frozen=True, kw_only=True)
class EverySecond(Poisson):
    """Each sample comes twice, with one between."""

    def _samples(self, *, steps: int, **options: Any) -> Iterator[Sample]:
        first, second, *_ = super()._samples(steps=max(2, steps), **options)
        for step in range(steps):
            yield (first, second)[step % 2]


@pytest.mark.parametrize("rule", [HalfRate(batch=6), TrueRate(batch=6), EverySecond(batch=6)], ids=repr)
def test_a_rate_or_an_order_that_is_not_the_accounted_one_fails(rule: Poisson) -> None:
    assert failed(check_sampling(rule, "add_remove", Source("seeded", seed=0)))


@pytest.mark.parametrize("batch", [1, 6, 64])
@pytest.mark.parametrize(
    ("rule", "relation"),
    [(Poisson, "add_remove"), (Poisson, "replace_one"), (FixedSize, "replace_one"), (Partition, "add_remove")],
)
def test_samples_that_are_drawn_as_accounted_pass(rule: Any, relation: Any, batch: int) -> None:
    for seed in range(2):
        checks = check_sampling(rule(batch=batch), relation, Source("seeded", seed=seed))
        assert not failed(checks), [check for check in checks if not check.holds]


@pytest.mark.parametrize(
    ("rule", "relation", "check"),
    [
        (Shuffled(batch=6), "add_remove", "sizes of samples vary as those of independent coins"),
        (Shuffled(batch=6), "add_remove", "records meet in steps 1 apart as often as accounted"),
        (TooMany(batch=6), "add_remove", "every record has the same rate"),
        (Twice(batch=6), "add_remove", "no record is twice in a sample"),
        (Lucky(batch=6), "add_remove", "every record has the same rate"),
        (WithReplacement(batch=6), "replace_one", "samples have the accounted size"),
        (Sorted(batch=6), "add_remove", "one record more moves no other"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_samples_that_are_drawn_otherwise_fail(rule: Any, relation: Any, check: str) -> None:
    for seed in range(3):
        assert check in failed(check_sampling(rule, relation, Source("seeded", seed=seed)))


# The second accountant


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("sigma", "rate", "count", "delta"),
    [(0.7, 0.3, 1, 1e-5), (1.0, 0.01, 10, 1e-5), (1.0, 0.3, 10, 1e-9), (2.0, 0.05, 300, 1e-8)],
)
def test_a_lower_bound_is_below_the_claim_and_close(
    relation: Any, sigma: float, rate: float, count: int, delta: float
) -> None:
    mechanism = Mechanism(kind="poisson", noise_multiplier=sigma, rate=rate, relation=relation)
    claimed = epsilon([(mechanism, count)], delta).epsilon
    check = check_accounting(mechanism, count, claimed, delta)
    assert check.holds and (0.99 if count <= 10 else 0.97) * claimed < check.measured < claimed
    if count == 10:
        assert not check_accounting(mechanism, count, 0.95 * claimed, delta).holds


def test_unsampled_steps_have_a_closed_form() -> None:
    for relation in ("add_remove", "replace_one"):
        mechanism = Mechanism(kind="gaussian", noise_multiplier=2.0, relation=relation)  # type: ignore[arg-type]
        claimed = epsilon([(mechanism, 9)], 1e-6).epsilon
        assert epsilon_from_below(mechanism, 9, 1e-6) == pytest.approx(claimed, rel=1e-9)
        assert not check_accounting(mechanism, 9, 0.95 * claimed, 1e-6).holds
    assert epsilon_from_below(Mechanism(kind="gaussian", noise_multiplier=0.0), 1, 1e-5) == math.inf


def divergence(rate: float, shift: float, count: int, epsilon: float) -> float:
    """∫ (p − e^ε q)₊ by summing over a grid of outputs in `count` dimensions, for one exchange of +shift by −shift."""
    y = np.linspace(-9, 9, 1201)

    def density(mean: float) -> np.ndarray:
        of_one = (1 - rate) * stats.norm.pdf(y) + rate * stats.norm.pdf(y, mean)
        return of_one if count == 1 else np.multiply.outer(of_one, of_one)

    return float(np.maximum(density(shift) - math.exp(epsilon) * density(-shift), 0).sum() * (y[1] - y[0]) ** count)


@pytest.mark.parametrize("count", [1, 2])
def test_samples_of_fixed_size_by_brute_force(count: int) -> None:
    mechanism = Mechanism(kind="fixed_size", noise_multiplier=0.8, records=20, batch=5, relation="replace_one")
    found = epsilon_from_below(mechanism, count, 1e-3)
    half = 0.5 / 0.8  # the multiplier is noise over 2C, and each record adds C
    assert divergence(0.25, half, count, 0.999 * found) > 1e-3 > divergence(0.25, half, count, 1.003 * found)
    assert found < epsilon([(mechanism, count)], 1e-3).epsilon


# One training


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


# Whole audits


@pytest.mark.usefixtures("quick")
def test_a_sound_method_is_asserted_private_in_one_line() -> None:
    report = assert_private(PerExample(clip=1.0), network(), records(), sampling=Partition(batch=6), canaries=40)
    assert report.holds and report.lower_bound <= report.claimed
    assert len(report.notes) == 1 and "cannot show more" in report.notes[0]


@pytest.mark.usefixtures("quick")
def test_a_broken_method_is_named_by_what_is_broken() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_private(
            Mine(bound=lambda g: 1.1 * to_length_one(g)), network(), records(), sampling=Partition(batch=6), canaries=40
        )
    said = str(caught.value)
    assert "mine: BROKEN" in said and "NO  sensitivity, a record added or removed: 1.1 against 1" in said
    assert said.count("NO ") == 1


@pytest.mark.parametrize("error", [RuntimeError, IndexError, TypeError, AssertionError])
def test_a_method_that_stops_has_not_passed(error: type[Exception]) -> None:
    def stops(count: int) -> None:
        raise error("nothing works")

    checks = audit_subject(mine(said=stops))
    assert failed(checks) == ["sensitivity", "noise", "two worlds", "replay"]
    assert {check.detail for check in checks if not check.holds} == {f"{error.__name__}: nothing works"}


def test_a_method_that_cannot_do_without_records_fails() -> None:
    """An empty sample is a sample, and every rule that tosses coins draws one now and then."""
    checks, _ = check_sensitivity(mine(said=lambda count: [1] * 12 if count else {}[count]))
    assert failed(checks) == ["sensitivity, a record added or removed"]
    assert "a sample of nobody stops the step (KeyError: 0)" in checks[0].detail


def test_an_audit_without_records_is_refused() -> None:
    x, y = records()
    for none in ((x[:0], y[:0]), (x, y[:3])):
        with pytest.raises(ConfigError, match="needs records"):
            audit(PerExample(clip=1.0), network(), none)


# What a hostile review found


def test_a_second_accountant_stays_below_the_truth_over_very_many_steps() -> None:
    for sigma, count, delta in ((500.0, 500_000, 1e-5), (50.0, 100_000, 1e-12), (10.0, 10_000, 1e-13)):
        whole = Mechanism(kind="poisson", rate=1.0, noise_multiplier=sigma)
        assert epsilon_from_below(whole, count, delta) <= gdp_epsilon(math.sqrt(count) / sigma, delta)


def test_a_factor_that_depends_on_the_others_norms_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = PerExample.weights

    def by_second_largest(self: PerExample, squares: Tensor, clip: float) -> Tensor:
        top = squares.sort().values[-2:].min().clamp(min=clip**2).sqrt()
        return torch.full_like(squares, float(clip / top))

    monkeypatch.setattr(PerExample, "weights", by_second_largest)
    checks, _ = check_sensitivity(MethodSubject(PerExample(clip=1.0), network(), records()))
    assert failed(checks)
    monkeypatch.setattr(PerExample, "weights", weights)


def test_noise_from_the_generator_that_everybody_seeds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(self: Source, total: Tensor, std: float, *, out: Tensor | None = None) -> Tensor:
        return (out if out is not None else total.clone()).copy_(total + std * torch.randn(total.shape))

    monkeypatch.setattr(Source, "add_noise", seeded)
    checks = check_noise(MethodSubject(PerExample(clip=1.0), network(), records()))
    assert "independence: noise of different steps" in failed(checks)


def test_noise_that_is_left_out_where_a_sum_is_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise = Source.add_noise

    def sparse(self: Source, total: Tensor, std: float, *, out: Tensor | None = None) -> Tensor:
        mask = total != 0
        noisy = add_noise(self, total, std, out=out)
        return noisy.mul_(mask)

    monkeypatch.setattr(Source, "add_noise", sparse)
    checks = check_noise(MethodSubject(PerExample(clip=1.0), network(), records()))
    assert "spread of the noise in 'all, of nobody, over the stated'" in failed(checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_and_other_precisions_are_no_fault(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)).to(dtype)
    x, y = records()
    checks, _ = check_sensitivity(MethodSubject(PerExample(clip=1.0), model, (x.to(dtype), y)))
    assert not failed(checks), [check.detail for check in checks]


def test_what_cannot_be_audited_is_said() -> None:
    x, y = records()
    with pytest.raises(ConfigError, match="two tensors"):
        audit(PerExample(), network(), [(x[0], y[0])])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="noise must be positive"):
        audit(PerExample(), network(), (x, y), noise_multiplier=0)
    with pytest.raises(ConfigError, match="at least 2"):
        audit(PerExample(), network(), (x, y), canaries=1)
    with pytest.raises(Refused, match="BatchNorm"):
        audit(PerExample(), nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), (x, y))


def test_a_threshold_that_decays_is_no_fault() -> None:
    subject = MethodSubject(PerExample(clip=1.0, clip_decay=0.9), network(), records())
    assert not failed(check_sensitivity(subject)[0]) and not failed(check_noise(subject))


def test_a_model_without_records_is_not_left_out_silently() -> None:
    with pytest.raises(ConfigError, match="or neither"):
        audit(PerExample(), network())
