"""Test that a report of differences between hosts names the hosts and ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import together

from vit.distributed import host_differences
from vit.distributed.host_differences import compare_hosts, differences, driver_version, places
from vit.distributed.process_group import World

HOSTS = ("a",) * 8 + ("b",) * 8


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"),
    [
        (range(16), HOSTS, "a (ranks 0-7), b (ranks 8-15)"),
        ([3], HOSTS, "a (rank 3)"),
        ([9, 1, 2, 5], HOSTS, "a (ranks 1-2, 5), b (rank 9)"),
        ([0, 1], (), "ranks 0-1"),
    ],
)
def test_hosts_and_ranks_are_described_in_words(ranks, hosts, expected):
    assert places(ranks, hosts) == expected


def test_a_difference_names_each_value_with_its_hosts():
    software = {rank: {"torch": "2.13.0" if rank < 8 else "2.11.0"} for rank in range(16)}
    [unlike] = differences(software, HOSTS)
    assert unlike.text == (
        "torch 2.13.0 on a (ranks 0-7), 2.11.0 on b (ranks 8-15): install the same on all hosts"
    )
    assert unlike.is_fatal
    assert differences({rank: {"torch": "2.13.0"} for rank in range(16)}, HOSTS) == []


def test_a_variable_of_one_rank_and_cpus_of_two_kinds():
    software = {0: {"CPU kernels": "AVX2"}, 1: {"CPU kernels": "AVX512", "NCCL_ALGO": "Ring"}}
    cpus, variable = differences(software, ("a", "b"))
    assert (cpus.name, cpus.is_fatal) == ("CPU kernels", False)
    assert variable.text == (
        "NCCL_ALGO none on a (rank 0), Ring on b (rank 1): export the same NCCL_ALGO everywhere"
    )


def test_a_start_compares_one_rank_of_each_host(monkeypatch):
    monkeypatch.setattr(
        host_differences, "software", lambda: {"torch": "2.13.0", "Python": "3.12.1"}
    )

    def lines_by_rank(hosts: tuple[str, ...], config: tuple[str, ...]) -> list[list[str]]:
        def rank(world: World) -> list[str]:
            return compare_hosts(replace(world, hosts=hosts), {"config": config[world.rank]})

        return together(3, rank)

    assert lines_by_rank(("a", "a", "b"), ("x", "y", "x")) == [[], [], []]
    assert lines_by_rank(("a", "a", "b"), ("x", "x", "y")) == [
        [
            "note: hosts differ: config x on a (rank 0), y on b (rank 2): all hosts must see the"
            " same files"
        ],
        [],
        [],
    ]
    assert lines_by_rank(("a", "a", "a"), ("x", "y", "z")) == [[], [], []]


def test_the_version_of_a_driver(tmp_path):
    assert driver_version(tmp_path) == ""
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    assert driver_version(tmp_path) == "570.86.15"
