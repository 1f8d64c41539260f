"""Download files: complete, checked, and continued after an interruption.

Bytes go to `<name>.part`; `vit.data.storage.http` requests the rest when a connection is lost. The
result is compared with its md5; only then the file gets its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.errors import PrepError, readable
from data_prep.write.jobs import count_one
from vit.data.storage.http import Refused, WebFile, WebFolder
from vit.data.storage.http_request import on_the_web
from vit.data.storage.retry import RetryPolicy
from vit.system.files import parse_json
from vit.system.meter import Meter
from vit.system.redact import shown


def download(url: str, path: Path, md5: str) -> None:
    """Download `url` (http or https) to `path`, with progress on stderr; md5: in hex.

    An existing file with this md5 is kept, and what an earlier call left in `<path>.part` is
    continued. Raises PrepError: no such file, a wrong md5; ShardError: an unreachable server.
    """
    if not on_the_web(url):
        raise PrepError(f"{shown(url)}: expected an address that begins with http:// or https://")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with open(part, "a+b") as file:
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # of several processes one fetches the file
            if path.exists():
                if (found := md5_of(path)) != md5:
                    raise PrepError(
                        f"{path}: md5 {found}, expected {md5}; truncated, or another file: remove"
                        f" it, and it is downloaded from {shown(url)}"
                    )
            else:
                _fetch(url, file)
                if (found := md5_of(part)) != md5:
                    size = part.stat().st_size
                    part.unlink()
                    raise PrepError(
                        f"{shown(url)}: md5 {found} ({size:,} bytes), expected {md5}: the file"
                        " there is another one, or was changed on its way (a proxy's page?);"
                        " nothing was kept. Try again, or fetch it from elsewhere and put it at"
                        f" {path}"
                    )
                os.replace(part, path)
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()
    print(f"{path}: there, md5 verified", file=sys.stderr, flush=True)


def _fetch(url: str, file: BinaryIO) -> None:
    """Append to `file` what it lacks."""
    name = Path(file.name).name.removesuffix(".part")
    have = file.seek(0, os.SEEK_END)
    try:
        with WebFile(url, "", RetryPolicy(), start=have) as source:
            total = max(source.open().size - have, 0) // 1_000_000
            with Meter(f"downloading {name}", total, "MB") as meter:
                while piece := source.read1():
                    file.write(piece)
                    meter.update((source.at - have) // 1_000_000)
    except FileNotFoundError as error:
        raise PrepError(f"{shown(url)}: {error.strerror}; correct the address") from error
    file.flush()
    os.fsync(file.fileno())


def md5_of(path: Path) -> str:
    """The md5 of a file, in hex, with progress."""
    digest = hashlib.md5(usedforsecurity=False)
    with (
        readable(path),
        open(path, "rb", buffering=0) as file,
        Meter(f"md5 of {path.name}", path.stat().st_size >> 20, "MiB") as meter,
    ):
        while data := file.read(1 << 23):
            digest.update(data)
            meter.update(file.tell() >> 20)
    return digest.hexdigest()


class WebShards(WebFolder):
    """The files at `<url>/<name>`, for functions that `run_jobs` runs; HTTP cannot list them."""

    def size(self, name: str) -> int:
        """Bytes of a file, -1 if the server does not say. Raises PrepError if it does not exist."""
        try:
            return self.stat(name, parts_only=False).size
        except FileNotFoundError as error:
            raise PrepError(f"{self}/{name}: {error.strerror}") from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, None without a file. Raises ShardError for other content."""
        try:
            with WebFile(self.url, name, self.retry) as file:
                return parse_json(b"".join(iter(file.read1, b"")), f"{self}/{name}")
        except FileNotFoundError:
            return None
        except Refused as error:
            # object stores answer 403 for a missing file to those who may not list
            if error.status == 403:
                return None
            raise

    def fetch(self, name: str, folder: Path) -> Path:
        """A file, brought to `folder`. Raises PrepError if it does not exist."""
        try:
            with (
                WebFile(self.url, name, self.retry, while_waiting=count_one) as source,
                open(folder / name, "wb") as file,
            ):
                while piece := source.read1():
                    file.write(piece)
                    count_one()
        except FileNotFoundError as error:
            raise PrepError(f"{self}/{name}: {error.strerror}; correct the address") from error
        return folder / name
