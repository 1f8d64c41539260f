"""Check one shard of a finished data set: bytes, tar, `.idx`, index rows and images.

A worker process receives the name of a shard and its record in `_info.json`. A shard at a URL is
downloaded first. The worker reads the file once to compute its sha256, then reads the headers from
the page cache and decodes every image completely. The worker also compares `.idx` and the index
rows with new ones computed from the tar. The result contains error messages and three numbers per
sample. The main process uses these numbers to compare keys, images and labels across all shards.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np

from data_prep.errors import counted
from data_prep.write.images import ImagePolicy, Prepared, Unreadable, prepare
from data_prep.write.jobs import count_one
from data_prep.write.output import temporary_folder
from data_prep.write.samples import key_hashes, spread
from vit.data.shards.index_file import left_out, open_index
from vit.data.shards.members import InvalidSample, SampleLayout
from vit.data.shards.tar import (
    DEFAULT_LAYOUT,
    Member,
    ScannedSample,
    idx_lines,
    index_rows,
    scan_sample,
    scan_tar,
)
from vit.data.shards.tar_walk import TAR_BLOCK, Read, TarDamaged, pread, walk
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError, sha256_of

SEEN_DTYPE = np.dtype(
    [  # 20 bytes per sample
        # The catalog's hash. One in 3,000 data sets with 100 million samples has a collision.
        ("key", "<u8"),
        ("image", "<u8"),  # first 8 bytes of the encoded image's BLAKE2 hash
        ("label", "<i4"),
    ]
)
WRITE_AGAIN = "copy it again, or delete it and repeat the command that wrote it"
UNCLEAR_WHEN_QUICK = "shard or index is wrong: run without --quick to find out which"
MOST_LINES = 10
"""The maximum number of lines to print per subject and shard. Further lines are only counted."""


class ShardFinding(NamedTuple):
    """A problem or a note that a check reports."""

    subject: str
    """The heading in the report, a key of `verify.SUBJECTS`."""
    place: str
    text: str
    fails: bool = True
    """True for a problem, False for a note, which may be caused by the source data."""
    details: tuple[str, ...] = ()


class CheckedShard(NamedTuple):
    root: Path
    """The folder that contains the index, the `.idx` file and the sidecar."""
    name: str
    shown: str
    """The name used for the data set in messages."""
    tars_at: str | None
    """The URL of the folder with the tars, or None if they are in `root`."""
    index_name: str
    """The name of the split's index file, or "" if the index does not match the shards."""
    first: int
    """The index of the shard's first sample in the split."""
    num_samples: int
    sha256: str | None
    ours: bool
    """True if this package wrote the shard, so that every image is an RGB or gray JPEG."""
    seed: int
    num_sampled: int
    """The number of images to decode in a quick check."""
    layout: SampleLayout = DEFAULT_LAYOUT
    """The layout that names the image and label members of a sample."""

    @property
    def local_tar(self) -> Path:
        """The path of the tar, next to its `.idx`, if the data set is local."""
        return self.root / self.name

    @property
    def rows(self) -> np.ndarray | None:
        """A copy of this shard's rows in the split's index."""
        if not self.index_name:
            return None
        index = open_index(self.root / self.index_name)
        return np.array(index[self.first : self.first + self.num_samples])

    def rebuild(self, *names: str) -> str:
        """Return the command that repairs a wrong index or `.idx` file."""
        return (
            f"delete {' and '.join(names)} and run `python -m data_prep.index"
            f" {quote(self.shown)}` to make new ones from the tars"
        )


class Checked(NamedTuple):
    findings: list[ShardFinding]
    seen: np.ndarray = np.empty(0, SEEN_DTYPE)
    """(num_samples,) SEEN_DTYPE in tar order, or empty if the tar could not be read."""
    num_checked: int = 0
    hashed: bool = False
    """True if the shard's sha256 was compared with a recorded value."""


