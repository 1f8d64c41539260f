"""What a test starts ends with it: also what that starts in sessions of its own, as torchrun does,
and also if pytest itself is killed.

Every process that comes from a test bears a mark in its environment, which its children inherit, in
whatever session they are and whoever becomes their parent. `Family` gives its process a mark of its
own, and ends whatever bears it. Whatever a test starts also bears the name of the test, which
pytest puts into the environment: if the test fails, it is ended. At the end of the session nothing
may be left; a guard, a small process next to pytest, sees to the same when pytest is killed. Only
Linux shows the environment of processes; elsewhere a `Family` ends its own process alone.
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
"""Helpers of a program that has ended (multiprocessing's, W&B's) notice it and follow."""
_numbers = itertools.count()


def bearing(mark: str, name: str = "") -> dict[int, str]:
    """Live processes whose mark begins with `mark`, this one excepted: process id -> command line
    and test. With `name`: those of that test."""
    found = {}
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
            continue  # ours, as long as we live
        if state != "Z" and (not name or test == name):
            found[pid] = f"{line[:200]} [{test}]"
    return found


def kill(mark: str, name: str = "") -> None:
    """SIGKILL for all that `bearing` finds, until there is none: a process may start another one
    while it is looked for."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while found := bearing(mark, name):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise AssertionError(f"not to be killed: {found}")
        time.sleep(0.01)


def left_over(mark: str) -> dict[int, str]:
    """What still bears `mark` after the time in which helpers end."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (found := bearing(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


class Family:
    """A process and all that it starts, to the end of the block; takes what `subprocess.Popen`
    takes.

    The block's end waits for nobody: if the process lives, or the block was left by an exception,
    all are killed. If the process has ended, so must its children, soon: AssertionError names the
    others.
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
        assert not orphans, f"{self.process.args!r} has ended and left {orphans}"

    def communicate(self, timeout_s: float) -> tuple[str, str]:
        """stdout and stderr, when it has ended. Children that outlive it hold its streams open:
        they are not waited for until the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            had_ended = self.process.poll() is not None
            try:
                return self.process.communicate(
                    timeout=max(min(ENDS_WITHIN_S, deadline - time.monotonic()), 0)
                )
            except subprocess.TimeoutExpired:
                # before the wait: one that ended in its last moment has its streams closed by the
                # next
                if had_ended:
                    raise AssertionError(
                        f"{self.process.args!r} has ended and left {bearing(self.mark)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise

    def kill(self) -> None:
        """End all of them at once."""
        self.process.kill()
        kill(self.mark)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def inherited() -> dict[str, str]:
    """The environment for a process. Threads work for several tests at a time, so what they start
    bears no test's name."""
    hidden = () if threading.current_thread() is threading.main_thread() else (NAME,)
    # a copy of the names: pytest sets and deletes its own in the main thread meanwhile
    names = [name for name in list(os.environ) if name not in hidden]
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


# ---- for conftest.py -----------------------------------------------------------------------------


def begin_session() -> None:
    """Mark what this pytest, or this worker of pytest-xdist, will start, and set the guard beside
    it."""
    # a shell's `&`: what tests start would inherit it, and Ctrl-C is tested
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[MARK] = f"vit-{os.getpid()}-{time.time_ns()}"
    without_mark = {key: value for key, value in os.environ.items() if key != MARK}
    folder = _own_temporary_folder()
    # not isolated (-I): it imports what is beside it
    command = [sys.executable, "-ESs", __file__, str(os.getpid()), os.environ[MARK], folder]
    subprocess.Popen(command, env=without_mark, start_new_session=True, stdin=subprocess.DEVNULL)


def _own_temporary_folder() -> str:
    """Make and return what stands for /tmp in this session, here and in what tests start.

    Programs leave folders there: W&B and torchrun where they are killed, torchrun in any case.
    """
    # pytest's own folders stay, for people to look into
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="vit-")  # short: sockets in it have 107 bytes for their path
    os.chmod(folder, 0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def end_session() -> list[str]:
    """End what is left; returns a line about each process that should not be there."""
    left = [f"{pid}: {line}" for pid, line in left_over(os.environ[MARK]).items()]
    kill(os.environ[MARK])
    return left


def end_of_failed_test() -> None:
    """End what the test that runs now has started in its own body."""
    kill(os.environ[MARK], os.environ[NAME])


def _guard(pid: int, mark: str, folder: str) -> None:
    """Wait for the end of pytest; then end what bears `mark`, and remove the folder."""
    while os.getppid() == pid:
        time.sleep(0.5)
    kill(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), *sys.argv[2:])
