"""W&B shows the record, and neither W&B nor its server can harm or delay a run.

Real wandb, real processes, real sockets. The server implements the part of W&B's API that
wandb-core uses, and can go away during a run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loggers.wandb_runs import (
    Server,
    expected,
    numbers,
    one_run,
    parts,
    read_wandb,
    record_of,
    recorded,
    signal_ours,
    use_server,
    wait_for,
    wandb_pids,
)
from PIL import Image
from processes import Background, train, write_config

from vit.config.schema import LogConfig
from vit.loggers import wandb_logger
from vit.loggers.record import Record

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory, monkeypatch):
    """Without a key, a proxy or settings of this machine's user."""
    for name in os.environ:
        if name.startswith("WANDB_") or name.lower().endswith("_proxy") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


# --- what W&B is shown ----------------------------------------------------------------------------


def test_an_offline_run_has_all_data_by_global_step_under_one_id(tmp_path, capfd, monkeypatch):
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    folder = tmp_path / "my run"
    folder.mkdir()
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    rows = [["seven", 1.5], ["nine", None]]
    # the second process resumes from a checkpoint at step 2
    for restarts, steps in enumerate((range(0, 4), range(2, 6))):
        record = Record(folder, LogConfig(), True, total_steps=6, first_step=steps.start)
        record.write("start", max(steps.start - 1, 0), restarts=restarts)
        record.start_wandb({"optim": {"lr": 0.1}, "provenance": {"git": "abc"}})
        for step in steps:
            record.write("train", step, loss=1 / (step + 1), note="text", grad_norm=float("nan"))
        record.write("eval", steps[-1], top1=50.0)
        record.write("end", steps[-1], outcome="finished")
        record.log_pictures({"gone": tmp_path / "gone.png", "curves": tmp_path / "red.png"})
        record.log_table("uneven", ["class", "loss"], [["one"]])
        record.log_table("classes", ["class", "loss"], rows)
        record.close()
        # W&B names its folders by the second
        time.sleep(1.1 - time.time() % 1 if restarts == 0 else 0)

    messages = capfd.readouterr().err.splitlines()
    command = f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    assert (
        sum(
            line.startswith("wandb: offline (No API key configured); upload ")
            and line.endswith(f"with: {command}")
            for line in messages
        )
        == 2
    )
    assert (
        sum(
            line.startswith("wandb: cannot show report/gone (FileNotFoundError")
            for line in messages
        )
        == 2
    )
    assert (
        sum(line.startswith("wandb: cannot show report/uneven (ValueError") for line in messages)
        == 2
    )
    assert all(line.startswith("wandb: ") for line in messages), "W&B itself prints nothing here"

    (part,) = parts(folder)  # the file of the second process, which has all lines
    run_id, config, history = read_wandb(part)
    assert run_id == (folder / "wandb_id").read_text()
    assert (config["optim"], config["provenance"]) == ({"lr": 0.1}, {"git": "abc"})
    assert numbers(history) == recorded(folder)
    assert [row["global_step"] for row in recorded(folder)] == [0, 1, 2, 3, 4, 5, 5]
    (picture,) = (line for line in history if line.get("report/curves._type") == "image-file")
    assert picture["global_step"] == 5
    assert (part.parent / "files" / picture["report/curves.path"]).read_bytes() == (
        tmp_path / "red.png"
    ).read_bytes()
    (table,) = (line for line in history if line.get("report/classes._type") == "table-file")
    assert json.loads((part.parent / "files" / table["report/classes.path"]).read_text()) == {
        "columns": ["class", "loss"],
        "data": rows,
    }
    assert not list(folder.glob(".wandb-feed*"))
    wait_for(lambda: not wandb_pids())
    assert [path.name for path in temporary.iterdir()] == []
    assert not list((folder / "wandb").glob("tmp-*"))


