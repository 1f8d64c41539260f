"""What is to be written: settings, the number of shards, and whether the place holds something
else. Free of torch.

The data's story: a source is listed; a few of its images are measured; the samples of each split
are divided among shards. All that decides the bytes is recorded, in `_writing.json` while shards
are missing and in `_info.json` when they are complete, and compared with what is there before
anything is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.errors import PrepError
from data_prep.write.catalogue import (
    Builder,
    Catalogue,
    Source,
    open_catalogue,
    remove_catalogue,
    some,
)
from data_prep.write.images import ImagePolicy, prepare
from data_prep.write.output import Output
from data_prep.write.shard import Shard, Work

FEW_UNREADABLE = 5
"""Images that may always be unreadable, but for --max-unreadable 0: one broken photo is no reason
to refuse a small folder."""
SHARD_BYTES = 768 << 20
"""Aimed size of a shard when there is enough data: big enough for sequential disks, small enough to
copy again."""
MIN_SHARDS = 8
"""Shards of a small train split: enough to share between the workers of readers that cannot
seek."""
MEASURED_SAMPLES = 64
"""Images that sizes and times are estimated from."""
BYTES_BESIDE = 2048
"""About the bytes that a sample needs beside its image: two or three headers, paddings, its lines
in the indices."""


@dataclass(frozen=True)
class Settings:
    """What all sources have in common."""

    num_shards: int | None = None
    """Of the training split; the others get as many in proportion. None: by size."""
    shard_bytes: int | None = None
    """Aimed size of a shard. None: SHARD_BYTES, or the number of shards that is recorded
    already."""
    seed: int = 0
    """Deals samples to shards."""
    workers: int = 1
    """Processes; without influence on the bytes."""
    part: str | None = None
    """Write these shards only, see `choose_part`."""
    policy: ImagePolicy = field(default_factory=ImagePolicy)
    with_json: bool = False
    """A third member for each sample: original name, label and class."""
    minival: float | None = None
    """Part of each training class that becomes the split `minival`."""
    max_unreadable: float = 0.01
    """Part of all images that may be unreadable, a few may always; more is an error. 0: none
    may."""


def allowed_unreadable(share: float, total: int) -> int:
    """Images of `total` that may be unreadable, by --max-unreadable."""
    return max(FEW_UNREADABLE, int(share * total)) if share else 0


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """All that decides the bytes, and which shards there are."""

    source: Source
    settings: Settings
    output: Output
    catalogue: Catalogue
    counts: dict[str, int]
    """Shards of each split."""
    mean_bytes: float
    """Of an image as it is written, estimated."""
    seconds_per_image: float
    """Of one process, reading, checking and converting, measured on a few images."""

    @property
    def recorded(self) -> dict[str, Any]:
        """What `_writing.json` and `_info.json` say of it; compared when a command is continued."""
        options = {**options_of(self.source, self.settings), "num_shards": self.counts}
        return {"source": self.source.name, "options": options, "catalogue": self.catalogue.sha256}

    @property
    def compared(self) -> dict[str, Any]:
        """`recorded`, in the form that `compare` takes."""
        return {
            **self.recorded["options"],
            "source": self.source.name,
            "catalogue": self.catalogue.sha256,
        }

    @property
    def fingerprint(self) -> str:
        """Of `recorded`; each shard's sidecar holds it."""
        return fingerprint(self.recorded)

    @property
    def filenames(self) -> dict[str, list[str]]:
        """Shards of each split."""
        return {
            split: [f"{split}-{k:05d}.tar" for k in range(count)]
            for split, count in self.counts.items()
        }

    @property
    def num_bytes(self) -> int:
        """Of all shards, estimated."""
        return round(sum(self.catalogue.splits.values()) * (self.mean_bytes + BYTES_BESIDE))

    def work(self) -> list[Work]:
        """A job for each shard, train first."""
        fingerprint = self.fingerprint
        jobs = []
        for split, names in self.filenames.items():
            for k, name in enumerate(names):
                shard = Shard(
                    name.removesuffix(".tar"),
                    split,
                    range(k, self.catalogue.splits[split], len(names)),
                )
                options = (self.settings.policy, self.settings.with_json, self.output, fingerprint)
                jobs.append(Work(shard, self.catalogue, self.source.read, *options))
        return jobs


def fingerprint(recorded: Mapping[str, Any]) -> str:
    """Of what is recorded of a plan: its source, options and catalogue. `recorded` may hold
    more."""
    plan = {key: recorded.get(key) for key in ("source", "options", "catalogue")}
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def options_of(source: Source, settings: Settings) -> dict[str, Any]:
    """What is recorded of the options, but for the number of shards."""
    options = {**source.options, **settings.policy.options(), "seed": settings.seed}
    options |= {"with_json": True} if settings.with_json else {}
    return options | ({"minival": settings.minival} if settings.minival else {})


def make_plan(source: Source, out: Path | str, settings: Settings, dry: bool = False) -> Plan:
    """List the source and choose the shards. Raises PrepError, with nothing changed, if `out` holds
    something else.

    dry: nothing will be written; the catalogue lies in a folder of its own, which the caller
    removes.
    """
    output = Output(out)
    there = recorded_there(output)
    compare(
        output,
        there,
        {"source": source.name, **options_of(source, settings)},
        later=("num_shards", "catalogue"),
    )
    root = _catalogue_root(output, dry)
    catalogue = None
    try:
        catalogue = open_catalogue(
            source, root, settings.seed, settings.workers, *_minival(settings), dry
        )
        mean_bytes, seconds = _measured(source, catalogue, settings.policy)
        counts = choose_num_shards(catalogue.splits, settings, mean_bytes)
        if there and settings.num_shards is None and settings.shard_bytes is None:
            # what was measured then may have changed: unreadable images are mended
            counts = there["options"].get("num_shards", counts)
        plan = Plan(source, settings, output, catalogue, counts, mean_bytes, seconds)
        compare(output, there, plan.compared)
    except BaseException:
        if catalogue is not None and catalogue.is_new:
            remove_catalogue(catalogue.folder)
        if dry:
            shutil.rmtree(root, ignore_errors=True)
        raise
    return plan


