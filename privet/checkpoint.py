"""Checkpoints: everything needed to go on, written whole or not at all, read without pickle."""

from __future__ import annotations

import copy
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
_KEYS = {"run", "terms", "steps_done", "epoch_key", "spent", "session", "model", "stateful"}


def save(run: Run, path: Path, stateful: Mapping[str, Any]) -> None:
    content = {
        "format": _FORMAT,
        "run": run.id,
        "terms": run.terms(),
        "steps_done": run.steps_done,
        "epoch_key": None if run._epoch_key is None else run._epoch_key.hex(),
        "spent": [(mechanism.to_json(), count) for mechanism, count in run.ledger.spent(run=run.id)],
        "session": run.session.state(),
        "model": run.model.state_dict(),
        "stateful": {name: thing.state_dict() for name, thing in stateful.items()},
    }
    if not path.parent.is_dir():
        raise CheckpointError(f"The folder of {path} does not exist: make it first.")
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
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not content.keys() >= _KEYS:
        raise CheckpointError(f"{path} is not a checkpoint of this version of Privet.")
    return content


def load(run: Run, path: Path, stateful: Mapping[str, Any]) -> None:
    """Formal guarantee: what was spent never goes down, and noise is drawn afresh; steps done again are paid again."""
    content = read(path)
    if run.steps_done and run.id != content["run"]:
        raise CheckpointError(
            f"{path} belongs to another run, and this one has taken {run.steps_done} steps already, which would be "
            "forgotten. Load it into a new Run."
        )
    if content["terms"] != run.terms():
        changed = [name for name, value in run.terms().items() if content["terms"].get(name) != value]
        raise CheckpointError(
            f"{path} was made under another {', '.join(changed)}, and what it has paid for holds under its own terms "
            "only. Make the Run with those, or start a new Run from the model's weights."
        )
    if missing := set(stateful) - set(content["stateful"]):
        raise CheckpointError(f"{path} holds no state for {sorted(missing)}; it has {sorted(content['stateful'])}.")
    if left := sorted(set(content["stateful"]) - set(stateful)):
        raise CheckpointError(
            f"{path} also holds the state of {', '.join(left)}, which would begin anew. Hand it in: run.load(path, "
            f"{', '.join(f'{name}={name}' for name in sorted(content['stateful']))})."
        )
    targets = [(run.model, content["model"]), *[(thing, content["stateful"][n]) for n, thing in stateful.items()]]
    before = [(thing, copy.deepcopy(thing.state_dict())) for thing, _ in targets]
    try:
        for thing, state in targets:
            thing.load_state_dict(state)
        run.session.load_state(content["session"])
    except (RuntimeError, ValueError, KeyError, CheckpointError) as error:
        for thing, state in before:
            thing.load_state_dict(state)
        raise CheckpointError(f"{path} does not fit this model, optimizer or method: {error}") from error
    run._continue(
        content["run"],
        content["steps_done"],
        None if content["epoch_key"] is None else bytes.fromhex(content["epoch_key"]),
        [(Mechanism.from_json(mechanism), count) for mechanism, count in content["spent"]],
    )
