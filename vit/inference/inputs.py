"""What to predict: files, folders, tars and lists of names become places of encoded images.

Folders are listed with all below them, sorted; of their files those count that have the suffix of
an image, or without one its first bytes, and tars. A tar is not unpacked: its members are places in
it. What was named on the command line must be there; what a list names is found out when it is
read, since a list of a million names may be older than the files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from vit.data.decode.image_files import (
    EXTENSIONS,
    MAX_IMAGE_BYTES,
    NOT_READ,
    how_to_convert,
    is_image,
    read_image,
)
from vit.system.tar_walk import FILE, TarDamaged, pread, walk

FROM_STDIN = "-"
"""The word for a list of names on stdin."""


class Place(NamedTuple):
    """Where the bytes of an image are: a file, or `size` bytes at `offset` of a tar."""

    path: str
    member: str = ""
    offset: int = 0
    size: int = -1
    problem: str = ""
    """Why there is nothing to read: a folder that cannot be listed, a damaged tar."""

    @property
    def name(self) -> str:
        """How people are told which image it is."""
        return f"{self.path}/{self.member}" if self.member else self.path

    def read(self) -> bytes:
        """Return the encoded image. Raises ValueError with the reason, without the name."""
        if self.problem:
            raise ValueError(self.problem)
        try:
            if not self.member:
                return read_image(self.path)
            if self.size > MAX_IMAGE_BYTES:
                raise ValueError(f"{self.size:,} bytes; no image has more than {MAX_IMAGE_BYTES:,}")
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                return os.pread(descriptor, self.size, self.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror})") from None


@dataclass
class Inputs:
    """Images to predict, in the order in which they were named."""

    places: list[Place] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Files in folders and tars that are no images, by suffix."""

    def summary(self) -> str:
        """Return a line about what was left out, or ""."""
        if not self.left_out:
            return ""
        kinds = sorted(self.left_out.items(), key=lambda item: (-item[1], item[0]))
        listed = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:5])
        more = f" and {len(kinds) - 5} more kinds" if len(kinds) > 5 else ""
        photos = next((suffix.lower() for suffix, _ in kinds if suffix.lower() in NOT_READ), "")
        remedy = f"; {how_to_convert(photos)}" if photos else ""
        total = self.left_out.total()
        return f"{total:,} other file{'s' if total > 1 else ''} left out: {listed}{more}{remedy}"


def find_inputs(words: Iterable[str], stdin: IO[bytes] | None = None) -> Inputs:
    """Find the images that `words` name: files, folders, tars, and "-" for names on `stdin`.

    Names on stdin are lines, or end with a zero byte each (`find -print0`).

    Raises:
        ValueError: all that is not there or cannot be listed, folders and tars without images, and
            nothing named at all.
    """
    inputs = Inputs()
    problems = []
    for word in words:
        before = len(inputs.places)
        try:
            if word == FROM_STDIN and stdin is not None:
                for name in _listed_names(stdin):
                    _add(name, inputs, is_named=False)
            elif not os.path.lexists(word):
                raise ValueError(f"{word}: no such file or folder")
            else:
                _add(word, inputs)
                if len(inputs.places) == before:
                    kind = "folder" if os.path.isdir(word) else "tar"
                    raise ValueError(f"{word}: a {kind} without images ({_known()})")
        except OSError as error:
            problems.append(f"{error.filename or word}: cannot be read ({error.strerror})")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        more = f" (and {len(problems) - 10} more)" if len(problems) > 10 else ""
        raise ValueError("; ".join(problems[:10]) + more)
    if not inputs.places:
        raise ValueError(
            "no images named: give files, folders or tars, or a list of names on stdin with -"
        )
    return inputs


def _known() -> str:
    return " ".join(EXTENSIONS)


def _listed_names(stdin: IO[bytes]) -> Iterator[str]:
    content = stdin.read()
    separator = b"\0" if b"\0" in content else b"\n"
    for line in content.split(separator):
        name = os.fsdecode(line.removesuffix(b"\r") if separator == b"\n" else line)
        if name:
            yield name


def _add(path: str, inputs: Inputs, is_named: bool = True) -> None:
    """Append all images of a file, folder or tar; of a file that is neither, the file itself.

    A folder that cannot be listed, or a damaged tar, is an error if the user named it. Below what
    was named, or in a list, it is one place with a problem: it keeps nothing else from being
    predicted.
    """
    try:
        if os.path.isdir(path):
            _add_folder(path, inputs)
        elif path.lower().endswith(".tar"):
            _add_tar(path, inputs)
        else:
            inputs.places.append(Place(path))
    except (OSError, ValueError) as error:
        if is_named:
            raise
        reason = str(error).removeprefix(f"{path}: ")
        if isinstance(error, OSError):
            reason = f"cannot be read ({error.strerror})"
        inputs.places.append(Place(path, problem=reason))


def _add_folder(folder: str, inputs: Inputs) -> None:
    waiting = [(folder, frozenset[str]())]
    while waiting:
        here, above = waiting.pop()
        place = os.path.realpath(here)
        if place in above:  # a link back to a folder above it
            continue
        try:
            with os.scandir(here) as entries:
                visible = sorted(
                    (entry.name, _is_folder(entry))
                    for entry in entries
                    if not entry.name.startswith(".") and entry.name != "__MACOSX"
                )
        except OSError as error:
            if here == folder:
                raise
            inputs.places.append(Place(here, problem=f"cannot be read ({error.strerror})"))
            continue
        has_shards = ("_info.json", False) in visible  # and a picture of what is in them
        below = [os.path.join(here, name) for name, is_folder in visible if is_folder]
        for path in (os.path.join(here, name) for name, is_folder in visible if not is_folder):
            if is_image(path) and not has_shards:
                inputs.places.append(Place(path))
            elif path.lower().endswith(".tar"):
                _add(path, inputs, is_named=False)
            else:
                inputs.left_out[os.path.splitext(path)[1] or "without a suffix"] += 1
        waiting += [(path, above | {place}) for path in reversed(below)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _add_tar(path: str, inputs: Inputs) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for member in walk(pread(descriptor), 0, os.fstat(descriptor).st_size):
            if member.kind != FILE:
                continue
            if member.name.lower().endswith(EXTENSIONS):
                inputs.places.append(Place(path, member.name, member.offset, member.size))
            else:
                suffix = os.path.splitext(member.name)[1]
                inputs.left_out[suffix or "without a suffix"] += 1
    except TarDamaged as error:
        raise ValueError(f"{path}: {error}; copy it again") from None
    finally:
        os.close(descriptor)
