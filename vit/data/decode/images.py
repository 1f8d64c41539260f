"""Decode encoded images to uint8 pixels.

libjpeg-turbo decodes ordinary JPEGs (8 bits, gray or color) and, if possible, decodes only the
requested window. The decoders are tried in this order: the optional C decoder
(`vit.data.decode.native`), simplejpeg on a smaller JPEG cut out of the bytes
(`vit.data.decode.jpeg_cut`), simplejpeg on the entire image. Pillow decodes all other images, and
JPEGs that simplejpeg rejects. Files that are programs, such as EPS, are not accepted. All decoders
produce the same pixels.

Colors are the same as those of `Image.convert("RGB")`, as in torchvision and timm. Transparency is
dropped without blending, palettes are resolved, CMYK is interpreted as in Adobe's files, and color
profiles are ignored. There are two exceptions, because clipping would ruin the image. First, 12-bit
and 16-bit gray values are scaled down to 8 bits, according to the bit depth that the file states.
(Pillow reads only the upper 8 bits of 16-bit colors.) Second, 32-bit integers and floats are
rejected, because their range is unknown. Only the first frame of an animation is used. EXIF
orientation is ignored, as in all published results, except that Pillow rotates TIFFs.

The size in the header is compared with `MAX_PIXELS` before memory is allocated. Pillow's decoder
uses 1 to 4 bytes of memory per pixel. Apart from this memory, only the requested pixels are
allocated, so the largest image takes about 0.7 GB plus its window.
"""

import ctypes
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, TiffImagePlugin, _imaging

import vit.data.decode.native as native
from vit.data.decode.content import HEAD_BYTES, describe_content
from vit.data.decode.image_files import HEIC_MAGIC, READS_HEIF, how_to_convert
from vit.data.decode.jpeg_cut import Cut, Window, cut_window
from vit.data.decode.jpeg_header import MAX_PIXELS, JpegHeader, read_header

