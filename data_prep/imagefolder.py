"""Write shards from a folder, zip or tar of images with one subfolder per class.

    python -m data_prep.imagefolder SOURCE --out ROOT [--val-fraction F] [--class-order text|number]
    python -m data_prep.imagefolder FOLDER --out ROOT --download URL [--sha256 HEX]

SOURCE has `train/<class>/...` and possibly `val/<class>/...` and `test/<class>/...`, or only
`<class>/...`. Other usual names of splits (`Training`, `valid`, `test_set`) are recognized too
(data_prep/read/split_names.py). The command steps through outer folders that contain all others.
The command prints which splits and classes it found, and --layout overrides its choice. Without a
validation folder, `test` becomes `val`. Without either folder, or with --val-fraction, a fraction
of each class becomes `val`. Images may be in subfolders of their class. A label is the position of
the class in the sorted names of train's classes. A key is the path below the split's folder,
without its extension and with unsafe characters replaced. Instead of class folders, there may be
lists of labels (data_prep/read/label_lists.py), such as Tiny-ImageNet's val_annotations.txt,
Food-101's train.txt or Hugging Face's metadata.csv. If all labels in the lists are numbers, the
classes keep the order of these numbers. A folder of tars, one for each class, is read like class
folders. With --no-classes, images have no labels. All other files are counted and reported
(data_prep/read/image_tree.py). The command fails if more images are in unsupported formats than
--max-unreadable allows.

Folders are listed one class at a time, so memory use depends on the largest class. Links are
followed, but a link to a parent folder is an error. A zip or tar is read in place and produces the
same shards as its unpacked folder. A .tar.gz is first decompressed next to the original. --download
fetches the archive into FOLDER and resumes after a lost connection.
"""

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.command import VAL_FRACTION, VAL_FRACTION_FLAG, refuse_val_fraction, source_command
from data_prep.errors import PrepError, counted, require, share_to_allow
from data_prep.read.archives import inflate_tar, is_compressed_tar
from data_prep.read.class_tree import Tree, add_images, open_tree, split_by_hash
from data_prep.read.download import ARCHIVE_FLAGS, fetched
from data_prep.read.folder_layout import LAYOUTS, Layout, read_layout
from data_prep.read.image_tree import Ignored, unique_keys
from data_prep.write.catalog import Builder, Source
from data_prep.write.plan import Settings, allowed_unreadable
from data_prep.write.samples import safe_key
from vit.data.decode.image_files import EXTENSIONS
from vit.data.shards.members import NO_LABEL
from vit.system.spelling import few

CLASS_ORDERS = ("text", "number")


# ---- the source ----------------------------------------------------------------------------------


