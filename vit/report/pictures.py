"""All pictures of a run, from what lies on disk: its folder and, for pictures of images, its data.

The data's story: a run folder is read as it lies there, finished, stopped, killed or still going
on, never the live run. Config and weights give the model, the data folder gives images,
`predictions.npz` says what was taken for what, and `vit.report.plots` draws. Each picture is drawn
by itself: one that cannot be drawn leaves its reason in a sentence and the others alone.

    runs/<name>/report/  curves.png  attention.png  confusion.png  confused.png  augmented.png  positions.png
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vit.data.augment.apply import create_augment
from vit.data.augment.draw import mixes
from vit.data.batches import ImageFormat, TrainBatches
from vit.data.loader import Loader
from vit.data.order import divisors
from vit.metrics import predicted_classes
from vit.plan import create_order
from vit.report import plots
from vit.report.attention import attention_maps, attention_rollout
from vit.report.confusion import most_confused, plot_confusion, plot_most_confused
from vit.report.curves import plot_curves
from vit.report.source import ReportSource, sentence
from vit.run.folder import CHECKPOINTS, CONFIG_FILE, METRICS_FILE, REPORT_FOLDER
from vit.weights import LoadedWeights

NUM_AUGMENTED = 24
NUM_ATTENTION = 12
NUM_ATTENTION_WRONG = 4
NUM_CONFUSED_PAIRS = 10
NUM_EXAMPLES = 6
"""Images in `augmented.png`; in `attention.png`, and how many of those were mistaken; rows and
columns of `confused.png`."""


class ConfusedPair(NamedTuple):
    """A row of the table of mistakes."""

    true: str
    predicted: str
    num_mistaken: int
    num_images: int
    """Of the true class."""


class ClassAccuracy(NamedTuple):
    """A row of the table of classes."""

    name: str
    num_images: int
    correct: int
    top1: float
    """Percent; NaN for a class without images."""


@dataclass
class Pictures:
    """What `draw_pictures` could draw, and why not the rest."""

    paths: dict[str, Path] = field(default_factory=dict)
    """Name -> PNG, in the order of `PAINTERS`."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Name -> why there is none, in a sentence."""
    notes: dict[str, str] = field(default_factory=dict)
    """Name -> what is to be seen, for those that were drawn."""
    confused_pairs: list[ConfusedPair] = field(default_factory=list)
    """The commonest mistakes of the newest evaluation, most frequent first."""
    class_accuracies: list[ClassAccuracy] = field(default_factory=list)
    """Each class in the newest evaluation, by class number."""


# --- the pictures ---------------------------------------------------------------------------------


def draw_pictures(
    run_dir: Path, device: torch.device, on_picture: Callable[[int, int, str], None] | None = None
) -> Pictures:
    """Draw what `run_dir` has the means for into `run_dir`/report/, the model on `device`. A
    picture that fails leaves a reason.

    Raises ValueError if `run_dir` is no run folder or cannot be written. The random numbers of the
    caller are left alone.
    """
    if not any(
        (run_dir / name).exists() for name in (METRICS_FILE, CONFIG_FILE, "weights", CHECKPOINTS)
    ):
        there = "has neither config.yaml nor metrics.jsonl" if run_dir.is_dir() else "is no folder"
        raise ValueError(
            f"{run_dir}: not a run folder, it {there}: name a folder that launch/train.py has"
            " written, such as runs/demo"
        )
    folder = run_dir / REPORT_FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None
    source = ReportSource(run_dir, device)
    drawn = Pictures()
    with torch.random.fork_rng(devices=[]):  # a new model draws weights before it gets the run's
        for number, (name, paint) in enumerate(PAINTERS.items()):
            try:
                drawn.notes[name] = paint(source, folder / f"{name}.png")
                drawn.paths[name] = folder / f"{name}.png"
            except Exception as error:
                # a picture must not decide about the others, nor about the run that asks for it
                drawn.reasons[name] = sentence(error)
            if on_picture is not None:
                on_picture(number + 1, len(PAINTERS), name)
    with suppress(Exception):  # the reason is at the confusion matrix
        drawn.confused_pairs = _confused_pairs(source)
        drawn.class_accuracies = _class_accuracies(source)
    return drawn


