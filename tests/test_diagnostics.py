"""Diagnostics: the numbers against a loop over single records, and that a model and its run do not notice them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import naive_clipped_sum, naive_gradients
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privet import Backprop, Batch, Budget, ConfigError, PerExample, Poisson, Run
from privet.diagnostics import diagnose
from privet.losses import LosingLess
from privet.methods import Method
from privet.nn.input_clip import InputClip


def records(count: int = 20) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets, reduction="none")


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model(x), y)


def naive(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> dict[str, Any]:
    """Norms, share and cosine by ordinary autograd, record by record, in evaluation mode."""
    model.eval()
    gradients = naive_gradients(model, losses, (x, y))
    norms = torch.cat([g.double().flatten(1) for g in gradients.values()], 1).norm(dim=1)
    sums = [torch.cat([g.double().sum(0).flatten() for g in gradients.values()])]
    sums += [torch.cat([g.flatten() for g in naive_clipped_sum(gradients, clip).values()])]
    return {"norms": norms, "above": float((norms > clip).double().mean()), "cosine": F.cosine_similarity(*sums, dim=0)}


def check_gradients(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> None:
    found = diagnose(model, entropy, x, y, clip)
    assert found["left_out"] == {}
    expected = naive(model, x, y, clip)
    gradients = found["gradients"]
    assert gradients["above_clip"] == pytest.approx(expected["above"], abs=1e-5)
    assert gradients["cosine"] == pytest.approx(float(expected["cosine"]), abs=1e-5)
    for name, q in (("10%", 0.1), ("25%", 0.25), ("50%", 0.5), ("90%", 0.9)):
        assert gradients["quantiles"][name] == pytest.approx(float(torch.quantile(expected["norms"], q)), rel=2e-4)


def test_gradients_are_those_of_single_records_over_several_chunks() -> None:
    x, y = records(300)
    model = net()
    clip = float(naive(model, x, y, 1.0)["norms"].median()) * 1.01
    assert naive(model, x, y, clip)["cosine"] < 0.995
    check_gradients(model, x, y, clip)


def test_the_histogram_counts_every_record_in_its_bin_and_those_beyond_the_edges() -> None:
    weight = nn.Linear(1, 1, bias=False)
    sizes = torch.tensor([1e-6, 0.5e-4, 1.5e-4, 0.9, 1.1, 999.0, 5e3, 5e4]).unsqueeze(1)
    found = diagnose(weight, lambda scores, _: scores.squeeze(1), sizes, torch.zeros(8))["gradients"]["histogram"]
    first, per_decade, counts = found["first"], found["per_decade"], found["counts"]
    assert sum(counts) == 8 and counts[0] == 2 and counts[-1] == 2
    for size in (1.5e-4, 0.9, 1.1, 999.0):
        edges = [10 ** (first + k / per_decade) for k in range(len(counts) - 1)]
        (place,) = [k for k in range(1, len(edges)) if edges[k - 1] <= size < edges[k]]
        assert counts[place] == 1, size


@torch.no_grad()
def test_norms_of_weights_and_of_pre_activations() -> None:
    x, y = records(140)
    model = net()
    found = diagnose(model, entropy, x, y)
    assert list(found["weights"]) == [name for name, _ in model.named_parameters()]
    assert found["weights"]["4.weight"] == pytest.approx(float(model[4].weight.detach().norm()), rel=1e-4)
    assert list(found["pre_activations"]) == ["0", "4"]
    assert found["pre_activations"]["0"] == pytest.approx(float(model[0](x).flatten(1).norm(dim=1).mean()), rel=1e-4)
    assert found["pre_activations"]["4"] == pytest.approx(float(model(x).norm(dim=1).mean()), rel=1e-4)
    assert found["clip"] is None and not {"above_clip", "cosine"} & set(found["gradients"])


def test_only_the_first_512_records_count() -> None:
    x, y = records(600)
    found = diagnose(net(), entropy, x, y, 1.0)
    x[512:] = torch.nan
    assert diagnose(net(), entropy, x, y, 1.0) == found and found["records"] == 512


def test_a_record_that_is_not_finite_is_counted_and_left_out() -> None:
    x, y = records()
    alone = diagnose(net(), entropy, x[1:], y[1:], 0.5)
    x[0] = torch.inf
    found = diagnose(net(), entropy, x, y, 0.5)
    assert found["gradients"]["not_finite"] == 1
    for name in ("above_clip", "cosine", "quantiles"):
        assert found["gradients"][name] == pytest.approx(alone["gradients"][name], rel=1e-4)
    x[:] = torch.nan
    assert "NaN" not in json.dumps(found) and json.dumps(diagnose(net(), entropy, x, y, 0.5), allow_nan=False)


def test_clipping_that_only_shortens_has_cosine_one() -> None:
    x, y = records(1)
    found = diagnose(net(), entropy, x.expand(8, -1, -1, -1), y.expand(8), 1e-3)["gradients"]
    assert found["cosine"] == pytest.approx(1, abs=1e-6) and found["above_clip"] == 1


class Twice(nn.Module):
    """A layer that is used twice, and one whose weight is another's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(36, 36), nn.Linear(36, 36)
        self.again.weight = self.first.weight
        self.last = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1)).tanh()
        return self.last(self.again(self.first(h).tanh()).tanh())


