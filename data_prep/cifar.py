"""Shards of CIFAR-10 or CIFAR-100, from the binary version.

    python -m data_prep.cifar SOURCE --out ROOT [--classes 10|100] [--download]

The data's story: SOURCE is cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, or a folder that
holds the archive or its .bin files. The 50,000 training images become `train`, the 10,000 test
images `val`; keys are data_batch_1-00000 and so on, after file and position. CIFAR-100's labels are
the 100 fine ones. --download fetches the archive into SOURCE first and compares its md5.

An image is 32x32 RGB and becomes a JPEG of quality 100 without chroma subsampling: on photographs
shrunk to this size it differs from the original by 4 of 255 levels at most, 51 dB (quality 95: 19
levels, 41 dB; with the usual subsampling 37 dB at any quality). Extracted files are read in place,
those of an archive are unpacked for the time it takes.

The Python version (cifar-10-python.tar.gz) is refused: it is made of pickles, and reading a pickle
runs whatever code is in it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import lzma
import sys
import tarfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from data_prep.command import Parser, add_arguments, run, write_or_plan
from data_prep.errors import PrepError
from data_prep.read.download import download
from data_prep.write.catalogue import Builder, Sample, Source, read_range

SIDE = 32
PIXEL_BYTES = 3 * SIDE * SIDE
JPEG_QUALITY = 100
URL = "https://www.cs.toronto.edu/~kriz/"
DAMAGE = (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading a damaged archive raises."""
MAX_MEMBERS = 100
MAX_MEMBER_BYTES = 200_000_000
"""A CIFAR archive has about ten members; the largest is CIFAR-100's train.bin with 153,700,000
bytes."""


class Kind(NamedTuple):
    """One of the two data sets. https://www.cs.toronto.edu/~kriz/cifar.html describes the
    format."""

    name: str
    folder: str
    archive: str
    md5: str
    """Of the archive; CIFAR-10's is on the page above, CIFAR-100's in torch's and others'
    loaders."""
    num_classes: int
    class_names: str
    label_bytes: int
    """Of a record, before its pixels; the last one is the label."""
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
PICKLES = {
    *(f"data_batch_{n}" for n in range(1, 6)),
    "test_batch",
    "batches.meta",
    "train",
    "test",
    "meta",
}
"""Files of the Python version."""


# ---- the files -----------------------------------------------------------------------------------


def find_place(source: Path, classes: int | None = None) -> tuple[Kind, Path]:
    """Which data set is there, and the folder or archive with its files; what is extracted comes
    first.

    classes: 10 or 100, where both may be. Raises PrepError if there is nothing, more than one, or
    the Python version.
    """
    kinds = [KINDS[classes]] if classes else list(KINDS.values())
    expected = " or ".join(f"{kind.archive} or its {', '.join(kind.files)}" for kind in kinds)
    if not source.exists():
        raise PrepError(
            f"{source}: no such file or folder; expected {expected}, or use --download with a"
            " folder"
        )
    folders = []
    archives = [source]
    if source.is_dir():
        folders = [source, *(source / kind.folder for kind in kinds)]
        archives = [source / kind.archive for kind in kinds]
    for places in (folders, archives):
        there = {place: _names(place) for place in places if place.exists()}
        found = [
            (kind, place)
            for kind in kinds
            for place, names in there.items()
            if names & kind.files.keys()
        ]
        if len(found) > 1:
            several = " and ".join(f"{kind.name} in {place}" for kind, place in found)
            raise PrepError(
                f"{source}: there are {several}; give the one that is meant as SOURCE, or use"
                " --classes"
            )
        if found:
            return found[0]
    if pickled := _pickled(source):
        raise PrepError(
            f"{pickled}: this is the Python version, made of pickles, and reading a pickle runs"
            " whatever code is in it; take the binary version"
            f" ({' or '.join(kind.archive for kind in kinds)}, see {URL}cifar.html), or use"
            " --download"
        )
    raise PrepError(f"{source}: no CIFAR files; expected {expected}, or use --download")


def _names(place: Path) -> set[str]:
    """Names of the files in a folder or an archive, wherever in the archive they are."""
    if place.is_dir():
        return {path.name for path in place.iterdir() if path.is_file()}
    with _opened(place) as archive:
        return {Path(member.name).name for member in _members(place, archive)}


def _pickled(source: Path) -> Path | None:
    """A file of the Python version, if there is one."""
    if source.is_file():
        return source if _names(source) & PICKLES else None
    places = [source, source / "cifar-10-batches-py", source / "cifar-100-python"]
    candidates = [
        *(place / name for place in places for name in sorted(PICKLES)),
        *source.glob("cifar-10*-python.tar.gz"),
    ]
    return next((path for path in candidates if path.is_file()), None)


