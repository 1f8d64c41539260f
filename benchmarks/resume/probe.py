"""Log what a model sees, and let the benchmark kill the run between two steps.

Each contestant trains a `Probe` on samples that consist of a sample number and one random number.
The library's workers draw the random number, which is called the "augmentation". `Probe.forward`
appends one line per step to log/life_<n>_rank_<r>.jsonl: the step, the sample numbers and the
augmentations. The steps are counted in a buffer of the model. A checkpoint stores this buffer with
the weights, so the log shows which steps the weights contain, even if the library counts
differently.

After step `RESUME_KILL_AT`, all ranks wait at the start of the next forward pass until they are
killed (`lives.py`). `resume_truth.py` sets the variables RESUME_* and torchrun's variables.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 10_080
"""The number of samples. It is a multiple of the batch on 1, 2 and 3 ranks (60, 30 and 20 per
rank), even if two workers share a rank's samples. No library therefore has to drop or repeat
samples at the end of an epoch."""
BATCH = 60
EPOCHS = 2
STEPS_PER_EPOCH = SAMPLES // BATCH
STEPS = EPOCHS * STEPS_PER_EPOCH
SAVE_EVERY = 40
SEED = 0
FOLDER = Path(os.environ.get("RESUME_FOLDER", "."))
"""The run's folder, which is the same in all lives."""
SHARED = Path(os.environ.get("RESUME_SHARED", "."))
"""The folder for data sets, which is the same for all runs of a contestant."""
WORKERS = int(os.environ.get("RESUME_WORKERS", "2"))
VARIANT = os.environ.get("RESUME_VARIANT", "")
LIFE = int(os.environ.get("RESUME_LIFE", "1"))
KILL_AT = int(os.environ.get("RESUME_KILL_AT", "-1"))
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK_BATCH = BATCH // WORLD

last_step = 0
"""The number of steps in the weights at the last logged step."""


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style data set. A sample is its number, and a random number from the worker's torch
    generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        return augment(number)


def augment(number: int) -> dict[str, Any]:
    return {"number": number, "augmentation": torch.rand(()).item()}


class Probe(nn.Module):
    """A linear layer that logs its inputs. See the module docstring."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        atexit.register(self._log_end)

    def _log_end(self) -> None:
        """When the process ends by itself, write how many steps the weights contain."""
        (FOLDER / "log" / f"life_{LIFE}_rank_{RANK}.end").write_text(str(int(self.steps)))

    def forward(self, number: Tensor, augmentation: Tensor) -> dict[str, Tensor]:
        """Return the loss. number, augmentation: (B,)."""
        if self.training:
            log_step(self.steps, number, augmentation)
        predicted = self.linear(augmentation.float()[:, None])[:, 0]
        return {"loss": (predicted - number / SAMPLES).square().mean()}


def log_step(steps: Tensor, number: Tensor, augmentation: Tensor) -> None:
    """Append a line to the log and count the step. At step `KILL_AT`, wait for the kill instead."""
    global last_step
    log = FOLDER / "log"
    log.mkdir(parents=True, exist_ok=True)
    if int(steps) == KILL_AT:
        (log / f"life_{LIFE}_rank_{RANK}.waits").touch()
        time.sleep(3600)
    steps += 1
    last_step = int(steps)
    line = {"step": int(steps), "number": number.tolist(), "augmentation": augmentation.tolist()}
    with (log / f"life_{LIFE}_rank_{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


class Training:
    """A model and its optimizer in a plain loop, with a state that every rank saves for itself.

    `state` is the last saved state, or None at the first start.
    """

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        if WORLD > 1:
            dist.init_process_group("gloo")
        self.probe = Probe()
        self.model = DistributedDataParallel(self.probe) if WORLD > 1 else self.probe
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=1e-3, momentum=0.9)

        self.state: dict[str, Any] | None = None
        done = sorted(FOLDER.glob("state_*"), key=lambda path: int(path.name.split("_")[1]))
        if done:
            # On more ranks than before, the new ranks read the state of rank 0.
            own = done[-1] / f"rank_{RANK}.pt"
            file = own if own.exists() else done[-1] / "rank_0.pt"
            self.state = torch.load(file, weights_only=False)
            self.probe.load_state_dict(self.state["model"])
            self.optimizer.load_state_dict(self.state["optimizer"])

    @property
    def done(self) -> int:
        """The number of steps in the weights."""
        return int(self.probe.steps)

    @property
    def save_is_due(self) -> bool:
        return self.done % SAVE_EVERY == 0

    def step(self, batch: dict[str, Any]) -> None:
        loss = self.model(torch.as_tensor(batch["number"]), torch.as_tensor(batch["augmentation"]))
        self.optimizer.zero_grad()
        loss["loss"].backward()
        self.optimizer.step()

    def save(self, **more: Any) -> None:
        """Save the state in the folder state_<step>, which gets this name after all ranks have
        written their files."""
        writing = FOLDER / f"writing_{self.done}"
        writing.mkdir(parents=True, exist_ok=True)
        state = {"model": self.probe.state_dict(), "optimizer": self.optimizer.state_dict(), **more}
        torch.save(state, writing / f"rank_{RANK}.pt")
        if WORLD > 1:
            dist.barrier()
        if RANK == 0:
            writing.rename(FOLDER / f"state_{self.done}")
        if WORLD > 1:
            dist.barrier()
