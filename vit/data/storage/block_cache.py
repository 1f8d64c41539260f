"""A cache of blocks on the local disk, shared by all processes of a host, with a size limit.

The first process that needs a block fetches it while the others wait. A rename then makes the
complete block visible. A block ends with one checksum per part, so reading a part takes two `pread`
calls. When the limit is reached, the least recently read blocks are removed.

    <folder>/                 of one user, or of a group if the folder is group-writable
      used_bytes              size of all blocks; locked and updated before a block is written
      limit.<bytes>           locked by each process with this limit; the largest locked one applies
      <data set>/<shard>.<version>.<samples>.block
      <data set>/<...>.part   being fetched by the process that holds its lock

If a process does not get a lock in time, it fetches and uses the block without storing it. Blocks
are not synced to disk. After a power failure, a block may contain zeros, which its checksums
detect. A cache that becomes read-only slows down reading but causes no error.
"""

import fcntl
import logging
import os
import shutil
import stat
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.data.storage.file_lock import (
    is_at,
    lock,
    locked_part,
    open_shared,
    remove_unless_locked,
    write_all,
)
from vit.system.files import ShardError
from vit.system.host import default_folder
from vit.system.meter import GIB

CHECKSUM_BYTES = 4
USED_WIDTH = 20
"""The number of digits to which the content of `used_bytes` is padded."""
DEFAULT_GIB = 50.0
"""The default limit in GiB, used if twice as much disk space is free."""
TRY_AGAIN_S = 60.0
"""The time in seconds before writing is retried after a block could not be written."""
TOUCH_AFTER_S = 60.0
"""The minimum time in seconds between two updates of a block's modification time, which records its
last use."""
ABANDONED_AFTER_S = 3600
"""The age in seconds at which an unlocked `.part` file is removed."""
log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """The bytes of a block."""

    data: bytes
    part_ends: list[int] | None
    """The end of each part, or None if the block must not be stored."""


