"""Test the output and files of `launch/recipe.py`, and the command's rows in docs/errors.md."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from error_rows import Row, pattern_of, rows, snapshot
from processes import run_here

from vit.compose import build_run
from vit.config.io import load_config
from vit.distributed.process_group import World
from vit.extras.recipes.summary import yaml_text
from vit.train import train

ROWS = rows("Recipes of other programs")
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
SMALL = [
    *("model.embed_dim=32", "model.depth=2", "model.num_heads=2", "data.global_batch_size=12"),
    *("loader.num_workers=0", "train.precision=fp32", "train.device=cpu", "log.wandb=off"),
    *("eval.batch_size=8", "log.report=false", "log.every_steps=1", "train.steps=1"),
]


def import_(*arguments: str):
    return lambda: run_here("launch/recipe.py", "import", *arguments)


SCENARIOS = {
    "flags that their program does not have": import_(
        "python main.py --bathc-size 3 --weight-dekay 1 --data-path x"
    ),
    "flags whose other name is known": import_("./distributed_train.sh 2 --wd 1 --learning-rate 1"),
    "values that their program would refuse": import_(
        "./distributed_train.sh 2 --epochs many --lr fast"
    ),
    "dashes from a page or a PDF": import_("python main.py —model x –lr 1"),
    "a task of timm that is not available": import_("python train.py --lr 1 --task multilabel"),
    "a policy that timm stops at": import_("python main.py --aa rnd-m9"),
    "a policy that torchvision stops at": import_(
        "python train.py --model vit_b_16 --auto-augment ta-wide --lr-warmup-epochs 1"
    ),
    "an optimizer that is not available": import_("python main.py --opt lars --lr 6.4"),
    "a model that their program has and this importer does not know": import_(
        "python main.py --model cait_S24"
    ),
    "a model that timm does not have": import_("./distributed_train.sh 2 --model vit_bas --lr 1"),
    "a script of no program that is known": import_("python finetune.py --lr 1"),
    "a script that is known and not read": import_(
        "srun python run_class_finetuning.py --model beit_base_patch16_224 --layer_decay 0.65"
    ),
    "a script of another program than --program": import_(
        "python main_finetune.py --model vit_base_patch16", "--program", "timm"
    ),
    "a launcher that does not state how many processes it starts": import_(
        "srun -N 4 --gpus-per-node 8 python main.py --model deit_base_patch16_224"
    ),
    "a command that evaluates": import_("python main.py --eval --resume x.pth"),
    "two commands at once": import_("python main.py\npython main.py"),
    "a Python file that is no config of big_vision": import_("child.py"),
    "a config that does more than set": import_("runs.py"),
    "a file that is not there": import_("nowhere.yaml"),
    "a folder to compare that is no run": lambda: run_here(
        "launch/recipe.py", "diff", "empty", "vit_b16"
    ),
}


@pytest.mark.parametrize(
    "row",
    [
        # Importing timm takes seconds.
        pytest.param(row, id=row.what, marks=[pytest.mark.full] * ("timm does not" in row.what))
        for row in ROWS
    ],
)
def test_the_command_prints_the_error_of_the_row(row: Row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "child.py").write_text("model = dict()\n")
    (tmp_path / "runs.py").write_text("def get_config():\n  open('made', 'w')\n")
    (tmp_path / "empty").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        SCENARIOS[row.what]()
    assert re.fullmatch(pattern_of(row.printed), f"error: {raised.value}")
    assert row.status == 2
    assert snapshot(tmp_path) == before, "no file may be left behind"


def test_every_scenario_has_a_row_and_every_row_a_scenario():
    assert {row.what for row in ROWS} == set(SCENARIOS)


def test_a_command_on_stdin_becomes_a_yaml_file_and_a_report(tmp_path, monkeypatch, capsys):
    out = tmp_path / "mine.yaml"
    monkeypatch.setattr(sys, "stdin", io.StringIO(PUBLISHED["deit3_b16_ft384"]["command"]))
    run_here("launch/recipe.py", "import", "-", "--out", out)
    printed = capsys.readouterr().out
    assert "no equivalent: 0" in printed
    assert printed.splitlines()[-1] == str(out)
    header = out.read_text()
    assert "# source     facebookresearch/deit@7e160fe4" in header
    assert f"--config {out} " in header


def test_without_out_the_yaml_is_on_stdout_and_the_report_on_stderr(capsys):
    command = PUBLISHED["mae_b16_ft"]["command"]
    run_here("launch/recipe.py", "import", command)
    printed = capsys.readouterr()
    values = yaml.safe_load(printed.out)
    assert values["data"]["global_batch_size"] == 1024
    assert "MAE's submitit_finetune.py" in printed.err


@pytest.mark.parametrize(
    "name",
    [
        "deit3_b16_800ep",
        pytest.param("bv_s16_90ep", marks=pytest.mark.full),
        pytest.param("vit5_s16", marks=pytest.mark.full),
    ],
)
def test_a_small_version_of_an_imported_recipe_does_its_first_step(
    name, imported, shards, tmp_path
):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml_text(imported(name), file))
    settings = [*SMALL, f"data.root={shards}", f"run.dir={tmp_path / 'run'}"]
    settings += ["model.image_size=32", "schedule.warmup_steps=1", "eval.crop_pct=0.875"]
    config = load_config(file, settings)
    assert train(build_run(config, World(0, 1, torch.device("cpu")))) == "finished"
