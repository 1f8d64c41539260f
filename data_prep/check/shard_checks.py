"""What can be wrong with one shard of a finished data set: bytes, tar, `.idx`, index rows, images.
Free of torch.

The data's story: a worker process gets the name of a shard and what `_info.json` says of it. It
reads the file once for its sha256 (one at a URL is fetched meanwhile), then, from the page cache,
its headers and its images: each is decoded to the end. `.idx` and index rows are made again of what
was read and compared. What differs comes back as lines for people; of each sample three numbers
come back, so that the parent can look for keys, images and labels that do not go together over all
shards.

A quick check reads no whole shard: some samples are fetched through the index as the loader does,
with the headers around them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from data_prep.write.card_data import spread
from data_prep.write.catalogue import key_hashes
from data_prep.write.images import ImagePolicy, Prepared, Unreadable, prepare
from data_prep.write.jobs import count_one
from data_prep.write.output import temporary_folder
from vit.data.shards.index_file import has_checksums, left_out, open_index, sha256_of
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
from vit.data.shards.tar_walk import FILE, FOLDER, Read, TarDamaged, pread, walk
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError

SEEN_DTYPE = np.dtype(
    [  # 20 bytes a sample
        # as the catalogue hashes it; among 100 million different ones two are equal once in 3,000
        # data sets
        ("key", "<u8"),
        ("image", "<u8"),  # first 8 bytes of a BLAKE2 hash of the encoded bytes
        ("label", "<i4"),
    ]
)
WRITE_AGAIN = "copy it again, or delete it and repeat the command that wrote it"
TOLD_WITHOUT_QUICK = "shard or index is wrong; without --quick it is told which"
MOST_LINES = 10
"""Lines on one subject and shard; the rest is counted."""


def counted(number: int, what: str) -> str:
    """A number and its noun: 1 image, 2 images."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class Found(NamedTuple):
    """Something that is not as it should be."""

    about: str
    """Heading of the report it belongs under."""
    where: str
    """File or split."""
    text: str
    fails: bool = True
    """False: worth knowing, but such may be so in the source."""
    details: tuple[str, ...] = ()
    """Examples, a line each."""


class Shard(NamedTuple):
    """What a worker needs to know of one shard."""

    root: Path
    """Where index, `.idx` and sidecar are."""
    name: str
    shown: str
    """The data set, for people."""
    tars_at: str | None
    """URL of the tars' folder; None: they are in `root`."""
    index_path: Path | None
    """The split's index file; None if it is known to be wrong."""
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
    def beside(self) -> Path:
        """Where the tar is, or would be, beside its `.idx`."""
        return self.root / self.name

    @property
    def index_name(self) -> str:
        """File name of the index."""
        return self.index_path.name if self.index_path else ""

    @property
    def rows(self) -> np.ndarray | None:
        """This shard's rows of the split's index, copied."""
        return (
            None
            if self.index_path is None
            else np.array(open_index(self.index_path)[self.first : self.first + self.num_samples])
        )

    def rebuild(self, *names: str) -> str:
        """How files that lie beside the tars are made again."""
        return (
            f"delete {' and '.join(names)} and run `python -m data_prep.index {self.shown}`, which"
            " makes them of the tars"
        )


class Checked(NamedTuple):
    """What was found in one shard."""

    found: list[Found]
    seen: np.ndarray
    """(num_samples,) SEEN_DTYPE in tar order; empty after a quick check and where the tar cannot be
    walked."""
    num_checked: int
    hashed: bool = False
    """Its sha256 was compared with a recorded one."""


NOTHING_SEEN = np.empty(0, SEEN_DTYPE)


def _unreadable(shard: Shard, error: OSError) -> Checked:
    text = f"cannot be read ({error.strerror or error}); check its permissions and its disk"
    return Checked([Found("files", shard.name, text)], NOTHING_SEEN, 0)


def _capped(found: Iterable[Found]) -> Iterator[Found]:
    """The first lines, and how many more there are; notes are counted apart."""
    count: Counter[bool] = Counter()
    for last in found:
        count[last.fails] += 1
        if count[last.fails] <= MOST_LINES:
            yield last
    for fails, total in count.items():
        if total > MOST_LINES:
            yield last._replace(
                text=f"and {total - MOST_LINES:,} more like these in this shard", fails=fails
            )


# ---- the whole shard -----------------------------------------------------------------------------