Pixels = NDArray[np.uint8]
"""An array of pixels, (H, W, channels)."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "HEIF", "DIB")
"""The formats that Pillow may try, under Pillow's names. JPEG includes MPO, a file with several
JPEGs."""
MAX_JPEG_SIDE = 65_500
"""The maximum width and height that libjpeg supports."""

TILE_TAGS = (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH)
WHITE_IS_ZERO = 0
"""The value of TIFF's tag PhotometricInterpretation for inverted gray, which Pillow inverts only in
images of up to 8 bits."""

STRIP_PIXELS = 1 << 20
"""The number of pixels to convert at a time, to limit the memory for converting large images."""
UNWRITTEN = np.random.default_rng(0).integers(0, 256, 3 * MAX_JPEG_SIDE, np.uint8)
"""Random pixels that `_decode_cut` uses to detect whether a decoder has written the last line."""


def decoder_name() -> str:
    """Return the decoder for ordinary JPEGs: native (the package's C decoder) or simplejpeg."""
    return "native" if native.AVAILABLE else "simplejpeg"


# ---- sizes and formats ---------------------------------------------------------------------------


def read_image_size(data: bytes) -> tuple[int, int]:
    """Read the stored (width, height) in pixels from the headers.

    `data` may end anywhere after the headers. Raises ValueError with the reason if `data` is not an
    image or exceeds a limit.
    """
    try:
        header = read_header(data)  # eight times as fast as Pillow
    except ValueError:  # another format, or extra bytes between the headers
        return open_image(data).size
    check_jpeg(header)
    return header.size


def check_jpeg(header: JpegHeader) -> None:
    """Raise ValueError for a JPEG that all decoders reject."""
    if header.precision != 8 or header.num_components not in (1, 3, 4):
        raise ValueError(
            f"the JPEG has {header.precision} bits and {header.num_components} components; expected"
            " 8 bits and 1, 3 or 4 components"
        )
    _check_size(*header.size, is_jpeg=True)


def _check_size(width: int, height: int, is_jpeg: bool) -> None:
    if is_jpeg and max(width, height) > MAX_JPEG_SIDE:
        raise ValueError(
            f"the image has {width} x {height} pixels, but the sides of a JPEG are limited to"
            f" {MAX_JPEG_SIDE} pixels"
        )
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels exceed the limit of {MAX_PIXELS}")


def open_image(data: bytes) -> Image.Image:
    """Open `data` with Pillow as one of FORMATS. Reads only the headers.

    Raises ValueError with the reason if `data` is not an image, exceeds a limit, or has pixels with
    an unknown range.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=_formats())
            # libtiff allocates an entire tile, even if the image is smaller.
            tags = getattr(image, "tag_v2", {})
            tile_width, tile_height = (int(tags.get(tag, 0)) for tag in TILE_TAGS)
    except Image.DecompressionBombError:
        raise ValueError(f"more than {MAX_PIXELS} pixels") from None
    except Exception as error:  # Pillow's plugins raise various exceptions
        raise ValueError(_why_not(data, error)) from None

    _check_size(*image.size, is_jpeg=_is_jpeg(image))
    _check_size(tile_width, tile_height, is_jpeg=False)

    if _is_misread(image):
        raise ValueError(
            "Pillow misreads uncompressed TIFFs with one plane per color, except in 8 bits:"
            " compress the image without loss (tiffcp -c lzw), or convert it to 8 bits"
        )

    if image.mode in ("I", "F") and not _is_16_bit(image):
        raise ValueError(
            f"the range of pixels of mode {image.mode} is unknown: scale them to 8 bits first"
        )
    return image


def _is_misread(image: ImageFile.ImageFile) -> bool:
    """Return whether an image is an uncompressed TIFF with planes that Pillow misreads.

    For a plane, Pillow uses only the first letter of the pixel format, such as I of I;16.
    """
    tags = getattr(image, "tag_v2", {})
    is_planar = tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2 and "'raw'" in str(image.tile)
    has_white_0 = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO
    return is_planar and (has_white_0 or tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,))[0] != 8)


@cache
def _formats() -> tuple[str, ...]:
    """Return the FORMATS that this Pillow supports, plus HEIF if pillow-heif is installed."""
    Image.init()
    # libtiff prints messages to stderr that name no file. Pillow raises an exception anyway, but
    # cannot turn these messages off. A statically linked Pillow does not export the functions
    # below.
    with suppress(AttributeError):
        libtiff = ctypes.CDLL(_imaging.__file__)
        libtiff.TIFFSetErrorHandler(None)
        libtiff.TIFFSetWarningHandler(None)

    if READS_HEIF:
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _why_not(data: bytes, error: Exception) -> str:
    """Return the reason why Pillow cannot open `data`, or the text of an unexpected error."""
    if not data:
        return "0 bytes"
    if data.startswith(b"\xff\xd8"):
        try:
            read_header(data)
        except ValueError as jpeg_error:
            return str(jpeg_error)

    if isinstance(error, Image.UnidentifiedImageError):
        if kind := describe_content(data[:HEAD_BYTES]):
            return f"not an image but {kind}"
        if HEIC_MAGIC.match(data) and not READS_HEIF:
            return f"HEIC photos cannot be read; {how_to_convert('.heic')}"
        if name := _begun_format(data[:16]):
            remedy = ", or has too many bits or bands for Pillow: convert it to 8 bits"
            return f"the {name} is damaged{remedy if name == 'TIFF' else ''}"
        return (
            f"not an image; expected one of {', '.join(_formats())}, but the data begin with"
            f" {data[:16]!r}"
        )

    return str(error) or type(error).__name__


def _begun_format(head: bytes) -> str:
    """Return the format name of a file that begins with `head`, or "" if it is unknown."""
    for name in _formats():
        _, accepts = Image.OPEN[name]
        # A format without a signature has no check. If the check returns a text, a codec is
        # missing.
        if accepts is not None and accepts(head.ljust(16, b"\0")) is True:
            return name
    return ""


def _is_jpeg(image: Image.Image) -> bool:
    return image.format in ("JPEG", "MPO")


def states_16_bits(image: Image.Image) -> bool:
    """Return whether the file states 16 bits per sample. `image` must not be decoded yet."""
    return image.format in ("PNG", "TIFF") and ";16" in str(getattr(image, "tile", ""))


def _is_16_bit(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))


# ---- decoding by Pillow --------------------------------------------------------------------------


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """Decode an image from `open_image` to RGB or L (gray). Raises ValueError."""
    with _reasons():
        _load(image, mode)
        return _converted(image, mode, _gray_levels(image))


def pixels_of(image: Image.Image, channels: int = 3, box: Window | None = None) -> Pixels:
    """Decode an image from `open_image`, or its region `box`, to (H, W, channels) uint8.

    channels: 1 (gray) or 3 (RGB). Raises ValueError with the reason if decoding fails.
    """
    mode = "RGB" if channels == 3 else "L"
    left, top, width, height = box or (0, 0, *image.size)
    levels = _gray_levels(image)

    with _reasons():
        num_lines = max(STRIP_PIXELS // width, 1)
        _load(image, mode)
        pixels = np.empty((height, width, channels), np.uint8)
        for line in range(0, height, num_lines):
            stop = min(line + num_lines, height)
            strip = image.crop((left, top + line, left + width, top + stop))
            pixels[line:stop] = np.asarray(_converted(strip, mode, levels)).reshape(
                -1, width, channels
            )
    return pixels


@contextmanager
def _reasons() -> Iterator[None]:
    """Convert all exceptions from Pillow to ValueError with the reason, and ignore Pillow's
    warnings."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        # Pillow's plugins raise OSError, SyntaxError, RuntimeError, TypeError and others.
        reason = str(error) or type(error).__name__
        if reason.startswith("decoder error"):  # an error number from C code
            reason = f"the pixels are damaged ({reason})"
        raise ValueError(reason) from None


def _load(image: Image.Image, mode: str) -> None:
    """Decode the pixels, and check that their number agrees with the headers."""
    size = image.size
    if mode == "L" and _is_jpeg(image):
        image.draft("L", None)  # read the stored luma, as the other decoders do
    image.load()
    if image.size != size:
        raise ValueError(
            f"the image has {image.size[0]} x {image.size[1]} pixels, but its headers say"
            f" {size[0]} x {size[1]}"
        )

    # Drop transparency. Otherwise, Pillow would also convert the color that marks transparent
    # pixels.
    image.info.pop("transparency", None)


def _converted(image: Image.Image, mode: str, levels: Pixels | None) -> Image.Image:
    if levels is not None:
        image = Image.fromarray(levels[np.asarray(image)])
    return image if image.mode == mode else image.convert(mode)


def _gray_levels(image: Image.Image) -> Pixels | None:
    """Return the 8-bit level of each value in a 16-bit gray image; None for other images.

    PNG's chunk sBIT does not matter, because encoders scale values of fewer bits up (RFC 2083,
    9.1). Pillow scales the values of JPEG 2000 and PGM.
    """
    if not _is_16_bit(image):
        return None
    tags = getattr(image, "tag_v2", {})
    return _levels(
        tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0],
        tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO,
    )


