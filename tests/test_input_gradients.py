"""Gradients that go to a layer's input past its own backward pass are those that it would have passed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import bumpy_losses, naive_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from privet import Refused, native
from privet.gradients import Recorder, conv

pytestmark = pytest.mark.skipif(native.library is None, reason="built without a compiler")
LAST = torch.channels_last
pairs = st.tuples(st.integers(1, 5), st.integers(1, 5))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each time that a gradient could have gone past a layer: whether it did."""
    made: list[bool] = []

    def counted(layer: nn.Module, x: Tensor, delta: Tensor) -> Tensor | None:
        found = conv.input_gradient(layer, x, delta)
        made.append(found is not None)
        return found

    monkeypatch.setattr("privet.gradients.taps.input_gradient", counted)
    yield made


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(memory_format=LAST)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3), st.sampled_from([1, 2, 15, 16, 17, 33]), st.sampled_from([1, 3, 8, 20]), pairs, pairs,
    st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(st.integers(1, 19), st.integers(1, 19)),
)  # fmt: skip
def test_the_loop_in_c_gives_what_pytorch_gives(
    records: int, channels: int, outputs: int, kernel: Any, stride: Any, padding: Any, size: Any
) -> None:
    if any(n + 2 * p < k for n, p, k in zip(size, padding, kernel, strict=True)):
        return
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding)
    x = rand(records, channels, *size)
    delta = rand(*layer(x).shape, seed=1)
    found = native.convolution_inputs(layer, x, [(p, p) for p in padding], delta)
    exact = layer.double(), x.double().requires_grad_()
    exact[0](exact[1]).backward(delta.double())
    assert exact[1].grad is not None and found.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(found.double(), exact[1].grad, rtol=1e-5, atol=1e-5)


def test_it_refuses_what_it_cannot_do() -> None:
    layer, x = nn.Conv2d(3, 4, 2, stride=2), rand(2, 3, 6, 6)
    delta = rand(2, 4, 3, 3)
    for bad in (lambda: (layer, x.contiguous(), delta), lambda: (nn.Conv2d(3, 4, 2, stride=2, dilation=2), x, delta)):
        with pytest.raises(ValueError, match="channels last, and without dilation"):
            one, other, gradient = bad()
            native.convolution_inputs(one, other, [(0, 0), (0, 0)], gradient)
    with pytest.raises(Refused, match="does something else"):
        native.convolution_inputs(layer, x, [(0, 0), (0, 0)], rand(2, 4, 2, 3))


def network(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 5, 3, stride=2, **options), nn.Tanh(),
        nn.Conv2d(5, 4, 2, stride=(2, 1)), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    model(torch.zeros(1, 2, 9, 9))
    return model.to(memory_format=LAST)  # type: ignore[call-overload,no-any-return]


def agrees(model: nn.Module, x: Tensor, losses: Callable[..., Tensor] = bumpy_losses) -> None:
    expected = naive_gradients(model, losses, (x,))
    recorder = Recorder(model)
    with recorder.recording():
        found = recorder.backward(losses(model, x))
    recorder.close()
    for name, rows in expected.items():
        torch.testing.assert_close(found[name].dense(), rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "went"),
    [
        ({}, [True, True]),
        ({"padding": 1}, [True, True]),
        ({"padding": (0, 2), "bias": False}, [True, True]),
        ({"padding": 1, "padding_mode": "circular"}, [True]),
        ({"dilation": 2}, [True]),
    ],
)
def test_single_records_have_the_gradients_of_a_loop(
    calls: list[bool], options: dict[str, Any], went: list[bool]
) -> None:
    agrees(network(**options), rand(4, 2, 9, 9, seed=2))
    assert calls == went


def test_pytorchs_own_serves_other_layouts_and_precisions(calls: list[bool]) -> None:
    rows = network().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    agrees(rows, rand(4, 2, 9, 9, seed=2).contiguous())
    agrees(network().double(), rand(4, 2, 9, 9, seed=2).double())
    assert calls == [False] * 4
    assert conv.input_gradient(nn.Conv2d(3, 5, 3, stride=2), rand(2, 3, 9, 9), rand(2, 5, 4, 4).bfloat16()) is None


def test_large_weights_and_layers_of_other_kinds_go_their_own_way(calls: list[bool]) -> None:
    class Doubled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = network()
    model[2] = Doubled(3, 5, 3, stride=2)
    agrees(model, rand(4, 2, 9, 9, seed=2))
    assert calls == [True]
    assert not conv.is_faster_backwards(nn.Conv2d(64, 64, 3, stride=2))
    assert not conv.is_faster_backwards(nn.Conv2d(4, 4, 3))
    assert not conv.is_faster_backwards(nn.Conv2d(4, 4, 3, stride=2, groups=2))


def test_what_hooks_do_to_outputs_and_inputs_counts(calls: list[bool]) -> None:
    """Where another hook changes the output before it is tapped, the layer's input cannot be given its gradient."""
    model, x = network(), rand(4, 2, 9, 9, seed=2)
    expected = naive_gradients(model, bumpy_losses, (x,))
    recorder = Recorder(model)
    first = model[2].register_forward_hook(lambda _layer, _args, output: 3 * output, prepend=True)
    last = model[2].register_forward_hook(lambda _layer, _args, output: output / 3)
    before = model[4].register_forward_pre_hook(lambda _layer, args: (2 * args[0] - args[0],))
    with recorder.recording():
        found = recorder.backward(bumpy_losses(model, x))
    assert calls == [True]  # the last convolution: its input is what came out of the hook
    for handle in (first, last, before):
        handle.remove()
    recorder.close()
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(found[name].dense(), expected[name], rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_and_backward_hooks_work(calls: list[bool]) -> None:
    model, x, seen = network(), rand(4, 2, 9, 9, seed=2), []
    model[2].register_full_backward_hook(lambda _layer, inputs, _outputs: seen.append(inputs[0]))

    def losses(model: nn.Sequential, x: Tensor) -> Tensor:
        half = checkpoint(model[:3], x, use_reentrant=False)
        return bumpy_losses(model[3:], half)

    expected = naive_gradients(model, losses, (x,))
    del seen[:]
    recorder = Recorder(model)
    with recorder.recording():
        found = recorder.backward(losses(model, x))
    recorder.close()
    assert calls == [True, True] and len(seen) == 1 and seen[0] is not None
    for name, rows in expected.items():
        torch.testing.assert_close(found[name].dense(), rows, rtol=1e-4, atol=1e-5)


def test_a_record_that_is_not_finite_reaches_no_other(calls: list[bool]) -> None:
    model, x = network(), rand(4, 2, 9, 9, seed=2)
    x[1, 0, 4, 4] = math.nan
    recorder = Recorder(model)
    with recorder.recording():
        found = recorder.backward(bumpy_losses(model, x))
    recorder.close()
    finite = torch.stack([g.dense().flatten(1).isfinite().all(1) for g in found.values()])
    assert finite[0].tolist() == [True, False, True, True] and calls == [True, True]
