"""Recognize the supported layouts of ImageNet, and list their images.

    train   ILSVRC2012_img_train.tar            a tar of 1,000 tars
            <wnid>.tar ...                      these 1,000 tars
            train/<wnid>/*.JPEG                 torchvision's and Kaggle's folders (ILSVRC/...)
    val     ILSVRC2012_img_val.tar, val/*.JPEG  flat: needs a label file (imagenet_labels.py)
            val/<wnid>/*.JPEG
    both    *.zip                               Kaggle's zip, or a zip of train/ and val/
            data/train-*.parquet, data/validation-*.parquet     Hugging Face's files

A layout lists each image with its archive or folder, name, WNID, offset and size. Listing reads
only headers and folders. `find_layouts` identifies each given archive or folder by its name or its
first image, and also searches the usual subfolders of downloads.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError, some
from data_prep.read import imagenet_labels, parquet
from data_prep.read.archives import Members, walk_tar, walk_zip
from data_prep.read.image_tree import listed
from data_prep.read.imagenet_labels import DEVKIT, KAGGLE_TABLE, META, TRUTH, WNID, ValLabels
from data_prep.write.catalogue import Builder
from data_prep.write.samples import Sample

IMAGE = re.compile(
    r"((?:(n\d{8})_\d+|ILSVRC2012_val_\d{8}))(?:_(n\d{8}))?\.(?:jpe?g|png|webp)",
    re.IGNORECASE | re.ASCII,
)
"""Matches an image name. Groups: key, WNID of a training image, WNID added by Hugging Face."""
IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
VAL_FOLDERS = ("val", "validation")
TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
SEARCHED = {"train", "val", "validation", "data", "ilsvrc", "cls-loc"} | {
    f"ilsvrc2012_{n}" for n in ("img_train", "img_val", "devkit_t12")
}
"""The names, in lower case, of subfolders to search."""
VAL_IMAGE = "ILSVRC2012_val_"
READERS = 4
"""The number of archives or folders to list in parallel, to hide disk or network latency."""


class Images(NamedTuple):
    """A batch of images in a layout. If their location does not determine the class, `wnid` is "",
    and `wnids` contains each image's WNID if known."""

    file: Path
    wnid: str
    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    wnids: list[str] | None = None


@dataclass(frozen=True)
class Layout:
    """One split of ImageNet in a supported layout."""

    split: str
    title: str
    path: Path
    images: Callable[[Builder], Iterator[Images]]
    wnids: Callable[[Builder], Collection[str]]
    """Returns the WNIDs of the classes, or nothing if only a label file lists them."""
    inputs: tuple[Path, ...]
    """The archives and folders whose modification times show whether the split has changed."""
    flat: bool = False
    lacking: str = ""
    """A line about missing files, inferred from the names of the existing files, or ""."""


# ---- tars and folders ----------------------------------------------------------------------------


class Place(NamedTuple):
    """A folder of images, or a tar of images in the bytes [start, stop) of a file."""

    wnid: str
    """The WNID of all images, or "" for images of several classes."""
    path: Path
    start: int = 0
    stop: int | None = None

    def members(self) -> list[Members]:
        """List the images. Raises OSError and PrepError."""
        if self.path.is_dir():
            return [members_of(self.path)]
        return list(walk_tar(self.path, self.start, self.stop))


def members_of(folder: Path) -> Members:
    """List the images directly in a folder. Their offsets are 0."""
    names = [name for name in listed(folder)[1] if name.lower().endswith(IMAGE_EXTENSIONS)]
    sizes = [os.stat(folder / name).st_size for name in names]
    return Members(names, np.zeros(len(names), np.int64), np.array(sizes, np.int64))


def _images_in(places: Callable[[], Sequence[Place]], _: Builder) -> Iterator[Images]:
    todo = places()
    with ThreadPoolExecutor(READERS) as pool:
        for place, batches in zip(todo, pool.map(Place.members, todo), strict=True):
            for names, offsets, sizes in batches:
                bare = [name.rpartition("/")[2] for name in names]
                yield Images(place.path, place.wnid, bare, offsets, sizes)


