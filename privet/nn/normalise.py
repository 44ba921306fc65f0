"""A first layer that brings the inputs' channels to one scale: by each record's own numbers, or by statistics.

Features such as scattering coefficients differ in size from channel to channel by a factor of a hundred, and a private
gradient, with one clip and one noise for all, learns little from the small ones.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..run import Run

Normalise = Literal["none", "group", "public", "private"]

_CHANNELS_PER_GROUP = 3
"""As Tramèr and Boneh found: 27 groups for 81 channels, 81 for 243."""
_BLOCK = 256
"""Public records that are added up at a time."""


class Standardise(nn.Module):
    """(x − mean) / deviation, channel by channel; the identity until `learn` or `learn_from_public` was called, once.

    Mean and deviation are buffers, hence part of the model that is released.
    """

    mean: Tensor
    deviation: Tensor
    known: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("deviation", torch.ones(channels))
        self.register_buffer("known", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return (x - self.mean.view(shape)) / self.deviation.view(shape)

    @torch.no_grad()
    def learn(self, run: Run, *, clip: float, noise: float) -> None:
        """Sets mean and deviation from one noisy query over all records, which the run pays for.

        A record adds the mean of each channel over its positions, a vector clipped to norm C = `clip`, and the mean of
        the squares, clipped to C². Both are ONE Gaussian mechanism (rule 2) with noise s = √2·`noise`·Δ, where Δ is
        C and C², twice that under replace_one. The sums are divided by the public number of records (rule 4). No
        variance is taken to be below the deviation of its noise.
        """
        answers = run.query(lambda batch: moments(batch[0]), bounds=(clip, clip**2), noise=noise)
        (mean, _), (squares, std) = ((total / run.records, std / run.records) for total, std in answers)
        self._set(mean, (squares - mean**2).clamp(min=std))

    @torch.no_grad()
    def learn_from_public(self, x: Tensor) -> None:
        """Sets mean and deviation from public records, which is free. A channel that does not vary is only centred."""
        if not len(x):
            raise ConfigError("There are no public records to take means and deviations from.")
        parts = [[total.sum(0) for total in moments(part)] for part in torch.split(x, _BLOCK)]
        mean, squares = (torch.stack(totals).sum(0) / len(x) for totals in zip(*parts, strict=True))
        variance = squares - mean**2
        self._set(mean, torch.where(variance > 2.0**-30 * squares, variance, 1))

    def _set(self, mean: Tensor, variance: Tensor) -> None:
        self.mean.copy_(mean)
        self.deviation.copy_(variance.sqrt())
        self.known.fill_(True)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each record, the mean and the mean square of each channel over its positions."""
    x = x.double().unsqueeze(-1).flatten(2)
    return x.mean(2), x.square().mean(2)


def normalised(model: nn.Module, how: Normalise, input_shape: tuple[int, ...]) -> nn.Module:
    """The model behind a layer that normalises its inputs: `none`, `group`, `public` or `private`.

    `group`: GroupNorm without weights over 3 neighbouring channels (or as near to it as they can be divided), which
    reads nothing but the record itself and is free. The others are `Standardise`, free where it learns from public
    records; from private ones it costs what its query costs.
    """
    if how == "none":
        return model
    channels = input_shape[0]
    layer: nn.Module = Standardise(channels)
    if how == "group":
        if len(input_shape) != 3:
            raise ConfigError(
                f"normalise 'group' is for images and their features, not for records of shape {input_shape}: choose "
                "'public', 'private' or 'none'."
            )
        most = max(1, channels // _CHANNELS_PER_GROUP)
        groups = next(k for k in range(most, 0, -1) if channels % k == 0)
        layer = nn.GroupNorm(groups, channels, affine=False)
    return nn.Sequential(OrderedDict([("normalise", layer), ("network", model)]))


def standardise_of(model: nn.Module) -> Standardise | None:
    """The layer that waits for statistics, or has them."""
    return next((module for module in model.modules() if isinstance(module, Standardise)), None)
