"""Losslessly add restart markers to JPEGs, so that decoders can read parts of an image.

The Huffman codes of a baseline JPEG are replaced by optimal codes, and a restart marker is inserted
after every few blocks, at the same positions in each row. The coefficients, and therefore the
pixels in any decoder, do not change, and each file is verified. EXIF, ICC and comments are kept.
Photos become slightly smaller, or larger if their codes were already optimal. A file that is
damaged, is not a baseline JPEG or cannot be verified is kept unchanged.

The native code rewrites the JPEG (vit/data/decode/c/transcode.c, 2 ms for 100 kB), and compares all
coefficients of both files.

Source: ITU-T T.81, sections B.2.4.4 and F.1.2.3.
"""

import ctypes
from typing import NamedTuple

from vit.data.decode import native

REASONS = {
    1: "damaged",
    2: "progressive",
    3: "arithmetic or lossless",
    4: "not 8 bits",
    5: "CMYK",
    6: "several scans",
    16: "bytes behind the image",
}
"""Maps each status in vit/data/decode/c/status.h to the reason why the image is unchanged."""
OK = 0
MEMORY = 7
"""The status if the buffer is too small, or if there is no memory for the rewrite."""
MARKED = "with restart markers"
UNMARKED = "without restart markers: "
"""The labels under which a report counts images. UNMARKED is followed by a reason."""


class Marked(NamedTuple):
    """A JPEG with restart markers, or the original JPEG."""

    data: bytes
    reason: str | None
    """The entry of REASONS if `data` is unchanged, or None if markers were added."""


def with_restart_markers(data: bytes) -> Marked:
    """Add restart markers to the JPEG `data`. Requires `native.AVAILABLE`.

    Raises OSError or MemoryError if the rewrite fails.
    """
    assert native.LIBRARY is not None, "vit._native is missing: test native.AVAILABLE first"

    # This buffer is large enough, except possibly for tiny images.
    size = ctypes.c_size_t(3 * len(data) + (1 << 16))
    while True:
        buffer = ctypes.create_string_buffer(size.value)
        status = native.LIBRARY.vit_jpeg_transcode(
            data, len(data), buffer, len(buffer), ctypes.byref(size)
        )
        if status == OK:
            return Marked(memoryview(buffer)[: size.value].tobytes(), None)
        if status in REASONS:
            return Marked(data, REASONS[status])
        if status != MEMORY:
            raise OSError(
                f"vit/data/decode/c/transcode.c returned status {status}: please report this image"
            )

        # If the buffer is too small, `size` is now the required size, and the loop tries again.
        is_buffer_too_small = size.value > len(buffer)
        if not is_buffer_too_small:
            raise MemoryError
