"""Interrupt many training runs, and check that each of them resumes correctly.

The script prints one line per part, and exits with status 1 if a part fails. Running all parts
takes less than an hour on two cores.

    python tests/faults/soak.py [--count 100] [--parts kills signals ...] [--seed 0]

    kills      SIGKILL to a random rank or all ranks, in a random phase, `count` times
    signals    SIGTERM and SIGUSR1 in each phase, count / 50 times
    groups     SIGTERM, SIGINT and SIGHUP to all processes of a job that starts, count / 10 times
    stops      SIGSTOP to a rank, a loader worker and the saver thread, for 60 s each
    ranks      a killed run on 4, 2, 3 and 1 ranks: its batches (plain) and its bits (exact)
    jobs       two simultaneous runs on this node, and a third run in the first run's folder
    steps      memory, descriptors and threads of two ranks over 10 * `count` saves
    starts     memory, descriptors and threads of one process over `count` starts
    outage     the data server does not answer for `--away-minutes` (http, S3)
    exits      count / 5 finished runs on two ranks, each with status 0
    secrets    tests/project/test_secrets.py

To save time, most runs are forked from a process that has already imported torch. The parts
`steps`, `starts` and `exits` start Python normally. If a part fails, the script lists the failed
cases and keeps the folders of their runs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

# Put the tests folder first, because tests/data_prep has the same name as a package of the project.
# An editable installation is searched last.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import families
import warm_python
from faults import flat, groups, outage, ranks, stops
from faults.kills import Whole, broken_and_continued
from faults.phases import PHASES, Phase
from processes import REPOSITORY, make_shards, train, write_config
from servers import S3Server

from vit.system.meter import Meter, duration

STOPPED_FOR_S = 60.0


class Failed(Exception):
    """The exception raised when a part fails. Each line of the message describes one problem."""


@dataclass(frozen=True)
class Soak:
    folder: Path
    shards: Path
    whole: Whole
    count: int
    away_minutes: float
    seed: int

    def new_folder(self, name: str) -> Path:
        path = self.folder / name.replace(" ", "_")
        path.mkdir()
        return path

    # ---- the parts: each returns its line, or raises Failed --------------------------------------

    def kills(self) -> str:
        rng = random.Random(self.seed)
        # Use every phase once before repeating any phase.
        drawn = [phase for _ in range(-(-self.count // len(PHASES))) for phase in PHASES]
        cases = [(phase, signal.SIGKILL) for phase in drawn[: self.count]]
        rng.shuffle(cases)
        phases = Counter(phase for phase, _ in cases)
        numbers = ", ".join(f"{phase} {phases[phase]}" for phase in PHASES)
        tally = self._broken("kills", cases, rng)
        return f"SIGKILL of a random rank or all in a random phase ({numbers}): {tally}"

    def signals(self) -> str:
        numbers = (signal.SIGTERM, signal.SIGUSR1)
        times = max(self.count // 50, 1)
        cases = [(phase, number) for phase in PHASES for number in numbers] * times
        tally = self._broken("signals", cases, random.Random(self.seed))
        return f"SIGTERM and SIGUSR1 in each of {len(PHASES)} phases, {times} times: {tally}"

    def _broken(
        self, name: str, cases: Sequence[tuple[Phase, signal.Signals]], rng: random.Random
    ) -> str:
        faults = []
        with S3Server() as s3, Meter(name, len(cases), "cases") as meter:
            for number, (phase, signal_to_send) in enumerate(cases):
                folder = self.new_folder(f"{name}{number}_{phase}")
                broken = broken_and_continued(self.whole, folder, phase, signal_to_send, rng, s3)
                if broken.faults:
                    faults.append(f"{folder}: {signal_to_send.name} {broken}")
                else:
                    shutil.rmtree(folder)
                meter.update(number + 1)
        return _tally(len(cases), faults, "weights and optimizer bit-equal, sample checksums exact")

    def groups(self) -> str:
        """Send signals at moments that are spread over the CPU time of a whole job."""
        times = max(self.count // 10, 1)
        rng = random.Random(self.seed)
        config = write_config(self.folder, self.shards, "groups.yaml", steps=2)
        whole_s = groups.cpu_s_of_a_whole_job(config, self.new_folder("groups_whole"))
        faults = []
        with Meter("groups", times, "jobs") as meter:
            for number in range(times):
                after_s = whole_s * (number + rng.random()) / times
                folder = self.new_folder(f"groups{number}")
                to_send = groups.NUMBERS[number % len(groups.NUMBERS)]
                faults += groups.signalled(config, folder, to_send, after_s, rng)
                meter.update(number + 1)
        return f"signals to all processes of a job: {_tally(times, faults, 'to be retried')}"

    def stops(self) -> str:
        """Stop a process with SIGSTOP in each of three cases. The cases run in parallel, because
        they mostly wait."""
        self.whole.state(2)  # train the reference run before the threads need its state
        with ThreadPoolExecutor(len(stops.TARGETS)) as pool:
            futures = {
                target: pool.submit(
                    stops.stopped_and_continued,
                    self.whole,
                    self.new_folder(f"stopped_{target}"),
                    target,
                    STOPPED_FOR_S,
                    random.Random(self.seed + number),
                )
                for number, target in enumerate(stops.TARGETS)
            }
        faults = [
            f"{target}: {fault}" for target, done in futures.items() for fault in done.result()
        ]
        tally = _tally(len(futures), faults, "went on to the same bits")
        return f"SIGSTOP for {STOPPED_FOR_S:.0f} s of {', '.join(stops.TARGETS)}: {tally}"

    def ranks(self) -> str:
        faults = []
        for name, settings in (("plain", ()), ("exact", ranks.EXACT)):
            whole = Whole(self.folder, self.shards, *settings, steps=48, batch=24)
            rng = random.Random(self.seed)
            rank_faults = ranks.on_each_number(
                whole, self.new_folder(f"ranks_{name}"), (4, 2, 3, 1), rng
            )
            faults += [f"{name}: {fault}" for fault in rank_faults]
        tally = _tally(2, faults, "each batch the planned one; exact: the bits of one rank")
        return f"4 -> 2 -> 3 -> 1 ranks, killed in between, plain and exact: {tally}"

    def jobs(self) -> str:
        times = max(self.count // 20, 1)
        faults = [
            fault
            for number in range(times)
            for fault in ranks.two_at_once(self.whole, self.new_folder(f"jobs{number}"))
        ]
        tally = _tally(times, faults, "each as alone, a third in the same folder refused")
        return f"two jobs at once on one node: {tally}"

    def steps(self) -> str:
        saves = 10 * self.count
        whole = Whole(self.folder, self.shards, steps=3 * saves)
        sentences, faults = flat.over_steps(whole, self.new_folder("steps"))
        tally = _tally(1, faults, "; ".join(sentences))
        return f"{saves} saves, {saves // 2} evaluations, {3 * saves} steps in one go: {tally}"

    def starts(self) -> str:
        sentence, faults = flat.over_starts(self.whole, self.new_folder("starts"), self.count)
        return f"{self.count} starts in one process: {_tally(1, faults, sentence)}"

    def outage(self) -> str:
        away_s = 60 * self.away_minutes
        faults = []
        for kind in ("http", "s3"):
            folder = self.new_folder(f"outage_{kind}")
            output, equal = outage.trained_through(kind, folder, self.shards, away_s, 120 + away_s)
            faults += [] if equal else [f"{kind}: different from the undisturbed run\n{output}"]
        tally = _tally(2, faults, "waited, bit-equal")
        return f"the data's server away for {self.away_minutes:g} minutes (http, S3): {tally}"

    def exits(self) -> str:
        """Run many training runs to completion, because a race between gloo threads can crash the
        interpreter on exit."""
        times = max(self.count // 5, 1)
        config = write_config(self.folder, self.shards, "exits.yaml", steps=2)
        faults = []
        with Meter("exits", times, "runs") as meter:
            for number in range(times):
                try:
                    train(config, self.new_folder(f"exit{number}") / "run", ranks=2, cold=True)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    faults.append(str(error))
                meter.update(number + 1)
        return f"runs on two ranks that are left to finish: {_tally(times, faults, 'status 0')}"

    def secrets(self) -> str:
        line = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/project/test_secrets.py"]
        done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True)
        faults = [] if done.returncode == 0 else [done.stdout + done.stderr]
        last_line = (done.stdout.strip().splitlines() or [""])[-1]
        return f"eight kinds of planted secrets: {_tally(1, faults, f'nowhere ({last_line})')}"


def _tally(num_cases: int, faults: Sequence[str], result: str) -> str:
    """Return the summary for the end of a part's output line. Raises Failed if `faults` is not
    empty."""
    if faults:
        raise Failed(f"{len(faults)} faults in {num_cases} cases\n" + "\n".join(faults))
    return f"{num_cases}/{num_cases} {result}" if num_cases > 1 else result


PARTS: dict[str, Callable[[Soak], str]] = {
    name: getattr(Soak, name)
    for name in (
        *(
            "kills",
            "signals",
            "groups",
            "stops",
            "ranks",
            "jobs",
            "steps",
            "starts",
            "outage",
            "exits",
        ),
        "secrets",
    )
}


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="of kills (default: %(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=[*PARTS], help="(default: all)"
    )
    parser.add_argument("--away-minutes", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of phases, moments and victims (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="for the runs (default: a temporary one)")
    return parser.parse_args()


def main() -> int:
    args = read_command_line()
    # Use a folder outside the session's temporary folder, which is deleted when the session ends.
    if args.folder is None:
        args.folder = Path(tempfile.mkdtemp(prefix="vit-soak-"))
    args.folder.mkdir(parents=True, exist_ok=True)
    families.begin_session()
    began_s = time.monotonic()
    failed = []
    try:
        with redirect_stdout(sys.stderr):
            shards = make_shards(args.folder)
        whole = Whole(args.folder, shards)
        soak = Soak(args.folder, shards, whole, args.count, args.away_minutes, args.seed)
        for name in args.parts:
            part_began_s = time.monotonic()
            try:
                line = PARTS[name](soak)
            except Exception as error:
                failed.append(name)
                line = f"{name}: FAILED: {error}"
            print(f"{line} [{duration(time.monotonic() - part_began_s)}]", flush=True)
    finally:
        warm_python.stop()
        left = families.end_session()
    for line in left:
        print(f"left over: {line}")
    verdict = f"FAILED: {', '.join(failed)}; see {args.folder}" if failed else "nothing failed"
    print(f"{verdict} [{duration(time.monotonic() - began_s)}]")
    if not failed:
        shutil.rmtree(args.folder)
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
