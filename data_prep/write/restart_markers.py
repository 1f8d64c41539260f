"""Restart markers, which let a decoder read part of a JPEG, added by a lossless rewrite.

The Huffman codes of a baseline JPEG are replaced by optimal codes, and a restart marker is inserted
after every few blocks, at the same positions in each row. The coefficients, and so the pixels in
any decoder, stay the same, and each file is verified. EXIF, ICC and comments are kept. Photos get a
little smaller. A file that is not baseline, is damaged or cannot be verified keeps its bytes.

The native code does the rewrite (vit/data/decode/c/transcode.c, 2 ms for 100 kB) and compares all
coefficients of both files.

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
"""The reason why an image keeps its bytes, for each status in vit/data/decode/c/status.h."""
OK = 0
MEMORY = 7
MARKED = "with restart markers"
UNMARKED = "without restart markers: "
"""The names under which images are counted. A reason follows UNMARKED."""


class Marked(NamedTuple):
    """A JPEG with restart markers, or the unchanged JPEG."""

    data: bytes
    reason: str | None
    """One of REASONS if `data` is unchanged, or None if markers were added."""


def with_restart_markers(data: bytes) -> Marked:
    """Return the JPEG `data` with restart markers. Requires `native.AVAILABLE`.

    Raises OSError if it fails, and MemoryError.
    """
    assert native.LIBRARY is not None, "vit._native is missing: test native.AVAILABLE first"
    # only a tiny image can exceed this size
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
