"""Record and replay: train on D, then on a neighbour with the noisy sums of the first training played back.

Everything that a training releases beside its noisy sums must then be the same, to the last bit: gradients handed
over, weights, buffers, the method's own state, declared sensitivities, deviations of the noise, steps and payments, and
all that was printed, warned of or logged. Whatever differs was computed from the private records without noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .report import Check
from .sensitivity import STRANGER
from .subject import Record, Subject


def check_replay(subject: Subject, hostile: Record) -> list[Check]:
    """Neighbours by one record more: an ordinary one, the worst that was found, and one that is not a number."""
    base = subject.base
    samples = [base, base[: len(base) // 2], [], base]
    first = subject.train(samples)
    if first is None:
        return []
    tape, facts = first
    strangers = {"an ordinary record": Record(STRANGER, base[-1].x, base[-1].y), "the worst record": hostile}
    if base[0].x.is_floating_point():
        strangers["a record that is not a number"] = Record(STRANGER, torch.full_like(base[0].x, torch.nan), base[0].y)
    checks = []
    for who, record in strangers.items():
        again = subject.train([[record, *sample] for sample in samples], tape)
        assert again is not None
        different = [name for name in facts | again[1] if not _same(facts.get(name), again[1].get(name))]
        checks.append(
            Check(
                name=f"replay with {who} more",
                holds=not different,
                measured=len(different),
                bound=0,
                detail=f"differs: {'; '.join(different[:4])}" if different else f"{len(facts)} public facts are equal",
            )
        )
    return checks


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(_bits(a), _bits(b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def _bits(tensor: Tensor) -> Tensor:
    """So that not-a-number equals itself."""
    return torch.nan_to_num(tensor, nan=0.125) if tensor.is_floating_point() else tensor
