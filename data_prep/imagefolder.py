"""Shards from a folder, zip or tar of images, one subfolder for each class.

    python -m data_prep.imagefolder SOURCE --out ROOT [--val-fraction F] [--class-order text|number]
    python -m data_prep.imagefolder FOLDER --out ROOT --download URL [--sha256 HEX]

SOURCE is `train/<class>/...` with `val/<class>/...` (or `validation`, or `test`), or `<class>/...`
alone, and then each class gives a tenth to `val`. Images may be in subfolders of their class. A
label is the position of the class among the sorted names of train's classes; a key is the path
below the split, without extension, in safe characters. A metadata.csv or metadata.jsonl in
Hugging Face's form (file_name and a label in each row) takes the place of class folders, and
--no-classes takes all images, without labels. All other files are counted and reported
(data_prep/read/image_tree.py); images of kinds that are not read are an error if they are more
than --max-unreadable allows.

Folders are listed one class at a time, so memory is that of the largest class. Links are followed;
a link back to a folder above it is an error. A zip or tar is read in place, and gives the same
shards as its unpacked folder, even if one folder wraps everything in it. A .tar.gz is inflated next
to itself first. --download fetches the archive into FOLDER, and resumes after a lost connection.
"""

from __future__ import annotations

import argparse
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.command import VAL_FRACTION, VAL_FRACTION_FLAG, refuse_val_fraction, source_command
from data_prep.errors import PrepError, share_to_allow, some
from data_prep.read.archives import inflate_tar, is_compressed_tar
from data_prep.read.class_tree import (
    FolderTree,
    Tree,
    add_images,
    open_archive,
    open_tree,
    split_by_hash,
)
from data_prep.read.download import ARCHIVE_FLAGS, fetched
from data_prep.read.image_tree import Ignored, unique_keys
from data_prep.write.catalogue import Builder, Source
from data_prep.write.plan import Settings, allowed_unreadable
from data_prep.write.samples import safe_key
from vit.data.decode.image_files import EXTENSIONS
from vit.data.shards.members import NO_LABEL

VAL_FOLDERS = ("val", "validation", "test")
CLASS_ORDERS = ("text", "number")


# ---- the source ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The flags of this source."""

    val_fraction: float | None = None
    """Fraction of each class, in [0, 1); only without a val folder, by default 0.1."""
    class_order: str | None = None
    """One of CLASS_ORDERS; only needed if the names of all classes are numbers."""
    label_column: str | None = None
    """The column of classes in metadata.csv, if it is unclear."""
    no_classes: bool = False
    """Take all images, without labels."""
    max_unreadable: float = Settings().max_unreadable
    """Fraction of all images that may be of kinds that are not read."""


class Layout(NamedTuple):
    """The trees of the splits."""

    root: Tree
    train: Tree
    """`root` itself if it has the classes."""
    val: Tree | None
    """None if val is cut from train."""


def source(path: Path, flags: Asked | None = None, out: Path | None = None) -> Source:
    """Return the images of class folders, or of a folder without classes, or of an archive.

    Raises PrepError if `path` is missing, is not an archive, or has a val folder without train.
    Listing raises it for no images, a single class, a class without images, classes of val that
    train lacks, an unclear order of classes, and too many images that are not read.
    """
    flags = flags or Asked()
    layout = _layout(_open(path, flags))
    train, val = layout.train, layout.val
    if out is not None and (out == path.resolve() or out.is_relative_to(train.file.resolve())):
        raise PrepError(f"{out}: is among the images of {path}; give --out another folder")
    if val is not None:
        refuse_val_fraction(flags.val_fraction, val)
    options: dict[str, Any] = {}
    val_fraction = 0.0
    if val is None:
        default = 0.0 if flags.no_classes else VAL_FRACTION
        val_fraction = default if flags.val_fraction is None else flags.val_fraction
        options["val_fraction"] = val_fraction
    if flags.class_order == "number":  # not recorded for text, the order of earlier data sets
        options["class_order"] = "number"
    if flags.no_classes:
        options["label"] = NO_LABEL
    fill = partial(_fill_unlabelled if flags.no_classes else _fill, layout, val_fraction, flags)
    return Source("imagefolder", options, fill, train.read, train.inputs)


def _open(path: Path, flags: Asked) -> Tree:
    if path.is_file() and not path.name.lower().endswith(EXTENSIONS):
        if is_compressed_tar(path):
            path = inflate_tar(path)
            print(f"{path}: inflated, as nothing can be read in the middle of a compressed tar")
        tree = open_tree(path) if flags.no_classes else open_archive(path)
        print(f"{path}: read in place, without unpacking; images of {tree}", flush=True)
        return tree
    if not path.is_dir():
        raise PrepError(
            f"{path}: {'not a folder' if path.exists() else 'no such folder'}; expected a folder"
            " with one subfolder of images for each class, or a zip or tar of one"
        )
    return FolderTree(path) if flags.no_classes else open_tree(path, flags.label_column)


