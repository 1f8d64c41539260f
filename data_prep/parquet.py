"""Write shards from images in parquet files like those of the Hugging Face Hub and `datasets`.

    python -m data_prep.parquet SOURCE --out ROOT [--val-fraction F] [--partial]
    python -m data_prep.parquet SOURCE --out ROOT --image-column img --label-column fine_label

SOURCE is a folder of files such as `train-00000-of-00003.parquet`, or one file. The names of files
or of their folders (`train/0000.parquet`) determine the splits. `validation`, `val` or `dev`
becomes val. Without any of these, `test` becomes val. Without `test`, a tenth of each training
class becomes val. An evaluation split is skipped if none of its images has a label (all are null,
-1 or empty).

The schema of the first file or `dataset_info` in README.md names the image and label columns.
Otherwise the image is the column of bytes. Each file records its own class names, so labels are
matched by name, file by file. If no file records names, the sorted numbers or texts of the label
column are the classes. A key consists of the row number in the split and the image's name. Images
are copied once to ROOT/_spool, because parquet has no random access.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.command import VAL_FRACTION, VAL_FRACTION_FLAG, refuse_val_fraction, source_command
from data_prep.errors import NEXT_LINE, PrepError, require
from data_prep.read.hub_features import IMAGE_NAMES, LABEL_NAMES, choose_column, recorded_features
from data_prep.read.image_tree import Ignored, images_below
from data_prep.read.parquet import (
    Columns,
    Spooled,
    count_labels,
    image_fields,
    label_problem,
    missing_files,
    open_parquet,
    read,
    spool,
)
from data_prep.read.split_names import SPLIT_WORDS
from data_prep.write.catalog import Builder, Source
from vit.system.spelling import few

NO_LABEL = (None, -1, "")
"""The values that mean a missing label. Data sets on Hugging Face use -1 for secret labels."""


# ---- files ---------------------------------------------------------------------------------------


def find_files(source: Path) -> dict[str, list[Path]]:
    """Return the parquet files of each split, train first.

    Raises PrepError for missing files and unclear splits.
    """
    require(source, "parquet files")
    ignored = Ignored()
    paths = [source]
    if source.is_dir():
        names = images_below(source, ignored, lambda path: path.lower().endswith(".parquet"))
        paths = sorted(map(source.joinpath, names))
    if not paths:
        kinds = f" ({'; '.join(ignored.summary())})" if ignored.others or ignored.images else ""
        raise PrepError(
            f"{source}: found no .parquet files{kinds}; expected <split>-*.parquet, as written by"
            " Dataset.to_parquet of `datasets`"
        )

    files_of = defaultdict[str, list[Path]](list)
    unclear: list[str] = []
    for path in paths:
        split = _split_of(path, source)
        if split is None and len(paths) == 1:
            split = "train"  # a single file needs no split in its name
        if split is None:
            unclear.append(path.name)
        else:
            files_of[split].append(path)

    problems = []
    for split, files in files_of.items():
        folders = sorted({str(path.parent) for path in files})
        if len(folders) > 1:
            problems.append(
                f"files of {split} are in several folders ({few(folders)}): pass the folder of one"
                " data set"
            )
    if unclear:
        problems.append(
            f"no split in the names {few(unclear)}: rename these files to train-*, validation-* or"
            " test-*, or move them away"
        )
    if "train" not in files_of:
        problems.append("no training files: add train-*.parquet")
    if problems:
        raise PrepError(f"{source}: {NEXT_LINE.join(problems)}")

    return {split: files_of[split] for split in ("train", "val", "test") if split in files_of}


def _split_of(path: Path, source: Path) -> str | None:
    """Return the split in a file's name, or else in the name of its nearest folder."""
    parts = (path.stem, *reversed(path.relative_to(source).parts[:-1]))
    words = re.split("[^a-z]+", "/".join(parts).lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


# ---- columns and classes -------------------------------------------------------------------------


class FileLabels(NamedTuple):
    """The labels in a parquet file."""

    path: Path
    counts: Counter[Any]
    """The number of rows with each value of the label column."""
    names: list[str]
    """The class names recorded for this file, [] if there are none. A numeric label is a position
    in this list."""

    @property
    def values(self) -> set[Any]:
        """The values in the label column that are labels."""
        return self.counts.keys() - set(NO_LABEL)

    @property
    def classes(self) -> set[Any]:
        """The classes of all labels, as returned by `class_of`."""
        return {self.class_of(value) for value in self.values}

    @property
    def has_names(self) -> bool:
        """Whether the classes of this file have names."""
        return bool(self.names) or any(isinstance(value, str | bool) for value in self.values)

    def class_of(self, value: Any) -> Any:
        """Return the class of a value: its name, or the number itself if there are no names.

        Returns None if the value is not a recorded class.
        """
        if isinstance(value, str):
            return value if not self.names or value in self.names else None
        if self.names:
            return self.names[value] if value in range(len(self.names)) else None
        return str(value) if isinstance(value, bool) else value

    def describe(self) -> str:
        """Return the file name and its classes for a message."""
        names = self.names or sorted({str(name) for name in self.classes})
        return f"{self.path.name} ({few(names)})"


def read_labels(path: Path, columns: Columns, readmes: Sequence[Path]) -> FileLabels:
    """Read the labels of a file and the class names that its schema or a README.md records."""
    with open_parquet(path, columns) as file:
        names = recorded_features(file.schema_arrow, readmes).class_names.get(columns.label, [])
        return FileLabels(path, count_labels(file, columns.label), names)


def choose_columns(
    path: Path, readmes: Sequence[Path], image: str | None, label: str | None
) -> Columns:
    """Choose the columns from a file's schema. Raises PrepError if the choice is unclear.

    Args:
        image: The name of the image column, if the user gave one.
        label: The name of the label column, if the user gave one.
    """
    with open_parquet(path) as file:
        schema = file.schema_arrow
    features = recorded_features(schema, readmes)
    names = schema.names

    usual = [name for name in names if name.lower() in LABEL_NAMES]
    suitable = [name for name in usual if not label_problem(schema, name)]
    texts_or_integers = [
        name
        for name in names
        if re.match("u?int|(large_)?string|dictionary", str(schema.field(name).type))
    ]
    # A column named `label` is preferred to a caption, even if its type is not accepted.
    labels = list(features.class_names) or suitable or usual or texts_or_integers
    label = choose_column(path, "--label-column", label, labels, names)

    images = features.images or [name for name in names if image_fields(schema, name)]
    images = [name for name in images if name != label]
    if not images and image is None:
        raise PrepError(
            f"{path}: no column contains images (bytes, or bytes and path): the columns are "
            + ", ".join(f"{name} ({schema.field(name).type})" for name in names)
        )

    return Columns(choose_column(path, "--image-column", image, images, names, IMAGE_NAMES), label)


def _classes(files: Mapping[str, Sequence[FileLabels]]) -> list[Any]:
    """Return the classes in label order, as returned by `FileLabels.class_of`.

    files: the files of each split with labels, train first. If the training files record class
    names, these are the classes, in the order of the first file.
    """
    recorded = dict.fromkeys(chain.from_iterable(file.names for file in files["train"]))
    if recorded:
        return list(recorded)

    classes = set[Any]().union(*(file.classes for file in chain(*files.values()))) - {None}
    are_numbers = all(str(name).isdecimal() for name in classes)
    return sorted(classes, key=int if are_numbers else str)


def _problems(files: Mapping[str, Sequence[FileLabels]], classes: Sequence[Any]) -> Iterator[str]:
    """Yield a line about each problem with the labels in the files of all splits."""
    for split, split_files in files.items():
        counts = sum((file.counts for file in split_files), Counter[Any]())
        num_unlabeled = sum(counts[value] for value in NO_LABEL)
        if num_unlabeled:
            yield (
                f"{split}: {num_unlabeled:,} of {counts.total():,} images have no label (null, -1"
                " or empty): remove these rows"
            )
    if len(classes) < 2:
        yield (
            f"train: only one class ({', '.join(map(str, classes))}): provide at least two, or use"
            " another --label-column"
        )

    labeled = [file for file in chain(*files.values()) if file.values]
    named = [file for file in labeled if file.has_names]
    numbered = [file for file in labeled if not file.has_names]
    if named and numbered:
        yield (
            f"{numbered[0].describe()} has numbers as labels and no class names, but"
            f" {named[0].describe()} has names: record the class names in all files"
        )
        return

    for file in labeled:
        yield from _problems_of_file(file, classes, files["train"][0])


def _problems_of_file(file: FileLabels, classes: Sequence[Any], first: FileLabels) -> Iterator[str]:
    """Yield a line about invalid labels, and a line about classes that the first file lacks."""
    wrong = [
        str(value)
        for value in sorted(file.values, key=str)
        if file.class_of(value) is None or isinstance(value, float)
    ]
    if wrong:
        kind = (
            f"outside the {len(file.names):,} classes"
            if file.names
            else "that are not whole numbers"
        )
        yield f"{file.path.name}: labels {kind}: {few(wrong)}: correct them"

    unknown = file.classes - {*classes, None}
    if unknown and file.has_names:
        yield (
            f"{file.describe()} has images of {few(sorted(map(str, unknown)))}, which"
            f" {first.describe()} does not list: add this class there, or remove these images"
        )


# ---- the source ----------------------------------------------------------------------------------


def source(
    path: Path,
    image: str | None = None,
    label: str | None = None,
    val_fraction: float | None = None,
    allow_partial: bool = False,
) -> Source:
    """Return a `Source` for parquet files.

    Raises PrepError for missing files and ambiguous columns. Listing the images raises PrepError
    for missing or unknown labels.

    Args:
        image: The name of the image column, needed if several are possible.
        label: The name of the label column, needed if several are possible.
        val_fraction: The fraction of each class to use as val, allowed only if there is no val
            split.
        allow_partial: Accept missing files and classes without images.
    """
    files = find_files(path)
    refuse_val_fraction(val_fraction, *files.get("val", ()))

    first = files["train"][0]
    readmes = [
        folder / "README.md"
        for folder in (first.parent, first.parent.parent)
        if os.path.lexists(folder / "README.md")
    ]
    columns = choose_columns(first, readmes, image, label)

    numbers = ", ".join(f"{split} {len(paths)}" for split, paths in files.items())
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
        partial(_fill, files, columns, readmes, val_fraction, allow_partial),
        read,
        inputs=[*chain(*files.values()), *readmes],
    )


