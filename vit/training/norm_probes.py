"""Measure the norms of each layer and the largest attention logits at some updates.

`vit.step` calls `Probes.begin` before a measured update, and `Probes.end` after it. The results
stay on the device and are copied to the host with the other numbers of the step.
"""

import math

import torch
from torch import Tensor, nn

from vit.config.schema import Config
from vit.data.augment.apply import Augment
from vit.data.augment.draw import mixes
from vit.data.batches import Batch
from vit.layers.precision import autocast
from vit.optim.norms import Measured, Norms
from vit.training.attention_logits import largest_logits
from vit.training.reduce import Reduce

IMAGES_OF_LOGITS = 8
"""The number of images, at the start of the global batch, whose attention logits are measured."""


class Probes:
    """Measures updates at the steps chosen by `log.norms_every_steps`."""

    def __init__(
        self,
        norms: Norms,
        model: nn.Module,
        augment: Augment,
        micro_batch_size: int,
        precision: str = "fp32",
    ):
        self._norms = norms
        self._model = model
        self._augment = augment
        self._micro_batch_size = micro_batch_size
        self._precision = precision
        self._logits = torch.empty(0)

    def is_due(self, step: int) -> bool:
        """Return whether to measure the update at `step`."""
        return self._norms.is_due(step)

    def begin(self, batch: Batch, reduce: Reduce, loss_scale: Tensor) -> None:
        """Measure gradients and weights before the update. All ranks must call this."""
        self._logits = self._largest_logits(batch, reduce)
        self._norms.begin(loss_scale)

    def end(self) -> Measured:
        """Return the norms of the update and the attention logits, on the device."""
        return self._norms.end(self._logits)

    @torch.no_grad()
    def _largest_logits(self, batch: Batch, reduce: Reduce) -> Tensor:
        """Return the largest attention logit of each block, (blocks,) float32, or (0,) if unknown.

        The logits are computed from the first images of the global batch before the update.
        """
        num_rows = len(batch.labels)
        # The number of this rank's rows, from its first, that precede row `IMAGES_OF_LOGITS` of the
        # global batch. Only the first ranks have any.
        num_measured = max(IMAGES_OF_LOGITS - reduce.first_row(num_rows), 0)
        # The other ranks run one pass too, because sharded parameters are gathered from all ranks.
        num_passed = max(min(num_measured, num_rows), 1)

        largest = []
        # Use micro-batches, so that the same rows are mixed on any number of ranks.
        for start in range(0, num_passed, self._micro_batch_size):
            rows = batch.rows(start, start + self._rows_per_pass()).to(reduce.world.device)
            logits = self._logits_of(rows)
            if not len(logits):
                return logits.new_empty(0)
            logits[:, max(num_measured - start, 0) :] = -torch.inf  # the rows not to measure
            largest.append(logits.amax(1))

        return reduce.world.max_(torch.stack(largest).amax(0))

    def _rows_per_pass(self) -> int:
        """Return the number of rows that contain the measured images and whole mixing groups."""
        config = self._augment.config
        unit = config.mix_group_size if mixes(config) else 1
        return min(math.ceil(IMAGES_OF_LOGITS / unit) * unit, self._micro_batch_size)

    def _logits_of(self, rows: Batch) -> Tensor:
        """Return the largest logit of each block for each of the first `rows`, (blocks, B)."""
        # Run eagerly, because compiling more graphs for so few images would take seconds.
        with torch.compiler.set_stance("force_eager"):
            inputs, _ = self._augment.finish(rows.images, rows.labels, rows.table)
            with autocast(self._precision, inputs.device):
                return largest_logits(self._model, inputs[:IMAGES_OF_LOGITS])


def create_probes(
    model: nn.Module, config: Config, augment: Augment, micro_batch_size: int, total_steps: int
) -> Probes | None:
    """Return the probes for `log.norms_every_steps`, or None if the setting is off. Raises
    ValueError in the same cases as `Norms`."""
    every_steps = config.log.norms_every_steps
    if every_steps is None:
        return None
    return Probes(
        Norms(model, every_steps, total_steps),
        model,
        augment,
        micro_batch_size,
        config.train.precision,
    )
