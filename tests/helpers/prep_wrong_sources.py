"""List faults that only one kind of source can have, each with the error that the command prints.

If a fault has a row in tests/project/errors/rows.yaml, the row contains the fault's name and error.
Faults that every source can have are in tests/data_prep/test_sources_and_faults.py.
"""

from __future__ import annotations

import gzip
import io
import socket
import struct
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fake_imagenet import (
    WNIDS,
    Fake,
    devkit_files,
    kaggle_files,
    tar_of,
    torchvision_files,
    write_parquets,
)
from prep_place import KIT, TRAIN_TAR, VAL_TAR, Place, scenario, without_privileges
from prep_sources import (
    ANIMALS,
    Change,
    Files,
    below,
    cut,
    edit,
    fake,
    gzipped,
    idx,
    layout,
    member,
    parquet_of,
    put,
    rows,
    tar_with,
    tgz_of,
    tiny,
    without,
    write,
    zip_of,
)
from servers import WebServer
from small_shards import image_bytes

IMAGES = "train-images-idx3-ubyte"


class Wrong(NamedTuple):
    """A faulty source, and the error that the command must print."""

    command: str
    files: Callable[[], Files]
    message: str = ""
    """A regular expression for the error, or "" if a row of rows.yaml contains the error."""
    at: str = "in"
    """The SOURCE arguments relative to the folder, separated by spaces."""
    flags: tuple[str, ...] = ()
    missing: str = ""
    """The name of a package that the command must not be able to import, or ""."""

    begun: bool = False
    """Whether the command has started to write into the folder `at`."""

    def prepare(self, place: Place) -> None:
        write(self.files(), place.folder)
        paths = [place.folder / name for name in self.at.split()]
        with pytest.MonkeyPatch.context() as patch:
            if self.missing:
                patch.setitem(sys.modules, self.missing, None)
            if self.command not in ("index", "verify"):
                place.prepare(self.command, *paths, *self.flags)
                return
            place.out = paths[0]
            flags = [flag.format(folder=place.folder) for flag in self.flags]
            place.run(self.command, *paths, "--workers", 1, *flags)


def add_rows(faults: dict[str, Wrong]) -> None:
    """Register each fault as the scenario for the row of rows.yaml with the same name."""
    for row, fault in faults.items():
        scenario(row, begun=fault.begun)(fault.prepare)


def changed(name: str, *changes: Change) -> Callable[[], Files]:
    """Return a function that returns a source's files after some changes. `name` is either a key of
    `SOURCES`, or "ImageNet, " followed by the name of a layout. The ImageNet layouts contain only
    ordinary images."""

    def files() -> Files:
        kind, _, form = name.partition(", ")
        source = layout(form, odd=False) if kind == "ImageNet" else tiny(name)
        files = source.files
        for change in changes:
            files = change(files)
        return files

    return files


def filled(*names: str) -> Callable[[], Files]:
    """Return a function that returns two images in each of the given folders below `in`. A name
    that contains a dot stands for an empty file, and a name that ends in a slash stands for an
    empty folder."""
    empty = {f"in/{name}": b"" for name in names if "." in name or name.endswith("/")}
    images = {
        f"in/{name}/{number}.jpg": image_bytes(number)
        for name in names
        for number in range(2)
        if f"in/{name}" not in empty
    }
    return lambda: images | empty


imagenet = partial(Wrong, "imagenet")
imagefolder = partial(Wrong, "imagefolder")
animals = partial(Wrong, "animals10")
cifar = partial(Wrong, "cifar")
mnist = partial(Wrong, "mnist")
parquet = partial(Wrong, "parquet")
official = partial(changed, "ImageNet, official")


# ---- archives and folders ------------------------------------------------------------------------

TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"


def inner(*members: tuple[str, bytes]) -> Callable[[], Files]:
    """Return a function that returns the ImageNet files with another training tar, which contains
    one class with the given members."""
    return inner_tar(tar_of(members))


def inner_tar(content: bytes) -> Callable[[], Files]:
    return official(edit(TRAIN_TAR, lambda _: tar_of([(f"{WNIDS[0]}.tar", content)])))


def table(change: Callable[[str], str]) -> Callable[[], Files]:
    """Return a function that returns Kaggle's folder tree with a changed table of classes."""
    return changed(
        "ImageNet, kaggle_tree",
        edit("LOC_val_solution.csv", lambda data: change(data.decode()).encode()),
    )


def kit(change: Callable[[Files], Files]) -> Callable[[], Files]:
    return official(edit(KIT, lambda _: tgz_of(change(devkit_files(fake())))))


def archives_of(made: Fake) -> Callable[[], Files]:
    """Return a function that returns the ImageNet files with the training tar of `made`."""
    whole = ((f"{wnid}.tar", tar_of(images.items())) for wnid, images in made.train.items())
    return official(edit(TRAIN_TAR, lambda _: tar_of(whole)))


