"""Read class folders from disk, or in place from a zip or tar.

`data_prep.imagefolder` lists the folders and images of a tree, and adds the images to a catalog. An
image is a file or a byte range of an archive. The tree provides each image's location and the
function that reads the image.
"""

from __future__ import annotations

import csv
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import PrepError, readable, some
from data_prep.read import image_tree
from data_prep.read.archives import Members, walk_archive
from data_prep.read.hub_features import LABEL_NAMES, choose_column
from data_prep.read.image_tree import Ignored, images_below, is_image, listed
from data_prep.read.split_names import split_of
from data_prep.write.catalogue import Builder
from data_prep.write.samples import Sample, read_range, stable_hash
from vit.data.decode.image_files import EXTENSIONS

METADATA = ("metadata.csv", "metadata.jsonl")
FILE_NAME = "file_name"
"""The table column that contains file paths, relative to the table's folder."""
TAR = ".tar"

_CLASS_TABLE = re.compile(  # a table whose first line names files and classes
    rf'(?=.*\b{FILE_NAME}\b)(?=.*(^|[,"])({"|".join(LABEL_NAMES)})"?\s*[,:\r\n])'.encode(), re.I
)


class Found(NamedTuple):
    """What a source contains, as far as it decides the layout."""

    folders: Counter[tuple[str, ...]]
    """The number of images in each folder, which is given by the names on its path."""
    lists: list[str]
    """The paths of texts whose names are usual for lists of labels or classes."""
    suffixes: set[str]
    """The suffixes of the images."""


