"""`privet audit`: what scripts rely on, and what a run gets whose statement is not true."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import train_without_luck

import privet.audit
from privet import Method, PerExample
from privet.accounting import Mechanism
from privet.audit import Check, Report, audit_run, randomness, sensitivity
from privet.audit import run as audit_of_runs
from privet.cli import main
from privet.training import TrainConfig


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fewer draws, and keys of noise from a seed: the checks themselves are tried elsewhere."""
    monkeypatch.setattr("os.urandom", random.Random(7).randbytes)
    monkeypatch.setattr(randomness, "_DRAWS", 1000)
    monkeypatch.setattr(randomness, "_TRIALS", 40)
    monkeypatch.setattr(sensitivity, "_CLIMBS", 4)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training(tmp_path_factory.mktemp("trained"))


def training(folder: Path, **changes: Any) -> Path:
    """Unsampled steps are accounted by a closed form, which is fast."""
    options: dict[str, Any] = {"sampling": "partition", "batch": 512, "epochs": 3, "lr": 1.0, "noise": 2.0}
    options |= {"model_options": {"hidden": [8]}, "method_options": {"clip": 0.1}, "threads": 1, "delta": 1e-5}
    options |= changes
    return train_without_luck(TrainConfig(**options, out=str(folder / "run"), ledger=str(folder / "a.ledger")))


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a statement does not need the checks of a step."""
    monkeypatch.setattr(audit_of_runs, "audit_subject", lambda subject, seed: [])


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["audit", *args])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """A sentence on standard error and exit code 2."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("privet: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


def changed(run: Path, **statement: Any) -> str:
    """A copy of the run beside the test, with these facts in its statement."""
    folder = Path("copy")
    shutil.copytree(run, folder)
    told = json.loads((folder / "privacy.json").read_text())
    assert set(statement) <= set(told)
    (folder / "privacy.json").write_text(json.dumps(told | statement))
    return str(folder)


