"""Scattering features, record by record and kept on the disk; and the layer that scales them, privately or for free."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Batch, Budget, BudgetExceeded, ConfigError, Ledger, Partition, PerExample, Poisson, Refused, Run
from privet.accounting import Mechanism, Relation, Spent, epsilon
from privet.audit.finished import FinishedRun
from privet.cli._options import resolve
from privet.data import Data, features, load, scattering, sets
from privet.nn import Standardise, build, normalised, standardise_of
from privet.nn.normalise import moments
from privet.sampling import SamplingRule
from privet.training import TrainConfig, load_data, train
from privet.training import loop as training_loop

DELTA = 1e-5
ASKED = Mechanism(kind="gaussian", noise_multiplier=8.0)


def images(shape: tuple[int, ...] = (1, 8, 8), train: int = 7, public: int = 0) -> Data:
    make = torch.Generator().manual_seed(3)

    def records(count: int) -> TensorDataset:
        return TensorDataset(torch.rand(count, *shape, generator=make), torch.arange(count) % 2)

    return Data(
        name="tiny", train=records(train), test=records(3), public=records(public) if public else None,
        classes=2, labels=("a", "b"), input_shape=shape, description="Made up.",
    )  # fmt: skip


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many records went through kymatio, call by call."""
    pytest.importorskip("kymatio")
    calls: list[int] = []
    real = features._transform

    def counting(image: tuple[int, int]) -> features.Transform:
        transform = real(image)

        def counted(x: Tensor) -> Tensor:
            calls.append(len(x))
            return transform(x)

        return counted

    monkeypatch.setattr(features, "_transform", counting)
    yield calls


# The transform


@pytest.mark.parametrize(("image", "shape"), [((1, 28, 28), (81, 7, 7)), ((3, 32, 32), (243, 8, 8))])
def test_shapes_are_those_of_the_paper(computed: list[int], image: tuple[int, ...], shape: tuple[int, ...]) -> None:
    made = scattering(images(image, train=2))
    assert made.input_shape == shape and made.train.tensors[0].shape == (2, *shape)
    assert made.train.tensors[0].dtype == torch.float32 and not made.train.tensors[0].requires_grad
    assert made.description.startswith("Made up. ") and "scattering coefficients (J = 2, L = 8" in made.description


