"""One shard: a plain tar, scanned into samples and index rows. Free of torch.

The data's story: headers are walked one after the other; members of one key make a sample; of its image the head is read for the size in
pixels, of its label's member (`.cls`, or what the layout says) the label; no image is decoded. What is truncated is named with its place;
samples that do not fit are told once, by what they hold and by the layout that would take them.
"""

from __future__ import annotations

import itertools
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.data.files import ShardError, replacing, unreadable
from vit.data.images import image_size
from vit.data.members import FLAGS, MOST_BYTES, MOST_READ, SampleLayout, Unfit, describe

INDEX_DTYPE = np.dtype(
    [  # 24 bytes a sample: 31 MB for ImageNet-1k
        ("shard", "<u4"),  # position in the split's `filenames`
        ("size", "<u4"),
        ("offset", "<u8"),  # bytes of the encoded image, and where they start in the tar
        ("label", "<i4"),
        ("width", "<u2"),
        ("height", "<u2"),  # pixels, as in the image's own header
    ]
)
DEFAULT_LAYOUT = SampleLayout()
TAR_BLOCK = 512  # bytes; every header and every start of data in a tar lies on a multiple of this


MOST_NAMED = 5
"""Samples at fault in an error."""


class Member(NamedTuple):
    """One file inside a tar. `offset` and `size` are bytes; `ext` is lower case: what its key left of the name."""

    ext: str
    offset: int
    size: int
    name: str


class ScannedSample(NamedTuple):
    """One sample of a tar: key, label, its image's member and size in pixels, and all its members in tar order."""

    key: str
    label: int
    width: int
    height: int
    image: Member
    members: tuple[Member, ...]


