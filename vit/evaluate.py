"""Exact evaluation: every image of a split once, on any number of ranks.

The data's story: all ranks walk through the same number of batches of one shape (`vit.data.loader.EvalBatches`); counters add up
integers; the total must equal what `_info.json` promises, or nothing is reported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vit.data.augment import Augment
from vit.data.loader import EvalBatches, ImageFormat, Loader
from vit.data.shards import Split
from vit.distributed import World
from vit.metrics import Accuracy, AccuracyCounter
from vit.step import autocast


@torch.no_grad()
def evaluate(
    models: dict[str, nn.Module],
    split: Split,
    image: ImageFormat,
    augment: Augment,
    world: World,
    *,
    batch_size: int,
    crop_ratio: float,
    precision: str,
    num_workers: int = 0,
    on_batch: Callable[[int, int], None] | None = None,
) -> dict[str, Accuracy]:
    """Evaluate all `models` in one pass over `split`: name -> Accuracy, the same on every rank.

    `on_batch(done, total)` is called after each batch of this rank.
    """
    batches = EvalBatches(split, image, crop_ratio, batch_size, rank=world.rank, world_size=world.size)
    counters = {name: AccuracyCounter(world.device) for name in models}
    was_training = {name: model.training for name, model in models.items()}
    for model in models.values():
        model.eval()
    with Loader(batches, 0, len(batches), num_workers=num_workers, pin_memory=world.device.type == "cuda") as loader:
        for number, batch in enumerate(loader):
            batch = batch.to(world.device)
            inputs = augment.normalize(batch.images)
            for name, model in models.items():
                with autocast(precision, world.device):
                    logits = model(inputs)
                counters[name].add(logits, batch.labels, batch.weights)
            if on_batch is not None:
                on_batch(number + 1, len(batches))
    for name, model in models.items():
        model.train(was_training[name])
    results = {name: counter.result(world) for name, counter in counters.items()}
    for result in results.values():
        if result.num_images != split.num_samples:
            raise RuntimeError(
                f"evaluated {result.num_images} images, {split.name!r} has {split.num_samples}: a bug in the loader, please report it"
            )
    return results
