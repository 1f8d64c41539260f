"""Code shared by all `data_prep` commands: flags, dry runs and exit statuses."""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

from data_prep.errors import PrepError
from data_prep.write.catalog import Source
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
from vit.system import redact
from vit.system.command_line import Parser
from vit.system.files import ShardError
from vit.system.host import num_cores
from vit.system.meter import duration

Flags = Mapping[str, Mapping[str, Any]]
"""Maps each flag to its keyword arguments for `add_argument`."""
Command = Callable[[argparse.Namespace], int | None]
"""A function that runs a parsed command line, and returns the exit status if it can be nonzero."""
Main = Callable[..., int]
"""A function that runs a command line, by default `sys.argv`, and returns the exit status."""
VAL_FRACTION = 0.1
"""The default fraction of each class to use as val if the source has no validation split."""


class PrepParser(Parser):
    """A variant of the project's argument parser that exits the process on a usage error."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        try:
            super().error(message)
        except ValueError as error:
            self.exit(2, f"error: {error}\n")


def positive(text: str) -> int:
    """Parse an integer of at least 1. Used as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def fraction(text: str) -> float:
    """Parse a number in [0, 1). Used as an argparse type."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in [0, 1)")
    return value


# ---- flags ---------------------------------------------------------------------------------------

VAL_FRACTION_FLAG: Flags = {
    "--val-fraction": {
        "type": fraction,
        "metavar": "F",
        "help": (
            "fraction of each class that becomes val, if SOURCE has no validation split (default:"
            f" {VAL_FRACTION})"
        ),
    }
}
WORKERS_FLAG: Flags = {
    "--workers": {
        "type": positive,
        "default": num_cores(),
        "metavar": "N",
        "help": (
            "number of worker processes, which does not affect the output (default: the available"
            " CPU cores, %(default)s)"
        ),
    }
}
MAX_UNREADABLE_FLAG: Flags = {
    "--max-unreadable": {
        "type": fraction,
        "default": Settings().max_unreadable,
        "metavar": "F",
        "help": (
            "stop with an error if more than 5 images, and more than this fraction, cannot be read;"
            " otherwise skip them and list them in quarantine.jsonl; 0 allows none (default:"
            " %(default)s)"
        ),
    }
}
SHARDS_FLAGS: Flags = {
    "--out": {
        "required": True,
        "metavar": "ROOT",
        "help": (
            "output folder, or an s3:// or gs:// URL; existing shards are kept and only missing"
            " ones are written"
        ),
    },
    "--num-shards": {
        "type": positive,
        "metavar": "N",
        "help": (
            "number of training shards; other splits get a proportional number (default: by size)"
        ),
    },
    "--shard-mib": {
        "type": positive,
        "metavar": "MIB",
        "help": (
            f"target size of a shard, if that gives at least {MIN_SHARDS} shards (default:"
            f" {SHARD_BYTES >> 20})"
        ),
    },
    "--shards": {
        "metavar": "A-B|I/N",
        "help": (
            "write only shards A to B, or part I of N with I from 0, to divide the work among"
            " machines; shards are numbered from 0 over all splits, train first; the machine that"
            " finds all shards complete finishes the data set (default: all)"
        ),
    },
    "--seed": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "seed for assigning samples to shards (default: %(default)s)",
    },
    "--minival": {
        "type": fraction,
        "metavar": "F",
        "help": (
            "hold out this fraction of each training class as the split `minival`, chosen by a hash"
            " of the key"
        ),
    },
    "--with-json": {
        "action": "store_true",
        "help": "add a JSON member with the original name, label and class to each sample",
    },
}
IMAGES_FLAGS: Flags = {
    "--check": {
        "choices": ("decode", "headers"),
        "default": "decode",
        "help": (
            "decode every image once, or read only the headers, which is as fast as the disk"
            " (default: %(default)s)"
        ),
    },
    "--apply-exif": {
        "action": argparse.BooleanOptionalAction,
        "default": False,
        "help": (
            "rotate images to match their EXIF orientation, unlike published benchmarks (default:"
            " %(default)s)"
        ),
    },
    "--resize-short-side": {
        "type": positive,
        "metavar": "PX",
        "help": "shrink images with a longer short side to PX pixels",
    },
    "--jpeg-quality": {
        "type": int,
        "default": ImagePolicy().jpeg_quality,
        "metavar": "Q",
        "help": (
            "JPEG quality, 1 to 100, of images that are resized, rotated or not RGB or gray JPEGs"
            " (default: %(default)s); all other images keep their bytes"
        ),
    },
    "--restart-markers": {
        "choices": ("off", "auto"),
        "default": ImagePolicy().restart_markers,
        "help": (
            "auto: losslessly add restart markers and better Huffman tables to every JPEG, so that"
            " the loader can decode part of an image; files become slightly smaller, or larger if"
            " their tables were optimal already (default: %(default)s, bytes are unchanged)"
        ),
    },
    **MAX_UNREADABLE_FLAG,
}
RUNNING_FLAGS: Flags = {
    **WORKERS_FLAG,
    "--dry-run": {
        "action": "store_true",
        "help": "list the source, print the plan with disk space and time, and write nothing",
    },
}


EXCLUSIVE = {"--num-shards", "--shard-mib"}
"""The mutually exclusive flags that set the number of shards."""


def command_line(
    name: str,
    doc: str | None,
    groups: Mapping[str, Flags],
    command: Command,
    remedy: str = "run the same command again to continue",
) -> Main:
    """Return the `main` function of `data_prep.<name>`.

    Args:
        groups: The flags under each heading of --help. "" means no heading.
        command: See `run`.
        remedy: See `run`.
    """

    def main(argv: list[str] | None = None) -> int:
        parser = PrepParser(f"python -m data_prep.{name}", doc)
        for heading, flags in groups.items():
            group = parser.add_argument_group(heading) if heading else parser
            exclusive = group.add_mutually_exclusive_group() if EXCLUSIVE & flags.keys() else group
            for flag, options in flags.items():
                owner = exclusive if flag in EXCLUSIVE else group
                owner.add_argument(flag, **options)
        return run(command, parser.parse_args(argv), remedy)

    return main


def source_command(
    name: str,
    doc: str | None,
    flags: Flags,
    make: Callable[[argparse.Namespace], Source],
    *,
    apply_exif: bool = False,
) -> Main:
    """Return the `main` function of `data_prep.<name>`, which writes shards from a source.

    Args:
        flags: The source's own flags, listed before the shared flags.
        make: A function that creates the source.
        apply_exif: The default of --apply-exif.
    """
    return command_line(
        name,
        doc,
        {
            "": flags,
            "shards": SHARDS_FLAGS,
            "images": {
                **IMAGES_FLAGS,
                "--apply-exif": {**IMAGES_FLAGS["--apply-exif"], "default": apply_exif},
            },
            "running": RUNNING_FLAGS,
        },
        lambda args: _write_or_plan(make(args), args),
    )


def refuse_val_fraction(value: float | None, *val: object) -> None:
    """Raise PrepError if --val-fraction is given although the source has a val split."""
    if val and value is not None:
        raise PrepError(
            f"--val-fraction {value} was given, but {val[0]} already exists: remove one of the two"
        )


def _write_or_plan(source: Source, args: argparse.Namespace) -> None:
    """Write the shards of a source, or print the plan if --dry-run is given."""
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

    if args.dry_run:
        with make_plan(source, args.out, settings, dry=True) as plan:
            print(_summary(plan))
    else:
        write(source, args.out, settings)


def _summary(plan: WritePlan) -> str:
    """Format the plan for the user: splits, shards, disk space and time, one line each."""
    catalog = plan.catalog
    lines = [f"{plan.source.name}: {len(catalog.class_names):,} classes"]
    for split, samples in catalog.splits.items():
        count = plan.counts[split]
        longest = f" to {samples // count + 1:,}" if samples % count else ""
        lines.append(
            f"  {split}: {samples:,} images in {count:,} shards of {samples // count:,}{longest}"
        )

    sizes = plan.output.sizes()
    part = [plan.work[k].name for k in choose_part(plan.settings.part, plan.counts)]
    missing = [name for name in part if not {f"{name}.tar", f"{name}.json"} <= sizes.keys()]
    lines.append(f"  to write: {len(missing):,} of {len(part):,} shards of {len(plan.work):,}")

    share = len(missing) / len(plan.work)
    needed = plan.num_bytes * share
    disk = f"  disk: about {format_bytes(needed)}"
    free = plan.output.free_bytes()
    if free is not None:
        disk += f", {format_bytes(free)} are free{'' if free > needed else ': NOT ENOUGH'}"
    lines.append(disk)

    if math.isfinite(plan.seconds_per_image):
        workers = plan.settings.workers
        seconds = sum(catalog.splits.values()) * share * plan.seconds_per_image / workers
        speed = f"{1 / max(plan.seconds_per_image, 1e-9):,.0f} images/s in one process"
        lines.append(
            f"  time: about {duration(seconds)} with {workers} processes ({speed}, measured on a"
            " few images; a slow disk can take longer)"
        )

    return "\n".join([*lines, f"nothing was written to {plan.output}"])


def run(command: Command, args: argparse.Namespace, remedy: str) -> int:
    """Run a command and return its exit status, or 2 after a one-line error message.

    remedy: advice on continuing, printed after an interruption. SIGTERM and SIGHUP interrupt the
    command, as Ctrl-C does. Incomplete files are removed, and complete shards are kept.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        # Ignore further signals, which would interrupt the cleanup.
        signal.signal(number, signal.SIG_IGN)
        raise _Terminated(number)

    redact.guard_console()
    handlers_before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # nohup ignores SIGHUP
    }
    try:
        return command(args) or 0
    except (PrepError, ShardError) as error:
        print(redact.printed(f"error: {error}"), file=sys.stderr)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        reason = f"error: {place}{error.strerror or error}; after fixing this, {remedy}"
        print(redact.printed(reason), file=sys.stderr)
    except _Terminated as error:
        print(f"terminated; {remedy}", file=sys.stderr)
        return 128 + int(error.args[0])
    except KeyboardInterrupt:
        print(f"interrupted; {remedy}", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)

    return 2


class _Terminated(BaseException):
    """The exception that interrupts the command when SIGTERM or SIGHUP arrives."""
