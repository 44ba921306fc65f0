"""privet.data: official files are read as they are; no private statistic gets into an encoding or a split."""

from __future__ import annotations

import gzip
import math
import pickle
import random
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from privet.data import Data, holdout, images, load
from privet.data.base import coins
from privet.errors import ConfigError


def split(x: torch.Tensor, y: torch.Tensor, **how: object) -> tuple[TensorDataset, TensorDataset]:
    out = coins(x, y, **how)  # type: ignore[arg-type]
    return TensorDataset(x[~out], y[~out]), TensorDataset(x[out], y[out])


def records(part: TensorDataset) -> Counter[bytes]:
    x, y = part.tensors
    return Counter(a.numpy().tobytes() + b.numpy().tobytes() for a, b in zip(x, y, strict=True))


def distance(one: Counter[bytes], other: Counter[bytes]) -> int:
    return sum(((one - other) + (other - one)).values())


def made_up(x: torch.Tensor, y: torch.Tensor) -> Data:
    part = TensorDataset(x, y)
    return Data(
        name="made up",
        train=part,
        test=part,
        classes=2,
        labels=("a", "b"),
        input_shape=(3,),
        description="Made up.",
    )


class TestSplit:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        values=st.lists(st.integers(0, 6), min_size=30, max_size=50),  # few values, so many equal records
        at=st.integers(0, 30),
        new=st.integers(0, 8),
        key=st.text(max_size=5),
    )
    def test_is_one_stable(self, values: list[int], at: int, new: int, key: str) -> None:
        """One record inserted anywhere, or replaced, is one record more (or replaced) on one side only."""

        def parts(rows: list[int]) -> tuple[Counter[bytes], Counter[bytes]]:
            x = torch.tensor(rows, dtype=torch.float32)[:, None]
            train, test = split(x, torch.tensor(rows) % 2, fraction=0.5, key=key)
            return records(train), records(test)

        base = parts(values)
        added = parts([*values[:at], new, *values[at:]])
        assert distance(base[0], added[0]) + distance(base[1], added[1]) == 1
        replaced = parts([*values[:at], new, *values[at + 1 :]])
        assert distance(base[0], replaced[0]) + distance(base[1], replaced[1]) <= 2

    def test_holds_out_its_fraction_of_equal_and_of_different_records(self) -> None:
        n = 4000
        for x in (torch.zeros(n, 1), torch.arange(n)[:, None].float()):
            _, test = split(x, torch.zeros(n).long(), fraction=0.3, key="k")
            assert abs(len(test) - 0.3 * n) < 5.5 * (0.21 * n) ** 0.5

    def test_keeps_order_and_every_record(self) -> None:
        x = torch.arange(100)[:, None].float()
        train, test = split(x, torch.zeros(100).long(), fraction=0.3, key="k")
        for part in (train, test):
            assert torch.equal(part.tensors[0], part.tensors[0].sort(0).values)
        assert records(train) + records(test) == records(TensorDataset(x, torch.zeros(100).long()))

    @pytest.mark.parametrize("fraction", [0, 1, -0.5, 2, float("nan")])
    def test_refuses_other_fractions(self, fraction: float) -> None:
        with pytest.raises(ConfigError, match="between 0 and 1"):
            split(torch.zeros(4, 1), torch.zeros(4), fraction=fraction, key="k")

    def test_refuses_to_leave_a_side_empty(self) -> None:
        with pytest.raises(ConfigError, match="1 records are too few"):
            split(torch.zeros(1, 1), torch.zeros(1), fraction=0.5, key="k")


