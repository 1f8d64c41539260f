"""Checks of one shard of a finished data set: bytes, tar, `.idx`, index rows, images.

A worker process gets the name of a shard and what `_info.json` records of it. It reads the file
once for its sha256 (one at a URL is fetched meanwhile) and then, from the page cache, its headers
and its images: each is decoded completely. `.idx` and index rows are made again from what was read
and compared. Problems come back as messages; of each sample three numbers come back, so that the
parent can compare keys, images and labels over all shards.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np

from data_prep.write.images import ImagePolicy, Prepared, Unreadable, prepare
from data_prep.write.jobs import count_one
from data_prep.write.output import temporary_folder
from data_prep.write.samples import key_hashes, spread
from vit.data.shards.index_file import has_checksums, left_out, open_index
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
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError, sha256_of
from vit.system.tar_walk import TAR_BLOCK, Read, TarDamaged, pread, walk

SEEN_DTYPE = np.dtype(
    [  # 20 bytes a sample
        # as in the catalogue; two of 100 million are equal by chance in one of 3,000 data sets
        ("key", "<u8"),
        ("image", "<u8"),  # first 8 bytes of a BLAKE2 hash of the encoded bytes
        ("label", "<i4"),
    ]
)
WRITE_AGAIN = "copy it again, or delete it and repeat the command that wrote it"
UNCLEAR_WHEN_QUICK = "shard or index is wrong; run without --quick to see which"
MOST_LINES = 10
"""Lines on one subject and shard; the others are only counted."""


def counted(number: int, what: str) -> str:
    """A number and its noun: 1 image, 2 images."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class Found(NamedTuple):
    """A problem, or something worth a note."""

    about: str
    """Heading in the report, a key of `verify.SUBJECTS`."""
    where: str
    """File or split."""
    text: str
    fails: bool = True
    """False: a note, as the source may be so."""
    details: tuple[str, ...] = ()
    """Examples, a line each."""


class Shard(NamedTuple):
    """What a worker needs to check one shard."""

    root: Path
    """Where index, `.idx` and sidecar are."""
    name: str
    shown: str
    """The data set in messages."""
    tars_at: str | None
    """URL of the tars' folder; None: they are in `root`."""
    index_path: Path | None
    """The split's index file; None if it does not fit."""
    first: int
    """Number of its first sample in the split's index."""
    num_samples: int
    sha256: str | None
    ours: bool
    """Written by our writer, so that every image is an RGB or grey JPEG."""
    seed: int
    """That of the catalogue's hashes."""
    num_sampled: int
    """Images that a quick check decodes."""
    layout: SampleLayout = DEFAULT_LAYOUT
    """Where image and label of a sample are."""

    @property
    def local_tar(self) -> Path:
        """Where the tar is in a local data set, next to its `.idx`."""
        return self.root / self.name

    @property
    def index_name(self) -> str:
        return "" if self.index_path is None else self.index_path.name

    @property
    def rows(self) -> np.ndarray | None:
        """This shard's rows of the split's index, copied."""
        if self.index_path is None:
            return None
        return np.array(open_index(self.index_path)[self.first : self.first + self.num_samples])

    def rebuild(self, *names: str) -> str:
        """How files that accompany the tars are made again."""
        return (
            f"delete {' and '.join(names)} and run `python -m data_prep.index"
            f" {quote(self.shown)}`, which makes them from the tars"
        )


class Checked(NamedTuple):
    """What was found in one shard."""

    found: list[Found]
    seen: np.ndarray = np.empty(0, SEEN_DTYPE)
    """(num_samples,) SEEN_DTYPE in tar order; empty if the tar was not read to its end."""
    num_checked: int = 0
    hashed: bool = False
    """Its sha256 was compared with a recorded one."""


def read_failure(shard: Shard, error: OSError) -> Checked:
    """The result for a shard that the system refuses to read."""
    return Checked(
        [
            Found(
                "files",
                shard.name,
                f"cannot be read ({error.strerror or error}); check its permissions and its disk",
            )
        ]
    )


