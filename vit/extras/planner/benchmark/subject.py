"""Collect a benchmark's config, plan, data size and device, and generate its batches.

Batches contain noise images with random augmentation parameters from the recipe. As in the loader,
images, labels and weights are on the device, and augmentation parameters are on the host. The time
of a step depends on the augmentation parameters but not on the pixel values.
"""

import sys
from dataclasses import dataclass, replace

import numpy as np
import torch

from vit.compose import reader_of
from vit.config.schema import Config
from vit.data.augment.draw import draw_mix, draw_table, sample_keys
from vit.data.augment.table import table_layout
from vit.data.batches import Batch, BatchLayout, write_rows
from vit.data.image_format import ImageFormat
from vit.data.open_data import TrainReader
from vit.distributed.process_group import World
from vit.extras.planner import device_memory
from vit.extras.planner.data_size import DataSize, size_and_plan
from vit.system.host import cpu_name
from vit.training.mfu import Peak, find_peak, measure_peak
from vit.training.plan import Plan, create_order, micro_batch_sizes

STORED_PX = (500, 375)
"""The width and height of an average ImageNet image, in pixels."""
NOISE_ROWS = 16
"""The number of distinct noise images. Images are repeated, because generating them takes longer
than a step on a GPU."""


@dataclass(frozen=True)
class Wishes:
    """The user's options for a benchmark."""

    seconds: float
    """The duration of each measurement."""
    num_steps: int | None = None
    """The number of steps of each measurement. If given, `seconds` is ignored."""
    micro_batch_size: int | None = None
    """The only micro-batch size to measure."""
    sweeps: bool = False
    """Whether to also measure smaller micro-batch sizes with the same batch size."""
    needs_data: bool = False
    """If true, raise an error when the data cannot be opened."""


@dataclass(frozen=True)
class Subject:
    """The config to measure, and the device."""

    config: Config
    world: World
    plan: Plan
    data: DataSize
    reader: TrainReader
    wishes: Wishes
    peak: Peak
    """The peak FLOP/s of each device. The peak of a CPU is measured."""
    sizes: list[int]
    """The micro-batch sizes that divide a rank's batch size."""
    loadable: list[int]
    """The per-rank batch sizes that the loader can deliver. Without data, all `sizes`."""
    in_use: int
    """The bytes in use before the first measurement. A later baseline would be too high, because a
    CPU process keeps freed memory."""

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def make_batch(self, num_rows: int) -> Batch:
        """Return a synthetic batch of `num_rows` images on the device."""
        return self.make_batches(num_rows, 1)[0]

    def make_batches(self, num_rows: int, count: int = 4) -> list[Batch]:
        """Return `count` synthetic batches on the device."""
        return synthetic_batches(
            self.config, num_rows, self.data.num_classes, self.world.device, count
        )

    def log(self, text: str) -> None:
        """Print `text` to stderr on the main rank."""
        if self.world.is_main:
            print(text, file=sys.stderr, flush=True)


def look_at_subject(config: Config, world: World, wishes: Wishes) -> Subject:
    """Collect everything a benchmark needs, before memory is allocated."""
    data, plan = size_and_plan(config, world.size)
    if wishes.needs_data and data.assumed:
        raise ValueError(data.assumed)

    sizes = micro_batch_sizes(config.augment, plan.global_batch_size // world.size)
    if wishes.micro_batch_size is not None:
        if wishes.micro_batch_size not in sizes:
            raise ValueError(
                f"--micro-batch {wishes.micro_batch_size} does not divide a rank's batch of"
                f" {sizes[-1]} images: use one of {', '.join(map(str, sizes))}"
            )
        plan = replace(plan, micro_batch_size=wishes.micro_batch_size)

    loadable = [
        size for size in sizes if data.assumed or _has_order(config, data, size * world.size)
    ]

    return Subject(
        config,
        world,
        plan=plan,
        data=data,
        reader=reader_of(config),
        wishes=wishes,
        peak=find_peak(world.device, config.train.precision)
        or measure_peak(world.device, config.train.precision),
        sizes=sizes,
        loadable=loadable,
        in_use=device_memory.bytes_in_use(world.device),
    )


def _has_order(config: Config, data: DataSize, global_batch_size: int) -> bool:
    """Return whether the loader can deliver batches of this size."""
    changed = config.data.model_copy(update={"global_batch_size": global_batch_size})
    try:
        create_order(config.model_copy(update={"data": changed}), data.num_images)
    except ValueError:
        return False
    return True


def device_name(world: World) -> str:
    """Return the GPU's name, or the CPU's name and number of threads."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"{cpu_name()} ({torch.get_num_threads()} thread(s))"


# --- batches --------------------------------------------------------------------------------------


def synthetic_batches(
    config: Config, num_rows: int, num_classes: int, device: torch.device, count: int = 4
) -> list[Batch]:
    """Return `count` batches of `num_rows` images on `device`.

    Each batch has its own augmentation parameters. Even batches share one set of images, labels and
    weights, and odd batches share another.
    """
    batches: list[Batch] = []
    for position in range(count):
        batch = _batch_on_host(config, num_rows, num_classes, position)
        if device.type == "cuda":
            batch = batch.pin_memory()
        if position < 2:
            batches.append(batch.to(device))
        else:
            batches.append(replace(batches[position % 2], table=batch.table))

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return batches


def _batch_on_host(config: Config, num_rows: int, num_classes: int, position: int) -> Batch:
    """Return the batch at `position`, with the memory layout of the loader's buffers."""
    image_format = ImageFormat.from_config(config.model, config.data)
    layout = BatchLayout(num_rows, image_format, table_layout(config.augment).width)
    batch = layout.batch_in(memoryview(bytearray(layout.num_bytes)))

    rng = np.random.default_rng(position)
    noise = rng.integers(0, 256, (NOISE_ROWS, *batch.images.shape[1:]), dtype=np.uint8)
    torch.index_select(
        torch.from_numpy(noise), 0, torch.arange(num_rows) % NOISE_ROWS, out=batch.images
    )

    ids = np.arange(num_rows) + position * num_rows
    keys = sample_keys(config.train.seed, 0, ids)
    widths = np.full(num_rows, STORED_PX[0])
    heights = np.full(num_rows, STORED_PX[1])

    table = draw_table(config.augment, keys, widths, heights, image_format.size)

    weights = np.ones(num_rows, dtype=np.float32)
    draw_mix(
        config.augment,
        table,
        weights=weights,
        seed=config.train.seed,
        position=position,
        first_row=0,
        size=image_format.size,
        epoch=0,
    )

    write_rows(batch, rng.integers(0, num_classes, num_rows), weights, table, ids)
    return batch
