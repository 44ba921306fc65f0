"""What a model keeps besides its training: a forward pass over private records must leave all of it alone (rule 8)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """What `model.named_modules()` gives, in a fraction of the time, as it is asked for several times in each step."""
    found: dict[str, nn.Module] = {}
    _gather(model, "", found, set())
    return found


def _gather(layer: nn.Module, name: str, found: dict[str, nn.Module], seen: set[nn.Module]) -> None:
    found[name] = layer
    seen.add(layer)
    for child, module in layer._modules.items():
        if module is not None and module not in seen:
            _gather(module, f"{name}.{child}" if name else child, found, seen)


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """What `model.named_parameters()` gives."""
    found: dict[str, nn.Parameter] = {}
    seen: set[nn.Parameter] = set()
    for path, layer in layers_of(model).items():
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                found[f"{path}.{name}" if path else name] = parameter
    return found


class Buffers:
    """What the buffers of a model are now, bit by bit, to be restored later."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: (layer, dict(layer._buffers)) for name, layer in layers_of(model).items()}
        buffers = [b for _, held in self._layers.values() for b in held.values() if b is not None]
        self._values: dict[int, Tensor | _Number] = {id(b): _value(b) for b in buffers}

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Puts back what was changed, exchanged, added or taken away, and gives the names."""
        changed: list[str] = []
        for path, (layer, held) in self._layers.items():
            if not (held or layer._buffers):
                continue
            for name in {**held, **layer._buffers}:
                buffer = held.get(name)
                same = layer._buffers.get(name) is buffer
                if buffer is not None and not _is_still(buffer, before := self._values[id(buffer)]):
                    buffer.copy_(before if isinstance(before, Tensor) else torch.tensor(before[1], dtype=before[0]))
                    same = False
                if not same:
                    changed.append(f"{path}.{name}" if path else name)
            layer._buffers.clear()
            layer._buffers.update(held)
        return changed


class Parameters:
    """Which tensors the parameters of a model are now, and which of their versions.

    Autograd counts a version for each change in place, but for one that goes around it (`p.data.copy_(…)`). With
    `sums`, those are seen too, for a pass over all of them.
    """

    def __init__(self, model: nn.Module, *, sums: bool = False) -> None:
        self._model = model
        self._held = {name: (p, p._version, _sum_of_bits(p) if sums else 0) for name, p in parameters_of(model).items()}
        self._sums = sums

    def changed(self) -> list[str]:
        """The names of those that were changed, exchanged, added or taken away since."""
        now, gone = parameters_of(self._model), (None, 0, 0)
        return [name for name in {**self._held, **now} if not self._same(now.get(name), *self._held.get(name, gone))]

    def _same(self, now: Tensor | None, before: Tensor | None, version: int, total: int) -> bool:
        if now is None or now is not before or now._version != version:
            return False
        return not self._sums or _sum_of_bits(now) == total


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


_Number = tuple[torch.dtype, float]
_WHOLE = (torch.uint8, torch.int32, torch.int64)


def _value(buffer: Tensor) -> Tensor | _Number:
    """A copy; of one number, as of an input clip, the number itself, where that tells all of its bits."""
    if buffer.dim() == 0 and buffer.dtype in (torch.float32, torch.float64, *_WHOLE):
        number: float = buffer.item()
        if buffer.dtype in _WHOLE or not (number == 0 or math.isnan(number)):  # which are several each
            return buffer.dtype, number
    return buffer.detach().clone()


def _is_still(buffer: Tensor, before: Tensor | _Number) -> bool:
    if isinstance(before, Tensor):
        same_kind = buffer.shape == before.shape and buffer.dtype == before.dtype
        return same_kind and torch.equal(_bits(buffer), _bits(before))
    return buffer.dim() == 0 and (buffer.dtype, buffer.item()) == before


def _sum_of_bits(tensor: Tensor) -> int:
    return int(_bits(tensor).sum(dtype=torch.int64))
