"""Convert encoded images to the bytes stored in a shard, according to an image policy.

An ordinary JPEG (8 bits, gray or color) that needs no change is checked, and its bytes are kept.
Every other image is decoded and encoded again as an RGB JPEG with the policy's quality and full
chroma resolution (4:4:4). A gray JPEG that is resized or rotated stays gray. An image that no
decoder can read raises `Unreadable` with the reason. The policy may add restart markers
(data_prep/write/restart_markers.py). The output depends only on the input and the policy.

The writer and the loader both decode with `vit.data.decode.images`, so the loader can decode every
image that the writer accepts.
"""

import io
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data_prep.errors import PrepError
from data_prep.write import restart_markers
from vit.data.decode import native
from vit.data.decode.images import (
    MAX_JPEG_SIDE,
    check_jpeg,
    decode_jpeg,
    open_image,
    states_16_bits,
    to_mode,
)
from vit.data.decode.jpeg_header import JpegHeader, read_header
from vit.data.decode.upright import ORIENTATION_TAG, UPRIGHT, orientation_of

REFUSED_BY_STRICT = "JPEG that strict decoders refuse"
"""The `change` of a JPEG that only Pillow can read, because of stray bytes, invalid Huffman codes
or odd sampling. Its bytes are kept unless another change is named. Published accuracies include
such images, because most training code does not notice. The loader also falls back to Pillow."""
DARK_BITS = 14
"""A 16-bit image is noted as dark if its values have at most this many bits, as in raw data of
cameras and scanners."""
EXIF_ORIENTED = "exif_oriented"
"""The key in sidecars and `_info.json` for the number of images whose EXIF orientation was not
applied."""


class Unreadable(ValueError):
    """The exception raised if an image cannot become a sample. Its message states the reason."""


@dataclass(frozen=True)
class ImagePolicy:
    """The settings for converting images. Raises PrepError for invalid values."""

    check: str = "decode"
    """decode: check each JPEG by decoding it. headers: check only headers and end marker."""
    apply_exif: bool = False
    """Rotate images by their EXIF orientation. Published accuracies use unrotated images."""
    resize_short_side: int | None = None
    """Shrink images whose shorter side exceeds this many pixels (bicubic, antialiased)."""
    jpeg_quality: int = 95
    """The quality of re-encoded images on libjpeg's scale from 1 to 100."""
    restart_markers: str = "off"
    """auto: losslessly add restart markers to all JPEGs with the C library. off: add none."""

    def __post_init__(self) -> None:
        if not 1 <= self.jpeg_quality <= 100:
            raise PrepError(f"--jpeg-quality {self.jpeg_quality}: expected 1 to 100")
        if self.restart_markers == "auto" and not native.AVAILABLE:
            raise PrepError(
                "--restart-markers auto needs this package's native code:"
                f" {native.UNAVAILABLE_REASON or 'VIT_NATIVE=0 turns it off'}"
            )

    def options(self) -> dict[str, Any]:
        """Return the policy as JSON values to record with the data set."""
        options = asdict(self)
        if self.restart_markers == "off":  # Omit "off", because older data sets did not record it.
            del options["restart_markers"]
        return options

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after `resize_short_side`, rounded as in torchvision's Resize."""
        short = self.resize_short_side
        if short is None or min(width, height) <= short:
            return width, height

        if width <= height:
            return short, int(short * height / width)
        return int(short * width / height), short

    def is_turned(self, orientation: int) -> bool:
        """Return whether this policy rotates or flips an image with this EXIF orientation."""
        return self.apply_exif and orientation in UPRIGHT


class Prepared(NamedTuple):
    """An image in its final form for a shard."""

    data: bytes
    width: int
    height: int
    change: str | None
    """Changes and notes, such as "PNG (RGBA), resized", or None if the bytes are unchanged."""
    exif_oriented: bool = False
    """True if the EXIF orientation is not upright, and was not applied."""


def exif_summary(number: int, total: int) -> str:
    """Return a line with the number of images whose EXIF orientation was not applied."""
    return (
        f"{number:,} of {total:,} images ask to be turned (EXIF orientation): --apply-exif turns"
        " them (published numbers do not)"
    )


def prepare(data: bytes, policy: ImagePolicy) -> Prepared:
    """Convert the encoded image `data` for a shard. Raises Unreadable."""
    prepared = _prepare(data, policy)
    if policy.restart_markers == "off":
        return prepared
    marked = restart_markers.with_restart_markers(prepared.data)
    note = f"{restart_markers.UNMARKED}{marked.reason}" if marked.reason else restart_markers.MARKED
    change = f"{prepared.change}, {note}" if prepared.change else note
    return prepared._replace(data=marked.data, change=change)


