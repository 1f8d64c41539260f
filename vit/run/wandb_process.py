"""Weights & Biases at arm's length: a process of its own shows the record there, and training never
waits for it.

The data's story: rank 0 appends what W&B is to show, one JSON object a line, to a nameless file in
the run folder: the feed. A second process, this file run as a script, follows the feed and is the
only one that ever imports wandb. It asks the server for a sign of life, opens the run online or
offline, logs on our own step axis, and writes a line for people to its stdout now and then, which
rank 0 prints.

So a W&B that blocks, prints, crashes or is killed has nothing of the training in its hands. An
online start that fails is repeated offline from the feed's first line, and if training is killed,
the process reads the feed to its end and finishes by itself. Nothing is lost when the server is:
W&B keeps each run on disk, and `wandb sync` uploads it.

    runs/<name>/wandb_id                   one id over all restarts
    runs/<name>/wandb/[offline-]run-*/     W&B's own folders, one for each start
    runs/<name>/wandb/console.log          whatever W&B prints
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import netrc
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import urlsplit

PROBE_S = 3.0
"""For the server's sign of life, name lookup included: a server that needs longer for one small
answer is no help to a run."""
INIT_S = 30.0
"""For opening a run online after that. Training does not wait meanwhile, so this can be generous to
slow lines."""
LATE_INIT_S = 3.0
"""The same once training is over and does wait: the run is opened offline instead."""
FINISH_S = 60.0
"""For uploading the rest after the last step, as long as the server gives signs of life: 7 MB of
pictures at 1 Mbit/s."""
PROBE_EVERY_S = 2.0
"""Between two such signs: an upload whose server goes away is given up this much plus `PROBE_S`
later at the latest."""
OFFLINE_FINISH_S = 10.0
"""For the same on disk, which takes 0.1 s."""
HARD_LIMIT_S = FINISH_S + 30.0
"""After the last step, before the process is killed. Reached by a stopped or starved process only:
it keeps the limits above itself."""
POLL_S = 0.1
"""Between two looks at the feed."""

RETRY_OFFLINE = "retry offline: "
"""First words of the last line of a process that is to be started again; the reason follows."""

Mode = Literal["online", "offline", "off"]


def wanted_mode(setting: str) -> Mode:
    """What `log.wandb` and W&B's own variable WANDB_MODE ask for together; online means offline
    where there is no key or no server."""
    variable = os.environ.get("WANDB_MODE", "")
    if setting == "off" or variable == "disabled":
        return "off"
    return (
        "offline"
        if setting == "offline" or (setting == "auto" and variable in ("offline", "dryrun"))
        else "online"
    )


# --- in the training process ----------------------------------------------------------------------


class Tracking:
    """The training process's end of the feed. No method waits, but `close`, and `hear` for a second
    where the other one ends; none raises.

    `say` prints a line for people. `hear` passes on what the other process has to say and is to be
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
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._retry = ""
        try:
            self._console = run_dir / "wandb" / "console.log"
            self._console.parent.mkdir(exist_ok=True)
            self._console.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(dir=run_dir, prefix=".wandb-feed-")
            self._feed: TextIO = open(handle, "w", encoding="utf-8")  # noqa: SIM115  lives as long as the run
            self._followed = open(name, "rb")  # noqa: SIM115  with a position of its own
            # those who use it have it open: nothing is left behind, however they end
            os.unlink(name)
        except OSError as error:
            say(f"wandb: not used ({error.strerror})")
            return
        self._launch("")
        self.send(
            start={
                "run_dir": str(run_dir),
                "project": project,
                "mode": mode,
                "config": config,
                "argv": argv,
            }
        )

    def _launch(self, why_offline: str) -> None:
        """Start the other process from the feed's first line. A second time with the reason why the
        first one failed."""
        self._retried = bool(why_offline)
        self._followed.seek(0)
        # -P: the folder of this file holds modules with plain names, which are none of W&B's
        # business
        command = [sys.executable, "-P", __file__, str(os.getpid()), why_offline]
        try:
            # in a session of its own: Ctrl-C in the terminal is for the training alone
            with self._console.open("ab") as console:
                self._process = subprocess.Popen(
                    command,
                    stdin=self._followed,
                    stdout=subprocess.PIPE,
                    stderr=console,
                    start_new_session=True,
                )
        except OSError as error:
            self._say(f"wandb: not used ({error.strerror})")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def send(self, **message: Any) -> None:
        """Append `message` to the feed."""
        if self._process is None:
            return
        try:
            self._feed.write(json.dumps(message, default=_plain) + "\n")
            self._feed.flush()
        except (TypeError, ValueError) as error:
            self._say(f"wandb: cannot show {message.get('table', 'this')} ({error})")
        except OSError as error:  # a full disk
            self._stop()
            self._say(
                f"wandb: stopped ({error.strerror}); metrics.jsonl has everything that it could"
                " take"
            )

    def hear(self) -> None:
        """Say what the other process has said since, and start it again if its first try has
        failed."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        ended = False
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._process.stdout.fileno(), 65536):
                self._heard += part
            ended = True
        *lines, self._heard = self._heard.split(b"\n")
        for line in (line.decode(errors="replace") for line in lines):
            if line.startswith(RETRY_OFFLINE):
                self._retry = line.removeprefix(RETRY_OFFLINE)
            else:
                self._say(f"wandb: {line}")
        if ended:
            status = self._stop(patience_s=1)
            why = self._retry
            self._retry = ""
            if status and not why:
                why = f"its process ended with status {status}, see {self._console}"
            if why and not self._retried:
                self._launch(why)
            elif why:
                self._say(f"wandb: stopped ({why}); metrics.jsonl has everything")

    def close(self, failed: bool = False, stopped: bool = False) -> None:
        """Wait until everything is shown, or on disk. The other process keeps the time itself; if
        the run was `stopped` by a signal, whose sender may not wait, that is as short as without a
        server."""
        self.send(end={"failed": failed, "stopped": stopped})
        deadline = time.monotonic() + HARD_LIMIT_S
        try:
            while self._process is not None and time.monotonic() < deadline:
                self.hear()
                time.sleep(POLL_S / 5)
        finally:  # also after Ctrl-C
            if self._process is not None:
                self._stop()
                self._say("wandb: given up; metrics.jsonl has everything")

    def _stop(self, patience_s: float = 0.0) -> int:
        """End the process; returns its exit status. W&B's own service ends when it does."""
        process = self._process
        self._process = None
        assert process is not None
        assert process.stdout is not None
        try:
            status = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        process.stdout.close()
        return status


