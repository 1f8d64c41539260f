"""Measure the path from JPEGs to batches for this loader and its peers, and measure the limits of
decoding.

    python benchmarks/loader.py --quick                               a smoke test of one minute
    python benchmarks/loader.py --only ours "torchvision v1" FFCV     only these contestants
    python benchmarks/loader.py [--rounds N] [--data FOLDER] [--workers N ...] [--out FILE.json]
    python benchmarks/loader.py --photos imagenet-sample-images       1,000 photos of ImageNet, from
                                          https://github.com/EliSchwartz/imagenet-sample-images

JPEGs with ImageNet's sizes are created once and kept in FOLDER (benchmarks/inputs/loader_data.py).
Each contestant (benchmarks/peers.py) runs in separate processes, which are stopped (SIGSTOP)
between turns so that no contestant prepares batches during another's turn. The report lists peers
that are not installed. FILE.json contains every round, FILE.md tables, and FILE.png bars.
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
from peers import CONTESTANTS, FFCV, OURS, V1, WHOLE, version

PACKAGES = ("torch", "numpy", "pillow", "simplejpeg")
SCALED = (*(name for name in CONTESTANTS if name.startswith(OURS)), WHOLE)
PROCESSES = sorted({CORES} | {2**power for power in range(CORES.bit_length()) if 2**power < CORES})
"""The numbers of concurrent processes for `measure_scaling`: 1, 2, 4, ..., `CORES`."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WALL = "images/s"
CPU = "images/CPU-s"
"""The unit: images per CPU second over all processes and threads of a contestant."""


class Failed(Exception):
    """An error raised because a contestant failed. The message states the reason."""


