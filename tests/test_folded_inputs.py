"""Backpropagation clipping keeps inputs as they were and puts their factors on the gradients: nothing else changes."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from test_backprop import SETTING, chain, one_step, rows, stepped, sums
from torch import Tensor, nn

from privet import Backprop, Refused, native
from privet.methods.backprop import _SMALL
from privet.nn.input_clip import InputClip, clip_of


class Stretched(nn.Module):
    """Linear layers with a factor between them, which the second one's input clip takes back."""

    def __init__(self, scale: float, first: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.scale = nn.Linear(first, 6), nn.Linear(6, 6), nn.Linear(6, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x) * self.scale)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("power", [17, 19, 21, 40])
def test_what_is_added_and_goes_on_does_not_depend_on_how_long_an_input_was(power: int) -> None:
    """A clipped input is the same for x and 2^k·x, and so is 2^k·f: with factors above and below what can be folded."""
    chosen = Backprop(input_clip=0.5, gradient_clip=10.0)
    expected = sums(stepped(chosen, Stretched(2.0**8), rows(6)))
    for name, found in sums(stepped(chosen, Stretched(2.0**power), rows(6))).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-6)
    assert 0.5 / 2.0**40 < _SMALL < 0.5 / 2.0**17


def test_an_input_that_is_not_finite_gets_no_gradient() -> None:
    def losses(model: Stretched, x: Tensor) -> Tensor:
        hidden = model.a(x)
        hidden = hidden + torch.where(torch.arange(len(x)) == 2, math.inf, 0.0).unsqueeze(1)
        return model.c(torch.tanh(model.b(hidden))).sum(1)  # type: ignore[no-any-return]

    chosen = Backprop(input_clip=0.5, gradient_clip=10.0)
    found = sums(stepped(chosen, Stretched(1.0), rows(6), losses=losses))
    without = sums(stepped(chosen, Stretched(1.0), rows(6)[[0, 1, 3, 4, 5]], losses=lambda m, x: m(x).sum(1)))
    torch.testing.assert_close(found["a.weight"], without["a.weight"], rtol=1e-3, atol=1e-6)


SHRINKING: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(9, 4), (5, 9)),
    "linear without bias": (nn.Linear(9, 4, bias=False), (5, 9)),
    "linear over positions": (nn.Linear(9, 4), (5, 3, 9)),  # where inputs are scaled all the same
    "conv1d": (nn.Conv1d(4, 2, 3, stride=2), (5, 4, 11)),
    "conv2d": (nn.Conv2d(4, 3, 3, stride=2, padding=1), (5, 4, 9, 7)),
    "conv2d without bias": (nn.Conv2d(4, 2, (1, 3), bias=False), (5, 4, 9, 7)),
    "conv2d with groups, reflected": (nn.Conv2d(4, 2, 3, groups=2, padding=1, padding_mode="reflect"), (5, 4, 9, 7)),
    "conv3d": (nn.Conv3d(2, 1, 2), (5, 2, 4, 5, 3)),
}


