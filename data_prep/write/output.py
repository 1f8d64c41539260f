"""Where shards go, or lie: a folder, or an object store by its URL. Free of torch.

The data's story: a worker makes its files in a staging folder and publishes them one after the
other. In a local folder they are at their place already, made under a temporary name and renamed.
To a store (s3://bucket/folder, gs://...) each is uploaded whole and its size is compared; stores
show an object when its last byte has arrived, so a kill in the middle of an upload leaves nothing
to be seen. (What S3 keeps of an upload in parts that was cut is invisible, but paid for: a
lifecycle rule "AbortIncompleteMultipartUpload" clears it away.)
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.errors import PrepError
from vit.data.storage.object_store import KINDS, ObjectStore
from vit.system import files
from vit.system.files import locked_folder, remove_if_abandoned, replacing, temporary_file
from vit.system.urls import shown


class Output:
    """A local folder or the URL of a folder in a store; the files directly in it go by their names.

    Picklable, as workers get one. Errors of a store that may pass (a lost connection, "slow down")
    are tried again by `vit.data.storage.retry`; ShardError says what is left to do. Errors of a
    local disk are raised as they are (OSError).
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
        self._store = ObjectStore(self.url)

    def __str__(self) -> str:
        return shown(self.url)

    def make(self) -> None:
        """Make the folder, and find out by an empty file whether it can be written. Raises
        PrepError."""
        if self.local is not None:
            if self.local.is_file():
                raise PrepError(
                    f"{self}: cannot be written (is a file); choose another folder, or change"
                    " this one"
                )
            try:
                self.local.mkdir(parents=True, exist_ok=True)
                with temporary_file(self.local / "writable"):
                    pass
            except OSError as error:
                raise PrepError(
                    f"{self}: cannot be written ({error.strerror}); choose another folder, or"
                    " change this one"
                ) from error
            return
        if self._store.kind is None:
            kinds = ", ".join(f"{scheme}://" for scheme in KINDS)
            raise PrepError(
                f"{self}: cannot be written, or shows files before they are whole; expected a"
                f" folder or one of {kinds}"
            )
        try:
            self._store.try_writing(f".writable.{socket.gethostname()}.{os.getpid()}")
        except FileNotFoundError as error:
            raise PrepError(
                f"{self}: no such bucket ({error}); create it first, or correct the URL"
            ) from error

    def size(self, name: str) -> int:
        """Bytes of a file, -1 if there is none."""
        if self.local is not None:
            path = self.local / name
            return path.stat().st_size if path.exists() else -1
        try:
            return self._store.stat(name).size
        except FileNotFoundError:
            return -1

    def sizes(self) -> dict[str, int]:
        """Bytes of every file directly in the folder, by name; {} if there is no folder."""
        try:
            if self.local is not None:
                with os.scandir(self.local) as entries:
                    return {
                        entry.name: entry.stat().st_size for entry in entries if entry.is_file()
                    }
            return {name: version.size for name, version in self._store.list().items()}
        except FileNotFoundError:
            return {}

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, None if there is no such file. Raises ShardError if it is
        something else."""
        if self.local is not None:
            return files.read_json(self.local / name)
        try:
            content = self._store.whole(name)
        except FileNotFoundError:
            return None
        return files.parse_json(content, f"{self}/{name}")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` as JSON, whole or not at all."""
        with self.staging() as folder:
            files.write_json(folder / name, content)
            self.publish(folder / name)

    def claim(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` as JSON unless the file is there: of several processes that do this at
        once in a folder, the first one's stays.

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
        """A folder in which to make files before `publish`: the folder itself, for a URL a
        temporary one (TMPDIR) that goes at the end."""
        if self.local is not None:
            yield self.local
            return
        with temporary_folder() as folder:
            yield folder

    def publish(self, path: Path) -> None:
        """Bring a whole file to its place, under its name; it is gone from where it was, unless
        that is its place."""
        if self.local is not None:
            if path.parent != self.local:
                with open(path, "rb") as source, replacing(self.local / path.name) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                path.unlink()
            return
        try:
            self._store.upload(path)
        except FileNotFoundError as error:
            raise PrepError(f"{self}: {error}; the bucket, or {path}, is gone") from error
        path.unlink()

    def fetch(self, name: str, folder: Path) -> Path:
        """A file as a local path: where it is, or for a URL in `folder`, once it has come whole.
        Raises PrepError if there is none."""
        if self.local is not None:
            return self.local / name
        try:
            self._store.download(name, folder / name)
        except FileNotFoundError as error:
            raise PrepError(f"{self}/{name}: no such file; write or copy it there again") from error
        return folder / name

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            if self.local is not None:
                (self.local / name).unlink()
            else:
                self._store.remove(name)
        except FileNotFoundError:
            pass

    def free_bytes(self) -> int | None:
        """Bytes that may still be written to the disk of a folder, which may be yet to make; None
        for a URL."""
        if self.local is None:
            return None
        there = next(
            folder
            for folder in (self.local.absolute(), *self.local.absolute().parents)
            if folder.is_dir()
        )
        return shutil.disk_usage(there).free


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of our own in TMPDIR, which goes at the end. What a killed process of this host left
    goes with the next."""
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
