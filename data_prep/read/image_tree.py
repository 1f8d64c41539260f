"""Any tree of images: which files are images, and what is left out, so nothing is lost silently.

Folders are listed one after the other. A file is taken by its suffix, or without one by its first
bytes; everything else is counted by suffix, separately for what looks like an image. Links are
followed; those that lead out of the tree are counted, too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.errors import PrepError, some
from data_prep.write.samples import Sample, safe_key, stable_hash

MAX_IMAGE_BYTES = 1 << 28
"""An encoded image of more than 256 MiB is refused: it is a bomb, or no image."""
EXTENSIONS = (
    *(
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
    ),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k"),
)
"""Suffixes of what `vit.data.decode.images` reads."""
NOT_READ = (
    *(
        ".heic",
        ".heif",
        ".hif",
        ".jxl",
        ".jpf",
        ".jpx",
        ".psd",
        ".svg",
        ".eps",
        ".tga",
        ".ico",
        ".qoi",
    ),
    *(
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
    ),
)
"""Suffixes of images that are not read: from phones, cameras' raw data, drawings, rarities."""
READ_MAGIC = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|BM.{4}\0\0|II\*\0|MM\0\*"
    rb"|RIFF.{4}WEBP|P[1-6]\s|.{4}ftypavi[fs]|\0\0\0\x0cjP  ",
    re.DOTALL,
)
"""First bytes of images that are read."""
OTHER_MAGIC = re.compile(
    rb".{4}ftyp(?:hei|hev|mif|msf)|8BPS|\xff\x0a|\0\0\0\x0cJXL |v/1\x01|%!PS|qoif", re.DOTALL
)
LOOKED_AT = 3
"""Files of an unknown suffix whose first bytes are read; annotations may be as many as images."""


@dataclass
class Ignored:
    """What is in a tree and was not taken."""

    root: Path
    images: Counter[str] = field(default_factory=Counter)
    """Images of kinds that are not read, by suffix."""
    others: Counter[str] = field(default_factory=Counter)
    """All other files, by suffix."""
    stray: list[str] = field(default_factory=list)
    """Images next to the class folders."""
    outward: list[str] = field(default_factory=list)
    """Links that lead out of the tree; they were followed."""
    _looks: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def num_images(self) -> int:
        """Images that were not taken."""
        return self.images.total() + len(self.stray)

    def count(self, path: str) -> None:
        """Count a file that was not taken."""
        suffix = os.path.splitext(path)[1]
        looks = self._looks.setdefault(suffix, [])
        if suffix.lower() not in NOT_READ and (not suffix or len(looks) < LOOKED_AT):
            looks.append(_looks_like(path, READ_MAGIC) or _looks_like(path, OTHER_MAGIC))
        is_image = suffix.lower() in NOT_READ or (looks[-1] if not suffix else any(looks))
        (self.images if is_image else self.others)[suffix or "without a suffix"] += 1

    def follow(self, link: str) -> None:
        """Note a link if it leads out of the tree."""
        target = os.path.realpath(link)
        if os.path.commonpath([target, os.path.realpath(self.root)]) != os.path.realpath(self.root):
            self.outward.append(f"{link} -> {target}")

    def count_stray(self, folder: Path) -> None:
        """Note the images in `folder` itself, next to its class folders."""
        try:
            with os.scandir(folder) as entries:
                files = sorted(
                    entry.path
                    for entry in entries
                    if not entry.name.startswith(".") and not entry.is_dir()
                )
        except OSError as error:
            raise _list_error(error, str(folder)) from error
        for path in files:
            if is_image(path):
                self.stray.append(path)
            else:
                self.count(path)

    def summary(self) -> list[str]:
        """Lines about what was not taken, for the console and the card."""
        lines = [self.images_summary()] if self.images else []
        if self.stray:
            images = "1 image" if len(self.stray) == 1 else f"{len(self.stray):,} images"
            lines.append(  # recorded in _info.json: other words are other bytes
                f"{images} beside the class folders, of no class: {some(self.stray)}; not used"
            )
        if self.others:
            lines.append(
                f"{self.others.total():,} other files, no images: {_by_number(self.others)}"
            )
        if self.outward:
            lines.append(
                f"{len(self.outward):,} links lead out of {self.root} and were followed:"
                f" {some(self.outward, 3)}"
            )
        return lines

    def images_summary(self) -> str:
        """A line about images of kinds that are not read."""
        number = self.images.total()
        convert = "convert them to JPEG"
        suffixes = [suffix for suffix, _ in self.images.most_common() if suffix.startswith(".")]
        if suffixes:
            convert += (
                ", with ImageMagick, say, in their folder:"
                f" find . -iname '*{suffixes[0].lower()}' -exec magick mogrify -format jpg {{}} +"
            )
        return (
            f"{number:,} file{'s' if number > 1 else ''} not read as images:"
            f" {_by_number(self.images)}; {convert}"
        )


