"""Test training on two hosts when one host is disconnected, switched off or slow.

Both hosts are network namespaces on this machine, and they run the real torchrun.
"""

from __future__ import annotations

import time

import pytest
from processes import final_state, last_step, train, write_config

pytestmark = pytest.mark.full
STEPS = 200
SPARSE = ("log.every_steps=20", "eval.every_steps=200", "checkpoint.every_steps=25")
HANG = "run.hang_timeout_s=15"
"""A rank that does not hang must send heartbeats within this time, even on a busy machine."""
ENDS_WITHIN_S = 240.0
"""The time limit for the remaining host to exit. The limit includes torchrun's timeout of 30 s, the
project's own timeout, and the startup time on a busy machine."""


def wait_for_step(run_dir, step: int, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while last_step(run_dir) < step:
        assert time.monotonic() < deadline, f"metrics.jsonl did not reach step {step}"
        time.sleep(0.05)


@pytest.fixture
def config(tmp_path, shards):
    return write_config(tmp_path, shards, steps=STEPS)


@pytest.fixture
def whole(tmp_path, config):
    train(config, tmp_path / "whole", *SPARSE, ranks=2)
    return final_state(tmp_path / "whole", STEPS)


def test_a_cut_that_is_shorter_than_the_limit_changes_nothing(two_hosts, tmp_path, config, whole):
    run_dir = tmp_path / "run"
    two_hosts.train(config, run_dir, *SPARSE, "run.hang_timeout_s=120")
    wait_for_step(run_dir, 40)
    two_hosts.cut()
    time.sleep(6)
    two_hosts.mend()
    assert [host.end(ENDS_WITHIN_S) for host in two_hosts.hosts] == [0, 0]
    assert final_state(run_dir, STEPS) == whole


def test_after_a_longer_cut_both_hosts_end_and_name_the_lost_rank(two_hosts, tmp_path, config):
    first, second = two_hosts.hosts
    run_dir = tmp_path / "run"
    two_hosts.train(config, run_dir, *SPARSE, HANG, "train.steps=100000")
    wait_for_step(run_dir, 40)
    two_hosts.cut()
    assert first.end(ENDS_WITHIN_S) == 1
    assert "error: rank 1 on second has sent no heartbeat for 15 s; last at step" in first.printed()
    assert second.end(ENDS_WITHIN_S) == 137, (
        "the rank must kill its launcher, which would wait for the store forever"
    )
    message = "error: rank 1 on second has not reached the store of torchrun at first:"
    assert second.printed().count(message) == 1
    assert "last at step" in second.printed().partition(message)[2]


def test_restarts_of_torchrun_continue_once_the_cable_is_back(two_hosts, tmp_path, config, whole):
    run_dir = tmp_path / "run"
    first, second = two_hosts.hosts
    restarts = ("--max-restarts=3", "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=60")
    two_hosts.train(config, run_dir, *SPARSE, HANG, launcher=restarts)
    wait_for_step(run_dir, 40)
    two_hosts.cut()
    first.wait_for("has sent no heartbeat")
    second.wait_for("has not reached the store")
    two_hosts.mend()
    assert [host.end(ENDS_WITHIN_S) for host in two_hosts.hosts] == [0, 0]
    assert "resumed at step" in first.printed()
    assert final_state(run_dir, STEPS) == whole


@pytest.mark.parametrize("is_cut", [False, True], ids=["killed", "switched off"])
def test_the_first_host_ends_after_the_second_is_gone(two_hosts, tmp_path, config, is_cut):
    """When a process is killed, the kernel closes its connections. When a host loses power, its
    peers receive nothing."""
    run_dir = tmp_path / "run"
    first, second = two_hosts.hosts
    two_hosts.train(config, run_dir, *SPARSE, HANG, "train.steps=100000")
    wait_for_step(run_dir, 40)
    if is_cut:
        two_hosts.cut()
    second.kill()
    assert first.end(ENDS_WITHIN_S) == 1
    silent = "error: rank 1 on second has sent no heartbeat for 15 s; last at step"
    assert (silent if is_cut else "lost the connection to another rank") in first.printed()


def test_the_host_of_the_store_is_switched_off(two_hosts, tmp_path, config):
    """If the store's host is switched off, no process can report that the store is gone, so the
    other host must exit after its own timeout."""
    run_dir = tmp_path / "run"
    first, second = two_hosts.hosts
    two_hosts.train(config, run_dir, *SPARSE, HANG, "train.steps=100000")
    wait_for_step(run_dir, 40)
    two_hosts.cut()
    first.kill()
    assert second.end(ENDS_WITHIN_S) == 137
    assert "rank 1 on second has not reached the store of torchrun at first:" in second.printed()


def test_a_slow_link_only_costs_time(two_hosts, tmp_path, config, whole):
    run_dir = tmp_path / "run"
    two_hosts.slow_down("10mbit")
    two_hosts.train(config, run_dir, *SPARSE, "run.hang_timeout_s=60")
    assert [host.end(4 * ENDS_WITHIN_S) for host in two_hosts.hosts] == [0, 0]
    assert final_state(run_dir, STEPS) == whole
