"""Test that the C decoder either returns simplejpeg's pixels or rejects the file, for any file and
window."""

import io
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vit.data.decode import native
from vit.data.decode.jpeg_header import read_header
from vit.data.decode.native import Status

if os.environ.get("VIT_REQUIRE_NATIVE") == "1":
    assert native.AVAILABLE, native.UNAVAILABLE_REASON or "VIT_NATIVE=0 is set"
pytestmark = pytest.mark.skipif(
    not native.AVAILABLE, reason=native.UNAVAILABLE_REASON or "VIT_NATIVE=0 is set"
)

SIZES = ((1, 1), (2, 2), (5, 3), (7, 9), (8, 8), (15, 17), (16, 16), (33, 47), (64, 40), (131, 77))
SUBSAMPLINGS = ("444", "422", "420", "440", "411")
portable = pytest.mark.parametrize("portable", [False, True], ids=["simd", "portable"])


def pixels_of(width: int, height: int, grain: float, seed: int = 0) -> np.ndarray:
    """Return a smooth image with noise that has the standard deviation `grain`."""
    rng = np.random.default_rng((width, height, seed))
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    return np.ascontiguousarray(
        (smooth + grain * rng.standard_normal((height, width, 3))).clip(0, 255).astype(np.uint8)
    )


def by_pillow(pixels: np.ndarray, mode: str = "RGB", **options) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(encoded, "JPEG", **options)
    return encoded.getvalue()


def whole(data: bytes, channels: int = 3) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, "RGB" if channels == 3 else "GRAY")


def some_windows(
    width: int, height: int, count: int, rng: random.Random
) -> list[tuple[int, int, int, int]]:
    """Return random windows, a window that covers the whole image, and a single pixel in a
    corner."""
    windows = [(0, 0, width, height), (width - 1, height - 1, 1, 1)]
    for _ in range(count - 2):
        w, h = rng.randint(1, width), rng.randint(1, height)
        windows.append((rng.randint(0, width - w), rng.randint(0, height - h), w, h))
    return windows


def assert_same(data: bytes, case: str, count: int = 6) -> None:
    """Assert that both C implementations return simplejpeg's pixels for windows of this file, in
    gray and in color."""
    rng = random.Random(case)
    for channels in (3, 1):
        expected = whole(data, channels)
        for left, top, width, height in some_windows(
            expected.shape[1], expected.shape[0], count, rng
        ):
            for is_portable in (False, True):
                pixels = np.empty((height, width, channels), np.uint8)
                status = native.decode_into(data, left, top, pixels, portable=is_portable)
                at = (
                    f"{case}: window {(left, top, width, height)}, {channels} channels,"
                    f" portable={is_portable}"
                )
                assert status is Status.OK, f"{at}: {status!r}"
                assert np.array_equal(pixels, expected[top : top + height, left : left + width]), at


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_windows_of_all_samplings_equal_simplejpeg(size):
    for quality in (3, 50, 92, 100):
        pixels = pixels_of(*size, grain=30 if quality > 80 else 8)
        for sampling in SUBSAMPLINGS:
            data = simplejpeg.encode_jpeg(pixels, quality, colorsubsampling=sampling)
            assert_same(data, f"{size}, quality {quality}, {sampling}")
        assert_same(by_pillow(pixels, "L", quality=quality), f"{size}, quality {quality}, gray")
        rgb = by_pillow(pixels, quality=quality, keep_rgb=True)
        assert np.array_equal(native.decode_window(rgb, (0, 0, *size)), whole(rgb))
        assert (
            native.decode_into(rgb, 0, 0, np.empty((size[1], size[0], 1), np.uint8))
            is Status.COLORS
        )


@pytest.mark.parametrize("size", SIZES[3:], ids=lambda size: f"{size[0]}x{size[1]}")
def test_windows_with_restart_markers_equal_simplejpeg(size):
    pixels = pixels_of(*size, grain=20)
    for marks in ({"restart_marker_blocks": n} for n in (1, 2, 3, 4, 5, 7, 24)):
        for subsampling in (0, 1, 2):
            assert_same(
                by_pillow(pixels, subsampling=subsampling, **marks),
                f"{size}, {subsampling}, {marks}",
            )
        assert_same(by_pillow(pixels, "L", optimize=True, **marks), f"{size}, gray, {marks}")
    for marks in ({"restart_marker_rows": n} for n in (1, 2, 3)):
        assert_same(by_pillow(pixels, subsampling=2, **marks), f"{size}, 420, {marks}")


