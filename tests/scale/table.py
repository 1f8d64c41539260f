"""Print tables of a training run's communication with 64, 512 and 4,096 ranks (`one_of_many.py`).

    python tests/scale/table.py --out benchmarks/results/DATE-scale.md

Every run trains on the same 8,192 images and evaluates on 4,096 images, in batches of 4,096. Times
are CPU seconds of one core. The script first runs 8 ranks as a warm-up, so that the measurements
exclude one-time costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from processes import environment, make_shards

SIMULATION = Path(__file__).with_name("one_of_many.py")
US_OF_A_REQUEST = 31
"""The CPU time that torch's TCPStore needs per request, in microseconds. TCPStore took 1.69 s for
53,450 sequential requests from 50 connections (torch 2.15, an AMD EPYC)."""
ONCE_PER = {
    "step": "step",
    "step read, logged": "step",
    "order check": "epoch",
    "evaluation": "evaluation",
    "save": "save",
    "watch: a beat": "30 s",
}
"""Maps each part to the number of times that it runs. All other parts run once."""


def count(shards: Path, batch: int, ranks: list[int], *flags: str) -> dict[str, Any]:
    line = [sys.executable, SIMULATION, shards, "--batch", batch, "--ranks", *ranks, *flags]
    done = subprocess.run(
        [*map(str, line)], env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def parts_of(counts: dict[str, Any]) -> list[str]:
    names = dict.fromkeys(part for each in counts.values() for part in each["first"])
    return [name for name in names if name not in ("keys", "other")]


def once(counts: dict[str, Any], ranks: int, who: str, part: str, quantity: str) -> float:
    """Return a count per call of `part`.

    If at least one call communicates, calls without communication are ignored. `who` is either
    "first" or "last".
    """
    values = counts[str(ranks)][who].get(part, {})
    calls = values.get("speaking") or values.get("calls") or 1
    return values.get(quantity, 0) / calls


def files_of(counts: dict[str, dict[str, float]]) -> int:
    return int(sum(values.get("files", 0) for values in counts.values()))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'---:|' * (len(header) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def kb(nbytes: float) -> str:
    return f"{nbytes / 1000:,.1f}" if nbytes else "0"


def rows_of_rank_0(counts: dict[str, Any], ranks: list[int]) -> list[list[str]]:
    """Return one row per part for rank 0. Each row contains the part, how often it runs, the
    requests and collectives by number of ranks, their size in kB, and the CPU time in ms."""
    rows = []
    for part in parts_of(counts):
        row = [part, ONCE_PER.get(part, "run")]
        for quantity in ("requests", "collectives"):
            numbers = {once(counts, n, "first", part, quantity) for n in ranks}
            row.append(" to ".join(f"{number:.3g}" for number in sorted(numbers)))
            row += [kb(once(counts, n, "first", part, f"{quantity}_bytes")) for n in ranks]
        row += [f"{1000 * once(counts, n, 'first', part, 'cpu_s'):.1f}" for n in ranks]
        rows.append(row)
    return rows


def rows_of_all(counts: dict[str, Any], ranks: list[int]) -> list[list[str]]:
    """Return one row per part for all ranks. Each row contains the part, how often it runs, the
    requests of a rank other than 0, and the requests, MB and seconds of the store for all ranks."""
    rows = []
    for part in parts_of(counts):
        row = [part, ONCE_PER.get(part, "run")]
        row.append(f"{once(counts, ranks[-1], 'last', part, 'requests'):.3g}")
        for quantity, scale in (("requests", 1.0), ("requests_bytes", 1e6)):
            for n in ranks:
                own = once(counts, n, "first", part, quantity)
                other_ranks = (n - 1) * once(counts, n, "last", part, quantity)
                row.append(f"{(own + other_ranks) / scale:,.{0 if scale == 1 else 2}f}")
        most = float(row[3 + len(ranks) - 1].replace(",", ""))
        row.append(f"{most * US_OF_A_REQUEST / 1e6:.2f}")
        rows.append(row)
    return rows


def pages(counts: dict[str, Any], ranks: list[int]) -> Iterator[str]:
    at = [f"{n:,}" for n in ranks]
    yield f"# What is said at {at[-1]} ranks, {date.today()}"
    yield ""
    yield (
        f"Simulated by `tests/scale/table.py`, {cpu_name()}, torch {torch.__version__}, Python"
        f" {platform.python_version()}; counts are exact, processor times those of a machine with"
        " other work."
    )
    yield ""
    yield "Rank 0, one time each: requests to torch's store, collectives, and time of one core."
    yield ""
    header = ["part", "once per", "requests", *(f"kB, {n} ranks" for n in at), "collectives"]
    header += [*(f"kB, {n}" for n in at), *(f"CPU ms, {n}" for n in at)]
    yield from table(header, rows_of_rank_0(counts, ranks))
    yield ""
    yield "All ranks together, at the one server of the store."
    yield ""
    header = ["part", "once per", "requests of another rank", *(f"requests, {n} ranks" for n in at)]
    header += [*(f"MB, {n}" for n in at), f"seconds of a core, {at[-1]}"]
    yield from table(header, rows_of_all(counts, ranks))
    yield ""
    yield "Files of the run and the shards that a rank opens, lists or looks at, start to end:"
    for n, shown in zip(ranks, at, strict=True):
        first, last = (files_of(counts[str(n)][who]) for who in ("first", "last"))
        yield f"of {shown} ranks rank 0 {first}, the last one {last}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--out", type=Path, help="a Markdown file; the counts go beside it as JSON")
    args = parser.parse_args()
    batch = max(args.ranks)
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        shards = make_shards(Path(folder), num_train=2 * batch, num_val=batch, size=(16, 16))
        counts = count(shards, batch, [8, *args.ranks])
    text = "\n".join(pages(counts, args.ranks))
    print(text)
    if args.out:
        args.out.write_text(f"{text}\n")
        args.out.with_suffix(".json").write_text(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
