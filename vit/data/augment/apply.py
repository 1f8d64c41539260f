"""Augmentation of whole micro-batches on the device: a pure function of (images, labels, table).

The data's story: `vit.data.augment.draw` has drawn a row of the table for each sample. Images come
in as uint8 and stay so through what belongs to the levels: the reflected margin of the simple crop,
the flip, then one operation after the other (RandAugment, 3-Augment, colour jitter), each on the
rows that drew it. They become float32 with the data's mean and deviation taken out; boxes are
erased; at last rows mix with their partners, and labels with them.

Nothing here draws a random number or waits for the device: which rows an operation takes is known
on the host, from the same table.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.config import AugmentConfig, DataConfig
from vit.data.augment import pixel_ops
from vit.data.augment.dialects import OPS
from vit.data.augment.draw import (
    BOTTOM,
    CUTMIX,
    FLIP,
    LAMBDA,
    LEFT,
    RIGHT,
    TOP,
    OpColumn,
    mixes,
    partners,
    table_layout,
)

CPU_CHUNK = 2**18
"""Values of the images that an operation takes at once on a CPU, so that what it writes is still in
the cache when it is read: one image of 224 pixels (docs/experiments.md). A GPU takes all rows."""


class Augment:
    """Everything between decoded pixels and the model's inputs and targets.

    `mean`, `std`: per channel, for images scaled to [0, 1]. `compiled`: `torch.compile` what has
    one shape in all steps. Without a table (evaluation) only `normalize` is used.
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
        self.scale = (1.0 / (255.0 * torch.tensor(std))).view(1, -1, 1, 1).to(device)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1).to(device)
        self._finish = torch.compile(self.finish, dynamic=False) if compiled else self.finish

    def __call__(self, images: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """`images` (B, C, H, W) uint8 and `labels` (B,) int64 on the device, `table` (B, K) float32
        on the host.

        Returns inputs (B, C, H, W) float32 and soft targets (B, num_classes) float32.
        """
        device = images.device
        on_device = table.to(device, non_blocking=True)
        images = self._apply_layers(self._move(images, on_device), table, on_device)
        erased = torch.arange(len(table), device=device)
        # noise is costly: only for the rows that need it
        if self.layout.erase is not None and not self.compiled:
            top, bottom = table[:, self.layout.erase], table[:, self.layout.erase + 1]
            erased = (bottom > top).nonzero()[:, 0].to(device, non_blocking=True)
        partner = torch.from_numpy(partners(self.config, len(table))).to(device, non_blocking=True)
        return self._finish(images, labels, on_device, erased, partner)

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to float32 with the data's mean and deviation taken out."""
        return torch.addcmul(self.shift, images.float(), self.scale)

    def _move(self, images: Tensor, table: Tensor) -> Tensor:
        """The simple crop's margin and the flip; a copy, which the layers may change, channels
        apart: twice as fast on a CPU."""
        if self.layout.shift is not None:
            right, down = table[:, self.layout.shift : self.layout.shift + 2].long().unbind(1)
            images = pixel_ops.shift_reflected(images, right, down)
        images = images.contiguous()
        return torch.where(table[:, FLIP].view(-1, 1, 1, 1) > 0, images.flip(-1), images)

    def _apply_layers(self, images: Tensor, table: Tensor, on_device: Tensor) -> Tensor:
        """Each layer's operations, each on its rows of `images` uint8, which it changes. All row
        lists travel in one copy."""
        if not self.layout.op_columns:
            return images
        numbers = table[:, [op_column.column for op_column in self.layout.op_columns]].numpy().T
        by_number = np.argsort(numbers, axis=1, kind="stable")
        rows_on_device = torch.from_numpy(by_number).to(images.device, non_blocking=True)
        for op_column, of_rows, order, rows in zip(
            self.layout.op_columns, numbers, by_number, rows_on_device, strict=True
        ):
            chosen, starts = np.unique(of_rows[order], return_index=True)
            for number, start, stop in zip(
                chosen.tolist(), starts, [*starts[1:], len(order)], strict=True
            ):
                for part in self._chunks(rows[start:stop], images) if number >= 0 else ():
                    images[part] = self._apply(
                        op_column, int(number), images[part], on_device[part]
                    )
        return images

    @staticmethod
    def _chunks(rows: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        return rows.split(
            max(1, CPU_CHUNK // images[0].numel()) if images.device.type == "cpu" else len(images)
        )

    def _apply(self, op_column: OpColumn, number: int, images: Tensor, table: Tensor) -> Tensor:
        strength = table[:, op_column.column + 1].view(-1, 1, 1, 1)
        place = table[:, op_column.column + 2 : op_column.column + 4]
        return pixel_ops.to_levels(OPS[op_column.op_set][number](images.float(), strength, place))

    def finish(
        self, images: Tensor, labels: Tensor, table: Tensor, erased: Tensor, partner: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normalise, erase, mix. `erased`: rows whose box may not be empty; `partner`: the row that
        each row mixes with; int64."""
        inputs = self.normalize(images)
        targets = F.one_hot(labels, self.num_classes).float()
        if self.layout.erase is not None:
            for part in self._chunks(erased, inputs):
                inputs[part] = self._erase(inputs[part], table[part, self.layout.erase :])
        if mixes(self.config):
            top, bottom, left, right, given = (
                table[:, c].view(-1, 1, 1, 1) for c in (TOP, BOTTOM, LEFT, RIGHT, LAMBDA)
            )
            box = pixel_ops.in_box(inputs, top, bottom, left, right).float()
            share = torch.where(table[:, CUTMIX].view(-1, 1, 1, 1) > 0, box, 1.0 - given)
            inputs = torch.lerp(inputs, inputs[partner], share)
            targets = torch.lerp(targets, targets[partner], 1.0 - table[:, LAMBDA, None])
        return inputs, targets

    def _erase(self, inputs: Tensor, columns: Tensor) -> Tensor:
        """Random erasing (Zhong et al. 2020) of normalised images, filled as in timm: by 0, a
        standard normal colour, or normal pixels."""
        top, bottom, left, right = (columns[:, c].view(-1, 1, 1, 1) for c in range(4))
        fill: Tensor | float = 0.0
        if self.config.erasing_mode == "rand":
            fill = columns[:, 4 : 4 + inputs.shape[1]].view(len(inputs), -1, 1, 1)
        elif self.config.erasing_mode == "pixel":
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
