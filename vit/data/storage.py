"""Where the bytes of a split's shards come from: files in a folder, or a URL through a cache on the local disk. Free of torch.

The data's story, for a URL: a block is some 8 MB of a shard, a whole number of consecutive samples, so that what the order keeps together
comes with one range request. One process of a host fetches it, `vit.data.block_cache` keeps it, and samples are read from there. `prefetch`
has threads fetch what will be needed soon. A block whose tar headers do not fit the index is not kept: its shard was replaced.
"""

from __future__ import annotations

import math
import os
import queue
import resource
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.block_cache import BlockCache, Fetched
from vit.data.files import ShardError
from vit.data.order import DEFAULT_BLOCK_SAMPLES, PERMUTATION_BELOW
from vit.data.remote import RemoteFolder, Version
from vit.data.tar import TAR_BLOCK, size_said_by

BLOCK_BYTES = 8 << 20
"""Aimed at. A smaller block pays the network's latency more often; a larger one keeps the first batch waiting."""
READ_AHEAD_BATCHES = 8
"""So many batches before it is needed a block is asked for. They and their windows' blocks have to fit the cache."""
ASK_AGAIN_S = 60.0
"""For so long a process does not look whether a block for which it has asked is still there."""
NUM_THREADS = 8
"""Requests under way at once in one process; each holds a block in memory."""


