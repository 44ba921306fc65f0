"""The run's folder and the data set's ledger: where they lie, and that nothing half is left in them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import safetensors.torch
from torch import nn

from .. import checkpoint
from ..data import SETS, Data
from ..errors import CheckpointError, ConfigError, LedgerError
from ..ledger import Ledger
from .config import TrainConfig

if sys.platform != "win32":
    import fcntl

_RUN_FILES = ("config.toml", "metrics.jsonl", "checkpoint.pt", "privacy.json", "model.safetensors", "report.html")


class Place:
    """The run's folder and the data set's ledger: what of them this call made, it can take back."""

    def __init__(self, config: TrainConfig, data: Data, resume: str | Path | None) -> None:
        self.run_id: str | None = None
        self._ledger: Ledger | None = None
        self._new_ledger = False
        self._made: list[Path] = []
        self._held: IO[bytes] | None = None
        self._stem = data.name if data.name in SETS else Path(data.name).stem
        self._numbered = resume is None and config.out is None
        if resume is not None:
            self.folder = Path(resume)
            if (self.folder / "model.safetensors").exists():
                raise CheckpointError(f"The run in {self.folder} is finished: there is nothing to resume.")
            self.run_id = str(checkpoint.read(self.folder / "checkpoint.pt").get("run"))
            self._hold()
        elif config.out is not None:
            self.folder = Path(config.out)
            _refuse_used(self.folder)
        else:
            self.folder = Path("runs", f"{self._stem}-{config.method}-1")

    def open_ledger(self, config: TrainConfig, data: Data) -> Ledger:
        # One ledger for a data set, wherever its runs are put.
        path = Path("runs", f"{self._stem}.ledger") if config.ledger is None else Path(config.ledger)
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
        self._ledger, self._new_ledger = ledger, not existed
        return ledger

    def write_start(self, config: TrainConfig) -> None:
        """Takes the folder and writes how to repeat the run; a resumed run has both."""
        if self.run_id is not None:
            return
        while not self._make_folder(self.folder) and self._numbered:
            stem, _, number = self.folder.name.rpartition("-")
            self.folder = self.folder.with_name(f"{stem}-{int(number) + 1}")
        _refuse_used(self.folder)  # again: planning took a while, in which another process may have come here
        self._made += [self.folder / name for name in _RUN_FILES]
        text = config.to_toml().encode()
        checkpoint.write_whole(self.folder / "config.toml", lambda file: file.write(text))
        self._hold()

    def _hold(self) -> None:
        """Keeps other processes from going on with the same run, as long as this one does."""
        if sys.platform == "win32":
            return
        self._held = (self.folder / "config.toml").open("rb")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"The run in {self.folder} is being trained by another process. Wait until it has ended, or stop it."
            ) from None
        except OSError:
            pass  # a file system without locks: the ledger still keeps both to one budget

    def _make_folder(self, folder: Path) -> bool:
        """Whether the folder was made here and now: of two processes that try, one gets it."""
        if folder.parent != folder and not folder.parent.exists():
            self._make_folder(folder.parent)
        try:
            folder.mkdir()
        except (FileExistsError, NotADirectoryError) as error:
            if not folder.is_dir():
                raise ConfigError(f"{folder} cannot be made a folder: there is a file in its place.") from error
            return False
        self._made.append(folder)
        return True

    def take_back(self) -> None:
        """Removes what this call made: nothing was released, and nothing was paid."""
        if self._ledger is not None and self._new_ledger:
            with suppress(OSError, LedgerError):
                unused = not self._ledger.spent() and len(self._ledger.runs()) <= 1
                self._ledger.close()
                if unused:
                    self._ledger.path.unlink()
        for path in reversed(self._made):
            with suppress(OSError):  # a folder that holds other things stays
                path.rmdir() if path.is_dir() else path.unlink()

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
        if self._ledger is not None:
            self._ledger.close()


def _refuse_used(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out is {folder}, which is a file: name a folder.")
    if any((folder / name).exists() for name in _RUN_FILES):
        raise ConfigError(
            f"{folder} already holds a run. Name another folder with --out, or go on with it: "
            f"privet train --resume {folder}"
        )


def drop_half_line(path: Path) -> None:
    """What a crash or a full disk may have left at the end of the metrics."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        checkpoint.write_whole(path, lambda file: file.write(whole))


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
