"""Files whole or not at all, and how a damaged one is told. Free of torch.

The data's story: what is written gets its name when it is complete and on the disk; a reader sees the old file or the new one.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


class ShardError(ValueError):
    """Shards, index or `_info.json` are not as they should be; says which file, what was expected and what to do."""


def unreadable(path: Path, error: OSError) -> ShardError:
    """What to tell when the system refuses `path`."""
    return ShardError(f"{path}: cannot be read ({error.strerror}); check its permissions and its disk")


def temporary_beside(path: Path) -> Path:
    """A name beside `path` for what is being made; it tells host and process, so several can make the same thing at once."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def is_being_written(temporary: Path) -> bool:
    """Whether a live process has this file or folder, named by `temporary_beside`: it may finish, its bytes are the same.

    Of this host the process id in the name tells; of another one, whether a file has changed in the last ten minutes, or anything in a
    folder in the last day.
    """
    try:
        host, process = temporary.name.removesuffix(".tmp").rsplit(".", 1)
        if not host.endswith(f".{socket.gethostname()}"):
            return time.time() - _newest_change_s(temporary) < (86_400 if temporary.is_dir() else 600)
        os.kill(int(process), 0)
    except PermissionError:
        return True  # alive, and somebody else's
    except (OSError, ValueError):
        return False
    return True


def _newest_change_s(path: Path) -> float:
    """When `path`, or anything in it, changed last. Raises OSError if it is gone; what vanishes inside meanwhile is passed over."""
    newest_s = path.stat().st_mtime
    for inside in path.rglob("*"):
        with suppress(OSError):
            newest_s = max(newest_s, inside.stat().st_mtime)
    return newest_s


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left of their attempts at `folder / name`, or at anything in `folder`."""
    for leftover in folder.glob(f".{'*' if name is None else glob.escape(name)}.*.tmp"):
        if not is_being_written(leftover):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its place when the block ends well and vanishes when it does not."""
    temporary = temporary_beside(path)
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the data
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write ("No space left on device") does not say of which file
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON to `path`, whole or not at all."""
    with replacing(path) as file:
        # A name that is no UTF-8 holds lone surrogates: backslashreplace writes them as JSON's own escapes.
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the JSON file `path`, or None if there is no such file. Raises ShardError if it is something else or unreadable."""
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def parse_json(content: bytes, where: Path | str) -> dict[str, Any]:
    """The JSON object in `content`, which lies at `where`. Raises ShardError if it is something else."""
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise ShardError(f"{where}: not valid JSON ({error}); restore it from its source") from error
    if not isinstance(parsed, dict):
        raise ShardError(f"{where}: expected a JSON object, found {type(parsed).__name__}; restore it from its source")
    return parsed
