"""Studies: what is trained once is kept, what failed is told, and the table says what the lines say."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import privet.reproduce.study as under_test
from privet.accounting import Mechanism, epsilon
from privet.cli import main
from privet.errors import ConfigError
from privet.methods import method
from privet.nn import MODELS
from privet.nn.lipschitz.certificate import certify
from privet.reproduce import STUDIES, Row, Study, StudyProgress, find_study, read_results, run_study, summary, table
from privet.reproduce.batch_clipping import gn_lenet5
from privet.training import train

# Unsampled steps are accounted by a closed form, which keeps these tests fast.
SETTINGS = {
    "data": "digits", "model": "mlp", "model_options": {"hidden": [8]}, "batch": 512, "epochs": 1.0, "lr": 1.0,
    "sampling": "partition", "noise": 1.0, "delta": 1e-5,
}  # fmt: skip
TINY = Study(
    name="tiny",
    title="Two rows on digits",
    about="As small as can be.",
    rows=[
        Row(key="small/flat", settings={**SETTINGS, "method_options": {"clip": 0.5}}, theirs=0.9),
        Row(key="small/noisy", settings={**SETTINGS, "noise": 2.0, "method_options": {"clip": 0.5}}, note="a | b"),
    ],
)
PAIRS = [("small/flat", 0), ("small/noisy", 0), ("small/flat", 1), ("small/noisy", 1)]


@pytest.fixture(autouse=True)
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """Every training as it begins: its folder's row and seed, and whether it was gone on with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STUDIES, "tiny", TINY)
    begun: list[tuple[str, int, bool]] = []

    def watched(config: Any, *, resume: Any = None, **more: Any) -> Any:
        parts = Path(config.out).parts
        begun.append(("/".join(parts[parts.index("runs") + 1 : -1]), config.seed, resume is not None))
        return train(config, resume=resume, **more)

    monkeypatch.setattr(under_test, "train", watched)
    return begun


def small(**more: Any) -> list[dict[str, Any]]:
    return run_study(TINY, "out", **{"seeds": range(2), "threads": 1, **more})


def line(key: str, seed: int, study: Study = TINY, **facts: Any) -> dict[str, Any]:
    settings = next(row for row in study.rows if row.key == key).plain()
    return {"key": key, "seed": seed, "settings": settings, "delta": 1e-5, "seconds": 1.0, **facts}


def test_each_row_and_seed_is_trained_once(trained: list[tuple[str, int, bool]]) -> None:
    results = small()
    assert trained == [(*pair, False) for pair in PAIRS]
    assert [(found["key"], found["seed"]) for found in results] == PAIRS
    kept = {"accuracy", "epsilon", "delta", "noise_multiplier", "steps", "seconds", "version"}
    assert all(kept <= set(found) for found in results)
    statement = json.loads(Path("out/runs/small/noisy/seed-1/privacy.json").read_text())
    assert results[3]["accuracy"] == statement["held_out"]["accuracy"]
    assert results[3]["epsilon"] == statement["epsilon"] < results[2]["epsilon"]
    assert results[3]["noise_multiplier"] == 2.0

    trained.clear()
    assert small() == results
    assert trained == []

    lines = Path("out/results.jsonl").read_text().splitlines(keepends=True)
    Path("out/results.jsonl").write_text("".join(lines[:1] + lines[2:] + ['{"key": "half']))
    again = small()
    assert trained == [("small/noisy", 0, False)]
    assert sorted((found["key"], found["seed"]) for found in again) == sorted(PAIRS)

    trained.clear()
    small(seeds=range(3), only=["*/flat"])
    assert trained == [("small/flat", 2, False)]


def test_a_changed_row_is_trained_anew(trained: list[tuple[str, int, bool]]) -> None:
    first = small(seeds=[0])
    changed = replace(TINY, rows=[replace(TINY.rows[0], settings={**TINY.rows[0].settings, "lr": 0.5}), TINY.rows[1]])
    trained.clear()
    assert "not run" in table(changed, first)
    results = run_study(changed, "out", seeds=[0], threads=1)
    assert trained == [("small/flat", 0, False)]
    assert summary(changed, results)[0]["accuracies"] == [results[-1]["accuracy"]]
    assert summary(TINY, results)[0]["accuracies"] == [first[0]["accuracy"]]


