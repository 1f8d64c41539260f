"""How a loader and its workers end: closed, killed, with an error."""

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
from numbered import Numbered
from proc import is_alive
from processes import REPOSITORY, environment

from vit.data.batches import Batch
from vit.data.loader import Loader
from vit.data.to_gpu import page_lock
from vit.data.worker_pool import WorkerError

# ---- ends ----------------------------------------------------------------------------------------


class Dying(Numbered):
    """Ends its process at position 3, each in its way."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        if position == 3:
            if self.how == "exit":
                os._exit(7)
            faulthandler.disable()  # pytest's, which would print
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().fill(position, first, rows)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "SIGKILL",
            (
                r"process \d+\) was killed by SIGKILL, by a person or program, or by the kernel,"
                r" .* when memory runs out \(.*\); if it did, low"
            ),
        ),
        (
            "SIGSEGV",
            (
                r"process \d+\) was killed by SIGSEGV, so a library it uses crashed, perhaps on a"
                r" damaged image: `python -m"
            ),
        ),
        (
            "SIGBUS",
            (
                r"process \d+\) was killed by SIGBUS, as when a mapped file is cut short .*: was an"
                r" index \(\*.index.npy\) rewritten"
            ),
        ),
        ("exit", r"process \d+\) ended by itself with exit status 7"),
    ],
)
def test_a_dead_worker_is_an_error_at_once_that_says_of_what(how, told):
    began = time.monotonic()
    with (
        Loader(Dying(how), 0, 100, num_workers=2) as loader,
        pytest.raises(WorkerError, match=told),
    ):
        list(loader)
    assert time.monotonic() - began < 120, "it was noticed by a timeout"
    assert not multiprocessing.active_children()


class Wrong(Numbered):
    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        if position == 3:
            raise KeyError("a mistake of ours")
        return super().fill(position, first, rows)


def test_an_exception_arrives_with_its_stack_when_its_batch_is_due():
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


def test_after_ctrl_c_in_a_batch_the_loop_may_go_on():
    """As in a notebook: each time a batch is lost, and nothing else."""

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


def test_closing_waits_for_nobody():
    """Slots full, parts waiting, a worker in the middle of a long one: it is killed."""
    loader = Loader(Numbered(pause_s=600), 0, 1000, num_workers=2)
    assert len(multiprocessing.active_children()) == 2
    time.sleep(0.5)  # they have begun
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
    """Python that prints the ids of its workers first."""
    head = """
    import multiprocessing, os, signal, sys, time
    from numbered import Numbered
    from vit.data.loader import Loader
    if __name__ == "__main__":
        loader = Loader(Numbered(), 0, 10**9, num_workers=2)
        next(loader)
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    """
    full = textwrap.dedent(head) + textwrap.indent(textwrap.dedent(code), "    ")
    env = {
        **environment(),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests" / "helpers"), str(REPOSITORY)]),
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
    # the later one has the pipe by which the other would hear of it
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
    """Torchrun, Slurm and terminals signal every process of a job; the rank goes on and can save.
    It never closes its loader."""
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's runtime locks the memory")
def test_memory_that_the_cuda_runtime_does_not_lock_is_no_reason_to_stop(capsys):
    """gVisor, WSL and some virtual machines refuse it; so does a machine without a driver."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert page_lock(memory, "memory of batches", "each is copied") is False
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"note: memory of batches is not page-locked here \(.+\): each is copied\n", said
    )
