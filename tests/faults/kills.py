"""Send SIGKILL, SIGTERM and SIGUSR1 to a run in each of its phases.

Running the same command again must resume the run. The resumed run must produce results that are
bit-identical to those of an uninterrupted run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from faults.phases import Missed, Phase, Served, Watched, lines_of, served, unfinished
from order_oracle import brute_force, mix
from processes import Background, final_state, train, write_config
from servers import S3Server

from vit.data.order import make_order
from vit.data.storage.opening import open_split
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import METRICS_FILE, REPORT_FOLDER

TRIES = 6
"""The maximum number of attempts to interrupt a run in a given phase. Each attempt uses a new
folder."""


class Whole:
    """The shards, the config and the expected final states of uninterrupted runs. Each
    uninterrupted run is trained when its state is first needed."""

    def __init__(
        self, folder: Path, shards: Path, *settings: str, steps: int = 24, batch: int = 12
    ):
        self.folder = folder
        self.shards = shards
        self.settings = settings
        self.steps = steps
        self.config = write_config(folder, shards, f"{steps}.yaml", steps=steps, batch=batch)
        self._states: dict[int, dict[str, str]] = {}
        order = make_order(open_split(shards, "train").num_samples, batch, seed=0)
        self._batches = [
            [sample for sample, _ in batch]
            for epoch in range(-(-steps // order.steps_per_epoch))
            for batch in brute_force(order, epoch)
        ]

    def state(self, ranks: int) -> dict[str, str]:
        if ranks not in self._states:
            run_dir = self.folder / f"whole{ranks}_{self.steps}"
            train(self.config, run_dir, *self.settings, ranks=ranks)
            faults = self.faults_of(run_dir)
            assert not faults, faults
            self._states[ranks] = final_state(run_dir, self.steps)
        return self._states[ranks]

    def faults_of(self, run_dir: Path, expected: dict[str, str] | None = None) -> list[str]:
        """Return a list of problems in the finished run in `run_dir`. If `expected` is given, each
        difference from `expected` is a problem."""
        faults = []
        if expected is not None:
            state = final_state(run_dir, self.steps)
            different = [name for name in state | expected if state.get(name) != expected.get(name)]
            faults += [f"different from the undisturbed run: {different}"] if different else []
        lines = read_metrics(run_dir / METRICS_FILE)
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        if steps != list(range(1, self.steps + 1)):
            faults.append(f"steps of the record: {steps}")
        evaluated = [line["step"] for line in lines if line["kind"] == "eval"]
        if evaluated != list(range(6, self.steps + 1, 6)):
            faults.append(f"evaluations of the record: {evaluated}")
        for line in (line for line in lines if line["kind"] == "epoch"):
            planned = self.checksum(line["first_batch"], line["last_batch"])
            if not line["exact"] or line["sample_checksum"] != planned:
                faults.append(f"sample checksum {line}, by brute force {planned}")
        left = [str(path) for path in unfinished(run_dir)]
        left += [str(path) for path in run_dir.glob("stopped_early")]
        return [*faults, f"left over: {left}"] if left else faults

    def checksum(self, first: int, last: int) -> str:
        rows = [sample for batch in self._batches[first : last + 1] for sample in batch]
        return f"{sum(map(mix, rows)) % 2**64:016x}"


@dataclass(frozen=True)
class Broken:
    phase: Phase
    ranks: int
    victims: str
    restarts: int
    faults: list[str]

    def __str__(self) -> str:
        faults = "; ".join(self.faults) or "equal"
        return f"{self.phase}, {self.victims} of {self.ranks}, {self.restarts} restarts: {faults}"


def broken_and_continued(
    whole: Whole,
    folder: Path,
    phase: Phase,
    number: signal.Signals,
    rng: random.Random,
    s3: S3Server | None = None,
    ranks: int = 0,
) -> Broken:
    """Train in `folder`, interrupt the run in `phase` by sending signal `number`, resume it, and
    compare the results.

    The signal is sent to one random rank or to all ranks. SIGTERM may also be sent to torchrun,
    which forwards it to its ranks. If the number of ranks is 0, a random number is used.
    """
    ranks = ranks or rng.choice([1, 2, 2, 2, 3])
    expected = whole.state(ranks)
    folder.mkdir(exist_ok=True)
    run_dir = folder / "run"
    with served(phase, folder, whole.shards, rng, s3) as place:
        attempt = _Attempt(whole, run_dir, place, phase, ranks, rng)
        victims, faults = attempt.break_by(number)
        if phase == "upload" and rng.random() < 0.5:
            shutil.rmtree(run_dir)  # remove the run's folder to simulate the loss of the machine
        train(whole.config, run_dir, *place.settings, ranks=ranks)
        faults += whole.faults_of(run_dir, expected)
        if phase == "report" and not (run_dir / REPORT_FOLDER / "index.html").exists():
            faults.append("no report")
    starts = sum(line["kind"] == "start" for line in lines_of(run_dir))
    return Broken(phase, ranks, victims, starts - 1, faults)


@dataclass
class _Attempt:
    whole: Whole
    run_dir: Path
    place: Served
    phase: Phase
    ranks: int
    rng: random.Random

    def break_by(self, number: signal.Signals) -> tuple[str, list[str]]:
        """Start the run and send the signal during the given phase.

        Returns the processes that received the signal, and any problems with the way the run ended.
        """
        scale = 1.0
        for _ in range(TRIES):
            if self.phase == "start" and self.rng.random() < 0.5:
                self._train_a_little()
            num_starts = sum(line["kind"] == "start" for line in lines_of(self.run_dir))
            run = self._begin()
            watched = Watched(run, self.run_dir, self.place, self.whole.steps, num_starts)
            if self.phase == "data wait":
                run.wait_for_step(self.rng.randrange(1, self.whole.steps // 2))
            self.place.hold()
            try:
                with watched.stopped_in(self.phase, self.rng, scale) as pids:
                    victims = self._send(run, pids, number)
            except Missed:
                self.place.let_go()
                scale /= 2
                shutil.rmtree(self.run_dir, ignore_errors=True)
                continue
            if self.phase != "upload" or number != signal.SIGKILL or victims == "one rank":
                # Release the suspended requests, because a process that waits for one could ignore
                # the signal.
                self.place.let_go()
            return victims, self._wrong_with(run.end(), run.process.returncode, number, victims)
        raise AssertionError(f"{self.phase}: missed {TRIES} times")

    def _begin(self) -> Background:
        settings = self.place.settings
        return Background(self.whole.config, self.run_dir, *settings, ranks=self.ranks)

    def _train_a_little(self) -> None:
        """Train for a few steps first, so that the interrupted attempt has a checkpoint to resume
        from."""
        run = self._begin()
        run.wait_for_checkpoint(3)
        self._send(run, run.workers(), signal.SIGKILL, "all ranks")
        run.end()

    def _send(
        self, run: Background, pids: list[int], number: signal.Signals, victims: str = ""
    ) -> str:
        whom = ["one rank", "one rank", "all ranks"]
        # torchrun forwards SIGTERM to its ranks, but SIGUSR1 would kill torchrun itself.
        whom += ["torchrun"] if number == signal.SIGTERM else []
        victims = victims or self.rng.choice(whom)
        if victims == "torchrun":
            run.process.send_signal(number)
        for pid in {"one rank": [self.rng.choice(pids)], "all ranks": pids}.get(victims, []):
            os.kill(pid, number)
        if number == signal.SIGKILL and victims == "all ranks":
            run.process.kill()  # to the processes, SIGKILL looks like a power failure
        return victims

    def _wrong_with(
        self, output: str, status: int, number: signal.Signals, victims: str
    ) -> list[str]:
        """Return a list of problems with the way the run ended. A run that is interrupted before
        its first step does not have to save anything."""
        if self.phase == "start":
            return []
        if number == signal.SIGKILL:
            return [f"status 0: {output}"] if status == 0 and self.phase != "report" else []
        if status != 0 and victims != "torchrun":
            return [f"status {status}: {output}"]
        is_told = (self.run_dir / "stopped_early").exists()
        lines = lines_of(self.run_dir)
        is_finished = lines[-1]["kind"] == "end" and lines[-1]["outcome"] == "finished"
        return [] if is_told or is_finished else [f"neither saved nor finished: {output}"]
