"""Set up every worker process: ignore signals, end with the parent, hide secrets."""

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
"""Seconds between two checks of the parent, in case the pipe does not show its end."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while worker processes start, until they call `follow_parent`."""
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
    # Unblock only now, so that signals from the time of the start are ignored as well.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENTS)
    guard_console()
    parent = multiprocessing.parent_process()
    assert parent is not None, "for worker processes only"

    begun_by = os.getppid()  # the parent, or the server that forks for it
    # Checked before the thread runs: if the parent died during the imports, the worker could begin
    # the work in its queue, and leave a file behind.
    if not parent.is_alive():
        os._exit(1)

    def follow() -> None:
        # The pipe alone is not enough: workers that were forked later also hold the parent's end,
        # and a stopped worker would keep it open forever.
        while parent.is_alive() and os.getppid() == begun_by:
            parent.join(LOOK_EACH_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
