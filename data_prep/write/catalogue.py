"""The catalogue: what a source holds, as a table on disk, so that memory does not grow with it.

A source names its classes and files and adds its samples, some thousands at a time: key, label, and
where the encoded bytes are (write/catalogue_builder.py). Then the rows are put in the order of a
hash of (seed, key), in which the writer deals samples to shards. So the order in which the source
listed them does not matter, and the same images in two layouts give the same shards.

    <root>/_catalogue-<hash of its inputs>/     in the output folder, until the shards are complete
      catalogue.json        classes, files, splits; written last
      <split>.rows.bin      ROW, in the order of adding
      <split>.hashes.bin    HASH, likewise: what sorting needs
      <split>.text.bin      key, a zero, original name; one after the other
      <split>.order.npy     numbers of the rows in dealt order
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.write.catalogue_builder import Builder
from data_prep.write.samples import Sample, Table
from vit.system.files import locked_folder, read_json, remove_leftovers, temporary_beside

FORMAT = 1
PREFIX = "_catalogue-"
SPOOL = "_spool"
"""Names in the output folder."""


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
    """Archives whose path, size and time of change show that an earlier catalogue still holds.
    None: it is made again each time."""

    def made_of(self, seed: int, also: Any = None) -> str:
        """A sha256 of everything that decides the catalogue, in hex."""
        inputs = [
            (os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.inputs or ()
        ]
        text = json.dumps([FORMAT, self.name, self.options, seed, inputs, also])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Catalogue:
    """A finished catalogue; pickled as its folder's path, and mapped where it is used."""

    folder: Path
    class_names: list[str]
    notes: list[str]
    splits: Mapping[str, int]
    """Samples of each split; the first is the training split."""
    sha256: str
    """Of classes, splits, keys and labels: equal for the same images."""
    is_new: bool = False
    """This process has just made it."""

    @classmethod
    def load(cls, folder: Path, is_new: bool = False) -> Catalogue:
        """The catalogue in `folder`.

        Raises FileNotFoundError if it was removed, as the data set is complete.
        """
        found = _described(folder)
        return cls(
            folder, found["class_names"], found["notes"], found["splits"], found["sha256"], is_new
        )

    def table(self, split: str) -> Table:
        """The samples of a split. Raises FileNotFoundError if the catalogue was removed."""
        return _open_table(self.folder, split)


def _described(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "catalogue.json")
    if found is None:
        raise FileNotFoundError(
            errno.ENOENT, "the catalogue was removed", str(folder / "catalogue.json")
        )
    return found


@lru_cache(maxsize=4)
def _open_table(folder: Path, split: str) -> Table:
    return Table(folder, split, _described(folder)["files"])


def open_catalogue(
    source: Source,
    root: Path,
    seed: int,
    workers: int = 1,
    finish: Callable[[Builder], None] | None = None,
    also: Any = None,
    dry: bool = False,
) -> Catalogue:
    """The catalogue of `source`, in `root`: an existing one of the same inputs, else a new one.

    `finish` is called after `source.fill`; `also` (JSON) is what it depends on. Several processes
    may do this at once: the folder's name is a hash of the inputs, the first process to finish
    renames its folder to it, and the others use that one. Without inputs to compare, the folder
    keeps its temporary name.
    """
    folder = root / f"{PREFIX}{source.made_of(seed, also)[:16]}"
    if source.inputs is not None and folder.exists():
        return Catalogue.load(folder)
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    temporary, descriptor = locked_folder(folder)
    temporary.chmod(0o777 & ~_umask())
    try:
        with Builder(temporary, seed, workers, root / SPOOL, dry) as builder:
            source.fill(builder)
            if finish is not None:
                finish(builder)
            builder.finish()
        if source.inputs is None:
            _held[temporary] = descriptor
            return Catalogue.load(temporary, is_new=True)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(temporary, ignore_errors=True)  # another process was faster
            return Catalogue.load(folder)
        finally:
            os.close(descriptor)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(temporary)  # the error of a full disk has none
        raise
    return Catalogue.load(folder, is_new=True)


_held: dict[Path, int] = {}
"""Descriptors that lock the catalogues that keep their temporary name."""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def remove_catalogue(folder: Path) -> None:
    """Remove a catalogue or the spool, for other processes atomically."""
    _open_table.cache_clear()  # it maps the files
    gone = temporary_beside(folder) if not folder.name.startswith(".") else folder
    try:
        if gone != folder:
            os.rename(folder, gone)
    except OSError:  # it does not exist, or another process removes it
        return
    shutil.rmtree(gone, ignore_errors=True)
    if folder in _held:
        os.close(_held.pop(folder))


def remove_catalogues(root: Path) -> None:
    """Remove all catalogues in `root`, and the spool: the shards are complete."""
    for folder in [*root.glob(f"{glob.escape(PREFIX)}*"), root / SPOOL]:
        remove_catalogue(folder)


def is_of_catalogue(error: FileNotFoundError) -> bool:
    """Whether the missing file is of a catalogue or the spool, which the last process removes."""
    return any(
        part.startswith((PREFIX, SPOOL, f".{PREFIX}")) for part in Path(str(error.filename)).parts
    )
