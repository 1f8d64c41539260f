"""Hold a lease on a run at a URL, so that one job at a time writes to it.

A store has no locks, so the lease expires:

    lease.json    token, holder, place, lease_s, count    written again every quarter of `lease_s`

A job that finds no lease, or an expired one, writes its own, waits, and holds the lease if its
token is still in the file. If several jobs write at once, the last one wins, provided that no job
takes longer between reading and writing than all jobs wait afterwards (Fischer's algorithm, in
Lamport, "A fast mutual exclusion algorithm", 1987). The store only has to return the last write on
a read, as S3 and Google's do. If the store can also refuse to replace a file, that is used.

A lease has expired if it was not written for `lease_s`, by the store's own clock or as watched by
this process, because the clocks of the machines may differ. `place` is the holder's folder: a job
that holds the lock of the same folder knows that the holder is dead, and does not wait.

A holder that was suspended or cut off from the store for longer may find another token. It has then
lost the lease, and stops. It reads the lease before each upload or removal, unless it has just
renewed it. If the holder was suspended during a renewal, its late write replaces the new lease. The
new holder recognises the token that it has taken over from and writes its own again. A holder that
wrote late waits for that, and reads the lease again.
"""

from __future__ import annotations

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
from vit.extras.remote_runs.place import store_at
from vit.run_folder import LOCK_WAIT_S
from vit.system.meter import steady_s

LEASE_FILE = "lease.json"
RENEWALS = 4
"""Renewals in `lease_s`."""
SETTLE_S = 2.0
"""Longest pause between writing a lease and holding it, and longest duration of the write."""
CLOCK_STEP_S = 2.0
"""Subtracted from ages, because stores report times in whole seconds."""


class LeaseLost(ValueError):
    """The error for a run that another job has taken over, or that was removed."""


