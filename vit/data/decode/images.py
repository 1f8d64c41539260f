"""The one door for encoded images: bytes in, uint8 pixels out, for training, evaluation,
preparation, index and card. Free of torch.

The data's story: an ordinary JPEG (8 bits, grey or colour) goes to libjpeg-turbo, which is asked
for a window only where it can be: by the optional C decoder (`vit.data.decode.native`), else the
window is cut out of the bytes (`vit.data.decode.jpeg_cut`) as a smaller JPEG for simplejpeg, else
the whole is decoded. What simplejpeg, which is strict, refuses, and all that is no ordinary JPEG,
goes to Pillow, which is told which formats it may try: none of them is a program (EPS is one), and
nothing else is looked for. The pixels are the same on each of these ways.

Colours become what `Image.convert("RGB")` makes of them, as torchvision and timm see them:
transparency is dropped, not blended, palettes are looked up, CMYK is taken as Adobe writes it,
profiles are ignored. Where clipping would ruin the image it is another: 16-bit greys are scaled to
8 bits (of 16-bit colours Pillow reads the upper 8), and integers of 32 bits and floats, whose range
nobody knows, are refused. Of an animation the first frame counts. EXIF orientation is ignored, as
in every published number; TIFFs are turned by Pillow itself.

What a header promises is compared with `MAX_PIXELS` before memory is asked for. Beyond what
Pillow's decoder holds (1 to 4 bytes a pixel) only the pixels asked for are made, so the largest
image takes some 0.7 GB and its window.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from vit.data.decode import native
from vit.data.decode.jpeg_cut import Cut, Window, cut_window
from vit.data.decode.jpeg_header import MAX_PIXELS, JpegHeader, read_header

Pixels = NDArray[np.uint8]
"""(H, W, channels)."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""What Pillow may take the bytes for; its names. JPEG includes MPO, a JPEG with further ones behind
it."""
MAX_JPEG_SIDE = 65_500
"""Pixels; libjpeg's limit, in both directions."""
STRIP_PIXELS = 1 << 20
"""As many are converted at a time: copies of a large image would be larger than itself."""
LAST_LINE = np.random.default_rng(0).integers(0, 256, 3 * MAX_JPEG_SIDE, np.uint8)
"""What no decoder writes; see `_decode_cut`."""


def decoder_name() -> str:
    """What decodes plain JPEGs here, for the record: native (the package's C part) or
    simplejpeg."""
    return "native" if native.AVAILABLE else "simplejpeg"


# --- what is an image -----------------------------------------------------------------------------


def read_image_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels as stored, from the headers. Raises ValueError with the reason for
    what is no image, or is beyond a limit.

    `data` may end anywhere behind the headers.
    """
    try:
        header = read_header(data)  # an eighth of Pillow's time
    except ValueError:  # another format, or strange bytes between the headers
        return open_image(data).size
    check_jpeg(header)
    return header.size


def check_jpeg(header: JpegHeader) -> None:
    """Raise ValueError for a JPEG that no decoder here takes, whatever its data are."""
    if header.precision != 8 or header.num_components not in (1, 3, 4):
        raise ValueError(
            f"a JPEG of {header.precision} bits and {header.num_components} components; expected 8"
            " bits and 1, 3 or 4"
        )
    _check_size(*header.size, is_jpeg=True)


def _check_size(width: int, height: int, is_jpeg: bool) -> None:
    if is_jpeg and max(width, height) > MAX_JPEG_SIDE:
        raise ValueError(f"{width} x {height} pixels; sides of JPEGs have {MAX_JPEG_SIDE} at most")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than {MAX_PIXELS}")


def open_image(data: bytes) -> Image.Image:
    """Pillow's image of `data`, of one of FORMATS, whose headers only have been read: `pixels_of`
    decodes it.

    Raises ValueError with the reason for what is no image, is beyond a limit, or has pixels of no
    known range.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=_formats())
            tile = _tile_size(image)
    except Image.DecompressionBombError:
        raise ValueError(f"more than {MAX_PIXELS} pixels") from None
    except Exception as error:
        # each of Pillow's plugins has its own: OSError, SyntaxError, RuntimeError, TypeError, ...
        raise ValueError(_why_not(data, error)) from None
    _check_size(*image.size, is_jpeg=_is_jpeg(image))
    _check_size(*tile, is_jpeg=False)
    if image.mode in ("I", "F") and not _is_16_bit(image):
        raise ValueError(
            f"pixels of mode {image.mode} have no known range; scale them to 8 bits first"
        )
    return image


