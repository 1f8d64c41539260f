"""Measure how long a killed run takes to resume training, and how long each stage takes.

    python benchmarks/recovery.py [--config configs/vit_b16.yaml] [--ranks 2] [--rounds 5]
        [section.key=value ...]

A run of the config's network on tiny shards saves its state. All ranks and torchrun then get
SIGKILL, and the same command starts again immediately. The parts between the kill and the end of
the first step are:

    launch        until torchrun has started the ranks: Python, and torch in torchrun
    import        Python and torch in a rank, and the config
    ranks ...     the parts in the run's `ready` line: ranks, data, checkpoint, model, record, and
                  workers with the first batch
    first step    until metrics.jsonl has the next step

Images have 32 px to make steps short, but the state has its full size. "Ours" is the time without
launch, import and first step. FILE.json contains every round, and FILE.md contains the table.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import as_result, default_out, keep, machine, rows_of

from vit.loggers.lines import read_lines

ROOT = Path(__file__).parents[1]
SMALL = (
    "model.image_size=32",
    "data.micro_batch_size=2",
    "augment.mixup_alpha=0",
    "augment.cutmix_alpha=0",
    "augment.mix_group_size=4",
    "loader.num_workers=0",
    "train.device=cpu",
    "train.precision=fp32",
    "train.compile=false",
    "schedule.warmup_epochs=null",
    "schedule.warmup_steps=0",
    "train.epochs=null",
    "train.steps=1000000",
    "eval.every_epochs=null",
    "eval.every_steps=1000000",
    "eval.reference=null",
    "checkpoint.every_steps=3",
    "log.every_steps=1",
    "log.wandb=off",
    "log.report=false",
    "log.sample_losses=0",
)
LONGEST_S = 300.0
POLL_S = 0.01
NOT_OURS = ("launch", "import", "first step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/vit_b16.yaml")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        place = Path(name)
        shards = place / "digits"
        prepare = [sys.executable, "-m", "data_prep.digits", "--out", str(shards)]
        prepare += ["--renderings", "1"]
        subprocess.run(prepare, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

        settings = [*SMALL, f"data.global_batch_size={2 * args.ranks}", f"data.root={shards}"]
        settings += [f"run.dir={place / 'run'}", *args.overrides]
        line = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={args.ranks}",
            "launch/train.py",
            "--config",
            args.config,
            *settings,
        ]

        seconds: dict[str, list[float]] = {}
        run = Killable(line, place / "run")
        run.wait_for("checkpoint")
        for turn in range(args.rounds):
            print(f"kill {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
            killed_at = run.kill()
            run = Killable(line, place / "run")
            parts = run.parts(killed_at)
            parts["all"] = sum(parts.values())
            parts["ours"] = parts["all"] - sum(parts[name] for name in NOT_OURS)
            for part, took_s in parts.items():
                seconds.setdefault(part, []).append(took_s)
            run.wait_for("checkpoint")
        run.kill()

        newest = max((place / "run" / "checkpoints").iterdir())
        saved_gb = sum(file.stat().st_size for file in newest.iterdir()) / 1e9
        about = machine(place, ["torch"])

    report = {
        "machine": about,
        "data": f"{args.config} on {args.ranks} ranks, a checkpoint of {saved_gb:.2f} GB, in"
        " memory's cache when it is read",
        "rounds": args.rounds,
        "load": load,
        "seconds": seconds,
    }

    result = as_result("From SIGKILL to the next step", "seconds", seconds, ["all"])
    median_s = statistics.median(seconds["ours"])
    print(f"ours: {median_s:.1f} of {statistics.median(seconds['all']):.1f} s")
    out = args.out or default_out("recovery", about["cpu"])
    keep(out, "recovery", report, {"From SIGKILL to the next step": rows_of(result)})


class Killable:
    """A training that runs in the background under torchrun."""

    def __init__(self, line: list[Any], folder: Path):
        self._record = folder / "metrics.jsonl"
        self._num_old_lines = len(self._lines(0))
        self._process = subprocess.Popen(
            [str(word) for word in line], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    def _lines(self, first: int) -> list[dict[str, Any]]:
        return read_lines(self._record)[0][first:]

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that torchrun has started."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in children.split()]

    def wait_for(self, kind: str) -> dict[str, Any]:
        """Return the first metrics.jsonl line of the given kind in the current attempt."""
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline and self._process.poll() is None:
            for line in self._lines(self._num_old_lines):
                if line["kind"] == kind:
                    return line
            time.sleep(POLL_S)
        if self._process.poll() is None:
            self.kill()
        raise SystemExit(f"the run wrote no {kind!r} line: see the output of the run")

    def kill(self) -> float:
        """Kill torchrun and all ranks with SIGKILL, and return the time."""
        for pid in [*self.ranks(), self._process.pid]:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.time()
        self._process.wait()
        return killed_at

    def parts(self, killed_at: float) -> dict[str, float]:
        """Return the seconds of each part between the last kill and the end of the first step."""
        while not self.ranks() and self._process.poll() is None:
            time.sleep(POLL_S)
        launched_at = time.time()
        ready = self.wait_for("ready")
        step = self.wait_for("train")
        began_at = ready["time"] - ready["total_s"]
        return {
            "launch": launched_at - killed_at,
            "import": began_at - launched_at,
            **ready["parts_s"],
            "first step": step["time"] - ready["time"],
        }


if __name__ == "__main__":
    main()
