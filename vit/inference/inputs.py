"""Find the images to predict in files, folders, tars and lists of names.

Folders are searched recursively, in sorted order, for images and tars. A file's suffix shows
whether it is an image. If a file has no suffix, its first bytes are checked instead. Tars are not
unpacked, because their images can be read at their offsets. Files named on the command line must
exist. Names in a list are not checked until their images are read.
"""

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
from vit.data.shards.tar_walk import FILE, TarDamaged, pread, walk
from vit.system.spelling import few

FROM_STDIN = "-"
"""The argument that reads a list of names from stdin."""


class ImagePlace(NamedTuple):
    """The location of an encoded image: a file, or `size` bytes at `offset` of a tar."""

    path: str
    member: str = ""
    offset: int = 0
    size: int = -1
    problem: str = ""
    """The reason why this location has no image (unreadable folder, damaged tar), or ""."""

    @property
    def name(self) -> str:
        """Return the name of the image for tables and messages."""
        return f"{self.path}/{self.member}" if self.member else self.path

    def read(self) -> bytes:
        """Return the encoded image. Raises ValueError with a reason that omits the name."""
        if self.problem:
            raise ValueError(self.problem)

        try:
            if not self.member:
                return read_image(self.path)
            if self.size > MAX_IMAGE_BYTES:
                raise ValueError(
                    f"the image has {self.size:,} bytes, but at most {MAX_IMAGE_BYTES:,} are"
                    " allowed"
                )

            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                return os.pread(descriptor, self.size, self.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror})") from None


@dataclass
class Inputs:
    """The images to predict, in the order of the arguments."""

    places: list[ImagePlace] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """The number of non-image files in folders and tars, by suffix."""

    def summary(self) -> str:
        """Return a line about skipped files, or "" if no file was skipped."""
        if not self.skipped:
            return ""
        kinds = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        counts = few([f"{count:,} {suffix}" for suffix, count in kinds])
        photos = next((suffix.lower() for suffix, _ in kinds if suffix.lower() in NOT_READ), "")
        remedy = f"; {how_to_convert(photos)}" if photos else ""
        total = self.skipped.total()
        return f"{total:,} other file{'s' if total > 1 else ''} skipped: {counts}{remedy}"


def find_inputs(arguments: Iterable[str], stdin: IO[bytes] | None = None) -> Inputs:
    """Find the images in `arguments`: files, folders, tars, and "-" for names on `stdin`.

    Names on stdin are separated by newlines or by zero bytes (`find -print0`).

    Raises:
        ValueError: `arguments` contains no image, or some arguments do not exist, cannot be listed,
            or are folders or tars without images. The message lists all such arguments.
    """
    inputs = Inputs()
    problems = []
    for argument in arguments:
        try:
            if argument == FROM_STDIN and stdin is not None:
                for name in _listed_names(stdin):
                    _add(name, inputs, is_named=False)
            else:
                _add_argument(argument, inputs)
        except OSError as error:
            problems.append(f"{error.filename or argument}: cannot be read ({error.strerror})")
        except ValueError as error:
            problems.append(str(error))

    if problems:
        raise ValueError(few(problems, 10, "; "))
    if not inputs.places:
        raise ValueError(
            "no images given: pass files, folders or tars, or - to read a list of names from stdin"
        )

    return inputs


def _listed_names(stdin: IO[bytes]) -> Iterator[str]:
    """Yield the names on `stdin`, which are separated by zero bytes or line ends."""
    content = stdin.read()
    separator = b"\0" if b"\0" in content else b"\n"
    for line in content.split(separator):
        name = os.fsdecode(line.removesuffix(b"\r") if separator == b"\n" else line)
        if name:
            yield name


def _add_argument(argument: str, inputs: Inputs) -> None:
    """Append all images in `argument`, a file, folder or tar. Raises ValueError if there are none,
    and OSError."""
    if not os.path.lexists(argument):
        raise ValueError(f"{argument}: no such file or folder")

    num_before = len(inputs.places)
    _add(argument, inputs)
    if len(inputs.places) == num_before:
        kind = "folder" if os.path.isdir(argument) else "tar"
        others = f"; {inputs.summary()}" if inputs.skipped else ""
        raise ValueError(f"{argument}: a {kind} without images ({' '.join(EXTENSIONS)}){others}")


def _add(path: str, inputs: Inputs, is_named: bool = True) -> None:
    """Append all images in a folder or tar. Any other file is appended as an image.

    A folder that cannot be listed or a damaged tar raises an error if the user named it
    (`is_named`). In a folder or list, such an entry is appended with its problem, so that all other
    images are still predicted.
    """
    try:
        if os.path.isdir(path):
            _add_folder(path, inputs)
        elif path.lower().endswith(".tar"):
            _add_tar(path, inputs)
        else:
            inputs.places.append(ImagePlace(path))
    except (OSError, ValueError) as error:
        if is_named:
            raise

        reason = (
            f"cannot be read ({error.strerror})"
            if isinstance(error, OSError)
            else str(error).removeprefix(f"{path}: ")
        )
        inputs.places.append(ImagePlace(path, problem=reason))


def _add_folder(folder: str, inputs: Inputs) -> None:
    """Add the images and tars in a folder and in all folders below it, ordered by name."""
    pending = [(folder, frozenset[str]())]
    while pending:
        current, parents = pending.pop()
        real_path = os.path.realpath(current)
        if real_path in parents:  # following a link to a parent folder would never end
            continue

        try:
            with os.scandir(current) as entries:
                visible = sorted(
                    (entry.name, _is_folder(entry))
                    for entry in entries
                    if not entry.name.startswith(".") and entry.name != "__MACOSX"
                )
        except OSError as error:
            if current == folder:
                raise
            inputs.places.append(ImagePlace(current, problem=f"cannot be read ({error.strerror})"))
            continue

        # A folder of shards also contains a preview picture, which is not an input.
        has_shards = ("_info.json", False) in visible
        below = [os.path.join(current, name) for name, is_folder in visible if is_folder]
        files = [os.path.join(current, name) for name, is_folder in visible if not is_folder]
        for path in files:
            if is_image(path) and not has_shards:
                inputs.places.append(ImagePlace(path))
            elif path.lower().endswith(".tar"):
                _add(path, inputs, is_named=False)
            else:
                inputs.skipped[os.path.splitext(path)[1] or "without a suffix"] += 1

        pending += [(path, parents | {real_path}) for path in reversed(below)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link to itself
        return False


def _add_tar(path: str, inputs: Inputs) -> None:
    """Add the images in a tar, without reading them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for member in walk(pread(descriptor), 0, os.fstat(descriptor).st_size):
            if member.kind != FILE:
                continue
            if member.name.lower().endswith(EXTENSIONS):
                inputs.places.append(ImagePlace(path, member.name, member.offset, member.size))
            else:
                inputs.skipped[os.path.splitext(member.name)[1] or "without a suffix"] += 1
    except TarDamaged as error:
        raise ValueError(f"{path}: {error}; copy it again") from None
    finally:
        os.close(descriptor)
