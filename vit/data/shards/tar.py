"""One shard: a plain tar, scanned into samples and index rows. Free of torch.

The data's story: headers are walked one after the other; members of one key make a sample; of its
image the head is read for the size in pixels, of its label's member (`.cls`, or what the layout
says) the label; no image is decoded. What is truncated is named with its place; samples that do not
fit are listed with the reason; where none fits, what is there is told once, with the layout that
would take it.
"""

from __future__ import annotations

import itertools
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from vit.data.decode.images import read_image_size
from vit.data.shards.members import (
    FLAGS,
    META,
    MOST_BYTES,
    MOST_READ,
    InvalidSample,
    SampleLayout,
    describe,
)
from vit.data.shards.tar_walk import FILE, FOLDER, TAR_BLOCK, Read, TarDamaged, pread, walk
from vit.system.files import ShardError, replacing, unreadable

INDEX_DTYPE = np.dtype(
    [  # 24 bytes a sample: 31 MB for ImageNet-1k
        ("crc32c", "<u4"),  # of the encoded image; 0: not known
        ("size", "<u4"),
        ("offset", "<u8"),  # bytes of the encoded image, and where they start in the tar
        ("label", "<i4"),
        ("width", "<u2"),
        ("height", "<u2"),  # pixels, as in the image's own header
    ]
)
crc32c: Callable[[bytes], int] = google_crc32c.value
"""CRC-32C (Castagnoli) of bytes: 4 to 7 microseconds a photograph; zlib's CRC-32 takes 16."""
DEFAULT_LAYOUT = SampleLayout()
COPY_AGAIN = "copy or write the shard again"


MOST_NAMED = 5
"""Samples at fault in an error."""


class Member(NamedTuple):
    """One file inside a tar. `offset` and `size` are bytes; `ext` is lower case: what its key left
    of the name."""

    ext: str
    offset: int
    size: int
    name: str


class ScannedSample(NamedTuple):
    """One sample of a tar: key, label, its image's member, size in pixels and CRC-32C (0: not
    known), and all its members in tar order."""

    key: str
    label: int
    width: int
    height: int
    image: Member
    members: tuple[Member, ...]
    crc32c: int = 0


class LeftOut(NamedTuple):
    """A sample that does not fit. name, offset: of its first member, whose data begin there."""

    key: str
    name: str
    offset: int
    kind: str
    """What is alike in samples that are told together."""
    reason: str


class Survey(NamedTuple):
    """All that is in a tar."""

    samples: list[ScannedSample]
    unfit: list[LeftOut]
    passed_over: Counter[str]
    """Members that belong to no sample, by what they are; folders and webdataset's own notes are
    not counted."""


def _members(
    read: Read, end: int, layout: SampleLayout, passed_over: Counter[str]
) -> Iterator[tuple[str, Member, str]]:
    """(key, member, what it is) of each member of a tar that belongs to a sample, in order; reads
    headers only."""
    for name, offset, size, kind in walk(read, 0, end, needs_end=False):
        if named := layout.cut(name):
            yield named[0], Member(named[1], offset, size, name), kind
        elif kind != FOLDER and not META.match(name):
            passed_over["a file without key and suffix" if kind == FILE else kind] += 1


def _image_size(read: Read, image: Member) -> tuple[int, int]:
    """(width, height) in pixels, from the first 16 KiB if they suffice: most headers are short,
    most images are not."""
    for num_bytes in (min(16384, image.size), image.size):
        try:
            width, height = read_image_size(read(num_bytes, image.offset))
            break
        except ValueError as error:
            if num_bytes == image.size:
                raise InvalidSample(
                    "image", f"has an image whose size cannot be read, {image.name!r}: {error}"
                ) from error
    if max(width, height) > np.iinfo(np.uint16).max:
        raise InvalidSample(
            "image", f"has {width} x {height} pixels in {image.name!r}; at most 65535 fit the index"
        )
    return width, height


