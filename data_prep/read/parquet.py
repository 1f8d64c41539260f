"""Copy images out of parquet files (Hugging Face's layout), which have no random access.

Each row has a label and an image, given either as `{bytes, path}` or as raw bytes. Row groups are
compressed, so the images of each file are copied once into `<name>.images`. Their names, labels and
sizes are then written to `<name>.json`. In the copy, each image is a byte range, as in a tar. Only
one row group is in memory at a time.
"""

import math
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_prep.errors import PrepError, counted
from data_prep.write.catalog import Builder
from data_prep.write.jobs import count_one, run_jobs
from data_prep.write.samples import Sample, read_range, stable_hash
from vit.system.files import read_json, remove_leftovers, replacing, write_json

BATCH_ROWS = 64
"""The number of rows to hold in memory in addition to their row group: 7 MB for ImageNet."""


class Columns(NamedTuple):
    """The names of the image and label columns."""

    image: str = "image"
    label: str = "label"


class Spooled(NamedTuple):
    """The rows of a parquet file. Its images were copied to `file`."""

    parquet: Path
    file: Path
    names: list[str]
    """The image names, or "" for images without a path."""
    labels: list[Any]
    offsets: np.ndarray
    sizes: np.ndarray


def missing_files(split: str, files: Sequence[Path]) -> str:
    """Return a line about missing files, inferred from the names of the existing files, or ""."""
    matches = (re.search(r"-of-(\d+)", file.name) for file in files)
    totals = {int(match[1]) for match in matches if match}
    missing = max(totals, default=len(files)) - len(files)
    return f"{missing} of {max(totals)} parquet files of {split} are missing" if missing > 0 else ""


@contextmanager
def open_parquet(path: Path, columns: Columns | None = None) -> Iterator[Any]:
    """Open the pyarrow ParquetFile at `path`.

    Raises PrepError if the file is not a parquet file or lacks `columns` of suitable types. An
    error while the caller reads the file becomes a PrepError as well.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise PrepError("reading parquet files needs pyarrow: pip install pyarrow") from error

    problem = "not a complete parquet file"
    try:
        # pyarrow cannot open a path that is not UTF-8.
        with open(path, "rb") as stream, pyarrow.parquet.ParquetFile(stream) as file:
            problem = "damaged"  # The end is complete, because the file could be opened.
            if columns is not None:
                _check_columns(path, file.schema_arrow, columns)
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise PrepError(f"{path}: {problem} ({error}); download it again") from error


def _check_columns(path: Path, schema: Any, columns: Columns) -> None:
    """Raise PrepError if a file lacks a column, or if the type of a column is not suitable."""
    if not set(columns) <= set(schema.names) or not image_fields(schema, columns.image):
        raise PrepError(
            f"{path}: the columns are {', '.join(schema.names)}; expected {columns.image} (with"
            f" bytes and path) and {columns.label}"
        )
    problem = label_problem(schema, columns.label)
    if problem:
        raise PrepError(f"{path}: {columns.label} {problem}")


def label_problem(schema: Any, name: str) -> str:
    """Return why a column cannot contain class labels, or ""."""
    import pyarrow

    kind = schema.field(name).type
    value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if re.match("u?int|(large_)?string|bool|halffloat|float|double|null", str(value)):
        return ""

    if "list" in str(kind).partition("<")[0]:
        return (
            f"has several values in a row ({kind}); vitline trains with one class per image: choose"
            " another column with --label-column"
        )
    return (
        f"has the type {kind}; expected text or numbers: convert the column, or choose another one"
        " with --label-column"
    )


def image_fields(schema: Any, name: str) -> set[str]:
    """Return the fields of an image column (bytes and possibly path), or nothing for other
    columns."""
    import pyarrow

    kind = schema.field(name).type
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return {"bytes"}
    fields = {kind.field(n).name for n in range(kind.num_fields)}
    return fields & {"bytes", "path"} if "bytes" in fields else set()


def _place(path: Path, columns: Columns, spool: Path) -> Path:
    """Return a unique path for the copy of a parquet file's images."""
    status = path.stat()
    parts = (os.path.abspath(path), status.st_size, status.st_mtime_ns, *columns)
    return spool / f"{path.stem}-{stable_hash(*parts).hex()}.images"


def _is_copied(images: Path) -> bool:
    rows = read_json(images.with_suffix(".json"))
    return rows is not None and images.is_file() and images.stat().st_size == sum(rows["sizes"])


class _Copy(NamedTuple):
    """A parquet file, and the path to which its images are copied."""

    path: Path
    columns: Columns
    images: Path


def spool_file(copy: _Copy) -> None:
    """Copy the images of a parquet file. Runs in a worker process."""
    if _is_copied(copy.images):  # Another process has already copied the images.
        return
    remove_leftovers(copy.images.parent, copy.images.name)
    with replacing(copy.images) as target:
        rows = _read_rows(copy.path, copy.columns, target)
    write_json(copy.images.with_suffix(".json"), rows)


