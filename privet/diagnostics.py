"""How far a model is from being clipped: weights, pre-activations and per-record gradients (losing-less paper, 4.2).

What the paper's Figures 5 to 7 show of a training, as plain numbers for a line of metrics: the L2 norm of each weight
and of each layer's pre-activations, which cross-entropy lets grow; how long the gradients of single records are against
the clip C; and the cosine between the sum of the clipped and of the unclipped ones, which is 1 where clipping only
shortens and less where it also turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .errors import ConfigError, PrivetError
from .gradients import PerRecord, Recorder
from .methods.base import ParameterGroup, trainable
from .step import check_losses

RECORDS = 512
"""So many records are looked at, the first ones: enough for a histogram, and little beside an epoch."""
_CHUNK = 128
_PER_DECADE, _FIRST, _LAST = 4, -4, 3
_EDGES = [10 ** (k / _PER_DECADE) for k in range(_FIRST * _PER_DECADE, _LAST * _PER_DECADE + 1)]
_QUANTILES = {"10%": 0.1, "25%": 0.25, "50%": 0.5, "75%": 0.75, "90%": 0.9}


def diagnose(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, clip: float | None = None
) -> dict[str, Any]:
    """Norms of weights, pre-activations and per-record gradients, as numbers that JSON can hold.

    Args:
        loss: (scores, targets) to a vector, one loss per record; `privet.losses`, for one.
        x, y: PUBLIC or HELD-OUT records, of which the first 512 are used.
        clip: C, where the whole gradient of each record is clipped to one; without it there is no share nor cosine.

    These are functions of weights that count as released (every noisy step is paid for) and of records that are not
    protected, so they cost nothing. That the records are public or held out is up to the caller: of records that are
    trained on, nearly every number here would leak.

    The model is as before afterwards: hooks, modes, `p.grad`, buffers and torch's random state. It is run in evaluation
    mode. What cannot be had of a model is left out, and `left_out` says why: a training never fails for it.
    """
    x, y = x[:RECORDS].detach(), y[:RECORDS].detach()
    if len(x) != len(y) or not len(x):
        raise ConfigError(
            f"Diagnostics need as many records as targets, at least one: there are {len(x)} and {len(y)}."
        )
    if clip is not None and not (clip > 0 and math.isfinite(clip)):
        raise ConfigError(f"clip must be a positive number, and is {clip!r}.")
    left_out: dict[str, str] = {}
    found: dict[str, Any] = {"records": len(x), "clip": clip, "weights": _weights(model)}
    for part, measure in (
        ("pre_activations", lambda: _pre_activations(model, x, left_out)),
        ("gradients", lambda: _gradients(model, loss, x, y, clip)),
    ):
        try:
            with _untouched(model, loss):
                found[part] = measure()
        except Exception as error:  # whatever a model or loss does here, it is not worth a training
            left_out[part] = str(error) if isinstance(error, PrivetError) else f"{type(error).__name__}: {error}"
    return found | {"left_out": left_out}


def _weights(model: nn.Module) -> dict[str, float | None]:
    """The L2 norm of each parameter; one that is shared is named once."""
    return {name: _number(torch.linalg.vector_norm(p.detach().double())) for name, p in model.named_parameters()}


def _pre_activations(model: nn.Module, x: Tensor, left_out: dict[str, str]) -> dict[str, float | None]:
    """The mean over records of ‖h‖ for the output h of each Linear and Conv, in the order in which they run.

    Over all uses, where a layer is used several times. The last one is the logits, as a rule.
    """
    norms: dict[str, list[Tensor]] = {}
    records = 0

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_layer: nn.Module, _args: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[0] != records:
                left_out[f"pre_activations of {name}"] = "the first axis of its output is not the records"
            else:
                norms.setdefault(name, []).append(torch.linalg.vector_norm(output.double().flatten(1), dim=1))

        return hook

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | _ConvNd)}
    handles = [layer.register_forward_hook(look(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for part in torch.split(x, _CHUNK):
                records = len(part)
                model(part)
    finally:
        for handle in handles:
            handle.remove()
    left_out |= {
        f"pre_activations of {name}": "the layer was not called itself"
        for name in layers
        if name not in norms and f"pre_activations of {name}" not in left_out
    }
    return {name: _number(torch.cat(seen).mean()) for name, seen in norms.items()}


def _gradients(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, clip: float | None
) -> dict[str, Any]:
    """Per-record norms n_i, and, with C: the share of n_i > C and the cosine of Σ g_i·min(1, C/n_i) and Σ g_i.

    Records whose loss or gradient is not finite are counted, and left out of all else.
    """
    plain, clipped = (ParameterGroup("all", trainable(model)) for _ in range(2))
    norms: list[Tensor] = []
    recorder = Recorder(model)
    try:
        for xs, ys in zip(torch.split(x, _CHUNK), torch.split(y, _CHUNK), strict=True):
            with recorder.recording():
                losses = loss(model(xs), ys)
            check_losses(losses, len(xs))
            gradients = recorder.backward(losses)
            with torch.no_grad():
                squares = torch.stack([g.squared_norms for g in gradients.values()]).sum(0)
                lost = ~torch.isfinite(losses + squares)
                _drop(gradients, lost)
                n = squares.sqrt()
                norms.append(n[~lost])
                if clip is not None:
                    factors = (clip / n).clamp(max=1).masked_fill(lost, 0)
                    for name, gradient in gradients.items():
                        gradient.accumulate((~lost).to(factors.dtype), plain.views[name])
                        gradient.accumulate(factors, clipped.views[name])
    finally:
        recorder.close()
    return _summary(torch.cat(norms), len(x)) | (
        {}
        if clip is None
        else {
            "above_clip": _number((torch.cat(norms) > clip).double().mean()),
            "cosine": _cosine(plain.total.double(), clipped.total.double()),
        }
    )


def _drop(gradients: dict[str, PerRecord], lost: Tensor) -> None:
    if bool(lost.any()):
        for gradient in gradients.values():
            gradient.drop(lost)


def _cosine(a: Tensor, b: Tensor) -> float | None:
    """None if one of them is zero: it has no direction."""
    length = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    return None if length == 0 else _number((a @ b / length).clamp(-1, 1))


def _summary(norms: Tensor, records: int) -> dict[str, Any]:
    """Quantiles and a histogram: `counts` are those below 10^first, between 10^(k/per_decade) and the next, above."""
    counts = torch.bucketize(norms, norms.new_tensor(_EDGES), right=True).bincount(minlength=len(_EDGES) + 1)
    quantiles = {name: _number(torch.quantile(norms, q)) if len(norms) else None for name, q in _QUANTILES.items()}
    return {
        "not_finite": records - len(norms),
        "quantiles": quantiles,
        "histogram": {"first": _FIRST, "per_decade": _PER_DECADE, "counts": counts.tolist()},
    }


def _number(value: Tensor) -> float | None:
    """Six digits, and None for what JSON has no number for."""
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


@contextmanager
def _untouched(*parts: object) -> Iterator[None]:
    """Modules in evaluation mode and without gradients inside of the block, and exactly as they were after it."""
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    modes = [(module, module.training) for module in modules]
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    gradients = [(p, p.grad) for p in parameters]
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    try:
        for module in modules:
            module.training = False  # not eval(), which a user's class may have made do more
        for p in parameters:
            p.grad = None
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for p, gradient in gradients:
            p.grad = gradient
        for module, name, buffer, version, kept in buffers:
            module._buffers[name] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(kept)
