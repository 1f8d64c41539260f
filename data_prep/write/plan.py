"""Plan a data set: settings, number of shards, and a comparison with an existing output.

The writer lists the source, measures a few images, and assigns the samples of each split to shards.
All settings that affect the bytes are recorded, in `_writing.json` until all shards exist, and then
in `_info.json`. An existing record is compared with the plan before anything is written.
"""

import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from data_prep.errors import PrepError
from data_prep.write.catalog import Builder, Catalog, Source, open_catalog
from data_prep.write.images import ImagePolicy, prepare
from data_prep.write.output import Output
from data_prep.write.shard import ShardWork
from vit.system.files import private_folder
from vit.system.spelling import few

FEW_UNREADABLE = 5
"""The number of unreadable images that are always allowed unless --max-unreadable is 0."""
SHARD_BYTES = 768 << 20
"""The target size of a shard: large enough for sequential disk reads, and small enough to be copied
again."""
MIN_SHARDS = 8
"""The minimum number of training shards, so that workers that read sequentially can divide the
shards among them."""
MEASURED_SAMPLES = 64
"""The number of images to convert for estimates of size and time."""
OVERHEAD_BYTES = 2048
"""The estimated overhead per sample in bytes: tar headers, padding and index lines."""


@dataclass(frozen=True)
class Settings:
    """The settings that all sources share. Raises PrepError for an invalid `part`."""

    num_shards: int | None = None
    """The number of training shards, or None to compute it from `shard_bytes`. Other splits get a
    proportional number."""
    shard_bytes: int | None = None
    """The target size of a shard. None means SHARD_BYTES, or the recorded number of shards."""
    seed: int = 0
    """The seed used to assign samples to shards."""
    workers: int = 1
    """The number of worker processes, which does not affect the bytes."""
    part: str | None = None
    policy: ImagePolicy = field(default_factory=ImagePolicy)
    with_json: bool = False
    """Add a JSON member with the original name, label and class to each sample."""
    minival: float | None = None
    """The fraction of each training class that becomes the `minival` split."""
    max_unreadable: float = 0.01
    """The fraction of images that may be unreadable. Unless it is 0, a few are always allowed."""

    def __post_init__(self) -> None:
        if self.part is not None:
            parse_part(self.part)


def parse_part(part: str) -> tuple[int, str, int]:
    """Parse "A-B" into (A, "-", B), or "I/N" into (I, "/", N). Raises PrepError."""
    match = re.fullmatch(r"(?P<first>[0-9]+)(?P<kind>[-/])(?P<last>[0-9]+)", part)
    if match:
        first, kind, last = int(match["first"]), match["kind"], int(match["last"])
        is_valid = first <= last if kind == "-" else first < last
        if is_valid:
            return first, kind, last
    raise PrepError(
        f"--shards {part}: expected A-B, such as 100-199, or I/N, such as 0/8 for the first of 8"
        " parts"
    )


def allowed_unreadable(share: float, total: int) -> int:
    """Return the number of images out of `total` that may be unreadable, according to
    --max-unreadable."""
    return max(FEW_UNREADABLE, int(share * total)) if share else 0


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WritePlan:
    """The shards to write, and everything that affects their bytes."""

    source: Source
    settings: Settings
    output: Output
    catalog: Catalog
    counts: dict[str, int]
    mean_bytes: float
    seconds_per_image: float
    """The time to read, check and convert an image in one process, or nan if no image is
    readable."""

    @property
    def recorded(self) -> dict[str, Any]:
        """The record for `_writing.json` and `_info.json`, compared when a command resumes."""
        return {
            "source": self.source.name,
            "options": {**options_of(self.source, self.settings), "num_shards": self.counts},
            "catalog": self.catalog.sha256,
        }

    @property
    def filenames(self) -> dict[str, list[str]]:
        """The shard file names of each split."""
        return {
            split: [f"{split}-{k:05d}.tar" for k in range(count)]
            for split, count in self.counts.items()
        }

    @property
    def num_bytes(self) -> int:
        """The estimated size of all shards."""
        return round(sum(self.catalog.splits.values()) * (self.mean_bytes + OVERHEAD_BYTES))

    @cached_property
    def work(self) -> list[ShardWork]:
        """One job per shard, with the training shards first."""
        plan = fingerprint(self.recorded)

        jobs = []
        for split, names in self.filenames.items():
            for k, name in enumerate(names):
                jobs.append(
                    ShardWork(
                        name.removesuffix(".tar"),
                        split,
                        places=range(k, self.catalog.splits[split], len(names)),
                        catalog=self.catalog,
                        read=self.source.read,
                        policy=self.settings.policy,
                        with_json=self.settings.with_json,
                        output=self.output,
                        plan=plan,
                    )
                )
        return jobs


