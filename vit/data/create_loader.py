"""Create a loader of training batches without a config, for a custom training loop.

    split -> order of samples -> decoded crops in shared memory -> augmented on the device
                                                               -> (inputs, targets) for a model

The batches are identical to those that the trainer would use. An epoch contains each sample once,
global batches do not depend on the number of ranks, and random numbers depend only on seed, epoch
and sample.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vit.config.base import height_width
from vit.config.io import from_dict
from vit.config.schema import IMAGENET_MEAN, IMAGENET_STD
from vit.data.augment.apply import Augment
from vit.data.batches import TrainBatches, row_unit
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.shards.split import Split


class TrainLoader(Iterator[tuple[Tensor, Tensor]], AbstractContextManager["TrainLoader"]):
    """Iterates over this rank's (inputs, targets), from a given training step to the last one.

    inputs: (B, C, H, W) float32 on the device, normalized by the mean and standard deviation.
    targets: (B, num_classes) float32 class probabilities; a mixed image has two nonzero values.
    """

    def __init__(self, loader: Loader, augment: Augment, steps_per_epoch: int):
        self.steps_per_epoch = steps_per_epoch
        self._loader = loader
        self._augment = augment

    def __len__(self) -> int:
        """Return the total number of batches, including those already returned."""
        return len(self._loader)

    def __next__(self) -> tuple[Tensor, Tensor]:
        batch = next(self._loader)
        return self._augment.finish(batch.images, batch.labels, batch.table)

    def close(self) -> None:
        """Stop the workers."""
        self._loader.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def create_loader(
    split: Split,
    global_batch_size: int,
    *,
    image_size: int | tuple[int, int] = 224,
    epochs: int = 1,
    start: int = 0,
    seed: int = 0,
    augment: Mapping[str, Any] | None = None,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    interpolation: str = "bicubic",
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
) -> TrainLoader:
    """Create a loader of the training batches of `split`.

    Args:
        split: The return value of `vit.open_split`.
        global_batch_size: The number of images in one step, summed over all ranks.
        image_size: The input size of the model in pixels, one number or (height, width).
        epochs: The number of epochs; each has `split.num_samples // global_batch_size` steps.
        start: The first step. To resume, pass the next step; the loader has no other state.
        seed: The seed of the sample order and of all random numbers.
        augment: Settings of the config section `augment`, such as `{"mixup_alpha": 0.2}`; by
            default images are only cropped at random and flipped.
        mean, std: One value per channel (one for gray images), for images scaled to [0, 1].
        interpolation: `bicubic` or `bilinear`, antialiased.
        rank, world_size: The rank of this process and the number of ranks; by default those of
            `torch.distributed` if it is initialized, else 0 and 1.
        num_workers: The number of decoding processes for this rank; 0 decodes in this process.
        device: The device of the batches; copies to a GPU overlap with the previous step.

    Raises:
        ValueError: The settings contradict each other, or the batch is not divisible by the ranks.
        ShardError: An image cannot be read or decoded; raised when its batch is requested.
    """
    device = torch.device(device)
    # Build a complete config, so that its checks reject settings that have no effect.
    values = {"data": {"root": "."}, "train": {"epochs": epochs}, "augment": dict(augment or {})}
    recipe = from_dict(values, "create_loader").augment

    if rank is None or world_size is None:
        is_joined = dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_joined else (0, 1)

    order = make_order(split.num_samples, global_batch_size, seed)
    unit = world_size * row_unit(recipe, order)
    if global_batch_size % unit:
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of {unit}, the number of"
            " ranks times the size of a mixing group: choose"
            f" {max(global_batch_size // unit, 1) * unit}"
        )

    rank_batch_size = global_batch_size // world_size
    batches = TrainBatches(
        split,
        order,
        recipe,
        ImageFormat(height_width(image_size), len(mean), interpolation),
        rows=range(rank * rank_batch_size, (rank + 1) * rank_batch_size),
        num_batches=epochs * order.steps_per_epoch,
    )

    on_device = Augment(recipe, split.num_classes, mean, std, device)
    loader = Loader(
        batches,
        start,
        epochs * order.steps_per_epoch,
        num_workers=num_workers,
        device=device,
        on_device=on_device.change_batch,
    )
    return TrainLoader(loader, on_device, order.steps_per_epoch)
