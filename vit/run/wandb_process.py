"""Weights & Biases in a process of its own, which can neither block nor crash training.

Rank 0 appends what W&B is to show to a nameless file in the run folder, the feed: one JSON object a
line. A second process, this file run as a script, follows the feed and is the only one that imports
wandb. It opens the run, online or else offline, logs on our own step axis, and reports to rank 0
through a second nameless file. So neither side ever waits for the other.

If that process fails, for whatever reason, it is started once more, offline, from the feed's first
line: W&B's folder on disk then holds the complete run, and `wandb sync` uploads it. If training is
killed, the process reads the feed to its end and finishes by itself.

    runs/<name>/wandb_id                   one id for all attempts
    runs/<name>/wandb/[offline-]run-*/     W&B's own folders, one for each attempt
    runs/<name>/wandb/console.log          what W&B prints
    runs/<name>/wandb/tmp-*/               its temporary files, as long as its process runs
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

INIT_S = 30.0
"""For opening a run online. Training goes on meanwhile, so slow connections get time."""
PROBE_S = 3.0
"""For one answer of the server while the end of a run is uploaded; `PROBE_EVERY_S` between two."""
PROBE_EVERY_S = 2.0
ANNOUNCE_S = 6.0
"""An upload that takes longer is announced; one whose server is gone has been given up by then."""
FINISH_S = 60.0
"""For uploading the rest after the last step, as long as the server answers: 7 MB of pictures at 1
Mbit/s."""
LIMITS_S = {"start": 30.0, "run": 3.0, "offline run": 30.0, "end": FINISH_S + 30.0}
"""What the process does next -> how long training waits for it, once its last step is done.

A "run" that does not open online is opened offline instead. For an "offline run" there is nothing
else, and only a slow disk or a busy machine delays it.
"""
STOPPED_S = 10.0
"""For the upload if a signal stopped the run: its sender may not wait."""
POLL_S = 0.1
"""Between two checks of a file that another process appends to."""

Mode = Literal["online", "offline", "off"]


def wanted_mode(setting: str) -> Mode:
    """Combine `log.wandb` with W&B's own variable WANDB_MODE.

    Online means offline where there is no key or no server.
    """
    variable = os.environ.get("WANDB_MODE", "")
    if setting == "off" or variable == "disabled":
        return "off"
    if setting == "offline" or (setting == "auto" and variable in ("offline", "dryrun")):
        return "offline"
    return "online"


class _Messages:
    """Messages that another process appends to a file, one JSON object a line."""

    def __init__(self, handle: int):
        self._handle = handle
        self._position = 0
        self._incomplete = b""

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that are new, without waiting for any."""
        found = []
        # pread: the position of the handle itself belongs to the process that writes
        while part := os.pread(self._handle, 65536, self._position):
            self._position += len(part)
            *lines, self._incomplete = (self._incomplete + part).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # cut short by a full disk
                    found.append(json.loads(line))
        return found


# --- in the training process ----------------------------------------------------------------------