def _walk_tar(fd: int, path: Path, layout: SampleLayout) -> Iterator[tuple[str, Member]]:
    """(key, member) of each regular file of a tar that belongs to a sample, in order; reads headers only.

    Own arithmetic, because `tarfile` ends silently at a damaged header, and the samples after it would be lost.
    """
    end = os.fstat(fd).st_size
    position, long_name = 0, None

    def damage(what: str) -> ShardError:
        return ShardError(f"{path}: {what} at byte {position} of {end}; copy or write the shard again")

    if end == 0:
        raise damage("an empty file")
    while position < end:
        block = os.pread(fd, TAR_BLOCK, position)
        if not any(block):  # the end-of-archive mark: only zeros may follow
            if any(any(os.pread(fd, 1 << 20, start)) for start in range(position, end, 1 << 20)):
                raise damage("damaged: zeros instead of a header, with data after them,")
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise damage(f"{'not a plain tar (compressed?)' if position == 0 else 'truncated or damaged'}: {error}") from error
        offset = position + TAR_BLOCK
        if offset + header.size > end:
            raise damage(f"truncated: {header.name!r} has {header.size} bytes and lies")
        if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):  # the next member's name, when over 100 bytes
            extra = os.pread(fd, header.size, offset)
            if header.type == tarfile.XHDTYPE:
                found = re.search(rb"\d+ path=([^\n]*)\n", extra)
                extra = found[1] if found else b""
            long_name = extra.rstrip(b"\0").decode("utf-8", "surrogateescape") or long_name
        elif header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            name, long_name = long_name or header.name, None
            named = layout.cut(name)
            if header.isreg() and named:  # webdataset passes over the others as well
                yield named[0], Member(named[1], offset, header.size, name)
        position = offset + -(-header.size // TAR_BLOCK) * TAR_BLOCK


def _image_size(fd: int, image: Member) -> tuple[int, int]:
    """(width, height) in pixels, from the first 16 KiB if they suffice: most headers are short, most images are not."""
    for num_bytes in (min(16384, image.size), image.size):
        try:
            width, height = image_size(os.pread(fd, num_bytes, image.offset))
            break
        except ValueError as error:
            if num_bytes == image.size:
                raise Unfit("image", f"has an image whose size cannot be read, {image.name!r}: {error}") from error
    if max(width, height) > np.iinfo(np.uint16).max:
        raise Unfit("image", f"has {width} x {height} pixels in {image.name!r}; at most 65535 fit the index")
    return width, height


def _scan_sample(fd: int, key: str, members: tuple[Member, ...], layout: SampleLayout) -> ScannedSample:
    """Check and read one sample's members. Raises Unfit."""
    found = layout.find([member.ext for member in members])
    by_ext = {member.ext: member for member in members}
    image, told = by_ext[found], by_ext[layout.label_suffix]
    label = layout.label_of(os.pread(fd, told.size, told.offset))
    width, height = _image_size(fd, image)
    return ScannedSample(key, label, width, height, image, members)


def scan_tar(path: Path | str, layout: SampleLayout = DEFAULT_LAYOUT) -> list[ScannedSample]:
    """The samples of a tar, in order, from its headers, its labels and the heads of its images; no image is decoded.

    Raises ShardError, naming the file, what samples are at fault for and the first of each kind, when the tar is truncated or damaged, a
    sample lacks image or label as `layout` has them, or a label is no integer. A tar without end-of-archive blocks is accepted if its
    last sample is complete.
    """
    path = Path(path)
    samples: list[ScannedSample] = []
    unfit: dict[str, list[tuple[str, str]]] = {}
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        for key, members in itertools.groupby(_walk_tar(fd, path, layout), key=lambda found: found[0]):
            last_fits = True
            try:
                samples.append(_scan_sample(fd, key, tuple(member for _, member in members), layout))
            except Unfit as error:
                last_fits = False
                unfit.setdefault(error.kind, []).append((key, str(error)))
        if unfit:
            raise ShardError(_explained(fd, path, layout, len(samples), unfit, last_fits))
    finally:
        os.close(fd)
    if not samples:
        raise ShardError(f"{path}: holds no samples; expected pairs of <key>.jpg and <key>.cls")
    return samples


def _explained(fd: int, path: Path, layout: SampleLayout, num_whole: int, unfit: dict[str, list[tuple[str, str]]], last_fits: bool) -> str:
    """What is wrong with samples that do not fit, once for each kind, and the remedy. unfit: (key, reason) of each sample, by kind."""
    num_unfit = sum(map(len, unfit.values()))
    total = num_whole + num_unfit
    parts = []
    for kind, found in unfit.items():
        if kind == "image":  # each has a fault of its own
            parts += [f"sample {key!r} {reason}" for key, reason in found[:MOST_NAMED]]
            parts += [f"and {len(found) - MOST_NAMED:,} more such"] if len(found) > MOST_NAMED else []
            continue
        told = f"sample {found[0][0]!r} {found[0][1]}"
        if len(found) == total > 1:
            told += f" (all {total:,} samples are so)"
        elif len(found) > 1:
            others = ", ".join(repr(key) for key, _ in found[1:MOST_NAMED])
            more = ", ..." if len(found) > MOST_NAMED else ""
            told += f" ({len(found):,} of {total:,} samples are so: also {others}{more})"
        parts.append(told)
    told = f"{path}: {'; '.join(parts)}"
    if num_unfit == 1 and not last_fits and not _has_end_mark(fd):
        return f"{told}. The shard ends there, without an end mark. Truncated: copy or write it again"
    if num_whole or unfit.keys() == {"image"}:
        fit = f"The other {num_whole:,} samples fit: mend" if num_whole else "Mend"
        return f"{told}. {fit} these, or write the shard again without them"
    return f"{told}. {describe(list(_contents(fd, path, layout)), layout, FLAGS)}"


def _has_end_mark(fd: int) -> bool:
    return not any(os.pread(fd, TAR_BLOCK, max(0, os.fstat(fd).st_size - TAR_BLOCK)))


def _contents(fd: int, path: Path, layout: SampleLayout) -> Iterator[tuple[str, bytes | None]]:
    """(name, content) of each member; None for what is too large for a label, and for all but the first samples."""
    for number, (_, group) in enumerate(itertools.groupby(_walk_tar(fd, path, layout), key=lambda found: found[0])):
        for _, member in group:
            is_read = number < MOST_READ and member.size <= MOST_BYTES
            yield member.name, os.pread(fd, member.size, member.offset) if is_read else None


def index_rows(samples: list[ScannedSample]) -> np.ndarray:
    """(num_samples,) INDEX_DTYPE rows of one tar's samples; `shard` is 0 until `write_index` numbers the shards."""
    return np.array([(0, s.image.size, s.image.offset, s.label, s.width, s.height) for s in samples], INDEX_DTYPE)


def write_idx(tar: Path, samples: list[ScannedSample]) -> None:
    """Write `<tar without .tar>.idx`, DALI's index v1.2: a line a sample, `ext offset size name` for each member."""
    lines = [f"v1.2 {len(samples)}"]
    for sample in samples:  # DALI splits the line at blanks; a blank in a foreign name must not shift the fields
        names = (re.sub(r"\s", "_", member.name) for member in sample.members)
        lines.append(" ".join(f"{m.ext} {m.offset} {m.size} {name}" for m, name in zip(sample.members, names, strict=True)))
    with replacing(tar.with_suffix(".idx")) as file:
        file.write("\n".join(lines).encode("utf-8", "surrogateescape") + b"\n")


def size_said_by(header: bytes) -> int:
    """Size in bytes of the member behind a tar header, -1 if it is none."""
    try:
        return int(header[124:136].rstrip(b"\0 "), 8)  # some 50 times as fast as tarfile, and done for each image
    except ValueError:
        try:
            return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size
        except tarfile.HeaderError:
            return -1
