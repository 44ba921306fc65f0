"""The loops in C give what a plain loop over single records gives, and what PyTorch gives without them."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import bumpy_losses, naive_gradients
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from privet import Backprop, PerExample, Refused, Ternary, native
from privet.gradients import Recorder, conv
from privet.gradients.bounded import BOUNDS
from privet.losses import curriculum
from privet.losses import loss as make_loss
from privet.methods import Method, Setting
from privet.methods.ternary import _SignsInFull
from privet.nn.input_clip import NORMS, InputClip, Norm, Window
from privet.noise import Source

built = pytest.mark.skipif(native.library is None, reason="built without a compiler")
seeds = st.integers(0, 2**16)
SETTING = Setting(batch=8, noise_multiplier=1.0, relation="add_remove")


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="no compiler that is known to do")
def test_they_are_built_where_there_is_a_compiler() -> None:
    assert native.library is not None


@built
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_VERSION", native._VERSION + 1)
    assert native._load() is None


def test_they_serve_single_precision_on_the_processor_only() -> None:
    x = rand(2, 2)
    assert native.serves(x, x) == (native.library is not None)
    assert not native.serves(x, x.double())
    assert not native.serves(x.to("meta"))
    assert not native.serves(torch.view_as_complex(x).conj().imag)  # its memory holds the opposite
    assert not native.serves(torch._efficientzerotensor(2))


# Ternary gradients


def naive_signs(delta: Tensor, z: Tensor, tau: float) -> Tensor:
    """In float64 but for the products, which a gradient of float32 has rounded."""
    gradients = delta.unsqueeze(2) * z.unsqueeze(1)
    bound = torch.tensor(tau)
    return (gradients > bound).double() - (gradients < -bound).double()


@built
@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 70), st.sampled_from([0.0, 1e-3, 0.5, 2.0]), seeds)
@example(3, 2, 5000, 0.5, 0)  # wider than what is added to at a time
def test_signs_are_counted_and_added(records: int, rows: int, columns: int, tau: float, seed: int) -> None:
    delta, z, weights = rand(records, rows, seed=seed), rand(records, columns, seed=seed + 1), rand(records, seed=seed)
    expected = naive_signs(delta, z, tau)
    assert native.ternary_counts(delta, z, tau).tolist() == expected.abs().sum((1, 2)).tolist()
    found = native.ternary_sum(delta, z, weights, tau)
    torch.testing.assert_close(found.double(), torch.einsum("n,nij->ij", weights.double(), expected), rtol=0, atol=1e-5)


@built
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_record_that_is_not_finite_is_told_and_left_out(value: float) -> None:
    """1e30·1e30 is too large for float32."""
    delta, z = rand(4, 3), rand(4, 20)
    delta[2, 1], z[2, 19] = (value, value)
    counts = native.ternary_counts(delta, z, 0.1)
    assert counts.isnan().tolist() == [False, False, True, False]
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0])
    others = torch.tensor([0, 1, 3])
    found = native.ternary_sum(delta, z, weights, 0.1)
    assert torch.equal(found, native.ternary_sum(delta[others], z[others], weights[others], 0.1))
    assert torch.isfinite(found).all()


@built
@pytest.mark.usefixtures("two_threads")
def test_all_threads_see_the_same_very_small_numbers() -> None:
    """A record is clipped by a count. If the thread that counts took for zero what another adds, it would add more."""
    torch.ones(10**6).mul(2).sum()  # now there is another thread
    delta, z = torch.full((1, 64), 1e38), torch.full((1, 64), 1e-40)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot")
        assert native.ternary_counts(delta, z, 1e-3).item() == 64 * 64
        assert native.ternary_sum(delta, z, torch.ones(1), 1e-3).sum().item() == 64 * 64
        assert float(z[0, 0] * 1e38) == 0  # the setting is what it was
    finally:
        torch.set_flush_denormal(False)


@built
def test_entries_of_exactly_tau_are_zero() -> None:
    z = torch.tensor([[0.5, -0.5, 0.50000006, -0.50000006]])
    assert native.ternary_counts(torch.ones(1, 1), z, 0.5).item() == 2
    assert native.ternary_sum(torch.ones(1, 1), z, torch.ones(1), 0.5).tolist() == [[0, 0, 1, -1]]


# Convolutions


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...]]:
    pair = lambda low, high: (draw(st.integers(low, high)), draw(st.integers(low, high)))  # noqa: E731
    kernel, dilation, same = pair(1, 5), pair(1, 2), draw(st.booleans())
    options = {
        "in_channels": draw(st.integers(1, 9)), "out_channels": draw(st.sampled_from([1, 3, 15, 16, 17, 33])),
        "kernel_size": kernel, "dilation": dilation, "stride": (1, 1) if same else pair(1, 3),
        "padding": "same" if same else pair(0, 2), "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "circular"])),
    }  # fmt: skip
    fewest = 0 if same or options["padding_mode"] == "zeros" else 1  # circular padding wraps around once
    space = tuple(d * (k - 1) + 1 + draw(st.integers(fewest, 6)) for k, d in zip(kernel, dilation, strict=True))
    return options, (draw(st.integers(1, 4)), options["in_channels"], *space)


@built
@settings(max_examples=120, deadline=None)
@given(convolutions(), st.booleans(), seeds)
@example(({"in_channels": 1, "out_channels": 16, "kernel_size": 8, "stride": 2, "padding": 2}, (3, 1, 28, 28)), True, 0)
@example(({"in_channels": 16, "out_channels": 32, "kernel_size": 4, "stride": 2}, (3, 16, 12, 12)), False, 0)
def test_convolutions(drawn: tuple[dict[str, Any], tuple[int, ...]], channels_last: bool, seed: int) -> None:
    """Each record's gradient and norm, beside a loop over single records in float64."""
    options, shape = drawn
    torch.manual_seed(seed)
    layer, x = nn.Conv2d(**options), rand(*shape, seed=seed)
    if channels_last:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    padded, padding = conv.explicit_padding(layer, x)
    delta = torch.randn_like(layer(x))
    found, bias = conv._in_one_loop(layer, padded, padding, delta).values()
    torch.testing.assert_close(bias.dense().double(), delta.double().sum((2, 3)), rtol=1e-5, atol=1e-5)
    for n in range(len(x)):
        twin, one = layer.double(), x[n : n + 1].double()
        (expected,) = torch.autograd.grad(twin(one), twin.weight, delta[n : n + 1].double())
        torch.testing.assert_close(found.dense()[n].double(), expected, rtol=1e-4, atol=1e-4)
        square = found.dense()[n].double().square().sum()
        torch.testing.assert_close(found.squared_norms[n], square, rtol=1e-12, atol=0)
    layer.float()


