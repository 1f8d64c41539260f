"""The run folder: file names, the training lock, the marker of a stopped run, and
`checkpoint.json`.

    runs/<name>/
      config.yaml            the resolved config, with command, commit and versions in a header
      metrics.jsonl          metrics and events, see vit.loggers.record
      predictions.npz        predicted class of each validation image in the newest evaluation
      samples/               loss of each training image in each epoch, see vit.hooks.sample_losses
      checkpoints/           full training state, see vit.checkpoint.checkpoint
      weights/               last, best (and last_ema, best_ema), for evaluation and other tools;
                             config.json and a link model.safetensors, which timm opens
      export/                folders for other programs, see launch/export.py
      report/                index.html and its pictures, see vit.extras.report
      stopped_early          exists while the run is stopped but not finished
      .lock                  locked by the training process

`checkpoint.json` stores the size and sha256 of each file beside it, and a hash of its own content.
A flipped bit therefore cannot change the step, the config or the weights unnoticed. This module
does not import torch, because batch scripts and programs that copy runs use it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vit.config.schema import CheckpointConfig, Config, RunConfig
from vit.distributed.launcher import is_main_process
from vit.system.by_name import load
from vit.system.files import ShardError, remove_leftovers, replacing, temporary_beside
from vit.system.host import default_folder, file_system
from vit.system.meter import Meter
from vit.system.redact import shown
from vit.system.urls import bare, is_url

if TYPE_CHECKING:
    from vit.distributed.process_group import World

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
PREDICTIONS_FILE = "predictions.npz"
SAMPLES_FOLDER = "samples"
CHECKPOINTS = "checkpoints"
INFO_FILE = "checkpoint.json"
"""The file written last in each checkpoint folder. A checkpoint folder that contains this file is
complete."""
LATEST_FILE = f"{CHECKPOINTS}/latest"
TIMM_CONFIG_FILE = "config.json"
"""The file in `weights/` from which timm and transformers create the model."""
REPORT_FOLDER = "report"
STOPPED_FILE = "stopped_early"
LOCK_FILE = ".lock"
MOUNTED_BUCKETS = (
    "fuse.blobfuse",
    "fuse.blobfuse2",
    "fuse.gcsfuse",
    "fuse.geesefs",
    "fuse.goofys",
    "fuse.mountpoint-s3",
    "fuse.rclone",
    "fuse.s3fs",
)
"""The kernel's names for the file systems of programs that mount a bucket as a folder."""
LOCK_WAIT_S = 15.0
"""The maximum time to wait for the lock while the previous process may still be saving a large
checkpoint."""


