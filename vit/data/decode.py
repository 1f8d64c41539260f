"""Encoded image bytes in, cropped and resized uint8 pixels out.

The data's story: simplejpeg (libjpeg-turbo) decodes a JPEG to an (H, W, C) array; Pillow takes whatever simplejpeg does not (PNG, WebP).
A view of the wanted window goes through torch's antialiased uint8 resize in its fast memory layout, channels last, and lands in one row
of the batch. Nothing is converted to float here. EXIF orientation is ignored, as in every published number.
"""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vit.data.jpeg import MAX_PIXELS

Window = tuple[int, int, int, int]
"""left, top, width, height in pixels of the original image."""


def decode(data: bytes, channels: int = 3) -> NDArray[np.uint8]:
    """The whole image as (H, W, channels) uint8; channels is 1 (grey) or 3 (RGB). Raises ValueError if it cannot be decoded."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if height * width > MAX_PIXELS:
            raise ValueError(f"{width} x {height} pixels are more than {MAX_PIXELS}")
        return simplejpeg.decode_jpeg(data, colorspace="RGB" if channels == 3 else "GRAY")
    except ValueError as jpeg_error:
        try:
            with Image.open(io.BytesIO(data)) as image:
                pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
        except Exception as error:  # each of Pillow's plugins has its own: OSError, SyntaxError, RuntimeError, TypeError, ...
            unknown = "no JPEG and no image Pillow knows" if isinstance(error, UnidentifiedImageError) else error
            reason = jpeg_error if data[:2] == b"\xff\xd8" else unknown
            raise ValueError(f"cannot decode {len(data)} bytes: {reason}") from None
        return pixels.reshape(*pixels.shape[:2], channels)


def resize(pixels: NDArray[np.uint8], size: tuple[int, int], interpolation: str) -> torch.Tensor:
    """Antialiased resize of (H, W, C) uint8 pixels to `size` = (height, width): a (C, height, width) uint8 tensor."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if tuple(pixels.shape[:2]) == size:
        return image[0]
    return F.interpolate(image, size, mode=interpolation, antialias=True, align_corners=False)[0]


def decode_window(data: bytes, window: Window, size: tuple[int, int], interpolation: str, channels: int = 3) -> torch.Tensor:
    """The part `window` of the image, resized to `size` = (height, width): (channels, height, width) uint8."""
    left, top, width, height = window
    return resize(decode(data, channels)[top : top + height, left : left + width], size, interpolation)


def decode_center(data: bytes, size: tuple[int, int], crop_pct: float, interpolation: str, channels: int = 3) -> torch.Tensor:
    """The evaluation view: resize until `size / crop_pct` is covered, keeping the aspect, then crop the centre.

    Returns (channels, height, width) uint8. For square sizes this is torchvision's `Resize(int(size / crop_pct))` and `CenterCrop(size)`,
    with its rounding.
    """
    pixels = decode(data, channels)
    height, width = pixels.shape[:2]
    cover_h, cover_w = int(size[0] / crop_pct), int(size[1] / crop_pct)
    if cover_h * width >= cover_w * height:  # the height decides
        new_h, new_w = cover_h, int(cover_h * width / height)
    else:
        new_h, new_w = int(cover_w * height / width), cover_w
    resized = resize(pixels, (new_h, new_w), interpolation)
    top, left = round((new_h - size[0]) / 2), round((new_w - size[1]) / 2)
    return resized[:, top : top + size[0], left : left + size[1]]
