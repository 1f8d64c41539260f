"""Train with the real wandb package, and serve the part of W&B's API that wandb-core calls."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from proc import all_pids, command_line, environment_of

from vit.config.schema import LogConfig
from vit.extras.loggers.wandb_logger import WandbProcess
from vit.loggers.record import Record, wandb_mode
from vit.run_folder.paths import METRICS_FILE

KEY = "0123456789abcdef" * 2 + "01234567"


def use_server(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", url)


def read_wandb(path: Path) -> tuple[str, dict, list[dict]]:
    """Read the run id, the config and the history from a .wandb file. The file contains protobuf
    messages in LevelDB's log format, with blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record as Message  # type: ignore[attr-defined]

    data = path.read_bytes()
    at = 7
    payload = b""
    payloads = []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if left < 7 or kind == 0:
            at += left
            continue
        part = data[at + 7 : at + 7 + length]
        at = at + 7 + length
        payload = part if kind in (1, 2) else payload + part  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            payloads.append(payload)

    run_id = ""
    config: dict[str, Any] = {}
    history = []
    for payload in payloads:
        message = Message()
        message.ParseFromString(payload)
        if message.HasField("run"):
            run_id = message.run.run_id
            config |= {item.key: json.loads(item.value_json) for item in message.run.config.update}
        if message.HasField("history"):
            history.append(
                {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in message.history.item
                }
            )
    return run_id, config, history


def parts(folder: Path) -> list[Path]:
    """Return the offline folders of a run in the order in which they were created."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name)


def numbers(history: list[dict]) -> list[dict]:
    lines = [
        {key: value for key, value in line.items() if not key.startswith(("_", "report/"))}
        for line in history
    ]
    return [line for line in lines if len(line) > 1]


def expected(steps: range, restarts: int = 0) -> list[dict]:
    """Return the rows that a run started with `one_run` must log."""
    trained = [
        {"global_step": step, "restarts": restarts, "train/loss": 1 / (step + 1)} for step in steps
    ]
    return [*trained, {"global_step": steps[-1], "restarts": restarts, "eval/top1": 50.0}]


def recorded(folder: Path) -> list[dict]:
    """Return the rows that W&B must show, which are all lines of metrics.jsonl that are not
    replaced by a later line."""
    lines = record_of(folder)
    restarts = 0
    rows = []
    for number, line in enumerate(lines):
        restarts = line.get("restarts", restarts)
        is_replaced = any(
            later["kind"] == "start" and later["step"] < line["step"]
            for later in lines[number + 1 :]
        )
        if line["kind"] not in ("train", "eval", "fault") or is_replaced:
            continue
        row = {
            f"{line['kind']}/{key}": value
            for key, value in line.items()
            if key not in ("kind", "step") and isinstance(value, int | float)
        }
        if row:
            rows.append({"global_step": line["step"], "restarts": restarts, **row})
    return rows


def one_run(
    folder: Path,
    steps: range = range(3),
    setting: Literal["auto", "online", "offline", "off"] = "auto",
    restarts: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> float:
    """Train a short run, and return the time in seconds that W&B took to start and finish."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("optim: {lr: 0.1}\n")
    record = Record(folder, LogConfig(wandb=setting), True, total_steps=10)
    record.write("start", max(steps.start - 1, 0), restarts=restarts)
    began = time.monotonic()
    record.start_loggers([WandbProcess] if wandb_mode(setting) != "off" else [])
    spent_s = time.monotonic() - began
    for step in steps:
        record.write("train", step, loss=1 / (step + 1), note="text", grad_norm=float("nan"))
        if step == steps[len(steps) // 2]:
            meanwhile()
    record.write("eval", steps[-1], top1=50.0)
    began = time.monotonic()
    record.close()
    return spent_s + time.monotonic() - began


def record_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def wait_for(condition: Callable[[], object], limit_s: float = 240) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wandb_pids() -> list[int]:
    """Return the ids of the W&B processes that this test has started. Their environment contains
    the test's home folder."""
    return [
        pid
        for pid in all_pids()
        if re.search("wandb_process.py|wandb-core", command_line(pid))
        and environment_of(pid).get("HOME") == os.environ["HOME"]
    ]


def signal_ours(program: str, *signals: signal.Signals) -> list[int]:
    """Send a signal to each of `wandb_pids` whose command line contains `program`, and return the
    ids of these processes."""
    chosen = [pid for pid in wandb_pids() if program in command_line(pid)]
    for pid in chosen:
        for each in signals:
            with suppress(ProcessLookupError):  # W&B also starts short-lived processes
                os.kill(pid, each)
    return chosen


class Server:
    """A W&B server that supports runs but not tables. The server's mode is either "ok" or
    "hang"."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.history = list[dict]()
        self.files = dict[str, bytes]()
        self.names = list[str]()
        self.bodies = list[bytes]()
        self.released = threading.Event()
        self.num_probes = 0
        """The number of probes that arrived while the server did not answer."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if server.mode == "hang":
                    server.num_probes += (self.command, self.path) == ("GET", "/")
                    server.released.wait()
                    if server.mode == "hang":
                        return
                answer = json.dumps(server.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> dict:
        if path.startswith("/put/"):
            self.files[path.removeprefix("/put/")] = body
        elif path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            if lines := [json.loads(line) for line in sent.get("content", [])]:
                at = sent["offset"]
                assert at <= len(self.history), "a row is missing"
                self.history[at : at + len(lines)] = lines
        elif path == "/graphql":
            query = json.loads(body)
            self.bodies.append(body)
            return {"data": self.query(query["query"], query.get("variables") or {})}
        return {}

    def query(self, query: str, variables: dict) -> dict:
        project = {"id": "p", "name": "vit", "entity": {"id": "e", "name": "me"}}
        bucket = {
            "id": "b",
            "name": variables.get("name"),
            "displayName": "run",
            "config": "{}",
            "project": project,
        }

        if "upsertBucket" in query:
            self.names.append(variables["name"])
            return {
                "upsertBucket": {
                    "bucket": {**bucket, "historyLineCount": len(self.history)},
                    "inserted": not self.history,
                }
            }

        if "RunResumeStatus" in query and self.history:
            counts = {
                "historyLineCount": len(self.history),
                "logLineCount": 0,
                "eventsLineCount": 0,
            }
            tails = {
                "historyTail": json.dumps([json.dumps(self.history[-1])]),
                "eventsTail": "[]",
                "summaryMetrics": "{}",
            }
            config = {"wandbConfig": '{"t": 1}', "tags": [], "notes": ""}
            return {"model": {**project, "bucket": {**bucket, **counts, **tails, **config}}}

        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in variables["files"]
            ]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}

        return {}

    def leave(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.released.set()
