"""Archives read where they lie: which members there are, and where their bytes begin. Nothing is ever unpacked.

The data's story: of a tar one header after the other is read and the data between them skipped; a tar inside a tar is a range of bytes of
the outer one. A zip has its table of members at its end. Both give batches of names, offsets and sizes for the catalogue; later
`read_zip_member` or `read_range` fetches one image. An archive with absolute names, `..` or links is refused as a whole: nothing here
would follow them, but it is not what it says it is.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.catalogue import Sample, descriptor
from data_prep.jobs import PrepError
from vit.data.files import unreadable

BATCH = 4096
"""Members in one batch."""
MAX_IMAGE_BYTES = 1 << 28
"""An encoded image of more than 256 MiB is refused: it would be a bomb, or no image."""
TAR_BLOCK = 512
AHEAD_BYTES, CLOSE_BYTES = 1 << 16, 1 << 12
"""Bytes read at once where headers are this close together."""
MAX_NAME_BYTES = 1 << 16  # of a GNU long name or a pax header
WEB_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml|head)", re.IGNORECASE)


class Members(NamedTuple):
    """Regular files of an archive, in its order.

    offsets: (len(names),) int64, bytes from the start of the archive: of a tar where the data begin, of a zip the member's own header.
    sizes: (len(names),) int64, bytes of the file itself, not of its compressed form.
    """

    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray


def what_it_is(head: bytes) -> str:
    """In words, what a file that begins with `head` is instead of an archive; empty if that is not known."""
    if WEB_PAGE.match(head):
        return "a web page (a login or an error page was saved in place of the archive)"
    kinds = {b"\x1f\x8b": "compressed with gzip", b"BZh": "compressed with bzip2", b"\xfd7zXZ": "compressed with xz", b"PK": "a zip"}
    return next((kind for magic, kind in kinds.items() if head.startswith(magic)), "")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor for reading. Raises PrepError if the system refuses it, or there is nothing to read."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise PrepError(f"{path}: no such file") from error
    except OSError as error:
        raise PrepError(str(unreadable(path, error))) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PrepError(f"{path}: not a file")
        if os.fstat(fd).st_size == 0:
            raise PrepError(f"{path}: an empty file; copy or download it again")
        yield fd
    finally:
        os.close(fd)


def _check_name(path: Path, name: str) -> None:
    """Raise PrepError for a name that leads out of the folder into which the archive would be unpacked."""
    parts = re.split(r"[/\\]", name)
    if not parts[0] or re.match(r"[A-Za-z]:", name) or ".." in parts:
        raise _refused(path, name, "leads out of the archive")


def _refused(path: Path, name: str, what: str) -> PrepError:
    return PrepError(f"{path}: member {name!r} {what}; such an archive is not taken: get it from its official source")


def _check_names(path: Path, names: list[str]) -> None:
    for name in names:
        if name[:1] in ("", "/", "\\") or ".." in name or ":" in name[1:2]:
            _check_name(path, name)


# ---- tar ----------------------------------------------------------------------------------------------------------------


class _Headers:
    """The headers of (a range of) a tar, read one after the other; a batch of them is then checked and taken apart at once.

    Own arithmetic, because `tarfile` ends silently at a damaged header, and takes ten times as long.
    """

    def __init__(self, fd: int, path: Path, start: int, stop: int):
        self.fd, self.path, self.start, self.stop = fd, path, start, stop
        self.position = start
        self.at_end = False
        self._long_name: str | None = None
        self._long_size: int | None = None

    def damage(self, what: str, position: int) -> PrepError:
        within = "" if self.start == 0 else f" (in the tar inside it that begins at byte {self.start})"
        return PrepError(f"{self.path}: {what} at byte {position} of {self.stop}{within}; copy or download it again and compare its md5")

    def batch(self) -> Members:
        """The next regular files, none at the end. Raises PrepError for what is damaged, cut off or hostile."""
        blocks: list[bytes] = []
        at: list[int] = []
        sizes: list[int] = []
        renamed: dict[int, str] = {}
        stopped: PrepError | None = None
        fd, position, stop, pread = self.fd, self.position, self.stop, os.pread
        ahead, ahead_at = b"", position
        try:
            while len(blocks) < BATCH and not self.at_end:
                block = ahead[position - ahead_at : position - ahead_at + TAR_BLOCK]
                if len(block) < TAR_BLOCK:
                    # Of small files many headers come with one call; between large ones a long read would fetch data that nobody wants.
                    close = bool(at) and position - at[-1] <= CLOSE_BYTES
                    ahead, ahead_at = pread(fd, AHEAD_BYTES if close else TAR_BLOCK, position), position
                    block = ahead[:TAR_BLOCK]
                if len(block) < TAR_BLOCK or position + TAR_BLOCK > stop:
                    raise self.damage("cut off: a header or the end mark is missing", min(position, stop))
                if block[0] == 0 and not any(block):
                    self._expect_zeros(position)
                    self.at_end = True
                    break
                if block[156] == 48 and block[124] < 128 and self._long_name is None and self._long_size is None:  # a plain file ("0")
                    size = int(block[124:136].rstrip(b"\0 ") or b"0", 8)
                    if size < 0 or position + TAR_BLOCK + size > stop:
                        raise ValueError
                    blocks.append(block)
                    at.append(position)
                    sizes.append(size)
                    position += TAR_BLOCK + (size + 511 & -512)
                else:
                    name, offset, size, is_file = self._special(block, position)
                    if is_file:
                        renamed[len(blocks)] = name
                        blocks.append(block)
                        at.append(offset - TAR_BLOCK)
                        sizes.append(size)
                    position = offset + (size + 511 & -512)
        except ValueError as error:  # PrepError is one; the other is told below, if no header before is at fault
            stopped = error if isinstance(error, PrepError) else self._why_not(block, position)
        self.position = position
        names = self._names(blocks, at, renamed)
        if stopped is not None:
            raise stopped
        return Members(names, np.array(at, np.int64) + TAR_BLOCK, np.array(sizes, np.int64))

    def _why_not(self, block: bytes, position: int) -> PrepError:
        """What is wrong with a header that the quick way does not take, or the file behind it."""
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            if position == self.start:
                return self.damage(f"not a tar but {what_it_is(block)}" if what_it_is(block) else f"not a tar ({error})", position)
            return self.damage(f"damaged: no tar header ({error})", position)
        if header.size < 0:
            return self.damage(f"damaged: {header.name!r} has {header.size} bytes", position)
        return self.damage(f"cut off: {header.name!r} of {header.size} bytes begins", position)

    def _special(self, block: bytes, position: int) -> tuple[str, int, int, bool]:
        """(name, offset of the data, their size, whether it is a regular file) of any other header; a long name is kept for the next."""
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise self._why_not(block, position) from None
        offset, size = position + TAR_BLOCK, header.size
        if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
            if not 0 <= size <= MAX_NAME_BYTES:
                raise self.damage(f"damaged: a name of {size} bytes", position)
            self._keep(os.pread(self.fd, min(size, self.stop - offset), offset), header.type == tarfile.XHDTYPE)
            return "", offset, size, False
        if header.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            if not 0 <= size <= MAX_NAME_BYTES:
                raise self.damage(f"damaged: a header of {size} bytes", position)
            return "", offset, size, False
        name = self._long_name or header.name
        size = size if self._long_size is None else self._long_size
        self._long_name = self._long_size = None
        if not (header.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE) or header.isdir()):
            kind = {tarfile.SYMTYPE: "a link", tarfile.LNKTYPE: "a link", tarfile.GNUTYPE_SPARSE: "a sparse file"}
            raise _refused(self.path, name, f"is {kind.get(header.type, 'neither a file nor a folder')}")
        _check_names(self.path, [name])
        if size < 0 or offset + size > self.stop:
            raise self._why_not(block, position)
        return name, offset, 0 if header.isdir() else size, not header.isdir()

    def _keep(self, extra: bytes, pax: bool) -> None:
        """Keep the next member's name (over 100 bytes) and size (over 8 GiB) from its extra header."""
        if not pax:
            self._long_name = extra.rstrip(b"\0").decode("utf-8", "surrogateescape")
            return
        while found := re.match(rb"(\d{1,5}) ([^=]+)=", extra):
            value = extra[found.end() : int(found[1]) - 1]
            if found[2] == b"path":
                self._long_name = value.decode("utf-8", "surrogateescape")
            elif found[2] == b"size" and value.isdigit():
                self._long_size = int(value)
            extra = extra[max(int(found[1]), found.end()) :]

    def _expect_zeros(self, position: int) -> None:
        """Behind the end mark only zeros may follow; else a block was lost, or something was appended."""
        for start in range(position, self.stop, 1 << 20):
            data = os.pread(self.fd, min(1 << 20, self.stop - start), start)
            if data.count(0) != len(data):
                raise self.damage("damaged: zeros instead of a header, with data after them,", position)

    def _names(self, blocks: list[bytes], at: list[int], renamed: dict[int, str]) -> list[str]:
        """Names of a batch of headers, whose checksums are compared here."""
        if not blocks:
            return []
        headers = np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), TAR_BLOCK)
        digits = headers[:, 148:154].astype(np.int64) - 48
        stated = digits @ (8 ** np.arange(5, -1, -1))
        found = headers.sum(1, dtype=np.uint32) - headers[:, 148:156].sum(1, dtype=np.uint32) + 8 * 32  # the field itself counts as blanks
        odd = (found != stated) | (digits < 0).any(1) | (digits > 7).any(1) | (headers[:, 345] != 0)  # 345: a name's first part
        names = np.ascontiguousarray(headers[:, :100]).view("S100").ravel().tolist()
        texts = [name.decode("utf-8", "surrogateescape") for name in names]
        for row in np.flatnonzero(odd).tolist():
            try:
                texts[row] = tarfile.TarInfo.frombuf(blocks[row], "utf-8", "surrogateescape").name
            except tarfile.HeaderError:
                raise self._why_not(blocks[row], at[row]) from None
        for row, name in renamed.items():
            texts[row] = name
        if any("\0" in text for text in texts):
            texts = [text.partition("\0")[0] for text in texts]
        _check_names(self.path, texts)
        return texts


