"""Write shards of CIFAR-10 or CIFAR-100 from the binary version.

    python -m data_prep.cifar SOURCE --out ROOT [--classes 10|100] [--download]

SOURCE is cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, or a folder with the archive or its
.bin files. The 50,000 training images become `train` and the 10,000 test images become `val`. A key
consists of the file name and the image's position in the file, such as data_batch_1-00000. For
CIFAR-100, labels are the 100 fine classes. --download first fetches the archive into SOURCE and
checks its md5.

Each 32x32 RGB image becomes a JPEG of quality 100 without chroma subsampling. On photos shrunk to
this size, the JPEG differs from the original by at most 4 of 255 levels (51 dB). At quality 95, it
differs by 19 levels (41 dB). With the usual subsampling, it reaches 37 dB at any quality. Extracted
files are read in place. Archived files are unpacked temporarily.

The Python version (cifar-10-python.tar.gz) is not supported, because it consists of pickles and
loading a pickle can run arbitrary code.
"""

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.command import source_command
from data_prep.errors import PrepError, require
from data_prep.read.archives import small_members
from data_prep.read.download import download_flags, download_if_asked
from data_prep.read.raw_images import add_records, read_jpeg
from data_prep.write.catalog import Builder, Source

SIDE = 32
PIXEL_BYTES = 3 * SIDE * SIDE
URL = "https://www.cs.toronto.edu/~kriz/"
MAX_MEMBERS = 100
MAX_MEMBER_BYTES = 200_000_000
"""The maximum size of an archive member. CIFAR-100's train.bin has 153,700,000 bytes."""


class CifarKind(NamedTuple):
    """CIFAR-10 or CIFAR-100 in the format of https://www.cs.toronto.edu/~kriz/cifar.html."""

    name: str
    folder: str
    archive: str
    md5: str
    """The archive's md5, taken from the web page (CIFAR-10) or torchvision's source (CIFAR-100)."""
    num_classes: int
    class_names: str
    label_bytes: int
    """The number of label bytes before each record's pixels. The last of these bytes is the
    label."""
    files: Mapping[str, tuple[str, int]]
    """The split and the number of records for each file."""


KINDS = {
    10: CifarKind(
        name="CIFAR-10",
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        num_classes=10,
        class_names="batches.meta.txt",
        label_bytes=1,
        files={
            **{f"data_batch_{n}.bin": ("train", 10_000) for n in range(1, 6)},
            "test_batch.bin": ("val", 10_000),
        },
    ),
    100: CifarKind(
        name="CIFAR-100",
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        num_classes=100,
        class_names="fine_label_names.txt",
        label_bytes=2,
        files={"train.bin": ("train", 50_000), "test.bin": ("val", 10_000)},
    ),
}
PICKLES = frozenset(
    {"cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1", "batches.meta"}
    | {"cifar-100-python", "cifar-100-python.tar.gz", "meta"}
)
"""The names of files and folders in the Python version."""


# ---- the files -----------------------------------------------------------------------------------


def find_place(source: Path, classes: int | None = None) -> tuple[CifarKind, Path]:
    """Find the data set in `source`. Return its kind, and the folder or archive with its files.

    Extracted files are preferred over an archive. classes: 10 or 100, if `source` may contain both
    data sets. Raises PrepError unless exactly one data set matches.
    """
    kinds = [KINDS[classes]] if classes else list(KINDS.values())
    expected = " or ".join(f"{kind.archive} or its {', '.join(kind.files)}" for kind in kinds)
    require(source, f"{expected}, or use --download with a folder")

    candidates = [
        [source, *(source / kind.folder for kind in kinds)],
        [source / kind.archive for kind in kinds],
    ]
    for places in candidates if source.is_dir() else [[source]]:
        names = {place: _names(place) for place in places if place.exists()}
        matches = [
            (kind, place) for kind, place in product(kinds, names) if names[place] & set(kind.files)
        ]
        if len(matches) > 1:
            several = " and ".join(f"{kind.name} in {place}" for kind, place in matches)
            raise PrepError(
                f"{source}: contains {several}: pass one of these paths as SOURCE, or use --classes"
            )
        if matches:
            return matches[0]

    pickles = sorted(PICKLES & {path.name for path in source.glob("*")}.union(*names.values()))
    problem = (
        f"{pickles[0]} is of CIFAR's Python version, whose pickles can run code"
        if pickles
        else "found no CIFAR files"
    )
    raise PrepError(
        f"{source}: {problem}; expected the binary version, {expected}, or use --download"
    )