def _prepare(data: bytes, policy: ImagePolicy) -> Prepared:
    """Convert an image without adding restart markers."""
    try:
        header = read_header(data)
    except ValueError:
        # The file is usually in another format, but Pillow can also read some odd JPEG headers.
        return _by_pillow(data, policy)

    try:
        check_jpeg(header)
    except ValueError as error:
        raise Unreadable(str(error)) from None
    if header.num_components == 4:
        return _by_pillow(data, policy)

    target = policy.target_size(*header.size)
    untouched = target == header.size and not policy.is_turned(header.orientation)
    exif_oriented = header.orientation in UPRIGHT and not policy.apply_exif
    headers_suffice = untouched and policy.check == "headers" and _has_end_marker(data, header)
    if headers_suffice:
        return Prepared(data, *header.size, None, exif_oriented)

    try:
        # Decoding at 1/8 size is cheap but finds all damage, because it includes all entropy
        # decoding.
        reduction = 8 if untouched else _reduction(header.size, target)
        pixels = decode_jpeg(data, header.size, header.num_components, reduction)
    except ValueError as error:
        return _by_pillow(data, policy, jpeg_problem=error)
    if untouched:
        return Prepared(data, *header.size, None, exif_oriented)

    image = Image.fromarray(pixels.squeeze(2) if header.num_components == 1 else pixels)
    return _encode(image, header.size, header.orientation, policy, [])


def _has_end_marker(data: bytes, header: JpegHeader) -> bool:
    """Return whether `data` has an end marker. JPEGs without one are almost always truncated."""
    return header.process <= 2 and data.rfind(b"\xff\xd9", header.scan_offset) >= 0


def _reduction(size: tuple[int, int], target: tuple[int, int]) -> int:
    """Return the factor by which the decoder may shrink an image before it is resized.

    If the result has at least four times the target size, shrinking loses less quality than the
    JPEG encoding.
    """
    return next((step for step in (8, 4, 2) if min(size) >= 4 * step * min(target)), 1)


def _by_pillow(
    data: bytes, policy: ImagePolicy, jpeg_problem: ValueError | None = None
) -> Prepared:
    """Convert an image that is not an ordinary, intact JPEG.

    jpeg_problem: the reason to report if Pillow cannot read the image.
    """
    try:
        image = open_image(data)
        is_jpeg = image.format in ("JPEG", "MPO")  # An MPO file is a JPEG followed by other images.
        is_usable = is_jpeg and image.mode in ("L", "RGB")
        # Decoding may change the mode of an image, so describe it first.
        if is_usable:
            change = REFUSED_BY_STRICT
        elif is_jpeg:
            change = f"{image.mode} JPEG"
        else:
            change = f"{image.format} ({image.mode})"

        is_16_bit = states_16_bits(image)
        converted = to_mode(image, image.mode if is_usable else "RGB")
        note = _note_on_range(image, converted) if is_16_bit else ""
    except ValueError as error:
        raise Unreadable(str(jpeg_problem or error)) from error

    size, orientation = image.size, orientation_of(image)
    untouched = policy.target_size(*size) == size and not policy.is_turned(orientation)
    if is_usable and untouched:
        return Prepared(data, *size, change, orientation in UPRIGHT and not policy.apply_exif)
    return _encode(converted, size, orientation, policy, [change + note])


def _note_on_range(image: Image.Image, rgb: Image.Image) -> str:
    """Return a note if a 16-bit image is dark because its values may have fewer bits, or ""."""
    if image.mode.startswith("I"):
        largest = int(np.asarray(image).max())
    else:  # Pillow reads the upper 8 bits of colors.
        largest = int(np.asarray(rgb).max()) << 8 | 255

    num_bits = largest.bit_length()
    if num_bits > DARK_BITS:
        return ""
    return (
        f" with no value above {(1 << num_bits) - 1:,} of 65,535 (dark: scale {num_bits}-bit values"
        " to 16 bits first)"
    )


def _encode(
    image: Image.Image,
    size: tuple[int, int],
    orientation: int,
    policy: ImagePolicy,
    changes: list[str],
) -> Prepared:
    """Resize, rotate and encode an image.

    Args:
        size: The size of `image` before the decoder shrank it.
        changes: The changes so far.
    """
    target = policy.target_size(*size)
    if max(target) > MAX_JPEG_SIDE:
        raise Unreadable(
            f"the output would have {target[0]} x {target[1]} pixels, but the sides of a JPEG are"
            f" limited to {MAX_JPEG_SIDE}"
        )

    exif = b""
    if target != size:
        image = image.resize(target, Image.Resampling.BICUBIC)
        changes = [*changes, "resized"]
    if policy.is_turned(orientation):
        image = image.transpose(UPRIGHT[orientation])
        changes = [*changes, f"EXIF orientation {orientation} applied"]
    elif orientation in UPRIGHT:  # The orientation was not applied, so keep the tag.
        tag = Image.Exif()
        tag[ORIENTATION_TAG] = orientation
        exif = tag.tobytes()

    data = encode_jpeg(image, quality=policy.jpeg_quality, subsampling=0, exif=exif, comment=None)
    return Prepared(data, *image.size, ", ".join(changes), bool(exif))


def encode_jpeg(image: Image.Image, **options: Any) -> bytes:
    """Encode an image with Pillow's `options` for JPEGs."""
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", **options)
    return encoded.getvalue()
