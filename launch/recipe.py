"""Take a recipe over from another program, compare two, or look at one.

    python launch/recipe.py import "torchrun --nproc_per_node=8 main.py --model deit_base_patch16_LS
        --batch 256 --lr 3e-3 ..." --out deit3_b16.yaml
    python launch/recipe.py import train_hparams.yaml --gpus 8           of timm's train.py
    python launch/recipe.py import configs/vit-base-p16_64xb64_in1k.py   of MMPretrain or big_vision
    python launch/recipe.py diff configs/vit_b16.yaml runs/mine
    python launch/recipe.py show configs/vit_b16.yaml

`import` writes our YAML and says of each of their settings what is the same, what differs and what
cannot be said here; their defaults count, too. It knows DeiT's, ViT-5's and RoPE-ViT's main.py,
MAE's main_finetune.py, timm's and torchvision's train.py, deit3-jax, MMPretrain and big_vision.
Nothing of theirs is run. Exit status: 0 done, 2 a mistake to correct.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import check_versions  # noqa: F401

from vit.ranks.exit import run_command
from vit.recipes.importing import PROGRAMS, import_recipe
from vit.recipes.words import account, yaml_text
from vit.system.command_line import Parser
from vit.system.files import replacing


def main() -> None:
    """Run the command line above."""
    args = read_command_line()
    COMMANDS[args.command](args)


def import_(args: Namespace) -> None:
    """Write the YAML of a recipe of another program, and what each of its settings means here."""
    imported = import_recipe(args.recipe, args.program, args.gpus)
    imported.config()  # nothing is written of what cannot be loaded
    text = yaml_text(imported, args.out)
    if args.out is None:
        print(account(imported), file=sys.stderr)
        print(text, end="")
        return
    try:
        with replacing(args.out) as file:
            file.write(text.encode())
    except OSError as error:
        raise ValueError(f"{args.out}: cannot be written ({error.strerror})") from None
    print(account(imported))
    print(f"\n{args.out}")


COMMANDS = {"import": import_}


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the command and its flags. Raises ValueError for mistakes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser("python launch/recipe.py", __doc__)
    parser.add_argument("command", choices=list(COMMANDS))
    if not words or words[0] not in COMMANDS:
        parser.parse_args(words[:1] or ["--help"])
    command = words.pop(0)
    args = _READ[command](words)
    args.command = command
    return args


def _read_import(words: Sequence[str]) -> Namespace:
    parser = Parser(
        "python launch/recipe.py import",
        "Their command line in quotes, a file with it (.sh, .txt), a YAML file of timm's train.py,"
        "\na Python config of MMPretrain or big_vision, or - for standard input.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="command line, file, or -")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="YAML file to write (default: standard output)"
    )
    parser.add_argument(
        "--program", choices=PROGRAMS, help="whose recipe it is, where that cannot be seen"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of all nodes, where the command does not say"
    )
    args = parser.parse_args(words)
    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"--gpus {args.gpus}: give a number from 1 on")
    return args


_READ = {"import": _read_import}


if __name__ == "__main__":
    run_command(main)
