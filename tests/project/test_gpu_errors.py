"""Test that commands print the errors in the GPU section of errors/rows.yaml.

The tests need no GPU. A few lines of Python simulate the driver, torch and the GPU in the command's
process.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import warm_python
from error_rows import Row, pattern_of, rows
from processes import COMMANDS, REPOSITORY, TINY, call, environment, write_config

from vit.config.io import load_config
from vit.system.meter import GIB
from vit.training.plan import make_plan

ROWS = rows("GPUs")
NO_GPU = """
import torch
def init(): raise {error}
torch.cuda.is_available = lambda: False
torch.cuda.init = init
torch.version.cuda = "13.0"
"""
OLD_DRIVER = """RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."
 " Please update your GPU driver by downloading and installing a new version.")"""
ONE_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
"""
OUT_OF_MEMORY = """
import torch, vit.model
def forward(model, images):
    # What only counts operations or bytes needs no memory.
    if model.training == {training} and type(images) is torch.Tensor and not images.is_meta:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
            " a total capacity of 79.10 GiB of which 1.00 GiB is free.")
    return unchanged(model, images)
unchanged = vit.model.VisionTransformer.forward
vit.model.VisionTransformer.forward = forward
"""
GPU_OF_SIZE = """
from vit.extras.planner import fitting
from vit.system.gpus import Gpu
fitting.gpu_of = lambda device: Gpu("small", 1.0, 1.0, {memory_gib}, 1.0, "small")
"""
FULL_ABOVE = """
import torch, vit.model
from vit.extras.planner.benchmark import bench
from vit.system.gpus import Gpu
bench.Subject.on_gpu = True
bench.gpu_of = lambda device: Gpu("small", 1.0, 1.0, 4.0, 1.0, "small")
bench._memory_gib = lambda subject: 4.0
def forward(model, images):
    if not images.is_meta and type(images) is torch.Tensor and len(images) > {rows}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return unchanged(model, images)
unchanged = vit.model.VisionTransformer.forward
vit.model.VisionTransformer.forward = forward
"""
NO_ORDER = """
import torch, vit.model
def forward(model, images):
    assert torch.are_deterministic_algorithms_enabled()
    raise RuntimeError("adaptive_avg_pool2d_backward_cuda does not have a deterministic"
        " implementation, but you set 'torch.use_deterministic_algorithms(True)'.")
vit.model.VisionTransformer.forward = forward
"""
NOT_COMPILED = """
import torch
def compile_graph(graph, inputs):
    raise RuntimeError("Internal Triton PTX codegen error\\nptxas fatal: Unknown option")
def compile(function, **options):
    # The line by which the host is tried has no options, and compiles.
    return unchanged(function, backend=compile_graph) if options else function
unchanged = torch.compile
torch.compile = compile
"""
NO_BF16 = """
import sys, torch
from vit.layers.precision import precision_note
torch.cuda.get_device_capability = lambda device: (7, 5)
torch.cuda.get_device_name = lambda device: "Tesla T4"
print("note:", precision_note("bf16", torch.device("cuda", 0)), file=sys.stderr)
"""


class Place:
    def __init__(self, folder: Path, shards: Path):
        self.folder = folder
        self.config = write_config(folder, shards)

    def train(
        self, imitation: str, *overrides: str, **variables: str
    ) -> subprocess.CompletedProcess:
        return self.run(
            "train.py", imitation, f"run.dir={self.folder / 'run'}", *overrides, **variables
        )

    def run(
        self, name: str, imitation: str, *overrides: str, **variables: str
    ) -> subprocess.CompletedProcess:
        script = COMMANDS / "launch" / name
        arguments = ["--config", self.config, *TINY, *overrides]
        starts = f"import runpy, sys; sys.path.insert(0, {str(script.parent)!r})"
        runs = f"runpy.run_path({str(script)!r}, run_name='__main__')"
        code = f"{imitation}\n{starts}\n{runs}"
        env = {**environment(), "CUDA_VISIBLE_DEVICES": "", **variables}
        line = [warm_python.python(environment()), "-c", code, *map(str, arguments)]
        return call(line, env)

    def gpu_for(self, micro_batch_size: float, spare_gib: float = 0.0) -> str:
        """Return Python code that simulates a GPU whose memory is just large enough for a
        micro-batch of the given size.

        The size may be a fraction. If it is 0, the simulated GPU has no memory. `spare_gib` is
        added to the memory.
        """
        RESERVED_GIB = pytest.importorskip("vit.extras.planner.forecast").RESERVED_GIB
        USABLE_SHARE = pytest.importorskip("vit.extras.planner.forecast").USABLE_SHARE
        step_memory = pytest.importorskip("vit.extras.planner.memory").step_memory
        config = load_config(self.config, TINY)
        plan, _ = make_plan(config, 60, 1)
        sizes = [int(micro_batch_size), int(micro_batch_size) + 1] if micro_batch_size else []
        needed = [
            step_memory(config, replace(plan, micro_batch_size=size), 3).total for size in sizes
        ]
        mean_gib = sum(needed) / max(len(needed), 1) / GIB
        return GPU_OF_SIZE.format(memory_gib=RESERVED_GIB + mean_gib / USABLE_SHARE + spare_gib)


