"""Compute model FLOPs utilization (MFU): the fraction of a device's peak that training reaches.

MFU is images per second times FLOPs per image, divided by the peak FLOPs per second of the device
(Chowdhery et al. 2022, "PaLM", appendix B). FLOPs that activation checkpointing repeats are not
counted.

    model -> FLOPs per image            \\
    device -> peak: data sheet, or GEMM -> `Utilization` -> metrics.jsonl, live line, report, bench
"""

import functools
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

import torch

from vit.distributed.process_group import now_s
from vit.layers.image_model import ImageModel
from vit.layers.precision import AUTOCAST_DTYPE
from vit.system.gpus import find_device
from vit.training.model_summary import flops_per_image, frozen_flops_per_image

PASSES = 3
"""The cost of a training step, in forward passes: 1, plus 2 for the backward pass."""
GEMM_TRIES = 8


@dataclass(frozen=True)
class Peak:
    """The peak rate of one device."""

    peak_tflops: float
    """The rate of matrix products in 10**12 FLOPs per second. A multiply-add counts as 2."""
    peak_source: str
    """The source of the peak: "data sheet" or "measured"."""


@dataclass(frozen=True)
class Utilization:
    """Converts images per second into a fraction of the peak."""

    flops_per_image: int
    """The FLOPs of training on one image."""
    peak: Peak | None
    """The peak of one device; None if unknown, as on a CPU."""
    stages: tuple[tuple[int, int], ...] = ()
    """(end step, FLOPs per image) of each stage with its own image size, in order."""

    def flops_at(self, step: int) -> int:
        """Return the FLOPs of training on one image at `step`, counted from 0."""
        return next((flops for until, flops in self.stages if step < until), self.flops_per_image)

    def mfu(self, images_per_s: float, step: int | None = None) -> float | None:
        """Return the fraction of the peak FLOP/s reached at `images_per_s` on one device, or None
        if the peak is unknown.

        step: the step of these images, counted from 0; None means after all stages.
        """
        if self.peak is None:
            return None
        flops = self.flops_per_image if step is None else self.flops_at(step)
        return flops * images_per_s / (self.peak.peak_tflops * 1e12)

    def steps_like(self, step: int, first: int, stop: int) -> float:
        """Return the number of steps like `step` that would cost as many FLOPs as steps [first,
        stop)."""
        borders = [first, *(min(max(until, first), stop) for until, _ in self.stages), stop]
        lengths = [after - before for before, after in pairwise(borders)]
        flops = [*(flops for _, flops in self.stages), self.flops_per_image]
        return sum(map(mul, lengths, flops)) / self.flops_at(step)


def train_flops_per_image(
    model: ImageModel, micro_batch_size: int, image_size: tuple[int, int] | None = None
) -> int:
    """Return the FLOPs of training on one image, in micro-batches of the given size.

    `model` must come from `create_model` and must not be wrapped. Branches that drop path skips,
    and the backward pass of frozen parts, are not counted. image_size: as in `flops_per_image`.
    """
    forward = flops_per_image(model, micro_batch_size, image_size)
    # Frozen parts have no backward pass, because they precede all trained parts.
    backward = forward - frozen_flops_per_image(model, micro_batch_size, image_size)
    return forward + (PASSES - 1) * backward


@functools.cache
def find_peak(device: torch.device, precision: str) -> Peak | None:
    """Return the peak FLOP/s of `device` at `precision`, or None for a CPU.

    The peak of a GPU that is not in the table is measured, which takes tens of milliseconds.
    """
    if device.type != "cuda":
        return None

    gpu = find_device(torch.cuda.get_device_name(device))
    if gpu is not None:
        return Peak(gpu.peak_tflops(precision), "data sheet")
    return measure_peak(device, precision)


def measure_peak(device: torch.device, precision: str, size: int | None = None) -> Peak:
    """Time several products of two `size` x `size` matrices, and return the highest rate.

    The matrices are random, because products of constants draw less power and would run at a higher
    clock than training does.
    """
    on_gpu = device.type == "cuda"
    if size is None:
        size = (4096 if precision == "fp32" else 8192) if on_gpu else 1024
    dtype = AUTOCAST_DTYPE.get(precision, torch.float32)

    generator = torch.Generator(device)  # leaves training's random state unchanged
    a = torch.randn(size, size, generator=generator, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(GEMM_TRIES):  # the first call may load the library
        began_s = now_s(device)
        torch.mm(a, a)
        best_s = min(best_s, now_s(device) - began_s)

    del a
    if on_gpu:
        torch.cuda.empty_cache()
    return Peak(2 * size**3 / best_s / 1e12, "measured")
