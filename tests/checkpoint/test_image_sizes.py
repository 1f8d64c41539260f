"""Test runs that change the image size during training.

Runs that change the image size must resume exactly, and must train identically on any number of
ranks. The metrics and curves must show the image size.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from processes import TINY, Background, final_state, metrics, run_here, train, write_config

STAGES = "schedule.image_sizes=[{until_epoch: 1, image_size: 24}, {until_epoch: 2, image_size: 8}]"
SIZES = [24] * 5 + [8] * 5 + [16] * 2
"""The expected image size at each of the 12 training steps."""
PLAIN = ("model.drop_path_rate=null", "model.proj_drop_rate=null")
"""Settings that disable dropout and drop path, whose random numbers depend on the number of
ranks."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> tuple[Path, Path]:
    """Return a config and the folder of an uninterrupted run that has kept all its checkpoints."""
    folder = tmp_path_factory.mktemp("sizes")
    config = write_config(folder, shards)
    train_here(config, folder / "run")
    return config, folder / "run"


def train_here(config: Path, run_dir: Path, *overrides: str) -> None:
    arguments = ["--config", config, f"run.dir={run_dir}", *TINY, STAGES]
    arguments += ["checkpoint.every_steps=1", "checkpoint.keep_last=99", *overrides]
    run_here("launch/train.py", *arguments)


def begin_again(run_dir: Path, copy: Path, step: int) -> None:
    """Copy the run, but omit all checkpoints after `step`."""
    shutil.copytree(run_dir, copy)
    for folder in (copy / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)


def names_that_differ(run_dir: Path, other: Path) -> list[str]:
    state = final_state(run_dir, 12)
    expected = final_state(other, 12)
    assert state.keys() == expected.keys()
    return [name for name in state if state[name] != expected[name]]


@pytest.mark.parametrize(
    ("step", "workers"),
    [
        pytest.param(5, 2, id="between two stages"),
        pytest.param(7, 0, id="in the second stage"),
        pytest.param(3, 1, id="in the first stage", marks=pytest.mark.full),
        pytest.param(10, 0, id="before the last stage", marks=pytest.mark.full),
    ],
)
def test_resuming_from_any_step_gives_the_weights_of_the_uninterrupted_run(
    step, workers, whole, tmp_path
):
    config, run_dir = whole
    begin_again(run_dir, tmp_path / "run", step)
    train_here(config, tmp_path / "run", f"loader.num_workers={workers}")
    assert metrics(tmp_path / "run", "start")[-1]["step"] == step
    assert not names_that_differ(tmp_path / "run", run_dir)


def test_metrics_have_the_size_of_each_step_and_a_line_for_each_change(whole, tmp_path):
    read_history = pytest.importorskip("vit.extras.report.history").read_history
    config, run_dir = whole
    assert [line["image_size"] for line in metrics(run_dir, "train")] == SIZES
    history = read_history(run_dir / "metrics.jsonl")
    assert history.image_sizes() == [(0, "24"), (5, "8"), (10, "16")]
    train_here(config, tmp_path / "run", "log.every_steps=4", "log.report=true")
    lines = metrics(tmp_path / "run", "train")
    assert [(line["step"], line["image_size"]) for line in lines] == [
        *((4, 24), (5, 24), (8, 8), (10, 8), (12, 16))
    ]
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "24x24 until epoch 1, 8x8 until epoch 2, then 16x16 pixels in training" in page


def test_a_run_of_one_size_does_not_mention_sizes(config, tmp_path):
    train(config, tmp_path / "run", "train.steps=2")
    assert all("image_size" not in line for line in metrics(tmp_path / "run", "train"))


@pytest.mark.slow
def test_all_ranks_change_the_size_at_the_same_step(whole, tmp_path):
    """If ranks changed the image size at different steps, the mean loss would differ from the loss
    on one rank."""
    config, _ = whole
    train_here(config, tmp_path / "one", *PLAIN)
    train(config, tmp_path / "two", STAGES, *PLAIN, ranks=2)
    one, two = (
        torch.tensor([[line["loss"], line["grad_norm"]] for line in metrics(folder, "train")])
        for folder in (tmp_path / "one", tmp_path / "two")
    )
    assert len(one) == len(SIZES)
    # After twelve updates, the weights differ only because gradients were summed in a different
    # order.
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("step", [4, 6, 11])
def test_killed_ranks_resume_bit_for_bit_even_in_a_later_stage(ranks, step, whole, tmp_path):
    """The second attempt starts at a later image size than the first one. With three or more ranks,
    the order of summation depends on the gradient buckets that DDP rebuilds in each attempt."""
    config, _ = whole
    train(config, tmp_path / "whole", STAGES, ranks=ranks)
    background = Background(config, tmp_path / "run", STAGES, ranks=ranks)
    background.wait_for_step(step)
    background.kill_all()
    train(config, tmp_path / "run", STAGES, ranks=ranks)
    assert not names_that_differ(tmp_path / "run", tmp_path / "whole")


@pytest.mark.full
def test_resumes_with_the_same_batches_on_another_number_of_ranks(whole, tmp_path):
    read_history = pytest.importorskip("vit.extras.report.history").read_history
    config, _ = whole
    settings = (STAGES, *PLAIN, "checkpoint.every_steps=1", "checkpoint.keep_last=99")
    train(config, tmp_path / "whole", *settings, ranks=2)
    begin_again(tmp_path / "whole", tmp_path / "run", 5)
    train(config, tmp_path / "run", *settings, ranks=3)
    whole_losses, losses = (
        torch.tensor([line["loss"] for line in read_history(path).of_kind("train")])
        for path in (tmp_path / name / "metrics.jsonl" for name in ("whole", "run"))
    )
    torch.testing.assert_close(losses, whole_losses, rtol=1e-4, atol=1e-5)


def test_a_run_cannot_resume_with_different_sizes(whole, tmp_path):
    config, run_dir = whole
    shutil.copytree(run_dir, tmp_path / "run")
    other = STAGES.replace("image_size: 8", "image_size: 32")
    with pytest.raises(ValueError, match=r"--allow-change schedule\.image_sizes"):
        train_here(config, tmp_path / "run", other)
