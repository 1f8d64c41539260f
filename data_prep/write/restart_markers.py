"""Restart markers: rewrite a JPEG losslessly, so that a part of it can be decoded alone.

The Huffman codes of a baseline JPEG are replaced by the optimal ones, and a restart marker is put
after every few blocks, at the same places in each row. The coefficients, hence the pixels in any
decoder, stay the same, which is verified for each file; so do all other headers: EXIF, ICC,
comments. Photographs get a little smaller. A file that is not baseline, is damaged or cannot be
verified keeps its bytes.

The native part of this package does it (vit/data/decode/c/transcode.c; 2 ms for 100 kB), and
compares all coefficients of both files.

Source: ITU-T T.81, sections B.2.4.4 and F.1.2.3.
"""

from __future__ import annotations

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
"""The reason why an image keeps its bytes, by the status of vit/data/decode/c/status.h."""
OK = 0
MEMORY = 7
MARKED = "with restart markers"
UNMARKED = "without restart markers: "
"""Names under which images are counted; a reason follows UNMARKED."""


class Marked(NamedTuple):
    """A JPEG with restart markers, or unchanged."""

    data: bytes
    reason: str | None
    """One of REASONS if `data` is unchanged; None if it has markers now."""


def with_restart_markers(data: bytes) -> Marked:
    """Return the JPEG `data` with restart markers. Needs `native.AVAILABLE`.

    Raises OSError if it fails, and MemoryError.
    """
    assert native.LIBRARY is not None, "vit._native is missing: test native.AVAILABLE first"
    # too small only for tiny images
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
                f"vit/data/decode/c/transcode.c: status {status}; please report this image"
            )
        if size.value <= len(buffer):
            raise MemoryError
