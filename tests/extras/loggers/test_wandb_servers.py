"""Test that a run is neither broken nor delayed by any behavior of a W&B server. The tests use the
real wandb package and real sockets."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from extras.loggers.wandb_runs import (
    expected,
    numbers,
    one_run,
    record_of,
    use_server,
    wait_for,
    wandb_pids,
)

from vit.extras.loggers import wandb_logger

WAITING_S = 60.0
"""The limit, in seconds, for the delay that W&B may add to a run at its start and end together. On
2 idle cores, starting and finishing W&B takes 1.5 s."""


@pytest.fixture
def holds(tmp_path_factory) -> Callable[[float], bool]:
    """Return a function that checks whether a delay is within the limit. The limit is extended on a
    slow machine."""

    def check(spent_s: float) -> bool:
        if spent_s < WAITING_S:
            return True
        clock = tmp_path_factory.mktemp("clock") / "run"
        return spent_s < 2 * one_run(clock, setting="offline") + WAITING_S

    return check


# --- servers --------------------------------------------------------------------------------------


@pytest.fixture
def answering() -> Iterator[Callable[[list[bytes]], str]]:
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


# --- servers that do harm -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("accepts and is silent", "not ready 10 s after"),
        ("401", "CommError: .* error 401"),
        # These cases end in the same two ways as the cases above.
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("refuses", "http:.* does not answer: "),
                ("has no such name", "http:.* does not answer: "),
                ("drops packets", "not ready 10 s after"),
                ("answers a byte at a time", "not ready 10 s after"),
                ("403", "CommError: .* error 403"),
                ("500", "not ready 10 s after"),
                ("a login page", "CommError: .* invalid character '<'"),
                ("another protocol", "not ready 10 s after"),
            )
        ),
    ],
)
def test_a_bad_server_means_offline_and_costs_seconds_at_the_end_of_a_run_at_most(
    tmp_path, monkeypatch, capfd, holds, answering, case, reason
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
        # Linux drops new connections when the queue is full.
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
    # Wait longer here, because W&B reports this reason only after some time.
    if reason.startswith("CommError"):
        monkeypatch.setattr(wandb_logger.WandbProcess.close, "__defaults__", (60.0,))
    spent_s = one_run(tmp_path)
    for each in held:
        each.close()
    (message,) = capfd.readouterr().err.splitlines()
    assert re.match(rf"wandb: stopped \({reason}.*\); .* --to-wandb$", message), message
    assert holds(spent_s)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    one_run(tmp_path / "off")
    assert record_of(tmp_path) == record_of(tmp_path / "off"), "W&B must not change metrics.jsonl"
    wait_for(lambda: not wandb_pids())


@pytest.mark.parametrize("failure", [pytest.param("leaves", marks=pytest.mark.full), "hangs"])
def test_losing_the_server_during_a_run_costs_seconds_but_no_data(
    tmp_path, server, capfd, holds, failure
):
    def lose() -> None:
        wait_for(lambda: server.names)
        if failure == "hangs":
            server.mode = "hang"
        else:
            server.leave()

    spent_s = one_run(tmp_path, range(5), meanwhile=lose)
    first, *_, last = capfd.readouterr().err.splitlines()
    assert holds(spent_s)
    assert first.startswith(f"wandb: {server.url}/me/vit/runs/")
    # W&B may report its own error before the third probe fails.
    assert re.match(r"wandb: stopped \(.*\); .* --to-wandb$", last), last
    assert len(record_of(tmp_path)) == 7
    server.released.set()
    wait_for(lambda: not wandb_pids())


def test_a_server_that_leaves_one_probe_unanswered_gets_every_line(tmp_path, server):
    """One unanswered probe must not stop the upload."""

    def recover() -> None:
        wait_for(lambda: server.num_probes == 2)
        server.mode = "ok"
        server.released.set()

    def hang() -> None:
        wait_for(lambda: server.names)
        server.mode = "hang"
        threading.Thread(target=recover).start()

    one_run(tmp_path, range(5), meanwhile=hang)
    assert numbers(server.history) == expected(range(5))
