"""Write shards of ImageNet-1k (ILSVRC2012) from the downloaded files, without unpacking them.

    python -m data_prep.imagenet SOURCE [SOURCE ...] --out ROOT [--partial] [--md5]

SOURCE is a folder with some of these files, or the files and folders themselves:

    ILSVRC2012_img_train.tar ILSVRC2012_img_val.tar ILSVRC2012_devkit_t12.tar.gz
    imagenet-object-localization-challenge.zip      Kaggle's zip, or its folder ILSVRC/...
    train/ val/                                     torchvision's class folders
    data/*.parquet                                  Hugging Face's imagenet-1k, copied once (155 GB)

The layouts of train and val are detected and printed (data_prep/read/imagenet_search.py). A label
is the position of the image's WordNet ID (WNID) in the sorted list, as in all published weights.
For a flat val folder, the WNIDs come from the development kit or LOC_val_solution.csv. Keys are
image names, so all layouts produce the same shards. The counts must match those of ImageNet:
1,281,167 training and 50,000 validation images in 1,000 classes.
"""

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.command import source_command
from data_prep.errors import NEXT_LINE, PrepError
from data_prep.read.archives import read_zip_member
from data_prep.read.download import checksum_of
from data_prep.read.image_tree import read as read_file
from data_prep.read.imagenet_layouts import (
    IMAGE,
    IMAGE_EXTENSIONS,
    LABEL_FILES,
    TRAIN_TAR,
    VAL_TAR,
    ImageNetImages,
    ImageNetLayout,
    read_all_labels,
)
from data_prep.read.imagenet_search import Search, find_layouts
from data_prep.read.parquet import read as read_spooled
from data_prep.write.catalog import Builder, Source
from data_prep.write.samples import Sample, read_range
from vit.data.decode.image_files import MAX_IMAGE_BYTES
from vit.system.meter import Meter
from vit.system.spelling import few

NUM_CLASSES = 1000
NUM_IMAGES = {"train": 1_281_167, "val": 50_000}
PER_CLASS = {"train": (732, 1300), "val": (50, 50)}
"""The minimum and maximum number of images per class (source: the development kit's readme)."""
MD5 = {  # torchvision/datasets/imagenet.py, ARCHIVE_META
    TRAIN_TAR: "1d675b47d978889d74fa0da5fadfb00e",
    VAL_TAR: "29b22e2961454d5413ddabcf34fc5622",
    "ILSVRC2012_devkit_t12.tar.gz": "fa75699e90414af021442c21a62c3abf",
}


# ---- filling the catalog -------------------------------------------------------------------------


FAULTS = {
    "foreign": (
        "have file names that do not match their class in ImageNet",
        "expected n01440764_10026.JPEG, ILSVRC2012_val_00000001.JPEG",
    ),
    "unlabeled": ("have no class in the label file", f"use another label file: {LABEL_FILES}"),
    "contradicted": ("have another class in the label file", "correct the folder or the file"),
    "too large": (f"have more than {MAX_IMAGE_BYTES:,} bytes", "no image of ImageNet is so large"),
}
"""Maps each kind of fault that is an error even with --partial to its error message and a hint."""
Faults = defaultdict[str, list[str]]
"""Maps faults to image names. "unknown" lists WNIDs, and "ignored" lists files of other types."""


class ValidImages(NamedTuple):
    """The valid images of a batch: their rows there, keys and labels, in the same order."""

    rows: list[int]
    keys: list[str]
    labels: list[int]


def _take(
    images: ImageNetImages,
    split: str,
    label_of: Mapping[str, int],
    labels: Mapping[str, str],
    faults: Faults,
) -> ValidImages:
    """Return the valid images in a batch, and add all others to `faults`.

    Args:
        label_of: Maps the WNIDs of the classes to labels.
        labels: Maps the names of validation images to WNIDs.
    """
    training = split == "train"
    valid = ValidImages([], [], [])
    for row, (name, size) in enumerate(zip(images.names, images.sizes.tolist(), strict=True)):
        match = IMAGE.fullmatch(name)
        if match is None or bool(match["training_wnid"]) != training:
            is_image = name.lower().endswith(IMAGE_EXTENSIONS)
            if not name.startswith("."):  # macOS adds a metadata file `._x` for each x.
                faults["foreign" if is_image else "ignored"].append(name)
            continue

        key = match["key"]
        expected = match["training_wnid"] if training else labels.get(key, "")
        wnid_of_row = match["added_wnid"] if images.wnids is None else images.wnids[row]
        wnid = images.wnid or wnid_of_row or expected

        if not wnid:
            faults["unlabeled"].append(name)
        elif expected and wnid != expected:
            faults["foreign" if training else "contradicted"].append(f"{name} (in {wnid})")
        elif size > MAX_IMAGE_BYTES:
            faults["too large"].append(name)
        elif wnid not in label_of:
            faults["unknown"].append(wnid)
        else:
            valid.rows.append(row)
            valid.keys.append(key)
            valid.labels.append(label_of[wnid])

    return valid


