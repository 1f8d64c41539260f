"""Where a run is: in a folder of this machine.

`vit.extras.remote_runs.opening.StoredPlace` is one whose folder is the working copy of a URL.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from vit.checkpoint.run_folder import RunLock, remove_unfinished
from vit.config.schema import Config, RunConfig
from vit.distributed.process_group import World
from vit.system.by_name import load
from vit.system.files import ShardError
from vit.system.host import default_folder
from vit.system.redact import shown
from vit.system.urls import bare, is_url


class Place:
    """A folder; rank 0 alone calls the methods."""

    is_lost = False
    """Whether another job has taken the run over."""
    setting = "run.dir"
    """The setting that names the folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def lock(self, lock: RunLock) -> None:
        """Keep other jobs from writing to the run."""
        if self.folder.is_dir():
            lock.acquire()
            self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Remove what killed processes have left in the folder."""
        with suppress(OSError):  # the next write reports why it fails
            remove_unfinished(self.folder)

    def check(self) -> None:
        """Raise ValueError if another job has taken the run over."""

    def push(self) -> float | None:
        """Upload what is new; return the seconds it took, None where nothing is uploaded."""
        return None

    def address(self) -> str:
        """Return the URL that is kept equal to the folder, "" without one."""
        return ""

    def leave(self, error: BaseException | None) -> None:
        """Let another job take the run over. error: what ended the run."""


def open_folder(config: Config, world: World) -> Place:
    """Return the run's folder. Raises ValueError for a URL, which `vit.extras.compose` opens."""
    assert config.run.dir is not None, "load_config names the run folder"
    if is_url(config.run.dir):
        raise ValueError(f"run.dir={config.run.dir}: build the run by vit.extras.compose.build_run")
    return Place(Path(config.run.dir))


def local_folder(run: RunConfig) -> Path:
    """Return the folder in which the run is worked on: `run.dir`, or the copy of a URL.

    Raises ValueError if no disk of this machine is known for a copy.
    """
    assert run.dir is not None, "load_config names the run folder"
    if not is_url(run.dir):
        return Path(run.dir)
    return Path(run.local_dir) if run.local_dir is not None else cache_of(run.dir, "runs")


def cache_of(url: str, kind: str) -> Path:
    """Return the folder for a copy of `url` on a disk of this machine, named as the run is.

    kind: "runs", or "fetched" for what is only read. Raises ValueError as `local_folder`.
    """
    name = bare(url).rstrip("/")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    try:
        place = default_folder()
    except ShardError:
        raise ValueError(
            f"{shown(url)}: no folder on a disk of this machine is known for the run's working"
            " copy: name one with run.local_dir, as /scratch/name, or set TMPDIR"
        ) from None
    with suppress(OSError):  # the next write reports why it fails
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place / kind / digest / name.rpartition("/")[2]


def local_copy(run: object, only_weights: bool = False) -> Path:
    """Return the folder of `run`, a path; or of what was fetched of it, if it is a URL.

    only_weights: fetch nothing else. Raises ValueError as `vit.extras.remote_runs.reading`.
    """
    if not is_url(run):
        return Path(str(run))
    local_run = load("vit.extras.remote_runs.reading:local_run", shown(str(run)))
    folder: Path = local_run(str(run), only_weights=only_weights)
    return folder