def test_an_interrupted_training_goes_on(trained: list[tuple[str, int, bool]]) -> None:
    steps: list[int] = []

    def note(now: StudyProgress) -> None:
        if now.training is not None:
            steps.append(now.training.step)

    assert small(on_progress=note, stop=lambda: bool(steps)) == []
    assert trained == [("small/flat", 0, False)] and steps == [1]
    results = small(seeds=[0], on_progress=note)
    assert trained[1:] == [("small/flat", 0, True), ("small/noisy", 0, False)]
    assert steps[:3] == [1, 2, 3]
    assert results[0]["steps"] == results[1]["steps"] == 3


@pytest.mark.parametrize("harm", ["damage", "other settings"])
def test_half_a_training_that_does_not_fit_begins_anew(harm: str, trained: list[tuple[str, int, bool]]) -> None:
    seen: list[StudyProgress] = []
    small(only=["*/flat"], on_progress=seen.append, stop=lambda: bool(seen))
    folder = Path("out/runs/small/flat/seed-0")
    if harm == "damage":
        (folder / "checkpoint.pt").write_bytes(b"nothing")
    else:
        (folder / "settings.json").write_text("{}")
    results = small(only=["*/flat"], seeds=[0])
    assert trained[-1] == ("small/flat", 0, False)
    assert results[0]["steps"] == 3


def test_a_failing_row_is_told_and_tried_again(trained: list[tuple[str, int, bool]]) -> None:
    bad = Row(key="small/bad", settings={**SETTINGS, "method": "unheard-of"})
    odd = Row(key="small/odd", settings={**SETTINGS, "colour": "blue"})
    study = replace(TINY, rows=[bad, odd, TINY.rows[0]])
    told: list[StudyProgress] = []
    results = run_study(study, "out", seeds=[0], threads=1, on_progress=told.append)
    assert results[0]["error"].startswith("There is no method 'unheard-of'.")
    assert "'colour'" in results[1]["error"]
    assert "accuracy" in results[2]
    assert [(now.done, now.total) for now in told if now.result] == [(1, 3), (2, 3), (3, 3)]
    assert "failed: There is no method" in table(study, results)
    run_study(study, "out", seeds=[0], threads=1)
    assert [key for key, _, _ in trained] == ["small/bad", "small/flat", "small/bad"]


def test_the_table_has_means_over_seeds() -> None:
    results = [
        line("small/flat", 0, accuracy=0.5, epsilon=1.0),
        line("small/flat", 1, accuracy=0.1, epsilon=3.0),
        line("small/flat", 1, accuracy=0.6, epsilon=3.5),  # the later line counts
        line("small/noisy", 2, accuracy=0.25, epsilon="inf"),
        line("small/noisy", 3, error="It broke."),
        line("small/noisy", 2, error="An older failure, made good."),
    ]
    flat, noisy = summary(TINY, results)
    assert flat["mean"] == statistics.mean([0.5, 0.6]) and flat["std"] == statistics.stdev([0.5, 0.6])
    assert (flat["epsilon"], flat["seeds"], noisy["failed"]) == (3.5, [0, 1], {3: "It broke."})
    text = table(TINY, results)
    assert "| small/flat | noise 1 | 3.5 | 55.00 ± 7.07% (2 seeds) | 90.00% |  |" in text
    assert "| small/noisy | noise 2 | ∞ | 25.00% (1 seed); 1 failed: It broke. | – | a \\| b |" in text
    assert "method.clip 0.5" in text.split("| row |")[0]
    assert table(TINY, []).count("not run") == 2


