"""Layerwise clipping: each layer is clipped and noised by its own threshold, or all as one after scaling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import naive_clipped_sum, naive_gradients
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Budget, PerExample, Poisson, Run
from privet.audit import MethodSubject, audit, randomness, sensitivity
from privet.audit.replay import check_replay
from privet.methods.batch import Batch, _LocalSteps
from privet.methods.layerwise import Layerwise
from privet.methods.per_example import _PerExampleSession
from privet.methods.thresholds import part_norms
from privet.state import Buffers

C, BATCH = 0.4, 10
LAYERS = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"], "3": ["3.weight", "3.bias"]}


def network(width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 8), nn.Linear(8, 3))


def records(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)) * 2
    return TensorDataset(x, torch.arange(count) % 3)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@contextmanager
def running(model: nn.Module, chosen: Any, noise: float = 0.0, **options: Any) -> Iterator[Run]:
    """Two steps make an epoch."""
    settings: dict[str, Any] = {"sampling": Poisson(batch=BATCH), "noise_level": "seeded", "seed": 0}
    settings |= {"budget": Budget(noise=noise, steps=100, delta=1e-5), "public": records(20, seed=1)}
    with Run(model, records(20, seed=0), method=chosen, **settings | options) as run:
        yield run


def release(run: Run, sample: Any = range(12)) -> dict[str, Tensor]:
    """The noisy sums of a step on these records."""
    step = run.step_on(np.array(sample, dtype=np.int64))
    for batch in step:
        step.backward(losses(run.model, *batch))
    return {n: p.grad.double() * BATCH for n, p in run.model.named_parameters() if p.grad is not None}


def mean_norms(model: nn.Module) -> dict[str, float]:
    gradients = naive_gradients(model, losses, records(20, seed=1).tensors)
    flat = {layer: torch.cat([gradients[n].double().flatten(1) for n in names], 1) for layer, names in LAYERS.items()}
    return {layer: float(rows.norm(dim=1).mean()) for layer, rows in flat.items()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


# The sum


@pytest.mark.parametrize("thresholds", ["fixed", "alc", "zhang"])
@pytest.mark.parametrize("physical", [5, 100])
def test_each_layer_is_clipped_by_itself(thresholds: Any, physical: int) -> None:
    model = network()
    norms = mean_norms(model)
    largest = max(norms.values())
    over = {"fixed": lambda e: 1.0, "alc": lambda e: e / largest, "zhang": lambda e: e}[thresholds]
    x, y = (t[:12] for t in records(20, seed=0).tensors)
    gradients = naive_gradients(model, losses, (x, y))
    expected: dict[str, Tensor] = {}
    for layer, names in LAYERS.items():
        expected |= naive_clipped_sum({n: gradients[n] for n in names}, C * over(norms[layer]))
    with running(model, Layerwise(clip=C, thresholds=thresholds), physical_batch=physical) as run:
        close(release(run), expected)


def test_factors_clip_an_ellipse() -> None:
    """Each layer times m_h = M/e_h, all clipped as one to C, summed, and each layer divided by m_h again."""
    model = network()
    norms = mean_norms(model)
    factors = {name: max(norms.values()) / norms[layer] for layer, names in LAYERS.items() for name in names}
    assert max(factors.values()) > 1.5
    x, y = (t[:12] for t in records(20, seed=0).tensors)
    gradients = naive_gradients(model, losses, (x, y))
    scaled = naive_clipped_sum({n: g * factors[n] for n, g in gradients.items()}, C)
    plain = naive_clipped_sum(gradients, C)
    with running(model, Layerwise(clip=C, factors=True)) as run:
        found = release(run)
    close(found, {n: g / factors[n] for n, g in scaled.items()})
    assert any(not torch.allclose(found[n], plain[n], rtol=0.05) for n in plain)


def test_groups_of_one_record_are_per_example_clipping_bit_for_bit() -> None:
    released = []
    for this in (PerExample(clip=C, groups="layer"), Batch(clip=C, groups="layer", record_groups="each")):
        with running(network(), this, noise=1.0) as run:
            released.append((release(run), run.groups()))
    assert released[0][1] == released[1][1]
    assert all(torch.equal(released[0][0][n], released[1][0][n]) for n in released[0][0])


# Noise


def noise_of(chosen: Any, noise: float = 0.7, **options: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The deviation of the noise in each parameter's sum, measured, and the statement's groups."""
    sums = []
    for sigma in (0.0, noise):
        with running(network(400), chosen, noise=sigma, **options) as run:
            sums.append(release(run))
            groups = run.groups()  # the statement's
    return {n: float((sums[1][n] - sums[0][n]).square().mean().sqrt()) for n in sums[0]}, groups


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_noise_is_in_proportion_to_the_thresholds_with_the_root_of_their_number(relation: Any) -> None:
    norms = mean_norms(network(400))
    clips = {layer: C * e / max(norms.values()) for layer, e in norms.items()}
    stds, groups = noise_of(Layerwise(clip=C, thresholds="alc"), relation=relation)
    expected = {layer: 0.7 * math.sqrt(3) * clip for layer, clip in clips.items()}
    assert {g["group"]: g["sensitivity"] for g in groups} == pytest.approx(
        {layer: clip * (2 if relation == "replace_one" else 1) for layer, clip in clips.items()}, rel=1e-4
    )
    assert {g["group"]: g["parameters"] for g in groups} == {"0": 2000, "2": 3208, "3": 27}
    if relation == "add_remove":
        assert {g["group"]: g["noise_std"] for g in groups} == pytest.approx(expected, rel=1e-4)
        for name in ("0.weight", "2.weight"):  # 1600 and 3200 draws: their deviation is known to 2 in 100
            assert stds[name] == pytest.approx(expected[name[0]], rel=0.08)


