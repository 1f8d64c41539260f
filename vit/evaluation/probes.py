"""What the features of a model know: k-NN and a linear probe, of its frozen weights.

    model, training and validation split -> `extract_features` of both
    -> `knn.classify`, `linear.fit_probe` -> `Probed`, one for each k and one for the linear probe

The training images are all of `data.train_split`, whatever the run chose of them, shown as in
evaluation. The model's own head has no part in it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit.config.schema import Config
from vit.data.augment.apply import Augment
from vit.data.open_data import open_split
from vit.data.shards.split import Split
from vit.distributed.process_group import World
from vit.evaluation.features import extract_features, feature_bytes, head_of
from vit.evaluation.knn import classify
from vit.evaluation.linear_probe import ROWS, fit_probe, logits_of
from vit.system.meter import Meter
from vit.training.metrics import Accuracy, AccuracyCounter, format_interval, format_top5, interval95

KNN_FLAG = "--knn"
LINEAR_FLAG = "--linear-probe"


@dataclass(frozen=True)
class Asked:
    """Which probes are wanted."""

    ks: tuple[int, ...] = ()
    """Numbers of neighbours; none for no k-NN."""
    linear: bool = False
    l2: float | None = None
    """Of the linear probe; None: chosen on held-out training images."""

    @property
    def flag(self) -> str:
        """How messages name what needs the features."""
        return KNN_FLAG if self.ks else LINEAR_FLAG


@dataclass(frozen=True)
class Probed:
    """What one probe has found, the same on every rank."""

    name: str
    """`knn 20`, or `linear probe`: with a space, which no set to evaluate on has in its name."""
    is_right: Tensor
    """(N,) bool on the CPU: which validation images it has right."""
    correct_top5: int
    num_classes: int
    num_train: int
    split: str
    settings: dict[str, Any]
    """`k`; or `l2`, `iterations`, `is_optimal`."""
    accuracy: Accuracy | None = None
    """Of the linear probe, which has probabilities."""

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        total = len(self.is_right)
        right = int(self.is_right.sum())
        low, high = interval95(right, total)
        found: dict[str, Any] = {
            "num_images": total,
            "correct_top1": right,
            "correct_top5": self.correct_top5,
            "top1": 100.0 * right / total,
            "top5": 100.0 * self.correct_top5 / total,
        }
        if self.accuracy is not None:
            found |= self.accuracy.to_dict()
        return {**found, "top1_low": low, "top1_high": high, **self.settings} | {
            "num_train": self.num_train
        }

    def line(self) -> str:
        """Return it in a line for people."""
        values = self.to_dict()
        where = f"over {self.num_train:,} images of {self.split!r}"
        if self.accuracy is not None:
            end = "" if self.settings["is_optimal"] else ", ended before its optimum"
            how = f"l2 {self.settings['l2']:g}, {self.settings['iterations']} iterations{end}"
            return f"linear probe {where} ({how}): {self.accuracy}"
        right = values["correct_top1"]
        interval = format_interval(right, values["num_images"])
        count = f"{right} of {values['num_images']}; {interval}" if interval else f"{right}"
        return (
            f"{self.settings['k']}-NN {where}: top-1 {values['top1']:.2f} % ({count})"
            f"{format_top5(values['top5'], self.correct_top5, self.num_classes)}"
        )


def run_probes(
    asked: Asked, model: nn.Module, config: Config, val_split: Split, augment: Augment, world: World
) -> list[Probed]:
    """Classify the images of `val_split` by the features of `model`.

    model: on the device of the rank. Raises ValueError and ShardError: no training split, fewer
    images there than neighbours, a model without a linear head, an image that cannot be decoded.
    """
    with world.fail_together():
        head_of(model, asked.flag)
    train_split = open_split(config.data, config.data.train_split, world)
    with world.fail_together():
        if asked.ks and max(asked.ks) > train_split.num_samples:
            raise ValueError(
                f"--k {max(asked.ks)}: {train_split.root} {train_split.name!r} has"
                f" {train_split.num_samples:,} images: give at most that many"
            )
    num_images = train_split.num_samples + val_split.num_samples
    if world.is_main:
        size = feature_bytes(model, num_images, asked.flag) / 2**30
        width = head_of(model, asked.flag).in_features
        print(
            f"features: {num_images:,} x {width} in fp16, {size:.2g} GiB on each of {world.size}"
            " rank(s)",
            file=sys.stderr,
        )
    splits = (train_split, val_split)
    features = []
    for split in splits:
        text = f"features of {split.name!r}"
        with Meter(text, split.num_samples, "images", shown=world.is_main) as meter:
            found = extract_features(
                *(model, split, config, augment, world),
                wanted_by=asked.flag,
                on_images=meter.update,
            )
        features.append(found)
    train, queries = features
    labels = [torch.from_numpy(split.index["label"].astype(np.int64)) for split in splits]
    num_classes = max(split.num_classes for split in splits)
    place = (num_classes, train_split.num_samples, train_split.name)
    probed: list[Probed] = []
    if asked.ks:
        text = f"{max(asked.ks)} nearest neighbours"
        with Meter(text, len(queries), "images", shown=world.is_main) as meter:
            voted = classify(
                *(train, labels[0], queries, labels[1], asked.ks, num_classes, world), meter.update
            )
        for k, predictions, in_top5 in voted:
            right = predictions == labels[1]
            probed.append(Probed(f"knn {k}", right, int(in_top5.sum()), *place, {"k": k}))
    if asked.linear:
        probe, scale = fit_probe(train, labels[0], num_classes, world, asked.l2)
        logits = logits_of(probe, scale, queries)
        counter = AccuracyCounter(world.device)
        shares = zip(logits.split(ROWS), labels[1].to(world.device).split(ROWS), strict=True)
        for rows, own in list(shares)[world.rank :: world.size]:
            counter.add(rows, own, torch.ones_like(own))
        accuracy = counter.result(world)
        right = logits.argmax(1).cpu() == labels[1]
        how = {"l2": probe.l2, "iterations": probe.iterations, "is_optimal": probe.is_optimal}
        probed.append(Probed("linear probe", right, accuracy.correct_top5, *place, how, accuracy))
    return probed