@pytest.mark.parametrize("can_rewind", [True, pytest.param(False, marks=pytest.mark.full)])
def test_online_each_line_arrives_once_under_one_id_over_restarts(
    tmp_path, server, capfd, can_rewind
):
    server.can_rewind = can_rewind
    one_run(tmp_path, range(0, 4))
    first = numbers(server.history)
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    record = Record(tmp_path, LogConfig(wandb="online"), True, total_steps=6, first_step=2)
    record.write("start", 1, restarts=1)
    record.start_wandb({})
    for step in range(2, 6):
        record.write("train", step, loss=1 / (step + 1))
    record.write("eval", 5, top1=50.0)
    record.log_pictures({"curves": tmp_path / "red.png"})
    record.close()
    run_id = (tmp_path / "wandb_id").read_text()
    # this message appears only if uploading takes seconds
    messages = [line for line in capfd.readouterr().err.splitlines() if "uploading" not in line]
    url = f"wandb: {server.url}/me/vit/runs/{run_id}"
    refused = "wandb: repeated steps keep their first values on W&B (rewind failed: CommError:"
    assert messages[0] == messages[-1] == url
    assert [line.startswith(refused) for line in messages[1:-1]] == [True] * (not can_rewind)
    assert set(server.names) == {run_id}
    shown = numbers(server.history)
    if can_rewind:
        assert shown == recorded(tmp_path)
        assert [row["restarts"] for row in shown] == [0, 0, 1, 1, 1, 1, 1]
    else:  # the first attempt had five lines
        assert shown == first + recorded(tmp_path)[5:]
    assert (tmp_path / "red.png").read_bytes() in server.files.values()
    assert not list(tmp_path.glob("wandb/offline-run-*"))


@pytest.mark.full
def test_lines_continue_after_steps_that_pictures_have_used(tmp_path, server):
    """A finished run is trained on. The pictures are rows of the service, but not lines of the
    record."""
    server.can_rewind = False
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    for restarts, steps in enumerate((range(3), range(3, 6))):
        record = Record(tmp_path, LogConfig(wandb="online"), True, total_steps=6)
        record.write("start", max(steps.start - 1, 0), restarts=restarts)
        record.start_wandb({})
        for step in steps:
            record.write("train", step, loss=1 / (step + 1))
        record.log_pictures({"curves": tmp_path / "red.png"})
        record.close()
    assert [row["global_step"] for row in numbers(server.history)] == [*range(6)]
    assert numbers(server.history) == recorded(tmp_path)


@pytest.mark.full
def test_the_next_start_sends_lines_that_the_service_lacks(tmp_path, server):
    """The service has lost the end of the first attempt, as after the loss of a host."""
    one_run(tmp_path, range(0, 6))
    del server.history[3:]
    one_run(tmp_path, range(6, 8), restarts=1)
    assert numbers(server.history) == recorded(tmp_path)
    assert [row["global_step"] for row in recorded(tmp_path)] == [*range(6), 5, 6, 7, 7]


def test_a_rewound_run_is_shown_without_its_discarded_steps(tmp_path):
    record = Record(tmp_path, LogConfig(wandb="offline"), True, total_steps=10)
    record.write("start", 0, restarts=0)
    record.start_wandb({})
    for step in range(1, 6):
        record.write("train", step, loss=float(step))
    wait_for(lambda: parts(tmp_path))
    record.go_back(2, "back", at_step=5)
    for step in range(4, 8):
        record.write("train", step, loss=10.0 * step)
    record.close()
    (part,) = parts(tmp_path)
    shown = numbers(read_wandb(part)[2])
    assert shown == recorded(tmp_path)
    assert [row["global_step"] for row in shown] == [1, 2, 2, 4, 5, 6, 7]


@pytest.mark.full
@pytest.mark.parametrize("is_synced_between", [False, True])
def test_the_printed_command_uploads_each_line_once(
    tmp_path, monkeypatch, capfd, is_synced_between
):
    folder = tmp_path / "my run"
    server = Server()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def sync() -> None:
        command = capfd.readouterr().err.splitlines()[-1].split("with: ")[1]
        with monkeypatch.context() as with_key:
            use_server(with_key, server.url)
            done = subprocess.run(
                command, shell=True, capture_output=True, text=True, check=False, cwd=tmp_path
            )
        assert done.returncode == 0, done.stderr

    one_run(folder, range(0, 4))
    before = recorded(folder)
    if is_synced_between:
        sync()
    time.sleep(1.1 - time.time() % 1)
    one_run(folder, range(2, 6), restarts=1)
    sync()
    server.leave()
    if is_synced_between:  # uploaded rows stay, and repeated rows are not stored twice
        assert numbers(server.history) == before + recorded(folder)[len(before) :]
    else:
        assert numbers(server.history) == recorded(folder)
    assert list(folder.glob("wandb/offline-run-*/*.wandb.synced"))


