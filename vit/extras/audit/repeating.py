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
from typing import Any, NamedTuple

from vit.build import build
from vit.checkpoint.checkpoint import STATE_FILE, checkpoint_folder
from vit.config import io as config_io
from vit.config.hints import all_keys
from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.extras.audit.history import History, Stretch
from vit.extras.compose import parts_of
from vit.loggers.lines import read_metrics
from vit.run import Hook, Run
from vit.run_folder import INFO_FILE, METRICS_FILE, read_info_file, sealed
from vit.system.files import ShardError, write_json
from vit.train import train
from vit.training.run_data import open_data
from vit.training.step_result import StepValues

NEVER = 2**31 - 1


class _Reached(Exception):
    """An exception that ends a stretch on all ranks."""


class _Listener(Hook):
    """Collects the loss of each step, and ends training after the step `end`."""

    def __init__(self, end: int, on_step: Callable[[], None]):
        self._end = end
        self._on_step = on_step
        self.losses: dict[int, float] = {}

    def begin(self, run: Run) -> None:
        """Drop the losses of steps that a rewind repeats."""
        self.losses = {step: self.losses[step] for step in self.losses if step <= run.state.step}

    def loss_limit(self, step: int) -> None:
        """See `Hook`. All earlier steps have been read, evaluated and saved."""
        if step == self._end:
            raise _Reached

    def read(self, step: int, values: StepValues) -> None:
        """See `Hook`."""
        self.losses[step + 1] = values.loss
        self._on_step()


class Repeated(NamedTuple):
    """A repeated stretch, on rank 0."""

    losses: dict[int, float]
    """The loss of each step, counted from 1."""
    lines: list[dict[str, Any]]
    """The lines of the repeated record."""
    info: dict[str, Any]
    """The `checkpoint.json` of the last step."""
    folder: Path
    """The checkpoint of the last step."""


def repeat(
    history: History,
    stretch: Stretch,
    config: Config,
    world: World,
    folder: Path,
    on_step: Callable[[], None],
) -> Repeated | None:
    """Train a stretch again in the new folder `folder`, and return the result on rank 0.

    All ranks must call this. config: the settings of the stretch. on_step: called after each step.
    Raises ShardError, with the step, for an image that does not match its checksum.
    """
    listener = _Listener(stretch.end, on_step)
    is_like_run = history.attempts(stretch)[0]["world_size"] == world.size
    # The lines of an ordinary run would hide the result of the audit.
    with redirect_stderr(io.StringIO()):
        facts = open_data(config, world).facts
        world.on_main(lambda: _link(history, stretch.start, folder, facts))
        config = _quiet(config, folder, stretch.end, is_like_run)
        parts = parts_of(config)
        parts = replace(parts, hooks=(listener, *parts.hooks))
        run = build(config, world, all_keys(), parts)
        try:
            with suppress(_Reached):
                train(run)
        except ShardError as error:
            raise ShardError(f"step {run.state.step + 1}: {error}") from None
    if not world.is_main:
        return None
    last = checkpoint_folder(folder, stretch.end)
    lines = read_metrics(folder / METRICS_FILE)
    return Repeated(listener.losses, lines, read_info_file(last), last)


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
