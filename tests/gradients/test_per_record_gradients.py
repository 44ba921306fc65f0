"""Per-record gradients equal a loop over single records, for every layer and option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compared import agree, rand, recorded
from conftest import Losses, bumpy, bumpy_losses, naive_gradients
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from privet import Refused
from privet.gradients import Recorder, conv

seeds = st.integers(0, 2**16)


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = make().double()
    with torch.no_grad():
        for p in model.parameters():  # scales of one and shifts of zero would hide mistakes
            p.add_(0.3 * torch.randn_like(p))
    return model


class LogitScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


def test_a_parameter_that_is_one_number() -> None:
    agree(built(LogitScale), rand(4, 3))


# Layers with a rule of their own


@given(
    middle=st.lists(st.integers(1, 5), max_size=3), wide_in=st.integers(1, 9), wide_out=st.integers(1, 9),
    records=st.integers(1, 5), bias=st.booleans(), seed=seeds,
)  # fmt: skip
@example(middle=[2], wide_in=40, wide_out=30, records=3, bias=True, seed=0)  # few positions, large weight
@example(middle=[50], wide_in=3, wide_out=2, records=3, bias=True, seed=0)  # many positions, small weight
def test_linear(middle: list[int], wide_in: int, wide_out: int, records: int, bias: bool, seed: int) -> None:
    agree(built(lambda: nn.Linear(wide_in, wide_out, bias=bias), seed), rand(records, *middle, wide_in, seed=seed))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[int, dict[str, Any], tuple[int, ...], int]:
    axes = draw(st.integers(1, 3))
    per_axis = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(axes))  # noqa: E731
    kernel, dilation = per_axis(1, 3), per_axis(1, 2)
    mode = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    padding: Any = draw(st.sampled_from(["same", "valid", "int", "tuple"]))
    stride = (1,) * axes if padding == "same" else per_axis(1, 3)
    if padding == "int":
        padding = draw(st.integers(0, 2))
    elif padding == "tuple":
        padding = per_axis(0, 2)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    depth = draw(st.integers(1, 3))
    options = {
        "in_channels": groups * draw(st.integers(1, 3)), "out_channels": groups * depth, "kernel_size": kernel,
        "stride": stride, "dilation": dilation, "padding": padding, "groups": groups, "padding_mode": mode,
        "bias": draw(st.booleans()),
    }  # fmt: skip
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    space = tuple(max(r, 3) + draw(st.integers(0, 4 if axes < 3 else 1)) for r in reach)
    return axes, options, space, draw(st.integers(1, 4))


CONVS: list[type[nn.Module]] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]


@settings(max_examples=120)
@given(convolutions(), st.booleans(), seeds)
def test_convolutions(drawn: tuple[int, dict[str, Any], tuple[int, ...], int], channels_last: bool, seed: int) -> None:
    axes, options, space, records = drawn
    model = built(lambda: CONVS[axes - 1](**options), seed)
    x = rand(records, options["in_channels"], *space, seed=seed)
    if channels_last and axes > 1:
        layout = torch.channels_last if axes == 2 else torch.channels_last_3d
        x, model = x.to(memory_format=layout), model.to(memory_format=layout)
    agree(model, x)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        # small maps, many channels: the Gram matrix is the cheaper way
        (lambda: nn.Conv2d(40, 48, 3, padding=1), (3, 40, 3, 3)),
        (lambda: nn.Conv2d(40, 48, 3, padding="same", dilation=2, padding_mode="circular"), (3, 40, 4, 3)),
        (lambda: nn.Conv2d(40, 48, 2, padding="same", bias=False), (3, 40, 3, 2)),  # one more zero on one side
        (lambda: nn.Conv2d(40, 48, (3, 2), stride=(2, 1), padding=(1, 0)), (3, 40, 4, 4)),
        (lambda: nn.Conv1d(64, 64, 3, padding=2, dilation=2), (2, 64, 3)),
        (lambda: nn.Conv3d(24, 32, 2, padding=1, stride=2), (2, 24, 2, 2, 2)),
        (lambda: nn.Conv2d(40, 48, 1), (3, 40, 2, 2)),
        # large maps, and as many groups as channels
        (lambda: nn.Conv2d(3, 4, 5, padding=2), (2, 3, 24, 24)),
        (lambda: nn.Conv2d(2, 3, 3, dilation=(3, 2)), (2, 2, 15, 16)),
        (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (3, 16, 9, 9)),
        (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False), (3, 8, 7, 7)),
        (lambda: nn.Conv1d(4, 4, 64, stride=16), (2, 4, 600)),
        # small patches
        (lambda: nn.Conv2d(1, 16, 8, stride=2, padding=2), (3, 1, 28, 28)),
        (lambda: nn.Conv2d(4, 4, 4, stride=2, padding=1, groups=4), (3, 4, 19, 18)),
        (lambda: nn.Conv3d(1, 2, (2, 3, 2), stride=(1, 2, 1), padding=1), (2, 1, 5, 9, 6)),
    ],
)
def test_convolutions_by_either_way(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    agree(built(make), rand(*shape))
    if len(shape) == 4:
        agree(built(make).to(memory_format=torch.channels_last), rand(*shape).to(memory_format=torch.channels_last))
    agree(built(make).float(), rand(*shape).float(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("size", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [2, 40])
def test_settings_of_a_convolution_that_were_changed_later(size: torch.dtype, channels: int) -> None:
    """Torch goes by the attributes as they are now."""
    for padding in (1, "same"):
        layer = built(lambda padding=padding: nn.Conv2d(channels, 48, 3, padding=padding)).to(size)
        layer.dilation = (2, 3)
        if padding == 1:
            layer.padding, layer.stride = (3, 2), (2, 1)
        agree(layer, rand(3, channels, 7, 7).to(size), rtol=2e-4, atol=2e-4)


def test_a_weight_of_another_kernel_is_refused() -> None:
    layer = nn.Conv2d(3, 8, 3)
    layer.weight = nn.Parameter(layer.weight[:, :, 1:2, 1:2].clone())
    with pytest.raises(Refused, match="make a new layer"):
        recorded(layer, bumpy_losses, (torch.ones(2, 3, 5, 5),))


@settings(max_examples=80)
@given(
    stride=st.integers(1, 3), strips=st.integers(1, 2), columns=st.integers(1, 5), channels=st.integers(1, 3),
    depthwise=st.booleans(), padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    beyond=st.tuples(st.integers(0, 4), st.integers(1, 9)), records=st.integers(1, 7), block=st.integers(1, 3),
    worth_strips=st.sampled_from([1, 1000]), single=st.booleans(), channels_last=st.booleans(), seed=seeds,
)  # fmt: skip
def test_small_patches_are_copied_row_by_row(
    stride: int, strips: int, columns: int, channels: int, depthwise: bool, padding: tuple[int, int],
    beyond: tuple[int, int], records: int, block: int, worth_strips: int, single: bool, channels_last: bool, seed: int,
) -> None:  # fmt: skip
    """Whole patches and strips of them, in blocks of a few records; a line has more positions than the kernel rows."""
    rows, groups = stride * strips, channels if depthwise else 1
    height = max(1, rows - 2 * padding[0]) + beyond[0]
    width = max(1, (rows + beyond[1]) * stride + columns - 1 - 2 * padding[1])
    model = built(lambda: nn.Conv2d(channels, 2 * groups, (rows, columns), stride, padding, groups=groups), seed)
    x = rand(records, channels, height, width, seed=seed)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    copied: list[tuple[bool, int]] = []

    class Watched(conv._Unrolling):
        def copy(self, view: Tensor, into: Tensor) -> None:
            copied.append((self.row_by_row, len(view)))
            super().copy(view, into)

    numbers = math.prod(model(x).shape[2:]) * rows * columns * channels
    with (
        mock.patch.multiple(conv, _Unrolling=Watched, _SMALL_PATCH=10**6, _WORTH_STRIPS=worth_strips),
        mock.patch.object(conv, "_BLOCK", block * numbers),
        mock.patch.multiple(conv, _ghost_is_cheaper=lambda *_: False, _loop_is_faster=lambda *_: False),
    ):
        if single:
            agree(model.float(), x.float(), rtol=2e-4, atol=2e-5)
        else:
            agree(model, x)
    assert all(by_row for by_row, _ in copied)
    assert sum(count for _, count in copied) == records


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), words=st.integers(2, 12), width=st.integers(1, 5),
    padding=st.booleans(), seed=seeds,
)  # fmt: skip
def test_embedding(shape: list[int], words: int, width: int, padding: bool, seed: int) -> None:
    tokens = torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))  # with repetitions
    model = built(lambda: nn.Embedding(words, width, padding_idx=1 if padding else None), seed)
    agree(model, tokens)
    if padding:
        assert not recorded(model, bumpy_losses, (tokens,))["weight"].dense()[:, 1].any()


@given(
    middle=st.lists(st.integers(1, 4), max_size=2), trailing=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    bias=st.booleans(), affine=st.booleans(), seed=seeds,
)  # fmt: skip
def test_layer_norm(middle: list[int], trailing: list[int], bias: bool, affine: bool, seed: int) -> None:
    x = rand(3, *middle, *trailing, seed=seed)
    norm = built(lambda: nn.LayerNorm(trailing, bias=bias, elementwise_affine=affine), seed)
    before = built(lambda: nn.Linear(trailing[-1], trailing[-1]), seed)
    agree(nn.Sequential(before, norm), x)
    rms = built(lambda: nn.RMSNorm(trailing, elementwise_affine=affine), seed)
    agree(nn.Sequential(before, rms), x)


@given(
    groups=st.integers(1, 3), each=st.integers(1, 3), space=st.lists(st.integers(1, 4), max_size=3),
    affine=st.booleans(), seed=seeds,
)  # fmt: skip
def test_group_norm(groups: int, each: int, space: list[int], affine: bool, seed: int) -> None:
    assume(each * math.prod(space) > 1)
    x = rand(3, groups * each, *space, seed=seed)
    if affine:
        agree(built(lambda: nn.GroupNorm(groups, groups * each), seed), x)
    else:
        scale = built(lambda: nn.Conv1d(groups * each, groups * each, 1), seed)
        norm = nn.GroupNorm(groups, groups * each, affine=False)
        agree(nn.Sequential(scale, norm), x.flatten(2) if space else x[..., None])


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("tracked", [False, True])
def test_instance_norm(axes: int, tracked: bool) -> None:
    kind = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][axes - 1]
    model = built(lambda: kind(4, affine=True, track_running_stats=tracked))
    model.train(not tracked)  # with running statistics it is a function of one record in eval mode only
    agree(model, rand(3, 4, *[3] * axes))
    agree(nn.Sequential(CONVS[axes - 1](4, 4, 1), kind(4)).double(), rand(3, 4, *[3] * axes))


# Models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.mix(self.tokens(tokens)).tanh())


class Repeated(nn.Module):
    """One layer used three times, on inputs of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        once = self.norm(self.layer(x)).tanh()
        return self.norm(self.layer(once).relu()).sum(1) + self.layer(x[:, 0])


