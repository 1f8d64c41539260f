"""What all commands of `data_prep` share: flags, and how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from data_prep.jobs import PrepError
from data_prep.writer import MIN_SHARDS, SHARD_BYTES
from vit.data.files import ShardError


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def add_workers_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`."""
    parser.add_argument(
        "--workers",
        type=positive,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),  # macOS lacks it
        metavar="N",
        help="processes; the result does not depend on it (default: the cores of this process, %(default)s)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags every source has: --out, --num-shards, --shards, --workers, --seed."""
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="ROOT",
        help="folder of the shards; if it holds a part of them already, the rest is written",
    )
    parser.add_argument(
        "--num-shards",
        type=positive,
        metavar="N",
        help=f"shards of the training split, the other splits get as many in proportion "
        f"(default: one for each {SHARD_BYTES >> 20} MiB, at least {MIN_SHARDS})",
    )
    parser.add_argument(
        "--shards",
        metavar="A-B|I/N",
        help="write only these shards, numbered from 0 over all splits, train first: from A to B, or part I (from 0) of N; several "
        "machines can share the work so, in any order; whichever finds all shards whole completes the data set (default: all)",
    )
    add_workers_argument(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="deals samples to shards (default: %(default)s)")


def run(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a command and return its exit status: 0, or 2 after one readable line for what a user can set right."""
    try:
        command(args)
    except (PrepError, ShardError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}; when that is solved run the same command again, it continues", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    else:
        return 0
    return 2
