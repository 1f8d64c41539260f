"""Decode intact and damaged files of all kinds with all decoders, and compare the results.

All decoders must return the same pixels, or all must reject the image.

    python tests/data/decode/fuzz_images.py --minutes 10 [--seed 7]

Each window is decoded by the C decoder, by pip packages, and by cropping the fully decoded image.
The script also compares the training and evaluation views, the bytes that preparation writes, and
the image size in the index. A truncated JPEG must be rejected. A window of a corrupt JPEG may be
accepted if all decoders agree. The script simulates typical damage by disks, networks and users:
flipped, lost, inserted and repeated bytes, truncated files, extra bytes after the end and between
headers, and wrong headers.

The script prints counts. If results differ, the script keeps the file and exits with status 1.
tests/data/decode/test_images.py runs the same comparison on one image of each kind.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import os
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageCms, features

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from data_prep.write.images import ImagePolicy, Unreadable, prepare
from vit.config.schema import EvalConfig
from vit.data.decode import native
from vit.data.decode.crops import decode_center, decode_views, resize, resized_size
from vit.data.decode.images import Pixels, decode, decode_box, read_image_size
from vit.data.decode.jpeg_cut import Window
from vit.data.decode.jpeg_header import read_header

POLICY = ImagePolicy(jpeg_quality=100)
VIEW = EvalConfig(crop_pct=0.875)
SIDE = 16
MOST_PIXELS = 1 << 20
"""The maximum number of pixels that a header may declare. Larger images are valid but slow to
decode."""


# ---- images of all kinds -------------------------------------------------------------------------


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng((width, height))
    y, x = np.mgrid[:height, :width]
    waves = (
        np.stack([np.sin(x / 9 + phase) + np.cos(y / 7 - phase) for phase in range(4)], -1) * 50
        + 128
    )
    pixels = (waves + generator.normal(0, 20, waves.shape)).clip(0, 255).astype(np.uint8)
    if mode == "RGBA":
        return Image.fromarray(pixels)
    if mode == "LA":
        return picture(width, height, "RGBA").convert("LA")
    rgb = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    if mode == "LAB":
        to_lab = ImageCms.buildTransform(
            ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"
        )
        return ImageCms.applyTransform(rgb, to_lab)
    if mode in ("I;16", "I;16B"):
        wide = pixels[..., 0].astype(np.uint16) * 256 + pixels[..., 1]
        return Image.fromarray(wide if mode == "I;16" else wide.astype(">u2"))
    return rgb.convert(mode)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(color_type: int, width: int, height: int, bits: int = 16) -> bytes:
    """Encode a PNG without Pillow, which cannot write 16-bit colors."""
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[color_type] * bits // 8

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    rng = random.Random(color_type)
    rows = b"".join(b"\0" + rng.randbytes(samples * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def at_frame(data: bytes) -> int:
    return read_header(data).frame_offset


def jpegs(width: int, height: int) -> Iterator[tuple[str, bytes]]:
    """Yield JPEGs of nearly all kinds. The size of JPEGs with unusual chroma subsampling is only
    approximate."""
    rgb = picture(width, height)
    gray = picture(width, height, "L")
    for blocks in (0, 1, 2, 3):
        marks = {"restart_marker_blocks": blocks}
        interval = f", markers each {blocks}" if blocks else ""
        for sampling in ("4:4:4", "4:2:2", "4:2:0"):
            data = encoded(rgb, "JPEG", quality=85, subsampling=sampling, **marks)
            yield f"JPEG {sampling}{interval}", data
            for factors, name in {
                "4:2:2": [(0x12, "4:4:0")],
                "4:2:0": [(0x41, "4:1:1"), (0x14, "4:4:1")],
            }.get(sampling, []):
                # Change the chroma subsampling in the header, but not the compressed data.
                at = at_frame(data) + 11
                yield f"JPEG {name}{interval}", data[:at] + bytes([factors]) + data[at + 1 :]
        yield f"JPEG gray{interval}", encoded(gray, "JPEG", **marks)
        yield f"JPEG RGB{interval}", encoded(rgb, "JPEG", keep_rgb=True, **marks)
        cmyk = encoded(rgb.convert("CMYK"), "JPEG", **marks)
        yield f"JPEG CMYK{interval}", cmyk
        at = cmyk.index(b"Adobe") + 11
        yield f"JPEG YCCK{interval}", cmyk[:at] + b"\2" + cmyk[at + 1 :]
        yield f"JPEG CMYK without Adobe{interval}", cmyk.replace(b"Adobe", b"Other")
        yield f"JPEG progressive{interval}", encoded(rgb, "JPEG", progressive=True, **marks)
        yield (
            f"JPEG progressive CMYK{interval}",
            encoded(rgb.convert("CMYK"), "JPEG", progressive=True, **marks),
        )
    yield "JPEG rows of markers", encoded(rgb, "JPEG", restart_marker_rows=1)
    plain = encoded(rgb, "JPEG", quality=85)
    header = read_header(plain)
    # Any byte sequence is valid arithmetic-coded data for some image.
    codes = random.Random(0).randbytes(width * height).replace(b"\xff", b"\0")
    arithmetic = (
        plain[: header.frame_offset + 1]
        + b"\xc9"
        + plain[header.frame_offset + 2 : header.scan_offset]
        + codes
        + b"\xff\xd9"
    )
    yield "JPEG arithmetic", arithmetic
    yield (
        "JPEG 12 bits",
        plain[: header.frame_offset + 4] + b"\x0c" + plain[header.frame_offset + 5 :],
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "JPEG with EXIF", encoded(rgb, "JPEG", exif=exif, icc_profile=bytes(70_000))
    yield "MPO", encoded(rgb, "MPO", save_all=True, append_images=[rgb.rotate(180)])


def others(width: int, height: int) -> Iterator[tuple[str, bytes]]:
    """Yield images in other formats, in all modes that Pillow can write and some that it cannot."""
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        yield f"PNG {mode}", encoded(picture(width, height, mode), "PNG")
    yield (
        "PNG with a transparent color",
        encoded(picture(width, height), "PNG", transparency=(128, 128, 128)),
    )
    yield (
        "PNG with a transparent gray",
        encoded(picture(width, height, "L"), "PNG", transparency=128),
    )
    yield (
        "PNG P with transparencies",
        encoded(picture(width, height, "P"), "PNG", transparency=bytes(range(256))),
    )

    for color_type, name in {2: "RGB", 4: "LA", 6: "RGBA"}.items():
        yield f"PNG {name} of 16 bits", png(color_type, width, height)

    for mode in (
        "1",
        "L",
        "LA",
        "P",
        "RGB",
        "RGBA",
        "CMYK",
        "YCbCr",
        "LAB",
        "I;16",
        "I;16B",
        "I",
        "F",
    ):
        yield f"TIFF {mode}", encoded(picture(width, height, mode), "TIFF")
    for compression in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg"):
        yield (
            f"TIFF {compression}",
            encoded(picture(width, height), "TIFF", compression=compression),
        )
    yield (
        "TIFF I;16 deflate",
        encoded(picture(width, height, "I;16"), "TIFF", compression="tiff_deflate"),
    )
    for orientation in (3, 6):
        yield (
            f"TIFF to be turned ({orientation})",
            encoded(picture(width, height), "TIFF", tiffinfo={0x0112: orientation}),
        )

    for mode in ("1", "L", "RGB", "I;16", "F"):
        yield f"PPM {mode}", encoded(picture(width, height, mode), "PPM")
    yield (
        "PPM RGB of 16 bits",
        b"P6 %d %d 65535 " % (width, height) + random.Random(1).randbytes(6 * width * height),
    )

    for mode in ("1", "L", "P", "RGB", "RGBA"):
        yield f"BMP {mode}", encoded(picture(width, height, mode), "BMP")
    for mode in ("L", "P", "RGB"):
        yield f"GIF {mode}", encoded(picture(width, height, mode), "GIF")

    both = [picture(width, height), picture(width, height).rotate(180)]
    for form in ("GIF", "PNG", "WEBP"):
        yield f"{form}, animated", encoded(both[0], form, save_all=True, append_images=both[1:])
    for mode in ("RGB", "RGBA"):
        yield f"WEBP {mode}", encoded(picture(width, height, mode), "WEBP", lossless=True)
    yield "WEBP lossy", encoded(picture(width, height), "WEBP", quality=60)

    if features.check("avif"):
        for mode in ("RGB", "RGBA"):
            yield f"AVIF {mode}", encoded(picture(width, height, mode), "AVIF", quality=50)
    if features.check("jpg_2000"):
        for mode in ("L", "RGB", "RGBA", "I;16"):
            yield f"JPEG2000 {mode}", encoded(picture(width, height, mode), "JPEG2000")


def kinds(width: int, height: int) -> dict[str, bytes]:
    """Return a dict that maps the name of each kind to an encoded image."""
    return dict([*jpegs(width, height), *others(width, height)])


# ---- the ways to decode, and whether they agree --------------------------------------------------


@contextmanager
def without_native() -> Iterator[None]:
    is_available = native.AVAILABLE
    native.AVAILABLE = False
    try:
        yield
    finally:
        native.AVAILABLE = is_available


def box_of(data: bytes, box: Window, channels: int) -> Pixels:
    return decode_box(data, box, channels)


def view_of(data: bytes, box: Window, channels: int) -> Pixels:
    """Return the training view at the size of the window, so that the window is not resized."""
    return (
        decode_views(data, [box], (box[3], box[2]), "bilinear", channels)[0]
        .permute(1, 2, 0)
        .numpy()
    )


def center_of(data: bytes, channels: int) -> Pixels:
    return decode_center(data, (SIDE, SIDE), VIEW, "bilinear", channels).numpy()


def tried(decoder: Callable[..., Pixels], *about: Any) -> Pixels | None:
    """Return the pixels, or None if the decoder raises a ValueError. Any other error is a bug in
    the decoder."""
    try:
        return decoder(*about)
    except ValueError:
        return None


def same(a: Pixels | None, b: Pixels | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))


def description(pixels: Pixels | None) -> str:
    return (
        "refused"
        if pixels is None
        else f"{pixels.shape} {hashlib.sha256(np.ascontiguousarray(pixels)).hexdigest()[:8]}"
    )


class Comparison:
    """Compares the results of all decoders for random windows of one image file."""

    def __init__(self, data: bytes, rng: random.Random):
        self.data = data
        self.rng = rng
        self.differences: list[str] = []
        self.overlooked = 0
        """The number of accepted windows in a corrupt file."""
        try:
            self.size: tuple[int, int] | None = read_image_size(data)
        except ValueError:
            self.size = None
        if self.size is None or self.size[0] * self.size[1] <= MOST_PIXELS:
            for channels in (3, 1):
                self._compare(channels)

    def _compare(self, channels: int) -> None:
        data = self.data
        size = self.size
        whole = tried(decode, data, channels)
        if whole is not None and size != whole.shape[1::-1]:
            self.differences.append(
                f"an index would say {size}, but it has {whole.shape[1::-1]} pixels"
            )
        if channels == 3:
            self._prepare(whole)
        if size is None:
            return
        for box in self._boxes(*size):
            left, top, width, height = box
            part = None if whole is None else whole[top : top + height, left : left + width]
            ways = self._by_both("box", box_of, box, channels) | self._by_both(
                "view", view_of, box, channels
            )
            self._judge(f"{box} of {size}, {channels} channels", part, ways)
        height, width = resized_size(size[::-1], (SIDE, SIDE), VIEW)
        top, left = round((height - SIDE) / 2), round((width - SIDE) / 2)
        center = (
            None
            if whole is None
            else resize(whole, (height, width), "bilinear")[
                :, top : top + SIDE, left : left + SIDE
            ].numpy()
        )
        self._judge(
            f"{channels} channels", center, self._by_both("evaluation", center_of, channels)
        )

    def _boxes(self, width: int, height: int) -> Iterator[tuple[int, int, int, int]]:
        yield 0, 0, width, height
        for _ in range(2):
            w, h = self.rng.randint(1, width), self.rng.randint(1, height)
            yield self.rng.randint(0, width - w), self.rng.randint(0, height - h), w, h

    def _by_both(
        self, name: str, decoder: Callable[..., Pixels], *about: Any
    ) -> dict[str, Pixels | None]:
        ways = {name: tried(decoder, self.data, *about)}
        with without_native():
            ways[f"{name} by pip packages"] = tried(decoder, self.data, *about)
        return ways

    def _judge(self, part: str, whole: Pixels | None, ways: dict[str, Pixels | None]) -> None:
        """Require the fully decoded image's pixels, or a rejection. If no decoder reads the corrupt
        data, the pixels may differ from the full image, but all decoders must agree."""
        first = next(iter(ways.values()))
        agree = all(same(pixels, first) for pixels in ways.values())
        if agree and same(first, whole):
            return
        if agree and first is not None and self._may_overlook(whole):
            self.overlooked += 1
            return
        self.differences.append(
            f"{part}: whole {description(whole)}, "
            + ", ".join(f"{name} {description(pixels)}" for name, pixels in ways.items())
        )

    def _may_overlook(self, whole: Pixels | None) -> bool:
        try:
            header = read_header(self.data)
            simplejpeg.decode_jpeg(self.data)
            return False
        except ValueError:
            return self.data.endswith(b"\xff\xd9") and (
                whole is None or header.restart_interval > 0
            )

    def _prepare(self, whole: Pixels | None) -> None:
        try:
            prepared = prepare(self.data, POLICY)
        except Unreadable as error:
            if whole is not None:
                self.differences.append(f"preparation refuses ({error}) what training takes")
            return
        if whole is None:
            self.differences.append("preparation takes what training refuses")
        elif (prepared.width, prepared.height) != whole.shape[1::-1]:
            self.differences.append(
                f"prepared: {prepared.width} x {prepared.height}, where the whole is"
                f" {whole.shape[1::-1]}"
            )
        elif prepared.data is not self.data:
            far = np.abs(decode(prepared.data).astype(int) - whole).max()
            # Differences of up to six levels are caused by encoding with JPEG quality 100.
            if far > 6:
                self.differences.append(
                    f"prepared pixels ({prepared.change}) are {far} levels away"
                )


# ---- damage --------------------------------------------------------------------------------------


def damaged(data: bytes, rng: random.Random) -> bytes:
    hurt = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(hurt) < 40:
            break
        at = (
            rng.randrange(2, len(hurt))
            if rng.random() < 0.5
            else rng.randrange(2, min(len(hurt), 700))
        )

        match rng.randrange(13):
            case 0:
                hurt[at] = rng.randrange(256)
            case 1:
                hurt[at] ^= 1 << rng.randrange(8)
            case 2:
                del hurt[at : at + rng.choice((1, 2, 20, 300))]
            case 3:
                hurt[at:at] = rng.randbytes(rng.choice((1, 2, 30)))
            case 4:
                del hurt[at:]
            case 5:
                del hurt[at:]
                hurt += b"\xff\xd9"
            case 6:
                hurt += rng.choice(
                    (
                        b"\0",
                        b"\xff\xd9",
                        b"\n",
                        rng.randbytes(40),
                        bytes(data[: rng.randrange(len(data))]),
                    )
                )
            case 7:
                hurt[at : at + 64] = bytes(len(hurt[at : at + 64]))
            case 8:
                hurt[at : at + 2] = bytes(
                    (0xFF, rng.choice((*range(0xD0, 0xDA), 0xC4, 0xDA, 0xDB, 0xDD, 0xFE, 0)))
                )
            case 9:
                other = rng.randrange(2, len(hurt))
                hurt[at : at + 40] = hurt[other : other + 40]
            case 10:
                del hurt[-rng.randint(1, 3) :]
            case _:
                _lie(hurt, rng)
    return bytes(hurt)


def _lie(data: bytearray, rng: random.Random) -> None:
    try:
        header = read_header(bytes(data))
    except ValueError:
        return
    frame = header.frame_offset
    kind = rng.randrange(6)
    if kind == 0:
        struct.pack_into(
            ">H",
            data,
            frame + 5 + 2 * rng.randrange(2),
            rng.choice((1, 7, 8, 16, header.width, header.height + 8, 300)),
        )
    elif kind == 1:
        data[frame + 11 + 3 * rng.randrange(header.num_components)] = rng.choice(
            (0x11, 0x12, 0x21, 0x22, 0x14, 0x41, 0x31, 0x13)
        )
    elif kind == 2:
        at = data.find(b"\xff\xdd\0\4")
        if at >= 0:
            struct.pack_into(">H", data, at + 4, rng.choice((0, 1, 2, 3, 5, 100)))
        else:
            data[frame:frame] = b"\xff\xdd\0\4" + struct.pack(">H", rng.choice((1, 2, 5)))
    elif kind == 3:
        data[frame:frame] = rng.choice(
            (b"\0", b"\xff", b"stray", b"\xff\xd0", b"\xff\xfe\0\4hi", b"\xff\x01")
        )
    elif kind == 4:
        data[frame + 1] = rng.choice((0xC0, 0xC1, 0xC2, 0xC3, 0xC9))
    else:
        data[header.scan_offset - rng.randint(1, 9)] = rng.randrange(256)


def numbers_for(seconds: float) -> Iterator[int]:
    """Yield numbers from 0 until the time limit is reached."""
    end_s = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end_s, itertools.count())


def fuzz(numbers: Iterable[int], seed: int, keep: Path) -> tuple[Counter[str], list[str]]:
    """Damage and compare one file for each number. Return the counts, and the differences with the
    files that cause them."""
    rng = random.Random(seed)
    counts = Counter[str]()
    differences = []
    sizes = [(1, 1), (7, 9), (17, 33), (64, 48), (97, 64), (150, 41)]
    seeds = [
        (f"{width} x {height} {name}", data)
        for width, height in sizes
        for name, data in kinds(width, height).items()
    ]
    jpegs_only = [pair for pair in seeds if "JPEG " in pair[0] or "MPO" in pair[0]]
    for _ in numbers:
        name, data = rng.choice(jpegs_only if rng.random() < 0.8 else seeds)
        data = damaged(data, rng)
        counts["files"] += 1
        try:
            decode(data)
            counts["decoded"] += 1
        except ValueError:
            counts["refused"] += 1
        compared = Comparison(data, rng)
        counts["windows that do not show their file's damage"] += compared.overlooked
        for difference in compared.differences:
            counts["differences"] += 1
            file = keep / f"difference-{hashlib.sha256(data).hexdigest()[:12]}"
            file.write_bytes(data)
            differences.append(f"{name}: {difference} ({file})")
    return counts, differences


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the damage; default: another one each time"
    )
    parser.add_argument(
        "--keep", type=Path, default=Path("/tmp"), help="folder for files that show a difference"
    )
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(
        f"seed {seed}; C decoder:"
        f" {'yes' if native.AVAILABLE else 'no, so one way less is compared'}",
        flush=True,
    )
    counts, differences = fuzz(numbers_for(60 * args.minutes), seed, args.keep)
    print(*differences[:40], sep="\n")
    print(", ".join(f"{number:,} {event}" for event, number in counts.items()))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
