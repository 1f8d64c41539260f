"""Test that all decoding paths return the same pixels, reject the same images and use little
memory."""

import io
import random
import struct
import subprocess
import sys
import tarfile
import warnings
import zlib

import numpy as np
import pytest
from data.decode.fuzz_images import Comparison, encoded, fuzz, kinds, picture, png, without_native
from decoding import gray_tiff, planar_tiff, sixteen_bit_png
from PIL import EpsImagePlugin, Image

from data_prep.write.images import ImagePolicy, Unreadable, prepare
from vit.config.schema import EvalConfig
from vit.data.decode import native
from vit.data.decode.crops import decode_center
from vit.data.decode.images import (
    MAX_JPEG_SIDE,
    decode,
    decode_box,
    open_image,
    pixels_of,
    read_image_size,
)
from vit.data.decode.jpeg_header import MAX_PIXELS, read_header
from vit.data.shards.tar import scan_tar

REFUSED = {"JPEG 12 bits", "TIFF I", "TIFF F", "PPM F"}
"""The kinds of images that must be rejected. No decoder supports 12-bit JPEGs, and the value ranges
of the other kinds are unknown."""


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (97, 64)], ids=str)
def test_every_kind_of_image_has_the_same_pixels_on_every_path(size):
    """The test compares the C decoder, pip packages, full decoding, training, evaluation and
    preparation. The image size in the index must match as well."""
    differences_by_name = {}
    refused = set()
    for name, data in kinds(*size).items():
        compared = Comparison(data, random.Random(name))
        differences_by_name[name] = (
            compared.differences
            + ["reported as overlooked damage, but undamaged"] * compared.overlooked
        )
        if compared.size is None:
            refused.add(name)
    assert {
        name: differences for name, differences in differences_by_name.items() if differences
    } == {}
    assert refused == REFUSED


def test_damaged_images_have_the_same_pixels_or_the_same_refusal_on_every_path(tmp_path):
    counts, mismatches = fuzz(range(300), 0, tmp_path)
    assert mismatches == []
    assert counts["decoded"] > 50
    assert counts["refused"] > 50


@pytest.mark.full
def test_many_damaged_images_have_the_same_pixels_or_the_same_refusal(tmp_path):
    counts, mismatches = fuzz(range(3000), int.from_bytes(random.randbytes(4), "little"), tmp_path)
    assert mismatches == []
    assert counts["decoded"] > 1000


