"""Run jobs in worker processes, show their progress, and stop them on errors.

A job is a module-level function with one argument. Results are collected by name.
"""

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
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
    """
    workers = max(1, min(workers, num_jobs))
    # Spawn processes, because the caller's threads (torch, rich) do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with signals_blocked():  # The first value starts a process that would be ended by SIGHUP.
        images_done = context.Value("Q", 0)
        bytes_done = context.Value("Q", 0)
        stopping = context.Value("b", 0)

    def show_progress(meter: Meter, num_finished: int) -> None:
        if num_images:
            meter.update(
                images_done.value, f"{num_finished} of {num_jobs} {unit}", bytes_done.value
            )
        else:
            meter.update(num_finished)

    results: dict[Any, Any] = {}
    names: dict[Future, Any] = {}
    children_before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        workers, context, _start_worker, (images_done, bytes_done, stopping)
    ) as pool:
        try:
            with Meter(title, num_images or num_jobs, "images" if num_images else unit) as meter:
                show = partial(show_progress, meter)
                for name, result in _results(pool, jobs, names, JOBS_WAITING * workers, show):
                    if on_result is None:
                        results[name] = result
                    else:
                        on_result(name, result)
        except BrokenProcessPool as error:
            # The dead worker may have held a lock that other workers are waiting for.
            for worker in set(multiprocessing.active_children()) - children_before:
                worker.kill()
            raise _lost_worker() from error
        except BaseException:
            stopping.value = 1  # Let the workers clean up before the pool joins them.
            for future in names:
                future.cancel()
            raise
    return results


def _results(
    pool: ProcessPoolExecutor,
    jobs: Iterable[tuple[Callable[[Any], Any], Any, Any]],
    names: dict[Future, Any],
    most_submitted: int,
    show_progress: Callable[[int], None],
) -> Iterator[tuple[Any, Any]]:
    """Submit the jobs, and yield the name and the result of each job when it finishes.

    Args:
        names: The names of the jobs that are submitted and not finished. Changed in place, so that
            the caller can cancel them.
        most_submitted: The maximum number of these jobs.
        show_progress: Receives the number of finished jobs, at least five times a second.
    """
    waiting = iter(jobs)
    num_finished = 0
    while True:
        room = most_submitted - len(names)
        with signals_blocked():  # The first submission starts the workers.
            for function, argument, name in itertools.islice(waiting, room):
                names[pool.submit(function, argument)] = name
        if not names:
            return

        for future in wait(names, timeout=0.2, return_when=FIRST_COMPLETED).done:
            name = names.pop(future)
            yield name, future.result()
            num_finished += 1
        show_progress(num_finished)


def _lost_worker() -> PrepError:
    """Return the error for a worker process that ended unexpectedly."""
    unguarded = ""
    if sys.modules["__main__"].__spec__ is None:  # Workers import the script.
        unguarded = (
            ", or ended at its start, because a script calls this function outside"
            ' `if __name__ == "__main__":`'
        )
    return PrepError(
        f"a worker process was killed (out of memory?){unguarded}; run the same command"
        " again, perhaps with fewer --workers"
    )


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
