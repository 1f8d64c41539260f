"""Test that augmentation applies operations of the same kind to many images together.

Grouping operations must not change the pixels, must launch few kernels, and must never wait for the
device.
"""

from __future__ import annotations

import pytest
import torch
from augmenting import POLICIES, mixed_table, on_pixels, photographs, random_images, table_of
from gpu_free.fake_gpu import Launches, gpu_without_memory

from vit.config.schema import AugmentConfig
from vit.data.augment import apply, pixel_ops
from vit.data.augment.apply import Augment
from vit.data.augment.table import FLIP

LAUNCHES = {
    "timm": 158,
    "torchvision": 120,
    "big_vision": 138,
    "deit3": 159,
    "jitter": 206,
    "auto_augment": 92,
}
"""The expected number of kernel launches for 512 images with each policy in `POLICIES`. For timm,
38 of the launches perform random erasing."""


def on_meta(name: str, num: int) -> tuple[Augment, tuple[torch.Tensor, ...]]:
    images = torch.empty(num, 3, 40, 120, dtype=torch.uint8, device="meta")
    labels = torch.empty(num, dtype=torch.int64, device="meta")
    table = torch.from_numpy(mixed_table(POLICIES[name], num, (40, 120)))
    augment = Augment(POLICIES[name], 10, (0.5,), (0.25,), torch.device("meta"))
    return augment, (images, labels, table)


@pytest.mark.parametrize("name", POLICIES)
def test_the_number_of_launches_does_not_depend_on_the_number_of_images(name):
    launches = []
    for num in (256, 512):
        augment, arguments = on_meta(name, num)
        # The first call also copies constants, so its kernel launches are not counted.
        augment(*arguments)
        with Launches() as counted:
            augment(*arguments)
        launches.append(counted.total())
    assert launches == [LAUNCHES[name]] * 2, counted


def test_pooling_on_a_gpu_equals_the_sums_on_a_cpu():
    images = random_images(7, 3, 33, 20).float()
    assert torch.equal(pixel_ops._pooled(images), pixel_ops._added(images))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_waits_for_the_device(name):
    """The fake GPU reports `.item()`, branches on pixel values, masks of unknown size, and tensors
    on the host."""
    table = torch.from_numpy(mixed_table(POLICIES[name], 56, (40, 120)))
    gpu = torch.device("cuda", 0)
    with gpu_without_memory() as mode:
        augment = Augment(POLICIES[name], 10, (0.5,), (0.25,), gpu)
        images = torch.empty(56, 3, 40, 120, dtype=torch.uint8, device=gpu)
        labels = torch.empty(56, dtype=torch.int64, device=gpu)
        # The first call may wait, because it copies constants to the GPU.
        augment(images, labels, table)
        mode.waits.clear()
        inputs, targets = augment(images, labels, table)
    assert (inputs.shape, inputs.dtype, targets.shape) == (images.shape, torch.float32, (56, 10))
    assert inputs.device == targets.device == gpu
    assert mode.waits == []


@pytest.mark.parametrize("name", POLICIES)
def test_results_do_not_depend_on_the_number_of_images_changed_at_once(name, monkeypatch):
    config = POLICIES[name]
    images = torch.from_numpy(photographs()).repeat(8, 1, 1, 1)
    labels = torch.arange(56) % 10
    table = torch.from_numpy(mixed_table(config, 56, (40, 120)))
    augment = on_pixels(config)
    expected = augment(images, labels, table)
    for values in (1, 5 * images[0].numel(), 2**40):
        monkeypatch.setattr(apply, "CPU_VALUES", values)
        for ours, theirs in zip(augment(images, labels, table), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_a_batch_without_erased_boxes_equals_one_without_erasing(mode):
    config = AugmentConfig(erasing_prob=1e-9, erasing_mode=mode)
    images = random_images(4, 3, 24, 20)
    table = table_of(config, 4)
    table[:, FLIP] = 0
    inputs, _ = on_pixels(config)(images, torch.arange(4), torch.from_numpy(table))
    torch.testing.assert_close(inputs, images.float())
