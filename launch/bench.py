"""Benchmark the training of a config: images/s, MFU, parts of the step, memory and the loader.

    python launch/bench.py --config configs/vit_b16.yaml
    python launch/bench.py --config configs/vit_b16.yaml --data data/imagenet --out results
    torchrun --nproc_per_node=8 launch/bench.py --config configs/vit_l16.yaml train.compile=true
    python launch/bench.py --config configs/vit_b16.yaml --sweep

No data are needed, because the real training step runs on random batches. The step is measured in
eager mode and, on a GPU or with train.compile=true, also compiled. It is measured with the config's
micro-batch size and with the largest size that fits in memory. If several sizes were measured, the
last line proposes the fastest. If data.root can be opened, the loader is also measured, alone and
together with the step. `--out` writes the results to a folder. launch/plan.py reads results from
benchmarks/results. No run folder is written. Exit status: 0, or 2 after a user mistake.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import check_versions  # noqa: F401
from rich.console import Console
from rich.table import Table

from vit.config.command_line import config_parser
from vit.config.io import load_config, with_settings
from vit.distributed import process_group
from vit.distributed.exit import run_command
from vit.distributed.process_group import World
from vit.extras.planner.benchmark.bench import measure
from vit.extras.planner.benchmark.certificate import (
    check_writable,
    loading_table,
    proposal,
    step_table,
    title,
    write_results,
)
from vit.extras.planner.benchmark.subject import Wishes


def main() -> World:
    args = read_command_line()
    overrides = list(args.overrides)
    if args.data is not None:
        overrides.append(f"data.root={json.dumps(args.data)}")
    config = load_config(args.config, overrides)
    if config.train.exact_over_ranks:
        # Exact sums require a fixed micro-batch size, but the benchmark measures several sizes.
        config = with_settings(config, {"train.exact_over_ranks": False})
        if process_group.is_main_process():
            print("note: steps are measured without train.exact_over_ranks", file=sys.stderr)

    world = process_group.join_world(config.train.device, deterministic=config.train.deterministic)
    with world.fail_together():
        if world.is_main and args.out is not None:
            check_writable("--out", args.out)

    wishes = Wishes(
        args.seconds,
        args.steps,
        args.micro_batch,
        sweeps=args.sweep,
        needs_data=args.data is not None,
    )
    result = measure(config, world, wishes)

    if world.is_main:
        show(result, args.json)
        if args.out is not None:
            print(
                f"written: {write_results(args.out, result)} and a .md file",
                file=sys.stderr if args.json else sys.stdout,
            )
    return world


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and the settings (`overrides`). Raises ValueError for invalid arguments."""
    parser = config_parser("python launch/bench.py", __doc__)
    parser.add_argument(
        "--data", metavar="ROOT", help="shards for the loader (default: the config's data.root)"
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="measure only this size")
    parser.add_argument(
        "--sweep", action="store_true", help="also measure the next smaller micro-batches"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds per measurement (default: 10)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps per measurement, instead of --seconds"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write <date>-gpu-<name>.json and .md"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    args = parser.parse_intermixed_args(arguments)
    if not 0 < args.seconds < float("inf"):
        parser.error(f"--seconds {args.seconds:g}: expected more than 0")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps {args.steps}: expected 1 or more")
    return args


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print the measurements as tables, or as a JSON object if `as_json`."""
    if as_json:
        print(json.dumps(result, indent=1))
        return

    console = Console(soft_wrap=True, highlight=False)
    console.print(title(result), markup=False)
    for rows in (step_table(result), loading_table(result)):
        if not rows:
            continue
        table = Table()
        for name in rows[0]:
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)

    fastest = proposal(result)
    if fastest:
        console.print(fastest, markup=False)


if __name__ == "__main__":
    run_command(main)
