"""Estimators for tables: what scikit-learn asks of one, and that nothing but noisy gradients leaves the records."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from privet import ConfigError, Ledger, estimators
from privet.accounting import Mechanism, epsilon
from privet.errors import BudgetExceeded
from privet.estimators import PrivateClassifier, PrivateRegressor

FRESH_NOISE = "it compares two fits, whose noise must differ"
COMPARES_TWO_FITS = dict.fromkeys(
    (
        "check_fit_idempotent",
        "check_supervised_y_2d",
        "check_classifier_data_not_an_array",
        "check_regressor_data_not_an_array",
        "check_regressors_int",
    ),
    FRESH_NOISE,
)
PARAMETERS = {
    "epsilon", "delta", "bounds", "records", "ledger", "method", "method_options", "clip", "model", "model_options",
    "hidden", "lr", "epochs", "batch", "noise_level", "random_state",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:Private.* was not given public")
Array = NDArray[Any]


@parametrize_with_checks(
    [
        PrivateClassifier(epochs=1),
        PrivateRegressor(epochs=1),
        PrivateClassifier(epochs=1, noise_level="seeded"),
        PrivateRegressor(epochs=1, noise_level="seeded"),
    ],
    expected_failed_checks=lambda estimator: {} if estimator.noise_level == "seeded" else COMPARES_TWO_FITS,
)
def test_scikit_learn_takes_it_for_an_estimator(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture
def blobs() -> tuple[Array, Array]:
    X, y = make_blobs(200, centers=[[-2, -2], [2, 2]], random_state=0)
    return X, np.array(["no", "yes"])[y]


@pytest.fixture
def line() -> tuple[Array, Array]:
    X = np.random.default_rng(0).uniform(0, 10, (300, 2))
    return X, 50 + 3 * X[:, 0] - 2 * X[:, 1]


def quick(**options: Any) -> PrivateClassifier:
    return PrivateClassifier(**{"bounds": (-6, 6), "epochs": 3} | options)


# What is learned


def test_a_classifier_learns(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    model = PrivateClassifier(bounds=(-6, 6), noise_level="seeded", random_state=0).fit(X[::2], y[::2])
    assert model.score(X[1::2], y[1::2]) > 0.95
    assert model.classes_.tolist() == ["no", "yes"]
    probabilities = model.predict_proba(X.astype(np.float32))
    assert probabilities.dtype == np.float64 and np.allclose(probabilities.sum(1), 1)


def test_a_regressor_learns(line: tuple[Array, Array]) -> None:
    X, y = line
    model = PrivateRegressor(
        epsilon=10, bounds=(0, 10), target_bounds=(20, 90), lr=0.05, noise_level="seeded", random_state=0
    )
    assert model.fit(X[::2], y[::2]).score(X[1::2], y[1::2]) > 0.8


def test_without_target_bounds_predictions_are_on_the_scale_of_the_targets() -> None:
    X = np.random.default_rng(0).uniform(-1, 1, (500, 1))
    y = 3 * X[:, 0]
    model = PrivateRegressor(epsilon=10, noise_level="seeded", random_state=0).fit(X, y)
    assert model.score(X, y) > 0.8


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("layerwise", {}),
        ("batch", {}),
        ("backprop", {}),
        ("ternary", {}),
        ("per-example", {"clip_function": "automatic"}),
    ],
)
def test_any_method_of_privet(blobs: tuple[Array, Array], method: str, options: dict[str, Any]) -> None:
    X, y = blobs
    model = quick(method=method, method_options=options, hidden=(4,)).fit(X, y)
    assert model.privacy_["method"]["name"] == method
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(model.predict_proba(X), again.predict_proba(X))


def test_a_model_of_ones_own_and_its_options(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    assert len(list(quick(hidden=()).fit(X, y).model_.parameters())) == 2
    own = quick(model="privet.nn.models:mlp", model_options={"hidden": [3]}).fit(X, y)
    assert own.model_[1].out_features == 3
    with pytest.raises(ConfigError, match=r"must give \(2, 2\)"):
        quick(model="torch.nn:Identity").fit(np.tile(X, 2), y)


# What it costs


@pytest.mark.parametrize("batch", [None, np.int64(50)])
def test_epsilon_is_the_accountants_and_within_the_budget(blobs: tuple[Array, Array], batch: int | None) -> None:
    X, y = blobs
    model = quick(epsilon=0.7, batch=batch, clip=0.5).fit(X, y)
    said = model.privacy_
    mechanism = Mechanism.from_json(said["mechanism"])
    assert mechanism.rate == (batch or 200) / 200
    assert said["compositions"] == said["steps"] == 3 * 200 // (batch or 200)
    assert model.epsilon_ == said["epsilon"] == epsilon([(mechanism, said["steps"])], said["delta"]).epsilon
    assert 0.69 < model.epsilon_ <= 0.7
    assert said["delta"] == 1e-4
    (group,) = said["groups"]
    assert group["sensitivity"] == 0.5
    assert group["noise_std"] == pytest.approx(0.5 * mechanism.noise_multiplier)
    json.dumps(said)


def test_the_optimizer_is_called_once_for_each_step_paid_for(
    blobs: tuple[Array, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    step = estimators.torch.optim.SGD.step
    monkeypatch.setattr(estimators.torch.optim.SGD, "step", lambda self: (calls.append(self), step(self)))
    assert quick(epochs=7).fit(*blobs).privacy_["steps"] == len(calls) == 7


def test_every_fit_pays_to_the_ledger(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs
    path = tmp_path / "data.ledger"
    model = quick(ledger=path)
    first, second = model.fit(X, y).epsilon_, model.fit(X, y).epsilon_
    assert first == second
    with Ledger(path, create=False) as ledger:
        mechanism = Mechanism.from_json(model.privacy_["mechanism"])
        assert ledger.spent() == [(mechanism, 6)]
        assert len(ledger.runs()) == 2
        assert epsilon(ledger.spent(), 1e-4).epsilon > first


def test_a_grid_search_pays_for_all_its_fits(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs
    path = tmp_path / "data.ledger"
    search = GridSearchCV(quick(ledger=path, epochs=1), {"clip": [0.5, 1.0], "hidden": [(), (3,)]}, cv=2)
    search.fit(X, y)
    assert set(search.best_params_) == {"clip", "hidden"}
    with Ledger(path, create=False) as ledger:
        assert len(ledger.runs()) == 2 * 4 + 1


def test_the_budget_of_the_ledger_ends_a_fit(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    path = tmp_path / "data.ledger"
    with Ledger(path) as ledger:
        ledger.set_budget(3.0, 1e-4)
    model = quick(epsilon=2.5, epochs=10, ledger=path)
    assert model.fit(*blobs).privacy_["steps"] == 10
    assert 0 < model.fit(*blobs).privacy_["steps"] < 10
    with pytest.raises(BudgetExceeded):
        model.fit(*blobs)
    with pytest.raises(NotFittedError):
        model.predict(blobs[0])


def test_random_state_sets_the_weights_and_never_the_noise(blobs: tuple[Array, Array]) -> None:
    X, y = blobs

    def weights(**options: Any) -> Array:
        return np.asarray(quick(random_state=3, epochs=1, **options).fit(X, y).model_[1].weight)

    assert not np.allclose(weights(), weights(), rtol=1e-3)
    assert np.array_equal(weights(noise_level="seeded"), weights(noise_level="seeded"))
    assert np.allclose(weights(lr=1e-9), weights(lr=1e-9), atol=1e-6)


# What it reads


class Captured(Exception):
    pass


def to_train(monkeypatch: pytest.MonkeyPatch, model: Any, X: Array, y: Array) -> dict[str, Any]:
    """What `fit` hands to the private run, which is not started."""
    found: dict[str, Any] = {}

    def run(network: Any, data: Any, **options: Any) -> None:
        x, targets = data.__getitems__([*range(len(data))])
        weights = [p.detach().numpy().copy() for p in network.parameters()]
        found.update(options, x=x.numpy(), y=targets.numpy(), weights=weights)
        raise Captured

    with monkeypatch.context() as patch:
        patch.setattr(estimators, "Run", run)
        with pytest.raises(Captured):
            model.fit(X, y)
    return found


@pytest.mark.parametrize("bounds", [None, (-6, 6), [(-6, 6), (0, 1)]])
def test_a_record_changes_nothing_but_its_own_row(
    blobs: tuple[Array, Array], monkeypatch: pytest.MonkeyPatch, bounds: Any
) -> None:
    X, y = blobs
    other = X.copy()
    other[7] = [1e9, -1e9]
    options = {"bounds": bounds, "random_state": 0, "records": 210, "classes": ["maybe", "no", "yes"]}
    a = to_train(monkeypatch, PrivateClassifier(**options), X, y)
    b = to_train(monkeypatch, PrivateClassifier(**options), other, y)
    less = to_train(monkeypatch, PrivateClassifier(**options), np.delete(X, 7, 0), np.delete(y, 7))
    for found in (b, less):
        assert np.array_equal(np.delete(a["x"], 7, 0), found["x"] if found is less else np.delete(found["x"], 7, 0))
        assert all(np.array_equal(p, q) for p, q in zip(a["weights"], found["weights"], strict=True))
        for public in ("method", "sampling", "budget", "records"):
            assert a[public] == found[public]
    assert a["records"] == 210 and a["sampling"].batch == 210
    assert a["y"].max() == 2 and a["y"].min() == 1


def test_labels_stay_as_declared(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    model = quick(classes=["yes", "no", "maybe"]).fit(X, y.astype(object))
    assert model.classes_.tolist() == ["maybe", "no", "yes"]
    assert model.predict_proba(X).shape == (200, 3)
    assert not any("labels" in sentence for sentence in model.privacy_["not_covered"])
    assert any("labels" in sentence for sentence in quick().fit(X, y).privacy_["not_covered"])
    assert quick(classes=["no", "yes"]).fit(X, np.full(200, "no")).classes_.tolist() == ["no", "yes"]
    with pytest.raises(ValueError, match="not among the public classes"):
        quick(classes=["no", "maybe"]).fit(X, y)


def test_a_value_outside_of_its_bounds_counts_as_the_bound(
    blobs: tuple[Array, Array], line: tuple[Array, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = blobs
    bounds = [(-1, 1), (0, 4)]
    found = to_train(monkeypatch, quick(bounds=bounds), X, y)["x"]
    expected = np.stack([np.clip(X[:, 0], -1, 1), np.clip(X[:, 1], 0, 4) / 2 - 1], 1)
    assert np.allclose(found, expected, atol=1e-6)
    model = quick(bounds=bounds).fit(X, y)
    assert np.array_equal(model.predict_proba([[50, -3]]), model.predict_proba([[1, 0]]))
    model.set_params(bounds=(-100, 100))
    assert np.array_equal(model.predict_proba([[50, -3]]), model.predict_proba([[1, 0]])), "a fit stays as it was"

    X, y = line
    regressor = PrivateRegressor(epochs=2, bounds=(0, 10), target_bounds=(50, 60))
    assert np.allclose(to_train(monkeypatch, regressor, X, y)["y"], (np.clip(y, 50, 60) - 55) / 5, atol=1e-5)
    regressor.set_params(lr=50).fit(X, y)
    assert regressor.predict(X).min() >= 50 and regressor.predict(X).max() <= 60


def test_what_a_fitted_estimator_holds(blobs: tuple[Array, Array], line: tuple[Array, Array], tmp_path: Path) -> None:
    classifier = quick(ledger=tmp_path / "a.ledger").fit(*blobs)
    fitted = {"model_", "bounds_", "epsilon_", "privacy_", "n_features_in_"}
    assert set(vars(classifier)) == PARAMETERS | fitted | {"classes", "classes_"}
    regressor = PrivateRegressor(epochs=2).fit(*line)
    assert set(vars(regressor)) == PARAMETERS | fitted | {"target_bounds", "target_bounds_"}
    assert all(p.grad is None and not p.requires_grad for p in classifier.model_.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in classifier.model_.modules())
    many = np.tile(blobs[0], (20, 1)), np.tile(blobs[1], 20)
    assert len(pickle.dumps(quick().fit(*many))) < len(pickle.dumps(classifier)) + 200


# In company


def test_copies_predict_the_same_and_clones_know_nothing(blobs: tuple[Array, Array], tmp_path: Path) -> None:
    X, y = blobs
    model = quick(ledger=str(tmp_path / "a.ledger")).fit(X, y)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(model.predict_proba(X), again.predict_proba(X))
        assert again.epsilon_ == model.epsilon_ and again.fit(X, y).epsilon_ == model.epsilon_
    new = clone(model)
    assert new.get_params() == model.get_params() and not hasattr(new, "epsilon_")
    with pytest.raises(NotFittedError):
        new.predict(X)


def test_in_a_pipeline_on_digits() -> None:
    X, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(
        FunctionTransformer(lambda X: X / 16),
        PrivateClassifier(bounds=(0, 1), classes=range(10), noise_level="seeded", random_state=0),
    )
    assert pipeline.fit(X[:1500], y[:1500]).score(X[1500:], y[1500:]) > 0.75
    assert pipeline[-1].epsilon_ == math.inf  # seeded noise protects nothing


def test_a_probability_serves_a_ranking_score(blobs: tuple[Array, Array]) -> None:
    model = PrivateClassifier(bounds=(-6, 6), noise_level="seeded", random_state=0)
    assert cross_val_score(model, *blobs, scoring="roc_auc", cv=2).min() > 0.95


# What it says


@pytest.mark.filterwarnings("error")
def test_it_warns_only_of_what_was_left_open(blobs: tuple[Array, Array], line: tuple[Array, Array]) -> None:
    quick().fit(*blobs)
    PrivateRegressor(bounds=(0, 10), target_bounds=(20, 90), epochs=2).fit(*line)
    with pytest.warns(UserWarning, match=r"bounds of the features.* scaler .* not covered") as seen:
        quick(bounds=None).fit(*blobs)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="bounds of the target"):
        PrivateRegressor(bounds=(0, 10), epochs=2).fit(*line)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epsilon": 0}, "epsilon must be a positive number"),
        ({"epsilon": "one"}, "epsilon must be a positive number"),
        ({"delta": 2}, "delta must lie between"),
        ({"bounds": (1, 0)}, "bounds must be two numbers, the lower first, or a list of 2 such pairs"),
        ({"bounds": [(0, 1)]}, "bounds must be two numbers"),
        ({"bounds": (0, np.inf)}, "bounds must be two numbers"),
        ({"bounds": "wide"}, "bounds must be two numbers"),
        ({"records": 0}, "records must be a whole number"),
        ({"batch": 1.5}, "batch must be a whole number"),
        ({"batch": 1000}, "more than the 200 records"),
        ({"epochs": -1}, "epochs must be a positive number"),
        ({"lr": np.nan}, "lr must be a positive number"),
        ({"clip": 0}, "clip must be a positive number"),
        ({"hidden": 32}, "hidden must be a list of widths"),
        ({"hidden": (0,)}, "hidden must be a whole number"),
        ({"method": "magic"}, "There is no method 'magic'"),
        ({"method_options": {"slip": 1}}, "does not take these options"),
        ({"method_options": 3}, "method_options must be a dictionary"),
        ({"model": "magic"}, "Unknown model 'magic'"),
        ({"noise_level": "loud"}, "level is 'loud'"),
        ({"ledger": Ledger(":memory:")}, "give the path of its file"),
    ],
)
def test_bad_settings_are_sentences(blobs: tuple[Array, Array], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        quick(**options).fit(*blobs)


def test_targets_that_cannot_be_learned(blobs: tuple[Array, Array]) -> None:
    X, y = blobs
    with pytest.raises(ValueError, match="only one class"):
        quick().fit(X, np.zeros(200))
    with pytest.raises(ValueError, match="names no class"):
        quick(classes=[]).fit(X, y)
    with pytest.raises(ConfigError, match="target_bounds must be two numbers, the lower first, and is"):
        PrivateRegressor(target_bounds=(1, 1)).fit(X, X[:, 0])
    with pytest.raises(TypeError, match="sample_weight"):
        quick().fit(X, y, sample_weight=np.ones(200))


def test_feature_names_are_kept(blobs: tuple[Array, Array]) -> None:
    pandas = pytest.importorskip("pandas")
    X, y = blobs
    table = pandas.DataFrame(X, columns=["a", "b"])
    model = quick().fit(table, pandas.Series(y))
    assert model.feature_names_in_.tolist() == ["a", "b"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(table)


def test_a_clipless_classifier_can_be_pickled() -> None:
    """Its layers are parametrised while it is trained, which pickle does not take."""
    x = np.random.default_rng(0).uniform(-1, 1, (60, 4))
    y = (x[:, 0] > 0).astype(int)
    fitted = PrivateClassifier(method="clipless", model="lipschitz-mlp", bounds=(-1, 1), epochs=2).fit(x, y)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict_proba(x), fitted.predict_proba(x))
