"""Certified radii: that no attack breaks them, that they are no smaller than need be, and what the command says."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import privet.certify as module
from privet import ConfigError, Refused
from privet.certify import WRONG, attacked, certified_accuracy, certified_radii, predicted, prove
from privet.cli import main
from privet.data import images, load
from privet.nn.lipschitz import (
    Bias,
    BoundedInput,
    Colour,
    Conv2d,
    GroupSort,
    L2NormPool2d,
    Linear,
    Normalize,
    Residual,
    held,
    lipschitz_mlp,
)
from privet.training import TrainConfig

Kind = Literal["ball", "sphere"]
SHARPER = pytest.mark.parametrize("sharper", [False, True], ids=["design", "sharper"])


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 25) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for step in range(steps):
        some = slice(step * 128 % len(x), step * 128 % len(x) + 128)
        nn.functional.cross_entropy(5 * model(x[some]), y[some]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def digits_model(radius: float, kind: Kind = "ball") -> nn.Module:
    torch.manual_seed(0)
    return lipschitz_mlp(input_shape=(1, 8, 8), classes=10, radius=radius, kind=kind, hidden=(32, 32))


# The geometry


def furthest(n: float, r: float, radius: float, kind: Kind) -> float:
    """How far P(x) moves at most for ‖x‖ = n and moves of up to r, by trying: all happens in one plane."""
    angles, lengths = np.meshgrid(np.linspace(0, np.pi, 1201), np.array([0.7, 1.0]))
    x = np.array([n, 0.0])
    moved = x + (r * lengths * np.array([np.cos(angles), np.sin(angles)])).reshape(2, -1).T
    place = BoundedInput((2,), radius, kind)
    points = place(torch.from_numpy(np.vstack([x, moved])))
    return float((points[1:] - points[0]).norm(dim=1).max())


@pytest.mark.parametrize("kind", ["ball", "sphere"])
@pytest.mark.parametrize("n", [0.3, 0.999, 1.0, 1.01, 1.2, 1.7, 3.0, 20.0])
@pytest.mark.parametrize("m", [0.01, 0.3, 0.9, 1.3, 1.95])
def test_a_move_within_the_radius_moves_the_bounded_record_no_further(kind: Kind, n: float, m: float) -> None:
    radius = 2.5
    place = BoundedInput((2,), radius, kind)
    given = torch.tensor([m * radius], dtype=torch.float64), torch.tensor([n * radius], dtype=torch.float64)
    design, sharp = (float(rule(*given, place)) for rule in (module._radius, module._sharp_radius))
    assert design <= sharp * (1 + 1e-12)
    for r in (design, sharp):
        assert furthest(n * radius, r * (1 - 1e-9), radius, kind) <= m * radius * (1 + 1e-9)
    if m < 1 + min(n, 1):  # no larger radius would do
        assert furthest(n * radius, sharp * 1.003, radius, kind) > m * radius


def test_the_better_of_the_two_meets_the_condition_of_the_second_by_itself() -> None:
    n = torch.linspace(0.1, 5, 200, dtype=torch.float64)
    for m in (0.05, 0.5, 1.5):
        r = module._radius(torch.full_like(n, m), n, BoundedInput((1,), 1.0))
        second = r > m * (1 + 1e-12)
        assert second.any() and bool((r[second] <= n[second] - 1 + 1e-12).all())


# Attacks


def small_conv() -> nn.Module:
    return nn.Sequential(
        Normalize((0.2, 0.3, 0.4), (0.5, 0.25, 1.0)),
        Colour("yiq"),
        BoundedInput((3, 6, 6), 4.0),
        Conv2d(3, 8, 3, padding=1, constraint=None),
        Bias(8),
        GroupSort(),
        Residual(Conv2d(8, 8, 3, padding=1, constraint=None), GroupSort()),
        L2NormPool2d(2),
        nn.Flatten(),
        Linear(72, 4, constraint=None),
    )


def dense(classes: int, radius: float, kind: Kind = "ball") -> nn.Module:
    """Neither orthogonal nor of norm 1, so that constants are not all 1."""
    layers = [Linear(6, 8, constraint=None), nn.Tanh(), Linear(8, classes, constraint=None)]
    return nn.Sequential(BoundedInput((6,), radius, kind), *layers)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "inside and outside": (lambda: dense(3, 2.4), (6,)),
    "inside": (lambda: dense(3, 100.0), (6,)),
    "far outside": (lambda: dense(3, 0.2), (6,)),
    "sphere": (lambda: dense(3, 1.0, "sphere"), (6,)),
    "one score": (lambda: dense(1, 2.0), (6,)),
    "two scores": (lambda: dense(2, 2.0), (6,)),
    "conv behind colours": (small_conv, (3, 6, 6)),
}


@SHARPER
@pytest.mark.parametrize("name", NETWORKS)
def test_no_attack_within_the_radius_changes_a_prediction(name: str, sharper: bool) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(1)
    model, x = make(), torch.randn(48, *shape)
    y = predicted(model(x).detach())
    radii = certified_radii(model, x, y, sharper=sharper)
    assert float(radii.min()) >= 0 and float(radii.median()) > 1e-3
    assert not attacked(model, x, y, radii, restarts=6, steps=12).any()
    assert attacked(model, x, y, 10 * radii, steps=12).double().mean() > 0.2  # the attack is worth the name


@pytest.mark.parametrize(("radius", "kind"), [(3.0, "ball"), (1.0, "ball"), (2.0, "sphere")])
def test_no_attack_on_trained_digits(radius: float, kind: Kind) -> None:
    data = load("digits")
    model = trained(digits_model(radius, kind), *data.train.tensors)
    x, y = (part[:64] for part in data.test.tensors)
    for sharper in (False, True):
        radii = certified_radii(model, x, y, sharper=sharper)
        right = radii >= 0
        assert right.double().mean() > 0.8
        assert not attacked(model, x[right], y[right], radii[right], restarts=10, steps=12).any()
        assert attacked(model, x[right], y[right], 1.6 * radii[right]).double().mean() > 0.9  # so it is near


def rotated(rows: Sequence[Sequence[float]]) -> Tensor:
    """The rows in other orthonormal coordinates."""
    torch.manual_seed(3)
    turn, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    return torch.tensor(rows, dtype=torch.float64) @ turn


def linear_model(rows: Sequence[Sequence[float]], radius: float, kind: Kind = "ball") -> nn.Sequential:
    layer = nn.Linear(4, len(rows), bias=False).double()
    layer.weight.data = rotated(rows)
    return nn.Sequential(BoundedInput((4,), radius, kind), layer)


@pytest.mark.parametrize(
    ("rows", "radius", "kind", "sharper"),
    [
        ([[1, 0, 0, 0], [0, 1, 0, 0]], 50.0, "ball", False),  # √2 is met: the scores can move against each other
        ([[3, 0, 0, 0]], 50.0, "ball", False),  # and for one score there is no √2
        ([[1, 0, 0, 0], [0.9, 0.1, 0, 0], [-5, 1, 0, 0]], 50.0, "ball", True),  # each pair has a constant of its own
        ([[1, 0, 0, 0], [0, 1, 0, 0]], 0.5, "ball", True),
        ([[1, 0, 0, 0], [0, 1, 0, 0]], 0.5, "sphere", True),
        ([[1, 0, 0, 0], [0, 1, 0, 0]], 1.9, "ball", True),  # on both sides of the surface
    ],
)
def test_radii_are_as_large_as_they_can_be(
    rows: Sequence[Sequence[float]], radius: float, kind: Kind, sharper: bool
) -> None:
    """So whatever makes any of them 2 % larger (√2 left out, half of L, r = m·n/R) is seen to break."""
    model = linear_model(rows, radius, kind)
    if len(rows) == 3:
        rows = rows[:2]  # records between the two near classes
    turned = rotated([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    x = (torch.randn(64, 4, dtype=torch.float64) * 0.3 + torch.tensor([1.5, 1.2, 0, 0])) @ turned
    y = predicted(model(x).detach())
    radii = certified_radii(model, x, y, sharper=sharper)
    assert not attacked(model, x, y, radii, restarts=3, steps=40).any()
    broken = attacked(model, x, y, 1.02 * radii, restarts=3, steps=40)
    assert broken.double().mean() > 0.95


def edge(m: float) -> nn.Sequential:
    """One score, which is m at the point (1, 0) of the unit circle and 0 first at another point of it, m away."""
    angle = 2 * math.asin(m / 2)
    there = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    layer = nn.Linear(2, 1).double()
    layer.weight.data = ((torch.tensor([1.0, 0.0]) - there) / m).unsqueeze(0)
    layer.bias.data = -layer.weight.data @ there
    return nn.Sequential(BoundedInput((2,), 1.0), layer)


@pytest.mark.parametrize(("m", "n"), [(1.0, 3.0), (0.5, 1.5), (0.9, 1.1), (1.6, 1.2)])
def test_beyond_the_ball_radii_are_as_large_as_they_can_be(m: float, n: float) -> None:
    model, x, y = edge(m), torch.tensor([[n, 0.0]], dtype=torch.float64), torch.tensor([1])
    certified, sharp = (certified_radii(model, x, y, sharper=sharper) for sharper in (False, True))
    assert certified[0] == pytest.approx(max(m, m * n / (1 + m)), rel=1e-3)
    assert not attacked(model, x, y, sharp, restarts=3, steps=40).any()
    assert attacked(model, x, y, 1.01 * sharp, restarts=3, steps=40).all()


@pytest.mark.parametrize("wrong", ["without root 2", "half of L", "m n / R", "as on the surface everywhere"])
def test_wrong_certificates_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each formula with a likely mistake falls to the attack of the tests above."""
    rules = {
        "m n / R": ("_radius", lambda m, n, place: torch.maximum(m, m * n)),
        "as on the surface everywhere": ("_sharp_radius", lambda m, n, place: ((n - 1) ** 2 + m**2 * n).sqrt()),
    }
    factor = {"without root 2": math.sqrt(2), "half of L": 2}.get(wrong, 1)
    torch.manual_seed(0)
    if wrong in rules:
        monkeypatch.setattr(module, *rules[wrong])
        model, x = edge(0.5), torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    else:
        model, x = linear_model([[1, 0, 0, 0], [0, 1, 0, 0]], 10.0), torch.randn(50, 4, dtype=torch.float64)
    y = predicted(model(x).detach())
    radii = certified_radii(model, x, y, sharper=rules.get(wrong, ("",))[0] == "_sharp_radius") * factor
    assert attacked(model, x, y, radii, restarts=4, steps=40).any()


