"""The benchmark measures what it says: both kinds of step, whole ones, and memory in fresh processes."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from privet.bench import Case, measure, private
from privet.cli import main
from privet.errors import ConfigError
from privet.ledger import Ledger
from privet.memory import keep_freed_memory
from privet.methods import method


def test_the_command_prints_both_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "mlp", "--batch", "16", "--repetitions", "2", "--processes", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ratio"] == pytest.approx(result["private_ms"] / result["base_ms"])
    assert result["memory_ratio"] == pytest.approx(result["private_mib"] / result["base_mib"])
    assert result["ratio"] > 0.5 and result["memory_ratio"] > 0.5
    assert result["ratio_range"] == [result["ratio"]] * 2 and result["processor"]
    assert result["against"] == "ordinary" and set(result["layouts"]) == {"base", "private"}


def test_one_method_or_loss_against_another(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "backprop-mnist", "--batch", "4", "--repetitions", "1", "--processes", "2"]
    assert main(["bench", *options, "--against", "per-example", "--method", "ternary", "--loss", "losing-less"]) == 0
    said = capsys.readouterr().out
    assert "ternary with losing-less against per-example" in said and "in 2 processes" in said


def test_the_median_of_several_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process in which memory lies badly must not decide."""
    private_seconds = iter([1.2, 9.0, 1.1])

    def asked(what: str, task: object) -> object:
        if what == "peak":
            return {"most": 2, "imported": 1}
        return {
            "base": {"layout": "contiguous", "seconds": 1.0},
            "private": {"layout": "contiguous", "seconds": next(private_seconds)},
        }

    monkeypatch.setattr("privet.bench._in_fresh_process", asked)
    result = measure(Case(model="mlp", batch=4), method("per-example"), processes=3)
    assert (result["ratio"], result["ratio_range"]) == (1.2, [1.1, 9.0])


def test_a_private_step_is_a_whole_one(tmp_path: Path) -> None:
    """Noise is drawn and the ledger is charged in every step that is timed."""
    step = private(Case(model="mlp", batch=4), "contiguous", method("per-example"), tmp_path, keep_memory=False)
    for _ in range(3):
        step()
    with Ledger(tmp_path / "contiguous.ledger", create=False) as ledger:
        assert [count for _, count in ledger.spent()] == [3]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="No benchmark for model 'vgg'"):
        Case(model="vgg", batch=4)
    with pytest.raises(ConfigError, match="one score, which the loss 'sse'"):
        Case(model="mlp", batch=4, loss="sse")
    with pytest.raises(ConfigError, match="batch must be at least 1"):
        Case(model="mlp", batch=0)
    for number in ("repetitions", "processes"):
        with pytest.raises(ConfigError, match=number):
            measure(Case(model="mlp", batch=4), method("per-example"), **{number: 0})


def test_what_a_method_refuses_is_told_as_it_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "bn-lenet5", "--batch", "4", "--repetitions", "1", "--processes", "1"]) == 2
    said = capsys.readouterr().err
    assert "BatchNorm" in said and "Traceback" not in said and "GroupNorm" in said


def test_freed_memory_can_be_kept_where_the_c_library_can() -> None:
    assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")
