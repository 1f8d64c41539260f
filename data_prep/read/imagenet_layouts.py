"""The layouts in which ImageNet's images come, told by what is there. Free of torch.

The data's story: paths go in; each archive or folder among them, and in the folders that such
downloads have, is recognised by its name or its first image. What is found are layouts of `train`
and `val` and files that tell the classes of a flat `val`:

    train   ILSVRC2012_img_train.tar            a tar of 1,000 tars
            <wnid>.tar ...                      these 1,000 tars
            train/<wnid>/*.JPEG                 torchvision's tree; Kaggle's ILSVRC/Data/CLS-LOC/train
    val     ILSVRC2012_img_val.tar, val/*.JPEG  flat: needs a file of labels (data_prep/read/imagenet_labels.py)
            val/<wnid>/*.JPEG
    both    *.zip                               Kaggle's, or a zip of train/ and val/
            data/train-*.parquet, data/validation-*.parquet     Hugging Face's

A layout lists its images: archive or folder, name there, WNID, offset, size. Listing reads headers
and folders only.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data_prep.errors import PrepError
from data_prep.read import imagenet_labels, parquet
from data_prep.read.archives import Members, walk_tar, walk_zip
from data_prep.read.imagenet_labels import WNID, ValLabels
from data_prep.write.catalogue import Builder, Sample, some
from vit.system.files import unreadable

IMAGE = re.compile(
    r"((?:(n\d{8})_\d+|ILSVRC2012_val_\d{8}))(?:_(n\d{8}))?\.(?:jpe?g|png|webp)",
    re.IGNORECASE | re.ASCII,
)
"""Name of an image: key, WNID of a training image, WNID that Hugging Face appends."""
IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
FOLDERS = {"train", "val", "validation", "data", "ilsvrc", "cls-loc"} | {
    f"ilsvrc2012_{n}" for n in ("img_train", "img_val", "devkit_t12")
}
"""Folders that are looked into, in lower case."""
VAL_FOLDERS = ("val", "validation")
TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
READERS = 4
"""Archives or folders listed at once by threads: they wait for a disk or a network, hardly for
Python."""

T = TypeVar("T")
R = TypeVar("R")


class Images(NamedTuple):
    """Some images of a layout: `wnid` is "" where their place does not tell it; then `wnids`
    may."""

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
    """WNIDs of the classes; empty where only a file of labels tells them."""
    inputs: tuple[Path, ...]
    """Archives and folders whose time of change tells whether it is still the same."""
    flat: bool = False
    lacking: str = ""
    """Files that should be there by the names of the others."""


@dataclass
class Found:
    """What lies in the paths that were given."""

    layouts: list[Layout] = field(default_factory=list)
    labels: list[ValLabels] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What was looked at and not taken, for an error message."""
    inner_tars: list[Path] = field(default_factory=list)
    parquets: list[Path] = field(default_factory=list)


def _told(wnids: Iterable[str]) -> Callable[[Builder], set[str]]:
    """`Layout.wnids` of a layout whose folders or archives tell them."""
    found = set(wnids)
    return lambda _: found


# ---- tar -----------------------------------------------------------------------------------------


