"""Kill training runs, compare resumed runs with uninterrupted runs, and time the detection of
kills.

The runs train on a few generated images, and use the same commands as users.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_check_lines import Line
from PIL import Image
from safetensors.torch import load_file

from vit.config.io import recipes_folder
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import METRICS_FILE

LAUNCH = Path(__file__).parents[2] / "launch"
NUM_STEPS = 24
SAVE_EVERY_STEPS = 8
KILL_AT_STEP = 13
"""The step, between two checkpoints, at which the run is killed."""
NOTICED_S = 60.0
"""The time limit for the detection of a killed rank. torchrun checks its ranks ten times per
second, and kills ranks that do not exit within 30 s."""
POLL_S = 0.05
CONFIG = """
model: {name: vit_ti16, image_size: 64, drop_path_rate: 0.1}
data: {root: SHARDS, global_batch_size: 32}
loader: {num_workers: 2}
augment: {randaugment_layers: 2, mixup_alpha: 0.8, cutmix_alpha: 1.0}
schedule: {warmup_steps: 4}
train: {steps: 24}
ema: {decay: 0.99}
checkpoint: {every_steps: 8, keep_last: 1}
eval: {every_steps: 12, batch_size: 16}
log: {every_steps: 1, wandb: "off", report: false}
"""


@dataclass(frozen=True)
class Place:
    """A config, the folder for its runs, and the settings for training."""

    config: Path
    folder: Path
    settings: tuple[str, ...]

    def command(self, run_dir: Path, *overrides: str, ranks: int = 0) -> list[str]:
        """Return the command that trains in `run_dir`. It uses torchrun if `ranks` is given."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        options = ["--config", str(self.config), f"run.dir={run_dir}", *self.settings, *overrides]
        return [sys.executable, *(torchrun if ranks else []), str(LAUNCH / "train.py"), *options]


