"""Augmentation of micro-batches on the device: a pure function of (images, labels, table).

Images arrive as uint8 and stay so for everything that works on grey levels: the reflected margin of
the simple crop, the flip, then one operation after the other (RandAugment, 3-Augment, colour
jitter), each on the rows that drew it. They become float32 with mean and deviation of the data
removed; boxes are erased; at last rows, and their labels, mix with their partners.

Nothing here draws a random number or waits for the device: the host knows from the same table
(`vit.data.augment.draw`) which rows an operation takes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.config.schema import AugmentConfig, DataConfig
from vit.data.augment import pixel_ops
from vit.data.augment.dialects import OPS
from vit.data.augment.draw import mixes, partners
from vit.data.augment.table import (
    BOTTOM,
    CUTMIX,
    FLIP,
    LAMBDA,
    LEFT,
    RIGHT,
    TOP,
    OpColumn,
    table_layout,
)

CPU_CHUNK = 2**18
"""Values of images that an operation takes at once on a CPU, so that what it writes is still in
the cache when it is read: one image of 224 pixels (docs/experiments.md). A GPU takes all rows."""


class Augment:
    """Everything between decoded pixels and the model's inputs and targets.

    `mean`, `std`: per channel, for images scaled to [0, 1]. `compiled`: `torch.compile` the part
    that has one shape in all steps. Evaluation, which has no table, only uses `normalize`.
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
        # (x / 255 - mean) / std as one multiplication and addition.
        self.scale = (1.0 / (255.0 * torch.tensor(std))).view(1, -1, 1, 1).to(device)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1).to(device)
        self._finish = torch.compile(self.finish, dynamic=False) if compiled else self.finish

    def __call__(self, images: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Augment `images` (B, C, H, W) uint8 and `labels` (B,) int64, both on the device.

        `table` (B, K) float32 is on the host. Returns inputs (B, C, H, W) float32 and soft targets
        (B, num_classes) float32.
        """
        device = images.device
        on_device = table.to(device, non_blocking=True)
        images = self._apply_ops(self._move(images, on_device), table, on_device)
        erased = torch.arange(len(table), device=device)
        # Only the rows that are erased, as noise is costly. `nonzero` of the table on the host: on
        # the device it would be a host-device sync. Compiled, one shape for all rows is cheaper
        # than a graph per number of rows.
        if self.layout.erase is not None and not self.compiled:
            top, bottom = table[:, self.layout.erase], table[:, self.layout.erase + 1]
            erased = (bottom > top).nonzero()[:, 0].to(device, non_blocking=True)
        partner = torch.from_numpy(partners(self.config, len(table))).to(device, non_blocking=True)
        return self._finish(images, labels, on_device, erased, partner)

    def normalize(self, images: Tensor) -> Tensor:
        """Turn uint8 (B, C, H, W) into float32 with mean and deviation of the data removed."""
        return torch.addcmul(self.shift, images.float(), self.scale)

    def _move(self, images: Tensor, table: Tensor) -> Tensor:
        """Apply the simple crop's margin and the flip; returns a copy."""
        if self.layout.shift is not None:
            right, down = table[:, self.layout.shift : self.layout.shift + 2].long().unbind(1)
            images = pixel_ops.shift_reflected(images, right, down)
        # Channels apart, not last: twice as fast on a CPU in all that follows.
        images = images.contiguous()
        return torch.where(table[:, FLIP].view(-1, 1, 1, 1) > 0, images.flip(-1), images)

    def _apply_ops(self, images: Tensor, table: Tensor, on_device: Tensor) -> Tensor:
        """Apply each operation to its rows of `images` uint8, in place."""
        if not self.layout.op_columns:
            return images
        numbers = table[:, [op_column.column for op_column in self.layout.op_columns]].numpy().T
        # Sorted by operation, the rows of each are a slice: all lists of rows go to the device in
        # one copy, where a boolean mask for each would be a host-device sync.
        by_number = np.argsort(numbers, axis=1, kind="stable")
        rows_on_device = torch.from_numpy(by_number).to(images.device, non_blocking=True)
        for index, op_column in enumerate(self.layout.op_columns):
            ordered = numbers[index, by_number[index]]
            ops, starts = np.unique(ordered, return_index=True)
            stops = [*starts[1:], len(ordered)]
            for op, start, stop in zip(ops.tolist(), starts, stops, strict=True):
                if op < 0:  # these rows drew none
                    continue
                for rows in self._chunks(rows_on_device[index, start:stop], images):
                    images[rows] = self._apply(op_column, int(op), images[rows], on_device[rows])
        return images

    @staticmethod
    def _chunks(rows: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        if images.device.type == "cpu":
            return rows.split(max(1, CPU_CHUNK // images[0].numel()))
        return rows.split(len(images))

    def _apply(self, op_column: OpColumn, op: int, images: Tensor, table: Tensor) -> Tensor:
        strength = table[:, op_column.column + 1].view(-1, 1, 1, 1)
        place = table[:, op_column.column + 2 : op_column.column + 4]
        # Back to uint8 after each operation, as in the sources, which rounds between operations.
        return pixel_ops.to_levels(OPS[op_column.op_set][op](images.float(), strength, place))

    def finish(
        self, images: Tensor, labels: Tensor, table: Tensor, erased: Tensor, partner: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normalise, erase, mix.

        `erased` (int64): rows whose box may not be empty; `partner` (B,) int64: the row that each
        row mixes with.
        """
        inputs = self.normalize(images)
        targets = F.one_hot(labels, self.num_classes).float()
        if self.layout.erase is not None:
            for part in self._chunks(erased, inputs):
                inputs[part] = self._erase(inputs[part], table[part, self.layout.erase :])
        if mixes(self.config):
            top, bottom, left, right, kept = (
                table[:, column].view(-1, 1, 1, 1) for column in (TOP, BOTTOM, LEFT, RIGHT, LAMBDA)
            )
            box = pixel_ops.in_box(inputs, top, bottom, left, right).float()
            # The partner's share of each pixel: 0 or 1 by the box (CutMix), or 1 - lambda (MixUp).
            # Rows that do not mix have lambda 1, so no rows need to be selected.
            share = torch.where(table[:, CUTMIX].view(-1, 1, 1, 1) > 0, box, 1.0 - kept)
            inputs = torch.lerp(inputs, inputs[partner], share)
            targets = torch.lerp(targets, targets[partner], 1.0 - table[:, LAMBDA, None])
        return inputs, targets

    def _erase(self, inputs: Tensor, columns: Tensor) -> Tensor:
        """Erase boxes of normalised images (Zhong et al. 2020).

        Filled as in timm: with 0, a standard normal colour, or normal noise.
        """
        top, bottom, left, right = (columns[:, c].view(-1, 1, 1, 1) for c in range(4))
        fill: Tensor | float = 0.0
        if self.config.erasing_mode == "rand":
            fill = columns[:, 4 : 4 + inputs.shape[1]].view(len(inputs), -1, 1, 1)
        elif self.config.erasing_mode == "pixel":
            # A hash of the row's seed: the same noise on any device and in any micro-batch.
            fill = pixel_ops.noise(columns[:, 4].int(), *inputs.shape[1:])
        return torch.where(pixel_ops.in_box(inputs, top, bottom, left, right), fill, inputs)


def create_augment(
    config: AugmentConfig,
    data: DataConfig,
    num_classes: int,
    device: torch.device,
    *,
    compiled: bool = False,
) -> Augment:
    """Create the device's part of the image path, for training and evaluation.

    `compiled` has no effect on a CPU, which would gain nothing from it.
    """
    compiled = compiled and device.type == "cuda"
    return Augment(config, num_classes, data.mean, data.std, device, compiled=compiled)