@built
def test_expanded_and_sliced_tensors_are_read_by_their_strides() -> None:
    layer = nn.Conv2d(3, 5, 3, padding=1)
    large = rand(8, 3, 12, 10)
    for x in (large[::2, :, 2:8, ::2], large.to(memory_format=torch.channels_last)[::2, :, 2:8, ::2]):
        for one in (rand(1, 5, 1, 1), rand(4, 1, 6, 5), torch.ones(())):
            delta = one.expand(4, 5, 6, 5)
            found, bias = conv._in_one_loop(layer, x, [(1, 1), (1, 1)], delta).values()
            torch.testing.assert_close(bias.dense(), delta.sum((2, 3)))
            torch.testing.assert_close(found.dense(), conv._instantiate(layer, x, [(1, 1), (1, 1)], delta).dense())


@built
@pytest.mark.parametrize("changed", ["kernel", "output", "channels", "rows"])
def test_sizes_that_do_not_fit_are_refused(changed: str) -> None:
    layer, x, delta, rows = nn.Conv2d(3, 8, 3, padding=1), rand(2, 3, 5, 5), rand(2, 8, 5, 5), torch.empty(2, 216)
    if changed == "kernel":
        layer.weight = nn.Parameter(layer.weight[:, :, 1:2, 1:2].clone())
    elif changed == "output":
        delta = rand(2, 8, 6, 5)
    elif changed == "channels":
        x = rand(2, 4, 5, 5)
    else:
        rows = torch.empty(2, 215)
    with pytest.raises((Refused, ValueError)):
        native.convolution_gradients(layer, x, [(1, 1), (1, 1)], delta, rows)