def _read_rows(
    path: Path, columns: Columns, target: BinaryIO | None = None
) -> dict[str, list[Any]]:
    """Return the names, labels and sizes of a file's rows, and copy the images to `target`.

    A null image becomes 0 bytes, which `read` rejects. Without a target, no image is read, and
    `sizes` is empty.
    """
    rows: dict[str, list[Any]] = {"names": [], "labels": [], "sizes": []}
    with open_parquet(path, columns) as file:
        has_path = "path" in image_fields(file.schema_arrow, columns.image)
        read = [columns.label]
        if target is not None or has_path:
            read.append(f"{columns.image}.path" if target is None else columns.image)

        for batch in file.iter_batches(BATCH_ROWS, columns=read, use_threads=False):
            names = [""] * len(batch)
            if has_path:
                paths = batch.column(columns.image).field("path")
                names = [name or "" for name in paths.to_pylist()]

            rows["names"] += names
            rows["labels"] += _labels(batch.column(columns.label))
            if target is not None:
                image = batch.column(columns.image)
                data = image.field("bytes") if image.type.num_fields else image
                for content in data.to_pylist():
                    rows["sizes"].append(target.write(content or b""))
                    count_one(rows["sizes"][-1])

    return rows


def _labels(column: Any) -> list[Any]:
    """Return the values of a label column, with outer blanks removed from texts.

    pandas stores whole numbers as floats if a value is missing.
    """
    values = column.to_pylist()
    if not re.search("float|double", str(column.type)):
        return [value.strip() if isinstance(value, str) else value for value in values]
    values = [None if value is None or math.isnan(value) else value for value in values]
    return [int(value) if value is not None and value.is_integer() else value for value in values]


def count_labels(file: Any, label: str) -> Counter[Any]:
    """Count the rows of an open parquet file by label, reading only the label column."""
    batches = file.iter_batches(columns=[label], use_threads=False)
    return Counter(value for batch in batches for value in _labels(batch.column(0)))


def read(sample: Sample) -> bytes:
    """Return the copied bytes of an image. Raises ValueError for a row without an image."""
    if not sample.size:
        raise ValueError(
            "the parquet file contains no bytes of this image (null); images must be inside the"
            " file, because paths are not followed"
        )
    return read_range(sample)


def _listed(path: Path, columns: Columns) -> Spooled:
    """Return the rows of a parquet file without reading the images."""
    rows = _read_rows(path, columns)
    num_rows = len(rows["names"])
    sizes = np.full(num_rows, path.stat().st_size // max(1, num_rows))
    return Spooled(path, path, rows["names"], rows["labels"], np.zeros(num_rows, np.int64), sizes)


def spool(files: Sequence[Path], builder: Builder, columns: Columns) -> Iterator[Spooled]:
    """Copy the images of all parquet files to `builder.spool`, and yield the rows file by file.

    Existing copies are reused. A dry run copies nothing, and uses the mean size as an estimate for
    each image. Processes that share the work start with different files. Raises PrepError if
    pyarrow is missing, the disk has too little space, or a file is invalid.
    """
    if builder.dry:
        for path in files:
            yield _listed(path, columns)
        return

    copies = [_Copy(path, columns, _place(path, columns, builder.spool)) for path in files]
    todo = [copy for copy in copies if not _is_copied(copy.images)]
    if todo:
        num_rows = sum(_num_rows(copy.path) for copy in todo)
        need = sum(copy.path.stat().st_size for copy in todo)
        free = shutil.disk_usage(builder.spool).free
        plan = (
            f"{counted(len(todo), 'parquet file is', 'parquet files are')} copied once to"
            f" {builder.spool}: {need / 1e9:,.1f} GB of {free / 1e9:,.1f} GB free"
        )

        if need > free:
            raise PrepError(f"{plan}: free some space, or choose a larger disk with --out")
        print(f"{plan}; the copy is removed when the shards are complete", flush=True)

        first = random.SystemRandom().randrange(len(todo))
        todo = todo[first:] + todo[:first]
        run_jobs(
            [(spool_file, copy, copy.path) for copy in todo],
            builder.workers,
            "copying",
            num_jobs=len(todo),
            num_images=num_rows,
            unit="files",
        )

    for copy in copies:
        rows = read_json(copy.images.with_suffix(".json"))
        assert rows is not None, copy.images
        sizes = np.array(rows["sizes"], np.int64)
        offsets = np.cumsum(sizes) - sizes
        yield Spooled(copy.path, copy.images, rows["names"], rows["labels"], offsets, sizes)


def _num_rows(path: Path) -> int:
    with open_parquet(path) as file:
        return int(file.metadata.num_rows)
