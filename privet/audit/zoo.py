"""A small network for every supported kind of layer, with records to go through it: what a new method is tried on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_CLASSES = 3
_RECORDS = 8

Example = tuple[nn.Module, tuple[Tensor, Tensor]]


class _Mean(nn.Module):
    """Averages over the positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class _Tied(nn.Module):
    """One layer used twice: its two gradients are one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(6, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))  # type: ignore[no-any-return]


def _head(width: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Tanh(), nn.Linear(width, _CLASSES)]


def _on(shape: tuple[int, ...], *layers: nn.Module) -> Callable[[], Example]:
    def build() -> Example:
        model = nn.Sequential(*layers)
        x = torch.randn(_RECORDS, *shape)
        with torch.no_grad():
            width = int(model(x).flatten(1).shape[1])
        return nn.Sequential(model, *_head(width)), (x, torch.arange(_RECORDS) % _CLASSES)

    return build


def _tokens(*layers: nn.Module) -> Callable[[], Example]:
    def build() -> Example:
        x = torch.randint(0, 11, (_RECORDS, 5))
        return nn.Sequential(*layers, *_head(4)), (x, torch.arange(_RECORDS) % _CLASSES)

    return build


def _sequence(*layers: nn.Module) -> Callable[[], Example]:
    return _on((5, 4), *layers, _Mean())


_BUILDERS: dict[str, Callable[[], Callable[[], Example]]] = {
    "Linear": lambda: _on((6,), nn.Linear(6, 5)),
    "Linear over positions": lambda: _sequence(nn.Linear(4, 4)),
    "Linear over positions, wide": lambda: _on((2, 24), nn.Linear(24, 20), _Mean()),
    "a layer used twice": lambda: lambda: (_Tied(), (torch.randn(_RECORDS, 6), torch.arange(_RECORDS) % _CLASSES)),
    "Conv1d, padded": lambda: _on((2, 9), nn.Conv1d(2, 3, 3, padding=1)),
    "Conv2d, strided and padded": lambda: _on((1, 8, 8), nn.Conv2d(1, 3, 4, stride=2, padding=2)),
    "Conv2d, grouped and dilated": lambda: _on((2, 9, 9), nn.Conv2d(2, 4, 3, groups=2, dilation=2)),
    "Conv2d, circular padding": lambda: _on((2, 5, 5), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")),
    "Conv2d, wide on a small map": lambda: _on((8, 3, 3), nn.Conv2d(8, 12, 3, padding=1)),
    "Conv3d": lambda: _on((1, 4, 4, 4), nn.Conv3d(1, 2, 2, stride=2)),
    "Embedding": lambda: _tokens(nn.Embedding(11, 4), _Mean()),
    "LayerNorm": lambda: _sequence(nn.Linear(4, 4), nn.LayerNorm(4)),
    "RMSNorm": lambda: _sequence(nn.Linear(4, 4), nn.RMSNorm(4)),
    "GroupNorm": lambda: _on((2, 5, 5), nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)),
    "InstanceNorm": lambda: _on((2, 6), nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True)),
    "InstanceNorm2d": lambda: _on((2, 5, 5), nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    "InstanceNorm3d": lambda: _on((1, 4, 4, 4), nn.Conv3d(1, 2, 2), nn.InstanceNorm3d(2, affine=True)),
    "attention": lambda: _sequence(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    "PReLU, by torch.func": lambda: _on((6,), nn.Linear(6, 5), nn.PReLU()),
}


def examples(seed: int = 0) -> dict[str, Example]:
    """By what they show; the same each time for the same seed, whatever else has drawn from torch's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: builder()() for name, builder in _BUILDERS.items()}


def digits_example() -> Example:
    """A small network on some of scikit-learn's digits: what a method is tried on where nothing else is named."""
    from ..data import load  # noqa: PLC0415

    x, y = (part[:128] for part in load("digits").train.tensors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 16), nn.Tanh(), nn.Linear(16, 10)), (x, y)
