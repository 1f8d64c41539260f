"""Read information about processes from /proc on Linux.

A process may exit at any time. If a process has exited or is owned by another user, the functions
return an empty value.
"""

from __future__ import annotations

from pathlib import Path


def all_pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in _threads(pid)
        for child in _read(pid, f"task/{thread}/children").split()
    ]


def command_line(pid: int) -> str:
    return " ".join(_words(pid, "cmdline"))


def environment_of(pid: int) -> dict[str, str]:
    return dict(word.split("=", 1) for word in _words(pid, "environ") if "=" in word)


def status_of(pid: int) -> dict[str, str]:
    """Return the `status` file of a process as a dict from field name to value."""
    rows = (row.partition(":") for row in _read(pid, "status").decode().splitlines())
    return {name: value.strip() for name, _, value in rows}


def stat_of(pid: int, thread: int | None = None) -> list[str]:
    """Return the fields that follow the name in the `stat` file of a process or thread.

    The first two of these fields are the state (R, S, D, T, Z, ...) and the parent's process id,
    which proc(5) lists as fields 3 and 4.
    """
    name = "stat" if thread is None else f"task/{thread}/stat"
    return _read(pid, name).decode(errors="replace").rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """Return the state of a process (R, S, D, T, Z, ...), or "" if the process has exited."""
    return (stat_of(pid) or [""])[0]


def is_alive(pid: int) -> bool:
    """Return whether the process is running. Zombie processes are not considered running."""
    return state_of(pid) not in ("", "Z", "X")


def states_of_threads(pid: int) -> dict[int, str]:
    """Return the state (R, S, D, T, ...) of each thread of a process by thread id."""
    fields = {thread: stat_of(pid, thread) for thread in _threads(pid)}
    return {
        thread: fields_of_thread[0]
        for thread, fields_of_thread in fields.items()
        if fields_of_thread
    }


def _threads(pid: int) -> list[int]:
    return [int(folder.name) for folder in Path(f"/proc/{pid}/task").glob("[0-9]*")]


def _words(pid: int, name: str) -> list[str]:
    return _read(pid, name).decode(errors="replace").removesuffix("\0").split("\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
