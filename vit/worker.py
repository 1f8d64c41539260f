"""What every worker process of ours does first: leave signals to its parent, and end with it. Free of torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """End this process when its parent ends, be it by SIGKILL, after which nobody would tell it; ignore the signals that parents handle.

    Terminals and Slurm signal every process of a job. The parent decides what follows, and tells its workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "for worker processes only"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