@pytest.mark.parametrize("sampling", ["partition", "poisson"])
def test_accuracies_on_the_way_are_those_of_the_last_epoch_within_epsilon(sampling: str) -> None:
    """Three epochs; by the ledger's mechanism it is told anew what each of them had cost."""
    row = Row(key="small/way", settings={**SETTINGS, "sampling": sampling, "epochs": 3.0, "noise": 3.0})
    study = replace(TINY, rows=[row], epsilons=())
    run_study(study, "out", seeds=[0], threads=1)
    folder = Path("out/runs/small/way/seed-0")
    statement = json.loads((folder / "privacy.json").read_text())
    measured = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    mechanism = Mechanism.from_json(statement["mechanism"])
    units = [n + 1 if sampling == "partition" else line["step"] for n, line in enumerate(measured)]
    costs = [epsilon([(mechanism, count)], 1e-5).epsilon for count in units]
    limits = [0.9 * costs[0], 1.01 * costs[0], 0.99 * costs[2], 1.01 * costs[2]]
    (found,) = run_study(replace(study, epsilons=limits), "again", seeds=[0], threads=1)
    again = [json.loads(line) for line in Path("again/runs/small/way/seed-0/metrics.jsonl").read_text().splitlines()]
    accuracies = [line["accuracy"] for line in again]
    expected = [None, accuracies[0], accuracies[1], accuracies[2]]
    assert list(found["on_the_way"].values()) == expected
    assert f"| {100 * accuracies[1]:.2f} |" in table(replace(study, epsilons=limits), [found])


def test_time_left_follows_the_rows_own_runs() -> None:
    told: list[StudyProgress] = []
    before = [line(key, 0, accuracy=0.1, epsilon=1.0, seconds=s) for key, s in [("small/flat", 100.0)]]
    Path("out").mkdir()
    Path("out/results.jsonl").write_text(json.dumps(before[0]) + "\n")
    small(on_progress=told.append)
    ends = [now for now in told if now.result]
    assert [now.done for now in ends] == [2, 3, 4]
    own = ends[0].result["seconds"]  # type: ignore[index]
    assert ends[0].seconds_left == pytest.approx(100.0 + own)  # one of each is ahead
    assert ends[1].seconds_left == own
    assert ends[2].seconds_left == 0


def test_keys_and_patterns_are_checked() -> None:
    with pytest.raises(ConfigError, match="'small/flat' twice"):
        replace(TINY, rows=[TINY.rows[0], TINY.rows[0]])
    with pytest.raises(ConfigError, match="No row matches 'x'"):
        small(only=["*/flat", "x"])
    assert find_study("tiny") is TINY


@pytest.mark.parametrize("name", sorted(set(STUDIES) - {"tiny"}))
def test_every_row_can_be_made(name: str) -> None:
    """Typing errors in a study show up here, not after hours."""
    for row in STUDIES[name].rows:
        config = row.config()
        method(config.method, **config.method_options)
        assert ":" in config.model or config.model in MODELS
        assert row.theirs is None or 0 < row.theirs <= 1


def test_the_papers_noise_is_that_of_all_layers_together() -> None:
    """In B.1 σ = 2.5 over L = 8 layers of BN-LeNet-5 counts as σ/√8."""
    rows = {row.key: row for row in find_study("batch-clipping").rows}
    assert rows["paper/mnist-sigma-2.5"].settings["noise"] ** 2 * 8 == pytest.approx(2.5**2)
    for key, layers in [("paper/mnist-sigma-2.5", 8), ("paper/cifar10-sigma-0.5", 9)]:
        shape = (1, 28, 28) if layers == 8 else (3, 32, 32)
        model = MODELS[rows[key].settings["model"]](input_shape=shape, classes=10)
        assert len({name.rpartition(".")[0] for name, _ in model.named_parameters()}) == layers
    assert not any(
        "BatchNorm" in type(layer).__name__ for layer in gn_lenet5(input_shape=(1, 28, 28), classes=10).modules()
    )


def two_classes(measure: Any = "auroc") -> Study:
    """A table of two classes of different size, where accuracy and AUROC differ."""
    rng = np.random.default_rng(0)
    y = (np.arange(600) % 5 == 0).astype(int)
    np.savez("two.npz", X=rng.normal(size=(600, 3)) + y[:, None], y=y)
    settings = {**SETTINGS, "data": "two.npz", "batch": 256, "epochs": 2.0, "noise_level": "seeded"}
    rows = [Row(key="two/a", settings=settings, theirs=0.8, measure=measure), replace(TINY.rows[0], key="two/b")]
    return replace(TINY, rows=rows, epsilons=(100.0,))


