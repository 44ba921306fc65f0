"""Per-record gradients of normalisation layers: ∇scale = Σ_t δ_t·x̂_t and ∇shift = Σ_t δ_t, channel by channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from .per_record import Dense, PerRecord, rule_for, wide


@rule_for(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, z: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    normalised = F.layer_norm(wide(z), layer.normalized_shape, eps=layer.eps)
    return _over_leading(normalised, wide(delta), len(layer.normalized_shape))


@rule_for(nn.RMSNorm)
def rms_norm(layer: nn.RMSNorm, z: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    normalised = F.rms_norm(wide(z), layer.normalized_shape, eps=layer.eps)
    return _over_leading(normalised, wide(delta), len(layer.normalized_shape))


@rule_for(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, z: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    normalised = F.group_norm(wide(z), layer.num_groups, eps=layer.eps)
    return _over_trailing(normalised, wide(delta))


@rule_for(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d, z: Tensor, delta: Tensor
) -> Mapping[str, PerRecord]:
    own_statistics = layer.training or not layer.track_running_stats
    normalised = F.instance_norm(
        wide(z),
        None if own_statistics else layer.running_mean,
        None if own_statistics else layer.running_var,
        use_input_stats=own_statistics,
        eps=layer.eps,
    )
    return _over_trailing(normalised, wide(delta))


def _over_leading(normalised: Tensor, delta: Tensor, trailing: int) -> Mapping[str, PerRecord]:
    """Parameters live on the last `trailing` axes; everything between those and the record axis is summed."""
    return _affine(normalised, delta, tuple(range(1, delta.dim() - trailing)))


def _over_trailing(normalised: Tensor, delta: Tensor) -> Mapping[str, PerRecord]:
    """Parameters live on axis 1 (channels); everything after it is summed."""
    return _affine(normalised, delta, tuple(range(2, delta.dim())))


def _affine(normalised: Tensor, delta: Tensor, positions: tuple[int, ...]) -> Mapping[str, PerRecord]:
    product = normalised.mul_(delta)
    if not positions:
        return {"weight": Dense.of(product), "bias": Dense.of(delta.clone())}
    return {"weight": Dense.of(product.sum(positions)), "bias": Dense.of(delta.sum(positions))}
