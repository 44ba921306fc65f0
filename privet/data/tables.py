"""Tables of a user's own, CSV, Parquet or NumPy, turned into numbers by maps fixed before the data was seen."""

from __future__ import annotations

import csv
import gzip
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from privet.data.base import Data, coins, remaining
from privet.errors import ConfigError

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".npz")

_MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
_CODE_BITS = 16
_MOST_NUMERIC_CLASSES = 50
_FEWEST_SUSPICIOUS_CLASSES = 20

log = logging.getLogger("privet")

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Table:
    columns: dict[str, list[str]]
    places: Sequence[str]  # where each row stands in the file, for messages


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    labels: tuple[str, ...]
    marks: tuple[bytes, ...]
    """Each row as it was read, for its coins."""
    users: list[str] | None = None


def load_table(
    path: Path,
    *,
    target: str | None,
    test_fraction: float,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    users: str | None = None,
) -> Data:
    """Read a table, encode its columns, and hold out about `test_fraction` of its rows.

    - A column of numbers becomes sign(x) log(1 + |x|), or, with `bounds[column] = (low, high)`, x clipped to
      them and mapped to [-1, 1]; then a column that is 1 where the value is missing (and the number 0).
    - Any other column becomes 16 numbers of size 1/4, whose signs hash the column's name and the value.
    - The classes are the values of `target`.
    - The column `users` says whose row each is; it is no input, and all rows of a user are held out or none.
    - A NumPy archive (.npz) holds the numbers X, one row for each record, and the class numbers y. Its columns are
      named 0, 1, 2 and so on and its target y; no number may be missing, so no column says which are.

    Formal guarantee: with the columns' names and types and the set of target labels public, each row of the
    result is a function of that row alone, and the split is 1-stable (see `privet.data.base.coins`). No mean,
    range or vocabulary of a column is used.
    """
    if path.suffix.lower() == ".npz":
        table = _encode_archive(path, target, users, dict(bounds or {}))
    else:
        table = _encode_columns(path, target, users, dict(bounds or {}))
    inputs, targets, ids = torch.from_numpy(table.x), torch.from_numpy(table.y), table.users
    out = coins(inputs, targets, fraction=test_fraction, key="test", users=ids, marks=table.marks)
    return Data(
        name=path.name,
        train=TensorDataset(inputs[~out], targets[~out]),
        test=TensorDataset(inputs[out], targets[out]),
        users=None if ids is None else remaining(ids, out),
        marks=remaining(table.marks, out),
        classes=len(table.labels),
        labels=table.labels,
        input_shape=(table.x.shape[1],),
        description="Numbers were scaled by a fixed function or by bounds given with the run, and other "
        "values hashed; no statistic of the records was used. The columns' names and types and the set of "
        f"target labels count as public. About {test_fraction:g} of the records are held out, each by its "
        "own coin, and not trained on.",
    )


def _encode_columns(
    path: Path, target: str | None, users: str | None, bounds: dict[str, tuple[float, float]]
) -> _Encoded:
    table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    if target is None or target not in table.columns:
        wrong = "No target column was named" if target is None else f"There is no column {target!r}"
        raise ConfigError(
            f"{wrong} in {path}: name the column to predict with target (--target), one of {', '.join(table.columns)}."
        )
    if users is not None and (users not in table.columns or users == target):
        wrong = "is the target" if users == target else f"is not a column of {path}"
        raise ConfigError(f"users is {users!r}, which {wrong}: name the column that says whose row each is.")
    features = {name: cells for name, cells in table.columns.items() if name not in (target, users)}
    if not features:
        raise ConfigError(f"{path} has no column besides the target {target!r}.")
    if not table.places:
        raise ConfigError(f"{path} has a header and no rows.")
    y, labels = _classes(path, target, table)
    _warn_of_open_columns([name for name in features if name not in bounds and _numbers(features[name]) is not None])
    x = np.concatenate([_encoded(name, cells, bounds.pop(name, None)) for name, cells in features.items()], axis=1)
    _refuse_unused(path, bounds)
    marks = _marks({name: cells for name, cells in table.columns.items() if name != users})
    return _Encoded(x=x, y=y, labels=labels, marks=marks, users=None if users is None else table.columns[users])


