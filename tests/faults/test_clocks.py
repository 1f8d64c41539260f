"""Test that changing the system time during a run does not affect measured durations."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families import Family
from processes import REPOSITORY, TINY, command, environment, final_state, last_step, train

from vit.config.schema import LogConfig
from vit.data.storage.block_cache import BlockCache, Fetched
from vit.loggers.record import Record
from vit.run_folder.paths import METRICS_FILE
from vit.system.retry import RetryableError, RetryPolicy

HOURS_S = 5 * 3600.0
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
/* The time of day, as many seconds off as the file VIT_TEST_CLOCK says. */
static long off(void) {
  FILE *file = fopen(getenv("VIT_TEST_CLOCK"), "r");
  long seconds = 0;
  if (file) {
    if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
    fclose(file);
  }
  return seconds;
}
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += off();
  return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *result) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (result) *result = found.tv_sec;
  return found.tv_sec;
}
"""


class Clock:
    def __init__(self) -> None:
        self.off_s = 0.0
        self._real = time.time

    def __call__(self) -> float:
        return self._real() + self.off_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.mark.parametrize("off_s", [HOURS_S, -HOURS_S])
def test_times_in_the_record_differ_by_the_time_that_passed(tmp_path, clock, off_s):
    began_s = time.time()
    record = Record(tmp_path, LogConfig(), True, total_steps=9)
    record.write("train", 1, loss=1.0)
    clock.off_s = off_s
    record.write("train", 2, loss=1.0)
    record.close()
    first, second = map(json.loads, (tmp_path / METRICS_FILE).read_text().splitlines())
    assert 0 <= second["time"] - first["time"] < 60
    assert abs(first["time"] - began_s) < 60


@pytest.mark.parametrize("off_s", [HOURS_S, -HOURS_S])
def test_the_length_of_an_outage_does_not_depend_on_the_wall_clock(
    clock, caplog, monkeypatch, off_s
):
    monkeypatch.setattr("vit.system.retry.WARN_AFTER_S", 0.0)
    attempts = iter([RetryableError("away"), RetryableError("away"), None])

    def attempt() -> str:
        error = next(attempts)
        clock.off_s = off_s
        if error is not None:
            raise error
        return "there"

    policy = RetryPolicy(limit_s=60.0, first_pause_s=0.01)
    with caplog.at_level(logging.WARNING):
        assert policy.call("http://clocks.test/a", attempt) == "there"
    [away_s] = re.findall(r"answers again after (\d+) s", caplog.text)
    assert int(away_s) < 60


def test_evicts_a_block_whose_time_is_in_the_future(tmp_path, clock):
    """If a block's access time is in the future, the cache must reset this time, because the block
    would otherwise always be evicted last."""
    cache = BlockCache(tmp_path / "cache", 1.0)
    (tmp_path / "cache" / "set").mkdir()
    assert cache.fetch("set/a.block", lambda: Fetched(b"abcd", [4])) == b"abcd"
    block = tmp_path / "cache" / "set" / "a.block"
    os.utime(block, (time.time() + HOURS_S,) * 2)
    assert cache.read("set/a.block", 4, 1, 0, 0, 4) == b"abcd"
    assert block.stat().st_mtime < time.time() + 60


@pytest.mark.full
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_setting_the_clock_does_not_change_the_bits_of_a_training(tmp_path, config):
    """The test changes the time for both ranks and for torchrun, because torchrun's rendezvous uses
    its own clocks and timeouts."""
    steps = ("train.steps=100", "checkpoint.every_steps=25", "eval.every_steps=100")
    train(config, tmp_path / "whole", *steps, ranks=2)
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    made = ["gcc", "-shared", "-fPIC", "-O1", "-o", shim, tmp_path / "shim.c", "-ldl"]
    subprocess.run(made, check=True)
    off = tmp_path / "off"
    off.write_text("0")
    run_dir = tmp_path / "run"
    arguments = ("--config", config, f"run.dir={run_dir}", *TINY, *steps, "run.hang_timeout_s=60")
    line = command("launch/train.py", *arguments, ranks=2, python=sys.executable)
    env = {**environment(), "LD_PRELOAD": str(shim), "VIT_TEST_CLOCK": str(off)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Family(line, env=env, cwd=REPOSITORY, **pipes) as family:
        for step, seconds in ((20, 5 * 3600), (40, -10 * 3600), (60, 0)):
            deadline = time.monotonic() + 240
            while last_step(run_dir) < step:
                assert family.process.poll() is None, family.communicate(60)[0]
                assert time.monotonic() < deadline
                time.sleep(0.02)
            set_clock(off, seconds)
        printed = family.communicate(240)[0]
    assert family.process.returncode == 0, printed
    assert final_state(run_dir, 100) == final_state(tmp_path / "whole", 100)
    assert "ETA -" not in printed
    lines = map(json.loads, (run_dir / METRICS_FILE).read_text().splitlines())
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    assert times[-1] - times[0] < 600


def set_clock(off: Path, seconds: int) -> None:
    """Replace the clock file atomically, because a process could otherwise read a partly written
    file."""
    new = off.with_name("new")
    new.write_text(str(seconds))
    os.replace(new, off)
