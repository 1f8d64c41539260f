"""The format of a model's input images: size, channels and resizing, for each epoch of a run.

Evaluation and prediction use one size. Training may start with other sizes
(`schedule.image_sizes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vit.config.base import height_width
from vit.config.schema import DataConfig, ModelConfig, ScheduleConfig


@dataclass(frozen=True)
class ImageFormat:
    """The format of a model's input images."""

    size: tuple[int, int]
    """The image size (height, width) in pixels."""
    channels: int = 3
    """The number of channels, 1 or 3."""
    interpolation: str = "bicubic"
    """The interpolation, bilinear or bicubic, always antialiased."""
    stages: tuple[tuple[int, tuple[int, int]], ...] = ()
    """The training stages in order, as pairs (end epoch, image size). After the last stage, images
    have `size`."""

    @classmethod
    def from_config(
        cls, model: ModelConfig, data: DataConfig, schedule: ScheduleConfig | None = None
    ) -> ImageFormat:
        """Return the format that a config describes. Pass `schedule` for training images."""
        stages = () if schedule is None else schedule.image_sizes
        return cls(
            model.height_width(),
            model.in_chans,
            data.interpolation,
            tuple((stage.until_epoch, height_width(stage.image_size)) for stage in stages),
        )

    def in_epoch(self, epoch: int) -> ImageFormat:
        """Return the format of training images in `epoch`, counted from 0."""
        size = next((size for until, size in self.stages if epoch < until), self.size)
        return replace(self, size=size, stages=())

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """All distinct image sizes, in the order in which training uses them."""
        return list(dict.fromkeys([*(size for _, size in self.stages), self.size]))

    @property
    def largest(self) -> ImageFormat:
        """The format with the largest images."""
        return replace(self, size=max(self.sizes, key=math.prod), stages=())

    def sizes_text(self) -> str:
        """Return the sizes of training images as text: "160x160 until epoch 180, then 224x224"."""
        parts = [f"{size[0]}x{size[1]} until epoch {until}" for until, size in self.stages]
        last = f"{self.size[0]}x{self.size[1]}"
        return ", ".join([*parts, f"then {last}" if parts else last])
