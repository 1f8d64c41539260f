"""What can be wrong with one shard of a finished data set: bytes, tar, `.idx`, index rows, images. Free of torch.

The data's story: a worker process gets the name of a shard and what `_info.json` says of it. It reads the file once for its sha256, then,
from the page cache, its headers and its images: each is decoded to the end. What differs comes back as lines for people; of each sample
three numbers come back, so that the parent can look for keys, images and labels that do not go together over all shards.

A quick check reads no whole shard: `.idx` and index are compared, and some images are fetched through the index as the loader does.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from data_prep.card import spread
from data_prep.images import ImagePolicy, Prepared, Unreadable, prepare
from data_prep.jobs import count_one
from vit.data.files import ShardError
from vit.data.index_file import has_checksums, left_out, open_index
from vit.data.members import IMAGE_EXTENSIONS, SampleLayout, Unfit
from vit.data.tar import DEFAULT_LAYOUT, ScannedSample, index_rows, scan_tar, size_said_by
from vit.data.tar_walk import TAR_BLOCK

SEEN_DTYPE = np.dtype(
    [  # 20 bytes a sample
        ("key", "<u8"),  # first 8 bytes of a BLAKE2 hash; among 100 million different ones two are equal once in 3,000 data sets
        ("image", "<u8"),  # the same of the encoded bytes
        ("label", "<i4"),
    ]
)
WRITE_AGAIN = "copy it again, or delete it and repeat the command that wrote it"
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
    name: str
    index_path: Path | None
    """The split's index file; None if it is known to be wrong."""
    first: int
    """Number of its first sample in the split's index."""
    num_samples: int
    sha256: str | None
    ours: bool
    """Written by our writer, so that every image is an RGB or grey JPEG."""
    num_sampled: int
    """Images that a quick check decodes."""
    layout: SampleLayout = DEFAULT_LAYOUT
    """Where image and label of a sample are."""

    @property
    def tar(self) -> Path:
        """The shard itself."""
        return self.root / self.name

    @property
    def index_name(self) -> str:
        """File name of the index."""
        return self.index_path.name if self.index_path else ""

    def rebuild(self, *names: str) -> str:
        """How files that lie beside the tars are made again."""
        return f"delete {' and '.join(names)} and run `python -m data_prep.index {self.root}`, which makes them of the tars"


class Checked(NamedTuple):
    """What was found in one shard."""

    found: list[Found]
    seen: np.ndarray
    """(num_samples,) SEEN_DTYPE in tar order; empty after a quick check and where the tar cannot be walked."""
    num_checked: int


# ---- the whole shard ------------------------------------------------------------------------------------------------


