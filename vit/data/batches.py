"""Create batches by writing any rows of any of a rank's batches into preallocated memory.

The order maps each position to the sample numbers of this rank's rows. The index contains the byte
offset, width and height of each image, so crops are drawn before decoding. Images are decoded
directly into their rows in memory (`vit.data.slots`). The content of a row depends neither on the
process that creates it nor on earlier rows, so a run can start at any position. The loader
(`vit.data.loader`) assigns rows to workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vit.config.schema import AugmentConfig, EvalConfig
from vit.data import stages
from vit.data.augment.draw import draw_crops, draw_mix, draw_table, mixes, sample_keys
from vit.data.augment.table import table_layout
from vit.data.changes import HOLE, NO_CHANGES, Changes
from vit.data.decode.crops import decode_center, decode_views
from vit.data.decode.jpeg_cut import Window
from vit.data.image_format import ImageFormat
from vit.data.order import Order
from vit.data.shards.split import Split
from vit.data.sources import Sources
from vit.data.stages import Stage
from vit.system.files import ShardError

ALIGNMENT = 64
"""The alignment in bytes of each tensor in a batch: one cache line."""
TENSORS = ("images", "labels", "weights", "table", "ids")
"""The fields of `Batch` that contain one row per sample."""
NOT_EXACT = "not exact: samples may repeat or be missed, and resuming starts a new pass"
"""The note to print if `Batches.exact` is false."""


@dataclass(frozen=True)
class Batch:
    """One rank's batch: B rows with images of H x W pixels and C channels."""

    images: Tensor
    """(B, C, H, W) uint8, channels last in memory."""
    labels: Tensor
    """(B,) int64."""
    weights: Tensor
    """(B,) float32: 0 for a row that the loss and metrics must ignore, otherwise 1. If samples are
    excluded from the global batch, the other weights are scaled up so that the sum stays the
    same."""
    table: Tensor
    """(B, K) float32: parameters for `vit.data.augment.apply.Augment`; K = 0 in evaluation."""
    ids: Tensor
    """(B,) int64: sample numbers in the split."""
    bad_keys: tuple[str, ...] = ()
    """The keys of samples that could not be decoded, if `on_bad_image` is `skip`."""

    def rows(self, start: int, stop: int) -> Batch:
        """Return rows [start, stop), a micro-batch, as views."""
        return self._map(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device) -> Batch:
        """Start copying images, labels and weights to `device`; other tensors stay on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), TENSORS[:3])

    def pin_memory(self) -> Batch:
        """Copy into page-locked memory, so that a later copy to a GPU does not block the host."""
        return self._map(Tensor.pin_memory)

    def clone(self) -> Batch:
        """Copy the tensors into new memory."""
        return self._map(Tensor.clone)

    def _map(self, function: Callable[[Tensor], Tensor], names: tuple[str, ...] = TENSORS) -> Batch:
        changed: dict[str, Any] = {name: function(getattr(self, name)) for name in names}
        return replace(self, **changed)


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a batch's tensors in one contiguous buffer."""

    num_rows: int
    image_format: ImageFormat
    num_columns: int
    """The number of columns in the augmentation table."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes that one batch takes."""
        return sum(num_bytes for _, _, num_bytes in self._pieces().values())

    def batch_in(self, memory: memoryview) -> Batch:
        """Return a batch whose tensors are views of `memory`, a buffer of `num_bytes`."""
        memory_tensor = torch.frombuffer(memory, dtype=torch.uint8)
        offset = 0
        tensors: dict[str, Any] = {}
        for name, (dtype, shape, num_bytes) in self._pieces().items():
            piece = memory_tensor[offset : offset + math.prod(shape) * dtype.itemsize]
            tensors[name] = piece.view(dtype).view(shape)
            offset += num_bytes

        tensors["images"] = tensors["images"].permute(0, 3, 1, 2)
        return Batch(**tensors)

    def _pieces(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
        """Return each tensor's dtype, shape in memory, and number of bytes including padding."""
        rows = self.num_rows
        shapes = {
            "images": (torch.uint8, (rows, *self.image_format.size, self.image_format.channels)),
            "labels": (torch.int64, (rows,)),
            "weights": (torch.float32, (rows,)),
            "table": (torch.float32, (rows, self.num_columns)),
            "ids": (torch.int64, (rows,)),
        }

        return {
            name: (
                dtype,
                shape,
                math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT,
            )
            for name, (dtype, shape) in shapes.items()
        }


class Batches(ABC):
    """The batches that `vit.data.loader.Loader` returns and that its workers fill."""

    layout: BatchLayout
    """The layout of the largest batch."""
    row_unit = 1
    """The first row of each part is a multiple of this number."""
    exact = True
    """Whether the order determines every batch, so that any process can recreate its rows."""

    def prepare(self, num_processes: int) -> None:  # noqa: B027  # most have nothing to open
        """Open files before this host's `num_processes` workers start, so that they inherit the
        files."""

    def layout_at(self, position: int) -> BatchLayout:
        """Return the layout of the batch at `position`, whose images may be smaller than the
        maximum size."""
        return self.layout

    @abstractmethod
    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Write rows of the batch at `position`, from row `first` on, into all tensors of `rows`.

        Returns the keys of images that could not be decoded.
        """

    def where(self, sample: int) -> str:
        """Return the name of the file that contains `sample`, without opening the file."""
        return "its source"


def row_unit(augment: AugmentConfig, order: Order) -> int:
    """Return the smallest number of rows to give to one worker. A worker must get all rows that are
    mixed with each other, and all copies of an image."""
    unit = augment.mix_group_size if mixes(augment) else 1
    if order.aug_repeats == 1:
        return unit
    # A lane contains all copies of its images. If two workers shared a lane, both would decode its
    # images.
    return math.lcm(unit, order.global_batch_size // order.num_lanes)


@dataclass(frozen=True)
class Samples:
    """The samples of B rows of a training batch."""

    ids: NDArray[np.int64]
    """(B,) sample numbers, which seed the augmentation and appear in error messages."""
    copies: NDArray[np.int64] | int
    """(B,) numbers that state which copy of its image each row shows (repeated augmentation)."""
    entries: NDArray[Any]
    """(B,) records with fields `label`, `width` and `height`, the stored image's size in pixels."""
    weights: NDArray[np.float32]
    """(B,) weights of the rows; see `Batch`."""
    groups: list[list[int]]
    """The rows that show each distinct image, which is decoded only once. Rows without weight are
    in no group."""
    read: Callable[[int], bytes]
    """Returns the encoded image of a row."""
    key: Callable[[int], str]
    """Returns the sample key of a row."""
    describe: Callable[[int], str]
    """Describes the image of a row for an error message."""


class AugmentedBatches(Batches):
    """Training batches from any source of samples. The class draws crops, decodes images, and draws
    augmentation parameters."""

    def __init__(
        self,
        split: Any,
        order: Order,
        augment: AugmentConfig,
        image_format: ImageFormat,
        *,
        rows: range | None = None,
        on_bad_image: str = "error",
        num_batches: int | None = None,
        changes: Changes = NO_CHANGES,
    ):
        """Create the batches of one rank.

        Args:
            rows: This rank's rows of the global batch, or None for all rows.
            num_batches: The length of the run, so that no batches after its end are read ahead.
            changes: The excluded and relabeled samples, which keep their positions in the order.
        """
        rows = range(order.global_batch_size) if rows is None else rows
        self.split = split
        self.order = order
        self.augment = augment
        self.image_format = image_format
        self.first_row = rows.start
        self.on_bad_image = on_bad_image
        self.num_batches = num_batches
        self.changes = changes

        self._num_columns = table_layout(augment).width
        self.layout = BatchLayout(len(rows), image_format.largest, self._num_columns)
        # Rows to be mixed with each other must be in the same part, because a worker mixes only
        # the rows of its own part.
        self.row_unit = row_unit(augment, order)

    def layout_at(self, position: int) -> BatchLayout:
        """See `Batches.layout_at`. The layout changes only between epochs."""
        form = self.image_format.in_epoch(position // self.order.steps_per_epoch)
        return BatchLayout(self.layout.num_rows, form, self._num_columns)

    def make_rows(
        self, position: int, first_row: int, rows: Batch, samples: Samples
    ) -> tuple[str, ...]:
        """Crop and decode `samples` into `rows`, and draw their augmentation parameters.

        first_row: index of the first of `rows` in the global batch. If an image cannot be decoded,
        raises ShardError or, with `on_bad_image: skip`, returns its key once per row.
        """
        widths, heights = samples.entries["width"], samples.entries["height"]
        epoch = position // self.order.steps_per_epoch
        # Random numbers do not depend on the image size, which only scales crops and boxes. A run
        # with a different `schedule.image_sizes` therefore uses the same augmentations.
        size = self.image_format.in_epoch(epoch).size
        keys = sample_keys(self.order.seed, epoch, samples.ids, samples.copies)
        crops = draw_crops(self.augment, keys, widths, heights, size).tolist()
        stored_sizes = list(zip(widths.tolist(), heights.tolist(), strict=True))

        weights = samples.weights
        for row in np.flatnonzero(weights == 0).tolist():
            rows.images[row] = 0  # slots are reused

        bad_keys = []
        for group in samples.groups:
            views = [rows.images[row] for row in group]
            windows = [crops[row] for row in group]
            row = group[0]  # all rows of the group show the same image
            if not self._decode(samples, row, windows, size, views, stored_sizes[row]):
                # Slots are reused, so without this line the row would show an image from an old
                # batch.
                for view in views:
                    view[:] = 0
                weights[group] = 0.0
                # Add one key per row, not per image, so that the number of keys does not depend on
                # how workers split the batch.
                bad_keys += [samples.key(row)] * len(group)

        stages.current.enter(Stage.DRAW)
        table = draw_table(self.augment, keys, widths, heights, size)
        # Mixing needs the weights, so draw it after decoding. A row whose partner could not be
        # decoded stays unmixed.
        draw_mix(
            self.augment,
            table,
            weights=weights,
            seed=self.order.seed,
            position=position,
            first_row=first_row,
            size=size,
            epoch=epoch,
        )

        write_rows(rows, samples.entries["label"], weights, table, samples.ids)
        return tuple(bad_keys)

    def _decode(
        self,
        samples: Samples,
        row: int,
        windows: list[Window],
        size: tuple[int, int],
        views: list[Tensor],
        stored_size: tuple[int, int],
    ) -> bool:
        """Decode each of the `windows` of the image in `row` into one of the `views`.

        If the image cannot be decoded, raises ShardError or, with `on_bad_image: skip`, returns
        False.
        """
        # `on_bad_image` does not cover failed reads, so read outside the `try`. If a disk or server
        # is gone, skipping would drop all images that follow.
        data = samples.read(row)

        stages.current.enter(Stage.DECODE)
        try:
            decode_views(
                data,
                windows,
                size,
                self.image_format.interpolation,
                self.image_format.channels,
                out=views,
                stored_size=stored_size,
            )
        except ValueError as error:
            if self.on_bad_image == "error":
                raise ShardError(
                    f"{samples.describe(row)}: {error}; set loader.on_bad_image=skip to train"
                    " without this image"
                ) from None
            return False
        return True


class FromShards:
    """A mixin that reads batches from shards with an index.

    Pickled objects are small, because workers memory-map the index themselves.
    """

    split: Split | Sources

    def prepare(self, num_processes: int) -> None:
        """Open the shard files, so that workers inherit them."""
        self.split.prepare(num_processes)

    def where(self, sample: int) -> str:
        """Return the path or URL of the shard that contains `sample`."""
        return self.split.where(sample)

    def read(self, sample: int) -> bytes:
        """Return the encoded image of `sample`."""
        stages.current.read(sample)
        return self.split.read(sample)

    def describe(self, sample: int) -> str:
        """Return the shard, key and offset of `sample` as text for an error message."""
        offset = self.split.index[sample]["offset"]
        return f"{self.split.where(sample)}: image {self.split.key(sample)!r} at byte {offset}"


class TrainBatches(FromShards, AugmentedBatches):
    """This rank's rows of each training batch, read from shards with an index."""

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        """See `Batches.fill`. `first` and the number of rows must be multiples of `row_unit`."""
        first_row = self.first_row + first
        ids, copies = self.order.rows_and_copies(position, first_row, first_row + len(rows.labels))
        entries = self.split.index[ids]
        labels = self.changes.changed(ids, entries["label"])
        is_used = labels != HOLE
        entries["label"] = np.where(is_used, labels, 0)

        # Prefetch before the first read, so that a remote split fetches all blocks concurrently.
        self.split.prefetch(ids[is_used])
        if first == 0:
            self._read_ahead(position)

        samples = Samples(
            ids=ids,
            copies=copies,
            entries=entries,
            weights=(is_used * self._used_weight(position)).astype(np.float32),
            groups=_rows_by_sample(ids, is_used),
            read=lambda row: self.read(int(ids[row])),
            key=lambda row: self.split.key(int(ids[row])),
            describe=lambda row: self.describe(int(ids[row])),
        )
        return self.make_rows(position, first_row, rows, samples)

    def _used_weight(self, position: int) -> float:
        """Return the weight that gives all used rows together the weight of the whole batch.

        The step divides the sum of the losses by the number of all rows.
        """
        holes = self.changes.holes
        if not len(holes):
            return 1.0
        num_rows = self.order.global_batch_size
        ids = self.order.rows(position, 0, num_rows)
        return num_rows / max(num_rows - int(np.isin(ids, holes).sum()), 1)

    def _read_ahead(self, position: int) -> None:
        later = position + self.split.read_ahead_batches
        is_after_end = self.num_batches is not None and later >= self.num_batches
        if later == position or is_after_end:
            return
        last_row = self.first_row + self.layout.num_rows
        self.split.prefetch(self.order.rows(later, self.first_row, last_row))


class EvalBatches(FromShards, Batches):
    """The batches for an evaluation, in which each sample occurs once.

    All ranks have the same number of batches. Padding rows have weight 0.
    """

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
        return math.ceil(self.split.num_samples / (self.layout.num_rows * self.world_size))

    def num_filled(self, number: int) -> int:
        """Return the number of rows in batch `number` that contain a sample. Other rows are
        padding."""
        return min(max(self.split.num_samples - self._start(number), 0), self.layout.num_rows)

    def fill(self, number: int, first: int, rows: Batch) -> tuple[str, ...]:
        """Write rows of batch `number`, from row `first` on, into all tensors of `rows`.

        Always returns (), because an image that cannot be decoded raises ShardError.
        """
        num_samples = self.split.num_samples
        ids = self._start(number) + first + np.arange(len(rows.labels))
        is_sample = ids < num_samples

        later = ids + self.split.read_ahead_batches * self.layout.num_rows * self.world_size
        candidates = np.concatenate([ids, later])
        self.split.prefetch(np.unique(candidates[candidates < num_samples]))

        # The label of each id is read below, so give padding rows a valid sample number.
        ids[~is_sample] = 0
        for row, sample in enumerate(ids.tolist()):
            if is_sample[row]:
                self._decode(sample, rows.images[row])
            else:
                rows.images[row] = 0

        stages.current.enter(Stage.DRAW)
        write_rows(rows, self.split.index[ids]["label"], is_sample, np.empty((len(ids), 0)), ids)
        return ()

    def _decode(self, sample: int, view: Tensor) -> None:
        """Decode the evaluation view of a sample into `view`. Raises ShardError."""
        data = self.read(sample)
        stages.current.enter(Stage.DECODE)
        try:
            decode_center(
                data,
                self.image_format.size,
                self.view,
                self.image_format.interpolation,
                self.image_format.channels,
                out=view,
            )
        except ValueError as error:
            raise ShardError(
                f"{self.describe(sample)}: {error}; evaluation needs every image: restore the"
                " shard, or write it again without this image"
            ) from None

    def _start(self, number: int) -> int:
        return (number * self.world_size + self.rank) * self.layout.num_rows


def write_rows(
    rows: Batch, labels: ArrayLike, weights: ArrayLike, table: ArrayLike, ids: ArrayLike
) -> None:
    """Write the given values to all tensors of `rows` except the images."""
    rows.labels.numpy()[:] = labels
    rows.weights.numpy()[:] = weights
    rows.table.numpy()[:] = table
    rows.ids.numpy()[:] = ids


def _rows_by_sample(ids: NDArray[np.int64], is_used: NDArray[np.bool_]) -> list[list[int]]:
    """Return the rows of each distinct sample, without unused rows; see `Samples.groups`."""
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(is_used).tolist():
        groups.setdefault(int(ids[row]), []).append(row)
    return list(groups.values())
