"""The lock of a run folder, which prevents two processes from writing to it."""

import fcntl
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from vit.run_folder.paths import LOCK_FILE
from vit.system.files import temporary_beside
from vit.system.host import file_system

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
"""The kernel's names for file systems by which programs mount a bucket as a folder."""
LOCK_WAIT_S = 15.0
"""The maximum time to wait for the lock while the previous process may still be saving a large
checkpoint."""


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
        """Lock the open file. If another process has locked it, tell the user once, and wait for
        that process to end. A file system without locks only causes a warning.
        """
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
    """Return a remedy if `run_dir` is on a FUSE mount, else "". root: the folder that contains
    `proc`."""
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
