"""The members of a tar, from bytes that come in order: of a file, of a part of one, or of a stream.
Free of torch.

The data's story: one header after the other is read and its checksum compared; the data between
them are skipped, and whoever walks reads what he wants of them on the way. Long names (GNU's and
pax's) are put in their place. What is no tar, damaged, cut off or continued behind its end is told
with its place; links and devices are told as such.

Own arithmetic, because `tarfile` ends silently at a damaged header: the samples after it would be
lost. It also takes ten times as long.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

TAR_BLOCK = 512
"""Bytes; every header and every start of data in a tar lies on a multiple of this."""
AHEAD_BYTES = 1 << 16
CLOSE_BYTES = 1 << 12
"""Bytes read at once where headers are this close together."""
MAX_NAME_BYTES = 1 << 16
"""Of a GNU long name or a pax header."""
FILE = "a file"
FOLDER = "a folder"
KINDS = {
    **dict.fromkeys((tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE), FILE),
    tarfile.DIRTYPE: FOLDER,
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
WITHOUT_DATA = (
    tarfile.DIRTYPE,
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
)
"""Whatever their headers say."""
WEB_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml|head)", re.IGNORECASE)
COMPRESSED = {
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PK": "a zip",
}


class TarDamaged(ValueError):
    """No tar, damaged, cut off, or continued behind its end; says what, and at which byte."""


class TarMember(NamedTuple):
    """One member: `size` bytes that begin at `offset` of the file or stream. kind: FILE, FOLDER, or
    in words what else it is."""

    name: str
    offset: int
    size: int
    kind: str


Read = Callable[[int, int], bytes]
"""(size, position) -> the bytes there, fewer at the end, as `os.pread` gives them; positions never
go back."""


def describe_content(head: bytes) -> str:
    """In words, what a file that begins with `head` is instead of an archive; empty if that is not
    known."""
    if WEB_PAGE.match(head):
        return "a web page (a login or an error page was saved in place of the archive)"
    return next((kind for magic, kind in COMPRESSED.items() if head.startswith(magic)), "")


def pread(descriptor: int) -> Read:
    """How a file is read."""
    return lambda size, position: os.pread(descriptor, size, position)


class Readable(Protocol):
    """A stream."""

    def read(self, size: int, /) -> bytes: ...


def in_order(stream: Readable) -> Read:
    """How a stream is read: what lies before the last position is forgotten."""
    held = b""
    start = 0

    def read(size: int, position: int) -> bytes:
        nonlocal held, start
        while position > start + len(held):
            start += len(held)
            held = stream.read(min(position - start, 1 << 20))
            if not held:
                return b""
        pieces = [held[position - start :]]
        start = position
        missing = size - len(pieces[0])
        while missing > 0 and (piece := stream.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        held = b"".join(pieces)
        return held[:size]

    return read


class _WithHead:
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, stream: Readable):
        self._head = head
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        head = self._head[:size]
        self._head = self._head[size:]
        return head or self._stream.read(size)


def decompressed(stream: Readable) -> Readable:
    """The stream itself, or what is in it if it is compressed with gzip, bzip2 or xz."""
    head = in_order(stream)(6, 0)
    whole: Any = _WithHead(head, stream)
    kinds: dict[bytes, Any] = {
        b"\x1f\x8b": partial(gzip.GzipFile, fileobj=whole),
        b"BZh": partial(bz2.open, whole),
        b"\xfd7zXZ": partial(lzma.open, whole),
    }
    return next((make() for magic, make in kinds.items() if head.startswith(magic)), whole)


def walk(
    read: Read, start: int = 0, stop: int | None = None, *, needs_end: bool = True
) -> Iterator[TarMember]:
    """The members of the tar in the bytes [start, stop), or up to its end mark where `stop` is not
    known, in order.

    needs_end: raise where the end mark is missing. Raises TarDamaged.
    """
    # name and size: what an extra header said of the next member
    position = start
    name = ""
    size = -1
    before = start - 2 * CLOSE_BYTES
    ahead = b""
    ahead_at = start

    def damaged(what: str) -> TarDamaged:
        return TarDamaged(f"{what} at byte {position}{'' if stop is None else f' of {stop}'}")

    while True:
        block = ahead[position - ahead_at : position - ahead_at + TAR_BLOCK]
        if len(block) < TAR_BLOCK:
            # Of small files many headers come with one call; between large ones a long read would
            # fetch data that nobody wants.
            size_ahead = AHEAD_BYTES if position - before <= CLOSE_BYTES else TAR_BLOCK
            ahead = read(
                size_ahead if stop is None else max(0, min(size_ahead, stop - position)), position
            )
            ahead_at = position
            block = ahead[:TAR_BLOCK]
        if len(block) < TAR_BLOCK and not needs_end and position > start and not any(block):
            return
        if len(block) < TAR_BLOCK or (stop is not None and position + TAR_BLOCK > stop):
            raise damaged("cut off: a header or the end mark is missing")
        if block[0] == 0 and not any(block):
            _expect_zeros(read, position, stop, damaged)
            return
        before = position
        offset = position + TAR_BLOCK
        try:
            # A file ("0") with nothing unusual, some 10 times as fast. Its checksum is the sum of
            # all bytes, its own counted as blanks: the lower half of Adler-32 is that sum, plus 1,
            # modulo 65521.
            is_plain = block[156] == 48 and block[124] < 128 and not block[345]
            field = block[148:156]
            if (
                is_plain
                and (int(field.split(b"\0", 1)[0], 8) - 8 * 32 + sum(field) + 1) % 65521
                == zlib.adler32(block) & 0xFFFF
            ):
                found = FILE
                own_size = int(block[124:136].strip(b"\0 ") or b"0", 8)
                own_name = block[:100].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
            else:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
                own_name = header.name
                own_size = 0 if header.type in WITHOUT_DATA else header.size
                found = KINDS.get(header.type, "a device or a pipe")
                if header.type in (
                    tarfile.GNUTYPE_LONGNAME,
                    tarfile.XHDTYPE,
                    tarfile.XGLTYPE,
                    tarfile.GNUTYPE_LONGLINK,
                ):
                    if not 0 <= own_size <= MAX_NAME_BYTES:
                        raise damaged(f"damaged: a header of {own_size} bytes")
                    extra = read(own_size, offset)
                    if header.type == tarfile.GNUTYPE_LONGNAME:
                        name = extra.rstrip(b"\0").decode("utf-8", "surrogateescape")
                    elif header.type == tarfile.XHDTYPE:
                        name, size = _pax(extra, name, size)
                    position = offset + (own_size + 511 & -512)
                    continue
        except (ValueError, tarfile.HeaderError) as error:
            if isinstance(error, TarDamaged):
                raise
            other = describe_content(block)
            no_tar = f"not a tar but {other}" if other else f"not a tar ({error})"
            raise damaged(
                no_tar if position == start else f"damaged: no tar header ({error})"
            ) from error
        name = name or own_name
        size = own_size if size < 0 else size
        if size < 0:
            raise damaged(f"damaged: {name!r} has {size} bytes")
        if stop is not None and offset + size > stop:
            raise damaged(f"cut off: {name!r} of {size} bytes begins")
        yield TarMember(name, offset, size, found)
        position = offset + (size + 511 & -512)
        name = ""
        size = -1


def _expect_zeros(
    read: Read, position: int, stop: int | None, damaged: Callable[[str], TarDamaged]
) -> None:
    """Behind the end mark only zeros may follow; else a header was lost, or something was
    appended."""
    while (
        data := read((1 << 20) if stop is None else min(1 << 20, stop - position), position)
    ) and (stop is None or position < stop):
        if data.count(0) != len(data):
            raise damaged(
                "damaged: zeros instead of a header, with data after them (a lost header, or"
                " several tars as one),"
            )
        position += len(data)


def _pax(extra: bytes, name: str, size: int) -> tuple[str, int]:
    """The name and size that a pax header says, else those that were known."""
    while found := re.match(rb"(\d{1,5}) ([^=]+)=", extra):
        value = extra[found.end() : int(found[1]) - 1]
        if found[2] == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif found[2] == b"size" and value.isdigit():
            size = int(value)
        extra = extra[max(int(found[1]), found.end()) :]
    return name, size
