"""Test that metrics.jsonl contains only complete lines, that a restarted run replaces repeated
lines, and that only one process can write to the file."""

import gc
import json
import math
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit.compose import parts_of
from vit.config.io import load_config
from vit.config.schema import LogConfig
from vit.loggers.lines import numbers_of, read_metrics
from vit.loggers.record import Record, provenance
from vit.run_folder.lock import RunLock
from vit.run_folder.paths import METRICS_FILE

ROOT = Path(__file__).parents[2]
OFF = LogConfig(wandb="off")


def record_in(folder: Path, config: LogConfig = OFF, is_main: bool = True) -> Record:
    return Record(folder, config, is_main, total_steps=10)


def written(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


# --- metrics.jsonl --------------------------------------------------------------------------------


def test_the_recorded_command_can_be_pasted_into_a_shell(monkeypatch):
    arguments = [
        "data.exclude=blurred > 3.txt",
        "run.dir=runs/it's mine",
        "data.root=https://${SAS}/x",
    ]
    monkeypatch.setattr(sys, "argv", ["launch/train.py", *arguments, "stream.urls=s3://me:key@b"])
    monkeypatch.setenv("MY_TOKEN", "it's secret")
    command = provenance()["command"]
    assert shlex.split(command) == ["launch/train.py", *arguments, "stream.urls=s3://***@b"]
    monkeypatch.setattr(sys, "argv", ["launch/train.py", "x=it's secret"])
    assert shlex.split(provenance()["command"])[1] == "x=${MY_TOKEN}"


def test_each_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    record = record_in(tmp_path)
    before = time.time()
    for step in range(3):
        record.write("train", step, loss=0.5 * step, lr=1e-3)
        assert len(written(tmp_path)) == step + 1
    line = written(tmp_path)[2]
    assert before - 1 <= line.pop("time") <= time.time() + 1
    assert line == {"kind": "train", "step": 2, "loss": 1.0, "lr": 1e-3}
    record.close()


def test_writes_a_file_again_that_was_removed_or_replaced(tmp_path, capsys):
    record = record_in(tmp_path)
    record.write("train", 1, name="ä")
    (tmp_path / METRICS_FILE).unlink()
    record.write("train", 2)
    record.flush()
    assert [line["step"] for line in written(tmp_path)] == [1, 2]
    (tmp_path / "edited").write_text('{"kind": "train", "step": 1}\n')
    (tmp_path / "edited").replace(tmp_path / METRICS_FILE)
    record.write("train", 3)
    record.write("train", 4)
    record.close()
    assert [line["step"] for line in written(tmp_path)] == [1, 2, 3, 4]
    assert written(tmp_path)[0]["name"] == "ä"
    messages = capsys.readouterr().err
    assert messages.count("metrics.jsonl: was removed or replaced during the run") == 2


def test_does_not_touch_the_record_of_a_run_that_replaced_a_moved_one(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    record = record_in(folder)
    record.write("train", 1)
    folder.rename(tmp_path / "moved")
    record.write("train", 2)
    folder.mkdir()
    other = record_in(folder)
    other.write("train", 10)
    record.write("train", 3)
    other.close()
    record.close()
    assert [line["step"] for line in written(folder)] == [10]
    assert [line["step"] for line in written(tmp_path / "moved")] == [1, 2, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null(tmp_path, value):
    record = record_in(tmp_path)
    record.write("train", 1, loss=value, lr=0.1)
    record.write("norms", 1, grad_norm={"embed": value, "head": 2.0})
    record.close()
    text = (tmp_path / METRICS_FILE).read_text()
    refuse = partial(json.loads, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    line, norms = map(refuse, text.splitlines())
    assert (line["loss"], line["lr"]) == (None, 0.1)
    assert norms["grad_norm"] == {"embed": None, "head": 2.0}
    assert numbers_of(norms) == {"norms/grad_norm/head": 2.0}


@given(st.integers(0, 200))
def test_reopening_removes_a_line_truncated_by_a_kill(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    first = record_in(folder)
    for step in range(3):
        first.write("train", step)
    first.close()
    path = folder / METRICS_FILE
    whole = path.read_bytes()
    os.truncate(path, max(len(whole) - cut, 0))
    survivors = [json.loads(line) for line in whole[: max(len(whole) - cut, 0)].split(b"\n")[:-1]]
    assert read_metrics(path) == survivors, (
        "the file of a killed run must be readable without a restart"
    )

    second = record_in(folder)
    second.write("train", 7)
    second.close()
    lines = written(folder)
    assert lines[:-1] == survivors
    assert lines[-1]["step"] == 7


def test_a_restart_replaces_lines_after_its_checkpoint(tmp_path):
    path = tmp_path / METRICS_FILE
    record = record_in(tmp_path)
    record.write("start", 0, attempt=1)
    for step in range(1, 7):
        record.write("train", step, attempt=1)
    record.write("eval", 4, attempt=1)
    record.write("eval", 6, attempt=1)
    record.close()
    everything = read_metrics(path)
    assert len(everything) == 9

    record = record_in(tmp_path)
    record.write("start", 4, attempt=2)
    for step in (5, 6, 7):
        record.write("train", step, attempt=2)
    record.close()
    assert [(line["kind"], line["step"], line["attempt"]) for line in read_metrics(path)] == [
        ("start", 0, 1),
        *(("train", step, 1) for step in range(1, 5)),
        ("eval", 4, 1),
        ("start", 4, 2),
        *(("train", step, 2) for step in (5, 6, 7)),
    ]
    assert written(tmp_path)[:9] == everything, "the file must only grow"


def test_a_second_restart_from_an_older_checkpoint_replaces_more(tmp_path):
    record = record_in(tmp_path)
    for attempt, first, last in ((1, 0, 6), (2, 4, 9), (3, 2, 3)):
        record.write("start", first, attempt=attempt)
        for step in range(first + 1, last + 1):
            record.write("train", step, attempt=attempt)
    record.close()
    lines = read_metrics(tmp_path / METRICS_FILE)
    assert [(line["step"], line["attempt"]) for line in lines if line["kind"] == "train"] == [
        (1, 1),
        (2, 1),
        (3, 3),
    ]
    assert [line["attempt"] for line in lines if line["kind"] == "start"] == [1, 2, 3], (
        "every start must stay in the file"
    )


def test_other_ranks_neither_write_nor_print(tmp_path, capsys):
    config = LogConfig(wandb="offline", tensorboard=True)
    record = record_in(tmp_path, config, is_main=False)
    record.log("hello")
    record.write("train", 1, loss=1.0)
    record.progress(1, "x")
    record.train_line(1, "x")
    record.start_loggers([lambda *_: pytest.fail("only rank 0 has loggers")])
    record.log_pictures({"curves": tmp_path / "curves.png"})
    record.log_table("classes", ["class"], [["one"]])
    record.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_log_file_gets_a_line_a_minute_for_slow_steps(tmp_path, capsys, monkeypatch):
    """At the default interval of fifty steps, training ViT-B on a laptop CPU would log only one
    line per hour."""
    record = record_in(tmp_path)
    record.progress(1, "step 1/10")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("vit.loggers.record.SILENT_S", -1.0)
    record.progress(2, "step 2/10")
    assert capsys.readouterr().err == "step 2/10\n"
    monkeypatch.setattr("vit.loggers.record.SILENT_S", 60.0)
    record.train_line(3, "step 3/10")
    record.progress(4, "step 4/10")
    assert capsys.readouterr().err == "step 3/10\n"
    record.close()


def test_messages_go_to_stderr_unchanged(tmp_path, capsys):
    record = record_in(tmp_path)
    record.log("[bold]no markup[/bold] " + "long " * 50)
    record.train_line(3, "step 3")
    record.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["[bold]no markup[/bold] " + "long " * 50, "step 3"]


# --- one writer -----------------------------------------------------------------------------------

HOLD = """
import sys
from functools import partial
from pathlib import Path
from vit.run_folder.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.readline()
"""


def hold(folder: Path) -> subprocess.Popen:
    """Start a process that holds the lock of a run until it reads a line or is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_waits_for_a_run_that_is_ending(tmp_path, capsys):
    printed = list[str]()

    def end_once_awaited() -> None:
        while not printed:
            time.sleep(0.01)
            printed.extend(capsys.readouterr().err.splitlines())
        other.communicate("end\n")

    with hold(tmp_path) as other:
        ending = threading.Thread(target=end_once_awaited)
        ending.start()
        record = record_in(tmp_path)
        ending.join()
        assert other.returncode == 0
    record.write("start", 0)
    record.close()
    (message,) = printed + capsys.readouterr().err.splitlines()
    assert (
        message
        == f"{tmp_path}: waiting up to 15 s for process {other.pid} on {socket.gethostname()}"
        " to end"
    )


def test_does_not_disturb_a_running_run(tmp_path, monkeypatch):
    monkeypatch.setattr("vit.run_folder.lock.LOCK_WAIT_S", 0.5)
    with hold(tmp_path) as other:
        with pytest.raises(
            ValueError,
            match=(
                rf"in use by a live run \(process {other.pid} on .*\): wait until it ends, stop it,"
                r" or use another"
            ),
        ):
            record_in(tmp_path)
        other.kill()
    assert not (tmp_path / METRICS_FILE).exists()


def test_the_record_keeps_an_earlier_lock_until_its_end(tmp_path):
    """A process loses its POSIX lock on a file when it closes any handle of this file. Opening and
    closing the file a second time would therefore release the lock."""
    record = Record(tmp_path, OFF, True, total_steps=1, lock=RunLock(tmp_path))
    gc.collect()
    trial = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    locked = [sys.executable, "-c", trial, str(tmp_path / ".lock")]
    assert subprocess.run(locked, capture_output=True, check=False).returncode != 0
    record.close()
    assert subprocess.run(locked, capture_output=True, check=False).returncode == 0


def test_a_run_continues_if_the_folder_of_wandb_was_deleted(config, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "vit.extras.loggers.wandb_logger", None)
    [line] = parts_of(load_config(config, ["log.wandb=auto"])).lines
    assert line.startswith("wandb: log.wandb=auto needs vit/extras/loggers")
    assert line.endswith("not installed: metrics.jsonl only (log.wandb=off silences this)")
    with pytest.raises(ValueError, match=r"log\.wandb=online needs vit/extras/loggers"):
        parts_of(load_config(config, ["log.wandb=online"]))
