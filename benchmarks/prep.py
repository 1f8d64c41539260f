"""Compare data preparation with peers and limits, in writing, checking, listing archives and
memory.

    python benchmarks/prep.py --quick                       a smoke test of one minute
    python benchmarks/prep.py --rows 1281167 100000000      100 million: minutes, 8 GB of disk
    python benchmarks/prep.py [--rounds N] [--data FOLDER] [--out FILE.json]

Grainy photos with ImageNet's sizes are created once and kept in FOLDER, as class folders and as a
tar of 100 tars like ILSVRC2012_img_train.tar. Contestants take turns (benchmarks/measure.py).
FILE.json contains every round, and FILE.md the tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from inputs.prep_data import Data, make_data
from measure import CORES, Result, create_parser, keep, machine, rows_of, shown, take_turns
from PIL import Image

from data_prep import imagenet
from data_prep.write.catalog import Builder, Source, open_catalog
from data_prep.write.images import ImagePolicy
from data_prep.write.jobs import run_jobs
from data_prep.write.plan import Settings, WritePlan, make_plan
from data_prep.write.samples import read_range
from data_prep.write.shard import ShardWork, write_shard

ROOT = Path(__file__).resolve().parent.parent
NUM_SHARDS = max(2, CORES)
IN_MEMORY = Path("/dev/shm")
STARTING_S = 4.0
"""The time that a worker process takes to start and warm up."""
WARM_UP = 100
DD = "dd of the same bytes"
SHARD_WRITER = "webdataset ShardWriter <- nested tar"
HASHING = "sha256 of the same bytes, nothing written"
PACKAGES = ("numpy", "pillow", "simplejpeg", "webdataset")


# ---- contestants: each reads the data, and writes to an empty folder -----------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def span(function: Callable[[Any], tuple[float, float]], parts: Sequence[Any]) -> float:
    """Run one worker process per part. Return the seconds for all parts, without startup.

    function: called with (part, begin time). Returns the start and end on a clock that all
    processes share.
    """
    begin_at = time.monotonic() + STARTING_S
    jobs = [(function, (part, begin_at), number) for number, part in enumerate(parts)]
    spans = run_jobs(jobs, len(parts), "benchmark", num_jobs=len(parts)).values()
    return max(end for _, end in spans) - min(start for start, _ in spans)


def wait_until(begin_at: float) -> float:
    time.sleep(max(0.0, begin_at - time.monotonic()))
    return time.monotonic()


def warm_memory(num_bytes: int) -> None:
    """Allocate and free `num_bytes`, so that the next contestant does not wait for memory.

    A virtual machine returns free memory to its host within seconds. The next use then waits for
    each page. The wait is several times longer than writing, and depends on the previous
    contestant.
    """
    np.ones(num_bytes, np.uint8)


def write_some(job: tuple[list[ShardWork], float]) -> tuple[float, float]:
    """Write a few images to warm up, then the given shards, in a worker process."""
    works, begin_at = job
    first = works[0]
    write_shard(first._replace(places=first.places[:WARM_UP]))
    num_bytes = sum(sample.size for work in works for sample in work.samples())
    wait_until(begin_at)
    # Allocate after the wait, during which the host would reclaim the memory.
    warm_memory(num_bytes)
    start = time.monotonic()
    for work in works:
        write_shard(work)
    return start, time.monotonic()


@contextlib.contextmanager
def planned(data: Data, workers: int, check: str, out: Path) -> Iterator[WritePlan]:
    """List the archive, check some images, and yield the plan."""
    settings = Settings(num_shards=NUM_SHARDS, workers=workers, policy=ImagePolicy(check=check))
    with quiet():
        source = imagenet.source([data.archive], allow_partial=True)
        with make_plan(source, out, settings) as plan:
            yield plan


def ours(data: Data, workers: int, check: str, out: Path) -> float:
    """Return the seconds to write shards and index from archive and catalog, without startup."""
    with planned(data, workers, check, out) as plan:
        work = plan.work
        return span(write_some, [work[worker::workers] for worker in range(workers)])


def timed(function: Callable[[Path], object], out: Path) -> float:
    began = time.monotonic()
    function(out)
    return time.monotonic() - began


def our_command(data: Data, workers: int, out: Path) -> None:
    """Run the complete command, from the start of Python to the data set card."""
    options = f"--partial --check headers --workers {workers} --num-shards {NUM_SHARDS}".split()
    command = [sys.executable, "-m", "data_prep.imagenet", str(data.archive), "--out", str(out)]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True)


def samples_of_folder(data: Data) -> Iterator[tuple[str, bytes, str]]:
    """Yield the name, JPEG and class of each image."""
    for file in data.files:
        yield file.stem, file.read_bytes(), file.parent.name


def samples_of_tar(data: Data) -> Iterator[tuple[str, bytes, str]]:
    with tarfile.open(data.archive) as outer:
        for inner_member in outer:
            with tarfile.open(fileobj=outer.extractfile(inner_member)) as inner:
                for member in inner:
                    encoded = inner.extractfile(member)
                    assert encoded is not None
                    yield member.name[:-5], encoded.read(), inner_member.name[:-4]


def shard_writer(samples: Iterator[tuple[str, bytes, str]], num_images: int, out: Path) -> None:
    import webdataset  # This also imports torch, which the workers do not need.

    pattern = f"{out}/train-%06d.tar"
    per_shard = math.ceil(num_images / NUM_SHARDS)
    with webdataset.ShardWriter(pattern, maxcount=per_shard, maxsize=1e10, verbose=0) as writer:
        for name, encoded, wnid in samples:
            writer.write({"__key__": name, "jpg": encoded, "cls": int(wnid[1:])})


def gnu_tar(data: Data, out: Path) -> None:
    subprocess.run(["tar", "-cf", out / "all.tar", "-C", data.folder, "."], check=True)


def dd(data: Data, out: Path) -> None:
    subprocess.run(
        ["dd", f"if={data.archive}", f"of={out / 'all.tar'}", "bs=4M", "status=none"], check=True
    )


def hashing(data: Data, out: Path) -> None:
    """Hash the archive. The writer's second thread does the same work, because it computes one
    sha256 per shard."""
    with open(data.archive, "rb") as file:
        hashlib.file_digest(file, "sha256")


def decode_some(job: tuple[tuple[list[Path], str], float]) -> tuple[float, float]:
    """Decode images that are already in memory, in a worker process."""
    (files, decoder), begin_at = job
    encoded = [file.read_bytes() for file in files]
    decoders: dict[str, Callable[[bytes], object]] = {
        "simplejpeg": partial(simplejpeg.decode_jpeg, colorspace="RGB"),
        "simplejpeg, 1/8": partial(
            simplejpeg.decode_jpeg, colorspace="RGB", min_width=1, min_height=1, min_factor=8
        ),
        "Pillow": lambda image: Image.open(io.BytesIO(image)).convert("RGB"),
    }

    decode = decoders[decoder]
    start = wait_until(begin_at)
    for image in encoded:
        decode(image)
    return start, time.monotonic()


def list_with_tarfile(tiny: Path, num_inner: int) -> int:
    """Return the number of members in the first inner tars."""
    num_members = 0
    with tarfile.open(tiny) as outer:
        for inner_member in itertools.islice(outer, num_inner):
            with tarfile.open(fileobj=outer.extractfile(inner_member)) as inner:
                num_members += len(inner.getmembers())
    return num_members


def catalog(source: Source, out: Path) -> None:
    with quiet(), open_catalog(source, out / "_catalog", seed=0):
        pass


# ---- measuring -----------------------------------------------------------------------------------


@contextlib.contextmanager
def empty_folder(neighbor: Path) -> Iterator[Path]:
    out = neighbor / f"vit-benchmark-{os.getpid()}"
    out.mkdir()
    try:
        yield out
    finally:
        shutil.rmtree(out)


def bring_to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def drop_from_cache(path: Path) -> None:
    """Drop `path` from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_writing(data: Data, place: Path, rounds: int) -> list[Result]:
    """Measure the writing of shards from page cache to memory, from page cache to disk, and from
    disk to disk."""
    num_images = len(data.files)
    contestants: dict[str, Callable[[Path], float]] = {
        DD: partial(timed, partial(dd, data)),
        HASHING: partial(timed, partial(hashing, data)),
        "ours <- nested tar, 1 process": partial(ours, data, 1, "headers"),
        f"ours <- nested tar, {NUM_SHARDS} processes": partial(ours, data, NUM_SHARDS, "headers"),
        SHARD_WRITER: partial(
            timed, lambda out: shard_writer(samples_of_tar(data), num_images, out)
        ),
        "webdataset ShardWriter <- folder": partial(
            timed, lambda out: shard_writer(samples_of_folder(data), num_images, out)
        ),
        "GNU tar <- folder": partial(timed, partial(gnu_tar, data)),
    }

    def into_memory(write: Callable[[Path], float]) -> float:
        with empty_folder(IN_MEMORY) as out:
            warm_memory(data.num_bytes)
            return data.num_bytes / 1e6 / write(out)

    def onto_disk(write: Callable[[Path], float]) -> float:
        with empty_folder(place) as out:
            os.sync()
            warm_memory(data.num_bytes)
            seconds = write(out)
            return data.num_bytes / 1e6 / (seconds + timed(bring_to_disk, out))

    def from_disk(write: Callable[[Path], float]) -> float:
        drop_from_cache(data.archive)
        return onto_disk(write)

    kinds: dict[str, Callable[[Callable[[Path], float]], float]] = {
        "Shards into memory: the processor's limit": into_memory,
        "Shards to a disk, until all is on it": onto_disk,
        "Shards from disk to disk: the archive is not in the page cache": from_disk,
    }
    results = []
    for title, measure in kinds.items():
        # Measure only archives from disk, because folders remain in the page cache.
        taking_part = {
            name: partial(measure, write)
            for name, write in contestants.items()
            if measure != from_disk or "folder" not in name
        }
        bases = (DD, HASHING, SHARD_WRITER)
        results.append(take_turns(title, "MB/s", taking_part, rounds, bases))
    return results


