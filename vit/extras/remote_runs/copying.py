"""Between a run's URL and a copy of it on this machine: which files are the same, and bringing
those that are not.

Beside the files of a copy lies `.copy_of.json`: the URL, and for each file that was brought or
uploaded its size and time here and its version there, so that the next job on this machine moves
only what is new.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vit.data.shards.stores import Version
from vit.data.storage.object_store import ObjectStore
from vit.extras.remote_runs.lease import LEASE_FILE
from vit.extras.remote_runs.record_parts import RECORD_FOLDER
from vit.run_folder import CHECKPOINTS, INFO_FILE, METRICS_FILE, read_info_file
from vit.system.files import flush, sha256_of, write_json
from vit.system.meter import Meter
from vit.system.redact import shown
from vit.system.urls import bare

COPY_FILE = ".copy_of.json"
ONLY_HERE = (CHECKPOINTS, METRICS_FILE, "wandb", LEASE_FILE)
"""Names in a run folder that are not moved as they are: the first two in ways of their own; W&B
has what is in its folder, or is asked to sync it from here (docs/resume.md)."""
NUM_DOWNLOADS = 2
"""Of a checkpoint whose bytes are not those of its sha256: the second may be right."""


class Copy:
    """The folder `folder` as a copy of `url`, and what is known to be the same in both."""

    def __init__(self, folder: Path, url: str):
        self.folder = folder
        self._url = bare(url)
        self._same: dict[str, tuple[int, int, str]] = {}

    def load(self) -> None:
        """Read what is known, in a folder that is there, and locked.

        Raises ValueError for a folder with something else in it.
        """
        folder = self.folder
        url = self._url
        try:
            known = json.loads((folder / COPY_FILE).read_text())
            found_url = str(known["url"])
            same = {name: (int(a), int(b), str(c)) for name, (a, b, c) in known["same"].items()}
        except FileNotFoundError:
            if folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
                raise ValueError(
                    f"{folder}: is to be the working copy of {shown(url)} and holds something"
                    " else: choose another run.local_dir"
                ) from None
            self.save()
            return
        except (ValueError, KeyError, TypeError):  # a power cut: all is compared anew
            return
        if found_url != self._url:
            raise ValueError(
                f"{folder}: is the working copy of {found_url}, not of {shown(url)}: choose another"
                " run.local_dir"
            )
        self._same = same

    def is_same(self, name: str, version: Version | None) -> bool:
        """Whether a file here is the one of `version` there, as far as is known."""
        known = self._same.get(name)
        if known is None or version is None or known[:2] != self.stamp(name):
            return False
        # What was uploaded has no tag: only a listing tells it, and nobody else may upload.
        return known[0] == version.size and known[2] in ("", version.tag)

    def note(self, name: str, tag: str = "", stamp: tuple[int, int] | None = None) -> None:
        """Remember that a file is the same in both; stamp: of before it was uploaded."""
        self._same[name] = (*(stamp or self.stamp(name)), tag)

    def forget(self, name: str) -> None:
        """Remember that a file is gone."""
        self._same.pop(name, None)

    def names(self) -> list[str]:
        """Return the files that are known to be in both."""
        return list(self._same)

    def save(self) -> None:
        """Write what is known beside the files."""
        write_json(self.folder / COPY_FILE, {"url": self._url, "same": self._same})

    def clear(self) -> None:
        """Remove all files but the lock; what is known goes first."""
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
        """Return size and time of change of a file here, by which a changed one is known."""
        try:
            status = (self.folder / name).stat()
        except OSError:
            return -1, -1
        return status.st_size, status.st_mtime_ns


def plain_names(names: Iterable[str]) -> list[str]:
    """Return those of a run's files that are moved as they are: all but checkpoints and record."""
    return [
        name
        for name in names
        if name
        and name.partition("/")[0] not in (*ONLY_HERE, RECORD_FOLDER)
        and not any(part.startswith(".") for part in name.split("/"))
        and not name.startswith(f"{LEASE_FILE.partition('.')[0]}.")  # a clock's probe
    ]


def files_below(folder: Path) -> list[str]:
    """Return the names of all files in a run folder, as `a/b`; links are not files of their own."""
    tops = [path for path in folder.iterdir() if path.name not in ONLY_HERE]
    paths = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    found = (path for path in paths if path.is_file() and not path.is_symlink())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def bring(
    store: ObjectStore, wanted: Mapping[str, Version], copy: Copy, what: str, into: str = ""
) -> None:
    """Fetch files that are not here yet, each complete or not at all.

    what: for the progress line. into: a folder in place of the files' own. Raises ValueError,
    FileNotFoundError for a file that has gone meanwhile, and OSError for a full disk.
    """
    missing = {name: version for name, version in wanted.items() if not copy.is_same(name, version)}
    total_bytes = sum(version.size for version in missing.values())
    done_bytes = 0
    with Meter(f"fetching {what}", total_bytes >> 20, "MiB") as meter:
        for name, version in missing.items():
            path = copy.folder / (f"{into}/{Path(name).name}" if into else name)
            path.parent.mkdir(parents=True, exist_ok=True)

            def on_bytes(came: int, before: int = done_bytes) -> None:
                meter.update((before + came) >> 20)

            store.download(name, path, on_bytes)
            done_bytes += version.size
            if not into:
                copy.note(name, version.tag)


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoints_in(listing: Mapping[str, Version]) -> dict[str, dict[str, Version]]:
    """Return the files of each checkpoint by its folder's name, newest first; complete or not."""
    found: dict[str, dict[str, Version]] = {}
    for name, version in listing.items():
        top, _, rest = name.partition("/")
        folder, _, file = rest.partition("/")
        if top == CHECKPOINTS and folder.startswith("step_") and file:
            found.setdefault(folder, {})[name] = version
    return dict(sorted(found.items(), reverse=True))


def info_name(folder: str) -> str:
    """Return the name of the file that makes the checkpoint `folder` complete."""
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
    """Fetch the newest checkpoint whose bytes are those of its sha256, complete or not at all.

    on_damage: gets the folder of one that is damaged, and what is wrong with it. Returns the folder
    that was brought, or was here, None if there is none. Raises what `bring` raises.
    """
    parts = checkpoints_in(listing)
    for folder in complete_in(listing):
        files = parts[folder]
        if all(copy.is_same(name, version) for name, version in files.items()):
            return folder
        hidden = f"{CHECKPOINTS}/.tmp_{folder}"  # the name that the next save clears away
        for attempt in range(NUM_DOWNLOADS):
            shutil.rmtree(copy.folder / hidden, ignore_errors=True)
            bring(store, files, copy, f"{store}/{CHECKPOINTS}/{folder}", hidden)
            problem = _damage(copy.folder / hidden)
            if not problem:
                break
            if attempt == 0:
                print(f"{store}: {folder}: {problem}; fetching it again", file=sys.stderr)
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


def _damage(folder: Path) -> str:
    """Return what is wrong with the files of a checkpoint, "" for nothing."""
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


def remove_stale_checkpoints(folder: Path, kept: Iterable[str]) -> None:
    """Remove from a copy that is only read the checkpoints that the run has removed."""
    kept = set(kept)
    for path in (folder / CHECKPOINTS).glob("*"):
        if path.name not in kept:
            with suppress(OSError):
                shutil.rmtree(path)
