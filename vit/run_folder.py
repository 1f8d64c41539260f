"""Where a run is (`Place`), every name in its folder, the lock that one process holds on it, the
mark of a stopped run, and `checkpoint.json`.

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

`checkpoint.json` has size and sha256 of each file beside it, and a hash of itself, so that no
flipped bit becomes another step, another config or other weights. This module does not import
torch: programs that copy runs and batch scripts use it.
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
MOUNTED_BUCKETS = tuple(
    f"fuse.{name}"
    for name in (
        *("blobfuse", "blobfuse2", "gcsfuse", "geesefs", "goofys", "mountpoint-s3", "rclone"),
        "s3fs",
    )
)
"""What the kernel calls file systems that are an object store underneath."""
LOCK_WAIT_S = 15.0
"""How long to wait for the previous process of a run to end: about what saving a large checkpoint
takes."""


def weights_file(run_dir: Path, name: str, averaged: bool = False) -> Path:
    """Return the file of the weights `name` (last or best), or of their average."""
    return run_dir / "weights" / f"{name}{'_ema' if averaged else ''}.safetensors"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first."""
    before: list[Path] | None = None
    while True:
        folders = sorted((run_dir / CHECKPOINTS).glob("step_*"), reverse=True)
        complete = [folder for folder in folders if (folder / INFO_FILE).is_file()]
        # A run that goes on may have removed all that were listed, for newer ones.
        if complete or folders == before:
            return complete
        before = folders


def newest_run(argument: str, *names: str) -> Path:
    """Return the folder in runs/ with the most recently changed of the files `names`, and say so.

    argument: what was not given instead, for messages. Raises ValueError if there is none.
    """
    found = [path for name in names for path in Path("runs").glob(f"*/{name}")]
    if not found:
        raise ValueError(
            f"no {argument} given and none under runs/: train one first, or name a run folder"
        )
    newest = max(found, key=lambda path: path.stat().st_mtime)
    run_dir = Path(*newest.parts[:2])
    if is_main_process():
        print(f"{argument} not given: taking the newest run, {run_dir}", file=sys.stderr)
    return run_dir


def mark_stopped(run_dir: Path, step: int, signal_name: str) -> None:
    """Record that the run was asked to stop at `step` and is not finished; Slurm's script reads
    it."""
    text = json.dumps({"step": step, "signal": signal_name})
    with replacing(run_dir / STOPPED_FILE) as file:
        file.write(f"{text}\n".encode())


def remove_unfinished(run_dir: Path) -> None:
    """Remove what killed processes left unfinished in a run folder; for the one that may write
    there. Raises OSError."""
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
        ranks of the previous attempt may still be saving. Raises ValueError if it goes on.
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
        # Unbuffered: what a full disk refuses must not be tried again when the file is closed. The
        # lock is held without it.
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

        Whoever uses its path then sees no lock: a second run may be writing there already.
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
    """Raise ValueError where folders cannot be renamed: no checkpoint could be complete or absent.

    A bucket that is mounted as a folder is such a place.
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
    """Return what to do where `run_dir` is on a mounted store, else "". root: the folder of
    `proc`."""
    kind = file_system(run_dir, root)
    if not kind.startswith("fuse"):
        return ""
    return (
        f"; it is mounted ({kind}): a bucket's own URL, as run.dir=s3://bucket/name, or"
        f" run.dir=file://{run_dir.absolute()} needs no locks and no renames (docs/resume.md)"
    )


def mount_note(run_dir: Path, root: Path = Path("/")) -> str:
    """Return a note for people where `run_dir` is in a mounted bucket, else ""."""
    if file_system(run_dir, root) not in MOUNTED_BUCKETS:
        return ""
    return (
        "a mounted bucket locks for this machine alone, and renames by copying: two jobs may use"
        f" the run at once, and a kill may leave half a checkpoint{_mount_hint(run_dir, root)}"
    )


def is_in_use(run_dir: Path) -> bool | None:
    """Return whether another process is training in `run_dir`; None if that is not visible here."""
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
    """A file of a checkpoint is missing or not as it was written; one line for people."""


class UnreadableCheckpoint(DamagedCheckpoint):
    """The system refuses to read a checkpoint, which may be whole; one line for people."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what the system says about the files in `folder` into an error of this module."""
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
    plain = json.loads(json.dumps(info))  # as it will be read
    return {**plain, SEAL: _digest(plain)}


def read_info_file(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`.

    Raises DamagedCheckpoint if it is not as it was written, or is another program's, and
    UnreadableCheckpoint.
    """
    try:
        with reading(folder):
            content = (folder / INFO_FILE).read_bytes()
        info = json.loads(content)
        info["format_version"] = int(info["format_version"])
        info["step"], info["config"], info["facts"], dict(info["files"])  # what readers rely on
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
    """Return the content of `checkpoint.json` after a look at the files that it names; raises what
    `read_info_file` and `check_files` raise."""
    info = read_info_file(folder)
    check_files(folder, info)
    return info


def check_files(folder: Path, info: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint if a file that `info` names has another size or hash, and
    UnreadableCheckpoint if it cannot be read."""
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
            found = _sha256(path, meter)
        if found != expected["sha256"]:
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
    """Return `run` if it is a path, else a folder with what was fetched of the run at that URL.

    only_weights: fetch only weights and record. Raises as `vit.extras.remote_runs.reading`.
    """
    if not is_url(run):
        return Path(str(run))
    local_run = load("vit.extras.remote_runs.reading:local_run", shown(str(run)))
    folder: Path = local_run(str(run), only_weights=only_weights)
    return folder
