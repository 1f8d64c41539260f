"""Train under torchrun with an exit status that tells a scheduler whether to run it again.

    python launch/job.py --config configs/vit_b16.yaml data.root=/data/imagenet run.dir=/runs/b16

The arguments are those of launch/train.py. The files of deploy/ start it once on each host;
torchrun's own variables give the number of hosts and where they meet: PET_NNODES, PET_NODE_RANK,
PET_NPROC_PER_NODE (ranks on this host, default 1), PET_MASTER_ADDR, PET_MASTER_PORT. SIGTERM is
passed on: the ranks save and stop.

Exit status: 0 finished; 75 run it again: it was asked to stop, or failed after a newer checkpoint
than it began with; 2 a mistake, which would come back; 1 an accident before a newer checkpoint, of
which a scheduler should allow a few, or one after which the run's store does not say whether there
is a newer one. With `--check`, which trains nothing: 0 without a failure, 75 if it was asked to
stop, else 2, so that it is not repeated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import check_versions  # noqa: F401

from vit.config.command_line import training_parser
from vit.config.io import load_config
from vit.data.storage.http import Refused
from vit.distributed.outcome import OUTCOME_VARIABLE, Outcome, read_outcome
from vit.run_folder import LATEST_FILE
from vit.system.by_name import load
from vit.system.files import ShardError
from vit.system.redact import shown
from vit.system.urls import is_url

FINISHED = 0
ACCIDENT = 1
MISTAKE = 2
AGAIN = 75
"""EX_TEMPFAIL of sysexits.h; the files of deploy/ name it."""
SHUTDOWN_S = 110
"""How long torchrun lets its ranks save after SIGTERM (its own default: 30 s)."""
MEET_S = 3600
"""How long torchrun waits for the other hosts, which may be scheduled one by one (its default: 10
minutes)."""

LEAVE_S = 10.0
"""How long torchrun may take to end after its ranks are done."""
POLL_S = 1.0
PATIENCE_S = 60.0
"""For a store that has the run and does not answer."""


class Torchrun:
    """torchrun in a process of its own, and the signals that this process gets for it.

    As the first process of a container this one gets SIGTERM from Kubernetes, and would not end by
    it without a handler.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_passed_on = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self._pass_on()

    def _pass_on(self) -> None:
        """Send SIGTERM once: a second one would end torchrun before its ranks have saved. Ctrl-C
        comes to torchrun from the terminal."""
        if self._process is not None and self.asked == "SIGTERM" and not self._is_passed_on:
            self._is_passed_on = True
            self._process.terminate()

    def run(self, words: Sequence[str], environment: dict[str, str], told: Path) -> int:
        """Run launch/train.py with the arguments `words`; return torchrun's exit status.

        `told` exists once the ranks of all hosts are done. torchrun then waits for that of other
        hosts, for five minutes if it was ended by SIGTERM there, and not even SIGTERM ends that.
        """
        python = environment.get("PYTHON_EXEC", sys.executable)  # torchrun's name for that of ranks
        line = [python, "-m", "torch.distributed.run", "--max-restarts=0"]
        script = str(Path(__file__).with_name("train.py"))
        self._process = subprocess.Popen([*line, script, *words], env=environment)
        self._pass_on()  # of a signal that came before there was a process
        since: float | None = None
        while True:
            try:
                return self._process.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if since is None and read_outcome(told) not in (None, "mistake"):
                    since = now
                if since is not None and now > since + LEAVE_S:
                    self._process.kill()


def main() -> int:
    """Run one attempt; return its exit status."""
    torchrun = Torchrun()
    words = sys.argv[1:]
    args = read_command_line(words)
    run_dir = load_config(args.config, args.overrides).run.dir
    assert run_dir is not None, "load_config names the run folder"
    before = newest_checkpoint(run_dir)
    with tempfile.TemporaryDirectory(prefix="vit-job-") as folder:
        file = Path(folder) / "outcome"
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
            **os.environ,
            OUTCOME_VARIABLE: str(file),
        }
        if "PET_MASTER_ADDR" in environment:
            environment.setdefault("PET_RDZV_CONF", f"timeout={MEET_S}")
        launcher_status = torchrun.run(words, environment, file)
        outcome = read_outcome(file)
    if args.check:
        status, text = judge_check(launcher_status, torchrun.asked)
    else:
        after = newest_checkpoint(run_dir, may_refuse=True)
        status, text = judge(outcome, torchrun.asked, before, after)
    print(
        f"{shown(run_dir)}: {text} (torchrun: {launcher_status}); exit status {status}", flush=True
    )
    return status


def judge(
    outcome: Outcome | None, asked: str, before: str | None, after: str | None
) -> tuple[int, str]:
    """Return the exit status of an attempt, and why.

    outcome: what its ranks told; asked: the signal that came, or ""; before, after: the newest
    checkpoint at its start and at its end, "", or None where the store did not say.
    """
    checkpoint = "the store does not say which" if after is None else after or "no checkpoint"
    if outcome == "finished":
        return FINISHED, "finished"
    if outcome == "stopped":
        return AGAIN, f"stopped and saved ({checkpoint})"
    if after is None or before is None:
        # To the ranks a store that is away is a mistake, which would never be tried again.
        text = "the store does not say whether there is a newer checkpoint"
        return (AGAIN, f"ended by {asked}; {text}") if asked else (ACCIDENT, f"failed; {text}")
    if after != before:
        return AGAIN, f"failed, but came from {before or 'the start'} to {checkpoint}"
    if outcome == "mistake":
        return MISTAKE, "a mistake, see the first error above"
    if asked:
        return AGAIN, f"ended by {asked} before there was something to save ({checkpoint})"
    return ACCIDENT, f"failed without a newer checkpoint ({checkpoint})"


def judge_check(launcher_status: int, asked: str) -> tuple[int, str]:
    """Return the exit status of a check, and why; `asked` as in `judge`."""
    if launcher_status == 0:
        return FINISHED, "checked, and nothing was started"
    if asked:
        return AGAIN, f"the check was ended by {asked}"
    return MISTAKE, "the check has failed, see its table"


def newest_checkpoint(run_dir: str, may_refuse: bool = False) -> str | None:
    """Name of the newest checkpoint of a run, in a folder or at a URL; "" without one, None if the
    store does not answer. may_refuse: or does not let us look, as when keys have expired."""
    if is_url(run_dir):
        needed_for = f"run.dir={run_dir}"
        store_at = load("vit.extras.remote_runs.place:store_at", needed_for)
        complete_in = load("vit.extras.remote_runs.copying:complete_in", needed_for)
        store = store_at(run_dir, PATIENCE_S)
        try:
            return max(complete_in(store.list_below()), default="")
        except ShardError as error:
            if isinstance(error, Refused) and not may_refuse:
                raise
            print(error, file=sys.stderr)
            return None
    file = Path(run_dir) / LATEST_FILE
    try:
        os.listdir(file.parent)  # over NFS it shows what another host has just written
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def read_command_line(words: Sequence[str] | None = None) -> Namespace:
    """Return the flags, and the settings as `overrides`. Raises ValueError for mistakes."""
    parser = training_parser("python launch/job.py", __doc__)
    parser.add_argument("--check", action="store_true", help="as launch/train.py's")
    parser.add_argument("--check-limit-s", type=float, metavar="S", help="as launch/train.py's")
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except OSError as error:  # such as a full disk for temporary files, which another host may have
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror}", file=sys.stderr)
        sys.exit(ACCIDENT)
