"""Define scenarios for test_prep_errors.py with invalid archives, invalid folders and failing
downloads."""

from __future__ import annotations

import gzip
import os
import socket
import struct
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from error_rows import WITHOUT_PRIVILEGES
from fake_imagenet import (
    Fake,
    as_torchvision,
    kaggle_files,
    tar_of,
    torchvision_files,
    write_parquets,
    write_train_tar,
    write_zip,
)
from prep_place import KIT, TRAIN_TAR, VAL_TAR, Place, imagenet, images, official, scenario
from processes import jpeg
from servers import WebServer

from data_prep.animals10 import ENGLISH

MNIST = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]

# ---- archives and folders ------------------------------------------------------------------------


@scenario("an archive that is not there")
def _(place: Place) -> None:
    place.prepare("imagenet", place.folder / TRAIN_TAR)


@scenario("a web page in place of the archive")
def _(place: Place) -> None:
    (official(place) / TRAIN_TAR).write_bytes(b"<!DOCTYPE html><html>Please log in</html>" * 100)
    place.prepare("imagenet", place.folder / "downloads")


@scenario("a file that is not a tar")
def _(place: Place) -> None:
    (official(place) / TRAIN_TAR).write_bytes(bytes(range(1, 256)) * 100)
    place.prepare("imagenet", place.folder / "downloads")


@scenario("a tar of something else")
def _(place: Place) -> None:
    (place.folder / "photos.tar").write_bytes(tar_of([("readme.txt", b"x")]))
    place.prepare("imagenet", place.folder / "photos.tar")


@scenario("a zip of something else")
def _(place: Place) -> None:
    place.prepare(
        "imagenet", write_zip({"raw-img/cane/1.jpeg": b"x"}, place.folder / "archive.zip")
    )