@built
def test_sums_over_many_positions_keep_their_digits() -> None:
    delta = torch.full((1, 2, 1000, 1000), 0.1)
    _, bias = conv._in_one_loop(nn.Conv2d(1, 2, 1), torch.ones(1, 1, 1000, 1000), [(0, 0), (0, 0)], delta).values()
    torch.testing.assert_close(bias.dense(), torch.full((1, 2), 1e5), rtol=1e-4, atol=0)


@built
def test_norms_of_very_small_gradients_do_not_vanish() -> None:
    layer, x = nn.Conv2d(1, 2, 2), torch.full((1, 1, 2, 2), 1e-20)
    found = conv._in_one_loop(layer, x, [(0, 0), (0, 0)], torch.full((1, 2, 1, 1), 1e-15))["weight"]
    assert found.squared_norms.item() == pytest.approx(8 * 1e-70, rel=1e-5)


# Clips


def hostile(x: Tensor, seed: int) -> Tensor:
    """Some records long, some short, some zero or not finite."""
    kinds = torch.tensor([1.0, 100.0, 1e-3, 0.0, math.inf, math.nan, 1e18, 1e25])
    chosen = kinds[torch.randint(len(kinds), (len(x),), generator=torch.Generator().manual_seed(seed))]
    x = x * chosen.nan_to_num(1, 1).view(-1, *[1] * (x.dim() - 1))
    x[..., 0][torch.isnan(chosen)] = math.nan
    x[..., -1][torch.isinf(chosen)] = -math.inf
    return x


LONG_KERNEL = {"in_channels": 7, "out_channels": 1, "kernel_size": 8, "stride": 2, "padding": 2}


def both_ways(compute: Callable[[], Any]) -> tuple[Any, Any]:
    """In C, and in PyTorch."""
    fast = compute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", None)
        return fast, compute()


