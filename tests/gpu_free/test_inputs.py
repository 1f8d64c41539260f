"""Test that augmentation with any settings computes the inputs and targets without waiting for the
GPU."""

from __future__ import annotations

import pytest
import torch
from augmenting import DEIT3, POLICIES, mixed_table
from gpu_free.fake_gpu import GPU, gpu_without_memory

from vit.config.schema import AugmentConfig
from vit.data.augment.apply import Augment

SIZE = (40, 120)
ROWS = 64
MIXED = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
SETTINGS = {
    **POLICIES,
    "plain": AugmentConfig(hflip_prob=0.0),
    "crops": AugmentConfig(crop_scale=(0.5, 1.0), crop_ratio=(1.0, 1.0)),
    "strengths": AugmentConfig(randaugment_layers=3, randaugment_magnitude=5.0, magnitude_std=1.0),
    "erasing": AugmentConfig(
        erasing_prob=1.0, erasing_area=(0.1, 0.2), erasing_aspect=(1.0, 2.0), erasing_mode="rand"
    ),
    "mixing": AugmentConfig(**MIXED, mix_prob=0.5, cutmix_switch_prob=0.3, mixup_off_epoch=9),
    "mixing pairs": AugmentConfig(**MIXED, mixup_mode="pair", mix_group_size=8),
    "mixing images": AugmentConfig(**MIXED, mixup_mode="elem"),
    "all of deit3": DEIT3.model_copy(update={"erasing_prob": 0.5, **MIXED}),
}


def test_every_setting_is_tried():
    fields = set(AugmentConfig.model_fields)
    defaults = AugmentConfig()
    for config in SETTINGS.values():
        fields -= {name for name in fields if getattr(config, name) != getattr(defaults, name)}
    assert not fields, "add values other than the default for these fields to SETTINGS"


def changes_color(config: AugmentConfig) -> bool:
    """Return whether the setting changes colors. The config rejects such settings for grayscale
    images (vit/config/checks.py)."""
    policies = config.randaugment_layers or config.auto_augment
    return bool(policies or any(config.color_jitter))


CASES = [
    (name, channels)
    for name, config in SETTINGS.items()
    for channels in ([3] if changes_color(config) else [3, 1])
]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("name", "channels"), CASES)
def test_no_setting_waits_for_the_gpu(name, channels):
    config = SETTINGS[name]
    table = torch.from_numpy(mixed_table(config, ROWS, SIZE))
    with gpu_without_memory() as mode:
        augment = Augment(config, 10, (0.5,) * channels, (0.25,) * channels, GPU)
        images = torch.empty(ROWS, channels, *SIZE, dtype=torch.uint8, device=GPU)
        labels = torch.empty(ROWS, dtype=torch.int64, device=GPU)
        # The first call may wait, because it copies constants to the GPU.
        augment(images, labels, table)
        mode.waits.clear()
        inputs, targets = augment(images, labels, table)
        normalized = augment.normalize(images)
    assert (inputs.shape, inputs.dtype, inputs.device) == (images.shape, torch.float32, GPU)
    assert (targets.shape, targets.dtype, targets.device) == ((ROWS, 10), torch.float32, GPU)
    assert (normalized.shape, normalized.device) == (images.shape, GPU)
    assert mode.waits == []
