"""The record of a run: `metrics.jsonl` is the truth, console and Weights & Biases are views of it.

The data's story: the loop hands numbers that were read from the device one step late; rank 0 appends each as one JSON object a line, and
shows it.
A restarted run appends, too: a `start` line tells from which step on later lines replace earlier ones, which `read_metrics` applies.
W&B off, offline, down or hanging changes nothing in the file and never stops the run.
"""

from __future__ import annotations

import fcntl
import json
import math
import netrc
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vit.config import LogConfig

METRICS_FILE = "metrics.jsonl"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "-:--:--"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without those that a later restart from an earlier checkpoint has replaced."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not text.endswith("\n"):  # cut short by a kill; reopening the record would remove it
            break
        line = json.loads(text)
        if line["kind"] == "start":
            lines = [old for old in lines if old["kind"] == "start" or old["step"] <= line["step"]]
        lines.append(line)
    return lines


class Record:
    """Rank 0 writes and shows; on other ranks every call does nothing.

    `total_steps` and `first_step` serve the progress line. Lines go to stderr, so that a command's stdout stays its own.
    """

    def __init__(self, run_dir: Path, config: LogConfig, is_main: bool, *, total_steps: int, first_step: int = 0):
        self.is_main = is_main
        self._wandb: Any = None
        if not is_main:
            return
        self._run_dir, self._config = run_dir, config
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._lock = _lock(run_dir)
        self._file = _open_whole_lines(run_dir / METRICS_FILE)
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(BarColumn(24), TextColumn("{task.description}"), console=self._console, auto_refresh=True, transient=True)
            self._task = self._live.add_task("first step ...", total=total_steps, completed=first_step)
            self._live.start()

    def say(self, text: str) -> None:
        """One line for people."""
        if self.is_main:
            self._console.print(text, markup=False)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line. `kind`: start, train, eval, epoch, checkpoint, fault or end. Non-finite numbers become null."""
        if not self.is_main:
            return
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()
        if self._wandb is not None and kind in ("train", "eval"):
            numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
            self._log_wandb({"global_step": step, **numbers})

    def progress(self, step: int, text: str) -> None:
        """Move the live line on a terminal to `step`."""
        if self.is_main and self._live is not None:
            self._live.update(self._task, completed=step, description=text)

    def train_line(self, step: int, text: str) -> None:
        """A line of training metrics: replaces the live line on a terminal, is printed in a log file."""
        self.progress(step, text)
        if self.is_main and self._live is None:
            self.say(text)

    def start_wandb(self, run_config: dict[str, Any]) -> None:
        """Open the W&B run of this run directory, the same one after a restart. Says where it goes."""
        if not self.is_main or self._config.wandb == "off" or os.environ.get("WANDB_MODE") == "disabled":
            return
        mode, why = _wandb_mode(self._config.wandb)
        try:
            import wandb
        except ImportError:
            self.say("wandb is not installed: metrics.jsonl only (pip install wandb, or log.wandb=off to silence this)")
            return
        id_file = self._run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        attempts: list[Literal["online", "offline"]] = [mode] if mode == "offline" else [mode, "offline"]
        for attempt in attempts:
            try:
                if attempt != mode:
                    wandb.teardown()  # the failed attempt still holds the run's id
                settings = wandb.Settings(init_timeout=10, silent=True, console="off")
                self._wandb = wandb.init(
                    project=self._config.wandb_project,
                    name=self._run_dir.name,
                    id=id_file.read_text(),
                    mode=attempt,
                    resume="allow" if attempt == "online" else None,
                    dir=str(self._run_dir),
                    config=run_config,
                    settings=settings,
                )
                self._wandb.define_metric("global_step")
                self._wandb.define_metric("*", step_metric="global_step")
                break
            except Exception as error:  # whatever W&B raises, the run goes on
                self._wandb, why = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if self._wandb is None:
            self.say(f"wandb: not used ({why}); metrics.jsonl has everything")
        elif self._wandb.offline:
            self.say(f"wandb: offline ({why}); upload later with: wandb sync {Path(self._wandb.dir).parent}")
        else:
            self.say(f"wandb: {self._wandb.url}")

    def _log_wandb(self, values: dict[str, Any]) -> None:
        try:
            self._wandb.log(values)
        except Exception as error:
            self.say(f"wandb: stopped ({type(error).__name__}); metrics.jsonl goes on")
            self._wandb = None

    def close(self) -> None:
        """End the live line, the W&B run and the file."""
        if not self.is_main:
            return
        if self._live is not None:
            self._live.stop()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:
                self.say(f"wandb: did not finish ({type(error).__name__}); metrics.jsonl is complete")
            self._wandb = None
        self._file.close()
        self._lock.close()


def check_not_in_use(run_dir: Path) -> None:
    """Raise ValueError if a live run has `run_dir`; before anything in it is read or written."""
    if run_dir.is_dir():
        _lock(run_dir).close()


def _lock(run_dir: Path) -> IO[str]:
    """Hold the run folder for this process. Raises ValueError if a live process has it: two writers would ruin record and checkpoints.

    A POSIX record lock: it ends with its process, is not inherited by loader workers, and works over NFS.
    """
    try:
        file = (run_dir / ".lock").open("a+")
    except OSError as error:
        raise ValueError(f"run.dir={run_dir}: cannot be written ({error.strerror}): choose another folder") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(f"{run_dir}: in use by a live run ({holder}): wait for its end, stop it, or use another run.dir") from None
    except OSError as error:  # a file system without locks
        print(f"{run_dir}: cannot be locked here ({error.strerror}): make sure that only one run uses it", file=sys.stderr)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _open_whole_lines(path: Path) -> Any:
    """`path` for appending, after a last line that a kill cut short was removed."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
    return path.open("a", encoding="utf-8")


def _wandb_mode(wanted: str) -> tuple[Literal["online", "offline"], str]:
    """What W&B would take seconds to minutes to find out: no key or no network means offline."""
    wanted = os.environ.get("WANDB_MODE", wanted) if wanted == "auto" else wanted
    if wanted == "offline":
        return "offline", "as asked"
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host = url.hostname or ""
    if not os.environ.get("WANDB_API_KEY") and not _netrc_has(host):
        return "offline", "no API key"
    try:
        socket.create_connection((host, url.port or (443 if url.scheme == "https" else 80)), timeout=2).close()
    except OSError:
        return "offline", f"{host} cannot be reached"
    return "online", "as asked"


def _netrc_has(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def provenance() -> dict[str, str]:
    """The command, the git commit and the versions that made a run."""
    import platform
    import subprocess

    import torch

    here = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False, timeout=10
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        git = ""
    return {
        "command": " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "git": git.strip() or "not a git checkout",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs" + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
    }
