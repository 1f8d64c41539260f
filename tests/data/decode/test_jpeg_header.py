"""Test that the header parser agrees with Pillow on intact, unusual, truncated and corrupt
JPEGs."""

import contextlib
import io
import random
import struct
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vit.data.decode.jpeg_header import JpegHeader, read_header
from vit.data.shards.tar import scan_tar
from vit.system.files import ShardError


def picture(width: int = 97, height: int = 64, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(
        0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8
    )
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encode(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, form, **options)
    return encoded.getvalue()


def by_pillow(data: bytes) -> dict:
    with Image.open(io.BytesIO(data)) as image:
        return {
            "width": image.width,
            "height": image.height,
            "num_components": image.layers,  # type: ignore[attr-defined]
            "precision": image.bits,  # type: ignore[attr-defined]
            "orientation": image.getexif().get(0x0112, 1),
            # Pillow stops reading at the first scan.
            "scan_offset": image.fp.tell(),
        }


def by_us(data: bytes) -> dict:
    header = read_header(data)._asdict()
    return {key: header[key] for key in by_pillow(data)}


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def exif_block(order: str, orientation: int, num_before: int = 3) -> bytes:
    """Return the content of an EXIF segment in little-endian (<) or big-endian (>) byte order. The
    orientation tag follows `num_before` other entries."""
    entries = [struct.pack(order + "HHII", 0x0100 + n, 4, 1, 7) for n in range(num_before)]
    entries.append(struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0))
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return (
        b"Exif\0\0" + head + struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4)
    )


# --- intact images --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"optimize": True}, {"restart_marker_blocks": 3}, {"quality": 100}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "YCbCr"])
@pytest.mark.parametrize("size", [(97, 64), (1, 1), (1000, 3)], ids=str)
def test_headers_are_parsed_as_in_pillow(size, mode, options):
    data = encode(picture(*size, mode=mode), **options)
    assert by_us(data) == by_pillow(data)
    header = read_header(data)
    assert header.process == (2 if "progressive" in options else 0)
    assert header.restart_interval == options.get("restart_marker_blocks", 0)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_headers_of_all_samplings_are_parsed_as_in_pillow(subsampling):
    data = encode(picture(), subsampling=subsampling)
    assert by_us(data) == by_pillow(data)


@pytest.mark.parametrize(
    ("subsampling", "sampling", "mcu_size"),
    [("4:4:4", (1, 1), (8, 8)), ("4:2:2", (2, 1), (16, 8)), ("4:2:0", (2, 2), (16, 16))],
)
def test_the_sampling_and_the_size_of_an_mcu_are_reported(subsampling, sampling, mcu_size):
    header = read_header(encode(picture(), subsampling=subsampling))
    assert (header.sampling, header.mcu_size) == ((sampling, (1, 1), (1, 1)), mcu_size)
    assert read_header(encode(picture(mode="L"))).mcu_size == (8, 8)


def test_the_frame_offset_and_whether_there_is_one_scan_are_reported():
    for options in ({}, {"progressive": True}, {"mode": "L"}):
        data = encode(picture(mode=options.pop("mode", "RGB")), **options)
        header = read_header(data)
        assert data[header.frame_offset : header.frame_offset + 2] == (
            b"\xff\xc2" if options else b"\xff\xc0"
        )
        assert header.is_one_scan
    # The scan header of a gray image is 10 bytes long.
    start = header.scan_offset - 10
    assert not read_header(data[:start] + segment(0xDA, b"\2\1\0\2\0\0\x3f\0")).is_one_scan


