"""Count the samples that a killed and resumed training loses, repeats or changes.

    python benchmarks/resume_truth.py                                    all installed contestants
    python benchmarks/resume_truth.py --only "ours" "torchdata" --scenarios same killed_twice
    python benchmarks/resume_truth.py --work FOLDER [--out FILE.json]    keeps and reuses logs

Each contestant (a script in benchmarks/resume/) trains a tiny model for two epochs of 168 steps on
10,080 samples that carry their number, saves its state every 40 steps, and is killed with SIGKILL
after step 268, in the middle of the second epoch. The contestant then resumes from its last saved
state. The steps that made the final weights are compared with those of a run that was not killed. A
contestant whose package is not installed is left out. The rows of an existing FILE.json are kept
unless they are measured again, so that contestants may be measured in different environments.

FILE.json contains all figures, FILE.md contains the table, and FILE.png contains the plot.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "resume"))

from count import count, read_end, read_log
from lives import Life, copy_run, live
from probe import EPOCHS, SAMPLES, STEPS_PER_EPOCH
from rows import CONTESTANTS, Contestant, write_table

KILL_AT = 268
"""The step of the kill, which is step 100 of the second epoch. The last saved state is that of step
240."""
KILL_AGAIN_AT = 308
FIRST = Life(kill_at=KILL_AT)
SCENARIOS: dict[str, tuple[Life, list[Life]]] = {
    "same": (Life(), [FIRST, Life()]),
    "other_workers": (Life(), [FIRST, Life(workers=3)]),
    "other_ranks": (
        Life(ranks=2),
        [Life(2, kill_at=KILL_AT), Life(1, kill_at=KILL_AGAIN_AT), Life(3)],
    ),
    "killed_twice": (Life(), [FIRST, Life(kill_at=KILL_AGAIN_AT), Life()]),
}
"""Maps each scenario to the undisturbed run, and to the lives of the killed run."""


class Runs:
    """Runs a contestant's lives in subfolders of `work`. Runs that begin with the same lives share
    these lives."""

    def __init__(self, contestant: Contestant, work: Path):
        self.contestant = contestant
        self.work = work

    def run(self, lives: list[Life]) -> tuple[Path, str]:
        """Return the run's folder, and how the run ended ("" if it ended as intended)."""
        folder = self.work / "-".join(
            f"{life.ranks}r{life.workers}w{life.kill_at or ''}" for life in lives
        )
        end = folder / "ended.txt"
        if not end.exists():
            *before, last = lives
            if before:
                source, ended = self.run(before)
                if ended:
                    return source, ended
                copy_run(source, folder)
            script, variant = self.contestant.script, self.contestant.variant
            ended = live(script, variant, folder, len(lives), last)
            end.write_text(ended)

        return folder, end.read_text()


def measure(contestant: Contestant, scenarios: list[str], work: Path) -> dict[str, Any]:
    """Return the counts for each scenario, and how a run ended if it did not end as intended."""
    runs = Runs(contestant, work)
    row: dict[str, Any] = {}
    for scenario in scenarios:
        undisturbed, lives = SCENARIOS[scenario]
        plain, plain_end = runs.run([undisturbed])
        folder, end = runs.run(lives)

        ranks = {number: life.ranks for number, life in enumerate(lives, start=1)}
        reference, steps = read_log(plain / "log"), read_log(folder / "log")
        end_step = read_end(folder / "log", len(lives))
        sizes: dict[str, int] = {
            "steps_per_epoch": STEPS_PER_EPOCH,
            "epochs": EPOCHS,
            "num_samples": SAMPLES,
        }

        row[scenario] = {
            "undisturbed": count(reference, reference, {1: undisturbed.ranks}, **sizes).to_json(),
            "ended": plain_end or end,
            **count(steps, reference, ranks, end=end_step, **sizes).to_json(),
        }
        print(f"{contestant.name}, {scenario}: {row[scenario]}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--work", type=Path, help="default: a temporary folder")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        place = args.work or temporary
        rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}

        for name in args.only:
            contestant = CONTESTANTS[name]
            if importlib.util.find_spec(contestant.module) is None:
                print(f"left out: {name}: pip install {contestant.package}", file=sys.stderr)
                continue

            work = Path(place) / name.replace(" ", "_").replace("/", "_")
            row = measure(contestant, args.scenarios, work)
            version = importlib.metadata.version(contestant.package)
            kept = rows.get(name, {"measurements": {}})["measurements"]
            for scenario, figures in row.items():
                before = kept.get(scenario, [])
                kept[scenario] = [*before, figures]
            rows[name] = {"version": version, "measurements": kept}

            if args.work is None:
                shutil.rmtree(work)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
                write_table(rows, args.out)


if __name__ == "__main__":
    main()
