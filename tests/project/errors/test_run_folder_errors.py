"""Test the rows of errors/rows.yaml that describe checkpoints, run folders and full disks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from error_rows import (
    WITH_SHORT_FILES,
    WITHOUT_PRIVILEGES,
    Place,
    Row,
    Scenarios,
    leave_free,
    small_disk,
    snapshot,
)
from processes import REPOSITORY, TINY, Background, command, environment
from safetensors.torch import load_file

from vit.checkpoint.checkpoint import newest_checkpoint
from vit.checkpoint.seal import sealed

scenario = Scenarios()


@scenario("`init.checkpoint` of another architecture")
def _(place):
    place.train(f"init.checkpoint={place.finished}", "model.depth=3")


@scenario("`init.checkpoint` of other classes")
def _(place):
    place.train(f"init.checkpoint={place.finished}", "model.num_classes=7")


@scenario("weights of a network that normalizes after its pooling")
def _(place):
    weights = load_file(place.finished / "weights" / "last.safetensors")
    renamed = {re.sub(r"^norm\.", "fc_norm.", name): value for name, value in weights.items()}
    torch.save(renamed, place.folder / "foreign.pth")
    place.train(f"init.checkpoint={place.folder / 'foreign.pth'}")


@scenario("a truncated weights file")
def _(place):
    whole = (place.finished / "weights" / "last.safetensors").read_bytes()
    (place.folder / "cut.safetensors").write_bytes(whole[:-100])
    place.evaluate(place.folder / "cut.safetensors")


@scenario("a foreign file with pickled objects")
def _(place):
    torch.save({"what": Path}, place.folder / "foreign.pth")
    place.evaluate(place.folder / "foreign.pth")


@scenario("a folder that is neither a run nor a checkpoint")
def _(place):
    place.train(f"init.checkpoint={place.shards}")


@scenario("a truncated checkpoint, and none before it")
def _(place):
    shutil.copytree(place.finished, place.run_dir)
    state = place.run_dir / "checkpoints" / "step_00000003" / "state.safetensors"
    os.truncate(state, state.stat().st_size - 10)
    place.train("train.steps=3")
    # The command must rename these files instead of deleting them, so that users can inspect them.
    place.after = {
        re.sub(r"damaged_(step_\d+)_\d+", r"\1", name): data for name, data in place.after.items()
    }


@scenario("a checkpoint of a newer release")
def _(place):
    shutil.copytree(place.finished, place.run_dir)
    info = place.run_dir / "checkpoints" / "step_00000003" / "checkpoint.json"
    info.write_text(json.dumps(sealed({**json.loads(info.read_text()), "format_version": 2})))
    place.train("train.steps=3")


@scenario("a run folder that was written with another config")
def _(place):
    shutil.copytree(place.finished, place.run_dir)
    place.train("train.steps=3", "model.depth=3", "optim.lr=0.5")


@scenario("a run folder that a live run is using", slow=True)
def _(place):
    background = Background(
        place.config, place.run_dir, "train.steps=100000", "log.every_steps=100", ranks=0
    )
    background.wait_for_step(100)
    # Stop the process after its last write, so that the files do not change while they are
    # compared.
    os.kill(background.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, background.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        place.train("train.steps=100000", "log.every_steps=100")
    finally:
        background.process.kill()
        background.process.communicate()


@scenario("no permission to write the run folder")
def _(place):
    (place.folder / "mine").mkdir(mode=0o555)
    place.train(f"run.dir={place.folder / 'mine' / 'run'}", prefix=WITHOUT_PRIVILEGES)


@scenario("no room on the disk for what the run will save")
def _(place):
    with small_disk(place.folder / "disk") as disk:
        place.run_dir = disk / "run"
        leave_free(disk, 2200)
        place.train()


@scenario(
    "others have filled the disk since: no room for the next checkpoint", begun=True, slow=True
)
def _(place):
    fill_the_disk_meanwhile(place, leave_kib=1200)


@scenario("the disk is full while something is written", begun=True)
def _(place):
    place.train(prefix=WITH_SHORT_FILES)


ENDLESS = (
    "train.steps=1000000",
    "eval.every_steps=1000000",
    "checkpoint.every_steps=100",
    "log.every_steps=50",
    "log.sample_losses=0",  # the per-image losses of so many steps would not fit on the disk
)


def fill_the_disk_meanwhile(place: Place, leave_kib: int, ranks: int = 0) -> None:
    """Fill the disk during training. The previous checkpoint must stay intact. When space is
    available again, the same command must resume from this checkpoint."""
    with small_disk(place.folder / "disk") as disk:
        place.run_dir = disk / "run"
        background = Background(place.config, place.run_dir, *ENDLESS, ranks=ranks)
        background.wait_for_checkpoint(100)
        place.before = {}
        filler = leave_free(disk, leave_kib)
        output = background.end()
        place.done = subprocess.CompletedProcess([], background.process.returncode, "", output)
        place.after = snapshot(place.folder)
        newest = newest_checkpoint(place.run_dir, verify=True)
        assert newest is not None
        filler.unlink()
        steps = f"train.steps={newest[1]['step'] + 2}"
        allowed = ("--allow-change", "train.steps")
        full = command(
            "launch/train.py",
            "--config",
            place.config,
            f"run.dir={place.run_dir}",
            *TINY,
            *ENDLESS,
            steps,
            *allowed,
            ranks=ranks,
        )
        again = subprocess.run(
            full, capture_output=True, text=True, cwd=REPOSITORY, env=environment()
        )
        assert again.returncode == 0, again.stderr
        assert f"resumed at step {newest[1]['step']} of" in again.stderr


@pytest.mark.full
def test_a_full_disk_ends_all_ranks_with_one_message(tmp_path, shards):
    place = Place(tmp_path, shards, Path())
    fill_the_disk_meanwhile(place, leave_kib=100, ranks=2)
    output = place.done.stderr
    assert len(re.findall(r"^error: .*: needs .* MiB, but the disk has", output, re.MULTILINE)) == 1
    assert "\nrank 1: " not in output
    assert "exitcode  : 2 " in output
    assert "Traceback (most recent call last)" not in output.split("failed (exitcode")[0]


@pytest.mark.parametrize("row", scenario.rows())
def test_the_mistake_has_the_stated_result(row: Row, happened: dict[str, Future[Place]]):
    scenario.check(row, happened[row.what].result())