@built
@settings(max_examples=120, deadline=None)
@given(convolutions(), st.booleans(), st.sampled_from(NORMS), seeds)
@example((LONG_KERNEL, (20, 7, 28, 28)), True, "patch", 0)
@example((LONG_KERNEL, (20, 7, 28, 28)), False, "patch", 0)
@example((LONG_KERNEL, (20, 7, 28, 28)), True, "frobenius", 0)
def test_clips_by_the_patches(
    drawn: tuple[dict[str, Any], tuple[int, ...]], channels_last: bool, norm: Norm, seed: int
) -> None:
    options, shape = drawn
    x = hostile(rand(*shape, seed=seed), seed)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    clip = InputClip.before(nn.Conv2d(**options | {"padding_mode": "zeros"}), 0.7, norm)
    (z, factors), (twin, expected) = both_ways(lambda: clip.clip(x))
    torch.testing.assert_close(factors, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(z, twin, rtol=1e-4, atol=1e-30)
    assert z.stride() == x.stride() and torch.equal(clip.measure(x), factors)
    lengths = clip.squared_norms(z.double()).sqrt()
    assert (lengths <= 0.7).all() and (lengths[(factors < 1) & (factors > 0)] > 0.699).all()


@built
@settings(max_examples=120, deadline=None)
@given(convolutions(), st.booleans(), st.booleans(), st.sampled_from(["patch", "frobenius"]), seeds)
@example(({"in_channels": 1, "out_channels": 19, "kernel_size": 1}, (8, 1, 40, 50)), True, True, "patch", 1)
@example(({"in_channels": 1, "out_channels": 19, "kernel_size": 1}, (8, 1, 40, 50)), False, True, "patch", 1)
@example(({"in_channels": 1, "out_channels": 19, "kernel_size": 1}, (8, 1, 40, 50)), True, True, "frobenius", 1)
def test_clips_of_gradients(
    drawn: tuple[dict[str, Any], tuple[int, ...]], channels_last: bool, folded: bool, norm: Norm, seed: int
) -> None:
    layer, rule = nn.Conv2d(**drawn[0]), BOUNDS[nn.Conv2d]
    delta = hostile(rand(*layer(torch.zeros(drawn[1])).shape, seed=seed), seed)
    delta = delta.to(memory_format=torch.channels_last) if channels_last else delta
    also = 0.1 + torch.rand(len(delta)) if folded else None
    if norm == "frobenius" and len(delta) > 1:
        delta[1] = delta[1].abs()  # where the sum over positions is longer than all of them
    found, twin = both_ways(lambda: rule.clip(layer, delta, delta, norm, 0.3, also))
    torch.testing.assert_close(found.factors, twin.factors.float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.delta, twin.delta, rtol=1e-4, atol=1e-30)
    plain = delta * twin.factors.float().view(-1, 1, 1, 1)
    sums = torch.where(twin.factors.view(-1, 1) > 0, plain.sum((2, 3)), 0)
    torch.testing.assert_close(found.sums, sums, rtol=1e-3, atol=1e-5)
    undone = found.delta.double() / (1 if also is None else also.double().view(-1, 1, 1, 1))
    lengths = undone.abs().sum((2, 3)).norm(dim=1)
    if norm == "frobenius":
        lengths = undone.flatten(1).norm(dim=1)
        if layer.bias is not None:
            lengths = torch.maximum(lengths, undone.sum((2, 3)).norm(dim=1))
    assert (lengths <= 0.3).all() and (lengths[(found.factors < 1) & (found.factors > 0)] > 0.2998).all()


@built
def test_counts_go_with_their_records() -> None:
    with pytest.raises(ValueError, match="do not go with records"):
        native.clip_patches(rand(2, 3, 4, 5), 1.0, (1, 1), (1, 1), (1, 1), [(0, 0)] * 2, counts=torch.ones(5, 4))


@built
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(1, 3000), st.booleans(), seeds)
@example(8, 3000, True, 1)
def test_clips_of_rows(records: int, size: int, folded: bool, seed: int) -> None:
    x = hostile(rand(records, size, seed=seed), seed)
    also = 0.1 + torch.rand(records) if folded else None
    rule = BOUNDS[nn.Linear]
    found, twin = both_ways(lambda: rule.clip(nn.Linear(1, size), x, x, "patch", 0.3, also))
    torch.testing.assert_close(found.factors, twin.factors, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.delta, twin.delta, rtol=1e-4, atol=1e-30)
    plain = torch.where(found.factors.unsqueeze(1) > 0, x.double() * found.factors.unsqueeze(1), 0)
    torch.testing.assert_close(found.sums, plain.sum(0, keepdim=True), rtol=1e-5, atol=1e-6)
    clip = InputClip(0.7)
    (z, factors), (expected, twin_factors) = both_ways(lambda: clip.clip(x.mT.contiguous().mT))
    torch.testing.assert_close(factors, twin_factors, rtol=1e-4, atol=0)
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-30)
    assert (z.double().norm(dim=1) <= 0.7).all()
    assert torch.equal(clip.measure(x), factors)


@built
@settings(max_examples=60, deadline=None)
@given(convolutions(), st.booleans(), st.booleans(), seeds)
def test_outputs_are_scaled_around_the_bias(
    drawn: tuple[dict[str, Any], tuple[int, ...]], channels_last: bool, flat: bool, seed: int
) -> None:
    layer: Any = nn.Conv2d(**drawn[0])
    y = laid_out(rand(*layer(torch.zeros(drawn[1])).shape, seed=seed), channels_last)
    if flat:
        y = y.flatten(1)
        layer = nn.Linear(2, y.shape[1], bias=layer.bias is not None)
    factors = torch.where(torch.rand(len(y)) < 0.3, 1.0, torch.rand(len(y)))

    def scaled() -> Tensor:
        out = y.clone()
        BOUNDS[type(layer)].scale_output(layer, out, factors)
        return out

    fast, twin = both_ways(scaled)
    torch.testing.assert_close(fast, twin, rtol=1e-5, atol=1e-6)
    ones = [1] * (y.dim() - 2)
    center = torch.zeros(y.shape[1]) if layer.bias is None else layer.bias.detach()
    shaped, around = factors.view(-1, 1, *ones), center.view(-1, *ones)
    torch.testing.assert_close(fast, around + shaped * (y - around), rtol=1e-5, atol=1e-6)
    assert torch.equal(fast[factors == 1], y[factors == 1])


