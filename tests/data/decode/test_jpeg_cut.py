"""Test that a window cut out of a JPEG has the same pixels as the fully decoded image.

Files that cannot be cut safely must be decoded completely.
"""

import io
import struct

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vit.data.decode.jpeg_cut import Cut, cut_window
from vit.data.decode.jpeg_header import read_header

# Maps each chroma subsampling to one that Pillow can encode with the same number of blocks per MCU,
# and to the sampling factors that the tests write into the header.
ARRANGED = {
    "4:4:4": ("4:4:4", 0x11),
    "4:2:2": ("4:2:2", 0x21),
    "4:4:0": ("4:2:2", 0x12),
    "4:2:0": ("4:2:0", 0x22),
    "4:1:1": ("4:2:0", 0x41),
    "1x4": ("4:2:0", 0x14),
    "gray": ("gray", 0x11),
    "gray 2x2": ("gray", 0x22),
}


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    """Return waves with noise. A flat image could hide errors, and pure noise has similar codes
    everywhere."""
    generator = np.random.default_rng(width * height)
    y, x = np.mgrid[:height, :width]
    waves = (
        np.stack([np.sin(x / 9 + phase) + np.cos(y / 7 - phase) for phase in range(channels)], -1)
        * 50
        + 128
    )
    return (waves + generator.normal(0, 25, waves.shape)).clip(0, 255).astype(np.uint8)


def jpeg(width: int, height: int, arranged: str = "4:2:0", interval: int = 0, **options) -> bytes:
    """Return a JPEG of this size with a restart marker after every `interval` MCUs."""
    pillows, first_component = ARRANGED[arranged]
    across, down = first_component >> 4, first_component & 15
    if pillows != "gray":
        mcus = -(-width // (8 * across)), -(-height // (8 * down))
        mcu_w, mcu_h = {"4:4:4": (8, 8), "4:2:2": (16, 8), "4:2:0": (16, 16)}[pillows]
        image = Image.fromarray(noise(mcus[0] * mcu_w, mcus[1] * mcu_h))
        options = {"subsampling": pillows, **options}
    else:
        image = Image.fromarray(noise(width, height, 1)[..., 0])
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", restart_marker_blocks=interval, **options)
    data = bytearray(encoded.getvalue())
    frame = read_header(bytes(data)).frame_offset
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    data[frame + 11] = first_component
    return bytes(data)


def decode(data: bytes, strict: bool = True) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, strict=strict)


def shown(cut: Cut, window: tuple[int, int, int, int]) -> np.ndarray:
    left, top, width, height = window
    assert cut.left <= left
    assert cut.top <= top
    pixels = decode(cut.data, strict=not cut.has_rest)
    assert pixels.shape[:2] == (cut.height, cut.width)
    return pixels[top - cut.top :, left - cut.left :][:height, :width]


