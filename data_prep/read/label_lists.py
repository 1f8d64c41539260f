"""Read lists of labels: texts whose rows name an image, and possibly its class and its split.

    images/cat/1.jpg 0        val_0.JPEG<TAB>n03444034<TAB>0        apple_pie/1005649

Blanks, tabs or commas separate the columns. Without a label, the folder of an image is its class.
An image may be named without its suffix. Labels are names of classes, or numbers whose names are in
a file of classes, or follow from the folders or names of the images. CUB-200-2011 has one file for
each column, which the numbers of images join. `find_lists` recognizes lists by their first rows,
which name images of the source.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from data_prep.errors import PrepError, counted, readable, some
from data_prep.read.class_tree import FILE_NAME, Found, TableTree, Tree, subtree
from data_prep.read.hub_features import LABEL_NAMES, choose_column
from data_prep.read.image_tree import Ignored
from data_prep.read.split_names import SPLIT_WORDS, split_of, splits_of_folders
from vit.data.decode.image_files import EXTENSIONS

HEAD_ROWS = 20
"""The number of rows that show whether a text is a list of labels."""
SPLITS = ("", "train", "val", "test")
SPLIT_COLUMNS = ("split", "set", "subset", "dataset", "data set", "data_set")
_IMAGE = re.compile(rf"(.+?({'|'.join(map(re.escape, EXTENSIONS))}))(?:\s+(.*))?$", re.IGNORECASE)
_NUMBERED_CLASS = re.compile(
    r"(?P<first>\d+)[\s,:]+(?P<after>.+)|(?P<before>.+?)[\s,]+(?P<last>\d+)"
)
_CLASS_FILE = re.compile(
    r"(class(es|_?names)|categories.*|wnids|synsets|names|labels)\.(txt|csv|tsv)", re.IGNORECASE
)


class Columns(NamedTuple):
    """The numbers of the columns of a list, or None for those that are missing."""

    file: int
    label: int | None
    split: int | None
    has_header: bool


class LabelList(NamedTuple):
    """A list of labels."""

    path: str
    """The path below the source."""
    split: str
    """The split that the name of the list means, or ""."""
    base: str
    """The folder below the source in which the images are."""
    dropped: int
    """The number of leading folders in the paths of the list that `base` replaces."""
    columns: Columns
    has_labels: bool
    split_of_folder: dict[str, str]
    """The splits that folders below `base` mean. They count if nothing else tells the split."""

    def rows(self, root: Tree) -> Iterator[tuple[str, str, str]]:
        """Yield the split, the path and the label of each row, or "" for what is missing."""
        columns = self.columns
        for row in islice(_rows(root, self.path), int(columns.has_header), None):
            parts = _parts(_cell(row, columns.file))
            label = _cell(row, columns.label)
            if columns.label is None and len(parts) > 1:
                # The folder of a class may be named like a split, but not the folders above it.
                label = "/".join([*(p for p in parts[:-2] if not split_of(p)), parts[-2]])
            parts = parts[self.dropped :]
            split = self.split or self.split_of_folder.get(parts[0] if parts else "", "train")
            if columns.split is not None:
                split = SPLIT_WORDS.get(_cell(row, columns.split).lower(), "")
            yield split, _joined(self.base, *parts), label


class Listed(NamedTuple):
    """The images in lists of labels."""

    trees: dict[str, Tree]
    notes: list[str]
    """What is not used."""
    class_names: Sequence[str] = ()
    """The names of the classes in label order, if the labels are numbers."""
    description: str = ""
    """What the lists were taken for, as a further line."""


# ---- rows ----------------------------------------------------------------------------------------


def _rows(root: Tree, path: str) -> Iterator[list[str]]:
    """Yield the columns of each row of a text that is not a comment."""
    folder, name = os.path.split(path)
    labels, splits = (
        os.path.join(folder, file) for file in ("image_class_labels.txt", "train_test_split.txt")
    )
    if name == "images.txt" and root.has(labels):
        label_of = dict(_numbered(root, labels))
        is_train = dict(_numbered(root, splits)) if root.has(splits) else {}
        yield [FILE_NAME, "label", "split"]
        for number, file in _numbered(root, path):
            split = "train" if is_train.get(number, "1") == "1" else "test"
            yield [file, label_of.get(number, ""), split]
        return
    lines = (line for line in root.lines(path) if line.strip() and not line.startswith("#"))
    first = next(lines, "")
    separator = next((each for each in "\t,;" if each in first), None)
    if separator is None:
        yield from map(_split_at_blanks, filter(None, chain([first], lines)))
        return
    with readable(root.file, (csv.Error,), f"{path} is not a table"):
        for row in csv.reader(chain([first], lines), delimiter=separator):
            yield [value.strip() for value in row]


def _numbered(root: Tree, path: str) -> Iterator[tuple[str, str]]:
    """Yield the number and the rest of each line."""
    for line in root.lines(path):
        number, _, rest = line.strip().partition(" ")
        yield number, rest.strip()


def _split_at_blanks(line: str) -> list[str]:
    """Split a row into the image and its label, which may both contain blanks."""
    match = _IMAGE.match(line.strip())
    file, rest = (match[1], match[3] or "") if match else (line.split()[0], line.partition(" ")[2])
    labels = rest.split()
    # Columns after a number have other meanings, but the name of a class may have several words.
    if labels and not labels[0].isdecimal():
        labels = [" ".join(labels)]
    return [file, *labels]


def _parts(path: str) -> list[str]:
    path = path if "/" in path else path.replace("\\", "/")
    return [part for part in path.split("/") if part not in ("", ".")]


def _joined(*parts: str) -> str:
    return "/".join(parts).lstrip("/")


def _cell(row: Sequence[str], column: int | None) -> str:
    return "" if column is None or column >= len(row) else row[column]


# ---- finding lists -------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where the images of a list are. The best place sorts first."""

    dropped: int
    is_other_split: bool
    num_missing: int
    depth: int
    base: str


