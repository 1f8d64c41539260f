"""Plant faults in runs: a hook that changes a bit or a rate during training, and edits of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from processes import TINY

from vit.build import build
from vit.config.io import load_config
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.extras.compose import parts_of
from vit.run import Hook, Run
from vit.train import train

ALONE = World(0, 1, torch.device("cpu"))
FLIPPED = "blocks.1.mlp.fc2.weight"


class Plant(Hook):
    """Calls `change` with the run after the update of `step`, counted from 1."""

    def __init__(self, step: int, change: Callable[[Run], None]):
        self._step = step
        self._change = change

    def begin(self, run: Run) -> None:
        self._run = run

    def queued(self, batch: Batch) -> None:
        if self._run.state.step + 1 == self._step:
            self._change(self._run)


def flip_bit(values: torch.Tensor, place: int = 5, bit: int = 20) -> None:
    """Flip one bit of a float32 tensor, in place."""
    with torch.no_grad():
        values.view(-1).view(torch.int32)[place] ^= 1 << bit


def flip_weight(run: Run) -> None:
    flip_bit(run.train_step.model.get_parameter(FLIPPED))


def double_rate(run: Run) -> None:
    """Double the learning rate from the next step on."""
    rate = run.train_step.lr_at
    first = run.state.step + 1
    run.train_step.lr_at = lambda step: rate(step) * (2 if step >= first else 1)


def train_here(config: Path, run_dir: Path, *overrides: str, hooks: tuple[Hook, ...] = ()) -> None:
    """Train in this process, with further hooks."""
    settings = load_config(config, [f"run.dir={run_dir}", *TINY, *overrides])
    parts = parts_of(settings)
    parts = replace(parts, hooks=(*parts.hooks, *hooks))
    assert train(build(settings, ALONE, (), parts)) == "finished"


def edit_record(run_dir: Path, kind: str, step: int, change: Callable[[dict], None]) -> None:
    """Edit the last line of `kind` at `step` in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(row) for row in path.read_text().splitlines()]
    change([line for line in lines if (line["kind"], line["step"]) == (kind, step)][-1])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