def scan_sample(
    read: Read,
    key: str,
    group: list[tuple[str, Member, str]],
    layout: SampleLayout,
    with_checksum: bool = True,
) -> ScannedSample:
    """Check and read one sample. group: of each member the key, itself, and what it is. Raises
    InvalidSample."""
    members = tuple(member for _, member, kind in group if kind == FILE)
    try:
        found = layout.find([member.ext for member in members])
    except InvalidSample:
        if others := [
            f"{member.name!r} is {kind}" for _, member, kind in group if kind not in (FILE, FOLDER)
        ]:
            remedy = "write the shard with what they link to (tar --hard-dereference --dereference)"
            raise InvalidSample(
                "link", f"is not there as files: {', '.join(others)}; {remedy}"
            ) from None
        raise
    by_ext = {member.ext: member for member in members}
    image = by_ext[found]
    told = by_ext[layout.label_suffix]
    label = layout.label_of(read(told.size, told.offset))
    if not image.size:
        raise InvalidSample("image", f"has an image of 0 bytes, {image.name!r}")
    width, height = _image_size(read, image)
    checksum = crc32c(read(image.size, image.offset)) if with_checksum else 0
    return ScannedSample(key, label, width, height, image, members, checksum)


def survey_tar(
    path: Path | str,
    layout: SampleLayout = DEFAULT_LAYOUT,
    left_out: Collection[int] = (),
    with_checksums: bool = True,
) -> Survey:
    """The samples of a tar, in order, from its headers, its labels and its images, of which no more
    than the heads are read without checksums; no image is decoded.

    left_out: `LeftOut.offset` of samples that are passed over unseen, as they were when the shard
    was indexed. Raises ShardError, naming the file, when the tar is damaged or cut off, or no
    sample has image and label as `layout` has them. A tar without end-of-archive blocks is accepted
    if its last sample fits.
    """
    path = Path(path)
    found = Survey([], [], Counter())
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        end = os.fstat(fd).st_size
        if not end:
            raise ShardError(f"{path}: an empty file; {COPY_AGAIN}")
        for key, run in itertools.groupby(
            _members(pread(fd), end, layout, found.passed_over), key=lambda member: member[0]
        ):
            group = list(run)
            first = group[0][1]
            if first.offset in left_out:
                continue
            try:
                found.samples.append(scan_sample(pread(fd), key, group, layout, with_checksums))
                last_fits = True
            except InvalidSample as error:
                found.unfit.append(LeftOut(key, first.name, first.offset, error.kind, str(error)))
                last_fits = False
        if found.unfit and not last_fits and any(os.pread(fd, TAR_BLOCK, max(0, end - TAR_BLOCK))):
            ends = (
                f"sample {key!r} {found.unfit[-1].reason}. The shard ends there, without an end"
                " mark"
            )
            raise ShardError(f"{path}: {ends}. Truncated: copy or write it again")
        if found.unfit and not found.samples:
            of_images = all(sample.kind == "image" for sample in found.unfit)
            remedy = (
                "Mend these, or move the shard away"
                if of_images
                else _proposal(fd, path, end, layout)
            )
            raise ShardError(f"{path}: {describe_invalid(found.unfit, len(found.unfit))}. {remedy}")
    except TarDamaged as error:
        raise ShardError(f"{path}: {error}; {COPY_AGAIN}") from error
    finally:
        os.close(fd)
    if not found.samples:
        passed_over = f" ({describe_ignored(found.passed_over)})" if found.passed_over else ""
        raise ShardError(
            f"{path}: holds no samples; expected pairs of <key>.jpg and <key>.cls{passed_over};"
            " copy it again, or move it away"
        )
    return found


