"""The optional C decoder for JPEG windows, built during installation if a C compiler exists.

The decoder (`vit/data/decode/c/window.c`) takes the bytes of a JPEG and a window, and reads only
the window's data, or all data before the end of the window if there are no restart markers. The
pixels are identical to those of simplejpeg (libjpeg-turbo). For an unsupported JPEG (progressive,
CMYK, damaged, ...), the decoder returns a status, within microseconds if the headers show the
reason. The caller then uses simplejpeg. The decoder releases the GIL.

`load` rejects a library that has another interface version, was built from different C files, or
fails on a small JPEG. `VIT_NATIVE=0` in the environment disables the decoder.
"""

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
"""The interface version that this file expects from `vit_native_abi` in
vit/data/decode/c/window.c."""
PACKAGE = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "c"
"""The folder with the C files, which exists only in a checkout."""

INSTALL = (
    "pip install -e ."
    if SOURCES.is_dir()
    # pip would otherwise reuse the wheel that it built without a compiler
    else "pip install --force-reinstall --no-deps --no-cache-dir VITLINE.tar.gz (or a wheel)"
)
"""The command that builds or replaces the library of this package."""
NOT_BUILT = (
    "the C decoder was not built; install a C compiler (Debian, Ubuntu: apt-get install"
    f" build-essential), then {INSTALL}"
)


class Status(IntEnum):
    """The reason why pixels were not decoded; must match `Status` in vit/data/decode/c/status.h."""

    OK = 0
    DAMAGED = 1
    """The data are truncated or violate the standard."""
    PROGRESSIVE = 2
    PROCESS = 3
    """The coding is arithmetic, lossless or hierarchical."""
    PRECISION = 4
    """The samples are not 8 bits wide."""
    COMPONENTS = 5
    """The number of color components is neither 1 nor 3; CMYK has 4."""
    SCANS = 6
    """The color components are in separate scans."""
    MEMORY = 7
    WINDOW = 8
    """The window is not entirely inside the image."""
    SAMPLING = 9
    """A component's sampling factors do not divide those of the image, or the first component is
    subsampled."""
    COLORS = 10
    """The caller requested gray pixels from an RGB image."""
    IMAGE = 11
    """The image is too large or does not have the expected size."""


class UnusableLibrary(Exception):
    """The library cannot be used. The message contains the reason and a remedy."""


def load(path: Path, sources: Path = SOURCES) -> ctypes.CDLL:
    """Load the library at `path`, and check that it decodes correctly on this processor.

    Three checks run in order. The interface version must match. In a checkout, the hash of the C
    files must match, because a checkout may be updated without a new build. The pixels of a small
    JPEG must be correct. Raises UnusableLibrary.
    """
    again = f"build it again: {INSTALL}"
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

    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    # Arguments: data and its size; image width and height; left, top, width and height of the
    # window; channels; pixels and bytes per row; portable.
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
            f"{path} and simplejpeg decode to different pixels on this machine; {again}; if that"
            " does not help, please report it"
        )
    return library


def stamp_of(sources: Path) -> str:
    """Return a hash of all C files that setup.py compiles into the library."""
    content = b"".join(path.read_bytes() for path in sorted(sources.glob("*.[ch]")))
    return hashlib.sha256(content).hexdigest()[:16]


def _decodes_correctly(library: ctypes.CDLL) -> bool:
    """Return whether a window of a small image is the same as simplejpeg's, without and with
    restart markers."""
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
    """Return the library, or None and the reason, which is None if the user disabled the
    library."""
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
    """Decode a window of a JPEG into `pixels`, whose shape is the size of the window.

    Damage outside the window may go undetected. Inside the window, the decoder rejects everything
    that libjpeg rejects or warns about. (simplejpeg also rejects unusual color subsampling.)

    Args:
        left, top: The upper left pixel of the window.
        pixels: (height, width, 1 or 3) uint8. Rows may have gaps between them, pixels may not. The
            content is valid only if the status is OK.
        stored_size: The expected (width, height) of the image.
        portable: Use no special processor instructions (for tests).
        library: LIBRARY by default.
    """
    library = library or LIBRARY
    assert library is not None, "vit._native is missing: check AVAILABLE first"
    height, width, channels = pixels.shape
    assert pixels.dtype == np.uint8
    assert channels in (1, 3)
    assert pixels.strides[1:] == (channels, 1)

    address = pixels.__array_interface__["data"][0]
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
            pixels.strides[0],
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
    if min(left, top) < 0 or min(width, height) < 1:  # arguments are unsigned in C
        return None
    pixels = np.empty((height, width, channels), np.uint8) if out is None else out
    status = decode_into(data, left, top, pixels, stored_size=stored_size)
    return pixels if status is Status.OK else None


LIBRARY, UNAVAILABLE_REASON = _find()
"""The library (`vit_decode_window`, and `vit_jpeg_transcode` for data_prep), or None and the
reason.

The library and the reason are both None with VIT_NATIVE=0.
"""
AVAILABLE = LIBRARY is not None
"""Whether the library is usable and not disabled."""
