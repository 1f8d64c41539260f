"""The plan of a data set: settings, number of shards, and a comparison with an existing output.

A source is listed; a few of its images are measured; the samples of each split are divided among
shards. Everything that decides the bytes is recorded, in `_writing.json` while shards are missing
and in `_info.json` when they are complete. An existing record is compared before anything is
written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.errors import PrepError, some
from data_prep.write.catalogue import Builder, Catalogue, Source, open_catalogue
from data_prep.write.images import ImagePolicy, prepare
from data_prep.write.output import Output
from data_prep.write.shard import Shard, Work
from vit.system.files import private_folder

FEW_UNREADABLE = 5
"""Images that may always be unreadable, except with --max-unreadable 0, so that one broken photo
does not make a small folder unusable."""
SHARD_BYTES = 768 << 20
"""Target size of a shard: large enough for sequential disks, small enough to copy again."""
MIN_SHARDS = 8
"""Shards of a small train split, so that workers of readers that cannot seek share them."""
MEASURED_SAMPLES = 64
"""Number of images from which sizes and times are estimated."""
OVERHEAD_BYTES = 2048
"""Estimated bytes of a sample in addition to its image: tar headers, padding, index lines."""


@dataclass(frozen=True)
class Settings:
    """The settings of all sources. Raises PrepError for an invalid `part`."""

    num_shards: int | None = None
    """Shards of the training split; the others get as many in proportion. None: by size."""
    shard_bytes: int | None = None
    """Target size of a shard. None: SHARD_BYTES, or the recorded number of shards."""
    seed: int = 0
    """Deals samples to shards."""
    workers: int = 1
    """Number of processes; the bytes do not depend on it."""
    part: str | None = None
    """Write only these shards, see `choose_part`."""
    policy: ImagePolicy = field(default_factory=ImagePolicy)
    with_json: bool = False
    """A third member for each sample: original name, label and class."""
    minival: float | None = None
    """Fraction of each training class that becomes the split `minival`."""
    max_unreadable: float = 0.01
    """Fraction of all images that may be unreadable; a few always may be. 0: none."""

    def __post_init__(self) -> None:
        if self.part is not None:
            parse_part(self.part)


def parse_part(part: str) -> tuple[int, str, int]:
    """Return (first, "-", last) for "A-B", (number, "/", parts) for "I/N". Raises PrepError."""
    match = re.fullmatch(r"([0-9]+)([-/])([0-9]+)", part)
    first, last = (int(match[1]), int(match[3])) if match else (0, 0)
    if match is None or not (first <= last if match[2] == "-" else first < last):
        raise PrepError(
            f"--shards {part}: expected A-B, such as 100-199, or I/N, such as 0/8, for the first"
            " of 8 parts"
        )
    return first, match[2], last


def allowed_unreadable(share: float, total: int) -> int:
    """Return how many of `total` images may be unreadable by --max-unreadable."""
    return max(FEW_UNREADABLE, int(share * total)) if share else 0


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WritePlan:
    """Everything that decides the bytes, and the list of shards."""

    source: Source
    settings: Settings
    output: Output
    catalogue: Catalogue
    counts: dict[str, int]
    """Number of shards of each split."""
    mean_bytes: float
    """Estimated size of an image as it is written."""
    seconds_per_image: float
    """Time to read, check and convert an image in one process; nan if none is readable."""

    @property
    def recorded(self) -> dict[str, Any]:
        """The record in `_writing.json` and `_info.json`; compared when a command continues."""
        options = {**options_of(self.source, self.settings), "num_shards": self.counts}
        return {"source": self.source.name, "options": options, "catalogue": self.catalogue.sha256}

    @property
    def filenames(self) -> dict[str, list[str]]:
        """File names of the shards of each split."""
        return {
            split: [f"{split}-{k:05d}.tar" for k in range(count)]
            for split, count in self.counts.items()
        }

    @property
    def num_bytes(self) -> int:
        """Estimated size of all shards."""
        return round(sum(self.catalogue.splits.values()) * (self.mean_bytes + OVERHEAD_BYTES))

    def work(self) -> list[Work]:
        """Return a job for each shard, train first."""
        settings = self.settings
        plan = fingerprint(self.recorded)
        jobs = []
        for split, names in self.filenames.items():
            for k, name in enumerate(names):
                places = range(k, self.catalogue.splits[split], len(names))
                job = Work(
                    Shard(name.removesuffix(".tar"), split, places),
                    self.catalogue,
                    self.source.read,
                    settings.policy,
                    settings.with_json,
                    self.output,
                    plan,
                )
                jobs.append(job)
        return jobs


def fingerprint(recorded: Mapping[str, Any]) -> str:
    """Return the sha256 of a plan's source, options and catalogue; each sidecar holds it."""
    plan = {key: recorded.get(key) for key in ("source", "options", "catalogue")}
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def options_of(source: Source, settings: Settings) -> dict[str, Any]:
    """Return the recorded options, except for the number of shards."""
    options = {**source.options, **settings.policy.options(), "seed": settings.seed}
    if settings.with_json:
        options["with_json"] = True
    if settings.minival:
        options["minival"] = settings.minival
    return options