def out_of_memory(place: Place, *gpu: float) -> subprocess.CompletedProcess:
    imitation = OUT_OF_MEMORY.format(training=True) + place.gpu_for(*gpu)
    return place.train(imitation, "train.device=cpu")


def nothing_to_check(place: Place) -> subprocess.CompletedProcess:
    script = REPOSITORY / "benchmarks" / "gpu_check" / "check.py"
    env = environment()
    return call([warm_python.python(env), str(script)], env | {"CUDA_VISIBLE_DEVICES": ""})


def unknown_gpu(place: Place) -> subprocess.CompletedProcess:
    script = COMMANDS / "launch" / "plan.py"
    env = environment()
    line = [warm_python.python(env), str(script), "--config", str(place.config), "--gpus", "H300"]
    return call(line, env)


def a_gpu_without_bf16(place: Place) -> subprocess.CompletedProcess:
    env = environment()
    return call([warm_python.python(env), "-c", NO_BF16], env)


ON_CUDA = "train.device=cuda"
SCENARIOS: dict[str, Callable[[Place], subprocess.CompletedProcess]] = {
    "a driver that is older than torch's CUDA": lambda place: place.train(
        NO_GPU.format(error=OLD_DRIVER), ON_CUDA
    ),
    "a torch that is built for CPUs only": lambda place: place.train(
        NO_GPU.format(error='AssertionError("Torch not compiled with CUDA enabled")'), ON_CUDA
    ),
    "fewer GPUs than ranks": lambda place: place.train(ONE_GPU, ON_CUDA, LOCAL_WORLD_SIZE="2"),
    "a step does not fit into the GPU": lambda place: out_of_memory(place, 4.5),
    "no batch size fits into the GPU": lambda place: out_of_memory(place, 0),
    "another process fills the GPU": lambda place: out_of_memory(place, 11.5, 1.0),
    "an evaluation does not fit into the GPU": lambda place: place.train(
        OUT_OF_MEMORY.format(training=False), "train.device=cpu"
    ),
    "a model that cannot add in one order, with `train.deterministic=true`": (
        lambda place: place.train(NO_ORDER, "train.device=cpu", "train.deterministic=true")
    ),
    "a model that torch.compile fails on, though it works on this host": (
        lambda place: place.train(NOT_COMPILED, "train.device=cpu", "train.compile=true")
    ),
    "an attention kernel that this machine does not have": (
        lambda place: place.train(
            "", "train.device=cpu", "train.precision=fp32", "train.attention=cudnn"
        )
    ),
    "a GPU without bf16: training goes on": a_gpu_without_bf16,
    "nothing that `launch/bench.py` may try fits": (
        lambda place: place.run("bench.py", FULL_ABOVE.format(rows=1))
    ),
    "a micro-batch that `launch/bench.py` is to measure does not fit": (
        lambda place: place.run("bench.py", FULL_ABOVE.format(rows=4), "--micro-batch", "12")
    ),
    "`make gpu-check` without a GPU": nothing_to_check,
    "a micro-batch for `launch/bench.py` that does not divide the batch": (
        lambda place: place.run("bench.py", "", "--micro-batch", "5")
    ),
    "a folder for the results of `launch/bench.py --out` that cannot be written": (
        lambda place: place.run("bench.py", "", "--out", str(place.config / "results"))
    ),
    "`launch/plan.py` for a GPU that it does not know": unknown_gpu,
}


SLOWEST = "nothing that `launch/bench.py` may try fits"  # takes 20 seconds


@pytest.mark.parametrize(
    "row", [row.case(*[pytest.mark.full] * (row.what == SLOWEST)) for row in ROWS]
)
def test_the_mistake_has_the_stated_result(row: Row, tmp_path, shards):
    done = SCENARIOS[row.what](Place(tmp_path, shards))
    assert done.returncode == row.status, done.stderr
    pattern = f"^{pattern_of(row.printed)}\\s*\\Z"
    assert re.search(pattern, done.stderr, re.MULTILINE), (
        f"expected {row.printed}, but got:\n{done.stderr}"
    )
    assert "Traceback" not in done.stderr


def test_every_scenario_has_a_row_and_every_row_a_scenario():
    assert [row.what for row in ROWS] == list(SCENARIOS)
