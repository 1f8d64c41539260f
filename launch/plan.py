"""Estimate the GPU memory, hours, cost, cores, host memory and disk space that a run will need.

    python launch/plan.py --config configs/vit_l16.yaml --gpus 8xH200
    python launch/plan.py --config configs/vit_b16.yaml --gpus 64xH100 --price 3.5
    python launch/plan.py --config configs/vit_h14.yaml --gpus 16xA100-40GB data.micro_batch_size=32
    python launch/plan.py --config configs/vit_b16.yaml --gpus 8xMyGPU --peak-tflops 312 \\
        --bandwidth-gbs 2039 --memory-gib 79

The estimate requires neither a GPU nor the data. Memory is counted on meta tensors. If the shards
cannot be opened, the data are assumed to be ImageNet-1k. `--json` prints one object, in which
`fits` is true if the GPUs have enough memory. Exit status: 0, or 2 after a user mistake.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import check_versions  # noqa: F401
from rich.console import Console

from vit.config.command_line import config_parser
from vit.config.io import load_config
from vit.distributed.exit import run_command
from vit.extras.planner.forecast import (
    GPUS_PER_HOST,
    IMAGES_PER_CORE_S,
    SHARD_BYTES_PER_IMAGE,
    Forecast,
    make_forecast,
    usable_bytes,
)
from vit.system.gpus import GPUS, parse_gpus
from vit.system.meter import GIB


def main() -> None:
    args = read_command_line()
    if args.price is not None and not 0 <= args.price < float("inf"):
        raise ValueError(f"--price {args.price}: expected the hourly cost of one GPU, such as 3.5")

    num_gpus, gpu = parse_gpus(args.gpus, args.peak_tflops, args.bandwidth_gbs, args.memory_gib)
    for option in ("cores", "network_gbs"):
        number = getattr(args, option)
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"--{option.replace('_', '-')} {number}: expected a positive number")

    config = load_config(args.config, args.overrides)
    # The status line appears only in a terminal, and is removed at the end.
    with Console(stderr=True, quiet=not sys.stderr.isatty()).status("counting the memory of steps"):
        forecast = make_forecast(config, num_gpus, gpu)
    if args.json:
        print(json.dumps(as_json(forecast, args), indent=1))
    else:
        print(as_text(config.model.name, forecast, args))


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and the settings (`overrides`). Raises ValueError for invalid arguments."""
    parser = config_parser("python launch/plan.py", __doc__)
    parser.add_argument(
        "--gpus",
        required=True,
        metavar="NxNAME",
        help=f"number and name of the GPUs: {', '.join(gpu.name for gpu in GPUS)}",
    )
    for option, metavar, explanation in (
        ("--peak-tflops", "T", "peak of a GPU that is not in the list, in TFLOP/s"),
        ("--bandwidth-gbs", "B", "memory bandwidth of that GPU, in GB/s"),
        ("--memory-gib", "M", "memory of that GPU, in GiB"),
        ("--price", "P", "hourly cost of one GPU in any currency"),
        ("--cores", "N", "CPU cores per GPU, which limit the end-to-end time"),
        ("--network-gbs", "G", "GB/s in and out of each host, which limit the end-to-end time"),
    ):
        parser.add_argument(option, type=float, metavar=metavar, help=explanation)

    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_intermixed_args(arguments)