class Tree(ABC):
    """Class folders in a folder or archive. `str` returns the path for messages."""

    read: Callable[[Sample], bytes] = staticmethod(image_tree.read)
    """The function that reads the bytes of an image. It works in any process."""
    inputs: Sequence[Path] | None = None
    """The `Source.inputs` of the images."""

    def __init__(self, file: Path):
        self.file = file
        """The archive or folder that contains the images."""

    def __str__(self) -> str:
        return str(self.file)

    @abstractmethod
    def below(self, name: str) -> Tree:
        """Return the subfolder `name`."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the sorted names of all subfolders that are not hidden."""

    @abstractmethod
    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        """Yield the paths of images below `folder`, relative to `folder`.

        ignored: counts all other files.
        """

    @abstractmethod
    def count_stray(self, ignored: Ignored) -> None:
        """Count the files that are next to the class folders instead of inside them."""

    @abstractmethod
    def places(self, folder: str, paths: Sequence[str]) -> Members:
        """Return the locations of images that `images` has yielded for `folder`."""

    def file_of(self, folder: str) -> Path:
        """Return the archive or folder that contains the images of a subfolder."""
        return self.file

    @abstractmethod
    def has(self, path: str) -> bool:
        """Return whether there is a file with this path below this folder."""

    @abstractmethod
    def lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a text below this folder. Raises PrepError if it cannot be read."""

    def find(self) -> Found:
        """List all files below this folder."""
        ignored = Ignored()
        found = Found(Counter(), ignored.lists, set())
        for path in self.images("", ignored):
            folder, _, name = path.rpartition("/")
            found.folders[tuple(folder.split("/")) if folder else ()] += 1
            found.suffixes.add(os.path.splitext(name)[1])
        found.lists[:] = [os.path.relpath(path, str(self)) for path in ignored.lists]
        return found


class FolderTree(Tree):
    """A folder on disk that contains class folders."""

    def __init__(self, path: Path, label_column: str | None = None):
        super().__init__(path)
        self.label_column = label_column

    def below(self, name: str) -> Tree:
        return open_folder(self.file / name, self.label_column)

    def folders(self) -> list[str]:
        return listed(self.file)[0]

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        return images_below(self.file / folder, ignored)

    def count_stray(self, ignored: Ignored) -> None:
        for name in listed(self.file)[1]:
            path = os.path.join(self.file, name)
            if is_image(path):
                ignored.stray.append(path)
            else:
                ignored.count(path)

    def places(self, folder: str, paths: Sequence[str]) -> Members:
        # Files are read completely, so offsets and sizes are not needed.
        nothing = np.zeros(len(paths), np.int64)
        return Members([os.path.join(folder, path) for path in paths], nothing, nothing)

    def has(self, path: str) -> bool:
        return (self.file / path).is_file()

    def lines(self, path: str) -> Iterator[str]:
        file = self.file / path
        # The names of files need not be UTF-8.
        with readable(file), open(file, encoding="utf-8-sig", errors="surrogateescape") as text:
            yield from text


class TableTree(Tree):
    """Images in a folder or archive with a table that lists the class of each image."""

    def __init__(self, images: Tree, by_class: dict[str, list[str]], is_complete: bool = True):
        """by_class: the paths of images below the tree `images`. is_complete: whether images
        without a class are reported by the caller."""
        super().__init__(images.file)
        self.read = images.read
        self.inputs = images.inputs
        self._images = images
        self._by_class = by_class
        self._is_complete = is_complete

    def __str__(self) -> str:
        return str(self._images)

    def below(self, name: str) -> Tree:
        start = f"{name}/"
        by_class = {
            label: inside
            for label, paths in self._by_class.items()
            if (inside := [path.removeprefix(start) for path in paths if path.startswith(start)])
        }
        below = self._images.below(name)
        return TableTree(below, by_class, self._is_complete) if by_class else below

    def folders(self) -> list[str]:
        return sorted(self._by_class)

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        start = self._common_folder(folder)
        for path in self._by_class[folder]:
            if is_image(str(self.file / path)):
                yield path.removeprefix(start)
            else:
                ignored.count(path)

    def _common_folder(self, name: str) -> str:
        """Return the path of the class folder if it contains all images of the class, or ""."""
        start = f"{name}/"
        return start if all(path.startswith(start) for path in self._by_class[name]) else ""

    def count_stray(self, ignored: Ignored) -> None:
        if not self._is_complete:
            in_table = set(chain(*self._by_class.values()))
            images = self._images.images("", Ignored())
            ignored.without_row += [f"{self}/{path}" for path in images if path not in in_table]

    def places(self, folder: str, paths: Sequence[str]) -> Members:
        start = self._common_folder(folder)
        return self._images.places("", [start + path for path in paths])

    def has(self, path: str) -> bool:
        return self._images.has(path)

    def lines(self, path: str) -> Iterator[str]:
        return self._images.lines(path)

    def find(self) -> Found:
        return self._images.find()


class TarFolder(FolderTree):
    """A folder with one tar of images per class, as ImageNet-21k is published."""

    read = staticmethod(read_range)

    def __init__(self, path: Path):
        super().__init__(path)
        self.inputs = [path / name for name in listed(path)[1] if name.endswith(TAR)]

    def folders(self) -> list[str]:
        return sorted(file.name.removesuffix(TAR) for file in self.inputs or ())

    def file_of(self, folder: str) -> Path:
        return self.file / f"{folder}{TAR}"

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        tar = self.file_of(folder)
        tree = _list_tar(tar)
        others = Ignored()
        yield from tree.images("", others)
        if split_of(folder) or tree.folders() or others.others:
            raise PrepError(
                f"{tar}: expected only images of one class, as in n01440764.tar of ImageNet-21k,"
                f" found {some([*others.summary(), *tree.folders()])}. If the tars are shards, use"
                f" `python -m data_prep.index {self.file}`. If they contain class folders, pass one"
                " of them as SOURCE"
            )
        ignored.images += others.images

    def places(self, folder: str, paths: Sequence[str]) -> Members:
        return _list_tar(self.file_of(folder)).places("", paths)

    def count_stray(self, ignored: Ignored) -> None:
        for name in listed(self.file)[1]:
            if not name.endswith(TAR):
                ignored.count(name)

    def find(self) -> Found:
        return Found(Counter((name,) for name in self.folders()), [], set())


def open_folder(path: Path, label_column: str | None = None) -> Tree:
    """Open a folder. If it contains Hugging Face's metadata.csv or .jsonl, read classes from there.

    If the folder also contains class folders, the table's column is used only if it has a usual
    name. Raises PrepError for a table that cannot be read, is ambiguous, or names missing files.
    """
    table = next((path / name for name in METADATA if os.path.lexists(path / name)), None)
    if table is None:
        folders, files = listed(path)
        tars = [name for name in files if name.endswith(TAR)]
        if len(tars) > 1 and not folders and not any(map(is_image, files)):
            return TarFolder(path)
        return FolderTree(path, label_column)
    rows = _rows_of(table)
    columns = list(rows[0]) if rows else []
    candidates = [name for name in columns if name.lower() in LABEL_NAMES]
    if not candidates and not listed(path)[0]:
        candidates = [name for name in columns if name != FILE_NAME]
    if FILE_NAME not in columns or not (candidates or label_column):
        return FolderTree(path, label_column)
    label = choose_column(table, "--label-column", label_column, candidates, columns)
    if lists := [row[label] for row in rows if isinstance(row.get(label), list)]:
        raise PrepError(
            f"{table}: {label} has several values in a row ({str(lists[0])[:40]}); vitline trains"
            " with one class per image: choose another column with --label-column"
        )
    class_of: dict[str, str] = {}
    wrong = []
    for row in rows:
        # A row of metadata.jsonl may lack a field that the first row has.
        name = os.path.normpath(row.get(FILE_NAME) or "")
        value = "" if row.get(label) is None else str(row[label]).strip()
        is_present = not name.startswith(("..", "/")) and (path / name).is_file()
        if not value or not is_present or class_of.setdefault(name, value) != value:
            wrong.append(f"{row.get(FILE_NAME)} ({value or 'no label'})")
    if wrong:
        raise PrepError(
            f"{table}: {len(wrong):,} of {len(rows):,} rows have no label, have another label than"
            f" an earlier row of the same file, or name a file that is missing from the folder:"
            f" {some(wrong)}; correct or remove these rows"
        )
    by_class: dict[str, list[str]] = {}
    for name, value in class_of.items():
        by_class.setdefault(value, []).append(name)
    return TableTree(FolderTree(path, label_column), by_class, is_complete=False)


def _rows_of(table: Path) -> list[dict[str, Any]]:
    with (
        readable(table, (UnicodeError, csv.Error, ValueError), "not a table"),
        open(table, encoding="utf-8-sig") as file,
    ):
        if table.suffix == ".csv":
            return list(csv.DictReader(file))
        return [json.loads(line) for line in file if line.strip()]


class ArchiveTree(Tree):
    """A folder inside a zip or tar."""

    def __init__(
        self,
        file: Path,
        read: Callable[[Sample], bytes],
        places: dict[str, tuple[str, int, int]],
        folder: str = "",
    ):
        """places: maps each path in the archive to its name there, its offset and its size."""
        super().__init__(file)
        self.read = read
        self.inputs = [file]
        self._places = places
        self._folder = folder
        self._folders: dict[str, ArchiveTree] = {}
        self._files: list[str] = []

    def __str__(self) -> str:
        return os.path.join(self.file, self._folder) if self._folder else str(self.file)

    def add(self, parts: Sequence[str], place: tuple[str, int, int]) -> None:
        """Add the file whose path below this folder consists of `parts`."""
        name, *below = parts
        if below:
            self._folders.setdefault(name, self.below(name)).add(below, place)
        else:
            self._files.append(name)
            self._places[self._inside(name)] = place

    def _inside(self, name: str) -> str:
        return f"{self._folder}/{name}".strip("/")

    def below(self, name: str) -> ArchiveTree:
        return self._folders.get(name) or ArchiveTree(
            self.file, self.read, self._places, self._inside(name)
        )

    def folders(self) -> list[str]:
        return sorted(self._folders)

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        tree = self.below(folder) if folder else self
        for name in sorted(tree._files):
            if name.lower().endswith(EXTENSIONS):
                yield name
            else:
                ignored.count(f"{tree}/{name}")
        for name in tree.folders():
            for path in tree.images(name, ignored):
                yield f"{name}/{path}"

    def count_stray(self, ignored: Ignored) -> None:
        for name in sorted(self._files):
            if name.lower().endswith(EXTENSIONS):
                ignored.stray.append(f"{self}/{name}")
            else:
                ignored.count(name)

    def places(self, folder: str, paths: Sequence[str]) -> Members:
        rows = [self._places[self._inside(os.path.join(folder, path))] for path in paths]
        names, offsets, sizes = (list(column) for column in zip(*rows, strict=True))
        return Members(names, np.array(offsets, np.int64), np.array(sizes))

    def has(self, path: str) -> bool:
        return self._inside(path) in self._places

    def lines(self, path: str) -> Iterator[str]:
        name, offset, size = self._places[self._inside(path)]
        with readable(self.file, (ValueError,), f"{path} cannot be read"):
            data = self.read(Sample("", 0, name, str(self.file), offset, size))
        yield from data.decode("utf-8-sig", "surrogateescape").splitlines()


def subtree(tree: Tree, names: Iterable[str]) -> Tree:
    """Return the folder below `tree` on whose path the folders `names` are."""
    return reduce(lambda outer, name: outer.below(name), names, tree)


def open_tree(path: Path, label_column: str | None = None) -> Tree:
    """Open a folder, zip or tar. Raises PrepError in the same cases as `walk_archive`."""
    return open_folder(path, label_column) if path.is_dir() else _list_archive(path)


def _list_archive(path: Path) -> ArchiveTree:
    """Return the visible files of an archive. Raises PrepError for a table of classes in it."""
    members, read = walk_archive(path)
    tree = ArchiveTree(path, read, {})
    for batch in members:
        for name, offset, size in zip(*batch, strict=True):
            parts = [part for part in name.split("/") if part not in ("", ".")]
            if parts and not any(part.startswith((".", "__MACOSX")) for part in parts):
                tree.add(parts, (name, int(offset), int(size)))
                table = Sample("", 0, name, str(path), int(offset), int(size))
                if parts[-1] in METADATA and _CLASS_TABLE.match(read(table)):
                    raise PrepError(
                        f"{path}: {'/'.join(parts)} lists the class of each image, and is read"
                        " only from a folder: unpack the archive, and pass the folder"
                    )
    return tree


# The members of all tars of ImageNet-21k do not fit into memory.
_list_tar = lru_cache(maxsize=2)(_list_archive)


# ---- adding images to a catalog ------------------------------------------------------------------


def split_by_hash(
    keys: Sequence[str], fractions: Mapping[str, float], *seed: int
) -> dict[str, list[str]]:
    """Split the keys of a class by the given fractions, in the order of their hashes.

    Every split but the first gets a rounded number of keys with the smallest hashes. The first
    split gets the remaining keys. At least one must remain. The hash depends only on the seed and
    key, so adding a third split does not change the second.
    """
    order = sorted(keys, key=lambda key: (stable_hash(*seed, key), key))
    sums = accumulate(list(fractions.values())[1:], initial=0.0)
    ends = [max(0, min(round(total * len(keys)), len(keys) - 1)) for total in sums]
    first, *held_out = fractions
    shares = {first: order[ends[-1] :]}
    for split, (start, end) in zip(held_out, pairwise(ends), strict=True):
        shares[split] = order[start:end]
    return shares


def add_images(
    builder: Builder,
    file: int,
    label: int,
    tree: Tree,
    folder: str,
    paths: Mapping[str, str],
    shares: Mapping[str, Sequence[str]],
) -> None:
    """Add the images of a class.

    folder: the subfolder of the class. paths: maps keys to paths below it. shares: maps splits to
    keys.
    """
    for split, keys in shares.items():
        if keys:
            places = tree.places(folder, [paths[key] for key in keys])
            builder.add(split, file, places.names, label, places.offsets, places.sizes, keys)
