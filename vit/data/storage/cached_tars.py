"""Read shards at a URL or in a mounted folder through a cache on the local disk.

A block contains consecutive samples of a shard, about 8 MB, so that samples that are close in the
training order need only one request. One process per host fetches a block and stores it with
`vit.data.storage.block_cache`, and all processes read from the cache. `prefetch` starts threads
that fetch blocks in advance. A block is not stored if its tar headers or checksums do not match the
index, which means that the shard was replaced or damaged in transit.
"""

import errno
import hashlib
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from vit.config.base import DEFAULT_BLOCK_SAMPLES, PERMUTATION_BELOW
from vit.data import stages
from vit.data.shards.index_file import open_index, unmapped
from vit.data.shards.local_tars import LocalTars
from vit.data.shards.reader import Store, Version
from vit.data.shards.tar import TAR_BLOCK, crc32c, member_size
from vit.data.stages import Stage
from vit.data.storage.block_cache import BlockCache, Fetched
from vit.data.storage.file_lock import is_waited_for
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy

BLOCK_BYTES = 8 << 20
"""The target size of a block in bytes. Smaller blocks need more requests and add network latency.
Larger blocks delay the first batch."""

READ_AHEAD_BATCHES = 8
"""Blocks are requested this many batches before they are needed. The cache must hold these batches
and their shuffle windows."""
ASK_AGAIN_S = 60.0
"""The time in seconds after a request before a process checks again whether the block is cached."""
MAX_REQUESTED = 4096
"""The maximum number of requested blocks that a process remembers. A full record is cleared."""

BEAT_S = 1.0
"""The interval in seconds at which a process that waits for a block updates its status in
`vit.data.stages`."""

NUM_THREADS = 8
"""The maximum number of concurrent requests per process."""
NUM_THREADS_OF_HOST = 64
"""The maximum number of concurrent requests from all loader processes on a host."""
FETCH_BYTES = 14 << 20
"""The measured memory per request in bytes, including its block and connection."""


class MountedFolder:
    """A folder on a network file system. Its blocks are cached like those from a URL."""

    def __init__(self, root: Path, filenames: list[str], retry: RetryPolicy | None = None):
        self._tars = LocalTars(root.absolute(), filenames, retry)

    def __str__(self) -> str:
        return str(self._tars.root)

    @property
    def digest(self) -> str:
        """A short hash of the path, for folder names."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Return bytes [start, stop) of a file. Raises OSError if the file was removed or
        replaced."""
        shard = self._tars.filenames.index(name)
        data = self._tars.read(shard, stop - start, start)
        status = os.stat(self._tars.where(shard))
        if Version(status.st_size, str(status.st_mtime_ns)) != version or len(data) != stop - start:
            raise OSError(errno.ESTALE, "the file was replaced while in use")
        return data


class CacheBlock(NamedTuple):
    """Samples [first, last) of a shard, stored at bytes [start, stop)."""

    name: str
    shard: int
    first: int
    last: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """The size of the block in bytes."""
        return self.stop - self.start


