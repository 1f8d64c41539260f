"""Images out of parquet files (Hugging Face's layout of ImageNet), which cannot be read one image
at a time. Free of torch.

The data's story: rows `{image: {bytes, path}, label}` are compressed in groups, so each file is
copied once: its images one after the other into `<name>.images`, and their names, labels and sizes
into `<name>.json` beside it, which is written last. From then on an image is a range of bytes, as
in a tar. Batch by batch, with the memory of one row group.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import PrepError
from data_prep.write.catalogue import Builder, stable_hash
from data_prep.write.jobs import count_one, run_jobs
from vit.system.files import read_json, remove_leftovers, replacing, write_json

BATCH_ROWS = 64
"""Rows in memory besides their row group: of ImageNet's, 7 MB."""


class Spooled(NamedTuple):
    """Rows of one parquet file, and `file`, where their images lie now."""

    parquet: Path
    file: Path
    names: list[str]
    labels: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray


def _open(path: Path) -> Any:
    """The pyarrow ParquetFile at `path`. Raises PrepError if it is none, or has other columns."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise PrepError("reading parquet files needs pyarrow: pip install pyarrow") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        schema = file.schema_arrow
        image = schema.field("image").type if "image" in schema.names else None
        fields = (
            {image.field(n).name for n in range(image.num_fields)} if image is not None else set()
        )
    except (OSError, pyarrow.ArrowException) as error:
        raise PrepError(f"{path}: not a whole parquet file ({error}); download it again") from error
    if not {"bytes", "path"} <= fields or "label" not in schema.names:
        raise PrepError(
            f"{path}: its columns are {', '.join(schema.names)}; expected image, with bytes and"
            " path, and label"
        )
    return file


def _place(path: Path, spool: Path) -> Path:
    """Where the images of a parquet file go; another file of the same name goes elsewhere."""
    found = path.stat()
    return (
        spool
        / f"{path.stem}-{stable_hash(os.path.abspath(path), found.st_size, found.st_mtime_ns).hex()}.images"
    )


def _is_there(images: Path) -> bool:
    described = read_json(images.with_suffix(".json"))
    return (
        described is not None
        and images.is_file()
        and images.stat().st_size == sum(described["sizes"])
    )


def spool_file(paths: tuple[Path, Path]) -> None:
    """Copy the images of parquet file paths[0] to paths[1], unless they are there. Runs in a worker
    process."""
    path, images = paths
    if _is_there(images):  # another process that builds the same catalogue was here
        return
    remove_leftovers(images.parent, images.name)
    names: list[str] = []
    labels: list[int] = []
    sizes: list[int] = []
    with replacing(images) as target:
        for batch in _batches(path):
            for image, label in zip(
                batch.column("image").to_pylist(), batch.column("label").to_pylist(), strict=True
            ):
                if (
                    image is None
                    or image["bytes"] is None
                    or image["path"] is None
                    or label is None
                ):
                    raise PrepError(
                        f"{path}: row {len(names)} lacks its image, path or label; download it"
                        " again"
                    )
                target.write(image["bytes"])
                names.append(image["path"])
                labels.append(label)
                sizes.append(len(image["bytes"]))
                count_one(sizes[-1])
    write_json(images.with_suffix(".json"), {"names": names, "labels": labels, "sizes": sizes})


def _batches(
    path: Path, columns: Sequence[str] = ("image.bytes", "image.path", "label")
) -> Iterator[Any]:
    import pyarrow

    try:
        yield from _open(path).iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise PrepError(f"{path}: damaged ({error}); download it again") from error


def _listed(path: Path) -> Spooled:
    """The rows of a parquet file without its images."""
    names: list[str] = []
    labels: list[int] = []
    for batch in _batches(path, ["image.path", "label"]):
        names += batch.column("image").field("path").to_pylist()
        labels += batch.column("label").to_pylist()
    sizes = np.full(len(names), path.stat().st_size // max(1, len(names)))
    return Spooled(
        path, path, names, np.array(labels, np.int64), np.zeros(len(names), np.int64), sizes
    )


def spool(files: Sequence[Path], builder: Builder) -> Iterator[Spooled]:
    """Copy the images of all parquet files to `builder.spool`, except those that are there already;
    yields the rows of each.

    In a dry run nothing is copied, and sizes are the means of their files. Processes that share the
    work start at different files. Raises PrepError if pyarrow is missing, the disk has too little
    room, or a file is not as expected.
    """
    if builder.dry:
        yield from map(_listed, files)
        return
    places = {path: _place(path, builder.spool) for path in files}
    todo = [path for path in files if not _is_there(places[path])]
    if todo:
        rows = sum(_open(path).metadata.num_rows for path in todo)
        need = sum(path.stat().st_size for path in todo)
        free = shutil.disk_usage(builder.spool).free
        said = (
            f"{len(todo)} parquet files are copied once to {builder.spool}: {need / 1e9:,.1f} GB of"
            f" {free / 1e9:,.1f} GB free"
        )
        if need > free:
            raise PrepError(f"{said}; make room, or put --out on a larger disk")
        print(f"{said}; removed when the shards are complete", flush=True)
        first = random.SystemRandom().randrange(len(todo))
        todo = todo[first:] + todo[:first]
        jobs = [(spool_file, (path, places[path]), path) for path in todo]
        run_jobs(
            jobs, builder.workers, "copying", num_jobs=len(todo), num_images=rows, unit="files"
        )
    for path in files:
        described = read_json(places[path].with_suffix(".json"))
        assert described is not None, places[path]
        sizes = np.array(described["sizes"], np.int64)
        yield Spooled(
            path,
            places[path],
            described["names"],
            np.array(described["labels"], np.int64),
            np.cumsum(sizes) - sizes,
            sizes,
        )
