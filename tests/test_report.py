"""report.html: what it says, that it says it safely, and that it needs nothing beside it."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from privet import ConfigError
from privet.accounting import Mechanism, epsilon
from privet.training import TrainConfig, train
from privet.training.report import plots, write_report

GAUSSIAN = Mechanism(kind="gaussian", noise_multiplier=4.0)
"""Unsampled, so its trade-off curve is known: that of two normal distributions μ = √steps/σ apart."""
STATEMENT: dict[str, Any] = {
    "unit": "record", "relation": "add_remove", "epsilon": epsilon([(GAUSSIAN, 9)], 1e-5).epsilon, "delta": 1e-5,
    "accountant": "gdp", "epsilon_is": "a proven upper bound", "tight": True,
    "method": {"name": "per-example", "clip": 0.1, "groups": None, "adaptive": False},
    "sampling": {"rule": "Partition", "batch": 480}, "records": 1437, "records_are_public": "stated by the user",
    "public_records": 40, "noise_multiplier": 4.0, "noise_level": "system", "steps": 27, "compositions": 9,
    "groups": [{"group": "all", "parameters": 1210, "sensitivity": 0.1, "noise_std": 0.4}],
    "mechanism": GAUSSIAN.to_json(), "planned": {"steps": 27, "epsilon": 3.2}, "ledger": "digits.ledger",
    "independence_checked": True, "not_covered": ["Side channels."], "ended": "finished",
    "data": {"name": "digits", "classes": 10, "description": "Pixels were divided by 16."}, "model": "mlp",
    "held_out": {"accuracy": 0.9, "loss": 0.3, "records": 360}, "ledger_total": {"epsilon": 4.5, "runs": 2},
    "versions": {"privet": "0.1.0", "torch": "2.13.0"}, "time": "2026-01-02T03:04:05+00:00",
}  # fmt: skip
DIAGNOSTICS: dict[str, Any] = {
    "records": 360, "clip": 0.1, "weights": {"0.weight": 1.0, "0.bias": 0.1, "2.weight": 2.0},
    "pre_activations": {"0": 1.0, "2": 3.0},
    "gradients": {
        "not_finite": 0, "quantiles": {"50%": 0.1}, "above_clip": 0.5, "cosine": -0.2,
        "histogram": {"first": -1, "per_decade": 1, "counts": [0, 300, 60, 0]},
    },
    "left_out": {"pre_activations of 5": "the layer was not called itself"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time: only tests that have `pictures` in their name do it."""
    if "pictures" not in request.node.name:
        monkeypatch.setattr(plots, "_svg", lambda title, paint: "<svg></svg>")


def folder_of(
    path: Path, *, diagnostics: Any = None, auroc: Any = None, epochs: int = 3, config: str = "seed = 0\n", **said: Any
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "privacy.json").write_text(json.dumps(STATEMENT | said))
    lines = [
        {"step": 9 * e, "epoch": e, "accuracy": 0.3 * e, "loss": 1 / e, "seconds": 1.0} for e in range(1, 1 + epochs)
    ]
    if auroc is not None:
        lines = [line | found for line, found in zip(lines, auroc, strict=True)]
    if diagnostics is not None:
        lines = [line | {"diagnostics": diagnostics} for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.toml").write_text(config)
    return path


def written(path: Path, **said: Any) -> str:
    return write_report(folder_of(path, **said)).read_text()


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)))