def walk_tar(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Members]:
    """The regular files of a tar, some thousands at a time; or of the tar that lies in the bytes [start, stop) of `path`.

    Reads headers only. Names may be GNU's or pax's long ones; folders are passed over. Raises PrepError, naming file and byte, for what
    is no tar, damaged, cut off (a missing end mark counts as that) or continued behind its end, and for a member that is a link, a
    device, or has an absolute name or `..` in it.
    """
    with _opened(path) as fd:
        headers = _Headers(fd, path, start, os.fstat(fd).st_size if stop is None else stop)
        while not headers.at_end:
            if (members := headers.batch()).names:
                yield members


# ---- zip ----------------------------------------------------------------------------------------------------------------

# Names of the fields as in APPNOTE.TXT (PKWARE), sections 4.3.7, 4.3.12, 4.3.14-16.
LOCAL_HEADER = struct.Struct("<4s2xHH4xIII2H")  # signature, flags, method, crc, compressed, size, name bytes, extra bytes
CENTRAL_HEADER = struct.Struct(
    "<4sBxxxHH4xIII3HHxxII"
)  # signature, made by.., flags, method, crc, sizes, lengths, disk, attributes, offset
END = struct.Struct("<4s4HIIH")
END_64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR_BYTES = 20
STORED, DEFLATED = 0, 8


