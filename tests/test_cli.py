"""The command line: what scripts rely on, what people see, and what bad input gets."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest

import privet.training.loop as training_loop
from privet import Ledger, PerExample, checkpoint
from privet.accounting import Mechanism, rounded_up
from privet.cli import _options, main
from privet.losses import LOSSES
from privet.methods import METHODS, option, register
from privet.training import TrainConfig

# Unsampled steps are accounted by a closed form, which keeps these tests fast.
FAST = ["--sampling", "partition", "--batch", "512", "--epochs", "2", "--threads", "1", "--quiet"]
PLAN = ["plan", "--records", "60000", "--batch", "256", "--delta", "1e-5"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    out, err = capsys.readouterr()
    return code, out, err


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run(capsys, *args, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """A sentence on standard error, exit code 2, and nothing written."""
    before = sorted(Path().rglob("*"))
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("privet: ") and err.count("\n") == 1 and "Traceback" not in err
    assert sorted(Path().rglob("*")) == before
    return err


# plan


def test_plan_finds_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    cost = answer(capsys, *PLAN, "--steps", "14062", "--noise", "1.1")
    assert cost["epsilon"] == pytest.approx(2.3817, abs=0.002) and cost["steps"] == 14062
    noise = answer(capsys, *PLAN, "--steps", "14062", "--epsilon", "2")
    assert 1.1 < noise["noise"] < 1.4 and 1.99 <= noise["epsilon"] <= 2
    steps = answer(capsys, *PLAN, "--noise", "1.1", "--epsilon", "2")
    assert 0 < steps["steps"] < 14062 and steps["epsilon"] <= 2
    assert cost.keys() == noise.keys() == steps.keys()
    assert {"epsilon", "delta", "noise", "steps", "epochs", "accountant", "trade_off"} <= cost.keys()


def test_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *PLAN, "--epochs", "4", "--noise", "2", "--sampling", "partition")
    assert code == 0 and "epsilon" in out and "1.0% false alarms, finds at most" in out


def test_plan_says_inf_without_noise(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, *PLAN, "--epochs", "4", "--noise", "0")["epsilon"] == "inf"


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--epsilon", "-1", "--steps", "5"], "epsilon"),
        (["--epsilon", "1"], "two of three"),
        (["--epsilon", "1", "--steps", "5", "--delta", "1"], "delta"),
        (["--noise", "1", "--steps", "5", "--batch", "70000"], "batch"),
        (["--noise", "1", "--steps", "x"], "--steps"),
        (["--noise", "0.01", "--epsilon", "0.1"], "not a single step"),
        (["--epsilon", "1e-3", "--steps", "500000", "--delta", "1e-30"], "noise"),
    ],
)
def test_plan_refuses(capsys: pytest.CaptureFixture[str], args: list[str], names: str) -> None:
    assert names in refused(capsys, *PLAN, *args)


# train


def test_train_with_json_prints_one_object_last(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "train", *FAST)
    assert {"accuracy", "epsilon", "delta", "steps", "noise_multiplier", "out"} <= result.keys()
    assert result["out"] == "runs/digits-per-example-1" and result["interrupted"] is False
    assert 2.9 < result["epsilon"] <= 3 and result["delta"] == 1e-5
    assert Path("runs/digits.ledger").exists() and Path(result["out"], "model.safetensors").exists()
    again = answer(capsys, "train", *FAST)
    assert again["out"] == "runs/digits-per-example-2" and again["ledger_runs"] == 2
    assert again["ledger_epsilon"] > 1.3 * again["epsilon"]


def test_train_tells_people_what_was_protected_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "train", *FAST, "--noise-level", "exact")
    assert code == 0
    for words in ("held-out", "epsilon 2.9", "delta 1e-05", "whether it is in the data", "level exact", "partition",
                  "runs/digits-per-example-1", "digits.ledger", "taken from the data"):  # fmt: skip
        assert words in out
    _, out, _ = run(capsys, "train", *FAST, "--noise-level", "seeded", "--seed", "7")
    assert "privacy    none" in out


def test_train_tells_people_the_auroc_of_two_classes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("table.csv").write_text("age,ill\n" + "1,yes\n2,yes\n2,no\n9,no\n" * 200)
    options = [*FAST, "--batch", "256", "--noise-level", "seeded", "--seed", "1"]
    _, out, _ = run(capsys, "train", "--data", "table.csv", "--target", "ill", *options)
    (told,) = Path("runs").glob("*/privacy.json")
    area = json.loads(told.read_text())["held_out"]["auroc"]
    assert f", AUROC {area:.4f})" in out.splitlines()[0]
    assert "AUROC" not in run(capsys, "train", *options)[1]


def test_the_configuration_of_a_run_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    first = Path(answer(capsys, "train", *FAST, "--clip", "0.2", "--lr", "0.7", "--momentum", "0.5")["out"])
    second = Path(answer(capsys, "train", str(first / "config.toml"), "--quiet")["out"])
    assert first != second
    assert (first / "config.toml").read_text() == (second / "config.toml").read_text()
    assert tomllib.loads((first / "config.toml").read_text())["method"]["clip"] == 0.2


def test_everything_on_the_command_line_can_stand_in_toml() -> None:
    parser = argparse.ArgumentParser()
    _options.add_train_options(parser)
    words = {a.dest for a in parser._actions} - {"help"}
    of_methods = {f"method.{f.name}" for method in METHODS.values() for f in fields(method)}  # type: ignore[arg-type]
    of_losses = {f"loss.{f.name}" for loss in LOSSES.values() for f in fields(loss)}
    settable = {f.name for f in fields(TrainConfig)} | of_methods | of_losses | {"model.activation"}
    assert words <= settable and settable - words == {"method_options", "model_options", "loss_options"}


def test_command_line_over_file_over_preset_over_default() -> None:
    preset = _options.preset("digits", "per-example")
    file = {"lr": 0.25, "steps": 7, "method_options": {"clip": 0.3}}
    chosen = _options.resolve({"lr": 0.125}, file)
    assert chosen.lr == 0.125 and chosen.method_options["clip"] == 0.3
    assert (chosen.steps, chosen.epochs) == (7, None)  # the preset's epochs give way
    assert chosen.batch == preset["batch"] and chosen.seed == 0
    other = _options.resolve({"optimizer": "adam", "model": "mnist-cnn"}, {})
    assert other.lr is None and other.model_options == {}  # the preset's belonged to sgd and to the mlp
    assert _options.resolve({"epsilon": 1.0, "noise": 2.0}, {}).epochs is None
    assert _options.resolve({"preset": False}) == TrainConfig(preset=False)


@pytest.mark.parametrize("data", ["digits", "mnist", "fashion-mnist", "cifar10", "own.csv"])
def test_presets_are_valid(data: str) -> None:
    assert _options.resolve({"data": data}).method_options["clip"] > 0


@pytest.mark.parametrize(
    ("toml", "names"),
    [
        ("lr = ", "line 1"),
        ("\n\nlr = 1\nlr = 2", "line 4"),
        ("learning_rate = 1", "learning_rate"),
        ("batch = 'many'", "batch must be a whole number"),
        ("batch = 2.5", "batch must be a whole number"),
        ("batch = true", "batch must be a whole number"),
        ("sampling = 'random'", "'poisson'"),
        ("[method]\nname = 'per-example'\nclop = 1", "clop"),
        ("[method]\nclip = 'x'", "clip must be a number or a table"),
        ("[method]\nname = 'nonsense'", "nonsense"),
        ("method = 3", "method"),
        ("epochs = 2\nsteps = 3", "epochs or as steps"),
        ("[bounds]\nage = 3", "bounds.age must be a list"),
    ],
)
def test_bad_configurations_are_refused(capsys: pytest.CaptureFixture[str], toml: str, names: str) -> None:
    Path("bad.toml").write_text(toml)
    assert names in refused(capsys, "train", "bad.toml")


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--data", "nonsense"], "nonsense"),
        (["--data", "table.csv"], "target"),
        (["--data", "table.csv", "--target", "height"], "height"),
        (["--data", "gone.csv", "--target", "height"], "gone.csv"),
        (["--data", "mnist", "--data-dir", "."], "train-images-idx3-ubyte"),
        (["--model", "nonsense"], "nonsense"),
        (["--model", "nowhere:factory"], "nowhere"),
        (["--method", "nonsense"], "nonsense"),
        (["--epsilon", "0"], "epsilon"),
        (["--epsilon", "-3"], "epsilon"),
        (["--epsilon", "nan"], "epsilon"),
        (["--delta", "1"], "delta"),
        (["--delta", "0"], "delta"),
        (["--batch", "2000"], "batch"),
        (["--batch", "x"], "--batch must be a whole number"),
        (["--epsilon", "1e-3", "--delta", "1e-30", "--sampling", "poisson", "--epochs", "100000"], "noise"),
        (["--noise", "0.001", "--epsilon", "0.01"], "not a single step"),
        (["--sampling", "fixed-size"], "relation"),
        (["--out", "used"], "already holds a run"),
        (["--out", "table.csv"], "table.csv"),
        (["--out", "table.csv/run"], "table.csv"),
        (["--ledger", "table.csv"], "table.csv"),
        (["--ledger", "mnist.ledger"], "mnist"),
        (["--resume", "used"], "--batch"),
        (["missing.toml"], "missing.toml"),
        (["--unknown"], "--unknown"),
        (["--validation", "2"], "between 0 and 1"),
    ],
)
def test_train_refuses(capsys: pytest.CaptureFixture[str], args: list[str], names: str) -> None:
    Path("table.csv").write_text("age,ill\n" + "1,yes\n2,no\n" * 400)
    Path("used").mkdir()
    Path("used/config.toml").write_text("")
    Ledger("mnist.ledger").close()
    assert names in refused(capsys, "train", *FAST, *args)


def test_resume_refuses_what_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("used").mkdir()
    assert "nowhere" in refused(capsys, "train", "--resume", "nowhere")
    assert "used" in refused(capsys, "train", "--resume", "used")
    Path("used/config.toml").write_text("data = 'digits'")
    assert "checkpoint" in refused(capsys, "train", "--resume", "used")
    Path("used/checkpoint.pt").write_text("nonsense")
    assert "damaged" in refused(capsys, "train", "--resume", "used")
    assert "--clip" in refused(capsys, "train", "--resume", "used", "--clip", "3")


def test_a_table_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("table.csv").write_text("age,ill\n" + "1,yes\n9,no\n" * 300)
    args = ["--data", "table.csv", "--target", "ill", "--sampling", "partition", "--epochs", "2", "--quiet"]
    result = answer(capsys, "train", *args, "--records", "480", "--out", "mine/one")
    assert Path("runs/table.ledger").exists()  # one for the data, wherever its runs are put
    statement = json.loads(Path("mine/one/privacy.json").read_text())
    assert statement["records"] == 480 and statement["records_are_public"] == "stated by the user"
    assert result["delta"] == 1e-4
    config = tomllib.loads(Path("mine/one/config.toml").read_text())
    assert Path(config["data"]).is_absolute() and config["batch"] == 64


def test_bounds_of_columns_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("table.csv").write_text("age,a=b,size,ill\n" + "1,-3,2,yes\n9,4,2,no\n" * 300)
    Path("given.toml").write_text("[bounds]\nage = [0, 50]\nsize = [1, 3]\n")
    args = ["--data", "table.csv", "--target", "ill", "--sampling", "partition", "--epochs", "1", "--quiet"]
    out = answer(capsys, "train", "given.toml", *args, "--bounds", "a=b=-5:5", "--bounds", "age=0:1e2")["out"]
    written = tomllib.loads(Path(out, "config.toml").read_text())["bounds"]
    assert written == {"age": [0, 100], "a=b": [-5, 5], "size": [1, 3]}
    for wrong in ("age", "age=3", "=0:1", "age=0:1:2", "age=low:high"):
        assert "--bounds must be COLUMN=LOW:HIGH" in refused(capsys, "train", *args, "--bounds", wrong)
    assert "names 'height'" in refused(capsys, "train", *args, "--bounds", "height=0:3")
    assert "the lower first" in refused(capsys, "train", *args, "--bounds", "age=3:0")


@pytest.mark.parametrize("name", ["config.toml", "checkpoint.pt", "privacy.json"])
def test_a_full_disk_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = checkpoint.write_whole

    def full(path: Path, write: Any) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, write)

    monkeypatch.setattr(checkpoint, "write_whole", full)
    code, _, err = run(capsys, "train", *FAST)
    assert code == 2 and err.startswith("privet: The disk is full")
    assert Path("runs").exists() is (name == "privacy.json")  # by then there is something to resume


# Methods


@pytest.fixture
def halved() -> Iterator[str]:
    @register
    @dataclass(frozen=True, kw_only=True)
    class Halved(PerExample):
        name = "halved"
        summary = "for this test"
        strength: float = option(0.5, "of the halving")
        side: Literal["left", "right"] = option("left", "which half")

    yield "halved"
    del METHODS["halved"]


def test_a_new_method_brings_its_options(capsys: pytest.CaptureFixture[str], halved: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    assert done.value.code == 0
    _, title, own = capsys.readouterr().out.partition("options of --method halved:")
    assert title and "--strength" in own and "--side" in own
    out = answer(capsys, "train", *FAST, "--method", halved, "--strength", "0.25", "--side", "right")["out"]
    written = tomllib.loads(Path(out, "config.toml").read_text())["method"]
    assert (written["name"], written["strength"], written["side"]) == (halved, 0.25, "right")
    assert "strength" in refused(capsys, "train", *FAST, "--strength", "0.25")
    assert "strength" in refused(capsys, "train", *FAST, "--method", halved, "--strength", "much")
    assert "side" in refused(capsys, "train", *FAST, "--method", halved, "--side", "up")


def test_options_of_the_method_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--clip-function", "automatic", "--no-adaptive", "--stability", "1"]
    out = answer(capsys, "train", *FAST, *args)["out"]
    statement = json.loads(Path(out, "privacy.json").read_text())["method"]
    assert (statement["clip_function"], statement["adaptive"], statement["stability"]) == ("automatic", False, 1.0)
    assert "adapt" in refused(capsys, "train", *FAST, *args, "--adaptive")


def test_groups_stand_in_toml(capsys: pytest.CaptureFixture[str]) -> None:
    Path("groups.toml").write_text(
        "[method]\nclip = {first = 0.1, rest = 0.05}\n[method.groups]\nfirst = ['1.*']\nrest = ['*']\n"
    )
    out = answer(capsys, "train", "groups.toml", *FAST)["out"]
    groups = json.loads(Path(out, "privacy.json").read_text())["groups"]
    assert {g["group"]: g["sensitivity"] for g in groups} == {"first": 0.1, "rest": 0.05}


def test_help_tells_whose_an_option_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    parts = capsys.readouterr().out.split("options of --method ")[1:]
    words = [(word.strip(","), part.partition(":")[0]) for part in parts for word in part.split()]
    owners = {word: title for word, title in words if word.startswith("--")}
    assert owners["--adaptive"] == "clipless or layerwise or per-example or ternary"
    assert owners["--record-groups"] == "batch or ternary"
    assert owners["--clip"] == "batch or layerwise or per-example or ternary" and owners["--sparsify"] == "batch"
    assert owners["--input-clip"] == "backprop" and owners["--allocation"].startswith("backprop or batch or")
    text = " ".join(" ".join(parts).split())
    assert "layerwise: how noise is shared between groups (default: proportional)" in text  # where they differ
    assert text.count("norm C of the clip") == 1


# budget


def test_budget_adds_up_what_runs_cost_and_sets_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    cheap = Mechanism(kind="gaussian", noise_multiplier=4.0)
    with Ledger("people.ledger") as ledger:
        for name in ("first", "second"):
            ledger.charge(ledger.open_run(name, cheap, budget=(2.0, 1e-6), note="per-example"), step=5, units=1)
    result = answer(capsys, "budget", "people.ledger")
    assert result["delta"] == 1e-6 and len(result["runs"]) == 2 and result["budget"] is None
    assert result["runs"][0]["epsilon"] < result["epsilon"] < 2 * result["runs"][0]["epsilon"]
    assert answer(capsys, "budget", "people.ledger", "--delta", "1e-3")["epsilon"] < result["epsilon"]
    limited = answer(capsys, "budget", "people.ledger", "--epsilon", "5", "--delta", "1e-5")
    assert limited["budget"] == {"epsilon": 5.0, "delta": 1e-5}
    assert limited["remaining"] == pytest.approx(5 - limited["epsilon"])
    assert "--force" in refused(capsys, "budget", "people.ledger", "--epsilon", "6", "--delta", "1e-5")
    assert (
        answer(capsys, "budget", "people.ledger", "--epsilon", "6", "--delta", "1e-5", "--force")["budget"]["epsilon"]
        == 6
    )
    code, out, _ = run(capsys, "budget", "people.ledger")
    assert code == 0 and "per-example" in out and "Budget: epsilon 6 at delta 1e-05" in out and " left." in out
    cost = answer(capsys, "budget", "people.ledger", "--epsilon", "0.5", "--delta", "1e-5")
    assert cost["remaining"] == pytest.approx(0.5 - cost["epsilon"]) and cost["remaining"] < 0
    assert f", exceeded by {rounded_up(-cost['remaining'])}." in run(capsys, "budget", "people.ledger")[1]


def test_the_table_of_runs_fits_into_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with Ledger("people.ledger") as ledger:
        entry = ledger.open_run("0123456789", Mechanism(kind="gaussian", noise_multiplier=12.345), note="per-example")
        ledger.charge(entry, step=123456, units=100)
        started = ledger.runs()[0].started
    _, out, _ = run(capsys, "budget", "people.ledger")
    (line,) = [line for line in out.splitlines() if "per-example" in line]
    assert line.split()[:3] == [started[:10], started[11:16], "01234567"]
    assert line.split()[4:6] == ["123456", "12.35"] and line.split()[-1] == "unfinished" and len(line) <= 80


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["missing.ledger"], "missing.ledger"),
        (["text.ledger"], "not a Privet ledger"),
        (["new.ledger", "--epsilon", "1"], "--delta"),
        (["new.ledger", "--epsilon", "0", "--delta", "1e-5"], "epsilon"),
        (["new.ledger", "--epsilon", "1", "--delta", "2"], "delta"),
        (["empty.ledger", "--delta", "2"], "delta"),
    ],
)
def test_budget_refuses(capsys: pytest.CaptureFixture[str], args: list[str], names: str) -> None:
    Path("text.ledger").write_text("this is a text and not a ledger " * 50)
    Ledger("empty.ledger").close()
    assert names in refused(capsys, "budget", *args)


def test_a_spent_budget_ends_training_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    assert run(capsys, "budget", "runs/digits.ledger", "--epsilon", "4", "--delta", "1e-5")[0] == 0
    code, out, _ = run(capsys, "train", *FAST, "--epochs", "50", "--noise", "2")
    assert code == 0 and "no further step fits into the budget" in out
    assert "exceed the budget" in refused(capsys, "train", *FAST, "--epochs", "50", "--noise", "2")


# Interruption


def test_ctrl_c_stops_cleanly_and_resume_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = training_loop._Training._progress

    def interrupt(self: Any) -> Any:
        progress = real(self)
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return progress

    with monkeypatch.context() as patched:
        patched.setattr(training_loop._Training, "_progress", interrupt)
        code, out, err = run(capsys, "train", *FAST, "--json", "--out", "stopped")
    assert code == 130 and "privet train --resume stopped" in err
    told = json.loads(out)
    assert told["interrupted"] is True and told["steps"] == 4
    before = Path("stopped/metrics.jsonl").read_text()
    code, out, err = run(capsys, "train", "--resume", "stopped", "--json", "--quiet")
    assert code == 0, err
    assert json.loads(out)["steps"] == 6 and json.loads(out)["epsilon"] <= 3
    assert Path("stopped/metrics.jsonl").read_text().startswith(before)
    with Ledger("runs/digits.ledger") as ledger:  # closed, so that its side files are gone
        (record,) = ledger.runs()
    assert record.units == 2 and record.finished
    assert "finished" in refused(capsys, "train", "--resume", "stopped")


def start(*args: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "privet", *args], stdout=pipe, stderr=pipe, text=True, env=environment
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_leaves_a_run_that_can_be_resumed(number: signal.Signals) -> None:
    process = start("train", *FAST[:4], "--epochs", "100000", "--noise", "100", "--out", "run", "--json")
    deadline = time.monotonic() + 60
    while not (Path("run/metrics.jsonl").exists() and Path("run/metrics.jsonl").read_text()):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "privet train --resume run" in err and "Traceback" not in err
    told = json.loads(out)
    state = checkpoint.read(Path("run/checkpoint.pt"))
    assert told["interrupted"] and state["steps_done"] == told["steps"] == Ledger("runs/digits.ledger").last_step(
        state["run"]
    )


def test_a_reader_who_leaves_gets_no_traceback() -> None:
    process = start(
        *PLAN, "--epochs", "4", "--noise", "2", "--sampling", "partition", "--json", "--trade-off", "100000"
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read() and process.wait() == 1


# The command itself


def test_the_library_s_errors_name_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Set --relation replace_one, or" in refused(capsys, "train", *FAST, "--sampling", "fixed-size")
    exact = [*PLAN, "--noise", "1", "--steps", "5", "--noise-level", "exact"]
    assert "use --relation add_remove" in refused(capsys, *exact, "--relation", "replace_one")


@pytest.mark.parametrize("asked", ["--version", "--help"])
def test_what_needs_no_torch_does_not_wait_for_it(asked: str) -> None:
    code = (
        "import sys\nfrom privet.cli import main\n"
        f"try: main([{asked!r}])\nfinally: print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in (
        (["--help"], "train a model privately"),
        (["--version"], "privet 0."),
        (["plan", "--help"], "--noise"),
        (["budget", "--help"], "LEDGER"),
        (["train", "--help"], "--clip-function"),
    ):
        with pytest.raises(SystemExit) as done:
            main(args)
        assert done.value.code == 0 and words in capsys.readouterr().out
    assert "COMMAND" in refused(capsys) and "nonsense" in refused(capsys, "nonsense")


# plan beside the figures of the batch-clipping paper, section B.1: G_0.52 for sigma 2.5 and 8 layers

LAYERS = ["plan", "--records", "54000", "--batch", "64", "--epochs", "50", "--delta", "1e-5", "--layers", "8"]


def test_plan_names_the_estimate_of_papers_beside_the_exact_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *LAYERS, "--noise", "2.5")
    assert (found["layers"], found["noise_per_layer"]) == (8, pytest.approx(2.5))
    assert found["noise"] == pytest.approx(2.5 / 8**0.5)
    assert found["epsilon"] == pytest.approx(1.565, abs=0.001) and found["accountant"] == "pld"
    estimate = found["estimate"]
    assert (estimate["mu"], estimate["epsilon"]) == (pytest.approx(0.3923, abs=1e-4), pytest.approx(1.522, abs=1e-3))
    assert "no guarantee: 2.8% below the exact one" in estimate["note"]


def test_plan_has_the_papers_own_estimate_for_its_own_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    """A sample of fixed size, and a record that is exchanged. The epsilon is a loose bound there, and says so."""
    own = [*LAYERS, "--sampling", "fixed-size", "--relation", "replace_one"]
    found = answer(capsys, *own, "--noise", "2.5")
    assert found["estimate"]["mu"] == pytest.approx(0.52, abs=0.005)
    assert found["epsilon"] > found["estimate"]["epsilon"]
    _, out, _ = run(capsys, *own, "--noise", "2.5")
    assert "estimate  2.088, mu 0.5214 (central-limit estimate, no guarantee: 29.8% below the bound, which is l" in out
    assert "0.8839 times the sensitivity (system): 2.5 times that of each of 8 layers\n" in out


def test_plan_says_when_the_estimate_is_too_high(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *PLAN, "--batch", "6000", "--steps", "20", "--noise", "0.4")
    assert found["epsilon"] < 30 < found["estimate"]["epsilon"]
    assert "times the exact one" in found["estimate"]["note"]


@pytest.mark.parametrize("args", [["--sampling", "partition"], ["--relation", "replace_one"]])
def test_plan_gives_no_estimate_where_there_is_none(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert answer(capsys, *PLAN, "--steps", "234", "--noise", "2", *args)["estimate"] is None


def test_plan_finds_the_noise_of_each_layer(capsys: pytest.CaptureFixture[str]) -> None:
    length = ["--steps", "100", "--sampling", "partition"]
    whole = answer(capsys, *PLAN, *length, "--epsilon", "2")
    apart = answer(capsys, *PLAN, *length, "--epsilon", "2", "--layers", "4")
    assert whole["noise"] == whole["noise_per_layer"] == apart["noise"] == apart["noise_per_layer"] / 2
    again = answer(capsys, *PLAN, *length, "--noise", str(apart["noise_per_layer"]), "--layers", "4")
    assert again["epsilon"] == apart["epsilon"]


def test_plan_refuses_no_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "layers must be at least 1" in refused(capsys, *PLAN, "--steps", "5", "--noise", "1", "--layers", "0")


# plan beside the zCDP figure of the backpropagation-clipping paper

DISJOINT = ["plan", "--records", "60000", "--batch", "4096", "--epochs", "25", "--delta", "1e-5"]


@pytest.mark.parametrize("layers", [1, 4])
def test_plan_has_the_papers_zcdp_figure_for_partitions(capsys: pytest.CaptureFixture[str], layers: int) -> None:
    args = [*DISJOINT, "--noise", "50", "--layers", str(layers), "--sampling", "partition"]
    found = answer(capsys, *args)
    rho = 25 * layers / (2 * 50**2)  # E·N·C1²·C2²/(2s²) with s = 50·C1·C2
    assert found["zcdp_epsilon"] == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e5)))
    assert 0 < found["epsilon"] < found["zcdp_epsilon"]
    _, out, _ = run(capsys, *args)
    assert f"zcdp      {rounded_up(found['zcdp_epsilon'])} (the backpropagation-clipping paper's looser formula" in out


def test_what_is_printed_is_never_less_than_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--records", "60000", "--batch", "256", "--steps", "14062", "--noise", "1.1", "--delta", "1e-5"]
    found, said = answer(capsys, *args), run(capsys, *args)[1]
    assert float(said.split()[1]) >= found["epsilon"]
    shares = [float(line.split("at most ")[1].split("%")[0]) for line in said.splitlines() if "at most" in line]
    betas = [point["beta"] for point in found["trade_off"] if point["alpha"] in (0.001, 0.01, 0.05, 0.1)]
    assert all(share >= 100 - 100 * beta for share, beta in zip(shares, betas, strict=True))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "--lr", "1e300"], "lr must be"),
        (["train", "--seed", "9" * 25], "63 bits"),
        (["train", "--threads", "100000"], "threads must lie"),
        (["plan", "--records", "100", "--batch", "10", "--noise", "1", "--epochs", "1e308"], "epochs must be"),
        (["plan", "--records", "100", "--batch", "10", "--noise", "1e9", "--epsilon", "1"], "noise must lie"),
        (["audit", "--method", "per-example", "--threads", "-1"], "threads must lie"),
        (["audit", "--method", "per-example", "--delta", "0"], "delta"),
        (["audit", "--method", "per-example", "--target", "age"], "--data"),
        (["audit", "run", "--plot", "x.txt"], ".svg"),
        (["audit", "run", "--noise", "0"], "--noise"),
        (["bench", "--model", "mlp", "--threads", "-1"], "threads must lie"),
    ],
)
def test_numbers_that_nothing_survives_are_refused(
    capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert said in refused(capsys, *args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--quantile", "0.3"], "only with --adaptive:"),
        (["--method", "ternary", "--density", "0.1"], "only with --adaptive:"),
        (["--stability", "0.1"], "only with --clip-function automatic:"),
        (["--momentum", "0.5", "--optimizer", "adam"], "only with --optimizer sgd:"),
        (["--denoise-bound", "3"], "only with --denoise hard or posterior:"),
        (["--lr-decay", "0.5"], "only with --schedule decay:"),
        (["--normalise-noise", "3"], "only with --normalise private:"),
        (["--features-cache", "x"], "only with --features scattering:"),
        (["--data-dir", "x"], "--data-dir is for"),
        (["--test-fraction", "0.3"], "--test-fraction is for tables"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert said in refused(capsys, "train", *args)


def test_a_delta_that_protects_nobody_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "delta 0.5 is not below 1/records" in run(capsys, "train", *FAST, "--delta", "0.5", "--noise", "2")[1]


def test_a_fault_of_ours_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by\nzero")

    monkeypatch.setattr("privet.planning.plan", broken)
    args = ["plan", "--records", "100", "--batch", "10", "--noise", "1", "--steps", "3"]
    code, out, err = run(capsys, *args)
    assert code == 1 and not out and len(err.splitlines()) == 1
    assert "ZeroDivisionError: division by zero" in err and "PRIVET_DEBUG=1" in err
    monkeypatch.setenv("PRIVET_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(capsys, *args)


def test_plan_counts_a_begun_epoch_in_the_zcdp_figure(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--noise", "50", "--sampling", "partition"]
    whole, begun = (answer(capsys, *DISJOINT, *args, "--epochs", epochs) for epochs in ("25", "24.5"))
    assert begun["compositions"] == 25 and begun["zcdp_epsilon"] == whole["zcdp_epsilon"]


@pytest.mark.parametrize(
    "args", [[], ["--sampling", "partition", "--noise-level", "exact"], ["--relation", "replace_one"]]
)
def test_plan_gives_no_zcdp_figure_where_its_formula_does_not_apply(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert answer(capsys, *DISJOINT, "--noise", "50", *args)["zcdp_epsilon"] is None
    assert "zcdp" not in run(capsys, *DISJOINT, "--noise", "50", *args)[1]
