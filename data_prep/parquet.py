"""Write shards from images in parquet files like those of the Hugging Face Hub and `datasets`.

    python -m data_prep.parquet SOURCE --out ROOT [--val-fraction F] [--partial]
    python -m data_prep.parquet SOURCE --out ROOT --image-column img --label-column fine_label

SOURCE is a folder of files such as `train-00000-of-00003.parquet`, or one file. The names of files
or of their folders (`train/0000.parquet`) determine the splits. `validation`, `val` or `dev`
becomes val. Without any of these, `test` becomes val. Without `test`, a tenth of each training
class becomes val. An evaluation split is skipped if none of its images has a label (all are null or
-1).

The schema of the files or `dataset_info` in README.md names the image column, the label column and
the classes. Otherwise the image is the column of bytes, and the sorted numbers or texts of the
label column are the classes. A key consists of the row number in the split and the image's name.
Images are copied once to ROOT/_spool, because parquet has no random access.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.command import VAL_FRACTION, VAL_FRACTION_FLAG, refuse_val_fraction, source_command
from data_prep.errors import NEXT_LINE, PrepError, require, some
from data_prep.read.hub_features import choose_column, recorded_features
from data_prep.read.image_tree import Ignored, images_below
from data_prep.read.parquet import (
    Columns,
    count_labels,
    image_fields,
    missing_files,
    open_parquet,
    spool,
)
from data_prep.write.catalogue import Builder, Source
from data_prep.write.samples import read_range

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
NO_LABEL = (None, -1)
"""The values that mean a missing label. Data sets on Hugging Face use -1 for secret labels."""


# ---- files ---------------------------------------------------------------------------------------


def find_files(source: Path) -> dict[str, list[Path]]:
    """Return the parquet files of each split, train first. Raises PrepError."""
    require(source, "parquet files")
    ignored = Ignored()
    paths = [source]
    if source.is_dir():
        names = images_below(source, ignored, lambda path: path.lower().endswith(".parquet"))
        paths = sorted(source / name for name in names)
    if not paths:
        kinds = f" ({'; '.join(ignored.summary())})" if ignored.others or ignored.images else ""
        raise PrepError(
            f"{source}: found no .parquet files{kinds}; expected <split>-*.parquet, as written by"
            " Dataset.to_parquet of `datasets`"
        )
    splits = defaultdict[str, list[Path]](list)
    for path in paths:
        splits[_split_of(path, source) or "train" * (len(paths) == 1)].append(path)
    problems = [
        f"files of {split} are in several folders ({some(folders)}): pass the folder of one data"
        " set"
        for split, files in splits.items()
        if len(folders := sorted({str(path.parent) for path in files})) > 1
    ]
    if unclear := [path.name for path in splits.pop("", [])]:
        problems.append(
            f"no split in the names {some(unclear)}: rename these files to train-*, validation-* or"
            " test-*, or move them away"
        )
    if "train" not in splits:
        problems.append("no training files: add train-*.parquet")
    if problems:
        raise PrepError(f"{source}: {NEXT_LINE.join(problems)}")
    return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def _split_of(path: Path, source: Path) -> str | None:
    for part in (path.stem, *reversed(path.relative_to(source).parts[:-1])):
        for word in re.split("[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


# ---- columns and classes -------------------------------------------------------------------------


def describe(path: Path, readmes: Sequence[Path], image: str | None, label: str | None) -> Columns:
    """Choose the columns from a file's schema. image, label: column names given by the user.

    Raises PrepError.
    """
    with open_parquet(path) as file:
        schema = file.schema_arrow
    features = recorded_features(schema, readmes)
    names = schema.names
    images = features.images or [name for name in names if image_fields(schema, name)]
    texts_or_integers = [
        name
        for name in names
        if re.match("u?int|(large_)?string|dictionary", str(schema.field(name).type))
    ]
    labels = list(features.class_names) or texts_or_integers
    label = choose_column(path, "--label-column", label, labels, names)
    image = choose_column(path, "--image-column", image, images, names)
    return Columns(image, label, tuple(features.class_names.get(label, ())))


def _classes(columns: Columns, counts: Mapping[str, Counter[Any]]) -> dict[Any, str]:
    """Map each value of the label column to its class name, in label order."""
    values = set[Any]().union(*counts.values()).difference(NO_LABEL)
    if names := columns.class_names:
        are_names = all(isinstance(value, str) for value in values)
        return dict(zip(names if are_names else range(len(names)), names, strict=True))
    are_numbers = all(str(value).isdecimal() for value in values)
    return {value: str(value) for value in sorted(values, key=int if are_numbers else str)}


def _problems(counts: Mapping[str, Counter[Any]], classes: Mapping[Any, str]) -> list[str]:
    problems = []
    for split, values in counts.items():
        if lacking := sum(values[value] for value in NO_LABEL):
            problems.append(
                f"{split}: {lacking:,} of {values.total():,} images have no label (null or -1):"
                " remove these rows"
            )
        unknown = sorted(map(str, values.keys() - classes.keys() - set(NO_LABEL)))
        if unknown:
            problems.append(
                f"{split}: labels outside the {len(classes):,} classes: {some(unknown)}: correct"
                " them"
            )
    if len(classes) < 2:
        problems.append(
            f"train: only one class ({', '.join(classes.values())}): provide at least two, or use"
            " another --label-column"
        )
    return problems


# ---- the source ----------------------------------------------------------------------------------


def source(
    path: Path,
    image: str | None = None,
    label: str | None = None,
    val_fraction: float | None = None,
    allow_partial: bool = False,
) -> Source:
    """Return a `Source` for parquet files.

    image, label: column names, needed if several are possible. val_fraction: the fraction of each
    class to use as val, allowed only if there is no val split. allow_partial: accept missing files
    and classes without images. Raises PrepError for missing files and ambiguous columns. Listing
    the images raises PrepError for missing or unknown labels.
    """
    files = find_files(path)
    refuse_val_fraction(val_fraction, *files.get("val", ()))
    first = files["train"][0]
    readmes = [folder / "README.md" for folder in (first.parent, first.parent.parent)]
    readmes = [readme for readme in readmes if readme.is_file()]
    columns = describe(first, readmes, image, label)
    numbers = ", ".join(f"{split} {len(of_split)}" for split, of_split in files.items())
    print(
        f"parquet files: {numbers}; images: column {columns.image}; labels: {columns.label}",
        flush=True,
    )
    return Source(
        "parquet",
        {
            "image_column": columns.image,
            "label_column": columns.label,
            "val_fraction": val_fraction,
            "partial": allow_partial,
        },
        partial(_fill, files, columns, val_fraction, allow_partial),
        read_range,
        inputs=[*chain(*files.values()), *readmes],
    )


def _fill(
    files: Mapping[str, Sequence[Path]],
    columns: Columns,
    val_fraction: float | None,
    allow_partial: bool,
    builder: Builder,
) -> None:
    counts = {}
    for split, paths in files.items():
        counts[split] = sum((count_labels(path, columns) for path in paths), Counter[Any]())
        if split != "train" and set(counts[split]) <= set(NO_LABEL):
            builder.report(f"{split}: its images have no labels, and are left out")
            del counts[split]
    classes = _classes(columns, counts)
    incomplete = [line for split in counts if (line := missing_files(split, files[split]))]
    if empty := [name for value, name in classes.items() if not counts["train"][value]]:
        incomplete.append(f"train: classes without images: {some(empty)}")
    problems = _problems(counts, classes)
    if incomplete and not allow_partial:
        problems += [*incomplete, "add the missing files, or accept the source with --partial"]
    if problems:
        raise PrepError(f"{files['train'][0].parent}: {NEXT_LINE.join(problems)}")
    for line in incomplete:
        builder.report(f"partial: {line}")
    builder.classes(list(classes.values()))
    labels = {value: label for label, value in enumerate(classes)}
    test_is_val = "val" not in counts and val_fraction is None
    for split in counts:
        first = 0
        for rows in spool(files[split], builder, columns):
            stems = [os.path.splitext(os.path.basename(name))[0] for name in rows.names]
            builder.add(
                "val" if split == "test" and test_is_val else split,
                builder.file(rows.file),
                names=[name or f"row {first + row}" for row, name in enumerate(rows.names)],
                labels=[labels[label] for label in rows.labels],
                offsets=rows.offsets,
                sizes=rows.sizes,
                keys=[f"{first + row:08d}_{stem}".rstrip("_") for row, stem in enumerate(stems)],
            )
            first += len(stems)
    if not builder.count("val").any():
        builder.hold_out("train", "val", VAL_FRACTION if val_fraction is None else val_fraction)


# ---- the command ---------------------------------------------------------------------------------


main = source_command(
    "parquet",
    __doc__,
    {
        "source": {
            "type": Path,
            "metavar": "SOURCE",
            "help": "folder of parquet files, or one parquet file",
        },
        "--image-column": {"metavar": "NAME", "help": "image column, if several are possible"},
        "--label-column": {"metavar": "NAME", "help": "label column, if several are possible"},
        **VAL_FRACTION_FLAG,
        "--partial": {
            "action": "store_true",
            "help": "accept and report missing files and classes without images",
        },
    },
    lambda args: source(
        args.source, args.image_column, args.label_column, args.val_fraction, args.partial
    ),
)


if __name__ == "__main__":
    raise SystemExit(main())