def _encode_archive(
    path: Path, target: str | None, users: str | None, bounds: dict[str, tuple[float, float]]
) -> _Encoded:
    numbers, classes = _read_archive(path)
    if target not in (None, "y"):
        raise ConfigError(f"target is {target!r}, and that of a NumPy archive is its array y: leave target out.")
    if users is not None:
        raise ConfigError(f"users is {users!r}, and a NumPy archive does not say whose row each is: give a CSV table.")
    if not _all_numbers(classes):
        raise ConfigError(f"{path}: y is missing (NaN) in a row; remove the row or fill it in.")
    if not _all_numbers(numbers):
        raise ConfigError(
            f"{path}: X has missing values (NaN). Fill them in, or give a CSV table, where a column more says which "
            "values are missing."
        )
    y, labels = _numeric_classes("y", classes.astype(np.float64))
    names = [str(i) for i in range(numbers.shape[1])]
    _warn_of_open_columns([name for name in names if name not in bounds])
    x = np.empty(numbers.shape, np.float32)
    for i, name in enumerate(names):
        column = np.nan_to_num(numbers[:, i].astype(np.float64))  # infinities become the largest float
        x[:, i] = _scaled(name, column, bounds.pop(name, None))
    _refuse_unused(path, bounds)
    marks = tuple(
        np.append(row, label).astype(np.float64).tobytes() for row, label in zip(numbers, classes, strict=True)
    )
    return _Encoded(x=x, y=y, labels=labels, marks=marks)


def _marks(columns: Mapping[str, list[str]]) -> tuple[bytes, ...]:
    """Each row as it was read, whatever the order of the columns, and whether one was written as 1, 1.0 or 1e0."""
    same = {cell: _canonical(cell) for cells in columns.values() for cell in set(cells)}
    in_order = [[same[cell] for cell in columns[name]] for name in sorted(columns)]
    return tuple(repr(row).encode() for row in zip(*in_order, strict=True))


def _canonical(cell: str) -> str:
    if cell.lower() in _MISSING:
        return ""
    try:
        return repr(float(cell))
    except ValueError:
        return cell


def _refuse_unused(path: Path, bounds: Mapping[str, tuple[float, float]]) -> None:
    if bounds:
        raise ConfigError(f"bounds names {', '.join(map(repr, bounds))}, not a column of {path} to learn from.")


