"""Measure speed and memory without and with each setting that may improve them (a lever), in one
process or on two ranks.

A lever must not change the loss after 200 steps by more than `LOSS_TOLERANCE`. Its gain is only
reported, because it depends on the GPU. The models learn scikit-learn's handwritten digits, so that
the loss is meaningful. This module also runs on a CPU with a small model.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_check_lines import Line
from guarantees import CLASSES, recipe
from kills import Place, execute, rank_process, train_lines, wait_for_step
from sklearn.datasets import load_digits

from vit.config.schema import Config
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.distributed.process_group import World, now_s
from vit.extras.planner.benchmark.step_time import create_step
from vit.extras.planner.device_memory import peak_bytes, release_memory, reset_peak
from vit.start.print_config import IMAGENET_IMAGES
from vit.training.plan import make_plan
from vit.training.step_result import StepResult

NUM_STEPS = 200
LOSS_TOLERANCE = 0.1
"""The maximum difference between losses, in nats. After 150 steps of the demo, the losses with five
seeds have a range of .15, and bf16 tokens change the loss with the same seed by at most .02
(docs/experiments)."""
NOTABLE = 0.02
"""The smallest relative gain in speed or memory at which a lever is recommended."""
PLAIN = (
    "model.drop_path_rate=0.0",
    "augment.randaugment_layers=0",
    "augment.magnitude_std=null",
    "augment.mixup_alpha=0.0",
    "augment.cutmix_alpha=0.0",
    "schedule.warmup_steps=40",
    "optim.lr=5e-4",
    "train.precision=bf16",
    "train.compile=false",
)
COMPILED = "train.compile=true"
LEVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention: flash": ((), ("train.attention=flash",)),
    "attention: cuDNN": ((), ("train.attention=cudnn",)),
    "attention: efficient": ((), ("train.attention=efficient",)),
    "half of the micro-batch": ((), ("micro_batch/2",)),
    "a quarter of the micro-batch": ((), ("micro_batch/4",)),
    "compiled": ((), (COMPILED,)),
    "tokens in bf16, compiled": ((COMPILED,), (COMPILED, "train.residual_dtype=bf16")),
    "tokens in bf16, eager": ((), ("train.residual_dtype=bf16",)),
    "CUDA graphs": ((COMPILED,), ("train.compile=reduce-overhead",)),
    "CUDA graphs for Ti": (
        ("model.name=vit_ti16", COMPILED),
        ("model.name=vit_ti16", "train.compile=reduce-overhead"),
    ),
    "more kernels timed": ((COMPILED,), ("train.compile=max-autotune-no-cudagraphs",)),
    "attention: flash3": ((), ("train.attention=flash3",)),
}
"""Maps each lever to the settings without and with it. Slow levers come late, because a part that
exceeds its time limit keeps its earlier lines. flash3 is last, because it stays installed in torch
until the process ends."""
NEW_LINE = "\n"
HANG_S = 8
"""`run.hang_timeout_s` of the run in which a rank is stopped."""


@dataclass(frozen=True)
class Measured:
    """The speed, memory and loss of a model after `NUM_STEPS` steps."""

    images_per_s: float
    memory_gib: float
    loss: float


def compare(what: str, off: Measured, on: Measured) -> Line:
    """Return a row of the table, with images/s, memory, loss, and whether to turn the lever on."""
    faster = on.images_per_s / off.images_per_s - 1
    smaller = 1 - on.memory_gib / off.memory_gib if off.memory_gib else 0.0
    apart = abs(on.loss - off.loss)
    kept = apart <= LOSS_TOLERANCE
    is_better = faster >= NOTABLE or (smaller >= NOTABLE and faster > -NOTABLE)
    verdict = "turn it on" if kept and is_better else "leave it"

    return Line(
        what,
        kept,
        f"{off.images_per_s:,.0f} -> {on.images_per_s:,.0f} images/s ({faster:+.0%}),"
        f" {off.memory_gib:.2f} -> {on.memory_gib:.2f} GiB, loss {off.loss:.3f} -> {on.loss:.3f}"
        f" (at most {LOSS_TOLERANCE:g} apart): {verdict}",
        {"off": asdict(off), "on": asdict(on)},
    )


# --- on one device --------------------------------------------------------------------------------


def on_one_device(device: torch.device, *overrides: str, num_steps: int) -> Iterator[Line]:
    """Compare each of `LEVERS` with the same step without it."""
    measured: dict[tuple[str, ...], Measured] = {}
    for what, both in LEVERS.items():
        try:
            for settings in both:
                if settings not in measured:
                    config = _config(*overrides, *settings)
                    measured[settings] = measure(config, device, num_steps)
        except ValueError as error:  # this device does not have the kernel
            yield Line(what, None, str(error))
            continue
        except RuntimeError as error:  # the next levers may still work
            yield Line(what, False, f"{type(error).__name__}: {str(error).partition(NEW_LINE)[0]}")
            continue

        yield compare(what, *(measured[settings] for settings in both))


def _config(*settings: str) -> Config:
    """Return a recipe with `settings`, in which `micro_batch/2` means a micro-batch of half the
    batch."""
    config = recipe(*PLAIN, *(each for each in settings if "micro_batch/" not in each))
    parts = [int(each.rpartition("/")[2]) for each in settings if "micro_batch/" in each]
    size = config.data.global_batch_size // (parts[0] if parts else 1)
    data = config.data.model_copy(update={"micro_batch_size": size})
    return config.model_copy(update={"data": data})


def measure(config: Config, device: torch.device, num_steps: int) -> Measured:
    """Train on digits for `num_steps` steps. The speed is measured over the last three quarters of
    the steps, and the loss over their last tenth.

    As in training, each result is read one step late, so that the GPU never waits for the host.
    """
    torch._dynamo.reset()
    plan, _ = make_plan(config, IMAGENET_IMAGES, 1)
    step = create_step(config, plan, CLASSES, World(0, 1, device))

    losses = []
    pending: StepResult | None = None
    for number, batch in enumerate(islice(cycle(digit_batches(config, device)), num_steps)):
        if number == num_steps // 4:
            reset_peak(device)
            began_s = now_s(device)
        result = step(step.augment.change_batch(batch), number)
        if pending is not None:
            losses.append(pending.read().loss)
        pending = result

    losses.append(result.read().loss)
    took_s = now_s(device) - began_s
    num_images = (num_steps - num_steps // 4) * plan.global_batch_size
    memory = peak_bytes(device) or 0

    del step, pending, result
    release_memory(device)
    last_tenth = losses[-max(num_steps // 10, 1) :]
    return Measured(num_images / took_s, memory / 2**30, statistics.mean(last_tenth))


def digit_batches(config: Config, device: torch.device) -> Sequence[Batch]:
    """Return batches of scikit-learn's 1,797 digits, enlarged to the model's image size."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images / 16 * 255).float()[:, None]
    rows = config.data.global_batch_size
    width = table_layout(config.augment).width
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))

    batches = []
    for ids in order.split(rows):
        if len(ids) < rows:
            break
        images = F.interpolate(pixels[ids], config.model.height_width(), mode="bilinear")
        batch = Batch(
            images.round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous(),
            torch.from_numpy(digits.target)[ids].long(),
            torch.ones(rows),
            torch.zeros(rows, width),
            ids,
        )
        batches.append(batch.to(device))
    return batches


