"""The place where a run is stored: a folder, or a URL with a working copy on this machine."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vit.config.schema import Config, RunConfig
from vit.run_folder.lock import RunLock
from vit.run_folder.paths import complete_checkpoints, remove_unfinished
from vit.system.files import ShardError
from vit.system.host import default_folder
from vit.system.redact import shown
from vit.system.urls import bare, is_url

if TYPE_CHECKING:
    from vit.distributed.process_group import World


class Place:
    """The folder of a run. Only rank 0 calls its methods."""

    is_lost = False
    """Whether another job has started to write to the run."""
    setting = "run.dir"
    """The setting that names the folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def lock(self, lock: RunLock) -> None:
        """Prevent other jobs from writing to the run."""
        if self.folder.is_dir():
            lock.acquire()
            self.remove_unfinished()

    def create(self, lock: RunLock) -> bool:
        """Create the folder of a new run, and lock it. Return whether it already contains a
        checkpoint, because another process was faster and has ended. Raises ValueError if the
        folder cannot be created."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run.dir={self.folder}: cannot be written ({error.strerror}): choose another"
                " folder, or free some space"
            ) from None
        self.lock(lock)
        return bool(complete_checkpoints(self.folder))

    def remove_unfinished(self) -> None:
        """Remove unfinished files left by killed processes."""
        with suppress(OSError):  # the next write reports the error
            remove_unfinished(self.folder)

    def check(self) -> None:
        """Raise ValueError if another job has started to write to the run."""

    def push(self) -> float | None:
        """Upload new files. Return the seconds that the upload took, or None if the run has no
        URL."""
        return None

    def address(self) -> str:
        """Return the URL to which the folder is copied, or "" if it has none."""
        return ""

    def leave(self, error: BaseException | None) -> None:
        """Allow other jobs to write to the run. error: the error that ended the run, if any."""


def open_folder(config: Config, world: World) -> Place:
    """Return the run's folder."""
    assert config.run.dir is not None, "load_config names the run folder"
    return Place(Path(config.run.dir))


def local_folder(run: RunConfig) -> Path:
    """Return the folder to which the run writes: `run.dir`, or the local copy of a URL.

    Raises ValueError if no local disk is known for the copy.
    """
    assert run.dir is not None, "load_config names the run folder"
    if not is_url(run.dir):
        return Path(run.dir)
    return Path(run.local_dir) if run.local_dir is not None else cache_of(run.dir, "runs")


def cache_of(url: str, kind: str) -> Path:
    """Return the local folder for a copy of `url`, named after the run.

    kind: "runs", or "fetched" for a read-only copy. Raises ValueError in the same case as
    `local_folder`.
    """
    name = bare(url).rstrip("/")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    try:
        place = default_folder()
    except ShardError:
        raise ValueError(
            f"{shown(url)}: found no local disk for the run's working copy: set run.local_dir, as"
            " in run.local_dir=/scratch/name, or set TMPDIR"
        ) from None

    with suppress(OSError):  # the next write reports the error
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place / kind / digest / name.rpartition("/")[2]