class TestHoldout:
    def test_takes_from_train_alone(self) -> None:
        data = load("digits")
        kept = holdout(data, 0.25)
        assert records(kept.train) + records(kept.test) == records(data.train)
        assert abs(len(kept.test) - 0.25 * 1437) < 5.5 * (0.1875 * 1437) ** 0.5
        assert "0.25 of the training records were held out for validation" in kept.description
        assert records(holdout(data, 0.25).test) == records(kept.test)
        assert not records(kept.test) - records(holdout(data, 0.3).test)  # who is held out stays so when more are

    def test_again_holds_out_others(self) -> None:
        x = torch.arange(3000).view(1000, 3).float()
        once = holdout(made_up(x, torch.zeros(1000).long()), 0.3)
        twice = holdout(once, 0.3)
        assert abs(len(twice.test) - 0.3 * len(once.train)) < 5.5 * (0.21 * len(once.train)) ** 0.5

    def test_through_load(self, tmp_path: Path) -> None:
        rows = [f"{i},{i % 2}" for i in range(1000)]
        path = write(tmp_path / "t.csv", "x,y", *rows)
        data = load(path, target="y", test_fraction=0.2, validation=0.2)
        assert 100 < len(data.test) < 220
        assert not records(data.test) & records(load(path, target="y", test_fraction=0.2).test)


def test_digits() -> None:
    data = load("digits")
    x, y = data.train.tensors
    assert (len(data.train), len(data.test), data.classes, data.input_shape) == (1437, 360, 10, (1, 8, 8))
    assert (x.dtype, y.dtype, x.shape[1:]) == (torch.float32, torch.int64, (1, 8, 8))
    assert (x.min(), x.max()) == (0, 1)
    assert set(torch.bincount(data.test.tensors[1]).tolist()) <= {35, 36, 37}
    assert torch.equal(load("digits").train.tensors[0], x)
    assert "no statistic of the records" in data.description


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx_set(folder: Path, *, compress: bool, train: int = 5, test: int = 3) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", train), ("t10k", test)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 4, 6), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, n, dtype=np.uint8)
    for name, array in arrays.items():
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


class TestIdx:
    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("compress", [True, False])
    def test_reads_official_files(self, tmp_path: Path, name: str, inside: bool, compress: bool) -> None:
        arrays = write_idx_set(tmp_path / name if inside else tmp_path, compress=compress)
        data = load(name, data_dir=tmp_path)
        assert (data.input_shape, data.classes, len(data.labels)) == ((1, 4, 6), 10, 10)
        for part, prefix in ((data.train, "train"), (data.test, "t10k")):
            x, y = part.tensors
            assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
            np.testing.assert_allclose(x[:, 0].numpy() * 255, arrays[f"{prefix}-images-idx3-ubyte"], rtol=1e-6)
            np.testing.assert_array_equal(y.numpy(), arrays[f"{prefix}-labels-idx1-ubyte"])

    def test_finds_debians_fashion_mnist(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_idx_set(tmp_path / "debian", compress=True)
        monkeypatch.setattr(images, "_DEBIAN_FASHION_MNIST", tmp_path / "debian")
        assert len(load("fashion-mnist").train) == 5
        assert len(load("fashion-mnist", data_dir=tmp_path / "elsewhere").train) == 5
        with pytest.raises(ConfigError, match="'mnist' were not found"):
            load("mnist")

    def test_says_what_is_missing_and_where_to_get_it(self, tmp_path: Path) -> None:
        write_idx_set(tmp_path, compress=False)
        (tmp_path / "t10k-labels-idx1-ubyte").unlink()
        with pytest.raises(ConfigError, match=r"t10k-labels-idx1-ubyte.*\.gz.*yann\.lecun\.com") as error:
            load("mnist", data_dir=tmp_path)
        assert str(tmp_path / "mnist") in str(error.value)
        with pytest.raises(ConfigError, match="dataset-fashion-mnist"):
            load("fashion-mnist", data_dir=tmp_path)

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda raw: raw[:-1], "should hold 120 bytes after its header and holds 119"),
            (lambda raw: raw + b"x", "holds 121"),
            (lambda raw: raw[:7], "not an IDX file"),
            (lambda raw: b"", "not an IDX file"),
            (lambda raw: b"PNG" + raw[3:], "not an IDX file"),
            (lambda raw: raw[:4] + b"\xff" * 12 + raw[16:], "should hold"),
        ],
    )
    def test_names_a_damaged_file(self, tmp_path: Path, damage, says: str) -> None:
        write_idx_set(tmp_path, compress=False)
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ConfigError, match=f"train-images-idx3-ubyte.*{says}"):
            load("mnist", data_dir=tmp_path)

    @pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"no gzip", lambda raw: raw[:20] * 2])
    def test_names_a_damaged_archive(self, tmp_path: Path, damage) -> None:
        write_idx_set(tmp_path, compress=True)
        path = tmp_path / "train-images-idx3-ubyte.gz"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
            load("mnist", data_dir=tmp_path)

    @pytest.mark.parametrize("labels", [[1, 2, 3], [1, 2, 3, 4, 10], []])
    def test_refuses_labels_that_do_not_fit(self, tmp_path: Path, labels: list[int]) -> None:
        write_idx_set(tmp_path, compress=False)
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array(labels, dtype=np.uint8)))
        with pytest.raises(ConfigError, match="do not belong together"):
            load("mnist", data_dir=tmp_path)


