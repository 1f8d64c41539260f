"""The training command's small promises; what it says to mistakes is in tests/test_errors.py."""

from __future__ import annotations

import subprocess

import pytest
from processes import REPOSITORY, TINY, command, environment, run, train, write_config
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


@pytest.mark.slow
def test_two_ranks_tell_it_once(config, tmp_path):
    for override, expected in (
        ("optim.lrr=1", "unknown key"),
        ("data.root=nowhere", "no such directory"),
        ("model.name=vit_x", "unknown model"),
    ):
        done = run("launch/train.py", "--config", config, f"run.dir={tmp_path / 'refused'}", *TINY, override, ranks=2)
        assert done.returncode != 0
        ours, report = done.stderr.split(" failed (exitcode: 2)")
        assert ours.count(expected) == 1
        assert report.count("exitcode") == report.count(expected) == 1
        last = report.splitlines()[-2:]
        assert (expected in last[0], set(last[1])) == (True, {"="}), "ours is the last of its words"
        assert not (tmp_path / "refused").exists(), "a refused run left something behind"


def test_without_any_run_evaluation_says_what_it_needs(tmp_path):
    done = run("launch/eval.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no --checkpoint given and no run with weights under runs/")


def test_a_new_head_starts_from_weights_for_other_classes(config, tmp_path):
    train(config, tmp_path / "base", "train.steps=3")
    train(
        config, tmp_path / "tuned", "train.steps=3", f"init.checkpoint={tmp_path / 'base'}", "model.num_classes=7", "init.reset_head=true"
    )


def test_print_config_shows_origins_and_derived_numbers_and_trains_nothing(tmp_path, shards):
    config = write_config(tmp_path, shards)
    done = run("launch/train.py", "--config", config, "--print-config", "optim.lr=2e-3", *TINY)
    assert done.returncode == 0, done.stderr
    lines = {line.split(":")[0].strip("# "): line for line in done.stdout.splitlines()}
    assert lines["lr"].endswith("# command line (optim.lr=2e-3)")
    assert lines["global_batch_size"].endswith(f"# {config}:3")
    assert lines["momentum" if "momentum" in lines else "weight_decay"].endswith("# default")
    for key, value in (
        ("total_steps", "12"),
        ("warmup_steps", "3"),
        ("micro_batch_size", "12"),
        ("accumulation_steps", "1"),
        ("steps_per_epoch", "5"),
    ):
        assert any(line == f"#   {key}: {value}" for line in done.stdout.splitlines()), key
    without = run("launch/train.py", "--config", config, "--print-config", "data.root=nowhere", *TINY)
    assert without.returncode == 0
    assert "#   steps: not known without the data (nowhere: no such directory" in without.stdout
    assert not (tmp_path / "runs").exists()


def test_torchrun_is_told_what_ends_a_command_before_it_can_start(tmp_path):
    """In the form in which torchrun reads it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.4.1+cpu"\n')
    words = tmp_path / "error.json"
    env = {**environment(), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = subprocess.run(
        command("launch/train.py", ranks=0),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**env, "RANK": "0", "TORCHELASTIC_ERROR_FILE": str(words)},
    )
    assert done.returncode == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(words))
    assert failure.message["extraInfo"]["py_callstack"] == done.stderr.strip()
    assert done.stderr.startswith("error: torch 2.11 or newer is needed")
    assert failure.timestamp > 0
