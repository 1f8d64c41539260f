"""Open a split at a URL or in a folder, with the cache and the retry limits of the caller.

Shards in a folder need neither a server's client nor a cache, so the modules for both are imported
only when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vit.data.shards import data_set
from vit.data.shards.reader import Store, Version
from vit.data.shards.split import Split
from vit.system.retry import RetryPolicy

if TYPE_CHECKING:
    from vit.data.storage.block_cache import BlockCache
    from vit.data.storage.cached_tars import CachedTars
    from vit.data.storage.remote import RemoteFolder


class RemoteStorage:
    """Opens the stores, the cache and the cached shards of one split. See `Storage`."""

    def __init__(
        self,
        cache_dir: Path | str | None = None,
        cache_gib: float | None = None,
        retry: RetryPolicy | None = None,
    ):
        """See `BlockCache` for cache_dir and cache_gib."""
        self.caches_folders = cache_dir is not None
        self._cache_dir = cache_dir
        self._cache_gib = cache_gib
        self._retry = retry
        self._cache: BlockCache

    def open_store(self, url: str) -> RemoteFolder:
        """See `Storage`."""
        from vit.data.storage.remote import RemoteFolder

        return RemoteFolder(url, self._retry)

    def open_cache(self) -> None:
        """See `Storage`."""
        from vit.data.storage.block_cache import BlockCache

        self._cache = BlockCache(self._cache_dir, self._cache_gib)

    def fetch_index(self, store: Store, split: str) -> Path:
        """See `Storage`."""
        return cast("RemoteFolder", store).fetch_index(split, self._cache)

    def open_tars(
        self,
        folder: Path | Store,
        filenames: list[str],
        versions: Sequence[Version],
        index: np.ndarray,
        firsts: list[int],
    ) -> CachedTars:
        """See `Storage`."""
        from vit.data.storage.cached_tars import CachedTars

        return CachedTars(
            folder,
            filenames,
            versions=list(versions),
            index=index,
            firsts=firsts,
            cache=self._cache,
            retry=self._retry,
        )


def open_split(
    root: Path | str,
    split: str,
    cache_dir: Path | str | None = None,
    cache_gib: float | None = None,
    retry: RetryPolicy | None = None,
    is_checked: bool = False,
    versions: Sequence[Sequence[Any]] | None = None,
) -> Split:
    """Open one split of the data set at `root`, a folder or a URL, without reading any image.

    `split` may be a slice such as `train[:99%]` (`vit.data.shards.split_slice`). If the index of a
    folder is missing or does not match the tars, it is rebuilt from all tars, with a warning.

    Args:
        cache_dir, cache_gib: See `BlockCache`. If cache_dir is None, shards in a folder are read in
            place.
        retry: The retry limits if the storage does not respond.
        is_checked, versions: See `vit.data.shards.data_set.open_split`.

    Raises ShardError with a list of all problems of the same kind: missing folder, `_info.json`,
    split or shards; wrong shard sizes; inconsistent lengths; labels outside [0, num_classes).
    """
    storage = RemoteStorage(cache_dir, cache_gib, retry)
    return data_set.open_split(root, split, storage, retry, is_checked, versions)
