"""The folder of a run: its place (`Place`), the names of its files, the lock of the process that
trains, the mark of a stopped run, and `checkpoint.json`.

    runs/<name>/
      config.yaml            the resolved config; command, commit and versions in its header
      metrics.jsonl          the record, see vit.loggers.record
      predictions.npz        predicted class of each validation image, from the newest evaluation
      samples/               loss of each training image in each epoch, see vit.hooks.sample_losses
      checkpoints/           full state, see vit.checkpoint.checkpoint
      weights/               last, best (and last_ema, best_ema), for evaluation and other tools;
                             config.json and a link, model.safetensors, by which timm opens it
      export/                folders for other programs, see launch/export.py
      report/                index.html and its pictures, see vit.extras.report
      stopped_early          only while the run was asked to stop and is not finished
      .lock                  held by the process that trains

`checkpoint.json` has size and sha256 of each file beside it, and a hash of itself, so that a
flipped bit cannot change the step, the config or the weights unnoticed. This module does not import
torch, because programs that copy runs and batch scripts use it.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vit.config.schema import Config, RunConfig
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
"""In each folder of `CHECKPOINTS`; written last, so a checkpoint that has it is complete."""
LATEST_FILE = f"{CHECKPOINTS}/latest"
TIMM_CONFIG_FILE = "config.json"
"""In `weights/`: what timm and transformers need to make the model."""
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
"""The kernel's names of file systems that are an object store underneath."""
LOCK_WAIT_S = 15.0
"""Time that a new process waits for the lock: about the time that saving a large checkpoint takes,
because the previous process may still be saving."""


