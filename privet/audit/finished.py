"""A finished run, read back from its folder: its configuration, its statement, its records and its model."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import nn

from ..data import Data
from ..errors import ConfigError
from ..methods import Method
from ..methods import method as make_method
from ..nn import build, normalised, standardise_of
from ..sampling import SamplingRule
from ..training import SAMPLING, TrainConfig, load_data

_FILES = ("config.toml", "privacy.json", "model.safetensors")
_NEEDED = {"epsilon", "delta", "epsilon_is", "mechanism", "compositions", "steps", "records", "held_out", "groups"}


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What `privet train` left behind, with the records as it had them."""

    folder: Path
    config: TrainConfig
    statement: dict[str, Any]
    data: Data

    @classmethod
    def open(cls, folder: str | Path) -> FinishedRun:
        folder = Path(folder)
        config, statement = _read(folder)
        return cls(folder=folder, config=config, statement=statement, data=_data(folder, config))

    def network(self, seed: int) -> nn.Module:
        """The run's network with other initial weights, behind the statistics that the run has released."""
        model = self._built(seed)
        if (layer := standardise_of(model)) is not None and (known := standardise_of(self.released())) is not None:
            layer.load_state_dict(known.state_dict())
        return model

    def _built(self, seed: int) -> nn.Module:
        options = dict(self.config.model_options)
        model = build(
            self.config.model, input_shape=self.data.input_shape, classes=self.data.classes, seed=seed, **options
        )
        model = normalised(model, self.config.normalise, self.data.input_shape)
        self.method().prepare(model)
        return model

    def released(self) -> nn.Module:
        """The model that the run released."""
        model = self._built(self.config.seed)
        try:
            model.load_state_dict(safetensors.torch.load_file(self.folder / "model.safetensors"))
        except (RuntimeError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f"model.safetensors in {self.folder} does not fit the run's data and model: {error}."
            ) from error
        return model

    def method(self) -> Method:
        return make_method(self.config.method, **self.config.method_options)

    def sampling(self) -> SamplingRule:
        if self.config.batch is None:
            raise ConfigError(f"config.toml in {self.folder} names no batch size.")
        return SAMPLING[self.config.sampling](batch=self.config.batch)


def _read(folder: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """The run's configuration and its privacy statement."""
    for name in ("config.toml", "privacy.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} holds no finished run, as it has no {name}: name the folder of one.")
    try:
        options = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        options.setdefault("loss", {"name": "ce"})  # runs from before there were others
        for part in ("method", "model", "loss"):
            named = dict(options[part])
            options |= {part: named.pop("name"), f"{part}_options": named}
        statement = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
        if missing := _NEEDED - set(statement):
            raise ValueError(f"privacy.json does not tell {', '.join(sorted(missing))}")
        return TrainConfig(**options), statement
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"The files of the run in {folder} are damaged: {error}.") from error


def _data(folder: Path, config: TrainConfig) -> Data:
    """The records as the run had them: the same file, the same seed, hence the same records held out."""
    try:
        data = load_data(config)
    except ConfigError as error:
        raise ConfigError(
            f"The records of the run in {folder} cannot be had again, and nothing can be measured without them: {error}"
        ) from error
    if data.train.tensors[1].is_floating_point():
        raise ConfigError(f"The run in {folder} predicts numbers, and these attacks are for classes only.")
    return data
