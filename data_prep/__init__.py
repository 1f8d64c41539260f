"""Prepare data sets, with one command per image source and a common shard writer."""

import importlib.util
import sys

# Check the Python version first. Otherwise, an import fails with a less helpful error.
if sys.version_info < (3, 11):  # noqa: UP036
    print(
        f"error: Python 3.11 or newer is needed, {sys.executable} is"
        f" {sys.version_info[0]}.{sys.version_info[1]}",
        file=sys.stderr,
    )
    raise SystemExit(2)

_missing = [
    package for package in ("numpy", "PIL", "rich") if importlib.util.find_spec(package) is None
]
if _missing:
    print(
        f"error: {', '.join(_missing)} is not installed for {sys.executable}: activate the"
        " environment (source .venv/bin/activate), or pip install -r requirements.txt",
        file=sys.stderr,
    )
    raise SystemExit(2)

COMMANDS = (
    "imagenet",
    "animals10",
    "mnist",
    "cifar",
    "imagefolder",
    "parquet",
    "digits",
    "index",
    "verify",
    "card",
)
