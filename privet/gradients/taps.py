"""Taps: one backward pass that shows every layer's input and the gradient at its output, and adds up nothing itself.

While listening, each layer that owns parameters is run with those parameters set not to require a gradient, so that
autograd plans no weight gradients, and its output goes through a `_Tap`: an identity whose backward pass sees the
layer's input z and the gradient δ at its output at the same time and hands both on. What is made of them is up to
subclasses of `Taps`. Where Privet is faster than PyTorch at what the layer passes on to its input, the tap gives it to
that input itself, past the layer's own backward pass. Nothing is wrapped or patched: all of it is forward hooks that
`close` removes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..errors import Refused
from ..precision import coarseness, full_precision
from ..state import parameters_of
from .conv import input_gradient, is_faster_backwards
from .fallback import Call, carries_gradient, float_outputs, record_axes
from .scratch import Scratch, using

_STEEP = 2.0**14
"""By how much the losses of made-up records are multiplied: a hook that limits gradients over the batch must show."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer that is differentiated as a whole: one with a rule of its own, or any other that owns parameters."""

    name: str
    layer: nn.Module
    parameters: dict[str, nn.Parameter]
    """By the name that the layer's rule knows them under."""

    @property
    def described(self) -> str:
        return f"'{self.name or 'the model'}' ({type(self.layer).__name__})"


def find_units(model: nn.Module, known: Container[type[nn.Module]]) -> list[Unit]:
    """The layers to tap: each parameter of the model belongs to the outermost layer that can answer for it."""
    units: list[Unit] = []
    covered: set[str] = set()
    for name, layer in model.named_modules():
        _refuse_options_over_tokens(name, layer)
    for name, layer in model.named_modules():
        if any(name.startswith(f"{outer}.") if outer else bool(name) for outer in covered):
            continue
        own = dict(layer.named_parameters(recurse=False))
        _refuse_records_second(name, layer)
        if type(layer) in known and own:
            units.append(Unit(name, layer, own))
        elif own or parametrize.is_parametrized(layer):
            units.append(Unit(name, layer, dict(layer.named_parameters())))
            covered.add(name)
    return units


def _refuse_records_second(name: str, layer: nn.Module) -> None:
    if getattr(layer, "batch_first", True) is False:
        raise Refused(
            f"Layer '{name}' ({type(layer).__name__}) has batch_first=False: records must come first in every layer "
            "with parameters. Build it with batch_first=True."
        )


def _refuse_options_over_tokens(name: str, layer: nn.Module) -> None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        option = "scale_grad_by_freq" if layer.scale_grad_by_freq else "max_norm"
        raise Refused(
            f"Layer '{name}' ({type(layer).__name__}) has {option} set, which reads which tokens are in the batch and "
            f"so lets one record's gradient depend on the others. Build it without {option}."
        )


@dataclass(frozen=True, eq=False)
class Use:
    """One call of a layer: its outputs' shapes and, for layers without a rule, how it was called."""

    taps: Taps
    unit: Unit
    shapes: list[torch.Size]
    """Of the outputs that carry gradients."""
    call: Call | None


