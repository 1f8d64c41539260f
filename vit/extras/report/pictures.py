"""Draw all pictures of a run from its folder and its data.

Mistakes are read from `predictions.npz` and listed in `mistakes.csv`. If a picture cannot be drawn,
the reason is stored, and all other pictures are still drawn.

    runs/<name>/report/
      curves.png  attention.png  confusion.png  confused.png  augmented.png  positions.png
      filters.png  distance.png  tokens.png  norms.png  mistakes.csv
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vit.data.augment.draw import mixes
from vit.data.batches import TrainBatches
from vit.data.loader import Loader
from vit.data.order import divisors
from vit.extras.report import model_figures
from vit.extras.report.attention import check_rollout, rollouts
from vit.extras.report.confusion import (
    NUM_EXAMPLES,
    most_confused,
    plot_confusion,
    plot_most_confused,
)
from vit.extras.report.curves import plot_curves, plot_norms
from vit.extras.report.example_images import pick_images
from vit.extras.report.history import read_history
from vit.extras.report.mistakes import write_mistakes
from vit.extras.report.source import ReportSource, as_sentence
from vit.layers.image_model import ImageModel
from vit.run_folder.paths import CHECKPOINTS, CONFIG_FILE, METRICS_FILE, REPORT_FOLDER
from vit.system.files import remove_leftovers
from vit.training.metrics import predicted_classes

NUM_AUGMENTED = 24
"""The number of images in `augmented.png`."""
NUM_ATTENTION = 12
"""The number of images in `attention.png`. At most `NUM_ATTENTION_WRONG` are mistakes."""
NUM_ATTENTION_WRONG = 4
NUM_DISTANCE = 32
"""The number of images over which `distance.png` averages."""
NUM_CONFUSED_PAIRS = 10
"""The number of rows in `confused.png`. Each row has up to `NUM_EXAMPLES` images."""


class ConfusedPair(NamedTuple):
    """A row of the table of mistakes."""

    true: str
    predicted: str
    num_mistaken: int
    num_images: int
    """The number of images of the true class."""


class ClassAccuracy(NamedTuple):
    """A row of the table of class accuracies."""

    name: str
    num_images: int
    correct: int
    top1: float
    """The accuracy in percent, or NaN for a class without images."""


@dataclass
class Pictures:
    """The pictures of a run, and the reasons for missing pictures."""

    paths: dict[str, Path] = field(default_factory=dict)
    """The PNG file of each picture, keyed by name in the order of `PAINTERS`."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The reason why each missing picture was not drawn, keyed by name."""
    notes: dict[str, str] = field(default_factory=dict)
    """The caption of each drawn picture, keyed by name."""
    confused_pairs: list[ConfusedPair] = field(default_factory=list)
    """The most frequent mistakes of the last evaluation, in descending order."""
    class_accuracies: list[ClassAccuracy] = field(default_factory=list)
    """The accuracy of each class in the last evaluation, in order of class number."""
    num_mistakes: int = 0
    """The number of rows of `mistakes.csv`; 0 without the file."""


