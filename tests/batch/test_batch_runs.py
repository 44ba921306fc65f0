"""Batch clipping in whole runs: p.grad is the paper's update, BatchNorm is allowed, and layers are clipped apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from grouped import B, clipped, close, entropy, flat, linear, mean_gradient, naive, problem, release, running
from torch import nn

from privet import Budget, FixedSize, PerExample, Poisson, Run
from privet.methods import Sensitivity
from privet.methods.batch import Batch
from privet.noise import Source
from privet.sampling import Sample


@pytest.mark.parametrize("physical", [7, 1000])
def test_p_grad_is_the_papers_update(physical: int) -> None:
    """(1/k)·Σ_g clip(mean_g), whatever the batch size, with noise of deviation σ·2C/k."""
    torch.manual_seed(0)
    model, dataset, chosen = nn.Linear(6, 2), problem(), Batch(clip=0.05, record_groups=3)
    options: dict[str, Any] = {"method": chosen, "sampling": Poisson(batch=40), "physical_batch": physical}
    run = Run(model, dataset, budget=Budget(noise=0.0, steps=3, delta=1e-5), noise_level="seeded", seed=0, **options)
    cut, drawn = run.session.cut, []

    def watched(sample: Sample, source: Source) -> list[Sample]:
        drawn.append(cut(sample, source))
        return drawn[-1]

    run.session.cut = watched  # type: ignore[method-assign]
    x, y = dataset.tensors
    for i, private in enumerate(run.loader):
        for batch in private:
            private.backward(entropy(model, *batch))
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        close(found, naive(chosen, model, [(x[u], y[u]) for u in drawn[i]], entropy) / B)
    assert len(drawn) == 3
    noisy = Run(model, dataset, budget=Budget(noise=1.5, steps=3, delta=1e-5), **options)
    (group,) = noisy.statement()["groups"]
    assert group["sensitivity"] == pytest.approx(2 * 0.05 * 40 / 3)
    assert group["noise_std"] / 40 == pytest.approx(1.5 * 2 * 0.05 / 3)


def test_a_small_model_with_batchnorm_learns() -> None:
    torch.manual_seed(0)
    dataset = problem()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    x, y = dataset.tensors
    assert float((model(x).argmax(1) == y).float().mean()) < 0.8
    run = Run(
        model, dataset, method=Batch(clip=0.5), sampling=Poisson(batch=64), noise_level="seeded", seed=0,
        budget=Budget(noise=0.1, steps=60, delta=1e-5), physical_batch=16,
    )  # fmt: skip
    while not run.finished:
        for private in run.loader:
            for batch in private:
                private.backward(entropy(model, *batch))
            optimizer.step()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.93


def test_empty_samples_release_too_and_replacing_is_accounted() -> None:
    model, dataset = nn.Linear(6, 2), problem(50)
    run = Run(
        model, dataset, method=Batch(record_groups=2), sampling=Poisson(batch=2), noise_level="seeded", seed=0,
        budget=Budget(noise=0.0, steps=20, delta=1e-5),
    )  # fmt: skip
    zero = 0
    for private in run.loader:
        for batch in private:
            private.backward(entropy(model, *batch))
        zero += not model.weight.grad.any()  # type: ignore[union-attr]
    assert 0 < zero < run.steps_done == 20
    fixed: dict[str, Any] = {"sampling": FixedSize(batch=10), "relation": "replace_one"}
    fixed["budget"] = Budget(noise=1.0, steps=3, delta=1e-5)
    stds = [Run(model, dataset, method=m, **fixed).statement()["groups"] for m in (Batch(), PerExample())]
    assert [g[0]["noise_std"] for g in stds] == pytest.approx([20.0, 2.0])


def test_each_layer_of_a_groups_vector_is_clipped_by_itself() -> None:
    model, clips = linear(), {"0": 0.02, "2": 0.05}
    with running(model, Batch(clip=clips, groups="layer", record_groups=2)) as run:
        run.source.integers = lambda count, bound: np.arange(count) % bound  # type: ignore[method-assign]
        found = release(run, range(10))
        assert {q.name: q.sensitivity for q in run.session.finish()} == {
            g: Sensitivity(add_remove=2 * c * 10 / 2, replace_one=2 * c * 10 / 2) for g, c in clips.items()
        }
    first, second = (mean_gradient(model, range(start, 10, 2)) for start in (0, 1))
    parts = [(slice(0, 28), 0.02), (slice(28, 38), 0.05)]
    expected = torch.cat([clipped(first[part], c) + clipped(second[part], c) for part, c in parts]) * 10 / 2
    close(flat(found), expected)