@built
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_default_dtype_is_none_of_their_business(dtype: torch.dtype) -> None:
    """C writes float32 wherever it is told to: memory of another kind would be misread, or too short."""
    x, image, delta, ones = rand(5, 7, seed=0), 10 * rand(3, 2, 6, 6, seed=1), rand(5, 4, seed=2), torch.ones(5)
    conv, linear, of_rows = nn.Conv2d(2, 3, 3), nn.Linear(1, 4), InputClip(0.7)
    of_patches, upstream = InputClip.before(conv, 0.7, "patch"), rand(3, 3, 4, 4, seed=3)
    of_all = InputClip.before(nn.Conv2d(2, 3, 3, stride=2), 0.7, "frobenius")

    def every() -> list[Tensor]:
        rows, gradients = torch.empty_like(delta), upstream.new_empty(3, 54)
        clipped = [
            BOUNDS[nn.Conv2d].clip(conv, image, upstream, "patch", 0.3, None),
            BOUNDS[nn.Linear].clip(linear, x, delta, "patch", 0.3, None),
        ]
        return [
            *of_rows.clip(x), of_rows.measure(x), *of_patches.clip(image), of_patches.measure(image),
            of_all.measure(image),
            *[part for c in clipped for part in (c.delta, c.factors, c.sums) if part is not None],
            native.weight_rows(delta, ones, rows), rows,
            native.ternary_counts(delta, x, 0.1), native.ternary_sum(delta, x, ones, 0.1),
            *native.convolution_gradients(conv, image, [(0, 0), (0, 0)], upstream, gradients), gradients,
        ]  # fmt: skip

    expected = every()
    torch.set_default_dtype(dtype)
    Window.counts.cache_clear()
    try:
        found = every()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def laid_out(x: Tensor, channels_last: bool) -> Tensor:
    return x.to(memory_format=torch.channels_last) if channels_last else x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [5, 17, 33, 70])
def test_every_channel_counts(channels: int, channels_last: bool) -> None:
    x = torch.zeros(channels, channels, 3, 3)
    x[range(channels), range(channels), 1, 2] = -10.0
    x = laid_out(x, channels_last)
    _, factors = InputClip.before(nn.Conv2d(channels, 2, 2), 0.7, "patch").clip(x)
    torch.testing.assert_close(factors, torch.full((channels,), 0.07), rtol=1e-3, atol=0)
    clipped = BOUNDS[nn.Conv2d].clip(nn.Conv2d(1, channels, 1), x, x, "patch", 0.3, None)
    torch.testing.assert_close(clipped.factors, torch.full((channels,), 0.03), rtol=1e-3, atol=0)
    if clipped.sums is not None:
        torch.testing.assert_close(clipped.sums, -0.3 * torch.eye(channels), rtol=1e-3, atol=0)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [3, 16, 20])
def test_every_position_counts(channels: int, channels_last: bool) -> None:
    places = [0, 100, 255, 256, 300, 511, 512, 599]
    delta = torch.zeros(len(places), channels, 600)
    delta[range(len(places)), :, places] = -10.0
    delta = laid_out(delta.view(len(places), channels, 20, 30), channels_last)
    clipped = BOUNDS[nn.Conv2d].clip(nn.Conv2d(1, channels, 1), delta, delta, "patch", 0.3, None)
    factor = 0.03 / math.sqrt(channels)
    torch.testing.assert_close(clipped.factors, torch.full((len(places),), factor), rtol=1e-3, atol=0)
    if clipped.sums is not None:
        expected = torch.full((len(places), channels), -10 * factor)
        torch.testing.assert_close(clipped.sums, expected, rtol=1e-3, atol=0)