@pytest.mark.full
def test_shows_a_repeatedly_killed_run_once(shards, tmp_path):
    """With real processes: kill -9 after each of three checkpoints, then the same command."""
    config = write_config(tmp_path, shards, steps=12)
    run_dir = tmp_path / "run"
    settings = ("log.wandb=offline", "checkpoint.every_steps=3")
    for step in (3, 6, 9):
        killed = Background(config, run_dir, *settings, ranks=0)
        killed.wait_for_checkpoint(step)
        killed.kill_all()
        wait_for(lambda: not wandb_pids())
        time.sleep(1.1 - time.time() % 1)
    train(config, run_dir, *settings)
    (part,) = parts(run_dir)
    shown = numbers(read_wandb(part)[2])
    assert shown == recorded(run_dir)
    assert [row["global_step"] for row in shown if "train/loss" in row] == list(range(1, 13))
    assert {row["restarts"] for row in shown} == {0, 1, 2, 3}


# --- processes that die ---------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["wandb_process.py", "wandb-core"])
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_shows_the_whole_run_after_a_process_of_wandb_dies_or_hangs(
    tmp_path, capfd, monkeypatch, program, number
):
    def strike() -> None:
        wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")))
        signal_ours(program, number)
        time.sleep(1.1)  # W&B names its folders by the second

    if number == signal.SIGSTOP:
        monkeypatch.setattr(wandb_logger, "LIMITS_S", {**wandb_logger.LIMITS_S, "end": 5.0})
    one_run(tmp_path, range(4), setting="offline", meanwhile=strike)
    wait_for(lambda: not wandb_pids())
    assert re.search(
        r"^wandb: offline \(.*\); upload with: wandb sync ", capfd.readouterr().err, re.M
    )
    assert numbers(read_wandb(parts(tmp_path)[-1])[2]) == expected(range(4))
    assert len(record_of(tmp_path)) == 6


def test_shows_a_killed_training_to_its_last_line_and_leaves_no_process(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from vit.config.schema import LogConfig
from vit.loggers.record import Record
from vit.loggers import wandb_logger
record = Record(Path({str(tmp_path)!r}), LogConfig(), True, total_steps=9)
record.write("start", 0, restarts=0)
record.start_wandb({{}})
for step in range(3):
    record.write("train", step, loss=1 / (step + 1))
record.write("eval", 2, top1=50.0)
assert "wandb" not in sys.modules
print("written", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.kill()
    process.communicate()
    wait_for(lambda: not wandb_pids())
    (part,) = parts(tmp_path)
    assert numbers(read_wandb(part)[2]) == expected(range(3))


def test_wandb_finishes_although_all_processes_of_a_job_get_signals(tmp_path):
    """Slurm sends SIGTERM to every process; the training saves and closes the record, and W&B must
    wait for that."""

    def terminate() -> None:
        wait_for(lambda: parts(tmp_path))
        pids.extend(signal_ours("wandb_process.py", signal.SIGTERM, signal.SIGINT))

    pids: list[int] = []
    one_run(tmp_path, range(4), meanwhile=terminate)
    assert pids
    (part,) = parts(tmp_path)
    assert numbers(read_wandb(part)[2]) == expected(range(4))


def test_reports_a_missing_wandb_in_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "wandb.py").write_text("print('noise on stdout')\nraise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one_run(tmp_path / "run")
    (message,) = capfd.readouterr().err.splitlines()
    assert (
        message
        == "wandb: not installed: metrics.jsonl only (pip install wandb, or log.wandb=off to"
        " silence this)"
    )
    assert len(record_of(tmp_path / "run")) == 5
    # The run's end does not wait for a process that has reported that it does nothing.
    console = tmp_path / "run" / "wandb" / "console.log"
    wait_for(lambda: console.read_text() == "noise on stdout\n")


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "variable", "mode"),
    [
        ("off", "online", "off"),
        ("online", "disabled", "off"),
        ("auto", "", "online"),
        ("auto", "offline", "offline"),
        ("auto", "dryrun", "offline"),
        ("online", "offline", "online"),
        ("offline", "online", "offline"),
    ],
)
def test_the_mode_follows_the_config_and_then_wandbs_own_variable(
    monkeypatch, setting, variable, mode
):
    monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_logger.wanted_mode(setting) == mode


@pytest.mark.parametrize(("setting", "environment"), [("off", None), ("auto", "disabled")])
def test_wandb_off_writes_nothing_but_the_record(tmp_path, monkeypatch, setting, environment):
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    one_run(tmp_path, setting=setting)
    assert not wandb_pids()
    assert not list(tmp_path.glob("*wandb*"))
    assert len(record_of(tmp_path)) == 5
