"""Upload the changes of a run's working copy to its URL during training.

The files at the URL are always complete, and any machine can resume from them:

    start      acquire the lease; download metrics, newest checkpoint, weights and sample losses
               that the working copy lacks; upload the `start` line of metrics.jsonl
    each save  in the saver's thread, when the local files are complete, upload
               weights, losses, ... -> lines of metrics -> tensors -> checkpoint.json -> `latest`
               -> remove the checkpoints that `checkpoint.keep_last` and `keep_every` do not keep
    end        upload the last changes and the report; release the lease

`checkpoint.json` is uploaded after all other files of a checkpoint. Therefore, the newest
checkpoint at the URL is complete even if the process is killed, and has all metrics up to its step.
Only the main rank uses the store. If the store does not answer, training continues until the next
save. The run fails if the store does not answer for `loader.patience_s` seconds.
"""

import hashlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from vit.checkpoint.seal import INFO_FILE
from vit.config.schema import Config
from vit.data.shards.reader import Version
from vit.data.storage.object_store import ObjectStore
from vit.distributed.exit import Interrupted
from vit.distributed.process_group import World
from vit.extras.remote_runs.lease import Lease, LeaseLost, holder_of
from vit.feature import Parts
from vit.run_folder.copying import (
    Copy,
    bring,
    bring_checkpoint,
    checkpoints_in,
    complete_in,
    files_below,
    info_name,
    new_lines,
    part_name,
    parts_in,
    plain_names,
    read_record,
    store_at,
)
from vit.run_folder.lock import RunLock
from vit.run_folder.paths import (
    CHECKPOINTS,
    CONFIG_FILE,
    LATEST_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PREDICTIONS_FILE,
    SAMPLES_FOLDER,
    STOPPED_FILE,
    complete_checkpoints,
    surplus_checkpoints,
)
from vit.run_folder.place import Place, local_folder
from vit.system.files import replacing

DOWNLOADED = (
    "weights/",
    f"{SAMPLES_FOLDER}/",
    CONFIG_FILE,
    PREDICTIONS_FILE,
    STOPPED_FILE,
    "wandb_id",
)
"""The files that a resumed run needs in addition to metrics and the checkpoint. The run rewrites
all other files."""


class UploadError(ValueError):
    """The error raised if a store refuses a request or does not answer."""