def capped(found: Iterable[Found]) -> Iterator[Found]:
    """The first lines, and how many more there are; notes are counted apart."""
    count: Counter[bool] = Counter()
    for line in found:
        count[line.fails] += 1
        if count[line.fails] <= MOST_LINES:
            yield line
    for fails, total in count.items():
        if total > MOST_LINES:
            text = f"and {total - MOST_LINES:,} more like these in this shard"
            yield line._replace(text=text, fails=fails)


# ---- the complete shard --------------------------------------------------------------------------


def check_shard(shard: Shard) -> Checked:
    """Check everything about one shard."""
    try:
        with _local(shard) as tar:
            return _check_tar(shard, tar)
    except OSError as error:
        return read_failure(shard, error)


def _check_tar(shard: Shard, tar: Path) -> Checked:
    sha256 = sha256_of(tar)
    hashed = shard.sha256 is not None
    found = []
    if hashed and shard.sha256 != sha256:
        text = f"its sha256 is {sha256[:12]}..., recorded is {str(shard.sha256)[:12]}..."
        found.append(Found("files", shard.name, f"altered or replaced: {text}; {WRITE_AGAIN}"))
    known = set[int]()
    with suppress(ShardError):  # a damaged sidecar is reported elsewhere
        known = left_out(shard.local_tar)
    try:
        samples = scan_tar(tar, shard.layout, known)
    except ShardError as error:
        text = str(error).removeprefix(f"{tar}: ")
        found.append(Found("tars", shard.name, f"{text}; its images were not checked"))
        return Checked(found, hashed=hashed)
    records = [*_check_idx(shard, samples), *_check_index(shard, samples, shard.sha256 == sha256)]
    seen = np.empty(len(samples), SEEN_DTYPE)
    images = list(_check_images(shard, tar, samples, seen))
    return Checked([*found, *capped(records), *capped(images)], seen, len(samples), hashed)


@contextmanager
def _local(shard: Shard) -> Iterator[Path]:
    """The tar as a local file: one at a URL is fetched, and removed again."""
    if shard.tars_at is None:
        yield shard.local_tar
        return
    with temporary_folder() as folder:
        source = RemoteFolder(shard.tars_at)
        source.fetch(shard.name, source.stat(shard.name), folder / shard.name)
        yield folder / shard.name


def _check_idx(
    shard: Shard, samples: list[ScannedSample], numbers: Iterable[int] | None = None
) -> Iterator[Found]:
    """`.idx` has the lines that the tar gives; numbers: of the samples, None for all."""
    path = shard.local_tar.with_suffix(".idx")
    if not path.exists():
        remedy = f"run `python -m data_prep.index {quote(shard.shown)}`, which writes it"
        yield Found("indexes", path.name, f"absent; {remedy}")
        return
    lines = path.read_bytes().splitlines(True)
    expected = idx_lines(samples)[1:]
    places = [number + 1 for number in numbers or range(len(samples))]
    count = len(samples) if numbers is None else shard.num_samples
    if len(lines) != count + 1:
        text = f"{counted(len(lines), 'line')}, expected {count + 1:,}"
        yield Found("indexes", path.name, f"{text}; {shard.rebuild(path.name)}")
        return
    head = b"v1.2 %d\n" % count
    for place, line in zip([0, *places], [head, *expected], strict=True):
        given = lines[place] if place < len(lines) else b""
        if given != line:
            first, second = (text.decode("utf-8", "replace")[:80] for text in (given, line))
            yield Found(
                "indexes",
                path.name,
                f"line {place + 1}: {first!r}, the tar says {second!r}; {shard.rebuild(path.name)}",
            )
            return


def _check_index(shard: Shard, samples: list[ScannedSample], is_intact: bool) -> Iterator[Found]:
    """The rows of `<split>.index.npy` are those that the tar gives.

    is_intact: the tar has its recorded sha256.
    """
    rows = shard.rows
    if len(samples) != shard.num_samples:
        yield Found(
            "tars",
            shard.name,
            f"holds {len(samples):,} samples, _info.json says {shard.num_samples:,}; restore the"
            " one that is wrong",
        )
    elif rows is not None:
        yield from compare_rows(shard, rows, samples, is_intact)


