"""What all commands of `data_prep` share: flags, the plan of a dry run, and how they end."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from data_prep.errors import PrepError
from data_prep.write.catalogue import Source
from data_prep.write.images import ImagePolicy
from data_prep.write.plan import (
    MIN_SHARDS,
    SHARD_BYTES,
    Settings,
    WritePlan,
    choose_part,
    format_bytes,
    make_plan,
)
from data_prep.write.writer import write
from vit.system import command_line, redact
from vit.system.files import ShardError
from vit.system.host import num_cores
from vit.system.meter import duration

VAL_FRACTION = 0.1
"""Of each class, where a source has no validation split."""


class Parser(command_line.Parser):
    """The project's parser; a mistake ends the process."""

    def error(self, message: str) -> NoReturn:
        """Print the line and end with status 2."""
        try:
            super().error(message)
        except ValueError as error:
            self.exit(2, f"error: {error}\n")


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def fraction(text: str) -> float:
    """An argparse type: a number in [0, 1)."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in [0, 1)")
    return value


def add_val_fraction_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--val-fraction`."""
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        metavar="F",
        help=(
            "fraction of each class that becomes val, if SOURCE has no val of its own (default:"
            f" {VAL_FRACTION})"
        ),
    )


def add_workers_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--workers`."""
    parser.add_argument(
        "--workers",
        type=positive,
        default=num_cores(),
        metavar="N",
        help=(
            "processes; the result does not depend on it (default: the cores that this process may"
            " use, %(default)s)"
        ),
    )


def add_max_unreadable_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--max-unreadable`."""
    parser.add_argument(
        "--max-unreadable",
        type=fraction,
        default=Settings().max_unreadable,
        metavar="F",
        help=(
            "stop with an error if more than this fraction of the images, and more than 5, cannot"
            " be read; fewer are left out and listed in quarantine.jsonl; 0: none may (default:"
            " %(default)s)"
        ),
    )


def add_arguments(parser: argparse.ArgumentParser, *, apply_exif: bool = False) -> None:
    """Add the flags every source has; apply_exif: the default of that flag."""
    _add_shards_arguments(parser.add_argument_group("shards"))
    images = parser.add_argument_group("images")
    _add_images_arguments(images, apply_exif)
    add_max_unreadable_argument(images)

    running = parser.add_argument_group("running")
    add_workers_argument(running)
    running.add_argument(
        "--dry-run",
        action="store_true",
        help="list the source, print the plan with disk space and time, and write nothing",
    )


def _add_shards_arguments(shards: argparse._ArgumentGroup) -> None:
    shards.add_argument(
        "--out",
        required=True,
        metavar="ROOT",
        help=(
            "folder of the shards, or an s3:// or gs:// URL; existing shards are kept, missing ones"
            " are written"
        ),
    )
    number = shards.add_mutually_exclusive_group()
    number.add_argument(
        "--num-shards",
        type=positive,
        metavar="N",
        help=(
            "shards of the training split, the other splits get as many in proportion (default: by"
            " size)"
        ),
    )
    number.add_argument(
        "--shard-mib",
        type=positive,
        metavar="MIB",
        help=(
            f"target size of a shard, as long as there are {MIN_SHARDS} (default:"
            f" {SHARD_BYTES >> 20})"
        ),
    )
    shards.add_argument(
        "--shards",
        metavar="A-B|I/N",
        help=(
            "write only these shards, numbered from 0 over all splits, train first: from A to B, or"
            " part I (from 0) of N; so several machines can share the work, in any order; the one"
            " that finds all shards complete finishes the data set (default: all)"
        ),
    )
    shards.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="deals samples to shards (default: %(default)s)",
    )
    shards.add_argument(
        "--minival",
        type=fraction,
        metavar="F",
        help=(
            "hold out this fraction of each training class as the split `minival`, by a hash of the"
            " key"
        ),
    )
    shards.add_argument(
        "--with-json",
        action="store_true",
        help="a third member for each image: its original name, label and class",
    )


def _add_images_arguments(images: argparse._ArgumentGroup, apply_exif: bool) -> None:
    images.add_argument(
        "--check",
        choices=("decode", "headers"),
        default="decode",
        help=(
            "decode every image once, or only read its headers, at the speed of the disk (default:"
            " %(default)s)"
        ),
    )
    images.add_argument(
        "--apply-exif",
        action=argparse.BooleanOptionalAction,
        default=apply_exif,
        help=(
            "turn images upright as their EXIF orientation says; published benchmarks do not"
            " (default: %(default)s)"
        ),
    )
    images.add_argument(
        "--resize-short-side",
        type=positive,
        metavar="PX",
        help="shrink larger images until their short side has PX pixels",
    )
    images.add_argument(
        "--jpeg-quality",
        type=int,
        default=ImagePolicy().jpeg_quality,
        metavar="Q",
        help=(
            "1 to 100, for images that are changed: resized, turned, or no RGB or grey JPEG"
            " (default: %(default)s); all others keep their bytes"
        ),
    )
    images.add_argument(
        "--restart-markers",
        choices=("off", "auto"),
        default=ImagePolicy().restart_markers,
        help=(
            "auto: give each JPEG restart markers and better Huffman tables, losslessly: files get"
            " smaller, and a part of an image can be decoded alone (default: %(default)s, bytes"
            " stay as they are)"
        ),
    )


def write_or_plan(source: Source, args: argparse.Namespace) -> None:
    """Write the shards of a source by the flags of `add_arguments`, or print the plan."""
    settings = Settings(
        num_shards=args.num_shards,
        shard_bytes=args.shard_mib and args.shard_mib << 20,
        seed=args.seed,
        workers=args.workers,
        part=args.shards,
        policy=ImagePolicy(
            args.check,
            args.apply_exif,
            args.resize_short_side,
            args.jpeg_quality,
            args.restart_markers,
        ),
        with_json=args.with_json,
        minival=args.minival,
        max_unreadable=args.max_unreadable,
    )
    if not args.dry_run:
        write(source, args.out, settings)
        return
    with make_plan(source, args.out, settings, dry=True) as plan:
        print(_summary(plan))


def _summary(plan: WritePlan) -> str:
    """The plan for people: splits, shards, bytes, time."""
    catalogue = plan.catalogue
    lines = [f"{plan.source.name}: {len(catalogue.class_names):,} classes"]
    for split, samples in catalogue.splits.items():
        count = plan.counts[split]
        each = f"{samples // count:,}{f' to {samples // count + 1:,}' if samples % count else ''}"
        lines.append(f"  {split}: {samples:,} images in {count:,} shards of {each}")
    work = plan.work()
    sizes = plan.output.sizes()
    part = [work[k].shard.name for k in choose_part(plan.settings.part, plan.counts)]
    todo = [name for name in part if not {f"{name}.tar", f"{name}.json"} <= sizes.keys()]
    lines.append(f"  to write: {len(todo):,} of {len(part):,} shards of {len(work):,}")
    share = len(todo) / len(work)
    needed = plan.num_bytes * share
    disk = f"  disk: about {format_bytes(needed)}"
    if (free := plan.output.free_bytes()) is not None:
        disk += f", {format_bytes(free)} are free{'' if free > needed else ': NOT ENOUGH'}"
    lines.append(disk)
    if math.isfinite(plan.seconds_per_image):
        workers = plan.settings.workers
        seconds = sum(catalogue.splits.values()) * share * plan.seconds_per_image / workers
        speed = f"{1 / max(plan.seconds_per_image, 1e-9):,.0f} images/s in one process"
        lines.append(
            f"  time: about {duration(seconds)} with {workers} processes ({speed}, measured on a"
            " few; a slow disk can take longer)"
        )
    return "\n".join([*lines, f"nothing was written to {plan.output}"])


def run(
    command: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    then: str = "the same command continues",
) -> int:
    """Run a command and return its exit status: 0, or 2 after one line for what a user can correct.

    then: what continues the work, printed after an interruption. SIGTERM ends it as Ctrl-C does:
    incomplete files are removed, complete shards stay.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # one is enough
        raise _Terminated

    redact.guard_console()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        command(args)
    except (PrepError, ShardError) as error:
        print(redact.printed(f"error: {error}"), file=sys.stderr)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        reason = f"error: {place}{error.strerror or error}; when that is solved, {then}"
        print(redact.printed(reason), file=sys.stderr)
    except _Terminated:
        print(f"terminated; {then}", file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print(f"interrupted; {then}", file=sys.stderr)
        return 128 + signal.SIGINT
    else:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
    return 2


class _Terminated(BaseException):
    """SIGTERM arrived."""