def _names(place: Path) -> set[str]:
    """Return the names of all files in a folder or an archive, without their directories."""
    if place.is_dir():
        return {path.name for path in place.iterdir() if path.is_file()}
    return {name for name, _ in _members(place)}


def _members(path: Path, needed: tuple[str, ...] = ()) -> Iterator[tuple[str, bytes]]:
    return small_members(path, needed, MAX_MEMBERS, MAX_MEMBER_BYTES, "a CIFAR archive")


# ---- the source ----------------------------------------------------------------------------------


def source(path: Path, classes: int | None = None) -> Source:
    """Return a `Source` for an archive or a folder. classes: 10 or 100, if `path` may contain both.

    Raises PrepError in the same cases as `find_place`.
    """
    kind, place = find_place(path, classes)
    return Source(
        "cifar",
        {"classes": kind.num_classes},
        partial(_fill, kind, place),
        partial(read_jpeg, shape=(3, SIDE, SIDE)),
    )


def _fill(kind: CifarKind, place: Path, builder: Builder) -> None:
    """Add the records of each file.

    A record consists of label bytes, then 1,024 bytes each of red, green and blue.
    """
    folder = _unpacked(kind, place, builder)
    class_names = (folder / kind.class_names).read_text(errors="replace").split()
    if not len(class_names) == len(set(class_names)) == kind.num_classes:
        raise PrepError(
            f"{place / kind.class_names}: contains {len(class_names)} names,"
            f" {len(set(class_names))} of them distinct; expected the names of {kind.num_classes}"
            " classes, one per line"
        )
    builder.classes(class_names)

    record_bytes = kind.label_bytes + PIXEL_BYTES
    for name, (split, count) in kind.files.items():
        path = folder / name
        size = path.stat().st_size
        if size != count * record_bytes:
            raise PrepError(
                f"{place / name}: has {size:,} bytes, expected {count * record_bytes:,} ({count:,}"
                f" records of {record_bytes:,} bytes): download the file again"
            )

        records = np.memmap(path, np.uint8, "r").reshape(count, record_bytes)
        add_records(
            builder,
            split,
            path,
            labels=records[:, kind.label_bytes - 1].astype(np.int32),
            labels_path=place / name,
            first=kind.label_bytes,
            step=record_bytes,
            image_bytes=PIXEL_BYTES,
            names=name,
            keys=path.stem,
        )


def _unpacked(kind: CifarKind, place: Path, builder: Builder) -> Path:
    """Return a folder with all files of a data set. An archive is unpacked temporarily."""
    needed = (*kind.files, kind.class_names)
    folder = place
    if not place.is_dir():
        folder = builder.folder / "unpacked"
        folder.mkdir()
        for name, content in _members(place, needed):
            if name in needed:
                (folder / name).write_bytes(content)

    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise PrepError(
            f"{place}: these files are missing: {', '.join(missing)}; extract them from"
            f" {kind.archive}"
        )
    return folder


# ---- the command ---------------------------------------------------------------------------------


def _source(args: argparse.Namespace) -> Source:
    if args.classes is not None:
        kind = KINDS[args.classes]
        download_if_asked(args, {kind.archive: kind.md5}, URL)
    elif args.download or args.url:
        raise PrepError("--download requires --classes 10 or --classes 100")
    return source(args.source, args.classes)


main = source_command(
    "cifar",
    __doc__,
    {
        "source": {
            "type": Path,
            "metavar": "SOURCE",
            "help": "the archive, or a folder with the archive or its .bin files",
        },
        "--classes": {
            "type": int,
            "choices": tuple(KINDS),
            "help": "10 or 100 classes (default: the data set found in SOURCE)",
        },
        **download_flags("the archive", "170 MB"),
    },
    _source,
)


if __name__ == "__main__":
    raise SystemExit(main())
