"""Test that decoding and resizing match Pillow and torchvision."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from decoding import by_pillow, encode, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from vit.data.decode.crops import decode_views, resize
from vit.data.decode.images import decode, decode_box
from vit.data.decode.jpeg_header import read_header

PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9))


# --- decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"quality": 95, "subsampling": 0}, {"quality": 75, "subsampling": 2}, {"progressive": True}],
)
def test_a_jpeg_has_the_same_pixels_as_in_pillow(options):
    data = encode(picture(), **options)
    pixels = decode(data)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, by_pillow(data))


def test_a_gray_jpeg_is_decoded_as_gray_and_as_color():
    data = encode(picture(mode="L"))
    np.testing.assert_array_equal(decode(data, channels=1)[..., 0], by_pillow(data, "L"))
    np.testing.assert_array_equal(decode(data, channels=3), by_pillow(data, "RGB"))


def test_a_color_jpeg_decoded_as_gray_is_its_luma():
    data = encode(picture(), quality=95)
    luma = Image.open(io.BytesIO(data))
    luma.draft("L", luma.size)
    np.testing.assert_array_equal(decode(data, channels=1)[..., 0], luma)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("PNG", "L"),
        ("PNG", "P"),
        ("PNG", "1"),
        ("WEBP", "RGB"),
        ("GIF", "P"),
    ],
)
def test_other_formats_have_the_same_pixels_as_in_pillow(form, mode, channels):
    data = encode(picture().convert(mode), form)
    pixels = decode(data, channels)
    assert pixels.shape == (64, 97, channels)
    np.testing.assert_array_equal(
        pixels.squeeze(), by_pillow(data, "RGB" if channels == 3 else "L")
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_a_cmyk_jpeg_has_the_same_pixels_as_in_pillow(channels):
    data = encode(picture().convert("CMYK"))
    theirs = by_pillow(data, "RGB" if channels == 3 else "L").reshape(64, 97, channels)
    assert np.abs(decode(data, channels).astype(int) - theirs).max() <= 2, (
        "simplejpeg and Pillow differ by more than rounding in the color conversion"
    )


def other_sampling(luma: bytes, progressive: bool = False) -> bytes:
    """Return a JPEG of 64 x 64 pixels whose luma sampling factors are replaced by `luma` (4 bits
    horizontal, 4 bits vertical)."""
    data = encode(picture(64, 64), quality=90, subsampling="4:2:0", progressive=progressive)
    at = data.index(b"\x01\x22\x00", read_header(data).frame_offset)
    return data[: at + 1] + luma + data[at + 2 :]


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("luma", [b"\x41", b"\x14"], ids=["4:1:1", "4:4:1"])
def test_rare_samplings_have_the_same_pixels_as_in_pillow(luma, progressive, decoder):
    """simplejpeg does not support 4:4:1 subsampling by name. A 4:4:1 file contains the same blocks
    as a 4:2:0 file, but in a different order."""
    data = other_sampling(luma, progressive)
    np.testing.assert_array_equal(decode(data), by_pillow(data))
    np.testing.assert_array_equal(decode_box(data, (30, 5, 20, 50)), by_pillow(data)[5:55, 30:50])


def test_gray_is_the_stored_luma_even_if_pillow_decodes(decoder):
    data = other_sampling(b"\x14")
    luma = Image.open(io.BytesIO(data))
    luma.draft("YCbCr", None)
    np.testing.assert_array_equal(decode(data, 1)[..., 0], np.asarray(luma)[..., 0])
    np.testing.assert_array_equal(
        decode_box(data, (30, 5, 20, 50), 1), decode(data, 1)[5:55, 30:50]
    )


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.95])
def test_truncated_images_are_refused(form, fraction):
    data = encode(picture(), form)
    with pytest.raises(ValueError, match=rf"cannot decode {int(fraction * len(data))} bytes: \w+"):
        decode(data[: int(fraction * len(data))])


def huge_png() -> bytes:
    """Return a PNG whose header declares 40,000 x 40,000 pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


