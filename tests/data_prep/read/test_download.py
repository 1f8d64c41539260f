"""Test that downloads from a real HTTP server continue after interruptions, are verified, and raise
clear errors."""

import hashlib
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from servers import WebServer

from data_prep.errors import PrepError
from data_prep.read.download import WebShards, download
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy

DATA = random.Random(0).randbytes(3_000_000)
MD5 = hashlib.md5(DATA).hexdigest()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (0.3, 0.01, 0.05))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def web():
    with WebServer({"/data/a.bin": DATA}) as server:
        yield server


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "below" / "a.bin"


def ranges(web: WebServer) -> list[str | None]:
    return [wanted for _, _, wanted in web.requests]


def part_of(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    part = path.with_name("a.bin.part")
    part.write_bytes(content)
    return part


def test_a_file_is_downloaded_once_and_verified_again(web, path, capsys):
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA
    assert capsys.readouterr().err == f"{path}: exists, md5 verified\n"
    download(f"{web.url}/data/a.bin", path, MD5)
    assert capsys.readouterr().err == f"{path}: exists, md5 verified\n"
    assert ranges(web) == [None]
    assert list(path.parent.iterdir()) == [path]


def test_a_download_continues_after_three_cuts(web, path, capsys):
    web.cuts = [1_000_000, 0, 500_000]
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA
    assert ranges(web) == [
        None,
        *(f"bytes={start}-2999999" for start in (1_000_000, 1_000_000, 1_500_000)),
    ]
    assert capsys.readouterr().err.count("\n") == 1, (
        "a retry that succeeds immediately must not be reported"
    )


def test_a_server_without_ranges_is_supported(web, path, capsys):
    web.ranges = False
    web.cuts = [1_000_000]
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA
    assert len(web.requests) == 2, "the bytes that have already arrived must be skipped"


def test_a_server_without_content_length_is_supported(web, path):
    web.lengths = False
    web.cuts = [1_000_000]
    with pytest.raises(PrepError, match=f"md5 .* \\(1,000,000 bytes\\), expected {MD5}"):
        download(f"{web.url}/data/a.bin", path, MD5)
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA


def test_a_download_from_a_busy_server_is_retried(web, path, capsys):
    web.statuses = [503, 429]
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA


def test_a_server_that_always_cuts_is_an_error(web, path):
    web.cuts = [1_000_000, *[0] * 1000]
    with pytest.raises(
        ShardError,
        match=r"the connection broke \(.*\) at byte 1,000,000 of 3,000,000, \d+ times in \d+ s",
    ):
        download(f"{web.url}/data/a.bin", path, MD5)
    assert not path.exists()
    assert path.with_name("a.bin.part").read_bytes() == DATA[:1_000_000]


# ---- files of an earlier call --------------------------------------------------------------------


def test_a_partial_file_is_continued(web, path):
    part_of(path, DATA[:1_200_000])
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA
    assert ranges(web) == ["bytes=1200000-"]


def test_a_complete_partial_file_is_renamed(web, path):
    part_of(path, DATA)
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA
    assert not path.with_name("a.bin.part").exists()


@pytest.mark.parametrize("size", [1_200_000, 3_000_000, 4_000_000])
def test_a_partial_file_of_another_version_is_replaced(web, path, size):
    part_of(path, bytes(size))
    with pytest.raises(PrepError, match="The download was deleted"):
        download(f"{web.url}/data/a.bin", path, MD5)
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_download_is_continued(web, path, number):
    program = (
        "import sys, pathlib; from data_prep.read.download import download; download(sys.argv[1],"
        " pathlib.Path(sys.argv[2]), sys.argv[3])"
    )
    arguments = [sys.executable, "-c", program, f"{web.url}/data/a.bin", str(path), MD5]
    web.hang_after = 2_000_000
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        part = path.with_name("a.bin.part")
        deadline = time.monotonic() + 240
        while (
            not part.exists() or part.stat().st_size < 1_000_000
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
    web.hang_after = None
    have = part.stat().st_size
    assert part.read_bytes() == DATA[:have]
    download(f"{web.url}/data/a.bin", path, MD5)
    assert path.read_bytes() == DATA
    assert ranges(web) == [None, f"bytes={have}-"]


def test_one_of_two_processes_downloads_the_file(web, path, capsys):
    web.hang_after = 1_000_000
    both = [
        threading.Thread(target=download, args=(f"{web.url}/data/a.bin", path, MD5))
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    while not ranges(web):
        time.sleep(0.01)
    web.hang_after = None
    for thread in both:
        thread.join()
    assert path.read_bytes() == DATA
    assert ranges(web) == [None]
    assert capsys.readouterr().err.count("exists, md5 verified") == 2


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{web}/gone.bin", "no such file on the server; correct the address"),
        (
            "http://127.0.0.1:9/a.bin",
            (
                "no server listens at this port (connection refused); correct the address, or"
                " start the server"
            ),
        ),
        ("http://no-such-host.invalid/a.bin", ""),
        ("https://127.0.0.1:{port}/a.bin", "the server does not use TLS at this port; try http://"),
        ("ftp://host/a.bin", "expected an address that begins with http:// or https://"),
        ("a.bin", "expected an address that begins with http:// or https://"),
    ],
)
def test_errors_name_the_address(url, message, web, path):
    url = url.format(web=web.url, port=web.url.rpartition(":")[2])
    with pytest.raises((PrepError, ShardError)) as caught:
        download(url, path, MD5)
    assert str(caught.value).startswith(f"{url}: {message}")
    assert not path.parent.exists() or list(path.parent.iterdir()) == []


# ---- a folder on a web server --------------------------------------------------------------------


def test_a_folder_on_a_web_server_is_listed(web):
    web.files["/data/x.json"] = b'{"a": 1}'
    folder = WebShards(f"{web.url}/data")
    assert folder.size("a.bin") == len(DATA)
    assert folder.read_json("x.json") == {"a": 1}
    assert folder.read_json("y.json") is None
    with pytest.raises(PrepError, match=r"data/y.json: no such file on the server"):
        folder.size("y.json")
    web.lengths = web.ranges = False
    assert folder.size("a.bin") == -1