@cache
def _levels(num_bits: int, is_inverted: bool) -> Pixels:
    levels = np.linspace(0, 255, 1 << num_bits).round().astype(np.uint8)
    return levels[::-1] if is_inverted else levels


# ---- bytes to pixels -----------------------------------------------------------------------------


def decode(data: bytes, channels: int = 3) -> Pixels:
    """Decode the entire image to (H, W, channels) uint8; channels: 1 (gray) or 3 (RGB).

    Raises ValueError.
    """
    header = _ordinary_jpeg(data)
    if header is None:
        return _by_pillow(data, channels)
    try:
        return decode_jpeg(data, header.size, channels)
    except ValueError as problem:
        return _by_pillow(data, channels, problem)


def decode_jpeg(
    data: bytes | bytearray,
    size: tuple[int, int],
    channels: int,
    reduce: int = 1,
    into: Pixels | None = None,
    strict: bool = True,
) -> Pixels:
    """Decode an ordinary JPEG of `size` = (width, height) with simplejpeg.

    Raises ValueError.

    Args:
        reduce: Divide each side by 1, 2, 4 or 8, rounded up.
        into: The output array.
        strict: Reject all damage, not only damage that libjpeg cannot repair.
    """
    colorspace = "RGB" if channels == 3 else "GRAY"
    # libjpeg can scale an image to n/8 of its size. simplejpeg selects the smallest scale that
    # yields at least this many pixels.
    least = math.ceil(size[1] / reduce), math.ceil(size[0] / reduce)
    return simplejpeg.decode_jpeg(data, colorspace, False, False, *least, reduce, into, strict)