def fingerprint(recorded: Mapping[str, Any]) -> str:
    """Return the sha256 of a plan's source, options and catalog, which each sidecar records."""
    plan = {key: recorded.get(key) for key in ("source", "options", "catalog")}
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def options_of(source: Source, settings: Settings) -> dict[str, Any]:
    """Return the options to record, except for the number of shards."""
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
    """List the source and choose the shards. The catalog is removed when the block ends.

    dry: create the catalog in a temporary folder, and write nothing to `out`. If `out` contains
    another data set, raises PrepError without changing anything.
    """
    output = Output(out)
    record = existing_record(output)
    compare(
        output,
        record,
        {"source": source.name, "options": options_of(source, settings)},
        later=("num_shards", "catalog"),
    )

    with ExitStack() as stack:
        root = _catalog_root(output, dry)
        if root != output.local:
            stack.callback(_remove_if_empty, root)
        catalog = stack.enter_context(
            open_catalog(
                source,
                root,
                seed=settings.seed,
                workers=settings.workers,
                finish=partial(_cut_minival, settings.minival) if settings.minival else None,
                dry=dry,
            )
        )

        mean_bytes, seconds = _measured(source, catalog, settings.policy)
        counts = choose_num_shards(catalog.splits, settings, mean_bytes)
        is_size_given = settings.num_shards is not None or settings.shard_bytes is not None
        if record and not is_size_given:
            # Keep the recorded number, because repaired images may have changed the measured sizes.
            counts = record["options"].get("num_shards", counts)

        plan = WritePlan(
            source,
            settings,
            output=output,
            catalog=catalog,
            counts=counts,
            mean_bytes=mean_bytes,
            seconds_per_image=seconds,
        )
        compare(output, record, plan.recorded)
        yield plan


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # The folder may contain the spool.
        folder.rmdir()


def _cut_minival(fraction: float, builder: Builder) -> None:
    """Move a fraction of the training images to the split `minival`."""
    largest = int(builder.count("train").max())
    if not largest:
        raise PrepError(f"--minival {fraction}: the source has no training split to divide")

    builder.hold_out("train", "minival", fraction)
    if not builder.count("minival").any():
        raise PrepError(
            f"--minival {fraction}: this is less than one image of the {largest:,} in the"
            f" largest class: use at least {1 / largest:.2g}"
        )
    builder.report_held_out("minival", fraction, "--minival {}")


def _catalog_root(output: Output, dry: bool) -> Path:
    """Return the catalog's folder. For a URL, all of a user's processes on a host share the
    folder."""
    if dry:
        return Path(tempfile.mkdtemp(prefix="vit-data-prep-"))
    if output.local is not None:
        return output.local
    name = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    return private_folder(Path(tempfile.gettempdir()) / f"vit-data-prep-{os.getuid()}-{name}")


def _measured(source: Source, catalog: Catalog, policy: ImagePolicy) -> tuple[float, float]:
    """Measure a few training images. Return (mean bytes of a written image, seconds to create it).

    The seconds are nan if no image is readable.
    """
    split, total = next(iter(catalog.splits.items()))
    samples = catalog.table(split).samples(range(min(total, MEASURED_SAMPLES)))

    sizes = []
    began = time.perf_counter()
    for sample in samples:
        # Unreadable images are reported when their shard is written.
        with suppress(OSError, ValueError):
            sizes.append(len(prepare(source.read(sample), policy).data))

    if not sizes:
        return sum(sample.size for sample in samples) / len(samples), math.nan
    return sum(sizes) / len(sizes), (time.perf_counter() - began) / len(sizes)


