"""A W&B that opens slowly, and messages that it cannot take."""

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


def start(folder: Path, mode: Mode, messages: list[str]) -> WandbProcess:
    return WandbProcess(folder, "project", mode, {}, ["train.py"], Rows([], 0), messages.append)


@pytest.mark.parametrize(
    ("mode", "reason"), [("offline", "as configured"), ("online", "no API key")]
)
def test_opening_offline_has_no_time_limit(tmp_path, monkeypatch, mode, reason):
    (tmp_path / "wandb.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(wandb_logger.LIMITS_S, "run", 1.5)
    messages = list[str]()
    process = start(tmp_path, mode, messages)
    process.send(step=1, numbers={"train/loss": 1.0})
    process.close()
    assert [line.partition(";")[0] for line in messages] == [f"wandb: offline ({reason})"]
    assert (tmp_path / "shown").read_text() == "0: {'global_step': 1, 'train/loss': 1.0} finished"


def test_reports_and_skips_a_message_that_json_cannot_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_logger, "SCRIPT", shutil.which("true"))  # no process reads them
    messages = list[str]()
    process = start(tmp_path, "offline", messages)
    row = list[object]()
    row.append(row)
    process.send(step=1, table="classes", columns=["name"], rows=[row])
    process.send(step=1, numbers={("a", 1): 2.0})
    process._kill()
    assert [line.partition(" (")[0] for line in messages] == [
        "wandb: cannot show classes",
        "wandb: cannot show this",
    ]