def other_labels() -> Files:
    """Return Kaggle's folder tree and a development kit that contains the labels in reverse
    order."""
    wnids = dict(zip(fake().val_wnids, reversed(fake().val_wnids.values()), strict=True))
    wrong = replace(fake(), val_wnids=wnids)
    return below("in/", kaggle_files(fake())) | {f"in/{KIT}": tgz_of(devkit_files(wrong))}


def folders_by_the_ids_of_the_kit() -> Files:
    """Return a folder tree in which the val folders were chosen as if the development kit's ids
    were labels."""
    made = fake()
    moved = {
        f"in/val/{made.wnids[made.ids[wnid] - 1]}/{name}": made.val[name]
        for name, wnid in made.val_wnids.items()
    }
    train = without("/val/")(changed("ImageNet, torchvision")())
    return train | moved | {f"in/{KIT}": tgz_of(devkit_files(made))}


def parquets_in_another_order() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write_parquets(replace(fake(), wnids=fake().wnids[::-1]), Path(folder))
        return {
            f"in/{path.relative_to(folder)}": path.read_bytes()
            for path in Path(folder).rglob("*.parquet")
        }


def encrypted() -> Files:
    data = bytearray(zip_of({"raw-img/cane/0.jpeg": b"x"}))
    data[data.index(b"PK\1\2") + 8] |= 1  # set the encryption flag of the first member
    return {"in.zip": bytes(data)}


def with_stated_size(data: bytes, name: str, size: int) -> bytes:
    """Return the zip in `data` with a changed size of one member in its central directory."""
    at = data.rindex(name.encode()) - 46
    assert data[at : at + 4] == b"PK\1\2"
    return data[: at + 24] + struct.pack("<I", size) + data[at + 28 :]


def bomb(size: int, content: bytes | None = None) -> Files:
    """Return a zip that declares `size` as the size of its first image, whatever the real size
    is."""
    files = torchvision_files(fake())
    first = next(iter(files))
    files |= {first: files[first] if content is None else content}
    return {"in.zip": with_stated_size(zip_of(files), first, size)}


def cut_inner_tar() -> Files:
    made = {wnid: tar_of(images.items()) for wnid, images in fake().train.items()}
    made[WNIDS[4]] = made[WNIDS[4]][:1500]
    return official(edit(TRAIN_TAR, lambda _: tar_of((f"{w}.tar", t) for w, t in made.items())))()


def animals_in(change: Change, packed: bool) -> Callable[[], Files]:
    files = change(ANIMALS)
    return lambda: {"in": zip_of(files, "raw-img/")} if packed else below("in/raw-img/", files)


