"""The log lines before the first step: the model, its batches, and likely mistakes."""

import math
from collections.abc import Iterator

import torch

from vit.checkpoint.state import RunState
from vit.config.schema import Config
from vit.data.batches import NOT_EXACT, AugmentedBatches
from vit.layers.drop_path import num_kept
from vit.layers.parts import grid_size
from vit.layers.precision import precision_note
from vit.start.attention import attention_kernel
from vit.start.preflight import filling_notes
from vit.start.shuffle_quality import ShuffleQuality
from vit.step import TrainStep
from vit.training.model_summary import count_parameters, flops_per_image
from vit.training.plan import Plan

FEW_UPDATES = 100
"""A note is logged if a run of fewer updates starts from random weights. After 35 updates on 493
photos, the demo's model was only as accurate as a constant prediction of the largest of ten
classes."""
FEW_PATCHES = 16
"""A note is logged if the grid has fewer patches. On CIFAR-10, a ViT with 4 patches of 16 px
reached 51 % after 200 epochs (lucidrains/vit-pytorch#12), and one with 64 patches of 4 px reached
80 %."""
NOTABLE_FIRST_SHARE = 0.05
"""A note is logged if the initial weights make up more than this share of the final EMA, which
happens with fewer than 3 / (1 - decay) updates."""


def start_lines(
    config: Config,
    plan: Plan,
    train_step: TrainStep,
    batches: AugmentedBatches,
    shuffle: ShuffleQuality | None,
    state: RunState,
) -> Iterator[str]:
    """Yield lines about the model, its batches, likely mistakes, and the state of the run."""
    yield _model_line(config, plan, train_step)
    if batches.image_format.stages:
        yield f"training images: {batches.image_format.sizes_text()}"
    yield _order_line(config, plan, batches, shuffle)

    yield from _device_notes(config, train_step)
    yield from _recipe_notes(config, plan, batches, train_step)
    yield from filling_notes(batches, state.step, plan)
    yield from _state_lines(config, plan, state)


def _model_line(config: Config, plan: Plan, train_step: TrainStep) -> str:
    """Return a line about the model's size and cost, the device and the steps."""
    world = train_step.world
    model = train_step.model
    num_passes = plan.accumulation_steps
    micro_steps = f" in {num_passes} micro-steps" if num_passes > 1 else ""
    kernel = attention_kernel(model, config.train, world.device)
    attention = f", {kernel} attention" if kernel else ""
    return (
        f"{config.model.name}: {count_parameters(model):,} parameters,"
        f" {flops_per_image(model) / 1e9:.2f} GFLOP per image; {world.size} rank(s) on"
        f" {world.device.type}, {config.train.precision}{attention}; {plan.total_steps} steps of"
        f" {plan.global_batch_size} images{micro_steps}"
    )


def _order_line(
    config: Config, plan: Plan, batches: AugmentedBatches, shuffle: ShuffleQuality | None
) -> str:
    """Return a line about the order of the images, and about repeated augmentation."""
    if shuffle is None:
        return f"streamed, {NOT_EXACT}"
    if config.order.aug_repeats == 1:
        return f"shuffle: {shuffle}"
    return (
        f"shuffle: {plan.distinct_images_per_epoch:,} of {batches.order.num_samples:,} images per"
        f" epoch, {config.order.aug_repeats} copies of each; {shuffle}"
    )


def _device_notes(config: Config, train_step: TrainStep) -> Iterator[str]:
    """Yield notes about settings that this host does not support."""
    world = train_step.world
    if emulated := precision_note(config.train.precision, world.device):
        yield f"note: {emulated}"
    if world.device.type == "cpu" and torch.backends.mps.is_available():
        yield "note: this Mac's GPU is not used, because vitline does not support it (MPS)"
    if train_step.why_eager:
        yield (
            f"note: torch.compile does not work on this host ({train_step.why_eager}), so training"
            " is not compiled: install a C++ compiler and Python's headers (Debian, Ubuntu:"
            " apt-get install g++ python3-dev), or set train.compile=false"
        )
    if config.train.reduce_dtype != "fp32" and world.size == 1:
        yield f"note: train.reduce_dtype={config.train.reduce_dtype} has no effect on one rank"


def _recipe_notes(
    config: Config, plan: Plan, batches: AugmentedBatches, train_step: TrainStep
) -> Iterator[str]:
    """Yield notes about settings that do not suit the batch, the data or the run's length."""
    rate = config.model.drop_path_rate or 0.0
    in_subset = config.model.drop_path_form == "subset"
    if in_subset and num_kept(plan.micro_batch_size, rate) == plan.micro_batch_size:
        yield (
            f"note: model.drop_path_form=subset drops no sample at model.drop_path_rate={rate}"
            f" from a micro-batch of {plan.micro_batch_size}: use a larger data.micro_batch_size,"
            " or model.drop_path_form=mask"
        )

    yield from _size_notes(config, plan, batches)
    grid = grid_size(train_step.model)
    if grid and math.prod(grid) < FEW_PATCHES:
        yield (
            f"note: the model divides an image into only {grid[0]} x {grid[1]} patches, too few to"
            " see details: use a smaller patch (model.name, model.patch_size) or a larger"
            " model.image_size"
        )

    if plan.warmup_steps >= plan.total_steps:
        yield (
            f"note: the warm-up takes {plan.warmup_steps} steps, but the run has only"
            f" {plan.total_steps}: the peak learning rate is not reached"
        )

    ema = train_step.ema
    share = 0.0 if ema is None else ema.first_share(plan.total_steps)
    if share > NOTABLE_FIRST_SHARE:
        yield (
            f"note: ema.decay={config.ema.decay} over so few steps leaves {share:.0%}"
            " of the initial weights in the EMA, which eval, predict and export use: set"
            " ema.warmup=true, ema.decay=null or a smaller decay"
        )


def _state_lines(config: Config, plan: Plan, state: RunState) -> Iterator[str]:
    """Yield lines about a run that has resumed or is finished."""
    if state.restarts:
        yield (
            f"resumed at step {state.step} of {plan.total_steps} from {config.run.dir}/checkpoints"
            f" (restart {state.restarts})"
        )

    if state.is_finished(plan):
        best = f", best top-1 {state.best_top1:.2f} %" if state.best_top1 >= 0 else ""
        length = "train.epochs" if config.train.steps is None else "train.steps"
        yield (
            f"{config.run.dir} is finished: {state.step} steps{best}; to train more, use another"
            f" run.dir, or a larger {length} with --allow-change {length}"
        )


def _size_notes(config: Config, plan: Plan, batches: AugmentedBatches) -> Iterator[str]:
    """Yield notes about classes without images, and about a run that is too short to learn."""
    num_known = batches.split.num_classes
    if config.model.num_classes is not None and config.model.num_classes > num_known:
        yield (
            f"note: {config.model.num_classes - num_known:,} of the {config.model.num_classes:,}"
            " classes of model.num_classes have no image: model.num_classes=null gives the head"
            f" the data's {num_known:,} classes"
        )

    is_short = plan.total_steps < FEW_UPDATES and config.train.epochs is not None
    if is_short and config.init.checkpoint is None:
        yield (
            f"note: train.epochs={config.train.epochs:g} is only {plan.total_steps} updates of"
            f" random weights, and fewer than {FEW_UPDATES} rarely learn anything: raise"
            " train.epochs, or start from trained weights (init.checkpoint)"
        )
