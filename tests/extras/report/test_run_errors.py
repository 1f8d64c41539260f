"""Trigger the error in each row of the table "Asking a run" in errors/rows.yaml.

One test runs the real command to check how a ValueError is printed. The other tests run in this
process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import wandb
from error_rows import Row, pattern_of, rows, snapshot
from processes import TINY, run, run_here, write_config

from vit.run_folder.paths import LOCK_FILE
from vit.system.files import WeightsError
from vit.weights.files import read_weights

ROWS = rows("Asking a run")
REPLAY = "launch/replay.py"
SAMPLES = "launch/samples.py"
TO_WANDB = ("launch/report.py", "--to-wandb")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shards) -> Path:
    """Train for 12 steps on a copy of the shards. The copy is in the same folder as the run."""
    folder = tmp_path_factory.mktemp("finished")
    root = shutil.copytree(shards, folder / "shards")
    config = write_config(folder, root)
    run_here("launch/train.py", "--config", config, f"run.dir={folder / 'run'}", *TINY)
    return folder


def other_label(folder: Path) -> list[object]:
    index = np.load(folder / "shards" / "train.index.npy")
    index["label"][7] = (index["label"][7] + 1) % 3
    np.save(folder / "shards" / "train.index.npy", index)
    return [REPLAY, folder / "run", "--step", 3, f"data.root={folder / 'shards'}"]


def without_losses(folder: Path) -> list[object]:
    shutil.rmtree(folder / "run" / "samples")
    return [SAMPLES, folder / "run"]


def damaged(folder: Path) -> list[object]:
    path = folder / "run" / "samples" / "epoch_0001.npy"
    path.write_bytes(path.read_bytes()[:-8])
    return [SAMPLES, folder / "run"]


HOLDERS = list[subprocess.Popen]()
HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def end_holders():
    yield
    while HOLDERS:
        HOLDERS.pop().communicate()


def without_wandb(folder: Path) -> list[object]:
    # Simulate that wandb is not installed.
    sys.modules["wandb"] = None
    return [*TO_WANDB, folder / "run"]


def switched_off(folder: Path) -> list[object]:
    os.environ["WANDB_MODE"] = "disabled"
    return [*TO_WANDB, folder / "run"]


def while_training(folder: Path) -> list[object]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder / "run" / LOCK_FILE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    HOLDERS.append(holder)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    return [*TO_WANDB, folder / "run"]


def without_a_step(folder: Path) -> list[object]:
    (folder / "run" / "metrics.jsonl").write_text("")
    return [*TO_WANDB, folder / "run"]


SCENARIOS: dict[str, Callable[[Path], list[object]]] = {
    "`launch/report.py --to-wandb` without wandb": without_wandb,
    "the same with W&B switched off": switched_off,
    "the same for a run that is still training": while_training,
    "the same for a run that has not done a step": without_a_step,
    "`launch/replay.py` for a step that the run never did": lambda folder: [
        *(REPLAY, folder / "run", "--step", 81234)
    ],
    "for a rank that it had not": lambda folder: [
        *(REPLAY, folder / "run", "--step", 3, "--rank", 4)
    ],
    "for a folder without a record": lambda folder: [REPLAY, folder / "shards", "--step", 3],
    "for data whose images or labels have changed since": other_label,
    "with settings that give another order": lambda folder: [
        *(REPLAY, folder / "run", "--step", 3, "train.seed=1")
    ],
    "`launch/samples.py` for a run that kept no losses": without_losses,
    "a file of losses that is damaged": damaged,
    "keys to leave out, without how many": lambda folder: [
        *(SAMPLES, folder / "run", "--exclude", folder / "keys.txt")
    ],
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_the_command_prints_the_error_of_the_row(row: Row, finished, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = shutil.copytree(finished, tmp_path / "copy")
    script, *arguments = SCENARIOS[row.what](folder)
    before = snapshot(folder)
    if row == ROWS[0]:
        done = run(script, *arguments)
        assert done.returncode == row.status, done.stderr
        printed = done.stderr
    else:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            run_here(script, *arguments)
        printed = f"error: {caught.value}"
    assert re.search(f"^{pattern_of(row.printed)}\\s*\\Z", printed, re.MULTILINE), printed
    assert snapshot(folder) == before, "files were written or changed"


def test_every_scenario_has_a_row():
    assert {row.what for row in ROWS} == SCENARIOS.keys()


def test_an_unwritable_output_is_an_error_of_one_line(finished, tmp_path):
    taken = tmp_path / "taken"
    taken.touch()
    replay = [REPLAY, finished / "run", "--step", 3]
    for arguments, message in (
        ([*replay, "--csv", taken / "a.csv"], "a.csv: cannot be written"),
        ([*replay, "--sheet", taken / "a.png"], "a.png: cannot be written"),
        ([SAMPLES, finished / "run", "--worst", 1, "--exclude", taken / "a"], "cannot be written"),
    ):
        with pytest.raises(ValueError, match=message):
            run_here(*arguments)
    with pytest.raises(ValueError, match=r"a\.bmp: expected one of the suffixes png"):
        run_here(*replay, "--csv", tmp_path / "a.csv", "--sheet", "a.bmp")
    assert list(tmp_path.iterdir()) == [taken]


def test_a_run_without_weights_is_replayed_with_a_note(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    ask = ["--step", 3, "--csv", tmp_path / "with.csv"]
    run_here(REPLAY, folder / "run", *ask)
    for name in ("weights", "checkpoints"):
        shutil.rmtree(folder / "run" / name)
    assert (folder / "run" / "predictions.npz").exists()
    ask[-1] = tmp_path / "without.csv"
    run_here(REPLAY, folder / "run", *ask)
    assert (tmp_path / "with.csv").read_text() == (tmp_path / "without.csv").read_text()
    with pytest.raises(WeightsError, match="run has no weights: the run has not saved any yet"):
        read_weights(folder / "run")
