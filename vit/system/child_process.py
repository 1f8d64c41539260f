"""What every worker process does first: leave signals to its parent, end with it, hide secrets."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vit.system.redact import guard_console

LEFT_TO_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

LOOK_EACH_S = 1.0
"""Seconds between two looks at the parent, for when the pipe does not show its end."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """A context for starting worker processes: signals wait until they call `follow_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """End this process when its parent ends, also by SIGKILL; ignore signals that parents handle.

    Terminals and Slurm signal every process of a job: the parent decides what its workers do.
    """
    for number in LEFT_TO_PARENTS:
        signal.signal(number, signal.SIG_IGN)
    # What `signals_blocked` blocked is ignored from here on.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENTS)
    guard_console()
    parent = multiprocessing.parent_process()
    assert parent is not None, "for worker processes only"

    begun_by = os.getppid()  # the parent, or the server that forks for it
    # Not left to the thread: before it runs, a worker whose parent died during its imports could
    # begin the work that waits for it, and leave a file behind.
    if not parent.is_alive():
        os._exit(1)

    def follow() -> None:
        # Not by the pipe alone: workers forked later hold the parent's end of it, too, and
        # a stopped one would keep it open for ever.
        while parent.is_alive() and os.getppid() == begun_by:
            parent.join(LOOK_EACH_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
