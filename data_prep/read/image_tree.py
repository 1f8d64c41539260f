"""Any tree of images: which files are images, and what is left out, so nothing is lost silently.

Folders are listed one after the other. A file is taken by its suffix, or without one by its first
bytes; everything else is counted by suffix, separately for images of other kinds. Links are
followed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.errors import PrepError, some
from data_prep.write.samples import Sample, safe_key, stable_hash
from vit.data.decode.image_files import NOT_READ, how_to_convert, is_image, read_image


@dataclass
class Ignored:
    """What is in a tree and was not taken."""

    images: Counter[str] = field(default_factory=Counter)
    """Images of kinds that are not read, by suffix."""
    others: Counter[str] = field(default_factory=Counter)
    """All other files, by suffix."""
    stray: list[str] = field(default_factory=list)
    """Images next to the class folders."""

    @property
    def num_images(self) -> int:
        """Images that were not taken."""
        return self.images.total() + len(self.stray)

    def count(self, path: str) -> None:
        """Count a file that was not taken."""
        suffix = os.path.splitext(path)[1]
        kind = self.images if suffix.lower() in NOT_READ else self.others
        kind[suffix or "without a suffix"] += 1

    def count_stray(self, folder: Path) -> None:
        """Note the images in `folder` itself, next to its class folders."""
        for name in listed(folder)[1]:
            path = os.path.join(folder, name)
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
        return lines

    def images_summary(self) -> str:
        """A line about images of kinds that are not read."""
        number = self.images.total()
        first = self.images.most_common(1)[0][0].lower()
        return (
            f"{number:,} file{'s' if number > 1 else ''} not read as images:"
            f" {_by_number(self.images)}; {how_to_convert(first)}"
        )


def _by_number(counts: Counter[str]) -> str:
    return ", ".join(
        f"{count:,} {suffix}"
        for suffix, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def listed(folder: Path | str) -> tuple[list[str], list[str]]:
    """Sorted names of the visible folders and of the visible files in `folder`.

    Raises PrepError if it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            visible = sorted(
                (entry.name, entry.is_dir())
                for entry in entries
                if not entry.name.startswith(".") and entry.name != "__MACOSX"
            )
    except OSError as error:
        raise PrepError(
            f"{error.filename or folder}: cannot be listed ({error.strerror}); correct that, or"
            " move it elsewhere"
        ) from error
    folders = [name for name, is_folder in visible if is_folder]
    return folders, [name for name, is_folder in visible if not is_folder]


def images_below(
    folder: Path, ignored: Ignored | None = None, takes: Callable[[str], bool] = is_image
) -> Iterator[str]:
    """Paths of the images below `folder`, or of what `takes` says, relative to it.

    Hidden files and folders are left out. ignored: counts all other files. Raises PrepError for a
    folder that cannot be listed, and for a link back to a folder above it.
    """
    waiting = [("", frozenset[str]())]
    while waiting:
        prefix, above = waiting.pop()
        here = os.path.join(folder, prefix).rstrip("/")
        place = os.path.realpath(here)
        if place in above:
            raise PrepError(f"{here}: a link back to a folder above it; remove the link")
        folders, files = listed(here)
        waiting += [(f"{prefix}{name}/", above | {place}) for name in folders]
        for name in files:
            path = os.path.join(here, name)
            if takes(path):
                yield prefix + name
            elif ignored is not None:
                ignored.count(path)


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

    Raises OSError, and ValueError for anything but a regular file of at most 256 MiB.
    """
    return read_image(os.path.join(sample.file, sample.name))
