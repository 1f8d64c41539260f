"""List the programs whose recipes are imported, and detect the program of a command."""

import re

from vit.extras.recipes import big_vision, deit, deit3_jax, mae, timm_train, torchvision_references
from vit.extras.recipes.command import Command

PROGRAMS = {
    "deit": deit.PROGRAM,
    "timm": timm_train.PROGRAM,
    "torchvision": torchvision_references.PROGRAM,
    "mae": mae.PROGRAM,
    "deit3_jax": deit3_jax.PROGRAM,
    "big_vision": big_vision.PROGRAM,
}

_OWN_NAMES = {
    "main_finetune.py": "mae",
    "submitit_finetune.py": "mae",
    "run_with_submitit.py": "deit",
    "distributed_train.sh": "timm",
}
"""Maps script names that only one project uses to that project."""

_FLAGS_OF_DEIT3_JAX = {"--train-dataset-shards", "--droppath", "--layers", "--criterion"}
"""Flags of deit3_jax's main.py that DeiT's main.py does not have."""

_NOT_READ = {
    r"\S*\b(main|submitit)_pretrain\.py": ("MAE's pre-training", "its main_finetune.py"),
    r"\S*\b(main|submitit)_linprobe\.py": ("MAE's linear probe", "its main_finetune.py"),
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
    r"\S*\bdinov2([./])(run|train|eval)\1": ("DINOv2's own program", "timm's train.py"),
}
"""Maps patterns for unsupported commands to their name and the most similar supported script."""


def find_program(command: Command, stated: str | None) -> str:
    """Return the project whose script `command` runs. stated: the value of --program.

    Raises ValueError if the script is not supported or contradicts `stated`.
    """
    _refuse_unsupported(command)

    name = command.script.rpartition("/")[2]
    owner = "big_vision" if "big_vision" in command.script else _OWN_NAMES.get(name)
    program = stated or owner
    if owner and program != owner:
        raise ValueError(f"--program {stated}: {command.script} belongs to {owner}: omit --program")
    if program:
        return program

    # Several projects have a main.py or a train.py, which differ in their flags.
    if name == "main.py":
        return "deit" if _FLAGS_OF_DEIT3_JAX.isdisjoint(command.words) else "deit3_jax"
    if name.startswith("train"):
        return _timm_or_torchvision(command)
    raise ValueError(
        f"{command.script}: the program cannot be detected: pass --program with one of"
        f" {', '.join(PROGRAMS)}"
    )


def _refuse_unsupported(command: Command) -> None:
    """Raise ValueError if `command` runs a known script that cannot be imported."""
    line = " ".join([command.script, *command.words])
    for pattern, (description, nearest) in _NOT_READ.items():
        if re.match(pattern, line):
            raise ValueError(
                f"{command.script} is {description}, which cannot be imported: write the"
                f" settings by hand, or start from a similar recipe of {nearest}"
            )


def _timm_or_torchvision(command: Command) -> str:
    """Return the project whose train.py accepts these flags.

    If both projects accept the flags, the model name determines the project.
    """
    fits = []
    for name in ("timm", "torchvision"):
        try:
            PROGRAMS[name].parse(command)
        except ValueError:
            continue
        fits.append(name)
    if len(fits) == 1:
        return fits[0]

    is_torchvision = re.search(r"--model[= ]vit_[blh]_\d\d\b", " ".join(command.words))
    return "torchvision" if is_torchvision else "timm"