def make_place(folder: Path, *settings: str) -> Place:
    """Write shards with 96 noise images in three classes, and a config for training on them."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for label in range(3):
            images = folder / "images" / split / f"class{label}"
            images.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(80 * label, 80 * label + 80, (80, 96, 3), np.uint8)
                Image.fromarray(pixels).save(images / f"{number:03d}.jpg")

    shards = folder / "shards"
    options = [str(folder / "images"), "--out", str(shards), "--num-shards", "2", "--workers", "1"]
    execute([sys.executable, "-m", "data_prep.imagefolder", *options])

    config = folder / "check.yaml"
    config.write_text(CONFIG.replace("SHARDS", str(shards)))
    return Place(config, folder, settings)


def execute(line: Sequence[str]) -> str:
    result = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no output"]
        message = next((line for line in lines if "error: " in line), lines[-1])
        raise RuntimeError(f"the command exited with status {result.returncode}: {message}")
    return result.stdout


def wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    path = run_dir / METRICS_FILE
    while not path.is_file() or not any(line["step"] >= step for line in read_metrics(path)):
        if process.poll() is not None:
            raise RuntimeError(
                f"the training run exited with status {process.returncode} before step {step}"
            )
        time.sleep(POLL_S)


def killed_and_resumed(place: Place, *, deterministic: bool, promised: bool) -> Iterator[Line]:
    """Check that a killed and resumed run reaches the same weights as an uninterrupted run."""
    name = "with" if deterministic else "without"
    setting = f"train.deterministic={str(deterministic).lower()}"
    whole = place.folder / f"whole_{name}"
    killed = place.folder / f"killed_{name}"

    execute(place.command(whole, setting))
    line = place.command(killed, setting)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, **quiet) as process:
        try:
            wait_for_step(process, killed, KILL_AT_STEP)
        finally:
            process.kill()

    execute(line)
    restarts = max(line.get("restarts", 0) for line in read_metrics(killed / METRICS_FILE))

    different = _different_tensors(whole, killed)
    equal = not different and restarts == 1
    outcome = "equal bit for bit" if equal else f"{len(different)} tensors differ"
    rate = statistics.median(line["images_per_s"] for line in train_lines(whole))

    yield Line(
        f"kill -9 and resume, {name} train.deterministic",
        equal if promised else None,
        f"{outcome} ({restarts} restart); {rate:.0f} images/s",
        {"equal": equal, "images_per_s": rate, "restarts": restarts},
    )


def _different_tensors(first: Path, second: Path) -> list[str]:
    """Return the names of the tensors that differ between the last checkpoints of two runs."""
    name = f"checkpoints/step_{NUM_STEPS:08d}/state.safetensors"
    ours, theirs = (load_file(folder / name) for folder in (first, second))
    return [
        key
        for key in ours.keys() | theirs.keys()
        if key not in ours
        or key not in theirs
        or ours[key].numpy().tobytes() != theirs[key].numpy().tobytes()
    ]


def pauses(place: Place, *overrides: str) -> Iterator[Line]:
    """Measure how many seconds a checkpoint and an evaluation delay training."""
    for event, every in (("a save", "checkpoint"), ("an evaluation", "eval")):
        other = {"checkpoint": "eval", "eval": "checkpoint"}[every]
        run_dir = place.folder / f"paused_by_{every}"
        steps = ("train.steps=16", f"{every}.every_steps=5", f"{other}.every_steps=1000")
        execute(place.command(run_dir, *steps, *overrides))
        at_s = {line["step"]: line["elapsed_s"] for line in train_lines(run_dir)}

        # A step is logged only after the next step is queued, so a pause also delays the next line.
        plain_s = statistics.median(at_s[step] - at_s[step - 1] for step in (8, 9, 13, 14))
        # The first pause includes memory allocation, so measure the second pause.
        paused_s = max(at_s[13] - at_s[8] - 5 * plain_s, 0.0)
        yield Line(
            f"{event} stops training",
            None,
            f"for {paused_s:.2f} s; a step takes {plain_s:.3f} s",
            {"paused_s": paused_s, "step_s": plain_s},
        )


def train_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run_dir / METRICS_FILE) if line["kind"] == "train"]


def killed_rank(place: Place, ranks: int = 2) -> Iterator[Line]:
    """Check that torchrun detects a killed rank and stops the other ranks."""
    run_dir = place.folder / "killed_rank"
    line = place.command(run_dir, "train.steps=1000000", "eval.every_steps=1000000", ranks=ranks)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, **quiet) as process:
        try:
            wait_for_step(process, run_dir, 2 * SAVE_EVERY_STEPS)
            began_s = time.monotonic()
            os.kill(rank_process(process.pid, 1), signal.SIGKILL)
            process.wait()
            noticed_s = time.monotonic() - began_s
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then stops its remaining ranks.

    shutil.rmtree(run_dir)
    yield Line(
        f"a killed rank ends the {ranks - 1} other(s)",
        noticed_s <= NOTICED_S,
        f"after {noticed_s:.1f} s (at most {NOTICED_S:.0f})",
        {"noticed_s": noticed_s},
    )


def rank_process(launcher: int, rank: int) -> int:
    """Return the process id of a rank. launcher: the process id of torchrun."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    variable = f"RANK={rank}".encode()
    [process] = [
        int(child)
        for child in children
        if variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    ]
    return process


def bench(seconds: float, *overrides: str, ranks: int = 0, config: str = "vit_b16") -> Any:
    """Run launch/bench.py in a new process or under torchrun, and return its results."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    options = ["--config", str(recipes_folder() / f"{config}.yaml"), "--json", *overrides]
    script = [str(LAUNCH / "bench.py"), "--seconds", f"{seconds:g}"]
    return json.loads(execute([sys.executable, *(torchrun if ranks else []), *script, *options]))


def _batch(rows: int, ranks: int) -> tuple[str, str]:
    return f"data.global_batch_size={rows * ranks}", f"data.micro_batch_size={rows}"


def one_and_two_ranks(rows: int, *overrides: str) -> Iterator[Line]:
    """Measure the speedup with two ranks, and the overlap of the all-reduce with backward."""
    results = [bench(3.0, *overrides, *_batch(rows, ranks), ranks=ranks) for ranks in (1, 2)]
    one, two = (result["training"][-1] for result in results)
    factor = two["images_per_s"] / one["images_per_s"]
    reduced = two["all_reduce"]
    hidden = 1 - min(reduced["exposed_s"] / reduced["alone_s"], 1.0)
    yield Line(
        "2 ranks against 1",
        None,
        f"{factor:.2f} times as fast, {two['images_per_s']:.0f} images/s; {hidden:.0%} of the"
        f" all-reduce ({reduced['alone_s'] * 1e3:.1f} ms) is behind the backward pass",
        {"factor": factor, "hidden_share": hidden, "training": [one, two]},
    )
