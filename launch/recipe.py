"""Import a recipe from another program, compare two recipes, or show one.

    python launch/recipe.py import "torchrun --nproc_per_node=8 main.py --model deit_base_patch16_LS
        --batch 256 --lr 3e-3 ..." --out deit3_b16.yaml
    python launch/recipe.py import train_hparams.yaml --gpus 8           for timm's train.py
    python launch/recipe.py import big_vision/configs/vit_s16_i1k.py
    python launch/recipe.py diff configs/vit_b16.yaml runs/mine
    python launch/recipe.py show configs/vit_b16.yaml

`import` writes the recipe as YAML for this project. For each of the recipe's settings, including
defaults, it prints whether this project's setting is the same, differs or does not exist. It
supports main.py of DeiT, ViT-5 and RoPE-ViT, MAE's main_finetune.py, train.py of timm and
torchvision, deit3-jax and big_vision. It does not run any code from these programs. Exit status: 0
done, 2 a mistake to correct.
"""

import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import check_versions  # noqa: F401
from rich.console import Console

from vit.config.hints import setting_for
from vit.config.schema import Config
from vit.distributed import process_group
from vit.distributed.exit import run_command
from vit.distributed.process_group import World
from vit.extras.recipes.difference import read_recipe
from vit.extras.recipes.importing import import_recipe
from vit.extras.recipes.preview import curves_of, groups_table, in_words, steps_line
from vit.extras.recipes.programs import PROGRAMS
from vit.extras.recipes.rates import IMAGENET
from vit.extras.recipes.summary import account, yaml_text
from vit.system.command_line import Parser
from vit.system.files import picture_format, replacing, report_write_errors
from vit.system.optional import needed_for

FILE_COLUMNS = 100
"""The width in characters of the table of parameter groups in a file."""
SHEET_IMAGES = 6
SHEET_DRAWS = 4
"""The numbers of images, and of augmented versions of each, on the contact sheet."""


def main() -> World | None:
    """Run the subcommand, and return the process group that it joined, or None."""
    args = read_command_line()
    return COMMANDS[args.command](args)


def import_(args: Namespace) -> None:
    """Write another program's recipe as YAML, and print how each setting was translated."""
    imported = import_recipe(args.recipe, args.program, args.gpus)
    imported.config()  # raises an error for invalid settings, before a file is written
    report = account(imported)
    text = yaml_text(imported, args.out)

    if args.out is None:
        print(report, file=sys.stderr)
        print(text, end="")
        return
    with report_write_errors(args.out, "--out "):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(args.out) as file:
            file.write(text.encode())

    print(report)
    print(f"\n{args.out}")


def diff(args: Namespace) -> None:
    """Print the settings that differ between two recipes, and their effects."""
    first, second = (read_recipe(path) for path in args.recipes)
    print(in_words(first, second, (str(args.recipes[0]), str(args.recipes[1]))))


def show(args: Namespace) -> World:
    """Print the parameter groups, and draw the learning rates and, if data exist, augmented
    images."""
    config = read_recipe(args.recipe, args.overrides)
    world = process_group.join_world("cpu")
    print(steps_line(config, args.images_per_epoch))
    Console(width=None if sys.stdout.isatty() else FILE_COLUMNS).print(groups_table(config))
    _draw(config, args, world)
    return world


def _draw(config: Config, args: Namespace, world: World) -> None:
    """Draw learning rates and, if the data exist, augmented images. Print the pictures' paths."""
    with needed_for("show"):
        from vit.extras.report.contact_sheet import make_contact_sheet
        from vit.extras.report.recipe_curves import draw_curves

    name = args.recipe.stem or args.recipe.name
    picture = args.out or Path(f"recipe_{name}.png")
    curves = curves_of(config, args.images_per_epoch)
    print(draw_curves(config, f"Recipe {name}", picture, *curves))

    sheet = picture.with_stem(f"{picture.stem}_augment")
    try:
        print(make_contact_sheet(config, SHEET_IMAGES, SHEET_DRAWS, sheet, world.device))
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        print(f"no contact sheet of the augmentation: {reason}", file=sys.stderr)


COMMANDS = {"import": import_, "diff": diff, "show": show}


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the subcommand and its flags. Raises ValueError if they are invalid."""
    remaining = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser("python launch/recipe.py", __doc__)
    parser.add_argument("command", choices=list(COMMANDS))
    if not remaining or remaining[0] not in COMMANDS:
        parser.parse_args(remaining[:1] or ["--help"])

    command = remaining.pop(0)
    args = _READ[command](remaining)
    args.command = command
    return args


def _read_import(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "python launch/recipe.py import",
        "A command line in quotes, a file that contains one (.sh, .txt), a YAML file of timm's"
        "\ntrain.py, a Python config of big_vision, or - for standard input.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="command line, file, or -")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="YAML file to write, including its folder (default: standard output)",
    )
    parser.add_argument(
        "--program", choices=PROGRAMS, help="source program, if it cannot be detected"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of all nodes, if the command does not state it"
    )

    args = parser.parse_args(arguments)
    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"--gpus {args.gpus}: expected a positive number")
    return args


def _read_diff(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "python launch/recipe.py diff",
        "Print the differences of two recipes, the most important first.",
    )
    parser.add_argument(
        "recipes",
        nargs=2,
        type=Path,
        metavar="RECIPE",
        help="config file, its name (vit_b16), or run folder",
    )
    return parser.parse_args(arguments)


def _read_show(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "python launch/recipe.py show",
        "Print the parameter groups, and draw learning rates and decay. If the data exist, draw a"
        "\ncontact sheet of augmented images next to the picture.",
        setting_for,
    )
    parser.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="config file, its name (vit_b16), or run folder"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="picture to write: .png, .pdf or .svg (default: recipe_<name>.png)",
    )
    parser.add_argument(
        "--images-per-epoch",
        type=int,
        default=IMAGENET,
        metavar="N",
        help="(default: ImageNet-1k's, 1,281,167)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # otherwise argparse reports the argument as required
        metavar="section.key=value",
        help="settings that override the file",
    )

    args = parser.parse_intermixed_args(arguments)
    if args.images_per_epoch < 1:
        raise ValueError(f"--images-per-epoch {args.images_per_epoch}: expected a positive number")

    if args.out is not None:
        picture_format(args.out)
    return args


_READ = {"import": _read_import, "diff": _read_diff, "show": _read_show}


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` causes no traceback
    run_command(main)
