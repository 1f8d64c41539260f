"""One training step: a global batch in, one update out.

The data's story: a rank's batch is cut into micro-batches; each is augmented on the device, goes
through the model under autocast, and its loss, divided by the global batch, adds to the gradients;
only the last backward lets DDP sum them. Then one norm decides everything: it clips, it tells a
non-finite gradient, which makes the fused optimizer skip its update on the device and, for fp16,
lowers the loss scale. What happened goes into a small vector that is summed over the ranks and read
by the host one step late: no step waits for Python.

The gradients are the same on all ranks, so all ranks skip together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.data.augment.apply import Augment
from vit.data.batches import Batch
from vit.data.order import fold
from vit.distributed import World, no_sync
from vit.ema import Ema
from vit.loss import cross_entropy
from vit.optim import set_lr

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 2.0**16
FP16_GROWTH_STEPS = 2000
"""torch.amp.GradScaler's start and growth interval."""
_SEED_DROPOUT = 0x0D0


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Autocast for `precision` fp32, bf16 or fp16 on `device`."""
    return (
        torch.autocast(device.type, AUTOCAST_DTYPE[precision])
        if precision in AUTOCAST_DTYPE
        else nullcontext()
    )


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each of `model.blocks` in place, or all of a model without blocks.

    Our blocks share one graph in training and one in evaluation, so compiling takes as long for H
    as for B. `backend`: any of torch.compile's.
    """
    blocks = list(getattr(model, "blocks", [model]))
    # Else each graph is cut where a bucket of DDP ends, and its pieces are fused apart. The borders
    # of blocks already let the all-reduce of one run beside the backward pass of the next.
    torch._dynamo.config.optimize_ddp = False
    # Blocks of timm have a graph each where their drop path rates differ; after 8 (the default)
    # torch would run the rest without compiling, and so the evaluation's.
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
    torch._dynamo.config.recompile_limit = limit
    for block in blocks:
        block.compile(backend=backend)


class Slot(IntEnum):
    """Where things stand in the vector that a step sums over the ranks."""

    LOSS_SUM = 0
    ROW_WEIGHTS = 1
    STOP = 2
    """Ranks that want to stop."""
    BAD_IMAGES = 3
    WAITS_S = 4
    """And following, one for each rank: how long it waited for this batch. Only its own rank adds
    to it. Behind them stands, where metrics are logged, what each rank tells of its loader."""


class StepValues(NamedTuple):
    """What a step did, as numbers of the host."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Before clipping."""
    stop: float
    """Ranks that want to stop."""
    bad_images: int
    waits_s: tuple[float, ...]
    """How long each rank waited for its rows."""
    told: tuple[tuple[float, ...], ...] = ()
    """What each rank told beside that."""


