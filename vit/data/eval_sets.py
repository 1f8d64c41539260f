"""The sets of images that a model is evaluated on: `data.val_split`, and those of `eval.sets`.

    config, classes of the model -> opened splits -> which logits of the model compete, and which
    classes of an image are right -> `EvalSet`s, those of the same images together

Labels are numbers, so classes are found by name: nothing else would show that label 7 of a set of
200 classes is another class than the model's output 7. ImageNet-V2's folders are called 0 to 999,
which are the model's classes themselves, in whichever order the shards have them.
"""

from __future__ import annotations

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
"""Share of images whose own label must be among those that a list without keys gives them. ReaL has
90 %; another order of the images has about one in as many as there are classes."""


@dataclass(frozen=True)
class EvalSet:
    """Images of a split with what is right for them."""

    name: str
    split: Split
    columns: Tensor | None = None
    """(classes,) int64: the model's output for each class of the set; None: all as they are."""
    accepted: Tensor | None = None
    """(num_images, most) int64: all right classes of each image, filled up with -1; None: the
    labels of the split."""

    @property
    def num_scored(self) -> int:
        """Images that count: all but those without a right class."""
        if self.accepted is None:
            return self.split.num_samples
        return int((self.accepted >= 0).any(1).sum())

    @property
    def num_skipped(self) -> int:
        """Images without a right class."""
        return self.split.num_samples - self.num_scored

    def is_right(self, predictions: Tensor) -> Tensor:
        """Return which images that count are predicted right, (num_scored,) bool.

        predictions: (num_images,) int64, as `vit.evaluation.evaluate.Evaluation` has them.
        """
        if self.accepted is None:
            return predictions == torch.from_numpy(self.split.index["label"].astype(np.int64))
        is_scored = (self.accepted >= 0).any(1)
        return (self.accepted == predictions[:, None]).any(1)[is_scored]

    def where(self) -> str:
        """Name images and split, for people."""
        skipped = f" ({self.num_skipped} more have no label)" if self.num_skipped else ""
        return f"{self.num_scored} images of {self.split.name!r}{skipped}"


@dataclass(frozen=True)
class ModelClasses:
    """The outputs of a model."""

    num_classes: int
    namings: Mapping[str, Sequence[str]]
    """Ways of naming them: a remark about each -> the names. Empty if they have none."""


def open_sets(
    config: Config, val_split: Split, model: ModelClasses, world: World
) -> list[tuple[EvalSet, ...]]:
    """Open `eval.sets`, and return all sets, those of the same images together.

    The first of the first group is `data.val_split`. Raises ValueError, with a line for each set
    that cannot be evaluated: shards or labels that are missing or do not fit each other, classes
    that the model does not have.
    """
    groups: dict[tuple[str, str], list[EvalSet]] = {}
    opened: dict[tuple[str, str], Split] = {}
    place = (config.data.root, config.data.val_split)
    opened[place] = val_split
    groups[place] = [EvalSet(VAL, val_split)]
    problems: list[str] = []
    for name, chosen in config.eval.sets.items():
        place = (chosen.root or config.data.root, chosen.split or config.data.val_split)
        try:
            # Together, or a rank that fails alone would miss what the others exchange next.
            with world.fail_together():
                if place not in opened:
                    opened[place] = open_split(config.data, place[1], world, place[0])
            with world.fail_together():
                found = _create_set(name, chosen, opened[place], model, world)
        except ValueError as error:
            joint = ": " if isinstance(error, ShardError) else ""
            problems += [f"eval.sets.{name}{joint}{line}" for line in str(error).splitlines()]
        else:
            groups.setdefault(place, []).append(found)
    with world.fail_together():
        if problems:
            raise ValueError("\n".join(problems))
    return [tuple(sets) for sets in groups.values()]


def _create_set(
    name: str, chosen: EvalSetConfig, split: Split, model: ModelClasses, world: World
) -> EvalSet:
    columns = _find_columns(split, model)
    accepted = None
    if chosen.labels is not None:
        path = Path(chosen.labels)
        found = world.broadcast_from_main(lambda: _read_labels(path, split))
        most = max(map(len, found))
        accepted = torch.tensor([row + [-1] * (most - len(row)) for row in found])
    if columns is not None and chosen.classes == "all":
        if accepted is None:
            accepted = torch.from_numpy(split.index["label"].astype(np.int64))[:, None]
        accepted = torch.where(accepted >= 0, columns[accepted.clamp(min=0)], -1)
        columns = None
    return EvalSet(name, split, columns, accepted)


