"""Show a run on Weights & Biases, in the only process that imports wandb.

    python vit/extras/loggers/wandb_process.py RUN_DIR MODE PARENT

`vit.extras.loggers.wandb_logger` starts this file as a script. The script follows the record,
`metrics.jsonl`, and reads the run's config from `config.yaml`. Training ends the run by writing
`wandb/end.json`, with the outcome, pictures and tables. If training was killed, the script reads
the record to its end. Lines for the user are printed on stdout.

**W&B shows each line of the record once, even after kills.** A row's W&B step (`_step`) is its
number among the valid lines of the record, plus the number of steps with pictures before it. The
service reports how many steps it has, and only later rows are sent. Steps that training repeats
keep their first values on W&B.

The script makes one attempt. After a failure, `launch/report.py RUN --to-wandb` runs it again.
"""

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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

sys.path.append(str(Path(__file__).parents[3]))  # last, so that no module here shadows W&B's

from vit.loggers.lines import PROVENANCE, Rows, parse_lines

LogLine = Callable[[str], None]

END_FILE = "end.json"
FINISH_S = 60.0
"""The maximum upload time after training ends, enough for 7 MB of pictures at 1 Mbit/s."""
INIT_S = 30.0
"""The maximum time to wait for an online run to open, while training continues."""
PROBE_S = 3.0
"""The maximum time for the server to answer a probe while the end of a run is uploaded."""
MAX_MISSES = 3
"""The upload is abandoned after this many unanswered probes in a row."""
POLL_S = 0.1
_first_failure = threading.Lock()
REPORTED = 3
"""The exit status of this script after it printed why it failed."""
STATE_FILE = "state.json"
"""A file in `wandb/` with the run's id, whether the run was opened online, and `num_other_steps`.
These are W&B steps that contain pictures and tables instead of rows of the record."""


def remedy(run_dir: Path, mode: str) -> str:
    """Return advice for the user after a failed upload."""
    # The environment may set WANDB_MODE=offline, which could cause the same failure again.
    variable = "WANDB_MODE=online " if mode == "offline" else ""
    return (
        f"metrics.jsonl has everything; to upload it: {variable}python launch/report.py"
        f" {shlex.quote(str(run_dir))} --to-wandb"
    )


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process; [] if /proc does not exist."""
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Feed:
    """The record of a training process, and the end file that training writes."""

    def __init__(self, run_dir: Path, parent: int):
        self._end_file = run_dir / "wandb" / END_FILE
        self._parent = parent
        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("rb")
        self._incomplete = b""
        self.rows = Rows()
        self.start: dict[str, Any] = {}
        """The last `start` line."""

    def is_over(self) -> bool:
        """Return whether training has ended or was killed."""
        return self._end_file.exists() or os.getppid() != self._parent

    def read(self) -> None:
        """Read the new lines of the record."""
        text = self._incomplete + self._file.read()
        # Training restores a removed record as a new file with the same bytes.
        with suppress(FileNotFoundError):
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                position = self._file.tell()
                self._file.close()
                self._file = self._path.open("rb")
                self._file.seek(position)
                text += self._file.read()
        *lines, self._incomplete = text.split(b"\n")
        for line in parse_lines([line.decode(errors="replace") for line in lines])[0]:
            self.rows.add(line)
            if line["kind"] == "start":
                self.start = line

    def end(self) -> dict[str, Any]:
        """Return the content of the end file: failed, pictures (PNG files by name), tables."""
        if not self._end_file.exists():
            return {"failed": True, "pictures": {}, "tables": {}}
        end: dict[str, Any] = json.loads(self._end_file.read_text())
        return end


def follow(run_dir: Path, mode: str, parent: int, log_line: LogLine) -> None:
    """Log the run to W&B until training ends. mode: online or offline."""
    import wandb

    feed = Feed(run_dir, parent)
    url = wandb.setup().settings.base_url if mode == "online" else ""
    threading.Thread(
        target=_limit_end, args=(feed, run_dir, mode, url, log_line), daemon=True
    ).start()
    feed.read()

    run, state = _open_run(wandb, run_dir, mode, feed.start)
    num_sent = max(0, min(run.starting_step - state["num_other_steps"], feed.rows.most))
    offset = run.starting_step - num_sent
    if mode == "online":
        log_line(run.url)

    while True:
        is_over = feed.is_over()  # before reading, so that no line is missed
        feed.read()
        for step, numbers in feed.rows.rows[num_sent:]:
            run.log({"global_step": step, **numbers}, step=num_sent + offset, commit=True)
            num_sent += 1
        if is_over:
            break
        time.sleep(POLL_S)

    end = feed.end()
    last_step = feed.rows.rows[-1][0] if feed.rows.rows else 0
    media = _media(wandb, end, log_line)
    if media:
        run.log({"global_step": last_step, **media})
        state["num_other_steps"] += 1

    run.finish(exit_code=int(end["failed"]))
    wandb.teardown()  # waits until W&B's service has written everything
    (run_dir / "wandb" / STATE_FILE).write_text(json.dumps(state))
    if mode == "offline":
        part = Path(run.settings.sync_dir)
        for older in part.parent.glob(f"offline-run-*-{run.id}"):
            if older != part:
                shutil.rmtree(older, ignore_errors=True)
        log_line(f"offline; upload with: wandb sync {shlex.quote(str(part))}")


def _media(wandb: Any, end: dict[str, Any], log_line: LogLine) -> dict[str, Any]:
    """Return the pictures and tables in `end` as W&B's objects, without those that are damaged."""
    makers = {name: partial(wandb.Image, path) for name, path in end["pictures"].items()}
    makers |= {name: partial(wandb.Table, **table) for name, table in end["tables"].items()}

    media = {}
    for name, make in makers.items():
        try:
            media[name] = make()
        except Exception as error:  # a missing file, rows of unequal length
            log_line(f"cannot show {name} ({_one_line(error)})")
    return media


