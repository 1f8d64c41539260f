"""What it costs that the weights do not depend on the number of ranks, beside plain DDP.

    python benchmarks/exact.py [--ranks 1 2 4] [--leaves 2] [--rounds 5] [section.key=value ...]

The same short training with and without `train.exact_over_ranks`, in turn, on each number of ranks:
a ViT-Ti/16 at 96 px on generated images, on the CPU with a thread a rank. The global batch is the
same on all, so a rank has `--leaves` micro-batches at the largest number of ranks and more at the
others. Images per second are the median of a run's lines of metrics without the first, so that the
start does not count. "hashes" are those of all states at the end: exact runs have one, plain ones
one for each number of ranks. FILE.json gets every round, FILE.md the tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import as_result, default_out, keep, machine, rows_of

from vit.run.record import read_metrics

ROOT = Path(__file__).parents[1]
LEAF_ROWS = 8
STEPS = 40
SMALL = (
    *("model.name=vit_ti16", "model.image_size=96", f"data.micro_batch_size={LEAF_ROWS}"),
    *("data.num_workers=0", "train.device=cpu", "schedule.warmup_epochs=1"),
    *("train.epochs=null", f"train.steps={STEPS}", "eval.every_epochs=null"),
    *(f"eval.every_steps={STEPS + 1}", "eval.reference=null", "log.every_steps=5"),
    *("log.wandb=off", "log.report=false", "log.sample_losses=0", "checkpoint.keep_last=1"),
    f"checkpoint.every_steps={STEPS}",
)
CONTESTANTS = {"DDP": "false", "exact over ranks": "true"}


def main() -> None:
    """Run the command line above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--leaves", type=int, default=2, help="a rank, at the largest number")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    load = os.getloadavg()[0]
    batch = max(args.ranks) * args.leaves * LEAF_ROWS
    rates: dict[int, dict[str, list[float]]] = {}
    hashes: dict[str, set[str]] = {name: set() for name in CONTESTANTS}
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
                    exact_too = [f"train.exact_over_ranks={exact}", f"run.dir={run_dir}"]
                    rate, sha256 = trained(ranks, [*settings, *exact_too])
                    print(f"{turn + 1}: {name}, {ranks} ranks: {rate:.0f} images/s", flush=True)
                    rates.setdefault(ranks, {}).setdefault(name, []).append(rate)
                    hashes[name].add(sha256)
    tables = {
        f"{ranks} rank(s), {batch // LEAF_ROWS // ranks} leaves each": rows_of(
            as_result("", "images/s", found, ["DDP"])
        )
        for ranks, found in rates.items()
    }
    tables["States at the end"] = [
        ["", "hashes", "runs"],
        *(
            [name, str(len(found)), str(args.rounds * len(args.ranks))]
            for name, found in hashes.items()
        ),
    ]
    report = {
        "machine": about,
        "data": f"{' '.join([*SMALL, *args.overrides])} over configs/demo.yaml, {batch} images a"
        f" step in leaves of {LEAF_ROWS}.",
        "rounds": args.rounds,
        "load": load,
        "images_per_s": rates,
        "hashes": {name: sorted(found) for name, found in hashes.items()},
    }
    keep(args.out or default_out("exact", about["cpu"]), "exact", report, tables)


def trained(ranks: int, settings: list[str]) -> tuple[float, str]:
    """Train on that many ranks; return images per second and the sha256 of the state at the end."""
    [run_dir] = [Path(word.partition("=")[2]) for word in settings if word.startswith("run.dir=")]
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={ranks}", "launch/train.py", "--config", "configs/demo.yaml"),
            *settings,
        ],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = read_metrics(run_dir / "metrics.jsonl")
    rates = [line["images_per_s"] for line in lines if line["kind"] == "train"]
    hashes = [line["sha256"] for line in lines if line["kind"] == "checkpoint"]
    return statistics.median(rates[1:]), hashes[-1]


if __name__ == "__main__":
    main()