def measure_command(data: Data, place: Path, rounds: int) -> Result:
    """Measure the seconds that the complete command takes, and its parts before writing."""

    def in_empty_folder(function: Callable[[Path], object]) -> float:
        with empty_folder(place) as out:
            return timed(function, out)

    def imports(_: Path) -> None:
        command = [sys.executable, "-c", "import data_prep.imagenet"]
        subprocess.run(command, cwd=ROOT, check=True)

    def plan(out: Path) -> None:
        with planned(data, 1, "headers", out):
            pass

    parts: dict[str, Callable[[Path], object]] = {
        "the command, 1 worker": partial(our_command, data, 1),
        f"the command, {NUM_SHARDS} workers": partial(our_command, data, NUM_SHARDS),
        "of it: Python and imports": imports,
        "of it: the catalog, a look at 64 images": plan,
    }
    contestants = {name: partial(in_empty_folder, part) for name, part in parts.items()}
    return take_turns(f"The command, for {len(data.files):,} images", "s", contestants, rounds)


def measure_decoding(data: Data, rounds: int) -> Result:
    """Measure the images decoded per second on all cores."""

    def bare(decoder: str) -> float:
        return len(data.files) / span(
            decode_some, [(data.files[core::CORES], decoder) for core in range(CORES)]
        )

    def checked() -> float:
        with empty_folder(IN_MEMORY) as out:
            return len(data.files) / ours(data, CORES, "decode", out)

    contestants = {
        f"bare decoding, {decoder}": partial(bare, decoder)
        for decoder in ("simplejpeg", "simplejpeg, 1/8", "Pillow")
    }
    title = f"--check decode: images checked and written, {CORES} processes each"
    parts: dict[str, Callable[[], float]] = {**contestants, "ours, --check decode": checked}
    return take_turns(title, "images/s", parts, rounds, list(contestants))


