"""The catalogue: what a source holds, as a table on disk, so that memory does not grow with it.

A source names its classes and files and adds its samples, some thousands at a time: key, label, and
where the encoded bytes are (write/catalogue_builder.py). Then the rows are put in the order of a
hash of (seed, key), in which the writer deals samples to shards. So the order in which the source
listed them does not matter, and the same images in two layouts give the same shards.

    <root>/._catalogue.*.tmp/       in the output folder, while a command runs
      <split>.rows.bin      ROW, in the order of adding
      <split>.hashes.bin    HASH, likewise: what sorting needs
      <split>.text.bin      key, a zero, original name; one after the other
      <split>.order.npy     numbers of the rows in dealt order
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from data_prep.write.catalogue_builder import Builder
from data_prep.write.samples import Sample, Table, close_descriptors
from vit.system.files import locked_folder, remove_leftovers

FORMAT = 1
SPOOL = "_spool"
"""Folder in the output folder for what `Builder.spool` keeps."""


@dataclass(frozen=True)
class Source:
    """Where samples come from."""

    name: str
    """Recorded in `_info.json`; must be the same when a command continues."""
    options: dict[str, Any]
    """The source's own settings that decide what is written (JSON values)."""
    fill: Callable[[Builder], None]
    """Adds classes, files and samples to the catalogue. Raises PrepError for a bad source."""
    read: Callable[[Sample], bytes]
    """Encoded image of a sample; runs in worker processes. Raises OSError or ValueError."""
    inputs: Sequence[Path] | None = None
    """Archives whose path, size and time of change show that a complete data set is still theirs.
    None: the source is listed to see that."""

    def made_of(self, seed: int, minival: float | None) -> str | None:
        """A sha256 of everything that decides the catalogue, in hex; None without `inputs`."""
        if self.inputs is None:
            return None
        inputs = [
            (os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.inputs
        ]
        text = json.dumps([FORMAT, self.name, self.options, seed, inputs, minival])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Catalogue:
    """A finished catalogue; its tables are mapped where they are used. The end of its block removes
    it from the disk."""

    folder: Path
    class_names: list[str]
    notes: list[str]
    files: tuple[str, ...]
    splits: Mapping[str, int]
    """Samples of each split; the first is the training split."""
    sha256: str
    """Of classes, splits, keys and labels: equal for the same images."""
    lock: int
    """A descriptor of this process that keeps others from removing the folder."""

    def table(self, split: str) -> Table:
        """The samples of a split."""
        return _open_table(self.folder, split, self.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        _open_table.cache_clear()  # it maps the files
        close_descriptors(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def open_catalogue(
    source: Source,
    root: Path,
    seed: int,
    workers: int = 1,
    finish: Callable[[Builder], None] | None = None,
    dry: bool = False,
) -> Catalogue:
    """A new catalogue of `source` in `root`, under a temporary name.

    `finish` is called after `source.fill`. A catalogue that a killed process left is removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    folder, lock = locked_folder(root / "_catalogue")
    try:
        with Builder(folder, seed, workers, root / SPOOL, dry) as builder:
            source.fill(builder)
            if finish is not None:
                finish(builder)
            content = builder.finish()
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder)  # the error of a full disk has none
        raise
    return Catalogue(folder, lock=lock, **content)


@lru_cache(maxsize=4)
def _open_table(folder: Path, split: str, files: tuple[str, ...]) -> Table:
    return Table(folder, split, files)
