"""Compare the run at a URL with its local copy, and download files that differ.

The file `.copy_of.json` in the local folder contains the URL, and the local size, modification time
and remote version of each transferred file. The next job on this machine therefore transfers only
new files.

metrics.jsonl is stored in immutable parts, each with the lines since the previous part:

    record/part_000000000000.jsonl    the first lines
    record/part_000000018231.jsonl    the lines of metrics.jsonl from byte 18,231
    `cat record/part_*` is metrics.jsonl

Object stores can replace objects but cannot append to them. Uploading the whole file at every save
would take longer each time. Replacing only the last part could lose lines if the process is killed
during the upload to a store that is not atomic.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from vit.checkpoint.seal import INFO_FILE, read_info_file
from vit.data.shards.reader import Version
from vit.data.storage.object_store import ObjectStore
from vit.run_folder.paths import CHECKPOINTS, METRICS_FILE
from vit.system.files import flush, sha256_of, write_json
from vit.system.meter import Meter
from vit.system.redact import shown
from vit.system.retry import RetryPolicy
from vit.system.urls import bare, on_the_web, resolve

LEASE_FILE = "lease.json"
COPY_FILE = ".copy_of.json"
RECORD_FOLDER = "record"
NUM_THREADS = 8
ONLY_HERE = (CHECKPOINTS, METRICS_FILE, "wandb", LEASE_FILE)
"""The names in a run folder that are not copied as plain files. Checkpoints and metrics.jsonl have
a different format at the URL, and W&B syncs its own files (docs/resume.md)."""
NUM_DOWNLOADS = 2
"""The number of download attempts for a checkpoint whose sha256 does not match."""


def store_at(url: str, patience_s: float, setting: str = "run.dir=") -> ObjectStore:
    """Return the store at `url`, which may contain environment variables as `${NAME}`.

    setting: the setting or flag with the URL, for messages. Raises ValueError for a web server,
    which is read-only.
    """
    resolved = resolve(url)
    if on_the_web(resolved):
        raise ValueError(
            f"{setting}{shown(url)}: a web server cannot store runs: pass a folder, or a store's"
            " URL, such as s3://bucket/runs/name"
        )
    return ObjectStore(resolved, RetryPolicy(patience_s))


class Copy:
    """The local copy of a run, with the list of files that are known to be identical at the URL."""

    def __init__(self, folder: Path, url: str):
        self.folder = folder
        self._url = bare(url)
        self._same: dict[str, tuple[int, int, str]] = {}
        """The local size and modification time of each file, and its tag at the URL, keyed by
        name."""

    def load(self) -> None:
        """Read the list of identical files. The folder must exist and be locked.

        Raises ValueError if the folder is not a copy of this URL.
        """
        try:
            saved = json.loads((self.folder / COPY_FILE).read_text())
            saved_url = str(saved["url"])
            same = {
                name: (int(num_bytes), int(changed_ns), str(tag))
                for name, (num_bytes, changed_ns, tag) in saved["same"].items()
            }
        except FileNotFoundError:
            if self.folder.is_dir() and any(path.name != ".lock" for path in self.folder.iterdir()):
                raise ValueError(
                    f"{self.folder}: cannot be the working copy of {shown(self._url)}, because it"
                    " contains other files: choose another run.local_dir"
                ) from None
            self.save()
            return
        except (ValueError, KeyError, TypeError):
            # A power failure may have damaged the list. All files are then compared again.
            return

        if saved_url != self._url:
            raise ValueError(
                f"{self.folder}: is the working copy of {saved_url}, not of {shown(self._url)}:"
                " choose another run.local_dir"
            )
        self._same = same

    def is_same(self, name: str, version: Version | None) -> bool:
        """Return whether the local file is known to be identical to this `version` of the file at
        the URL."""
        size, time_ns, tag = self._same.get(name, (-1, -1, ""))
        if size < 0 or version is None:
            return False
        # Uploads do not return a tag. Comparing sizes is sufficient, because this job holds the
        # lease.
        is_same_there = size == version.size and tag in ("", version.tag)
        return is_same_there and (size, time_ns) == self.stamp(name)

    def note(self, name: str, tag: str = "", stamp: tuple[int, int] | None = None) -> None:
        """Record that the local and remote files are identical. stamp: the result of `stamp` before
        the upload."""
        self._same[name] = (*(stamp or self.stamp(name)), tag)

    def forget(self, name: str) -> None:
        """Record that a file was removed."""
        self._same.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of the files that are known to be identical."""
        return list(self._same)

    def save(self) -> None:
        """Write the list of identical files to the folder."""
        write_json(self.folder / COPY_FILE, {"url": self._url, "same": self._same})

    def clear(self) -> None:
        """Remove all files except the lock.

        The list of identical files is cleared first, because the process may be killed during the
        removal.
        """
        self._same = {}
        self.save()
        for path in self.folder.iterdir():
            if path.name in (COPY_FILE, ".lock"):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def stamp(self, name: str) -> tuple[int, int]:
        """Return the size and modification time of a local file, to detect changes."""
        try:
            status = (self.folder / name).stat()
        except OSError:
            return -1, -1
        return status.st_size, status.st_mtime_ns


