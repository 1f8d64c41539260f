"""The one writer of all sources: a source in, a data set of shards out. Free of torch.

The data's story: the source's samples are listed in a catalogue; a hash of (seed, key) deals them to a fixed number of shards, whose
lengths differ by one at most; worker processes write one shard at a time; when every shard is whole, the index, `_info.json`, the list of
unreadable images and the data set's card follow.

    <root>/                 the format is told in vit/data/shards.py
      _writing.json         what this folder is for; from the first moment until `_info.json` takes its place
      _catalogue/           where each sample comes from, see data_prep/catalogue.py; goes at the end
      _spool/               images of sources that cannot be read in place; goes at the end
      .train-00000.tar.*    a shard being written; gets its name when it is complete and on the disk
      train-00000.tar  train-00000.idx  train-00000.json      written in this order
      train.index.npy  quarantine.jsonl  _info.json           written last
      dataset.md  contact_sheet.png                           drawn of all that

Shard k is a pure function of (catalogue, options, k). So the number of workers and the order in which they finish leave no
trace in the bytes, and the same command run again after a kill only writes the shards that are missing. For the same reason
several machines can share the work (`--shards`): each writes its part, and whoever finds all shards whole writes the rest.

A root that is a URL gets the same files; `_catalogue` and `_spool` then lie in the folder for temporary files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.catalogue import Builder, Catalogue, Source, open_catalogue, some
from data_prep.images import ImagePolicy, prepare
from data_prep.jobs import PrepError, run_jobs
from data_prep.output import Output
from data_prep.shard import Shard, Work, rows_path, scan_shard, still_holds, write_shard
from vit.data.files import remove_leftovers, replacing
from vit.data.shards import make_info, save_index

SHARD_BYTES = 768 << 20
"""Aimed size of a shard when there is enough data: big enough for sequential disks, small enough to copy again."""
MIN_SHARDS = 8
"""Shards of a small train split: enough to share between the workers of readers that cannot seek."""
MEASURED_SAMPLES = 64
"""Images that sizes and times are estimated from."""
BYTES_BESIDE = 2048
"""About the bytes that a sample needs beside its image: two or three headers, paddings, its lines in the indices."""


@dataclass(frozen=True)
class Settings:
    """What all sources have in common."""

    num_shards: int | None = None
    """Of the training split; the others get as many in proportion. None: by size."""
    shard_bytes: int = SHARD_BYTES
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
    """Part of all images that may be unreadable; more is an error."""


# ---- the plan -------------------------------------------------------------------------------------------------------


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
        options = {**_options(self.source, self.settings), "num_shards": self.counts}
        return {"source": self.source.name, "options": options, "catalogue": self.catalogue.sha256}

    @property
    def fingerprint(self) -> str:
        """Of `recorded`; each shard's sidecar holds it."""
        return hashlib.sha256(json.dumps(self.recorded, sort_keys=True).encode()).hexdigest()

    @property
    def filenames(self) -> dict[str, list[str]]:
        """Shards of each split."""
        return {split: [f"{split}-{k:05d}.tar" for k in range(count)] for split, count in self.counts.items()}

    @property
    def num_bytes(self) -> int:
        """Of all shards, estimated."""
        return round(sum(self.catalogue.splits.values()) * (self.mean_bytes + BYTES_BESIDE))

    def work(self) -> list[Work]:
        """A job for each shard, train first."""
        fingerprint, jobs = self.fingerprint, []
        for split, names in self.filenames.items():
            for k, name in enumerate(names):
                shard = Shard(name.removesuffix(".tar"), split, range(k, self.catalogue.splits[split], len(names)))
                options = (self.settings.policy, self.settings.with_json, self.output, fingerprint)
                jobs.append(Work(shard, self.catalogue, self.source.read, *options))
        return jobs


def _options(source: Source, settings: Settings) -> dict[str, Any]:
    options = {**source.options, **settings.policy.options(), "seed": settings.seed}
    options |= {"with_json": True} if settings.with_json else {}
    return options | ({"minival": settings.minival} if settings.minival else {})


