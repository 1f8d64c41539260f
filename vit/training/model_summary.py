"""Count the parameters and FLOPs of a model, and print the shapes at each stage.

The forward pass runs on the meta device, so it computes and allocates nothing.
"""

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from vit.layers.drop_path import DropPaths, PatchDropout
from vit.layers.image_model import ImageModel
from vit.training.freeze import frozen_parts


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, both trainable and frozen. Buffers, such as fixed positions,
    are ignored."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_image(
    model: ImageModel,
    training_batch_size: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> int:
    """Return the forward FLOPs of one image in matrix products and convolutions.

    A multiply-add counts as 2. `model` must come from `create_model` and must not be wrapped (DDP,
    FSDP2).

    Args:
        training_batch_size: If given, count a training micro-batch of this size, in which drop path
            may skip branches, and return the mean per image.
        image_size: (height, width) in pixels, or None for the model's own size.
    """
    return _flops(flops_by_operator(model, training_batch_size, image_size)["Global"])


def frozen_flops_per_image(
    model: ImageModel,
    training_batch_size: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> int:
    """Return the FLOPs in `flops_per_image` that frozen parts of the model account for."""
    parts = [name for name, _ in frozen_parts(model)]
    if not parts:
        return 0

    flops = flops_by_operator(model, training_batch_size, image_size)
    # FlopCounterMode prefixes each name with the model's class name.
    return sum(_flops(flops.get(f"{type(model).__name__}.{part}", {})) for part in parts)


def _flops(by_operator: dict[Any, float]) -> int:
    return int(sum(by_operator.values()))


def flops_by_operator(
    model: ImageModel, training_batch_size: int | None, image_size: tuple[int, int] | None
) -> dict[str, dict[Any, float]]:
    """Return the forward FLOPs of one image, keyed by module name and operator.

    The name "Global" stands for the whole model. The arguments are the same as for
    `flops_per_image`.
    """
    weights = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    # Use at least 2 images, because batch norms in training reject a single image.
    batch_size = 1 if training_batch_size is None else max(training_batch_size, 2)
    shape = (batch_size, model.in_chans, *(image_size or model.image_size))
    images = torch.empty(shape, device="meta")

    modes = {module: module.training for module in model.modules()}
    model.train(training_batch_size is not None)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.func.functional_call(model, weights, (images,))
    for module, mode in modes.items():
        module.training = mode

    return {
        name: {operator: flops / batch_size for operator, flops in by_operator.items()}
        for name, by_operator in counter.get_flop_counts().items()
    }


def print_shapes(model: ImageModel, name: str) -> None:
    """Print a line for each stage of `model`, which is on the meta device, and the totals."""
    print(f"{'stage':<20} {'module':<18} {'in':<20}    {'out':<20} {'parameters':>12}")
    handles = _print_shapes_in_forward(model)
    gflop = flops_per_image(model) / 1e9
    digits = ".2f" if gflop >= 1 else ".2g"  # a demo model needs less than 0.01
    for handle in handles:
        handle.remove()
    print(
        f"{name} at {model.image_size[0]}x{model.image_size[1]}: {count_parameters(model):,}"
        f" parameters, {gflop:{digits}} GFLOP per image forward (a multiply-add counts as 2; papers"
        " often count 1)"
    )


def _print_shapes_in_forward(model: nn.Module) -> list[RemovableHandle]:
    """Make forward passes print a line for each stage and each part of the first block."""

    def report(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Print the shapes of a module's input and output, and its number of parameters."""
        before, after = (
            f"({', '.join(map(str, ('B', *tensor.shape[1:])))})" for tensor in (inputs[0], output)
        )
        print(
            f"{name:<20} {type(module).__name__:<18} {before:<20} -> {after:<20}"
            f" {count_parameters(module):>12,}"
        )

    return [
        module.register_forward_hook(partial(report, name))
        for name, module in model.named_modules()
        if _is_shown(name, module)
    ]


def _is_shown(name: str, module: nn.Module) -> bool:
    """Return whether a module is a stage or a part of the first block, and computes something."""
    return (
        name != ""
        and ("." not in name or name.startswith("blocks.0."))
        and not isinstance(module, (nn.Identity, nn.Dropout, DropPaths, PatchDropout))
    )
