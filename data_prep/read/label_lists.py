"""Read lists of labels: text files whose rows name an image, and possibly its class and split.

    images/cat/1.jpg 0        val_0.JPEG<TAB>n03444034<TAB>0        apple_pie/1005649

Blanks, tabs, commas or semicolons separate the columns, and the first row may be a header. If the
rows contain no labels, the folder of an image is its class. An image may be named without its
suffix. Labels are class names or numbers. The class names for numbers come from a file of classes,
or from the folders or file names of the images. CUB-200-2011 has one file for each column. Hugging
Face's metadata.csv or metadata.jsonl is a list with a header. Lists are recognized by their first
rows, which name images in the source.
"""

import csv
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from data_prep.errors import PrepError, counted, readable
from data_prep.read.class_tree import Found, TableTree, Tree, subtree
from data_prep.read.hub_features import LABEL_NAMES, choose_column
from data_prep.read.image_tree import Ignored
from data_prep.read.split_names import OF_IMAGES, SPLIT_WORDS, split_of, splits_of_folders
from vit.data.decode.image_files import EXTENSIONS
from vit.system.spelling import few

HEAD_ROWS = 20
"""The number of rows to read when deciding whether a text file is a list of labels."""
SPLIT_COLUMNS = ("split", "set", "subset", "dataset", "data set", "data_set")
_IMAGE = re.compile(
    rf"(?P<file>.+?(?:{'|'.join(map(re.escape, EXTENSIONS))}))(?:\s+(?P<rest>[^\s,;].*))?$",
    re.IGNORECASE,
)
"""Matches a path with an image suffix, and the text that follows after a blank."""
_NUMBERS = re.compile(r"\d+(\s+-?[\d.]+)*")
"""Matches a class number and any further columns of numbers."""
_SPLIT_IN_NAME = re.compile(
    rf"(?<![a-z])({'|'.join(SPLIT_WORDS)})(?=[^a-z]|lists?|labels?|sets?|images?|data|annot)"
)
"""Matches the split in list names such as `val_list.txt` and `trainLabels.csv`."""
_CLASS_FILE = re.compile(
    r"(.*/)?(class(es|_?names)|categories.*|wnids|synsets|names|labels)\.(txt|csv|tsv)", re.I
)
_END_OF_PARTITION = re.compile(r"\d*\.\w+$")
"""Matches what differs in the names of lists that divide the same images in different ways, such as
train1.txt and train2.txt."""
_NUMBERED_CLASS = re.compile(
    r"(?P<first>\d+)[\s,:]+(?P<after>.+)|(?P<before>.+?)[\s,]+(?P<last>\d+)"
)
_CLASS_IN_PATH = {
    "the folders": r"(?:.*/)?([^/]+)/[^/]+$",
    "the names of the images": r"(?:.*/)?([^/]*?)[\W_]*\d+\.\w+$",
}
"""Patterns that find the class name in an image's path. They match from the start of the path."""


class LabelList(NamedTuple):
    """A list of labels. Columns are given as numbers, or as None if they are missing."""

    path: str
    """The path below the source."""
    split: str
    """The split that the list's name states, or ""."""
    base: str
    """The folder below the source that contains the images."""
    has_header: bool
    file_column: int
    label_column: int | None
    split_column: int | None
    split_of_folder: Mapping[str, str]
    """Maps the names of folders below `base` to splits, if the list covers several splits."""

    def rows(self, root: Tree) -> Iterator[tuple[str, str, str]]:
        """Yield the split, the path and the label of each row, with "" for missing values."""
        default = self.split or ("train" if self.split_column is None else "")
        for row in islice(_rows(root, self.path), int(self.has_header), None):
            parts = _parts(_cell(row, self.file_column))
            split = SPLIT_WORDS.get(_cell(row, self.split_column).lower(), default)
            label = (
                _class_folder(parts) if self.label_column is None else _cell(row, self.label_column)
            )
            yield self.split_of_folder.get(parts[0], split), _joined(self.base, *parts), label


ImagesOfList = dict[str, dict[str, list[str]]]
"""Maps each split of a list to the paths of the images with each label."""


