"""Blocks of bytes on the local disk, shared by all processes of a host, within a limit. Free of
torch.

The data's story: whoever needs a block first fetches it, while others that need it wait. The block
appears whole, by a rename, and ends with a checksum for each of its parts; a part is read with one
`pread` and must fit its checksum. Where the limit would be passed, the blocks that nobody has read
for longest go.

    <folder>/                           of its user alone, or of a group, where the folder may be written by one
      used_bytes                        what all blocks together take, counted before each is written; its lock guards the count
      limit.<bytes>                     held by each process with this limit: the largest of those that live counts for all
      <data set>/<shard>.<version>.<samples>.block
      <data set>/<...>.part             being fetched, by the process that holds its lock

No lock is waited for without end: its holder may have been stopped. Then a block is fetched, used
and not kept.

Nothing here is synced to the disk: after a power cut a block may hold zeros, which its checksums
tell. A cache that can no longer be written costs time and nothing else: blocks are used and not
kept.
"""

from __future__ import annotations

import errno
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
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.data import stages
from vit.system.files import ShardError
from vit.system.host import file_system, is_shared, process_state

GIB = 1 << 30
CHECKSUM_BYTES = 4
NUMBER_BYTES = 21
"""Of `used_bytes`: a number of up to 20 digits and the end of its line."""
DEFAULT_GIB = 50.0
"""Most that a cache takes where nobody says how much, and where its disk has twice that."""
LOCK_WAIT_S = 120.0
"""For another process to fetch a block, or to count one: as long as an attempt at a store may
take."""
TELL_LOCK_AFTER_S = 10.0
TELL_LOCK_AGAIN_S = 60.0
TRY_AGAIN_S = 60.0
"""After a block could not be written, how often another one is tried."""
TOUCH_AFTER_S = 60.0
"""A block that is read says so by its time of change, at most so often."""
log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """A block's bytes. `part_ends`: where its parts end; None for a block that is not to be
    kept."""

    data: bytes
    part_ends: list[int] | None


