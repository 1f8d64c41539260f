"""One training step: a global batch in, one update out.

1. A rank's batch, whose images `Augment.change_batch` has changed, is cut into micro-batches. Each
   becomes float32, is mixed, and goes through the model under autocast; its loss, divided by the
   rank's number of rows, adds to the gradients. Only the last backward pass lets DDP average them
   over the ranks. A teacher, if there is one, answers to the same inputs first.
2. One gradient norm controls the update: gradients are clipped by it, and if it is not finite, the
   fused optimizer skips its update on the device, and the loss scale of fp16 is halved. So it does
   where loss or norm are above the limits that `vit.run.guard` gives. What decides is summed over
   the ranks before the update, so all ranks skip together.
3. What happened goes into a small vector, summed over the ranks, which the host reads one step
   later, when the next step is queued; behind it travel loss and margin of each of the rank's rows.
   Queueing a step waits for nothing on the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from vit.data.augment.apply import Augment
from vit.data.augment.draw import mixes
from vit.data.batches import Batch
from vit.data.hashing import fold
from vit.exact.leaves import Leaves
from vit.layers.attention_logits import largest_logits
from vit.layers.blocks import Blocks
from vit.loss import Loss, cross_entropy
from vit.metrics import margins
from vit.optim.ema import Ema
from vit.optim.norms import Measured, Norms
from vit.optim.optimizer import set_rates
from vit.precision import LossScale, autocast
from vit.ranks.distributed import World, no_sync
from vit.run.step_result import SPIKE, Limits, Slot, StepResult
from vit.weights.teacher import Teacher

_SEED_DROPOUT = 0x0D0
IMAGES_OF_LOGITS = 8
"""Of the global batch, the first ones: the largest attention logit is looked for in these."""


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each of `model.blocks` in place, or the whole model if it has no blocks.

    Our blocks share one graph in training and one in evaluation, so compiling takes as long for H
    as for B. `backend`: any of torch.compile's.
    """
    blocks = list(getattr(model, "blocks", [model]))
    # By default torch makes one graph for all sizes once it has seen two. Images of a run have few
    # sizes, each for epochs, and a graph for each is faster.
    num_sizes = 1 + len(getattr(model, "other_sizes", ()))
    # Otherwise each graph is cut where a bucket of DDP ends, and its pieces are fused separately.
    # The borders of blocks already let the all-reduce of one overlap with the backward pass of the
    # next.
    torch._dynamo.config.optimize_ddp = False
    # Blocks of timm have a graph each where their drop path rates differ. After 8 graphs (the
    # default limit) torch would run the others uncompiled, and those of evaluation too.
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks) * num_sizes)
    torch._dynamo.config.recompile_limit = limit
    for block in blocks:
        block.compile(backend=backend, dynamic=False if num_sizes > 1 else None)


def compile_where_it_works(models: Iterable[nn.Module], world: World) -> str:
    """Compile `models` by `compile_blocks`, on all ranks or on none; return why none is, or ""."""
    why_eager = why_not_compiled(world.device)
    if world.any_rank(bool(why_eager)):
        return why_eager or "not on another host of this run"
    for model in models:
        compile_blocks(model)
    return ""


@functools.cache
def why_not_compiled(device: torch.device) -> str:
    """Return why torch.compile does not work on this host for `device`, "" if it does.

    Compiles a line to find out, in seconds, most of which any first compilation takes. Asking for
    its parts would not do: a C++ compiler without Python's headers is as good as none.
    """
    constant = time.time_ns()  # no cache has it

    def line(x: Tensor) -> Tensor:
        return x.sin() * constant

    try:
        torch.compile(line)(torch.ones(8, device=device))
    except Exception as error:  # of Dynamo, compilers, Triton, drivers, disks: all end here
        return str(error).strip().splitlines()[0].rstrip(".")
    return ""


def checkpoint_activations(model: nn.Module, which: str | int) -> None:
    """Let blocks of `model` keep only their inputs for the backward pass, which computes the rest.

    which: `train.activation_checkpointing`. Call it before or after `compile_blocks`. Raises
    ValueError for a model of timm that cannot do it so.
    """
    if which == "none":
        return
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, Blocks):
        blocks.checkpoint_every = 1 if isinstance(which, str) else which
        return
    if which != "block":
        raise ValueError(
            f"train.activation_checkpointing={which}: models of timm know all blocks or none: set"
            " block or none"
        )
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise ValueError(
            f"train.activation_checkpointing=block: timm's {type(model).__name__} cannot do that:"
            " set none, and lower data.micro_batch_size"
        ) from None


