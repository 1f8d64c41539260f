"""Check with a small model that training on a device meets its guarantees.

Each function yields `Line`s. Results are compared with those computed on a CPU. Most checks also
run on a CPU, so this module is tested without a GPU.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import numpy as np
import torch
from gpu_check_lines import Line
from torch import Tensor, nn

from vit.config.io import load_config, recipes_folder
from vit.config.schema import Config
from vit.data.augment.apply import create_augment
from vit.data.batches import Batch, Batches, BatchLayout
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.distributed.process_group import World, make_deterministic
from vit.extras.planner.benchmark.step_time import create_step, run_steps, time_step
from vit.extras.planner.benchmark.subject import synthetic_batches
from vit.extras.planner.device_memory import bytes_in_use, reset_peak
from vit.extras.planner.device_memory import peak_bytes as measured_peak_bytes
from vit.extras.planner.memory import step_memory
from vit.start.print_config import IMAGENET_IMAGES
from vit.step import TrainStep
from vit.training.plan import make_plan
from vit.training.run_data import choose_settings

CLASSES = 10
SMALL = (
    "model.name=vit_ti16",
    "model.depth=4",
    "model.image_size=64",
    "data.global_batch_size=32",
    "data.micro_batch_size=16",
    "optim.clip_grad_norm=1.0",
)
"""The settings that shrink a recipe. Augmentation, mixing and weight averaging are unchanged."""
EXACT = (
    "train.precision=fp32",
    "model.drop_path_rate=0.0",
    "augment.randaugment_layers=0",
    "augment.magnitude_std=null",
    "augment.mixup_alpha=0.0",
    "augment.cutmix_alpha=0.0",
    "optim.eps=1e-5",
    "optim.lr=1e-3",
    "schedule.warmup_epochs=0",
    "train.compile=false",
)
"""The settings with which a GPU and a CPU compute equal numbers. With these settings, the device
draws no random numbers. The large eps keeps AdamW from scaling up rounding noise in the zero
gradients of key biases."""
STEPS = 20
WEIGHTS_TOLERANCE = 1e-3
"""The maximum distance between weights, as a fraction of their change in training. On CPUs, kernels
with and without vector instructions differ by 1e-5."""
LOGITS_TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""The maximum difference between logits, as a fraction of their standard deviation. Each sum is
rounded by 2**-24 (fp32) or 2**-9 (bf16) in 12 blocks."""
LEVELS_TOLERANCE = 1e-3
"""The maximum fraction of pixel values that may differ."""
MEMORY_TOLERANCE = 0.1


def recipe(*overrides: str, name: str = "vit_b16") -> Config:
    """Load a recipe that needs no data set, with the precision of this machine's devices."""
    path = recipes_folder() / f"{name}.yaml"
    config = load_config(path, ["data.root=none", *overrides])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return choose_settings(config, World(0, 1, device))


def make_step(config: Config, device: torch.device) -> tuple[TrainStep, list[Batch]]:
    """Return the training step of `config`, and four batches on `device`."""
    world = World(0, 1, device)
    plan, _ = make_plan(config, IMAGENET_IMAGES, 1)
    step = create_step(config, plan, CLASSES, world)
    rows = config.data.global_batch_size
    return step, synthetic_batches(config, rows, CLASSES, device)


# --- the loader -----------------------------------------------------------------------------------


class Numbered(Batches):
    """Test batches in which every value is the position of the batch."""

    layout = BatchLayout(64, ImageFormat((32, 32)), 4)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        for tensor in (rows.images, rows.labels, rows.weights, rows.table, rows.ids):
            tensor.fill_(position)
        return ()


def page_locked_slots(device: torch.device) -> Iterator[Line]:
    """Check that batches arrive intact, and report whether the loader's buffers are page-locked."""
    num_batches = 40
    wrong = []
    notes = io.StringIO()
    with redirect_stderr(notes):
        loader = Loader(Numbered(), 0, num_batches, num_workers=2, device=device)
    with loader:
        for position, batch in enumerate(loader):
            arrived = [batch.images, batch.labels, batch.weights, batch.table]
            if any(bool((tensor != position).any()) for tensor in arrived):
                wrong.append(position)

    note = notes.getvalue().strip()
    memory_kind = (
        "page-locked" if device.type == "cuda" and not note else note or "in shared memory"
    )
    intact = f"{num_batches - len(wrong)} of {num_batches} batches arrived as they were made"
    yield Line(
        "the loader's slots", not wrong, f"{memory_kind}; {intact}", {"page_locked": not note}
    )


