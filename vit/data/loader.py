"""Batches of one rank, from any step on.

The data's story: the order says which samples stand in this rank's rows of the batch at a position; the index says where their bytes and
how big their images are; crops are drawn before decoding; images are decoded into one uint8 tensor. A worker process makes whole
batches in turn, so the content never depends on their number, and starting at position p costs nothing but the arithmetic for p.
Evaluation deals all samples of a split over the ranks in batches of one shape, filled up with rows of weight 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vit.config import AugmentConfig, Config
from vit.data.augment import draw_crops, draw_mix, draw_table, sample_keys
from vit.data.decode import decode_center, decode_window
from vit.data.files import ShardError
from vit.data.order import Order
from vit.data.shards import Split
from vit.worker import follow_parent


@dataclass(frozen=True)
class Batch:
    """Rows of one rank. B rows, images of H x W pixels with C channels."""

    images: Tensor
    """(B, C, H, W) uint8, channels last in memory."""
    labels: Tensor
    """(B,) int64."""
    weights: Tensor
    """(B,) float32: 1, or 0 for a row that counts nowhere."""
    table: Tensor
    """(B, K) float32: what `augment.Augment` applies; K = 0 for evaluation."""
    ids: Tensor
    """(B,) int64: sample numbers in the split."""
    bad_keys: tuple[str, ...] = ()
    """Samples that could not be decoded, with `on_bad_image: skip`."""

    def rows(self, start: int, stop: int) -> Batch:
        """The micro-batch of rows [start, stop)."""
        return replace(self, **{f.name: getattr(self, f.name)[start:stop] for f in fields(self) if f.name != "bad_keys"})

    def to(self, device: torch.device) -> Batch:
        """Images, labels and weights on `device`, queued; table and ids stay on the host."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("images", "labels", "weights")}
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """In page-locked memory, for copies that do not block; called by torch's DataLoader."""
        return replace(self, **{f.name: getattr(self, f.name).pin_memory() for f in fields(self) if f.name != "bad_keys"})


@dataclass(frozen=True)
class ImageFormat:
    """What the model takes."""

    size: tuple[int, int]
    """(height, width) in pixels."""
    channels: int = 3
    """1 or 3."""
    interpolation: str = "bicubic"
    """bilinear or bicubic, antialiased."""


def image_format(config: Config) -> ImageFormat:
    """What the model of `config` takes."""
    size = config.model.image_size
    return ImageFormat((size, size) if isinstance(size, int) else size, config.model.in_chans, config.data.interpolation)


@dataclass(frozen=True)
class _Failure:
    """A person's mistake found in a worker, carried home without the worker's stack."""

    message: str


