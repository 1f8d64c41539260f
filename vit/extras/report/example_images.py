"""Which images a picture shows: some of a validation split, or files that a user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.data.open_data import open_split
from vit.inference.inputs import find_inputs
from vit.inference.predictor import Trained


@dataclass(frozen=True)
class Samples:
    """Encoded images, their names, and their classes if they are known."""

    encoded: list[bytes]
    names: list[str]
    """Of files, or of the images' classes."""
    labels: list[int] | None = None
    """Numbers of the classes; None for files."""

    def pixels(self, trained: Trained) -> Tensor:
        """Return the images as the model sees them: (B, C, H, W) uint8.

        Raises ValueError, with its name, for one that cannot be decoded.
        """
        views = []
        for name, data in zip(self.names, self.encoded, strict=True):
            try:
                views.append(trained.preprocess.pixels(data))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return torch.stack(views)


def samples_of_files(words: Sequence[str], num: int) -> Samples:
    """Return the first `num` images of files, folders and tars. Raises ValueError."""
    places = find_inputs(words).places[:num]
    encoded = []
    for place in places:
        try:
            encoded.append(place.read())
        except ValueError as error:
            raise ValueError(f"{place.name}: {error}") from None
    return Samples(encoded, [place.name for place in places])


def samples_of_split(
    trained: Trained, num: int, root: str | None = None, split: str | None = None
) -> Samples:
    """Return up to `num` images of a split, from as many classes as possible, always the same ones.

    By default of the validation split of the run. Raises ValueError if it cannot be opened.
    """
    if root is None and trained.weights.step is None:
        raise ValueError(
            f"{trained.weights.path} was trained elsewhere, on images that are not known here: give"
            " a folder of shards with --data, or images with --image (compare takes only the first)"
        )
    data = trained.config.data
    opened = open_split(data, split or data.val_split, root=root)
    labels = opened.index["label"].astype(np.int64)
    chosen = pick_images(labels, None, num, 0)
    names = [_name_of(trained, opened.class_names, int(labels[sample])) for sample in chosen]
    return Samples(
        [opened.read(sample) for sample in chosen], names, [int(labels[n]) for n in chosen]
    )


def _name_of(trained: Trained, names: Sequence[str], label: int) -> str:
    if label < len(names) and names[label]:
        return names[label]
    known = trained.class_names
    return known[label] if label < len(known) else f"class {label}"


def pick_images(
    labels: NDArray[np.int64], predictions: NDArray[np.int64] | None, num: int, num_wrong: int
) -> list[int]:
    """Return up to `num` images, right ones first, at most `num_wrong` wrong ones last.

    Always the same ones, from as many classes as possible.
    """
    is_wrong = np.zeros(len(labels), bool) if predictions is None else predictions != labels
    wrong = np.flatnonzero(is_wrong)
    right = np.flatnonzero(~is_wrong)
    wrong = wrong[_spread(labels[wrong], num_wrong)]
    right = right[_spread(labels[right], num - len(wrong))]
    return [*right.tolist(), *wrong.tolist()]


def _spread(labels: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Return up to `num` places in `labels`, spread over the classes.

    First one image of each class, then a second of each, and so on; at equal distances among the
    classes if there are more than `num`.
    """
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    turns = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    candidates = order[np.argsort(turns, kind="stable")][: max(num, (turns == 0).sum())]
    num = min(num, len(candidates))
    return candidates[np.arange(num) * len(candidates) // max(num, 1)]