class _Tap(torch.autograd.Function):
    """Identity on a layer's outputs; backward reports (inputs, gradients at the outputs) and passes on what it is told.

    Inputs are kept by `save_for_backward`, so that autograd's own guards hold for them: a later change in place is
    an error, and gradient checkpointing drops and recomputes them.
    """

    @staticmethod
    def forward(ctx: Any, use: Use, anchor: Tensor, source: Tensor | None, *tensors: Tensor) -> Any:
        """`source` is the layer's input, if a gradient may be given to it past the layer's own backward pass."""
        outputs, inputs = tensors[: len(use.shapes)], tensors[len(use.shapes) :]
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.mark_dirty(*outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        inputs, at_source = ctx.saved_tensors, None
        if any(g is not None for g in gradients):
            deltas = [
                g if g is None or g.shape == s else g.reshape(s) for g, s in zip(gradients, ctx.use.shapes, strict=True)
            ]
            changed = ctx.use.taps._arrive(ctx.use, inputs, deltas)
            if changed is not None:
                gradients = tuple(
                    c if g is None or c.shape == g.shape else c.view(g.shape)
                    for c, g in zip(changed, gradients, strict=True)
                )
            if ctx.needs_input_grad[2]:
                at_source = input_gradient(ctx.use.unit.layer, inputs[0], cast(Tensor, gradients[0]))
        on = at_source is None
        passed = [g if on and needed else None for g, needed in zip(gradients, ctx.needs_input_grad[3:], strict=False)]
        return (None, None, at_source, *passed, *[None] * len(inputs))


class Taps(ABC):
    """Shows what arrives at the layers of `model` in a backward pass over a vector of losses; see `take`."""

    def __init__(self, model: nn.Module, known: Container[type[nn.Module]]) -> None:
        self.model = model
        self._known = known
        self.units = find_units(model, known)
        self.parameters = parameters_of(model)
        self.names = {id(p): name for name, p in self.parameters.items()}
        self._on = False
        self._anchor = torch.zeros((), requires_grad=True)
        self._together: Iterator[Tensor] = iter(())
        """The same, to be met again when all records are."""
        self._records: int | None = None
        """How many losses are being differentiated; None outside of `backward`."""
        self._probed: int | None = None
        self._alone: list[Tensor] | None = None
        """While a record is probed: its gradients at the layers so far, by the order in which they arrive."""
        self.bytes_seen = 0
        """Bytes that passed through tapped layers since it was last set to zero."""
        self._as_it_is: dict[str, bool] = {}
        """By kind of device, whether products in this backward pass are of full precision, but for autocast."""
        self._scratch = Scratch()
        self._handles: list[RemovableHandle] = []
        self._first: dict[str, int] = {}
        """By layer, the hook that taps its output."""
        for unit in self.units:
            self._handles += self._watch(unit)

    @abstractmethod
    def take(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
        """Gets one use of a layer: its inputs and the gradients at its outputs (None where no loss depends on one).

        It is called `at_work`.
        What it returns goes on to the layers before in place of these gradients; None leaves them as they are.
        """

    def enter(self, unit: Unit, inputs: Sequence[Tensor], output: Any) -> Sequence[Tensor]:
        """A layer was called with these inputs and is about to be tapped: what `take` will need of them.

        The output of a layer with a rule is fresh, and may be written to.
        """
        return inputs

    @property
    def on(self) -> bool:
        """Whether forward passes are tapped now."""
        return self._on and torch.is_grad_enabled()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forward passes inside this block are tapped; outside of it the model is untouched."""
        before, self._on = self._on, True
        try:
            yield
        finally:
            self._on = before

    @contextmanager
    def at_work(self, values: Tensor) -> Iterator[None]:
        """For all that is made of gradients: no graph, no tapping, full precision, scratch memory that is kept.

        `values` are any of the gradients: they tell the device.
        """
        before, self._on = self._on, False
        try:
            with torch.no_grad(), full_precision(values), using(self._scratch):
                yield
        finally:
            self._on = before

    def refuse_changes(self) -> None:
        """Refuses a model whose parameters are not those that were hooked."""
        refuse_changes(self.model, self.parameters)

    def run_backward(self, losses: Tensor, weights: Tensor, *, again: bool = False) -> None:
        """One backward pass from Σ weights·losses, during which `take` is called; with `again`, not the last one."""
        self._records = losses.shape[0]
        self._scratch.reclaim()
        self._as_it_is.clear()
        try:
            with using(self._scratch):
                torch.autograd.backward(losses, weights, retain_graph=again)
        finally:
            self._records = None
        self._refuse_strays()

    def reaches_others(self, losses: Tensor, record: int) -> str | None:
        """The layer at which this record's loss has a gradient for another record, if there is one.

        For made-up records only. Also refuses layers without a rule that are not functions of their arguments.
        """
        self._probed, self._alone = record, []
        everyone = torch.full_like(losses, _STEEP if losses.dtype in (torch.float32, torch.float64) else 1)
        only = torch.zeros_like(losses)
        only[record] = everyone[record]
        try:
            self.run_backward(losses, only, again=True)
            alone, self._alone = self._alone, None
            self._together = iter(alone)
            self.run_backward(losses, everyone)
        except _Coupled as coupled:
            return str(coupled)
        finally:
            self._probed = self._alone = None
        return None

    def _watch(self, unit: Unit) -> list[RemovableHandle]:
        switched: list[nn.Parameter] = []

        def before(layer: nn.Module, _args: Any, _kwargs: Any) -> None:
            if self.on and layer is unit.layer:  # a copy of the layer has these hooks too
                switched[:] = [p for p in unit.parameters.values() if p.requires_grad]
                for p in switched:
                    p.requires_grad_(False)

        def after(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            trained = bool(switched)
            for p in switched:
                p.requires_grad_(True)
            switched.clear()
            if not trained or output is None:
                return None
            return self._tap(unit, args, kwargs, output)

        seen = unit.layer.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=True)
        self._first[unit.name] = seen.id
        return [unit.layer.register_forward_pre_hook(before, with_kwargs=True), seen]

    def is_first_to_see(self, unit: Unit) -> bool:
        """Whether the output that is tapped is the layer's own: no other hook sees it before, nor is it patched."""
        layer = unit.layer
        first = next(iter(layer._forward_hooks), None)
        return first == self._first[unit.name] and not _global_forward_hooks and "forward" not in layer.__dict__

    def _tap(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> Any:
        if type(unit.layer) in self._known:
            call, source = None, args[0] if args else kwargs["input"]
            kept = self.enter(unit, [source], output)
            if not (is_faster_backwards(unit.layer) and self.is_first_to_see(unit)):
                source = None
            outputs, shapes = [_not_a_view(output)], [output.shape]
        else:
            call, source = Call.of(args, kwargs), None
            kept = self.enter(unit, call.tensors(args, kwargs), output)
            # the layer's last operation may have saved its output: pass on a copy that may be marked as changed
            outputs = [x.clone() for x in float_outputs(output)]
            shapes = [x.shape for x in outputs]
        self.bytes_seen += sum(x.numel() * x.element_size() for x in (*kept, *outputs))
        if not outputs:
            raise Refused(
                f"Layer {unit.described} has parameters of its own and returns a {type(output).__name__}, which Privet "
                "cannot look into. Return a tensor, a tuple or a dict, or give the parameters a module of their own."
            )
        use = Use(self, unit, shapes, call)
        tapped = _Tap.apply(  # type: ignore[no-untyped-call]
            use, self._anchor, source, *outputs, *[x.detach() for x in kept]
        )
        if call is None:
            return tapped if tapped.shape == output.shape else tapped.view(output.shape)
        fresh = iter(tapped if isinstance(tapped, tuple) else (tapped,))
        return pytree.tree_map(lambda x: next(fresh) if carries_gradient(x) else x, output)

    def _arrive(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
        """Checks that records come first, and hands on to `take`."""
        unit = use.unit
        if self._records is None:
            raise Refused(
                "A backward pass was run on the model inside of a private step. Hand one loss per record to "
                "step.backward(losses) in place of loss.backward()."
            )
        if use.call is not None:
            inputs = [x.movedim(axis, 0) for x, axis in zip(inputs, record_axes(unit.layer), strict=False)]
            axes = zip(deltas, record_axes(unit.layer), strict=False)
            deltas = [d if d is None else d.movedim(axis, 0) for d, axis in axes]
        for tensor in (*inputs, *deltas):
            if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] != self._records):
                raise Refused(
                    f"Layer {unit.described} works on a tensor of shape {tuple(tensor.shape)} while the losses are "
                    f"for {self._records} records. The first axis must be the records in every layer that has "
                    "parameters: use batch_first=True, and do not fold other axes into the first."
                )
        delta = next(d for d in deltas if d is not None)
        if not self._is_at_work(delta):
            with self.at_work(delta):
                return self._hand_on(use, inputs, deltas)
        before, self._on = self._on, False
        try:
            return self._hand_on(use, inputs, deltas)
        finally:
            self._on = before

    def _is_at_work(self, delta: Tensor) -> bool:
        """Whether a backward pass is as `at_work` would have it, but for the taps. It is entered for every layer."""
        device = delta.device.type
        if device not in self._as_it_is:
            self._as_it_is[device] = not coarseness(device)
        return self._as_it_is[device] and not (torch.is_grad_enabled() or torch.is_autocast_enabled(device))

    def _hand_on(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
        if self._probed is None:
            return self.take(use, inputs, deltas)
        self._examine(use, inputs, deltas)
        return None

    def _examine(self, use: Use, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> None:
        described = use.unit.described
        for delta in (d for d in deltas if d is not None):
            row = delta[self._probed]
            if self._alone is None:
                alone = next(self._together, row)
                if not torch.allclose(
                    alone, row, rtol=1e-3, atol=1e-3 * float(alone.abs().amax()) if alone.numel() else 0
                ):
                    raise _Coupled(described)
                continue
            self._alone.append(row.clone())
            others = torch.arange(len(delta), device=delta.device) != self._probed
            if bool((delta[others] != 0).any()):
                raise _Coupled(described)
        if use.call is not None and self._alone is not None and not isinstance(use.unit.layer, _NormBase):
            use.call.refuse_strange(described, use.unit.layer, inputs)

    def _refuse_strays(self) -> None:
        strays = [name for name, p in self.parameters.items() if p.grad is not None]
        if strays:
            for p in self.parameters.values():
                p.grad = None
            raise Refused(
                f"Parameter '{strays[0]}' received a gradient outside of its layer's own forward pass (it is used "
                "functionally, for example as F.linear(x, layer.weight) or in a penalty on weights), so its records "
                "cannot be told apart. Call the layer itself, move the use into a module that owns the parameter, "
                "or freeze it; a penalty on weights belongs into the optimizer's weight_decay."
            )


def refuse_changes(model: nn.Module, known: Mapping[str, nn.Parameter]) -> None:
    """Refuses a model whose parameters are not the ones known."""
    now = parameters_of(model)
    for name in now.keys() | known.keys():
        if now.get(name) is not known.get(name):
            raise Refused(
                f"Parameter '{name}' was added to the model, taken away or replaced after the Run was made, so it "
                "is not protected. Change the model first, then make the Run."
            )


def _not_a_view(output: Tensor) -> Tensor:
    """The memory of a layer's fresh output as a tensor of its own, to be viewed in the output's shape again.

    A linear layer's output over several positions is a view of a matrix product, and autograd would copy gradients
    back and forth for a view that is marked as changed.
    """
    base = output._base
    if base is None:
        return output
    whole = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous() and base._base is None
    return base if whole else output.clone()


class _Coupled(Exception):
    """Carries the description of a layer where one record's loss reached another record."""
