"""Work for several processes: run it, show how far it is, gather what failed. Free of torch.

The data's story: a list of jobs, each a module-level function with one argument, goes to a pool of processes; results come back by name.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from vit.progress import Meter


class PrepError(ValueError):
    """The source or the output folder is not as it should be; says what is wrong and what to do."""


class UnreadableImages(PrepError):
    """Images that cannot be read. args[0]: a line for each."""


def run_jobs(jobs: Sequence[tuple[Callable[[Any], Any], Any, Any]], workers: int, what: str, num_images: int = 0) -> dict[Any, Any]:
    """Run (function, argument, name) jobs in worker processes and return {name: result}.

    Shows the progress of `what`: of `num_images`, which the jobs count with `count_one`, or without it of the jobs themselves.

    All unreadable images are gathered before the one PrepError that lists them; any other error stops the rest at once.
    """
    # Spawned, not forked: the caller may have threads (torch's, rich's), and those do not survive a fork.
    context = multiprocessing.get_context("spawn")
    images_done = context.Value("Q", 0)
    results: dict[Any, Any] = {}
    unreadable: list[str] = []
    with ProcessPoolExecutor(max(1, min(workers, len(jobs))), context, _start_worker, (images_done,)) as pool:
        names: dict[Future, Any] = {pool.submit(function, argument): name for function, argument, name in jobs}
        pending = set(names)
        try:
            with Meter(what, num_images or len(jobs), "images" if num_images else "shards") as meter:
                while pending:
                    finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                    meter.update(images_done.value if num_images else len(names) - len(pending))
                    for future in finished:
                        try:
                            results[names[future]] = future.result()
                        except UnreadableImages as error:
                            unreadable += error.args[0]
        except BrokenProcessPool as error:
            raise PrepError(
                "a worker process was killed (out of memory?); run the same command again, it continues, perhaps with fewer --workers"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if unreadable:
        raise PrepError(
            f"{len(unreadable)} images cannot be read; remove or replace them and run the same command again, "
            f"whole shards are kept:\n  " + "\n  ".join(sorted(unreadable))
        )
    return results


# ---- in a worker process ------------------------------------------------------------------------------------------------

_images_done: Any = None  # a multiprocessing.Value, in worker processes


def count_one() -> None:
    """Tell the parent that one more image is done; for functions that `run_jobs` runs."""
    with _images_done.get_lock():
        _images_done.value += 1


def _start_worker(images_done: Any) -> None:
    """Share the counter of images; and end with the parent, as a worker whose parent was killed would wait for ever."""
    global _images_done
    _images_done = images_done
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the workers too, and one report of it is enough
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
