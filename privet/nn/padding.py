"""What a convolution pads its input by, as its forward pass does it now."""

from __future__ import annotations

from torch import nn


def padding_in_use(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    """(before, after) of each axis, the last axis first, as F.pad takes it.

    A layer's settings may be changed after it was made. PyTorch keeps what it worked out at first for padding other
    than by zeros only; for zeros it goes by the attributes as they are, and by the weight's shape.
    """
    if layer.padding_mode != "zeros":
        return tuple(layer._reversed_padding_repeated_twice)
    if layer.padding == "valid":
        return (0,) * (2 * len(layer.kernel_size))
    if layer.padding == "same":
        spans = [d * (k - 1) for d, k in zip(layer.dilation, layer.weight.shape[2:], strict=True)]
        return tuple(n for span in reversed(spans) for n in (span // 2, span - span // 2))
    assert not isinstance(layer.padding, str)
    return tuple(int(n) for n in reversed(layer.padding) for _ in range(2))