def _all_numbers(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or not np.isnan(array).any()


def _classes(path: Path, target: str, table: _Table) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    cells = table.columns[target]
    numbers = _numbers(cells)
    for i, cell in enumerate(cells):
        if not cell or (numbers is not None and np.isnan(numbers[i])):
            raise ConfigError(
                f"{path}, {table.places[i]}: the target {target!r} is missing; remove the row or fill it in."
            )
    if numbers is not None:
        return _numeric_classes(target, numbers)
    values, y = np.unique(np.array(cells), return_inverse=True)
    names = tuple(map(str, values))
    _check_classes(target, names, len(cells))
    if doubtful := [name for name in names if name.lower() in _MISSING]:
        log.warning(
            "The target %r has the class %r, which is learned like any other. If it stands for a missing value, remove "
            "the rows that have it.",
            target,
            doubtful[0],
        )
    return y.astype(np.int64), names


def _numeric_classes(target: str, numbers: Floats) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """1 and 1.0 are one class, and 2 comes before 10."""
    values, y = np.unique(numbers, return_inverse=True)
    names = tuple(np.format_float_positional(value, trim="-") for value in values)
    _check_classes(target, names, len(numbers))
    if len(names) > _MOST_NUMERIC_CLASSES:
        raise ConfigError(
            f"The target {target!r} takes {len(names)} different numbers, more than {_MOST_NUMERIC_CLASSES}: that is "
            "regression, and only classes can be predicted here. Put the numbers into classes first."
        )
    return y.astype(np.int64), names


def _check_classes(target: str, names: Sequence[str], rows: int) -> None:
    if len(names) > max(_FEWEST_SUSPICIOUS_CLASSES, rows / 2):
        raise ConfigError(
            f"The target {target!r} takes {len(names)} different values in {rows} rows, nearly one for each row, "
            "as an identifier or a measurement does. Name a column of classes, or put the values into classes first."
        )
    if len(names) < 2:
        raise ConfigError(f"The target {target!r} is {names[0]!r} in every row; there is nothing to predict.")


def _warn_of_open_columns(names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        log.warning(
            "No public bounds are known for the numbers in %s%s, so a fixed function squeezes them, sign(x) log(1 + "
            "|x|), which may cost accuracy: give bounds that do not come from the data, --bounds COLUMN=LOW:HIGH.",
            ", ".join(map(repr, names[:5])),
            more,
        )


def _encoded(name: str, cells: list[str], bounds: tuple[float, float] | None) -> NDArray[np.float32]:
    numbers = _numbers(cells)
    if numbers is not None:
        missing = np.isnan(numbers)
        scaled = _scaled(name, np.nan_to_num(numbers), bounds)  # infinities become the largest float
        return np.stack([np.where(missing, 0, scaled), missing], axis=1).astype(np.float32)
    if bounds is not None:
        raise ConfigError(f"bounds were given for column {name!r}, which does not hold numbers alone.")
    codes = {cell: _code(name, cell) for cell in set(cells)}
    return np.stack([codes[cell] for cell in cells])


def _scaled(name: str, numbers: Floats, bounds: tuple[float, float] | None) -> Floats:
    if bounds is None:
        return np.sign(numbers) * np.log1p(np.abs(numbers))
    low, high = bounds
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ConfigError(f"bounds[{name!r}]={bounds!r} must be two numbers, the lower first.")
    return (np.clip(numbers, low, high) - low) / (high - low) * 2 - 1


def _code(name: str, cell: str) -> NDArray[np.float32]:
    """A vector of norm 1 for one value: nearly orthogonal to any other's, and known without the data."""
    digest = blake2b(f"{name}={cell}".encode(), digest_size=_CODE_BITS // 8).digest()
    signs = np.unpackbits(np.frombuffer(digest, np.uint8)).astype(np.float32) * 2 - 1
    return np.asarray(signs / np.sqrt(_CODE_BITS), dtype=np.float32)


def _numbers(cells: list[str]) -> Floats | None:
    """The cells as numbers, NaN where missing; None if any is neither."""
    try:
        return np.array([np.nan if cell.lower() in _MISSING else float(cell) for cell in cells], dtype=np.float64)
    except ValueError:
        return None


def _read_csv(path: Path) -> _Table:
    name = path.name.lower()
    rows: list[list[str]] = []
    places: list[str] = []
    line = 0
    try:
        with (gzip.open if name.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if ".tsv" in name else ",", skipinitialspace=True, strict=True)
            for row in reader:
                line = reader.line_num
                if row:  # a blank line is no row
                    rows.append([cell.strip() for cell in row])
                    places.append(f"line {line}")
    except FileNotFoundError as error:
        raise ConfigError(f"The table {path} does not exist.") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a table of text after line {line}: {error}.") from error
    if not rows:
        raise ConfigError(f"{path} is empty; its first line must name the columns.")
    header = _checked_header(path, rows.pop(0))
    del places[0]
    for row, place in zip(rows, places, strict=True):
        if len(row) != len(header):
            raise ConfigError(f"{path}, {place}: {len(row)} cells, but the header names {len(header)} columns.")
    return _Table(columns={name: [row[i] for row in rows] for i, name in enumerate(header)}, places=places)


def _read_parquet(path: Path) -> _Table:
    try:
        import pyarrow as pa  # noqa: PLC0415 (an extra)
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("Reading Parquet needs pyarrow: pip install privet[parquet].") from error
    try:
        table = parquet.read_table(path)
    except FileNotFoundError as error:
        raise ConfigError(f"The table {path} does not exist.") from error
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    header = _checked_header(path, table.column_names)
    columns = {
        name: ["" if value is None else str(value) for value in column.to_pylist()]
        for name, column in zip(header, table.columns, strict=True)
    }
    return _Table(columns=columns, places=[f"row {i}" for i in range(1, table.num_rows + 1)])


def _read_archive(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """X and y. Nothing is unpickled: a pickle in a file of records could run any program."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array without a name")
        with archive:
            missing = [name for name in ("X", "y") if name not in archive]
            if missing:
                raise ConfigError(
                    f"{path} has no array {' and no array '.join(missing)}. A table in a NumPy archive is X, the "
                    f"numbers of each record, and y, their class numbers; there is {', '.join(archive) or 'nothing'}."
                )
            x, y = archive["X"], archive["y"]
    except FileNotFoundError as error:
        raise ConfigError(f"The table {path} does not exist.") from error
    except (OSError, EOFError, ValueError, RuntimeError, BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be read as a NumPy archive of numbers, as np.savez(file, X=numbers, y=classes) writes it: "
            f"{error}."
        ) from error
    for name, array in (("X", x), ("y", y)):
        if array.dtype.kind not in "biuf":
            raise ConfigError(f"{path}: the array {name} must hold numbers, and holds {array.dtype}.")
    if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or not x.size:
        raise ConfigError(
            f"{path}: X must have one row for each record, at least one column, and y one number for each record; "
            f"their shapes are {x.shape} and {y.shape}."
        )
    return x, y


def _checked_header(path: Path, header: Sequence[str]) -> list[str]:
    if repeated := {name for name in header if list(header).count(name) > 1}:
        raise ConfigError(f"{path} names a column more than once: {', '.join(sorted(map(repr, repeated)))}.")
    return list(header)
