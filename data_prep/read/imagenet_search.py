"""Find ImageNet's layouts and label files in the given files and folders.

Each given archive or folder is identified by its name or its first image. The usual subfolders of
downloads are searched as well.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from data_prep.errors import PrepError, require
from data_prep.read.archives import walk_tar, walk_zip
from data_prep.read.image_tree import listed
from data_prep.read.imagenet_layouts import (
    DEVKIT,
    IMAGE_EXTENSIONS,
    KAGGLE_TABLE,
    META,
    SPLIT_FOLDERS,
    TRAIN_TAR,
    TRUTH,
    VAL_TAR,
    WNID,
    ImageNetLayout,
    ValLabels,
    flat,
    folder_of_tars,
    members_of,
    nested_tar,
    parquet_layout,
    place_in_zip,
    read_devkit,
    read_kaggle_table,
    read_kaggle_table_in_zip,
    tree,
    zip_layout,
)
from data_prep.write.samples import Sample
from vit.system.spelling import few

FOLDERS = {*SPLIT_FOLDERS, "data", "ilsvrc", "cls-loc"} | {
    f"ilsvrc2012_{n}" for n in ("img_train", "img_val", "devkit_t12")
}
"""The names of subfolders to search, in lower case."""
VAL_IMAGE = "ILSVRC2012_val_"
KIT = "the development kit"


@dataclass
class Search:
    """The layouts and label files found in the given paths."""

    layouts: list[ImageNetLayout] = field(default_factory=list)
    labels: list[ValLabels] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Notes about unused files, for error messages."""
    inner_tars: set[Path] = field(default_factory=set)
    parquets: set[Path] = field(default_factory=set)


# ---- files ---------------------------------------------------------------------------------------


def _look_at_file(path: Path, search: Search, named: bool) -> None:
    """Identify a file. named: whether the user gave its path. If so, an unknown file is an
    error."""
    name = path.name.lower()
    if DEVKIT.fullmatch(name):
        search.labels.append(ValLabels(path, KIT, partial(read_devkit, path), (path,)))
    elif name == KAGGLE_TABLE.lower():
        search.labels.append(
            ValLabels(path, "Kaggle's table", partial(read_kaggle_table, path), (path,))
        )
    elif name == TRAIN_TAR.lower():
        search.layouts.append(nested_tar(path))
    elif name == VAL_TAR.lower():
        search.layouts.append(flat(path))
    elif name.endswith(".tar") and WNID.fullmatch(path.stem):
        search.inner_tars.add(path)
    elif name.endswith(".tar"):
        _look_into_tar(path, search, named)
    elif name.endswith(".zip"):
        _look_into_zip(path, search, named)
    elif name.endswith(".parquet"):
        search.parquets.add(path)
    elif name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        search.remarks.append(f"{path} is compressed and cannot be read in place: unpack it first")
    elif named:
        raise PrepError(
            f"{path}: not one of ImageNet's files; expected {TRAIN_TAR}, {VAL_TAR}, a .zip or"
            " .parquet file, or a label file"
        )


def _look_into_tar(path: Path, search: Search, named: bool) -> None:
    """Identify a tar by its first member."""
    try:
        first = next(walk_tar(path)).names[0].rpartition("/")[2]
    except (PrepError, StopIteration) as error:
        first = ""
        problem = str(error) or f"{path}: an empty tar; download it again"
    else:
        problem = (
            f"{path}: begins with {first!r}; expected ImageNet's tar of tars or its tar of"
            " validation images"
        )

    is_tar_of_class = first.endswith(".tar") and WNID.fullmatch(first[:-4])
    # Task 3 has a tar with images of 120 dog breeds.
    if is_tar_of_class and "_t3" not in path.name.lower():
        search.layouts.append(nested_tar(path))
    elif first.startswith(VAL_IMAGE):
        search.layouts.append(flat(path))
    elif named:
        raise PrepError(problem)
    else:
        search.remarks.append(problem)


def _look_into_zip(path: Path, search: Search, named: bool) -> None:
    """Find the splits of images and the label table in Kaggle's zip."""
    wnids = defaultdict[str, set[str]](set)
    for members in walk_zip(path):
        for name, offset, size in zip(*members, strict=True):
            place = place_in_zip(name)
            is_table = name.rpartition("/")[2] == KAGGLE_TABLE
            if place is not None:
                wnids[place.split].add(place.wnid)
            elif is_table and not name.startswith("__MACOSX/"):
                table = Sample("", 0, name, str(path), int(offset), int(size))
                search.labels.append(
                    ValLabels(
                        path,
                        "Kaggle's table in the zip",
                        partial(read_kaggle_table_in_zip, table),
                        inputs=(path,),
                    )
                )

    search.layouts += [zip_layout(path, split, wnids[split]) for split in sorted(wnids)]
    if named and not wnids:
        raise PrepError(
            f"{path}: found no images in train/<wnid>/ or val/; expected Kaggle's"
            " imagenet-object-localization-challenge.zip"
        )


