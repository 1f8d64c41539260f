"""Test the rows of errors/rows.yaml that describe limits and failures of a machine."""

from __future__ import annotations

import ast
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_python
from error_rows import NEEDS_MOUNT, Place, Row, Scenarios, python, snapshot
from processes import REPOSITORY, TINY, Background, command, environment

from vit.data.batches import Batch, Batches, BatchLayout
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.distributed import exit

VERSIONS = runpy.run_path(str(REPOSITORY / "launch" / "check_versions.py"))

scenario = Scenarios()


WITH_6_GIB = python("import resource\nresource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


@scenario("a GPU asked for where none is")
def _(place):
    place.train("train.device=cuda")


@scenario("something that `--check` finds; its table, above the line, says what and what to do")
def _(place):
    os.truncate(place.own_shards() / "train-00001.tar", 1024)
    place.train("--check")


@scenario("the same, by a flag of `launch/eval.py`")
def _(place):
    place.evaluate(place.finished, "--device", "cuda")


@scenario("out of memory in a step", begun=True)
def _(place):
    if sys.platform != "linux":
        pytest.skip("only Linux limits a process's memory")
    place.train(
        "model.patch_size=1", "model.mlp_ratio=10000.0", "train.device=cpu", prefix=WITH_6_GIB
    )


@scenario("a loader worker was killed, perhaps as memory ran out", begun=True)
def _(place):
    endless = [
        "train.steps=100000",
        "eval.every_steps=100000",
        "checkpoint.every_steps=100000",
        "log.every_steps=10",
    ]
    background = Background(place.config, place.run_dir, *endless, "loader.num_workers=1", ranks=0)
    background.wait_for_step(10)
    place.before = {}
    [worker] = background.trainers()
    os.kill(worker, signal.SIGKILL)
    output = background.end()
    place.done = subprocess.CompletedProcess([], background.process.returncode, "", output)
    place.after = snapshot(place.folder)


@scenario("hardly any room in /dev/shm (Docker gives 64 MiB): training needs none", begun=True)
def _(place):
    mount = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, "true"], capture_output=True).returncode
    ):
        pytest.skip(NEEDS_MOUNT)
    place.train(
        "loader.num_workers=1",
        "model.image_size=256",
        "train.steps=2",
        "eval.every_steps=2",
        prefix=tuple(mount),
    )


@scenario("more memory for batches than the machine has")
def _(place):
    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux tells how much memory is free")
    place.train("loader.num_workers=1000000")


@scenario("the port is taken, ranks started by hand")
def _(place):
    with taken_port() as port:
        place.train(
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )


@scenario(
    "the port is taken, `torchrun --master_port`: torchrun's own words, below its stack;"
    " `--standalone` finds a free port"
)
def _(place):
    with taken_port() as port:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            f"--master_port={port}",
        ]
        place.run(
            *launcher,
            REPOSITORY / "launch/train.py",
            "--config",
            place.config,
            f"run.dir={place.run_dir}",
            *TINY,
        )


def start_with(place: Place, ranks: int = 0, **variables: str) -> None:
    """Run `launch/train.py` with environment variables that the command reads only after all
    imports."""
    python = warm_python.python(environment())
    words = ("--config", place.config, f"run.dir={place.run_dir}", *TINY)
    line = command("launch/train.py", *words, ranks=ranks, python=python)
    place.run(*line, PYTHON_EXEC=python, **variables)


@scenario("half of the variables that torchrun sets")
def _(place):
    start_with(place, WORLD_SIZE="2")


@scenario("a rank that is not below the number of ranks")
def _(place):
    start_with(place, RANK="1")


@scenario("a variable of torchrun that is not a number")
def _(place):
    start_with(place, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="port")


