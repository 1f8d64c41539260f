"""Predict the most likely classes of images, in the order of the input.

Worker processes decode images into shared memory (`vit.data.loader`) while the model computes. On a
GPU, the results of a batch are read after the next batch is queued, so neither the host nor the GPU
waits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from vit.data.batches import Batch
from vit.data.loader import Loader
from vit.inference.batches import PlaceBatches
from vit.inference.inputs import ImagePlace
from vit.inference.predictor import Trained
from vit.system.host import num_cores

CPU_BATCH = 32
"""The largest batch size on a CPU. Larger batches are not faster and delay the first result."""
FEW_IMAGES = 64
"""For up to this many images, starting workers takes longer than decoding in the main process."""


class Predictions(NamedTuple):
    """The predictions for B consecutive images."""

    first: int
    """The number of the first image."""
    labels: Tensor
    """(B, k) int64 on the CPU: the most likely classes, in decreasing order of probability."""
    probabilities: Tensor
    """(B, k) float32 on the CPU, in [0, 1]."""
    problems: dict[int, str]
    """Maps the number of each unreadable image to the reason. Such an image's labels are
    meaningless."""
    pixels: Tensor | None
    """(B, C, H, W) uint8: the inputs of the model before normalization, if requested."""


def predict(
    trained: Trained,
    places: Sequence[ImagePlace],
    top: int = 5,
    *,
    batch_size: int | None = None,
    num_workers: int | None = None,
    num_pixels: int = 0,
) -> Iterator[Predictions]:
    """Yield predictions for all `places`, batch by batch, in order.

    Args:
        top: The number of classes per image. If the model has fewer classes, all are returned.
        batch_size: The number of images per forward pass. None uses the run's `eval.batch_size`,
            limited to `CPU_BATCH` on a CPU.
        num_workers: The number of decoding processes. None uses one per core, or 0 for
            `FEW_IMAGES` or fewer.
        num_pixels: The number of first images whose pixels are returned.

    Raises:
        WorkerError: A worker died or hangs.
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

    unread: Predictions | None = None
    with loader:
        for position, batch in enumerate(loader):
            queued = _queue(
                trained,
                batch,
                position * batches.layout.num_rows,
                batches.num_filled(position),
                top=top,
                num_pixels=num_pixels,
            )
            if unread is not None:
                yield _read(unread)
            unread = queued
    if unread is not None:
        yield _read(unread)


def _queue(
    trained: Trained, batch: Batch, first: int, filled: int, *, top: int, num_pixels: int
) -> Predictions:
    """Queue the forward pass of a batch, and return its results on the device.

    Args:
        first: The number of the batch's first image.
        filled: The number of rows that are not padding.
    """
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
    """Wait for `queued`, and return a copy on the CPU."""
    return queued._replace(
        labels=queued.labels.cpu(),
        probabilities=queued.probabilities.cpu(),
        pixels=None if queued.pixels is None else queued.pixels.cpu(),
    )
