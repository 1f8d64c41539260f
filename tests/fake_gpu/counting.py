"""Count the launches, bytes and operations of one compiled training step on the fake GPU.

    python counting.py FILE RECIPE SETTING ...     writes FILE as JSON

For a Triton kernel, Inductor computes the bytes. For any other kernel, the bytes of its tensors are
counted. Each tensor is read once, and is written once if the operator returns or changes it. Caches
are ignored, so the counts are right for a GPU whose caches keep nothing between kernels.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from fake_gpu import log
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vit.config.io import load_config, recipes_folder
from vit.distributed.process_group import join_world
from vit.extras.planner.benchmark.step_time import create_step
from vit.extras.planner.benchmark.subject import synthetic_batches
from vit.training.plan import make_plan
from vit.training.run_data import choose_settings
from vit.training.step_result import StepPhase

IMAGENET_IMAGES = 1_281_167
NUM_CLASSES = 1000
WARM_UP_STEPS = 3
TIMED_STEPS = 15
LAUNCHES = ("launch", "gemm", "copy", "memset")
"""The kinds of logged calls that start work on the GPU. cuDNN's operators are not in the log."""
CUDNN = ("cudnn", "convolution")
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach")
OVERWRITES = ("copy_", "fill_", "zero_")
"""The operators whose first argument is written but not read."""
CAUSES = (
    ("layer_norm", "norms and residual sums"),
    ("sum_view", "bias gradients"),
    ("gelu", "GELU"),
    ("clone_permute", "gradients of q, k, v into one tensor"),
    ("_add", "norms and residual sums"),
    ("mul", "norms and residual sums"),
    ("_to_copy", "casts of weights"),
)
"""Pairs of a part of a kernel's name and what the kernel does in a block. The first pair whose part
is in the name is used."""
UPDATES = {"_foreach_lerp_": "average", "_foreach_norm": "gradient norm"}
COUNTED_AS_GEMM = ("mm", "addmm", "bmm", "convolution", "convolution_backward")


def cause_of(phase: str, kind: str, name: str) -> str:
    """Return what a kernel of `phase` does. kind: "triton", or "aten" for operators."""
    if phase in ("augmentation", StepPhase.FINISH):
        return "augmentation"
    if phase == StepPhase.UPDATE:
        return UPDATES.get(name, "optimizer")
    if kind == "triton":
        return next((cause for part, cause in CAUSES if part in name), "rest of the blocks")
    if name in COUNTED_AS_GEMM:
        return "operands of matrix products"
    if "attention" in name:
        return "attention"
    return "stem, head and loss"


def size(tensor: Tensor) -> int:
    """Return the bytes of the distinct values of `tensor`."""
    values = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return values * tensor.element_size()


def flops(name: str, inputs: list[Tensor], result: Any) -> int:
    """Return the number of operations in a matrix product, a convolution or an attention kernel."""
    if name in ("mm", "bmm", "addmm"):
        left, right = inputs[-2:]
        return 2 * left.numel() * right.shape[-1]
    if name == "convolution":
        _, weight = inputs[:2]
        return 2 * result.numel() * weight[0].numel()
    if name == "convolution_backward":  # only for the weights, because images need no gradient
        gradient, _, weight = inputs[:3]
        return 2 * gradient.numel() * weight[0].numel()
    if "attention" in name:
        batch, heads, tokens, dim = inputs[0].shape
        products = 5 if "backward" in name else 2
        return 2 * products * batch * heads * tokens * tokens * dim
    return 0


