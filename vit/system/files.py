"""Write files atomically, and define errors for damaged files.

A file gets its final name only after it has been written completely and flushed to disk. A reader
therefore sees either the old file or the new one.
"""

import csv
import errno
import fcntl
import glob
import hashlib
import io
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
"""The error numbers for a full disk: no space, an exhausted quota, a file-size limit."""
PICTURE_FORMATS = ("png", "pdf", "svg")
"""The supported picture suffixes. `pdf` and `svg` are vector formats for papers."""


class ShardError(ValueError):
    """An error for a damaged or missing shard, index or `_info.json`. The message has a remedy."""


class WeightsError(ValueError):
    """An error for weights that cannot be read or do not fit the model."""


def unreadable(path: Path, error: OSError) -> ShardError:
    """Return the error for a `path` that the system cannot open."""
    return ShardError(
        f"{path}: cannot be read ({error.strerror}); check its permissions and its disk"
    )


def temporary_beside(path: Path) -> Path:
    """Return a unique path next to `path` for an unfinished file.

    The name is random because two containers may have the same host names and process ids.
    """
    return path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(4)}.tmp")


def _locked(path: Path, flags: int = 0) -> tuple[int, bool | None]:
    """Open and try to lock `path`. Return the descriptor, and whether the file is locked (None if
    the file system has no locks)."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        return descriptor, True
    except BlockingIOError:
        return descriptor, False
    except OSError:
        return descriptor, None


def remove_if_abandoned(temporary: Path) -> None:
    """Remove a file or folder named by `temporary_beside`, unless a live process is writing it.

    A live process holds a lock. If locks are not visible (from another host, on some file systems),
    a file counts as abandoned after ten minutes without a change, and a folder after a day.
    """
    with suppress(OSError):
        descriptor, is_locked = _locked(temporary, fcntl.LOCK_NB)
        try:
            age_s = time.time() - _newest_change_s(temporary)
            is_old = age_s > (86_400 if temporary.is_dir() else 600)
            is_surely_free = is_locked and f".{socket.gethostname()}." in temporary.name
            is_abandoned = is_locked is not False and (is_surely_free or is_old)
            if not is_abandoned:
                return

            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink()
        finally:
            os.close(descriptor)


def _newest_change_s(path: Path) -> float:
    """Return the time of the last change of `path` or of anything in it.

    Raises OSError if `path` is gone.
    """
    newest_s = path.stat().st_mtime
    for inside in path.rglob("*"):
        with suppress(OSError):
            newest_s = max(newest_s, inside.stat().st_mtime)
    return newest_s


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove unfinished files of killed processes from `folder`, optionally only those of the file
    `name`."""
    for leftover in folder.glob(f".{'*' if name is None else glob.escape(name)}.*.tmp"):
        remove_if_abandoned(leftover)


_unfinished: set[int] = set()
"""The descriptors of files that threads of this process are writing."""


def _leave_unfinished() -> None:
    """Make a forked process release the files that its parent is writing."""
    # A loader worker runs for hours. During this time, its inherited descriptor would keep an
    # abandoned file locked and a removed file on disk. Replace the descriptors instead of closing
    # them. Otherwise the worker's copy of the file object could write to the next file with the
    # same descriptor number.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _unfinished:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _unfinished.clear()


os.register_at_fork(after_in_child=_leave_unfinished)


@contextmanager
def temporary_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new locked file next to `path`. Remove it after the block unless it was renamed.

    A process forked during the block does not inherit the file.
    """
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(open(temporary_beside(path), "x+b"))
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # The file has no links if another process removed it as abandoned before it was locked.
            if os.fstat(file.fileno()).st_nlink:
                break

        _unfinished.add(file.fileno())
        stack.callback(_unfinished.discard, file.fileno())
        try:
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)


def locked_folder(path: Path) -> tuple[Path, int]:
    """Create and lock a folder next to `path` that only this user can read.

    Returns the folder, and the descriptor that holds the lock.
    """
    while True:
        temporary = temporary_beside(path)
        temporary.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            descriptor, _ = _locked(temporary)
            # The folder is missing if another process removed it as abandoned before it was locked.
            if temporary.exists():
                return temporary, descriptor
            os.close(descriptor)


def private_folder(path: Path) -> Path:
    """Create the folder `path` so that only this user can read it. Return `path`.

    Another user could create this folder first. Raises PermissionError if `path` is a link or
    belongs to another user.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)

    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            "the folder does not belong to this user: remove it, or set TMPDIR",
            str(path),
        )

    path.chmod(0o700)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` after the block, unless the block raises."""
    try:
        with temporary_file(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # Write the data to disk before the rename.
            os.replace(file.name, path)
    except OSError as error:
        if error.filename is None:
            # Write errors ("No space left on device") do not name the file.
            error.filename = str(path)
        raise


@contextmanager
def csv_writer(path: Path, flag: str = "", line_end: str = "\r\n") -> Iterator[Any]:
    """Yield a writer for a CSV file that replaces `path` after the block, unless the block raises.

    flag: see `report_write_errors`, whose ValueError is raised if the file cannot be written.
    """
    with report_write_errors(path, flag), replacing(path) as file:
        # surrogateescape preserves the original bytes of names that are not UTF-8.
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        yield csv.writer(text, lineterminator=line_end)
        text.flush()
        text.detach()


@contextmanager
def report_write_errors(path: Path, flag: str = "") -> Iterator[None]:
    """Convert an OSError about writing the user's `path` to a one-line ValueError.

    flag: the command-line flag for the path, followed by a space.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{flag}{path}: cannot be written ({error.strerror}): choose another path, or free some"
            " space"
        ) from None


def check_place(path: Path, flag: str = "") -> None:
    """Raise ValueError if `path` cannot be written. Call this before computing the result."""
    with report_write_errors(path, flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with temporary_file(path):
            pass


def link_to(name: str, path: Path) -> None:
    """Make `path` a symbolic link to `name` in the same folder, replacing any file."""
    if not os.path.lexists(path):
        path.symlink_to(name)
    elif not (path.is_symlink() and os.readlink(path) == name):
        temporary = temporary_beside(path)
        temporary.symlink_to(name)
        os.replace(temporary, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Atomically write `content` as JSON to `path`."""
    with replacing(path) as file:
        file.write(json_bytes(content))


def json_bytes(content: dict[str, Any]) -> bytes:
    """Return `content` in the format of all JSON files of this project."""
    # Names that are not UTF-8 contain lone surrogates, which backslashreplace writes as JSON
    # escapes.
    return (
        json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
        + b"\n"
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in the JSON file `path`, or None if the file does not exist.

    Raises ShardError for any other content and for an unreadable file.
    """
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def parse_json(content: bytes, source: Path | str) -> dict[str, Any]:
    """Return the JSON object in `content`. For any other content, raises ShardError, which names
    `source`."""
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise ShardError(
            f"{source}: not valid JSON ({error}); restore it from its source"
        ) from error

    if not isinstance(parsed, dict):
        raise ShardError(
            f"{source}: expected a JSON object, found {type(parsed).__name__}; restore it from its"
            " source"
        )
    return parsed


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk.

    Otherwise a renamed file may be empty after a power failure.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def picture_format(picture: Path) -> str:
    """Return the format that the suffix of `picture` selects. Raises ValueError for other
    suffixes."""
    form = picture.suffix.lower().removeprefix(".")
    if form not in PICTURE_FORMATS:
        raise ValueError(f"{picture}: expected one of the suffixes {', '.join(PICTURE_FORMATS)}")
    return form
