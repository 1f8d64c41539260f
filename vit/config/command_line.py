"""Parse the arguments that choose a config: the file, overrides, and allowed changes."""

from vit.config.hints import setting_for
from vit.system.command_line import Parser


def config_parser(
    prog: str, description: str | None, config_help: str = "YAML file of a recipe"
) -> Parser:
    """Return a parser for `--config` and `section.key=value` (`overrides`)."""
    parser = Parser(prog, description, setting_for)
    parser.add_argument("--config", required=True, metavar="FILE", help=config_help)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that override the file"
    )
    return parser


def training_parser(prog: str, description: str | None) -> Parser:
    """Return a parser for `--config`, `--allow-change` and `section.key=value` (`overrides`)."""
    parser = config_parser(
        prog, description, "YAML file with the settings that differ from the defaults"
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume even if this setting differs from the checkpoint's",
    )
    return parser
