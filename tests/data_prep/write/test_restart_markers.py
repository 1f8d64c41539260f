"""Test restart markers against jpegtran and against libjpeg's decoder and encoder."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageCms

from data_prep import imagefolder
from data_prep.errors import PrepError
from data_prep.write import restart_markers
from data_prep.write.images import ImagePolicy, prepare
from data_prep.write.restart_markers import Marked, with_restart_markers
from vit.data.decode import native
from vit.data.decode.jpeg_header import read_header

if not native.AVAILABLE and os.environ.get("VIT_REQUIRE_NATIVE") == "1":
    pytest.fail(f"VIT_REQUIRE_NATIVE=1, but {native.UNAVAILABLE_REASON}", pytrace=False)
NEEDS_NATIVE = pytest.mark.skipif(
    not native.AVAILABLE, reason=native.UNAVAILABLE_REASON or "VIT_NATIVE=0 is set"
)
NEEDS_JPEGTRAN = pytest.mark.skipif(
    shutil.which("jpegtran") is None, reason="no jpegtran: apt-get install libjpeg-turbo-progs"
)


def pixels(width: int, height: int, noise: float = 12) -> np.ndarray:
    """Return smooth colors with noise, (height, width, 3) uint8. Like photos, the image has long
    and short runs of zero coefficients."""
    generator = np.random.default_rng(width * 1000 + height)
    coarse = Image.fromarray(generator.integers(0, 256, (4, 5, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return (
        (np.asarray(coarse) + generator.normal(0, noise, (height, width, 3)))
        .clip(0, 255)
        .astype(np.uint8)
    )


def encode(width: int, height: int, mode: str = "RGB", noise: float = 12, **options) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels(width, height, noise)).convert(mode).save(encoded, "JPEG", **options)
    return encoded.getvalue()


def simple(width: int, height: int, sampling: str, quality: int = 85) -> bytes:
    image = np.ascontiguousarray(pixels(width, height))
    if sampling == "Gray":
        return simplejpeg.encode_jpeg(np.ascontiguousarray(image[..., :1]), quality, "GRAY", "Gray")
    return simplejpeg.encode_jpeg(image, quality, "RGB", sampling)


def exif() -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = 6
    tags[0x010E] = "a description " * 50
    return tags


PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SIZES = [
    (1, 1),
    (1, 40),
    (40, 1),
    (8, 8),
    (9, 7),
    (17, 33),
    (64, 64),
    (130, 75),
    (256, 31),
    (500, 66),
]
FILES = {
    **{
        f"{name} {w}x{h}": simple(w, h, name)
        for w, h in SIZES
        for name in ("444", "422", "420", "440", "411", "Gray")
    },
    **{f"quality {q}": encode(200, 100, quality=q) for q in (1, 30, 60, 95, 100)},
    "optimized": encode(300, 200, optimize=True),
    "noise of all frequencies": encode(160, 120, noise=90, quality=100, subsampling=0),
    "one color": encode(400, 300, noise=0, quality=30),
    "RGB, not YCbCr": encode(120, 80, keep_rgb=True),
    "markers every MCU": encode(100, 80, restart_marker_blocks=1),
    "markers anywhere": encode(200, 90, restart_marker_blocks=7),
    "markers every row": encode(200, 90, restart_marker_rows=1, quality=95),
    "EXIF, ICC, comment": encode(120, 90, exif=exif(), icc_profile=PROFILE, comment=b"a comment"),
    "16-bit quantisation tables": encode(64, 64, qtables=[[300] * 64, [500] * 64]),
}


def interval_for(mcus_wide: int) -> int:
    """Return the expected number of MCUs between two markers: the largest divisor of a row that
    yields eight segments, else the divisor that yields the most segments, else the whole row."""
    divisors = [k for k in range(2, mcus_wide // 2 + 1) if mcus_wide % k == 0]
    wanted = [k for k in divisors if mcus_wide // k >= 8]
    return wanted[-1] if wanted else divisors[0] if divisors else mcus_wide


def segments(data: bytes) -> list[tuple[int, bytes]]:
    """Return (marker, bytes) for each segment up to the start of scan."""
    parts = []
    position = 2
    while True:
        marker = data[position + 1]
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        parts.append((marker, data[position:end]))
        if marker == 0xDA:
            return parts
        position = end


TABLES = 0xC4
INTERVAL = 0xDD
SCAN = 0xDA


def check_same_image(marked: bytes, original: bytes) -> None:
    """Check that the image is unchanged, and that the markers are in the right positions."""
    decoded = [simplejpeg.decode_jpeg(data, "RGB", strict=True) for data in (marked, original)]
    assert np.array_equal(*decoded), "the pixels differ"
    replaced = (TABLES, INTERVAL, SCAN)
    headers = [
        [segment for segment in segments(data) if segment[0] not in replaced]
        for data in (marked, original)
    ]
    assert headers[0] == headers[1], "the headers differ"
    header = read_header(marked)
    mcus_wide = -(-header.width // header.mcu_size[0])
    mcus_high = -(-header.height // header.mcu_size[1])
    assert header.restart_interval == interval_for(mcus_wide)
    numbers = [
        number[0] - 0xD0
        for number in re.findall(rb"\xff([\xd0-\xd7])", marked[header.scan_offset :])
    ]
    assert numbers == [
        k % 8 for k in range(mcus_high * mcus_wide // header.restart_interval - 1)
    ], "segments are missing or in the wrong order"


@NEEDS_NATIVE
@pytest.mark.parametrize("name", FILES)
def test_pixels_and_headers_are_unchanged(name: str):
    marked, reason = with_restart_markers(FILES[name])
    assert reason is None
    check_same_image(marked, FILES[name])
    assert with_restart_markers(marked) == (marked, None), "a second pass must not change the bytes"


@NEEDS_NATIVE
@NEEDS_JPEGTRAN
@pytest.mark.parametrize("name", FILES)
def test_codes_equal_those_of_jpegtran(name: str):
    """jpegtran uses libjpeg-turbo's decoder, optimal Huffman tables and encoder."""
    header = read_header(FILES[name])
    interval = interval_for(-(-header.width // header.mcu_size[0]))
    command = ["jpegtran", "-optimize", "-restart", f"{interval}B", "-copy", "none"]
    by_libjpeg = subprocess.run(command, input=FILES[name], capture_output=True, check=True).stdout
    marked = with_restart_markers(FILES[name]).data
    assert marked[marked.index(b"\xff\xc4") :] == by_libjpeg[by_libjpeg.index(b"\xff\xc4") :]


@NEEDS_NATIVE
@pytest.mark.parametrize("size", [(333, 97), (640, 48), (248, 160)], ids=str)
@pytest.mark.parametrize("options", [{}, {"mode": "L"}, {"subsampling": 0, "quality": 97}], ids=str)
def test_bytes_equal_those_of_libjpegs_encoder(size: tuple[int, int], options: dict):
    """Pillow's libjpeg writes the same file if it optimizes the tables and uses the same marker
    interval."""
    plain = encode(*size, **options)
    header = read_header(plain)
    interval = interval_for(-(-header.width // header.mcu_size[0]))
    assert with_restart_markers(plain).data == encode(
        *size, **options, optimize=True, restart_marker_blocks=interval
    )


@NEEDS_NATIVE
def test_intervals_are_a_divisor_of_the_row():
    """Each row must have at least eight intervals, but as few as possible. If eight are impossible,
    the row must have as many intervals as possible, each of at least two MCUs. If this is also
    impossible, the row must be a single interval."""
    for mcus_wide in range(1, 130):
        marked = with_restart_markers(simple(8 * mcus_wide, 8, "Gray")).data
        assert read_header(marked).restart_interval == interval_for(mcus_wide)


@NEEDS_NATIVE
@pytest.mark.parametrize("quality", [75, 90, 96])
def test_photographs_get_smaller(quality: int):
    original = encode(500, 375, quality=quality)
    assert len(with_restart_markers(original).data) < 0.99 * len(original)


# ---- files that do not change --------------------------------------------------------------------


def patched(data: bytes, place: int, value: int) -> bytes:
    return data[:place] + bytes((value,)) + data[place + 1 :]


def component_by_component(data: bytes) -> bytes:
    """Return a JPEG with one scan per component."""
    if shutil.which("jpegtran") is None:
        pytest.skip("no jpegtran: apt-get install libjpeg-turbo-progs")
    with open(os.memfd_create("scans"), "wb+") as script:
        script.write(b"0; 1; 2;")
        script.flush()
        path = f"/proc/self/fd/{script.fileno()}"
        return subprocess.run(
            ["jpegtran", "-scans", path],
            input=data,
            capture_output=True,
            check=True,
            pass_fds=(script.fileno(),),
        ).stdout


PLAIN = encode(120, 80)
FRAME = PLAIN.index(b"\xff\xc0")
KEPT = {
    "progressive": lambda: encode(120, 80, progressive=True),
    "arithmetic or lossless": lambda: patched(PLAIN, FRAME + 1, 0xC9),
    "not 8 bits": lambda: patched(PLAIN, FRAME + 4, 12),
    "CMYK": lambda: encode(120, 80, mode="CMYK"),
    "several scans": lambda: component_by_component(PLAIN),
    "bytes behind the image": lambda: PLAIN + b"\0",
    "damaged": lambda: PLAIN[: len(PLAIN) // 2],
}


@NEEDS_NATIVE
@pytest.mark.parametrize("reason", restart_markers.REASONS.values())
def test_unusual_jpegs_keep_their_bytes(reason: str):
    data = KEPT[reason]()
    assert with_restart_markers(data) == (data, reason)


@NEEDS_NATIVE
@pytest.mark.parametrize(
    "damage",
    [
        "stray byte",
        "missing marker",
        "swapped markers",
        "extra marker",
        "cut off",
        "no end",
        "other bits",
    ],
)
def test_damaged_files_keep_their_bytes(damage: str):
    data = encode(200, 90, restart_marker_blocks=7)
    first = data.index(b"\xff\xd0")
    second = data.index(b"\xff\xd1")
    damaged = {
        "stray byte": data[:first] + b"\x12" + data[first:],
        "missing marker": data[:first] + data[first + 2 :],
        "swapped markers": patched(patched(data, first + 1, 0xD1), second + 1, 0xD0),
        "extra marker": data[:first] + b"\xff\xd0" + data[first:],
        "cut off": data[:-200],
        "no end": data[:-2],
        "other bits": (
            data[: first + 2]
            + bytes(min(byte ^ 0x5A, 0xFE) for byte in data[first + 2 : second])
            + data[second:]
        ),
    }[damage]
    assert with_restart_markers(damaged) == (damaged, "damaged")


BETWEEN_HEADERS = {
    "TEM": (b"\xff\x01", "damaged"),
    "restart marker": (b"\xff\xd3", "damaged"),
    "number of lines": (b"\xff\xdc\0\4\0\x50", "damaged"),
    "reserved": (b"\xff\xc8\0\4\0\0", "damaged"),
    "arithmetic conditioning": (b"\xff\xcc\0\4\0\x10", "arithmetic or lossless"),
    "a table of too many codes, unused": (b"\xff\xc4\0\x16\x13\3" + bytes(15) + b"\1\2\3", None),
    "a DC table of 16 bits, unused": (b"\xff\xc4\0\x14\3\1" + bytes(15) + b"\x10", None),
}


@NEEDS_NATIVE
@pytest.mark.parametrize("name", BETWEEN_HEADERS)
def test_unusual_data_between_headers_never_change_the_image(name: str):
    strange, expected = BETWEEN_HEADERS[name]
    for place in (FRAME, PLAIN.index(b"\xff\xda")):
        data = PLAIN[:place] + strange + PLAIN[place:]
        marked, reason = with_restart_markers(data)
        assert reason == expected
        if expected is None:
            check_same_image(marked, data)
        else:
            assert marked == data


@NEEDS_NATIVE
def test_an_almost_empty_image_is_transcoded():
    """The file has two bits per block, and a 16-bit marker for every two blocks, so the first
    output buffer is too small."""
    encoded = io.BytesIO()
    Image.new("L", (128, 64_000), 77).save(encoded, "JPEG", optimize=True)
    marked, reason = with_restart_markers(encoded.getvalue())
    assert reason is None
    assert len(marked) > 3 * len(encoded.getvalue()) + (1 << 16)
    check_same_image(marked, encoded.getvalue())


@NEEDS_NATIVE
def test_damage_never_changes_an_image():
    """For any input bytes, the output must be the same image or the same bytes."""
    random.seed(0)
    files = [
        simple(*size, name) for size in ((40, 24), (65, 33)) for name in ("444", "420", "Gray")
    ]
    outcomes = Counter()
    files += [encode(100, 40, restart_marker_blocks=3), encode(90, 50, optimize=True, exif=exif())]
    for _ in range(1500):
        damaged = bytearray(random.choice(files))
        for _ in range(random.choice((1, 1, 2, 8))):
            place = random.randrange(random.choice((640, len(damaged)))) % len(damaged)
            damaged[place] = random.choice(
                (0, 0xFF, 0x0F, random.randrange(256), damaged[place] ^ 1 << random.randrange(8))
            )
        data = bytes(
            damaged[: random.randrange(len(damaged))] if random.random() < 0.2 else damaged
        )
        marked, reason = with_restart_markers(data)
        outcomes[reason] += 1
        if reason is not None:
            assert marked == data
            continue
        try:
            expected = simplejpeg.decode_jpeg(data, "RGB", strict=False)
        except ValueError:
            continue  # libjpeg is stricter about headers than transcoding must be
        assert np.array_equal(simplejpeg.decode_jpeg(marked, "RGB", strict=False), expected)
    assert outcomes[None] > 100, outcomes
    assert outcomes["damaged"] > 100, outcomes


# ---- data preparation ----------------------------------------------------------------------------


@NEEDS_NATIVE
@pytest.mark.parametrize("check", ["decode", "headers"])
def test_the_policy_controls_restart_markers(check: str):
    policy = ImagePolicy(check, restart_markers="auto")
    original = encode(200, 120)
    prepared = prepare(original, policy)
    assert prepared.change == "with restart markers"
    assert (prepared.width, prepared.height) == (200, 120)
    check_same_image(prepared.data, original)
    progressive = prepare(encode(200, 120, progressive=True), policy)
    assert progressive[:4] == (
        encode(200, 120, progressive=True),
        200,
        120,
        "without restart markers: progressive",
    )


@NEEDS_NATIVE
def test_converted_images_get_markers_too():
    png = io.BytesIO()
    Image.fromarray(pixels(160, 120)).save(png, "PNG")
    for data, short_side in (
        (png.getvalue(), None),
        (encode(300, 200), 50),
        (encode(90, 80, "CMYK"), None),
    ):
        without = prepare(data, ImagePolicy(resize_short_side=short_side))
        prepared = prepare(data, ImagePolicy(resize_short_side=short_side, restart_markers="auto"))
        assert prepared.change == f"{without.change}, with restart markers"
        check_same_image(prepared.data, without.data)


@NEEDS_NATIVE
def test_the_option_is_recorded():
    """Datasets written before the introduction of restart markers must still be resumable."""
    assert "restart_markers" not in ImagePolicy().options()
    marked = ImagePolicy(restart_markers="auto")
    assert marked.options() == {**ImagePolicy().options(), "restart_markers": "auto"}
    assert ImagePolicy(**json.loads(json.dumps(marked.options()))) == marked


def test_without_the_c_library_no_markers_are_written(monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", False)
    monkeypatch.setattr(native, "UNAVAILABLE_REASON", "it was not built")
    with pytest.raises(
        PrepError, match="--restart-markers auto needs this package's native code: it was not built"
    ):
        ImagePolicy(restart_markers="auto")


@NEEDS_NATIVE
def test_a_dataset_with_restart_markers_is_consistent(tmp_path, capsys):
    """Sidecars, card and info must agree, and runs with different options must be rejected."""
    for number in range(6):
        for name in ("cat", "dog"):
            path = tmp_path / "images" / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(96 + number, 64, progressive=name == "dog" and number < 2))
    line = [
        str(tmp_path / "images"),
        "--out",
        str(tmp_path / "out"),
        "--num-shards",
        "2",
        "--workers",
        "1",
    ]
    assert imagefolder.main([*line, "--restart-markers", "auto"]) == 0
    info = json.loads((tmp_path / "out" / "_info.json").read_text())
    assert info["options"]["restart_markers"] == "auto"
    assert info["changed"] == {
        "with restart markers": 10,
        "without restart markers: progressive": 2,
    }
    card = (tmp_path / "out" / "dataset.md").read_text()
    assert re.search(
        "10 images got restart markers .* same pixels in every decoder. 2 were not changed:"
        " 2 progressive.\n",
        card,
    )
    assert imagefolder.main(line) == 2
    assert 'restart_markers was "auto", now null' in capsys.readouterr().err


@NEEDS_NATIVE
def test_files_that_are_not_jpegs_stay_unchanged():
    assert with_restart_markers(b"no JPEG") == Marked(b"no JPEG", "damaged")