def broken(capsys: pytest.CaptureFixture[str], folder: str) -> list[str]:
    code, out, _ = run(capsys, folder, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["holds"] is False
    return [check["name"] for check in found["checks"] if not check["holds"]]


# Runs


def test_a_run_whose_statement_is_true(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, str(trained), "--json", "--plot", "roc.svg")
    assert code == 0
    found = json.loads(out)
    told = json.loads((trained / "privacy.json").read_text())
    assert found["holds"] is True and (found["claimed"], found["delta"]) == (told["epsilon"], 1e-5)
    assert 0 <= found["lower_bound"] <= found["claimed"]
    names = [check["name"] for check in found["checks"]]
    assert len(set(names)) == len(names)
    for wanted in ("compositions paid", "second accountant", "sensitivity", "spread", "two worlds", "replay",
                   "one record more moves no other", "membership inference by"):  # fmt: skip
        assert any(wanted in name for name in names), wanted
    assert all({"name", "holds", "measured", "bound", "detail"} == set(check) for check in found["checks"])
    assert Path("roc.svg").read_text().lstrip().startswith("<?xml")
    monkeypatch.setattr(audit_of_runs, "audit_subject", lambda subject, seed: [])
    code, out, _ = run(capsys, str(trained))
    assert code == 0 and "Nothing broke the claim." in out and "epsilon" in out


@pytest.mark.usefixtures("no_steps")
def test_a_smaller_epsilon_than_was_spent(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((trained / "privacy.json").read_text())
    folder = changed(trained, epsilon=told["epsilon"] / 2)
    assert broken(capsys, folder) == ["claimed epsilon against a second accountant"]
    code, out, _ = run(capsys, folder)
    assert code == 1 and "The claim is broken." in out and "claimed epsilon against a second accountant" in out


@pytest.mark.usefixtures("no_steps")
def test_fewer_compositions_than_steps(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert broken(capsys, changed(trained, compositions=2)) == ["compositions paid for the steps taken"]


@pytest.mark.usefixtures("no_steps")
def test_more_noise_than_was_added(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((trained / "privacy.json").read_text())
    twice = 2 * told["noise_multiplier"]
    mechanism = told["mechanism"] | {"noise_multiplier": twice}
    found = broken(capsys, changed(trained, mechanism=mechanism))
    assert "the accounted mechanism is that of the run's sampling and noise" in found
    shutil.rmtree("copy")
    found = broken(capsys, changed(trained, mechanism=mechanism, noise_multiplier=twice))
    assert found == ["stated sums have the noise that the method adds to them"]


@pytest.mark.usefixtures("no_steps")
def test_a_sampling_that_was_not_done(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mechanism = Mechanism(kind="poisson", noise_multiplier=2.0, rate=0.1).to_json()
    found = broken(capsys, changed(trained, mechanism=mechanism, compositions=9))
    assert found == ["the accounted mechanism is that of the run's sampling and noise"]


@pytest.mark.usefixtures("no_steps")
def test_sums_of_another_sensitivity(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((trained / "privacy.json").read_text())
    groups = [group | {"sensitivity": group["sensitivity"] / 2} for group in told["groups"]]
    found = broken(capsys, changed(trained, groups=groups))
    assert found == ["stated sums have the noise that the method adds to them"]


@pytest.mark.usefixtures("no_steps")
def test_thresholds_that_moved_while_training_are_no_fault(tmp_path: Path) -> None:
    groups = {"weights": ["*.weight"], "others": ["*"]}
    folder = training(tmp_path, method_options={"clip": 0.1, "adaptive": True, "groups": groups})
    assert audit_run(folder).holds


def test_a_run_without_noise_is_not_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = broken(capsys, str(training(tmp_path, noise=0.0)))
    assert "shape of the noise" in found


def test_the_same_from_python(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_of_runs, "audit_subject", lambda subject, seed: [])
    report = audit_run(trained)
    assert report.holds and report.subject == str(trained) and report.notes


def test_a_folder_that_holds_no_run_is_named(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no finished run" in refused(capsys, str(tmp_path))
    assert "no finished run" in refused(capsys, "nowhere")
    folder = Path(changed(trained))
    (folder / "privacy.json").write_text("[]")
    assert "damaged" in refused(capsys, str(folder))
    (folder / "privacy.json").write_text('{"epsilon": 1')
    assert "damaged" in refused(capsys, str(folder))


# Methods


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Method, dict[str, Any]]]:
    """Stands in for the audit of a method, which takes long and is tried elsewhere."""
    calls: list[tuple[Method, dict[str, Any]]] = []

    def audit(method: Method, **options: Any) -> Report:
        calls.append((method, options))
        check = Check(name="all is well", holds=options["noise_multiplier"] >= 1, measured=float("inf"), bound=1.0)
        return Report(subject=method.name, claimed=float("nan"), lower_bound=0.0, delta=1e-5, checks=[check])

    monkeypatch.setattr(privet.audit, "audit", audit)
    return calls


def test_options_reach_the_method_and_the_audit(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--method", "per-example")[0] == 0
    assert asked[-1][0] == PerExample()
    assert "model" not in asked[-1][1]  # the zoo and the digits
    options = ("--option", "clip=0.5", "--option", "clip-function=automatic", "--relation", "replace_one")
    code, out, _ = run(capsys, "--method", "per-example", *options, "--canaries", "50", "--model", "mlp", "--json")
    method, given = asked[-1]
    assert code == 0 and method == PerExample(clip=0.5, clip_function="automatic")
    assert (given["relation"], given["canaries"], given["inputs_too"]) == ("replace_one", 50, False)
    assert given["model"](given["records"][0][:2]).shape == (2, 10)
    found = json.loads(out)  # without infinity, which JSON does not have
    assert found["checks"][0]["measured"] == "inf" and found["claimed"] == "nan"
    assert run(capsys, "--method", "per-example", "--noise", "0.5")[0] == 1


@pytest.mark.usefixtures("asked")
def test_what_cannot_be_audited_is_refused_in_a_sentence(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "either" in refused(capsys)
    assert "either" in refused(capsys, str(trained), "--method", "per-example")
    assert "no method 'nonsense'" in refused(capsys, "--method", "nonsense")
    assert "NAME=VALUE" in refused(capsys, "--method", "per-example", "--option", "clip")
    assert "clip" in refused(capsys, "--method", "per-example", "--option", "clip=much")
    assert "clop" in refused(capsys, "--method", "per-example", "--option", "clop=1")
    assert "finished run" in refused(capsys, "--method", "per-example", "--plot", "roc.svg")
    assert "no-data" in refused(capsys, "--method", "per-example", "--data", "no-data")