def find_lists(
    root: Tree, found: Found, texts: Sequence[str], chosen: Sequence[str], label_column: str | None
) -> tuple[list[LabelList], list[str]]:
    """Return the lists of labels, and notes about lists that are not used.

    texts: the paths below `root` of possible lists. chosen: the lists that the user chose, or [].

    Raises PrepError if a chosen list names no image, or if several lists are possible.
    """
    opened: list[LabelList] = []
    notes = []
    for path in chosen or sorted(texts):
        each = _open_list(root, found, path, label_column) if root.has(path) else None
        if each is not None and each.has_labels:
            opened.append(each)
        elif chosen:
            raise PrepError(
                f"{root}: --labels {path}: expected a text below {root} whose rows name images and"
                " their classes"
            )
        elif each is not None:
            notes.append(f"{path} contains no labels, and is not used")
    if chosen:
        return opened, notes
    by_split = defaultdict[str, list[LabelList]](list)
    for each in opened:
        by_split[each.split].append(each)
    if len(by_split) > 1:  # A list of all images, beside lists of the splits
        by_split.pop("", None)
    if {"train", "val"} <= by_split.keys() and len(by_split["train"]) > 1:
        both = [each for each in by_split["train"] if "trainval" not in each.path]
        by_split["train"] = both or by_split["train"]
    lists = [
        _first_partition(root, by_split[split]) for split in sorted(by_split, key=SPLITS.index)
    ]
    others = [each.path for each in opened if each.split in by_split and each not in lists]
    if others:
        notes.append(f"{some(others)} are not used: choose lists with --labels")
    return lists, notes


def _first_partition(root: Tree, lists: Sequence[LabelList]) -> LabelList:
    """Return the only list, or train1.txt of train1.txt, train2.txt, ..."""
    stems = [os.path.splitext(each.path)[0] for each in lists]
    if len({stem.rstrip("0123456789") for stem in stems}) > 1:
        raise PrepError(
            f"{root}: several lists contain labels of the same images or split:"
            f" {some([each.path for each in lists])}: choose one for each split with --labels, or"
            " use --layout to ignore all lists"
        )
    return min(lists, key=lambda each: (len(each.path), each.path))


def _open_list(root: Tree, found: Found, path: str, label_column: str | None) -> LabelList | None:
    """Return a list of labels, or None if a text names no image."""
    rows = list(islice(_rows(root, path), HEAD_ROWS))
    folder, name = os.path.split(path)
    words = re.findall("[a-z]+", name.lower())
    named = {("train" if word == "trainval" else SPLIT_WORDS.get(word)) for word in words} - {None}
    split = split_of(os.path.basename(folder)) if not named else None
    if len(named) == 1:
        split = named.pop()
    best: tuple[_Place, int] | None = None
    for column in range(max(map(len, rows), default=0)):
        place = _place(root, found, [_cell(row, column) for row in rows], split or "")
        if place and (best is None or place.num_missing < best[0].num_missing):
            best = (place, column)
    if best is None:
        return None
    place, file = best
    first = rows[0]
    has_header = not (
        _is_image(root, found, place.base, _parts(_cell(first, file))[place.dropped :])
        or any(cell.isdecimal() or "/" in cell or _IMAGE.match(cell) for cell in first)
    )
    in_folders = all(len(_parts(_cell(row, file))) > 1 for row in rows[has_header:])
    columns = _choose_columns(
        os.path.join(str(root), path), rows, file, has_header, in_folders, label_column
    )
    has_labels = columns.label is not None or in_folders
    base = _parts(place.base)
    folders = {each[len(base)] for each in found.folders if each[:-1][: len(base)] == (*base,)}
    splits = splits_of_folders(folders)
    return LabelList(
        path,
        split or "",
        place.base,
        place.dropped,
        columns,
        has_labels,
        splits if "train" in splits.values() else {},
    )


