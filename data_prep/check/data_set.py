"""Open a finished data set for `verify`, and store the results of its checks.

A data set in a folder is read in place. For a data set at a URL, all files except the shards are
copied to a temporary folder. (`vit.data.shards.data_set` opens the splits for training.)
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
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
from vit.data.shards.reader import Version
from vit.data.shards.split import Split
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError, write_json
from vit.system.urls import local_path


@dataclass
class SplitFiles:
    """A split's records and the results of checking them."""

    name: str
    described: dict[str, Any]
    index: np.ndarray | None = None
    """The memory-mapped index file, or None if the index does not match the shards."""
    sidecars: dict[str, dict[str, Any]] = field(default_factory=dict)
    present: list[int] = field(default_factory=list)
    """The numbers of the shards that exist with their recorded size."""
    seen: dict[int, np.ndarray] = field(default_factory=dict)
    """An array of SEEN_DTYPE for each shard that was read."""
    num_bytes: int = 0
    """The total size of the existing tars in bytes."""
    num_checked: int = 0

    @property
    def filenames(self) -> list[str]:
        return self.described["filenames"]

    @property
    def lengths(self) -> list[int]:
        """The number of samples in each shard."""
        return self.described["shard_lengths"]

    @property
    def firsts(self) -> list[int]:
        """The index of the first sample of each shard."""
        return first_samples(self.lengths)[:-1]

    @property
    def num_samples(self) -> int:
        """The recorded number of samples."""
        return sum(self.lengths)

    def sha256_of(self, name: str) -> str | None:
        """Return the recorded sha256 of a shard."""
        if self.described.get("shard_sha256"):
            return self.described["shard_sha256"][self.filenames.index(name)]
        return self.sidecars.get(name, {}).get("sha256")

    @property
    def quarantined(self) -> list[dict[str, Any]]:
        """The quarantine entries (skipped images) from all sidecars."""
        return list(chain(*(each.get("quarantined", []) for each in self.sidecars.values())))

    @property
    def changed(self) -> Counter[str]:
        """The number of images that the writer converted, by reason."""
        return sum(
            (Counter(each.get("changed", {})) for each in self.sidecars.values()), Counter[str]()
        )

    def labels(self) -> np.ndarray:
        """Return the labels, (n,) int32, of all samples that were read, or of the index in a quick
        check."""
        if self.seen:
            return np.concatenate([rows["label"] for rows in self.seen.values()])
        return np.empty(0, np.int32) if self.index is None else np.asarray(self.index["label"])


@dataclass
class DataSet(Classes):
    """A folder with shards and `_info.json`, or a copy of all files except the shards."""

    root: Path
    shown: str
    """The folder or URL as the user gave it."""
    tars_at: str | None
    """The URL of the shards, or None if they are in `root`."""
    info: dict[str, Any]
    parts: list[SplitFiles]
    num_hashed: int = 0
    """The number of shards whose sha256 was compared with a recorded value."""
    catalog_compared: bool = False

    @property
    def ours(self) -> bool:
        """True if this package wrote the shards, False if it indexed existing shards."""
        return "catalog" in self.info

    @property
    def seed(self) -> int:
        """The seed of the catalog's hashes."""
        return int((self.info.get("options") or {}).get("seed", 0)) if self.ours else 0

    @property
    def index_it(self) -> str:
        """The remedy for a missing index or sidecar."""
        return f"run `python -m data_prep.index {quote(self.shown)}` to write it"

    def class_name(self, label: int) -> str:
        """Return the name of a class for messages."""
        return f"class {self.class_names[label] if 0 <= label < len(self.class_names) else label}"

    def sample_name(self, part: SplitFiles, shard: int, row: int) -> str:
        """Return a sample's shard and key for messages, or its row number if `.idx` is missing."""
        place = f"row {row}"
        if part.index is not None and self.tars_at is None:
            split = Split(
                self.root,
                part.name,
                part.filenames,
                part.lengths,
                part.index,
                self.recorded_classes or 0,
                [],
                layout=recorded_layout(self.info, self.root / part.filenames[0]),
            )
            with suppress(ShardError, OSError), closing(split):
                place = split.key(part.firsts[shard] + row)

        return f"{part.filenames[shard]} {place}"


@contextmanager
def opened_data_set(place: str) -> Iterator[DataSet]:
    """Open the data set at `place`, a folder or a URL.

    Raises PrepError or ShardError if the data set cannot be checked.
    """
    root = local_path(place)
    if root is not None:
        yield _open(root, place, None)
        return

    with temporary_folder() as folder, renamed_errors(place, folder):
        remote = RemoteFolder(place.rstrip("/"))
        write_json(folder / "_info.json", remote.read_info())
        info = read_info(folder)

        names = ["quarantine.jsonl", "dataset.md", "contact_sheet.png"]
        names += [f"{split}.index.npy" for split in info["splits"]]
        for tar in tars_of(info):
            names += [f"{tar.removesuffix('.tar')}.{kind}" for kind in ("idx", "json")]

        def fetch(name: str, version: Version | str) -> None:
            if isinstance(version, Version):  # The checks report a missing file.
                remote.fetch(name, version, folder / name)

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(fetch, names, remote.stats(names)))
        yield _open(folder, place, str(remote))


def _open(root: Path, shown: str, tars_at: str | None) -> DataSet:
    """Read `_info.json` in `root`, which may state that the tars are elsewhere. See `DataSet`."""
    if (root / "_writing.json").exists() and not (root / "_info.json").exists():
        raise PrepError(f"{root}: this data set is incomplete: rerun the command that writes it")

    info = read_info(root)
    if "shards_at" in info and not any((root / name).exists() for name in tars_of(info)):
        tars_at = info["shards_at"]
    for name in info["splits"]:
        describe_split(info, name, shown)
    return DataSet(
        root, shown, tars_at, info, [SplitFiles(*item) for item in info["splits"].items()]
    )


def tars_of(info: Mapping[str, Any]) -> list[str]:
    """Return the file names of all shards."""
    return list(chain(*(described.get("filenames", []) for described in info["splits"].values())))
