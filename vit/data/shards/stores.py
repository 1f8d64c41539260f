"""The interfaces of the readers of shards in a folder, at a URL, or through a cache.

`local_tars` reads shards in a folder, and `vit.data.storage` reads all others. A process imports
`vit.data.storage` only if it opens such shards. This module therefore contains the names of its
modules and the protocols of its classes.
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
    """The size of a file in bytes (-1: unknown), and a tag that differs between versions."""

    size: int
    tag: str

    def digest(self) -> str:
        """Return a short hash for file names."""
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
        """Copy the index into the folder of `cache` and return its path."""

    def stats(self, names: list[str]) -> list[Version | str]:
        """Return the version of each file, or the reason why it is unknown."""

    def stat(self, name: str, while_waiting: Callable[[], None] | None = None) -> Version:
        """Return the version of a file."""

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Return bytes [start, stop) of a file."""


class Cache(Protocol):
    """A cache for blocks of shards on a disk of this host (`vit.data.storage.block_cache`)."""

    folder: Path
    limit_bytes: int


class Tars(Protocol):
    """A reader of the shards of a split. May be forked and pickled like `Split`."""

    @property
    def cached(self) -> CachedTars | None:
        """This object if it reads shards through a cache, else None."""

    @property
    def store(self) -> Store | None:
        """The store of shards at a URL; None for shards in a folder."""

    @property
    def read_ahead_batches(self) -> int:
        """See `Split.read_ahead_batches`."""

    def where(self, shard: int) -> str:
        """Return the path or URL of a shard."""

    def prepare(self, num_processes: int) -> None:
        """See `Split.prepare`."""

    def prefetch(self, samples: NDArray[np.int64], index: Any, firsts: list[int]) -> None:
        """See `Split.prefetch`. index, firsts: the rows, and the first sample of each shard."""

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset` of a shard, fewer at its end."""

    def forget(self, sample: int, shard: int, size: int, offset: int) -> None:
        """Drop these bytes from all caches, so that the next `pread` reads from disk or server."""

    def close(self) -> None:
        """Close all files; the next read opens them again."""


class CachedTars(Tars, Protocol):
    """A reader of shards through a cache (`vit.data.storage.cached_tars`)."""

    folder: Any
    cache: Any
    versions: list[Version]
    block_samples: int
    """The number of samples in a cache block."""
    stored_bytes: int
    """The size of all shards in bytes."""

    def wanted_bytes(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Return the bytes of all blocks that contain these samples, and of the uncached ones."""

    def process_bytes(self, num_processes: int) -> int:
        """Return the memory for fetching in each of `num_processes` processes of a host."""


def open_store(url: str, retry: RetryPolicy | None) -> Store:
    """Return the store at `url`."""
    store: Store = load(STORE, shown(url))(url, retry)
    return store


def open_cache(folder: Path | str | None, limit_gib: float | None, needed_for: str) -> Cache:
    """Return the cache in `folder`, see `BlockCache`. needed_for: name for error messages."""
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
    """Return a reader of the shards in `folder` that uses `cache`."""
    opened: CachedTars = load(CACHED_TARS, str(folder))(
        folder, filenames, versions, index, firsts, cache, retry
    )
    return opened