@pytest.mark.parametrize("transform", [0, 2], ids=["CMYK", "YCCK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_cmyk_window_without_restart_markers_equals_pillow(transform, channels):
    """For a window of a CMYK image, simplejpeg warns about bytes below the window before it has
    written any pixels."""
    data = encoded(picture(500, 375, "CMYK"), "JPEG")
    at = data.index(b"Adobe") + 11
    data = data[:at] + bytes([transform]) + data[at + 1 :]
    theirs = np.asarray(
        Image.open(io.BytesIO(data)).convert("RGB" if channels == 3 else "L")
    ).reshape(375, 500, channels)
    for left, top, width, height in [(0, 0, 100, 80), (200, 100, 50, 100), (499, 300, 1, 1)]:
        with without_native():
            pixels = decode_box(data, (left, top, width, height), channels)
        np.testing.assert_array_equal(pixels, theirs[top : top + height, left : left + width])


def test_uninitialized_pixels_are_not_returned():
    """The corrupt file makes simplejpeg report a warning, and then an error before it has written
    any pixels. If simplejpeg ignored warnings, it would return uninitialized memory."""
    data = bytearray(encoded(picture(128, 128), "JPEG"))
    scan = read_header(bytes(data)).scan_offset
    # A coefficient index that is valid only in progressive scans causes a warning in a baseline
    # file.
    data[scan - 3] = 1
    # A reference to a missing Huffman table causes an error.
    data[scan - 8] = 0x33
    with without_native(), pytest.raises(ValueError, match="cannot decode"):
        decode_box(bytes(data), (10, 10, 20, 20))


# ---- colors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_sixteen_bit_gray_is_scaled_in_training_as_in_preparation(form):
    ramp = np.linspace(0, 65535, 64 * 96).reshape(64, 96).astype(np.uint16)
    data = encoded(Image.fromarray(ramp), form)
    for channels in (1, 3):
        pixels = decode(data, channels)
        assert abs(pixels.mean() - 127.5) < 0.5, (
            "clipping would make the image white, with a mean of 254"
        )
        assert np.abs(pixels.astype(float) - ramp[..., None] / 257).max() <= 0.5
    prepared = decode(prepare(data, ImagePolicy(jpeg_quality=100)).data)
    assert np.abs(prepared.astype(int) - pixels).max() <= 2


GRAY = np.linspace(0, 1, 64 * 96).reshape(64, 96)
TWELVE = np.round(GRAY * 4095).astype(np.uint16)
SIXTEEN = np.round(GRAY * 65535).astype(np.uint16)


@pytest.mark.parametrize(
    "data",
    [
        gray_tiff(TWELVE, 12),
        gray_tiff(SIXTEEN, 16),
        gray_tiff(65535 - SIXTEEN, 16, photometric=0),  # white is zero
        b"P5 96 64 4095 " + TWELVE.astype(">u2").tobytes(),
        sixteen_bit_png(TWELVE << 4 | TWELVE >> 8, significant_bits=12),
    ],
    ids=["TIFF 12", "TIFF 16", "TIFF 16 inverted", "PGM 4095", "PNG sBIT 12"],
)
def test_gray_is_scaled_by_the_range_that_the_file_states(data):
    for pixels in (decode(data, 1), decode(data, 3)[..., :1]):
        assert np.abs(pixels[..., 0] - GRAY * 255).max() <= 0.75
    np.testing.assert_array_equal(decode_box(data, (9, 40, 30, 8)), decode(data)[40:48, 9:39])
    prepared = prepare(data, ImagePolicy(jpeg_quality=100))
    assert np.abs(decode(prepared.data)[..., 0] - GRAY * 255).max() <= 3
    assert "no value above" not in str(prepared.change)


PLANES = np.stack([SIXTEEN, SIXTEEN[::-1], SIXTEEN[:, ::-1]])


@pytest.mark.parametrize(
    "data",
    [planar_tiff((PLANES >> 8).astype(np.uint8)), planar_tiff(PLANES, compressed=True)],
    ids=["8 bits", "16 bits, compressed"],
)
def test_planes_of_colors_are_decoded(data):
    assert np.abs(decode(data) - (PLANES >> 8).transpose(1, 2, 0).astype(float)).max() <= 1


@pytest.mark.parametrize(
    ("color_type", "channels"),
    [(2, [0, 1, 2]), (4, [0, 0, 0]), (6, [0, 1, 2])],
    ids=["RGB", "LA", "RGBA"],
)
def test_sixteen_bit_colors_are_cut_to_the_upper_eight_bits(color_type, channels):
    data = png(color_type, 5, 4)
    samples = {2: 3, 4: 2, 6: 4}[color_type]
    rng = random.Random(color_type)
    rows = np.stack(
        [np.frombuffer(rng.randbytes(2 * samples * 5), ">u2").reshape(5, samples) for _ in range(4)]
    )
    np.testing.assert_array_equal(decode(data), (rows >> 8)[..., channels])


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_keep_their_hidden_color_as_in_timm_and_torchvision(mode):
    image = picture(40, 30, mode)
    np.testing.assert_array_equal(decode(encoded(image, "PNG")), np.asarray(image.convert("RGB")))
    image.putalpha(0)
    np.testing.assert_array_equal(decode(encoded(image, "PNG")), np.asarray(image.convert("RGB")))


def test_palettes_with_transparency_are_read_without_warnings(capfd):
    data = encoded(picture(40, 30, "P"), "PNG", transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(data).shape == (30, 40, 3)
        assert decode_center(data, (16, 16), EvalConfig(), "bilinear").shape == (3, 16, 16)
    assert capfd.readouterr() == ("", "")


# ---- rejected files ------------------------------------------------------------------------------

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n"


def test_a_bitmap_without_a_file_header_is_read():
    """The clipboard of Windows contains such images, which have the suffix .dib."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8))
    data = io.BytesIO()
    image.save(data, "DIB")
    np.testing.assert_array_equal(decode(data.getvalue()), np.asarray(image))


def test_no_file_starts_another_program(tmp_path, monkeypatch):
    """Pillow starts Ghostscript for any file that begins like PostScript, regardless of the file's
    name."""
    log = tmp_path / "log"
    program = tmp_path / "gs"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho 10.0\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    with pytest.raises(OSError), Image.open(io.BytesIO(POSTSCRIPT)) as image:  # noqa: PT011
        image.load()
    assert log.exists(), "Pillow must start the program, or this test proves nothing"
    log.unlink()

    for reader in (
        decode,
        read_image_size,
        open_image,
        lambda data: decode_box(data, (0, 0, 8, 8)),
    ):
        with pytest.raises(
            ValueError,
            match=r"not an image; expected one of JPEG, PNG, .* begin with b'%!PS-Adobe-3\.0 E'",
        ):
            reader(POSTSCRIPT)
    with pytest.raises(ValueError, match="not an image"):
        decode_center(POSTSCRIPT, (16, 16), EvalConfig(), "bilinear")
    with pytest.raises(Unreadable, match="not an image"):
        prepare(POSTSCRIPT, ImagePolicy())
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in (("s0.jpg", POSTSCRIPT), ("s0.cls", b"1")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(ValueError, match="not an image"):
        scan_tar(tmp_path / "a.tar")
    assert not log.exists()


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "jpeg"])
def test_libtiff_prints_nothing_about_damaged_images(compression, capfd):
    image = io.BytesIO()
    picture(64, 48).save(image, "TIFF", compression=compression)
    data = bytearray(image.getvalue())
    data[8:1000] = random.Random(0).randbytes(992)
    with pytest.raises(ValueError, match=r"\w"):
        decode(bytes(data))
    assert capfd.readouterr().err == ""


def said_to_have(data: bytes, width: int, height: int) -> bytes:
    at = read_header(data).frame_offset + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def huge_tiles() -> bytes:
    """Return a TIFF of 64 x 48 pixels whose tiles are so large that libtiff would allocate 1.6 GB
    for each tile."""
    content = zlib.compress(bytes(64 * 48))
    tags = {
        256: 64,
        257: 48,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: 40_000,
        323: 40_000,
        324: 134,
        325: len(content),
    }
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + content


JPEG = encoded(picture(16, 16), "JPEG")
STRAY = JPEG[:20] + b"stray" + JPEG[20:]
FRAME = STRAY.index(b"\xff\xc0") + 5
BEYOND = {
    "a wide JPEG": (said_to_have(JPEG, MAX_JPEG_SIDE + 1, 1), "sides of a JPEG"),
    "a large JPEG": (
        said_to_have(JPEG, 20_000, 10_000),
        f"20000 x 10000 pixels exceed the limit of {MAX_PIXELS}",
    ),
    "a wide JPEG, odd": (
        STRAY[:FRAME] + struct.pack(">HH", 8, 65_535) + STRAY[FRAME + 4 :],
        "sides of a JPEG",
    ),
    "a large JPEG, odd": (
        STRAY[:FRAME] + struct.pack(">HH", 10_000, 20_000) + STRAY[FRAME + 4 :],
        "more than|exceed the limit",
    ),
    "a large PPM": (b"P6 20000 10000 255 ", f"(more than|limit of) {MAX_PIXELS}"),
    "a PPM of one pixel too many": (
        b"P5 %d 2 255 " % (MAX_PIXELS // 2 + 1),
        "more than|exceed the limit",
    ),
    "floats": (encoded(picture(8, 8, "F"), "TIFF"), "the range of pixels of mode F is unknown"),
    "planes of 16 bits": (planar_tiff(PLANES), "misreads uncompressed TIFFs with one plane"),
    "an inverted plane": (
        planar_tiff((PLANES[:1] >> 8).astype(np.uint8), photometric=0),
        "misreads uncompressed TIFFs with one plane",
    ),
    "a TIFF of 14 bits": (
        gray_tiff(SIXTEEN >> 2, 14),
        "the TIFF is damaged, or has too many bits or bands for Pillow",
    ),
    "huge tiles": (huge_tiles(), f"40000 x 40000 pixels exceed the limit of {MAX_PIXELS}"),
    "nothing": (b"", "0 bytes"),
}


@pytest.mark.parametrize(
    "limit", [Image.MAX_IMAGE_PIXELS, None], ids=["Pillow's limit", "no limit of Pillow's"]
)
@pytest.mark.parametrize(("data", "reason"), BEYOND.values(), ids=BEYOND)
def test_the_indexer_refuses_every_header_that_the_loader_refuses(data, reason, limit, monkeypatch):
    # The limit applies to the whole process, so another library may have changed it.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    for reader in (
        read_image_size,
        decode,
        lambda data: decode_box(data, (0, 0, 1, 1)),
        lambda data: prepare(data, ImagePolicy()),
    ):
        with pytest.raises(ValueError, match=reason):
            reader(data)


def test_pillow_the_c_decoder_and_the_header_check_have_the_same_limit():
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
    if native.AVAILABLE:
        wide = 59_652
        high = 3_000
        assert wide * high <= MAX_PIXELS < wide * (high + 1)
        pixels = np.empty((1, 1, 3), np.uint8)
        statuses = (
            native.decode_into(said_to_have(JPEG, wide, high), 0, 0, pixels),
            native.decode_into(said_to_have(JPEG, wide, high + 1), 0, 0, pixels),
        )
        assert (statuses[0] is native.Status.IMAGE, statuses[1] is native.Status.IMAGE) == (
            False,
            True,
        )


def test_a_window_of_a_large_png_needs_only_the_decoders_memory(tmp_path):
    """Pillow needs 4 bytes per pixel. Copies in other color modes would increase this to 16
    bytes."""
    encoded_png = tmp_path / "large.png"
    Image.new("RGB", (6000, 5000), (1, 2, 3)).save(encoded_png, compress_level=1)
    code = (
        "import resource, sys\nfrom vit.data.decode.images import decode_box\ndata ="
        " open(sys.argv[1], 'rb').read()\nbefore ="
        " resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nassert decode_box(data, (100, 100,"
        " 500, 500))[7, 7].tolist() == [1, 2,"
        " 3]\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, encoded_png], capture_output=True, text=True, check=True
    )
    scale = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * scale < 6 * 6000 * 5000


def test_a_decoded_window_equals_the_window_of_the_decoded_image():
    for name, data in kinds(97, 64).items():
        if name in REFUSED:
            continue
        whole = pixels_of(open_image(data))
        np.testing.assert_array_equal(
            pixels_of(open_image(data), box=(11, 7, 50, 40)), whole[7:47, 11:61], err_msg=name
        )