def _find_columns(split: Split, model: ModelClasses) -> Tensor | None:
    """Return the model's output of each class of `split`, None if they are the same classes.

    Raises ValueError if the model does not have some of them.
    """
    names = split.class_names
    if all(re.fullmatch(r"\d+", name) for name in names) and not _is_known(names, model):
        # Names that are numbers are the model's classes, as the folders of ImageNet-V2 are; a set
        # without names has labels only.
        numbers = [int(name) for name in names] or list(range(split.num_classes))
        if max(numbers) >= model.num_classes:
            raise ValueError(
                f": {split.root} has a class {max(numbers)}, the model has the classes 0 to"
                f" {model.num_classes - 1}: use data with the same classes"
            )
    elif not model.namings:
        raise ValueError(
            f": the classes of {split.root} have names ({few(list(names))}), those of the model"
            " have none to find them by: labels are only numbers"
        )
    else:
        known = min(model.namings.values(), key=lambda known: len({*names} - {*known}))
        place = {name: number for number, name in enumerate(known)}
        if missing := [name for name in names if name not in place]:
            raise ValueError(
                f": the model does not know {len(missing):,} of the {len(names):,} classes of"
                f" {split.root} ({few(missing)}), its own are {few(list(known))}: use data whose"
                " classes have the same names"
            )
        numbers = [place[name] for name in names]
    return None if numbers == list(range(model.num_classes)) else torch.tensor(numbers)


def _is_known(names: Sequence[str], model: ModelClasses) -> bool:
    return any({*names} <= {*known} for known in model.namings.values()) and bool(names)


# --- several right classes for an image -----------------------------------------------------------


def _read_labels(path: Path, split: Split) -> list[list[int]]:
    """Return the right classes of each image of `split`, in its order. Raises ValueError."""
    where = f".labels={path}"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise ValueError(f"{where}: cannot be read ({reason})") from None
    if not isinstance(content, list | dict):
        raise ValueError(f"{where}: expected a list of lists, or a list for each key of an image")
    if len(content) != split.num_samples:
        raise ValueError(
            f"{where}: has labels for {len(content)} images, {split.root} {split.name!r} has"
            f" {split.num_samples}: use the file that was made for these images"
        )
    keys = [split.key(i) for i in range(split.num_samples)]
    if isinstance(content, dict):
        if missing := [key for key in keys if key not in content]:
            raise ValueError(f"{where}: has no labels for {len(missing)} images ({few(missing)})")
        found = [content[key] for key in keys]
    else:
        found = [[] for _ in keys]
        for labels, i in zip(content, _in_order(keys), strict=True):
            found[i] = labels
    rows = [_checked(labels, where, split.num_classes) for labels in found]
    scored = [(row, own) for row, own in zip(rows, split.index["label"], strict=True) if row]
    if not scored:
        raise ValueError(f"{where}: no image has a label")
    if isinstance(content, list):
        agree = sum(int(own) in row for row, own in scored) / len(scored)
        if agree < LEAST_AGREEMENT:
            raise ValueError(
                f"{where}: only {agree:.0%} of the images of {split.root} {split.name!r} have their"
                " own label in this list, so it is in another order than the images' keys, or"
                " numbers other classes: give an object of lists by key"
            )
    return rows


def _in_order(keys: Sequence[str]) -> list[int]:
    """Return the images in the order of the numbers that their keys end with, else of the keys.

    `n01440764_ILSVRC2012_val_00000293` is image 293 of ReaL's list, counted from 1.
    """
    numbers = [re.search(r"\d+$", key) for key in keys]
    ends = [int(found[0]) for found in numbers if found]
    by: Sequence[Any] = ends if len({*ends}) == len(keys) else keys
    return sorted(range(len(keys)), key=by.__getitem__)


def _checked(labels: Any, where: str, num_classes: int) -> list[int]:
    row = labels if isinstance(labels, list) else [labels]
    if wrong := [label for label in row if type(label) is not int or not 0 <= label < num_classes]:
        raise ValueError(
            f"{where}: has a label {json.dumps(wrong[0])}, expected whole numbers from 0 to"
            f" {num_classes - 1}"
        )
    return row