def source(
    path: Path,
    val_fraction: float | None = None,
    class_order: str | None = None,
    label_column: str | None = None,
    no_classes: bool = False,
    max_unreadable: float = Settings().max_unreadable,
    out: Path | None = None,
    layout: str | None = None,
) -> Source:
    """Return a `Source` for a folder or archive, with or without class folders.

    Raises PrepError if `path` is missing, is not an archive or contains `out`. Also raises the
    errors of `read_layout`. Listing the images raises PrepError for missing or conflicting classes,
    an unclear class order, and too many images in unsupported formats.

    Args:
        val_fraction: The fraction of each class to use as val, in [0, 1), by default 0.1.
        class_order: One of CLASS_ORDERS, required only if the class names are numbers whose order
            is unclear.
        label_column: The column with the classes in a list of labels, needed if several columns
            are possible.
        no_classes: Use all images without labels.
        max_unreadable: The maximum fraction of images that may be in unsupported formats.
        out: The output folder.
        layout: One of LAYOUTS, required only if it is unclear whether folders are splits or
            classes.
    """
    root = _open(path, no_classes)
    out_name = out.name if out is not None and out.parent == root.file.resolve() else None
    found = read_layout(root, layout, not no_classes, out_name, label_column)

    train = found.trees["train"]
    out_is_inside = out is not None and (
        out == path.resolve() or out.is_relative_to(train.file.resolve())
    )
    if out_is_inside:
        raise PrepError(f"{out}: this folder is inside the source {path}: choose another --out")

    has_only_test = "test" in found.trees and "val" not in found.trees
    if val_fraction is None and has_only_test:
        found.trees["val"] = found.trees.pop("test")

    options: dict[str, Any] = {}
    fractions = {"train": 1.0}
    if "val" in found.trees:
        refuse_val_fraction(val_fraction, found.trees["val"])
    else:
        if val_fraction is None:
            val_fraction = 0.0 if no_classes else VAL_FRACTION
        options["val_fraction"] = val_fraction
        fractions = {"train": 1 - val_fraction, "val": val_fraction}
    if not no_classes and train.folders():
        print(found.describe(root, fractions.get("val", 0.0)), flush=True)

    # Omit the defaults, because older data sets did not record them.
    choices = {"class_order": class_order, "layout": layout}
    options |= {name: value for name, value in choices.items() if value not in (None, "text")}

    if no_classes:
        options["label"] = NO_LABEL
        fill = partial(_fill_unlabeled, found, fractions, max_unreadable)
    else:
        fill = partial(_fill, found, fractions, max_unreadable, class_order)
    return Source("imagefolder", options, fill, train.read, train.inputs)


def _open(path: Path, no_classes: bool) -> Tree:
    """Open SOURCE. A compressed tar is decompressed first, next to the original."""
    if path.is_file() and not path.name.lower().endswith(EXTENSIONS):
        if is_compressed_tar(path):
            path = inflate_tar(path)
            print(f"{path}: decompressed, because a compressed tar has no random access")
        return open_tree(path)

    expected = "a folder with one subfolder of images per class, or a zip or tar of such a folder"
    require(path, expected)
    if not path.is_dir():
        raise PrepError(f"{path}: not a folder; expected {expected}")
    return Tree(path) if no_classes else open_tree(path)


def _fill(
    layout: Layout,
    fractions: Mapping[str, float],
    max_unreadable: float,
    class_order: str | None,
    builder: Builder,
) -> None:
    """Add the images of the class folders. fractions: the share of each split in train's folder."""
    train = layout.trees["train"]
    names = list(layout.listed.class_names) or _in_order(train, train.folders(), class_order)
    labels = _labels(train, names)
    builder.classes(names)

    ignored = Ignored()
    _add_split(
        builder, train, {name: labels[_normalized(name)] for name in names}, fractions, ignored
    )
    _check_train(train, names, builder.count("train"), ignored)

    for split, tree in layout.trees.items():
        if split != "train":
            _fill_held_out(split, tree, labels, ignored, builder)
        if split not in ("train", "val"):
            builder.report_held_out(split, 0.0, "")

    builder.report_held_out("val", fractions.get("val", 0.0), "--val-fraction {}")
    _check_ignored(ignored, max_unreadable, layout, builder)


def _check_train(
    train: Tree, names: Sequence[str], per_class: np.ndarray, ignored: Ignored
) -> None:
    """Raise PrepError unless train has at least two classes, all with images.

    per_class: the number of images of each class.
    """
    if not per_class.sum():
        if ignored.stray:
            raise PrepError(
                f"{train}: contains {counted(len(ignored.stray), 'image')} outside class folders;"
                " expected <class>/<image>: pass the parent of this folder if it is a class, or use"
                " --no-classes"
            )
        raise PrepError(
            f"{train}: found no images ({', '.join(EXTENSIONS)}) in its {len(names)} subfolders"
            f" ({'; '.join(ignored.summary()) or 'they are empty'}); expected <class>/<image>"
        )

    empty = [name for name, count in zip(names, per_class, strict=True) if not count]
    if empty:
        raise PrepError(
            f"{train}: these classes have no images: {few(empty)}"
            f"{ignored.images_in_brackets()}; remove their folders or add images"
        )
    if len(names) < 2:
        raise PrepError(
            f"{train}: contains only one class ({', '.join(names)}); expected at least two class"
            " folders"
        )