def _plain(value: Any) -> Any:
    """Numpy's and torch's numbers and arrays as Python's; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# --- in the process of its own --------------------------------------------------------------------


class _Feed:
    """What the training process has sent. `ended` once it has said so, or is gone; `stopped` if a
    signal ended the run."""

    def __init__(self, handle: int, parent: int):
        self._handle = handle
        self._parent = parent
        self._part = b""
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ended = self.stopped = False

    def poll(self) -> None:
        """Take in what is new."""
        gone = os.getppid() != self._parent  # asked before the last look, so that nothing is missed
        while part := os.read(self._handle, 65536):
            *lines, self._part = (self._part + part).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "end" in message:
                    self.ended = True
                    self.stopped = message["end"]["stopped"]
                self.messages.put(message)
        if gone and not self.ended:
            self.ended = True
            self.messages.put({"end": {"failed": True, "stopped": True}})


class _Server:
    """W&B's server as the settings describe it."""

    def __init__(self, base_url: str, key: str):
        self._base_url = base_url.rstrip("/")
        self._key = key

    def problem(self) -> str:
        """Why it cannot be used, in words; empty if it has answered properly, to this key. Takes
        `PROBE_S` at most."""
        host = urlsplit(self._base_url).netloc
        answer = queue.SimpleQueue[str]()
        # In a thread, for the name lookup knows no timeout
        threading.Thread(target=lambda: answer.put(self._ask(host)), daemon=True).start()
        try:
            return answer.get(timeout=PROBE_S)
        except queue.Empty:
            return f"{host} does not answer within {PROBE_S:.0f} s"

    def _ask(self, host: str) -> str:
        authorization = "Basic " + base64.b64encode(f"api:{self._key}".encode()).decode()
        request = urllib.request.Request(  # honours HTTPS_PROXY and its kin
            f"{self._base_url}/graphql",
            json.dumps({"query": "query Viewer { viewer { id } }"}).encode(),
            {
                "Authorization": authorization,
                "Content-Type": "application/json",
                "User-Agent": "vit",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=2 * PROBE_S) as answer:
                viewer = json.loads(answer.read(100_000))["data"]["viewer"]
            return "" if viewer else f"{host} does not know the API key"
        except urllib.error.HTTPError as error:
            return f"{host} " + (
                "does not accept the API key"
                if error.code in (401, 403)
                else f"answers with error {error.code}"
            )
        except urllib.error.URLError as error:
            reason = error.reason
            return (
                f"{host} cannot be reached:"
                f" {(isinstance(reason, OSError) and reason.strerror) or reason}"
            )
        except OSError as error:
            return f"{host} cannot be reached: {error.strerror or error}"
        except (http.client.HTTPException, ValueError, KeyError, TypeError):
            return f"{host} does not answer like a W&B server"


def api_key(base_url: str, from_settings: str | None) -> str:
    """The key W&B will find, empty without one."""
    if key := os.environ.get("WANDB_API_KEY") or from_settings:
        return key
    host = urlsplit(base_url)
    machines = [host.netloc, host.hostname or ""]
    # W&B's own servers know each other's keys
    if host.netloc.endswith((".coreweave.com", ".wandb.ai")):
        machines.append("api.wandb.ai")
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in files:
        try:
            entries = netrc.netrc(os.path.expanduser(file))
        except (OSError, netrc.NetrcParseError):
            continue
        for machine in machines:
            if found := entries.hosts.get(machine):
                return found[2]
    return ""


class _Session:
    """One W&B run, driven by a thread that may hang as long as it likes: `_follow` keeps the
    time."""

    def __init__(
        self, start: dict[str, Any], why_offline: str, feed: _Feed, tell: Callable[[str], None]
    ):
        self._start = start
        self._feed = feed
        self._tell = tell
        self.folder = Path(start["run_dir"])
        self.why_offline = why_offline
        self.server = _Server("", "")
        self.opening_since = float("inf")
        self.run: Any = None
        self.told_late = False
        self.problem = ""

    def drive(self) -> None:
        """Open the run, show what comes, finish."""
        try:
            import wandb
        except ImportError:
            self._tell(
                "not installed: metrics.jsonl only (pip install wandb, or log.wandb=off to silence"
                " this)"
            )
            return
        try:
            self._open(wandb)
            self._tell_where()
            self._show_all(wandb)
            wandb.teardown()  # its service has written everything when it ends
        except BaseException as error:  # whatever W&B raises, SystemExit included
            self.problem = _in_words(error)

    def _open(self, wandb: Any) -> None:
        if not self.why_offline:
            settings = wandb.setup().settings
            self.server = _Server(
                settings.base_url, key := api_key(settings.base_url, settings.api_key)
            )
            self.why_offline = self.server.problem() if key else "no API key"
        id_file = self.folder / "wandb_id"
        if not id_file.exists() or not id_file.read_text().strip():
            id_file.write_text(uuid.uuid4().hex[:8])
        self.opening_since = time.monotonic()
        argv = self._start["argv"]
        sys.argv = argv  # W&B notes the command line of a run
        run = wandb.init(
            project=self._start["project"],
            name=self.folder.resolve().name,
            id=id_file.read_text().strip(),
            mode="offline" if self.why_offline else "online",
            resume=None if self.why_offline else "allow",
            dir=str(self.folder),
            config=self._start["config"],
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_S,
                program=argv[0],
                # memory and CPU time of the training, not of this process
                x_stats_pid=os.getppid(),
            ),
        )
        run.define_metric("global_step")
        # after a restart steps come again: W&B's own steps cannot go back
        run.define_metric("*", step_metric="global_step")
        self.run = run

    def _show_all(self, wandb: Any) -> None:
        while "end" not in (message := self._feed.messages.get()):
            step = {"global_step": message["step"]}
            if "numbers" in message:
                self.run.log({**step, **message["numbers"]})
            makers = {
                name: partial(wandb.Image, path)
                for name, path in message.get("pictures", {}).items()
            }
            if "table" in message:
                makers[message["table"]] = partial(
                    wandb.Table, columns=message["columns"], data=message["rows"]
                )
            for name, make in makers.items():
                try:
                    self.run.log({**step, name: make()})
                except Exception as error:
                    # a missing file, rows of unequal length, a server without room for tables
                    self._tell(f"cannot show {name} ({_in_words(error)})")
        self.run.finish(exit_code=int(message["end"]["failed"]))

    def _tell_where(self) -> None:
        left = any(
            not path.with_suffix(".wandb.synced").exists()
            for path in self.folder.glob("wandb/offline-run-*/*.wandb")
        )
        if self.why_offline:
            self.told_late = self._feed.ended
            self._tell(
                f"offline ({self.why_offline}); upload {'' if self.told_late else 'later '}with:"
                f" {self.sync_command}"
            )
        else:
            self._tell(
                self.run.url
                + (f" (earlier parts are still here: {self.sync_command})" if left else "")
            )

    @property
    def sync_command(self) -> str:
        """Uploads all offline parts of this run, one for each start; `wandb sync` takes them in
        their order and leaves out what it has."""
        return f"wandb sync {shlex.quote(str(self.folder / 'wandb'))}/offline-run-*"


