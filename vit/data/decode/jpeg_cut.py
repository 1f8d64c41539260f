"""A small JPEG cut out of a large one, as bytes, so that a decoder skips the rest.

A baseline JPEG is a grid of blocks (MCUs), line by line, in one stream of codes that can only be
read from the beginning. Restart markers, bytes 0xFF 0xD0 to 0xFF 0xD7 in turn, cut the stream into
independent segments. If their interval divides a line, or is a multiple of it, the image is a grid
of tiles. The tiles under the window, with the markers renumbered and the size in the header
changed, are a JPEG again, with exactly the pixels of the original:

    +----+----+----+----+
    |    |    |    |    |   file:  head 0 D0 1 D1 2 D2 3 D3 4 D4 5 D5 6 D6 7 D7 8 D0 9 ... 11 EOI
    +----+----+----+----+
    |    | .....|..|    |   cut:   head' 5 D0 6 D1 9 D2 10 EOI
    +----+-:--+--:-+----+
    |    | :..|..: |    |
    +----+----+----+----+

Without restart markers the lines below the window are skipped: the header gets a smaller height,
and the decoder stops there.

Source: ITU-T T.81, annexes B and E.1.4; the margin is libjpeg-turbo's "fancy" upsampling of colour
(jdsample.c), which uses one colour sample to each side.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.decode.jpeg_header import JpegHeader

Window = tuple[int, int, int, int]
"""left, top, width, height in pixels of the original image."""
EOI = b"\xff\xd9"
MAX_SHARE = 0.95
"""A cut with more of the image than this costs more than it saves: finding the markers takes a 25th
of decoding the entire image."""


class Cut(NamedTuple):
    """A JPEG that shows a part of another."""

    data: bytearray
    left: int
    top: int
    width: int
    height: int
    """The part, in pixels of the original."""
    has_rest: bool
    """The codes of further lines follow, of which libjpeg warns as "extraneous bytes"."""


def cut_window(data: bytes, header: JpegHeader, window: Window, margin: int = 1) -> Cut | None:
    """Cut the part of a JPEG that a decoder needs for `window`, which is inside the image.

    margin: pixels around the window that its pixels depend on, by the upsampling of colour; n if
        the decoder reduces the image to 1/n.

    Returns None if nothing can be saved, and for progressive and arithmetic coding, several scans,
    files that do not end with EOI (cut off, or with something after the image), and restart markers
    at other places than the header says: decoding the entire image will report what is wrong.
    """
    left, top, width, height = window
    mcu_width, mcu_height = header.mcu_size
    is_sequential = header.process <= 1 and header.precision == 8 and header.is_one_scan
    if not is_sequential or header.num_components not in (1, 3):
        return None
    if 0 in header.mcu_size or not data.endswith(EOI):
        return None
    mcus_per_line = -(-header.width // mcu_width)
    interval = header.restart_interval
    bottom = min(top + height + margin, header.height)
    if interval == 0:
        num_lines = -(-bottom // mcu_height)
        if num_lines * mcu_height >= header.height:
            return None
        smaller = _head(data, header, header.width, bottom)
        smaller += memoryview(data)[header.scan_offset :]
        return Cut(smaller, 0, 0, header.width, bottom, True)
    if mcus_per_line % interval and interval % mcus_per_line:
        return None

    # The tiles under the window.
    tile_width = min(interval, mcus_per_line) * mcu_width
    tile_height = max(interval // mcus_per_line, 1) * mcu_height
    num_columns = -(-header.width // tile_width)
    num_rows = -(-header.height // tile_height)
    first_column = max(left - margin, 0) // tile_width
    first_row = max(top - margin, 0) // tile_height
    stop_column = min(-(-(left + width + margin) // tile_width), num_columns)
    stop_row = -(-bottom // tile_height)
    cut_width = min(stop_column * tile_width, header.width) - first_column * tile_width
    cut_height = min(stop_row * tile_height, header.height) - first_row * tile_height
    if cut_width <= 4 * margin:
        # libjpeg upsamples lines of one or two colour samples differently: take one more tile.
        if first_column > 0:
            first_column -= 1
        else:
            stop_column = min(stop_column + 1, num_columns)
        cut_width = min(stop_column * tile_width, header.width) - first_column * tile_width
    if cut_width * cut_height > MAX_SHARE * header.width * header.height:
        return None

    # Their segments, each with the marker after it; those of a row of tiles are contiguous.
    markers = _restart_markers(data, header.scan_offset)
    if len(markers) != num_columns * num_rows - 1:
        return None
    bounds = np.concatenate(([header.scan_offset], markers + 2, [len(data)]))
    starts = bounds[:-1].reshape(num_rows, num_columns)[first_row:stop_row, first_column]
    stops = bounds[1:].reshape(num_rows, num_columns)[first_row:stop_row, first_column:stop_column]
    head = _head(data, header, cut_width, cut_height)
    rows = zip(starts.tolist(), stops[:, -1].tolist(), strict=True)
    smaller = bytearray().join([head, *(data[start:stop] for start, stop in rows)])
    shifts = len(head) + np.cumsum(stops[:, -1] - starts) - stops[:, -1]
    numbers = (stops + shifts[:, None] - 1).ravel()  # where the number of each marker is
    np.frombuffer(smaller, np.uint8)[numbers] = 0xD0 + np.arange(len(numbers)) % 8
    smaller[-2:] = EOI
    return Cut(
        smaller, first_column * tile_width, first_row * tile_height, cut_width, cut_height, False
    )


def _head(data: bytes, header: JpegHeader, width: int, height: int) -> bytearray:
    """Return all bytes before the codes, with a different size."""
    head = bytearray(data[: header.scan_offset])
    # The size comes after marker, length and precision: 5 bytes.
    struct.pack_into(">HH", head, header.frame_offset + 5, height, width)
    return head


def _restart_markers(data: bytes, scan_offset: int) -> NDArray[np.int64]:
    """Return where the scan's restart markers are in the file; none if they are not in turn."""
    codes = np.frombuffer(data, np.uint8, offset=scan_offset)
    at = (codes[:-1] == 0xFF).nonzero()[0]  # one byte in 256, so the rest is short
    numbers = codes[at + 1] ^ 0xD0
    is_restart = numbers < 8
    at = at[is_restart]
    in_turn = bytes(range(8)) * (len(at) // 8 + 1)
    return at + scan_offset if in_turn.startswith(numbers[is_restart].tobytes()) else at[:0]
