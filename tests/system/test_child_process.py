"""Test that worker processes exit when their parent exits."""

import subprocess
import sys

WORKER_THAT_STARTS_LATE = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from vit.system.child_process import follow_parent

def work(place):
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.001)
    follow_parent()
    Path(place).touch()

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=work, args=sys.argv[1:]).start()
    signal.pause()
"""


def test_a_worker_does_not_work_if_its_parent_died_during_its_start(tmp_path):
    place = tmp_path / "work"
    command = [sys.executable, "-c", WORKER_THAT_STARTS_LATE, str(place)]
    # The worker has inherited the pipe, so the pipe closes only when the worker exits.
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -9
    assert not place.exists()