def compare_rows(
    shard: Shard,
    given: np.ndarray,
    samples: list[ScannedSample],
    is_intact: bool = False,
    numbers: Iterable[int] | None = None,
) -> Iterator[Found]:
    """Rows of the index against samples of the tar; numbers: theirs in the shard, None for all.

    is_intact: the tar has its recorded sha256, so the index is wrong wherever they differ.
    """
    expected = index_rows(samples)
    fields = ("size", "offset", "label", "width", "height")
    wrong = {field: given[field] != expected[field] for field in fields}
    if has_checksums(given):  # an earlier version wrote indexes without
        other = given["crc32c"] != expected["crc32c"]
        wrong["crc32c"] = other & (is_intact | (given["crc32c"] == 0))
        others = np.flatnonzero(other & ~wrong["crc32c"] & ~wrong["offset"] & ~wrong["size"])
        if len(others):
            keys = ", ".join(samples[row].key for row in others[:MOST_LINES])
            yield Found(
                "tars",
                shard.name,
                f"{counted(len(others), 'image')} {'has' if len(others) == 1 else 'have'} not the"
                f" bytes that were indexed: {keys};"
                f" {WRITE_AGAIN if numbers is None else UNCLEAR_WHEN_QUICK}",
            )
    places = np.arange(len(given)) if numbers is None else np.array(numbers, np.int64)
    for field, differs in wrong.items():
        if not differs.any():
            continue
        row = int(np.argmax(differs))
        yield Found(
            "indexes",
            shard.index_name,
            f"{counted(int(differs.sum()), 'row')} of {shard.name}, the first is row"
            f" {shard.first + places[row]} (key {samples[row].key}): {field} {given[field][row]},"
            f" the tar says {expected[field][row]}; {shard.rebuild(shard.index_name)}",
        )


def _check_images(
    shard: Shard, tar: Path, samples: list[ScannedSample], seen: np.ndarray
) -> Iterator[Found]:
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
            if isinstance(image, Found):
                yield image
            elif image.change is not None:
                changes[image.change] += 1
            count_one(len(data))
    for change, count in changes.items():
        yield Found(
            "images",
            shard.name,
            f"{counted(count, 'image')}: {change}; the loader reads them",
            fails=False,
        )


def decode_sample(shard: Shard, sample: ScannedSample, data: bytes) -> Prepared | Found:
    """The decoded image, or what is wrong with it."""
    try:
        image = prepare(data, ImagePolicy(check="decode"))
    except Unreadable as error:
        return Found("images", shard.name, f"{sample.key}: cannot be decoded: {error}")
    problem = ""
    if (image.width, image.height) != (sample.width, sample.height):
        problem = (
            f"{image.width} x {image.height} pixels, its header says {sample.width} x"
            f" {sample.height}"
        )
    if shard.ours and image.data != data:
        problem = (
            f"not an image our writer writes ({image.change}); the shard was altered afterwards"
        )
    return Found("images", shard.name, f"{sample.key}: {problem}") if problem else image


# ---- the quick check -----------------------------------------------------------------------------


def check_shard_quickly(shard: Shard) -> Checked:
    """Fetch and decode some samples through the index, as the loader does.

    No shard is read completely; each sample is checked with the tar headers around it.
    """
    rows = shard.rows
    if rows is None:
        return Checked([])
    chosen = spread(len(rows), shard.num_sampled)
    try:
        if shard.tars_at is None:
            with open(shard.local_tar, "rb") as file:
                end = os.fstat(file.fileno()).st_size
                found = [*_check_rows(shard, pread(file.fileno()), end, rows, chosen)]
        else:
            source = RemoteFolder(shard.tars_at)
            version = source.stat(shard.name)

            def read(size: int, position: int) -> bytes:
                stop = min(position + size, version.size)
                return source.read(shard.name, position, stop, version)

            found = [*_check_rows(shard, read, version.size, rows, chosen)]
    except OSError as error:
        return read_failure(shard, error)
    return Checked([*capped(found)], num_checked=len(chosen))


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
        yield from _check_idx(shard, samples, good)


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
