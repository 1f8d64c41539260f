"""Parse the command line of training: the config, overrides, and allowed changes."""

from __future__ import annotations

from vit.config.hints import setting_for
from vit.system.command_line import Parser


def training_parser(prog: str, description: str | None) -> Parser:
    """Return a parser for `--config`, `--allow-change` and `section.key=value` (`overrides`)."""
    parser = Parser(prog, description, setting_for)
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="YAML file with the settings that differ from the defaults",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume even if this setting differs from the checkpoint's",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that override the file"
    )
    return parser
