"""The record of a run: `metrics.jsonl` is the truth, console and Weights & Biases
(`vit.run.wandb_process`) are views of it.

The data's story: the loop hands numbers that were read from the device one step late; rank 0
appends each as one JSON object a line, and shows it. A restarted run appends, too: a `start` line
tells from which step on later lines replace earlier ones, which `read_metrics` applies. W&B off,
offline, down or hanging changes nothing in the file and never stops the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vit.config import LogConfig
from vit.run.folder import METRICS_FILE, RunLock
from vit.run.wandb_process import WandbProcess, wanted_mode
from vit.system.urls import shown, shown_values

SILENT_S = 60.0
"""After so long without a line a log file gets one: steps may take minutes each."""


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All lines of a `metrics.jsonl` that can be read, and how many cannot. What follows the last
    line break was cut short by a kill."""
    found = list[dict[str, Any]]()
    num_unreadable = 0
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for row in text.split("\n")[:-1]:
        try:
            line = json.loads(row)
            found.append({**line, "kind": str(line["kind"]), "step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            num_unreadable += 1
    return found, num_unreadable


def without_redone(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`lines` of a record without those that a later restart from an earlier checkpoint has
    replaced."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if line["kind"] == "start":
            kept = [old for old in kept if old["kind"] == "start" or old["step"] <= line["step"]]
        kept.append(line)
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a `metrics.jsonl` that count: `without_redone`."""
    return without_redone(read_lines(path)[0])


class Record:
    """Rank 0 writes and shows; on other ranks every call does nothing.

    `total_steps` and `first_step` serve the progress line. Lines go to stderr, so that a command's
    stdout stays its own. `lock` is that of the run folder; the record acquires it, if it is
    not held yet, and releases it at its end.
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
        self._wandb: WandbProcess | None = None
        self._step = first_step
        self._restarts = 0
        self._failed = False
        self._stopped = False
        if not is_main:
            return
        self._run_dir = run_dir
        self._config = config
        self._said_at = time.monotonic()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._lock = lock or RunLock(run_dir)
        self._lock.acquire()
        self._file = _open_whole_lines(run_dir / METRICS_FILE)
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(
                BarColumn(24),
                TextColumn("{task.description}"),
                console=self._console,
                auto_refresh=True,
                transient=True,
            )
            self._task = self._live.add_task(
                "first step ...", total=total_steps, completed=first_step
            )
            self._live.start()

    @property
    def is_live(self) -> bool:
        """Whether there is a live line, which is so on the main rank's terminal."""
        return self.is_main and self._live is not None

    def say(self, text: str) -> None:
        """One line for people."""
        if self.is_main:
            self._console.print(text, markup=False)
            self._said_at = time.monotonic()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line. `kind`: start, train, eval, epoch, checkpoint, fault or end. Non-finite
        numbers become null."""
        if not self.is_main:
            return
        values = {
            k: None if isinstance(v, float) and not math.isfinite(v) else shown_values(v)
            for k, v in values.items()
        }
        self._append(
            json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values}) + "\n"
        )
        self._step = step
        self._restarts = values.get("restarts", self._restarts)
        self._failed = self._failed or values.get("outcome") == "error"
        self._stopped = values.get("outcome") == "stopped"
        if self._wandb is not None:
            if kind in ("train", "eval"):
                numbers = {
                    f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)
                }
                self._wandb.send(step=step, numbers={"restarts": self._restarts, **numbers})
            self._wandb.poll_messages()

    def _append(self, line: str) -> None:
        """Nothing follows a line that did not fit the disk: cut short, it stays the last, and the
        next start removes it."""
        if self._file.closed:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # it would try to write the line once more
                self._file.close()
            remedy = "checkpoints are untouched. Free some space and run the same command again"
            raise ValueError(
                f"{self._run_dir / METRICS_FILE}: cannot be written ({error.strerror}); {remedy}"
            ) from None

    def progress(self, step: int, text: str) -> None:
        """Move the live line on a terminal to `step`; in a log file a line after a silent
        minute."""
        if self.is_main and self._live is not None:
            self._live.update(self._task, completed=step, description=text)
        elif self.is_main and time.monotonic() - self._said_at > SILENT_S:
            self.say(text)
        if self._wandb is not None:
            self._wandb.poll_messages()

    def train_line(self, step: int, text: str) -> None:
        """A line of training metrics: replaces the live line on a terminal, is printed in a log
        file."""
        if self.is_main and self._live is None:
            self.say(text)
        self.progress(step, text)

    def start_wandb(self, run_config: dict[str, Any]) -> None:
        """Show this run on W&B from here on, the same one after a restart. What comes of that is
        said when it is known."""
        mode = wanted_mode(self._config.wandb) if self.is_main else "off"
        if mode != "off":
            self._wandb = WandbProcess(
                self._run_dir,
                self._config.wandb_project,
                mode,
                run_config,
                shown_values(sys.argv),
                self.say,
            )

    def log_pictures(self, pictures: dict[str, Path]) -> None:
        """Show PNG files on W&B as `report/<name>`."""
        if self._wandb is not None:
            paths = {f"report/{name}": str(path) for name, path in pictures.items()}
            self._wandb.send(step=self._step, pictures=paths)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Show a table on W&B as `report/<name>`."""
        if self._wandb is not None:
            self._wandb.send(step=self._step, table=f"report/{name}", columns=columns, rows=rows)

    def close(self) -> None:
        """End the live line, the file and the W&B run, which may take a while
        (`vit.run.wandb_process` says how long)."""
        if not self.is_main:
            return
        if self._live is not None:
            self._live.stop()
        self._file.close()
        self._lock.release()  # the next attempt does not wait for W&B
        if self._wandb is not None:
            self._wandb.close(self._failed, self._stopped)
            self._wandb = None


def _open_whole_lines(path: Path) -> Any:
    """`path` for appending, after a last line that a kill cut short was removed."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
    return path.open("a", encoding="utf-8")


def provenance() -> dict[str, str]:
    """The command, the git commit and the versions that made a run."""
    import platform
    import subprocess

    import torch

    here = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        git = ""
    return {
        "command": shown(" ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])),
        "git": git.strip() or "not a git checkout",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": (
            f"{platform.machine()}, {os.cpu_count()} CPUs"
            + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")
        ),
    }
