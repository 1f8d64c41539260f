"""Look at what a config does before training with it.

    python launch/visualize.py augment --config configs/vit_b16.yaml data.root=data/imagenet
    python launch/visualize.py augment --config configs/demo.yaml --images 8 --draws 5 \\
        --out sheet.png augment.three_augment=true

`augment` writes a contact sheet: for some training images the original, several draws of the
augmentation, each with what was done, and one with mixing. Settings are `section.key=value` and
override the file. Exit status: 0 done, 2 a mistake to correct.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import check_versions  # noqa: F401

from vit.config.hints import setting_for
from vit.config.io import load_config
from vit.ranks import distributed
from vit.ranks.distributed import World
from vit.ranks.exit import run_command
from vit.report.contact_sheet import make_contact_sheet
from vit.system.command_line import Parser


def main() -> World:
    """Run the command line above; return the world that was joined."""
    args = read_command_line()
    config = load_config(args.config, args.overrides).config
    world = distributed.join_world(config.train.device)
    out = args.out or Path(f"augment_{Path(args.config).stem}.png")
    print(make_contact_sheet(config, args.images, args.draws, out, world.device))
    return world


def read_command_line(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the flags, and the settings as `overrides`. Raises ValueError for mistakes."""
    parser = Parser("python launch/visualize.py", __doc__, setting_for)
    parser.add_argument("command", choices=["augment"], help="contact sheet of the augmentation")
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="YAML file with what differs from the defaults",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="picture to write (default: augment_<name of the config>.png)",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=6,
        metavar="N",
        help="rows of the sheet (default: 6; complete groups where images mix)",
    )
    parser.add_argument(
        "--draws", type=int, default=4, metavar="N", help="draws of each image (default: 4)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that override the file"
    )
    args = parser.parse_intermixed_args(arguments)
    for name in ("images", "draws"):
        if not 1 <= getattr(args, name) <= 64:
            raise ValueError(f"--{name} {getattr(args, name)}: give a number from 1 to 64")
    return args


if __name__ == "__main__":
    run_command(main)
