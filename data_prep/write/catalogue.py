"""What a source holds: a table of samples, on disk, so that memory does not grow with their number.
Free of torch.

The data's story: a source names its classes and files and adds its samples, some thousands at a
time: key, label, and where the encoded bytes are. Rows go to `rows.bin`, keys and original names to
`text.bin`. When all are in, the rows are put in the order of a hash of (seed, key): the order in
which the writer deals samples to shards. The order in which the source listed them leaves no trace,
and the same images found in two layouts give the same shards.

    <root>/_catalogue-<what it was made of>/        in the output folder, until the shards are complete
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
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_prep.errors import PrepError
from vit.system.files import (
    locked_folder,
    read_json,
    remove_leftovers,
    temporary_beside,
    write_json,
)

ROW = np.dtype(
    [  # 32 bytes a sample: 41 MB for ImageNet-1k
        ("file", "<u4"),  # number in `files`
        ("size", "<u4"),
        ("offset", "<u8"),  # of the encoded bytes; what these mean is the business of `Source.read`
        ("label", "<i4"),
        ("text_size", "<u4"),
        ("text", "<u8"),  # where its key and name begin in text.bin
    ]
)
HASH = np.dtype([("hash", "<u8"), ("label", "<i4")])  # the hash of (seed, key)
MAX_KEY_BYTES = 90
"""A ustar header holds names of 100 bytes, extension included."""
SAFE_KEY = re.compile(r"[\w+=@,()~-]{1,90}", re.ASCII)
SAFE_KEYS = re.compile(rf"(?:{SAFE_KEY.pattern}\n)*", re.ASCII)
ROWS_IN_MEMORY = 1 << 21
"""Rows sorted or compared at once; what is more is done in parts, read one after the other."""
MAX_OPEN_FILES = 256
"""A quarter of the usual limit of a process."""
FORMAT = 1
PREFIX = "_catalogue-"
SPOOL = "_spool"
"""Names in the output folder."""


class Sample(NamedTuple):
    """One image of a source: `name` is its original name there; the bytes lie at `offset` of
    `file`, `size` of them."""

    key: str
    label: int
    name: str
    file: str
    offset: int
    size: int


@dataclass(frozen=True)
class Source:
    """Where samples come from."""

    name: str
    """Recorded in `_info.json`, and part of what must be equal when a command is continued."""
    options: dict[str, Any]
    """The source's own settings that decide what is written (JSON values)."""
    fill: Callable[[Builder], None]
    """Adds classes, files and samples to the catalogue. Raises PrepError for a source that is not
    as expected."""
    read: Callable[[Sample], bytes]
    """Encoded image of a sample; picklable, as it runs in worker processes. Raises OSError or
    ValueError."""
    inputs: Sequence[Path] | None = None
    """Archives whose path, size and time of change tell that a catalogue made before still holds.
    None: it is made anew each time."""

    def made_of(self, seed: int, also: Any = None) -> str:
        """A sha256 of all that decides the catalogue, in hex."""
        inputs = [
            (os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.inputs or ()
        ]
        return hashlib.sha256(
            json.dumps([FORMAT, self.name, self.options, seed, inputs, also]).encode()
        ).hexdigest()


# ---- keys ----------------------------------------------------------------------------------------


def stable_hash(*parts: Any) -> bytes:
    """8 bytes that depend on the parts' text alone: not on the process (as `hash` does), nor on a
    library's version."""
    return hashlib.blake2b(
        "\0".join(map(str, parts)).encode("utf-8", "surrogateescape"), digest_size=8
    ).digest()


def safe_key(text: str) -> str:
    """`text` as a key: no dot (webdataset ends the key at the first), no slash, no blank, at most
    90 bytes.

    What is longer keeps its beginning and ends in a hash of the whole.
    """
    key = re.sub(
        r"[./\\\s\x00-\x1f]",
        "_",
        text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
    )
    if len(key.encode()) > MAX_KEY_BYTES:
        key = f"{key.encode()[: MAX_KEY_BYTES - 17].decode(errors='ignore')}_{stable_hash(text).hex()}"
    return key


def key_hashes(keys: Sequence[str], *before: Any) -> np.ndarray:
    """(len(keys),) uint64: `stable_hash(*before, key)` of each key, as a big-endian number."""
    blake2b = hashlib.blake2b
    start = "".join(f"{part}\0" for part in before)
    digests = [
        blake2b((start + key).encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for key in keys
    ]
    return np.frombuffer(b"".join(digests), ">u8").astype("<u8")


# ---- making one ----------------------------------------------------------------------------------


class Builder:
    """A catalogue that is being made; a source's `fill` gets it."""

    def __init__(self, folder: Path, seed: int, workers: int, spool: Path, dry: bool = False):
        self.folder = folder
        self.seed = seed
        self.workers = workers
        self.dry = dry
        """Nothing will be written: leave out what is only needed to read images."""
        self._spool = spool
        self.class_names: list[str] = []
        self.files: list[str] = []
        self.notes: list[str] = []
        self._counts: dict[str, np.ndarray] = {}
        self._written: dict[str, tuple[BinaryIO, ...]] = {}
        """Of each split: texts, rows and hashes. Open until they are read: a source may add some
        hundred samples at a time."""
        self._text_bytes: dict[str, int] = {}

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_files()

    @property
    def spool(self) -> Path:
        """Folder for big intermediate files, such as the images of a parquet file one after the
        other.

        Processes that build the same catalogue share it: write with `replacing`, keep what is
        there. It goes when the shards are complete.
        """
        self._spool.mkdir(parents=True, exist_ok=True)
        return self._spool

    def classes(self, names: Sequence[str]) -> None:
        """Set the name of each label."""
        self.class_names = list(names)

    def file(self, path: Path | str) -> int:
        """Register a file or folder that holds samples; returns its number."""
        self.files.append(os.path.abspath(path))
        return len(self.files) - 1

    def note(self, text: str) -> None:
        """Record a line about the source, for `_info.json` and the data set's card; nothing is
        compared with it."""
        self.notes.append(text)

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
        """Add samples of one file to a split; the first split is the training split.

        names: original names. keys: by default the names without their extension; made safe here
        (see `safe_key`). sizes: below 4 GiB.
        """
        if len(sizes) and (largest := int(np.max(sizes))) >> 32:
            raise PrepError(
                f"{self.files[file]}: an image of {largest:,} bytes; no image has 4 GiB"
            )
        if keys is None:
            keys = [os.path.splitext(name)[0] for name in names]
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
            self._written[split] = tuple(open(path, "ab", buffering=1 << 20) for path in paths)  # noqa: SIM115  (see _close_files)
        start = self._text_bytes.get(split, 0)
        rows["text"] = start + np.cumsum(rows["text_size"], dtype=np.uint64) - rows["text_size"]
        self._text_bytes[split] = start + int(rows["text_size"].sum())
        for written, data in zip(
            self._written[split], (b"".join(texts), rows.tobytes(), hashes.tobytes()), strict=True
        ):
            written.write(data)
        self._count(split, rows["label"])

    def _close_files(self) -> None:
        """What was added can be read then, and more can still be added."""
        while self._written:
            for file in self._written.popitem()[1]:
                file.close()

    def _count(self, split: str, labels: np.ndarray) -> None:
        num_classes = len(self.class_names)
        outside = labels[(labels < 0) | (labels >= num_classes)]
        if len(outside):
            raise PrepError(
                f"split {split!r}: {len(outside)} labels lie outside [0, {num_classes}), the first"
                f" is {outside[0]}"
            )
        found = np.bincount(labels, minlength=num_classes)
        self._counts[split] = self._counts[split] + found if split in self._counts else found

    def count(self, split: str) -> np.ndarray:
        """(num_classes,) int64: samples of each class so far."""
        return self._counts.get(split, np.zeros(len(self.class_names), np.int64))

    def hold_out(self, split: str, into: str, fraction: float) -> None:
        """Move the `fraction` of each class of `split` whose keys have the smallest hash to `into`,
        which is new.

        Of the key alone: neither the seed nor the position moves an image. Rounded, and each class
        keeps one image at least.
        """
        self._close_files()
        table = Table(self.folder, split, self.files, ordered=False)
        held = np.zeros(len(table), bool)
        for labels in _groups(self.count(split)):
            rows = np.flatnonzero(
                (table.rows["label"] >= labels.start) & (table.rows["label"] < labels.stop)
            )
            hashes = np.concatenate(
                [
                    key_hashes([table.text(row)[0] for row in part.tolist()])
                    for part in np.array_split(rows, len(rows) // 65536 + 1)
                ]
            )
            members = table.rows["label"][rows]
            order = np.lexsort((hashes, members))
            rows = rows[order]
            members = members[order]
            rank = np.arange(len(rows)) - np.searchsorted(members, members)
            per_class = self.count(split)[members]
            held[rows[rank < np.minimum(np.round(fraction * per_class), per_class - 1)]] = True
        if not held.any():
            return
        for kind, dtype in (("rows", ROW), ("hashes", HASH)):
            there = self.folder / f"{split}.{kind}.bin"
            with (
                open(self.folder / "kept", "wb") as kept,
                open(self.folder / f"{into}.{kind}.bin", "wb") as moved,
            ):
                for start, chunk in _chunks(there, dtype):
                    chosen = held[start : start + len(chunk)]
                    kept.write(chunk[~chosen].tobytes())
                    moved.write(chunk[chosen].tobytes())
            os.replace(self.folder / "kept", there)
        shutil.copyfile(self.folder / f"{split}.text.bin", self.folder / f"{into}.text.bin")
        counted = np.bincount(table.rows["label"][held], minlength=len(self.class_names))
        self._counts[split] = self._counts[split] - counted
        self._counts[into] = counted

    def finish(self) -> None:
        """Order the rows and write `catalogue.json`. Raises PrepError for empty splits and keys
        that occur twice."""
        self._close_files()
        digest = hashlib.sha256(json.dumps(self.class_names).encode())
        if not self._counts:
            raise PrepError("the source holds no samples")
        for split, count in self._counts.items():
            if not count.sum():
                raise PrepError(f"split {split!r} has no samples")
            digest.update(f"{split}\t{count.sum()}\n".encode())
            _write_order(Table(self.folder, split, self.files, ordered=False), self.folder, digest)
        splits = {split: int(count.sum()) for split, count in self._counts.items()}
        described = {
            "class_names": self.class_names,
            "files": self.files,
            "notes": self.notes,
            "splits": splits,
        }
        write_json(self.folder / "catalogue.json", {**described, "sha256": digest.hexdigest()})


def catalogue_sha256(class_names: Sequence[str], splits: Mapping[str, np.ndarray]) -> str:
    """What `Builder.finish` gives, from the HASH of all samples of each split, by hash. splits: in
    their order."""
    digest = hashlib.sha256(json.dumps(class_names).encode())
    for split, hashes in splits.items():
        digest.update(f"{split}\t{len(hashes)}\n".encode() + hashes.tobytes())
    return digest.hexdigest()


def _groups(per_class: np.ndarray) -> Iterator[range]:
    """Ranges of labels with about ROWS_IN_MEMORY samples together."""
    start = 0
    total = 0
    for label, count in enumerate(per_class.tolist()):
        if total + count > ROWS_IN_MEMORY and label > start:
            yield range(start, label)
            start = label
            total = 0
        total += count
    yield range(start, len(per_class))


def _chunks(path: Path, dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the first, records) of a file of records, one part after the other: a map of it
    would count as this process's memory."""
    with open(path, "rb") as file:
        for start in range(0, path.stat().st_size // dtype.itemsize, ROWS_IN_MEMORY):
            yield start, np.fromfile(file, dtype, ROWS_IN_MEMORY)


def _write_order(table: Table, folder: Path, digest: Any) -> None:
    """Write the numbers of the rows by (hash, key), in parts that fit the memory; adds hashes and
    labels to the digest in this order.

    Raises PrepError if a key occurs twice.
    """
    # a power of two; each about half full
    parts = 1 << max(0, (2 * len(table) // ROWS_IN_MEMORY).bit_length())
    width = (1 << 64) // parts
    twice = set()
    with open(folder / f"{table.split}.order.npy", "wb") as file:
        described = {"descr": "<u8", "fortran_order": False, "shape": (len(table),)}
        np.lib.format.write_array_header_1_0(file, described)
        for part in range(parts):
            low, high = np.uint64(part * width), np.uint64((part + 1) * width - 1)
            chosen = []
            for start, chunk in _chunks(folder / f"{table.split}.hashes.bin", HASH):
                inside = np.flatnonzero((chunk["hash"] >= low) & (chunk["hash"] <= high))
                chosen.append((start + inside, chunk[inside]))
            rows, hashes = (np.concatenate(column) for column in zip(*chosen, strict=True))
            by_hash = np.argsort(hashes["hash"], kind="stable")
            rows = rows[by_hash]
            hashes = hashes[by_hash]
            # of two keys once in 10**11 data sets
            for same in np.flatnonzero(hashes["hash"][1:] == hashes["hash"][:-1]):
                first, second = (table.text(int(row))[0] for row in rows[same : same + 2])
                if first == second:
                    twice.add(first)
                elif first > second:
                    rows[[same, same + 1]] = rows[[same + 1, same]]
                    hashes[[same, same + 1]] = hashes[[same + 1, same]]
            file.write(rows.astype("<u8").tobytes())
            digest.update(hashes.tobytes())
    if twice:
        raise PrepError(
            f"split {table.split!r}: {len(twice)} keys are used more than once:"
            f" {some(sorted(twice))}; keys must differ (dots, slashes and blanks count as '_'):"
            " rename these images, or remove what is there twice"
        )


def some(items: Sequence[str], most: int = 5) -> str:
    """The first of many, for an error message."""
    return ", ".join(items[:most]) + (
        f" and {len(items) - most:,} more" if len(items) > most else ""
    )


# ---- reading one ---------------------------------------------------------------------------------


class Table:
    """The samples of one split, by their place in dealt order; all arrays are mapped."""

    def __init__(self, folder: Path, split: str, files: Sequence[str], ordered: bool = True):
        self.split = split
        self.files = files
        paths = {part: folder / f"{split}.{part}.bin" for part in ("rows", "text")}
        self.rows = (
            np.memmap(paths["rows"], ROW, "r") if paths["rows"].stat().st_size else np.empty(0, ROW)
        )
        self._text = (
            np.memmap(paths["text"], np.uint8, "r")
            if paths["text"].stat().st_size
            else np.empty(0, np.uint8)
        )
        self._order = np.load(folder / f"{split}.order.npy", mmap_mode="r") if ordered else None

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, row: int) -> tuple[str, str]:
        """(key, name) of a row."""
        found = self.rows[row]
        start = int(found["text"])
        key, _, name = (
            self._text[start : start + int(found["text_size"])]
            .tobytes()
            .decode("utf-8", "surrogateescape")
            .partition("\0")
        )
        return key, name

    def dealt(self, places: slice | np.ndarray) -> np.ndarray:
        """Rows (ROW) at these places of the dealt order."""
        assert self._order is not None, "not ordered yet"
        return self.rows[self._order[places]]

    def samples(self, places: Sequence[int] | np.ndarray) -> list[Sample]:
        """The samples at these places of the dealt order."""
        found = self.dealt(np.asarray(places, np.int64))
        columns = (
            found[name].tolist()
            for name in ("label", "file", "offset", "size", "text", "text_size")
        )
        samples = []
        for label, file, offset, size, start, length in zip(*columns, strict=True):
            key, _, name = (
                self._text[start : start + length]
                .tobytes()
                .decode("utf-8", "surrogateescape")
                .partition("\0")
            )
            samples.append(Sample(key, label, name, self.files[file], offset, size))
        return samples


@dataclass(frozen=True)
class Catalogue:
    """A finished catalogue; picklable: it travels as its folder's path, and arrays are mapped where
    it arrives."""

    folder: Path
    class_names: list[str]
    notes: list[str]
    splits: Mapping[str, int]
    """Samples of each split; the first is the training split."""
    sha256: str
    """Of classes, splits, keys and labels: two catalogues with the same are of the same images."""
    is_new: bool = False
    """Made by this process just now."""

    @classmethod
    def load(cls, folder: Path, is_new: bool = False) -> Catalogue:
        """The catalogue in `folder`. Raises FileNotFoundError if it was removed: the data set is
        complete."""
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
    """The catalogue of `source`, in a folder in `root`: the one that is there if it was made of the
    same inputs, else a new one.

    `finish` is called after `source.fill` and `also` (JSON) says what it depends on. Several
    processes may do this at once: the name tells what a catalogue was made of, the first to be
    ready gives it, the others take that one, and nobody replaces another's. Without inputs to
    compare it keeps its temporary name, which tells the process it belongs to.
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
            shutil.rmtree(temporary, ignore_errors=True)  # another process was quicker
            return Catalogue.load(folder)
        finally:
            os.close(descriptor)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(temporary)  # a full disk does not say where
        raise
    return Catalogue.load(folder, is_new=True)


_held: dict[Path, int] = {}
"""Descriptors that keep catalogues locked which have no other name than their temporary one."""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def remove_catalogue(folder: Path) -> None:
    """Remove a catalogue, or the spool: gone for other processes at once, not file by file."""
    _open_table.cache_clear()  # it maps the files
    gone = temporary_beside(folder) if not folder.name.startswith(".") else folder
    try:
        if gone != folder:
            os.rename(folder, gone)
    except OSError:  # not there, or another process does it
        return
    shutil.rmtree(gone, ignore_errors=True)
    if folder in _held:
        os.close(_held.pop(folder))


def remove_catalogues(root: Path) -> None:
    """Remove all catalogues in `root`, and the spool: the shards are complete."""
    for folder in [*root.glob(f"{glob.escape(PREFIX)}*"), root / SPOOL]:
        remove_catalogue(folder)


def is_of_catalogue(error: FileNotFoundError) -> bool:
    """Whether what is missing belongs to a catalogue or the spool, which a process that completes
    the data set removes."""
    return any(
        part.startswith((PREFIX, SPOOL, f".{PREFIX}")) for part in Path(str(error.filename)).parts
    )


# ---- bytes ---------------------------------------------------------------------------------------


_descriptors: OrderedDict[str, int] = OrderedDict()


def descriptor(file: str) -> int:
    """A descriptor of `file`, kept open until MAX_OPEN_FILES others were asked for. For one
    thread."""
    if file in _descriptors:
        _descriptors.move_to_end(file)
    else:
        if len(_descriptors) == MAX_OPEN_FILES:
            os.close(_descriptors.popitem(last=False)[1])
        _descriptors[file] = os.open(file, os.O_RDONLY)
    return _descriptors[file]


def read_range(sample: Sample) -> bytes:
    """The bytes at (offset, size) of the sample's file. Raises OSError."""
    data = os.pread(descriptor(sample.file), sample.size, sample.offset)
    if len(data) != sample.size:
        raise OSError(
            errno.EIO,
            f"ends at byte {sample.offset + len(data)}, inside {sample.name}; it was whole when it"
            " was listed",
            sample.file,
        )
    return data
