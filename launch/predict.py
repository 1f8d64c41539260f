"""Predict the classes of images in files, folders, tars and lists of names.

    python launch/predict.py --checkpoint runs/demo photo.jpg folder/ --top 5
    python launch/predict.py folder/ --csv out.csv              the newest run
    python launch/predict.py folder/ --sheet out.pdf --attention
    find /photos -name '*.jpg' -print0 | python launch/predict.py - --csv out.csv
    python launch/predict.py --checkpoint runs/demo data/digits/val-00000.tar --top 1

Images are decoded and cropped as in the run's evaluation. An unreadable image is reported, skipped
and counted, and its line in the CSV file gives the reason. The CSV file and the sheet get their
final names only when they are complete. Exit status: 0 all images were predicted; 1 some images
could not be read, and all others were predicted; 2 a mistake to correct, nothing was written; 130
interrupted.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import check_versions  # noqa: F401
import torch
from rich.console import Console

from vit.distributed.exit import leave, run_command
from vit.distributed.process_group import World, join_world, world_size
from vit.inference.inputs import FROM_STDIN, Inputs, find_inputs
from vit.inference.output import Summary, csv_file, image_table, write_rows
from vit.inference.predict import predict
from vit.inference.predictor import Trained, load
from vit.run_folder.paths import LATEST_FILE, newest_run
from vit.system.command_line import Parser, add_model_flags, model_flag_problems, model_settings
from vit.system.files import check_place, picture_format
from vit.system.meter import Meter
from vit.system.optional import needed_for
from vit.system.redact import escape_unprinted
from vit.weights.class_names import check_head

TABLE_IMAGES = 20
"""The maximum number of images to list in the table. If there are more, the table counts the images
by class."""
SHEET_IMAGES = 48
"""The maximum number of images on the sheet, which shows the first readable images."""
NAMED_PROBLEMS = 20
"""The maximum number of unreadable images to name on the console."""


def main() -> World:
    args = read_command_line()
    world = join_world(args.device or "auto", "--device ")

    path = args.checkpoint or newest_run("--checkpoint", "weights/last.safetensors", LATEST_FILE)
    names = read_names(args.classes) if args.classes else ()
    settings = {key: value for key, value in model_settings(args).items() if value is not None}
    trained = load(path, name=args.model, device=world.device, settings=settings, class_names=names)
    check_head(trained.weights)

    if args.attention:
        with needed_for("--attention"):
            from vit.extras.report.attention import check_rollout
        check_rollout(trained.model)

    inputs = find_inputs(args.images, sys.stdin.buffer if FROM_STDIN in args.images else None)
    for note in (*trained.notes, inputs.summary()):
        if note:
            print(f"note: {note}", file=sys.stderr)

    if args.sheet:  # Report errors before computing predictions.
        with needed_for("--sheet"):
            import vit.extras.report.model_figures  # noqa: F401
        check_place(args.sheet, "--sheet ")

    summary = predict_all(trained, inputs, args)
    show(summary, trained, args)
    if summary.num_problems:
        leave(1)
    return world


def predict_all(trained: Trained, inputs: Inputs, args: Namespace) -> Summary:
    """Predict all `inputs`, write the CSV file, and report unreadable images."""
    places = inputs.places
    top = min(args.top, len(trained.class_names))
    num_examples = SHEET_IMAGES if args.sheet else TABLE_IMAGES
    summary = Summary(places, trained.class_names, num_examples)

    with ExitStack() as stack:
        writer = stack.enter_context(csv_file(args.csv, top)) if args.csv else None
        meter = stack.enter_context(Meter("predicting", len(places), "images"))
        for batch in predict(
            trained,
            places,
            top,
            batch_size=args.batch_size,
            num_workers=args.num_workers,
            num_pixels=num_examples if args.sheet else 0,
        ):
            if writer is not None:
                write_rows(writer, batch, places, trained.class_names)

            for number, reason in batch.problems.items():
                if summary.num_problems < NAMED_PROBLEMS:
                    print(
                        f"skipped: {escape_unprinted(places[number].name)}: {reason}",
                        file=sys.stderr,
                    )
                summary.num_problems += 1

            summary.add(batch)
            skipped = f"{summary.num_problems:,} skipped" if summary.num_problems else ""
            meter.update(summary.num_done, skipped)

    return summary


def show(summary: Summary, trained: Trained, args: Namespace) -> None:
    """Print the table, draw the sheet, and print the paths of all written files."""
    num_good = summary.num_done - summary.num_problems
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    if num_good > 0:
        is_listed = summary.num_done <= TABLE_IMAGES
        console.print(image_table(summary.examples) if is_listed else summary.class_table())
    if args.sheet and summary.examples:
        draw_sheet(summary, trained, args)
    skipped = ""
    if summary.num_problems:
        more = summary.num_problems - NAMED_PROBLEMS
        unnamed = f" ({more:,} of them not named)" if more > 0 else ""
        skipped = f"; {summary.num_problems:,} could not be read and were skipped{unnamed}"

    kind = f" ({trained.weights.which()})" if trained.weights.which() else ""
    print(
        f"{num_good:,} of {summary.num_done:,} images predicted by {trained.weights.path}{kind}"
        f"{skipped}"
    )

    for path in (args.csv, args.sheet if summary.examples else None):
        if path is not None:
            print(path)


def draw_sheet(summary: Summary, trained: Trained, args: Namespace) -> None:
    """Draw the example images, with attention maps if `--attention` is set."""
    from vit.extras.report import model_figures
    from vit.extras.report.attention import rollouts

    pixels = torch.stack(summary.pixels)
    overlays = None
    if args.attention:
        relevance, _ = rollouts(trained.model, trained.preprocess.normalize(pixels))
        overlays = model_figures.overlaid(pixels, relevance)

    names = [escape_unprinted(Path(name).name) for name, _ in summary.examples]
    classes = [prediction for _, prediction in summary.examples]
    shown = len(names)

    heading = f"{shown} of {summary.num_done:,} images" if shown < summary.num_done else "Images"
    heading += f", classes by {trained.config.model.name}"
    if overlays is not None:
        heading += ", attention rollout"

    model_figures.plot_predictions(
        pixels, names, classes=classes, heading=heading, picture=args.sheet, overlays=overlays
    )


def read_names(path: Path) -> list[str]:
    """Return the class names in a file, one per line. Raises ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--classes {path}: cannot be read ({error}): pass a text file with one name per line"
        ) from None