def make_plan(source: Source, out: Path | str, settings: Settings, keep: bool = True) -> Plan:
    """List the source and choose the shards. Raises PrepError, with nothing changed, if `out` holds something else.

    keep: the catalogue lies in `out`, where other processes and later commands find it; else in the folder for temporary files.
    """
    output = Output(out)
    _refuse_others(output, {"source": source.name, "options": _options(source, settings)})
    folder = output.local if keep and output.local else _temporary_folder(output)

    def hold_out(builder: Builder) -> None:
        if settings.minival:
            builder.hold_out("train", "minival", settings.minival)

    made: dict[str, Any] = {"workers": settings.workers, "finish": hold_out, "also": settings.minival, "dry": not keep}
    catalogue = open_catalogue(source, folder / "_catalogue", settings.seed, **made)
    mean_bytes, seconds = _measured(source, catalogue, settings.policy)
    counts = choose_num_shards(catalogue.splits, settings, mean_bytes)
    plan = Plan(source, settings, output, catalogue, counts, mean_bytes, seconds)
    try:
        _refuse_others(output, plan.recorded)
    except PrepError:
        discard(plan)
        raise
    return plan


def _temporary_folder(output: Output) -> Path:
    return Path(tempfile.gettempdir()) / f"vit-data-prep-{hashlib.sha256(str(output).encode()).hexdigest()[:16]}"


def _measured(source: Source, catalogue: Catalogue, policy: ImagePolicy) -> tuple[float, float]:
    """(bytes of an image as it is written, seconds to make it), means over a few of the training split; nan seconds if none is readable."""
    split, total = next(iter(catalogue.splits.items()))
    samples = catalogue.table(split).samples(range(min(total, MEASURED_SAMPLES)))
    sizes, began = [], time.perf_counter()
    for sample in samples:
        try:
            sizes.append(len(prepare(source.read(sample), policy).data))
        except (OSError, ValueError):
            continue  # an image that cannot be read is reported when its shard is written
    if not sizes:
        return sum(sample.size for sample in samples) / len(samples), math.nan
    return sum(sizes) / len(sizes), (time.perf_counter() - began) / len(sizes)


def choose_num_shards(splits: Mapping[str, int], settings: Settings, mean_bytes: float) -> dict[str, int]:
    """Shards of each split: as many as asked for the first (train), by default one for each `shard_bytes`, but at least 8; the others
    get as many in proportion, at least 1. splits: samples of each. mean_bytes: of an image."""
    train = next(iter(splits.values()))
    num_shards = settings.num_shards
    if num_shards is None:
        num_shards = min(train, max(MIN_SHARDS, round(train * mean_bytes / settings.shard_bytes)))
    chosen = {split: max(1, round(num_shards * total / train)) for split, total in splits.items()}
    for split, total in splits.items():
        if chosen[split] > total:
            raise PrepError(f"{chosen[split]} shards for the {total} samples of split {split!r}; use --num-shards {train} or fewer")
    return chosen