class Listed(NamedTuple):
    """The images in lists of labels."""

    trees: dict[str, Tree]
    notes: list[str]
    """Notes about images and lists that are not used."""
    class_names: Sequence[str] = ()
    """The class names in label order, if the labels are numbers."""
    description: str = ""
    """A line that describes how the lists were interpreted."""


# ---- rows ----------------------------------------------------------------------------------------


def _rows(root: Tree, path: str) -> Iterator[list[str]]:
    """Yield the columns of each row of a text file, after any initial rows that begin with #."""
    folder, name = os.path.split(path)
    # CUB-200-2011 has three files, whose rows begin with an image number.
    beside = [_joined(folder, file) for file in ("image_class_labels.txt", "train_test_split.txt")]
    if name == "images.txt" and all(map(root.has, beside)):
        labels, is_train = (_by_number(root, each) for each in beside)
        yield ["file", "label", "split"]
        for number, file in _by_number(root, path).items():
            split = {"1": "train", "0": "test"}.get(is_train.get(number, ""), "")
            yield [file, labels.get(number, ""), split]
        return

    lines: Iterator[str] = filter(str.strip, root.lines(path))
    first = next((line for line in lines if not line.startswith("#")), "")
    if "\0" in first:
        raise PrepError(f"{root.file / path}: a text in UTF-16: save it as UTF-8, or remove it")
    lines = chain(filter(None, [first]), lines)

    # The delimiter is a tab or, if there is none, the first comma or semicolon. Excel writes
    # semicolons in languages whose decimal separator is a comma.
    delimiter = "\t" if "\t" in first else min(",;", key=lambda each: f"{first}{each}".index(each))
    match = _IMAGE.match(first)
    # A label after a blank may contain the delimiter.
    has_cells = delimiter == "\t" or (delimiter in first and not (match and match["rest"]))

    with readable(root.file / path, (ValueError, csv.Error), "not a table"):
        if path.endswith(".jsonl"):
            names = list(json.loads(first))
            yield names
            for row in map(json.loads, lines):
                yield ["" if row.get(name) is None else str(row[name]).strip() for name in names]
        elif has_cells:
            for cells in csv.reader(lines, delimiter=delimiter):
                yield [cell.strip() for cell in cells]
        else:
            yield from map(_split_at_blanks, lines)


def _by_number(root: Tree, path: str) -> dict[str, str]:
    """Map the number at the start of each line of a text file to the rest of that line."""
    rows = (line.strip().partition(" ") for line in root.lines(path))
    return {number: rest.strip() for number, _, rest in rows}


def _split_at_blanks(line: str) -> list[str]:
    """Split a row into an image path and its label. Both may contain blanks."""
    line = line.strip()
    match = _IMAGE.match(line)
    # An image name without a suffix contains no blanks.
    file, rest = match.groups("") if match else (*line.split(maxsplit=1), "")[:2]
    # Numbers after a numeric label have other meanings, but a class name may have several words.
    return [file, *(rest.split() if _NUMBERS.fullmatch(rest) else filter(None, [rest]))]


def _parts(path: str) -> list[str]:
    """Return the parts of a path as a list with at least one item."""
    names = (path if "/" in path else path.replace("\\", "/")).split("/")
    return [name for name in names if name not in ("", ".")] or [""]


def _joined(*parts: str) -> str:
    return "/".join(parts).lstrip("/")


def _cell(row: Sequence[str], column: int | None) -> str:
    return "" if column is None or column >= len(row) else row[column]


def _column(rows: Iterable[Sequence[str]], column: int) -> list[str]:
    return [_cell(row, column) for row in rows]


