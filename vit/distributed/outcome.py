"""Write the outcome of an attempt to a file for its launcher, and read it.

torchrun exits with status 1 after every SIGTERM, and also if a rank exits with status 2. Its exit
status therefore does not show whether a retry makes sense. A launcher sets VIT_OUTCOME_FILE to a
path. The ranks on its host create a symbolic link at this path. The link's target is the outcome in
one word, which launch/job.py reads. After a crash, the link is missing, because a killed process
cannot create it. A user mistake is recorded only on the host whose rank reports it. This module
does not import torch, so that launchers start quickly.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

OUTCOME_VARIABLE = "VIT_OUTCOME_FILE"
Outcome = Literal["finished", "stopped", "mistake"]
"""The outcome of an attempt. `finished` means that nothing is left to do, `stopped` that the run
was saved after a signal, and `mistake` that ranks exit with status 2 because of a user mistake."""


def tell_outcome(outcome: Outcome) -> None:
    """Write `outcome` for the launcher, if VIT_OUTCOME_FILE is set."""
    named = os.environ.get(OUTCOME_VARIABLE)
    if not named:
        return
    path = Path(named)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # Without the file, the launcher assumes a crash.
        # A symbolic link can be created on a full disk, because its target is stored in the
        # directory entry.
        os.symlink(outcome, hidden)
        os.replace(hidden, path)


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome that the ranks on this host wrote, or None after a crash."""
    try:
        word = os.readlink(path)
    except OSError:
        return None
    return next((outcome for outcome in get_args(Outcome) if outcome == word), None)