class Outline(HTMLParser):
    """All tags with their attributes; fails where one is closed that is not open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_real_run_gives_a_page_with_pictures(tmp_path: Path) -> None:
    train(
        TrainConfig(
            sampling="partition", batch=512, epochs=2, noise=2.0, delta=1e-5, threads=1, preset=False,
            model_options={"hidden": [8]}, out=str(tmp_path / "run"), ledger=str(tmp_path / "l.ledger"),
        )
    )  # fmt: skip
    before = {p.name for p in (tmp_path / "run").iterdir()}
    path = write_report(tmp_path / "run")
    assert path.name == "report.html" and {p.name for p in path.parent.iterdir()} == before | {"report.html"}
    html = path.read_text()
    assert write_report(tmp_path / "run").read_text() == html and len(html) < 500_000
    assert "held-out accuracy" in html and "privet train config.toml" in html and "Diagnostics" in html


def test_page_and_pictures_are_whole_accessible_and_without_scripts_or_references(tmp_path: Path) -> None:
    html = written(tmp_path, diagnostics=DIAGNOSTICS)
    outline = Outline(html)
    ids = [a["id"] for _, a in outline.tags if "id" in a]
    for tag, attributes in outline.tags:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert (attributes.get("href") or "#").startswith("#")
    assert len(ids) == len(set(ids)) and {h[1:] for _, a in outline.tags if (h := a.get("href"))} <= set(ids)
    assert not re.search(r"@import|url\((?!#)|https?://", html)
    figures = [a for tag, a in outline.tags if tag == "svg" and a.get("role") == "img"]
    assert len(figures) == 8 and html.count('role="img"><title>') == 8 and "width" not in figures[0]
    assert [tag for tag, _ in outline.tags].count("h1") == 1 and '<html lang="en">' in html
    assert all("scope" in a for tag, a in outline.tags if tag == "th")
    assert "prefers-color-scheme:dark" in html and "@media print" in html and "width=device-width" in html
    variables = set(re.findall(r"var\((--[\w-]+)\)", html))
    dark = html[html.index("prefers-color-scheme:dark") : html.index("*{box-sizing")]
    assert variables and all(f"{v}:" in dark for v in variables)
    assert not re.search(r"#0[1-4]0[1-3]0\d", html)  # stand-ins for colours


@pytest.mark.parametrize(
    ("unit", "relation", "change"),
    [
        ("record", "add_remove", "adding or removing one record"),
        ("record", "replace_one", "replacing one record by any other"),
        ("user", "add_remove", "adding or removing all records of one user"),
    ],
)
def test_the_guarantee_says_what_is_protected(tmp_path: Path, unit: str, relation: str, change: str) -> None:
    text = words(written(tmp_path, unit=unit, relation=relation))
    assert change in text and "This ε is a proven upper bound" in text and "protects nothing" not in text


def test_numbers_are_rounded_to_the_safe_side(tmp_path: Path) -> None:
    text = words(written(tmp_path, epsilon=3.70001, ledger_total={"epsilon": 4.50001, "runs": 2}))
    assert "ε = 3.701 at δ = 10−5" in text and "ε = 4.501 for all 2 runs recorded in digits.ledger" in text
    assert f"= {math.ceil(10 * math.exp(3.70001)) / 10}" in text


def test_the_best_attack_is_that_of_the_mechanism(tmp_path: Path) -> None:
    normal = NormalDist()
    power = normal.cdf(normal.inv_cdf(0.01) + 3 / 4)
    found = re.search(r"1% false positives has at most ([\d.]+)% true positives", words(written(tmp_path)))
    assert found and 100 * power <= float(found[1]) <= 100 * power + 0.1


def test_all_that_was_spent_counts(tmp_path: Path) -> None:
    """Queries beside the steps are part of the run: without them the attack would look weaker than it is."""
    query = Mechanism(kind="gaussian", noise_multiplier=1.0)
    spent = [{"mechanism": GAUSSIAN.to_json(), "count": 9}, {"mechanism": query.to_json(), "count": 1}]
    stated = epsilon([(GAUSSIAN, 9), (query, 1)], 1e-5).epsilon
    text = words(written(tmp_path, spent=spent, epsilon=stated))
    normal = NormalDist()
    power = 100 * normal.cdf(normal.inv_cdf(0.01) + math.hypot(3 / 4, 1))
    found = re.search(r"has at most ([\d.]+)% true", text)
    assert found and power <= float(found[1]) <= power + 0.1 and "1 × Gaussian with multiplier 1" in text


def test_a_statement_that_claims_too_little_gets_no_report(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, epsilon=STATEMENT["epsilon"] * 0.99)
    with pytest.raises(ConfigError, match="what it says was spent costs"):
        write_report(folder)
    with pytest.raises(ConfigError):
        write_report(folder_of(tmp_path, epsilon=math.nan))
    assert not (folder / "report.html").exists()


def test_a_seeded_run_protects_nothing_and_says_so_in_red(tmp_path: Path) -> None:
    mechanism = replace(GAUSSIAN, seeded=True).to_json()
    told = {"noise_level": "seeded", "epsilon_is": "no guarantee: the noise can be reproduced from a seed"}
    planned = {"steps": 10, "epsilon": 2.5}
    html = written(tmp_path, **told, epsilon="inf", mechanism=mechanism, planned=planned)
    text = words(html)
    assert "would have cost ε = 2.500" in text
    assert "This run protects nothing." in text and 'class="guarantee alarm"' in html
    assert ".alarm strong{color:var(--alarm)}" in html
    assert "differentially private" not in text and "true positives" not in text and "Trade-off" not in text


def test_a_run_without_noise_protects_nothing(tmp_path: Path) -> None:
    none = GAUSSIAN.to_json() | {"noise_multiplier": 0.0}
    text = words(written(tmp_path, epsilon="inf", mechanism=none, ledger_total={"epsilon": "inf", "runs": 1}))
    assert "protects nothing" in text and "No finite ε" in text and "true positives" not in text and "ε = ∞" in text


@pytest.mark.parametrize(("ended", "said"), [("budget", "budget allowed no further"), ("interrupted", "interrupted")])
def test_an_early_end_is_told(tmp_path: Path, ended: str, said: str) -> None:
    assert said in words(written(tmp_path, ended=ended))
    assert said not in words(written(tmp_path))


def test_diagnostics_are_drawn_and_what_is_missing_is_told(tmp_path: Path) -> None:
    html = written(tmp_path, diagnostics=DIAGNOSTICS)
    text = words(html)
    assert "The clip C is 0.1." in text and "Norm of weights (2 of 3)" in text
    assert all(
        s in text for s in ("0.weight", "epoch 1", "epoch 2", "epoch 3", "cosine of clipped", "not called itself")
    )
    less = {"records": 9, "clip": None, "weights": {}, "left_out": {"gradients": "Refused by name."}}
    text = words(written(tmp_path, diagnostics=less))
    assert "gradients: Refused by name." in text and "What clipping does" not in text


def test_many_layers_are_thinned_out_with_the_first_and_the_last(tmp_path: Path) -> None:
    many = DIAGNOSTICS | {"weights": {f"layer{i}.weight": 1.0 for i in range(62)}}
    text = words(written(tmp_path, diagnostics=many))
    assert "(6 of 62)" in text and "layer0.weight" in text and "layer61.weight" in text


def test_auroc_is_beside_accuracy_where_it_was_measured(tmp_path: Path) -> None:
    held_out = STATEMENT["held_out"] | {"auroc": 0.87654}
    text = words(written(tmp_path, held_out=held_out, auroc=[{"auroc": 0.5}, {}, {"auroc": 0.87654}]))
    assert "held-out AUROC0.8765" in text and "Held-out accuracy and AUROC" in text
    assert "AUROC" not in words(written(tmp_path))


def test_no_epoch_no_curve(tmp_path: Path) -> None:
    assert "No epoch was completed" in written(tmp_path, epochs=0)


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    fixed = {"unit", "relation", "noise_level", "time", "mechanism"}

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k if k in STATEMENT or k in KEYS else k + evil: v if k in fixed else spoiled(v)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [spoiled(v) for v in value]
        return value + evil if isinstance(value, str) else value

    KEYS = {key for part in _dicts(STATEMENT) + _dicts(DIAGNOSTICS) for key in part} - {"0.weight", "2.weight", "0"}
    KEYS -= {"torch", "clip", "pre_activations of 5"}
    method = spoiled(STATEMENT["method"])
    diagnostics = spoiled(copy.deepcopy(DIAGNOSTICS)) | {"clip": 0.1}
    diagnostics["gradients"] = DIAGNOSTICS["gradients"]
    html = written(
        tmp_path, **spoiled(copy.deepcopy(STATEMENT)) | {"method": method}, diagnostics=diagnostics,
        config=f'label = "{evil}"\n',
    )  # fmt: skip
    assert "<script" not in html
    for before in (
        "torch",
        "mlp",
        "Side channels.",
        "per-example",
        "0.weight",
        "all",
        "label = &quot;",
        "called itself",
    ):
        assert before + "&lt;script&gt;" in html, before


def _dicts(value: Any) -> list[dict[str, Any]]:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return ([value] if isinstance(value, dict) else []) + [d for v in inner for d in _dicts(v)]


@pytest.mark.parametrize("name", ["privacy.json", "metrics.jsonl", "config.toml"])
def test_missing_or_half_written_files_are_told_in_a_sentence(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    old = write_report(folder).read_bytes()
    whole = (folder / name).read_bytes()
    unended = [whole[:-1]] if name == "metrics.jsonl" else []  # valid JSON, and yet not all of it may be there
    for content in (whole[: len(whole) - 3], b"\xff\xfe" + whole, b"[1, 2]", *unended):
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name} is damaged"):
            write_report(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"no {name} in"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == old


@pytest.mark.parametrize(
    "said", [{"groups": None}, {"held_out": {}}, {"relation": "none"}, {"time": "now"}, {"delta": "x"}, {"spent": [1]}]
)
def test_content_of_another_kind_is_told_in_a_sentence(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not hold what this version"):
        write_report(folder_of(tmp_path, **said))
    with pytest.raises(ConfigError, match="does not hold what this version"):
        write_report(folder_of(tmp_path, diagnostics={"records": "many"}))


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, privet.cli, privet.training.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
