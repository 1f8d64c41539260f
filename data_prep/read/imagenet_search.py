"""Find ImageNet's layouts and files of labels among files and folders.

Each archive or folder that is given, and in the folders that downloads have, is recognised by its
name or its first image.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from data_prep.errors import PrepError, some
from data_prep.read import imagenet_labels
from data_prep.read.archives import walk_tar, walk_zip
from data_prep.read.image_tree import listed
from data_prep.read.imagenet_labels import WNID, ValLabels
from data_prep.read.imagenet_layouts import (
    IMAGE_EXTENSIONS,
    TRAIN_TAR,
    VAL_FOLDERS,
    VAL_TAR,
    Layout,
    files_of,
    flat_folder,
    flat_tar,
    folder_of_tars,
    nested_tar,
    parquet_layout,
    place_in_zip,
    tree,
    zip_layout,
)
from data_prep.write.samples import Sample

FOLDERS = {"train", "val", "validation", "data", "ilsvrc", "cls-loc"} | {
    f"ilsvrc2012_{n}" for n in ("img_train", "img_val", "devkit_t12")
}
"""Folders that are searched, in lower case."""


@dataclass
class Found:
    """What is in the given paths."""

    layouts: list[Layout] = field(default_factory=list)
    labels: list[ValLabels] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What was not used and why, for an error message."""
    inner_tars: list[Path] = field(default_factory=list)
    parquets: list[Path] = field(default_factory=list)


def _look_at_tar(path: Path, found: Found, named: bool) -> None:
    """named: by the user, so it must be one of ImageNet's; a folder may have others."""
    name = path.name.lower()
    if WNID.fullmatch(path.stem):
        found.inner_tars.append(path)
    elif name == TRAIN_TAR.lower():
        found.layouts.append(nested_tar(path))
    elif name == VAL_TAR.lower():
        found.layouts.append(flat_tar(path))
    else:
        try:
            first = next(walk_tar(path)).names[0].rpartition("/")[2]
            problem = (
                f"{path}: begins with {first!r}; expected ImageNet's tar of tars or its tar of"
                " validation images"
            )
        except (PrepError, StopIteration) as error:
            first = ""
            problem = str(error) or f"{path}: an empty tar; download it again"
        # task 3: 120 breeds of dogs
        if first.endswith(".tar") and WNID.fullmatch(first[:-4]) and "_t3" not in name:
            found.layouts.append(nested_tar(path))
        elif first.startswith("ILSVRC2012_val_"):
            found.layouts.append(flat_tar(path))
        elif named:
            raise PrepError(problem)
        else:
            found.remarks.append(problem)


# ---- folders -------------------------------------------------------------------------------------


def _split_of_tree(folder: Path, wnids: Sequence[str]) -> str:
    """The split of class folders, by the first image, else by the name."""
    for wnid in wnids:
        if names := files_of(folder / wnid).names:
            return "val" if names[0].startswith("ILSVRC2012_val_") else "train"
    return "val" if folder.name.lower() in VAL_FOLDERS else "train"


