"""Write the outcome of an attempt to a file for its launcher, and read it.

torchrun exits with 1 after every SIGTERM, and turns a rank's 2 into 1, so its exit status does not
show whether another attempt makes sense. A launcher names a file of its host in VIT_OUTCOME_FILE.
The ranks of that host make it a link to one word, and launch/job.py reads it. After a crash there
is no file, because a killed process cannot write. A mistake is written only on the host whose rank
reports it. This module does not import torch, so that launchers start at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

OUTCOME_VARIABLE = "VIT_OUTCOME_FILE"
Outcome = Literal["finished", "stopped", "mistake"]
"""finished: nothing is left to do; stopped: by a signal, and saved; mistake: of the user, with exit
status 2 of the ranks."""


def tell_outcome(outcome: Outcome) -> None:
    """Write `outcome` for the launcher, if VIT_OUTCOME_FILE is set."""
    named = os.environ.get(OUTCOME_VARIABLE)
    if not named:
        return
    path = Path(named)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # without the file the launcher assumes a crash
        # A link, because its target is stored in the folder entry, which fits on a full disk.
        os.symlink(outcome, hidden)
        os.replace(hidden, path)


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome that the ranks of this host wrote; None after a crash."""
    try:
        word = os.readlink(path)
    except OSError:
        return None
    return next((outcome for outcome in get_args(Outcome) if outcome == word), None)
