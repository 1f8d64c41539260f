"""Read and check `checkpoint.json`, which stores the size and sha256 of each file of a checkpoint.

It also stores a hash of its own content. A flipped bit therefore cannot change the step, the config
or the weights unnoticed. This module does not import torch, because programs that copy runs use it.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vit.system.meter import Meter

INFO_FILE = "checkpoint.json"
"""The file written last in each checkpoint folder. A checkpoint folder that contains this file is
complete."""
SEAL = "sha256_of_the_rest"
"""The key in `checkpoint.json` for a hash of all other values."""


class CheckpointError(ValueError):
    """The error for a checkpoint that is damaged, or cannot be read or written. The message is one
    line."""


class UnreadableCheckpoint(CheckpointError):
    """The error for a checkpoint that cannot be read but may be intact. The message is one line."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Convert an OSError about files in `folder` to a CheckpointError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(f"{folder}: a file is missing or damaged") from None
    except OSError as error:
        raise UnreadableCheckpoint(
            f"{error.filename or folder}: cannot be read ({error.strerror}); check its permissions"
            " and its disk. Nothing was changed"
        ) from None


def sealed(info: dict[str, Any]) -> dict[str, Any]:
    """Return `info` with a hash of its values."""
    plain = json.loads(json.dumps(info))  # tuples become lists, as in the file
    return {**plain, SEAL: _digest(plain)}


def read_info_file(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`.

    Raises CheckpointError if the file has changed or another program wrote it, and
    UnreadableCheckpoint if the file cannot be read.
    """
    try:
        with reading(folder):
            content = (folder / INFO_FILE).read_bytes()
        info = json.loads(content)
        info["format_version"] = int(info["format_version"])
        # Raise an error immediately if a value that callers need is missing.
        info["step"], info["config"], info["facts"], dict(info["files"])
    except UnreadableCheckpoint:
        raise
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder}: {INFO_FILE} is missing or damaged, so this is not a checkpoint of this"
            " project"
        ) from None

    if info.get(SEAL) != _digest(info):
        raise CheckpointError(
            f"{folder / INFO_FILE}: its content does not match the sha256 stored in it: the file is"
            " damaged"
        )

    return info


def checked_info(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json` after checking the files that it lists. Raises the
    errors of `read_info_file` and `check_files`."""
    info = read_info_file(folder)
    check_files(folder, info)
    return info


def check_files(folder: Path, info: dict[str, Any]) -> None:
    """Raise CheckpointError if the size or hash of a file differs from `info`, and
    UnreadableCheckpoint if a file cannot be read."""
    for name, expected in info["files"].items():
        path = folder / name
        with reading(folder):
            size = path.stat().st_size if path.is_file() else 0
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, but {INFO_FILE} records {expected['bytes']:,}: the"
                " file is truncated or missing"
            )

        with reading(folder), Meter(f"checking {path}", size >> 20, "MiB") as meter:
            sha256 = _sha256(path, meter)
        if sha256 != expected["sha256"]:
            raise CheckpointError(
                f"{path}: its content does not match the sha256 in {INFO_FILE}: the file is damaged"
            )


def _digest(info: dict[str, Any]) -> str:
    values = {key: value for key, value in info.items() if key != SEAL}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path, meter: Meter) -> str:
    """Return the sha256 of a file. meter: displays the progress in MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**24):
            digest.update(chunk)
            meter.update(file.tell() >> 20)
    return digest.hexdigest()
