"""Test that TensorBoard shows each step once, even after a kill, and that each TensorBoard error is
reported in one line."""

from __future__ import annotations

import errno
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import Background, train, write_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit.config.schema import LogConfig
from vit.extras.loggers.tensorboard import TensorboardView
from vit.loggers.lines import read_metrics
from vit.loggers.record import Record
from vit.run_folder.paths import METRICS_FILE

ON = LogConfig(wandb="off", tensorboard=True)


def started(folder: Path, step: int) -> Record:
    record = Record(folder, ON, True, total_steps=10)
    record.write("start", step, restarts=step)
    record.start_loggers([TensorboardView])
    return record


def shown(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    everything = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0})
    everything.Reload()
    return {
        name: [(event.step, event.wall_time, event.value) for event in everything.Scalars(name)]
        for name in everything.Tags()["scalars"]
    }


def recorded(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Map each name in metrics.jsonl to a list of (step, time, value). Values are rounded to
    float32, as in event files."""
    events = defaultdict(list)
    for line in read_metrics(folder / METRICS_FILE):
        for key, value in line.items():
            kinds = ("train", "eval", "fault")
            is_shown = line["kind"] in kinds and key not in ("step", "time")
            if is_shown and isinstance(value, int | float):
                event = (line["step"], line["time"], float(np.float32(value)))
                events[f"{line['kind']}/{key}"].append(event)
            elif line["kind"] == "norms" and isinstance(value, dict):
                for layer, norm in value.items():
                    event = (line["step"], line["time"], float(np.float32(norm)))
                    events[f"norms/{key}/{layer}"].append(event)
    return dict(events)


def test_numbers_and_images_are_shown(tmp_path):
    record = started(tmp_path, 0)
    for step in (1, 2, 3):
        record.write("train", step, loss=0.1 * step, lr=1e-3, mfu=None, data_wait_host="vm")
    record.write("norms", 3, grad_norm={"embed": 0.25, "blocks.0": 0.1})
    record.write("eval", 3, top1=71.5, num_images=23)
    record.write("fault", 3, reason="x", loss=7.0)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    record.log_pictures({"curves": tmp_path / "a.png"})
    record.close()
    assert shown(tmp_path) == recorded(tmp_path)
    of_norms = {"norms/grad_norm/embed", "norms/grad_norm/blocks.0"}
    of_lines = {"train/loss", "train/lr", "eval/top1", "eval/num_images", "fault/loss"}
    assert set(recorded(tmp_path)) == of_lines | of_norms
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    (picture,) = read.Images("report/curves")
    assert (picture.step, picture.height, picture.width) == (3, 5, 7)


def test_a_restart_neither_repeats_nor_loses_a_step_in_tensorboard(tmp_path):
    """The writer of the first attempt is never closed, so lines that its thread has not written yet
    are lost."""
    first = started(tmp_path, 0)
    for step in range(1, 7):
        first.write("train", step, loss=float(step))
    (path,) = (tmp_path / "tensorboard").iterdir()
    [view] = first._loggers
    assert isinstance(view, TensorboardView)
    view._writer.flush()
    looks_on = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0})
    looks_on.Reload()
    assert len(looks_on.Scalars("train/loss")) == 6
    first.lock.release()
    second = started(tmp_path, 4)
    for step in range(5, 8):
        second.write("train", step, loss=10.0 * step)
    second.close()
    assert [event[::2] for event in shown(tmp_path)["train/loss"]] == [
        *((step, float(step)) for step in range(1, 5)),
        *((step, 10.0 * step) for step in range(5, 8)),
    ]
    assert path.read_bytes() == b"", "one file must contain all events"
    looks_on.Reload()
    assert [event.step for event in looks_on.Scalars("train/loss")] == list(range(1, 8))


@pytest.mark.full
def test_shows_each_step_of_a_killed_and_resumed_run_once(shards, tmp_path):
    """The test kills real processes between two checkpoints, and restarts them with the same
    command."""
    config = write_config(tmp_path, shards, steps=12)
    run_dir = tmp_path / "run"
    settings = ("log.tensorboard=true", "checkpoint.every_steps=5")
    killed = Background(config, run_dir, *settings, ranks=0)
    killed.wait_for_checkpoint(5)
    killed.kill_all()
    train(config, run_dir, *settings)
    events = shown(run_dir)
    assert events == recorded(run_dir)
    assert [step for step, _, _ in events["train/loss"]] == list(range(1, 13))
    assert events["eval/top1"]


def test_switched_on_later_it_shows_the_run_from_its_first_step(tmp_path):
    record = Record(tmp_path, LogConfig(wandb="off"), True, total_steps=10)
    record.write("start", 0)
    record.write("train", 1, loss=3.0)
    record.close()
    assert not (tmp_path / "tensorboard").exists()
    started(tmp_path, 1).close()
    assert [event[::2] for event in shown(tmp_path)["train/loss"]] == [(1, 3.0)]


def test_reports_a_missing_tensorboard_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # simulate a missing package
    record = started(tmp_path, 0)
    record.write("train", 1, loss=1.0)
    record.close()
    assert capsys.readouterr().err == (
        "tensorboard: not installed: metrics.jsonl only (pip install tensorboard, or"
        " log.tensorboard=false to silence this)\n"
    )
    assert not (tmp_path / "tensorboard").exists()


def test_never_keeps_more_than_two_files(tmp_path):
    for step in range(4):
        started(tmp_path, step).close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_reports_a_missing_picture_in_one_line(tmp_path, capsys):
    record = started(tmp_path, 0)
    record.log_pictures({"curves": tmp_path / "gone.png"})
    record.write("train", 1, loss=1.0)
    record.close()
    assert "tensorboard: cannot show report/curves (" in capsys.readouterr().err
    assert [event[::2] for event in shown(tmp_path)["train/loss"]] == [(1, 1.0)]


@pytest.mark.parametrize("moment", ["at the start", "in the middle"])
def test_an_error_ends_only_tensorboard(moment, tmp_path, capsys):
    if moment == "at the start":
        (tmp_path / "tensorboard").write_text("in the way")
    record = started(tmp_path, 0)
    if moment == "in the middle":  # simulate the error that a full disk causes in the writer thread
        [view] = record._loggers
        assert isinstance(view, TensorboardView)
        worker = view._writer.file_writer.event_writer._async_writer._worker
        worker.exception = OSError(errno.ENOSPC, "No space left on device")
    record.write("train", 1, loss=1.0)
    record.write("train", 2, loss=1.0)
    record.close()
    assert capsys.readouterr().err.count("tensorboard: stopped (") == 1
    assert len(read_metrics(tmp_path / METRICS_FILE)) == 3
