"""Decoding and resizing against Pillow and torchvision."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from torchvision.transforms import InterpolationMode, v2

from vit.data.decode import decode, decode_center, decode_window, resize

PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def picture(width: int = 97, height: int = 64, mode: str = "RGB") -> Image.Image:
    """Smooth shapes with edges and some noise: neither flat nor pure noise, as photographs are."""
    generator = np.random.default_rng(width * height)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9 + phase) + np.cos(y / 7 - phase) for phase in range(len(mode))], -1) * 55 + 128
    waves[height // 3 : height // 2, width // 4 : width // 2] += 60
    pixels = np.clip(waves + generator.normal(0, 6, waves.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels if mode == "RGB" else pixels[..., 0])


def encode(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, form, **options)
    return encoded.getvalue()


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert(mode))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9))


# --- decode -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"quality": 95, "subsampling": 0}, {"quality": 75, "subsampling": 2}, {"progressive": True}])
def test_jpeg_is_what_pillow_sees(options):
    data = encode(picture(), **options)
    pixels = decode(data)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, by_pillow(data))


def test_grey_jpeg_as_grey_and_as_colour():
    data = encode(picture(mode="L"))
    np.testing.assert_array_equal(decode(data, channels=1)[..., 0], by_pillow(data, "L"))
    np.testing.assert_array_equal(decode(data, channels=3), by_pillow(data, "RGB"))


def test_colour_jpeg_as_grey_is_its_luma():
    data = encode(picture(), quality=95)
    luma = Image.open(io.BytesIO(data))
    luma.draft("L", luma.size)
    np.testing.assert_array_equal(decode(data, channels=1)[..., 0], luma)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("form", "mode"),
    [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "P"), ("PNG", "1"), ("PNG", "I;16"), ("WEBP", "RGB"), ("GIF", "P")],
)
def test_forms_other_than_jpeg_are_what_pillow_sees(form, mode, channels):
    image = picture(mode="L" if mode == "I;16" else "RGB").convert(mode)
    data = encode(image, form)
    pixels = decode(data, channels)
    assert pixels.shape == (64, 97, channels)
    np.testing.assert_array_equal(pixels.squeeze(), by_pillow(data, "RGB" if channels == 3 else "L"))


@pytest.mark.parametrize("channels", [1, 3])
def test_cmyk_jpeg_is_what_pillow_sees(channels):
    data = encode(picture().convert("CMYK"))
    theirs = by_pillow(data, "RGB" if channels == 3 else "L").reshape(64, 97, channels)
    assert np.abs(decode(data, channels).astype(int) - theirs).max() <= 2, "simplejpeg and Pillow round the conversion differently, no more"


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.95])
def test_truncated_images_are_refused(form, kept):
    data = encode(picture(), form)
    with pytest.raises(ValueError, match=rf"cannot decode {int(kept * len(data))} bytes: \w+"):
        decode(data[: int(kept * len(data))])


def huge_png() -> bytes:
    """A header that promises 40,000 x 40,000 pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


GARBAGE = {"empty": b"", "start of JPEG": b"\xff\xd8", "text": b"not an image", "zeros": bytes(1000), "bomb": huge_png()}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused(data):
    with pytest.raises(ValueError, match=f"cannot decode {len(data)} bytes: "):
        decode(data)


def test_a_jpeg_that_promises_too_much_is_refused_before_memory_is_asked_for():
    data = bytearray(encode(picture()))
    size = data.index(b"\xff\xc0") + 5  # start of frame: marker, length, precision, height, width
    data[size : size + 4] = struct.pack(">HH", 30_000, 30_000)
    with pytest.raises(ValueError, match="30000 x 30000 pixels are more than"):
        decode(bytes(data))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", *(["AVIF"] if features.check("avif") else [])]), st.data())
def test_damage_never_raises_anything_but_a_value_error(form, data):
    damaged = bytearray(encode(picture(24, 16), form))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = decode(bytes(damaged))
    except ValueError:
        return
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3


def test_exif_orientation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image = picture()
    turned = encode(image, exif=exif)
    assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == 6
    np.testing.assert_array_equal(decode(turned), decode(encode(image)))


