"""One job at a time for a run at a URL, where nothing can be locked: a lease that expires.

    lease.json    token, holder, place, lease_s, count    written again every quarter of `lease_s`

Who finds no lease, or one that has expired, writes its own, waits, and has it if its token is still
there: of several that do so at once the last one to write wins, provided that none takes longer
between reading and writing than all wait afterwards (Fischer's algorithm, in Lamport, "A fast
mutual exclusion algorithm", 1987). That needs a store in which a read shows the last write, as S3
and Google's do, and no other feature; where the store can refuse to replace a file, that is used,
too.

A lease has expired when it was not written for `lease_s`, by the store's own clock or as watched
from here: clocks of the machines may differ. `place` is the folder in which the holder works: who
holds that folder's lock knows that the holder is dead, and does not wait.

A holder that was suspended, or cut off from the store, for longer may find another's token: it has
lost the lease, and stops. It looks before each file that it uploads or removes, unless it has just
renewed its lease. If it was suspended in the middle of a renewal, its write replaces the other's
lease; the other knows the token that it has followed and writes its own again, and who has written
late waits for that, and looks once more.
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
"""In the time after which a lease expires."""
SETTLE_S = 2.0
"""Longest pause between writing a lease and having it; also the longest time that the write may
take."""
CLOCK_STEP_S = 2.0
"""Added to ages: stores tell times in whole seconds."""


class LeaseLost(ValueError):
    """Another job has the run now, or the run is gone."""


class Lease:
    """The right to write to the run at `store`.

    lease_s: seconds after which others take over from a job that died.
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
        """Before the last look that found the lease to be ours, by `steady_s`."""
        self._followed = ""
        """Token of the job from which this one has taken over."""

    @property
    def is_lost(self) -> bool:
        """Whether another job has taken the run, or it was removed; `confirm` raises it."""
        return bool(self._problem)

    def acquire(self, place: str) -> None:
        """Take the lease, and keep it from a thread of its own.

        place: what identifies the locked folder in which this process works. Waits for a holder
        that ends or has died. Raises ValueError if it goes on, or if the store cannot be used.
        """
        self._place = place
        read_lease(self._store)  # the first request imports the store's client, and logs in
        watched = _Watched(self._store)
        began_s = time.monotonic()
        is_announced = False
        while True:
            looked_s = time.monotonic()
            found = watched.look()
            if found is None or found["place"] == self._place or watched.has_expired():
                self._followed = found["token"] if found is not None else self._followed
                if found is not None and found["place"] != self._place:
                    print(
                        f"{self._store}: {found['holder']} has not renewed its lease for"
                        f" {found['lease_s']:g} s: taking over",
                        file=sys.stderr,
                    )
                if self._take(found is not None, looked_s):
                    break
                continue
            wait_s = min(LOCK_WAIT_S, found["lease_s"])
            if watched.is_renewed and time.monotonic() - began_s > wait_s:
                raise ValueError(
                    f"{self._store}: in use by a live run ({found['holder']}): wait for its end,"
                    " stop it, or use another run.dir"
                )
            if not is_announced:
                is_announced = True
                print(
                    f"{self._store}: waiting up to {found['lease_s']:g} s for {found['holder']} to"
                    " end",
                    file=sys.stderr,
                )
            time.sleep(min(1.0, found["lease_s"] / 20))
        self._is_held = True
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def _take(self, replaces: bool, looked_s: float) -> bool:
        """Write the lease after a look at `looked_s`; return whether it is ours."""
        settle_s = min(SETTLE_S, self._lease_s / 10)
        if replaces and time.monotonic() - looked_s < settle_s:
            self._store.remove(LEASE_FILE)
        is_written = self._store.write(LEASE_FILE, self._content(), only_new=True)
        # A write that came late may have replaced a lease that another job has by now.
        is_in_time = time.monotonic() - looked_s < settle_s
        time.sleep(settle_s)
        if is_written and not is_in_time:
            print(f"{self._store}: answers slowly; asking for the lease again", file=sys.stderr)
        found = read_lease(self._store)
        return is_in_time and found is not None and found["token"] == self._token

    def ensure(self, store: ObjectStore) -> None:
        """`confirm`, unless that was done so recently that nobody else can have the run."""
        if steady_s() - self._confirmed_s > self._lease_s / 2:
            self.confirm(store)

    def confirm(self, store: ObjectStore | None = None) -> None:
        """Write the lease again. Raises LeaseLost if another job has the run, or it is gone, and
        ShardError if the store does not answer.

        store: the same one with another patience than a part of `lease_s`.
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
            found = read_lease(store)
            if found is None:
                self._problem = (
                    f"{store}: its lease is gone: the run was removed there, or another job has"
                    " taken it over and has ended; nothing more of this one is saved there"
                )
                return
            if found["token"] not in (self._token, self._followed):
                self._problem = (
                    f"{store}: {found['holder']} has taken over the run, because this job did not"
                    f" reach the store for {self._lease_s:g} s: this one ends, and nothing more of"
                    " it is saved there"
                )
                return
            store.write(LEASE_FILE, self._content(), in_use=True)
            is_late = steady_s() - looked_s > self._lease_s / 2
            if is_late:  # it may have replaced another's, who writes it again with its next renewal
                time.sleep(self._lease_s / 2)
        self._confirmed_s = looked_s

    def release(self) -> None:
        """Let another job have the run. Raises nothing: a lease that stays expires."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if not self._is_held:
            return
        self._is_held = False
        once = ObjectStore(self._store.url, replace(self._store.retry, limit_s=0.0))
        try:
            found = read_lease(once)
            if found is not None and found["token"] == self._token:
                once.remove(LEASE_FILE)
        except (ValueError, OSError):
            return

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / RENEWALS):
            try:
                self.confirm()
            except LeaseLost:
                return  # whoever saves next raises it
            except (ValueError, OSError):
                continue  # the store is away, which the uploads report; nobody else may have it

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