def _bad_zip(path: Path, what: str) -> PrepError:
    return PrepError(f"{path}: {what}; copy or download it again and compare its size")


def _central_directory(fd: int, path: Path) -> tuple[int, int, int, int]:
    """(offset, bytes, entries, shift) of the table of members; shift: bytes before the zip proper, which its offsets do not count."""
    end = os.fstat(fd).st_size
    tail_at = max(0, end - END.size - 65535)
    tail = os.pread(fd, end - tail_at, tail_at)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or found + END.size > len(tail):
        head = os.pread(fd, 256, 0)
        if head.startswith(b"PK"):
            raise _bad_zip(
                path, "cut off: its table of members, at the end, is missing (one part of a split zip has none either: join the parts)"
            )
        raise _bad_zip(path, f"not a zip but {what_it_is(head)}" if what_it_is(head) else "not a zip")
    _, disk, first_disk, _, entries, num_bytes, offset, comment_bytes = END.unpack_from(tail, found)
    if found + END.size + comment_bytes > len(tail):
        raise _bad_zip(path, "cut off: its comment, at the end, is not whole")
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
        raise _bad_zip(path, f"one of {disk + 1} parts of a split zip; join them first (zip -s 0 SPLIT.zip --out WHOLE.zip)")
    shift = behind - num_bytes - offset
    if shift < 0:
        raise _bad_zip(path, f"cut off or damaged: its table of members should begin at byte {offset} and end before byte {behind}")
    return offset + shift, num_bytes, entries, shift


