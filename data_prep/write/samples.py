"""Define a source's samples: their keys, their table in a catalog, and access to their bytes."""

import errno
import hashlib
import itertools
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROW = np.dtype(
    [  # 32 bytes per sample, 41 MB for ImageNet-1k
        ("file", "<u4"),  # index into `files`
        ("size", "<u4"),
        ("offset", "<u8"),  # position of the encoded bytes, passed to `Source.read`
        ("label", "<i4"),
        ("text_size", "<u4"),
        ("text", "<u8"),  # position of the key and name in text.bin
    ]
)
HASH = np.dtype([("hash", "<u8"), ("label", "<i4")])  # hash of (seed, key)
MAX_OPEN_FILES = 256
"""The maximum number of open files, a quarter of the usual limit."""


MAX_KEY_BYTES = 90
"""The maximum length of a key. A ustar header allows 100 bytes, including the extension."""
SAFE_KEY = re.compile(r"[\w+=@,()~-]{1,90}", re.ASCII)
SAFE_KEYS = re.compile(rf"(?:{SAFE_KEY.pattern}\n)*", re.ASCII)


class Sample(NamedTuple):
    """An image in a source: `size` bytes at `offset` in `file`, named `name`."""

    key: str
    label: int
    name: str
    file: str
    offset: int
    size: int


# ---- keys ----------------------------------------------------------------------------------------


def stable_hash(*parts: Any) -> bytes:
    """Return 8 bytes that depend only on the text of `parts`, not on the process or library."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=8).digest()


def safe_key(text: str) -> str:
    """Return `text` as a key, with dots (which end webdataset's keys), slashes and spaces replaced.

    Text longer than 90 bytes is truncated and ends in a hash of the whole text.
    """
    clean = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    key = re.sub(r"[./\\\s\x00-\x1f]", "_", clean)
    encoded = key.encode()
    if len(encoded) > MAX_KEY_BYTES:
        beginning = encoded[: MAX_KEY_BYTES - 17].decode(errors="ignore")
        key = f"{beginning}_{stable_hash(text).hex()}"
    return key


def key_hashes(keys: Sequence[str], *before: Any) -> np.ndarray:
    """Return `stable_hash(*before, key)` for each key, as big-endian (len(keys),) uint64."""
    blake2b = hashlib.blake2b
    start = "".join(f"{part}\0" for part in before)
    digests = [
        blake2b((start + key).encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for key in keys
    ]
    return np.frombuffer(b"".join(digests), ">u8").astype("<u8")


def spread(num_rows: int, num_chosen: int, *seed: Any) -> list[int]:
    """Return ascending row numbers, one from each of `num_chosen` ranges, selected by a hash.

    The ranges have almost the same size. Returns all rows if there are at most `num_chosen`.
    """
    if num_chosen >= num_rows:
        return list(range(num_rows))

    edges = [part * num_rows // num_chosen for part in range(num_chosen + 1)]
    chosen = []
    for part, (low, high) in enumerate(itertools.pairwise(edges)):
        chance = int.from_bytes(stable_hash("spread", *seed, part), "little")
        chosen.append(low + chance % (high - low))
    return chosen


# ---- the table -----------------------------------------------------------------------------------


class Table:
    """The samples of one split in catalog order. All arrays are memory-mapped."""

    def __init__(self, folder: Path, split: str, files: Sequence[str]):
        self.split = split
        self.files = files
        self.rows = _mapped(folder / f"{split}.rows.bin", ROW)
        self._text = _mapped(folder / f"{split}.text.bin", np.dtype(np.uint8))
        self._order_path = folder / f"{split}.order.npy"

    def __len__(self) -> int:
        return len(self.rows)

    def keys(self, rows: np.ndarray) -> list[str]:
        """Return the keys of the given rows."""
        places = self.rows[rows][["text", "text_size"]].tolist()
        return [self._text_at(start, size)[0] for start, size in places]

    def _text_at(self, start: int, size: int) -> tuple[str, str]:
        """Return the (key, name) stored in `size` bytes at `start` of the text file."""
        text = self._text[start : start + size].tobytes().decode("utf-8", "surrogateescape")
        key, _, name = text.partition("\0")
        return key, name

    def samples(self, places: Sequence[int] | np.ndarray) -> list[Sample]:
        """Return the samples at the given positions in catalog order, when the rows are sorted."""
        order = np.load(self._order_path, mmap_mode="r")
        rows = self.rows[order[np.asarray(places, np.int64)]]
        columns = ("label", "file", "offset", "size", "text", "text_size")

        samples = []
        for label, file, offset, size, start, length in zip(
            *(rows[name].tolist() for name in columns), strict=True
        ):
            key, name = self._text_at(start, length)
            samples.append(Sample(key, label, name, self.files[file], offset, size))
        return samples


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-map the records in a file, which may be empty."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


# ---- bytes ---------------------------------------------------------------------------------------


_descriptors: OrderedDict[str, int] = OrderedDict()


def descriptor(file: str) -> int:
    """Return a descriptor of `file`. It stays open until MAX_OPEN_FILES other files have been used.

    This function is not thread-safe.
    """
    if file in _descriptors:
        _descriptors.move_to_end(file)
    else:
        if len(_descriptors) == MAX_OPEN_FILES:
            os.close(_descriptors.popitem(last=False)[1])
        _descriptors[file] = os.open(file, os.O_RDONLY)
    return _descriptors[file]


def close_descriptors(folder: Path) -> None:
    """Close the descriptors of files below `folder`, to free their disk space."""
    for file in [file for file in _descriptors if Path(file).is_relative_to(folder)]:
        os.close(_descriptors.pop(file))


def read_range(sample: Sample) -> bytes:
    """Return the `size` bytes at `offset` in the sample's file. Raises OSError."""
    data = os.pread(descriptor(sample.file), sample.size, sample.offset)
    if len(data) != sample.size:
        raise OSError(
            errno.EIO,
            f"ends at byte {sample.offset + len(data)}, inside {sample.name}; it was complete when"
            " it was listed",
            sample.file,
        )
    return data