def plain_names(names: Iterable[str]) -> list[str]:
    """Return the names of files to copy unchanged. Checkpoints and metrics are not among them."""
    visible = [name for name in names if name and "/." not in f"/{name}"]
    return [
        name
        for name in visible
        if name.partition("/")[0] not in (*ONLY_HERE, RECORD_FOLDER)
        # Skip the probe files that `_age_s` in lease.py writes.
        and not name.startswith(f"{LEASE_FILE.partition('.')[0]}.")
    ]


def files_below(folder: Path) -> list[str]:
    """Return the relative paths of all files in a run folder, without symbolic links."""
    tops = [path for path in folder.iterdir() if path.name not in ONLY_HERE]
    paths = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    files = (path for path in paths if path.is_file() and not path.is_symlink())
    return sorted(path.relative_to(folder).as_posix() for path in files)


def bring(
    store: ObjectStore, versions: Mapping[str, Version], copy: Copy, label: str, into: str = ""
) -> None:
    """Download the files in `versions` that are missing from `copy`. No file is left incomplete.

    Args:
        label: The name of the source in the progress line.
        into: The target folder, if it differs from the files' own folder.

    Raises:
        ValueError: The store fails.
        FileNotFoundError: A file was removed after the listing.
        OSError: The disk is full.
    """
    missing = {
        name: version for name, version in versions.items() if not copy.is_same(name, version)
    }
    total_bytes = sum(version.size for version in missing.values())
    done_bytes = 0
    with Meter(f"fetching {label}", total_bytes >> 20, "MiB") as meter:
        for name, version in missing.items():
            path = copy.folder / (f"{into}/{Path(name).name}" if into else name)
            path.parent.mkdir(parents=True, exist_ok=True)

            def on_bytes(num_bytes: int, before: int = done_bytes) -> None:
                meter.update((before + num_bytes) >> 20)

            store.download(name, path, on_bytes)
            done_bytes += version.size
            if not into:
                copy.note(name, version.tag)


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoints_in(listing: Mapping[str, Version]) -> dict[str, dict[str, Version]]:
    """Return the files of complete and incomplete checkpoints by folder name, newest first."""
    checkpoints: dict[str, dict[str, Version]] = {}
    for name, version in listing.items():
        match = re.match(rf"{CHECKPOINTS}/(step_[^/]*)/.", name, re.DOTALL)
        if match:
            checkpoints.setdefault(match[1], {})[name] = version

    return dict(sorted(checkpoints.items(), reverse=True))


def info_name(folder: str) -> str:
    """Return the path of `checkpoint.json`, which marks the checkpoint `folder` as complete."""
    return f"{CHECKPOINTS}/{folder}/{INFO_FILE}"


def complete_in(listing: Mapping[str, Version]) -> list[str]:
    """Return the folders of complete checkpoints, newest first."""
    return [name for name, files in checkpoints_in(listing).items() if info_name(name) in files]


