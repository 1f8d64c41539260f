"""Files at a URL, by range requests that are tried again. Free of torch.

The data's story: the first answer about a file tells its version (size, ETag); later answers must be of that version. What may pass (a lost
connection, a timeout, "slow down") is tried again after growing pauses; what does not pass is told with URL, attempts and reason.

The web is read by urllib3, whose answers show what was understood (ranges, ETag); all other URLs by fsspec.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.data.block_cache import BlockCache, locked_part, write_whole
from vit.data.files import ShardError, parse_json

PIECE_BYTES = 8 << 20
"""Of an index, which may be large, a request."""
NUM_CONNECTIONS = 16
"""Kept open by one process."""
CONNECT_S, SILENCE_S, ATTEMPT_S = 10.0, 30.0, 120.0
"""How long an attempt may take to connect, without a byte arriving, and in all."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waited before each further attempt, times 0.5 to 1.5: many processes that failed together do not come back together."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that a later attempt may not get."""
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""By scheme: what to install for it."""
T = TypeVar("T")
log = logging.getLogger(__name__)


def local_path(root: str | Path) -> Path | None:
    """The folder that `root` names, None for a URL of another kind than file://."""
    scheme, is_url, path = str(root).partition("://")
    if not is_url:
        return Path(root)
    return Path(path) if scheme in ("file", "local") else None


class Version(NamedTuple):
    """What a server tells of a file: its size in bytes and a tag that differs from version to version."""

    size: int
    tag: str

    def brief(self) -> str:
        """For file names."""
        return hashlib.sha256(f"{self.size} {self.tag}".encode()).hexdigest()[:12]


class _Passing(Exception):
    """What a later attempt may not meet."""


def _replaced(was: object, now: object) -> OSError:
    return OSError(errno.ESTALE, f"failed: it was replaced at its URL while it was in use (was {was}, is {now})")


# ---- two kinds of servers -------------------------------------------------------------------------------------------


