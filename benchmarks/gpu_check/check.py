"""Test every guarantee of this project on this machine, and print each with a measurement.

    make gpu-check
    python benchmarks/gpu_check/check.py --only slots waits graphs
    python benchmarks/gpu_check/check.py --device cpu --small     # tests this program without a GPU

On a GPU, the check takes at most ten minutes (`--minutes`) and writes `<date>-gpu-<name>.json` and
`.md` to benchmarks/results. Please send us your results. If a part fails or exceeds its time limit,
the check reports this and continues. The exit status is 1 if a guarantee is broken, 2 without a GPU
or after a user mistake, and 0 otherwise.
"""

from __future__ import annotations

import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import guarantees
import kills
import levers
import torch
from gpu_check_lines import Line, run_part

from vit.distributed.devices import find_devices
from vit.distributed.exit import Interrupted, run_command
from vit.distributed.process_group import join_world
from vit.extras.planner.benchmark.certificate import (
    check_writable,
    results_file,
    stored_results,
    write_document,
    write_results,
)
from vit.system.command_line import Parser
from vit.system.gpus import find_device
from vit.system.host import cpu_name

RESULTS = Path(__file__).parents[1] / "results"
MODELS = ("vit_b16", "vit_l16", "vit_h14")
FLOOR_MFU = 0.25
"""The minimum MFU as a fraction of the data-sheet peak. Published ViT training reaches 22 to 29 %
on Hopper. This code has not been measured on a GPU yet."""
TINY_MODEL = ("model.name=vit_ti16", "model.depth=2", "model.image_size=32", "train.compile=false")
TINY_STEP = (*TINY_MODEL, "data.global_batch_size=16")
LEVER_STEP = ("model.name=vit_s16", "model.image_size=224", "data.global_batch_size=128")
LEVER_RUN = ("model.name=vit_b16", "optim.lr=1e-4", "schedule.warmup_steps=40")
"""A run whose gradients take longer to send than its small images take to compute."""
TINY_RUN = ("model.depth=2", "model.image_size=32", "loader.num_workers=0")
"""The settings for training runs that the check kills."""


ORDER = (
    *("vit_b16", "slots", "waits", "graphs", "memory", "equality", "vit_l16", "vit_h14"),
    *("levers", "determinism", "rank_levers", "pauses", "resume", "ranks"),
)
"""The order of the parts. The speed of ViT-B/16 comes first, because this number is the most
important one. The quick guarantees follow. The parts with kills start many processes and come last,
so that a check that is cut off has finished as many parts as possible."""


class GpuCheck(NamedTuple):
    """One part of the check, with its time limit in seconds on an H200."""

    name: str
    title: str
    budget_s: float
    run: Callable[[], Iterable[Line]]


