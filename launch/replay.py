"""Reproduce any batch of a run: the same images, crops and mixing, with their losses.

    python launch/replay.py runs/demo --step 300                      a picture and a table
    python launch/replay.py runs/vit_b16 --step 81234 --rank 3 --images 48 --sheet batch.png
    python launch/replay.py runs/demo --step 300 --csv batch.csv      every row of the batch
    python launch/replay.py runs/demo --step 300 data.root=/elsewhere/digits

Steps are counted from 1, and step 300 is the update that metrics.jsonl logs as step 300. The
command needs the run's data, which must not have changed, and it does not change the run. Exit
status: 0 done, 2 a mistake to correct.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import check_versions  # noqa: F401

from vit.config.hints import setting_for
from vit.distributed.exit import run_command
from vit.distributed.process_group import World, join_world
from vit.extras.report.replay import Replay, ReplayedRow, plot_step, write_csv
from vit.extras.report.source import ReportSource
from vit.run_folder.paths import METRICS_FILE, REPORT_FOLDER, newest_run
from vit.run_folder.reading import local_copy
from vit.system.command_line import Parser, parse_run_words
from vit.system.files import picture_format

TABLE_ROWS = 12


def main() -> World:
    args = read_command_line()
    run_dir = local_copy(args.run or newest_run("RUN", METRICS_FILE))
    world = join_world(args.device, "--device ")
    replay = Replay(ReportSource(run_dir, world.device, args.overrides), args.step, args.rank)
    print("\n".join(table(replay)))
    if args.csv is not None:
        print(write_csv(replay, args.csv))
    if args.sheet is not None or args.csv is None:
        default = run_dir / REPORT_FOLDER / f"step_{args.step:08d}.png"
        print(plot_step(replay, args.images, args.sheet or default))
    return world


def table(replay: Replay) -> list[str]:
    """Format the first rows as lines of a table."""
    num_rows = len(replay.rows)
    height, width = replay.image_size
    lines = [
        f"step {replay.step:,} (epoch {replay.epoch}, {replay.world_size} rank(s)): {num_rows:,}"
        f" images of {replay.source.train_set.split.root}, {width} x {height} pixels"
    ]
    if not replay.has_losses:
        lines.append("no losses were saved for this epoch (log.sample_losses)")

    shown: list[ReplayedRow] = []
    for piece in replay.pieces(TABLE_ROWS):
        shown += piece.rows
    cells = [("row", "key", "class", "loss", "augmentation"), *map(_cells, shown)]
    # The last column needs no padding.
    *widths, _ = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for *texts, augmentation in cells:
        lines.append("  ".join([*map(str.ljust, texts, widths), augmentation]).rstrip())

    if num_rows > len(shown):
        lines.append(f"... and {num_rows - len(shown):,} more: use --csv FILE to write all rows")
    return lines


def _cells(row: ReplayedRow) -> tuple[str, str, str, str, str]:
    """Return the cells of a row, in the order of the table's header."""
    done = [f"crop {row.crop_width}x{row.crop_height}+{row.crop_left}+{row.crop_top}"]
    if row.augmentation:
        done.append(row.augmentation)
    if row.mixed_by:
        done.append(
            f"{row.mixed_by} {1 - row.own_share:.2f} of row {row.partner_row} ({row.partner_key})"
        )
    if not row.weight:
        done.append("unreadable, ignored")

    loss = "-" if row.loss is None else f"{row.loss:.3f}"
    return str(row.row), row.key, row.class_name, loss, ", ".join(done)


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and the settings (`overrides`). Raises ValueError for invalid arguments."""
    parser = Parser("python launch/replay.py", __doc__, setting_for)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step, starting at 1")
    parser.add_argument(
        "--rank", type=int, metavar="R", help="only the rows of this rank (default: all ranks)"
    )
    parser.add_argument(
        "--images", type=int, default=24, metavar="N", help="images in the picture (default: 24)"
    )
    parser.add_argument(
        "--sheet",
        type=Path,
        metavar="FILE.png",
        help="picture to write (default: RUN/report/step_<N>.png, unless --csv is set)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="file with one line per row")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="cpu",
        help="device for the augmentation (default: cpu)",
    )

    args = parse_run_words(parser, arguments)
    if not 1 <= args.images <= 256:
        raise ValueError(f"--images {args.images}: expected a number from 1 to 256")

    if args.sheet is not None:
        picture_format(args.sheet)
    return args


if __name__ == "__main__":
    run_command(main)
