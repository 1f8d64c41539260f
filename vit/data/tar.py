"""One shard: a plain tar, scanned into samples and index rows. Free of torch.

The data's story: headers are walked one after the other; members of one key make a sample; of its image the head is read for the size in
pixels, of its `.cls` the label; no image is decoded. What is truncated or made wrongly is named with file and sample.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit.data.files import ShardError, replacing, unreadable
from vit.data.jpeg import MAX_PIXELS, read_header

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
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TAR_BLOCK = 512  # bytes; every header and every start of data in a tar lies on a multiple of this


class Member(NamedTuple):
    """One file inside a tar. `offset` and `size` are bytes; `ext` is lower case and begins after the first dot."""

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


# webdataset's own rule (tariterators.base_plus_ext): the extension begins at the first dot after the last slash.
KEY_AND_EXT = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")


def _walk_tar(fd: int, path: Path) -> Iterator[tuple[str, Member]]:
    """(key, member) of each regular file of a tar, in order; reads headers only.

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
            named = KEY_AND_EXT.fullmatch(name)
            if header.isreg() and named:  # webdataset passes over the others as well
                yield named[1], Member(named[2].lower(), offset, header.size, name)
        position = offset + -(-header.size // TAR_BLOCK) * TAR_BLOCK


def _image_size(fd: int, image: Member) -> tuple[int, int]:
    """(width, height) in pixels, from the first 16 KiB if they suffice: most headers are short, most images are not."""
    for num_bytes in (min(16384, image.size), image.size):
        data = os.pread(fd, num_bytes, image.offset)
        try:
            header = read_header(data)  # an eighth of Pillow's time
            if header.precision == 8 and header.num_components in (1, 3, 4) and header.width * header.height <= MAX_PIXELS:
                return header.width, header.height
        except ValueError:
            pass  # another format, an odd JPEG, or one whose headers are longer
        try:
            with Image.open(io.BytesIO(data)) as opened:
                width, height = opened.size
                break
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            if num_bytes == image.size:
                reason = "no image Pillow knows" if isinstance(error, Image.UnidentifiedImageError) else error
                raise ShardError(f"cannot read the size of {image.name!r}: {reason}") from error
    if max(width, height) > np.iinfo(np.uint16).max:
        raise ShardError(f"{image.name!r} is {width} x {height} pixels; at most 65535 fit the index")
    return width, height


def _scan_sample(fd: int, key: str, members: tuple[Member, ...]) -> ScannedSample:
    """Check and read one sample's members. Raises ShardError without the name of the tar."""
    by_ext = {member.ext: member for member in members}
    images = [member for member in members if member.ext in IMAGE_EXTENSIONS]
    found = f"(its members: {', '.join(member.ext for member in members)})"
    if len(by_ext) < len(members):
        raise ShardError(f"sample {key!r} has an extension twice, or two samples have this key {found}")
    if len(images) != 1:
        raise ShardError(f"sample {key!r} has {len(images) or 'no'} images {found}; expected one of {', '.join(IMAGE_EXTENSIONS)}")
    if "cls" not in by_ext:
        raise ShardError(f"sample {key!r} has no .cls {found}")
    label = os.pread(fd, by_ext["cls"].size, by_ext["cls"].offset).strip()
    if not re.fullmatch(rb"-?\d{1,9}", label):
        raise ShardError(f"label of sample {key!r} is {label[:40]!r}; expected an integer")
    width, height = _image_size(fd, images[0])
    return ScannedSample(key, int(label), width, height, images[0], members)


def scan_tar(path: Path | str) -> list[ScannedSample]:
    """The samples of a tar, in order, from its headers, its labels and the heads of its images; no image is decoded.

    Raises ShardError, naming the file and every sample at fault, when the tar is truncated or damaged, a sample lacks its
    image (jpg, jpeg, png, webp) or its `.cls`, or a label is no integer. A tar without end-of-archive blocks is accepted
    if its last sample is complete.
    """
    path = Path(path)
    samples: list[ScannedSample] = []
    problems: list[str] = []
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        for key, members in itertools.groupby(_walk_tar(fd, path), key=lambda found: found[0]):
            try:
                samples.append(_scan_sample(fd, key, tuple(member for _, member in members)))
            except ShardError as error:
                problems.append(str(error))
    finally:
        os.close(fd)
    if not samples and not problems:
        problems.append("holds no samples; expected pairs of <key>.jpg and <key>.cls")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ShardError(f"{path}: {'; '.join(problems[:5])}{more}. Truncated or made wrongly: copy or write the shard again")
    return samples


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
