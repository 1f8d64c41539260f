"""The optional C decoder of a window of a JPEG: a small library that is there if a C compiler was
when this package was installed.

The data's story: the bytes of a JPEG and a window go to `vit/data/decode/c/window.c`. It reads the
codes of the window only (without restart markers: all before the window's end), and writes the
window's pixels, the very ones that simplejpeg (libjpeg-turbo) makes, into an array. What it does
not take (progressive, CMYK, damaged, ...) it says by a code, in microseconds where the headers
tell; then the caller decodes with simplejpeg. The interpreter's lock is not held meanwhile.

A library that does not fit this file, was built from other C files than those beside it, or fails
on a small JPEG is not used: `load`. `VIT_NATIVE=0` in the environment turns it off, to compare.
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
"""`vit_native_abi` of vit/data/decode/c/window.c, which is called here."""
PACKAGE = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "c"
"""The C files, where the package is a checkout."""
NOT_BUILT = (
    "the C decoder was not built; install a C compiler (Debian, Ubuntu: apt-get install"
    " build-essential), then pip install -e ."
)


class Status(IntEnum):
    """Why pixels were not decoded; `Status` of vit/data/decode/c/status.h."""

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
    """A component's resolution does not divide the image's, or that of the first is not the
    image's."""
    COLOURS = 10
    """Grey pixels of an RGB image."""
    IMAGE = 11
    """Another size of the image than was expected, or one that nobody can hold."""


class UnusableLibrary(Exception):
    """A library that must not be used: what is wrong with it, and what to do."""


def load(path: Path, sources: Path = SOURCES) -> ctypes.CDLL:
    """The library at `path`, known to have the functions called here and to give right pixels on
    this processor.

    Asked, in this order: the number of the interface; the sources it was built from, where the C
    files are beside the package (a checkout that was pulled and not installed again); a small JPEG,
    see `_decodes_rightly`. Raises UnusableLibrary.
    """
    again = "build it again: pip install -e ."
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnusableLibrary(f"{path} cannot be loaded ({error}); {again}") from None
    if not hasattr(library, "vit_native_abi") or library.vit_native_abi() != ABI:
        raise UnusableLibrary(f"{path} is of another version of this package; {again}")
    library.vit_native_sources.restype = ctypes.c_char_p
    if sources.is_dir() and library.vit_native_sources().decode() != stamp_of(sources):
        raise UnusableLibrary(
            f"{path} was built from other sources than {sources} holds now; {again}"
        )
    size = ctypes.c_size_t
    pointer = ctypes.c_void_p
    decode = library.vit_decode_window
    transcode = library.vit_jpeg_transcode
    decode.argtypes = [
        ctypes.c_char_p,
        size,
        *[ctypes.c_uint32] * 6,
        ctypes.c_int,
        pointer,
        ctypes.c_ssize_t,
        ctypes.c_int,
    ]
    decode.restype = ctypes.c_int
    transcode.argtypes = [ctypes.c_char_p, size, pointer, size, ctypes.POINTER(size)]
    transcode.restype = ctypes.c_int
    if not _decodes_rightly(library):
        raise UnusableLibrary(
            f"{path} gives other pixels than simplejpeg on this machine; {again}; if that does not"
            " help, please report it"
        )
    return library


def stamp_of(sources: Path) -> str:
    """What setup.py compiles into the library: a hash of all C files."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(sources.glob("*.[ch]")))
    ).hexdigest()[:16]


def _decodes_rightly(library: ctypes.CDLL) -> bool:
    """Whether windows of a small JPEG, as simplejpeg writes it and with restart markers, have the
    pixels that simplejpeg gives."""
    y, x = np.mgrid[:50, :150]
    image = np.stack((x + y, x * y // 7, 255 - x), axis=2).astype(np.uint8)
    plain = simplejpeg.encode_jpeg(image, 92, colorsubsampling="420")
    marked = ctypes.create_string_buffer(4 * len(plain))
    size = ctypes.c_size_t()
    if (
        library.vit_jpeg_transcode(plain, len(plain), marked, len(marked), ctypes.byref(size))
        != Status.OK
    ):
        return False
    expected = simplejpeg.decode_jpeg(plain)[5:45, 9:140]
    pixels = np.empty((40, 131, 3), np.uint8)
    for data in (plain, marked.raw[: size.value]):
        pixels.fill(0)
        if _decode(
            library, data, 9, 5, pixels, (0, 0), False
        ) is not Status.OK or not np.array_equal(pixels, expected):
            return False
    return True


def _find() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and why it is not used; no reason where that was asked for."""
    if os.environ.get("VIT_NATIVE") == "0":
        return None, None
    path = next(
        filter(Path.exists, (PACKAGE / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES)), None
    )
    if path is None:
        return None, NOT_BUILT
    try:
        return load(path), None
    except UnusableLibrary as misfit:
        return None, str(misfit)


def decode_into(
    data: bytes,
    left: int,
    top: int,
    pixels: NDArray[np.uint8],
    *,
    stored_size: tuple[int, int] | None = None,
    portable: bool = False,
) -> Status:
    """Decode the window with the size of `pixels`, (height, width, 1 or 3) uint8, and the upper
    left pixel (left, top). OK: it is filled.

    Rows of `pixels` may lie apart, but not its pixels. After another status than OK it holds
    anything. Damage outside of the window may go unnoticed; inside, whatever libjpeg refuses or
    warns of is refused. (simplejpeg also refuses samplings of colour that nobody writes.)
    `stored_size`: width and height that the image must have. `portable` leaves the processor's own
    instructions aside, for tests.
    """
    assert LIBRARY is not None, "vit._native is not there: ask AVAILABLE first"
    return _decode(LIBRARY, data, left, top, pixels, stored_size or (0, 0), portable)


def _decode(
    library: ctypes.CDLL,
    data: bytes,
    left: int,
    top: int,
    pixels: NDArray[np.uint8],
    stored_size: tuple[int, int],
    portable: bool,
) -> Status:
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
            *stored_size,
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
    """The window (left, top, width, height) of a JPEG as (height, width, channels) uint8, or `out`.
    None: decode with simplejpeg."""
    left, top, width, height = window
    if min(left, top) < 0 or min(width, height) < 1:  # there they are unsigned
        return None
    pixels = np.empty((height, width, channels), np.uint8) if out is None else out
    return (
        pixels
        if decode_into(data, left, top, pixels, stored_size=stored_size) is Status.OK
        else None
    )


LIBRARY, UNAVAILABLE_REASON = _find()
"""`vit_decode_window`, and `vit_jpeg_transcode` for data_prep/write/restart_markers.py; or None,
and why, unless VIT_NATIVE=0."""
AVAILABLE = LIBRARY is not None
"""Whether the library is there, fits and is wanted."""
