"""Augment batches on the device, as a pure function of (images, labels, table).

Images stay uint8 through the first steps: the margin of the simple or padded crop, the flip, and
the operations of RandAugment, 3-Augment and color jitter, which are grouped by kind
(`vit.data.augment.rounds`). The images are then converted to float32 and normalized by the mean and
standard deviation of the data. Finally, boxes are erased, and rows and labels are mixed with their
partners.

This module draws no random numbers and never waits for the device. The augmentation table
(`vit.data.augment.draw`) stays on the host and contains the operations of each row.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vit.data.augment.pixel_ops as pixel_ops
from vit.config.schema import AugmentConfig, DataConfig
from vit.data.augment.draw import mixes, partners
from vit.data.augment.rounds import apply_rounds, plan_rounds, to_device
from vit.data.augment.table import CUTMIX, LAMBDA, RIGHT, TOP, table_layout

CPU_VALUES, GPU_VALUES = 2**18, 2**27
"""The number of image values to process together. On a CPU, this is the size of one image of 224 x
224 pixels, which stays in the cache between operations (docs/experiments/). On a GPU, this is the
size of 891 such images, which fit in memory next to a model."""


def rows_at_once(images: Tensor) -> int:
    """Return how many of `images` (B, C, H, W) to process together."""
    values = CPU_VALUES if images.device.type == "cpu" else GPU_VALUES
    return max(1, values // images[0].numel())


class Augment:
    """Converts decoded pixels to the model's inputs and targets.

    A call runs `change` and then `finish`. The host time of `change` does not depend on the number
    of images, so the trainer calls it once for all micro-batches of a step. `finish` returns
    float32 images, which take four times the memory, so the trainer calls it for each micro-batch.

    Evaluation only calls `normalize`.

    Args:
        mean, std: The values per channel, for images scaled to [0, 1].
        compiled: Whether to use `torch.compile` for the part whose shapes never change.
    """

    def __init__(
        self,
        config: AugmentConfig,
        num_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        *,
        compiled: bool = False,
    ):
        self.config = config
        self.num_classes = num_classes
        self.layout = table_layout(config)
        self.compiled = compiled

        # Compute (x / 255 - mean) / std as one multiplication and one addition.
        self.scale = (1.0 / (255.0 * torch.tensor(std))).view(1, -1, 1, 1).to(device)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1).to(device)
        # Compute the quantiles once. A compiled graph would recompute them on the host in each step
        # and wait for the copy.
        self.quantiles = pixel_ops.normal_quantiles(device)

        self._finish = self._finish_on_device
        if compiled:
            self._finish = torch.compile(self._finish, dynamic=False)

    def __call__(self, images: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Augment `images` (B, C, H, W) uint8 and `labels` (B,) int64, both on the device.

        `table` (B, K) float32 is on the host. Returns inputs (B, C, H, W) float32 and soft targets
        (B, num_classes) float32.
        """
        return self.finish(self.change(images, table), labels, table)

    def change(self, images: Tensor, table: Tensor) -> Tensor:
        """Apply the margin, the flip and the uint8 operations, and return new uint8 images.

        The result stores each channel contiguously, which makes later steps twice as fast on a CPU.
        """
        out = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
        size = (images.shape[2], images.shape[3])
        block_rows = rows_at_once(images)
        rounds = plan_rounds(self.layout, table.numpy(), size, block_rows, images.device)

        shifts = self._shifts(table, images.device)
        reflect = self.config.crop == "simple"

        for start in range(0, len(images), block_rows):
            rows = slice(start, start + block_rows)
            block = images[rows]
            if shifts is not None:
                block = pixel_ops.shift(block, *shifts[rows].unbind(1), reflect=reflect)
            apply_rounds(rounds, rows, block, out[rows])
        return out

    def _shifts(self, table: Tensor, device: torch.device) -> Tensor | None:
        """Return the shifts of all rows by the crop, (B, 2) int64, or None if it never shifts."""
        first = self.layout.shift
        if first is None:
            return None
        return to_device([table[:, first : first + 2].long().numpy()], device)[0]

    def change_batch(self, batch: Any) -> Any:
        """Return `batch` with images processed by `change`. `vit.data.loader.Loader` calls this
        method as `on_device`."""
        return replace(batch, images=self.change(batch.images, batch.table))

    def finish(self, images: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize, erase and mix `images`, the uint8 output of `change`; see `__call__`."""
        # Noise is costly, so compute it only for rows with a box. Call `nonzero` on the host,
        # because on the device it forces a host-device sync. A compiled graph processes all rows,
        # because a varying number of rows causes recompilation.
        erased = np.arange(len(table))
        if self.layout.erase is not None and not self.compiled:
            top, bottom = table[:, self.layout.erase], table[:, self.layout.erase + 1]
            erased = (bottom > top).numpy().nonzero()[0]

        values = table.numpy()
        # The partner's weight is 0 or 1 per pixel for CutMix, and 1 - lambda for MixUp. Unmixed
        # rows have lambda 1, so all rows can be mixed in the same way.
        partner_share = 1.0 - values[:, LAMBDA, None]
        is_cut = values[:, CUTMIX] > 0
        partner = partners(self.config, len(table))
        on_device = to_device([values, erased, partner, partner_share, is_cut], images.device)
        return self._finish(images, labels, *on_device)

    def normalize(self, images: Tensor) -> Tensor:
        """Convert uint8 (B, C, H, W) to float32, normalized by mean and standard deviation."""
        out = torch.empty_like(images, dtype=torch.float32)
        rows = rows_at_once(images)
        for part, to in zip(images.split(rows), out.split(rows), strict=True):
            torch.addcmul(self.shift, part, self.scale, out=to)
        return out

    def _finish_on_device(
        self,
        images: Tensor,
        labels: Tensor,
        table: Tensor,
        erased: Tensor,
        partner: Tensor,
        partner_share: Tensor,
        is_cut: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the device part of `finish`; all arguments are on the device.

        Args:
            erased: The rows with a box to erase, int64.
            partner: The row that each row is mixed with, (B,) int64.
            partner_share: The partner's weight, (B, 1) float32.
            is_cut: True for CutMix, (B,) bool.
        """
        inputs = self.normalize(images)
        targets = torch.zeros(len(labels), self.num_classes, device=labels.device)
        targets.scatter_(1, labels[:, None], 1.0)
        block_rows = rows_at_once(images)

        if self.layout.erase is not None:
            for part in erased.split(block_rows):
                inputs[part] = self._erase(inputs[part], table[part, self.layout.erase :])

        if not mixes(self.config):
            return inputs, targets
        mixed = torch.empty_like(inputs)
        for start in range(0, len(inputs), block_rows):
            rows = slice(start, start + block_rows)
            share = torch.where(
                is_cut[rows, None, None, None],
                pixel_ops.in_box(inputs, table[rows, TOP : RIGHT + 1]),
                partner_share[rows, :, None, None],
            )
            torch.lerp(inputs[rows], inputs[partner[rows]], share, out=mixed[rows])
        return mixed, torch.lerp(targets, targets[partner], partner_share)

    def _erase(self, inputs: Tensor, columns: Tensor) -> Tensor:
        """Erase boxes of normalized images (Zhong et al. 2020).

        As in timm, boxes are filled with 0, a standard normal color, or normal noise.
        """
        fill: Tensor | float = 0.0
        if self.config.erasing_mode == "rand":
            fill = columns[:, 4 : 4 + inputs.shape[1], None, None]
        elif self.config.erasing_mode == "pixel":
            # Noise is a hash of the row's seed, so it is the same on every device and in every
            # micro-batch.
            fill = pixel_ops.noise(columns[:, 4].int(), self.quantiles, *inputs.shape[1:])
        return torch.where(pixel_ops.in_box(inputs, columns[:, :4]), fill, inputs)


def create_augment(
    config: AugmentConfig,
    data: DataConfig,
    num_classes: int,
    device: torch.device,
    *,
    compiled: bool = False,
) -> Augment:
    """Create the augmentation that runs on the device, for training and evaluation.

    `compiled` has no effect on a CPU, because compilation does not help there.
    """
    return Augment(
        config,
        num_classes,
        data.mean,
        data.std,
        device,
        compiled=compiled and device.type == "cuda",
    )