def check_shard(shard: Shard) -> Checked:
    """Check everything about one shard."""
    try:
        with _local(shard) as tar:
            sha256 = sha256_of(tar)
            known = set[int]()
            found = []
            with suppress(ShardError):  # a damaged sidecar is told by itself
                known = left_out(shard.beside)
            if shard.sha256 not in (None, sha256):
                told = f"its sha256 is {sha256[:12]}..., recorded is {str(shard.sha256)[:12]}..."
                found.append(
                    Found("files", shard.name, f"altered or replaced: {told}; {WRITE_AGAIN}")
                )
            found += _capped(_check_members(shard, tar))
            try:
                samples = scan_tar(tar, shard.layout, known)
            except ShardError as error:
                text = str(error).removeprefix(f"{tar}: ")
                found.append(Found("tars", shard.name, f"{text}; its images were not checked"))
                return Checked(found, NOTHING_SEEN, 0, shard.sha256 is not None)
            found += _capped(
                [
                    *_check_idx(shard, samples),
                    *_check_index(shard, samples, is_intact=shard.sha256 == sha256),
                ]
            )
            seen = np.empty(len(samples), SEEN_DTYPE)
            found += _capped(list(_check_images(shard, tar, samples, seen)))
            return Checked(found, seen, len(samples), shard.sha256 is not None)
    except OSError as error:
        return _unreadable(shard, error)


@contextmanager
def _local(shard: Shard) -> Iterator[Path]:
    """The tar as a local file: one at a URL is fetched, and removed again."""
    if shard.tars_at is None:
        yield shard.beside
        return
    with temporary_folder() as folder:
        source = RemoteFolder(shard.tars_at)
        source.fetch(shard.name, source.stat(shard.name), folder / shard.name)
        yield folder / shard.name


def _check_members(shard: Shard, tar: Path) -> Iterator[Found]:
    """Members that others could stumble over."""
    with open(tar, "rb") as file:
        try:
            for name, _, _, kind in walk(
                pread(file.fileno()), 0, os.fstat(file.fileno()).st_size, needs_end=False
            ):
                path = PurePosixPath(name)
                if kind not in (FILE, FOLDER):
                    yield Found(
                        "tars", shard.name, f"{name!r} is {kind}; write the shard without it"
                    )
                if path.is_absolute() or ".." in path.parts:
                    yield Found(
                        "tars",
                        shard.name,
                        f"{name!r} leads out of the folder where somebody unpacks it; do not"
                        " unpack it",
                    )
        except TarDamaged:  # scanning tells it
            return


def _check_idx(shard: Shard, samples: list[ScannedSample]) -> Iterator[Found]:
    """`.idx` has the bytes that the tar gives."""
    path = shard.beside.with_suffix(".idx")
    expected = idx_lines(samples)
    if not path.exists():
        yield Found(
            "indexes",
            path.name,
            f"absent; run `python -m data_prep.index {shard.shown}`, which writes it",
        )
        return
    for number, (given, line) in enumerate(
        itertools.zip_longest(path.read_bytes().splitlines(True), expected), 1
    ):
        if given != line:
            first, second = (
                "no line" if text is None else repr(text.decode("utf-8", "replace")[:80])
                for text in (given, line)
            )
            yield Found(
                "indexes",
                path.name,
                f"line {number}: {first}, the tar says {second}; {shard.rebuild(path.name)}",
            )
            return


def _check_index(shard: Shard, samples: list[ScannedSample], is_intact: bool) -> Iterator[Found]:
    """The rows of `<split>.index.npy` are those that the tar gives. is_intact: the tar has its
    recorded sha256."""
    if len(samples) != shard.num_samples:
        told = (
            f"holds {len(samples):,} samples, _info.json says {shard.num_samples:,}; restore the"
            " one that is wrong"
        )
        yield Found("tars", shard.name, told)
    elif (rows := shard.rows) is not None:
        yield from _compare_rows(
            shard, rows, index_rows(samples), [sample.key for sample in samples], is_intact
        )


def _compare_rows(
    shard: Shard,
    given: np.ndarray,
    expected: np.ndarray,
    keys: list[str],
    is_intact: bool,
    numbers: Iterable[int] | None = None,
) -> Iterator[Found]:
    """Rows of the index against those of the tar; numbers: theirs in the shard, if not of all.

    is_intact: the tar has its recorded sha256, so whatever differs is wrong in the index.
    """
    wrong = {
        field: given[field] != expected[field]
        for field in ("size", "offset", "label", "width", "height")
    }
    if has_checksums(given):  # else an earlier version wrote it
        other = given["crc32c"] != expected["crc32c"]
        wrong["crc32c"] = other & (is_intact | (given["crc32c"] == 0))
        others = np.flatnonzero(other & ~wrong["crc32c"])
        others = others[given[["offset", "size"]][others] == expected[["offset", "size"]][others]]
        if len(others):
            named = ", ".join(keys[row] for row in others[:MOST_LINES])
            told = (
                f"{counted(len(others), 'image')} {'has' if len(others) == 1 else 'have'} not the"
                " bytes that were indexed"
            )
            yield Found(
                "tars",
                shard.name,
                f"{told}: {named}; {WRITE_AGAIN if numbers is None else TOLD_WITHOUT_QUICK}",
            )
    places = np.arange(len(given)) if numbers is None else np.array(numbers, np.int64)
    for field, differs in wrong.items():
        differ = np.flatnonzero(differs)
        if len(differ):
            row = differ[0]
            told = f"{field} {given[field][row]}, the tar says {expected[field][row]}"
            first = f"the first is row {shard.first + places[row]} (key {keys[row]})"
            where = f"{counted(len(differ), 'row')} of {shard.name}, {first}: {told}"
            yield Found("indexes", shard.index_name, f"{where}; {shard.rebuild(shard.index_name)}")


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
            seen["image"][number] = int.from_bytes(
                hashlib.blake2b(data, digest_size=8).digest(), "little"
            )
            image = _decode(shard, sample, data)
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