def scan_tar(
    path: Path | str,
    layout: SampleLayout = DEFAULT_LAYOUT,
    left_out: Collection[int] = (),
    with_checksums: bool = True,
) -> list[ScannedSample]:
    """The samples of `survey_tar`; a sample that does not fit is an error as well, unless it is one
    of `left_out`."""
    found = survey_tar(path, layout, left_out, with_checksums)
    if found.unfit:
        told = describe_invalid(found.unfit, len(found.samples) + len(found.unfit))
        fit = (
            f"The other {len(found.samples):,} samples fit: mend these, or write the shard again"
            " without them"
        )
        raise ShardError(f"{path}: {told}. {fit}; `python -m data_prep.index` leaves them out")
    return found.samples


def describe_invalid(unfit: Sequence[LeftOut], total: int) -> str:
    """Samples that do not fit, in words, once for each kind. total: samples, with those that
    fit."""
    by_kind: dict[str, list[LeftOut]] = {}
    for sample in unfit:
        by_kind.setdefault(sample.kind, []).append(sample)
    parts = []
    for kind, found in by_kind.items():
        if kind == "image":  # each has a fault of its own
            parts += [f"sample {sample.key!r} {sample.reason}" for sample in found[:MOST_NAMED]]
            parts += (
                [f"and {len(found) - MOST_NAMED:,} more such"] if len(found) > MOST_NAMED else []
            )
            continue
        told = f"sample {found[0].key!r} {found[0].reason}"
        if len(found) == total > 1:
            told += f" (all {total:,} samples are so)"
        elif len(found) > 1:
            others = ", ".join(repr(sample.key) for sample in found[1:MOST_NAMED])
            more = ", ..." if len(found) > MOST_NAMED else ""
            told += f" ({len(found):,} of {total:,} samples are so: also {others}{more})"
        parts.append(told)
    return "; ".join(parts)


def describe_ignored(passed_over: Counter[str]) -> str:
    """Members that belong to no sample, in words."""
    kinds = ", ".join(f"{kind} ({count:,} times)" for kind, count in sorted(passed_over.items()))
    return f"passed over, as part of no sample: {kinds}"


def _proposal(fd: int, path: Path, end: int, layout: SampleLayout) -> str:
    """What is there in place of samples that fit, and the layout that would take it."""
    contents: list[tuple[str, bytes | None]] = []
    for number, (_, group) in enumerate(
        itertools.groupby(_members(pread(fd), end, layout, Counter()), key=lambda member: member[0])
    ):
        # nothing is read of what is too large for a label, and of all but the first samples
        for _, member, _ in group:
            is_read = number < MOST_READ and member.size <= MOST_BYTES
            contents.append(
                (member.name, os.pread(fd, member.size, member.offset) if is_read else None)
            )
    return describe(contents, layout, FLAGS)


def index_rows(samples: list[ScannedSample]) -> np.ndarray:
    """(num_samples,) INDEX_DTYPE rows of one tar's samples."""
    return np.array(
        [(s.crc32c, s.image.size, s.image.offset, s.label, s.width, s.height) for s in samples],
        INDEX_DTYPE,
    )


def write_idx(tar: Path, samples: list[ScannedSample]) -> None:
    """Write `<tar without .tar>.idx`."""
    with replacing(tar.with_suffix(".idx")) as file:
        file.writelines(idx_lines(samples))


def idx_lines(samples: list[ScannedSample]) -> list[bytes]:
    """DALI's index v1.2: a line a sample, `ext offset size name` for each member."""
    lines = [f"v1.2 {len(samples)}"]
    # DALI splits the line at blanks; a blank in a foreign name must not shift the fields
    for sample in samples:
        names = (re.sub(r"\s", "_", member.name) for member in sample.members)
        lines.append(
            " ".join(
                f"{m.ext} {m.offset} {m.size} {name}"
                for m, name in zip(sample.members, names, strict=True)
            )
        )
    return [line.encode("utf-8", "surrogateescape") + b"\n" for line in lines]


def member_size(header: bytes) -> int:
    """Size in bytes of the member behind a tar header, -1 if it is none."""
    try:
        # some 50 times as fast as tarfile, and done for each image
        return int(header[124:136].rstrip(b"\0 "), 8)
    except ValueError:
        try:
            return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size
        except tarfile.HeaderError:
            return -1
