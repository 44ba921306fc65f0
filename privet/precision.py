"""How exactly PyTorch multiplies float32 numbers: users may allow less for their model (TF32, bfloat16, autocast).

Bounds must hold for what is computed. So they are computed in `full_precision`, or count with the `coarseness`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_EXACT = ("none", "ieee")
_TF32, _BF16 = 2.0**-10, 2.0**-7
"""By how much a product of two numbers may be off, relative to itself: both are rounded, to 11 bits or to 8."""


def _switches(device: str) -> list[Any]:
    """PyTorch's settings for matrix products and convolutions on this kind of device, each with `fp32_precision`."""
    backends: Any = torch.backends
    if device == "cuda":
        return [backends.cuda.matmul, backends.cudnn.conv]
    return [backends.mkldnn.matmul, backends.mkldnn.conv]


def coarseness(device: str) -> float:
    """By how much a product of two float32 numbers may be off, relative to itself, beyond float32's own rounding."""
    set_to = [switch.fp32_precision for switch in _switches(device)]
    return max(0.0 if value in _EXACT else _TF32 if value == "tf32" else _BF16 for value in set_to)


def full_precision(like: Tensor) -> AbstractContextManager[None]:
    """Products are of float32 as it stands, on the device of this tensor, and without autocast."""
    device = like.device.type
    if coarseness(device) or torch.is_autocast_enabled(device):
        return _switched(device)
    return _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def _switched(device: str) -> Iterator[None]:
    with ExitStack() as undo:
        if coarseness(device):
            undo.enter_context(_exact(device))
        if torch.is_autocast_enabled(device):
            undo.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _exact(device: str) -> Iterator[None]:
    """By the setting for all matrix products too, if it is what was used: PyTorch refuses the two to contradict."""
    before = [(switch, switch.fp32_precision) for kind in ("cpu", "cuda") for switch in _switches(kind)]
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:  # settings of backends were used
        products = "highest"
    if products != "highest":
        torch.set_float32_matmul_precision("highest")
    for switch in _switches(device):
        if switch.fp32_precision not in _EXACT:
            switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        if products != "highest":
            torch.set_float32_matmul_precision(products)
        for switch, value in before:
            if switch.fp32_precision != value:
                switch.fp32_precision = "none"  # that is, what a more general setting says
            if switch.fp32_precision != value:
                switch.fp32_precision = value