def _paint_curves(source: ReportSource, picture: Path) -> str:
    plot_curves(source.run_dir / METRICS_FILE, picture)
    return "What the record says, over the steps."


def _paint_augmented(source: ReportSource, picture: Path) -> str:
    """The first rows of the run's first batch. The order is asked as by one of many ranks, which
    decodes their rows and no others."""
    config = source.config
    train = source.train_set
    batch_size = config.data.global_batch_size
    order = create_order(config, train.num_draws, train.shares)
    shares = [
        n
        for n in divisors(batch_size)
        if n % (config.augment.mix_group_size if mixes(config.augment) else 1) == 0
    ] or [batch_size]
    share = next((n for n in shares if n >= NUM_AUGMENTED), shares[-1])
    batches = TrainBatches(
        train.split,
        order,
        config.augment,
        ImageFormat.from_config(config.model, config.data),
        world_size=batch_size // share,
        on_bad_image=config.data.on_bad_image,
    )
    with Loader(batches, 0, 1) as loader:
        batch = next(loader)
    on_device = batch.to(source.device)
    inputs, targets = create_augment(
        config.augment, config.data, source.num_classes, source.device
    )(on_device.images, on_device.labels, batch.table)
    rows = np.flatnonzero(batch.weights.numpy() > 0)[:NUM_AUGMENTED]
    mean = config.data.mean
    std = config.data.std
    names = source.class_names[: source.num_classes]
    plots.plot_augmented(inputs[rows].cpu(), targets[rows].cpu(), mean, std, names, picture)
    return f"The first {len(rows)} of the {batch_size:,} images of step 1, as the model saw them."


def _paint_attention(source: ReportSource, picture: Path) -> str:
    try:
        predictions = source.predictions[0]
        source.check_same_images()
    except ValueError:
        predictions = None
    labels = source.val_split.index["label"].astype(np.int64)
    chosen = pick_images(labels, predictions, NUM_ATTENTION, NUM_ATTENTION_WRONG)
    images = torch.stack([source.eval_image(sample) for sample in chosen])
    model: Any = source.model
    inputs = create_augment(
        source.config.augment, source.config.data, source.num_classes, source.device
    ).normalize(images.to(source.device))
    logits = []
    relevance = []
    with torch.no_grad():
        # one after the other: a ViT-H at 518 pixels holds 4 GB of attention for each
        for one in inputs.split(1):
            maps = attention_maps(model, one)
            rolled = attention_rollout(
                maps, getattr(model, "num_prefix_tokens", 0), getattr(model, "global_pool", "avg")
            )
            relevance.append(rolled.unflatten(1, _grid(source.trained, model)).cpu())
            logits.append(model(one).float().cpu())
    predicted = predicted_classes(torch.cat(logits))
    probabilities = torch.cat(logits).softmax(1).amax(1)
    wrong = int((predicted.numpy() != labels[chosen]).sum())
    names = source.class_names[: source.num_classes]
    plots.plot_attention(
        images,
        torch.cat(relevance),
        torch.from_numpy(labels[chosen]),
        predicted,
        probabilities,
        names,
        picture,
    )
    which = "averaged weights" if source.trained.averaged else "weights"
    return (
        f"Where the {which} of step {source.trained.step:,} look in {len(chosen)} validation"
        f" images, {wrong} of them taken for something else: attention rolled out over all blocks"
        " (Abnar & Zuidema 2020)."
    )


def _grid(trained: LoadedWeights, model: Any) -> tuple[int, int]:
    grid = trained.grid_size or getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None:
        raise ValueError("The model does not say how its patches lie")
    return grid[0], grid[1]


def pick_images(
    labels: NDArray[np.int64], predictions: NDArray[np.int64] | None, num: int, num_wrong: int
) -> list[int]:
    """Up to `num` images, right ones first, at most `num_wrong` wrong ones last; always the same
    ones, from as many classes as possible."""
    wrong = (
        np.flatnonzero(predictions != labels) if predictions is not None else np.empty(0, np.int64)
    )
    wrong = wrong[_spread(_round_robin(labels[wrong]), num_wrong)]
    right = (
        np.flatnonzero(predictions == labels) if predictions is not None else np.arange(len(labels))
    )
    return [
        *right[_spread(_round_robin(labels[right]), num - len(wrong))].tolist(),
        *wrong.tolist(),
    ]


