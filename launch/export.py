"""Export a trained model to a folder that another program can open with its documented call.

    python launch/export.py runs/demo --to timm              timm.create_model("local-dir:FOLDER")
    python launch/export.py runs/vit_b16 --to huggingface    ViTForImageClassification
    python launch/export.py runs/vit_b16/weights/best.safetensors --to onnx --out FOLDER
    python launch/export.py vit_b_16-c867db91.pth --to npz --out FOLDER
    python launch/export.py timm/vit_small_patch16_224.augreg_in1k --to onnx --out FOLDER
    python launch/export.py runs/demo --to hub OWNER/NAME    the Hugging Face Hub

The folder contains the weights under the names that the program expects, the program's config with
preprocessing and class names, and README.md. README.md is a model card with the accuracy and the
code that opens the folder. transformers' AutoModelForImageClassification also opens a folder
written with `--to timm`. If the program does not support the model, the error lists the programs
that do. Exit status: 0 done, 2 a mistake to correct.

`--to hub` writes the same folder as `--to timm`, and adds app.py, which is a Gradio page that
classifies photos, and pictures from the run's report. It then uploads the folder to the model
repository OWNER/NAME. A missing repository is created as a public one. For a private repository,
first run `hf repos create OWNER/NAME --private`. Running the same command again replaces these
files, including the model card.
"""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import check_versions  # noqa: F401

from vit.distributed.exit import run_command
from vit.distributed.process_group import World, join_world
from vit.extras.export.export import check_holds, export, read_subject
from vit.extras.export.hub import check_repository, push
from vit.extras.export.model_card import Origin
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import METRICS_FILE, REPORT_FOLDER
from vit.system.command_line import Parser
from vit.system.files import sha256_of
from vit.system.redact import shown
from vit.weights.files import LoadedWeights
from vit.weights.programs import PROGRAMS


def main() -> World:
    args = read_command_line()
    world = join_world("cpu")
    subject, loaded, published = read_subject(args.path, args.model)
    check_holds(args.to, subject)

    run_dir = _run_of(loaded)
    folder = args.out or (run_dir and run_dir / "export" / args.to)
    if folder is None:
        raise ValueError(f"{loaded.path} is not in a run folder: pass an output folder with --out")

    origin = _origin(loaded, run_dir, published, args.repository or "")
    suffix = f" ({loaded.which()})" if loaded.which() else ""
    print(
        f"{loaded.path}{suffix}: {origin.name}, {subject.num_classes:,} classes at"
        f" {subject.config.model.size_text()}, to {args.to}"
    )
    for note in loaded.notes:
        print(f"  {note}")

    lines = export(
        "timm" if args.to == "hub" else args.to,
        subject,
        origin,
        folder,
        # Replace the folder that an earlier export of this run wrote for the Hub, so that running
        # the same command again updates the repository.
        replaces=args.to == "hub" and args.out is None,
    )
    for line in lines:
        print(f"  {line}")
    print(f"{folder}: complete; its README.md has the code to open it")

    if args.repository:
        print(f"pushed to {push(folder, args.repository)}")
    return world


def _run_of(loaded: LoadedWeights) -> Path | None:
    """Return the run folder that contains the weights, or None."""
    # Weights are in weights/last.safetensors or checkpoints/step_...
    folder = loaded.path.parent.parent
    return folder if (folder / METRICS_FILE).is_file() else None


def _origin(loaded: LoadedWeights, run_dir: Path | None, published: str, repository: str) -> Origin:
    """Describe where the weights come from, for the model card."""
    lines: list[dict[str, Any]] = read_metrics(run_dir / METRICS_FILE) if run_dir else []
    starts = [line for line in lines if line["kind"] == "start"]
    evaluations = [line for line in lines if line["kind"] == "eval" and line["step"] == loaded.step]

    file = loaded.path / "model.safetensors" if loaded.path.is_dir() else loaded.path
    name = loaded.source["repository"] if loaded.source else loaded.path.absolute().name
    # These pictures from the report contain no images from the data set.
    pictures = (
        [run_dir / REPORT_FOLDER / f"{name}.png" for name in ("curves", "confusion")]
        if run_dir and repository
        else []
    )

    return Origin(
        name=run_dir.absolute().name if run_dir else name,
        export_command=f"python launch/export.py {shlex.join(map(shown, sys.argv[1:]))}",
        sha256=sha256_of(file),
        step=loaded.step,
        averaged=loaded.averaged,
        start=starts[-1] if starts else None,
        evaluation=evaluations[-1] if evaluations else None,
        published=published,
        source=loaded.source,
        repository=repository,
        pictures=tuple(path for path in pictures if path.is_file()),
    )


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command line. Raises ValueError if it is invalid."""
    parser = Parser("python launch/export.py", __doc__)
    parser.add_argument(
        "path",
        metavar="RUN_OR_FILE",
        help=(
            "run folder (its last weights, averaged if available), checkpoint folder, or weights"
            " file, also of another program"
        ),
    )
    parser.add_argument(
        "repository",
        nargs="?",
        metavar="OWNER/NAME",
        help="model repository on the Hugging Face Hub, only with --to hub",
    )

    parser.add_argument(
        "--to", choices=(*PROGRAMS, "hub"), required=True, help="program for the export, or hub"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder to write (default: RUN/export/PROGRAM)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="timm's name of weights from another program, if the file does not contain it",
    )

    args = parser.parse_intermixed_args(arguments)
    if (args.to == "hub") != (args.repository is not None):
        raise ValueError(
            f"{args.repository or '--to hub'}: expected --to hub OWNER/NAME, or one RUN_OR_FILE and"
            " another program"
        )

    if args.repository is not None:
        check_repository(args.repository)
    return args


if __name__ == "__main__":
    run_command(main)