def test_noise_of_factors_is_divided_by_them() -> None:
    norms = mean_norms(network(400))
    factors = {layer: max(norms.values()) / e for layer, e in norms.items()}
    assert max(factors[layer] for layer in "02") > 1.5 * min(factors[layer] for layer in "02")
    stds, (group,) = noise_of(Layerwise(clip=C, factors=True))
    assert (group["group"], group["sensitivity"], group["noise_std"]) == ("all", C, pytest.approx(0.7 * C))
    for name in ("0.weight", "2.weight"):
        assert stds[name] == pytest.approx(0.7 * C / factors[name[0]], rel=0.08)


def test_a_post_processor_is_told_the_noise_that_is_there() -> None:
    seen: list[dict[str, float]] = []
    stds, _ = noise_of(Layerwise(clip=C, factors=True), post=[lambda release: seen.append(release.stds)])
    assert all(stds[name] == pytest.approx(seen[1][name], rel=0.08) for name in ("0.weight", "2.weight"))


# One record


@pytest.mark.parametrize("options", [{"thresholds": "alc"}, {"factors": True}])
def test_a_hostile_record_moves_each_sum_by_its_threshold_at_most(options: dict[str, Any]) -> None:
    x, y = records(20, seed=0).tensors
    for scale in (1e-3, 1e4, 1e30, math.nan):
        data = TensorDataset(torch.cat([x, x[:1] * scale]), torch.cat([y, y[:1]]))
        sums = []
        for sample in (range(12), [*range(12), 20]):
            model = network()
            with running(model, Layerwise(clip=C, **options)) as run:
                run.dataset = data
                release(run, sample)
                sums.append({q.name: (q.total.double().clone(), q.sensitivity) for q in run.session.finish()})
        moved = {name: float((sums[1][name][0] - total).norm() / s.add_remove) for name, (total, s) in sums[0].items()}
        assert max(moved.values()) <= 1
        assert scale != 1e4 or max(moved.values()) > 0.99


# Checkpoints