def _add_split(
    builder: Builder, layout: ImageNetLayout, label_of: Mapping[str, int], labels: Mapping[str, str]
) -> Faults:
    """Add the valid images of a split to the catalog. Return the faults of all others."""
    faults = Faults(list)
    files = dict[Path, int]()
    done = 0
    with Meter(f"listing {layout.split}", NUM_IMAGES[layout.split], "images") as meter:
        for images in layout.images(builder):
            if images.file not in files:
                files[images.file] = builder.file(images.file)

            valid = _take(images, layout.split, label_of, labels, faults)
            if valid.rows:
                builder.add(
                    layout.split,
                    files[images.file],
                    [images.names[row] for row in valid.rows],
                    valid.labels,
                    images.offsets[valid.rows],
                    images.sizes[valid.rows],
                    valid.keys,
                )

            done += len(images.names)
            meter.update(done)

    return faults


def differences(split: str, class_names: Sequence[str], counts: np.ndarray) -> list[str]:
    """Return the differences between a split and ImageNet, one line each.

    counts: (len(class_names),) number of images in each class.
    """
    lines = []
    if counts.sum() != NUM_IMAGES[split]:
        lines.append(f"{split}: {counts.sum():,} images instead of {NUM_IMAGES[split]:,}")

    low, high = PER_CLASS[split]
    for wrong, problem in (
        (counts == 0, "have no images"),
        ((counts > 0) & (counts < low), f"have fewer than {low}"),
        (counts > high, f"have more than {high}"),
    ):
        classes = [f"{class_names[k]} ({counts[k]})" for k in np.flatnonzero(wrong).tolist()]
        if classes:
            lines.append(f"{split}: {len(classes):,} classes {problem}: {few(classes)}")

    return lines


def fill(search: Search, allow_partial: bool, builder: Builder) -> None:
    """Add all images to the catalog. Raises a single PrepError that lists all problems.

    Images and classes of ImageNet that the source lacks are problems, unless `allow_partial` is
    True. In that case, they are only reported.
    """
    labels = read_all_labels(search.labels)
    wnids = {layout.split: layout.wnids(builder) for layout in search.layouts}
    all_wnids = set(labels.values()).union(*wnids.values())
    class_names = sorted(wnids.get("train", all_wnids))
    builder.classes(class_names)

    gaps = [layout.lacking for layout in search.layouts if layout.lacking]
    if len(class_names) != NUM_CLASSES:
        gap = f"{len(class_names):,} classes instead of {NUM_CLASSES:,}"
        missing = sorted(all_wnids.difference(class_names))
        gaps.append(f"{gap}; missing: {few(missing)}" if missing else gap)

    errors: list[str] = []
    for layout in search.layouts:
        errors_of_split, gaps_of_split = _fill_split(builder, layout, labels)
        errors += errors_of_split
        gaps += gaps_of_split
        if not builder.count(layout.split).sum() and not errors:
            errors.append(f"{layout.split}: no images in {layout.path}")

    problems = errors if allow_partial else errors + gaps
    if problems:
        hint = (
            "\nadd the missing files (--md5 checks the archives), or use --partial to accept the"
            " source"
        )
        text = f"this source is not ImageNet-1k:\n  {NEXT_LINE.join(problems)}"
        raise PrepError(text if errors else text + hint)

    if len(class_names) < NUM_CLASSES:
        gaps.append(  # _info.json records this text, so rewording it changes the output.
            f"labels are positions among {len(class_names):,} classes: not the labels of published"
            f" weights, which know {NUM_CLASSES:,}"
        )
    for line in gaps:
        builder.report(f"partial: {line}")