@st.composite
def cases(draw):
    """Generate the settings of a JPEG and a window inside it. Narrow images, and windows at the
    image border, are generated often."""
    arranged = draw(st.sampled_from(list(ARRANGED)))
    width, height = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    mcu_w = 8 * (ARRANGED[arranged][1] >> 4) if "gray" not in arranged else 8
    per_line = -(-width // mcu_w)
    divisors = [n for n in range(1, per_line + 1) if per_line % n == 0]
    interval = draw(st.sampled_from([0, *divisors, 2 * per_line, 3 * per_line]))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    window = left, top, draw(st.integers(1, width - left)), draw(st.integers(1, height - top))
    return arranged, (width, height), interval, window


@settings(max_examples=400)
@given(cases())
def test_a_window_of_the_cut_equals_the_window_of_the_complete_image(case):
    arranged, (width, height), interval, window = case
    data = jpeg(width, height, arranged, interval)
    header = read_header(data)
    cut = cut_window(data, header, window)
    if cut is None:
        return
    assert cut.width * cut.height < width * height
    left, top, w, h = window
    np.testing.assert_array_equal(shown(cut, window), decode(data)[top : top + h, left : left + w])
    if not cut.has_rest:
        again = read_header(bytes(cut.data))
        assert (again.width, again.height, again.restart_interval) == (
            cut.width,
            cut.height,
            interval,
        )
        assert len(cut.data) < len(data)


@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("has_markers", [False, True])
def test_every_supported_sampling_is_cut(arranged, has_markers):
    header = read_header(jpeg(256, 256, arranged))
    mcu_w, _ = header.mcu_size
    data = jpeg(256, 256, arranged, 32 // mcu_w if has_markers else 0)
    window = 70, 70, 50, 50
    cut = cut_window(data, read_header(data), window)
    assert cut is not None
    assert cut.has_rest is not has_markers
    assert (cut.left, cut.width) == ((64, 64) if has_markers else (0, 256))
    assert cut.height <= (64 if has_markers else 121)
    np.testing.assert_array_equal(shown(cut, window), decode(data)[70:120, 70:120])


@pytest.mark.parametrize("arranged", ARRANGED)
def test_a_window_at_the_end_of_a_tile_needs_the_chroma_of_the_next_tile(arranged):
    mcu_w, mcu_h = read_header(jpeg(256, 256, arranged)).mcu_size
    data = jpeg(256, 256, arranged, 32 // mcu_w)
    for window in [
        (96, 96, 64, 64),
        (96, 96, 63, 65),
        (97, 97, 64, 62),
        (64, 64, 32, mcu_h),
        (65, 64, 31, 32),
        (64, 65, 32, 31),
    ]:
        left, top, width, height = window
        cut = cut_window(data, read_header(data), window)
        np.testing.assert_array_equal(
            shown(cut, window), decode(data)[top : top + height, left : left + width]
        )


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 9, 16])
def test_a_narrow_last_tile_is_upsampled_as_in_the_complete_image(columns):
    """libjpeg does not interpolate rows of only one or two chroma samples. In the full image, the
    samples of a narrow tile are interpolated with their neighbors."""
    data = jpeg(48 + columns, 64, "4:2:0", 1)
    assert read_header(data).restart_interval == 1
    for left in range(48, 48 + columns):
        window = left, 20, 48 + columns - left, 9
        cut = cut_window(data, read_header(data), window)
        np.testing.assert_array_equal(shown(cut, window), decode(data)[20:29, left:])


def test_a_cut_of_the_last_tile_excludes_the_bytes_after_the_image():
    data = jpeg(128, 128, "4:2:0", 2)
    window = 100, 100, 28, 28
    for tail in (b"", b"\xff\xd9", b"a second image" + jpeg(16, 16)):
        longer = data + tail
        cut = cut_window(longer, read_header(longer), window)
        np.testing.assert_array_equal(shown(cut, window), decode(data)[100:, 100:])


def test_a_window_of_nearly_the_whole_image_is_not_cut():
    data = jpeg(128, 128, "4:2:0", 2)
    assert cut_window(data, read_header(data), (0, 0, 128, 128)) is None
    assert cut_window(data, read_header(data), (3, 2, 120, 123)) is None
    plain = jpeg(128, 128)
    assert cut_window(plain, read_header(plain), (0, 100, 20, 20)) is None


def marker_changed(data: bytes, number: int, to: int) -> bytes:
    start = read_header(data).scan_offset
    markers = [
        at
        for at in range(start, len(data) - 2)
        if data[at] == 0xFF and 0xD0 <= data[at + 1] <= 0xD7
    ]
    return data[: markers[number] + 1] + bytes([to]) + data[markers[number] + 2 :]


PLAIN = jpeg(96, 96, "4:2:0", 2)
SIZE_AT = read_header(PLAIN).frame_offset + 5
LIES = {
    "a marker out of turn": marker_changed(PLAIN, 3, 0xD0),
    "a marker that is none": marker_changed(PLAIN, 3, 0x00),
    "another interval than the markers'": PLAIN.replace(b"\xff\xdd\0\4\0\2", b"\xff\xdd\0\4\0\3"),
    "an interval, and no markers": jpeg(96, 96).replace(b"\xff\xda", b"\xff\xdd\0\4\0\2\xff\xda"),
    "an interval that fits no line": PLAIN.replace(b"\xff\xdd\0\4\0\2", b"\xff\xdd\0\4\0\5"),
    "a smaller size in the header": (
        PLAIN[:SIZE_AT] + struct.pack(">HH", 80, 80) + PLAIN[SIZE_AT + 4 :]
    ),
    "cut off": PLAIN[:-700],
    "cut off, with an end": PLAIN[:-700] + b"\xff\xd9",
    "something behind it": PLAIN + b"\0",
    "progressive": jpeg(96, 96, progressive=True),
    "progressive, with markers": jpeg(96, 96, "4:2:0", 2, progressive=True),
    "no sampling": PLAIN[: SIZE_AT + 6] + b"\0" + PLAIN[SIZE_AT + 7 :],
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_a_file_that_contradicts_its_header_is_left_to_full_decoding(data):
    assert cut_window(data, read_header(data), (20, 20, 10, 10)) is None


def test_a_file_with_a_scan_per_component_is_not_cut():
    """The test combines one header and the scans of three gray images into a file with one scan per
    component."""
    gray = jpeg(64, 64, "gray", 2)
    header = read_header(gray)
    frame = (
        b"\xff\xc0"
        + struct.pack(">HBHHB", 17, 8, 64, 64, 3)
        + b"".join(bytes((n, 0x11, 0)) for n in (1, 2, 3))
    )
    tables = gray[header.frame_offset + 13 : header.scan_offset - 10]
    codes = gray[header.scan_offset : -2]
    scans = b"".join(b"\xff\xda\0\x08\1" + bytes((n, 0, 0, 63, 0)) + codes for n in (1, 2, 3))
    data = gray[: header.frame_offset] + frame + tables + scans + b"\xff\xd9"
    assert decode(data).shape == (64, 64, 3)
    assert not read_header(data).is_one_scan
    assert cut_window(data, read_header(data), (20, 20, 10, 10)) is None


@settings(max_examples=300)
@given(st.integers(0, len(ARRANGED) - 1), st.sampled_from([0, 1, 2, 4]), st.data())
def test_a_damaged_file_is_not_cut_or_the_cut_has_the_right_size(arranged, interval, data):
    damaged = bytearray(jpeg(64, 64, list(ARRANGED)[arranged], interval))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(2, len(damaged) - 1))] = data.draw(
            st.one_of(st.sampled_from([0xFF, 0, 0xD3]), st.integers(0, 255))
        )
    try:
        header = read_header(bytes(damaged))
    except ValueError:
        return
    left, top = min(20, header.width - 1), min(20, header.height - 1)
    cut = cut_window(bytes(damaged), header, (left, top, 1, 1))
    if cut is None or header.width * header.height > 1 << 20:
        return
    assert cut.left <= left < cut.left + cut.width <= header.width
    assert cut.top <= top < cut.top + cut.height <= header.height
    try:
        pixels = decode(cut.data, strict=not cut.has_rest)
    except ValueError:
        return
    assert pixels.shape == (cut.height, cut.width, 3)
