"""Archives read in place: the same members as tarfile and zipfile say, and a clear word for
whatever is cut off, damaged or hostile."""

import io
import os
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from data_prep.errors import PrepError
from data_prep.read import archives
from data_prep.read.archives import BATCH, read_zip_member, walk_tar, walk_zip
from data_prep.write.samples import Sample


def listed(path: Path, start: int = 0, stop: int | None = None) -> list[tuple[str, int, int]]:
    return [
        (name, int(offset), int(size))
        for members in walk_tar(path, start, stop)
        for name, offset, size in zip(members.names, members.offsets, members.sizes, strict=True)
    ]


def by_tarfile(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as tar:
        return [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]


def header_offsets(path: Path) -> list[int]:
    with tarfile.open(path) as tar:
        return [member.offset for member in tar]


def make_tar(
    path: Path, names: list[str], format: int = tarfile.GNU_FORMAT, **fields: object
) -> Path:
    rng = random.Random(0)
    with tarfile.open(path, "w", format=format) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 0 if name.endswith("/") else rng.choice((0, 1, 511, 512, 513, 3000))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(rng.randbytes(member.size)))
    return path


NAMES = [
    "a.jpg",
    "./b.jpg",
    "folder/",
    "folder/c.jpg",
    "ü.jpg",
    "d" * 99,
    "e" * 100,
    "f" * 101,
    "g" * 90 + "/" + "h" * 60,
    "last",
]
LONG = ["i" * 300, "ö" * 200, "j" * 5000, "after.jpg"]


@pytest.mark.parametrize(
    ("format", "names", "fields"),
    [
        (tarfile.GNU_FORMAT, NAMES + LONG, {}),
        (tarfile.PAX_FORMAT, NAMES + LONG, {}),
        (tarfile.PAX_FORMAT, NAMES + LONG, {"mtime": 1.5, "uname": "ü"}),
        (tarfile.USTAR_FORMAT, [name for name in NAMES if len(name) != 101], {}),
        (tarfile.GNU_FORMAT, ["a", "b"], {"uid": 1 << 30}),
        (tarfile.GNU_FORMAT, [f"{number}.jpg" for number in range(2 * BATCH + 3)], {}),
        (tarfile.GNU_FORMAT, [f"{number}.jpg" for number in range(BATCH)], {}),
        (tarfile.GNU_FORMAT, [], {}),
    ],
)
def test_tar_as_tarfile_says(tmp_path, format, names, fields):
    path = make_tar(tmp_path / "a.tar", names, format, **fields)
    assert listed(path) == by_tarfile(path)
    assert len(listed(path)) == len([name for name in names if not name.endswith("/")])


def test_old_tars_without_types(tmp_path):
    path = make_tar(tmp_path / "old.tar", ["a.jpg", "folder/", "b.jpg"])
    data = bytearray(path.read_bytes())
    for offset in header_offsets(path):
        data[offset + 156] = 0  # as tar wrote in 1979: a folder is told by its slash
        data[offset + 148 : offset + 156] = b" " * 8
        data[offset + 148 : offset + 155] = b"%6o\0" % sum(data[offset : offset + 512])
        if data[offset : offset + 6] == b"folder":
            data[offset + 6 : offset + 7] = b"/"
            data[offset + 148 : offset + 156] = b" " * 8
            data[offset + 148 : offset + 155] = b"%6o\0" % sum(data[offset : offset + 512])
    path.write_bytes(data)
    assert [name for name, _, _ in listed(path)] == ["a.jpg", "b.jpg"]
    assert listed(path) == by_tarfile(path)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_over_8_gib(tmp_path, format):
    path = tmp_path / "huge.tar"
    member = tarfile.TarInfo("huge.bin")
    size = (9 << 30) + 5
    member.size = size
    with open(path, "wb") as file:
        file.write(member.tobuf(format))
        start = file.tell()
        file.seek(start + (size + 511 & -512))
        file.write(tarfile.TarInfo("after.bin").tobuf(format) + bytes(1024))
    assert listed(path) == [
        ("huge.bin", start, size),
        ("after.bin", start + (size + 511 & -512) + 512, 0),
    ]