# What is certified


def test_wrong_predictions_and_ties() -> None:
    model = linear_model([[1, 0, 0, 0], [0, 1, 0, 0]], 10.0)
    turned = rotated([[1, 0, 0, 0], [0, 1, 0, 0]])
    radii = certified_radii(model, torch.stack([turned[0], turned[0], 0 * turned[0]]), torch.tensor([0, 1, 0]))
    assert radii[0] == pytest.approx(1 / math.sqrt(2), rel=1e-3) and radii[0] < 1 / math.sqrt(2)
    assert radii[1:].tolist() == [WRONG, 0.0]
    assert certified_accuracy(radii, [0.0, 0.5, 0.8]) == pytest.approx([2 / 3, 1 / 3, 0])


def test_a_bias_that_decides_alone_and_records_that_are_no_numbers() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.data.zero_()
    layer.bias.data = torch.tensor([1.0, 0.0])
    model = nn.Sequential(BoundedInput((2,), 1.0), layer)
    x = torch.tensor([[0.5, 0.5], [3.0, 4.0], [math.nan, 0.0], [1e38, 1e38]])
    radii = certified_radii(model, x, torch.zeros(4, dtype=torch.long))
    assert bool(torch.isfinite(radii).all()) and radii[2:].tolist() == [0.0, 0.0]
    assert float(radii[0]) > 1.9 and float(radii[1]) > 3.3