def test_a_records_features_do_not_depend_on_the_others(
    computed: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = images(train=11)
    whole = scattering(data).train.tensors[0]
    monkeypatch.setattr(features, "_BATCH", 3)
    assert torch.equal(scattering(data).train.tensors[0], whole)
    assert torch.equal(scattering(data, cache=tmp_path).train.tensors[0], whole)
    monkeypatch.setattr(features, "_BATCH", 1)
    alone = scattering(data).train.tensors[0]
    assert torch.equal(alone, whole) and max(computed) == 11 and computed[-1] == 1
    assert whole[0].std() > 0 and not torch.equal(whole[0], whole[1])


def test_the_features_are_scattering_coefficients(computed: list[int]) -> None:
    """A grey image has no wavelet coefficients, and twice the contrast is twice the features."""
    data = images((2, 8, 8), train=2)
    x, y = data.train.tensors
    x[0], x[1, 1] = 0.5, 2 * x[1, 0]
    found = scattering(Data(**{**vars(data), "train": TensorDataset(x, y)})).train.tensors[0]
    assert found[0, [0, 81]].allclose(torch.tensor(0.5), atol=1e-3)  # a low pass of the channel
    assert found[0].unflatten(0, (2, 81))[:, 1:].abs().max() < 1e-3
    assert torch.allclose(found[1, 81:], 2 * found[1, :81], rtol=1e-4, atol=1e-6)


def test_the_cache_is_used_and_is_for_its_owner_only(computed: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "features"
    first = scattering(images(public=4), cache=folder)
    assert sum(computed) == 7 + 3 + 4
    old = os.umask(0)
    try:
        second = scattering(images(public=4), cache=folder)
    finally:
        os.umask(old)
    assert sum(computed) == 7 + 3 + 4
    for one, other in ((first.train, second.train), (first.test, second.test), (first.public, second.public)):
        assert one is not None and other is not None
        assert torch.equal(one.tensors[0], other.tensors[0]) and torch.equal(one.tensors[1], other.tensors[1])
    fresh = scattering(images(public=4))
    assert torch.equal(fresh.train.tensors[0], second.train.tensors[0])
    kept = list(folder.iterdir())
    assert len(kept) == 3 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    second.train.tensors[0].zero_()  # in memory; the file stays
    assert torch.equal(scattering(images(public=4), cache=folder).train.tensors[0], first.train.tensors[0])


def test_other_records_and_versions_have_files_of_their_own(
    computed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = images()
    scattering(data, cache=tmp_path)
    data.train.tensors[0][3, 0, 0, 0] += 1e-6
    moved = scattering(data, cache=tmp_path)
    assert computed == [7, 3, 7]
    assert torch.equal(moved.train.tensors[0], scattering(data).train.tensors[0])
    del computed[:]
    monkeypatch.setattr(features, "version", lambda _: "another")
    scattering(data, cache=tmp_path)
    assert computed == [7, 3]
    monkeypatch.setattr(features, "ANGLES", 4)
    assert scattering(data, cache=tmp_path).input_shape == (25, 2, 2) and computed == [7, 3] * 2


@pytest.mark.parametrize("harm", ["cut", "flip", "text", "checksum", "longer"])
def test_a_damaged_file_is_computed_again(
    computed: list[int], tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = scattering(images(), cache=tmp_path).train.tensors[0].clone()
    (path,) = (p for p in tmp_path.iterdir() if p.stat().st_size > 7 * right[0].numel() * 4)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes({
        "cut": content[:middle],
        "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "text": b"no features at all",
        "checksum": content[:-1] + bytes([content[-1] ^ 1]),
        "longer": content + b"more",
    }[harm])  # fmt: skip
    del computed[:]
    assert torch.equal(scattering(images(), cache=tmp_path).train.tensors[0], right)
    assert computed == [7] and "damaged" in caplog.text and path.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_time_only(
    computed: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    found = scattering(images(), cache=tmp_path / "file")
    assert torch.equal(found.train.tensors[0], scattering(images()).train.tensors[0])
    assert "cannot be kept" in caplog.text


def test_what_cannot_be_transformed_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of images.*shape \(5,\).*leave --features out"):
        scattering(images((5,)))
    with pytest.raises(ConfigError, match="at least 4 x 4 pixels"):
        scattering(images((1, 3, 8)))
    monkeypatch.setitem(sys.modules, "kymatio", None)
    monkeypatch.setitem(sys.modules, "kymatio.scattering2d.frontend.torch_frontend", None)
    with pytest.raises(ConfigError, match=r'pip install "privet\[scattering\]"'):
        scattering(images())
    (tmp_path / "t.csv").write_text("a,b\n" + "1,x\n2,y\n" * 20)
    with pytest.raises(ConfigError, match="of images"):
        train(TrainConfig(data=str(tmp_path / "t.csv"), target="b", features="scattering"))


def test_records_are_split_before_they_are_transformed(
    computed: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sets.SETS, "tiny", lambda _: images(train=40))
    raw = load("tiny", validation=0.3, public=0.3)
    found = load("tiny", validation=0.3, public=0.3, features="scattering", data_dir=tmp_path)
    assert len(list((tmp_path / "features").iterdir())) == 3
    assert raw.public is not None and found.public is not None
    wanted = scattering(raw)
    assert torch.equal(found.train.tensors[0], wanted.train.tensors[0])
    assert torch.equal(found.test.tensors[1], raw.test.tensors[1])
    assert len(found.public) == len(raw.public)
    other = tmp_path / "elsewhere"
    load("tiny", features="scattering", data_dir=tmp_path, features_cache=other)
    assert len(list(other.iterdir())) == 2


# Models and the free normalisation


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("scatter-mnist-cnn", (81, 7, 7), 20_778),
        ("scatter-cifar-cnn", (243, 8, 8), 253_386),
        ("linear", (81, 7, 7), 39_700),
    ],
)
def test_models_have_the_parameters_that_they_state(name: str, shape: tuple[int, ...], parameters: int) -> None:
    model = build(name, input_shape=shape, classes=10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.randn(2, *shape)).shape == (2, 10)


def test_group_normalisation_reads_one_record_and_has_no_weights() -> None:
    for channels, groups in ((81, 27), (243, 81), (1, 1), (3, 1), (64, 16), (2, 1)):
        model = normalised(nn.Identity(), "group", (channels, 4, 4))
        assert model.get_submodule("normalise").num_groups == groups
        assert not list(model.parameters()) and not list(model.buffers())
    x = torch.randn(5, 6, 4, 4) * 100
    model = normalised(nn.Identity(), "group", (6, 4, 4))
    assert torch.allclose(model(x)[2:3], model(x[2:3]), atol=1e-6) and model(x).std() == pytest.approx(1, abs=0.01)
    assert normalised(model, "none", (6, 4, 4)) is model
    with pytest.raises(ConfigError, match="'private' or 'none'"):
        normalised(model, "group", (6,))


def test_the_command_line_chooses_model_and_scale_for_features() -> None:
    found = resolve({"data": "mnist", "features": "scattering"})
    assert (found.model, found.model_options, found.normalise) == ("linear", {}, "group")
    assert found.lr == 3.0  # of the preset
    found = resolve({"data": "mnist", "features": "scattering", "normalise": "private", "model": "scatter-mnist-cnn"})
    assert (found.model, found.normalise) == ("scatter-mnist-cnn", "private")
    assert resolve({"data": "mnist", "features": "none"}) == resolve({"data": "mnist"})


# Queries over all records


def run_on(
    x: Tensor,
    *,
    relation: Relation = "add_remove",
    records: int = 50,
    queries: tuple[float, ...] = (8.0,),
    budget: Budget | None = None,
    sampling: SamplingRule | None = None,
    **options: Any,
) -> Run:
    model = normalised(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 2)), "private", tuple(x.shape[1:]))
    return Run(
        model,
        TensorDataset(x, torch.zeros(len(x), dtype=torch.int64)),
        method=options.pop("method", PerExample(clip=1.0)),
        sampling=sampling or Poisson(batch=10),
        budget=budget or Budget(delta=DELTA, noise=1.5, steps=20),
        relation=relation,
        records=records,
        queries=queries,
        keep_memory=False,
        **options,
    )


def ask(run: Run) -> list[tuple[Tensor, float]]:
    return run.query(lambda batch: moments(batch[0]), bounds=(0.4, 0.16), noise=8.0)


def without_noise(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, float]]:
    """What the normalisation asks: the sums before noise, with the noise that they would get."""
    monkeypatch.setattr(run.source, "add_noise", lambda total, std: total)
    return ask(run)


