"""Import a recipe of another project: read it, parse its arguments, and map them.

The recipe is a command line, a YAML file of timm's train.py, or a Python config of big_vision.
"""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from vit.config.hints import all_keys
from vit.config.io import from_dict
from vit.config.schema import Config
from vit.extras.recipes import big_vision, timm_train
from vit.extras.recipes.arguments import ParsedArguments, read_yaml
from vit.extras.recipes.command import split_command
from vit.extras.recipes.programs import PROGRAMS, find_program
from vit.extras.recipes.reading import Reading, Settings, map_arguments, same

DATA_ROOT = "data/imagenet"
"""The `data.root` of an imported config. The original data path cannot be used, because it contains
no shards."""


class Imported(NamedTuple):
    """An imported recipe."""

    reading: Reading
    settings: Settings
    """The imported settings by dotted key, in the order of the schema."""
    sections: dict[str, Settings]
    """The imported settings by section and name."""

    def config(self) -> Config:
        """Return the config. Raises ConfigError if settings contradict each other."""
        return from_dict(self.sections, "the imported recipe")


def import_recipe(source: str, program: str | None = None, num_gpus: int | None = None) -> Imported:
    """Import a recipe.

    Args:
        source: A command line, a file with a command or config, or `-` for stdin.
        program: One of `PROGRAMS`, needed if the project cannot be detected.
        num_gpus: The total number of GPUs, needed if the recipe does not state it.

    Raises ValueError if the recipe cannot be read. The error lists all unknown flags.
    """
    # A command can be too long for a file name, for which `Path.is_file` raises an error.
    path = Path(source) if os.path.isfile(source) else None
    text = source
    if source == "-":
        text = sys.stdin.read()
    elif path is not None:
        text = path.read_text(encoding="utf-8")
    elif re.fullmatch(r"\S+\.(py|ya?ml|sh|txt)", source.strip()):
        raise ValueError(f"{source}: no such file: pass an existing file or a command")

    if program is not None and program not in PROGRAMS:
        raise ValueError(f"--program {program}: expected one of {', '.join(PROGRAMS)}")

    reading = map_arguments(_parse(text, path, program, num_gpus))
    settings = {"data.root": DATA_ROOT, **reading.settings}
    settings = {key: settings[key] for key in all_keys() if key in settings}
    sections = defaultdict[str, Settings](dict)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return Imported(reading, settings, dict(sections))


def _parse(text: str, path: Path | None, program: str | None, num_gpus: int | None) -> Reading:
    """Parse a config or a command.

    Args:
        text: The config or the command.
        path: The file that contains it, if there is one.
        program: The program of the command, if the user stated it.
        num_gpus: The total number of GPUs, if the user stated it.
    """
    name = path.name if path else "-"
    launcher: list[str] = []
    if big_vision.is_config(text):
        program, parsed = "big_vision", big_vision.read_config(text)
    elif path is not None and path.suffix in (".yaml", ".yml"):
        program, parsed = "timm", read_yaml(timm_train.TABLE, text, path)
    elif path is not None and path.suffix == ".py":
        raise ValueError(f"{path}: expected a config of big_vision, a command, or YAML of timm")
    else:
        name = " ".join(text.split())
        command = split_command(text)
        launcher = command.launcher
        program = find_program(command, program)
        if program != "big_vision":  # its batch size is the total over all GPUs
            num_gpus = num_gpus or command.num_gpus()
        parsed = PROGRAMS[program].parse(command)

    _refuse_evaluation(parsed)
    args = parsed.values
    if "ngpus" in args:  # submitit starts the processes, so there is no launcher
        num_gpus = num_gpus or args["ngpus"] * args["nodes"]
    return Reading(
        program=PROGRAMS[program],
        source=name,
        table=parsed.table,
        args=args,
        stated=parsed.stated,
        num_gpus=num_gpus,
        is_distributed=bool(launcher) or "ngpus" in args or (num_gpus or 1) > 1,
        findings=tuple(same("", text=f"note: {sentence}") for sentence in parsed.shortened),
    )


def _refuse_evaluation(parsed: ParsedArguments) -> None:
    """Raise ValueError if the script would only evaluate."""
    for argument in parsed.table.arguments:
        kind, _, option = argument.rule.partition(": ")
        if kind == "evaluates" and parsed.values[argument.name]:
            raise ValueError(
                f"{option.format(program=parsed.table.program)} only evaluates: run"
                " python launch/eval.py --checkpoint FILE --data SHARDS"
            )
