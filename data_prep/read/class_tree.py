"""Read class folders from disk, or in place from a zip or tar.

`data_prep.imagefolder` lists the folders and images of a tree, and adds the images to a catalog. An
image is a file or a byte range of an archive. The tree provides each image's location and the
function that reads the image.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError, readable
from data_prep.read.archives import Members, walk_archive
from data_prep.read.image_tree import Ignored, images_below, is_image, listed
from data_prep.read.image_tree import read as read_file
from data_prep.read.split_names import split_of
from data_prep.write.catalog import Builder
from data_prep.write.samples import Sample, read_range, stable_hash
from vit.data.decode.image_files import EXTENSIONS
from vit.system.spelling import few

TAR = ".tar"


class Found(NamedTuple):
    """The parts of a source that determine its layout."""

    folders: Counter[tuple[str, ...]]
    """The number of images in each folder. A key consists of the names on the folder's path."""
    lists: list[str]
    """The paths of text files with the usual names of label lists or class lists."""


class Tree:
    """A folder on disk that contains class folders. Subclasses represent other kinds of trees.

    `str` returns the path for messages.
    """

    read: Callable[[Sample], bytes] = staticmethod(read_file)
    """The function that reads the bytes of an image. It works in any process."""
    inputs: Sequence[Path] | None = None
    """The value of `Source.inputs` for these images."""

    def __init__(self, file: Path):
        self.file = file
        """The archive or folder that contains the images."""

    def __str__(self) -> str:
        return str(self.file)

    def below(self, name: str) -> Tree:
        """Return the subfolder `name`."""
        return Tree(self.file / name)

    def folders(self) -> list[str]:
        """Return the sorted names of all subfolders that are not hidden."""
        return listed(self.file)[0]

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        """Yield the paths of images below `folder`, relative to `folder`.

        ignored: counts all other files.
        """
        return images_below(self.file / folder, ignored)

    def count_stray(self, ignored: Ignored) -> None:
        """Count the files that are next to the class folders instead of inside them."""
        for name in listed(self.file)[1]:
            path = os.path.join(self.file, name)
            if is_image(path):
                ignored.stray.append(path)
            else:
                ignored.count(path)

    def places(self, folder: str, paths: Sequence[str]) -> Members:
        """Return the locations of images that `images` has yielded for `folder`."""
        # Files are read completely, so offsets and sizes are not needed.
        nothing = np.zeros(len(paths), np.int64)
        return Members([os.path.join(folder, path) for path in paths], nothing, nothing)

    def path_with_class(self, folder: str, path: str) -> str:
        """Return the path of an image of a class folder, beginning with this folder."""
        return f"{folder}/{path}".lstrip("/")

    def file_of(self, folder: str) -> Path:
        """Return the archive or folder that contains the images of a subfolder."""
        return self.file

    def has(self, path: str) -> bool:
        """Return whether there is a file with this path below this folder."""
        return (self.file / path).is_file()

    def lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a text file below this folder. Raises PrepError if it cannot be
        read."""
        file = self.file / path
        # File names in the text need not be UTF-8.
        with readable(file), open(file, encoding="utf-8-sig", errors="surrogateescape") as text:
            yield from text

    def find(self) -> Found:
        """List all files below this folder."""
        ignored = Ignored()
        folders = Counter(tuple(path.split("/")[:-1]) for path in self.images("", ignored))
        return Found(folders, [os.path.relpath(path, str(self)) for path in ignored.lists])


class TableTree(Tree):
    """A tree of images whose classes come from a list of labels."""

    def __init__(self, images: Tree, by_class: Mapping[str, list[str]]):
        """by_class: maps each class to the paths of its images below the tree `images`."""
        super().__init__(images.file)
        self.read = images.read
        self.inputs = images.inputs
        self._images = images
        self._by_class = by_class

    def __str__(self) -> str:
        return str(self._images)

    def folders(self) -> list[str]:
        return sorted(self._by_class)

    def images(self, folder: str, ignored: Ignored) -> Iterator[str]:
        yield from self._by_class.get(folder, ())

    def path_with_class(self, folder: str, path: str) -> str:
        """Return the path of an image, which may already begin with its class in a list."""
        has_class = path.startswith(f"{folder}/")
        return path if has_class else super().path_with_class(folder, path)

    def count_stray(self, ignored: Ignored) -> None:
        """Count nothing, because images that no list names are reported with the lists."""

    def places(self, folder: str, paths: Sequence[str]) -> Members:
        return self._images.places("", paths)


class TarFolder(Tree):
    """A folder with one tar of images per class, the form in which ImageNet-21k is published."""

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
        has_more = tree.folders() or others.others
        if split_of(folder) or has_more:
            raise PrepError(
                f"{tar}: expected only images of one class, as in n01440764.tar of ImageNet-21k,"
                f" found {few([*others.summary(), *tree.folders()])}. If the tars are shards, use"
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
        for name in filter(split_of, self.folders()):
            list(self.images(name, Ignored()))  # raises PrepError
        return Found(Counter((name,) for name in self.folders()), [])


class ArchiveTree(Tree):
    """A folder inside a zip or tar."""

    def __init__(
        self,
        file: Path,
        read: Callable[[Sample], bytes],
        places: dict[str, tuple[str, int, int]],
        folder: str = "",
    ):
        """places: maps each path in the archive to the member's name, offset and size."""
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
        # splitlines() would also split at characters that do not end lines in a file.
        yield from io.StringIO(data.decode("utf-8-sig", "surrogateescape"), newline=None)


def subtree(tree: Tree, names: Iterable[str]) -> Tree:
    """Return the folder that is reached from `tree` through the folders `names`."""
    return reduce(lambda outer, name: outer.below(name), names, tree)


def open_tree(path: Path) -> Tree:
    """Open a folder, zip or tar. Raises PrepError in the same cases as `walk_archive`."""
    if not path.is_dir():
        return _list_archive(path)
    folders, files = listed(path)
    num_tars = sum(name.endswith(TAR) for name in files)
    has_only_tars = num_tars > 1 and not folders and not any(map(is_image, files))
    return TarFolder(path) if has_only_tars else Tree(path)


def _list_archive(path: Path) -> ArchiveTree:
    """Return the visible files of an archive."""
    members, read = walk_archive(path)
    tree = ArchiveTree(path, read, {})
    for batch in members:
        for name, offset, size in zip(*batch, strict=True):
            parts = [part for part in name.split("/") if part not in ("", ".")]
            if parts and not any(part.startswith((".", "__MACOSX")) for part in parts):
                tree.add(parts, (name, int(offset), int(size)))
    return tree


# The member lists of all tars in ImageNet-21k would not fit into memory.
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

    Args:
        folder: The subfolder of the class.
        paths: Maps keys to paths below the subfolder.
        shares: Maps splits to keys.
    """
    for split, keys in shares.items():
        if keys:
            places = tree.places(folder, [paths[key] for key in keys])
            builder.add(split, file, places.names, label, places.offsets, places.sizes, keys)
