"""Test that archives are listed as tarfile and zipfile list them, and that truncated, corrupt or
hostile archives raise a clear error."""

import io
import os
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from data_prep.errors import PrepError
from data_prep.read.archives import BATCH, walk_tar, walk_zip


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
def test_tar_is_listed_as_by_tarfile(tmp_path, format, names, fields):
    path = make_tar(tmp_path / "a.tar", names, format, **fields)
    assert listed(path) == by_tarfile(path)
    assert len(listed(path)) == len([name for name in names if not name.endswith("/")])


def test_old_tars_without_types_are_listed(tmp_path):
    path = make_tar(tmp_path / "old.tar", ["a.jpg", "folder/", "b.jpg"])
    data = bytearray(path.read_bytes())
    for offset in header_offsets(path):
        data[offset + 156] = 0  # as in the tar format of 1979, where only a slash marked a folder
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
def test_members_over_8_gib_are_listed(tmp_path, format):
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


def test_a_tar_inside_a_tar_is_listed(tmp_path):
    inner = make_tar(tmp_path / "inner.tar", NAMES)
    with tarfile.open(tmp_path / "outer.tar", "w") as outer:
        for name in ("first.tar", "second.tar"):
            outer.add(inner, name)
    members = listed(tmp_path / "outer.tar")
    assert [name for name, _, _ in members] == ["first.tar", "second.tar"]
    for _, start, size in members:
        assert listed(tmp_path / "outer.tar", start, start + size) == [
            (n, start + o, s) for n, o, s in listed(inner)
        ]
    _, start, size = members[1]
    with pytest.raises(
        PrepError,
        match=rf"outer\.tar: truncated: .* \(in the tar inside it that begins at byte {start}",
    ):
        listed(tmp_path / "outer.tar", start, start + size // 2)


def test_every_truncation_of_a_tar_is_detected(tmp_path):
    whole = make_tar(tmp_path / "whole.tar", [*NAMES, "k" * 300]).read_bytes()
    expected = listed(tmp_path / "whole.tar")
    _, offset, size = expected[-1]
    end_of_data = offset + (size + 511 & -512)
    cut = tmp_path / "cut.tar"
    for length in range(1, len(whole), 100):
        cut.write_bytes(whole[:length])
        if length >= end_of_data + 512:  # a single block of zeros is an end marker
            assert listed(cut) == expected
        else:
            with pytest.raises(
                PrepError, match=r"cut\.tar: .*(truncated|not a tar).* at byte \d+ of \d+"
            ):
                listed(cut)


def test_damaged_headers_are_detected(tmp_path):
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
        (b"", "truncated"),
        (b"<html>", "truncated"),
        (bytes(1024) + b"x" * 512, "data follow the end marker"),
    ],
)
def test_a_file_that_is_not_a_tar_is_refused(tmp_path, content, message):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(PrepError, match=message):
        listed(tmp_path / "a.tar")


def test_a_tar_with_data_after_its_end_is_refused(tmp_path):
    path = make_tar(tmp_path / "a.tar", ["a", "b"])
    path.write_bytes(path.read_bytes() + b"garbage")
    with pytest.raises(PrepError, match="data follow the end marker"):
        listed(path)


def test_a_file_that_cannot_be_opened_gives_one_line(tmp_path):
    (tmp_path / "loop.tar").symlink_to("loop.tar")
    for name, message in (
        ("missing.tar", "No such file"),
        ("n" * 300, "File name too long"),
        ("loop.tar", "Too many levels of symbolic links"),
        (".", "Is a directory"),
    ):
        with pytest.raises(PrepError, match=message):
            listed(tmp_path / name)


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


def test_a_negative_size_causes_no_endless_loop(tmp_path):
    header = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 8 + struct.pack(">i", -1024)
    header[148:156] = b" " * 8
    header[148:155] = b"%06o\0" % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(PrepError, match=r"damaged: 'a\.jpg' has -1024 bytes"):
        listed(tmp_path / "a.tar")


# ---- zip -----------------------------------------------------------------------------------------


def test_descriptors_are_closed(tmp_path):
    make_tar(tmp_path / "a.tar", ["a", "b"])
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("a", b"x")
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        next(walk_tar(tmp_path / "a.tar"))
        list(walk_tar(tmp_path / "a.tar"))
        next(walk_zip(tmp_path / "a.zip"))
    assert len(os.listdir("/dev/fd")) == before