def _side_by_side(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """function(item) of each, in order, READERS at once, and not far ahead of whoever takes the
    results: they would fill the memory."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) == 2 * READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _from_members(file: Path, wnid: str, members: Members) -> Images:
    names = members.names
    if any("/" in name for name in names):
        names = [name.rpartition("/")[2] for name in names]
    return Images(file, wnid, names, members.offsets, members.sizes)


class InnerTar(NamedTuple):
    """A class's tar, in the bytes [start, stop) of another."""

    wnid: str
    start: int
    stop: int


def _inner_tars(path: Path) -> list[InnerTar]:
    found = []
    for members in walk_tar(path):
        for name, offset, size in zip(
            members.names, members.offsets.tolist(), members.sizes.tolist(), strict=True
        ):
            base = name.rpartition("/")[2]
            if base.startswith("."):
                continue
            if not WNID.fullmatch(base.removesuffix(".tar")) or not base.endswith(".tar"):
                raise PrepError(
                    f"{path}: holds {name!r}; expected tars named by WordNet ids, as n01440764.tar"
                )
            found.append(InnerTar(base.removesuffix(".tar"), offset, offset + size))
    return found


def _nested_tar(path: Path) -> Layout:
    def wnids(_: Builder) -> set[str]:
        return {tar.wnid for tar in _inner_tars(path)}

    def images(_: Builder) -> Iterator[Images]:
        tars = _inner_tars(path)
        listed = _side_by_side(lambda tar: list(walk_tar(path, tar.start, tar.stop)), tars)
        for tar, batches in zip(tars, listed, strict=True):
            for members in batches:
                yield _from_members(path, tar.wnid, members)

    return Layout("train", "a tar of tars, read in place", path, images, wnids, (path,))


def _folder_of_tars(tars: Sequence[Path]) -> Layout:
    def images(_: Builder) -> Iterator[Images]:
        for path, batches in zip(
            tars, _side_by_side(lambda tar: list(walk_tar(tar)), tars), strict=True
        ):
            for members in batches:
                yield _from_members(path, path.stem, members)

    what = f"{len(tars):,} tars, one a class, read in place"
    return Layout(
        "train", what, tars[0].parent, images, _told(tar.stem for tar in tars), tuple(tars)
    )


def _flat_tar(path: Path) -> Layout:
    def images(_: Builder) -> Iterator[Images]:
        for members in walk_tar(path):
            yield _from_members(path, "", members)

    return Layout("val", "a flat tar, read in place", path, images, _told(()), (path,), flat=True)


def _look_at_tar(path: Path, found: Found, named: bool) -> None:
    """named: by the user, so it must be one of ImageNet's; in a folder others may lie beside
    them."""
    name = path.name.lower()
    if WNID.fullmatch(path.stem):
        found.inner_tars.append(path)
    elif name == TRAIN_TAR.lower():
        found.layouts.append(_nested_tar(path))
    elif name == VAL_TAR.lower():
        found.layouts.append(_flat_tar(path))
    else:
        try:
            first = next(walk_tar(path)).names[0].rpartition("/")[2]
        except (PrepError, StopIteration) as error:
            if named:
                raise PrepError(str(error) or f"{path}: an empty tar; download it again") from error
            found.remarks.append(str(error) or f"{path} is an empty tar")
            return
        # task 3: 120 breeds of dogs
        if first.endswith(".tar") and WNID.fullmatch(first[:-4]) and "_t3" not in name:
            found.layouts.append(_nested_tar(path))
        elif first.startswith("ILSVRC2012_val_"):
            found.layouts.append(_flat_tar(path))
        elif named:
            raise PrepError(
                f"{path}: begins with {first!r}; expected ImageNet's tar of tars or its tar of"
                " validation images"
            )
        else:
            found.remarks.append(f"{path} begins with {first!r}")


# ---- folders -------------------------------------------------------------------------------------


def _entries(folder: Path) -> list[os.DirEntry]:
    """Entries of a folder by name, hidden ones (`._x` and `.DS_Store` of macOS) left out. Raises
    PrepError if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return sorted(
                (e for e in found if not e.name.startswith(".") and e.name != "__MACOSX"),
                key=lambda entry: entry.name,
            )
    except OSError as error:
        raise PrepError(str(unreadable(folder, error))) from error


def _files_of(folder: Path) -> Members:
    """Files of a folder, with offset 0; other folders inside are not looked into."""
    files = [
        entry
        for entry in _entries(folder)
        if entry.name.lower().endswith(IMAGE_EXTENSIONS) and not entry.is_dir()
    ]
    try:
        sizes = [entry.stat().st_size for entry in files]
    except OSError as error:  # a link whose file is gone
        raise PrepError(str(unreadable(Path(error.filename or folder), error))) from error
    return Members(
        [entry.name for entry in files], np.zeros(len(files), np.int64), np.array(sizes, np.int64)
    )


def _tree(split: str, folder: Path, wnids: Sequence[str]) -> Layout:
    classes = [folder / wnid for wnid in wnids]

    def images(_: Builder) -> Iterator[Images]:
        for path, members in zip(classes, _side_by_side(_files_of, classes), strict=True):
            yield _from_members(path, path.name, members)

    return Layout(
        split, f"{len(wnids):,} class folders", folder, images, _told(wnids), (folder, *classes)
    )


def _flat_folder(folder: Path) -> Layout:
    def images(_: Builder) -> Iterator[Images]:
        yield _from_members(folder, "", _files_of(folder))

    return Layout("val", "a flat folder", folder, images, _told(()), (folder,), flat=True)


def _split_of_tree(folder: Path, wnids: Sequence[str]) -> str:
    """By its first image, or else by its name."""
    for wnid in wnids:
        if names := _files_of(folder / wnid).names:
            return "val" if names[0].startswith("ILSVRC2012_val_") else "train"
    return "val" if folder.name.lower() in VAL_FOLDERS else "train"


def _look_into(folder: Path, found: Found, named: bool) -> None:
    entries = _entries(folder)
    if named and not entries:
        raise PrepError(
            f"{folder}: an empty folder; expected ImageNet's archives or its train/ and val/"
        )
    if any(entry.name == "_info.json" for entry in entries):
        raise PrepError(
            f"{folder}: holds finished shards (_info.json), not the files they are made of"
        )
    folders = [entry.name for entry in entries if entry.is_dir()]
    files = [entry.name for entry in entries if not entry.is_dir()]
    wnids = [name for name in folders if WNID.fullmatch(name)]
    known = [name for name in folders if name.lower() in FOLDERS]
    strange = [name for name in folders if name not in known and not WNID.fullmatch(name)]
    flat = any(
        name.startswith("ILSVRC2012_val_") and name.lower().endswith(IMAGE_EXTENSIONS)
        for name in files
    )
    is_split = folder.name.lower() in ("train", *VAL_FOLDERS)
    if strange and (
        wnids
        or (
            is_split
            and not known
            and not flat
            and not any(name.endswith((".tar", ".parquet")) for name in files)
        )
    ):
        raise PrepError(
            f"{folder}: {len(strange)} class folders are not named by WordNet ids (as n01440764):"
            f" {some(strange)}; rename or remove them; trees with other names are for `python -m"
            " data_prep.imagefolder`"
        )
    if named and not (wnids or known or flat):
        found.remarks.append(f"{folder} holds {some([entry.name for entry in entries])}")
    if wnids:
        found.layouts.append(_tree(_split_of_tree(folder, wnids), folder, wnids))
    if flat:
        found.layouts.append(_flat_folder(folder))
    if imagenet_labels.META in files and imagenet_labels.TRUTH in files:
        inputs = (folder / imagenet_labels.META, folder / imagenet_labels.TRUTH)
        found.labels.append(
            ValLabels(
                folder,
                "the development kit",
                partial(imagenet_labels.read_devkit_folder, folder),
                inputs,
            )
        )
    for name in files:
        _look_at_file(folder / name, found, named=False)
    for name in known:
        _look_into(folder / name, found, named=False)


# ---- zip and parquet -----------------------------------------------------------------------------

IN_ZIP = re.compile(
    r"(?:.*/)?(train|val|validation)/(?:(n\d{8})/)?([^./][^/]*)", re.IGNORECASE | re.ASCII
)


def _place_in_zip(name: str) -> tuple[str, str, str] | None:
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
            if (place := _place_in_zip(name)) and place[0] == split:
                rows_of.setdefault(place[1], []).append(row)
                names[row] = place[2]
        for wnid, rows in rows_of.items():
            yield Images(
                path, wnid, [names[row] for row in rows], members.offsets[rows], members.sizes[rows]
            )


def _look_into_zip(path: Path, found: Found, named: bool) -> None:
    wnids: dict[str, set[str]] = {}
    for members in walk_zip(path):
        for row, name in enumerate(members.names):
            if place := _place_in_zip(name):
                wnids.setdefault(place[0], set()).add(place[1])
            elif name.rpartition("/")[2] == imagenet_labels.KAGGLE_TABLE and not name.startswith(
                "__MACOSX/"
            ):
                table = Sample(
                    "", 0, name, str(path), int(members.offsets[row]), int(members.sizes[row])
                )
                read = partial(imagenet_labels.read_kaggle_table_in_zip, table)
                found.labels.append(ValLabels(path, "Kaggle's table in the zip", read, (path,)))
    for split, of_split in sorted(wnids.items()):
        flat = "" in of_split
        what = (
            f"{'a flat folder' if flat else f'{len(of_split):,} class folders'} in a zip, read in"
            " place"
        )
        found.layouts.append(
            Layout(
                split,
                what,
                path,
                partial(_zip_images, path, split),
                _told(of_split - {""}),
                (path,),
                flat=flat,
            )
        )
    if named and not wnids:
        raise PrepError(
            f"{path}: holds no images in train/<wnid>/ or val/; expected Kaggle's"
            " imagenet-object-localization-challenge.zip"
        )


def _parquet_images(files: Sequence[Path], builder: Builder) -> Iterator[Images]:
    """Labels are checked to be positions among the sorted WNIDs that the names end in: other
    mirrors number otherwise."""
    wnid_of: dict[int, str] = {}
    for rows in parquet.spool(files, builder):
        matches = [IMAGE.fullmatch(os.path.basename(name)) for name in rows.names]
        told = [(match[3] or match[2] or "") if match else "" for match in matches]
        for name, label, wnid in zip(rows.names, rows.labels.tolist(), told, strict=True):
            if not wnid or wnid_of.setdefault(label, wnid) != wnid:
                raise PrepError(
                    f"{rows.parquet}: image {name!r} has label {label}; expected a name that ends"
                    " in its WordNet id"
                    + (f", and label {label} is {wnid_of[label]} elsewhere" if wnid else "")
                )
        names = [
            match[1] + os.path.splitext(name)[1] if match else name
            for match, name in zip(matches, rows.names, strict=True)
        ]
        yield Images(rows.file, "", names, rows.offsets, rows.sizes, told)
    if [wnid_of[label] for label in sorted(wnid_of)] != sorted(wnid_of.values()) or len(
        set(wnid_of.values())
    ) < len(wnid_of):
        raise PrepError(
            f"{files[0].parent}: labels are not in the order of the WordNet ids; expected the"
            " numbering of ILSVRC/imagenet-1k"
        )


def _parquet_layout(split: str, files: Sequence[Path]) -> Layout:
    totals = {int(match[1]) for file in files if (match := re.search(r"-of-(\d+)", file.name))}
    missing = max(totals, default=len(files)) - len(files)
    lacking = (
        f"{missing} of {max(totals)} parquet files of {split} are missing" if missing > 0 else ""
    )

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
        lacking=lacking,
    )


# ---- all together --------------------------------------------------------------------------------


def _look_at_file(path: Path, found: Found, named: bool) -> None:
    name = path.name.lower()
    if name.endswith(".tar"):
        _look_at_tar(path, found, named)
    elif imagenet_labels.DEVKIT.fullmatch(name):
        found.labels.append(
            ValLabels(
                path,
                "the development kit",
                partial(imagenet_labels.read_devkit_archive, path),
                (path,),
            )
        )
    elif name == imagenet_labels.KAGGLE_TABLE.lower():
        found.labels.append(
            ValLabels(
                path, "Kaggle's table", partial(imagenet_labels.read_kaggle_table, path), (path,)
            )
        )
    elif name == imagenet_labels.SYNSET_LIST or (named and name.endswith(".txt")):
        found.labels.append(
            ValLabels(
                path,
                "a list of WordNet ids",
                partial(imagenet_labels.read_synset_list, path),
                (path,),
            )
        )
    elif name.endswith(".zip"):
        _look_into_zip(path, found, named)
    elif name.endswith(".parquet"):
        found.parquets.append(path)
    elif name == "meta.bin":
        found.remarks.append(
            f"{path} is torchvision's pickle of labels, which is not read: the development kit"
            " beside it says the same"
        )
    elif name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        found.remarks.append(f"{path} is compressed and cannot be read in place: unpack it first")
    elif named:
        raise PrepError(
            f"{path}: not one of ImageNet's files; expected {TRAIN_TAR}, {VAL_TAR}, a .zip,"
            " .parquet, or a file of labels"
        )


def look(paths: Sequence[Path]) -> Found:
    """What lies in these files and folders. Raises PrepError for what is missing, unreadable,
    foreign, or there twice."""
    found = Found()
    for path in dict.fromkeys(Path(os.path.abspath(path)) for path in paths):
        if not path.exists():
            raise PrepError(
                f"{path}: no such file or folder; expected ImageNet's archives, or a folder that"
                " holds them"
            )
        if path.is_dir():
            _look_into(path, found, named=True)
        else:
            _look_at_file(path, found, named=True)
    for folder in dict.fromkeys(tar.parent for tar in found.inner_tars):
        found.layouts.append(
            _folder_of_tars(sorted({tar for tar in found.inner_tars if tar.parent == folder}))
        )
    for folder in dict.fromkeys(file.parent for file in found.parquets):
        for split, names in (("train", ("train",)), ("val", VAL_FOLDERS)):
            if files := sorted(
                {f for f in found.parquets if f.parent == folder and f.name.split("-")[0] in names}
            ):
                found.layouts.append(_parquet_layout(split, files))
    for split in ("train", "val"):
        once = {
            (layout.what, layout.path): layout for layout in found.layouts if layout.split == split
        }
        if len(once) > 1:
            both = "; ".join(f"{path} ({what})" for what, path in once)
            raise PrepError(
                f"{split} is there {len(once)} times: {both}. Give the one to use, e.g. by its own"
                " path, not the folder's"
            )
    # train first
    found.layouts = sorted(
        {layout.split: layout for layout in found.layouts}.values(), key=lambda layout: layout.split
    )
    return found
