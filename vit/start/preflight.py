"""Check before the first step that this host has the resources for the run.

The checks cover memory for the batches of all ranks, cores for workers, open files for shards,
/dev/shm for NCCL, and disk space for saved files. A run that cannot work raises an error with a
remedy. If a setting only makes the run slow, a note is logged. The measured numbers are written to
metrics.jsonl.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit.config.schema import LoaderConfig
from vit.data.batches import AugmentedBatches, EvalBatches
from vit.data.decode import native
from vit.data.decode.images import decoder_name
from vit.distributed.process_group import World, local_world_size
from vit.run_folder.paths import SAMPLES_FOLDER
from vit.start.needs import WORKER_BYTES, DiskNeeds, HostMemory, Load, host_memory
from vit.system.host import free_memory_bytes, num_cores, raise_open_files
from vit.system.meter import GIB, MIB, size_text
from vit.training.plan import Plan
from vit.training.run_data import Notes

OTHER_FILES = 256
"""The number of open files per process that are not shards: pipes, libraries and sockets."""
NCCL_SHM_GIB = 1
"""NVIDIA's recommendation for containers: --shm-size=1g (NCCL's documentation, Troubleshooting)."""
DISK_MARGIN_BYTES = 2**20
"""The disk space for metrics.jsonl, predictions and `checkpoint.json`."""
SAVED = (
    "checkpoints/step_*/*",
    "checkpoints/.tmp_*/*",
    "weights/*.safetensors",
    f"{SAMPLES_FOLDER}/*.npy",
)
"""Patterns of saved files that the run later replaces or removes."""
MISSING_BYTES = 2**28
"""If the first batches need more than this many uncached bytes, a log line explains the wait."""


def preflight(
    loader: LoaderConfig,
    world: World,
    plan: Plan,
    train: AugmentedBatches,
    evals: Sequence[EvalBatches],
    root: Path = Path("/"),
    *,
    saved_bytes: int = 0,
) -> Notes:
    """Check this host, and raise this process's limit on open files if necessary.

    Raises ValueError if the run cannot work on this host.

    Args:
        evals: The batches of each evaluation split, `data.val_split` first.
        root: The folder that contains `proc` and `sys`.
        saved_bytes: The size of the state, which rank 0 copies in memory before saving.
    """
    workers = loader.num_workers
    ranks = local_world_size()
    processes = ranks * workers

    train_bytes = _worker_bytes(train, processes)
    eval_loads = [
        Load(each.layout, each.row_unit, len(each), _worker_bytes(each, processes))
        for each in evals
    ]
    memory = host_memory(
        loader,
        Load(train.layout, train.row_unit, plan.total_steps, train_bytes),
        eval_loads,
        on_gpu=world.device.type == "cuda",
        saved_bytes=saved_bytes if world.host_of(world.rank) == world.host_of(0) else 0,
    )

    free_bytes = free_memory_bytes(root)
    if free_bytes is not None and ranks * memory.of_each_gpu + memory.saved_copy > free_bytes:
        worker_bytes = max(train_bytes, *(each.worker_bytes for each in eval_loads))
        raise ValueError(_lacking_memory(memory, workers, worker_bytes, len(evals), free_bytes))

    shm = Path("/dev/shm")
    evaluated = [each.split for each in evals]
    index_bytes = train.split.index.nbytes + sum(split.index.nbytes for split in evaluated)
    local = [split for split in (*train.split.splits, *evaluated) if split.tars.cached is None]
    # Shard readers use at most half of the limit, so the limit must be twice the number of files.
    needed_files = 2 * sum(len(split.filenames) for split in local) + OTHER_FILES

    numbers = {
        "train_shards": len(train.split.filenames),
        "val_shards": sum(len(split.filenames) for split in evaluated),
        "batch_slots": memory.ring.num_slots,
        "batch_gib": round(memory.batches / GIB, 4),
        "save_copy_gib": round(memory.saved_copy / GIB, 4),
        "decoder": decoder_name(),
        "index_gib": round(index_bytes / GIB, 4),
        "free_memory_gib": None if free_bytes is None else round(free_bytes / GIB, 2),
        "cores": num_cores(root),
        "open_files": raise_open_files(needed_files),
        "free_shm_gib": round(shutil.disk_usage(shm).free / GIB, 2) if shm.is_dir() else None,
    }
    notes = list(_notes(loader, world, train, numbers, needed_files))

    free = "" if free_bytes is None else f", {free_bytes / GIB:.1f} GiB of memory free"
    host_line = (
        f"host: {numbers['cores']} core(s) for {ranks} rank(s) with {workers} loader worker(s)"
        f" each{free}; batches take {memory.batches / MIB:.1f} MiB a rank"
        f" ({memory.ring.num_slots} of {train.layout.num_rows} images,"
        f" {memory.eval_ring.num_slots} of {evals[0].layout.num_rows} to evaluate), nothing in"
        " /dev/shm"
    )

    return Notes(
        record={**numbers, "notes": notes},
        lines=(
            _data_line(train, evals, index_bytes),
            host_line,
            *(f"note: {note}" for note in notes),
        ),
    )


def _lacking_memory(
    memory: HostMemory, num_workers: int, worker_bytes: int, num_evals: int, free_bytes: int
) -> str:
    """Return the message for a host whose free memory is too small for the run."""
    ranks = local_world_size()
    needed_bytes = ranks * memory.of_each_gpu + memory.saved_copy
    more = ", and so does eval.sets" if num_evals > 1 else ""
    saved_mib = memory.saved_copy / MIB
    saving = f"; {saved_mib:.1f} MiB to copy the state for a save" if saved_mib else ""
    return (
        f"the batches of the ranks on this host ({ranks}, with {num_workers} loader workers each)"
        f" need {needed_bytes / GIB:.2f} GiB of memory ({memory.ring.num_slots} of"
        f" {memory.ring.slot_bytes / MIB:.1f} MiB per rank, {memory.eval_ring.num_slots} of"
        f" {memory.eval_ring.slot_bytes / MIB:.1f} MiB to evaluate, {worker_bytes / MIB:.0f} MiB"
        f" per worker; evaluation starts the same number of workers again{more}{saving}), but only"
        f" {free_bytes / GIB:.2f} GiB are free: lower loader.num_workers or eval.batch_size, or"
        " give the job more memory"
    )


def _data_line(train: AugmentedBatches, evals: Sequence[EvalBatches], index_bytes: int) -> str:
    """Return a log line with the sizes of the training and evaluation data."""
    splits = [each.split for each in evals]
    further = f" ({len(splits)} splits)" if len(splits) > 1 else ""
    return (
        f"data: {train.split.num_samples:,} images in {len(train.split.filenames):,} shards,"
        f" {sum(split.num_samples for split in splits):,} in"
        f" {sum(len(split.filenames) for split in splits):,} to evaluate{further}; index"
        f" {index_bytes / MIB:.1f} MiB, mapped once a host; JPEG decoder: {decoder_name()}"
    )


def _notes(
    loader: LoaderConfig,
    world: World,
    train: AugmentedBatches,
    numbers: dict[str, Any],
    needed_files: int,
) -> Iterator[str]:
    """Yield a note with a remedy for everything that will be slow on the host described by
    `numbers`."""
    ranks = local_world_size()
    workers = ranks * loader.num_workers
    cores = numbers["cores"]
    if numbers["open_files"] < needed_files:
        yield (
            f"the limit of {numbers['open_files']:,} open files is low, so some shards are opened"
            f" again for each image: run `ulimit -n {needed_files}` before the start, or ask the"
            " administrator"
        )

    yield from _cache_notes(train, ranks)
    if workers > cores:
        yield (
            f"{workers} loader workers share {cores} core(s):"
            f" loader.num_workers={max(cores // ranks, 1)} is as fast and needs less memory"
        )

    threads = torch.get_num_threads()
    on_gpu = world.device.type == "cuda"
    leaves_cores_idle = not on_gpu and ranks > 1 and 2 * threads * ranks <= cores
    if leaves_cores_idle:
        yield (
            f"each of {ranks} ranks computes with {threads} thread(s) on {cores} cores, which is"
            f" torchrun's default: run `export OMP_NUM_THREADS={cores // ranks}` to use all cores"
        )

    shm_gib = numbers["free_shm_gib"]
    lacks_shm = on_gpu and ranks > 1 and shm_gib is not None and shm_gib < NCCL_SHM_GIB
    if lacks_shm:
        yield (
            f"/dev/shm has {shm_gib:.2f} GiB free, but NCCL needs {NCCL_SHM_GIB} GiB between the"
            " GPUs of a host: use docker run --shm-size=1g (batches do not need it)"
        )

    if native.UNAVAILABLE_REASON:
        yield (
            f"JPEGs are decoded by simplejpeg, at 0.6 times the speed: {native.UNAVAILABLE_REASON}"
        )


def _worker_bytes(batches: AugmentedBatches | EvalBatches, num_processes: int) -> int:
    """Return the memory of one of `num_processes` loader processes on this host."""
    cached = getattr(getattr(batches.split, "tars", None), "cached", None)
    return WORKER_BYTES + (0 if cached is None else cached.process_bytes(num_processes))


# --- disk -----------------------------------------------------------------------------------------


def check_disk(needs: DiskNeeds, folder: Path, keep_last: int, setting: str = "run.dir") -> Notes:
    """Check the free space on the disk that holds `folder`. Return a log line and the measured
    sizes.

    setting: the setting that names the folder. Files that the run has already saved are subtracted
    from `needs`. Raises ValueError if the remaining files do not fit.
    """
    saved = (path for pattern in SAVED for path in folder.glob(pattern))
    saved_bytes = sum(path.stat().st_size for path in saved if path.is_file())
    # At least one checkpoint is written before any file is removed.
    more_bytes = max(needs.total_bytes - saved_bytes, needs.checkpoint_bytes)
    folders = (folder.absolute(), *folder.absolute().parents)
    free_bytes = shutil.disk_usage(next(each for each in folders if each.is_dir())).free

    parts = needs.in_words(size_text)
    if free_bytes < more_bytes * 1.01 + DISK_MARGIN_BYTES:
        present = f", {size_text(saved_bytes)} of it already saved" if saved_bytes else ""
        raise ValueError(
            f"{setting}={folder}: the run needs {size_text(needs.total_bytes)} ({parts}{present}),"
            f" but the disk has only {size_text(free_bytes)} free: free some space, lower"
            f" checkpoint.keep_last ({keep_last}, plus one while it is written), or choose another"
            f" {setting}"
        )

    numbers = {
        "checkpoint_gib": round(needs.checkpoint_bytes / GIB, 4),
        "needed_disk_gib": round(more_bytes / GIB, 4),
        "free_disk_gib": round(free_bytes / GIB, 2),
    }
    return Notes(
        record=numbers, lines=(f"disk: {parts} at most in {folder}, {size_text(free_bytes)} free",)
    )


# --- the cache of remote shards -------------------------------------------------------------------


def filling_notes(batches: AugmentedBatches, step: int, plan: Plan) -> Iterator[str]:
    """Yield a line if many blocks of the first batches are not in the cache, for example after the
    run resumes on another host.
    """
    if not batches.exact:
        return
    last = min(step + batches.split.read_ahead_batches, plan.total_steps)
    if step >= last:
        return

    own_rows = (batches.first_row, batches.first_row + batches.layout.num_rows)
    samples = [batches.order.rows(later, *own_rows) for later in range(step, last)]
    folder = None
    needed_bytes = missing_bytes = 0
    for split, split_samples in batches.split.divided(np.unique(np.concatenate(samples))):
        if (cached := split.tars.cached) is not None:
            folder = cached.cache.folder
            needed, missing = cached.wanted_bytes(split_samples)
            needed_bytes += needed
            missing_bytes += missing

    if missing_bytes >= MISSING_BYTES:
        yield (
            f"filling the cache: the next {last - step} batches of a rank need"
            f" {needed_bytes / 1e9:.2f} GB of blocks, of which {missing_bytes / 1e9:.2f} GB are"
            f" not in {folder} yet; `python -m vit.data.warm` can download them before a job"
        )


def _cache_notes(train: AugmentedBatches, ranks: int) -> Iterator[str]:
    """Yield a note if the cache is smaller than the blocks that are read at the same time.

    Blocks of remote shards would then be downloaded several times.
    """
    order = train.order
    open_bytes = 0
    cached = None
    for split in train.split.splits:
        if split.tars.cached is not None:
            cached = split.tars.cached
            blocks = order.blocks_at_a_time(
                ranks * train.layout.num_rows, cached.read_ahead_batches
            )
            block_samples = max(order.block_samples, cached.block_samples)
            block_bytes = block_samples * cached.stored_bytes // split.num_samples
            open_bytes += min(blocks * block_bytes, cached.stored_bytes)

    if cached is not None and cached.cache.limit_bytes < open_bytes:
        is_unblocked = order.block_samples == 1
        remedy = "set order.block_samples=64" if is_unblocked else "lower order.num_lanes"
        yield (
            f"{cached.folder}: the cache of {cached.cache.limit_bytes / GIB:.1f} GiB is smaller"
            f" than the {open_bytes / GIB:.1f} GiB that are read at the same time, so up to"
            f" {cached.block_samples} times as much is downloaded: raise loader.cache_gib, or"
            f" {remedy}"
        )
