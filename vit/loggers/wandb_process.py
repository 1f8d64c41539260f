"""The process that shows a run on Weights & Biases: the only one that imports wandb.

`vit.loggers.wandb_logger`, in the training process, starts this file as a script, which therefore
imports nothing of ours, and appends to its feed, one JSON object a line:

    start            what to open: folder, id, project, config; `kept` and `most`, below
    step, numbers    a row: a line of the record
    rewind: k        the rows from the k-th on do not count: the run has gone back
    step, pictures   PNG files; or a table with its columns
    end              finish

**Each line of the record is there once, after kills, too.** The feed begins with the lines of the
record that count, so a row has the same number in each attempt, and W&B's own step (`_step`) is
that number. Online the service says how many rows it has; what it lacks follows. If it has more
than the `kept` ones that this attempt starts from, they are steps that come again: the run is
rewound to the last kept row, as W&B's documentation describes; where that is refused, as it is for
most accounts, rows that come again keep what they had first. Offline a part holds all rows, and the
offline parts before it are removed, unless `wandb sync` has uploaded them: then those rows are left
out. `most` is the largest number of rows that any attempt had.
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
"""For uploading the rest after the last step, as long as the server answers: 7 MB of pictures at 1
Mbit/s."""
PROBE_S = 3.0
"""For one answer of the server while the end of a run is uploaded; `PROBE_EVERY_S` between two."""
PROBE_EVERY_S = 2.0
POLL_S = 0.1
"""Between two checks of a file that another process appends to."""
ROWS_FILE = "rows"
"""In the folder of a part: how many rows of the run W&B has with it; empty until it is finished."""


class Messages:
    """Messages that another process appends to a file, one JSON object a line."""

    def __init__(self, handle: int):
        self._handle = handle
        self._position = 0
        self._incomplete = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that are new, without waiting for any."""
        # pread: the position of the handle itself belongs to the process that writes
        while part := os.pread(self._handle, 65536, self._position):
            self._position += len(part)
            *lines, self._incomplete = (self._incomplete + part).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # cut short by a full disk
                    yield json.loads(line)


def temporary_folder(wandb_dir: Path, pid: int) -> Path:
    """Return where the process `pid` has its temporary files."""
    return wandb_dir / f"tmp-{pid}"


# --- the feed -------------------------------------------------------------------------------------


def _follow(feed: int, parent: int) -> Iterator[dict[str, Any]]:
    """Yield what training sends, up to its `end`, which is added if training was killed."""
    messages = Messages(feed)
    while True:
        is_gone = os.getppid() != parent  # before the last look, so that no message is missed
        yield from messages.read()
        if is_gone:
            yield {"end": {"failed": True}}
        time.sleep(POLL_S)


class _SoFar(NamedTuple):
    """What the feed holds at an opening: messages, those of them that are rows and count, how many
    rows the attempt started from, and the most that W&B can have: those of the feed that nobody has
    shown yet are not among them."""

    num_messages: int
    rows: frozenset[int]
    kept: int
    most: int


def _look_through(feed: int, start: dict[str, Any]) -> _SoFar:
    rows: list[int] = []
    kept = start["kept"]
    number = -1
    for number, message in enumerate(Messages(feed).read()):
        if "numbers" in message:
            rows.append(number)
        elif "rewind" in message:
            kept = message["rewind"]
            del rows[kept:]
    return _SoFar(number + 1, frozenset(rows), kept, start["most"])


# --- one opened run -------------------------------------------------------------------------------


class _Opened(NamedTuple):
    """run: W&B's. there: the rows that it has already. offset: between a row's number and `_step`,
    where pictures have taken steps. why_offline: empty if it is online."""

    run: Any
    there: int
    offset: int
    why_offline: str


def _show(feed: int, parent: int, why_offline: str, report: Callable[..., None]) -> None:
    """Open the run, show what comes, finish; open it anew if training goes back."""
    start = next(_follow(feed, parent)).get("start")
    if start is None:  # training was killed in the same moment
        return
    # W&B makes folders for temporary files when it is imported, which would stay: this process does
    # not end as Python does (`_leave`).
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
    """Show the feed from its first line; return None at its end, at a rewind how many rows the run
    has got."""
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
            if row >= opened.there:
                values = {"global_step": message["step"], **message["numbers"]}
                run.log(values, step=row + opened.offset, commit=True)
            row += 1
        else:
            _log(wandb, run, message, report)
    server_url = "" if opened.why_offline else run.settings.base_url
    threading.Thread(target=_limit_upload, args=(server_url, report), daemon=True).start()
    run.finish(exit_code=int(failed))
    wandb.teardown()  # waits for the service, which has written everything when it ends
    _remove_parts(run)
    _part(run).joinpath(ROWS_FILE).write_text(str(row))
    return None


