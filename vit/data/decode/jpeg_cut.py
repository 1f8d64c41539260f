"""Cut a small JPEG out of the bytes of a large one, so that a decoder skips the large JPEG's other
pixels.

A baseline JPEG is a grid of blocks (MCUs), stored line by line in one entropy-coded stream that can
only be read from the beginning. Restart markers, which cycle from 0xFF 0xD0 to 0xFF 0xD7, divide
the stream into independent segments. If the restart interval divides a line or is a multiple of a
line, the image is a grid of tiles. The tiles that overlap the window are copied, their markers are
renumbered, and the size in the header is changed. The result is a JPEG with exactly the original
pixels:

    +----+----+----+----+
    |    |    |    |    |   file:  head 0 D0 1 D1 2 D2 3 D3 4 D4 5 D5 6 D6 7 D7 8 D0 9 ... 11 EOI
    +----+----+----+----+
    |    | .....|..|    |   cut:   head' 5 D0 6 D1 9 D2 10 EOI
    +----+-:--+--:-+----+
    |    | :..|..: |    |
    +----+----+----+----+

Without restart markers, the height in the header is reduced, so that the decoder stops below the
window.

Source: ITU-T T.81, annexes B and E.1.4. The margin follows from libjpeg-turbo's "fancy" upsampling
of color (jdsample.c), which uses one color sample on each side.
"""

import math
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.decode.jpeg_header import JpegHeader

Window = tuple[int, int, int, int]
"""A window: left, top, width, height in pixels of the original image."""
EOI = b"\xff\xd9"
MARGIN = 1
"""The number of pixels around the window that affect it through color upsampling."""
MAX_SHARE = 0.95
"""The maximum fraction of the image for which cutting saves time. Finding the markers takes 1/25 as
long as decoding the entire image."""


class Cut(NamedTuple):
    """A JPEG that contains a part of another JPEG."""

    data: bytearray
    left: int
    top: int
    width: int
    height: int
    """The height of the part. All four numbers are in pixels of the original image."""
    has_rest: bool
    """Whether the data contain lines below `height`. If so, libjpeg warns about "extraneous
    bytes"."""


