"""One private training, from a configuration to a folder that can be handed on: what `privet train` does."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel, update_bn

from ..accounting import Guarantee, epsilon
from ..data import Data, Records, collate, load
from ..diagnostics import RECORDS, diagnose
from ..errors import BudgetExceeded, ConfigError
from ..losses import Loss
from ..losses import loss as make_loss
from ..methods import method as make_method
from ..nn import build, normalised, standardise_of
from ..planning import Budget
from ..postprocess import Denoise
from ..run import Run
from ..sampling import FixedSize, Partition, Poisson, SamplingRule
from .config import TrainConfig, settle
from .folder import Place, drop_half_line, hand_over
from .report import write_report

SAMPLING: dict[str, type[SamplingRule]] = {"poisson": Poisson, "fixed-size": FixedSize, "partition": Partition}
_EVALUATION_BATCH = 1024
_ACCOUNTING_SHARE = 0.05
"""The part of the time that may go into telling epsilon while training."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a training stands; accuracy and loss are of held-out records, and epsilon is that of a recent step."""

    step: int
    steps: int
    epoch: int
    epochs: int
    accuracy: float | None
    loss: float | None
    epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out. `ended` tells why: the plan was done, a budget allowed no more, or it was interrupted."""

    ended: Literal["finished", "budget", "interrupted"]
    config: TrainConfig
    statement: Mapping[str, Any]
    accuracy: float | None
    loss: float | None
    auroc: float | None = None
    """Area under the ROC curve, where there are two classes."""
    out: Path
    ledger: Path
    ledger_runs: int
    ledger_total: Guarantee
    seconds: float

    def to_json(self) -> dict[str, Any]:
        same = ("epsilon", "delta", "accountant", "steps", "noise_multiplier", "noise_level", "relation", "unit")
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            **_if_known(auroc=self.auroc),
            **{name: self.statement[name] for name in same},
            "planned": self.statement["planned"],
            "data": self.config.data,
            "model": self.config.model,
            "method": self.config.method,
            "ended": self.ended,
            "interrupted": self.ended == "interrupted",
            "out": str(self.out),
            "ledger": str(self.ledger),
            "ledger_epsilon": self.ledger_total.epsilon,
            "ledger_runs": self.ledger_runs,
            "seconds": round(self.seconds, 3),
        }


def train(
    config: TrainConfig,
    *,
    resume: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains, measures and writes the run's folder.

    Args:
        resume: the folder of an interrupted run to go on with, `config` being the one that lies there.
        on_progress: called after each step, and once more when the last ones are measured.
        stop: asked between chunks and steps; once it says yes, a checkpoint is written and `train` returns.

    Formal guarantee: what is released (the model, the metrics, the files) costs the records that were trained on what
    `privacy.json` states: all of it but the noisy gradients comes from held-out records or public facts. If training
    fails before its first step, no file is left behind.
    """
    started = time.perf_counter()
    if config.threads:
        torch.set_num_threads(config.threads)
    data = load_data(config)
    config = settle(config, data)
    budget, sampling, model = _budget(config), _sampling(config), _model(config, data)
    method = make_method(config.method, **config.method_options)
    units = len(data.train) if data.users is None else len(set(data.users))
    sampling.check(config.records or units, config.relation)
    denoise = _denoise(config)
    criterion = make_loss(config.loss, model, **config.loss_options)
    place = Place(config, data, resume)
    run: Run | None = None
    try:
        ledger = place.open_ledger(config, data)
        with Run(
            model,
            Records(data.train),
            method=method,
            sampling=sampling,
            budget=budget,
            relation=config.relation,
            records=config.records,
            ledger=ledger,
            noise_level=config.noise_level,
            seed=config.seed if config.noise_level == "seeded" else None,
            physical_batch=config.physical_batch or "auto",
            loader_options={"num_workers": config.workers, "collate_fn": collate},
            users=data.users,
            queries=[config.normalise_noise] if config.normalise == "private" else [],
            public=None if data.public is None else Records(data.public),
            post=[] if denoise is None else [denoise],
            run_id=place.run_id,
        ) as run:
            place.write_start(replace(config, ledger=str(ledger.path)))
            training = _Training(config, data, run, criterion, place.folder, on_progress or (lambda _: None), stop)
            if denoise is not None:
                training.stateful["denoise"] = denoise
            ended = training.go(resume is not None)
            result = Result(
                ended=ended,
                config=config,
                statement=run.statement(),
                accuracy=training.accuracy,
                loss=training.loss,
                auroc=training.auroc,
                out=place.folder,
                ledger=ledger.path,
                ledger_runs=sum(record.units > 0 for record in ledger.runs()),
                ledger_total=epsilon(ledger.spent(), run.plan.delta),
                seconds=time.perf_counter() - started,
            )
            if ended != "interrupted":
                about = {"model": config.model, "epsilon": str(result.statement["epsilon"])}
                hand_over(place.folder, _statement(result, data), training.released, about)
                ledger.finish_run(run.id)
                if config.report:
                    write_report(place.folder)
            return result
    except BaseException:
        if resume is None and (run is None or run.units_spent == run.queries_paid == 0):
            place.take_back()
        raise
    finally:
        criterion.close()
        place.close()


