"""List the images in a tree of folders, and count all other files.

An image is recognized by its suffix, or by its first bytes if the file has no suffix. All other
files are counted by suffix. Images in unsupported formats are counted separately. Links are
followed.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.errors import PrepError, counted, require
from data_prep.write.samples import Sample, safe_key, stable_hash
from vit.data.decode.image_files import NOT_READ, how_to_convert, is_image, read_image
from vit.system.spelling import few

FILE_SUFFIX = re.compile(r"\.[a-z]\w{0,4}$", re.IGNORECASE)
"""Matches the end of a file name, but not of folder names such as `v1.2` and `St. Bernard`."""
LIST_NAME = re.compile(
    r"(^|/)(images|[^/]*(train|val|test|dev|label|annot|list|split|class|categor|wnid|synset|names"
    r"|meta)[^/]*)\.(txt|csv|tsv|jsonl)$",
    re.IGNORECASE,
)
"""Matches the usual names of label lists and class lists."""


@dataclass
class Ignored:
    """The skipped files in a tree."""

    images: Counter[str] = field(default_factory=Counter)
    """The number of images in unsupported formats, by suffix."""
    others: Counter[str] = field(default_factory=Counter)
    """The number of other files, by suffix."""
    stray: list[str] = field(default_factory=list)
    """The images that are next to the class folders instead of inside them."""
    lists: list[str] = field(default_factory=list)
    """The paths of other files that LIST_NAME matches."""

    @property
    def num_images(self) -> int:
        """The number of skipped images."""
        return self.images.total() + len(self.stray)

    def count(self, path: str) -> None:
        """Count a skipped file."""
        suffix = os.path.splitext(path)[1]
        kind = self.images if suffix.lower() in NOT_READ else self.others
        kind[suffix or "without a suffix"] += 1
        if LIST_NAME.search(path):
            self.lists.append(path)

    def summary(self) -> list[str]:
        """Describe the skipped files in lines for the console and the card."""
        lines = [self.images_summary()] if self.images else []
        if self.stray:  # _info.json records this text, so rewording it changes the output.
            lines.append(
                f"{counted(len(self.stray), 'image')} beside the class folders, of no class:"
                f" {few(self.stray)}; not used"
            )
        if self.others:
            lines.append(
                f"{self.others.total():,} other files, no images: {_by_number(self.others)}"
            )
        return lines

    def images_in_brackets(self) -> str:
        """Return ` (N files not read as images ...)` to append to an error message, or ""."""
        return f" ({self.images_summary()})" if self.images else ""

    def images_summary(self) -> str:
        """Describe the images in unsupported formats in one line."""
        first = self.images.most_common(1)[0][0].lower()
        return (
            f"{counted(self.images.total(), 'file')} not read as images:"
            f" {_by_number(self.images)}; {how_to_convert(first)}"
        )


def _by_number(counts: Counter[str]) -> str:
    return ", ".join(
        f"{count:,} {suffix}"
        for suffix, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def listed(folder: Path | str) -> tuple[list[str], list[str]]:
    """Return the sorted names of all folders and files in `folder` that are not hidden.

    Raises PrepError if the folder cannot be listed, or contains a broken link. If the name of the
    link has a suffix, the error is raised later, when the file is read.
    """
    try:
        with os.scandir(folder) as entries:
            visible = sorted(
                (entry.name, entry.is_dir(), entry.is_symlink())
                for entry in entries
                if not entry.name.startswith(".") and entry.name != "__MACOSX"
            )
    except OSError as error:
        raise PrepError(
            f"{error.filename or folder}: cannot be listed ({error.strerror}): fix the permissions,"
            " or move the folder elsewhere"
        ) from error

    folders = [name for name, is_folder, _ in visible if is_folder]
    files = [name for name, is_folder, _ in visible if not is_folder]
    links = {name for name, _, is_link in visible if is_link}
    for name in files:
        if name in links and not FILE_SUFFIX.search(name):
            require(Path(folder, name), "a file or folder: correct or remove the link")

    return folders, files


def images_below(
    folder: Path, ignored: Ignored, takes: Callable[[str], bool] = is_image
) -> Iterator[str]:
    """Yield the paths of all images below `folder`, or of all files that `takes` accepts.

    Paths are relative to `folder`. Hidden files and folders are skipped. ignored: counts all other
    files. Raises PrepError for a folder that cannot be listed, and for a link to one of its parent
    folders.
    """
    waiting = [("", frozenset[str]())]
    while waiting:
        prefix, above = waiting.pop()
        current = os.path.join(folder, prefix).rstrip("/")
        place = os.path.realpath(current)
        if place in above:
            raise PrepError(f"{current}: this link leads to a parent folder: remove the link")

        folders, files = listed(current)
        waiting += [(f"{prefix}{name}/", above | {place}) for name in folders]
        for name in files:
            path = os.path.join(current, name)
            if takes(path):
                yield prefix + name
            else:
                ignored.count(path)


def unique_keys(paths: Sequence[str]) -> list[str]:
    """Return each path without its extension. Identical results (a.jpg, a.png) get a hash
    suffix."""
    keys = [os.path.splitext(path)[0] for path in paths]
    safe = [safe_key(key) for key in keys]
    times = Counter(safe)
    return [
        f"{key}_{stable_hash(path).hex()}" if times[same] > 1 else key
        for path, key, same in zip(paths, keys, safe, strict=True)
    ]


def read(sample: Sample) -> bytes:
    """Return the bytes of the image with path `name` below the folder `file`.

    Raises OSError if reading fails, and ValueError unless the file is a regular file of at most 256
    MiB.
    """
    return read_image(os.path.join(sample.file, sample.name))