# --- resize -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "window", [(0, 0, 97, 64), (10, 5, 40, 50), (90, 60, 7, 4), (13, 7, 32, 32)], ids=["whole", "inner", "tiny", "as is"]
)
def test_window_is_the_antialiased_resize_of_the_crop(window, interpolation):
    left, top, width, height = window
    data = encode(picture())
    ours = decode_window(data, window, (32, 32), interpolation)
    assert (ours.dtype, ours.shape) == (torch.uint8, (3, 32, 32))

    crop = torch.from_numpy(by_pillow(data)).permute(2, 0, 1)[:, top : top + height, left : left + width].contiguous()
    np.testing.assert_array_equal(ours, F.interpolate(crop[None], (32, 32), mode=interpolation, antialias=True)[0])

    image = Image.fromarray(by_pillow(data))
    cropped = np.array(image.crop((left, top, left + width, top + height)).resize((32, 32), PILLOW[interpolation]))
    assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - cropped).max() <= 2
    assert psnr(ours.permute(1, 2, 0).numpy(), cropped) > 55


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_window_is_close_to_pillows_resize_of_a_box(interpolation):
    data, (left, top, width, height) = encode(picture(400, 300), quality=90), (31, 17, 250, 260)
    ours = decode_window(data, (left, top, width, height), (96, 96), interpolation).permute(1, 2, 0).numpy()
    box = (left, top, left + width, top + height)
    theirs = np.array(Image.fromarray(by_pillow(data)).resize((96, 96), PILLOW[interpolation], box=box))
    assert psnr(ours[4:-4, 4:-4], theirs[4:-4, 4:-4]) > 55
    assert psnr(ours, theirs) > 38, "Pillow's filter also sees what is outside the box, ours does not"


def test_resize_to_the_same_size_changes_nothing():
    pixels = np.array(picture())
    np.testing.assert_array_equal(resize(pixels, (64, 97), "bicubic").permute(1, 2, 0), pixels)


def test_grey_windows_have_one_channel():
    data = encode(picture(mode="L"))
    ours = decode_window(data, (3, 3, 50, 40), (20, 24), "bicubic", channels=1)
    assert ours.shape == (1, 20, 24)
    colour = decode_window(data, (3, 3, 50, 40), (20, 24), "bicubic", channels=3)
    np.testing.assert_array_equal(colour, ours.expand(3, -1, -1))


# --- the evaluation view ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "crop_pct"), [(32, 0.875), (33, 0.9), (28, 1.0), (48, 0.95)])
@pytest.mark.parametrize("original", [(97, 64), (64, 97), (75, 75), (40, 300), (20, 23), (500, 375)], ids=lambda wh: f"{wh[0]}x{wh[1]}")
def test_center_view_is_torchvisions(original, size, crop_pct, interpolation):
    data = encode(picture(*original))
    view = v2.Compose([v2.Resize(int(size / crop_pct), InterpolationMode(interpolation), antialias=True), v2.CenterCrop(size)])
    theirs = view(torch.from_numpy(by_pillow(data)).permute(2, 0, 1))
    np.testing.assert_array_equal(decode_center(data, (size, size), crop_pct, interpolation), theirs)


@settings(deadline=None, max_examples=100)
@given(
    st.tuples(st.integers(1, 120), st.integers(1, 120)),
    st.tuples(st.integers(1, 64), st.integers(1, 64)),
    st.floats(0.3, 1.0),
    st.sampled_from([1, 3]),
)
def test_center_view_always_has_the_size_that_was_asked_for(original, size, crop_pct, channels):
    assert decode_center(encode(picture(*original)), size, crop_pct, "bilinear", channels).shape == (channels, *size)


def test_center_view_of_an_oblong_size_keeps_the_aspect_and_the_middle():
    width, height = 400, 200
    y, x = np.mgrid[:height, :width]
    disc = (((x - width / 2 + 0.5) ** 2 + (y - height / 2 + 0.5) ** 2 < 60**2) * 255).astype(np.uint8)
    view = decode_center(encode(Image.fromarray(disc), quality=95), (100, 60), 0.8, "bilinear", channels=1)[0].numpy() > 127
    rows, columns = np.flatnonzero(view.any(1)), np.flatnonzero(view.any(0))
    scale = int(100 / 0.8) / height
    assert abs(len(rows) - 120 * scale) <= 2
    assert len(columns) == 60, "the disc, 75 pixels wide, fills the width"
    assert abs(rows.mean() - 49.5) <= 1
    np.testing.assert_array_equal(view, view[:, ::-1])