class _Watched:
    """The lease of another job, as seen from here."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._found: dict[str, Any] | None = None
        self._changed_s = 0.0
        self.is_renewed = False
        """Whether its holder has written it since the first look."""

    def look(self) -> dict[str, Any] | None:
        """Read it again; None if there is none."""
        found = read_lease(self._store)
        if found is None or found != self._found:
            now_s = time.monotonic()
            age_s = 0.0
            if self._found is None and found is not None:
                age_s = _age_s(self._store)
            elif found is not None:
                self.is_renewed = True
            self._changed_s = now_s - age_s
            self._found = found
        return found

    def has_expired(self) -> bool:
        """Whether it was not written for as long as it says."""
        assert self._found is not None, "there is one"
        return time.monotonic() - self._changed_s > self._found["lease_s"]


def holder_of(url: str) -> str | None:
    """Return who has the run at `url` by a lease that has not expired; None if nobody has.

    Raises ValueError if the store cannot be used.
    """
    watched = _Watched(store_at(url, 0.0))
    found = watched.look()
    return None if found is None or watched.has_expired() else found["holder"]


def read_lease(store: ObjectStore) -> dict[str, Any] | None:
    """Return the lease of a run, None if no job has it."""
    try:
        content = store.read_all(LEASE_FILE)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
        return {
            "token": str(found["token"]),
            "holder": str(found["holder"]),
            "place": str(found["place"]),
            "lease_s": float(found["lease_s"]),
            "count": int(found["count"]),
        }
    except (ValueError, KeyError, TypeError):
        # Half of a file, in a folder: whoever was writing it writes it again, or has died.
        return {"token": "", "holder": "a job", "place": "", "lease_s": 60.0, "count": 0}


def _age_s(store: ObjectStore) -> float:
    """Return for how long the lease was not written, by the clock of the store: 0 at the least."""
    probe = f"lease.{secrets.token_hex(4)}"
    try:
        written = store.changed_at(LEASE_FILE)
        store.write(probe, b"")
        now = store.changed_at(probe)
    except FileNotFoundError:  # its holder has ended, or somebody takes over
        return 0.0
    finally:
        store.remove(probe)
    if written is None or now is None:
        return 0.0
    return max((now - written).total_seconds() - CLOCK_STEP_S, 0.0)
