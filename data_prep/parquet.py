"""Shards from images in parquet files, as Hugging Face's hub and `datasets` write them.

    python -m data_prep.parquet SOURCE --out ROOT [--val-fraction F] [--partial]
    python -m data_prep.parquet SOURCE --out ROOT --image-column img --label-column fine_label

SOURCE is a folder with `train-00000-of-00003.parquet` and the like, or such a file; splits are read
from the names of files, or of their folders (`train/0000.parquet`). `validation`, `val` or `dev`
becomes val. Without it `test` does, and without both each class gives a tenth of train. A split
other than train whose images all lack their label (null, or -1) is left out.

The columns of image and label, and the names of classes, are those that the schema of the files or
`dataset_info` in README.md describes; else the image is the column of bytes, and labels are
numbers, or texts, in their order. Keys are the number of a row in its split and the image's name.
Images are copied once to ROOT/_spool: parquet has no random access.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.command import (
    VAL_FRACTION,
    Parser,
    add_arguments,
    add_val_fraction_argument,
    run,
    write_or_plan,
)
from data_prep.errors import NEXT_LINE, PrepError, some
from data_prep.read.hub_features import Features, features_of_readme, features_of_schema
from data_prep.read.image_tree import Ignored, images_below
from data_prep.read.label_column import choose_column
from data_prep.read.parquet import (
    Columns,
    count_labels,
    image_fields,
    missing_files,
    open_parquet,
    spool,
)
from data_prep.write.catalogue import Source
from data_prep.write.catalogue_builder import Builder
from data_prep.write.samples import read_range

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of files and folders -> the split."""
NO_LABEL = (None, -1)
"""Hugging Face's data sets have -1 where labels are kept secret."""


@dataclass(frozen=True)
class Asked:
    """The flags about the source."""

    image_column: str | None = None
    label_column: str | None = None
    val_fraction: float | None = None
    """In [0, 1), of each class; only without val, by default 0.1."""
    partial: bool = False
    """Accept missing files, and classes without images."""


class Described(NamedTuple):
    """What the schema says."""

    columns: Columns
    class_names: list[str]
    """Name of each label; empty if only the labels themselves say it."""


# ---- files ---------------------------------------------------------------------------------------


def find_files(source: Path) -> dict[str, list[Path]]:
    """The parquet files of each split, train first. Raises PrepError."""
    if not source.exists():
        raise PrepError(f"{source}: no such file or folder; expected parquet files")
    others = Ignored()
    paths = [source]
    if source.is_dir():
        found = images_below(source, others, lambda path: path.lower().endswith(".parquet"))
        paths = sorted(source / name for name in found)
    if not paths:
        kinds = f" ({'; '.join(others.summary())})" if others.others or others.images else ""
        raise PrepError(
            f"{source}: no .parquet files{kinds}; expected <split>-*.parquet, which `datasets`"
            " writes by Dataset.to_parquet"
        )
    splits: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    unclear: list[Path] = []
    for path in paths:
        split = _split_of(path, source)
        (unclear if split is None else splits[split]).append(path)
    if len(unclear) == len(paths):
        splits["train"], unclear = unclear, []
    problems = []
    if unclear:
        problems.append(
            f"no split in the name of {some([path.name for path in unclear])}: name them train-*,"
            " validation-* or test-*, or move them away"
        )
    if not splits["train"]:
        problems.append("no files of train: add train-*.parquet")
    for split, files in splits.items():
        if len(folders := sorted({str(path.parent) for path in files})) > 1:
            problems.append(
                f"files of {split} are in several folders ({some(folders)}), of several data sets:"
                " give one of them"
            )
    if problems:
        raise PrepError(f"{source}: {NEXT_LINE.join(problems)}")
    return {split: files for split, files in splits.items() if files}