class RunStore(Place):
    """The run at the URL `run.dir`, on the main rank. Raises ValueError for an invalid URL.

    `folder` is the working copy.

    Methods that use the store raise ValueError if the store fails for `loader.patience_s` seconds,
    and `vit.extras.remote_runs.lease.LeaseLost` if another job holds the lease.
    """

    def __init__(self, config: Config):
        assert config.run.dir is not None, "load_config sets run.dir"
        self._config = config
        super().__init__(local_folder(config.run))
        self._store = store_at(config.run.dir, config.loader.patience_s)
        self._remote: dict[str, Version] = {}
        """The files at the URL, which are valid while this process holds the lease."""
        self._record_bytes = 0
        self._latest = ""
        self._copy = Copy(self.folder, config.run.dir)
        self._lease = Lease(self._store, config.run.lease_s)

    def __str__(self) -> str:
        return str(self._store)

    @property
    def is_lost(self) -> bool:  # type: ignore[override]
        """True if the lease is lost. The next `push` then raises LeaseLost."""
        return self._lease.is_lost

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost."""
        if self.is_lost:
            self._lease.confirm()

    def address(self) -> str:
        """See `Place`."""
        return str(self)

    # --- start ------------------------------------------------------------------------------------

    def lock(self, lock: RunLock) -> None:
        """Lock the working copy, acquire the lease, and download the files needed to resume."""
        print(f"run folder: {self}, with its working copy in {self.folder}", file=sys.stderr)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run.local_dir={self.folder}: cannot be created ({error.strerror}): choose another"
                " folder"
            ) from None

        lock.acquire()
        self._copy.load()
        with self._reporting_errors("cannot be used"):
            self._lease.acquire(_identity(self.folder))
            self._remote = self._store.list_below()
            self._store.remove_unfinished()
            record = read_record(self._store, self._remote)
            self._choose_copy(record)
            self._mend_record(record)
            self._bring(record)
            self._copy.save()

        self.remove_unfinished()

    def _choose_copy(self, record: bytes) -> None:
        """Clear the working copy if it is outdated or belongs to another run."""
        local_record = new_lines(self.folder / METRICS_FILE, 0)
        saved = complete_checkpoints(self.folder)
        is_gone = not record and not complete_in(self._remote)
        if is_gone and saved:
            raise ValueError(
                f"{self}: no run exists at this URL, but its working copy {self.folder} has one, up"
                f" to {saved[0].name}: remove that folder to start over, or copy it to the URL"
            )

        if record and local_record.startswith(record):
            return

        if local_record and record:
            print(
                f"{self}: another job has continued the run, so the working copy {self.folder} is"
                " outdated: downloading the run from the URL",
                file=sys.stderr,
            )

        self._copy.clear()

    def _mend_record(self, record: bytes) -> None:
        """Record the byte at which the next part begins, and repair a truncated part."""
        self._record_bytes = len(record)
        parts = parts_in(self._remote)
        if record and not parts:  # A user copied the run to the URL.
            self._store.write(part_name(0), record)
            self._store.remove(METRICS_FILE)

        if parts and parts[-1][1] != len(record):
            # In a mounted folder, a kill can leave the last part truncated.
            start, _, name = parts[-1]
            self._store.write(name, record[start:])

    def _bring(self, record: bytes) -> None:
        """Download the files and the newest checkpoint that the working copy lacks.

        Raises ValueError if the run has lost all its checkpoints.
        """
        path = self.folder / METRICS_FILE
        if record and not path.exists():
            with replacing(path) as file:
                file.write(record)

        versions = {
            name: self._remote[name]
            for name in plain_names(self._remote)
            if name.startswith(DOWNLOADED) and not (self.folder / name).exists()
        }
        bring(self._store, versions, self._copy, f"{self}")

        local_checkpoints = complete_checkpoints(self.folder)
        remote_checkpoints = complete_in(self._remote)
        local_newest = local_checkpoints[0].name if local_checkpoints else ""
        downloaded = None
        if remote_checkpoints and local_newest < remote_checkpoints[0]:
            downloaded = bring_checkpoint(self._store, self._remote, self._copy, self._set_aside)

        # `latest` shows that a checkpoint existed. An automatic restart must not start from
        # scratch.
        has_none = not local_checkpoints and downloaded is None
        if has_none and LATEST_FILE in self._remote:
            raise ValueError(
                f"{self}/{CHECKPOINTS}: all checkpoints are damaged or missing: restore one, or"
                f" remove {self}/{LATEST_FILE} to start over with the same command"
            )

    def _set_aside(self, folder: str, problem: str) -> None:
        """Mark a damaged checkpoint as incomplete. The next save removes its tensors."""
        print(
            f"{self}/{CHECKPOINTS}/{folder}: damaged ({problem}): trying the previous checkpoint",
            file=sys.stderr,
        )
        self._store.remove(info_name(folder))
        self._remote.pop(info_name(folder), None)

    # --- save -------------------------------------------------------------------------------------

    def push(self) -> float:
        """Upload the changes of the working copy, and return the duration in seconds."""
        began = time.monotonic()
        with self._reporting_errors("the upload failed"):
            self._lease.confirm(self._store)
            names = plain_names(files_below(self.folder))
            for name in names:
                self._upload(name)

            for name in set(plain_names(self._copy.names())) - set(names):
                self._remove(name)  # The file was deleted locally.

            self._push_record(self._store)
            self._push_checkpoints()
            self._copy.save()

        return time.monotonic() - began

    def _push_record(self, store: ObjectStore) -> None:
        """Upload the new lines of metrics.jsonl as a part, named after its first byte."""
        lines = new_lines(self.folder / METRICS_FILE, self._record_bytes)
        if not lines:
            return

        self._lease.ensure(store)
        name = part_name(self._record_bytes)
        if not store.write(name, lines, only_new=True, in_use=True):
            # The part already exists: the response to this job's upload was lost, a kill truncated
            # the part, or another job wrote it. A part of another job must not be overwritten.
            uploaded = store.read_all(name)
            if not lines.startswith(uploaded):
                self._lease.confirm(store)
                raise LeaseLost(
                    f"{store}: another job has written {name}; this job stops and saves nothing"
                    " more to the URL"
                )
            if uploaded != lines:
                store.write(name, lines, in_use=True)
        self._record_bytes += len(lines)

    def _push_checkpoints(self) -> None:
        """Upload the new checkpoints, the oldest first, and remove those that are not kept."""
        checkpoints = complete_checkpoints(self.folder)
        for folder in reversed(checkpoints):
            # checkpoint.json is uploaded last, because it makes the checkpoint complete.
            visible = (path.name for path in folder.iterdir() if not path.name.startswith("."))
            for file in sorted(visible, key=lambda file: (file == INFO_FILE, file)):
                name = f"{CHECKPOINTS}/{folder.name}/{file}"
                if self._is_uploaded(name):
                    continue
                if file == INFO_FILE:
                    self._lease.confirm(self._store)
                self._upload(name)

        if checkpoints and self._latest != checkpoints[0].name:
            self._store.write(LATEST_FILE, f"{checkpoints[0].name}\n".encode(), in_use=True)
            self._latest = checkpoints[0].name

        complete = complete_in(self._remote)
        kept = set(complete).difference(surplus_checkpoints(complete, self._config.checkpoint))
        for name, files in checkpoints_in(self._remote).items():
            if name in kept:
                continue
            # checkpoint.json is removed first, because a partly removed checkpoint must not look
            # complete.
            for file in sorted(files, key=lambda file: file != info_name(name)):
                self._remove(file)

    def _is_uploaded(self, name: str) -> bool:
        return self._copy.is_same(name, self._remote.get(name))

    def _upload(self, name: str) -> None:
        if self._is_uploaded(name):
            return
        stamp = self._copy.stamp(name)
        if stamp[0] < 0:  # The file was removed after the folder was listed.
            return

        self._lease.ensure(self._store)  # The previous upload may have taken an hour.
        self._store.upload(self.folder / name, name, in_use=True)
        self._remote[name] = Version(stamp[0], "")
        self._copy.note(name, stamp=stamp)

    def _remove(self, name: str) -> None:
        self._lease.ensure(self._store)
        self._store.remove(name, in_use=True)
        self._remote.pop(name, None)
        self._copy.forget(name)

    # --- end --------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Release the lease. Errors are ignored.

        If an `error` ended the run, the last lines of metrics.jsonl, which contain the error, are
        uploaded first. After a second Ctrl-C, the network is not used.
        """
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            return
        has_lines = self._record_bytes and not self.is_lost
        if error is not None and has_lines:
            once = ObjectStore(self._store.url, replace(self._store.retry, limit_s=0.0))
            with suppress(ValueError, OSError):
                self._lease.confirm(once)
                self._push_record(once)

        self._lease.release()

    @contextmanager
    def _reporting_errors(self, failure: str) -> Iterator[None]:
        """Convert errors of the store to UploadError, which names the working copy."""
        safe = ""
        if self._record_bytes:
            safe = (
                f"; the working copy {self.folder} is complete, and the same command on this"
                " machine resumes from it"
            )

        try:
            yield
        except LeaseLost:
            raise
        except FileNotFoundError as error:
            raise UploadError(
                f"{self}: {failure} ({error}): the bucket does not exist{safe}"
            ) from None
        except OSError as error:
            # With a file:// URL, the full disk may be the URL's disk.
            place = error.filename or self.folder
            raise UploadError(
                f"{place}: cannot be written ({error.strerror}): free some space{safe}"
            ) from None
        except ValueError as error:
            raise UploadError(f"{error}{safe}") from None


