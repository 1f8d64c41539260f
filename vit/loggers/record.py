"""Write a run's metrics and events to `metrics.jsonl`, and display them.

Rank 0 appends one JSON object per line. Console, Weights & Biases and TensorBoard
(`vit.extras.loggers`) only display lines of `metrics.jsonl`. If W&B is off, offline or hangs, the
run continues and writes the same file. A resumed run appends to the file, and
`read_metrics` drops the lines that a resumed run has replaced. `StartTimes` measures the startup.
"""

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vit.config.schema import LogConfig
from vit.loggers.lines import numbers_of
from vit.loggers.logger import CreateLogger, Logger
from vit.run_folder.lock import RunLock
from vit.run_folder.paths import METRICS_FILE
from vit.system.files import replacing
from vit.system.meter import steady_s
from vit.system.redact import printed, shown, shown_values

SILENT_S = 60.0
"""The maximum time between two progress lines in a log file. A single step may take minutes."""
BAR_WIDTH = 24
"""The length of the progress bar in characters."""


def wandb_mode(setting: str) -> str:
    """Combine `log.wandb` with W&B's own variable WANDB_MODE: online, offline or off."""
    variable = os.environ.get("WANDB_MODE", "")
    if setting == "off" or variable == "disabled":
        return "off"
    if setting == "auto" and variable in ("offline", "dryrun"):
        return "offline"
    return "offline" if setting == "offline" else "online"


class Record:
    """Writes and displays metrics.jsonl on rank 0. On other ranks, calls do nothing.

    Lines are printed on stderr, because stdout is for the result of a command.

    Args:
        total_steps: The number of steps to show in the progress line.
        first_step: The step from which the progress line starts to count.
        lock: The lock of the run folder, which is acquired if it is not held yet, and released by
            `close`.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        is_main: bool,
        *,
        total_steps: int,
        first_step: int = 0,
        lock: RunLock | None = None,
    ):
        self.is_main = is_main
        self.lock = lock or RunLock(run_dir)
        self._run_dir = run_dir
        self._config = config
        self._loggers: list[Logger] = []
        self._step = first_step
        self._outcome = ""

        self._began_s = time.time()
        self._began_at = steady_s()
        self._printed_at = time.monotonic()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._file: TextIO = StringIO()
        """The open metrics.jsonl. On other ranks than 0, nothing is written to this buffer."""
        if is_main:
            self._start(total_steps)

    def _start(self, total_steps: int) -> None:
        """Acquire the lock, open metrics.jsonl, and in a terminal start the live line."""
        self.lock.acquire()
        self._file = _open_to_append(self._run_dir / METRICS_FILE)
        if self._console.is_terminal:
            self._live = Progress(
                BarColumn(BAR_WIDTH),
                TextColumn("{task.description}"),
                console=self._console,
                auto_refresh=True,
                transient=True,
            )
            self._live.add_task("first step ...", total=total_steps, completed=self._step)
            self._live.start()

    @property
    def is_live(self) -> bool:
        """Whether a live line is shown: only on rank 0 in a terminal."""
        return self._live is not None

    def log(self, text: str) -> None:
        """Print one line."""
        if self.is_main:
            self._console.print(printed(text), markup=False)
            self._printed_at = time.monotonic()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line. Raises ValueError if it cannot be written.

        kind: start, reference, ready, train, norms, eval, epoch, checkpoint, fault or end.
        """
        if not self.is_main:
            return
        for key, value in values.items():
            values[key] = shown_values(_finite(value))

        # With a steady clock, differences remain correct if the system clock is changed.
        time_s = self._began_s + steady_s() - self._began_at
        line = {"kind": kind, "step": step, "time": round(time_s, 3), **values}
        self._append(json.dumps(line) + "\n")
        self._step = step
        self._outcome = values.get("outcome", self._outcome)

        numbers = numbers_of(line)
        for logger in self._loggers:
            logger.send(step, line["time"], numbers)
        self._poll()

    def _append(self, line: str) -> None:
        """Write a whole line, or close the file and raise ValueError."""
        if self._file.closed:
            return
        try:
            self._restore_if_gone()
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            # A full disk may have cut off the line. The next start removes such a line, so
            # nothing may follow it. Closing the file may retry the write and fail again.
            with suppress(OSError):
                self._file.close()
            raise ValueError(
                f"{self._run_dir / METRICS_FILE}: cannot be written ({error.strerror});"
                " checkpoints are unchanged. Free some space and run the same command again"
            ) from None

    def _restore_if_gone(self) -> None:
        """Write all lines to a new file if the file was removed or replaced.

        The open file still contains the lines. Raises OSError.
        """
        path = self._run_dir / METRICS_FILE
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                return
        if not self.lock.is_in_place():
            return  # the folder is gone or belongs to another run, so the next save raises an error

        self._file.seek(0)
        with replacing(path) as file:
            file.write(self._file.read().encode())
        self._file.close()
        self._file = _open_to_append(path)
        self.log(f"{path}: was removed or replaced during the run and has been restored")

    def flush(self) -> None:
        """Flush all lines to disk on rank 0. May be called from any thread.

        Otherwise, a power failure could lose lines about steps before the checkpoint, and these
        steps are never repeated. Raises OSError.
        """
        with suppress(ValueError):  # the file was closed after an error that was already reported
            os.fsync(self._file.fileno())

    def progress(self, step: int, text: str) -> None:
        """Update the live line. Without a terminal, print a line after a minute without output."""
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=step, description=text)
        elif self.is_main and time.monotonic() - self._printed_at > SILENT_S:
            self.log(text)
        self._poll()

    def _poll(self) -> None:
        for logger in self._loggers:
            logger.poll()

    def train_line(self, step: int, text: str) -> None:
        """Show a line of training metrics on the live line, or print it without a terminal."""
        if self.is_main and self._live is None:
            self.log(text)
        self.progress(step, text)

    def start_loggers(self, create_loggers: Sequence[CreateLogger]) -> None:
        """Start displaying this run, beginning with all existing lines."""
        if self.is_main:
            self._loggers = [
                create(self._run_dir, self._config, self.log) for create in create_loggers
            ]

    def log_pictures(self, pictures: dict[str, Path]) -> None:
        """Show PNG files in all displays under `report/<name>`."""
        named = {f"report/{name}": path for name, path in pictures.items()}
        for logger in self._loggers:
            logger.send_pictures(self._step, named)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Show a table in all displays under `report/<name>`."""
        for logger in self._loggers:
            logger.send_table(f"report/{name}", columns, rows)

    def close(self) -> None:
        """Close the live line, metrics.jsonl and all displays. Closing a display may take as long
        as its time limit."""
        if not self.is_main:
            return

        if self._live is not None:
            self._live.stop()
        self._file.close()
        self.lock.release()  # so that the next attempt does not wait for the displays
        for logger in self._loggers:
            logger.close(self._outcome)
        self._loggers = []


def _finite(value: object) -> object:
    """Return `value` with None instead of non-finite numbers, even inside a dict or a list.

    JSON has no infinity, so readers in other languages would reject the line.
    """
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else None


def _open_to_append(path: Path) -> TextIO:
    """Open `path`, and remove a last line that was cut off by a kill."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a+", encoding="utf-8")


