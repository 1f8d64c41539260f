"""Write the outcome of an attempt to a file for its launcher, and read it.

torchrun exits with status 1 after every SIGTERM, and if a rank exits with 2. Its exit status does
not show whether another attempt makes sense. A launcher therefore names a file in VIT_OUTCOME_FILE.
The ranks of its host create this file as a link whose target is one word, and launch/job.py reads
the word. After a crash the file is missing, because a killed process cannot write. A mistake is
written only on the host whose rank reports it. This module does not import torch, so that launchers
start quickly.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

OUTCOME_VARIABLE = "VIT_OUTCOME_FILE"
Outcome = Literal["finished", "stopped", "mistake"]
"""finished: nothing is left to do; stopped: saved after a signal; mistake: an error of the user,
for which ranks exit with status 2."""


def tell_outcome(outcome: Outcome) -> None:
    """Write `outcome` for the launcher, if VIT_OUTCOME_FILE is set."""
    named = os.environ.get(OUTCOME_VARIABLE)
    if not named:
        return
    path = Path(named)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # Without the file, the launcher assumes a crash.
        # A link fits on a full disk, because its target is stored in the folder entry.
        os.symlink(outcome, hidden)
        os.replace(hidden, path)


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome that the ranks of this host wrote; None after a crash."""
    try:
        word = os.readlink(path)
    except OSError:
        return None
    return next((outcome for outcome in get_args(Outcome) if outcome == word), None)