def load_data(config: TrainConfig) -> Data:
    """The records of a training: the same for the same configuration and files, those held out included."""
    return load(
        config.data,
        data_dir=None if config.data_dir is None else Path(config.data_dir),
        target=config.target,
        test_fraction=config.test_fraction,
        validation=config.validation,
        bounds=None if config.bounds is None else {k: _pair(k, v) for k, v in config.bounds.items()},
        users=config.users,
        public=config.public,
        features=config.features,
        features_cache=None if config.features_cache is None else Path(config.features_cache),
    )


def _statement(result: Result, data: Data) -> dict[str, Any]:
    """privacy.json: the run's statement and what it was made from."""
    held_out = (
        f"The {len(data.test)} held-out records: accuracy, AUROC, loss and diagnostics of them are released as they "
        "are, without noise."
    )
    return {
        **result.statement,
        "not_covered": [*result.statement["not_covered"], held_out],
        "ended": result.ended,
        "data": {"name": data.name, "classes": data.classes, "description": data.description},
        "model": result.config.model,
        "held_out": {
            "accuracy": result.accuracy,
            "loss": result.loss,
            **_if_known(auroc=result.auroc),
            "records": len(data.test),
        },
        "ledger_total": {"epsilon": result.ledger_total.epsilon, "runs": result.ledger_runs},
        "versions": {name: version(name) for name in ("privet", "torch", "dp-accounting")},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class _Training:
    """The loop, with what it keeps from step to step."""

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        run: Run,
        criterion: Loss,
        folder: Path,
        on_progress: Callable[[Progress], None],
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.data, self.run, self.folder = config, data, run, folder
        self.criterion = criterion
        self.on_progress, self.stop = on_progress, stop
        self.accuracy: float | None = None
        self.loss: float | None = None
        self.auroc: float | None = None
        self.images = any(p.dim() == 4 for p in run.model.parameters())
        self.optimizer = _optimizer(config, run.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _schedule(config, run))
        self.stateful: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        self.average = None if config.ema is None else _average(run.model, config, self.data)
        if self.average is not None:
            self.stateful["average"] = self.average
        self.epsilon_clock = _Clock(_ACCOUNTING_SHARE)
        self.epsilon: float | None = None

    @property
    def released(self) -> nn.Module:
        """The model that is measured and handed on: the averaged one, if there is one (post-processing)."""
        return self.run.model if self.average is None else self.average.module

    def go(self, resume: bool) -> Literal["finished", "budget", "interrupted"]:
        path = self.folder / "checkpoint.pt"
        if resume:
            self.run.load(path, **self.stateful)
            drop_half_line(self.folder / "metrics.jsonl")
        else:
            self.run.save(path, **self.stateful)
        self._standardise()
        self.saved = time.monotonic()
        began = time.monotonic()
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
            while not self.run.finished:
                try:
                    done = self._epoch()
                except BudgetExceeded:
                    if self.run.steps_done == 0:
                        raise
                    break
                if not done:
                    self._save()
                    return "interrupted"
                self._measure()
                metrics.write(json.dumps(self._line(time.monotonic() - began)) + "\n")
                metrics.flush()
        self._save()  # should handing over fail, the steps need not be done and paid for again
        if self.accuracy is None or self.run.steps_done < self.run.plan.steps:
            self._measure()
        self.on_progress(self._progress())  # with what was measured last
        return "finished" if self.run.steps_done >= self.run.plan.steps else "budget"

    def _standardise(self) -> None:
        """Asks for the statistics that the first layer needs, where no checkpoint has them, and keeps them."""
        layer = standardise_of(self.run.model)
        if layer is None or layer.known:
            return
        if self.config.normalise == "public":
            assert self.data.public is not None  # `_model` saw to it
            layer.learn_from_public(self.data.public.tensors[0])
        else:
            layer.learn(self.run, clip=self.config.normalise_clip, noise=self.config.normalise_noise)
        if self.average is not None:
            self.average.module.load_state_dict(self.run.model.state_dict())
        self._save()

    def _epoch(self) -> bool:
        """The steps to the end of the epoch; false if asked to stop before."""
        model = self.run.model
        model.train()
        if self.config.denoise_priors == "public":
            self.stateful["denoise"].learn(self.run.public_gradient(self._losses))
        for step in self.run.loader:
            self.criterion.epoch = self.run.steps_done // len(self.run.loader)
            for batch in step:
                if self.stop():
                    return False  # within a step: nothing of it was released, nor paid for
                step.backward(self._losses(batch))
            self.optimizer.step()
            self.scheduler.step()
            if self.average is not None:
                self.average.update_parameters(model)
            if self.epsilon_clock.due() or self.run.finished:
                with self.epsilon_clock:
                    self.epsilon = self.run.epsilon
            if time.monotonic() - self.saved > self.config.checkpoint_every:
                self._save()
            self.on_progress(self._progress())
            if self.stop() and not self.run.finished:
                return False
        return True

    def _losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.precision == "bf16"):
            scores = self.run.model(self._laid_out(x))
        losses: Tensor = self.criterion(scores, y)
        return losses

    def _progress(self) -> Progress:
        length = len(self.run.loader)
        return Progress(
            step=self.run.steps_done,
            steps=self.run.plan.steps,
            epoch=math.ceil(self.run.steps_done / length),
            epochs=math.ceil(self.run.plan.steps / length),
            accuracy=self.accuracy,
            loss=self.loss,
            epsilon=self.epsilon,
        )

    def _line(self, seconds: float) -> dict[str, Any]:
        """One line of metrics: held-out records and public facts only (rule 9)."""
        progress = self._progress()
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "accuracy": self.accuracy,
            "loss": self.loss if self.loss is None or math.isfinite(self.loss) else None,
            **_if_known(auroc=self.auroc),
            "seconds": round(seconds, 3),
            **({"diagnostics": self._diagnostics()} if self.config.report else {}),
        }

    def _diagnostics(self) -> dict[str, Any]:
        """Of the weights that are trained, not of their running mean, and of held-out records only (rule 9)."""
        x, y = self.data.test.tensors
        return diagnose(self.run.model, self.criterion, self._laid_out(x[:RECORDS]), y, self.run.method.record_clip)

    @torch.no_grad()
    def _measure(self) -> None:
        """Accuracy, mean cross-entropy, whatever is minimised, and for two classes AUROC, on the held-out records."""
        model = self.released
        if self.data.public is not None:  # BatchNorm's statistics, of these weights and public records only
            update_bn([self._laid_out(x) for x in torch.split(self.data.public.tensors[0], _EVALUATION_BATCH)], model)
        model.eval()
        x, y = self.data.test.tensors
        scores = torch.cat([model(self._laid_out(xs)).float() for xs in torch.split(x, _EVALUATION_BATCH)])
        self.accuracy = int((scores.argmax(1) == y).sum()) / len(y)
        self.loss = float(cross_entropy(scores, y, reduction="none").double().mean())
        self.auroc = _auroc(scores, y) if self.data.classes == 2 else None

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.images and x.dim() == 4 else x

    def _save(self) -> None:
        self.run.save(self.folder / "checkpoint.pt", **self.stateful)
        self.saved = time.monotonic()


