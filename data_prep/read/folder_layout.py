"""Decide which folders of a source are splits, and which are classes.

Lists of labels (data_prep/read/label_lists.py) take precedence over folders. For splits without a
list, `read_layout` compares the names of all folders that contain images. It steps through outer
folders that contain everything. If the folders can be interpreted in two ways, or if folders with
images would not be used, the user must choose with --layout.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from data_prep.errors import PrepError, counted
from data_prep.read.class_tree import Found, Tree, subtree
from data_prep.read.label_lists import LabelList, Listed, find_lists, is_inside, read_lists
from data_prep.read.split_names import OF_IMAGES, UNLABELED, split_of, splits_of_folders
from vit.system.spelling import few

LAYOUTS = ("splits", "classes")
Folder = tuple[str, ...]
"""The names of the folders on the path from the source to a folder."""


class Layout(NamedTuple):
    """The folder tree of each split, train first."""

    trees: dict[str, Tree]
    unused: list[str]
    """The folders whose images are not in any tree, each with its number of images."""
    listed: Listed
    """The images of the splits according to lists of labels."""

    def describe(self, root: Tree, val_fraction: float) -> str:
        """Describe the splits, classes and lists. val_fraction: the fraction of train to hold
        out."""
        paths = {split: str(tree)[len(str(root)) + 1 :] for split, tree in self.trees.items()}
        splits = [
            split if path in ("", split) else f"{split} ({path}/)" for split, path in paths.items()
        ]

        held_out = f", val ({val_fraction:.3g} of train)" if val_fraction else ""
        classes = self.listed.class_names or self.trees["train"].folders()
        return (
            f"{root}: splits: {', '.join(splits)}{held_out};"
            f" {counted(len(classes), 'class', 'classes')}: {few(classes)}"
            f"{self.listed.description}"
        )


def read_layout(
    root: Tree,
    choice: str | None,
    with_classes: bool,
    out_name: str | None = None,
    label_column: str | None = None,
) -> Layout:
    """Find the splits of a source.

    Raises PrepError if the folders can be interpreted in two ways, if folders with images would not
    be used, if two folders belong to the same split, or if there are val images without train
    images. Also raises the errors of `find_lists` and `read_lists`.

    Args:
        choice: "splits" or "classes" if the user decided what the folders are.
        with_classes: Whether to look for the classes of the images.
        out_name: The name of the output folder, if it is in `root`.
        label_column: The column of classes in lists of labels.
    """
    found = root.find()
    folders = {folder for folder in found.folders if folder[:1] != (out_name,)}

    label_lists: list[LabelList] = []
    listed_images = Listed({}, [])
    if with_classes and not choice:
        label_lists, listed_images = _read_label_lists(root, found, folders, label_column)

    unused_folders = {folder for folder in folders if not _is_listed(folder, label_lists)}
    trees = listed_images.trees
    if "train" not in trees:
        folder_trees, unused_folders = _read_folders(root, unused_folders, choice, with_classes)
        _check_apart(root, folder_trees["train"], label_lists)
        trees = folder_trees | trees

    in_order: dict[str, Tree] = {
        split: trees[split] for split in ("train", "val", "test") if split in trees
    }
    unused = [
        f"{'/'.join(folder) or 'SOURCE itself'} ({found.folders[folder]:,})"
        for folder in sorted(unused_folders)
    ]
    return Layout(in_order, unused, listed_images)


def _read_label_lists(
    root: Tree, found: Found, folders: set[Folder], label_column: str | None
) -> tuple[list[LabelList], Listed]:
    """Return the lists of labels in a source, and the images that they name.

    folders: all folders with images.
    """
    outer = min(folders) if len(folders) == 1 else _inner_folder(folders)
    candidates = [path for path in sorted(found.lists) if _may_be_list(path, outer)]
    label_lists, notes = find_lists(root, found, candidates, label_column)
    images = read_lists(root, label_lists, candidates) if label_lists else Listed({}, [])
    images.notes.extend(notes)
    return label_lists, images


def _may_be_list(path: str, outer: Folder) -> bool:
    """Return whether a text file is next to an outer folder, or in a folder next to one.

    Text files among the images of a class are not lists.
    """
    above = tuple(path.split("/")[:-2])
    return outer[: len(above)] == above


def _is_listed(folder: Folder, lists: Sequence[LabelList]) -> bool:
    """Return whether a folder is the base folder of a list, or is below such a folder."""
    return any(is_inside("/".join(folder) + "/", each.base) for each in lists)


def _check_apart(root: Tree, train: Tree, lists: Sequence[LabelList]) -> None:
    """Raise PrepError if lists of other splits name images in train's folder."""
    folder = str(train)[len(str(root)) + 1 :]
    for each in lists:
        if is_inside(f"{each.base}/", folder) or is_inside(f"{folder}/", each.base):
            raise PrepError(
                f"{root}: {each.path} names images of {each.split} in"
                f" {each.base or 'SOURCE itself'}, but no list names those of train, whose folder"
                f" is {folder or 'SOURCE itself'}: add a list such as train.txt, or use separate"
                " folders"
            )


