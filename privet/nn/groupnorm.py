"""BatchNorm couples the records of a batch, so it cannot be trained per record; GroupNorm can."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from privet.errors import ConfigError, Refused

_SPATIAL: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, nn.BatchNorm3d)
_KNOWN: tuple[type[nn.Module], ...] = (*_SPATIAL, nn.BatchNorm1d, nn.SyncBatchNorm)

# Normalising k numbers to mean 0 and variance 1 keeps k - 2 of their k degrees of freedom: of two numbers
# nothing but which is the larger (and no gradient), of eight three quarters.
_FEWEST_WITHOUT_EXTENT = 8


def batchnorm_to_groupnorm(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm in `model` by a GroupNorm, in place, and return the model.

    The number of groups is the largest divisor of the channel count that is at most `groups`. BatchNorm1d
    and SyncBatchNorm may see inputs of shape (N, C), where a group has only its channels to normalise over:
    there a group gets at least 8 channels (or all, if there are fewer), and 1 or 2 channels are refused,
    because the result would carry no gradient.

    The new layer takes over the very `weight` and `bias` parameters: an optimizer made before stays valid,
    ties stay ties, and dtype, device and `requires_grad` are kept; so are `eps` and the training mode. The
    running statistics are dropped, so a pretrained model must be tuned again. A layer reached under several
    names stays one layer. If the model is itself a BatchNorm, the new layer is returned. When anything is
    refused, nothing has been changed.

    Formal guarantee: no output of the new layers for one record depends on another record of the batch.

    >>> model = batchnorm_to_groupnorm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))
    >>> model[1].num_groups
    24
    """
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        raise ConfigError(f"groups={groups!r} must be a whole number of at least 1.")
    new = {
        layer: _group_norm(layer, name=name, groups=groups)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
    }
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children() would skip a layer's second name
            if child in new:
                parent.register_module(name, new[child])
    return new.get(model, model)  # type: ignore[call-overload, no-any-return]


def _group_norm(norm: _BatchNorm, *, name: str, groups: int) -> nn.GroupNorm:
    if type(norm) not in _KNOWN:
        raise Refused(
            f"Layer {name!r} is a {type(norm).__name__}, whose size or behaviour is not known here. Run a "
            "lazy layer once on made-up input, so that it learns its size; replace any other by hand."
        )
    channels = norm.num_features
    most = groups
    if not isinstance(norm, _SPATIAL):
        if channels <= 2:
            raise Refused(
                f"Layer {name!r} ({type(norm).__name__}) has {channels} channel(s), and normalising so few "
                "numbers of one record erases them. Put nn.Identity() in its place, or, if its input "
                f"has a length, nn.GroupNorm(1, {channels})."
            )
        most = max(1, min(groups, channels // _FEWEST_WITHOUT_EXTENT))
    count = next(k for k in range(min(most, channels), 0, -1) if channels % k == 0)
    new = nn.GroupNorm(count, channels, eps=norm.eps, affine=False)
    new.affine, new.weight, new.bias = norm.affine, norm.weight, norm.bias
    return new.train(norm.training)
