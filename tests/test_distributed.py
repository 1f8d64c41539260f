"""What ranks say to each other, in real processes."""

from __future__ import annotations

from pathlib import Path

from processes import run

SLOW_MAIN = """
import datetime, sys, time
import vit.distributed as distributed
distributed.COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=3)
world = distributed.start("cpu")

def make():
    if world.is_main and sys.argv[1] == "wrong":
        raise ValueError("no such shard")
    if world.is_main:
        time.sleep(6)
    return world.rank * 10

try:
    print(f"rank {world.rank} has {world.main_first(make)} and {world.main_first(lambda: 7)}", flush=True)
except ValueError as error:
    print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
distributed.stop(world)
"""


def two_ranks(tmp_path: Path, argument: str) -> list[str]:
    """Sorted lines of two ranks that run SLOW_MAIN."""
    script = tmp_path / "slow_main.py"
    script.write_text(SLOW_MAIN)
    done = run(script, argument, ranks=2, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_what_the_main_rank_does_first_may_take_longer_than_a_collective(tmp_path):
    """Making an index of a large data set does."""
    assert two_ranks(tmp_path, "right") == ["rank 0 has 0 and 7", "rank 1 has 10 and 7"]


def test_a_mistake_of_the_main_rank_reaches_the_others(tmp_path):
    assert two_ranks(tmp_path, "wrong") == ["rank 0: ValueError: no such shard", "rank 1: AlreadyReported: no such shard"]
