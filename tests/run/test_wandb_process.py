"""W&B shows what the record holds, and nothing that W&B or its server does can harm or hold up a
run.

Real wandb, real processes, real sockets. The server is as much of W&B's API as wandb-core asks for,
and can leave in mid-run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from vit.config.schema import LogConfig
from vit.run import wandb_process
from vit.run.folder import METRICS_FILE
from vit.run.record import Record

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef" * 2 + "01234567"
WAITING_S = 7.0
"""The promise: whatever the server does, a start and an end together wait for no more than this,
and start W&B no more than twice."""


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory, monkeypatch):
    """No key, no proxy, no settings of this machine's user."""
    for name in os.environ:
        if name.startswith("WANDB_") or name.lower().endswith("_proxy") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def limit_s(tmp_path_factory) -> float:
    """What the promise means on this machine as it is now: alone, 2 cores start and end W&B in 1.5
    s."""
    return 2 * one_run(tmp_path_factory.mktemp("clock") / "run", setting="offline") + WAITING_S


def use_server(monkeypatch, url: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", url)


def read_wandb(path: Path) -> tuple[str, dict, list[dict]]:
    """Run id, config and history of a .wandb file: LevelDB's log framing (blocks of 32 KiB) around
    W&B's protobufs."""
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
    config = {}
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
    """The offline parts of a run, in the order in which they were begun."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name)


def numbers(history: list[dict]) -> list[dict]:
    """What was logged, without W&B's own columns and without pictures and tables."""
    lines = [
        {key: value for key, value in line.items() if not key.startswith(("_", "report/"))}
        for line in history
    ]
    return [line for line in lines if len(line) > 1]


def expected(steps: range, restarts: int = 0) -> list[dict]:
    """The same of a `one_run`."""
    trained = [
        {"global_step": step, "restarts": restarts, "train/loss": 1 / (step + 1)} for step in steps
    ]
    return [*trained, {"global_step": steps[-1], "restarts": restarts, "eval/top1": 50.0}]


def one_run(
    folder: Path,
    steps: range = range(3),
    setting: str = "auto",
    restarts: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> float:
    """A short training; returns the seconds that W&B took of its time, in the end and otherwise."""
    folder.mkdir(exist_ok=True)
    record = Record(folder, LogConfig(wandb=setting), True, total_steps=10)
    record.write("start", steps.start, restarts=restarts)
    began = time.monotonic()
    record.start_wandb({"optim": {"lr": 0.1}})
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


def wait_for(condition: Callable[[], object], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ours() -> list[int]:
    """Processes of this test that follow a feed or serve W&B: those with its home."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if (
                b"wandb_process.py" in words or b"wandb-core" in words
            ) and f"HOME={os.environ['HOME']}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


# --- servers --------------------------------------------------------------------------------------


class Server:
    """W&B's server as far as a run without tables needs it. `mode`: ok or hang."""

    def __init__(self, mode: str = "ok") -> None:
        self.mode = mode
        self.history = list[dict]()
        self.files = dict[str, bytes]()
        self.names = list[str]()
        self.bodies = list[bytes]()
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if server.mode == "hang":
                    server.released.wait()
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
            for line in (
                json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            ):
                self.history.append(json.loads(line))
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
        """From here on, connections are refused."""
        self._http.shutdown()
        self._http.server_close()
        self.released.set()


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    server = Server()
    use_server(monkeypatch, server.url)
    yield server
    server.leave()


@pytest.fixture
def answering() -> Iterator[Callable[[list[bytes]], str]]:
    """Makes servers that send the given bytes, half a second apart, to whoever connects."""
    sockets = []

    def serve(listener: socket.socket, pieces: list[bytes]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(0.5 if len(pieces) > 1 else 0)
                except OSError:
                    continue

    def make(pieces: list[bytes]) -> str:
        sockets.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=serve, args=(sockets[-1], pieces), daemon=True).start()
        return f"http://127.0.0.1:{sockets[-1].getsockname()[1]}"

    yield make
    for listener in sockets:
        listener.close()


# --- what W&B is shown ----------------------------------------------------------------------------


def test_an_offline_run_holds_config_numbers_pictures_and_tables_on_our_step_under_one_id(
    tmp_path, capfd
):
    folder = tmp_path / "my run"
    folder.mkdir()
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    rows = [["seven", 1.5], ["nine", None]]
    # the second goes on from a checkpoint at step 2
    for restarts, steps in enumerate((range(0, 4), range(2, 6))):
        record = Record(folder, LogConfig(), True, total_steps=6, first_step=steps.start)
        record.write("start", steps.start, restarts=restarts)
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

    said = capfd.readouterr().err.splitlines()
    command = f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    assert (
        sum(
            line.startswith("wandb: offline (No API key configured); upload ")
            and line.endswith(f"with: {command}")
            for line in said
        )
        == 2
    )
    assert (
        sum(line.startswith("wandb: cannot show report/gone (FileNotFoundError") for line in said)
        == 2
    )
    assert (
        sum(line.startswith("wandb: cannot show report/uneven (ValueError") for line in said) == 2
    )
    assert all(line.startswith("wandb: ") for line in said), "W&B itself prints nothing here"

    read = [read_wandb(path) for path in parts(folder)]
    assert [run_id for run_id, _, _ in read] == [(folder / "wandb_id").read_text()] * 2
    for _, config, _ in read:
        assert (config["optim"], config["provenance"]) == ({"lr": 0.1}, {"git": "abc"})
    assert [numbers(history) for _, _, history in read] == [
        expected(range(0, 4)),
        expected(range(2, 6), restarts=1),
    ]
    for part, (_, _, history) in zip(parts(folder), read, strict=True):
        (picture,) = (line for line in history if line.get("report/curves._type") == "image-file")
        assert picture["global_step"] in (3, 5)
        assert (part.parent / "files" / picture["report/curves.path"]).read_bytes() == (
            tmp_path / "red.png"
        ).read_bytes()
        (table,) = (line for line in history if line.get("report/classes._type") == "table-file")
        assert json.loads((part.parent / "files" / table["report/classes.path"]).read_text()) == {
            "columns": ["class", "loss"],
            "data": rows,
        }
    assert not list(folder.glob(".wandb-feed*"))
    wait_for(lambda: not ours())


def test_online_all_steps_arrive_under_one_id_over_restarts(tmp_path, server, capfd):
    one_run(tmp_path, range(0, 4))
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    record = Record(tmp_path, LogConfig(wandb="online"), True, total_steps=6, first_step=2)
    record.write("start", 2, restarts=1)
    record.start_wandb({})
    for step in range(2, 6):
        record.write("train", step, loss=1 / (step + 1))
    record.write("eval", 5, top1=50.0)
    record.log_pictures({"curves": tmp_path / "red.png"})
    record.close()
    run_id = (tmp_path / "wandb_id").read_text()
    # which is said where it takes seconds
    said = [line for line in capfd.readouterr().err.splitlines() if "uploading" not in line]
    assert said == [f"wandb: {server.url}/me/vit/runs/{run_id}"] * 2
    assert set(server.names) == {run_id}
    assert numbers(server.history) == expected(range(0, 4)) + expected(range(2, 6), restarts=1)
    assert (tmp_path / "red.png").read_bytes() in server.files.values()
    assert not list(tmp_path.glob("wandb/offline-run-*"))


def test_the_command_that_is_said_uploads_all_parts(tmp_path, monkeypatch, capfd):
    one_run(tmp_path / "my run", range(0, 4))
    time.sleep(1.1 - time.time() % 1)
    one_run(tmp_path / "my run", range(2, 6), restarts=1)
    command = capfd.readouterr().err.splitlines()[-1].split("with: ")[1]
    server = Server()
    use_server(monkeypatch, server.url)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    server.leave()
    assert done.returncode == 0, done.stderr
    assert numbers(server.history) == expected(range(0, 4)) + expected(range(2, 6), restarts=1)
    assert len(list((tmp_path / "my run").glob("wandb/offline-run-*/*.wandb.synced"))) == 2


# --- servers that do harm -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("refuses", "no run after 3 s"),
        ("has no such name", "no run after 3 s"),
        ("drops packets", "no run after 3 s"),
        ("accepts and is silent", "no run after 3 s"),
        ("answers a byte at a time", "no run after 3 s"),
        ("401", "CommError: .* error 401"),
        ("403", "CommError: .* error 403"),
        ("500", "no run after 3 s"),
        ("a login page", "CommError: .* invalid character '<'"),
        ("another protocol", "no run after 3 s"),
    ],
)
def test_a_bad_server_means_offline_and_costs_seconds_at_the_end_of_a_run_at_most(
    tmp_path, monkeypatch, capfd, limit_s, answering, case, reason
):
    held = []
    if case == "refuses":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    elif case == "has no such name":
        url = "http://no.such.host.invalid"
    elif case in ("drops packets", "accepts and is silent"):
        held.append(
            socket.create_server(("127.0.0.1", 0), backlog=0 if case == "drops packets" else 9)
        )
        url = f"http://127.0.0.1:{held[0].getsockname()[1]}"
        # a full queue: Linux drops what comes after
        for _ in range(8 if case == "drops packets" else 0):
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(held[0].getsockname())
    else:
        page = b"<html>log in</html>" if case == "a login page" else b""
        status = f"{case} No" if case.isdigit() else "200 OK"
        pieces = [f"HTTP/1.1 {status}\r\nContent-Length: {len(page)}\r\n\r\n".encode() + page]
        pieces = {"another protocol": [b"SSH-2.0\n"], "answers a byte at a time": [b"H"] * 40}.get(
            case, pieces
        )
        url = answering(pieces)
    use_server(monkeypatch, url)
    spent_s = one_run(tmp_path)
    for each in held:
        each.close()
    assert spent_s < limit_s

    (said,) = capfd.readouterr().err.splitlines()
    assert re.match(rf"wandb: offline \({reason}.*\); upload with: wandb sync ", said), said
    (part,) = parts(tmp_path)
    assert numbers(read_wandb(part)[2]) == expected(range(3))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    one_run(tmp_path / "off")
    assert record_of(tmp_path) == record_of(tmp_path / "off"), (
        "W&B is a view: the record is the same"
    )
    wait_for(lambda: not ours())


def test_in_a_longer_run_the_reason_is_wandbs_own(tmp_path, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        use_server(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setattr(wandb_process, "INIT_S", 2.0)
    one_run(tmp_path, meanwhile=lambda: wait_for(lambda: not ours()))
    (said,) = capfd.readouterr().err.splitlines()
    assert re.match(r"wandb: offline \(CommError: .* connection refused\); upload with: ", said), (
        said
    )
    assert numbers(read_wandb(parts(tmp_path)[0])[2]) == expected(range(3))


def test_a_server_that_hangs_means_offline(tmp_path, server, capfd, limit_s):
    server.mode = "hang"
    assert one_run(tmp_path) < limit_s
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("wandb: offline (no run after 3 s); upload with: ")
    assert numbers(read_wandb(parts(tmp_path)[0])[2]) == expected(range(3))
    wait_for(lambda: not ours())


@pytest.mark.parametrize("how", ["leaves", "hangs"])
def test_a_server_lost_in_mid_run_costs_seconds_and_no_data(tmp_path, server, capfd, limit_s, how):
    def lose() -> None:
        wait_for(lambda: server.names)
        if how == "hangs":
            server.mode = "hang"
        else:
            server.leave()

    assert one_run(tmp_path, range(5), meanwhile=lose) < limit_s
    first, last = capfd.readouterr().err.splitlines()
    assert first.startswith(f"wandb: {server.url}/me/vit/runs/")
    assert re.match(
        r"wandb: offline \(http://127.0.0.1:\d+ does not answer: .*\); upload with: wandb sync ",
        last,
    ), last
    assert numbers(read_wandb(parts(tmp_path)[0])[2]) == expected(range(5))
    assert len(record_of(tmp_path)) == 7
    server.released.set()
    wait_for(lambda: not ours())


# --- processes that die ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["wandb_process.py", "wandb-core"])
def test_if_a_process_of_wandb_dies_all_of_the_run_is_shown_again(tmp_path, capfd, which):
    def kill() -> None:
        wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")))
        for pid in ours():
            if which in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        time.sleep(1.1)  # W&B names its folders by the second

    one_run(tmp_path, range(4), setting="offline", meanwhile=kill)
    assert re.search(
        r"^wandb: offline \(.*\); upload with: wandb sync ", capfd.readouterr().err, re.M
    )
    assert numbers(read_wandb(parts(tmp_path)[-1])[2]) == expected(range(4))
    assert len(record_of(tmp_path)) == 6


def test_a_killed_training_is_shown_to_its_last_line_and_leaves_no_process(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from vit.config.schema import LogConfig
from vit.run.record import Record
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
    wait_for(lambda: not ours())
    (part,) = parts(tmp_path)
    assert numbers(read_wandb(part)[2]) == expected(range(3))


def test_signals_to_all_processes_of_a_job_leave_wandb_its_time(tmp_path):
    """Slurm sends SIGTERM to every process; the training saves and closes the record, and W&B has
    to wait for that."""

    def terminate() -> None:
        wait_for(lambda: parts(tmp_path))
        for pid in ours():
            if "wandb_process.py" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)

    one_run(tmp_path, range(4), meanwhile=terminate)
    (part,) = parts(tmp_path)
    assert numbers(read_wandb(part)[2]) == expected(range(4))


def test_without_wandb_one_line_says_so(tmp_path, monkeypatch, capfd):
    (tmp_path / "wandb.py").write_text("print('noise on stdout')\nraise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one_run(tmp_path / "run")
    (said,) = capfd.readouterr().err.splitlines()
    assert (
        said == "wandb: not installed: metrics.jsonl only (pip install wandb, or log.wandb=off to"
        " silence this)"
    )
    assert len(record_of(tmp_path / "run")) == 5
    assert (tmp_path / "run" / "wandb" / "console.log").read_text() == "noise on stdout\n"


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
    assert wandb_process.wanted_mode(setting) == mode


@pytest.mark.parametrize(("setting", "environment"), [("off", None), ("auto", "disabled")])
def test_wandb_off_writes_nothing_but_the_record(tmp_path, monkeypatch, setting, environment):
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert one_run(tmp_path, setting=setting) < 1
    assert not list(tmp_path.glob("*wandb*"))
    assert len(record_of(tmp_path)) == 5
