"""What a convolution pads its input by, as its forward pass does it now."""

from __future__ import annotations

from functools import lru_cache

from torch import nn


def padding_in_use(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    """(before, after) of each axis, the last axis first, as F.pad takes it.

    A layer's settings may be changed after it was made. PyTorch keeps what it worked out at first for padding other
    than by zeros only; for zeros it goes by the attributes as they are, and by the weight's shape.
    """
    if layer.padding_mode != "zeros":
        return tuple(layer._reversed_padding_repeated_twice)
    padding = layer.padding if isinstance(layer.padding, str) else tuple(layer.padding)
    return _by_zeros(padding, tuple(layer.weight.shape[2:]), tuple(layer.dilation))


@lru_cache  # asked for in every step
def _by_zeros(padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    if padding == "valid":
        return (0,) * (2 * len(kernel))
    if padding == "same":
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple(n for span in reversed(spans) for n in (span // 2, span - span // 2))
    assert not isinstance(padding, str)
    return tuple(int(n) for n in reversed(padding) for _ in range(2))