class WandbProcess:
    """The training process's side. No method raises, and none but `close` waits.

    `say` prints a line for people; `poll_messages` passes on what W&B has reported and is to be
    called now and then.
    """

    def __init__(
        self,
        run_dir: Path,
        project: str,
        mode: Mode,
        config: dict[str, Any],
        argv: list[str],
        say: Callable[[str], None],
    ):
        self._say = say
        self._console = run_dir / "wandb" / "console.log"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._console.parent.mkdir(exist_ok=True)
            self._console.unlink(missing_ok=True)
            # nameless: nothing is left behind, however the processes end
            self._feed: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115  open as long as the run
                dir=run_dir, buffering=0
            )
        except OSError as error:
            say(f"wandb: not used ({error.strerror})")
            return
        self._launch()
        start = {"run_dir": str(run_dir), "project": project, "mode": mode, "config": config}
        self.send(start={**start, "argv": argv, "init_s": INIT_S})

    def _launch(self, why_offline: str = "") -> None:
        """Start the process at the feed's first line; a second time with the reason why the first
        one failed."""
        self._is_second = bool(why_offline)
        self._await("start")
        self._failure = ""
        feed = self._feed.fileno()
        # -P: this file's folder stays off the path, where its modules would shadow W&B's
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(feed), why_offline]
        try:
            self._reports: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            with self._console.open("ab") as console:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._reports,
                    stderr=console,
                    pass_fds=[feed],
                    start_new_session=True,  # Ctrl-C in the terminal is for the training alone
                )
        except OSError as error:
            self._say(f"wandb: not used ({error.strerror})")
            return
        self._messages = _Messages(self._reports.fileno())

    def _await(self, event: str) -> None:
        self._awaited = event
        self._awaited_since = time.monotonic()

    def send(self, **message: Any) -> None:
        """Append `message` to the feed."""
        if self._process is None:
            return
        try:
            self._feed.write(json.dumps(message, default=_plain).encode() + b"\n")
        except (TypeError, ValueError) as error:  # what JSON cannot hold
            self._say(f"wandb: cannot show {message.get('table', 'this')} ({error})")
        except OSError as error:  # a full disk
            self._kill()
            self._say(
                f"wandb: stopped ({error.strerror}); metrics.jsonl has all that it could take"
            )

    def poll_messages(self) -> None:
        """Print what the process has reported; start it again if its first try has failed."""
        if self._process is None:
            return
        status = self._process.poll()  # before the last look, so that no message is missed
        for message in self._messages.read():
            if "say" in message:
                self._say(f"wandb: {message['say']}")
            elif "awaits" in message:
                self._await(message["awaits"])
            else:
                self._failure = message["failed"]
        if status == 0:
            self._process = None
        elif status is not None:
            self._fail(
                self._failure or f"its process ended with status {status}, see {self._console}"
            )

    def _fail(self, reason: str) -> None:
        self._kill()
        if self._is_second:
            self._say(f"wandb: stopped ({reason}); metrics.jsonl has everything")
        else:
            self._launch(reason)

    def _kill(self) -> None:
        """End the process. W&B's own service ends when it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            folder = _temporary_folder(self._console.parent, self._process.pid)
            shutil.rmtree(folder, ignore_errors=True)
            self._process = None

    def close(self, failed: bool = False, stopped: bool = False) -> None:
        """Wait until everything is uploaded or on disk, for as long as `LIMITS_S` allows.

        `stopped`: a signal ended the run, so the upload gets `STOPPED_S` at most.
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
                    self._say(f"wandb: uploading the rest, for {FINISH_S:.0f} s at most")
                time.sleep(POLL_S / 5)
        finally:
            if self._process is not None:  # Ctrl-C
                self._kill()
                self._say("wandb: given up; metrics.jsonl has everything")


def _temporary_folder(wandb_dir: Path, pid: int) -> Path:
    """Return where the process `pid` has its temporary files."""
    return wandb_dir / f"tmp-{pid}"


