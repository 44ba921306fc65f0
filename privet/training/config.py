"""Every option of a training, in one place, and what stands in for those that were left open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from ..accounting import Relation
from ..data import SETS, Data
from ..errors import ConfigError
from ..nn import Normalise
from ..noise import Level

_MOST_THREADS = 1024
_LEARNING_RATES = {"sgd": 0.5, "adam": 0.002}


def _option(default: Any, group: str, help: str, **more: Any) -> Any:
    """An option of a training. `more`: otherwise (what None stands for), preset (presets may set it), run (False: it
    does not belong to the run's config.toml), resume (it may be given anew on resuming), needs (see `option`)."""
    start: Any = {"default_factory": dict} if default == {} else {"default": default}
    return field(metadata={"group": group, "help": help, **more}, **start)


_DATA, _BUDGET, _MODEL = "data", "privacy", "model and optimizer"
_COMPUTE, _OUTPUT = "computation", "output"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every option of a training: the command line, the TOML file and the run's config.toml are made from it.

    None stands for what `settle` chooses once the data is there.
    """

    data: str = _option(
        "digits", _DATA, "data set (digits, mnist, fashion-mnist, cifar10) or a CSV, Parquet or npz file"
    )
    data_dir: str | None = _option(None, _DATA, "folder with the files of the data set", resume=True)
    target: str | None = _option(None, _DATA, "column of the file that is to be predicted")
    test_fraction: float = _option(0.2, _DATA, "part of a file's rows that is held out")
    bounds: Mapping[str, Sequence[float]] | None = _option(
        None,
        _DATA,
        "public bounds of a file's column of numbers, which scale it; once for each column (in TOML: a table [bounds])",
    )
    validation: float | None = _option(
        None, _DATA, "measure on this part of the training records, held out of training, and not on the test set"
    )
    public: float | None = _option(
        None, _DATA, "part of the training records that counts as public: not trained on, not protected", preset=True
    )
    users: str | None = _option(
        None, _DATA, "column of the file that says whose row each is: whole users are protected (--record-groups user)"
    )
    records: int | None = _option(
        None, _DATA, "public number of training records; if not stated, it is counted in the data and counts as public"
    )

    features: Literal["none", "scattering"] = _option(
        "none",
        _DATA,
        "what an image set's pixels are replaced by: scattering (wavelets; needs kymatio) costs no privacy",
        preset=True,
    )
    features_cache: str | None = _option(
        None,
        _DATA,
        "folder that keeps the features, as sensitive as the data",
        otherwise="DATA-DIR/features; without --data-dir, nowhere",
        resume=True,
        needs=("features", "scattering"),
    )
    normalise: Normalise = _option(
        "none",
        _DATA,
        "scale of the input's channels: group (by the record alone, free), public (statistics of public records, free) "
        "or private (of the others, paid)",
        otherwise="none; with --features, group",
        preset=True,
    )
    normalise_noise: float = _option(
        8.0, _DATA, "noise multiplier of --normalise private", preset=True, needs=("normalise", "private")
    )
    normalise_clip: float = _option(
        0.4,
        _DATA,
        "C of --normalise private: a record's channel means are clipped to this norm, its mean squares to C*C; 0.4 "
        "suits features of images in [0, 1], 1.2 those of cifar10, whose pixels are standardised",
        preset=True,
        needs=("normalise", "private"),
    )

    preset: bool = _option(True, _DATA, "whether presets fill in what is not given")

    method: str = _option("per-example", _BUDGET, "how the gradient is bounded")
    method_options: Mapping[str, Any] = _option({}, _BUDGET, "options of the method", preset=True)
    epsilon: float | None = _option(None, _BUDGET, "what the run may cost", otherwise="3, or what --noise leads to")
    delta: float | None = _option(
        None, _BUDGET, "delta of the guarantee", otherwise="a power of ten at most 1/(10 records)", preset=True
    )
    noise: float | None = _option(None, _BUDGET, "noise multiplier", otherwise="what epsilon and the length ask for")
    epochs: float | None = _option(None, _BUDGET, "length in epochs", otherwise="30", preset=True)
    steps: int | None = _option(None, _BUDGET, "length in steps, in place of epochs", preset=True)
    batch: int | None = _option(
        None, _BUDGET, "expected number of records in a step", otherwise="about a tenth", preset=True
    )
    sampling: Literal["poisson", "fixed-size", "partition"] = _option(
        "poisson", _BUDGET, "how the records of a step are drawn"
    )
    relation: Relation = _option("add_remove", _BUDGET, "what is hidden: that a record is there, or what it is")
    noise_level: Level = _option(
        "system", _BUDGET, "system: unpredictable; exact: on an integer grid too; seeded: by --seed, protects nothing"
    )

    model: str = _option(
        "mlp",
        _MODEL,
        "mnist-cnn, cifar-cnn, resnet18-gn, mlp, transformer, bn-lenet5, convnet5, resnet18-bn, backprop-mnist, "
        "backprop-cifar, scatter-mnist-cnn, scatter-cifar-cnn, linear, lipschitz-mlp, lipschitz-lenet, lipschitz-vgg, "
        "lipschitz-resnet, lipschitz-mixer, or module:factory",
        preset=True,
    )
    model_options: Mapping[str, Any] = _option({}, _MODEL, "options of the model", preset=True)
    loss: str = _option("ce", _MODEL, "what is minimised (held-out loss is always cross-entropy)", preset=True)
    loss_options: Mapping[str, Any] = _option({}, _MODEL, "options of the loss", preset=True)
    optimizer: Literal["sgd", "adam"] = _option("sgd", _MODEL, "optimizer", preset=True)
    lr: float | None = _option(None, _MODEL, "learning rate", otherwise="0.5 (sgd) or 0.002 (adam)", preset=True)
    momentum: float = _option(0.9, _MODEL, "momentum of sgd", preset=True, needs=("optimizer", "sgd"))
    schedule: Literal["constant", "cosine", "decay"] = _option(
        "constant", _MODEL, "learning rate over time; decay: times --lr-decay after each epoch", preset=True
    )
    lr_decay: float = _option(
        0.9, _MODEL, "what decay multiplies the learning rate by", preset=True, needs=("schedule", "decay")
    )
    ema: float | None = _option(
        None, _MODEL, "decay of the running mean of the weights that is measured and released", preset=True
    )
    denoise: Literal["none", "hard", "posterior"] = _option(
        "none",
        _MODEL,
        "guess the gradient from the noisy one: hard (-v, 0 or v, whichever is most likely) or its posterior mean",
    )
    denoise_threshold: float | None = _option(
        None,
        _MODEL,
        "v of --denoise, as it stands in p.grad",
        otherwise="one deviation of the noise there",
        needs=("denoise", "hard", "posterior"),
    )
    denoise_bound: float = _option(
        1.0,
        _MODEL,
        "no entry of the clean gradient is larger than this: C, or the smaller of 1 and C if ternary",
        needs=("denoise", "hard", "posterior"),
    )
    denoise_priors: Literal["equal", "flat", "public", "tracked"] | None = _option(
        None,
        _MODEL,
        "how likely -v, 0 and v are beforehand: all the same, as wide as their ranges are, as a gradient over public "
        "records says, or as the noisy ones so far do",
        otherwise="flat for hard, equal for posterior",
        needs=("denoise", "hard", "posterior"),
    )
    seed: int = _option(0, _MODEL, "of the initial weights, never of the noise")

    physical_batch: int | None = _option(
        None,
        _COMPUTE,
        "records that go through the model at once",
        otherwise="what fits in memory, within 2 GiB",
        resume=True,
    )
    workers: int = _option(0, _COMPUTE, "processes that load data", resume=True)
    precision: Literal["float32", "bf16"] = _option("float32", _COMPUTE, "of the forward and backward pass")
    threads: int | None = _option(None, _COMPUTE, "threads for torch", resume=True)
    checkpoint_every: float = _option(30.0, _COMPUTE, "seconds between checkpoints", resume=True)

    out: str | None = _option(None, _OUTPUT, "folder of the run", otherwise="runs/DATA-METHOD-NUMBER", run=False)
    ledger: str | None = _option(
        None, _OUTPUT, "the data set's ledger", otherwise="runs/DATA.ledger, wherever --out lies"
    )
    report: bool = _option(
        True, _OUTPUT, "whether report.html is written, with diagnostics of each epoch", run=False, resume=True
    )
    quiet: bool = _option(False, _OUTPUT, "no progress bar", run=False, resume=True)
    json: bool = _option(False, _OUTPUT, "print one JSON object", run=False, resume=True)

    def __post_init__(self) -> None:
        _at_least(self, 1, "records", "batch", "steps", "physical_batch")
        _at_least(self, 0, "workers")
        check_compute(self.threads, self.seed)
        if self.lr is not None and self.lr > 1e30:
            raise ConfigError(f"lr must be a number that a weight can be moved by, and is {self.lr!r}.")
        for name in ("lr", "checkpoint_every", "normalise_noise", "normalise_clip"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be a positive number, and is {value!r}.")
        if not 0 < self.lr_decay <= 1:
            raise ConfigError(f"lr_decay must be above 0 and at most 1, and is {self.lr_decay!r}.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be at least 0 and below 1, and is {self.momentum!r}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema is a decay between 0 and 1 (0.99, say), and is {self.ema!r}.")

    def to_toml(self) -> str:
        """The file that repeats this run; folders and how to print are left to the next one."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("run", True)}
        for part in ("method", "model", "loss"):
            known[part] = {"name": known[part], **known.pop(f"{part}_options")}
        tables = {k: _plain(v) for k, v in known.items() if isinstance(v, Mapping)}
        values = {k: v for k, v in known.items() if v is not None and k not in tables}
        values["preset"] = False  # all is said; a later version may have other presets
        return "# Repeats this run: privet train config.toml\n" + tomli_w.dumps(values | tables)


def check_compute(threads: int | None, seed: int = 0) -> None:
    """Refuses what torch would not survive, or not take."""
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise ConfigError(f"threads must lie between 1 and {_MOST_THREADS}, and is {threads}.")
    if abs(seed) >= 2**63:
        raise ConfigError(f"seed must have at most 63 bits, and is {seed}.")


def _at_least(config: TrainConfig, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, and is {value!r}.")


def _plain(value: Any) -> Any:
    """What TOML can say; None it cannot."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def default_delta(records: int) -> float:
    """A power of ten that is at most a tenth of 1/records.

    >>> default_delta(60000)
    1e-06
    """
    return float(f"1e{math.floor(-math.log10(10 * records))}")


def default_batch(records: int) -> int:
    """A power of two near a tenth of the records, at most 1024: large batches lose less to the noise."""
    return min(records, max(16, min(1024, int(2 ** round(math.log2(max(1, records / 10)))))))


def settle(config: TrainConfig, data: Data) -> TrainConfig:
    """Fills in what was left open, from public facts; paths become absolute, so that the file means the same anywhere.

    The batch and delta follow the public number of records, which the privacy statement names as such.
    """
    records = config.records or (len(data.train) if data.users is None else len(set(data.users)))
    epsilon = 3.0 if config.epsilon is None and config.noise is None else config.epsilon
    open_ended = config.steps is None and config.epochs is None and (epsilon is None or config.noise is None)
    name = config.data if config.data in SETS or not Path(config.data).exists() else str(Path(config.data).absolute())
    return replace(
        config,
        data=name,
        data_dir=None if config.data_dir is None else str(Path(config.data_dir).absolute()),
        features_cache=None if config.features_cache is None else str(Path(config.features_cache).absolute()),
        ledger=None if config.ledger is None else str(Path(config.ledger).absolute()),
        epsilon=epsilon,
        delta=default_delta(records) if config.delta is None else config.delta,
        epochs=30.0 if open_ended else config.epochs,
        batch=default_batch(records) if config.batch is None else config.batch,
        lr=_LEARNING_RATES[config.optimizer] if config.lr is None else config.lr,
    )
