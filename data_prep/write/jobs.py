"""Run jobs in worker processes, show their progress, and stop them on errors.

A job is a module-level function with one argument. Results are collected by name.
"""

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from data_prep.errors import PrepError
from vit.system.child_process import follow_parent, signals_blocked
from vit.system.meter import Meter

JOBS_WAITING = 4
"""The number of queued jobs per worker: enough to keep the worker busy, but few enough that a
million jobs need little memory."""


def run_jobs(
    jobs: Iterable[tuple[Callable[[Any], Any], Any, Any]],
    workers: int,
    title: str,
    *,
    num_jobs: int,
    num_images: int = 0,
    unit: str = "shards",
    on_result: Callable[[Any, Any], None] | None = None,
) -> dict[Any, Any]:
    """Run (function, argument, name) jobs in worker processes and return {name: result}.

    Shows progress under `title`, in images if `num_images` is given and otherwise in `unit`. Jobs
    count images with `count_one`. If `on_result(name, result)` is given, it receives each result
    when the job finishes, and {} is returned. The first error stops all jobs and is raised. Jobs
    that count images stop after at most one more image.

    `jobs` may be long: only a few are taken at a time, to keep the workers busy.
    """
    # Spawn processes, because the caller's threads (torch, rich) do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with signals_blocked():  # The first value starts a process, which SIGHUP would end.
        images_done, bytes_done = context.Value("Q", 0), context.Value("Q", 0)
        stopping = context.Value("b", 0)

    results: dict[Any, Any] = {}
    submitted: dict[Future, Any] = {}  # maps each job that is not finished to its name
    waiting = iter(jobs)
    num_finished = 0
    workers = max(1, min(workers, num_jobs))

    with (
        ProcessPoolExecutor(
            workers, context, _start_worker, (images_done, bytes_done, stopping)
        ) as pool,
        _stop_on_error(submitted, stopping),
        Meter(title, num_images or num_jobs, "images" if num_images else unit) as meter,
    ):
        while True:
            room = JOBS_WAITING * workers - len(submitted)
            with signals_blocked():  # The first submission starts the workers.
                for function, argument, name in itertools.islice(waiting, room):
                    submitted[pool.submit(function, argument)] = name
            if not submitted:
                return results

            for future in wait(submitted, timeout=0.2, return_when=FIRST_COMPLETED).done:
                name = submitted.pop(future)
                if on_result is None:
                    results[name] = future.result()
                else:
                    on_result(name, future.result())
                num_finished += 1

            if num_images:
                meter.update(
                    images_done.value, f"{num_finished} of {num_jobs} {unit}", bytes_done.value
                )
            else:
                meter.update(num_finished)


@contextmanager
def _stop_on_error(submitted: Iterable[Future], stopping: Any) -> Iterator[None]:
    """Stop all jobs if an error occurs in the block. Enter it before the first job is submitted.

    Args:
        submitted: The jobs that are not finished.
        stopping: A shared value that the workers read. 1 stops them.
    """
    children_before = set(multiprocessing.active_children())
    try:
        yield
    except BrokenProcessPool as error:
        # The dead worker may have held a lock that other workers are waiting for.
        for worker in set(multiprocessing.active_children()) - children_before:
            worker.kill()

        unguarded = ""
        if sys.modules["__main__"].__spec__ is None:  # Workers import the script.
            unguarded = (
                ", or ended at its start, because a script calls this function outside"
                ' `if __name__ == "__main__":`'
            )
        raise PrepError(
            f"a worker process was killed (out of memory?){unguarded}; run the same command"
            " again, perhaps with fewer --workers"
        ) from error
    except BaseException:
        stopping.value = 1  # Let the workers clean up before the pool joins them.
        for future in submitted:
            future.cancel()
        raise


# ---- in a worker process -------------------------------------------------------------------------

_counters: Any = None  # three multiprocessing.Value objects that are set in worker processes


class _Stopped(Exception):
    """An exception that stops a job after another job failed or the user interrupted the
    command."""


def count_one(num_bytes: int = 0) -> None:
    """Report a finished image to the main process. Call this in functions run by `run_jobs`.

    Stops the job if all jobs are being stopped.
    """
    images_done, bytes_done, stopping = _counters
    if stopping.value:
        raise _Stopped
    with images_done.get_lock():
        images_done.value += 1
        bytes_done.value += num_bytes


def _start_worker(*counters: Any) -> None:
    """Store the shared counters in a worker process."""
    global _counters
    _counters = counters
    follow_parent()
