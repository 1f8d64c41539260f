"""Show a model's inputs and learned features.

    python launch/visualize.py augment --config configs/vit_b16.yaml data.root=data/imagenet
    python launch/visualize.py shapes vit_b16                    a model name, a config or a run
    python launch/visualize.py attention runs/demo --image photo.jpg --separate attention/
    python launch/visualize.py distance runs/demo --samples 128 --out distance.pdf
    python launch/visualize.py compare runs/demo runs/demo_finetune
    python launch/visualize.py curves runs/demo runs/demo_finetune --out curves.pdf

The default is the newest run. Images are validation samples of the run (--samples), or files,
folders and tars (--image). The suffix of --out selects the format. png is the default, and pdf and
svg are sharp at any size. Exit status: 0 done, 2 a mistake to correct.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import check_versions  # noqa: F401
import torch

from vit.config import io as config_io
from vit.config.hints import setting_for
from vit.config.io import load_config
from vit.config.schema import Config
from vit.distributed import process_group
from vit.distributed.exit import run_command
from vit.distributed.process_group import World
from vit.extras.report import model_figures
from vit.extras.report.confusion import plot_confusion
from vit.extras.report.contact_sheet import make_contact_sheet
from vit.extras.report.curves import plot_learning_curves
from vit.extras.report.example_images import Samples, samples_of_files, samples_of_split
from vit.extras.report.inside_plots import plot_heads, plot_patches, save_heads
from vit.extras.report.model_comparison import compare, plot_comparison
from vit.extras.report.source import ReportSource
from vit.inference.predictor import Trained, load
from vit.run_folder import LATEST_FILE, METRICS_FILE, newest_run
from vit.system import by_name
from vit.system.command_line import Parser
from vit.system.drawing import picture_format
from vit.system.meter import Meter
from vit.weights.files import read_weights


class Command(NamedTuple):
    """A command of visualize.py."""

    run: Callable[[Namespace, World], None]
    description: str
    num_samples: int | None = None
    """The default number of images, or None for a command without images."""
    takes_name: bool = False
    """True if the command needs no weights, and so accepts a config or a model's name."""


def main() -> World:
    """Run the command line and return the joined process group."""
    args = read_command_line()
    if args.command == "augment":
        config = load_config(args.config, args.overrides)
        world = process_group.join_world(config.train.device)
        out = args.out or Path(f"augment_{Path(args.config).stem}.png")
        print(make_contact_sheet(config, args.images, args.draws, out, world.device))
        return world
    world = process_group.join_world(args.device, "--device ")
    if args.command == "curves":
        runs = args.runs or [newest_run("RUN", METRICS_FILE)]
        names = "_".join(run.resolve().name for run in runs)
        print(plot_learning_curves(runs, args.out or Path(f"curves_{names}.png"), args.smooth))
        return world
    COMMANDS[args.command].run(args, world)
    return world


# ---- without weights -----------------------------------------------------------------------------


def shapes(args: Namespace, world: World) -> None:
    """Print the tensor shapes at each stage."""
    by_name.load("vit.extras.planner.by_layer:print_network", args.command)(*_config_of(args))


def summary(args: Namespace, world: World) -> None:
    """Print parameters and operations of each layer, and the memory."""
    by_name.load("vit.extras.planner.by_layer:print_costs", args.command)(*_config_of(args))


def _config_of(args: Namespace) -> tuple[Config, int]:
    """Return settings and number of classes for a run, weights file, config or model name."""
    source = str(args.runs[0]) if args.runs else str(_newest())
    settings = settings_of(args)
    if args.num_classes:
        settings["model.num_classes"] = args.num_classes
    if Path(source).suffix in (".yaml", ".yml"):
        overrides = [f"{key}={value}" for key, value in settings.items()]
        config = load_config(source, overrides)
    elif Path(source).exists():
        loaded = read_weights(source)
        if loaded.config is None:
            raise ValueError(
                f"{source}: these weights are from another program: pass the model's name instead"
            )
        config = config_io.from_dict(loaded.config, source)
        settings.setdefault("model.num_classes", loaded.num_classes)
        config = config_io.with_settings(config, settings)
    else:
        minimal = {"data": {"root": "."}, "train": {"steps": 1}, "model": {"name": source}}
        config = config_io.with_settings(config_io.from_dict(minimal, "command line"), settings)
    return config, config.model.num_classes or 1000


# ---- with weights --------------------------------------------------------------------------------


def patches(args: Namespace, world: World) -> None:
    """Draw images cut into patches."""
    trained = _load(args, world)
    samples = _samples(args, trained)
    size = model_figures.patch_size_of(trained.model)
    for path, pixels in _numbered(_out(args, trained), samples.pixels(trained)):
        print(plot_patches(pixels, size, path))


def filters(args: Namespace, world: World) -> None:
    """Draw the principal components of the patch embedding."""
    trained = _load(args, world)
    out = _out(args, trained)
    _print_picture(model_figures.draw_filters(trained.model, out), out)


def positions(args: Namespace, world: World) -> None:
    """Draw the similarity of position embeddings."""
    trained = _load(args, world)
    out = _out(args, trained)
    _print_picture(model_figures.draw_positions(trained.model, out), out)