def _in_place(
    split: str,
    title: str,
    path: Path,
    places: Callable[[], Sequence[Place]],
    inputs: Iterable[Path] = (),
    flat: bool = False,
) -> Layout:
    """Return the layout for tars or folders. inputs: see `Layout`; the default is `path`."""
    return Layout(
        split,
        title,
        path,
        images=partial(_images_in, places),
        wnids=lambda _: {place.wnid for place in places()} - {""},
        inputs=tuple(inputs) or (path,),
        flat=flat,
    )


def _nested_tar(path: Path) -> Layout:
    """Return the layout for the official training tar, which contains one tar per class."""
    return _in_place("train", "a tar of tars, read in place", path, partial(_inner_tars, path))


def _flat(path: Path) -> Layout:
    """Return the layout for validation images of all classes in a single tar or folder."""
    title = "a flat folder" if path.is_dir() else "a flat tar, read in place"
    return _in_place("val", title, path, lambda: [Place("", path)], flat=True)


def _inner_tars(path: Path) -> list[Place]:
    tars = []
    for members in walk_tar(path):
        for name, offset, size in zip(*members, strict=True):
            base = name.rpartition("/")[2]
            if base.startswith("."):  # macOS writes a file `._x` next to x.
                continue
            wnid, _, extension = base.rpartition(".")
            if not WNID.fullmatch(wnid) or extension != "tar":
                raise PrepError(
                    f"{path}: contains {name!r}; expected tars named by WordNet ID (n01440764.tar)"
                )
            tars.append(Place(wnid, path, int(offset), int(offset + size)))
    return tars


# ---- zip and parquet -----------------------------------------------------------------------------

IN_ZIP = re.compile(
    r"(?:.*/)?(train|val|validation)/(?:(n\d{8})/)?([^./][^/]*)", re.IGNORECASE | re.ASCII
)


def _place_in_zip(name: str) -> tuple[str, str, str] | None:
    """Return (split, WNID or "", file name) for an ImageNet image, or None for other members."""
    match = IN_ZIP.fullmatch(name) if name.lower().endswith(IMAGE_EXTENSIONS) else None
    if match is None or name.startswith("__MACOSX/"):
        return None
    return "train" if match[1].lower() == "train" else "val", match[2] or "", match[3]


def _zip_images(path: Path, split: str, _: Builder) -> Iterator[Images]:
    for members in walk_zip(path):
        places = [_place_in_zip(name) for name in members.names]
        of_class = defaultdict[str, dict[int, str]](dict)
        for row, place in enumerate(places):
            if place is not None and place[0] == split:
                of_class[place[1]][row] = place[2]
        for wnid, names in of_class.items():
            rows = list(names)
            yield Images(
                path, wnid, list(names.values()), members.offsets[rows], members.sizes[rows]
            )


def _parquet_images(files: Sequence[Path], builder: Builder) -> Iterator[Images]:
    """Yield the images. Check that labels are positions in the sorted list of WNIDs.

    Some mirrors number the classes in another way.
    """
    wnid_of: dict[int, str] = {}
    for rows in parquet.spool(files, builder):
        matches = [IMAGE.fullmatch(os.path.basename(name)) for name in rows.names]
        wnids = [(match[3] or match[2] or "") if match else "" for match in matches]
        for name, label, wnid in zip(rows.names, rows.labels, wnids, strict=True):
            if not wnid or label is None or wnid_of.setdefault(label, wnid) != wnid:
                raise PrepError(
                    f"{rows.parquet}: image {name!r} has label {label}; expected a name that ends"
                    " in its WordNet ID"
                    + (f", and label {label} is {wnid_of[label]} elsewhere" if wnid else "")
                )
        names = [
            match[1] + os.path.splitext(name)[1] if match else name
            for match, name in zip(matches, rows.names, strict=True)
        ]
        yield Images(rows.file, "", names, rows.offsets, rows.sizes, wnids)
    if [wnid_of[label] for label in sorted(wnid_of)] != sorted(set(wnid_of.values())):
        raise PrepError(
            f"{files[0].parent}: labels are not in the order of the WordNet IDs; expected the"
            " numbering of ILSVRC/imagenet-1k"
        )


