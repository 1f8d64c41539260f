"""What every worker process of ours does first: leave signals to its parent, end with it, and print
no secrets. Free of torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vit.system.redact import guard_console

LEFT_TO_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

LOOK_EACH_S = 1.0
"""For another parent, where the pipe does not tell that it ended."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Around the start of worker processes: a signal that comes before they call `follow_parent`
    waits, in them and in this thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """End this process when its parent ends, be it by SIGKILL, after which nobody would tell it;
    ignore the signals that parents handle.

    Terminals and Slurm signal every process of a job. The parent decides what follows, and tells
    its workers.
    """
    for number in LEFT_TO_PARENTS:
        signal.signal(number, signal.SIG_IGN)
    # what `signals_blocked` blocked is now ignored
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENTS)
    guard_console()
    parent = multiprocessing.parent_process()
    assert parent is not None, "for worker processes only"

    begun_by = os.getppid()  # the parent, or the server that forks for it

    def follow() -> None:
        # Workers that were forked later have the parent's end of the pipe, too: a stopped one would
        # keep it open for ever.
        while parent.is_alive() and os.getppid() == begun_by:
            parent.join(LOOK_EACH_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