# --- on two ranks ---------------------------------------------------------------------------------


def on_two_ranks(place: Place, *overrides: str, num_steps: int) -> Iterator[Line]:
    """Compare bf16 sums and NCCL's flight recorder with plain training, and test how a stopped rank
    is reported."""
    steps = (f"train.steps={num_steps}", f"eval.every_steps={num_steps}", *overrides)
    plain = _train(place, "plain", *steps)
    yield compare("gradients summed in bf16", plain, _train(place, "bf16", *steps, IN_BF16))
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "0"
    try:
        without = _train(place, "without", *steps)
    finally:
        del os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"]
    yield compare("NCCL's flight recorder", without, plain)
    yield from hung_rank(place)


IN_BF16 = "train.reduce_dtype=bf16"


def _train(place: Place, name: str, *settings: str) -> Measured:
    """Train on two ranks in a new process, and read the metrics of the run."""
    run_dir = place.folder / name
    execute(place.command(run_dir, *settings, ranks=2))
    lines = train_lines(run_dir)
    last = lines[-max(len(lines) // 10, 1) :]
    return Measured(
        statistics.median(line["images_per_s"] for line in lines[len(lines) // 4 :]),
        max(line["peak_memory_gib"] for line in lines),
        statistics.mean(line["loss"] for line in last),
    )


def hung_rank(place: Place) -> Iterator[Line]:
    """Check that the message about a stopped rank names NCCL's record, and that the file exists."""
    run_dir = place.folder / "hung_rank"
    hang = f"run.hang_timeout_s={HANG_S}"
    line = place.command(run_dir, "train.steps=1000000", "eval.every_steps=1000000", hang, ranks=2)

    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            wait_for_step(process, run_dir, 8)
            stopped = rank_process(process.pid, 1)
            os.kill(stopped, signal.SIGSTOP)
            message = _message(process.stderr.fileno(), b"error: rank 1 ")
            os.kill(stopped, signal.SIGKILL)  # torchrun would wait 30 s for this rank to exit
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()

    match = re.search(r"; (\S+)<rank> list the last NCCL", message)
    uses_nccl = "train.device=cuda" in place.settings
    exists = match is not None and Path(f"{match[1]}0").is_file()
    found = f"named {match[1]}<rank>" if match else "named no record"
    yield Line(
        "a hanging rank is named together with NCCL's record",
        exists if uses_nccl else (None if message else False),
        found if uses_nccl else f"{found}, because gloo has none",
    )


def _message(descriptor: int, start: bytes, timeout_s: float = 120.0) -> str:
    """Return the line of a process's output that begins with `start`, or "" if the output ends
    without such a line."""
    os.set_blocking(descriptor, False)
    seen = b""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            new = os.read(descriptor, 2**16)
        except BlockingIOError:
            time.sleep(0.1)
            continue
        seen += new
        lines = [line for line in seen.split(b"\n")[:-1] if line.startswith(start)]
        if lines or not new:
            return lines[0].decode() if lines else ""
    return ""