def with_batchnorm() -> nn.Module:
    model = nn.Sequential(net()[0], nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    with torch.no_grad():
        model(records(50)[0])
    return model


def with_input_clips() -> nn.Module:
    model = net()
    InputClip.before(model[0], 0.7, "patch")
    InputClip.before(model[4], 0.5, "input")
    return model


@pytest.mark.parametrize("make", [Twice, with_batchnorm, with_input_clips])
def test_models_out_of_the_ordinary(make: Callable[[], nn.Module]) -> None:
    x, y = records()
    check_gradients(make(), x, y, 0.8)


def test_a_layer_used_twice_counts_with_all_its_uses() -> None:
    x, y = records()
    model = Twice()
    h = model.first(x.flatten(1))
    both = torch.cat([h, model.first(h.tanh())]).detach().norm(dim=1).mean()
    assert diagnose(model, entropy, x, y)["pre_activations"]["first"] == pytest.approx(float(both), rel=1e-4)


def test_a_loss_that_watches_the_model() -> None:
    x, y = records()
    model = net()
    with LosingLess(model, penalty=3.0) as loss:
        found = diagnose(model, loss, x, y, 1.0)
        assert found["left_out"] == {}
        assert found["gradients"]["quantiles"] != diagnose(model, entropy, x, y)["gradients"]["quantiles"]


class Restless(nn.Module):
    """Draws random numbers and writes to its buffers also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = x.mean().detach().view(1)
        return self.body(F.dropout(x, 0.5, training=True))


class Functional(nn.Module):
    """Uses a weight behind its layer's back, which the engine refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), self.layer.weight)


def hooks(model: nn.Module) -> list[tuple[int, ...]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]


@pytest.mark.parametrize("make", [Restless, Functional])
def test_the_model_is_as_before(make: Callable[[], nn.Module]) -> None:
    x, y = records()
    model = make()
    model.train()
    next(model.children()).eval()
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = gradients[name]
    modes, buffers = [m.training for m in model.modules()], [(b, b.clone()) for b in model.buffers()]
    trains, before, state = [p.requires_grad for p in model.parameters()], hooks(model), torch.get_rng_state()
    diagnose(model, entropy, x, y, 1.0)
    assert torch.equal(torch.get_rng_state(), state) and hooks(model) == before
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == trains
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(
        now is then and torch.equal(now, kept) for now, (then, kept) in zip(model.buffers(), buffers, strict=True)
    )


def test_what_cannot_be_had_is_left_out_with_a_reason() -> None:
    x, y = records()
    found = diagnose(Functional(), entropy, x, y, 1.0)
    assert "functionally" in found["left_out"]["gradients"] and "gradients" not in found
    assert "not called" in found["left_out"]["pre_activations of layer"] and found["weights"]["layer.weight"] > 0

    folded = nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 3), nn.Unflatten(0, (-1, 6)), nn.Flatten(), nn.Linear(18, 3))
    found = diagnose(folded, entropy, x.squeeze(1), y, 1.0)
    assert "first axis" in found["left_out"]["pre_activations of 1"] and list(found["pre_activations"]) == ["4"]
    assert "first" in found["left_out"]["gradients"]

    found = diagnose(net(), lambda scores, targets: entropy(scores, targets).mean(), x, y, 1.0)
    assert "one entry per record" in found["left_out"]["gradients"] and found["pre_activations"]
    found = diagnose(nn.Linear(5, 3), entropy, x, y, 1.0)  # takes no such records
    assert "RuntimeError" in found["left_out"]["gradients"] and "RuntimeError" in found["left_out"]["pre_activations"]
    assert "requires a gradient" in diagnose(net().requires_grad_(False), entropy, x, y)["left_out"]["gradients"]


def test_bad_arguments_are_refused() -> None:
    x, y = records()
    for bad in (lambda: diagnose(net(), entropy, x, y[1:]), lambda: diagnose(net(), entropy, x[:0], y[:0])):
        with pytest.raises(ConfigError, match="as many records"):
            bad()
    with pytest.raises(ConfigError, match="clip"):
        diagnose(net(), entropy, x, y, 0.0)


@pytest.mark.parametrize(
    "method",
    [PerExample(clip=0.5), PerExample(clip=0.5, adaptive=True), Backprop(gradient_clip=0.1), Batch(clip=0.5)],
    ids=lambda method: type(method).__name__,
)
def test_the_next_private_step_does_not_notice(method: Method) -> None:
    x, y = records()

    def trained(look: bool) -> tuple[list[Tensor], Any]:
        model = nn.Sequential(*net(), nn.Dropout(0.0))
        method.prepare(model)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = TensorDataset(*records(64))
        with Run(
            model, private, method=method, sampling=Poisson(batch=16), noise_level="seeded", seed=3,
            budget=Budget(noise=1.0, steps=4, delta=1e-5), physical_batch=8,
        ) as run:  # fmt: skip
            for step in run.loader:
                for xs, ys in step:
                    step.backward(losses(model, xs, ys))
                if look:  # between the release and the optimizer's step, where p.grad is there
                    assert diagnose(model, entropy, x, y, 0.5)["left_out"] == {}
                optimizer.step()
                if look:
                    diagnose(model, entropy, x, y, 0.5)
            return [p.detach().clone() for p in model.parameters()], torch.rand(1)

    plain, looked = trained(False), trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], looked[0], strict=True))
