"""Define tiny sources of all kinds, each with the samples that its shards must contain.

A source is a dict from paths to contents, so that a test can damage it before it is written. The
expected samples come from the images themselves, and never from the code that reads the source.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fake_imagenet import LAYOUTS, Fake, make_fake, tar_of
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from prep_place import new_catalog
from small_shards import image_bytes

from data_prep import animals10, cifar, imagefolder, imagenet, mnist, parquet

Files = dict[str, bytes]
"""Maps each path below a folder to its content. A path that ends in a slash is an empty folder."""


class Sample(NamedTuple):
    split: str
    """The name of the split, or "" if a hash of the key selects the split."""
    key: str
    """The key without the hash that is added if several samples would have the same key."""
    label: int
    image: Any
    """The encoded image, or its pixels if the source stores no encoded images."""


@dataclass(frozen=True)
class Tiny:
    """A source, the command that prepares it, and its samples."""

    command: str
    files: Files
    samples: list[Sample]
    open: Callable[..., Any]
    """A function that takes the paths in `at` and returns their `Source`."""
    at: str = "in"
    """The SOURCE arguments relative to the folder, separated by spaces."""
    flags: tuple[str, ...] = ()
    unreadable: frozenset[str] = frozenset()
    """The keys of images that cannot be decoded."""

    def write(self, folder: Path) -> list[Path]:
        """Write the files to `folder`, and return the SOURCE arguments."""
        write(self.files, folder)
        return [folder / name for name in self.at.split()]

    def listed(self, folder: Path) -> list[Sample]:
        """Return the samples in the catalog of this source, whose files are in `folder`."""
        opened = self.open(*(folder / name for name in self.at.split()))
        found = new_catalog(opened, folder / "catalog", seed=0)
        splits = {sample.split for sample in self.samples}
        return [
            Sample(split if split in splits else "", bare(row.key), row.label, opened.read(row))
            for split, count in found.splits.items()
            for row in found.table(split).samples(range(count))
        ]


def bare(key: str) -> str:
    return re.sub("_[0-9a-f]{16}$", "", key)


def write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (folder / name).mkdir(exist_ok=True)
        else:
            (folder / name).write_bytes(content)


def in_order(samples: Iterable[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: (*s[:3], s.image if isinstance(s.image, bytes) else b""))


def is_same(found: bytes, image: Any) -> bool:
    """Return whether `found` has the same bytes as `image`, or is a JPEG of the pixels in `image`
    without chroma subsampling."""
    if isinstance(image, bytes):
        return found == image
    decoded = Image.open(io.BytesIO(found))
    assert isinstance(decoded, JpegImageFile)
    assert {layer[1:3] for layer in decoded.layer} == {(1, 1)}, "chroma must not be subsampled"
    return np.abs(np.asarray(decoded, np.int64) - image).max() <= 4


# ---- archives ------------------------------------------------------------------------------------


def below(prefix: str, files: Files) -> Files:
    return {prefix + name: content for name, content in files.items()}


def zip_of(files: Files, prefix: str = "", compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for name, content in below(prefix, files).items():
            archive.writestr(name, content)
    return packed.getvalue()


def tgz_of(files: Files, prefix: str = "") -> bytes:
    return gzip.compress(tar_of(below(prefix, files).items()), 1, mtime=0)


def tar_with(*members: tarfile.TarInfo) -> bytes:
    """Return a tar whose members have no content. The members may be links, and may declare any
    size."""
    return b"".join(member.tobuf(tarfile.GNU_FORMAT) for member in members) + bytes(10240)


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


# ---- folders of classes, in archives or not ------------------------------------------------------

BROKEN = image_bytes(99)[:-100]
FOOD: Files = {
    f"{split}/{name}/{number}.jpg": image_bytes(20 * number + len(split + name))
    for split, count in (("train", 6), ("test", 2))
    for name in ("pizza", "steak", "ramen")
    for number in range(count)
} | {"train/pizza/0.jpeg": image_bytes(77), "train/ramen/cut.jpg": BROKEN}
OTHERS = {"readme.txt": b"hello", "__MACOSX/train/pizza/._0.jpg": b"x", ".DS_Store": b"x"}


def food(files: Files, at: str = "in") -> Tiny:
    classes = ["pizza", "ramen", "steak"]
    samples = [
        Sample(
            {"train": "train", "test": "val"}[split], f"{name}_{stem}", classes.index(name), data
        )
        for path, data in FOOD.items()
        for split, name, stem in [path.rpartition(".")[0].split("/")]
    ]
    return Tiny(
        "imagefolder", files, samples, imagefolder.source, at, unreadable=frozenset({"ramen_cut"})
    )


ANIMALS: Files = {
    f"{folder}/OIP-{number}.{'jpg' if number else 'jpeg'}": image_bytes(12 * place + number)
    for place, folder in enumerate(animals10.ENGLISH)
    for number in range(4)
} | {"ragno/OIP-1.png": image_bytes(200), "mucca/cut.jpg": BROKEN}
"""Maps each path below raw-img to its image. Two paths differ only in their suffixes."""


def animals(files: Files, at: str = "in") -> Tiny:
    names = sorted(animals10.ENGLISH.values())
    samples = [
        Sample("", f"{english}_{stem}", names.index(english), data)
        for path, data in ANIMALS.items()
        for folder, stem in [path.rpartition(".")[0].split("/")]
        for english in [animals10.ENGLISH[folder]]
    ]
    return Tiny(
        "animals10", files, samples, animals10.source, at, unreadable=frozenset({"cow_cut"})
    )


def renamed(change: Callable[[str], str]) -> Files:
    """Return the animal images, with `change` applied to the names of their class folders."""
    parts = {path: path.split("/") for path in ANIMALS}
    return {f"in/{change(parts[path][0])}/{parts[path][1]}": ANIMALS[path] for path in ANIMALS}


# ---- arrays of pixels ----------------------------------------------------------------------------

PER_FILE = 20
"""The number of records in each file. The real files contain 10,000 to 60,000 records (see
`few_records`)."""
NAMES = {
    10: ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    100: [f"fine_{number:02d}" for number in range(100)],
}


def few_records(patch: pytest.MonkeyPatch) -> None:
    """Make the readers of MNIST and CIFAR expect `PER_FILE` records per file."""
    patch.setattr(mnist, "PARTS", {"train": ("train", PER_FILE), "val": ("t10k", PER_FILE)})
    for classes, kind in cifar.KINDS.items():
        fewer = {name: (split, PER_FILE) for name, (split, _) in kind.files.items()}
        patch.setitem(cifar.KINDS, classes, kind._replace(files=fewer))


def gradient(label: int, number: int, side: int) -> np.ndarray:
    """Return a gray image without hard edges. The image depends on the label and the number."""
    y, x = np.mgrid[:side, :side]
    return (3 * x + (label % 5) * y // 2 + 2 * number).astype(np.uint8)


def cifar_tiny(classes: int, pack: Callable[[Files], Files], at: str = "in") -> Tiny:
    """Return a tiny CIFAR data set. `pack` puts the files into a folder or an archive."""
    kind = cifar.KINDS[classes]
    # The original file ends with a blank line.
    files = {kind.class_names: "\n".join([*NAMES[classes], "", ""]).encode()}
    samples = []
    for place, (name, (split, _)) in enumerate(kind.files.items()):
        records = b""
        for number in range(PER_FILE):
            label = (7 * number + place) % classes
            planes = [gradient(label, number + 9 * channel, 32) for channel in range(3)]
            head = bytes([label // 5, label])[-kind.label_bytes :]
            records += head + b"".join(plane.tobytes() for plane in planes)
            key = f"{name.removesuffix('.bin')}-{number:05d}"
            samples.append(Sample(split, key, label, np.stack(planes, axis=-1)))
        files[name] = records
    return Tiny("cifar", pack(files), samples, partial(cifar.source, classes=classes), at)


def idx(values: np.ndarray) -> bytes:
    head = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    return head + values.astype(np.uint8).tobytes()


def mnist_tiny(pack: Callable[[Files], Files], at: str = "in", variant: str = "mnist") -> Tiny:
    files = {}
    samples = []
    for part, split in (("train", "train"), ("t10k", "val")):
        labels = [7 * number % 10 for number in range(PER_FILE)]
        images = [gradient(label, number, 28) for number, label in enumerate(labels)]
        files[f"{part}-images-idx3-ubyte"] = idx(np.stack(images))
        files[f"{part}-labels-idx1-ubyte"] = idx(np.array(labels))
        samples += [
            Sample(split, f"{part}-{number:05d}", label, image)
            for number, (label, image) in enumerate(zip(labels, images, strict=True))
        ]
    flags = ("--variant", variant)
    return Tiny("mnist", pack(files), samples, partial(mnist.source, variant=variant), at, flags)


def gzipped(files: Files) -> Files:
    return {f"{name}.gz": gzip.compress(data, 1, mtime=0) for name, data in files.items()}


def dotted(files: Files) -> Files:
    return {name.replace("-idx", ".idx"): data for name, data in files.items()}


# ---- tables --------------------------------------------------------------------------------------


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def rows(count: int, start: int = 0, label: Callable[[int], Any] = lambda n: n % 3) -> list[dict]:
    """Return table rows whose images have no names."""
    return [
        {"image": {"bytes": image_bytes(start + n), "path": None}, "label": label(n)}
        for n in range(count)
    ]


def tables() -> Tiny:
    """Return a source with two training files and one validation file. The image in row 15 of the
    training files cannot be decoded."""
    train, val = rows(20), rows(7, 100)
    train[15]["image"]["bytes"] = BROKEN
    files = {
        "in/validation-00000-of-00001.parquet": val,
        "in/train-00000-of-00002.parquet": train[:11],
        "in/train-00001-of-00002.parquet": train[11:],
    }
    samples = [
        Sample(split, f"{number:08d}", row["label"], row["image"]["bytes"])
        for split, listed in (("train", train), ("val", val))
        for number, row in enumerate(listed)
    ]
    made = {name: parquet_of(listed) for name, listed in files.items()}
    return Tiny("parquet", made, samples, parquet.source, unreadable=frozenset({"00000015"}))


# ---- ImageNet ------------------------------------------------------------------------------------


@cache
def fake(odd: bool = False) -> Fake:
    return make_fake(num_classes=10, train_per_class=5, val_per_class=2, odd=odd)


@cache
def layout(name: str, odd: bool = True) -> Tiny:
    """Return the fake ImageNet in one of the layouts in fake_imagenet.py. If `odd` is true, some
    images are not ordinary JPEGs."""
    made = fake(odd)
    with tempfile.TemporaryDirectory() as folder:
        at = [str(path.relative_to(folder)) for path in LAYOUTS[name](made, Path(folder))]
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }
    samples = [
        Sample(split, key, label, made.images(split)[key])
        for split in ("train", "val")
        for key, label in made.labels(split).items()
    ]
    # The fifth odd image is truncated.
    unreadable = {key for _, key, *_ in samples if key.startswith(f"{made.wnids[4]}_90000")}

    def opened(*paths: Path) -> Any:
        return imagenet.source(paths, allow_partial=True)

    return Tiny(
        "imagenet", files, samples, opened, " ".join(at), ("--partial",), frozenset(unreadable)
    )


# ---- all sources ---------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[], Tiny]] = {
    "folder": lambda: food(below("in/", FOOD | OTHERS)),
    "zip": lambda: food({"in.zip": zip_of(FOOD | OTHERS, "food/")}, "in.zip"),
    "zip without a suffix": lambda: food({"in": zip_of(FOOD)}),
    "tar": lambda: food({"in.tar": tar_of(below("./a/b/", FOOD | OTHERS).items())}, "in.tar"),
    "tgz": lambda: food({"in.tgz": tgz_of(FOOD | OTHERS)}, "in.tgz"),
    "animals": lambda: animals(below("in/raw-img/", ANIMALS)),
    "animals, moved": lambda: animals(below("in/", ANIMALS)),
    "animals, nested": lambda: animals(below("in/archive/raw-img/raw-img/", ANIMALS)),
    "animals in English": lambda: animals(renamed(animals10.ENGLISH.__getitem__)),
    "Animals": lambda: animals(renamed(str.capitalize)),
    "animals in a zip": lambda: animals({"in.zip": zip_of(ANIMALS, "raw-img/")}, "in.zip"),
    "animals in a deep zip": lambda: animals(
        {"in.zip": zip_of(ANIMALS | OTHERS, "a/b c/", zipfile.ZIP_STORED)}, "in.zip"
    ),
    "CIFAR-10": lambda: cifar_tiny(10, partial(below, "in/")),
    "CIFAR-10, archive": lambda: cifar_tiny(
        10, lambda f: {"a.tar.gz": tgz_of(f, "x/")}, "a.tar.gz"
    ),
    "CIFAR-10, deep tar": lambda: cifar_tiny(
        10, lambda files: {"a.tar": tar_of(below("./deep/er/", files).items())}, "a.tar"
    ),
    "CIFAR-100, extracted": lambda: cifar_tiny(
        # The command prefers extracted files to the archive.
        100,
        lambda f: below("in/cifar-100-binary/", f) | {"in/cifar-100-binary.tar.gz": b"not read"},
    ),
    "CIFAR-100 beside its archive": lambda: cifar_tiny(
        100, lambda files: {"in/cifar-100-binary.tar.gz": tgz_of(files, "cifar-100-binary/")}
    ),
    "MNIST": lambda: mnist_tiny(partial(below, "in/")),
    "MNIST, compressed": lambda: mnist_tiny(lambda files: below("in/", gzipped(files))),
    "MNIST with dots": lambda: mnist_tiny(lambda files: below("in/", dotted(files))),
    "MNIST, raw": lambda: mnist_tiny(
        # The command prefers uncompressed files to compressed files.
        lambda f: below("in/raw/", f) | below("in/raw/", dict.fromkeys(gzipped(f), b"not read"))
    ),
    "FashionMNIST": lambda: mnist_tiny(
        lambda f: below("in/FashionMNIST/raw/", gzipped(f)), variant="fashion"
    ),
    "parquet": tables,
    **{f"ImageNet, {name.replace('_', ' ')}": partial(layout, name) for name in LAYOUTS},
}


@cache
def tiny(name: str) -> Tiny:
    with pytest.MonkeyPatch.context() as patch:
        few_records(patch)
        return SOURCES[name]()


# ---- changes that damage a source ----------------------------------------------------------------

Change = Callable[[Files], Files]


def cut(name: str, part: float = 0.5) -> Change:
    """Return a change that keeps only the fraction `part` at the start of each file whose path ends
    with `name`."""
    return edit(name, lambda data: data[: int(len(data) * part)])


def edit(name: str, change: Callable[[bytes], bytes]) -> Change:
    """Return a change that applies `change` to the content of each file whose path ends with
    `name`."""

    def changed(files: Files) -> Files:
        assert any(path.endswith(name) for path in files)
        return {p: change(data) if p.endswith(name) else data for p, data in files.items()}

    return changed


def without(*parts: str) -> Change:
    """Return a change that removes all files whose paths contain one of `parts`."""
    return lambda files: {
        path: data for path, data in files.items() if not any(part in path for part in parts)
    }


def put(more: Files) -> Change:
    """Return a change that adds the files in `more`, and replaces files with the same paths."""
    return lambda files: files | more


def only(files: Files) -> Change:
    return lambda _: files


# ---- what shards contain -------------------------------------------------------------------------


class Stored(NamedTuple):
    data: bytes
    label: int


def stored(root: Path, split: str) -> dict[str, Stored]:
    """Read a split with only the standard library, and return a dict from keys to samples."""
    members: dict[str, bytes] = {}
    for path in root.glob(f"{split}-*.tar"):
        with tarfile.open(path) as tar:
            for entry in tar:
                assert entry.name not in members
                file = tar.extractfile(entry)
                assert file is not None
                members[entry.name] = file.read()
    return {
        name.removesuffix(".jpg"): Stored(data, int(members[name.replace(".jpg", ".cls")]))
        for name, data in members.items()
        if name.endswith(".jpg")
    }