class Scaled(nn.Module):
    """Owns parameters of its own, beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        return self.inner(x) * self.scale + self.scale.square() * shift


class Keywords(nn.Module):
    """Dictionaries in and out, and layers called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.out = Scaled(), nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.scaled(batch["x"], shift=batch["shift"])
        return {"y": self.out(input=hidden)}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.SiLU(inplace=True),
            nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True), nn.Flatten(),
            nn.Linear(4 * 9, 5), nn.ReLU(inplace=True), nn.RMSNorm(5),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += 1
        return out


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        h = h + self.a(h)
        return h + self.b(h) + self.a(x)


class Recurrent(nn.Module):
    """A recurrent layer; `use` says which of its results the loss reads."""

    def __init__(self, kind: type[nn.RNNBase], use: str, **options: Any) -> None:
        super().__init__()
        self.rnn, self.use = kind(3, 4, batch_first=True, **options), use
        self.out = nn.Linear(4 * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: Tensor) -> Tensor:
        everything, state = self.rnn(x)
        final = state[0] if isinstance(state, tuple) else state
        hidden = {"outputs": everything, "state": final[-1:].movedim(0, 1), "both": everything + 0}[self.use]
        if self.use == "both":
            hidden = hidden + final[-1:].movedim(0, 1)
        return self.out(hidden) if self.use != "state" or not self.rnn.bidirectional else hidden


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x)
        return torch.cat([self.out(mixed), weights[..., :2].square()], 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "tied": (Tied, lambda n: (torch.arange(n * 5).view(n, 5) % 7,)),
    "repeated": (Repeated, lambda n: (rand(n, 3, 4),)),
    "own parameter": (Scaled, lambda n: (rand(n, 4),)),
    "in place": (InPlace, lambda n: (rand(n, 2, 3, 3),)),
    "residual": (Residual, lambda n: (rand(n, 4),)),
    "residual, positions": (Residual, lambda n: (rand(n, 6, 4),)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), lambda n: (rand(n, 2, 3, 3),)),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), lambda n: (rand(n, 4),)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), lambda n: (rand(n, 3), rand(n, 4, seed=1))),
    "batch norm, frozen": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), lambda n: (rand(n, 4),)),
    "lstm": (lambda: Recurrent(nn.LSTM, "outputs"), lambda n: (rand(n, 5, 3),)),
    "lstm state": (lambda: Recurrent(nn.LSTM, "state", num_layers=2), lambda n: (rand(n, 5, 3),)),
    "gru state": (lambda: Recurrent(nn.GRU, "state"), lambda n: (rand(n, 5, 3),)),
    "gru both": (lambda: Recurrent(nn.GRU, "both"), lambda n: (rand(n, 5, 3),)),
    "gru both ways": (lambda: Recurrent(nn.GRU, "outputs", bidirectional=True), lambda n: (rand(n, 5, 3),)),
    "attention": (Attention, lambda n: (rand(n, 5, 4),)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 3)), lambda n: (rand(n, 4),)),
    "weight norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 3))),
        lambda n: (rand(n, 4),),
    ),
    "weight norm, convolution": (
        lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), lambda n: (rand(n, 2, 4, 4),)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), lambda n: (rand(n, 5, 4),)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("records", [1, 4])