def _choose_columns(
    place: str,
    rows: Sequence[list[str]],
    file: int,
    has_header: bool,
    in_folders: bool,
    label_column: str | None,
) -> Columns:
    """Choose the columns of labels and splits. in_folders: whether all images are in folders."""
    others = [column for column in range(max(map(len, rows))) if column != file]
    if not has_header:
        label = next(iter([column for column in others if column > file] or others), None)
        return Columns(file, label, None, has_header)
    names = rows[0]
    split = None
    for column in others:
        values = {_cell(row, column).lower() for row in rows[1:]}
        if _cell(names, column).lower() in SPLIT_COLUMNS and values <= SPLIT_WORDS.keys():
            split = column
    candidates = [names[column] for column in others if column != split and column < len(names)]
    usual = [name for name in candidates if name.lower() in LABEL_NAMES]
    if in_folders and not (usual or label_column or len(candidates) == 1):
        return Columns(file, None, split, has_header)
    name = choose_column(place, "--label-column", label_column, usual or candidates, names)
    return Columns(file, names.index(name), split, has_header)


def _place(root: Tree, found: Found, values: Sequence[str], split: str) -> _Place | None:
    """Return the folder in which most of the images named by `values` are."""
    hits = Counter[tuple[int, str]]()
    for value in values:
        parts = _parts(value)
        for dropped in range(len(parts)):
            inner = tuple(parts[dropped:-1])
            bases = {
                "/".join(folder[: len(folder) - len(inner)])
                for folder in found.folders
                if folder[len(folder) - len(inner) :] == inner
            }
            inside = [base for base in bases if _is_image(root, found, base, parts[dropped:])]
            hits.update((dropped, base) for base in inside)
            if inside:
                break
    places = sorted(
        _Place(
            dropped,
            split not in map(split_of, base.split("/")),
            len(values) - number,
            len(_parts(base)),
            base,
        )
        for (dropped, base), number in hits.items()
    )
    if len(places) > 1 and places[0][:4] == places[1][:4]:
        raise PrepError(
            f"{root}: images such as {values[-1]} of a list are in {places[0].base} and in"
            f" {places[1].base}: move one of these folders away"
        )
    return places[0] if places else None


def _is_image(root: Tree, found: Found, base: str, parts: Sequence[str]) -> bool:
    path = _joined(base, *parts)
    return bool(parts) and any(root.has(path + suffix) for suffix in ("", *found.suffixes))


# ---- reading lists -------------------------------------------------------------------------------


