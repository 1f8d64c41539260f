"""The image sets on which a model is evaluated: `data.val_split` and `eval.sets`.

Each `EvalSet` contains a split, the model outputs that belong to its classes, and the correct
classes of each image.

Classes are matched by name, because label 7 of a 200-class set is rarely output 7 of the model, and
no later check detects a mismatch. ImageNet-V2's folders are named 0 to 999. These names are the
model's class numbers, regardless of the order of the shards.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.config.base import VAL
from vit.config.schema import Config, EvalSetConfig
from vit.data.open_data import open_split
from vit.data.shards.split import Split
from vit.distributed.process_group import World
from vit.system.files import ShardError
from vit.system.spelling import few

LEAST_AGREEMENT = 0.5
"""The minimum fraction of images whose stored label must be among the labels that a list without
keys contains for them. ReaL's list reaches 90 %. A list in the wrong order reaches about 1 /
(number of classes)."""


@dataclass(frozen=True)
class EvalSet:
    """The images of a split and their correct classes."""

    name: str
    split: Split
    columns: Tensor | None = None
    """(classes,) int64: the model output for each class of the set; None if class i is output i."""
    accepted: Tensor | None = None
    """(num_images, most) int64: all correct classes of each image, padded with -1; None to use the
    labels of the split."""

    @property
    def num_scored(self) -> int:
        """The number of images with at least one correct class. No other images are scored."""
        if self.accepted is None:
            return self.split.num_samples
        return int((self.accepted >= 0).any(1).sum())

    @property
    def num_skipped(self) -> int:
        """The number of images without a correct class."""
        return self.split.num_samples - self.num_scored

    def is_right(self, predictions: Tensor) -> Tensor:
        """Return whether each scored image is predicted correctly, (num_scored,) bool.

        predictions: (num_images,) int64, see `vit.evaluation.evaluate.Evaluation`.
        """
        if self.accepted is None:
            return predictions == torch.from_numpy(self.split.index["label"].astype(np.int64))
        is_scored = (self.accepted >= 0).any(1)
        return (self.accepted == predictions[:, None]).any(1)[is_scored]

    def where(self) -> str:
        """Return the number of images and the split name as text for a message."""
        skipped = f" ({self.num_skipped} more have no label)" if self.num_skipped else ""
        return f"{self.num_scored} images of {self.split.name!r}{skipped}"


@dataclass(frozen=True)
class ModelClasses:
    """The classes that a model can predict."""

    num_classes: int
    namings: Mapping[str, Sequence[str]]
    """Maps a note about each naming scheme to the class names; empty if the model has no names."""


def open_sets(
    config: Config, val_split: Split, model: ModelClasses, world: World
) -> list[tuple[EvalSet, ...]]:
    """Open `eval.sets`, and return all sets, grouped by their images.

    The first set of the first group is `data.val_split`. Raises ValueError with one line per set
    that cannot be evaluated. Possible causes are missing shards or labels, labels that do not match
    the shards, and classes that the model lacks.
    """
    val_key = (config.data.root, config.data.val_split)
    opened = {val_key: val_split}
    groups = {val_key: [EvalSet(VAL, val_split)]}
    problems: list[str] = []

    for name, chosen in config.eval.sets.items():
        key = (chosen.root or config.data.root, chosen.split or config.data.val_split)
        try:
            # If one rank failed alone, the other ranks would wait for it at the next collective.
            with world.fail_together():
                if key not in opened:
                    opened[key] = open_split(config, key[1], world, key[0])
            with world.fail_together():
                eval_set = _create_set(name, chosen, opened[key], model, world)
        except ValueError as error:
            joint = ": " if isinstance(error, ShardError) else ""
            problems += [f"eval.sets.{name}{joint}{line}" for line in str(error).splitlines()]
        else:
            groups.setdefault(key, []).append(eval_set)

    with world.fail_together():
        if problems:
            raise ValueError("\n".join(problems))
    return [tuple(sets) for sets in groups.values()]


def _create_set(
    name: str, chosen: EvalSetConfig, split: Split, model: ModelClasses, world: World
) -> EvalSet:
    """Return a set. With `classes: all`, its labels become the model's class numbers."""
    columns = _find_columns(split, model)
    accepted = None
    if chosen.labels is not None:
        path = Path(chosen.labels)
        labels = world.broadcast_from_main(lambda: _read_labels(path, split))
        most = max(map(len, labels))
        accepted = torch.tensor([row + [-1] * (most - len(row)) for row in labels])

    if columns is not None and chosen.classes == "all":
        if accepted is None:
            accepted = torch.from_numpy(split.index["label"].astype(np.int64))[:, None]
        accepted = torch.where(accepted >= 0, columns[accepted.clamp(min=0)], -1)
        columns = None
    return EvalSet(name, split, columns, accepted)