def _fill_split(
    builder: Builder, layout: ImageNetLayout, labels: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Add the images of a split, and note where they are from. Return lines about errors and gaps.

    labels: maps the names of validation images to WNIDs.
    """
    split = layout.split
    builder.note(f"{split}: {layout.title} ({layout.path})")
    label_of = {wnid: label for label, wnid in enumerate(builder.class_names)}
    faults = _add_split(builder, layout, label_of, labels)
    if faults["ignored"]:
        builder.note(
            f"{split}: {len(faults['ignored']):,} files that are no images are left out:"
            f" {few(faults['ignored'])}"
        )

    errors = [
        f"{split}: {len(faults[kind]):,} images {problem}: {few(faults[kind])}; {hint}"
        for kind, (problem, hint) in FAULTS.items()
        if faults[kind]
    ]

    gaps = []
    unknown = Counter(faults["unknown"])
    if unknown:
        classes = few([f"{wnid} ({count})" for wnid, count in sorted(unknown.items())])
        gaps.append(
            f"{split}: {unknown.total():,} images of unknown classes: {classes}; train has none of"
            " them"
        )
    gaps += differences(split, builder.class_names, builder.count(split))
    return errors, gaps


# ---- reading -------------------------------------------------------------------------------------


READERS = {".tar": read_range, ".images": read_spooled, ".zip": read_zip_member}


def read(sample: Sample) -> bytes:
    """Return the encoded image, read from a tar, a copied parquet file, a zip or a folder.

    Raises OSError or ValueError.
    """
    return READERS.get(os.path.splitext(sample.file)[1].lower(), read_file)(sample)


# ---- the command ---------------------------------------------------------------------------------


def check_md5(paths: Sequence[Path]) -> None:
    """Compare archives with their published md5. Raises a PrepError that names all wrong files."""
    official = {path: MD5[path.name] for path in paths if path.name in MD5}
    if not official:
        print(f"md5: none of these files has a published md5; expected {', '.join(MD5)}")

    wrong = []
    for path, expected in official.items():
        md5 = checksum_of(path, "md5")
        if md5 == expected:
            print(f"md5 of {path.name}: correct", flush=True)
        else:
            wrong.append(
                f"{path} ({path.stat().st_size:,} bytes) has md5 {md5}; expected {expected};"
                " download it again"
            )

    if wrong:
        raise PrepError(NEXT_LINE.join(wrong))


def _check_splits(search: Search, allow_partial: bool) -> None:
    """Raise PrepError if a split is missing, or if a flat val folder has no label file."""
    splits = {layout.split for layout in search.layouts}
    expected = {"train": f"{TRAIN_TAR}, <wnid>.tar, train/<wnid>/", "val": f"{VAL_TAR}, val/"}
    one_is_enough = allow_partial and bool(splits)
    problems = [
        f"no images of {split} found; expected one of {files}, Kaggle's .zip or {split}*-*.parquet"
        for split, files in expected.items()
        if split not in splits and not one_is_enough
    ]
    if any(layout.flat for layout in search.layouts) and not search.labels:
        problems.append(
            "val is a flat folder or archive without a file that labels its images: add one of"
            f" these files: {LABEL_FILES}"
        )

    if problems:
        raise PrepError(NEXT_LINE.join(problems + search.remarks))


def source(paths: Sequence[Path], allow_partial: bool = False, md5: bool = False) -> Source:
    """Find ImageNet-1k in the given files and folders, and print the layout.

    Raises PrepError for problems that are visible without listing the images. `fill` lists the
    images.

    Args:
        allow_partial: Accept and report missing images, classes or splits.
        md5: Check the md5 of the archives first.
    """
    search = find_layouts(paths)
    _check_splits(search, allow_partial)
    for layout in search.layouts:
        print(f"{layout.split}: {layout.title} ({layout.path})", flush=True)
    for labels in search.labels:
        print(f"labels of val: {labels.title} ({labels.path})", flush=True)

    parts = [
        *(layout.inputs for layout in search.layouts),
        *(file.inputs for file in search.labels),
    ]
    inputs = list(dict.fromkeys(chain(*parts)))
    if md5:
        check_md5(inputs)

    return Source(
        "imagenet", {"partial": allow_partial}, partial(fill, search, allow_partial), read, inputs
    )


def _source(args: argparse.Namespace) -> Source:
    for path in args.source:
        if os.path.realpath(path) == os.path.realpath(args.out):
            raise PrepError(f"{path}: SOURCE and --out are the same folder: choose another --out")
    return source(args.source, args.partial, args.md5)


main = source_command(
    "imagenet",
    __doc__,
    {
        "source": {
            "type": Path,
            "nargs": "+",
            "metavar": "SOURCE",
            "help": "folder that contains the files, or the files and folders themselves",
        },
        "--partial": {
            "action": "store_true",
            "help": "accept and report missing images, classes or splits",
        },
        "--md5": {
            "action": "store_true",
            "help": "first compare the archives with their published md5 (147 GB, takes minutes)",
        },
    },
    _source,
)


if __name__ == "__main__":
    raise SystemExit(main())
