"""Read and write object stores and all other URLs that fsspec supports: s3://, gs://, hf://, ftp://.

Each call gets its client from fsspec, which caches clients per process. Calls are retried after
temporary errors (`vit.system.retry`). The messages of errors that a user can fix state the
location, the reason and the remedy. Files are transferred completely or not at all. Reading a byte
range also checks the version of the file.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vit.data.shards.reader import Version
from vit.data.storage.http import ATTEMPT_S, Refused, replaced
from vit.system.files import FULL, ShardError, temporary_file
from vit.system.redact import shown
from vit.system.retry import RetryableError, RetryPolicy, note_progress

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SMALLEST_PIECE = 64 << 10
"""The minimum number of bytes per request. After timeouts, requests shrink to this size."""

VERSION_TAGS = (
    "ETag",
    "md5Hash",
    "generation",
    "etag",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)
"""The metadata fields that identify the version of a file, in order of preference. Fields that
change only with the bytes come before fields that also change with permissions and labels."""

LOCAL_ERRORS = (*FULL, errno.EROFS)
"""The error codes of the local disk. Clients of object stores do not use these codes."""
MISUSE = (ImportError, ValueError, TypeError, NotImplementedError)
"""Errors that a renewed token would not fix, so they are not retried even for a file in use."""
NO_BUCKET = "bucket does not exist"
"""A part of S3's response to requests in a bucket that does not exist."""
T = TypeVar("T")


class StoreKind(NamedTuple):
    """A kind of object store, in which objects become visible only when they are complete."""

    package: str
    """The package that fsspec needs for this store."""
    credentials: str
    """The credential sources of the client, as text for messages."""
    transfer: dict[str, Any]
    """Options for uploads and downloads."""


