"""What a data set's card is made from: its records, index and images."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.write.catalogue import stable_hash
from data_prep.write.output import Output
from vit.data.decode.images import decode
from vit.data.shards.data_set import read_info
from vit.data.shards.index_file import open_index
from vit.system.files import ShardError

THREADS = 8
"""Images decoded at a time."""


@dataclass(frozen=True)
class Card:
    """What a card is made of."""

    name: str
    info: Mapping[str, Any]
    indexes: Mapping[str, np.ndarray]
    """INDEX_DTYPE of each split; the first is the training split."""
    read: Callable[[str, int], bytes]
    """Encoded image of a sample of a split, by its number; called from several threads."""
    quarantined: Sequence[Mapping[str, Any]] = ()

    @property
    def num_classes(self) -> int:
        known = len(self.info.get("class_names") or []) or self.info.get("num_classes")
        return known or 1 + max(int(index["label"].max()) for index in self.indexes.values())

    def class_name(self, label: int) -> str:
        names = self.info.get("class_names") or []
        return str(names[label]) if label < len(names) else f"class {label}"

    def images_per_class(self, split: str) -> np.ndarray:
        """(num_classes,) images of each class."""
        return np.bincount(self.indexes[split]["label"], minlength=self.num_classes)


def read_card_info(output: Output) -> Mapping[str, Any]:
    if output.local is not None:
        return read_info(output.local)
    info = output.read_json("_info.json")
    if info is None:
        raise ShardError(f"{output}: no _info.json; expected a finished data set")
    return info


def fetch_index(output: Output, name: str, folder: Path) -> np.ndarray:
    if output.size(name) < 0:
        raise ShardError(
            f"{output}/{name}: no such file; run `python -m data_prep.index {output}`, which"
            " writes it"
        )
    return open_index(output.fetch(name, folder))


def read_range(place: str, offset: int, size: int) -> bytes:
    if "://" not in place:
        with open(place, "rb") as file:
            return os.pread(file.fileno(), size, offset)
    import fsspec  # here, as a local folder needs none of it

    system, path = fsspec.core.url_to_fs(place)
    return system.cat_file(path, start=offset, end=offset + size)


def read_quarantine(
    output: Output, info: Mapping[str, Any], folder: Path
) -> list[Mapping[str, Any]]:
    if not info.get("quarantined"):
        return []
    return [
        json.loads(line)
        for line in output.fetch("quarantine.jsonl", folder).read_bytes().splitlines()
    ]


def decoded(card: Card, split: str, row: int) -> Image.Image:
    """One image in RGB."""
    try:
        return Image.fromarray(decode(card.read(split, row)))
    except ValueError as error:
        raise ShardError(
            f"{card.name}: image {row} of {split}: {error}; `python -m data_prep.verify` tells more"
        ) from error


def spread(num_rows: int, num_chosen: int, *seed: Any) -> list[int]:
    """Row numbers, ascending: from each of `num_chosen` equal stretches one that a hash chooses;
    all rows if there are not more."""
    if num_chosen >= num_rows:
        return list(range(num_rows))
    edges = [part * num_rows // num_chosen for part in range(num_chosen + 1)]
    chances = (
        int.from_bytes(stable_hash("spread", *seed, part), "little") for part in range(num_chosen)
    )
    return [
        low + chance % (high - low)
        for (low, high), chance in zip(itertools.pairwise(edges), chances, strict=True)
    ]
