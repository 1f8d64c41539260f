"""Measure the training speed of a config on this machine.

config -> steps, batch sizes and number of images
       -> eager step, then compiled: largest micro-batch, speed, parts, memory
       -> loader alone and with the step, if the data exist
       -> a dict of results for `vit.extras.planner.benchmark.certificate`
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any

import torch

from vit.config.io import with_settings
from vit.config.schema import Config
from vit.data.image_format import ImageFormat
from vit.distributed.process_group import World
from vit.extras.planner import device_memory
from vit.extras.planner.benchmark import step_time as steps
from vit.extras.planner.benchmark.certificate import peak_text
from vit.extras.planner.benchmark.subject import Subject, Wishes, device_name, look_at_subject
from vit.extras.planner.fitting import gpu_of, naming_what_fits
from vit.extras.planner.forecast import largest_micro_batch
from vit.extras.planner.memory import augmentation_bytes, step_memory
from vit.extras.planner.roofline import bound_s
from vit.layers.precision import precision_note
from vit.start.compiling import why_not_compiled
from vit.step import TrainStep
from vit.system.meter import GIB, Meter
from vit.training.freeze import create_trained_model
from vit.training.mfu import Utilization, train_flops_per_image
from vit.training.run_data import choose_settings, open_data

SWEPT = 3
"""The number of additional micro-batch sizes that `--sweep` measures. Each needs compilation."""


def measure(config: Config, world: World, wishes: Wishes) -> dict[str, Any]:
    """Measure `config` on the devices of `world`. Only the main rank's result is complete.

    Raises ValueError if the micro-batch is invalid or does not fit, or if the data cannot be
    opened.
    """
    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    config = with_settings(choose_settings(config, world), {"schedule.image_sizes": []})
    with world.fail_together():
        subject = look_at_subject(config, world, wishes)

    _log_conditions(subject, form)
    if not subject.data.assumed:
        open_data(config, world, subject.reader)  # report data errors before the measurements begin

    is_compiled = _is_compile_measured(subject)
    with (
        naming_what_fits(config, subject.plan, subject.data.num_classes, world.device),
        # By default, torch compiles a dynamic-shape graph for the second micro-batch size. Training
        # never uses such a graph.
        torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        if is_compiled
        else nullcontext(),
    ):
        rows, loading = _measure_mode(subject, compiled=False, is_last=not is_compiled)
        if is_compiled:
            further_rows, loading = _measure_mode(subject, True, is_last=True, earlier_rows=rows)
            rows += further_rows

    return {
        "device": device_name(world),
        "device_type": world.device.type,
        "num_devices": world.size,
        **asdict(subject.peak),
        "training": rows,
        "loading": loading,
    }


def _log_conditions(subject: Subject, form: ImageFormat) -> None:
    """Log the device and the parts of the config that cannot be measured. form: the config's image
    sizes."""
    subject.log(f"{device_name(subject.world)}: {peak_text(*astuple(subject.peak))}")
    note = precision_note(subject.config.train.precision, subject.world.device)
    if note:
        subject.log(f"note: {note}")

    if form.stages:
        subject.log(
            f"note: of {form.sizes_text()} only the last size is measured: to measure another, set"
            " model.image_size=... schedule.image_sizes=[]"
        )
    if subject.data.assumed:
        subject.log(
            f"without data (pass --data ROOT to measure the loader): {subject.data.assumed}"
        )


def _is_compile_measured(subject: Subject) -> bool:
    """Return whether the compiled step is measured too, and log the reason if it cannot be."""
    if not subject.on_gpu and not subject.config.train.compile:
        return False
    reason = why_not_compiled(subject.world.device)
    if reason:
        subject.log(f"note: torch.compile does not work here ({reason}): only eager is measured")
    return not reason


def _measure_mode(
    subject: Subject, compiled: bool, is_last: bool, earlier_rows: Sequence[dict[str, Any]] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Measure the step in one mode, and in the last mode also the loader.

    Args:
        compiled: Whether the step is compiled.
        is_last: Whether this is the last mode to be measured.
        earlier_rows: The results of an earlier mode, whose batch sizes are reused.
    """
    mode = "compiled" if compiled else "eager"
    subject.log(f"{mode}: {'compiling' if compiled else 'warming up'} ...")
    train_step = _create(subject, compiled)
    largest = None
    if subject.on_gpu:
        first_try = earlier_rows[-1]["largest_micro_batch_size"] if earlier_rows else None
        largest = _largest(subject, train_step, mode, first_try)

    rows: list[dict[str, Any]] = []
    for size in _to_measure(subject, largest):
        rank_batch_size = _known_batch(subject, [*earlier_rows, *rows], size)
        if rank_batch_size is None:
            rank_batch_size = _affordable(subject, train_step, size)
        rows.append(_measure_row(subject, train_step, mode, size, rank_batch_size, largest))

    rank_batch_size = rows[-1]["rank_batch_size"]
    for size in _to_sweep(subject, rows):
        rows.append(_measure_row(subject, train_step, mode, size, rank_batch_size, largest))

    loading = None
    if is_last and not subject.data.assumed:
        train_step.micro_batch_size = rows[0]["micro_batch_size"]
        loading = _measure_loading(subject, train_step, rows[0])

    del train_step  # the next mode needs its memory
    device_memory.release_memory(subject.world.device)
    return rows, loading