def _identity(folder: Path) -> str:
    """Return an identifier of a locked folder that is unique across machines."""
    status = os.stat(folder / LOCK_FILE)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not on Linux: the next job then waits until the lease expires
        boot = os.urandom(8).hex()
    return hashlib.sha256(f"{boot} {status.st_dev} {status.st_ino}".encode()).hexdigest()[:16]


def check_place(url: str) -> str:
    """Write a test file at `url`, remove it, and return what was found.

    Raises ValueError if the store refuses the file or does not answer, or if a job uses the run.
    Requests are not retried.
    """
    store = store_at(url, 0.0)
    store.try_writing(f".check.{secrets.token_hex(4)}")
    holder = holder_of(url)
    if holder:
        raise ValueError(
            f"{store}: in use by {holder}, which is running or was killed just now: wait until"
            " it ends, stop it, or use another run.dir"
        )
    return f"{store}: a file can be written and removed"


def parts(config: Config) -> Parts:
    """Return the parts of a run at a URL."""
    return Parts(open_place=open_place, check_place=check_place)


def open_place(config: Config, world: World) -> Place:
    """Open the run at the URL `run.dir`. Every rank must call this function.

    Only rank 0 opens the store. All other ranks use only the working copy. Raises ValueError if the
    URL is invalid.
    """
    store = world.on_main(lambda: RunStore(config))
    folder = world.broadcast_from_main(lambda: "" if store is None else str(store.folder))
    place = store or Place(Path(folder))
    place.setting = "run.local_dir"
    return place
