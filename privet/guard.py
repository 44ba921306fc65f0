"""Watches over the optimizers of this process: none may step on raw or unfinished gradients of a private model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .errors import Refused

if TYPE_CHECKING:
    from .run import Run


class OptimizerGuard:
    """Refuses an optimizer that is called too early, or that also holds parameters with raw gradients."""

    _active: ClassVar[tuple[OptimizerGuard, ...]] = ()
    """Replaced and never changed, and torch's list of hooks is left alone: a run that was dropped may be collected, and
    its guard closed, in the middle of a walk through either."""
    _hook: ClassVar[RemovableHandle | None] = None

    def __init__(self, model: nn.Module, run: weakref.ref[Run]) -> None:
        self._run = run
        self._parameters = [weakref.ref(p) for p in model.parameters()]
        OptimizerGuard._active = (*self._active, self)
        if self._hook is None:
            OptimizerGuard._hook = register_optimizer_step_pre_hook(self._ask_all)

    @classmethod
    def _ask_all(cls, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for guard in cls._active:
            guard._look(optimizer)

    def _protected(self) -> set[int]:
        return {id(p) for reference in self._parameters if (p := reference()) is not None}

    def _look(self, optimizer: Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if self._protected().isdisjoint(map(id, held)):
            return
        run = self._run()
        if run is not None and run.in_step:
            raise Refused(
                "The optimizer was called while the step's sample was still coming in: p.grad is there only after the "
                "inner loop `for batch in step:` has ended. Move optimizer.step() out of it, one level to the left."
            )
        protected = set[int]().union(*(guard._protected() for guard in self._active))
        foreign = [p for p in held if id(p) not in protected]
        for p in foreign:
            if p.grad is not None:
                raise Refused(
                    f"The optimizer also holds a parameter of shape {tuple(p.shape)} that is not part of the private "
                    "model and has a gradient of its own, without clipping and noise. Train it in the same Run (put "
                    "it into the model), freeze it, or give it an optimizer of its own if it meets public data only."
                )

    def close(self) -> None:
        OptimizerGuard._active = tuple(guard for guard in self._active if guard is not self)
