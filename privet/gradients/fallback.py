"""Per-record gradients of any other layer: its own forward pass, differentiated record by record by `torch.func`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from ..errors import Refused
from .per_record import Dense, PerRecord, wide


@dataclass(frozen=True, eq=False)
class Call:
    """How a layer was called, with its tensors taken out, so that it can be called again with one record's."""

    structure: Any
    leaves: list[Any]
    """The arguments that are not tensors, and None where a tensor goes."""

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Call:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        return cls(structure, [None if isinstance(x, Tensor) else (x,) for x in leaves])

    @staticmethod
    def tensors(args: Any, kwargs: Any) -> list[Tensor]:
        return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is None else leaf[0] for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def refuse_strange(self, described: str, layer: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Refuses a layer that cannot be run again on each record by itself, by its outputs for these (records first).

        It must give the same output again, and give for one record what it gives for it among others.
        """
        together = self._outputs(layer, tensors)
        if not all(torch.equal(a, b) for a, b in zip(together, self._outputs(layer, tensors), strict=True)):
            raise Refused(
                f"Layer {described} gives another output each time it is run (dropout inside?), and Privet has no "
                "rule of its own for it, so it would have to run it again. Set its dropout to zero and put an "
                "nn.Dropout after it, or register a rule for it (see CONTRIBUTING)."
            )
        for i in range(len(tensors[0]) if tensors else 0):
            try:
                alone = self._outputs(layer, [x[i : i + 1] for x in tensors])
            except Exception as error:
                raise Refused(
                    f"Layer {described} has no rule of its own, so Privet runs it again on one record at a time, and "
                    f"that fails: {error}"
                ) from error
            if not all(_close(a[i : i + 1], b) for a, b in zip(together, alone, strict=True)):
                raise Refused(
                    f"Layer {described} has no rule of its own, so Privet runs it again on one record at a time, and "
                    "it then gives something else than for that record in a batch. Each record's output must come from "
                    "its own tensors: arguments that are lists with an entry for each record, or numbers that belong "
                    "to the batch, must become tensors with the records first."
                )

    def _outputs(self, layer: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
        """With the records first, of tensors with the records first."""
        placed = [_as_weights(x, layer).movedim(0, axis) for x, axis in zip(tensors, record_axes(layer), strict=False)]
        args, kwargs = self.arguments(placed)
        found = float_outputs(layer.forward(*args, **kwargs))
        return [o.movedim(axis, 0) for o, axis in zip(found, record_axes(layer), strict=False) if o.dim() > axis]


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5 + 1e-3 * float(a.abs().mean()))


def _as_weights(x: Tensor, layer: nn.Module) -> Tensor:
    """What came in under autocast, in the precision of the weights, as the layer is run again without."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return x
    return x.to(next((p.dtype for p in layer.parameters() if p.is_floating_point()), x.dtype))


def record_axes(layer: nn.Module) -> Iterator[int]:
    """On which axis the records lie in each tensor argument and result: the first, but for recurrent states."""
    return chain([0], repeat(1)) if isinstance(layer, nn.RNNBase) else repeat(0)


def fallback(
    described: str, layer: nn.Module, call: Call, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]
) -> Mapping[str, PerRecord]:
    """The layer is run again on each record, so it must be a function of its arguments and weights alone.

    `inputs` and `deltas` have the records first; a delta of None is an output that no loss depends on.
    """
    parameters = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}
    used = [d for d in deltas if d is not None]

    def one(record: list[Tensor], upstream: list[Tensor]) -> dict[str, Tensor]:
        def forward(weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
            singles = [x.unsqueeze(axis) for x, axis in zip(record, record_axes(layer), strict=False)]
            args, kwargs = call.arguments(singles)
            outputs = float_outputs(functional_call(layer, weights, args, kwargs))
            return tuple(
                o.squeeze(axis)
                for o, d, axis in zip(outputs, deltas, record_axes(layer), strict=False)
                if d is not None
            )

        outputs, pull = vjp(forward, parameters)[:2]
        if [o.shape for o in outputs] != [d.shape for d in upstream]:
            raise Refused(
                f"Layer {described} has no rule of its own, so Privet runs it again on one record at a time, and its "
                f"output has then another shape: {[tuple(o.shape) for o in outputs]} in place of "
                f"{[tuple(d.shape) for d in upstream]} for a record. Let its forward take the batch itself and read "
                "the number of records from it (x.shape[0]), not from another argument."
            )
        (gradient,) = pull(tuple(d.to(o.dtype) for d, o in zip(upstream, outputs, strict=True)))
        return {name: wide(g) for name, g in gradient.items()}

    records = [_as_weights(x, layer) for x in inputs]
    with _without_mkldnn() if isinstance(layer, nn.RNNBase) else nullcontext():
        try:
            found = vmap(one)(records, used)
        except RuntimeError:  # an operation without a batching rule (recurrent layers): slower, and the same numbers
            singles = [one([x[i] for x in records], [d[i] for d in used]) for i in range(len(used[0]))]
            found = {name: torch.stack([single[name] for single in singles]) for name in parameters}
    return {name: Dense.of(gradient) for name, gradient in found.items()}


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Its recurrent kernels fail under `torch.func`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a setting that is only put back
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def carries_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def float_outputs(result: Any) -> list[Tensor]:
    """The tensors of a layer's result that gradients can flow through."""
    return [x for x in pytree.tree_leaves(result) if carries_gradient(x)]
