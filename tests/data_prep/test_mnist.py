"""Test MNIST and similar datasets against torchvision, with corrupt files, verified downloads and
training."""

import gzip
import hashlib
import io
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image
from prep_place import new_catalogue
from processes import metrics, run
from servers import WebServer

from data_prep import mnist
from data_prep.errors import PrepError
from vit.data.shards.data_set import open_split

COUNTS = {"train": 60_000, "t10k": 10_000}


def idx(values: np.ndarray) -> bytes:
    return (
        struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
        + values.astype(np.uint8).tobytes()
    )


def contents(counts: dict[str, int] = COUNTS) -> dict[str, bytes]:
    """Return the four files by name. Each image has stripes whose width in pixels equals its label,
    and is brighter than the previous image."""
    x = np.arange(28, dtype=np.uint8)
    files = {}
    for part, count in counts.items():
        numbers = np.arange(count)
        labels = (7 * numbers % 10).astype(np.uint8)
        rows = (x[None] // (1 + labels[:, None]) % 2) * (100 + numbers[:, None] % 150).astype(
            np.uint8
        )
        files[f"{part}-images-idx3-ubyte"] = idx(np.repeat(rows[:, None], 28, axis=1))
        files[f"{part}-labels-idx1-ubyte"] = idx(labels)
    return files


@pytest.fixture(scope="module")
def full() -> dict[str, bytes]:
    return contents()


@pytest.fixture(scope="module")
def torchvision_root(full, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("torchvision")
    put(root / "MNIST" / "raw", full)
    return root


@pytest.fixture
def small(monkeypatch) -> dict[str, bytes]:
    """Write files of 200 and 50 images. The real files have 60,000 and 10,000 images."""
    monkeypatch.setattr(mnist, "PARTS", {"train": ("train", 200), "val": ("t10k", 50)})
    return contents({"train": 200, "t10k": 50})


def put(folder: Path, files: dict[str, bytes], compressed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}{'.gz' if compressed else ''}").write_bytes(
            gzip.compress(content, 1, mtime=0) if compressed else content
        )
    return folder


def test_all_images_and_labels_equal_those_of_torchvision(torchvision_root, tmp_path):
    images = mnist.source(torchvision_root)
    catalogue = new_catalogue(images, tmp_path, seed=0)
    assert catalogue.splits == {"train": 60_000, "val": 10_000}
    assert catalogue.class_names == list("0123456789")
    for split, train in (("train", True), ("val", False)):
        expected = torchvision.datasets.MNIST(torchvision_root, train=train)
        samples = catalogue.table(split).samples(range(len(expected)))
        numbers = [int(sample.name.partition("/")[2]) for sample in samples]
        assert sorted(numbers) == list(range(len(expected)))
        assert [sample.label for sample in samples] == expected.targets[numbers].tolist()
        assert [sample.key for sample in samples[:9]] == [
            f"{'train' if train else 't10k'}-{number:05d}" for number in numbers[:9]
        ]
        for sample, number in list(zip(samples, numbers, strict=True))[::2000]:
            image = Image.open(io.BytesIO(images.read(sample)))
            assert (image.format, image.mode, image.size) == ("JPEG", "L", (28, 28))
            error = np.asarray(image, np.int64) - np.asarray(expected[number][0], np.int64)
            assert np.abs(error).max() <= 3


@pytest.mark.parametrize("variant", list(mnist.VARIANTS))
def test_variants_equal_those_of_torchvision(variant):
    described = mnist.VARIANTS[variant]
    reader = getattr(torchvision.datasets, described.torchvision_folder)
    assert {f"{name}.gz": md5 for name, md5 in described.md5.items()} == dict(reader.resources)
    assert [name.partition(" - ")[0] for name in reader.classes] == list(described.class_names)
    assert described.url in reader.mirrors


