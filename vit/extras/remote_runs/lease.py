"""Hold a lease on the run at a URL, so that only one job at a time writes to the run.

Object stores have no locks, so the lease is a file that expires:

lease.json    token, holder, place, lease_s, count    rewritten every `lease_s` / 4

If no lease exists or the lease has expired, a job writes its own lease and waits. The job holds the
lease if the file then still contains its token. If several jobs write at the same time, the last
job wins. The time between a job's read and its write must be shorter than the subsequent wait
(Fischer's algorithm, in Lamport, "A fast mutual exclusion algorithm", 1987). A read must return the
last write, as in S3 and Google Cloud Storage. If the store can refuse to overwrite an existing
file, the lease relies on this refusal as well.

A lease expires if it is not rewritten for `lease_s` seconds. Clocks of machines may differ, so the
time is measured by the store or by this process. `place` identifies the holder's folder. A job that
has locked the same folder does not wait, because the previous holder must be dead.

A holder that was suspended or disconnected for too long may find another job's token in the file.
The holder has then lost the lease and stops. A holder reads the lease before each upload or
removal, unless it has just renewed the lease. If the holder was suspended during a renewal, its
late write replaces the new lease. The new holder recognizes the previous token and writes its own
token again. The holder that wrote late waits until then, and reads the lease again.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from vit.data.storage.object_store import ObjectStore
from vit.run_folder.copying import LEASE_FILE, store_at
from vit.run_folder.lock import LOCK_WAIT_S
from vit.system.meter import steady_s

RENEWALS = 4
"""The number of renewals per `lease_s` seconds."""
SETTLE_S = 2.0
"""The maximum time to write a lease, and the maximum pause until the job then holds the lease."""
CLOCK_STEP_S = 2.0
"""This time is subtracted from the age of a lease, because stores report whole seconds."""


class LeaseLost(ValueError):
    """The error raised if another job took over the run, or if the run was removed."""


class Lease:
    """The exclusive right to write to the run at `store`.

    lease_s: the number of seconds after which another job takes over from a dead job.
    """

    def __init__(self, store: ObjectStore, lease_s: float):
        self._store = ObjectStore(store.url, replace(store.retry, limit_s=lease_s / RENEWALS))
        self._place = ""
        self._lease_s = lease_s
        self._token = secrets.token_hex(8)
        self._count = 0

        self._is_held = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

        self._problem = ""
        self._confirmed_s = 0.0
        """The `steady_s` time just before the last read that found this job's token."""
        self._previous_token = ""
        """The token of the previous holder, from which this job took over."""

    @property
    def is_lost(self) -> bool:
        """True if another job took over the run, or if the run was removed."""
        return bool(self._problem)

    def acquire(self, place: str) -> None:
        """Acquire the lease, and start a thread that renews it.

        place: the identity of the folder that this process has locked. If another job holds the
        lease, wait until the lease expires. Raises ValueError if the holder renews the lease, or if
        the store cannot be used.
        """
        self._place = place
        # The first request is slow, because it imports the client and logs in.
        read_lease(self._store)

        watch = _WatchedLease(self._store)
        while not self._is_held:
            read_s = time.monotonic()
            lease = watch.look()
            is_free = lease is None or lease["place"] == self._place or watch.has_expired()
            if is_free:
                self._is_held = self._take(lease, read_s)
            else:
                watch.wait()

        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def _take(self, previous: dict[str, Any] | None, read_s: float) -> bool:
        """Write the lease, and return whether this job holds it.

        Several jobs may try this at once. Each must write within the settle time after its read.
        It then waits for the settle time, so that all jobs that read the same lease have written,
        and holds the lease if the file still contains its token.

        The file of the previous lease is removed first, because a store that can refuse to replace
        a file would refuse the write. After the settle time the file is kept, because it may
        already be the lease of another job.

        Args:
            previous: The lease to replace, or None if no job holds it.
            read_s: The `time.monotonic` just before `previous` was read.
        """
        settle_s = min(SETTLE_S, self._lease_s / 10)
        if previous is not None:
            self._note_takeover(previous)
            if time.monotonic() - read_s < settle_s:
                self._store.remove(LEASE_FILE)
        is_written = self._store.write(LEASE_FILE, self._content(), only_new=True)

        # A late write is invalid, because it may have replaced another job's lease.
        is_in_time = time.monotonic() - read_s < settle_s
        time.sleep(settle_s)
        if is_written and not is_in_time:
            print(
                f"{self._store}: the store answers slowly: acquiring the lease again",
                file=sys.stderr,
            )

        lease = read_lease(self._store)
        return is_in_time and lease is not None and lease["token"] == self._token

    def _note_takeover(self, previous: dict[str, Any]) -> None:
        """Remember the previous holder's token, and print that it is dead if it used another
        folder."""
        self._previous_token = previous["token"]
        if previous["place"] != self._place:
            print(
                f"{self._store}: {previous['holder']} has not renewed its lease for"
                f" {previous['lease_s']:g} s: taking over the run",
                file=sys.stderr,
            )

    def ensure(self, store: ObjectStore) -> None:
        """Call `confirm`, unless a recent call rules out that another job holds the lease."""
        if steady_s() - self._confirmed_s > self._lease_s / 2:
            self.confirm(store)

    def confirm(self, store: ObjectStore | None = None) -> None:
        """Renew the lease.

        Raises LeaseLost if another job holds the lease or the run was removed, and ShardError if
        the store does not answer. store: the same store with a different retry limit. The default
        limit is shorter than `lease_s`.
        """
        with self._lock:
            if not self._problem and self._is_held:
                self._renew(store or self._store)
            if self._problem:
                raise LeaseLost(self._problem)

    def _renew(self, store: ObjectStore) -> None:
        """Write the lease again, or set `_problem` if it is no longer this job's.

        A write may come too late, if this process was suspended after the read. It may then have
        replaced the lease of another job, which writes its own token again at its next renewal.
        After a late write, this job therefore waits until the other job has had time to renew its
        lease, and then reads the lease again.
        """
        is_late = True
        while is_late:
            read_s = steady_s()
            lease = read_lease(store)
            if lease is None:
                self._problem = (
                    f"{store}: the lease is gone, because the run was removed, or another job took"
                    " over the run and exited: this job stops without saving more to the URL"
                )
                return

            if lease["token"] not in (self._token, self._previous_token):
                self._problem = (
                    f"{store}: {lease['holder']} has taken over the run, because this job did not"
                    f" reach the store for {self._lease_s:g} s: this job stops without saving more"
                    " to the URL"
                )
                return

            store.write(LEASE_FILE, self._content(), in_use=True)
            is_late = steady_s() - read_s > self._lease_s / 2
            if is_late:
                time.sleep(self._lease_s / 2)  # twice the time between renewals

        self._confirmed_s = read_s

    def release(self) -> None:
        """Release the lease. Errors are ignored, because the lease expires anyway."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

        if not self._is_held:
            return
        self._is_held = False

        once = ObjectStore(self._store.url, replace(self._store.retry, limit_s=0.0))
        try:
            lease = read_lease(once)
            if lease is not None and lease["token"] == self._token:
                once.remove(LEASE_FILE)
        except (ValueError, OSError):
            return

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / RENEWALS):
            try:
                self.confirm()
            except LeaseLost:
                return  # The next save raises the error.
            except (ValueError, OSError):
                continue  # Uploads report an unreachable store.

    def _content(self) -> bytes:
        self._count += 1
        content = {
            "token": self._token,
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "place": self._place,
            "lease_s": self._lease_s,
            "count": self._count,
        }
        return json.dumps(content).encode()


class _WatchedLease:
    """The lease of another job, which this process observes."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._lease: dict[str, Any] | None = None
        self._began_s = time.monotonic()
        self._changed_s = 0.0
        self._is_renewed = False
        """True if the holder has renewed the lease since the first `look`."""
        self._is_announced = False
        """True if `wait` has printed that it waits."""

    def look(self) -> dict[str, Any] | None:
        """Read the lease. Return None if no job holds it."""
        lease = read_lease(self._store)
        if lease is None or lease != self._lease:
            now_s = time.monotonic()
            age_s = 0.0
            if self._lease is None and lease is not None:
                age_s = _age_s(self._store)
            elif lease is not None:
                self._is_renewed = True
            self._changed_s = now_s - age_s
            self._lease = lease
        return lease

    def has_expired(self) -> bool:
        """Return whether the lease has not been renewed for `lease_s` seconds."""
        assert self._lease is not None, "`look` has returned a lease"
        return time.monotonic() - self._changed_s > self._lease["lease_s"]

    def wait(self) -> None:
        """Wait for a moment, after which `look` may find that the lease has changed.

        Raises ValueError if the holder has renewed the lease and still holds it after the time in
        which a job that is being stopped exits.
        """
        assert self._lease is not None, "`look` has returned a lease"
        holder, lease_s = self._lease["holder"], self._lease["lease_s"]
        waited_s = time.monotonic() - self._began_s
        if self._is_renewed and waited_s > min(LOCK_WAIT_S, lease_s):
            raise ValueError(
                f"{self._store}: in use by a live run ({holder}): wait until it ends,"
                " stop it, or use another run.dir"
            )

        if not self._is_announced:
            self._is_announced = True
            print(
                f"{self._store}: waiting up to {lease_s:g} s for {holder} to exit", file=sys.stderr
            )
        time.sleep(min(1.0, lease_s / 20))


