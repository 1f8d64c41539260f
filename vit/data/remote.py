"""Files at a URL, by range requests that are tried again. Free of torch.

The data's story: the first answer about a file tells its version (size, ETag); later answers must be of that version. What may pass (a lost
connection, a timeout, "slow down") is tried again by `vit.data.patience`; what does not pass is told with URL, attempts and reason.

The web is read by urllib3, whose answers show what was understood (ranges, ETag); all other URLs by fsspec.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.data.block_cache import BlockCache, ends_with_checksum, locked_part, with_checksum, write_whole
from vit.data.files import ShardError, parse_json
from vit.data.patience import Passing, Patience

PIECE_BYTES = 8 << 20
"""Of a whole file, which may be a large index, a request."""
NUM_CONNECTIONS = 16
"""Kept open by one process."""
CONNECT_S, SILENCE_S, ATTEMPT_S = 10.0, 30.0, 120.0
"""How long an attempt may take to connect, without a byte arriving, and in all."""
PASSING = {408, 425, 429, *range(500, 600)} - {501, 505}
"""Answers that a later attempt may not get. Of 5xx all, as proxies have numbers of their own, but not "I cannot do that"."""
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

    def __str__(self) -> str:
        return f"{self.size} bytes" + (f" with the tag {self.tag}" if self.tag else "")


def _replaced(was: Version, now: Version) -> OSError:
    return OSError(errno.ESTALE, f"it was replaced at its URL while it was in use (it had {was}, now it has {now})")


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
                pieces, missing = [], stop - start if response.status == 206 else 0
                while missing > 0 and (piece := response.read1(min(missing, 1 << 20), decode_content=False)):
                    pieces.append(piece)
                    missing -= len(piece)
                    if time.monotonic() > deadline_s:
                        raise Passing(f"{stop - start - missing} of {stop - start} bytes came in {ATTEMPT_S:.0f} s")
                if missing == 0:
                    response.drain_conn()  # the end of the answer was not read yet; then the connection is used again
            finally:
                response.close() if response.connection is not None else response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise Passing(f"cannot be reached ({getattr(error, 'reason', None) or error})") from error
        return response, b"".join(pieces)

    def _check(self, response: Any, name: str) -> None:
        status, said = response.status, f"{self.url}/{name}: the server answers {response.status} {response.reason}"
        if status in (206, 416) or (status == 200 and response.headers.get("Content-Length") == "0"):
            return  # 416: the file ends before these bytes; of an empty one some servers give the whole instead
        if status in PASSING:
            raise Passing(f"the server answers {status} {response.reason}")
        if status in (404, 410):
            raise FileNotFoundError(errno.ENOENT, "no such file on the server")
        if status == 200:
            raise ShardError(
                f"{self.url}/{name}: the server does not give parts of files (it ignores Range), which reading at random needs; "
                "copy the shards to a disk, or stream them with data.reader: webdataset, which is not exact"
            )
        raise ShardError(f"{said}; {'it wants a login, or there is no such file' if status in (401, 403) else 'correct the address'}")

    def _version(self, response: Any, name: str) -> Version:
        default = "" if response.status == 206 else "bytes */0"
        told = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", response.headers.get("Content-Range", default))
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
    """A folder at any other URL that fsspec knows."""

    def __init__(self, url: str):
        self.url, self.scheme = url, url.partition("://")[0]

    def list(self) -> dict[str, Version]:
        """All files of the folder; {} where one may read but not list."""

        def listed(fs: Any, path: str) -> dict[str, Version]:
            fs.invalidate_cache(path)  # another run may have been here before
            found = fs.ls(path, detail=True, **_limits(fs))
            return {entry["name"].rsplit("/", 1)[-1]: _version_of(entry) for entry in found if entry["type"] == "file"}

        try:
            return self._ask(listed)
        except (FileNotFoundError, ShardError):
            return {}

    def stat(self, name: str) -> Version:
        """Size, and ETag or time of change."""
        return self._ask(lambda fs, path: _version_now(fs, path, name))

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop), fewer if the connection ends. Their version is asked for when they are here, not before: it might change."""

        def asked(fs: Any, path: str) -> tuple[bytes, Version]:
            return fs.cat_file(f"{path}/{name}", start=start, end=stop, **_limits(fs)), _version_now(fs, path, name)

        data, now = self._ask(asked)
        # The version may come from a list, and not every store writes the same tag there.
        if now != version and self.list().get(name) != version:
            raise _replaced(version, now)
        return data

    def _ask(self, action: Callable[[Any, str], T]) -> T:
        """What `action` says, given a client and the folder's path.

        fsspec keeps the clients: one for a process, or for each of its threads where they are not safe in several.
        """
        import fsspec  # here, as shards on a disk need none of it

        fs = None
        try:
            fs, path = fsspec.core.url_to_fs(self.url)
            return action(fs, path.rstrip("/"))
        except FileNotFoundError:
            raise
        except ImportError as error:
            package = PACKAGES.get(self.scheme)
            remedy = f"pip install {package}" if package else str(error)
            raise ShardError(f"{self.url}: reading {self.scheme}:// needs another package: {remedy}") from error
        except Exception as error:  # every store's client has classes of its own
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or "Profile" in type(error).__name__:
                raise ShardError(f"{self.url}: may not be read ({text}); give this machine credentials for it") from error
            if isinstance(error, (ValueError, TypeError, NotImplementedError)):
                remedy = "expected a folder or a URL such as s3://bucket/folder"
                raise ShardError(f"{self.url}: cannot be read ({type(error).__name__}: {text}); {remedy}") from error
            if fs is not None and not fs.async_impl:
                fs.clear_instance_cache()  # such a client does not open a connection again that broke; the next attempt gets another client
            raise Passing(f"cannot be reached ({text})") from error


