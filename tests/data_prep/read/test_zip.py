"""Test that zip archives are listed as zipfile lists them, and that corrupt or hostile archives are
rejected."""

import io
import random
import struct
import zipfile
from pathlib import Path

import pytest

from data_prep.errors import PrepError
from data_prep.read import archives
from data_prep.read.archives import BATCH, read_zip_member, walk_zip
from data_prep.write.samples import Sample

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
def test_zip_is_listed_as_by_zipfile(tmp_path, compression, num):
    files = make_zip(tmp_path / "a.zip", compression, num)
    assert {
        sample.name: read_zip_member(sample) for sample in zip_samples(tmp_path / "a.zip")
    } == files
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        expected = [
            (i.filename, i.header_offset, i.file_size) for i in archive.infolist() if not i.is_dir()
        ]
    assert [(s.name, s.offset, s.size) for s in zip_samples(tmp_path / "a.zip")] == expected


def test_backslashes_separate_folders_where_no_name_has_a_slash(tmp_path):
    """.NET before 4.6.1 and some Windows tools write backslashes into archives. Such archives also
    contain empty folders."""
    names = ["a\\", "a\\0.jpg", "a\\b\\1.jpg", "2.jpg"]
    for more, expected in (
        ([], ["a/0.jpg", "a/b/1.jpg", "2.jpg"]),
        (["c/3.jpg"], [*names, "c/3.jpg"]),
    ):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for name in [*names, *more]:
                archive.writestr(name, name)
        samples = zip_samples(tmp_path / "a.zip")
        assert [sample.name for sample in samples] == expected
        assert read_zip_member(samples[-1]).decode() == [*names, *more][-1]


class Pipe(io.BytesIO):
    """An output stream that cannot seek, so zipfile writes the sizes and the CRC after the data."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation

    tell = seek


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("level", [0, 9])
def test_sizes_after_the_data_are_read(tmp_path, compression, level):
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


def test_zip64_and_bytes_before_the_zip_are_supported(tmp_path):
    path = tmp_path / "large.zip"
    large = 5 << 30
    with open(path, "wb") as file:
        file.truncate(large)  # a sparse file uses no disk space
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a.jpg", b"one")
        with archive.open("b.jpg", "w", force_zip64=True) as member:
            member.write(b"two")
    samples = zip_samples(path)
    assert [sample.offset >= large for sample in samples] == [True, True]
    assert [read_zip_member(sample) for sample in samples] == [b"one", b"two"]
    make_zip(tmp_path / "a.zip")
    # The offsets in the zip do not count these bytes.
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


def test_a_long_extra_field_is_skipped(tmp_path):
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


def test_every_truncation_of_a_zip_is_detected(tmp_path):
    whole = make_zip(tmp_path / "a.zip", num=3) and (tmp_path / "a.zip").read_bytes()
    cut = tmp_path / "cut.zip"
    for length in [*range(1, len(whole), 9999), len(whole) - 300]:
        cut.write_bytes(whole[:length])
        with pytest.raises(PrepError, match=r"not a complete zip"):
            zip_samples(cut)
        # The beginning is missing, so all offsets are wrong.
        cut.write_bytes(whole[length:])
        with pytest.raises(PrepError, match=r"not a complete zip"):
            zip_samples(cut)
    for content, message in (
        (b"", "not a complete zip"),
        (b"<html>no", "a web page"),
        (b"xyz" * 100, "not a complete zip"),
    ):
        cut.write_bytes(content)
        with pytest.raises(PrepError, match=message):
            zip_samples(cut)


def test_damage_and_bombs_inside_a_zip_are_refused(tmp_path, monkeypatch):
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
    with pytest.raises(ValueError, match="decompresses to more than the stated 1,000 bytes"):
        read_zip_member(zeros._replace(size=1000))
    with pytest.raises(ValueError, match="CRC"):
        read_zip_member(zeros._replace(size=zeros.size + 1))
    with pytest.raises(ValueError, match="no member at byte"):
        read_zip_member(zeros._replace(offset=zeros.offset + 1))
    monkeypatch.setattr(archives, "MAX_IMAGE_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1,000 are allowed"):
        read_zip_member(zeros)


@pytest.mark.parametrize(
    ("compression", "number"), [(zipfile.ZIP_BZIP2, 12), (zipfile.ZIP_LZMA, 14)]
)
def test_other_compressions_are_named(tmp_path, compression, number):
    make_zip(tmp_path / "a.zip", compression)
    with pytest.raises(ValueError, match=rf"compressed with method {number}; expected"):
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
