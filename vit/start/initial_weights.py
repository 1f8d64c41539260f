"""Load weights from a file on all ranks.

Rank 0 reads the file and broadcasts the weights, because other ranks may not have the file. Tensor
values are sent in collectives, and everything else through the store.

    for evaluation       rank 0: file -> tensors and their description -> all ranks
    `init.checkpoint`    rank 0: file -> its model -> the values of all models
"""

import sys
from typing import Any

from torch import nn

from vit.config import io as config_io
from vit.config.schema import Config, ModelConfig
from vit.distributed.process_group import World
from vit.system.files import WeightsError
from vit.training.run_data import RunData
from vit.weights.class_names import class_mismatch, select_classes
from vit.weights.files import LoadedWeights, fingerprint, load_weights, read_weights
from vit.weights.published import normalization_notes

_OF_NO_SHAPE = ("image_size", "_rate", "drop_path_schedule", "drop_path_form")
"""The endings of the names of settings that do not change tensor shapes."""


def load_initial_weights(
    model: nn.Module, config: Config, data: RunData, world: World
) -> dict[str, Any]:
    """Load `init.checkpoint` into `model` on all ranks, and return facts about the weights.

    The facts are `init_sha256`, a hash of the weights, and `init_source` for weights from the
    Hugging Face hub. Rank 0 reads the file and logs how the weights fit the model. Raises
    ValueError on rank 0 if they do not fit, and AlreadyReported on the other ranks.
    """
    checkpoint = config.init.checkpoint

    def read() -> dict[str, Any]:
        """Load the weights into `model`, and return facts about the weights. Only rank 0 calls
        this."""
        assert checkpoint is not None, "the caller checks"
        loaded = read_weights(checkpoint)
        for line in _load(
            model, loaded, config=config, class_names=data.class_names, num_classes=data.num_classes
        ):
            print(f"{loaded.path}: {line}", file=sys.stderr)
        # Hash the whole file, before classes are selected.
        facts: dict[str, Any] = {"init_sha256": fingerprint(loaded.weights)}
        return facts | ({"init_source": loaded.source} if loaded.source else {})

    facts = world.broadcast_from_main(read)
    world.broadcast_(model.state_dict().values())
    return facts


def _load(
    model: nn.Module,
    loaded: LoadedWeights,
    config: Config,
    class_names: list[str],
    num_classes: int,
) -> list[str]:
    """Load the weights of `init.checkpoint` into `model`, and return notes on how they fit."""
    init = config.init
    if init.select_classes:
        loaded = select_classes(loaded, class_names)
    try:
        notes = load_weights(model, loaded.weights, loaded.grid_size, init.reset_head)
    except WeightsError as error:
        cause = (
            _differing_settings(loaded.config, config.model)
            if loaded.config
            else _overriding_settings(config.model)
        )
        reason = f"{error}; {cause}" if cause else str(error)
        raise WeightsError(f"{loaded.path}: {reason}") from None

    if not init.reset_head:
        mismatch = class_mismatch(loaded, class_names, num_classes)
        if mismatch:
            notes.append(f"{mismatch}; init.reset_head=true starts with a new head")

    return [*loaded.report(notes), *normalization_notes(loaded, config.data, config.model.in_chans)]


def _overriding_settings(model: ModelConfig) -> str:
    """Return a message about settings that change the shapes of a named timm model, or ""."""
    fields = model.model_dump(exclude={"name", "in_chans", "num_classes"}, exclude_none=True)
    keys = [f"model.{key}" for key in fields if not key.endswith(_OF_NO_SHAPE)]
    if not keys or not model.name.startswith("timm/"):
        return ""

    return (
        f"the config's {', '.join(keys)} override the settings of {model.name}: to use that"
        f" model unchanged, set {' '.join(f'{key}=null' for key in keys)}"
    )


def _differing_settings(weights_config: dict[str, Any], model: ModelConfig) -> str:
    """Return text that lists differences in shape between the weights' own config and `model`, or
    ""."""
    stored = {"model": weights_config.get("model", {})}
    current = {"model": model.model_dump(mode="json")}
    changes = [
        f"{key} is {old} in the weights, {new} in this config"
        for key, (old, new) in config_io.differences(stored, current).items()
        if not key.endswith(_OF_NO_SHAPE)
    ]
    return ", ".join(changes)
