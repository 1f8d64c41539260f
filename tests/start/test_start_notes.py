"""Test the notes about runs that are too short to learn, classes without images, and a learning
rate that jumps."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from processes import TINY, run_here


def notes_of(capfd, *arguments):
    run_here("launch/train.py", *arguments)
    return [line for line in capfd.readouterr().err.splitlines() if "note: " in line]


@pytest.mark.slow
def test_a_head_with_more_classes_than_the_data_gets_a_note(config, tmp_path, capfd):
    settings = [*TINY, "train.steps=1", f"run.dir={tmp_path / 'run'}", "model.num_classes=1000"]
    (note,) = [n for n in notes_of(capfd, "--config", config, *settings) if "have no image" in n]
    assert "note: 997 of the 1,000 classes of model.num_classes have no image" in note


@pytest.mark.slow
def test_few_updates_from_random_weights_get_a_note_and_a_trial_does_not(config, tmp_path, capfd):
    short = [*TINY, f"run.dir={tmp_path / 'run'}", "train.epochs=1"]
    short = [each for each in short if not each.startswith("train.steps")]
    notes = notes_of(capfd, "--config", config, *short)
    (note,) = [n for n in notes if "updates of random weights" in n]
    assert re.search(r"train\.epochs=1 is only \d+ updates .* fewer than 100 rarely learn", note)
    trial = [*TINY, f"run.dir={tmp_path / 'trial'}", "train.steps=2"]
    assert not [
        n for n in notes_of(capfd, "--config", config, *trial) if "updates of random weights" in n
    ]


@pytest.mark.slow
def test_a_model_that_is_no_better_than_the_largest_class_gets_a_note(config, tmp_path, capfd):
    """With a negligible learning rate, the head remains almost zero and predicts one class for all
    images."""
    settings = [*TINY, f"run.dir={tmp_path / 'run'}", "train.steps=2", "eval.every_steps=2"]
    settings += ["optim.lr=1e-12", "ema.decay=null"]
    (note,) = [n for n in notes_of(capfd, "--config", config, *settings) if "top-1 is not" in n]
    accuracy, share = re.findall(r"([\d.]+) %", note)
    assert float(accuracy) <= float(share)
    assert "of always answering the largest class" in note


@pytest.mark.slow
def test_trained_weights_that_answer_one_class_get_a_note_about_the_rate(config, tmp_path, capfd):
    """The report of lucidrains/vit-pytorch#34: Adam at 1e-2 destroys pretrained weights, and more
    training or other weights would not help."""
    base = [*TINY, f"run.dir={tmp_path / 'base'}", "train.steps=2", "ema.decay=null"]
    notes_of(capfd, "--config", config, *base, "optim.lr=1e-12")
    tuned = [*TINY, f"run.dir={tmp_path / 'tuned'}", "train.steps=2", "eval.every_steps=2"]
    tuned += [f"init.checkpoint={tmp_path / 'base'}", "optim.lr=1e-12", "ema.decay=null"]
    (note,) = [n for n in notes_of(capfd, "--config", config, *tuned) if "top-1 is not" in n]
    assert "smaller learning rate (optim.lr)" in note
    assert "init.checkpoint" not in note


@pytest.mark.slow
@pytest.mark.parametrize(("image_size", "is_noted"), [(24, True), (32, False)])
def test_few_patches_get_a_note(config, tmp_path, capfd, image_size, is_noted):
    settings = [*TINY, f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    notes = notes_of(capfd, "--config", config, *settings, f"model.image_size={image_size}")
    assert any("only 3 x 3 patches" in n for n in notes) == is_noted


@pytest.mark.slow
def test_a_longer_schedule_gets_a_note_with_both_rates(config, tmp_path, capfd):
    run = [*TINY, f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=2"]
    run.append("schedule.warmup_steps=0")
    notes_of(capfd, "--config", config, *run, "train.steps=4")
    longer = [*run, "train.steps=8", "--allow-change", "train.steps"]
    notes = notes_of(capfd, "--config", config, *longer)
    (note,) = [n for n in notes if "learning rate" in n]
    old, new = re.search(r"goes from (\S+) to (\S+) at step 4, because", note).groups()
    assert float(new) > float(old)


@pytest.mark.slow
def test_an_unchanged_schedule_gets_no_note(config, tmp_path, capfd):
    run = [*TINY, f"run.dir={tmp_path / 'run'}", "train.steps=4", "checkpoint.every_steps=2"]
    notes_of(capfd, "--config", config, *run)
    again = [*run, "eval.every_steps=4"]
    assert not [n for n in notes_of(capfd, "--config", config, *again) if "learning rate" in n]


@pytest.mark.slow
def test_a_mac_says_that_its_gpu_is_not_used(config, tmp_path, capfd, monkeypatch):
    # Only the tested module sees a GPU, because torch itself would try to use it.
    mps = SimpleNamespace(is_available=lambda: True)
    torch = SimpleNamespace(backends=SimpleNamespace(mps=mps))
    monkeypatch.setattr("vit.start.start_lines.torch", torch)
    settings = [*TINY, "train.steps=1", f"run.dir={tmp_path / 'run'}"]
    notes = notes_of(capfd, "--config", config, *settings)
    assert [note for note in notes if "this Mac's GPU is not used" in note]
