"""From JPEGs to batches: our loader next to its peers and the limits of decoding, in one run.

    python benchmarks/loader.py --quick                               a minute: does it run?
    python benchmarks/loader.py --only ours "torchvision v1" FFCV     these alone
    python benchmarks/loader.py [--rounds N] [--data FOLDER] [--workers N ...] [--out FILE.json]

JPEGs of ImageNet's sizes are made once and kept in FOLDER (benchmarks/inputs/loader_data.py). Each
contestant (benchmarks/peers.py) runs in processes of its own, which are stopped (SIGSTOP) while
others have their turn, so that none prepares batches at the expense of another. Peers that are not
installed are listed. FILE.json gets every round, FILE.md tables, FILE.png bars.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from inputs.loader_data import Data, bytes_rows, describe, make_data
from measure import CORES, Result, as_result, create_parser, keep, machine, shown
from peers import CONTESTANTS, FFCV, OURS, OURS_MARKED, V1, WHOLE, version

PACKAGES = ("torch", "numpy", "pillow", "simplejpeg")
SCALED = (f"{OURS}, pip only", OURS_MARKED, WHOLE)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WALL = "images/s"
CPU = "images/CPU-s"
"""Units. CPU-s: seconds of processor time of all processes and threads of a contestant."""


class Failed(Exception):
    """A contestant ended; says how."""


class Server:
    """A contestant in a process group of its own, stopped but for its turns."""

    def __init__(self, name: str, data: Data, workers: int, batch_size: int):
        self.name = name
        self.largest_bytes = 0
        self.log = data.place / f"log-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.txt"
        command = [
            sys.executable,
            Path(__file__).with_name("peers.py"),
            name,
            data.place,
            data.num_images,
            workers,
            batch_size,
        ]
        # One thread for each process, as a worker has; a group, not a session: should this process
        # die, the kernel wakes and ends a stopped group.
        environment = (
            os.environ
            | {"OMP_NUM_THREADS": "1"}
            | ({"VIT_NATIVE": "0"} if CONTESTANTS[name].pip_only else {})
        )
        with self.log.open("w") as log:
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": log,
            }
            self.process = subprocess.Popen(
                [str(part) for part in command],
                text=True,
                env=environment,
                process_group=0,
                **pipes,
            )

    def ask(self, task: str, num_batches: int) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `answer` says why
            self.process.stdin.write(f"{task} {num_batches}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """images, seconds, shape and dtype of what was asked for; the processes are stopped when it
        is there."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise Failed(
                (self.log.read_text().strip().splitlines() or ["it ended without a word"])[-1][:200]
            )
        os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(line)

    def turn(self, task: str, num_batches: int) -> tuple[float, float]:
        """Images a second of processor time, and a second by the clock."""
        before = self.cpu_s()
        self.ask(task, num_batches)
        found = self.answer()
        cpu_s = self.cpu_s() - before
        self.largest_bytes = max(self.largest_bytes, self.memory_bytes())
        return found["images"] / cpu_s, found["images"] / found["seconds"]

    def processes(self) -> Iterator[tuple[Path, list[str]]]:
        """Folder in /proc and fields of `stat` from the third on, of each process of the group."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(stat[2]) == self.process.pid and stat[0] != "Z":
                    yield folder, stat

    def cpu_s(self) -> float:
        """Processor time of all processes, ended children included."""
        total_s = 0.0
        for folder, stat in self.processes():
            # what clock_getcpuclockid(3) gives: nanoseconds, where `stat` counts hundredths
            clock = (~int(folder.name) << 3) | 2
            total_s += time.clock_gettime(clock) + sum(map(int, stat[13:15])) / TICKS_PER_S
        return total_s

    def memory_bytes(self) -> int:
        """Memory that the processes have for themselves and among themselves; not the pages of
        files, libraries among them."""
        total_kib = 0
        for folder, _ in self.processes():
            total_kib += sum(
                map(
                    int,
                    re.findall(
                        r"^Pss_(?:Anon|Shmem):\s+(\d+)",
                        (folder / "smaps_rollup").read_text(),
                        re.MULTILINE,
                    ),
                )
            )
        return total_kib << 10

    def close(self) -> None:
        """End it, gently if it lets itself be ended so: in 10 s, and what it leaves behind to clean
        up in another 5."""
        with contextlib.suppress(ProcessLookupError, BrokenPipeError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGCONT)
            self.process.communicate(timeout=10)
        give_up_at = time.monotonic() + 5
        while any(self.processes()) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# ---- measuring -----------------------------------------------------------------------------------


class Benchmark:
    """Contestants on the same images, for so many rounds."""

    def __init__(self, data: Data, batch_size: int, num_batches: int, rounds: int):
        self.data = data
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.rounds = rounds
        self.failures: dict[str, str] = {}
        """Contestants that take no part, or no longer, and why."""
        self.facts: dict[str, dict[str, str]] = {}
        """Of each contestant: the type of images it gives, the memory it takes."""

    @contextlib.contextmanager
    def serving(self, names: Sequence[str], workers: int) -> Iterator[list[Server]]:
        """The contestants, started and warm, without those who fail."""
        servers = list[Server]()

        def start(name: str) -> None:
            servers.append(server := Server(name, self.data, workers, self.batch_size))
            print(
                f"starting with {workers} workers: {len(servers)} of {len(names)}, {name}",
                file=sys.stderr,
                flush=True,
            )
            server.ask("train", 1)
            try:
                found = server.answer()
            except Failed as failure:
                self.failures[name] = str(failure)
                return
            if not name.startswith("limit"):
                assert found["shape"] == [self.batch_size, 3, 224, 224], (
                    f"{name} gives {found['shape']}"
                )
            self.facts[name] = {"gives": found["dtype"].removeprefix("torch.")}

        try:
            with ThreadPoolExecutor(CORES) as pool:
                list(pool.map(start, names))
            yield sorted(
                (server for server in servers if server.name not in self.failures),
                key=lambda server: names.index(server.name),
            )
        finally:
            with ThreadPoolExecutor(CORES) as pool:
                list(pool.map(Server.close, servers))

    def turns(self, title: str) -> Iterator[bool]:
        """Whether the round counts: the first one does not."""
        for turn in range(self.rounds + 1):
            print(f"{title}: round {turn} of {self.rounds}", file=sys.stderr, flush=True)
            yield turn > 0

    def measure(
        self, title: str, task: str, servers: Sequence[Server], num_batches: int
    ) -> list[Result]:
        """By processor time, and by the clock."""
        running = [server for server in servers if task in CONTESTANTS[server.name].tasks]
        cpu, wall = ({server.name: list[float]() for server in running} for _ in range(2))
        for counts in self.turns(title):
            for server in list(running):
                try:
                    by_cpu, by_clock = server.turn(task, num_batches)
                except Failed as failure:
                    self.failures[server.name] = str(failure)
                    running.remove(server)
                    del cpu[server.name], wall[server.name]
                    continue
                self.facts[server.name]["MB"] = f"{server.largest_bytes / 1e6:,.0f}"
                cpu[server.name] += [by_cpu] if counts else []
                wall[server.name] += [by_clock] if counts else []
        bases = [name for name in (V1, FFCV, WHOLE) if name in cpu]
        return [as_result(title, CPU, cpu, bases), as_result(title, WALL, wall, bases)]

    def measure_scaling(self, name: str) -> list[Result]:
        """What each of several processes does that know nothing of each other, like ranks of a
        host, next to one alone. [] if it failed."""
        alone = "alone"
        among = f"{CORES} at a time, each"
        rates: dict[str, list[float]] = {alone: [], among: []}
        with self.serving([name] * CORES, 0) as servers:
            if len(servers) < CORES:
                return []
            for counts in self.turns(f"{name}, {CORES} processes"):
                for kind, some in ((alone, servers[:1]), (among, servers)):
                    for server in some:
                        server.ask("train", 2 * self.num_batches)
                    found = [server.answer() for server in some]
                    rates[kind] += (
                        [found[0]["images"] / max(answer["seconds"] for answer in found)]
                        if counts
                        else []
                    )
        return [as_result(name, WALL, rates, [alone])]


# ---- showing -------------------------------------------------------------------------------------


def rows_of_both(
    cpu: Result, wall: Result, facts: Mapping[str, Mapping[str, str]]
) -> list[list[str]]:
    """Head and rows of one table: by processor time first, as that depends least on what else the
    machine does."""
    short = {V1: "x v1", FFCV: "x FFCV", WHOLE: "x limit"}
    rows = [
        [
            "",
            CPU,
            "from - to",
            *(short[base] for base in cpu["bases"]),
            WALL,
            *(short[base] for base in wall["bases"][:1]),
            "gives",
            "MB",
        ]
    ]
    for name, row in cpu["rows"].items():
        by_cpu = [
            shown(row["median"]),
            f"{shown(row['min'])} - {shown(row['max'])}",
            *(f"{ratio:.2f}" for ratio in row["ratios"].values()),
        ]
        # its processes end between turns, and the time they took ends with them
        if row["min"] <= 0:
            by_cpu = ["not known"] + ["-"] * (len(by_cpu) - 1)
        by_clock = wall["rows"][name]
        clock = [
            shown(by_clock["median"]),
            *(f"{by_clock['ratios'][base]:.2f}" for base in wall["bases"][:1]),
        ]
        rows.append([name, *by_cpu, *clock, facts[name]["gives"], facts[name]["MB"]])
    return rows


def scaling_rows(results: Sequence[Result]) -> list[list[str]]:
    """Head and rows: what each of several processes does of what one does alone."""
    rows = [["", f"{WALL} alone", f"each of {CORES}", "ratio"]]
    for result in results:
        alone, among = result["rows"].values()
        rows.append(
            [
                result["title"],
                shown(alone["median"]),
                shown(among["median"]),
                f"{next(iter(among['ratios'].values())):.3f}",
            ]
        )
    return rows


def draw_bars(path: Path, result: Result, named: str) -> None:
    """A bar for each contestant, ours in colour, limits pale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted(result["rows"].items(), key=lambda item: item[1]["median"])
    colours = [
        (
            "#d95f02"
            if name.startswith("ours")
            else "#cccccc"
            if name.startswith("limit")
            else "#5b7a99"
        )
        for name, _ in rows
    ]
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.32 * len(rows)), layout="constrained")
    axes.barh([name for name, _ in rows], [row["median"] for _, row in rows], color=colours)
    spread = [
        [row["median"] - row["min"] for _, row in rows],
        [row["max"] - row["median"] for _, row in rows],
    ]
    axes.errorbar(
        [row["median"] for _, row in rows],
        range(len(rows)),
        xerr=spread,
        fmt="none",
        ecolor="#333333",
        elinewidth=0.8,
    )
    labels = [
        f"{row['median']:,.0f}"
        + "".join(f"   {row['ratios'][V1]:.2f}x" for _ in [V1] if V1 in row["ratios"])
        for _, row in rows
    ]
    for place, (label, (_, row)) in enumerate(zip(labels, rows, strict=True)):
        axes.annotate(
            label,
            (row["max"], place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("images a CPU-second")
    axes.set_title(f"{result['title']}\n{named}", fontsize=9, loc="left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run the command line."""
    parser = create_parser(__doc__ or "", "loader")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CONTESTANTS,
        default=list(CONTESTANTS),
        metavar="NAME",
        help="default: all",
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 2], metavar="N", help="default: 0 2"
    )
    args = parser.parse_args()
    num_images, batch_size, num_batches, rounds = (
        (64, 16, 2, 1) if args.quick else (2000, 64, 5, args.rounds)
    )

    data = make_data(args.data, num_images)
    load = os.getloadavg()[0]
    facts = machine(args.data, PACKAGES)
    bench = Benchmark(data, batch_size, num_batches, rounds)
    versions = {name: version(name) for name in args.only}
    installed = [name for name, found in versions.items() if found is not None]
    results = list[Result]()
    tables = dict[str, list[list[str]]]()
    for workers in args.workers:
        kinds = {"train": f"Training: random-resized crop and flip, {workers or 'no'} workers"}
        kinds |= (
            {} if workers else {"eval": "Evaluation: resize to 256 and centre crop, no workers"}
        )
        names = [
            name for name in installed if not (workers and CONTESTANTS[name].only_without_workers)
        ]
        with bench.serving(names, workers) as servers:
            for task, title in kinds.items():
                found = bench.measure(title, task, servers, num_batches * (2 if workers else 1))
                tables[title] = rows_of_both(found[0], found[1], bench.facts)
                results += found
    scaling = [
        result for name in SCALED if name in installed for result in bench.measure_scaling(name)
    ]
    tables[f"{CORES} independent processes, no workers"] = scaling_rows(scaling)
    tables["Size of the images on the disk"] = bytes_rows(data)
    failures = (
        dict.fromkeys(sorted(set(args.only) - set(installed)), "not installed") | bench.failures
    )
    named = {name: f"{CONTESTANTS[name].package} {versions[name]}" for name in installed} | failures
    tables["Contestants"] = [["", "version"], *([name, named[name]] for name in args.only)]

    report = {
        "data": describe(data),
        "rounds": rounds,
        "machine": facts,
        "load": load,
        "contestants": named,
        "results": results,
        "scaling": scaling,
    }
    out = keep(args.out, "loader-quick" if args.quick else "loader", report, tables)
    draw_bars(
        out.with_suffix(".png"),
        results[0],
        f"{facts['cpu']}, batches of {batch_size}, rounds: {rounds}",
    )


if __name__ == "__main__":
    main()
