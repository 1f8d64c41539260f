"""List the settings that differ between two recipes, and the known effect of each difference.

Settings with a published ablation come first, and harmless settings come last
(`vit.extras.recipes.effects`).
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.config import io as config_io
from vit.config.hints import sections
from vit.config.io import load_config
from vit.config.schema import Config
from vit.extras.recipes.effects import KINDS, effect_of
from vit.layers.presets import PRESETS
from vit.model import VisionTransformer
from vit.run_folder.paths import CONFIG_FILE

_IRRELEVANT = (
    "data.root",
    "data.train_split",
    "data.val_split",
    "init.checkpoint",
    "ema.decay",
    "ema.warmup",
    "ema.every_steps",
    "ema.after_epochs",
    "eval.best_by",
)
"""The settings that change neither the trained weights nor their evaluation."""

MAGNITUDE_STD = "augment.magnitude_std"
"""A setting of timm's augmentation policies. Other programs' policies have no value for it."""


class SettingDifference(NamedTuple):
    """A setting whose values differ between two recipes."""

    key: str
    first: object
    second: object
    kind: str
    """One of `vit.extras.recipes.effects.KINDS`."""
    text: str
    """The known effect of the setting, or "" if unknown."""


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a YAML file, a recipe name of this project, or a run folder."""
    if path.is_dir():
        file = path / CONFIG_FILE
        if not file.is_file():
            raise ValueError(
                f"{path}: not a run folder ({CONFIG_FILE} is missing): pass a config file"
            )
        path = file
    return load_config(path, overrides, used_here=False)


def compare(first: Config, second: Config) -> list[SettingDifference]:
    """Return the settings that differ, in order of importance. `run.dir` is ignored.

    If a config does not set a model setting, the default for the model's size is compared.
    """
    differences = []
    implied = [_implied_values(config) for config in (first, second)]
    unlike = config_io.differences(config_io.to_dict(first), config_io.to_dict(second))
    unlike.pop("run.dir", None)
    for key, (old, new) in unlike.items():
        old = implied[0].get(key) if old is None else old
        new = implied[1].get(key) if new is None else new
        is_unused = key == MAGNITUDE_STD and None in (old, new)
        if is_unused or old == new:
            continue

        effect = effect_of(key, (old, new))
        differences.append(SettingDifference(key, old, new, effect.kind, effect.text))

    order = [kind for kind, _ in KINDS]
    return sorted(differences, key=lambda difference: order.index(difference.kind))


def _implied_values(config: Config) -> dict[str, Any]:
    """Return the values that null settings take, given the model name and the augmentation."""
    augment = config.augment
    implied: dict[str, Any] = {}
    if augment.randaugment_layers and augment.randaugment_ops.startswith("timm"):
        implied[MAGNITUDE_STD] = 0.5
    elif augment.auto_augment in ("original", "originalr", "v0", "v0r"):
        implied[MAGNITUDE_STD] = 0.0

    match = re.fullmatch(r"vit_(?P<size>[a-zA-Z]+(400m)?)(?P<patch>\d+)", config.model.name)
    if match is None:
        return implied

    # A preset replaces some of the model's defaults.
    parameters = inspect.signature(VisionTransformer).parameters
    values = {name: parameter.default for name, parameter in parameters.items()}
    values |= {**PRESETS[match["size"]], "patch_size": int(match["patch"]), "num_classes": None}
    return implied | {f"model.{name}": value for name, value in values.items()}


def deviations(config: Config, recipe: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that can make the results of `config` differ from a published run.

    Paths, weight averaging and extra evaluations are ignored.

    Args:
        config: The config of the run.
        recipe: This project's config for the published run.
        settings: Overrides of `recipe`.
    """
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    published = read_recipe(Path(recipe), overrides)
    differences = [d for d in compare(published, config) if d.kind not in ("order", "harmless")]
    return [
        f"{difference.key} {change_text(difference)}"
        for difference in differences
        if difference.key not in _IRRELEVANT and not difference.key.startswith("eval.sets")
    ]


def change_text(difference: SettingDifference) -> str:
    """Return `first value -> second value`."""
    first, second = (_shown(difference.key, v) for v in (difference.first, difference.second))
    return f"{first} -> {second}"


def _shown(key: str, value: object) -> str:
    """Format the value of a setting.

    An empty list, such as no additional evaluation sets, is shown like `None`. A list of mappings
    is shown by its entries.
    """
    if value is None or value == []:
        meaning = _meaning_of_none(key)
        return "none" if meaning in (None, "none") else f"none ({meaning})"
    if isinstance(value, list) and isinstance(value[0], dict):
        return "; ".join(map(_entries, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _meaning_of_none(key: str) -> str | None:
    """Return what the schema's description of a setting says about `None`, or None if nothing.

    In "`None`: wait, and report it; ...", the meaning is "wait, and report it".
    """
    section, _, name = key.partition(".")
    # A key such as eval.sets.NAME.split has no field in its section.
    fields = (kind.model_fields.get(name) for kind in sections()[section])
    description = " ".join(str(field.description) for field in fields if field)
    match = re.search(r"`None`: (?P<meaning>.+?)( \(|;|\. |\.?$)", " ".join(description.split()))
    return match["meaning"] if match else None


def _entries(item: Mapping[str, object]) -> str:
    """Format an item of a list without its null entries."""
    return ", ".join(f"{name} {entry}" for name, entry in item.items() if entry is not None)