def _round_robin(labels: NDArray[np.int64]) -> list[list[int]]:
    """Places in `labels` in rounds: the first image of each class, by class; then the second of
    each; and so on."""
    seen = dict[int, int]()
    rounds = list[list[int]]()
    for place in np.argsort(labels, kind="stable").tolist():
        turn = seen[labels[place]] = seen.get(labels[place], -1) + 1
        rounds += [[]] if turn == len(rounds) else []
        rounds[turn].append(place)
    return rounds


def _spread(rounds: list[list[int]], num: int) -> list[int]:
    """`num` places: whole rounds, and of the one that is too long, places evenly far apart."""
    chosen: list[int] = []
    for places in rounds:
        wanted = min(num - len(chosen), len(places))
        chosen += [places[i * len(places) // wanted] for i in range(wanted)]
    return chosen


def _paint_positions(source: ReportSource, picture: Path) -> str:
    trained = source.trained
    positions = trained.weights.get("pos_embed")
    if positions is None:
        raise ValueError(f"{source.config.model.name} has no position embeddings to compare")
    grid = trained.grid_size
    if grid is None or positions.ndim != 3 or positions.shape[1] < math.prod(grid):
        raise ValueError(
            f"The positions of {source.config.model.name} {tuple(positions.shape)} do not lie on a"
            " grid"
        )
    plots.plot_position_similarity(positions[0, -math.prod(grid) :].float(), grid, picture)
    kind = "fixed" if source.config.model.pos_embed == "sincos2d" else "learned"
    return (
        f"Cosine similarity of each {kind} position with all others: one small map for each place"
        f" of the {grid[0]} × {grid[1]} patches."
    )


def _paint_confusion(source: ReportSource, picture: Path) -> str:
    plot_confusion(source.confusion, source.class_names, picture)
    predictions, _, step = source.predictions
    unknown = int((predictions < 0).sum())
    missing = (
        f" {unknown:,} images are missing: what the model made of them was no number."
        if unknown
        else ""
    )
    return (
        "Validation images by their class and by what they were taken for, at step"
        f" {step:,}.{missing}"
    )


def _paint_confused(source: ReportSource, picture: Path) -> str:
    predictions, labels, step = source.predictions
    pairs = most_confused(source.confusion, NUM_CONFUSED_PAIRS)
    if not pairs:
        raise ValueError("No validation image was taken for another class")
    source.check_same_images()
    places = [
        np.flatnonzero((labels == true) & (predictions == taken))[:NUM_EXAMPLES]
        for true, taken, *_ in pairs
    ]
    examples = [
        [source.eval_image(int(place)).permute(1, 2, 0).numpy() for place in found]
        for found in places
    ]
    plot_most_confused(pairs, examples, source.class_names, picture)
    return f"The commonest mistakes at step {step:,}, with the first images of each."


PAINTERS: dict[str, Callable[[ReportSource, Path], str]] = {
    "curves": _paint_curves,
    "attention": _paint_attention,
    "confusion": _paint_confusion,
    "confused": _paint_confused,
    "augmented": _paint_augmented,
    "positions": _paint_positions,
}
"""Each draws its PNG and says what is to be seen, or raises with the reason why not."""


def _confused_pairs(source: ReportSource) -> list[ConfusedPair]:
    pairs = most_confused(source.confusion, NUM_CONFUSED_PAIRS)
    return [
        ConfusedPair(source.class_names[true], source.class_names[taken], count, total)
        for true, taken, count, total in pairs
    ]


def _class_accuracies(source: ReportSource) -> list[ClassAccuracy]:
    predictions, labels, _ = source.predictions
    num = len(source.class_names)
    totals = np.bincount(labels, minlength=num)
    correct = np.bincount(labels[predictions == labels], minlength=num)
    return [
        ClassAccuracy(
            name, int(total), int(right), 100.0 * int(right) / int(total) if total else math.nan
        )
        for name, total, right in zip(source.class_names, totals, correct, strict=True)
    ]
