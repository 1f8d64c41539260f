"""Create batches that contain their own number, and fill parts of batches as workers do."""

from __future__ import annotations

import pickle
import time

import torch

from vit.data.batches import Batch, Batches, BatchLayout
from vit.data.image_format import ImageFormat


class Numbered(Batches):
    def __init__(self, num_rows: int = 300, side: int = 4, pause_s: float = 0.0):
        self.layout = BatchLayout(num_rows, ImageFormat((side, side), 3, "bilinear"), 2)
        self.pause_s = pause_s

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        time.sleep(self.pause_s)
        ids = position * self.layout.num_rows + first + torch.arange(len(rows.labels))
        rows.images.copy_((ids % 251).view(-1, 1, 1, 1).expand_as(rows.images))
        rows.labels.copy_(ids)
        rows.ids.copy_(ids)
        rows.weights.fill_(1)
        rows.table.copy_(ids.float()[:, None].expand(-1, 2))
        return (f"key{position}-{first}",)

    def check(self, position: int, batch: Batch) -> None:
        ids = position * self.layout.num_rows + torch.arange(self.layout.num_rows)
        assert torch.equal(batch.ids, ids), position
        assert torch.equal(batch.labels, ids)
        assert torch.equal(batch.table, ids.float()[:, None].expand(-1, 2))
        assert (batch.images == (ids % 251).view(-1, 1, 1, 1)).all()
        assert batch.images.is_contiguous(memory_format=torch.channels_last)


def filled(batches: Batches, position: int, first: int, num_rows: int) -> Batch:
    """Return some rows of a rank's batch, filled the way a new worker fills them."""
    layout = batches.layout
    rows = Batch(
        torch.full((num_rows, 16, 16, 3), 99, dtype=torch.uint8).permute(0, 3, 1, 2),
        torch.full((num_rows,), -1),
        torch.full((num_rows,), -1.0),
        torch.full((num_rows, layout.num_columns), -1.0),
        torch.full((num_rows,), -1),
    )
    pickle.loads(pickle.dumps(batches)).fill(position, first, rows)
    return rows