def made_of(source: Source, settings: Settings) -> str | None:
    """What the catalogue is made of, in hex; None for sources that are listed anew each time."""
    return source.made_of(settings.seed, settings.minival) if source.inputs is not None else None


def _minival(settings: Settings) -> tuple[Callable[[Builder], None] | None, float | None]:
    """What finishes a catalogue, and what that depends on."""
    fraction = settings.minival
    if not fraction:
        return None, None

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

    return cut, fraction


def _catalogue_root(output: Output, dry: bool) -> Path:
    """Where the catalogue lies; of a URL a folder that the processes of one user on one host
    share."""
    if dry:
        return Path(tempfile.mkdtemp(prefix="vit-data-prep-"))
    if output.local is not None:
        return output.local
    return (
        Path(tempfile.gettempdir())
        / f"vit-data-prep-{os.getuid()}-{hashlib.sha256(str(output).encode()).hexdigest()[:16]}"
    )


def _measured(source: Source, catalogue: Catalogue, policy: ImagePolicy) -> tuple[float, float]:
    """(bytes of an image as it is written, seconds to make it), means over a few of the training
    split; nan seconds if none is readable."""
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
    """Shards of each split: as many as asked for the first (train), by default one for each
    `shard_bytes`, but at least 8; the others get as many in proportion, at least 1. splits: samples
    of each. mean_bytes: of an image."""
    train = next(iter(splits.values()))
    num_shards = settings.num_shards
    if num_shards is None:
        num_shards = min(
            train,
            max(MIN_SHARDS, round(train * mean_bytes / (settings.shard_bytes or SHARD_BYTES))),
        )
    chosen = {split: max(1, round(num_shards * total / train)) for split, total in splits.items()}
    for split, total in splits.items():
        if chosen[split] > total:
            raise PrepError(
                f"{chosen[split]} shards for the {total} samples of split {split!r}; use"
                f" --num-shards {train} or fewer"
            )
    return chosen


def choose_part(part: str | None, counts: Mapping[str, int]) -> range:
    """Numbers of the shards that `part` names, counted over all splits, train first: with {"train":
    8, "val": 2} val has 8 and 9.

    part: "A-B", from A to B, both included; "I/N", the I-th of N equal parts, I from 0 (an empty
    one if N is larger than the number of shards); None: all. Raises PrepError for anything else.
    """
    total = sum(counts.values())
    if part is None:
        return range(total)
    there = "; ".join(f"{split} has {count}" for split, count in counts.items())
    if match := re.fullmatch(r"([0-9]+)-([0-9]+)", part):
        first, last = int(match[1]), int(match[2])
        if first <= last < total:
            return range(first, last + 1)
        raise PrepError(
            f"--shards {part}: there are shards 0 to {total - 1} ({there}), and A-B goes upwards"
        )
    if match := re.fullmatch(r"([0-9]+)/([0-9]+)", part):
        number = int(match[1])
        parts = int(match[2])
        if number < parts:
            return range(number * total // parts, (number + 1) * total // parts)
        raise PrepError(
            f"--shards {part}:"
            f" {f'{parts} parts are numbered 0 to {parts - 1}' if parts else 'there cannot be 0 parts'}"
        )
    raise PrepError(
        f"--shards {part}: expected A-B, such as 100-199, or I/N, such as 0/8, for the first of 8"
        " parts"
    )


def recorded_there(output: Output) -> dict[str, Any] | None:
    """What `_writing.json` or `_info.json` say that `output` is for; None if it is new. Raises
    PrepError if it holds other shards."""
    # In this order: another part may begin or end meanwhile, and tars are never there without one
    # of the two files.
    foreign = sorted(name for name in output.sizes() if name.endswith(".tar"))
    there = output.read_json("_writing.json") or output.read_json("_info.json")
    if there is None and foreign:
        raise PrepError(
            f"{output}: holds shards of unknown origin ({some(foreign)}); choose another --out"
        )
    return there


def compare(
    output: Output, there: dict[str, Any] | None, asked: dict[str, Any], later: Sequence[str] = ()
) -> None:
    """Raise PrepError if what is recorded `there` differs from what is `asked`, but for the keys
    that are compared later."""
    if there is None:
        return
    found = {
        **there.get("options", {}),
        "source": there.get("source"),
        "catalogue": there.get("catalogue"),
    }
    meaning = {"catalogue": " (images were added, removed or renamed)"}
    differ = [
        f"{key} is {_short(found.get(key))} there, {_short(asked.get(key))}"
        f" here{meaning.get(key, '')}"
        for key in sorted((found.keys() | asked.keys()).difference(later))
        if found.get(key) != asked.get(key)
    ]
    if differ:
        raise PrepError(
            f"{output}: holds another data set or other options: {'; '.join(differ)}. Nothing was"
            " changed; use the same options, choose another --out or delete the folder"
        )


def _short(value: Any) -> str:
    """A value in an error message; of a sha256 the first 8 digits tell enough."""
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else json.dumps(value)


def size(num_bytes: float) -> str:
    """Bytes in GB or MB, for people."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
