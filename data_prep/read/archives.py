"""Archives read in place: which members there are, and where their bytes begin.

Of a tar one header after the other is read and the data between them skipped; a tar inside a tar is
a range of bytes of the outer one. A zip has its table of members at its end. Both give batches of
names, offsets and sizes for the catalogue; later `read_zip_member` or `read_range` reads one image.
An archive with absolute names, `..` or links is refused: nothing here would follow them, but it is
not the official one.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError, readable
from data_prep.read.image_tree import MAX_IMAGE_BYTES
from data_prep.write.samples import Sample, descriptor
from vit.data.shards.tar_walk import (
    FILE,
    FOLDER,
    TarDamaged,
    TarMember,
    describe_content,
    pread,
    walk,
)

BATCH = 4096
"""Members in one batch."""


class Members(NamedTuple):
    """Regular files of an archive, in its order.

    offsets: (len(names),) int64, bytes from the start of the archive: of a tar where the data
        begin, of a zip the member's own header.
    sizes: (len(names),) int64, bytes of the file itself, not of its compressed form.
    """

    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor for reading. Raises PrepError if the file is unreadable or empty."""
    with readable(path):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise PrepError(f"{path}: no such file") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PrepError(f"{path}: not a file")
        if os.fstat(fd).st_size == 0:
            raise PrepError(f"{path}: an empty file; copy or download it again")
        yield fd
    finally:
        os.close(fd)


def _check_name(path: Path, name: str) -> None:
    """Raise PrepError for a name outside the folder into which the archive would be unpacked."""
    if name[:1] not in ("", "/", "\\") and ".." not in name and ":" not in name[1:2]:  # nearly all
        return
    parts = re.split(r"[/\\]", name)
    if not parts[0] or re.match(r"[A-Za-z]:", name) or ".." in parts:
        raise _refused(path, name, "leads out of the archive")


def _refused(path: Path, name: str, what: str) -> PrepError:
    return PrepError(
        f"{path}: member {name!r} {what}; such an archive is not accepted: get it from its"
        " official source"
    )


# ---- tar -----------------------------------------------------------------------------------------


def walk_tar(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Members]:
    """The regular files of a tar, some thousands at a time.

    start, stop: the bytes of `path` that are the tar. Only headers are read. Names may be GNU's or
    pax's long ones; folders are skipped. Raises PrepError, with file and byte, for a file that is
    no tar, damaged, cut off (also without its end marker) or continued after its end, and for a
    member that is a link or a device, or has an absolute name or `..` in it.
    """
    with _opened(path) as fd:
        members = walk(pread(fd), start, os.fstat(fd).st_size if stop is None else stop)
        files = (member for member in members if _is_file(path, member))
        try:
            while batch := list(itertools.islice(files, BATCH)):
                names, offsets, sizes, _ = zip(*batch, strict=True)
                yield Members(list(names), np.array(offsets, np.int64), np.array(sizes, np.int64))
        except TarDamaged as error:
            within = "" if start == 0 else f" (in the tar inside it that begins at byte {start})"
            raise PrepError(
                f"{path}: {error}{within}; copy or download it again and compare its md5"
            ) from error


def _is_file(path: Path, member: TarMember) -> bool:
    """Whether it is a file, not a folder. Raises PrepError for anything else, and bad names."""
    name, *_, kind = member
    if kind not in (FILE, FOLDER):
        raise _refused(path, name, f"is {kind}")
    _check_name(path, name)
    return kind == FILE


# ---- zip -----------------------------------------------------------------------------------------

# Names of the fields as in APPNOTE.TXT (PKWARE), sections 4.3.7, 4.3.12, 4.3.14-16.
# signature, flags, method, crc, compressed, size, name bytes, extra bytes
LOCAL_HEADER = struct.Struct("<4s2xHH4xIII2H")
CENTRAL_HEADER = struct.Struct(
    "<4sBxxxHH4xIII3HHxxII"
)  # signature, made by.., flags, method, crc, sizes, lengths, disk, attributes, offset
END = struct.Struct("<4s4HIIH")
END_64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR_BYTES = 20
STORED = 0
DEFLATED = 8