# --- the same numbers as on a CPU -----------------------------------------------------------------


def distance(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the Euclidean distance between two models' weights."""

    def weights(model: nn.Module) -> Tensor:
        return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])

    return float((weights(ours) - weights(theirs)).double().norm())


def equals_the_cpu(device: torch.device) -> Iterator[Line]:
    """Check that fp32 training, augmentation and evaluation produce the same results as on a
    CPU."""
    config = recipe(*SMALL, *EXACT)
    cpu = torch.device("cpu")
    reference, batches = make_step(config, cpu)
    tried, _ = make_step(config, device)
    start, _ = make_step(config, cpu)
    losses = []
    for number in range(STEPS):
        batch = batches[number % len(batches)]
        expected = reference(batch, number).read().loss
        losses.append(abs(tried(batch.to(device), number).read().loss - expected) / expected)

    moved = distance(reference.model, start.model)
    share = distance(reference.model, tried.model) / moved
    yield Line(
        f"{STEPS} fp32 steps equal the CPU's",
        share <= WEIGHTS_TOLERANCE,
        f"weights differ by {share:.1e} of their change in training (at most"
        f" {WEIGHTS_TOLERANCE:g}), losses by {max(losses):.1e}",
        {"weights_share": share, "loss_share": max(losses), "tolerance": WEIGHTS_TOLERANCE},
    )
    yield from _equal_levels(device)

    reference.model.eval()
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    # Initialize the head. It starts at zero, so all logits would otherwise be nearly equal.
    nn.init.normal_(reference.model.get_parameter("head.weight"), std=0.1)
    tried.model.load_state_dict(reference.model.state_dict())
    tried.model.eval()

    for precision, tolerance in LOGITS_TOLERANCE.items():
        with torch.no_grad():
            expected_logits = reference.model(images)
            enabled = precision == "bf16"
            with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
                logits = tried.model(images.to(device)).float().cpu()
        off = float((logits - expected_logits).abs().max() / expected_logits.std())
        yield Line(
            f"an evaluation's logits in {precision} are close to the CPU's in fp32",
            off <= tolerance,
            f"differ by {off:.1e} of their standard deviation (at most {tolerance:g})",
            {"share": off, "tolerance": tolerance},
        )


def _equal_levels(device: torch.device) -> Iterator[Line]:
    """Check that augmented pixel values equal those computed on a CPU."""
    config = recipe(*SMALL)
    cpu = torch.device("cpu")
    [batch] = synthetic_batches(config, 256, CLASSES, cpu, count=1)

    def levels(place: torch.device) -> Tensor:
        augment = create_augment(config.augment, config.data, CLASSES, place)
        return augment.change(batch.images.to(place), batch.table).cpu().int()

    off = (levels(device) - levels(cpu)).abs()
    share = float((off > 0).double().mean())
    yield Line(
        "augmented images are the CPU's",
        share <= LEVELS_TOLERANCE,
        f"{share:.1e} of the gray levels differ (at most {LEVELS_TOLERANCE:g}), by at most"
        f" {int(off.max())}",
        {"share": share, "largest": int(off.max()), "tolerance": LEVELS_TOLERANCE},
    )


# --- no waits, no late graphs, no more memory than planned ---------------------------------------


def no_waits(device: torch.device) -> Iterator[Line]:
    """Check that the host never waits for the GPU during a step or augmentation.

    The first steps are not checked, because they create constants and allocate memory.
    """
    promise = "no step waits for the GPU"
    if device.type != "cuda":
        yield Line(promise, None, "a CPU has no queue to wait for")
        return
    step, batches = make_step(recipe(*SMALL, "train.compile=false"), device)
    run_steps(step, batches, len(batches))
    with _waits_are_errors(device):
        results = [
            step(step.augment.change_batch(batch), number) for number, batch in enumerate(batches)
        ]
    finite = all(np.isfinite(result.read().loss) for result in results)
    yield Line(promise, finite, f"{len(results)} steps queued without a wait")


