"""A run folder: every name in it, the lock that one process holds on it, and the mark of a stopped
run.

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
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from vit.distributed.launcher import is_main_process
from vit.system.files import remove_leftovers, replacing, temporary_beside
from vit.system.host import file_system

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
