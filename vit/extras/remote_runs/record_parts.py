"""The record at a URL: parts that are never changed, each with the lines since the one before.

    record/part_000000000000.jsonl    the first lines
    record/part_000000018231.jsonl    the lines from byte 18,231 of metrics.jsonl on
    `cat record/part_*` is metrics.jsonl

Stores replace objects and cannot append to them. A file that is written again at every save costs
more each time; a tail that is replaced would be lost lines if its upload is cut short by a kill
where a store is not atomic. Parts are joined where there are many, under the name of the first,
whose content begins as before: readers pass over the others until they are removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vit.data.shards.stores import Version
from vit.data.storage.object_store import ObjectStore
from vit.run_folder import METRICS_FILE

RECORD_FOLDER = "record"
JOIN_FROM = 64
"""Parts that the next job joins: each is a request."""
NUM_THREADS = 8


def part_name(start: int) -> str:
    """Return the name of the part that begins at byte `start` of the record."""
    return f"{RECORD_FOLDER}/part_{start:012d}.jsonl"


def parts_in(listing: Mapping[str, Version]) -> list[tuple[int, int, str]]:
    """Return (start, stop, name) of the parts that make up the record, in order.

    Bytes that only follow a gap are no part of it, nor are parts that others contain.
    """
    found = []
    for name, version in listing.items():
        if match := re.fullmatch(RECORD_FOLDER + r"/part_(\d+)\.jsonl", name):
            found.append((int(match[1]), int(match[1]) + version.size, name))
    used = []
    end = 0
    for start, stop, name in sorted(found):
        if start == end and stop > end:
            used.append((start, stop, name))
            end = stop
    return used


def read_record(store: ObjectStore, listing: Mapping[str, Version]) -> bytes:
    """Return the record as far as it is at `store`, b"" for none.

    A run that somebody has copied there from a folder has it as `metrics.jsonl`.
    """
    parts = parts_in(listing) or [
        (0, listing[name].size, name) for name in (METRICS_FILE,) if name in listing
    ]

    def read(part: tuple[int, int, str]) -> bytes:
        start, stop, name = part
        return store.read_all(name)[: stop - start]  # the next job may be joining parts just now

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        content = b"".join(pool.map(read, parts))
    return content[: content.rfind(b"\n") + 1]


def join_parts(store: ObjectStore, listing: Mapping[str, Version], content: bytes) -> None:
    """Make one part of many. content: what `read_record` gave."""
    names = [name for name in listing if name.startswith(f"{RECORD_FOLDER}/")]
    if len(names) < JOIN_FROM:
        return
    store.write(part_name(0), content)
    for name in names:
        if name != part_name(0):
            store.remove(name)


def new_lines(path: Path, start: int) -> bytes:
    """Return the complete lines of the record at `path` from byte `start` on."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    return content[: content.rfind(b"\n") + 1]