def as_text(model_name: str, forecast: Forecast, args: Namespace) -> str:
    """Format the forecast as text with one line per quantity."""
    plan, gpu, num_gpus = forecast.plan, forecast.gpu, forecast.num_gpus
    rank_batch = plan.micro_batch_size * plan.accumulation_steps

    slow, fast = forecast.images_per_s(forecast.image_s)
    end_to_end_h = forecast.end_to_end_h(args.cores, args.network_gbs)
    is_limited = end_to_end_h[0] > forecast.end_to_end_h(None, None)[0]
    limited = "; --cores or --network-gbs is the limit" if is_limited else ""
    factors = _range([forecast.end_to_end.low, forecast.end_to_end.high])

    lines = {
        "data": f"{forecast.data.num_images:,} images",
        "steps": f"{plan.total_steps:,} of {plan.global_batch_size:,} images: {rank_batch}"
        f" per GPU, in {plan.accumulation_steps} pass(es) of {plan.micro_batch_size}",
        "memory": _memory(forecast),
        "micro-batch": _micro_batch(forecast),
        "speed": f"{_range((slow, fast))} images/s, per GPU"
        f" {_range((slow / num_gpus, fast / num_gpus))}:"
        f" {_range([100 * each for each in forecast.mfu])} % of the peak"
        f" ({forecast.speed.source})",
        "compute": f"{_time(forecast.compute_h, num_gpus)}, including evaluations",
        "end to end": f"{_time(end_to_end_h, num_gpus)}: complete runs took {factors} times as long"
        f" as their computation ({forecast.end_to_end.source}){limited}",
        "cores": f"{_range(forecast.cores_per_gpu)} per GPU, or decoding is the bottleneck"
        f" ({IMAGES_PER_CORE_S:,} images/s per core from shards at 110 kB an image, measured)",
        "host": _host(forecast),
        "disk": _disk(forecast),
    }

    if forecast.network_gbs:
        lines["network"] = (
            f"{_range([forecast.network_gbs])} GB/s in and out of each host with {GPUS_PER_HOST}"
            " GPUs, or the sums of gradients are the bottleneck"
        )
    if len(forecast.stages) > 1:
        lines["image sizes"] = _image_sizes(forecast)
    if forecast.data.assumed:
        lines["data"] += (
            " and all steps assume ImageNet-1k, because the data cannot be opened here"
            f" ({forecast.data.assumed})"
        )
    if forecast.teacher_flops:
        lines["teacher"] = (
            f"{forecast.teacher_flops / 1e9:.2f} GFLOP per image, counted in memory, speed and time"
        )
    if args.price is not None:
        per_hour = args.price * num_gpus
        compute = _range([per_hour * hours for hours in forecast.compute_h])
        whole = _range([per_hour * hours for hours in end_to_end_h])
        lines["cost"] = f"compute {compute}, end to end {whole} at {args.price:g} per GPU-hour"

    title = (
        f"{model_name} on {num_gpus} x {gpu.name} ({forecast.precision}: peak"
        f" {gpu.peak_tflops(forecast.precision):,.0f} TFLOP/s; {gpu.memory_gib} GiB)"
    )
    return "\n".join([title, *(f"  {name:12} {text}" for name, text in lines.items())])


def as_json(forecast: Forecast, args: Namespace) -> dict[str, Any]:
    """Convert the forecast to a dict of numbers, with ranges as [least, most]."""
    hours = {
        "compute": forecast.compute_h,
        "end_to_end": forecast.end_to_end_h(args.cores, args.network_gbs),
    }
    gpu_hours = _scaled(hours, forecast.num_gpus)
    host = forecast.host_memory

    return {
        "gpu": asdict(forecast.gpu),
        "num_gpus": forecast.num_gpus,
        "plan": asdict(forecast.plan),
        "data": asdict(forecast.data),
        "fits": forecast.fits,
        "memory_bytes": {**asdict(forecast.memory), "total": forecast.memory.total},
        "usable_bytes": int(usable_bytes(forecast.gpu)),
        "host_memory_bytes": {
            "slots": host.ring.num_bytes,
            "eval_slots": host.eval_slots,
            "workers": host.workers,
            "saved_copy": host.saved_copy,
            "of_each_gpu": host.of_each_gpu,
        },
        "largest_micro_batch_size": forecast.largest_micro_batch_size,
        "gflop_per_image": forecast.forward.flops / 1e9,
        "teacher_gflop_per_image": forecast.teacher_flops / 1e9,
        "mfu": forecast.mfu,
        "speed": asdict(forecast.speed),
        "images_per_s": forecast.images_per_s(forecast.image_s),
        "stages": [
            {**asdict(stage), "images_per_s": forecast.images_per_s(stage.image_s)}
            for stage in forecast.stages
        ],
        "hours": hours,
        "gpu_hours": gpu_hours,
        "cost": None if args.price is None else _scaled(gpu_hours, args.price),
        "end_to_end": asdict(forecast.end_to_end),
        "cores_per_gpu": forecast.cores_per_gpu,
        "network_gbs": forecast.network_gbs,
        "run_folder_bytes": forecast.disk.total_bytes,
    }