ARCHIVES = {
    "an archive that is not there": imagenet(dict, at=TRAIN_TAR),
    "a web page in place of the archive": imagenet(
        official(edit(TRAIN_TAR, lambda _: b"<!DOCTYPE html><html>Please log in</html>" * 100)),
        at="downloads",
    ),
    "a file that is not a tar": imagenet(
        official(edit(TRAIN_TAR, lambda _: bytes(range(1, 256)) * 100)), at="downloads"
    ),
    "a tar of something else": imagenet(
        lambda: {"in.tar": tar_of([("readme.txt", b"x")])}, at="in.tar"
    ),
    "a zip of something else": imagenet(
        lambda: {"in.zip": zip_of({"raw-img/cane/1.jpeg": b"x"})}, at="in.zip"
    ),
    "a zip that is cut off": imagenet(
        lambda: {"in.zip": (data := zip_of(kaggle_files(fake())))[: len(data) // 2]}, at="in.zip"
    ),
    "a compressed tar": imagenet(lambda: {"in.tar.gz": tgz_of({"a": b"x"})}, at="in.tar.gz"),
    "the outer tar is cut off": imagenet(official(cut(TRAIN_TAR)), at="downloads"),
    "a tar inside it is cut off": imagenet(cut_inner_tar, at="downloads"),
    "an archive whose md5 is not the published one, found by `--md5`": imagenet(
        official(), at="downloads", flags=("--md5",)
    ),
    "class folders that are not named by WordNet ids": imagenet(
        changed("ImageNet, torchvision", put({"in/train/tench/1.JPEG": b"x"}))
    ),
    "two layouts at once": imagenet(
        lambda: changed("ImageNet, torchvision")() | official()(), at=f"in downloads/{TRAIN_TAR}"
    ),
    "nothing tells the classes of ImageNet's flat val": imagenet(
        official(without(KIT)), at="downloads"
    ),
    "an image that the file of labels does not know": imagenet(
        official(
            edit(
                VAL_TAR,
                lambda _: tar_of([*fake().val.items(), ("ILSVRC2012_val_00000021.JPEG", b"x")]),
            )
        ),
        at="downloads",
        flags=("--partial",),
    ),
    "a class of val that train has not, and other counts than ImageNet's": imagenet(
        lambda: archives_of(
            replace(fake(), train={wnid: fake().train[wnid] for wnid in WNIDS[1:10]})
        )(),
        at="downloads",
    ),
    "the same name twice": imagenet(
        lambda: inner(*[*fake().train[WNIDS[0]].items()] * 2)(),
        at=f"downloads/{TRAIN_TAR}",
        flags=("--partial",),
    ),
    "an empty folder": imagenet(filled("/")),
    "an image folder without images": imagefolder(filled("cat/")),
    "an image folder with a single class": imagefolder(filled("cat")),
    "a class folder without images": imagefolder(filled("cat", "dog", "ant/")),
    "the folder of one class in place of its parent": imagefolder(
        filled("cat", "dog"), at="in/cat"
    ),
    "classes whose names are numbers, which sort otherwise as text": imagefolder(filled("9", "10")),
    "classes in val that train has not": imagefolder(
        filled("train/cat", "train/dog", "val/cat", "val/ant")
    ),
    "a list with rows without label, with two labels, or of a missing file": imagefolder(
        lambda: (
            filled("cat")()
            | {
                "in/metadata.csv": b"file_name,label\ncat/1.jpg,cat\n"
                b"cat/1.jpg,dog\n0.jpg,\ngone.jpg,cat\n"
            }
        )
    ),
    "class folders beside `train`, or a class named `train`": imagefolder(
        filled("bus", "car", "train/steam", "train/diesel")
    ),
    "class folders in folders that are not named as splits": imagefolder(
        filled("2023/cat", "2023/dog", "2024/cat", "2024/dog")
    ),
    "two folders of the same split": imagefolder(filled("train/cat", "val/cat", "valid/cat")),
    "`--layout splits` without a folder train": imagefolder(
        filled("cat", "dog"), flags=("--layout", "splits")
    ),
    "a list with a number that the file of classes does not name": imagefolder(
        lambda: (
            {"in/train.txt": b"1.jpg 0\n2.jpg 2\n", "in/classes.txt": b"cat\ndog\n"}
            | {f"in/{n}.jpg": image_bytes(n) for n in (1, 2)}
        )
    ),
    "a file of classes that contradicts the folders of the images": imagefolder(
        lambda: (
            filled("cat", "dog")()
            | {"in/train.txt": b"cat/1.jpg 0\ndog/1.jpg 1\n", "in/classes.txt": b"dog\ncat\n"}
        )
    ),
    "a list whose images are in two folders": imagefolder(
        lambda: filled("images", "masks")() | {"in/labels.csv": b"file,label\n1.jpg,cat\n"}
    ),
    "a list with a column that may contain the classes, beside class folders": imagefolder(
        lambda: (
            filled("part1", "part2")()
            | {"in/labels.csv": b"file,breed\npart1/1.jpg,cat\npart2/1.jpg,cat\n"}
        )
    ),
    "a list in UTF-16": imagefolder(
        lambda: filled("cat", "dog")() | {"in/train.txt": "cat/1.jpg cat\n".encode("utf-16")}
    ),
    "two lists of the same split": imagefolder(
        lambda: (
            {f"in/train_{name}.txt": b"1.jpg cat\n2.jpg dog\n" for name in ("fine", "coarse")}
            | {f"in/{n}.jpg": image_bytes(n) for n in (1, 2)}
        )
    ),
    "a list of val that names images of train": imagefolder(
        lambda: filled("train/cat", "train/dog")() | {"in/val.txt": b"cat/1.jpg cat\n"}
    ),
    "shards in place of class tars": imagefolder(
        lambda: {
            f"in/{n}.tar": tar_of([("1.jpg", image_bytes(1)), ("1.cls", b"0")]) for n in (0, 1)
        }
    ),
    "tars of splits in place of class tars": imagefolder(
        lambda: {
            f"in/{split}.tar": tar_of([(f"{n}/1.jpg", image_bytes(1)) for n in ("cat", "dog")])
            for split in ("train", "val")
        }
    ),
    "an archive without images in folders": imagefolder(lambda: {"in": zip_of({"1.txt": b"x"})}),
    "`--sha256` without `--download`": imagefolder(
        filled("cat", "dog"), flags=("--sha256", "0" * 64)
    ),
}
HOSTILE = {
    "a member with an absolute path": imagenet(
        inner(("/etc/cron.d/n01440764_1.JPEG", b"x")), at="downloads"
    ),
    "a member with `..` in its path": imagenet(
        inner(("../../n01440764_1.JPEG", b"x")), at="downloads"
    ),
    "a link in an archive": imagenet(
        inner_tar(
            tar_with(member("n01440764_1.JPEG", type=tarfile.SYMTYPE, linkname="/etc/passwd"))
        ),
        at="downloads",
    ),
    "an encrypted zip": animals(encrypted, at="in.zip"),
    "a zip bomb that says so": imagenet(
        lambda: bomb(4_000_000_000), at="in.zip", flags=("--partial",)
    ),
}
OTHER_SOURCES = {
    "one of MNIST's files is missing": mnist(changed("MNIST", without("t10k-images"))),
    "an idx file of another kind, with another number of images, or cut off": mnist(
        changed(
            "MNIST",
            edit("train-labels-idx1-ubyte", lambda _: idx(np.zeros(60_000))),
            edit(
                "train-images-idx3-ubyte",
                lambda _: struct.pack(">4I", 0x803, 60_000, 28, 28) + bytes(1_000_000),
            ),
        )
    ),
    "an idx file whose compressed form is cut off": mnist(
        changed("MNIST, compressed", cut("train-labels-idx1-ubyte.gz"))
    ),
    "CIFAR's Python version, which is made of pickles": cifar(
        lambda: {"in/cifar-10-batches-py/data_batch_1": b"x"}
    ),
    "CIFAR's archive is cut off": cifar(
        changed("CIFAR-10, archive", cut("a.tar.gz")), at="a.tar.gz"
    ),
    "one of CIFAR's files has another size": cifar(
        changed("CIFAR-10", edit("data_batch_1.bin", lambda _: bytes(3073)))
    ),
    "Animals-10 without one of its classes": animals(animals_in(without("ragno/"), packed=True)),
    "fractions of the split that do not sum to 1": animals(
        changed("animals"), flags=("--fractions", "0.8", "0.1")
    ),
    "parquet files where pyarrow is not installed": imagenet(
        changed("ImageNet, parquet"), at="imagenet-1k", missing="pyarrow"
    ),
    "parquet files of which two columns may be the label": parquet(
        lambda: {
            "in.parquet": parquet_of(
                [
                    {"image": image_bytes(n), "coarse_label": n // 2, "fine_label": n}
                    for n in range(4)
                ]
            )
        },
        at="in.parquet",
    ),
    "parquet files with several labels in a row": parquet(
        lambda: {"in.parquet": parquet_of(rows(4, label=lambda n: [n, n + 1]))}, at="in.parquet"
    ),
    "parquet files of which only one has class names": parquet(
        lambda: {
            "in/train.parquet": named_rows("cat", "dog"),
            "in/val.parquet": parquet_of(rows(4, label=lambda n: n % 2)),
        }
    ),
    "a parquet file with a class that the training file lacks": parquet(
        lambda: {
            "in/train.parquet": named_rows("cat", "dog"),
            "in/val.parquet": named_rows("dog", "owl"),
        }
    ),
    "a parquet file that is cut off": imagenet(
        changed("ImageNet, parquet", cut("train-00001-of-00003.parquet")), at="imagenet-1k"
    ),
}
ROWS = ARCHIVES | HOSTILE | OTHER_SOURCES
"""Maps each row of rows.yaml to its fault."""
add_rows(ROWS)


@scenario(
    "a zip bomb that hides it: the image is left out, and with it the rest of the bomb", begun=True
)
def _(place: Place) -> None:
    write(bomb(1000, bytes(50_000_000)), place.folder)
    place.prepare("imagenet", place.folder / "in.zip", "--partial", "--max-unreadable", 0.1)
    place.stdout += (place.out / "quarantine.jsonl").read_text()


@scenario("a link back to a folder above it")
def _(place: Place) -> None:
    write(filled("cat", "dog")(), place.folder)
    (place.folder / "in" / "cat" / "all").symlink_to("..")
    place.prepare("imagefolder", place.folder / "in")


@scenario("the shards' own folder as SOURCE")
def _(place: Place) -> None:
    write(official()(), place.folder)
    place.out = place.folder / "downloads"
    place.prepare("imagenet", place.out)


@scenario("an archive that may not be read")
def _(place: Place) -> None:
    write(official()(), place.folder)
    (place.folder / "downloads" / TRAIN_TAR).chmod(0)
    place.prepare("imagenet", place.folder / "downloads", fork=without_privileges)


@scenario("a link to nowhere in place of a folder")
def _(place: Place) -> None:
    write(filled("train/cat", "train/dog")(), place.folder)
    (place.folder / "in" / "val").symlink_to("/nowhere/val")
    place.prepare("imagefolder", place.folder / "in")


@scenario("a class folder that may not be listed")
def _(place: Place) -> None:
    write(filled("cat", "dog")(), place.folder)
    (place.folder / "in" / "dog").chmod(0)
    place.prepare("imagefolder", place.folder / "in", fork=without_privileges)
    (place.folder / "in" / "dog").chmod(0o755)


# ---- downloads -----------------------------------------------------------------------------------


def download_mnist(place: Place, url: str) -> None:
    place.prepare("mnist", place.folder / "mnist", "--download", "--url", url)


@scenario("`--download`: the server has no such file")
def _(place: Place) -> None:
    with WebServer({}) as server:
        download_mnist(place, server.url)


@scenario("`--download`: a file of another md5")
def _(place: Place) -> None:
    with WebServer({f"/{IMAGES}.gz": b"<html>Welcome to the hotel's network</html>"}) as server:
        download_mnist(place, server.url)


@scenario("`--download`: the server cannot be reached")
def _(place: Place) -> None:
    # Bind the port without listening, so that connections fail and no other process gets the port.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        download_mnist(place, f"http://127.0.0.1:{closed.getsockname()[1]}")


@scenario("`--download`: a file that is there already is another one")
def _(place: Place) -> None:
    write({f"mnist/{IMAGES}.gz": b"x"}, place.folder)
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


# ---- faults without a row in rows.yaml -----------------------------------------------------------


def cifar_with(name: str, change: Callable[[bytes], bytes], packed: bool) -> Callable[[], Files]:
    """Return a function that returns the CIFAR-10 files, or an archive of these files, with one
    file changed."""
    files = changed("CIFAR-10", edit(name, change))
    if not packed:
        return files
    return lambda: {"in": tgz_of({path.removeprefix("in/"): d for path, d in files().items()})}


def mnist_with(name: str, content: bytes, packed: bool) -> Callable[[], Files]:
    """Return a function that returns the MNIST files, in which one file has the given content."""
    files = changed("MNIST", edit(name, lambda _: content))
    return lambda: gzipped(files()) if packed else files()


def parquets(*flags: str, **splits: list[dict[str, Any]]) -> Callable[[str], Wrong]:
    """Return a function that takes an error message and returns a fault with the given Parquet
    files."""
    return lambda message: parquet(
        lambda: {f"in/{split}.parquet": parquet_of(listed) for split, listed in splits.items()},
        message,
        flags=flags,
    )


def lacking(column: str, **more: Any) -> list[dict[str, Any]]:
    """Return table rows without the given column, but with the additional columns in `more`."""
    return [{key: row[key] for key in row if key != column} | more for row in rows(6)]


def named_rows(*names: str, labels: Sequence[int] = (0, 1, 0, 1)) -> bytes:
    """Return a Parquet file that contains the given class names."""
    import datasets

    kind = datasets.ClassLabel(names=list(names))
    kinds = datasets.Features({"image": datasets.Image(), "label": kind})
    schema = datasets.Dataset.from_list(rows(2, label=lambda _: 0), kinds).data.table.schema
    listed = rows(len(labels), label=lambda n: labels[n])
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed, schema), file)
    return file.getvalue()


def invalid_label() -> Files:
    """Return a Parquet file with three class names in which one label is 9."""
    return {"in.parquet": named_rows("cat", "dog", "owl", labels=(0, 1, 2, 0, 1, 9))}


FLAGS = {
    ("--shard-mib", "0"): "'0' is not a positive integer",
    ("--minival", "1"): r"'1' is not a number in \[0, 1\)",
    ("--minival", "x"): "invalid fraction value: 'x'",
    ("--check", "pixels"): "invalid choice: 'pixels'",
    ("--val-fraction", "1"): r"'1' is not a number in \[0, 1\)",
}
OF_COMMANDS = {
    f"{flag} {value}": imagefolder(
        dict,
        rf"\Aerror: argument {flag}: {message}.*--help lists the options\)$",
        flags=(flag, value),
    )
    for (flag, value), message in FLAGS.items()
}
OF_FOLDERS = {
    "only images": imagefolder(filled(""), r"in: contains 2 images outside class folders"),
    "images in train": imagefolder(filled("train"), "train: contains 2 images outside class"),
    "images in a zip": imagefolder(
        lambda: {"in": zip_of({"1.jpg": image_bytes(1)})}, "in: contains 1 image outside class"
    ),
    "only texts": imagefolder(filled("a/1.txt", "b/1.txt"), "no images .* in its 2 subfolders"),
    "a class of texts": imagefolder(filled("a", "b/1.txt"), "these classes have no images: b"),
    "an empty val": imagefolder(
        filled("train/a", "train/b", "val/a/1.txt"), "val: contains no images"
    ),
    "no train": imagefolder(filled("val/a"), "has val/ but no train/"),
    "an image": imagefolder(filled("a"), "1.jpg: not a folder; expected", at="in/a/1.jpg"),
    "a val folder and a fraction": imagefolder(
        filled("train/a", "train/b", "val/a"),
        "--val-fraction 0.2 was given, but",
        flags=("--val-fraction", "0.2"),
    ),
    "12 numbers": imagefolder(
        filled(*map(str, range(12))),
        r"label 2 is class 10 in text order, but 2 in numeric order \(10 of 12 labels differ",
    ),
    "a name in two spellings": imagefolder(
        filled("train/caf\u00e9", "train/cafe\u0301"),
        r"folder names are identical after Unicode normalization: b'cafe.* and b'caf",
    ),
    "raw photos without classes": imagefolder(
        filled("x.cr2"),
        r"below it \(1 file not read as images: 1 .cr2; convert",
        flags=("--no-classes",),
    ),
    "photos in another format": imagefolder(
        filled("a", "b", "phone/1.heic"),
        r"these classes have no images: phone \(1 file not read as images: 1 .heic; install",
    ),
    "noise": imagefolder(lambda: {"in": bytes(range(256)) * 9}, "in: not a tar"),
    "a table that is a page": imagefolder(
        lambda: filled("a")() | {"in/metadata.jsonl": b"<html>\n"},
        r"metadata.jsonl: not a table \(",
    ),
    "a table with two labels": imagefolder(
        lambda: {
            "in/1.jpg": image_bytes(1),
            "in/metadata.csv": b"file_name,breed,age\n1.jpg,a,1\n",
        },
        "breed, age are possible: choose one with --label-column",
    ),
    "a table with a path that leads out": imagefolder(
        lambda: {"in/1.jpg": b"", "in/metadata.csv": b"file_name,label\n1.jpg,a\n../1.jpg,b\n"},
        r"name an image that is missing: ../1.jpg \(missing\)",
    ),
}
OF_ANIMALS = {
    f"{name}, {packed=}": animals(animals_in(change, packed), message)
    for packed in (False, True)
    for name, change, message in (
        (
            "two missing classes",
            without("ragno/", "cane/"),
            r"no images of dog \(cane\), spider \(ragno\): provide each of the ten",
        ),
        (
            "no class",
            lambda _: {"readme.txt": b""},
            r"no images of dog \(cane\), horse \(cavallo\), ",
        ),
        (
            "unknown folders",
            put({"leone/1.jpeg": b"", "tigre/1.jpeg": b""}),
            "unknown folders next to the class folders: leone, tigre:",
        ),
        ("two names", put({"dog/1.jpeg": b""}), r"dog has 2 folders \(.*cane, .*dog\):"),
        (
            "two places",
            put({"copy/ragno/1.jpeg": b""}),
            r"spider has 2 folders \(.*copy/ragno, .*ragno\)",
        ),
    )
} | {
    f"--fractions {values}": animals(
        changed("animals"),
        f"--fractions {values}: expected two",
        flags=("--fractions", *values.split()),
    )
    for values in ("0.85", "0.8 0.3", "1.5 -0.5", "nan 0.5")
}
OF_CIFAR = {
    f"{name}, {what}, {packed=}": cifar(cifar_with(name, change, packed), message)
    for packed in (False, True)
    for name, what, change, message in (
        (
            "test_batch.bin",
            "one byte less",
            lambda data: data[:-1],
            r"test_batch.bin: has 61,459 bytes, expected 61,460 \(20 rec",
        ),
        (
            "test_batch.bin",
            "label",
            lambda data: data[: 3073 * 7] + b"\x0a" + data[3073 * 7 + 1 :],
            "test_batch.bin: record 7 has label 10, expected 0 to 9",
        ),
        (
            "batches.meta.txt",
            "names",
            lambda _: b"cat\ncat\n",
            "batches.meta.txt: contains 2 names, 1 of them distinct; expected the names",
        ),
    )
} | {
    "damage in the middle": cifar(
        changed(
            "CIFAR-10, archive", edit("gz", lambda data: data[:1000] + bytes(1000) + data[2000:])
        ),
        "damaged or truncated|files are missing",
        at="a.tar.gz",
    ),
    "a cut tar, compressed": cifar(
        changed(
            "CIFAR-10, archive",
            edit("gz", lambda data: gzip.compress(gzip.decompress(data)[:70_000], 1)),
        ),
        "damaged or truncated",
        at="a.tar.gz",
    ),
    "a zip": cifar(lambda: {"in": b"PK\3\4" + bytes(600)}, "not a tar or tar.gz"),
    "links": cifar(
        lambda: {
            "in": tar_with(
                *(
                    member(f"../../{name}", type=tarfile.SYMTYPE, linkname="/etc/passwd")
                    for name in ("data_batch_1.bin", "test_batch.bin")
                )
            )
        },
        "no CIFAR files",
    ),
    "a bomb": cifar(
        lambda: {"in": tar_with(member("data_batch_1.bin", size=1 << 40))},
        r"contains 'data_batch_1.bin' \(1,099,511,627,776 bytes\) after 0 other members, unlike a",
    ),
    "too many files": cifar(
        lambda: {"in": tar_with(*(member(f"{number}.txt") for number in range(101)))},
        "unlike a CIFAR archive",
    ),
    "both data sets": cifar(
        lambda: changed("CIFAR-10")() | changed("CIFAR-100, extracted")(), "contains CIFAR-10 in "
    ),
}
OF_MNIST = {
    f"{name}, {what}, {packed=}": mnist(mnist_with(name, content, packed), message)
    for packed in (False, True)
    for name, what, content, message in (
        (
            "train-labels-idx1-ubyte",
            "page",
            b"<html>Not found",
            "found 15 bytes that begin with 3c68746d6c3e4e6f; copy",
        ),
        ("train-labels-idx1-ubyte", "empty", b"", "found 0 bytes that begin with ; copy"),
        (
            "t10k-labels-idx1-ubyte",
            "label",
            idx(np.arange(20) % 11),
            "record 10 has label 10, expected 0 to 9",
        ),
        (
            "t10k-images-idx3-ubyte",
            "type",
            struct.pack(">IIII", 0x0D03, 20, 28, 28) + bytes(99),
            "found 115 bytes that begin with 00000d03",
        ),
        (
            IMAGES,
            "count",
            idx(np.zeros((9, 28, 28))),
            r"an idx file of 15,696 bytes that begins with 00000803000000140000001c0000001c, found"
            " 7,072 bytes that begin with 0000080300000009; copy or",
        ),
        (
            IMAGES,
            "one byte more",
            idx(np.zeros((20, 28, 28))) + b"\0",
            "found more that begin with",
        ),
        # A small decompression bomb.
        (IMAGES, "bomb", idx(np.zeros((20, 28, 28))) + bytes(20_000_000), "found more"),
    )
} | {
    "not compressed": mnist(
        changed("MNIST, compressed", edit(f"{IMAGES}.gz", lambda _: idx(np.zeros((20, 28, 28))))),
        r"not a complete gzip file \(Not a gzipped file",
    ),
    "damage in the middle": mnist(
        changed(
            "MNIST, compressed",
            edit(f"{IMAGES}.gz", lambda data: data[:50] + b"\0" * 50 + data[100:]),
        ),
        r"not a complete gzip file \(",
    ),
    "other data sets": mnist(
        filled("KMNIST/raw/", "FashionMNIST/raw/"), "or use --download or another --variant"
    ),
    "two places": mnist(
        lambda: changed("MNIST")() | changed("MNIST, raw")(),
        r"found idx files in several folders \(.*/in, .*/in/raw\): pass one",
    ),
}
OF_PARQUET = {
    message: given(message)
    for message, given in {
        "columns are image, and no name is a usual one: choose one with --label-column": parquets(
            train=lacking("label")
        ),
        r"no column contains images \(bytes, or bytes and path\): .* label \(int64\)": parquets(
            train=lacking("image")
        ),
        "label, class are possible: choose one with --label-column": parquets(
            train=lacking("", **{"class": 2})
        ),
        "--label-column lable: ": parquets("--label-column", "lable", train=rows(6)),
        r"expected label \(with bytes and path\) and label": parquets(
            "--image-column", "label", train=rows(6)
        ),
        r"test.parquet: the columns are image; expected image \(with bytes and path\) and label": (
            parquets(train=rows(6), test=lacking("label"))
        ),
        r"no training files: add train-\*.parquet": parquets(test=rows(6)),
        r"no split in the names more.parquet: rename these files to train-\*, validation-\* or"
        r" test-\*": parquets(train=rows(6), more=rows(3)),
        r"in: no split in the names one\.parquet, two\.parquet: rename": parquets(
            **{"fine/one": rows(6), "more/two": rows(3)}
        ),
        "files of train are in several folders": parquets(
            **{"fine/train": rows(6), "coarse/train": rows(3)}
        ),
        r"only one class \(5\): provide at least two": parquets(train=rows(6, label=lambda _: 5)),
        r"train: 1 of 8 images have no label \(null, -1 or empty\): remove these rows": parquets(
            train=rows(8, label=lambda n: None if n == 7 else n % 3)
        ),
        "train: no images of classes that are listed or in another split: 3, 4, 5": parquets(
            train=rows(6), val=rows(6, label=lambda n: n)
        ),
        "--val-fraction 0.2 was given, but ": parquets(
            "--val-fraction", "0.2", train=rows(6), val=rows(6)
        ),
    }.items()
} | {
    "a label outside": parquet(
        invalid_label, "labels outside the 3 classes: 9: correct them", at="in.parquet"
    ),
    "other files": parquet(
        filled("a.json", "b.json", "c.arrow"),
        r"no .parquet files \(3 other files, no images: 2 .json, 1 .arrow\)",
    ),
    "no pyarrow": parquet(
        changed("parquet"),
        r"\Aerror: reading parquet files needs pyarrow: pip install pyarrow$",
        missing="pyarrow",
    ),
}
WHOLE = (
    "table, unknown class",
    "other folders",
    "no WNID",
    "parquets in another order",
    "a parquet row without label",
    "one parquet file less",
)
"""The faults that are tested with --dry-run. With --partial, the command would accept the fault,
print a different error, or leave copied images behind."""
OF_IMAGENET = {
    name: imagenet(files, message, at=at, flags=("--dry-run",) if name in WHOLE else ("--partial",))
    for name, files, message, at in (
        ("other folders", filled("cat/", "dog/"), "contains cat, dog", "in"),
        ("no WNID", filled("train/cat", "train/dog"), "train: 2 class folders .* cat, dog", "in"),
        (
            "foreign image",
            changed("ImageNet, torchvision", put({f"in/train/{WNIDS[0]}/cat.jpg": b"x"})),
            r"train: 1 images have file names that do not match their class in ImageNet: cat\.jpg",
            "in",
        ),
        (
            "image in a wrong tar",
            changed(
                "ImageNet, inner_tars",
                edit(
                    f"{WNIDS[4]}.tar",
                    lambda _: tar_of([(f"{WNIDS[5]}_1.JPEG", b"x"), ("cat.jpg", b"x")]),
                ),
            ),
            r"2 images have file names that .*: n\d+_1\.JPEG \(in n\d+\), cat\.jpg",
            "in",
        ),
        (
            "foreign train tar",
            official(edit(TRAIN_TAR, lambda _: tar_of([("readme.txt", b"x")]))),
            r"contains 'readme\.txt'; expected tars named by WordNet ID",
            "downloads",
        ),
        (
            "train tar with a file without a suffix",
            official(edit(TRAIN_TAR, lambda data: tar_of([("README", b"")])[:512] + data)),
            r"contains 'README'; expected tars named by WordNet ID",
            "downloads",
        ),
        (
            "table, one row less",
            table(
                lambda text: "\n".join(
                    line for line in text.splitlines() if "val_00000003," not in line
                )
            ),
            r"val: 1 images have no class in the label file: ILSVRC2012_val_00000003\.JPEG",
            "in",
        ),
        (
            "table, unknown class",
            table(lambda text: text.replace(WNIDS[2], "n99999999")),
            r"unknown classes: n99999999 \(2\)",
            "in",
        ),
        (
            "table, no WNIDs",
            table(lambda text: text.replace(WNIDS[2], "tench")),
            r"line \d+: expected a WordNet ID and a box",
            "in",
        ),
        (
            "table, other columns",
            table(lambda text: text.replace("ImageId", "id")),
            "columns are id, Pred.*; expected ImageId",
            "in",
        ),
        (
            "table, contradiction",
            table(
                lambda text: (
                    f"{text}ILSVRC2012_val_00000001,{WNIDS[0]} 1\n"
                    f"ILSVRC2012_val_00000001,{WNIDS[1]} 1\n"
                )
            ),
            r"line \d+: 'ILSVRC2012_val_00000001' has the label n\d+, but n\d+ in an earlier line",
            "in",
        ),
        (
            "labels that differ",
            other_labels,
            r"\d+ labels differ: pass only the correct label file",
            "in",
        ),
        (
            "folders by the kit's ids",
            folders_by_the_ids_of_the_kit,
            r"images have another class .*: ILSVRC2012_val_.* \(in n\d+\)",
            "in",
        ),
        (
            "kit without its table",
            kit(lambda files: {TRUTH: files[TRUTH]}),
            r"contains no meta\.mat; expected ImageNet's development kit",
            "downloads",
        ),
        (
            "kit with another table",
            kit(put({"data/meta.mat": b"x" * 200})),
            "not the kit's class table",
            "downloads",
        ),
        (
            "kit with other ids",
            kit(put({TRUTH: b"1\n2\n13\n"})),
            r"line 3 is '13'; expected the ILSVRC2012_ID of one",
            "downloads",
        ),
        ("kit with a group's id", kit(put({TRUTH: b"12\n"})), r"line 1 is '12'", "downloads"),
        (
            "cut kit",
            official(cut(KIT)),
            r"ILSVRC2012_devkit_t12\.tar\.gz: not a tar or tar\.gz, damaged or truncated",
            "downloads",
        ),
        (
            "parquets in another order",
            parquets_in_another_order,
            "the labels do not follow the order of the WordNet IDs",
            "in",
        ),
        (
            "a parquet row without label",
            lambda: {
                f"in/{split}-00000.parquet": parquet_of(
                    [
                        {"image": {"bytes": b"x", "path": f"n0000000{n}_1.JPEG"}, "label": label}
                        for n, label in enumerate((0, None))
                    ]
                )
                for split in ("train", "validation")
            },
            r"image 'n00000001_1\.JPEG' has label None; expected a name that ends in",
            "in",
        ),
        (
            "one parquet file less",
            changed("ImageNet, parquet", without("train-00001")),
            "1 of 3 parquet files of train are missing",
            "imagenet-1k",
        ),
        (
            "parquet of texts",
            lambda: {"train-0.parquet": parquet_of([{"text": "x", "label": 1}])},
            "the columns are text, label; expected image",
            "train-0.parquet",
        ),
        (
            "finished shards",
            official(put({"downloads/_info.json": b"{}"})),
            "contains finished shards",
            "downloads",
        ),
    )
}
index = partial(Wrong, "index")
OF_SHARDS = {
    "no folder": index(dict, "in: no such folder"),
    "noise": index(lambda: {"in/train-0.tar": b"x" * 600}, "train-0.tar: not a tar"),
    "another sidecar": index(
        lambda: {
            "in/train-0.tar": tar_of([("a.jpg", image_bytes()), ("a.cls", b"0")]),
            "in/train-0.json": b"[]",
        },
        "train-0.json: expected a JSON object",
    ),
    "tars one folder below": index(
        lambda: {"in/test/0.tar": b"", "in/train/0.tar": b""},
        "no .tar files, only in its subfolders test, train: move or link",
    ),
}
WRONG = {
    f"{kind}: {name}": fault
    for kind, faults in (
        ("command line", OF_COMMANDS),
        ("folder", OF_FOLDERS),
        ("animals", OF_ANIMALS),
        ("CIFAR", OF_CIFAR),
        ("MNIST", OF_MNIST),
        ("parquet", OF_PARQUET),
        ("ImageNet", OF_IMAGENET),
        ("shards", OF_SHARDS),
    )
    for name, fault in faults.items()
}
"""Maps names to the faults that have no row in rows.yaml."""
