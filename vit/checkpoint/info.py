"""`checkpoint.json`: what a checkpoint consists of, and whether all of that is as it was written.

It has size and sha256 of each file beside it, and one of itself, so that no flipped bit becomes
another step, another config or other weights. No torch here: what copies runs reads it, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vit.checkpoint.run_folder import INFO_FILE
from vit.system.meter import Meter

SEAL = "sha256_of_the_rest"
"""Key of the hash of all other values; the first checkpoints had none."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing or not as it was written; one line for people."""


class UnreadableCheckpoint(DamagedCheckpoint):
    """The system refuses to read a checkpoint, which may be whole; one line for people."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what the system says about the files in `folder` into an error of this module."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DamagedCheckpoint(f"{folder}: a file is missing or damaged") from None
    except OSError as error:
        raise UnreadableCheckpoint(
            f"{error.filename or folder}: cannot be read ({error.strerror}); check its permissions"
            " and its disk. Nothing was changed"
        ) from None


def sealed(info: dict[str, Any]) -> dict[str, Any]:
    """Return `info` with the hash of its values."""
    plain = json.loads(json.dumps(info))  # as it will be read
    return {**plain, SEAL: _digest(plain)}


def read_info_file(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`.

    Raises DamagedCheckpoint if it is not as it was written, or is another program's, and
    UnreadableCheckpoint.
    """
    try:
        with reading(folder):
            content = (folder / INFO_FILE).read_bytes()
        info = json.loads(content)
        info["format_version"] = int(info["format_version"])
        info["step"], info["config"], info["facts"], dict(info["files"])  # what readers rely on
    except UnreadableCheckpoint:
        raise
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpoint(
            f"{folder}: {INFO_FILE} is missing or damaged, so this is not a checkpoint of this"
            " project"
        ) from None
    if info.get(SEAL, _digest(info)) != _digest(info):
        raise DamagedCheckpoint(
            f"{folder / INFO_FILE}: its content does not match the sha256 in it: it is damaged"
        )
    return info


def checked_info(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json` after a look at the files that it names; raises what
    `read_info_file` and `check_files` raise."""
    info = read_info_file(folder)
    check_files(folder, info)
    return info


def check_files(folder: Path, info: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint if a file that `info` names has another size or hash, and
    UnreadableCheckpoint if it cannot be read."""
    for name, expected in info["files"].items():
        path = folder / name
        with reading(folder):
            size = path.stat().st_size if path.is_file() else 0
        if size != expected["bytes"]:
            raise DamagedCheckpoint(
                f"{path}: has {size:,} bytes, {INFO_FILE} says {expected['bytes']:,}: it is"
                " truncated or missing"
            )
        with reading(folder), Meter(f"checking {path}", size >> 20, "MiB") as meter:
            found = _sha256(path, meter)
        if found != expected["sha256"]:
            raise DamagedCheckpoint(
                f"{path}: its content does not match the sha256 in {INFO_FILE}: it is damaged"
            )


def _digest(info: dict[str, Any]) -> str:
    values = {key: value for key, value in info.items() if key != SEAL}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path, meter: Meter) -> str:
    """Return the hash of a file; `meter` counts MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**24):
            digest.update(chunk)
            meter.update(file.tell() >> 20)
    return digest.hexdigest()
