"""How an image becomes the model's input, in the words of other programs.

What `vit/data/decode/crops.py` does in evaluation, as numbers and as a sentence: resized so that it
covers a size, the centre cut out, scaled to [0, 1], normalised per channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vit.config.schema import Config


@dataclass(frozen=True)
class View:
    """The input of a model, made of an image of any size."""

    size: tuple[int, int]
    """Height and width of the input in pixels."""
    cover: tuple[int, int]
    """Height and width that the resized image covers; its own size with `squash`."""
    squash: bool
    """Whether the image is resized to `cover` without regard to its aspect."""
    interpolation: str
    """bicubic or bilinear, antialiased."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, of images scaled to [0, 1]."""
    crop_pct: float
    """timm's word: side of the centre over the side of the resized image."""
    apply_exif: bool
    """Whether the image is turned upright first."""

    @classmethod
    def from_config(cls, config: Config) -> View:
        """The view with which the runs of `config` are evaluated."""
        height, width = config.model.height_width()
        view = config.eval
        cover = int(height / view.crop_pct), int(width / view.crop_pct)
        crop_pct = view.crop_pct
        if view.resize_px is not None:
            cover = view.resize_px, view.resize_px
            crop_pct = height / view.resize_px
            while int(height / crop_pct) < view.resize_px:  # timm cuts the fraction off, too
                crop_pct = math.nextafter(crop_pct, 0)
        data = config.data
        channels = config.model.in_chans  # one number counts for all of them
        return cls(
            (height, width),
            cover,
            view.crop_mode == "squash",
            data.interpolation,
            data.mean * channels if len(data.mean) == 1 else data.mean,
            data.std * channels if len(data.std) == 1 else data.std,
            crop_pct,
            bool(view.apply_exif),
        )

    def sentence(self) -> str:
        """What to do with an image, for a person who writes the code."""
        height, width = self.size
        how = f"{self.interpolation}, antialiased"
        if self.squash:
            resized = f"Resize it to {self.cover[0]}x{self.cover[1]} ({how})"
        elif self.cover[0] == self.cover[1]:
            resized = f"Resize it so that its shorter side has {self.cover[0]} pixels ({how})"
        else:
            resized = f"Resize it, keeping its aspect, to cover {self.cover[0]}x{self.cover[1]}"
            resized += f" ({how})"
        turned = "Turn the image as its EXIF orientation says. " if self.apply_exif else ""
        colours = "RGB" if len(self.mean) == 3 else "grey"
        mean = ", ".join(f"{value:g}" for value in self.mean)
        std = ", ".join(f"{value:g}" for value in self.std)
        return (
            f"{turned}Read the image as {colours}. {resized}. Cut out the centre of"
            f" {height}x{width} (height x width). Divide by 255, subtract the mean ({mean}), divide"
            f" by the standard deviation ({std}), each per channel. Inputs are float32, (batch,"
            f" {len(self.mean)}, {height}, {width})."
        )

    def to_dict(self) -> dict[str, Any]:
        """The same for programs, as `preprocessing.json` has it."""
        return {
            "apply_exif": self.apply_exif,
            "input_size": [len(self.mean), *self.size],
            "resize": {
                "to" if self.squash else "cover": list(self.cover),
                "interpolation": self.interpolation,
                "antialias": True,
            },
            "center_crop": list(self.size),
            "scale": 1 / 255,
            "mean": list(self.mean),
            "std": list(self.std),
        }
