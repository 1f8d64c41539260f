"""End a rank soon after its torchrun ends, and end torchrun soon after its ranks end."""

import ctypes
import os
import select
import signal
import socket
import sys
from pathlib import Path

ENDS_WITHIN_S = 30.0
"""The time that torchrun may take to exit after its ranks have exited. torchrun gives its ranks the
same time to exit."""
ANSWERS_WITHIN_S = 2.0
"""The time that the store on another host may take to answer after torchrun died on this host."""

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
"""torchrun's environment variables that contain numbers."""
NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables without which several ranks cannot connect."""

TASKS = {
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}
"""The environment variables in which launchers store the number of processes and the number of this
process. Unlike SLURM_NTASKS, SLURM_STEP_NUM_TASKS is not set in batch scripts and in `salloc`."""

_launcher = 0
"""The process id of the torchrun that started this rank; 0 before `end_with_launcher` is called."""


def world_size() -> int:
    """Return the number of ranks, or 1 without torchrun. Works before `join_world`."""
    return _number("WORLD_SIZE", 1)


def local_world_size() -> int:
    """Return the number of ranks on this host, or 1 without torchrun."""
    return _number("LOCAL_WORLD_SIZE", 1)


def is_main_process() -> bool:
    """Return whether this is rank 0. Works before `join_world`."""
    return _number("RANK", 0) == 0


def _number(name: str, default: int) -> int:
    """Return the number in an environment variable of torchrun. Raises ValueError for other
    text."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(
            f"the environment variable {name}={text}: expected a number, which torchrun sets: start"
            f" this command with torchrun, or `unset {name}`"
        )
    return int(text)


def check_variables() -> None:
    """Raise ValueError if a launcher started several processes without making them ranks, or if
    torchrun's environment variables are incomplete or contradict each other."""
    numbers = {name: _number(name, 0) for name in NUMBERS if name in os.environ}
    if not numbers:
        _check_alone()

    size = numbers.get("WORLD_SIZE", 1)
    missing = [name for name in NEEDED if size > 1 and name not in os.environ]
    if missing or numbers.get("RANK", 0) >= size:
        problem = f"missing: {', '.join(missing)}" if missing else f"expected RANK below {size}"
        raise ValueError(
            "the environment variables"
            f" {' '.join(f'{name}={number}' for name, number in numbers.items())}: {problem}: start"
            " this command with torchrun, which sets them all, or"
            f" `unset {' '.join(numbers)}` to train in one process"
        )


def _check_alone() -> None:
    """Raise ValueError if a launcher started several processes, which would all be rank 0."""
    for program, (count, number) in TASKS.items():
        if number in os.environ and os.environ.get(count, "1") != "1":
            raise ValueError(
                f"{program} started this command as process {os.environ[number]} of"
                f" {os.environ[count]}, and each would train alone: start torchrun with {program},"
                f" once per node (see slurm/train.sh), or `unset {count}` for independent runs"
            )


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
        return  # Something other than torchrun started this rank.

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
