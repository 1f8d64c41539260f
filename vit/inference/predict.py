"""Places of images in, the likeliest classes of each out, in their order.

Worker processes decode into shared memory (`vit.data.loader`) while the model computes. On a GPU a
batch is read back after the next one was queued, so that neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from vit.data.batches import Batch
from vit.data.loader import Loader
from vit.inference.batches import PlaceBatches
from vit.inference.inputs import Place
from vit.inference.predictor import Trained
from vit.system.host import num_cores

CPU_BATCH = 32
"""Images in a forward pass on a CPU, at most: more gain nothing, and delay the first result."""
FEW_IMAGES = 64
"""Fewer are decoded by the process itself: workers take longer to start."""


class Predictions(NamedTuple):
    """What was predicted for consecutive places, B of them."""

    first: int
    """Number of the first place."""
    labels: Tensor
    """(B, k) int64 on the CPU: the likeliest classes, first the likeliest."""
    probabilities: Tensor
    """(B, k) float32 on the CPU, in [0, 1]."""
    problems: dict[int, str]
    """Number of the place -> why it could not be read. Its labels mean nothing."""
    pixels: Tensor | None
    """(B, C, H, W) uint8 of the images as the model saw them, if they were asked for."""


def predict(
    trained: Trained,
    places: Sequence[Place],
    top: int = 5,
    *,
    batch_size: int | None = None,
    num_workers: int | None = None,
    num_pixels: int = 0,
) -> Iterator[Predictions]:
    """Yield predictions of all `places`, batch by batch, in their order.

    Args:
        top: classes of each image; fewer if the model has fewer.
        batch_size: images in a forward pass; None: the run's `eval.batch_size`, on a CPU at most
            `CPU_BATCH`.
        num_workers: processes that decode; None: as many as there are cores, or none for a few.
        num_pixels: of so many first places the pixels come along.

    Raises:
        WorkerError: a worker has died or hangs.
    """
    if batch_size is None:
        batch_size = trained.config.eval.batch_size
        if trained.device.type == "cpu":
            batch_size = min(batch_size, CPU_BATCH)
    if num_workers is None:
        num_workers = 0 if len(places) <= FEW_IMAGES else num_cores()
    batches = PlaceBatches(
        places,
        trained.preprocess.image_format,
        trained.preprocess.view,
        min(batch_size, len(places)),
    )
    loader = Loader(batches, 0, len(batches), num_workers=num_workers, device=trained.device)
    waiting: Predictions | None = None
    with loader:
        for position, batch in enumerate(loader):
            queued = _queue(trained, batch, position, batches, top, num_pixels)
            if waiting is not None:
                yield _read(waiting)
            waiting = queued
    if waiting is not None:
        yield _read(waiting)


def _queue(
    trained: Trained, batch: Batch, position: int, batches: PlaceBatches, top: int, num_pixels: int
) -> Predictions:
    """Queue the forward pass of a batch; its results are still on the device."""
    filled = batches.num_filled(position)
    first = position * batches.layout.num_rows
    images = batch.images[:filled]
    probabilities = trained(trained.preprocess.normalize(images)).float().softmax(1)
    values, labels = probabilities.topk(min(top, probabilities.shape[1]))
    problems = {}
    if batch.bad_keys:
        bad = (batch.weights[:filled] == 0).nonzero()[:, 0].tolist()
        problems = {first + row: reason for row, reason in zip(bad, batch.bad_keys, strict=True)}
    pixels = images[: num_pixels - first].clone() if first < num_pixels else None
    return Predictions(first, labels, values, problems, pixels)


def _read(queued: Predictions) -> Predictions:
    """Wait for what was queued, and return it on the CPU."""
    pixels = None if queued.pixels is None else queued.pixels.cpu()
    return queued._replace(
        labels=queued.labels.cpu(), probabilities=queued.probabilities.cpu(), pixels=pixels
    )
