"""Kill all processes that a test has started.

Each test marks its processes with an environment variable. Child processes inherit this variable,
even in the new sessions that torchrun creates. `Family` gives its process a unique mark, and later
kills every process with this mark. Processes also inherit the test's name, because pytest stores it
in the environment. If the test fails, all processes with its name are killed. If pytest itself is
killed, a small guard process kills the remaining processes. Only Linux lets a program read the
environment of other processes. On other systems, a `Family` kills only the process that it started.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from proc import all_pids, command_line, environment_of, stat_of

MARK = "VIT_TEST_ID"
NAME = "PYTEST_CURRENT_TEST"
ENDS_WITHIN_S = 60.0
"""The maximum time to wait for helper processes (of multiprocessing or W&B) after their program has
exited, in seconds."""
_numbers = itertools.count()


def bearing(mark: str, name: str = "") -> dict[int, str]:
    """Return the live processes whose mark begins with `mark`, as {process id: command line and
    test name}.

    The current process is excluded. If `name` is given, only the processes of this test are
    returned.
    """
    processes = {}
    for pid in all_pids():
        variables = environment_of(pid)
        if not variables.get(MARK, "").startswith(mark) or pid == os.getpid():
            continue
        test = variables.get(NAME, "")
        line = command_line(pid)
        state, parent, *_ = stat_of(pid) or ["Z", "0"]
        if int(parent) == os.getpid() and re.search(
            "multiprocessing.(resource_tracker|forkserver) import", line
        ):
            continue  # skip this helper process, which runs as long as the current process
        if state != "Z" and (not name or test == name):
            processes[pid] = f"{line[:200]} [{test}]"
    return processes


def kill(mark: str, name: str = "") -> None:
    """Send SIGKILL to the processes that `bearing` returns until there are none left.

    The search is repeated, because a process may start another process during the search.
    """
    deadline = time.monotonic() + ENDS_WITHIN_S
    while processes := bearing(mark, name):
        for pid in processes:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise AssertionError(f"these processes cannot be killed: {processes}")
        time.sleep(0.01)


def left_over(mark: str) -> dict[int, str]:
    """Wait up to `ENDS_WITHIN_S` for the processes with `mark` to exit, and return those that
    remain."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (processes := bearing(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


class Family:
    """A context manager that starts a process, and kills the process and all of its descendants on
    exit. The arguments are the same as for `subprocess.Popen`.

    If the process has exited but its children do not exit within the time limit, an AssertionError
    lists these children.
    """

    def __init__(self, command: list[str], env: Mapping[str, str], **options: Any):
        self.mark = f"{os.environ.get(MARK, f'alone-{os.getpid()}')}.{next(_numbers)}."
        self.process = subprocess.Popen(command, env={**env, MARK: self.mark}, **options)

    def __enter__(self) -> Family:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        orphans = left_over(self.mark) if kind is None and self.process.poll() is not None else {}
        self.kill()
        assert not orphans, f"{self.process.args!r} has exited but left {orphans}"

    def communicate(self, timeout_s: float) -> tuple[str, str]:
        """Wait until the process exits, and return its stdout and stderr.

        Children that outlive the process must close the streams that they inherited within the time
        limit.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            had_ended = self.process.poll() is not None
            try:
                return self.process.communicate(
                    timeout=max(min(ENDS_WITHIN_S, deadline - time.monotonic()), 0)
                )
            except subprocess.TimeoutExpired:
                # Check before the call, because `communicate` closes the streams of a process that
                # has just exited.
                if had_ended:
                    raise AssertionError(
                        f"{self.process.args!r} has exited but left {bearing(self.mark)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise

    def kill(self) -> None:
        self.process.kill()
        kill(self.mark)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def inherited() -> dict[str, str]:
    """Return the environment for a child process.

    Processes that are started outside the main thread get no test name, because other threads serve
    several tests.
    """
    hidden = () if threading.current_thread() is threading.main_thread() else (NAME,)
    # Copy the names, because pytest changes one of the variables in the main thread.
    names = [name for name in list(os.environ) if name not in hidden]
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


# ---- functions for conftest.py -------------------------------------------------------------------


def begin_session() -> None:
    """Set the mark for all processes that this pytest process starts, and start the guard. Each
    pytest-xdist worker has its own mark."""
    # Restore the default handler of SIGINT for tests that send Ctrl-C. If pytest was started with
    # `&` in a shell, SIGINT is ignored by default.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[MARK] = f"vit-{os.getpid()}-{time.time_ns()}"
    without_mark = {key: value for key, value in os.environ.items() if key != MARK}
    folder = _own_temporary_folder()
    # Run the guard without -I, because it imports modules from the folder of this file.
    command = [sys.executable, "-ESs", __file__, str(os.getpid()), os.environ[MARK], folder]
    subprocess.Popen(command, env=without_mark, start_new_session=True, stdin=subprocess.DEVNULL)


def _own_temporary_folder() -> str:
    """Create a temporary folder for this session, and make all processes of its tests use it
    instead of /tmp.

    torchrun always leaves folders behind in /tmp, and W&B does so when it is killed.
    """
    # Keep pytest's own temporary folders outside the session's folder, so that they can be
    # inspected after the session.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Use a short path, because the path of a Unix socket is limited to 107 bytes.
    folder = tempfile.mkdtemp(prefix="vit-")
    os.chmod(folder, 0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def end_session() -> list[str]:
    """Kill all remaining processes. Return one line for each process that should have exited
    earlier."""
    left = [f"{pid}: {line}" for pid, line in left_over(os.environ[MARK]).items()]
    kill(os.environ[MARK])
    return left


def end_of_failed_test() -> None:
    kill(os.environ[MARK], os.environ[NAME])


def _guard(pid: int, mark: str, folder: str) -> None:
    """Wait until pytest exits. Then kill all processes with `mark`, and delete the temporary
    folder."""
    while os.getppid() == pid:
        time.sleep(0.5)
    kill(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), *sys.argv[2:])