def _split_of(path: Path, source: Path) -> str | None:
    for part in (path.stem, *reversed(path.relative_to(source).parts[:-1])):
        for word in re.split("[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


# ---- columns and classes -------------------------------------------------------------------------


def describe(path: Path, readmes: Sequence[Path], asked: Asked) -> Described:
    """Find the columns, and the names of classes, by the schema of a file. Raises PrepError."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
    import pyarrow  # it is installed, as open_parquet has seen

    features = features_of_schema(schema.metadata)
    for readme in readmes if features == Features() else ():
        features = features_of_readme(readme, schema.names)
    with_bytes = [name for name in schema.names if image_fields(schema, name)]
    images = [name for name in features.images if name in with_bytes] or with_bytes
    image = choose_column(path, "--image-column", asked.image_column, images, schema.names)
    types = pyarrow.types
    values = [
        name
        for name in schema.names
        if types.is_integer(kind := schema.field(name).type)
        or types.is_string(kind)
        or types.is_large_string(kind)
    ]
    labels = list(features.class_names) or values
    label = choose_column(path, "--label-column", asked.label_column, labels, schema.names)
    return Described(Columns(image, label), features.class_names.get(label, []))


def _classes(described: Described, counts: Mapping[str, Counter[Any]]) -> dict[Any, str]:
    """The name of each value of the column of labels, in the order of labels."""
    values = set[Any]().union(*counts.values()).difference(NO_LABEL)
    if names := described.class_names:
        are_names = all(isinstance(value, str) for value in values)
        return dict(zip(names if are_names else range(len(names)), names, strict=True))
    are_numbers = all(str(value).isdecimal() for value in values)
    return {value: str(value) for value in sorted(values, key=int if are_numbers else str)}


def _problems(counts: Mapping[str, Counter[Any]], classes: Mapping[Any, str]) -> list[str]:
    """What is wrong with the labels, a line each."""
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
                f"{split}: labels that are none of the {len(classes):,} classes:"
                f" {some(unknown)}: correct them"
            )
    if len(classes) < 2:
        problems.append(
            f"train: only one class ({', '.join(classes.values())}): give two at least, or another"
            " --label-column"
        )
    return problems


# ---- the source ----------------------------------------------------------------------------------


def source(path: Path, asked: Asked | None = None) -> Source:
    """The images of parquet files.

    Raises PrepError for missing files and unclear columns; when it is listed, for labels that are
    missing or unknown, and classes without images.
    """
    asked = asked or Asked()
    files = find_files(path)
    if "val" in files and asked.val_fraction is not None:
        raise PrepError(
            f"--val-fraction {asked.val_fraction} was given, but {files['val'][0]} is there; leave"
            " one of them out"
        )
    first = files["train"][0]
    readmes = [folder / "README.md" for folder in (first.parent, first.parent.parent)]
    readmes = [readme for readme in readmes if readme.is_file()][:1]
    described = describe(first, readmes, asked)
    counted = ", ".join(f"{split} {len(listed)}" for split, listed in files.items())
    print(
        f"parquet files: {counted}; images: column {described.columns.image}; labels:"
        f" {described.columns.label}",
        flush=True,
    )
    unset = vars(Asked())
    options = {key: value for key, value in vars(asked).items() if value is not unset[key]}
    inputs = [*(path for listed in files.values() for path in listed), *readmes]
    return Source("parquet", options, partial(_fill, files, described, asked), read_range, inputs)


def _fill(
    files: Mapping[str, Sequence[Path]], described: Described, asked: Asked, builder: Builder
) -> None:
    counts = {}
    for split, listed in files.items():
        each = (count_labels(path, described.columns) for path in listed)
        counts[split] = sum(each, Counter[Any]())
        if split != "train" and set(counts[split]) <= set(NO_LABEL):
            builder.report(f"{split}: its images have no labels, and are left out")
            del counts[split]
    classes = _classes(described, counts)
    incomplete = [line for split in counts if (line := missing_files(split, files[split]))]
    empty = [name for value, name in classes.items() if not counts["train"][value]]
    if empty:
        incomplete.append(f"train: {len(empty):,} classes without images: {some(empty)}")
    problems = _problems(counts, classes)
    if incomplete and not asked.partial:
        problems += [*incomplete, "add what is missing, or take what is there: --partial"]
    if problems:
        raise PrepError(f"{files['train'][0].parent}: {NEXT_LINE.join(problems)}")
    for line in incomplete:
        builder.report(f"partial: {line}")
    builder.classes(list(classes.values()))
    renamed = {"test": "val"} if "val" not in counts and asked.val_fraction is None else {}
    labels = {value: label for label, value in enumerate(classes)}
    for split in counts:
        _add_split(builder, renamed.get(split, split), files[split], described.columns, labels)
    if not builder.count("val").any():
        held = VAL_FRACTION if asked.val_fraction is None else asked.val_fraction
        builder.hold_out("train", "val", held)


def _add_split(
    builder: Builder, split: str, files: Sequence[Path], columns: Columns, labels: Mapping[Any, int]
) -> None:
    first = 0
    for rows in spool(files, builder, columns):
        names = [name or f"row {first + row}" for row, name in enumerate(rows.names)]
        stems = [os.path.splitext(os.path.basename(name))[0] for name in rows.names]
        keys = [f"{first + row:08d}_{stem}".rstrip("_") for row, stem in enumerate(stems)]
        found = [labels[label] for label in rows.labels]
        if names:
            file = builder.file(rows.file)
            builder.add(split, file, names, found, rows.offsets, rows.sizes, keys)
        first += len(names)


# ---- the command ---------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.parquet", __doc__)
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="folder of parquet files, or one of them"
    )
    parser.add_argument("--image-column", metavar="NAME", help="where images are, if it is unclear")
    parser.add_argument("--label-column", metavar="NAME", help="where labels are, if it is unclear")
    add_val_fraction_argument(parser)
    parser.add_argument(
        "--partial",
        action="store_true",
        help="accept missing files, and classes without images; reports what is missing",
    )
    add_arguments(parser)

    def command(args: argparse.Namespace) -> None:
        asked = Asked(args.image_column, args.label_column, args.val_fraction, args.partial)
        write_or_plan(source(args.source, asked), args)

    return run(command, parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
