"""Write one shard in a worker process: a tar with its index and sidecar.

The shard's samples are looked up in the catalog. Each image is read from the source, checked and,
if needed, converted. Images and tar headers are written to disk a few MiB at a time while a thread
hashes the bytes. The sidecar lists unreadable images. `.idx` and the sidecar are written last, and
the sidecar marks the shard as complete.
"""

import errno
import hashlib
import itertools
import json
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import PrepError
from data_prep.write.catalog import Catalog
from data_prep.write.images import EXIF_ORIENTED, ImagePolicy, Prepared, prepare
from data_prep.write.jobs import count_one
from data_prep.write.output import Output
from data_prep.write.samples import Sample, descriptor
from vit.data.shards import info_file
from vit.data.shards.tar import Member, ScannedSample, crc32c, index_rows, scan_tar, write_idx
from vit.data.shards.tar_walk import TAR_BLOCK
from vit.system.files import replacing

BUFFER_BYTES = 2 << 20
"""The number of bytes per write, which fit in a core's cache."""
EARLY_BYTES = 8 << 20
"""The interval in bytes at which the kernel starts writing to disk, so that little remains at the
end."""
READ_AHEAD = 16
"""The number of images that the kernel reads ahead from an archive. Parallel reads are much faster
than sequential ones."""
HAS_ADVICE = hasattr(os, "posix_fadvise")
"""Whether the system has `posix_fadvise`, which macOS lacks."""
FILE_ERRORS = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
"""The error codes for problems with a single file, such as a dangling link. Other codes mean that
the disk has a problem."""


class ShardWork(NamedTuple):
    """A shard to write, which consists of every n-th sample of its split in catalog order."""

    name: str
    """The file name without .tar."""
    split: str
    places: range
    catalog: Catalog
    read: Callable[[Sample], bytes]
    policy: ImagePolicy
    with_json: bool
    output: Output
    plan: str
    """The fingerprint of everything that affects the bytes."""

    def samples(self) -> list[Sample]:
        """Return the shard's samples in tar order."""
        return self.catalog.table(self.split).samples(self.places)


# ---- the tar -------------------------------------------------------------------------------------

HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s247x")
"""The ustar fields: name, mode, user, group, size, time, checksum, kind, link, magic, version,
rest."""


def _header(name: bytes, size: bytes, checksum: bytes) -> bytes:
    """Return a member's header. Headers from `tarfile` depend on the Python version."""
    return HEADER.pack(
        name,
        b"0000644",
        b"0000000",
        b"0000000",
        size,
        b"0" * 11,
        checksum,
        b"0",
        b"",
        b"ustar",
        b"00",
    )


CHECKSUM_OF_REST = sum(_header(b"", b"", b" " * 8))
"""The checksum of all fields except name and size, with spaces in the checksum field."""


class TarStream:
    """A writer that appends tar members to a file descriptor, and hashes the written bytes.

    Bytes are copied into two reused buffers: one is filled while the other is hashed. Reusing
    buffers is faster than collecting images in a list, because no new memory is mapped.
    """

    def __init__(self, descriptor: int, pool: ThreadPoolExecutor):
        """Create the buffers. pool: an executor with one thread, which computes hashes."""
        self.size = self._filled = self._bytes_advised = 0
        self._descriptor = descriptor
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._other = memoryview(bytearray(BUFFER_BYTES))
        self._sha256 = hashlib.sha256()
        self._pool = pool
        self._hashed = self._pool.submit(self._sha256.update, b"")

    def add(self, name: str, data: bytes) -> Member:
        """Append a ustar member with a name of at most 100 bytes."""
        encoded = name.encode()
        size = b"%011o" % len(data)
        checksum = CHECKSUM_OF_REST + sum(encoded) + sum(size)
        self._append(_header(encoded, size, b"%06o\0 " % checksum))

        offset = self.size
        self._append(data)
        self._append(bytes(-len(data) % TAR_BLOCK))
        return Member(name.partition(".")[2], offset, len(data), name)

    def close(self) -> str:
        """Append the end-of-archive marker, and return the sha256 of the tar in hex."""
        self._append(bytes(2 * TAR_BLOCK))
        self._flush()
        self._hashed.result()
        return self._sha256.hexdigest()

    def _append(self, data: bytes) -> None:
        """Copy data to the buffer, and flush the buffer each time it is full."""
        self.size += len(data)
        while len(data) >= (room := BUFFER_BYTES - self._filled):
            self._buffer[self._filled :] = data[:room]
            self._filled = BUFFER_BYTES
            data = data[room:]
            self._flush()

        end = self._filled + len(data)
        self._buffer[self._filled : end] = data
        self._filled = end

    def _flush(self) -> None:
        """Write the filled buffer while a thread hashes it, and continue with the other buffer.

        The previous call let the thread hash the other buffer. The other buffer is free when the
        thread has finished.
        """
        hashed = self._pool.submit(self._sha256.update, self._buffer[: self._filled])
        rest = self._buffer[: self._filled]
        while rest:  # Signals and nearly full disks cause partial writes.
            rest = rest[os.write(self._descriptor, rest) :]

        # Start writeback early, because Linux can drop these pages only after writing them.
        if HAS_ADVICE and self.size - self._bytes_advised >= EARLY_BYTES:
            with suppress(OSError):  # This call is only advice, and some file systems reject it.
                os.posix_fadvise(
                    self._descriptor,
                    self._bytes_advised,
                    self.size - self._bytes_advised,
                    os.POSIX_FADV_DONTNEED,
                )
            self._bytes_advised = self.size

        self._hashed.result()  # Wait until the other buffer is free.
        self._hashed = hashed
        self._buffer, self._other = self._other, self._buffer
        self._filled = 0


