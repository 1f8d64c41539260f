"""Replace `auto` in a run's settings, open its data, and compute its plan."""

from dataclasses import dataclass, field
from typing import Any

from vit.config import io as config_io
from vit.config.schema import Config
from vit.data.batches import AugmentedBatches, EvalBatches
from vit.data.eval_sets import EvalSet, ModelClasses, open_sets
from vit.data.image_format import ImageFormat
from vit.data.open_data import TrainReader, choose_num_classes, open_split
from vit.data.sources import TrainSet
from vit.distributed.process_group import World
from vit.layers.precision import has_bf16
from vit.training.loss import choose_class_weights
from vit.training.plan import Plan, make_plan


@dataclass(frozen=True)
class Notes:
    """The notes and facts that a component of a run provides before the first step."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Values that must be unchanged when the run resumes."""
    record: dict[str, Any] = field(default_factory=dict)
    """Values for the `start` line of metrics.jsonl."""
    lines: tuple[str, ...] = ()
    """Lines for the log."""


@dataclass(frozen=True)
class RunData:
    """The data of a run, and values computed from the data."""

    plan: Plan
    train_set: TrainSet
    batches: AugmentedBatches
    sets: list[tuple[EvalSet, ...]]
    """The evaluation sets, `data.val_split` first. Sets with the same images form a group."""
    eval_batches: list[EvalBatches]
    """The evaluation batches of each split."""
    image_format: ImageFormat
    """The image format used in evaluation."""
    num_classes: int
    """The number of outputs of the model's head."""
    class_weights: tuple[float, ...] | None
    """The class weights in the loss."""
    facts: dict[str, Any]
    """Values that must be unchanged when the run resumes."""

    @property
    def class_names(self) -> list[str]:
        """The names of the training classes, in the order of the class numbers. The list may be
        empty."""
        return self.train_set.split.class_names


def choose_settings(config: Config, world: World) -> Config:
    """Return `config` with values in place of `auto` in `train.precision` and `train.compile`.

    All ranks must call this function, because hosts may have different GPUs, and bf16 is chosen
    only if all ranks' devices support it. Nothing is measured, so the choice is the same at each
    start.
    """
    # Gather the answers of all ranks even without `auto`, because `--check` has not compared the
    # ranks' settings yet.
    if not world.is_main:
        world.gather("bf16", has_bf16(world.device))
    config = with_precision(
        config, world.broadcast_from_main(lambda: all(world.gather("bf16", has_bf16(world.device))))
    )
    return (
        config_io.with_settings(config, {"train.compile": world.device.type == "cuda"})
        if config.train.compile == "auto"
        else config
    )


def with_precision(config: Config, has_bf16: bool) -> Config:
    """Return `config` with bf16 or fp32 in place of `auto` in `train.precision`."""
    return (
        config_io.with_settings(config, {"train.precision": "bf16" if has_bf16 else "fp32"})
        if config.train.precision == "auto"
        else config
    )


def as_trained(config: Config, data: RunData) -> Config:
    """Return `config`, with `eval.apply_exif` turned on if EXIF rotated the images of `data`."""
    if config.eval.apply_exif is None and data.sets[0][0].split.apply_exif:
        return config_io.with_settings(config, {"eval.apply_exif": True})
    return config


def open_data(config: Config, world: World, reader: TrainReader) -> RunData:
    """Open the data and compute the plan. All ranks must call this.

    reader: reads the training data.
    """
    # Rank 0 opens the data first, because it may have to write an index for the other ranks.
    val_split = open_split(config, config.data.val_split, world)
    splits = reader.open_splits(config, world)
    train_set = reader.choose(config, splits, val_split, world, config.model.num_classes)

    split = train_set.split
    with world.fail_together():
        plan, order = make_plan(config, train_set.num_draws, world.size, train_set.shares)
        num_classes = choose_num_classes(config.model, config.data, split, val_split)
        weights = choose_class_weights(config.loss, train_set, num_classes)

    namings = {"": split.class_names} if split.class_names else {}
    sets = open_sets(config, val_split, ModelClasses(num_classes, namings), world)

    with world.fail_together():
        image_format = ImageFormat.from_config(config.model, config.data)

        batches = reader.create_batches(
            config,
            train_set,
            order,
            ImageFormat.from_config(config.model, config.data, config.schedule),
            world,
            rows=plan.rows_of(world.rank),
            num_batches=plan.total_steps,
        )
        eval_batches = [
            EvalBatches(
                group[0].split,
                image_format,
                config.eval,
                config.eval.batch_size,
                rank=world.rank,
                world_size=world.size,
            )
            for group in sets
        ]

    # `check_same` raises an error if hosts see different data.
    facts = {
        "num_samples": split.num_samples,
        "index_sha256": world.check_same(split.identity, "training data"),
        "num_classes": num_classes,
        "class_names": split.class_names,
    }
    world.check_same(lambda: train_set.identity, "chosen samples")
    if train_set.identity:
        facts["chosen"] = train_set.identity

    return RunData(
        plan=plan,
        train_set=train_set,
        batches=batches,
        sets=sets,
        eval_batches=eval_batches,
        image_format=image_format,
        num_classes=num_classes,
        class_weights=weights,
        facts=facts,
    )
