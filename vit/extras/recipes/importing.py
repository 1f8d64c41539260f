"""Import a recipe of another project, and report how each setting was mapped.

The recipe is a command line, a YAML file of timm's train.py, or a Python config of big_vision.
`python_config` evaluates Python configs without running them. The project is detected
from the script and its flags.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vit.config.hints import all_keys, sections
from vit.config.io import from_dict
from vit.config.schema import Config
from vit.extras.recipes import big_vision, deit, deit3_jax, mae, timm_train, torchvision_references
from vit.extras.recipes.arguments import ParsedArguments, Table, read_mapping, read_words
from vit.extras.recipes.command import Command, split_command
from vit.extras.recipes.reading import Handler, Reading
from vit.extras.recipes.timm_common import optimizer_fields

DATA_ROOT = "data/imagenet"
"""The `data.root` of an imported config. The original data path cannot be used, because it contains
no shards."""
PROGRAMS = ("deit", "timm", "torchvision", "mae", "deit3_jax", "big_vision")
_OWN_NAMES = {
    "main_finetune.py": "mae",
    "submitit_finetune.py": "mae",
    "run_with_submitit.py": "deit",
    "distributed_train.sh": "timm",
}
"""Maps script names that only one project uses to that project."""
_NOT_READ = {
    r"\S*\b(main|submitit)_pretrain\.py": ("MAE's pre-training", "its main_finetune.py"),
    r"\S*\b(main|submitit)_linprobe\.py": ("MAE's linear probe", "launch/eval.py --linear-probe"),
    r"\S*\brun_class_finetuning\.py": ("BEiT's fine-tuning", "MAE's main_finetune.py"),
    r"\S*\brun_image_classification\w*\.py": ("Hugging Face's example", "timm's train.py"),
    r"\S*\b(open_clip_train[./]|src/training/|training\.)main\b": (
        "OpenCLIP's training",
        "timm's train.py",
    ),
    r"\S*\b(dist|slurm)_train\.sh|\S*\btrain\.py \S+\.py\b": (
        "MMPretrain's training",
        "timm's train.py",
    ),
    r"\S*\blightly-train": ("LightlyTrain's command", "timm's train.py"),
    r"\S*\bvit_jax[./]main\b": ("Google's vision_transformer", "a config of big_vision"),
    r"\S*\bclassy_train\.py": ("ClassyVision's training", "torchvision's train.py"),
    r"\S*\bmain\.py (.* )?--cfg\b": ("Swin's training", "DeiT's main.py"),
    r"\S*\bdinov2([./])(run|train|eval)\1": (
        "DINOv2's own program",
        "launch/eval.py --linear-probe",
    ),
}
"""Maps patterns for unsupported commands to their name and the most similar supported script."""


class _Program(NamedTuple):
    """A program whose commands are imported by following its tables of arguments."""

    handlers: Mapping[str, Handler]
    """The functions for arguments whose rule in the table is not enough."""
    finish: Handler
    """A function that records what no argument controls."""


_PROGRAMS = {
    "deit": _Program(deit.HANDLERS, deit.finish),
    "timm": _Program(timm_train.HANDLERS, timm_train.note_old_defaults),
    "torchvision": _Program(torchvision_references.HANDLERS, torchvision_references.finish),
    "mae": _Program(mae.HANDLERS, mae.finish),
    "deit3_jax": _Program(deit3_jax.HANDLERS, deit3_jax.finish),
}


class Imported(NamedTuple):
    """An imported recipe."""

    reading: Reading
    source: str
    """The command, or the name of the config file."""
    settings: dict[str, Any]
    """The imported settings by dotted key, in the order of the schema."""

    def config(self) -> Config:
        """Return the config. Raises ConfigError if settings contradict each other."""
        return from_dict(nested(self.settings), "the imported recipe")


def import_recipe(source: str, program: str | None = None, num_gpus: int | None = None) -> Imported:
    """Import a recipe from a command line, a file with a command or config, or stdin (`-`).

    program: one of `PROGRAMS`, needed if the project cannot be detected. num_gpus: the total number
    of GPUs, needed if the recipe does not state it.

    Raises ValueError if the recipe cannot be read. The error lists all unknown flags.
    """
    path = _file(source)
    name = path.name if path else source
    text = source
    if source == "-":
        text = sys.stdin.read()
    elif path is not None:
        text = path.read_text(encoding="utf-8")
    elif re.fullmatch(r"\S+\.(py|ya?ml|sh|txt)", source.strip()):
        raise ValueError(f"{source}: no such file: pass an existing file or a command")
    if program is not None and program not in PROGRAMS:
        raise ValueError(f"--program {program}: expected one of {', '.join(PROGRAMS)}")
    reading = _read_config(text, path, num_gpus)
    if reading is None and path is not None and path.suffix == ".py":
        raise ValueError(f"{path}: expected a config of big_vision, a command, or YAML of timm")
    if reading is None:
        name = " ".join(text.split())
        reading = _read_command(split_command(text), program, num_gpus)
    settings = {"data.root": DATA_ROOT, **reading.settings}
    return Imported(reading, name, {key: settings[key] for key in all_keys() if key in settings})


def _file(source: str) -> Path | None:
    """Return the path if `source` is a file, or None if `source` is a command."""
    try:
        return Path(source) if Path(source).is_file() else None
    except OSError:  # a command can be too long for a file name
        return None


def nested(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Group dotted keys by section."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        groups.setdefault(section, {})[name] = value
    return groups


def is_default(key: str, value: object, optimizer: str) -> bool:
    """Return whether `value` is the default of `key`. optimizer: the value of `optim.name`."""
    section, _, name = key.partition(".")
    fields = sections()[section][0].model_fields
    if section == "optim":
        fields = optimizer_fields(optimizer)
    if name not in fields:
        return False
    default = fields[name].default
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def _read_config(text: str, path: Path | None, num_gpus: int | None) -> Reading | None:
    """Read a config, or return None if `text` is a command."""
    if big_vision.is_config(text):
        return big_vision.read(text, "", [])
    if path is None or path.suffix not in (".yaml", ".yml"):
        return None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: expected arguments of timm's train.py, such as `model: vit_base`"
        )
    arguments = read_mapping(timm_train.TABLE, values)
    return _read_arguments("timm", timm_train.TABLE, arguments, num_gpus, (num_gpus or 1) > 1)


def _read_command(command: Command, program: str | None, num_gpus: int | None) -> Reading:
    program = _find_program(command, program)
    if program == "big_vision":
        return big_vision.read_command(command)
    gpus = num_gpus or command.num_gpus()
    is_distributed = bool(command.launcher) or (gpus or 1) > 1
    table = _table(program, command)
    parsed = read_words(table, command.words)
    return _read_arguments(program, table, parsed, gpus, is_distributed)


def _read_arguments(
    program: str, table: Table, parsed: ParsedArguments, num_gpus: int | None, is_distributed: bool
) -> Reading:
    """Map the arguments of a command or a YAML file."""
    args = parsed.values
    for argument in table.arguments:
        kind, _, option = argument.rule.partition(": ")
        if kind == "evaluates" and args[argument.name]:
            raise ValueError(
                f"{option.format(program=table.program)} only evaluates: run"
                " python launch/eval.py --checkpoint FILE --data SHARDS"
            )
    if "ngpus" in args:  # submitit starts the processes
        num_gpus = num_gpus or args["ngpus"] * args["nodes"]
        is_distributed = True
    reading = Reading(table, parsed, num_gpus, is_distributed)
    for text in parsed.shortened:
        reading.same("", text=f"note: {text}")
    recipe = [argument for argument in table.arguments if argument.in_recipe]
    reading.follow(recipe, _PROGRAMS[program].handlers)
    _PROGRAMS[program].finish(reading)
    reading.finish()
    return reading


def _table(program: str, command: Command) -> Table:
    return {
        "deit": deit.table_for(command),
        "timm": timm_train.TABLE,
        "torchvision": torchvision_references.TABLE,
        "mae": mae.table_for(command),
        "deit3_jax": deit3_jax.TABLE,
    }[program]


def _find_program(command: Command, stated: str | None) -> str:
    """Return the project whose script `command` runs. stated: the value of --program.

    Raises ValueError if the script is not supported or contradicts `stated`.
    """
    line = " ".join([command.script, *command.words])
    for pattern, (description, nearest) in _NOT_READ.items():
        if re.match(pattern, line):
            raise ValueError(
                f"{command.script} is {description}, which cannot be imported: write the"
                f" settings by hand, or start from a similar recipe of {nearest}"
            )
    name = command.script.rpartition("/")[2]
    own = "big_vision" if "big_vision" in command.script else _OWN_NAMES.get(name)
    if stated and own and stated != own:
        raise ValueError(f"--program {stated}: {command.script} belongs to {own}: omit --program")
    if program := stated or own:
        return program
    if name == "main.py":
        of_jax = {"--train-dataset-shards", "--droppath", "--layers", "--criterion"}
        return "deit3_jax" if of_jax & set(command.words) else "deit"
    if name.startswith("train"):
        return _timm_or_torchvision(command)
    raise ValueError(
        f"{command.script}: the program cannot be detected: pass --program with one of"
        f" {', '.join(PROGRAMS)}"
    )


def _timm_or_torchvision(command: Command) -> str:
    """Return the project whose train.py accepts these flags.

    If both projects accept the flags, the model name determines the project.
    """
    fits = []
    for program, table in (
        ("timm", timm_train.TABLE),
        ("torchvision", torchvision_references.TABLE),
    ):
        try:
            read_words(table, command.words)
        except ValueError:
            continue
        fits.append(program)
    if len(fits) == 1:
        return fits[0]
    is_torchvision = re.search(r"--model[= ]vit_[blh]_\d\d\b", " ".join(command.words))
    return "torchvision" if is_torchvision else "timm"
