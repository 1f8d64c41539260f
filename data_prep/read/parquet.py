"""Images in parquet files (Hugging Face's layout of ImageNet), which have no random access.

Rows `{image: {bytes, path}, label}` are compressed in groups, so each file is copied once: its
images one after the other into `<name>.images`, and their names, labels and sizes into
`<name>.json`, which is written last. From then on an image is a range of bytes, as in a tar. Memory
is that of one row group.
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
from data_prep.write.catalogue_builder import Builder
from data_prep.write.jobs import count_one, run_jobs
from data_prep.write.samples import stable_hash
from vit.system.files import read_json, remove_leftovers, replacing, write_json

BATCH_ROWS = 64
"""Rows in memory in addition to their row group: 7 MB of ImageNet's."""


class Spooled(NamedTuple):
    """Rows of one parquet file, and `file`, where their images are now."""

    parquet: Path
    file: Path
    names: list[str]
    labels: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray


def _open(path: Path) -> Any:
    """The pyarrow ParquetFile at `path`. Raises PrepError for other files and other columns."""
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
        raise PrepError(
            f"{path}: not a complete parquet file ({error}); download it again"
        ) from error
    if not {"bytes", "path"} <= fields or "label" not in schema.names:
        raise PrepError(
            f"{path}: its columns are {', '.join(schema.names)}; expected image, with bytes and"
            " path, and label"
        )
    return file


def _place(path: Path, spool: Path) -> Path:
    """Where the images of a parquet file go; files of the same name go to different places."""
    found = path.stat()
    mark = stable_hash(os.path.abspath(path), found.st_size, found.st_mtime_ns).hex()
    return spool / f"{path.stem}-{mark}.images"


def _is_there(images: Path) -> bool:
    found = read_json(images.with_suffix(".json"))
    return found is not None and images.is_file() and images.stat().st_size == sum(found["sizes"])


def spool_file(paths: tuple[Path, Path]) -> None:
    """Copy the images of parquet file paths[0] to paths[1]; runs in a worker process."""
    path, images = paths
    if _is_there(images):  # another process has copied them for the same catalogue
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
    """Copy the images of all parquet files to `builder.spool`; yields the rows of each.

    Existing copies are kept. In a dry run nothing is copied, and sizes are means. Processes that
    share the work start at different files. Raises PrepError if pyarrow is missing, the disk has
    too little space, or a file is not as expected.
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
        plan = (
            f"{len(todo)} parquet files are copied once to {builder.spool}: {need / 1e9:,.1f} GB of"
            f" {free / 1e9:,.1f} GB free"
        )
        if need > free:
            raise PrepError(f"{plan}; free some space, or put --out on a larger disk")
        print(f"{plan}; removed when the shards are complete", flush=True)
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