def test_sharper_is_never_smaller() -> None:
    for make, shape in NETWORKS.values():
        torch.manual_seed(5)
        model, x = make(), torch.randn(64, *shape)
        y = predicted(model(x).detach())
        both = [certified_radii(model, x, y, sharper=sharper) for sharper in (False, True)]
        assert bool((both[1] >= both[0] * (1 - 1e-12)).all())


def test_a_pair_has_the_norm_of_its_difference_times_the_layers_before() -> None:
    model = nn.Sequential(BoundedInput((2,), 10.0), nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    model[1].weight.data = 3 * torch.eye(2)
    model[2].weight.data = torch.tensor([[1.0, 0], [0.6, 0], [0, -4]])
    model.double()
    radii = certified_radii(model, torch.tensor([[1.0, 1.0]]).double(), torch.tensor([0]), sharper=True)
    assert float(radii) == pytest.approx((3 - 1.8) / (0.4 * 3), rel=1e-3)


def test_rounding_grows_with_the_terms_of_a_sum() -> None:
    model = nn.Sequential(BoundedInput((3000,), 7.0), nn.Linear(3000, 2, bias=False))
    error = 3000 * 2**-24 * float(model[1].weight.detach().norm()) * 7
    with held(model):
        assert 2 * math.sqrt(2) * error <= prove(model).rounding < 3 * math.sqrt(2) * error


def test_what_rounding_can_do_is_taken_off() -> None:
    """The scores of float32 are within E of those of float64; a gap that rounding could make is certified for 0."""
    torch.manual_seed(0)
    for make, shape in NETWORKS.values():
        model, x = make(), torch.randn(64, *shape)
        with held(model), torch.no_grad():
            proof = prove(model)
            computed = model(x)
            exact = copy.deepcopy(model).double()(x.double())
        assert float((computed - exact).norm(dim=1).max()) <= proof.rounding / (2 * math.sqrt(2)) < 1e-2
    model = linear_model([[1, 0, 0, 0], [0, 1, 0, 0]], 10.0).float()
    turned = rotated([[1, 0, 0, 0], [0, 1, 0, 0]]).float()
    near = turned[0] + turned[1] * torch.tensor([[1 - 1e-6], [1 - 1e-2]])
    radii = certified_radii(model, near, torch.tensor([0, 0]))
    assert radii[0] == 0 and radii[1] > 0


def test_constants_before_the_bounded_input_count() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(BoundedInput((3, 2, 2), 50.0), nn.Flatten(), Linear(12, 3))
    scaled = nn.Sequential(Normalize((0.0,) * 3, (0.5, 0.25, 1.0)), *network)
    x = torch.rand(20, 3, 2, 2)
    inner = scaled[0](x)
    y = predicted(network(inner).detach())
    whole, behind = certified_radii(scaled, x, y), certified_radii(network, inner, y)
    torch.testing.assert_close(whole, behind / 4, rtol=1e-3, atol=1e-4)
    assert bool((whole <= behind / 4).all())
    hsv = nn.Sequential(Colour("hsv"), *network)
    y = predicted(hsv(x).detach())
    with held(hsv):
        assert prove(hsv).behind and not prove(scaled).behind
    torch.testing.assert_close(certified_radii(hsv, x, y), certified_radii(network, hsv[0](x), y))


def test_models_that_cannot_be_certified_are_refused() -> None:
    x, y = torch.randn(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(Refused, match="BoundedInput"):
        certified_radii(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), x, y)
    with pytest.raises(Refused, match="'1' \\(BatchNorm2d\\)"):
        certified_radii(nn.Sequential(BoundedInput((1, 4, 4)), nn.BatchNorm2d(1), nn.Flatten()), x, y)
    with pytest.raises(Refused, match="one row of scores"):
        certified_radii(nn.Sequential(BoundedInput((1, 4, 4)), Conv2d(1, 2, 3)), x, y)
    with pytest.raises(ConfigError, match="no records"):
        certified_accuracy(torch.zeros(0), [0.0])


def test_an_attack_keeps_to_its_radius() -> None:
    model = dense(3, 2.0)
    x = torch.randn(32, 6) * 1000
    seen: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda _layer, given: seen.append(given[0].detach().double()))
    attacked(model, x, predicted(model(x).detach()), 1.0, restarts=2, steps=5)
    assert max(float((at - x.double()).norm(dim=1).max()) for at in seen) < 1.001
    assert not attacked(model, x, predicted(model(x).detach()), 0.0, restarts=2, steps=5).any()
    # Rounded to float32, the move that would change the prediction is longer than allowed: it does not count.
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.eye(2)
    near = torch.full((1, 2), 1000.0)
    near[0, 1] = torch.nextafter(near[0, 0], torch.tensor(0.0))
    assert not attacked(nn.Sequential(BoundedInput((2,), 1e5), layer), near, torch.tensor([0]), 5e-5).any()
    assert attacked(nn.Sequential(BoundedInput((2,), 1e5), layer), near, torch.tensor([0]), 1e-4).all()


