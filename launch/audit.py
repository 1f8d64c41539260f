"""Check that a machine computes right: repeat stretches of a run, and compare every bit.

    python launch/audit.py runs/demo                       5 stretches between kept checkpoints
    torchrun --nproc_per_node=2 launch/audit.py runs/b16 --segments 20
    python launch/audit.py runs/a runs/b                   the first difference of two equal runs
    torchrun --nproc_per_node=8 launch/audit.py --repeat 20 --config configs/vit_b16.yaml

The run is not changed. Without `train.exact_over_ranks`, the number of ranks must be that of the
run. `checkpoint.keep_every` keeps checkpoints to start from. `--repeat` needs no run: every rank
does the same step on noise, and all results are compared. Exit status: 0 equal, 1 a difference was
found, 2 a mistake, or an audit that this machine cannot do.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import check_versions  # noqa: F401

from vit.config.hints import setting_for
from vit.config.io import load_config
from vit.distributed.exit import leave, run_command
from vit.distributed.process_group import World, is_main_process, join_world
from vit.extras.audit.auditing import audit
from vit.extras.audit.history import History
from vit.extras.audit.judging import Difference, compare_runs
from vit.extras.audit.self_test import differing, self_test
from vit.extras.compose import join_for
from vit.run_folder import CONFIG_FILE
from vit.system.command_line import Parser

SHOWN = 4
"""The maximum number of differences to print for each stretch."""
Results = dict[str, list[Difference]]
"""Maps what was compared to its differences, on rank 0."""


def main() -> World:
    args = read_command_line()
    notes = list[str]()

    def log_line(text: str) -> None:
        notes.append(text)
        if is_main_process() and not args.json:
            print(text, flush=True)

    if args.repeat is not None:
        world, results = test_machine(args, log_line)
    elif len(args.runs) == 2:
        world = join_world("cpu", "--device ")
        differences = compare_runs(
            History(Path(args.runs[0])), History(Path(args.runs[1])), log_line
        )
        results = {" and ".join(args.runs): differences}
    else:
        history = History(Path(args.runs[0]))
        world = join_for(load_config(history.run_dir / CONFIG_FILE, args.overrides))
        results = audit(history, world, args.overrides, args.segments, args.seed, log_line)
    differs = world.broadcast_from_main(lambda: any(results.values()))
    if args.json and world.is_main:
        print(json.dumps({"equal": not differs, "notes": notes, "differences": results}, indent=1))
    elif world.is_main:
        print_results(results)
    if differs:
        world.barrier()
        if world.size > 1:
            leave(1)
        sys.exit(1)
    return world


def test_machine(args: Namespace, log_line: Callable[[str], None]) -> tuple[World, Results]:
    """Repeat a step on every rank, without a run."""
    config = load_config(args.config, args.overrides) if args.config else None
    device = "auto" if config is None else config.train.device
    world = join_world(device, deterministic=True)
    answer = self_test(config, world, args.repeat)
    log_line(f"{args.repeat} times the same step on {world.size} rank(s): {answer['kernels']}")
    answers = world.gather("self-test", answer)
    differences = [Difference(*each) for each in differing(answers, world.hosts)]
    return world, {"repetitions of the step": differences}


def print_results(results: Results) -> None:
    """Print a line for each part, and its first differences."""
    for name, differences in results.items():
        print(f"{name}: {'DIFFERENT' if differences else 'equal'}")
        for step, text in differences[:SHOWN]:
            print(f"  step {step}: {text}")
        if len(differences) > SHOWN:
            step, text = differences[-1]
            print(f"  and {len(differences) - SHOWN} more; the last: step {step}: {text}")


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command line. Settings become `overrides`. Raises ValueError for mistakes."""
    parser = Parser("python launch/audit.py", __doc__, setting_for)
    parser.add_argument(
        "words", nargs="*", metavar="RUN", help="folder of a run, or of two, and changed settings"
    )
    parser.add_argument(
        "--segments", type=int, default=5, metavar="N", help="stretches to repeat (default: 5)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed that chooses them (default: 0)"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="repetitions of a step, no run")
    parser.add_argument(
        "--config", metavar="FILE", help="config of the model for --repeat (default: a small ViT)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_intermixed_args(arguments)
    args.overrides = [word for word in args.words if re.match(r"[a-z]+\.\w+=", word)]
    args.runs = [word for word in args.words if word not in args.overrides]
    if args.repeat is None:
        is_complete = len(args.runs) in (1, 2) and args.segments > 0 and args.config is None
    else:
        is_complete = not args.runs and args.repeat > 1
    if not is_complete:
        parser.error(
            f"{' '.join(args.runs) or 'no run'}: give one run folder or two, and --segments of 1 or"
            " more; or only --repeat of 2 or more, with a --config if it is not a small ViT"
        )
    return args


if __name__ == "__main__":
    run_command(main)
