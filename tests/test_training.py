"""Whole trainings: what they write, what they hide, how they stop and go on."""

from __future__ import annotations

import errno
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from privet import BudgetExceeded, CheckpointError, ConfigError, Ledger, LedgerError, Refused, checkpoint
from privet.accounting import epsilon
from privet.data import load
from privet.nn import build
from privet.training import Progress, TrainConfig, default_delta, settle, to_json, train
from privet.training import loop as training_loop
from privet.training.report import write_report


def config(tmp_path: Path, **options: Any) -> TrainConfig:
    """Unsampled steps are accounted by a closed form, which keeps these tests fast."""
    fast: dict[str, Any] = {
        "sampling": "partition", "batch": 512, "epochs": 3, "lr": 1.0, "noise": 2.0, "delta": 1e-5, "threads": 1,
        "model_options": {"hidden": [16]}, "method_options": {"clip": 0.1}, "out": str(tmp_path / "run"),
        "ledger": str(tmp_path / "digits.ledger"),
    }  # fmt: skip
    return TrainConfig(**fast | options)


def stop_after(steps: int) -> tuple[list[Progress], dict[str, Any]]:
    """Callbacks that ask for a stop once so many steps were done."""
    seen: list[Progress] = []
    return seen, {"on_progress": seen.append, "stop": lambda: len(seen) >= steps}


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_run_leaves_model_statement_metrics_configuration_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_loop, "write_report", write_report)
    result = train(config(tmp_path))
    assert files(tmp_path) == {"run", "digits.ledger"}
    written = {"config.toml", "metrics.jsonl", "model.safetensors", "privacy.json", "report.html"}
    assert files(tmp_path / "run") == written
    assert "</svg>" in (tmp_path / "run" / "report.html").read_text()
    assert result.ended == "finished" and result.statement["steps"] == 9
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    spent = Ledger(tmp_path / "digits.ledger").spent()
    assert statement["epsilon"] == pytest.approx(epsilon(spent, 1e-5).epsilon)
    assert (
        statement["records_are_public"] == "taken from the data" and "divided by 16" in statement["data"]["description"]
    )
    assert set(statement["versions"]) == {"privet", "torch", "dp-accounting"}
    assert any("held-out records" in gap and "without noise" in gap for gap in statement["not_covered"])
    model = build("mlp", input_shape=(1, 8, 8), classes=10, hidden=[16])
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))


def test_the_last_step_is_told_with_what_all_of_them_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop._Clock, "due", lambda self: False)
    seen: list[Progress] = []
    result = train(config(tmp_path), on_progress=seen.append)
    cost = pytest.approx(result.statement["epsilon"])
    assert [now.epsilon for now in seen] == [*[None] * 8, cost, cost]
    assert seen[-1].accuracy == result.accuracy and seen[-1].step == seen[-2].step


