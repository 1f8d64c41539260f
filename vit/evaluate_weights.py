"""Evaluate weights under a config, as `launch/eval.py` and fine-tuning do, and print the result."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TextIO

from vit.config import io as config_io
from vit.config.schema import Config
from vit.data.augment.apply import create_augment
from vit.data.batches import ImageFormat
from vit.evaluate import Evaluation, Evaluator
from vit.metrics import interval95
from vit.model import create_model
from vit.open_data import open_split
from vit.ranks.distributed import World
from vit.run.preflight import precision_note
from vit.system.meter import Meter
from vit.weights.class_names import class_mismatch
from vit.weights.files import LoadedWeights, load_weights


class Result(NamedTuple):
    """The evaluation of weights, the same on every rank."""

    evaluation: Evaluation
    as_json: dict[str, Any]
    """What `launch/eval.py --json` prints."""


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return `config` with other values for some keys: `settings`, dotted key -> value."""
    values = config.model_dump(mode="json")
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return config_io.from_dict(values, "command line")


def size_text(config: Config) -> str:
    """Return height and width of the images of `config`, as "224x224"."""
    height, width = ImageFormat.from_config(config.model, config.data).size
    return f"{height}x{width}"


def evaluate_weights(loaded: LoadedWeights, config: Config, world: World, out: TextIO) -> Result:
    """Evaluate `loaded` on the validation split of `config` and print the result to `out`.

    `config` may have a different image size than the weights were trained at: positions are
    resampled. Raises ValueError if the data have more classes than the weights.
    """
    assert loaded.num_classes is not None, "it came with its config"
    split = open_split(config.data, config.data.val_split, world)
    # A label beyond the head has no logit. Fewer classes are fine if they are the first of the same
    # classes; `class_mismatch` below compares the names.
    with world.fail_together():
        if split.num_classes > loaded.num_classes:
            raise ValueError(
                f"{split.root}: has {split.num_classes} classes, {loaded.path} knows"
                f" {loaded.num_classes}: use data with the same classes"
            )
        model = create_model(config.model, num_classes=loaded.num_classes)
        notes = load_weights(model, loaded.weights, loaded.grid_size)
    model.to(world.device)
    if world.is_main:
        slow = precision_note(config.train.precision, world.device, "--precision fp32")
        if slow:
            print(f"note: {slow}", file=sys.stderr)

    evaluator = Evaluator(
        split,
        ImageFormat.from_config(config.model, config.data),
        create_augment(
            config.augment,
            config.data,
            loaded.num_classes,
            world.device,
            compiled=config.train.compile,
        ),
        world,
        config.eval,
        precision=config.train.precision,
        num_workers=config.data.num_workers,
        stall_timeout_s=config.data.stall_timeout_s,
    )
    size = size_text(config)
    with Meter(f"evaluating at {size}", split.num_samples, "images", shown=world.is_main) as meter:
        result = evaluator.evaluate(
            {"model": model},
            on_batch=lambda done, total: meter.update(split.num_samples * done // total),
        )["model"]

    accuracy = result.accuracy
    as_json: dict[str, Any] = dict(accuracy.to_dict())
    low, high = interval95(accuracy.correct_top1, accuracy.num_images)
    as_json |= {"top1_low": low, "top1_high": high}
    mismatch = class_mismatch(loaded, split.class_names, split.num_classes)
    if mismatch:
        as_json["note"] = mismatch
    if world.is_main:
        which = ""
        if loaded.step is not None:
            which = f" (step {loaded.step}{', averaged weights' if loaded.averaged else ''})"
        lines = [
            f"{loaded.path}{which} on {split.root} {split.name!r}: {split.num_samples} images at"
            f" {size}",
            *(f"  {note}" for note in notes),
            f"  {accuracy}",
        ]
        if mismatch:
            lines.append(f"  note: {mismatch}")
        print("\n".join(lines), file=out)
    return Result(result, as_json)