@scenario("several tasks of srun, or processes of mpirun, without torchrun")
def _(place):
    start_with(place, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")


@scenario("a network interface that this host lacks, printed by a rank, above torchrun's stack")
def _(place):
    start_with(place, ranks=2, GLOO_SOCKET_IFNAME="nowhere0")


@scenario("Python is too old")
def _(place):
    names = [f"python3.{minor}" for minor in range(8, 11)]
    paths = [shutil.which(name) for name in names] + [
        str(p) for p in Path(sys.base_prefix).parent.glob("*/bin/python3")
    ]
    is_old = "import sys; sys.exit(not (3, 8) <= sys.version_info < (3, 11))"
    old = next(
        (
            path
            for path in paths
            if path and subprocess.run([path, "-c", is_old], capture_output=True).returncode == 0
        ),
        None,
    )
    if old is not None:
        place.run(
            old,
            REPOSITORY / "launch/train.py",
            "--config",
            place.config,
            f"run.dir={place.run_dir}",
        )
    else:  # no old Python is installed, so simulate its version
        (place.folder / "sitecustomize.py").write_text(
            "import sys\nsys.version_info = (3, 9, 18)\n"
        )
        place.train(PYTHONPATH=str(place.folder), PYTHONDONTWRITEBYTECODE="1")


@scenario("Windows without WSL")
def _(place):
    (place.folder / "sitecustomize.py").write_text("import sys\nsys.platform = 'win32'\n")
    place.train(PYTHONPATH=str(place.folder), PYTHONDONTWRITEBYTECODE="1")


@scenario("torch is too old")
def _(place):
    (place.folder / "torch").mkdir()
    (place.folder / "torch" / "__init__.py").write_text('__version__ = "2.4.1+cpu"\n')
    place.train(PYTHONPATH=str(place.folder), PYTHONDONTWRITEBYTECODE="1")


@scenario("the environment is not active")
def _(place):
    interpreter = Path(sys.base_prefix) / "bin" / "python3"
    place.run(
        interpreter,
        "-S",
        REPOSITORY / "launch/train.py",
        "--config",
        place.config,
        f"run.dir={place.run_dir}",
    )


class TooLarge(Batches):
    """A batch source that needs more memory than any machine has."""

    layout = BatchLayout(4, ImageFormat((8, 8)), 0)

    def __init__(self, allocate: Callable[[int], object]):
        self.allocate = allocate

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        self.allocate(1 << 50)
        raise AssertionError("there was memory")


@pytest.mark.parametrize("allocate", [np.ones, torch.ones])
def test_names_the_setting_to_lower_when_memory_runs_out(allocate):
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate(1 << 50)
    assert "Lower data.micro_batch_size in training" in exit.out_of_memory(caught.value)
    for num_workers in (0, 1):
        with Loader(TooLarge(allocate), 0, 1, num_workers=num_workers) as loader:
            with pytest.raises((MemoryError, RuntimeError)) as caught:
                next(loader)
        assert not multiprocessing.active_children(), (
            "a worker outlives its loader while a traceback references the iterator"
        )
        assert "while loading a batch. Lower loader.num_workers" in exit.out_of_memory(caught.value)


def test_the_required_versions_are_those_of_pyproject():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">={}.{}".format(*VERSIONS["PYTHON"])
    assert "torch>={}.{}".format(*VERSIONS["TORCH"]) in project["dependencies"]


def test_an_old_python_parses_a_command_up_to_the_check_of_versions():
    for path in [*(REPOSITORY / "launch").glob("*.py"), REPOSITORY / "data_prep" / "__init__.py"]:
        ast.parse(path.read_text(), feature_version=(3, 8))
    for path in (REPOSITORY / "launch").glob("*.py"):
        if path.name != "check_versions.py":
            modules = []
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    modules += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules.append(str(node.module))
            ours = [each for each in modules if each.split(".")[0] not in sys.stdlib_module_names]
            assert ours[0] == "check_versions", (
                f"{path.name}: another import must not run before the version check"
            )


@pytest.mark.parametrize("row", scenario.rows())
def test_the_mistake_has_the_stated_result(row: Row, happened: dict[str, Future[Place]]):
    scenario.check(row, happened[row.what].result())