@scenario("a zip that is cut off")
def _(place: Place) -> None:
    path = write_zip(
        kaggle_files(imagenet()), place.folder / "imagenet-object-localization-challenge.zip"
    )
    os.truncate(path, path.stat().st_size // 2)
    place.prepare("imagenet", path)


@scenario("a compressed tar")
def _(place: Place) -> None:
    path = place.folder / f"{TRAIN_TAR}.gz"
    path.write_bytes(gzip.compress(tar_of([("a", b"x")])))
    place.prepare("imagenet", path)


@scenario("the outer tar is cut off")
def _(place: Place) -> None:
    path = official(place) / TRAIN_TAR
    os.truncate(path, path.stat().st_size // 2)
    place.prepare("imagenet", place.folder / "downloads")


@scenario("a tar inside it is cut off")
def _(place: Place) -> None:
    wnids = imagenet().wnids
    whole = {wnid: tar_of(imagenet().train[wnid].items()) for wnid in wnids}
    cut = {wnid: data[:1500] if wnid == wnids[4] else data for wnid, data in whole.items()}
    (official(place) / TRAIN_TAR).write_bytes(
        tar_of((f"{wnid}.tar", data) for wnid, data in cut.items())
    )
    place.prepare("imagenet", place.folder / "downloads")


@scenario("an archive whose md5 is not the published one, found by `--md5`")
def _(place: Place) -> None:
    place.prepare("imagenet", official(place), "--md5")


@scenario("class folders that are not named by WordNet ids")
def _(place: Place) -> None:
    tree = as_torchvision(imagenet(), place.folder)[0]
    (tree / "train" / imagenet().wnids[0]).rename(tree / "train" / "tench")
    place.prepare("imagenet", tree)


@scenario("two layouts at once")
def _(place: Place) -> None:
    tree = as_torchvision(imagenet(), place.folder)[0]
    place.prepare("imagenet", tree, write_train_tar(imagenet(), place.folder / TRAIN_TAR))


@scenario("nothing tells the classes of ImageNet's flat val")
def _(place: Place) -> None:
    (official(place) / KIT).unlink()
    place.prepare("imagenet", place.folder / "downloads")


@scenario("an image that the file of labels does not know")
def _(place: Place) -> None:
    (official(place) / VAL_TAR).write_bytes(
        tar_of([*imagenet().val.items(), ("ILSVRC2012_val_00000021.JPEG", b"x")])
    )
    place.prepare("imagenet", place.folder / "downloads", "--partial")


@scenario("a class of val that train has not, and other counts than ImageNet's")
def _(place: Place) -> None:
    fake = imagenet()
    fewer = Fake(
        fake.wnids,
        {wnid: fake.train[wnid] for wnid in fake.wnids[1:]},
        fake.val,
        fake.val_wnids,
        fake.ids,
    )
    official(place)
    write_train_tar(fewer, place.folder / "downloads" / TRAIN_TAR)
    place.prepare("imagenet", place.folder / "downloads")


@scenario("the same name twice")
def _(place: Place) -> None:
    fake = imagenet()
    twice = [*fake.train[fake.wnids[0]].items()] * 2
    (official(place) / TRAIN_TAR).write_bytes(tar_of([(f"{fake.wnids[0]}.tar", tar_of(twice))]))
    place.prepare("imagenet", place.folder / "downloads" / TRAIN_TAR, "--partial")


@scenario("an empty folder")
def _(place: Place) -> None:
    (place.folder / "downloads").mkdir()
    place.prepare("imagenet", place.folder / "downloads")


@scenario("an archive that may not be read")
def _(place: Place) -> None:
    (official(place) / TRAIN_TAR).chmod(0)
    place.prepare("imagenet", place.folder / "downloads", prefix=WITHOUT_PRIVILEGES)


@scenario("a class folder that may not be listed")
def _(place: Place) -> None:
    folder = images(place) / "dog"
    folder.chmod(0)
    place.prepare("imagefolder", place.folder / "images", prefix=WITHOUT_PRIVILEGES)
    folder.chmod(0o755)


@scenario("an image folder without images")
def _(place: Place) -> None:
    (place.folder / "images" / "cat").mkdir(parents=True)
    place.prepare("imagefolder", place.folder / "images")


@scenario("an image folder with a single class")
def _(place: Place) -> None:
    place.prepare("imagefolder", images(place, ("cat",)))


@scenario("a class folder without images")
def _(place: Place) -> None:
    (images(place) / "ant").mkdir()
    place.prepare("imagefolder", place.folder / "images")


@scenario("classes whose names are numbers, which sort otherwise as text")
def _(place: Place) -> None:
    images(place, ("9", "10"))
    place.prepare("imagefolder", place.folder / "images")


@scenario("classes in val that train has not")
def _(place: Place) -> None:
    images(place, ("train/cat", "train/dog", "val/cat", "val/ant"))
    place.prepare("imagefolder", place.folder / "images")


@scenario("a link back to a folder above it")
def _(place: Place) -> None:
    (images(place) / "cat" / "all").symlink_to("..")
    place.prepare("imagefolder", place.folder / "images")


@scenario("the shards' own folder as SOURCE")
def _(place: Place) -> None:
    place.out = official(place)
    place.prepare("imagenet", place.out)


# ---- hostile archives ----------------------------------------------------------------------------


def with_inner_tar(place: Place, data: bytes) -> Path:
    (official(place) / TRAIN_TAR).write_bytes(tar_of([(f"{imagenet().wnids[0]}.tar", data)]))
    return place.folder / "downloads"


@scenario("a member with an absolute path")
def _(place: Place) -> None:
    place.prepare(
        "imagenet", with_inner_tar(place, tar_of([("/etc/cron.d/n01440764_1.JPEG", b"x")]))
    )


@scenario("a member with `..` in its path")
def _(place: Place) -> None:
    place.prepare("imagenet", with_inner_tar(place, tar_of([("../../n01440764_1.JPEG", b"x")])))


@scenario("a link in an archive")
def _(place: Place) -> None:
    link = tarfile.TarInfo("n01440764_1.JPEG")
    link.type = tarfile.SYMTYPE
    link.linkname = "/etc/passwd"
    place.prepare(
        "imagenet", with_inner_tar(place, link.tobuf(tarfile.GNU_FORMAT) + bytes(10240 - 512))
    )


@scenario("an encrypted zip")
def _(place: Place) -> None:
    data = bytearray(write_zip(animals(), place.folder / "archive.zip").read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1  # set the encryption flag of the first archive member
    (place.folder / "archive.zip").write_bytes(data)
    place.prepare("animals10", place.folder / "archive.zip")


def with_stated_size(path: Path, name: str, size: int) -> Path:
    """Change the size of a member in the central directory of a zip file, and return the path of
    the file."""
    data = bytearray(path.read_bytes())
    at = data.rindex(name.encode()) - 46
    assert data[at : at + 4] == b"PK\1\2"
    data[at + 24 : at + 28] = struct.pack("<I", size)
    path.write_bytes(data)
    return path


@scenario("a zip bomb that says so")
def _(place: Place) -> None:
    files = torchvision_files(imagenet())
    path = write_zip(files, place.folder / "imagenet.zip")
    place.prepare("imagenet", with_stated_size(path, next(iter(files)), 4_000_000_000), "--partial")


@scenario(
    "a zip bomb that hides it: the image is left out, and with it the rest of the bomb", begun=True
)
def _(place: Place) -> None:
    files = torchvision_files(imagenet())
    files[next(iter(files))] = bytes(50_000_000)
    path = with_stated_size(
        write_zip(files, place.folder / "imagenet.zip"), next(iter(files)), 1000
    )
    place.prepare("imagenet", path, "--partial", "--max-unreadable", 0.1)
    place.stdout += (place.out / "quarantine.jsonl").read_text()


# ---- MNIST, CIFAR, Animals-10, digits, parquet ---------------------------------------------------


def idx_files(place: Place, **contents: bytes) -> Path:
    """Write MNIST files with correct labels.

    `contents` maps the first word of an image file's name to the bytes of this file. All other
    image files are empty.
    """
    folder = place.folder / "mnist"
    folder.mkdir()
    for name in MNIST:
        count = 60_000 if name.startswith("train") else 10_000
        labels = struct.pack(">2I", 0x801, count) + bytes(count)
        (folder / name).write_bytes(
            labels if "labels" in name else contents.get(name.partition("-")[0], b"")
        )
    return folder


@scenario("one of MNIST's files is missing")
def _(place: Place) -> None:
    (idx_files(place) / MNIST[2]).unlink()
    place.prepare("mnist", place.folder / "mnist")


@scenario("an idx file of another kind, with another number of images, or cut off")
def _(place: Place) -> None:
    place.prepare(
        "mnist",
        idx_files(place, train=struct.pack(">4I", 0x803, 60_000, 28, 28) + bytes(1_000_000)),
    )


@scenario("an idx file whose compressed form is cut off")
def _(place: Place) -> None:
    folder = idx_files(place)
    packed = gzip.compress((folder / MNIST[1]).read_bytes())
    (folder / MNIST[1]).unlink()
    (folder / f"{MNIST[1]}.gz").write_bytes(packed[: len(packed) // 2])
    place.prepare("mnist", folder)


@scenario("CIFAR's Python version, which is made of pickles")
def _(place: Place) -> None:
    (place.folder / "cifar-10-batches-py").mkdir()
    (place.folder / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"x")
    place.prepare("cifar", place.folder)


@scenario("CIFAR's archive is cut off")
def _(place: Place) -> None:
    path = place.folder / "cifar-10-binary.tar.gz"
    packed = gzip.compress(
        tar_of([("cifar-10-batches-bin/data_batch_1.bin", np.random.default_rng(0).bytes(30_000))])
    )
    path.write_bytes(packed[: len(packed) // 2])
    place.prepare("cifar", path)


@scenario("one of CIFAR's files has another size")
def _(place: Place) -> None:
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    for name in names:
        (place.folder / name).write_bytes(bytes(3073))
    (place.folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    place.prepare("cifar", place.folder)


def animals() -> dict[str, bytes]:
    data = jpeg(np.zeros((20, 20, 3), np.uint8))
    return {f"raw-img/{folder}/{number}.jpeg": data for folder in ENGLISH for number in range(12)}


@scenario("Animals-10 without one of its classes")
def _(place: Place) -> None:
    files = {name: data for name, data in animals().items() if "/ragno/" not in name}
    place.prepare("animals10", write_zip(files, place.folder / "archive.zip"))


@scenario("fractions of the split that do not sum to 1")
def _(place: Place) -> None:
    place.prepare(
        "animals10", write_zip(animals(), place.folder / "archive.zip"), "--fractions", 0.8, 0.1
    )


@scenario("parquet files where pyarrow is not installed")
def _(place: Place) -> None:
    folder = write_parquets(imagenet(), place.folder / "imagenet-1k")
    with pytest.MonkeyPatch.context() as patch:
        # Make `import pyarrow` fail, as it does if the package is not installed.
        patch.setitem(sys.modules, "pyarrow", None)
        place.prepare("imagenet", folder)


@scenario("parquet files of which two columns may be the label")
def _(place: Place) -> None:
    columns = {
        "image": [jpeg(np.zeros((20, 20, 3), np.uint8))] * 4,
        "coarse_label": [0, 0, 1, 1],
        "fine_label": [0, 1, 2, 3],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), place.folder / "train.parquet")
    place.prepare("parquet", place.folder / "train.parquet")


@scenario("a parquet file that is cut off")
def _(place: Place) -> None:
    path = (
        write_parquets(imagenet(), place.folder / "imagenet-1k")
        / "data"
        / "train-00001-of-00003.parquet"
    )
    os.truncate(path, path.stat().st_size // 2)
    place.prepare("imagenet", place.folder / "imagenet-1k")


# ---- downloads -----------------------------------------------------------------------------------


def download_mnist(place: Place, url: str) -> None:
    place.prepare("mnist", place.folder / "mnist", "--download", "--url", url)


@scenario("`--download`: the server has no such file")
def _(place: Place) -> None:
    with WebServer({}) as server:
        download_mnist(place, server.url)


@scenario("`--download`: a file of another md5")
def _(place: Place) -> None:
    with WebServer({f"/{MNIST[0]}.gz": b"<html>Welcome to the hotel's network</html>"}) as server:
        download_mnist(place, server.url)


@scenario("`--download`: the server cannot be reached")
def _(place: Place) -> None:
    # Bind the port but do not listen. Connections then fail, and no other process can use the port.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        download_mnist(place, f"http://127.0.0.1:{closed.getsockname()[1]}")


@scenario("`--download`: a file that is there already is another one")
def _(place: Place) -> None:
    (idx_files(place) / f"{MNIST[0]}.gz").write_bytes(b"x")
    download_mnist(place, "http://127.0.0.1:9")


def download_archive(place: Place, content: bytes, flags: tuple[str, ...]) -> None:
    with WebServer({"/food.zip": content}) as server:
        place.prepare("imagefolder", place.folder, "--download", f"{server.url}/food.zip", *flags)


for row, served, flags in (
    ("a web page in its place", b"<html>Please log in</html>", ()),
    ("it is cut off, and the server does not say how long it is", b"PK\3\4", ()),
    ("another sha256", b"PK", ("--sha256", "0" * 64)),
):
    act = partial(download_archive, content=served, flags=flags)
    scenario(f"`--download` of an archive: {row}")(act)


@scenario("`--sha256` without `--download`")
def _(place: Place) -> None:
    place.prepare("imagefolder", images(place), "--sha256", "0" * 64)


@scenario("a `metadata.csv` with rows that lack a label, or name a file that is not there")
def _(place: Place) -> None:
    folder = images(place)
    text = "file_name,label\ncat/1.jpg,cat\n0.jpg,\ngone.jpg,cat\n"
    (folder / "metadata.csv").write_text(text)
    place.prepare("imagefolder", folder)


@scenario("an archive without images in folders")
def _(place: Place) -> None:
    place.prepare("imagefolder", write_zip({"1.jpg": b"x"}, place.folder / "photos.zip"))
