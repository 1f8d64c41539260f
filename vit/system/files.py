"""Atomic file writes, and the error for damaged files.

A file gets its name when it is complete and on the disk: a reader sees the old one or the new one.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk: no space, a quota, a limit on the size of a file."""


class ShardError(ValueError):
    """A damaged or missing shard, index or `_info.json`: which, what was expected, what to do."""


class WeightsError(ValueError):
    """Weights that cannot be read, or do not fit the model."""


def unreadable(path: Path, error: OSError) -> ShardError:
    """The error for a `path` that the system refuses to open."""
    return ShardError(
        f"{path}: cannot be read ({error.strerror}); check its permissions and its disk"
    )


def temporary_beside(path: Path) -> Path:
    """A unique name next to `path` for an unfinished file.

    Random, since containers may share host name and process ids.
    """
    return path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(4)}.tmp")


def _locked(path: Path, flags: int = 0) -> tuple[int, bool | None]:
    """A descriptor of a file or folder, and whether it is locked; None: no locks there."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        return descriptor, True
    except BlockingIOError:
        return descriptor, False
    except OSError:
        return descriptor, None


def remove_if_abandoned(temporary: Path) -> None:
    """Remove a file or folder named by `temporary_beside`, unless a live process works on it.

    Its process holds a lock. Without visible locks (another host, some file systems) a file is
    abandoned after ten minutes without a change, a folder after a day.
    """
    with suppress(OSError):
        descriptor, could = _locked(temporary, fcntl.LOCK_NB)
        try:
            age_s = time.time() - _newest_change_s(temporary)
            is_surely_free = could and f".{socket.gethostname()}." in temporary.name
            if could is False or not (
                is_surely_free or age_s > (86_400 if temporary.is_dir() else 600)
            ):
                return
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink()
        finally:
            os.close(descriptor)


def _newest_change_s(path: Path) -> float:
    """When `path`, or anything in it, changed last. Raises OSError if it is gone."""
    newest_s = path.stat().st_mtime
    for inside in path.rglob("*"):
        with suppress(OSError):
            newest_s = max(newest_s, inside.stat().st_mtime)
    return newest_s


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left of `folder / name`, or of anything in `folder`."""
    for leftover in folder.glob(f".{'*' if name is None else glob.escape(name)}.*.tmp"):
        remove_if_abandoned(leftover)


_unfinished: set[int] = set()
"""Descriptors of the files that threads of this process write now."""


def _leave_unfinished() -> None:
    """Let a forked process give up the files that its parent is writing."""
    # A loader worker lives for hours: with its descriptor it would keep the lock of a file that was
    # abandoned, and, once the file is replaced or removed, its space on the disk. Not closed: a
    # number that is free could become that of another file, for the copy of the parent's object.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _unfinished:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _unfinished.clear()


os.register_at_fork(after_in_child=_leave_unfinished)


@contextmanager
def temporary_file(path: Path) -> Iterator[BinaryIO]:
    """A new locked file next to `path`, removed at the end of the block unless it was renamed.

    A process that is forked meanwhile does not have it.
    """
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(open(temporary_beside(path), "x+b"))
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # Otherwise another process took it for abandoned before it was locked.
            if os.fstat(file.fileno()).st_nlink:
                break
        _unfinished.add(file.fileno())
        stack.callback(_unfinished.discard, file.fileno())
        try:
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)


def locked_folder(path: Path) -> tuple[Path, int]:
    """A new folder next to `path`, for this user alone, and a descriptor that keeps it locked."""
    while True:
        temporary = temporary_beside(path)
        temporary.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            descriptor, _ = _locked(temporary)
            # Otherwise another process took it for abandoned before it was locked.
            if temporary.exists():
                return temporary, descriptor
            os.close(descriptor)


def private_folder(path: Path) -> Path:
    """Make the folder `path`, whose name others can guess, for this user alone; return it.

    Raises PermissionError if something of another user, or a link, is there.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        reason = "it is not a folder of this user's: remove it, or set TMPDIR"
        raise PermissionError(errno.EPERM, reason, str(path))
    path.chmod(0o700)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end of the block, unless it raises."""
    try:
        with temporary_file(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the data
            os.replace(file.name, path)
    except OSError as error:
        if error.filename is None:
            # a failed write ("No space left on device") does not say of which file
            error.filename = str(path)
        raise


@contextmanager
def told(path: Path, flag: str = "") -> Iterator[None]:
    """Turn what the system says about writing the user's `path` into a ValueError of one line.

    flag: of the command line, by which the path was given, with a space behind it.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{flag}{path}: cannot be written ({error.strerror}): choose another place, or free"
            " some space"
        ) from None


def check_place(path: Path, flag: str = "") -> None:
    """Raise ValueError as `told` if `path` cannot be written, before the work that it is for."""
    with told(path, flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with temporary_file(path):
            pass


def link_to(name: str, path: Path) -> None:
    """Make `path` a symbolic link to `name` in its folder, in place of what was there."""
    if not os.path.lexists(path):
        path.symlink_to(name)
    elif not (path.is_symlink() and os.readlink(path) == name):
        temporary = temporary_beside(path)
        temporary.symlink_to(name)
        os.replace(temporary, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON to `path`, completely or not at all."""
    with replacing(path) as file:
        file.write(json_bytes(content))


def json_bytes(content: dict[str, Any]) -> bytes:
    """`content` in the format of all our JSON files."""
    # A name that is not UTF-8 holds lone surrogates: backslashreplace writes them as JSON's own
    # escapes.
    return (
        json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
        + b"\n"
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the JSON file `path`; None if there is no such file.

    Raises ShardError for anything else, or an unreadable file.
    """
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def parse_json(content: bytes, where: Path | str) -> dict[str, Any]:
    """The JSON object in `content`, read from `where`. Raises ShardError for anything else."""
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise ShardError(
            f"{where}: not valid JSON ({error}); restore it from its source"
        ) from error
    if not isinstance(parsed, dict):
        raise ShardError(
            f"{where}: expected a JSON object, found {type(parsed).__name__}; restore it from its"
            " source"
        )
    return parsed


def flush(path: Path) -> None:
    """Force a file, or the entries of a folder, to the disk.

    Without it a renamed file may be empty after a power cut.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
