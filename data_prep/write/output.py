"""Write output files to a folder or to the URL of an object store.

A worker creates its files in a staging folder and publishes them one by one. In a local folder,
files are written under a temporary name and renamed. For a store (s3://bucket/folder, gs://...),
each file is uploaded, and its size is verified. Stores show an object only after its last byte has
arrived, so an interrupted upload leaves nothing visible. The parts of an interrupted S3 upload are
invisible but are billed. A lifecycle rule "AbortIncompleteMultipartUpload" removes them.
"""

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.errors import PrepError
from vit.data.storage.object_store import KINDS, ObjectStore
from vit.system.files import (
    json_bytes,
    locked_folder,
    parse_json,
    read_json,
    remove_if_abandoned,
    replacing,
    temporary_file,
)
from vit.system.redact import shown
from vit.system.urls import local_path


class Output:
    """A local folder, or the URL of a folder in a store, whose files are accessed by name.

    An output can be pickled, so that each worker gets a copy. `vit.system.retry` retries after
    temporary store errors (a lost connection, "slow down"). Other store errors become a ShardError
    with a remedy. Errors of a local disk are raised unchanged (OSError).
    """

    def __init__(self, url: str | Path):
        self.local = local_path(url)
        scheme, _, place = str(url).partition("://")
        self.url = f"{scheme}://{place.rstrip('/')}" if self.local is None else str(self.local)
        self._store = ObjectStore(self.url)

    def __str__(self) -> str:
        return shown(self.url)

    def make(self) -> None:
        """Create the folder, and write an empty file to test that the folder is writable.

        Raises PrepError, or ShardError for a store.
        """
        if self.local is not None:
            try:
                self.local.mkdir(parents=True, exist_ok=True)
                with temporary_file(self.local / "writable"):
                    pass
            except OSError as error:
                raise PrepError(
                    f"{self}: cannot be written ({error.strerror}); choose another folder, or fix"
                    " the permissions"
                ) from error
            return

        if self._store.kind is None:
            kinds = ", ".join(f"{scheme}://" for scheme in KINDS)
            raise PrepError(
                f"{self}: URLs of this kind are read-only, or show incomplete files; expected a"
                f" folder or one of {kinds}"
            )
        self._store.try_writing(f".writable.{socket.gethostname()}.{os.getpid()}")

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, or -1 if it does not exist."""
        if self.local is not None:
            path = self.local / name
            return path.stat().st_size if path.exists() else -1
        try:
            return self._store.stat(name).size
        except FileNotFoundError:
            return -1

    def sizes(self) -> dict[str, int]:
        """Return the size of each file directly in the folder, or {} if the folder does not
        exist."""
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
        """Return the object in a JSON file, or None if it is missing. Raises ShardError if the file
        is not JSON."""
        if self.local is not None:
            return read_json(self.local / name)
        try:
            return parse_json(self._store.read_all(name), f"{self}/{name}")
        except FileNotFoundError:
            return None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` as JSON atomically."""
        self.write(name, json_bytes(content))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        with self.staging() as folder:
            with replacing(folder / name) as file:
                file.write(content)
            self.publish(folder / name)

    def claim(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` as JSON unless the file exists.

        If several processes claim a file, a local folder keeps the first file. A store keeps the
        last file, because stores do not support claims.
        """
        if self.local is None:
            self.write_json(name, content)
            return

        with temporary_file(self.local / name) as file:
            file.write(json_bytes(content))
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, self.local / name)
            except FileExistsError:
                pass
            except OSError:  # needed on file systems without hard links
                os.replace(file.name, self.local / name)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a folder for files that will be published. For a URL, the folder is in TMPDIR."""
        if self.local is not None:
            yield self.local
            return
        with temporary_folder() as folder:
            yield folder

    def publish(self, path: Path) -> None:
        """Move a complete file to the output under its own name."""
        if self.local is not None:
            if path.parent != self.local:
                with open(path, "rb") as source, replacing(self.local / path.name) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                path.unlink()
            return

        try:
            self._store.upload(path)
        except FileNotFoundError as error:
            raise PrepError(f"{self}: {error}; the bucket or {path} no longer exists") from error
        path.unlink()

    def fetch(self, name: str, folder: Path) -> Path:
        """Return the local path of a file. If the output is a URL, download the file to `folder`
        first.

        Raises PrepError if the file does not exist.
        """
        if self.local is not None:
            return self.local / name

        try:
            self._store.download(name, folder / name)
        except FileNotFoundError as error:
            raise PrepError(f"{self}/{name}: no such file: write or copy it again") from error
        return folder / name

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            if self.local is not None:
                (self.local / name).unlink()
            else:
                self._store.remove(name)

    def free_bytes(self) -> int | None:
        """Return the free disk space in bytes, or None for a URL. The folder need not exist."""
        if self.local is None:
            return None
        path = self.local.absolute()
        existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
        return shutil.disk_usage(existing).free


def remove_left_folders() -> None:
    """Remove temporary folders that killed processes left behind on this host."""
    pattern = f".vit_staging.{glob.escape(socket.gethostname())}.*.tmp"
    for leftover in Path(tempfile.gettempdir()).glob(pattern):
        remove_if_abandoned(leftover)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder in TMPDIR, and remove it when the block ends."""
    remove_left_folders()

    # tempfile.TemporaryDirectory would fail on exit if a cleanup job had already removed the folder
    # from /tmp.
    folder, descriptor = locked_folder(Path(tempfile.gettempdir()) / "vit_staging")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