def main() -> None:
    args = read_command_line()
    devices = _find_devices(args.device)
    if args.out is not None:
        check_writable("--out", args.out)

    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vit-gpu-check-") as folder:
        all_parts = parts(torch.device(args.device), args.small, Path(folder), devices["gpus"])
        chosen = [part for part in all_parts if not args.only or part.name in args.only]

        unknown = set(args.only) - {part.name for part in all_parts}
        if unknown:
            raise ValueError(
                f"--only {' '.join(sorted(unknown))}: expected a selection of"
                f" {', '.join(part.name for part in all_parts)}"
            )

        print(f"{devices['name']}, torch {torch.__version__}", flush=True)
        lines: list[Line] = []
        written = None
        signal.signal(signal.SIGTERM, _interrupt)

        for part in chosen:
            left_s = 60 * args.minutes - (time.monotonic() - began_s)
            new_lines: list[Line] = []
            # The machine may be reclaimed at any time, so write each part as soon as it ends, even
            # if a signal ended it.
            try:
                run_part(part.title, part.run, part.budget_s, left_s, partial(_take, new_lines))
            finally:
                lines += new_lines
                if args.out is not None and new_lines:
                    written = _write(args.out, devices["name"], args.device, part.title, new_lines)

    if written is not None:
        print(f"written: {written} and a .md file")

    num_kept = sum(line.passed is True for line in lines)
    num_broken = sum(line.passed is False for line in lines)
    not_run = [line.what for line in lines if line.text.startswith("not run")]
    took_s = time.monotonic() - began_s
    skipped = f", {len(not_run)} parts were not run ({', '.join(not_run)})" if not_run else ""
    print(f"{num_kept} guarantees hold, {num_broken} do not, in {took_s:.0f} s{skipped}")

    if num_broken:
        raise SystemExit(1)


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command line. Raises ValueError for mistakes."""
    parser = Parser("python benchmarks/gpu_check/check.py", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="tiny models only; results are meaningless"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="run only these parts"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="time limit in minutes (default: 10)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for results (default: benchmarks/results; none with --small or cpu)",
    )
    args = parser.parse_args(arguments)

    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    is_full = args.device == "cuda" and not args.small
    if args.out is None and is_full:
        args.out = RESULTS
    return args


def parts(device: torch.device, small: bool, folder: Path, num_gpus: int) -> list[GpuCheck]:
    on_gpu = device.type == "cuda"
    precision = "bf16" if on_gpu else "fp32"
    settings = [f"train.device={device.type}", f"train.precision={precision}"]
    if small:
        settings += TINY_RUN

    big = () if small else ("model.name=vit_b16", "model.image_size=224")
    timed = TINY_STEP if small else ("data.global_batch_size=256", "data.micro_batch_size=256")
    promises: dict[str, tuple[str, float, Callable[[], Iterable[Line]]]] = {
        "slots": ("the loader's slots", 30, partial(guarantees.page_locked_slots, device)),
        "equality": ("the CPU's numbers", 60, partial(guarantees.equals_the_cpu, device)),
        "waits": ("no step waits", 40, partial(guarantees.no_waits, device)),
        "graphs": (
            "graphs are compiled as planned",
            120,
            partial(guarantees.graphs_as_planned, device),
        ),
        "memory": ("peak memory is the planner's", 30, partial(guarantees.planned_memory, device)),
        "determinism": (
            "what train.deterministic costs",
            60,
            partial(guarantees.cost_of_determinism, device, *timed, seconds=1 if small else 5),
        ),
    }

    built = [
        GpuCheck(name, title, budget_s, partial(_on_device, device, run))
        for name, (title, budget_s, run) in promises.items()
    ]

    place = partial(kills.make_place, folder / "resume", *settings)
    built += [
        GpuCheck("resume", "kill -9 and resume", 180, partial(_resume, place, on_gpu)),
        GpuCheck("pauses", "what stops training", 90, partial(_pauses, folder, settings, big)),
    ]

    for model in ("vit_b16",) if small else MODELS:
        run = partial(_speed, model, [*settings[:2], *(TINY_STEP if small else ())], small)
        built.append(GpuCheck(model, f"speed of {model}", 200, run))

    sized = TINY_STEP if small else LEVER_STEP
    num_steps = 8 if small else levers.NUM_STEPS
    one = partial(levers.on_one_device, device, *sized, num_steps=num_steps)
    run_one = partial(_on_device, device, one)
    built.append(GpuCheck("levers", "settings for speed and memory", 240, run_one))

    if num_gpus > 1 or small:
        several = partial(_rank_levers, folder, settings, () if small else LEVER_RUN, num_steps)
        built.append(GpuCheck("rank_levers", "settings for several ranks", 180, several))
        rows = 8 if small else 256
        run = partial(_ranks, folder, settings, rows, TINY_MODEL if small else ())
        built.append(GpuCheck("ranks", "two ranks", 240, run))

    return sorted(built, key=lambda part: ORDER.index(part.name))


def _on_device(device: torch.device, run: Callable[[], Iterable[Line]]) -> Iterable[Line]:
    """Set up the process as for training, then return the lines of `run`."""
    join_world(device.type)
    return run()


def _resume(make_place: Callable[[], kills.Place], on_gpu: bool) -> Iterator[Line]:
    place = make_place()
    yield from kills.killed_and_resumed(place, deterministic=True, promised=True)
    yield from kills.killed_and_resumed(place, deterministic=False, promised=not on_gpu)


def _pauses(folder: Path, settings: Sequence[str], big: Sequence[str]) -> Iterator[Line]:
    yield from kills.pauses(kills.make_place(folder / "pauses", *settings), *big)


def _ranks(
    folder: Path, settings: Sequence[str], rows: int, overrides: Sequence[str]
) -> Iterator[Line]:
    yield from kills.killed_rank(kills.make_place(folder / "ranks", *settings))
    yield from kills.one_and_two_ranks(rows, *settings[:2], *overrides)


def _rank_levers(
    folder: Path, settings: Sequence[str], sized: Sequence[str], num_steps: int
) -> Iterator[Line]:
    place = kills.make_place(folder / "rank_levers", *settings)
    yield from levers.on_two_ranks(place, *sized, num_steps=num_steps)


def _speed(model: str, overrides: Sequence[str], small: bool) -> Iterator[Line]:
    """Measure the eager and compiled speed of a recipe, like launch/bench.py."""
    result = kills.bench(0.5 if small else 4.0, *overrides, config=model)
    for row in result["training"]:
        mode = "compiled" if row["compiled"] else "eager"
        augmenting_s = row["parts_s"]["change"] + row["parts_s"]["finish"]
        fits = row["largest_micro_batch_size"]
        largest = f"; {fits} at a time fit" if fits else ""
        peak = row["peak_memory_gib"]
        bound = ""
        if row["bound_s"]:
            bound = f" ({row['bound_s'] / row['step_s']:.0%} of the time at the limits of the GPU)"
        memory = (
            "" if peak is None else f", {peak:.1f} GiB ({row['planned_memory_gib']:.1f} planned)"
        )
        yield Line(
            f"{row['model']} {mode}, {row['micro_batch_size']} at a time",
            None,
            f"{row['images_per_s']:.0f} images/s, MFU {row['mfu']:.1%}{bound}{memory}, augmentation"
            f" {augmenting_s / row['step_s']:.0%}{largest}",
            {"result": {**result, "training": [row]}},
        )

    if find_device(result["device"]) is not None and not small:
        best = max(row["mfu"] for row in result["training"])
        measured = f"MFU {best:.1%} (at least {FLOOR_MFU:.0%})"
        yield Line(f"{model} reaches the expected speed of this GPU", best >= FLOOR_MFU, measured)


def _find_devices(device: str) -> dict[str, Any]:
    """Return the GPUs' name and number. Raises ValueError if `device` requires a missing GPU."""

    def look() -> Iterator[Line]:
        devices = find_devices()
        name = torch.cuda.get_device_name() if devices.gpus else ""
        yield Line("devices", True, devices.reason, {"gpus": devices.gpus, "name": name})

    # Query in a child process, because forked parts cannot use CUDA once this process has
    # initialized it.
    [line] = run_part("devices", look, 120.0)
    if device == "cpu":
        return {"gpus": 0, "name": f"{cpu_name()} ({torch.get_num_threads()} thread(s))"}
    if not line.numbers.get("gpus"):
        raise ValueError(
            f"no GPU to check: torch sees none ({line.text}); --device cpu --small tests this"
            " program on the CPU"
        )
    return line.numbers