def test_metrics_hold_nothing_of_private_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 9, by replay: other labels in training, the same gradients, and every number must be the same."""

    def lines(name: str, flip: bool) -> list[dict[str, Any]]:
        real = training_loop.Records.__getitems__

        def items(self: Any, indices: list[int]) -> Any:
            x, y = real(self, indices)
            return x, (y + 1) % 10 if flip else y

        monkeypatch.setattr(training_loop.Records, "__getitems__", items)
        # A learning rate that moves nothing: then all that the records can reach is what is logged of them.
        train(config(tmp_path, out=str(tmp_path / name), lr=1e-30, momentum=0.0))
        monkeypatch.setattr(training_loop.Records, "__getitems__", real)
        text = (tmp_path / name / "metrics.jsonl").read_text()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text.splitlines()]

    one, other = lines("one", False), lines("other", True)
    assert len(one) == 3 and one == other
    assert set(one[0]) == {"step", "epoch", "accuracy", "loss", "diagnostics"}


def test_without_a_report_there_are_no_diagnostics(tmp_path: Path) -> None:
    train(config(tmp_path, report=False))
    assert "report.html" not in files(tmp_path / "run")
    assert "diagnostics" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_accuracy_is_that_of_the_released_model_on_held_out_records(tmp_path: Path) -> None:
    result = train(config(tmp_path, ema=0.5))
    model = build("mlp", input_shape=(1, 8, 8), classes=10, hidden=[16])
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    x, y = load("digits").test.tensors
    assert result.accuracy == pytest.approx((model(x).argmax(1) == y).double().mean().item())


def test_auroc_is_that_of_the_released_model_on_held_out_records_of_two_classes(tmp_path: Path) -> None:
    """The oracle counts pairs, one of each class. One class is four times the other."""
    rng = np.random.default_rng(0)
    y = (np.arange(600) % 5 == 0).astype(int)
    np.savez(tmp_path / "two.npz", X=rng.normal(size=(600, 3)) + y[:, None], y=y)
    path = str(tmp_path / "two.npz")
    result = train(
        config(
            tmp_path,
            data=path,
            batch=256,
            ema=0.5,
            noise=0.5,
            noise_level="seeded",
            ledger=str(tmp_path / "two.ledger"),
        )
    )
    model = build("mlp", input_shape=(3,), classes=2, hidden=[16])
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    x, truth = load(path).test.tensors
    with torch.no_grad():
        lead = model(x).double() @ torch.tensor([-1.0, 1.0]).double()
    above = lead[truth == 1][:, None] - lead[truth == 0][None]
    expected = ((above > 0).double() + 0.5 * (above == 0).double()).mean().item()
    assert 0.6 < expected < 1 and result.auroc == pytest.approx(expected, abs=1e-9)
    assert result.to_json()["auroc"] == result.auroc
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert statement["held_out"]["auroc"] == result.auroc
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [set(line) >= {"accuracy", "auroc"} for line in lines] == [True] * 3
    assert lines[-1]["auroc"] == result.auroc


def test_auroc_is_told_only_where_it_is_defined(tmp_path: Path) -> None:
    result = train(config(tmp_path, epochs=1))
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert result.auroc is None
    assert all("auroc" not in told for told in (result.to_json(), statement["held_out"], metrics))
    scores = torch.tensor([[0.0, 1.0], [2.0, 2.0], [1.0, 0.0]])
    assert training_loop._auroc(scores, torch.tensor([1, 0, 0])) == 1.0
    assert training_loop._auroc(scores, torch.tensor([1, 1, 1])) is None
    assert training_loop._auroc(scores / 0, torch.tensor([1, 0, 0])) is None


def test_the_average_follows_the_weights_and_is_what_is_released(tmp_path: Path) -> None:
    plain = train(config(tmp_path, noise_level="seeded", out=str(tmp_path / "plain")))
    averaged = train(config(tmp_path, noise_level="seeded", ema=0.9, out=str(tmp_path / "averaged")))
    one, other = (load_file(r.out / "model.safetensors") for r in (plain, averaged))
    assert one.keys() == other.keys()
    assert not torch.equal(one["1.weight"], other["1.weight"])


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "schedule": "cosine"},
        {"precision": "bf16", "physical_batch": 100},
        {"sampling": "fixed-size", "relation": "replace_one", "steps": 2, "epochs": None},
        {"sampling": "poisson", "steps": 2, "epochs": None, "validation": 0.2, "records": 1200},
        {"workers": 1, "epochs": 1},
    ],
    ids=str,
)
def test_other_ways_to_train(tmp_path: Path, options: dict[str, Any]) -> None:
    result = train(config(tmp_path, **options))
    assert result.ended == "finished" and 0 <= (result.accuracy or -1) <= 1


def test_seeded_runs_repeat_and_others_do_not(tmp_path: Path) -> None:
    def weights(name: str, level: Any) -> torch.Tensor:
        train(config(tmp_path, noise_level=level, out=str(tmp_path / name), epochs=1))
        return load_file(tmp_path / name / "model.safetensors")["1.weight"]

    assert torch.equal(weights("a", "seeded"), weights("b", "seeded"))
    assert not torch.equal(weights("c", "system"), weights("d", "system"))


def test_stopping_leaves_a_run_that_goes_on_and_pays_for_each_step_once(tmp_path: Path) -> None:
    seen, callbacks = stop_after(4)
    options = {"sampling": "poisson", "epochs": None, "steps": 6, "noise": None, "epsilon": 8.0}
    first = train(config(tmp_path, **options), **callbacks)
    assert first.ended == "interrupted" and first.statement["steps"] == 4 == len(seen)
    assert "model.safetensors" not in files(first.out)
    (units,) = [count for _, count in Ledger(first.ledger).spent()]
    assert units == 4
    with (first.out / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "acc')  # what a power cut may leave
    second = train(config(tmp_path, **options, ledger=str(first.ledger)), resume=first.out)
    assert all(json.loads(line) for line in (first.out / "metrics.jsonl").read_text().splitlines())
    assert second.ended == "finished" and second.statement["steps"] == 6
    (record,) = Ledger(first.ledger).runs()
    assert record.units == 6 and record.finished
    with pytest.raises(CheckpointError, match="finished"):
        train(config(tmp_path), resume=first.out)


def test_a_stop_within_a_step_releases_and_charges_nothing(tmp_path: Path) -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 7  # made-up records first, then chunks of 100

    result = train(config(tmp_path, physical_batch=100), stop=stop)
    assert result.ended == "interrupted" and result.statement["steps"] == 0
    assert Ledger(result.ledger).spent() == []
    state = checkpoint.read(result.out / "checkpoint.pt")["model"]
    fresh = build("mlp", input_shape=(1, 8, 8), classes=10, hidden=[16], seed=0).state_dict()
    assert all(torch.equal(state[k], fresh[k]) for k in fresh)


def test_a_crash_after_the_checkpoint_is_paid_for(tmp_path: Path) -> None:
    """The steps since the checkpoint are done again, and the budget ends the run before its plan."""

    def crash(progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    options = {"sampling": "poisson", "epochs": None, "steps": 6, "noise": None, "epsilon": 8.0}
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path, **options), on_progress=crash)
    ledger = tmp_path / "digits.ledger"
    result = train(config(tmp_path, **options, ledger=str(ledger)), resume=tmp_path / "run")
    assert result.ended == "budget" and result.statement["steps"] == 2
    assert result.statement["compositions"] == 6 and result.statement["epsilon"] <= 8.0


def test_the_data_sets_budget_ends_training_and_the_model_so_far_is_released(tmp_path: Path) -> None:
    with Ledger(tmp_path / "digits.ledger") as ledger:
        ledger.set_budget(4.5, 1e-5)  # two epochs at noise 2 cost 3.2 and three 4.1; four would cost 4.8
    result = train(config(tmp_path, epochs=6))
    assert result.ended == "budget" and 0 < result.statement["steps"] < 18
    assert result.statement["epsilon"] <= 4.5 and (result.out / "model.safetensors").exists()
    with pytest.raises(BudgetExceeded):
        train(config(tmp_path, out=str(tmp_path / "next")))
    assert not (tmp_path / "next").exists()


def batchnorm(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))


def wrong_scores(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def lazy(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"data": "nonsense"}, ConfigError),
        ({"model": "nonsense"}, ConfigError),
        ({"model": "transformer", "model_options": {}}, ConfigError),
        ({"model": f"{__name__}:wrong_scores", "model_options": {}}, ConfigError),
        ({"model": f"{__name__}:lazy", "model_options": {}}, ConfigError),
        ({"model": f"{__name__}:batchnorm", "model_options": {}}, Refused),
        ({"method_options": {"clip": -1.0}}, ConfigError),
        ({"batch": 100_000}, ConfigError),
        ({"epsilon": -1.0}, ConfigError),
        ({"delta": 1.0}, ConfigError),
        ({"sampling": "fixed-size"}, ConfigError),
        ({"data": "mnist", "data_dir": "nowhere"}, ConfigError),
        ({"ledger": "no/such/folder/x.ledger"}, LedgerError),
    ],
    ids=str,
)
def test_what_cannot_be_trained_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        train(config(tmp_path, **options | {"out": str(tmp_path / "deep" / "run")}))
    assert files(tmp_path) == set()


def test_a_full_disk_before_the_first_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        train(config(tmp_path))
    assert files(tmp_path) == set()


def test_a_full_disk_at_the_end_leaves_a_run_that_can_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.write_whole

    def full(path: Path, write: Any) -> None:
        if path.name == "model.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, write)

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        train(config(tmp_path))
    monkeypatch.undo()
    ledger = tmp_path / "digits.ledger"
    before = [count for _, count in Ledger(ledger).spent()]
    result = train(config(tmp_path, ledger=str(ledger)), resume=tmp_path / "run")
    assert result.ended == "finished" and (result.out / "model.safetensors").exists()
    assert [count for _, count in Ledger(ledger).spent()] == before


def test_other_things_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(Refused):
        train(config(tmp_path, model=f"{__name__}:batchnorm", model_options={}))
    assert files(tmp_path) == {"run"} and files(tmp_path / "run") == {"notes.txt"}
    assert train(config(tmp_path, epochs=1)).ended == "finished"
    with pytest.raises(ConfigError, match="already holds a run"):
        train(config(tmp_path))


def test_foreign_ledgers_and_checkpoints_are_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "other.ledger", dataset="mnist").close()
    with pytest.raises(LedgerError, match="mnist"):
        train(config(tmp_path, ledger=str(tmp_path / "other.ledger")))
    (tmp_path / "text.ledger").write_text("no ledger, and long enough to be read as a header of one " * 9)
    with pytest.raises(LedgerError):
        train(config(tmp_path, ledger=str(tmp_path / "text.ledger")))
    Ledger(tmp_path / "byhand.ledger").close()
    assert train(config(tmp_path, ledger=str(tmp_path / "byhand.ledger"), epochs=1)).ended == "finished"
    folder = tmp_path / "half"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(config(tmp_path), resume=folder)
    (folder / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        train(config(tmp_path), resume=folder)


@pytest.mark.skipif(sys.platform == "win32", reason="folders are held by locks of POSIX")
def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    first = train(config(tmp_path), **stop_after(2)[1])
    assert first.ended == "interrupted"
    held = config(tmp_path, ledger=str(first.ledger))

    def another(_: Progress) -> None:
        with pytest.raises(ConfigError, match="being trained by another process"):
            train(held, resume=first.out)

    assert train(held, resume=first.out, on_progress=another).ended == "finished"


def test_a_resumed_run_does_not_invent_a_new_ledger(tmp_path: Path) -> None:
    _, callbacks = stop_after(1)
    first = train(config(tmp_path), **callbacks)
    first.ledger.unlink()
    with pytest.raises(LedgerError, match="does not exist"):
        train(config(tmp_path, ledger=str(first.ledger)), resume=first.out)
    assert not first.ledger.exists()


def test_open_options_are_settled_from_public_facts() -> None:
    digits = load("digits")
    chosen = settle(TrainConfig(), digits)
    assert (chosen.epsilon, chosen.delta, chosen.epochs, chosen.batch, chosen.lr) == (3.0, 1e-5, 30.0, 128, 0.5)
    assert settle(TrainConfig(noise=1.0), digits).epsilon is None
    assert settle(TrainConfig(noise=1.0, epsilon=2.0), digits).epochs is None
    assert settle(TrainConfig(records=10**6), digits).delta == 1e-7
    assert all(default_delta(n) <= 1 / (10 * n) * (1 + 1e-9) for n in (1, 9, 10, 11, 99_999, 100_000))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"ema": 1.0},
        {"records": 0},
        {"threads": 0},
        {"workers": -1},
    ],
    ids=str,
)
def test_senseless_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainConfig(**wrong)


def test_json_has_no_bare_infinities() -> None:
    assert json.loads(to_json({"a": float("inf"), "b": [float("nan")], "c": (1,)})) == {
        "a": "inf",
        "b": ["nan"],
        "c": [1],
    }


def test_the_written_configuration_is_toml(tmp_path: Path) -> None:
    written = tomllib.loads(config(tmp_path, bounds={"age": (0, 120)}).to_toml())
    assert written["method"] == {"name": "per-example", "clip": 0.1} and written["bounds"] == {"age": [0, 120]}
    assert "out" not in written and "json" not in written