@cache
def _formats() -> tuple[str, ...]:
    """FORMATS that this Pillow has."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of a TIFF's tiles, for one of which libtiff asks for memory, however small
    the image is."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return 0, 0
    width, height = (
        int(image.tag_v2.get(tag, 0))
        for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH)
    )
    return width, height


def _why_not(data: bytes, error: Exception) -> str:
    if not data:
        return "0 bytes"
    if data.startswith(b"\xff\xd8"):
        try:
            read_header(data)
        except ValueError as jpeg_error:
            return str(jpeg_error)
    if isinstance(error, Image.UnidentifiedImageError):
        return (
            f"no image; expected one of {', '.join(_formats())}, and it begins with {data[:16]!r}"
        )
    return str(error) or type(error).__name__


def _is_jpeg(image: Image.Image) -> bool:
    return image.format in ("JPEG", "MPO")


def _is_16_bit(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """`open_image`'s image, decoded, as RGB or L (grey). Raises ValueError with the reason if it
    cannot be decoded."""
    with _reasons():
        _load(image, mode)
        return _converted(image, mode, _is_16_bit(image))


def pixels_of(image: Image.Image, channels: int = 3, box: Window | None = None) -> Pixels:
    """The pixels of `open_image`'s image, or of its part `box`: (H, W, channels) uint8, 1 (grey) or
    3 (RGB). Raises as `to_mode`."""
    mode = "RGB" if channels == 3 else "L"
    left, top, width, height = box or (0, 0, *image.size)
    with _reasons():
        _load(image, mode)
        pixels = np.empty((height, width, channels), np.uint8)
        num_lines = max(STRIP_PIXELS // width, 1)
        for line in range(0, height, num_lines):
            strip = image.crop(
                (left, top + line, left + width, top + min(line + num_lines, height))
            )
            pixels[line : line + num_lines] = np.asarray(
                _converted(strip, mode, _is_16_bit(image))
            ).reshape(-1, width, channels)
    return pixels


@contextmanager
def _reasons() -> Iterator[None]:
    """Whatever Pillow raises becomes ValueError with the reason; its warnings are passed over."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        # each of Pillow's plugins has its own: OSError, SyntaxError, RuntimeError, TypeError, ...
        raise ValueError(str(error) or type(error).__name__) from None


def _load(image: Image.Image, mode: str) -> None:
    size = image.size
    if mode == "L" and _is_jpeg(image):
        image.draft("L", None)  # the luma as it is stored, as the other decoders give it
    image.load()
    if image.size != size:
        raise ValueError(
            f"it has {image.size[0]} x {image.size[1]} pixels, where its headers say {size[0]} x"
            f" {size[1]}"
        )
    # is dropped; Pillow would look for a colour that stands for it
    image.info.pop("transparency", None)