def choose_num_shards(
    splits: Mapping[str, int], settings: Settings, mean_bytes: float
) -> dict[str, int]:
    """Return the number of shards in each split, based on its samples and the mean image size.

    The training split gets the number of shards in the settings, or by default one shard per
    `shard_bytes`, but at least 8. All other splits get a proportional number, at least 1.
    """
    num_train = next(iter(splits.values()))
    by_size = round(num_train * mean_bytes / (settings.shard_bytes or SHARD_BYTES))
    num_shards = settings.num_shards or min(num_train, max(MIN_SHARDS, by_size))

    chosen: dict[str, int] = {}
    for split, num_samples in splits.items():
        chosen[split] = max(1, round(num_shards * num_samples / num_train))
        if chosen[split] > num_samples:
            raise PrepError(
                f"{chosen[split]} shards are too many for the {num_samples} samples of split"
                f" {split!r}: use --num-shards {num_train} or fewer"
            )
    return chosen


def choose_part(part: str | None, counts: Mapping[str, int]) -> range:
    """Return the numbers of the shards that `part` selects. Train's shards are numbered first.

    With {"train": 8, "val": 2}, shards 8 and 9 are in val. part: "A-B" includes both ends. "I/N" is
    part I of N parts of almost the same size, counted from 0, and may be empty if there are fewer
    shards than parts. None selects all shards. Raises PrepError for other values.
    """
    total = sum(counts.values())
    if part is None:
        return range(total)

    match parse_part(part):
        case (index, "/", num_parts):
            return range(index * total // num_parts, (index + 1) * total // num_parts)
        case (first, _, last) if last < total:
            return range(first, last + 1)

    lengths = "; ".join(f"{split} has {count}" for split, count in counts.items())
    raise PrepError(f"--shards {part}: expected shards between 0 and {total - 1} ({lengths})")


def existing_record(output: Output) -> dict[str, Any] | None:
    """Return the content of `_writing.json` or `_info.json`, or None if the output is new.

    Raises PrepError if the output contains shards of unknown origin.
    """
    # List the tars before reading the records. Another machine may begin or finish its part during
    # this call, but tars never exist without one of the records.
    tars = sorted(name for name in output.sizes() if name.endswith(".tar"))
    record = output.read_json("_writing.json") or output.read_json("_info.json")
    if record is None and tars:
        raise PrepError(
            f"{output}: contains shards of unknown origin ({few(tars)}); choose another --out"
        )
    return record


def compare(
    output: Output,
    existing: Mapping[str, Any] | None,
    expected: Mapping[str, Any],
    later: Sequence[str] = (),
) -> None:
    """Raise PrepError if the records `existing` and `expected` differ, ignoring the keys in
    `later`.

    Both records have the format of `WritePlan.recorded`.
    """
    if existing is None:
        return
    old, new = (
        {
            **record.get("options", {}),
            "source": record.get("source"),
            "catalog": record.get("catalog"),
        }
        for record in (existing, expected)
    )

    notes = {"catalog": " (images were added, removed or renamed)"}
    differences = [
        f"{key} was {_short(old.get(key))}, now {_short(new.get(key))}{notes.get(key, '')}"
        for key in sorted((old.keys() | new.keys()).difference(later))
        if old.get(key) != new.get(key)
    ]
    if differences:
        raise PrepError(
            f"{output}: contains a data set with a different source or options:"
            f" {'; '.join(differences)}. Nothing was changed; use the same options, choose another"
            " --out or delete the folder"
        )


def _short(value: Any) -> str:
    """Format a value for an error message. A sha256 is shortened to 8 digits."""
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else json.dumps(value)


def format_bytes(num_bytes: float) -> str:
    """Format a size in GB or MB."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