def choose_part(part: str | None, counts: Mapping[str, int]) -> range:
    """Numbers of the shards that `part` names, counted over all splits, train first: with {"train": 8, "val": 2} val has 8 and 9.

    part: "A-B", from A to B, both included; "I/N", the I-th of N equal parts, I from 0 (an empty one if N is larger than the
    number of shards); None: all. Raises PrepError for anything else.
    """
    total = sum(counts.values())
    if part is None:
        return range(total)
    there = "; ".join(f"{split} has {count}" for split, count in counts.items())
    if match := re.fullmatch(r"([0-9]+)-([0-9]+)", part):
        first, last = int(match[1]), int(match[2])
        if first <= last < total:
            return range(first, last + 1)
        raise PrepError(f"--shards {part}: there are shards 0 to {total - 1} ({there}), and A-B goes upwards")
    if match := re.fullmatch(r"([0-9]+)/([0-9]+)", part):
        number, parts = int(match[1]), int(match[2])
        if number < parts:
            return range(number * total // parts, (number + 1) * total // parts)
        raise PrepError(f"--shards {part}: {f'{parts} parts are numbered 0 to {parts - 1}' if parts else 'there cannot be 0 parts'}")
    raise PrepError(f"--shards {part}: expected A-B, such as 100-199, or I/N, such as 0/8, for the first of 8 parts")


def _refuse_others(output: Output, asked: dict[str, Any]) -> None:
    """Raise PrepError if the folder is for something else than `asked`, as far as that says."""
    # In this order: another part may begin or end meanwhile, and tars are never there without one of the two files.
    foreign = sorted(name for name in output.sizes() if name.endswith(".tar"))
    there = output.read_json("_writing.json") or output.read_json("_info.json")
    if there is None:
        if foreign:
            raise PrepError(f"{output}: holds shards of unknown origin ({some(foreign)}); choose another --out")
        return
    flat, wanted = ({**part.get("options", {}), **{key: part.get(key) for key in ("source", "catalogue")}} for part in (there, asked))
    early = {"num_shards", "catalogue"} - ({"num_shards", "catalogue"} & (asked.keys() | asked["options"].keys()))
    differ = [
        f"{key} is {_short(flat.get(key))} there, {_short(wanted.get(key))} here{' (images were added, removed or renamed)' * (key == 'catalogue')}"
        for key in sorted((flat.keys() | wanted.keys()) - early)
        if flat.get(key) != wanted.get(key)
    ]
    if differ:
        raise PrepError(
            f"{output}: holds another data set or other options: {'; '.join(differ)}. Nothing was changed; use the "
            "same options, choose another --out or delete the folder"
        )


def _short(value: Any) -> str:
    """A value in an error message; of a sha256 the first 8 digits tell enough."""
    return f"{value[:8]}..." if isinstance(value, str) and len(value) == 64 else json.dumps(value)


# ---- writing --------------------------------------------------------------------------------------------------------


def write(source: Source, out: Path | str, settings: Settings | None = None) -> None:
    """Write all splits of a source to `out`, a folder or a URL, or complete them. Prints what it does.

    With `settings.part` only these shards; index and `_info.json` follow in the call that finds all shards whole, be they several at once.

    Raises PrepError, with nothing overwritten, if `out` holds another catalogue or other options, and if too many images are unreadable
    (then there is no `_info.json`, and whole shards are kept). OSError: disk full, no permission; the same command continues.
    """
    began = time.monotonic()
    settings = settings or Settings()
    output = Output(out)
    output.make()
    plan = make_plan(source, out, settings)
    try:
        _write(plan, began)
    except FileNotFoundError:
        if plan.catalogue.folder.exists() or output.read_json("_info.json") is None:
            raise
        print(f"{output}: completed by another process meanwhile")  # which removed the catalogue
    finally:
        if source.inputs is None:  # the catalogue is this process's own
            shutil.rmtree(plan.catalogue.folder, ignore_errors=True)


def _write(plan: Plan, began: float) -> None:
    output, settings = plan.output, plan.settings
    if output.local:
        remove_leftovers(output.local)
    work = plan.work()
    mine = [work[k] for k in choose_part(settings.part, plan.counts)]
    if not {"_writing.json", "_info.json"} & output.sizes().keys():
        output.write_json("_writing.json", plan.recorded)
    whole = _whole_shards(plan, work)
    todo = [job for job in mine if job.shard.name not in whole]
    if len(todo) < len(mine):
        print(f"{output}: {len(mine) - len(todo)} of {len(mine)} shards are whole already and are kept")
    _warn_of_full_disk(plan, len(todo) / len(work))
    most = settings.max_unreadable * sum(plan.catalogue.splits.values())

    def on_result(name: str, sidecar: dict[str, Any]) -> None:
        whole[name] = sidecar
        _refuse_unreadable(whole, most, settings)

    num_images = sum(len(job.shard.places) for job in todo)
    jobs = ((write_shard, job, job.shard.name) for job in todo)
    run_jobs(jobs, settings.workers, "writing", num_jobs=len(todo), num_images=num_images, on_result=on_result)

    if settings.part is not None:
        whole = _whole_shards(plan, work)  # other parts have gone on meanwhile
        if missing := [f"{job.shard.name}.tar" for job in work if job.shard.name not in whole]:
            written = f"{len(todo)} shards of part {settings.part} written, {time.monotonic() - began:.1f} s"
            print(f"{output}: {written}; {len(missing)} of {len(work)} are still missing ({some(missing)}), other parts write them")
            return
    _refuse_unreadable(whole, most, settings)
    if not todo and output.read_json("_info.json") is not None and output.size("dataset.md") > 0:
        print(f"{output}: complete already")
        output.remove("_writing.json")
        discard(plan)
        return
    _complete(plan, work, whole)
    print(f"{output}: complete, {len(plan.catalogue.class_names)} classes, {time.monotonic() - began:.1f} s")


def _whole_shards(plan: Plan, work: list[Work]) -> dict[str, dict[str, Any]]:
    """Sidecars, by name, of the shards of this very plan that are there; a sidecar is written last."""
    sizes = plan.output.sizes()
    there = [job for job in work if {f"{job.shard.name}.json", f"{job.shard.name}.tar"} <= sizes.keys()]
    with ThreadPoolExecutor(16) as pool:  # a store takes a round trip for each
        sidecars = pool.map(lambda job: plan.output.read_json(f"{job.shard.name}.json"), there)
        return {
            job.shard.name: sidecar
            for job, sidecar in zip(there, sidecars, strict=True)
            if sidecar is not None and sidecar.get("plan") == job.plan and sizes[f"{job.shard.name}.tar"] == sidecar["bytes"]
            if still_holds(job, sidecar)
        }


def _refuse_unreadable(sidecars: Mapping[str, dict[str, Any]], most: float, settings: Settings) -> None:
    entries = [entry for sidecar in sidecars.values() for entry in sidecar["quarantined"]]
    if len(entries) > most:
        listed = "\n  ".join(f"{entry['key']} ({entry['file']}, {entry['name']}): {entry['reason']}" for entry in entries[:20])
        more = f"\n  and {len(entries) - 20} more" if len(entries) > 20 else ""
        raise PrepError(
            f"{len(entries)} images cannot be read, more than --max-unreadable {settings.max_unreadable} of all allows. Mend or replace "
            f"them (others may follow), or allow more; then run the same command again, whole shards are kept:\n  {listed}{more}"
        )


def _warn_of_full_disk(plan: Plan, share: float) -> None:
    free = plan.output.free_bytes()
    if free is not None and plan.num_bytes * share > free:
        needed = f"about {plan.num_bytes * share / 1e6:,.0f} MB are to be written, {free / 1e6:,.0f} MB are free"
        print(f"warning: {needed}; if the disk fills up, whole shards stay, and the same command goes on when there is room", flush=True)


def _complete(plan: Plan, work: list[Work], sidecars: Mapping[str, dict[str, Any]]) -> None:
    """Write all that describes the shards, which are whole."""
    from data_prep.card import write_card  # a command of its own, over the same flags, which know this module

    output, catalogue, filenames = plan.output, plan.catalogue, plan.filenames
    unknown = [job for job in work if not rows_path(catalogue, job.shard.name).exists()]
    jobs = ((scan_shard, job, job.shard.name) for job in unknown)
    run_jobs(jobs, plan.settings.workers, "reading whole shards", num_jobs=len(unknown))
    by_name = {f"{name}.tar": sidecar for name, sidecar in sidecars.items()}
    entries = [entry for job in work for entry in sidecars[job.shard.name]["quarantined"]]
    changed = sum((Counter(sidecar["changed"]) for sidecar in by_name.values()), Counter())
    found: dict[str, Any] = {
        "origin": catalogue.notes,
        "listed": dict(catalogue.splits),
        "changed": dict(sorted(changed.items())),
        "quarantined": len(entries),
    }
    classes: dict[str, Any] = {"class_names": catalogue.class_names, "num_classes": len(catalogue.class_names)}
    info = make_info(filenames, by_name, **plan.recorded, **found, **classes)
    with output.staging() as folder:
        for split, names in filenames.items():
            save_index(folder / f"{split}.index.npy", (np.load(rows_path(catalogue, name.removesuffix(".tar"))) for name in names))
            output.publish(folder / f"{split}.index.npy")
        if entries:
            with replacing(folder / "quarantine.jsonl") as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())
            output.publish(folder / "quarantine.jsonl")
        else:
            output.remove("quarantine.jsonl")
    output.write_json("_info.json", info)
    output.remove("_writing.json")
    for split, described in info["splits"].items():
        size = f"{sum(described['shard_bytes']) / 1e6:,.1f} MB"
        print(f"{split}: {described['num_samples']:,} samples in {len(described['filenames'])} shards, {size}")
    if changed:
        print("changed or remarkable: " + ", ".join(f"{count} {reason}" for reason, count in sorted(changed.items())))
    if entries:
        print(f"left out: {len(entries)} unreadable images, listed in {output}/quarantine.jsonl")
    discard(plan)
    write_card(output)


def discard(plan: Plan) -> None:
    """Remove catalogue and spool: all is written, or nothing is to be."""
    folder = plan.catalogue.folder
    for path in (folder, folder.with_name("_spool")):
        shutil.rmtree(path, ignore_errors=True)
    if folder.parent == _temporary_folder(plan.output):
        shutil.rmtree(folder.parent, ignore_errors=True)
