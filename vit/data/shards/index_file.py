"""The index of a split: one row for each sample, saved, opened, compared with its shards and made
of them. Free of torch.

The data's story: rows lie one behind the other in the order of (shard, position), so a shard's rows
are a slice, and the first sample of each shard tells which shard a sample is in. Opening maps the
file and compares its header with the one that we write, character by character: numpy would parse a
damaged one as Python. What is looked at in all rows is looked at shard by shard, so that an index
of a thousand million samples costs no memory of its own.

Each row holds the CRC-32C of the encoded image, which reading compares. 0 means that it is not
known: that the rows were made without reading the images. Indexes of earlier versions have the
shard's number in its place (`UNCHECKED_DTYPE`) and are read as they are.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vit.data.shards.members import SampleLayout
from vit.data.shards.records import SIDECAR, check_types, is_sidecar
from vit.data.shards.tar import INDEX_DTYPE, index_rows, member_size, scan_tar
from vit.data.shards.tar_walk import TAR_BLOCK
from vit.system.files import ShardError, read_json, replacing, unreadable

UNCHECKED_DTYPE = np.dtype(
    [
        ("shard", "<u4"),
        *[(name, INDEX_DTYPE[name]) for name in ("size", "offset", "label", "width", "height")],
    ]
)
"""Of indexes written before images had checksums."""
NUM_READERS = 8
"""Shards that are read at once where an index is made anew: a network file system answers several
faster than one."""
TELL_EACH_S = 10.0
log = logging.getLogger(__name__)


def first_samples(lengths: Iterable[int]) -> list[int]:
    """Of each shard the number of its first sample, and the number of all, from how many samples
    each shard has."""
    return list(itertools.accumulate(lengths, initial=0))


def save_index(path: Path, rows_by_shard: Iterable[np.ndarray]) -> None:
    """Write an index file from the `index_rows` of each shard, in order, one shard in memory at a
    time."""
    with replacing(path) as file:
        _write_header(file, 0)
        num_samples = 0
        for rows in rows_by_shard:
            file.write(rows.tobytes())
            num_samples += len(rows)
        file.seek(0)
        _write_header(file, num_samples)


def _write_header(file: BinaryIO, num_samples: int) -> None:
    """The header of a .npy file; its length does not depend on the number, for which numpy leaves
    room."""
    described = {
        "descr": np.lib.format.dtype_to_descr(INDEX_DTYPE),
        "fortran_order": False,
        "shape": (num_samples,),
    }
    np.lib.format.write_array_header_1_0(file, described)


def open_index(path: Path) -> np.ndarray:
    """The rows in an index file, mapped: (num_samples,) of INDEX_DTYPE or UNCHECKED_DTYPE.

    Raises ValueError, in words, if it is damaged or of another format; OSError.
    """
    with open(path, "rb") as file:
        start = file.read(10)
        header = file.read(int.from_bytes(start[8:], "little"))
    if start[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("not an index, or its beginning is damaged")
    # else not all of it
    text = header.decode("latin-1").removesuffix("\n").rstrip(" ") if header.endswith(b"\n") else ""
    number = re.search(r"'shape': \((\d{1,15}),\), }$", text)
    for dtype in (INDEX_DTYPE, UNCHECKED_DTYPE):
        if (
            number
            and text
            == f"{{'descr': {dtype.descr}, 'fortran_order': False, 'shape': ({number[1]},), }}"
        ):
            break
    else:
        raise ValueError("of another format, or its header is damaged")
    num_samples = int(number[1])
    offset = len(start) + len(header)
    if not num_samples or os.stat(path).st_size < offset + num_samples * dtype.itemsize:
        raise ValueError(f"cut off, its header says {num_samples:,} rows")
    return np.memmap(path, dtype, "r", offset, (num_samples,))


def has_checksums(index: np.ndarray) -> bool:
    """Whether the rows have a place for checksums."""
    return index.dtype == INDEX_DTYPE


def index_mismatch(index: np.ndarray, lengths: Sequence[int], sizes: Sequence[int]) -> str:
    """Why an index does not fit shards of these lengths, and sizes in bytes, as far as its rows
    tell; "" if it does."""
    if len(index) != sum(lengths):
        return "stale (other shard lengths than _info.json)"
    for rows, size in zip(_by_shard(index, lengths), sizes, strict=True):
        if not len(rows):
            continue
        starts = rows["offset"]
        if (starts[1:] <= starts[:-1]).any():
            return "stale (other shard lengths than _info.json)"
        # the second: of a sum that is too large for 64 bits
        if int((starts + rows["size"]).max()) > size or int(starts[-1]) > size:
            return "stale (images beyond the end of their shard)"
    return ""


def replaced_shards(index: np.ndarray, lengths: Sequence[int], tars: Sequence[Path]) -> list[int]:
    """Shards that were replaced by others of equal length: the header in front of the last image
    tells, at a read for each."""
    ends = first_samples(lengths)[1:]
    return [
        shard
        for shard, end in enumerate(ends)
        if lengths[shard] and _size_in_header(tars[shard], index[end - 1]) != index["size"][end - 1]
    ]


def labels_outside(
    index: np.ndarray, num_classes: int | None, lengths: Sequence[int]
) -> tuple[int, int, int]:
    """How many labels lie outside [0, num_classes), the first sample that has one (-1: none) and
    the largest label."""
    count = 0
    first = -1
    largest = 0
    start = 0
    for rows in _by_shard(index, lengths):
        labels = rows["label"]
        low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        largest = max(largest, high)
        if low < 0 or (num_classes is not None and high >= num_classes):
            wrong = np.flatnonzero((labels < 0) | (labels >= (num_classes or high + 1)))
            first = start + int(wrong[0]) if first < 0 else first
            count += len(wrong)
        start += len(rows)
    return count, first, largest


def index_sha256(index: np.ndarray, lengths: Sequence[int]) -> str:
    """sha256 of which samples lie where, in hex: of the rows with their shard's number where a
    checksum may be or not."""
    digest = hashlib.sha256()
    for shard, rows in enumerate(_by_shard(index, lengths)):
        plain = np.array(rows).view(UNCHECKED_DTYPE)
        plain["shard"] = shard
        digest.update(plain.view(np.uint8).data)
    return digest.hexdigest()


def _by_shard(index: np.ndarray, lengths: Sequence[int]) -> Iterator[np.ndarray]:
    firsts = first_samples(lengths)
    return (index[start:stop] for start, stop in itertools.pairwise(firsts))


def _size_in_header(tar: Path, row: np.void) -> int:
    """Size in bytes of an index row's image as the tar header in front of it says, -1 if there is
    no header."""
    try:
        with open(tar, "rb") as file:
            file.seek(max(0, int(row["offset"]) - TAR_BLOCK))
            return member_size(file.read(TAR_BLOCK))
    except OSError as error:
        raise unreadable(tar, error) from error


# ---- made of the tars ----------------------------------------------------------------------------


def rows_of_tars(
    tars: Sequence[Path],
    layout: SampleLayout,
    sha256: Sequence[str | None],
    with_checksums: bool = True,
) -> list[np.ndarray]:
    """The index rows of each tar. For their checksums all images are read, and a tar is then
    compared with its recorded sha256.

    Without them headers are read only. Raises ShardError as `scan_tar`, and for tars that are not
    the recorded ones.
    """

    def rows_of(tar: Path, expected: str | None) -> tuple[np.ndarray, str]:
        rows = index_rows(scan_tar(tar, layout, left_out(tar), with_checksums))
        return rows, (
            describe_altered(tar)
            if with_checksums and expected not in (None, sha256_of(tar))
            else ""
        )

    began_s = told_s = time.monotonic()
    found = []
    problems = []
    done_bytes = 0
    all_bytes = sum(tar.stat().st_size for tar in tars if tar.exists())
    threads = ThreadPoolExecutor(NUM_READERS)
    try:
        for tar, (rows, problem) in zip(tars, threads.map(rows_of, tars, sha256), strict=True):
            found.append(rows)
            problems += [problem] if problem else []
            done_bytes += tar.stat().st_size
            now_s = time.monotonic()
            if now_s - told_s > TELL_EACH_S:
                told_s = now_s
                rate = done_bytes / (now_s - began_s)
                left_s = (all_bytes - done_bytes) / rate
                read = f"{done_bytes / 1e9:,.1f} of {all_bytes / 1e9:,.1f} GB"
                log.warning(
                    "%s: %d of %d shards (%s), %.0f s more",
                    tar.parent,
                    len(found),
                    len(tars),
                    read,
                    left_s,
                )
    finally:
        # an error or a signal does not wait for shards that are being read
        threads.shutdown(wait=False, cancel_futures=True)
    if problems:
        raise ShardError("\n".join(problems))
    return found


def left_out(tar: Path) -> set[int]:
    """Where samples of a shard begin that `data_prep.index` left out, as its sidecar says: without
    them lengths fit `_info.json`."""
    path = tar.with_suffix(".json")
    sidecar = read_json(path) or {}
    if not is_sidecar(sidecar):  # whatever lies there is none of ours
        return set()
    check_types(sidecar, SIDECAR, path)
    return {
        entry["tar_offset"] for entry in sidecar.get("quarantined", []) if "tar_offset" in entry
    }


def describe_altered(tar: Path) -> str:
    """What to tell of a tar that is not the recorded one."""
    return (
        f"{tar}: replaced by a file with other content, its sha256 is not the one in _info.json;"
        " copy it again; if that is meant, move _info.json away and run `python -m data_prep.index"
        f" {tar.parent}`"
    )


def sha256_of(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
