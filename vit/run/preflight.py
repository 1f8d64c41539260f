"""Before the first step: does this host have what the run is going to use?

The data's story: shards are checked against `_info.json` when they are opened, ranks against the
batch by the plan. What is left are the limits of the host: memory for the batches of all its ranks,
cores for their workers, open files for the shards, /dev/shm, of which we need nothing but NCCL
does, and the disk for what the run will save. What cannot work is an error with its remedy; what
only costs speed is a note. Both stand in the record.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit.config import Config
from vit.data.batches import EvalBatches, TrainBatches
from vit.data.decode import native
from vit.data.decode.images import decoder_name
from vit.data.slots import plan_ring
from vit.data.storage.cached_tars import FETCH_BYTES, CachedTars, fetch_threads_per_process
from vit.data.storage.local_tars import LocalTars
from vit.data.stream import StreamBatches
from vit.distributed import World, local_world_size
from vit.model import create_model
from vit.optim import state_bytes
from vit.plan import Plan
from vit.precision import AUTOCAST_DTYPE
from vit.system.host import free_memory_bytes, num_cores, raise_open_files

WORKER_BYTES = (128 if sys.platform == "linux" else 352) * 2**20
"""Memory that a worker process has for itself, measured at 110 MiB (docs/experiments.md): Python's
objects, libraries' data, images; also libraries where it is no fork of training. What workers
really have stands in the record (`loader_worker_mib`)."""
OTHER_FILES = 256
"""Open files of a process besides shards: pipes, libraries, sockets of other ranks."""
NCCL_SHM_BYTES = 2**30
"""What NVIDIA tells to give containers (NCCL's documentation, Troubleshooting, Docker):
--shm-size=1g."""
SLOW_PRECISION = 3.0
"""How many times slower than fp32 a precision may be before people are told: a chip that computes
in it is faster."""
TENSOR_HEADER_BYTES = 160
"""What a tensor's name, type, shape and place take in the header of a safetensors file, about."""
DISK_MARGIN_BYTES = 2**20
"""For the record, predictions and `checkpoint.json`; and what a save wants to be left."""
SAVED = ("checkpoints/step_*/*", "checkpoints/.tmp_*/*", "weights/*.safetensors")
"""What a run has saved, and replaces or removes as it goes on."""
TELL_MISSING_BYTES = 2**28
"""Of blocks that the cache lacks for the first batches: people are told why these take a while."""
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Preflight:
    """What was found, for people and for the record."""

    lines: tuple[str, ...]
    numbers: dict[str, Any]


def preflight(
    config: Config,
    world: World,
    plan: Plan,
    train: TrainBatches | StreamBatches,
    val: EvalBatches,
    root: Path = Path("/"),
) -> Preflight:
    """Check this host against the run and raise the limit of open files where that is needed.

    root: where `proc` and `sys` lie. Raises ValueError if the run cannot work here.
    """
    workers = config.data.num_workers
    ranks = local_world_size()
    on_gpu = world.device.type == "cuda"
    ring = plan_ring(
        train.layout, train.row_unit, plan.total_steps, workers, config.data.prefetch_gib, on_gpu
    )
    # workers of both live at once
    eval_ring = plan_ring(val.layout, val.row_unit, len(val), workers, None, on_gpu)

    # 1. Memory: what one host's ranks share among their processes, and what each worker has for
    # itself.
    free = free_memory_bytes(root)
    cores = num_cores(root)
    batch_bytes = ring.num_bytes + eval_ring.num_bytes
    index_bytes = train.split.index.nbytes + val.split.index.nbytes
    own_bytes = [_worker_bytes(batches, ranks * workers) for batches in (train, val)]
    needed = ranks * (batch_bytes + workers * sum(own_bytes))
    if free is not None and needed > free:
        raise ValueError(
            f"{ranks} rank(s) with {workers} loader workers each need {needed / GIB:.2f} GiB of"
            f" memory for batches on this host ({ring.num_slots} of {ring.slot_bytes / MIB:.1f} MiB"
            f" a rank, {eval_ring.num_slots} of {eval_ring.slot_bytes / MIB:.1f} MiB to evaluate,"
            f" {max(own_bytes) / MIB:.0f} MiB a worker, of whom evaluation has its own),"
            f" {free / GIB:.2f} GiB are free: lower data.num_workers, data.prefetch_gib or"
            " eval.batch_size, or give the job more memory"
        )

    # 2. Notes: what works, but not as fast as it could.
    local = [
        split for split in (*train.split.splits, val.split) if isinstance(split.tars, LocalTars)
    ]
    notes = []
    num_shards = sum(len(split.filenames) for split in local)
    wanted_files = 2 * num_shards + OTHER_FILES  # a reader keeps half of the limit free for others
    open_files = raise_open_files(wanted_files)
    if open_files < wanted_files:
        notes.append(
            f"the limit of {open_files:,} open files is low for {num_shards:,} shards, some of"
            f" which are opened anew for each image: `ulimit -n {wanted_files}` before the start,"
            " or ask the administrator"
        )
    notes += _notes_of_cache(train, ranks)
    threads = torch.get_num_threads()
    if not on_gpu and ranks > 1 and 2 * threads * ranks <= cores:
        notes.append(
            f"each of {ranks} ranks computes in {threads} thread(s) on {cores} cores, as torchrun "
            f"wants it: `export OMP_NUM_THREADS={cores // ranks}` before it uses them all"
        )
    if ranks * workers > cores:
        notes.append(
            f"{ranks * workers} loader workers on {cores} core(s) take turns:"
            f" data.num_workers={max(cores // ranks, 1)} is as fast, in less memory"
        )
    emulated = precision_note(config.train.precision, world.device) if world.is_main else None
    notes += [emulated] if emulated else []
    notes += (
        [f"JPEGs are decoded by simplejpeg, at 0.6 of the speed: {native.UNAVAILABLE_REASON}"]
        if native.UNAVAILABLE_REASON
        else []
    )
    shm = Path("/dev/shm")
    shm_bytes = shutil.disk_usage(shm).free if shm.is_dir() else None
    if on_gpu and ranks > 1 and shm_bytes is not None and shm_bytes < NCCL_SHM_BYTES:
        notes.append(
            f"/dev/shm has {shm_bytes / MIB:.0f} MiB free, NCCL wants {NCCL_SHM_BYTES / MIB:.0f}"
            " between the GPUs of a host: docker run --shm-size=1g (batches need nothing there)"
        )

    numbers = {
        "train_shards": len(train.split.filenames),
        "val_shards": len(val.split.filenames),
        "batch_slots": ring.num_slots,
        "batch_gib": round(batch_bytes / GIB, 4),
        "decoder": decoder_name(),
        "index_gib": round(index_bytes / GIB, 4),
        "free_memory_gib": None if free is None else round(free / GIB, 2),
        "cores": cores,
        "open_files": open_files,
        "free_shm_gib": None if shm_bytes is None else round(shm_bytes / GIB, 2),
        "notes": notes,
    }
    memory = f", {free / GIB:.1f} GiB of memory free" if free is not None else ""
    lines = (
        (
            f"data: {train.split.num_samples:,} images in {len(train.split.filenames):,} shards,"
            f" {val.split.num_samples:,} in {len(val.split.filenames):,} to evaluate; index"
            f" {index_bytes / MIB:.1f} MiB, mapped once a host; JPEG decoder: {decoder_name()}"
        ),
        (
            f"host: {cores} core(s) for {ranks} rank(s) with {workers} loader worker(s)"
            f" each{memory}; batches take {batch_bytes / MIB:.1f} MiB a rank ({ring.num_slots} of"
            f" {train.layout.num_rows} images, {eval_ring.num_slots} of {val.layout.num_rows} to"
            " evaluate), nothing in /dev/shm"
        ),
        *(f"note: {note}" for note in notes),
    )
    return Preflight(lines, numbers)


def _worker_bytes(batches: TrainBatches | StreamBatches | EvalBatches, num_processes: int) -> int:
    """Memory of one of so many loader processes of this host."""
    is_remote = isinstance(getattr(batches.split, "tars", None), CachedTars)
    return WORKER_BYTES + (
        fetch_threads_per_process(num_processes) * FETCH_BYTES if is_remote else 0
    )


def precision_note(
    precision: str, device: torch.device, remedy: str = "train.precision=fp32"
) -> str | None:
    """That this CPU only emulates `precision` (fp32, bf16 or fp16), how slow that is, and what to
    do; None where it is no slower.

    Measured, in a tenth of a second, on a matrix product as in a ViT-B's MLP: torch can tell which
    instructions a CPU has, not what its kernels make of them.
    """
    if device.type != "cpu" or precision not in AUTOCAST_DTYPE:
        return None
    times = _matmul_s(AUTOCAST_DTYPE[precision]) / _matmul_s(torch.float32)
    if times < SLOW_PRECISION:
        return None
    cpu = torch.backends.cpu.get_cpu_capability()
    return (
        f"this CPU ({cpu}) has no instructions for {precision}, which is emulated: matrix products"
        f" take about {times:.0f} times as long as in fp32: set {remedy}"
    )


def _matmul_s(dtype: torch.dtype) -> float:
    """Seconds that 16 tokens of ViT-B take through the first layer of an MLP, the best of three."""
    tokens = torch.ones(16, 768, dtype=dtype)
    weight = torch.ones(768, 3072, dtype=dtype)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        tokens @ weight
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@dataclass(frozen=True)
class DiskNeeds:
    """What a run will have in its folder at most."""

    checkpoint_bytes: int
    num_checkpoints: int
    weights_bytes: int
    """Of all files in `weights/`."""

    @property
    def total_bytes(self) -> int:
        """Of checkpoints and weights."""
        return self.num_checkpoints * self.checkpoint_bytes + self.weights_bytes


def disk_needs(config: Config, plan: Plan, num_classes: int) -> DiskNeeds:
    """From parameters, optimizer and average, without making them. A checkpoint is written before
    the oldest goes, so there is one more than `checkpoint.keep_last` for a while."""
    with torch.device("meta"):
        model = create_model(config.model, num_classes=num_classes)
    copies = 1 if config.train.ema_decay is None else 2
    weights = _file_bytes([tensor.nbytes for tensor in model.state_dict().values()])
    optimizer = _file_bytes(state_bytes(config.optim, model))
    saves = -(-plan.total_steps // config.checkpoint.every_steps)
    names = 2 if plan.total_steps >= plan.eval_every_steps else 1  # last; best, after an evaluation
    return DiskNeeds(
        checkpoint_bytes=copies * weights + optimizer,
        num_checkpoints=min(config.checkpoint.keep_last + 1, saves),
        weights_bytes=names * copies * weights,
    )


def check_disk(
    checked: Preflight, config: Config, plan: Plan, folder: Path, num_classes: int
) -> Preflight:
    """`checked` with what the run will save in `folder`. Raises ValueError if there is no room for
    it, counting what is there of it already."""
    needs = disk_needs(config, plan, num_classes)
    saved = [path for pattern in SAVED for path in folder.glob(pattern) if path.is_file()]
    there_bytes = sum(path.stat().st_size for path in saved)
    # At least one checkpoint is written before anything goes.
    more_bytes = max(needs.total_bytes - there_bytes, needs.checkpoint_bytes)
    place = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir()
    )
    free_bytes = shutil.disk_usage(place).free
    what = (
        f"{needs.num_checkpoints} checkpoint(s) of {_size(needs.checkpoint_bytes)} and weights of"
        f" {_size(needs.weights_bytes)}"
    )
    if free_bytes < more_bytes * 1.01 + DISK_MARGIN_BYTES:
        already = f", {_size(there_bytes)} of it are there" if there_bytes else ""
        raise ValueError(
            f"run.dir={folder}: the run needs {_size(needs.total_bytes)} ({what}{already}), its"
            f" disk has {_size(free_bytes)} free: make room, lower checkpoint.keep_last"
            f" ({config.checkpoint.keep_last}, and one more while it is written), or choose another"
            " run.dir"
        )
    numbers = {
        "checkpoint_gib": round(needs.checkpoint_bytes / GIB, 4),
        "needed_disk_gib": round(more_bytes / GIB, 4),
        "free_disk_gib": round(free_bytes / GIB, 2),
    }
    line = f"disk: {what} at most in {folder}, {_size(free_bytes)} free"
    return replace(checked, lines=(*checked.lines, line), numbers={**checked.numbers, **numbers})


def _file_bytes(tensors: list[int]) -> int:
    """Of `tensors` with so many bytes each in a safetensors file."""
    return sum(num_bytes + TENSOR_HEADER_BYTES for num_bytes in tensors)


def _size(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def filling_note(batches: TrainBatches | StreamBatches, step: int, plan: Plan) -> str | None:
    """What the first batches fetch, where it is much: after a resume on another host their windows
    are fetched whole."""
    if (
        not isinstance(batches, TrainBatches)
        or not batches.split.read_ahead_batches
        or step == plan.total_steps
    ):
        return None
    steps = range(step, min(step + batches.split.read_ahead_batches, plan.total_steps))
    rows = batches.first_row, batches.first_row + batches.layout.num_rows
    samples = np.unique(np.concatenate([batches.order.rows(later, *rows) for later in steps]))
    tars = None
    wanted = 0
    missing = 0
    for split, own in batches.split.divided(samples):
        if isinstance(split.tars, CachedTars):
            tars = split.tars
            of_split = split.tars.wanted_bytes(own)
            wanted = wanted + of_split[0]
            missing = missing + of_split[1]
    if tars is None or missing < TELL_MISSING_BYTES:
        return None
    return (
        f"filling the cache: the next {len(steps)} batches of a rank lie in {wanted / 1e9:.2f} GB"
        f" of blocks, of which {missing / 1e9:.2f} GB are not in {tars.cache.folder} yet; `python"
        " -m vit.data.warm` fetches ahead of a job"
    )


def _notes_of_cache(train: TrainBatches | StreamBatches, ranks: int) -> list[str]:
    """That blocks of remote shards will be fetched again and again, if the cache does not hold what
    the order reads from at a time."""
    order = train.order
    remote = [
        (split, split.tars) for split in train.split.splits if isinstance(split.tars, CachedTars)
    ]
    if not remote:
        return []
    wanted_bytes = 0
    for split, tars in remote:
        blocks = order.blocks_at_a_time(ranks * train.layout.num_rows, tars.read_ahead_batches)
        block_bytes = (
            max(order.block_samples, tars.block_samples) * tars.stored_bytes // split.num_samples
        )
        wanted_bytes += min(blocks * block_bytes, tars.stored_bytes)
    remedy = (
        "set data.block_samples=64"
        if order.block_samples == 1
        else "lower data.num_lanes or data.window_blocks"
    )
    if tars.cache.limit_bytes >= wanted_bytes:
        return []
    return [
        f"{tars.folder}: the cache of {tars.cache.limit_bytes / GIB:.1f} GiB is smaller than the"
        f" {wanted_bytes / GIB:.1f} GiB that are read from at a time, so up to {tars.block_samples}"
        f" times as much is fetched: raise data.cache_gib, or {remedy}"
    ]