def _decode(shard: Shard, sample: ScannedSample, data: bytes) -> Prepared | Found:
    """The decoded image, or what is wrong with it."""
    try:
        image = prepare(data, ImagePolicy(check="decode"))
    except Unreadable as error:
        return Found("images", shard.name, f"{sample.key}: cannot be decoded: {error}")
    if shard.ours and image.data != data:
        return Found(
            "images",
            shard.name,
            f"{sample.key}: not an image our writer writes ({image.change}); the shard was altered"
            " afterwards",
        )
    if (image.width, image.height) != (sample.width, sample.height):
        told = (
            f"{image.width} x {image.height} pixels, its header says {sample.width} x"
            f" {sample.height}"
        )
        return Found("images", shard.name, f"{sample.key}: {told}")
    return image


# ---- a part of it --------------------------------------------------------------------------------


def check_shard_quickly(shard: Shard) -> Checked:
    """Fetch and decode some samples through the index, and compare them with it, and `.idx` with
    its offsets and sizes."""
    rows = shard.rows
    if rows is None:
        return Checked([], NOTHING_SEEN, 0)
    try:
        found = list(_compare_idx(shard, rows))
        chosen = spread(len(rows), shard.num_sampled)
        if shard.tars_at is None:
            with open(shard.beside, "rb") as file:
                found += _capped(
                    _check_rows(
                        shard, pread(file.fileno()), os.fstat(file.fileno()).st_size, rows, chosen
                    )
                )
        else:
            source = RemoteFolder(shard.tars_at)
            version = source.stat(shard.name)
            read = lambda size, position: source.read(
                shard.name, position, min(position + size, version.size), version
            )
            found += _capped(_check_rows(shard, read, version.size, rows, chosen))
        return Checked(found, NOTHING_SEEN, len(chosen))
    except OSError as error:
        return _unreadable(shard, error)


def _compare_idx(shard: Shard, rows: np.ndarray) -> Iterator[Found]:
    """`.idx` has each image where the index has it."""
    path = shard.beside.with_suffix(".idx")
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        yield Found(
            "indexes",
            path.name,
            f"absent; run `python -m data_prep.index {shard.shown}`, which writes it",
        )
    elif lines[0] != b"v1.2 %d" % len(rows) or len(lines) != len(rows) + 1:
        told = (
            f"begins with {lines[0][:40].decode('utf-8', 'replace')!r} and has {len(lines) - 1:,}"
            f" lines more, expected 'v1.2 {len(rows)}'"
        )
        yield Found("indexes", path.name, f"{told}; {shard.rebuild(path.name)}")
    else:
        for number, (line, offset, size) in enumerate(
            zip(lines[1:], rows["offset"].tolist(), rows["size"].tolist(), strict=True), 2
        ):
            if b" %d %d " % (offset, size) not in line:
                told = (
                    f"{line[:80].decode('utf-8', 'replace')!r}, the index has the image at offset"
                    f" {offset} with {size} bytes"
                )
                yield Found(
                    "indexes",
                    path.name,
                    f"line {number}: {told}; {shard.rebuild(path.name, shard.index_name)}",
                )
                return


def _check_rows(
    shard: Shard, read: Read, end: int, rows: np.ndarray, chosen: list[int]
) -> Iterator[Found]:
    """Samples as the headers around their images give them, against their rows; and decoded."""
    samples = []
    good = []
    for number in chosen:
        offset = int(rows["offset"][number])
        size = int(rows["size"][number])
        try:
            sample = _sample_around(shard, read, end, rows, number)
        except (TarDamaged, InvalidSample) as error:
            told = (
                f"no sample with an image of {size} bytes at offset {offset}, where the index has"
                f" one ({error})"
            )
            yield Found("tars", shard.name, f"{told}; {TOLD_WITHOUT_QUICK}")
            continue
        data = read(size, offset)
        image = _decode(shard, sample, data)
        if isinstance(image, Found):
            yield image
        samples.append(sample)
        good.append(number)
        count_one(len(data))
    if samples:
        yield from _compare_rows(
            shard, rows[good], index_rows(samples), [sample.key for sample in samples], False, good
        )


def _sample_around(
    shard: Shard, read: Read, end: int, rows: np.ndarray, number: int
) -> ScannedSample:
    """The sample of a row, of the members between the image before and the one behind. Raises
    TarDamaged, InvalidSample."""
    offset = int(rows["offset"][number])
    start = (
        0
        if not number
        else int(rows["offset"][number - 1]) + (int(rows["size"][number - 1]) + 511 & -512)
    )
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
