"""One training step: compute the gradients of a global batch and update the weights.

1. Each rank splits its batch into micro-batches. `Augment.finish` converts a micro-batch to float32
   and mixes its images, `Objective` calls the model under autocast, and the backward pass
   accumulates gradients of the loss divided by the number of rows. `Reduce` combines the gradients
   of all ranks.
2. Gradients are clipped by their norm. If the norm is not finite, the fused optimizer skips the
   update on the device, and the fp16 loss scale is halved. The update is also skipped if the loss
   exceeds a limit set by a hook. The decision depends only on sums over all ranks, so all ranks
   skip together.
3. The result consists of a small vector of sums over all ranks, and the loss and margin of each of
this rank's rows. The host reads the result one step later, after queueing the next step, so
queueing a step never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vit.data.augment.apply import Augment
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.layers.image_model import ImageModel
from vit.layers.precision import LossScale, autocast
from vit.optim.ema import Ema
from vit.optim.optimizer import set_rates
from vit.system.hashing import fold
from vit.training.objective import Objective
from vit.training.reduce import Reduce
from vit.training.step_result import SPIKE, Slot, StepPhase, StepResult

if TYPE_CHECKING:
    from vit.optim.norms import Measured
    from vit.training.norm_probes import Probes

_SEED_DROPOUT = 0x0D0


class TrainStep:
    """The state that an update changes: weights, optimizer, EMA and loss scale.

    Args:
        lr_at: Returns the learning rate at a step.
        weight_decay_at: Returns the weight decay at a step, or None if the decay is constant.
        why_eager: The reason why the model is not compiled although `train.compile` is on, else "".
        has_cuda_graphs: Whether the model replays CUDA graphs.
    """

    def __init__(
        self,
        model: ImageModel,
        optimizer: torch.optim.Optimizer,
        augment: Augment,
        objective: Objective,
        reduce: Reduce,
        *,
        lr_at: Callable[[int], float],
        weight_decay_at: Callable[[int], float | None] = lambda step: None,
        micro_batch_size: int,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
        ema: Ema | None = None,
        probes: Probes | None = None,
        seed: int = 0,
        why_eager: str = "",
        has_cuda_graphs: bool = False,
    ):
        self.model = model
        self.optimizer = optimizer
        self.augment = augment
        self.objective = objective
        self.reduce = reduce

        self.lr_at = lr_at
        self.weight_decay_at = weight_decay_at
        self.micro_batch_size = micro_batch_size
        self.precision = precision
        self.clip_grad_norm = clip_grad_norm
        self.ema = ema
        self.probes = probes
        self.seed = seed
        self.why_eager = why_eager
        self.has_cuda_graphs = has_cuda_graphs

        self.mark: Callable[[StepPhase], object] = lambda phase: None
        """A function that is called when a phase of the step begins."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss_scale = LossScale(precision, reduce.world.device)
        self.copying: torch.cuda.Event | None = None
        """The event at the end of the last copy of the state. The next update waits for this
        event."""
        objective.begin(model, lambda: self.mark(StepPhase.TEACHER))

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.reduce.world

    def __call__(
        self,
        batch: Batch,
        step: int,
        stop: bool = False,
        report: tuple[float, ...] = (0.0,),
        loss_limit: float | None = None,
    ) -> StepResult:
        """Queue the update at `step` with this rank's rows of the global batch.

        Args:
            batch: The batch after `Augment.change_batch`, on any device.
            stop: Whether this rank has received a signal.
            report: Values to send to all ranks. Every rank must pass the same number of values.
            loss_limit: Skip the update if the mean loss of the global batch is above this limit.
                All ranks must pass the same limit.
        """
        sums, grad_norm, rows, measured = self._queue(batch, step, stop, report, loss_limit)
        return StepResult(sums, grad_norm, len(report), rows, measured)

    def _queue(
        self,
        batch: Batch,
        step: int,
        stop: bool,
        report: tuple[float, ...],
        loss_limit: float | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor], Measured | None]:
        """Queue the step on the device, and return the sums, the gradient norm, the rows' results
        and the measured norms."""
        # Dropout and drop path depend only on (seed, rank, step), so a resumed run draws the same
        # masks.
        torch.manual_seed(int(fold(self.seed, self.world.rank, step, _SEED_DROPOUT) >> 1))
        num_slots = Slot.RANK_REPORTS + self.world.size * len(report)
        sums = torch.zeros(num_slots, device=self.world.device)
        rows = self._forward_and_backward(batch, step, sums)

        # `fill_` passes the number as a kernel argument. `sums[...] = number` would copy it from
        # host memory, and torch 2.11 waits for the device during that copy.
        sums[Slot.STOP].fill_(float(stop))
        sums[Slot.BAD_IMAGES].fill_(float(len(batch.bad_keys)))
        own_report = Slot.RANK_REPORTS + self.world.rank * len(report)
        for position, number in enumerate(report, own_report):
            sums[position].fill_(number)

        self.mark(StepPhase.UPDATE)
        self.reduce.finish()
        probes = self.probes if self.probes is not None and self.probes.is_due(step) else None
        if probes is not None:
            probes.begin(batch, self.reduce, self.loss_scale.value)
        grad_norm = self._update(step, sums, loss_limit)
        measured = None if probes is None else probes.end()
        self._clear_gradients(batch)
        return sums, grad_norm, rows, measured

    def _forward_and_backward(self, batch: Batch, step: int, sums: Tensor) -> list[Tensor]:
        """Queue forward and backward passes of all micro-batches, and add their losses to `sums`.

        Returns the losses, margins and weights of the rows, as one tensor per micro-batch.
        """
        num_rows = len(batch.labels)
        divisor = self.reduce.divisor(num_rows)
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, num_rows, self.micro_batch_size):
            end = start + self.micro_batch_size
            micro_batch = batch.rows(start, end).to(self.world.device)
            with self.reduce.micro_batch(step, start, is_last=end >= num_rows):
                if self.has_cuda_graphs:
                    self._begin_replay()
                losses, margins = self._losses(micro_batch)
                # A row whose image could not be decoded has weight 0, and therefore no gradient.
                loss_sum = (losses * micro_batch.weights).sum()
                # The divisor includes rows of weight 0, so that it is the same on all ranks. The
                # reported loss excludes these rows.
                self.mark(StepPhase.BACKWARD)
                (loss_sum * (1 / divisor) * self.loss_scale.value).backward()

            row_weights = micro_batch.weights.sum()
            self.reduce.add(start, loss_sum.detach(), row_weights)
            sums[Slot.LOSS_SUM].add_(loss_sum.detach())
            sums[Slot.ROW_WEIGHTS].add_(row_weights)
            rows.append((losses.detach(), margins, micro_batch.weights))

        return [piece for kind in zip(*rows, strict=True) for piece in kind]

    def _begin_replay(self) -> None:
        """Allow CUDA graphs to overwrite the tensors of the previous micro-batch."""
        torch.compiler.cudagraph_mark_step_begin()
        for parameter in self.parameters:
            if parameter.grad is None:
                # Otherwise `grad` would be a graph's own tensor, which the next replay would
                # overwrite.
                parameter.grad = torch.zeros_like(parameter)

    def _losses(self, micro_batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and margin of each row, (B,) float32."""
        self.mark(StepPhase.FINISH)
        inputs, targets = self.augment.finish(
            micro_batch.images, micro_batch.labels, micro_batch.table
        )
        return self.objective(self._forward, inputs, targets, micro_batch.labels)

    def _forward(self, inputs: Tensor) -> Any:
        self.mark(StepPhase.FORWARD)
        with autocast(self.precision, self.world.device):
            return self.reduce.module(inputs)

    @torch.no_grad()
    def _update(self, step: int, sums: Tensor, loss_limit: float | None = None) -> Tensor:
        """Sum `sums` over the ranks, clip the gradients, and update weights and EMA unless the
        update is skipped. Return the gradient norm before clipping."""
        if self.copying is not None:
            # The update must not change the state while it is being copied for a save. Only the
            # device waits for the copy to end, not the host.
            self.copying.wait()
            self.copying = None

        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) / self.loss_scale.value
        if self.world.rank < self.reduce.norm_ranks:
            sums[Slot.VERDICT].copy_(norm)
        not_finite, is_skipped = self._judge(self.reduce.sum_(sums), loss_limit)

        # Combine unscaling and clipping in one factor, to read and write the gradients only once.
        factor = 1.0 / self.loss_scale.value
        if self.clip_grad_norm is not None:
            factor = factor * (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.clip_grad_norm is not None or self.loss_scale.is_dynamic:
            torch._foreach_mul_(gradients, factor)

        # torch.amp.GradScaler passes `found_inf` in the same way. The optimizers in
        # `vit.optim.optimizer` then skip the update on the device.
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = is_skipped  # type: ignore[attr-defined]
        set_rates(self.optimizer, self.lr_at(step), self.weight_decay_at(step))
        self.optimizer.step()
        self.loss_scale.update(not_finite)  # a loss spike does not change the loss scale
        if self.ema is not None:
            # The host does not know yet whether the update was skipped, so update the EMA in either
            # case. A skipped update leaves the weights unchanged.
            self.ema.update(step)
        return norm

    def _judge(self, sums: Tensor, loss_limit: float | None) -> tuple[Tensor, Tensor]:
        """Return two flags, 0 or 1: whether the gradient is not finite, and whether the update is
        skipped.

        Both flags depend only on `sums`, which is the same on all ranks. The decision is also
        written to `sums`.
        """
        not_finite = (~sums[Slot.VERDICT].isfinite()).float()
        if loss_limit is None:
            sums[Slot.VERDICT].copy_(not_finite)
            return not_finite, not_finite

        # The limit is a Python number, passed as a kernel argument, so no copy is needed.
        loss = sums[Slot.LOSS_SUM] / sums[Slot.ROW_WEIGHTS].clamp(min=1.0)
        is_above = (loss > loss_limit).float()
        sums[Slot.VERDICT].copy_(not_finite.add(is_above, alpha=SPIKE))
        return not_finite, torch.maximum(not_finite, is_above)

    def prepare(self, batch: Batch) -> None:
        """Let `reduce` run a warm-up pass if it needs one before the first step of a process."""
        rows = batch.rows(0, self.micro_batch_size).to(self.world.device)
        self.reduce.prepare(rows, lambda rows: self._losses(rows)[0], self._num_passes(batch))
        self._clear_gradients(batch)

    def _clear_gradients(self, batch: Batch) -> None:
        """Set gradients to zero if `reduce` reuses their memory, else to None."""
        is_kept = self.reduce.keeps_gradients(self._num_passes(batch))
        self.optimizer.zero_grad(set_to_none=not is_kept)

    def _num_passes(self, batch: Batch) -> int:
        return math.ceil(len(batch.labels) / self.micro_batch_size)
