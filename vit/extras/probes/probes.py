"""Measure the features of a frozen model with k-NN and a linear probe.

`run_probes` extracts the features of training and validation images and returns one `Probed` per k
and one for the linear probe. All images of `data.train_split` are used, even if the run was trained
on fewer, and are processed as in evaluation. The model's head is not used.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit.config.schema import Config
from vit.data.augment.apply import Augment
from vit.data.open_data import open_split
from vit.data.shards.split import Split
from vit.distributed.process_group import World
from vit.evaluation.features import extract_features, num_features_of
from vit.extras.probes.knn import classify
from vit.extras.probes.linear_probe import ROWS, fit_probe, logits_of
from vit.system.meter import Meter
from vit.training.metrics import Accuracy, AccuracyCounter, format_interval, format_top5, interval95


@dataclass(frozen=True)
class Probed:
    """The result of one probe, equal on all ranks."""

    name: str
    """`knn 20` or `linear probe`. Set names contain no spaces, so no set has such a name."""
    is_right: Tensor
    """(N,) bool on the CPU: whether each validation image is classified correctly."""
    correct_top5: int
    num_classes: int
    num_train: int
    split: str
    settings: dict[str, Any]
    """`k` for k-NN; `l2`, `iterations` and `is_optimal` for the linear probe."""
    accuracy: Accuracy | None = None
    """The accuracy of the linear probe; None for k-NN, which has no probabilities."""

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics, keyed by name."""
        total = len(self.is_right)
        right = int(self.is_right.sum())
        low, high = interval95(right, total)
        numbers: dict[str, Any] = {
            "num_images": total,
            "correct_top1": right,
            "correct_top5": self.correct_top5,
            "top1": 100.0 * right / total,
            "top5": 100.0 * self.correct_top5 / total,
        }
        if self.accuracy is not None:
            numbers |= self.accuracy.to_dict()
        return {**numbers, "top1_low": low, "top1_high": high, **self.settings} | {
            "num_train": self.num_train
        }

    def line(self) -> str:
        """Return the result as one line of text."""
        values = self.to_dict()
        images = f"over {self.num_train:,} images of {self.split!r}"
        if self.accuracy is not None:
            end = "" if self.settings["is_optimal"] else ", stopped before the optimum"
            fit = f"l2 {self.settings['l2']:g}, {self.settings['iterations']} iterations{end}"
            return f"linear probe {images} ({fit}): {self.accuracy}"
        right = values["correct_top1"]
        interval = format_interval(right, values["num_images"])
        count = f"{right} of {values['num_images']}; {interval}" if interval else f"{right}"
        return (
            f"{self.settings['k']}-NN {images}: top-1 {values['top1']:.2f} % ({count})"
            f"{format_top5(values['top5'], self.correct_top5, self.num_classes)}"
        )


def run_probes(
    model: nn.Module,
    config: Config,
    val_split: Split,
    augment: Augment,
    world: World,
    *,
    ks: tuple[int, ...] = (),
    linear: bool = False,
    l2: float | None = None,
) -> list[Probed]:
    """Classify the images of `val_split` by the features of `model`.

    model: on the device of the rank. ks: the numbers of neighbors; () runs no k-NN. linear: run the
    linear probe, with penalty `l2`; None chooses the penalty on held-out training images. Raises
    ValueError or ShardError if the training split is missing or has fewer images than neighbors,
    the head is not linear, or an image cannot be decoded.
    """
    flag = "--knn" if ks else "--linear-probe"
    with world.fail_together():
        width = num_features_of(model, flag)
    train_split = open_split(config, config.data.train_split, world)
    with world.fail_together():
        if ks and max(ks) > train_split.num_samples:
            raise ValueError(
                f"--k {max(ks)}: {train_split.root} {train_split.name!r} has only"
                f" {train_split.num_samples:,} images: pass at most that many"
            )
    num_images = train_split.num_samples + val_split.num_samples
    if world.is_main:
        print(
            f"features: {num_images:,} x {width} in fp16, {2 * num_images * width / 2**30:.2g} GiB"
            f" on each of {world.size} rank(s)",
            file=sys.stderr,
        )
    splits = (train_split, val_split)

    def features_of(split: Split) -> Tensor:
        text = f"features of {split.name!r}"
        with Meter(text, split.num_samples, "images", shown=world.is_main) as meter:
            return extract_features(
                model, split, config, augment, world, wanted_by=flag, on_images=meter.update
            )

    train, queries = map(features_of, splits)
    labels = [torch.from_numpy(split.index["label"].astype(np.int64)) for split in splits]
    num_classes = max(split.num_classes for split in splits)
    result = partial(
        Probed, num_classes=num_classes, num_train=train_split.num_samples, split=train_split.name
    )
    probed: list[Probed] = []
    if ks:
        text = f"{max(ks)} nearest neighbors"
        with Meter(text, len(queries), "images", shown=world.is_main) as meter:
            samples = (train, labels[0], queries, labels[1])
            voted = classify(*samples, ks, num_classes, world, on_queries=meter.update)
        for k, predictions, in_top5 in voted:
            right = predictions == labels[1]
            probed.append(result(f"knn {k}", right, int(in_top5.sum()), settings={"k": k}))
    if linear:
        probe, scale = fit_probe(train, labels[0], num_classes, world, l2)
        logits = logits_of(probe, scale, queries)
        counter = AccuracyCounter(world.device)
        shares = zip(logits.split(ROWS), labels[1].to(world.device).split(ROWS), strict=True)
        for rows, own in list(shares)[world.rank :: world.size]:
            counter.add(rows, own, torch.ones_like(own))
        accuracy = counter.result(world)
        right = logits.argmax(1).cpu() == labels[1]
        settings = {"l2": probe.l2, "iterations": probe.iterations, "is_optimal": probe.is_optimal}
        probed.append(
            result(
                "linear probe", right, accuracy.correct_top5, settings=settings, accuracy=accuracy
            )
        )
    return probed
