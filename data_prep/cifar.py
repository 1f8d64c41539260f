"""Shards of CIFAR-10 or CIFAR-100, from the binary version.

    python -m data_prep.cifar SOURCE --out ROOT [--classes 10|100] [--download]

SOURCE is cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, or a folder that holds the archive or
its .bin files. The 50,000 training images become `train`, the 10,000 test images `val`; keys are
data_batch_1-00000 and so on, after file and position. CIFAR-100's labels are the 100 fine ones.
--download fetches the archive into SOURCE first and compares its md5.

An image is 32x32 RGB and becomes a JPEG of quality 100 without chroma subsampling: on photographs
shrunk to this size it differs from the original by at most 4 of 255 levels, 51 dB (quality 95: 19
levels, 41 dB; with the usual subsampling 37 dB at any quality). Extracted files are read in place,
those of an archive are unpacked temporarily.

The Python version (cifar-10-python.tar.gz) is not read: it is made of pickles, and reading a pickle
runs the code in it.
"""

from __future__ import annotations

import argparse
import tarfile
from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.command import Parser, add_arguments, run, write_or_plan
from data_prep.errors import PrepError, readable
from data_prep.read.raw_images import (
    DAMAGE,
    add_download_arguments,
    add_records,
    download_all,
    read_jpeg,
)
from data_prep.write.catalogue import Source
from data_prep.write.catalogue_builder import Builder

SIDE = 32
PIXEL_BYTES = 3 * SIDE * SIDE
URL = "https://www.cs.toronto.edu/~kriz/"
MAX_MEMBERS = 100
MAX_MEMBER_BYTES = 200_000_000
"""A CIFAR archive has about ten members; the largest is CIFAR-100's train.bin with 153,700,000
bytes."""


class Kind(NamedTuple):
    """One of the two data sets; the format: https://www.cs.toronto.edu/~kriz/cifar.html."""

    name: str
    folder: str
    archive: str
    md5: str
    """Of the archive; CIFAR-10's is on the page above, CIFAR-100's in torchvision's source."""
    num_classes: int
    class_names: str
    label_bytes: int
    """Bytes of a record before its pixels; the last one is the label."""
    files: Mapping[str, tuple[str, int]]
    """Split and records of each file."""