def _by_number(counts: Counter[str]) -> str:
    return ", ".join(
        f"{count:,} {suffix}"
        for suffix, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def _looks_like(path: str, magic: re.Pattern[bytes]) -> bool:
    """Whether a regular, readable file begins so; a pipe would block."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return magic.match(file.read(16)) is not None
    except OSError:
        return False


def is_image(path: str) -> bool:
    """Whether a file is an image that is read, by its suffix, or without one by its first bytes."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix in EXTENSIONS or (not suffix and _looks_like(path, READ_MAGIC))


def images_below(folder: Path, ignored: Ignored | None = None) -> Iterator[str]:
    """Paths of the images below `folder`, relative to it, in the system's order.

    Hidden files and folders are left out. ignored: counts all other files, and links. Raises
    PrepError for a folder that cannot be listed, and for a link back to a folder above it.
    """
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        prefix, above = waiting.pop()
        here = os.path.join(folder, prefix)
        try:
            status = os.stat(here)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                link = next(
                    (path for path in (Path(here), *Path(here).parents) if path.is_symlink()), here
                )
                raise PrepError(f"{link}: a link back to a folder above it; remove the link")
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if ignored is not None and entry.is_symlink():
                        ignored.follow(entry.path)
                    if entry.is_dir():
                        waiting.append((f"{prefix}{entry.name}/", above | {identity}))
                    elif is_image(entry.path):
                        yield prefix + entry.name
                    elif ignored is not None:
                        ignored.count(entry.path)
        except OSError as error:
            raise _list_error(error, here) from error


def folders_in(parent: Path) -> list[str]:
    """Sorted names of the visible folders in `parent`. Raises PrepError if it cannot be listed."""
    try:
        with os.scandir(parent) as entries:
            return sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError as error:
        raise _list_error(error, str(parent)) from error


def _list_error(error: OSError, folder: str) -> PrepError:
    return PrepError(
        f"{(error.filename or folder).rstrip('/')}: cannot be listed ({error.strerror}); correct"
        " that, or move it elsewhere"
    )


def unique_keys(paths: Sequence[str]) -> list[str]:
    """The key of each path: without its extension; equal ones (a.jpg and a.png) end in a hash."""
    keys = [os.path.splitext(path)[0] for path in paths]
    safe = [safe_key(key) for key in keys]
    times = Counter(safe)
    return [
        f"{key}_{stable_hash(path).hex()}" if times[same] > 1 else key
        for path, key, same in zip(paths, keys, safe, strict=True)
    ]


def read(sample: Sample) -> bytes:
    """Bytes of the image at `name` below the folder `file`.

    Raises OSError, and ValueError for anything but a regular file of at most MAX_IMAGE_BYTES.
    """
    path = os.path.join(sample.file, sample.name)
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > MAX_IMAGE_BYTES:
            raise ValueError(f"{num_bytes:,} bytes; no image has more than {MAX_IMAGE_BYTES:,}")
        return file.read()
