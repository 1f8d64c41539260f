"""Files from a web address: whole, checked, and continued after a cut. Free of torch.

The data's story: bytes go to `<name>.part`; when the connection is lost the rest is asked for by a Range request, and again after a growing
pause. What has come is compared with the size that the server told and with the md5 that is known; only then the file gets its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from data_prep.jobs import PrepError, count_one
from vit.data.files import parse_json
from vit.progress import Meter

PAUSES_S = (1.0, 4.0, 15.0, 60.0)
"""Waited before each further attempt; an attempt that brought something starts them anew."""
TIMEOUT_S = 60.0
PASSING = {408, 425, 429, *range(500, 600)} - {501, 505}
"""Status codes that a later attempt may not meet."""
PIECE_BYTES = 1 << 20
MISSING = (403, 404, 410)
"""What servers answer for a file that is not there; object stores say 403 to those who may not list."""
LOST = (OSError, http.client.HTTPException)  # URLError, time-outs and resets are OSErrors
T = TypeVar("T")


class _Lost(Exception):
    """The connection failed, or the server is busy; another attempt may do better."""


def download(url: str, path: Path, md5: str | None = None, *, on_bytes: Callable[[int], None] | None = None) -> None:
    """Bring `url` (http or https) to `path`, with its progress on stderr and a line when it is there.

    md5: in hex. A file that is there already is kept if its md5 is this one, or none is known. What an earlier call left in `<path>.part`
    is continued if the md5 is known: without it nobody would notice that the file at `url` is another one by now.
    on_bytes: is told the number of each piece's bytes, and 0 in pauses, instead of a progress line; may raise to stop.

    Raises PrepError: no such file, no such host, another md5, disk too small, a server that stays away. Ctrl-C leaves the part.
    """
    if not re.match(r"https?://[^/]", url):
        raise PrepError(f"{url}: expected an address that begins with http:// or https://")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with _locked(part, path) as file:
        if path.exists():
            _check_existing(path, md5, url)
            part.unlink(missing_ok=True)
            if on_bytes is None:
                _say(f"{path}: there already{', md5 verified' if md5 else ''}")
            return
        start_s = time.monotonic()
        earlier = file.seek(0, os.SEEK_END) if md5 else 0
        if earlier:
            _say(f"{part.name}: continuing at {_mb(earlier)}")
        _Transfer(url, file, on_bytes).run(earlier)
        found = _md5(part) if md5 else None
        if found != md5 and earlier:
            _say(f"{part.name}: what an earlier call left does not fit; starting again")
            _Transfer(url, file, on_bytes).run(0)
            found = _md5(part)
        if found != md5:
            size = part.stat().st_size
            part.unlink()
            raise PrepError(
                f"{url}: md5 {found} ({size:,} bytes), expected {md5}: the file there is another one, or was changed on its way (a proxy's "
                f"page?); nothing was kept. Try again, or fetch it from elsewhere and put it at {path}"
            )
        os.fsync(file.fileno())
        os.replace(part, path)
        elapsed_s = time.monotonic() - start_s
        if on_bytes is None:
            _say(f"{path}: {_mb(path.stat().st_size)} in {elapsed_s:.1f} s{', md5 verified' if md5 else ''}")


@contextmanager
def _locked(part: Path, path: Path) -> Iterator[BinaryIO]:
    """The part, opened, while no other process has it: of several that want the same file one fetches it, and the others wait."""
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
        error.filename = error.filename or str(part)  # a full disk does not say of which file
        raise
    finally:
        with suppress(OSError):  # a full disk has been told
            file.flush()
        if part.exists() and not part.stat().st_size:
            part.unlink()  # before the lock goes
        file.close()


def _check_existing(path: Path, md5: str | None, url: str) -> None:
    if md5 and (found := _md5(path)) != md5:
        raise PrepError(f"{path}: md5 {found}, expected {md5}; truncated, or another file: remove it, and it is downloaded from {url}")


class _Transfer:
    """The bytes of one address into a file, over as many connections as it takes."""

    def __init__(self, url: str, file: BinaryIO, on_bytes: Callable[[int], None] | None):
        self.url, self.file, self.on_bytes = url, file, on_bytes
        self.have = 0
        self.total: int | None = None
        self.tag: str | None = None
        """The server's name for this version of the file: the rest of another version is not wanted."""

    def run(self, have: int) -> None:
        """Fetch all from byte `have` on. Raises PrepError when it cannot be had."""
        self._cut_to(have)
        _patiently(self.url, self._fetch_rest, lambda: self.have, self.on_bytes)
        self.file.flush()

    def _fetch_rest(self) -> None:
        rest = {"Range": f"bytes={self.have}-"} if self.have else {}
        if rest and self.tag:
            rest["If-Range"] = self.tag
        try:
            response = _open(self.url, **rest)
        except _NothingLeft as error:
            if error.total != self.have:
                self._cut_to(0)
                raise _Lost(f"the file there is of {error.total} bytes, less than had come; starting again") from error
            return
        with response:
            self._agree(response)
            self._check_disk()
            with self._meter() as meter:
                first = self.have
                for piece in _pieces(response):
                    self.file.write(piece)
                    self.have += len(piece)
                    if self.on_bytes:
                        self.on_bytes(len(piece))
                    meter.update((self.have - first) // 1_000_000)
        if self.total is not None and self.have < self.total:
            raise _Lost(f"connection lost at {_mb(self.have)} of {_mb(self.total)}")

    def _agree(self, response: Any) -> None:
        """Go on where the server goes on, which may be the beginning. Sets `total` and `tag`."""
        told = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if response.status == 206:
            total = int(told[2]) if told and told[2].isdecimal() else None
            if not told or int(told[1]) != self.have or (self.total is not None and total != self.total):
                self._cut_to(0)
                raise _Lost(f"another part than the one asked for ({response.headers.get('Content-Range')}), starting again")
            self.total = total
        else:
            if self.have:
                _say(f"{self.url}: the server cannot continue a download, or the file has changed; starting again")
            self._cut_to(0)
            length = response.headers.get("Content-Length", "")
            self.total = int(length) if length.isdecimal() else None
        tag = response.headers.get("ETag", "")
        self.tag = tag if tag.startswith('"') else response.headers.get("Last-Modified")  # a weak tag (W/) does not promise equal bytes

    def _check_disk(self) -> None:
        missing, free = (self.total or 0) - self.have, shutil.disk_usage(Path(self.file.name).parent).free
        if missing > free:
            raise PrepError(f"{self.file.name}: {_mb(missing)} are still to come and {_mb(free)} are free on this disk; make room")

    def _cut_to(self, size: int) -> None:
        self.file.truncate(size)
        self.have = size
        self.total = self.total if size else None

    def _meter(self) -> Meter:
        rest = ((self.total or 0) - self.have) // 1_000_000
        return Meter(f"downloading {Path(self.file.name).name.removesuffix('.part')}", rest, "MB", shown=self.on_bytes is None)


class _NothingLeft(Exception):
    """Status 416: there are no bytes from there on. `total`: bytes of the file, -1 if untold."""

    def __init__(self, total: int):
        self.total = total


class _Refused(PrepError):
    """The server answers with a `status` that another attempt would meet, too."""

    status: int


def _patiently(url: str, attempt: Callable[[], T], progress: Callable[[], int] = int, on_bytes: Callable[[int], None] | None = None) -> T:
    """The result of `attempt`, repeated while it raises _Lost. `progress` grows when an attempt brought something."""
    pauses_s = list(PAUSES_S)
    while True:
        before = progress()
        try:
            return attempt()
        except _Lost as error:
            if progress() > before:
                pauses_s = list(PAUSES_S)
            if not pauses_s:
                text = f"{url}: {error}, {1 + len(PAUSES_S)} times in a row"
                raise PrepError(f"{text}; check the address and the network (a proxy?), the same command continues") from error
            _say(f"{url}: {error}; again in {pauses_s[0]:g} s")
            resume_s = time.monotonic() + pauses_s.pop(0)
            while (left_s := resume_s - time.monotonic()) > 0:
                time.sleep(min(left_s, 0.2))
                if on_bytes:
                    on_bytes(0)  # it may want to stop


def _open(url: str, method: str = "GET", **headers: str) -> Any:
    """The response. Raises _Refused where another attempt would end the same way, _Lost where it may not, _NothingLeft."""
    headers = {"User-Agent": "vit data_prep", "Accept-Encoding": "identity", **headers}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:
                told = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
                raise _NothingLeft(int(told[1]) if told else -1) from error
            if error.code in PASSING:
                raise _Lost(f"the server answers {error.code} {error.reason}") from error
            hint = "it wants a login, or there is no such file" if error.code in (401, 403) else "correct the address"
            refused = _Refused(f"{url}: the server answers {error.code} {error.reason}; {hint}")
            refused.status = error.code
            raise refused from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise PrepError(f"{url}: {error.reason}; is the clock right, are the CA certificates installed?") from error
        raise _Lost(f"cannot be reached ({error.reason})") from error
    except LOST as error:
        raise _Lost(f"cannot be reached ({error or type(error).__name__})") from error


def _pieces(response: Any) -> Iterator[bytes]:
    """The response's bytes. Raises _Lost when they end too early and that can be told here."""
    while True:
        try:
            piece = response.read1(PIECE_BYTES)
        except LOST as error:
            raise _Lost(f"connection lost ({type(error).__name__})") from error
        if not piece:
            return
        yield piece


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class WebFolder(NamedTuple):
    """What is at `<url>/<name>`. There is no list of names: nothing like a folder is known to HTTP."""

    url: str

    def __str__(self) -> str:
        return self.url

    def size(self, name: str) -> int:
        """Bytes of a file, -1 if the server does not tell. Raises PrepError if it is not there."""
        url = f"{self.url}/{name}"
        try:
            with _patiently(url, lambda: _open(url, "HEAD")) as response:
                return int(response.headers.get("Content-Length", -1))
        except _Refused as error:
            if error.status in MISSING:
                raise
            return -1  # not a server for HEAD

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, None if there is no such file. Raises ShardError if it is something else."""
        url = f"{self.url}/{name}"

        def attempt() -> bytes:
            with _open(url) as response:
                return b"".join(_pieces(response))

        try:
            return parse_json(_patiently(url, attempt), url)
        except _Refused as error:
            if error.status in MISSING:
                return None
            raise

    def fetch(self, name: str, folder: Path) -> Path:
        """A file, brought to `folder`; for functions that `run_jobs` runs."""
        download(f"{self.url}/{name}", folder / name, on_bytes=count_one)
        return folder / name