# Units


def test_pixels_of_cifar10_are_counted_before_they_were_standardised() -> None:
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (40, 3073), dtype=np.uint8)
    records[:, 0] = 0
    records[20:, 1:] = records[:20, 1:]
    for channel in range(3):  # one channel at a time differs
        part = slice(1 + 1024 * channel, 1 + 1024 * (channel + 1))
        records[20 + channel :: 3, part] = rng.integers(0, 256, records[20 + channel :: 3, part].shape)
    x = images._cifar_tensors(records).tensors[0].double().flatten(1)
    pixels = torch.from_numpy(records[:, 1:] / 255)
    run: Any = SimpleNamespace(config=TrainConfig(), data=SimpleNamespace(name="cifar10"))
    unit = module.unit_of(run)
    inputs, told = (x[20:] - x[:20]).norm(dim=1), (pixels[20:] - pixels[:20]).norm(dim=1)
    assert bool((inputs * unit.least <= told * (1 + 1e-6)).all()) and bool(
        (inputs * unit.most >= told * 0.999999).all()
    )
    assert float((inputs * unit.least / told).max()) > 0.999


def test_other_units_are_named() -> None:
    def named(name: str, **options: Any) -> module.Unit:
        run: Any = SimpleNamespace(config=TrainConfig(**options), data=SimpleNamespace(name=name))
        return module.unit_of(run)

    assert "0 to 1" in named("mnist").name and "over 16" in named("digits").name
    assert "rows" in named("people.csv").name and "scattering" in named("mnist", features="scattering").name
    assert {named(name).least for name in ("mnist", "digits", "people.csv")} == {1.0}


