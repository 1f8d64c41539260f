"""How an attempt at a training ended, in a file for the launcher that started it.

torchrun ends with 1 after every SIGTERM and turns our 2 into 1, so its exit status cannot tell
whether another attempt makes sense. A launcher names a file of its own host in VIT_OUTCOME_FILE,
the ranks of that host make it a link to one word, and launch/job.py reads it. After an accident
there is none: who was killed cannot write. A mistake is told on the host whose rank reports it; the
ranks of others end without a word. No torch here, so that launchers start at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

OUTCOME_VARIABLE = "VIT_OUTCOME_FILE"
Outcome = Literal["finished", "stopped", "mistake"]
"""finished: nothing is left to do; stopped: asked to, and saved; mistake: of the user, exit status
2 of the ranks."""


def tell_outcome(outcome: Outcome) -> None:
    """Write `outcome` for the launcher, if one has asked for it."""
    named = os.environ.get(OUTCOME_VARIABLE)
    if not named:
        return
    path = Path(named)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # no folder: an attempt without a word is an accident
        # A link has its word in its own entry, for which also a full disk has room.
        os.symlink(outcome, hidden)
        os.replace(hidden, path)


def read_outcome(path: Path) -> Outcome | None:
    """Return what the ranks of this host have told; None after an accident."""
    try:
        word = os.readlink(path)
    except OSError:
        return None
    return next((outcome for outcome in get_args(Outcome) if outcome == word), None)
