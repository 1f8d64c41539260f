"""Decide which folders of a source are splits, and which are classes.

`read_layout` looks at the names and the contents of the first two levels. It first steps through
outer folders that contain everything. If the folders allow two readings, or if folders with images
would not be used, the user must choose with --layout.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from data_prep.errors import PrepError, counted, some
from data_prep.read.class_tree import TableTree, Tree
from data_prep.read.split_names import means_unlabelled, splits_of_folders

LAYOUTS = ("splits", "classes")


@dataclass
class Layout:
    """The folder tree of each split."""

    train: Tree
    held_out: dict[str, Tree] = field(default_factory=dict)
    """The trees of val and test, if the source has them."""
    notes: list[str] = field(default_factory=list)
    """Lines about folders that are not used."""

    def use_test_as_val(self) -> None:
        """Use a test split as the validation split, unless the source has both."""
        if "val" not in self.held_out and "test" in self.held_out:
            self.held_out["val"] = self.held_out.pop("test")


def read_layout(root: Tree, choice: str | None, with_classes: bool, out_name: str = "") -> Layout:
    """Find the splits of a source.

    choice: "splits" or "classes" if the user decided what the folders are. with_classes: whether
    folders name the classes of images. out_name: the name of the output folder, if it is in `root`.

    Raises PrepError if two readings are possible, folders with images would not be used, two
    folders are the same split, or there are val images without train images.
    """
    tree = _inner_folder(root)
    names = [name for name in tree.folders() if name != out_name]
    splits = {} if choice == "classes" else splits_of_folders(names)
    train = [name for name, split in splits.items() if split == "train"]
    others = [name for name in names if name not in splits and tree.below(name).has_images()]
    if choice == "splits" and not train:
        raise PrepError(
            f"{tree}: --layout splits needs a folder named train; found {some(names) or 'none'}"
        )
    if with_classes and splits and not train and not others:
        raise PrepError(
            f"{tree}: has {some([f'{name}/' for name in splits])} but no train/; expected"
            " train/<class>/* and val/<class>/*, or only <class>/*. If these folders are the"
            " classes, use --layout classes"
        )
    # A class named `train` beside other classes contains images, but no class folders.
    has_splits = train and (choice or not others or (with_classes and _classes_below(tree, train)))
    if not has_splits:
        if choice is None and with_classes:
            _refuse_common_subfolders(tree, names)
        return Layout(tree if with_classes else root)
    unlabelled = [name for name in others if means_unlabelled(name)]
    if choice is None and len(others) > len(unlabelled):
        raise PrepError(_two_readings(tree, splits, train, sorted({*others} - {*unlabelled})))
    return _splits_of(tree, splits, names, with_classes)


def _splits_of(
    tree: Tree, splits: Mapping[str, str], names: Sequence[str], with_classes: bool
) -> Layout:
    folders = defaultdict[str, list[str]](list)
    for name, split in splits.items():
        folders[split].append(name)
    if twice := [" and ".join(of_split) for of_split in folders.values() if len(of_split) > 1]:
        raise PrepError(
            f"{tree}: these folders mean the same split: {'; '.join(twice)}: merge, rename or"
            " remove one of them, or use --layout classes if they are classes"
        )
    below = {split: tree.below(of_split[0]) for split, of_split in folders.items()}
    layout = Layout(_inner_folder(below["train"]) if with_classes else below["train"])
    if unused := [name for name in names if name not in splits]:
        # _info.json records this text, so rewording it would change the output bytes.
        layout.notes.append(f"folders that are not used: {', '.join(unused)}")
    classes = set(map(normalized, layout.train.classes())) if with_classes else set[str]()
    for split in ("val", "test"):
        if split in below:
            inner = _inner_folder(below[split], classes) if with_classes else below[split]
            if classes and split == "test" and _is_unlabelled(inner, classes):
                layout.notes.append(
                    f"{folders[split][0]}: its images are not in class folders, so they are not"
                    " used; classify them with launch/predict.py"
                )
            else:
                layout.held_out[split] = inner
    return layout


def describe_layout(layout: Layout, root: Tree, val_fraction: float, with_classes: bool) -> str:
    """Describe the splits and the classes in a line, with the folders of the splits."""
    trees = {"train": layout.train, **layout.held_out}
    paths = {split: str(tree).removeprefix(str(root)).strip("/") for split, tree in trees.items()}
    splits = [
        split if path in ("", split) else f"{split} ({path}/)" for split, path in paths.items()
    ]
    if val_fraction:
        splits.insert(1, f"val ({val_fraction:.3g} of train)")
    line = f"{root}: splits: {', '.join(splits)}"
    if with_classes and (classes := layout.train.classes()):
        line += f"; {counted(len(classes), 'class', 'classes')}: {some(classes)}"
    return line


def normalized(name: str) -> str:
    """Return a name in NFC form. macOS stores letters and accents as separate characters."""
    return unicodedata.normalize("NFC", name)


def _inner_folder(tree: Tree, classes: Container[str] = ()) -> Tree:
    """Step into the only folder with images while it contains folders or repeats the outer name.

    A folder named like a split or one of `classes` is not stepped into, unless it repeats the name.
    """
    while not isinstance(tree, TableTree) and not tree.has_images_inside():
        names = list(islice(_with_images(tree), 2))
        if len(names) != 1:
            return tree
        inner = tree.below(names[0])
        repeats = normalized(inner.name).lower() == normalized(tree.name).lower()
        is_known = normalized(inner.name) in classes or splits_of_folders(names)
        if not repeats and (is_known or not any(_with_images(inner))):
            return tree
        tree = inner
    return tree


def _with_images(tree: Tree) -> Iterator[str]:
    """Yield the names of the subfolders that contain images, or the classes of a table."""
    if isinstance(tree, TableTree):
        return iter(tree.classes())
    return (name for name in tree.folders() if tree.below(name).has_images())


def _classes_below(tree: Tree, names: Sequence[str]) -> list[str]:
    return [each for name in names for each in _with_images(_inner_folder(tree.below(name)))]


def _is_unlabelled(tree: Tree, classes: Container[str]) -> bool:
    """Return whether a test folder has images outside folders, or in one folder that is no
    class."""
    if isinstance(tree, TableTree) or not tree.has_images():
        return False
    names = list(islice(_with_images(tree), 2))
    return len(names) < 2 and not any(normalized(name) in classes for name in names)


def _refuse_common_subfolders(tree: Tree, names: Sequence[str]) -> None:
    """Raise PrepError if all folders share some subfolders, which may then be the classes."""
    common: set[str] | None = None
    folders = []
    for name in () if isinstance(tree, TableTree) else names:
        if (folder := tree.below(name)).has_images():
            subfolders = _inner_folder(folder).folders()
            common = set(subfolders) if common is None else common.intersection(subfolders)
            folders.append(name)
            # Subfolders like 2023 and 2024 are hardly classes, unless all names are numbers.
            are_names = any(map(_has_letters, common)) or not any(map(_has_letters, folders))
            if len(common) < 2 or not are_names:
                return
    if common and len(folders) > 1:
        raise PrepError(
            f"{tree}: two readings are possible, because {some(folders)} all have the subfolders"
            f" {some(sorted(common))}. If the subfolders are the classes, name the outer folders"
            " train, val and test, or merge them. If the outer folders are the classes, use"
            " --layout classes"
        )


def _has_letters(name: str) -> bool:
    return any(map(str.isalpha, name))


def _two_readings(
    tree: Tree, splits: Mapping[str, str], train: Sequence[str], others: Sequence[str]
) -> str:
    classes = sorted(set(_classes_below(tree, train)))
    return (
        f"{tree}: two readings are possible. With --layout splits, {some([*splits])} are splits,"
        f" the classes are {some(classes)}, and the images in {some(others)} are not used. With"
        f" --layout classes, the classes are {some(sorted([*splits, *others]))}"
    )
