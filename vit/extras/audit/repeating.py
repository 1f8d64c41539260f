"""Train one stretch of a run again, with the ordinary training code in a temporary folder.

    temporary folder   checkpoints/step_<start>/   a link to the run's tensors, a copy of its state
    train              the audited config, without views, reports and losses of images
    step <end>         the evaluation and the save of this step are done: stop

Nothing is written to the audited run.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit.build import build
from vit.checkpoint.checkpoint import STATE_FILE, checkpoint_folder
from vit.config import io as config_io
from vit.config.hints import all_keys
from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.extras.audit.history import History, Stretch
from vit.extras.compose import parts_of
from vit.run import Hook
from vit.run_folder import INFO_FILE, sealed
from vit.system.files import ShardError, write_json
from vit.train import train
from vit.training.run_data import open_data
from vit.training.step_result import StepValues

NEVER = 2**31 - 1


class _Reached(Exception):
    """An exception that ends a stretch on all ranks."""


class _Listener(Hook):
    """Reports each step, and ends training after the step `end`."""

    def __init__(self, end: int, on_step: Callable[[], None]):
        self._end = end
        self._on_step = on_step

    def loss_limit(self, step: int) -> None:
        """See `Hook`. All earlier steps have been read, evaluated and saved."""
        if step == self._end:
            raise _Reached

    def read(self, step: int, values: StepValues) -> None:
        """See `Hook`."""
        self._on_step()


def repeat(
    history: History,
    stretch: Stretch,
    config: Config,
    world: World,
    folder: Path,
    on_step: Callable[[], None],
) -> History | None:
    """Train a stretch again in the new folder `folder`, and return its record on rank 0.

    All ranks must call this. config: the settings of the stretch. on_step: called after each step.
    Raises ShardError, with the step, for an image that does not match its checksum.
    """
    is_like_run = history.attempts(stretch)[0]["world_size"] == world.size
    # The lines of an ordinary run would hide the result of the audit.
    with redirect_stderr(io.StringIO()):
        facts = open_data(config, world).facts
        world.on_main(lambda: _link(history, stretch.start, folder, facts))
        config = _quiet(config, folder, stretch.end, is_like_run)
        parts = parts_of(config)
        parts = replace(parts, hooks=(_Listener(stretch.end, on_step), *parts.hooks))
        run = build(config, world, all_keys(), parts)
        try:
            with suppress(_Reached):
                train(run)
        except ShardError as error:
            raise ShardError(f"step {run.state.step + 1}: {error}") from None
    return History(folder) if world.is_main else None


def _link(history: History, step: int, folder: Path, facts: dict[str, Any]) -> None:
    """Give a temporary run the checkpoint at `step`, with the `facts` of today's data."""
    if step in history.kept:
        target = checkpoint_folder(folder, step)
        target.mkdir(parents=True)
        (target / STATE_FILE).symlink_to((history.kept[step] / STATE_FILE).absolute())
        info = history.infos[step]
        write_json(target / INFO_FILE, sealed({**info, "facts": {**info["facts"], **facts}}))


def _quiet(config: Config, folder: Path, end: int, evaluates: bool) -> Config:
    """Return `config` for a temporary run that saves at `end`, without views and reports."""
    settings: dict[str, Any] = {
        "run.dir": str(folder),
        "run.local_dir": None,
        "checkpoint.every_steps": end,
        "checkpoint.keep_every": None,
        "eval.reference": None,
        "log.wandb": "off",
        "log.tensorboard": False,
        "log.report": False,
        "log.sample_losses": 0,
    }
    if not evaluates:  # the results would depend on the number of ranks
        settings |= {"eval.every_epochs": None, "eval.every_steps": NEVER}
    return config_io.with_settings(config, settings)