def _parquet_layout(split: str, files: Sequence[Path]) -> Layout:
    images = partial(_parquet_images, files)
    return Layout(
        split,
        f"{len(files):,} parquet files, copied once to read them",
        files[0].parent,
        images=images,
        wnids=lambda builder: {wnid for part in images(builder) for wnid in part.wnids or ()},
        inputs=tuple(files),
        lacking=parquet.missing_files(split, files),
    )


# ---- searching -----------------------------------------------------------------------------------


@dataclass
class Search:
    """The layouts and label files that were found in the given paths."""

    layouts: list[Layout] = field(default_factory=list)
    labels: list[ValLabels] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Notes on files that were not used, for error messages."""
    files: dict[tuple[str, Path], list[Path]] = field(default_factory=lambda: defaultdict(list))
    """The tars of classes ("tar") and the parquet files of splits, by kind and folder."""


def _look_at_file(path: Path, search: Search, named: bool) -> None:
    """Identify a file. named: the user gave this path, so an unknown file is an error."""
    name = path.name.lower()
    if DEVKIT.fullmatch(name):
        read = partial(imagenet_labels.read_devkit, path)
        search.labels.append(ValLabels(path, "the development kit", read, (path,)))
    elif name == KAGGLE_TABLE.lower():
        read = partial(imagenet_labels.read_kaggle_table, path)
        search.labels.append(ValLabels(path, "Kaggle's table", read, (path,)))
    elif name.endswith(".tar") and WNID.fullmatch(path.stem):
        search.files["tar", path.parent].append(path)
    elif name.endswith(".tar"):
        _look_into_tar(path, search, named)
    elif name.endswith(".zip"):
        _look_into_zip(path, search, named)
    elif name.endswith(".parquet"):
        search.files[name.split("-")[0], path.parent].append(path)
    elif name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        search.remarks.append(f"{path} is compressed and cannot be read in place: unpack it first")
    elif named:
        raise PrepError(
            f"{path}: not one of ImageNet's files; expected {TRAIN_TAR}, {VAL_TAR}, a .zip,"
            " .parquet, or a label file"
        )


def _look_into_tar(path: Path, search: Search, named: bool) -> None:
    """Identify a tar by its first member, because archives are often renamed."""
    first = ""
    try:
        first = next(walk_tar(path)).names[0].rpartition("/")[2]
        problem = (
            f"{path}: begins with {first!r}; expected ImageNet's tar of tars or its tar of"
            " validation images"
        )
    except (PrepError, StopIteration) as error:
        problem = str(error) or f"{path}: an empty tar; download it again"
    is_task_3 = "_t3" in path.name.lower()  # task 3: 120 dog breeds
    if first.endswith(".tar") and WNID.fullmatch(first[:-4]) and not is_task_3:
        search.layouts.append(_nested_tar(path))
    elif first.startswith(VAL_IMAGE):
        search.layouts.append(_flat(path))
    elif named or path.name in (TRAIN_TAR, VAL_TAR):
        raise PrepError(problem)
    else:
        search.remarks.append(problem)


def _look_into_zip(path: Path, search: Search, named: bool) -> None:
    wnids = defaultdict[str, set[str]](set)
    for members in walk_zip(path):
        for name, offset, size in zip(*members, strict=True):
            if place := _place_in_zip(name):
                wnids[place[0]].add(place[1])
            elif name.rpartition("/")[2] == KAGGLE_TABLE and not name.startswith("__MACOSX/"):
                table = Sample("", 0, name, str(path), int(offset), int(size))
                read = partial(imagenet_labels.read_kaggle_table, table)
                search.labels.append(ValLabels(path, "Kaggle's table in the zip", read, (path,)))
    for split, of_split in sorted(wnids.items()):
        flat = "" in of_split
        kind = "a flat folder" if flat else f"{len(of_split):,} class folders"
        folders = of_split - {""}
        images = partial(_zip_images, path, split)
        title = f"{kind} in a zip, read in place"
        search.layouts.append(
            Layout(
                split,
                title,
                path,
                images=images,
                wnids=partial(_always, folders),
                inputs=(path,),
                flat=flat,
            )
        )
    if named and not wnids:
        raise PrepError(
            f"{path}: no images in train/<wnid>/ or val/; expected Kaggle's"
            " imagenet-object-localization-challenge.zip"
        )


def _always(wnids: set[str], _: Builder) -> set[str]:
    return wnids


def _look_into(folder: Path, search: Search, named: bool) -> None:
    folders, files = listed(folder)
    if named and not folders + files:
        raise PrepError(
            f"{folder}: an empty folder; expected ImageNet's archives or its train/ and val/"
        )
    if "_info.json" in files:
        raise PrepError(
            f"{folder}: contains finished shards (_info.json) instead of ImageNet's original files"
        )
    wnids = [name for name in folders if WNID.fullmatch(name)]
    usual = [name for name in folders if name.lower() in SEARCHED]
    strange = sorted(set(folders) - {*wnids, *usual})
    is_flat = any(
        name.startswith(VAL_IMAGE) and name.lower().endswith(IMAGE_EXTENSIONS) for name in files
    )
    has_archives = any(name.endswith((".tar", ".parquet")) for name in files)
    is_split = folder.name.lower() in ("train", *VAL_FOLDERS)
    if strange and (wnids or (is_split and not (usual or is_flat or has_archives))):
        raise PrepError(
            f"{folder}: {len(strange)} class folders are not named by WordNet ID (n01440764):"
            f" {some(strange)}; rename or remove them, or use `python -m data_prep.imagefolder` for"
            " other class names"
        )
    if named and not (wnids or usual or is_flat):
        search.remarks.append(f"{folder} contains {some(sorted(folders + files))}")
    if wnids:
        places = [Place(wnid, folder / wnid) for wnid in wnids]
        first = next((names[0] for place in places if (names := members_of(place.path).names)), "")
        is_val = first.startswith(VAL_IMAGE) or (not first and folder.name.lower() in VAL_FOLDERS)
        inputs = (folder, *(place.path for place in places))
        split = "val" if is_val else "train"
        title = f"{len(wnids):,} class folders"
        search.layouts.append(_in_place(split, title, folder, lambda: places, inputs))
    if is_flat:
        search.layouts.append(_flat(folder))
    if {META, TRUTH} <= set(files):
        read = partial(imagenet_labels.read_devkit, folder)
        kit = (folder / META, folder / TRUTH)
        search.labels.append(ValLabels(folder, "the development kit", read, kit))
    for name in files:
        _look_at_file(folder / name, search, named=False)
    for name in usual:
        _look_into(folder / name, search, named=False)


def find_layouts(paths: Sequence[Path]) -> Search:
    """Search the given files and folders for layouts of ImageNet.

    Raises PrepError for missing, unreadable or unknown files, and for a split that is found twice.
    """
    search = Search()
    for path in dict.fromkeys(Path(os.path.abspath(path)) for path in paths):
        if not path.exists():
            raise PrepError(
                f"{path}: no such file or folder; expected ImageNet's archives, or a folder that"
                " contains them"
            )
        look = _look_into if path.is_dir() else _look_at_file
        look(path, search, named=True)
    for (kind, folder), files in search.files.items():
        unique = sorted(set(files))
        if kind == "tar":
            tars = [Place(path.stem, path) for path in unique]
            title = f"{len(unique):,} tars, one a class, read in place"
            search.layouts.append(_in_place("train", title, folder, partial(list, tars), unique))
        elif kind in ("train", *VAL_FOLDERS):
            search.layouts.append(_parquet_layout("train" if kind == "train" else "val", unique))
    layouts, search.layouts = search.layouts, []
    for split in ("train", "val"):
        once = {(layout.title, layout.path): layout for layout in layouts if layout.split == split}
        if len(once) > 1:
            places = "; ".join(f"{path} ({title})" for title, path in once)
            raise PrepError(
                f"{split} occurs {len(once)} times: {places}: give only the one to use, by its own"
                " path"
            )
        search.layouts += once.values()
    return search