# ---- folders -------------------------------------------------------------------------------------


def _split_of_tree(folder: Path, wnids: Sequence[str]) -> str:
    """Return the split that class folders contain, based on the first image or the folder name."""
    first = next(chain.from_iterable(members_of(folder / wnid).names for wnid in wnids), None)
    if first is None:
        return SPLIT_FOLDERS.get(folder.name.lower(), "train")
    return "val" if first.startswith(VAL_IMAGE) else "train"


def _look_into(folder: Path, search: Search, named: bool) -> None:
    """Identify what a folder contains: class folders, flat images, the unpacked kit or files.

    Its subfolders with usual names are searched as well. named: whether the user gave its path. If
    so, an empty folder is an error.
    """
    folders, files = listed(folder)
    if named and not folders + files:
        raise PrepError(
            f"{folder}: this folder is empty; expected ImageNet's archives, or its train/ and val/"
        )
    if "_info.json" in files:
        raise PrepError(
            f"{folder}: contains finished shards (_info.json) instead of ImageNet's original files"
        )

    wnids = [name for name in folders if WNID.fullmatch(name)]
    usual = [name for name in folders if name.lower() in FOLDERS]
    is_flat = any(
        name.startswith(VAL_IMAGE) and name.lower().endswith(IMAGE_EXTENSIONS) for name in files
    )
    is_known = bool(wnids or usual or is_flat)
    has_classes = bool(wnids) or (not is_known and _can_only_contain_classes(folder, files))
    if has_classes:
        _check_class_names(folder, set(folders).difference(wnids, usual))

    if named and not is_known:
        search.remarks.append(f"{folder} contains {few(sorted(folders + files))}")
    if wnids:
        search.layouts.append(tree(_split_of_tree(folder, wnids), folder, wnids))
    if is_flat:
        search.layouts.append(flat(folder))
    if {META, TRUTH} <= set(files):
        search.labels.append(
            ValLabels(folder, KIT, partial(read_devkit, folder), (folder / META, folder / TRUTH))
        )

    for name in files:
        _look_at_file(folder / name, search, named=False)
    for name in usual:
        _look_into(folder / name, search, named=False)


def _can_only_contain_classes(folder: Path, files: Sequence[str]) -> bool:
    """Return whether a folder without anything known is one such as train/, without archives."""
    return folder.name.lower() in SPLIT_FOLDERS and not any(
        name.endswith((".tar", ".parquet")) for name in files
    )


def _check_class_names(folder: Path, others: Collection[str]) -> None:
    """Raise PrepError if a folder of classes contains `others`, which are not named by WNID."""
    if others:
        raise PrepError(
            f"{folder}: {len(others)} class folders are not named by WordNet ID (n01440764):"
            f" {few(sorted(others))}; rename or remove them, or use `python -m"
            " data_prep.imagefolder` for other class names"
        )


def find_layouts(paths: Sequence[Path]) -> Search:
    """Search files and folders for ImageNet's layouts.

    Raises PrepError for missing, unreadable and unknown files, and for a split that occurs twice.
    """
    search = Search()
    for path in dict.fromkeys(Path(os.path.abspath(path)) for path in paths):
        require(path, "ImageNet's archives, or a folder that contains them")
        look = _look_into if path.is_dir() else _look_at_file
        look(path, search, named=True)

    layouts = [*search.layouts, *map(folder_of_tars, _by_folder(search.inner_tars).values())]
    for files in _by_folder(search.parquets).values():
        for split in ("train", "val"):
            of_split = [
                file for file in files if SPLIT_FOLDERS.get(file.name.split("-")[0]) == split
            ]
            if of_split:
                layouts.append(parquet_layout(split, of_split))

    search.layouts = []
    for split in ("train", "val"):
        # The user may have given a folder, and also a file or subfolder in it.
        distinct = {
            (layout.title, layout.path): layout for layout in layouts if layout.split == split
        }
        if len(distinct) > 1:
            places = "; ".join(f"{path} ({title})" for title, path in distinct)
            raise PrepError(
                f"found {len(distinct)} sources for {split}: {places}: pass the path of the one to"
                " use"
            )
        search.layouts += distinct.values()
    return search


def _by_folder(files: set[Path]) -> Mapping[Path, list[Path]]:
    folders = defaultdict[Path, list[Path]](list)
    for file in sorted(files):
        folders[file.parent].append(file)
    return folders
