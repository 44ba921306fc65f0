"""Book-keeping: one backward pass that yields every record's gradient and computes no weight gradient of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..errors import Refused
from .fallback import fallback
from .per_record import RULES, Dense, PerRecord
from .taps import Taps, Use


class Recorder(Taps):
    """Per-record gradients of `model`, by parameter name, from one backward pass over a vector of losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, RULES)
        self._found: dict[str, list[PerRecord]] = {}

    def backward(self, losses: Tensor) -> dict[str, PerRecord]:
        """Each record's gradient of its own loss, by parameter name; parameters that no loss reached are absent.

        What is returned may be used until the next call.
        """
        self._found = {}
        self.run_backward(losses, torch.ones_like(losses))
        found, self._found = self._found, {}
        with self.at_work(losses):
            return {name: _added(uses) for name, uses in found.items()}

    def take(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> None:
        found = self._gradients(use, inputs, deltas)
        for local, parameter in use.unit.parameters.items():
            if parameter.requires_grad:
                if not isinstance(found.get(local), PerRecord):
                    raise Refused(
                        f"The rule for layer {use.unit.described} gives no gradient for its parameter '{local}'."
                    )
                self._found.setdefault(self.names[id(parameter)], []).append(found[local])

    def _gradients(
        self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]
    ) -> Mapping[str, PerRecord]:
        layer = use.unit.layer
        if use.call is None:
            return RULES[type(layer)](layer, inputs[0], cast(Tensor, deltas[0]))
        return fallback(use.unit.described, layer, use.call, inputs, deltas)


def _added(uses: list[PerRecord]) -> PerRecord:
    """A parameter used several times: the gradients of its uses are added record by record, and then treated as one.

    In full, although each use could give its norms and sums without: where the uses of a record cancel, their sums
    over all records, taken apart, would lose everybody else's gradient in the rounding.
    """
    if len(uses) == 1:
        return uses[0]
    total = uses[0].dense().clone()
    for use in uses[1:]:
        total += use.dense()
    return Dense.of(total)
