"""The input clip: its norms are the naive ones, and it goes wherever the model goes."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privet.nn import clip_inputs
from privet.nn.input_clip import NORMS, InputClip, Norm, clip_of


def naive_norm(layer: nn.Module, z: Tensor, norm: Norm) -> Tensor:
    """Patches in full, by unfold (which knows images only), in float64."""
    z = z.double()
    if isinstance(layer, nn.Linear):
        rows = z.flatten(1, -2) if z.dim() > 2 else z.unsqueeze(1)
        lengths = rows.norm(dim=2)
        return lengths.amax(1) if norm == "patch" else lengths.norm(dim=1)
    assert isinstance(layer, nn.Conv2d)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(z, layer._reversed_padding_repeated_twice, mode=mode)
    if norm == "input":
        return (z if mode == "constant" else padded).flatten(1).norm(dim=1)
    patches = F.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride)
    by_group = patches.unflatten(1, (layer.groups, -1)).norm(dim=2)  # records, groups, positions
    return by_group.flatten(1).amax(1) if norm == "patch" else by_group.norm(dim=2).amax(1)


LAYERS = {
    "rows": (nn.Linear(4, 2), (4,)),
    "positions": (nn.Linear(4, 2), (5, 4)),
    "a grid of positions": (nn.Linear(4, 2), (2, 3, 4)),
    "zeros": (nn.Conv2d(4, 2, 3, stride=2, padding=1), (4, 6, 5)),
    "same": (nn.Conv2d(4, 2, (2, 3), dilation=2, padding="same"), (4, 6, 5)),
    "groups": (nn.Conv2d(4, 2, 2, groups=2, dilation=2), (4, 6, 5)),
    "circular": (nn.Conv2d(4, 2, 3, padding=(1, 2), padding_mode="circular"), (4, 6, 5)),
    "reflect": (nn.Conv2d(4, 2, 3, padding=2, groups=2, padding_mode="reflect"), (4, 6, 5)),
    "replicate": (nn.Conv2d(4, 2, 3, stride=2, padding=3, padding_mode="replicate"), (4, 6, 5)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_the_naive_ones_and_each_record_is_scaled_to_the_bound(name: str, norm: Norm) -> None:
    layer, shape = copy.deepcopy(LAYERS[name])
    z = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 6).view(
        -1, *[1] * len(shape)
    )
    expected = naive_norm(layer, z, norm)
    clip = InputClip.before(layer, 2.0, norm)
    torch.testing.assert_close(clip.squared_norms(z).sqrt().double(), expected, rtol=1e-5, atol=0)
    for training in (True, False):
        clipped = clip.train(training)(z)
        after = naive_norm(layer, clipped, norm)
        assert float(after.max()) <= 2
        torch.testing.assert_close(after, expected.clamp(max=2.0), rtol=2e-4, atol=0)
        torch.testing.assert_close(clipped[expected < 2], z[expected < 2], rtol=0, atol=0)
        seen = layer.train(training)(z)
        torch.testing.assert_close(seen, layer.forward(clipped), rtol=0, atol=0)
        torch.testing.assert_close(layer(input=z), seen, rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["patch", "frobenius"])
def test_settings_that_were_changed_later_count(norm: Norm) -> None:
    """Torch goes by the attributes and the weight as they are now. With stride 2, other padding means other patches."""
    shifted, widened = nn.Conv2d(1, 2, 2, stride=2), nn.Conv2d(1, 2, 1)
    shifted.padding = (1, 1)
    widened.weight = nn.Parameter(torch.randn(2, 1, 3, 3))
    z = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    for layer, patches in ((shifted, F.unfold(z, 2, padding=1, stride=2)), (widened, F.unfold(z, 3))):
        assert layer(z).flatten(2).shape[2] == patches.shape[2]
        lengths = patches.norm(dim=1)
        expected = lengths.amax(1) if norm == "patch" else lengths.norm(dim=1)
        found = InputClip.before(layer, 2.0, norm).squared_norms(z).sqrt()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_its_gradient_is_that_of_scaling_by_constants(name: str, norm: Norm) -> None:
    layer, shape = copy.deepcopy(LAYERS[name])
    clip = InputClip.before(layer.double(), 2.0, norm)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    x *= torch.tensor([0.01, 1.0, 3.0, 100.0]).view(-1, *[1] * len(shape))
    x.requires_grad_()
    g = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    (found,) = torch.autograd.grad(clip(x), x, g)
    factors = (2.0 / naive_norm(layer, x.detach(), norm)).clamp(max=1)
    torch.testing.assert_close(found, g * factors.view(-1, *[1] * len(shape)), rtol=1e-3, atol=1e-4)


def test_no_records_at_all() -> None:
    for name, (layer, shape) in LAYERS.items():
        for norm in NORMS:
            clip = InputClip.before(copy.deepcopy(layer), 2.0, norm)
            assert clip(torch.zeros(0, *shape, requires_grad=True)).shape == (0, *shape), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ["rows", "positions", "circular"])
def test_a_record_that_is_not_finite_becomes_zero_and_leaves_the_others_alone(name: str, bad: float) -> None:
    layer, shape = LAYERS[name]
    clip = InputClip.before(copy.deepcopy(layer), 0.5, "patch")
    good = torch.randn(3, *shape, requires_grad=True)
    alone = clip(good)
    (expected,) = torch.autograd.grad(alone.square().sum(), good)
    x = good.detach().clone()
    x[1].view(-1)[2] = bad
    x.requires_grad_()
    among = clip(x)
    assert bool((among[1] == 0).all())
    others = torch.tensor([0, 2])
    torch.testing.assert_close(among[others], alone[others], rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(among.square().sum(), x)
    torch.testing.assert_close(gradient[others], expected[others])


# bf16 and others


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("norm", NORMS)
def test_the_bound_holds_in_every_precision(dtype: torch.dtype, norm: Norm) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular").to(dtype)
    clip = InputClip.before(layer, 0.7, norm)
    clipped = clip(torch.randn(20, 3, 6, 6).to(dtype) * 5)
    assert clipped.dtype == dtype
    assert 0.98 < float(naive_norm(layer, clipped, norm).max()) / 0.7 <= 1


@pytest.mark.parametrize("bound", [0.01, 0.37, 1.0, 900.0, 1500.0, 8000.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_bound_holds_after_the_model_changed_its_precision(dtype: torch.dtype, bound: float) -> None:
    """The bound itself must not be rounded to 16 bits, or squared in them."""
    layer = nn.Linear(100, 1)
    InputClip.before(layer, bound, "patch")
    layer.to(dtype)
    clip = clip_of(layer)
    assert clip is not None
    clipped = clip(torch.full((1, 100), 6e4).to(dtype))
    assert float(clipped.double().norm()) <= float(clip.bound)


def test_under_autocast_norms_are_those_of_full_precision() -> None:
    layer = nn.Linear(64, 8)
    clip = InputClip.before(layer, 1.0, "patch")
    x = torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        clipped, output = clip(x), layer(x)
    assert clipped.dtype == torch.float32
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(clipped, clip(x), rtol=0, atol=0)


# It goes with the model


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip


def clipped_network() -> nn.Sequential:
    model = network()
    InputClip.before(model[0], 0.8, "frobenius")
    InputClip.before(model[4], 0.5, "input")
    return model


def images() -> Tensor:
    """An ordinary record, a small one that is not clipped, a huge one, and one that is not finite."""
    x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    return x * torch.tensor([1.0, 0.01, 1e4, math.nan]).view(-1, 1, 1, 1)


def same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(other(images()), model(images()), rtol=0, atol=0)
    assert [repr(clip_of(m)) for m in other.modules()] == [repr(clip_of(m)) for m in model.modules()]


def test_a_clipped_model_is_another_function() -> None:
    assert not torch.allclose(clipped_network()(images())[0], network()(images())[0])


def test_copies_have_clips_of_their_own() -> None:
    model = clipped_network()
    other = copy.deepcopy(model)
    same(model, other)
    clip = clip_of(other[0])
    assert clip is not None and clip is not clip_of(model[0])
    clip.set(7.0, "patch")
    same(model, clipped_network())


def test_pickle_and_torch_save() -> None:
    model = clipped_network()
    same(model, pickle.loads(pickle.dumps(model)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    same(model, torch.load(file, weights_only=False))


def test_a_state_dict_brings_bounds_and_norms_along() -> None:
    model = clipped_network()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = clip_inputs(network())
    assert math.isinf(float(other[0].input_clip.bound))
    other.load_state_dict(torch.load(file, weights_only=True))
    same(model, other)


def test_a_state_dict_from_before_the_clips_still_loads() -> None:
    plain = network()
    with torch.no_grad():
        plain[4].weight.add_(1)
    model = clipped_network()
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model[4].weight, plain[4].weight)
    assert [repr(clip_of(m)) for m in model] == [repr(clip_of(m)) for m in clipped_network()]
    with pytest.raises(RuntimeError, match="Missing key"):  # nothing else is forgiven
        model.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "4.bias"})


def test_attached_twice_it_is_one_clip() -> None:
    layer = nn.Linear(3, 2)
    first = InputClip.before(layer, 1.0, "patch")
    assert InputClip.before(layer, 2.0, "input") is first
    assert (float(first.bound), first.norm, len(layer._forward_pre_hooks)) == (2.0, "input", 1)


def test_clip_inputs_changes_nothing_before_bounds_are_loaded() -> None:
    finite = images()[:3]
    model = clip_inputs(network())
    assert [clip_of(m) is not None for m in model] == [True, False, False, False, True]
    torch.testing.assert_close(model(finite), network()(finite))


def test_export() -> None:
    model = clipped_network().eval()
    exported = torch.export.export(model, (images(),)).module()
    torch.testing.assert_close(exported(images()), model(images()))
    ordinary = torch.randn(4, 2, 4, 4)
    torch.testing.assert_close(exported(ordinary), model(ordinary))


def test_onnx(tmp_path: Path) -> None:
    for needed in ("onnx", "onnxscript"):
        pytest.importorskip(needed)
    runtime = pytest.importorskip("onnxruntime")
    model = clipped_network().eval()
    file = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (images(),), file, dynamo=True, verbose=False)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for x in (images(), torch.randn(4, 2, 4, 4)):
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)
