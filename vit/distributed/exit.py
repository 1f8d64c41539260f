"""End a process with a message, an exit status, and a report to torchrun.

`run_command` ends a command with one line and an exit status. If all ranks find the same mistake,
only one of them reports it. Under torchrun, a failing rank writes its message to the file in
TORCHELASTIC_ERROR_FILE, and torchrun prints that message at the end of its report. A rank that
fails because of another rank waits until a rank on its host has reported a message, and then exits
with status 0, so torchrun reports only the original failure. `StopSignals` handles the signals that
stop a run.
"""

import errno
import gc
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from vit.distributed import flight_recorder
from vit.distributed.launcher import end_launcher_later
from vit.distributed.outcome import tell_outcome
from vit.distributed.process_group import (
    AlreadyReported,
    RankLost,
    World,
    announce_end,
    local_world_size,
    world_size,
)
from vit.distributed.watchdog import HangVerdict
from vit.system.files import FULL
from vit.system.redact import guard_console, printed, shown

SILENT_S = 20.0
"""The maximum time that a rank without a message waits for another rank on its host to report one.
On a busy machine, ranks find the same mistake many seconds apart, and would report it twice after a
shorter wait."""
REPORTED_S = 0.3
"""The time that a rank waits after reporting its message. The other ranks check for a report four
times during this time, and therefore exit first."""
SIGNAL_S = 0.5
"""The time to wait, after an error, for the signal that may have caused the error. Slurm signals
the processes of a job step one after another."""
LOST = "lost the connection to another rank"
_LOWER = (
    "Lower data.micro_batch_size in training, eval.batch_size in evaluation, or use a smaller model"
)


class Interrupted(KeyboardInterrupt):
    """An exception raised by a stop signal that ends the process before it can save."""

    def __init__(self, number: int, moment: str = "before the first step: nothing to save"):
        self.number = signal.Signals(number)
        super().__init__(f"ended by {self.number.name} {moment}")