def _create_parser() -> Parser:
    parser = Parser("python launch/predict.py", __doc__)
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="file, folder (with its subfolders), tar, or - for a list of names on stdin",
    )

    parser.add_argument(
        "--checkpoint",
        metavar="RUN_OR_FILE",
        help=(
            "run folder, checkpoint folder, weights file, or Hugging Face name such as timm/NAME"
            " (default: the newest run)"
        ),
    )
    parser.add_argument(
        "--model", metavar="NAME", help="timm's name of weights from another program"
    )
    parser.add_argument(
        "--classes", type=Path, metavar="FILE", help="file of class names, one per line"
    )

    parser.add_argument(
        "--top", type=int, default=5, metavar="K", help="number of classes per image (default: 5)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="table of all images to write")
    parser.add_argument(
        "--sheet",
        type=Path,
        metavar="FILE",
        help=f"picture of the first {SHEET_IMAGES} images to write (png, pdf, svg)",
    )
    parser.add_argument(
        "--attention", action="store_true", help="draw attention rollout on the sheet"
    )

    add_model_flags(
        parser,
        batch_size=(
            "images per forward pass (default: the run's eval.batch_size, on a CPU at most 32)"
        ),
        num_workers="decoding processes (default: one per core, none for a few images)",
        device="(default: auto, a GPU if available)",
    )

    return parser


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command line. Raises ValueError, which lists all mistakes."""
    args = _create_parser().parse_intermixed_args(arguments)
    problems = [f"--top {args.top}: expected a positive number"] if args.top < 1 else []
    problems += model_flag_problems(args)
    if args.attention and not args.sheet:
        problems.append("--attention requires a sheet: pass --sheet FILE")
    if args.sheet:
        try:
            picture_format(args.sheet)
        except ValueError as error:
            problems.append(f"--sheet {error}")

    if world_size() > 1:
        problems.append("predict.py runs as one process: start it without torchrun")

    if problems:
        raise ValueError("; ".join(problems))
    return args


if __name__ == "__main__":
    run_command(main)