class TrainBatches(Dataset):
    """Batch at a position -> this rank's rows. Pickles small: workers map the index themselves."""

    def __init__(
        self,
        split: Split,
        order: Order,
        augment: AugmentConfig,
        image: ImageFormat,
        *,
        rank: int = 0,
        world_size: int = 1,
        on_bad_image: str = "error",
    ):
        share = order.global_batch_size // world_size
        self.split, self.order, self.augment, self.image = split, order, augment, image
        self.first_row, self.last_row, self.on_bad_image = rank * share, (rank + 1) * share, on_bad_image

    def __getitem__(self, position: int) -> Batch | _Failure:
        try:
            return self._batch(position)
        except ShardError as error:
            return _Failure(str(error))

    def _batch(self, position: int) -> Batch:
        ids = self.order.rows(position, self.first_row, self.last_row)
        rows = self.split.index[ids]
        keys = sample_keys(self.order.seed, position // self.order.steps_per_epoch, ids)
        crops = draw_crops(self.augment, keys, rows["width"], rows["height"])
        weights, bad_keys = np.ones(len(ids), dtype=np.float32), []
        images = _new_images(len(ids), self.image)
        for row, (sample, crop) in enumerate(zip(ids.tolist(), crops.tolist(), strict=True)):
            try:
                images[row] = decode_window(
                    self.split.read(sample), tuple(crop), self.image.size, self.image.interpolation, self.image.channels
                )
            except ShardError:
                raise
            except ValueError as error:
                if self.on_bad_image == "error":
                    raise ShardError(_describe(self.split, sample, error) + "; data.on_bad_image=skip trains without it") from None
                images[row], weights[row] = 0, 0.0
                bad_keys.append(self.split.key(sample))
        table = draw_table(self.augment, keys)
        draw_mix(self.augment, table, weights, self.order.seed, position, self.first_row, self.image.size)
        return Batch(images, _labels(rows), torch.from_numpy(weights), torch.from_numpy(table), torch.from_numpy(ids), tuple(bad_keys))


class EvalBatches(Dataset):
    """All samples of a split once, dealt over the ranks in the same number of batches of one shape; fillers have weight 0."""

    def __init__(self, split: Split, image: ImageFormat, crop_pct: float, batch_size: int, *, rank: int = 0, world_size: int = 1):
        self.split, self.image, self.crop_pct, self.batch_size = split, image, crop_pct, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return -(-self.split.num_samples // (self.batch_size * self.world_size))

    def __getitem__(self, number: int) -> Batch | _Failure:
        start = (number * self.world_size + self.rank) * self.batch_size
        ids = np.arange(start, start + self.batch_size)
        valid = ids < self.split.num_samples
        ids = np.where(valid, ids, 0)
        images = _new_images(len(ids), self.image)
        try:
            for row in np.flatnonzero(valid).tolist():
                data = self.split.read(int(ids[row]))
                images[row] = decode_center(data, self.image.size, self.crop_pct, self.image.interpolation, self.image.channels)
        except ShardError as error:
            return _Failure(str(error))
        except ValueError as error:
            remedy = "evaluation counts every image: restore the shard, or write it again without this one"
            return _Failure(f"{_describe(self.split, int(ids[row]), error)}; {remedy}")
        labels = _labels(self.split.index[ids])
        return Batch(images, labels, torch.from_numpy(valid.astype(np.float32)), torch.empty(len(ids), 0), torch.from_numpy(ids))


def _new_images(num: int, image: ImageFormat) -> Tensor:
    return torch.zeros((num, image.channels, *image.size), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)


def _labels(rows: NDArray) -> Tensor:
    return torch.from_numpy(rows["label"].astype(np.int64))


def _describe(split: Split, sample: int, error: Exception) -> str:
    row = split.index[sample]
    return f"{split.root / split.filenames[row['shard']]}: image {split.key(sample)!r} at byte {row['offset']}: {error}"


class Loader:
    """Iterates over the batches of a dataset at positions [start, stop), with workers or without. `wait_s` adds up the time spent waiting.

    Raises ShardError in the training process for what a worker found, naming shard and key. Close it, or leave it as a context.
    """

    def __init__(
        self,
        batches: TrainBatches | EvalBatches,
        start: int,
        stop: int,
        *,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
    ):
        self.wait_s = 0.0
        self._iterator: Iterator[Batch | _Failure] | None = iter(
            DataLoader(
                batches,
                batch_size=None,
                sampler=range(start, stop),
                num_workers=min(num_workers, max(stop - start, 0)),
                prefetch_factor=prefetch_batches if min(num_workers, stop - start) > 0 else None,
                pin_memory=pin_memory,
                collate_fn=_share,
                worker_init_fn=_start_worker,
            )
        )

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        assert self._iterator is not None, "a closed loader was read"
        began = time.perf_counter()
        try:
            batch = next(self._iterator)
        except (OSError, EOFError):  # the socket of a worker that was killed; torch, told by SIGCHLD in a moment, says so better
            time.sleep(1)
            raise
        self.wait_s += time.perf_counter() - began
        if isinstance(batch, _Failure):
            raise ShardError(batch.message)
        return batch

    def close(self) -> None:
        """End the workers now, not when the iterator goes: a traceback may hold it to the end, where Python would wait for them, and they
        ignore SIGTERM."""
        shut_down = getattr(self._iterator, "_shutdown_workers", None)  # none without workers
        if shut_down is not None:
            shut_down()
        self._iterator = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _share(batch: Any) -> Any:
    """In a worker, move the batch to shared memory, where it has to go. Left to the queue's own thread, a full /dev/shm would only be
    printed, and training would wait for ever."""
    if get_worker_info() is not None and isinstance(batch, Batch):
        for tensor in (batch.images, batch.labels, batch.weights, batch.table, batch.ids):
            tensor.share_memory_()
    return batch


def _start_worker(worker: int) -> None:
    """A worker that died of a signal meant for its rank would lose the rank's last save; one that outlived it would hold its memory:
    torch's own watchdog does not see that under the start method `forkserver` (Python 3.14)."""
    torch.set_num_threads(1)
    follow_parent()
