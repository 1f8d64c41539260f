"""Display a run on Weights & Biases. Only this process imports wandb.

`vit.loggers.wandb_logger`, in the training process, starts this file as a script, so it imports no
modules of this project. The logger appends JSON objects to the feed, one per line:

    start            the run to open: folder, id, project, config; `kept` and `most`, see below
    step, numbers    a row: a line of metrics.jsonl
    rewind: k        the rows from the k-th on are invalid, because the run has rewound
    step, pictures   PNG files; or a table with its columns
    end              the end of the run

**W&B shows each line of metrics.jsonl exactly once, even after kills.** The feed begins with the
valid lines of metrics.jsonl, so a row has the same number in every attempt, and this number is
W&B's `_step`. Online, the service reports how many rows it has, and only missing rows are sent. If
the service has more than the `kept` rows with which this attempt starts, these steps will be
repeated, so the run is rewound to the last kept row, as W&B documents. Most accounts may not
rewind; repeated rows then keep their first values. Offline, a W&B folder contains all rows, and
earlier offline folders are removed. If `wandb sync` has uploaded an earlier folder, its rows are
not written again. `most` is the largest number of rows of any attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

FINISH_S = 60.0
"""The time limit for uploads after the last step while the server answers. It is enough for 7 MB of
pictures at 1 Mbit/s."""
PROBE_S = 3.0
"""The time limit for answers of the server during the final upload."""
PROBE_EVERY_S = 2.0
POLL_S = 0.1
"""The time between checks of a file to which another process appends."""
ROWS_FILE = "rows"
"""The file in W&B's folder with the number of rows in that folder. It is empty until the folder is
complete."""


class Messages:
    """Reads JSON objects that another process appends to a file, one per line."""

    def __init__(self, handle: int):
        self._handle = handle
        self._position = 0
        self._incomplete = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield new messages without waiting."""
        # Use pread, because the file position belongs to the writing process.
        while part := os.pread(self._handle, 65536, self._position):
            self._position += len(part)
            *lines, self._incomplete = (self._incomplete + part).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # cut off by a full disk
                    yield json.loads(line)


def temporary_folder(wandb_dir: Path, pid: int) -> Path:
    """Return the folder for temporary files of the process `pid`."""
    return wandb_dir / f"tmp-{pid}"


# --- the feed -------------------------------------------------------------------------------------


def _follow(feed: int, parent: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of training up to `end`, which is added if training was killed."""
    messages = Messages(feed)
    while True:
        is_gone = os.getppid() != parent  # check before reading, so that no message is missed
        yield from messages.read()
        if is_gone:
            yield {"end": {"failed": True}}
        time.sleep(POLL_S)


class _SoFar(NamedTuple):
    """The content of the feed when a run is opened."""

    num_messages: int
    rows: frozenset[int]
    """The numbers of the messages that are valid rows."""
    start_rows: int
    """The number of rows with which the attempt starts."""
    most: int
    """The largest number of rows that W&B can have, without rows that were not sent yet."""


def _look_through(feed: int, start: dict[str, Any]) -> _SoFar:
    rows: list[int] = []
    start_rows = start["kept"]
    number = -1
    for number, message in enumerate(Messages(feed).read()):
        if "numbers" in message:
            rows.append(number)
        elif "rewind" in message:
            start_rows = message["rewind"]
            del rows[start_rows:]
    return _SoFar(number + 1, frozenset(rows), start_rows, start["most"])


# --- one opened run -------------------------------------------------------------------------------


class _Opened(NamedTuple):
    """An opened W&B run."""

    run: Any
    num_rows: int
    """The number of rows that W&B already has."""
    offset: int
    """The difference between `_step` and a row's number, because pictures also use steps."""
    why_offline: str
    """The reason why the run is offline; empty if it is online."""


def _show(feed: int, parent: int, why_offline: str, report: Callable[..., None]) -> None:
    """Open the run, show all messages, and finish. Open the run again after each rewind."""
    start = next(_follow(feed, parent)).get("start")
    if start is None:  # training was killed at this moment
        return
    # W&B creates temporary folders on import. Python would remove them at exit, but this process
    # ends without the usual exit (`_leave`), so it removes the folder explicitly.
    temporary = temporary_folder(Path(start["run_dir"], "wandb"), os.getpid())
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)
    try:
        import wandb
    except ImportError:
        remedy = "pip install wandb, or log.wandb=off to silence this"
        report(say=f"not installed: metrics.jsonl only ({remedy})")
        return
    wandb.setup()  # starts W&B's service
    for attempt in count():
        so_far = _look_through(feed, start)
        opened = _open_run(wandb, start, so_far, why_offline, report)
        why_offline = opened.why_offline
        if attempt == 0:
            if why_offline:
                report(say=f"offline ({why_offline}); upload with: {_how_to_upload(opened.run)}")
            else:
                report(say=opened.run.url)
        report(awaits="end")
        num_rows = _show_to_end(wandb, opened, so_far, _follow(feed, parent), report)
        if num_rows is None:
            return
        start["most"] = max(start["most"], num_rows)
        opened.run.finish()
        time.sleep(1.1 - time.time() % 1)  # W&B names its folders by the second


