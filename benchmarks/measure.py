"""Run the contestants of a benchmark alternately, compare them, and write the figures.

In each round, all contestants run one after the other, so that other load on the machine affects
all contestants. Each figure is the median over rounds, and each ratio is the median of the ratios
within rounds. FILE.json contains every round, and FILE.md contains the tables.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CORES = len(os.sched_getaffinity(0))
Result = dict[str, Any]
"""A table with title, unit, bases, and rows {contestant: {median, min, max, ratios {base: ratio},
rounds}}."""


def take_turns(
    title: str,
    unit: str,
    contestants: Mapping[str, Callable[[], float]],
    rounds: int,
    bases: Sequence[str] = (),
) -> Result:
    """Return each contestant's values, usually rates. The first round is a warm-up and is
    discarded."""
    values_by_name: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        print(f"{title}: round {turn} of {rounds}", file=sys.stderr, flush=True)
        for name, contestant in contestants.items():
            gc.collect()
            value = contestant()
            values_by_name[name] += [value] if turn else []
    return as_result(title, unit, values_by_name, bases)


def as_result(
    title: str, unit: str, values_by_name: Mapping[str, Sequence[float]], bases: Sequence[str] = ()
) -> Result:
    """Return a table. values_by_name: one value per round. bases: contestants to compare with."""
    rows = {}
    for name, values in values_by_name.items():
        ratios = {
            base: statistics.median(
                a / b for a, b in zip(values, values_by_name[base], strict=True)
            )
            for base in bases
        }
        summary = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        rows[name] = {**summary, "ratios": ratios, "rounds": list(values)}
    return {"title": title, "unit": unit, "bases": list(bases), "rows": rows}


def machine(place: Path, packages: Sequence[str]) -> dict[str, Any]:
    """Return the hardware and versions for the report. place: the folder with the files."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, disk = max(
        (mount for mount in mounts if place.resolve().is_relative_to(mount[0])),
        key=lambda mount: len(mount[0]),
    )

    named = {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": CORES,
        "memory GiB": round(memory_gib),
        "file system": disk,
    }
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {**named, "Linux": platform.release(), "Python": platform.python_version(), **versions}


# ---- tables --------------------------------------------------------------------------------------


def shown(value: float) -> str:
    """Format a value with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


def rows_of(result: Result) -> list[list[str]]:
    """Return the header and rows of a table."""
    rows = [["", result["unit"], "from", "to", *(f"ratio to {base}" for base in result["bases"])]]
    for name, row in result["rows"].items():
        ratios = [f"{ratio:.2f}" for ratio in row["ratios"].values()]
        rows.append([name, *(shown(row[part]) for part in ("median", "min", "max")), *ratios])
    return rows


def show(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first row is the header."""
    table = Table(title=title, title_justify="left")
    for column, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if column else "left", no_wrap=not column)
    for row in rows[1:]:
        table.add_row(*row)
    console = Console()
    # Let narrow terminals wrap lines instead of cutting them.
    console.width = max(console.width, 140)
    console.print(table)


def as_markdown(
    title: str, paragraphs: Sequence[str], tables: Mapping[str, Sequence[Sequence[str]]]
) -> str:
    """Return a Markdown page of tables, whose first rows are headers."""
    parts = [f"# {title}", *paragraphs]
    for heading, rows in tables.items():
        head, *body = [f"| {' | '.join(cells)} |" for cells in rows]
        parts += [f"## {heading}", "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])]
    return "\n\n".join(parts) + "\n"


def create_parser(description: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share: --quick, --rounds, --data,
    --out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="little data and one round; figures are meaningless"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")

    place = Path(tempfile.gettempdir(), f"vit-benchmark-{name}")
    parser.add_argument(
        "--data", type=Path, default=place, metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help=f"default: benchmarks/results/<date>-{name}-<processor>.json",
    )
    return parser


def keep(
    out: Path | None,
    benchmark: str,
    report: Mapping[str, Any],
    tables: Mapping[str, Sequence[Sequence[str]]],
) -> Path:
    """Print the tables, and write `out` (.json) and a .md file with the tables.

    report: at least machine, data, rounds and load (the load average at the start). Returns `out`,
    or the default path if `out` is None.
    """
    for title, rows in tables.items():
        show(title, rows)

    out = out or default_out(benchmark, report["machine"]["cpu"])
    report = {"date": time.strftime("%Y-%m-%d"), **report}
    report |= {"load": [report["load"], os.getloadavg()[0]]}
    facts = "; ".join(f"{name} {value}" for name, value in report["machine"].items())
    load = "load average before and after: {:.1f}, {:.1f}".format(*report["load"])
    paragraphs = [f"{report['data']} {report['rounds']} rounds. {facts}; {load}."]

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    page = as_markdown(f"Benchmark: {benchmark}, {report['date']}", paragraphs, tables)
    out.with_suffix(".md").write_text(page)
    print(f"written: {out} and {out.with_suffix('.md').name}")
    return out


def default_out(benchmark: str, cpu: str) -> Path:
    """Return the path benchmarks/results/<date>-<benchmark>-<processor>.json."""
    processor = re.sub(r"\W+", "-", cpu.replace("(R)", "").replace("(TM)", "").lower()).strip("-")
    return (
        Path(__file__).parent
        / "results"
        / f"{time.strftime('%Y-%m-%d')}-{benchmark}-{processor}.json"
    )
