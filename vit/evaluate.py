"""Exact evaluation: every image of a split once, on any number of ranks.

Training hands its models to an `Evaluator`; `evaluate_weights` makes one for weights from a file.

All ranks go through the same number of batches of one shape (`vit.data.batches.EvalBatches`). Rows
that only fill the last batches have weight 0. Counters add integers, and their total must equal the
number of images in the split, or nothing is reported. The predicted class of each image is kept,
for confusion matrices and for comparing two models image by image.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor, nn

from vit.config.schema import Config, EvalConfig
from vit.data.augment.apply import Augment, create_augment
from vit.data.batches import Batch, EvalBatches, ImageFormat
from vit.data.loader import STALL_TIMEOUT_S, Loader
from vit.data.shards.split import Split
from vit.data.slots import EVAL_READY_BATCHES
from vit.metrics import Accuracy, AccuracyCounter, interval95, predicted_classes
from vit.model import create_model
from vit.open_data import open_split
from vit.precision import autocast, precision_note
from vit.ranks.distributed import World
from vit.run.folder import PREDICTIONS_FILE
from vit.system.files import replacing
from vit.system.meter import Meter
from vit.weights.class_names import class_mismatch, select_classes
from vit.weights.files import LoadedWeights, load_weights


@dataclass(frozen=True)
class Evaluation:
    """The result of one model on a split, the same on every rank."""

    accuracy: Accuracy
    predictions: Tensor
    """(num_images,) int64 on the CPU: the predicted class of each sample in the split's order, -1
    where the logits were not numbers."""


class Took(NamedTuple):
    """Where the time of an evaluation went."""

    seconds: float
    data_wait_s: float
    """Of the rank that waited longest for its batches."""


@dataclass
class Evaluator:
    """What models are evaluated on, how, and with which workers.

    Workers and their memory come with the first evaluation and stay, at rest, for those after it.
    Close it, or drop it.
    """

    split: Split
    image_format: ImageFormat
    augment: Augment
    """Only its `normalize` is used."""
    world: World
    config: EvalConfig
    precision: str = "fp32"
    num_workers: int = 0
    """Loader processes of this rank."""
    stall_timeout_s: float | None = STALL_TIMEOUT_S
    took: Took | None = field(default=None, init=False)
    """Of the last evaluation that was complete."""
    _loader: Loader | None = field(default=None, init=False, repr=False)

    @torch.no_grad()
    def evaluate(
        self, models: dict[str, nn.Module], on_batch: Callable[[int, int], None] | None = None
    ) -> dict[str, Evaluation]:
        """Evaluate all `models` in one pass over the split, and return an Evaluation by name.

        on_batch: called with (batches done, all batches) of this rank after each batch. What it
        raises ends this evaluation; the next one begins with the first batch again.
        """
        began_s = time.perf_counter()
        device = self.world.device
        num_samples = self.split.num_samples
        # As many batches on each rank: one with fewer would leave the others alone in the
        # collective by which `on_batch` asks all ranks whether to stop.
        batches = EvalBatches(
            self.split,
            self.image_format,
            self.config,
            self.config.batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        counters = {name: AccuracyCounter(device) for name in models}
        # Each rank fills in the samples it has seen and leaves 0 elsewhere: the sum over the ranks
        # puts the predictions together.
        predictions = {
            name: torch.zeros(num_samples, dtype=torch.int64, device=device) for name in models
        }
        # `eval()` switches off dropout and drop path, and freezes the statistics of batch norms.
        was_training = {name: model.training for name, model in models.items()}
        for model in models.values():
            model.eval()

        try:
            loader = self._from_first_batch(batches)
            for position, batch in enumerate(loader):
                self._add(models, batch, batches.num_filled(position), counters, predictions)
                if on_batch is not None:
                    on_batch(position + 1, len(batches))
        finally:  # `on_batch` raises to interrupt an evaluation
            for name, model in models.items():
                model.train(was_training[name])
        # The first host-device sync since the loop began.
        results = {
            name: Evaluation(
                counters[name].result(self.world), self.world.sum_(predictions[name]).cpu()
            )
            for name in models
        }
        for result in results.values():
            # An accuracy over most of the images would look like any other.
            if result.accuracy.num_images != num_samples:
                raise RuntimeError(
                    f"evaluated {result.accuracy.num_images} images, {self.split.name!r} has"
                    f" {num_samples}: a bug in the loader, please report it"
                )
        waited_s = torch.zeros(self.world.size, device=device)
        waited_s[self.world.rank].fill_(loader.stats.wait_s)
        slowest_s = float(self.world.sum_(waited_s).max())
        self.took = Took(time.perf_counter() - began_s, slowest_s)
        return results

    def close(self) -> None:
        """End the workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _from_first_batch(self, batches: EvalBatches) -> Loader:
        """Return a loader of all `batches`, the same ones in each call."""
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
        counters: dict[str, AccuracyCounter],
        predictions: dict[str, Tensor],
    ) -> None:
        """Queue `batch`, of which the first `filled` rows are samples, and what it adds to both."""
        # The other rows only fill the batch: all ranks need batches of one shape, which a compiled
        # model would otherwise be compiled for again.
        ids = batch.ids[:filled].to(self.world.device, non_blocking=True)
        # Once for all models: the weights and their average see the same images.
        inputs = self.augment.normalize(batch.images)
        for name, model in models.items():
            with autocast(self.precision, self.world.device):
                logits = model(inputs)
            # Stays on the device: reading it here would wait for each batch.
            counters[name].add(logits, batch.labels, batch.weights)
            # Indexed by sample and not appended, so that the order does not depend on the number of
            # ranks or on the batch size.
            predictions[name][ids] = predicted_classes(logits.float()[:filled])