def _plain(value: Any) -> Any:
    """Convert numpy's and torch's numbers and arrays to Python's, anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# --- in the process of its own --------------------------------------------------------------------


def _follow(feed: int, parent: int) -> Iterator[dict[str, Any]]:
    """Yield what training sends, up to its `end`, which is added if training was killed."""
    messages = _Messages(feed)
    while True:
        is_gone = os.getppid() != parent  # before the last look, so that no message is missed
        yield from messages.read()
        if is_gone:
            yield {"end": {"failed": True}}
        time.sleep(POLL_S)


def _show(feed: Iterator[dict[str, Any]], why_offline: str, report: Callable[..., None]) -> None:
    """Open the run, show what comes, finish."""
    start = next(feed).get("start")
    if start is None:  # training was killed in the same moment
        return
    # W&B makes folders for temporary files when it is imported, which would stay: this process does
    # not end as Python does (`_leave`).
    temporary = _temporary_folder(Path(start["run_dir"], "wandb"), os.getpid())
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)
    try:
        import wandb
    except ImportError:
        remedy = "pip install wandb, or log.wandb=off to silence this"
        report(say=f"not installed: metrics.jsonl only ({remedy})")
        return
    wandb.setup()  # starts W&B's service
    run, why_offline = _open_run(wandb, start, why_offline, report)
    if why_offline:
        # uploads the offline parts of all attempts in their order, and skips what it has
        folder = shlex.quote(f"{start['run_dir']}/wandb")
        report(say=f"offline ({why_offline}); upload with: wandb sync {folder}/offline-run-*")
    else:
        report(say=run.url)
    report(awaits="end")

    while "end" not in (message := next(feed)):
        _log(wandb, run, message, report)
    server_url = "" if why_offline else run.settings.base_url
    threading.Thread(target=_limit_upload, args=(server_url, report), daemon=True).start()
    run.finish(exit_code=int(message["end"]["failed"]))
    wandb.teardown()  # waits for the service, which has written everything when it ends


def _open_run(
    wandb: Any, start: dict[str, Any], why_offline: str, report: Callable[..., None]
) -> tuple[Any, str]:
    """Open the run, online unless asked otherwise. Returns it, and why it is offline."""
    folder = Path(start["run_dir"])
    id_file = folder / "wandb_id"
    if not id_file.exists() or not id_file.read_text().strip():
        id_file.write_text(uuid.uuid4().hex[:8])
    sys.argv = start["argv"]  # W&B records the command line of a run
    init = partial(
        wandb.init,
        project=start["project"],
        name=folder.resolve().name,
        id=id_file.read_text().strip(),
        dir=str(folder),
        config=start["config"],
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=start["init_s"],
            program=sys.argv[0],
            x_stats_pid=os.getppid(),  # memory and CPU time of the training, not of this process
        ),
    )
    run = None
    if start["mode"] == "offline":
        why_offline = why_offline or "as asked"
    if not why_offline:
        report(awaits="run")
        try:
            run = init(mode="online", resume="allow")
        except wandb.errors.UsageError as error:
            why_offline = str(error).partition(".")[0]
    if run is None:
        report(awaits="offline run")
        run = init(mode="offline")
    run.define_metric("global_step")
    # after a restart steps come again, but W&B's own steps cannot go back
    run.define_metric("*", step_metric="global_step")
    return run, why_offline


def _log(wandb: Any, run: Any, message: dict[str, Any], report: Callable[..., None]) -> None:
    """Show one message: numbers, pictures or a table."""
    step = {"global_step": message["step"]}
    if "numbers" in message:
        run.log({**step, **message["numbers"]})
    makers = {
        name: partial(wandb.Image, path) for name, path in message.get("pictures", {}).items()
    }
    if "table" in message:
        table = partial(wandb.Table, columns=message["columns"], data=message["rows"])
        makers[message["table"]] = table
    for name, make in makers.items():
        try:
            run.log({**step, name: make()})
        except Exception as error:  # a missing file, rows of unequal length, no room for tables
            report(say=f"cannot show {name} ({_one_line(error)})")


def _limit_upload(server_url: str, report: Callable[..., None]) -> None:
    """End this process if the upload takes too long, or if its server (if any) is gone.

    W&B itself repeats requests for hours.
    """
    deadline = time.monotonic() + FINISH_S
    reason = f"not uploaded within {FINISH_S:.0f} s"
    while time.monotonic() < deadline:
        try:
            if server_url:
                urllib.request.urlopen(server_url, timeout=PROBE_S).close()
        except urllib.error.HTTPError:
            pass  # an answer like any other
        except OSError as error:
            reason = f"{server_url} does not answer: {getattr(error, 'reason', error)}"
            break
        time.sleep(PROBE_EVERY_S)
    report(failed=reason)
    _leave(1)


def _leave(status: int) -> NoReturn:
    """End this process at once, also with threads of W&B that hang."""
    if tempfile.tempdir is not None:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()  # what W&B printed: `os._exit` would drop it
    os._exit(status)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].removesuffix(": ")


def main() -> None:
    """`wandb_process.py PARENT FEED WHY_OFFLINE`: reports on stdout, W&B's own output on stderr."""
    # Slurm sends signals to all processes of a job, but the end is when the feed ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(**message: str) -> None:
        with contextlib.suppress(OSError):
            reports.write(json.dumps(message) + "\n")  # in one piece: two threads report
            reports.flush()

    parent, feed = map(int, sys.argv[1:3])
    try:
        _show(_follow(feed, parent), sys.argv[3], report)
    except BaseException as error:  # whatever W&B raises, SystemExit included
        report(failed=_one_line(error))
        _leave(1)
    _leave(0)


if __name__ == "__main__":
    main()
