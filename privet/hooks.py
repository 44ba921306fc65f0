"""Hooks on a model: which of them may change what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_H = TypeVar("_H", bound=Callable[..., Any])
_KINDS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def only_looks(hook: _H) -> _H:
    """Marks a hook that changes nothing of what passes by, so that a model with it still computes what its layers say.

    Certificates of Lipschitz networks refuse hooks without the mark.
    """
    hook.only_looks = True  # type: ignore[attr-defined]
    return hook


def has_foreign_hooks(module: nn.Module | None) -> bool:
    """Whether a hook may change what this module computes, or the gradient that passes; None: any module at all."""
    owner, prefix = (torch_module, "_global_") if module is None else (module, "_")
    found = [hook for kind in _KINDS for hook in getattr(owner, f"{prefix}{kind}", {}).values()]
    return any(not getattr(hook, "only_looks", False) for hook in found)


def has_tensor_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks)
