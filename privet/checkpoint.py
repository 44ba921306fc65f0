"""Checkpoints: everything needed to go on, written whole or not at all, read without pickle."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from .accounting import Mechanism
from .errors import CheckpointError

if TYPE_CHECKING:
    from .run import Run

_FORMAT = "privet checkpoint 1"


def save(run: Run, path: Path, stateful: Mapping[str, Any]) -> None:
    content = {
        "format": _FORMAT,
        "run": run.id,
        "steps_done": run.steps_done,
        "epoch_key": None if run._epoch_key is None else run._epoch_key.hex(),
        "spent": [(mechanism.to_json(), count) for mechanism, count in run._ledger.spent(run=run.id)],
        "session": run.session.state(),
        "model": run.model.state_dict(),
        "stateful": {name: thing.state_dict() for name, thing in stateful.items()},
    }
    write_whole(path, lambda file: torch.save(content, file))


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes beside the target and renames: a crash or a full disk leaves the old file, or none, but never half."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, or a sentence that says why there is none."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}); it is damaged or of another kind."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of Privet.")
    return content


def load(run: Run, path: Path, stateful: Mapping[str, Any]) -> None:
    """Formal guarantee: what was spent never goes down, and noise is drawn afresh; steps done again are paid again."""
    content = read(path)
    if missing := set(stateful) - set(content["stateful"]):
        raise CheckpointError(f"{path} holds no state for {sorted(missing)}; it has {sorted(content['stateful'])}.")
    try:
        run.model.load_state_dict(content["model"])
        for name, thing in stateful.items():
            thing.load_state_dict(content["stateful"][name])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} does not fit this model or optimizer: {error}") from error
    run.session.load_state(content["session"])
    run._continue(
        content["run"],
        content["steps_done"],
        None if content["epoch_key"] is None else bytes.fromhex(content["epoch_key"]),
        [(Mechanism.from_json(mechanism), count) for mechanism, count in content["spent"]],
    )
