"""Set up worker processes so that they ignore signals, exit with their parent, and mask secrets."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vit.system.redact import guard_console

LEFT_TO_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

LOOK_EACH_S = 1.0
"""The interval in seconds at which workers check their parent."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while worker processes start. Workers inherit the signal mask and keep it until
    they call `follow_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """Exit when the parent exits, even by SIGKILL, and ignore the signals that the parent handles.

    Terminals and Slurm send signals to every process of a job, but only the parent should react.
    """
    for number in LEFT_TO_PARENTS:
        signal.signal(number, signal.SIG_IGN)
    # Unblock signals only now, so that signals that arrived during startup are also ignored.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENTS)
    guard_console()
    parent = multiprocessing.parent_process()
    assert parent is not None, "for worker processes only"

    begun_by = os.getppid()  # the parent process, or the fork server of multiprocessing
    # If the parent died during the imports, the worker must not start the queued work, which could
    # leave a file behind.
    if not parent.is_alive():
        os._exit(1)

    def follow() -> None:
        # Checking only the pipe is not enough. Workers that are forked later inherit its write end,
        # and a stopped worker would keep the write end open forever.
        while parent.is_alive() and os.getppid() == begun_by:
            parent.join(LOOK_EACH_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
