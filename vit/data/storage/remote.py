"""The shards, index and `_info.json` of a data set at a URL. Free of torch.

The data's story: the first answer about a file tells its version (size, ETag); later answers must
be of that version. Files on the web are read by `vit.data.storage.http`, all others by
`vit.data.storage.object_store`; both try again what may pass.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

from vit.data.storage.block_cache import BlockCache, ends_with_checksum, with_checksum
from vit.data.storage.file_lock import locked_part, write_all
from vit.data.storage.http import NUM_CONNECTIONS, Refused, Version, WebFolder, on_the_web
from vit.data.storage.object_store import ObjectStore
from vit.data.storage.retry import RetryPolicy
from vit.system.files import ShardError, parse_json, temporary_file
from vit.system.urls import bare

PIECE_BYTES = 8 << 20
"""Of a whole file, which may be a large index, a request."""
log = logging.getLogger(__name__)


def local_path(root: str | Path) -> Path | None:
    """The folder that `root` names, None for a URL of another kind than file://."""
    scheme, is_url, path = str(root).partition("://")
    if not is_url:
        return Path(root)
    return Path(path) if scheme in ("file", "local") else None


class RemoteFolder:
    """The files directly at `<url>/`."""

    def __init__(self, url: str, retry: RetryPolicy | None = None):
        self._server = (WebFolder if on_the_web(url) else ObjectStore)(url, retry)

    def __str__(self) -> str:
        return str(self._server)

    @property
    def digest(self) -> str:
        """For folder names."""
        return hashlib.sha256(bare(self._server.url).encode()).hexdigest()[:16]

    def read_info(self) -> dict[str, Any]:
        """`_info.json`. Raises ShardError if there is none, with the command that makes it."""
        try:
            pieces = self._whole("_info.json", self.stat("_info.json"))
        except FileNotFoundError:
            raise self._not_indexed("no _info.json") from None
        return parse_json(b"".join(pieces), f"{self}/_info.json")

    def fetch_index(self, split: str, cache: BlockCache) -> Path:
        """`<split>.index.npy` in the cache's folder: fetched by the first process of this host,
        awaited by the others.

        It ends with a checksum, which numpy passes over: one that a power cut has spoilt is fetched
        again.
        """
        name = f"{split}.index.npy"
        try:
            version = self.stat(name)
        except FileNotFoundError:
            raise self._not_indexed(f"no {name}") from None
        if version.size == 0:
            raise self._not_indexed(f"an empty {name}")
        path = cache.folder / self.digest / f"{split}.index.{version.digest()}.npy"
        try:
            with ExitStack() as stack:
                try:
                    part = stack.enter_context(locked_part(path, ends_with_checksum))
                except TimeoutError as error:  # its bytes are the same, whoever is the first
                    log.warning(
                        "%s: %s, and it does not grow; the index is fetched once more",
                        path.parent,
                        error.strerror,
                    )
                    part = stack.enter_context(
                        FileIO(stack.enter_context(temporary_file(path)).name, "r+")
                    )
                if part is not None:
                    if path.exists():
                        log.warning("%s: damaged; it is fetched again", path)
                    write_all(part, with_checksum(self._whole(name, version)))
                    os.replace(part.name, path)
        except OSError as error:
            raise ShardError(
                f"{path}: cannot be written ({error.strerror}); make room, or choose another"
                " data.cache_dir"
            ) from error
        return path

    def stats(self, names: list[str]) -> list[Version | str]:
        """The version of each file; a text says why one has none."""
        try:
            known = self._server.list()
        except (FileNotFoundError, Refused):  # one may read and not list
            known = {}

        stopped = threading.Event()

        def go_on() -> None:
            if stopped.is_set():
                raise CancelledError

        def version(name: str) -> Version | str:
            try:
                return known.get(name) or self.stat(name, go_on)
            except FileNotFoundError:
                return "no such file"

        threads = ThreadPoolExecutor(NUM_CONNECTIONS)
        try:
            return list(threads.map(version, names))
        finally:
            # an error or a signal: who waits for the server to come back ends, and nobody waits for
            # them
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)

    def stat(self, name: str, while_waiting: Callable[[], None] | None = None) -> Version:
        """The version of a file. Raises FileNotFoundError, ShardError. while_waiting: see
        `RetryPolicy.call`."""
        return self._server.stat(name, while_waiting)

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop) of a file. Raises OSError if it is gone or of another version,
        ShardError."""
        return self._server.read(name, start, stop, version)

    def fetch(self, name: str, version: Version, path: Path) -> None:
        """Copy a file to `path`. Raises ShardError."""
        with open(path, "wb") as file:
            file.writelines(self._whole(name, version))

    def _whole(self, name: str, version: Version) -> Iterator[bytes]:
        """A file in pieces. Raises ShardError if it is of another version by now."""
        for start in range(0, version.size, PIECE_BYTES):
            try:
                yield self.read(name, start, min(start + PIECE_BYTES, version.size), version)
            except OSError as error:
                raise ShardError(
                    f"{self}/{name}: reading failed: {error.strerror}; start again"
                ) from error

    def _not_indexed(self, what: str) -> ShardError:
        shards = (
            f"'{self}/train-{{0000..0099}}.tar'"
            if isinstance(self._server, WebFolder)
            else str(self)
        )
        make = f"`python -m data_prep.index {shards} --out ROOT` makes the index in a folder"
        return ShardError(
            f"{self}: {what} there; {make}, and data.root=ROOT then reads the shards from this URL"
        )
