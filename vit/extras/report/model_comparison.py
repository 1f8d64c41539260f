"""Compare the predictions and the attention of two models on the same images.

Each model uses its own preprocessing. The figure shows images that only one model classifies
correctly, sorted by the confidence of the wrong prediction.
"""

from collections.abc import Callable, Sequence
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
TITLES = ("image", "A", "B") * 2
"""The column titles of the figure, which shows two images in each row."""
SHARE_IN = 0.65
"""The width of the mark and the probability that surround the name of a predicted class."""


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
    images, images_of_b = (part.pixels(trained) for trained in models)
    size = images.shape[2:]
    looks_a = _with_attention(models[0], images, size)
    looks_b = _with_attention(models[1], images_of_b, size)

    width_in = cell_width_in(len(TITLES))
    class_names = models[0].class_names
    cells = []
    for number, image, look_a, look_b in zip(chosen, images, looks_a, looks_b, strict=True):
        cells += [
            Cell(image, [shorten(samples.names[number], width_in, SMALL_PT)]),
            Cell(look_a, [_verdict(compared, 0, number, class_names, width_in)]),
            Cell(look_b, [_verdict(compared, 1, number, class_names, width_in)]),
        ]

    heading = (
        f"A and B on {len(compared.labels):,} images;"
        f" only A right: {compared.difference.only_first:,},"
        f" only B right: {compared.difference.only_second:,}"
    )
    return plot_cells(cells, len(TITLES), heading, picture, TITLES)


def _with_attention(trained: Trained, pixels: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return a model's input images with its attention, (B, 3, *size) float in [0, 1].

    If the model does not support attention rollout, return the images alone.
    """
    try:
        relevance, _ = rollouts(trained.model, trained.preprocess.normalize(pixels))
        look = overlaid(pixels, relevance)
    except ValueError:  # The model may be a convolutional network, for example.
        look = pixels.expand(-1, 3, -1, -1).float() / 255
    return torch.nn.functional.interpolate(look, size, mode="nearest")


def _verdict(
    compared: Compared, model: int, number: int, class_names: Sequence[str], width_in: float
) -> str:
    """Return whether a model is right about image `number`, and its prediction: "✓ cat: 90 %".

    model: 0 or 1, the position of the model in `compared`.
    """
    predicted = int(compared.predictions[model][number])
    mark = "✓" if predicted == int(compared.labels[number]) else "✗"
    name = shorten(display_name(class_names, predicted), width_in - SHARE_IN, SMALL_PT)
    return f"{mark} {name}: {100 * float(compared.probabilities[model][number]):.0f} %"


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
