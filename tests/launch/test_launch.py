"""Test details of the training command. The error messages of this command are tested in
tests/project/errors."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
import torch
from processes import REPOSITORY, TINY, command, environment, metrics, run, run_here, write_config
from servers import WebServer
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from vit.config import reference
from vit.config.io import load_config, to_dict
from vit.loggers.record import Record
from vit.model import create_model
from vit.start.print_config import training_bytes
from vit.training.plan import make_plan


@pytest.mark.slow
def test_two_ranks_report_a_mistake_once(config, tmp_path):
    for override, expected in (
        ("optim.lrr=1", "unknown key"),
        ("data.root=nowhere", "no such directory"),
        ("model.name=vit_x", "unknown model"),
    ):
        done = run(
            "launch/train.py",
            "--config",
            config,
            f"run.dir={tmp_path / 'refused'}",
            *TINY,
            override,
            ranks=2,
        )
        assert done.returncode != 0
        ours, report = done.stderr.split(" failed (exitcode: 2)")
        assert ours.count(expected) == 1
        assert report.count("exitcode") == report.count(expected) == 1
        last = report.splitlines()[-2:]
        assert (expected in last[0], set(last[1])) == (True, {"="}), (
            "our message must be the last line of the report"
        )
        assert not (tmp_path / "refused").exists(), "a rejected run left files"


def test_evaluation_without_a_run_names_the_missing_argument(tmp_path):
    done = run("launch/eval.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no --checkpoint was given, and runs/ contains none")


def test_a_new_head_starts_from_weights_for_other_classes(config, tmp_path):
    for run_dir, settings in (
        ("base", []),
        (
            "tuned",
            [f"init.checkpoint={tmp_path / 'base'}", "model.num_classes=7", "init.reset_head=true"],
        ),
    ):
        run_here(
            "launch/train.py",
            "--config",
            config,
            *TINY,
            "train.steps=1",
            f"run.dir={tmp_path / run_dir}",
            *settings,
        )


def test_print_config_shows_origins_and_derived_numbers_and_trains_nothing(
    tmp_path, shards, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, shards)
    capsys.readouterr()
    run_here("launch/train.py", "--config", config, "--print-config", "optim.lr=2e-3", *TINY)
    shown = capsys.readouterr().out.splitlines()
    lines = {line.split(":")[0].strip("# "): line for line in shown}
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
        assert f"#   {key}: {value}" in shown
    assert not (tmp_path / "runs").exists()


def test_verbose_print_config_explains_each_setting_and_stays_a_config(tmp_path, shards, capsys):
    config = write_config(tmp_path, shards)
    capsys.readouterr()
    run_here("launch/train.py", "--config", config, "--print-config", "--verbose", *TINY)
    printed = capsys.readouterr().out
    comments = " ".join(re.findall(r"^  # (.*)$", printed, re.MULTILINE))
    for section, values in to_dict(load_config(config, TINY)).items():
        for name in values:
            assert reference.settings()[f"{section}.{name}"].sentence in comments
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_config(tmp_path / "printed.yaml") == load_config(config, TINY)
    with pytest.raises(ValueError, match="--verbose: use it together with --print-config"):
        run_here("launch/train.py", "--config", config, "-v", *TINY)


def test_print_config_without_data_assumes_and_reports_imagenets_size(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.chdir(REPOSITORY)
    run_here(
        "launch/train.py", "--config", "configs/vit_b16.yaml", "--print-config", "data.root=nowhere"
    )
    shown = dict(
        line.removeprefix("#   ").split(": ", 1)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("#   ")
    )
    assert shown["training_images"].startswith(
        "1,281,167 (assumed, as in ImageNet-1k, because the data cannot be opened; all steps are"
        " assumed too: nowhere: no"
    )
    assert shown["total_steps"] == str(300 * (1_281_167 // 4096))
    assert shown["classes"] == "1000 (assumed)"
    assert (
        shown["gflop_per_image"]
        == "35.13 forward, a multiply-add counts as 2 (papers count 1: 17.56)"
    )
    assert shown["checkpoint_mb"].startswith("1,385.1 (weights, optimizer, EMA)")
    assert shown["parameters_gib"].startswith("1.61 on each rank")
    settings = ["data.root=nowhere", "eval.reference=null"]
    run_here("launch/train.py", "--config", "configs/demo.yaml", "--print-config", *settings)
    assert "(weights, optimizer), 2 are kept" in capsys.readouterr().out, (
        "the demo must have no averaged weights"
    )


def test_print_config_does_not_wait_for_a_server_that_is_away(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with WebServer({}) as web:
        web.away_until_s = time.monotonic() + 3600
        run_here(
            "launch/train.py",
            "--config",
            "configs/demo.yaml",
            "--print-config",
            f"data.root={web.url}/set",
            "eval.reference=null",
        )
        assert len(web.requests) == 1
    assert (
        f"all steps are assumed too: {web.url}/set/_info.json: the server answers 503"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "overrides", [["ema.decay=null"], ["ema.decay=0.9"], ["optim={name: sgd}"]]
)
def test_the_size_of_a_checkpoint_is_that_of_the_file(overrides, tmp_path, shards):
    """The expected size excludes the header of the safetensors file."""
    config = write_config(tmp_path, shards, steps=2)
    settings = [
        *TINY,
        "optim.name=sgd" if "sgd" in overrides[0] else overrides[0],
        f"run.dir={tmp_path / 'run'}",
    ]
    run_here("launch/train.py", "--config", config, *settings)
    written = (
        tmp_path / "run" / "checkpoints" / "step_00000002" / "state.safetensors"
    ).read_bytes()
    loaded = load_config(config, settings)
    with torch.device("meta"):
        model = create_model(loaded.model, num_classes=3)
    assert training_bytes(model, loaded.optim, loaded.ema.decay is not None)[0] == len(
        written
    ) - 8 - int.from_bytes(written[:8], "little")


def test_a_short_run_shows_what_it_did_and_that_it_was_not_evaluated(tmp_path, shards, capfd):
    config = write_config(tmp_path, shards, steps=28)
    settings = [setting for setting in TINY if "log.every" not in setting]
    run_here(
        "launch/train.py",
        "--config",
        config,
        *settings,
        f"run.dir={tmp_path / 'run'}",
        "eval.every_steps=29",
    )
    assert [line["step"] for line in metrics(tmp_path / "run", "train")] == list(range(1, 29))
    assert not metrics(tmp_path / "run", "eval")
    messages = capfd.readouterr().err
    assert (
        "not evaluated: the run has only 28 steps, but evaluates every 29 steps"
        f" (eval.every_steps, eval.every_epochs): run python launch/eval.py"
        f" {tmp_path / 'run'} to evaluate its weights\n" in messages
    )


@pytest.mark.parametrize(
    ("steps", "every"), [(1, 1), (19, 1), (40, 2), (999, 49), (1000, 50), (300_000, 50)]
)
def test_a_run_has_twenty_lines_or_one_each_fifty_steps(steps, every, tmp_path):
    config = load_config(write_config(tmp_path, tmp_path, steps=steps))
    assert make_plan(config, 60, 1)[0].log_every_steps == every
    config = load_config(write_config(tmp_path, tmp_path, steps=steps), ["log.every_steps=7"])
    assert make_plan(config, 60, 1)[0].log_every_steps == 7, "the configured interval must be used"


def test_a_finished_run_started_again_opens_no_wandb_run(tmp_path, shards, monkeypatch):
    opened = []
    monkeypatch.setattr(Record, "start_loggers", lambda record, _: opened.append(record))
    config = write_config(tmp_path, shards, steps=2)
    for _ in range(2):
        run_here("launch/train.py", "--config", config, *TINY, f"run.dir={tmp_path / 'run'}")
    assert len(metrics(tmp_path / "run", "start")) == 2
    assert len(opened) == 1


def test_torchrun_gets_the_error_of_a_command_that_cannot_start(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.4.1+cpu"\n')
    error_file = tmp_path / "error.json"
    env = {**environment(), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = subprocess.run(
        command("launch/train.py", ranks=0),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**env, "RANK": "0", "TORCHELASTIC_ERROR_FILE": str(error_file)},
    )
    assert done.returncode == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(error_file))
    assert failure.message["extraInfo"]["py_callstack"] == done.stderr.strip()
    assert done.stderr.startswith("error: torch 2.11 or newer is needed")
    assert failure.timestamp > 0