def _layout(root: Tree) -> Layout:
    val = next((root.below(name) for name in VAL_FOLDERS if root.below(name).exists()), None)
    if root.below("train").exists():
        return Layout(root, root.below("train"), val)
    if val is not None and not (set(root.folders()) - set(VAL_FOLDERS)):
        raise PrepError(
            f"{root}: has {val.name}/ but no train/; expected train/<class>/* and val/<class>/*,"
            " or <class>/* alone"
        )
    return Layout(root, root, None)  # `test` is a class like any other then


def _fill(layout: Layout, val_fraction: float, flags: Asked, builder: Builder) -> None:
    root, train, val = layout
    names = _in_order(train, train.folders(), flags.class_order)
    used = {"train"} if val is None else {"train", val.name}
    if train is not root and (unused := [name for name in root.folders() if name not in used]):
        # recorded in _info.json: other words are other bytes
        builder.report(f"folders beside {train} that are not used: {', '.join(unused)}")
    labels = _labels(train, names)
    builder.classes(names)
    ignored = Ignored()
    of_train = {name: labels[_normalized(name)] for name in names}
    _add_split(builder, train, of_train, _fractions(val_fraction), ignored)
    per_class = builder.count("train")
    also = ignored.images_in_brackets()
    if not per_class.sum():
        if ignored.stray and train is root:
            raise PrepError(
                f"{train}: {len(ignored.stray):,} images lie in this folder itself: name its"
                f" parent, {train.file.resolve().parent}; expected <class>/<image>, or --no-classes"
            )
        raise PrepError(
            f"{train}: no images ({', '.join(EXTENSIONS)}) in its {len(names)} subfolders{also};"
            " expected <class>/<image>"
        )
    if empty := [name for name, count in zip(names, per_class, strict=True) if not count]:
        raise PrepError(
            f"{train}: classes without images: {', '.join(empty)}{also}; remove these folders or"
            " fill them"
        )
    if len(names) < 2:
        raise PrepError(
            f"{train}: only one class ({', '.join(names)}); expected two subfolders at least"
        )
    if val is not None:
        _fill_val(val, labels, ignored, builder)
    _check_ignored(ignored, flags, builder)


def _fractions(val_fraction: float) -> dict[str, float]:
    return {"train": 1 - val_fraction, "val": val_fraction}


def _fill_unlabelled(layout: Layout, val_fraction: float, flags: Asked, builder: Builder) -> None:
    """Add all images below the folders, without labels."""
    ignored = Ignored()
    for tree, fractions in ((layout.train, _fractions(val_fraction)), (layout.val, {"val": 1.0})):
        if tree is not None:
            _add_split(builder, tree, {"": -1}, fractions, ignored)
            if not builder.count(next(iter(fractions))).any():
                raise PrepError(
                    f"{tree}: no images ({', '.join(EXTENSIONS)}) below it"
                    f"{ignored.images_in_brackets()}"
                )
    _check_ignored(ignored, flags, builder)


def _fill_val(val: Tree, labels: dict[str, int], ignored: Ignored, builder: Builder) -> None:
    """Add the images of the folder val. labels: label of each of train's classes, normalized."""
    names = val.folders()
    _labels(val, names)
    if unknown := [
        name for name in names if _normalized(name) not in labels and any(val.images(name))
    ]:
        raise PrepError(
            f"{val}: classes that train lacks: {', '.join(unknown)}; remove these folders, or"
            " add these classes to train"
        )
    of_val = {name: labels[_normalized(name)] for name in names if _normalized(name) in labels}
    _add_split(builder, val, of_val, {"val": 1.0}, ignored)
    if not builder.count("val").sum():
        raise PrepError(
            f"{val}: no images; expected <class>/<image>, or no such folder and --val-fraction"
        )


def _check_ignored(ignored: Ignored, flags: Asked, builder: Builder) -> None:
    """Report the files that were not taken. Raises PrepError if too many are images."""
    taken = int(builder.count("train").sum() + builder.count("val").sum())
    total = taken + ignored.num_images
    if ignored.num_images > (allowed := allowed_unreadable(flags.max_unreadable, total)):
        raise PrepError(
            f"{ignored.num_images:,} of {total:,} images would be left out, more than the"
            f" {allowed:,} that --max-unreadable {flags.max_unreadable} allows:"
            f" {'; '.join(ignored.summary())}. To leave them out:"
            f" --max-unreadable {share_to_allow(ignored.num_images, total)}"
        )
    for line in ignored.summary():
        builder.report(line)