def provenance() -> dict[str, str]:
    """Return the command, git commit, hash of the code, versions and host of a run."""
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        git = ""

    host = f"{platform.machine()}, {os.cpu_count()} CPUs"
    if torch.cuda.is_available():
        host += f", {torch.cuda.get_device_name()}"

    return {
        # Secrets are masked before quotes are added, because quotes could hide the end of a secret.
        "command": shlex.join(map(shown, [os.path.relpath(sys.argv[0]), *sys.argv[1:]])),
        "git": git.strip() or "not a git checkout",
        "code": code_sha256(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": host,
    }


def code_sha256(skipped: tuple[str, ...] = ("extras", "launch")) -> str:
    """Return a short hash of the Python files in `vit`, without the folders in `skipped`.

    By default, the hash covers the files that compute a step.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in skipped:
            digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())

    return digest.hexdigest()[:12]


class StartTimes:
    """Times the phases of a startup on this rank. A phase begins when the previous phase ends."""

    def __init__(self, joined_s: float):
        """joined_s: the time until all ranks had connected."""
        self.parts_s = {"ranks": joined_s}
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        """End the phase `name`. Phases with the same name are added up."""
        now = time.perf_counter()
        self.parts_s[name] = self.parts_s.get(name, 0.0) + now - self._began
        self._began = now

    def report(self, record: Record, step: int) -> None:
        """Print the times of all phases in one line, and write them to metrics.jsonl."""
        parts = ", ".join(f"{name} {took_s:.1f}" for name, took_s in self.parts_s.items())
        total_s = sum(self.parts_s.values())
        record.log(f"ready in {total_s:.1f} s: {parts}")
        record.write(
            "ready",
            step,
            total_s=round(total_s, 3),
            parts_s={name: round(took_s, 3) for name, took_s in self.parts_s.items()},
        )
