"""Test the JSON state in checkpoints, the choice of the best evaluation, and reading checkpoints
while another one is being saved."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import asdict

import pytest
import torch

from vit.checkpoint.checkpoint import checkpoint_folder, newest_checkpoint, write_checkpoint
from vit.checkpoint.seal import CheckpointError
from vit.checkpoint.state import RunState
from vit.config.schema import CheckpointConfig
from vit.run_folder.paths import complete_checkpoints
from vit.weights.files import read_weights


@pytest.mark.parametrize(
    ("before", "evaluation", "expected"),
    [
        (-1.0, [(0.0, 2.3)], True),
        (90.0, [(95.0, 1.35)], True),
        (100.0, [(100.0, 1.0)], False),
        (100.0, [(100.0, 0.43)], True),
        (100.0, [(100.0, 1.2)], False),
        (100.0, [(99.0, 0.1), (100.0, 0.5)], True),
        (100.0, [(100.0, math.nan)], False),
    ],
)
def test_the_smaller_loss_wins_at_equal_accuracy(before, evaluation, expected):
    state = RunState(best_top1=before, best_loss=1.0)
    assert state.take_best("val", *evaluation) == expected


def test_compares_with_the_best_evaluation_of_an_older_checkpoint():
    """Older checkpoints do not contain a loss, so a new evaluation with the same accuracy replaces
    their best evaluation."""
    older = {
        key: value for key, value in asdict(RunState(best_top1=100.0)).items() if key != "best_loss"
    }
    state = RunState(**older)
    assert not state.take_best("val", (99.0, 0.1))
    assert state.take_best("val", (100.0, 2.0))
    assert (state.best_top1, state.best_loss) == (100.0, 2.0)


def test_a_loss_that_is_not_a_number_can_be_stored():
    state = RunState()
    assert state.take_best("val", (10.0, math.nan))
    assert (state.best_top1, state.best_loss) == (10.0, None)


def test_an_incomplete_checkpoint_is_ignored_and_does_not_count_as_kept(tmp_path):
    """In a mounted bucket, a folder is renamed by copying its files one by one, so a killed run can
    leave an incomplete checkpoint behind."""

    def save(step: int) -> None:
        state = {"step": step, "facts": {}}
        write_checkpoint(
            tmp_path,
            {"model.step": torch.tensor(step)},
            state,
            {},
            1,
            CheckpointConfig(keep_last=2),
        )

    save(1)
    half = checkpoint_folder(tmp_path, 3)
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    folder, _ = newest_checkpoint(tmp_path, verify=True)
    assert folder == checkpoint_folder(tmp_path, 1)
    assert half.exists(), "an incomplete checkpoint must stay in its folder"
    save(2)
    assert newest_checkpoint(tmp_path)[0] == checkpoint_folder(tmp_path, 2)
    assert checkpoint_folder(tmp_path, 1).exists()


def test_a_link_to_nowhere_is_not_taken_for_a_run_without_checkpoints(tmp_path):
    """The link may lead to a disk that is not mounted. The run must not start over."""
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").symlink_to("/nowhere/checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints: a file is missing or damaged"):
        newest_checkpoint(tmp_path)


def test_reads_the_newest_checkpoint_while_the_run_removes_older_ones(tmp_path):
    facts = {"num_classes": 2, "grid_size": None, "class_names": []}

    def save(step: int) -> None:
        tensors = {"model.step": torch.tensor(step)}
        write_checkpoint(
            tmp_path, tensors, {"step": step, "facts": facts}, {}, 1, CheckpointConfig(keep_last=1)
        )

    save(1)
    child = os.fork()
    if not child:
        for step in range(2, 10**6):
            save(step)
    try:
        steps = []
        while len(set(steps)) < 60:
            loaded = read_weights(tmp_path)
            assert loaded.weights["step"] == loaded.step
            steps += [loaded.step, newest_checkpoint(tmp_path)[1]["step"]]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert steps == sorted(steps)


def test_one_checkpoint_in_every_so_many_is_kept(tmp_path):
    """With a checkpoint every 10 steps and `keep_every=3`, the checkpoints at steps 30, 60 and so
    on are kept in addition to the newest. The checkpoint saved when the run stopped at step
    47 is kept only while it is among the newest."""
    kept = CheckpointConfig(every_steps=10, keep_last=2, keep_every=3)
    for step in (10, 20, 30, 40, 47, 50, 60, 70, 80):
        write_checkpoint(tmp_path, {"model.a": torch.ones(1)}, {"step": step}, {}, 1, kept)
        if step == 60:
            names = [path.name for path in complete_checkpoints(tmp_path)]
            assert names == ["step_00000060", "step_00000050", "step_00000030"]
    names = [path.name for path in complete_checkpoints(tmp_path)]
    assert names == [f"step_{step:08d}" for step in (80, 70, 60, 30)]