def holder_of(url: str) -> str | None:
    """Return the holder of an unexpired lease on the run at `url`, or None.

    Raises ValueError if the store cannot be used.
    """
    watch = _WatchedLease(store_at(url, 0.0))
    lease = watch.look()
    return None if lease is None or watch.has_expired() else lease["holder"]


def read_lease(store: ObjectStore) -> dict[str, Any] | None:
    """Return the lease of a run, or None if no job holds it."""
    try:
        content = store.read_all(LEASE_FILE)
    except FileNotFoundError:
        return None
    try:
        lease = json.loads(content)
        return {
            "token": str(lease["token"]),
            "holder": str(lease["holder"]),
            "place": str(lease["place"]),
            "lease_s": float(lease["lease_s"]),
            "count": int(lease["count"]),
        }
    except (ValueError, KeyError, TypeError):
        # In a mounted folder, the file is incomplete during a write, or if the writer died.
        return {"token": "", "holder": "a job", "place": "", "lease_s": 60.0, "count": 0}


def _age_s(store: ObjectStore) -> float:
    """Return the seconds since the last renewal by the store's clock, or 0 if unknown."""
    probe = f"lease.{secrets.token_hex(4)}"
    try:
        written = store.changed_at(LEASE_FILE)
        store.write(probe, b"")
        now = store.changed_at(probe)
    except FileNotFoundError:  # The holder has released the lease, or another job is taking over.
        return 0.0
    finally:
        store.remove(probe)
    if written is None or now is None:
        return 0.0
    return max((now - written).total_seconds() - CLOCK_STEP_S, 0.0)
