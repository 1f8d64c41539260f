"""Test that W&B shows the metrics of a run, and that failures of W&B neither break nor delay the
run.

The tests use the real wandb package, real processes and real sockets. The test server implements
the part of W&B's API that wandb-core calls.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from extras.loggers.wandb_runs import (
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
from vit.extras.loggers import wandb_logger, wandb_process
from vit.extras.loggers.wandb_logger import WandbProcess
from vit.extras.loggers.wandb_process import Feed
from vit.extras.loggers.wandb_upload import ToWandb
from vit.loggers.record import Record, wandb_mode

ROOT = Path(__file__).parents[3]


def remedy(folder: Path, variable: str = "") -> str:
    command = f"{variable}python launch/report.py {shlex.quote(str(folder))} --to-wandb"
    return f"metrics.jsonl has everything; to upload it: {command}"


# --- what W&B shows -------------------------------------------------------------------------------


def test_an_offline_run_has_all_data_by_global_step_under_one_id(tmp_path, capfd):
    """The second process resumes from the checkpoint at step 2."""
    folder = tmp_path / "my run"
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    rows = [["seven", 1.5], ["nine", None]]
    one_run(folder, range(0, 4), setting="offline")
    first_message = capfd.readouterr().err
    record = Record(folder, LogConfig(wandb="offline"), True, total_steps=6, first_step=2)
    record.write("start", 1, restarts=1, git="abc", command="launch/train.py --config x")
    record.start_loggers([WandbProcess])
    for step in range(2, 6):
        record.write("train", step, loss=1 / (step + 1), note="text", grad_norm=float("nan"))
    record.write("end", 5, outcome="finished")
    record.log_pictures({"gone": tmp_path / "gone.png", "curves": tmp_path / "red.png"})
    record.log_table("uneven", ["class", "loss"], [["one"]])
    record.log_table("classes", ["class", "loss"], rows)
    # Wait for the next second, because W&B names folders by date and time in seconds.
    time.sleep(1.1 - time.time() % 1)
    record.close()

    (part,) = parts(folder)  # the upload of the whole run replaces that of its first part
    assert first_message.startswith("wandb: offline; upload with: wandb sync ")
    messages = capfd.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in messages] == [
        "wandb: cannot show report/gone",
        "wandb: cannot show report/uneven",
        f"wandb: offline; upload with: wandb sync {shlex.quote(str(part.parent))}",
    ]
    run_id, config, history = read_wandb(part)
    assert run_id == (folder / "wandb_id").read_text().split()[0]
    assert (config["optim"], config["provenance"]["git"]) == ({"lr": 0.1}, "abc")
    assert numbers(history) == recorded(folder)
    assert [row["global_step"] for row in recorded(folder)] == [0, 1, 2, 3, 4, 5]
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
    wait_for(lambda: not wandb_pids())
    assert not list((folder / "wandb").glob("tmp-*"))


def test_online_each_line_arrives_once_under_one_id_over_restarts(tmp_path, server, capfd):
    """The second attempt repeats steps 2 and 3, but W&B must keep the values of the first
    attempt."""
    one_run(tmp_path, range(0, 4))
    first = numbers(server.history)
    assert first == expected(range(4))
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    record = Record(tmp_path, LogConfig(wandb="online"), True, total_steps=6, first_step=2)
    record.write("start", 1, restarts=1)
    record.start_loggers([WandbProcess])
    for step in range(2, 6):
        record.write("train", step, loss=1 / (step + 1))
    record.write("eval", 5, top1=50.0)
    record.log_pictures({"curves": tmp_path / "red.png"})
    record.close()
    run_id, _ = (tmp_path / "wandb_id").read_text().split()
    # Ignore a progress message that W&B prints only if the upload takes several seconds.
    messages = [line for line in capfd.readouterr().err.splitlines() if "uploading" not in line]
    assert messages == [f"wandb: {server.url}/me/vit/runs/{run_id}"] * 2
    assert set(server.names) == {run_id}
    assert numbers(server.history) == first + recorded(tmp_path)[len(first) :]
    assert (tmp_path / "red.png").read_bytes() in server.files.values()
    assert not list(tmp_path.glob("wandb/offline-run-*"))


def test_lines_continue_after_steps_that_pictures_have_used(tmp_path, server):
    """W&B counts each logged image as a step, but metrics.jsonl has no such steps."""
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    for restarts, steps in enumerate((range(3), range(3, 6))):
        record = Record(tmp_path, LogConfig(wandb="online"), True, total_steps=6)
        record.write("start", max(steps.start - 1, 0), restarts=restarts)
        record.start_loggers([WandbProcess])
        for step in steps:
            record.write("train", step, loss=1 / (step + 1))
        record.log_pictures({"curves": tmp_path / "red.png"})
        record.close()
    assert [row["global_step"] for row in numbers(server.history)] == [*range(6)]
    assert numbers(server.history) == recorded(tmp_path)


@pytest.mark.full
def test_the_next_start_sends_lines_that_the_service_lacks(tmp_path, server):
    """The server has lost the last lines of the first attempt, which can happen when a host
    fails."""
    one_run(tmp_path, range(0, 6))
    del server.history[3:]
    one_run(tmp_path, range(6, 8), restarts=1)
    assert numbers(server.history) == recorded(tmp_path)
    assert [row["global_step"] for row in recorded(tmp_path)] == [*range(6), 5, 6, 7, 7]


@pytest.mark.full
def test_the_printed_commands_upload_each_line_once(tmp_path, monkeypatch, capfd, server):
    """The first attempt is uploaded by `wandb sync`. Only the server then knows which lines have
    been uploaded."""
    folder = tmp_path / "my run"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    one_run(folder, range(0, 4), setting="offline")
    command = capfd.readouterr().err.splitlines()[-1].split("with: ")[1]
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    before = recorded(folder)
    assert numbers(server.history) == before
    one_run(folder, range(2, 6), setting="offline", restarts=1)
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.endswith(f"would duplicate); {remedy(folder, 'WANDB_MODE=online ')}")
    ToWandb(folder, is_in_use=False).show({}, print)
    assert numbers(server.history) == before + recorded(folder)[len(before) :]


@pytest.mark.full
def test_shows_a_repeatedly_killed_run_once(shards, tmp_path):
    """The test kills real processes after each of three checkpoints, and restarts them with the
    same command."""
    config = write_config(tmp_path, shards, steps=12)
    run_dir = tmp_path / "run"
    settings = ("log.wandb=offline", "checkpoint.every_steps=3")
    for step in (3, 6, 9):
        killed = Background(config, run_dir, *settings, ranks=0)
        killed.wait_for_checkpoint(step)
        killed.kill_all()
    train(config, run_dir, *settings)
    (part,) = parts(run_dir)
    shown = numbers(read_wandb(part)[2])
    assert shown == recorded(run_dir)
    assert [row["global_step"] for row in shown if "train/loss" in row] == list(range(1, 13))
    assert {row["restarts"] for row in shown} == {0, 1, 2, 3}


# --- processes that die ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program", ["wandb_process.py", pytest.param("wandb-core", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_one_command_uploads_what_a_process_that_dies_or_hangs_has_not(
    tmp_path, capfd, monkeypatch, server, program, number
):
    def strike() -> None:
        wait_for(lambda: server.history)
        signal_ours(program, number)

    if number == signal.SIGSTOP:
        monkeypatch.setattr(wandb_logger, "FINISH_S", 5.0)
    one_run(tmp_path, range(4), meanwhile=strike)
    wait_for(lambda: not wandb_pids())
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("wandb: stopped (")
    assert message.endswith(f"); {remedy(tmp_path)}")
    assert len(record_of(tmp_path)) == 6
    ToWandb(tmp_path, is_in_use=False).show({}, print)
    assert numbers(server.history) == expected(range(4))


KILLED = """
import sys, time
from pathlib import Path
from vit.config.schema import LogConfig
from vit.extras.loggers.wandb_logger import WandbProcess
from vit.loggers.record import Record
record = Record(Path(sys.argv[1]), LogConfig(), True, total_steps=9)
record.write("start", 0, restarts=0)
record.start_loggers([WandbProcess])
for step in range(3):
    record.write("train", step, loss=1 / (step + 1))