def attention(args: Namespace, world: World) -> None:
    """Draw the attention of each layer and head, and rollout. --separate writes single files."""
    trained = _load(args, world)
    samples = _samples(args, trained)
    pixels = samples.pixels(trained)
    written = []
    with Meter("drawing", len(pixels), "images") as meter:
        for number, (path, image) in enumerate(_numbered(_out(args, trained), pixels)):
            normalize = trained.preprocess.normalize
            heads, rollout = model_figures.heads_and_rollout(trained.model, normalize, image)
            name = Path(samples.names[number]).name
            if args.separate:
                folder = args.separate / f"{number}_{Path(name).stem or name}"
                written.append(save_heads(image, heads, folder)[0].parent)
            else:
                has_pool = getattr(trained.model, "global_pool", "") == "map"
                title = f"Attention: {name}"
                written.append(
                    plot_heads(
                        image, heads, rollout=rollout, title=title, picture=path, has_pool=has_pool
                    )
                )
            meter.update(number + 1)
    for path in written:
        print(path)


def distance(args: Namespace, world: World) -> None:
    """Draw the mean attention distance of each head."""
    trained = _load(args, world)
    pixels = _samples(args, trained).pixels(trained)
    out = _out(args, trained)
    with Meter("looking at", len(pixels), "images") as meter:
        normalize = trained.preprocess.normalize
        caption = model_figures.draw_distance(trained.model, normalize, pixels, out, meter.update)
    _print_picture(caption, out)


def tokens(args: Namespace, world: World) -> None:
    """Draw the patch features as colors."""
    trained = _load(args, world)
    samples = _samples(args, trained)
    pixels = samples.pixels(trained)
    out = _out(args, trained)
    names = [Path(name).name or name for name in samples.names]
    normalize = trained.preprocess.normalize
    _print_picture(model_figures.draw_tokens(trained.model, normalize, pixels, names, out), out)


def confusion(args: Namespace, world: World) -> None:
    """Draw the confusion matrix of the newest evaluation of a run."""
    run_dir = Path(args.runs[0]) if args.runs else _newest()
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: not a run folder: `confusion` requires a run's evaluation")
    source = ReportSource(run_dir, world.device)
    out = args.out or Path(f"confusion_{run_dir.name}.png")
    print(plot_confusion(source.confusion, source.class_names, out))


def compared(args: Namespace, world: World) -> None:
    """Compare two runs image by image, and draw where they differ."""
    models = (_load(args, world, 0), _load(args, world, 1))
    samples = samples_of_split(models[0], args.samples, args.data, args.split)
    with Meter("predicting", 2 * len(samples.encoded), "images") as meter:
        comparison = compare(models, samples, meter.update)
    for letter, trained in zip("AB", models, strict=True):
        print(f"{letter}: {trained}")
    print("\n".join(comparison.lines()))
    default = "_".join(["compare", *(_name_of(trained) for trained in models)])
    print(plot_comparison(models, samples, comparison, args.out or Path(f"{default}.png")))


COMMANDS = {
    "shapes": Command(shapes, "shapes at each stage, as text", takes_name=True),
    "summary": Command(summary, "layers, parameters, GFLOP and memory, as text", takes_name=True),
    "patches": Command(patches, "images cut into patches", 1),
    "filters": Command(filters, "principal components of the patch embedding"),
    "attention": Command(attention, "attention maps of each layer and head, and rollout", 4),
    "positions": Command(positions, "similarity of position embeddings"),
    "distance": Command(distance, "mean attention distance by depth and head", 128),
    "tokens": Command(tokens, "patch features as colors", 12),
    "confusion": Command(confusion, "confusion matrix of a run's newest evaluation"),
    "compare": Command(compared, "comparison of two runs on the same samples", 500),
}


def _newest() -> Path:
    return newest_run("RUN", "weights/last.safetensors", LATEST_FILE)


def _load(args: Namespace, world: World, number: int = 0) -> Trained:
    path = args.runs[number] if args.runs else _newest()
    trained = load(path, name=args.model, device=world.device, settings=settings_of(args))
    for note in trained.notes:
        print(f"note: {note}", file=sys.stderr)
    return trained


def _samples(args: Namespace, trained: Trained) -> Samples:
    if args.image:
        return samples_of_files(args.image, args.samples)
    return samples_of_split(trained, args.samples, args.data, args.split)


def _out(args: Namespace, trained: Trained) -> Path:
    return args.out or Path(f"{args.command}_{_name_of(trained)}.png")


def _name_of(trained: Trained) -> str:
    path = trained.weights.path.absolute()
    in_run = path.parent.name in ("weights", "checkpoints")
    return path.parents[1].name if in_run else path.name.partition(".")[0]


def _numbered(out: Path, pixels: torch.Tensor) -> list[tuple[Path, torch.Tensor]]:
    """Return each image with its path: `out` for one image, otherwise out_1, out_2 and so on."""
    if len(pixels) == 1:
        return [(out, pixels[0])]
    return [
        (out.with_stem(f"{out.stem}_{number}"), image) for number, image in enumerate(pixels, 1)
    ]