# The command


def write_run(folder: Path, network: nn.Module, **options: Any) -> Path:
    """What `privet train` leaves behind, without the training."""
    folder.mkdir()
    config = TrainConfig(data="digits", method="clipless", batch=64, **options)
    (folder / "config.toml").write_text(config.to_toml())
    needed = ("epsilon", "delta", "epsilon_is", "mechanism", "compositions", "steps", "records", "held_out", "groups")
    (folder / "privacy.json").write_text(json.dumps(dict.fromkeys(needed)))
    safetensors.torch.save_file(network.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = trained(digits_model(3.0), *load("digits").train.tensors)
    options = {"radius": 3.0, "hidden": [32, 32]}
    name = "privet.nn.lipschitz.models:lipschitz_mlp"
    return write_run(tmp_path_factory.mktemp("runs") / "run", model, model=name, model_options=options)


def test_the_command_prints_json(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", str(run_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["radii"]
    assert [row["radius"] * 255 for row in rows] == pytest.approx([0, 1, 2, 4, 8, 16, 36, 72, 108])
    assert found["records"] == 360 and found["accuracy"] == rows[0]["certified"] == rows[0]["sharper"] > 0.85
    for before, after in itertools.pairwise(rows):
        assert after["certified"] <= after["sharper"] <= before["sharper"]
    assert 0 < rows[-1]["certified"] < rows[0]["certified"] and "attacked" not in rows[0]
    assert "0 to 1" in found["unit"] and found["input"] == "ball of radius 3" and "no privacy" in found["cost"]
    assert found["lipschitz"] == pytest.approx(1, abs=0.01) and 0 < found["rounding"] < 0.01

    assert main(["certify", str(run_folder), "--json", "--float64"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert exact["rounding"] < 1e-9 and exact["precision"] == "float64"
    assert all(b["certified"] >= a["certified"] for a, b in zip(rows, exact["radii"], strict=True))


def test_the_command_attacks_and_draws(run_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "certified.svg"
    command = ["certify", str(run_folder), "--records", "40", "--radii", "0.4, 8/255,0", "--attack", "1"]
    assert main([*command, "--plot", str(plot)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for said in ("40 held-out records of digits", "8/255", "attacked", "no privacy"):
        assert said in out
    assert plot.read_text().lstrip().startswith("<?xml")
    assert main([*command, "--json", "--plot", str(tmp_path / "certified.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (tmp_path / "certified.png").read_bytes().startswith(b"\x89PNG")
    assert [row["radius"] for row in found["radii"]] == pytest.approx([0, 8 / 255, 0.4])
    assert all(row["sharper"] <= row["attacked"] <= found["accuracy"] for row in found["radii"])
    assert found["records"] == 40 and found["broken"] == 0 and found["restarts"] == 1


def test_a_certificate_that_an_attack_breaks_ends_with_1(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = module._radius
    monkeypatch.setattr(module, "_radius", lambda m, n, place: 3 * honest(m, n, place))
    assert main(["certify", str(run_folder), "--records", "40", "--radii", "0.4,0.8", "--attack", "1"]) == 1
    assert "certificate is broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--radii", "a"], "0,8/255,0.25"),
        (["--radii", "1/0"], "0,8/255,0.25"),
        (["--radii", "0,-1"], "at least 0"),
        (["--radii", "inf"], "0,8/255,0.25"),
        (["--plot", "a.pdf"], ".svg or .png"),
        (["--records", "0"], "records must be at least 1"),
        (["--attack", "-1"], "attack must be at least 0"),
        (["--threads", "0"], "between 1 and"),
    ],
)
def test_wrong_options(given: list[str], said: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", str(run_folder), *given]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_what_cannot_be_certified_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", str(tmp_path)]) == 2
    assert "holds no finished run" in capsys.readouterr().err
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert main(["certify", str(write_run(tmp_path / "plain", plain, model="linear"))]) == 2
    assert "no BoundedInput" in capsys.readouterr().err


def hsv_model() -> nn.Module:
    """Three equal channels of a gray image, as HSV."""
    return nn.Sequential(nn.Identity(), _Repeat(), BoundedInput((3, 8, 8), 3.0), nn.Flatten(), Linear(192, 10))


class _Repeat(Colour):
    def __init__(self) -> None:
        super().__init__("hsv")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.expand(-1, 3, -1, -1))

    constants = Colour.constants


def test_radii_behind_a_layer_without_a_constant_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    folder = str(write_run(tmp_path / "hsv", hsv_model(), model=f"{Path(__file__).stem}:hsv_model"))
    assert main(["certify", folder, "--json"]) == 0
    assert "space behind" in json.loads(capsys.readouterr().out)["unit"]
    assert main(["certify", folder, "--attack", "1"]) == 2
    assert "leave --attack out" in capsys.readouterr().err


def test_a_trained_run_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained_as = ["train", "--method", "clipless", "--model", "privet.nn.lipschitz.models:lipschitz_mlp"]
    cheap = ["--sampling", "partition", "--noise", "4", "--steps", "2"]
    assert main([*trained_as, *cheap, "--out", "run", "--quiet", "--json"]) == 0
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    assert main(["certify", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(accuracy)