def _auroc(scores: Tensor, y: Tensor) -> float | None:
    """The chance that a record of class 1 scores above one of class 0; None where it is not defined."""
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 (takes a second)

    preferred = scores[:, 1].double() - scores[:, 0].double()
    if not preferred.isfinite().all() or bool(y.min() == y.max()):
        return None
    return float(roc_auc_score(y.numpy(), preferred.numpy()))


def _if_known(**facts: Any) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


class _Clock:
    """Says when something costly is due again, so that it takes at most a share of the time."""

    def __init__(self, share: float) -> None:
        self._share, self._next, self._began = share, time.monotonic() + 2.0, 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._next = now + max(2.0, (now - self._began) / self._share)


def _pair(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    if len(bounds) != 2:
        raise ConfigError(f"bounds of {name!r} must be [low, high], and are {list(bounds)!r}.")
    return bounds[0], bounds[1]


def _budget(config: TrainConfig) -> Budget:
    assert config.delta is not None
    return Budget(
        delta=config.delta, epsilon=config.epsilon, noise=config.noise, epochs=config.epochs, steps=config.steps
    )


def _sampling(config: TrainConfig) -> SamplingRule:
    assert config.batch is not None
    return SAMPLING[config.sampling](batch=config.batch)


def _denoise(config: TrainConfig) -> Denoise | None:
    if config.denoise == "none":
        return None
    return Denoise(
        config.denoise, threshold=config.denoise_threshold, bound=config.denoise_bound, priors=config.denoise_priors
    )


def _model(config: TrainConfig, data: Data) -> nn.Module:
    """The network, laid out for speed, and tried on made-up records."""
    options = dict(config.model_options)
    model = build(config.model, input_shape=data.input_shape, classes=data.classes, seed=config.seed, **options)
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise ConfigError(
            f"Model {config.model!r} has layers that do not know their size yet (nn.Lazy…). Give them their sizes: the "
            "factory may take input_shape and classes."
        )
    if config.normalise == "public" and data.public is None:
        raise ConfigError(
            "normalise 'public' takes means and deviations from public records, and there are none: name some "
            "(--public 0.02, say), or choose 'group' or 'private'."
        )
    model = normalised(model, config.normalise, data.input_shape)
    make_method(config.method, **config.method_options).prepare(model)
    if len(data.input_shape) == 3:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        try:
            scores = model.eval()(torch.zeros(2, *data.input_shape))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"Model {config.model!r} cannot take records of shape {data.input_shape}: {error}."
            ) from error
    if not isinstance(scores, Tensor) or scores.shape != (2, data.classes):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError(
            f"Model {config.model!r} must give one score for each of the {data.classes} classes: for two records "
            f"(2, {data.classes}), and gives {got}."
        )
    return model


def _optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    assert config.lr is not None
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=config.lr)
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)


def _schedule(config: TrainConfig, run: Run) -> Callable[[int], float]:
    steps, epoch = run.plan.steps, len(run.loader)
    if config.schedule == "constant":
        return lambda _: 1.0
    if config.schedule == "decay":
        return lambda step: config.lr_decay ** (step // epoch)
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def _average(model: nn.Module, config: TrainConfig, data: Data) -> AveragedModel:
    """A running mean of the weights whose decay grows to `ema`, so that the first weights are soon forgotten."""
    assert config.ema is not None
    decay = config.ema

    def update(averaged: Any, current: Any, count: Any) -> None:
        now = min(decay, (1 + float(count)) / (10 + float(count)))
        torch._foreach_lerp_(averaged, current, 1 - now)

    fresh = _model(config, data)  # not a copy of the model, which would copy the hooks too
    fresh.load_state_dict(model.state_dict())
    return AveragedModel(fresh, multi_avg_fn=update)
