"""Find the number of images and classes for a forecast, from the data or as in ImageNet-1k."""

from dataclasses import dataclass

from vit.compose import reader_of
from vit.config.io import with_settings
from vit.config.schema import Config
from vit.data.open_data import choose_num_classes, open_split
from vit.data.shards.split_slice import parse_name, part_size
from vit.start.print_config import IMAGENET_IMAGES
from vit.system.files import ShardError
from vit.training.plan import Plan, make_plan

IMAGENET_VAL_IMAGES = 50_000


@dataclass(frozen=True)
class DataSize:
    """The dataset sizes that a forecast uses."""

    num_classes: int
    num_val_images: int
    num_images: int
    further_images: tuple[int, ...]
    """The number of images in each additional split in `eval.sets`."""
    assumed: str
    """The reason why ImageNet-1k's sizes are assumed, or "" if the data was opened."""


def size_and_plan(config: Config, num_gpus: int) -> tuple[DataSize, Plan]:
    """Return the data sizes and the plan. If the data is missing, ImageNet-1k is assumed."""
    places = config.eval.further_places(config.data.root, config.data.val_split)
    at_once = with_settings(config, {"loader.patience_s": 0.0})
    reader = reader_of(config)

    try:
        val_split = open_split(at_once, config.data.val_split)
        splits = reader.open_splits(at_once)
        further = [open_split(at_once, split, root=root) for root, split in places]
    except ShardError as error:
        return _assume_imagenet(config, num_gpus, [split for _, split in places], str(error))

    train = reader.choose(config, splits, val_split, num_classes=config.model.num_classes)
    plan, order = make_plan(config, train.num_draws, num_gpus, train.shares)
    data = DataSize(
        num_classes=choose_num_classes(config.model, config.data, train.split, val_split),
        num_val_images=val_split.num_samples,
        num_images=order.num_samples,
        further_images=tuple(split.num_samples for split in further),
        assumed="",
    )
    return data, plan


def _assume_imagenet(
    config: Config, num_gpus: int, further_splits: list[str], reason: str
) -> tuple[DataSize, Plan]:
    """Return the sizes of ImageNet-1k's splits, and the plan.

    A further split is a part of the training images, or else has the size of the validation set.
    """
    images = config.stream.num_samples or part_size(config.data.train_split, IMAGENET_IMAGES)
    plan, _ = make_plan(config, images, num_gpus)

    classes = config.model.num_classes or 1000
    trained = parse_name(config.data.train_split).split
    further_images = tuple(
        part_size(split, IMAGENET_IMAGES)
        if parse_name(split).split == trained
        else IMAGENET_VAL_IMAGES
        for split in further_splits
    )
    return DataSize(classes, IMAGENET_VAL_IMAGES, images, further_images, reason), plan
