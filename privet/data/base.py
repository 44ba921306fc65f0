"""What a data set is to the rest of Privet, and how records are held out of training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privet.errors import ConfigError

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


def holdout(data: Data, fraction: float, seed: int = 0) -> Data:
    """Replace the test records by about `fraction` of the training records, to tune without the test set.

    Formal guarantee: the 1-stability of `split`, from `data.train` to the new training set.
    """
    # Records that are still here were kept by their earlier coins, so a round needs coins of its own.
    rounds = data.description.count(_FOR_VALIDATION)
    x, y = data.train.tensors
    train, test = split(x, y, fraction=fraction, key=f"{seed} validation {rounds}")
    description = f"{data.description} About {fraction:g} of the training records were {_FOR_VALIDATION}."
    return replace(data, train=train, test=test, description=description)


def split(x: Tensor, y: Tensor, *, fraction: float, key: str) -> tuple[TensorDataset, TensorDataset]:
    """Hold records out, each by its own coin with probability `fraction`: (the rest, those held out).

    A record's coin is a hash under `key` of the record and of how many equal ones came before it.

    Formal guarantee: the split is 1-stable. Adding, removing or replacing one record anywhere in the order
    leaves every other record on its side (equal records being interchangeable), so a guarantee for the
    records trained on is one for all of them. A seeded shuffle does not have this: one record more moves
    all the others.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"The fraction of records to hold out must be between 0 and 1, not {fraction!r}.")
    digest_key = blake2b(key.encode()).digest()
    earlier: Counter[bytes] = Counter()
    coins: list[bool] = []
    for a, b in zip(x.numpy(), y.numpy(), strict=True):
        record = blake2b(a.tobytes() + b.tobytes(), key=digest_key).digest()
        coin = blake2b(record + earlier[record].to_bytes(8), digest_size=8, key=digest_key).digest()
        coins.append(int.from_bytes(coin) < fraction * 2.0**64)
        earlier[record] += 1
    if all(coins) or not any(coins):
        raise ConfigError(
            f"{len(coins)} records are too few to hold out {fraction:g} of them and train on the rest; "
            "change the fraction or the seed."
        )
    out = torch.tensor(coins)
    return TensorDataset(x[~out], y[~out]), TensorDataset(x[out], y[out])
