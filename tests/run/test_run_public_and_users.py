"""Public records beside the private ones, and users as what is protected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small import budget, data, entropy, net, seeded, train
from torch.utils.data import Dataset, Subset, TensorDataset

from privet import (
    Backprop,
    Batch,
    Budget,
    ConfigError,
    PerExample,
    Poisson,
    Refused,
    Ternary,
)
from privet.methods.layerwise import Layerwise


def test_public_records_that_are_private_ones_are_refused() -> None:
    dataset = data()
    x, y = dataset.tensors
    overlapping: list[tuple[Dataset[Any], Dataset[Any]]] = [
        (dataset, dataset),
        (dataset, Subset(dataset, [3])),
        (Subset(dataset, range(40)), dataset),
        (Subset(dataset, range(40)), Subset(dataset, range(39, 64))),
        (Subset(dataset, torch.arange(40)), Subset(dataset, torch.arange(39, 64))),  # type: ignore[arg-type]
        (Subset(Subset(dataset, range(30, 64)), [5]), Subset(dataset, [35])),
        (dataset, TensorDataset(x, y)),
        (Subset(dataset, range(40)), Subset(TensorDataset(x, y.clone()), range(39, 64))),
        (dataset, TensorDataset(x[:10], y[:10].clone())),
        (dataset, TensorDataset(x[50:], y[50:].clone())),
        (TensorDataset(x[:40], y[:40]), TensorDataset(x[39:], y[39:])),
    ]
    for private, public in overlapping:
        with pytest.raises(ConfigError, match="The public records overlap with the private ones"):
            seeded(net(), private, public=public, sampling=Poisson(batch=1))


class Untouched(TensorDataset):
    """Private records that no one may look at."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a private record was read")


@pytest.mark.parametrize(
    "method",
    [
        PerExample(clip=0.5),
        Layerwise(clip=0.5, thresholds="alc"),
        Layerwise(clip=0.5, thresholds="zhang"),
        Ternary(tau=0.01),
        Ternary(tau=0.01, record_groups=16),
        Batch(clip=0.5, record_groups=1),
        Backprop(norm="patch"),
    ],
    ids=str,
)
def test_a_public_gradient_is_that_of_a_step_without_noise_and_reads_nothing_private(method: Any) -> None:
    public, model = data(16), net()
    with seeded(
        model, Untouched(*data(64).tensors), method=method, public=public, sampling=Poisson(batch=16), check=False
    ) as run:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # what an earlier step has left
        found = run.public_gradient(lambda batch: entropy(model, *batch))
        assert run.steps_done == 0 and not list(run.ledger.spent()) and model[0].weight.grad is None
        again = run.public_gradient(lambda batch: entropy(model, *batch))  # sums begin at zero
    one_group_each = getattr(method, "record_groups", 1) == 1
    if one_group_each:
        for name, gradient in found.items():
            torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-6)
        twin = net()
        learned_from = data(16) if method.name == "layerwise" else None
        with seeded(twin, public, method=method, public=learned_from, sampling=Poisson(batch=16)) as private:
            step = private.step_on(range(16))
            for x, y in step:
                step.backward(entropy(twin, x, y))
        for name, parameter in twin.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert set(found) == {name for name, _ in net().named_parameters()} and all(g.any() for g in found.values())


def test_a_public_gradient_that_cannot_be_is_refused_in_a_sentence() -> None:
    model = net()
    for public in (None, data(7)):
        with (
            seeded(model, public=public, sampling=Poisson(batch=8)) as run,
            pytest.raises(ConfigError, match="takes 8"),
        ):
            run.public_gradient(lambda batch: entropy(model, *batch))
    with seeded(model, public=data(8), sampling=Poisson(batch=8)) as run:
        for x, y in run.step_on(range(4)):
            with pytest.raises(Refused, match="inside of a step"):
                run.public_gradient(lambda batch: entropy(model, *batch))
            run._pending.backward(entropy(model, x, y))