# Multipart transfers take up to 4 x 16 MiB of memory per worker. With the defaults of s3fs, they
# would take 10 x 50 MB.
S3 = StoreKind(
    "s3fs",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (FSSPEC_S3_ANON=true reads public"
    " buckets without)",
    {"chunksize": 16 << 20, "max_concurrency": 4},
)
GS = StoreKind(
    "gcsfs", "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`", {}
)
KINDS = {"s3": S3, "s3a": S3, "gs": GS, "gcs": GS}


class ObjectStore:
    """The files below `<url>/`, addressed by relative name.

    The object is thread-safe, and is pickled as its URL.

    All methods raise Refused if the user can fix the error, ShardError if all retries failed,
    FileNotFoundError, and OSError for errors of this machine's disk.
    """

    def __init__(self, url: str, retry: RetryPolicy | None = None):
        self.url = url if url.endswith("://") else url.rstrip("/")
        self.retry = retry or RetryPolicy()
        self.kind = KINDS.get(url.partition("://")[0])
        self._transfer = self.kind.transfer if self.kind else {}

    def __str__(self) -> str:
        return shown(self.url)

    def list(self) -> dict[str, Version]:
        """Return the files directly in the folder."""
        return self._call("", _list)

    def list_below(self) -> dict[str, Version]:
        """Return all files below the folder, such as `a/b`; "" is the URL itself, if it is a file.

        Returns {} if the folder does not exist. Keys may be any text, and callers write files with
        these names, so a name that points outside the folder raises Refused.
        """
        try:
            versions = self._call("", _list_below)
        except FileNotFoundError as error:  # Google's response if the bucket does not exist
            raise self._no_bucket(error) from error

        for name in versions:
            if name.startswith("/") or ".." in name.split("/"):
                raise Refused(
                    f"{self} contains a file named {name!r}, whose path leads outside the folder,"
                    " so nothing was fetched: remove this file, or find out where it comes from"
                )
        return versions

    def changed_at(self, name: str) -> datetime | None:
        """Return the time when a file was written, by the store's clock; None if unknown."""
        with suppress(Refused):  # stores without modification times
            return self._call(name, lambda fs, path: _changed_at(fs, f"{path}/{name}"))
        return None

    def stat(self, name: str, while_waiting: Callable[[], None] | None = None) -> Version:
        """Return the version of a file: its size, and its ETag or modification time."""
        return self._call(
            name, lambda fs, path: _version(fs, path, name), while_waiting=while_waiting
        )

    def read(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Return bytes [start, stop) of a file that is in use.

        Raises OSError if the version has changed. The check follows the transfer, because the file
        may be replaced during the transfer.
        """
        pieces: list[bytes] = []
        at = start
        piece_bytes = stop - start

        def read(fs: AbstractFileSystem, path: str) -> None:
            nonlocal at, piece_bytes
            while at < stop:
                end = min(at + piece_bytes, stop)
                try:
                    piece = fs.cat_file(f"{path}/{name}", start=at, end=end, **_timeout(fs))
                except TimeoutError:  # fsspec may raise this error; a smaller piece may succeed
                    piece_bytes = max(piece_bytes // 4, SMALLEST_PIECE)
                    raise
                if not piece:
                    raise RetryableError(
                        f"the transfer stopped after {at - start} of {stop - start} bytes"
                    )

                note_progress()
                pieces.append(piece)
                at += len(piece)

            now = _version(fs, path, name)
            # Some stores return different tags in listings, and `version` may come from a listing,
            # so also compare with the listing.
            if now != version and _listed_version(fs, path, name) != version:
                pieces.clear()
                at = start
                raise replaced(version, now)

        self._call(name, read, in_use=True)
        return b"".join(pieces)

    def read_all(self, name: str) -> bytes:
        """Return the content of a small file."""
        return self._call(name, lambda fs, path: fs.cat_file(f"{path}/{name}", **_timeout(fs)))

    def try_writing(self, name: str) -> None:
        """Create and remove an empty file. Raises Refused if, for example, the bucket does not
        exist."""

        def probe(fs: AbstractFileSystem, path: str) -> None:
            self._make_parent(fs, f"{path}/{name}")
            fs.pipe_file(f"{path}/{name}", b"", **_timeout(fs))
            fs.rm_file(f"{path}/{name}")

        try:
            self._call("", probe)
        except FileNotFoundError as error:  # Google's response, which contains only the path
            raise self._no_bucket(error) from error

    def upload(self, path: Path, name: str = "", in_use: bool = False) -> None:
        """Upload a local file as `name` (by default its own name), and compare the sizes.

        in_use: see `_call`.
        """
        name = name or path.name

        def put(fs: AbstractFileSystem, folder: str) -> None:
            size = path.stat().st_size  # read per attempt, because a log may grow
            self._make_parent(fs, f"{folder}/{name}")
            fs.put_file(str(path), f"{folder}/{name}", **self._transfer)
            _check_arrived(_version(fs, folder, name).size, size)

        self._call(name, put, in_use)

    def write(self, name: str, data: bytes, only_new: bool = False, in_use: bool = False) -> bool:
        """Write a small file. Return whether it was written.

        only_new: do not replace an existing file. Stores without conditional writes (fsspec's
        "create") ignore this. in_use: see `_call`.
        """

        def put(fs: AbstractFileSystem, folder: str) -> bool:
            target = f"{folder}/{name}"
            self._make_parent(fs, target)
            if only_new:
                try:
                    fs.pipe_file(target, data, mode="create", **_timeout(fs))
                    return True
                except FileExistsError:
                    return False
                except OSError as error:
                    # s3fs handles Amazon's response. Other servers reject the write with EINVAL, or
                    # do not support conditional writes (ENOSYS).
                    if error.errno == errno.EINVAL and fs.exists(target, **_timeout(fs)):
                        return False
                    if error.errno != errno.ENOSYS:
                        raise

            fs.pipe_file(target, data, **_timeout(fs))
            return True

        return self._call(name, put, in_use)

    def download(
        self, name: str, path: Path, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Copy a file to a local path, completely or not at all.

        on_bytes: called with the total number of bytes received.
        """

        def get(fs: AbstractFileSystem, folder: str) -> None:
            from fsspec.callbacks import Callback

            class Progress(Callback):
                def call(self, *_: object, **__: object) -> None:
                    note_progress()
                    if on_bytes is not None:
                        on_bytes(self.value)

            version = _version(fs, folder, name)
            with temporary_file(path) as file:
                source = f"{folder}/{name}" if name else folder
                fs.get_file(source, file.name, callback=Progress(), **self._transfer)
                _check_arrived(os.path.getsize(file.name), version.size)

                # The file arrives in several requests. If a running job replaced it between two of
                # them, the copy would mix the weights of two steps.
                now = _version(fs, folder, name)
                if now != version:
                    reason = str(replaced(version, now).strerror)
                    raise RetryableError(reason, final=ShardError(f"{self}/{name}: {reason}"))
                os.replace(file.name, path)

        self._call(name, get)

    def remove(self, name: str, in_use: bool = False) -> None:
        """Remove a file if it exists. in_use: see `_call`."""

        def remove(fs: AbstractFileSystem, path: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(f"{path}/{name}")

        self._call(name, remove, in_use)

    def remove_unfinished(self) -> None:
        """Abort incomplete uploads below the folder, which are invisible but billed.

        Only S3 keeps incomplete uploads until they are removed. Errors are ignored and not retried,
        because listing uploads needs a rare permission, and not all servers support this request.
        """
        if self.kind is not S3:
            return

        def abort(fs: AbstractFileSystem, path: str) -> None:
            bucket, key, _ = fs.split_path(path)
            uploads = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
            for upload in uploads.get("Uploads", []):
                with suppress(FileNotFoundError):
                    fs.call_s3(
                        "abort_multipart_upload",
                        Bucket=bucket,
                        Key=upload["Key"],
                        UploadId=upload["UploadId"],
                    )

        with suppress(ValueError, OSError):
            ObjectStore(self.url, replace(self.retry, limit_s=0.0))._call("", abort)

    def _make_parent(self, fs: AbstractFileSystem, path: str) -> None:
        if self.kind is None:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _call(
        self,
        name: str,
        action: Callable[[Any, str], T],
        in_use: bool = False,
        while_waiting: Callable[[], None] | None = None,
    ) -> T:
        """Call `action` with fsspec's client and the folder's path, and return its result.

        Args:
            name: The file name for messages, or "" for the folder.
            in_use: Whether the file already existed before the call. If so, even a refusal may
                be temporary.
        """
        import fsspec  # not needed for shards on a local disk

        shown_name = f"{self}/{name}" if name else str(self)

        def attempt() -> T:
            fs: Any = None
            try:
                fs, path = fsspec.core.url_to_fs(self.url)
                return action(fs, path.rstrip("/"))
            except RetryableError:
                raise
            except Exception as error:  # each client raises different exceptions
                if isinstance(error, OSError) and error.errno in LOCAL_ERRORS:
                    error.filename = error.filename or tempfile.gettempdir()
                    raise

                final = self._final_error(error, shown_name)
                may_retry = in_use and not isinstance(error, MISUSE)
                if final is not None and not may_retry:
                    raise final from error

                # Drop the client, so that the next attempt gets new credentials and connections.
                must_reconnect = fs is not None and (final is not None or not fs.async_impl)
                if must_reconnect:
                    fs.clear_instance_cache()
                reason = _reason(error)
                if not _is_replaced(error):
                    reason = f"cannot be reached ({reason})"
                raise RetryableError(reason, final=final) from error

        return self.retry.call(shown_name, attempt, while_waiting)

    def _final_error(self, error: Exception, shown_name: str) -> Exception | None:
        """Return the error to raise if the file is not in use. For a file in use, even this error
        may be temporary. Return None if `error` may be temporary for any file."""
        is_no_file = isinstance(error, FileNotFoundError) and NO_BUCKET not in str(error)
        return error if is_no_file or _is_replaced(error) else self._refusal(error, shown_name)

    def _refusal(self, error: Exception, shown_name: str) -> Refused | None:
        """Return the error to raise if a retry would not help, or None if `error` may be
        temporary."""
        reason = _reason(error)
        name = type(error).__name__
        if isinstance(error, FileNotFoundError):
            return self._no_bucket(error)

        credentials = f"; credentials come from {self.kind.credentials}" if self.kind else ""
        if isinstance(error, ImportError):
            remedy = f": pip install {self.kind.package}" if self.kind else ""
            return Refused(f"{shown_name}: {reason}{remedy}")
        if isinstance(error, PermissionError):
            return Refused(f"{shown_name}: no permission to do this ({reason}){credentials}")

        # NoCredentialsError, DefaultCredentialsError, ProfileNotFound, ...
        if "Credential" in name or "Profile" in name:
            return Refused(f"{shown_name}: {reason}{credentials}")
        if isinstance(error, (ValueError, TypeError, NotImplementedError)) or "Validation" in name:
            return Refused(
                f"{shown_name}: {reason}; expected a folder or a URL such as s3://bucket/folder"
            )
        return None

    def _no_bucket(self, error: FileNotFoundError) -> Refused:
        return Refused(
            f"{self}: the bucket does not exist ({_reason(error)}): correct the URL, or create the"
            " bucket first"
        )


def _is_replaced(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def _reason(error: Exception) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__)


def _check_arrived(arrived: int, size: int) -> None:
    if arrived != size:
        raise RetryableError(f"{arrived} of {size} bytes arrived")


def _timeout(fs: AbstractFileSystem) -> dict[str, float]:
    return {"timeout": ATTEMPT_S} if fs.async_impl else {}


def _list(fs: AbstractFileSystem, path: str) -> dict[str, Version]:
    fs.invalidate_cache(path)  # other processes also write to this folder
    return {
        entry["name"].rsplit("/", 1)[-1]: _version_of(entry)
        for entry in fs.ls(path, detail=True, **_timeout(fs))
        if entry["type"] == "file"
    }


def _list_below(fs: AbstractFileSystem, path: str) -> dict[str, Version]:
    fs.invalidate_cache()
    entries = fs.find(path, detail=True, **_timeout(fs))
    return {name[len(path) + 1 :]: _version_of(entry) for name, entry in entries.items()}


def _changed_at(fs: AbstractFileSystem, path: str) -> datetime:
    fs.invalidate_cache()
    return fs.modified(path)


def _listed_version(fs: AbstractFileSystem, path: str, name: str) -> Version | None:
    try:
        return _list(fs, path).get(name)
    except (FileNotFoundError, PermissionError):  # listing may be forbidden
        return None


def _version(fs: AbstractFileSystem, path: str, name: str) -> Version:
    fs.invalidate_cache(path)  # drop earlier responses
    return _version_of(fs.info(f"{path}/{name}" if name else path, **_timeout(fs)))


def _version_of(entry: dict[str, Any]) -> Version:
    # Some stores, such as Azure's, return the same tag with and without quotes, so strip quotes.
    tags = (str(entry[key]).strip('"') for key in VERSION_TAGS if entry.get(key))
    return Version(int(entry["size"]), next(tags, ""))
