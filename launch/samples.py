"""List the difficult training images of a run: mislabeled, never learned, forgotten, duplicate.

    python launch/samples.py runs/demo              runs/demo/report/samples.html and samples.csv
    python launch/samples.py runs/demo --near       also images that are nearly the same
    python launch/samples.py runs/demo --worst 100 --exclude suspects.txt
    torchrun ... launch/train.py --config configs/demo.yaml data.exclude=suspects.txt run.dir=...

The command reads each image's losses over the epochs from the run folder, where log.sample_losses
saves them. The page works offline. Look at it before excluding images. Exit status: 0 done, 2 a
mistake to correct.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import check_versions  # noqa: F401

from vit.config.hints import setting_for
from vit.distributed.exit import run_command
from vit.distributed.process_group import World, join_world
from vit.extras.report.source import ReportSource
from vit.extras.report.training_images.curves import read_curves, write_keys, write_table
from vit.extras.report.training_images.doubles import (
    THRESHOLD,
    find_duplicates,
    find_near_doubles,
    pooled_features,
)
from vit.extras.report.training_images.page import TABLE_FILE, write_samples_page
from vit.hooks.sample_losses import epoch_files
from vit.run_folder.paths import METRICS_FILE, newest_run
from vit.run_folder.reading import local_copy
from vit.system.command_line import Parser, parse_run_words
from vit.system.meter import Meter


def main() -> World:
    args = read_command_line()
    run_dir = local_copy(args.run or newest_run("RUN", METRICS_FILE))
    world = join_world(args.device, "--device ")
    source = ReportSource(run_dir, world.device, args.overrides)

    with Meter("reading losses", len(epoch_files(run_dir)), "epochs") as meter:
        curves = read_curves(source, lambda done, total: meter.update(done))

    duplicates = find_duplicates(source.train_set.split, source.val_split)

    near = None
    if args.near is not None:
        num_images = len(source.train_set.split) + len(source.val_split)
        with Meter("features", num_images, "images") as meter:
            features = pooled_features(source, lambda done, _: meter.update(done))
        with Meter("comparing", num_images, "images") as meter:
            near = find_near_doubles(
                source, features, duplicates, args.near, lambda done, _: meter.update(done)
            )

    print(
        f"{int((curves.num_seen > 0).sum()):,} images, {len(curves.epochs)} epoch(s):"
        f" {int(curves.late_wrong.sum()):,} wrong until the end,"
        f" {int(curves.never_learnt.sum()):,} never learned,"
        f" {int((curves.times_forgotten > 0).sum()):,} forgotten,"
        f" {sum(len(same) - 1 for same in duplicates.groups):,} duplicates,"
        f" {len(duplicates.also_evaluated):,} also in the evaluation data"
    )
    if near is not None:
        print(
            f"nearly identical (cosine {args.near:g} or more): {len(near.pairs):,} pairs of"
            f" training images, {len(near.also_evaluated):,} evaluation images"
        )

    print(write_samples_page(source, curves, duplicates, near, args.images))
    print(write_table(source, curves, duplicates, near, run_dir / TABLE_FILE))
    if args.exclude is not None:
        print(write_keys(source, curves.suspects[: args.worst].tolist(), args.exclude))

    return world


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and the settings (`overrides`). Raises ValueError for invalid arguments."""
    parser = Parser("python launch/samples.py", __doc__, setting_for)
    parser.add_argument(
        "--images", type=int, default=48, metavar="N", help="images per section (default: 48)"
    )
    parser.add_argument(
        "--near",
        type=_cosine,
        nargs="?",
        const=THRESHOLD,
        metavar="COSINE",
        help="also find nearly identical images, whose features in the run's model have a cosine of"
        f" at least this (default: {THRESHOLD})",
    )

    parser.add_argument(
        "--exclude", type=Path, metavar="FILE", help="write the keys of the worst images to FILE"
    )
    parser.add_argument(
        "--worst",
        type=int,
        metavar="N",
        help="number of keys to write, the most likely mislabeled first",
    )

    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="cpu",
        help="device for the model (default: cpu)",
    )

    args = parse_run_words(parser, arguments)
    if not 1 <= args.images <= 1000:
        raise ValueError(f"--images {args.images}: expected a number from 1 to 1000")
    if (args.exclude is None) != (args.worst is None) or (args.worst or 1) < 1:
        raise ValueError("--exclude FILE requires --worst N, and vice versa: pass both")
    return args


def _cosine(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise ArgumentTypeError(
        f"{text!r} is not a cosine similarity: pass a number above 0 and up to 1, such as 0.9, or"
        " put the run before --near"
    )


if __name__ == "__main__":
    run_command(main)
