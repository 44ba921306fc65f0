"""What the recorder refuses, what it guards against, and that the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compared import agree, rand, recorded
from conftest import bumpy, bumpy_losses, naive_gradients
from torch import Tensor, nn

from privet import Refused
from privet.gradients import Recorder


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_options_over_the_tokens_of_a_batch_are_refused_wherever_the_layer_is(kind: Any, option: str) -> None:
    """They change rows of the weight, without noise, or weigh records by others: also inside of another layer."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.table = nn.Parameter(torch.ones(3)), kind(7, 3, **{option: 1})

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x) * self.scale

    for model in (nn.Sequential(kind(7, 3, **{option: 1})), Outer()):
        with pytest.raises(Refused, match=rf"\({kind.__name__}\) has {option}"):
            Recorder(model)


def test_a_layer_input_that_is_changed_in_place_is_an_error() -> None:
    model = nn.Linear(3, 3)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone()
        out = model(x)
        x.mul_(2)
        return out.sum(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recorded(model, losses, (torch.ones(2, 3),))


def test_an_output_that_is_changed_in_place_is_right() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out[:, 0] *= 3
        out.clamp_(min=-0.5)
        return out.square().sum(1)

    agree(nn.Linear(3, 3).double(), rand(4, 3), losses=losses)


def test_a_parameter_used_functionally_is_refused_by_name() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    with pytest.raises(Refused, match=r"'second\.weight'"):
        recorded(model, lambda m, x: F.linear(m["first"](x), m["second"].weight).sum(1), (torch.ones(2, 3),))
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_folds_records_into_another_axis_is_refused_by_name() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(0, 1)).view(len(x), -1)

    with pytest.raises(Refused, match=r"'inner' \(Linear\).*first axis"):
        recorded(Folding(), bumpy_losses, (torch.ones(2, 4, 3),))


class Token(nn.Module):
    """Gives every record of a batch the same numbers: of a batch given as such, or by its number of records."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([1.0, -2, 3]))

    def forward(self, batch: Tensor | int) -> Tensor:
        return self.value.expand(batch if isinstance(batch, int) else len(batch), 3) * 1.0


def test_a_layer_that_gets_no_records_but_their_number_is_refused_by_name_and_the_way_out_is_one() -> None:
    model = nn.ModuleDict({"token": Token(), "last": nn.Linear(3, 1)}).double()
    agree(model, rand(4, 3), losses=lambda m, x: bumpy(m["last"](x * m["token"](x))))
    with pytest.raises(Refused, match=r"'token' \(Token\).*\(4, 3\).*number of records"):
        recorded(model, lambda m, x: bumpy(m["last"](x * m["token"](len(x)))), (rand(4, 3),))


@pytest.mark.parametrize("kind", ["gru", "attention"])
def test_records_on_the_second_axis_are_refused_even_if_both_have_one_length(kind: str) -> None:
    model: nn.Module = nn.GRU(3, 4) if kind == "gru" else nn.MultiheadAttention(4, 2)
    x = torch.randn(5, 5, 3 if kind == "gru" else 4)
    with pytest.raises(Refused, match="batch_first"):
        recorded(model, lambda m, x: bumpy((m(x) if kind == "gru" else m(x, x, x))[0].movedim(1, 0)), (x,))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_couples_records_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=rf"'0' \(Embedding\) has {next(iter(option))}"):
        Recorder(nn.Sequential(nn.Embedding(3, 2, **option)))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3), nn.PReLU())
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    contents = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(2, 1, 4, 4)
    recorder = Recorder(model)
    with recorder.recording():
        recorder.backward(model(x).sum(1))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    recorder.close()
    hooks = [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks)]
    assert hooks == []
    assert [type(m) for m in model.modules()] == kinds
    assert list(model.state_dict()) == keys
    assert all(torch.equal(value, contents[key]) for key, value in model.state_dict().items())
    with recorder.recording():  # closed: ordinary gradients even here
        model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_outside_of_recording_gradients_are_ordinary() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    recorder = Recorder(model)
    with recorder.recording():
        recorder.backward(model(x).sum(1))
    model(x).sum().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    recorder.close()


def test_flags_come_back_after_an_exception() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(3, 3), Breaks())
    model[0].bias.requires_grad_(False)
    recorder = Recorder(model)
    for wrong in (torch.ones(2, 3), torch.ones(2, 5)):  # inside a forward pass, and of a layer itself
        with pytest.raises((ValueError, RuntimeError)), recorder.recording():
            model(wrong)
        assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"0.bias"}
    recorder.close()


def test_passes_without_gradients_are_not_recorded() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    recorder = Recorder(model)
    with recorder.recording():
        with torch.no_grad():
            assert not model(x).requires_grad
        found = recorder.backward(bumpy(model(x)))
    torch.testing.assert_close(found["weight"].dense(), naive_gradients(model, bumpy_losses, (x,))["weight"])
    recorder.close()


def test_chunks_of_varying_size_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, stride=2), nn.Flatten(), nn.Linear(54, 3)
    ).double()
    x = rand(70, 3, 8, 8)
    recorder = Recorder(model)
    everything = naive_gradients(model, bumpy_losses, (x,))
    for records in (64, 1, 7, 70, 2, 64):
        with recorder.recording():
            found = recorder.backward(bumpy(model(x[:records])))
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.dense(), everything[name][:records])
            weights = torch.ones(records, dtype=torch.float64)
            torch.testing.assert_close(gradient.weighted_sum(weights), everything[name][:records].sum(0))
    recorder.close()


def test_two_results_at_a_time_do_not_share_memory() -> None:
    """The second pass must not write into what the first one handed out."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).double()
    first = recorded(model, bumpy_losses, (rand(4, 2, 4, 4),))
    kept = {name: (g.squared_norms.clone(), g.dense().clone()) for name, g in first.items()}
    recorded(model, bumpy_losses, (rand(4, 2, 4, 4, seed=1),))
    for name, gradient in first.items():
        torch.testing.assert_close(gradient.squared_norms, kept[name][0])
        torch.testing.assert_close(gradient.dense(), kept[name][1])
