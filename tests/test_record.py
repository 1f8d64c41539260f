"""The record of a run: whole lines only, restarts replace what they repeat, W&B can do no harm."""

import json
import math
import os
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit.config import LogConfig
from vit.record import METRICS_FILE, Record, duration, read_metrics

OFF = LogConfig(wandb="off")


def record_in(folder: Path, config: LogConfig = OFF, is_main: bool = True) -> Record:
    return Record(folder, config, is_main, total_steps=10)


def written(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


# --- metrics.jsonl ------------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null(tmp_path, value):
    record = record_in(tmp_path)
    record.write("train", 1, loss=value, lr=0.1)
    record.close()
    text = (tmp_path / METRICS_FILE).read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (line["loss"], line["lr"]) == (None, 0.1)


@given(st.integers(0, 200))
def test_a_line_cut_short_by_a_kill_is_gone_after_reopening(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    first = record_in(folder)
    for step in range(3):
        first.write("train", step)
    first.close()
    path = folder / METRICS_FILE
    whole = path.read_bytes()
    os.truncate(path, max(len(whole) - cut, 0))
    survivors = [json.loads(line) for line in whole[: max(len(whole) - cut, 0)].split(b"\n")[:-1]]
    assert read_metrics(path) == survivors, "a plot of a killed run needs no restart before"

    second = record_in(folder)
    second.write("train", 7)
    second.close()
    lines = written(folder)
    assert lines[:-1] == survivors
    assert lines[-1]["step"] == 7


def test_a_restart_replaces_what_came_after_its_checkpoint(tmp_path):
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
    assert written(tmp_path)[:9] == everything, "the file itself only grows"


def test_a_second_restart_from_an_older_checkpoint_replaces_more(tmp_path):
    record = record_in(tmp_path)
    for attempt, first, last in ((1, 0, 6), (2, 4, 9), (3, 2, 3)):
        record.write("start", first, attempt=attempt)
        for step in range(first + 1, last + 1):
            record.write("train", step, attempt=attempt)
    record.close()
    lines = read_metrics(tmp_path / METRICS_FILE)
    assert [(line["step"], line["attempt"]) for line in lines if line["kind"] == "train"] == [(1, 1), (2, 1), (3, 3)]
    assert [line["attempt"] for line in lines if line["kind"] == "start"] == [1, 2, 3], "every start stays on record"


def test_other_ranks_write_and_say_nothing(tmp_path, capsys):
    record = record_in(tmp_path, LogConfig(wandb="offline"), is_main=False)
    record.say("hello")
    record.write("train", 1, loss=1.0)
    record.progress(1, "x")
    record.train_line(1, "x")
    record.start_wandb({})
    record.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_lines_for_people_go_to_stderr_as_they_are(tmp_path, capsys):
    record = record_in(tmp_path)
    record.say("[bold]no markup[/bold] " + "long " * 50)
    record.train_line(3, "step 3")
    record.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["[bold]no markup[/bold] " + "long " * 50, "step 3"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.9, "0:00:59"), (3661, "1:01:01"), (360_000, "100:00:00"), (math.nan, "-:--:--"), (math.inf, "-:--:--")],
)
def test_durations_are_hours_minutes_and_seconds(seconds, text):
    assert duration(seconds) == text


# --- Weights & Biases ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    """No key, no settings of the machine's user; afterwards, W&B's helper process is gone."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    yield
    import wandb

    wandb.teardown()


def read_wandb(path: Path) -> tuple[str, dict, list[dict]]:
    """Run id, config and history of a .wandb file: LevelDB's log framing (blocks of 32 KiB) around W&B's protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record as Message

    data, at, payload, payloads = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if left < 7 or kind == 0:
            at += left
            continue
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        payload = part if kind in (1, 2) else payload + part  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            payloads.append(payload)

    run_id, config, history = "", {}, []
    for payload in payloads:
        message = Message()
        message.ParseFromString(payload)
        if message.HasField("run"):
            run_id = message.run.run_id
            config |= {item.key: json.loads(item.value_json) for item in message.run.config.update}
        if message.HasField("history"):
            history.append(
                {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in message.history.item}
            )
    return run_id, config, history


def one_run(folder: Path, config: LogConfig, steps: range) -> None:
    record = record_in(folder, config)
    record.start_wandb({"optim": {"lr": 0.1}})
    record.write("start", steps.start)
    for step in steps:
        record.write("train", step, loss=1 / (step + 1), note="text", grad_norm=math.nan)
    record.write("eval", steps[-1], top1=50.0)
    record.close()
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # the end of the process: W&B's helper has written everything


def test_without_a_key_a_run_is_kept_offline_under_one_id_and_our_step(tmp_path, no_account, capsys):
    one_run(tmp_path, LogConfig(wandb="auto"), range(0, 3))
    one_run(tmp_path, LogConfig(wandb="auto"), range(3, 5))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.startswith("wandb: offline (no API key); upload later with: wandb sync ") for line in said)

    parts = [read_wandb(path) for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)]
    assert [run_id for run_id, _, _ in parts] == [(tmp_path / "wandb_id").read_text()] * 2
    for _, config, _ in parts:
        assert config["optim"] == {"lr": 0.1}
    own = [{key: value for key, value in line.items() if not key.startswith("_")} for _, _, history in parts for line in history]
    trained = [{"global_step": step, "train/loss": 1 / (step + 1)} for step in range(5)]
    evaluated = [{"global_step": step, "eval/top1": 50.0} for step in (2, 4)]
    assert own == [*trained[:3], evaluated[0], *trained[3:], evaluated[1]]
    assert len(read_metrics(tmp_path / METRICS_FILE)) == 9


def test_an_unreachable_server_means_offline_at_once(tmp_path, no_account, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    one_run(tmp_path, LogConfig(wandb="online"), range(0, 2))
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("wandb: offline (127.0.0.1 cannot be reached); ")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert len(read_wandb(path)[2]) == 3
    assert len(written(tmp_path)) == 4


@pytest.mark.parametrize(("setting", "environment"), [("off", None), ("auto", "disabled")])
def test_wandb_off_writes_nothing_but_the_record(tmp_path, monkeypatch, setting, environment):
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    one_run(tmp_path, LogConfig(wandb=setting), range(0, 3))
    assert not list(tmp_path.glob("*wandb*"))
    assert len(written(tmp_path)) == 5


def test_a_failing_wandb_is_dropped_and_the_record_goes_on(tmp_path, no_account, capsys):
    import wandb

    record = record_in(tmp_path, LogConfig(wandb="offline"))
    record.start_wandb({})
    record.write("train", 1, loss=1.0)
    wandb.teardown()  # W&B's helper process dies under the run
    for step in (2, 3):
        record.write("train", step, loss=1.0)
    record.close()
    assert [line["step"] for line in written(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().err.count("wandb: stopped (") == 1


@pytest.mark.slow
def test_a_server_that_never_answers_does_not_hold_up_a_run(tmp_path, no_account, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0), backlog=50) as deaf:
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        one_run(tmp_path, LogConfig(wandb="auto"), range(0, 2))
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("wandb: [wandb.login()]")]
    assert len(said) == 1
    assert said[0].startswith("wandb: offline (CommError: ")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert len(read_wandb(path)[2]) == 3
    assert len(written(tmp_path)) == 4