@contextmanager
def make_plan(
    source: Source, out: Path | str, settings: Settings, dry: bool = False
) -> Iterator[WritePlan]:
    """List the source and choose the shards; at the end of the block the catalogue is removed.

    dry: the catalogue is in a temporary folder, because nothing is written. Raises PrepError, with
    nothing changed, if `out` holds another data set.
    """
    output = Output(out)
    record = existing_record(output)
    early = {"source": source.name, "options": options_of(source, settings)}
    compare(output, record, early, later=("num_shards", "catalogue"))
    with ExitStack() as stack:
        root = _catalogue_root(output, dry)
        if root != output.local:
            stack.callback(_remove_if_empty, root)
        opened = open_catalogue(
            source, root, settings.seed, settings.workers, _minival(settings), dry
        )
        catalogue = stack.enter_context(opened)
        mean_bytes, seconds = _measured(source, catalogue, settings.policy)
        counts = choose_num_shards(catalogue.splits, settings, mean_bytes)
        if record and settings.num_shards is None and settings.shard_bytes is None:
            # repaired images may have changed the measured sizes
            counts = record["options"].get("num_shards", counts)
        plan = WritePlan(source, settings, output, catalogue, counts, mean_bytes, seconds)
        compare(output, record, plan.recorded)
        yield plan


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # the spool may be in it
        folder.rmdir()


def _minival(settings: Settings) -> Callable[[Builder], None] | None:
    """Return the function that finishes a catalogue; None without --minival."""
    fraction = settings.minival
    if not fraction:
        return None

    def cut(builder: Builder) -> None:
        if not builder.count("train").any():
            raise PrepError(f"--minival {fraction}: there is no training split to cut it from")
        largest = int(builder.count("train").max())
        builder.hold_out("train", "minival", fraction)
        if not builder.count("minival").any():
            raise PrepError(
                f"--minival {fraction}: of {largest:,} images, the largest class, that is none; use"
                f" {1 / largest:.2g} or more"
            )

    return cut


def _catalogue_root(output: Output, dry: bool) -> Path:
    """Return the folder of the catalogue; for a URL, processes of a user on one host share it."""
    if dry:
        return Path(tempfile.mkdtemp(prefix="vit-data-prep-"))
    if output.local is not None:
        return output.local
    name = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    return private_folder(Path(tempfile.gettempdir()) / f"vit-data-prep-{os.getuid()}-{name}")


