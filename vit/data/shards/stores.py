"""Where the shards of a split are, and what reads them: in a folder, at a URL, through a cache.

Shards in a folder are read by `local_tars`. All others are read by `vit.data.storage`, which is
loaded only by a process that opens such shards: the names of its modules stand here, and so do the
classes that describe what they give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vit.system.by_name import load
from vit.system.redact import shown
from vit.system.retry import RetryPolicy

STORE = "vit.data.storage.remote:RemoteFolder"
CACHE = "vit.data.storage.block_cache:BlockCache"
CACHED_TARS = "vit.data.storage.cached_tars:open_cached"


class Version(NamedTuple):
    """Size of a file in bytes, -1 if unknown, and a tag that differs from version to version."""

    size: int
    tag: str

    def digest(self) -> str:
        """Return a short hash, for file names."""
        return hashlib.sha256(f"{self.size} {self.tag}".encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.size} bytes" + (f" with the tag {self.tag}" if self.tag else "")


class Store(Protocol):
    """The files of a data set at a URL (`vit.data.storage.remote`)."""

    @property
    def digest(self) -> str:
        """A short hash of the URL, for folder names."""

    def read_info(self) -> dict[str, Any]:
        """Return `_info.json`."""

    def fetch_index(self, split: str, cache: Any) -> Path:
        """Return the path of the index, which was copied into the folder of `cache`."""

    def stats(self, names: list[str]) -> list[Version | str]:
        """Return the version of each file, or the reason why it has none."""

    def stat(self, name: str, while_waiting: Callable[[], None] | None = None) -> Version:
        """Return the version of a file."""

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Return bytes [start, stop) of a file."""


class Cache(Protocol):
    """Blocks of shards on a disk of this host (`vit.data.storage.block_cache`)."""

    folder: Path
    limit_bytes: int


class Tars(Protocol):
    """Reads the shards of a split. Threads, forks and pickling as for `Split`."""

    @property
    def cached(self) -> CachedTars | None:
        """This object, if its shards are read through a cache."""

    @property
    def store(self) -> Store | None:
        """Where shards at a URL are; None: they are in a folder."""

    @property
    def read_ahead_batches(self) -> int:
        """As `Split.read_ahead_batches`."""

    def where(self, shard: int) -> str:
        """Return the shard's path or URL."""

    def prepare(self, num_processes: int) -> None:
        """As `Split.prepare`."""

    def prefetch(self, samples: NDArray[np.int64], index: Any, firsts: list[int]) -> None:
        """As `Split.prefetch`; index, firsts: rows, and the first sample of each shard."""

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset` of a shard, fewer at its end."""

    def forget(self, sample: int, shard: int, size: int, offset: int) -> None:
        """Have the next `pread` of these bytes ask the disk or server again."""

    def close(self) -> None:
        """Close what is open; the next read opens it again."""


class CachedTars(Tars, Protocol):
    """Shards behind a cache (`vit.data.storage.cached_tars`)."""

    folder: Any
    cache: Any
    versions: list[Version]
    block_samples: int
    """Samples in a block of the cache."""
    stored_bytes: int
    """Of all shards."""

    def wanted_bytes(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Return the bytes of all blocks of these samples, and of those that are not cached."""

    def process_bytes(self, num_processes: int) -> int:
        """Return the memory for fetching in each of `num_processes` processes of a host."""


def open_store(url: str, retry: RetryPolicy | None) -> Store:
    """Return the store at `url`."""
    store: Store = load(STORE, shown(url))(url, retry)
    return store


def open_cache(folder: Path | str | None, limit_gib: float | None, needed_for: str) -> Cache:
    """Return the cache in `folder`, see `BlockCache`. needed_for: root or cache_dir."""
    cache: Cache = load(CACHE, needed_for)(folder, limit_gib)
    return cache


def open_cached_tars(
    folder: Path | Store,
    filenames: list[str],
    versions: list[Version],
    index: np.ndarray,
    firsts: list[int],
    cache: Cache,
    retry: RetryPolicy | None,
) -> CachedTars:
    """Return what reads the shards in `folder` through `cache`."""
    opened: CachedTars = load(CACHED_TARS, str(folder))(
        folder, filenames, versions, index, firsts, cache, retry
    )
    return opened
