"""A recipe of another program as our settings, with an account of each of its own.

What is given is a command line, a YAML file of timm's train.py, or a Python config of OpenMMLab's
MMPretrain or of big_vision, which is evaluated by `python_config`, never run. The program is
recognised by its script and its flags.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vit.config.base import Section
from vit.config.hints import sections
from vit.config.io import from_dict
from vit.config.schema import Config
from vit.extras.recipes import (
    big_vision,
    deit,
    deit3_jax,
    mae,
    mmpretrain,
    timm_train,
    torchvision_references,
)
from vit.extras.recipes.arguments import Given, Table, read_mapping, read_words
from vit.extras.recipes.command import Command, split_command
from vit.extras.recipes.reading import Reading

DATA_ROOT = "data/imagenet"
"""Where a written config expects shards: theirs are other files."""
PROGRAMS = ("deit", "timm", "torchvision", "mae", "deit3_jax", "mmpretrain", "big_vision")
_OWN_NAMES = {
    "main_finetune.py": "mae",
    "submitit_finetune.py": "mae",
    "run_with_submitit.py": "deit",
    "distributed_train.sh": "timm",
}
"""Scripts with a name that only one program has."""
_NOT_READ = {
    r"\S*\b(main|submitit)_pretrain\.py": ("MAE's pre-training", "its main_finetune.py"),
    r"\S*\b(main|submitit)_linprobe\.py": ("MAE's linear probe", "launch/eval.py --linear-probe"),
    r"\S*\brun_class_finetuning\.py": ("BEiT's fine-tuning", "MAE's main_finetune.py"),
    r"\S*\brun_image_classification\w*\.py": ("Hugging Face's example", "timm's train.py"),
    r"\S*\b(open_clip_train[./]|src/training/|training\.)main\b": (
        "OpenCLIP's training",
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
"""Script and arguments -> what it is, and what is nearest to it here."""
_Read = Callable[[Table, Given, int | None, bool], Reading]
_READERS: dict[str, _Read] = {
    "deit": deit.read,
    "timm": timm_train.read,
    "torchvision": torchvision_references.read,
    "mae": mae.read,
    "deit3_jax": deit3_jax.read,
}


class Imported(NamedTuple):
    """A recipe that was read."""

    reading: Reading
    given: str
    """The command, or the name of the config file."""
    settings: dict[str, Any]
    """Dotted key -> value, in the order of the schema."""

    def config(self) -> Config:
        """The config of these settings. Raises ConfigError if they contradict each other."""
        return from_dict(nested(self.settings), "the imported recipe")


def import_recipe(given: str, program: str | None = None, num_gpus: int | None = None) -> Imported:
    """Read `given`: a command line, the path of a file with one or of a config, `-` for stdin.

    program: one of `PROGRAMS`, where it cannot be recognised. num_gpus: of all nodes, where the
    command does not say, or for a YAML file or a config.

    Raises ValueError for what cannot be read: unknown flags with the nearest, all at once.
    """
    path = _file(given)
    name = path.name if path else given
    text = given
    if given == "-":
        text = sys.stdin.read()
    elif path is not None:
        text = path.read_text(encoding="utf-8")
    elif re.fullmatch(r"\S+\.(py|ya?ml|sh|txt)", given.strip()):
        raise ValueError(f"{given}: no such file")
    if program is not None and program not in PROGRAMS:
        raise ValueError(f"--program {program}: one of {', '.join(PROGRAMS)}")
    reading = _read_config(text, path, num_gpus)
    if reading is None:
        name = " ".join(text.split())
        reading = _read_command(split_command(text), program, num_gpus)
    return Imported(reading, name, _ordered({"data.root": DATA_ROOT, **reading.settings}))


def _file(given: str) -> Path | None:
    """The file that `given` names, if it is no command."""
    try:
        return Path(given) if Path(given).is_file() else None
    except OSError:  # too long for a name
        return None


def nested(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Dotted keys as sections."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def is_default(key: str, value: Any, optimizer: str) -> bool:
    """Whether `value` is what the setting `key` has by itself. optimizer: `optim.name`."""
    section, _, name = key.partition(".")
    for kind in sections()[section]:
        if section == "optim" and optimizer not in _names_of(kind):
            continue
        if name in kind.model_fields:
            default = kind.model_fields[name].default
            return bool(value == (list(default) if isinstance(default, tuple) else default))
    return False


def _names_of(kind: type[Section]) -> tuple[Any, ...]:
    """The names that choose a member of a union, such as ("adamw",)."""
    return getattr(kind.model_fields["name"].annotation, "__args__", ())


def _ordered(settings: dict[str, Any]) -> dict[str, Any]:
    keys = [
        f"{section}.{key}"
        for section, kinds in sections().items()
        for kind in kinds
        for key in kind.model_fields
    ]
    return {key: settings[key] for key in dict.fromkeys(keys) if key in settings}


def _read_config(text: str, path: Path | None, num_gpus: int | None) -> Reading | None:
    """Read a config; None if `text` is a command."""
    if big_vision.is_config(text):
        return big_vision.read(text, "", [])
    if mmpretrain.is_config(text):
        return mmpretrain.read(text, path, num_gpus)
    if path is None or path.suffix not in (".yaml", ".yml"):
        return None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected arguments of timm's train.py, as `model: vit_base`")
    given = read_mapping(timm_train.TABLE, values)
    return timm_train.read(timm_train.TABLE, given, num_gpus, (num_gpus or 1) > 1)


def _read_command(command: Command, program: str | None, num_gpus: int | None) -> Reading:
    program = _find_program(command, program)
    if program == "big_vision":
        return big_vision.read_command(command)
    if program == "mmpretrain":
        return mmpretrain.read_command(command, num_gpus)
    gpus = num_gpus or command.num_gpus()
    is_distributed = bool(command.launcher) or (gpus or 1) > 1
    table = _table(program, command)
    return _READERS[program](table, read_words(table, command.words), gpus, is_distributed)


def _table(program: str, command: Command) -> Table:
    return {
        "deit": deit.table_for(command),
        "timm": timm_train.TABLE,
        "torchvision": torchvision_references.TABLE,
        "mae": mae.table_for(command),
        "deit3_jax": deit3_jax.TABLE,
    }[program]


def _find_program(command: Command, given: str | None) -> str:
    """Return the program that `command` runs. given: the value of --program.

    Raises ValueError if no reader exists for the script, or if it contradicts `given`.
    """
    line = " ".join([command.script, *command.words])
    for pattern, (what, nearest) in _NOT_READ.items():
        if re.match(pattern, line):
            raise ValueError(
                f"{command.script} is {what}, which is not read: write its settings by hand;"
                f" nearest: {nearest}"
            )
    name = command.script.rpartition("/")[2]
    own = "big_vision" if "big_vision" in command.script else _OWN_NAMES.get(name)
    if given and own and given != own:
        raise ValueError(f"--program {given}: {command.script} belongs to {own}: omit --program")
    if program := given or own:
        return program
    first = command.words[0] if command.words else ""
    if first.endswith(".py") and name in ("train.py", "dist_train.sh", "slurm_train.sh"):
        return "mmpretrain"
    if name == "main.py":
        of_jax = {"--train-dataset-shards", "--droppath", "--layers", "--criterion"}
        return "deit3_jax" if of_jax & set(command.words) else "deit"
    if name.startswith("train"):
        return _timm_or_torchvision(command)
    raise ValueError(
        f"{command.script}: it is not known which program this is: name it with --program, one of"
        f" {', '.join(PROGRAMS)}"
    )


def _timm_or_torchvision(command: Command) -> str:
    """Whose train.py takes these flags. Names of torchvision's ViTs decide where both do."""
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
