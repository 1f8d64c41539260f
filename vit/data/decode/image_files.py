"""Read image files, and recognize them by their suffix or first bytes.

`vit.data.decode.images` decodes the bytes. This module does not import torch.
"""

import os
import re
from importlib.util import find_spec

MAX_IMAGE_BYTES = 1 << 28
"""The maximum size of an encoded image, 256 MiB. Larger files are decompression bombs or are not
images."""
HEIF = (".heic", ".heif", ".hif")
"""File extensions of phone photos. Reading such photos requires the package pillow-heif."""
READS_HEIF = find_spec("pillow_heif") is not None

EXTENSIONS = (
    *(HEIF if READS_HEIF else ()),
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".mpo",
    ".png",
    ".apng",
    ".webp",
    ".bmp",
    ".dib",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".avif",
    ".jp2",
    ".j2k",
)
"""The suffixes of image files that `vit.data.decode.images` can read."""

NOT_READ = (
    *(() if READS_HEIF else HEIF),
    ".jxl",
    ".jpf",
    ".jpx",
    ".psd",
    ".svg",
    ".eps",
    ".tga",
    ".ico",
    ".qoi",
    ".exr",
    ".hdr",
    ".dng",
    ".cr2",
    ".cr3",
    ".nef",
    ".arw",
    ".raf",
    ".orf",
    ".rw2",
    ".pef",
    ".srw",
)
"""The suffixes of unsupported image files, such as phone photos, raw camera data and drawings."""

READ_MAGIC = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|BM.{4}\0\0|II\*\0|MM\0\*"
    rb"|RIFF.{4}WEBP|P[1-6]\s|.{4}ftypavi[fs]|\0\0\0\x0cjP  ",
    re.DOTALL,
)
"""The first bytes (magic numbers) of the supported image formats."""
HEIC_MAGIC = re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""The first bytes (magic numbers) of HEIC and HEIF, the formats of phone photos."""


def how_to_convert(suffix: str) -> str:
    """Return advice on how to convert images whose suffix is in NOT_READ."""
    package = "install a reader (pip install pillow-heif), or " * (suffix in HEIF)
    return (
        f"{package}convert them to JPEG in their folder, for instance with ImageMagick: find ."
        f" -iname '*{suffix}' -exec magick mogrify -format jpg {{}} +"
    )


def is_image(path: str) -> bool:
    """Return whether a file is a readable image, judging by its suffix. If the file has no suffix,
    judge by the first bytes."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix or not os.path.isfile(path):  # opening a pipe would block
        return suffix in EXTENSIONS
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError:
        return False
    return bool(READ_MAGIC.match(head) or (READS_HEIF and HEIC_MAGIC.match(head)))


def read_image(path: str) -> bytes:
    """Return the bytes of an image file.

    Raises OSError if reading fails, and ValueError if the file is not a regular file or exceeds
    MAX_IMAGE_BYTES.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > MAX_IMAGE_BYTES:
            raise ValueError(
                f"the image has {num_bytes:,} bytes, but at most {MAX_IMAGE_BYTES:,} are allowed"
            )
        return file.read()
