"""Restart markers: a JPEG written anew without loss, so that a reader can decode a part of it at the cost of the part. Free of torch.

The data's story: the Huffman codes of a baseline JPEG are replaced by those that fit it best, and a restart marker is put behind every few
blocks, at the same places in each row. The coefficients, hence the pixels in any decoder, stay what they were, which is proven for each
file; so do all other headers: EXIF, ICC, comments. Photographs get a little smaller by it. What is not baseline, is damaged or cannot be
proven keeps its bytes.

There are two ways to the very same bytes: the native part of this package (2 ms for 100 kB) and libjpeg-turbo's program `jpegtran`, called
three times (36 ms). The native part compares all coefficients of both files. Of jpegtran's work the proof is that both files become the
same bytes when jpegtran makes optimised tables for them without markers.

Source: ITU-T T.81, sections B.2.4.4 and F.1.2.3.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
from functools import cache
from typing import NamedTuple

from vit.data import native
from vit.data.jpeg import LONE, JpegHeader, read_header

WANTED_SEGMENTS, LEAST_MCUS = 8, 2
"""Of a row, and of a segment; as in vit/native/transcode.c, where the reasons are."""
DAMAGED = "damaged"
REASONS = {
    DAMAGED: 1,
    "progressive": 2,
    "arithmetic or lossless": 3,
    "not 8 bits": 4,
    "CMYK": 5,
    "several scans": 6,
    "bytes behind the image": 16,
}
"""Why an image keeps its bytes, and the number that vit/native/transcode.c says it by."""
OK, MEMORY = 0, 7
WAYS = {"native": "the native part of this package", "jpegtran": "the program jpegtran, which is ten times slower than the native part"}
MARKED, UNMARKED = "with restart markers", "without restart markers: "
"""How images are counted; a reason follows the second."""
NO_WAY = (
    "needs the native part of this package (install it again where there is a C compiler: pip install -e .) or the program jpegtran "
    "(Debian, Ubuntu: apt-get install libjpeg-turbo-progs)"
)
SPECIAL_MARKER = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
"""In image data: one that is no restart marker."""
START_OF_SCAN, REPLACED = 0xDA, (0xC4, 0xDD, 0xDA)
"""Markers; of the segments that are made anew: Huffman tables, restart interval, start of scan with all that follows."""


class Marked(NamedTuple):
    """A JPEG with restart markers, or as it was."""

    data: bytes
    reason: str | None
    """Why `data` is as it was, one of REASONS; None if it has markers now."""


@cache
def way() -> str | None:
    """How markers are made on this machine: "native", "jpegtran" or None. The bytes do not depend on it."""
    return "native" if native.AVAILABLE else "jpegtran" if shutil.which("jpegtran") else None


def with_restart_markers(data: bytes) -> Marked:
    """The JPEG `data` with a restart marker at a divisor of its rows. There must be a `way`. Raises OSError if it fails, MemoryError."""
    return _by_native(data) if way() == "native" else _by_jpegtran(data)


# ---- by vit/native/transcode.c ----------------------------------------------------------------------------------------

_scratch = threading.local()


def _by_native(data: bytes) -> Marked:
    assert native.LIBRARY is not None
    size = ctypes.c_size_t(3 * len(data) + (1 << 16))  # a guess that is too small only for images of next to nothing
    while True:
        buffer: ctypes.Array[ctypes.c_char] | None = getattr(_scratch, "buffer", None)
        if buffer is None or len(buffer) < size.value:
            buffer = _scratch.buffer = ctypes.create_string_buffer(size.value)
        status = native.LIBRARY.vit_jpeg_transcode(data, len(data), buffer, len(buffer), ctypes.byref(size))
        if status == OK:
            return Marked(memoryview(buffer)[: size.value].tobytes(), None)
        if status != MEMORY:
            return Marked(data, _reason(status))
        if size.value <= len(buffer):
            raise MemoryError


def _reason(status: int) -> str:
    for reason, number in REASONS.items():
        if number == status:
            return reason
    raise OSError(f"vit/native/transcode.c: status {status}; please report this image")


# ---- by jpegtran ------------------------------------------------------------------------------------------------------


def interval_for(mcus_wide: int) -> int:
    """MCUs between two markers: the largest divisor of a row that gives WANTED_SEGMENTS, else the one that gives most, else the row."""
    divisors = [k for k in range(LEAST_MCUS, mcus_wide // 2 + 1) if mcus_wide % k == 0]
    wanted = [k for k in divisors if mcus_wide // k >= WANTED_SEGMENTS]
    return wanted[-1] if wanted else divisors[0] if divisors else mcus_wide


def _by_jpegtran(data: bytes) -> Marked:
    try:
        header = read_header(data)
    except ValueError:
        return Marked(data, DAMAGED)
    if reason := _unsuitable(data, header):
        return Marked(data, reason)
    interval = interval_for(-(-header.width // header.mcu_size[0]))
    transcoded = _jpegtran(data, "-restart", f"{interval}B")
    if transcoded is None:
        return Marked(data, DAMAGED)
    kept = [segment for marker, segment in _segments(data) if marker not in REPLACED]
    marked = b"".join([data[:2], *kept, *(segment for marker, segment in _segments(transcoded) if marker in REPLACED)])
    canonical = _jpegtran(data)
    return Marked(marked, None) if canonical is not None and canonical == _jpegtran(marked) else Marked(data, DAMAGED)


def _unsuitable(data: bytes, header: JpegHeader) -> str | None:
    """One of REASONS, or None."""
    markers = {marker for marker, _ in _segments(data)}
    if 0xDC in markers or markers & LONE:  # a number of lines, or a restart marker, out of place
        return DAMAGED
    if 0xCC in markers:
        return "arithmetic or lossless"
    if header.process > 1:
        return "progressive" if header.process == 2 else "arithmetic or lossless"
    if header.precision != 8:
        return "not 8 bits"
    if header.num_components not in (1, 3):
        return "CMYK"
    if not header.is_one_scan:
        return "several scans"
    end = SPECIAL_MARKER.search(data, header.scan_offset)
    if end is None:
        return DAMAGED
    if data[end.end() - 1] != 0xD9:
        return "several scans"
    return None if end.end() == len(data) else "bytes behind the image"


def _jpegtran(data: bytes, *options: str) -> bytes | None:
    """The JPEG with optimised tables and without headers that decoders do not need; None if jpegtran finds any fault with it.

    16-bit quantisation tables are no fault: jpegtran says "Caution: quantization tables are too coarse for baseline JPEG", and goes on.
    """
    command = ["jpegtran", "-optimize", "-copy", "none", *options]
    done = subprocess.run(command, input=data, capture_output=True)
    is_good = done.returncode == 0 and all(line.startswith(b"Caution:") for line in done.stderr.splitlines())
    return done.stdout if is_good else None


def _segments(data: bytes) -> list[tuple[int, bytes]]:
    """Marker and bytes of each segment of a JPEG's headers; those of the last one, the start of scan, go on to the end of `data`."""
    segments, position, marker = [], 2, 0
    while marker != START_OF_SCAN:
        begin = position
        while data[position] == 0xFF:
            position += 1
        marker = data[position]
        position += 1 if marker in LONE else 1 + (data[position + 1] << 8 | data[position + 2])
        segments.append((marker, data[begin : None if marker == START_OF_SCAN else position]))
    return segments