def read_lists(root: Tree, lists: Sequence[LabelList], texts: Sequence[str]) -> Listed:
    """Read lists of labels, and find their images. All rows are in memory.

    texts: the paths of texts that may name the classes.

    Raises PrepError for rows without a label or split, for files that are missing or have two
    labels or splits, and for numbers that are not in the file of classes.
    """
    known: dict[tuple[int, str, str], tuple[int, str, str]] = {}
    place_of: dict[str, tuple[int, str, str]] = {}
    wrong: list[str] = []
    for number, each in enumerate(lists):
        for split, path, label in each.rows(root):
            place = (number, split, label)
            place = known.setdefault(place, place)  # Millions of rows share few objects.
            if not (split and label):
                wrong.append(f"{path} (no {'label' if split else 'split'})")
            elif place_of.setdefault(path, place)[1:] != place[1:]:
                wrong.append(f"{path} ({' '.join(place_of[path][1:])} and {split} {label})")
    bases = {each.base for each in lists}
    outer = [base for base in bases if not any(is_inside(base, b) for b in bases - {base})]
    paths_of = defaultdict[tuple[int, str, str], list[str]](list)
    below = Counter[str]()
    unlisted = Counter[str]()
    ignored = Ignored()
    images = (
        _joined(base, name)
        for base in outer
        for name in subtree(root, _parts(base)).images("", ignored)
    )
    for path in images:
        below.update(base for base in bases if is_inside(path, base))
        listed = path if path in place_of else os.path.splitext(path)[0]
        if listed in place_of:
            paths_of[place_of.pop(listed)].append(path)
        else:
            unlisted[os.path.dirname(path)] += 1
    wrong += [f"{path} (missing)" for path in place_of]
    if wrong:
        raise PrepError(
            f"{root}: {len(wrong):,} rows of {some([each.path for each in lists])} have no label or"
            " split, have another one than an earlier row of the same image, or name an image that"
            f" is missing{ignored.images_in_brackets()}: {some(wrong)}; correct or remove these"
            " rows, or use --layout to ignore the lists"
        )
    is_complete = any(split == "train" for _, split, _ in paths_of)
    class_files = [
        path
        for path in texts
        if _CLASS_FILE.fullmatch(os.path.basename(path)) and path not in {e.path for e in lists}
    ]
    names = _name_classes(root, lists, paths_of, class_files, is_complete)
    trees: dict[str, Tree] = {}
    for split in sorted({split for _, split, _ in paths_of}, key=SPLITS.index):
        base = os.path.commonpath([lists[n].base for n, of, _ in paths_of if of == split])
        by_class = defaultdict[str, list[str]](list)
        for (_, of, label), paths in paths_of.items():
            if of == split:
                by_class[names.of[label]] += [path[len(base) :].lstrip("/") for path in paths]
        trees[split] = TableTree(subtree(root, _parts(base)), by_class)
    numbers = Counter[int]()
    for (number, _, _), paths in paths_of.items():
        numbers[number] += len(paths)
    texts = [
        f"{each.path} ({numbers[n]:,} of {counted(below[each.base], 'image')})"
        for n, each in enumerate(lists)
    ]
    notes = []
    if unlisted:
        folders = [f"{folder or 'SOURCE itself'} ({n:,})" for folder, n in unlisted.most_common()]
        notes.append(f"images that no list names are not used: {some(folders)}")
    description = f"\nlist{'s' * (len(lists) > 1)} of labels: {', '.join(texts)}{names.description}"
    return Listed(trees, notes, names.in_order if is_complete else (), description)


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path below a source is below a folder."""
    return not folder or path.startswith(f"{folder}/")


class _Names(NamedTuple):
    """The names of the classes."""

    of: dict[str, str]
    """The name of each label in the lists."""
    in_order: list[str]
    description: str


def _name_classes(
    root: Tree,
    lists: Sequence[LabelList],
    paths_of: Mapping[tuple[int, str, str], Sequence[str]],
    class_files: Sequence[str],
    is_complete: bool,
) -> _Names:
    """Name the classes. Numbers are names only if no other names are found."""
    labels = sorted({label for _, _, label in paths_of})
    if not all(map(str.isdecimal, labels)):
        # The folders above those of the classes are no part of a name.
        above = os.path.commonpath(labels) if len(labels) > 1 else os.path.dirname(labels[0])
        if above in labels or any(each.columns.label is not None for each in lists):
            above = ""
        return _Names({label: label[len(above) :].lstrip("/") for label in labels}, [], "")
    numbers = sorted(set(map(int, labels)))
    found = ((path, _read_classes(root, path, numbers)) for path in class_files)
    source, name_of = next(((path, names) for path, names in found if names), ("", {}))
    if class_files and not name_of:
        raise PrepError(
            f"{root}: {some(class_files)} must name each class, one per line in the order of their"
            f" numbers, or with their numbers; expected names of {some([*map(str, numbers)])}"
        )
    for source_of_names, get_name in _NAMES_OF_IMAGES.items():
        if name_of or not is_complete:
            break
        by_number = defaultdict[int, set[str]](set)
        for (number, _, label), paths in paths_of.items():
            start = len(lists[number].base)
            by_number[int(label)] |= {get_name(path[start:].strip("/")) for path in paths}
        names = {n: min(each) for n, each in by_number.items() if len(each) == 1}
        if len({*names.values()} - {""}) == len(numbers):
            source, name_of = source_of_names, names
    name_of = name_of or {number: str(number) for number in numbers}
    description = f"; class names: {source or 'the numbers'}"
    if numbers != [*range(len(numbers))]:
        description += (
            f"; the numbers {numbers[0]} to {numbers[-1]} become the labels 0 to {len(numbers) - 1}"
        )
    return _Names(
        {label: name_of[int(label)] for label in labels},
        [name_of[number] for number in numbers],
        description,
    )


_NAMES_OF_IMAGES: dict[str, Callable[[str], str]] = {
    "the folders": os.path.dirname,
    "the names of the images": lambda path: re.sub(r"[\W_]*\d+\.\w+$", "", os.path.basename(path)),
}
"""Functions from the path of an image to the name of its class, if it follows from the path."""


def _read_classes(root: Tree, path: str, numbers: Sequence[int]) -> dict[int, str]:
    """Return the names of the classes with these numbers, or {} if a file does not name them."""
    lines = [line.strip() for line in root.lines(path) if line.strip()]
    numbered = {
        int(match["first"] or match["last"]): (match["after"] or match["before"]).lstrip("/")
        for match in filter(None, map(_NUMBERED_CLASS.fullmatch, lines))
    }
    is_from_1 = numbers[0] > 0 and numbers[-1] == len(lines)
    for names in (numbered, dict(enumerate(lines, int(is_from_1)))):
        chosen = {number: names[number] for number in numbers if number in names}
        if len(set(chosen.values())) == len(numbers):
            return chosen
    return {}
