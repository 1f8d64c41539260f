"""How a process ends: its last words, its exit status, and what torchrun is told.

The data's story: a command runs inside `run_command`, which makes one line and an exit status of
whatever ends it. Of several ranks one tells a mistake. Under torchrun a rank that fails leaves its
words in the file that torchrun names (TORCHELASTIC_ERROR_FILE), so that torchrun's report ends with
them; a rank that has nothing to say waits until a rank of its host has spoken, and goes with status
0: torchrun then has one failure to report, the one that matters. `StopSignals` is how a run is
asked to end.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from vit.distributed import (
    AlreadyReported,
    RankLost,
    World,
    announce_end,
    local_world_size,
    world_size,
)
from vit.system.urls import guard_console, shown

SILENT_S = 3.0
"""A rank that has nothing to say waits so long for one that has: torchrun ends all at the first
failure."""
SPOKEN_S = 0.3
"""A rank that has spoken lets the silent ones go first, who look for its words in half of that."""


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT came before there was anything to save."""

    def __init__(self, number: int):
        super().__init__()
        self.number = signal.Signals(number)


class StopSignals:
    """Remembers that this process was asked to end. The loop acts at the next step boundary, on all
    ranks.

    Until `remember_only` is called there is nothing to save, and SIGTERM and SIGINT end the process
    at once, also where it waits for another rank. SIGUSR1, which batch scripts send ahead of a time
    limit, is always remembered: the first step is made and saved.
    """

    def __init__(self) -> None:
        self.received = ""
        self._ends_at_once = True
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ends_at_once and number != signal.SIGUSR1:
            raise Interrupted(number)
        if self.received and number == signal.SIGINT:  # who presses Ctrl-C twice means it
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def remember_only(self) -> None:
        """From now on there are steps, which see the flag."""
        self._ends_at_once = False

    def release_interrupt(self) -> None:
        """Let Ctrl-C interrupt again: there are no more steps that would see the flag."""
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])

    def restore(self) -> None:
        """Give the signals back to who had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_command(command: Callable[[], World | None]) -> None:
    """Run `command`, which returns the world it started, and end the process with its exit status.

    0: it returned. 2: a mistake that a person can mend, told in one message without a stack. 1:
    anything else, with its stack. 130, 143: interrupted. A mistake is a ValueError raised by our
    own code; one from inside a library is a bug and keeps its stack.
    """
    guard_console()
    try:
        world = command()
        if world is not None:
            leave_world(world)
    except AlreadyReported as error:
        _leave_silently(str(error), 2)
    except ValueError as error:
        if not _is_ours(error):
            _leave_with_stack()
        # Before they have met, all ranks of a host find the same.
        if os.environ.get("LOCAL_RANK", "0") != "0" and not dist.is_initialized():
            _leave_silently(f"error: {error}", 2)
        _leave_with_words(f"error: {error}", 2)
    except Interrupted as error:
        words = f"ended by {error.number.name} before the first step: nothing to save"
        _leave_because_of_others(words, 128 + error.number)
    except KeyboardInterrupt:
        _leave_because_of_others("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        if problem := out_of_memory(error) or _disk_full(error):
            _leave_with_words(f"error: {problem}", 2)
        if isinstance(error, RankLost) or (world_size() > 1 and _is_lost_connection(error)):
            words = (
                str(error) if isinstance(error, RankLost) else "lost the connection to another rank"
            )
            _leave_because_of_others(f"{words}; its own message, or torchrun's, says why", 1)
        _leave_with_stack()


def leave_world(world: World) -> None:
    """End this process with status 0, after every rank has come here. Does not return when there is
    a process group.

    gloo's worker threads race with the interpreter's finalisation: a plain exit aborts about a
    quarter of two-rank runs in torch 2.15 ("terminate called without an active exception"). A
    barrier, dropping the DDP objects, and leaving without finalisation together ended it.
    """
    if world.size == 1:
        return
    world.barrier()
    gc.collect()
    dist.destroy_process_group()
    leave(0)


def leave(status: int) -> NoReturn:
    """End this process at once, without waiting for other ranks: they notice the closed
    connections. Never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave_with_words(words: str, status: int) -> NoReturn:
    """Tell people and torchrun, and end."""
    words = f"{_who()}{words}"
    print(words, file=sys.stderr, flush=True)
    announce_end(words)
    _tell_torchrun(words)
    leave(status)


