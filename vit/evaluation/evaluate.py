"""Evaluate models exactly: every image is counted once, regardless of the number of ranks.

Training evaluates its models with an `Evaluator`, and `vit.evaluation.compare` evaluates weights
from files. `vit.data.eval_sets` defines which classes count as correct.

All ranks have the same number of batches, and all batches have the same shape
(`vit.data.batches.EvalBatches`). Padding rows have weight 0. Counters are integers, and a total
that differs from the number of images raises an error. The predicted class of each image is stored
for confusion matrices and for paired comparisons of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit.config.base import VAL, height_width
from vit.config.schema import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig, Config, EvalConfig
from vit.data.augment.apply import Augment
from vit.data.batches import Batch, EvalBatches
from vit.data.eval_sets import EvalSet
from vit.data.image_format import ImageFormat
from vit.data.loader import STALL_TIMEOUT_S, Loader
from vit.data.shards.split import Split
from vit.data.slots import EVAL_READY_BATCHES
from vit.distributed.process_group import World
from vit.layers.precision import autocast
from vit.run_folder.paths import PREDICTIONS_FILE
from vit.step import TrainStep
from vit.system.files import replacing
from vit.training.metrics import Accuracy, AccuracyCounter, predicted_classes


@dataclass(frozen=True)
class Evaluation:
    """A model's result on a set. It is the same on all ranks."""

    accuracy: Accuracy
    predictions: Tensor
    """The predicted class of each sample, (num_images,) int64 on the CPU, in the order of the split
    and with the set's class numbers. The value is -1 if a logit was NaN."""
    probabilities: Tensor
    """The softmax probability of each predicted class, (num_images,) float32 on the CPU."""


class _Count:
    """This rank's counts for a model on a set."""

    def __init__(self, scored: EvalSet, device: torch.device):
        self.scored = scored
        self.columns = None if scored.columns is None else scored.columns.to(device)
        self.accepted = None if scored.accepted is None else scored.accepted.to(device)
        self.counter = AccuracyCounter(device)
        # Each rank writes only its own samples, so the sum over ranks contains all predictions.
        self.predictions = torch.zeros(scored.split.num_samples, dtype=torch.int64, device=device)
        self.probabilities = torch.zeros(scored.split.num_samples, device=device)

    def add(self, logits: Tensor, batch: Batch, ids: Tensor) -> None:
        """Add a batch whose first rows are the samples `ids`, (filled,). The other rows are
        padding."""
        if self.columns is not None:
            logits = logits[:, self.columns]
        weights = batch.weights
        accepted = None
        if self.accepted is not None:
            accepted = torch.full_like(self.accepted[:1], -1).repeat(len(weights), 1)
            accepted[: len(ids)] = self.accepted[ids]
            weights = weights * (accepted >= 0).any(1)

        # Reading the counts would make every batch wait for the device, so leave them there.
        self.counter.add(logits, batch.labels, weights, accepted)

        # Index by sample number, so that the order does not depend on the batch size or the
        # number of ranks.
        logits = logits.float()[: len(ids)]
        self.predictions[ids] = predicted_classes(logits)
        self.probabilities[ids] = logits.softmax(1).amax(1)

    def result(self, world: World) -> Evaluation:
        """Return the result over all ranks."""
        predicted = world.sum_(self.predictions).cpu(), world.sum_(self.probabilities).cpu()
        evaluation = Evaluation(self.counter.result(world), *predicted)
        # Without this check, the accuracy over only some images would look valid.
        if evaluation.accuracy.num_images != self.scored.num_scored:
            raise RuntimeError(
                f"evaluated {evaluation.accuracy.num_images} images, but {self.scored.name!r} has"
                f" {self.scored.num_scored}: this is a bug in the loader, please report it"
            )
        return evaluation


class Took(NamedTuple):
    """The time that an evaluation took, and the time that it waited for data."""

    seconds: float
    data_wait_s: float
    """The time that the slowest rank waited for data."""


def create_evaluators(
    config: Config,
    sets: Sequence[tuple[EvalSet, ...]],
    image_format: ImageFormat,
    train_step: TrainStep,
) -> list[Evaluator]:
    """Create an evaluator for each split, with the augmentation and the ranks of `train_step`."""
    return [
        Evaluator(
            split_sets,
            image_format,
            train_step.augment,
            train_step.world,
            config.eval,
            precision=config.train.precision,
            num_workers=config.loader.num_workers,
            stall_timeout_s=config.loader.stall_timeout_s,
        )
        for split_sets in sets
    ]