def read_failure(shard: CheckedShard, error: OSError) -> Checked:
    """Return the result for a shard that could not be read due to `error`."""
    return Checked(
        [
            ShardFinding(
                "files",
                shard.name,
                f"cannot be read ({error.strerror or error}): check the permissions and the disk",
            )
        ]
    )


def capped(findings: Iterable[ShardFinding]) -> Iterator[ShardFinding]:
    """Yield the first findings, then the number of omitted findings, with notes counted
    separately."""
    count: Counter[bool] = Counter()
    for finding in findings:
        count[finding.fails] += 1
        if count[finding.fails] <= MOST_LINES:
            yield finding

    for fails, total in count.items():
        if total > MOST_LINES:
            yield finding._replace(
                text=f"and {total - MOST_LINES:,} more in this shard", fails=fails
            )


# ---- the complete shard --------------------------------------------------------------------------


def check_shard(shard: CheckedShard) -> Checked:
    """Check a shard completely. Runs in a worker process."""
    try:
        with _local(shard) as tar:
            return _check_tar(shard, tar)
    except OSError as error:
        return read_failure(shard, error)


def _check_tar(shard: CheckedShard, tar: Path) -> Checked:
    """Check the bytes of `tar`, its structure, the records about it, and then every image."""
    sha256 = sha256_of(tar)
    hashed = shard.sha256 is not None
    findings = []
    if hashed and shard.sha256 != sha256:
        findings.append(
            ShardFinding(
                "files",
                shard.name,
                f"altered or replaced: its sha256 is {sha256[:12]}..., but"
                f" {str(shard.sha256)[:12]}... is recorded; {WRITE_AGAIN}",
            )
        )

    skipped = set[int]()
    with suppress(ShardError):  # A damaged sidecar is reported by another check.
        skipped = left_out(shard.local_tar)
    try:
        samples = scan_tar(tar, shard.layout, skipped)
    except ShardError as error:
        text = str(error).removeprefix(f"{tar}: ") + "; the images in this shard were not checked"
        return Checked([*findings, ShardFinding("tars", shard.name, text)], hashed=hashed)

    records = [*_check_idx(shard, samples), *_check_index(shard, samples, shard.sha256 == sha256)]
    seen = np.empty(len(samples), SEEN_DTYPE)
    images = _check_images(shard, tar, samples, seen)
    return Checked([*findings, *capped(records), *capped(images)], seen, len(samples), hashed)


@contextmanager
def _local(shard: CheckedShard) -> Iterator[Path]:
    """Yield the path of a local copy of the tar. A copy fetched from a URL is removed
    afterwards."""
    if shard.tars_at is None:
        yield shard.local_tar
    else:
        with temporary_folder() as folder:
            source = RemoteFolder(shard.tars_at)
            source.fetch(shard.name, source.stat(shard.name), folder / shard.name)
            yield folder / shard.name


def _check_idx(
    shard: CheckedShard, samples: list[ScannedSample], numbers: Iterable[int] | None = None
) -> Iterator[ShardFinding]:
    """Compare `.idx` with lines computed from the tar. numbers: the samples to compare, or None for
    all."""
    path = shard.local_tar.with_suffix(".idx")
    if not path.exists():
        yield ShardFinding(
            "indexes",
            path.name,
            f"missing; run `python -m data_prep.index {quote(shard.shown)}` to write it",
        )
        return

    lines = path.read_bytes().splitlines(True)
    count = len(samples) if numbers is None else shard.num_samples
    if len(lines) != count + 1:
        yield ShardFinding(
            "indexes",
            path.name,
            f"{counted(len(lines), 'line')}, expected {count + 1:,}; {shard.rebuild(path.name)}",
        )
        return

    # The first line is a header, with the number of samples.
    places = [0, *(number + 1 for number in numbers or range(len(samples)))]
    expected_lines = [b"v1.2 %d\n" % count, *idx_lines(samples)[1:]]
    for place, expected in zip(places, expected_lines, strict=True):
        actual = lines[place] if place < len(lines) else b""
        if actual != expected:
            first, second = (line.decode("utf-8", "replace")[:80] for line in (actual, expected))
            yield ShardFinding(
                "indexes",
                path.name,
                f"line {place + 1} is {first!r}, but the tar gives {second!r};"
                f" {shard.rebuild(path.name)}",
            )
            return


