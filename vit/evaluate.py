"""Exact evaluation: every image of a split once, on any number of ranks.

The data's story: all ranks walk through the same number of batches of one shape
(`vit.data.batches.EvalBatches`); counters add up integers; the total must equal what `_info.json`
promises, or nothing is reported. The class predicted for each image comes along, for confusion
matrices and for comparing two models image by image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit.config import EvalConfig
from vit.data.augment.apply import Augment
from vit.data.batches import EvalBatches, ImageFormat
from vit.data.loader import STALL_TIMEOUT_S, Loader
from vit.data.shards.split import Split
from vit.distributed import World
from vit.metrics import Accuracy, AccuracyCounter, predicted_classes
from vit.run.folder import PREDICTIONS_FILE
from vit.step import autocast


@dataclass(frozen=True)
class Evaluation:
    """What one model did on a split, the same on every rank."""

    accuracy: Accuracy
    predictions: Tensor
    """(num_images,) int64 on the CPU: the predicted class of each sample in the split's order, -1
    where the logits were not numbers."""


def save_predictions(run_dir: Path, result: Evaluation, split: Split, step: int) -> None:
    """Write `predictions.npz` whole, or leave the one before and raise ValueError."""
    path = run_dir / PREDICTIONS_FILE
    hidden = run_dir / f".{PREDICTIONS_FILE}"
    try:
        with hidden.open("wb") as file:
            np.savez(
                file,
                predictions=result.predictions.numpy(),
                labels=split.index["label"].astype(np.int64),
                step=step,
            )
        hidden.replace(path)
    except OSError as error:
        remedy = "make room or mend its permissions"
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); checkpoints are untouched: {remedy}"
        ) from None


@torch.no_grad()
def evaluate(
    models: dict[str, nn.Module],
    split: Split,
    image_format: ImageFormat,
    augment: Augment,
    world: World,
    *,
    batch_size: int,
    view: EvalConfig,
    precision: str,
    num_workers: int = 0,
    stall_timeout_s: float | None = STALL_TIMEOUT_S,
    on_batch: Callable[[int, int], None] | None = None,
) -> dict[str, Evaluation]:
    """Evaluate all `models` in one pass over `split`: name -> Evaluation, the same on every rank.

    `on_batch(done, total)` is called after each batch of this rank.
    """
    batches = EvalBatches(
        split, image_format, view, batch_size, rank=world.rank, world_size=world.size
    )
    counters = {name: AccuracyCounter(world.device) for name in models}
    predictions = {
        name: torch.zeros(split.num_samples, dtype=torch.int64, device=world.device)
        for name in models
    }
    was_training = {name: model.training for name, model in models.items()}
    for model in models.values():
        model.eval()
    loading: dict[str, Any] = {
        "num_workers": num_workers,
        "device": world.device,
        "stall_timeout_s": stall_timeout_s,
    }
    with Loader(batches, 0, len(batches), **loading) as loader:
        for number, batch in enumerate(loader):
            filled = batches.num_filled(number)
            ids = batch.ids[:filled].to(world.device, non_blocking=True)
            inputs = augment.normalize(batch.images)
            for name, model in models.items():
                with autocast(precision, world.device):
                    logits = model(inputs)
                counters[name].add(logits, batch.labels, batch.weights)
                predictions[name][ids] = predicted_classes(logits.float()[:filled])
            if on_batch is not None:
                on_batch(number + 1, len(batches))
    for name, model in models.items():
        model.train(was_training[name])
    results = {
        name: Evaluation(counters[name].result(world), world.sum_(predictions[name]).cpu())
        for name in models
    }
    for result in results.values():
        seen = result.accuracy.num_images
        if seen != split.num_samples:
            raise RuntimeError(
                f"evaluated {seen} images, {split.name!r} has {split.num_samples}: a bug in the"
                " loader, please report it"
            )
    return results
