"""Compute the host memory and the disk space that a run needs, without allocating them.

`vit.start.preflight` compares these needs with the host when a run starts, and `vit.extras.planner`
reports them in advance.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vit.config.schema import CheckpointConfig, Config, LoaderConfig
from vit.data.batches import BatchLayout
from vit.data.slots import EVAL_READY_BATCHES, Ring, plan_ring
from vit.hooks.sample_losses import folder_bytes
from vit.optim.optimizer import state_bytes
from vit.training.freeze import create_trained_model
from vit.training.plan import Plan

WORKER_BYTES = (128 if sys.platform == "linux" else 352) * 2**20
"""The memory of a loader worker: Python objects, library data and images. On systems other than
Linux, a worker is not forked, so it also loads its own libraries. In a measurement, a worker used
110 MiB (docs/experiments/). metrics.jsonl contains the memory that workers actually use
(`loader_worker_mib`)."""
TENSOR_HEADER_BYTES = 160
"""The approximate size of a tensor's name, dtype, shape and offset in a safetensors header."""


class Load(NamedTuple):
    """The batches that one loader makes on a rank."""

    layout: BatchLayout
    row_unit: int
    num_batches: int
    worker_bytes: int = WORKER_BYTES
    """The memory of one worker process."""


@dataclass(frozen=True)
class HostMemory:
    """The memory that a run needs on a host, in bytes. All values except the last are per rank."""

    ring: Ring
    """The page-locked training batches that are being loaded, ready or in use."""
    eval_ring: Ring
    """The page-locked batches of `data.val_split`."""
    eval_slots: int
    """The memory for page-locked evaluation batches, which stays allocated between evaluations."""
    workers: int
    """The memory of all loader workers, for training and evaluation."""
    saved_copy: int
    """The page-locked copy of the training state, from which a thread writes a checkpoint. It
    exists only on the first host."""

    @property
    def batches(self) -> int:
        """The memory of all batches on a rank."""
        return self.ring.num_bytes + self.eval_slots

    @property
    def of_each_gpu(self) -> int:
        """The total memory per rank."""
        return self.batches + self.workers


def host_memory(
    loader: LoaderConfig, train: Load, evals: Sequence[Load], *, on_gpu: bool, saved_bytes: int
) -> HostMemory:
    """Compute the host memory of a run.

    Args:
        evals: The batches of each evaluation split, `data.val_split` first.
        saved_bytes: The size of a checkpoint.
    """
    workers = loader.num_workers
    ring = plan_ring(*train[:3], workers, on_gpu)
    rings = [plan_ring(*each[:3], workers, on_gpu, EVAL_READY_BATCHES) for each in evals]

    # Three loaders exist at the same time: the training loader, the loader of `data.val_split`, and
    # the loader of another split during its evaluation.
    further_slots = max((each.num_bytes for each in rings[1:]), default=0)
    further_worker = max((each.worker_bytes for each in evals[1:]), default=0)
    return HostMemory(
        ring=ring,
        eval_ring=rings[0],
        eval_slots=rings[0].num_bytes + further_slots,
        workers=workers * (train.worker_bytes + evals[0].worker_bytes + further_worker),
        saved_copy=saved_bytes,
    )


@dataclass(frozen=True)
class DiskNeeds:
    """The maximum size of the run folder."""

    checkpoint_bytes: int
    """The size of one checkpoint."""
    num_checkpoints: int
    weights_bytes: int
    """The size of all files in `weights/`."""
    samples_bytes: int
    """The size of all files with sample losses."""

    @property
    def total_bytes(self) -> int:
        return (
            self.num_checkpoints * self.checkpoint_bytes + self.weights_bytes + self.samples_bytes
        )

    def in_words(self, size: Callable[[int], str]) -> str:
        """Return the parts of the total as text. size: a function that formats byte counts."""
        losses = f", losses of images {size(self.samples_bytes)}" if self.samples_bytes else ""
        return (
            f"{self.num_checkpoints} checkpoint(s) of {size(self.checkpoint_bytes)}, weights"
            f" {size(self.weights_bytes)}{losses}"
        )


def disk_needs(config: Config, plan: Plan, num_classes: int) -> DiskNeeds:
    """Compute the disk space that a run needs, without allocating parameters, optimizer or EMA."""
    with torch.device("meta"):
        # Frozen parameters have no optimizer state.
        model = create_trained_model(config, num_classes)
    copies = 1 if config.ema.decay is None else 2
    weights_bytes = _file_bytes([tensor.nbytes for tensor in model.state_dict().values()])
    num_saves = math.ceil(plan.total_steps / config.checkpoint.every_steps)
    # Streamed samples have no index, so per-sample losses are not saved.
    keeps_losses = config.log.sample_losses if config.stream.urls is None else 0
    num_names = 2 if plan.total_steps >= plan.eval_every_steps else 1  # "best" needs an evaluation

    return DiskNeeds(
        checkpoint_bytes=copies * weights_bytes + _file_bytes(state_bytes(config.optim, model)),
        num_checkpoints=_num_checkpoints(config.checkpoint, num_saves),
        weights_bytes=num_names * copies * weights_bytes,
        samples_bytes=folder_bytes(plan, keeps_losses),
    )


def _num_checkpoints(settings: CheckpointConfig, num_saves: int) -> int:
    """Return the largest number of checkpoints that exist at the same time. The number includes the
    one being written, because the oldest checkpoint is removed only afterwards."""
    newest = min(settings.keep_last + 1, num_saves)
    return newest + (num_saves - newest) // (settings.keep_every or num_saves)


def _file_bytes(tensors: list[int]) -> int:
    """Return the size of a safetensors file. tensors: the size of each tensor, in bytes."""
    return sum(tensors) + len(tensors) * TENSOR_HEADER_BYTES
