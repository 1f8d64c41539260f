"""One training step: a global batch in, one update out.

1. A rank's batch, already changed by `Augment.change_batch`, is cut into micro-batches. Each
   becomes float32, is mixed, and goes through `Objective`, which calls the model under autocast,
   and the backward pass; its loss, divided by the number of rows, adds to the gradients. `Reduce`
   combines the gradients of all ranks.
2. One gradient norm controls the update: gradients are clipped by it, and if it is not finite, the
   fused optimizer skips its update on the device, and the loss scale of fp16 is halved. The update
   is also skipped if loss or norm are above the limits that a hook gives. The decision uses sums
   over the ranks, so all ranks skip together.
3. The result is a small vector of sums over the ranks. The host reads it one step later, when the
   next step is queued, together with loss and margin of each of the rank's rows. Queueing a step
   never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vit.data.augment.apply import Augment
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.layers.precision import LossScale, autocast
from vit.optim.ema import Ema
from vit.optim.optimizer import set_rates
from vit.system.hashing import fold
from vit.training.objective import Objective
from vit.training.reduce import Reduce
from vit.training.step_result import SPIKE, Limits, Slot, StepPhase, StepResult

if TYPE_CHECKING:
    from vit.optim.norms import Measured
    from vit.training.norm_probes import Probes

_SEED_DROPOUT = 0x0D0


class TrainStep:
    """Everything that an update changes: weights, optimizer, moving average (EMA), loss scale.

    `lr_at` maps a step to its learning rate, `weight_decay_at` to its decay, or to None if the
    decay is constant. `why_eager`: why the model is not compiled although `train.compile` is on.
    """

    def __init__(
        self,
        model: nn.Module,
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
        self.mark: Callable[[StepPhase], object] = lambda phase: None
        """Called when a phase of the step begins."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss_scale = LossScale(precision, reduce.world.device)
        self.copying: torch.cuda.Event | None = None
        """The end of the last copy of the state, which the device may still be making."""
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
        limits: Limits | None = None,
    ) -> StepResult:
        """Queue the update at `step` with this rank's rows of the global batch.

        batch: after `Augment.change_batch`, on any device. stop: whether this rank got a signal.
        report: numbers for all ranks; every rank must pass the same number of them. limits: the
        same on all ranks; above them the update is skipped.
        """
        sums, grad_norm, rows, measured = self._queue(batch, step, stop, report, limits)
        return StepResult(sums, grad_norm, len(report), rows, measured)

    def _queue(
        self,
        batch: Batch,
        step: int,
        stop: bool,
        report: tuple[float, ...],
        limits: Limits | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor], Measured | None]:
        """Queue the step on the device; return sums, gradient norm, rows and measured norms."""
        # Dropout and drop path depend on (seed, rank, step) only, so a resumed run draws the same
        # masks.
        torch.manual_seed(int(fold(self.seed, self.world.rank, step, _SEED_DROPOUT) >> 1))
        num_slots = Slot.RANK_REPORTS + self.world.size * len(report)
        sums = torch.zeros(num_slots, device=self.world.device)
        rows = self._forward_and_backward(batch, step, sums)
        # `fill_` passes its number to the kernel. `sums[...] = number` would copy it from host
        # memory, and torch 2.11 waits for the device when it does.
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
        grad_norm = self._update(step, sums, limits)
        measured = None if probes is None else probes.end()
        self._clear_gradients(batch)
        return sums, grad_norm, rows, measured

    def _forward_and_backward(self, batch: Batch, step: int, sums: Tensor) -> list[Tensor]:
        """Queue the passes of each micro-batch, and add their losses to `sums`.

        Returns losses, margins and weights of the rows, each as a tensor per micro-batch.
        """
        num_rows = len(batch.labels)
        divisor = self.reduce.divisor(num_rows)
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, num_rows, self.micro_batch_size):
            end = start + self.micro_batch_size
            micro_batch = batch.rows(start, end).to(self.world.device)
            with self.reduce.micro_batch(step, start, is_last=end >= num_rows):
                losses, margins = self._losses(micro_batch)
                # A row whose image could not be decoded has weight 0, and so no gradient.
                loss_sum = (losses * micro_batch.weights).sum()
                # Rows of weight 0 count in the divisor, so that all ranks have the same divisor.
                # The reported loss does not count them.
                self.mark(StepPhase.BACKWARD)
                (loss_sum * (1 / divisor) * self.loss_scale.value).backward()
            row_weights = micro_batch.weights.sum()
            self.reduce.add(start, loss_sum.detach(), row_weights)
            sums[Slot.LOSS_SUM].add_(loss_sum.detach())
            sums[Slot.ROW_WEIGHTS].add_(row_weights)
            rows.append((losses.detach(), margins, micro_batch.weights))
        return [piece for kind in zip(*rows, strict=True) for piece in kind]

    def _losses(self, micro_batch: Batch) -> tuple[Tensor, Tensor]:
        """Return loss and margin of each row, (B,) float32."""
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
    def _update(self, step: int, sums: Tensor, limits: Limits | None = None) -> Tensor:
        """Sum `sums` over the ranks, clip, update weights and EMA unless the update is skipped;
        return the gradient norm before clipping."""
        if self.copying is not None:
            # The update must not change the state while a save copies it. The device waits for the
            # end of the copy, the host does not.
            self.copying.wait()
            self.copying = None
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) / self.loss_scale.value
        if self.world.rank < self.reduce.norm_ranks:
            sums[Slot.VERDICT].copy_(norm)
        not_finite, is_skipped = self._judge(self.reduce.sum_(sums), limits)

        # One factor unscales and clips, so the gradients are read and written once.
        factor = 1.0 / self.loss_scale.value
        if self.clip_grad_norm is not None:
            factor = factor * (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.clip_grad_norm is not None or self.loss_scale.is_dynamic:
            torch._foreach_mul_(gradients, factor)

        # torch.amp.GradScaler passes `found_inf` in the same way. `vit.optim.optimizer` then skips
        # the update on the device.
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = is_skipped  # type: ignore[attr-defined]
        set_rates(self.optimizer, self.lr_at(step), self.weight_decay_at(step))
        self.optimizer.step()
        self.loss_scale.update(not_finite)  # a spike is not an overflow
        if self.ema is not None:
            # Also after a skipped update, because the host does not know yet that it was skipped.
            # The average then moves towards unchanged weights.
            self.ema.update(step)
        return norm

    def _judge(self, sums: Tensor, limits: Limits | None) -> tuple[Tensor, Tensor]:
        """Return whether the gradient is not finite, and whether the update is skipped, 0 or 1.

        Both follow from `sums`, which is the same on all ranks, and gets the verdict.
        """
        norm_sum = sums[Slot.VERDICT]
        not_finite = (~norm_sum.isfinite()).float()
        if limits is None:
            sums[Slot.VERDICT].copy_(not_finite)
            return not_finite, not_finite
        # The limits are numbers on the host. Kernels take them as arguments, so nothing waits.
        loss = sums[Slot.LOSS_SUM] / sums[Slot.ROW_WEIGHTS].clamp(min=1.0)
        is_above = norm_sum > limits.grad_norm * self.reduce.norm_ranks
        is_above = is_above.logical_or_(loss > limits.loss).float()
        sums[Slot.VERDICT].copy_(not_finite.add(is_above, alpha=SPIKE))
        return not_finite, torch.maximum(not_finite, is_above)

    def prepare(self, batch: Batch) -> None:
        """Let `reduce` run a throw-away pass, if it needs one before a process's first step."""
        rows = batch.rows(0, self.micro_batch_size).to(self.world.device)
        self.reduce.prepare(rows, lambda rows: self._losses(rows)[0], self._num_passes(batch))
        self._clear_gradients(batch)

    def _clear_gradients(self, batch: Batch) -> None:
        """Set gradients to zero if `reduce` keeps their memory, else to None."""
        is_kept = self.reduce.keeps_gradients(self._num_passes(batch))
        self.optimizer.zero_grad(set_to_none=not is_kept)

    def _num_passes(self, batch: Batch) -> int:
        return math.ceil(len(batch.labels) / self.micro_batch_size)