def fetch_threads_per_process(num_processes: int) -> int:
    """Return the number of fetch threads in each of `num_processes` processes on a host."""
    return max(min(NUM_THREADS, NUM_THREADS_OF_HOST // max(num_processes, 1)), 1)


class CachedTars:
    """The shards of a split, read through a cache. The object can be forked and pickled.

    The bytes of a sample begin at the end of the previous image, so they include the tar header and
    other members before the image.
    """

    read_ahead_batches = READ_AHEAD_BATCHES

    def __init__(
        self,
        folder: Store | MountedFolder | Path,
        filenames: list[str],
        versions: list[Version],
        index: np.ndarray | Path,
        firsts: list[int],
        cache: BlockCache,
        retry: RetryPolicy | None = None,
    ):
        """Open the index, and plan the blocks of each shard.

        Args:
            folder: A store, or the path of a mounted folder.
            index: The rows of the index, or the path of its file.
            firsts: The first sample of each shard, followed by the number of samples.
            retry: The retry limits for a mounted folder.
        """
        self.folder: Store | MountedFolder = (
            MountedFolder(folder, filenames, retry) if isinstance(folder, Path) else folder
        )
        self.filenames = filenames
        self.versions = versions
        self.index = open_index(index) if isinstance(index, Path) else index
        self.cache = cache
        self.firsts = firsts
        self.stored_bytes = sum(version.size for version in versions)

        # Use a power of two, so that a block of 64 samples in the order consists of one or more
        # whole cache blocks.
        fitting = max(BLOCK_BYTES * len(self.index) // max(self.stored_bytes, 1), 1)
        most = DEFAULT_BLOCK_SAMPLES if len(self.index) >= PERMUTATION_BELOW else 1 << 30
        self.block_samples = min(1 << (fitting.bit_length() - 1), most)

        self._names = [
            f"{self.folder.digest}/{name.removesuffix('.tar').replace('/', '%')}.{version.digest()}"
            for name, version in zip(filenames, versions, strict=True)
        ]
        self.most_threads = NUM_THREADS
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (
            self.folder,
            self.filenames,
            self.versions,
            unmapped(self.index),
            self.firsts,
            self.cache,
        )
        return CachedTars, arguments, {"most_threads": self.most_threads}

    @property
    def cached(self) -> Self:
        """Return this object, because it reads through a cache."""
        return self

    @property
    def store(self) -> Store | None:
        """The store of shards at a URL, or None for shards in a mounted folder."""
        return None if isinstance(self.folder, MountedFolder) else self.folder

    def where(self, shard: int) -> str:
        """Return the URL or path of a shard."""
        return f"{self.folder}/{self.filenames[shard]}"

    # ---- reading ----

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset` of a shard, within the image of `sample` or its tar
        header.

        Raises ShardError or OSError.
        """
        start, stop = self._start(sample, shard), self._stop(sample)

        # Retry, because other processes may fill the cache, which removes the block before this
        # process has read it.
        for _ in range(3):
            block = self._block(sample, shard)
            data = self._read_cached(block, sample, start, stop)
            if data is None and self.cache.refuses():
                # The cache cannot store a block of the usual size, so fetch only this sample.
                block = self._make_block(shard, sample, sample + 1)
                data = self._read_cached(block, sample, start, stop)
            stages.current.count(cache_hits=data is not None, cache_misses=data is None)

            if data is None:
                fetched = self._fetch(block)
                if fetched is not None:
                    data = fetched[start - block.start : stop - block.start]
            if data is not None:
                stages.current.count(read_bytes=len(data))
                return data[offset - start : offset - start + size]

        raise ShardError(
            f"{self.cache.folder}: other processes remove blocks before they are read; enlarge the"
            " cache with loader.cache_gib"
        )

    def forget(self, sample: int, shard: int, size: int, offset: int) -> None:
        """Remove the cached blocks of `sample`, so that the next `pread` fetches them again."""
        for block in (self._block(sample, shard), self._make_block(shard, sample, sample + 1)):
            (self.cache.folder / block.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing, because each read closes its file."""

    def _read_cached(self, block: CacheBlock, sample: int, start: int, stop: int) -> bytes | None:
        return self.cache.read(
            block.name,
            block_bytes=block.num_bytes,
            num_parts=block.last - block.first,
            part=sample - block.first,
            start=start - block.start,
            stop=stop - block.start,
        )

    def _fetch(self, block: CacheBlock) -> bytes | None:
        """Wait for a block, and write the reason for the wait to the status of this process."""
        path = self.cache.folder / block.name
        future = self._request(block, is_urgent=True)
        timeout_s = 0.05
        with stages.current.within(Stage.STORE):
            while not future.done():
                wait([future], timeout_s)
                timeout_s = BEAT_S
                stages.current.count_retries()
                stage = Stage.LOCK if is_waited_for(path) else Stage.STORE
                if stage != stages.current.stage:
                    stages.current.enter(stage)
            return future.result()

    # ---- reading ahead ----

    def prepare(self, num_processes: int) -> None:
        """Limit the number of threads in this process, one of `num_processes` on this host.

        Each thread holds a block in memory.
        """
        self.most_threads = fetch_threads_per_process(num_processes)

    def process_bytes(self, num_processes: int) -> int:
        """Return the memory in bytes for fetching in each of `num_processes` processes on a
        host."""
        return fetch_threads_per_process(num_processes) * FETCH_BYTES

    def prefetch(self, samples: NDArray[np.int64], index: np.ndarray, firsts: list[int]) -> None:
        """Fetch the blocks of these samples in the background, if the cache can store them.

        index, firsts: unused. Errors are raised when the sample is read.
        """
        if self.cache.refuses():
            return

        now_s = time.monotonic()
        shards = self._shards_of(samples)
        # A block never spans two shards, so combine shard and block into one number.
        numbers, rows = np.unique(
            shards * (1 << 40) + samples // self.block_samples, return_index=True
        )

        if len(self._requested_at_s) > MAX_REQUESTED:
            self._requested_at_s.clear()
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            if now_s - self._requested_at_s.get(number, -math.inf) > ASK_AGAIN_S:
                self._requested_at_s[number] = now_s
                block = self._block(int(samples[row]), int(shards[row]))
                if not self.cache.holds(block.name):
                    self._request(block)

    # ---- blocks ----

    def blocks(self, shards: Iterable[int]) -> Iterator[CacheBlock]:
        """Yield all blocks of these shards in order."""
        for shard in shards:
            sample = self.firsts[shard]
            while sample < self.firsts[shard + 1]:
                block = self._block(sample, shard)
                yield block
                sample = block.last

    def wanted_bytes(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Return the size in bytes of all blocks that contain these samples, and the size of those
        not cached yet."""
        pairs = zip(samples.tolist(), self._shards_of(samples).tolist(), strict=True)
        blocks = {self._block(sample, shard) for sample, shard in pairs}
        missing = [block.num_bytes for block in blocks if not self.cache.holds(block.name)]
        return sum(block.num_bytes for block in blocks), sum(missing)

    def _shards_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.firsts, samples, side="right") - 1

    def _start(self, sample: int, shard: int) -> int:
        return 0 if sample == self.firsts[shard] else self._stop(sample - 1)

    def _stop(self, sample: int) -> int:
        row = self.index[sample]
        return int(row["offset"]) + int(row["size"])

    def _block(self, sample: int, shard: int) -> CacheBlock:
        first = sample // self.block_samples * self.block_samples
        return self._make_block(
            shard,
            max(first, self.firsts[shard]),
            min(first + self.block_samples, self.firsts[shard + 1]),
        )

    def _make_block(self, shard: int, first: int, last: int) -> CacheBlock:
        return CacheBlock(
            name=f"{self._names[shard]}.{first}-{last}.block",
            shard=shard,
            first=first,
            last=last,
            start=self._start(first, shard),
            stop=self._stop(last - 1),
        )

    # ---- fetching ----

    def get(self, block: CacheBlock) -> Fetched:
        """Fetch a block and verify its headers and checksums. After a mismatch, it is not
        stored."""
        data = self.folder.read(
            self.filenames[block.shard], block.start, block.stop, self.versions[block.shard]
        )
        with self._lock:
            stages.current.count(fetched_bytes=len(data))

        rows = self.index[block.first : block.last]
        starts = (rows["offset"].astype(np.int64) - block.start).tolist()
        sizes, checksums = rows["size"].tolist(), rows["crc32c"].tolist()

        ends = []
        for start, size, checksum in zip(starts, sizes, checksums, strict=True):
            is_indexed = member_size(data[start - TAR_BLOCK : start]) == size
            is_damaged = checksum > 0 and crc32c(data[start : start + size]) != checksum
            if not is_indexed or is_damaged:
                return Fetched(data, None)
            ends.append(start + size)
        return Fetched(data, ends)

    def _reset(self) -> None:
        """Reset the state that threads share. A forked process inherits neither threads nor
        locks."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._num_threads = 0
        self._requested_at_s: dict[int, float] = {}
        self._under_way: dict[str, Future[bytes | None]] = {}
        self._waiting: OrderedDict[str, tuple[Future[bytes | None], CacheBlock]] = OrderedDict()
        self._num_waiting = threading.Semaphore(0)

    def _request(self, block: CacheBlock, is_urgent: bool = False) -> Future[bytes | None]:
        """Return a future for the block's bytes, or for None if another process has fetched it.

        Requests are served in order, but urgent blocks, which are being read, are served first.
        """
        if self._pid != os.getpid():
            self._reset()

        with self._lock:
            future = self._under_way.get(block.name)
            if future is None:
                future = self._under_way[block.name] = Future()
                self._waiting[block.name] = future, block
                self._num_waiting.release()
                if self._num_threads < min(self.most_threads, len(self._under_way)):
                    self._num_threads += 1
                    # Use daemon threads, so that the process can exit without waiting for a slow
                    # server.
                    threading.Thread(target=self._serve, daemon=True).start()

            if is_urgent and block.name in self._waiting:
                self._waiting.move_to_end(block.name, last=False)
            return future

    def _serve(self) -> None:
        """Fetch the waiting blocks, one after another. Each thread runs this function."""
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
            del future  # release the block before waiting for the next one