def _read_folders(
    root: Tree, folders: set[Folder], choice: str | None, with_classes: bool
) -> tuple[dict[str, Tree], set[Folder]]:
    """Return the tree of each split, and the folders with images that are in no tree.

    folders: all folders with images.
    """
    folder_of = _split_folders(root, folders, choice, with_classes)

    trees: dict[str, Tree] = {}
    rest = folders
    for split in sorted(folder_of, key=("train", "val", "test").index):
        classes = trees["train"].folders() if trees and with_classes else []
        outer = folder_of[split]
        folder = _inner_folder(rest, outer, classes) if with_classes else outer
        may_lack_labels = split == "test" and classes
        if may_lack_labels and _is_unlabeled(rest, folder, classes):
            continue
        trees[split] = subtree(root, folder)
        rest = {each for each in rest if each[: len(folder)] != folder}

    return trees, rest


def _split_folders(
    root: Tree, folders: set[Folder], choice: str | None, with_classes: bool
) -> dict[str, Folder]:
    """Decide which folders are splits. Returns only train if the folders are classes."""
    # An empty val folder may be next to the only folder with images.
    splits_anywhere = set(filter(split_of, set[str]().union(*folders)))
    base = _inner_folder(folders, (), () if choice == "classes" else splits_anywhere)
    tree = subtree(root, base)
    names = _names(folders, base)

    # An empty folder of a split is an error, so include empty folders.
    splits = splits_of_folders(names.union(tree.folders()))
    folder_of = {split: (*base, name) for name, split in splits.items()}
    in_train = _names(folders, _inner_folder(folders, folder_of.get("train", base)))

    others = sorted(names - splits.keys())
    # A class named `train` next to other classes contains images, but no class folders.
    train_is_class = others and not choice and (len(in_train) < 2 or not with_classes)
    are_classes = choice == "classes" or train_is_class or "train" not in folder_of
    if are_classes:
        if choice == "splits":
            raise PrepError(f"{tree}: --layout splits: no folder train in {few(sorted(names))}")
        if with_classes and not choice:
            _check_not_splits(tree, sorted(names))
            _check_not_nested(tree, folders, base, sorted(names))
        return {"train": base if with_classes else ()}

    if not (choice or all(map(UNLABELED.search, others))):
        raise PrepError(
            f"{tree}: two readings are possible. With --layout splits, {few(sorted(splits))}"
            f" are the splits, the classes are {few(sorted(in_train))}, and the images in"
            f" {few(others)} are not used. With --layout classes, the classes are"
            f" {few(sorted(names))}"
        )
    if len(folder_of) < len(splits):
        raise PrepError(
            f"{tree}: some of the folders {few(sorted(splits))} mean the same split: merge,"
            " rename or remove one of them, or use --layout classes if they are classes"
        )
    return folder_of


def _names(folders: set[Folder], outer: Folder) -> set[str]:
    """Return the names of the subfolders of `outer` that contain images at any depth."""
    depth = len(outer)
    return {each[depth] for each in folders if len(each) > depth and each[:depth] == outer}


def _inner_folder(
    folders: set[Folder], outer: Folder = (), classes: Collection[str] = ()
) -> Folder:
    """Step into the only folder with images, unless it is one of `classes` or contains no
    folders."""
    while len(names := _names(folders, outer)) == 1 and not names.intersection(classes):
        if not _names(folders, (*outer, *names)):
            break
        outer = (*outer, *names)
    return outer


def _is_unlabeled(folders: set[Folder], test: Folder, classes: Collection[str]) -> bool:
    """Return whether a test folder has images, but neither class folders nor a table of classes."""
    names = _names(folders, test)
    has_classes = any(
        name in classes
        or not (
            name in test or split_of(name) or UNLABELED.search(name) or OF_IMAGES.fullmatch(name)
        )
        for name in names
    )
    return (test in folders or bool(names)) and not has_classes


def _check_not_splits(tree: Tree, names: Collection[str]) -> None:
    """Raise PrepError if all folders that would be classes are splits other than train."""
    held_out = splits_of_folders(names)
    all_are_splits = bool(names) and len(names) == len(held_out)
    if all_are_splits and "train" not in held_out.values():
        raise PrepError(
            f"{tree}: has {few([f'{name}/' for name in held_out])} but no train/; expected"
            " train/<class>/* and val/<class>/*, or only <class>/*. If these folders are the"
            " classes, use --layout classes"
        )


def _check_not_nested(tree: Tree, folders: set[Folder], base: Folder, names: Sequence[str]) -> None:
    """Raise PrepError if folders that would be classes contain splits or classes."""
    inner = [_names(folders, _inner_folder(folders, (*base, name))) for name in names]
    common = set[str].intersection(*inner) if len(inner) > 1 else set[str]()
    # Subfolders such as 2023 and 2024 are probably not classes, unless all names are numbers.
    may_be_classes = _has_letter(common) or not _has_letter(names)
    share_classes = len(common) > 1 and may_be_classes
    with_splits = list(filter(_has_train_and_other, inner))
    if with_splits or share_classes:
        raise PrepError(
            f"{tree}: two readings are possible, because the folders {few(names)} contain folders"
            f" with equal or usual names ({few(sorted(common.union(*with_splits)))}). If these are"
            " the classes, name the outer folders train, val and test, or merge them. If they are"
            " splits, pass one of the outer folders as SOURCE. If the outer folders are the"
            " classes, use --layout classes"
        )


def _has_train_and_other(names: Collection[str]) -> bool:
    """Return whether some of the names are train and at least one other split."""
    return {"train"} < set(splits_of_folders(names).values())


def _has_letter(names: Collection[str]) -> bool:
    return any(map(str.isalpha, "".join(names)))
