"""Blocks of bytes on the local disk, shared by all processes of a host, within a limit. Free of torch.

The data's story: whoever needs a block first fetches it, while others that need it wait. The block appears whole, by a rename, and ends
with a checksum for each of its parts; a part is read with one `pread` and must fit its checksum. Where the limit would be passed, the
blocks that nobody has read for longest go.

    <folder>/
      used_bytes                        what all blocks together take, counted before each is written; its lock guards the count
      <data set>/<shard>.<version>.<samples>.block
      <data set>/<...>.part             being fetched, by the process that holds its lock

Nothing here is synced to the disk: after a power cut a block may hold zeros, which its checksums tell. A cache that can no longer be
written costs time and nothing else: blocks are used and not kept.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.data.files import ShardError

GIB = 1 << 30
CHECKSUM_BYTES = 4
NUMBER_BYTES = 21
"""Of `used_bytes`: a number of up to 20 digits and the end of its line."""
TOUCH_AFTER_S = 60.0
"""A block that is read says so by its time of change, at most so often."""
log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """A block's bytes. `part_ends`: where its parts end; None for a block that is not to be kept."""

    data: bytes
    part_ends: list[int] | None


class BlockCache:
    """The blocks below `folder`. Stateless but for its limit: may be used by any number of threads and processes, and pickled."""

    folder: Path
    limit_bytes: int

    def __init__(self, folder: str | Path | None = None, limit_gib: float | None = None):
        """folder: by default `vit` in XDG_CACHE_HOME or ~/.cache. limit_gib: by default half of what is free on its disk or used by it.

        Raises ShardError if the folder cannot be used or its disk is too small for the limit.
        """
        self.folder = default_folder() if folder is None else Path(folder).expanduser().absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._count() as (_, used):
                available = shutil.disk_usage(self.folder).free + used
        except OSError as error:
            remedy = "choose a folder on a disk of this machine with data.cache_dir"
            raise ShardError(f"{self.folder}: cannot hold a cache of remote shards ({error.strerror}); {remedy}") from error
        if limit_gib is not None and limit_gib * GIB > available:
            raise ShardError(
                f"data.cache_gib={limit_gib:g}: the disk of {self.folder} has room for {available / GIB:.1f}; "
                "give less, or another disk with data.cache_dir"
            )
        self.limit_bytes = int(available // 2 if limit_gib is None else limit_gib * GIB)

    def read(self, name: str, block_bytes: int, num_parts: int, part: int, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop) of a block, which are its part number `part`. None if the block is not here; one that is damaged goes."""
        path = f"{self.folder}/{name}"  # pathlib would take as long as the read
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            data = os.pread(fd, stop - start, start)
            checksum = os.pread(fd, CHECKSUM_BYTES, block_bytes + CHECKSUM_BYTES * part)
            if status.st_size != block_bytes + CHECKSUM_BYTES * num_parts or checksum != _checksum(data):
                log.warning("%s: damaged; it is fetched again", path)
                Path(path).unlink(missing_ok=True)
                return None
            if time.time() - status.st_mtime > TOUCH_AFTER_S:
                with suppress(OSError):  # a cache that may only be read
                    os.utime(fd)
            return data
        except OSError as error:
            log.warning("%s: %s; it is fetched again", path, error.strerror)
            return None
        finally:
            os.close(fd)

    def holds(self, name: str) -> bool:
        """Whether the block is here, as far as its name tells."""
        return os.path.exists(f"{self.folder}/{name}")

    def fetch(self, name: str, get: Callable[[], Fetched]) -> bytes | None:
        """Have a block here: None if it is, perhaps by now; else its bytes as `get` gives them, and they are kept if there is room."""
        path = self.folder / name
        with ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = stack.enter_context(locked_part(path))
            except OSError as error:
                _warn_once(self.folder, error.strerror)
                return get().data
            if part is None:
                return None
            data, part_ends = get()
            if part_ends is None:
                return data
            starts = [0, *part_ends[:-1]]
            checksums = b"".join(_checksum(data[start:end]) for start, end in zip(starts, part_ends, strict=True))
            try:
                if self._make_room(len(data) + len(checksums)):
                    write_whole(part, (data, checksums))
                    os.replace(part.name, path)
            except OSError as error:
                _warn_once(self.folder, error.strerror)
            return data

    def _make_room(self, num_bytes: int) -> bool:
        """Count `num_bytes` more, after removing what was not read for longest where needed. False if they never fit."""
        if num_bytes > self.limit_bytes:
            return False
        with self._count() as (fd, used):
            if used + num_bytes > self.limit_bytes:
                # A little more than needed: listing all blocks takes a while.
                used = self._remove_oldest(self.limit_bytes - num_bytes - self.limit_bytes // 16)
            os.pwrite(fd, b"%*d\n" % (NUMBER_BYTES - 1, used + num_bytes), 0)  # of one width: what was there is overwritten, never cut off
        return True

    def _remove_oldest(self, keep_bytes: int) -> int:
        """Remove blocks until the others take at most `keep_bytes`; returns what they take."""
        blocks = []
        for path in self.folder.glob("*/*"):
            with suppress(OSError):  # another process was faster
                status = path.stat()
                if path.suffix == ".block":
                    blocks.append((status.st_mtime, status.st_size, path))
                elif path.suffix == ".part" and time.time() - status.st_mtime > 3600:
                    _remove_unless_locked(path)
        left = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks):
            if left <= max(keep_bytes, 0):
                break
            path.unlink(missing_ok=True)  # who has it open reads on
            left -= size
        return left

    @contextmanager
    def _count(self) -> Iterator[tuple[int, int]]:
        """The file `used_bytes`, opened and locked, and its number. Without a buffer: the number is there before the lock goes."""
        fd = os.open(self.folder / "used_bytes", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with _lock(fd):
                text = os.pread(fd, NUMBER_BYTES, 0)
                yield fd, int(text) if text.strip().isdigit() else self._remove_oldest(1 << 62)
        finally:
            os.close(fd)


@functools.cache
def _warn_once(folder: Path, reason: str | None) -> None:
    """A full disk refuses every block, and is told once."""
    log.warning("%s: cannot be written (%s); blocks are used and not kept", folder, reason)


def default_folder() -> Path:
    """`vit` in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit"


@contextmanager
def locked_part(path: Path, is_there: Callable[[Path], bool] = Path.exists) -> Iterator[FileIO | None]:
    """`<path>.part`, opened and locked against other threads and processes, for the one that makes `path`; None if it `is_there` by now.

    Renamed or not, nothing of the part is left at the end. Raises OSError before it yields, not after.
    """
    name = path.with_name(f"{path.name}.part")
    while not is_there(path):
        with open(name, "a+b", buffering=0) as file, _lock(file.fileno()):
            if not _is_at(file, name):  # who had the lock before has renamed or removed it
                continue
            try:
                yield None if is_there(path) else file
            finally:
                with suppress(OSError):  # a folder that may no longer be written
                    if _is_at(file, name):  # before the lock goes; after a rename another process may have begun another part
                        name.unlink(missing_ok=True)
            return
    yield None


@contextmanager
def _lock(fd: int) -> Iterator[None]:
    """Locked against all who open it, unlocked by name at the end: a process forked meanwhile has the same lock and keeps the file open."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write_whole(file: FileIO, pieces: Iterable[bytes]) -> None:
    """Make `pieces` the content of an unbuffered file. (A buffered one would try again, when closed, what a full disk has refused.)"""
    file.truncate(0)
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            rest = rest[file.write(rest) :]


def with_checksum(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces of a file, and their checksum."""
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield checksum.to_bytes(CHECKSUM_BYTES, "little")


def ends_with_checksum(path: Path) -> bool:
    """Whether a file is here and as it was written."""
    try:
        data = np.memmap(path, np.uint8, "r").data
    except (OSError, ValueError):  # ValueError: it is empty
        return False
    return data[-CHECKSUM_BYTES:] == _checksum(data[:-CHECKSUM_BYTES])


def _remove_unless_locked(part: Path) -> None:
    """Remove what a killed process left."""
    with open(part, "rb") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink(missing_ok=True)


def _checksum(data: bytes | memoryview) -> bytes:
    """CRC-32, four bytes: 5 GB/s, so a photograph costs 25 microseconds."""
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")