def decode_box(
    data: bytes,
    box: Window,
    channels: int = 3,
    *,
    stored_size: tuple[int, int] | None = None,
    place: Pixels | None = None,
) -> Pixels:
    """Decode the region `box` of an image.

    Returns (H, W, channels) uint8, the same pixels that `decode` returns for this region. Damage
    outside the box may go undetected. Raises ValueError if the image cannot be decoded, has a
    different size, or does not contain the box.

    Args:
        stored_size: The expected (width, height) of the image.
        place: An optional output array of the right shape.
    """
    if native.AVAILABLE:
        window = native.decode_window(data, box, channels, stored_size=stored_size, out=place)
        if window is not None:
            return window

    header = _ordinary_jpeg(data)
    if header is None:
        return _by_pillow(data, channels, None, box, stored_size)
    _check_box(box, header.size, stored_size)

    cut = cut_window(data, header, box)
    if cut is not None:
        part = _decode_cut(cut, channels)
        if part is not None:
            return region(part, box, cut.left, cut.top)

    try:
        pixels = decode_jpeg(data, header.size, channels)
    except ValueError as problem:
        return _by_pillow(data, channels, problem, box, stored_size)
    return region(pixels, box)


def region(pixels: Pixels, box: Window, left: int = 0, top: int = 0) -> Pixels:
    """Return the region `box` of an image. left, top: the position of `pixels` in the image."""
    x, y, width, height = box
    return pixels[y - top : y - top + height, x - left : x - left + width]


def _ordinary_jpeg(data: bytes) -> JpegHeader | None:
    """Return the header of a JPEG that simplejpeg can decode, or None if Pillow must decode the
    image.

    Raises ValueError for a JPEG that both decoders would reject.
    """
    try:
        header = read_header(data)
    except ValueError:
        # This is not a JPEG, or a JPEG with extra bytes between headers, which libjpeg would skip.
        return None

    try:
        check_jpeg(header)
    except ValueError as error:
        raise undecodable(data, error) from None
    return None if header.num_components == 4 else header  # simplejpeg rounds CMYK differently


def _by_pillow(
    data: bytes,
    channels: int,
    problem: ValueError | None = None,
    box: Window | None = None,
    stored_size: tuple[int, int] | None = None,
) -> Pixels:
    """Decode the image, or its region `box`, with Pillow.

    problem: the error from simplejpeg, reported if Pillow also fails.
    """
    try:
        image = open_image(data)
    except ValueError as error:
        raise undecodable(data, problem or error) from None

    if box is not None:
        _check_box(box, image.size, stored_size)
    try:
        return pixels_of(image, channels, box)
    except ValueError as error:
        raise undecodable(data, problem or error) from None


def undecodable(data: bytes, reason: ValueError) -> ValueError:
    """Return the error to raise if `data` cannot be decoded."""
    return ValueError(f"cannot decode {len(data)} bytes: {reason}")


def _check_box(box: Window, actual: tuple[int, int], expected: tuple[int, int] | None) -> None:
    """Raise ValueError if the size is not the expected one, or if the crop is not in the image."""
    left, top, width, height = box
    if expected is not None and expected != actual:
        raise ValueError(
            f"the image has {actual[0]} x {actual[1]} pixels, but the index says {expected[0]} x"
            f" {expected[1]}: delete the split's outdated .index.npy, and the next start rebuilds"
            " it"
        )

    is_inside = left >= 0 and top >= 0 and left + width <= actual[0] and top + height <= actual[1]
    if not is_inside or min(width, height) < 1:
        raise ValueError(
            f"the crop of {width} x {height} pixels at ({left}, {top}) is outside the image of"
            f" {actual[0]} x {actual[1]} pixels"
        )


def _decode_cut(cut: Cut, channels: int) -> Pixels | None:
    """Return the pixels of the cut JPEG, or None if the pixels may be wrong."""
    size = cut.width, cut.height
    try:
        if not cut.has_rest:
            return decode_jpeg(cut.data, size, channels)

        # libjpeg warns about the data after the last line. simplejpeg cannot ignore single
        # warnings, so `strict` must be off, and damaged regions look as in Pillow. After an error,
        # libjpeg writes no more lines. All lines are therefore valid if the last line was written.
        pixels = np.empty((cut.height, cut.width, channels), np.uint8)
        unwritten = UNWRITTEN[: pixels[-1].size].reshape(pixels[-1].shape)
        pixels[-1] = unwritten
        decode_jpeg(cut.data, size, channels, into=pixels, strict=False)
        return None if np.array_equal(pixels[-1], unwritten) else pixels
    except ValueError:
        return None