def test_long_sums_are_added_up_in_float64() -> None:
    """Many numbers that float32 would lose beside a large one."""
    x = torch.full((1, 2**23), math.sqrt(0.9 * 2.0**-35))
    x[0, 0] = 1
    assert InputClip(0.7).clip(x)[0].double().norm() <= 0.7
    clip = InputClip.before(nn.Conv2d(2**17, 1, 1), 0.7, "patch")
    patch = torch.full((1, 2**17, 1, 2), math.sqrt(0.9 * 2.0**-25))
    patch[:, 0] = 1
    for channels_last in (False, True):
        assert (clip.clip(laid_out(patch, channels_last))[0].double().norm(dim=1) <= 0.7).all()
        delta = torch.full((1, 2, 400, 400), 0.9 * 2.0**-25)
        delta[..., 0, 0] = 1
        delta = laid_out(delta, channels_last)
        clipped = BOUNDS[nn.Conv2d].clip(nn.Conv2d(1, 2, 1), delta, delta, "patch", 0.3, None)
        assert clipped.delta.double().abs().sum((2, 3)).norm() <= 0.3


# Noise


def in_cells(source: Source, total: Tensor, std: float) -> Tensor:
    """What comes out, in multiples of the grid."""
    out = torch.empty_like(total)
    return source.add_noise(total, std, out=out).double() / 2.0 ** (math.frexp(std)[1] - 21)


@built
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3000), st.sampled_from([1.0, 0.037, 3e5, 1e-12]), seeds)
@example(5, 1.0, 1)
@example(200_001, 2.5, 0)
def test_noise(count: int, std: float, seed: int) -> None:
    """From the same words; a number that lies between two points of the grid may go to either."""
    total = rand(count, seed=seed) * std
    found, twin = both_ways(lambda: in_cells(Source("seeded", seed=seed), total, std))
    off = (found - twin).abs()
    assert (off <= 1).all() and (off > 0).sum() <= 1 + 1e-5 * count
    assert torch.equal(found, found.round())


@built
@pytest.mark.parametrize("radius", [0, 1, 2**63 - 1, 2**62, 2**62 + 2**53, -(2**63), -1])
@pytest.mark.parametrize("angle", [0, 1, -1, 2**61, 2**61 + 1, -(2**61) - 1, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1])
def test_noise_of_extreme_words(radius: int, angle: int) -> None:
    words = torch.tensor([radius, angle], dtype=torch.int64)
    out = torch.empty(2)
    native.add_noise(words, torch.zeros(2), 1.0, 2.0**-20, out)
    length = math.sqrt(-2 * math.log(((radius & (2**63 - 1)) + 1) / 2**63))
    expected = [length * math.cos(math.pi * angle / 2**63), length * math.sin(math.pi * angle / 2**63)]
    assert out.tolist() == pytest.approx(expected, abs=2.0**-20)


@built
def test_noise_has_the_precision_of_float64() -> None:
    """Seen where the normal's first digits are taken away, and on a fine grid."""
    words = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=torch.Generator().manual_seed(0))
    radius = ((words[:10_000] & (2**63 - 1)).double() + 1).mul(2.0**-63).log().mul(-2).sqrt()
    angle = math.pi * 2.0**-63 * words[10_000:].double()
    normals = torch.cat([radius * angle.cos(), radius * angle.sin()])
    total, out = -normals.float(), torch.empty(20_000)
    native.add_noise(words, total, 1.0, 2.0**-50, out)
    assert (out.double() - (normals + total.double())).abs().max() < 1e-14


@built
def test_noise_needs_as_many_words_and_places_as_there_are_sums() -> None:
    with pytest.raises(ValueError, match="do not go with"):
        native.add_noise(torch.zeros(5, dtype=torch.int64), torch.zeros(5), 1.0, 2.0**-20, torch.empty(5))
    with pytest.raises(ValueError, match="do not go with"):
        native.add_noise(torch.zeros(6, dtype=torch.int64), torch.zeros(5), 1.0, 2.0**-20, torch.empty(4))


# Weights of records


