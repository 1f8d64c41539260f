"""The index of a split: one row per sample, saved, opened, compared with its shards or rebuilt.

Rows are in (shard, position) order, so a shard's rows are a slice, and the number of each shard's
first sample is enough to find the shard of a sample. Opening maps the file into memory and compares
its header with ours character by character, because numpy would parse a damaged one as Python.
Checks of all rows go shard by shard, so that an index of a billion samples needs no memory of its
own.

Each row has the CRC-32C of the encoded image, which reading compares; 0 means unknown, for rows
made without reading the images. Indexes of earlier versions have the shard's number in its place
(`UNCHECKED_DTYPE`) and are read as they are.
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
"""Rows of indexes written before images had checksums."""
NUM_READERS = 8
"""Shards read at the same time when an index is rebuilt: network file systems serve several files
faster than one."""
REPORT_EACH_S = 10.0
log = logging.getLogger(__name__)


def first_samples(lengths: Iterable[int]) -> list[int]:
    """Return the first sample of each shard, then the number of samples."""
    return list(itertools.accumulate(lengths, initial=0))


def save_index(path: Path, rows_by_shard: Iterable[np.ndarray]) -> None:
    """Write an index file from the `index_rows` of each shard in order, one at a time."""
    with replacing(path) as file:
        _write_header(file, 0)
        num_samples = 0
        for rows in rows_by_shard:
            file.write(rows.tobytes())
            num_samples += len(rows)
        file.seek(0)
        _write_header(file, num_samples)


def _write_header(file: BinaryIO, num_samples: int) -> None:
    """Write the header of a .npy file; numpy pads it, so its length is the same for any number."""
    header = {
        "descr": np.lib.format.dtype_to_descr(INDEX_DTYPE),
        "fortran_order": False,
        "shape": (num_samples,),
    }
    np.lib.format.write_array_header_1_0(file, header)


def open_index(path: Path) -> np.ndarray:
    """Memory-map an index file: (num_samples,) INDEX_DTYPE or UNCHECKED_DTYPE.

    Raises OSError, and ValueError with the reason if the file is damaged or of another format.
    """
    with open(path, "rb") as file:
        start = file.read(10)
        header = file.read(int.from_bytes(start[8:], "little"))
    if start[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("not an index, or its beginning is damaged")
    text = header.decode("latin-1")
    number = re.search(r"'shape': \((\d{1,15}),\), } *\n$", text)
    fields = text[: number.start()] if number else ""
    for dtype in (INDEX_DTYPE, UNCHECKED_DTYPE):
        if number and fields == f"{{'descr': {dtype.descr}, 'fortran_order': False, ":
            break
    else:
        raise ValueError("of another format, or its header is damaged")
    num_samples = int(number[1])
    offset = len(start) + len(header)
    if not num_samples or os.stat(path).st_size < offset + num_samples * dtype.itemsize:
        raise ValueError(f"cut off, its header says {num_samples:,} rows")
    return np.memmap(path, dtype, "r", offset, (num_samples,))


def has_checksums(index: np.ndarray) -> bool:
    """Return whether the rows have a field for checksums."""
    return index.dtype == INDEX_DTYPE


def index_mismatch(index: np.ndarray, lengths: Sequence[int], sizes: Sequence[int]) -> str:
    """Return why an index does not match its shards, "" if its rows show no reason.

    lengths: samples of each shard. sizes: bytes of each shard.
    """
    if len(index) != sum(lengths):
        return "stale (other shard lengths than _info.json)"
    for rows, size in zip(_by_shard(index, lengths), sizes, strict=True):
        if not len(rows):
            continue
        starts = rows["offset"]
        if (starts[1:] <= starts[:-1]).any():
            return "stale (other shard lengths than _info.json)"
        # The second comparison is for sums that overflow 64 bits.
        if int((starts + rows["size"]).max()) > size or int(starts[-1]) > size:
            return "stale (images beyond the end of their shard)"
    return ""


def replaced_shards(index: np.ndarray, lengths: Sequence[int], tars: Sequence[Path]) -> list[int]:
    """Return the shards that were replaced by others of equal length.

    Costs one read per shard: the tar header before its last image, which must have its size.
    """
    found = []
    for shard, rows in enumerate(_by_shard(index, lengths)):
        if len(rows) and _size_in_header(tars[shard], int(rows[-1]["offset"])) != rows[-1]["size"]:
            found.append(shard)
    return found


def labels_outside(
    index: np.ndarray, num_classes: int | None, lengths: Sequence[int]
) -> tuple[int, int, int]:
    """Find labels outside [0, num_classes).

    Returns how many there are, the first sample with one (-1: none) and the largest label.
    """
    count = 0
    first = -1
    largest = 0
    start = 0
    for rows in _by_shard(index, lengths):
        if len(rows):
            labels = rows["label"]
            high = int(labels.max())
            largest = max(largest, high)
            if int(labels.min()) < 0 or (num_classes is not None and high >= num_classes):
                wrong = np.flatnonzero((labels < 0) | (labels >= (num_classes or high + 1)))
                first = start + int(wrong[0]) if first < 0 else first
                count += len(wrong)
        start += len(rows)
    return count, first, largest


def index_sha256(index: np.ndarray, lengths: Sequence[int]) -> str:
    """Hash which samples are where, whether or not the index has checksums."""
    digest = hashlib.sha256()
    for shard, rows in enumerate(_by_shard(index, lengths)):
        plain = np.array(rows).view(UNCHECKED_DTYPE)
        plain["shard"] = shard
        digest.update(plain.view(np.uint8).data)
    return digest.hexdigest()


def _by_shard(index: np.ndarray, lengths: Sequence[int]) -> Iterator[np.ndarray]:
    return (index[start:stop] for start, stop in itertools.pairwise(first_samples(lengths)))


def _size_in_header(tar: Path, offset: int) -> int:
    """Return the size in the tar header before `offset`, -1 if there is no header."""
    try:
        with open(tar, "rb") as file:
            file.seek(max(0, offset - TAR_BLOCK))
            return member_size(file.read(TAR_BLOCK))
    except OSError as error:
        raise unreadable(tar, error) from error


# ---- rebuilt from the tars -----------------------------------------------------------------------


def rows_of_tars(
    tars: Sequence[Path],
    layout: SampleLayout,
    sha256: Sequence[str | None],
    with_checksums: bool = True,
) -> list[np.ndarray]:
    """Return the index rows of each tar.

    sha256: recorded for each tar, None if unknown. with_checksums: read all images for their
    checksums, and compare each tar with its sha256; otherwise read headers only.
    Raises ShardError like `scan_tar`, and for tars that are not the recorded ones.
    """

    def read_rows(tar: Path, expected: str | None) -> tuple[np.ndarray, str]:
        rows = index_rows(scan_tar(tar, layout, left_out(tar), with_checksums))
        is_altered = with_checksums and expected not in (None, sha256_of(tar))
        return rows, describe_altered(tar) if is_altered else ""

    began_s = reported_s = time.monotonic()
    found = []
    problems = []
    done_bytes = 0
    all_bytes = sum(tar.stat().st_size for tar in tars if tar.exists())
    threads = ThreadPoolExecutor(NUM_READERS)
    try:
        for tar, (rows, problem) in zip(tars, threads.map(read_rows, tars, sha256), strict=True):
            found.append(rows)
            if problem:
                problems.append(problem)
            done_bytes += tar.stat().st_size
            now_s = time.monotonic()
            if now_s - reported_s > REPORT_EACH_S:
                reported_s = now_s
                log.warning(
                    "%s: %d of %d shards (%.1f of %.1f GB), %.0f s more",
                    tar.parent,
                    len(found),
                    len(tars),
                    done_bytes / 1e9,
                    all_bytes / 1e9,
                    (all_bytes - done_bytes) * (now_s - began_s) / done_bytes,
                )
    finally:
        # After an error or a signal, do not wait for shards that are being read.
        threads.shutdown(wait=False, cancel_futures=True)
    if problems:
        raise ShardError("\n".join(problems))
    return found


def left_out(tar: Path) -> set[int]:
    """Return where the samples begin that `data_prep.index` left out, according to the sidecar.

    Without them the shard has the length in `_info.json`.
    """
    path = tar.with_suffix(".json")
    sidecar = read_json(path) or {}
    if not is_sidecar(sidecar):  # a file of another program
        return set()
    check_types(sidecar, SIDECAR, path)
    entries = sidecar.get("quarantined", [])
    return {entry["tar_offset"] for entry in entries if "tar_offset" in entry}


def describe_altered(tar: Path) -> str:
    """Return the message for a tar that is not the recorded one."""
    return (
        f"{tar}: replaced by a file with other content, its sha256 is not the one in _info.json;"
        " copy it again; if that is meant, move _info.json away and run `python -m data_prep.index"
        f" {tar.parent}`"
    )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
