"""Download files: complete, checked, and continued after an interruption.

Bytes go to `<name>.part`; `vit.data.storage.http` requests the rest when a connection is lost. The
result is compared with the size that the server gave and with the md5 if it is known; only then the
file gets its name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.errors import PrepError
from data_prep.write.jobs import count_one
from vit.data.storage.http import Refused, WebFile, WebFolder
from vit.data.storage.http_request import on_the_web
from vit.data.storage.retry import RetryPolicy
from vit.system.files import parse_json
from vit.system.meter import Meter
from vit.system.redact import shown
from vit.system.urls import address

MOST_VERSIONS = 5
"""How often a file may be replaced on the server while it is fetched."""


def download(
    url: str,
    path: Path,
    md5: str | None = None,
    *,
    name: str = "",
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Download `url` (http or https) to `path`, with progress on stderr.

    name: of the file, if `url` is its folder (whose login is used). md5: in hex. An existing file
    is kept if its md5 is this one, or none is known. What an earlier call left in `<path>.part` is
    continued only if the md5 is known, as the file at `url` may have changed. on_bytes: called with
    the number of bytes of each piece, and 0 in pauses, instead of a progress line; may raise to
    stop.

    Raises PrepError: no such file, no such host, a wrong md5, disk too small, an unreachable
    server. Ctrl-C leaves the part.
    """
    where = shown(address(url, name))
    if not on_the_web(url):
        raise PrepError(f"{where}: expected an address that begins with http:// or https://")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with _locked(part, path) as file:
        if path.exists():
            _check_existing(path, md5, where)
            part.unlink(missing_ok=True)
            if on_bytes is None:
                _say(f"{path}: there already{', md5 verified' if md5 else ''}")
            return
        start_s = time.monotonic()
        earlier = file.seek(0, os.SEEK_END) if md5 else 0
        if earlier:
            _say(f"{part.name}: continuing at {_mb(earlier)}")
        _fetch(url, name, file, earlier, on_bytes)
        found = _md5(part) if md5 else None
        if found != md5 and earlier:
            _say(f"{part.name}: what an earlier call left does not fit; starting again")
            _fetch(url, name, file, 0, on_bytes)
            found = _md5(part)
        if found != md5:
            size = part.stat().st_size
            part.unlink()
            raise PrepError(
                f"{where}: md5 {found} ({size:,} bytes), expected {md5}: the file there is another"
                " one, or was changed on its way (a proxy's page?); nothing was kept. Try again,"
                f" or fetch it from elsewhere and put it at {path}"
            )
        os.fsync(file.fileno())
        os.replace(part, path)
        elapsed_s = time.monotonic() - start_s
        if on_bytes is None:
            _say(
                f"{path}: {_mb(path.stat().st_size)} in {elapsed_s:.1f}"
                f" s{', md5 verified' if md5 else ''}"
            )


@contextmanager
def _locked(part: Path, path: Path) -> Iterator[BinaryIO]:
    """The part, opened and locked: of several processes one fetches the file, the others wait."""
    while True:
        file = open(part, "a+b")  # noqa: SIM115 (closed below, or here when another process renamed or removed the part)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{path}: another process is downloading it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        if part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat()):
            break
        file.close()
    try:
        yield file
    except OSError as error:
        error.filename = error.filename or str(part)  # the error of a full disk has none
        raise
    finally:
        with suppress(OSError):  # a full disk is reported already
            file.flush()
        if part.exists() and not part.stat().st_size:
            part.unlink()  # before the lock is released
        file.close()


def _check_existing(path: Path, md5: str | None, where: str) -> None:
    if md5 and (found := _md5(path)) != md5:
        raise PrepError(
            f"{path}: md5 {found}, expected {md5}; truncated, or another file: remove it, and it is"
            f" downloaded from {where}"
        )


def _fetch(
    url: str, name: str, file: BinaryIO, have: int, on_bytes: Callable[[int], None] | None
) -> None:
    """Complete `file`, which has the first `have` bytes. Raises PrepError or ShardError."""
    shown_name = Path(file.name).name.removesuffix(".part")
    where = shown(address(url, name))
    for _ in range(MOST_VERSIONS):
        file.truncate(have)
        try:
            with WebFile(
                url,
                name,
                RetryPolicy(),
                start=have,
                while_waiting=on_bytes and partial(on_bytes, 0),
            ) as source:
                size = source.open().size
                if 0 <= size < have:
                    have = 0
                    continue
                _check_disk(file, size - have)
                with Meter(
                    f"downloading {shown_name}",
                    max(size - have, 0) // 1_000_000,
                    "MB",
                    shown=on_bytes is None,
                ) as meter:
                    first = source.at
                    while piece := source.read1():
                        file.write(piece)
                        if on_bytes:
                            on_bytes(len(piece))
                        meter.update((source.at - first) // 1_000_000)
            file.flush()
            return
        except FileNotFoundError as error:
            raise PrepError(f"{where}: {error.strerror}; correct the address") from error
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            _say(f"{where}: {error.strerror}; starting again")
            have = 0
    raise PrepError(
        f"{where}: replaced repeatedly while it is fetched; try again when it no longer changes"
    )


def _check_disk(file: BinaryIO, missing: int) -> None:
    free = shutil.disk_usage(Path(file.name).parent).free
    if missing > free:
        raise PrepError(
            f"{file.name}: {_mb(missing)} are still to come and {_mb(free)} are free on this disk;"
            " free some space"
        )


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
        """A file, brought to `folder`."""
        download(self.url, folder / name, name=name, on_bytes=count_one)
        return folder / name