def test_tar_inside_a_tar(tmp_path):
    inner = make_tar(tmp_path / "inner.tar", NAMES)
    with tarfile.open(tmp_path / "outer.tar", "w") as outer:
        for name in ("first.tar", "second.tar"):
            outer.add(inner, name)
    found = listed(tmp_path / "outer.tar")
    assert [name for name, _, _ in found] == ["first.tar", "second.tar"]
    for _, start, size in found:
        assert listed(tmp_path / "outer.tar", start, start + size) == [
            (n, start + o, s) for n, o, s in listed(inner)
        ]
    _, start, size = found[1]
    with pytest.raises(
        PrepError,
        match=rf"outer\.tar: cut off: .* \(in the tar inside it that begins at byte {start}",
    ):
        listed(tmp_path / "outer.tar", start, start + size // 2)


def test_every_cut_of_a_tar_is_seen(tmp_path):
    whole = make_tar(tmp_path / "whole.tar", [*NAMES, "k" * 300]).read_bytes()
    expected = listed(tmp_path / "whole.tar")
    _, offset, size = expected[-1]
    end_of_data = offset + (size + 511 & -512)
    cut = tmp_path / "cut.tar"
    for length in range(1, len(whole), 100):
        cut.write_bytes(whole[:length])
        if length >= end_of_data + 512:  # one block of zeros is an end mark
            assert listed(cut) == expected
        else:
            with pytest.raises(
                PrepError, match=r"cut\.tar: .*(cut off|not a tar).* at byte \d+ of \d+"
            ):
                listed(cut)


def test_damaged_headers_are_seen(tmp_path):
    path = make_tar(tmp_path / "a.tar", [f"{number}.jpg" for number in range(20)])
    whole = path.read_bytes()
    rng = random.Random(1)
    for header in header_offsets(path):
        damaged = bytearray(whole)
        damaged[header + rng.randrange(148)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(
            PrepError,
            match=(
                rf"a\.tar: (damaged|not a tar).* at byte {header} of {len(whole)}.*download it"
                r" again"
            ),
        ):
            listed(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"<!DOCTYPE html><html><body>Log in</body></html>" + b" " * 600,
            "not a tar but a web page",
        ),
        (b"\n<html>" + b" " * 600, "not a tar but a web page"),
        (b"\x1f\x8b" + b"x" * 600, "not a tar but compressed with gzip"),
        (b"PK\3\4" + b"x" * 600, "not a tar but a zip"),
        (b"x" * 600, "not a tar"),
        (b"", "an empty file"),
        (b"<html>", "cut off"),
        (bytes(1024) + b"x" * 512, "zeros instead of a header, with data after them"),
    ],
)
def test_no_tar(tmp_path, content, message):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(PrepError, match=message):
        listed(tmp_path / "a.tar")


def test_garbage_behind_the_end(tmp_path):
    path = make_tar(tmp_path / "a.tar", ["a", "b"])
    path.write_bytes(path.read_bytes() + b"garbage")
    with pytest.raises(PrepError, match="with data after them"):
        listed(path)
    with pytest.raises(PrepError, match="no such file"):
        listed(tmp_path / "missing.tar")
    with pytest.raises(PrepError, match="not a file"):
        listed(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("/etc/passwd", tarfile.REGTYPE, "leads out of the archive"),
        ("a/../../b.jpg", tarfile.REGTYPE, "leads out of the archive"),
        ("..", tarfile.DIRTYPE, "leads out of the archive"),
        ("/" + "x" * 150, tarfile.REGTYPE, "leads out of the archive"),
        ("C:\\b.jpg", tarfile.REGTYPE, "leads out of the archive"),
        ("a.jpg", tarfile.SYMTYPE, "is a symbolic link"),
        ("a.jpg", tarfile.LNKTYPE, "is a hard link"),
        ("a.jpg", tarfile.CHRTYPE, "is a device or a pipe"),
        ("a.jpg", tarfile.FIFOTYPE, "is a device or a pipe"),
        ("a.jpg", tarfile.GNUTYPE_SPARSE, "is a sparse file"),
    ],
)
def test_hostile_tars_are_refused(tmp_path, name, kind, message):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("fine..jpg"))
        member = tarfile.TarInfo(name)
        member.type = kind
        member.linkname = "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(PrepError) as error:
        listed(tmp_path / "a.tar")
    assert message in str(error.value)
    assert repr(name) in str(error.value)