@pytest.mark.parametrize(
    "chosen",
    [
        Layerwise(clip=C, thresholds="alc", clip_decay=0.9),
        Layerwise(clip=C, factors=True),
        Layerwise(clip=C, groups=2, thresholds="alc"),
        Batch(clip=C, groups="layer", thresholds="zhang", sparsify=2),
    ],
    ids=["alc", "factors", "numbered", "batch"],
)
@pytest.mark.parametrize("at", [3, 4], ids=["within an epoch", "between epochs"])
def test_a_checkpoint_continues_with_the_same_thresholds(chosen: Any, at: int, tmp_path: Path) -> None:
    def steps(run: Run, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[dict[str, Tensor]]:
        found = []
        for number in range(first, last):
            found.append(release(run, range(number, number + 9)))
            found.append({"": torch.tensor(sorted(run.session.thresholds.clips.values()))})  # type: ignore[attr-defined]
            optimizer.step()
        return found

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

    model, optimizer = parts()
    with running(model, chosen) as run:
        steps(run, optimizer, 0, at)
        run.save(tmp_path / "checkpoint", optimizer=optimizer)
        expected = steps(run, optimizer, at, 9)
    model, optimizer = parts()
    with torch.no_grad():
        model[0].weight.zero_()
    with running(model, chosen) as run:
        run.load(tmp_path / "checkpoint", optimizer=optimizer)
        found = steps(run, optimizer, at, 9)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# The audit, and faults that it must find


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def audited(chosen: Any, model: nn.Module) -> MethodSubject:
    return MethodSubject(chosen, model, records(40, seed=0).tensors, public=records(12, seed=1).tensors)


@pytest.mark.parametrize(
    ("chosen", "build"),
    [
        (Layerwise(clip=C, thresholds="alc"), network),
        (Layerwise(clip=C, factors=True), network),
        (Batch(clip=0.05), normalised),
        (Batch(clip=0.05, local_steps=2, record_groups=2), network),
    ],
    ids=["alc", "factors", "batchnorm", "local steps"],
)
def test_the_audit_holds(chosen: Any, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", np.random.default_rng(3).bytes)
    monkeypatch.setattr(randomness, "_DRAWS", 2000)
    monkeypatch.setattr(randomness, "_TRIALS", 60)
    monkeypatch.setattr(sensitivity, "_CLIMBS", 4)
    report = audit(chosen, build(), records(40, seed=0).tensors, public=records(12, seed=1).tensors, canaries=60)
    assert report.holds, str(report)


def learn_from_everybody(patch: pytest.MonkeyPatch) -> None:
    add, finish = _PerExampleSession._sum, _PerExampleSession.finish

    def learning(self: Any, losses: Tensor, gradients: Any) -> None:
        squares = {name: gradient.squared_norms for name, gradient in gradients.items()}
        self.thresholds.learn(part_norms(self.thresholds.parts, squares))
        add(self, losses, gradients)

    def finishing(self: Any) -> Any:
        self.learned()
        return finish(self)

    patch.setattr(_PerExampleSession, "_sum", learning)
    patch.setattr(_PerExampleSession, "finish", finishing)


@pytest.mark.parametrize(
    ("chosen", "build", "fault", "differs"),
    [
        (Layerwise(clip=C, thresholds="alc"), network, learn_from_everybody, "noise in step"),
        (Batch(clip=0.05), normalised, lambda p: p.setattr(Buffers, "restore", lambda self: []), "running_mean"),
        (
            Batch(clip=0.05, local_steps=2),
            network,
            lambda p: p.setattr(_LocalSteps, "restore", lambda self: None),
            "weight after step",
        ),
    ],
    ids=["thresholds from private records", "statistics of private records", "local steps stay"],
)
def test_faults_show_in_a_replay(
    chosen: Any, build: Any, fault: Any, differs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with audited(chosen, build()) as subject:
        assert all(check.holds for check in check_replay(subject, subject.records[-1]))
    fault(monkeypatch)
    with audited(chosen, build()) as subject:
        failed = [check for check in check_replay(subject, subject.records[-1]) if not check.holds]
    assert failed and any(differs in check.detail for check in failed)