class _Web:
    """A folder at http(s)://. Any number of threads; a forked process opens its own connections."""

    def __init__(self, url: str):
        self.url = url
        self._pool: Any = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_pool": None, "_pid": 0}

    def list(self) -> dict[str, Version]:
        """The web has no lists."""
        return {}

    def stat(self, name: str) -> Version:
        """Size and ETag, by asking for the first byte: servers that know no ranges are found out at once."""
        response, _ = self._get(name, 0, 1)
        return self._version(response, name)

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop), fewer if the connection ends."""
        response, data = self._get(name, start, stop)
        if (now := self._version(response, name)) != version:
            raise _replaced(version, now)
        return data

    def _get(self, name: str, start: int, stop: int) -> tuple[Any, bytes]:
        import urllib3  # here, as shards on a disk need none of it

        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "vit"}
        deadline_s = time.monotonic() + ATTEMPT_S
        try:
            response = self._connections(urllib3).request("GET", f"{self.url}/{name}", headers=headers, preload_content=False)
            try:
                self._check(response, name)
                pieces, missing = [], stop - start
                while missing > 0 and (piece := response.read1(min(missing, 1 << 20), decode_content=False)):
                    pieces.append(piece)
                    missing -= len(piece)
                    if time.monotonic() > deadline_s:
                        raise _Passing(f"{stop - start - missing} of {stop - start} bytes came in {ATTEMPT_S:.0f} s")
                if missing == 0:
                    response.drain_conn()  # the end of the answer was not read yet; then the connection is used again
            finally:
                response.close() if response.connection is not None else response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise _Passing(f"cannot be reached ({getattr(error, 'reason', None) or error})") from error
        return response, b"".join(pieces)

    def _check(self, response: Any, name: str) -> None:
        status, said = response.status, f"{self.url}/{name}: the server answers {response.status} {response.reason}"
        if status == 206:
            return
        if status in PASSING:
            raise _Passing(f"the server answers {status} {response.reason}")
        if status in (404, 410):
            raise FileNotFoundError(errno.ENOENT, "no such file on the server")
        if status in (412, 416):
            raise _replaced("longer", "shorter")
        if status == 200:
            raise ShardError(
                f"{self.url}/{name}: the server does not give parts of files (it ignores Range), which reading at random needs; "
                "copy the shards to a disk, or stream them with data.reader: webdataset, which is not exact"
            )
        raise ShardError(f"{said}; {'it wants a login, or there is no such file' if status in (401, 403) else 'correct the address'}")

    def _version(self, response: Any, name: str) -> Version:
        told = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if told is None:
            raise ShardError(f"{self.url}/{name}: the server does not tell the size of the file; serve the shards with another one")
        return Version(int(told[1]), response.headers.get("ETag") or response.headers.get("Last-Modified") or "")

    def _connections(self, urllib3: Any) -> Any:
        if self._pid != os.getpid():
            parts = urllib.parse.urlsplit(self.url)
            proxy = urllib.request.getproxies().get(parts.scheme)
            if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
                proxy = None
            settings = {
                "timeout": urllib3.Timeout(connect=CONNECT_S, read=SILENCE_S),
                "retries": urllib3.Retry(total=None, connect=0, read=0, status=0, other=0, redirect=5),
                "maxsize": NUM_CONNECTIONS,
            }
            self._pool = urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
            self._pid = os.getpid()
        return self._pool


class _Store:
    """A folder at any other URL that fsspec knows. fsspec's own clients must not cross a fork: each process opens one."""

    def __init__(self, url: str):
        self.url, self.scheme = url, url.partition("://")[0]
        self._opened: tuple[int, Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def list(self) -> dict[str, Version]:
        """All files of the folder; {} where one may read but not list."""

        def listed() -> dict[str, Version]:
            fs, path = self._client()
            fs.invalidate_cache(path)  # another run may have been here before
            found = fs.ls(path, detail=True)
            return {entry["name"].rsplit("/", 1)[-1]: _version_of(entry) for entry in found if entry["type"] == "file"}

        try:
            return self._told(listed)
        except (FileNotFoundError, ShardError):
            return {}

    def stat(self, name: str) -> Version:
        """Size, and ETag or time of change."""
        fs, path = self._client()
        return self._told(lambda: _version_of(fs.info(f"{path}/{name}")))

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop), fewer if the connection ends. Whether it still is that version, the tar headers in it tell."""
        fs, path = self._client()
        limits = {"timeout": ATTEMPT_S} if fs.async_impl else {}
        return self._told(lambda: fs.cat_file(f"{path}/{name}", start=start, end=stop, **limits))

    def _client(self) -> tuple[Any, str]:
        if self._opened is None or self._opened[0] != os.getpid():
            import fsspec

            try:
                self._opened = (os.getpid(), *fsspec.core.url_to_fs(self.url))
            except ImportError as error:
                package = PACKAGES.get(self.scheme)
                remedy = f"pip install {package}" if package else str(error)
                raise ShardError(f"{self.url}: reading {self.scheme}:// needs another package: {remedy}") from error
            except ValueError as error:
                raise ShardError(f"{self.url}: {error}; expected a folder or a URL such as s3://bucket/folder") from error
        return self._opened[1], self._opened[2].rstrip("/")

    def _told(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:  # every store's client has classes of its own
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or "Profile" in type(error).__name__:
                raise ShardError(f"{self.url}: may not be read ({text}); give this machine credentials for it") from error
            if isinstance(error, (ValueError, TypeError, NotImplementedError)):
                raise ShardError(f"{self.url}: cannot be read ({type(error).__name__}: {text}); correct the URL") from error
            raise _Passing(f"cannot be reached ({text})") from error


def _version_of(entry: dict[str, Any]) -> Version:
    tags = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "created")
    return Version(int(entry["size"]), next((str(entry[key]) for key in tags if entry.get(key)), ""))


# ---- one folder -----------------------------------------------------------------------------------------------------


class RemoteFolder:
    """The files directly at `<url>/`. What may pass is tried again; ShardError names URL, number of attempts and the last reason."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._server = _Web(self.url) if self.url.startswith(("http://", "https://")) else _Store(self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def brief(self) -> str:
        """For folder names."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def read_info(self) -> dict[str, Any]:
        """`_info.json`. Raises ShardError if there is none, with the command that makes it."""
        try:
            version = self.stat("_info.json")
            return parse_json(self.read("_info.json", 0, version.size, version), f"{self}/_info.json")
        except FileNotFoundError:
            raise self._not_indexed("_info.json") from None

    def fetch_index(self, split: str, cache: BlockCache) -> Path:
        """`<split>.index.npy` in the cache's folder: fetched by the first process of this host, awaited by the others."""
        name = f"{split}.index.npy"
        try:
            version = self.stat(name)
        except FileNotFoundError:
            raise self._not_indexed(name) from None
        path = cache.folder / self.brief / f"{split}.index.{version.brief()}.npy"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked_part(path) as part:
                if part is not None:
                    starts = range(0, version.size, PIECE_BYTES)
                    write_whole(part, *(self.read(name, at, min(at + PIECE_BYTES, version.size), version) for at in starts))
                    os.replace(part.name, path)
        except OSError as error:
            raise ShardError(f"{path}: cannot be written ({error.strerror}); make room, or choose another data.cache_dir") from error
        return path

    def stats(self, names: list[str]) -> list[Version | str]:
        """The version of each file; a text says why one has none."""
        known = self._patiently("", self._server.list)

        def version(name: str) -> Version | str:
            try:
                return known.get(name) or self.stat(name)
            except FileNotFoundError:
                return "no such file"

        with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
            return list(threads.map(version, names))

    def stat(self, name: str) -> Version:
        """The version of a file. Raises FileNotFoundError."""
        return self._patiently(name, lambda: self._server.stat(name))

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop) of a file. Raises OSError if it is gone or, where servers tell, of another version."""

        def attempt() -> bytes:
            data = self._server.read(name, start, stop, version)
            if len(data) != stop - start:
                raise _Passing(f"the connection ended after {len(data)} of {stop - start} bytes")
            return data

        return self._patiently(name, attempt)

    def _not_indexed(self, name: str) -> ShardError:
        shards = f"'{self}/train-{{0000..0099}}.tar'" if isinstance(self._server, _Web) else str(self)
        make = f"`python -m data_prep.index {shards} --out ROOT` makes the index in a folder"
        return ShardError(f"{self}: no {name} there; {make}, and data.root=ROOT then reads the shards from this URL")

    def _patiently(self, name: str, attempt: Callable[[], T]) -> T:
        where = f"{self}/{name}" if name else str(self)
        for number, pause_s in enumerate((*PAUSES_S, None), start=1):
            try:
                return attempt()
            except _Passing as error:
                if pause_s is None:
                    remedy = "check the address and the network, then start again"
                    raise ShardError(f"{where}: {error}, {number} times in a row; {remedy}") from error
                pause_s *= _JITTER.uniform(0.5, 1.5)
                log.log(logging.INFO if number < 3 else logging.WARNING, "%s: %s; again in %.1f s", where, error, pause_s)
                time.sleep(pause_s)
        raise AssertionError("the last pause is None")


_JITTER = random.Random()
"""Its own generator: nobody's draws depend on the network."""