def test_windows_of_large_photos_equal_simplejpeg():
    for subsampling, marks in (
        (2, {}),
        (0, {}),
        (2, {"restart_marker_blocks": 5}),
        (0, {"restart_marker_blocks": 59}),
        (1, {"restart_marker_rows": 1}),
    ):
        data = by_pillow(
            pixels_of(469, 387, grain=20), quality=90, subsampling=subsampling, **marks
        )
        assert_same(data, f"469 x 387, {subsampling}, {marks}", count=12)


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content


def handmade(
    rng: random.Random, lengths: list[int], ac_symbols: list[int], num_blocks: int
) -> bytes:
    """Return a grayscale JPEG with random AC symbols and values. The Huffman code of symbol k has
    lengths[k] bits (ascending), and the DC code is a single 0 bit."""
    codes = {}
    code = 0
    before = lengths[0]
    for length, symbol in zip(lengths, ac_symbols, strict=True):
        code = code << (length - before)
        before = length
        codes[symbol] = f"{code:0{length}b}"
        code += 1
    bits = ""
    for _ in range(num_blocks):
        bits = bits + "0"
        place = 0
        while place < 63:
            symbol = rng.choice([s for s in ac_symbols if s == 0 or place + (s >> 4) + 1 <= 63])
            bits += codes[symbol] + "".join(rng.choice("01") for _ in range(symbol & 15))
            place = 63 if symbol == 0 else place + (symbol >> 4) + 1
    bits += "1" * (-len(bits) % 8)
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
    ac_table = bytes([0x10, *(lengths.count(length) for length in range(1, 17)), *ac_symbols])
    return b"".join(
        (
            b"\xff\xd8",
            segment(0xDB, bytes([0]) + bytes(rng.randint(1, 255) for _ in range(64))),
            segment(0xC0, bytes([8, 0, 8, 0, 8 * num_blocks, 1, 1, 0x11, 0])),
            segment(0xC4, bytes([0x00, 1, *[0] * 15, 0])),
            segment(0xC4, ac_table),
            segment(0xDA, bytes([1, 1, 0x00, 0, 63, 0])),
            scan,
            b"\xff\xd9",
        )
    )


@pytest.mark.parametrize("long", [False, True], ids=["any codes", "long codes"])
def test_images_with_random_huffman_codes_equal_simplejpeg(long):
    """No encoder writes random Huffman tables. The random codes have up to 16 bits, and 15-bit
    values overflow when multiplied by the quantization step."""
    rng = random.Random(int(long))
    for k in range(150):
        lengths = (
            sorted(rng.sample(range(1, 16), 3) + [16] * 12)
            if long
            else sorted(rng.choices(range(5, 17), k=24))
        )
        candidates = [
            run << 4 | size for run in range(16) for size in range(1, 16) if not long or size >= 14
        ]
        symbols = rng.sample(candidates, len(lengths) - 1)
        symbols.insert(rng.randrange(len(lengths)), 0)
        assert_same(handmade(rng, lengths, symbols, num_blocks=6), f"file {k}", count=3)