def save_predictions(run_dir: Path, result: Evaluation, split: Split, step: int) -> None:
    """Write `predictions.npz`: predictions and labels, (num_images,) int64, and `step`.

    Raises ValueError if it cannot be written; the previous file is then left as it was.
    """
    path = run_dir / PREDICTIONS_FILE
    try:
        # A kill within leaves the file of the evaluation before, which the report still can read.
        with replacing(path) as file:
            np.savez(
                file,
                predictions=result.predictions.numpy(),
                labels=split.index["label"].astype(np.int64),
                step=step,
            )
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); checkpoints are untouched: free some"
            " space or fix the permissions"
        ) from None


# --- weights from a file --------------------------------------------------------------------------


class Result(NamedTuple):
    """The evaluation of weights, the same on every rank."""

    evaluation: Evaluation
    as_json: dict[str, Any]
    """What `launch/eval.py --json` prints."""


def evaluate_weights(
    loaded: LoadedWeights, config: Config, world: World, out: TextIO, selected: bool = False
) -> Result:
    """Evaluate `loaded` on the validation split of `config` and print the result to `out`.

    `config` may have a different image size than the weights were trained at: positions are
    resampled. selected: of the head use the rows of the data's classes only, by name. Raises
    ValueError if the data have more classes than the weights, or others where they are selected.
    """
    split = open_split(config.data, config.data.val_split, world)
    # A label beyond the head has no logit. Fewer classes are fine if they are the first of the same
    # classes; `class_mismatch` below compares the names.
    with world.fail_together():
        if selected:
            loaded = select_classes(loaded, split.class_names)
        assert loaded.num_classes is not None, "it came with its config"
        if split.num_classes > loaded.num_classes:
            raise ValueError(
                f"{split.root}: has {split.num_classes} classes, {loaded.path} knows"
                f" {loaded.num_classes}: use data with the same classes"
            )
        model = create_model(config.model, num_classes=loaded.num_classes)
        notes = load_weights(model, loaded.weights, loaded.grid_size)
    # Not wrapped by DDP: each rank evaluates its own share, and only the counters are added up.
    model.to(world.device)
    if world.is_main and (
        slow := precision_note(config.train.precision, world.device, "--precision")
    ):
        print(f"note: {slow}", file=sys.stderr)

    evaluator = Evaluator(
        split,
        ImageFormat.from_config(config.model, config.data),
        create_augment(config.augment, config.data, loaded.num_classes, world.device),
        world,
        config.eval,
        precision=config.train.precision,
        num_workers=config.data.num_workers,
        stall_timeout_s=config.data.stall_timeout_s,
    )
    size = config.model.size_text()
    with (
        closing(evaluator),
        Meter(f"evaluating at {size}", split.num_samples, "images", shown=world.is_main) as meter,
    ):
        result = evaluator.evaluate(
            {"model": model},
            on_batch=lambda done, total: meter.update(split.num_samples * done // total),
        )["model"]

    accuracy = result.accuracy
    low, high = interval95(accuracy.correct_top1, accuracy.num_images)
    as_json: dict[str, Any] = {**accuracy.to_dict(), "top1_low": low, "top1_high": high}
    if loaded.notes or loaded.class_names is None:  # weights of another program
        notes = loaded.report(notes)
    lines = [*notes, str(accuracy)]
    # Labels are compared by number. Without this an accuracy on other classes would look valid.
    if mismatch := class_mismatch(loaded, split.class_names, split.num_classes):
        as_json["note"] = mismatch
        lines.append(f"note: {mismatch}")
    if world.is_main:
        averaged = ", averaged weights" if loaded.averaged else ""
        which = "" if loaded.step is None else f" (step {loaded.step}{averaged})"
        heading = f"{loaded.path}{which} on {split.root} {split.name!r}"
        lines.insert(0, f"{heading}: {split.num_samples} images at {size}")
        print("\n  ".join(lines), file=out)
    return Result(result, as_json)
