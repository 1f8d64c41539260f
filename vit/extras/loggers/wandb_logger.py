"""Run Weights & Biases in a separate process, which can neither block nor crash training.

The process, `vit/extras/loggers/wandb_process.py`, reads metrics.jsonl, so training only reports
its end.
In online mode, the process runs during training. In offline mode, it runs after training and writes
one folder.

    runs/<name>/wandb_id               one id and project for all attempts
    runs/<name>/wandb/run-*/           W&B's own folder of each attempt online
    runs/<name>/wandb/offline-run-*/   the whole run, for `wandb sync`
    runs/<name>/wandb/state.json       whether W&B has rows of this run
    runs/<name>/wandb/end.json         outcome, pictures and tables of the last attempt
    runs/<name>/wandb/console.log      the output of W&B
"""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vit.config.schema import Config, LogConfig
from vit.extras.loggers import wandb_process
from vit.extras.loggers.wandb_process import (
    END_FILE,
    FINISH_S,
    POLL_S,
    REPORTED,
    children_of,
    remedy,
)
from vit.feature import Parts
from vit.loggers.record import wandb_mode
from vit.system.files import replacing

OPEN_S = 10.0
"""The maximum time to wait, after training, for an online run to open."""
STOPPED_S = {"online": 10.0, "offline": 30.0}
"""The maximum time for an upload after a signal. A scheduler may not wait longer (Slurm: 30 s)."""
ANNOUNCE_S = 6.0
"""The time in seconds after which an upload that is still running is announced."""
SCRIPT = wandb_process.__file__


def parts(config: Config) -> Parts:
    """Return the parts of a run that W&B displays."""
    return Parts(create_loggers=(WandbProcess,))


class WandbProcess:
    """The W&B process, as used by training. See `Logger`.

    A resumed run continues the same W&B run. Training does not wait for W&B; a later line reports
    whether it works.
    """

    def __init__(self, run_dir: Path, config: LogConfig, log_line: Callable[[str], None]):
        mode = wandb_mode(config.wandb)
        self._run_dir = run_dir
        self._folder = run_dir / "wandb"
        self._mode = mode
        self._print = log_line
        self._process: subprocess.Popen[bytes] | None = None
        self._opened_at = time.monotonic() if mode == "offline" else None
        self.is_complete = False
        self._end: dict[str, Any] = {"pictures": {}, "tables": {}}
        if mode == "online":
            with self._reporting_os_errors():
                (self._folder / END_FILE).unlink(missing_ok=True)
                self._launch()

    def _log(self, text: str) -> None:
        self._print(f"wandb: {text}")

    @contextmanager
    def _reporting_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk
            self._stop(str(error.strerror))

    def _launch(self) -> None:
        """Start the W&B process, whose stdout is read without waiting. Without W&B, log why not."""
        if importlib.util.find_spec("wandb") is None:
            self._log("not installed: metrics.jsonl only (pip install wandb, or log.wandb=off)")
            return

        # -P keeps the script's folder off the path, where its modules would shadow W&B's.
        command = [sys.executable, "-P", SCRIPT, str(self._run_dir), self._mode, str(os.getpid())]
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=console,
                # W&B's telemetry exporters would delay the end of the process.
                env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
                start_new_session=True,  # so that Ctrl-C in the terminal only reaches training
            )

        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    def _stop(self, reason: str) -> None:
        """Kill the process and W&B's service, because the service may hang."""
        if self._process is not None:
            services = children_of(self._process.pid) if self._process.poll() is None else []
            self._process.kill()
            for service in services:
                with suppress(ProcessLookupError):
                    os.kill(service, signal.SIGKILL)
            self._process.wait()
            self._process = None
            for folder in self._folder.glob("tmp-*"):
                shutil.rmtree(folder, ignore_errors=True)
        self._log(f"stopped ({reason}); {remedy(self._run_dir, self._mode)}")

    def poll(self) -> None:
        """Print the lines of the W&B process."""
        if self._process is None:
            return
        status = self._process.poll()  # before reading, so that no line is missed
        for line in (self._output.read() or b"").decode().splitlines():
            if not line.startswith("stopped ("):
                self._opened_at = self._opened_at or time.monotonic()
            self._log(line)

        if status in (0, REPORTED):
            self._process = None
            self.is_complete = status == 0
        elif status is not None:
            self._stop(f"its process ended with status {status}: see wandb/console.log")

    def send(self, step: int, time_s: float, numbers: dict[str, float]) -> None:
        """Do nothing, because the process reads metrics.jsonl itself."""

    def send_pictures(self, step: int, pictures: dict[str, Path]) -> None:
        """Show PNG files, keyed by name, when the run ends."""
        self._end["pictures"] |= {name: str(path) for name, path in pictures.items()}

    def send_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Show a table when the run ends."""
        self._end["tables"][name] = {"columns": columns, "data": rows}

    def close(self, outcome: str, open_s: float = OPEN_S) -> None:
        """Wait until everything is uploaded or on disk. `is_complete` tells whether this succeeded.

        outcome: see `Logger`. After a signal (`stopped`), the upload takes at most `STOPPED_S`.
        open_s: the maximum time to wait for the run to open. The time for the upload starts after
        that.
        """
        end = json.dumps({**self._end, "failed": outcome == "error"}, default=_plain)
        with self._reporting_os_errors():
            self._folder.mkdir(exist_ok=True)
            with replacing(self._folder / END_FILE) as file:
                file.write(end.encode())
            if self._mode == "offline":
                self._launch()

        try:
            self._wait(open_s, STOPPED_S[self._mode] if outcome == "stopped" else FINISH_S)
        except KeyboardInterrupt:
            self._stop("interrupted")
            raise

    def _wait(self, open_s: float, upload_s: float) -> None:
        """Wait until the process has ended, or stop it once it has exceeded its time."""
        closed_at = time.monotonic()
        announce_at = closed_at + ANNOUNCE_S if self._mode == "online" else math.inf

        while self._process is not None:
            self.poll()  # may find that the process has ended
            now = time.monotonic()
            deadline = closed_at + open_s
            if self._opened_at is not None:
                deadline = max(closed_at, self._opened_at) + upload_s + POLL_S

            if self._process is not None and now > deadline:
                self._stop(f"not ready {now - closed_at:.0f} s after the end of training")
            elif self._opened_at is not None and now > announce_at:
                self._log(f"uploading the rest, for {upload_s:.0f} s at most")
                announce_at = math.inf  # only once

            time.sleep(POLL_S / 5)


def _plain(value: object) -> object:
    """Convert numpy and torch numbers and arrays to Python objects, and anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