def _zip64(extra: bytes, values: list[int]) -> list[int]:
    """(size, compressed, offset) with those that are 0xFFFFFFFF taken from the zip64 extra field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = [extra[at : at + 8] for at in range(4, 4 + length, 8)]
            return [int.from_bytes(wide.pop(0), "little") if value == 0xFFFFFFFF and wide else value for value in values]
        extra = extra[4 + length :]
    return values


def walk_zip(path: Path) -> Iterator[Members]:
    """The files of a zip from its table of members, some thousands at a time, with little memory however many there are.

    Raises PrepError for what is no zip, cut off, damaged or in parts, and for members that are encrypted, links, or have an absolute
    name or `..` in it. The way in which members are compressed is looked at by `read_zip_member`.
    """
    with _opened(path) as fd:
        at, num_bytes, entries, shift = _central_directory(fd, path)
        if entries == 0:
            return
        page = at % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(fd, page + num_bytes, access=mmap.ACCESS_READ, offset=at - page) as table:
            position, read = page, 0
            while read < entries:
                members, position, count = _zip_batch(path, table, position, min(BATCH, entries - read), shift)
                read += count
                if members.names:
                    yield members


def _zip_batch(path: Path, table: mmap.mmap, position: int, count: int, shift: int) -> tuple[Members, int, int]:
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for _ in range(count):
        if position + CENTRAL_HEADER.size > len(table) or table[position : position + 4] != b"PK\1\2":
            raise _bad_zip(path, f"damaged: its table of members breaks off after {names[-1] if names else 'its beginning'!r}")
        fields = CENTRAL_HEADER.unpack_from(table, position)
        _, _, flags, _, _, compressed, size, name_bytes, extra_bytes, comment_bytes, _, attributes, offset = fields
        start = position + CENTRAL_HEADER.size
        position = start + name_bytes + extra_bytes + comment_bytes
        name = table[start : start + name_bytes].decode("utf-8" if flags & 0x800 else "cp437", "surrogateescape")
        if 0xFFFFFFFF in (size, compressed, offset):
            extra = table[start + name_bytes : start + name_bytes + extra_bytes]
            size, compressed, offset = _zip64(extra, [size, compressed, offset])
        if size >> 62 or offset >> 62:
            raise _bad_zip(path, f"damaged: {name!r} has {size} bytes at byte {offset}")
        if stat.S_ISLNK(attributes >> 16):
            raise _refused(path, name, "is a link")
        if flags & 1:
            raise PrepError(f"{path}: member {name!r} is encrypted; expected a zip without a password")
        names.append(name)
        offsets.append(offset + shift)
        sizes.append(size)
    _check_names(path, names)
    files = [row for row, name in enumerate(names) if not name.endswith("/")]
    found = Members([names[row] for row in files], np.array(offsets, np.int64)[files], np.array(sizes, np.int64)[files])
    return found, position, count


def read_zip_member(sample: Sample) -> bytes:
    """The `size` bytes of the zip member whose own header is at `offset`, inflated if need be, their CRC compared.

    Raises OSError, and ValueError(reason) for damage, another compression than deflate, or a member that is longer than the table of
    members said, of which no more than `size` bytes are inflated.
    """
    if sample.size > MAX_IMAGE_BYTES:
        raise ValueError(f"{sample.size:,} bytes; at most {MAX_IMAGE_BYTES:,} are taken for an image")
    fd = descriptor(sample.file)
    guess = 30 + len(sample.name) + 64 + sample.size + sample.size // 1000 + 256  # deflate lengthens by less; most extra fields are short
    head = os.pread(fd, guess, sample.offset)
    if len(head) < LOCAL_HEADER.size or head[:4] != b"PK\3\4":
        raise ValueError(f"{sample.file} has no member at byte {sample.offset}; it has changed or is damaged")
    _, flags, method, crc, _, _, name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(head)
    start = LOCAL_HEADER.size + name_bytes + extra_bytes
    if method == STORED:
        end = start + sample.size
        if len(head) < end + 16:
            head = os.pread(fd, end + 16, sample.offset)
        data, behind = head[start:end], head[end : end + 16]
    elif method == DEFLATED:
        data, behind = _inflate(fd, sample, head, start)
    else:
        raise ValueError(f"compressed by method {method}; expected a zip with deflate (8) or none (0)")
    if flags & 8:  # sizes and CRC follow the data; their signature may be left out
        crc = int.from_bytes(behind[4:8] if behind[:4] == b"PK\7\x08" else behind[:4], "little")
    if len(data) != sample.size or zlib.crc32(data) != crc:
        raise ValueError(f"damaged inside {sample.file}: its CRC is not as stated")
    return data


def _inflate(fd: int, sample: Sample, head: bytes, start: int) -> tuple[bytes, bytes]:
    """(data, the first bytes behind it); no more than one byte over `size` is inflated."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    position, compressed, data = sample.offset + max(len(head), start), head[start:], b""
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