def _print_picture(caption: str, out: Path) -> None:
    print(caption, file=sys.stderr)
    print(out)


# ---- the command line ----------------------------------------------------------------------------


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return the flags as settings: dotted key -> value, without unset flags."""
    size = args.image_size
    if size and len(size) == 1:
        size = size[0]
    return {"model.image_size": size} if size else {}


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command and its flags. `augment` also takes settings. Raises ValueError."""
    remaining = list(sys.argv[1:] if arguments is None else arguments)
    descriptions = {"augment": "contact sheet of the augmentation"}
    descriptions |= {"curves": "loss and accuracy of one or more runs over their epochs"}
    descriptions |= {name: command.description for name, command in COMMANDS.items()}
    parser = Parser("python launch/visualize.py", _with_commands(descriptions), setting_for)
    parser.add_argument("command", choices=list(descriptions))
    if not remaining or remaining[0].startswith("-") or remaining[0] not in descriptions:
        parser.parse_args(remaining[:1] or ["--help"])
    command = remaining.pop(0)
    readers = {"augment": _read_augment, "curves": _read_curves}
    args = readers[command](remaining) if command in readers else _read_flags(command, remaining)
    args.command = command
    return args


def _with_commands(descriptions: dict[str, str]) -> str:
    lines = [f"  {name:10} {text}" for name, text in descriptions.items()]
    return "\n".join([__doc__ or "", *lines, "", "Each command has --help."])


def _read_augment(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "python launch/visualize.py augment",
        "Draw some training images: the original, several augmented versions with their operations,"
        "\nand one version with mixing.",
        setting_for,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of a recipe")
    _add_out(parser, "augment_<name of the config>")
    parser.add_argument(
        "--images",
        type=int,
        default=6,
        metavar="N",
        help="rows of the sheet (default: 6; whole groups if images are mixed)",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=4,
        metavar="N",
        help="augmented versions per image (default: 4)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that override the file"
    )
    args = parser.parse_intermixed_args(arguments)
    for name, count in (("images", args.images), ("draws", args.draws)):
        if not 1 <= count <= 64:
            raise ValueError(f"--{name} {count}: expected a number from 1 to 64")
    return args


def _read_curves(arguments: Sequence[str]) -> Namespace:
    parser = Parser("python launch/visualize.py curves", "Draw loss and accuracy over the epochs.")
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: the newest run)"
    )
    description = "epochs to average training curves over (default: 1 or less; 0: none)"
    parser.add_argument("--smooth", type=float, metavar="EPOCHS", help=description)
    _add_out(parser, "curves_<runs>")
    args = parser.parse_intermixed_args(arguments)
    if not (args.smooth or 0) >= 0:
        raise ValueError(f"--smooth {args.smooth}: expected a number of epochs, or 0")
    args.device = "cpu"
    return args


def _read_flags(name: str, arguments: Sequence[str]) -> Namespace:
    command = COMMANDS[name]
    parser = Parser(f"python launch/visualize.py {name}", command.description.capitalize() + ".")
    accepted = "run folder, checkpoint or weights file"
    if command.takes_name:
        accepted += ", config, or a model's name"
    parser.add_argument(
        "runs",
        nargs=2 if name == "compare" else "?",
        metavar="RUN_OR_FILE",
        help=f"{accepted} (default: the newest run)" if name != "compare" else accepted,
    )
    parser.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side, or height and width (default: as trained)",
    )
    if command.takes_name:
        parser.add_argument("--num-classes", type=int, metavar="N", help="(default: 1000)")
    else:
        parser.add_argument(
            "--model", metavar="NAME", help="timm's name of weights from another program"
        )
        _add_out(parser, f"{name}_<run>")
    if name == "attention":
        parser.add_argument(
            "--separate",
            type=Path,
            metavar="FOLDER",
            help="write the input and one picture per layer and head to this folder instead",
        )
    if command.num_samples is not None:
        parser.add_argument(
            "--samples",
            type=int,
            default=command.num_samples,
            metavar="N",
            help=f"maximum number of images (default: {command.num_samples})",
        )
        if name != "compare":
            parser.add_argument(
                "--image", nargs="+", metavar="FILE", help="files, folders or tars instead"
            )
        parser.add_argument("--data", metavar="ROOT", help="shards (default: the run's data.root)")
        parser.add_argument("--split", help="split (default: the run's data.val_split)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    args = parser.parse_intermixed_args(arguments)
    args.runs = [args.runs] if isinstance(args.runs, str) else args.runs
    if args.image_size and (len(args.image_size) > 2 or min(args.image_size) < 1):
        raise ValueError("--image-size takes a side, or height and width, in pixels")
    for flag in ("samples", "num_classes"):
        if (count := getattr(args, flag, None)) is not None and count < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {count}: expected a positive number")
    if getattr(args, "out", None):
        picture_format(args.out)
    return args


def _add_out(parser: Parser, default: str) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"picture to write, .png, .pdf or .svg (default: {default}.png)",
    )


if __name__ == "__main__":
    run_command(main)