class StepResult:
    """What a step did, on its way to the host.

    `sums`: (4 + ranks * (1 + num_told),) float32 on the device, by `Slot`, summed over the ranks.
    `grad_norm`: (). On a GPU the copy is queued behind the step, with an event, so that reading
    waits for this step and not for what was queued since.
    """

    def __init__(self, sums: Tensor, grad_norm: Tensor, num_told: int = 0):
        values = torch.cat([sums, grad_norm[None]])
        self._num_told = num_told
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, pin_memory=True).copy_(
                values, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> StepValues:
        """Waits for the device to come to this step."""
        if self._event is not None:
            self._event.synchronize()
        *sums, grad_norm = self._values.tolist()
        loss = sums[Slot.LOSS_SUM] / max(sums[Slot.ROW_WEIGHTS], 1.0)
        of_ranks = sums[Slot.WAITS_S :]
        each = self._num_told
        size = len(of_ranks) // (1 + each)
        told = tuple(
            tuple(of_ranks[size + rank * each : size + (rank + 1) * each])
            for rank in range(size if each else 0)
        )
        return StepValues(
            loss,
            grad_norm,
            sums[Slot.STOP],
            int(sums[Slot.BAD_IMAGES]),
            tuple(of_ranks[:size]),
            told,
        )


class TrainStep:
    """Everything an update changes: weights, optimizer, average, loss scale.

    `model` is the module itself, `wrapped` the same under DDP and `torch.compile`; `lr_at` maps a
    step to its learning rate.
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
        micro_batch_size: int,
        precision: str = "fp32",
        label_smoothing: float = 0.0,
        clip_grad_norm: float | None = None,
        ema: Ema | None = None,
        seed: int = 0,
    ):
        self.model = model
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.augment = augment
        self.world = world
        self.lr_at = lr_at
        self.micro_batch_size = micro_batch_size
        self.precision = precision
        self.label_smoothing = label_smoothing
        self.clip_grad_norm = clip_grad_norm
        self.ema = ema
        self.seed = seed
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        scale = FP16_SCALE if precision == "fp16" else 1.0
        self.loss_scale = torch.tensor(scale, device=world.device)
        self.steps_since_overflow = torch.tensor(0.0, device=world.device)

    def settle(self, batch: Batch) -> None:
        """Throw-away passes that fix DDP's bucket layout, before the first step of a process.

        DDP re-orders its buckets after the first synchronised backward; from 3 ranks on, another
        layout sums in another order. Without this a resumed run would differ in the last bit from
        the run that went on. Two passes reach the fixed point.
        """
        if self.world.size == 1:
            return
        micro = batch.rows(0, self.micro_batch_size).to(self.world.device)
        # a guest's batch norms would remember the passes
        before = [buffer.clone() for buffer in self.model.buffers()]
        for _ in range(2):
            self._loss(micro).sum().backward()
        self._clear_gradients(batch)
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)

    def __call__(
        self,
        batch: Batch,
        step: int,
        stop: bool = False,
        waited_s: float = 0.0,
        told: tuple[float, ...] = (),
    ) -> StepResult:
        """The update at `step` with this rank's rows of the global batch, for which it has waited
        `waited_s`. `stop`: this rank has been asked to end. `told`: numbers that all ranks get to
        know, as many on each.
        """
        return StepResult(*self._values(batch, step, stop, waited_s, told), len(told))

    def _values(
        self, batch: Batch, step: int, stop: bool, waited_s: float, told: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        """All that is queued on the device, up to the numbers of the result. Nothing in it
        waits."""
        torch.manual_seed(int(fold(self.seed, self.world.rank, step, _SEED_DROPOUT) >> 1))
        rows = len(batch.labels)
        micro = self.micro_batch_size
        global_rows = rows * self.world.size
        rank = self.world.rank
        size = self.world.size
        sums = torch.zeros(Slot.WAITS_S + size * (1 + len(told)), device=self.world.device)
        for start in range(0, rows, micro):
            part = batch.rows(start, start + micro).to(self.world.device)
            with nullcontext() if start + micro >= rows else no_sync(self.wrapped):
                losses = self._loss(part)
                # DDP averages over the ranks, hence the factor; a row without a readable image has
                # weight 0 and no gradient.
                (
                    (losses * part.weights).sum()
                    * (self.world.size / global_rows)
                    * self.loss_scale
                ).backward()
            sums[Slot.LOSS_SUM] += (losses.detach() * part.weights).sum()
            sums[Slot.ROW_WEIGHTS] += part.weights.sum()
        # As `sums[...] = ...` torch 2.11 would copy them from the host and wait for the device.
        sums[Slot.STOP].fill_(float(stop))
        sums[Slot.BAD_IMAGES].fill_(float(len(batch.bad_keys)))
        sums[Slot.WAITS_S + rank].fill_(waited_s)
        for at, number in enumerate(told, Slot.WAITS_S + size + rank * len(told)):
            sums[at].fill_(number)
        grad_norm = self._update(step)
        self._clear_gradients(batch)
        return self.world.sum_(sums), grad_norm

    def _clear_gradients(self, batch: Batch) -> None:
        """Make gradients None, or zero where several passes over `batch` add up under DDP.

        Zeros stay in DDP's buckets; without them the passes under `no_sync` would allocate a second
        set (2.5 GB for H), which the last pass copies in. For a single pass the fill is not worth
        it.
        """
        adds_up = self.wrapped is not self.model and len(batch.labels) > self.micro_batch_size
        self.optimizer.zero_grad(set_to_none=not adds_up)

    def _loss(self, part: Batch) -> Tensor:
        inputs, targets = self.augment(part.images, part.labels, part.table)
        with autocast(self.precision, self.world.device):
            logits = self.wrapped(inputs)
        return cross_entropy(logits, targets, self.label_smoothing)

    @torch.no_grad()
    def _update(self, step: int) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) / self.loss_scale
        factor = 1.0 / self.loss_scale
        if self.clip_grad_norm is not None:
            factor = factor * (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.clip_grad_norm is not None or self.precision == "fp16":
            torch._foreach_mul_(gradients, factor)
        found_inf = (~norm.isfinite()).float()
        set_lr(self.optimizer, self.lr_at(step))
        # As torch.amp.GradScaler hands them over: a fused optimizer skips its update on the device.
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.precision == "fp16":
            self._rescale(found_inf)
        if self.ema is not None:
            self.ema.update(step)
        return norm

    def _rescale(self, found_inf: Tensor) -> None:
        """Halve the loss scale after an overflow, double it after 2,000 good steps (Micikevicius et
        al. 2018, section 3.2)."""
        self.steps_since_overflow.add_(1).mul_(1 - found_inf)
        grow = (self.steps_since_overflow >= FP16_GROWTH_STEPS).float()
        self.loss_scale.mul_(1 - 0.5 * found_inf).mul_(1 + grow)
        self.steps_since_overflow.mul_(1 - grow)
