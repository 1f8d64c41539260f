"""Save, open, check and rebuild the index of a split, which has one row per sample.

Rows are sorted by (shard, position), so the rows of a shard are contiguous. Opening an index
memory-maps the file. All checks work shard by shard, so an index of a billion samples is never
loaded completely.

Each row contains the CRC-32C of the encoded image, which is verified when the image is read. The
CRC is 0 (unknown) if the row was created without reading the image.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vit.data.shards.info_file import SIDECAR, check_types, is_sidecar
from vit.data.shards.members import SampleLayout
from vit.data.shards.tar import INDEX_DTYPE, index_rows, member_size, scan_tar
from vit.data.shards.tar_walk import TAR_BLOCK
from vit.system.files import ShardError, read_json, replacing, sha256_of, unreadable
from vit.system.meter import Meter

NUM_READERS = 8
"""The number of shards to read concurrently when rebuilding an index. Network file systems serve
several files faster than one."""


def first_samples(lengths: Iterable[int]) -> list[int]:
    """Return the first sample number of each shard, followed by the number of samples."""
    return list(itertools.accumulate(lengths, initial=0))


def save_index(path: Path, rows_by_shard: Iterable[np.ndarray]) -> None:
    """Write an index file from the `index_rows` of each shard, in order, one shard at a time."""
    with replacing(path) as file:
        _write_header(file, 0)
        num_samples = 0
        for rows in rows_by_shard:
            file.write(rows.tobytes())
            num_samples += len(rows)
        file.seek(0)
        _write_header(file, num_samples)


def _write_header(file: BinaryIO, num_samples: int) -> None:
    """Write the header of a .npy file. Due to padding, its length does not depend on
    `num_samples`."""
    header = {
        "descr": np.lib.format.dtype_to_descr(INDEX_DTYPE),
        "fortran_order": False,
        "shape": (num_samples,),
    }
    np.lib.format.write_array_header_1_0(file, header)


def open_index(path: Path) -> np.ndarray:
    """Memory-map an index file: (num_samples,) INDEX_DTYPE.

    Raises OSError, or ValueError with the reason if the file is damaged or has another format.
    """
    try:
        index = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, so it can raise any exception
        raise ValueError("truncated, or its header is damaged") from error

    is_index = index.dtype == INDEX_DTYPE and index.ndim == 1 and len(index)
    if not is_index or index.offset % np.lib.format.ARRAY_ALIGN:
        raise ValueError("in another format, or its header is damaged")
    return index


def unmapped(index: np.ndarray) -> np.ndarray | Path:
    """Return the index in picklable form, which is its path if it is memory-mapped."""
    return Path(str(index.filename)) if isinstance(index, np.memmap) else index


def index_mismatch(index: np.ndarray, lengths: Sequence[int], sizes: Sequence[int] | None) -> str:
    """Return the reason why an index does not match its shards, or "" if no mismatch is found.

    Args:
        lengths: The number of samples in each shard.
        sizes: The size of each shard in bytes, or None to skip the comparison of sizes.
    """
    if sizes is None:
        return ""
    if len(index) != sum(lengths):
        return "outdated (its shard lengths differ from _info.json)"

    for rows, size in zip(_by_shard(index, lengths), sizes, strict=True):
        starts = rows["offset"]
        if (starts[1:] <= starts[:-1]).any():
            return "outdated (its shard lengths differ from _info.json)"

        # The second comparison catches offsets whose sum with the size overflows 64 bits.
        if (starts + rows["size"] > size).any() or (starts > size).any():
            return "outdated (images beyond the end of their shard)"
    return ""


def replaced_shards(index: np.ndarray, lengths: Sequence[int], tars: Sequence[Path]) -> list[int]:
    """Return the shards that were replaced by tars with the same number of samples.

    The check takes one read per shard: the tar header before its last image must contain that
    image's size.
    """
    return [
        shard
        for shard, rows in enumerate(_by_shard(index, lengths))
        if len(rows) and _size_in_header(tars[shard], int(rows[-1]["offset"])) != rows[-1]["size"]
    ]


def index_sha256(index: np.ndarray, lengths: Sequence[int]) -> str:
    """Return a hash of the positions of all samples, without their checksums."""
    digest = hashlib.sha256()
    for shard, rows in enumerate(_by_shard(index, lengths)):
        positions = np.array(rows)
        positions["crc32c"] = shard
        digest.update(positions.view(np.uint8).data)
    return digest.hexdigest()


def _by_shard(index: np.ndarray, lengths: Sequence[int]) -> Iterator[np.ndarray]:
    return (index[start:stop] for start, stop in itertools.pairwise(first_samples(lengths)))


def _size_in_header(tar: Path, offset: int) -> int:
    try:
        with open(tar, "rb") as file:
            file.seek(max(0, offset - TAR_BLOCK))
            return member_size(file.read(TAR_BLOCK))
    except OSError as error:
        raise unreadable(tar, error) from error


# ---- rebuild from the tars -----------------------------------------------------------------------


def rows_of_tars(
    tars: Sequence[Path],
    layout: SampleLayout,
    lengths: Sequence[int],
    sha256: Sequence[str | None],
    with_checksums: bool,
) -> list[np.ndarray]:
    """Return the index rows of each tar.

    Args:
        lengths: The number of samples that each tar must contain.
        sha256: The recorded hash of each tar, None if unknown.
        with_checksums: Read all images to compute their checksums and verify each sha256; otherwise
            read only headers.

    Raises ShardError in the same cases as `scan_tar`, and for tars that differ from the recorded
    ones.
    """

    def read_rows(tar: Path, length: int, expected: str | None) -> tuple[np.ndarray, str]:
        rows = index_rows(scan_tar(tar, layout, left_out(tar), with_checksums))
        if len(rows) != length:
            return rows, (
                f"{tar}: holds {len(rows)} samples, but _info.json says {length}; restore the"
                " wrong one"
            )
        is_altered = with_checksums and expected not in (None, sha256_of(tar))
        return rows, describe_altered(tar) if is_altered else ""

    results = []
    done_bytes = 0
    all_bytes = sum(tar.stat().st_size for tar in tars if tar.exists())

    threads = ThreadPoolExecutor(NUM_READERS)
    try:
        with Meter(f"reading {tars[0].parent}", all_bytes >> 20, "MiB") as meter:
            rows_by_tar = threads.map(read_rows, tars, lengths, sha256)
            for tar, result in zip(tars, rows_by_tar, strict=True):
                results.append(result)
                done_bytes += tar.stat().st_size
                meter.update(done_bytes >> 20)
    finally:
        # After an error or a signal, do not wait for shards that are still being read.
        threads.shutdown(wait=False, cancel_futures=True)

    problems = [problem for _, problem in results if problem]
    if problems:
        raise ShardError("\n".join(problems))
    return [rows for rows, _ in results]


def left_out(tar: Path) -> set[int]:
    """Return the offsets of the samples that `data_prep.index` skipped, as listed in the sidecar.

    The length recorded in `_info.json` does not include these samples.
    """
    path = tar.with_suffix(".json")
    sidecar = read_json(path) or {}
    if not is_sidecar(sidecar):  # written by another program
        return set()

    check_types(sidecar, SIDECAR, path)
    return {
        entry["tar_offset"] for entry in sidecar.get("quarantined", []) if "tar_offset" in entry
    }


def describe_altered(tar: Path) -> str:
    """Return the error message for a tar whose content differs from its recorded hash."""
    return (
        f"{tar}: replaced by a file with other content (its sha256 differs from _info.json); copy"
        " it again; if the change is intended, move _info.json away and run `python -m"
        f" data_prep.index {tar.parent}`"
    )
