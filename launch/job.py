"""Train under torchrun, with an exit status that tells a scheduler whether to retry.

    python launch/job.py --config configs/vit_b16.yaml data.root=/data/imagenet run.dir=/runs/b16

This program takes the same arguments as launch/train.py. The files in deploy/ start this program
once per host. torchrun's own environment variables set the number of hosts and the rendezvous:
PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE (ranks per host, default 1), PET_MASTER_ADDR,
PET_MASTER_PORT. SIGTERM is forwarded to torchrun, so that the ranks save and stop.

Exit status: 0 finished. 75 retry: a signal stopped the job, or it failed after saving a newer
checkpoint. 2 a user mistake, which a retry would repeat. 1 another failure without a newer
checkpoint, or an unreachable store; a scheduler should allow a few such failures. `--check` does
not train. It exits with status 0 on success, 75 if a signal stopped it, and 2 otherwise, to prevent
retries.
"""

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
from vit.run_folder.paths import LATEST_FILE
from vit.system.files import ShardError
from vit.system.redact import guard_console, shown
from vit.system.urls import is_url

FINISHED = 0
ACCIDENT = 1
MISTAKE = 2
AGAIN = 75
"""EX_TEMPFAIL in sysexits.h. The files in deploy/ use the same number for a retry."""
SHUTDOWN_S = 110
"""The seconds that torchrun gives its ranks to save after SIGTERM (torchrun's default: 30)."""
MEET_S = 3600
"""The seconds that torchrun waits for other hosts, which may start one by one. torchrun's default
is 600."""

LEAVE_S = 10.0
"""The seconds that torchrun may take to exit after its ranks finish."""
POLL_S = 1.0
PATIENCE_S = 60.0
"""The seconds for which requests to an unreachable run store are retried."""


class Torchrun:
    """A torchrun child process that receives this process's signals.

    Kubernetes sends SIGTERM to a container's first process. Linux does not deliver SIGTERM to that
    process unless it has a handler, so this process installs one.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_forwarded = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._forward()

    def _forward(self) -> None:
        """Forward SIGTERM once, because a second SIGTERM would end torchrun before its ranks save.

        Ctrl-C and SIGHUP are not forwarded, because the terminal sends them to torchrun directly.
        """
        if self.signal_name != "SIGTERM" or self._is_forwarded:
            return
        if self._process is not None:
            self._is_forwarded = True
            self._process.terminate()

    def run(self, arguments: Sequence[str], environment: dict[str, str], outcome_file: Path) -> int:
        """Run launch/train.py with `arguments` and return torchrun's exit status.

        `outcome_file` is written once the ranks on all hosts have finished. torchrun then waits for
        the torchrun processes on the other hosts. If SIGTERM ended torchrun on another host, this
        wait takes five minutes and ignores SIGTERM, so torchrun is killed after `LEAVE_S`.
        """
        # torchrun starts its ranks with this Python.
        python = environment.get("PYTHON_EXEC", sys.executable)
        script = str(Path(__file__).with_name("train.py"))
        launcher = [python, "-m", "torch.distributed.run", "--max-restarts=0", script]
        self._process = subprocess.Popen([*launcher, *arguments], env=environment)
        self._forward()  # Forward a signal that arrived before the process started.

        done_s: float | None = None
        while True:
            try:
                return self._process.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                now_s = time.monotonic()
                if done_s is None and read_outcome(outcome_file) not in (None, "mistake"):
                    done_s = now_s
                if done_s is not None and now_s > done_s + LEAVE_S:
                    self._process.kill()


def main() -> int:
    """Run one attempt of the job, and return its exit status."""
    torchrun = Torchrun()
    arguments = sys.argv[1:]
    args = read_command_line(arguments)
    run_dir = load_config(args.config, args.overrides).run.dir
    assert run_dir is not None, "load_config sets the run folder"
    checkpoint_at_start = newest_checkpoint(run_dir)

    with tempfile.TemporaryDirectory(prefix="vit-job-") as folder:
        outcome_file = Path(folder) / "outcome"
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
            **os.environ,
            OUTCOME_VARIABLE: str(outcome_file),
        }
        if "PET_MASTER_ADDR" in environment:
            environment.setdefault("PET_RDZV_CONF", f"timeout={MEET_S}")
        launcher_status = torchrun.run(arguments, environment, outcome_file)
        outcome = read_outcome(outcome_file)

    if args.check:
        status, text = judge_check(launcher_status, torchrun.signal_name)
    else:
        checkpoint_at_end = newest_checkpoint(run_dir, may_refuse=True)
        status, text = judge(outcome, torchrun.signal_name, checkpoint_at_start, checkpoint_at_end)

    print(
        f"{shown(run_dir)}: {text} (torchrun: {launcher_status}); exit status {status}", flush=True
    )
    return status


def judge(
    outcome: Outcome | None, signal_name: str, before: str | None, after: str | None
) -> tuple[int, str]:
    """Return the exit status for an attempt, and the reason.

    outcome: the outcome written by the ranks. signal_name: the received signal, or "". before,
    after: the newest checkpoint at the start and at the end, "" if there is no checkpoint, or None
    if the store is unreachable.
    """
    checkpoint = "the store is unreachable" if after is None else after or "no checkpoint"
    if outcome == "finished":
        return FINISHED, "finished"
    if outcome == "stopped":
        return AGAIN, f"stopped and saved ({checkpoint})"
    if after is None or before is None:
        # Ranks report an unreachable store as a user mistake, which would prevent a retry.
        status, how = (AGAIN, f"ended by {signal_name}") if signal_name else (ACCIDENT, "failed")
        return status, f"{how}; the store does not show whether a newer checkpoint exists"
    if after != before:
        return AGAIN, f"failed, but advanced from {before or 'the start'} to {checkpoint}"
    if outcome == "mistake":
        return MISTAKE, "a user mistake: see the first error above"
    if signal_name:
        return AGAIN, f"ended by {signal_name} before the first save ({checkpoint})"
    return ACCIDENT, f"failed without a newer checkpoint ({checkpoint})"


def judge_check(launcher_status: int, signal_name: str) -> tuple[int, str]:
    """Return the exit status of `--check`, and the reason for it. signal_name: see `judge`."""
    if launcher_status == 0:
        return FINISHED, "checked, and nothing was started"
    if signal_name:
        return AGAIN, f"the check was ended by {signal_name}"
    return MISTAKE, "the check failed: see the table above"


def newest_checkpoint(run_dir: str, may_refuse: bool = False) -> str | None:
    """Return the name of the newest checkpoint in a run folder or URL, or "".

    Returns None if the store is unreachable. may_refuse: whether to return None also if the store
    refuses access, for example because its keys have expired. If False, such a refusal raises an
    error.
    """
    if is_url(run_dir):
        # obstore takes a second to import, and few runs need it.
        from vit.run_folder.copying import complete_in, store_at

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
        # Listing the folder makes other hosts' new files visible over NFS.
        os.listdir(file.parent)
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and the settings (`overrides`). Raises ValueError for invalid arguments."""
    parser = training_parser("python launch/job.py", __doc__)
    parser.add_argument("--check", action="store_true", help="see launch/train.py")
    parser.add_argument("--check-limit-s", type=float, metavar="S", help="see launch/train.py")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    guard_console()
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except OSError as error:  # for example, the temporary disk of this host is full
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror}", file=sys.stderr)
        sys.exit(ACCIDENT)
