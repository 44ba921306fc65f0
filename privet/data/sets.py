"""Data sets by name, or a table by its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from privet.data import images, tables
from privet.data.base import Data, holdout, set_public
from privet.data.features import scattering
from privet.errors import ConfigError

SETS: dict[str, Callable[[Path | None], Data]] = {
    "digits": images.digits,
    "mnist": images.mnist,
    "fashion-mnist": images.fashion_mnist,
    "cifar10": images.cifar10,
}


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    target: str | None = None,
    test_fraction: float = 0.2,
    validation: float | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    users: str | None = None,
    public: float | None = None,
    features: Literal["none", "scattering"] = "none",
    features_cache: Path | None = None,
) -> Data:
    """Load the data set `name`: one of SETS, or the path of a table (CSV, TSV, Parquet or npz).

    `data_dir` is where the files of a named set are. `target`, `test_fraction`, `bounds` and `users` are for
    tables (see `privet.data.tables.load_table`); the named sets have a fixed test set. With `validation` the test
    records are replaced by that fraction of the training records (see `holdout`), to tune without them; with
    `public` that fraction of the training records is set apart as public. `features` replace the inputs of an image set
    once the records are split, so that the split is that of the images; they are kept in the folder `features_cache`
    (see `privet.data.features.scattering`), by default data_dir/features, and without a `data_dir` nowhere.

    Formal guarantee: how a record is encoded does not depend on any other record.
    """
    folder = None if data_dir is None else Path(data_dir)
    if str(name).lower().endswith(tables.SUFFIXES):
        path = Path(name)
        if folder is not None and not path.exists():
            path = folder / name
        data = tables.load_table(path, target=target, test_fraction=test_fraction, bounds=bounds, users=users)
    elif name not in SETS:
        raise ConfigError(
            f"Unknown data set {name!r}. Choose one of {', '.join(SETS)}, or give the path of a table "
            f"({', '.join(tables.SUFFIXES)})."
        )
    elif target is not None or bounds or users is not None:
        raise ConfigError(f"target, bounds and users are for tables; the data set {name!r} has its own.")
    else:
        data = SETS[name](folder)
    data = data if validation is None else holdout(data, validation)
    data = data if public is None else set_public(data, public)
    if features == "none":
        return data
    if features_cache is None and folder is not None:
        features_cache = folder / "features"
    return scattering(data, cache=features_cache)
