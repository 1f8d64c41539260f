"""Write tiny shards, start training with torchrun, and kill training processes.

Models and images are tiny (width 32, 16 px), because the tested behavior does not depend on their
size. Most of the time is spent on starting Python.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import warm_python
from checksums import digest
from families import Family, bearing, inherited
from PIL import Image
from proc import children, command_line, environment_of
from safetensors.torch import load_file

import vit.train
from data_prep import imagefolder
from vit.checkpoint.state import RunState
from vit.data.image_format import ImageFormat
from vit.distributed.process_group import World
from vit.loggers.record import Record
from vit.training.plan import Plan
from vit.weights.save import SEAL

REPOSITORY = Path(__file__).parents[2]
_package = Path(vit.train.__file__).parent
COMMANDS = _package if (_package / "launch").is_dir() else REPOSITORY
"""The folder that contains launch/, which is either the repository or an installed package
(tests/project/test_wheel.py)."""
TINY = [
    "model.embed_dim=32",
    "model.depth=2",
    "model.num_heads=2",
    "model.image_size=16",
    "model.name=vit_ti8",
    "loader.num_workers=0",
    "log.wandb=off",
    "log.report=false",
    "eval.batch_size=8",
    "train.precision=fp32",
    "data.interpolation=bilinear",
    "log.every_steps=1",
]


def make_shards(
    folder: Path,
    *,
    num_train: int = 60,
    num_val: int = 23,
    num_classes: int = 3,
    size: tuple[int, int] = (24, 20),
    seed: int = 0,
) -> Path:
    """Write shards with the project's writer, and return the root folder. The images are noise
    around a color that depends on the class."""
    rng = np.random.default_rng(seed)
    for split, total in (("train", num_train), ("val", num_val)):
        for number in range(total):
            label = number % num_classes
            pixels = np.clip(rng.normal(60 + 60 * label, 30, (*size, 3)), 0, 255).astype(np.uint8)
            path = folder / "images" / split / f"class{label}" / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=92)
    assert (
        imagefolder.main(
            [
                str(folder / "images"),
                "--out",
                str(folder / "shards"),
                "--num-shards",
                "3",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    return folder / "shards"


def write_config(
    folder: Path, root: Path, name: str = "tiny.yaml", *, steps: int = 12, batch: int = 12
) -> Path:
    """Write a config that trains on the shards in `root`.

    The config enables dropout, drop path, mixing and averaged weights, because a resumed run must
    restore the state of each of them.
    """
    path = folder / name
    path.write_text(f"""
model: {{drop_path_rate: 0.2, proj_drop_rate: 0.1}}
data: {{root: {root}, global_batch_size: {batch}}}
augment: {{mixup_alpha: 0.8, cutmix_alpha: 1.0, mix_group_size: 2}}
loss: {{label_smoothing: 0.1}}
schedule: {{warmup_steps: 3}}
train: {{steps: {steps}}}
ema: {{decay: 0.9}}
checkpoint: {{every_steps: 3}}
eval: {{every_steps: 6}}
""")
    return path


def environment() -> dict[str, str]:
    """Return this process's environment without W&B variables. Each child process is limited to one
    thread."""
    variables = {
        key: value
        for key, value in inherited().items()
        if not key.startswith(("WANDB", "RANK", "WORLD_SIZE", "LOCAL_RANK"))
    }
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def command(
    script: str, *arguments: object, ranks: int = 1, python: str = sys.executable
) -> list[str]:
    launcher = (
        [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks
        else [python]
    )
    return [*launcher, str(COMMANDS / script), *map(str, arguments)]


def call(
    line: list[str],
    env: dict[str, str] | None = None,
    cwd: Path = REPOSITORY,
    timeout_s: float = 240,
) -> subprocess.CompletedProcess:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Family(line, env=environment() if env is None else env, cwd=cwd, **pipes) as family:
        stdout, stderr = family.communicate(timeout_s)
    return subprocess.CompletedProcess(line, family.process.returncode, stdout, stderr)


def run(
    script: str,
    *arguments: object,
    ranks: int = 0,
    cwd: Path | None = None,
    timeout_s: float = 240,
    cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits. Return stdout and stderr as text.

    By default, torchrun and its ranks are forked from a process that has already imported torch
    (tests/helpers/warm_python.py). If `cold` is true, they are started normally, as on a user's
    machine.
    """
    env = environment()
    python = sys.executable if cold else warm_python.python(env)
    env["PYTHON_EXEC"] = python  # torchrun reads the path of the interpreter from this variable
    return call(
        command(script, *arguments, ranks=ranks, python=python), env, cwd or REPOSITORY, timeout_s
    )


