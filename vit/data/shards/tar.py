"""Scan a shard, which is a plain tar, into samples and index rows.

Headers are read in order, and consecutive members with the same key form a sample. The size in
pixels comes from the image header. The label comes from the member that the layout specifies, by
default `.cls`. Images are not decoded. Invalid samples are listed with the reason.
"""

import itertools
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from vit.data.decode.images import read_image_size
from vit.data.shards.members import (
    FLAGS,
    MAX_LABEL_BYTES,
    META,
    NO_LABEL,
    InvalidSample,
    SampleLayout,
    remedy,
)
from vit.data.shards.tar_walk import FILE, FOLDER, TAR_BLOCK, Read, TarDamaged, pread, walk
from vit.system.files import ShardError, replacing, unreadable
from vit.system.redact import escape_unprinted

INDEX_DTYPE = np.dtype(
    [  # 24 bytes per sample: 31 MB for ImageNet-1k
        ("crc32c", "<u4"),  # of the encoded image; 0: unknown
        ("size", "<u4"),  # size of the encoded image in bytes
        ("offset", "<u8"),  # offset of its first byte in the tar
        ("label", "<i4"),
        ("width", "<u2"),  # pixels, from the image header
        ("height", "<u2"),
    ]
)

crc32c: Callable[[bytes], int] = google_crc32c.value
"""The function that computes CRC-32C (Castagnoli), in 4 to 7 microseconds per photograph. zlib's
CRC-32 takes 16."""

DEFAULT_LAYOUT = SampleLayout()
BLANK = re.compile(r"\s")
HEAD_BYTES = 16384
"""The number of bytes to read from an image for its size in pixels. Most headers are shorter."""


class Member(NamedTuple):
    """A file in a tar."""

    ext: str
    """The part of the member's name after the key, in lowercase."""
    offset: int
    """The position of the first byte in the tar."""
    size: int
    """The number of bytes."""
    name: str


class ScannedSample(NamedTuple):
    """A sample in a tar, with its members in tar order. crc32c: checksum of the image, 0 if
    unknown."""

    key: str
    label: int
    width: int
    height: int
    image: Member
    members: tuple[Member, ...]
    crc32c: int = 0


class LeftOut(NamedTuple):
    """A sample that does not match the layout, identified by its first member's name and offset."""

    key: str
    name: str
    offset: int
    reason: str


class Survey(NamedTuple):
    """The content of a tar.

    ignored: counts the members of each kind that do not belong to a sample, except folders and
    webdataset's metadata.
    """

    samples: list[ScannedSample]
    unfit: list[LeftOut]
    ignored: Counter[str]


def _members(
    read: Read, end: int, layout: SampleLayout, ignored: Counter[str]
) -> Iterator[tuple[str, Member, str]]:
    """Yield the key, the member and its kind for each member that belongs to a sample.

    Counts other members in `ignored`; see `Survey`.
    """
    for name, offset, size, kind in walk(read, 0, end, needs_end=False):
        if cut := layout.cut(name):
            key, ext = cut
            yield key, Member(ext, offset, size, name), kind
        elif kind != FOLDER and not META.match(name):
            ignored["a file without key and suffix" if kind == FILE else kind] += 1


def _size_in_pixels(read: Read, image: Member) -> tuple[int, int]:
    """Return (width, height), and read the entire image only if its beginning does not suffice."""
    for num_bytes in (min(HEAD_BYTES, image.size), image.size):
        try:
            width, height = read_image_size(read(num_bytes, image.offset))
            break
        except ValueError as error:
            if num_bytes == image.size:
                raise InvalidSample(
                    f"has an image whose size cannot be read, {image.name!r}: {error}"
                ) from error

    if max(width, height) > np.iinfo(np.uint16).max:
        raise InvalidSample(
            f"has {width} x {height} pixels in {image.name!r}, but the index allows at most 65535"
            " per side"
        )

    return width, height


def scan_sample(
    read: Read,
    key: str,
    group: list[tuple[str, Member, str]],
    layout: SampleLayout,
    with_checksum: bool = True,
) -> ScannedSample:
    """Read and check the sample formed by `group` of (key, member, kind). Raises InvalidSample."""
    members = tuple(member for _, member, kind in group if kind == FILE)
    by_ext = {member.ext: member for member in members}

    # Links are only needed so that an error can name them. Two links with the same suffix do not
    # make the files invalid.
    links = dict.fromkeys(
        f"{member.ext} is {kind}" for _, member, kind in group if kind not in (FILE, FOLDER)
    )
    suffixes = [member.ext for member in members]
    image = by_ext[layout.find([*suffixes, *links])]

    label = -1
    if layout.label != NO_LABEL:
        label_member = by_ext[layout.label_suffix]
        label = layout.label_of(read(label_member.size, label_member.offset))

    if not image.size:
        raise InvalidSample(f"has an empty image file, {image.name!r}")

    width, height = _size_in_pixels(read, image)
    checksum = crc32c(read(image.size, image.offset)) if with_checksum else 0
    return ScannedSample(
        key, label, width=width, height=height, image=image, members=members, crc32c=checksum
    )


def survey_tar(
    path: Path | str,
    layout: SampleLayout = DEFAULT_LAYOUT,
    left_out: Collection[int] = (),
    with_checksums: bool = True,
) -> Survey:
    """Read the samples of a tar in order, without decoding images.

    Args:
        left_out: The `LeftOut.offset` of each sample that was skipped when the shard was indexed.
            These samples are skipped again.
        with_checksums: Read entire images; otherwise only their headers.

    Raises ShardError if the tar is damaged or truncated, or if no sample matches `layout`. A tar
    without an end marker is accepted if its last sample is valid.
    """
    path = Path(path)
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from error

    try:
        return _survey(fd, path, layout, left_out, with_checksums)
    except TarDamaged as error:
        raise ShardError(f"{path}: {error}; copy or write the shard again") from error
    finally:
        os.close(fd)


