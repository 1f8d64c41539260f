"""Upload a run to Weights & Biases from its files.

This is useful for a run that was trained offline or without W&B, whose upload was interrupted, or
that was deleted on the server. Rows come from `metrics.jsonl`, the config from `config.yaml` and
the last `start` line, and the id from `wandb_id`, or from a new run if that file is missing. Only
missing rows are uploaded. Without an API key, or with WANDB_MODE=offline, the run is written to
disk, and `wandb sync` can upload it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from vit.loggers.record import OF_PROVENANCE, read_lines, rows_of
from vit.loggers.wandb_logger import WandbProcess, wanted_mode
from vit.run_folder import CONFIG_FILE, METRICS_FILE
from vit.system.redact import shown_values


class ToWandb:
    """Reads metrics.jsonl of `run_dir`, which `show` then uploads.

    Raises ValueError if the upload is impossible, before anything is written.
    """

    def __init__(self, run_dir: Path, is_in_use: bool):
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("--to-wandb: wandb is not installed: pip install wandb")
        self._mode = wanted_mode("auto")
        if self._mode == "off":
            raise ValueError("--to-wandb: WANDB_MODE=disabled turns W&B off: unset it")
        if is_in_use:
            raise ValueError(
                f"--to-wandb: {run_dir} is still training: repeat this command after it has ended"
            )
        self._run_dir = run_dir
        self._lines = read_lines(run_dir / METRICS_FILE)[0]
        self._shown = rows_of(self._lines)
        if not self._shown.rows:
            raise ValueError(f"--to-wandb: {run_dir / METRICS_FILE} has no numbers to show")

    def show(self, pictures: Mapping[str, Path], say: Callable[[str], None]) -> None:
        """Show all lines, and `pictures` (PNG files) by name at the last step.

        Raises ValueError if W&B has not received everything.
        """
        config = _config_of(self._run_dir, self._lines)
        view = WandbProcess(
            self._run_dir,
            project=config.get("log", {}).get("wandb_project", "vit"),
            mode=self._mode,
            config=config,
            argv=shown_values(sys.argv),
            shown=self._shown,
            say=say,
        )
        if pictures:
            paths = {f"report/{name}": str(path) for name, path in pictures.items()}
            view.send(step=self._shown.rows[-1][0], pictures=paths)
        if not view.close(failed=self._lines[-1].get("outcome") == "error"):
            raise ValueError("--to-wandb: W&B has not received everything: see the line above")


def _config_of(run_dir: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the config that training sent to W&B, as far as it is on disk."""
    path = run_dir / CONFIG_FILE
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    starts = [line for line in lines if line["kind"] == "start"] or [{}]
    made_by = {key: starts[-1][key] for key in OF_PROVENANCE if key in starts[-1]}
    return {**(config if isinstance(config, dict) else {}), "provenance": made_by}
