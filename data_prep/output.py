"""Where shards go, or lie: a folder, or an object store by its URL. Free of torch.

The data's story: a worker makes its files in a staging folder and publishes them one after the other. In a local folder they are at their
place already, made under a temporary name and renamed. To a store (s3://bucket/folder, gs://...) each is uploaded whole and its size is
compared; stores show an object when its last byte has arrived, so a kill in the middle of an upload leaves nothing to be seen. (What S3
keeps of an upload in parts that was cut is invisible, but paid for: a lifecycle rule "AbortIncompleteMultipartUpload" clears it away.)
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from data_prep.jobs import PrepError
from vit.data import files
from vit.data.files import locked_folder, remove_if_abandoned, replacing, temporary_beside, temporary_file

PAUSES_S = (1.0, 4.0, 15.0, 60.0)
"""Waited before each further attempt, on top of what a store's own client repeats."""
T = TypeVar("T")


class Store(NamedTuple):
    """A kind of object store that shows an object only when it is whole."""

    package: str
    """What fsspec needs for it."""
    credentials: str
    """Where its client looks for them."""
    transfer: dict[str, Any]
    """Settings of uploads and downloads."""


# A file that goes in parts has up to 4 x 16 MiB in memory; s3fs's own numbers are 10 x 50 MB, and each worker has them.
S3 = Store(
    "s3fs",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (FSSPEC_S3_ANON=true reads public buckets without)",
    {"chunksize": 16 << 20, "max_concurrency": 4},
)
GS = Store("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`", {})
STORES = {"s3": S3, "s3a": S3, "gs": GS, "gcs": GS}
LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of the staging disk; no store's client uses these


