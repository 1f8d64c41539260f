"""The interfaces between a split and the storage of its shards.

    vit.data.shards.local_tars      reads shards in a folder                 TarReader
    vit.data.storage.cached_tars    reads shards through a cache             CachedReader
    vit.data.storage.remote         lists and reads the files at a URL       Store
    vit.data.storage.opening        opens the last two for `open_split`      Storage

`vit.data.shards` imports none of the others, so it works without a network and without a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Version(NamedTuple):
    """A file's size in bytes (-1 if unknown) and a tag that differs between versions."""

    size: int
    tag: str

    def digest(self) -> str:
        """Return a short hash for use in file names."""
        return hashlib.sha256(f"{self.size} {self.tag}".encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.size} bytes" + (f" with the tag {self.tag}" if self.tag else "")


class Store(Protocol):
    """The files of a data set at a URL. `str(store)` is the URL without credentials."""

    @property
    def digest(self) -> str:
        """A short hash of the URL, for folder names."""

    def read_info(self) -> dict[str, Any]:
        """Return the content of `_info.json`. Raises ShardError."""

    def stat(self, name: str) -> Version:
        """Return the version of a file. Raises FileNotFoundError and ShardError."""

    def stats(self, names: list[str]) -> list[Version | str]:
        """Return the version of each file, or the reason why the version is unknown."""

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Return bytes [start, stop) of a file.

        Raises OSError if the file was removed or replaced, and ShardError.
        """


class TarReader(Protocol):
    """The shards of a split. The object is thread-safe, and can be forked and pickled."""

    @property
    def read_ahead_batches(self) -> int:
        """How many batches in advance to call `prefetch`."""

    @property
    def cached(self) -> CachedReader | None:
        """The reader itself if it reads through a cache, else None."""

    @property
    def store(self) -> Store | None:
        """The store of shards at a URL, or None for shards in a folder."""

    def where(self, shard: int) -> str:
        """Return the path or URL of a shard."""

    def prepare(self, num_processes: int) -> None:
        """Prepare for `num_processes` reading processes on this host, which are started later."""

    def prefetch(self, samples: NDArray[np.int64], index: np.ndarray, firsts: list[int]) -> None:
        """Read these samples in the background. firsts: the first sample of each shard."""

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset` of a shard, within the image of `sample` or its tar
        header. Raises OSError and ShardError."""

    def forget(self, sample: int, shard: int, size: int, offset: int) -> None:
        """Drop these bytes from caches, so that the next `pread` reads them from the source."""

    def close(self) -> None:
        """Close all files. The next read opens them again."""


class Cache(Protocol):
    """A cache on a local disk."""

    folder: Path
    limit_bytes: int


class CachedReader(TarReader, Protocol):
    """A reader that fetches blocks of samples, and stores them in a cache."""

    versions: list[Version]
    block_samples: int
    """The number of samples in a block."""
    stored_bytes: int
    """The size of all shards in bytes."""

    @property
    def folder(self) -> object:
        """The source of the shards. `str(folder)` is its URL or path."""

    @property
    def cache(self) -> Cache:
        """The cache in which blocks are stored."""

    def process_bytes(self, num_processes: int) -> int:
        """Return the memory in bytes for fetching in each of `num_processes` processes on a
        host."""

    def wanted_bytes(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Return the size in bytes of all blocks that contain these samples, and the size of those
        not cached yet."""


class Storage(Protocol):
    """Opens shards at a URL, and shards that are read through a cache."""

    caches_folders: bool
    """Whether shards in a folder are read through a cache too."""

    def open_store(self, url: str) -> Store:
        """Return the files at `url`, without sending a request."""

    def open_cache(self) -> None:
        """Open the cache. Raises ShardError if its folder cannot be used."""

    def fetch_index(self, store: Store, split: str) -> Path:
        """Return the path of the index for `split` in the cache. Raises ShardError."""

    def open_tars(
        self,
        folder: Path | Store,
        filenames: list[str],
        versions: Sequence[Version],
        index: np.ndarray,
        firsts: list[int],
    ) -> TarReader:
        """Return a reader that reads the shards `filenames` through the cache.

        Args:
            folder: The folder or store that contains the shards.
            versions: The version of each shard.
            index: (num_samples,) INDEX_DTYPE.
            firsts: The first sample of each shard, followed by the number of samples.
        """
