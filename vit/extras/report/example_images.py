"""Select images for a figure from a validation split or from files."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.data.open_data import open_split
from vit.extras.report.drawing import display_name
from vit.inference.inputs import find_inputs
from vit.inference.predictor import Trained


@dataclass(frozen=True)
class ExampleImages:
    """The encoded images, with their names and, if known, their classes."""

    encoded: list[bytes]
    names: list[str]
    """The names of the files, or the class names of the images."""
    labels: list[int] | None = None
    """The class numbers, or None for files."""

    def pixels(self, trained: Trained) -> Tensor:
        """Return the images after the model's resize and crop, (B, C, H, W) uint8.

        Raises a ValueError that names the image that cannot be decoded.
        """
        views = []
        for name, data in zip(self.names, self.encoded, strict=True):
            try:
                views.append(trained.preprocess.pixels(data))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return torch.stack(views)


def samples_of_files(paths: Sequence[str], num: int) -> ExampleImages:
    """Return the first `num` images of files, folders and tars. Raises ValueError if none exist."""
    places = find_inputs(paths).places[:num]
    encoded = []
    for place in places:
        try:
            encoded.append(place.read())
        except ValueError as error:
            raise ValueError(f"{place.name}: {error}") from None
    return ExampleImages(encoded, [place.name for place in places])


def samples_of_split(
    trained: Trained, num: int, root: str | None = None, split: str | None = None
) -> ExampleImages:
    """Return up to `num` images of a split, from as many classes as possible.

    The choice is deterministic. The default is the run's validation split. Raises ValueError if the
    split cannot be opened.
    """
    if root is None and trained.weights.step is None:
        raise ValueError(
            f"{trained.weights.path} was trained elsewhere, on unknown images: pass a folder of"
            " shards with --data, or images with --image (compare accepts only --data)"
        )

    opened = open_split(trained.config, split or trained.config.data.val_split, root=root)
    labels = opened.index["label"].astype(np.int64)
    chosen = pick_images(labels, None, num, 0)

    class_names = opened.class_names if any(opened.class_names) else trained.class_names
    names = [display_name(class_names, int(labels[sample])) for sample in chosen]
    return ExampleImages(
        [opened.read(sample) for sample in chosen], names, [int(labels[n]) for n in chosen]
    )


def pick_images(
    labels: NDArray[np.int64], predictions: NDArray[np.int64] | None, num: int, num_wrong: int
) -> list[int]:
    """Return up to `num` images: correctly classified ones, then at most `num_wrong` mistakes.

    The choice is deterministic and covers as many classes as possible.
    """
    is_wrong = np.zeros(len(labels), bool) if predictions is None else predictions != labels
    wrong = np.flatnonzero(is_wrong)
    right = np.flatnonzero(~is_wrong)
    wrong = wrong[_spread(labels[wrong], num_wrong)]
    right = right[_spread(labels[right], num - len(wrong))]
    return [*right.tolist(), *wrong.tolist()]


def _spread(labels: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Return up to `num` indices into `labels`, spread over the classes.

    The first image of each class is chosen before any second image. With more than `num` classes,
    evenly spaced classes are chosen.
    """
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    turns = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    candidates = order[np.argsort(turns, kind="stable")][: max(num, (turns == 0).sum())]
    num = min(num, len(candidates))
    return candidates[np.arange(num) * len(candidates) // max(num, 1)]