GARBAGE = {
    "empty": b"",
    "start of JPEG": b"\xff\xd8",
    "text": b"not an image",
    "zeros": bytes(1000),
    "bomb": huge_png(),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused(data):
    with pytest.raises(ValueError, match=f"cannot decode {len(data)} bytes: "):
        decode(data)


def test_a_jpeg_with_an_excessive_size_is_refused_before_memory_is_allocated():
    data = bytearray(encode(picture()))
    # In a JPEG, the height and width follow the start-of-frame marker, the segment length and the
    # precision.
    size = data.index(b"\xff\xc0") + 5
    data[size : size + 4] = struct.pack(">HH", 30_000, 30_000)
    with pytest.raises(ValueError, match="30000 x 30000 pixels exceed the limit of"):
        decode(bytes(data))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=300)
@given(
    st.sampled_from(["JPEG", "PNG", "WEBP", *(["AVIF"] if features.check("avif") else [])]),
    st.data(),
)
def test_damage_raises_only_a_value_error(form, data):
    damaged = bytearray(encode(picture(24, 16), form))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = decode(bytes(damaged))
    except ValueError:
        return
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3


def test_the_exif_orientation_is_ignored_by_default():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = picture()
    turned = encode(image, exif=exif)
    assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == 6
    np.testing.assert_array_equal(decode(turned), decode(encode(image)))


# --- resize ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "window",
    [(0, 0, 97, 64), (10, 5, 40, 50), (90, 60, 7, 4), (13, 7, 32, 32)],
    ids=["whole", "inner", "tiny", "as is"],
)
def test_a_window_is_the_antialiased_resize_of_the_crop(window, interpolation):
    left, top, width, height = window
    data = encode(picture())
    [ours] = decode_views(data, [window], (32, 32), interpolation)
    assert (ours.dtype, ours.shape) == (torch.uint8, (3, 32, 32))

    crop = (
        torch.from_numpy(by_pillow(data))
        .permute(2, 0, 1)[:, top : top + height, left : left + width]
        .contiguous()
    )
    np.testing.assert_array_equal(
        ours, F.interpolate(crop[None], (32, 32), mode=interpolation, antialias=True)[0]
    )

    image = Image.fromarray(by_pillow(data))
    cropped = np.array(
        image.crop((left, top, left + width, top + height)).resize((32, 32), PILLOW[interpolation])
    )
    assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - cropped).max() <= 2
    assert psnr(ours.permute(1, 2, 0).numpy(), cropped) > 55


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_window_is_close_to_a_box_resized_by_pillow(interpolation):
    data = encode(picture(400, 300), quality=90)
    left, top, width, height = (31, 17, 250, 260)
    ours = (
        decode_views(data, [(left, top, width, height)], (96, 96), interpolation)[0]
        .permute(1, 2, 0)
        .numpy()
    )
    box = (left, top, left + width, top + height)
    theirs = np.array(
        Image.fromarray(by_pillow(data)).resize((96, 96), PILLOW[interpolation], box=box)
    )
    assert psnr(ours[4:-4, 4:-4], theirs[4:-4, 4:-4]) > 55
    assert psnr(ours, theirs) > 38, (
        "Pillow's filter also reads pixels outside the box, so small differences are allowed"
    )


def test_resize_to_the_same_size_changes_nothing():
    pixels = np.array(picture())
    np.testing.assert_array_equal(resize(pixels, (64, 97), "bicubic").permute(1, 2, 0), pixels)


def test_gray_windows_have_one_channel():
    data = encode(picture(mode="L"))
    [ours] = decode_views(data, [(3, 3, 50, 40)], (20, 24), "bicubic", channels=1)
    assert ours.shape == (1, 20, 24)
    [color] = decode_views(data, [(3, 3, 50, 40)], (20, 24), "bicubic", channels=3)
    np.testing.assert_array_equal(color, ours.expand(3, -1, -1))