def weights_file(run_dir: Path, name: str, averaged: bool = False) -> Path:
    """Return the file of the weights `name` (last or best), or of their average."""
    return run_dir / "weights" / f"{name}{'_ema' if averaged else ''}.safetensors"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first."""
    before: list[Path] | None = None
    while True:
        folders = sorted((run_dir / CHECKPOINTS).glob("step_*"), reverse=True)
        complete = [folder for folder in folders if (folder / INFO_FILE).is_file()]
        # A live run may have replaced all listed checkpoints with newer ones: list again.
        if complete or folders == before:
            return complete
        before = folders


def newest_run(argument: str, *names: str) -> Path:
    """Return the folder in runs/ with the most recently changed of the files `names`; print it.

    argument: the missing argument, for messages. Raises ValueError if no folder has such a file.
    """
    paths = [path for name in names for path in Path("runs").glob(f"*/{name}")]
    if not paths:
        raise ValueError(
            f"no {argument} given and none under runs/: train one first, or name a run folder"
        )
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    run_dir = Path(*newest.parts[:2])
    if is_main_process():
        print(f"{argument} not given: taking the newest run, {run_dir}", file=sys.stderr)
    return run_dir


def mark_stopped(run_dir: Path, step: int, signal_name: str) -> None:
    """Write the file that marks a run as stopped at `step` but not finished; Slurm's script reads
    it."""
    text = json.dumps({"step": step, "signal": signal_name})
    with replacing(run_dir / STOPPED_FILE) as file:
        file.write(f"{text}\n".encode())


def remove_unfinished(run_dir: Path) -> None:
    """Remove the unfinished files of killed processes from a run folder, whose lock the caller
    holds. Raises OSError."""
    for checkpoint in (run_dir / CHECKPOINTS).glob(".tmp_*"):
        shutil.rmtree(checkpoint)
    for name in (".", "weights", SAMPLES_FOLDER, REPORT_FOLDER):
        remove_leftovers(run_dir / name)


class RunLock:
    """Keeps a second process from writing to a run folder.

    A POSIX record lock: it ends with its process, is not inherited by loader workers, and works
    over NFS. It also ends when this process closes *any* handle of the file, so it is acquired
    once, and `is_in_use` must not be called by the process that holds it.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._file: IO[str] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Take the lock, unless it is held already.

        Waits up to `LOCK_WAIT_S` for the process that holds it: after the launcher was killed, the
        ranks of the previous attempt may still be saving. Raises ValueError if it still runs.
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
        # Unbuffered: a write that a full disk refuses must not be repeated when the file is closed.
        # The text only names the process in messages, so the lock works without it.
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
                    f"{self._run_dir}: cannot be locked here ({error.strerror}): make sure that"
                    f" only one run uses it{_mount_hint(self._run_dir)}",
                    file=sys.stderr,
                )
                return
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{self._run_dir}: in use by a live run ({holder}): wait for its end, stop it,"
                    " or use another run.dir"
                )
            if not is_announced:
                is_announced = True
                print(
                    f"{self._run_dir}: waiting up to {LOCK_WAIT_S:.0f} s for {holder} to end",
                    file=sys.stderr,
                )
            time.sleep(0.2)

    def is_in_place(self) -> bool:
        """Whether the folder is still the one that was locked: not removed, moved or replaced."""
        if self._file is None:
            return True
        try:
            return os.path.samestat(
                os.fstat(self._file.fileno()), os.stat(self._run_dir / LOCK_FILE)
            )
        except OSError:  # no such file; or NFS, whose file is gone
            return False

    def check_in_place(self) -> None:
        """Raise ValueError if the folder was removed, moved or replaced since it was locked.

        Other processes then see no lock at its path: a second run may already be writing there.
        """
        if not self.is_in_place():
            raise ValueError(
                f"run.dir={self._run_dir}: was removed, moved or replaced while the run was using"
                " it, so nothing more is saved there. If it was moved, move it back: the same"
                " command continues from its newest checkpoint"
            )

    def release(self) -> None:
        """Let another process use the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _check_renames(run_dir: Path) -> None:
    """Raise ValueError if folders cannot be renamed, because a checkpoint is completed by a rename.

    That is the case in a bucket that is mounted as a folder.
    """
    probe = temporary_beside(run_dir / "renamed")
    renamed = temporary_beside(run_dir / "renamed")
    try:
        probe.mkdir()
        (probe / "file").touch()
        probe.rename(renamed)
    except OSError as error:
        raise ValueError(
            f"run.dir={run_dir}: folders cannot be written and renamed there ({error.strerror}), as"
            f" a checkpoint needs it: choose another folder{_mount_hint(run_dir)}"
        ) from None
    finally:
        for folder in (probe, renamed):
            shutil.rmtree(folder, ignore_errors=True)


def _mount_hint(run_dir: Path, root: Path = Path("/")) -> str:
    """Return a remedy if `run_dir` is on a mounted store, else "". root: the folder of `proc`."""
    kind = file_system(run_dir, root)
    if not kind.startswith("fuse"):
        return ""
    return (
        f"; it is mounted ({kind}): a bucket's own URL, as run.dir=s3://bucket/name, or"
        f" run.dir=file://{run_dir.absolute()} needs no locks and no renames (docs/resume.md)"
    )


def mount_note(run_dir: Path, root: Path = Path("/")) -> str:
    """Return a note for the user if `run_dir` is in a mounted bucket, else ""."""
    if file_system(run_dir, root) not in MOUNTED_BUCKETS:
        return ""
    return (
        "a mounted bucket locks for this machine alone, and renames by copying: two jobs may use"
        f" the run at once, and a kill may leave half a checkpoint{_mount_hint(run_dir, root)}"
    )


def is_in_use(run_dir: Path) -> bool | None:
    """Return whether another process is training in `run_dir`; None if the lock is unreadable."""
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
"""Key of the hash of all other values; the first checkpoints had none."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing or has changed; the message is one line."""


