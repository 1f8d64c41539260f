"""What people see when something is wrong: one readable message, status 2, nothing half-written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from processes import TINY, run, train, write_config


def refused(config: Path, tmp_path: Path, *overrides: str, ranks: int = 0) -> str:
    """The message of a training that must be refused before it writes anything."""
    done = run("launch/train.py", "--config", config, f"run.dir={tmp_path / 'refused'}", *TINY, *overrides, ranks=ranks)
    assert done.returncode != 0
    assert not (tmp_path / "refused").exists(), "a refused run left something behind"
    if not ranks:
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_a_misspelt_key_a_wrong_type_and_a_duplicate_key(config, tmp_path):
    text = config.read_text()
    for addition, expected in (
        ("optim: {weight_dekay: 0.1}\n", "unknown key 'optim.weight_dekay'; did you mean optim.weight_decay?"),
        ("optim: {lr: fast}\n", 'optim.lr is "fast", expected number'),
        ("loss: {label_smoothing: 0.2}\n", "loss is given twice (first in line 5): keep one"),
    ):
        config.write_text(text + addition)
        message = refused(config, tmp_path)
        assert message.startswith(f"error: {config}:{len(text.splitlines()) + 1}: ")
        assert expected in message


def test_a_missing_data_folder(config, tmp_path):
    assert "nowhere: no such directory; expected a folder of shards" in refused(config, tmp_path, "data.root=nowhere")


def test_a_truncated_shard(shards, config, tmp_path):
    shutil.copytree(shards, tmp_path / "cut")
    shard = tmp_path / "cut" / "train-00001.tar"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[: size // 2])
    message = refused(config, tmp_path, f"data.root={tmp_path / 'cut'}")
    assert "train-00001.tar" in message
    assert str(size) in message.replace(",", "")


def test_a_batch_that_cannot_be_divided(config, tmp_path):
    assert "data.global_batch_size=7 is not a multiple of 1 ranks times augment.mix_group_size=2: use 6 or 8" in refused(
        config, tmp_path, "data.global_batch_size=7"
    )


def test_an_unknown_model(config, tmp_path):
    assert "unknown model 'vit_base16' (did you mean vit_" in refused(config, tmp_path, "model.name=vit_base16")


def test_a_gpu_where_there_is_none(config, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "torch sees no GPU here: use train.device=cpu" in refused(config, tmp_path, "train.device=cuda")


@pytest.mark.slow
def test_two_ranks_tell_it_once(config, tmp_path):
    for override, expected in (
        ("optim.lrr=1", "unknown key"),
        ("data.root=nowhere", "no such directory"),
        ("model.name=vit_x", "unknown model"),
    ):
        assert refused(config, tmp_path, override, ranks=2).count(expected) == 1


def test_foreign_and_truncated_checkpoints(config, tmp_path):
    torch.save({"what": object}, tmp_path / "foreign.pth")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, expected in (
        ("foreign.pth", "holds pickled objects"),
        ("text.safetensors", "no safetensors file"),
        ("empty", "neither a run folder"),
        ("no.pt", "does not exist"),
    ):
        done = run("launch/eval.py", "--checkpoint", tmp_path / name)
        assert done.returncode == 2
        assert expected in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    done = run("launch/eval.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no --checkpoint given and no run with weights under runs/")
    assert "neither a run folder" in refused(config, tmp_path, f"init.checkpoint={tmp_path / 'empty'}")


def test_weights_for_other_classes_name_the_remedy(config, tmp_path, shards):
    train(config, tmp_path / "base", "train.steps=3")
    message = refused(config, tmp_path, f"init.checkpoint={tmp_path / 'base'}", "model.num_classes=7")
    assert "the source has 3 classes, the model 7: for a new head set init.reset_head=true" in message
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
