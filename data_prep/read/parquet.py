"""Images in parquet files (Hugging Face's layout), which have no random access.

Rows of an image, `{bytes, path}` or bytes alone, and a label are compressed in groups, so each file
is copied once: its images one after the other into `<name>.images`, and their names, labels and
sizes into `<name>.json`, which is written last. From then on an image is a range of bytes, as in a
tar. Memory is that of one row group.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import PrepError
from data_prep.write.catalogue import Builder
from data_prep.write.jobs import count_one, run_jobs
from data_prep.write.samples import stable_hash
from vit.system.files import read_json, remove_leftovers, replacing, write_json

BATCH_ROWS = 64
"""Rows in memory in addition to their row group: 7 MB of ImageNet's."""


class Columns(NamedTuple):
    """The columns of image and label, and the name of each label, if that is recorded."""

    image: str = "image"
    label: str = "label"
    class_names: tuple[str, ...] = ()


IMAGENET_COLUMNS = Columns()


class Spooled(NamedTuple):
    """Rows of one parquet file, and `file`, where their images are now."""

    parquet: Path
    file: Path
    names: list[str]
    """"" for an image without a path."""
    labels: list[Any]
    offsets: np.ndarray
    sizes: np.ndarray


def missing_files(split: str, files: Sequence[Path]) -> str:
    """A line about files that are missing, by the names of the others; "" if all are there."""
    totals = {int(match[1]) for file in files if (match := re.search(r"-of-(\d+)", file.name))}
    missing = max(totals, default=len(files)) - len(files)
    return f"{missing} of {max(totals)} parquet files of {split} are missing" if missing > 0 else ""


