"""Advise which setting to lower after an out-of-memory error, and list values that fit.

`explain` adds a note to the error, and `vit.distributed.exit` prints the note.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from vit.config.schema import Config
from vit.data.augment.draw import mixes
from vit.data.order import divisors
from vit.distributed.exit import out_of_memory
from vit.evaluation import evaluate
from vit.extras.planner.forecast import largest_micro_batch, usable_bytes
from vit.extras.planner.memory import step_memory
from vit.system.gpus import Gpu, find_device
from vit.system.meter import GIB
from vit.training.plan import Plan

_SMALLER_MODEL = "take a smaller model or smaller images"


@contextmanager
def naming_what_fits(
    config: Config, plan: Plan, num_classes: int, device: torch.device
) -> Iterator[None]:
    """Add the note from `explain` to an out-of-memory error that the block raises."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            explain(error, config, plan, num_classes, device)
        raise


def explain(
    error: Exception, config: Config, plan: Plan, num_classes: int, device: torch.device
) -> None:
    """Add a note that names the setting to lower and values that fit, if memory ran out."""
    files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    if Path(evaluate.__file__) in files:
        error.add_note(f"Lower eval.batch_size ({config.eval.batch_size} now)")
    else:
        # If the advice fails, the original error must still be reported.
        with suppress(Exception):
            error.add_note(what_to_lower(config, plan, num_classes, gpu_of(device)))


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the description of the GPU `device` with its actual memory, or None for a CPU."""
    if device.type != "cuda":
        return None
    driver = torch.cuda.get_device_properties(device)
    unknown = Gpu(
        driver.name,
        bf16_tflops=0.0,
        fp32_tflops=0.0,
        memory_gib=0.0,
        bandwidth_gbs=0.0,
        pattern=driver.name,
    )
    # Use the memory that the driver reports, because GPUs with the same name can differ in memory,
    # and a MIG instance has only a part of it.
    return replace(find_device(driver.name) or unknown, memory_gib=driver.total_memory / GIB)


def what_to_lower(config: Config, plan: Plan, num_classes: int, gpu: Gpu | None) -> str:
    """Return advice for a training step that did not fit in memory. gpu: None if unknown."""
    now = plan.micro_batch_size
    smaller = _smaller_micro_batches(config, plan)
    if not smaller:
        return f"Lower model.image_size or the model: data.micro_batch_size={now} is the smallest"

    sizes = ", ".join(map(str, reversed(smaller)))
    advice = (
        f"Lower data.micro_batch_size ({now} now) to a size that divides a rank's batch of"
        f" {plan.rank_batch_size}: {sizes}"
    )
    if gpu is None:
        return f"{advice}; or {_SMALLER_MODEL}"
    return f"{advice}. {_prediction(config, plan, num_classes, gpu)}"


def _prediction(config: Config, plan: Plan, num_classes: int, gpu: Gpu) -> str:
    """Return what launch/plan.py predicts for this GPU, and the advice that follows from it."""
    now = plan.micro_batch_size
    usable_gib = usable_bytes(gpu) / GIB
    needed = step_memory(config, plan, num_classes)
    count = f"launch/plan.py counts {needed.total / GIB:.1f} of {usable_gib:.1f} GiB at {now}"

    largest = largest_micro_batch(config, plan, num_classes, gpu, needed)
    if largest >= now:
        return f"{count}, so something else may fill the GPU: see nvidia-smi"

    checkpointing = _with_less_kept(config, plan, num_classes, gpu)
    if not largest:
        return f"{count} and none of them to fit: {checkpointing or _SMALLER_MODEL}"
    if checkpointing:
        return f"{count}, and {largest} to fit; or {checkpointing}"
    return f"{count}, and {largest} to fit"


def _smaller_micro_batches(config: Config, plan: Plan) -> list[int]:
    """Return the allowed micro-batch sizes below that of `plan`, in ascending order."""
    unit = config.augment.mix_group_size if mixes(config.augment) else 1
    return [
        size
        for size in divisors(plan.rank_batch_size)
        if size % unit == 0 and size < plan.micro_batch_size
    ]


def _with_less_kept(config: Config, plan: Plan, num_classes: int, gpu: Gpu) -> str:
    """Return the advice to checkpoint activations, or "" if that would not suffice."""
    if config.train.activation_checkpointing != "none":
        return ""
    train = config.train.model_copy(update={"activation_checkpointing": "block"})
    memory = step_memory(config.model_copy(update={"train": train}), plan, num_classes)
    if memory.total > usable_bytes(gpu):
        return ""
    return "set train.activation_checkpointing=block, which fits but takes 4/3 of the time"