def write_cifar(folder: Path, *, each: int = 2) -> list[np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    batches = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = rng.integers(0, 256, (each, 3073), dtype=np.uint8)
        batch[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(batch.tobytes())
        batches.append(batch)
    return batches


class TestCifar:
    @pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "."])
    def test_reads_the_binary_version(self, tmp_path: Path, folder: str) -> None:
        batches = write_cifar(tmp_path / folder)
        data = load("cifar10", data_dir=tmp_path)
        x, y = data.train.tensors
        assert x.shape == (10, 3, 32, 32)
        np.testing.assert_array_equal(y.numpy(), np.concatenate(batches[:5])[:, 0])
        # red comes first, row by row; ImageNet's constants, whatever the pixels are
        red = batches[1][0, 1 : 1 + 1024].reshape(32, 32) / 255
        np.testing.assert_allclose(x[2, 0].numpy(), (red - 0.485) / 0.229, rtol=1e-4, atol=1e-5)
        blue = batches[5][1, 1 + 2048 :].reshape(32, 32) / 255
        np.testing.assert_allclose(data.test.tensors[0][1, 2].numpy(), (blue - 0.406) / 0.225, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("content", [b"", b"\0" * 3072, b"\0" * 3074, b"\x0b" * 3073])
    def test_names_a_foreign_file(self, tmp_path: Path, content: bytes) -> None:
        write_cifar(tmp_path)
        (tmp_path / "data_batch_3.bin").write_bytes(content)
        with pytest.raises(ConfigError, match=r"data_batch_3\.bin is not made of CIFAR-10 records"):
            load("cifar10", data_dir=tmp_path)

    def test_says_what_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"test_batch\.bin.*No data folder was given.*binary version"):
            load("cifar10")
        with pytest.raises(ConfigError, match="cifar-10-batches-bin"):
            load("cifar10", data_dir=tmp_path)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'imagenet'.*digits, mnist, fashion-mnist, cifar10.*\.csv"):
        load("imagenet")
    with pytest.raises(ConfigError, match="target, bounds and users are for tables"):
        load("digits", target="y")


def write(path: Path, *lines: str) -> str:
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def everything(data: Data) -> Counter[bytes]:
    return records(data.train) + records(data.test)


ROWS = [f"{i * 7 % 13 - 5},{['red', 'green', 'NA', ''][i % 4]},{['yes', 'no'][i % 3 == 0]}" for i in range(40)]