class BlockCache:
    """The blocks below `folder`. A cache can be pickled, and shared by threads and processes."""

    def __init__(self, folder: str | Path | None = None, limit_gib: float | None = None):
        """Create the folder if it does not exist, and choose the limit.

        Raises ShardError if the folder cannot be used or the disk is too small for the limit.

        Args:
            folder: By default `default_folder()`.
            limit_gib: By default half of the free space, counting cached blocks as free, but at
                most 50 GiB.
        """
        self.folder = default_folder() if folder is None else Path(folder).expanduser().absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.folder.stat().st_mode & stat.S_IWOTH:
                raise ShardError(
                    f"{self.folder}: any user can write to this folder and change the training"
                    f" data: run `chmod o-w {self.folder}`, or choose another folder with"
                    " loader.cache_dir"
                )
            os.close(open_shared(self.folder / "used_bytes", os.O_RDWR))
            available = shutil.disk_usage(self.folder).free + self._used_bytes()
        except OSError as error:
            raise ShardError(
                f"{self.folder}: cannot store the shard cache ({error.strerror}); choose a folder"
                " on a local disk with loader.cache_dir"
            ) from error

        if limit_gib is None:
            self.limit_bytes = int(min(available // 2, DEFAULT_GIB * GIB))
        else:
            self.limit_bytes = int(limit_gib * GIB)
            if limit_gib * GIB > available:
                raise ShardError(
                    f"loader.cache_gib={limit_gib:g}: the disk of {self.folder} has room for only"
                    f" {available / GIB:.1f}; set a smaller size, or choose another disk with"
                    " loader.cache_dir"
                )

        self._refused_at_s = -TRY_AGAIN_S
        with suppress(OSError):  # without the file, other jobs ignore this limit
            weakref.finalize(self, os.close, self._announce_limit())

    # ---- reading ----

    def read(
        self, name: str, block_bytes: int, num_parts: int, part: int, start: int, stop: int
    ) -> bytes | None:
        """Return bytes [start, stop) of a block, which form part number `part`.

        Returns None if the block is missing or damaged. Removes a damaged block.
        """
        path = f"{self.folder}/{name}"  # creating a Path would take as long as the read
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None

        try:
            status = os.fstat(fd)
            data = os.pread(fd, stop - start, start)
            checksum = os.pread(fd, CHECKSUM_BYTES, block_bytes + CHECKSUM_BYTES * part)
            expected_bytes = block_bytes + CHECKSUM_BYTES * num_parts
            if status.st_size != expected_bytes or checksum != _checksum(data):
                log.warning("%s is damaged and is fetched again", path)
                Path(path).unlink(missing_ok=True)
                return None

            # A block with a time in the future would look recently used for a long time, so use
            # `abs`.
            if abs(time.time() - status.st_mtime) > TOUCH_AFTER_S:
                with suppress(OSError):  # the cache may be read-only
                    os.utime(fd)
            return data
        except OSError as error:
            log.warning("%s: %s; the block is fetched again", path, error.strerror)
            return None
        finally:
            os.close(fd)

    def holds(self, name: str) -> bool:
        """Return whether the cache contains a block with this name."""
        return os.path.exists(f"{self.folder}/{name}")

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` fit without removing blocks."""
        return self._used_bytes() + num_bytes <= self.limit_bytes

    def _used_bytes(self) -> int:
        return _parse_used((self.folder / "used_bytes").read_bytes()) or 0

    # ---- storing ----

    def fetch(self, name: str, get: Callable[[], Fetched], may_remove: bool = True) -> bytes | None:
        """Store a block in the cache if it fits and is not cached yet.

        Returns the bytes if this call fetched them, or None if the block is cached.

        Args:
            get: A function that fetches the block.
            may_remove: Whether other blocks may be removed to make room.
        """
        path = self.folder / name
        with ExitStack() as stack:
            try:
                part = stack.enter_context(locked_part(path))
            except OSError as error:
                _warn_once(self.folder, error.strerror)
                data = get().data
                if not isinstance(error, TimeoutError):  # a timeout affects only this block
                    self._refuse()
                return data
            if part is None:
                return None

            data, part_ends = get()
            if part_ends is None:
                return data

            bounds = pairwise([0, *part_ends])
            checksums = b"".join(_checksum(data[start:end]) for start, end in bounds)
            try:
                if self._make_room(len(data) + len(checksums), may_remove):
                    write_all(part, (data, checksums))
                    os.replace(part.name, path)
            except OSError as error:
                _warn_once(self.folder, error.strerror)
                self._refuse()
            return data

    def refuses(self) -> bool:
        """Return whether writing a block failed within the last `TRY_AGAIN_S`.

        If so, callers fetch single samples, because a whole block could not be cached.
        """
        return time.monotonic() - self._refused_at_s < TRY_AGAIN_S

    def _refuse(self) -> None:
        self._refused_at_s = time.monotonic()

    def _make_room(self, num_bytes: int, may_remove: bool) -> bool:
        """Add `num_bytes` to the recorded size, after removing least recently used blocks if
        necessary.

        Returns False if the bytes do not fit.
        """
        if num_bytes > self.limit_bytes:
            return False

        with self._locked_count() as (fd, used):
            if used + num_bytes > self.limit_bytes:
                limit = self._largest_limit()
                if used + num_bytes > limit:
                    if not may_remove:
                        return False
                    # Listing all blocks is slow, so remove slightly more than necessary.
                    used = self._remove_oldest(limit - num_bytes - limit // 16)
            # Overwrite the number in place with constant width, so that readers without the lock
            # never see an empty or truncated file.
            os.pwrite(fd, b"%*d\n" % (USED_WIDTH, used + num_bytes), 0)
        return True

    def _remove_oldest(self, keep_bytes: int) -> int:
        """Remove the least recently used blocks, until `keep_bytes` are left.

        Also removes abandoned parts of blocks. Returns the size of the remaining blocks.
        """
        blocks = []
        for path in self.folder.glob("*/*"):
            with suppress(OSError):  # another process removed the block
                status = path.stat()
                if path.suffix == ".block":
                    blocks.append((status.st_mtime, status.st_size, path))
                elif (
                    path.suffix == ".part"
                    and abs(time.time() - status.st_mtime) > ABANDONED_AFTER_S
                ):
                    remove_unless_locked(path)

        # Blocks that other processes are storing are not counted, so the cache can exceed its limit
        # by a block per process.
        left = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks):
            if left <= max(keep_bytes, 0):
                break
            path.unlink(missing_ok=True)  # processes that have opened the file can still read it
            left -= size
        return left

    @contextmanager
    def _locked_count(self) -> Iterator[tuple[int, int]]:
        """Lock `used_bytes`, and yield its descriptor and the number in it."""
        path = self.folder / "used_bytes"
        fd = open_shared(path, os.O_RDWR)
        try:
            with lock(fd, path):
                used = _parse_used(os.pread(fd, USED_WIDTH + 1, 0))
                yield fd, self._remove_oldest(1 << 62) if used is None else used
        finally:
            os.close(fd)

    # ---- the limits of several jobs in one folder ----

    def _announce_limit(self) -> int:
        """Return a descriptor with a shared lock on `limit.<bytes>`.

        The lock is held while this process, or a process forked from it, is alive.
        """
        path = self.folder / f"limit.{self.limit_bytes}"
        while True:
            # A file that is open for writing would prevent remounting the disk read-only.
            fd = open_shared(path, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if is_at(fd, path):
                return fd
            os.close(fd)  # another process removed the file before it was locked

    def _largest_limit(self) -> int:
        """Return the largest limit among all processes that currently use this folder.

        A job with a smaller limit must not remove the blocks of a job with a larger limit.
        """
        largest = self.limit_bytes
        for path in self.folder.glob("limit.*"):
            with suppress(OSError, ValueError):
                limit = int(path.suffix[1:])
                if limit > largest and not remove_unless_locked(path):
                    largest = limit
        return largest


def _parse_used(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _warn_once(folder: Path, reason: str | None) -> None:
    """Warn once per process. A full disk causes an error for every block."""
    if (folder, reason) not in _warned:
        _warned.add((folder, reason))
        log.warning("%s: cannot be written (%s); blocks are used but not stored", folder, reason)


_warned = set[tuple[Path, str | None]]()


# ---- checksums -----------------------------------------------------------------------------------


def with_checksum(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a file, followed by their checksum."""
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield checksum.to_bytes(CHECKSUM_BYTES, "little")


def ends_with_checksum(path: Path) -> bool:
    """Return whether a file exists and ends with the checksum of its other bytes."""
    try:
        data = np.memmap(path, np.uint8, "r").data
    except (OSError, ValueError):  # an empty file raises ValueError
        return False
    return data[-CHECKSUM_BYTES:] == _checksum(data[:-CHECKSUM_BYTES])


def _checksum(data: bytes | memoryview) -> bytes:
    """Return the CRC-32 as four bytes. At 5 GB/s, a photograph takes 25 microseconds."""
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")