def _look_into(folder: Path, found: Found, named: bool) -> None:
    folders, files = listed(folder)
    if named and not folders + files:
        raise PrepError(
            f"{folder}: an empty folder; expected ImageNet's archives or its train/ and val/"
        )
    if "_info.json" in files:
        raise PrepError(
            f"{folder}: holds finished shards (_info.json), not the files they are made of"
        )
    wnids = [name for name in folders if WNID.fullmatch(name)]
    known = [name for name in folders if name.lower() in FOLDERS]
    strange = [name for name in folders if name not in known and not WNID.fullmatch(name)]
    flat = any(
        name.startswith("ILSVRC2012_val_") and name.lower().endswith(IMAGE_EXTENSIONS)
        for name in files
    )
    archives = any(name.endswith((".tar", ".parquet")) for name in files)
    is_split = folder.name.lower() in ("train", *VAL_FOLDERS)
    if strange and (wnids or (is_split and not (known or flat or archives))):
        raise PrepError(
            f"{folder}: {len(strange)} class folders are not named by WordNet ids (as n01440764):"
            f" {some(strange)}; rename or remove them; trees with other names are for `python -m"
            " data_prep.imagefolder`"
        )
    if named and not (wnids or known or flat):
        found.remarks.append(f"{folder} holds {some(sorted(folders + files))}")
    if wnids:
        found.layouts.append(tree(_split_of_tree(folder, wnids), folder, wnids))
    if flat:
        found.layouts.append(flat_folder(folder))
    if imagenet_labels.META in files and imagenet_labels.TRUTH in files:
        inputs = (folder / imagenet_labels.META, folder / imagenet_labels.TRUTH)
        read = partial(imagenet_labels.read_devkit_folder, folder)
        found.labels.append(ValLabels(folder, "the development kit", read, inputs))
    for name in files:
        _look_at_file(folder / name, found, named=False)
    for name in known:
        _look_into(folder / name, found, named=False)


# ---- zip -----------------------------------------------------------------------------------------


def _look_into_zip(path: Path, found: Found, named: bool) -> None:
    wnids: dict[str, set[str]] = {}
    for members in walk_zip(path):
        for row, name in enumerate(members.names):
            if place := place_in_zip(name):
                wnids.setdefault(place[0], set()).add(place[1])
            elif name.rpartition("/")[2] == imagenet_labels.KAGGLE_TABLE and not name.startswith(
                "__MACOSX/"
            ):
                offset, size = int(members.offsets[row]), int(members.sizes[row])
                table = Sample("", 0, name, str(path), offset, size)
                read = partial(imagenet_labels.read_kaggle_table_in_zip, table)
                found.labels.append(ValLabels(path, "Kaggle's table in the zip", read, (path,)))
    found.layouts += [zip_layout(path, split, wnids[split]) for split in sorted(wnids)]
    if named and not wnids:
        raise PrepError(
            f"{path}: holds no images in train/<wnid>/ or val/; expected Kaggle's"
            " imagenet-object-localization-challenge.zip"
        )


# ---- all together --------------------------------------------------------------------------------


def _look_at_file(path: Path, found: Found, named: bool) -> None:
    name = path.name.lower()
    labels = None
    if imagenet_labels.DEVKIT.fullmatch(name):
        labels = ("the development kit", imagenet_labels.read_devkit_archive)
    elif name == imagenet_labels.KAGGLE_TABLE.lower():
        labels = ("Kaggle's table", imagenet_labels.read_kaggle_table)
    if labels is not None:
        what, read = labels
        found.labels.append(ValLabels(path, what, partial(read, path), (path,)))
    elif name.endswith(".tar"):
        _look_at_tar(path, found, named)
    elif name.endswith(".zip"):
        _look_into_zip(path, found, named)
    elif name.endswith(".parquet"):
        found.parquets.append(path)
    elif name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        found.remarks.append(f"{path} is compressed and cannot be read in place: unpack it first")
    elif named:
        raise PrepError(
            f"{path}: not one of ImageNet's files; expected {TRAIN_TAR}, {VAL_TAR}, a .zip,"
            " .parquet, or a file of labels"
        )


def find_layouts(paths: Sequence[Path]) -> Found:
    """What is in these files and folders.

    Raises PrepError for missing, unreadable and foreign files, and for a split that is there twice.
    """
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
            folder_of_tars(sorted({tar for tar in found.inner_tars if tar.parent == folder}))
        )
    for folder in dict.fromkeys(file.parent for file in found.parquets):
        for split, names in (("train", ("train",)), ("val", VAL_FOLDERS)):
            if files := sorted(
                {f for f in found.parquets if f.parent == folder and f.name.split("-")[0] in names}
            ):
                found.layouts.append(parquet_layout(split, files))
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