def _check_index(
    shard: CheckedShard, samples: list[ScannedSample], is_intact: bool
) -> Iterator[ShardFinding]:
    """Compare the shard's rows of `<split>.index.npy` with rows computed from the tar.

    is_intact: whether the tar matches its recorded sha256.
    """
    rows = shard.rows
    if len(samples) != shard.num_samples:
        yield ShardFinding(
            "tars",
            shard.name,
            f"{len(samples):,} samples, but _info.json records {shard.num_samples:,}; restore the"
            " wrong file",
        )
    elif rows is not None:
        yield from compare_rows(shard, rows, samples, is_intact)


def compare_rows(
    shard: CheckedShard,
    recorded: np.ndarray,
    samples: list[ScannedSample],
    is_intact: bool = False,
    numbers: Iterable[int] | None = None,
) -> Iterator[ShardFinding]:
    """Compare index rows with samples of the tar.

    Args:
        is_intact: Whether the tar matches its recorded sha256. If it does, any difference is an
            error in the index.
        numbers: The samples to compare, or None for all.
    """
    expected = index_rows(samples)
    wrong, altered = _differences(recorded, expected, is_intact)
    if len(altered):
        keys = ", ".join(samples[row].key for row in altered[:MOST_LINES])
        yield ShardFinding(
            "tars",
            shard.name,
            f"{counted(len(altered), 'image differs', 'images differ')} from the indexed bytes:"
            f" {keys}; {WRITE_AGAIN if numbers is None else UNCLEAR_WHEN_QUICK}",
        )

    places = np.arange(len(recorded)) if numbers is None else np.array(numbers, np.int64)
    for field, is_wrong in wrong.items():
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            yield ShardFinding(
                "indexes",
                shard.index_name,
                f"wrong values in {counted(int(is_wrong.sum()), 'row')} of {shard.name}, the first"
                f" in row {shard.first + places[row]} (key {samples[row].key}): {field}"
                f" is {recorded[field][row]}, but the tar gives {expected[field][row]};"
                f" {shard.rebuild(shard.index_name)}",
            )


