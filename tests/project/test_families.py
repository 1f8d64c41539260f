"""Test that all processes that a test starts exit with the test, and that tests/conftest.py lists
the programs that skipped tests need."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import conftest
import families
import pytest
from proc import is_alive
from processes import REPOSITORY, environment, run

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="only Linux shows the environment of processes"
)

SESSIONS = '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ranks do, who save first
SLEEP = """
import signal, time
signal.signal(15, signal.SIG_IGN)
print(flush=True)
time.sleep(600)
"""
children = []
for _ in range(3):
    sleeper = [sys.executable, "-IS", "-c", SLEEP]
    child = subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.PIPE)
    children.append(child)
for child in children:
    child.stdout.readline()
open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children))
time.sleep(600 if len(sys.argv) == 2 else 0)
'''


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    (tmp_path / "sessions.py").write_text(SESSIONS)
    return tmp_path / "sessions.py"


def pids_in(path: Path) -> list[int]:
    # Wait for a long time, because a nested pytest process has to start first.
    deadline = time.monotonic() + 240
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(pid) for pid in path.read_text().split()]


def are_gone(pids: list[int]) -> bool:
    """Wait a few seconds for the processes to exit, and return whether they have exited. Zombie
    processes are regarded as exited."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("cold", [True, False])
def test_a_run_that_times_out_leaves_no_process(sessions, tmp_path, monkeypatch, cold):
    communicate = families.Family.communicate

    def once_all_have_started(family: families.Family, timeout_s: float) -> tuple[str, str]:
        pids_in(tmp_path / "pids")
        return communicate(family, timeout_s)

    monkeypatch.setattr(families.Family, "communicate", once_all_have_started)
    with pytest.raises(subprocess.TimeoutExpired):
        run(sessions, tmp_path / "pids", timeout_s=0.5, cold=cold)
    pids = pids_in(tmp_path / "pids")
    assert len(pids) == 3
    assert not any(map(is_alive, pids))


def test_a_process_that_outlives_its_command_is_reported(sessions, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "ENDS_WITHIN_S", 0.2)
    with pytest.raises(
        AssertionError,
        match=r"has exited but left .*time.sleep\(600\).*test_a_process_that_outlives",
    ):
        run(sessions, tmp_path / "pids", "end", cold=True)
    assert not any(map(is_alive, pids_in(tmp_path / "pids")))


INNER = """
import signal, subprocess, sys, tempfile, time
import families, pytest

def begun(name):
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"], check=True)
    tempfile.mkdtemp()
    subprocess.Popen([sys.executable, {sessions!r}, name])
    while True:
        try:
            if open(name).read():
                return
        except FileNotFoundError:
            time.sleep(0.02)

def test_fails():
    begun({folder!r} + "/failed")
    assert False

def test_is_timed_out():
    begun({folder!r} + "/timed_out")
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # the alarm that pytest-timeout has set
    time.sleep(600)

def test_is_killed():
    begun({folder!r} + "/killed")
    time.sleep(600)
"""


def test_failed_and_timed_out_tests_and_a_killed_pytest_leave_no_processes(sessions, tmp_path):
    """The test runs a nested pytest process that uses the hooks of tests/conftest.py."""
    (tmp_path / "test_inner.py").write_text(
        INNER.format(sessions=str(sessions), folder=str(tmp_path))
    )
    plugins = [f"-p{name}" for name in ("no:cacheprovider", "no:xdist", "conftest")]
    plain = [*plugins, "-c", os.devnull, "--rootdir", str(tmp_path), "--noconftest"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    inner = {
        **environment(),
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(
            [str(REPOSITORY / folder) for folder in ("", "tests/helpers", "tests")]
        ),
    }
    options = [*plain, "--timeout=600", "--timeout-method=signal", "-q"]
    line = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_inner.py")]
    with families.Family(
        line, env=inner, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as family:
        killed = pids_in(tmp_path / "killed")
        assert all(map(is_alive, killed))
        [folder] = temporary.iterdir()
        assert len(list(folder.iterdir())) == 6, "the file must list two processes of each test"
        assert not any(
            is_alive(pid) for name in ("failed", "timed_out") for pid in pids_in(tmp_path / name)
        )
        family.process.kill()
        family.process.wait()
        assert are_gone(killed), "the guard must end the processes of a killed pytest"
        deadline = time.monotonic() + 120
        while list(temporary.iterdir()):
            assert time.monotonic() < deadline, "the guard must delete its temporary files"
            time.sleep(0.02)


def test_prints_in_one_line_what_skipped_tests_need():
    reasons = [
        "Skipped: no jpegtran: apt-get install libjpeg-turbo-progs",
        "no Chromium: apt-get install chromium",
        (
            "no real Slurm here: missing munged (apt-get install slurmctld munge, and run the tests"
            " as root)"
        ),
        "no Chromium: apt-get install chromium",
        "only Linux tells",
    ]
    remedy = (
        "4 tests were skipped for missing programs: apt-get install chromium libjpeg-turbo-progs"
        " munge slurmctld"
    )
    assert conftest.remedy(reasons) == remedy
    assert conftest.remedy(["only Linux tells"]) == ""