def _leave_with_stack() -> NoReturn:
    """A bug: its stack is what there is to tell."""
    traceback.print_exc()
    announce_end(f"rank {_rank()} ended with an error")
    _tell_torchrun(traceback.format_exc())
    leave(1)


def _leave_because_of_others(words: str, status: int) -> NoReturn:
    """End for a cause that is not here: with `words`, unless a rank of this host has told the
    cause."""
    if _host_has_spoken():
        leave(0)
    print(f"{_who()}{words}", file=sys.stderr, flush=True)
    announce_end(f"rank {_rank()}: {words}")
    leave(status)


def _leave_silently(words: str, status: int) -> NoReturn:
    """End, as another rank says why: with status 0 once a rank of this host has told torchrun so,
    or torchrun sends SIGTERM because of it; else, after a while, with `words` for torchrun and
    `status`."""
    signal.signal(signal.SIGTERM, lambda *_: leave(0))
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        if _host_has_spoken():
            leave(0)
        time.sleep(SPOKEN_S / 4)
    _tell_torchrun(words)
    leave(status)


def _error_file() -> Path | None:
    """Where torchrun looks for the last words of this rank; those of the host lie side by side, in
    folders that are named by their local ranks. None without torchrun."""
    named = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(named) if named else None


def _host_has_spoken() -> bool:
    """Whether a rank of this host has left its last words for torchrun."""
    file = _error_file()
    return file is not None and any(file.parent.parent.glob(f"*/{file.name}"))


def _tell_torchrun(words: str) -> None:
    """Leave `words` for torchrun's report, and time for the other ranks of the host to see them.

    The form is that of `torch.distributed.elastic`'s ErrorHandler; what is called a call stack
    there is what the report prints.
    """
    file = _error_file()
    if file is None:
        return
    words = shown(words)
    extra = {"py_callstack": words, "timestamp": str(int(time.time()))}
    hidden = file.with_name(f".{file.name}")
    try:
        hidden.write_text(json.dumps({"message": {"message": words, "extraInfo": extra}}))
        os.replace(hidden, file)
    except OSError:
        return  # a full disk, perhaps the very mistake; it was printed
    if local_world_size() > 1:
        time.sleep(SPOKEN_S)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _who() -> str:
    return f"rank {_rank()}: " if _rank() else ""


def _is_ours(error: ValueError) -> bool:
    """Whether it was raised by our own code, and so is meant for people."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    ours = (Path(__file__).resolve().parent, Path(sys.argv[0]).resolve())
    return any(raised_in.is_relative_to(place) for place in ours)


def _is_lost_connection(error: Exception) -> bool:
    """Whether it is what gloo or NCCL say when another rank has gone."""
    signs = (
        "onnection closed by peer",
        "onnection reset by peer",
        "ncclRemoteError",
        "Broken pipe",
    )
    return any(sign in str(error) for sign in signs)


def out_of_memory(error: Exception) -> str:
    """Which memory ran out and which setting to lower; empty if `error` is about something else.
    Only the GPU's has a class of its own: the CPU's allocator is told from its text, and so is
    what a loader worker sends home."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        reason = text.split(". ")[0]
    elif asked := re.search(
        r"DefaultCPUAllocator: .*?(\d+) bytes|Unable to allocate ([\d.]+ \w+)", text
    ):
        reason = (
            f"out of memory, {f'{int(asked[1]) / 2**30:.2f} GiB' if asked[1] else asked[2]} more"
            " were asked for"
        )
    elif (
        isinstance(error, MemoryError)
        or getattr(error, "errno", None) == errno.ENOMEM
        or "MemoryError" in text
        or "bad_alloc" in text
    ):
        reason = "out of memory"
    else:
        return ""
    files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    if Path(__file__).with_name("data") / "loader.py" in files:
        return (
            f"{reason} while loading a batch. Lower data.num_workers, data.prefetch_gib or"
            " data.global_batch_size (eval.batch_size)"
        )
    return (
        f"{reason}. Lower data.micro_batch_size in training, eval.batch_size in evaluation, or take"
        " a smaller model"
    )


def _disk_full(error: Exception) -> str:
    """What to tell when `error` is a full disk or a used-up quota that nobody nearer has told; else
    empty."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    place = f"{error.filename}: " if error.filename else ""
    return (
        f"{place}{error.strerror}; what was complete is untouched. Free some space and run the same"
        " command again"
    )
