"""The samples that the ranks have trained on must be those that the order plans.

Each rank looks up which rows of a batch are to be its own, and sums a checksum of them and one of
what its loader really delivered. Ranks divide a batch by their numbers, so if each has its own
rows, all together have the batch. At the end of an epoch the two sums are compared, and their sum
over the ranks, which is the same on any number of them, goes into the record.
"""

from __future__ import annotations

import torch

from vit.data.batches import Batch
from vit.data.order import Order, sample_checksum
from vit.plan import Plan
from vit.ranks.distributed import World
from vit.run.record import Record


class OrderCheck:
    """Sums up what is trained on from `first_batch` on, and compares it with `order`.

    Streams have no order (None), and are only recorded.
    """

    def __init__(
        self, world: World, order: Order | None, plan: Plan, record: Record, first_batch: int
    ):
        self._world = world
        self._order = order
        self._plan = plan
        self._record = record
        self._first = first_batch
        self._next = first_batch
        self._seen = 0
        self._planned = 0
        self._num_passed_over = 0

    def add(self, batch: Batch) -> None:
        """Add this rank's rows of the next batch."""
        self._seen = (self._seen + sample_checksum(batch.ids.numpy())) % 2**64
        if self._order is not None:
            # Looked up now, while a GPU computes, and not for a complete epoch at its end.
            rows = self._plan.rows_of(self._world.rank)
            planned = self._order.rows(self._next, rows.start, rows.stop)
            self._planned = (self._planned + sample_checksum(planned)) % 2**64
        self._next += 1

    def pass_over(self) -> None:
        """Leave out the next batch, which is not trained on."""
        self._next += 1
        self._num_passed_over += 1

    def compare(self, step: int) -> None:
        """Compare and record what was added since the last comparison; every rank calls it.

        Raises RuntimeError on a rank whose rows were not the planned ones, and AlreadyReported on
        the others.
        """
        if self._first == self._next:
            return
        first = self._first
        last = self._next - 1
        is_exact = self._order is not None
        with self._world.fail_together():
            if is_exact and self._seen != self._planned:
                raise RuntimeError(
                    f"batches {first} to {last}, rows of rank {self._world.rank}: sample checksum"
                    f" {self._seen:016x}, planned {self._planned:016x}: a bug in the loader, please"
                    " report it"
                )
        # torch sums int64; the bits are those of the unsigned sum.
        signed = self._seen - 2**64 if self._seen >= 2**63 else self._seen
        own = torch.tensor(signed, dtype=torch.int64, device=self._world.device)
        seen = int(self._world.sum_(own)) % 2**64
        is_epoch_end = self._next % self._plan.steps_per_epoch == 0
        self._record.write(
            "epoch",
            step,
            epoch=self._next / self._plan.steps_per_epoch,
            first_batch=first,
            last_batch=last,
            exact=is_exact,
            sample_checksum=f"{seen:016x}",
            batches_passed_over=self._num_passed_over,
            samples_dropped=self._plan.dropped_per_epoch if is_epoch_end else 0,
        )
        self._first = self._next
        self._seen = 0
        self._planned = 0
        self._num_passed_over = 0
