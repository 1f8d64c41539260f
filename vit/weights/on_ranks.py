"""Read a weights file on rank 0, and send the weights to all ranks."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from vit.distributed.process_group import World
from vit.weights.files import LoadedWeights
from vit.weights.save import bytes_of


def read_once(read: Callable[[], LoadedWeights], world: World) -> LoadedWeights:
    """Call `read` on rank 0, and return the result in host memory on all ranks.

    If `read` fails, the other ranks raise AlreadyReported.
    """
    return on_all_ranks(world.on_main(read), world)


def on_all_ranks(loaded: LoadedWeights | None, world: World) -> LoadedWeights:
    """Return the weights of rank 0 on all ranks. loaded: the weights, None on the other ranks."""
    described = world.broadcast_from_main(lambda: {} if loaded is None else _describe(loaded))
    if loaded is None:
        loaded = _like(described)
    # Broadcast the weights as bytes, because backends do not support every dtype.
    world.broadcast_(bytes_of(tensor) for tensor in loaded.weights.values())
    return loaded


def _describe(loaded: LoadedWeights) -> dict[str, Any]:
    """Return everything in `loaded` except the tensor values, as JSON."""
    names = [field.name for field in fields(loaded) if field.name not in ("path", "weights")]
    return {
        "path": str(loaded.path),
        "fields": {name: getattr(loaded, name) for name in names},
        "tensors": [
            (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in loaded.weights.items()
        ],
    }


def _like(described: dict[str, Any]) -> LoadedWeights:
    """Return weights as described by `_describe`, with uninitialized values."""
    weights = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, shape, dtype in described["tensors"]
    }
    values = described["fields"]
    for name in ("grid_size", "notes"):  # JSON has no tuples
        values[name] = None if values[name] is None else tuple(values[name])
    return LoadedWeights(Path(described["path"]), weights, **values)