def _bad_zip(path: Path, what: str) -> PrepError:
    return PrepError(f"{path}: {what}; copy or download it again and compare its size")


def _central_directory(fd: int, path: Path) -> tuple[int, int, int, int]:
    """(offset, bytes, entries, shift) of the table of members.

    shift: bytes before the actual zip, which its offsets do not count.
    """
    end = os.fstat(fd).st_size
    tail_at = max(0, end - END.size - 65535)
    tail = os.pread(fd, end - tail_at, tail_at)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or found + END.size > len(tail):
        head = os.pread(fd, 256, 0)
        if head.startswith(b"PK"):
            raise _bad_zip(
                path,
                "cut off: its table of members, at the end, is missing (one part of a split zip has"
                " none either: join the parts)",
            )
        raise _bad_zip(
            path,
            f"not a zip but {describe_content(head)}" if describe_content(head) else "not a zip",
        )
    _, disk, first_disk, _, entries, num_bytes, offset, comment_bytes = END.unpack_from(tail, found)
    if found + END.size + comment_bytes > len(tail):
        raise _bad_zip(path, "cut off: its comment, at the end, is incomplete")
    behind = tail_at + found
    if 0xFFFF in (disk, entries) or 0xFFFFFFFF in (num_bytes, offset):
        locator = os.pread(fd, LOCATOR_BYTES, max(0, behind - LOCATOR_BYTES))
        if locator[:4] == b"PK\6\7":
            behind -= LOCATOR_BYTES + END_64.size
            record = os.pread(fd, END_64.size, max(0, behind))
            if len(record) < END_64.size or record[:4] != b"PK\6\6":
                raise _bad_zip(path, "damaged: its zip64 record is missing")
            _, _, _, _, disk, first_disk, _, entries, num_bytes, offset = END_64.unpack(record)
    if disk or first_disk:
        raise _bad_zip(
            path,
            f"one of {disk + 1} parts of a split zip; join them first (zip -s 0 SPLIT.zip --out"
            " WHOLE.zip)",
        )
    shift = behind - num_bytes - offset
    if shift < 0:
        raise _bad_zip(
            path,
            f"cut off or damaged: its table of members should begin at byte {offset} and end before"
            f" byte {behind}",
        )
    return offset + shift, num_bytes, entries, shift