def test_every_layout_gives_the_same_images(small, tmp_path):
    dotted = {name.replace("-idx", ".idx"): content for name, content in small.items()}
    sources = [
        put(tmp_path / "plain", small),
        put(tmp_path / "gz", small, compressed=True),
        put(tmp_path / "dotted", dotted),
        put(tmp_path / "both" / "raw", small).parent,
        put(tmp_path / "root" / "FashionMNIST" / "raw", small, compressed=True).parent.parent,
    ]
    put(tmp_path / "both" / "raw", dict.fromkeys(small, b"not looked at"), compressed=True)
    put(tmp_path / "plain", dict.fromkeys(dotted, b"not looked at"))
    everything = []
    for number, source in enumerate(sources):
        images = mnist.source(source, "fashion")
        catalogue = new_catalogue(images, tmp_path / f"c{number}", seed=0)
        tables = [
            catalogue.table(split).samples(range(total))
            for split, total in catalogue.splits.items()
        ]
        everything.append(
            (
                catalogue.sha256,
                {sample.key: images.read(sample) for samples in tables for sample in samples},
            )
        )
    assert all(images == everything[0] for images in everything)
    assert (
        mnist.main(
            [
                str(sources[1]),
                "--out",
                str(tmp_path / "out"),
                "--variant",
                "fashion",
                "--num-shards",
                "2",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    train = open_split(tmp_path / "out", "train")
    val = open_split(tmp_path / "out", "val")
    assert {
        split.key(i): split.read(i) for split in (train, val) for i in range(split.num_samples)
    } == everything[0][1]
    assert val.class_names[9] == "Ankle boot"
    labels = {int(val.key(i).partition("-")[2]): int(val.index["label"][i]) for i in range(50)}
    assert [labels[i] for i in range(50)] == [7 * i % 10 for i in range(50)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: files.pop("t10k-labels-idx1-ubyte"),
            "missing files: t10k-labels-idx1-ubyte (with or without .gz); download them from https",
        ),
        (
            lambda files: files.clear(),
            "missing files: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images",
        ),
        (
            lambda files: files.update(
                {"train-images-idx3-ubyte": files["t10k-images-idx3-ubyte"]}
            ),
            (
                "expected an idx file of 156,816 bytes that begins with 00000803000000c80000001c"
                "0000001c, found 39,216 bytes that begin with 0000080300000032; copy or"
            ),
        ),
        (
            lambda files: files.update({"train-labels-idx1-ubyte": b""}),
            "found 0 bytes that begin with ; copy",
        ),
        (
            lambda files: files.update({"train-labels-idx1-ubyte": b"<html>Not found"}),
            "found 15 bytes that begin with 3c68746d6c3e4e6f; copy",
        ),
        (
            lambda files: files.update({"t10k-labels-idx1-ubyte": idx(np.arange(50) % 11)}),
            "record 10 has label 10, expected 0 to 9",
        ),
        (
            lambda files: files.update(
                {"t10k-images-idx3-ubyte": struct.pack(">IIII", 0x0D03, 50, 28, 28) + bytes(99)}
            ),
            "found 115 bytes that begin with 00000d03",
        ),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_wrong_files_give_one_line(small, tmp_path, capsys, change, message, compressed):
    change(small)
    put(tmp_path / "source", small, compressed)
    assert (
        mnist.main([str(tmp_path / "source"), "--out", str(tmp_path / "out"), "--workers", "1"])
        == 2
    )
    error = capsys.readouterr().err
    assert re.match(r"error: .*\n\Z", error)
    assert message in error
    assert not list(tmp_path.glob("out/*"))


def test_cut_long_and_hostile_files_are_reported(small, tmp_path):
    name = "train-images-idx3-ubyte"
    plain = tmp_path / name
    packed = tmp_path / f"{name}.gz"
    whole = small[name]
    for path, content, message in (
        (plain, whole[:-100], r"of 156,816 bytes .*, found 156,716 bytes that begin with"),
        (plain, whole + b"\0", r"of 156,816 bytes .*, found more that begin with"),
        (packed, gzip.compress(whole)[:-100], r"not a complete gzip file \(Compressed file ended"),
        (packed, whole, r"not a complete gzip file \(Not a gzipped file"),
        (
            packed,
            gzip.compress(whole)[:50] + b"\0" * 50 + gzip.compress(whole)[100:],
            r"not a complete gzip file \(",
        ),
        # A small decompression bomb.
        (packed, gzip.compress(whole + bytes(20_000_000), 1), r"found more"),
    ):
        path.write_bytes(content)
        with pytest.raises(PrepError, match=message):
            mnist.read_idx(path, "images", 200)
    plain.unlink()
    plain.mkdir()
    with pytest.raises(PrepError, match=r"cannot be read \(Is a directory\)"):
        mnist.read_idx(plain, "images", 200)


def test_ambiguous_folders_and_other_variants_are_refused(small, tmp_path, monkeypatch):
    with pytest.raises(
        PrepError, match="nowhere: no such folder; expected a folder with the four idx files"
    ):
        mnist.source(tmp_path / "nowhere")
    put(tmp_path / "KMNIST" / "raw", small, compressed=True)
    (tmp_path / "two" / "KMNIST" / "raw").mkdir(parents=True)
    (tmp_path / "two" / "FashionMNIST" / "raw").mkdir(parents=True)
    with pytest.raises(PrepError, match="or use --download or another --variant"):
        mnist.source(tmp_path / "two")
    with pytest.raises(PrepError, match="or use --download or another --variant"):
        mnist.source(tmp_path)
    monkeypatch.setitem(
        mnist.VARIANTS, "kmnist", mnist.VARIANTS["kmnist"]._replace(md5=md5_of(small))
    )
    with pytest.raises(
        PrepError, match=r"train-images-idx3-ubyte.gz: this file belongs to KMNIST; use --variant"
    ):
        mnist.source(tmp_path / "KMNIST", "fashion")
    put(tmp_path, small)
    with pytest.raises(
        PrepError,
        match=f"found idx files in several folders .{tmp_path}, {tmp_path}/KMNIST/raw.: pass one",
    ):
        mnist.source(tmp_path, "kmnist")


def md5_of(files: dict[str, bytes]) -> dict[str, str]:
    return {
        name: hashlib.md5(gzip.compress(content, 1, mtime=0)).hexdigest()
        for name, content in files.items()
    }


def test_download_from_a_mirror(small, tmp_path, capsys, monkeypatch):
    """The test first runs with the md5s of the generated files. The real md5s of MNIST must then
    reject these files."""
    served = {
        f"/m/{name}.gz": gzip.compress(content, 1, mtime=0) for name, content in small.items()
    }
    command = [
        str(tmp_path / "new" / "folder"),
        "--out",
        str(tmp_path / "out"),
        "--download",
        "--workers",
        "1",
    ]
    with WebServer(served) as server:
        assert mnist.main([*command, "--url", f"{server.url}/m/"]) == 2
        assert "expected f68b3c2dcbeaaa9fbdd348bbdeb94873" in capsys.readouterr().err
        monkeypatch.setitem(
            mnist.VARIANTS, "mnist", mnist.VARIANTS["mnist"]._replace(md5=md5_of(small))
        )
        server.cuts = [1000]
        assert mnist.main([*command, "--url", f"{server.url}/m"]) == 0
        num_requests = len(server.requests)
        assert mnist.main([*command, "--url", f"{server.url}/m"]) == 0
        assert len(server.requests) == num_requests, "existing files must not be fetched again"
    assert open_split(tmp_path / "out", "train").num_samples == 200
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(
        f"{name}.gz" for name in small
    )


def test_the_recipe_trains_on_it(small, tmp_path):
    put(tmp_path / "source", small, compressed=True)
    assert (
        mnist.main([str(tmp_path / "source"), "--out", str(tmp_path / "root"), "--workers", "1"])
        == 0
    )
    overrides = [
        "train.steps=3",
        "train.epochs=null",
        "eval.every_epochs=null",
        "log.every_steps=1",
        "log.wandb=off",
        "log.report=false",
    ]
    where = [f"data.root={tmp_path / 'root'}", f"run.dir={tmp_path / 'run'}"]
    done = run("launch/train.py", "--config", "configs/small/mnist.yaml", *where, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(np.log(10), abs=2e-3), (
        "a zero head of ten classes starts at a loss of ln 10"
    )
    assert len(losses) == 3
    assert [line["num_images"] for line in metrics(tmp_path / "run", "eval")] == [50]