def _find_columns(split: Split, model: ModelClasses) -> Tensor | None:
    """Return the model output for each class of `split`, or None if class i is output i.

    Raises ValueError if the model lacks a class of `split`.
    """
    names = split.class_names
    has_classes = any({*names} & {*naming} for naming in model.namings.values())
    if all(re.fullmatch(r"\d+", name) for name in names) and not has_classes:
        # Treat numeric folder names, as in ImageNet-V2, as the model's class numbers. If the set
        # has no class names, its labels are the class numbers.
        numbers = [int(name) for name in names] or list(range(split.num_classes))
        if max(numbers) >= model.num_classes:
            raise ValueError(
                f": {split.root} has class {max(numbers)}, but the model's classes are 0 to"
                f" {model.num_classes - 1}: use data with the same classes"
            )
    elif not model.namings:
        raise ValueError(
            f": the classes of {split.root} have names ({few(list(names))}), but the model's"
            " classes do not: use data whose labels are the model's class numbers"
        )
    else:
        # A model may have folder names and English names. Use the naming scheme that matches the
        # most names.
        model_names = min(model.namings.values(), key=lambda naming: len({*names} - {*naming}))
        numbers = _match_names(split, model_names)

    return None if numbers == list(range(model.num_classes)) else torch.tensor(numbers)


def _match_names(split: Split, model_names: Sequence[str]) -> list[int]:
    """Return the model output that has the name of each class in `split`. Raises ValueError."""
    names = split.class_names
    output = {name: number for number, name in enumerate(model_names)}
    missing = [name for name in names if name not in output]
    if missing:
        raise ValueError(
            f": the model lacks {len(missing):,} of the {len(names):,} classes of {split.root}"
            f" ({few(missing)}); its own classes are {few(list(model_names))}: use data whose"
            " classes have the same names"
        )

    ambiguous = [name for name in names if list(model_names).count(name) > 1]
    if ambiguous:
        raise ValueError(
            f": the model has several classes called {few(ambiguous)}: use data whose classes have"
            " unique names, such as WordNet ids"
        )

    return [output[name] for name in names]


# --- several correct classes for an image ---------------------------------------------------------


def _read_labels(path: Path, split: Split) -> list[list[int]]:
    """Return the correct classes of each image, in the split's order. Raises ValueError."""
    # The caller prepends `eval.sets.NAME` to this text.
    setting = f".labels={path}"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise ValueError(f"{setting}: cannot be read ({reason})") from None

    if not isinstance(content, list | dict):
        raise ValueError(
            f"{setting}: expected a list of lists, or an object that maps image keys to lists"
        )
    if len(content) != split.num_samples:
        raise ValueError(
            f"{setting}: has labels for {len(content)} images, but {split.root} {split.name!r} has"
            f" {split.num_samples}: use the file that was made for these images"
        )

    keys = [split.key(i) for i in range(split.num_samples)]
    if isinstance(content, dict):
        missing = [key for key in keys if key not in content]
        if missing:
            raise ValueError(f"{setting}: has no labels for {len(missing)} images ({few(missing)})")
        image_labels = [content[key] for key in keys]
    else:
        image_labels = [[] for _ in keys]
        for labels, i in zip(content, _in_order(keys), strict=True):
            image_labels[i] = labels

    rows = [_checked(labels, setting, split.num_classes) for labels in image_labels]
    scored = [(row, label) for row, label in zip(rows, split.index["label"], strict=True) if row]
    if not scored:
        raise ValueError(f"{setting}: no image has a label")

    if isinstance(content, list):
        agree = sum(int(label) in row for row, label in scored) / len(scored)
        if agree < LEAST_AGREEMENT:
            raise ValueError(
                f"{setting}: only {agree:.0%} of the labels of {split.root} {split.name!r} agree"
                " with this list: sort the list by image key and use the same class numbers, or"
                " give an object that maps each key to a list of labels"
            )
    return rows


def _in_order(keys: Sequence[str]) -> list[int]:
    """Return image indices sorted by the number at the end of the key, or by key if numbers are not
    unique.

    `n01440764_ILSVRC2012_val_00000293` is image 293 of ReaL's list, counted from 1.
    """
    numbers = [re.search(r"\d+$", key) for key in keys]
    ends = [int(match[0]) for match in numbers if match]
    sort_keys: Sequence[Any] = ends if len({*ends}) == len(keys) else keys
    return sorted(range(len(keys)), key=sort_keys.__getitem__)


def _checked(labels: Any, setting: str, num_classes: int) -> list[int]:
    row = labels if isinstance(labels, list) else [labels]
    invalid = [label for label in row if type(label) is not int or not 0 <= label < num_classes]
    if invalid:
        raise ValueError(
            f"{setting}: contains the label {json.dumps(invalid[0])}, expected whole numbers from 0"
            f" to {num_classes - 1}"
        )
    return row