def _zip64(extra: bytes, values: list[int]) -> list[int]:
    """(size, compressed, offset), with those that are 0xFFFFFFFF from the zip64 extra field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = [extra[at : at + 8] for at in range(4, 4 + length, 8)]
            return [
                int.from_bytes(wide.pop(0), "little") if value == 0xFFFFFFFF and wide else value
                for value in values
            ]
        extra = extra[4 + length :]
    return values


def walk_zip(path: Path) -> Iterator[Members]:
    """The files of a zip from its table of members, some thousands at a time, in constant memory.

    Raises PrepError for a file that is not a zip, is cut off, damaged or split, and for members
    that are encrypted or links, or have an absolute name or `..` in it. `read_zip_member` checks
    the compression method.
    """
    with _opened(path) as fd:
        at, num_bytes, entries, shift = _central_directory(fd, path)
        if entries == 0:
            return
        page = at % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(fd, page + num_bytes, access=mmap.ACCESS_READ, offset=at - page) as table:
            position = page
            read = 0
            while read < entries:
                members, position, count = _zip_batch(
                    path, table, position, min(BATCH, entries - read), shift
                )
                read += count
                if members.names:
                    yield members


def _zip_batch(
    path: Path, table: mmap.mmap, position: int, count: int, shift: int
) -> tuple[Members, int, int]:
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for _ in range(count):
        if (
            position + CENTRAL_HEADER.size > len(table)
            or table[position : position + 4] != b"PK\1\2"
        ):
            raise _bad_zip(
                path,
                "damaged: its table of members breaks off after"
                f" {names[-1] if names else 'its beginning'!r}",
            )
        fields = CENTRAL_HEADER.unpack_from(table, position)
        (
            _,
            _,
            flags,
            _,
            _,
            compressed,
            size,
            name_bytes,
            extra_bytes,
            comment_bytes,
            _,
            attributes,
            offset,
        ) = fields
        start = position + CENTRAL_HEADER.size
        position = start + name_bytes + extra_bytes + comment_bytes
        name = table[start : start + name_bytes].decode(
            "utf-8" if flags & 0x800 else "cp437", "surrogateescape"
        )
        if 0xFFFFFFFF in (size, compressed, offset):
            extra = table[start + name_bytes : start + name_bytes + extra_bytes]
            size, compressed, offset = _zip64(extra, [size, compressed, offset])
        if size >> 62 or offset >> 62:
            raise _bad_zip(path, f"damaged: {name!r} has {size} bytes at byte {offset}")
        if stat.S_ISLNK(attributes >> 16):
            raise _refused(path, name, "is a link")
        if flags & 1:
            raise PrepError(
                f"{path}: member {name!r} is encrypted; expected a zip without a password"
            )
        names.append(name)
        offsets.append(offset + shift)
        sizes.append(size)
    for name in names:
        _check_name(path, name)
    files = [row for row, name in enumerate(names) if not name.endswith("/")]
    found = Members(
        [names[row] for row in files],
        np.array(offsets, np.int64)[files],
        np.array(sizes, np.int64)[files],
    )
    return found, position, count


def read_zip_member(sample: Sample) -> bytes:
    """The `size` bytes of the zip member whose own header is at `offset`, inflated and verified.

    Raises OSError, and ValueError(reason) for damage, another compression than deflate, or a member
    longer than in the table of members, of which no more than `size` bytes are inflated.
    """
    if sample.size > MAX_IMAGE_BYTES:
        raise ValueError(
            f"{sample.size:,} bytes; at most {MAX_IMAGE_BYTES:,} are taken for an image"
        )
    fd = descriptor(sample.file)
    # deflate lengthens by less; most extra fields are short
    guess = 30 + len(sample.name) + 64 + sample.size + sample.size // 1000 + 256
    head = os.pread(fd, guess, sample.offset)
    if len(head) < LOCAL_HEADER.size or head[:4] != b"PK\3\4":
        raise ValueError(
            f"{sample.file} has no member at byte {sample.offset}; it has changed or is damaged"
        )
    _, flags, method, crc, _, _, name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(head)
    start = LOCAL_HEADER.size + name_bytes + extra_bytes
    if method == STORED:
        end = start + sample.size
        if len(head) < end + 16:
            head = os.pread(fd, end + 16, sample.offset)
        data = head[start:end]
        behind = head[end : end + 16]
    elif method == DEFLATED:
        data, behind = _inflate(fd, sample, head, start)
    else:
        raise ValueError(
            f"compressed by method {method}; expected a zip with deflate (8) or none (0)"
        )
    if flags & 8:  # sizes and CRC follow the data; their signature may be left out
        crc = int.from_bytes(behind[4:8] if behind[:4] == b"PK\7\x08" else behind[:4], "little")
    if len(data) != sample.size or zlib.crc32(data) != crc:
        raise ValueError(f"damaged inside {sample.file}: its CRC is not as stated")
    return data


def _inflate(fd: int, sample: Sample, head: bytes, start: int) -> tuple[bytes, bytes]:
    """(data, the first bytes after it); no more than one byte over `size` is inflated."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    position = sample.offset + max(len(head), start)
    compressed = head[start:]
    data = b""
    try:
        while True:
            data += inflater.decompress(compressed, sample.size + 1 - len(data))
            if inflater.eof or len(data) > sample.size:
                break
            if not (compressed := inflater.unconsumed_tail):
                compressed = os.pread(fd, 65536, position)
                position += len(compressed)
                if not compressed:
                    raise ValueError(f"{sample.file} ends inside the image")
    except zlib.error as error:
        raise ValueError(f"damaged inside {sample.file}: {error}") from error
    if len(data) > sample.size:
        raise ValueError(f"inflates to more than its {sample.size:,} stated bytes")
    behind = inflater.unused_data
    return data, behind if len(behind) >= 16 else behind + os.pread(fd, 16, position)