def _in_words(error: BaseException) -> str:
    """In one line."""
    return (
        f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if str(error)
        else type(error).__name__
    )


def _follow(parent: int, why_offline: str, handle: int, tell: Callable[[str], None]) -> str:
    """Show the feed of process `parent`; returns the line to end with."""
    feed = _Feed(handle, parent)
    feed.poll()
    while feed.messages.empty():
        time.sleep(POLL_S)
        feed.poll()
    start = feed.messages.get().get("start")
    if start is None:  # training was killed in the same moment
        return ""
    session = _Session(
        start, why_offline or ("as asked" if start["mode"] == "offline" else ""), feed, tell
    )
    driver = threading.Thread(target=session.drive, daemon=True)
    driver.start()
    ended_at = float("inf")
    next_probe = float("inf")
    told = False
    while driver.is_alive():
        driver.join(POLL_S)
        feed.poll()
        now = time.monotonic()
        if feed.ended and ended_at == float("inf"):
            ended_at = now
            next_probe = now
        online = not session.why_offline
        waited_s = now - ended_at
        if session.run is None:
            late = online and now > max(ended_at, session.opening_since) + LATE_INIT_S
            if late or now > session.opening_since + INIT_S:
                session.problem = f"no run after {now - session.opening_since:.0f} s"
                break
        elif waited_s > (FINISH_S if online and not feed.stopped else OFFLINE_FINISH_S):
            session.problem = f"not finished after {waited_s:.0f} s"
            break
        elif online and now > next_probe:
            if (problem := session.server.problem()) and driver.is_alive():
                session.problem = problem
                break
            next_probe = time.monotonic() + PROBE_EVERY_S
            if not told and waited_s > PROBE_S:
                told = True
                tell(f"uploading the rest, for {FINISH_S:.0f} s at most")

    if session.problem:
        return RETRY_OFFLINE + session.problem
    # the first time has scrolled away
    tell_again = session.run is not None and session.why_offline and not session.told_late
    return f"offline; upload with: {session.sync_command}" if tell_again else ""


def main() -> None:
    """`tracking.py PARENT WHY_OFFLINE`: stdin is the feed, lines for people go to stdout, all that
    W&B prints to stderr."""
    # Slurm sends them to all processes of a job
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end is when the feed ends
    out = os.fdopen(os.dup(1), "w")
    handle = os.dup(0)
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # nobody may be left to be told
            out.write(line.replace("\n", " ") + "\n")  # in one piece: two threads tell
            out.flush()

    if last := _follow(int(sys.argv[1]), sys.argv[2], handle, tell):
        tell(last)
    os._exit(0)  # threads of W&B may hang


if __name__ == "__main__":
    main()