def _opened(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path)
    except DAMAGE as error:
        raise PrepError(
            f"{path}: not a whole tar or tar.gz ({error}); copy or download it again"
        ) from error


def _members(path: Path, archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Regular files of an archive. Raises PrepError for a damaged one, and for one with more or
    larger members than CIFAR's have."""
    members: list[tarfile.TarInfo] = []
    try:
        for member in archive:
            if member.size > MAX_MEMBER_BYTES or len(members) == MAX_MEMBERS:
                raise PrepError(
                    f"{path}: has {member.name!r} of {member.size:,} bytes and {len(members)} more;"
                    " that is no CIFAR archive"
                )
            members.append(member)
    except DAMAGE as error:
        raise PrepError(
            f"{path}: damaged or cut off ({error}); copy or download it again"
        ) from error
    return [member for member in members if member.isreg()]


def _unpack(path: Path, kind: Kind, folder: Path) -> None:
    """Write the archive's files of this kind to `folder`, under their bare names."""
    with _opened(path) as archive:
        for member in _members(path, archive):
            name = Path(member.name).name
            if name not in (*kind.files, kind.class_names):
                continue
            if (folder / name).exists():
                raise PrepError(
                    f"{path}: {name} is there twice; that is no official archive, download it again"
                )
            file = archive.extractfile(member)
            assert file is not None, member.name
            (folder / name).write_bytes(file.read())


# ---- the source ----------------------------------------------------------------------------------


def source(path: Path, classes: int | None = None) -> Source:
    """The images of an archive or a folder. classes: 10 or 100, where both may be. Raises PrepError
    as `find_place` does."""
    kind, place = find_place(path, classes)
    return Source("cifar", {"classes": kind.num_classes}, partial(_fill, kind, place), read)


def _fill(kind: Kind, place: Path, builder: Builder) -> None:
    folder = place
    if not place.is_dir():
        folder = builder.folder / "unpacked"
        folder.mkdir()
        _unpack(place, kind, folder)
    if missing := [
        name for name in (*kind.files, kind.class_names) if not (folder / name).is_file()
    ]:
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


def _add_batch(builder: Builder, kind: Kind, path: Path, told: Path) -> None:
    """Add the records of one file: label bytes, then 1,024 bytes each of red, green and blue, row
    by row. told: its path in errors."""
    split, count = kind.files[path.name]
    record = kind.label_bytes + PIXEL_BYTES
    size = path.stat().st_size
    if size != count * record:
        raise PrepError(
            f"{told}: {size:,} bytes; expected {count:,} records of {record:,}, that is"
            f" {count * record:,}; fetch it again"
        )
    labels = (
        np.memmap(path, np.uint8, "r")
        .reshape(count, record)[:, kind.label_bytes - 1]
        .astype(np.int32)
    )
    if labels.max() >= kind.num_classes:
        number = int(np.argmax(labels >= kind.num_classes))
        raise PrepError(
            f"{told}: record {number} has label {labels[number]}; expected 0 to"
            f" {kind.num_classes - 1}; fetch it again"
        )
    builder.add(
        split,
        builder.file(path),
        names=[f"{path.name}/{number}" for number in range(count)],
        labels=labels,
        offsets=kind.label_bytes + record * np.arange(count),
        sizes=np.full(count, PIXEL_BYTES),
        keys=[f"{path.stem}-{number:05d}" for number in range(count)],
    )


def read(sample: Sample) -> bytes:
    """The JPEG of one image."""
    pixels = np.frombuffer(read_range(sample), np.uint8).reshape(3, SIDE, SIDE).transpose(1, 2, 0)
    encoded = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(
        encoded, "JPEG", quality=JPEG_QUALITY, subsampling=0
    )
    return encoded.getvalue()


# ---- the command ---------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> None:
    if args.download or args.url:
        if args.classes is None:
            raise PrepError("--download needs --classes 10 or --classes 100")
        kind = KINDS[args.classes]
        download(
            f"{(args.url or URL).rstrip('/')}/{kind.archive}", args.source / kind.archive, kind.md5
        )
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
    parser.add_argument(
        "--download",
        action="store_true",
        help="fetch the archive into the folder SOURCE first (170 MB)",
    )
    parser.add_argument(
        "--url",
        metavar="BASE",
        help="with --download, which it implies: a mirror that has the archive below BASE",
    )
    add_arguments(parser)
    return run(_prepare, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
