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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import PrepError, readable, some
from data_prep.read import image_tree
from data_prep.read.archives import Members, walk_archive
from data_prep.read.hub_features import LABEL_NAMES, choose_column
from data_prep.read.image_tree import Ignored, images_below, listed
from data_prep.write.catalogue import Builder
from data_prep.write.samples import Sample, stable_hash
from vit.data.decode.image_files import EXTENSIONS

METADATA = ("metadata.csv", "metadata.jsonl")
FILE_NAME = "file_name"
"""The table column that contains file paths, relative to the table's folder."""

_CLASS_TABLE = re.compile(  # a table whose first line names files and classes
    rf'(?=.*\b{FILE_NAME}\b)(?=.*(^|[,"])({"|".join(LABEL_NAMES)})"?\s*[,:\r\n])'.encode(), re.I
)


class FolderTree:
    """A folder on disk that contains class folders. `str` returns the path for messages."""

    def __init__(self, path: Path, label_column: str | None = None):
        self.file = path
        """The archive or folder that contains the images."""
        self.label_column = label_column
        self.read: Callable[[Sample], bytes] = image_tree.read
        """The function that reads the bytes of an image. It works in any process."""
        self.inputs: Sequence[Path] | None = None
        """The `Source.inputs` of the images."""

    def __str__(self) -> str:
        return str(self.file)

    def below(self, name: str) -> FolderTree:
        """Return the subfolder `name`."""
        return open_folder(self.file / name, self.label_column)

    def folders(self) -> list[str]:
        """Return the sorted names of all subfolders that are not hidden."""
        return listed(self.file)[0]

    def image_folders(self) -> set[tuple[str, ...]]:
        """Return the paths of all folders that contain images, below this folder."""
        return {tuple(path.split("/")[:-1]) for path in images_below(self.file, Ignored())}

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        """Yield the paths of images below `folder`, relative to `folder`.

        ignored: counts all other files.
        """
        return images_below(self.file / folder, ignored)

    def count_stray(self, ignored: Ignored) -> None:
        """Count the files that are next to the class folders instead of inside them."""
        for name in listed(self.file)[1]:
            path = os.path.join(self.file, name)
            if image_tree.is_image(path):
                ignored.stray.append(path)
            else:
                ignored.count(path)

    def places(self, paths: Sequence[str]) -> Members:
        """Return the locations of images. Paths are relative to this folder."""
        # Files are read completely, so offsets and sizes are not needed.
        nothing = np.zeros(len(paths), np.int64)
        return Members(list(paths), nothing, nothing)


class TableTree(FolderTree):
    """A folder of images with a table that lists the class of each image."""

    def __init__(self, path: Path, label_column: str | None, by_class: dict[str, list[str]]):
        super().__init__(path, label_column)
        self._by_class = by_class
        self._paths = {f"{name}/{path}": path for name, paths in by_class.items() for path in paths}

    def below(self, name: str) -> FolderTree:
        start = f"{name}/"
        by_class = {
            label: below
            for label, paths in self._by_class.items()
            if (below := [path.removeprefix(start) for path in paths if path.startswith(start)])
        }
        if by_class:
            return TableTree(self.file / name, self.label_column, by_class)
        return super().below(name)

    def folders(self) -> list[str]:
        return sorted(self._by_class)

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        for path in self._by_class[folder]:
            if image_tree.is_image(path):
                yield path
            else:
                ignored.count(path)

    def count_stray(self, ignored: Ignored) -> None:
        in_table = set(self._paths.values())
        images = images_below(self.file, Ignored())
        ignored.without_row += [f"{self.file}/{path}" for path in images if path not in in_table]

    def places(self, paths: Sequence[str]) -> Members:
        return super().places([self._paths[path] for path in paths])


def open_folder(path: Path, label_column: str | None = None) -> FolderTree:
    """Open a folder. If it contains Hugging Face's metadata.csv or .jsonl, read classes from there.

    If the folder also contains class folders, the table's column is used only if it has a usual
    name. Raises PrepError for a table that cannot be read, is ambiguous, or names missing files.
    """
    table = next((path / name for name in METADATA if os.path.lexists(path / name)), None)
    if table is None:
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
    return TableTree(path, label_column, by_class)


def _rows_of(table: Path) -> list[dict[str, Any]]:
    with (
        readable(table, (UnicodeError, csv.Error, ValueError), "not a table"),
        open(table, encoding="utf-8-sig") as file,
    ):
        if table.suffix == ".csv":
            return list(csv.DictReader(file))
        return [json.loads(line) for line in file if line.strip()]


class ArchiveTree:
    """A folder inside a zip or tar, with the same methods as FolderTree."""

    def __init__(
        self,
        file: Path,
        read: Callable[[Sample], bytes],
        places: dict[str, tuple[str, int, int]],
        folder: str = "",
    ):
        """places: maps each path in the archive to its name there, its offset and its size."""
        self.file = file
        self.read = read
        self.inputs: Sequence[Path] | None = [file]
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

    def image_folders(self) -> set[tuple[str, ...]]:
        return {tuple(path.split("/")[:-1]) for path in self.images("", Ignored())}

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        tree = self.below(folder) if folder else self
        for name in sorted(tree._files):
            if name.lower().endswith(EXTENSIONS):
                yield name
            else:
                ignored.count(name)
        for name in tree.folders():
            for path in tree.images(name, ignored):
                yield f"{name}/{path}"

    def count_stray(self, ignored: Ignored) -> None:
        for name in sorted(self._files):
            if name.lower().endswith(EXTENSIONS):
                ignored.stray.append(f"{self}/{name}")
            else:
                ignored.count(name)

    def places(self, paths: Sequence[str]) -> Members:
        rows = [self._places[self._inside(path)] for path in paths]
        names, offsets, sizes = (list(column) for column in zip(*rows, strict=True))
        return Members(names, np.array(offsets, np.int64), np.array(sizes))


Tree = FolderTree | ArchiveTree


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
    paths: Mapping[str, str],
    shares: Mapping[str, Sequence[str]],
) -> None:
    """Add a class's images. paths: maps keys to paths below `tree`. shares: maps splits to keys."""
    for split, keys in shares.items():
        if keys:
            places = tree.places([paths[key] for key in keys])
            builder.add(split, file, places.names, label, places.offsets, places.sizes, keys)