def _fill_unlabeled(
    layout: Layout, fractions: Mapping[str, float], max_unreadable: float, builder: Builder
) -> None:
    """Add all images in the folders, without labels."""
    ignored = Ignored()
    for split, tree in layout.trees.items():
        _add_split(
            builder, tree, {"": -1}, fractions if split == "train" else {split: 1.0}, ignored
        )
        if not builder.count(split).any():
            raise PrepError(
                f"{tree}: no images ({', '.join(EXTENSIONS)}) below it"
                f"{ignored.images_in_brackets()}"
            )
    _check_ignored(ignored, max_unreadable, layout, builder)


def _fill_held_out(
    split: str, tree: Tree, labels: dict[str, int], ignored: Ignored, builder: Builder
) -> None:
    """Add the images of val or test. labels: maps normalized class names to labels."""
    names = tree.folders()
    _labels(tree, names)
    unknown = [
        name
        for name in names
        if _normalized(name) not in labels and any(tree.images(name, Ignored()))
    ]
    if unknown:
        raise PrepError(
            f"{tree}: these classes have no training folder: {few(unknown)}; remove their"
            " folders, or add the classes to train"
        )

    label_of = {name: labels[_normalized(name)] for name in names if _normalized(name) in labels}
    _add_split(builder, tree, label_of, {split: 1.0}, ignored)
    if not builder.count(split).sum():
        raise PrepError(
            f"{tree}: contains no images in class folders; expected <class>/<image>, or remove the"
            " folder and use --val-fraction"
        )


def _check_ignored(
    ignored: Ignored, max_unreadable: float, layout: Layout, builder: Builder
) -> None:
    """Report skipped files. Raises PrepError if too many skipped files are images."""
    if layout.unused:  # _info.json records this text, so rewording it changes the output.
        builder.report(f"the images in these folders are not used: {few(layout.unused)}")
    for note in layout.listed.notes:
        builder.report(note)

    total = ignored.num_images + int(
        sum(builder.count(split).sum() for split in {"val", *layout.trees})
    )
    allowed = allowed_unreadable(max_unreadable, total)
    if ignored.num_images > allowed:
        raise PrepError(
            f"{ignored.num_images:,} of {total:,} images would be skipped, more than the"
            f" {allowed:,} that --max-unreadable {max_unreadable} allows:"
            f" {'; '.join(ignored.summary())}. To skip them, use"
            f" --max-unreadable {share_to_allow(ignored.num_images, total)}"
        )

    for line in ignored.summary():
        builder.report(line)


def _normalized(name: str) -> str:
    """Return a name in NFC form. macOS stores letters and accents as separate characters."""
    return unicodedata.normalize("NFC", name)


def _labels(folder: Tree, names: Sequence[str]) -> dict[str, int]:
    """Return the label of each class, by normalized name.

    Raises PrepError if two folders have the same normalized name.
    """
    by_name: dict[str, list[str]] = {}
    for name in names:
        by_name.setdefault(_normalized(name), []).append(name)

    clashes = [same for same in by_name.values() if len(same) > 1]
    if clashes:
        # The two names look the same, so show their bytes.
        shown = [" and ".join(str(os.fsencode(name)) for name in same) for same in clashes]
        raise PrepError(
            f"{folder}: these folder names are identical after Unicode normalization:"
            f" {few(shown)}; merge or rename the folders"
        )

    return {name: label for label, name in enumerate(by_name)}


