"""Store metrics.jsonl at a URL in immutable parts, each with the lines since the previous part.

    record/part_000000000000.jsonl    the first lines
    record/part_000000018231.jsonl    the lines of metrics.jsonl from byte 18,231
    `cat record/part_*` is metrics.jsonl

Object stores can replace objects but cannot append to them. Uploading the whole file at every save
would take longer each time. Replacing only the last part could lose lines if the process is killed
during the upload to a store that is not atomic. When many parts exist, they are joined into the
first part. The joined part begins with the old content, so readers skip the other parts until they
are removed.
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
"""The number of parts from which the next job joins all parts, because each part costs a
request."""
NUM_THREADS = 8


def part_name(start: int) -> str:
    """Return the name of the part that begins at byte `start` of metrics.jsonl."""
    return f"{RECORD_FOLDER}/part_{start:012d}.jsonl"


def parts_in(listing: Mapping[str, Version]) -> list[tuple[int, int, str]]:
    """Return (start, stop, name) of the parts of metrics.jsonl, in order.

    Parts after a gap are skipped, and so are parts that another part contains.
    """
    parts = []
    for name, version in listing.items():
        if match := re.fullmatch(RECORD_FOLDER + r"/part_(\d+)\.jsonl", name):
            parts.append((int(match[1]), int(match[1]) + version.size, name))
    used = []
    end = 0
    for start, stop, name in sorted(parts):
        if start == end and stop > end:
            used.append((start, stop, name))
            end = stop
    return used


def read_record(store: ObjectStore, listing: Mapping[str, Version]) -> bytes:
    """Return the content of metrics.jsonl at `store`, or b"" if it does not exist.

    A run that a user copied to the store has a single file `metrics.jsonl`.
    """
    parts = parts_in(listing) or [
        (0, listing[name].size, name) for name in (METRICS_FILE,) if name in listing
    ]

    def read(part: tuple[int, int, str]) -> bytes:
        start, stop, name = part
        # Another job may be joining further parts into this part.
        return store.read_all(name)[: stop - start]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        content = b"".join(pool.map(read, parts))
    return content[: content.rfind(b"\n") + 1]


def join_parts(store: ObjectStore, listing: Mapping[str, Version], content: bytes) -> None:
    """Join all parts into the first part. content: the result of `read_record`."""
    names = [name for name in listing if name.startswith(f"{RECORD_FOLDER}/")]
    if len(names) < JOIN_FROM:
        return
    store.write(part_name(0), content)
    for name in names:
        if name != part_name(0):
            store.remove(name)


def new_lines(path: Path, start: int) -> bytes:
    """Return the complete lines of the file at `path` from byte `start` on."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    return content[: content.rfind(b"\n") + 1]
