"""The layouts of ImageNet's images, and how each lists them.

    train   ILSVRC2012_img_train.tar            a tar of 1,000 tars
            <wnid>.tar ...                      these 1,000 tars
            train/<wnid>/*.JPEG                 torchvision's tree, and Kaggle's (ILSVRC/...)
    val     ILSVRC2012_img_val.tar, val/*.JPEG  flat: needs a file of labels (imagenet_labels.py)
            val/<wnid>/*.JPEG
    both    *.zip                               Kaggle's, or a zip of train/ and val/
            data/train-*.parquet, data/validation-*.parquet     Hugging Face's

A layout lists its images: archive or folder, name there, WNID, offset, size. Listing reads headers
and folders only. data_prep/read/imagenet_search.py finds the layouts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data_prep.errors import PrepError
from data_prep.read import parquet
from data_prep.read.archives import Members, walk_tar, walk_zip
from data_prep.read.image_tree import listed
from data_prep.read.imagenet_labels import WNID
from data_prep.write.catalogue_builder import Builder

IMAGE = re.compile(
    r"((?:(n\d{8})_\d+|ILSVRC2012_val_\d{8}))(?:_(n\d{8}))?\.(?:jpe?g|png|webp)",
    re.IGNORECASE | re.ASCII,
)
"""Name of an image: key, WNID of a training image, WNID that Hugging Face appends."""
IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
VAL_FOLDERS = ("val", "validation")
TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
READERS = 4
"""Archives or folders listed at once by threads, which wait for a disk or a network."""

T = TypeVar("T")
R = TypeVar("R")


class Images(NamedTuple):
    """Some images of a layout; `wnid` is "" if their place does not show it, but `wnids` may."""

    file: Path
    wnid: str
    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    wnids: list[str] | None = None


@dataclass(frozen=True)
class Layout:
    """One split, as it was found."""

    split: str
    what: str
    path: Path
    images: Callable[[Builder], Iterator[Images]]
    wnids: Callable[[Builder], set[str]]
    """WNIDs of the classes; empty if only a file of labels gives them."""
    inputs: tuple[Path, ...]
    """Archives and folders whose times of change show whether it has changed."""
    flat: bool = False
    lacking: str = ""
    """Files that are missing, by the names of the others."""


def _constant(wnids: Iterable[str]) -> Callable[[Builder], set[str]]:
    """`Layout.wnids` of a layout whose names show them."""
    found = set(wnids)
    return lambda _: found


# ---- tar -----------------------------------------------------------------------------------------


def _side_by_side(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """function(item) of each, in order, READERS at once."""
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(function, items)


def _from_members(file: Path, wnid: str, members: Members) -> Images:
    names = members.names
    if any("/" in name for name in names):
        names = [name.rpartition("/")[2] for name in names]
    return Images(file, wnid, names, members.offsets, members.sizes)


class ClassTar(NamedTuple):
    """A class's tar: the bytes [start, stop) of a file."""

    wnid: str
    path: Path
    start: int = 0
    stop: int | None = None


def _inner_tars(path: Path) -> list[ClassTar]:
    found = []
    for members in walk_tar(path):
        places = zip(members.offsets.tolist(), members.sizes.tolist(), strict=True)
        for name, (offset, size) in zip(members.names, places, strict=True):
            base = name.rpartition("/")[2]
            if base.startswith("."):  # macOS puts `._x` next to x
                continue
            wnid, _, extension = base.rpartition(".")
            if not WNID.fullmatch(wnid) or extension != "tar":
                raise PrepError(
                    f"{path}: holds {name!r}; expected tars named by WordNet ids, as n01440764.tar"
                )
            found.append(ClassTar(wnid, path, offset, offset + size))
    return found


def _class_images(tars: Callable[[], list[ClassTar]], _: Builder) -> Iterator[Images]:
    found = tars()
    listed = _side_by_side(lambda tar: list(walk_tar(tar.path, tar.start, tar.stop)), found)
    for tar, batches in zip(found, listed, strict=True):
        for members in batches:
            yield _from_members(tar.path, tar.wnid, members)


def nested_tar(path: Path) -> Layout:
    tars = partial(_inner_tars, path)
    images = partial(_class_images, tars)
    what = "a tar of tars, read in place"
    return Layout("train", what, path, images, lambda _: {tar.wnid for tar in tars()}, (path,))


def folder_of_tars(paths: Sequence[Path]) -> Layout:
    tars = [ClassTar(path.stem, path) for path in paths]
    images = partial(_class_images, lambda: tars)
    what = f"{len(tars):,} tars, one a class, read in place"
    wnids = _constant(tar.wnid for tar in tars)
    return Layout("train", what, paths[0].parent, images, wnids, tuple(paths))


