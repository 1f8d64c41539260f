"""A small JPEG cut out of a large one, as bytes: what a decoder need not see, it need not decode.
Free of torch.

The data's story: a baseline JPEG is a row of blocks (MCUs), line by line, in one stream of codes
that only a decoder can find its way through. Restart markers, bytes 0xFF 0xD0 to 0xFF 0xD7 in turn,
cut the stream into segments that do not depend on each other. Where they stand at a divisor or a
multiple of a line, the image is a grid of tiles. The tiles under the window, with the marker
numbers counted anew and the size in the header changed, are a JPEG again, whose pixels are the very
pixels of the original:

    +----+----+----+----+
    |    |    |    |    |        file:  head 0 D0 1 D1 2 D2 3 D3 4 D4 5 D5 6 D6 7 D7 8 D0 9 D1 10 D2 11 EOI
    +----+----+----+----+
    |    | .....|..|    |        cut:   head' 5 D0 6 D1 9 D2 10 EOI
    +----+-:--+--:-+----+
    |    | :..|..: |    |
    +----+----+----+----+

Without restart markers the lines below the window can be left away: the header gets the smaller
height, and the decoder stops there.

Source: ITU-T T.81, annexes B and E.1.4; the margin is libjpeg-turbo's "fancy" upsampling of colour
(jdsample.c), which looks one colour sample to each side.
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
"""A cut that keeps more of the image than this costs more than it saves: finding the markers takes
a 25th of decoding the whole."""


class Cut(NamedTuple):
    """A JPEG that shows a part of another."""

    data: bytearray
    left: int
    top: int
    width: int
    height: int
    """The part, in pixels of the original."""
    has_rest: bool
    """Codes of more lines follow those that are shown. libjpeg, when the pixels are done, complains
    of "extraneous bytes"."""


def cut_window(data: bytes, header: JpegHeader, window: Window, margin: int = 1) -> Cut | None:
    """The part of a JPEG with `header` that a decoder needs for `window`, which lies inside the
    image; None where nothing can be saved.

    Decoded, the pixels of the window are those of the whole image's decoding. `margin`: pixels
    beyond the window that its pixels depend on by the upsampling of colour; n where the decoder
    reduces the image to 1/n.

    None for progressive and arithmetic coding, several scans, files that do not end with EOI (cut
    off, or with something behind the image) and restart markers that are not where the header has
    them: whole decoding will say what is wrong with those, if anything is.
    """
    left, top, width, height = window
    mcu_width, mcu_height = header.mcu_size
    if (
        header.process > 1
        or header.precision != 8
        or header.num_components not in (1, 3)
        or not header.is_one_scan
    ):
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
    # libjpeg upsamples lines of one or two colour samples in another way
    if cut_width <= 4 * margin:
        first_column, stop_column = (
            max(first_column - 1, 0),
            min(stop_column + (first_column == 0), num_columns),
        )
        cut_width = min(stop_column * tile_width, header.width) - first_column * tile_width
    if cut_width * cut_height > MAX_SHARE * header.width * header.height:
        return None

    # Their segments, each with the marker behind it; those of a row of tiles lie together.
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
    numbers = (stops + shifts[:, None] - 1).ravel()  # where each segment's marker says its number
    np.frombuffer(smaller, np.uint8)[numbers] = 0xD0 + np.arange(len(numbers)) % 8
    smaller[-2:] = EOI
    return Cut(
        smaller, first_column * tile_width, first_row * tile_height, cut_width, cut_height, False
    )


def _head(data: bytes, header: JpegHeader, width: int, height: int) -> bytearray:
    """All that stands before the codes, with another size."""
    head = bytearray(data[: header.scan_offset])
    # behind marker, length and precision
    struct.pack_into(">HH", head, header.frame_offset + 5, height, width)
    return head


def _restart_markers(data: bytes, scan_offset: int) -> NDArray[np.int64]:
    """Where the restart markers of the scan stand, in bytes from the start of the file; none if
    they are not numbered in turn."""
    codes = np.frombuffer(data, np.uint8, offset=scan_offset)
    at = (codes[:-1] == 0xFF).nonzero()[0]  # one byte in 256, so the rest is short
    numbers = codes[at + 1] ^ 0xD0
    is_restart = numbers < 8
    at = at[is_restart]
    in_turn = bytes(range(8)) * (len(at) // 8 + 1)
    return at + scan_offset if in_turn.startswith(numbers[is_restart].tobytes()) else at[:0]