def weights_file(run_dir: Path, name: str, averaged: bool = False) -> Path:
    """Return the path of the weights `name` ("last" or "best"), or of their EMA version."""
    return run_dir / "weights" / f"{name}{'_ema' if averaged else ''}.safetensors"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoint folders of a run, newest first."""
    before: list[Path] | None = None
    while True:
        folders = sorted((run_dir / CHECKPOINTS).glob("step_*"), reverse=True)
        complete = [folder for folder in folders if (folder / INFO_FILE).is_file()]
        # A live run may have replaced all listed checkpoints with newer ones, so list them again.
        if complete or folders == before:
            return complete
        before = folders


def surplus_checkpoints(names: Sequence[str], settings: CheckpointConfig) -> list[str]:
    """Return those of `names`, newest first, that neither `keep_last` nor `keep_every` keeps."""
    every = (settings.keep_every or 0) * settings.every_steps
    older = names[settings.keep_last :]
    return [name for name in older if not every or int(name.removeprefix("step_")) % every]


def newest_run(argument: str, *names: str) -> Path:
    """Find the run in runs/ whose files `names` changed most recently, print its path and return
    it.

    argument: the missing argument, shown in messages. Raises ValueError if no run has these files.
    """
    paths = [path for name in names for path in Path("runs").glob(f"*/{name}")]
    if not paths:
        raise ValueError(
            f"no {argument} was given, and runs/ contains none: train one first, or pass a run"
            " folder"
        )
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    run_dir = Path(*newest.parts[:2])
    if is_main_process():
        print(f"{argument} not given: using the newest run, {run_dir}", file=sys.stderr)
    return run_dir


def mark_stopped(run_dir: Path, step: int, signal_name: str) -> None:
    """Write the file that marks a run as stopped at `step` but not finished. The Slurm script reads
    this file."""
    text = json.dumps({"step": step, "signal": signal_name})
    with replacing(run_dir / STOPPED_FILE) as file:
        file.write(f"{text}\n".encode())


def remove_unfinished(run_dir: Path) -> None:
    """Remove unfinished files left by killed processes from a run folder. The caller must hold the
    lock. Raises OSError."""
    for checkpoint in (run_dir / CHECKPOINTS).glob(".tmp_*"):
        shutil.rmtree(checkpoint)
    for name in (".", "weights", SAMPLES_FOLDER, REPORT_FOLDER):
        remove_leftovers(run_dir / name)


class RunLock:
    """A lock that prevents a second process from writing to a run folder.

    A POSIX record lock is released when its process ends, is not inherited by loader workers, and
    works over NFS. A process also loses the lock when it closes any handle to the file. The file is
    therefore opened only once, and a process that has the lock must not call `is_in_use`.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._file: IO[str] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Take the lock, unless this process holds it already.

        Waits up to `LOCK_WAIT_S` for another process to release the lock, because the ranks of a
        killed launcher may still be saving. Raises ValueError if that process is still running
        afterwards.
        """
        if self._file is not None:
            return
        try:
            file = (self._run_dir / LOCK_FILE).open("a+")
        except OSError as error:
            raise ValueError(
                f"run.dir={self._run_dir}: cannot be written ({error.strerror}): choose another"
                f" folder{_mount_hint(self._run_dir)}"
            ) from None
        try:
            self._wait_for(file)
            _check_renames(self._run_dir)
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        # Write unbuffered, so that closing does not repeat a write that failed on a full disk.
        # The text is only used to name the process in messages, so ignore errors.
        with suppress(OSError):
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file

    def _wait_for(self, file: IO[str]) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        is_announced = False
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                file.seek(0)
                holder = file.read().strip() or "another process"
            except OSError as error:  # a file system without locks
                print(
                    f"{self._run_dir}: this file system has no locks ({error.strerror}): make sure"
                    f" that only one run uses this folder{_mount_hint(self._run_dir)}",
                    file=sys.stderr,
                )
                return
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{self._run_dir}: in use by a live run ({holder}): wait until it ends, stop"
                    " it, or use another run.dir"
                )
            if not is_announced:
                is_announced = True
                print(
                    f"{self._run_dir}: waiting up to {LOCK_WAIT_S:.0f} s for {holder} to end",
                    file=sys.stderr,
                )
            time.sleep(0.2)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the locked folder, which has not been removed,
        moved or replaced."""
        if self._file is None:
            return True
        try:
            return os.path.samestat(
                os.fstat(self._file.fileno()), os.stat(self._run_dir / LOCK_FILE)
            )
        except OSError:  # the file is missing, or its NFS handle is stale
            return False

    def check_in_place(self) -> None:
        """Raise ValueError if the folder was removed, moved or replaced since it was locked.

        Other processes then find no lock at the path, so a second run may already be writing there.
        """
        if not self.is_in_place():
            raise ValueError(
                f"run.dir={self._run_dir}: was removed, moved or replaced during the run, so"
                " nothing more is saved. If it was moved, move it back, and run the same command to"
                " continue from its newest checkpoint"
            )

    def release(self) -> None:
        """Release the lock, so that another process can use the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _check_renames(run_dir: Path) -> None:
    """Raise ValueError if folders in `run_dir` cannot be renamed.

    Each checkpoint is completed by renaming its folder, which a bucket mounted as a folder may not
    support.
    """
    probe = temporary_beside(run_dir / "renamed")
    renamed = temporary_beside(run_dir / "renamed")
    try:
        probe.mkdir()
        (probe / "file").touch()
        probe.rename(renamed)
    except OSError as error:
        raise ValueError(
            f"run.dir={run_dir}: folders in it cannot be created and renamed ({error.strerror}),"
            f" which checkpoints require: choose another folder{_mount_hint(run_dir)}"
        ) from None
    finally:
        for folder in (probe, renamed):
            shutil.rmtree(folder, ignore_errors=True)


def _mount_hint(run_dir: Path, root: Path = Path("/")) -> str:
    """Return a remedy if `run_dir` is on a FUSE mount, else "". root: the parent of `proc`."""
    kind = file_system(run_dir, root)
    if not kind.startswith("fuse"):
        return ""
    return (
        f"; it is mounted ({kind}): use the URL of the bucket instead, such as"
        f" run.dir=s3://bucket/name, or run.dir=file://{run_dir.absolute()}, which needs no locks"
        " or renames (docs/resume.md)"
    )


def mount_note(run_dir: Path, root: Path = Path("/")) -> str:
    """Return a warning if `run_dir` is in a mounted bucket, else ""."""
    if file_system(run_dir, root) not in MOUNTED_BUCKETS:
        return ""
    return (
        "a mounted bucket locks only on this machine and renames by copying: two jobs may use the"
        " run at the same time, and a killed job may leave an incomplete"
        f" checkpoint{_mount_hint(run_dir, root)}"
    )


def is_in_use(run_dir: Path) -> bool | None:
    """Return whether another process trains in `run_dir`, or None if the lock is unreadable."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


