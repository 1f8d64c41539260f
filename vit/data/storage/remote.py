"""Read the shards, the index and `_info.json` of a data set at a URL.

`vit.data.storage.http` reads files on the web, and `vit.data.storage.object_store` reads all
others. Both retry after temporary errors. The first response for a file contains its version (size,
ETag), and later responses must have the same version.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from shlex import quote
from typing import Any

from vit.data.shards.reader import Version
from vit.data.storage.block_cache import BlockCache, ends_with_checksum, with_checksum
from vit.data.storage.file_lock import locked_part, write_all
from vit.data.storage.http import Refused, WebFolder
from vit.data.storage.http_request import NUM_CONNECTIONS
from vit.data.storage.object_store import ObjectStore
from vit.system.files import ShardError, parse_json, temporary_file
from vit.system.retry import RetryPolicy
from vit.system.urls import bare, on_the_web

PIECE_BYTES = 8 << 20
"""The number of bytes per request when fetching an entire file, such as a large index."""
SIGNAL_S = 0.5
"""The time after which a wait for requests handles a signal."""
log = logging.getLogger(__name__)


class RemoteFolder:
    """The files directly below `<url>/`."""

    def __init__(self, url: str, retry: RetryPolicy | None = None):
        self._server = (WebFolder if on_the_web(url) else ObjectStore)(url, retry)

    def __str__(self) -> str:
        return str(self._server)

    @property
    def digest(self) -> str:
        """A short hash of the URL, for folder names."""
        return hashlib.sha256(bare(self._server.url).encode()).hexdigest()[:16]

    def read_info(self) -> dict[str, Any]:
        """Return `_info.json`. If it is missing, raise ShardError with the command that creates
        it."""
        try:
            pieces = self._pieces("_info.json", self.stat("_info.json"))
        except FileNotFoundError:
            raise self._not_indexed("no _info.json") from None
        return parse_json(b"".join(pieces), f"{self}/_info.json")

    def fetch_index(self, split: str, cache: BlockCache) -> Path:
        """Return the path of `<split>.index.npy` in the cache folder.

        One process per host fetches the file while the others wait. The file ends with a checksum,
        which numpy ignores. A file that was damaged by a power failure is fetched again. Raises
        ShardError.
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
            self._write_with_checksum(path, name, version)
        except OSError as error:
            raise ShardError(
                f"{path}: cannot be written ({error.strerror}); free some space, or choose another"
                " loader.cache_dir"
            ) from error

        return path

    def _write_with_checksum(self, path: Path, name: str, version: Version) -> None:
        """Fetch a file to `path`, unless another process does so first. Raises OSError."""
        with ExitStack() as stack:
            try:
                part = stack.enter_context(locked_part(path, ends_with_checksum))
            except TimeoutError as error:
                log.warning(
                    "%s: %s, and does not grow; this process fetches the index itself",
                    path.parent,
                    error.strerror,
                )
                # Either process may finish first, because both write the same bytes.
                temporary = stack.enter_context(temporary_file(path)).name
                part = stack.enter_context(FileIO(temporary, "r+"))

            if part is not None:
                if path.exists():
                    log.warning("%s is damaged and is fetched again", path)
                write_all(part, with_checksum(self._pieces(name, version)))
                os.replace(part.name, path)

    def stats(self, names: list[str]) -> list[Version | str]:
        """Return the version of each file, or the reason why the version is unknown."""
        try:
            listed = self._server.list()
        except (FileNotFoundError, Refused):  # listing may be forbidden
            listed = {}
        stopped = threading.Event()

        def raise_if_stopped() -> None:
            if stopped.is_set():
                raise CancelledError

        def version(name: str) -> Version | str:
            try:
                return listed.get(name) or self.stat(name, raise_if_stopped)
            except FileNotFoundError:
                return "no such file"

        threads = ThreadPoolExecutor(NUM_CONNECTIONS)
        try:
            futures = [threads.submit(version, name) for name in names]
            pending = set(futures)
            while pending:
                # The system may deliver a signal to another thread, or just before this thread
                # waits. Without a time limit, the wait would then outlast the signal.
                done, pending = wait(pending, SIGNAL_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
            return [future.result() for future in futures]
        finally:
            # After an error or a signal, do not wait for threads that are pausing before a retry.
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)

    def stat(self, name: str, while_waiting: Callable[[], None] | None = None) -> Version:
        """Return the version of a file. Raises FileNotFoundError and ShardError.

        while_waiting: see `RetryPolicy.call`.
        """
        return self._server.stat(name, while_waiting)

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Return bytes [start, stop) of a file.

        Raises OSError if the file was removed or replaced, and ShardError.
        """
        return self._server.read(name, start, stop, version)

    def fetch(self, name: str, version: Version, path: Path) -> None:
        """Copy a file to `path`. Raises ShardError."""
        with open(path, "wb") as file:
            file.writelines(self._pieces(name, version))

    def _pieces(self, name: str, version: Version) -> Iterator[bytes]:
        for start in range(0, version.size, PIECE_BYTES):
            try:
                yield self.read(name, start, min(start + PIECE_BYTES, version.size), version)
            except OSError as error:
                raise ShardError(
                    f"{self}/{name}: reading failed: {error.strerror}; start again"
                ) from error

    def _not_indexed(self, problem: str) -> ShardError:
        is_web = isinstance(self._server, WebFolder)
        shards = quote(f"{self}/train-{{0000..0099}}.tar" if is_web else str(self))
        return ShardError(
            f"{self}: {problem} at this URL; run `python -m data_prep.index {shards} --out ROOT`"
            " to write an index to a folder, and set data.root=ROOT to read the shards from this"
            " URL"
        )
