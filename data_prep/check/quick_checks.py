"""The quick check of one shard: some samples, fetched through the index as the loader does.

No shard is read completely. Each sample is checked with the tar headers around it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from data_prep.check.shard_checks import (
    UNCLEAR_WHEN_QUICK,
    Checked,
    Found,
    Shard,
    capped,
    compare_rows,
    decode_sample,
    missing_idx,
    read_failure,
)
from data_prep.write.card_data import spread
from data_prep.write.jobs import count_one
from vit.data.shards.members import InvalidSample
from vit.data.shards.tar import Member, ScannedSample, scan_sample
from vit.data.shards.tar_walk import TAR_BLOCK, Read, TarDamaged, pread, walk
from vit.data.storage.remote import RemoteFolder


def check_shard_quickly(shard: Shard) -> Checked:
    """Fetch and decode some samples through the index, and compare `.idx` with the index."""
    rows = shard.rows
    if rows is None:
        return Checked([])
    chosen = spread(len(rows), shard.num_sampled)
    try:
        found = list(_compare_idx(shard, rows))
        if shard.tars_at is None:
            with open(shard.local_tar, "rb") as file:
                end = os.fstat(file.fileno()).st_size
                found += capped(_check_rows(shard, pread(file.fileno()), end, rows, chosen))
        else:
            source = RemoteFolder(shard.tars_at)
            version = source.stat(shard.name)

            def read(size: int, position: int) -> bytes:
                stop = min(position + size, version.size)
                return source.read(shard.name, position, stop, version)

            found += capped(_check_rows(shard, read, version.size, rows, chosen))
    except OSError as error:
        return read_failure(shard, error)
    return Checked(found, num_checked=len(chosen))


def _compare_idx(shard: Shard, rows: np.ndarray) -> Iterator[Found]:
    """`.idx` has each image where the index has it."""
    path = shard.local_tar.with_suffix(".idx")
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        yield missing_idx(shard)
        return
    if lines[0] != b"v1.2 %d" % len(rows) or len(lines) != len(rows) + 1:
        first = lines[0][:40].decode("utf-8", "replace")
        yield Found(
            "indexes",
            path.name,
            f"begins with {first!r} and has {len(lines) - 1:,} lines more, expected"
            f" 'v1.2 {len(rows)}'; {shard.rebuild(path.name)}",
        )
        return
    places = zip(lines[1:], rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    for number, (line, offset, size) in enumerate(places, 2):
        if b" %d %d " % (offset, size) not in line:
            yield Found(
                "indexes",
                path.name,
                f"line {number}: {line[:80].decode('utf-8', 'replace')!r}, the index has the image"
                f" at offset {offset} with {size} bytes;"
                f" {shard.rebuild(path.name, shard.index_name)}",
            )
            return


def _check_rows(
    shard: Shard, read: Read, end: int, rows: np.ndarray, chosen: list[int]
) -> Iterator[Found]:
    """Decode the chosen samples, and compare the headers around their images with their rows."""
    samples = []
    good = []
    for number in chosen:
        offset = int(rows["offset"][number])
        size = int(rows["size"][number])
        try:
            sample = _sample_around(shard, read, end, rows, number)
        except (TarDamaged, InvalidSample) as error:
            yield Found(
                "tars",
                shard.name,
                f"no sample with an image of {size} bytes at offset {offset}, where the index has"
                f" one ({error}); {UNCLEAR_WHEN_QUICK}",
            )
            continue
        data = read(size, offset)
        image = decode_sample(shard, sample, data)
        if isinstance(image, Found):
            yield image
        samples.append(sample)
        good.append(number)
        count_one(len(data))
    if samples:
        yield from compare_rows(shard, rows[good], samples, numbers=good)


def _sample_around(
    shard: Shard, read: Read, end: int, rows: np.ndarray, number: int
) -> ScannedSample:
    """The sample of a row, from the members between the previous image and the next.

    Raises TarDamaged and InvalidSample.
    """
    offset = int(rows["offset"][number])
    start = 0
    if number:
        before = rows[number - 1]
        start = -(-int(before["offset"] + before["size"]) // TAR_BLOCK) * TAR_BLOCK
    stop = int(rows["offset"][number + 1]) if number + 1 < len(rows) else end
    group: list[tuple[str, Member, str]] = []
    for name, begins, size, kind in walk(read, start, end, needs_end=False):
        if begins >= stop:
            break
        if named := shard.layout.cut(name):
            group.append((named[0], Member(named[1], begins, size, name), kind))
    key = next((key for key, member, _ in group if member.offset == offset), None)
    if key is None:
        raise TarDamaged("no header in front of it")
    return scan_sample(read, key, [member for member in group if member[0] == key], shard.layout)
