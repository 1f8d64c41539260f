"""Print a config: every value with its origin, and every derived number."""

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import nn

from vit.config import io as config_io
from vit.config.schema import CheckpointConfig, Config, OptimConfig, RunConfig
from vit.data.batches import NOT_EXACT
from vit.data.image_format import ImageFormat
from vit.data.open_data import INDEXED_SHARDS, TrainReader, choose_num_classes, open_split
from vit.data.order import Order
from vit.data.shards.split import Split
from vit.data.shards.split_slice import part_size
from vit.data.sources import TrainSet
from vit.optim.groups import parameter_groups
from vit.optim.optimizer import state_bytes
from vit.run_folder.place import local_folder
from vit.start.shuffle_quality import measure_shuffle
from vit.system.files import ShardError
from vit.system.urls import is_url
from vit.training.freeze import create_trained_model
from vit.training.model_summary import count_parameters, flops_per_image
from vit.training.plan import Plan, make_plan
from vit.training.teacher import describe_teacher

IMAGENET_IMAGES = 1_281_167
"""The number of training images in ImageNet-1k, assumed if the data cannot be opened."""
IMAGENET_CLASSES = 1000


def describe(
    config: Config,
    origins: dict[str, str],
    world_size: int,
    sentences: Mapping[str, str] | None = None,
    reader: TrainReader = INDEXED_SHARDS,
) -> str:
    """Return the text of `--print-config`: every value with its origin as YAML, and derived numbers
    as comments.

    If the data cannot be opened, the text assumes ImageNet's numbers of images and classes, and a
    note says so. Raises the ValueErrors of `make_plan` and `TrainReader.choose`.

    Args:
        sentences: A description of each setting, printed above its value.
        reader: The reader of the training data.
    """
    values = config_io.to_dict(config)
    comments = {
        f"{section}.{name}": origins.get(f"{section}.{name}", "default")
        for section, group in values.items()
        for name in group
    }

    # Do not retry, because printing a config must not wait for storage that does not respond.
    without_retries = config_io.with_settings(config, {"loader.patience_s": 0.0})
    try:
        val_split = open_split(without_retries, config.data.val_split)
        splits = reader.open_splits(without_retries)
    except ShardError as error:
        derived, num_classes = _assume_data(config, world_size, error)
    else:
        train = reader.choose(config, splits, val_split, num_classes=config.model.num_classes)
        derived, num_classes = _describe_data(config, world_size, train, val_split)
    derived |= _describe_model(config, num_classes)

    return (
        config_io.dump_yaml(values, comments, sentences)
        + "\n# derived\n"
        + "".join(f"#   {key}: {value}\n" for key, value in derived.items())
    )


def _describe_data(
    config: Config, world_size: int, train: TrainSet, val_split: Split
) -> tuple[dict[str, object], int]:
    """Return the numbers that follow from the data, and the number of classes."""
    num_classes = choose_num_classes(config.model, config.data, train.split, val_split)
    plan, order = make_plan(config, train.num_draws, world_size, train.shares)
    derived: dict[str, object] = {"chosen": "; ".join(train.summary)} if train.summary else {}
    derived |= {"training_images": f"{order.num_samples:,}", **_numbers_of(plan, order)}
    if config.stream.urls is None:
        derived["shuffle"] = measure_shuffle(order, train.split.index["label"])
    else:
        derived["order"] = NOT_EXACT
    return {**derived, "classes": f"{num_classes}"}, num_classes


