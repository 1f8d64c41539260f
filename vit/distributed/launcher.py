"""End a rank soon after its torchrun ends, and end torchrun soon after its ranks end."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
from pathlib import Path

ENDS_WITHIN_S = 30.0
"""The time that torchrun may take to exit after its ranks have exited. torchrun gives its ranks as
much time."""
ANSWERS_WITHIN_S = 2.0
"""The time that the store on another host may take to answer after torchrun died on this host."""
_launcher = 0
"""The process id of the torchrun that started this rank; 0 before `end_with_launcher`."""


def world_size() -> int:
    """Return the number of ranks, or 1 without torchrun. Works before `join_world`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Return the number of ranks on this host, or 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this is rank 0. Works before `join_world`."""
    return int(os.environ.get("RANK", "0")) == 0


def end_with_launcher() -> None:
    """Make Linux send SIGTERM to this rank when torchrun dies, so that the run is saved and stops.

    Otherwise the ranks would continue to train unnoticed, in parallel with the next attempt.
    """
    global _launcher
    _launcher = os.getppid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def took_store_along() -> bool:
    """Return whether torchrun on this host has died and the store no longer answers."""
    if _launcher in (0, os.getppid()):
        return False
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection(address, ANSWERS_WITHIN_S).close()
    except OSError:
        return True
    return False


def end_launcher_later() -> None:
    """Fork a process that kills torchrun if it is still running after `ENDS_WITHIN_S`.

    When a host loses its network, torchrun waits for the store without a time limit, and only
    SIGKILL ends that wait (torch 2.15). A torchrun with restarts left is not killed, because it
    restarts the ranks when the network is back.
    """
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "") != allowed or sys.platform != "linux":
        return
    parent = os.getppid()
    launcher = os.pidfd_open(parent)  # A process id can be reused, but a pidfd cannot.
    line = Path(f"/proc/{parent}/cmdline").read_bytes()
    if not any(name in line for name in (b"torchrun", b"torch.distributed.run")):
        return  # A scheduler started this rank without torchrun.
    if os.fork():
        return
    try:
        os.setsid()
        os.closerange(0, launcher)  # Do not keep the files and connections of the rank open.
        os.closerange(launcher + 1, os.sysconf("SC_OPEN_MAX"))
        if not select.select([launcher], [], [], ENDS_WITHIN_S)[0]:
            signal.pidfd_send_signal(launcher, signal.SIGKILL)
    finally:
        os._exit(0)
