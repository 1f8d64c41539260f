"""Count the host memory of a run: loader buffers, workers and the copy of a checkpoint.

    config, size of the data -> ring buffers of training and evaluation -> `HostMemory`

`vit.hooks.preflight` checks the same requirements when a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vit.config.schema import Config
from vit.data.augment.table import table_layout
from vit.data.batches import BatchLayout, row_unit
from vit.data.image_format import ImageFormat
from vit.data.slots import EVAL_READY_BATCHES, plan_ring
from vit.hooks.preflight import WORKER_BYTES
from vit.training.plan import Plan, create_order


@dataclass(frozen=True)
class HostMemory:
    """The memory of a host in bytes. All fields except the last are per GPU."""

    slots: int
    """The page-locked training batches that are being loaded, ready or in use."""
    eval_slots: int
    """The page-locked evaluation batches, which stay allocated between evaluations."""
    workers: int
    """The loader workers for training and for evaluations."""
    saved_copy: int
    """The page-locked copy from which a thread writes a checkpoint. Only the first host has this
    copy."""

    @property
    def of_each_gpu(self) -> int:
        """The sum of all fields that are per GPU."""
        return self.slots + self.eval_slots + self.workers


def host_memory(
    config: Config,
    plan: Plan,
    num_images: int,
    num_val_images: int,
    saved_bytes: int,
    further_images: Sequence[int] = (),
) -> HostMemory:
    """Compute the host memory of a run.

    saved_bytes: the size of a checkpoint. further_images: the number of images of each further
    split in `eval.sets`. Only one of these splits at a time has workers and batches, in addition to
    `data.val_split`.

    Raises ValueError if `data.prefetch_gib` is too small.
    """
    data = config.data
    image_format = ImageFormat.from_config(config.model, data)
    largest = ImageFormat.from_config(config.model, data, config.schedule).largest
    order = create_order(data, config.augment, config.train.seed, num_images)
    columns = table_layout(config.augment).width
    rows = plan.rank_batch_size
    ring = plan_ring(
        BatchLayout(rows, largest, columns),
        row_unit(config.augment, order),
        plan.total_steps,
        data.num_workers,
        data.prefetch_gib,
        on_gpu=True,
    )
    eval_rows = config.eval.batch_size

    def eval_bytes(num_samples: int) -> int:
        return plan_ring(
            BatchLayout(eval_rows, image_format, 0),
            1,
            math.ceil(num_samples / (eval_rows * plan.world_size)),
            data.num_workers,
            None,
            on_gpu=True,
            max_ready=EVAL_READY_BATCHES,
        ).num_bytes

    evals = eval_bytes(num_val_images) + max(map(eval_bytes, further_images), default=0)
    workers = (3 if further_images else 2) * data.num_workers * WORKER_BYTES
    return HostMemory(ring.num_bytes, evals, workers, saved_bytes)
