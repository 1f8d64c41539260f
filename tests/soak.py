"""Kills and exits in numbers: what `make test` tries once, many times over. Minutes to an hour;
prints what it found.

    python tests/soak.py [--count 20] [--exits 50]

Kills: on 2 and on 3 ranks, `count` times SIGKILL at a random moment, in turns of one rank and of
everything, and the same command again; the final state must equal the uninterrupted run's bit for
bit. The run saves every third step, so that its thread writes most of the time: how many kills fell
into a save is counted by the unfinished files that they left.

Exits: this many two-rank trainings, each of which must end with status 0.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from processes import Background, final_state, last_step, make_shards, metrics, train, write_config


def kill_at_random(
    config: Path, run_dir: Path, ranks: int, steps: int, everything: bool, cold: bool
) -> tuple[int, int, bool]:
    """Start a training, kill it somewhere in it, finish it; returns the step in the record at the
    kill, the restarts, and whether a save was left unfinished."""
    background = Background(config, run_dir, ranks=ranks, cold=cold)
    background.wait_for_step(random.randrange(1, steps - 5))
    time.sleep(random.uniform(0.0, 0.02))
    step = last_step(run_dir)
    if everything:
        background.kill_all()
    else:
        if trainers := background.trainers():  # the run may just have finished
            os.kill(random.choice(trainers), signal.SIGKILL)
        background.end()
    unfinished = [*run_dir.rglob(".tmp_*"), *run_dir.rglob(".*.tmp")]
    train(config, run_dir, ranks=ranks, cold=cold)
    left = [*run_dir.rglob(".tmp_*"), *run_dir.rglob(".*.tmp")]
    assert not left, f"left over: {left}"
    return step, metrics(run_dir, "start")[-1]["restarts"], bool(unfinished)


def main() -> int:
    """The command line above; exit status 1 if anything differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count",
        type=int,
        default=20,
        help="kills for each number of ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--exits", type=int, default=50, help="finished two-rank runs (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="(default: 2 3)")
    parser.add_argument(
        "--steps", type=int, default=150, help="of each run that is killed (default: %(default)s)"
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="fork interpreters that have imported torch: several times as fast",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    args = parser.parse_args()
    random.seed(args.seed)
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = make_shards(folder)
        config = write_config(folder, root, steps=args.steps)
        for ranks in args.ranks:
            whole = folder / f"whole{ranks}"
            train(config, whole, ranks=ranks, cold=not args.warm)
            in_saves = 0
            expected = final_state(whole, args.steps)
            for number in range(args.count):
                run_dir = folder / f"kill{ranks}_{number}"
                step, restarts, in_save = kill_at_random(
                    config, run_dir, ranks, args.steps, number % 2 == 1, not args.warm
                )
                in_saves += in_save
                equal = final_state(run_dir, args.steps) == expected
                failures += not equal
                what = "all ranks" if number % 2 else "one rank"
                verdict = "equal" if equal else "DIFFERENT"
                print(
                    f"{ranks} ranks, kill {number + 1}: {what} at step {step} of {args.steps},"
                    f" {restarts} restart{', in a save' * in_save}: {verdict}",
                    flush=True,
                )
            print(f"{ranks} ranks: {in_saves} of {args.count} kills left a save unfinished")
        statuses = []
        exits = write_config(folder, root, "exits.yaml", steps=2)
        for number in range(args.exits):
            try:
                train(exits, folder / f"exit{number}", ranks=2, cold=True)
                statuses.append(0)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                statuses.append(1)
                print(error, flush=True)
        failures += sum(statuses)
        print(f"{len(statuses)} finished two-rank runs, {statuses.count(0)} zero exit codes")
    print("all equal" if not failures else f"{failures} FAILURES")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
