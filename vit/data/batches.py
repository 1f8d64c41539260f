"""What a batch is: any rows of any batch of one rank, made in place. Who makes them, and where:
`vit.data.loader`.

The data's story: the order says which samples stand in this rank's rows of the batch at a position;
the index says where their bytes and how big their images are; crops are drawn before decoding;
images are decoded into the rows of memory that is there already. Some rows are made like all of
them: what is in a row depends neither on who makes it nor on what was made before, and starting at
position p costs nothing but the arithmetic for p. Evaluation deals all samples of a split over the
ranks in batches of one shape, filled up with rows of weight 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vit.config import AugmentConfig, DataConfig, EvalConfig, ModelConfig
from vit.data import stages
from vit.data.augment.draw import draw_crops, draw_mix, draw_table, mixes, sample_keys, table_layout
from vit.data.decode.views import decode_center, decode_views
from vit.data.order import Order
from vit.data.shards.split import Split
from vit.data.sources import Sources
from vit.data.stages import Stage
from vit.system.files import ShardError


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
        return replace(
            self,
            **{
                f.name: getattr(self, f.name)[start:stop]
                for f in fields(self)
                if f.name != "bad_keys"
            },
        )

    def to(self, device: torch.device) -> Batch:
        """Images, labels and weights on `device`, queued; table and ids stay on the host."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("images", "labels", "weights")
        }
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which copies to a GPU do not make the host wait."""
        return replace(
            self,
            **{
                f.name: getattr(self, f.name).pin_memory()
                for f in fields(self)
                if f.name != "bad_keys"
            },
        )

    def clone(self) -> Batch:
        """The same in memory of its own."""
        return replace(
            self,
            **{f.name: getattr(self, f.name).clone() for f in fields(self) if f.name != "bad_keys"},
        )


@dataclass(frozen=True)
class ImageFormat:
    """What the model takes."""

    size: tuple[int, int]
    """(height, width) in pixels."""
    channels: int = 3
    """1 or 3."""
    interpolation: str = "bicubic"
    """bilinear or bicubic, antialiased."""
    scaled_decode: bool = False
    """Large training crops may be decoded at 1/2, 1/4 or 1/8."""

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> ImageFormat:
        """The format of the sections `model` and `data` of a config."""
        size = model.image_size
        if isinstance(size, int):
            size = (size, size)
        return cls(size, model.in_chans, data.interpolation, data.scaled_decode)


@dataclass(frozen=True)
class BatchLayout:
    """How the tensors of a batch lie in one piece of memory."""

    num_rows: int
    image_format: ImageFormat
    num_columns: int
    """K of the table."""

    @property
    def num_bytes(self) -> int:
        """Memory of one batch."""
        return sum(num_bytes for _, _, num_bytes in self._pieces().values())

    def batch_in(self, memory: memoryview) -> Batch:
        """The batch whose tensors are views of `memory`, `num_bytes` long; whatever lies there is
        its content."""
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        at = 0
        tensors: dict[str, Any] = {}
        for name, (dtype, shape, num_bytes) in self._pieces().items():
            tensors[name] = (
                whole[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            )
            at += num_bytes
        return Batch(**{**tensors, "images": tensors["images"].permute(0, 3, 1, 2)})

    def _pieces(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
        """dtype, shape in memory and bytes of each tensor, the latter rounded up so that the next
        one is aligned."""
        rows = self.num_rows
        shapes = {
            "images": (torch.uint8, (rows, *self.image_format.size, self.image_format.channels)),
            "labels": (torch.int64, (rows,)),
            "weights": (torch.float32, (rows,)),
            "table": (torch.float32, (rows, self.num_columns)),
            "ids": (torch.int64, (rows,)),
        }
        return {
            name: (dtype, shape, -(-math.prod(shape) * dtype.itemsize // 64) * 64)
            for name, (dtype, shape) in shapes.items()
        }


class Batches:
    """What `vit.data.loader.Loader` iterates over, and passes to its workers."""

    layout: BatchLayout
    row_unit = 1
    """A part of a batch begins at a multiple of it."""
    repeatable = True
    """Whether the same rows come again when they are made again, by whomever."""

    def prepare(self, num_processes: int) -> None:
        """Called before workers start, which inherit what this leaves. num_processes: of this host
        that will make batches at once."""

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Write rows `first` and following of the batch at `position` into all tensors of `rows`;
        returns the keys of bad images."""
        raise NotImplementedError

    def where(self, sample: int) -> str:
        """What holds the bytes of `sample`, without looking there."""
        return "its source"


