"""What a data set's card is made of: its records, its index and some of its images."""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.write.output import Output
from data_prep.write.samples import stable_hash
from vit.data.decode.images import decode
from vit.data.shards.index_file import first_samples, open_index
from vit.data.shards.info_file import read_info
from vit.system.files import ShardError

THREADS = 8
"""Images decoded at a time."""


@dataclass(frozen=True)
class Card:
    """The data set that a card describes."""

    info: Mapping[str, Any]
    indexes: Mapping[str, np.ndarray]
    """INDEX_DTYPE of each split; the first is the training split."""
    tars_at: str
    """Folder or URL of the shards."""
    quarantined: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        # not the folder's name: equal data sets have equal cards
        return str(self.info.get("source", "data set"))

    @property
    def num_classes(self) -> int:
        known = len(self.info.get("class_names") or []) or self.info.get("num_classes")
        return known or 1 + max(int(index["label"].max()) for index in self.indexes.values())

    @property
    def num_images(self) -> int:
        return sum(map(len, self.indexes.values()))

    def class_name(self, label: int) -> str:
        names = self.info.get("class_names") or []
        return str(names[label]) if label < len(names) else f"class {label}"

    def images_per_class(self, split: str) -> np.ndarray:
        """(num_classes,) images of each class."""
        return np.bincount(self.indexes[split]["label"], minlength=self.num_classes)

    def image(self, split: str, row: int) -> Image.Image:
        """Sample `row` of a split in RGB; safe to call from several threads."""
        found = self.indexes[split][row]
        described = self.info["splits"][split]
        shard = bisect.bisect_right(first_samples(described["shard_lengths"]), row) - 1
        tar = f"{self.tars_at}/{described['filenames'][shard]}"
        data = _read_range(tar, int(found["offset"]), int(found["size"]))
        try:
            return Image.fromarray(decode(data))
        except ValueError as error:
            raise ShardError(
                f"{self.name}: image {row} of {split}: {error}; `python -m data_prep.verify`"
                " reports more"
            ) from error


def load_card(output: Output, folder: Path) -> Card:
    """The card's data. folder: where files of an output at a URL are fetched to.

    Raises ShardError if something is missing.
    """
    info = output.read_json("_info.json") if output.local is None else read_info(output.local)
    if info is None:
        raise ShardError(f"{output}: no _info.json; expected a finished data set")
    indexes = {split: _load_index(output, split, folder) for split in info["splits"]}
    quarantined = []
    if info.get("quarantined"):
        lines = output.fetch("quarantine.jsonl", folder).read_bytes().splitlines()
        quarantined = [json.loads(line) for line in lines]
    return Card(info, indexes, str(info.get("shards_at", output)), quarantined)


def _load_index(output: Output, split: str, folder: Path) -> np.ndarray:
    name = f"{split}.index.npy"
    if output.size(name) < 0:
        raise ShardError(
            f"{output}/{name}: no such file; run `python -m data_prep.index {output}`, which"
            " writes it"
        )
    return open_index(output.fetch(name, folder))


def _read_range(place: str, offset: int, size: int) -> bytes:
    if "://" not in place:
        with open(place, "rb") as file:
            return os.pread(file.fileno(), size, offset)
    import fsspec  # here, as a local folder needs none of it

    system, path = fsspec.core.url_to_fs(place)
    return system.cat_file(path, start=offset, end=offset + size)


def spread(num_rows: int, num_chosen: int, *seed: Any) -> list[int]:
    """Ascending row numbers, one from each of `num_chosen` equal stretches, chosen by a hash.

    All rows if there are not more.
    """
    if num_chosen >= num_rows:
        return list(range(num_rows))
    edges = [part * num_rows // num_chosen for part in range(num_chosen + 1)]
    chosen = []
    for part, (low, high) in enumerate(itertools.pairwise(edges)):
        chance = int.from_bytes(stable_hash("spread", *seed, part), "little")
        chosen.append(low + chance % (high - low))
    return chosen
