"""Train a small ViT on real images twice. One run is undisturbed, and the other run is killed in
the middle and resumed.

    python benchmarks/gpu_check/photos.py SHARDS --out FOLDER
    python benchmarks/gpu_check/photos.py SHARDS --out FOLDER --device cpu --epochs 2

The recipe is small/distributed_vit_cifar10, applied to all images in SHARDS. With
`train.deterministic`, both runs must end with bit-identical weights. The result of each run is
written to FOLDER/photos.json when the run ends, and its metrics are copied to FOLDER. The exit
status is 1 if the weights differ, 2 after a user mistake, and 0 otherwise.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from kills import Place, execute, train_lines, wait_for_step
from safetensors.torch import load_file

from vit.distributed.exit import run_command
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import METRICS_FILE
from vit.system.command_line import Parser
from vit.system.files import replacing

CONFIG = Path(__file__).parents[2] / "configs" / "small" / "distributed_vit_cifar10.yaml"


def main() -> None:
    args = read_command_line()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vit-real-images-") as folder:
        settings = (
            f"data.root={args.shards}",
            f"train.epochs={args.epochs}",
            f"train.device={args.device}",
            f"train.precision={'bf16' if args.device == 'cuda' else 'fp32'}",
            f"loader.num_workers={args.workers}",
            "checkpoint.every_steps=50",
            "log.every_steps=5",
            "log.wandb=off",
            *args.overrides,
        )
        place = Place(CONFIG, Path(folder), settings)
        for name in ("undisturbed", "killed"):
            run_dir = place.folder / name
            results[name] = train(place, run_dir, kill=name == "killed")
            shutil.copy(run_dir / METRICS_FILE, args.out / f"photos_{name}.jsonl")
            with replacing(args.out / "photos.json") as file:
                file.write((json.dumps(results, indent=1) + "\n").encode())
            print(f"{name}: {describe(results[name])}", flush=True)

    if not results["killed"]["restarts"]:
        raise ValueError("the killed run had no checkpoint to resume: use more --epochs")
    if results["killed"]["sha256"] != results["undisturbed"]["sha256"]:
        raise SystemExit("the weights of the killed run differ from those of the undisturbed run")
    print("the killed run ends with the bits of the undisturbed run")


def read_command_line() -> Namespace:
    """Parse the command line. Raises ValueError for mistakes."""
    parser = Parser("python benchmarks/gpu_check/photos.py", __doc__)
    parser.add_argument("shards", type=Path, metavar="SHARDS", help="a folder of `make lease-kit`")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--workers", type=int, default=8, help="loader workers (default: 8)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args()


def train(place: Place, run_dir: Path, *, kill: bool) -> dict[str, Any]:
    """Train to the end, and summarize the run. If `kill` is true, kill the run in the middle with
    SIGKILL, and resume it."""
    began_s = time.monotonic()
    command = place.command(run_dir, "train.deterministic=true")
    if kill:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **quiet) as process:
            try:
                wait_for_step(process, run_dir, 0)
                wait_for_step(process, run_dir, _num_steps(run_dir) // 2)
            finally:
                process.kill()
    execute(command)

    lines = list(read_metrics(run_dir / METRICS_FILE))
    evaluations = [line for line in lines if line["kind"] == "eval"]
    [state] = (run_dir / "checkpoints").glob(f"step_{_num_steps(run_dir):08d}/state.safetensors")
    return {
        "top1": {line["step"]: line["top1"] for line in evaluations},
        "images_per_s": statistics.median(line["images_per_s"] for line in train_lines(run_dir)),
        "restarts": max(line.get("restarts", 0) for line in lines),
        "wall_s": time.monotonic() - began_s,
        "sha256": _content_sha256(state),
    }


def describe(result: dict[str, Any]) -> str:
    """Format the summary of a run as a line."""
    top1 = list(result["top1"].values())
    last = f"top-1 {top1[-1]:.2f} %" if top1 else "no evaluation"
    return (
        f"{last}, {result['images_per_s']:.0f} images/s, {result['restarts']} restart(s),"
        f" {result['wall_s']:.0f} s, sha256 {result['sha256'][:16]}"
    )


def _num_steps(run_dir: Path) -> int:
    return next(
        line["plan"]["total_steps"]
        for line in read_metrics(run_dir / METRICS_FILE)
        if line["kind"] == "start"
    )


def _content_sha256(path: Path) -> str:
    """Hash the names and values of all tensors in a checkpoint."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    run_command(main)
