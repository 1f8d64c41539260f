"""Compare the predictions and the attention of two models on the same images.

Each model uses its own preprocessing. The figure shows images that only one model classifies
correctly, sorted by the confidence of the wrong prediction.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vit.extras.report.attention import rollouts
from vit.extras.report.drawing import (
    SMALL_PT,
    Cell,
    cell_width_in,
    display_name,
    plot_cells,
    shorten,
)
from vit.extras.report.example_images import ExampleImages
from vit.extras.report.model_figures import overlaid
from vit.inference.predictor import Trained
from vit.training.metrics import PairedDifference, paired_difference

BATCH = 16
"""The batch size for predictions."""
MAX_EACH = 12
"""The maximum number of images to show that only one of the models classifies correctly, per
model."""


class Compared(NamedTuple):
    """The results of two models on the same N images."""

    labels: Tensor
    """The labels, (N,) int64."""
    predictions: tuple[Tensor, Tensor]
    """The predicted classes of each model, (N,) int64."""
    probabilities: tuple[Tensor, Tensor]
    """The probabilities that each model assigned to its predictions, (N,) float32."""
    difference: PairedDifference

    @property
    def is_right(self) -> tuple[Tensor, Tensor]:
        """A mask of the correct predictions for each model, (N,) bool."""
        first, second = self.predictions
        return first == self.labels, second == self.labels

    def lines(self) -> list[str]:
        """Return the comparison as lines of text."""
        first, second = self.is_right
        count = len(self.labels)
        both = int((first & second).sum())
        only_a, only_b = self.difference.only_first, self.difference.only_second

        return [
            f"A has {int(first.sum()):,} of {count:,} correct ({100 * first.float().mean():.2f} %),"
            f" B {int(second.sum()):,} ({100 * second.float().mean():.2f} %)",
            f"both correct {both:,}, only A {only_a:,}, only B {only_b:,}, both wrong"
            f" {count - both - only_a - only_b:,}",
            f"B against A: {self.difference}",
        ]


def compare(
    models: tuple[Trained, Trained],
    samples: ExampleImages,
    on_images: Callable[[int], None] = lambda done: None,
) -> Compared:
    """Compare two models. Raises ValueError if the classes differ or images have no labels."""
    first, second = models
    if first.class_names != second.class_names:
        raise ValueError(
            f"{first.weights.path} and {second.weights.path} have different classes"
            f" ({len(first.class_names)} and {len(second.class_names)}, or different names):"
            " compare models with the same classes"
        )
    if samples.labels is None:
        raise ValueError(
            "image files have no labels to compare with: compare on a split (--data ROOT)"
        )

    count = len(samples.encoded)
    shares, classes = torch.empty(2, count), torch.empty(2, count, dtype=torch.int64)
    for number, trained in enumerate(models):
        for start in range(0, count, BATCH):
            rows = slice(start, start + BATCH)
            part = ExampleImages(samples.encoded[rows], samples.names[rows])
            inputs = trained.preprocess.normalize(part.pixels(trained))
            probabilities = trained(inputs).float().softmax(1).cpu()
            shares[number, rows], classes[number, rows] = probabilities.max(1)
            on_images(number * count + start + len(part.encoded))

    labels = torch.tensor(samples.labels)
    difference = paired_difference(classes[0] == labels, classes[1] == labels)
    return Compared(labels, (classes[0], classes[1]), (shares[0], shares[1]), difference)


def plot_comparison(
    models: tuple[Trained, Trained], samples: ExampleImages, compared: Compared, picture: Path
) -> Path:
    """Draw images that only one model classifies correctly, with the attention of both models.

    If a model does not support attention rollout, only the image is drawn. Returns `picture`.
    Raises ValueError if both models classify the same images correctly.
    """
    chosen = _differing(compared)
    if not chosen:
        raise ValueError(
            f"no difference to draw: both models classify the same"
            f" {int(compared.is_right[0].sum()):,} of {len(compared.labels):,} images correctly"
        )

    part = ExampleImages([samples.encoded[n] for n in chosen], [samples.names[n] for n in chosen])
    shown = [part.pixels(trained) for trained in models]
    looks = []
    for trained, pixels in zip(models, shown, strict=True):
        try:
            relevance, _ = rollouts(trained.model, trained.preprocess.normalize(pixels))
            looks.append(overlaid(pixels, relevance))
        except ValueError:  # The model may be a convolutional network, for example.
            looks.append(pixels.expand(-1, 3, -1, -1).float() / 255)

    size = shown[0].shape[2:]
    side = cell_width_in(6)
    cells = []
    for row, number in enumerate(chosen):
        cells.append(Cell(shown[0][row], [shorten(samples.names[number], side, SMALL_PT)]))
        for index, trained in enumerate(models):
            look = torch.nn.functional.interpolate(looks[index][row][None], size, mode="nearest")
            predicted = int(compared.predictions[index][number])
            mark = "✓" if predicted == int(compared.labels[number]) else "✗"
            name = shorten(display_name(trained.class_names, predicted), side - 0.65, SMALL_PT)
            share = 100 * float(compared.probabilities[index][number])
            cells.append(Cell(look[0], [f"{mark} {name}: {share:.0f} %"]))

    heading = (
        f"A and B on {len(compared.labels):,} images;"
        f" only A right: {compared.difference.only_first:,},"
        f" only B right: {compared.difference.only_second:,}"
    )
    return plot_cells(cells, 6, heading, picture, ["image", "A", "B", "image", "A", "B"])


def _differing(compared: Compared) -> list[int]:
    """Return images that only one model classifies correctly, up to MAX_EACH per model.

    The most confident mistakes come first.
    """
    first, second = compared.is_right
    chosen: list[int] = []
    for right, wrong, sure in (
        (first, ~second, compared.probabilities[1]),
        (second, ~first, compared.probabilities[0]),
    ):
        numbers = (right & wrong).nonzero()[:, 0]
        order = sure[numbers].argsort(descending=True, stable=True)
        chosen += numbers[order][:MAX_EACH].tolist()
    return chosen