def _measured(source: Source, catalogue: Catalogue, policy: ImagePolicy) -> tuple[float, float]:
    """Return the mean (bytes of a written image, seconds to make it) of a few training images.

    The seconds are nan if no image is readable.
    """
    split, total = next(iter(catalogue.splits.items()))
    samples = catalogue.table(split).samples(range(min(total, MEASURED_SAMPLES)))
    sizes = []
    began = time.perf_counter()
    for sample in samples:
        try:
            sizes.append(len(prepare(source.read(sample), policy).data))
        except (OSError, ValueError):
            continue  # an image that cannot be read is reported when its shard is written
    if not sizes:
        return sum(sample.size for sample in samples) / len(samples), math.nan
    return sum(sizes) / len(sizes), (time.perf_counter() - began) / len(sizes)


def choose_num_shards(
    splits: Mapping[str, int], settings: Settings, mean_bytes: float
) -> dict[str, int]:
    """Return the number of shards of each split, by its samples and the mean size of an image.

    The first split (train) gets the number in the settings, by default one for each `shard_bytes`,
    but at least 8; the others get as many in proportion, at least 1.
    """
    train = next(iter(splits.values()))
    by_size = round(train * mean_bytes / (settings.shard_bytes or SHARD_BYTES))
    num_shards = settings.num_shards or min(train, max(MIN_SHARDS, by_size))
    chosen = {split: max(1, round(num_shards * total / train)) for split, total in splits.items()}
    for split, total in splits.items():
        if chosen[split] > total:
            raise PrepError(
                f"{chosen[split]} shards for the {total} samples of split {split!r}; use"
                f" --num-shards {train} or fewer"
            )
    return chosen


def choose_part(part: str | None, counts: Mapping[str, int]) -> range:
    """Return the numbers of the shards that `part` names, over all splits, train first.

    With {"train": 8, "val": 2}, val has 8 and 9. part: "A-B", from A to B, both included; "I/N",
    the I-th of N equal parts, I from 0 (empty if there are fewer shards than parts); None: all.
    Raises PrepError for anything else.
    """
    total = sum(counts.values())
    if part is None:
        return range(total)
    first, kind, last = parse_part(part)
    if kind == "/":
        return range(first * total // last, (first + 1) * total // last)
    if last < total:
        return range(first, last + 1)
    lengths = "; ".join(f"{split} has {count}" for split, count in counts.items())
    raise PrepError(f"--shards {part}: there are shards 0 to {total - 1} ({lengths})")


def existing_record(output: Output) -> dict[str, Any] | None:
    """Return the content of `_writing.json` or `_info.json`; None if the output is new.

    Raises PrepError if it holds shards of unknown origin.
    """
    # Tars first: another part may begin or end during this call, but tars never exist without one
    # of the two files.
    tars = sorted(name for name in output.sizes() if name.endswith(".tar"))
    record = output.read_json("_writing.json") or output.read_json("_info.json")
    if record is None and tars:
        raise PrepError(
            f"{output}: holds shards of unknown origin ({some(tars)}); choose another --out"
        )
    return record


def compare(
    output: Output,
    existing: Mapping[str, Any] | None,
    expected: Mapping[str, Any],
    later: Sequence[str] = (),
) -> None:
    """Raise PrepError if the records `existing` and `expected` differ, except in keys `later`.

    Both have the form of `WritePlan.recorded`.
    """
    if existing is None:
        return
    old, new = (
        {**record.get("options", {}), **{key: record.get(key) for key in ("source", "catalogue")}}
        for record in (existing, expected)
    )
    meaning = {"catalogue": " (images were added, removed or renamed)"}
    differences = [
        f"{key} is {_short(old.get(key))} there, {_short(new.get(key))} here{meaning.get(key, '')}"
        for key in sorted((old.keys() | new.keys()).difference(later))
        if old.get(key) != new.get(key)
    ]
    if differences:
        raise PrepError(
            f"{output}: holds another data set or other options: {'; '.join(differences)}. Nothing"
            " was changed; use the same options, choose another --out or delete the folder"
        )


def _short(value: Any) -> str:
    """Return a value for an error message; the first 8 digits of a sha256 suffice."""
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else json.dumps(value)


def format_bytes(num_bytes: float) -> str:
    """Return a size in GB or MB."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