def test_samplings_that_no_encoder_writes_equal_simplejpeg():
    """The header declares a different layout for the four luma blocks of a 4:2:0 MCU, for example a
    single column. The image is scrambled, but both decoders must return the same pixels."""
    data = simplejpeg.encode_jpeg(pixels_of(64, 64, grain=15), 85, colorsubsampling="420")
    frame = data.index(b"\xff\xc0")
    for factors, width, height in (
        (0x14, 32, 128),
        (0x14, 29, 125),
        (0x41, 128, 32),
        (0x41, 123, 27),
        (0x22, 49, 51),
    ):
        other = bytearray(data)
        other[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
        other[frame + 11] = factors
        assert_same(bytes(other), f"luma {factors:02x}, {width} x {height}", count=10)


def test_extreme_tables_and_pixels_equal_simplejpeg():
    """Black-and-white noise with the coarsest quantization produces long codes, and sums far
    outside the range of pixel values."""
    noise = np.random.default_rng(0).integers(0, 2, (64, 80, 3), np.uint8) * 255
    for level in (1, 16, 255):
        for subsampling in (0, 2):
            assert_same(
                by_pillow(noise, qtables=[[level] * 64] * 2, subsampling=subsampling),
                f"quantised by {level}, {subsampling}",
            )


@cache
def example(kind: str) -> tuple[bytes, np.ndarray]:
    subsampling, marks = {
        "420": (2, {}),
        "444": (0, {}),
        "420 restart": (2, {"restart_marker_blocks": 3}),
        "422 rows": (1, {"restart_marker_rows": 1}),
    }[kind]
    data = by_pillow(pixels_of(131, 77, grain=15), subsampling=subsampling, **marks)
    return data, whole(data)


@portable
@given(data=st.data())
def test_any_window_equals_simplejpeg(portable, data):
    encoded, expected = example(
        data.draw(st.sampled_from(["420", "444", "420 restart", "422 rows"]))
    )
    left, top = data.draw(st.integers(0, 130)), data.draw(st.integers(0, 76))
    width, height = data.draw(st.integers(1, 131 - left)), data.draw(st.integers(1, 77 - top))
    pixels = np.empty((height, width, 3), np.uint8)
    assert native.decode_into(encoded, left, top, pixels, portable=portable) is Status.OK
    assert np.array_equal(pixels, expected[top : top + height, left : left + width])


@portable
def test_strided_rows_are_written_without_touching_the_gaps(portable):
    """The decoder must not change the bytes between the rows, before the first row or after the
    last row."""
    encoded, expected = example("420 restart")
    for channels, width in ((3, 1), (3, 31), (3, 64), (1, 31), (1, 64)):
        canvas = np.full((42, 70, channels), 77, np.uint8)
        view = canvas[1:41, 3 : 3 + width]
        assert native.decode_into(encoded, 9, 5, view, portable=portable) is Status.OK
        if channels == 3:
            assert np.array_equal(view, expected[5:45, 9 : 9 + width])
        view[:] = 77
        assert (canvas == 77).all()


def test_threads_do_not_interfere():
    files = [example(kind) for kind in ("420", "444", "420 restart", "422 rows")] * 50
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda file: native.decode_window(file[0], (10, 6, 100, 60)), files)
        )
    assert all(
        np.array_equal(pixels, expected[6:66, 10:110])
        for pixels, (_, expected) in zip(results, files, strict=True)
    )


# ---- refusals ------------------------------------------------------------------------------------


def status_of(
    data: bytes, window: tuple[int, int, int, int] = (0, 0, 8, 8), channels: int = 3
) -> Status:
    left, top, width, height = window
    status = native.decode_into(data, left, top, np.empty((height, width, channels), np.uint8))
    assert (native.decode_window(data, window, channels) is None) == (status is not Status.OK)
    return status