def _assume_data(
    config: Config, world_size: int, error: ShardError
) -> tuple[dict[str, object], int]:
    """Return the result of `_describe_data`, with ImageNet's numbers where the config sets none.

    error: the reason why the data cannot be opened.
    """
    assumed_images = part_size(config.data.train_split, IMAGENET_IMAGES)
    plan, order = make_plan(config, config.stream.num_samples or assumed_images, world_size)

    images = f"{order.num_samples:,}"
    if config.stream.num_samples is None:
        images += (
            " (assumed, as in ImageNet-1k, because the data cannot be opened; all steps are"
            f" assumed too: {error})"
        )

    derived: dict[str, object] = {"training_images": images, **_numbers_of(plan, order)}
    if config.stream.urls is not None:
        derived["order"] = NOT_EXACT
    num_classes = config.model.num_classes or IMAGENET_CLASSES
    classes = f"{num_classes}" if config.model.num_classes else f"{num_classes} (assumed)"
    return {**derived, "classes": classes}, num_classes


def _numbers_of(plan: Plan, order: Order) -> dict[str, object]:
    """Return the numbers of the plan and the order that are not printed with the settings."""
    numbers = {key: value for key, value in asdict(plan).items() if key != "global_batch_size"}
    return {**numbers, "num_lanes": order.num_lanes, "block_samples": order.block_samples}


def _describe_model(config: Config, num_classes: int) -> dict[str, object]:
    """Return the numbers that follow from the model: its size, its cost and its checkpoints."""
    with torch.device("meta"):
        model = create_trained_model(config, num_classes)
    gflop = flops_per_image(model) / 1e9
    is_averaged = config.ema.decay is not None
    state, gradients = training_bytes(model, config.optim, is_averaged)

    derived: dict[str, object] = {
        "parameters": f"{count_parameters(model):,}",
        "parameter_groups": _groups_in_words(model, config.optim),
        "gflop_per_image": f"{gflop:.2f} forward, a multiply-add counts as 2 (papers count 1:"
        f" {gflop / 2:.2f})",
    }
    if config.distill.teacher is not None:
        derived["teacher"] = describe_teacher(config, num_classes)

    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    if form.stages:
        gflops = [f"{flops_per_image(model, image_size=size) / 1e9:.2f}" for size in form.sizes]
        derived["image_sizes"] = f"{form.sizes_text()}: {', '.join(gflops)} GFLOP"

    contents = "weights, optimizer, EMA" if is_averaged else "weights, optimizer"
    derived["checkpoint_mb"] = f"{state / 1e6:,.1f} ({contents}), {_retention(config.checkpoint)}"
    derived |= _working_copy(config.run)
    derived["parameters_gib"] = (
        f"{(state + gradients) / 2**30:.2f} on each rank (the content of a checkpoint, and"
        " gradients), without activations"
    )
    return derived


def _groups_in_words(model: nn.Module, optim: OptimConfig) -> str:
    """Return the number of parameter groups, and the learning rates if they differ."""
    groups = [group for group in parameter_groups(model, optim) if group["params"]]
    slowest = min(group.get("lr_scale", 1.0) for group in groups)
    if slowest == 1:
        return f"{len(groups)}"
    return f"{len(groups)}, peak learning rates {optim.lr * slowest:.3g} to {optim.lr:g}"


def _retention(settings: CheckpointConfig) -> str:
    """Describe which checkpoints are kept."""
    every = settings.every_steps * (settings.keep_every or 0)
    more = f", and those of each multiple of {every:,} steps" if every else ""
    return f"{settings.keep_last} are kept, plus one while it is written{more}"


def _working_copy(run: RunConfig) -> dict[str, object]:
    """Return a line about the local copy if `run.dir` is a URL."""
    if not is_url(run.dir):
        return {}
    return {"working_copy": f"{local_folder(run)}, uploaded to run.dir at each save"}


def training_bytes(model: nn.Module, optim: OptimConfig, is_averaged: bool) -> tuple[int, int]:
    """Return (bytes of the tensors in a checkpoint, bytes of the gradients).

    A checkpoint contains the weights and buffers, which are stored twice if there is an EMA, and
    the optimizer state.
    """
    stored = sum(tensor.nbytes for tensor in model.state_dict().values())
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    loss_scale = 8  # the loss scale and the steps since its last overflow
    return (
        stored * (2 if is_averaged else 1) + sum(state_bytes(optim, model)) + loss_scale,
        gradients,
    )