class LocalTars:
    """The shards of a split in a folder: positional reads through file descriptors that stay open."""

    read_ahead_batches = 0
    """The system reads ahead."""

    def __init__(self, root: Path, filenames: list[str]):
        self.root, self.filenames = root, filenames
        self._fds: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fds": {}}

    def where(self, shard: int) -> str:
        """The shard's path."""
        return str(self.root / self.filenames[shard])

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """`size` bytes at `offset` of a shard, fewer at its end. `sample`, to which they belong, is for `RemoteTars`."""
        fd = self._fds.get(shard)
        if fd is not None:
            return os.pread(fd, size, offset)
        fd = os.open(self.root / self.filenames[shard], os.O_RDONLY)
        # Keep it open, opening costs a round trip on a network file system; but leave half of the process's
        # descriptors to others, and never take one away from a thread that may be reading.
        if len(self._fds) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 and self._fds.setdefault(shard, fd) == fd:
            return os.pread(fd, size, offset)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the file descriptors; the next read opens them again."""
        while self._fds:
            os.close(self._fds.popitem()[1])


class _Block(NamedTuple):
    """Samples [first, last) of one shard, and the bytes [start, stop) that hold them."""

    name: str
    shard: int
    first: int
    last: int
    start: int
    stop: int


_OF_A_PROCESS = ("_lock", "_pid", "_num_threads", "_asked_at_s", "_under_way", "_queue")


class RemoteTars:
    """The shards of a split at a URL, for `vit.data.shards.Split`. Threads, forks and pickles as told there.

    A sample's bytes begin where the image before it ends: headers and other members in between come along.
    """

    read_ahead_batches = READ_AHEAD_BATCHES

    def __init__(self, folder: RemoteFolder, filenames: list[str], versions: list[Version], index: np.ndarray, cache: BlockCache):
        self.folder, self.filenames, self.versions, self.index, self.cache = folder, filenames, versions, index, cache
        self.firsts = np.searchsorted(index["shard"], np.arange(len(filenames) + 1)).tolist()
        """Of each shard the first sample, and the number of all."""
        self.stored_bytes = sum(version.size for version in versions)
        # A power of two, so that the order's blocks of 64 are whole blocks here, or several.
        fitting = max(BLOCK_BYTES * len(index) // max(self.stored_bytes, 1), 1)
        most = DEFAULT_BLOCK_SAMPLES if len(index) >= PERMUTATION_BELOW else 1 << 30
        self.block_samples = min(1 << (fitting.bit_length() - 1), most)
        names = zip(filenames, versions, strict=True)
        self._names = [f"{folder.brief}/{name.removesuffix('.tar').replace('/', '%')}.{version.brief()}" for name, version in names]
        self._start_over()

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key not in _OF_A_PROCESS}
        return {**kept, "index": Path(str(self.index.filename)) if isinstance(self.index, np.memmap) else self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.index, Path):
            self.index = np.load(self.index, mmap_mode="r")
        self._start_over()

    def where(self, shard: int) -> str:
        """The shard's URL."""
        return f"{self.folder}/{self.filenames[shard]}"

    def pread(self, sample: int, shard: int, size: int, offset: int) -> bytes:
        """`size` bytes at `offset` of a shard, which lie in front of `sample`'s image or in it. Raises ShardError or OSError."""
        block, start, stop = self._block(sample, shard), self._start(sample, shard), self._stop(sample)
        samples = block.last - block.first
        for _ in range(3):  # more than once only where others need all of the cache
            data = self.cache.read(
                block.name, block.stop - block.start, samples, sample - block.first, start - block.start, stop - block.start
            )
            if data is None and (fetched := self._request(block).result()) is not None:
                data = fetched[start - block.start : stop - block.start]
            if data is not None:
                return data[offset - start : offset - start + size]
        raise ShardError(f"{self.cache.folder}: blocks vanish as soon as they are there; give it more room with data.cache_gib")

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """Have the blocks of these samples fetched in the background. What fails shows when it is read."""
        now_s = time.monotonic()
        shards = np.searchsorted(self.firsts, samples, side="right") - 1
        blocks, rows = np.unique(shards * (1 << 40) + samples // self.block_samples, return_index=True)
        for number, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            if now_s - self._asked_at_s.get(number, -math.inf) > ASK_AGAIN_S:
                self._asked_at_s[number] = now_s
                block = self._block(int(samples[row]), int(shards[row]))
                if not self.cache.holds(block.name):
                    self._request(block)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _start(self, sample: int, shard: int) -> int:
        return 0 if sample == self.firsts[shard] else self._stop(sample - 1)

    def _stop(self, sample: int) -> int:
        row = self.index[sample]
        return int(row["offset"]) + int(row["size"])

    def _block(self, sample: int, shard: int) -> _Block:
        number = sample // self.block_samples
        first = max(number * self.block_samples, self.firsts[shard])
        last = min((number + 1) * self.block_samples, self.firsts[shard + 1])
        return _Block(f"{self._names[shard]}.{first}-{last}.block", shard, first, last, self._start(first, shard), self._stop(last - 1))

    def _get(self, block: _Block) -> Fetched:
        """Fetch a block; one whose tar headers do not say the index's sizes is not to be kept."""
        data = self.folder.read(self.filenames[block.shard], block.start, block.stop, self.versions[block.shard])
        rows = self.index[block.first : block.last]
        offsets, sizes = (rows["offset"].astype(np.int64) - block.start).tolist(), rows["size"].tolist()
        sound = all(size_said_by(data[at - TAR_BLOCK : at]) == size for at, size in zip(offsets, sizes, strict=True))
        return Fetched(data, [at + size for at, size in zip(offsets, sizes, strict=True)] if sound else None)

    # ---- threads that fetch ----

    def _start_over(self) -> None:
        """In a new process: threads, and who held the lock, stayed in the old one."""
        self._lock, self._pid, self._num_threads = threading.Lock(), os.getpid(), 0
        self._asked_at_s: dict[int, float] = {}
        self._under_way: dict[str, Future[bytes | None]] = {}
        self._queue: queue.SimpleQueue[tuple[Future[bytes | None], _Block]] = queue.SimpleQueue()

    def _request(self, block: _Block) -> Future[bytes | None]:
        """The block's bytes when it will have been fetched, None where another process was first. First asked, first served."""
        if self._pid != os.getpid():
            self._start_over()
        with self._lock:
            future = self._under_way.get(block.name)
            if future is None:
                future = self._under_way[block.name] = Future()
                self._queue.put((future, block))
                if self._num_threads < min(NUM_THREADS, len(self._under_way)):
                    self._num_threads += 1
                    threading.Thread(target=self._serve, daemon=True).start()  # a daemon: no exit waits for a slow server
            return future

    def _serve(self) -> None:
        while True:
            future, block = self._queue.get()
            try:
                future.set_result(self.cache.fetch(block.name, partial(self._get, block)))
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                del self._under_way[block.name]
            del future  # and with it the block's bytes, before the next is waited for
