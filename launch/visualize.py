"""Show a model's inputs and learned features.

    python launch/visualize.py augment --config configs/vit_b16.yaml data.root=data/imagenet
    python launch/visualize.py shapes vit_b16                    a model name, a config or a run
    python launch/visualize.py attention runs/demo --image photo.jpg --separate attention/
    python launch/visualize.py distance runs/demo --samples 128 --out distance.pdf
    python launch/visualize.py compare runs/demo runs/demo_finetune
    python launch/visualize.py curves runs/demo runs/demo_finetune --out curves.pdf

By default, the newest run is used. The images come from the run's validation set (--samples) or
are the files, folders and tars that you name (--image). The suffix of --out selects the format. png
is the default, and pdf and svg are sharp at any size. Exit status: 0 done, 2 a mistake to correct.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import check_versions  # noqa: F401
import torch

from vit.config.hints import setting_for
from vit.config.io import from_dict, load_config, with_settings
from vit.config.schema import Config
from vit.distributed.exit import run_command
from vit.distributed.process_group import World, join_world
from vit.extras.report import model_figures
from vit.extras.report.confusion import plot_confusion
from vit.extras.report.contact_sheet import make_contact_sheet
from vit.extras.report.curves import plot_learning_curves
from vit.extras.report.example_images import ExampleImages, samples_of_files, samples_of_split
from vit.extras.report.model_comparison import compare, plot_comparison
from vit.extras.report.source import ReportSource
from vit.inference.predictor import Trained, load
from vit.run_folder.paths import LATEST_FILE, METRICS_FILE, newest_run
from vit.system.command_line import Parser, image_size
from vit.system.files import picture_format
from vit.system.meter import Meter
from vit.system.optional import needed_for
from vit.weights.files import read_weights

MAX_CELLS = 64
"""The maximum number of rows of a contact sheet, and of augmented versions per image. A larger
sheet would need gigabytes of memory."""


class Drawing(NamedTuple):
    """One of the subcommands of visualize.py."""

    run: Callable[[Namespace, World], None]
    description: str
    flags: tuple[str, ...]
    """The arguments that the subcommand accepts, from `FLAGS`."""
    runs: dict[str, Any]
    """How many runs or files the subcommand accepts, and their help text, or {} if it accepts
    none."""
    num_samples: int | None = None
    """The default number of images, or None if the subcommand uses no images."""


def main() -> World:
    args = read_command_line()
    if args.command == "augment":
        args.out = args.out or Path(f"augment_{Path(args.config).stem}.png")
        args.config = load_config(args.config, args.overrides)
        world = join_world(args.config.train.device)
    else:
        world = join_world(args.device, "--device ")
    COMMANDS[args.command].run(args, world)
    return world


# ---- without weights -----------------------------------------------------------------------------


def augment(args: Namespace, world: World) -> None:
    """Draw some training images, each with augmented versions, the operations used, and a mixed
    version."""
    print(make_contact_sheet(args.config, args.images, args.draws, args.out, world.device))


def curves(args: Namespace, world: World) -> None:
    """Plot the loss and accuracy over the epochs."""
    runs = args.runs or [newest_run("RUN", METRICS_FILE)]
    names = "_".join(run.resolve().name for run in runs)
    print(plot_learning_curves(runs, args.out or Path(f"curves_{names}.png"), args.smooth))


def layers(args: Namespace, world: World) -> None:
    """Print a model's shapes, or its costs by layer, which `vit.extras.planner.by_layer`
    computes."""
    with needed_for(args.command):
        from vit.extras.planner.by_layer import PRINTERS
    PRINTERS[args.command](*_config_of(args))


def _config_of(args: Namespace) -> tuple[Config, int]:
    """Return the settings and the number of classes for a run, weights file, config or model
    name."""
    source = str(args.runs[0]) if args.runs else str(_newest())
    settings = settings_of(args)
    if args.num_classes:
        settings["model.num_classes"] = args.num_classes

    if Path(source).suffix in (".yaml", ".yml"):
        config = load_config(source, [f"{key}={value}" for key, value in settings.items()])
    elif Path(source).exists():
        loaded = read_weights(source)
        if loaded.config is None:
            raise ValueError(
                f"{source}: these weights were saved by another program: pass the model's name"
                " instead"
            )
        settings.setdefault("model.num_classes", loaded.num_classes)
        config = with_settings(from_dict(loaded.config, source), settings)
    else:
        minimal = {"data": {"root": "."}, "train": {"steps": 1}, "model": {"name": source}}
        config = with_settings(from_dict(minimal, "command line"), settings)

    return config, config.model.num_classes or 1000


# ---- with weights --------------------------------------------------------------------------------


def patches(args: Namespace, world: World) -> None:
    """Draw images cut into patches."""
    trained = _load(args, world)
    pixels = _samples(args, trained).pixels(trained)
    size = model_figures.patch_size_of(trained.model)
    for path, image in _numbered(_out(args, trained), pixels):
        print(model_figures.plot_patches(image, size, path))


def figure(args: Namespace, world: World) -> None:
    """Draw a figure of `vit.extras.report.model_figures`. Print its caption and path."""
    trained = _load(args, world)
    draw = getattr(model_figures, f"draw_{args.command}")
    out = _out(args, trained)

    if COMMANDS[args.command].num_samples is None:
        caption = draw(trained.model, out)
    else:
        samples = _samples(args, trained)
        pixels = samples.pixels(trained)
        names = [Path(name).name or name for name in samples.names]
        normalize = trained.preprocess.normalize
        with Meter("looking at", len(pixels), "images") as meter:
            images = model_figures.Images(normalize, pixels, names, meter.update)
            caption = draw(trained.model, images, out)

    print(caption, file=sys.stderr)
    print(out)


def attention(args: Namespace, world: World) -> None:
    """Draw the attention of each layer and head, and the attention rollout. --separate writes one
    file per map."""
    trained = _load(args, world)
    samples = _samples(args, trained)
    pixels = samples.pixels(trained)

    written = []
    with Meter("drawing", len(pixels), "images") as meter:
        for number, (path, image) in enumerate(_numbered(_out(args, trained), pixels)):
            heads, rollout = model_figures.heads_and_rollout(
                trained.model, trained.preprocess.normalize, image
            )
            name = Path(samples.names[number]).name

            if args.separate:
                folder = args.separate / f"{number}_{Path(name).stem or name}"
                written.append(model_figures.save_heads(image, heads, folder)[0].parent)
            else:
                figure_path = model_figures.plot_heads(
                    image,
                    heads,
                    rollout=rollout,
                    title=f"Attention: {name}",
                    picture=path,
                    has_pool=getattr(trained.model, "global_pool", "") == "map",
                )
                written.append(figure_path)

            meter.update(number + 1)

    for path in written:
        print(path)


def confusion(args: Namespace, world: World) -> None:
    """Draw the confusion matrix from the newest evaluation of a run."""
    run_dir = Path(args.runs[0]) if args.runs else _newest()
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: not a run folder, but `confusion` requires an evaluated run")
    source = ReportSource(run_dir, world.device)
    out = args.out or Path(f"confusion_{run_dir.name}.png")
    print(plot_confusion(source.confusion, source.class_names, out))


def compared(args: Namespace, world: World) -> None:
    """Compare two runs image by image, and draw the images on which they differ."""
    models = (_load(args, world, 0), _load(args, world, 1))
    samples = samples_of_split(models[0], args.samples, args.data, args.split)
    with Meter("predicting", 2 * len(samples.encoded), "images") as meter:
        comparison = compare(models, samples, meter.update)
    for letter, trained in zip("AB", models, strict=True):
        print(f"{letter}: {trained}")
    print("\n".join(comparison.lines()))
    default = "_".join(["compare", *(_name_of(trained) for trained in models)])
    print(plot_comparison(models, samples, comparison, args.out or Path(f"{default}.png")))


def _newest() -> Path:
    return newest_run("RUN", "weights/last.safetensors", LATEST_FILE)


def _load(args: Namespace, world: World, number: int = 0) -> Trained:
    path = args.runs[number] if args.runs else _newest()
    trained = load(path, name=args.model, device=world.device, settings=settings_of(args))
    for note in trained.notes:
        print(f"note: {note}", file=sys.stderr)
    return trained


def _samples(args: Namespace, trained: Trained) -> ExampleImages:
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
    """Return each image with its path: `out` for a single image, otherwise out_1, out_2, ..."""
    if len(pixels) == 1:
        return [(out, pixels[0])]
    return [
        (out.with_stem(f"{out.stem}_{number}"), image) for number, image in enumerate(pixels, 1)
    ]


# ---- the command line ----------------------------------------------------------------------------

FLAGS: dict[str, dict[str, Any]] = {
    "overrides": {
        "nargs": "*",
        "metavar": "section.key=value",
        "help": "settings that override the file",
    },
    "--config": {"required": True, "metavar": "FILE", "help": "YAML file of a recipe"},
    "--images": {
        "type": int,
        "default": 6,
        "metavar": "N",
        "help": "rows of the sheet (default: 6; whole groups if images are mixed)",
    },
    "--draws": {
        "type": int,
        "default": 4,
        "metavar": "N",
        "help": "augmented versions per image (default: 4)",
    },
    "--smooth": {
        "type": float,
        "metavar": "EPOCHS",
        "help": "epochs to average training curves over (default: 1 or less; 0: none)",
    },
    "--image-size": {
        "type": int,
        "nargs": "+",
        "metavar": "PIXELS",
        "help": "side, or height and width (default: as trained)",
    },
    "--num-classes": {"type": int, "metavar": "N", "help": "(default: 1000)"},
    "--model": {"metavar": "NAME", "help": "timm's name of weights from another program"},
    "--separate": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "write the input and one picture per layer and head to this folder instead",
    },
    "--samples": {
        "type": int,
        "metavar": "N",
        "help": "maximum number of images (default: %(default)s)",
    },
    "--image": {"nargs": "+", "metavar": "FILE", "help": "files, folders or tars instead"},
    "--data": {"metavar": "ROOT", "help": "shards (default: the run's data.root)"},
    "--split": {"help": "split (default: the run's data.val_split)"},
    "--out": {
        "type": Path,
        "metavar": "FILE",
        "help": "picture to write, .png, .pdf or .svg (default: <command>_<name>.png)",
    },
    "--device": {"choices": ["auto", "cpu", "cuda"], "default": "auto"},
}
UNSET: dict[str, Any] = {"device": "cpu", "out": None, "image_size": None, "smooth": None}
"""The default values of arguments that a subcommand does not have."""
OF_NAME = ("--image-size", "--num-classes", "--device")
OF_WEIGHTS = ("--image-size", "--model", "--out", "--device")
OF_DATA = (*OF_WEIGHTS, "--samples", "--data", "--split")
OF_IMAGES = (*OF_DATA, "--image")
NEWEST = "(default: the newest run)"
WEIGHTS = "run folder, checkpoint or weights file"
ONE = {"nargs": "?", "metavar": "RUN_OR_FILE", "help": f"{WEIGHTS} {NEWEST}"}
TWO = {"nargs": 2, "metavar": "RUN_OR_FILE", "help": WEIGHTS}
ONE_OR_NAME = {**ONE, "help": f"{WEIGHTS}, config, or a model's name {NEWEST}"}
FOLDER = {"nargs": "?", "metavar": "RUN", "help": f"run folder {NEWEST}"}
FOLDERS = {"nargs": "*", "type": Path, "metavar": "RUN", "help": f"run folders {NEWEST}"}
COMMANDS = {
    "augment": Drawing(
        augment,
        "contact sheet of training images with augmented and mixed versions",
        ("overrides", "--config", "--images", "--draws", "--out"),
        {},
    ),
    "curves": Drawing(
        curves,
        "loss and accuracy of one or more runs over their epochs",
        ("--smooth", "--out"),
        FOLDERS,
    ),
    "shapes": Drawing(layers, "shapes at each stage, as text", OF_NAME, ONE_OR_NAME),
    "summary": Drawing(
        layers, "layers, parameters, GFLOP and memory, as text", OF_NAME, ONE_OR_NAME
    ),
    "patches": Drawing(patches, "images cut into patches", OF_IMAGES, ONE, 1),
    "filters": Drawing(figure, "principal components of the patch embedding", OF_WEIGHTS, ONE),
    "attention": Drawing(
        attention,
        "attention maps of each layer and head, and rollout",
        (*OF_IMAGES, "--separate"),
        ONE,
        4,
    ),
    "positions": Drawing(figure, "similarity of position embeddings", OF_WEIGHTS, ONE),
    "distance": Drawing(figure, "mean attention distance by depth and head", OF_IMAGES, ONE, 128),
    "tokens": Drawing(figure, "patch features as colors", OF_IMAGES, ONE, 12),
    "confusion": Drawing(
        confusion, "confusion matrix of a run's newest evaluation", ("--out", "--device"), FOLDER
    ),
    "compare": Drawing(compared, "comparison of two runs on the same samples", OF_DATA, TWO, 500),
}


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return the settings that the flags change, as a dict from dotted keys to values."""
    return {"model.image_size": image_size(args)} if args.image_size else {}


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the subcommand and its flags. `augment` also accepts settings. Raises ValueError if
    they are invalid."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        _exit_without_subcommand(words)

    name, *remaining = words
    command = COMMANDS[name]
    title = f"{command.description.capitalize()}."
    parser = Parser(f"python launch/visualize.py {name}", title, setting_for)
    parser.set_defaults(command=name, samples=command.num_samples, **UNSET)

    if command.runs:
        parser.add_argument("runs", **command.runs)
    for flag in command.flags:
        parser.add_argument(flag, **FLAGS[flag])

    args = parser.parse_intermixed_args(remaining)
    if command.runs.get("nargs") == "?":
        args.runs = [args.runs] if args.runs else []

    _check(args)
    return args