@dataclass
class Evaluator:
    """Evaluates models on the sets of one split.

    The first evaluation starts loader workers, which stay idle between evaluations. The workers end
    when `close` is called or the object is deleted.
    """

    sets: tuple[EvalSet, ...]
    """The sets of one split. Each image is predicted only once for all sets."""
    image_format: ImageFormat
    augment: Augment
    """The augmentation. Only its `normalize` is used."""
    world: World
    config: EvalConfig
    precision: str = "fp32"
    num_workers: int = 0
    """The number of loader workers on this rank."""
    stall_timeout_s: float | None = STALL_TIMEOUT_S
    took: Took | None = field(default=None, init=False)
    """The time that the last complete evaluation took."""
    _loader: Loader | None = field(default=None, init=False, repr=False)

    @property
    def split(self) -> Split:
        """The split to which all sets belong."""
        return self.sets[0].split

    @torch.no_grad()
    def evaluate(
        self, models: dict[str, nn.Module], on_batch: Callable[[int, int], None] | None = None
    ) -> dict[str, dict[str, Evaluation]]:
        """Evaluate all `models` in one pass over the split, and return set -> model -> result.

        on_batch: called after each batch with this rank's (finished batches, all batches). If
        `on_batch` raises an error, the evaluation ends, and the next one starts with the first
        batch.
        """
        began_s = time.perf_counter()
        device = self.world.device
        # `on_batch` checks for signals in a collective. A rank with fewer batches would miss one,
        # and the other ranks would wait for it, so all ranks get the same number of batches.
        batches = EvalBatches(
            self.split,
            self.image_format,
            self.config,
            self.config.batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
        )

        counts = {name: [_Count(each, device) for each in self.sets] for name in models}
        # `eval()` turns off dropout and drop path, and freezes batch norm statistics.
        was_training = {name: model.training for name, model in models.items()}
        for model in models.values():
            model.eval()

        try:
            loader = self._from_first_batch(batches)
            for position, batch in enumerate(loader):
                self._add(models, batch, batches.num_filled(position), counts)
                if on_batch is not None:
                    on_batch(position + 1, len(batches))
        finally:  # `on_batch` raises an error to interrupt an evaluation
            for name, model in models.items():
                model.train(was_training[name])

        results: dict[str, dict[str, Evaluation]] = {}
        for number, scored in enumerate(self.sets):
            results[scored.name] = {
                name: counts[name][number].result(self.world) for name in models
            }

        waited_s = torch.zeros(self.world.size, device=device)
        waited_s[self.world.rank].fill_(loader.stats.wait_s)
        slowest_s = float(self.world.sum_(waited_s).max())
        self.took = Took(time.perf_counter() - began_s, slowest_s)
        return results

    def close(self) -> None:
        """End the loader workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _from_first_batch(self, batches: EvalBatches) -> Loader:
        """Return a loader that starts at the first batch. All calls must pass the same batches."""
        if self._loader is not None:
            self._loader.restart()
            return self._loader

        self._loader = Loader(
            batches,
            0,
            len(batches),
            num_workers=self.num_workers,
            max_ready=EVAL_READY_BATCHES,
            device=self.world.device,
            stall_timeout_s=self.stall_timeout_s,
        )
        return self._loader

    def _add(
        self,
        models: dict[str, nn.Module],
        batch: Batch,
        filled: int,
        counts: dict[str, list[_Count]],
    ) -> None:
        """Queue the forward passes of `batch`, and add its first `filled` rows to `counts`."""
        # The other rows are padding, which gives all batches one shape. For a second shape, a
        # compiled model would be compiled again.
        ids = batch.ids[:filled].to(self.world.device, non_blocking=True)
        # All models and sets use the same images, so normalize only once.
        inputs = self.augment.normalize(batch.images)
        for name, model in models.items():
            with autocast(self.precision, self.world.device):
                logits = model(inputs)
            for count in counts[name]:
                count.add(logits, batch, ids)


def evaluate_model(
    model: nn.Module,
    split: Split,
    *,
    image_size: int | tuple[int, int] = 224,
    crop_pct: float = 0.875,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    interpolation: str = "bicubic",
    batch_size: int = 64,
    precision: str = "fp32",
    num_workers: int = 0,
) -> Accuracy:
    """Evaluate a model on every image in a split exactly once, with any number of ranks.

    If `torch.distributed` is initialized, all ranks must call this function. They all get the same
    result.

    Args:
        model: (B, C, H, W) float32 -> (B, num_classes) logits. It is evaluated on the device of its
            weights.
        split: The result of `vit.open_split`.
        image_size: The height and width in pixels, or one number for both.
        crop_pct: The side of the center crop divided by the shorter side of the resized image.
        mean, std: The values per channel, for images scaled to [0, 1]. One value selects grayscale
            images.
        interpolation: `bicubic` or `bilinear`, antialiased.
        batch_size: The number of images per forward pass and rank.
        precision: `fp32`, `bf16` or `fp16` for the forward pass.
        num_workers: The number of decoding processes of this rank; 0 decodes in this process.

    Raises:
        ShardError: An image cannot be read or decoded.
    """
    device = next(model.parameters()).device
    is_distributed = dist.is_initialized()
    world = World(
        dist.get_rank() if is_distributed else 0,
        dist.get_world_size() if is_distributed else 1,
        device,
    )

    evaluator = Evaluator(
        (EvalSet(VAL, split),),
        ImageFormat(height_width(image_size), len(mean), interpolation),
        Augment(AugmentConfig(), split.num_classes, mean, std, device),
        world,
        EvalConfig(batch_size=batch_size, crop_pct=crop_pct),
        precision=precision,
        num_workers=num_workers,
    )

    try:
        return evaluator.evaluate({"model": model})[VAL]["model"].accuracy
    finally:
        evaluator.close()


def save_predictions(run_dir: Path, result: Evaluation, split: Split, step: int) -> None:
    """Write predictions, labels, probabilities and `step` to `predictions.npz`. Predictions and
    labels are (num_images,) int64. The probabilities of the predictions are (num_images,) float32.

    Raises ValueError if the file cannot be written. The previous file is then unchanged.
    """
    path = run_dir / PREDICTIONS_FILE
    try:
        # Replace the file atomically, so that the report can still read the previous version if the
        # process is killed.
        with replacing(path) as file:
            np.savez(
                file,
                predictions=result.predictions.numpy(),
                probabilities=result.probabilities.numpy(),
                labels=split.index["label"].astype(np.int64),
                step=step,
            )
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); checkpoints are untouched: free some"
            " space or fix the permissions"
        ) from None