class Tally(TorchDispatchMode):
    """A mode that counts the operators and Triton kernels that run in its context.

    rows: for each (phase, kind, name), the number of calls, bytes and operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "augmentation"
        self.rows: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise, compiled code would run uncompiled

    def add(self, kind: str, name: str, num_bytes: int, num_flops: int = 0) -> None:
        row = self.rows[self.phase, kind, name]
        for place, value in enumerate((1, num_bytes, num_flops)):
            row[place] += value

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator._schema.name.removeprefix("aten::")
        if operator.is_view or name in ALLOCATIONS:
            return result

        changed = [
            args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(operator._schema.arguments)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.name != "grads"  # a fused optimizer only writes gradients to unscale them
        ]
        inputs = on_gpu((args, kwargs))
        written = on_gpu(changed)
        is_overwrite = name in OVERWRITES or operator._overloadname == "out"
        read = {
            key: tensor for key, tensor in inputs.items() if not is_overwrite or key not in written
        }
        returned = {key: tensor for key, tensor in on_gpu(result).items() if key not in inputs}
        num_bytes = sum(size(each) for part in (read, written, returned) for each in part.values())
        if inputs or returned:
            self.add("aten", name, num_bytes, flops(name, list(read.values()), result))
        return result

    @contextmanager
    def with_triton(self) -> Iterator[None]:
        """Also count the Triton kernels."""
        run = CachingAutotuner.run

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            about = kernel.inductor_meta
            self.add("triton", about["kernel_name"], round(1e9 * (about["kernel_num_gb"] or 0)))
            return run(kernel, *args, **kwargs)

        CachingAutotuner.run = counted
        try:
            with self:
                yield
        finally:
            CachingAutotuner.run = run


def on_gpu(nested: Any) -> dict[int, Tensor]:
    """Return the tensors on the GPU in `nested`, by their id."""
    leaves = tree_leaves(nested)
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}


def count(recipe: str, settings: list[str]) -> dict[str, Any]:
    """Return a step's launches, work by cause, host time and peak memory."""
    torch._inductor.config.benchmark_kernel = True  # makes Inductor store each kernel's bytes
    world = join_world("cuda")
    config = load_config(recipes_folder() / f"{recipe}.yaml", ["data.root=none", *settings])
    config = choose_settings(config, world)
    plan, _ = make_plan(config, IMAGENET_IMAGES, 1)
    began = time.process_time()
    step = create_step(config, plan, NUM_CLASSES, world)
    assert not step.why_eager, step.why_eager
    batches = synthetic_batches(config, plan.global_batch_size, NUM_CLASSES, world.device, 2)
    number = 0

    def queue() -> Any:
        nonlocal number
        number += 1
        return step(step.augment.change_batch(batches[number % 2]), number)

    for _ in range(WARM_UP_STEPS):
        result = queue()
    compiled_s = time.process_time() - began
    torch.cuda.reset_peak_memory_stats()
    host_s = []
    for _ in range(TIMED_STEPS):
        began = time.thread_time()
        later = queue()
        host_s.append(time.thread_time() - began)
        result.read()
        result = later

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        with log.logged(path):
            queue()
        kinds = Counter(call.kind for call in log.read(path))
    tally = Tally()
    step.mark = lambda phase: setattr(tally, "phase", phase)
    with tally.with_triton():
        queue()

    by_cause: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for (phase, kind, name), (_, num_bytes, num_flops) in tally.rows.items():
        total = by_cause[cause_of(phase, kind, name)]
        total[0] += num_bytes
        total[1] += num_flops
    of_cudnn = sum(
        calls
        for (_, kind, name), (calls, *_) in tally.rows.items()
        if kind == "aten" and any(part in name for part in CUDNN)
    )
    return {
        "launches": sum(kinds[kind] for kind in LAUNCHES) + of_cudnn,
        "causes": {
            cause: {"bytes": num_bytes, "flops": num_flops}
            for cause, (num_bytes, num_flops) in by_cause.items()
        },
        "kernels": [[*key, *row] for key, row in tally.rows.items()],
        "first_steps_s": compiled_s,
        "host_ms": 1e3 * sorted(host_s)[TIMED_STEPS // 2],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "micro_batch_size": plan.micro_batch_size,
    }


if __name__ == "__main__":
    path, recipe, *settings = sys.argv[1:]
    Path(path).write_text(json.dumps(count(recipe, settings)))
