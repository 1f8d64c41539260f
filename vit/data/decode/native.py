"""The optional C decoder for a window of a JPEG, which the installation builds with a C compiler.

`vit/data/decode/c/window.c` gets the bytes of a JPEG and a window. It reads only the codes of the
window, or all codes before the end of the window if there are no restart markers. Its pixels are
exactly equal to those of simplejpeg (libjpeg-turbo). For a JPEG that it does not support
(progressive, CMYK, damaged, ...), it returns a status, within microseconds if the headers show the
reason. The caller then decodes with simplejpeg. The decoder runs without the GIL.

`load` rejects a library with another interface, a library that was built from different C files,
and a library that fails on a small JPEG. `VIT_NATIVE=0` in the environment disables the decoder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from enum import IntEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

ABI = 1
"""The interface version that this file calls, `vit_native_abi` of vit/data/decode/c/window.c."""
PACKAGE = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "c"
"""The folder of the C files, which exists only in a checkout."""
NOT_BUILT = (
    "the C decoder was not built; install a C compiler (Debian, Ubuntu: apt-get install"
    " build-essential), then pip install -e ."
)


class Status(IntEnum):
    """The reason why pixels were not decoded; equals `Status` of vit/data/decode/c/status.h."""

    OK = 0
    DAMAGED = 1
    """The bytes that were read are truncated or violate the standard."""
    PROGRESSIVE = 2
    PROCESS = 3
    """The coding is arithmetic, lossless or hierarchical."""
    PRECISION = 4
    """The samples do not have 8 bits."""
    COMPONENTS = 5
    """The number of components is neither 1 nor 3, as in CMYK."""
    SCANS = 6
    """The components are in separate scans."""
    MEMORY = 7
    WINDOW = 8
    """The window is not inside the image."""
    SAMPLING = 9
    """The resolution of a component does not divide the image's, or the first component is
    coarser."""
    COLOURS = 10
    """The caller requests gray pixels of an RGB image."""
    IMAGE = 11
    """The image does not have the expected size or is too large."""


class UnusableLibrary(Exception):
    """The library must not be used. The message contains the reason and a remedy."""


def load(path: Path, sources: Path = SOURCES) -> ctypes.CDLL:
    """Load the library at `path`, and check that its pixels are right on this processor.

    The checks are, in this order: the version of the interface; in a checkout, the hash of the C
    files, because a checkout may be updated without a new build; the pixels of a small JPEG. Raises
    UnusableLibrary.
    """
    again = "build it again: pip install -e ."
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnusableLibrary(f"{path} cannot be loaded ({error}); {again}") from None
    if not hasattr(library, "vit_native_abi") or library.vit_native_abi() != ABI:
        raise UnusableLibrary(f"{path} was built for another version of this package; {again}")
    library.vit_native_sources.restype = ctypes.c_char_p
    if sources.is_dir() and library.vit_native_sources().decode() != stamp_of(sources):
        raise UnusableLibrary(
            f"{path} was not built from the current sources in {sources}; {again}"
        )
    size = ctypes.c_size_t
    pointer = ctypes.c_void_p
    # data, its size; width and height of the image; left, top, width and height of the window;
    # channels; pixels, bytes per row; portable
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
    library.vit_jpeg_transcode.argtypes = [
        ctypes.c_char_p,
        size,
        pointer,
        size,
        ctypes.POINTER(size),
    ]
    library.vit_jpeg_transcode.restype = ctypes.c_int
    if not _decodes_correctly(library):
        raise UnusableLibrary(
            f"{path} decodes different pixels than simplejpeg on this machine; {again}; if that"
            " does not help, please report it"
        )
    return library


def stamp_of(sources: Path) -> str:
    """Return the hash of all C files that setup.py compiles into the library."""
    content = b"".join(path.read_bytes() for path in sorted(sources.glob("*.[ch]")))
    return hashlib.sha256(content).hexdigest()[:16]


def _decodes_correctly(library: ctypes.CDLL) -> bool:
    y, x = np.mgrid[:50, :150]
    image = np.stack((x + y, x * y // 7, 255 - x), axis=2).astype(np.uint8)
    plain = simplejpeg.encode_jpeg(image, 92, colorsubsampling="420")
    expected = simplejpeg.decode_jpeg(plain)[5:45, 9:140]
    marked = ctypes.create_string_buffer(4 * len(plain))
    size = ctypes.c_size_t()
    status = library.vit_jpeg_transcode(plain, len(plain), marked, len(marked), ctypes.byref(size))
    if status != Status.OK:
        return False
    for data in (plain, marked.raw[: size.value]):
        pixels = np.zeros((40, 131, 3), np.uint8)
        status = decode_into(data, 9, 5, pixels, library=library)
        if status != Status.OK or not np.array_equal(pixels, expected):
            return False
    return True


def _find() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("VIT_NATIVE") == "0":
        return None, None
    for suffix in EXTENSION_SUFFIXES:
        path = PACKAGE / f"_native{suffix}"
        if path.exists():
            try:
                return load(path), None
            except UnusableLibrary as error:
                return None, str(error)
    return None, NOT_BUILT


def decode_into(
    data: bytes,
    left: int,
    top: int,
    pixels: NDArray[np.uint8],
    *,
    stored_size: tuple[int, int] | None = None,
    portable: bool = False,
    library: ctypes.CDLL | None = None,
) -> Status:
    """Decode the window with upper left pixel (left, top) and the shape of `pixels` into `pixels`.

    pixels: (height, width, 1 or 3) uint8. Gaps are allowed between rows but not between pixels. The
    content is valid if the status is OK.
    stored_size: (width, height) that the image must have.
    portable: for tests: do not use special instructions of the processor.
    library: LIBRARY by default.

    Damage outside of the window may go unnoticed. Inside, everything that libjpeg rejects or warns
    about is rejected. (simplejpeg also rejects unusual color subsampling.)
    """
    library = library or LIBRARY
    assert library is not None, "vit._native is missing: check AVAILABLE first"
    height, width, channels = pixels.shape
    assert pixels.dtype == np.uint8
    assert channels in (1, 3)
    assert pixels.strides[1:] == (channels, 1)
    address = pixels.__array_interface__["data"][0]
    row_bytes = pixels.strides[0]
    return Status(
        library.vit_decode_window(
            data,
            len(data),
            *(stored_size or (0, 0)),
            left,
            top,
            width,
            height,
            channels,
            address,
            row_bytes,
            portable,
        )
    )


def decode_window(
    data: bytes,
    window: tuple[int, int, int, int],
    channels: int = 3,
    *,
    stored_size: tuple[int, int] | None = None,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8] | None:
    """Decode the window (left, top, width, height) of a JPEG into `out` or a new array.

    Returns (height, width, channels) uint8, or None if the caller must use simplejpeg.
    """
    left, top, width, height = window
    if min(left, top) < 0 or min(width, height) < 1:  # unsigned in C
        return None
    pixels = np.empty((height, width, channels), np.uint8) if out is None else out
    status = decode_into(data, left, top, pixels, stored_size=stored_size)
    return pixels if status is Status.OK else None


LIBRARY, UNAVAILABLE_REASON = _find()
"""The library (`vit_decode_window`, and `vit_jpeg_transcode` for data_prep), or None and a reason.

The reason is None if VIT_NATIVE=0."""
AVAILABLE = LIBRARY is not None
"""Whether the library is usable and not disabled."""
