"""Any tree of images: which files are images, and what is passed over, so that nothing is dropped
without a word. Free of torch.

The data's story: folders are listed one after the other. A file is taken by its suffix, or where it
has none by its first bytes; all else is counted by suffix, apart for what looks like an image.
Links are followed; those that lead out of the tree are counted, too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.write.catalogue import Sample, safe_key, some, stable_hash

MAX_IMAGE_BYTES = 1 << 28
"""An encoded image of more than 256 MiB is refused: it would be a bomb, or no image."""
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
"""Suffixes of other images: phones', cameras' raw data, drawings, rarities."""
READ_MAGIC = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|BM.{4}\0\0|II\*\0|MM\0\*|RIFF.{4}WEBP|P[1-6]\s|.{4}ftypavi[fs]|\0\0\0\x0cjP  ",
    re.DOTALL,
)
"""First bytes of what is read."""
OTHER_MAGIC = re.compile(
    rb".{4}ftyp(?:hei|hev|mif|msf)|8BPS|\xff\x0a|\0\0\0\x0cJXL |v/1\x01|%!PS|qoif", re.DOTALL
)
LOOKED_AT = 3
"""Files of a suffix nobody knows whose first bytes are looked at; annotations may be as many as
images."""


@dataclass
class PassedOver:
    """What lies in a tree and was not taken."""

    root: Path
    images: Counter[str] = field(default_factory=Counter)
    """Files that are images but of a kind that is not read, by suffix."""
    others: Counter[str] = field(default_factory=Counter)
    """All else, by suffix."""
    beside: list[str] = field(default_factory=list)
    """Images that lie beside the class folders."""
    outward: list[str] = field(default_factory=list)
    """Links that lead out of the tree; they were followed."""
    _looks: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def num_images(self) -> int:
        """Of images that were not taken."""
        return self.images.total() + len(self.beside)

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

    def look_beside(self, folder: Path) -> None:
        """Note the images that lie in `folder` itself, beside its class folders."""
        try:
            with os.scandir(folder) as entries:
                files = sorted(
                    entry.path
                    for entry in entries
                    if not entry.name.startswith(".") and not entry.is_dir()
                )
        except OSError as error:
            raise _cannot_list(error, str(folder)) from error
        for path in files:
            if is_image(path):
                self.beside.append(path)
            else:
                self.count(path)

    def told(self) -> list[str]:
        """A line about each of these, for the console and the card; none if there is nothing."""
        lines = [self.told_of_images()] if self.images else []
        if self.beside:
            images = "1 image" if len(self.beside) == 1 else f"{len(self.beside):,} images"
            lines.append(
                f"{images} beside the class folders, of no class: {some(self.beside)}; not used"
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

    def told_of_images(self) -> str:
        """A line about images that are not read."""
        number = self.images.total()
        first = next(
            (suffix for suffix, _ in self.images.most_common() if suffix.startswith(".")), ""
        )
        how = f"find . -iname '*{first.lower()}' -exec magick mogrify -format jpg {{}} +"
        convert = (
            f"convert them to JPEG, with ImageMagick, say, in their folder: {how}"
            if first
            else "convert them to JPEG"
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
    """Whether a file begins so; a pipe, which would be waited for, and what cannot be read do
    not."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return magic.match(file.read(16)) is not None
    except OSError:
        return False


def is_image(path: str) -> bool:
    """Whether a file is taken for an image that is read: by its suffix, or, if it has none, by its
    first bytes."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix in EXTENSIONS or (not suffix and _looks_like(path, READ_MAGIC))


def images_below(folder: Path, passed_over: PassedOver | None = None) -> Iterator[str]:
    """Paths of the images below `folder`, relative to it, in the system's order; hidden files and
    folders are left out.

    passed_over: is told all other files, and links. Raises PrepError for a folder that cannot be
    listed, and for a link back to a folder above it.
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
                    if passed_over is not None and entry.is_symlink():
                        passed_over.follow(entry.path)
                    if entry.is_dir():
                        waiting.append((f"{prefix}{entry.name}/", above | {identity}))
                    elif is_image(entry.path):
                        yield prefix + entry.name
                    elif passed_over is not None:
                        passed_over.count(entry.path)
        except OSError as error:
            raise _cannot_list(error, here) from error


def folders_in(parent: Path) -> list[str]:
    """Sorted names of the folders in `parent`, hidden ones left out. Raises PrepError if it cannot
    be listed."""
    try:
        with os.scandir(parent) as entries:
            return sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError as error:
        raise _cannot_list(error, str(parent)) from error


def _cannot_list(error: OSError, folder: str) -> PrepError:
    return PrepError(
        f"{(error.filename or folder).rstrip('/')}: cannot be listed ({error.strerror}); set that"
        " right, or move it elsewhere"
    )


def unique_keys(paths: Sequence[str]) -> list[str]:
    """The key of each path: without its extension. Those that would be equal (a.jpg and a.png) get
    a hash of the path at the end."""
    keys = [os.path.splitext(path)[0] for path in paths]
    safe = [safe_key(key) for key in keys]
    times = Counter(safe)
    return [
        f"{key}_{stable_hash(path).hex()}" if times[same] > 1 else key
        for path, key, same in zip(paths, keys, safe, strict=True)
    ]


def read(sample: Sample) -> bytes:
    """Bytes of the image at `name` below the folder `file`. Raises OSError, and ValueError for what
    is no regular file."""
    path = os.path.join(sample.file, sample.name)
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > MAX_IMAGE_BYTES:
            raise ValueError(f"{num_bytes:,} bytes; no image has more than {MAX_IMAGE_BYTES:,}")
        return file.read()
