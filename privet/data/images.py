"""The image sets: scikit-learn's digits, and MNIST, Fashion-MNIST and CIFAR-10 from their official files."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from privet.data.base import Data
from privet.errors import ConfigError

Bytes = NDArray[np.uint8]

_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_CIFAR_RECORD = 1 + 3 * 32 * 32

_DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

_DIGITS = tuple("0123456789")
_FASHION = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# ImageNet's published channel statistics, customary for CIFAR-10 too: they come from other, public images.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def digits(data_dir: Path | None) -> Data:
    """The 1,797 digits of 8 x 8 pixels inside scikit-learn: 1,437 to train on and 360 held out."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (half a second, for this one data set)
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    bunch = load_digits()
    pixels = (bunch.images / 16).astype(np.float32)[:, None]
    parts = train_test_split(pixels, bunch.target, test_size=360, stratify=bunch.target, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return Data(
        name="digits",
        train=TensorDataset(train_x, train_y.long()),
        test=TensorDataset(test_x, test_y.long()),
        classes=10,
        labels=_DIGITS,
        input_shape=(1, 8, 8),
        description="Pixels were divided by 16, the largest value of the format; no statistic of the "
        "records was used. A fixed fifth of the records is held out and not trained on.",
    )


def mnist(data_dir: Path | None) -> Data:
    """MNIST from its four IDX files."""
    return _idx_set(
        "mnist",
        _folders(data_dir, "mnist", "MNIST/raw"),
        labels=_DIGITS,
        source="They are the IDX files of yann.lecun.com/exdb/mnist, also at ossci-datasets.s3.amazonaws.com/mnist.",
    )


def fashion_mnist(data_dir: Path | None) -> Data:
    """Fashion-MNIST from its four IDX files, also where Debian's package puts them."""
    return _idx_set(
        "fashion-mnist",
        [*_folders(data_dir, "fashion-mnist", "FashionMNIST/raw"), _DEBIAN_FASHION_MNIST],
        labels=_FASHION,
        source="They come from github.com/zalandoresearch/fashion-mnist, or with Debian's package "
        "dataset-fashion-mnist.",
    )


def cifar10(data_dir: Path | None) -> Data:
    """CIFAR-10 from the six files of its binary version."""
    paths = _find(
        "cifar10",
        _folders(data_dir, "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin"),
        _CIFAR_FILES,
        source="They are in cifar-10-binary.tar.gz, the  binary version at www.cs.toronto.edu/~kriz/cifar.html.",
    )
    *train, test = map(_cifar_records, paths)
    return Data(
        name="cifar10",
        train=_cifar_tensors(np.concatenate(train)),
        test=_cifar_tensors(test),
        classes=10,
        labels=_CIFAR,
        input_shape=(3, 32, 32),
        description="Pixels were scaled to [0, 1] and standardised by ImageNet's published channel means "
        "and deviations; no statistic of the records was used. The official test set is held out and not "
        "trained on.",
    )


def _idx_set(name: str, folders: Sequence[Path], *, labels: tuple[str, ...], source: str) -> Data:
    paths = _find(name, folders, _IDX_FILES, source=source)
    train_x, train_y, test_x, test_y = map(_idx, paths)
    folder, image = paths[0].parent, train_x.shape[1:]
    return Data(
        name=name,
        train=_idx_tensors(folder, train_x, train_y, image),
        test=_idx_tensors(folder, test_x, test_y, image),
        classes=10,
        labels=labels,
        input_shape=(1, *image),
        description="Pixels were divided by 255, the largest value of the format; no statistic of the "
        "records was used. The official test set is held out and not trained on.",
    )


def _idx(path: Path) -> Bytes:
    """One IDX file: 0, 0, 8 for unsigned bytes, the number of axes, their big-endian sizes, the bytes."""
    raw = _content(path)
    axes = 3 if "idx3" in path.name else 1
    start = 4 + 4 * axes
    if raw[:4] != bytes((0, 0, 8, axes)) or len(raw) < start:
        raise ConfigError(f"{path} is not an IDX file of bytes with {axes} axes; fetch it again.")
    sizes = [int(size) for size in np.frombuffer(raw, ">u4", count=axes, offset=4)]
    if len(raw) - start != math.prod(sizes):
        raise ConfigError(
            f"{path} should hold {math.prod(sizes)} bytes after its header and holds {len(raw) - start}: "
            "it is damaged or incomplete; fetch it again."
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(sizes)


def _idx_tensors(folder: Path, images: Bytes, labels: Bytes, image: tuple[int, ...]) -> TensorDataset:
    if images.shape != (len(labels), *image) or not labels.size or labels.max() > 9:
        raise ConfigError(
            f"The files in {folder} do not belong together: {images.shape} images, {len(labels)} labels, "
            f"where images of {image} with as many labels of at most 9 are expected; fetch them again."
        )
    return TensorDataset(_scaled(images[:, None]), torch.from_numpy(labels.astype(np.int64)))


def _cifar_records(path: Path) -> Bytes:
    raw = np.frombuffer(_content(path), np.uint8)
    if not raw.size or raw.size % _CIFAR_RECORD or raw[::_CIFAR_RECORD].max() > 9:
        raise ConfigError(
            f"{path} is not made of CIFAR-10 records (a label up to 9, then 3072 pixels): it is damaged, "
            "incomplete or another file; fetch it again."
        )
    return raw.reshape(-1, _CIFAR_RECORD)


def _cifar_tensors(records: Bytes) -> TensorDataset:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    x = _scaled(records[:, 1:].reshape(-1, 3, 32, 32)).sub_(mean).div_(std)
    return TensorDataset(x, torch.from_numpy(records[:, 0].astype(np.int64)))


def _scaled(pixels: Bytes) -> Tensor:
    return torch.from_numpy(pixels.astype(np.float32)).div_(255)


def _folders(data_dir: Path | None, *names: str) -> list[Path]:
    return [] if data_dir is None else [*(data_dir / name for name in names), data_dir]


def _existing(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _find(name: str, folders: Sequence[Path], files: Sequence[str], *, source: str) -> list[Path]:
    """The files in the first folder that has them all, each of them plain or compressed."""
    for folder in folders:
        found = [path for file in files if (path := _existing(folder / file))]
        if len(found) == len(files):
            return found
    looked = f"Looked in {', '.join(map(str, folders))}." if folders else "No data folder was given."
    raise ConfigError(
        f"The files of {name!r} were not found. Expected {', '.join(files)} (each as it is or with .gz) in "
        f"one folder, named by data_dir (--data-dir). {looked} {source}"
    )


def _content(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch it again.") from error
