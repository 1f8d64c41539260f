"""Run Weights & Biases in a separate process that can neither block nor crash training.

Rank 0 appends all numbers for W&B to the feed, an unnamed temporary file with one JSON object per
line, beginning with the valid lines of metrics.jsonl. A second process runs
`vit/loggers/wandb_process.py`, reads the feed, and is the only process that imports wandb. It opens
the run, online or else offline, and reports to rank 0 through a second unnamed file. Neither
process ever waits for the other.

If the second process fails, it is restarted offline from the first line of the feed. W&B's local
folder then contains the complete run, which `wandb sync` can upload. If training is killed, the
second process still reads the feed to its end and finishes.

    runs/<name>/wandb_id                   one id for all attempts
    runs/<name>/wandb/[offline-]run-*/     W&B's folders: one per online attempt, one offline
    runs/<name>/wandb/console.log          output of W&B
    runs/<name>/wandb/tmp-*/               temporary files of W&B while its process runs
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from vit.loggers import wandb_process
from vit.loggers.record import Rows
from vit.loggers.wandb_process import FINISH_S, POLL_S, Messages, temporary_folder

INIT_S = 30.0
"""The time limit for opening a run online. It may be long, because training continues."""
ANNOUNCE_S = 6.0
"""The duration after which an upload is announced. If the server does not answer, the upload has
been canceled by then."""
LIMITS_S = {"start": 30.0, "run": 3.0, "offline run": 30.0, "end": FINISH_S + 30.0}
"""The time that `close` waits for each event of the process.

A "run" that does not open online is opened offline instead. An "offline run" has no alternative, so
its limit is long. Only a slow disk or a busy machine delays it.
"""
STOPPED_S = 10.0
"""The time limit for an upload after a signal, because a scheduler may not wait longer."""
SCRIPT = wandb_process.__file__

Mode = Literal["online", "offline", "off"]


def wanted_mode(setting: str) -> Mode:
    """Combine `log.wandb` with W&B's environment variable WANDB_MODE.

    An online run becomes offline if the API key is missing or the server does not answer.
    """
    variable = os.environ.get("WANDB_MODE", "")
    if setting == "off" or variable == "disabled":
        return "off"
    if setting == "offline" or (setting == "auto" and variable in ("offline", "dryrun")):
        return "offline"
    return "online"


class WandbProcess:
    """The interface for the training process. No method raises an error, and only `close` waits.

    `shown`: the rows of existing lines. `say`: prints a line. Call `poll_messages` regularly to
    print the reports of the second process.
    """

    def __init__(
        self,
        run_dir: Path,
        project: str,
        mode: Mode,
        config: dict[str, Any],
        argv: list[str],
        shown: Rows,
        say: Callable[[str], None],
    ):
        self._say = say
        self._console = run_dir / "wandb" / "console.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_complete = False
        try:
            self._console.parent.mkdir(exist_ok=True)
            self._console.unlink(missing_ok=True)
            # The file has no name, so nothing is left behind, no matter how the processes end.
            self._feed: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115  open during the run
                dir=run_dir, buffering=0
            )
        except OSError as error:
            say(f"wandb: not used ({error.strerror})")
            return
        self._launch()
        start = {"run_dir": str(run_dir), "project": project, "mode": mode, "config": config}
        counts = {"kept": len(shown.rows), "most": shown.most}
        self.send(start={**start, **counts, "argv": argv, "init_s": INIT_S})
        for step, numbers in shown.rows:
            self.send(step=step, numbers=numbers)

    def _launch(self, why_offline: str = "") -> None:
        """Start the process, which reads the feed from its first line. why_offline: the reason why
        the first process failed, if this is the second."""
        self._is_second = bool(why_offline)
        self._await("start")
        self._failure = ""
        feed = self._feed.fileno()
        # -P removes the script's folder from the path, because its modules would shadow W&B's.
        command = [sys.executable, "-P", SCRIPT, str(os.getpid()), str(feed), why_offline]
        try:
            self._reports: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            with self._console.open("ab") as console:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._reports,
                    stderr=console,
                    pass_fds=[feed],
                    start_new_session=True,  # Ctrl-C in the terminal only reaches training
                )
        except OSError as error:
            self._say(f"wandb: not used ({error.strerror})")
            return
        self._messages = Messages(self._reports.fileno())

    def _await(self, event: str) -> None:
        self._awaited = event
        self._awaited_since = time.monotonic()

    def send(self, **message: Any) -> None:
        """Append `message` to the feed."""
        if self._process is None:
            return
        try:
            self._feed.write(json.dumps(message, default=_plain).encode() + b"\n")
        except (TypeError, ValueError) as error:  # not representable in JSON
            self._say(f"wandb: cannot show {message.get('table', 'this')} ({error})")
        except OSError as error:  # a full disk
            self._kill()
            self._say(f"wandb: stopped ({error.strerror}); metrics.jsonl has what fits on the disk")

    def poll_messages(self) -> None:
        """Print the reports of the process, and restart it once if it has failed."""
        if self._process is None:
            return
        status = self._process.poll()  # check before reading, so that no message is missed
        for message in self._messages.read():
            if "say" in message:
                self._say(f"wandb: {message['say']}")
            elif "awaits" in message:
                self._await(message["awaits"])
            else:
                self._failure = message["failed"]
        if status == 0:
            self._process = None
            self._is_complete = not self._failure
        elif status is not None:
            self._fail(
                self._failure or f"its process ended with status {status}: see {self._console}"
            )

    def _fail(self, reason: str) -> None:
        self._kill()
        if self._is_second:
            self._say(f"wandb: stopped ({reason}); metrics.jsonl has everything")
        else:
            self._launch(reason)

    def _kill(self) -> None:
        """Kill the process and W&B's service, which may hang."""
        if self._process is not None:
            services = []
            with suppress(OSError):  # /proc exists only on Linux
                pid = self._process.pid
                if self._process.poll() is None:  # otherwise the pid may have been reused
                    services = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self._process.kill()
            for service in services:
                with suppress(ProcessLookupError):
                    os.kill(int(service), signal.SIGKILL)
            self._process.wait()
            folder = temporary_folder(self._console.parent, self._process.pid)
            shutil.rmtree(folder, ignore_errors=True)
            self._process = None

    def close(self, failed: bool = False, stopped: bool = False) -> bool:
        """Wait until everything is uploaded or on disk, up to the limits in `LIMITS_S`.

        `stopped`: whether a signal ended the run, which limits the upload to `STOPPED_S`. Returns
        whether W&B has received everything.
        """
        self.send(end={"failed": failed})
        closed_at = time.monotonic()
        limits_s = {**LIMITS_S, "end": STOPPED_S} if stopped else LIMITS_S
        is_announced = False
        try:
            while self._process is not None:
                self.poll_messages()
                limit_s = limits_s[self._awaited]
                waited_s = time.monotonic() - max(self._awaited_since, closed_at)
                if waited_s > limit_s:
                    self._fail(f"no {self._awaited} after {limit_s:.0f} s")
                elif self._awaited == "end" and waited_s > ANNOUNCE_S and not is_announced:
                    is_announced = True
                    self._say(f"wandb: uploading the remaining data for at most {FINISH_S:.0f} s")
                time.sleep(POLL_S / 5)
        finally:
            if self._process is not None:  # Ctrl-C
                self._kill()
                self._say("wandb: interrupted; metrics.jsonl has everything")
        return self._is_complete


def _plain(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch to Python, and anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
