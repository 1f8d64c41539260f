"""Open shards at a URL, or shards that are read through a cache.

`local_tars` reads shards in a folder, and `vit.data.storage` reads all others. The classes are
imported by name, so a process loads `vit.data.storage` only if it needs this package. `CachedTars`
has the same interface as `LocalTars`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from vit.system.by_name import load
from vit.system.redact import shown
from vit.system.retry import RetryPolicy


class Version(NamedTuple):
    """A file's size in bytes (-1 if unknown) and a tag that differs between versions."""

    size: int
    tag: str

    def digest(self) -> str:
        """Return a short hash for use in file names."""
        return hashlib.sha256(f"{self.size} {self.tag}".encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.size} bytes" + (f" with the tag {self.tag}" if self.tag else "")


def open_store(url: str, retry: RetryPolicy | None) -> Any:
    """Return a `RemoteFolder` for `url`."""
    return load("vit.data.storage.remote:RemoteFolder", shown(url))(url, retry)


def open_cache(folder: Path | str | None, limit_gib: float | None, needed_for: str) -> Any:
    """Return a `BlockCache`. needed_for: name for error messages."""
    return load("vit.data.storage.block_cache:BlockCache", needed_for)(folder, limit_gib)


def open_cached_tars(folder: Any, filenames: list[str], **arguments: Any) -> Any:
    """Return a `CachedTars`, which reads the shards in `folder` through a cache."""
    cached_tars = load("vit.data.storage.cached_tars:CachedTars", str(folder))
    return cached_tars(folder, filenames, **arguments)