def hostile() -> dict[str, Tensor]:
    base = torch.ones(3, 2, 2)
    return {
        "huge": base * 1e30, "largest": base * torch.finfo(torch.float32).max, "opposite": -base * 1e30,
        "nan": base * math.nan, "half nan": torch.where(torch.eye(2) > 0, math.nan, base), "infinite": base * -math.inf,
        "tiny": base * 1e-30, "zero": base * 0, "fresh axis": torch.eye(3)[:, :1, None].expand(3, 2, 2) * 1e6,
        "cancelling": base * torch.tensor([[1e6, -1e6], [1e6, -1e6]]), "ordinary": base * 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_no_record_moves_the_sums_by_more_than_is_accounted(
    relation: Relation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: (Σ (‖f(D) − f(D')‖ / s)²)^(1/2) ≤ 1/σ, and some record reaches it under add_remove."""
    others = torch.rand(20, 3, 2, 2, generator=torch.Generator().manual_seed(0))

    def asked(*more: Tensor) -> list[tuple[Tensor, float]]:
        with run_on(torch.stack([*others, *more]), relation=relation) as run:
            return without_noise(run, monkeypatch)

    def distance(one: list[tuple[Tensor, float]], other: list[tuple[Tensor, float]]) -> float:
        parts = zip(one, other, strict=True)
        return math.hypot(*(float((a - b).norm()) / std for (a, std), (b, _) in parts))

    answers = {name: asked(x) for name, x in hostile().items()}
    assert all(bool(total.isfinite().all()) for answer in answers.values() for total, _ in answer)
    if relation == "add_remove":
        moves = {name: distance(asked(), answer) for name, answer in answers.items()}
        assert all(moves[name] == 0 for name in ("nan", "half nan", "infinite", "zero"))
        assert max(moves.values()) == pytest.approx(1 / 8, rel=1e-9)
    else:
        moves = {f"{a} for {b}": distance(answers[a], answers[b]) for a in answers for b in answers}
        # the means go from C to −C; squares are never negative, so that theirs cannot
        assert moves["huge for opposite"] == pytest.approx(1 / 8 / math.sqrt(2), rel=1e-9)
    assert max(moves.values()) <= 1 / 8 * (1 + 1e-9)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_both_signs_reach_the_bound(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query whose parts can both be turned around reaches its sensitivity under both relations."""

    def asked(value: float) -> tuple[Tensor, float]:
        with run_on(torch.full((1, 1, 2), value), relation=relation) as run:
            monkeypatch.setattr(run.source, "add_noise", lambda total, std: total)
            return run.query(lambda batch: [batch[0][:, 0]], bounds=[3.0], noise=8.0)[0]

    (one, std), (other, _) = asked(1e9), asked(-1e9)
    move = float((one - other).norm()) if relation == "replace_one" else float(one.norm())
    assert move / std == pytest.approx(1 / 8, rel=1e-9)


def test_a_record_that_is_not_finite_in_one_part_adds_nothing_to_any(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with run_on(x) as run:
        monkeypatch.setattr(run.source, "add_noise", lambda total, std: total)

        def vectors(batch: Any) -> list[torch.Tensor]:
            return [batch[0], torch.where(batch[0][:, :1] == 1, math.nan, batch[0] + 2)]

        (one, _), (other, _) = run.query(vectors, bounds=[9.0, 9.0], noise=8.0)
    assert one.tolist() == [3.0, 4.0] and other.tolist() == [5.0, 6.0]


def test_a_user_adds_no_more_than_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.full((9, 3, 2, 2), 1e20)
    users = ["ann"] * 6 + ["bob"] * 3
    options = {"method": Batch(clip=1.0, record_groups="user"), "sampling": Poisson(batch=5)}
    with run_on(x, users=users, **options) as run:
        both = without_noise(run, monkeypatch)
    with run_on(x[:6], users=users[:6], **options) as run:
        one = without_noise(run, monkeypatch)
    for (a, _), (b, _), bound in zip(both, one, (0.4, 0.16), strict=True):
        assert float(a.norm()) == pytest.approx(2 * bound) and float((a - b).norm()) == pytest.approx(bound)


@pytest.mark.parametrize(("relation", "sides"), [("add_remove", 1), ("replace_one", 2)])
@pytest.mark.parametrize("level", ["seeded", "exact"])
def test_the_noise_has_the_size_that_is_stated(relation: Relation, sides: int, level: str) -> None:
    """s = σ·√2·Δ for each of the two parts; 4000 normals have a deviation within 12% of theirs at 10 sigma."""
    if level == "exact" and relation == "replace_one":
        sampling: SamplingRule = Partition(batch=10)
    else:
        sampling = Poisson(batch=10)
    kind = {"noise_level": level, "seed": 1 if level == "seeded" else None}
    with run_on(torch.zeros(3, 4000), relation=relation, sampling=sampling, **kind) as run:
        answers = ask(run)
    for (noise, std), bound in zip(answers, (0.4, 0.16), strict=True):
        assert std == pytest.approx(8 * math.sqrt(2) * sides * bound, rel=2e-3) and noise.dtype == torch.float64
        assert std >= 8 * math.sqrt(2) * sides * bound * (1 - 1e-12)
        assert float(noise.std()) == pytest.approx(std, rel=0.12) and abs(float(noise.mean())) < 9 * std / 4000**0.5
    (a, s), (b, t) = answers
    assert abs(float(torch.dot(a / s, b / t))) < 9 * 4000**0.5  # of one another, too


def test_a_query_is_paid_before_its_noise_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.ledger") as ledger, run_on(torch.rand(9, 2), ledger=ledger) as run:

        def fail(*_: Any) -> Tensor:
            assert ledger.spent() == [(ASKED, 1)]
            raise OSError("no noise")

        assert ledger.spent() == []
        monkeypatch.setattr(run.source, "add_noise", fail)
        with pytest.raises(OSError, match="no noise"):
            ask(run)
        assert ledger.spent() == [(ASKED, 1)] and run.queries_paid == 1 and run.units_spent == 0
        assert run.epsilon == epsilon([(ASKED, 1)], DELTA).epsilon
        (record,) = ledger.runs()
        assert record.mechanism == run.plan.mechanism  # what the ledger names the run by


def take_steps(run: Run, most: int = 10**6) -> None:
    done = 0
    while not run.finished and done < most:
        for step in run.loader:
            for x, _ in step:
                step.backward(run.model(x).square().sum(1))
            done += 1
            if done == most:
                break


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("sampling", [Poisson(batch=10), Partition(batch=10)])
def test_a_budget_pays_for_the_query_and_the_steps(relation: Relation, sampling: SamplingRule) -> None:
    budget = Budget(delta=DELTA, epsilon=3.0, steps=15)
    with run_on(torch.rand(50, 4), budget=budget, relation=relation, sampling=sampling, queries=(2.0,)) as run:
        with run_on(torch.rand(50, 4), budget=budget, relation=relation, sampling=sampling, queries=()) as plain:
            assert run.noise_multiplier > plain.noise_multiplier
        layer = standardise_of(run.model)
        assert layer is not None
        layer.learn(run, clip=1.0, noise=2.0)
        take_steps(run)
        asked = Mechanism(kind="gaussian", noise_multiplier=2.0, relation=relation)
        spent: Spent = [(asked, 1), (run.plan.mechanism, sampling.units(15, 50))]
        assert run.steps_done == 15
        assert run.epsilon == epsilon(spent, DELTA).epsilon == run.plan.epsilon
        assert 2.9 < run.epsilon <= 3.0
        said = run.statement()
        assert said["compositions"] == sampling.units(15, 50) and said["queries"] == [
            {"noise_multiplier": 2.0, "planned": 1}
        ]
        told = [(Mechanism.from_json(part["mechanism"]), part["count"]) for part in said["spent"]]
        assert told == spent and json.dumps(said["spent"])


def test_steps_that_fit_beside_the_query_are_counted() -> None:
    budget = Budget(delta=DELTA, epsilon=3.0, noise=4.0)
    with run_on(torch.rand(50, 4), budget=budget, queries=(2.5, 2.5), sampling=Partition(batch=25)) as run:
        asked = Mechanism(kind="gaussian", noise_multiplier=2.5)
        most = run.plan.limit
        assert most is not None and run.plan.before == ((asked, 2),)
        assert epsilon([(asked, 2), (run.plan.mechanism, most)], DELTA).epsilon <= 3.0
        assert epsilon([(asked, 2), (run.plan.mechanism, most + 1)], DELTA).epsilon > 3.0
        for _ in range(2):
            run.query(lambda batch: [batch[0]], bounds=[1.0], noise=2.5)
        with pytest.raises(Refused, match="No further query"):
            run.query(lambda batch: [batch[0]], bounds=[1.0], noise=2.5)
        assert run.queries_paid == 2


def test_what_is_asked_again_after_a_crash_is_paid_again_and_ends_the_run_sooner(tmp_path: Path) -> None:
    x = torch.rand(50, 4, generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {
        "budget": Budget(delta=DELTA, epsilon=3.0, steps=40), "queries": (2.5,), "ledger": tmp_path / "l.ledger",
        "sampling": Partition(batch=25),
    }  # fmt: skip
    asked = Mechanism(kind="gaussian", noise_multiplier=2.5)
    with run_on(x, **options) as run:
        run.save(tmp_path / "c.pt")
        run.query(lambda batch: [batch[0]], bounds=[1.0], noise=2.5)
    with run_on(x, **options) as run:
        run.load(tmp_path / "c.pt")
        assert run.queries_paid == 1
        run.query(lambda batch: [batch[0]], bounds=[1.0], noise=2.5)
        take_steps(run)
        assert dict(run.ledger.spent(run=run.id))[asked] == 2
        assert run.steps_done < 40 and run.finished and 2.5 < run.epsilon <= 3.0
        run.save(tmp_path / "c.pt")
    with run_on(x, **options) as run:
        run.load(tmp_path / "c.pt")
        assert run.finished
        with pytest.raises(BudgetExceeded, match="Asking all records again"):
            run.query(lambda batch: [batch[0]], bounds=[1.0], noise=2.5)
        assert run.epsilon <= 3.0
    with run_on(x, **options | {"queries": (2.6,)}) as run, pytest.raises(Exception, match="under another"):
        run.load(tmp_path / "c.pt")


def test_queries_that_cannot_be_are_refused_in_a_sentence() -> None:
    x = torch.rand(50, 4)
    for noise in (0.0, -1.0, math.inf, math.nan, "8"):
        with pytest.raises(ConfigError, match="positive noise multipliers"):
            run_on(x, queries=(noise,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"before training costs epsilon 4.*whole run may cost 3"):
        run_on(x, queries=(1.0,), budget=Budget(delta=DELTA, epsilon=3.0, steps=5))
    with pytest.raises(ConfigError, match="could not tell them apart"):
        run_on(x, queries=(1.5,), sampling=Partition(batch=10))
    with run_on(x) as run:
        with pytest.raises(Refused, match=r"needs as many tensors.*\(50, 4\)"):
            run.query(lambda batch: [batch[0]], bounds=[1.0, 2.0], noise=8.0)
        with pytest.raises(Refused, match="changes with the others in its batch"):
            run.query(lambda batch: [batch[0] - batch[0].mean(0)], bounds=[1.0], noise=8.0)
        run._physical = 20
        for mixed in (
            lambda x: x - x[:1],
            lambda x: x / x.abs().max().clamp(min=1),
            lambda x: x.cumsum(0),
            lambda x: x[:1],
        ):
            with pytest.raises(Refused, match="changes with the others in its batch"):
                run.query(lambda batch, mixed=mixed: [mixed(batch[0])], bounds=[1.0], noise=8.0)  # type: ignore[misc]
        with pytest.raises(Refused, match="change their size"):  # on 20, 20 and 10 records
            run.query(lambda batch: [batch[0][:, : 1 if len(batch[0]) == 10 else 4]], bounds=[1.0], noise=8.0)
        with pytest.raises(ConfigError, match="bounds must be positive"):
            run.query(lambda batch: [batch[0]], bounds=[0.0], noise=8.0)
        with pytest.raises(Refused, match="No further query"):
            run.query(lambda batch: [batch[0]], bounds=[1.0], noise=9.0)
        assert run.queries_paid == 0 and run.epsilon == 0


# The layer that learns from a query


def test_the_layer_learns_mean_and_deviation_of_each_channel() -> None:
    make = torch.Generator().manual_seed(2)
    x = torch.randn(400, 3, 4, 4, generator=make) * torch.tensor([0.2, 0.05, 0.0]).view(3, 1, 1)
    x += torch.tensor([0.1, -0.2, 0.05]).view(3, 1, 1)
    with run_on(x, records=400, queries=(0.01,)) as run:
        layer = standardise_of(run.model)
        assert layer is not None and torch.equal(layer(x), x) and not layer.known
        layer.learn(run, clip=0.5, noise=0.01)
    channels = x.transpose(0, 1).flatten(1)
    assert torch.allclose(layer.mean, channels.mean(1), atol=1e-3) and layer.known
    assert torch.allclose(layer.deviation[:2], channels.std(1)[:2], rtol=0.02)
    floor = 0.01 * math.sqrt(2) * 0.25 / 400
    assert layer.deviation[2] >= math.sqrt(floor) * (1 - 1e-6) and layer.deviation[2] < 0.02
    assert layer(x)[:, 0].std() == pytest.approx(1, rel=0.02)


def test_public_records_give_exact_statistics() -> None:
    x = torch.randn(700, 2, 4, 4, generator=torch.Generator().manual_seed(3)) * torch.tensor([0.2, 5.0]).view(2, 1, 1)
    x = torch.cat([x, torch.full((700, 1, 4, 4), 0.3), torch.zeros(700, 1, 4, 4)], 1)
    layer = Standardise(4)
    layer.learn_from_public(x)
    channels = x.transpose(0, 1).flatten(1)
    assert layer.known and torch.allclose(layer.mean, channels.mean(1), atol=1e-6)
    assert torch.allclose(layer.deviation, torch.tensor([*channels[:2].std(1), 1, 1]), rtol=1e-3)
    assert layer(x)[:, 2:].abs().max() < 1e-6
    with pytest.raises(ConfigError, match="no public records"):
        Standardise(4).learn_from_public(x[:0])


def test_public_statistics_read_no_private_record_and_cost_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": "digits", "model": "mlp", "normalise": "public", "noise": 5.0, "steps": 2, "batch": 64,
        "preset": False, "lr": 0.1, "report": False, "delta": 1e-5,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--public"):
        train(TrainConfig(**options, out=str(tmp_path / "none"), ledger=str(tmp_path / "none.ledger")))
    options |= {"public": 0.2, "out": str(tmp_path / "run"), "ledger": str(tmp_path / "run.ledger")}
    config = TrainConfig(**options)
    result = train(config)
    data = load_data(config)
    assert data.public is not None
    expected = Standardise(data.input_shape[0])
    expected.learn_from_public(data.public.tensors[0])
    released = load_file(result.out / "model.safetensors")
    assert torch.equal(released["normalise.mean"], expected.mean)
    assert torch.equal(released["normalise.deviation"], expected.deviation)
    without = train(replace(config, normalise="none", out=str(tmp_path / "w"), ledger=str(tmp_path / "w.ledger")))
    assert result.statement["epsilon"] == without.statement["epsilon"]


def test_the_divisor_is_public() -> None:
    """Rule 4: with twice the stated number of records, the same sum makes half the mean."""
    found = []
    for records in (100, 200):
        with run_on(torch.full((100, 2), 0.3), records=records, queries=(1e-6,)) as run:
            layer = standardise_of(run.model)
            assert layer is not None
            layer.learn(run, clip=1.0, noise=1e-6)
            found.append(layer.mean.clone())
    assert torch.allclose(found[0], torch.tensor(0.3), atol=1e-4) and torch.allclose(found[1], found[0] / 2, atol=1e-4)


def options(tmp_path: Path, **more: Any) -> TrainConfig:
    fast: dict[str, Any] = {
        "sampling": "partition", "batch": 512, "epochs": 3, "lr": 1.0, "epsilon": 3.0, "delta": DELTA, "threads": 1,
        "model": "linear", "method_options": {"clip": 0.1}, "out": str(tmp_path / "run"),
        "ledger": str(tmp_path / "digits.ledger"), "normalise": "private", "normalise_clip": 1.0,
    }  # fmt: skip
    return TrainConfig(**fast | more)


def stop_after(steps: int) -> dict[str, Any]:
    seen: list[Any] = []
    return {"on_progress": seen.append, "stop": lambda: len(seen) >= steps}


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_resumed_training_neither_pays_nor_draws_the_statistics_again(tmp_path: Path, ema: float | None) -> None:
    first = train(options(tmp_path, ema=ema), **stop_after(2))
    assert first.ended == "interrupted"
    kept = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    assert kept["normalise.known"] and kept["normalise.mean"].abs().sum() > 0
    last = train(options(tmp_path, ema=ema), resume=tmp_path / "run")
    spent = Ledger(tmp_path / "digits.ledger").spent()
    assert spent[0] == (ASKED, 1) and spent[1][1] == 3
    assert last.statement["epsilon"] == epsilon(spent, DELTA).epsilon and 2.9 < last.statement["epsilon"] <= 3.0
    released = load_file(tmp_path / "run" / "model.safetensors")
    for name in ("normalise.mean", "normalise.deviation", "normalise.known"):
        assert torch.equal(released[name], kept[name])
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert said["queries"] == [{"noise_multiplier": 8.0, "planned": 1}] and said["compositions"] == 3
    finished = FinishedRun.open(tmp_path / "run")
    shadow = standardise_of(finished.network(5))
    assert shadow is not None and torch.equal(shadow.mean, released["normalise.mean"])
    assert torch.equal(finished.released().get_submodule("normalise").mean, released["normalise.mean"])


def test_statistics_that_were_lost_in_a_crash_are_paid_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training_loop._Training, "_save", crash)
        with pytest.raises(KeyboardInterrupt):
            train(options(tmp_path))
    assert Ledger(tmp_path / "digits.ledger").spent() == [(ASKED, 1)]
    last = train(options(tmp_path), resume=tmp_path / "run")
    spent = dict(Ledger(tmp_path / "digits.ledger").spent())
    assert spent[ASKED] == 2 and last.statement["epsilon"] <= 3.0
    assert last.ended == "budget" and load_file(tmp_path / "run" / "model.safetensors")["normalise.known"]


def test_a_ledger_without_room_for_the_query_leaves_nothing_behind(tmp_path: Path) -> None:
    with Ledger(tmp_path / "digits.ledger", dataset="digits") as ledger:
        ledger.set_budget(0.1, DELTA)
    with pytest.raises(BudgetExceeded):
        train(options(tmp_path))
    assert not (tmp_path / "run").exists() and Ledger(tmp_path / "digits.ledger").spent() == []


def test_training_on_features_is_repeatable_and_says_so(
    computed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setitem(sets.SETS, "tiny", lambda _: images(train=60))
    more = {"data": "tiny", "features": "scattering", "features_cache": str(tmp_path / "kept"), "batch": 20, "seed": 4}
    results = []
    for name in ("one", "two"):
        place = {"out": str(tmp_path / name), "ledger": str(tmp_path / f"{name}.ledger")}
        train(options(tmp_path, **more, **place, normalise="group", noise_level="seeded"))
        results.append(load_file(tmp_path / name / "model.safetensors"))
    assert sum(computed) == 63
    assert results[0].keys() == {"network.1.weight", "network.1.bias"}
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])
    said = json.loads((tmp_path / "one" / "privacy.json").read_text())
    assert "scattering coefficients" in said["data"]["description"] and said["queries"] == []