@contextmanager
def open_parquet(path: Path, columns: Columns | None = None) -> Iterator[Any]:
    """The pyarrow ParquetFile at `path`.

    Raises PrepError for other files, for damage, and for one that lacks `columns`.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise PrepError("reading parquet files needs pyarrow: pip install pyarrow") from error
    problem = "not a complete parquet file"
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            problem = "damaged"
            if columns is not None:
                _check_columns(path, file.schema_arrow, columns)
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise PrepError(f"{path}: {problem} ({error}); download it again") from error


def image_fields(schema: Any, name: str) -> set[str]:
    """The fields of a column that can hold images: bytes and perhaps path; of any other, none."""
    import pyarrow

    kind = schema.field(name).type
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return {"bytes"}
    fields = {kind.field(n).name for n in range(kind.num_fields)}
    return fields & {"bytes", "path"} if "bytes" in fields else set()


def _check_columns(path: Path, schema: Any, columns: Columns) -> None:
    if not (
        {columns.image, columns.label} <= set(schema.names) and image_fields(schema, columns.image)
    ):
        raise PrepError(
            f"{path}: its columns are {', '.join(schema.names)}; expected {columns.image}, with"
            f" bytes and path, and {columns.label}"
        )


def _place(path: Path, columns: Columns, spool: Path) -> Path:
    """Where the images of a parquet file go; files of the same name go to different places."""
    found = path.stat()
    mark = stable_hash(os.path.abspath(path), found.st_size, found.st_mtime_ns, *columns[:2]).hex()
    return spool / f"{path.stem}-{mark}.images"


def _is_there(images: Path) -> bool:
    found = read_json(images.with_suffix(".json"))
    return found is not None and images.is_file() and images.stat().st_size == sum(found["sizes"])


class _Copy(NamedTuple):
    """One parquet file to be copied."""

    path: Path
    columns: Columns
    images: Path


def spool_file(copy: _Copy) -> None:
    """Copy the images of a parquet file; runs in a worker process."""
    if _is_there(copy.images):  # another process has copied them for the same catalogue
        return
    remove_leftovers(copy.images.parent, copy.images.name)
    names: list[str] = []
    labels: list[Any] = []
    sizes: list[int] = []
    with replacing(copy.images) as target:
        for batch in _batches(copy.path, copy.columns):
            for image in batch.images:
                target.write(image)
                sizes.append(len(image))
                count_one(sizes[-1])
            names += batch.names
            labels += batch.labels
    described = {"names": names, "labels": labels, "sizes": sizes}
    write_json(copy.images.with_suffix(".json"), described)


class _Batch(NamedTuple):
    """Some rows; `images` is empty if they were not asked for."""

    names: list[str]
    labels: list[Any]
    images: list[bytes]


def _batches(path: Path, columns: Columns, with_images: bool = True) -> Iterator[_Batch]:
    """The rows of a file; a null in place of an image is one of no bytes, which cannot be read."""
    with open_parquet(path, columns) as file:
        has_path = "path" in image_fields(file.schema_arrow, columns.image)
        wanted = [columns.label]
        if with_images or has_path:
            wanted.append(columns.image if with_images else f"{columns.image}.path")
        for batch in file.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False):
            labels = batch.column(columns.label).to_pylist()
            images: list[bytes] = []
            names = [""] * len(labels)
            if has_path:
                image = batch.column(columns.image)
                names = [name or "" for name in image.field("path").to_pylist()]
            if with_images:
                image = batch.column(columns.image)
                data = image.field("bytes") if image.type.num_fields else image
                images = [one or b"" for one in data.to_pylist()]
            yield _Batch(names, labels, images)


def count_labels(path: Path, columns: Columns) -> Counter[Any]:
    """Number of rows of each label in a parquet file; reads that column alone."""
    counts = Counter[Any]()
    with open_parquet(path, columns) as file:
        for batch in file.iter_batches(columns=[columns.label], use_threads=False):
            counts.update(batch.column(0).to_pylist())
    return counts


def _listed(path: Path, columns: Columns) -> Spooled:
    """The rows of a parquet file without its images."""
    names: list[str] = []
    labels: list[Any] = []
    for batch in _batches(path, columns, with_images=False):
        names += batch.names
        labels += batch.labels
    sizes = np.full(len(names), path.stat().st_size // max(1, len(names)))
    return Spooled(path, path, names, labels, np.zeros(len(names), np.int64), sizes)


def spool(
    files: Sequence[Path], builder: Builder, columns: Columns = IMAGENET_COLUMNS
) -> Iterator[Spooled]:
    """Copy the images of all parquet files to `builder.spool`; yields the rows of each.

    Existing copies are kept. In a dry run nothing is copied, and sizes are means. Processes that
    share the work start at different files. Raises PrepError if pyarrow is missing, the disk has
    too little space, or a file is not as expected.
    """
    if builder.dry:
        for path in files:
            yield _listed(path, columns)
        return
    copies = [_Copy(path, columns, _place(path, columns, builder.spool)) for path in files]
    todo = [copy for copy in copies if not _is_there(copy.images)]
    if todo:
        rows = sum(_num_rows(copy.path) for copy in todo)
        need = sum(copy.path.stat().st_size for copy in todo)
        free = shutil.disk_usage(builder.spool).free
        plan = (
            f"{len(todo)} parquet files are copied once to {builder.spool}: {need / 1e9:,.1f} GB of"
            f" {free / 1e9:,.1f} GB free"
        )
        if need > free:
            raise PrepError(f"{plan}; free some space, or put --out on a larger disk")
        print(f"{plan}; removed when the shards are complete", flush=True)
        first = random.SystemRandom().randrange(len(todo))
        todo = todo[first:] + todo[:first]
        jobs = [(spool_file, copy, copy.path) for copy in todo]
        run_jobs(
            jobs, builder.workers, "copying", num_jobs=len(todo), num_images=rows, unit="files"
        )
    for copy in copies:
        described = read_json(copy.images.with_suffix(".json"))
        assert described is not None, copy.images
        sizes = np.array(described["sizes"], np.int64)
        yield Spooled(
            copy.path,
            copy.images,
            described["names"],
            described["labels"],
            np.cumsum(sizes) - sizes,
            sizes,
        )


def _num_rows(path: Path) -> int:
    with open_parquet(path) as file:
        return int(file.metadata.num_rows)
