"""What a host reads and writes: every shard's size, the rate of reading, the run's folder.

Nothing stays: what is written lies in a hidden folder that is removed again, by the next check if
this one was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from vit.config.schema import Config
from vit.data.shards.data_set import check_shards
from vit.data.shards.split_slice import parse_name
from vit.distributed.process_group import World
from vit.extras.planner.check.collectives import rate_text
from vit.extras.planner.check.findings import Finding, Verdict, few
from vit.run_folder import is_in_use
from vit.system.files import ShardError, flush, locked_folder, remove_leftovers
from vit.system.host import file_system, is_shared
from vit.system.meter import digits
from vit.system.retry import RetryPolicy
from vit.system.urls import resolve

READ_S = 2.0
"""For so long images are read, or until all of a few batches are."""
READ_BYTES = 2**29
READ_AT_ONCE = 8
READ_BATCHES = 8
TEST_BYTES = 2**20
"""Written to find out whether a folder can be written."""
GIB = 2**30


# --- shards ---------------------------------------------------------------------------------------


def look_at_shards(config: Config, world: World) -> list[int] | None:
    """Return number and bytes of all shards that this host sees; None on its other ranks.

    Raises ShardError, with the problems of all data sets.
    """
    if not world.is_local_main:
        return None
    data = config.data
    places = [(data.root, data.val_split)]
    if data.reader == "index":
        places += [
            (each.root or data.root, each.split or data.train_split) for each in data.sources
        ]
        places += [] if data.sources else [(data.root, data.train_split)]
    places += config.eval.further_places(data.root, data.val_split)
    number = num_bytes = 0
    problems: list[str] = []
    for root, split in dict.fromkeys(places):
        try:
            found = check_shards(resolve(root), parse_name(split).split, RetryPolicy(0.0))
        except ShardError as error:
            problems += few(str(error).splitlines())
        else:
            number += found[0]
            num_bytes += found[1]
    if problems:
        raise ShardError("\n".join(dict.fromkeys(problems)))
    return [number, num_bytes]


def judge_shards(found: dict[int, list[int] | None]) -> Iterator[Finding]:
    """Yield how many shards were looked at, and by how many hosts."""
    told = [each for each in found.values() if each is not None]
    number, num_bytes = told[0]
    where = "by this host" if len(told) == 1 else f"by each of {len(told)} hosts"
    said = f"{number:,} of the right size ({num_bytes / 1e9:,.3g} GB), looked at {where}"
    yield Finding("shards", Verdict.OK, said)


# --- reading --------------------------------------------------------------------------------------


def read_rate(batches: Any, first: int, num_batches: int, world: World) -> list[float] | None:
    """Return bytes and images per second that this host reads, None on its other ranks.

    The samples of a few global batches from position `first` on, as training reads them: one by
    one, compared with their checksums. Of a cache what is not in it yet is fetched. Raises
    ShardError for what cannot be read.
    """
    if not world.is_local_main or not batches.exact:
        return None
    split = batches.split
    positions = range(first, min(first + READ_BATCHES, num_batches))
    samples = list(chain.from_iterable(batches.order.batch(each).tolist() for each in positions))
    began_s = time.perf_counter()
    num_bytes = num_images = 0
    with ThreadPoolExecutor(READ_AT_ONCE) as threads:
        for begin in range(0, len(samples), 8 * READ_AT_ONCE):
            for read in threads.map(split.read, samples[begin : begin + 8 * READ_AT_ONCE]):
                num_bytes += len(read)
                num_images += 1
            if time.perf_counter() - began_s > READ_S or num_bytes > READ_BYTES:
                break
    taken_s = time.perf_counter() - began_s
    return [num_bytes / taken_s, num_images / taken_s]


def judge_reading(found: dict[int, list[float] | None], world: World) -> Iterator[Finding]:
    """Yield the rate of the slowest host."""
    told = {rank: each for rank, each in found.items() if each is not None}
    if not told:
        yield Finding("reading", Verdict.OK, "a stream: not tried")
        return
    slowest = min(told, key=lambda rank: told[rank][0])
    rate, images = told[slowest]
    which = (
        f", the slowest of {len(told)} hosts ({world.host_of(slowest)})" if len(told) > 1 else ""
    )
    said = f"{rate_text(rate)}, {digits(images)} images/s from shards{which}"
    yield Finding("reading", Verdict.OK, f"{said}; what was read before comes from memory")


# --- the run's folder -----------------------------------------------------------------------------


def place_of(run_dir: Path) -> Path:
    """Return the folder to try: the run's, or the nearest above it that is there."""
    folder = run_dir.absolute()
    return next(each for each in (folder, *folder.parents) if os.path.lexists(each))


_passing: list[Path] = []
"""Folders in which a thread of this process writes now."""


@contextmanager
def passing_folder(run_dir: Path) -> Iterator[Path]:
    """A hidden folder on the disk of `run_dir`, which is gone after the block.

    Raises ValueError if it cannot be made there.
    """
    place = place_of(run_dir)
    remove_leftovers(place, "check")
    try:
        folder, lock = locked_folder(place / "check")
    except OSError as error:
        raise cannot_write(run_dir, place, error) from None
    _passing.append(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _passing.remove(folder)
        os.close(lock)


def remove_passing() -> None:
    """Remove what a thread is writing, before this process ends in the middle of it."""
    for folder in list(_passing):
        hidden = folder.with_name(folder.name.replace(".tmp", ".end.tmp"))
        with suppress(OSError):
            folder.rename(hidden)  # by its old name the thread makes nothing new
            shutil.rmtree(hidden, ignore_errors=True)


def cannot_write(run_dir: Path, place: Path, error: OSError) -> ValueError:
    """The error for a folder of a run that cannot be written."""
    where = "" if place == run_dir.absolute() else f" {place}"
    return ValueError(
        f"run.dir={run_dir}:{where} cannot be written ({error.strerror}): choose another folder, or"
        " free some space"
    )


def look_at_folder(run_dir: Path) -> list[str]:
    """Try the folder of a run without changing anything in it; return verdicts and lines, in turn.

    Raises ValueError if the run could not write there.
    """
    place = place_of(run_dir)
    found: list[str] = []
    if is_in_use(run_dir):
        raise ValueError(
            f"{run_dir}: in use by a live run: wait for its end, stop it, or use another run.dir"
        )
    try:
        with passing_folder(run_dir) as folder:
            path = folder / "test"
            with path.open("wb") as file:
                file.write(bytes(TEST_BYTES))
                file.flush()
                os.fsync(file.fileno())
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    found += [
                        Verdict.NOTE,
                        f"no locks there ({error.strerror}): make sure that only one run uses it",
                    ]
            os.replace(path, folder / "renamed")
            flush(folder)
    except OSError as error:
        raise cannot_write(run_dir, place, error) from None
    kind = file_system(place)
    what = "there" if place == run_dir.absolute() else "new"
    shared = ", shared with other hosts" if is_shared(kind) else ""
    on = f", on {kind}{shared}" if kind else ""
    free = f"{shutil.disk_usage(place).free / GIB:,.1f} GiB free"
    return [Verdict.OK, f"{run_dir}: {what}, can be written{on}, {free}", *found]


def judge_folder(found: dict[int, list[str] | None]) -> Iterator[Finding]:
    """Yield what rank 0 has found of the run's folder."""
    told = found[0] or []
    verdict = Verdict.NOTE if Verdict.NOTE in told[::2] else Verdict.OK
    yield Finding("run folder", verdict, "\n".join(told[1::2]))