def _limits(fs: Any) -> dict[str, float]:
    """How long a request may take, where a client can be told."""
    return {"timeout": ATTEMPT_S} if fs.async_impl else {}


def _version_now(fs: Any, path: str, name: str) -> Version:
    fs.invalidate_cache(path)  # of what was told before
    return _version_of(fs.info(f"{path}/{name}", **_limits(fs)))


def _version_of(entry: dict[str, Any]) -> Version:
    # What changes with the bytes comes before what changes with rights and labels too; quotes are there or not, on Azure for instance.
    tags = ("ETag", "md5Hash", "generation", "etag", "mtime", "LastModified", "last_modified", "created")
    return Version(int(entry["size"]), next((str(entry[key]).strip('"') for key in tags if entry.get(key)), ""))


# ---- one folder -----------------------------------------------------------------------------------------------------


class RemoteFolder:
    """The files directly at `<url>/`. What may pass is tried again; ShardError names URL, number of attempts and the last reason."""

    def __init__(self, url: str, patience: Patience | None = None):
        self.url, self.patience = url.rstrip("/"), patience or Patience()
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
            pieces = self._whole("_info.json", self.stat("_info.json"))
        except FileNotFoundError:
            raise self._not_indexed("no _info.json") from None
        return parse_json(b"".join(pieces), f"{self}/_info.json")

    def fetch_index(self, split: str, cache: BlockCache) -> Path:
        """`<split>.index.npy` in the cache's folder: fetched by the first process of this host, awaited by the others.

        It ends with a checksum, which numpy passes over: one that a power cut has spoilt is fetched again.
        """
        name = f"{split}.index.npy"
        try:
            version = self.stat(name)
        except FileNotFoundError:
            raise self._not_indexed(f"no {name}") from None
        if version.size == 0:
            raise self._not_indexed(f"an empty {name}")
        path = cache.folder / self.brief / f"{split}.index.{version.brief()}.npy"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked_part(path, ends_with_checksum) as part:
                if part is not None:
                    if path.exists():
                        log.warning("%s: damaged; it is fetched again", path)
                    write_whole(part, with_checksum(self._whole(name, version)))
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
        """Bytes [start, stop) of a file. Raises OSError if it is gone or of another version."""

        def attempt() -> bytes:
            data = self._server.read(name, start, stop, version)
            if len(data) != stop - start:
                raise Passing(f"the connection ended after {len(data)} of {stop - start} bytes")
            return data

        return self._patiently(name, attempt)

    def _whole(self, name: str, version: Version) -> Iterator[bytes]:
        """A file in pieces. Raises ShardError if it is of another version by now."""
        for start in range(0, version.size, PIECE_BYTES):
            try:
                yield self.read(name, start, min(start + PIECE_BYTES, version.size), version)
            except OSError as error:
                raise ShardError(f"{self}/{name}: reading failed: {error.strerror}; start again") from error

    def _not_indexed(self, what: str) -> ShardError:
        shards = f"'{self}/train-{{0000..0099}}.tar'" if isinstance(self._server, _Web) else str(self)
        make = f"`python -m data_prep.index {shards} --out ROOT` makes the index in a folder"
        return ShardError(f"{self}: {what} there; {make}, and data.root=ROOT then reads the shards from this URL")

    def _patiently(self, name: str, attempt: Callable[[], T]) -> T:
        where = f"{self}/{name}" if name else str(self)
        return self.patience.keep_trying(where, attempt)
