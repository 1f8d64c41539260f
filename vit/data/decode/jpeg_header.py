"""Read the headers of a JPEG without a decoder.

A JPEG is a sequence of segments, each with a marker and a length. Segments are read from the start
of the file to the first scan. Segments that are not needed (ICC profiles, tables) are skipped.

Source: ITU-T T.81, annex B; Exif 2.32, section 4.6 for the orientation.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAX_PIXELS = 178_956_970
"""The maximum number of pixels in an image, as in Pillow. Without this limit, decoding an image
with a damaged header (65,535 x 65,535 pixels) could take 13 GB."""
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of frames, SOF0 to SOF15. The three excluded markers are Huffman tables, a reserved
marker and arithmetic conditioning."""
SEGMENTS = frozenset((0xC4, 0xCC, 0xDA, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE))
"""The markers of other segments with a length: tables, start of scan, number of lines, restart
interval, APPn, comment."""
SOF0, SOS, DRI, APP1 = 0xC0, 0xDA, 0xDD, 0xE1
"""The markers that `read_header` uses: the first of FRAMES, the start of a scan, the restart
interval, and EXIF."""
LONE = frozenset((0x01, *range(0xD0, 0xD8)))
"""The markers that are not followed by a length: TEM and the restart markers."""


class JpegHeader(NamedTuple):
    """The fields of the segments before the image data."""

    width: int
    height: int
    """The stored height. Width and height are in pixels, before EXIF rotation."""
    num_components: int
    """The number of components: 1 (gray), 3 (color), 4 (CMYK or YCCK)."""
    precision: int
    """The number of bits per sample, which is 8 except in medical and scientific images."""
    process: int
    """The n in SOFn. 0: baseline, 1: extended sequential, 2: progressive, 3: lossless, 5 and above:
    hierarchical or arithmetic coding."""
    orientation: int
    """The EXIF orientation, 1 to 8; 1 (upright) if missing or invalid."""
    restart_interval: int
    """The number of blocks (MCUs) between two restart markers; 0 if there are no restart
    markers."""
    scan_offset: int
    """The offset in bytes of the entropy-coded data of the first scan."""
    frame_offset: int
    """The offset of the frame marker in bytes."""
    sampling: tuple[tuple[int, int], ...]
    """The number of samples across and down in a block (MCU), for each component. With 4:2:0, these
    are (2, 2), (1, 1), (1, 1)."""
    is_one_scan: bool
    """Whether the first scan contains all components. If so, no other scan follows, unless the
    coding is progressive."""

    @property
    def size(self) -> tuple[int, int]:
        """The stored (width, height) in pixels."""
        return self.width, self.height

    @property
    def mcu_size(self) -> tuple[int, int]:
        """The (width, height) in pixels of an MCU, the unit of the entropy-coded data.

        The value is valid only if `is_one_scan` is true.
        """
        if self.num_components == 1:
            return 8, 8
        across, down = zip(*self.sampling, strict=True)
        return 8 * max(across), 8 * max(down)


def read_header(data: bytes) -> JpegHeader:
    """Read the header of a JPEG; `data` may end anywhere after the start of the first scan.

    Raises ValueError if `data` is not a JPEG, has truncated or damaged headers, has no pixels, or
    has extra bytes between segments, which libjpeg would skip.
    """
    if data[:2] != b"\xff\xd8":
        raise ValueError("no JPEG")

    frame = None
    orientation, restart_interval, frame_offset = 1, 0, 0  # defaults for missing segments
    try:
        for marker, position, end in _segments(data):
            if marker in FRAMES:
                if frame is not None:
                    raise ValueError(
                        f"damaged JPEG headers: found a second frame at byte {position}"
                    )
                frame = _read_frame(data, position, end)
                process = marker - SOF0
                frame_offset = position
            elif marker == DRI:
                restart_interval = data[position + 4] << 8 | data[position + 5]
            elif marker == APP1 and orientation == 1:
                orientation = _exif_orientation(data[position + 4 : end])
    except (IndexError, struct.error):
        raise ValueError(f"truncated JPEG headers, after {len(data)} bytes") from None

    # The last segment, from `position` to `end`, is the start of the scan.
    if frame is None:
        raise ValueError("damaged JPEG headers: the image data has no frame header")
    if end > len(data):
        raise ValueError(f"truncated JPEG headers, after {len(data)} bytes")

    precision, height, width, num_components = frame
    # Each component takes 3 bytes, of which the second contains both sampling factors.
    sampling = tuple(
        (both >> 4, both & 15)
        for both in data[frame_offset + 11 : frame_offset + 10 + 3 * num_components : 3]
    )
    return JpegHeader(
        width,
        height,
        num_components=num_components,
        precision=precision,
        process=process,
        orientation=orientation,
        restart_interval=restart_interval,
        scan_offset=end,
        frame_offset=frame_offset,
        sampling=sampling,
        is_one_scan=data[position + 4 : position + 5] == bytes((num_components,)),
    )


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, position and end of each segment, up to the start of the first scan.

    Raises ValueError if a segment is damaged, and IndexError if `data` is truncated.
    """
    marker = 0
    position = 2
    while marker != SOS:
        if data[position] != 0xFF:
            raise ValueError(f"damaged JPEG headers: found no marker at byte {position}")
        marker = data[position + 1]
        if marker not in SEGMENTS and marker not in FRAMES:
            if marker != 0xFF and marker not in LONE:
                raise ValueError(
                    f"damaged JPEG headers: unexpected marker 0x{marker:02x} at byte {position}"
                )
            # A marker may be preceded by any number of fill bytes (0xFF).
            position += 1 if marker == 0xFF else 2
            continue

        length = data[position + 2] << 8 | data[position + 3]
        if length < 2:
            raise ValueError(
                f"damaged JPEG headers: invalid segment length {length} at byte {position}"
            )

        end = position + 2 + length
        yield marker, position, end
        position = end


def _read_frame(data: bytes, position: int, end: int) -> tuple[int, int, int, int]:
    """Return the precision, height, width and number of components of a frame segment."""
    frame = struct.unpack_from(">BHHB", data, position + 4)
    precision, height, width, num_components = frame
    if end - position != 10 + 3 * num_components or 0 in frame:
        raise ValueError(
            f"damaged JPEG headers: a frame of {width} x {height} pixels, {num_components}"
            f" components, {precision} bits"
        )
    return frame


def _exif_orientation(segment: bytes) -> int:
    """Return the orientation from an EXIF block (a small TIFF), or 1 if it is missing or
    damaged."""
    if not segment.startswith(b"Exif\0\0"):
        return 1

    tiff = segment[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1

    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass  # ignore a truncated block, which some cameras and editors write
    return 1
