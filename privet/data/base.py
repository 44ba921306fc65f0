"""What a data set is to the rest of Privet, and how records are held out of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from privet.errors import ConfigError

_T = TypeVar("_T")

_FOR_VALIDATION = "held out for validation"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Records to train on and records held out, with what counts as public about them.

    `train` and `test` hold float32 inputs of `input_shape` and int64 class numbers; `labels` names the
    classes. `description` goes into the privacy statement: how inputs were scaled, and what was taken to be
    public.
    """

    name: str
    train: TensorDataset
    test: TensorDataset
    classes: int
    labels: tuple[str, ...]
    input_shape: tuple[int, ...]
    description: str
    task: Literal["classification"] = "classification"
    users: tuple[str, ...] | None = None
    """Whose record each one of `train` is, where whole users are to be protected."""
    public: TensorDataset | None = None
    """Records that are not protected, for methods that learn from such."""
    marks: tuple[bytes, ...] | None = None
    """What each one of `train` was when it was read, where its numbers depend on how they were asked for."""


class Records(Dataset[tuple[Tensor, Tensor]]):
    """Records in memory, of which the loader gets a whole batch by one index operation."""

    def __init__(self, data: TensorDataset) -> None:
        self._x, self._y = data.tensors

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        where = torch.tensor(indices)
        return self._x[where], self._y[where]


def collate(items: Any) -> Any:
    """What `Records` gives is a batch already; other items are put together by torch."""
    return items if isinstance(items, tuple) else default_collate(items)


def holdout(data: Data, fraction: float) -> Data:
    """Replace the test records by about `fraction` of the training records, to tune without the test set.

    Formal guarantee: the 1-stability of `coins`, from `data.train` to the new training set.
    """
    # Records that are still here were kept by their earlier coins, so a round needs coins of its own.
    rounds = data.description.count(_FOR_VALIDATION)
    data, test = _take_out(data, fraction, f"validation {rounds}")
    description = f"{data.description} About {fraction:g} of the training records were {_FOR_VALIDATION}."
    return replace(data, test=test, description=description)


def set_public(data: Data, fraction: float) -> Data:
    """Take about `fraction` of the training records for public ones, which are neither trained on nor protected."""
    data, public = _take_out(data, fraction, "public")
    description = f"{data.description} About {fraction:g} of the training records were taken for public."
    return replace(data, public=public, description=description)


def _take_out(data: Data, fraction: float, key: str) -> tuple[Data, TensorDataset]:
    x, y = data.train.tensors
    out = coins(x, y, fraction=fraction, key=key, users=data.users, marks=data.marks)
    kept = replace(
        data,
        train=TensorDataset(x[~out], y[~out]),
        users=None if data.users is None else remaining(data.users, out),
        marks=None if data.marks is None else remaining(data.marks, out),
    )
    return kept, TensorDataset(x[out], y[out])


def remaining(things: Sequence[_T], out: Tensor) -> tuple[_T, ...]:
    """Those of the records that are not out."""
    return tuple(thing for thing, gone in zip(things, out.tolist(), strict=True) if not gone)


def coins(
    x: Tensor,
    y: Tensor,
    *,
    fraction: float,
    key: str,
    users: Sequence[str] | None = None,
    marks: Sequence[bytes] | None = None,
) -> Tensor:
    """Which records to hold out, each by its own coin with probability `fraction`, or each user by one.

    A record's coin is a hash under `key` of the record (of its mark, where there are `marks`) and of how many records
    equal to it came before; a user's is one of the user's id. Nothing else goes into it: no seed, no order, no bounds
    of columns. So whoever is held out of one run is held out of all runs on the data set that hold out as many, and of
    those that hold out more: metrics of them are released without noise, which the cost of other runs says nothing of.

    Formal guarantee: the split is 1-stable. Adding, removing or replacing one record (or user) anywhere in the order
    leaves every other one on its side (equal records being interchangeable), so that the guarantee for the
    records trained on does not depend on who is held out. (Those who are have none: metrics of them are released.)
    A seeded shuffle does not have this: one record more moves all the others.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"The fraction of records to hold out must be between 0 and 1, not {fraction!r}.")
    digest_key = blake2b(key.encode()).digest()
    if users is not None:
        names: Iterable[bytes] = (user.encode() for user in users)
    else:
        contents = (a.tobytes() + b.tobytes() for a, b in zip(x.numpy(), y.numpy(), strict=True))
        names = _names(contents, marks, digest_key)
    drawn = (int.from_bytes(blake2b(name, digest_size=8, key=digest_key).digest()) for name in names)
    found = [coin < fraction * 2.0**64 for coin in drawn]
    if all(found) or not any(found):
        raise ConfigError(
            f"{len(found)} records are too few to hold out {fraction:g} of them and train on the rest; "
            "change the fraction."
        )
    return torch.tensor(found)


def _names(contents: Iterable[bytes], marks: Sequence[bytes] | None, key: bytes) -> Iterator[bytes]:
    """What tells a record from the others: its mark, or its content, and how many equal ones came before.

    Equal in both: one record more may move only those that it stands for, and rows with one mark may differ.
    """
    earlier: Counter[bytes] = Counter()
    for i, content in enumerate(contents):
        mark = blake2b(content if marks is None else marks[i], key=key).digest()
        record = blake2b(content, key=mark).digest()
        yield mark + earlier[record].to_bytes(8)
        earlier[record] += 1
