"""Bounds of single layers: no record, however hostile, adds more than they say, and what is added is the gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from privet import native
from privet.gradients.bounded import BOUNDS
from privet.methods.backprop import _ClippedInput
from privet.nn.input_clip import NORMS, InputClip, Norm

SLACK = 1e-5
"""Of float32, relative: margins must keep what comes out at the bound or less, but for the test's own rounding."""


def added(layer: nn.Module, x: Tensor, delta: Tensor, norm: Norm, c1: float, c2: float) -> tuple[Any, Tensor, Tensor]:
    """What a step adds to the sums, and the clipped input and gradient that these are the gradients for."""
    rule: Any = BOUNDS[type(layer)]
    z, factors = x, None
    if rule.clips_input:
        z, factors = InputClip.before(layer, c1, norm).clip(x)
    totals = {name: torch.zeros_like(p) for name, p in layer.named_parameters() if p.requires_grad}
    with torch.no_grad():
        if factors is None:
            whole = x
        else:
            folded = _ClippedInput.folded(x, z, factors)
            whole, factors = folded.whole, folded.factors
        clipped = rule.clip(layer, whole, delta, norm, c2, factors)
        rule.add_clipped(layer, whole, delta, clipped, totals)
    return totals, z, delta * clipped.factors.to(delta).view(-1, *[1] * (delta.dim() - 1))