def _differences(
    recorded: np.ndarray, expected: np.ndarray, is_intact: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a mask of the rows in which each field is wrong, and the rows of altered images.

    A different checksum is an error in the index if the tar is intact, or if the index has 0, which
    means unknown. Otherwise the image was altered, unless its place is wrong as well.
    """
    wrong = {
        field: recorded[field] != expected[field]
        for field in ("size", "offset", "label", "width", "height")
    }
    crc_differs = recorded["crc32c"] != expected["crc32c"]
    wrong["crc32c"] = crc_differs & (is_intact | (recorded["crc32c"] == 0))
    is_altered = crc_differs & ~wrong["crc32c"] & ~wrong["offset"] & ~wrong["size"]
    return wrong, np.flatnonzero(is_altered)


def _check_images(
    shard: CheckedShard, tar: Path, samples: list[ScannedSample], seen: np.ndarray
) -> Iterator[ShardFinding]:
    """Decode every image and fill `seen`."""
    changes: Counter[str] = Counter()
    seen["key"] = key_hashes([sample.key for sample in samples], shard.seed)
    seen["label"] = [sample.label for sample in samples]

    with open(tar, "rb") as file:
        for number, sample in enumerate(samples):
            data = os.pread(file.fileno(), sample.image.size, sample.image.offset)
            digest = hashlib.blake2b(data, digest_size=8).digest()
            seen["image"][number] = int.from_bytes(digest, "little")

            image = decode_sample(shard, sample, data)
            if isinstance(image, ShardFinding):
                yield image
            elif image.change is not None:
                changes[image.change] += 1
            count_one(len(data))

    for change, count in changes.items():
        yield ShardFinding(
            "images",
            shard.name,
            f"{counted(count, 'image')}: {change}; the loader can read them",
            fails=False,
        )


def decode_sample(
    shard: CheckedShard, sample: ScannedSample, data: bytes
) -> Prepared | ShardFinding:
    """Return the decoded image, or a finding if decoding fails."""
    try:
        image = prepare(data, ImagePolicy(check="decode"))
    except Unreadable as error:
        return ShardFinding("images", shard.name, f"{sample.key}: cannot be decoded: {error}")

    if shard.ours and image.data != data:
        problem = f"our writer does not write such images ({image.change}); the shard was altered"
    elif (image.width, image.height) != (sample.width, sample.height):
        problem = (
            f"{image.width} x {image.height} pixels, but the header records {sample.width} x"
            f" {sample.height}"
        )
    else:
        return image
    return ShardFinding("images", shard.name, f"{sample.key}: {problem}")


# ---- the quick check -----------------------------------------------------------------------------


def check_shard_quickly(shard: CheckedShard) -> Checked:
    """Fetch and decode some samples through the index, as the loader does.

    Each sample's index row is compared with the surrounding tar headers.
    """
    rows = shard.rows
    if rows is None:
        return Checked([])

    chosen = spread(len(rows), shard.num_sampled)
    try:
        if shard.tars_at is None:
            with open(shard.local_tar, "rb") as file:
                end = os.fstat(file.fileno()).st_size
                findings = [*_check_rows(shard, pread(file.fileno()), end, rows, chosen)]
        else:
            source = RemoteFolder(shard.tars_at)
            version = source.stat(shard.name)

            def read(size: int, position: int) -> bytes:
                return source.read(
                    shard.name, position, min(position + size, version.size), version
                )

            findings = [*_check_rows(shard, read, version.size, rows, chosen)]
    except OSError as error:
        return read_failure(shard, error)

    return Checked([*capped(findings)], num_checked=len(chosen))


def _check_rows(
    shard: CheckedShard, read: Read, end: int, rows: np.ndarray, chosen: list[int]
) -> Iterator[ShardFinding]:
    """Decode the chosen samples, and compare their index rows with the surrounding tar headers."""
    samples = []
    found = []
    for number in chosen:
        offset, size = int(rows["offset"][number]), int(rows["size"][number])
        try:
            sample = _sample_around(shard, read, end, rows, number)
        except (TarDamaged, InvalidSample) as error:
            yield ShardFinding(
                "tars",
                shard.name,
                f"the index has an image of {size} bytes at offset {offset}, but the tar does not"
                f" ({error}); {UNCLEAR_WHEN_QUICK}",
            )
            continue

        data = read(size, offset)
        image = decode_sample(shard, sample, data)
        if isinstance(image, ShardFinding):
            yield image
        samples.append(sample)
        found.append(number)
        count_one(len(data))

    if samples:
        yield from compare_rows(shard, rows[found], samples, numbers=found)
        yield from _check_idx(shard, samples, found)


def _sample_around(
    shard: CheckedShard, read: Read, end: int, rows: np.ndarray, number: int
) -> ScannedSample:
    """Return the sample of an index row, read from the members between the neighboring images.

    Raises TarDamaged and InvalidSample.
    """
    offset = int(rows["offset"][number])
    start = 0
    if number:
        previous = rows[number - 1]
        start = math.ceil(int(previous["offset"] + previous["size"]) / TAR_BLOCK) * TAR_BLOCK
    stop = int(rows["offset"][number + 1]) if number + 1 < len(rows) else end

    group: list[tuple[str, Member, str]] = []
    for name, begins, size, kind in walk(read, start, end, needs_end=False):
        if begins >= stop:
            break
        if named := shard.layout.cut(name):
            group.append((named[0], Member(named[1], begins, size, name), kind))

    key = next((key for key, member, _ in group if member.offset == offset), None)
    if key is None:
        raise TarDamaged("no tar header before the image")
    return scan_sample(read, key, [member for member in group if member[0] == key], shard.layout)
