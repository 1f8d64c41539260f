"""Read what a run folder records about its run: lines, attempts, checkpoints and their hashes.

The sha256 of a checkpoint's tensors is in its `checkpoint.json` and in the record, so that an audit
notices a change of either file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from vit.checkpoint.checkpoint import STATE_FILE
from vit.config import io as config_io
from vit.config.schema import Config
from vit.loggers.lines import read_lines, without_redone
from vit.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    CheckpointError,
    complete_checkpoints,
    read_info_file,
)


class Stretch(NamedTuple):
    """The steps from a kept checkpoint, or from the initial weights, to the next saved one."""

    start: int
    """The number of steps before the stretch."""
    end: int
    """The number of steps after the stretch."""

    def __str__(self) -> str:
        return f"steps {self.start + 1} to {self.end}"


class History:
    """The record of a run, its attempts and its kept checkpoints.

    `starts` are the `start` lines of all attempts, and `lines` all valid lines. `hashes` maps the
    step of each saved checkpoint to the sha256 of its tensors in the record. `kept` and `infos` map
    the step of each kept checkpoint to its folder and its `checkpoint.json`, in ascending order.
    `damaged` maps the steps of those with an unreadable `checkpoint.json` to the errors.
    """

    def __init__(self, run_dir: Path):
        """Raises ValueError if the folder has no readable record."""
        lines, self.num_unreadable = read_lines(run_dir / METRICS_FILE)
        self.run_dir = run_dir
        self.lines = without_redone(lines)
        self.starts = [line for line in lines if line["kind"] == "start"]
        if not self.starts:
            raise ValueError(
                f"{run_dir}: {METRICS_FILE} is missing or has no line of kind start: pass the"
                " folder of a run (copy a run at a URL to a folder first)"
            )
        saved = [line for line in self.lines if line["kind"] == "checkpoint"]
        self.hashes: dict[int, str] = {line["step"]: line["sha256"] for line in saved}
        self.kept: dict[int, Path] = {}
        self.infos: dict[int, dict[str, Any]] = {}
        self.damaged: dict[int, str] = {}
        for path in reversed(complete_checkpoints(run_dir)):
            step = int(path.name.removeprefix("step_"))
            try:
                self.infos[step] = read_info_file(path)
                self.kept[step] = path
            except CheckpointError as error:
                self.damaged[step] = str(error)

    def stretches(self) -> list[Stretch]:
        """Return all stretches that can be repeated, in ascending order."""
        ends = sorted({*self.hashes, *self.kept} - {0})
        starts = [start for start in sorted({0, *self.kept}) if ends and start < ends[-1]]
        return [Stretch(start, next(end for end in ends if end > start)) for start in starts]

    def attempts(self, stretch: Stretch) -> list[dict[str, Any]]:
        """Return the `start` lines of the attempts that trained the stretch, newest first."""
        lines = []
        until = math.inf  # later attempts have replaced all steps from this one on
        for line in reversed(self.starts):
            if line["step"] < min(stretch.end, until) and until > stretch.start:
                lines.append(line)
            until = min(until, line["step"])
        return lines

    def config(self, stretch: Stretch, overrides: list[str]) -> Config:
        """Return the settings of a stretch, of which `overrides` replace some.

        `config.yaml` belongs to the last attempt. The settings of an earlier attempt are in the
        checkpoints that it saved.
        """
        attempt = self.attempts(stretch)[0]
        later = self.starts[self.starts.index(attempt) + 1 :]
        until = min((line["step"] for line in later), default=0)
        saved = [step for step in self.kept if attempt["step"] < step <= until]
        if not saved:
            return config_io.load_config(self.run_dir / CONFIG_FILE, overrides)
        stored = config_io.from_dict(self.infos[saved[-1]]["config"], str(self.kept[saved[-1]]))
        return config_io.with_settings(stored, config_io.read_overrides(overrides))

    def losses(self) -> dict[int, float | None]:
        """Return the recorded loss of each step, or None if it was not finite.

        The newest checkpoint contains the losses of the steps since the last line of metrics.
        """
        newest = self.infos[max(self.kept)] if self.kept else {}
        unlogged = [
            loss if math.isfinite(loss) else None for loss in newest.get("interval_losses", [])
        ]
        train_lines = [line for line in self.lines if line["kind"] == "train"]
        losses: dict[int, float | None] = {}
        for line in ({"step": newest.get("step", 0), "losses": unlogged}, *train_lines):
            steps = range(line["step"], 0, -1)
            losses |= zip(steps, reversed(line["losses"]))  # noqa: B905  # ends early
        return losses

    def tensors_sha256(self, step: int) -> str:
        """Return the hash of the tensors in the kept checkpoint at `step`."""
        return str(self.infos[step]["files"][STATE_FILE]["sha256"])