@built
@pytest.mark.usefixtures("two_threads")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 300), seeds)
@example(5000, 3, 0)
def test_weighted_rows(records: int, size: int, seed: int) -> None:
    x, weights = rand(size, records, seed=seed).T, rand(records, seed=seed + 1).double()  # neither as C wants it
    out = torch.full((records, size), math.nan)
    total = native.weight_rows(x, weights, out)
    assert torch.equal(out, weights.float().unsqueeze(1) * x)
    torch.testing.assert_close(total, out.double().sum(0).float(), rtol=1e-6, atol=1e-9)


@built
@pytest.mark.parametrize("out", [torch.empty(4, 2), torch.empty(3, 3), torch.empty(2, 3).T])
def test_weighted_rows_need_as_many_weights_and_places(out: Tensor) -> None:
    with pytest.raises(ValueError, match="do not go with"):
        native.weight_rows(rand(3, 2), rand(3), out)
    with pytest.raises(ValueError, match="do not go with"):
        native.weight_rows(rand(3, 2), rand(2), torch.empty(3, 2))


# The losing-less loss


@built
@pytest.mark.usefixtures("two_threads")
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 20), st.sampled_from(["first", "last", "rows"]), seeds)
@example(3, 40, 9, "last", 0)  # longer than a run in float32
def test_mean_squares_and_multiples_of_records(records: int, channels: int, width: int, order: str, seed: int) -> None:
    x, y = (rand(records, channels, width, 3, seed=seed + i) for i in range(2))
    if order == "last":
        x, y = (t.to(memory_format=torch.channels_last) for t in (x, y))
    if order == "rows":
        x, y = x.flatten(1), y.flatten(1)
    assert native.in_rows(x)
    expected = x.double().flatten(1).square().mean(1)
    torch.testing.assert_close(native.mean_squares(x).double(), expected, rtol=1e-6, atol=0)
    for factors in (rand(records, seed=seed + 2), rand(2 * records)[::2], rand(1).expand(records)):
        out, shaped = native.add_multiples(x, y, factors, 0.7), factors.view(-1, *[1] * (x.dim() - 1))
        assert out.stride() == x.stride()
        torch.testing.assert_close(out, x + 0.7 * shaped * y, rtol=1e-5, atol=1e-5)


@built
def test_rows_of_records_have_no_gaps() -> None:
    assert not native.in_rows(rand(4, 6)[:, :3]) and not native.in_rows(rand(4)) and not native.in_rows(rand(0, 3))
    with pytest.raises(ValueError, match="do not go with"):
        native.add_multiples(rand(2, 3, 4, 4), rand(2, 3, 4, 4).to(memory_format=torch.channels_last), rand(2), 1.0)
    with pytest.raises(ValueError, match="do not go with"):
        native.add_multiples(rand(2, 3), rand(2, 3), rand(3), 1.0)