@contextmanager
def _waits_are_errors(device: torch.device) -> Iterator[None]:
    """Make torch raise an error for any operation for which the host waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graphs_as_planned(device: torch.device) -> Iterator[Line]:
    """Check that all blocks share one compiled graph in training, and one in evaluation."""
    config = recipe(*SMALL, "model.depth=6", "train.compile=true")  # two groups of blocks
    torch._dynamo.reset()
    step, batches = make_step(config, device)
    images = torch.zeros(8, 3, 64, 64, device=device)
    before = _num_graphs()

    def evaluate() -> None:
        step.model.eval()
        with torch.no_grad():
            step.model(images)
        step.model.train()

    run_steps(step, batches, 2)
    training = _num_graphs() - before
    evaluate()
    evaluation = _num_graphs() - before - training
    with _waits_are_errors(device):
        # As in training, each batch is augmented first, which also changes its memory layout.
        results = [step(step.augment.change_batch(batches[number]), number) for number in range(3)]
    for result in results:
        result.read()
    evaluate()
    later = _num_graphs() - before - training - evaluation
    # On GPUs, the last part of augmentation is compiled to a separate graph.
    planned = 2 if device.type == "cuda" else 1
    yield Line(
        "graphs are compiled as planned, none later",
        (training, evaluation, later) == (planned, 1, 0),
        f"{training} in training ({planned} planned), {evaluation} in evaluation, {later} later"
        + (f"; {step.why_eager}" if step.why_eager else ""),
        {"training": training, "evaluation": evaluation, "later": later},
    )


def _num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def planned_memory(device: torch.device) -> Iterator[Line]:
    """Check that the measured peak memory of a step matches the planner's estimate."""
    promise = "peak memory is the planner's"
    if device.type == "cpu" and sys.platform != "linux":
        yield Line(promise, None, "peak memory of a process is measured only on Linux")
        return

    rows = 256 if device.type == "cuda" else 32
    overrides = ("model.image_size=224", f"data.global_batch_size={rows}", "train.compile=false")
    config = recipe(*SMALL, *overrides, f"data.micro_batch_size={rows}")

    before = bytes_in_use(device)
    step, batches = make_step(config, device)
    plan, _ = make_plan(config, IMAGENET_IMAGES, 1)
    run_steps(step, batches, 2)
    reset_peak(device)
    run_steps(step, batches, 1)
    peak = measured_peak_bytes(device)
    if peak is None:
        yield Line(promise, None, "this system does not report peak memory")
        return

    measured = peak - before
    counted = step_memory(config, plan, CLASSES).in_turn
    off = measured / counted - 1
    # On a CPU, the tensors of this small step use only a small part of the process's memory.
    on_gpu = device.type == "cuda"
    limit = f"at most {MEMORY_TOLERANCE:.0%}" if on_gpu else "of the whole process, no promise"
    yield Line(
        promise,
        abs(off) <= MEMORY_TOLERANCE if on_gpu else None,
        f"{measured / 2**20:.0f} MiB measured, {counted / 2**20:.0f} counted: {off:+.0%} ({limit})",
        {"measured_bytes": measured, "counted_bytes": counted},
    )


# --- the cost of determinism ---------------------------------------------------------------------


def cost_of_determinism(device: torch.device, *overrides: str, seconds: float) -> Iterator[Line]:
    """Measure by how much `train.deterministic` slows down a step."""
    # cuBLAS reads this variable only at startup, so set it for both measurements.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    step, batches = make_step(recipe("train.compile=false", *overrides), device)
    plain = time_step(step, batches, seconds=seconds).images_per_s
    make_deterministic()
    ordered = time_step(step, batches, seconds=seconds).images_per_s
    yield Line(
        "what train.deterministic costs",
        None,
        f"{plain:.0f} images/s without it, {ordered:.0f} with it ({ordered / plain - 1:+.1%})",
        {"images_per_s": plain, "deterministic_images_per_s": ordered},
    )