def measure_catalog(data: Data, place: Path, num_tiny: int, rounds: int) -> Result:
    """Measure the archive members listed per second."""

    def listed() -> float:
        with empty_folder(place) as out:
            return num_tiny / timed(
                partial(catalog, imagenet.source([data.tiny], allow_partial=True)), out
            )

    def with_tarfile() -> float:
        began = time.monotonic()
        num_members = list_with_tarfile(data.tiny, 50)
        return num_members / (time.monotonic() - began)

    with quiet():
        contestants = {"tarfile, listing alone": with_tarfile, "ours, a finished catalog": listed}
        title = f"Catalog of a nested tar, {num_tiny:,} members of 1,000 tars"
        return take_turns(title, "members/s", contestants, rounds, ["tarfile, listing alone"])


def memory_of(job: tuple[int, Path]) -> dict[str, float]:
    """Return the time and memory for creating a catalog of this many rows in a new process."""
    num_rows, place = job
    filled_at = 0.0
    own_mb = list[float]()
    ended = threading.Event()

    def status_mb(field: str) -> float:
        [kib] = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(kib) * 1024 / 1e6

    def fill(builder: Builder) -> None:
        nonlocal filled_at
        builder.classes([f"n{label:08d}" for label in range(1000)])
        file = builder.file("archive.tar")
        for start in range(0, num_rows, 4096):
            rows = np.arange(start, min(start + 4096, num_rows))
            names = [f"n{row % 1000:08d}_{row}.JPEG" for row in rows.tolist()]
            sizes = np.full(len(rows), 110_000)
            builder.add("train", file, names, rows % 1000, rows * 113_000, sizes)
        filled_at = time.monotonic()

    def watch() -> None:
        while not ended.wait(0.01):
            own_mb.append(status_mb("RssAnon"))

    before_mb = status_mb("RssAnon")
    watcher = threading.Thread(target=watch)
    watcher.start()
    with empty_folder(place) as out:
        source = Source("simulated", {}, fill, read_range)
        began = time.monotonic()
        with open_catalog(source, out / "_catalog", seed=0) as made:
            finished = time.monotonic()
            # Look up as many samples as one shard has.
            made.table("train").samples(range(0, num_rows, max(1, num_rows // 7000)))
            num_bytes = sum(path.stat().st_size for path in made.folder.iterdir())
    ended.set()
    watcher.join()
    return {
        "rows": num_rows,
        "filling s": filled_at - began,
        "ordering s": finished - filled_at,
        "catalog GB": num_bytes / 1e9,
        "before MB": before_mb,
        "peak MB": max(own_mb),
        "with mapped files MB": status_mb("VmHWM"),
    }


def main() -> None:
    parser = create_parser(__doc__ or "", "prep")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        default=[1_281_167, 10_000_000],
        metavar="N",
        help="number of rows of simulated catalogs (default: %(default)s)",
    )
    args = parser.parse_args()
    num_images, num_tiny, rounds = (300, 20_000, 1) if args.quick else (3000, 200_000, args.rounds)

    args.data.mkdir(parents=True, exist_ok=True)
    data = make_data(args.data, num_images, num_tiny)
    described = (
        f"{len(data.files):,} JPEGs, {data.num_bytes / 1e6:,.0f} MB,"
        f" {data.num_bytes / len(data.files) / 1e3:.0f} kB on average."
    )
    load = os.getloadavg()[0]
    facts = machine(args.data, PACKAGES)
    results = measure_writing(data, args.data, rounds)
    results += [measure_command(data, args.data, rounds), measure_decoding(data, rounds)]
    results += [measure_catalog(data, args.data, num_tiny, rounds)]
    sizes = [100_000] if args.quick else args.rows
    memory = [
        run_jobs([(memory_of, (rows, args.data), "")], 1, "benchmark", num_jobs=1)[""]
        for rows in sizes
    ]
    tables = {result["title"]: rows_of(result) for result in results}
    if memory:
        rows = [[shown(value) for value in row.values()] for row in memory]
        tables["Peak memory of making a catalog"] = [list(memory[0]), *rows]
    report = {
        "data": described,
        "rounds": rounds,
        "machine": facts,
        "load": load,
        "results": results,
        "memory": memory,
    }
    keep(args.out, "prep-quick" if args.quick else "prep", report, tables)


if __name__ == "__main__":
    main()