KINDS = {
    10: Kind(
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
    100: Kind(
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
# ---- the files -----------------------------------------------------------------------------------


def find_place(source: Path, classes: int | None = None) -> tuple[Kind, Path]:
    """Which data set is there, and the folder or archive with its files.

    What is extracted comes first. classes: 10 or 100, where both may be. Raises PrepError if there
    is nothing, or more than one.
    """
    kinds = [KINDS[classes]] if classes else list(KINDS.values())
    expected = " or ".join(f"{kind.archive} or its {', '.join(kind.files)}" for kind in kinds)
    if not source.exists():
        raise PrepError(
            f"{source}: no such file or folder; expected {expected}, or use --download with a"
            " folder"
        )
    candidates = [
        [source, *(source / kind.folder for kind in kinds)],
        [source / kind.archive for kind in kinds],
    ]
    for places in candidates if source.is_dir() else [[source]]:
        names = {place: _names(place) for place in places if place.exists()}
        found = [
            (kind, place) for kind in kinds for place in names if names[place] & set(kind.files)
        ]
        if len(found) > 1:
            several = " and ".join(f"{kind.name} in {place}" for kind, place in found)
            raise PrepError(
                f"{source}: there are {several}; give the one that is meant as SOURCE, or use"
                " --classes"
            )
        if found:
            return found[0]
    raise PrepError(f"{source}: no CIFAR files; expected {expected}, or use --download")


def _names(place: Path) -> set[str]:
    """Names of the files in a folder or, in any of its folders, an archive."""
    if place.is_dir():
        return {path.name for path in place.iterdir() if path.is_file()}
    return {name for name, _ in _members(place)}


def _members(path: Path, wanted: Container[str] = ()) -> Iterator[tuple[str, bytes]]:
    """(bare name, content if it is `wanted`) of the regular files of an archive.

    Raises PrepError for a damaged one, and for one with more or larger members than CIFAR's.
    """
    with (
        readable(path, DAMAGE, "not a tar or tar.gz, damaged or cut off"),
        tarfile.open(path) as archive,
    ):
        for number, member in enumerate(archive):
            if member.size > MAX_MEMBER_BYTES or number == MAX_MEMBERS:
                raise PrepError(
                    f"{path}: has {member.name!r} of {member.size:,} bytes and {number} more;"
                    " that is no CIFAR archive"
                )
            name = Path(member.name).name
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield name, file.read() if name in wanted else b""


# ---- the source ----------------------------------------------------------------------------------


def source(path: Path, classes: int | None = None) -> Source:
    """The images of an archive or a folder. classes: 10 or 100, where both may be.

    Raises PrepError as `find_place` does.
    """
    kind, place = find_place(path, classes)
    read = partial(read_jpeg, shape=(3, SIDE, SIDE))
    return Source("cifar", {"classes": kind.num_classes}, partial(_fill, kind, place), read)


def _fill(kind: Kind, place: Path, builder: Builder) -> None:
    needed = (*kind.files, kind.class_names)
    folder = place
    if not place.is_dir():
        folder = builder.folder / "unpacked"
        folder.mkdir()
        for name, content in _members(place, needed):
            if name in needed:
                (folder / name).write_bytes(content)
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise PrepError(
            f"{place}: {kind.name}'s {', '.join(missing)} are missing; the archive {kind.archive}"
            " has them"
        )
    class_names = (folder / kind.class_names).read_text(errors="replace").split()
    if not len(class_names) == len(set(class_names)) == kind.num_classes:
        raise PrepError(
            f"{place / kind.class_names}: {len(class_names)} names, {len(set(class_names))} of them"
            f" different; expected those of {kind.num_classes} classes, one a line"
        )
    builder.classes(class_names)
    for name in kind.files:
        _add_batch(builder, kind, folder / name, place / name)


def _add_batch(builder: Builder, kind: Kind, path: Path, shown: Path) -> None:
    """Add the records of one file: label bytes, then 1,024 bytes each of red, green and blue.

    shown: the file's path in errors.
    """
    split, count = kind.files[path.name]
    record = kind.label_bytes + PIXEL_BYTES
    size = path.stat().st_size
    if size != count * record:
        raise PrepError(
            f"{shown}: {size:,} bytes; expected {count:,} records of {record:,}, that is"
            f" {count * record:,}; fetch it again"
        )
    records = np.memmap(path, np.uint8, "r").reshape(count, record)
    labels = records[:, kind.label_bytes - 1].astype(np.int32)
    if labels.max() >= kind.num_classes:
        number = int(np.argmax(labels >= kind.num_classes))
        raise PrepError(
            f"{shown}: record {number} has label {labels[number]}; expected 0 to"
            f" {kind.num_classes - 1}; fetch it again"
        )
    offsets = kind.label_bytes + record * np.arange(count)
    add_records(builder, split, path, labels, offsets, PIXEL_BYTES, (path.name, path.stem))


# ---- the command ---------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> None:
    if args.download or args.url:
        if args.classes is None:
            raise PrepError("--download needs --classes 10 or --classes 100")
        kind = KINDS[args.classes]
        download_all({kind.archive: kind.md5}, args.url or URL, args.source)
    write_or_plan(source(args.source, args.classes), args)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.cifar", __doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="the archive, or a folder with it or with its .bin files",
    )
    parser.add_argument(
        "--classes",
        type=int,
        choices=tuple(KINDS),
        help="which data set (default: the one that is there)",
    )
    add_download_arguments(parser, "the archive", "170 MB")
    add_arguments(parser)
    return run(_run, parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