def _open_run(
    wandb: Any, start: dict[str, Any], so_far: _SoFar, why_offline: str, report: Callable[..., None]
) -> _Opened:
    """Open the run, online unless asked otherwise."""
    folder = Path(start["run_dir"])
    id_file = folder / "wandb_id"
    if not id_file.exists() or not id_file.read_text().strip():
        id_file.write_text(uuid.uuid4().hex[:8])
    run_id = id_file.read_text().strip()
    sys.argv = start["argv"]  # W&B records the command line of a run

    def init(**how: str) -> Any:
        return wandb.init(
            project=start["project"],
            name=folder.resolve().name,
            id=run_id,
            dir=str(folder),
            config=start["config"],
            settings=wandb.Settings(  # new ones each time: W&B writes into them
                silent=True,
                console="off",
                init_timeout=start["init_s"],
                program=sys.argv[0],
                x_stats_pid=os.getppid(),  # memory and CPU time of the training, not ours
            ),
            **how,
        )

    run = None
    there = 0
    if start["mode"] == "offline":
        why_offline = why_offline or "as asked"
    if not why_offline:
        report(awaits="run")
        try:
            run = init(mode="online", resume="allow")
            there = run.starting_step
        except wandb.errors.UsageError as error:
            why_offline = str(error).partition(".")[0]
    if run is not None and there > so_far.kept > 0:
        run, there = _rewind(wandb, run, init, f"{run_id}?_step={so_far.kept - 1}", report)
    if run is None:
        report(awaits="offline run")
        run = init(mode="offline")
        there = _rows_uploaded(folder / "wandb", run_id)
    _part(run).joinpath(ROWS_FILE).write_text("")
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    known = min(there, so_far.most)
    return _Opened(run, known, 0 if why_offline else there - known, why_offline)


def _rewind(
    wandb: Any, run: Any, init: Callable[..., Any], moment: str, report: Callable[..., None]
) -> tuple[Any, int]:
    """Have the service forget the rows after `moment`; return the run and how many it has."""
    run.finish()
    report(awaits="run")
    try:
        run = init(mode="online", resume_from=moment)
    except wandb.errors.Error as error:
        reason = _one_line(error)
        report(say=f"steps that come again keep their first values there (no rewind: {reason})")
        wandb.teardown()  # or the id would be in use
        wandb.setup()
        report(awaits="run")
        run = init(mode="online", resume="allow")
    return run, run.starting_step


def _how_to_upload(run: Any) -> str:
    """Return a command that uploads `run` with each row once."""
    folder = _part(run).parent
    for online in folder.glob(f"run-*-{run.id}"):
        rows = online / ROWS_FILE
        if rows.exists() and not rows.read_text():
            # broken off: only the service knows how many rows it has
            return f"python launch/report.py {shlex.quote(str(folder.parent))} --to-wandb"
    return f"wandb sync {shlex.quote(str(folder))}/offline-run-*"


def _part(run: Any) -> Path:
    """Return the folder on this disk of what `run` was given."""
    return Path(run.settings.sync_dir)


def _remove_parts(run: Any) -> None:
    """Remove the offline parts of this run that hold nothing but what W&B has with `run`."""
    own = _part(run)
    for path in own.parent.glob(f"offline-run-*-{run.id}"):
        if path.name != own.name and not any(path.glob("*.synced")):
            shutil.rmtree(path, ignore_errors=True)


def _rows_uploaded(wandb_dir: Path, run_id: str) -> int:
    """Return how many rows the parts on this disk hold that were uploaded."""
    found = 0
    for path in wandb_dir.glob(f"*run-*-{run_id}/{ROWS_FILE}"):
        if path.parent.name.startswith("run-") or any(path.parent.glob("*.synced")):
            found = max(found, int(path.read_text() or 0))
    return found


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
        _show(feed, parent, sys.argv[3], report)
    except BaseException as error:  # whatever W&B raises, SystemExit included
        report(failed=_one_line(error))
        _leave(1)
    _leave(0)


if __name__ == "__main__":
    main()
