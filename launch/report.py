"""Draw the pictures of a run and write its report as a single, self-contained page.

    python launch/report.py                  the newest run under runs/
    python launch/report.py runs/demo        writes runs/demo/report/index.html
    python launch/report.py runs/demo --to-wandb     also uploads the run to Weights & Biases

The page needs no server and no network. The run may be finished, stopped, killed or still running.
If a picture cannot be drawn, the page gives the reason instead. The command prints the path of the
page and of each picture. Exit status: 0 done, 1 a bug, with its stack, 2 a mistake to correct, 130
interrupted.
"""

from argparse import Namespace
from collections.abc import Sequence

import check_versions  # noqa: F401

from vit.distributed.exit import run_command
from vit.distributed.process_group import World, join_world
from vit.extras.report.page import make_report
from vit.extras.report.pictures import PAINTERS
from vit.run_folder import reading
from vit.run_folder.lock import is_in_use
from vit.run_folder.paths import METRICS_FILE, newest_run
from vit.run_folder.reading import local_copy
from vit.system.command_line import Parser
from vit.system.meter import Meter
from vit.system.optional import needed_for
from vit.system.urls import is_url


def main() -> World:
    args = read_command_line()
    # Find the newest run by its metrics.jsonl, because a new run has no weights yet.
    run = args.run or str(newest_run("RUN", METRICS_FILE))
    run_dir = local_copy(run)
    is_away = is_url(run)

    in_use = reading.is_in_use(run) if is_away else is_in_use(run_dir)
    to_wandb = None
    if args.to_wandb:
        with needed_for("--to-wandb"):
            from vit.extras.loggers.wandb_upload import ToWandb
        to_wandb = ToWandb(run_dir, bool(in_use))

    # A run that is still training may use all GPU memory.
    device = "cpu" if args.device == "auto" and in_use is not False else args.device
    world = join_world(device, "--device ")

    with Meter("drawing", len(PAINTERS), "pictures") as meter:
        report = make_report(
            run_dir,
            world.device,
            in_use=in_use,
            on_picture=lambda done, total, name: meter.update(done),
        )

    print(report.page)
    for path in report.pictures.paths.values():
        print(f"  {path}")
    for name, reason in report.pictures.reasons.items():
        print(f"  no {name}.png: {reason}")

    if to_wandb is not None:
        to_wandb.show(report.pictures.paths, print)
    if is_away:
        print(reading.publish_report(run, run_dir))
    return world


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command line. Raises ValueError if it is invalid."""
    parser = Parser("python launch/report.py", __doc__)
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run folder or its URL (default: the newest run under runs/)",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="device for the model (default: auto, a GPU unless a training run uses it)",
    )
    parser.add_argument(
        "--to-wandb",
        action="store_true",
        help="update the W&B run from metrics.jsonl: create a missing run and upload missing lines;"
        " with WANDB_MODE=offline, write a folder for `wandb sync`",
    )

    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
