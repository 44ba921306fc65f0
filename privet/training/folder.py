"""The run's folder and the data set's ledger: where they lie, and that nothing half is left in them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from .. import checkpoint
from ..data import SETS, Data
from ..errors import CheckpointError, ConfigError
from ..ledger import Ledger
from .config import TrainConfig

_RUN_FILES = ("config.toml", "metrics.jsonl", "checkpoint.pt", "privacy.json", "model.safetensors")


class Place:
    """The run's folder and the data set's ledger: what of them this call made, it can take back."""

    def __init__(self, config: TrainConfig, data: Data, resume: str | Path | None) -> None:
        self.run_id: str | None = None
        self._ledger: Ledger | None = None
        self._made: list[Path] = []
        self._stem = data.name if data.name in SETS else Path(data.name).stem
        if resume is not None:
            self.folder = Path(resume)
            if (self.folder / "model.safetensors").exists():
                raise CheckpointError(f"The run in {self.folder} is finished: there is nothing to resume.")
            self.run_id = str(checkpoint.read(self.folder / "checkpoint.pt").get("run"))
        elif config.out is not None:
            self.folder = Path(config.out)
        else:
            self.folder = _free_folder(Path("runs"), f"{self._stem}-{config.method}")
        if resume is None:
            _refuse_used(self.folder)

    def open_ledger(self, config: TrainConfig, data: Data) -> Ledger:
        path = self.folder.parent / f"{self._stem}.ledger" if config.ledger is None else Path(config.ledger)
        if config.ledger is None:
            self._make_folder(path.parent)
        if existed := path.exists():
            ledger = Ledger(path)
            label = ledger.dataset
            # A ledger made by hand is labelled by its file; any other label was put there by a run on that data.
            if label != data.name and (label != path.stem or label in SETS):
                ledger.close()
                Ledger(path, dataset=data.name)  # refuses
        else:
            # A resumed run's ledger must be there: a new one would not know what was spent since the checkpoint.
            ledger = Ledger(path, dataset=data.name, create=self.run_id is None)
        self._ledger = ledger
        if not existed:
            self._made.append(path)
        return ledger

    def write_start(self, config: TrainConfig) -> None:
        if self.run_id is None:
            self._make_folder(self.folder)
            self._made += [self.folder / name for name in _RUN_FILES]
            text = config.to_toml().encode()
            checkpoint.write_whole(self.folder / "config.toml", lambda file: file.write(text))

    def _make_folder(self, folder: Path) -> None:
        missing = [f for f in (folder, *folder.parents) if not f.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{folder} cannot be made a folder: there is a file in its place.") from error
        self._made += reversed(missing)

    def take_back(self) -> None:
        unspent = self._ledger is not None and not self._ledger.spent()
        self.close()
        for path in reversed(self._made):
            with suppress(OSError):  # a folder that holds other things stays
                if path.is_dir():
                    path.rmdir()
                elif path.suffix != ".ledger" or unspent:
                    path.unlink()

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()


def _free_folder(parent: Path, stem: str) -> Path:
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def _refuse_used(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out is {folder}, which is a file: name a folder.")
    if any((folder / name).exists() for name in _RUN_FILES):
        raise ConfigError(
            f"{folder} already holds a run. Name another folder with --out, or go on with it: "
            f"privet train --resume {folder}"
        )


def hand_over(folder: Path, statement: Mapping[str, Any], model: nn.Module, about: Mapping[str, str]) -> None:
    """Writes what is released. The model comes last, as a folder that has it counts as finished."""
    text = to_json(statement, indent=2).encode()
    checkpoint.write_whole(folder / "privacy.json", lambda file: file.write(text))
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    content = safetensors.torch.save(tensors, metadata={"format": "pt", **about})
    checkpoint.write_whole(folder / "model.safetensors", lambda file: file.write(content))
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON proper, in which an infinite number is the string "inf"."""

    def clean(v: Any) -> Any:
        if isinstance(v, float) and not math.isfinite(v):
            return str(v)
        if isinstance(v, Mapping):
            return {str(k): clean(x) for k, x in v.items()}
        return [clean(x) for x in v] if isinstance(v, list | tuple) else v

    return json.dumps(clean(value), indent=indent, default=str)
