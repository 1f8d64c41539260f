"""Memory that a run takes of its hosts, by the plan of the loader's ring: no batch is made.

    config, size of the data -> layout and ring of training and of evaluation -> `HostMemory`

It is what `vit.hooks.preflight` asks of a host at the start, for the parts that a config decides.
"""

from __future__ import annotations

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
    """Bytes; all but the last one for each GPU."""

    slots: int
    """Batches that are made, ready or in use; page-locked."""
    eval_slots: int
    """The same for evaluations, kept between them; page-locked."""
    workers: int
    """Loader workers, and as many again for evaluations."""
    saved_copy: int
    """The copy from which a thread writes a checkpoint, page-locked; on the first host only."""

    @property
    def of_each_gpu(self) -> int:
        """The sum of what each GPU needs."""
        return self.slots + self.eval_slots + self.workers


def host_memory(
    config: Config,
    plan: Plan,
    num_images: int,
    num_val_images: int,
    saved_bytes: int,
    further_images: Sequence[int] = (),
) -> HostMemory:
    """Plan the rings of each GPU's batches.

    saved_bytes: of a checkpoint. further_images: of each split that `eval.sets` names besides
    `data.val_split`: one at a time has workers and batches next to those.

    Raises ValueError as `vit.data.slots.plan_ring`, for a `data.prefetch_gib` that is too little.
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
            -(-num_samples // (eval_rows * plan.world_size)),
            data.num_workers,
            None,
            on_gpu=True,
            max_ready=EVAL_READY_BATCHES,
        ).num_bytes

    evals = eval_bytes(num_val_images) + max(map(eval_bytes, further_images), default=0)
    workers = (3 if further_images else 2) * data.num_workers * WORKER_BYTES
    return HostMemory(ring.num_bytes, evals, workers, saved_bytes)