@pytest.mark.parametrize("norm", ["patch", "frobenius", "input"])
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("name", SHRINKING)
def test_where_outputs_are_smaller_they_are_scaled_in_place_of_inputs(
    name: str, built: bool, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is that of the clip module, which exports and inference run, and so are the sums."""
    if not built:
        monkeypatch.setattr(native, "library", None)
    layer, shape = SHRINKING[name]
    model = nn.Sequential(copy.deepcopy(layer))
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-2, 2, len(torch.empty(shape))).view(-1, *[1] * (len(shape) - 1))
    session = Backprop(input_clip=0.7, gradient_clip=0.1, norm=norm).open(model, SETTING)

    def step(scaled: bool) -> tuple[Tensor, dict[str, Tensor]]:
        with monkeypatch.context() as patch:
            if not scaled:
                patch.setattr(type(session._layers["0"].rule), "does_not_grow", lambda *_: False)
            session.begin()
            with session.listening():
                output = model(x)
            assert (session._clipped == {}) and (output.grad_fn is not None)
            session.add(output.flatten(1).square().sum(1))
            return output.detach().clone(), {q.name: q.total.clone() for q in session.finish()}

    assert session._layers["0"].rule.does_not_grow(model[0], x) == (name != "linear over positions")
    (output, found), (expected, sums_of_copies) = step(True), step(False)
    session.close()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)
    for query, total in found.items():
        torch.testing.assert_close(total, sums_of_copies[query], rtol=1e-3, atol=1e-6)


def test_an_input_that_a_hook_writes_to_after_it_was_measured_is_refused() -> None:
    def grow(_layer: nn.Module, args: tuple[Tensor]) -> None:
        args[0].mul_(100)

    for layer in (nn.Linear(9, 4), nn.Linear(4, 9)):  # where the output is scaled, and where the input is
        session = Backprop().open(nn.Sequential(layer), SETTING)
        handle = layer.register_forward_pre_hook(grow)
        with session.listening(), pytest.raises(Refused, match="not what its input clip gave"):
            layer(torch.randn(3, layer.in_features))
        handle.remove()
        session.close()


def test_hooks_that_come_first_see_the_output_of_the_clipped_input() -> None:
    seen = []
    layer = nn.Linear(9, 4)
    session = Backprop().open(nn.Sequential(layer), SETTING)
    layer.register_forward_hook(lambda _layer, _args, output: seen.append(output.detach().clone()), prepend=True)
    x = 10 * torch.randn(3, 9)
    with session.listening():
        layer(x)
    session.close()
    torch.testing.assert_close(seen[0], layer(x).detach(), rtol=1e-4, atol=1e-5)


def kept_inputs(output: Tensor) -> list[int]:
    """Addresses of what the convolutions behind this output keep."""
    found, todo = [], [output.grad_fn]
    while todo:
        node: Any = todo.pop()
        found += [node._saved_input.data_ptr()] if hasattr(node, "_saved_input") else []
        todo += [before for before, _ in node.next_functions if before is not None]
    return found


def test_convolutions_keep_their_input_as_it_was_before_the_clip() -> None:
    layer = nn.Conv2d(2, 4, 3)
    session = Backprop(input_clip=0.1).open(nn.Sequential(layer), SETTING)
    x = torch.randn(3, 2, 8, 8, requires_grad=True)
    session.begin()
    with session.listening():
        assert kept_inputs(layer(x)) == [x.data_ptr()]
    session.close()
    circular = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")  # keeps the padded one, which is no input
    session = Backprop(input_clip=0.1).open(nn.Sequential(circular), SETTING)
    session.begin()
    with session.listening():
        (address,) = kept_inputs(circular(x))
        assert address != x.data_ptr()
    session.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_autograd_keeps_what_it_is_told_after_a_step(error: type[BaseException]) -> None:
    """Also where a clip is called by itself, and where a layer fails."""

    def fail(*_: Any) -> None:
        raise error

    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    session = Backprop(input_clip=0.1).open(model, SETTING)
    x = torch.randn(3, 2, 4, 4)
    session.begin()
    with session.listening():
        model[0].input_clip(x)
        model[0].input_clip(x)
    model[0].register_forward_pre_hook(fail)
    with pytest.raises(error), session.listening():
        model(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    session.close()


def clips(model: nn.Sequential) -> list[InputClip]:
    return [clip for layer in model if (clip := clip_of(layer)) is not None]


def test_nothing_is_left_of_a_closed_session() -> None:
    model = chain()
    first, second = (Backprop().open(model, SETTING) for _ in range(2))
    for trained in (False, True, False):
        model[0].requires_grad_(trained)
        second.begin()
    second.close()
    assert [len(clip.instead) for clip in clips(model)] == [1, 1]
    model[0].requires_grad_(True)
    assert any(total.any() for total in sums(one_step(first, model, rows(3))).values())
    first.close()
    assert [clip.instead for clip in clips(model)] == [[], []]


def test_copies_are_not_what_is_trained() -> None:
    model = chain()
    session = Backprop().open(model, SETTING)
    for clip in (*clips(copy.deepcopy(model)), *pickle.loads(pickle.dumps(clips(model)))):
        assert clip.instead == []
    session.close()


def test_counts_leave_out_records_that_are_dropped() -> None:
    weights = torch.tensor([1.0, 1e30, 1.0, 1.0])

    def counts(some: list[int]) -> dict[str, Tensor]:
        queries = stepped(
            Backprop(clips="private", input_clip=100.0), chain(), rows(4)[some],
            losses=lambda model, x: model(x).sum(1) * weights[some],
        )  # fmt: skip
        return {query.name: query.total for query in queries if " of 2 " in query.name}

    every, others = counts([0, 1, 2, 3]), counts([0, 2, 3])
    assert every.keys() == others.keys() and len(every) == 2
    for name, count in every.items():
        torch.testing.assert_close(count, others[name])
