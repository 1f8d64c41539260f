"""Create images for the decoder tests, decode images with Pillow, and find colors in plots."""

import io
import os
import struct
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from vit.data.decode import native

needs_native = pytest.mark.skipif(
    not native.AVAILABLE and os.environ.get("VIT_REQUIRE_NATIVE") != "1",
    reason="the C decoder was not built: apt-get install build-essential, then pip install -e .",
)


def picture(width: int = 97, height: int = 64, mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng(width * height)
    y, x = np.mgrid[:height, :width]
    waves = (
        np.stack([np.sin(x / 9 + phase) + np.cos(y / 7 - phase) for phase in range(len(mode))], -1)
        * 55
        + 128
    )
    waves[height // 3 : height // 2, width // 4 : width // 2] += 60
    pixels = np.clip(waves + generator.normal(0, 6, waves.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels if mode == "RGB" else pixels[..., 0])


def encode(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, form, **options)
    return encoded.getvalue()


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert(mode))


def photographs() -> list[bytes]:
    from sklearn.datasets import load_sample_images  # import here, because the import is slow

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    return [
        encode(photo, quality=90, subsampling=s, restart_marker_blocks=n)
        for photo in photos
        for s, n in ((0, 0), (2, 4))
    ]


def pixels(picture: Path) -> np.ndarray:
    """Read a PNG file and return its pixels as an (H, W, 3) int16 array.

    Fails if the image is blank, truncated, or not 1400 pixels wide.
    """
    with Image.open(picture) as image:
        assert image.format == "PNG"
        colors = image.convert("RGB").reduce(4).getcolors(2**24)
        pixels = np.array(image.convert("RGB")).astype(np.int16)
    assert pixels.shape[1] == 1400
    assert colors is not None
    assert len(colors) > 10, "the picture is blank"
    return pixels


def places(shown: np.ndarray, color: str | tuple, tolerance: int = 2) -> np.ndarray:
    """Return an (H, W) bool mask of the pixels that have the given color. The color is either
    #rrggbb or (red, green, blue) with values from 0 to 255."""
    if isinstance(color, str):
        color = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
    return (np.abs(shown - np.array(color)) <= tolerance).all(2)


def gray_tiff(values: np.ndarray, num_bits: int, photometric: int = 1) -> bytes:
    """Return a little-endian TIFF 6.0 file of gray values with packed bits."""
    bits = (values[..., None] >> np.arange(num_bits - 1, -1, -1)) & 1
    content = np.packbits(bits.astype(np.uint8).reshape(len(values), -1), axis=1).tobytes()
    if num_bits == 16:
        content = values.astype("<u2").tobytes()
    height, width = values.shape
    tags = {256: width, 257: height, 258: num_bits, 259: 1, 262: photometric, 277: 1, 278: height}
    tags |= {273: 8, 279: len(content)}
    entries = [struct.pack("<HHII", tag, 4, 1, tags[tag]) for tag in sorted(tags)]
    directory = struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 8 + len(content)) + content + directory


def planar_tiff(planes: np.ndarray, photometric: int = 2, compressed: bool = False) -> bytes:
    """Return a little-endian TIFF 6.0 file that stores the planes (channels, H, W) one after
    another."""
    channels, height, width = planes.shape
    strips = [plane.astype(planes.dtype.newbyteorder("<")).tobytes() for plane in planes]
    if compressed:
        strips = [zlib.compress(strip) for strip in strips]
    sizes = [len(strip) for strip in strips]
    bits = planes.dtype.itemsize * 8
    directory = TiffImagePlugin.ImageFileDirectory_v2(prefix=b"II")
    tags = {256: width, 257: height, 258: (bits,) * channels, 259: 8 if compressed else 1}
    tags |= {262: photometric, 277: channels, 278: height, 279: tuple(sizes), 284: 2}
    tags[273] = tuple(accumulate(sizes[:-1], initial=0))  # relative to the end of the directory
    for tag, value in tags.items():
        directory[tag] = value
    return struct.pack("<2sHI", b"II", 42, 8) + directory.tobytes(8) + b"".join(strips)


def sixteen_bit_png(values: np.ndarray, significant_bits: int | None = None) -> bytes:
    """Return a 16-bit PNG of gray values (H, W) or colors (H, W, 3), optionally with an sBIT
    chunk."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    height, width = values.shape[:2]
    color_type = 2 if values.ndim == 3 else 0
    lines = b"".join(b"\0" + line.tobytes() for line in values.astype(">u2"))
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)),
            chunk(b"sBIT", bytes([significant_bits])) if significant_bits else b"",
            chunk(b"IDAT", zlib.compress(lines)),
            chunk(b"IEND", b""),
        )
    )
