"""privet.nn: the ready networks are the ones the papers name, and GroupNorm keeps records apart."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from privet.cli import main
from privet.errors import ConfigError, Refused
from privet.nn import EXAMPLE_SHAPES, MODELS, batchnorm_to_groupnorm, build

PARAMETERS = {
    "mnist-cnn": 26_010,
    "cifar-cnn": 550_570,
    # 16 filters of 8 x 8, 32 of 4 x 4 x 16, then 3 x 3 x 32 numbers to 32 and to 10: no bias
    "backprop-mnist": 16 * 64 + 32 * 256 + 288 * 32 + 32 * 10,
    "backprop-cifar": (
        4 * (3 * 32 + 32 * 32 + 32 * 64 + 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 256 * 256)
        + 21 * 21 * 256 * 256
        + 256 * 10
    ),
    "scatter-mnist-cnn": 81 * 9 * 16 + 16 + 16 * 9 * 32 + 32 + 2 * 2 * 32 * 32 + 32 + 32 * 10 + 10,
    "scatter-cifar-cnn": 243 * 9 * 64 + 3 * 64 * 9 * 64 + 4 * 64 + 2 * 2 * 64 * 10 + 10,
    "linear": 81 * 7 * 7 * 10 + 10,
    "lipschitz-mlp": 500 * 128 + 128 * 128 + 128 * 10,
    "lipschitz-lenet": 6 * 25 + 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10,
    "lipschitz-vgg": 9 * (3 * 32 + 32 * 64 + 64 * 128) + 128 * 16 * 128 + 128 * 10,
    "lipschitz-resnet": 9 * (3 * 32 + 2 * 32 * 32 + 32 * 64 + 2 * 64 * 64) + 64 * 64 * 10,
    "lipschitz-mixer": 3 * 16 * 64 + 4 * 64 * 64 + 64 * 64 * 10,
    "bn-lenet5": 61_990,
    "convnet5": 132_042,
    "resnet18-gn": 11_173_962,
    "resnet18-bn": 11_173_962,
    "mlp": 500 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10,
    # per layer: qkv, out, up, down and two norms, as nn.TransformerEncoderLayer(128, 4, 512) has them
    "transformer": 8000 * 128 + 2 * 198_272 + 128 * 10 + 10,
}

WITH_BATCH_NORM = ["bn-lenet5", "convnet5", "resnet18-bn"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def example(name: str, batch: int) -> Tensor:
    shape = (batch, *EXAMPLE_SHAPES[name])
    return torch.randint(8000, shape) if name == "transformer" else torch.randn(shape)


@pytest.mark.parametrize("name", MODELS)
class TestEveryModel:
    def test_has_its_size_and_shape(self, name: str) -> None:
        model = build(name, input_shape=EXAMPLE_SHAPES[name], classes=10)
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
        x = example(name, 2)
        assert model(x).shape == (2, 10)
        if x.dim() == 4:
            in_other_layout = model.to(memory_format=torch.channels_last)(
                x.contiguous(memory_format=torch.channels_last)
            )
            torch.testing.assert_close(in_other_layout, model.to(memory_format=torch.contiguous_format)(x))

    def test_takes_an_empty_batch(self, name: str) -> None:
        model = build(name, input_shape=EXAMPLE_SHAPES[name], classes=3)
        out = model(example(name, 0))
        assert out.shape == (0, 3)
        out.sum().backward()

    def test_records_do_not_meet(self, name: str) -> None:
        """But through the BatchNorm of a training pass, which is why such models need batch clipping."""
        model = build(name, input_shape=EXAMPLE_SHAPES[name], classes=3, seed=0)
        x = example(name, 3)
        other = x.clone()
        other[1:] = example(name, 2)
        meet = not torch.allclose(model(x)[0], model(other)[0], rtol=1e-4, atol=1e-5)
        assert meet == (name in WITH_BATCH_NORM)
        model.eval()
        torch.testing.assert_close(model(x)[0], model(other)[0])

    def test_seed_fixes_the_weights_and_leaves_the_global_generator(self, name: str) -> None:
        before = torch.get_rng_state()
        one, two, three = (build(name, input_shape=EXAMPLE_SHAPES[name], classes=2, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(torch.get_rng_state(), before)
        for key, value in one.state_dict().items():
            assert torch.equal(value, two.state_dict()[key])
        assert any(not torch.equal(v, three.state_dict()[k]) for k, v in one.state_dict().items())

    def test_has_nothing_in_place(self, name: str) -> None:
        model = build(name, input_shape=EXAMPLE_SHAPES[name], classes=2)
        assert not any(getattr(layer, "inplace", False) for layer in model.modules())

    def test_keeps_nothing_but_the_running_statistics_of_batch_norm(self, name: str) -> None:
        model = build(name, input_shape=EXAMPLE_SHAPES[name], classes=2)
        norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
        assert bool(norms) == (name in WITH_BATCH_NORM)
        assert len(list(model.buffers())) == 3 * len(norms)
        for norm in norms:  # as new: the making of the model has shown them nothing
            assert norm.training and norm.num_batches_tracked == 0
            assert not norm.running_mean.any() and (norm.running_var == 1).all()


def test_mnist_cnn_is_table_1() -> None:
    layers = list(build("mnist-cnn", input_shape=(1, 28, 28), classes=10))
    assert [type(layer).__name__ for layer in layers] == (
        ["Conv2d", "Tanh", "MaxPool2d"] * 2 + ["Flatten", "Linear", "Tanh", "Linear"]
    )
    assert (layers[0].kernel_size, layers[0].stride, layers[0].padding) == ((8, 8), (2, 2), (2, 2))
    assert (layers[3].kernel_size, layers[3].stride, layers[3].padding) == ((4, 4), (2, 2), (0, 0))
    assert layers[2].stride == layers[5].stride == 1


def shapes_of_convolutions(model: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _layer, _args, out: found.append(tuple(out.shape[1:])))
    model(x)
    return found


@pytest.mark.parametrize(
    ("name", "kinds", "parameters"),
    [
        ("scatter-mnist-cnn", "Conv Tanh Conv Tanh Flatten Linear Tanh Linear", 33_066),
        ("scatter-cifar-cnn", "Conv Tanh Max Conv Tanh Flatten Linear", 187_210),
    ],
)
def test_networks_on_scattering_features_as_tramer_and_boneh_have_them(name: str, kinds: str, parameters: int) -> None:
    model = build(name, input_shape=EXAMPLE_SHAPES[name], classes=10, original=True)
    found = [type(layer).__name__ for layer in model.children()]
    assert all(one.startswith(kind) for one, kind in zip(found, kinds.split(), strict=True)), found
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(example(name, 2)).shape == (2, 10)


def test_backprop_mnist_is_figure_3() -> None:
    model = build("backprop-mnist", input_shape=(1, 28, 28), classes=10)
    assert [type(layer).__name__ for layer in model] == (
        ["Conv2d", "ReLU", "MaxPool2d"] * 2 + ["Flatten", "Linear", "ReLU", "Linear"]
    )
    assert (model[0].kernel_size, model[0].stride) == ((8, 8), (2, 2))
    assert (model[3].kernel_size, model[3].stride) == ((4, 4), (2, 2))
    assert model[2].kernel_size == model[5].kernel_size == 2
    assert shapes_of_convolutions(model, torch.randn(2, 1, 28, 28)) == [(16, 11, 11), (32, 4, 4)]
    # Pools of stride 2 would leave 1 x 1 for the second one.
    model[2].stride = model[5].stride = 2
    with pytest.raises(RuntimeError, match="too small"):
        model(torch.randn(2, 1, 28, 28))


def test_backprop_mnist_with_all_options_is_mnist_cnn() -> None:
    options = {"padding": True, "bias": True, "activation": "tanh"}
    one = build("backprop-mnist", input_shape=(1, 28, 28), classes=10, seed=3, **options)
    two = build("mnist-cnn", input_shape=(1, 28, 28), classes=10, seed=3)
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(one(x), two(x))


def test_backprop_cifar_is_figure_4() -> None:
    model = build("backprop-cifar", input_shape=(3, 32, 32), classes=10)
    pair = ["Conv2d", "ReLU"] * 2
    assert [type(layer).__name__ for layer in model] == (
        [*pair, "AvgPool2d"] * 3 + [*pair, "Flatten", "Linear", "ReLU", "Linear"]
    )
    assert {layer.kernel_size for layer in model if isinstance(layer, nn.Conv2d)} == {(2, 2)}
    sizes = [(32, 31), (32, 30), (64, 28), (64, 27), (128, 25), (128, 24), (256, 22), (256, 21)]
    found = shapes_of_convolutions(model, torch.randn(1, 3, 32, 32))
    assert found == [(width, size, size) for width, size in sizes]
    for layer in model:
        if isinstance(layer, nn.AvgPool2d):
            assert (layer.kernel_size, layer.stride) == (2, 1)
            layer.stride = 2  # would leave nothing for the last convolution
    with pytest.raises(RuntimeError, match="size"):
        model(torch.randn(1, 3, 32, 32))


def test_backprop_cifar_with_padding_keeps_sizes_and_halves_them_in_pools() -> None:
    model = build("backprop-cifar", input_shape=(3, 32, 32), classes=10, padding=True)
    assert shapes_of_convolutions(model, torch.randn(1, 3, 32, 32))[1::2] == [
        (32, 32, 32),
        (64, 16, 16),
        (128, 8, 8),
        (256, 4, 4),
    ]
    assert sum(p.numel() for p in model.parameters()) == 1_571_712


@pytest.mark.parametrize("name", ["backprop-mnist", "backprop-cifar"])
def test_the_networks_of_backpropagation_clipping_take_options(name: str) -> None:
    """Small images, as weights of the first linear layer grow with them."""
    shape = (1, 22, 22) if name == "backprop-mnist" else (3, 13, 13)
    plain, with_bias, tanh = (
        build(name, input_shape=shape, classes=4, **options) for options in ({}, {"bias": True}, {"activation": "tanh"})
    )
    layers = (nn.Conv2d, nn.Linear)
    assert all(layer.bias is None for layer in plain if isinstance(layer, layers))
    assert all(layer.bias is not None for layer in with_bias if isinstance(layer, layers))
    assert sum(isinstance(layer, nn.ReLU) for layer in plain) == sum(isinstance(layer, nn.Tanh) for layer in tanh) > 0
    assert not any(isinstance(layer, nn.ReLU) for layer in tanh)


@pytest.mark.parametrize("size", [28, 32])
def test_bn_lenet5_is_table_2(size: int) -> None:
    model = build("bn-lenet5", input_shape=(1, size, size), classes=10)
    assert [type(layer).__name__ for layer in model] == (
        ["Conv2d", "BatchNorm2d", "Tanh", "AvgPool2d"] * 2
        + ["Conv2d", "BatchNorm2d", "Tanh", "Flatten", "Linear", "Tanh", "Linear"]
    )
    # The paper counts L = 8 layers.
    assert sum(any(True for _ in layer.parameters()) for layer in model) == 8
    assert shapes_of_convolutions(model, torch.randn(2, 1, size, size)) == [(6, 28, 28), (16, 10, 10), (120, 1, 1)]


def test_convnet5_is_table_1() -> None:
    model = build("convnet5", input_shape=(3, 32, 32), classes=10)
    assert [type(layer).__name__ for layer in model] == (
        ["Conv2d", "BatchNorm2d", "ReLU", "AvgPool2d"] * 3
        + ["Conv2d", "BatchNorm2d", "ReLU", "AdaptiveAvgPool2d", "Flatten", "Linear"]
    )
    sizes = [(32, 32, 32), (64, 16, 16), (64, 8, 8), (128, 4, 4)]
    assert shapes_of_convolutions(model, torch.randn(2, 3, 32, 32)) == sizes


def test_convnet5_without_batch_norm() -> None:
    model = build("convnet5", input_shape=(3, 32, 32), classes=10, batch_norm=False)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model)
    assert sum(p.numel() for p in model.parameters()) == 131_466


def test_resnet18_with_batch_norm_is_the_other_with_another_norm() -> None:
    """Turned into GroupNorm it is resnet18-gn to the last weight; and the paper counts L = 62 in it."""
    batch, group = (build(f"resnet18-{kind}", input_shape=(3, 16, 16), classes=10, seed=1) for kind in ("bn", "gn"))
    assert len(list(batch.parameters())) == 62
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(batchnorm_to_groupnorm(batch)(x), group(x))


@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_batch_norm_is_refused_where_each_record_is_clipped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--model", name, "--sampling", "partition", "--batch", "512", "--epochs", "1", "--threads", "1", "--quiet"]
    assert main(["train", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("privet: ") and said.count("\n") == 1
    assert "BatchNorm2d" in said and "batchnorm_to_groupnorm" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["bn-lenet5", "convnet5"])
def test_batch_norm_trains_by_batch_clipping_with_public_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--model", name, "--method", "batch", "--public", "0.1", "--sampling", "partition", "--batch", "512"]
    code = main(["train", *args, "--epochs", "1", "--threads", "1", "--quiet"])
    assert code == 0, capsys.readouterr().err


def test_convnet5_without_batch_norm_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[model]\nname = "convnet5"\nbatch_norm = false\n')
    args = ["--sampling", "partition", "--batch", "512", "--epochs", "1", "--threads", "1", "--quiet"]
    assert main(["train", "run.toml", *args]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mnist-cnn", (3, 32, 40)),
        ("cifar-cnn", (1, 8, 8)),
        ("bn-lenet5", (3, 8, 29)),
        ("bn-lenet5", (3, 32, 40)),
        ("convnet5", (1, 8, 8)),
        ("resnet18-gn", (1, 8, 8)),
    ],
)
def test_other_image_sizes(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, input_shape=shape, classes=4)(torch.randn(2, *shape)).shape == (2, 4)


def test_transformer_layer_is_torchs_own() -> None:
    reference = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    layer = build("transformer", input_shape=(9,), classes=2).layers[0]
    pairs = [
        (layer.qkv.weight, reference.self_attn.in_proj_weight),
        (layer.qkv.bias, reference.self_attn.in_proj_bias),
        *zip(layer.out.parameters(), reference.self_attn.out_proj.parameters(), strict=True),
        *zip(layer.up.parameters(), reference.linear1.parameters(), strict=True),
        *zip(layer.down.parameters(), reference.linear2.parameters(), strict=True),
        *zip(layer.norm1.parameters(), reference.norm1.parameters(), strict=True),
        *zip(layer.norm2.parameters(), reference.norm2.parameters(), strict=True),
    ]
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(torch.randn_like(ours) / 10)
            theirs.copy_(ours)
    x = torch.randn(3, 9, 128)
    torch.testing.assert_close(layer(x), reference(x))


def test_mlp_options() -> None:
    model = build("mlp", input_shape=(2, 3), classes=1, hidden=[7], activation="relu")
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear", "ReLU", "Linear"]
    assert model(torch.randn(5, 2, 3)).shape == (5, 1)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("resnet", {}, "Unknown model 'resnet'.*mnist-cnn, cifar-cnn, .*mlp, transformer"),
        ("mnist-cnn", {"input_shape": (1, 8, 8)}, r"\(1, 8, 8\) are too small for 'mnist-cnn'"),
        ("cifar-cnn", {"input_shape": (64,)}, "takes images"),
        ("bn-lenet5", {"input_shape": (64,)}, "'bn-lenet5' takes images"),
        ("backprop-mnist", {"input_shape": (1, 8, 8)}, "too small for 'backprop-mnist'"),
        ("backprop-mnist", {"activation": "gelu"}, "activation='gelu'"),
        ("backprop-cifar", {"input_shape": (64,)}, "'backprop-cifar' takes images"),
        ("convnet5", {"input_shape": (3, 7, 32)}, "too small for 'convnet5'"),
        ("resnet18-bn", {"input_shape": (64,)}, "'resnet18-bn' takes images"),
        ("transformer", {"input_shape": (1, 8, 8)}, "sequences of tokens"),
        ("transformer", {"input_shape": (8,), "heads": 3}, "heads=3"),
        ("mlp", {"classes": 0}, "classes=0"),
        ("mlp", {"input_shape": ()}, r"input_shape=\(\)"),
        ("mlp", {"depth": 3}, "depth"),
        ("mlp", {"activation": "gelu"}, "activation='gelu'.*tanh, relu"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(name, **{"input_shape": (1, 28, 28), "classes": 10, **arguments})


def test_transformer_refuses_numbers() -> None:
    with pytest.raises(ConfigError, match="whole-numbered tokens"):
        build("transformer", input_shape=(4,), classes=2)(torch.randn(2, 4))


OWN = """
import torch
from torch import nn

