"""What runs meet under each sampling rule, and pay for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import budget, entropy, net, seeded, train
from torch import Tensor, nn
from torch.utils.data import Dataset

from privet import (
    Budget,
    ConfigError,
    FixedSize,
    Partition,
    Poisson,
)
from privet.accounting import epsilon


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(i)), i


@pytest.mark.parametrize("workers", [0, 2])
def test_a_partition_meets_each_record_once_per_epoch_and_pays_once(workers: int) -> None:
    model = net()
    met: list[int] = []

    def losses(model: nn.Module, x: Tensor, i: Tensor) -> Tensor:
        met.extend(i.tolist())
        return entropy(model, x, i % 3)

    with seeded(
        model, Numbered(), sampling=Partition(batch=8), budget=Budget(noise=1.0, epochs=3, delta=1e-5), check=False,
        loader_options={"num_workers": workers}, physical_batch=3, noise_level="system", seed=None,
    ) as run:  # fmt: skip
        orders = []
        for epoch in range(1, 4):
            met.clear()
            for step in run.loader:
                for batch in step:
                    step.backward(losses(model, *batch))
                assert run.units_spent == epoch
            assert sorted(met) == list(range(40))
            orders.append(list(met))
        assert run.steps_done == 15 and run.finished
        assert orders[0] != orders[1] != orders[2]
        assert run.guarantee().epsilon == pytest.approx(epsilon([(run.plan.mechanism, 3)], 1e-5).epsilon)


def test_a_fixed_size_sample_needs_replace_one() -> None:
    model = net()
    with pytest.raises(ConfigError, match="replace_one"):
        seeded(model, sampling=FixedSize(batch=8))
    assert not any(m._forward_hooks for m in model.modules())
    with seeded(model, sampling=FixedSize(batch=8), relation="replace_one", budget=budget(3, noise=1.0)) as run:
        train(run, model)
        assert run.statement()["groups"][0]["noise_std"] == pytest.approx(2 * 0.5)


def test_the_public_number_of_records_sets_the_rate() -> None:
    model, counts = net(), []
    with seeded(model, records=640, sampling=Poisson(batch=64), budget=budget(20), check=False) as run:
        assert run.plan.mechanism.rate == pytest.approx(0.1)

        def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            counts.append(len(x))
            return entropy(model, x, y)

        train(run, model, losses)
        statement = run.statement()
        assert statement["records"] == 640 and "stated" in statement["records_are_public"]
    assert sum(counts) / 20 == pytest.approx(6.4, abs=3)  # a tenth of the true 64