def holds(layer: nn.Module, x: Tensor, delta: Tensor, norm: Norm = "patch", c1: float = 0.7, c2: float = 0.3) -> None:
    """Each record alone stays within every bound, and all together add what autograd adds; in C and in PyTorch."""
    for library in {native.library, None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", library)
            _holds(layer, x, delta, norm, c1, c2)


def _holds(layer: nn.Module, x: Tensor, delta: Tensor, norm: Norm, c1: float, c2: float) -> None:
    total, z, clipped = added(layer, x, delta, norm, c1, c2)
    for i in range(len(x)):
        found, _, _ = added(layer, x[i : i + 1], delta[i : i + 1], norm, c1, c2)
        for part, bound in BOUNDS[type(layer)].bounds(layer, c1, c2).items():
            length = math.hypot(*[float(found[name].double().norm()) for name in part if name in found], 0.0)
            assert length <= bound * (1 + SLACK), f"record {i} adds {length} to {part}, and the bound is {bound}"
    output = layer.forward(z)  # its input is clipped already
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    for name, expected in zip(trained, torch.autograd.grad(output, list(trained.values()), clipped), strict=True):
        torch.testing.assert_close(total[name], expected, rtol=1e-4, atol=1e-5 * c1 * c2)


def hostile(kind: str, shape: tuple[int, ...], scale: float, seed: int) -> Tensor:
    """Three records of one kind: what is large in one norm and small in another."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, *shape)
    if kind == "random":
        return torch.randn(shape, generator=generator) * scale
    if kind == "constant":
        return torch.full(shape, scale)
    if kind == "alternating":
        return (1 - 2 * (torch.arange(math.prod(shape)) % 2)).view(shape) * scale
    x = torch.randn(shape, generator=generator) * 1e-3 * scale
    if kind == "one entry":
        x.flatten(1)[:, int(torch.randint(x[0].numel(), (), generator=generator))] = scale
    elif kind == "corner":
        x[(slice(None), slice(None), *[0] * (x.dim() - 2))] = scale
    elif kind == "one channel":
        x[:, 0] = scale
    return x


KINDS = st.sampled_from(["random", "constant", "alternating", "one entry", "corner", "one channel"])
SCALES = st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e12])
SEEDS = st.integers(0, 2**16)
SEVERAL = settings(max_examples=30, deadline=None, derandomize=True)
FEW = settings(max_examples=20, deadline=None, derandomize=True)


@SEVERAL
@given(st.sampled_from(NORMS), st.lists(st.integers(1, 6), max_size=2), st.booleans(), KINDS, KINDS, SCALES, SEEDS)
def test_linear_layers(
    norm: Norm, positions: list[int], bias: bool, of_z: str, of_delta: str, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    z = hostile(of_z, (*positions, 4), scale, seed)
    holds(nn.Linear(4, 3, bias=bias), z, hostile(of_delta, (*positions, 3), 1 / scale, seed + 1), norm)


@st.composite
def convolutions(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """A convolution of any kind, and the shape of a record that it takes."""
    axes = draw(st.sampled_from([1, 1, 2, 2, 3]))
    along = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(axes))  # noqa: E731
    groups = draw(st.sampled_from([1, 2]))
    same = draw(st.booleans())
    kernel, dilation = along(1, 3), along(1, 2)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](
        2 * groups, 2 * groups, kernel, stride=1 if same else along(1, 3), padding="same" if same else along(0, 2),
        dilation=dilation, groups=groups, bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
    )  # fmt: skip
    return layer, (
        2 * groups,
        *[d * (k - 1) + 1 + draw(st.integers(2, 3)) for k, d in zip(kernel, dilation, strict=True)],
    )


@SEVERAL
@given(convolutions(), st.sampled_from(NORMS), KINDS, KINDS, SCALES, SEEDS)
def test_convolutions(
    drawn: tuple[nn.Module, tuple[int, ...]], norm: Norm, of_z: str, of_delta: str, scale: float, seed: int
) -> None:
    layer, shape = drawn
    torch.manual_seed(seed)
    z = hostile(of_z, shape, scale, seed)
    holds(layer, z, hostile(of_delta, tuple(layer(z).shape[1:]), 1 / scale, seed + 1), norm)


@FEW
@given(st.integers(1, 5), st.sampled_from([None, 0]), KINDS, SCALES, SEEDS)
def test_embeddings(positions: int, padding: int | None, of_delta: str, scale: float, seed: int) -> None:
    tokens = torch.randint(3, (3, positions), generator=torch.Generator().manual_seed(seed))
    holds(nn.Embedding(3, 4, padding_idx=padding), tokens, hostile(of_delta, (positions, 4), scale, seed))


NORMALISERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (4,)),
    "LayerNorm over positions": (lambda: nn.LayerNorm(4), (5, 4)),
    "LayerNorm of two axes": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (5, 4)),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 3, 3)),
}


@pytest.mark.parametrize("name", NORMALISERS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(["random", "alternating", "one entry"]),  # the others, normalised, may be rounding and nothing else
    KINDS,
    st.sampled_from([1e-3, 1.0, 1e3]),
    SEEDS,
    st.sampled_from([None, "weight", "bias"]),
)
def test_normalisation(name: str, of_z: str, of_delta: str, scale: float, seed: int, frozen: str | None) -> None:
    make, shape = NORMALISERS[name]
    layer: nn.Module = make()
    if len(list(layer.parameters())) > 1 and frozen is not None:
        layer.get_parameter(frozen).requires_grad_(False)
    holds(layer, hostile(of_z, shape, scale, seed), hostile(of_delta, shape, scale, seed + 1))


def test_the_bias_of_a_frobenius_bound_is_counted() -> None:
    """Σ_t δ_t is √T times as long as all δ_t together where they agree."""
    layer = nn.Conv1d(1, 1, 3, padding=1)
    totals, _, _ = added(layer, torch.ones(1, 1, 100), torch.ones(1, 1, 100), "frobenius", 1.0, 1.0)
    assert 0.999 < float(totals["bias"].norm()) <= 1
    layer.bias.requires_grad_(False)
    _, _, free = added(layer, torch.ones(1, 1, 100), torch.ones(1, 1, 100), "frobenius", 1.0, 1.0)
    assert 0.999 < float(free.norm()) <= 1  # nothing is lost where it is not trained


@pytest.mark.parametrize("norm", NORMS)
def test_many_positions(norm: Norm) -> None:
    """So many that a sum in float32 would be off by more than the margin."""
    positions = 2**14 + 5000
    layer = nn.Linear(2, 2)
    x, delta = torch.full((1, positions, 2), 3.0), torch.full((1, positions, 2), 0.1)
    _, z, delta = added(layer, x, delta, norm, 1.0, 1.0)
    totals = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in layer.named_parameters()}
    BOUNDS[nn.Linear].add(layer, z.double(), delta.double(), totals)
    found = {name: float(total.norm()) for name, total in totals.items()}
    assert max(found.values()) <= 1 and found["bias"] > 0.999


# Canaries: (z, δ) that climb towards the bound


CANARIES: dict[str, Any] = {
    "zeros": lambda: nn.Conv2d(2, 2, 3, padding=1, bias=False),
    "zeros, stride": lambda: nn.Conv2d(2, 2, 3, stride=2, padding=2, bias=False),
    "zeros, dilation and groups": lambda: nn.Conv1d(4, 4, 3, dilation=2, padding=2, groups=2, bias=False),
    "circular": lambda: nn.Conv1d(2, 2, 3, padding=2, padding_mode="circular", bias=False),
    "reflect": lambda: nn.Conv1d(2, 2, 3, padding=2, padding_mode="reflect", bias=False),
    "replicate": lambda: nn.Conv1d(2, 2, 3, padding=2, padding_mode="replicate", bias=False),
    "replicate, stride": lambda: nn.Conv2d(1, 2, 2, stride=2, padding=1, padding_mode="replicate", bias=False),
    "linear over positions": lambda: nn.Linear(3, 3, bias=False),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CANARIES)
def test_gradient_ascent_comes_near_the_bound_and_not_above(name: str, norm: Norm) -> None:
    layer = CANARIES[name]()
    worst = max(climbed(layer, norm, start) for start in ("spread", "local"))
    assert worst <= 1 + 1e-4
    assert worst > 0.9, f"the search has no power, or the bound is loose: {worst}"


def climbed(layer: Any, norm: Norm, start: str) -> float:
    """The longest gradient met on the way, as a share of the bound, from a start that is even or in one place."""
    torch.manual_seed(0)
    axes = layer.weight.dim() - 2
    shape = (1, 6, 3) if axes == 0 else (1, layer.in_channels, *[6] * axes)

    def begin(shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape)
        if start == "spread":
            return (1 + 0.3 * x).requires_grad_()
        for axis in range(1, 2) if axes == 0 else range(2, x.dim()):
            places = torch.arange(x.shape[axis]).view(-1, *[1] * (x.dim() - 1 - axis))
            x = x * torch.exp(-0.5 * (places - x.shape[axis] // 2).square())
        return x.requires_grad_()

    z = begin(shape)
    delta = begin(tuple(layer(z).shape))
    climbing = torch.optim.Adam([z, delta], lr=0.05)
    worst = 0.0
    for _ in range(70):
        totals, _, _ = added(layer, 10 * z.detach(), 10 * delta.detach(), norm, 1.0, 1.0)
        worst = max(worst, float(totals["weight"].norm()))
        scaled_to_one = z / layer.input_clip.squared_norms(z).sqrt().view(-1, *[1] * (z.dim() - 1))
        (gradient,) = torch.autograd.grad(layer.forward(scaled_to_one), layer.weight, delta, create_graph=True)
        by_channel = delta.mT if axes == 0 else delta.flatten(2)
        length = by_channel.norm() if norm == "frobenius" else by_channel.abs().sum(2).norm()
        climbing.zero_grad()
        (length.log() - gradient.norm().log()).backward()
        climbing.step()
    return worst
