"""Fetch the blocks of a data set into the cache before a job needs them.

    python -m vit.data.warm s3://bucket/imagenet --split train
    python -m vit.data.warm /lustre/imagenet --cache-dir /local/cache
    python -m vit.data.warm --config configs/vit_b16.yaml loader.cache_dir=/local/cache

The first command fetches from a URL into the default cache. The second copies from a mounted folder
to the local disk. The third fetches the data that a run with this config will read. As in training,
the blocks are determined by root, split and cache. Threads fetch missing blocks until the cache is
full. Several commands on one host share the work: each starts at a different block and locks each
block that it fetches.
"""

import os
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from shlex import quote

from vit.config.base import SourceConfig
from vit.config.io import load_config
from vit.config.schema import DataConfig, LoaderConfig
from vit.data.shards.split_slice import parse_name
from vit.data.storage.block_cache import Fetched
from vit.data.storage.cached_tars import CacheBlock, CachedTars
from vit.data.storage.opening import open_split
from vit.system.command_line import Parser
from vit.system.files import ShardError
from vit.system.hashing import hash64
from vit.system.meter import Meter
from vit.system.redact import guard_console, shown
from vit.system.retry import RetryPolicy
from vit.system.urls import resolve

NUM_THREADS = 16
"""The number of blocks to fetch concurrently. Each of these blocks is held in memory."""


def warm(tars: CachedTars, split: str, shards: range) -> tuple[str, bool]:
    """Fetch the blocks of these shards that are not cached yet, until the cache is full.

    Returns a report, and whether all fetched bytes match the index. Raises ShardError if a block
    cannot be fetched or stored.
    """
    cache = tars.cache
    blocks = list(tars.blocks(shards))
    all_bytes = sum(block.num_bytes for block in blocks)

    # Start at a random block. Otherwise, several commands would wait for each other's locks.
    start = int(hash64(os.getpid())) % len(blocks)
    missing = [block for block in blocks[start:] + blocks[:start] if not cache.holds(block.name)]
    fetched_bytes, damaged = _fetch_blocks(tars, split, missing)

    lacking_bytes = sum(block.num_bytes for block in missing) - fetched_bytes
    report = (
        f"{split}: {_size(all_bytes - lacking_bytes)} of {_size(all_bytes)} are in {cache.folder},"
        f" {_size(fetched_bytes)} of them fetched now"
    )
    if damaged:
        places = ", ".join(sorted({tars.where(block.shard) for block in damaged}))
        return (
            f"{report}; bytes differ from the index in {places}; copy the damaged shards again"
            f" (`python -m data_prep.verify {quote(str(tars.folder))}` lists the images)"
        ), False

    if not lacking_bytes:
        return report, True
    if cache.has_room(2 * max(block.num_bytes for block in missing)):
        raise ShardError(
            f"{report}; the rest could not be stored (see above): free some space on this disk, or"
            " set another --cache-dir"
        )
    return (
        f"{report}; the cache is full ({_size(cache.limit_bytes)}): enlarge it with --cache-gib or"
        " loader.cache_gib"
    ), True


