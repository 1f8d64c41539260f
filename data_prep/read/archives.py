"""Read archives in place: list their members with byte positions.

A tar is read from header to header, skipping the data. A tar inside a tar is a byte range of the
outer tar. A zip has a central directory at its end. The catalog stores names, offsets and sizes,
which `read_zip_member` and `read_range` later use to read single images. Archives that contain
absolute names, `..` or links are rejected, because official archives contain none.
"""

import bz2
import gzip
import io
import itertools
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data_prep.errors import PrepError, readable
from data_prep.write.samples import Sample, descriptor, read_range
from vit.data.decode.content import describe_content
from vit.data.decode.image_files import MAX_IMAGE_BYTES
from vit.data.shards.tar_walk import FILE, FOLDER, TarDamaged, TarMember, pread, walk
from vit.system.files import replacing
from vit.system.meter import Meter

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, tarfile.TarError)
"""The exceptions that damaged compressed data may raise."""
OPENERS: dict[bytes, Callable[[BinaryIO], io.BufferedIOBase]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
"""Maps the first bytes of a compressed file to the function that opens it."""
BATCH = 4096


class Members(NamedTuple):
    """A batch of regular files, in archive order.

    offsets: (len(names),) int64, the position of the data in a tar, or of the member's local header
        in a zip.
    sizes: (len(names),) int64, the uncompressed size of each file in bytes.
    """

    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray


def walk_archive(path: Path) -> tuple[Iterator[Members], Callable[[Sample], bytes]]:
    """Return the files of a zip or tar, and a function that reads a single file.

    The first bytes determine the type. Raises PrepError for other types, and the errors of
    `walk_zip` and `walk_tar`.
    """
    head = _head(path)
    if head.startswith(b"PK") or path.suffix.lower() == ".zip":
        return walk_zip(path), read_zip_member
    if kind := describe_content(head):
        raise PrepError(f"{path}: expected a zip or a tar, found {kind}; download the file again")
    return walk_tar(path), read_range


def is_compressed_tar(path: Path) -> bool:
    """Return whether a file is a compressed tar, which must be decompressed before reading."""
    return any(_head(path).startswith(magic) for magic in OPENERS)


def inflate_tar(path: Path) -> Path:
    """Decompress a .tar.gz, .tar.bz2 or .tar.xz into the same folder, and return the tar's path.

    An existing tar is reused. Progress goes to stderr. Raises PrepError if the archive is damaged,
    or if the modification time of an existing tar differs from that of the archive.
    """
    stem = path.name.removesuffix(path.suffix)
    tar = path.with_name(stem if stem.endswith(".tar") else f"{stem}.tar")

    # Like gzip, give the tar the archive's modification time. A later run compares the two times.
    modified_ns = path.stat().st_mtime_ns
    if tar.exists():
        if tar.stat().st_mtime_ns != modified_ns:
            raise PrepError(
                f"{tar}: its modification time differs from that of {path.name}, so the images may"
                " differ: remove this tar, or pass it as SOURCE instead"
            )
        return tar

    opener = next(opener for magic, opener in OPENERS.items() if _head(path).startswith(magic))
    with (
        open(path, "rb") as file,
        opener(file) as inflated,
        replacing(tar) as out,
        Meter(f"inflating {path.name}", path.stat().st_size // 1_000_000, "MB") as meter,
    ):
        while True:
            with readable(path, DAMAGE, "damaged, or cut off"):  # not raised for a full disk
                data = inflated.read(1 << 22)
            if not data:
                out.flush()
                os.utime(out.fileno(), ns=(modified_ns, modified_ns))
                return tar
            out.write(data)
            meter.update(file.tell() // 1_000_000)


def _head(path: Path) -> bytes:
    with readable(path), open(path, "rb") as file:
        return file.read(256)


def _check_name(path: Path, name: str) -> None:
    """Raise PrepError if a name is absolute or contains `..`."""
    # This test is fast and accepts most names.
    is_relative = name[:1] not in ("", "/", "\\") and ":" not in name[1:2]
    if is_relative and ".." not in name:
        return

    parts = re.split(r"[/\\]", name)
    is_absolute = not parts[0] or re.match(r"[A-Za-z]:", name)
    if is_absolute or ".." in parts:
        raise _refused(path, name, "leads out of the archive")


def _refused(path: Path, name: str, problem: str) -> PrepError:
    return PrepError(
        f"{path}: member {name!r} {problem}; unsafe archives are not accepted: get the archive from"
        " its official source"
    )


# ---- tar -----------------------------------------------------------------------------------------


def walk_tar(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Members]:
    """Yield the regular files of a tar in batches, reading only headers.

    start, stop: the byte range of the tar in `path`. Long GNU and pax names are supported, and
    folders are skipped. Raises PrepError with the file and byte position for a file that is not a
    tar, is damaged, is truncated (even if only the end marker is missing) or has data after its
    end. Links, devices, absolute names and `..` raise PrepError too.
    """
    with readable(path), open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size if stop is None else stop
        files = (
            member for member in walk(pread(file.fileno()), start, end) if _is_file(path, member)
        )

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
    """Return True for a file, False for a folder. Raises PrepError for links and invalid names."""
    name, *_, kind = member
    if kind not in (FILE, FOLDER):
        raise _refused(path, name, f"is {kind}")
    _check_name(path, name)
    return kind == FILE


def small_members(
    path: Path, needed: Container[str], most_members: int, most_bytes: int, expected: str
) -> Iterator[tuple[str, bytes]]:
    """Yield (bare name, content) for each file in a tar or tar.gz.

    The content is b"" for files not in `needed`. Raises PrepError for a damaged archive, and if the
    archive has more or larger members than the `expected` one, such as "a CIFAR archive".
    """
    kind = describe_content(_head(path))
    problem = "not a tar or tar.gz, damaged or truncated"
    if kind and not kind.startswith("compressed"):
        problem = f"not a tar or tar.gz but {kind}"

    with readable(path, DAMAGE, problem), tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            if member.size > most_bytes or number == most_members:
                raise PrepError(
                    f"{path}: contains {member.name!r} ({member.size:,} bytes) after {number} other"
                    f" members, unlike {expected}: check the path"
                )

            name = Path(member.name).name
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield name, file.read() if name in needed else b""


# ---- zip -----------------------------------------------------------------------------------------

# APPNOTE.TXT (PKWARE), section 4.3.7: signature, flags, method, crc, compressed, size, name bytes,
# extra bytes
LOCAL_HEADER = struct.Struct("<4s2xHH4xIII2H")
HAS_DESCRIPTOR = 8
"""The flag of members whose CRC and sizes follow their data."""
DESCRIPTOR_BYTES = 16
"""The size in bytes of the CRC and the sizes after a member's data, including a signature."""
MARGIN_BYTES = 320
"""The number of bytes to read in addition to a member's data, for extra fields and for values after
the data. One read then suffices for most members."""


def walk_zip(path: Path) -> Iterator[Members]:
    """Yield the files in the central directory of a zip in batches.

    The whole directory is loaded, which takes 0.7 kB of memory per member. If no name has a slash,
    backslashes separate folders, because some Windows tools write them. Raises PrepError for a file
    that is not a zip, or is truncated, damaged or split. Encrypted members, links, absolute names
    and `..` raise PrepError too. `read_zip_member` checks the compression method.
    """
    kind = describe_content(_head(path))
    try:
        with zipfile.ZipFile(path) as archive:
            table = archive.infolist()
        if any(member.header_offset < 0 for member in table):
            raise zipfile.BadZipFile("its beginning is missing")
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        problem = f"not a zip but {kind}" if kind not in ("", "a zip") else "not a complete zip"
        raise PrepError(
            f"{path}: {problem} ({error}); copy or download it again and compare its size"
        ) from error

    if not any("/" in member.filename for member in table):
        for member in table:
            member.filename = member.filename.replace("\\", "/")

    for start in range(0, len(table), BATCH):
        batch = table[start : start + BATCH]
        for member in batch:
            _check_name(path, member.orig_filename)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise _refused(path, member.filename, "is a link")
            if member.flag_bits & 1:
                raise PrepError(
                    f"{path}: member {member.filename!r} is encrypted; expected a zip without a"
                    " password"
                )

        files = [member for member in batch if not member.is_dir()]
        if files:
            yield Members(
                [member.filename for member in files],
                np.array([member.header_offset for member in files], np.int64),
                np.array([member.file_size for member in files], np.int64),
            )


def read_zip_member(sample: Sample) -> bytes:
    """Return the decompressed and verified zip member whose local header is at `offset`.

    Raises OSError if reading fails, and ValueError if the member is damaged, uses a compression
    method other than deflate, or is longer than `size`. At most `size` + 1 bytes are decompressed.
    """
    if sample.size > MAX_IMAGE_BYTES:
        raise ValueError(
            f"the image has {sample.size:,} bytes, but at most {MAX_IMAGE_BYTES:,} are allowed"
        )

    fd = descriptor(sample.file)
    # Data that deflate cannot compress grows a little.
    guess = LOCAL_HEADER.size + len(sample.name) + sample.size + sample.size // 1000 + MARGIN_BYTES
    head = os.pread(fd, guess, sample.offset)
    if len(head) < LOCAL_HEADER.size or head[:4] != b"PK\3\4":
        raise ValueError(
            f"{sample.file} has no member at byte {sample.offset}: the file has changed or is"
            " damaged"
        )

    _, flags, method, crc, _, _, name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(head)
    start = LOCAL_HEADER.size + name_bytes + extra_bytes
    if method == zipfile.ZIP_STORED:
        end = start + sample.size
        if len(head) < end + DESCRIPTOR_BYTES:
            head = os.pread(fd, end + DESCRIPTOR_BYTES, sample.offset)
        data = head[start:end]
        behind = head[end : end + DESCRIPTOR_BYTES]
    elif method == zipfile.ZIP_DEFLATED:
        data, behind = _inflate(fd, sample, head, start)
    else:
        raise ValueError(
            f"compressed with method {method}; expected a zip that uses deflate (8) or no"
            " compression (0)"
        )

    if flags & HAS_DESCRIPTOR:  # The sizes and CRC follow the data, after an optional signature.
        crc = int.from_bytes(behind[4:8] if behind[:4] == b"PK\7\x08" else behind[:4], "little")
    if len(data) != sample.size or zlib.crc32(data) != crc:
        raise ValueError(f"damaged inside {sample.file}: the CRC does not match")
    return data


def _inflate(fd: int, sample: Sample, head: bytes, start: int) -> tuple[bytes, bytes]:
    """Return at most `size` + 1 decompressed bytes, and the first bytes after the data."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    position = sample.offset + max(len(head), start)
    compressed = head[start:]
    data = b""

    try:
        while True:
            data += inflater.decompress(compressed, sample.size + 1 - len(data))
            if inflater.eof or len(data) > sample.size:
                break
            compressed = inflater.unconsumed_tail
            if not compressed:
                compressed = os.pread(fd, 65536, position)
                position += len(compressed)
                if not compressed:
                    raise ValueError(f"{sample.file} ends inside the image")
    except zlib.error as error:
        raise ValueError(f"damaged inside {sample.file}: {error}") from error

    if len(data) > sample.size:
        raise ValueError(f"decompresses to more than the stated {sample.size:,} bytes")
    behind = inflater.unused_data
    if len(behind) < DESCRIPTOR_BYTES:
        behind += os.pread(fd, DESCRIPTOR_BYTES, position)
    return data, behind