def _in_order(folder: Tree, names: Sequence[str], class_order: str | None) -> list[str]:
    """Return the class names in label order.

    Raises PrepError if alphabetical and numerical order differ, unless `class_order` is given.
    """
    by_text = sorted(names)
    texts = [name for name in by_text if not (name.isascii() and name.isdecimal())]
    are_numbers = bool(names) and not texts
    if class_order == "number" and not are_numbers:
        raise PrepError(
            f"{folder}: --class-order number requires numeric class names, but one of them is"
            f" {(*texts, 'none')[0]}"
        )

    by_number = by_text if texts else sorted(names, key=lambda name: (int(name), name))
    differing = [k for k in range(len(names)) if by_text[k] != by_number[k]]
    if not differing or class_order is not None:
        return by_number if class_order == "number" else by_text

    label = differing[0]
    raise PrepError(
        f"{folder}: the class names are numbers, and label {label} is class {by_text[label]} in"
        f" text order, but {by_number[label]} in numeric order ({len(differing):,} of"
        f" {len(names):,} labels differ): use --class-order number if the names are labels (as in"
        " ImageNet-V2), or --class-order text to sort like torchvision's ImageFolder"
    )


def _add_split(
    builder: Builder,
    tree: Tree,
    labels: dict[str, int],
    fractions: Mapping[str, float],
    ignored: Ignored,
) -> None:
    """Add the images of the given classes.

    Args:
        labels: Maps the name of each class to its label.
        fractions: Maps splits to fractions of a class.
    """
    if "" not in labels:
        tree.count_stray(ignored)

    for group in _classes_with_common_keys(labels):
        images: list[tuple[str, str]] = []  # (class, path) of all images in these classes
        for name in group:
            images += [(name, path) for path in tree.images(name, ignored)]
        keys = unique_keys([tree.path_with_class(name, path) for name, path in images])

        path_of_key: dict[str, dict[str, str]] = {name: {} for name in group}
        for key, (name, path) in zip(keys, images, strict=True):
            path_of_key[name][key] = path

        for name, paths in path_of_key.items():
            add_images(
                builder,
                builder.file(tree.file_of(name)),
                labels[name],
                tree,
                folder=name,
                paths=paths,
                shares=split_by_hash(list(paths), fractions),
            )


def _classes_with_common_keys(names: Iterable[str]) -> list[list[str]]:
    """Return groups of classes whose images could have the same key: a/b_c.jpg and a_b/c.jpg."""
    groups: list[list[str]] = []
    first = ""
    for start, name in sorted((f"{safe_key(name)}_", name) for name in names):
        if not groups or not start.startswith(first):
            groups.append([])
            first = start
        groups[-1].append(name)
    return groups


# ---- the command ---------------------------------------------------------------------------------


main = source_command(
    "imagefolder",
    __doc__,
    {
        "source": {
            "type": Path,
            "metavar": "SOURCE",
            "help": "folder, zip or tar with train/ and val/, or with class folders",
        },
        **VAL_FRACTION_FLAG,
        "--layout": {
            "choices": LAYOUTS,
            "help": (
                "what the folders in SOURCE are, if it is unclear: splits, or classes; lists of"
                " labels are then ignored"
            ),
        },
        "--class-order": {
            "choices": CLASS_ORDERS,
            "help": (
                "label order if all class names are numbers: 1, 10, 2 (text) or 1, 2, 10 (number)"
            ),
        },
        "--label-column": {
            "metavar": "NAME",
            "help": "column of classes in metadata.csv or another list, if several are possible",
        },
        "--no-classes": {
            "action": "store_true",
            "help": "take all images in SOURCE without labels, for prediction but not training",
        },
        **ARCHIVE_FLAGS,
    },
    lambda args: source(
        fetched(args),
        val_fraction=args.val_fraction,
        class_order=args.class_order,
        label_column=args.label_column,
        no_classes=args.no_classes,
        max_unreadable=args.max_unreadable,
        out=Path(args.out).resolve(),
        layout=args.layout,
    ),
    apply_exif=True,
)


if __name__ == "__main__":
    raise SystemExit(main())