def _survey(
    fd: int, path: Path, layout: SampleLayout, left_out: Collection[int], with_checksums: bool
) -> Survey:
    """Do the work of `survey_tar` for an open file. Raises ShardError and TarDamaged."""
    end = os.fstat(fd).st_size
    if not end:
        raise ShardError(f"{path}: the file is empty; copy or write the shard again")

    survey = Survey([], [], Counter())
    last_error = None
    first_unfit: list[tuple[str, Member, str]] = []
    members = _members(pread(fd), end, layout, survey.ignored)
    for key, run in itertools.groupby(members, key=lambda member: member[0]):
        group = list(run)
        first_member = group[0][1]
        if first_member.offset in left_out:
            continue
        last_error = None
        try:
            survey.samples.append(scan_sample(pread(fd), key, group, layout, with_checksums))
        except InvalidSample as error:
            last_error = error
            first_unfit = first_unfit or group
            survey.unfit.append(LeftOut(key, first_member.name, first_member.offset, str(error)))

    # An end marker consists of zeros.
    if last_error is not None and any(os.pread(fd, TAR_BLOCK, max(0, end - TAR_BLOCK))):
        raise ShardError(
            f"{path}: sample {key!r} {last_error}. The shard ends with this sample and has no end"
            " marker, so it is truncated: copy or write it again"
        )

    if survey.samples:
        return survey

    if survey.unfit:
        contents = {
            member.ext: os.pread(fd, min(member.size, MAX_LABEL_BYTES), member.offset)
            for _, member, kind in first_unfit
            if kind == FILE
        }
        order_advice = _advice_on_order(path, survey)
        advice = f". {order_advice}" if order_advice else remedy(contents, layout, FLAGS)
        raise ShardError(f"{path}: {_describe_unfit(survey)}{advice}")

    ignored = f" ({describe_ignored(survey.ignored)})" if survey.ignored else ""
    raise ShardError(
        f"{path}: contains no samples; expected pairs of <key>.jpg and <key>.cls{ignored}; copy"
        " it again, or move it away"
    )


def scan_tar(
    path: Path | str,
    layout: SampleLayout = DEFAULT_LAYOUT,
    left_out: Collection[int] = (),
    with_checksums: bool = True,
) -> list[ScannedSample]:
    """Return the samples of `survey_tar`. Also raises ShardError if a sample is invalid."""
    survey = survey_tar(path, layout, left_out, with_checksums)
    if not survey.unfit:
        return survey.samples

    advice = _advice_on_order(Path(path), survey) or (
        "Repair these samples, or write the shard again without them; `python -m data_prep.index`"
        " skips them"
    )
    raise ShardError(f"{path}: {_describe_unfit(survey)}. {advice}")


def _describe_unfit(survey: Survey) -> str:
    """Describe the first sample that does not match the layout, and count all such samples."""
    first = survey.unfit[0]
    return (
        f"sample {first.key!r} {first.reason} ({len(survey.unfit):,} of"
        f" {len(survey.unfit) + len(survey.samples):,} samples do not fit)"
    )


def _advice_on_order(path: Path, survey: Survey) -> str:
    """Return advice for a tar whose members are grouped by suffix, or "" for any other tar."""
    # If a key begins several unfit samples with different members, its members are not adjacent.
    places = {(left.key, left.name) for left in survey.unfit}
    num_places = Counter(key for key, _ in places)
    keys = [left.key for left in survey.unfit if num_places[left.key] > 1]
    if not keys:
        return ""
    return (
        f"Members of {keys[0]!r} are at several places of this tar, but the members of a sample"
        f" must be adjacent: write it again with `tar --sort=name -cf {path.name} -C FOLDER .`"
    )


def describe_ignored(ignored: Counter[str]) -> str:
    """Describe the members that do not belong to a sample."""
    kinds = ", ".join(f"{kind} ({count:,} times)" for kind, count in sorted(ignored.items()))
    return f"ignored because they are not part of a sample: {kinds}"


def index_rows(samples: list[ScannedSample]) -> np.ndarray:
    """Return the index rows for the samples of one tar, (num_samples,) INDEX_DTYPE."""
    return np.array(
        [(s.crc32c, s.image.size, s.image.offset, s.label, s.width, s.height) for s in samples],
        INDEX_DTYPE,
    )


def write_idx(tar: Path, samples: list[ScannedSample]) -> None:
    """Write `<tar without .tar>.idx`."""
    with replacing(tar.with_suffix(".idx")) as file:
        file.writelines(idx_lines(samples))


def idx_lines(samples: list[ScannedSample]) -> list[bytes]:
    """Return DALI's index v1.2: one line per sample with `ext offset size name` for each member."""
    lines = [f"v1.2 {len(samples)}"]
    for sample in samples:
        fields = (
            f"{idx_name(member.ext)} {member.offset} {member.size} {idx_name(member.name)}"
            for member in sample.members
        )
        lines.append(" ".join(fields))
    return [line.encode() + b"\n" for line in lines]


def idx_name(name: str) -> str:
    """Return a member's name, or a part of it, as written to `.idx`: printable and without spaces.

    DALI splits lines at spaces, so a space in a name would shift the fields.
    """
    return escape_unprinted(BLANK.sub("_", name))


def member_size(header: bytes) -> int:
    """Return the size in bytes of the member after a tar header, or -1 if the header is invalid."""
    try:
        # Every image needs its size. Parsing it directly is 50 times as fast as tarfile.
        return int(header[124:136].rstrip(b"\0 "), 8)
    except ValueError:
        try:
            return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size
        except tarfile.HeaderError:
            return -1