class TrainBatches(Batches):
    """This rank's rows of the batch at a position. Pickles small: workers map the index
    themselves."""

    def __init__(
        self,
        split: Split | Sources,
        order: Order,
        augment: AugmentConfig,
        image_format: ImageFormat,
        *,
        rank: int = 0,
        world_size: int = 1,
        on_bad_image: str = "error",
        num_batches: int | None = None,
    ):
        """num_batches: of the whole run; nothing is read ahead for later ones."""
        share = order.global_batch_size // world_size
        self.split = split
        self.order = order
        self.augment = augment
        self.image_format = image_format
        self.first_row = rank * share
        self.on_bad_image = on_bad_image
        self.num_batches = num_batches
        self.layout = BatchLayout(share, image_format, table_layout(augment).width)
        # holds all copies of its images
        lane = order.global_batch_size // order.num_lanes if order.aug_repeats > 1 else 1
        self.row_unit = math.lcm(augment.mix_group_size if mixes(augment) else 1, lane)

    def prepare(self, num_processes: int) -> None:
        """Open the shards' files; workers inherit them."""
        self.split.prepare(num_processes)

    def where(self, sample: int) -> str:
        """The shard of `sample`."""
        return self.split.where(sample)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Make rows `first` and following of the batch at `position` in the tensors of `rows`, all
        of which are written; multiples of `row_unit`, so that no group that mixes is torn, and
        copies of an image need one decoding. Returns the key of each row that could not be decoded,
        with `on_bad_image: skip`.
        """
        is_beginning = first == 0
        first += self.first_row
        ids, copies = self.order.rows_and_copies(position, first, first + len(rows.labels))
        self.split.prefetch(ids)
        if self.split.read_ahead_batches:
            later = position + self.split.read_ahead_batches
            # who makes it asks for all of a later batch
            if is_beginning and (self.num_batches is None or later < self.num_batches):
                self.split.prefetch(
                    self.order.rows(later, self.first_row, self.first_row + self.layout.num_rows)
                )
        entries = self.split.index[ids]
        keys = sample_keys(self.order.seed, position // self.order.steps_per_epoch, ids, copies)
        crops = draw_crops(
            self.augment, keys, entries["width"], entries["height"], self.image_format.size
        )
        windows = crops.tolist()
        widths = entries["width"].tolist()
        heights = entries["height"].tolist()
        weights = np.ones(len(ids), dtype=np.float32)
        bad_keys = []
        for sample, numbers in _rows_of(ids).items():
            images = [rows.images[number] for number in numbers]
            size = (widths[numbers[0]], heights[numbers[0]])
            try:
                stages.current.read(sample)
                data = self.split.read(sample)
                stages.current.enter(Stage.DECODE)
                decode_views(
                    data,
                    [windows[number] for number in numbers],
                    self.image_format.size,
                    self.image_format.interpolation,
                    self.image_format.channels,
                    out=images,
                    stored_size=size,
                    scaled=self.image_format.scaled_decode,
                )
            except ShardError:
                raise
            except ValueError as error:
                if self.on_bad_image == "error":
                    raise ShardError(
                        _describe(self.split, sample, error)
                        + "; data.on_bad_image=skip trains without it"
                    ) from None
                for image in images:
                    image[:] = 0
                weights[numbers] = 0.0
                # rows, whose number does not depend on how a batch is divided
                bad_keys += [self.split.key(sample)] * len(numbers)
        stages.current.enter(Stage.DRAW)
        table = draw_table(
            self.augment, keys, entries["width"], entries["height"], self.image_format.size
        )
        draw_mix(
            self.augment, table, weights, self.order.seed, position, first, self.image_format.size
        )
        write_rows(rows, entries["label"], weights, table, ids)
        return tuple(bad_keys)


class EvalBatches(Batches):
    """All samples of a split once, dealt over the ranks in the same number of batches of one shape;
    fillers have weight 0."""

    def __init__(
        self,
        split: Split,
        image_format: ImageFormat,
        view: EvalConfig,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.split = split
        self.image_format = image_format
        self.view = view
        self.rank = rank
        self.world_size = world_size
        self.layout = BatchLayout(batch_size, image_format, 0)

    def __len__(self) -> int:
        return -(-self.split.num_samples // (self.layout.num_rows * self.world_size))

    def num_filled(self, number: int) -> int:
        """Rows of batch `number` that hold a sample; they come first."""
        return min(max(self.split.num_samples - self._start(number), 0), self.layout.num_rows)

    def prepare(self, num_processes: int) -> None:
        """Open the shards' files; workers inherit them."""
        self.split.prepare(num_processes)

    def where(self, sample: int) -> str:
        """The shard of `sample`."""
        return self.split.where(sample)

    def fill(self, number: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Make rows `first` and following of batch `number` in the tensors of `rows`, all of which
        are written. Returns ()."""
        ids = self._start(number) + first + np.arange(len(rows.labels))
        valid = ids < self.split.num_samples
        later = ids + self.split.read_ahead_batches * self.layout.num_rows * self.world_size
        self.split.prefetch(
            np.unique(np.concatenate([ids[valid], later[later < self.split.num_samples]]))
        )
        ids = np.where(valid, ids, 0)
        for row, sample in enumerate(ids.tolist()):
            if not valid[row]:
                rows.images[row] = 0
                continue
            try:
                stages.current.read(sample)
                data = self.split.read(sample)
                out = rows.images[row]
                stages.current.enter(Stage.DECODE)
                decode_center(
                    data,
                    self.image_format.size,
                    self.view,
                    self.image_format.interpolation,
                    self.image_format.channels,
                    out=out,
                )
            except ShardError:
                raise
            except ValueError as error:
                remedy = (
                    "evaluation counts every image: restore the shard, or write it again without"
                    " this one"
                )
                raise ShardError(f"{_describe(self.split, sample, error)}; {remedy}") from None
        stages.current.enter(Stage.DRAW)
        write_rows(rows, self.split.index["label"][ids], valid, np.empty((len(ids), 0)), ids)
        return ()

    def _start(self, number: int) -> int:
        return (number * self.world_size + self.rank) * self.layout.num_rows


def _rows_of(ids: NDArray[np.int64]) -> dict[int, list[int]]:
    """Sample -> the rows that show it, several with repeated augmentation: they are views of one
    decoding."""
    found: dict[int, list[int]] = {}
    for row, sample in enumerate(ids.tolist()):
        found.setdefault(sample, []).append(row)
    return found


def write_rows(
    rows: Batch, labels: ArrayLike, weights: ArrayLike, table: ArrayLike, ids: ArrayLike
) -> None:
    """Everything but the images, into the tensors of `rows`."""
    for tensor, values in (
        (rows.labels, labels),
        (rows.weights, weights),
        (rows.table, table),
        (rows.ids, ids),
    ):
        tensor.numpy()[:] = values


def _describe(split: Split | Sources, sample: int, error: Exception) -> str:
    row = split.index[sample]
    return f"{split.where(sample)}: image {split.key(sample)!r} at byte {row['offset']}: {error}"
