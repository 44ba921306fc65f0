"""The losing-less loss (Shamsabadi and Papernot 2021): Figures 3, 4 and 9, at the settings of its Tables 5 and 6.

One training of a row gives the whole curve: the noise is that of the table, and accuracies are read where the exact
accountant says that so much was spent. `theirs` are the accuracies that the paper names in its text, each the best of
five runs at epsilon below 3. λ = 1/(2β), fading (see `privet.losses`); for SSE+CE and SSE+focal, whose settings the
paper searched for and does not print, e_t and γ of the full loss are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .study import Row, Study


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """A line of Table 5 and one of Table 6."""

    lr: float
    batch: int
    epochs: int
    noise: float
    turn: float
    beta: float
    gamma: float
    more: Mapping[str, Any]


_SCATTERING: Mapping[str, Any] = {"features": "scattering", "normalise": "group"}

_SETTINGS: Mapping[str, tuple[str, _Setting]] = {
    "mnist": (
        "mnist",
        _Setting(
            lr=0.5, batch=512, epochs=40, noise=1.23, turn=0, beta=1, gamma=5, more={"model": "mnist-cnn"},
        ),
    ),
    "fashion": (
        "fashion-mnist",
        _Setting(
            lr=4, batch=2048, epochs=40, noise=2.15, turn=0, beta=1, gamma=5, more={"model": "mnist-cnn"},
        ),
    ),
    "cifar10": (
        "cifar10",
        _Setting(
            lr=1, batch=1024, epochs=30, noise=1.54, turn=7, beta=11, gamma=5, more={"model": "cifar-cnn"},
        ),
    ),
    "mnist-scattering": (
        "mnist",
        _Setting(
            lr=1, batch=1024, epochs=25, noise=1.35, turn=2, beta=11, gamma=10,
            more={"model": "scatter-mnist-cnn", **_SCATTERING},
        ),
    ),
    "fashion-scattering": (
        "fashion-mnist",
        _Setting(
            lr=4, batch=2048, epochs=40, noise=2.15, turn=2, beta=51, gamma=2,
            more={"model": "scatter-mnist-cnn", **_SCATTERING},
        ),
    ),
    "cifar10-scattering": (
        "cifar10",
        _Setting(
            lr=4, batch=8192, epochs=60, noise=5.67, turn=2, beta=1, gamma=2,
            more={"model": "scatter-cifar-cnn", **_SCATTERING},
        ),
    ),
}  # fmt: skip

_LOSSES: Mapping[str, str] = {
    "ce": "cross-entropy",
    "sse": "SSE alone",
    "sse+ce": "from SSE to cross-entropy",
    "sse+focal": "from SSE to the focal loss",
    "losing-less": "the full loss",
}

# The best of five runs at epsilon below 3, end to end (sections 1 and 4.1). Of CIFAR-10 it also says 45.9% (CE) and
# 55.4% (full loss) below 1.5, and on scattering features 64.5% and 66.8% below 2.
_THEIRS = {
    ("mnist", "ce"): 0.982,
    ("fashion", "ce"): 0.869,
    ("cifar10", "ce"): 0.598,
    ("cifar10", "losing-less"): 0.632,
}


def _row(where: str, loss: str, name: str = "", note: str = "", **loss_options: Any) -> Row:
    data, table = _SETTINGS[where]
    options: dict[str, Any] = {}
    if loss not in ("ce", "sse"):
        options["threshold_epoch"] = table.turn
    if loss in ("sse+focal", "losing-less"):
        options["gamma"] = table.gamma
    if loss == "losing-less":
        options["penalty"] = 1 / (2 * table.beta)
    options |= loss_options
    settings = {
        "data": data, "method": "per-example", "method_options": {"clip": 0.1}, "noise": table.noise, "delta": 1e-5,
        "batch": table.batch, "epochs": table.epochs, "lr": table.lr, "momentum": 0.9, "loss": loss,
        "loss_options": options, "preset": False, **table.more,
    }  # fmt: skip
    key = name or loss
    return Row(key=f"{where}/{key}", settings=settings, theirs=_THEIRS.get((where, key)), note=note or _LOSSES[loss])


def _staying(where: str) -> Row:
    """Another reading of equation (8), in which the penalty keeps its weight: λ = 1/β, without the half."""
    note = "the full loss, with a penalty that stays"
    return _row(where, "losing-less", "penalty-stays", note, penalty=1 / _SETTINGS[where][1].beta, penalty_fades=False)


def _to_cross_entropy(where: str) -> Row:
    """The combination that the paper's ablation leaves out: SSE with the penalty, then cross-entropy (γ = 0)."""
    return _row(where, "losing-less", "sse+penalty+ce", "from SSE with the penalty to cross-entropy", gamma=0)