class Server:
    """A contestant that runs in a separate process group, which is stopped between turns."""

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
        # Use one thread per process, as in a worker, and a process group instead of a session. If
        # this process dies, the kernel resumes and ends a stopped process group, but not a session.
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
        # The process has exited, so `answer` raises an error.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{task} {num_batches}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the images, seconds, shape and dtype of the last task, and stop the processes."""
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
        """Run a task twice, and return images per CPU second and per second of the second time.

        The first batches after a pause are slower, and the more so the faster the contestant is.
        """
        self.ask(task, num_batches)
        self.answer()

        before = self.cpu_s()
        self.ask(task, num_batches)
        answer = self.answer()
        cpu_s = self.cpu_s() - before
        self.largest_bytes = max(self.largest_bytes, self.memory_bytes())
        return answer["images"] / cpu_s, answer["images"] / answer["seconds"]

    def processes(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield the /proc folder of each process in the group, and `stat` from field 3 on."""
        for folder in Path("/proc").glob("[0-9]*"):
            # The process has just exited.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(stat[2]) == self.process.pid and stat[0] != "Z":
                    yield folder, stat

    def cpu_s(self) -> float:
        """Return the CPU time of all processes, including finished children."""
        total_s = 0.0
        for folder, stat in self.processes():
            # The clock of clock_getcpuclockid(3) has nanosecond resolution, but `stat` counts
            # hundredths of a second.
            clock = (~int(folder.name) << 3) | 2
            total_s += time.clock_gettime(clock) + sum(map(int, stat[13:15])) / TICKS_PER_S
        return total_s

    def memory_bytes(self) -> int:
        """Return the private and shared memory of all processes, excluding file pages."""
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
        """Give the contestant 10 s and its children 5 s to exit, then kill all that remain."""
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
    """A benchmark that compares contestants on the same images over several rounds."""

    def __init__(self, data: Data, batch_size: int, num_batches: int, rounds: int):
        self.data = data
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.rounds = rounds
        self.failures: dict[str, str] = {}
        self.facts: dict[str, dict[str, str]] = {}
        """The image type and the memory of each contestant."""

    @contextlib.contextmanager
    def serving(self, names: Sequence[str], workers: int) -> Iterator[list[Server]]:
        """Start and warm up the contestants, and yield those that work."""
        servers = list[Server]()

        def start(name: str) -> None:
            server = Server(name, self.data, workers, self.batch_size)
            servers.append(server)
            print(
                f"starting with {workers} workers: {len(servers)} of {len(names)}, {name}",
                file=sys.stderr,
                flush=True,
            )

            server.ask("train", 1)
            try:
                answer = server.answer()
            except Failed as failure:
                self.failures[name] = str(failure)
                return

            if not name.startswith("limit"):
                assert answer["shape"] == [self.batch_size, 3, 224, 224], (
                    f"{name} gives {answer['shape']}"
                )
            self.facts[name] = {"gives": answer["dtype"].removeprefix("torch.")}

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
        """Yield once per round, with False for the first round, which is a warm-up."""
        for turn in range(self.rounds + 1):
            print(f"{title}: round {turn} of {self.rounds}", file=sys.stderr, flush=True)
            yield turn > 0

    def measure(
        self, title: str, task: str, servers: Sequence[Server], num_batches: int
    ) -> list[Result]:
        """Measure a task by CPU time and by wall time. A contestant that fails is left out."""
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
                if counts:  # the first turn warms up
                    cpu[server.name].append(by_cpu)
                    wall[server.name].append(by_clock)

        bases = [name for name in (V1, FFCV, WHOLE) if name in cpu]
        return [as_result(title, CPU, cpu, bases), as_result(title, WALL, wall, bases)]

    def measure_scaling(self, name: str) -> list[Result]:
        """Compare one of several concurrent, independent processes with a single process.

        Returns [] if a process failed.
        """
        rates = {f"each of {count}": list[float]() for count in PROCESSES}
        with self.serving([name] * CORES, 0) as servers:
            if len(servers) < CORES:
                return []
            for counts in self.turns(f"{name}, {CORES} processes"):
                for among, count in zip(rates, PROCESSES, strict=True):
                    for server in servers[:count]:
                        server.ask("train", 2 * self.num_batches)
                    answers = [server.answer() for server in servers[:count]]
                    slowest_s = max(answer["seconds"] for answer in answers)
                    if counts:
                        rates[among].append(answers[0]["images"] / slowest_s)
        return [as_result(name, WALL, rates, list(rates)[:1])]


# ---- showing -------------------------------------------------------------------------------------


def rows_of_both(
    cpu: Result, wall: Result, facts: Mapping[str, Mapping[str, str]]
) -> list[list[str]]:
    """Merge the results by CPU time and by wall time into one table. CPU time comes first, because
    other programs disturb it least."""
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

        # The processes of this contestant exit between turns, so their CPU time is not counted.
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
    """Return a table with the rate of one of several processes, and its ratio to a single one."""
    rows = [["", *(f"{WALL}, each of {count}" for count in PROCESSES), "ratios"]]
    for result in results:
        medians = [shown(row["median"]) for row in result["rows"].values()]
        ratios = [
            f"{ratio:.3f}" for row in result["rows"].values() for ratio in row["ratios"].values()
        ]
        rows.append([result["title"], *medians, ", ".join(ratios[1:])])
    return rows


def draw_bars(path: Path, result: Result, named: str) -> None:
    """Draw one bar per contestant, with this project in color and the limits in pale gray."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted(result["rows"].items(), key=lambda item: item[1]["median"])
    colors = [
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
    axes.barh([name for name, _ in rows], [row["median"] for _, row in rows], color=colors)
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
    parser.add_argument(
        "--photos", type=Path, metavar="FOLDER", help="1,000 files WNID_*.JPEG (default: made)"
    )
    args = parser.parse_args()
    num_images, batch_size, num_batches, rounds = (
        (64, 16, 2, 1) if args.quick else (1000 if args.photos else 2000, 64, 5, args.rounds)
    )

    data = make_data(args.data, num_images, args.photos)
    load = os.getloadavg()[0]
    facts = machine(args.data, PACKAGES)
    bench = Benchmark(data, batch_size, num_batches, rounds)
    versions = {name: version(name) for name in args.only}
    installed = [name for name, number in versions.items() if number is not None]
    results = list[Result]()
    tables = dict[str, list[list[str]]]()
    for workers in args.workers:
        named_workers = "1 worker" if workers == 1 else f"{workers or 'no'} workers"
        kinds = {"train": f"Training: random-resized crop and flip, {named_workers}"}
        kinds |= (
            {} if workers else {"eval": "Evaluation: resize to 256 and center crop, no workers"}
        )
        names = [
            name for name in installed if not (workers and CONTESTANTS[name].only_without_workers)
        ]
        with bench.serving(names, workers) as servers:
            for task, title in kinds.items():
                pair = bench.measure(title, task, servers, num_batches * (2 if workers else 1))
                tables[title] = rows_of_both(pair[0], pair[1], bench.facts)
                results += pair
    scaling = [
        result for name in SCALED if name in installed for result in bench.measure_scaling(name)
    ]
    tables["Independent processes, no workers"] = scaling_rows(scaling)
    tables["Size of the images on the disk"] = bytes_rows(data)
    failures = (
        dict.fromkeys(sorted(set(args.only) - set(installed)), "not installed") | bench.failures
    )
    named = {name: f"{CONTESTANTS[name].package} {versions[name]}" for name in installed} | failures
    tables["Contestants"] = [["", "version"], *([name, named[name]] for name in args.only)]

    report = {
        "data": f"{args.photos.name}: {describe(data)}" if args.photos else describe(data),
        "rounds": rounds,
        "machine": facts,
        "load": load,
        "contestants": named,
        "results": results,
        "scaling": scaling,
    }
    name = "loader-photos" if args.photos else "loader"
    out = keep(args.out, f"{name}-quick" if args.quick else name, report, tables)
    draw_bars(
        out.with_suffix(".png"),
        results[0],
        f"{facts['cpu']}, batches of {batch_size}, rounds: {rounds}",
    )


if __name__ == "__main__":
    main()