def _open_run(
    wandb: Any, run_dir: Path, mode: str, start: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Open the run on W&B, and return it with the content of `STATE_FILE`."""
    run_id, project = _read_id(run_dir / "wandb_id")
    state_file = run_dir / "wandb" / STATE_FILE
    state = _read_state(state_file, run_id)
    if mode == "offline":
        if state["is_online"] or any(run_dir.glob(f"wandb/offline-run-*-{run_id}/*.synced")):
            raise ValueError("W&B already has rows of this run, which `wandb sync` would duplicate")
        state["num_other_steps"] = 0

    config_file = run_dir / "config.yaml"
    config = yaml.safe_load(config_file.read_text("utf-8")) if config_file.exists() else {}
    provenance = {key: start[key] for key in PROVENANCE if key in start}
    # W&B records this as the run's command.
    sys.argv = shlex.split(start.get("command", "")) or sys.argv

    run = wandb.init(
        project=project,
        name=run_dir.resolve().name,
        id=run_id,
        dir=str(run_dir),
        config={**config, "provenance": provenance},
        mode=mode,
        resume="allow" if mode == "online" else None,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_S,
            program=sys.argv[0],
            x_stats_pid=os.getppid(),  # measure training, not this process
        ),
    )

    if mode == "online":
        state["is_online"] = True
        state["num_other_steps"] *= run.starting_step > 0  # 0: an offline part was not uploaded
        state_file.write_text(json.dumps(state))

    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    return run, state


def _read_id(path: Path) -> list[str]:
    """Return the id and the project of the run, which the first attempt chooses.

    The run stays in its project, because an id belongs to one project.
    """
    if not path.exists() or not path.read_text().strip():
        path.write_text(f"{uuid.uuid4().hex[:8]}\n{os.environ.get('WANDB_PROJECT') or 'vit'}\n")
    return path.read_text().splitlines()


def _read_state(path: Path, run_id: str) -> dict[str, Any]:
    """Return the content of `STATE_FILE`, or that of a new run if the file is of another id."""
    if path.exists():
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored["id"] == run_id:
            return stored
    return {"id": run_id, "is_online": False, "num_other_steps": 0}


def _limit_end(feed: Feed, run_dir: Path, mode: str, server_url: str, log_line: LogLine) -> None:
    """End this process if the upload takes too long after training, or if the server stops
    answering.

    Otherwise W&B would retry requests for hours.
    """
    while not feed.is_over():
        time.sleep(POLL_S)

    # Live training stops an upload earlier, so this limit only applies if training was killed.
    deadline = time.monotonic() + INIT_S + FINISH_S
    reason = f"not uploaded within {INIT_S + FINISH_S:.0f} s"
    num_misses = 0

    while time.monotonic() < deadline:
        try:
            if server_url:
                urllib.request.urlopen(server_url, timeout=PROBE_S).close()
            num_misses = 0
        except urllib.error.HTTPError:
            num_misses = 0  # the server answers
        except OSError as error:
            num_misses += 1
            if num_misses == MAX_MISSES:
                reason = f"{server_url} does not answer: {getattr(error, 'reason', error)}"
                break
        time.sleep(PROBE_S / 2)

    _fail(run_dir, mode, reason, log_line)


def _fail(run_dir: Path, mode: str, reason: str, log_line: LogLine) -> NoReturn:
    # Killing W&B's service makes the other thread fail, too. Only the first failure is printed, and
    # the other thread waits here until the process exits.
    _first_failure.acquire()
    if "No API key" in reason:
        reason = (
            "not logged in to Weights & Biases, a website that shows runs; it is optional: log in"
            " with `wandb login`, or hide this line with log.wandb=off"
        )
    log_line(f"stopped ({reason}); {remedy(run_dir, mode)}")
    _leave(run_dir, REPORTED)


def _leave(run_dir: Path, status: int) -> NoReturn:
    """Exit immediately, even if threads of W&B or its service hang."""
    for pid in children_of(os.getpid()) if status else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for folder in (run_dir / "wandb").glob("tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].removesuffix(": ")


def main() -> None:
    """Run the script with the arguments in `sys.argv`."""
    # Slurm sends signals to all processes of a job. Ignore them, to read the record to its end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # a separate handle, because W&B prints to stdout
    lines = os.fdopen(os.dup(1), "w", errors="backslashreplace")
    os.dup2(2, 1)

    def log_line(line: str) -> None:
        with suppress(OSError):  # training was killed, so nobody reads the lines
            print(line, file=lines, flush=True)

    run_dir = Path(sys.argv[1])
    mode = sys.argv[2]
    try:
        # Put W&B's temporary files into one folder, which `_leave` removes before it exits.
        tempfile.tempdir = tempfile.mkdtemp(prefix="tmp-", dir=run_dir / "wandb")
        follow(run_dir, mode, int(sys.argv[3]), log_line)
    except BaseException as error:  # W&B may raise any exception, including SystemExit
        _fail(run_dir, mode, _one_line(error), log_line)
    _leave(run_dir, 0)


if __name__ == "__main__":
    main()