class UnreadableCheckpoint(DamagedCheckpoint):
    """The system refuses to read a checkpoint, which may be intact; the message is one line."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn an OSError about the files in `folder` into an error of this module."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DamagedCheckpoint(f"{folder}: a file is missing or damaged") from None
    except OSError as error:
        raise UnreadableCheckpoint(
            f"{error.filename or folder}: cannot be read ({error.strerror}); check its permissions"
            " and its disk. Nothing was changed"
        ) from None


def sealed(info: dict[str, Any]) -> dict[str, Any]:
    """Return `info` with the hash of its values."""
    plain = json.loads(json.dumps(info))  # tuples become lists, as a reader will see them
    return {**plain, SEAL: _digest(plain)}


def read_info_file(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`.

    Raises DamagedCheckpoint if it has changed, or another program wrote it, and
    UnreadableCheckpoint.
    """
    try:
        with reading(folder):
            content = (folder / INFO_FILE).read_bytes()
        info = json.loads(content)
        info["format_version"] = int(info["format_version"])
        # Readers rely on these values: a missing one is an error here, not later.
        info["step"], info["config"], info["facts"], dict(info["files"])
    except UnreadableCheckpoint:
        raise
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpoint(
            f"{folder}: {INFO_FILE} is missing or damaged, so this is not a checkpoint of this"
            " project"
        ) from None
    if info.get(SEAL, _digest(info)) != _digest(info):
        raise DamagedCheckpoint(
            f"{folder / INFO_FILE}: its content does not match the sha256 in it: it is damaged"
        )
    return info


def checked_info(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json` after checking the files that it names. Raises the
    errors of `read_info_file` and `check_files`."""
    info = read_info_file(folder)
    check_files(folder, info)
    return info


def check_files(folder: Path, info: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint if size or hash of a file differ from those in `info`, and
    UnreadableCheckpoint if a file cannot be read."""
    for name, expected in info["files"].items():
        path = folder / name
        with reading(folder):
            size = path.stat().st_size if path.is_file() else 0
        if size != expected["bytes"]:
            raise DamagedCheckpoint(
                f"{path}: has {size:,} bytes, {INFO_FILE} says {expected['bytes']:,}: it is"
                " truncated or missing"
            )
        with reading(folder), Meter(f"checking {path}", size >> 20, "MiB") as meter:
            sha256 = _sha256(path, meter)
        if sha256 != expected["sha256"]:
            raise DamagedCheckpoint(
                f"{path}: its content does not match the sha256 in {INFO_FILE}: it is damaged"
            )


def _digest(info: dict[str, Any]) -> str:
    values = {key: value for key, value in info.items() if key != SEAL}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path, meter: Meter) -> str:
    """Return the hash of a file; `meter` counts MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**24):
            digest.update(chunk)
            meter.update(file.tell() >> 20)
    return digest.hexdigest()


class Place:
    """A folder that holds a run; only rank 0 calls the methods."""

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
        """Remove the unfinished files of killed processes."""
        with suppress(OSError):  # the next write reports why it fails
            remove_unfinished(self.folder)

    def check(self) -> None:
        """Raise ValueError if another job has taken the run over."""

    def push(self) -> float | None:
        """Upload new files; return the seconds it took, or None if the run has no URL."""
        return None

    def address(self) -> str:
        """Return the URL to which the folder is copied, or "" if there is none."""
        return ""

    def leave(self, error: BaseException | None) -> None:
        """Let another job take the run over. error: the error that ended the run, if any."""


def open_folder(config: Config, world: World) -> Place:
    """Return the run's folder. Raises ValueError for a URL: `vit.extras.compose` opens those."""
    assert config.run.dir is not None, "load_config names the run folder"
    if is_url(config.run.dir):
        raise ValueError(f"run.dir={config.run.dir}: build the run by vit.extras.compose.build_run")
    return Place(Path(config.run.dir))


def local_folder(run: RunConfig) -> Path:
    """Return the folder that the run writes to: `run.dir`, or the local copy of a URL.

    Raises ValueError if no disk of this machine is known for a copy.
    """
    assert run.dir is not None, "load_config names the run folder"
    if not is_url(run.dir):
        return Path(run.dir)
    return Path(run.local_dir) if run.local_dir is not None else cache_of(run.dir, "runs")


def cache_of(url: str, kind: str) -> Path:
    """Return the folder for a copy of `url` on a disk of this machine; it has the run's name.

    kind: "runs", or "fetched" for a copy that is only read. Raises ValueError as `local_folder`.
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
    """Return `run` if it is a path; else fetch the run at that URL, and return the copy's folder.

    only_weights: fetch only weights and record. Raises as `vit.extras.remote_runs.reading`.
    """
    if not is_url(run):
        return Path(str(run))
    local_run = load("vit.extras.remote_runs.reading:local_run", shown(str(run)))
    folder: Path = local_run(str(run), only_weights=only_weights)
    return folder