class Part(StrEnum):
    """Where the time of a step goes, for `vit.measure`."""

    CHANGE = "change"
    """Augmentation of grey levels, ahead of the step."""
    FINISH = "finish"
    """Augmentation of float32 inputs, and targets."""
    TEACHER = "teacher"
    """Its forward pass (`distill`)."""
    FORWARD = "forward"
    """With the loss."""
    BACKWARD = "backward"
    """With DDP's averaging of gradients."""
    UPDATE = "update"
    """Gradient norm, clipping, optimizer and average."""


def _unmarked(part: Part) -> None:
    """Nobody measures."""


class TrainStep:
    """Everything that an update changes: weights, optimizer, moving average (EMA), loss scale.

    `model` is the module itself, `wrapped` the same under DDP and `torch.compile`; `lr_at` maps a
    step to its learning rate, `weight_decay_at` to its decay, None if that stays. `why_eager`: why
    it is not compiled although that was asked for. `loss`: cross-entropy, if none is given.
    `teacher`: a model that this one learns from besides.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        augment: Augment,
        world: World,
        *,
        lr_at: Callable[[int], float],
        weight_decay_at: Callable[[int], float | None] = lambda step: None,
        micro_batch_size: int,
        precision: str = "fp32",
        loss: Loss | None = None,
        teacher: Teacher | None = None,
        clip_grad_norm: float | None = None,
        ema: Ema | None = None,
        norms: Norms | None = None,
        seed: int = 0,
        why_eager: str = "",
        leaves: Leaves | None = None,
    ):
        self.model = model
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.augment = augment
        self.world = world
        self.lr_at = lr_at
        self.weight_decay_at = weight_decay_at
        self.micro_batch_size = micro_batch_size
        self.precision = precision
        self.loss = loss or cross_entropy
        self.teacher = teacher
        if teacher is not None and hasattr(model, "distilled_training"):
            # Ours, and timm's, with a second head.
            model.distilled_training = True  # type: ignore[assignment]
        self.clip_grad_norm = clip_grad_norm
        self.ema = ema
        self.norms = norms
        self.seed = seed
        self.why_eager = why_eager
        self.leaves = leaves
        self.mark: Callable[[Part], object] = _unmarked
        """Called where a part of the step begins."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss_scale = LossScale(precision, world.device)
        self.copying: torch.cuda.Event | None = None
        """When a copy of the state is complete that the device may still be making."""

    def __call__(
        self,
        batch: Batch,
        step: int,
        stop: bool = False,
        report: tuple[float, ...] = (0.0,),
        limits: Limits | None = None,
    ) -> StepResult:
        """Queue the update at `step` with this rank's rows of the global batch.

        batch: after `Augment.change_batch`, on any device. stop: whether this rank was asked to
        stop. report: numbers shared with all ranks; every rank must pass the same number of them.
        limits: the same on all ranks; above them the update is skipped.
        """
        sums, grad_norm, rows, norms = self._queue(batch, step, stop, report, limits)
        return StepResult(sums, grad_norm, len(report), rows, norms)

    def _queue(
        self,
        batch: Batch,
        step: int,
        stop: bool,
        report: tuple[float, ...],
        limits: Limits | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor], Measured | None]:
        """Queue everything on the device; return what `StepResult` takes."""
        # Dropout and drop path depend on (seed, rank, step) only, so a resumed run draws the same.
        torch.manual_seed(int(fold(self.seed, self.world.rank, step, _SEED_DROPOUT) >> 1))
        num_rows = len(batch.labels)
        # DDP averages the means of ranks that have as many rows; leaves are summed over all ranks.
        divisor = num_rows if self.leaves is None else self.leaves.num_rows
        num_slots = Slot.RANK_REPORTS + self.world.size * len(report)
        sums = torch.zeros(num_slots, device=self.world.device)
        rows: list[tuple[Tensor, Tensor, Tensor]] = []

        # Forward and backward. Only the last micro-batch lets DDP average the gradients.
        for start in range(0, num_rows, self.micro_batch_size):
            end = start + self.micro_batch_size
            micro_batch = batch.rows(start, end).to(self.world.device)
            with self._pass(step, start, is_last=end >= num_rows):
                losses, logits = self._losses(micro_batch)
                # A row whose image could not be decoded has weight 0, and so no gradient.
                loss_sum = (losses * micro_batch.weights).sum()
                # Rows of weight 0 count in the divisor, so that all ranks have the same; the
                # reported loss leaves them out.
                self.mark(Part.BACKWARD)
                (loss_sum * (1 / divisor) * self.loss_scale.value).backward()
            if self.leaves is not None:
                self.leaves.add(start, loss_sum.detach(), micro_batch.weights.sum())
            sums[Slot.LOSS_SUM].add_(loss_sum.detach())
            sums[Slot.ROW_WEIGHTS].add_(micro_batch.weights.sum())
            row_margins = margins(logits.detach(), micro_batch.labels)
            rows.append((losses.detach(), row_margins, micro_batch.weights))

        # `fill_` takes its number along with the kernel. `sums[...] = number` would copy it from
        # host memory, for which torch 2.11 waits for the device.
        sums[Slot.STOP].fill_(float(stop))
        sums[Slot.BAD_IMAGES].fill_(float(len(batch.bad_keys)))
        own_report = Slot.RANK_REPORTS + self.world.rank * len(report)
        for position, number in enumerate(report, own_report):
            sums[position].fill_(number)

        self.mark(Part.UPDATE)
        if self.leaves is not None:
            self.leaves.finish()
        norms = None
        if self.norms is not None and self.norms.is_due(step):
            logits = self._largest_logits(batch)
            self.norms.begin(self.loss_scale.value)
            grad_norm = self._update(step, sums, limits)
            norms = self.norms.end(logits)
        else:
            grad_norm = self._update(step, sums, limits)
        self._clear_gradients(batch)
        pieces = [piece for kind in zip(*rows, strict=True) for piece in kind]
        return sums, grad_norm, pieces, norms

    def _pass(self, step: int, start: int, is_last: bool) -> AbstractContextManager[None]:
        if self.leaves is not None:
            return self.leaves.leaf(step, start)
        return nullcontext() if is_last else no_sync(self.wrapped)

    def _losses(self, micro_batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each row, (B,) float32, and the logits, (B, classes)."""
        self.mark(Part.FINISH)
        inputs, targets = self.augment.finish(
            micro_batch.images, micro_batch.labels, micro_batch.table
        )
        answers = None
        if self.teacher is not None:
            # First, so that its temporaries are gone when the student's activations come.
            self.mark(Part.TEACHER)
            answers = self.teacher(inputs)
        self.mark(Part.FORWARD)
        with autocast(self.precision, self.world.device):
            outputs = self.wrapped(inputs)
        # Of a model with two heads the second one learns from the teacher, else the only one.
        logits, learning = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        losses = self.loss(logits, targets)
        if self.teacher is not None and answers is not None:
            losses = self.teacher.blend(losses, learning, answers)
        return losses, logits

    @torch.no_grad()
    def _largest_logits(self, batch: Batch) -> Tensor:
        """Return the largest attention logit of each block, (blocks,) float32; (0,) for none.

        In the first images of the global batch, as the weights before the update see them.
        """
        config = self.augment.config
        unit = config.mix_group_size if mixes(config) else 1
        num_rows = len(batch.labels)
        # The same rows together on any number of ranks, where that is asked for.
        size = num_rows if self.leaves is None else self.micro_batch_size
        first = self.world.rank * num_rows if self.leaves is None else self.leaves.first_row
        # The first ones are on the first ranks; the others compute as well, as shards would need.
        largest = []
        for start in range(0, max(min(IMAGES_OF_LOGITS - first, num_rows), 1), size):
            end = start + min(-(-IMAGES_OF_LOGITS // unit) * unit, size)
            rows = batch.rows(start, end).to(self.world.device)
            # Eager: further graphs, for so few images, would cost seconds.
            with torch.compiler.set_stance("force_eager"):
                inputs, _ = self.augment.finish(rows.images, rows.labels, rows.table)
                with autocast(self.precision, self.world.device):
                    found = largest_logits(self.model, inputs[:IMAGES_OF_LOGITS])
            if not len(found):
                return found.new_empty(0)
            found[:, max(IMAGES_OF_LOGITS - first - start, 0) :] = -torch.inf
            largest.append(found.amax(1))
        return self.world.max_(torch.stack(largest).amax(0))

    @torch.no_grad()
    def _update(self, step: int, sums: Tensor, limits: Limits | None = None) -> Tensor:
        """Sum `sums` over the ranks, clip, update weights and EMA if all is well; return the
        gradient norm before clipping."""
        if self.copying is not None:
            self.copying.wait()  # the device waits, not the host
            self.copying = None
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) / self.loss_scale.value
        add = self.world.sum_ if self.leaves is None else self.leaves.sum_
        # Exact over ranks: one rank's norm, which all have alike; a sum of several would round.
        if self.leaves is None or self.world.is_main:
            sums[Slot.VERDICT].copy_(norm)
        not_finite, is_skipped = self._judge(add(sums), limits)

        # Unscale and clip in one pass over the gradients.
        factor = 1.0 / self.loss_scale.value
        if self.clip_grad_norm is not None:
            factor = factor * (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.clip_grad_norm is not None or self.loss_scale.is_dynamic:
            torch._foreach_mul_(gradients, factor)

        # torch.amp.GradScaler hands `found_inf` over in the same way. `vit.optim.optimizer` sees to
        # it that the update is skipped on the device.
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = is_skipped  # type: ignore[attr-defined]
        set_rates(self.optimizer, self.lr_at(step), self.weight_decay_at(step))
        self.optimizer.step()
        self.loss_scale.update(not_finite)  # a spike is no overflow
        if self.ema is not None:
            # Also after a skipped update, of which the host does not know yet. The average then
            # moves towards unchanged weights.
            self.ema.update(step)
        return norm

    def _judge(self, sums: Tensor, limits: Limits | None) -> tuple[Tensor, Tensor]:
        """Return whether the gradient is not finite, and whether the update is skipped, 0 or 1.

        Both follow from `sums`, which all ranks have alike, and which get the verdict.
        """
        norm_sum = sums[Slot.VERDICT]
        not_finite = (~norm_sum.isfinite()).float()
        if limits is None:
            sums[Slot.VERDICT].copy_(not_finite)
            return not_finite, not_finite
        # The limits are numbers of the host, which travel with the kernels: nothing waits.
        loss = sums[Slot.LOSS_SUM] / sums[Slot.ROW_WEIGHTS].clamp(min=1.0)
        is_above = norm_sum > limits.grad_norm * (self.world.size if self.leaves is None else 1)
        is_above = is_above.logical_or_(loss > limits.loss).float()
        sums[Slot.VERDICT].copy_(not_finite.add(is_above, alpha=SPIKE))
        return not_finite, torch.maximum(not_finite, is_above)

    def _clear_gradients(self, batch: Batch) -> None:
        """Set gradients to None, or to zero where several passes over `batch` add up under DDP."""
        # Zeros stay in DDP's buckets. Without them the passes under `no_sync` would allocate a
        # second set (2.5 GB for H), which the last pass copies into the buckets. For a single pass
        # the fill is not worth its time.
        self.optimizer.zero_grad(set_to_none=not self._accumulates(batch))

    def _accumulates(self, batch: Batch) -> bool:
        """Whether several passes over `batch` add up under DDP, where `wrapped` is not `model`."""
        return self.wrapped is not self.model and len(batch.labels) > self.micro_batch_size

    def fix_bucket_layout(self, batch: Batch) -> None:
        """Bring DDP's buckets into their final layout, before the first step of a process.

        DDP re-orders its buckets after the first synchronised backward pass, and from 3 ranks on
        a different layout sums in a different order: a resumed run would differ in the last bit
        from one that was not interrupted. A throw-away pass tells it the order, and the next
        forward pass lays the buckets out.
        """
        if self.wrapped is self.model:  # not under DDP
            return
        micro_batch = batch.rows(0, self.micro_batch_size).to(self.world.device)
        size: Any = self.model.image_size
        if tuple(micro_batch.images.shape[2:]) != size:
            # Gradients of resampled positions come at another time, and a run that resumes behind
            # its stages has none: all attempts take the layout of the model's own size.
            images = micro_batch.images.new_zeros((*micro_batch.images.shape[:2], *size))
            micro_batch = replace(micro_batch, images=images)
        # Batch norms of timm models would keep the passes in their running statistics.
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        self._losses(micro_batch)[0].sum().backward()
        if self._accumulates(batch):
            self._losses(micro_batch)[0].sum().backward()  # zeros are to stay in the new buckets
        else:
            with no_sync(self.wrapped):
                self._losses(micro_batch)
        self._clear_gradients(batch)
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)