class StopSignals:
    """The signals that ask this process to stop. All ranks stop at the next step.

    Before `remember_only` is called, there is nothing to save, so SIGTERM, SIGHUP and SIGINT end
    the process immediately, even while it waits for another rank. SIGUSR1, which batch scripts send
    before a time limit, is always only recorded, so that the first step is finished and saved. If
    the process already ignores SIGHUP, as under nohup, SIGHUP stays ignored.

    A thread prints the first signal at once, because Python runs `_handle` only after the current
    library call has returned, which may take minutes.
    """

    def __init__(self) -> None:
        self.received = ""
        self._ends_at_once = True

        self._reader, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._announcer = threading.Thread(target=self._announce, name="signals", daemon=True)
        self._announcer.start()

        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

    def _announce(self) -> None:
        """Wait for the first signal, and print it on the first rank of each host."""
        received = (each[0] for each in iter(lambda: self._reader.recv(1), b""))
        number = next((number for number in received if number in self._before), 0)
        if not number or os.environ.get("LOCAL_RANK", "0") != "0":
            return

        reaction = (
            "ending before the first step"
            if self._ends_at_once and number != signal.SIGUSR1
            else "saving after this step, and then ending; a second Ctrl-C ends without saving"
        )
        print(
            f"{_rank_prefix()}{signal.Signals(number).name} received: {reaction}",
            file=sys.stderr,
            flush=True,
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Store the signal. Raise an exception if the process must end immediately."""
        is_second = bool(self.received)
        # Code such as `__del__` may swallow the exception, so set `received` before raising it.
        self.received = signal.Signals(number).name
        # Wait for the other thread to print the signal. This thread may hold the console's lock.
        self._announcer.join(SIGNAL_S)
        if self._ends_at_once and number != signal.SIGUSR1:
            raise Interrupted(number)
        if is_second and number == signal.SIGINT:  # a second Ctrl-C: stop immediately
            raise KeyboardInterrupt

    def remember_only(self) -> None:
        """Make signals only set `received`, which each step checks."""
        self._ends_at_once = False

    @contextmanager
    def instead_of_errors(self, moment: str) -> Iterator[None]:
        """Raise Interrupted instead of an error in the block if a signal arrives before the error
        or soon after it. moment: see `Interrupted`.

        Terminals and Slurm send signals to all processes of a job. A compiler may die first, and
        its failure would then be reported as a user mistake, which schedulers do not retry. The
        error of a lost rank is not replaced, because after such a loss torchrun and srun send
        SIGTERM to the remaining ranks.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, RankLost) or _lost_connection(error):
                raise

            deadline = time.monotonic() + (0.0 if isinstance(error, ValueError) else SIGNAL_S)
            while not self.received and time.monotonic() < deadline:
                time.sleep(0.01)
            if self.received:
                raise Interrupted(signal.Signals[self.received], moment) from error
            raise

    def release_interrupt(self) -> None:
        """Let Ctrl-C interrupt the process again, because no later step checks `received`."""
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])

    def end_announcements(self) -> None:
        """Stop printing signals, because the process ends without another step."""
        if self._wake.fileno() >= 0:
            signal.set_wakeup_fd(self._wake_before)
            self._wake.shutdown(socket.SHUT_RDWR)  # ends the thread
            self._wake.close()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self.end_announcements()
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_command(command: Callable[[], World | None]) -> None:
    """Run `command`, which returns the world that it joined, and end the process.

    The exit status is 0 if the command returned; 2 after a mistake that the user can fix, with one
    message and no stack trace; 1 after any other error, with its stack trace; 128 plus the signal's
    number after a signal. ValueErrors from this project's code count as user mistakes. ValueErrors
    from a library count as bugs, so their stack traces are printed.
    """
    guard_console()
    try:
        try:
            world = command()
            sys.stdout.flush()  # Flushing raises an error if stdout is on a full disk.
            if world is not None:
                leave_world(world)
        except Exception as error:
            if not isinstance(error, ValueError):
                time.sleep(SIGNAL_S)  # see `StopSignals.instead_of_errors`
            raise
    except AlreadyReported as error:
        _leave_silently(str(error), 2)
    except ValueError as error:
        if not _is_ours(error):
            _leave_with_stack()

        # Before the ranks connect, all ranks on a host find the same mistake, but only one reports
        # it. Without torchrun, this rank could not notice another rank's report.
        is_reported_by_another = (
            os.environ.get("LOCAL_RANK", "0") != "0"
            and not dist.is_initialized()
            and _error_file() is not None
        )
        if is_reported_by_another:
            _leave_silently(f"error: {error}", 2)
        _leave_with_message(f"error: {error}", 2)
    except Interrupted as error:
        _leave_because_of_others(str(error), 128 + error.number)
    except KeyboardInterrupt:
        _leave_because_of_others("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        problem = _whose_remedy_is_known(error)
        if problem:
            _leave_with_message(f"error: {problem}", 2)
        loss = str(error) if isinstance(error, RankLost) else _lost_connection(error)
        if loss:
            _leave_because_of_others(
                f"{loss}; see the message of that rank or of torchrun for the cause", 1
            )
        _leave_with_stack()


def leave_world(world: World) -> None:
    """Wait for all ranks, and exit this process with status 0. With a single rank, just return."""
    if world.size == 1:
        return

    # The worker threads of gloo race with the interpreter's finalization. A normal exit aborts
    # about a quarter of two-rank runs in torch 2.15 ("terminate called without an active
    # exception"). To prevent the race, wait for all ranks, delete all DDP objects, and skip
    # finalization.
    world.barrier()
    gc.collect()
    dist.destroy_process_group()
    leave(0)


def leave(status: int) -> NoReturn:
    """Exit this process immediately. Other ranks notice the closed connections."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # The disk is full. This error has already been reported.
            stream.flush()
    os._exit(status)


def _leave_with_message(message: str, status: int) -> NoReturn:
    """Print `message`, report it to torchrun and to the other ranks, and exit."""
    message = printed(f"{_rank_prefix()}{message}")
    print(message, file=sys.stderr, flush=True)
    if status == 2:
        tell_outcome("mistake")
    announce_end(message)
    _report_to_torchrun(message)
    leave(status)


def _leave_with_stack() -> NoReturn:
    """Exit because of a bug, with the stack trace as the message."""
    traceback.print_exc()
    announce_end(f"rank {_rank()} ended with an error")
    _report_to_torchrun(traceback.format_exc())
    leave(1)


def _leave_because_of_others(message: str, status: int) -> NoReturn:
    """Exit because of a signal or a lost rank. Print `message` unless a rank on this host has
    reported."""
    if _host_has_reported():
        leave(0)
    print(f"{_rank_prefix()}{message}", file=sys.stderr, flush=True)
    announce_end(f"rank {_rank()}: {message}")
    leave(status)


def leave_hung(verdict: HangVerdict) -> NoReturn:
    """Exit because a rank hangs, as `verdict` says. This function may be called on any thread.

    The lowest rank that does not hang prints the message. On a host that has lost its network, the
    host's first rank prints it. A rank that appears to hang prints the stack of its main thread.
    This function never uses the store, because the main thread may be blocking it.
    """
    rank = _rank()
    message = f"error: {verdict.message}; the same command continues from the newest checkpoint"
    prefix = flight_recorder.dump()
    if prefix:
        message += f"; {prefix}<rank> list the last NCCL collectives (torchfrtrace compares them)"

    if rank in verdict.ranks:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        lines = [f"stack of rank {rank}:\n", *traceback.format_stack(frame)]
        print("".join(lines), end="", file=sys.stderr, flush=True)

    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    reporter = min(set(range(world_size())) - {*verdict.ranks}, default=0)
    is_reporter = is_first if verdict.is_cut_off else rank == reporter
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    elif local_world_size() > 1 and not is_first:
        _leave_once_reported()

    _report_to_torchrun(message)
    if verdict.is_cut_off and is_first:
        end_launcher_later()
    leave(1)


def _leave_silently(message: str, status: int) -> NoReturn:
    """Exit because of an error that another rank reports.

    The exit status is 0 once a rank on this host has reported to torchrun, or torchrun has sent
    SIGTERM. If neither happens within SILENT_S, the exit status is `status`, and torchrun gets
    `message`.
    """
    announce_end(message)
    signal.signal(signal.SIGTERM, lambda *_: leave(0))
    _leave_once_reported()
    _report_to_torchrun(message)
    leave(status)


def _leave_once_reported() -> None:
    """Exit with status 0 once a rank on this host has reported. Return after SILENT_S."""
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        if _host_has_reported():
            leave(0)
        time.sleep(REPORTED_S / 4)


def _error_file() -> Path | None:
    """Return the path of this rank's message file, <attempt>/<local rank>/<name>, or None without
    torchrun."""
    named = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(named) if named else None


def _host_has_reported() -> bool:
    """Return whether a rank on this host has written its message for torchrun."""
    file = _error_file()
    return file is not None and any(file.parent.parent.glob(f"*/{file.name}"))


def _report_to_torchrun(message: str) -> None:
    """Write `message` for torchrun's report, and wait until other ranks on this host can see it.

    The file has the format of the ErrorHandler in `torch.distributed.elastic`. torchrun prints the
    value of "py_callstack".
    """
    file = _error_file()
    if file is None:
        return

    message = shown(message)
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    hidden = file.with_name(f".{file.name}")
    try:
        hidden.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        os.replace(hidden, file)
    except OSError:
        return  # The disk may be full. The message has already been printed.

    if local_world_size() > 1:
        time.sleep(REPORTED_S)


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _rank_prefix() -> str:
    return f"rank {_rank()}: " if _rank() else ""


def _is_ours(error: ValueError) -> bool:
    """Return whether `error` was raised by this project's own code, with a message for the user."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    # This project's code consists of vit/, which is two folders above this file, and the script.
    ours = (Path(__file__).resolve().parents[1], Path(sys.argv[0]).resolve())
    return any(raised_in.is_relative_to(place) for place in ours)


def _lost_connection(error: Exception) -> str:
    """Return a message if gloo or NCCL raised `error` because a rank has exited, else ""."""
    signs = (
        "onnection closed by peer",
        "onnection reset by peer",
        "ncclRemoteError",
        "Broken pipe",
    )
    is_lost = world_size() > 1 and any(sign in str(error) for sign in signs)
    return LOST if is_lost else ""


def _whose_remedy_is_known(error: Exception) -> str:
    """Return a message for a library's error if the user can fix its cause, else ""."""
    return (
        out_of_memory(error)
        or _disk_full(error)
        or _too_many_open(error)
        or _has_no_order(error)
        or _failed_to_compile(error)
    )


def problem_of(error: Exception) -> str:
    """Return a message about an `error` that does not stop the process."""
    if isinstance(error, ValueError) and _is_ours(error):
        return str(error)
    first_line = (str(error).strip().splitlines() or [""])[0]
    return shown(
        _whose_remedy_is_known(error)
        or _lost_connection(error)
        or f"{type(error).__name__}: {first_line}".rstrip(": ")
    )


def out_of_memory(error: Exception) -> str:
    """Return a message that lists the settings to lower if memory ran out; "" for other errors.

    Only GPU out-of-memory errors have their own class. Errors of the CPU allocator and of loader
    workers are recognized by their text.
    """
    text = str(error)
    is_out_of_memory = (
        isinstance(error, MemoryError)
        or getattr(error, "errno", None) == errno.ENOMEM
        or "MemoryError" in text
        or "bad_alloc" in text
    )
    if isinstance(error, torch.OutOfMemoryError):
        reason = text.split(". ")[0]
    elif request := re.search(r"DefaultCPUAllocator: .*?(?P<bytes>\d+) bytes", text):
        reason = f"out of memory, {int(request['bytes']) / 2**30:.2f} GiB more were requested"
    elif request := re.search(r"Unable to allocate (?P<size>[\d.]+ \w+)", text):  # numpy
        reason = f"out of memory, {request['size']} more were requested"
    elif is_out_of_memory:
        reason = "out of memory"
    else:
        return ""

    files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    if Path(__file__).parents[1] / "data" / "loader.py" in files:
        return (
            f"{reason} while loading a batch. Lower loader.num_workers or data.global_batch_size"
            " (eval.batch_size)"
        )

    # The failing code may have attached a note with more specific advice.
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith("Lower "))
    return f"{reason}. {next(notes, _LOWER)}"


