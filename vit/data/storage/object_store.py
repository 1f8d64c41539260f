"""Object stores, and whatever else fsspec reads by URL (s3://bucket/folder, gs://, hf://, ftp://).
Free of torch.

The data's story: each call asks fsspec for its client, which it keeps for the process, and is
repeated by `vit.data.storage.retry` while errors may pass; what a user can set right is told
with the place, the reason and the remedy. Files come and go whole; a range of bytes comes with the
version it was of.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.data.storage.http import ATTEMPT_S, Refused, Version, replaced
from vit.data.storage.retry import RetryableError, RetryPolicy, note_progress
from vit.system.files import temporary_file
from vit.system.urls import did_you_mean, shown

SMALLEST_PIECE = 64 << 10
T = TypeVar("T")


class Kind(NamedTuple):
    """A kind of object store that shows an object only when it is whole."""

    package: str
    """What fsspec needs for it."""
    credentials: str
    """Where its client looks for them."""
    transfer: dict[str, Any]
    """Settings of uploads and downloads."""


# A file that goes in parts has up to 4 x 16 MiB in memory; s3fs's own numbers are 10 x 50 MB, and
# each worker has them.
S3 = Kind(
    "s3fs",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (FSSPEC_S3_ANON=true reads public"
    " buckets without)",
    {"chunksize": 16 << 20, "max_concurrency": 4},
)
GS = Kind("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`", {})
KINDS = {"s3": S3, "s3a": S3, "gs": GS, "gcs": GS}
# of this machine's disk; no store's client uses these
LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class ObjectStore:
    """The files directly at `<url>/`. Any number of threads; pickled as its URL.

    All methods raise Refused for what a user can set right, ShardError when patience is at an end,
    FileNotFoundError, and OSError about this machine's disk.
    """

    def __init__(self, url: str, retry: RetryPolicy | None = None):
        self.url = url if url.endswith("://") else url.rstrip("/")
        self.retry = retry or RetryPolicy()
        self.kind = KINDS.get(url.partition("://")[0])

    def __str__(self) -> str:
        return shown(self.url)

    def list(self) -> dict[str, Version]:
        """All files of the folder."""

        return self._ask("", _listed)

    def stat(self, name: str, while_waiting: Callable[[], None] | None = None) -> Version:
        """Size, and ETag or time of change."""
        return self._ask(
            name, lambda fs, path: _version_now(fs, path, name), while_waiting=while_waiting
        )

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes [start, stop) of a file that is in use. Raises OSError if it is of another version.

        The version is asked for when they are here, not before: it might change.
        """
        pieces = []
        at = start
        piece_bytes = stop - start

        def asked(fs: Any, path: str) -> None:
            nonlocal at, piece_bytes
            while at < stop:
                try:
                    piece = fs.cat_file(
                        f"{path}/{name}", start=at, end=min(at + piece_bytes, stop), **_limits(fs)
                    )
                except TimeoutError:  # fsspec's, too: less may come in time
                    piece_bytes = max(piece_bytes // 4, SMALLEST_PIECE)
                    raise
                if not piece:
                    raise RetryableError(f"nothing came after {at - start} of {stop - start} bytes")
                note_progress()
                pieces.append(piece)
                at += len(piece)
            now = _version_now(fs, path, name)
            # The version may come from a list, and not every store writes the same tag there.
            if now != version and _listed_version(fs, path, name) != version:
                pieces.clear()
                at = start
                raise replaced(version, now)

        self._ask(name, asked, in_use=True)
        return b"".join(pieces)

    def whole(self, name: str) -> bytes:
        """A small file."""
        return self._ask(name, lambda fs, path: fs.cat_file(f"{path}/{name}", **_limits(fs)))

    def try_writing(self, name: str) -> None:
        """Make an empty file and remove it."""

        def probe(fs: Any, path: str) -> None:
            fs.pipe_file(f"{path}/{name}", b"", **_limits(fs))
            fs.rm_file(f"{path}/{name}")

        self._ask("", probe)

    def upload(self, path: Path) -> None:
        """Bring a local file to its place, under its name, and compare its size."""
        size = path.stat().st_size

        def put(fs: Any, folder: str) -> None:
            fs.put_file(
                str(path), f"{folder}/{path.name}", **(self.kind.transfer if self.kind else {})
            )
            if (arrived := _version_now(fs, folder, path.name).size) != size:
                raise RetryableError(f"{arrived} of {size} bytes arrived")

        self._ask(path.name, put)

    def download(self, name: str, path: Path) -> None:
        """Bring a file to a local path, whole or not at all."""

        def get(fs: Any, folder: str) -> None:
            size = _version_now(fs, folder, name).size
            with temporary_file(path) as file:
                fs.get_file(
                    f"{folder}/{name}", file.name, **(self.kind.transfer if self.kind else {})
                )
                if (arrived := os.path.getsize(file.name)) != size:
                    raise RetryableError(f"{arrived} of {size} bytes arrived")
                os.replace(file.name, path)

        self._ask(name, get)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._ask(name, lambda fs, path: fs.rm_file(f"{path}/{name}"))

    def _ask(
        self,
        name: str,
        action: Callable[[Any, str], T],
        in_use: bool = False,
        while_waiting: Callable[[], None] | None = None,
    ) -> T:
        """What `action` says, given a client and the folder's path.

        fsspec keeps the clients: one for a process, or for each of its threads where they are not
        safe in several.
        """
        import fsspec  # here, as shards on a disk need none of it

        where = f"{self}/{name}" if name else str(self)

        def attempt() -> T:
            fs = None
            try:
                fs, path = fsspec.core.url_to_fs(self.url)
                return action(fs, path.rstrip("/"))
            except RetryableError:
                raise
            except Exception as error:  # every store's client has classes of its own
                if isinstance(error, OSError) and error.errno in LOCAL_ERRORS:
                    error.filename = error.filename or tempfile.gettempdir()
                    raise
                final = (
                    error
                    if isinstance(error, FileNotFoundError) or _is_stale(error)
                    else self._refusal(error, where)
                )
                if final is not None and (
                    not in_use
                    or isinstance(error, (ImportError, ValueError, TypeError, NotImplementedError))
                ):
                    raise final from error
                if fs is not None and (final is not None or not fs.async_impl):
                    # the next attempt gets one with new credentials, and a new connection
                    fs.clear_instance_cache()
                raise RetryableError(
                    _words(error) if _is_stale(error) else f"cannot be reached ({_words(error)})",
                    final=final,
                ) from error

        return self.retry.call(where, attempt, while_waiting)

    def _refusal(self, error: Exception, where: str) -> Refused | None:
        """What to tell about an error that waiting does not mend, None for one that may pass."""
        text = _words(error)
        credentials = f"; credentials come from {self.kind.credentials}" if self.kind else ""
        name = type(error).__name__
        if isinstance(error, ImportError):
            return Refused(
                f"{where}: {text}: pip install {self.kind.package}"
                if self.kind
                else f"{where}: {text}"
            )
        if isinstance(error, PermissionError):
            return Refused(f"{where}: no permission to do this ({text}){credentials}")
        # NoCredentialsError, DefaultCredentialsError ...
        if "Credential" in name or "Profile" in name:
            return Refused(f"{where}: {text}{credentials}")
        if isinstance(error, (ValueError, TypeError, NotImplementedError)) or "Validation" in name:
            return Refused(
                f"{where}: {text}; expected a folder or a URL such as"
                f" s3://bucket/folder{did_you_mean(self.url)}"
            )
        return None


def _is_stale(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def _words(error: Exception) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__)


def _limits(fs: Any) -> dict[str, float]:
    """How long a request may take, where a client can be told."""
    return {"timeout": ATTEMPT_S} if fs.async_impl else {}


def _listed(fs: Any, path: str) -> dict[str, Version]:
    fs.invalidate_cache(path)  # others write there, too
    found = fs.ls(path, detail=True, **_limits(fs))
    return {
        entry["name"].rsplit("/", 1)[-1]: _version_of(entry)
        for entry in found
        if entry["type"] == "file"
    }


def _listed_version(fs: Any, path: str, name: str) -> Version | None:
    try:
        return _listed(fs, path).get(name)
    except (FileNotFoundError, PermissionError):  # one may read and not list
        return None


def _version_now(fs: Any, path: str, name: str) -> Version:
    fs.invalidate_cache(path)  # of what was told before
    return _version_of(fs.info(f"{path}/{name}", **_limits(fs)))


def _version_of(entry: dict[str, Any]) -> Version:
    # What changes with the bytes comes before what changes with rights and labels too; quotes are
    # there or not, on Azure for instance.
    tags = (
        "ETag",
        "md5Hash",
        "generation",
        "etag",
        "mtime",
        "LastModified",
        "last_modified",
        "created",
    )
    return Version(
        int(entry["size"]), next((str(entry[key]).strip('"') for key in tags if entry.get(key)), "")
    )
