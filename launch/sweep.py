"""Print a table of the runs in a sweep: settings, progress and accuracy.

    python launch/sweep.py runs/seeds

The command reads the settings and metrics of all run folders in a folder. Settings that differ
between the runs become columns. The last lines give the mean and the standard deviation of the
accuracy over runs that differ only in the seed.
"""

import statistics
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import check_versions  # noqa: F401
import yaml

from vit.config.io import differences
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import CONFIG_FILE, METRICS_FILE
from vit.system.command_line import Parser

SEED = "train.seed"
NOT_COMPARED = ("run.dir",)


class Row(NamedTuple):
    """A run in the sweep, with its metrics and its settings, which are keyed by full name."""

    name: str
    settings: dict[str, Any]
    step: int
    outcome: str
    """`finished`, `stopped` or `running`. A killed run counts as running."""
    top1: float | None
    """The top-1 accuracy in percent at the newest evaluation."""
    best: float | None
    loss: float | None
    hours: float


def main() -> None:
    args = read_command_line()
    folders = run_folders(Path(args.folder), may_be_none=args.when_finished is not None)
    rows = [read_run(folder) for folder in folders]
    num_finished = sum(row.outcome == "finished" for row in rows)
    if args.when_finished is not None and num_finished < args.when_finished:
        print(f"{args.folder}: {num_finished} of {args.when_finished} runs are finished")
        return

    print("\n".join(table(rows)))


def run_folders(folder: Path, may_be_none: bool = False) -> list[Path]:
    """Return the run folders in `folder`, in numeric order. Raises ValueError if there are none."""
    folders = [path.parent for path in folder.glob(f"*/{METRICS_FILE}")]
    if not folders and not may_be_none:
        raise ValueError(
            f"{folder}: contains no runs: expected files such as FOLDER/NAME/{METRICS_FILE}"
        )
    return sorted(folders, key=lambda path: (not path.name.isdigit(), path.name.zfill(9)))


def read_run(folder: Path) -> Row:
    """Read the settings and metrics of a run."""
    tree = yaml.safe_load((folder / CONFIG_FILE).read_text("utf-8"))
    settings = {key: value for key, (_, value) in differences({}, tree).items()}

    lines = read_metrics(folder / METRICS_FILE)
    evaluations = [line for line in lines if line["kind"] == "eval" and "top1" in line]
    ends = [line for line in lines if line["kind"] == "end"]
    is_over = bool(ends) and lines[-1]["kind"] == "end"

    return Row(
        name=folder.name,
        settings={key: value for key, value in settings.items() if key not in NOT_COMPARED},
        step=lines[-1]["step"] if lines else 0,
        outcome=ends[-1]["outcome"] if is_over else "running",
        top1=evaluations[-1]["top1"] if evaluations else None,
        best=max((line["top1"] for line in evaluations), default=None),
        loss=evaluations[-1]["loss"] if evaluations else None,
        hours=(ends[-1].get("elapsed_s", 0.0) if ends else 0.0) / 3600,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, followed by the means over seeds."""
    differ = []
    for key in dict.fromkeys(chain.from_iterable(row.settings for row in rows)):
        if len({repr(row.settings.get(key)) for row in rows}) > 1:
            differ.append(key)

    header = ["run", *differ, "step", "outcome", "top-1 %", "best %", "loss", "hours"]
    cells = [header, *(_cells(row, differ) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
    return lines + means(rows, [key for key in differ if key != SEED])


def _cells(row: Row, differ: Sequence[str]) -> list[str]:
    """Return the cells of a run, in the order of the table's header."""
    settings = [str(row.settings.get(key, "-")) for key in differ]
    return [
        row.name,
        *settings,
        f"{row.step:,}",
        row.outcome,
        _number(row.top1, 2),
        _number(row.best, 2),
        _number(row.loss, 4),
        f"{row.hours:.2f}",
    ]


def means(rows: Sequence[Row], differ: Sequence[str]) -> list[str]:
    """Return the mean and standard deviation of top-1 over seeds for each combination of values of
    the settings `differ`."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        name = ", ".join(f"{key}={row.settings.get(key, '-')}" for key in differ)
        if row.outcome == "finished" and row.top1 is not None:
            groups.setdefault(name, []).append(row.top1)

    return [
        f"top-1 {statistics.fmean(values):.2f} +- {statistics.stdev(values):.2f} %"
        f" ({len(values)} seeds, standard deviation{'; ' if name else ''}{name})"
        for name, values in groups.items()
        if len(values) > 1
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command line. Raises ValueError if it is invalid."""
    parser = Parser("python launch/sweep.py", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="folder that contains the run folders")
    parser.add_argument(
        "--when-finished",
        type=int,
        metavar="N",
        help="print the table only if N runs are finished, otherwise their number",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    from vit.distributed.exit import run_command

    run_command(main)
