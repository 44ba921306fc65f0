"""Private classifiers and regressors for tables, as scikit-learn knows estimators: `fit`, `predict`, pipelines, pickle.

    model = privet.PrivateClassifier(epsilon=1, bounds=[(0, 120), (0, 1), (-40, 60)], ledger="patients.ledger")
    model.fit(X, y).predict_proba(X_new)
    model.epsilon_, model.privacy_      # what was spent, and the whole statement

What is learned comes from noisy gradients (`privet.Run`) and from what counts as public: the number of features and
their names, the number of records unless `records` states one, and the labels unless `classes` does. No mean, range or
quantile of the data is used: inputs are scaled by `bounds`, which are yours to know beforehand.

Not covered by epsilon, and nothing here can see it:

- Steps in front that were fitted to the same records: a StandardScaler in a pipeline learns private means. Give
  `bounds` in its place, or fit such steps on public data.
- Scores on private records, and what is chosen by them: `GridSearchCV` shows `best_params_` and `cv_results_` of
  records that it held out, and each of its fits costs epsilon anew (one `ledger` adds them up). Search on public data.
- Errors about the data (a missing value, an unknown label): they are for whoever holds the records.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import TensorDataset

from .data import Records, collate
from .errors import BudgetExceeded, ConfigError
from .methods import method as make_method
from .nn import build
from .noise import Level
from .planning import Budget
from .run import Run
from .sampling import Poisson
from .training.config import default_delta

Floats = NDArray[np.float64]
Bounds = Sequence[float] | Sequence[Sequence[float]]

_LARGEST_BATCH = 4096
"""All records in every step, while that is cheap: for a given number of steps no other sample has less noise in its
mean, and its cost is a closed form."""
_STEPS, _EPOCHS = 100, 5
"""How long a fit is at least."""
_MOMENTUM = 0.9
_LARGEST_EXPONENT = 700.0
_AT_ONCE = 8192
"""Records that are predicted at a time."""


@dataclass(kw_only=True, eq=False, repr=False)
class _PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """What both kinds share. Parameters are stored as given and looked at in `fit`, as scikit-learn asks for."""

    epsilon: float = 3.0
    """What one fit may cost; what it did cost is `epsilon_`."""
    delta: float | None = None
    """None: a power of ten that is at most a tenth of 1/records."""
    bounds: Bounds | None = None
    """Public (low, high) for all features, or one pair for each: values are clipped to them and scaled to [-1, 1].
    None: each value x becomes sign(x)·log(1 + |x|)."""
    records: int | None = None
    """Public number of records. None: it is counted, and counts as public."""
    ledger: str | Path | None = None
    """The data set's account, which adds up all fits. None: only `epsilon_` tells, and of one fit."""
    method: str = "per-example"
    """How gradients are bounded: any method of Privet by its name."""
    method_options: Mapping[str, Any] | None = None
    clip: float | None = None
    """Threshold C of the method. None: the method's own."""
    model: str = "mlp"
    """A network of `privet.nn.MODELS` by its name, or one of your own as module:factory."""
    model_options: Mapping[str, Any] | None = None
    hidden: Sequence[int] = (32,)
    """Widths of the hidden layers (ReLU) of `mlp`; () is a linear model."""
    lr: float = 0.5
    """Learning rate of stochastic gradient descent with momentum 0.9."""
    epochs: float | None = None
    """None: as many as make about 100 steps, and at least 5."""
    batch: int | None = None
    """Expected number of records in a step. None: all, at most 4096."""
    noise_level: Level = "system"
    """`system`, `exact`, or `seeded`: reproducible from `random_state`, for tests, and protects nothing."""
    random_state: Any = None
    """Sets the initial weights. Never the noise, so two fits differ (unless `seeded`)."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.noise_level != "seeded"
        return tags

    @abstractmethod
    def _targets(self, y: NDArray[Any]) -> tuple[Tensor, int]:
        """What is learned for each record, and how many numbers the network gives."""

    @abstractmethod
    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record."""

    def _open_questions(self) -> list[str]:
        """What was left open that only public knowledge can settle, for the warning of `fit`."""
        return [] if self.bounds is not None else ["bounds of the features (bounds=(low, high), or one pair for each)"]

    def _also_not_covered(self) -> list[str]:
        """Sentences for the statement, besides those of the run."""
        return [
            "Steps in front of the estimator that were fitted to the same records (a scaler, an imputer), and scores "
            "on private records, cross-validation included."
        ]

    def _fit(self, X: Any, y: Any, **checks: Any) -> Self:
        self.__dict__.pop("model_", None)  # should this fit fail, nothing of an earlier one is left that does not fit
        X, y = validate_data(self, X, y, dtype=np.float64, **checks)
        self._warn_of_open_questions()
        self.bounds_ = _pairs("bounds", self.bounds, X.shape[1])
        targets, outputs = self._targets(y)
        records = len(X) if self.records is None else _whole("records", self.records)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        model = self._network(X.shape[1], outputs, seed)
        lr = _number("lr", self.lr)
        with self._run(model, TensorDataset(_tensor(_squeezed(X, self.bounds_)), targets), records, seed) as run:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=_MOMENTUM)
            while not run.finished:
                try:
                    self._epoch(run, optimizer)
                except BudgetExceeded:  # that of the ledger: what was learned before is paid for
                    if run.steps_done == 0:
                        raise
                    break
            self.privacy_ = self._statement(run)
        self.epsilon_: float = self.privacy_["epsilon"]
        model.zero_grad(set_to_none=True)
        for module in list(model.modules()):  # a parametrised layer cannot be pickled
            if parametrize.is_parametrized(module):
                for attribute in list(module.parametrizations):  # type: ignore[arg-type]
                    parametrize.remove_parametrizations(module, attribute)
        self.model_ = model.double().requires_grad_(False).eval()
        return self

    def _warn_of_open_questions(self) -> None:
        if questions := self._open_questions():
            warnings.warn(
                f"{type(self).__name__} was not given public {' nor '.join(questions)}, so a fixed function, "
                "sign(v)·log(1 + |v|), squeezes the values, whatever their scale. Give what is known without the data; "
                "a scaler that is fitted to the data in front of this estimator is not covered by epsilon.",
                UserWarning,
                stacklevel=4,
            )

    def _network(self, features: int, outputs: int, seed: int) -> nn.Module:
        options: dict[str, Any] = {}
        if self.model == "mlp":
            if not isinstance(self.hidden, Sequence):
                raise ConfigError(f"hidden must be a list of widths, (64, 32) for two layers, and is {self.hidden!r}.")
            options = {"hidden": [_whole("hidden", width) for width in self.hidden], "activation": "relu"}
        options |= _mapping("model_options", self.model_options)
        model = build(self.model, input_shape=(features,), classes=outputs, seed=seed, **options)
        with torch.no_grad():
            shape = tuple(model.eval()(torch.zeros(2, features)).shape)
        if shape != (2, outputs):
            raise ConfigError(
                f"Model {self.model!r} turns two records of {features} numbers each into {shape}, and must give "
                f"{(2, outputs)}."
            )
        return model.train()

    def _run(self, model: nn.Module, data: TensorDataset, records: int, seed: int) -> Run:
        if not isinstance(self.ledger, str | Path | None):
            raise ConfigError(
                f"ledger is a {type(self.ledger).__name__}: give the path of its file, as estimators are copied."
            )
        options = _mapping("method_options", self.method_options)
        if self.clip is not None:
            options["clip"] = _number("clip", self.clip)
        batch = min(_LARGEST_BATCH, records) if self.batch is None else _whole("batch", self.batch)
        budget = Budget(
            epsilon=_number("epsilon", self.epsilon),
            delta=default_delta(records) if self.delta is None else _number("delta", self.delta),
            epochs=max(_EPOCHS, _STEPS * batch / records) if self.epochs is None else _number("epochs", self.epochs),
        )
        return Run(
            model,
            Records(data),
            method=make_method(self.method, **options),
            sampling=Poisson(batch=batch),
            budget=budget,
            records=None if self.records is None else records,
            ledger=self.ledger,
            noise_level=self.noise_level,
            seed=seed if self.noise_level == "seeded" else None,
            loader_options={"collate_fn": collate},
        )

    def _statement(self, run: Run) -> dict[str, Any]:
        """The run's privacy statement, and what else the number rests on here."""
        statement = run.statement()
        statement["not_covered"] += self._also_not_covered()
        statement["inputs"] = "squeezed by a fixed function" if self.bounds is None else "scaled by public bounds"
        return statement

    def _epoch(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        for step in run.loader:
            for inputs, targets in step:
                step.backward(self._losses(run.model(inputs), targets))
            optimizer.step()

    def _outputs(self, X: Any) -> Tensor:
        """What the network gives, in double precision: the same for a record, whichever others are asked about."""
        check_is_fitted(self, "model_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        inputs = torch.from_numpy(_squeezed(X, self.bounds_))
        with torch.no_grad():
            return torch.cat([self.model_(part) for part in torch.split(inputs, _AT_ONCE)])


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, _PrivateEstimator):  # type: ignore[misc]
    """A classifier whose release costs the records it was fitted to at most (`epsilon`, `delta`).

    After `fit`: `classes_`, `model_` (the network), `epsilon_` (what was spent), `privacy_` (the statement),
    `n_features_in_`, and `feature_names_in_` where the features have names.

    Formal guarantee: that of `privet.Run`, for everything that `fit` sets, with the number and names of the features
    public, and the number of records and the labels too unless `records` and `classes` state them.
    """

    classes: ArrayLike | None = None
    """Public labels, all that may occur. None: those in the data, which then count as public."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # noise drowns small tables
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Trains on these records, and pays for it."""
        return self._fit(X, y)

    def predict_proba(self, X: Any) -> Floats:
        """Probabilities of the classes, in the order of `classes_`."""
        probabilities: Floats = self._outputs(X).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """The most likely class of each record."""
        best = self.predict_proba(X).argmax(1)
        labels: NDArray[Any] = self.classes_[best]
        return labels

    def _targets(self, y: NDArray[Any]) -> tuple[Tensor, int]:
        check_classification_targets(y)
        self.classes_: NDArray[Any] = np.unique(y if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise ValueError(
                f"There is only one class, {self.classes_[0]!r}: a classifier needs at least two. Where others may "
                "occur, name all of them in classes."
                if len(self.classes_)
                else "classes names no class: name all labels that may occur, at least two."
            )
        if not np.isin(y, self.classes_).all():
            raise ValueError(f"y has labels that are not among the public classes, {self.classes_.tolist()}.")
        return torch.from_numpy(np.searchsorted(self.classes_, y)), len(self.classes_)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def _also_not_covered(self) -> list[str]:
        labels = [] if self.classes is not None else ["The set of labels: taken from the data, and counts as public."]
        return super()._also_not_covered() + labels


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, _PrivateEstimator):  # type: ignore[misc]
    """A regressor whose release costs the records it was fitted to at most (`epsilon`, `delta`).

    It minimises the squared error of the scaled targets. After `fit`: `model_` (the network), `epsilon_` (what was
    spent), `privacy_` (the statement), `n_features_in_`, and `feature_names_in_` where the features have names.

    Formal guarantee: that of `privet.Run`, for everything that `fit` sets, with the number and names of the features
    public, and the number of records too unless `records` states it.
    """

    lr: float = 0.1
    target_bounds: Sequence[float] | None = None
    """Public (low, high): targets are clipped to it, and predictions lie within. None: they are squeezed like inputs
    without bounds, which serves well only if they are around 0 and of size 1."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # noise drowns small tables
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Trains on these records, and pays for it."""
        return self._fit(X, y, y_numeric=True)

    def predict(self, X: Any) -> Floats:
        """The expected target of each record."""
        outputs: Floats = self._outputs(X).squeeze(1).numpy()
        values: Floats
        if self.target_bounds_ is None:
            values = np.sign(outputs) * np.expm1(np.abs(outputs).clip(max=_LARGEST_EXPONENT))
        else:
            low, high = self.target_bounds_
            values = (outputs.clip(-1, 1) + 1) / 2 * (high - low) + low
        return values

    def _targets(self, y: NDArray[Any]) -> tuple[Tensor, int]:
        self.target_bounds_ = _pairs("target_bounds", self.target_bounds, 1)
        return _tensor(_squeezed(y.astype(np.float64), self.target_bounds_)), 1

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs.squeeze(1), targets, reduction="none")

    def _open_questions(self) -> list[str]:
        targets = [] if self.target_bounds is not None else ["bounds of the target (target_bounds=(low, high))"]
        return super()._open_questions() + targets


