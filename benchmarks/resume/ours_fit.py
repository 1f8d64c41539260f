"""Resume with this project's trainer, by running the same command again.

docs/resume.md: "If run.dir contains a checkpoint, training continues from its step. On any number
of ranks, the resumed run uses the same batches, crops, mixing and learning rates, because they
depend only on the seed and the step." `vit.fit` is what launch/train.py calls. The probe is
registered with timm, as docs/own_loop.md says for a user's own models.
"""

from typing import Any

import timm
import torch
from ours_data import SIDE_PX, make_shards, read_pixels
from probe import BATCH, EPOCHS, FOLDER, SAVE_EVERY, SEED, SHARED, WORKERS, log_step
from torch import Tensor, nn

import vit


class ImageProbe(nn.Module):
    """A model that logs the numbers and augmentations encoded in the pixels."""

    steps: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.head = nn.Linear(1, num_classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        if self.training and not images.is_meta:  # on the meta device, operations are only counted
            log_step(self.steps, *read_pixels(images))
        return self.head(images.mean((1, 2, 3))[:, None])


@timm.models.register_model
def resume_probe(pretrained: bool = False, num_classes: int = 2, **_: Any) -> nn.Module:
    return ImageProbe(num_classes)


def fit(*more: str) -> None:
    settings = [
        *more,
        *(f"data.root={make_shards()}", f"run.dir={FOLDER / 'run'}"),
        f"data.global_batch_size={BATCH}",
        f"loader.num_workers={WORKERS}",
        f"checkpoint.every_steps={SAVE_EVERY}",
        *(f"train.epochs={EPOCHS}", f"train.seed={SEED}"),
        *("data.mean=[0, 0, 0]", "data.std=[1, 1, 1]", "schedule.warmup_epochs=0"),
        f"model.image_size={SIDE_PX}",
        *("log.wandb=off", "log.report=false", "train.device=cpu", "train.precision=fp32"),
    ]

    config = SHARED / "probe.yaml"
    config.write_text("model:\n  name: timm/resume_probe\n")
    vit.fit(vit.load_config(config, settings))


if __name__ == "__main__":
    fit()