SEAL = "sha256_of_the_rest"
"""The key in `checkpoint.json` for a hash of all other values."""


class CheckpointError(ValueError):
    """The error for a checkpoint that is damaged, or cannot be read or written. The message is one
    line."""


class UnreadableCheckpoint(CheckpointError):
    """The error for a checkpoint that cannot be read but may be intact. The message is one line."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Convert an OSError about files in `folder` to a CheckpointError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(f"{folder}: a file is missing or damaged") from None
    except OSError as error:
        raise UnreadableCheckpoint(
            f"{error.filename or folder}: cannot be read ({error.strerror}); check its permissions"
            " and its disk. Nothing was changed"
        ) from None


def sealed(info: dict[str, Any]) -> dict[str, Any]:
    """Return `info` with a hash of its values."""
    plain = json.loads(json.dumps(info))  # tuples become lists, as in the file
    return {**plain, SEAL: _digest(plain)}


def read_info_file(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`.

    Raises CheckpointError if the file has changed or another program wrote it, and
    UnreadableCheckpoint if the file cannot be read.
    """
    try:
        with reading(folder):
            content = (folder / INFO_FILE).read_bytes()
        info = json.loads(content)
        info["format_version"] = int(info["format_version"])
        # Raise an error immediately if a value that callers need is missing.
        info["step"], info["config"], info["facts"], dict(info["files"])
    except UnreadableCheckpoint:
        raise
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder}: {INFO_FILE} is missing or damaged, so this is not a checkpoint of this"
            " project"
        ) from None
    if info.get(SEAL) != _digest(info):
        raise CheckpointError(
            f"{folder / INFO_FILE}: its content does not match the sha256 stored in it: the file is"
            " damaged"
        )
    return info


def checked_info(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json` after checking the files that it lists. Raises the
    errors of `read_info_file` and `check_files`."""
    info = read_info_file(folder)
    check_files(folder, info)
    return info


def check_files(folder: Path, info: dict[str, Any]) -> None:
    """Raise CheckpointError if the size or hash of a file differs from `info`, and
    UnreadableCheckpoint if a file cannot be read."""
    for name, expected in info["files"].items():
        path = folder / name
        with reading(folder):
            size = path.stat().st_size if path.is_file() else 0
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, but {INFO_FILE} records {expected['bytes']:,}: the"
                " file is truncated or missing"
            )
        with reading(folder), Meter(f"checking {path}", size >> 20, "MiB") as meter:
            sha256 = _sha256(path, meter)
        if sha256 != expected["sha256"]:
            raise CheckpointError(
                f"{path}: its content does not match the sha256 in {INFO_FILE}: the file is damaged"
            )


def _digest(info: dict[str, Any]) -> str:
    values = {key: value for key, value in info.items() if key != SEAL}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path, meter: Meter) -> str:
    """Return the sha256 of a file. meter: displays the progress in MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**24):
            digest.update(chunk)
            meter.update(file.tell() >> 20)
    return digest.hexdigest()


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
        """Create the folder of a new run, and lock it. Return whether it contains a checkpoint, of
        a process that was faster and has ended. Raises ValueError if it cannot be created."""
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
        """Upload new files. Return the time in seconds, or None if the run has no URL."""
        return None

    def address(self) -> str:
        """Return the URL to which the folder is copied, or "" if it has none."""
        return ""

    def leave(self, error: BaseException | None) -> None:
        """Allow other jobs to write to the run. error: the error that ended the run, if any."""


def open_folder(config: Config, world: World) -> Place:
    """Return the run's folder. Raises ValueError for a URL, which `vit.extras.compose` opens."""
    assert config.run.dir is not None, "load_config names the run folder"
    if is_url(config.run.dir):
        raise ValueError(
            f"run.dir={config.run.dir}: build this run with vit.extras.compose.build_run"
        )
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


def local_copy(run: object, only_weights: bool = False) -> Path:
    """Return `run` if it is a path. If it is a URL, download the run and return the local folder.

    only_weights: download only weights and metrics.jsonl. Raises the errors of
    `vit.extras.remote_runs.reading`.
    """
    if not is_url(run):
        return Path(str(run))
    local_run = load("vit.extras.remote_runs.reading:local_run", shown(str(run)))
    folder: Path = local_run(str(run), only_weights=only_weights)
    return folder