def _create(subject: Subject, compiled: bool) -> TrainStep:
    mode = (subject.config.train.compile or True) if compiled else False
    config = with_settings(subject.config, {"train.compile": mode})
    try:
        return steps.create_step(config, subject.plan, subject.data.num_classes, subject.world)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{config.model.name}: {_too_large(subject)}") from error


def _largest(subject: Subject, train_step: TrainStep, mode: str, first: int | None) -> int:
    """Find the largest micro-batch that fits. Raises ValueError if the requested size does not fit.

    first: the size to try first, or None for the planner's estimate.
    """
    config = subject.config
    requested = subject.wishes.micro_batch_size
    sizes = [size for size in subject.sizes if requested is None or size <= requested]
    first = requested or first
    if first is None:
        gpu = gpu_of(subject.world.device)
        assert gpu is not None, "micro-batch sizes are searched only on a GPU"
        first = largest_micro_batch(config, subject.plan, subject.data.num_classes, gpu)

    def on_try(size: int) -> None:
        subject.log(f"{mode}: does a micro-batch of {size} fit?")

    shape = (config.model.in_chans, *config.model.height_width())
    beside_bytes = augmentation_bytes(config.augment, shape, subject.sizes[-1])
    largest = steps.largest_micro_batch(
        train_step, sizes, subject.make_batch, first, beside_bytes, on_try
    )

    with subject.world.fail_together():
        if not largest:
            raise ValueError(f"{config.model.name}: {_too_large(subject)}")
        if requested is not None and largest < requested:
            raise ValueError(
                f"--micro-batch {requested}: a step does not fit into the"
                f" {_memory_gib(subject):.1f} GiB of this GPU; the largest micro-batch that fits is"
                f" {largest}"
            )
    return largest


def _too_large(subject: Subject) -> str:
    """Return an error message with a remedy for a model whose smallest step does not fit."""
    less = []
    if subject.config.train.activation_checkpointing != "block":
        less.append("train.activation_checkpointing=block")
    if subject.config.ema.decay is not None:
        less.append("ema.decay=null")
    settings = f"set {' and '.join(less)}, " if less else ""
    return (
        f"not even {subject.sizes[0]} image(s) at a time fit into the"
        f" {_memory_gib(subject):.1f} GiB of this GPU: {settings}take a smaller model or smaller"
        " images, or a GPU with more memory"
    )


def _to_measure(subject: Subject, largest: int | None) -> list[int]:
    """Return the micro-batch sizes to measure: the config's, and the largest that fits."""
    if largest is None or subject.wishes.micro_batch_size is not None:
        return [subject.plan.micro_batch_size]
    return sorted({min(subject.plan.micro_batch_size, largest), largest})


