"""Train with random combinations of settings, kill each run at random moments, and resume it.

Each resumed run must produce results that are bit-identical to those of an uninterrupted run.

    python tests/faults/fuzz.py [--minutes 30] [--seed 0] [--count 17] [--out fuzz.jsonl]

The first combination is generated from `--seed`, and each later combination from the next higher
seed. If the program rejects a combination, another combination is generated. The script compares
the last checkpoints, the weights, the predictions and the metrics of the two runs. If
`train.exact_over_ranks` is set, the script also compares a run on a different number of ranks. For
each combination, the script prints a command that repeats the test, and appends a line of JSON to
`--out`. Runs that differ are kept in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Put the tests folder first on the import path, as in soak.py.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import families
import numpy as np
import torch
import warm_python
from checksums import digest
from faults.combinations import Combination, Data, Kill, draw, make_data
from faults.phases import lines_of
from processes import TINY, Background, bytes_of, final_state, last_step, run
from safetensors.torch import load_file
from servers import S3Server

from vit.config.io import load_config
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import METRICS_FILE
from vit.system.meter import duration

STATE = (
    *("step", "updates_skipped", "updates_skipped_in_a_row", "recent"),
    *("bad_images", "evaluated_step", "best_top1", "best_loss", "best_set"),
)
"""The values in checkpoint.json that depend only on the training itself."""
KINDS = ("train", "eval", "epoch", "norms", "fault")
MEASURED = re.compile(
    r"time|.*_s|seconds|loader_.*|data_wait_.*|images_per_s.*|mfu|peak_memory_gib"
)
"""The fields of metrics.jsonl that differ even between two identical runs."""
NAMED_DIFFERENCES = 5
"""The maximum number of differences to print per combination. The JSON file lists all
differences."""
LONGEST_S = 900.0
"""The time limit for one attempt, in seconds. Attempts that compile the model can take minutes."""


class Refused(Exception):
    """The exception raised when the program rejects a combination of settings."""


@dataclass
class Result:
    """The result of testing one combination. `refused` lists the reasons why earlier combinations
    were rejected, and `differences` lists the values that differ from the uninterrupted run."""

    seed: int
    combination: Combination
    refused: list[str]
    num_kills: int = 0
    differences: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def line(self) -> str:
        combination = self.combination
        ranks = " and ".join(
            str(each) for each in (combination.ranks, combination.other_ranks) if each
        )
        settings = " ".join(combination.settings)
        more = len(self.differences) - NAMED_DIFFERENCES
        named = self.differences[:NAMED_DIFFERENCES] + [f"{more} more"] * (more > 0)
        verdict = "; ".join(named) or "equal"
        return (
            f"python tests/faults/fuzz.py --seed {self.seed} --count 1   # {verdict}:"
            f" {ranks} rank(s), {combination.place or 'folder'}, {self.num_kills} kill(s),"
            f" {len(self.refused)} refused, {self.took_s:.0f} s: {settings}"
        )


@dataclass(frozen=True)
class Fuzz:
    folder: Path
    data: Data
    config: Path
    s3: S3Server

    def tried(self, seed: int) -> Result:
        rng = random.Random(seed)
        refused: list[str] = []
        began_s = time.monotonic()
        while True:
            combination = draw(rng, self.data)
            folder = self.folder / f"{seed}_{len(refused)}"
            folder.mkdir()
            try:
                self.run_whole(folder / "whole", combination)
            except Refused as reason:
                refused.append(str(reason))
                shutil.rmtree(folder)
                continue
            except (AssertionError, subprocess.TimeoutExpired) as error:
                result = Result(seed, combination, refused, differences=[str(error)])
            else:
                result = self.broken(folder, Result(seed, combination, refused))
            break
        if not result.differences:
            shutil.rmtree(folder)
        result.took_s = time.monotonic() - began_s
        return result

    def run_whole(self, run_dir: Path, combination: Combination, ranks: int = 0) -> None:
        """Train without interruption.

        Raises Refused if the program rejects the combination, and AssertionError if training fails.
        """
        arguments = ["--config", self.config, f"run.dir={run_dir}", *TINY, *combination.settings]
        try:
            load_config(self.config, [*TINY, *combination.settings])
        except ValueError as error:
            raise Refused(error) from None
        done = run(
            "launch/train.py", *arguments, ranks=ranks or combination.ranks, timeout_s=LONGEST_S
        )
        # A run without any metrics means that the program rejected the combination.
        if done.returncode and not lines_of(run_dir):
            raise Refused(_error(done.stderr))
        assert done.returncode == 0, f"the run ended with status {done.returncode}: {done.stderr}"

    def broken(self, folder: Path, result: Result) -> Result:
        """Kill and resume the run, and compare it with the uninterrupted run. If results must be
        bit-identical on any number of ranks, also compare a run on a different number of ranks."""
        combination = result.combination
        run_dir = folder / "run"
        place = self._place(combination, folder)
        try:
            for kill in combination.kills:
                result.num_kills += self._killed(run_dir, combination, place, kill)
            last = Background(
                self.config, run_dir, *combination.settings, *place, ranks=combination.ranks
            )
            output = last.end(LONGEST_S)
            assert last.process.returncode == 0, (
                f"the run ended with status {last.process.returncode}: {output}"
            )
            result.differences += differences(folder / "whole", run_dir, combination.steps)
            if combination.other_ranks:
                self.run_whole(folder / "other", combination, combination.other_ranks)
                other_differences = differences(
                    folder / "whole", folder / "other", combination.steps
                )
                result.differences += [
                    f"on {combination.other_ranks} rank(s): {each}" for each in other_differences
                ]
        except (AssertionError, Refused, subprocess.TimeoutExpired) as error:
            result.differences.append(str(error))
        return result

    def _place(self, combination: Combination, folder: Path) -> tuple[str, ...]:
        """Return the settings that store the run at a URL, with a local copy for the comparison."""
        if not combination.place:
            return ()
        at = self.s3.new_bucket() if combination.place == "s3" else f"file://{folder / 'bucket'}"
        return (f"run.dir={at}/runs/x", f"run.local_dir={folder / 'run'}", "run.lease_s=2")

    def _killed(
        self, run_dir: Path, combination: Combination, place: tuple[str, ...], kill: Kill
    ) -> bool:
        attempt = Background(self.config, run_dir, *combination.settings, *place, ranks=kill.ranks)
        while last_step(run_dir) < kill.step and attempt.process.poll() is None:
            time.sleep(0.01)
        time.sleep(kill.delay_s)
        ranks = attempt.workers()
        hit = ranks if kill.hits_all or not ranks else [ranks[kill.step % len(ranks)]]
        for pid in hit:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kill.hits_all or not hit:  # if only one rank was killed, torchrun exits without a signal
            attempt.process.kill()
        output = attempt.end(LONGEST_S)
        status = attempt.process.returncode
        is_end = any(line["kind"] == "end" for line in lines_of(run_dir))
        assert status or is_end, f"status 0, but the run did not end: {output}"
        assert status != 2, f"the run was rejected (status 2): {output}"
        if combination.place and kill.takes_folder:
            # Remove the run's folder to simulate the loss of the machine.
            shutil.rmtree(run_dir, ignore_errors=True)
        return bool(status)


# ---- comparing runs ------------------------------------------------------------------------------


def differences(whole: Path, resumed: Path, steps: int) -> list[str]:
    """Return the names of the values that differ between two finished runs. Short values are
    printed as well."""
    first = {**_contents(whole, steps), **_lines(whole)}
    second = {**_contents(resumed, steps), **_lines(resumed)}
    names = []
    for name in sorted(first | second):
        one = first.get(name)
        other = second.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            names += [
                f"{name} {key}: {one.get(key)} and {other.get(key)}"
                for key in sorted({*one, *other})
                if repr(one.get(key)) != repr(other.get(key))
            ]
        elif one != other:
            names.append(f"{name}: {one} and {other}")
    return names


def _contents(run_dir: Path, steps: int) -> dict[str, Any]:
    contents: dict[str, Any] = dict(final_state(run_dir, steps))
    # Skip the symbolic links to weights files, because links cannot be stored at a URL.
    for path in (path for path in run_dir.glob("weights/*.safetensors") if not path.is_symlink()):
        tensors = load_file(path)
        contents |= {
            f"{path.name} {name}": digest(bytes_of(each)) for name, each in tensors.items()
        }
    with np.load(run_dir / "predictions.npz") as arrays:
        contents |= {f"predictions {name}": digest(arrays[name].tobytes()) for name in arrays.files}
    state = json.loads((run_dir / f"checkpoints/step_{steps:08d}/checkpoint.json").read_text())
    return contents | {f"state {name}": state[name] for name in STATE}


def _lines(run_dir: Path) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    numbers = dict.fromkeys(KINDS, 0)
    for line in read_metrics(run_dir / METRICS_FILE):
        kind = line["kind"]
        if kind in KINDS:
            numbers[kind] += 1
            fields = {name: value for name, value in line.items() if not MEASURED.fullmatch(name)}
            lines[f"{kind} line {numbers[kind]}"] = fields
    return lines


def _error(text: str) -> str:
    return text[text.rfind("error: ") :].strip()


# ---- the command line ----------------------------------------------------------------------------


def fuzz(folder: Path, seeds: Iterable[int], until_s: float, out: Path | None) -> list[Result]:
    with redirect_stdout(sys.stderr):
        data = make_data(folder)
    config = folder / "fuzz.yaml"
    config.write_text(f"data: {{root: {data.shards}}}\n")
    results = []
    with S3Server() as s3:
        tries = Fuzz(folder, data, config, s3)
        for seed in seeds:
            if time.monotonic() > until_s:
                break
            result = tries.tried(seed)
            results.append(result)
            print(result.line(), flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    return results


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first (default: %(default)s)")
    parser.add_argument("--count", type=int, default=10**6, help="of combinations, at most")
    parser.add_argument("--out", type=Path, help="file that gets a JSON line for each combination")
    parser.add_argument("--folder", type=Path, help="for the runs (default: a temporary one)")
    return parser.parse_args()


def main() -> int:
    args = read_command_line()
    # Use a folder outside the session's temporary folder, which is deleted when the session ends.
    if args.folder is None:
        args.folder = Path(tempfile.mkdtemp(prefix="vit-fuzz-"))
    args.folder.mkdir(parents=True, exist_ok=True)
    kernels = torch.backends.cpu.get_cpu_capability().lower()
    compiled = Path(tempfile.gettempdir(), f"vit-tests-compiled-{os.getuid()}-{kernels}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    families.begin_session()
    began_s = time.monotonic()
    try:
        seeds = range(args.seed, args.seed + args.count)
        results = fuzz(args.folder, seeds, began_s + 60 * args.minutes, args.out)
    finally:
        warm_python.stop()
        left = families.end_session()
    for line in left:
        print(f"left over: {line}")
    failed = [result for result in results if result.differences]
    kills = sum(result.num_kills for result in results)
    refused = sum(len(result.refused) for result in results)
    verdict = f"{len(failed)} differ, see {args.folder}" if failed else "all equal"
    print(
        f"{len(results)} combinations, {kills} kills, {refused} refused and drawn again: {verdict}"
        f" [{duration(time.monotonic() - began_s)}]"
    )
    if not failed:
        shutil.rmtree(args.folder)
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