def test_a_row_tells_the_measure_that_it_names(trained: list[tuple[str, int, bool]]) -> None:
    study = two_classes()
    results = run_study(study, "out", seeds=[0, 1], threads=1)
    found = [line for line in results if line["key"] == "two/a"]
    held = [json.loads(Path(f"out/runs/two/a/seed-{seed}/privacy.json").read_text())["held_out"] for seed in (0, 1)]
    assert [line["auroc"] for line in found] == [part["auroc"] for part in held]
    assert [line["on_the_way"]["100"] for line in found] == [part["auroc"] for part in held]
    assert held[0]["records"] == held[1]["records"]  # the same rows are held out whatever the seed
    one, other = summary(study, results)
    assert (one["measure"], one["values"]) == ("auroc", [part["auroc"] for part in held])
    assert one["mean"] == statistics.mean(one["values"]) and one["std"] == statistics.stdev(one["values"])
    assert one["accuracies"] == [part["accuracy"] for part in held] != one["values"]
    assert other["measure"] == "accuracy" and other["values"] == other["accuracies"]
    text = table(study, results)
    assert "| accuracy or auroc, ours | theirs |" in text and f"| {100 * one['mean']:.2f} ±" in text
    assert "| auroc, ours |" in table(study.choose(["two/a"]), results)
    assert "| accuracy, ours |" in table(TINY, [])

    trained.clear()
    assert run_study(study, "out", seeds=[0, 1], threads=1) == results
    assert trained == []


def test_lines_without_the_measure_do_not_count(trained: list[tuple[str, int, bool]]) -> None:
    study = two_classes().choose(["two/a"])
    Path("out").mkdir()
    old = line("two/a", 0, study, accuracy=0.9, epsilon=1.0)
    Path("out/results.jsonl").write_text(json.dumps(old) + "\n")
    assert "not run" in table(study, [old])
    results = run_study(study, "out", seeds=[0], threads=1)
    assert trained == [("two/a", 0, False)] and "auroc" in results[1]


def test_a_measure_that_the_data_does_not_have_is_a_failure() -> None:
    study = replace(TINY, rows=[replace(TINY.rows[0], measure="auroc")])
    (found,) = run_study(study, "out", seeds=[0], threads=1)
    assert "auroc was not measured" in found["error"]
    assert "failed: auroc was not measured" in table(study, [found])


CLIPLESS = {row.key: row for row in find_study("clipless").rows}


