"""Extract image features: the input of the model's head for each image of a split.

Each rank runs the model on its part of the evaluation batches and stores the input of the last
linear layer in fp16. The sum over ranks gives every rank the whole matrix.

The features equal timm's `forward_head(..., pre_logits=True)`: the class token, the mean of the
patches, or the output of a hidden layer before the head. `vit.extras.probes` uses these features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vit.config.schema import Config
from vit.data.augment.apply import Augment
from vit.data.batches import EvalBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.shards.split import Split
from vit.data.slots import EVAL_READY_BATCHES
from vit.distributed.process_group import World
from vit.layers.precision import autocast

PIECE = 2**25
"""The number of values (64 MiB) that the ranks sum in one call."""


def head_of(model: Any, wanted_by: str) -> nn.Module:
    """Return the layer that computes the logits of a model, including timm models.

    wanted_by: the flag that needs the layer. Raises ValueError if the layer is neither linear nor,
    in a model without a head, an identity.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear) and hasattr(model, "get_classifier"):
        head = model.get_classifier()
    if not isinstance(head, (nn.Linear, nn.Identity)):
        raise ValueError(
            f"{wanted_by} needs a model with a linear head, but {type(model).__name__} ends in"
            f" {type(head).__name__}: omit {wanted_by}"
        )
    return head


def num_features_of(model: Any, wanted_by: str) -> int:
    """Return the number of inputs of the model's head. Raises the errors of `head_of`."""
    head = head_of(model, wanted_by)
    if isinstance(head, nn.Linear):
        return head.in_features
    return getattr(model, "head_hidden_size", None) or model.embed_dim  # timm's, or ours


@torch.no_grad()
def extract_features(
    model: nn.Module,
    split: Split,
    config: Config,
    augment: Augment,
    world: World,
    *,
    wanted_by: str,
    on_images: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """Return the features of all images of `split`: (N, D) float16 on the device of each rank.

    Images are processed as in evaluation, in batches of `eval.batch_size`. `on_images` receives the
    number of finished images. The rows are equal for any number of ranks. Raises ShardError if an
    image cannot be decoded. Raises ValueError if the head is not linear, or if features are not
    finite in fp16.
    """
    head = head_of(model, wanted_by)
    width = num_features_of(model, wanted_by)
    features = torch.zeros(split.num_samples, width, dtype=torch.float16, device=world.device)
    batches = EvalBatches(
        split,
        ImageFormat.from_config(config.model, config.data),
        config.eval,
        config.eval.batch_size,
        rank=world.rank,
        world_size=world.size,
    )
    loader = Loader(
        batches,
        0,
        len(batches),
        num_workers=config.loader.num_workers,
        max_ready=EVAL_READY_BATCHES,
        device=world.device,
        stall_timeout_s=config.loader.stall_timeout_s,
    )
    head_inputs: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
    was_training = model.training
    model.eval()
    try:
        # Call no collective in this block, because a rank that fails leaves it early.
        with world.fail_together(), loader:
            for number, batch in enumerate(loader):
                # All batches have one shape, so the last rows may be padding.
                filled = batches.num_filled(number)
                with autocast(config.train.precision, world.device):
                    model(augment.normalize(batch.images))
                ids = batch.ids[:filled].to(world.device, non_blocking=True)
                features[ids] = head_inputs.pop()[:filled].to(torch.float16)
                on_images(split.num_samples * (number + 1) // len(batches))
    finally:
        handle.remove()
        model.train(was_training)
    # Each row is zero on all ranks but one, so the sum is exact.
    for piece in features.view(-1).split(PIECE):
        world.sum_(piece)
    with world.fail_together():
        if not features.isfinite().all():
            raise ValueError(
                f"{wanted_by}: features of {split.root} {split.name!r} are not finite in fp16: the"
                " weights have diverged, or the model has no norm before the head"
            )
    return features