def bring_checkpoint(
    store: ObjectStore,
    listing: Mapping[str, Version],
    copy: Copy,
    on_damage: Callable[[str, str], None],
) -> str | None:
    """Atomically download the newest checkpoint whose sha256 matches.

    on_damage: called with the folder of a damaged checkpoint and the problem. Returns the name of
    the folder that was downloaded or already exists locally, or None. Raises the same exceptions as
    `bring`.
    """
    parts = checkpoints_in(listing)
    for folder in complete_in(listing):
        files = parts[folder]
        if all(copy.is_same(name, version) for name, version in files.items()):
            return folder

        # The next save removes leftover folders with this name.
        hidden = f"{CHECKPOINTS}/.tmp_{folder}"
        problem = _download_checkpoint(store, files, copy, folder, hidden)
        if problem:
            shutil.rmtree(copy.folder / hidden, ignore_errors=True)
            on_damage(folder, problem)
            continue

        place = copy.folder / CHECKPOINTS / folder
        if place.exists():
            shutil.rmtree(place)
        (copy.folder / hidden).rename(place)
        flush(place.parent)
        for name, version in files.items():
            copy.note(name, version.tag)
        return folder
    return None


def _download_checkpoint(
    store: ObjectStore, files: dict[str, Version], copy: Copy, folder: str, hidden: str
) -> str:
    """Download the checkpoint `folder` into `hidden`, and again if it arrived damaged.

    Returns the problem with the files of the last download, or "" if they are intact.
    """
    problem = ""
    for attempt in range(NUM_DOWNLOADS):
        shutil.rmtree(copy.folder / hidden, ignore_errors=True)
        bring(store, files, copy, f"{store}/{CHECKPOINTS}/{folder}", hidden)
        problem = _damage(copy.folder / hidden)
        if not problem:
            return ""
        if attempt == 0:
            print(
                f"{store}: {folder}: {problem}: downloading the checkpoint again", file=sys.stderr
            )
    return problem


def _damage(folder: Path) -> str:
    """Return the problem with the files of a checkpoint, or "" if they are intact."""
    try:
        files: dict[str, Any] = read_info_file(folder)["files"]
        for name, expected in files.items():
            size = (folder / name).stat().st_size if (folder / name).exists() else 0
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes, {INFO_FILE} says {expected['bytes']:,}"
            if sha256_of(folder / name) != expected["sha256"]:
                return f"{name} does not match the sha256 in {INFO_FILE}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{INFO_FILE} is damaged"
    return ""


def remove_stale_checkpoints(folder: Path, current: Iterable[str]) -> None:
    """Remove local checkpoints that are not in `current`, because the run has removed them."""
    current_names = set(current)
    for path in (folder / CHECKPOINTS).glob("*"):
        if path.name not in current_names:
            with suppress(OSError):
                shutil.rmtree(path)


# --- metrics.jsonl --------------------------------------------------------------------------------


def part_name(start: int) -> str:
    """Return the name of the part that begins at byte `start` of metrics.jsonl."""
    return f"{RECORD_FOLDER}/part_{start:012d}.jsonl"


def parts_in(listing: Mapping[str, Version]) -> list[tuple[int, int, str]]:
    """Return (start, stop, name) of the parts of metrics.jsonl, in order, up to the first gap."""
    used = []
    end = 0
    for name in sorted(listing):
        match = re.fullmatch(RECORD_FOLDER + r"/part_(\d+)\.jsonl", name)
        if match and int(match[1]) == end:
            start, end = end, end + listing[name].size
            used.append((start, end, name))
    return used


def read_record(store: ObjectStore, listing: Mapping[str, Version]) -> bytes:
    """Return the content of metrics.jsonl at `store`, or b"" if it does not exist.

    A run that a user copied to the store has a single file `metrics.jsonl`.
    """
    whole = [METRICS_FILE] if METRICS_FILE in listing else []
    names = [name for _, _, name in parts_in(listing)] or whole
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        content = b"".join(pool.map(store.read_all, names))
    return content[: content.rfind(b"\n") + 1]


def new_lines(path: Path, start: int) -> bytes:
    """Return the complete lines of the file at `path`, starting at byte `start`."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    return content[: content.rfind(b"\n") + 1]
