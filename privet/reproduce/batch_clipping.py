"""Batch clipping and adaptive layerwise clipping (Nguyen et al. 2023): the paper's figures, and equal epsilon.

Two kinds of rows. `paper/…` repeats settings of appendix A. The paper adds noise 2·C_h·σ to each of L layers, so that
all of them together are one mechanism with multiplier σ/√L (its section 3.2), which is what `noise` says here; L counts
BatchNorm as layers. `eps3/…` and `eps8/…` compare methods at the same true epsilon, on the same private records and
over the same number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..nn import batchnorm_to_groupnorm, build
from .study import Row, Study

# Clip and learning rate of each comparison, for epsilon 3 and for epsilon 8. Two to four learning rates were tried for
# each kind on mnist-cnn at epsilon 3, on validation records (docs/results/batch-clipping.md); epsilon 8 has the same.
_TUNED: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "per-example/mnist-cnn": {3: (0.1, 3.0), 8: (0.1, 3.0)},
    "per-example/gn-lenet5": {3: (0.1, 3.0), 8: (0.1, 3.0)},
    "bc/mnist-cnn": {3: (0.1, 0.003), 8: (0.1, 0.003)},
    "bc/bn-lenet5": {3: (0.1, 0.003), 8: (0.1, 0.003)},
    "bc-alc/mnist-cnn": {3: (0.1, 0.003), 8: (0.1, 0.003)},
    "bc-alc/bn-lenet5": {3: (0.1, 0.003), 8: (0.1, 0.003)},
    "bc-sparsify/mnist-cnn": {3: (0.1, 0.003), 8: (0.1, 0.003)},
    "gbc-16/mnist-cnn": {3: (0.1, 0.03), 8: (0.1, 0.03)},
    "gbc-16/bn-lenet5": {3: (0.1, 0.03), 8: (0.1, 0.03)},
    "gbc-64/mnist-cnn": {3: (0.1, 0.3), 8: (0.1, 0.3)},
    "gbc-64/bn-lenet5": {3: (0.1, 0.3), 8: (0.1, 0.3)},
    "layerwise-fixed/mnist-cnn": {3: (0.05, 3.0), 8: (0.05, 3.0)},
    "layerwise-alc/mnist-cnn": {3: (0.1, 1.0), 8: (0.1, 1.0)},
    "layerwise-alc-optimal/mnist-cnn": {3: (0.1, 3.0), 8: (0.1, 3.0)},
    "layerwise-alc-2-groups/mnist-cnn": {3: (0.1, 3.0), 8: (0.1, 3.0)},
    "layerwise-zhang/mnist-cnn": {3: (0.1, 1.0), 8: (0.1, 1.0)},
    "layerwise-quantile/mnist-cnn": {3: (0.1, 0.5), 8: (0.1, 0.5)},
    "factors/mnist-cnn": {3: (0.1, 3.0), 8: (0.1, 3.0)},
}

_GN_LENET5 = f"{__name__}:gn_lenet5"

_COMPARED: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "per-example": ("per-example", {}, "DP-SGD"),
    "bc": ("batch", {"record_groups": 1}, "BC: the whole batch's mean is clipped"),
    "bc-alc": (
        "batch",
        {"record_groups": 1, "groups": "layer", "thresholds": "alc"},
        "BC with ALC, the paper's whole method: against `bc`, ALC against full-gradient clipping with σ/√L",
    ),
    "bc-sparsify": ("batch", {"record_groups": 1, "sparsify": 50}, "BC, weights without a signal are frozen"),
    "gbc-16": ("batch", {"record_groups": 16}, "GBC, 16 groups in a batch"),
    "gbc-64": ("batch", {"record_groups": 64}, "GBC, 64 groups in a batch"),
    "layerwise-fixed": ("layerwise", {}, "one C for all layers"),
    "layerwise-alc": ("layerwise", {"thresholds": "alc"}, "the paper's ALC"),
    "layerwise-alc-optimal": (
        "layerwise",
        {"thresholds": "alc", "allocation": "optimal"},
        "ALC, noise shared for the least total",
    ),
    "layerwise-alc-2-groups": (
        "layerwise",
        {"thresholds": "alc", "groups": 2},
        "ALC, layers of similar norm together (B.2)",
    ),
    "layerwise-zhang": ("layerwise", {"thresholds": "zhang"}, "C_h = C·e_h"),
    "layerwise-quantile": ("layerwise", {"adaptive": True}, "C_h follows the median norm, privately"),
    "factors": ("layerwise", {"factors": True}, "multiplication factors (B.2): one clip, no √L"),
}
"""The method of each comparison, by the first part of its key: name, options and what it is."""


def gn_lenet5(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """BN-LeNet-5 with GroupNorm, for methods that need records apart.

    Two groups, as the last norm sees 1 x 1 pixels: there a group has only its channels to normalise over.
    """
    return batchnorm_to_groupnorm(build("bn-lenet5", input_shape=input_shape, classes=classes), groups=2)


def _paper(key: str, theirs: float | None, note: str, *, layers: int, sigma: float, clip: float, **more: Any) -> Row:
    options = {
        "record_groups": 1, "groups": "layer", "thresholds": "alc", "allocation": "proportional", "clip": clip,
    }  # fmt: skip
    settings = {
        "method": "batch", "method_options": options, "noise": sigma / math.sqrt(layers), "delta": 1e-5,
        "batch": 64, "epochs": 50, "lr": 0.025, "schedule": "decay", "lr_decay": 0.9, "momentum": 0.0,
        "optimizer": "sgd", "public": 0.1,
    }  # fmt: skip
    return Row(key=f"paper/{key}", settings={**settings, **more}, theirs=theirs, note=f"σ = {sigma:g}; {note}")


def _lenet(sigma: float, theirs: float, note: str) -> Row:
    return _paper(
        f"mnist-sigma-{sigma:g}", theirs, note, layers=8, sigma=sigma, clip=0.2, data="mnist", model="bn-lenet5"
    )


def _convnet(sigma: float, clip: float, batch: int, theirs: float, note: str) -> list[Row]:
    common: dict[str, Any] = {
        "layers": 9, "sigma": sigma, "clip": clip, "batch": batch, "data": "cifar10", "model": "convnet5",
    }  # fmt: skip
    key = f"cifar10-sigma-{sigma:g}"
    return [
        _paper(key, theirs, note, **common),
        _paper(f"{key}-short", None, "a tenth of the epochs", **common, epochs=5),
    ]


def _compared(name: str, epsilon: int) -> Row:
    kind, _, model = name.partition("/")
    method, options, note = _COMPARED[kind]
    clip, lr = _TUNED[name][epsilon]
    settings = {
        "data": "mnist", "model": {"gn-lenet5": _GN_LENET5}.get(model, model), "method": method,
        "method_options": {"clip": clip, **options}, "epsilon": float(epsilon), "delta": 1e-5, "batch": 512,
        "epochs": 5, "lr": lr, "momentum": 0.9, "optimizer": "sgd", "public": 0.1,
    }  # fmt: skip
    return Row(key=f"eps{epsilon}/{name}", settings=settings, note=note)


STUDY = Study(
    name="batch-clipping",
    title="Batch clipping and adaptive layerwise clipping (Nguyen et al. 2023)",
    about=(
        "A tenth of the training records counts as public in every row, and the others are drawn by Poisson sampling; "
        "the paper draws batches of exactly m, crops and flips the images, and states no epsilon."
    ),
    rows=[
        _lenet(0.5, 0.848, "A.2, the best C"),
        _lenet(1.5, 0.67, "B.1, about"),
        _lenet(2.5, 0.5038, "A.2, the largest σ above 50%"),
        *_convnet(0.5, 0.14, 64, 0.4342, "A.1, the best C; its text also has about 35% and 40%"),
        *_convnet(0.01875, 0.9, 1024, 0.5902, "A.1, the best C"),
        *(_compared(name, epsilon) for epsilon in (3, 8) for name in _TUNED),
    ],
)