def _take(lines: list[Line], line: Line) -> None:
    """Append a result line, and print it immediately, because the next part may take minutes."""
    lines.append(line)
    print(line, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise an error, so that the process group of the running part is killed."""
    raise Interrupted(number, "in the middle of a part")


def _write(folder: Path, device: str, device_type: str, title: str, lines: Sequence[Line]) -> str:
    """Add the lines of a part to the results, and return the path. Raises ValueError if this
    fails."""

    def write() -> Iterator[Line]:
        for line in lines:
            if "result" in line.numbers:
                write_results(folder, line.numbers["result"])
        promised = [line.to_dict() for line in lines if "result" not in line.numbers]
        # A new line replaces the stored line with the same `what`, and the line that says that the
        # part did not finish. All other lines stored on the same day are kept.
        stored = stored_results(results_file(folder, device, device_type)).get("promises", [])
        new = {title, *(line["what"] for line in promised)}
        kept = [line for line in stored if line["what"] not in new]
        changes = {"promises": [*kept, *promised]}
        path = write_document(folder, device, device_type, changes)
        yield Line("results", True, str(path))

    # Write in a child process, because the results contain the GPU's name (see `_find_devices`).
    [line] = run_part("results", write, 120.0)
    if not line.passed:
        raise ValueError(f"--out {folder}: cannot be written ({line.text})")
    return line.text


if __name__ == "__main__":
    run_command(main)