@built
@pytest.mark.usefixtures("two_threads")
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40), st.integers(1, 12), st.floats(0, 1), st.sampled_from([0.0, 0.3, 1.0, 2.0, 5.0]),
    st.sampled_from([0.1, 3.0, 200.0]), seeds,
)  # fmt: skip
@example(3000, 10, 0.5, 5.0, 3.0, 0)  # enough for two threads
def test_the_curriculum_and_its_slopes(
    records: int, classes: int, alpha: float, gamma: float, size: float, seed: int
) -> None:
    scores = (size * rand(classes, records, seed=seed).T).requires_grad_()
    targets = torch.randint(classes, (records,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    losses, slopes = native.curriculum(scores.detach(), targets, alpha, gamma)
    exact = scores.detach().double().requires_grad_()
    expected = curriculum(exact, targets.long(), alpha, gamma)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    expected.sum().backward()
    assert exact.grad is not None
    torch.testing.assert_close(slopes.double(), exact.grad, rtol=1e-4, atol=1e-5 * size)


@built
def test_a_score_that_is_not_finite_spoils_its_own_record_only() -> None:
    scores = rand(4, 5)
    scores[1, 3], scores[2, 0] = math.nan, math.inf
    losses, slopes = native.curriculum(scores, torch.tensor([0, 3, 1, 2]), 0.5, 2.0)
    assert torch.isfinite(losses).tolist() == [True, False, False, True]
    assert torch.isfinite(slopes).all(1).tolist() == [True, False, False, True]


@built
@pytest.mark.parametrize("target", [-1, 3, 2**40])
def test_a_target_that_is_no_class_is_refused(target: int) -> None:
    with pytest.raises(IndexError, match="0 to 2"):
        native.curriculum(rand(2, 3), torch.tensor([0, target]), 0.5, 2.0)
    with pytest.raises(ValueError, match="do not go with"):
        native.curriculum(rand(2, 3), torch.tensor([0]), 0.5, 2.0)


@built
def test_the_loss_is_the_same_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, and the gradients of a network that they penalise."""
    x, y = rand(6, 2, 8, 8).to(memory_format=torch.channels_last), torch.arange(6) % 3
    found = []
    for library in (native.library, None):
        monkeypatch.setattr(native, "library", library)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5), nn.Tanh(), nn.Linear(5, 3)
        )
        with make_loss("losing-less", model, penalty=0.3) as loss:
            losses = loss(model(x), y)
            losses.square().sum().backward()
        found.append([losses, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# As methods use them


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip


def total(method: Method, model: nn.Module, x: Tensor) -> Tensor:
    session = method.open(model, SETTING)
    try:
        session.begin()
        with session.listening():
            session.add(bumpy_losses(model, x))
        session.end_unit()
        return torch.cat([query.total for query in session.finish()])
    finally:
        session.close()


@built
@pytest.mark.parametrize(
    "method", [PerExample(clip=0.3), Ternary(tau=0.02, clip=3.0), Ternary(tau=1e-6), Backprop(input_clip=0.5)]
)
def test_methods_give_the_same_without_them(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is not finite, and one with nothing but zeros, among others."""
    x = rand(6, 2, 4, 4)
    x[1, 0, 0, 0], x[4] = math.nan, 0.0
    with_loops = total(method, network(), x)
    monkeypatch.setattr(native, "library", None)
    torch.testing.assert_close(with_loops, total(method, network(), x), rtol=1e-5, atol=1e-6)
    assert with_loops.any()


@built
def test_ternary_vectors_of_a_record_have_norm_c() -> None:
    """The counts that clip a record are of the signs that are added, layer by layer: one record adds C, or its norm."""
    x = rand(1, 2, 4, 4)
    for clip in (0.5, 3.0, 1000.0):
        found = total(Ternary(tau=0.02, clip=clip), network(), x).double().norm().item()
        gradients = naive_gradients(network(), bumpy_losses, (x,))
        count = sum(int((g.abs() > 0.02).sum()) for g in gradients.values())
        assert found <= clip
        assert found == pytest.approx(min(clip, math.sqrt(count)), rel=1e-3)


@built
def test_linear_layers_are_never_held_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise Refused("in full")

    monkeypatch.setattr(_SignsInFull, "__init__", refuse)
    assert total(Ternary(tau=0.02), network(), rand(6, 2, 4, 4)).any()


@built
def test_shared_layers_are_added_record_by_record_first() -> None:
    """Signs are of the whole gradient of a record, not of each use of a layer."""
    torch.manual_seed(1)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x = rand(5, 4)
    gradients = naive_gradients(model, bumpy_losses, (x,))
    vectors = torch.cat([torch.where(g.abs() > 0.05, g.sign(), 0.0).flatten(1) for g in gradients.values()], 1)
    expected = (vectors * (1.0 / vectors.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    torch.testing.assert_close(total(Ternary(tau=0.05), model, x), expected, rtol=1e-3, atol=1e-4)


@built
def test_recorders_use_the_loop_for_small_patches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    real = native.convolution_gradients
    monkeypatch.setattr(
        native, "convolution_gradients", lambda layer, *rest: (used.append(layer.in_channels), real(layer, *rest))[1]
    )
    model = nn.Sequential(nn.Conv2d(3, 40, 3, padding=1), nn.Conv2d(40, 4, 3, padding=1))
    recorder = Recorder(model)
    with recorder.recording():
        recorder.backward(bumpy_losses(model, rand(2, 3, 12, 12)))
    recorder.close()
    assert used == [3]