def _fill(
    files: Mapping[str, Sequence[Path]],
    columns: Columns,
    readmes: Sequence[Path],
    val_fraction: float | None,
    allow_partial: bool,
    builder: Builder,
) -> None:
    """Check the labels of all files, then add the images of each split."""
    labels = {
        split: [read_labels(path, columns, readmes) for path in paths]
        for split, paths in files.items()
    }
    for split, split_labels in list(labels.items()):
        if split != "train" and not any(file.values for file in split_labels):
            builder.report(f"{split}: has no image with a label, and is left out")
            del labels[split]

    classes = _classes(labels)
    incomplete = _incomplete(files, labels, classes)
    problems = list(_problems(labels, classes))
    if incomplete and not allow_partial:
        problems += [*incomplete, "add the missing files, or accept the source with --partial"]
    if problems:
        raise PrepError(f"{files['train'][0].parent}: {NEXT_LINE.join(problems)}")
    for line in incomplete:
        builder.report(f"partial: {line}")

    builder.classes(list(map(str, classes)))
    test_is_val = "val" not in labels and val_fraction is None
    for split, split_labels in labels.items():
        name = "val" if split == "test" and test_is_val else split
        _add_split(builder, name, spool(files[split], builder, columns), split_labels, classes)

    held_out = 0.0
    if not builder.count("val").any():
        held_out = VAL_FRACTION if val_fraction is None else val_fraction
        builder.hold_out("train", "val", held_out)
    builder.report_held_out("val", held_out, "--val-fraction {}")