def check_shard(shard: Shard) -> Checked:
    """Check everything about one shard."""
    try:
        with open(shard.tar, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        found = list(_check_sha256(shard, sha256))
        try:
            samples = scan_tar(shard.tar, shard.layout, left_out(shard.tar))
        except ShardError as error:
            text = str(error).removeprefix(f"{shard.tar}: ")
            found += [*_capped(_check_members(shard, None)), Found("tars", shard.name, f"{text}; its images were not checked")]
            return Checked(found, np.empty(0, SEEN_DTYPE), 0)
        found += _capped(_check_members(shard, samples))
        found += _capped(_check_length(shard, samples))
        found += _capped(_check_idx(shard, samples))
        found += _capped(_check_index(shard, samples))
        seen = np.empty(len(samples), SEEN_DTYPE)
        problems = list(_check_images(shard, samples, seen))
        return Checked([*found, *_capped(problems)], seen, len(samples))
    except OSError as error:
        return _unreadable(shard, error)


def _unreadable(shard: Shard, error: OSError) -> Checked:
    text = f"cannot be read ({error.strerror or error}); check its permissions and its disk"
    return Checked([Found("files", shard.name, text)], np.empty(0, SEEN_DTYPE), 0)


def _capped(found: Iterable[Found]) -> Iterator[Found]:
    """The first lines, and how many more there are; notes are counted apart."""
    count: Counter[bool] = Counter()
    for last in found:
        count[last.fails] += 1
        if count[last.fails] <= MOST_LINES:
            yield last
    for fails, total in count.items():
        if total > MOST_LINES:
            yield last._replace(text=f"and {total - MOST_LINES:,} more like these in this shard", fails=fails)


def _check_sha256(shard: Shard, sha256: str) -> Iterator[Found]:
    if shard.sha256 not in (None, sha256):
        told = f"its sha256 is {sha256[:12]}..., recorded is {str(shard.sha256)[:12]}..."
        yield Found("files", shard.name, f"altered or replaced: {told}; {WRITE_AGAIN}")


def _check_members(shard: Shard, samples: list[ScannedSample] | None) -> Iterator[Found]:
    """The members as other tools see them, by Python's tarfile; it must see those of `samples`, which are None for a damaged tar."""
    members: list[tarfile.TarInfo] = []
    try:
        with tarfile.open(shard.tar, "r:") as archive:
            for member in archive:
                members.append(member)
                yield from _check_member(shard, member)
    except (tarfile.TarError, ValueError) as error:
        if samples is not None:
            yield Found("tars", shard.name, f"Python's tarfile cannot read it ({error}); {WRITE_AGAIN}")
        return
    of_samples = (member for member in members if member.isreg() and shard.layout.cut(member.name))
    if left_out(shard.tar):
        return
    files = [(member.name, member.offset_data, member.size) for member in of_samples]
    if samples is None:
        yield from _check_dots(shard, [name for name, *_ in files])
    elif files != (ours := [(member.name, member.offset, member.size) for sample in samples for member in sample.members]):
        differ = next(both for both in itertools.zip_longest(files, ours) if both[0] != both[1])
        yield Found("tars", shard.name, f"read in two ways: {differ[0]} by Python's tarfile, {differ[1]} by us (name, offset, size)")


def _check_member(shard: Shard, member: tarfile.TarInfo) -> Iterator[Found]:
    path = PurePosixPath(member.name)
    if member.issym() or member.islnk():
        yield Found("tars", shard.name, f"{member.name!r} is a link to {member.linkname!r}; write the shard without links")
    elif not (member.isreg() or member.isdir()):
        yield Found("tars", shard.name, f"{member.name!r} is no file (type {member.type!r}); write the shard without it")
    if path.is_absolute() or ".." in path.parts:
        yield Found("tars", shard.name, f"{member.name!r} leads out of the folder where somebody unpacks it; do not unpack it")


def _check_dots(shard: Shard, names: list[str]) -> Iterator[Found]:
    """Pairs such as a.b.jpg and a.b.cls, which explain why readers find no sample a."""
    there = set(names)
    for name in names:
        stem, _, extension = name.rpartition(".")
        key = name[: len(name) - len(name.rpartition("/")[2].partition(".")[2]) - 1]
        if extension.lower() in IMAGE_EXTENSIONS and key != stem and f"{stem}.cls" in there:
            yield Found("tars", shard.name, f"{name!r}: a key with a dot; readers end it at the first one and take {key!r}")


def _check_length(shard: Shard, samples: list[ScannedSample]) -> Iterator[Found]:
    if len(samples) != shard.num_samples:
        yield Found(
            "tars", shard.name, f"holds {len(samples):,} samples, _info.json says {shard.num_samples:,}; restore the one that is wrong"
        )


def _read_idx(shard: Shard) -> tuple[list[list[str]], list[Found]]:
    """The fields of each line of `.idx` after the first, and what is wrong with it as a whole (then there are no lines)."""
    path = shard.tar.with_suffix(".idx")
    try:
        first, *lines = path.read_bytes().decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    except FileNotFoundError:
        absent = f"absent; run `python -m data_prep.index {shard.root}`, which writes it"
        return [], [Found("indexes", path.name, absent)]
    if first != f"v1.2 {len(lines)}":
        text = f"begins with {first[:40]!r} and has {len(lines):,} lines more, expected 'v1.2 {len(lines)}'; {shard.rebuild(path.name)}"
        return [], [Found("indexes", path.name, text)]
    return [line.split(" ") for line in lines], []


def _check_idx(shard: Shard, samples: list[ScannedSample]) -> Iterator[Found]:
    """The members in `.idx` are those of the tar: extension, offset, size and name, with blanks as `_`."""
    lines, problems = _read_idx(shard)
    yield from problems
    if problems:
        return
    name = f"{shard.tar.stem}.idx"
    if len(lines) != len(samples):
        yield Found("indexes", name, f"lists {counted(len(lines), 'sample')}, the tar has {len(samples):,}; {shard.rebuild(name)}")
    for number, (fields, sample) in enumerate(zip(lines, samples, strict=False), 2):
        expected = [text for m in sample.members for text in (m.ext, str(m.offset), str(m.size), re.sub(r"\s", "_", m.name))]
        if fields != expected:
            told = f"{' '.join(fields)[:80]!r}, the tar says {' '.join(expected)[:80]!r}"
            yield Found("indexes", name, f"line {number}, sample {sample.key!r}: {told}; {shard.rebuild(name)}")


def _index_slice(shard: Shard) -> np.ndarray:
    """This shard's rows of the split's index, copied."""
    assert shard.index_path is not None
    return np.array(open_index(shard.index_path)[shard.first : shard.first + shard.num_samples])


def _check_index(shard: Shard, samples: list[ScannedSample]) -> Iterator[Found]:
    """The rows of `<split>.index.npy` are those that the tar gives."""
    if shard.index_path is None or len(samples) != shard.num_samples:
        return
    given, expected = _index_slice(shard), index_rows(samples)
    if has_checksums(given):  # else an earlier version wrote it
        others = np.flatnonzero((given["crc32"] != expected["crc32"]) & (given["crc32"] != 0))
        others = others[(given[["offset", "size"]][others] == expected[["offset", "size"]][others])]
        if len(others):
            named = ", ".join(samples[row].key for row in others[:MOST_LINES])
            told = f"{counted(len(others), 'image')} {'has' if len(others) == 1 else 'have'} not the bytes that were indexed"
            yield Found("tars", shard.name, f"{told}: {named}; {WRITE_AGAIN}")
    for field in ("size", "offset", "label", "width", "height"):
        differ = np.flatnonzero(given[field] != expected[field])
        if len(differ):
            row = differ[0]
            told = f"{field} {given[field][row]}, the tar says {expected[field][row]}"
            where = f"{counted(len(differ), 'row')} of {shard.name}, the first is row {shard.first + row} (key {samples[row].key}): {told}"
            yield Found("indexes", shard.index_name, f"{where}; {shard.rebuild(shard.index_name)}")


def _check_images(shard: Shard, samples: list[ScannedSample], seen: np.ndarray) -> Iterator[Found]:
    """Decode every image and fill `seen`."""
    changes: Counter[str] = Counter()
    with open(shard.tar, "rb") as file:
        for number, sample in enumerate(samples):
            data = os.pread(file.fileno(), sample.image.size, sample.image.offset)
            seen[number] = (_hash(sample.key.encode("utf-8", "surrogateescape")), _hash(data), sample.label)
            image = _decode(shard, sample.key, data)
            if isinstance(image, Found):
                yield image
            elif (image.width, image.height) != (sample.width, sample.height):
                told = f"{image.width} x {image.height} pixels, Pillow reads {sample.width} x {sample.height} in its header"
                yield Found("images", shard.name, f"{sample.key}: {told}")
            elif image.change is not None:
                changes[image.change] += 1
            count_one(len(data))
    for change, count in changes.items():
        yield Found("images", shard.name, f"{counted(count, 'image')}: {change}; the loader reads them", fails=False)


def _decode(shard: Shard, key: str, data: bytes) -> Prepared | Found:
    """The decoded image, or what is wrong with it."""
    try:
        image = prepare(data, ImagePolicy(check="decode"))
    except Unreadable as error:
        return Found("images", shard.name, f"{key}: cannot be decoded: {error}")
    if shard.ours and image.data != data:
        return Found("images", shard.name, f"{key}: not an image our writer writes ({image.change}); the shard was altered afterwards")
    return image


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


# ---- a part of it ---------------------------------------------------------------------------------------------------


def check_shard_quickly(shard: Shard) -> Checked:
    """Compare `.idx` with the index, and fetch and decode some images and their labels through both."""
    if shard.index_path is None:
        return Checked([], np.empty(0, SEEN_DTYPE), 0)
    try:
        rows = _index_slice(shard)
        lines, found = _read_idx(shard)
        if not found:
            found += _capped(_compare_idx_with_index(shard, lines, rows))
        chosen = spread(len(rows), shard.num_sampled)
        listed = lines if len(lines) == len(rows) else [[]] * len(rows)
        with open(shard.tar, "rb") as file:
            found += _capped([problem for row in chosen for problem in _check_row(shard, file.fileno(), rows[row], listed[row])])
        return Checked(found, np.empty(0, SEEN_DTYPE), len(chosen))
    except OSError as error:
        return _unreadable(shard, error)


def _members_of_line(fields: list[str]) -> dict[str, tuple[int, int, str]]:
    """{extension: (offset, size, name)} of a line of `.idx`; {} if it cannot be read."""
    try:
        groups = zip(fields[::4], fields[1::4], fields[2::4], fields[3::4], strict=True)
        return {ext: (int(offset), int(size), name) for ext, offset, size, name in groups}
    except ValueError:
        return {}


def _compare_idx_with_index(shard: Shard, lines: list[list[str]], rows: np.ndarray) -> Iterator[Found]:
    name = f"{shard.tar.stem}.idx"
    if len(lines) != len(rows):
        yield Found("indexes", name, f"lists {counted(len(lines), 'sample')}, _info.json says {len(rows):,}; {shard.rebuild(name)}")
        return
    offsets, sizes = rows["offset"].tolist(), rows["size"].tolist()
    for number, (fields, offset, size) in enumerate(zip(lines, offsets, sizes, strict=True), 2):
        if (str(offset), str(size)) not in zip(fields[1::4], fields[2::4], strict=False):
            told = f"{' '.join(fields)[:80]!r}, the index has the image at offset {offset} with {size} bytes"
            yield Found("indexes", name, f"line {number}: {told}; {shard.rebuild(name, shard.index_name)}")


def _check_row(shard: Shard, fd: int, row: np.void, fields: list[str]) -> Iterator[Found]:
    """One image as the loader reads it, and its label as the `.idx` line `fields` leads to it."""
    offset, size = int(row["offset"]), int(row["size"])
    block = os.pread(fd, TAR_BLOCK + size, max(0, offset - TAR_BLOCK))
    count_one(len(block))
    if len(block) < TAR_BLOCK + size or size_said_by(block[:TAR_BLOCK]) != size:
        told = f"no image of {size} bytes at offset {offset}, where the index has one"
        yield Found("tars", shard.name, f"{told}: one of the two is wrong; without --quick it is told which")
        return
    try:
        key = tarfile.TarInfo.frombuf(block[:TAR_BLOCK], "utf-8", "surrogateescape").name
    except tarfile.HeaderError as error:
        yield Found("tars", shard.name, f"damaged header in front of offset {offset} ({error}); {WRITE_AGAIN}")
        return
    image = _decode(shard, key, block[TAR_BLOCK:])
    if isinstance(image, Found):
        yield image
    elif (image.width, image.height) != (row["width"], row["height"]):
        told = f"{key} has {row['width']} x {row['height']} pixels in the index, {image.width} x {image.height} in {shard.name}"
        yield Found("indexes", shard.index_name, f"{told}; {shard.rebuild(shard.index_name)}")
    if member := _members_of_line(fields).get(shard.layout.label_suffix):
        try:
            label: object = shard.layout.label_of(os.pread(fd, member[1], member[0]))
        except Unfit as error:
            label = f"what {error}"
        if label != row["label"]:
            told = f"{key} has label {row['label']} in the index, {label} in {shard.name}"
            yield Found("indexes", shard.index_name, f"{told}; {shard.rebuild(shard.index_name)}")
