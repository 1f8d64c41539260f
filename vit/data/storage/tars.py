"""Where the bytes of a split's shards come from: files in a folder, or a URL or mounted folder
through a cache on the local disk. Free of torch.

The data's story, with a cache: a block is some 8 MB of a shard, a whole number of consecutive
samples, so that what the order keeps together comes with one request. One process of a host fetches
it, `vit.data.storage.block_cache` keeps it, and samples are read from there. `prefetch` has threads
fetch what will be needed soon. A block whose tar headers do not fit the index is not kept: its
shard was replaced.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data import stages
from vit.data.order import DEFAULT_BLOCK_SAMPLES, PERMUTATION_BELOW
from vit.data.shards.index_file import has_checksums, open_index
from vit.data.shards.tar import TAR_BLOCK, crc32c, member_size
from vit.data.stages import Stage
from vit.data.storage.block_cache import BlockCache, Fetched, waits_for_lock
from vit.data.storage.http import Version
from vit.data.storage.remote import RemoteFolder
from vit.data.storage.retry import RetryableError, RetryPolicy
from vit.system.files import ShardError

BLOCK_BYTES = 8 << 20
"""Aimed at. A smaller block pays the network's latency more often; a larger one keeps the first
batch waiting."""
READ_AHEAD_BATCHES = 8
"""So many batches before it is needed a block is asked for. They and their windows' blocks have to
fit the cache."""
ASK_AGAIN_S = 60.0
"""For so long a process does not look whether a block for which it has asked is still there."""
MAX_ASKED = 4096
"""Blocks of which a process knows when it asked for them, before it forgets those of more than
`ASK_AGAIN_S` ago."""
BEAT_S = 1.0
"""While a block is awaited, how often it is looked whether the store was asked again."""
NUM_OPENING = 16
"""Files opened at once."""
RETRYABLE_ERRNOS = {
    *(
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EINTR,
        errno.ENOMEM,
        errno.ENOLCK,
        errno.EBUSY,
    ),
    *(
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    ),
    *(errno.ESHUTDOWN, errno.ECONNREFUSED, errno.EPIPE),
}
"""What NFS, Lustre and FUSE say while their server is away, or of a file handle from before."""
NUM_THREADS = 8
"""Requests under way at once in one process."""
FETCH_BYTES = 14 << 20
"""Memory that a request takes with its block and connection, measured."""
NUM_THREADS_OF_HOST = 64
"""In all loader processes of a host."""


class LocalTars:
    """The shards of a split in a folder: positional reads through file descriptors that stay open.

    What may pass, as a file server that is away or a handle that went stale, is tried again with
    the file opened anew.
    """

    read_ahead_batches = 0
    """A part's own images are enough: the disk has them while the first is decoded."""

    def __init__(self, root: Path, filenames: list[str], retry: RetryPolicy | None = None):
        self.root = root
        self.filenames = filenames
        self.retry = retry or RetryPolicy()
        self._fds = dict[int, int]()
        weakref.finalize(self, _close, self._fds)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalTars, (self.root, self.filenames, self.retry)

    def where(self, shard: int) -> str:
        """The shard's path."""
        return str(self.root / self.filenames[shard])

    def prepare(self, num_processes: int) -> None:
        """Open all shards, so that processes that are forked from now on share their
        descriptors."""
        missing = [shard for shard in range(len(self.filenames)) if shard not in self._fds]

        def open_(shard: int) -> None:
            with suppress(OSError):  # told by who reads it
                self._keep(shard, os.open(self.where(shard), os.O_RDONLY))

        # on a network file system each is a round trip
        with ThreadPoolExecutor(NUM_OPENING) as threads:
            list(threads.map(open_, missing[: self._num_kept()]))

    def prefetch(self, shards: list[int], offsets: list[int], sizes: list[int]) -> None:
        """Have the system read these images, all at once, with the tar headers in front of them."""
        for shard, offset, size in zip(shards, offsets, sizes, strict=True):
            if (fd := self._fds.get(shard)) is not None:
                with suppress(OSError):
                    os.posix_fadvise(
                        fd, offset - TAR_BLOCK, size + TAR_BLOCK, os.POSIX_FADV_WILLNEED
                    )

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """`size` bytes at `offset` of a shard, fewer at its end. `sample`, to which they belong, is
        for `CachedTars`.

        Raises OSError; ShardError if what may pass did not.
        """
        return _counted(self.read(shard, size, offset))

    def read(self, shard: int, size: int, offset: int) -> bytes:
        """As `pread`, for bytes that are not a sample's."""
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
        """Have the next `pread` of these bytes ask the disk, or the server of a network file
        system, as far as that can be had."""
        with suppress(OSError), open(self.root / self.filenames[shard], "rb") as file:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            if hasattr(os, "posix_fadvise"):  # macOS lacks it
                os.posix_fadvise(
                    file.fileno(),
                    start,
                    size + offset - start + mmap.PAGESIZE,
                    os.POSIX_FADV_DONTNEED,
                )

    def close(self) -> None:
        """Close the file descriptors; the next read opens them again."""
        _close(self._fds)

    def _open_and_read(self, shard: int, size: int, offset: int) -> bytes:
        try:
            fd = os.open(self.where(shard), os.O_RDONLY)
            try:
                data = os.pread(fd, size, offset)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            if error.errno not in RETRYABLE_ERRNOS:
                raise
            raise RetryableError(f"reading failed: {error.strerror}") from error
        self._keep(shard, fd)
        return data

    def _keep(self, shard: int, fd: int) -> None:
        """Leave `fd` open for the next reads, opening costs a round trip on a network file system;
        but leave half of the process's descriptors to others."""
        if (before := self._fds.get(shard)) is not None:
            # never taken away from a thread that may be reading
            os.dup2(fd, before, inheritable=False)
        elif len(self._fds) < self._num_kept() and self._fds.setdefault(shard, fd) == fd:
            return
        os.close(fd)

    def _num_kept(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _close(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


class MountedFolder:
    """A folder on a file system of other machines, of which blocks are kept here as those of a URL
    are."""

    def __init__(self, root: Path, filenames: list[str], retry: RetryPolicy | None = None):
        self._tars = LocalTars(root.absolute(), filenames, retry)

    def __str__(self) -> str:
        return str(self._tars.root)

    @property
    def digest(self) -> str:
        """For folder names."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop) of a file. Raises OSError if it is gone or of another version."""
        shard = self._tars.filenames.index(name)
        data = self._tars.read(shard, stop - start, start)
        status = os.stat(self._tars.where(shard))
        if Version(status.st_size, str(status.st_mtime_ns)) != version or len(data) != stop - start:
            raise OSError(errno.ESTALE, "it was replaced while it was in use")
        return data


def _counted(data: bytes) -> bytes:
    stages.current.count(read_bytes=len(data))
    return data


class CacheBlock(NamedTuple):
    """Samples [first, last) of one shard, and the bytes [start, stop) that hold them."""

    name: str
    shard: int
    first: int
    last: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """What is fetched of it."""
        return self.stop - self.start


def fetch_threads_per_process(num_processes: int) -> int:
    """That fetch blocks, in each of so many processes of a host."""
    return max(min(NUM_THREADS, NUM_THREADS_OF_HOST // max(num_processes, 1)), 1)


_PER_PROCESS_STATE = (
    "_lock",
    "_pid",
    "_num_threads",
    "_asked_at_s",
    "_under_way",
    "_waiting",
    "_num_waiting",
)


class CachedTars:
    """The shards of a split at a URL or in a mounted folder, through a cache. Threads, forks and
    pickles as `vit.data.shards.split.Split` says.

    A sample's bytes begin where the image before it ends: headers and other members in between come
    along.
    """

    read_ahead_batches = READ_AHEAD_BATCHES

    def __init__(
        self,
        folder: RemoteFolder | MountedFolder,
        filenames: list[str],
        versions: list[Version],
        index: np.ndarray,
        firsts: list[int],
        cache: BlockCache,
    ):
        """firsts: of each shard the first sample, and the number of all."""
        self.folder = folder
        self.filenames = filenames
        self.versions = versions
        self.index = index
        self.cache = cache
        self.firsts = firsts
        self.stored_bytes = sum(version.size for version in versions)
        # A power of two, so that the order's blocks of 64 are whole blocks here, or several.
        fitting = max(BLOCK_BYTES * len(index) // max(self.stored_bytes, 1), 1)
        most = DEFAULT_BLOCK_SAMPLES if len(index) >= PERMUTATION_BELOW else 1 << 30
        self.block_samples = min(1 << (fitting.bit_length() - 1), most)
        names = zip(filenames, versions, strict=True)
        self._names = [
            f"{folder.digest}/{name.removesuffix('.tar').replace('/', '%')}.{version.digest()}"
            for name, version in names
        ]
        self.most_threads = NUM_THREADS
        self._start_over()

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key not in _PER_PROCESS_STATE}
        return {
            **kept,
            "index": (
                Path(str(self.index.filename)) if isinstance(self.index, np.memmap) else self.index
            ),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.index, Path):
            self.index = open_index(self.index)
        self._start_over()

    def where(self, shard: int) -> str:
        """The shard's URL."""
        return f"{self.folder}/{self.filenames[shard]}"

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """`size` bytes at `offset` of a shard, which lie in front of `sample`'s image or in it.
        Raises ShardError or OSError."""
        whole = self._block(sample, shard)
        alone = self._alone(sample, shard)
        start, stop = alone.start, alone.stop
        for _ in range(3):  # more than once only where others need all of the cache
            for block in (whole, alone) if self.cache.refuses() else (whole,):
                data = self.cache.read(
                    *(
                        block.name,
                        block.num_bytes,
                        block.last - block.first,
                        sample - block.first,
                        start - block.start,
                        stop - block.start,
                    )
                )
                if data is not None:
                    break
            stages.current.count(cache_hits=data is not None, cache_misses=data is None)
            if data is None and (fetched := self._await(block)) is not None:
                data = fetched[start - block.start : stop - block.start]
            if data is not None:
                return _counted(data)[offset - start : offset - start + size]
        raise ShardError(
            f"{self.cache.folder}: blocks vanish as soon as they are there; give it more room with"
            " data.cache_gib"
        )

    def prepare(self, num_processes: int) -> None:
        """Of so many processes on this host each fetches by itself: together by few enough threads,
        each of which holds a block."""
        self.most_threads = fetch_threads_per_process(num_processes)

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """Have the blocks of these samples fetched in the background, if they can be kept. What
        fails shows when it is read."""
        if self.cache.refuses():
            return
        now_s = time.monotonic()
        shards = np.searchsorted(self.firsts, samples, side="right") - 1
        blocks, rows = np.unique(
            shards * (1 << 40) + samples // self.block_samples, return_index=True
        )
        if len(self._asked_at_s) > MAX_ASKED:
            for number in [
                number for number, at_s in self._asked_at_s.items() if now_s - at_s > ASK_AGAIN_S
            ]:
                del self._asked_at_s[number]
        for number, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            if now_s - self._asked_at_s.get(number, -math.inf) > ASK_AGAIN_S:
                self._asked_at_s[number] = now_s
                block = self._block(int(samples[row]), int(shards[row]))
                if not self.cache.holds(block.name):
                    self._request(block)

    def forget(self, sample: int, shard: int, size: int, offset: int) -> None:
        """Have the next `pread` of this sample fetch its block again."""
        for block in (self._block(sample, shard), self._alone(sample, shard)):
            (self.cache.folder / block.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _await(self, block: CacheBlock) -> bytes | None:
        """What `_request` will have given; meanwhile the row says what is waited for."""
        path = self.cache.folder / block.name
        asked = self._request(block, is_urgent=True)
        pause_s = 0.05
        with stages.current.within(Stage.STORE):
            while not asked.done():
                wait([asked], pause_s)
                pause_s = BEAT_S
                stages.current.count_retries()
                if (
                    stage := Stage.LOCK if waits_for_lock(path) else Stage.STORE
                ) != stages.current.stage:
                    stages.current.enter(stage)
            return asked.result()

    def _start(self, sample: int, shard: int) -> int:
        return 0 if sample == self.firsts[shard] else self._stop(sample - 1)

    def _stop(self, sample: int) -> int:
        row = self.index[sample]
        return int(row["offset"]) + int(row["size"])

    def _block(self, sample: int, shard: int) -> CacheBlock:
        number = sample // self.block_samples
        first = max(number * self.block_samples, self.firsts[shard])
        last = min((number + 1) * self.block_samples, self.firsts[shard + 1])
        return CacheBlock(
            f"{self._names[shard]}.{first}-{last}.block",
            shard,
            first,
            last,
            self._start(first, shard),
            self._stop(last - 1),
        )

    def _alone(self, sample: int, shard: int) -> CacheBlock:
        """A block of one sample, for a cache in which whole ones find no room."""
        name = f"{self._names[shard]}.{sample}-{sample + 1}.block"
        return CacheBlock(
            name, shard, sample, sample + 1, self._start(sample, shard), self._stop(sample)
        )

    def blocks(self, shards: Iterable[int]) -> list[CacheBlock]:
        """All blocks of these shards, in order."""
        found = []
        for shard in shards:
            sample = self.firsts[shard]
            while sample < self.firsts[shard + 1]:
                found.append(self._block(sample, shard))
                sample = found[-1].last
        return found

    def wanted_bytes(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Of all blocks that these samples lie in, and of those of them that are not in the
        cache."""
        shards = np.searchsorted(self.firsts, samples, side="right") - 1
        found = {
            self._block(sample, shard)
            for sample, shard in zip(samples.tolist(), shards.tolist(), strict=True)
        }
        return sum(b.num_bytes for b in found), sum(
            b.num_bytes for b in found if not self.cache.holds(b.name)
        )

    def get(self, block: CacheBlock) -> Fetched:
        """Fetch a block; one whose tar headers do not say the index's sizes, or whose images have
        other checksums, is not to be kept."""
        data = self.folder.read(
            self.filenames[block.shard], block.start, block.stop, self.versions[block.shard]
        )
        with self._lock:
            stages.current.count(fetched_bytes=len(data))
        rows = self.index[block.first : block.last]
        offsets = (rows["offset"].astype(np.int64) - block.start).tolist()
        sizes = rows["size"].tolist()
        sound = all(
            member_size(data[at - TAR_BLOCK : at]) == size
            for at, size in zip(offsets, sizes, strict=True)
        )
        if has_checksums(rows):
            known = rows["crc32c"].tolist()
            sound = sound and all(
                expected in (0, crc32c(data[at : at + size]))
                for at, size, expected in zip(offsets, sizes, known, strict=True)
            )
        return Fetched(
            data, [at + size for at, size in zip(offsets, sizes, strict=True)] if sound else None
        )

    # ---- threads that fetch ----

    def _start_over(self) -> None:
        """In a new process: threads, and who held the lock, stayed in the old one."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._num_threads = 0
        self._asked_at_s: dict[int, float] = {}
        self._under_way: dict[str, Future[bytes | None]] = {}
        self._waiting: OrderedDict[str, tuple[Future[bytes | None], CacheBlock]] = OrderedDict()
        self._num_waiting = threading.Semaphore(0)

    def _request(self, block: CacheBlock, is_urgent: bool = False) -> Future[bytes | None]:
        """The block's bytes when it will have been fetched, None where another process was first.
        First asked, first served; before them who `is_urgent`, as a sample of it is read now."""
        if self._pid != os.getpid():
            self._start_over()
        with self._lock:
            future = self._under_way.get(block.name)
            if future is None:
                future = self._under_way[block.name] = Future()
                self._waiting[block.name] = future, block
                self._num_waiting.release()
                if self._num_threads < min(self.most_threads, len(self._under_way)):
                    self._num_threads += 1
                    # a daemon: no exit waits for a slow server
                    threading.Thread(target=self._serve, daemon=True).start()
            if is_urgent and block.name in self._waiting:
                self._waiting.move_to_end(block.name, last=False)
            return future

    def _serve(self) -> None:
        while True:
            self._num_waiting.acquire()
            with self._lock:
                _, (future, block) = self._waiting.popitem(last=False)
            try:
                future.set_result(self.cache.fetch(block.name, partial(self.get, block)))
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                del self._under_way[block.name]
            del future  # and with it the block's bytes, before the next is waited for
