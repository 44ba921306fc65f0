"""What a run asks of the data sets it is given: a length, a DataLoader that can be made of them, users, no overlap."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from .errors import ConfigError
from .sampling import Sample

_DRAWN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
"""What a DataLoader could be told about samples, which are the sampling rule's here."""


def length(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "Privet draws the samples itself, so it cannot use a DataLoader: give its data set "
            "(loader.dataset), and collate_fn or num_workers as loader_options."
        )
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError("The data set has no length. Private sampling needs a map-style data set.") from None
    if size == 0:
        raise ConfigError("The data set is empty: there is nothing to train on.")
    return size


def options_for_loader(options: Mapping[str, Any], dataset: Dataset[Any]) -> dict[str, Any]:
    """The options for torch's DataLoader, tried out before the first step needs them."""
    if drawn := [name for name in options if name in _DRAWN]:
        raise ConfigError(
            f"loader_options has {', '.join(drawn)}, but the sampling rule draws the samples, as the accountant counts "
            "on it. Leave it out; how many records a step has is the rule's batch."
        )
    options = {**options, "collate_fn": options.get("collate_fn") or _collate}
    try:
        DataLoader(dataset, batch_sampler=[], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch's DataLoader does not take these loader_options: {error}.") from error
    return options


def _collate(items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"The records of a sample cannot be put into one batch: {error}. Give a function that can, for example by "
            'padding them to one length: loader_options={"collate_fn": …}.'
        ) from error


def records_by_user(users: Sequence[Hashable], size: int) -> list[Sample]:
    """The positions of each user's records, users in order of their first record."""
    if len(users) != size:
        raise ConfigError(f"There are {size} records and {len(users)} users: give one id for each record.")
    found: dict[Hashable, list[int]] = {}
    for position, given in enumerate(users):
        # tensors are never the same key of a dict
        user = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
        if isinstance(user, Tensor) or not isinstance(user, Hashable) or (isinstance(user, float) and math.isnan(user)):
            raise ConfigError(f"The user of record {position} is {user!r}: give a number or a name for each record.")
        found.setdefault(user, []).append(position)
    return [np.array(positions, dtype=np.int64) for positions in found.values()]


def refuse_overlap(private: Dataset[Any], public: Dataset[Any]) -> None:
    """Refuses public records that are private ones: by identity, as far as it can be seen without reading them."""
    (private, inside), (public, outside) = _unwrapped(private), _unwrapped(public)
    same, shared = private is public, False
    if isinstance(private, TensorDataset) and isinstance(public, TensorDataset):
        pairs = [(a, b) for a in private.tensors for b in public.tensors]
        same = same or any(a.data_ptr() == b.data_ptr() for a, b in pairs)
        shared = not same and any(_share_memory(a, b) for a, b in pairs)  # slices, whose numbers do not match
    if shared or (same and (inside is None or outside is None or not inside.isdisjoint(outside))):
        raise ConfigError(
            "The public records overlap with the private ones: some of them are the same items of the same data set. "
            "Give records of their own (a copy, or a slice that ends before the other begins), or two "
            "torch.utils.data.Subset without a common index."
        )


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors overlap in memory, as slices of one may do: by their first and last byte."""
    (start, end), (other_start, other_end) = _extent(a), _extent(b)
    return start < other_end and other_start < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    steps = sum(step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * (steps + 1 if tensor.numel() else 0)


def _unwrapped(dataset: Dataset[Any]) -> tuple[Dataset[Any], set[int] | None]:
    """The data set below any `Subset`, and which of its items are meant (None: all)."""
    indices: list[int] | None = None
    while isinstance(dataset, Subset):
        here = [int(i) for i in dataset.indices]  # a tensor's elements would never be equal to each other
        indices = here if indices is None else [here[i] for i in indices]
        dataset = dataset.dataset
    return dataset, None if indices is None else set(indices)