class Output:
    """A local folder or the URL of a folder in a store; the files directly in it go by their names.

    Picklable, as workers get one. Errors of a store that may pass (a lost connection, "slow down") are tried again after PAUSES_S, with a
    line on stderr; PrepError says what is left to do. Errors of a local disk are raised as they are (OSError).
    """

    url: str
    local: Path | None
    """The folder itself, None for a URL."""

    def __init__(self, url: str | Path):
        text = str(url)
        for scheme in ("file://", "local://"):
            text = text.removeprefix(scheme)
        scheme, is_url, place = text.partition("://")
        self.local = None if is_url else Path(text)
        self.url = f"{scheme}://{place.rstrip('/')}" if is_url else str(self.local)

    def __str__(self) -> str:
        return self.url

    def make(self) -> None:
        """Make the folder, and find out by an empty file whether it can be written. Raises PrepError."""
        if self.local is not None:
            if self.local.is_file():
                raise PrepError(f"{self}: cannot be written (is a file); choose another folder, or change this one")
            try:
                self.local.mkdir(parents=True, exist_ok=True)
                with temporary_file(self.local / "writable"):
                    pass
            except OSError as error:
                raise PrepError(f"{self}: cannot be written ({error.strerror}); choose another folder, or change this one") from error
            return
        if self._scheme not in STORES:
            kinds = ", ".join(f"{scheme}://" for scheme in STORES)
            raise PrepError(f"{self}: cannot be written, or shows files before they are whole; expected a folder or one of {kinds}")
        probe_name = f".writable.{socket.gethostname()}.{os.getpid()}"
        try:
            self._attempt("writing", lambda: self._fs.pipe_file(self._path(probe_name), b""))
        except FileNotFoundError as error:
            raise PrepError(f"{self}: no such bucket ({error}); create it first, or correct the URL") from error
        self.remove(probe_name)

    def size(self, name: str) -> int:
        """Bytes of a file, -1 if there is none."""
        if self.local is not None:
            path = self.local / name
            return path.stat().st_size if path.exists() else -1
        try:
            return self._attempt(f"looking for {name}", lambda: self._size(name))
        except FileNotFoundError:
            return -1

    def sizes(self) -> dict[str, int]:
        """Bytes of every file directly in the folder, by name; {} if there is no folder."""
        try:
            if self.local is not None:
                with os.scandir(self.local) as entries:
                    return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
            return self._attempt("listing", self._sizes)
        except FileNotFoundError:
            return {}

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, None if there is no such file. Raises ShardError if it is something else."""
        if self.local is not None:
            return files.read_json(self.local / name)
        try:
            content = self._attempt(f"reading {name}", lambda: self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        return files.parse_json(content, f"{self}/{name}")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` as JSON, whole or not at all."""
        with self.staging() as folder:
            files.write_json(folder / name, content)
            self.publish(folder / name)

    def claim(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` as JSON unless the file is there: of several processes that do this at once in a folder, the first one's stays.

        Stores have no such thing: there the last one's does.
        """
        if self.local is None:
            self.write_json(name, content)
            return
        with temporary_file(self.local / name) as file:
            file.write(files.json_bytes(content))
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, self.local / name)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                os.replace(file.name, self.local / name)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder in which to make files before `publish`: the folder itself, for a URL a temporary one (TMPDIR) that goes at the end."""
        if self.local is not None:
            yield self.local
            return
        with temporary_folder() as folder:
            yield folder

    def publish(self, path: Path) -> None:
        """Bring a whole file to its place, under its name; it is gone from where it was, unless that is its place."""
        if self.local is not None:
            if path.parent != self.local:
                with open(path, "rb") as source, replacing(self.local / path.name) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                path.unlink()
            return
        try:
            self._attempt(f"uploading {path.name}", lambda: self._upload(path))
        except FileNotFoundError as error:
            raise PrepError(f"{self}: {error}; the bucket, or {path}, is gone") from error
        path.unlink()

    def fetch(self, name: str, folder: Path) -> Path:
        """A file as a local path: where it is, or for a URL in `folder`, once it has come whole. Raises PrepError if there is none."""
        if self.local is not None:
            return self.local / name
        try:
            self._attempt(f"fetching {name}", lambda: self._download(name, folder / name))
        except FileNotFoundError as error:
            raise PrepError(f"{self}/{name}: no such file; write or copy it there again") from error
        return folder / name

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            if self.local is not None:
                (self.local / name).unlink()
            else:
                self._attempt(f"removing {name}", lambda: self._fs.rm_file(self._path(name)))
        except FileNotFoundError:
            pass

    def free_bytes(self) -> int | None:
        """Bytes that may still be written to the disk of a folder, which may be yet to make; None for a URL."""
        if self.local is None:
            return None
        there = next(folder for folder in (self.local.absolute(), *self.local.absolute().parents) if folder.is_dir())
        return shutil.disk_usage(there).free

    # ---- at a URL ----

    @property
    def _scheme(self) -> str:
        return self.url.split("://")[0]

    @cached_property
    def _fs(self) -> Any:
        """fsspec's file system, with its connections."""
        import fsspec  # here, as a local folder needs none of it

        return fsspec.core.url_to_fs(self.url)[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "local": self.local}  # connections stay behind

    def _path(self, name: str = "") -> str:
        path = str(self._fs._strip_protocol(self.url))
        return f"{path}/{name}" if name else path

    def _size(self, name: str) -> int:
        self._fs.invalidate_cache(self._path())  # others write there, too
        info = self._fs.info(self._path(name))
        return int(info["size"]) if info["type"] == "file" else -1

    def _sizes(self) -> dict[str, int]:
        self._fs.invalidate_cache(self._path())
        listed = self._fs.ls(self._path(), detail=True)
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in listed if entry["type"] == "file"}

    def _upload(self, path: Path) -> None:
        size = path.stat().st_size
        self._fs.put_file(str(path), self._path(path.name), **STORES[self._scheme].transfer)
        if (arrived := self._size(path.name)) != size:
            raise OSError(f"{arrived} of {size} bytes arrived")

    def _download(self, name: str, path: Path) -> None:
        size, temporary = self._size(name), temporary_beside(path)
        settings = STORES[self._scheme].transfer if self._scheme in STORES else {}
        try:
            self._fs.get_file(self._path(name), str(temporary), **settings)
            if (arrived := temporary.stat().st_size) != size:
                raise OSError(f"{arrived} of {size} bytes arrived")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _attempt(self, doing: str, action: Callable[[], T]) -> T:
        """Do it, again after errors that may pass. Raises FileNotFoundError as it is, PrepError for what will not pass by itself."""
        for pause_s in (*PAUSES_S, None):
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as error:  # every store's client has classes of its own
                if isinstance(error, OSError) and error.errno in LOCAL_ERRORS:
                    error.filename = error.filename or tempfile.gettempdir()
                    raise
                if remedy := self._remedy(error):
                    raise PrepError(f"{self}: {remedy}") from error
                if pause_s is None:
                    text = f"{doing} failed {1 + len(PAUSES_S)} times, at last with: {error}"
                    raise PrepError(f"{self}: {text}; check URL and network, the same command continues") from error
                print(f"{self}: {doing} failed ({error}); again in {pause_s:.0f} s", file=sys.stderr, flush=True)
                time.sleep(pause_s)
        raise AssertionError("the last pause is None")

    def _remedy(self, error: Exception) -> str | None:
        """What to do about an error that waiting does not mend, None for one that may pass."""
        text = " ".join(str(error).split())
        store = STORES.get(self._scheme)
        credentials = f"; credentials come from {store.credentials}" if store else ""
        if isinstance(error, ImportError):
            return f"{text}: pip install {store.package}" if store else text
        if isinstance(error, PermissionError):
            return f"no permission to do this ({text}){credentials}"
        if "Credential" in type(error).__name__ or "Profile" in type(error).__name__:  # NoCredentialsError, DefaultCredentialsError ...
            return f"{text}{credentials}"
        if isinstance(error, (ValueError, NotImplementedError)) or "Validation" in type(error).__name__:
            return f"{text}; expected a folder or a URL such as s3://bucket/folder"
        return None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of our own in TMPDIR, which goes at the end. What a killed process of this host left goes with the next."""
    host = socket.gethostname()
    for leftover in Path(tempfile.gettempdir()).glob(f".vit_staging.{glob.escape(host)}.*.tmp"):
        remove_if_abandoned(leftover)
    # Not tempfile.TemporaryDirectory: the end of its block fails when a cleaner of /tmp came first.
    folder, descriptor = locked_folder(Path(tempfile.gettempdir()) / "vit_staging")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
