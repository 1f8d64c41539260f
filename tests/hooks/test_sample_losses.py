"""Test that the files with per-image losses contain every image of every retained epoch exactly
once, even after kills and resumes.

tests/extras/report/test_replay.py checks that these values equal the losses computed in the
training step. tests/test_train.py checks that a killed run and an uninterrupted run write identical
files.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from processes import TINY, run_here, write_config

from vit.checkpoint.checkpoint import complete_checkpoints
from vit.distributed.process_group import World
from vit.hooks.sample_losses import SampleLosses, epoch_files, read_epoch
from vit.training.plan import Plan

ALONE = World(0, 1, torch.device("cpu"))
PLAN = Plan(1, 4, 4, 1, 3, 0, 12, 8, 0, 8, 1)
"""A plan with three steps per epoch, four images per step, and eight steps in total."""


def values(step: int) -> np.ndarray:
    """Return a (2, 4) float32 array whose values encode the step. One value is NaN, and another
    exceeds the range of float16."""
    losses = step + np.arange(8, dtype=np.float32).reshape(2, 4) / 16
    losses[0, 3] = np.nan
    losses[1, 0] = 1e9
    return losses


def written(folder, steps, every_epochs=1):
    """Write the files of a process that trains for the given steps and saves after every second
    step. Return the files' content for each epoch."""
    samples = SampleLosses(folder, ALONE, PLAN, every_epochs)
    for step in steps:
        samples.add(step, *values(step))
        if step % 2:
            samples.write(samples.collect())
    samples.write(samples.collect())
    return {epoch: read_epoch(path, 3, 4) for epoch, path in epoch_files(folder).items()}


def expected(steps) -> dict[int, np.ndarray]:
    losses = {step // 3 + 1: np.full((3, 2, 4), np.nan, np.float16) for step in steps}
    for step in steps:
        with np.errstate(over="ignore"):
            losses[step // 3 + 1][step % 3] = values(step).astype(np.float16)
    return losses


def assert_equal(losses, planned):
    assert losses.keys() == planned.keys()
    for epoch, rows in planned.items():
        np.testing.assert_array_equal(losses[epoch], rows)


def test_each_epoch_has_a_file_with_nan_for_untrained_rows(tmp_path):
    assert_equal(written(tmp_path, range(8)), expected(range(8)))


def test_a_second_process_continues_from_the_checkpoint(tmp_path):
    written(tmp_path, range(5))
    assert_equal(written(tmp_path, range(4, 8)), expected(range(8)))


def test_keeps_only_every_nth_epoch_if_configured(tmp_path):
    assert_equal(written(tmp_path, range(8), every_epochs=2), expected(range(3, 6)))


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY"])
def test_restarts_a_truncated_file_which_readers_reject(damage, tmp_path):
    written(tmp_path, range(3))
    path = epoch_files(tmp_path)[1]
    path.write_bytes(damage or path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"the file is damaged, or was written with different settings"
    ):
        read_epoch(path, 3, 4)
    assert_equal(written(tmp_path, [2]), expected([2]))


def test_a_failed_write_ends_the_run_before_the_checkpoint(tmp_path, shards):
    run_dir = tmp_path / "run"
    arguments = ["--config", write_config(tmp_path, shards), f"run.dir={run_dir}", *TINY]
    run_here("launch/train.py", *arguments, "log.sample_losses=0", "train.steps=3")
    assert not epoch_files(run_dir)
    (run_dir / "samples").write_text("in the way")
    with pytest.raises(ValueError, match=r"samples: cannot be written \(File exists\); a previous"):
        run_here("launch/train.py", *arguments, "--allow-change", "train.steps")
    assert [path.name for path in complete_checkpoints(run_dir)] == ["step_00000003"]
