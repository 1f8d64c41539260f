"""A run at a URL while it is trained: what is there is complete, and enough to go on anywhere.

    start      take the lease; bring record, newest checkpoint, weights and losses of images, unless
               the working copy has them; write the `start` line there
    each save  the saver's thread, when the files are complete here:
               weights, losses, ... -> lines of the record -> tensors -> checkpoint.json -> `latest`
               -> remove what `checkpoint.keep_last` removed here
    end        the same once more, with the report; give the lease back

`checkpoint.json` is uploaded after all that its checkpoint counts on, so a kill at any moment
leaves the newest checkpoint there complete, with the record up to its step. Only the main rank
knows of the store. While it does not answer, training goes on until the next save; what cannot be
uploaded for `data.patience_s` ends the run as a full disk does.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from vit.config.schema import Config
from vit.data.shards.stores import Version
from vit.data.storage.object_store import ObjectStore
from vit.extras.remote_runs.copying import (
    Copy,
    bring,
    bring_checkpoint,
    checkpoints_in,
    complete_in,
    files_below,
    info_name,
    plain_names,
)
from vit.extras.remote_runs.lease import Lease, LeaseLost
from vit.extras.remote_runs.place import store_at
from vit.extras.remote_runs.record_parts import (
    join_parts,
    new_lines,
    part_name,
    parts_in,
    read_record,
)
from vit.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    INFO_FILE,
    LATEST_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PREDICTIONS_FILE,
    SAMPLES_FOLDER,
    STOPPED_FILE,
    RunLock,
    complete_checkpoints,
    local_folder,
)
from vit.system.files import replacing

BROUGHT = (
    *("weights/", f"{SAMPLES_FOLDER}/"),
    *(CONFIG_FILE, PREDICTIONS_FILE, STOPPED_FILE, "wandb_id"),
)
"""What a resumed run needs of the URL besides record and checkpoint; it makes the rest again."""


class UploadError(ValueError):
    """The store refuses, or does not answer; one line for people."""


class RunStore:
    """The run at `run.dir`, a URL, on the main rank. Raises ValueError for a URL that no store has.

    All methods that talk to the store raise ValueError if that fails for `data.patience_s`, and
    `vit.extras.remote_runs.lease.LeaseLost` if another job has the run.
    """

    def __init__(self, config: Config):
        assert config.run.dir is not None, "load_config names it"
        self._config = config
        self.folder = local_folder(config.run)
        """The working copy."""
        self._store = store_at(config.run.dir, config.data.patience_s)
        self._there: dict[str, Version] = {}
        """What is at the URL, while this process has the lease."""
        self._record_bytes = 0
        self._latest = ""
        self._copy = Copy(self.folder, config.run.dir)
        self._lease = Lease(self._store, config.run.lease_s)

    def __str__(self) -> str:
        return str(self._store)

    @property
    def is_lost(self) -> bool:
        """Whether another job has the run now; the next `push` raises it."""
        return self._lease.is_lost

    def check(self) -> None:
        """Raise LeaseLost if another job has the run now."""
        if self.is_lost:
            self._lease.confirm()

    # --- start ------------------------------------------------------------------------------------

    def open(self, lock: RunLock) -> None:
        """Lock the working copy and the run at the URL, and bring what a resume needs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run.local_dir={self.folder}: cannot be made ({error.strerror}): choose another"
                " folder"
            ) from None
        lock.acquire()
        self._copy.load()
        with self._told("cannot be used"):
            self._lease.acquire(_identity(self.folder))
            self._there = self._store.list_below()
            self._store.remove_unfinished()
            record = read_record(self._store, self._there)
            self._choose_copy(record)
            self._mend_record(record)
            self._bring(record)
            self._copy.save()

    def _choose_copy(self, record: bytes) -> None:
        """Clear a working copy of an older state, or of another run."""
        here = new_lines(self.folder / METRICS_FILE, 0)
        saved = complete_checkpoints(self.folder)
        if not record and saved and not complete_in(self._there):
            raise ValueError(
                f"{self}: holds no run, its working copy {self.folder} does, up to"
                f" {saved[0].name}: remove that folder to begin anew, or copy it there to go on"
            )
        if record and here.startswith(record):
            return
        if here and record:
            print(
                f"{self}: another job has gone on since {self.folder} was its working copy: what is"
                " there counts, and is fetched",
                file=sys.stderr,
            )
        self._copy.clear()

    def _mend_record(self, record: bytes) -> None:
        """Remember where the next part begins; make that the end of the last one."""
        self._record_bytes = len(record)
        parts = parts_in(self._there)
        if record and not parts:  # a run that was copied there from a folder
            self._store.write(part_name(0), record)
            self._store.remove(METRICS_FILE)
        if parts and parts[-1][1] != len(record):  # the last one was cut short in a mounted folder
            start, _, name = parts[-1]
            self._store.write(name, record[start:])
        join_parts(self._store, self._there, record)

    def _bring(self, record: bytes) -> None:
        path = self.folder / METRICS_FILE
        if record and not path.exists():
            with replacing(path) as file:
                file.write(record)
        wanted = {
            name: self._there[name]
            for name in plain_names(self._there)
            if name.startswith(BROUGHT) and not (self.folder / name).exists()
        }
        bring(self._store, wanted, self._copy, f"{self}")
        here = complete_checkpoints(self.folder)
        there = complete_in(self._there)
        found = None
        if there and (not here or here[0].name < there[0]):
            found = bring_checkpoint(self._store, self._there, self._copy, self._set_aside)
        # Written after a checkpoint: whoever starts jobs by itself must not begin the run anew.
        if not here and found is None and LATEST_FILE in self._there:
            raise ValueError(
                f"{self}/{CHECKPOINTS}: all checkpoints are damaged or gone; put a good one back,"
                " or remove `latest` there, and the same command starts over"
            )

    def _set_aside(self, folder: str, problem: str) -> None:
        """Let a damaged checkpoint count no more; the next save removes its tensors."""
        print(
            f"{self}/{CHECKPOINTS}/{folder}: {problem}: it is damaged; trying the one before",
            file=sys.stderr,
        )
        self._store.remove(info_name(folder))
        self._there.pop(info_name(folder), None)

    # --- save -------------------------------------------------------------------------------------

    def push(self) -> float:
        """Make the URL equal to the working copy; return the seconds that it took."""
        began = time.monotonic()
        with self._told("the upload failed"):
            self._lease.confirm(self._store)
            names = plain_names(files_below(self.folder))
            for name in names:
                self._upload(name)
            for name in set(plain_names(self._copy.names())) - set(names):
                self._remove(name)  # such as `stopped_early`
            self._push_record(self._store)
            self._push_checkpoints()
            self._copy.save()
        return time.monotonic() - began

    def _push_record(self, store: ObjectStore) -> None:
        lines = new_lines(self.folder / METRICS_FILE, self._record_bytes)
        if lines:
            self._lease.ensure(store)
            name = part_name(self._record_bytes)
            if not store.write(name, lines, only_new=True, in_use=True):
                # An attempt whose answer was lost, or what a kill has cut short in a folder; or the
                # part of a job that has taken over, which nothing would bring back.
                there = store.read_all(name)
                if not lines.startswith(there):
                    self._lease.confirm(store)
                    raise LeaseLost(
                        f"{store}: another job has written {name}: this one ends, and nothing more"
                        " of it is saved there"
                    )
                if there != lines:
                    store.write(name, lines, in_use=True)
            self._record_bytes += len(lines)

    def _push_checkpoints(self) -> None:
        here = complete_checkpoints(self.folder)
        for folder in reversed(here):
            tensors = (path.name for path in folder.iterdir() if not path.name.startswith("."))
            for name in sorted(tensors, key=lambda name: (name == INFO_FILE, name)):
                name = f"{CHECKPOINTS}/{folder.name}/{name}"
                if self._is_there(name):
                    continue
                if name == info_name(folder.name):
                    self._lease.confirm(self._store)  # the checkpoint counts from here on
                self._upload(name)
        if here and self._latest != here[0].name:
            self._store.write(LATEST_FILE, f"{here[0].name}\n".encode(), in_use=True)
            self._latest = here[0].name
        kept = complete_in(self._there)[: self._config.checkpoint.keep_last]
        for name, files in checkpoints_in(self._there).items():
            if name not in kept:
                # First what makes it complete: half of one must not look whole.
                for file in sorted(files, key=lambda file: file != info_name(name)):
                    self._remove(file)

    def _is_there(self, name: str) -> bool:
        return self._copy.is_same(name, self._there.get(name))

    def _upload(self, name: str) -> None:
        if self._is_there(name):
            return
        stamp = self._copy.stamp(name)
        if stamp[0] < 0:  # gone since the folder was listed
            return
        self._lease.ensure(self._store)  # the upload before it may have taken an hour
        self._store.upload(self.folder / name, name, in_use=True)
        self._there[name] = Version(stamp[0], "")
        self._copy.note(name, stamp=stamp)

    def _remove(self, name: str) -> None:
        self._lease.ensure(self._store)
        self._store.remove(name, in_use=True)
        self._there.pop(name, None)
        self._copy.forget(name)

    # --- end --------------------------------------------------------------------------------------

    def close(self, with_record: bool = False, at_once: bool = False) -> None:
        """Give the lease back; raises nothing.

        with_record: the run ended with an error, which its last line tells: upload that, too, if
        the store answers. at_once: talk to nobody.
        """
        if at_once:
            return
        if with_record and self._record_bytes and not self.is_lost:
            once = ObjectStore(self._store.url, replace(self._store.retry, limit_s=0.0))
            with suppress(ValueError, OSError):
                self._lease.confirm(once)
                self._push_record(once)
        self._lease.release()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn what the store's client raises into one line that also says what is safe."""
        safe = ""
        if self._record_bytes:
            safe = (
                f"; the working copy {self.folder} is complete, and the same command on this"
                " machine goes on from there"
            )
        try:
            yield
        except LeaseLost:
            raise
        except FileNotFoundError as error:
            raise UploadError(f"{self}: {what} ({error}): there is no such bucket{safe}") from None
        except OSError as error:
            place = error.filename or self.folder  # of a URL that is a folder, that may be full
            raise UploadError(
                f"{place}: cannot be written ({error.strerror}): free some space{safe}"
            ) from None
        except ValueError as error:
            raise UploadError(f"{error}{safe}") from None


def _identity(folder: Path) -> str:
    """Return what tells a locked folder from all others, of this machine and of others."""
    status = os.stat(folder / LOCK_FILE)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: whoever comes waits until the lease expires
        boot = os.urandom(8).hex()
    return hashlib.sha256(f"{boot} {status.st_dev} {status.st_ino}".encode()).hexdigest()[:16]