def _show_to_end(
    wandb: Any,
    opened: _Opened,
    so_far: _SoFar,
    feed: Iterator[dict[str, Any]],
    report: Callable[..., None],
) -> int | None:
    """Show the feed from its first line. Return None at the end of the feed, or the number of rows
    at a rewind."""
    run = opened.run
    row = 0
    failed = False
    for number, message in enumerate(feed):
        is_old = number < so_far.num_messages
        if number == so_far.num_messages and opened.why_offline:
            _remove_parts(run)
        if "end" in message:
            failed = message["end"]["failed"]
            break
        if "rewind" in message and not is_old:
            return row
        if "numbers" in message:
            if is_old and number not in so_far.rows:
                continue
            if row >= opened.num_rows:
                values = {"global_step": message["step"], **message["numbers"]}
                run.log(values, step=row + opened.offset, commit=True)
            row += 1
        else:
            _log(wandb, run, message, report)
    server_url = "" if opened.why_offline else run.settings.base_url
    threading.Thread(target=_limit_upload, args=(server_url, report), daemon=True).start()
    run.finish(exit_code=int(failed))
    wandb.teardown()  # waits until the service has written everything
    _remove_parts(run)
    _part(run).joinpath(ROWS_FILE).write_text(str(row))
    return None


def _open_run(
    wandb: Any, start: dict[str, Any], so_far: _SoFar, why_offline: str, report: Callable[..., None]
) -> _Opened:
    """Open the run: online, unless the mode is offline or `why_offline` is given."""
    folder = Path(start["run_dir"])
    id_file = folder / "wandb_id"
    if not id_file.exists() or not id_file.read_text().strip():
        id_file.write_text(uuid.uuid4().hex[:8])
    run_id = id_file.read_text().strip()
    sys.argv = start["argv"]  # W&B records the command line of a run

    def init(**options: str) -> Any:
        return wandb.init(
            project=start["project"],
            name=folder.resolve().name,
            id=run_id,
            dir=str(folder),
            config=start["config"],
            settings=wandb.Settings(  # a new object each time, because W&B changes it
                silent=True,
                console="off",
                init_timeout=start["init_s"],
                program=sys.argv[0],
                x_stats_pid=os.getppid(),  # measure the training process, not this one
            ),
            **options,
        )

    run = None
    next_step = 0
    if start["mode"] == "offline":
        why_offline = why_offline or "as configured"
    if not why_offline:
        report(awaits="run")
        try:
            run = init(mode="online", resume="allow")
            next_step = run.starting_step
        except wandb.errors.UsageError as error:
            why_offline = str(error).partition(".")[0]
    if run is not None and next_step > so_far.start_rows > 0:
        moment = f"{run_id}?_step={so_far.start_rows - 1}"
        run, next_step = _rewind(wandb, run, init, moment, report)
    if run is None:
        report(awaits="offline run")
        run = init(mode="offline")
        next_step = _rows_uploaded(folder / "wandb", run_id)
    _part(run).joinpath(ROWS_FILE).write_text("")
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    num_rows = min(next_step, so_far.most)
    return _Opened(run, num_rows, 0 if why_offline else next_step - num_rows, why_offline)


