"""List a source's samples in a catalog, a table on disk that limits memory use.

A source defines its classes and files, and adds samples in batches of thousands, each with a key, a
label and the location of the encoded bytes. The rows are then sorted in parts by a hash of (seed,
key), and the writer assigns samples to shards in this order. The listing order therefore does not
matter, and the same images in two layouts produce the same shards.

    <root>/._catalog.*.tmp/       in the output folder while a command runs
      <split>.rows.bin      ROW, in the order of adding
      <split>.hashes.bin    HASH, in the order of adding, for sorting
      <split>.text.bin      key, zero byte and original name of every sample
      <split>.order.npy     row numbers in sorted order
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.errors import PrepError
from data_prep.write.samples import (
    HASH,
    ROW,
    SAFE_KEY,
    SAFE_KEYS,
    Sample,
    Table,
    close_descriptors,
    key_hashes,
    safe_key,
)
from vit.system.files import locked_folder, remove_leftovers
from vit.system.spelling import few

FORMAT = 1
SPOOL = "_spool"
"""The subfolder of the output folder for the files of `Builder.spool`."""
ROWS_IN_MEMORY = 1 << 21
"""The maximum number of rows to sort or compare at a time. Larger tables are split into parts."""


@dataclass(frozen=True)
class Source:
    """A data set whose samples are to be written."""

    name: str
    """The name recorded in `_info.json`. It must stay the same when a command resumes."""
    options: dict[str, Any]
    """The source's settings that affect the written bytes (JSON values)."""
    fill: Callable[[Builder], None]
    """A function that adds classes, files and samples. Raises PrepError for an invalid source."""
    read: Callable[[Sample], bytes]
    """A worker function that returns a sample's encoded image. Raises OSError or ValueError."""
    inputs: Sequence[Path] | None = None
    """The archives whose paths, sizes and modification times show whether a data set is up to date.
    None if the check requires listing the source."""

    def made_of(self, seed: int, minival: float | None) -> str | None:
        """Return a sha256 of everything that affects the catalog, or None without `inputs`."""
        if self.inputs is None:
            return None

        inputs = [
            (os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.inputs
        ]
        text = json.dumps([FORMAT, self.name, self.options, seed, inputs, minival])
        return hashlib.sha256(text.encode()).hexdigest()


_open_table = lru_cache(maxsize=4)(Table)


@dataclass(frozen=True)
class Catalog:
    """A finished catalog, memory-mapped by each process."""

    folder: Path
    class_names: list[str]
    notes: list[str]
    files: tuple[str, ...]
    splits: Mapping[str, int]
    """The number of samples in each split. The first split is for training."""
    sha256: str
    """A hash over classes, splits, keys and labels. It does not depend on the source's layout."""

    def table(self, split: str) -> Table:
        return _open_table(self.folder, split, self.files)


@contextmanager
def open_catalog(
    source: Source,
    root: Path,
    seed: int,
    workers: int = 1,
    finish: Callable[[Builder], None] | None = None,
    dry: bool = False,
) -> Iterator[Catalog]:
    """Create a catalog of `source` in `root` under a temporary name, and remove it after the block.

    `finish` is called after `source.fill`. Catalogs of killed processes are removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    folder, lock = locked_folder(root / "_catalog")  # Other processes keep a locked folder.

    try:
        yield _build(source, Builder(folder, seed, workers, root / SPOOL, dry), finish)
    finally:
        _open_table.cache_clear()  # Cached tables still map the files.
        close_descriptors(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


# ---- making a catalog ----------------------------------------------------------------------------


def _build(source: Source, builder: Builder, finish: Callable[[Builder], None] | None) -> Catalog:
    """Add the samples of `source`, call `finish`, and return the finished catalog."""
    try:
        with closing(builder):
            source.fill(builder)
            if finish is not None:
                finish(builder)
            return builder.finish()
    except OSError as error:
        if error.filename is None:  # The error for a full disk contains no file name.
            error.filename = str(builder.folder)
        raise


class Builder:
    """A catalog under construction, passed to a source's `fill`."""

    def __init__(self, folder: Path, seed: int, workers: int, spool: Path, dry: bool = False):
        self.folder = folder
        self.seed = seed
        self.workers = workers
        self.dry = dry
        """True for a dry run, which skips all steps that are needed only for reading images."""
        self._spool = spool

        self.class_names: list[str] = []
        self.files: list[str] = []
        self.notes: list[str] = []
        self._counts: dict[str, np.ndarray] = {}
        self._written: dict[str, tuple[BinaryIO, ...]] = {}

    @property
    def spool(self) -> Path:
        """The folder for large intermediate files, such as the images in a parquet file.

        Processes that build the same catalog share the folder, so write with `replacing` and keep
        existing files. The folder is removed when the shards are complete.
        """
        self._spool.mkdir(parents=True, exist_ok=True)
        return self._spool

    def classes(self, names: Sequence[str]) -> None:
        """Set the class names in label order. If this is not called, every label is -1."""
        self.class_names = list(names)

    def file(self, path: Path | str) -> int:
        """Register a file or folder that contains samples, and return its number."""
        self.files.append(os.path.abspath(path))
        return len(self.files) - 1

    def note(self, text: str) -> None:
        """Record a line about the source in `_info.json` and on the data set's card."""
        self.notes.append(text)

    def report(self, text: str) -> None:
        """Print a line about the source, and record it like `note`."""
        self.note(text)
        print(text, flush=True)

    def add(
        self,
        split: str,
        file: int,
        names: Sequence[str],
        labels: int | Sequence[int] | np.ndarray,
        offsets: Sequence[int] | np.ndarray,
        sizes: Sequence[int] | np.ndarray,
        keys: Sequence[str] | None = None,
    ) -> None:
        """Add samples from one file to a split. The first split is for training.

        Args:
            names: The original names.
            keys: The keys. By default, the names without extension. `safe_key` replaces unsafe
                characters.
            sizes: The sizes in bytes, each below 4 GiB.
        """
        if len(sizes) and int(np.max(sizes)) >> 32:
            raise PrepError(
                f"{self.files[file]}: contains an image of {int(np.max(sizes)):,} bytes, but the"
                " limit is 4 GiB"
            )

        if keys is None:
            keys = [os.path.splitext(name)[0] for name in names]
        # Matching all keys at once, one per line, is much faster than matching each key.
        if SAFE_KEYS.fullmatch("\n".join([*keys, ""])) is None or any("\n" in key for key in keys):
            keys = [key if SAFE_KEY.fullmatch(key) else safe_key(key) for key in keys]
        texts = [
            f"{key}\0{name}".encode("utf-8", "surrogateescape")
            for key, name in zip(keys, names, strict=True)
        ]

        rows = np.empty(len(texts), ROW)
        rows["file"] = file
        rows["label"] = labels
        rows["offset"] = offsets
        rows["size"] = sizes
        rows["text_size"] = [len(text) for text in texts]
        hashes = np.empty(len(texts), HASH)
        hashes["hash"] = key_hashes(keys, self.seed)
        hashes["label"] = labels

        if split not in self._written:
            paths = (self.folder / f"{split}.{kind}.bin" for kind in ("text", "rows", "hashes"))
            self._written[split] = tuple(open(path, "ab", buffering=1 << 20) for path in paths)  # noqa: SIM115  (see close)
        text_file, rows_file, hashes_file = self._written[split]
        ends = np.cumsum(rows["text_size"], dtype=np.uint64)
        rows["text"] = text_file.tell() + ends - rows["text_size"]
        text_file.write(b"".join(texts))
        rows_file.write(rows.tobytes())
        hashes_file.write(hashes.tobytes())
        self._count(split, rows["label"])

    def close(self) -> None:
        """Close the files so that they can be read. `add` reopens them."""
        while self._written:
            for file in self._written.popitem()[1]:
                file.close()

    def _count(self, split: str, labels: np.ndarray) -> None:
        """Add labels to the counts of a split. Raises PrepError for a label that is not one of the
        classes."""
        num_classes = len(self.class_names)
        lowest = 0 if num_classes else -1  # the label of images without classes
        outside = labels[(labels < lowest) | (labels >= num_classes)]
        if len(outside):
            raise PrepError(
                f"split {split!r}: {len(outside)} labels are outside [0, {num_classes}); the first"
                f" is {outside[0]}"
            )
        self._counts[split] = self.count(split) + self._per_class(labels)

    def _per_class(self, labels: np.ndarray) -> np.ndarray:
        return np.bincount(np.maximum(labels, 0), minlength=max(1, len(self.class_names)))

    def count(self, split: str) -> np.ndarray:
        """Count the samples added to each class. Returns (num_classes,) int64, or (1,) without
        classes."""
        return self._counts.get(split, self._per_class(np.zeros(0, np.int64)))

    def hold_out(self, split: str, into: str, fraction: float) -> None:
        """Move the samples with the smallest hashes in each class of `split` to `into`.

        The hash depends only on the key, not on the seed or the position. The number of moved
        samples is rounded, but each class keeps at least one.
        """
        self.close()
        table = Table(self.folder, split, self.files)
        # At most 65,536 keys are in memory at a time.
        parts = np.array_split(np.arange(len(table)), len(table) // 65536 + 1)
        hashes = np.concatenate([key_hashes(table.keys(part)) for part in parts])

        order = np.lexsort((hashes, table.rows["label"]))
        labels = table.rows["label"][order]
        # Compute the position of each row among its class's rows, and the number of these rows.
        rank = np.arange(len(order)) - np.searchsorted(labels, labels)
        class_size = self.count(split)[labels]
        num_moved = np.minimum(np.round(fraction * class_size), class_size - 1)

        is_moved = np.zeros(len(table), bool)
        is_moved[order[rank < num_moved]] = True
        if not is_moved.any():
            return

        for kind, dtype in (("rows", ROW), ("hashes", HASH)):
            path = self.folder / f"{split}.{kind}.bin"
            with (
                open(self.folder / "remaining", "wb") as remaining,
                open(self.folder / f"{into}.{kind}.bin", "wb") as moved,
            ):
                for start, chunk in _chunks(path, dtype):
                    chosen = is_moved[start : start + len(chunk)]
                    remaining.write(chunk[~chosen].tobytes())
                    moved.write(chunk[chosen].tobytes())
            os.replace(self.folder / "remaining", path)

        shutil.copyfile(self.folder / f"{split}.text.bin", self.folder / f"{into}.text.bin")
        counted = self._per_class(table.rows["label"][is_moved])
        self._counts[split] = self._counts[split] - counted
        self._counts[into] = counted

    def report_held_out(self, split: str, fraction: float, flag: str) -> None:
        """Report train's classes that have no image in `split`, or that val is small.

        Args:
            fraction: The fraction of each class that was held out, 0 if the source has the split
                or nothing was held out.
            flag: The command-line flag that sets this fraction, with {} in place of the value.
        """
        num_images = self.count(split).sum()
        in_train = self.count("train")
        lacking = np.flatnonzero((self.count(split) == 0) & (in_train > 0))
        names = few([self.class_names[label] for label in lacking])

        if not len(lacking):
            self._report_small(split, num_images, fraction, flag)
        elif fraction:
            counts = in_train[lacking].tolist()
            remedies = _remedies_for_rounding(counts, flag, is_split_empty=not num_images)
            self.report(
                f"{split} has no image of {names}, because {fraction:.3g} of up to {max(counts)}"
                f" images rounds to 0: {remedies}"
            )
        elif num_images:
            purpose = " to hold out a part of train" if split == "val" else ""
            self.report(
                f"{split} has no image of {names}, so its accuracy does not cover all classes: add"
                f" images, or remove {split}{purpose}"
            )

    def _report_small(self, split: str, num_images: int, fraction: float, flag: str) -> None:
        """Report a held-out val that is too small to compare runs.

        Half the 95 % confidence interval of an accuracy p of n images is 1.96 * sqrt(p * (1 - p) /
        n), at most 0.98 / sqrt(n) (at p = 0.5).
        """
        may_grow = 0 < fraction < 0.2  # Never suggest holding out more than 20 % of train.
        is_small = split == "val" and num_images < 100
        if is_small and may_grow:
            self.report(
                f"val has only {num_images} images, so an accuracy is uncertain by up to"
                f" {98 / num_images**0.5:.0f} percentage points: to compare runs, use"
                f" {flag.format(0.2)}"
            )

    def finish(self) -> Catalog:
        """Sort the rows and return the catalog.

        Raises PrepError for an empty split or repeated keys.
        """
        self.close()
        digest = hashlib.sha256(json.dumps(self.class_names).encode())
        if not self._counts:
            raise PrepError("the source contains no samples")
        for split, count in self._counts.items():
            if not count.sum():
                raise PrepError(f"split {split!r} has no samples")
            digest.update(f"{split}\t{count.sum()}\n".encode())
            _write_order(Table(self.folder, split, self.files), self.folder, digest)

        return Catalog(
            self.folder,
            class_names=self.class_names,
            notes=self.notes,
            files=tuple(self.files),
            splits={split: int(count.sum()) for split, count in self._counts.items()},
            sha256=digest.hexdigest(),
        )


def _remedies_for_rounding(counts: Sequence[int], flag: str, is_split_empty: bool) -> str:
    """Return what to do about classes of `counts` images each, whose held-out part rounds to 0."""
    remedies = "add images"
    larger = [count for count in counts if count > 1]
    if larger:
        # A class of n images loses one if fraction * n exceeds 0.5. The smallest such multiple of
        # 0.05 = 1/20 is (floor(10 / n) + 1) / 20.
        remedies = f"use {flag.format((10 // min(larger) + 1) / 20)} or add images"
    if is_split_empty:
        remedies += ", or set data.train_split='train[:90%]' data.val_split='train[90%:]'"
    return remedies


def catalog_sha256(class_names: Sequence[str], splits: Mapping[str, np.ndarray]) -> str:
    """Compute the `sha256` of a catalog from each split's HASH rows, sorted by hash."""
    digest = hashlib.sha256(json.dumps(class_names).encode())
    for split, hashes in splits.items():
        digest.update(f"{split}\t{len(hashes)}\n".encode() + hashes.tobytes())
    return digest.hexdigest()


def _chunks(path: Path, dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index of the first record, records) for each part of a record file.

    A memory map is not used, because its pages count as memory of this process.
    """
    with open(path, "rb") as file:
        for start in range(0, path.stat().st_size // dtype.itemsize, ROWS_IN_MEMORY):
            yield start, np.fromfile(file, dtype, ROWS_IN_MEMORY)


def _write_order(table: Table, folder: Path, digest: Any) -> None:
    """Write the row numbers sorted by (hash, key), in parts that fit into memory.

    Hashes and labels are added to the digest in this order. Raises PrepError for repeated keys.
    """
    # Each part covers a hash range of the same size. The number of parts is a power of two, chosen
    # so that a part is about half full.
    num_parts = 1 << max(0, (2 * len(table) // ROWS_IN_MEMORY).bit_length())
    width = (1 << 64) // num_parts
    repeated = set[str]()
    with open(folder / f"{table.split}.order.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<u8", "fortran_order": False, "shape": (len(table),)}
        )

        for part in range(num_parts):
            low, high = np.uint64(part * width), np.uint64((part + 1) * width - 1)
            rows, hashes = _sorted_range(folder / f"{table.split}.hashes.bin", low, high)

            # Only one in 10**11 data sets has two different keys with the same hash.
            for place in np.flatnonzero(hashes["hash"][1:] == hashes["hash"][:-1]):
                first, second = table.keys(rows[place : place + 2])
                if first == second:
                    repeated.add(first)
                elif first > second:
                    rows[[place, place + 1]] = rows[[place + 1, place]]
                    hashes[[place, place + 1]] = hashes[[place + 1, place]]

            file.write(rows.astype("<u8").tobytes())
            digest.update(hashes.tobytes())

    if repeated:
        raise PrepError(
            f"split {table.split!r}: {len(repeated)} keys are not unique (dots, slashes and blanks"
            f" become '_'): {few(sorted(repeated))}; rename these images, or remove the duplicates"
        )


def _sorted_range(path: Path, low: np.uint64, high: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers and the records of the HASH file `path` with hashes in [low, high].

    Both are sorted by hash.
    """
    chosen = []
    for start, chunk in _chunks(path, HASH):
        inside = np.flatnonzero((chunk["hash"] >= low) & (chunk["hash"] <= high))
        chosen.append((start + inside, chunk[inside]))

    rows, hashes = (np.concatenate(column) for column in zip(*chosen, strict=True))
    by_hash = np.argsort(hashes["hash"], kind="stable")
    return rows[by_hash], hashes[by_hash]