def _incomplete(
    files: Mapping[str, Sequence[Path]],
    labels: Mapping[str, Sequence[FileLabels]],
    classes: Sequence[Any],
) -> list[str]:
    """Return lines about missing files, and about classes without training images."""
    lines = [missing_files(split, files[split]) for split in labels]
    in_train = set[Any]().union(*(file.classes for file in labels["train"]))
    empty = [str(name) for name in classes if name not in in_train]
    if empty:
        lines.append(
            f"train: no images of classes that are listed or in another split: {few(empty)}"
        )
    return [line for line in lines if line]


def _add_split(
    builder: Builder,
    split: str,
    spooled: Iterator[Spooled],
    labels: Sequence[FileLabels],
    classes: Sequence[Any],
) -> None:
    """Add the images from all files of a split. Keys contain the row number in the split."""
    label_of = {name: label for label, name in enumerate(classes)}
    first = 0
    for rows, file in zip(spooled, labels, strict=True):
        label_of_value = {value: label_of[file.class_of(value)] for value in file.values}
        stems = [os.path.splitext(os.path.basename(name))[0] for name in rows.names]
        builder.add(
            split,
            builder.file(rows.file),
            names=[name or f"row {first + row}" for row, name in enumerate(rows.names)],
            labels=[label_of_value[value] for value in rows.labels],
            offsets=rows.offsets,
            sizes=rows.sizes,
            keys=[f"{first + row:08d}_{stem}".rstrip("_") for row, stem in enumerate(stems)],
        )
        first += len(stems)


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