def test_a_negative_size_does_not_go_round_for_ever(tmp_path):
    header = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 8 + struct.pack(">i", -1024)
    header[148:156] = b" " * 8
    header[148:155] = b"%06o\0" % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(PrepError, match=r"damaged: 'a\.jpg' has -1024 bytes"):
        listed(tmp_path / "a.tar")


# ---- zip -----------------------------------------------------------------------------------------


def zip_samples(path: Path) -> list[Sample]:
    return [
        Sample("", 0, name, str(path), int(offset), int(size))
        for members in walk_zip(path)
        for name, offset, size in zip(members.names, members.offsets, members.sizes, strict=True)
    ]


def make_zip(
    path: Path, compression: int = zipfile.ZIP_DEFLATED, num: int = 20
) -> dict[str, bytes]:
    rng = random.Random(0)
    files = {
        "empty": b"",
        "ü/noise": rng.randbytes(300_000),
        "zeros": bytes(3_000_000),
        "n" * 1000: b"long name",
    }
    files |= {f"folder/{number}.jpg": rng.randbytes(rng.randrange(2000)) for number in range(num)}
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.comment = b"a comment PK\1\2"
        archive.mkdir("folder")
        for name, data in files.items():
            archive.writestr(name, data)
    return files


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("num", [20, BATCH])
def test_zip_as_zipfile_says(tmp_path, compression, num):
    files = make_zip(tmp_path / "a.zip", compression, num)
    assert {
        sample.name: read_zip_member(sample) for sample in zip_samples(tmp_path / "a.zip")
    } == files
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        expected = [
            (i.filename, i.header_offset, i.file_size) for i in archive.infolist() if not i.is_dir()
        ]
    assert [(s.name, s.offset, s.size) for s in zip_samples(tmp_path / "a.zip")] == expected


