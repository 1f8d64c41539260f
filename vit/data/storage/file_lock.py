"""Create and lock files in a cache folder that several processes and users share.

The process that holds the lock writes to `<path>.part` and then renames it. Every wait for a lock
times out, because the holder may be suspended.
"""

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from vit.data import stages
from vit.system.host import process_state

LOCK_WAIT_S = 120.0
"""The maximum time in seconds to wait for a lock whose file does not grow. A fetch has the same
time limit."""
WARN_AFTER_S = 10.0
"""The time in seconds before the first warning about a locked file."""
WARN_AGAIN_S = 60.0
"""The time in seconds between warnings."""
log = logging.getLogger(__name__)


@contextmanager
def locked_part(
    path: Path, exists: Callable[[Path], bool] = Path.exists
) -> Iterator[FileIO | None]:
    """Open and lock `<path>.part` for the one thread that creates `path`, or yield None if `path`
    exists.

    The part is removed afterwards unless the caller renames it. Raises OSError only before
    yielding. Raises TimeoutError if another process holds the lock for `LOCK_WAIT_S` while the part
    does not grow.
    """
    name = path.with_name(f"{path.name}.part")
    _make_folder(path.parent)
    while not exists(path):
        with FileIO(str(name), "r+", opener=open_shared) as file, lock(file.fileno(), name):
            if not is_at(file.fileno(), name):
                continue  # the previous lock holder renamed or removed this file
            try:
                yield None if exists(path) else file
            finally:
                with suppress(OSError):  # the folder may have become read-only
                    # Remove the part only while the lock is held and the name still refers to this
                    # file. After a rename, the name may refer to another process's part.
                    if is_at(file.fileno(), name):
                        name.unlink(missing_ok=True)
            return

    yield None


@contextmanager
def lock(fd: int, path: Path) -> Iterator[None]:
    """Hold the exclusive lock on `path`, whose descriptor is `fd`. Raises TimeoutError.

    The lock is released explicitly, because a process that was forked while the lock was held keeps
    the file open.
    """
    try:
        _wait_for_lock(fd, path)
    finally:
        _waited_for.discard(path)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _wait_for_lock(fd: int, path: Path) -> None:
    """Lock the file, waiting as long as it grows.

    Raises TimeoutError if it has not grown for LOCK_WAIT_S. The next attempt to lock this file then
    fails without waiting.
    """
    grew_s = time.monotonic()
    warn_at_s = grew_s + WARN_AFTER_S
    pause_s = 0.002
    size = -1
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _given_up.discard(path)
            return

        _waited_for.add(path)
        now_s = time.monotonic()
        if os.fstat(fd).st_size != size:
            size = os.fstat(fd).st_size
            grew_s = now_s

        if now_s - grew_s > LOCK_WAIT_S or path in _given_up:
            _given_up.add(path)
            raise TimeoutError(errno.ETIMEDOUT, f"{path.name} is locked by {_holder(fd)}")
        if now_s > warn_at_s:
            warn_at_s = now_s + WARN_AGAIN_S
            log.warning(
                "%s: locked by %s; waiting for up to %.0f s",
                path,
                _holder(fd),
                grew_s + LOCK_WAIT_S - now_s,
            )

        stages.current.beat()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


_given_up = set[Path]()
"""Locks that have timed out. The next attempt to lock them fails without waiting."""
_waited_for = set[Path]()
"""Locks that threads of this process are waiting for."""


def is_waited_for(path: Path) -> bool:
    """Return whether a thread of this process is waiting for the lock of block `path` or of
    `used_bytes`."""
    names = (path.with_name(f"{path.name}.part"), path.parent.parent / "used_bytes")
    return not _waited_for.isdisjoint(names)


def _holder(fd: int) -> str:
    status = os.fstat(fd)
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if inode in fields and "->" not in fields:  # "->" marks a waiting process
                pid = int(fields[fields.index(inode) - 1])
                if pid <= 0:
                    return "a process of another container"
                return f"process {pid}{process_state(pid)}"
    return "another process"


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(exist_ok=True, mode=0o700)
        if folder.parent.stat().st_mode & stat.S_IWGRP:
            with suppress(PermissionError):  # another user created the folder first
                folder.chmod(0o2770)


def open_shared(name: str | Path, flags: int) -> int:
    """Open a file in a cache folder and return its descriptor; create the file if necessary.

    Raises OSError if another user may have planted the file: if it is a link, or is owned by a user
    outside the folder's group.
    """
    path = Path(name)
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(fd)
    folder = path.parent.stat()
    is_group_folder = bool(folder.st_mode & stat.S_IWGRP)
    is_trusted = status.st_uid in (os.geteuid(), folder.st_uid) or (
        is_group_folder and status.st_gid == folder.st_gid
    )
    is_plain_file = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    if not is_plain_file or not is_trusted:
        os.close(fd)
        raise OSError(errno.EPERM, f"{path.name} is a link, or belongs to another user")

    is_closed_to_group = is_group_folder and not status.st_mode & stat.S_IWGRP
    if is_closed_to_group and status.st_uid == os.geteuid():
        os.fchmod(fd, 0o660)
    return fd


def is_at(fd: int, path: Path) -> bool:
    """Return whether `path` refers to the open file `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def write_all(file: FileIO, pieces: Iterable[bytes]) -> None:
    """Replace the content of an unbuffered file.

    The file must be unbuffered. If a write fails on a full disk, closing a buffered file retries
    the write.
    """
    file.truncate(0)
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            rest = rest[file.write(rest) :]


def remove_unless_locked(path: Path) -> bool:
    """Remove a file that a dead process left behind. Return False if a live process holds the
    lock."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