class TestTable:
    def test_encodes_as_documented(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.csv", "n, m ,c,y", "-3,1e400,red,b", " 8 ,?,green,a", ",nan,red,b", '"2",0,"a,b",a')
        data = load(path, target="y", test_fraction=0.5, bounds={"m": (0, 10)})
        x = torch.cat([data.train.tensors[0], data.test.tensors[0]])
        y = torch.cat([data.train.tensors[1], data.test.tensors[1]])
        assert (data.classes, data.labels, data.input_shape, x.dtype) == (2, ("a", "b"), (20,), torch.float32)
        by_n = {round(row[0].item(), 4): (row, label.item()) for row, label in zip(x, y, strict=True)}
        log = {n: round(float(np.sign(n) * np.log1p(abs(n))), 4) for n in (-3, 8, 0, 2)}
        assert set(by_n) == set(log.values())
        assert [by_n[log[n]][1] for n in (-3, 8, 0, 2)] == [1, 0, 1, 0]
        # n's missing, m (clipped to its bounds), m's missing
        assert [by_n[log[n]][0][1:4].tolist() for n in (-3, 8, 0, 2)] == [
            [0, 1, 0],
            [0, 0, 1],
            [1, 0, 1],
            [0, -1, 0],
        ]
        codes = [by_n[log[n]][0][4:] for n in (-3, 8, 0, 2)]
        assert all(code.abs().eq(0.25).all() for code in codes)
        assert torch.equal(codes[0], codes[2])
        assert not torch.equal(codes[0], codes[1])
        assert "count as public" in data.description
        assert "no statistic of the records" in data.description

    @pytest.mark.parametrize("new", ["1e9,Aqua,yes", "-1e308,NA,no", ",,yes", "inf,red,no"])
    @pytest.mark.parametrize("at", [0, 17, 40])
    def test_one_record_moves_no_other(self, tmp_path: Path, new: str, at: int) -> None:
        """A mean, a range, a vocabulary, a missing-value indicator made on demand or a shuffle would."""
        base = load(write(tmp_path / "a.csv", "n,c,y", *ROWS), target="y", test_fraction=0.4)
        more = load(write(tmp_path / "b.csv", "n,c,y", *ROWS[:at], new, *ROWS[at:]), target="y", test_fraction=0.4)
        assert base.input_shape == more.input_shape
        assert (
            distance(records(base.train), records(more.train)) + distance(records(base.test), records(more.test)) == 1
        )

    def test_is_the_same_in_every_format_and_order(self, tmp_path: Path) -> None:
        plain = load(write(tmp_path / "a.csv", "n,c,y", *ROWS), target="y")
        shuffled = random.Random(1).sample(ROWS, len(ROWS))
        for path in (
            write(tmp_path / "a.csv.gz", "n,c,y", *shuffled),
            write(tmp_path / "a.TSV", *(row.replace(",", "\t") for row in ["n,c,y", *shuffled])),
            write(tmp_path / "b.csv", "\ufeffn,c,y", "", *shuffled, ""),
        ):
            other = load(path, target="y")
            assert records(other.train) == records(plain.train)
            assert records(other.test) == records(plain.test)

    @pytest.mark.parametrize("new", ["1,a", "1.0,a", "1e0,a", "NA,b", ",b", "x,b"])
    def test_one_row_more_moves_no_other_that_is_nearly_equal(self, tmp_path: Path, new: str) -> None:
        """In a column of text 1 and 1.0 are two values, and NA and nothing: such rows do not stand for each other."""
        rows = [f"{('1', '1.0', 'NA', '', 'x')[i % 5]},{'ab'[i // 5 % 2]}" for i in range(60)]
        base = load(write(tmp_path / "a.csv", "c,y", *rows), target="y", test_fraction=0.5, validation=0.5)
        more = load(write(tmp_path / "b.csv", "c,y", new, *rows), target="y", test_fraction=0.5, validation=0.5)
        assert distance(records(base.train), records(more.train)) <= 1

    def test_who_is_held_out_does_not_depend_on_how_rows_are_encoded(self, tmp_path: Path) -> None:
        """Else a record could be measured without noise in one run and count as protected in another."""
        rows = [f"{i},{i % 7},{'ab'[i % 2]}" for i in range(300)]
        plain = load(write(tmp_path / "a.csv", "n,m,y", *rows), target="y", validation=0.3, public=0.2)
        bounded = load(
            str(tmp_path / "a.csv"), target="y", validation=0.3, public=0.2, bounds={"n": (0, 9), "m": (1, 2)}
        )
        rows = [f"{'ab'[i % 2]},{float(i % 7)},{i}.00" for i in range(300)]  # other columns first, other numbers' forms
        turned = load(write(tmp_path / "b.csv", "y,m,n", *rows), target="y", validation=0.3, public=0.2)

        def numbers(data: Data, column: int) -> list[list[int]]:
            parts = (data.train, data.test, cast(TensorDataset, data.public))
            return [[round(math.expm1(n)) for n in part.tensors[0][:, column].tolist()] for part in parts]

        assert numbers(plain, 0) == numbers(turned, 2)
        assert [len(part) for part in (bounded.train, bounded.test)] == [
            len(part) for part in (plain.train, plain.test)
        ]
        for one, other in ((bounded.train, plain.train), (bounded.test, plain.test)):
            clipped = torch.tensor([min(round(math.expm1(n)), 9) for n in other.tensors[0][:, 0].tolist()])
            torch.testing.assert_close(one.tensors[0][:, 0], clipped / 9 * 2 - 1)

    def test_a_class_that_may_be_a_missing_value_is_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        rows = [f"{i},{('a', 'b', 'NA')[i % 3]}" for i in range(30)]
        assert load(write(tmp_path / "t.csv", "n,y", *rows), target="y").labels == ("NA", "a", "b")
        assert "has the class 'NA', which is learned like any other" in caplog.text

    def test_is_found_in_the_data_folder(self, tmp_path: Path) -> None:
        write(tmp_path / "only-here.csv", "n,c,y", *ROWS)
        assert load("only-here.csv", data_dir=tmp_path, target="y").classes == 2

    def test_orders_numeric_classes_as_numbers(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.csv", "x,y", *(f"{i},{['10', '2', '2.0', '0.5'][i % 4]}" for i in range(40)))
        data = load(path, target="y")
        assert data.labels == ("0.5", "2", "10")

    def test_word_labels_may_look_like_missing_values(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.csv", "x,y", *(f"{i},{['none', 'some'][i % 2]}" for i in range(40)))
        assert load(path, target="y").labels == ("none", "some")

    @pytest.mark.parametrize(
        ("lines", "target", "says"),
        [
            (["n,c,y", *ROWS], None, r"No target column.*n, c, y"),
            (["n,c,y", *ROWS], "z", r"no column 'z'.*n, c, y"),
            (["n,c,y", *ROWS, "1,2"], "y", "line 42: 2 cells, but the header names 3 columns"),
            (["n,c,y", "", *ROWS, "1,2,3,4"], "y", "line 43: 4 cells"),
            (["n,c,y", "1,red,", *ROWS], "y", "line 2: the target 'y' is missing"),
            (["n,y", "1,0", "2,1", "3,nan"], "y", "line 4: the target 'y' is missing"),
            (["n,n,y", *ROWS], "y", "more than once: 'n'"),
            (["n,c,y"], "y", "no rows"),
            (["y", "a", "b"], "y", "no column besides the target"),
            (["n,y", "1,a", "2,a"], "y", "'a' in every row"),
            (["n,y", *(f"{i},{i % 60}" for i in range(200))], "y", "60 different numbers.*regression"),
            (["n,y", *(f"{i},{i / 7}" for i in range(21))], "y", "21 different values in 21 rows, nearly one for each"),
            (["n,y", *(f"{i},id{i % 30}" for i in range(59))], "y", "30 different values in 59 rows.*identifier"),
            (["n,y", '1,"a', "2,b"], "y", "cannot be read as a table of text after line"),
            ([""], "y", "is empty"),
        ],
    )
    def test_names_what_is_wrong(self, tmp_path: Path, lines: list[str], target: str | None, says: str) -> None:
        path = write(tmp_path / "t.csv", *lines)
        with pytest.raises(ConfigError, match=says):
            load(path, target=target)

    @pytest.mark.parametrize(("rows", "classes"), [(60, 30), (20, 20)])
    def test_many_classes_are_classes_all_the_same(self, tmp_path: Path, rows: int, classes: int) -> None:
        path = write(tmp_path / "t.csv", "x,y", *(f"{i},id{i % classes}" for i in range(rows)))
        assert load(path, target="y").classes == classes

    def test_says_which_numbers_have_no_public_bounds(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write(tmp_path / "t.csv", "n,m,c,y", *(f"{i},{-i},{'ab'[i % 2]},{i % 2}" for i in range(40)))
        load(path, target="y", bounds={"n": (0, 40), "m": (-40, 0)})
        assert not caplog.records
        load(path, target="y", bounds={"n": (0, 40)})
        (said,) = [record.getMessage() for record in caplog.records]
        assert "numbers in 'm', so" in said and "--bounds COLUMN=LOW:HIGH" in said
        wide = write(tmp_path / "w.csv", "a,b,c,d,e,f,g,y", *(f"1,2,3,4,5,6,7,{i % 2}" for i in range(40)))
        load(wide, target="y")
        assert "'a', 'b', 'c', 'd', 'e' and 2 more" in caplog.text

    @pytest.mark.parametrize(
        ("bounds", "says"),
        [
            ({"z": (0, 1)}, "bounds names 'z'"),
            ({"y": (0, 1)}, "bounds names 'y'"),
            ({"c": (0, 1)}, "column 'c', which does not hold numbers"),
            ({"n": (1, 1)}, r"bounds\['n'\]=\(1, 1\)"),
            ({"n": (0, float("inf"))}, r"bounds\['n'\]"),
        ],
    )
    def test_refuses_senseless_bounds(self, tmp_path: Path, bounds: dict[str, tuple[float, float]], says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            load(write(tmp_path / "t.csv", "n,c,y", *ROWS), target="y", bounds=bounds)

    def test_names_an_unreadable_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"absent\.csv does not exist"):
            load(str(tmp_path / "absent.csv"), target="y")
        (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
        (tmp_path / "false.csv.gz").write_bytes(b"a,b\n1,2\n")
        (tmp_path / "folder.csv").mkdir()
        for name in ("binary.csv", "false.csv.gz", "folder.csv"):
            with pytest.raises(ConfigError, match=f"{name} cannot be read"):
                load(str(tmp_path / name), target="y")


class TestParquet:
    def test_without_pyarrow_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ConfigError, match=r"pip install privet\[parquet\]"):
            load(str(tmp_path / "t.parquet"), target="y")

    def test_is_read_as_csv_is(self, tmp_path: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet  # noqa: PLC0415

        rows = [row.split(",") for row in ROWS]
        table = pa.table(
            {
                "n": [float(n) if i else None for i, (n, _, _) in enumerate(rows)],
                "c": pa.array([c or None for _, c, _ in rows]).dictionary_encode(),
                "y": [y for _, _, y in rows],
            }
        )
        parquet.write_table(table, tmp_path / "t.parquet")
        lines = [row if i else row[row.index(",") :] for i, row in enumerate(ROWS)]
        ours = load(str(tmp_path / "t.parquet"), target="y")
        assert records(ours.train) == records(load(write(tmp_path / "t.csv", "n,c,y", *lines), target="y").train)
        (tmp_path / "false.parquet").write_bytes(b"no parquet")
        with pytest.raises(ConfigError, match="cannot be read as Parquet"):
            load(str(tmp_path / "false.parquet"), target="y")
        with pytest.raises(ConfigError, match="does not exist"):
            load(str(tmp_path / "absent.parquet"), target="y")


def archive(path: Path, **arrays: object) -> str:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


class TestArchive:
    X = np.array([[0.5, -3, 1e4], [2, 8, np.inf], [0, 0, -7], [9, -1, 2]] * 10) + np.arange(40)[:, None]

    def test_is_scaled_as_csv_is_without_columns_of_missing_values(self, tmp_path: Path) -> None:
        labels = np.arange(40) % 3 * 5
        path = archive(tmp_path / "t.npz", X=self.X, y=labels)
        rows = [",".join(map(repr, map(float, [*x, y]))) for x, y in zip(self.X, labels, strict=True)]
        csv = load(write(tmp_path / "t.csv", "0,1,2,y", *rows), target="y", bounds={"1": (-2, 20)})
        data = load(path, bounds={"1": (-2, 20)})
        assert (data.classes, data.labels, data.input_shape) == (3, ("0", "5", "10"), (3,))
        x, y = (torch.cat([part.tensors[i] for part in (data.train, data.test)]) for i in (0, 1))
        same, other = (torch.cat([part.tensors[i] for part in (csv.train, csv.test)]) for i in (0, 1))
        assert (x.dtype, y.dtype, x[:, 1].abs().max()) == (torch.float32, torch.int64, 1)
        assert records(TensorDataset(x, y)) == records(TensorDataset(same[:, ::2].contiguous(), other))
        assert "no statistic of the records" in data.description

    @pytest.mark.parametrize("kind", ["<f4", ">f8", "i2", "u1", "?"])
    def test_kinds_of_numbers(self, tmp_path: Path, kind: str) -> None:
        rng = np.random.default_rng(0)
        x, y = rng.integers(0, 2, (50, 4)).astype(kind), (np.arange(50) % 2).astype(kind)
        data = load(archive(tmp_path / "t.npz", X=x, y=y), target="y")
        assert data.labels == ("0", "1") and len(data.train) + len(data.test) == 50
        assert sorted(set(data.train.tensors[0].flatten().tolist())) == pytest.approx([0, np.log(2)])

    def test_extremes_do_not_overflow(self, tmp_path: Path) -> None:
        x = np.array([[-(2**15)], [2**15 - 1]] * 20, dtype=np.int16)
        data = load(archive(tmp_path / "t.npz", X=x, y=np.arange(40) % 2))
        assert data.train.tensors[0].min() == pytest.approx(-np.log1p(2.0**15))

    def test_one_row_more_moves_no_other(self, tmp_path: Path) -> None:
        """And no statistic is used: the row that comes in is far from the others, and the others stay as they were."""
        x, y = np.random.default_rng(1).normal(size=(200, 3)), np.arange(200) % 2
        one = load(archive(tmp_path / "a.npz", X=x, y=y))
        x, y = np.insert(x, 7, 1e9, axis=0), np.insert(y, 7, 1)
        more = load(archive(tmp_path / "b.npz", X=x, y=y))
        parts = [(one.train, more.train), (one.test, more.test)]
        assert sum(distance(records(a), records(b)) for a, b in parts) == 1
        again = load("b.npz", data_dir=tmp_path, bounds={"0": (-1, 1)})
        assert torch.equal(again.test.tensors[0][:, 1:], more.test.tensors[0][:, 1:])

    def test_says_which_numbers_have_no_public_bounds(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = archive(tmp_path / "t.npz", X=self.X, y=np.arange(40) % 2)
        load(path, bounds={"0": (0, 1), "1": (0, 1), "2": (0, 1)})
        assert not caplog.records
        load(path, bounds={"1": (0, 1)})
        assert "numbers in '0', '2', so" in caplog.text

    @pytest.mark.parametrize(
        ("arrays", "how", "says"),
        [
            ({"X": X}, {}, "has no array y. .*there is X"),
            ({"a": X}, {}, "has no array X and no array y. .*there is a"),
            ({}, {}, "there is nothing"),
            ({"X": X, "y": np.arange(39) % 2}, {}, r"shapes are \(40, 3\) and \(39,\)"),
            ({"X": X, "y": np.ones((40, 1))}, {}, r"shapes are \(40, 3\) and \(40, 1\)"),
            ({"X": X[:, 0], "y": np.arange(40) % 2}, {}, r"shapes are \(40,\)"),
            ({"X": X[:, :0], "y": np.arange(40) % 2}, {}, r"shapes are \(40, 0\)"),
            ({"X": X[:0], "y": np.arange(0)}, {}, r"shapes are \(0, 3\)"),
            ({"X": X.astype(str), "y": np.arange(40) % 2}, {}, "array X must hold numbers, and holds <U"),
            ({"X": X.astype(complex), "y": np.arange(40) % 2}, {}, "array X must hold numbers"),
            ({"X": X, "y": np.array(["a", "b"] * 20)}, {}, "array y must hold numbers"),
            ({"X": X.astype(object), "y": np.arange(40) % 2}, {}, "cannot be read as a NumPy archive.*pickle"),
            ({"X": np.where(X > 9, np.nan, X), "y": np.arange(40) % 2}, {}, "X has missing values .*CSV"),
            ({"X": X, "y": np.where(np.arange(40) > 38, np.nan, 0)}, {}, "y is missing"),
            ({"X": X, "y": np.zeros(40)}, {}, "'0' in every row"),
            ({"X": X, "y": np.arange(40) / 3}, {}, "40 different values in 40 rows"),
            ({"X": X, "y": np.arange(40) % 2}, {"target": "2"}, "target is '2'.*its array y"),
            ({"X": X, "y": np.arange(40) % 2}, {"users": "0"}, "users is '0'.*CSV"),
            ({"X": X, "y": np.arange(40) % 2}, {"bounds": {"3": (0, 1)}}, "bounds names '3'"),
            ({"X": X, "y": np.arange(40) % 2}, {"bounds": {"2": (1, 0)}}, r"bounds\['2'\]=\(1, 0\)"),
        ],
    )  # fmt: skip
    def test_names_what_is_wrong(self, tmp_path: Path, arrays: dict, how: dict, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            load(archive(tmp_path / "t.npz", **arrays), **how)

    def test_never_unpickles(self, tmp_path: Path) -> None:
        class Trap:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return (Path.touch, (tmp_path / "sprung",))  # type: ignore[return-value]

        trap = np.array([[Trap()]] * 4, dtype=object)
        archive(tmp_path / "x.npz", X=trap, y=np.arange(4) % 2)
        (tmp_path / "raw.npz").write_bytes(pickle.dumps(trap))
        for name in ("x.npz", "raw.npz"):
            with pytest.raises(ConfigError, match="cannot be read"):
                load(str(tmp_path / name))
        assert not (tmp_path / "sprung").exists()

    def test_names_an_unreadable_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"absent\.npz does not exist"):
            load(str(tmp_path / "absent.npz"))
        whole = Path(archive(tmp_path / "whole.npz", X=self.X, y=np.arange(40) % 2)).read_bytes()
        with (tmp_path / "single.npz").open("wb") as file:
            np.save(file, self.X)
        (tmp_path / "text.npz").write_text("a,b")
        (tmp_path / "empty.npz").write_bytes(b"")
        (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "harmed.npz").write_bytes(whole[:200] + b"\xff" * 50 + whole[250:])
        (tmp_path / "folder.npz").mkdir()
        for name in ("single", "text", "empty", "half", "harmed", "folder"):
            with pytest.raises(ConfigError, match=rf"{name}\.npz cannot be read as a NumPy archive"):
                load(str(tmp_path / f"{name}.npz"))


def test_importing_stays_lean() -> None:
    code = "import sys, privet.data; print([m for m in ('sklearn', 'pyarrow', 'pandas') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


class TestUsersAndPublicRecords:
    ROWS = "\n".join(["who,age,ill"] + [f"p{i // 5},{20 + i % 50},{'yes' if i % 3 else 'no'}" for i in range(400)])

    def test_all_rows_of_a_user_are_on_one_side(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text(self.ROWS)
        data = load(str(tmp_path / "t.csv"), target="ill", users="who", validation=0.3, public=0.2)
        assert data.users is not None and data.public is not None
        assert len(data.users) == len(data.train) and all(n == 5 for n in Counter(data.users).values())
        assert len(data.train) % 5 == len(data.test) % 5 == len(data.public) % 5 == 0
        assert data.input_shape == (2,)  # the user is no input
        assert "taken for public" in data.description

    def test_a_user_more_moves_no_other(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(self.ROWS)
        (tmp_path / "b.csv").write_text(self.ROWS.replace("who,age,ill", "who,age,ill\nnew,33,no\nnew,34,yes"))
        kept = [set(load(str(tmp_path / f), target="ill", users="who").users or ()) for f in ("a.csv", "b.csv")]
        assert kept[1] - {"new"} == kept[0]

    def test_public_records_are_not_trained_on(self) -> None:
        data, whole = load("digits", public=0.1), load("digits")
        assert data.public is not None
        assert len(data.public) + len(data.train) == len(whole.train) and 80 < len(data.public) < 200

    @pytest.mark.parametrize("users", ["nobody", "ill"])
    def test_names_a_wrong_column(self, tmp_path: Path, users: str) -> None:
        (tmp_path / "t.csv").write_text(self.ROWS)
        with pytest.raises(ConfigError, match="users is"):
            load(str(tmp_path / "t.csv"), target="ill", users=users)
