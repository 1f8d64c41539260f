"""Kill all processes that a test starts.

A test marks its processes with an environment variable. Child processes inherit the mark, even in
the new sessions that torchrun creates. `Family` gives its process a unique mark and kills all
processes with this mark. Processes also inherit the test's name, which pytest puts into the
environment. If the test fails, its processes are killed. If pytest is killed, a small guard process
kills them. Only Linux exposes the environment of a process. On other systems, a `Family` kills only
its own process.
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
exited."""
_numbers = itertools.count()


def bearing(mark: str, name: str = "") -> dict[int, str]:
    """Return the live processes whose mark begins with `mark`: {id: command line and test}.

    The result excludes the current process. name: return only the processes of this test.
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
            continue  # skip the helper, which runs as long as this process
        if state != "Z" and (not name or test == name):
            processes[pid] = f"{line[:200]} [{test}]"
    return processes


def kill(mark: str, name: str = "") -> None:
    """Send SIGKILL to all processes that `bearing` returns, until it returns none.

    One search is not enough, because a process may start another process during the search.
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
    """Return the processes that still have `mark` after `ENDS_WITHIN_S`."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (processes := bearing(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


class Family:
    """A context manager that starts a process, and kills the process and its descendants at the
    end. The arguments are those of `subprocess.Popen`.

    If the process has exited but its children do not exit soon afterwards, the context manager
    raises an AssertionError that names the children.
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

        Children that outlive the process must close the inherited streams within the time limit.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            had_ended = self.process.poll() is not None
            try:
                return self.process.communicate(
                    timeout=max(min(ENDS_WITHIN_S, deadline - time.monotonic()), 0)
                )
            except subprocess.TimeoutExpired:
                # Check first, because `communicate` closes the streams of a process that has just
                # exited.
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

    Threads other than the main thread serve several tests, so their processes have no test name.
    """
    hidden = () if threading.current_thread() is threading.main_thread() else (NAME,)
    # Copy the names, because pytest changes one of its variables in the main thread.
    names = [name for name in list(os.environ) if name not in hidden]
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


# ---- functions for conftest.py -------------------------------------------------------------------


def begin_session() -> None:
    """Mark the processes that this pytest process (or pytest-xdist worker) will start, and start
    the guard."""
    # Restore SIGINT for the tests that send Ctrl-C. A shell's `&` makes a command and its child
    # processes ignore the signal.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[MARK] = f"vit-{os.getpid()}-{time.time_ns()}"
    without_mark = {key: value for key, value in os.environ.items() if key != MARK}
    folder = _own_temporary_folder()
    # Run the guard without -I, because it imports modules from its own folder.
    command = [sys.executable, "-ESs", __file__, str(os.getpid()), os.environ[MARK], folder]
    subprocess.Popen(command, env=without_mark, start_new_session=True, stdin=subprocess.DEVNULL)


def _own_temporary_folder() -> str:
    """Create a temporary folder for this session, and make all processes of its tests use it
    instead of /tmp.

    torchrun always leaves folders in /tmp, and W&B leaves folders there when it is killed.
    """
    # Let pytest create its own folders elsewhere, so that people can inspect them after the
    # session.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Use a short path, because the path of a socket is limited to 107 bytes.
    folder = tempfile.mkdtemp(prefix="vit-")
    os.chmod(folder, 0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def end_session() -> list[str]:
    """Kill the remaining processes. Return one line per process that should have exited."""
    left = [f"{pid}: {line}" for pid, line in left_over(os.environ[MARK]).items()]
    kill(os.environ[MARK])
    return left


def end_of_failed_test() -> None:
    kill(os.environ[MARK], os.environ[NAME])


def _guard(pid: int, mark: str, folder: str) -> None:
    """Wait until pytest exits, then kill all processes with `mark` and remove the folder."""
    while os.getppid() == pid:
        time.sleep(0.5)
    kill(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), *sys.argv[2:])