def _scaled(ranges: Mapping[str, Sequence[float]], factor: float) -> dict[str, list[float]]:
    return {name: [factor * end for end in ends] for name, ends in ranges.items()}


def _time(hours: Sequence[float], num_gpus: int) -> str:
    return f"{_duration(hours)}, {_range([num_gpus * each for each in hours])} GPU-hours"


def _memory(forecast: Forecast) -> str:
    """Describe the memory that a step needs, and each part of it that is at least 0.005 GiB."""
    memory = forecast.memory
    parts = ", ".join(
        f"{name} {value / GIB:.2f}" for name, value in asdict(memory).items() if value >= GIB / 200
    )
    verdict = "" if forecast.fits else "DOES NOT FIT: "
    total = memory.total / GIB
    return (
        f"{verdict}{total:.{1 if total >= 1 else 3}f} of {usable_bytes(forecast.gpu) / GIB:.1f} GiB"
        f" available to a step: {parts}; torch.compile needs less"
    )


def _micro_batch(forecast: Forecast) -> str:
    largest, planned = forecast.largest_micro_batch_size, forecast.plan.micro_batch_size
    if not largest:
        return "none fits: use GPUs with more memory, or a smaller model or image size"
    if largest == planned:
        return f"{planned} is the largest that fits"
    effect = "fewer passes" if largest > planned else "so that it fits"
    return f"{largest} is the largest that fits: data.micro_batch_size={largest} ({effect})"


def _image_sizes(forecast: Forecast) -> str:
    parts = []
    for stage in forecast.stages:
        height, width = stage.image_size
        rates = [each / forecast.num_gpus for each in forecast.images_per_s(stage.image_s)]
        parts.append(
            f"{height}x{width} until step {stage.stop:,} ({_range(rates)} images/s per GPU)"
        )
    return f"{', '.join(parts)}; memory for the largest size, mean speed of the run"


def _host(forecast: Forecast) -> str:
    memory = forecast.host_memory
    return (
        f"{memory.of_each_gpu / GIB:.2f} GiB per GPU: batches {memory.ring.num_bytes / GIB:.2f},"
        f" evaluation batches {memory.eval_slots / GIB:.2f}, workers {memory.workers / GIB:.2f};"
        f" on the first host {memory.saved_copy / GIB:.2f} for the copy while saving"
    )


def _disk(forecast: Forecast) -> str:
    disk = forecast.disk
    shards_gb = forecast.data.num_images * SHARD_BYTES_PER_IMAGE / 1e9
    return (
        f"{_gib(disk.total_bytes)} for the run ({disk.in_words(_gib)});"
        f" shards about {shards_gb:,.0f} GB if images are as large as ImageNet's"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _range(ends: Sequence[float]) -> str:
    """Format a range with three digits as `3.56 to 7.13`, or as one number if both ends are
    equal."""
    rounded = [float(f"{end:.3g}") for end in ends]
    texts = [f"{end:,.0f}" if abs(end) >= 100 else f"{end:.3g}" for end in rounded]
    return " to ".join(dict.fromkeys(texts))


def _duration(hours: Sequence[float]) -> str:
    """Format a range of hours, in minutes or seconds if the smallest value is below one hour."""
    in_an_hour = {"h": 1, "min": 60, "s": 3600}
    unit = next((unit for unit in in_an_hour if hours[0] * in_an_hour[unit] >= 1), "s")
    return f"{_range([each * in_an_hour[unit] for each in hours])} {unit}"


if __name__ == "__main__":
    run_command(main)
