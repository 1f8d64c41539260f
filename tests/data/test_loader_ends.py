"""Test that a loader and its workers shut down cleanly when they are closed, are killed or raise an
error."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from data.numbered import Numbered
from proc import is_alive
from processes import REPOSITORY, environment

from vit.data.batches import Batch
from vit.data.loader import Loader
from vit.data.to_gpu import page_lock
from vit.data.worker_pool import WorkerError

# ---- shutdown ------------------------------------------------------------------------------------


class Dying(Numbered):
    """Numbered batches whose worker fails at position 3. `ending` selects how the worker fails."""

    def __init__(self, ending: str):
        super().__init__()
        self.ending = ending

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        if position == 3:
            if self.ending == "exit":
                os._exit(7)
            # Disable pytest's fault handler, which would print the crash.
            faulthandler.disable()
            os.kill(os.getpid(), getattr(signal, self.ending))
        return super().fill(position, first, rows)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (
            "SIGKILL",
            (
                r"process \d+\) was killed by SIGKILL, by a user or program, or by the kernel"
                r" because memory ran out \(.*\); if memory ran out, low"
            ),
        ),
        (
            "SIGSEGV",
            (
                r"process \d+\) was killed by SIGSEGV, so a library crashed, perhaps on a damaged"
                r" image: check all images with `python -m"
            ),
        ),
        (
            "SIGBUS",
            (
                r"process \d+\) was killed by SIGBUS, which happens if a mapped file is truncated"
                r" .*: check whether an index \(\*.index.npy\) was rewritten"
            ),
        ),
        ("exit", r"process \d+\) ended unexpectedly with exit status 7"),
    ],
)
def test_a_dead_worker_is_reported_at_once_with_the_cause(ending, message):
    began = time.monotonic()
    with (
        Loader(Dying(ending), 0, 100, num_workers=2) as loader,
        pytest.raises(WorkerError, match=message),
    ):
        list(loader)
    assert time.monotonic() - began < 120, "the loader noticed the death only through a timeout"
    assert not multiprocessing.active_children()


class Wrong(Numbered):
    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        if position == 3:
            raise KeyError("a mistake of ours")
        return super().fill(position, first, rows)


def test_an_exception_in_a_worker_is_raised_with_its_stack_at_its_batch():
    batches = Wrong()
    with Loader(batches, 0, 100, num_workers=2) as loader:
        for position in range(3):
            batches.check(position, next(loader))
        with pytest.raises(
            RuntimeError,
            match=r"(?s)in a loader worker:.*test_loader_ends.py.*KeyError: 'a mistake of ours'",
        ):
            next(loader)
        for position in range(4, 100):
            batches.check(position, next(loader))


def test_after_ctrl_c_in_a_batch_the_loop_can_continue():
    class Interrupted(Numbered):
        def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
            if position < 5:
                raise KeyboardInterrupt
            return super().fill(position, first, rows)

    batches = Interrupted()
    with Loader(batches, 0, 10) as loader:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                next(loader)
        for position, batch in enumerate(loader, 5):
            batches.check(position, batch)
    assert position == 9


def test_closing_does_not_wait_for_workers():
    """The loader is closed while all its buffers are full and a worker is preparing a batch that
    takes ten minutes. The loader must kill this worker."""
    loader = Loader(Numbered(pause_s=600), 0, 1000, num_workers=2)
    assert len(multiprocessing.active_children()) == 2
    time.sleep(0.5)
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()
    full = Loader(Numbered(num_rows=10), 0, 1000, num_workers=2)
    next(full)
    time.sleep(0.3)
    full.close()
    assert not multiprocessing.active_children()
    with pytest.raises(StopIteration):
        next(full)


def script(code: str) -> subprocess.Popen[str]:
    """Start Python code that uses a loader and first prints the process ids of its workers."""
    head = """
    import multiprocessing, os, signal, sys, time
    from data.numbered import Numbered
    from vit.data.loader import Loader
    if __name__ == "__main__":
        loader = Loader(Numbered(), 0, 10**9, num_workers=2)
        next(loader)
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    """
    full = textwrap.dedent(head) + textwrap.indent(textwrap.dedent(code), "    ")
    env = {
        **environment(),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests"), str(REPOSITORY)]),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", full], cwd=REPOSITORY, env=env, **pipes)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.02)


def test_a_killed_parent_leaves_no_workers():
    process = script("time.sleep(600)")
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    # The younger worker has inherited the write end of the pipe whose closing tells the older
    # worker that the parent has died.
    os.kill(max(workers), signal.SIGSTOP)
    process.kill()
    process.wait()
    try:
        wait_until_gone([min(workers)])
    finally:
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGCONT)
    wait_until_gone(workers)
    process.communicate()


def test_workers_ignore_the_signals_of_their_rank_and_end_with_it():
    """torchrun, Slurm and terminals send signals to every process of a job, but a rank must still
    be able to finish its step and save. In this test, the rank never closes its loader."""
    process = script("""
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: heard.append(number))
    workers = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for pid in (os.getpid(), *(worker.pid for worker in workers)):
            os.kill(pid, number)
    for position in range(1, 100):
        assert int(next(loader).ids[0]) == 300 * position
    assert len(heard) == 3 and all(worker.is_alive() for worker in workers)
    kept = [loader]
    print("saved")
    """)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    pids, saved = output.splitlines()
    assert saved == "saved"
    wait_until_gone([int(pid) for pid in pids.split()])


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CUDA runtime of this machine locks the memory"
)
def test_a_failure_to_page_lock_memory_is_only_a_note(capsys):
    """gVisor, WSL, some virtual machines and machines without a driver cannot lock memory pages."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert page_lock(memory, "memory of batches", "each is copied") is False
    stderr = capsys.readouterr().err
    assert re.fullmatch(
        r"note: memory of batches is not page-locked \(.+\): each is copied\n", stderr
    )