def _rewind(
    wandb: Any, run: Any, init: Callable[..., Any], moment: str, report: Callable[..., None]
) -> tuple[Any, int]:
    """Make the service drop the rows after `moment`. Return the run and its number of rows."""
    run.finish()
    report(awaits="run")
    try:
        run = init(mode="online", resume_from=moment)
    except wandb.errors.Error as error:
        reason = _one_line(error)
        report(say=f"repeated steps keep their first values on W&B (rewind failed: {reason})")
        wandb.teardown()  # otherwise the id would remain in use
        wandb.setup()
        report(awaits="run")
        run = init(mode="online", resume="allow")
    return run, run.starting_step


def _how_to_upload(run: Any) -> str:
    """Return a command that uploads each row of `run` once."""
    folder = _part(run).parent
    for online in folder.glob(f"run-*-{run.id}"):
        rows = online / ROWS_FILE
        if rows.exists() and not rows.read_text():
            # The upload was interrupted, so only the service knows how many rows it has.
            return f"python launch/report.py {shlex.quote(str(folder.parent))} --to-wandb"
    return f"wandb sync {shlex.quote(str(folder))}/offline-run-*"


def _part(run: Any) -> Path:
    """Return the local folder with the data of `run`."""
    return Path(run.settings.sync_dir)


def _remove_parts(run: Any) -> None:
    """Remove the offline folders of this run whose rows W&B also has with `run`."""
    own = _part(run)
    for path in own.parent.glob(f"offline-run-*-{run.id}"):
        if path.name != own.name and not any(path.glob("*.synced")):
            shutil.rmtree(path, ignore_errors=True)


def _rows_uploaded(wandb_dir: Path, run_id: str) -> int:
    """Return the number of rows in uploaded local folders."""
    num_rows = 0
    for path in wandb_dir.glob(f"*run-*-{run_id}/{ROWS_FILE}"):
        if path.parent.name.startswith("run-") or any(path.parent.glob("*.synced")):
            num_rows = max(num_rows, int(path.read_text() or 0))
    return num_rows


def _log(wandb: Any, run: Any, message: dict[str, Any], report: Callable[..., None]) -> None:
    """Show pictures or a table."""
    makers = {
        name: partial(wandb.Image, path) for name, path in message.get("pictures", {}).items()
    }
    if "table" in message:
        table = partial(wandb.Table, columns=message["columns"], data=message["rows"])
        makers[message["table"]] = table
    for name, make in makers.items():
        try:
            run.log({"global_step": message["step"], name: make()})
        except Exception as error:  # a missing file, rows of unequal length, too many tables
            report(say=f"cannot show {name} ({_one_line(error)})")


def _limit_upload(server_url: str, report: Callable[..., None]) -> None:
    """End this process if the upload takes too long or the server does not answer.

    W&B would repeat requests for hours.
    """
    deadline = time.monotonic() + FINISH_S
    reason = f"not uploaded within {FINISH_S:.0f} s"
    while time.monotonic() < deadline:
        try:
            if server_url:
                urllib.request.urlopen(server_url, timeout=PROBE_S).close()
        except urllib.error.HTTPError:
            pass  # the server answers
        except OSError as error:
            reason = f"{server_url} does not answer: {getattr(error, 'reason', error)}"
            break
        time.sleep(PROBE_EVERY_S)
    report(failed=reason)
    _leave(1)


def _leave(status: int) -> NoReturn:
    """End this process immediately, even if threads of W&B hang."""
    if tempfile.tempdir is not None:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()  # `os._exit` would discard W&B's output
    os._exit(status)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].removesuffix(": ")


def main() -> None:
    """Run `wandb_process.py PARENT FEED WHY_OFFLINE`. Reports are written to stdout, and W&B's
    output to stderr."""
    # Slurm sends signals to all processes of a job, but this process must read the feed to its end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(**message: str) -> None:
        with contextlib.suppress(OSError):
            reports.write(json.dumps(message) + "\n")  # a single write, because two threads report
            reports.flush()

    parent, feed = map(int, sys.argv[1:3])
    try:
        _show(feed, parent, sys.argv[3], report)
    except BaseException as error:  # W&B may raise anything, including SystemExit
        report(failed=_one_line(error))
        _leave(1)
    _leave(0)


if __name__ == "__main__":
    main()
