"""Exit with a one-line message if Python or torch is too old, or a package is not installed.

Every command in launch/ imports this file first, because later imports would fail with a confusing
error on an old Python or torch. This file imports nothing from this project and runs on Python 3.7.
A test compares the versions in this file with pyproject.toml. Only rank 0 prints the message.
"""

import importlib.util
import json
import os
import re
import sys
import time

PYTHON = (3, 11)
TORCH = (2, 11)
OTHER_RANKS_WAIT_S = 3  # torchrun ends all ranks when one exits, so rank 0 must print first.


def _refuse(problem: str) -> None:
    """Exit with status 2. Only rank 0 prints the problem."""
    if os.environ.get("RANK", "0") == "0":
        print("error: " + problem, file=sys.stderr)
        # torchrun prints the contents of this file at the end of its report.
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            extra = {"py_callstack": "error: " + problem, "timestamp": str(int(time.time()))}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump({"message": {"message": problem, "extraInfo": extra}}, file)
    else:
        time.sleep(OTHER_RANKS_WAIT_S)
    raise SystemExit(2)


if sys.platform == "win32":
    _refuse(
        "vitline does not run on Windows itself: install WSL (wsl --install) and run the same"
        " commands in its Linux"
    )
if sys.version_info < PYTHON:
    _refuse(
        f"Python {PYTHON[0]}.{PYTHON[1]} or newer is needed, {sys.executable} is"
        f" {sys.version_info[0]}.{sys.version_info[1]}: activate an environment with a newer one"
        " (source .venv/bin/activate)"
    )
for _package in ("vit", "torch"):
    if importlib.util.find_spec(_package) is None:
        _refuse(
            f"{_package} is not installed for {sys.executable}: activate the environment (source"
            " .venv/bin/activate), or pip install -r requirements.txt"
        )

import torch  # noqa: E402

_version = re.match(r"(\d+)\.(\d+)", torch.__version__)
if _version and tuple(map(int, _version.groups())) < TORCH:
    _refuse(
        f"torch {TORCH[0]}.{TORCH[1]} or newer is needed, this is {torch.__version__}: pip install"
        " --upgrade torch"
    )