def test_a_refused_file_has_the_status_of_its_reason():
    pixels = pixels_of(40, 24, grain=10)
    plain = by_pillow(pixels, subsampling=0)
    frame = plain.index(b"\xff\xc0")
    assert status_of(plain) is Status.OK
    assert status_of(by_pillow(pixels, progressive=True)) is Status.PROGRESSIVE
    assert status_of(by_pillow(pixels, "CMYK")) is Status.COMPONENTS
    assert status_of(plain.replace(b"\xff\xc0", b"\xff\xc9")) is Status.PROCESS
    assert status_of(plain[: frame + 4] + b"\x0c" + plain[frame + 5 :]) is Status.PRECISION
    # With sampling factors of 3 x 1 and 2 x 1, a sample of the second component covers 1.5 pixels.
    thirds = bytearray(plain)
    thirds[frame + 11] = 0x31
    thirds[frame + 14] = 0x21
    assert status_of(bytes(thirds)) is Status.SAMPLING
    for window in (
        (0, 0, 41, 24),
        (0, 0, 40, 25),
        (33, 0, 8, 8),
        (40, 0, 1, 1),
        (2**32 - 4, 0, 8, 8),
    ):
        assert status_of(plain, window) is Status.WINDOW
    for nothing in (b"", b"\xff\xd8", b"GIF89a", plain[:100], plain[:-2], plain[: len(plain) // 2]):
        assert status_of(nothing) is Status.DAMAGED


@pytest.mark.parametrize(
    "factors",
    [(0x11, 0x22, 0x11), (0x11, 0x11, 0x22), (0x21, 0x12, 0x12), (0x12, 0x21, 0x21)],
    ids=str,
)
@pytest.mark.parametrize("names", [b"RGB", b"\1\2\3"], ids=["RGB", "YCbCr"])
def test_a_first_component_coarser_than_another_is_refused(factors, names):
    """libjpeg can decode chroma that has a higher resolution than luma, but encoders never write
    such files. The test declares 96 gray blocks as 16 MCUs of six blocks."""
    gray = by_pillow(pixels_of(96 * 8, 8, grain=15), "L")
    frame = gray.index(b"\xff\xc0")
    scan = gray.index(b"\xff\xda")
    components = b"".join(bytes((name, both, 0)) for name, both in zip(names, factors, strict=True))
    data = b"".join(
        (
            b"\xff\xd8",
            gray[20:frame],
            segment(0xC0, bytes((8, 0, 64, 0, 64, 3)) + components),
            gray[frame + 13 : scan],
            segment(0xDA, bytes((3, names[0], 0, names[1], 0, names[2], 0, 0, 63, 0))),
            gray[scan + 10 :],
        )
    )
    Image.open(io.BytesIO(data)).load()
    assert status_of(data) is Status.SAMPLING
    if names != b"RGB":
        assert status_of(data, channels=1) is Status.SAMPLING


@pytest.mark.parametrize("size", [(65500, 8), (8, 65500)], ids=str)
def test_images_up_to_the_size_limit_of_libjpeg_are_decoded(size):
    """libjpeg accepts images with up to 65,500 pixels per side, but the 16-bit size field in the
    header allows up to 65,535."""
    data = by_pillow(pixels_of(*size, grain=5), "L")
    assert np.array_equal(native.decode_window(data, (0, 0, *size), 1), whole(data, 1))
    place = data.index(b"\xff\xc0") + (7 if size[0] > 8 else 5)
    # Images with 65,501 or 65,504 pixels per side have the same number of blocks as those with
    # 65,500.
    for side in (65501, 65504):
        longer = data[:place] + side.to_bytes(2, "big") + data[place + 2 :]
        with pytest.raises(ValueError):  # noqa: PT011
            whole(longer)
        assert status_of(longer) is Status.DAMAGED


@pytest.mark.parametrize(
    "table",
    [
        bytes([0, 3, *[0] * 15, 0, 1, 2]),
        bytes([0x10, 3, *[0] * 15, 0, 1, 2]),
        bytes([0, 1, *[0] * 15, 16]),
    ],
)
def test_invalid_tables_are_refused_only_if_they_are_used(table):
    """libjpeg accepts tables with three 1-bit codes or 16-bit DC values if the image does not use
    them."""
    data = by_pillow(pixels_of(40, 24, grain=10), "L")
    scan = data.index(b"\xff\xda")
    unused, used = (
        data[:scan] + segment(0xC4, bytes([table[0] | number]) + table[1:]) + data[scan:]
        for number in (3, 0)
    )
    assert np.array_equal(native.decode_window(unused, (0, 0, 40, 24)), whole(unused))
    with pytest.raises(ValueError):  # noqa: PT011
        whole(used)
    assert status_of(used) is Status.DAMAGED


def test_wrong_restart_markers_and_sizes_are_refused():
    pixels = pixels_of(64, 48, grain=15)
    data = by_pillow(pixels, subsampling=0, restart_marker_blocks=2)
    assert status_of(data, (0, 0, 64, 48)) is Status.OK
    scan = data.index(b"\xff\xda")
    first = data.index(b"\xff\xd0", scan)
    second = data.index(b"\xff\xd1", scan)
    lies = {
        "two markers change places": (
            data[:first] + b"\xff\xd1" + data[first + 2 : second] + b"\xff\xd0" + data[second + 2 :]
        ),
        "a segment is missing": data[:first] + data[second:],
        "a segment has some bytes too few": data[: second - 6] + data[second:],
        "a segment has some bytes too many": data[:second] + b"\x55\x55\x55" + data[second:],
        "another interval": data.replace(b"\xff\xdd\x00\x04\x00\x02", b"\xff\xdd\x00\x04\x00\x04"),
        "no interval": data.replace(b"\xff\xdd\x00\x04\x00\x02", b"\xff\xfe\x00\x04\x00\x02"),
    }
    frame = data.index(b"\xff\xc0") + 5
    for height, width in ((48, 80), (64, 64), (65535, 65535), (48, 48), (40, 64)):
        lies[f"{width} x {height}"] = (
            data[:frame] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[frame + 4 :]
        )
    for lie, damaged in lies.items():
        with pytest.raises(ValueError):  # noqa: PT011
            whole(damaged)
        assert status_of(damaged, (0, 0, 64, 40 if "40" in lie else 48)) in (
            Status.DAMAGED,
            Status.WINDOW,
        ), lie


def test_only_the_segments_of_the_window_are_read():
    """The test corrupts all other segments, so decoding would fail if the decoder read them."""
    data = by_pillow(pixels_of(128, 64, grain=15), subsampling=0, restart_marker_blocks=4)
    expected = None
    expected = whole(data)
    scan = data.index(b"\xff\xda")
    starts = (
        [scan + 14]
        + [k + 2 for k in range(scan, len(data)) if data[k] == 0xFF and 0xD0 <= data[k + 1] <= 0xD7]
        + [len(data)]
    )
    # Each row has four segments. The window covers block columns 5 to 11 and block rows 2 to 4, so
    # it needs segments 1 and 2 of these rows.
    window = (40, 17, 50, 20)
    scribbled = bytearray(data)
    for segment in range(32):
        if not (2 <= segment // 4 <= 4 and 1 <= segment % 4 <= 2):
            begin = starts[segment]
            end = starts[segment + 1] - 2
            scribbled[begin:end] = bytes(end - begin)
    assert np.array_equal(native.decode_window(bytes(scribbled), window), expected[17:37, 40:90])
    assert native.decode_window(bytes(scribbled), (0, 0, 128, 64)) is None


def test_a_truncated_file_is_refused_for_every_window():
    """Whether an image can be read must not depend on the position of the random crop."""
    pixels = pixels_of(128, 64, grain=15)
    for marks in (
        {},
        {"restart_marker_blocks": 4},
        {"restart_marker_rows": 1},
        {"restart_marker_blocks": 5},
    ):
        data = by_pillow(pixels, subsampling=0, **marks)
        assert status_of(data) is Status.OK
        for num_bytes in (len(data) - 1, len(data) - 2, len(data) * 9 // 10, len(data) // 2):
            with pytest.raises(ValueError):  # noqa: PT011
                whole(data[:num_bytes])
            assert status_of(data[:num_bytes]) is Status.DAMAGED, (marks, num_bytes)
        if marks:
            for strange in (b"\xff\xd8", b"\xff\xda\0\x08", b"\xff\xf1", b"\xff\xd9"):
                at = len(data) * 3 // 4
                assert status_of(data[:at] + strange + data[at:]) is Status.DAMAGED, (
                    marks,
                    strange,
                )


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_changes_nothing(seed):
    """If the C decoder accepts a corrupt file, simplejpeg must decode the file to the same pixels
    without a warning."""
    rng = random.Random(seed)
    pixels = pixels_of(50, 41, grain=15)
    files = [
        by_pillow(pixels, subsampling=s, quality=80, **marks)
        for s in (0, 2)
        for marks in ({}, {"restart_marker_blocks": 2})
    ]
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        data = bytearray(rng.choice(files))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(2, len(data))
            change = rng.randrange(4)
            if change == 0:
                data[at] = rng.randrange(256)
            elif change == 1:
                data[at] ^= 1 << rng.randrange(8)
            elif change == 2:
                del data[at : at + rng.randint(1, 20)]
            else:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
            if len(data) < 30:
                break
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(bytes(data))
        except ValueError:
            height, width = 41, 50
        pixels = np.empty((min(height, 999), min(width, 999), 3), np.uint8)
        status = native.decode_into(bytes(data), 0, 0, pixels, portable=rng.random() < 0.5)
        outcomes[status is Status.OK] += 1
        if status is Status.OK:
            assert np.array_equal(pixels, whole(bytes(data))), bytes(data).hex()
    assert min(outcomes.values()) > 100, outcomes


def test_an_image_of_an_unexpected_or_excessive_size_is_refused():
    data = simplejpeg.encode_jpeg(np.zeros((64, 97, 3), np.uint8))
    pixels = np.empty((10, 10, 3), np.uint8)
    for size, status in {
        None: Status.OK,
        (97, 64): Status.OK,
        (64, 97): Status.IMAGE,
        (97, 65): Status.IMAGE,
    }.items():
        assert native.decode_into(data, 5, 5, pixels, stored_size=size) is status
    at = read_header(data).frame_offset + 5
    huge = data[:at] + (20_000).to_bytes(2, "big") * 2 + data[at + 4 :]
    assert native.decode_into(huge, 5, 5, pixels) is Status.IMAGE