class BlockCache:
    """The blocks below `folder`. May be used by any number of threads and processes, and
    pickled."""

    folder: Path
    limit_bytes: int

    def __init__(self, folder: str | Path | None = None, limit_gib: float | None = None):
        """folder: by default `default_folder`. limit_gib: by default half of what is free on its
        disk or used by it, but at most 50.

        Raises ShardError if the folder cannot be used or its disk is too small for the limit.
        """
        self.folder = default_folder() if folder is None else Path(folder).expanduser().absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = self.folder.stat()
            if status.st_mode & stat.S_IWOTH:
                remedy = f"`chmod o-w {self.folder}`, or choose another with data.cache_dir"
                raise ShardError(
                    f"{self.folder}: everybody may write there, and so decide what is trained on:"
                    f" {remedy}"
                )
            fd = _open(self.folder / "used_bytes", os.O_RDWR)
            text = os.pread(fd, NUMBER_BYTES, 0)
            os.close(fd)
            available = shutil.disk_usage(self.folder).free + (
                int(text) if text.strip().isdigit() else 0
            )
        except OSError as error:
            remedy = "choose a folder on a disk of this machine with data.cache_dir"
            raise ShardError(
                f"{self.folder}: cannot hold a cache of shards ({error.strerror}); {remedy}"
            ) from error
        if limit_gib is not None and limit_gib * GIB > available:
            raise ShardError(
                f"data.cache_gib={limit_gib:g}: the disk of {self.folder} has room for"
                f" {available / GIB:.1f}; give less, or another disk with data.cache_dir"
            )
        self._refused_bytes = 0
        self._tried_s = 0.0
        self.limit_bytes = int(
            min(available // 2, DEFAULT_GIB * GIB) if limit_gib is None else limit_gib * GIB
        )
        with suppress(OSError):  # without it others do not know the limit
            weakref.finalize(self, os.close, self._announce())

    def read(
        self, name: str, block_bytes: int, num_parts: int, part: int, start: int, stop: int
    ) -> bytes | None:
        """Bytes [start, stop) of a block, which are its part number `part`. None if the block is
        not here; one that is damaged goes."""
        path = f"{self.folder}/{name}"  # pathlib would take as long as the read
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            data = os.pread(fd, stop - start, start)
            checksum = os.pread(fd, CHECKSUM_BYTES, block_bytes + CHECKSUM_BYTES * part)
            if status.st_size != block_bytes + CHECKSUM_BYTES * num_parts or checksum != _checksum(
                data
            ):
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

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block of this size fits without another going."""
        text = (self.folder / "used_bytes").read_text()
        return (int(text) if text.strip().isdigit() else 0) + num_bytes <= self.limit_bytes

    def fetch(self, name: str, get: Callable[[], Fetched], may_remove: bool = True) -> bytes | None:
        """Have a block here: None if it is, perhaps by now; else its bytes as `get` gives them, and
        they are kept if there is room.

        may_remove: others may go, so that there is room.
        """
        path = self.folder / name
        with ExitStack() as stack:
            try:
                part = stack.enter_context(locked_part(path))
            except OSError as error:
                _warn_once(self.folder, error.strerror)
                data = get().data
                if not isinstance(error, TimeoutError):  # which is of this block alone
                    self._refuse(len(data))
                return data
            if part is None:
                return None
            data, part_ends = get()
            if part_ends is None:
                return data
            starts = [0, *part_ends[:-1]]
            checksums = b"".join(
                _checksum(data[start:end]) for start, end in zip(starts, part_ends, strict=True)
            )
            try:
                if self._make_room(len(data) + len(checksums), may_remove):
                    write_whole(part, (data, checksums))
                    os.replace(part.name, path)
                    if 2 * len(data) >= self._refused_bytes:
                        self._refused_bytes = 0
            except OSError as error:
                _warn_once(self.folder, error.strerror)
                self._refuse(len(data))
            return data

    def refuses(self) -> bool:
        """Whether blocks could not be written lately, so that fetching one for a part of it would
        be in vain; one is tried now and then."""
        now_s = time.monotonic()
        if self._refused_bytes and now_s - self._tried_s <= TRY_AGAIN_S:
            return True
        self._tried_s = now_s
        return False

    def _refuse(self, num_bytes: int) -> None:
        self._refused_bytes = max(self._refused_bytes, num_bytes)
        self._tried_s = time.monotonic()

    def _make_room(self, num_bytes: int, may_remove: bool) -> bool:
        """Count `num_bytes` more, after removing what was not read for longest where needed. False
        if they do not fit."""
        if num_bytes > self.limit_bytes:
            return False
        with self._count() as (fd, used):
            if used + num_bytes > self.limit_bytes and used + num_bytes > (
                limit := self._largest_limit()
            ):
                if not may_remove:
                    return False
                # A little more than needed: listing all blocks takes a while.
                used = self._remove_oldest(limit - num_bytes - limit // 16)
            # of one width: what was there is overwritten, never cut off
            os.pwrite(fd, b"%*d\n" % (NUMBER_BYTES - 1, used + num_bytes), 0)
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
        """The file `used_bytes`, opened and locked, and its number. Without a buffer: the number is
        there before the lock goes."""
        fd = _open(self.folder / "used_bytes", os.O_RDWR)
        try:
            with _lock(fd, self.folder / "used_bytes"):
                text = os.pread(fd, NUMBER_BYTES, 0)
                yield fd, int(text) if text.strip().isdigit() else self._remove_oldest(1 << 62)
        finally:
            os.close(fd)

    # ---- the limits of several jobs in one folder ----

    def _announce(self) -> int:
        """A descriptor that holds a lock on `limit.<bytes>`, for as long as this process, or one
        that it has forked, lives."""
        path = self.folder / f"limit.{self.limit_bytes}"
        while True:
            fd = _open(path, os.O_RDONLY)  # a disk stays one that can be made read-only
            fcntl.flock(fd, fcntl.LOCK_SH)
            if _is_at(fd, path):
                return fd
            os.close(fd)  # found to be nobody's, and removed, before it was locked

    def _largest_limit(self) -> int:
        """Of all processes that use this folder now: a smaller one must not take away what belongs
        to a larger one."""
        largest = self.limit_bytes
        for path in self.folder.glob("limit.*"):
            with suppress(OSError, ValueError):
                if int(path.suffix[1:]) > largest and not _remove_unless_locked(path):
                    largest = int(path.suffix[1:])
        return largest


def _warn_once(folder: Path, reason: str | None) -> None:
    """A full disk refuses every block to every thread, and is told once."""
    if _warned.setdefault((folder, reason), me := object()) is me:
        log.warning("%s: cannot be written (%s); blocks are used and not kept", folder, reason)


_warned: dict[tuple[Path, str | None], object] = {}
"""By whom. One operation, which needs no lock."""


# ---- folders and files ---------------------------------------------------------------------------


def default_folder(root: Path = Path("/")) -> Path:
    """A folder on a disk of this machine: in SLURM_TMPDIR or TMPDIR, which batch systems set to
    one; else `vit` in XDG_CACHE_HOME or in ~/.cache.

    root: where `proc` lies. Raises ShardError where all of these are on network file systems, or in
    memory.
    """
    places = [
        Path(os.environ[name]) / f"vit-{os.getuid()}"
        for name in ("SLURM_TMPDIR", "TMPDIR")
        if os.environ.get(name)
    ]
    places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit")
    refused = []
    for place in places:
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        kind = file_system(there, root)
        if not is_shared(kind) and kind != "tmpfs":
            return place
        refused.append(f"{place} ({kind})")
    raise ShardError(
        "no folder on a disk of this machine is known for blocks of shards, only"
        f" {', '.join(refused)}: name one with data.cache_dir, as /scratch or /local_disk of a"
        " cluster's node"
    )


def _make_folder(folder: Path) -> None:
    """Below one that a group may write this one may, too."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True, mode=0o700)
        if folder.parent.stat().st_mode & stat.S_IWGRP:
            with suppress(PermissionError):  # another one was faster
                folder.chmod(0o2770)


def _open(path: Path, flags: int) -> int:
    """A descriptor of a file in a cache's folder, made if need be. Raises OSError for what another
    user might have put there: a link, or a file of somebody who is not of the group that the folder
    belongs to."""
    shared = bool(path.parent.stat().st_mode & stat.S_IWGRP)
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(fd)
    folder = path.parent.stat()
    is_ours = status.st_uid in (os.geteuid(), folder.st_uid) or (
        shared and status.st_gid == folder.st_gid
    )
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or not is_ours:
        os.close(fd)
        raise OSError(errno.EPERM, f"{path.name} is a link, or of another user")
    if shared and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWGRP:
        os.fchmod(fd, 0o660)
    return fd


@contextmanager
def locked_part(
    path: Path, is_there: Callable[[Path], bool] = Path.exists
) -> Iterator[FileIO | None]:
    """`<path>.part`, opened and locked against other threads and processes, for the one that makes
    `path`; None if it `is_there` by now.

    Renamed or not, nothing of the part is left at the end. Raises OSError before it yields, not
    after: TimeoutError if another process has the lock for more than `LOCK_WAIT_S` in which the
    part does not grow.
    """
    name = path.with_name(f"{path.name}.part")
    _make_folder(path.parent)
    while not is_there(path):
        with (
            open(
                name, "r+b", buffering=0, opener=lambda path, flags: _open(Path(path), flags)
            ) as file,
            _lock(file.fileno(), name),
        ):
            if not _is_at(file.fileno(), name):  # who had the lock before has renamed or removed it
                continue
            try:
                yield None if is_there(path) else file
            finally:
                with suppress(OSError):  # a folder that may no longer be written
                    # before the lock goes; after a rename another process may have begun another
                    # part
                    if _is_at(file.fileno(), name):
                        name.unlink(missing_ok=True)
            return
    yield None


@contextmanager
def _lock(fd: int, path: Path) -> Iterator[None]:
    """Locked against all who open it, unlocked by name at the end: a process forked meanwhile has
    the same lock and keeps the file open.

    Raises TimeoutError as `locked_part`; after that the same lock is not waited for again.
    """
    began_s = time.monotonic()
    tell_s = TELL_LOCK_AFTER_S
    pause_s = 0.002
    size = -1
    moved_s = began_s
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _given_up.discard(path)
                break
            _waited_for[path] = True
            now_s = time.monotonic()
            size_before = size
            size = os.fstat(fd).st_size
            moved_s = now_s if size != size_before else moved_s
            if now_s - moved_s > LOCK_WAIT_S or path in _given_up:
                _given_up.add(path)
                raise TimeoutError(errno.ETIMEDOUT, f"{path.name} is locked by {_holder(fd)}")
            if now_s - began_s > tell_s:
                tell_s = now_s - began_s + TELL_LOCK_AGAIN_S
                log.warning(
                    "%s: locked by %s; waiting for up to %.0f s",
                    path,
                    _holder(fd),
                    moved_s + LOCK_WAIT_S - now_s,
                )
            stages.current.beat()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
    finally:
        _waited_for.pop(path, None)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


_given_up = set[Path]()
"""Locks that were waited for in vain."""
_waited_for: dict[Path, bool] = {}
"""Locks that threads of this process wait for now."""


def waits_for_lock(path: Path) -> bool:
    """Whether a thread of this process waits for the lock of `path`'s part, or for the count."""
    return (
        path.with_name(f"{path.name}.part") in _waited_for
        or path.parent.parent / "used_bytes" in _waited_for
    )


def _holder(fd: int) -> str:
    """Who has locked the file of a descriptor, where the system tells."""
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            kind = line.split()
            if place in kind and "->" not in kind:
                pid = int(kind[kind.index(place) - 1])
                return (
                    f"process {pid}{process_state(pid)}"
                    if pid > 0
                    else "a process of another container"
                )
    return "another process"


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def write_whole(file: FileIO, pieces: Iterable[bytes]) -> None:
    """Make `pieces` the content of an unbuffered file. (A buffered one would try again, when
    closed, what a full disk has refused.)"""
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


def _remove_unless_locked(path: Path) -> bool:
    """Remove what a process left that is no more; False if one holds it."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _checksum(data: bytes | memoryview) -> bytes:
    """CRC-32, four bytes: 5 GB/s, so a photograph costs 25 microseconds."""
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")
