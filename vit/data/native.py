"""The optional C decoder of a window of a JPEG: a small library that is there if a C compiler was when this package was installed.

The data's story: the bytes of a JPEG and a window go to `vit/native/window.c`. It reads the codes of the window only (without restart
markers: all before the window's end), and writes the window's pixels, the very ones that simplejpeg (libjpeg-turbo) makes, into an array.
What it does not take (progressive, CMYK, damaged, ...) it says by a code, in microseconds where the headers tell; then the caller decodes
with simplejpeg. The interpreter's lock is not held meanwhile.

`VIT_NATIVE=0` in the environment turns it off, to compare.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Status(IntEnum):
    """Why pixels were not decoded; `JpegStatus` of vit/native/jpeg.h."""

    OK = 0
    DAMAGED = 1
    """Cut off, or against the standard, in the part that was looked at."""
    PROGRESSIVE = 2
    PROCESS = 3
    """Arithmetic coding, lossless, hierarchical."""
    PRECISION = 4
    """Not 8 bits a sample."""
    COMPONENTS = 5
    """Neither 1 nor 3, as in CMYK."""
    SCANS = 6
    """The components come one after the other."""
    MEMORY = 7
    WINDOW = 8
    """The window is not inside of the image that the headers tell of."""
    SAMPLING = 9
    """A component's resolution does not divide the image's, or that of the first is not the image's."""
    COLOURS = 10
    """Grey pixels of an RGB image."""
    IMAGE = 11
    """Another size of the image than was expected, or one that nobody can hold."""


def _load() -> ctypes.CDLL | None:
    if os.environ.get("VIT_NATIVE") == "0":
        return None
    spec = importlib.util.find_spec("vit._native")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.vit_decode_window.argtypes = [
        ctypes.c_char_p,
        size,
        *[ctypes.c_uint32] * 6,
        ctypes.c_int,
        pointer,
        ctypes.c_ssize_t,
        ctypes.c_int,
    ]
    library.vit_decode_window.restype = ctypes.c_int
    library.vit_jpeg_transcode.argtypes = [ctypes.c_char_p, size, pointer, size, ctypes.POINTER(size)]
    library.vit_jpeg_transcode.restype = ctypes.c_int
    return library


LIBRARY = _load()
"""`vit_decode_window`, and `vit_jpeg_transcode` for data_prep/restart.py."""
AVAILABLE = LIBRARY is not None
"""Whether the library is there and wanted."""


def decode_into(
    data: bytes, left: int, top: int, pixels: NDArray[np.uint8], *, image_size: tuple[int, int] | None = None, portable: bool = False
) -> Status:
    """Decode the window with the size of `pixels`, (height, width, 1 or 3) uint8, and the upper left pixel (left, top). OK: it is filled.

    Rows of `pixels` may lie apart, but not its pixels. After another status than OK it holds anything. Damage outside of the window may
    go unnoticed; inside, whatever libjpeg refuses or warns of is refused. (simplejpeg also refuses samplings of colour that nobody writes.)
    `image_size`: width and height that the image must have. `portable` leaves the processor's own instructions aside, for tests.
    """
    assert LIBRARY is not None, "vit._native is not there: ask AVAILABLE first"
    height, width, channels = pixels.shape
    assert pixels.dtype == np.uint8
    assert channels in (1, 3)
    assert pixels.strides[1:] == (channels, 1)
    address, row_bytes = pixels.__array_interface__["data"][0], pixels.strides[0]
    window = left, top, width, height
    return Status(LIBRARY.vit_decode_window(data, len(data), *(image_size or (0, 0)), *window, channels, address, row_bytes, portable))


def decode_window(
    data: bytes,
    window: tuple[int, int, int, int],
    channels: int = 3,
    *,
    image_size: tuple[int, int] | None = None,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8] | None:
    """The window (left, top, width, height) of a JPEG as (height, width, channels) uint8, or `out`. None: decode with simplejpeg."""
    left, top, width, height = window
    if min(left, top) < 0 or min(width, height) < 1:  # there they are unsigned
        return None
    pixels = np.empty((height, width, channels), np.uint8) if out is None else out
    return pixels if decode_into(data, left, top, pixels, image_size=image_size) is Status.OK else None
