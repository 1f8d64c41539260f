"""Check the size of every shard, the reading rate, and the run's folder on a host.

Test files are written to a hidden folder and then removed. If the check is killed, the next check
removes them.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from vit.config.schema import Config, SourceConfig
from vit.data.batches import AugmentedBatches
from vit.data.shards.data_set import check_shards
from vit.data.shards.split_slice import parse_name
from vit.data.storage.opening import RemoteStorage
from vit.distributed.process_group import World
from vit.extras.planner.check.findings import Finding, Verdict, few
from vit.run_folder.lock import is_in_use
from vit.system.files import ShardError, flush, locked_folder, remove_leftovers
from vit.system.host import file_system, is_shared
from vit.system.meter import GIB, digits, rate_text
from vit.system.retry import RetryPolicy
from vit.system.urls import resolve

READ_S = 2.0
"""The time limit for reading the images of `READ_BATCHES` batches."""
READ_BYTES = 2**29
"""The number of bytes after which reading ends."""
READ_AT_ONCE = 8
"""The number of threads that read."""
READ_BEFORE_LOOK = 64
"""The number of images between two looks at these limits."""
READ_BATCHES = 8
TEST_BYTES = 2**20
"""The number of bytes written when a folder is tested."""


# --- shards ---------------------------------------------------------------------------------------


def look_at_shards(config: Config, world: World) -> list[int] | None:
    """Check all shards from this host, and return their number and total bytes.

    Returns None on all but one rank per host. Raises a ShardError that lists the problems of all
    datasets.
    """
    if not world.is_local_main:
        return None

    data = config.data
    places = [(data.root, data.val_split)]
    if config.stream.urls is None:
        places += [
            (source.root or data.root, source.split or data.train_split)
            for source in data.sources or (SourceConfig(),)
        ]
    places += config.eval.further_places(data.root, data.val_split)

    storage = RemoteStorage(retry=RetryPolicy(0.0))
    number = num_bytes = 0
    problems: list[str] = []
    for root, split in dict.fromkeys(places):
        try:
            counts = check_shards(resolve(root), parse_name(split).split, storage)
        except ShardError as error:
            problems += few(str(error).splitlines())
        else:
            number += counts[0]
            num_bytes += counts[1]

    if problems:
        raise ShardError("\n".join(dict.fromkeys(problems)))
    return [number, num_bytes]


def judge_shards(counts: dict[int, list[int] | None]) -> Iterator[Finding]:
    """Yield the number of checked shards. counts: the number and bytes of the shards, by rank."""
    host_counts = [count for count in counts.values() if count is not None]
    number, num_bytes = host_counts[0]

    num_hosts = len(host_counts)
    hosts = "by this host" if num_hosts == 1 else f"by each of {num_hosts} hosts"
    yield Finding(
        "shards",
        Verdict.OK,
        f"{number:,} of the expected size ({num_bytes / 1e9:,.3g} GB), checked {hosts}",
    )


# --- reading --------------------------------------------------------------------------------------


def read_rate(batches: AugmentedBatches, num_batches: int, world: World) -> list[float] | None:
    """Return the bytes and images per second that this host reads from shards.

    Reads a few global batches from the middle of the run and verifies their checksums. These
    samples are not in the page cache yet. Returns None on all but one rank per host. Raises
    ShardError if a sample cannot be read.
    """
    if not world.is_local_main or not batches.exact:
        return None

    first = num_batches // 2
    positions = range(first, min(first + READ_BATCHES, num_batches))
    samples = list(chain.from_iterable(batches.order.batch(p).tolist() for p in positions))

    began_s = time.perf_counter()
    num_bytes = num_images = 0
    with ThreadPoolExecutor(READ_AT_ONCE) as threads:
        for begin in range(0, len(samples), READ_BEFORE_LOOK):
            part = samples[begin : begin + READ_BEFORE_LOOK]
            for image in threads.map(batches.split.read, part):
                num_bytes += len(image)
            num_images += len(part)
            if time.perf_counter() - began_s > READ_S or num_bytes > READ_BYTES:
                break

    taken_s = time.perf_counter() - began_s
    return [num_bytes / taken_s, num_images / taken_s]


def judge_reading(rates: dict[int, list[float] | None], world: World) -> Iterator[Finding]:
    """Yield the reading rate of the slowest host. rates: bytes and images per second, by rank."""
    host_rates = {rank: rate for rank, rate in rates.items() if rate is not None}
    if not host_rates:
        yield Finding("reading", Verdict.OK, "not measured for a stream")
        return

    slowest = min(host_rates, key=lambda rank: host_rates[rank][0])
    rate, images = host_rates[slowest]
    host = ""
    if len(host_rates) > 1:
        host = f", the slowest of {len(host_rates)} hosts ({world.host_of(slowest)})"

    text = f"{rate_text(rate)}, {digits(images)} images/s from shards{host}"
    yield Finding("reading", Verdict.OK, f"{text}; includes reads from the page cache")


# --- the run's folder -----------------------------------------------------------------------------


def place_of(run_dir: Path) -> Path:
    """Return the run's folder, or its nearest existing parent."""
    folder = run_dir.absolute()
    return next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))


_passing: list[Path] = []
"""The folders to which a thread of this process is writing."""


@contextmanager
def passing_folder(run_dir: Path) -> Iterator[Path]:
    """Create a hidden folder on the same disk as `run_dir`, and remove it when the block ends.

    Raises ValueError if the folder cannot be created.
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
    """Remove the files of a thread that is still writing, before this process exits."""
    for folder in list(_passing):
        hidden = folder.with_name(folder.name.replace(".tmp", ".end.tmp"))
        with suppress(OSError):
            folder.rename(hidden)  # Prevents the thread from creating more files.
            shutil.rmtree(hidden, ignore_errors=True)


def cannot_write(run_dir: Path, place: Path, error: OSError) -> ValueError:
    """Return the error for a run folder that is not writable."""
    parent = "" if place == run_dir.absolute() else f" {place}"
    return ValueError(
        f"run.dir={run_dir}:{parent} cannot be written ({error.strerror}): choose another folder,"
        " or free some space"
    )


def look_at_folder(run_dir: Path) -> list[tuple[str, str]]:
    """Test the folder of a run without changing its files.

    Returns verdicts, each with a line of text. Raises ValueError if the folder is not writable.
    """
    if is_in_use(run_dir):
        raise ValueError(
            f"{run_dir}: in use by a live run: wait until it ends, stop it, or use another run.dir"
        )

    place = place_of(run_dir)
    try:
        with passing_folder(run_dir) as folder:
            notes = _try_writing(folder)
    except OSError as error:
        raise cannot_write(run_dir, place, error) from None

    kind = file_system(place)
    state = "exists" if place == run_dir.absolute() else "new"
    shared = ", shared with other hosts" if is_shared(kind) else ""
    disk = f", on {kind}{shared}" if kind else ""
    free = f"{shutil.disk_usage(place).free / GIB:,.1f} GiB free"
    return [(Verdict.OK, f"{run_dir}: {state}, can be written{disk}, {free}"), *notes]


def _try_writing(folder: Path) -> list[tuple[str, str]]:
    """Write, lock and rename a file in `folder`, and return a note if it cannot be locked."""
    notes: list[tuple[str, str]] = []
    path = folder / "test"
    with path.open("wb") as file:
        file.write(bytes(TEST_BYTES))
        file.flush()
        os.fsync(file.fileno())
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"the file system has no locks ({error.strerror})"
            notes.append((Verdict.NOTE, f"{text}: let only one run use this folder"))

    os.replace(path, folder / "renamed")
    flush(folder)
    return notes