def _converted(image: Image.Image, mode: str, is_16_bit: bool) -> Image.Image:
    if is_16_bit:
        levels, rest = np.divmod(np.asarray(image), 257)  # 65535 = 257 x 255
        image = Image.fromarray((levels + (rest > 128)).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


# --- bytes to pixels ------------------------------------------------------------------------------


def decode(data: bytes, channels: int = 3) -> Pixels:
    """The whole image as (H, W, channels) uint8; channels is 1 (grey) or 3 (RGB). Raises ValueError
    if it cannot be decoded."""
    header = _ordinary_jpeg(data)
    problem = None
    if header is not None:
        try:
            return decode_jpeg(data, header.size, channels)
        except ValueError as error:
            problem = error
    return _by_pillow(data, channels, problem)


def decode_jpeg(
    data: bytes | bytearray,
    size: tuple[int, int],
    channels: int,
    reduce: int = 1,
    into: Pixels | None = None,
    strict: bool = True,
) -> Pixels:
    """An ordinary JPEG of `size` = (width, height), each side divided by `reduce` (1, 2, 4, 8;
    rounded up), by simplejpeg.

    Raises ValueError for any damage, not `strict` for such only as no decoder can do with.
    """
    colorspace = "RGB" if channels == 3 else "GRAY"
    # The smallest of libjpeg's sizes, n/8 of the image, that has the pixels asked for is the one
    # that is meant.
    least = -(-size[1] // reduce), -(-size[0] // reduce)
    return simplejpeg.decode_jpeg(data, colorspace, False, False, *least, reduce, into, strict)


def decode_box(
    data: bytes,
    box: Window,
    channels: int = 3,
    *,
    reduce: int = 1,
    stored_size: tuple[int, int] | None = None,
    place: Pixels | None = None,
) -> tuple[Pixels, int]:
    """The part `box` of an image as (H, W, channels) uint8, and the reduction that it has: `reduce`
    (2, 4 or 8), if it is a JPEG, else 1.

    Without reduction these are the pixels of `decode`; with it, borders lie on the next whole pixel
    outside. They may lie in `place`, which has their shape, or elsewhere. Damage outside of the box
    may go unnoticed.

    Raises: ValueError: the image cannot be decoded, is not of `stored_size` = (width, height), or
        the box is not inside of it.
    """
    if reduce == 1 and native.AVAILABLE:
        window = native.decode_window(data, box, channels, stored_size=stored_size, out=place)
        if window is not None:
            return window, 1
    header = _ordinary_jpeg(data)
    if header is None:
        return _by_pillow(data, channels, None, box, stored_size), 1
    _check_box(box, header.size, stored_size)
    left, top, width, height = box
    cut = cut_window(data, header, box, margin=reduce)
    part = None if cut is None else _decode_cut(cut, channels, reduce)
    if cut is not None and part is not None:
        return part[span(top, height, cut.top, reduce), span(left, width, cut.left, reduce)], reduce
    try:
        whole = decode_jpeg(data, header.size, channels, reduce)
    except ValueError as problem:
        return _by_pillow(data, channels, problem, box, stored_size), 1
    return whole[span(top, height, 0, reduce), span(left, width, 0, reduce)], reduce


def span(start: int, length: int, origin: int, reduce: int) -> slice:
    """Pixels [start, start + length) of the original, in an image reduced to 1/`reduce` that begins
    at `origin`."""
    return slice(
        start // reduce - origin // reduce, -(-(start + length) // reduce) - origin // reduce
    )


def _ordinary_jpeg(data: bytes) -> JpegHeader | None:
    """The header of a JPEG for simplejpeg; None for what is Pillow's. Raises ValueError for a JPEG
    that neither of them takes."""
    try:
        header = read_header(data)
    except ValueError:
        # no JPEG, or one with strange bytes between its headers, which libjpeg passes over
        return None
    try:
        check_jpeg(header)
    except ValueError as error:
        raise undecodable(data, error) from None
    return None if header.num_components == 4 else header  # simplejpeg rounds CMYK in its own way


def _by_pillow(
    data: bytes,
    channels: int,
    problem: ValueError | None,
    box: Window | None = None,
    stored_size: tuple[int, int] | None = None,
) -> Pixels:
    """The image, or the part `box` of it, by Pillow. `problem`: why simplejpeg did not take it,
    which is told if Pillow does not either."""
    try:
        image = open_image(data)
        if box is None:
            return pixels_of(image, channels)
    except ValueError as error:
        raise undecodable(data, problem or error) from None
    _check_box(box, image.size, stored_size)
    try:
        return pixels_of(image, channels, box)
    except ValueError as error:
        raise undecodable(data, problem or error) from None


def undecodable(data: bytes, reason: ValueError) -> ValueError:
    """What all decoding raises."""
    return ValueError(f"cannot decode {len(data)} bytes: {reason}")


def _check_box(box: Window, actual: tuple[int, int], expected: tuple[int, int] | None) -> None:
    """Raise ValueError if an image of `actual` = (width, height) is another than `expected`, or has
    no such part."""
    left, top, width, height = box
    if expected not in (None, actual):
        given, said = ("{} x {}".format(*size) for size in (actual, expected))
        remedy = "the index is of other images; delete the split's .index.npy, which is made again"
        raise ValueError(f"it has {given} pixels, the index says {said}: {remedy}")
    if (
        min(left, top) < 0
        or min(width, height) < 1
        or left + width > actual[0]
        or top + height > actual[1]
    ):
        raise ValueError(
            f"{width} x {height} pixels at ({left}, {top}) are not inside of an image of"
            f" {actual[0]} x {actual[1]}"
        )


def _decode_cut(cut: Cut, channels: int, reduce: int) -> Pixels | None:
    """The pixels of a cut, or None if anything is wrong with it."""
    size = cut.width, cut.height
    # then several of libjpeg's sizes have the same pixels, see `decode_jpeg`
    if reduce > 1 and max(size) < 8:
        return None
    try:
        if not cut.has_rest:
            return decode_jpeg(cut.data, size, channels, reduce)
        # libjpeg warns of the codes behind the last line, and simplejpeg does not tell warnings
        # apart: so none is an error here, and damage looks as Pillow shows it. After an error
        # libjpeg writes no further lines: those before are right if the last one was written.
        pixels = np.empty((-(-cut.height // reduce), -(-cut.width // reduce), channels), np.uint8)
        unwritten = LAST_LINE[: pixels[-1].size].reshape(pixels[-1].shape)
        pixels[-1] = unwritten
        decode_jpeg(cut.data, size, channels, reduce, pixels, strict=False)
        return None if np.array_equal(pixels[-1], unwritten) else pixels
    except ValueError:
        return None
