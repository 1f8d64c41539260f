"""Test the HTTP reader with a server that reproduces every fault observed on real servers. The
tests use short timeouts."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path

import pytest
from servers import WebServer

from vit.data.shards.reader import Version
from vit.data.storage import http, http_request
from vit.data.storage.http import Refused, WebFile, WebFolder
from vit.system.files import ShardError
from vit.system.retry import NUM_REFUSALS, RetryPolicy

DATA = random.Random(0).randbytes(300_000)
PATIENT = RetryPolicy(60.0, 0.01, 0.05)
QUICK = RetryPolicy(1.0, 0.01, 0.05)
"""A retry policy with short times, so that tests of permanent faults are fast."""


@pytest.fixture
def web():
    with WebServer({"/set/a.tar": DATA}) as server:
        yield server


@pytest.fixture
def folder(web) -> WebFolder:
    return WebFolder(f"{web.url}/set", PATIENT)


@pytest.fixture
def version(folder) -> Version:
    return folder.stat("a.tar")


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2] / "helpers", **pipes
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ranges(web: WebServer) -> list[str]:
    return [
        byte_range.removeprefix("bytes=")
        for _, _, byte_range in web.requests
        if byte_range and byte_range != "bytes=0-0"
    ]


def test_an_unknown_host_is_an_error_at_the_start_and_is_retried_during_a_run(web, monkeypatch):
    def unknown(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    retry = RetryPolicy(60.0, 0.001, 0.001)
    was_there = WebFolder(web.url.replace("127.0.0.1", "localhost"), QUICK)
    version = was_there.stat("set/a.tar")
    http_request.pool.cache_clear()
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        ShardError,
        match=(
            r"^http://data\.exmaple\.org/set/a\.tar: the host is unknown; correct the"
            r" address"
        ),
    ):
        WebFolder("http://data.exmaple.org/set", retry).stat("a.tar")
    with pytest.raises(ShardError, match=r"cannot be reached .*, \d+ times in "):
        was_there.read("set/a.tar", 0, 10, version)


def test_a_closed_port_is_an_error_at_the_start_and_is_retried_during_a_run():
    with WebServer({"/a.tar": DATA}) as server:
        url = server.url
    retry = RetryPolicy(60.0, 0.001, 0.001)
    with pytest.raises(
        ShardError,
        match=(
            r"/a\.tar: no server listens at this port \(connection refused\); correct the"
            r" address, or"
            r" start"
        ),
    ):
        WebFolder(url, retry).stat("a.tar")
    with pytest.raises(ShardError, match=r"cannot be reached .*, \d+ times in "):
        WebFolder(url, RetryPolicy(0.3, 0.01, 0.02)).read("a.tar", 0, 10, Version(len(DATA), ""))


def test_https_at_an_http_port_is_reported_immediately(web):
    url = web.url.replace("http://", "https://")
    with pytest.raises(
        ShardError, match=r"/a\.tar: the server does not use TLS at this port; try http://$"
    ):
        WebFolder(f"{url}/set", RetryPolicy(60.0)).stat("a.tar")


# ---- temporary faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("date", [False, True])
def test_retries_wait_for_as_long_as_the_server_asks(date, web, version):
    web.statuses = [429]
    due_s = time.time() + 2
    web.retry_after = formatdate(due_s, usegmt=True) if date else "2"
    assert WebFolder(f"{web.url}/set", PATIENT).read("a.tar", 0, 100, version) == DATA[:100]
    # An HTTP date has a resolution of one second.
    assert time.time() >= (int(due_s) if date else due_s)
    assert len(ranges(web)) == 2


def test_a_read_continues_after_an_outage_of_many_pauses(web, folder, version):
    web.away_until_s = time.monotonic() + 0.6
    assert folder.read("a.tar", 5, 10, version) == DATA[5:10]


def test_bytes_received_before_a_cut_are_not_requested_again(web, folder, version):
    web.cuts = [100_000, 0, 50_000, 1]
    assert folder.read("a.tar", 1000, 300_000, version) == DATA[1000:]
    assert ranges(web) == [
        f"{start}-299999" for start in (1000, 101_000, 101_000, 151_000, 151_001)
    ]


def starts_of(web: WebServer) -> list[int]:
    return [int(byte_range.partition("-")[0]) for byte_range in ranges(web)]


def test_a_silent_connection_is_replaced(web, folder, version, monkeypatch):
    monkeypatch.setattr(http, "SILENCE_S", 0.5)
    web.hang_after = 100_000
    assert folder.read("a.tar", 0, 300_000, version) == DATA
    web.hang_after = None
    starts = starts_of(web)
    assert len(starts) > 2
    assert all(0 <= after - before <= 100_000 for before, after in pairwise(starts))


def test_a_slow_transfer_continues_over_several_attempts(web, folder, version, monkeypatch):
    """The test simulates a slow network on which each attempt times out after it has received only
    a part of the file. All received bytes must be used."""
    monkeypatch.setattr(http, "ATTEMPT_S", 0.5)
    web.drip = (10_000, 0.05)
    assert folder.read("a.tar", 0, 300_000, version) == DATA
    starts = starts_of(web)
    assert len(set(starts)) > 2
    assert starts == sorted(starts)


def test_a_transfer_that_is_too_slow_is_an_error(web, version, monkeypatch):
    monkeypatch.setattr(http, "ATTEMPT_S", 0.1)
    web.drip = (1, 0.05)
    with pytest.raises(
        ShardError, match=r"a.tar: only \d+ bytes arrived in \d+ s; check the network"
    ):
        WebFolder(f"{web.url}/set", RetryPolicy(0.5, 0.01, 0.05)).read("a.tar", 0, 300_000, version)


def test_a_suspended_process_continues_its_transfer(web, version, monkeypatch):
    monkeypatch.setattr(http, "CONNECT_S", 1.0)
    monkeypatch.setattr(http, "SILENCE_S", 1.0)
    naps = [4.0]
    web.cuts = [500, 300]
    with WebFile(
        f"{web.url}/set",
        "a.tar",
        RetryPolicy(3.0, 0.01, 0.05),
        version=version,
        while_waiting=lambda: time.sleep(naps.pop() if naps else 0),
    ) as file:
        assert b"".join(iter(file.read1, b"")) == DATA


def test_a_wrong_range_is_rejected_and_requested_again(web, folder, version):
    web.wrong_ranges = 3
    assert folder.read("a.tar", 1000, 2000, version) == DATA[1000:2000]
    assert len(ranges(web)) == 4
    web.wrong_ranges = 1000
    with pytest.raises(
        ShardError,
        match=r"the server sent bytes 500 to 1500 instead of bytes=1000-1999, \d+ times in \d+ s",
    ):
        WebFolder(folder.url, QUICK).read("a.tar", 1000, 2000, version)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_bytes", [1, 1000])
def test_an_endless_response_is_read_only_to_the_requested_byte(num_bytes, web, folder, version):
    web.endless = True
    assert folder.read("a.tar", 0, num_bytes, version) == DATA[:num_bytes]
    assert folder.stat("a.tar") == version
    web.endless = False


def test_a_read_continues_after_its_server_was_stopped(monkeypatch):
    """After SIGSTOP, the kernel still accepts a few connections for the server, but the server does
    not answer."""
    program = (
        "import sys, servers; s = servers.WebServer({'/a': b'x' * 1000}); print(s.url, flush=True);"
        " s.__enter__(); sys.stdin.read()"
    )
    with running(program) as server:
        folder = WebFolder(server.stdout.readline().strip(), PATIENT)
        version = folder.stat("a")
        server.send_signal(signal.SIGSTOP)
        silent = r"a: cannot be reached \(.*tim.*\), \d+ times in \d+ s"
        with monkeypatch.context() as impatient:
            impatient.setattr(http, "SILENCE_S", 0.1)
            impatient.setattr(http, "CONNECT_S", 0.1)
            with pytest.raises(ShardError, match=silent):
                WebFolder(folder.url, QUICK).read("a", 0, 10, version)
        server.send_signal(signal.SIGCONT)
        assert folder.read("a", 0, 10, version) == b"x" * 10


def test_a_transfer_with_many_faults_succeeds(web, folder, version, monkeypatch):
    """The server repeatedly refuses requests, returns wrong ranges, truncates responses and stops
    sending."""
    monkeypatch.setattr(http, "SILENCE_S", 0.2)
    rng = random.Random(1)
    for _ in range(5):
        web.statuses = rng.choices([503, 429, 500, 502], k=3)
        web.cuts = [rng.randrange(100_000) for _ in range(8)]
        web.wrong_ranges = 2
        web.fails_each = 5
        assert folder.read("a.tar", 7, 300_000, version) == DATA[7:]


# ---- permanent faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404, 400])
def test_a_refusal_is_an_error_at_the_start_and_is_retried_during_a_run(
    status, web, folder, version
):
    """During a run, the server may refuse a request because a token has expired or the file has not
    been uploaded yet."""
    web.statuses = [status] * (NUM_REFUSALS - 1)
    assert folder.read("a.tar", 0, 10, version) == DATA[:10]
    web.statuses = [status] * 100
    web.requests[:] = []
    with pytest.raises((Refused, FileNotFoundError), match=f"{status}|no such file"):
        folder.stat("a.tar")
    assert len(web.requests) == 1
    with pytest.raises((Refused, FileNotFoundError), match=f"{status}|no such file"):
        folder.read("a.tar", 0, 10, version)
    assert len(web.requests) == 1 + NUM_REFUSALS


def test_a_login_that_changes_during_a_run_is_read_again(web, version, monkeypatch):
    monkeypatch.setenv("VIT_HTTP_HEADER", "127.0.0.1 Authorization: Bearer old-token")
    web.header = "Authorization", "Bearer new-token"
    refusals = len(web.requests)

    def renew() -> None:
        if len(web.requests) > refusals + 1:
            monkeypatch.setenv("VIT_HTTP_HEADER", "127.0.0.1 Authorization: Bearer new-token")

    file = WebFile(
        f"{web.url}/set", "a.tar", PATIENT, stop=10, version=version, while_waiting=renew
    )
    assert file.read1() == DATA[:10]


def test_the_query_of_a_folder_follows_the_file_names(web):
    web.signature = "sig=abc%3D"
    folder = WebFolder(f"{web.url}/set?sig=abc%3D", PATIENT)
    assert folder.read("a.tar", 0, 6, folder.stat("a.tar")) == DATA[:6]
    assert "abc" not in str(folder)
    with pytest.raises(Refused, match="403"):
        WebFolder(f"{web.url}/set?sig=other", QUICK).stat("a.tar")


def test_a_redirect_to_another_host_does_not_get_the_login(web, folder):
    web.files["/set/b.tar"] = b"elsewhere"
    with WebServer({}) as first:
        first.redirects = {"/x/b.tar": f"{web.url.replace('127.0.0.1', 'localhost')}/set/b.tar"}
        logged_in = WebFolder(first.url.replace("//", "//me:secret-word@") + "/x", PATIENT)
        assert logged_in.read("b.tar", 0, 9, logged_in.stat("b.tar")) == b"elsewhere"
        assert all("Authorization" in headers for headers in first.headers)
    assert not any("Authorization" in headers for headers in web.headers)


def test_circular_redirects_and_redirects_to_other_schemes_are_errors(web, folder):
    web.redirects = {"/set/a.tar": f"{web.url}/set/a.tar"}
    with pytest.raises(
        ShardError,
        match=r"a.tar: too many redirects, the last one to .*/set/a.tar; correct the address",
    ):
        folder.stat("a.tar")
    web.redirects = {"/set/a.tar": "file:///etc/hostname"}
    with pytest.raises(
        ShardError, match=r"a.tar: redirected to file:///etc/hostname, which is not followed"
    ):
        folder.stat("a.tar")


def test_mirrors_with_different_tags_are_named(web, folder):
    web.tags = ['"inode-1"', '"inode-2"']
    while folder.stat("a.tar").tag != '"inode-1"':
        pass
    recorded = Version(len(DATA), '"inode-1"')
    assert folder.read("a.tar", 0, 10, recorded) == DATA[:10], (
        "a retry must succeed if it reaches the first mirror again"
    )
    web.tags = ['"inode-2"']
    with pytest.raises(
        OSError,
        match=(
            r"replaced at its URL .* or several servers behind this address return"
            r" different tags"
        ),
    ):
        folder.read("a.tar", 0, 10, recorded)


def test_a_changed_file_is_named_and_never_mixed(web, folder, version):
    web.files["/set/a.tar"] = DATA[::-1]
    with pytest.raises(
        OSError,
        match=r"the file was replaced at its URL while in use \(before: 300000 bytes with the tag",
    ):
        folder.read("a.tar", 0, 10, version)


# ---- connections ---------------------------------------------------------------------------------


def test_a_connection_serves_many_reads():
    program = """
import http.server, re, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def setup(self):
        super().setup(); print("connection", flush=True)
    def log_message(self, *_): pass
    def do_GET(self):
        first, last = map(int, re.fullmatch(r"bytes=(\\d+)-(\\d+)", self.headers["Range"]).groups())
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/1000")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        self.wfile.write(bytes(last - first + 1))
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
    with running(program) as server:
        folder = WebFolder(f"http://127.0.0.1:{server.stdout.readline().strip()}", PATIENT)
        version = folder.stat("a")
        assert all(folder.read("a", n, n + 10, version) == bytes(10) for n in range(50))
        server.kill()
        assert server.stdout.read().count("connection") == 1