def _to_sweep(subject: Subject, rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the sizes that `--sweep` measures next, in the batch of the last row.

    They are the `SWEPT` largest divisors of that batch below the largest size that fits.
    """
    batch = rows[-1]["rank_batch_size"]
    largest = rows[-1]["micro_batch_size"]
    measured = [row["micro_batch_size"] for row in rows if row["rank_batch_size"] == batch]
    smaller = [size for size in subject.sizes if size < largest and batch % size == 0]
    swept = smaller[-SWEPT:] if subject.wishes.sweeps else []
    return [size for size in swept if size not in measured]


def _known_batch(
    subject: Subject, rows: Sequence[dict[str, Any]], micro_batch_size: int
) -> int | None:
    """Return a measured per-rank batch size that this micro-batch size divides, or None."""
    sizes: list[int] = [row["rank_batch_size"] for row in rows]
    # On a CPU, the batch may be smaller than the micro-batch size in the config.
    below = 0 if subject.on_gpu else micro_batch_size
    return next((size for size in sizes if size % micro_batch_size == 0 or size < below), None)


def _affordable(subject: Subject, train_step: TrainStep, micro_batch_size: int) -> int:
    """Return the largest batch size per rank whose step takes at most half of `Wishes.seconds`.

    On a CPU, a step with a GPU recipe's batch can take minutes. If `Wishes.num_steps` is set, the
    full batch is used. The loader is measured with the same batch size, so only sizes that it can
    deliver are tried.
    """
    wishes = subject.wishes
    if wishes.num_steps is not None:
        return subject.sizes[-1]

    # Without a GPU, a batch smaller than the config's micro-batch is allowed.
    is_fixed = subject.on_gpu or wishes.micro_batch_size is not None
    smaller = [] if is_fixed else [size for size in subject.loadable if size < micro_batch_size]
    multiples = [size for size in subject.loadable if size % micro_batch_size == 0]
    rows, *larger_sizes = smaller + multiples

    train_step.micro_batch_size = min(micro_batch_size, rows)
    steps.run_steps(train_step, subject.make_batches(rows, 1), 1)
    for larger in larger_sizes:
        train_step.micro_batch_size = min(micro_batch_size, rows)
        [taken_s] = steps.run_steps(train_step, subject.make_batches(rows, 1), 1)
        # Rank 0 decides, because each rank measures a different time.
        next_s = subject.world.broadcast_from_main(partial(float, taken_s / rows * larger))
        if next_s > wishes.seconds / 2:
            break
        rows = larger
    return rows


def _measure_row(
    subject: Subject,
    train_step: TrainStep,
    mode: str,
    micro_batch_size: int,
    rank_batch_size: int,
    largest: int | None,
) -> dict[str, Any]:
    """Time a step with these batch sizes, and return its time, memory and work as a row.

    largest: the largest micro-batch size that fits, or None if it was not searched for.
    """
    config, world = subject.config, subject.world
    # On a CPU, the batch may be smaller than the micro-batch size in the config.
    micro_batch_size = min(micro_batch_size, rank_batch_size)
    train_step.micro_batch_size = micro_batch_size

    batches = subject.make_batches(rank_batch_size)
    device_memory.reset_peak(world.device)
    label = f"{config.model.name} {mode}, {rank_batch_size} images in micro-batches of"
    with _progress(subject, f"{label} {micro_batch_size}", rank_batch_size) as on_step:
        times = steps.time_step(
            train_step,
            batches,
            num_steps=subject.wishes.num_steps,
            seconds=subject.wishes.seconds,
            on_step=on_step,
        )

    peak = device_memory.peak_bytes(world.device)
    dtype = torch.bfloat16 if config.train.reduce_dtype == "bf16" else torch.float32
    all_reduce = steps.all_reduce_times(train_step, batches, dtype)

    measured_plan = replace(
        subject.plan,
        micro_batch_size=micro_batch_size,
        global_batch_size=rank_batch_size * world.size,
        accumulation_steps=rank_batch_size // micro_batch_size,
    )
    planned = step_memory(config, measured_plan, subject.data.num_classes)

    images_per_s_per_gpu = times.images_per_s / world.size
    with torch.device("meta"):
        model = create_trained_model(config, subject.data.num_classes)
    # The micro-batch size determines how many samples drop path skips.
    flops_per_image = train_flops_per_image(model, micro_batch_size)

    return {
        "model": config.model.name,
        "image_size": list(config.model.height_width()),
        "precision": config.train.precision,
        "compiled": mode == "compiled",
        "deterministic": config.train.deterministic,
        "activation_checkpointing": config.train.activation_checkpointing,
        "drop_path_form": config.model.drop_path_form,
        "num_devices": world.size,
        "rank_batch_size": rank_batch_size,
        "micro_batch_size": micro_batch_size,
        "images_per_s": times.images_per_s,
        "images_per_s_per_gpu": images_per_s_per_gpu,
        "mfu": Utilization(flops_per_image, subject.peak).mfu(images_per_s_per_gpu),
        "flops_per_image": flops_per_image,
        "num_steps": times.num_steps,
        "step_s": times.step_s,
        "bound_s": bound_s(
            model, rank_batch_size, micro_batch_size, device_name(world), config.train.precision
        ),
        "fastest_step_s": times.fastest_s,
        "slowest_step_s": times.slowest_s,
        "parts_s": {str(part): seconds for part, seconds in times.parts_s.items()},
        "all_reduce": all_reduce,
        "peak_memory_gib": None if peak is None else (peak - subject.in_use) / GIB,
        "planned_memory_gib": planned.in_turn / GIB,
        "largest_micro_batch_size": largest,
    }


def _measure_loading(
    subject: Subject, train_step: TrainStep, row: dict[str, Any]
) -> dict[str, Any]:
    """Measure the loader with and without the training step, at the batch size of `row`."""
    config = with_settings(
        subject.config,
        {
            "data.global_batch_size": row["rank_batch_size"] * subject.world.size,
            "data.micro_batch_size": row["micro_batch_size"],
        },
    )

    data = open_data(config, subject.world, subject.reader)
    with (
        _progress(subject, "loader alone", row["rank_batch_size"]) as alone,
        _progress(subject, "loader and step", row["rank_batch_size"]) as together,
    ):
        times = steps.time_loading(
            config.loader,
            data,
            train_step,
            num_steps=subject.wishes.num_steps,
            seconds=subject.wishes.seconds,
            on_batch=alone,
            on_step=together,
        )

    return {
        "model": row["model"],
        **times,
        "step_images_per_s": row["images_per_s"],
        "compiled": row["compiled"],
        "lost_share": 1 - times["together_images_per_s"] / row["images_per_s"],
    }


@contextmanager
def _progress(subject: Subject, label: str, num_rows: int) -> Iterator[steps.OnStep]:
    """Show a progress bar that counts images, once the total is known."""
    num_images = num_rows * subject.world.size
    with ExitStack() as stack:
        meters: list[Meter] = []  # empty until the first call

        def on_step(done: int, total: int) -> None:
            if not meters:
                meter = Meter(label, total * num_images, "images", subject.world.is_main)
                meters.append(stack.enter_context(meter))
            meters[0].update(done * num_images)

        yield on_step


def _memory_gib(subject: Subject) -> float:
    return torch.cuda.get_device_properties(subject.world.device).total_memory / GIB
