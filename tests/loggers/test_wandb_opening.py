"""A W&B that is slow to open, and messages that it cannot be given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vit.loggers import wandb_logger
from vit.loggers.record import Rows
from vit.loggers.wandb_logger import Mode, WandbProcess

SLOW = """
import os
import time
from types import SimpleNamespace

class errors:
    class UsageError(Exception):
        pass

Settings = SimpleNamespace

def setup():
    pass

teardown = setup

def init(mode, **_):
    if mode == "online":
        raise errors.UsageError("no API key. More")
    time.sleep(2.5)
    shown = open("shown", "w")
    os.makedirs("wandb/offline-run-1-a")
    return SimpleNamespace(
        id="a",
        settings=SimpleNamespace(sync_dir="wandb/offline-run-1-a"),
        define_metric=lambda *_, **__: None,
        log=lambda values, step, commit: shown.write(f"{step}: {values} "),
        finish=lambda exit_code: shown.write("finished") and shown.close(),
    )
"""


def start(folder: Path, mode: Mode, said: list[str]) -> WandbProcess:
    return WandbProcess(folder, "project", mode, {}, ["train.py"], Rows([], 0), said.append)


@pytest.mark.parametrize(("mode", "why"), [("offline", "as asked"), ("online", "no API key")])
def test_opening_offline_takes_as_long_as_it_takes(tmp_path, monkeypatch, mode, why):
    (tmp_path / "wandb.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(wandb_logger.LIMITS_S, "run", 1.5)
    said = list[str]()
    process = start(tmp_path, mode, said)
    process.send(step=1, numbers={"train/loss": 1.0})
    process.close()
    assert [line.partition(";")[0] for line in said] == [f"wandb: offline ({why})"]
    assert (tmp_path / "shown").read_text() == "0: {'global_step': 1, 'train/loss': 1.0} finished"


def test_a_message_that_json_cannot_hold_is_reported_and_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_logger, "SCRIPT", shutil.which("true"))  # nothing reads them
    said = list[str]()
    process = start(tmp_path, "offline", said)
    row = list[object]()
    row.append(row)
    process.send(step=1, table="classes", columns=["name"], rows=[row])
    process.send(step=1, numbers={("a", 1): 2.0})
    process._kill()
    assert [line.partition(" (")[0] for line in said] == [
        "wandb: cannot show classes",
        "wandb: cannot show this",
    ]