def test_models(name: str, records: int) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(1)
    agree(make().double(), *batch(records))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
def test_models_in_single_precision(name: str) -> None:
    """Other kernels than in double precision, above all for recurrent layers."""
    make, batch = MODELS[name]
    torch.manual_seed(1)
    single = [x.float() if x.is_floating_point() else x for x in batch(4)]
    agree(make(), *single, rtol=1e-3, atol=2e-5)


def test_dictionaries_and_keywords() -> None:
    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return bumpy(model(batch)["y"])

    agree(Keywords().double(), {"x": rand(4, 4), "shift": rand(4, 3, seed=1)}, losses=losses)


def test_old_weight_norm_is_right_or_refused() -> None:
    with pytest.warns(FutureWarning):
        model = nn.utils.weight_norm(nn.Linear(4, 3)).double()  # type: ignore[no-untyped-call]
    try:
        found = recorded(model, bumpy_losses, (rand(3, 4),))
    except Refused:
        return
    assert {"weight_g", "weight_v"} <= set(found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            for _ in range(2):
                hidden = checkpoint(self.body, hidden, use_reentrant=reentrant)
            return hidden

    model = Checkpointed().double()
    agree(model, rand(3, 4))
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parameters_are_left_out() -> None:
    model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Conv1d(1, 1, 1)))
    for name in ("0.weight", "0.bias", "2.bias"):
        model.get_parameter(name).requires_grad_(False)

    def losses(model: Any, x: Tensor) -> Tensor:
        return bumpy(model[:3](x))

    found = agree(model, rand(3, 4), losses=losses)
    assert set(found) == {"2.weight"}
    assert not model.get_parameter("0.weight").requires_grad