def _at_3(row: Row) -> Row:
    """Noise for epsilon 3 by the exact accountant: that of Table 5, which was for 3 by another one, costs 2.4."""
    where, _, name = row.key.partition("/")
    settings = {name: value for name, value in row.settings.items() if name != "noise"}
    return replace(
        row,
        key=f"{where}-at-3/{name}",
        settings={**settings, "epsilon": 3.0},
        note=f"{row.note}, with noise for epsilon 3",
    )


def _original(where: str, loss: str) -> Row:
    """At epsilon 3, the network of Tramèr and Boneh's code, which Table 4 prints with twice the convolutions."""
    row = _at_3(_row(where, loss))
    return replace(
        row,
        key=row.key.replace("-at-3/", "-original/"),
        settings={**row.settings, "model_options": {"original": True}},
        theirs=_LINEAR[where.removesuffix("-scattering")][1] if loss == "ce" else None,
        note=f"{row.note}, the network as Tramèr and Boneh have it",
    )


# Best published without extra data at epsilon 3 (Tramèr and Boneh 2021); settings chosen on validation records.
_LINEAR: Mapping[str, tuple[str, float, Mapping[str, Any]]] = {
    "mnist": ("mnist", 0.987, {"batch": 4096, "epochs": 40, "lr": 4}),
    "fashion": ("fashion-mnist", 0.897, {"batch": 8192, "epochs": 40, "lr": 24}),
    "cifar10": ("cifar10", 0.693, {"batch": 8192, "epochs": 60, "lr": 4}),
}


def _linear(where: str) -> Row:
    data, theirs, chosen = _LINEAR[where]
    settings = {
        "data": data, "method": "per-example", "method_options": {"clip": 0.1}, "epsilon": 3.0, "delta": 1e-5,
        "momentum": 0.9, "loss": "ce", "preset": False, "model": "linear", **_SCATTERING, **chosen,
    }  # fmt: skip
    return Row(
        key=f"{where}-linear/epsilon-3",
        settings=settings,
        theirs=theirs,
        note="one linear layer on scattering features",
    )


def _of(where: str) -> list[Row]:
    """The rows of a line of Table 5."""
    as_printed = [*(_row(where, loss) for loss in _LOSSES), _to_cross_entropy(where)]
    full = [_at_3(row) for row in as_printed if row.settings["loss"] in ("ce", "losing-less")]
    original = [_original(where, loss) for loss in ("ce", "losing-less")] if "scattering" in where else []
    return [*as_printed, _staying(where), *full, *original]


STUDY = Study(
    name="losing-less",
    title="The losing-less loss (Shamsabadi and Papernot 2021)",
    about=(
        "Per-example clipping at C = 0.1 with Poisson sampling; the networks of the paper's Tables 1 to 4 with tanh. "
        "`within 1` and so on are accuracies on the test set when the exact accountant says that so much was spent. "
        "CIFAR-10 is the JPEG-compressed copy."
    ),
    rows=[*(row for where in _SETTINGS for row in _of(where)), *map(_linear, _LINEAR)],
    epsilons=(1.0, 1.5, 2.0, 3.0),
)