def cut_window(data: bytes, header: JpegHeader, window: Window) -> Cut | None:
    """Cut out the part of a JPEG that a decoder needs for `window`, which must be inside the image.

    Returns None if a cut would not save time. Also returns None for progressive and arithmetic
    coding, several scans, files that do not end with EOI (truncated, or with bytes after the
    image), and restart markers that contradict the header. Decoding the entire image will report
    such errors.
    """
    left, top, width, height = window
    mcu_width, mcu_height = header.mcu_size
    is_sequential = header.process <= 1 and header.precision == 8 and header.is_one_scan
    if not is_sequential or header.num_components not in (1, 3):
        return None
    if 0 in header.mcu_size or not data.endswith(EOI):
        return None

    bottom = min(top + height + MARGIN, header.height)
    interval = header.restart_interval
    if interval == 0:
        return _cut_height(data, header, bottom)

    mcus_per_line = math.ceil(header.width / mcu_width)
    if mcus_per_line % interval and interval % mcus_per_line:
        return None

    # Find the tiles that overlap the window.
    tile_width = min(interval, mcus_per_line) * mcu_width
    tile_height = max(interval // mcus_per_line, 1) * mcu_height
    num_columns = math.ceil(header.width / tile_width)
    num_rows = math.ceil(header.height / tile_height)
    first_column = max(left - MARGIN, 0) // tile_width
    first_row = max(top - MARGIN, 0) // tile_height
    stop_column = min(math.ceil((left + width + MARGIN) / tile_width), num_columns)
    stop_row = math.ceil(bottom / tile_height)
    cut_width = min(stop_column * tile_width, header.width) - first_column * tile_width
    cut_height = min(stop_row * tile_height, header.height) - first_row * tile_height

    if cut_width <= 4:
        # Add one tile, because libjpeg upsamples lines of one or two color samples differently.
        if first_column > 0:
            first_column -= 1
        else:
            stop_column = min(stop_column + 1, num_columns)
        cut_width = min(stop_column * tile_width, header.width) - first_column * tile_width
    if cut_width * cut_height > MAX_SHARE * header.width * header.height:
        return None

    return _copy_tiles(
        data,
        header,
        grid=(num_rows, num_columns),
        tile_size=(tile_width, tile_height),
        rows=slice(first_row, stop_row),
        columns=slice(first_column, stop_column),
        cut_size=(cut_width, cut_height),
    )


def _cut_height(data: bytes, header: JpegHeader, bottom: int) -> Cut | None:
    """Keep only the lines above `bottom`, or return None if no line of MCUs would be dropped."""
    _, mcu_height = header.mcu_size
    if math.ceil(bottom / mcu_height) * mcu_height >= header.height:
        return None
    smaller = _head(data, header, header.width, bottom)
    smaller += memoryview(data)[header.scan_offset :]
    return Cut(smaller, 0, top=0, width=header.width, height=bottom, has_rest=True)


def _copy_tiles(
    data: bytes,
    header: JpegHeader,
    grid: tuple[int, int],
    tile_size: tuple[int, int],
    rows: slice,
    columns: slice,
    cut_size: tuple[int, int],
) -> Cut | None:
    """Copy the segments of some tiles, and renumber their restart markers.

    Returns None if the markers contradict the header.

    Args:
        grid: The number of rows and of columns of tiles in the image.
        tile_size: The (width, height) of a tile in pixels.
        rows, columns: The rows and columns of the tiles to copy.
        cut_size: The total (width, height) of these tiles in pixels.
    """
    markers = _restart_markers(data, header.scan_offset)
    if len(markers) != math.prod(grid) - 1:
        return None

    # A segment includes the marker that follows. The segments of one row of tiles are contiguous.
    bounds = np.concatenate(([header.scan_offset], markers + 2, [len(data)]))
    starts = bounds[:-1].reshape(grid)[rows, columns.start]
    stops = bounds[1:].reshape(grid)[rows, columns]
    head = _head(data, header, *cut_size)
    segments = zip(starts.tolist(), stops[:, -1].tolist(), strict=True)
    smaller = bytearray().join([head, *(data[start:stop] for start, stop in segments)])

    shifts = len(head) + np.cumsum(stops[:, -1] - starts) - stops[:, -1]
    numbers = (stops + shifts[:, None] - 1).ravel()  # the offset of each marker's number
    np.frombuffer(smaller, np.uint8)[numbers] = 0xD0 + np.arange(len(numbers)) % 8
    smaller[-2:] = EOI
    return Cut(
        smaller,
        columns.start * tile_size[0],
        top=rows.start * tile_size[1],
        width=cut_size[0],
        height=cut_size[1],
        has_rest=False,
    )


def _head(data: bytes, header: JpegHeader, width: int, height: int) -> bytearray:
    """Return all bytes before the entropy-coded data, with the size replaced."""
    head = bytearray(data[: header.scan_offset])
    # The size comes after the marker, the length and the precision, which take 5 bytes.
    struct.pack_into(">HH", head, header.frame_offset + 5, height, width)
    return head


def _restart_markers(data: bytes, scan_offset: int) -> NDArray[np.int64]:
    """Return the offsets of the scan's restart markers, or an empty array if they are out of
    sequence."""
    codes = np.frombuffer(data, np.uint8, offset=scan_offset)
    at = (codes[:-1] == 0xFF).nonzero()[0]  # about one byte in 256
    numbers = codes[at + 1] ^ 0xD0
    is_restart = numbers < 8
    at = at[is_restart]
    in_turn = bytes(range(8)) * (len(at) // 8 + 1)  # 0 to 7, repeated
    return at + scan_offset if in_turn.startswith(numbers[is_restart].tobytes()) else at[:0]