def test_public_records_beside_the_private_ones_are_fine() -> None:
    dataset = data()
    x, y = dataset.tensors
    apart: list[tuple[Dataset[Any], Dataset[Any]]] = [
        (Subset(dataset, range(40)), Subset(dataset, range(40, 64))),
        (Subset(dataset, torch.arange(0, 64, 2)), Subset(dataset, torch.arange(1, 64, 2))),  # type: ignore[arg-type]
        (Subset(Subset(dataset, range(30, 64)), [5]), Subset(dataset, [5, 36])),
        (Subset(dataset, range(40)), Subset(TensorDataset(x, y), range(40, 64))),
        (TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])),
        (dataset, data()),
    ]
    for private, public in apart:
        with seeded(net(), private, public=public, sampling=Poisson(batch=1)) as run:
            statement = run.statement()
            assert statement["public_records"] == len(public)  # type: ignore[arg-type]
            assert any("public records" in gap for gap in statement["not_covered"])
    with seeded(net()) as run:
        assert run.statement()["public_records"] is None
        with pytest.raises(ConfigError, match="There are no public records to go through"):
            next(run.refresh())


@pytest.mark.parametrize("workers", [0, 1])
def test_public_records_come_first_in_each_epoch_through_the_same_loop(workers: int) -> None:
    model, public = net(), TensorDataset(data(50).tensors[0] + 100, torch.zeros(50, dtype=torch.int64))
    private: list[bool] = []
    with seeded(
        model, method=PerExample(clip=0.5, groups="layer", thresholds="alc"), public=public, budget=budget(7),
        physical_batch=8, loader_options={"num_workers": workers}, check=False,
    ) as run:  # fmt: skip
        while not run.finished:
            for step in run.loader:
                chunks = []
                for x, y in step:
                    chunks.append(bool(x.mean() < 50))
                    step.backward(entropy(model, x, y))
                assert chunks == sorted(chunks)
                private.append(chunks[0])
                assert chunks.count(False) in (0, 6)  # 50 in eights: the last two are left out
    assert private == [False, True, True, False, True, True, False]  # 64 records in 24s: three steps an epoch


USERS = [i % 16 for i in range(64)]


def test_users_are_what_is_sampled_and_protected() -> None:
    model = net()
    noise = Budget(noise=1.0, steps=4, delta=1e-5)
    with seeded(
        model, method=Batch(clip=0.5, record_groups="user"), users=USERS, sampling=Poisson(batch=4), budget=noise
    ) as run:
        train(run, model)
        statement = run.statement()
    assert (statement["unit"], statement["records"]) == ("user", 16)
    assert statement["mechanism"]["rate"] == 4 / 16
    assert [(g["sensitivity"], g["noise_std"]) for g in statement["groups"]] == [(0.5, 0.5)]
    twin = net()
    with seeded(twin, data(16), method=PerExample(clip=0.5), sampling=Poisson(batch=4), budget=noise) as run:
        train(run, twin)
        assert run.epsilon == statement["epsilon"]


def test_whole_users_are_drawn() -> None:
    """Each step's chunks are the records of users, all of each."""
    model, count = net(), 0
    images = data().tensors[0]
    with seeded(
        model, TensorDataset(images, torch.tensor(USERS)), method=Batch(record_groups="user"), users=USERS,
        sampling=Poisson(batch=4), physical_batch=3, budget=budget(8),
    ) as run:  # fmt: skip
        for step in run.loader:
            owners: list[int] = []
            for x, owner in step:
                assert len(set(owner.tolist())) == 1
                owners += owner.tolist()
                step.backward(entropy(model, x, owner % 3))
            assert all(owners.count(owner) == 4 for owner in owners)
            count += len(set(owners))
    assert 4 <= count <= 30  # 16 on average


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"users": USERS[:-1]}, "There are 64 records and 63 users: give one id for each record"),
        ({"users": [*USERS[:-1], math.nan]}, "The user of record 63 is nan: give a number or a name"),
        ({"users": [*USERS[:-1], ["Ada"]]}, r"The user of record 63 is \['Ada'\]"),
        ({"users": torch.zeros(64, 2)}, r"The user of record 0 is tensor\(\[0., 0.\]\)"),
        ({"users": USERS, "method": PerExample()}, r"a method that bounds users.*Batch\(record_groups='user'\)"),
        ({"users": USERS, "method": Layerwise()}, r"a method that bounds users.*Batch\(record_groups='user'\)"),
        ({"users": USERS, "method": Batch()}, r"a method that bounds users.*Batch\(record_groups='user'\)"),
        ({"users": None}, r"a method that bounds users.*give the run users="),
    ],
)
def test_users_that_cannot_be_protected_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        seeded(net(), **{"method": Batch(record_groups="user"), "sampling": Poisson(batch=4)} | options)