def _class_folder(parts: Sequence[str]) -> str:
    """Return the folder that names an image's class, or "" if there is none."""
    return "/".join(n for n in parts[:-1] if not (split_of(n) or OF_IMAGES.fullmatch(n)))


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is below a folder, both given relative to the source."""
    return not folder or path.startswith(f"{folder}/")


# ---- finding lists -------------------------------------------------------------------------------


def find_lists(
    root: Tree, found: Found, texts: Sequence[str], label_column: str | None
) -> tuple[list[LabelList], list[str]]:
    """Return the list of each split, or of all images, and notes about lists that are not used.

    texts: the paths below `root` of possible lists. Raises PrepError if several lists are possible.
    """
    opened = {path: _open_list(root, found, path, label_column) for path in texts}
    found_lists = [each for each in opened.values() if isinstance(each, LabelList)]
    splits = {each.split for each in found_lists}

    # If there are lists of the splits, a list of all images is not needed.
    chosen = splits - {""} if "train" in splits else splits
    lists = []
    for split in sorted(chosen, key=["", "train", "val", "test"].index):
        of_split = [each for each in found_lists if each.split == split]
        if "val" in splits and len(of_split) > 1:  # trainval.txt contains both splits.
            of_split = [each for each in of_split if "trainval" not in each.path]
        lists.append(_only_list(root, of_split))

    return lists, _notes_of_unused(opened, {each.path for each in lists})


def _only_list(root: Tree, of_split: Sequence[LabelList]) -> LabelList:
    """Return the list of a split, or the first one of those that divide its images in different
    ways. Raises PrepError if several lists are possible."""
    if len({_END_OF_PARTITION.sub("", each.path) for each in of_split}) > 1:
        raise PrepError(
            f"{root}: several lists contain labels of the same images:"
            f" {few([each.path for each in of_split])}: move all but one away, or use --layout"
            " to ignore the lists"
        )
    return min(of_split, key=lambda each: (len(each.path), each.path))


def _notes_of_unused(
    opened: Mapping[str, LabelList | str | None], used: Container[str]
) -> list[str]:
    """Return a note for each reason why lists are not used.

    Args:
        opened: The result of `_open_list` for each path.
        used: The paths of the used lists.
    """
    unused = defaultdict[str, list[str]](list)
    for path, each in sorted(opened.items()):
        if each is not None and path not in used:
            reason = each if isinstance(each, str) else "repeat images of other lists"
            unused[reason].append(path)
    return [f"lists that {reason} are not used: {few(paths)}" for reason, paths in unused.items()]


def _open_list(
    root: Tree, found: Found, path: str, label_column: str | None
) -> LabelList | str | None:
    """Return a list of labels, or the reason why it is not used, or None if it is not a list.

    The first rows show which column names images in the source, which folder contains these images,
    whether there is a header, and which columns contain the labels and the splits.
    """
    rows = list(islice(_rows(root, path), HEAD_ROWS))
    split = _split_of_list(path)

    columns: Sequence[int] = range(max(map(len, rows), default=0))
    # Prefer columns with suffixes, because a class number may also be an image name.
    with_suffix = [k for k in columns if all(map(_IMAGE.match, _column(rows[1:] or rows, k)))]
    places = sorted(
        chain(*(_places(root, found, path, split, rows, k) for k in with_suffix or columns))
    )
    if not places:
        is_list = any(map(_IMAGE.match, chain.from_iterable(rows)))
        return "do not name the images in a folder" if is_list else None

    file_column, base = places[0].column, places[0].base
    has_header = not (
        _exists(root, _joined(base, *_parts(_cell(rows[0], file_column))))
        or any(cell.isdecimal() or "/" in cell or _IMAGE.match(cell) for cell in rows[0])
    )
    in_folders = all(map(_class_folder, map(_parts, _column(rows[has_header:], file_column))))
    if has_header:
        class_column, split_column = _columns_in_header(
            os.path.join(str(root), path), rows, file_column, label_column, in_folders
        )
    else:
        # A table may begin with row numbers, so prefer the columns after the image column.
        others = [k for k in range(len(rows[0])) if k != file_column]
        class_column = min(others, key=lambda k: (k < file_column, k), default=None)
        split_column = None

    if not with_suffix and class_column is not None:
        labels = _column(islice(_rows(root, path), int(has_header), None), class_column)
        if len(set(labels)) == len(labels):  # a class list whose numbers also name images
            return None

    split = "" if split_column is not None else split
    of_folders = {} if split or split_column is not None else _splits_below(found, base)
    is_by_folder = in_folders and (split or split_column is not None or of_folders)
    if class_column is None and not is_by_folder:
        return "contain no labels"

    # Places that differ only in the folder are equally good.
    if len(places) > 1 and places[0][:-1] == places[1][:-1]:
        raise PrepError(
            f"{root}: the images that {path} names are in several folders:"
            f" {base or 'SOURCE itself'} and {places[1].base}: move one of them away, or use"
            " --layout to ignore the lists"
        )
    return LabelList(
        path, split, base, has_header, file_column, class_column, split_column, of_folders
    )


def _split_of_list(path: str) -> str:
    """Return the split in a list's name or else in its folder's name, or "" if it is unclear."""
    folder, name = os.path.split(path.lower().replace("trainval", "train"))
    splits = {SPLIT_WORDS[word] for word in _SPLIT_IN_NAME.findall(name)} or {
        split_of(os.path.basename(folder)) or ""
    }
    return splits.pop() if len(splits) == 1 else ""  # train_test_split.txt


def _columns_in_header(
    place: str, rows: Sequence[list[str]], file: int, label_column: str | None, in_folders: bool
) -> tuple[int | None, int | None]:
    """Return the label column and the split column of a list whose first row is a header.

    Raises PrepError if several columns may contain the labels.

    Args:
        place: The path of the list for messages.
        file: The column that names the images.
        label_column: The name of the label column, if the user gave it.
        in_folders: Whether the images' folder names may serve as classes.
    """
    header = rows[0]
    others = [column for column in range(len(header)) if column != file]
    values = {k: set(map(str.lower, _column(rows[1:], k))) for k in others}
    of_splits = [k for k in others if header[k].lower() in SPLIT_COLUMNS]
    split_column = next((k for k in of_splits if values[k] <= SPLIT_WORDS.keys()), None)

    # pandas writes a column of row numbers, which has no name.
    names = [header[k] for k in others if k != split_column and header[k]]
    usual = [name for name in names if name.lower() in LABEL_NAMES]
    is_in_column = usual or label_column or not in_folders
    if names and is_in_column:
        name = choose_column(place, "--label-column", label_column, usual or names, header)
        return header.index(name), split_column
    if names and "metadata." not in os.path.basename(place).lower():
        # A metadata.csv may contain captions.
        raise PrepError(
            f"{place}: it is unclear whether the classes are given by the folders or by one of the"
            f" columns {few(names)}: choose a column with --label-column, or use --layout to"
            " ignore the lists"
        )
    return None, split_column


def _splits_below(found: Found, base: str) -> dict[str, str]:
    """Map the folders directly below `base` to their splits. Returns {} if none of them is
    train."""
    depth = len(base.split("/")) if base else 0
    inside = [folder for folder in found.folders if is_inside("/".join(folder), base)]
    splits = splits_of_folders(folder[depth] for folder in inside if len(folder) > depth)
    return splits if "train" in splits.values() else {}


class _Place(NamedTuple):
    """A folder with images that a column of a list names. The smallest tuple is the best place."""

    is_other_split: bool
    is_elsewhere: bool
    """True if the list is not in this folder."""
    num_missing: int
    """The number of rows, among the first rows, that name no image in this folder."""
    depth: int
    column: int
    base: str
    """The folder below the source."""


def _places(
    root: Tree, found: Found, path: str, split: str, rows: Sequence[list[str]], column: int
) -> Iterator[_Place]:
    """Yield the folders that contain images named in a column."""
    hits = Counter[str]()
    for row in rows:
        *inner, name = _parts(_cell(row, column))
        if name:
            # The folders from which the path `inner` leads to a folder with images.
            outer = {each[: len(each) - len(inner)] for each in found.folders}
            bases = ["/".join(each) for each in outer if (*each, *inner) in found.folders]
            hits.update(base for base in bases if _exists(root, _joined(base, *inner, name)))

    for base, num_hits in hits.items():
        # If a list covers several class folders but omits their names, a few of its rows match each
        # folder. Therefore, at least a third of the rows must match.
        if 3 * num_hits >= len(rows):
            yield _Place(
                is_other_split=(split or "train") not in map(split_of, base.split("/")),
                is_elsewhere=base != os.path.dirname(path),
                num_missing=len(rows) - num_hits,
                depth=base.count("/"),
                column=column,
                base=base,
            )


def _exists(root: Tree, path: str) -> bool:
    suffixes = ("",) if _IMAGE.match(path) else ("", *EXTENSIONS, *map(str.upper, EXTENSIONS))
    return any(root.has(path + suffix) for suffix in suffixes)


# ---- reading lists -------------------------------------------------------------------------------


def read_lists(root: Tree, lists: Sequence[LabelList], texts: Sequence[str]) -> Listed:
    """Read lists of labels, and find their images. All rows are held in memory (0.25 kB each).

    texts: the paths of text files that may contain the class names.

    Raises PrepError for rows without a label or split, for images that are missing or have two
    labels or splits, and for numbers that are not in the file of classes.
    """
    images, class_of_path, wrong = _read_rows(root, lists)
    ignored = Ignored()
    below, unlisted = _match_images(root, lists, class_of_path, ignored)
    wrong += [f"{path} (missing)" for path in class_of_path]
    if wrong:
        raise PrepError(
            f"{root}: {len(wrong):,} rows of {few([each.path for each in lists])} have no label or"
            " several labels, have another label or split than an earlier row of the same image, or"
            f" name an image that is missing{ignored.images_in_brackets()}: {few(wrong)}; correct"
            " or remove these rows, or use --layout to ignore the lists"
        )

    of_train: dict[str, list[str]] = {}
    labels = set[str]()
    for of_list in images:
        of_train |= of_list.get("train", {})
        labels.update(*of_list.values())
    files = {each for each in texts if _CLASS_FILE.fullmatch(each)} - {each.path for each in lists}
    names, source = _name_classes(root, sorted(files), labels, of_train)

    trees: dict[str, Tree] = {}
    described = []
    for each, of_list in zip(lists, images, strict=True):
        trees |= _trees_of_list(root, each.base, of_list, names)
        number = sum(sum(map(len, of_split.values())) for of_split in of_list.values())
        described.append(f"{each.path} ({number:,} of {counted(below[each.base], 'image')})")

    folders = [f"{folder} ({number:,})" for folder, number in unlisted.most_common()]
    return Listed(
        trees,
        [f"images that no list names are not used: {few(folders)}"] if folders else [],
        list(names.values()) if source and of_train else [],
        f"\nlist{'s' * (len(lists) > 1)} of labels: {', '.join(described)}{source}",
    )


def _read_rows(
    root: Tree, lists: Sequence[LabelList]
) -> tuple[list[ImagesOfList], dict[str, list[str]], list[str]]:
    """Read the rows of all lists.

    Returns the classes of each list (still empty), a map from each row's path to its class, and
    descriptions of wrong rows. A class is a Python list, to which the paths of its images will be
    appended.
    """
    images: list[ImagesOfList] = [defaultdict(lambda: defaultdict(list)) for _ in lists]
    class_of_path: dict[str, list[str]] = {}
    wrong: list[str] = []
    for each, of_list in zip(lists, images, strict=True):
        for split, path, label in each.rows(root):
            # A cell of metadata.jsonl may contain a list.
            has_label = label not in ("", "-1") and not label.startswith("[")
            if not split:
                wrong.append(f"{path} (no split)")
            elif not has_label:
                wrong.append(f"{path} ({label or 'no label'})")
            else:
                this_class = of_list[split][label]
                if class_of_path.setdefault(path, this_class) is not this_class:
                    wrong.append(f"{path} ({split}: {label})")

    return images, class_of_path, wrong


def _match_images(
    root: Tree, lists: Sequence[LabelList], class_of_path: dict[str, list[str]], ignored: Ignored
) -> tuple[Counter[str], Counter[str]]:
    """Move the paths of all existing images from `class_of_path` to their classes.

    The paths of missing images remain. Returns the number of images below each list's base folder,
    and the number of images in each folder that no list names.
    """
    bases = {each.base for each in lists}
    below = Counter[str]()
    unlisted = Counter[str]()
    for path in root.images("", ignored):
        inside = [base for base in bases if is_inside(path, base)]
        below.update(inside)
        listed = path if path in class_of_path else os.path.splitext(path)[0]
        if listed in class_of_path:
            class_of_path.pop(listed).append(path)
        elif inside:
            unlisted[os.path.dirname(path) or "SOURCE itself"] += 1
    return below, unlisted


def _trees_of_list(
    root: Tree, base: str, of_list: ImagesOfList, names: Mapping[str, str]
) -> Iterator[tuple[str, TableTree]]:
    """Yield each split of a list with the images of its classes below `base`."""
    folder = subtree(root, filter(None, base.split("/")))
    start = len(base) + bool(base)
    for split, of_split in of_list.items():
        by_class = {names[k]: [path[start:] for path in paths] for k, paths in of_split.items()}
        yield split, TableTree(folder, by_class)


# ---- naming classes ------------------------------------------------------------------------------


def _name_classes(
    root: Tree, files: Sequence[str], labels: set[str], of_train: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], str]:
    """Return the name of each label, in numerical order, and a text about the source of the names.

    Args:
        files: The paths of files that list classes.
        of_train: Maps each label to its training images.
    """
    if not all(map(str.isdecimal, labels)):
        return {label: label for label in labels}, ""

    labels_in_order = sorted(labels, key=int)
    numbers = list(map(int, labels_in_order))
    in_paths = {
        source: _names_in_paths(of_train, pattern) for source, pattern in _CLASS_IN_PATH.items()
    }
    candidates: list[tuple[str, dict[int, str]]] = []
    for file in files:
        candidates += [(file, names) for names in _names_in_file(root, file, numbers, of_train)]
    if not files:
        in_paths["the numbers"] = dict(zip(numbers, labels_in_order, strict=True))
        candidates = list(in_paths.items())

    range_of_labels = f"{labels_in_order[0]} to {labels_in_order[-1]}"
    is_moved = numbers != list(range(len(numbers)))
    moved = f"; {range_of_labels} become the labels from 0 on" if is_moved else ""
    for source, names in candidates:
        of_label = {label: names.get(int(label), "") for label in labels_in_order}
        names_used = set(of_label.values()) - {""}
        if len(names_used) == len(labels):
            if files:
                _check_against_paths(root, source, names, names_used, in_paths)
            return of_label, f"; class names: {source}{moved}"

    raise PrepError(
        f"{root}: {few(files)}: expected the names of the classes {range_of_labels} with these"
        " numbers, or one per line if their order is clear; correct or remove this file"
    )


def _names_in_paths(of_train: Mapping[str, Sequence[str]], pattern: str) -> dict[int, str]:
    """Return the name that `pattern` finds in all paths of a class, for each class with such a
    name."""
    name_of: dict[int, str] = {}
    for label, paths in of_train.items():
        names = {"".join(re.findall(pattern, path)) for path in paths}
        if len(names) == 1:
            name_of[int(label)] = names.pop()
    return name_of


def _names_in_file(
    root: Tree, file: str, numbers: Sequence[int], of_train: Mapping[str, Sequence[str]]
) -> Iterator[dict[int, str]]:
    """Yield the class names in a file, first by the numbers in its lines, then by the line order.

    numbers: the sorted labels.
    """
    lines = [line.strip() for line in root.lines(file) if line.strip()]
    yield {
        int(match["first"] or match["last"]): (match["after"] or match["before"]).lstrip("/")
        for match in filter(None, map(_NUMBERED_CLASS.fullmatch, lines))
    }

    # If lines were missing, the first line could be class 0 or 1. If no list names the training
    # images, the numbers could be positions in the sorted list of folders.
    has_all = len(lines) == numbers[-1] - numbers[0] + 1
    is_clear = has_all and (of_train or lines == sorted(lines))
    if is_clear:
        yield dict(enumerate(lines, numbers[0]))


def _check_against_paths(
    root: Tree,
    source: str,
    names: Mapping[int, str],
    names_used: set[str],
    in_paths: Mapping[str, Mapping[int, str]],
) -> None:
    """Raise PrepError if image paths contain the same class names in a different order.

    Args:
        source: The file that contains the names.
        names_used: The names in `names` that belong to labels.
        in_paths: The class names in the images' folders and file names.
    """
    for place, others in in_paths.items():
        differing = [k for k in others if names[k] != others[k]]
        if differing and set(others.values()) == names_used:
            raise PrepError(
                f"{root}: class {differing[0]} is {names[differing[0]]} in {source}, but"
                f" {others[differing[0]]} in {place}: correct or remove {source}"
            )