def test_parameters_that_no_loss_reached_are_absent() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    found = recorded(model, lambda m, x: bumpy(m["used"](x) + 0 * m["unused"](x).detach()), (torch.ones(2, 2),))
    assert set(found) == {"used.weight", "used.bias"}


# Precision

MIXED = [
    (lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), (5, 64)),
    (lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), (5, 7, 64)),
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)), (5, 3, 8, 8)),
    (lambda: nn.Conv2d(64, 64, 3, padding=1), (5, 64, 3, 3)),
]  # fmt: skip


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(False, id="backward outside autocast"),
        pytest.param(True, id="backward inside autocast"),
    ],
)
@pytest.mark.parametrize("case", range(len(MIXED)))
def test_mixed_precision(case: int, inside: bool) -> None:
    """Compute in bf16; norms and sums in float32 of exactly what was summed."""
    make, shape = MIXED[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(*shape)
    plain = naive_gradients(model, bumpy_losses, (x,))
    recorder = Recorder(model)
    weights = torch.rand(len(x))
    with recorder.recording(), torch.autocast("cpu", torch.bfloat16):
        losses = bumpy(model(x).float())
        if inside:
            found = recorder.backward(losses)
    if not inside:
        with recorder.recording():
            found = recorder.backward(losses)
    sums = {name: g.weighted_sum(weights) for name, g in found.items()}
    for name, gradient in found.items():
        assert sums[name].dtype == gradient.dense().dtype == torch.float32
        assert gradient.squared_norms.dtype == torch.float64
        rows = gradient.dense().double().flatten(1)
        torch.testing.assert_close(gradient.squared_norms.double(), rows.square().sum(1), rtol=1e-4, atol=0)
        torch.testing.assert_close(sums[name].double().flatten(), weights.double() @ rows, rtol=1e-4, atol=1e-5)
        true = plain[name].flatten(1).double()
        assert ((rows - true).norm() / true.norm()) < 0.05


def hostile_rows(records: int, positions: int, width: int, seed: int) -> Tensor:
    """Huge gradients that cancel between positions but for a small rest."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.tensor([1.0, -1.0]).repeat(positions // 2).view(1, -1, 1)
    direction = torch.randn(records, 1, width, generator=generator)
    size = 10.0 ** torch.randint(0, 6, (records, 1, 1), generator=generator)
    rest = torch.randn(records, positions, width, generator=generator)
    return sign * direction * size + rest * 10.0 ** torch.randint(-3, 2, (records, 1, 1), generator=generator)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_ghost_norm_is_never_below_the_true_one(kind: str, seed: int) -> None:
    """Constant inputs under output gradients of alternating sign: the sums cancel, the rounding errors do not."""
    torch.manual_seed(seed)
    records, positions, width = 8, 8, 256
    if kind == "linear":
        model: nn.Module = nn.Linear(width, width, bias=False)
        x = torch.randn(records, 1, width).expand(-1, positions, -1) * 10.0 ** torch.randint(-3, 4, (records, 1, 1))
        slopes = hostile_rows(records, positions, width, seed)
    else:
        model = nn.Conv1d(width, width, 1, bias=False)
        x = torch.randn(records, width, 1).expand(-1, -1, positions) * 10.0 ** torch.randint(-3, 4, (records, 1, 1))
        slopes = hostile_rows(records, positions, width, seed).mT

    def losses(model: nn.Module, x: Tensor, slopes: Tensor) -> Tensor:
        return (model(x) * slopes).flatten(1).sum(1)

    found = recorded(model, losses, (x, slopes))["weight"]
    exact = naive_gradients(model.double(), losses, (x.double(), slopes.double()))["weight"].flatten(1)
    assert (found.squared_norms.double().sqrt() >= exact.norm(dim=1) * (1 - 1e-6)).all()
    # What is added, record by record, after clipping to 1, is no longer than 1 either.
    factors = (1 / found.squared_norms.sqrt()).clamp(max=1)
    for i in range(records):
        only = torch.zeros(records).index_fill_(0, torch.tensor([i]), factors[i].item())
        assert found.weighted_sum(only).double().norm() <= 1 + 1e-4


# Records that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(6, 4), (5, 6)),
        (lambda: nn.Linear(40, 40), (5, 2, 40)),
        (lambda: nn.Linear(3, 3), (5, 9, 3)),
        (lambda: nn.Conv2d(2, 3, 3), (5, 2, 5, 5)),
        (lambda: nn.Conv2d(40, 40, 3, padding=1), (5, 40, 2, 2)),
        (lambda: nn.Conv2d(4, 4, 3, groups=4), (5, 4, 5, 5)),
        (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2)), (5, 6)),
        (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 1)), (5, 4, 3)),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.PReLU()), (5, 6)),
        (Repeated, (5, 2, 4)),
    ],
)
def test_dropped_records_are_exactly_zero_and_the_others_unchanged(
    make: Callable[[], nn.Module], shape: tuple[int, ...], bad: float
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(*shape)
    x[2] = bad
    lost = torch.tensor([False, False, True, False, False])
    losses: Losses = lambda m, x: bumpy(m(x)) * torch.where(lost, 1e30, 1.0)  # noqa: E731
    found, untouched = recorded(model, losses, (x,)), recorded(model, losses, (x,))
    weights = torch.tensor([1.0, -1.0, 5.0, 2.0, 0.5])
    clean = recorded(model, bumpy_losses, (x[~lost],))
    for name, gradient in found.items():
        gradient.drop(lost)
        rows = gradient.dense()
        assert not rows[2].any() and torch.isfinite(rows).all()
        torch.testing.assert_close(rows[~lost], untouched[name].dense()[~lost], rtol=0, atol=0)
        total = gradient.weighted_sum(weights)
        assert torch.isfinite(total).all()
        torch.testing.assert_close(total, clean[name].weighted_sum(weights[~lost]), rtol=1e-4, atol=1e-4)


def test_dropped_tokens() -> None:
    model, tokens = nn.Embedding(5, 3), torch.tensor([[0, 1, 1], [1, 2, 4], [4, 4, 4]])
    slopes = torch.tensor([1.0, math.nan, 1.0])
    found = recorded(model, lambda m, t: m(t).flatten(1).sum(1) * slopes, (tokens,))["weight"]
    assert found.squared_norms.isnan().tolist() == [False, True, False]
    found.drop(torch.tensor([False, True, False]))
    torch.testing.assert_close(
        found.weighted_sum(torch.ones(3)), torch.tensor([1.0, 2, 0, 0, 3]).view(-1, 1).expand(-1, 3)
    )