def test_restart_rows_are_counted_in_blocks():
    data = encode(picture(97, 64), subsampling=2, restart_marker_rows=2)
    assert read_header(data).restart_interval == 2 * -(-97 // 16)


def test_headers_longer_than_the_image_are_parsed():
    generator = random.Random(1)
    exif = Image.Exif()
    exif[0x0112] = 8
    exif[0x010E] = generator.randbytes(60_000).hex()[:60_000]
    data = encode(
        picture(),
        exif=exif,
        icc_profile=generator.randbytes(300_000),
        comment=b"\xff\xd8\xff\xd9" * 99,
    )
    assert read_header(data).scan_offset > 360_000
    assert by_us(data) == by_pillow(data)


def test_an_embedded_thumbnail_is_ignored():
    data = encode(picture(97, 64))
    data = (
        data[:2]
        + segment(0xE1, b"Exif\0\0" + encode(picture(16, 16)))
        + segment(0xED, encode(picture(8, 9)))
        + data[2:]
    )
    assert by_us(data) == by_pillow(data)


def test_fill_bytes_before_markers_are_skipped():
    data = encode(picture())
    position = 2
    filled = data[:2]
    while data[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        filled += b"\xff" * (position % 4) + data[position:end]
        position = end
    filled += b"\xff" * 700 + data[position:]
    assert len(filled) > len(data) + 700
    assert by_us(filled) == by_pillow(filled)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_read(order, orientation):
    data = encode(picture())
    data = data[:2] + segment(0xE1, exif_block(order, orientation)) + data[2:]
    assert read_header(data).orientation == orientation
    assert by_us(data) == by_pillow(data)


@pytest.mark.parametrize(
    "block",
    [
        exif_block("<", 0),
        exif_block("<", 9),
        exif_block("<", 6)[:30],
        exif_block("<", 6).replace(b"II", b"XX"),
        exif_block(">", 6)[:10] + b"\xff\xff\xff\xff",
        b"Exif\0\0",
        b"http://ns.adobe.com/xap/1.0/\0<x/>",
    ],
)
def test_an_invalid_exif_block_does_not_rotate_or_reject_an_image(block):
    data = encode(picture())
    assert read_header(data[:2] + segment(0xE1, block) + data[2:]).orientation == 1


def test_the_first_part_of_a_split_exif_block_decides():
    data = encode(picture())
    split = (
        data[:2]
        + segment(0xE1, exif_block("<", 6))
        + segment(0xE1, b"Exif\0\0 the rest of a large block")
        + data[2:]
    )
    assert read_header(split).orientation == 6


# --- truncated and damaged files ------------------------------------------------------------------


def test_the_beginning_of_a_file_suffices_if_it_contains_the_headers():
    data = encode(picture(), exif=exif_block(">", 3))
    whole = read_header(data)
    for end in range(whole.scan_offset):
        with pytest.raises(ValueError, match=r"no JPEG|truncated JPEG headers, after \d+ bytes"):
            read_header(data[:end])
    for end in range(whole.scan_offset, whole.scan_offset + 50):
        assert read_header(data[:end]) == whole


FRAME = struct.pack(">BHHB", 8, 64, 97, 1) + b"\1\x11\0"
SCAN = segment(0xDA, b"\1\1\0\0\x3f\0")
DAMAGE = {
    "empty": (b"", "no JPEG"),
    "PNG": (encode(picture(), "PNG"), "no JPEG"),
    "HTML": (b"<!DOCTYPE html>", "no JPEG"),
    "no frame": (SCAN, "the image data has no frame header"),
    "two frames": (segment(0xC0, FRAME) * 2 + SCAN, "a second frame at byte 15"),
    "end of image": (b"\xff\xd9", "marker 0xd9 at byte 2"),
    "unknown marker": (segment(0xF3, FRAME), "marker 0xf3"),
    "stray byte": (b"\0" + segment(0xC0, FRAME) + SCAN, "no marker at byte 2"),
    "length 1": (b"\xff\xe0\0\1" + SCAN, "invalid segment length 1"),
    "long frame": (
        segment(0xC0, FRAME + b"\0") + SCAN,
        "a frame of 97 x 64 pixels, 1 components, 8 bits",
    ),
    "no width": (
        segment(0xC0, struct.pack(">BHHB", 8, 64, 0, 1) + b"\1\x11\0") + SCAN,
        "a frame of 0 x 64 pixels",
    ),
    "no height": (
        segment(0xC0, struct.pack(">BHHB", 8, 0, 97, 1) + b"\1\x11\0") + SCAN,
        "a frame of 97 x 0 pixels",
    ),
    "fill bytes only": (b"\xff" * 10_000, "truncated"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(data, message):
    if message != "no JPEG":
        data = b"\xff\xd8" + data
    with pytest.raises(ValueError, match=message):
        read_header(data)


def test_other_processes_and_depths_are_reported():
    frame = struct.pack(">BHHB", 12, 64, 97, 1) + b"\1\x11\0"
    data = b"\xff\xd8" + segment(0xC3, frame) + b"\xff\xd0\xff\x01" + SCAN
    assert read_header(data) == JpegHeader(97, 64, 1, 12, 3, 1, 0, len(data), 2, ((1, 1),), True)


@settings(max_examples=500)
@given(st.sampled_from(["L", "RGB", "CMYK"]), st.booleans(), st.data())
def test_damage_raises_only_a_value_error(mode, progressive, data):
    damaged = bytearray(
        encode(
            picture(24, 16, mode),
            progressive=progressive,
            exif=exif_block("<", 6),
            restart_marker_rows=1,
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(700, len(damaged) - 1)))] = data.draw(
            st.one_of(st.sampled_from([0xFF, 0, 0xC0, 0xDA]), st.integers(0, 255))
        )
    damaged = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        header = read_header(damaged)
    except ValueError:
        return
    assert header.width >= 1
    assert header.height >= 1
    assert 1 <= header.orientation <= 8
    assert header.scan_offset <= len(damaged)


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_noise_raises_only_a_value_error(noise):
    for data in (noise, b"\xff\xd8\xff" + noise):
        with contextlib.suppress(ValueError):
            read_header(data)


# --- indexing a shard -----------------------------------------------------------------------------


def write_tar(path, images: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, data in images.items():
            for name, content in ((f"{key}.jpg", data), (f"{key}.cls", b"0")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def test_the_scan_of_a_shard_finds_the_same_sizes_as_pillow(tmp_path):
    # The image size is stored more than 16 KiB after the start of the file.
    long = random.Random(1).randbytes(40_000)
    images = {
        "plain": encode(picture(31, 17)),
        "gray": encode(picture(32, 17, "L"), progressive=True),
        "cmyk": encode(picture(33, 17, "CMYK")),
        "long": encode(picture(34, 17), icc_profile=long),
        "stray": (lambda data: data[:20] + bytes(50) + data[20:])(encode(picture(35, 17))),
        "png": encode(picture(36, 17), "PNG"),
        "webp": encode(picture(37, 17), "WEBP"),
    }
    write_tar(tmp_path / "train-0.tar", images)
    sizes = {
        sample.key: (sample.width, sample.height) for sample in scan_tar(tmp_path / "train-0.tar")
    }
    assert sizes == {key: Image.open(io.BytesIO(data)).size for key, data in images.items()}


def test_the_scan_of_a_shard_refuses_images_that_pillow_refuses(tmp_path):
    data = encode(picture())
    frame = data.index(b"\xff\xc0") + 4
    images = {
        "bomb": data[: frame + 1] + struct.pack(">HH", 30_000, 30_000) + data[frame + 5 :],
        "deep": data[:frame] + b"\x0c" + data[frame + 1 :],
        "cut": data[: frame + 9],
    }
    for key, image in images.items():
        write_tar(tmp_path / "train-0.tar", {key: image})
        with pytest.raises(ShardError, match=rf"an image whose size cannot be read, '{key}\.jpg'"):
            scan_tar(tmp_path / "train-0.tar")