class Lease:
    """The right to write to the run at `store`.

    lease_s: seconds after which another job takes over from a dead one.
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
        """The `steady_s` time just before the last read that found our token."""
        self._followed = ""
        """The token of the previous holder, from which this job has taken over."""

    @property
    def is_lost(self) -> bool:
        """Return whether the run was taken over or removed; `confirm` then raises."""
        return bool(self._problem)

    def acquire(self, place: str) -> None:
        """Take the lease, and renew it in a thread.

        place: the identity of the folder that this process has locked. Waits until a dead or ending
        holder's lease expires. Raises ValueError if the holder keeps renewing it, or if the store
        cannot be used.
        """
        self._place = place
        read_lease(self._store)  # a slow first request: it imports the client and logs in
        watch = _WatchedLease(self._store)
        began_s = time.monotonic()
        is_announced = False
        while True:
            looked_s = time.monotonic()
            lease = watch.look()
            if lease is None or lease["place"] == self._place or watch.has_expired():
                self._followed = lease["token"] if lease is not None else self._followed
                if lease is not None and lease["place"] != self._place:
                    print(
                        f"{self._store}: {lease['holder']} has not renewed its lease for"
                        f" {lease['lease_s']:g} s: taking over",
                        file=sys.stderr,
                    )
                if self._take(lease is not None, looked_s):
                    break
                continue
            wait_s = min(LOCK_WAIT_S, lease["lease_s"])
            if watch.is_renewed and time.monotonic() - began_s > wait_s:
                raise ValueError(
                    f"{self._store}: in use by a live run ({lease['holder']}): wait for its end,"
                    " stop it, or use another run.dir"
                )
            if not is_announced:
                is_announced = True
                print(
                    f"{self._store}: waiting up to {lease['lease_s']:g} s for {lease['holder']} to"
                    " end",
                    file=sys.stderr,
                )
            time.sleep(min(1.0, lease["lease_s"] / 20))
        self._is_held = True
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def _take(self, replaces: bool, looked_s: float) -> bool:
        """Write the lease after the read at `looked_s`; return whether this job holds it."""
        settle_s = min(SETTLE_S, self._lease_s / 10)
        if replaces and time.monotonic() - looked_s < settle_s:
            self._store.remove(LEASE_FILE)
        is_written = self._store.write(LEASE_FILE, self._content(), only_new=True)
        # A late write may have replaced the lease of another job, so it does not count.
        is_in_time = time.monotonic() - looked_s < settle_s
        time.sleep(settle_s)
        if is_written and not is_in_time:
            print(f"{self._store}: answers slowly; taking the lease again", file=sys.stderr)
        lease = read_lease(self._store)
        return is_in_time and lease is not None and lease["token"] == self._token

    def ensure(self, store: ObjectStore) -> None:
        """Call `confirm`, unless it ran so recently that no other job can hold the lease."""
        if steady_s() - self._confirmed_s > self._lease_s / 2:
            self.confirm(store)

    def confirm(self, store: ObjectStore | None = None) -> None:
        """Renew the lease. Raises LeaseLost if another job holds it or the run was removed, and
        ShardError if the store does not answer.

        store: the same store with its own retry limit; the default's is a part of `lease_s`.
        """
        with self._lock:
            if not self._problem and self._is_held:
                self._renew(store or self._store)
            if self._problem:
                raise LeaseLost(self._problem)

    def _renew(self, store: ObjectStore) -> None:
        is_late = True
        while is_late:
            looked_s = steady_s()
            lease = read_lease(store)
            if lease is None:
                self._problem = (
                    f"{store}: its lease is gone: the run was removed, or another job has taken it"
                    " over and has ended; this job ends, and saves nothing more at the URL"
                )
                return
            if lease["token"] not in (self._token, self._followed):
                self._problem = (
                    f"{store}: {lease['holder']} has taken over the run, because this job did not"
                    f" reach the store for {self._lease_s:g} s: this job ends, and saves nothing"
                    " more at the URL"
                )
                return
            store.write(LEASE_FILE, self._content(), in_use=True)
            is_late = steady_s() - looked_s > self._lease_s / 2
            if is_late:  # wait for the next renewal of a holder whose lease this write replaced
                time.sleep(self._lease_s / 2)
        self._confirmed_s = looked_s

    def release(self) -> None:
        """Give the lease back. Raises nothing, because a lease that stays expires."""
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
                return  # the next save raises it
            except (ValueError, OSError):
                continue  # uploads report an unreachable store

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
    """The lease of another job, as observed by this process."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._lease: dict[str, Any] | None = None
        self._changed_s = 0.0
        self.is_renewed = False
        """True if the holder has renewed the lease since the first `look`."""

    def look(self) -> dict[str, Any] | None:
        """Read the lease again; None if no job holds it."""
        lease = read_lease(self._store)
        if lease is None or lease != self._lease:
            now_s = time.monotonic()
            age_s = 0.0
            if self._lease is None and lease is not None:
                age_s = _age_s(self._store)
            elif lease is not None:
                self.is_renewed = True
            self._changed_s = now_s - age_s
            self._lease = lease
        return lease

    def has_expired(self) -> bool:
        """Return whether the lease was not renewed for its `lease_s`."""
        assert self._lease is not None, "`look` has found a lease"
        return time.monotonic() - self._changed_s > self._lease["lease_s"]


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
        # A partly written file in a mounted folder: its writer will rewrite it, or has died.
        return {"token": "", "holder": "a job", "place": "", "lease_s": 60.0, "count": 0}


def _age_s(store: ObjectStore) -> float:
    """Return the seconds since the last renewal by the store's clock, at least 0."""
    probe = f"lease.{secrets.token_hex(4)}"
    try:
        written = store.changed_at(LEASE_FILE)
        store.write(probe, b"")
        now = store.changed_at(probe)
    except FileNotFoundError:  # the holder has ended, or another job is taking over
        return 0.0
    finally:
        store.remove(probe)
    if written is None or now is None:
        return 0.0
    return max((now - written).total_seconds() - CLOCK_STEP_S, 0.0)