def _exit_without_subcommand(words: list[str]) -> NoReturn:
    """List the subcommands and exit if `words` is empty or begins with --help.

    Otherwise, raise ValueError, because the first word is not a subcommand.
    """
    listed = [f"  {name:10} {command.description}" for name, command in COMMANDS.items()]
    text = "\n".join([__doc__ or "", *listed, "", "Each command has --help."])
    parser = Parser("python launch/visualize.py", text, setting_for)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.parse_args(words[:1] or ["--help"])
    raise AssertionError("argparse exits, or the word is not among its choices")


def _check(args: Namespace) -> None:
    """Raise ValueError if a size, a number of images or the file format is invalid."""
    sides = args.image_size or [1]
    if len(sides) > 2 or min(sides) < 1:
        raise ValueError("--image-size: expected one side length, or height and width, in pixels")

    if args.command == "augment":
        for name, count in (("images", args.images), ("draws", args.draws)):
            if not 1 <= count <= MAX_CELLS:
                raise ValueError(f"--{name} {count}: expected a number from 1 to {MAX_CELLS}")

    for flag in ("samples", "num_classes"):
        count = getattr(args, flag, None)
        if count is not None and count < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {count}: expected a positive number")

    if not (args.smooth or 0) >= 0:
        raise ValueError(f"--smooth {args.smooth}: expected a number of epochs, or 0")
    if args.out is not None:
        picture_format(args.out)


if __name__ == "__main__":
    run_command(main)