def write_shard(work: ShardWork) -> dict[str, Any]:
    """Write and publish one shard, and return its sidecar."""
    with work.output.staging() as folder:
        tar = folder / f"{work.name}.tar"
        with replacing(tar) as file, ThreadPoolExecutor(1) as pool:
            stream = TarStream(file.fileno(), pool)
            scanned, about_images = _write_samples(work, stream)
            sha256 = stream.close()

        write_idx(tar, scanned)
        with replacing(tar.with_suffix(ROWS)) as file:
            np.save(file, index_rows(scanned))
        sidecar = info_file.write_sidecar(
            tar, len(scanned), sha256=sha256, plan=work.plan, **about_images
        )

        # Publish the sidecar last, because it marks the shard as complete.
        for extension in (".tar", ".idx", ROWS, ".json"):
            work.output.publish(tar.with_suffix(extension))

    return sidecar


def _write_samples(
    work: ShardWork, stream: TarStream
) -> tuple[list[ScannedSample], dict[str, Any]]:
    """Write all readable samples, and return their descriptions.

    Also returns the sidecar's entries about images that are changed, unreadable or not upright.
    Raises PrepError if no image is readable.
    """
    scanned: list[ScannedSample] = []
    quarantined: list[dict[str, Any]] = []
    changed: Counter[str] = Counter()
    num_oriented = 0

    samples = work.samples()
    for sample, later in itertools.zip_longest(samples, samples[READ_AHEAD:]):
        if later is not None:
            _announce(later)

        prepared = _prepare(work, sample)
        if isinstance(prepared, dict):
            quarantined.append(prepared)
            count_one()
            continue

        scanned.append(_add(stream, work, sample, prepared))
        if prepared.change:
            changed[prepared.change] += 1
        num_oriented += prepared.exif_oriented
        count_one(len(prepared.data))

    if not scanned:
        first = quarantined[0]
        raise PrepError(
            f"{work.name}: none of its {len(quarantined)} images can be read (the first error:"
            f" {first['name']}: {first['reason']}); repair them, or write fewer shards"
        )

    return scanned, {
        "changed": dict(sorted(changed.items())),
        "quarantined": quarantined,
        **({EXIF_ORIENTED: num_oriented} if num_oriented else {}),
    }


def _announce(sample: Sample) -> None:
    """Tell the kernel to read a sample in advance. Errors are ignored, because the later read
    reports them."""
    if HAS_ADVICE:
        with suppress(OSError):  # The file may be a folder.
            os.posix_fadvise(
                descriptor(sample.file), sample.offset, sample.size, os.POSIX_FADV_WILLNEED
            )


def _prepare(work: ShardWork, sample: Sample) -> Prepared | dict[str, Any]:
    """Return the image for the shard, or an entry for `quarantine.jsonl`.

    Raises OSError if the system cannot read an archive or a disk. The error may be temporary, and
    the image may be intact.
    """
    data = None
    try:
        data = work.read(sample)
        return prepare(data, work.policy)
    except OSError as error:
        if error.errno not in FILE_ERRORS or not Path(sample.file).is_dir():
            raise
        reason = str(error)
    except ValueError as error:  # includes Unreadable
        reason = str(error)

    return {
        "split": work.split,
        "key": sample.key,
        "label": sample.label,
        "name": sample.name,
        "reason": reason,
        "file": Path(sample.file).name,
        "offset": sample.offset,
        "size": sample.size,
        "sha256": None if data is None else hashlib.sha256(data).hexdigest(),
    }


def _add(stream: TarStream, work: ShardWork, sample: Sample, prepared: Prepared) -> ScannedSample:
    """Append a sample's members (image, label, JSON) to the tar, and return its description."""
    image = stream.add(f"{sample.key}.jpg", prepared.data)
    members = [image]
    described: dict[str, Any] = {"name": sample.name}
    if sample.label >= 0:
        members.append(stream.add(f"{sample.key}.cls", b"%d" % sample.label))
        described["label"] = sample.label
        described["class"] = work.catalog.class_names[sample.label]

    if work.with_json:
        text = json.dumps(described, ensure_ascii=False).encode("utf-8", "backslashreplace")
        members.append(stream.add(f"{sample.key}.json", text))

    return ScannedSample(
        sample.key,
        sample.label,
        prepared.width,
        prepared.height,
        image,
        tuple(members),
        crc32c(prepared.data),
    )


def quarantine_holds(work: ShardWork, sidecar: dict[str, Any]) -> bool:
    """Return whether the shard's unreadable images are unchanged, that is, not repaired."""
    if not sidecar.get("quarantined"):
        return True

    samples = {sample.key: sample for sample in work.samples()}
    for entry in sidecar["quarantined"]:
        try:
            sha256 = hashlib.sha256(work.read(samples[entry["key"]])).hexdigest()
        except (OSError, ValueError):
            sha256 = None
        if sha256 != entry["sha256"]:
            return False
    return True


# ---- index rows, stored next to the shard until the index is written -----------------------------

ROWS = ".rows.npy"
"""The suffix of files that contain index rows."""


_parsing = threading.Lock()
"""A lock for np.load. Before Python 3.11.5, its header parser can raise SystemError in parallel
threads (python/cpython#106905)."""


def load_rows(work: ShardWork) -> np.ndarray:
    """Return the index rows of a complete shard, read from its row file or its tar.

    This function is thread-safe, so that requests to an object store can run in parallel.
    """
    with work.output.staging() as folder:
        try:
            rows_file = work.output.fetch(f"{work.name}{ROWS}", folder)
            with _parsing:
                return np.load(rows_file)
        except (PrepError, FileNotFoundError):  # A complete data set contains no row files.
            return index_rows(scan_tar(work.output.fetch(f"{work.name}.tar", folder)))