def flat_tar(path: Path) -> Layout:
    def images(_: Builder) -> Iterator[Images]:
        for members in walk_tar(path):
            yield _from_members(path, "", members)

    return Layout(
        "val", "a flat tar, read in place", path, images, _constant(()), (path,), flat=True
    )


# ---- folders -------------------------------------------------------------------------------------


def files_of(folder: Path) -> Members:
    """Images of a folder, with offset 0; subfolders are ignored. Raises OSError, PrepError."""
    names = [name for name in listed(folder)[1] if name.lower().endswith(IMAGE_EXTENSIONS)]
    sizes = [os.stat(folder / name).st_size for name in names]
    return Members(names, np.zeros(len(names), np.int64), np.array(sizes, np.int64))


def tree(split: str, folder: Path, wnids: Sequence[str]) -> Layout:
    classes = [folder / wnid for wnid in wnids]

    def images(_: Builder) -> Iterator[Images]:
        for path, members in zip(classes, _side_by_side(files_of, classes), strict=True):
            yield _from_members(path, path.name, members)

    return Layout(
        split, f"{len(wnids):,} class folders", folder, images, _constant(wnids), (folder, *classes)
    )


def flat_folder(folder: Path) -> Layout:
    def images(_: Builder) -> Iterator[Images]:
        yield _from_members(folder, "", files_of(folder))

    return Layout("val", "a flat folder", folder, images, _constant(()), (folder,), flat=True)


# ---- zip and parquet -----------------------------------------------------------------------------

IN_ZIP = re.compile(
    r"(?:.*/)?(train|val|validation)/(?:(n\d{8})/)?([^./][^/]*)", re.IGNORECASE | re.ASCII
)


def place_in_zip(name: str) -> tuple[str, str, str] | None:
    """(split, WNID or "", file name) of a member that is an image of ImageNet's."""
    found = IN_ZIP.fullmatch(name) if name.lower().endswith(IMAGE_EXTENSIONS) else None
    if found is None or name.startswith("__MACOSX/"):
        return None
    return "train" if found[1].lower() == "train" else "val", found[2] or "", found[3]


def _zip_images(path: Path, split: str, _: Builder) -> Iterator[Images]:
    for members in walk_zip(path):
        rows_of: dict[str, list[int]] = {}
        names = {}
        for row, name in enumerate(members.names):
            if (place := place_in_zip(name)) and place[0] == split:
                rows_of.setdefault(place[1], []).append(row)
                names[row] = place[2]
        for wnid, rows in rows_of.items():
            yield Images(
                path, wnid, [names[row] for row in rows], members.offsets[rows], members.sizes[rows]
            )


def zip_layout(path: Path, split: str, wnids: set[str]) -> Layout:
    """wnids: of the class folders of a split in a zip; "" for a flat folder."""
    flat = "" in wnids
    what = "a flat folder" if flat else f"{len(wnids):,} class folders"
    images = partial(_zip_images, path, split)
    classes = _constant(wnids - {""})
    return Layout(split, f"{what} in a zip, read in place", path, images, classes, (path,), flat)


def _parquet_images(files: Sequence[Path], builder: Builder) -> Iterator[Images]:
    """The images, after a check that labels are positions among the sorted WNIDs in the names.

    Other mirrors use other numbers.
    """
    wnid_of: dict[int, str] = {}
    for rows in parquet.spool(files, builder):
        matches = [IMAGE.fullmatch(os.path.basename(name)) for name in rows.names]
        wnids = [(match[3] or match[2] or "") if match else "" for match in matches]
        for name, label, wnid in zip(rows.names, rows.labels, wnids, strict=True):
            if not wnid or label is None or wnid_of.setdefault(label, wnid) != wnid:
                raise PrepError(
                    f"{rows.parquet}: image {name!r} has label {label}; expected a name that ends"
                    " in its WordNet id"
                    + (f", and label {label} is {wnid_of[label]} elsewhere" if wnid else "")
                )
        names = [
            match[1] + os.path.splitext(name)[1] if match else name
            for match, name in zip(matches, rows.names, strict=True)
        ]
        yield Images(rows.file, "", names, rows.offsets, rows.sizes, wnids)
    if [wnid_of[label] for label in sorted(wnid_of)] != sorted(wnid_of.values()) or len(
        set(wnid_of.values())
    ) < len(wnid_of):
        raise PrepError(
            f"{files[0].parent}: labels are not in the order of the WordNet ids; expected the"
            " numbering of ILSVRC/imagenet-1k"
        )


def parquet_layout(split: str, files: Sequence[Path]) -> Layout:
    def wnids(builder: Builder) -> set[str]:
        return {wnid for images in _parquet_images(files, builder) for wnid in images.wnids or ()}

    what = f"{len(files):,} parquet files, copied once to read them"
    return Layout(
        split,
        what,
        files[0].parent,
        partial(_parquet_images, files),
        wnids,
        tuple(files),
        lacking=parquet.missing_files(split, files),
    )