def plain():
    return nn.Linear(3, 2)

def shaped(input_shape, *, classes, bias=True):
    return nn.Linear(input_shape[0], classes, bias=bias)

def loose(**kwargs):
    assert not kwargs
    return nn.Linear(3, 2)

class Net(nn.Linear):
    def __init__(self, classes):
        super().__init__(3, classes)

def needs(size):
    return nn.Linear(size, size)

number = 3

def wrong():
    return number
"""


class TestOwnFactory:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_privet_nets.py").write_text(OWN)
        (tmp_path / "broken_privet_nets.py").write_text("import no_such_module_at_all")
        monkeypatch.chdir(tmp_path)
        sys.modules.pop("own_privet_nets", None)

    @pytest.mark.parametrize("factory", ["plain", "loose", "shaped", "Net"])
    def test_is_called_with_what_it_names(self, factory: str) -> None:
        path = list(sys.path)
        model = build(f"own_privet_nets:{factory}", input_shape=(3,), classes=2, seed=1)
        assert (model.in_features, model.out_features) == (3, 2)
        assert torch.equal(
            model.weight, build(f"own_privet_nets:{factory}", input_shape=(3,), classes=2, seed=1).weight
        )
        assert sys.path == path

    def test_gets_options(self) -> None:
        assert build("own_privet_nets:shaped", input_shape=(3,), classes=2, bias=False).bias is None

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("no_such_nets:net", "'no_such_nets' failed.*No module named"),
            ("broken_privet_nets:net", "No module named 'no_such_module_at_all'"),
            (":net", "importing '' failed"),
            ("own_privet_nets:absent", "has no 'absent'"),
            ("own_privet_nets:", "has no ''"),
            ("own_privet_nets:number", "is a int"),
            ("own_privet_nets:wrong", "returned a int"),
            ("own_privet_nets:needs", "missing a required argument: 'size'"),
        ],
    )
    def test_that_cannot_be_used_is_refused(self, name: str, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            build(name, input_shape=(3,), classes=2)


class TestGroupNorm:
    @pytest.mark.parametrize(
        ("channels", "groups", "count"),
        [(64, 32, 32), (48, 32, 24), (37, 32, 1), (31, 32, 31), (45, 32, 15), (1, 32, 1), (64, 7, 4)],
    )
    def test_takes_the_largest_divisor(self, channels: int, groups: int, count: int) -> None:
        new = batchnorm_to_groupnorm(nn.BatchNorm2d(channels, eps=0.1), groups=groups)
        assert isinstance(new, nn.GroupNorm)
        assert (new.num_groups, new.num_channels, new.eps) == (count, channels, 0.1)
        x = torch.randn(3, channels, 4, 4)
        expected = nn.GroupNorm(count, channels, eps=0.1)(x)
        torch.testing.assert_close(new(x), expected)

    @pytest.mark.parametrize(("channels", "count"), [(256, 32), (128, 16), (64, 8), (20, 2), (31, 1), (7, 1), (3, 1)])
    @pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
    def test_keeps_the_signal_where_there_is_no_extent(self, kind: type[nn.Module], channels: int, count: int) -> None:
        new = batchnorm_to_groupnorm(kind(channels))
        assert new.num_groups == count
        x = torch.randn(4, channels, dtype=torch.float64, requires_grad=True)
        y = new.double()(x)
        # A group of one channel would give 0 and a group of two ±1, both without gradient.
        (grad,) = torch.autograd.grad(y @ torch.randn(channels, dtype=torch.float64), x, torch.ones(4).double())
        assert (grad.norm(dim=1) > 1e-3).all()
        assert new.float()(torch.randn(2, channels, 5)).shape == (2, channels, 5)

    @pytest.mark.parametrize("channels", [1, 2])
    def test_refuses_what_would_erase_its_input(self, channels: int) -> None:
        model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(channels))
        with pytest.raises(Refused, match=rf"'1' \(BatchNorm1d\) has {channels} channel"):
            batchnorm_to_groupnorm(model)
        assert isinstance(model[0], nn.BatchNorm2d)  # nothing was changed

    @pytest.mark.parametrize(
        ("layer", "x"),
        [
            (nn.BatchNorm1d(12), torch.randn(4, 12)),
            (nn.BatchNorm1d(12), torch.randn(4, 12, 5)),
            (nn.BatchNorm2d(7), torch.randn(4, 7, 3, 3)),
            (nn.BatchNorm3d(6), torch.randn(4, 6, 2, 2, 2)),
            (nn.SyncBatchNorm(10), torch.randn(4, 10)),
        ],
    )
    def test_keeps_records_apart(self, layer: nn.Module, x: Tensor) -> None:
        new = batchnorm_to_groupnorm(nn.Sequential(layer)).train()
        x.requires_grad_()
        (grad,) = torch.autograd.grad((new(x)[0] * torch.randn_like(x[0])).sum(), x)
        assert grad[0].abs().sum() > 0
        assert grad[1:].abs().sum() == 0
        assert not list(new.buffers())

    def test_keeps_parameters_dtype_and_mode(self) -> None:
        norm = nn.BatchNorm2d(6, dtype=torch.float64).eval()
        nn.init.normal_(norm.weight)
        norm.bias.requires_grad_(False)
        model = nn.Sequential(norm)
        new = batchnorm_to_groupnorm(model)
        assert new is model
        assert new[0].weight is norm.weight
        assert new[0].bias is norm.bias
        assert not new[0].training
        assert new[0](torch.randn(2, 6, 3, 3, dtype=torch.float64)).dtype == torch.float64
        assert set(new.state_dict()) == {"0.weight", "0.bias"}

    def test_without_affine(self) -> None:
        new = batchnorm_to_groupnorm(nn.BatchNorm2d(6, affine=False))
        assert not new.affine
        assert not list(new.parameters())

    def test_shared_layers_stay_shared(self) -> None:
        shared = nn.BatchNorm2d(8)
        inner = nn.ModuleDict({"a": shared, "again": shared})
        model = nn.Sequential(shared, inner, nn.Sequential(nn.Conv2d(8, 8, 1), shared), inner)
        batchnorm_to_groupnorm(model)
        assert isinstance(model[0], nn.GroupNorm)
        assert model[0] is model[1]["a"] is model[1]["again"] is model[2][1]
        assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())

    def test_leaves_everything_else(self) -> None:
        model = build("resnet18-gn", input_shape=(3, 32, 32), classes=2)
        before = copy.deepcopy(model.state_dict())
        assert batchnorm_to_groupnorm(model) is model
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    def test_refuses_lazy_and_unknown_kinds(self) -> None:
        class WithActivation(nn.BatchNorm2d):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).relu()

        for layer in (nn.LazyBatchNorm2d(), WithActivation(3)):
            with pytest.raises(Refused, match=type(layer).__name__):
                batchnorm_to_groupnorm(nn.Sequential(layer))

    @pytest.mark.parametrize("groups", [0, -1, 1.5, True])
    def test_refuses_senseless_groups(self, groups: object) -> None:
        with pytest.raises(ConfigError, match="groups="):
            batchnorm_to_groupnorm(nn.BatchNorm2d(4), groups=groups)  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", ["a", [-1], [10**12]])
def test_options_that_a_network_cannot_be_made_with_are_refused(hidden: object) -> None:
    with pytest.raises(ConfigError, match=r"Model 'mlp' cannot be made with the options \{'hidden'"):
        build("mlp", input_shape=(4,), classes=2, hidden=hidden)
