"""Check which step a run would resume from, and test saving a checkpoint."""

import time
from dataclasses import asdict
from pathlib import Path

import torch

from vit.checkpoint import checkpoint as checkpoints
from vit.checkpoint.resume import check_belongs
from vit.checkpoint.snapshot import Snapshot
from vit.checkpoint.state import RunState
from vit.config import io as config_io
from vit.config.schema import CheckpointConfig
from vit.extras.planner.check.findings import Verdict
from vit.extras.planner.check.storage import passing_folder
from vit.extras.planner.check.trial import Trial
from vit.layers.parts import grid_size
from vit.run_folder.reading import newest_info
from vit.start.preflight import check_disk
from vit.system.meter import rate_text, size_text
from vit.system.urls import is_url


def look_at_checkpoint(trial: Trial) -> list[tuple[str, str]]:
    """Return the step from which the run would resume, and the disk space, each with a verdict.

    Only rank 0 calls this. Raises ValueError if the run cannot be resumed. A damaged checkpoint is
    left unchanged.
    """
    is_away = is_url(trial.config.run.dir)
    # For a run at a URL, only the metadata of each checkpoint is read.
    source = newest_info(str(trial.config.run.dir)) if is_away else trial.run_dir
    newest = checkpoints.newest_checkpoint(source, verify=False)
    if newest is None:
        lines = ["a new run"]
    else:
        folder, info = newest
        check_belongs(folder, info, config_io.to_dict(trial.config), trial.facts, trial.allowed)
        if not is_away:
            checkpoints.read_info(folder, verify=True)
        state = "at its URL, not fetched" if is_away else "whose files are complete"
        lines = [f"resumes at step {checkpoints.state_of(info).step:,} from {folder.name}, {state}"]

    if newest is None or newest.info["step"] < trial.data.plan.total_steps:
        lines += check_disk(trial.disk, trial.run_dir, trial.config.checkpoint.keep_last).lines
    return [(Verdict.OK, line) for line in lines]


def try_checkpoint(trial: Trial) -> list[tuple[str, str]] | None:
    """Write a test checkpoint, verify it, load it on all ranks, and remove it.

    Returns a verdict with its text on rank 0, and None on all other ranks.
    """
    world = trial.world
    tensors = checkpoints.named_tensors(trial.step)
    if not world.is_main:
        with world.fail_together():
            pass  # rank 0 may fail to write the checkpoint
        # Only rank 0 reads the file.
        checkpoints.load_checkpoint(trial.run_dir, trial.step)
        return None

    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with passing_folder(trial.run_dir) as place:
        with world.fail_together():
            began_s = time.perf_counter()
            checkpoints.check_room(place, 0, num_bytes)
            folder = _write(trial, place, tensors)
            write_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            checkpoints.read_info(folder, verify=True)
        checkpoints.load_checkpoint(folder, trial.step)
        read_s = time.perf_counter() - began_s

    text = (
        f"{size_text(num_bytes)} written in {write_s:.3g} s"
        f" ({rate_text(num_bytes / write_s)}), read back in {read_s:.3g} s"
        f" ({rate_text(num_bytes / read_s)}), loaded on all ranks, removed"
    )
    return [(Verdict.OK, text)]


def _write(trial: Trial, place: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint of `tensors` to the folder `place` as in training, and return its path."""
    snapshot = Snapshot(tensors, trial.world.device)
    try:
        snapshot.prepare()
        snapshot.take(tensors)
        snapshot.wait()
        state = RunState(facts={**trial.facts, "grid_size": grid_size(trial.step.model)})
        folder, _ = checkpoints.write_checkpoint(
            place,
            snapshot.tensors,
            asdict(state),
            config_io.to_dict(trial.config),
            trial.world.size,
            CheckpointConfig(),
        )
    finally:
        snapshot.close()
    return folder
