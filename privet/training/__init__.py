"""Whole private trainings: a configuration in, a folder that can be handed on out. What `privet train` does.

    result = train(TrainConfig(data="digits", epsilon=3, epochs=30, lr=2.0, out="runs/first"))

The folder holds `config.toml`, which repeats the run, `metrics.jsonl`, and at the end `privacy.json` and
`model.safetensors`; while the run is unfinished, `checkpoint.pt`. Nothing in it but the model comes from records that
were trained on: accuracy and loss are those of held-out records (rule 9).
"""

from .config import TrainConfig, check_compute, default_delta, settle
from .folder import to_json
from .loop import SAMPLING, Progress, Result, load_data, train

__all__ = [
    "SAMPLING",
    "Progress",
    "Result",
    "TrainConfig",
    "check_compute",
    "default_delta",
    "load_data",
    "settle",
    "to_json",
    "train",
]