record.write("eval", 2, top1=50.0)
assert "wandb" not in sys.modules
print("written", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_hung", [False, pytest.param(True, marks=pytest.mark.full)])
def test_shows_a_killed_training_to_its_last_line_and_leaves_no_process(tmp_path, server, is_hung):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    if is_hung:
        wait_for(lambda: server.names)
        signal_ours("wandb-core", signal.SIGSTOP)
    process.kill()
    process.communicate()
    wait_for(lambda: not wandb_pids())
    assert is_hung or numbers(server.history) == expected(range(3))


def test_wandb_finishes_although_all_processes_of_a_job_get_signals(tmp_path, server):
    """When a job ends, Slurm sends SIGTERM to every process. The W&B process must continue until
    training has saved and has closed metrics.jsonl."""

    def terminate() -> None:
        wait_for(lambda: server.names)
        pids.extend(signal_ours("wandb_process.py", signal.SIGTERM, signal.SIGINT))

    pids: list[int] = []
    one_run(tmp_path, range(4), meanwhile=terminate)
    assert pids
    assert numbers(server.history) == expected(range(4))


def test_reports_a_wandb_that_is_missing_or_broken_in_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "wandb.py").write_text("print('noise on stdout')\nraise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_dir = tmp_path / "run"
    one_run(run_dir)
    assert capfd.readouterr().err == (
        f"wandb: stopped (ImportError: not here); {remedy(run_dir)}\n"
    )
    assert (run_dir / "wandb" / "console.log").read_text() == "noise on stdout\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    one_run(tmp_path / "other")
    assert capfd.readouterr().err == (
        "wandb: not installed: metrics.jsonl only (pip install wandb, or log.wandb=off)\n"
    )
    assert record_of(run_dir) == record_of(tmp_path / "other")


def test_a_failure_before_the_first_printed_line_is_reported(tmp_path, monkeypatch, capfd):
    (tmp_path / "yaml.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one_run(tmp_path / "run")
    reason = "its process ended with status 1: see wandb/console.log"
    assert capfd.readouterr().err == f"wandb: stopped ({reason}); {remedy(tmp_path / 'run')}\n"
    assert "not here" in (tmp_path / "run" / "wandb" / "console.log").read_text()


def test_a_run_that_never_opened_online_can_be_written_for_a_later_upload(tmp_path, monkeypatch):
    """W&B creates the run's folder before it contacts the server. The server in this test never
    answers."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    use_server(monkeypatch, address)
    one_run(tmp_path, range(4))
    assert list(tmp_path.glob("wandb/run-*"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    ToWandb(tmp_path, is_in_use=False).show({}, print)
    (part,) = parts(tmp_path)
    assert numbers(read_wandb(part)[2]) == expected(range(4))


def test_reads_a_record_that_was_removed_and_restored_to_its_end(tmp_path):
    record = Record(tmp_path, LogConfig(wandb="off"), True, total_steps=9)
    record.write("train", 1, loss=1.0)
    feed = Feed(tmp_path, parent=os.getppid())
    feed.read()
    (tmp_path / "metrics.jsonl").unlink()
    feed.read()
    for step in (2, 3):
        record.write("train", step, loss=1.0)
        feed.read()
    record.close()
    assert [step for step, _ in feed.rows.rows] == [1, 2, 3]


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
    assert wandb_mode(setting) == mode


@pytest.mark.parametrize(("variable", "project"), [("digits", "digits"), ("", "vit")])
def test_wandbs_own_variable_names_the_project(variable, project, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", variable)
    asked = {}
    run = SimpleNamespace(define_metric=lambda *name, **options: None)

    def init(**options):
        asked.update(options)
        return run

    wandb = SimpleNamespace(init=init, Settings=lambda **options: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    opened, _ = wandb_process._open_run(wandb, tmp_path, "offline", {})
    assert opened is run
    assert asked["project"] == project
    monkeypatch.setenv("WANDB_PROJECT", "another")
    wandb_process._open_run(wandb, tmp_path, "offline", {})
    assert asked["project"] == project, "a later upload must continue the run in its project"


@pytest.mark.parametrize(("setting", "environment"), [("off", None), ("auto", "disabled")])
def test_wandb_off_writes_nothing_but_the_record(tmp_path, monkeypatch, setting, environment):
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    one_run(tmp_path, setting=setting)
    assert not wandb_pids()
    assert not list(tmp_path.glob("*wandb*"))
    assert len(record_of(tmp_path)) == 5


def test_without_a_key_the_run_continues_and_one_line_has_the_remedy(tmp_path, capfd):
    one_run(tmp_path)
    (message,) = capfd.readouterr().err.splitlines()
    assert message.startswith("wandb: stopped (not logged in to Weights & Biases, a website")
    assert "log in with `wandb login`, or hide this line with log.wandb=off" in message
    assert message.endswith(remedy(tmp_path))
    wait_for(lambda: not wandb_pids())
