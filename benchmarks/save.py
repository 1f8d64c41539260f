"""Measure how long a save interrupts training, compared with a copy in memory and a blocking write.

    python benchmarks/save.py [--config configs/vit_b16.yaml] [--rounds 5] [section.key=value]

Contestants take turns saving the state of a model with its average and its optimizer (1.4 GB for
ViT-B). The first copies as many bytes into allocated memory. The second saves with the background
thread and is timed until training continues, and until the thread has written everything. The third
writes weights, average and state with the safetensors package, flushes each file, and reads the
state back for its hash. The command prints a table of timings in seconds. It requires memory for
three copies of the state and disk space for four.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import rows_of, show, take_turns
from safetensors.torch import save_file
from torch import Tensor

from vit.checkpoint.checkpoint import named_tensors
from vit.checkpoint.saver import Saver
from vit.checkpoint.state import RunState
from vit.config import io as config_io
from vit.config.schema import CheckpointConfig, Config
from vit.distributed.process_group import World
from vit.loggers.record import Record
from vit.model import create_model
from vit.optim.ema import Ema
from vit.optim.optimizer import create_optimizer
from vit.run_folder.place import Place
from vit.step import TrainStep
from vit.training.loss import cross_entropy
from vit.training.objective import Objective
from vit.training.reduce import DataParallel


def create_train_step(config: Config) -> TrainStep:
    """Return a training step on the CPU that has everything that is saved, but no parts that are
    needed only for training."""
    device = torch.device("cpu")
    model = create_model(config.model, num_classes=1000)
    decay = config.ema.decay
    return TrainStep(
        model,
        create_optimizer(model, config.optim),
        None,  # type: ignore[arg-type]
        Objective(cross_entropy),
        DataParallel(model, World(0, 1, device)),
        lr_at=lambda step: 0.0,
        micro_batch_size=1,
        ema=None if decay is None else Ema(model, decay),
    )


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a call of `function` takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def copy(tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
    """Copy every tensor, as every save must."""
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)


def write_at_once(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write weights, average and state, flush each file to disk, and hash the state file."""
    for prefix in ("model.", "ema."):
        part = {name: value for name, value in tensors.items() if name.startswith(prefix)}
        _write(part, folder / f"{prefix}safetensors")
    _write(tensors, folder / "state.safetensors")
    with (folder / "state.safetensors").open("rb") as file:
        hashlib.file_digest(file, "sha256")


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/vit_b16.yaml")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    config = config_io.load_config(args.config, args.overrides)
    train_step = create_train_step(config)
    tensors = named_tensors(train_step)
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    state = RunState(facts={"num_classes": 1000, "grid_size": None})
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        record = Record(folder, config.log, is_main=False, total_steps=1)
        kept = CheckpointConfig(keep_last=1)
        saver = Saver(Place(folder), train_step, config_io.to_dict(config), [], kept, record)
        saver.prepare()
        saver.finish()

        def save() -> float:
            state.step += 1
            return timed(lambda: saver.save(state, with_checkpoint=True))

        result = take_turns(
            f"saving {num_bytes / 1e9:.2f} GB",
            "s",
            {
                "copy in memory": lambda: timed(partial(copy, tensors, copies)),
                "save, until training goes on": save,
                "the rest of it, in the thread": lambda: timed(saver.finish),
                "weights and state at once": lambda: timed(partial(write_at_once, tensors, folder)),
            },
            args.rounds,
            bases=["copy in memory"],
        )
        saver.close()
    show(result["title"], rows_of(result))


if __name__ == "__main__":
    main()
