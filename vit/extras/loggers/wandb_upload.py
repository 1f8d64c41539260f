"""Upload a run to Weights & Biases from its record.

Use this if a run was trained offline or without W&B, if its upload failed, or if it was deleted on
the server. If the run folder has no `wandb_id`, a new W&B run is created. Only missing rows are
uploaded. With WANDB_MODE=offline, the run is written to disk for `wandb sync`.
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from vit.config.schema import LogConfig
from vit.extras.loggers.wandb_logger import OPEN_S, WandbProcess
from vit.extras.loggers.wandb_process import INIT_S
from vit.loggers.lines import numbers_of, read_metrics
from vit.loggers.record import wandb_mode
from vit.run_folder.paths import METRICS_FILE


class ToWandb:
    """Reads the record of `run_dir`, and uploads it with `show`.

    Raises ValueError if the upload is not possible, before anything is written.
    """

    def __init__(self, run_dir: Path, is_in_use: bool):
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("--to-wandb: wandb is not installed: pip install wandb")
        if wandb_mode("auto") == "off":
            raise ValueError("--to-wandb: WANDB_MODE=disabled switches W&B off: unset it")
        if is_in_use:
            raise ValueError(
                f"--to-wandb: {run_dir} is still training: run this command again when it has ended"
            )
        self._run_dir = run_dir
        self._lines = read_metrics(run_dir / METRICS_FILE)
        if not any(map(numbers_of, self._lines)):
            raise ValueError(f"--to-wandb: {run_dir / METRICS_FILE} contains no values to upload")

    def show(self, pictures: Mapping[str, Path], log_line: Callable[[str], None]) -> None:
        """Upload the record, and `pictures` (name -> PNG file) at its last step.

        Raises ValueError if W&B has not received everything.
        """
        process = WandbProcess(self._run_dir, LogConfig(wandb="auto"), log_line)
        last = self._lines[-1]
        named = {f"report/{name}": path for name, path in pictures.items()}
        process.send_pictures(last["step"], named)
        process.close(last.get("outcome", ""), open_s=INIT_S + OPEN_S)
        if not process.is_complete:
            raise ValueError("--to-wandb: W&B did not receive everything: see the previous line")
