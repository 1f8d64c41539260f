"""Measure the cost of weights that do not depend on the number of ranks, compared with plain DDP.

    python benchmarks/exact.py [--ranks 1 2 4] [--leaves 2] [--rounds 5] [section.key=value ...]

The same short training runs alternately with and without `train.exact_over_ranks`, on each number
of ranks. It trains a ViT-Ti/16 at 96 px on the demo's digits, on the CPU with one thread per rank.
All runs have the same global batch. With the largest number of ranks, each rank has `--leaves`
micro-batches. With fewer ranks, each rank has more micro-batches. Two rates are measured between
two lines of metrics.jsonl, so startup is excluded. They are images per CPU second of all ranks,
which other programs disturb least, and images per second. "peak" is the largest resident set of a
rank. "hashes" is the number of different final states: 1 for exact runs, and one per number of
ranks for plain runs. FILE.json contains every round, and FILE.md the tables.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import as_result, default_out, keep, machine, rows_of

from vit.loggers.lines import read_lines, read_metrics

ROOT = Path(__file__).parents[1]
LEAF_ROWS = 8
EVERY_STEPS = 5
FIRST = 10
"""The first step to measure, after allocators and caches have warmed up."""
STEPS = 30
SMALL = (
    "model.name=vit_ti16",
    "model.image_size=96",
    "model.depth=12",
    "model.embed_dim=192",
    "model.num_heads=3",
    f"data.micro_batch_size={LEAF_ROWS}",
    "loader.num_workers=0",
    "train.device=cpu",
    "schedule.warmup_epochs=1",
    "train.epochs=null",
    f"train.steps={STEPS}",
    "eval.every_epochs=null",
    f"eval.every_steps={STEPS + 1}",
    "eval.reference=null",
    f"log.every_steps={EVERY_STEPS}",
    "log.wandb=off",
    "log.report=false",
    "log.sample_losses=0",
    "checkpoint.keep_last=1",
    f"checkpoint.every_steps={STEPS}",
)
CONTESTANTS = {"DDP": "false", "exact over ranks": "true"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--leaves", type=int, default=2, help="micro-batches at the most ranks")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()

    load = os.getloadavg()[0]
    batch = max(args.ranks) * args.leaves * LEAF_ROWS

    runs_by_ranks: dict[int, dict[str, list[Trained]]] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        place = Path(folder)
        about = machine(place, ["torch"])
        shards = place / "digits"
        prepare = [sys.executable, "-m", "data_prep.digits", "--out", str(shards)]
        subprocess.run(prepare, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

        settings = [*SMALL, f"data.global_batch_size={batch}", f"data.root={shards}"]
        settings += args.overrides
        for turn in range(args.rounds):
            for ranks in args.ranks:
                for name, exact in CONTESTANTS.items():
                    run_dir = place / f"{turn}_{ranks}_{exact}"
                    training = trained(
                        ranks, run_dir, batch, [*settings, f"train.exact_over_ranks={exact}"]
                    )
                    rates = f"{training.images_per_cpu_s:.1f} images/CPU-s"
                    rates += f", {training.images_per_s:.1f}/s"
                    print(f"{turn + 1}: {name}, {ranks} rank(s): {rates}", flush=True)
                    runs_by_ranks.setdefault(ranks, {}).setdefault(name, []).append(training)

    report = {
        "machine": about,
        "data": f"{' '.join([*SMALL, *args.overrides])} over benchmarks/inputs/digits_adamw.yaml,"
        f" {batch} images per step in micro-batches of {LEAF_ROWS}.",
        "rounds": args.rounds,
        "load": load,
        "runs": {
            ranks: {name: [asdict(training) for training in runs] for name, runs in of.items()}
            for ranks, of in runs_by_ranks.items()
        },
    }

    keep(
        args.out or default_out("exact", about["cpu"]),
        "exact",
        report,
        tables_of(runs_by_ranks, batch),
    )


@dataclass(frozen=True)
class Trained:
    images_per_cpu_s: float
    images_per_s: float
    peak_mib: float
    sha256: str


def tables_of(
    runs_by_ranks: dict[int, dict[str, list[Trained]]], batch: int
) -> dict[str, list[list[str]]]:
    """Return tables of rates relative to DDP for each number of ranks, memory and hashes."""
    tables: dict[str, list[list[str]]] = {}
    ends = [["", "peak of a rank, MiB, on " + ", ".join(map(str, runs_by_ranks)), "hashes", "runs"]]
    for ranks, of in runs_by_ranks.items():
        leaves = f"{ranks} rank(s) with {batch / LEAF_ROWS / ranks:g} leaves each"
        per_cpu_s = {
            name: [training.images_per_cpu_s for training in runs] for name, runs in of.items()
        }
        tables[f"{leaves}, images per processor second"] = rows_of(
            as_result("", "images/CPU-s", per_cpu_s, ["DDP"])
        )
        per_s = {name: [training.images_per_s for training in runs] for name, runs in of.items()}
        tables[f"{leaves}, images per second"] = rows_of(as_result("", "images/s", per_s, ["DDP"]))

    for name in CONTESTANTS:
        peaks = [max(training.peak_mib for training in of[name]) for of in runs_by_ranks.values()]
        hashes = [training.sha256 for of in runs_by_ranks.values() for training in of[name]]
        in_words = ", ".join(f"{peak:.0f}" for peak in peaks)
        ends.append([name, in_words, str(len(set(hashes))), str(len(hashes))])

    return {**tables, "Memory, and states at the end": ends}


def trained(ranks: int, run_dir: Path, batch: int, settings: list[str]) -> Trained:
    """Train on `ranks` processes, and measure their cost."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            "launch/train.py",
            "--config",
            "benchmarks/inputs/digits_adamw.yaml",
            *settings,
            f"run.dir={run_dir}",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    last = STEPS - EVERY_STEPS  # The ranks are still alive when this line is written.
    began_s, cpu_began_s, _ = cost_at(FIRST, run_dir, process)
    ended_s, cpu_ended_s, peak_mib = cost_at(last, run_dir, process)
    if process.wait():
        raise SystemExit(f"{run_dir}: the training failed, see above")

    num_images = (last - FIRST) * batch
    lines = read_metrics(run_dir / "metrics.jsonl")
    [sha256] = [line["sha256"] for line in lines if line["kind"] == "checkpoint"]
    return Trained(
        num_images / (cpu_ended_s - cpu_began_s), num_images / (ended_s - began_s), peak_mib, sha256
    )


def cost_at(step: int, run_dir: Path, process: subprocess.Popen) -> tuple[float, float, float]:
    """Wait until metrics.jsonl contains `step`, and return the cost until then.

    The cost consists of the time, the CPU seconds of all ranks, and the largest resident set of a
    rank in MiB.
    """
    path = run_dir / "metrics.jsonl"
    while not path.exists() or not any(
        line["kind"] == "train" and line["step"] >= step for line in read_lines(path)[0]
    ):
        if process.poll() is not None:
            raise SystemExit(f"{run_dir}: the training ended before step {step}, see above")
        time.sleep(0.02)

    now_s = time.perf_counter()
    cpu_s = 0.0
    peak_mib = 0.0
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        assert peak is not None, "of a process that lives"
        peak_mib = max(peak_mib, int(peak[1]) / 1024)
    return now_s, cpu_s, peak_mib


if __name__ == "__main__":
    main()
