"""Count the launches and the moved bytes of a compiled training step, and compare them with timm's
model in the same step.

    python benchmarks/step_bytes.py [--sizes s16 b16 l16 h14] [--out FILE.json]

No GPU is needed, because torch's real host code runs on a fake GPU that computes nothing
(`tests/fake_gpu`), and Inductor's kernels are counted as they are launched. The tables list bytes
by cause, and a lower bound for the time. No kernel can be faster than its operations at the GPU's
peak performance, or than its bytes at the GPU's memory bandwidth. The sum over all kernels is the
lower bound for a step, and a real GPU takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import keep, machine

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from fake_gpu import build  # noqa: E402

from vit.system.gpus import find_gpu  # noqa: E402

GPUS = ("H100", "H200", "A100", "RTX-4090")
SIZES = {
    "s16": ("small_patch16_224", 256),
    "b16": ("base_patch16_224", 256),
    "l16": ("large_patch16_224", 128),
    "h14": ("huge_patch14_224", 128),
}
"""Maps each size to timm's name for it, and to the number of images per step."""
BF16 = ("train.precision=bf16", "train.residual_dtype=bf16")
OPERANDS = ("operands of matrix products", "attention")
Count = dict[str, Any]


def contestants(size: str) -> dict[str, tuple[str, ...]]:
    """Return the settings of each contestant of `size`."""
    guest, num_images = SIZES[size]
    common = (
        *("train.compile=true", "model.image_size=224"),
        *(f"data.global_batch_size={num_images}", f"data.micro_batch_size={num_images}"),
    )
    ours = (f"model.name=vit_{size}", *common)
    return {
        "timm": (f"model.name=timm/vit_{guest}", *common),
        "ours": ours,
        "ours, bf16 residual": (*ours, *BF16),
    }


def count(settings: tuple[str, ...]) -> Count:
    """Return the counts that `tests/fake_gpu/counting.py` measures for the recipe vit_b16."""
    with tempfile.TemporaryDirectory() as folder:
        # Inductor does not quote its cache's path when it calls the C++ compiler, so the path must
        # have no spaces.
        caches = Path(tempfile.gettempdir(), f"vit-step-bytes-{os.getuid()}")
        env = os.environ | build.variables(build.build())
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TORCH_LOGS": "-all"}

        result = Path(folder, "count.json")
        line = [
            sys.executable,
            str(TESTS / "fake_gpu/child.py"),
            str(TESTS / "fake_gpu/counting.py"),
        ]
        line += [str(result), "vit_b16", *settings]

        done = subprocess.run(line, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {' '.join(settings)}:\n{done.stderr}")
        return json.loads(result.read_text())


def total_bytes(counts: Count, without: tuple[str, ...] = ()) -> int:
    return sum(cause["bytes"] for name, cause in counts["causes"].items() if name not in without)


def bound(counts: Count, gpu_name: str) -> tuple[float, float]:
    """Return the shortest possible time of the step in ms, and the MFU of a step that takes this
    time."""
    gpu = find_gpu(gpu_name)
    peak = gpu.bf16_tflops * 1e12
    bandwidth = gpu.bandwidth_gbs * 1e9
    step_s = sum(
        max(num_flops / peak, num_bytes / bandwidth)
        for *_, num_bytes, num_flops in counts["kernels"]
    )

    # Attention's backward pass computes a fifth of its products for the second time.
    useful = sum(
        num_flops * (0.8 if "attention_backward" in name else 1)
        for _, _, name, _, _, num_flops in counts["kernels"]
    )
    return 1e3 * step_s, useful / peak / step_s


def tables_of(size: str, counts: dict[str, Count]) -> dict[str, list[list[str]]]:
    """Return the tables for one size. counts: each contestant's counts."""
    base = counts["timm"]
    names = list(counts)
    causes = sorted(base["causes"], key=lambda name: -base["causes"][name]["bytes"])
    rows = [["GB", *names]]

    for cause in causes:
        gigabytes = [
            each["causes"].get(cause, {"bytes": 0})["bytes"] / 1e9 for each in counts.values()
        ]
        rows.append([cause, *(f"{value:.2f}" for value in gigabytes)])

    for label, without in (("together", ()), ("without operands and attention", OPERANDS)):
        totals = [total_bytes(each, without) for each in counts.values()]
        rows.append(
            [label, *(f"{total / 1e9:.1f} ({total / totals[0] - 1:+.1%})" for total in totals)]
        )

    rows.append(["launches", *(str(each["launches"]) for each in counts.values())])
    rows.append(
        ["CPU time to queue a step, ms", *(f"{each['host_ms']:.0f}" for each in counts.values())]
    )
    rows.append(["peak memory, GiB", *(f"{each['peak_gib']:.1f}" for each in counts.values())])

    bounds = [["at best: ms, MFU", *names]]
    for gpu in GPUS:
        pairs = [bound(each, gpu) for each in counts.values()]
        bounds.append([gpu, *(f"{step_ms:.1f}, {mfu:.0%}" for step_ms, mfu in pairs)])

    num_images = SIZES[size][1]
    heading = f"ViT-{size[0].upper()}/{size[1:]}, {num_images} images"
    return {heading: rows, f"{heading}: bound": bounds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if reason := build.reason_not_to_build():
        sys.exit(f"error: {reason}")

    load = os.getloadavg()[0]
    counts: dict[str, dict[str, Count]] = {}
    tables: dict[str, list[list[str]]] = {}
    for size in args.sizes:
        counts[size] = {}
        for name, settings in contestants(size).items():
            print(f"{size}: {name}", file=sys.stderr, flush=True)
            counts[size][name] = count(settings)
        tables |= tables_of(size, counts[size])
        for each in counts[size].values():
            del each["kernels"]
    report = {
        "machine": machine(Path(tempfile.gettempdir()), ["torch", "triton", "timm"]),
        "data": "noise",
        "rounds": 1,
        "load": load,
        "counts": counts,
    }
    keep(args.out, "step-bytes", report, tables)


if __name__ == "__main__":
    main()
