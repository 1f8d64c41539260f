"""A finished data set as `verify` sees it: its records, and the results of the checks.

A data set in a folder is read in place. For a data set at a URL everything but the shards is
copied to a temporary folder. (`vit.data.shards.data_set` is the format, and opens a split of it.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from data_prep.errors import PrepError
from data_prep.write.card_text import Classes
from data_prep.write.index_records import renamed_errors
from data_prep.write.output import temporary_folder
from vit.data.shards.index_file import first_samples
from vit.data.shards.info_file import describe_split, read_info
from vit.data.shards.members import recorded_layout
from vit.data.shards.split import Split
from vit.data.shards.stores import Version
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError, write_json
from vit.system.urls import local_path


@dataclass
class SplitFiles:
    """One split: its records, and the results of the checks."""

    name: str
    described: dict[str, Any]
    index: np.ndarray | None = None
    """The index file, mapped; None if it does not match."""
    sidecars: dict[str, dict[str, Any]] = field(default_factory=dict)
    present: list[int] = field(default_factory=list)
    """Numbers of the shards that exist in their recorded size."""
    seen: dict[int, np.ndarray] = field(default_factory=dict)
    """SEEN_DTYPE of each shard that was read."""
    num_bytes: int = 0
    """Bytes of the existing tars."""
    num_checked: int = 0

    @property
    def filenames(self) -> list[str]:
        return self.described["filenames"]

    @property
    def lengths(self) -> list[int]:
        """Number of samples of each shard."""
        return self.described["shard_lengths"]

    @property
    def firsts(self) -> list[int]:
        """Number of each shard's first sample."""
        return first_samples(self.lengths)[:-1]

    @property
    def num_samples(self) -> int:
        """Recorded number of samples."""
        return sum(self.lengths)

    def sha256_of(self, name: str) -> str | None:
        """Return the recorded hash of a shard."""
        if recorded := self.described.get("shard_sha256"):
            return recorded[self.filenames.index(name)]
        return self.sidecars.get(name, {}).get("sha256")

    @property
    def quarantined(self) -> list[dict[str, Any]]:
        """The entries of all sidecars."""
        return [
            entry for sidecar in self.sidecars.values() for entry in sidecar.get("quarantined", [])
        ]

    @property
    def changed(self) -> Counter[str]:
        """Number of images that the writer converted, by reason."""
        changed = (Counter(sidecar.get("changed", {})) for sidecar in self.sidecars.values())
        return sum(changed, Counter[str]())

    def labels(self) -> np.ndarray:
        """Return the labels of all samples read, (n,) int32; after a quick check, of the index."""
        if self.seen:
            return np.concatenate([rows["label"] for rows in self.seen.values()])
        return np.empty(0, np.int32) if self.index is None else np.asarray(self.index["label"])


@dataclass
class DataSet(Classes):
    """A folder of shards and its `_info.json`; for a URL a copy of all but the shards."""

    root: Path
    shown: str
    """The folder or URL that the user gave."""
    tars_at: str | None
    """URL of the shards; None: they are in `root`."""
    info: dict[str, Any]
    parts: list[SplitFiles]
    num_hashed: int = 0
    """Number of shards whose sha256 was compared."""
    catalogue_compared: bool = False

    @property
    def ours(self) -> bool:
        """Written by our writer, not indexed afterwards."""
        return "catalogue" in self.info

    @property
    def seed(self) -> int:
        """The seed of the hashes in the catalogue."""
        return int((self.info.get("options") or {}).get("seed", 0)) if self.ours else 0

    @property
    def index_it(self) -> str:
        """The remedy for missing files that accompany the tars."""
        return f"run `python -m data_prep.index {quote(self.shown)}`, which writes it"

    def class_name(self, label: int) -> str:
        """Return a class in words, for a message."""
        return f"class {self.class_names[label] if 0 <= label < len(self.class_names) else label}"

    def sample_name(self, part: SplitFiles, shard: int, row: int) -> str:
        """Return a sample for a message: its shard and its key, without an index its position."""
        place = f"row {row}"
        if part.index is not None and self.tars_at is None:
            layout = recorded_layout(self.info, self.root / part.filenames[0])
            split = Split(
                self.root,
                part.name,
                part.filenames,
                part.lengths,
                part.index,
                self.recorded_classes or 0,
                [],
                layout=layout,
            )
            with suppress(ShardError, OSError), closing(split):
                place = split.key(part.firsts[shard] + row)
        return f"{part.filenames[shard]} {place}"


@contextmanager
def opened_data_set(place: str) -> Iterator[DataSet]:
    """Open the data set at `place`, a folder or a URL.

    Raises PrepError or ShardError if nothing can be checked.
    """
    root = local_path(place)
    if root is not None:
        yield _open(root, place, None)
        return
    with temporary_folder() as folder, renamed_errors(place, folder):
        remote = RemoteFolder(place.rstrip("/"))
        write_json(folder / "_info.json", remote.read_info())
        info = read_info(folder)
        stems = [name.removesuffix(".tar") for name in tars_of(info)]
        names = ["quarantine.jsonl", "dataset.md", "contact_sheet.png"]
        names += [f"{split}.index.npy" for split in info["splits"]]
        names += [f"{stem}.{kind}" for stem in stems for kind in ("idx", "json")]

        def fetch(name: str, version: Version | str) -> None:
            if isinstance(version, Version):  # a missing file is reported as in a folder
                remote.fetch(name, version, folder / name)

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(fetch, names, remote.stats(names)))
        yield _open(folder, place, str(remote))


def _open(root: Path, shown: str, url: str | None) -> DataSet:
    if (root / "_writing.json").exists() and not (root / "_info.json").exists():
        raise PrepError(
            f"{root}: not finished yet; run the command that writes it again, it continues"
        )
    info = read_info(root)
    tars_at = url
    if "shards_at" in info and not any((root / name).exists() for name in tars_of(info)):
        tars_at = info["shards_at"]
    for name in info["splits"]:
        describe_split(info, name, shown)
    parts = [SplitFiles(name, described) for name, described in info["splits"].items()]
    return DataSet(root, shown, tars_at, info, parts)


def tars_of(info: Mapping[str, Any]) -> list[str]:
    """Return the file names of all shards."""
    return [
        name for described in info["splits"].values() for name in described.get("filenames", [])
    ]