def _pairs(name: str, bounds: Any, features: int) -> tuple[Floats, Floats] | None:
    """The lower and the upper bounds, one for each feature."""
    if bounds is None:
        return None
    try:
        pairs = np.asarray(bounds, dtype=np.float64)
    except (TypeError, ValueError):
        pairs = np.empty(0)
    if pairs.shape == (2,):
        pairs = np.tile(pairs, (features, 1))
    widths = np.diff(pairs) if pairs.shape == (features, 2) else np.zeros(1)
    if not ((widths > 0) & np.isfinite(widths)).all():
        each = f", or a list of {features} such pairs" if features > 1 else ""
        raise ConfigError(f"{name} must be two numbers, the lower first{each}, and is {bounds!r}.")
    return pairs[:, 0], pairs[:, 1]


def _squeezed(values: Floats, bounds: tuple[Floats, Floats] | None) -> Floats:
    """Values on a scale that networks like, by a function that was fixed before any of them was seen."""
    squeezed: Floats
    if bounds is None:
        squeezed = np.sign(values) * np.log1p(np.abs(values))
    else:
        low, high = bounds
        squeezed = (np.clip(values, low, high) - low) / (high - low) * 2 - 1
    return squeezed


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{name} must be a positive number, and is {value!r}.")
    return number


def _whole(name: str, value: Any) -> int:
    """A Python integer, also from one of numpy's, as a grid of parameters may hold."""
    if not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, and is {value!r}.")
    return int(value)


def _mapping(name: str, options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping | None):
        raise ConfigError(f"{name} must be a dictionary of options, and is {options!r}.")
    return dict(options or {})