def draw_pictures(
    run_dir: Path,
    device: torch.device,
    on_picture: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Pictures:
    """Draw all pictures of a run into `run_dir`/report/, running the model on `device`.

    `on_picture(done, total, name)` is called after each picture. The caller's random state does not
    change. Raises ValueError if `run_dir` is not a run folder.
    """
    names = (METRICS_FILE, CONFIG_FILE, "weights", CHECKPOINTS)
    if not any((run_dir / name).exists() for name in names):
        raise ValueError(
            f"{run_dir}: not a run folder: pass a folder written by launch/train.py, such as"
            " runs/demo"
        )

    source = ReportSource(run_dir, device)
    remove_leftovers(run_dir / REPORT_FOLDER)
    pictures = Pictures()

    # The random state is forked, because a new model draws random weights.
    with torch.random.fork_rng(devices=[]):
        for number, (name, paint) in enumerate(PAINTERS.items(), 1):
            path = run_dir / REPORT_FOLDER / f"{name}.png"
            try:
                pictures.notes[name] = paint(source, path)
                pictures.paths[name] = path
            except Exception as error:  # A failure must not affect other pictures or the run.
                pictures.reasons[name] = as_sentence(error)
            on_picture(number, len(PAINTERS), name)

    with suppress(Exception):  # The confusion matrix already reports this reason.
        pictures.confused_pairs = _confused_pairs(source)
        pictures.class_accuracies = _class_accuracies(source)
        pictures.num_mistakes = write_mistakes(source)
    return pictures


def _paint_curves(source: ReportSource, picture: Path) -> str:
    plot_curves(source.run_dir / METRICS_FILE, picture)
    return "The recorded metrics over steps."


def _paint_norms(source: ReportSource, picture: Path) -> str:
    plot_norms(read_history(source.run_dir / METRICS_FILE).of_kind("norms"), picture)
    return (
        "Norms by depth and step. A column is one measurement. If attention logits keep growing,"
        " training will diverge (docs/training.md)."
    )


def _paint_augmented(source: ReportSource, picture: Path) -> str:
    """Draw the first readable images of step 1, and return the caption."""
    config = source.config
    batch_size = config.data.global_batch_size
    group = config.augment.mix_group_size if mixes(config.augment) else 1

    # Decode only part of the batch, as if this process were one of many ranks.
    parts = [n for n in divisors(batch_size) if n % group == 0 and n >= NUM_AUGMENTED]
    num_rows = min(parts, default=batch_size)
    batches = TrainBatches(
        source.train_set.split,
        source.order,
        config.augment,
        source.train_format,
        rows=range(num_rows),
        on_bad_image=config.loader.on_bad_image,
        changes=source.train_set.changes,
    )

    with Loader(batches, 0, 1) as loader:
        batch = next(loader)
    on_device = batch.to(source.device)
    inputs, targets = source.augment(on_device.images, on_device.labels, batch.table)

    rows = np.flatnonzero(batch.weights.numpy() > 0)[:NUM_AUGMENTED]
    model_figures.plot_augmented(
        inputs[rows].cpu(),
        targets[rows].cpu(),
        mean=config.data.mean,
        std=config.data.std,
        class_names=source.class_names[: source.num_classes],
        picture=picture,
    )
    return f"The first {len(rows)} of the {batch_size:,} images of step 1, as inputs of the model."


def _paint_attention(source: ReportSource, picture: Path) -> str:
    """Draw the attention for validation images. If the predictions are known, some of the images
    are misclassified.

    Returns the caption.
    """
    model: ImageModel = source.model
    check_rollout(model)

    predictions = None
    with suppress(ValueError):
        source.check_same_images()
        predictions = source.predictions[0]
    labels = source.val_split.index["label"].astype(np.int64)
    chosen = pick_images(labels, predictions, NUM_ATTENTION, NUM_ATTENTION_WRONG)

    images = torch.stack([source.eval_image(sample) for sample in chosen])
    relevance, logits = rollouts(model, source.normalize(images))
    predicted = predicted_classes(logits)
    model_figures.plot_attention(
        images,
        relevance,
        labels=labels[chosen].tolist(),
        predictions=predicted.tolist(),
        probabilities=logits.softmax(1).amax(1).tolist(),
        class_names=source.class_names[: source.num_classes],
        picture=picture,
    )

    num_wrong = int((predicted.numpy() != labels[chosen]).sum())
    kind = "averaged weights" if source.weights.averaged else "weights"
    return (
        f"Attention rollout over all blocks (Abnar & Zuidema 2020) for {len(chosen)} validation"
        f" images, {num_wrong} of them misclassified, with the {kind} of step"
        f" {source.weights.step:,}."
    )


def _paint_confusion(source: ReportSource, picture: Path) -> str:
    plot_confusion(source.confusion, source.class_names, picture)
    predictions, _, step = source.predictions
    note = f"Validation images by true and predicted class at step {step:,}."
    num_unknown = int((predictions < 0).sum())
    if num_unknown:
        note += f" {num_unknown:,} images are missing, because the model's outputs were NaN."
    return note


def _paint_confused(source: ReportSource, picture: Path) -> str:
    """Draw examples of the most frequent mistakes, and return the caption."""
    predictions, labels, step = source.predictions
    pairs = most_confused(source.confusion, NUM_CONFUSED_PAIRS)
    if not pairs:
        raise ValueError("No validation image was misclassified")
    source.check_same_images()

    examples = []
    for true, predicted, *_ in pairs:
        places = np.flatnonzero((labels == true) & (predictions == predicted))[:NUM_EXAMPLES]
        examples.append([source.eval_image(int(place)) for place in places])

    plot_most_confused(pairs, examples, source.class_names, picture)
    return f"The most frequent mistakes at step {step:,}, with example images."


def _some_images(source: ReportSource, num: int) -> model_figures.Images:
    """Return `num` validation images from many classes, with their class names."""
    labels = source.val_split.index["label"].astype(np.int64)
    chosen = pick_images(labels, None, num, 0)
    pixels = torch.stack([source.eval_image(sample) for sample in chosen])
    names = [source.class_names[label] for label in labels[chosen]]
    return model_figures.Images(source.normalize, pixels, names)


PAINTERS: dict[str, Callable[[ReportSource, Path], str]] = {
    "curves": _paint_curves,
    "norms": _paint_norms,
    "attention": _paint_attention,
    "confusion": _paint_confusion,
    "confused": _paint_confused,
    "augmented": _paint_augmented,
    "positions": lambda source, picture: model_figures.draw_positions(source.model, picture),
    "filters": lambda source, picture: model_figures.draw_filters(source.model, picture),
    "distance": lambda source, picture: model_figures.draw_distance(
        source.model, _some_images(source, NUM_DISTANCE), picture
    ),
    "tokens": lambda source, picture: model_figures.draw_tokens(
        source.model, _some_images(source, NUM_ATTENTION), picture
    ),
}
"""The functions that draw each picture as a PNG file and return its caption."""


def _confused_pairs(source: ReportSource) -> list[ConfusedPair]:
    return [
        ConfusedPair(
            source.class_names[true], source.class_names[predicted], num_mistaken, num_images
        )
        for true, predicted, num_mistaken, num_images in most_confused(
            source.confusion, NUM_CONFUSED_PAIRS
        )
    ]


def _class_accuracies(source: ReportSource) -> list[ClassAccuracy]:
    predictions, labels, _ = source.predictions
    names = source.class_names
    totals = np.bincount(labels, minlength=len(names)).tolist()
    correct = np.bincount(labels[predictions == labels], minlength=len(names)).tolist()
    return [
        ClassAccuracy(name, total, right, 100.0 * right / total if total else math.nan)
        for name, total, right in zip(names, totals, correct, strict=True)
    ]
