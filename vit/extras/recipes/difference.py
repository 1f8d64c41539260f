"""Two recipes side by side, in words: which settings differ, and what each difference does.

Those that published ablations say something of come first, what is harmless last
(`vit.extras.recipes.effects`).
"""

from __future__ import annotations

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
from vit.run_folder import CONFIG_FILE

_ELSEWHERE = (
    *("data.root", "data.train_split", "data.val_split", "init.checkpoint"),
    *("train.ema_decay", "train.ema_warmup", "train.ema_every_steps", "train.ema_after_epochs"),
    *("train.ema_warmup_power", "train.ema_warmup_gamma"),
    "eval.best_by",
)
"""Settings that change neither what the weights learn nor how they are scored."""


class Difference(NamedTuple):
    """A setting that two recipes have different."""

    key: str
    first: Any
    second: Any
    kind: str
    """One of `vit.extras.recipes.effects.KINDS`."""
    text: str
    """What is known of its effect."""


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a YAML file, of one of our recipes by name, or of a run folder."""
    if path.is_dir():
        file = path / CONFIG_FILE
        if not file.is_file():
            raise ValueError(f"{path}: no run folder ({CONFIG_FILE} is missing): name a config")
        path = file
    return load_config(path, overrides, used_here=False)


def compare(first: Config, second: Config) -> list[Difference]:
    """Return what differs, by weight. The folder of a run is no difference.

    A setting of the model that is left to its size is one that has what the size has.
    """
    found = []
    own = [_own_values(config) for config in (first, second)]
    unlike = config_io.differences(config_io.to_dict(first), config_io.to_dict(second))
    for key, (old, new) in unlike.items():
        old = own[0].get(key) if old is None else old
        new = own[1].get(key) if new is None else new
        if key == "run.dir" or old == new:
            continue
        effect = effect_of(key, (old, new))
        found.append(Difference(key, old, new, effect.kind, effect.text))
    order = [kind for kind, _ in KINDS]
    return sorted(found, key=lambda difference: order.index(difference.kind))


def _own_values(config: Config) -> dict[str, Any]:
    """What settings are that the config leaves to the size, the network or the operations."""
    is_timms = config.augment.randaugment_ops.startswith("timm")
    found: dict[str, Any] = {"augment.randaugment_magnitude_std": 0.5 if is_timms else None}
    size = re.fullmatch(r"vit_([a-zA-Z]+(?:400m)?)(\d+)", config.model.name)
    if size is None:
        return found
    parameters = inspect.signature(VisionTransformer).parameters
    values = {name: parameter.default for name, parameter in parameters.items()}
    values |= {**PRESETS[size[1]], "patch_size": int(size[2]), "num_classes": None}
    return found | {f"model.{name}": value for name, value in values.items()}


def deviations(config: Config, recipe: str, settings: Mapping[str, Any]) -> list[str]:
    """Return what can make `config` learn or score otherwise than our config `recipe`, in words.

    settings: that the run to compare with had otherwise than `recipe`. Where data and first
    weights lie, the average of the weights and what else is evaluated are left out.
    """
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    theirs = read_recipe(Path(recipe), overrides)
    return [
        f"{found.key} {change_text(found)}"
        for found in compare(theirs, config)
        if found.kind not in ("order", "harmless")
        and found.key not in _ELSEWHERE
        and not found.key.startswith("eval.sets")
    ]


def change_text(difference: Difference) -> str:
    values = (difference.first, difference.second)
    return " -> ".join(_shown(difference.key, value) for value in values)


def _shown(key: str, value: Any) -> str:
    """A value in words; `None` with what the schema says it means."""
    if value is None or value == []:
        section, _, name = key.partition(".")
        # A key of three parts, eval.sets.NAME.split, is no field of its section.
        fields = (kind.model_fields.get(name) for kind in sections()[section])
        text = " ".join(" ".join(str(field.description) for field in fields if field).split())
        meaning = re.search(r"`None`: (.+?)( \(|;|\. |\.?$)", text)
        return f"none ({meaning[1]})" if meaning and meaning[1] != "none" else "none"
    if isinstance(value, list) and isinstance(value[0], dict):
        given = ({key: found for key, found in item.items() if found is not None} for item in value)
        return "; ".join(
            ", ".join(f"{key} {found}" for key, found in item.items()) for item in given
        )
    return f"{value:g}" if isinstance(value, float) else str(value)
