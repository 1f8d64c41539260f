"""Download complete files, verify them, and resume after an interruption.

Bytes are written to `<name>.part`. If a connection is lost, `vit.data.storage.http` requests the
remaining bytes. The file is renamed only after it has been verified, by its checksum if that is
known, and otherwise by reading the archive's table of members.
"""

import argparse
import fcntl
import hashlib
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from data_prep.errors import PrepError, readable
from data_prep.read.archives import is_compressed_tar, walk_archive
from data_prep.write.jobs import count_one
from vit.data.storage.http import Refused, WebFile, WebFolder
from vit.system.files import parse_json
from vit.system.meter import Meter
from vit.system.redact import shown
from vit.system.retry import RetryPolicy
from vit.system.urls import on_the_web, resolve


def download(
    url: str, path: Path, checksum: str = "", accept: Callable[[Path], object] | None = None
) -> None:
    """Download `url` (http or https) to `path`, with progress on stderr.

    An existing file with the right checksum is reused, and an existing `<path>.part` is resumed.
    Raises PrepError if the file does not exist, has the wrong checksum or is not accepted, and
    ShardError if the server is unreachable.

    Args:
        checksum: The md5 or sha256 in hex, or "" for no check.
        accept: A function that raises a PrepError if the file is wrong. The message begins with the
            path.
    """
    if not on_the_web(url):
        raise PrepError(f"{shown(url)}: expected an address that begins with http:// or https://")

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    kind = "sha256" if len(checksum) == 64 else "md5"
    with open(part, "a+b") as file:
        try:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)  # Only one process downloads the file.

            if path.exists():
                actual = checksum_of(path, kind) if checksum else ""
                if actual != checksum:
                    raise PrepError(
                        f"{path}: its {kind} is {actual}, expected {checksum}: remove this file to"
                        f" download it again from {shown(url)}"
                    )
            else:
                _fetch(url, file)
                try:
                    actual = checksum_of(part, kind) if checksum else ""
                    if actual != checksum:
                        raise PrepError(
                            f"{shown(url)}: its {kind} is {actual} ({part.stat().st_size:,} bytes),"
                            f" expected {checksum}: the file on the server differs, or a proxy"
                            " replaced it. The download was deleted. Try again, or download it"
                            f" elsewhere and save it as {path}"
                        )
                    if accept is not None:
                        accept(part)
                except PrepError as error:
                    part.unlink()
                    raise PrepError(str(error).replace(f"{part}: ", f"{shown(url)}: ")) from error
                os.replace(part, path)
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()

    verified = f"{kind} verified" if checksum else "not compared with any checksum"
    print(f"{path}: exists, {verified}", file=sys.stderr, flush=True)


def download_archive(url: str, folder: Path, expected: str = "", name: str = "") -> Path:
    """Download a zip or tar into `folder` under `name` or its own name, and return its path.

    Files of other types and incomplete archives are deleted. Raises the same errors as `download`.
    """
    url = resolve(url)
    if folder.exists() and not folder.is_dir():
        raise PrepError(f"{folder}: this is a file, but --download expects a folder")

    path = folder / (name or PurePosixPath(urllib.parse.urlsplit(url).path).name or "archive")
    is_new = not path.exists()
    download(url, path, expected, _read_table)
    if is_new and not expected:
        print(
            f"{path}: use --sha256 {checksum_of(path, 'sha256')} to verify it",
            file=sys.stderr,
            flush=True,
        )
    return path


def _read_table(path: Path) -> None:
    if is_compressed_tar(path):  # Decompression checks the complete archive later.
        return
    members, _ = walk_archive(path)
    for _ in members:
        pass


def _sha256(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a sha256 checksum, which has 64 hexadecimal digits"
        )
    return text.lower()


ARCHIVE_FLAGS: dict[str, dict[str, Any]] = {
    "--download": {
        "metavar": "URL",
        "help": (
            "download this zip or tar into the folder SOURCE and read it there; a partial download"
            " is resumed"
        ),
    },
    "--sha256": {
        "type": _sha256,
        "metavar": "HEX",
        "help": "expected sha256 of the --download archive; any other file is rejected",
    },
}


def fetched(args: argparse.Namespace) -> Path:
    """Return the source path, after downloading the source if --download was given.

    Raises the same errors as `download`.
    """
    place: Path = args.source
    if args.download:
        return download_archive(args.download, place, args.sha256 or "")
    if args.sha256:
        raise PrepError(
            "--sha256 verifies the file that --download fetches: pass both flags or neither"
        )
    return place


def download_flags(files: str, size: str) -> dict[str, dict[str, Any]]:
    """Return the `--download` and `--url` flags for `files`, such as "the archive"."""
    return {
        "--download": {
            "action": "store_true",
            "help": f"first download {files} into the folder SOURCE ({size})",
        },
        "--url": {
            "metavar": "BASE",
            "help": f"download from a mirror with {files} below BASE; implies --download",
        },
    }


def download_if_asked(args: argparse.Namespace, md5: Mapping[str, str], base: str) -> None:
    """Download the files missing from SOURCE if --download or --url was given."""
    if args.download or args.url:
        for name, expected in md5.items():
            download(f"{(args.url or base).rstrip('/')}/{name}", args.source / name, expected)


def _fetch(url: str, file: BinaryIO) -> None:
    """Download the bytes that `file` still lacks, and append them."""
    num_present = file.seek(0, os.SEEK_END)

    try:
        with WebFile(url, "", RetryPolicy(), start=num_present) as source:
            total = max(source.open().size - num_present, 0) // 1_000_000
            with Meter(f"downloading {Path(file.name).stem}", total, "MB") as meter:
                while piece := source.read1():
                    file.write(piece)
                    meter.update((source.at - num_present) // 1_000_000)
    except FileNotFoundError as error:
        raise PrepError(f"{shown(url)}: {error.strerror}; correct the address") from error

    file.flush()
    os.fsync(file.fileno())


def checksum_of(path: Path, kind: str) -> str:
    """Return a file's "md5" or "sha256" in hex, with progress on stderr."""
    digest = hashlib.new(kind, usedforsecurity=False)
    with (
        readable(path),
        open(path, "rb", buffering=0) as file,
        Meter(f"{kind} of {path.name}", path.stat().st_size >> 20, "MiB") as meter,
    ):
        while data := file.read(1 << 23):
            digest.update(data)
            meter.update(file.tell() >> 20)
    return digest.hexdigest()


class WebShards(WebFolder):
    """The files at `<url>/<name>`. HTTP cannot list files, so callers pass the names."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, or -1. Raises PrepError if it does not exist."""
        try:
            return self.stat(name, parts_only=False).size
        except FileNotFoundError as error:
            raise PrepError(f"{self}/{name}: {error.strerror}") from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file, or None if it is missing. Raises ShardError if the file
        is not JSON."""
        try:
            with WebFile(self.url, name, self.retry) as file:
                return parse_json(b"".join(iter(file.read1, b"")), f"{self}/{name}")
        except FileNotFoundError:
            return None
        except Refused as error:
            # Object stores return 403 for a missing file if the user may not list files.
            if error.status == 403:
                return None
            raise

    def fetch(self, name: str, folder: Path) -> Path:
        """Download a file into `folder`. Raises PrepError if the file does not exist."""
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
