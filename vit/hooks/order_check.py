"""Check that the ranks have trained on the samples in the planned order.

Each rank looks up the planned samples of its rows, and computes two checksums: one of the planned
samples, and one of the samples from its loader. The checksums are compared at each save and at the
end of an epoch. The sum of the checksums over all ranks is the same for any number of ranks.
`RunState` stores this sum, and it is written to metrics.jsonl at the end of the epoch.
"""

import torch

from vit.data.batches import Batch
from vit.data.order import sample_checksum
from vit.run import Hook, Run


class OrderHook(Hook):
    """Computes checksums of samples, and compares them with the order at each save and at the end
    of each epoch.

    Streamed samples have no planned order, so they are only recorded.
    """

    def begin(self, run: Run) -> None:
        """See `Hook`."""
        self._run = run
        self._order = run.batches.order if run.batches.exact else None
        self._compared_step = run.state.step
        self._seen = 0
        self._planned = 0

    def queued(self, batch: Batch) -> None:
        """Add this rank's rows of the batch at `state.step` to the checksums."""
        self._seen = (self._seen + sample_checksum(batch.ids.numpy())) % 2**64
        if self._order is not None:
            # Look up each step's samples while the GPU computes. If the samples were looked up at
            # the end of the epoch, training would wait.
            rows = self._run.plan.rows_of(self._run.world.rank)
            planned = self._order.rows(self._run.state.step, rows.start, rows.stop)
            self._planned = (self._planned + sample_checksum(planned)) % 2**64

    def compare(self) -> None:
        """Compare the checksums since the last comparison. All ranks must call this.

        Raises RuntimeError on a rank whose samples differ from the plan, and AlreadyReported on the
        other ranks.
        """
        state = self._run.state
        if self._compared_step == state.step:
            return

        with self._run.world.fail_together():
            if self._order is not None and self._seen != self._planned:
                raise RuntimeError(
                    f"batches {self._compared_step} to {state.step - 1}, rows of rank"
                    f" {self._run.world.rank}: sample checksum {self._seen:016x}, expected"
                    f" {self._planned:016x}: this is a bug in the loader, please report it"
                )

        seen = self._seen
        if self._run.world.size > 1:  # a single rank need not wait for its GPU
            # torch has no unsigned sum, but the int64 sum has the same bits.
            signed = self._seen - 2**64 if self._seen >= 2**63 else self._seen
            own = torch.tensor(signed, dtype=torch.int64, device=self._run.world.device)
            seen = int(self._run.world.sum_(own))

        state.sample_checksum = (state.sample_checksum + seen) % 2**64
        self._compared_step = state.step
        self._seen = 0
        self._planned = 0

    def verify(self, is_end: bool) -> None:
        """See `Hook`."""
        self.compare()
        state = self._run.state
        if state.checked_step == state.step or not is_end:
            return

        is_epoch_end = state.step % self._run.plan.steps_per_epoch == 0
        self._run.record.write(
            "epoch",
            state.step,
            epoch=state.step / self._run.plan.steps_per_epoch,
            first_batch=state.checked_step,
            last_batch=state.step - 1,
            exact=self._order is not None,
            sample_checksum=f"{state.sample_checksum:016x}",
            samples_dropped=self._run.plan.dropped_per_epoch if is_epoch_end else 0,
        )

        state.checked_step = state.step
        state.sample_checksum = 0
