"""What a run says of itself, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import budget, data, entropy, net, same, seeded, train
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import privet
from privet import (
    Budget,
    ConfigError,
    PerExample,
    Poisson,
    PrivetError,
    Refused,
    Run,
)


@pytest.mark.parametrize("level", ["system", "seeded"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "method",
    [
        PerExample(clip=0.5),
        PerExample(clip={"a": 0.5, "b": 1.0}, groups={"a": ["0.*"], "b": ["*"]}),
        pytest.param(PerExample(clip=0.5, adaptive=True), id="adaptive"),
    ],
)
def test_the_statement(method: PerExample, steps: int, level: Any) -> None:
    model = net()
    with seeded(
        model, method=method, budget=budget(4, noise=1.0), noise_level=level, seed=3 if level == "seeded" else None
    ) as run:
        for step, _ in zip(run.loader, range(steps), strict=False):
            for x, y in step:
                step.backward(entropy(model, x, y))
            if run.steps_done == steps:
                break
        said = run.statement()
        json.dumps(said)
        assert said["unit"] == "record" and said["relation"] == "add_remove"
        assert said["steps"] == said["compositions"] == steps
        assert said["epsilon"] == run.epsilon and said["delta"] == 1e-5
        assert ("no guarantee" in said["epsilon_is"]) is (level == "seeded") and said["noise_level"] == level
        assert said["method"]["name"] == "per-example" and said["sampling"] == {"rule": "Poisson", "batch": 24}
        assert said["records"] == 64 and said["records_are_public"] == "taken from the data"
        assert said["noise_multiplier"] == 1.0 and said["independence_checked"] is True
        assert sum((g["sensitivity"] / g["noise_std"]) ** 2 for g in said["groups"]) == pytest.approx(1.0)
        assert any("number of records" in gap for gap in said["not_covered"])
        assert any("Everything" in gap for gap in said["not_covered"]) is (level == "seeded")


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("method", "needed"), [(PerExample(), True), (privet.Batch(), False)], ids=["", "batch"])
def test_the_statement_tells_of_the_check_where_it_is_needed(method: Any, needed: bool, check: bool) -> None:
    with seeded(net(), method=method, check=check) as run:
        said = run.statement()
    assert said["independence_checked"] == (check if needed else "not needed")
    assert any("switched off" in gap for gap in said["not_covered"]) is (needed and not check)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"physical_batch": 0}, "physical_batch must be at least 1"),
        ({"sampling": Poisson(batch=65)}, "batch is 65, more than the 64 records"),
        ({"relation": "swap"}, "relation is 'swap'"),
        ({"noise_level": "loud", "seed": None}, "level is 'loud'"),
        ({"noise_level": "system"}, "takes no seed"),
        ({"seed": None}, "needs a whole number"),
        ({"records": -5}, "records"),
        pytest.param({"records": 0}, "records"),
        ({"loader_options": {"batch_size": 1}}, "loader_options has batch_size, but the sampling rule"),
        ({"loader_options": {"shuffle": True, "num_workers": 0}}, "loader_options has shuffle, but"),
        ({"loader_options": {"sampler": None}}, "has sampler"),
        ({"loader_options": {"batch_sampler": None, "drop_last": False}}, "has batch_sampler, drop_last"),
        ({"loader_options": {"workers": 2}}, "does not take these loader_options: .*workers"),
        ({"loader_options": {"persistent_workers": True}}, "does not take these loader_options: .*persistent_workers"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], sentence: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=sentence):
        seeded(model, **options)
    assert not any(m._forward_hooks for m in model.modules())


def test_data_sets_that_cannot_be_sampled_are_refused() -> None:
    with pytest.raises(ConfigError, match="no length"):
        seeded(net(), iter(()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="empty"):
        seeded(net(), TensorDataset(torch.ones(0, 2)))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (nn.LazyLinear(3), r"'1\.weight' does not know its size"),
        (nn.Linear(36, 3, dtype=torch.complex64), r"'1\.weight' has torch\.complex64"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_that_cannot_be_trained_are_refused_by_name(layer: nn.Module, sentence: str) -> None:
    for method in (PerExample(), privet.Batch(), privet.Ternary()):
        with pytest.raises(Refused, match=sentence):
            seeded(nn.Sequential(nn.Flatten(), layer), method=method)


def test_a_run_that_cannot_begin_leaves_no_hooks() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, i: int) -> Any:
            raise OSError("file gone")

    model = net()
    with pytest.raises(OSError, match="file gone"):
        seeded(model, Broken())
    assert not any(m._forward_hooks for m in model.modules())


def test_non_finite_records_change_nothing() -> None:
    clean, dirty = data(), data()
    dirty.tensors[0][:5] = math.nan
    clean.tensors[0][:5] = 0
    outcomes = []
    for dataset in (clean, dirty):
        model = net()

        def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return entropy(model, x, y) * x.flatten(1).norm(dim=1)  # zero for a record of zeros

        with seeded(model, dataset, check=False) as run:
            outcomes.append(train(run, model, losses))
    assert all(torch.isfinite(g).all() for step in outcomes[1] for g in step.values())
    same(*outcomes)


def test_a_run_that_cannot_begin_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.ledger"
    foreign.write_text("not a ledger")
    model = net()
    with pytest.raises(PrivetError):
        Run(
            model,
            data(),
            method=PerExample(),
            sampling=Poisson(batch=8),
            budget=Budget(noise=1.0, steps=1, delta=1e-5),
            ledger=foreign,
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert foreign.read_text() == "not a ledger"


def test_a_delta_that_protects_nobody_is_named_in_the_statement() -> None:
    for delta, named in ((1e-5, False), (0.1, True)):
        with Run(
            net(),
            data(),
            method=PerExample(),
            sampling=Poisson(batch=8),
            budget=Budget(noise=1.0, steps=1, delta=delta),
        ) as run:
            assert any("not below 1/records" in gap for gap in run.statement()["not_covered"]) is named


def test_public_names_can_be_listed_and_found() -> None:
    assert {"Run", "Poisson", "PerExample", "Batch"} <= set(dir(privet))
    assert all(getattr(privet, name) is not None for name in dir(privet))


def test_what_errors_and_the_readme_name_is_there_without_further_imports() -> None:
    code = "import privet; print(privet.nn.batchnorm_to_groupnorm)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
