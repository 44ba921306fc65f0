"""Scattering features: wavelets that were fixed before any image was seen, so that they cost no privacy.

Tramèr and Boneh (2021) train small private models on them and beat private training on pixels. The transform is
kymatio's, an extra. It takes milliseconds a record, so what it gives is kept on the disk.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from privet.checkpoint import write_whole
from privet.data.base import Data
from privet.errors import ConfigError

SCALE, ANGLES, ORDER = 2, 8, 2
"""J, L and the order of Tramèr and Boneh, and of the losing-less paper: 81 features of each channel."""
_FORMAT = "privet scattering 1"
_BATCH = 128
_SMALLEST = 2**SCALE
_WORTH_SAYING = 10.0
"""Seconds that a computation may take without a word."""
_BLOCK = 2**24

log = logging.getLogger("privet")

Transform = Callable[[Tensor], Tensor]


def scattering(data: Data, *, cache: Path | None = None) -> Data:
    """The same records, each image replaced by its scattering coefficients.

    C x H x W becomes 81·C x H/4 x W/4: a wavelet transform with J = 2 scales and L = 8 angles, moduli, and a second
    transform of those, on the pixels as the data set scales them (by constants of its format). With `cache`, a folder,
    features are kept there and computed only once for the same records; a file that is damaged, or was made from other
    records or by another version, is not used.

    The cache is as sensitive as the records: whoever reads it can all but rebuild the images. Its files can be read by
    their owner only; delete them when the records are to be deleted.

    Formal guarantee: a record's features are a function of that record alone.
    """
    if len(data.input_shape) != 3:
        raise ConfigError(
            f"Scattering features are of images, (channels, height, width), and the records of {data.name!r} have the "
            f"shape {data.input_shape}: leave --features out."
        )
    channels, height, width = data.input_shape
    if min(height, width) < _SMALLEST:
        raise ConfigError(
            f"Scattering features need images of at least {_SMALLEST} x {_SMALLEST} pixels, and those of "
            f"{data.name!r} have {height} x {width}: leave --features out."
        )
    transform = _transform((height, width))
    paths = 1 + ANGLES * SCALE + ANGLES**2 * (SCALE * (SCALE - 1) // 2)
    shape = (channels * paths, height // 2**SCALE, width // 2**SCALE)

    def of(records: TensorDataset) -> TensorDataset:
        x, y = records.tensors
        return TensorDataset(_features(x, shape, transform, cache), y)

    return replace(
        data,
        train=of(data.train),
        test=of(data.test),
        public=None if data.public is None else of(data.public),
        input_shape=shape,
        description=f"{data.description} Each image was replaced by its scattering coefficients (J = {SCALE}, L = "
        f"{ANGLES}, order {ORDER}), computed from that image alone.",
    )


def _transform(image: tuple[int, int]) -> Transform:
    try:  # this module and not kymatio.torch, which also imports what does not work with SciPy 1.17
        frontend = importlib.import_module("kymatio.scattering2d.frontend.torch_frontend")
    except ImportError as error:
        raise ConfigError(f'Scattering features need kymatio ({error}): pip install "privet[scattering]".') from error
    scatter = frontend.ScatteringTorch2D(SCALE, image, L=ANGLES, max_order=ORDER)

    @torch.inference_mode()
    def transform(x: Tensor) -> Tensor:
        return scatter(x.contiguous()).flatten(1, 2).contiguous()  # type: ignore[no-any-return]

    return transform


def _features(x: Tensor, shape: tuple[int, ...], transform: Transform, cache: Path | None) -> Tensor:
    whole = (len(x), *shape)
    if cache is not None:
        path = cache / f"scattering-{_key(x)}.npy"
        if (found := _cached(path, whole)) is not None:
            return found
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, lambda file: _write(file, whole, _batches(x, transform)))
        except OSError as error:
            log.warning("Features cannot be kept in %s (%s): they are computed for this run only.", cache, error)
        else:
            found = _cached(path, whole)
            if found is not None:
                return found
    features = torch.empty(whole)
    for part, batch in zip(torch.split(features, _BATCH), _batches(x, transform), strict=True):
        part.copy_(batch)
    return features


def _batches(x: Tensor, transform: Transform) -> Iterator[Tensor]:
    """The features, batch by batch; says how long it will take once that is known."""
    began, batches = time.monotonic(), torch.split(x, _BATCH)
    for number, batch in enumerate(batches):
        yield transform(batch)
        seconds = (time.monotonic() - began) * (len(batches) / (number + 1))
        if number == 2 and seconds > _WORTH_SAYING:
            about = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
            log.warning("Computing the scattering features of %d records: about %s.", len(x), about)


def _key(x: Tensor) -> str:
    """What the features depend on: the records, the transform and its version."""
    digest = blake2b(digest_size=20)
    known = (_FORMAT, version("kymatio"), SCALE, ANGLES, ORDER, tuple(x.shape), str(x.dtype))
    digest.update(repr(known).encode())
    for part in torch.split(x, 1024):
        digest.update(np.ascontiguousarray(part.numpy()).data)
    return digest.hexdigest()


def _write(file: BinaryIO, shape: tuple[int, ...], batches: Iterator[Tensor]) -> None:
    """An .npy file for its owner's eyes only, with a checksum of the numbers after them."""
    os.fchmod(file.fileno(), 0o600)
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    checksum = 0
    for batch in batches:
        content = batch.numpy().astype("<f4", copy=False).tobytes()
        checksum = zlib.crc32(content, checksum)
        file.write(content)
    file.write(checksum.to_bytes(4, "little"))


def _cached(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """The features in the file, read from the disk as they are needed; None if it is not there or not whole."""
    try:
        stored: NDArray[np.float32] = np.load(path, mmap_mode="c", allow_pickle=False)  # writes stay in memory
        with path.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            checksum = int.from_bytes(file.read(4), "little")
            whole = stored.shape == shape and stored.dtype == np.float32
            whole = whole and file.tell() == stored.offset + stored.nbytes + 4  # type: ignore[attr-defined]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError):
        whole = False
    if whole:
        numbers, found = stored.reshape(-1).view(np.uint8), 0
        for start in range(0, len(numbers), _BLOCK):
            found = zlib.crc32(numbers[start : start + _BLOCK].data, found)
        if found == checksum:
            return torch.from_numpy(stored)
    log.warning("The features in %s are damaged: they are computed again.", path)
    return None
