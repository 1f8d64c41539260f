"""Tie a rank to the torchrun that started it, so that neither outlives the other by much."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
from pathlib import Path

ENDS_WITHIN_S = 30.0
"""Time that torchrun may take to end after its ranks; its default for its ranks is the same."""
ANSWERS_WITHIN_S = 2.0
"""Time that a store on another host may take to answer, when torchrun has died on this host."""
_launcher = 0
"""Process id of the torchrun that started this rank; 0 before `end_with_launcher`."""


def world_size() -> int:
    """Return the number of ranks, 1 without torchrun; works before `join_world`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Return the number of ranks on this host; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this is rank 0; works before `join_world`, for messages of the start."""
    return int(os.environ.get("RANK", "0")) == 0


def end_with_launcher() -> None:
    """Make Linux send SIGTERM to this rank when torchrun dies, so that the run saves and stops.

    Otherwise its ranks would keep training unnoticed, next to those of the next attempt.
    """
    global _launcher
    _launcher = os.getppid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def took_store_along() -> bool:
    """Return whether torchrun has died on this host, and the store does not answer any more."""
    if _launcher in (0, os.getppid()):
        return False
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection(address, ANSWERS_WITHIN_S).close()
    except OSError:
        return True
    return False


def end_launcher_later() -> None:
    """Fork a process that kills torchrun if it still lives after `ENDS_WITHIN_S`.

    For a host that is cut off from torchrun's store. torchrun waits for the store without a time
    limit, and only SIGKILL ends that wait (torch 2.15). If torchrun has restarts left it may wait,
    because it starts the ranks again when the network is back.
    """
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "") != allowed or sys.platform != "linux":
        return
    parent = os.getppid()
    launcher = os.pidfd_open(parent)  # a process id could be reused, a descriptor cannot
    line = Path(f"/proc/{parent}/cmdline").read_bytes()
    if not any(name in line for name in (b"torchrun", b"torch.distributed.run")):
        return  # a scheduler has started this rank without torchrun
    if os.fork():
        return
    try:
        os.setsid()
        os.closerange(0, launcher)  # the rank's files and connections must end with the rank
        os.closerange(launcher + 1, os.sysconf("SC_OPEN_MAX"))
        if not select.select([launcher], [], [], ENDS_WITHIN_S)[0]:
            signal.pidfd_send_signal(launcher, signal.SIGKILL)
    finally:
        os._exit(0)
