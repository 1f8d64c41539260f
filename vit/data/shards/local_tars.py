"""Read the shards of a split in a folder, with positional reads from open files.

After a temporary error, such as an unreachable file server or a stale handle, the file is reopened
and the read is retried.
"""

import errno
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.data import stages
from vit.data.shards.tar_walk import TAR_BLOCK
from vit.data.stages import Stage
from vit.system.retry import RetryableError, RetryPolicy

NUM_OPENING = 16
"""The number of files to open concurrently."""
RETRYABLE_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EINTR,
    errno.ENOMEM,
    errno.ENOLCK,
    errno.EBUSY,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ESHUTDOWN,
    errno.ECONNREFUSED,
    errno.EPIPE,
}
"""The errors that NFS, Lustre and FUSE return for an unreachable server or a stale handle."""


class LocalTars:
    """The shards of a split in a folder. The object is thread-safe. File descriptors are not
    pickled."""

    cached = None
    store = None
    read_ahead_batches = 0
    """How many batches in advance to call `prefetch`: 0, because the kernel can read ahead while
    the first image is decoded."""

    def __init__(self, root: Path, filenames: list[str], retry: RetryPolicy | None = None):
        self.root = root
        self.filenames = filenames
        self.retry = retry or RetryPolicy()
        self._fds = dict[int, int]()
        weakref.finalize(self, _close, self._fds)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalTars, (self.root, self.filenames, self.retry)

    def where(self, shard: int) -> str:
        """Return the path of a shard."""
        return str(self.root / self.filenames[shard])

    def prepare(self, num_processes: int) -> None:
        """Open all shards, so that processes forked later share the descriptors."""
        self._open(range(len(self.filenames)))

    def prefetch(self, samples: NDArray[np.int64], index: np.ndarray, firsts: list[int]) -> None:
        """Ask the kernel to read these images and their tar headers in the background."""
        rows = index[samples]
        shards = (np.searchsorted(firsts, samples, side="right") - 1).tolist()
        self._open(sorted(set(shards)))  # `prepare` is not called if there are no workers

        places = zip(shards, rows["offset"].tolist(), rows["size"].tolist(), strict=True)
        for shard, offset, size in places:
            fd = self._fds.get(shard)
            if fd is not None:
                with suppress(OSError, AttributeError):  # not available on macOS
                    os.posix_fadvise(
                        fd, offset - TAR_BLOCK, size + TAR_BLOCK, os.POSIX_FADV_WILLNEED
                    )

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset` of a shard, or fewer at its end.

        sample: unused; `CachedTars.pread` has the same parameters.
        Raises OSError if the read fails, and ShardError if all retries failed.
        """
        data = self.read(shard, size, offset)
        stages.current.count(read_bytes=len(data))
        return data

    def read(self, shard: int, size: int, offset: int) -> bytes:
        """Read like `pread`, but do not count the bytes as sample data."""
        fd = self._fds.get(shard)
        if fd is not None:
            try:
                return os.pread(fd, size, offset)
            except OSError as error:
                if error.errno not in RETRYABLE_ERRNOS:
                    raise

        attempt = partial(self._open_and_read, shard, size, offset)
        return self.retry.call(self.where(shard), attempt, stages.current.beat)

    def forget(self, sample: int, shard: int, size: int, offset: int) -> None:
        """Drop these bytes from the page cache, so that the next `pread` reads them from the disk
        or server."""
        with suppress(OSError, AttributeError), open(self.where(shard), "rb") as file:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            num_bytes = offset + size - start + mmap.PAGESIZE
            os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        _close(self._fds)

    def _open(self, shards: Sequence[int]) -> None:
        """Open the shards that are not open yet, as far as the limit on open files allows."""
        missing = [shard for shard in shards if shard not in self._fds]
        missing = missing[: max(self._max_open() - len(self._fds), 0)]
        if not missing:
            return

        def open_shard(shard: int) -> None:
            with suppress(OSError):  # the read of the shard raises it again with context
                self._keep(shard, os.open(self.where(shard), os.O_RDONLY))

        # On a network file system, each open is a round trip, so use threads.
        with stages.current.within(Stage.READ), ThreadPoolExecutor(NUM_OPENING) as threads:
            list(threads.map(open_shard, missing))

    def _open_and_read(self, shard: int, size: int, offset: int) -> bytes:
        try:
            with open(self.where(shard), "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, offset)
                self._keep(shard, os.dup(file.fileno()))
        except OSError as error:
            if error.errno not in RETRYABLE_ERRNOS:
                raise
            raise RetryableError(f"reading failed: {error.strerror}") from error
        return data

    def _keep(self, shard: int, fd: int) -> None:
        if (old_fd := self._fds.get(shard)) is not None:
            # Another thread may be reading from the old descriptor, so keep the descriptor and
            # replace the file behind it.
            os.dup2(fd, old_fd, inheritable=False)
        elif len(self._fds) < self._max_open() and self._fds.setdefault(shard, fd) == fd:
            return
        os.close(fd)

    def _max_open(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _close(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])
