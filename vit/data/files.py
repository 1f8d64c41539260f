"""Files whole or not at all, and how a damaged one is told. Free of torch.

The data's story: what is written gets its name when it is complete and on the disk; a reader sees the old file or the new one.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class ShardError(ValueError):
    """Shards, index or `_info.json` are not as they should be; says which file, what was expected and what to do."""


def unreadable(path: Path, error: OSError) -> ShardError:
    """What to tell when the system refuses `path`."""
    return ShardError(f"{path}: cannot be read ({error.strerror}); check its permissions and its disk")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its place when the block ends well and vanishes when it does not.

    The name carries host and process, so ranks that rebuild the same index at once do not write into each other's file.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
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
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the JSON file `path`, or None if there is no such file. Raises ShardError if it is something else or unreadable."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise ShardError(f"{path}: not valid JSON ({error}); restore it from its source") from error
    if not isinstance(content, dict):
        raise ShardError(f"{path}: expected a JSON object, found {type(content).__name__}; restore it from its source")
    return content
