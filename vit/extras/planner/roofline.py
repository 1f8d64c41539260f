"""Predict the time to train on one image from a GPU's peak FLOP/s and memory bandwidth.

    model on the meta device -> `forward_work` -> `training_work` -> `seconds` on a GPU

The time has two parts: matrix products run at a fraction of the data sheet's peak, and activations
pass through memory at the data sheet's bandwidth. Training takes the time of three forward passes.
benchmarks/planner/planner_error.py fits the constants below to published measurements, and
docs/planner_error.md lists the errors.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vit.layers.image_model import ImageModel
from vit.system.gpus import Gpu, find_device
from vit.training.freeze import frozen_parts
from vit.training.model_summary import flops_by_operator

SHARE_OF_PEAK = 0.51
"""The fraction of the data sheet's peak FLOP/s that matrix products achieve."""
SHARE_OF_PEAK_GEFORCE = 1.02
"""`SHARE_OF_PEAK` for GeForce GPUs. Their data sheets give the rate with fp32 accumulation, which
is half of the hardware's peak and therefore easy to reach."""
BYTES_COMPILED = 9.8
"""The bytes that a forward pass moves per output element of a linear layer. They include the norms,
activation functions and additions between the linear layers."""
BYTES_EAGER = 16.0
"""The bytes that a forward pass moves per output element of a linear layer without
`train.compile`."""
LEAST_BYTES = 4.2
"""The bytes per element of a compiled step whose tokens between blocks are bf16, without operands
of matrix products, as benchmarks/step_bytes.py counts them."""
UPDATE_BYTES = 52
"""The bytes that an update moves per weight, in 13 fp32 numbers: AdamW reads four and writes three,
the norm reads one, clipping reads and writes one, and the average reads two and writes one."""
RECOMPUTED_ATTENTION = 0.5
"""The number of attention's forward passes that its backward pass repeats, because fused attention
does not store the scores (FlashAttention-2, arXiv 2307.08691, section 3.1.2)."""
ATTENTION_OPERATORS = ("bmm", "scaled_dot_product")
GEFORCE = ("RTX-3090", "RTX-4090", "RTX-5090")


@dataclass(frozen=True)
class Work:
    """The work of computing one image. A multiply-add counts as two FLOPs."""

    linear_flops: float
    """The FLOPs of linear layers and convolutions."""
    attention_flops: float
    """The FLOPs of products of queries, keys and values."""
    elements: float
    """The number of output elements of linear layers."""

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.linear_flops + self.attention_flops


def forward_work(
    model: ImageModel,
    training_batch_size: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> tuple[Work, Work]:
    """Return the work of a forward pass for one image, and the part of it in trained layers.

    `model` comes from `create_model` and is not wrapped. The other arguments are the same as for
    `vit.training.model_summary.flops_per_image`.
    """
    frozen = dict(frozen_parts(model))
    frozen_modules = set[nn.Module]()
    for part in frozen.values():
        frozen_modules.update(part.modules())

    batch_sizes: list[int] = []
    elements = Counter[str]()

    def count_images(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        batch_sizes.append(len(inputs[0]))

    def count_elements(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        elements["frozen" if module in frozen_modules else "trained"] += output.numel()

    handles = [model.register_forward_pre_hook(count_images)]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles += [module.register_forward_hook(count_elements) for module in linear]
    flops = flops_by_operator(model, training_batch_size, image_size)
    for handle in handles:
        handle.remove()

    num_images = batch_sizes[-1]
    whole = _work(flops["Global"], elements.total() / num_images)
    # The backward pass skips these parts.
    parts = [flops.get(f"{type(model).__name__}.{name}", {}) for name in frozen]
    frozen_work = [_work(part, 0) for part in parts]
    trained = Work(
        whole.linear_flops - sum(work.linear_flops for work in frozen_work),
        whole.attention_flops - sum(work.attention_flops for work in frozen_work),
        elements["trained"] / num_images,
    )

    return whole, trained


def _work(flops: dict[Any, float], elements: float) -> Work:
    """Return the work of these FLOPs, which are keyed by operator."""
    attention: float = 0
    for operator, number in flops.items():
        if any(name in str(operator) for name in ATTENTION_OPERATORS):
            attention += number

    return Work(sum(flops.values()) - attention, attention, elements)


def training_work(forward: Work, trained: Work, recomputed: float = 0.0) -> Work:
    """Return the work of training on one image.

    trained: the part of `forward` that has a backward pass. recomputed: the share of `trained` that
    the backward pass computes again (`train.activation_checkpointing`).
    """
    passes = 2 + recomputed
    return Work(
        forward.linear_flops + passes * trained.linear_flops,
        forward.attention_flops + (passes + RECOMPUTED_ATTENTION) * trained.attention_flops,
        forward.elements + passes * trained.elements,
    )


def seconds(work: Work, gpu: Gpu, precision: str, compiled: bool) -> float:
    """Return the predicted time of `work` on `gpu`. fp32 moves twice as many bytes as bf16 and
    fp16."""
    share = SHARE_OF_PEAK_GEFORCE if gpu.name in GEFORCE else SHARE_OF_PEAK
    bytes_per_element = BYTES_COMPILED if compiled else BYTES_EAGER
    num_bytes = work.elements * bytes_per_element * (2 if precision == "fp32" else 1)
    flops_per_s = share * gpu.peak_tflops(precision) * 1e12
    return work.flops / flops_per_s + num_bytes / (gpu.bandwidth_gbs * 1e9)


def bound_s(
    model: ImageModel, num_images: int, micro_batch_size: int, device_name: str, precision: str
) -> float | None:
    """Return the time of a training step of `num_images` at the limits of a device, or None if its
    peak is unknown.

    Matrix products run at the data sheet's peak, other kernels at its bandwidth, and nothing is
    recomputed. The update is AdamW's with clipping and an average. `model` as for `forward_work`.
    micro_batch_size: determines how many samples and patches are dropped.
    """
    gpu = find_device(device_name)
    if gpu is None:
        return None

    work = training_work(*forward_work(model, micro_batch_size))
    num_weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_bytes = num_images * work.elements * LEAST_BYTES * (2 if precision == "fp32" else 1)
    num_bytes += num_weights * UPDATE_BYTES
    flops_per_s = gpu.peak_tflops(precision) * 1e12
    return num_images * work.flops / flops_per_s + num_bytes / (gpu.bandwidth_gbs * 1e9)