def _fetch_blocks(
    tars: CachedTars, split: str, blocks: Sequence[CacheBlock]
) -> tuple[int, set[CacheBlock]]:
    """Fetch blocks into the cache until it is full, several at a time.

    Returns the number of bytes added, and the blocks that do not match the index.
    """
    cache = tars.cache
    is_full = threading.Event()
    damaged = set[CacheBlock]()

    def get(block: CacheBlock) -> Fetched:
        try:
            fetched = tars.get(block)
        except OSError as error:
            raise ShardError(
                f"{tars.where(block.shard)}: {error.strerror}; start again when the data set is"
                " complete"
            ) from error
        if fetched.part_ends is None:
            damaged.add(block)
        return fetched

    def fetch(block: CacheBlock) -> int:
        """Fetch a block, and return the number of bytes added to the cache."""
        if not is_full.is_set() and cache.has_room(block.num_bytes):
            cache.fetch(block.name, lambda: get(block), may_remove=False)
            if cache.holds(block.name):
                return block.num_bytes
        if block not in damaged:
            is_full.set()
        return 0

    fetched_bytes = 0
    threads = ThreadPoolExecutor(NUM_THREADS)
    try:
        with Meter(f"warming {split}", len(blocks), "blocks") as meter:
            futures = [threads.submit(fetch, block) for block in blocks]
            for done, future in enumerate(as_completed(futures), 1):
                fetched_bytes += future.result()
                meter.update(done, num_bytes=fetched_bytes)
    finally:
        is_full.set()  # after an error or Ctrl-C, do not start another block
        threads.shutdown(wait=False, cancel_futures=True)
    return fetched_bytes, damaged


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _shards_of(text: str | None, num_shards: int) -> range:
    """Read the option --shards. Raises ValueError."""
    if text is None:
        return range(num_shards)

    match = re.fullmatch(r"(?P<first>\d+)(?:-(?P<last>\d+))?", text)
    first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (0, -1)
    if not first <= last < num_shards:
        raise ValueError(
            f"--shards {text}: expected a shard number or a range, such as 0-{num_shards - 1} for"
            f" all {num_shards} shards"
        )
    return range(first, last + 1)


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser("python -m vit.data.warm", __doc__)
    parser.add_argument(
        "root",
        nargs="*",
        help=(
            "folder or URL of the data set; with --config, settings such as"
            " loader.cache_dir=/local/cache"
        ),
    )
    parser.add_argument(
        "--config",
        help="config of the run whose data to fetch: its root, splits, cache and patience are used",
    )
    parser.add_argument(
        "--split",
        action="append",
        help="train, val, ...; may be repeated; by default train and val",
    )

    parser.add_argument("--cache-dir", help="as loader.cache_dir")
    parser.add_argument("--cache-gib", type=float, help="as loader.cache_gib")
    parser.add_argument(
        "--shards", help="fetch only these shards, such as 0-99: for a job array, or several hosts"
    )
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    guard_console()
    try:
        return _warm_all(_options(arguments))
    except KeyboardInterrupt:
        print(
            "stopped: fetched blocks remain in the cache, and the same command continues",
            file=sys.stderr,
        )
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _warm_all(options: Namespace) -> int:
    """Fetch all splits that the options name, and return the exit status."""
    eval_places: list[tuple[str, str]] = []
    if options.config is not None:
        config = load_config(options.config, options.root)
        data, loader = config.data, config.loader
        eval_places = config.eval.further_places(data.root, data.val_split)
    elif len(options.root) == 1:
        data, loader = DataConfig(root=options.root[0]), LoaderConfig()
    else:
        raise ValueError(
            "expected one data set: a folder, a URL, or --config FILE (python -m"
            " vit.data.warm --help)"
        )

    if options.split:
        places = [(data.root, split) for split in options.split]
    else:
        places = [
            (source.root or data.root, source.split or data.train_split)
            for source in data.sources or (SourceConfig(),)
        ]
        places += [(data.root, data.val_split), *eval_places]

    status = 0
    for root, split in dict.fromkeys((root, parse_name(name).split) for root, name in places):
        tars = open_split(
            resolve(root),
            split,
            cache_dir=options.cache_dir or loader.cache_dir,
            cache_gib=loader.cache_gib if options.cache_gib is None else options.cache_gib,
            retry=RetryPolicy(loader.patience_s),
        ).tars
        if not isinstance(tars, CachedTars):
            raise ValueError(
                f"{shown(root)} is a folder and is read in place: set --cache-dir to copy its"
                " blocks to a cache"
            )

        report, is_sound = warm(tars, split, _shards_of(options.shards, len(tars.filenames)))
        if is_sound:
            print(report, flush=True)
        else:
            print(f"error: {report}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    exit_status = main()
    sys.stdout.flush()
    os._exit(exit_status)  # threads may still be waiting for a slow store