def _has_no_order(error: Exception) -> str:
    """Return a message if train.deterministic rejected an operation; "" for other errors."""
    match = re.search(r"(\S+)( with .*)? does not have a deterministic implementation", str(error))
    if match is None:
        return ""
    return (
        f"{match[1]} has no deterministic implementation, which train.deterministic requires: set"
        " train.deterministic=false, or choose a model without this operation"
    )


def _failed_to_compile(error: Exception) -> str:
    """Return a message if torch.compile failed on a model; "" for other errors.

    `vit.start.compiling.why_not_compiled` checks only that the host can compile.
    """
    verbose = "TORCHDYNAMO_VERBOSE"  # an environment variable of torch
    dynamo = sys.modules.get("torch._dynamo.exc")  # None unless a model was compiled
    if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
        return ""
    if os.environ.get(verbose) == "1":
        return ""

    lines = str(error).strip().splitlines()
    reason = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")
    return (
        f"torch.compile failed ({reason}): set train.compile=false, which changes only the speed,"
        f" or {verbose}=1 to see the stack"
    )


def _too_many_open(error: Exception) -> str:
    """Return a message if the limit on open files is reached, else ""."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    if error.errno == errno.ENFILE:
        return f"{error.strerror}: this host's limit is reached: check its other processes"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"{error.strerror}: this process may open {limit:,} files: raise the limit (`ulimit -n`)"
        " and run the same command again"
    )


def _disk_full(error: Exception) -> str:
    """Return a message if a disk is full or a quota is exhausted; "" for other errors."""
    if not isinstance(error, OSError) or error.errno not in FULL:
        return ""
    place = f"{error.filename}: " if error.filename else ""
    return (
        f"{place}{error.strerror}; files that were complete are unchanged. Free some space and run"
        " the same command again"
    )