@contextmanager
def _typed(script: str, arguments: Sequence[object]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as if this process had been started to run `script` with
    `arguments`."""
    argv = sys.argv
    path = list(sys.path)
    sys.argv = [script, *map(str, arguments)]
    sys.path.insert(0, str((COMMANDS / script).parent))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path


def run_here(script: str, *arguments: object) -> None:
    """Run a launch command in this process, in which torch is already imported.

    If the command would exit with status 2, the function raises ValueError.
    """
    with _typed(script, arguments):
        runpy.run_path(str(COMMANDS / script))["main"]()


def train(
    config: Path, run_dir: Path, *overrides: str, ranks: int = 0, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    done = run(
        "launch/train.py",
        "--config",
        config,
        f"run.dir={run_dir}",
        *TINY,
        *overrides,
        ranks=ranks,
        cold=cold,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class Background:
    """A training run in the background that a test can kill.

    By default, torchrun and its ranks are forked from a process that has already imported torch.
    `process` and `trainers` are then small programs that forward signals to the forked processes
    and exit with them. If `cold` is true, `process` and `trainers` are the training processes
    themselves.
    """

    def __init__(
        self, config: Path, run_dir: Path, *overrides: str, ranks: int = 2, cold: bool = False
    ):
        self.run_dir = run_dir
        env = environment()
        # Without torchrun, tests stop the process itself and search for its children, so the
        # process must be started normally.
        self._warm = bool(ranks) and not cold
        python = warm_python.python(env) if self._warm else sys.executable
        env["PYTHON_EXEC"] = python
        line = command(
            "launch/train.py",
            "--config",
            config,
            f"run.dir={run_dir}",
            *TINY,
            *overrides,
            ranks=ranks,
            python=python,
        )
        self._family = Family(
            line,
            env=env,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.process = self._family.process

    def wait_for_step(self, step: int, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while last_step(self.run_dir) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"ended before step {step}:\n{self.end()}")
            time.sleep(0.01)

    def wait_for_checkpoint(self, step: int, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while last_checkpoint(self.run_dir) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"ended before a checkpoint at {step}:\n{self.end()}")
            time.sleep(0.01)

    def wait_for_output(self, text: str, timeout_s: float = 240) -> str:
        """Wait until the process has printed `text`, and return all output up to that point. `end`
        returns only the output after that point."""
        assert self.process.stdout is not None
        seen = b""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in seen:
            left_s = max(deadline - time.monotonic(), 0)
            is_there, _, _ = select.select([self.process.stdout], [], [], left_s)
            new = os.read(self.process.stdout.fileno(), 2**16) if is_there else b""
            if not new:
                raise AssertionError(f"no {text!r}:\n{seen.decode()}{self.end()}")
            seen += new
        return seen.decode()

    def trainers(self) -> list[int]:
        """Return the process ids of the ranks, ordered by rank.

        Each rank runs in its own session, so the ranks are found among the children of torchrun.
        Forked ranks are found by their mark.
        """
        pids = bearing(self._family.mark) if self._warm else children(self.process.pid)
        lines = {pid: command_line(pid) for pid in pids if pid != self.process.pid}
        ranks = [pid for pid, line in lines.items() if "launch/train.py" in line]
        return sorted(ranks, key=_rank_of)  # sort by rank, because process ids can wrap around

    def workers(self) -> list[int]:
        """Return the ids of the processes that actually train, which a test can stop with SIGSTOP.

        If the ranks are forked, these are the ids of the forked processes. Ranks that have not
        started yet are omitted.
        """
        pids = []
        for pid in self.trainers():
            with suppress(OSError, ValueError):  # skip a rank that has not been forked yet
                pids.append(warm_python.fork_of(pid) if self._warm else pid)
        return pids

    def kill_all(self) -> None:
        """Send SIGKILL to torchrun and all ranks at the same time, to simulate a power failure."""
        for pid in [*self.trainers(), self.process.pid]:
            # Ignore a rank that has already exited.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def end(self, timeout_s: float = 240) -> str:
        try:
            return self.process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            self._family.kill()
            raise


def _rank_of(pid: int) -> int:
    return int(environment_of(pid).get("RANK") or 0)


def last_step(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def last_checkpoint(run_dir: Path) -> int:
    """Return the step of the last checkpoint in metrics.jsonl, or -1 if the file lists no
    checkpoint."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    steps = [line["step"] for line in map(json.loads, lines) if line["kind"] == "checkpoint"]
    return max(steps, default=-1)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of any dtype, including bfloat16."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def final_state(run_dir: Path, step: int) -> dict[str, str]:
    """Return digests of all tensors in the checkpoint at `step` and of all per-image losses. Two
    runs are bit-identical if their digests are equal."""
    tensors = load_file(run_dir / "checkpoints" / f"step_{step:08d}" / "state.safetensors")
    losses = {path.name: digest(path.read_bytes()) for path in run_dir.glob("samples/epoch_*.npy")}
    assert losses, "a run must save the losses of images by default"
    return {**{name: digest(bytes_of(tensor)) for name, tensor in tensors.items()}, **losses}


def as_by_another_program(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a weights file without its hash, as another program would write it."""
    return {key: value for key, value in metadata.items() if key != SEAL}


def metrics(run_dir: Path, kind: str) -> list[dict]:
    return [
        line
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == kind
    ]


def jpeg(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def run_of(plan: Plan, world: World, record: Record, image_format: ImageFormat) -> Any:
    """Return a stub of a run that has only the attributes that `vit.monitor.Monitor`
    reads."""
    return SimpleNamespace(
        hooks=(),
        plan=plan,
        world=world,
        state=RunState(facts={}),
        record=record,
        batches=SimpleNamespace(image_format=image_format),
        train_step=SimpleNamespace(lr_at=lambda step: 0.1, weight_decay_at=lambda step: None),
    )
