"""A rank and the torchrun that started it: neither is to outlive the other by much."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
from pathlib import Path

ENDS_WITHIN_S = 30.0
"""How long torchrun may take to end after its ranks; by default it gives them as long."""
ANSWERS_WITHIN_S = 2.0
"""For a store on another host, when torchrun has died on this one."""
_launcher = 0
"""Process id of the torchrun that has started this rank; 0 before `end_with_launcher`."""


def world_size() -> int:
    """Ranks that torchrun has started; 1 without torchrun. Known before `join_world`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Ranks that torchrun has started on this host; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True on rank 0. Known before `join_world`, for messages about what fails until then."""
    return int(os.environ.get("RANK", "0")) == 0


def end_with_launcher() -> None:
    """Ask Linux for SIGTERM, which saves and stops, when torchrun dies.

    Otherwise its ranks would train on unnoticed, next to the following attempt.
    """
    global _launcher
    _launcher = os.getppid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def took_store_along() -> bool:
    """Whether torchrun has died on this host, and the store that ranks share does not answer."""
    if _launcher in (0, os.getppid()):
        return False
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection(address, ANSWERS_WITHIN_S).close()
    except OSError:
        return True
    return False


def end_launcher_later() -> None:
    """End torchrun if it lives for `ENDS_WITHIN_S` from now on; this process is to end meanwhile.

    For a host that is cut off from torchrun's store: torchrun asks it without a limit of time, and
    of all signals only SIGKILL reaches it there (torch 2.15). One with restarts left is let wait:
    when the cable is back, it begins again.
    """
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "") != allowed or sys.platform != "linux":
        return
    parent = os.getppid()
    launcher = os.pidfd_open(parent)  # names it for good, as its number would not
    line = Path(f"/proc/{parent}/cmdline").read_bytes()
    if not any(name in line for name in (b"torchrun", b"torch.distributed.run")):
        return  # a scheduler has started this rank by itself
    if os.fork():
        return
    try:
        os.setsid()
        os.closerange(0, launcher)  # what this process has open is to end with it
        os.closerange(launcher + 1, os.sysconf("SC_OPEN_MAX"))
        if not select.select([launcher], [], [], ENDS_WITHIN_S)[0]:
            signal.pidfd_send_signal(launcher, signal.SIGKILL)
    finally:
        os._exit(0)