def _normalized(name: str) -> str:
    """Return a name in one Unicode spelling: macOS separates letters and accents."""
    return unicodedata.normalize("NFC", name)


def _labels(folder: Tree, names: Sequence[str]) -> dict[str, int]:
    """Return the label of each class by its normalized name.

    Raises PrepError for two folders that are one class.
    """
    by_name: dict[str, list[str]] = {}
    for name in names:
        by_name.setdefault(_normalized(name), []).append(name)
    if twice := [
        " and ".join(str(os.fsencode(name)) for name in same)
        for same in by_name.values()
        if len(same) > 1
    ]:
        raise PrepError(
            f"{folder}: folders whose names are one in Unicode, of one class or of two?"
            f" {some(twice)}; merge or rename them"
        )
    return {name: label for label, name in enumerate(by_name)}


def _in_order(folder: Tree, names: Sequence[str], class_order: str | None) -> list[str]:
    """Return the classes in the order of their labels.

    Raises PrepError for numbers whose order as text differs, unless `class_order` is given.
    """
    by_text = sorted(names)
    are_numbers = bool(names) and all(name.isascii() and name.isdecimal() for name in names)
    by_number = sorted(names, key=lambda name: (int(name), name)) if are_numbers else by_text
    if class_order == "number" and not are_numbers:
        texts = [name for name in by_text if not (name.isascii() and name.isdecimal())]
        raise PrepError(
            f"{folder}: --class-order number, but the names of the classes are not all numbers"
            f" ({(*texts, 'none')[0]})"
        )
    if by_number == by_text or class_order is not None:
        return by_number if class_order == "number" else by_text
    label = next(
        k for k, (name, other) in enumerate(zip(by_text, by_number, strict=True)) if name != other
    )
    differ = sum(name != other for name, other in zip(by_text, by_number, strict=True))
    raise PrepError(
        f"{folder}: the classes' names are numbers; sorted as text label {label} is class"
        f" {by_text[label]}, sorted as numbers it is class {by_number[label]} ({differ:,} of"
        f" {len(names):,} labels differ). Say which: --class-order number, if the names are labels"
        " (as in ImageNet-V2), or --class-order text, as torchvision's ImageFolder has it"
    )


def _add_split(
    builder: Builder,
    tree: Tree,
    labels: dict[str, int],
    fractions: Mapping[str, float],
    ignored: Ignored,
) -> None:
    """Add the images of these classes, and divide each class by `fractions`: of each split."""
    file = builder.file(tree.file)
    if "" not in labels:
        tree.count_stray(ignored)
    for classes in _classes_with_common_keys(labels):
        paths_of = {
            name: [f"{name}/{path}".lstrip("/") for path in tree.images(name, ignored)]
            for name in classes
        }
        paths = list(chain(*paths_of.values()))
        keys = dict(zip(paths, unique_keys(paths), strict=True))
        path_of = {key: path for path, key in keys.items()}
        for name, of_class in paths_of.items():
            shares = split_by_hash([keys[path] for path in of_class], fractions)
            add_images(builder, file, labels[name], tree, path_of, shares)


def _classes_with_common_keys(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of classes whose keys may be equal, such as a/b_c.jpg and a_b/c.jpg."""
    group: list[str] = []
    first = ""
    for start, name in sorted((f"{safe_key(name)}_", name) for name in names):
        if group and not start.startswith(first):
            yield group
            group = []
        if not group:
            first = start
        group.append(name)
    if group:
        yield group


# ---- the command ---------------------------------------------------------------------------------


def _source(args: argparse.Namespace) -> Source:
    settings = Asked(
        val_fraction=args.val_fraction,
        class_order=args.class_order,
        label_column=args.label_column,
        no_classes=args.no_classes,
        max_unreadable=args.max_unreadable,
    )
    return source(fetched(args), settings, Path(args.out).resolve())


main = source_command(
    "imagefolder",
    __doc__,
    {
        "source": {
            "type": Path,
            "metavar": "SOURCE",
            "help": "folder, zip or tar with train/ and val/, or with the classes",
        },
        **VAL_FRACTION_FLAG,
        "--class-order": {
            "choices": CLASS_ORDERS,
            "help": (
                "order of the labels if all class names are numbers: 1, 10, 2 (text) or 1, 2, 10"
                " (number)"
            ),
        },
        "--label-column": {
            "metavar": "NAME",
            "help": "of metadata.csv: where classes are, if it is unclear",
        },
        "--no-classes": {
            "action": "store_true",
            "help": "take all images in SOURCE, without labels: for prediction, not for training",
        },
        **ARCHIVE_FLAGS,
    },
    _source,
    apply_exif=True,
)


if __name__ == "__main__":
    raise SystemExit(main())