class Pipe(io.BytesIO):
    """Cannot be sought, so that zipfile puts sizes and CRC behind the data."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation

    tell = seek


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("level", [0, 9])
def test_sizes_behind_the_data(tmp_path, compression, level):
    rng = random.Random(0)
    pipe = Pipe()
    files = {f"{size}.jpg": rng.randbytes(size) for size in (1, 100, 20_000, 400_000)} | {
        "zeros.jpg": bytes(50_000)
    }
    with zipfile.ZipFile(pipe, "w", compression, compresslevel=level) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    (tmp_path / "a.zip").write_bytes(pipe.getvalue())
    assert {
        sample.name: read_zip_member(sample) for sample in zip_samples(tmp_path / "a.zip")
    } == files
    damaged = bytearray(pipe.getvalue())
    damaged[damaged.index(b"PK\7\x08") + 4] ^= 1
    (tmp_path / "b.zip").write_bytes(damaged)
    with pytest.raises(ValueError, match="CRC"):
        read_zip_member(zip_samples(tmp_path / "b.zip")[0])


def test_zip64_and_bytes_before_the_zip(tmp_path):
    path = tmp_path / "large.zip"
    large = 5 << 30
    with open(path, "wb") as file:
        file.truncate(large)  # a hole: no disk is used
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a.jpg", b"one")
        with archive.open("b.jpg", "w", force_zip64=True) as member:
            member.write(b"two")
    found = zip_samples(path)
    assert [sample.offset >= large for sample in found] == [True, True]
    assert [read_zip_member(sample) for sample in found] == [b"one", b"two"]
    make_zip(tmp_path / "a.zip")
    # its offsets do not count these bytes
    (tmp_path / "b.zip").write_bytes(b"#!/bin/sh\n" + (tmp_path / "a.zip").read_bytes())
    first = zip_samples(tmp_path / "a.zip")
    second = zip_samples(tmp_path / "b.zip")
    assert [read_zip_member(s) for s in first] == [read_zip_member(s) for s in second]


def test_many_entries_need_zip64(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(66_000):
            archive.writestr(zipfile.ZipInfo(f"{number}"), b"")
    assert [sample.name for sample in zip_samples(tmp_path / "a.zip")] == [
        str(number) for number in range(66_000)
    ]


def test_a_long_extra_field(tmp_path):
    info = zipfile.ZipInfo("a.jpg")
    info.extra = struct.pack("<HH", 0x7777, 60_000) + bytes(60_000)
    for name, compression in (
        ("stored.zip", zipfile.ZIP_STORED),
        ("deflated.zip", zipfile.ZIP_DEFLATED),
    ):
        info.compress_type = compression
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(info, b"data " * 1000)
        assert [read_zip_member(sample) for sample in zip_samples(tmp_path / name)] == [
            b"data " * 1000
        ]


def test_every_cut_of_a_zip_is_seen(tmp_path):
    whole = make_zip(tmp_path / "a.zip", num=3) and (tmp_path / "a.zip").read_bytes()
    cut = tmp_path / "cut.zip"
    for length in [*range(1, len(whole), 9999), len(whole) - 300, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(PrepError, match=r"cut off|not a zip"):
            zip_samples(cut)
        # its beginning is missing, and with it the bytes that offsets count from
        cut.write_bytes(whole[length:])
        with pytest.raises(PrepError, match=r"cut off|not a zip"):
            zip_samples(cut)
    for content, message in (
        (b"", "an empty file"),
        (b"<html>no", "a web page"),
        (b"xyz" * 100, "not a zip"),
    ):
        cut.write_bytes(content)
        with pytest.raises(PrepError, match=message):
            zip_samples(cut)


def test_one_part_of_several(tmp_path):
    make_zip(tmp_path / "a.zip")
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[data.rindex(b"PK\5\6") + 4] = 3
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(PrepError, match="one of 4 parts of a split zip"):
        zip_samples(tmp_path / "a.zip")


def test_damage_and_bombs_inside_a_zip(tmp_path, monkeypatch):
    make_zip(tmp_path / "a.zip")
    whole = (tmp_path / "a.zip").read_bytes()
    noise, zeros = (
        next(s for s in zip_samples(tmp_path / "a.zip") if s.name == name)
        for name in ("ü/noise", "zeros")
    )
    damaged = bytearray(whole)
    damaged[noise.offset + 1000] ^= 1
    (tmp_path / "b.zip").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"damaged inside .*b\.zip"):
        read_zip_member(noise._replace(file=str(tmp_path / "b.zip")))
    with pytest.raises(ValueError, match="inflates to more than its 1,000 stated bytes"):
        read_zip_member(zeros._replace(size=1000))
    with pytest.raises(ValueError, match="CRC"):
        read_zip_member(zeros._replace(size=zeros.size + 1))
    with pytest.raises(ValueError, match="no member at byte"):
        read_zip_member(zeros._replace(offset=zeros.offset + 1))
    monkeypatch.setattr(archives, "MAX_IMAGE_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1,000 are taken for an image"):
        read_zip_member(zeros)


@pytest.mark.parametrize(
    ("compression", "number"), [(zipfile.ZIP_BZIP2, 12), (zipfile.ZIP_LZMA, 14)]
)
def test_other_compressions_are_named(tmp_path, compression, number):
    make_zip(tmp_path / "a.zip", compression)
    with pytest.raises(ValueError, match=rf"compressed by method {number}; expected"):
        read_zip_member(zip_samples(tmp_path / "a.zip")[1])


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("../a.jpg", 0, "leads out"),
        ("/a.jpg", 0, "leads out"),
        ("a\\..\\b.jpg", 0, "leads out"),
        ("D:/a.jpg", 0, "leads out"),
        ("a.jpg", 0o120777, "is a link"),
    ],
)
def test_hostile_zips_are_refused(tmp_path, name, mode, message):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("fine..jpg", b"")
        info = zipfile.ZipInfo("x")
        info.filename = name
        info.external_attr = mode << 16
        archive.writestr(info, b"/etc/passwd")
    with pytest.raises(PrepError, match=message) as error:
        zip_samples(tmp_path / "a.zip")
    assert repr(name) in str(error.value)


def test_encrypted_zips_are_refused(tmp_path):
    make_zip(tmp_path / "a.zip")
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(PrepError, match="is encrypted"):
        zip_samples(tmp_path / "a.zip")


def test_descriptors_are_closed(tmp_path):
    make_tar(tmp_path / "a.tar", ["a", "b"])
    make_zip(tmp_path / "a.zip")
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        next(walk_tar(tmp_path / "a.tar"))
        list(walk_tar(tmp_path / "a.tar"))
        next(walk_zip(tmp_path / "a.zip"))
    assert len(os.listdir("/dev/fd")) == before
