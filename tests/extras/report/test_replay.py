"""Test that a replayed batch is bit-identical to the tensors of the original training step."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_python
from checksums import indexed_as_it_is
from extras.report.dumped_steps import dumped, dumping
from PIL import Image
from processes import TINY, call, command, environment, make_shards, run_here, write_config

from vit.data.storage.opening import open_split
from vit.extras.report.replay import Replay
from vit.extras.report.source import ReportSource

CPU = torch.device("cpu")
SCRIPT = Path(__file__).with_name("dumped_steps.py")
TWO_SIZES = "schedule.image_sizes=[{until_epoch: 1, image_size: 24}]"
ALL = [
    "augment.randaugment_layers=2",
    "augment.color_jitter=[0.4,0.4,0.4,0.1]",
    "augment.erasing_prob=0.5",
    "augment.mixup_mode=elem",
    "augment.mixup_off_epoch=1",
]


def train_here(config: Path, run_dir: Path, *overrides: str) -> Path:
    """Train in this process. Return the folder with the dumped inputs of each step."""
    folder = run_dir.parent / f"{run_dir.name}_given"
    folder.mkdir(exist_ok=True)
    with dumping(folder):
        run_here("launch/train.py", "--config", config, f"run.dir={run_dir}", *TINY, *overrides)
    return folder


def check_step(run_dir: Path, dumps: Path, step: int, rank: int | None = None) -> Replay:
    """Assert that a replay of `step` matches the dumped tensors, including the losses."""
    replay = Replay(ReportSource(run_dir, CPU), step, rank)
    expected = dumped(dumps, step)
    if rank is not None:
        expected = torch.load(dumps / f"step_{step:05d}_rank_{rank}.pt")
    pieces = list(replay.pieces())
    rows = [row for piece in pieces for row in piece.rows]
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), expected["inputs"])
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), expected["targets"])
    assert [row.row for row in rows] == list(replay.rows)
    assert [row.label for row in rows] == expected["labels"].tolist()
    is_kept = np.array([row.weight > 0 for row in rows])
    losses = np.array([row.loss for row in rows], np.float64)
    assert np.array_equal(losses[is_kept], expected["losses"].half().numpy()[is_kept])
    assert np.isnan(losses[~is_kept]).all()
    margins = expected["margins"].half().numpy()
    assert [row.margin for row in rows if row.weight] == margins[is_kept].tolist()
    return replay


def test_steps_before_and_after_a_resume_on_fewer_ranks_are_replayed(tmp_path, shards):
    config = write_config(tmp_path, shards, steps=7)
    dumps = tmp_path / "given"
    dumps.mkdir()
    arguments = [
        "--config",
        config,
        f"run.dir={tmp_path / 'run'}",
        *TINY,
        "data.micro_batch_size=2",
    ]
    env = {**environment(), "DUMPED_STEPS": str(dumps)}
    env["PYTHON_EXEC"] = python = warm_python.python(env)
    done = call(command(str(SCRIPT), *arguments, "train.steps=4", ranks=2, python=python), env)
    assert done.returncode == 0, done.stderr
    with dumping(dumps):
        run_here("launch/train.py", *arguments, "--allow-change", "train.steps")
    assert sorted(path.name for path in dumps.glob("step_00004*")) == [
        "step_00004_rank_0.pt",
        "step_00004_rank_1.pt",
    ]
    assert check_step(tmp_path / "run", dumps, 4).world_size == 2
    check_step(tmp_path / "run", dumps, 4, rank=1)
    assert check_step(tmp_path / "run", dumps, 5).world_size == 1
    check_step(tmp_path / "run", dumps, 7)


@pytest.mark.parametrize(
    "choice",
    [
        [*("data.fraction=0.8", "data.exclude=LABEL_2", "order.aug_repeats=3", *ALL), TWO_SIZES],
        pytest.param(["augment.auto_augment=v0"], marks=pytest.mark.full),
        pytest.param(
            ["augment.crop=simple", "augment.auto_augment=three_augment"], marks=pytest.mark.full
        ),
        pytest.param(
            ["order.aug_repeats=2", "order.aug_repeats_form=sampler"], marks=pytest.mark.full
        ),
    ],
    ids=["chosen, repeated, of two sizes", "policy", "simple", "sampler"],
)
def test_steps_with_chosen_and_repeated_samples_are_replayed(choice, tmp_path, shards):
    (tmp_path / "label_2.txt").write_text("label=2\n")
    choice = [each.replace("LABEL_2", str(tmp_path / "label_2.txt")) for each in choice]
    dumps = train_here(write_config(tmp_path, shards, steps=6), tmp_path / "run", *choice)
    pieces = [check_step(tmp_path / "run", dumps, step).pieces() for step in (1, 6)]
    mixed = [any(row.mixed_by for piece in step for row in piece.rows) for step in pieces]
    assert mixed == [True, "augment.mixup_off_epoch=1" not in choice]


def test_steps_of_several_sources_with_an_undecodable_image_are_replayed(tmp_path, shards):
    other = make_shards(tmp_path / "other", num_train=24, num_val=3, seed=1)
    index = np.load(other / "train.index.npy")
    tar = bytearray((other / "train-00000.tar").read_bytes())
    begin = int(index["offset"][0])
    tar[begin : begin + 200] = bytes(200)
    (other / "train-00000.tar").write_bytes(tar)
    indexed_as_it_is(open_split(other, "train"), 0)
    sources = json.dumps([{"root": str(shards), "weight": 1}, {"root": str(other), "weight": 3}])
    dumps = train_here(
        write_config(tmp_path, shards, steps=7),
        tmp_path / "run",
        f"data.sources={sources}",
        "loader.on_bad_image=skip",
    )
    ignored = [
        row.key
        for step in range(1, 8)
        for piece in check_step(tmp_path / "run", dumps, step).pieces()
        for row in piece.rows
        if not row.weight
    ]
    assert set(ignored) == {open_split(other, "train").key(0)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Path:
    """Train for 12 steps on a copy of the shards. The copy is in the same folder as the run."""
    folder = tmp_path_factory.mktemp("trained")
    root = shutil.copytree(shards, folder / "shards")
    train_here(write_config(folder, root), folder / "run")
    return folder / "run"


def test_the_command_draws_writes_and_prints(trained, tmp_path, capsys):
    run_here("launch/replay.py", trained, "--step", 8, "--images", 5)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("step 8 (epoch 2, 1 rank(s)): 12 images of ")
    with Image.open(printed[-1]) as picture:
        assert picture.size[0] == 1400
    sheet = tmp_path / "batch.csv"
    run_here("launch/replay.py", trained, "--step", 8, "--csv", sheet)
    with sheet.open(newline="") as file:
        rows = list(csv.DictReader(file))
    replay = Replay(ReportSource(trained, CPU), 8)
    assert [row["key"] for row in rows] == [
        row.key for piece in replay.pieces() for row in piece.rows
    ]
    assert {row["mixed_by"] for row in rows} <= {"mixup", "cutmix", ""}
    for row in rows:
        if row["mixed_by"]:
            assert rows[int(row["partner_row"])]["key"] == row["partner_key"]
    assert all(re.fullmatch(r"\d+\.\d+", row["loss"]) for row in rows)