class TestClipless:
    def test_table_7_has_both_methods_at_one_budget(self) -> None:
        sizes = {
            "aloi": 39627, "campaign": 32950, "celeba": 162079, "donors": 495460, "magic.gamma": 15216,
            "shuttle": 39277, "skin": 196045, "yeast": 1187,
        }  # fmt: skip
        found = {key.split("/")[1] for key in CLIPLESS if key.startswith("table-7/")}
        assert found == set(sizes)
        for name, records in sizes.items():
            pair = [CLIPLESS[f"table-7/{name}/{method}"] for method in ("per-example", "clipless")]
            assert [row.settings["method"] for row in pair] == ["per-example", "clipless"]
            for row in pair:
                assert row.measure == "auroc" and row.data == f"adbench/{name}.npz"
                assert row.settings["epsilon"] == 1.0
                # the largest power of ten below 1/records
                assert row.settings["delta"] < 1 / records <= 10.001 * row.settings["delta"]
        assert (CLIPLESS["table-7/yeast/per-example"].theirs, CLIPLESS["table-7/yeast/clipless"].theirs) == (
            0.668,
            0.751,
        )
        assert "59.1%" in CLIPLESS["table-7/shuttle/clipless"].note

    def test_images_at_their_epsilons(self) -> None:
        epsilons = {key.partition("/")[0]: set() for key in CLIPLESS}
        for key, row in CLIPLESS.items():
            epsilons[key.partition("/")[0]].add(row.settings["epsilon"])
        assert epsilons == {
            "table-7": {1.0},
            "mnist": {1.0, 3.0, 8.0},
            "fashion": {1.0, 3.0, 8.0},
            "cifar10": {8.0, 20.0},
        }
        assert CLIPLESS["mnist/epsilon-3"].theirs == 0.913

    def test_every_network_can_be_built_and_certified(self) -> None:
        """Which clipless training needs: without constants of its layers it refuses a network."""
        shapes = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
        networks = {(row.settings["model"], shapes.get(row.data, (9,))): row for row in CLIPLESS.values()}
        assert {name for name, _ in networks} == {"mlp", "lipschitz-mlp"}
        for (name, shape), row in networks.items():
            model = MODELS[name](input_shape=shape, classes=10, **row.settings["model_options"])
            if row.settings["method"] == "clipless":
                assert all(0 < k < math.inf for k in certify(model).gradient.values())

    @pytest.mark.parametrize("method", ["per-example", "clipless"])
    def test_a_row_of_table_7_trains(self, method: str) -> None:
        """From the data folder, as the command does it; unsampled, which is accounted fast."""
        rng = np.random.default_rng(0)
        y = np.arange(1484) % 2
        Path("files/adbench").mkdir(parents=True)
        np.savez("files/adbench/yeast.npz", X=rng.normal(size=(1484, 8)) + y[:, None], y=y)
        row = CLIPLESS[f"table-7/yeast/{method}"]
        row = replace(row, settings={**row.settings, "sampling": "partition", "steps": 5})
        study = replace(find_study("clipless"), rows=[row])
        (found,) = run_study(study, "out", data_dir="files", seeds=[0], threads=1)
        assert found["delta"] == 1e-4 and found["epsilon"] <= 1.0 and 0 <= found["auroc"] <= 1

    def test_the_command_lists_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = command(capsys, "clipless", "--list")
        assert code == 0 and "table-7/yeast/clipless  (theirs: 75.10%)" in out
        assert "privet certify" in out and "privet bench --method clipless" in out


def command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["reproduce", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, "tiny", "--seeds", "1", "--threads", "1")
    assert code == 0 and out.strip() == table(TINY, read_results("reproduce/tiny"))
    assert "[1/2] small/flat seed 0: " in err and "[2/2]" in err and "0 s left" in err
    code, out, _ = command(capsys, "tiny", "--list")
    assert code == 0 and "small/noisy" in out and "theirs: 90.00%" in out and '"noise": 2.0' in out
    code, out, _ = command(capsys, "tiny", "--table", "--rows", "*/noisy", "--out", "elsewhere")
    assert code == 0 and "not run" in out and "small/flat" not in out and not Path("elsewhere").exists()
    code, out, err = command(capsys, "tiny", "--seeds", "1", "--json")
    rows: Sequence[Mapping[str, Any]] = json.loads(out)["rows"]
    assert (code, err) == (0, "") and [len(row["accuracies"]) for row in rows] == [1, 1]


def test_what_the_command_cannot_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = command(capsys, "unheard-of")
    assert (code, out) == (2, "") and "batch-clipping, " in err and ", tiny" in err
    assert command(capsys, "tiny", "--seeds", "0")[0] == 2
    code, _, err = command(capsys, "batch-clipping", "--rows", "eps3/*", "--data-dir", "nowhere", "--out", "new")
    assert code == 2 and "'mnist' were not found" in err and not Path("new").exists()
    bad = Row(key="bad", settings={**SETTINGS, "method": "unheard-of"})
    monkeypatch.setitem(STUDIES, "tiny", replace(TINY, rows=[bad]))
    code, out, err = command(capsys, "tiny", "--seeds", "1")
    assert code == 1 and "failed: There is no method" in out and "Failed: bad seed 0." in err


def test_a_full_disk_ends_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(under_test, "train", full)
    with pytest.raises(OSError):
        small()
    assert read_results("out") == []
